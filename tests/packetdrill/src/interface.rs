//! packetdrill's interface for stacks in shared objects: a structure of function pointers that the
//! object fills in.
//!
//! The declarations follow the layout of the structure `packetdrill_interface`. The two variadic
//! functions are declared with the one argument with which they are called: on the ABIs of Linux,
//! the caller passes it in the same place.

use libc::{
    c_char, c_int, c_long, c_longlong, c_uint, c_ulong, c_void, iovec, msghdr, pollfd, size_t, sockaddr, socklen_t,
    ssize_t, timeval,
};

/// The pointer that packetdrill passes to each function. It is not used, because there is one
/// world.
pub(crate) type User = *mut c_void;

/// The structure.
#[repr(C)]
pub struct Interface {
    pub(crate) user: User,
    pub(crate) free: extern "C" fn(User),
    pub(crate) socket: extern "C" fn(User, c_int, c_int, c_int) -> c_int,
    pub(crate) bind: extern "C" fn(User, c_int, *const sockaddr, socklen_t) -> c_int,
    pub(crate) listen: extern "C" fn(User, c_int, c_int) -> c_int,
    pub(crate) accept: extern "C" fn(User, c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    pub(crate) connect: extern "C" fn(User, c_int, *const sockaddr, socklen_t) -> c_int,
    pub(crate) read: extern "C" fn(User, c_int, *mut c_void, size_t) -> ssize_t,
    pub(crate) readv: extern "C" fn(User, c_int, *const iovec, c_int) -> ssize_t,
    pub(crate) recv: extern "C" fn(User, c_int, *mut c_void, size_t, c_int) -> ssize_t,
    pub(crate) recvfrom:
        extern "C" fn(User, c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t,
    pub(crate) recvmsg: extern "C" fn(User, c_int, *mut msghdr, c_int) -> ssize_t,
    pub(crate) write: extern "C" fn(User, c_int, *const c_void, size_t) -> ssize_t,
    pub(crate) writev: extern "C" fn(User, c_int, *const iovec, c_int) -> ssize_t,
    pub(crate) send: extern "C" fn(User, c_int, *const c_void, size_t, c_int) -> ssize_t,
    pub(crate) sendto: extern "C" fn(User, c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t,
    pub(crate) sendmsg: extern "C" fn(User, c_int, *const msghdr, c_int) -> ssize_t,
    pub(crate) fcntl: extern "C" fn(User, c_int, c_int, c_long) -> c_int,
    pub(crate) ioctl: extern "C" fn(User, c_int, c_ulong, *mut c_int) -> c_int,
    pub(crate) close: extern "C" fn(User, c_int) -> c_int,
    pub(crate) shutdown: extern "C" fn(User, c_int, c_int) -> c_int,
    pub(crate) getsockopt: extern "C" fn(User, c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int,
    pub(crate) setsockopt: extern "C" fn(User, c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
    pub(crate) poll: extern "C" fn(User, *mut pollfd, libc::nfds_t, c_int) -> c_int,
    pub(crate) netdev_send: extern "C" fn(User, *const c_void, size_t) -> c_int,
    pub(crate) netdev_receive: extern "C" fn(User, *mut c_void, *mut size_t, *mut c_longlong) -> c_int,
    pub(crate) usleep: extern "C" fn(User, libc::useconds_t) -> c_int,
    pub(crate) gettimeofday: extern "C" fn(User, *mut timeval, *mut c_void) -> c_int,
    pub(crate) epoll_create: extern "C" fn(User, c_int) -> c_int,
    pub(crate) epoll_ctl: extern "C" fn(User, c_int, c_int, c_int, *mut c_void) -> c_int,
    pub(crate) epoll_wait: extern "C" fn(User, c_int, *mut c_void, c_int, c_int) -> c_int,
    pub(crate) pipe: extern "C" fn(User, *mut c_int) -> c_int,
    pub(crate) splice: extern "C" fn(User, c_int, *mut c_void, c_int, *mut c_void, size_t, c_uint) -> ssize_t,
}

/// The function that packetdrill looks up.
pub(crate) type Init = unsafe extern "C" fn(*const c_char, *mut Interface);
