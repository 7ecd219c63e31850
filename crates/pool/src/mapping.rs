//! Mappings: address ranges of this process, and the system calls on them.

use crate::forks;
use crate::memory::PAGE_SIZE;
use crate::sigbus::Guard;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};

/// Bytes in a huge page.
pub(crate) const HUGE: usize = 2 << 20;

/// An address range of this process, unmapped on drop.
///
/// A range that was [kept from child processes](Self::keep_from_children) does not exist in a child
/// of a fork, and the child may have another mapping at the same addresses. The drop of such a
/// value does nothing in a child.
pub(crate) struct Mapping {
    pub(crate) at: NonNull<c_void>,
    pub(crate) len: usize,
    /// If only one process has the range: the [forks](forks::so_far) in that process.
    process: Option<u32>,
    /// Bytes in a page of the file, if the mapping is of a file.
    page: Option<usize>,
    /// Registers the range with the handler of SIGBUS, if the mapping is of a file.
    guard: Option<Guard>,
}

impl Mapping {
    /// Maps `len` bytes of reserved huge pages, anonymous or of a file of 2 MiB pages. The kernel
    /// chooses the address, and aligns it. A fixed address would not do: often no huge pages are
    /// reserved, and a fixed mapping that fails leaves a hole. Another thread could map something
    /// in that hole, and the cleanup would then unmap it.
    pub(crate) fn huge(file: Option<BorrowedFd<'_>>, len: usize) -> io::Result<Self> {
        if let Some(file) = file {
            return Self::of_file(file, 0, len, HUGE);
        }
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: a fresh range at an address of the kernel's choice replaces nothing.
        let at =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)? };
        Self::at(at, len, None)
    }

    /// Maps `len` bytes of `file` from `offset`, whole pages of `page` bytes, where the kernel
    /// finds room. A file that cannot be mapped leaves nothing behind.
    pub(crate) fn of_file(file: BorrowedFd<'_>, offset: u64, len: usize, page: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh range at an address of the kernel's choice replaces nothing.
        let at = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, file, offset)? };
        Self::at(at, len, Some(page))
    }

    fn at(at: *mut c_void, len: usize, page: Option<usize>) -> io::Result<Self> {
        let at = NonNull::new(at).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, len, process: None, page, guard: None })
    }

    /// Maps `len` bytes (whole pages), of `file` from an offset or anonymous, aligned to a huge
    /// page.
    pub(crate) fn new(file: Option<(BorrowedFd<'_>, u64)>, len: usize, extra: MapFlags) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let room = len.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a fresh range at an address of the kernel's choice replaces nothing. What is
        // mapped over it and unmapped from its ends lies within it.
        unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let start = rustix::mm::mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags)?;
            let before = start.addr().next_multiple_of(HUGE) - start.addr();
            let at = start.byte_add(before);
            let whole = Self::at(start, room, None)?;
            match file {
                Some((fd, offset)) => {
                    rustix::mm::mmap(at, len, prot, MapFlags::SHARED | MapFlags::FIXED | extra, fd, offset)?
                }
                None => rustix::mm::mmap_anonymous(at, len, prot, MapFlags::PRIVATE | MapFlags::FIXED | extra)?,
            };
            std::mem::forget(whole);
            for (end, bytes) in [(start, before), (at.byte_add(len), HUGE - before)] {
                if bytes > 0 {
                    rustix::mm::munmap(end, bytes)?;
                }
            }
            Self::at(at, len, file.map(|_| PAGE_SIZE))
        }
    }

    /// Keeps the range out of the address space of child processes. Otherwise a write of either
    /// process after a fork would make a private copy of a page. The driver and its device could
    /// then use different pages, and no error would show it. A range of a file is also registered
    /// with the handler of SIGBUS from here on.
    pub(crate) fn keep_from_children(&mut self) -> io::Result<()> {
        self.process = Some(forks::count_from_now()?);
        self.advise(libc::MADV_DONTFORK)?;
        self.guard = self.page.map(|page| Guard::new(self.at.as_ptr().addr(), self.len, page));
        Ok(())
    }

    /// How many accesses found that a page of the range had been taken away.
    pub(crate) fn lost(&self) -> u64 {
        self.guard.as_ref().map_or(0, Guard::lost)
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is ours, and no advice of this file discards contents.
        match unsafe { libc::madvise(self.at.as_ptr(), self.len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

// SAFETY: an address range belongs to no thread, and this value is its only owner.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.process.is_some_and(|process| process != forks::so_far()) {
            return;
        }
        // The handler must not find a range that is another mapping's.
        self.guard = None;
        // SAFETY: the range is ours, and the owner of this value has dropped all pointers into it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.at.as_ptr(), self.len) } {
            netmem_percpu::trace::error!(%error, len = self.len, "a region could not be unmapped");
        }
    }
}

