//! The functions that packetdrill calls.
//!
//! Pointers come from packetdrill's own calls. They are valid for the lengths that are passed with them, like those of
//! system calls, or null where a script passes null. Each `SAFETY` comment of this file refers to this.

use crate::interface::{Init, Interface, User};
use crate::tcp_info::{TcpInfo, ca_state};
use crate::world::{Errno, Kind, Push, Shared, World};
use crate::{WORLD, fail};
use libc::{
    c_char, c_int, c_long, c_longlong, c_uint, c_ulong, c_void, iovec, msghdr, pollfd, size_t, sockaddr, socklen_t,
    ssize_t, timeval,
};
use netmem_inet::Time;
use netmem_inet::tcp::sender::State;
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

/// A compile-time check that the function has the type that packetdrill expects.
const _: Init = packetdrill_interface_init;

/// Fills in `interface`. `flags` is the directory of [`crate::settings`].
#[unsafe(no_mangle)]
extern "C" fn packetdrill_interface_init(flags: *const c_char, interface: *mut Interface) {
    if flags.is_null() {
        fail("--so_flags=DIRECTORY says where the settings are");
    }
    // SAFETY: packetdrill passes a string.
    let directory = unsafe { CStr::from_ptr(flags) }.to_string_lossy();
    // The commands that the scripts run do not need the preloaded object.
    // SAFETY: packetdrill's other thread sleeps at this time, and reads no environment.
    unsafe { std::env::remove_var("LD_PRELOAD") };
    if WORLD.set(Shared::new(&directory)).is_err() {
        fail("there is one world");
    }
    let functions = Interface {
        user: std::ptr::null_mut(),
        free,
        socket,
        bind,
        listen,
        accept,
        connect,
        read,
        readv,
        recv,
        recvfrom,
        recvmsg,
        write,
        writev,
        send,
        sendto,
        sendmsg,
        fcntl,
        ioctl,
        close,
        shutdown,
        getsockopt: get_option,
        setsockopt: set_option,
        poll,
        netdev_send,
        netdev_receive,
        usleep,
        gettimeofday,
        epoll_create,
        epoll_ctl,
        epoll_wait,
        pipe,
        splice,
    };
    // SAFETY: packetdrill passes room for the structure.
    unsafe { interface.write(functions) };
}

fn shared() -> &'static Shared {
    WORLD.get().unwrap_or_else(|| fail("a call before packetdrill_interface_init"))
}

/// Returns a result in the way of system calls.
fn answer(result: Result<usize, Errno>) -> ssize_t {
    match result {
        Ok(value) => value as ssize_t,
        Err(error) => {
            // SAFETY: the calling thread's own `errno`.
            unsafe { *libc::__errno_location() = error };
            -1
        }
    }
}

fn status(result: Result<(), Errno>) -> c_int {
    answer(result.map(|()| 0)) as c_int
}

/// Makes a new descriptor of the process: a socket without an address, which is only a number for packetdrill.
fn descriptor() -> c_int {
    match UnixDatagram::unbound() {
        Ok(socket) => socket.into_raw_fd(),
        Err(error) => fail(&format!("no descriptor: {error}")),
    }
}

