//! The system calls of an AF_XDP socket.

use crate::if_xdp::TX_METADATA_LEN;
use crate::layout::Layout;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::{io, mem};

/// Makes a socket that is not bound. Needs CAP_NET_RAW.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// `setsockopt` with an option that is a plain value.
pub(crate) fn set<T: Copy>(fd: BorrowedFd<'_>, level: i32, option: i32, value: &T) -> io::Result<()> {
    let len = mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of a value that is there.
    let done = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, ptr::from_ref(value).cast(), len) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// `getsockopt` of an option that consists of integers. Fields that an older kernel does not fill
/// in are 0.
fn get<T: Integers>(fd: BorrowedFd<'_>, level: i32, option: i32) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes of a value that is there.
    let done = unsafe { libc::getsockopt(fd.as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut len) };
    // SAFETY: `Integers`: zeros are a value, and so is what the kernel writes.
    if done == 0 { Ok(unsafe { value.assume_init() }) } else { Err(io::Error::last_os_error()) }
}

/// # Safety
///
/// All bytes of the type may have any value.
unsafe trait Integers: Copy {}
// SAFETY: made of integers.
unsafe impl Integers for libc::xdp_mmap_offsets {}
// SAFETY: made of integers.
unsafe impl Integers for libc::xdp_statistics {}
// SAFETY: made of integers.
unsafe impl Integers for libc::xdp_options {}
// SAFETY: an integer.
unsafe impl Integers for libc::c_int {}
// SAFETY: an integer.
unsafe impl Integers for u64 {}

// SAFETY: made of integers.
unsafe impl Integers for libc::ucred {}

/// The process and the user at the other end of a connected Unix socket, as they were when it was
/// connected. The number of the process is 0 if it has none in the PID namespace of this process.
pub(crate) fn peer(fd: BorrowedFd<'_>) -> io::Result<(libc::pid_t, libc::uid_t)> {
    get(fd, libc::SOL_SOCKET, libc::SO_PEERCRED).map(|peer: libc::ucred| (peer.pid, peer.uid))
}

/// Registers the memory from `at` as the socket's UMEM. The kernel pins it.
pub(crate) fn register(fd: BorrowedFd<'_>, at: *mut u8, layout: &Layout) -> io::Result<()> {
    let mut flags = 0;
    if layout.tx_metadata {
        flags |= libc::XDP_UMEM_TX_METADATA_LEN;
    }
    if layout.software_checksums {
        flags |= libc::XDP_UMEM_TX_SW_CSUM;
    }
    // SAFETY: made of integers.
    let mut reg: libc::xdp_umem_reg = unsafe { mem::zeroed() };
    reg.addr = at.addr() as u64;
    reg.len = layout.len as u64;
    reg.chunk_size = layout.chunk as u32;
    reg.headroom = layout.headroom;
    reg.flags = flags;
    reg.tx_metadata_len = if layout.tx_metadata { TX_METADATA_LEN as u32 } else { 0 };
    set(fd, libc::SOL_XDP, libc::XDP_UMEM_REG, &reg)
}

pub(crate) fn offsets(fd: BorrowedFd<'_>) -> io::Result<libc::xdp_mmap_offsets> {
    get(fd, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS)
}

pub(crate) fn statistics(fd: BorrowedFd<'_>) -> io::Result<libc::xdp_statistics> {
    get(fd, libc::SOL_XDP, libc::XDP_STATISTICS)
}

