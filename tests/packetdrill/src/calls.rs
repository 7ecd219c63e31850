//! The functions that packetdrill calls.
//!
//! Pointers come from packetdrill's own calls. They are valid for the lengths that are passed with
//! them, like those of system calls, or null where a script passes null. Each `SAFETY` comment of
//! this file refers to this.
//!
//! What the object does not have is an error: a script that needs it fails.

use crate::address::{address, put_address};
use crate::errno::Errno;
use crate::fail::fail;
use crate::interface::{Interface, User};
use crate::sockopt;
use crate::stack::Push;
use crate::world::{Reading, shared};
use libc::{
    c_int, c_long, c_longlong, c_uint, c_ulong, c_void, iovec, msghdr, pollfd, size_t, sockaddr, socklen_t, ssize_t,
    timeval,
};
use std::net::Shutdown;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

/// The functions of this module.
pub(crate) fn interface() -> Interface {
    Interface {
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
        getsockopt: sockopt::get,
        setsockopt: sockopt::set,
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
    }
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

pub(crate) fn status(result: Result<(), Errno>) -> c_int {
    answer(result.map(|()| 0)) as c_int
}

/// Makes a new descriptor of the process: a socket without an address, which is only a number for
/// packetdrill.
fn descriptor() -> c_int {
    match UnixDatagram::unbound() {
        Ok(socket) => socket.into_raw_fd(),
        Err(error) => fail(&format!("no descriptor: {error}")),
    }
}

extern "C" fn free(_: User) {}

extern "C" fn socket(_: User, domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    if ![libc::AF_INET, libc::AF_INET6].contains(&domain) {
        return status(Err(libc::EAFNOSUPPORT));
    }
    if kind & !flags != libc::SOCK_STREAM || ![0, libc::IPPROTO_TCP].contains(&protocol) {
        return status(Err(libc::EPROTONOSUPPORT));
    }
    let fd = descriptor();
    shared().call(|world| world.socket(fd, domain == libc::AF_INET, kind & libc::SOCK_NONBLOCK != 0));
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
    answer(result.map(|(new, remote)| {
        let v4 = shared().lock().sockets.get(&fd).is_none_or(|socket| socket.v4);
        put_address(remote, v4, at, len);
        new as usize
    })) as c_int
}

extern "C" fn connect(_: User, fd: c_int, at: *const sockaddr, len: socklen_t) -> c_int {
    let remote = match address(at, len) {
        Ok(remote) => remote,
        Err(error) => return status(Err(error)),
    };
    status(shared().blocking(None, |world, _| world.connect(fd, remote)))
}

/// A receiving call, which stores the bytes in `parts`.
fn receive(fd: c_int, parts: &[iovec], flags: c_int) -> ssize_t {
    let known = libc::MSG_DONTWAIT | libc::MSG_PEEK | libc::MSG_WAITALL | libc::MSG_TRUNC | libc::MSG_NOSIGNAL;
    if flags & libc::MSG_OOB != 0 {
        // Like Linux with SO_OOBINLINE: urgent data is in line.
        return answer(Err(libc::EINVAL));
    }
    if flags & !known != 0 {
        // MSG_ERRQUEUE, for example: there is no error queue.
        return answer(Err(libc::EOPNOTSUPP));
    }
    let how = Reading {
        at_once: flags & libc::MSG_DONTWAIT != 0,
        peek: flags & libc::MSG_PEEK != 0,
        all: flags & libc::MSG_WAITALL != 0,
    };
    let len = parts.iter().map(|part| part.iov_len).sum();
    // The bytes are dropped.
    let drops = flags & libc::MSG_TRUNC != 0;
    let null = !drops && parts.iter().any(|part| part.iov_base.is_null() && part.iov_len > 0);
    let mut bytes = Vec::new();
    let result = shared().blocking(None, |world, _| {
        if null {
            return Some(Err(libc::EFAULT));
        }
        world.read(fd, how, &mut bytes, len)
    });
    answer(result.map(|()| {
        let mut at = if drops { &[] } else { &bytes[..] };
        for part in parts {
            let (here, rest) = at.split_at(part.iov_len.min(at.len()));
            // SAFETY: see above.
            unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), part.iov_base.cast::<u8>(), here.len()) };
            at = rest;
        }
        bytes.len()
    }))
}

fn transmit(fd: c_int, parts: &[iovec], flags: c_int) -> ssize_t {
    let known = libc::MSG_DONTWAIT | libc::MSG_MORE | libc::MSG_EOR | libc::MSG_OOB | libc::MSG_NOSIGNAL;
    // How a stack moves payload is its own decision.
    if flags & !(known | libc::MSG_ZEROCOPY) != 0 {
        return answer(Err(libc::EOPNOTSUPP));
    }
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
        flags if flags & libc::MSG_OOB != 0 => Push::Urgent,
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
    receive(fd, &part(at, len), 0)
}

extern "C" fn readv(_: User, fd: c_int, at: *const iovec, count: c_int) -> ssize_t {
    receive(fd, parts(at, count.max(0) as usize), 0)
}

extern "C" fn recv(_: User, fd: c_int, at: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    receive(fd, &part(at, len), flags)
}

extern "C" fn recvfrom(
    _: User,
    fd: c_int,
    at: *mut c_void,
    len: size_t,
    flags: c_int,
    _: *mut sockaddr,
    _: *mut socklen_t,
) -> ssize_t {
    receive(fd, &part(at, len), flags)
}

extern "C" fn recvmsg(_: User, fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: see above.
    let message = unsafe { &mut *message };
    // There are no flags, no control messages, and no source. packetdrill compares them with what
    // the script expects, which it has put here before.
    (message.msg_flags, message.msg_controllen, message.msg_namelen) = (0, 0, 0);
    receive(fd, parts(message.msg_iov, message.msg_iovlen), flags)
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
    if message.msg_controllen > 0 {
        return answer(Err(libc::EOPNOTSUPP));
    }
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

/// Bytes that were not sent (linux/sockios.h).
const SIOCOUTQNSD: c_ulong = 0x894b;

extern "C" fn ioctl(_: User, fd: c_int, request: c_ulong, value: *mut c_int) -> c_int {
    status(shared().call(|world| {
        let id = world.connection(fd)?;
        let sizes = world.stack.sizes(id);
        let size = match request {
            libc::FIONREAD => sizes.readable,
            libc::TIOCOUTQ => sizes.unacknowledged,
            SIOCOUTQNSD => sizes.unsent,
            _ => None,
        };
        let size = size.ok_or(libc::EINVAL)?;
        // SAFETY: see above.
        unsafe { value.write(size as c_int) };
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
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return status(Err(libc::EINVAL)),
    };
    status(shared().call(|world| world.shutdown(fd, how)))
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
    shared().call(|world| world.stack.receive_packet(world.now, bytes));
    0
}

extern "C" fn netdev_receive(_: User, at: *mut c_void, len: *mut size_t, micros: *mut c_longlong) -> c_int {
    let (packet, time) = shared().sent();
    // SAFETY: see above.
    unsafe {
        let room = packet.len().min(*len);
        std::ptr::copy_nonoverlapping(packet.as_ptr(), at.cast::<u8>(), room);
        *len = room;
        *micros = time.as_micros() as c_longlong;
    }
    0
}

extern "C" fn usleep(_: User, micros: libc::useconds_t) -> c_int {
    shared().sleep(Duration::from_micros(micros.into()));
    0
}

extern "C" fn gettimeofday(_: User, at: *mut timeval, _zone: *mut c_void) -> c_int {
    let micros = shared().time().as_micros();
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