fn address(at: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    let len = len as usize;
    if at.is_null() || len < size_of::<libc::sockaddr_in>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: see above; it has the length of the family.
    match c_int::from(unsafe { (*at).sa_family }) {
        libc::AF_INET => {
            // SAFETY: as above.
            let v4 = unsafe { at.cast::<libc::sockaddr_in>().read_unaligned() };
            Ok(SocketAddr::new(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into(), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
            // SAFETY: as above.
            let v6 = unsafe { at.cast::<libc::sockaddr_in6>().read_unaligned() };
            Ok(SocketAddr::new(Ipv6Addr::from(v6.sin6_addr.s6_addr).into(), u16::from_be(v6.sin6_port)))
        }
        _ => Err(libc::EAFNOSUPPORT),
    }
}

fn put_address(address: SocketAddr, at: *mut sockaddr, len: *mut socklen_t) {
    if at.is_null() || len.is_null() {
        return;
    }
    // SAFETY: all fields of both may be zero.
    let (mut v4, mut v6): (libc::sockaddr_in, libc::sockaddr_in6) = unsafe { std::mem::zeroed() };
    let (from, size) = match address.ip() {
        IpAddr::V4(ip) => {
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = address.port().to_be();
            v4.sin_addr.s_addr = u32::from(ip).to_be();
            ((&raw const v4).cast::<u8>(), size_of_val(&v4))
        }
        IpAddr::V6(ip) => {
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = address.port().to_be();
            v6.sin6_addr.s6_addr = ip.octets();
            ((&raw const v6).cast::<u8>(), size_of_val(&v6))
        }
    };
    // SAFETY: see above; no more than there is room for.
    unsafe {
        std::ptr::copy_nonoverlapping(from, at.cast::<u8>(), size.min(*len as usize));
        *len = size as socklen_t;
    }
}

extern "C" fn free(_: User) {}

extern "C" fn socket(_: User, domain: c_int, _type: c_int, _protocol: c_int) -> c_int {
    let fd = descriptor();
    shared().call(|world| world.socket(fd, domain == libc::AF_INET));
    fd
}

extern "C" fn bind(_: User, fd: c_int, at: *const sockaddr, len: socklen_t) -> c_int {
    status(address(at, len).and_then(|local| shared().call(|world| world.bind(fd, local))))
}

extern "C" fn listen(_: User, fd: c_int, backlog: c_int) -> c_int {
    status(shared().call(|world| world.listen(fd, backlog.max(0) as usize)))
}

extern "C" fn accept(_: User, fd: c_int, at: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let result = shared().blocking(None, |world, _| world.accept(fd, descriptor));
    answer(result.map(|(fd, remote)| {
        put_address(remote, at, len);
        fd as usize
    })) as c_int
}

extern "C" fn connect(_: User, fd: c_int, at: *const sockaddr, len: socklen_t) -> c_int {
    let remote = match address(at, len) {
        Ok(remote) => remote,
        Err(error) => return status(Err(error)),
    };
    let mut began = None;
    status(shared().blocking(None, |world, _| {
        let id = match began {
            Some(id) => id,
            None => match world.connect(fd, remote) {
                Ok(id) => *began.insert(id),
                Err(error) => return Some(Err(error)),
            },
        };
        let nonblocking = world.sockets.get(&fd).is_some_and(|socket| socket.nonblocking);
        world.connected(id).or(nonblocking.then_some(Err(libc::EINPROGRESS)))
    }))
}

/// A receiving call: what it takes, and where it stores the bytes.
fn receive(fd: c_int, parts: &[iovec]) -> ssize_t {
    let len = parts.iter().map(|part| part.iov_len).sum();
    let null = parts.iter().any(|part| part.iov_base.is_null() && part.iov_len > 0);
    answer(
        shared()
            .blocking(None, |world, _| {
                if null {
                    return Some(Err(libc::EFAULT));
                }
                world.read(fd, len)
            })
            .map(|bytes| {
                let mut at = &bytes[..];
                for part in parts {
                    let (here, rest) = at.split_at(part.iov_len.min(at.len()));
                    // SAFETY: see above.
                    unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), part.iov_base.cast::<u8>(), here.len()) };
                    at = rest;
                }
                bytes.len()
            }),
    )
}

fn transmit(fd: c_int, parts: &[iovec], flags: c_int) -> ssize_t {
    if parts.iter().any(|part| part.iov_base.is_null() && part.iov_len > 0) {
        return answer(Err(libc::EFAULT));
    }
    let mut rest = Vec::new();
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        // SAFETY: see above.
        rest.extend_from_slice(unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) });
    }
    let len = rest.len();
    let push = match flags {
        flags if flags & libc::MSG_EOR != 0 => Push::Record,
        flags if flags & libc::MSG_MORE != 0 => Push::More,
        _ => Push::Plain,
    };
    let mut waited = false;
    answer(shared().blocking(None, |world, _| {
        let nonblocking =
            flags & libc::MSG_DONTWAIT != 0 || world.sockets.get(&fd).is_some_and(|socket| socket.nonblocking);
        match world.write(fd, &mut rest, push, waited) {
            Some(Err(_)) | None if nonblocking && rest.len() < len => Some(Ok(len - rest.len())),
            None if nonblocking => Some(Err(libc::EAGAIN)),
            None => {
                waited = true;
                None
            }
            Some(Ok(())) => Some(Ok(len)),
            Some(Err(_)) if rest.len() < len => Some(Ok(len - rest.len())),
            Some(Err(error)) => Some(Err(error)),
        }
    }))
}

