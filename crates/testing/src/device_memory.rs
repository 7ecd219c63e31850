//! Device memory of each kind that this machine has, and the device's accesses to it.
//!
//! By default a memfd stands in for device memory. On Linux with `/dev/udmabuf` or a dma-buf heap,
//! the same tests run on real dma-bufs if `NETMEM_TEST_MEMORY` is `udmabuf` or `heap`. A dma-buf
//! has no `read` and no `write`: the reader or writer maps the bytes, and calls the exporter before
//! and after the access (`DMA_BUF_IOCTL_SYNC`).

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;

/// The kind of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// A file in memory, which stands in for a dma-buf.
    Memfd,
    /// Pages of a memfd, exported as a dma-buf by the kernel's `udmabuf`.
    Udmabuf,
    /// A dma-buf of the heap `system`.
    Heap,
}

impl MemoryKind {
    /// The kind that this run of the tests uses.
    pub fn of_this_run() -> Self {
        match std::env::var("NETMEM_TEST_MEMORY").as_deref() {
            Err(_) | Ok("memfd") => Self::Memfd,
            Ok("udmabuf") => Self::Udmabuf,
            Ok("heap") => Self::Heap,
            Ok(other) => panic!("NETMEM_TEST_MEMORY={other}: memfd, udmabuf and heap are known"),
        }
    }

    /// Allocates device memory: a descriptor, which is mapped nowhere.
    pub fn allocate(self, bytes: u64) -> OwnedFd {
        match self {
            Self::Memfd => memfd(bytes),
            Self::Udmabuf => udmabuf(bytes).expect("/dev/udmabuf makes a dma-buf"),
            Self::Heap => heap(bytes).expect("/dev/dma_heap/system makes a dma-buf"),
        }
    }
}

fn memfd(bytes: u64) -> OwnedFd {
    let fd = memfd_create("device-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&fd, bytes).expect("of that size");
    fd
}

/// `struct udmabuf_create` of linux/udmabuf.h.
#[repr(C)]
struct UdmabufCreate {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// `struct dma_heap_allocation_data` of linux/dma-heap.h.
#[repr(C)]
struct HeapAllocation {
    len: u64,
    fd: u32,
    fd_flags: u32,
    heap_flags: u64,
}

const UDMABUF_CREATE: libc::Ioctl = libc::_IOW::<UdmabufCreate>(b'u' as u32, 0x42);
const DMA_HEAP_ALLOC: libc::Ioctl = libc::_IOWR::<HeapAllocation>(b'H' as u32, 0);
const DMA_BUF_SYNC: libc::Ioctl = libc::_IOW::<u64>(b'b' as u32, 0);
/// The caller reads and writes.
const SYNC_RW: u64 = 3;
const SYNC_END: u64 = 4;

fn udmabuf(bytes: u64) -> io::Result<OwnedFd> {
    let pages = memfd(bytes);
    // The udmabuf driver requires this seal: the pages that it exports must not be removed.
    fcntl_add_seals(&pages, SealFlags::SHRINK)?;
    let device = File::options().read(true).write(true).open("/dev/udmabuf")?;
    let create = UdmabufCreate { memfd: pages.as_raw_fd() as u32, flags: 1, offset: 0, size: bytes };
    // SAFETY: open descriptors, and the structure that the request is defined with.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE, &raw const create) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn heap(bytes: u64) -> io::Result<OwnedFd> {
    let device = File::open("/dev/dma_heap/system")?;
    let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u32;
    let mut allocation = HeapAllocation { len: bytes, fd: 0, fd_flags: flags, heap_flags: 0 };
    // SAFETY: an open descriptor, and the structure that the request is defined with, which the
    // kernel writes.
    if unsafe { libc::ioctl(device.as_raw_fd(), DMA_HEAP_ALLOC, &raw mut allocation) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(allocation.fd as i32) })
}

/// Reads all bytes from the device's side, or fails.
pub fn read_exact_at(file: &File, kind: MemoryKind, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    if kind == MemoryKind::Memfd {
        return file.read_exact_at(bytes, offset);
    }
    // SAFETY: the window has as many bytes. The tests make sure that no other process writes them
    // meanwhile.
    access(file.as_fd(), offset, bytes.len(), |at| unsafe {
        at.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len())
    })
}

/// Writes from the device's side.
pub fn write_all_at(file: &File, kind: MemoryKind, bytes: &[u8], offset: u64) -> io::Result<()> {
    if kind == MemoryKind::Memfd {
        return file.write_all_at(bytes, offset);
    }
    // SAFETY: as above.
    access(file.as_fd(), offset, bytes.len(), |at| unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) })
}

/// Maps a range of a dma-buf for one access, between the two calls that the exporter requires.
fn access(file: BorrowedFd<'_>, offset: u64, len: usize, f: impl FnOnce(*mut u8)) -> io::Result<()> {
    let start = offset / PAGE * PAGE;
    let whole = (offset + len as u64 - start).next_multiple_of(PAGE) as usize;
    if whole == 0 {
        return Ok(());
    }
    // SAFETY: the kernel chooses a fresh range, so nothing is replaced.
    let at = unsafe {
        mmap(std::ptr::null_mut(), whole, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, start)?
    };
    let synced = sync(file, SYNC_RW).map(|()| f(at.cast::<u8>().wrapping_add((offset - start) as usize)));
    let synced = synced.and_then(|()| sync(file, SYNC_RW | SYNC_END));
    // SAFETY: the range was mapped above, and there are no pointers into it any more.
    unsafe { munmap(at, whole)? };
    synced
}

/// `DMA_BUF_IOCTL_SYNC`.
pub fn sync(file: BorrowedFd<'_>, flags: u64) -> io::Result<()> {
    loop {
        // SAFETY: an open descriptor, and the structure that the request is defined with: one
        // number.
        if unsafe { libc::ioctl(file.as_raw_fd(), DMA_BUF_SYNC, &raw const flags) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
