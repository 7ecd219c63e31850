//! `getsockopt` and `setsockopt`. An option that the stack does not have is refused, so that a
//! script which needs it fails.
//!
//! Pointers are as in [`calls`](crate::calls). Each `SAFETY` comment of this file refers to this.

use crate::calls::status;
use crate::errno::Errno;
use crate::interface::User;
use crate::options::{Options, SocketOption, TCP_NOTSENT_LOWAT};
use crate::world::{SocketKind, World, shared};
use libc::{c_int, c_void, socklen_t};
use std::time::Duration;

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

pub(crate) extern "C" fn get(
    _: User,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    status(shared().call(|world| {
        let n = number(world, fd, level, name)?;
        put_number(n, value, len);
        Ok(())
    }))
}

/// Refuses an option that the stack does not have.
fn check(world: &World, level: c_int, name: c_int) -> Result<(), Errno> {
    match SocketOption::named(level, name) {
        Some(option) if !world.stack.has_option(option) => Err(libc::ENOPROTOOPT),
        _ => Ok(()),
    }
}

/// The value of an option.
fn number(world: &mut World, fd: c_int, level: c_int, name: c_int) -> Result<c_int, Errno> {
    let kind = world.sockets.get(&fd).ok_or(libc::EBADF)?.kind;
    let options = world.options(fd)?;
    if let (SocketKind::Connection(id), libc::SOL_TCP, libc::TCP_MAXSEG) = (kind, level, name) {
        // The state of the connection, whether or not the stack has the option.
        return world.stack.sizes(id).segment.map(|segment| segment as c_int).ok_or(libc::ENOPROTOOPT);
    }
    check(world, level, name)?;
    Ok(match (level, name) {
        (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => options.send_buffer as c_int,
        (libc::SOL_SOCKET, libc::SO_ERROR) => match kind {
            SocketKind::Connection(id) => world.stack.take_error(id).unwrap_or(0),
            _ => 0,
        },
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => options.keep_alive.into(),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => 1,
        (libc::SOL_TCP, libc::TCP_MAXSEG) if options.max_segment != 0 => options.max_segment.into(),
        (libc::SOL_TCP, libc::TCP_MAXSEG) => 536,
        (libc::SOL_TCP, libc::TCP_NODELAY) => options.no_delay.into(),
        (libc::SOL_TCP, libc::TCP_CORK) => options.cork.into(),
        (libc::SOL_TCP, libc::TCP_KEEPIDLE) => options.keep_idle.as_secs() as c_int,
        (libc::SOL_TCP, libc::TCP_KEEPINTVL) => options.keep_interval.as_secs() as c_int,
        (libc::SOL_TCP, libc::TCP_KEEPCNT) => options.keep_probes.into(),
        (libc::SOL_TCP, TCP_NOTSENT_LOWAT) => options.not_sent as c_int,
        (libc::SOL_TCP, libc::TCP_USER_TIMEOUT) => options.user_timeout.as_millis() as c_int,
        _ => return Err(libc::ENOPROTOOPT),
    })
}

pub(crate) extern "C" fn set(
    _: User,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let mut numbers = [0; 2];
    let room = size_of_val(&numbers).min(len as usize);
    // SAFETY: see above.
    unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), (&raw mut numbers).cast::<u8>(), room) };
    status(shared().call(|world| {
        let mut options = world.options(fd)?;
        check(world, level, name)?;
        if (level, name) == (libc::SOL_TCP, libc::TCP_QUICKACK) {
            let id = world.connection(fd)?;
            world.stack.set_quick_ack(id, numbers[0] != 0);
            return Ok(());
        }
        change(&mut options, level, name, numbers)?;
        world.set_options(fd, options);
        Ok(())
    }))
}

/// Changes an option. The value is a number, or two of `struct linger`.
fn change(options: &mut Options, level: c_int, name: c_int, [n, second]: [c_int; 2]) -> Result<(), Errno> {
    let seconds = Duration::from_secs(n.max(0) as u64);
    match (level, name) {
        // No other process has sockets here, and no packet filter reads marks.
        (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_REUSEPORT | libc::SO_MARK) => (),
        // There is no error queue that reports when payload was sent.
        (libc::SOL_SOCKET, libc::SO_ZEROCOPY) => (),
        // Urgent data is in line always (RFC 6093).
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) if n != 0 => (),
        // Twice the value that was set, like in Linux, which adds room for its own use: socket(7).
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => options.send_buffer = n.max(0) as usize * 2,
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => options.keep_alive = n != 0,
        // `close` does not wait.
        (libc::SOL_SOCKET, libc::SO_LINGER) if n == 0 || second == 0 => options.resets = n != 0,
        (libc::SOL_IP, libc::IP_TOS) | (libc::SOL_IPV6, libc::IPV6_TCLASS) => options.traffic_class = n as u8,
        (libc::SOL_IP, libc::IP_TTL) | (libc::SOL_IPV6, libc::IPV6_UNICAST_HOPS) => options.hop_limit = n as u8,
        // Packets are not fragmented on their way: packetdrill's network does not do so.
        (libc::SOL_IP, libc::IP_MTU_DISCOVER) | (libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER)
            if matches!(n, libc::IP_PMTUDISC_DONT | libc::IP_PMTUDISC_WANT | libc::IP_PMTUDISC_DO) =>
        {
            options.ignores_path = n == libc::IP_PMTUDISC_DONT;
        }
        (libc::SOL_TCP, libc::TCP_MAXSEG) => options.max_segment = n as u16,
        (libc::SOL_TCP, libc::TCP_NODELAY) => options.no_delay = n != 0,
        (libc::SOL_TCP, libc::TCP_CORK) => options.cork = n != 0,
        (libc::SOL_TCP, libc::TCP_KEEPIDLE) => options.keep_idle = seconds,
        (libc::SOL_TCP, libc::TCP_KEEPINTVL) => options.keep_interval = seconds,
        (libc::SOL_TCP, libc::TCP_KEEPCNT) => options.keep_probes = n as u8,
        (libc::SOL_TCP, libc::TCP_SYNCNT) => options.syn_retries = n.max(0) as u32,
        (libc::SOL_TCP, TCP_NOTSENT_LOWAT) => options.not_sent = n.max(0) as usize,
        (libc::SOL_TCP, libc::TCP_USER_TIMEOUT) => options.user_timeout = Duration::from_millis(n.max(0) as u64),
        _ => return Err(libc::ENOPROTOOPT),
    }
    Ok(())
}