fn part(at: *const c_void, len: size_t) -> [iovec; 1] {
    [iovec { iov_base: at.cast_mut(), iov_len: len }]
}

fn parts<'a>(at: *const iovec, count: usize) -> &'a [iovec] {
    if at.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: see above. It lives as long as the call.
    unsafe { std::slice::from_raw_parts(at, count) }
}

extern "C" fn read(_: User, fd: c_int, at: *mut c_void, len: size_t) -> ssize_t {
    receive(fd, &part(at, len))
}

extern "C" fn readv(_: User, fd: c_int, at: *const iovec, count: c_int) -> ssize_t {
    receive(fd, parts(at, count.max(0) as usize))
}

extern "C" fn recv(_: User, fd: c_int, at: *mut c_void, len: size_t, _flags: c_int) -> ssize_t {
    receive(fd, &part(at, len))
}

extern "C" fn recvfrom(
    _: User,
    fd: c_int,
    at: *mut c_void,
    len: size_t,
    _: c_int,
    _: *mut sockaddr,
    _: *mut socklen_t,
) -> ssize_t {
    receive(fd, &part(at, len))
}

extern "C" fn recvmsg(_: User, fd: c_int, message: *mut msghdr, _flags: c_int) -> ssize_t {
    // SAFETY: see above.
    let message = unsafe { &*message };
    receive(fd, parts(message.msg_iov, message.msg_iovlen))
}

extern "C" fn write(_: User, fd: c_int, at: *const c_void, len: size_t) -> ssize_t {
    transmit(fd, &part(at, len), 0)
}

extern "C" fn writev(_: User, fd: c_int, at: *const iovec, count: c_int) -> ssize_t {
    transmit(fd, parts(at, count.max(0) as usize), 0)
}

extern "C" fn send(_: User, fd: c_int, at: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    transmit(fd, &part(at, len), flags)
}

extern "C" fn sendto(
    _: User,
    fd: c_int,
    at: *const c_void,
    len: size_t,
    flags: c_int,
    _: *const sockaddr,
    _: socklen_t,
) -> ssize_t {
    transmit(fd, &part(at, len), flags)
}

extern "C" fn sendmsg(_: User, fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: see above.
    let message = unsafe { &*message };
    transmit(fd, parts(message.msg_iov, message.msg_iovlen), flags)
}

extern "C" fn fcntl(_: User, fd: c_int, command: c_int, argument: c_long) -> c_int {
    answer(shared().call(|world| {
        let socket = world.sockets.get_mut(&fd).ok_or(libc::EBADF)?;
        match command {
            libc::F_SETFL => {
                socket.nonblocking = argument as c_int & libc::O_NONBLOCK != 0;
                Ok(0)
            }
            libc::F_GETFL => Ok((libc::O_RDWR | if socket.nonblocking { libc::O_NONBLOCK } else { 0 }) as usize),
            _ => Err(libc::EINVAL),
        }
    })) as c_int
}

extern "C" fn ioctl(_: User, fd: c_int, request: c_ulong, value: *mut c_int) -> c_int {
    status(shared().call(|world| {
        let (_, stream) = world.stream(fd)?;
        let n = match request {
            libc::FIONREAD => stream.readable(),
            libc::TIOCOUTQ => stream.queued(),
            _ => return Err(libc::EINVAL),
        };
        // SAFETY: see above.
        unsafe { value.write(n as c_int) };
        Ok(())
    }))
}

extern "C" fn close(_: User, fd: c_int) -> c_int {
    let result = shared().call(|world| world.close(fd));
    // SAFETY: `descriptor` made it, and packetdrill closes it once.
    unsafe { libc::close(fd) };
    status(result)
}

extern "C" fn shutdown(_: User, fd: c_int, how: c_int) -> c_int {
    status(shared().call(|world| world.shutdown(fd, how)))
}

/// Writes a number as an option's value.
fn put_number(n: c_int, value: *mut c_void, len: *mut socklen_t) {
    let bytes = n.to_ne_bytes();
    // SAFETY: see above.
    unsafe {
        let room = (*len as usize).min(bytes.len());
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast::<u8>(), room);
        *len = room as socklen_t;
    }
}