/// Whether the socket is in zero-copy mode.
pub(crate) fn is_zero_copy(fd: BorrowedFd<'_>) -> io::Result<bool> {
    get(fd, libc::SOL_XDP, libc::XDP_OPTIONS).map(|o: libc::xdp_options| o.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
}

/// Reads and clears the pending error of the socket, and returns whether there was one. The kernel
/// reports in this way that the interface is gone.
pub(crate) fn take_error(fd: BorrowedFd<'_>) -> bool {
    get(fd, libc::SOL_SOCKET, libc::SO_ERROR).is_ok_and(|error: i32| error != 0)
}

/// The number of a socket, which no other socket gets until the system is restarted.
pub(crate) fn cookie(fd: BorrowedFd<'_>) -> io::Result<u64> {
    get(fd, libc::SOL_SOCKET, libc::SO_COOKIE)
}

/// The number of a socket's network namespace (Linux 5.14).
pub(crate) fn netns(fd: BorrowedFd<'_>) -> io::Result<u64> {
    get(fd, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)
}

/// Whether a socket is of the network namespace of this thread. Returns true if the kernel does not
/// report this (before Linux 5.14).
pub(crate) fn is_of_this_namespace(fd: BorrowedFd<'_>) -> bool {
    let Ok(ours) = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None) else {
        return true;
    };
    match (netns(fd), netns(ours.as_fd())) {
        (Ok(of), Ok(ours)) => of == ours,
        _ => true,
    }
}

/// Whether the option for busy polling is already set on the socket.
pub(crate) fn prefers_busy_poll(fd: BorrowedFd<'_>) -> bool {
    get(fd, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL).is_ok_and(|on: i32| on != 0)
}

/// Whether the kernel knows the NAPI that the socket's frames come from.
pub(crate) fn has_napi(fd: BorrowedFd<'_>) -> bool {
    get(fd, libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID).is_ok_and(|number: i32| number != 0)
}

/// Makes the socket's send buffer at least `bytes` large, beyond the system's limit if this is
/// permitted. A smaller buffer is no error: the kernel then sends fewer frames at a time.
pub(crate) fn grow_send_buffer(fd: BorrowedFd<'_>, bytes: usize) {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX / 2);
    let have: i32 = get(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0);
    // The kernel doubles the value of the option, and reports the double.
    if have < bytes && set(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &bytes).is_err() {
        let _ = set(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &bytes);
    }
}

/// Waits until all CPUs have left what they were doing in the kernel with a map of sockets, or in
/// an XDP program: an RCU grace period. Does nothing if the kernel cannot do this for a process.
pub(crate) fn grace_period() {
    const GLOBAL: libc::c_long = 1;
    // SAFETY: the call has no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
}

/// The number of bytes that this process may lock.
pub(crate) fn memlock_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX)
}

/// The kernel's version: major, minor.
pub(crate) fn kernel() -> (u32, u32) {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Binds the socket to a queue. With `shared`, the UMEM is that of this other socket.
pub(crate) fn bind(
    fd: BorrowedFd<'_>,
    ifindex: u32,
    queue: u32,
    flags: u16,
    shared: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: ifindex,
        sxdp_queue_id: queue,
        // An open descriptor is not negative.
        sxdp_shared_umem_fd: shared.map_or(0, |fd| fd.as_raw_fd() as u32),
    };
    let len = mem::size_of_val(&address) as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of an address that is there.
    let done = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes the kernel send the frames in the TX ring, as many as it can now.
#[inline]
pub(crate) fn kick_tx(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::send(fd, &[], SendFlags::DONTWAIT).map(drop)
}

/// Makes the driver check the fill ring, and receive if the socket has busy polling. The result is
/// `NXIO` if the interface is gone.
#[inline]
pub(crate) fn kick_rx(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::recv(fd, &mut [0u8; 0][..], RecvFlags::DONTWAIT).map(drop)
}

/// The memory of a ring.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) at: NonNull<u8>,
    pub(crate) len: usize,
}

// SAFETY: memory is not bound to a thread. What is in it is accessed by atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a socket's ring.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let at = unsafe { mmap(ptr::null_mut(), len, prot, MapFlags::SHARED | MapFlags::POPULATE, fd, offset) }?;
        Ok(Self { at: NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our mapping, and its users are gone.
        let _ = unsafe { munmap(self.at.as_ptr().cast::<c_void>(), self.len) };
    }
}