/// A file without a name, sealed so that no process can shorten it: a peer's `ftruncate` would
/// raise SIGBUS in this process.
pub(crate) fn memfd(bytes: usize, flags: MemfdFlags) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("netmem", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Asks for transparent huge pages, and returns whether the range can have them. `MADV_COLLAPSE`
/// makes a memfd of them even where the system-wide setting for shared memory is "never", as it is
/// on most distributions, but makes every page resident.
pub(crate) fn make_transparent(memory: &Mapping, shared: bool, populated: bool) -> bool {
    const MADV_COLLAPSE: libc::c_int = 25;
    let wanted = memory.advise(libc::MADV_HUGEPAGE).is_ok();
    if populated {
        return wanted && memory.advise(MADV_COLLAPSE).is_ok();
    }
    let setting = if shared { "shmem_enabled" } else { "enabled" };
    wanted
        && std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{setting}"))
            .is_ok_and(|s| !s.contains("[never]") && !s.contains("[deny]"))
}

/// Makes every page resident.
pub(crate) fn populate(memory: &Mapping) -> io::Result<()> {
    match memory.advise(libc::MADV_POPULATE_WRITE) {
        // Kernels before 5.14 do not know the advice: touch the pages instead.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            for at in (0..memory.len).step_by(PAGE_SIZE) {
                // SAFETY: `at` is within the mapping, of which no other code knows yet.
                unsafe { memory.at.cast::<u8>().add(at).write_volatile(0) };
            }
            Ok(())
        }
        other => other,
    }
}

/// Bytes that can be allocated without swapping; `None` if the system does not report it. Limits of
/// a control group are not taken into account.
pub(crate) fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

pub(crate) fn lock(memory: &Mapping) -> io::Result<()> {
    // SAFETY: locking a range of ours changes no contents.
    Ok(unsafe { rustix::mm::mlock(memory.at.as_ptr(), memory.len) }?)
}

pub(crate) fn memlock_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX)
}

pub(crate) fn bind(memory: &Mapping, node: u32) -> io::Result<()> {
    if node >= 1024 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut mask = [0u64; 16];
    mask[node as usize / 64] = 1 << (node % 64);
    // SAFETY: the range is ours; the mask is 1024 bits long, and the kernel reads one bit less than
    // `maxnode`.
    let done = unsafe {
        let (at, len) = (memory.at.as_ptr(), memory.len);
        libc::syscall(libc::SYS_mbind, at, len, libc::MPOL_BIND, mask.as_ptr(), 1025usize, 0usize)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes in a page of the file's file system, if that is hugetlbfs.
pub(crate) fn huge_page(file: BorrowedFd<'_>) -> Option<usize> {
    let fs = rustix::fs::fstatfs(file).ok().filter(|fs| fs.f_type == libc::HUGETLBFS_MAGIC)?;
    usize::try_from(fs.f_bsize).ok().filter(|&bytes| bytes > 0)
}