extern "C" fn get_option(
    _: User,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    status(shared().call(|world| {
        let socket = world.sockets.get(&fd).ok_or(libc::EBADF)?;
        let options = world.options(fd)?;
        let n = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => options.send_buffer as c_int,
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                world.stream(fd).map_or(0, |(_, stream)| stream.failure.take().unwrap_or(0))
            }
            (libc::SOL_TCP, libc::TCP_MAXSEG) => match socket.kind {
                Kind::Stream(_) => world.stream(fd)?.1.connection.info(Time::ZERO).send.segment_size as c_int,
                _ if options.max_segment != 0 => options.max_segment.into(),
                _ => 536,
            },
            (libc::SOL_TCP, libc::TCP_NODELAY) => options.no_delay.into(),
            (libc::SOL_TCP, libc::TCP_CORK) => options.cork.into(),
            (libc::SOL_TCP, TCP_NOTSENT_LOWAT) => options.not_sent as c_int,
            (libc::SOL_TCP, libc::TCP_USER_TIMEOUT) => options.user_timeout.as_millis() as c_int,
            _ => return Err(libc::ENOPROTOOPT),
        };
        put_number(n, value, len);
        Ok(())
    }))
}

const TCP_NOTSENT_LOWAT: c_int = 25;

extern "C" fn set_option(_: User, fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int {
    let mut bytes = [0; 4];
    // SAFETY: see above.
    unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), bytes.as_mut_ptr(), (len as usize).min(4)) };
    let n = c_int::from_ne_bytes(bytes);
    status(shared().call(|world| {
        let mut options = world.options(fd)?;
        match (level, name) {
            // The value is doubled, like in Linux, which adds room for its own use: socket(7).
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => options.send_buffer = n.max(0) as usize * 2,
            (libc::SOL_SOCKET, _) | (libc::SOL_IP, libc::IP_TOS | libc::IP_MTU_DISCOVER) => (),
            (libc::SOL_TCP, libc::TCP_MAXSEG) => options.max_segment = n as u16,
            (libc::SOL_TCP, libc::TCP_NODELAY) => options.no_delay = n != 0,
            (libc::SOL_TCP, libc::TCP_CORK) => options.cork = n != 0,
            (libc::SOL_TCP, TCP_NOTSENT_LOWAT) => options.not_sent = n.max(0) as usize,
            (libc::SOL_TCP, libc::TCP_USER_TIMEOUT) => options.user_timeout = Duration::from_millis(n.max(0) as u64),
            _ => return Err(libc::ENOPROTOOPT),
        }
        world.set_options(fd, options);
        Ok(())
    }))
}

extern "C" fn poll(_: User, descriptors: *mut pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    // SAFETY: see above.
    let descriptors = unsafe { std::slice::from_raw_parts_mut(descriptors, count as usize) };
    let deadline = u64::try_from(timeout).ok().map(Duration::from_millis);
    answer(shared().blocking(deadline, |world, over| {
        let mut ready = 0;
        for descriptor in &mut *descriptors {
            let always = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
            descriptor.revents = world.ready(descriptor.fd) & (descriptor.events | always);
            ready += usize::from(descriptor.revents != 0);
        }
        (ready > 0 || over).then_some(Ok(ready))
    })) as c_int
}

extern "C" fn netdev_send(_: User, at: *const c_void, len: size_t) -> c_int {
    // SAFETY: see above.
    let bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) };
    shared().call(|world| world.receive(bytes));
    0
}

extern "C" fn netdev_receive(_: User, at: *mut c_void, len: *mut size_t, micros: *mut c_longlong) -> c_int {
    let (packet, time) = shared().sent();
    // SAFETY: see above.
    unsafe {
        let room = packet.len().min(*len);
        std::ptr::copy_nonoverlapping(packet.as_ptr(), at.cast::<u8>(), room);
        *len = room;
        *micros = time.micros() as c_longlong;
    }
    0
}

extern "C" fn usleep(_: User, micros: libc::useconds_t) -> c_int {
    shared().sleep(Duration::from_micros(micros.into()));
    0
}

extern "C" fn gettimeofday(_: User, at: *mut timeval, _zone: *mut c_void) -> c_int {
    let micros = shared().time().micros();
    // SAFETY: see above.
    unsafe { at.write(timeval { tv_sec: (micros / 1_000_000) as _, tv_usec: (micros % 1_000_000) as _ }) };
    0
}

extern "C" fn epoll_create(_: User, _: c_int) -> c_int {
    status(Err(libc::ENOSYS))
}

extern "C" fn epoll_ctl(_: User, _: c_int, _: c_int, _: c_int, _: *mut c_void) -> c_int {
    status(Err(libc::ENOSYS))
}

extern "C" fn epoll_wait(_: User, _: c_int, _: *mut c_void, _: c_int, _: c_int) -> c_int {
    status(Err(libc::ENOSYS))
}

extern "C" fn pipe(_: User, _: *mut c_int) -> c_int {
    status(Err(libc::ENOSYS))
}

extern "C" fn splice(_: User, _: c_int, _: *mut c_void, _: c_int, _: *mut c_void, _: size_t, _: c_uint) -> ssize_t {
    answer(Err(libc::ENOSYS))
}

// ---- functions of the C library that the preloaded object replaces

/// `TCP_INFO`, and the other options that packetdrill reads, for descriptors of this object. For all other descriptors
/// the system is called.
#[unsafe(no_mangle)]
extern "C" fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int {
    const TCP_CC_INFO: c_int = 26;
    let ours = WORLD.get().filter(|shared| shared.lock().sockets.contains_key(&fd));
    // SAFETY: the caller's pointers are those of the system call.
    unsafe {
        match (ours, level, name) {
            (Some(shared), libc::SOL_TCP, libc::TCP_INFO) => {
                let info = shared.call(|world| info(world, fd));
                let room = (*len as usize).min(size_of::<TcpInfo>());
                std::ptr::copy_nonoverlapping((&raw const info).cast::<u8>(), value.cast::<u8>(), room);
                0
            }
            (Some(_), libc::SOL_TCP, TCP_CC_INFO) => {
                *len = 0;
                0
            }
            (Some(_), libc::SOL_SOCKET, libc::SO_MEMINFO) => 0,
            _ => libc::syscall(libc::SYS_getsockopt, fd, level, name, value, len) as c_int,
        }
    }
}

/// The state of the connection of a descriptor.
fn info(world: &mut World, fd: c_int) -> TcpInfo {
    let now = world.now;
    let Ok((_, stream)) = world.stream(fd) else { return TcpInfo::default() };
    let info = stream.connection.info(now);
    let send = info.send;
    let micros = |time: Duration| time.as_micros() as u32;
    TcpInfo {
        ca_state: match send.state {
            State::Open => ca_state::OPEN,
            State::Disorder => ca_state::DISORDER,
            State::Cwr => ca_state::CWR,
            State::Recovery => ca_state::RECOVERY,
            State::Loss => ca_state::LOSS,
        },
        probes: send.probes as u8,
        backoff: send.backoff as u8,
        rto: micros(send.rto),
        snd_mss: send.segment_size,
        rcv_mss: info.received_mss,
        unacked: send.unacked,
        sacked: send.sacked,
        lost: send.lost,
        retrans: send.retrans,
        last_data_recv: info.idle.as_millis() as u32,
        pmtu: send.max_payload,
        rtt: micros(send.rtt),
        rttvar: micros(send.rttvar),
        snd_ssthresh: send.ssthresh,
        snd_cwnd: send.cwnd,
        advmss: info.announced_mss.into(),
        reordering: send.reordering,
        notsent_bytes: send.unsent as u32,
        min_rtt: micros(send.min_rtt),
        busy_time: send.busy.as_micros() as u64,
        rwnd_limited: send.window_limited.as_micros() as u64,
        sndbuf_limited: stream.buffer_limited(now).as_micros() as u64,
        delivered: send.delivered,
        dsack_dups: send.duplicates,
        reord_seen: send.reordered,
        ..TcpInfo::default()
    }
}

/// Each call returns one tick more.
#[unsafe(no_mangle)]
extern "C" fn times(_: *mut c_void) -> c_long {
    use std::sync::atomic::{AtomicI64, Ordering};
    static TICKS: AtomicI64 = AtomicI64::new(1);
    TICKS.fetch_add(1, Ordering::Relaxed)
}

#[unsafe(no_mangle)]
extern "C" fn mlockall(_: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn sched_setscheduler(_: libc::pid_t, _: c_int, _: *const c_void) -> c_int {
    0
}
