//! Regions: the memory that pages are cut from, and the page descriptors beside it.
//!
//! ```text
//!   memory       [ page 0 ][ page 1 ][ page 2 ] ...   huge pages if they can be had; behind a sealed memfd if a peer needs it
//!   descriptors  [ 64 B   ][ 64 B   ][ 64 B   ] ...   always private and anonymous: all-zero, resident only where used
//! ```

use crate::PAGE_SIZE;
use crate::desc::Desc;
use crate::memory::Memory;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fmt, io};

const HUGE: usize = 2 << 20;

/// What a region's memory turned out to be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Reserved 2 MiB pages (`vm.nr_hugepages`).
    Huge,
    /// Transparent huge pages.
    Transparent,
    /// Pages of 4 KiB.
    Plain,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Huge => "2M",
            Self::Transparent => "thp",
            Self::Plain => "none",
        })
    }
}

/// Why a region could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// No pages, or more than descriptors can count.
    #[error("a region of {pages} pages: it must have between 1 and {max}", max = u32::MAX)]
    Pages {
        /// Pages asked for.
        pages: usize,
    },
    /// A page order that does not fit a huge page.
    #[error("page order {order}: the largest is 9 (2 MiB)")]
    Order {
        /// The order asked for.
        order: u8,
    },
    /// The system refused a step.
    #[error("cannot {step} {bytes} bytes of {kind} memory: {source}; ask for fewer pages or free some memory")]
    System {
        /// What was attempted.
        step: &'static str,
        /// How much of it.
        bytes: usize,
        /// The kind of memory.
        kind: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// There is not that much memory. Said beforehand, for a process that takes more is killed.
    #[error(
        "{bytes} bytes of memory asked for, and {available} are available; ask for fewer pages or free some memory"
    )]
    TooLittle {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes that the system could give.
        available: usize,
    },
    /// The memory may not be locked.
    #[error(
        "cannot lock {bytes} bytes in memory: the limit (RLIMIT_MEMLOCK) is {limit} bytes; raise it with `ulimit -l`, \
         ask for fewer pages, or do not lock"
    )]
    Memlock {
        /// Bytes to be locked.
        bytes: usize,
        /// The process's limit.
        limit: u64,
    },
    /// The NUMA node does not exist, or has no memory for us.
    #[error("cannot bind memory to NUMA node {node}: {source}")]
    Node {
        /// The node asked for.
        node: u32,
        /// The system's answer.
        source: io::Error,
    },
}

/// What a [`Region`] is to be. Start with [`RegionOptions::new`].
#[derive(Clone, Debug)]
pub struct RegionOptions {
    pages: usize,
    order: u8,
    huge: bool,
    node: Option<u32>,
    lock: bool,
    populate: bool,
}

impl RegionOptions {
    /// `pages` pages of 4 KiB, huge pages if they can be had, resident from the start.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self { pages, order: 0, huge: true, node: None, lock: false, populate: true }
    }

    /// Pages of `4 KiB << order`; at most 9 (2 MiB).
    #[must_use]
    pub fn order(mut self, order: u8) -> Self {
        self.order = order;
        self
    }

    /// Whether to try for huge pages (the default) or to stay with pages of 4 KiB.
    #[must_use]
    pub fn huge_pages(mut self, huge: bool) -> Self {
        self.huge = huge;
        self
    }

    /// Takes the memory from one NUMA node.
    #[must_use]
    pub fn node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// Locks the memory, so that it is never swapped out. Counts against `RLIMIT_MEMLOCK`.
    #[must_use]
    pub fn lock(mut self, lock: bool) -> Self {
        self.lock = lock;
        self
    }

    /// Whether every page is made resident at once (the default) or when it is first touched.
    #[must_use]
    pub fn populate(mut self, populate: bool) -> Self {
        self.populate = populate;
        self
    }

    /// Makes the region. Costs a few system calls and, if populating, a write to every page.
    ///
    /// # Errors
    ///
    /// See [`RegionError`]; nothing is left behind.
    pub fn build<M: Memory>(self) -> Result<Region<M>, RegionError> {
        Region::build(&self)
    }
}

/// An address range of this process, unmapped on drop.
struct Mapping {
    at: NonNull<c_void>,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of reserved huge pages, of `fd` or anonymous. The kernel aligns them. There are often none, and
    /// a fixed mapping that fails would leave a hole which another thread's mapping may have taken when we clean up.
    fn huge(fd: Option<BorrowedFd<'_>>, len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh range at an address of the kernel's choice replaces nothing.
        let at = unsafe {
            match fd {
                Some(fd) => rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)?,
                None => {
                    let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
                    rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, flags)?
                }
            }
        };
        NonNull::new(at).map(|at| Self { at, len }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Maps `len` bytes (whole huge pages), of `fd` or anonymous, aligned to a huge page.
    fn new(fd: Option<BorrowedFd<'_>>, len: usize, extra: MapFlags) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let room = len.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a fresh range at an address of the kernel's choice replaces nothing. What is mapped over it and
        // unmapped from its ends lies within it.
        unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let start = rustix::mm::mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags)?;
            let before = start.addr().next_multiple_of(HUGE) - start.addr();
            let at = start.byte_add(before);
            let whole = Self { at: NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?, len: room };
            match fd {
                Some(fd) => rustix::mm::mmap(at, len, prot, MapFlags::SHARED | MapFlags::FIXED | extra, fd, 0)?,
                None => rustix::mm::mmap_anonymous(at, len, prot, MapFlags::PRIVATE | MapFlags::FIXED | extra)?,
            };
            std::mem::forget(whole);
            for (end, bytes) in [(start, before), (at.byte_add(len), HUGE - before)] {
                if bytes > 0 {
                    rustix::mm::munmap(end, bytes)?;
                }
            }
            NonNull::new(at).map(|at| Self { at, len }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
        }
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is ours, and none of the advice that this file gives discards contents.
        match unsafe { libc::madvise(self.at.as_ptr(), self.len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and whoever owned this value let go of all pointers into it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.at.as_ptr(), self.len) } {
            tracing::error!(%error, len = self.len, "a region could not be unmapped");
        }
    }
}

/// Memory for pages, of one [kind](Memory), with a descriptor for each page.
///
/// Invariant (*described*): descriptor `i` is beside page `i`; both stay where they are while the region lives.
pub struct Region<M: Memory> {
    memory: Mapping,
    descs: Mapping,
    fd: Option<OwnedFd>,
    pages: u32,
    /// Descriptors before this one may have been used; those from it on are zero, and perhaps not resident.
    used: AtomicU32,
    order: u8,
    backing: Backing,
    kind: PhantomData<M>,
}

// SAFETY: the pointers are to mappings that the value owns; it hands out addresses, never references.
unsafe impl<M: Memory> Send for Region<M> {}
// SAFETY: as above; descriptors are made of atomics and of cells that the owner of a page alone writes.
unsafe impl<M: Memory> Sync for Region<M> {}

impl<M: Memory> Region<M> {
    fn build(o: &RegionOptions) -> Result<Self, RegionError> {
        if o.order > 9 {
            return Err(RegionError::Order { order: o.order });
        }
        let pages = u32::try_from(o.pages).ok().filter(|&n| n > 0).ok_or(RegionError::Pages { pages: o.pages })?;
        let system = |step, bytes| move |e: io::Error| RegionError::System { step, bytes, kind: M::NAME, source: e };
        let bytes = (o.pages.checked_mul(PAGE_SIZE << o.order))
            .and_then(|b| b.checked_next_multiple_of(HUGE))
            .ok_or(RegionError::Pages { pages: o.pages })?;

        let huge = if o.huge { Self::prepare(o, bytes, Backing::Huge).ok() } else { None };
        let (memory, fd, backing) = match huge {
            Some(region) => region,
            None => Self::prepare(o, bytes, Backing::Plain)?,
        };
        if o.lock {
            lock(&memory).map_err(|_| RegionError::Memlock { bytes, limit: memlock_limit() })?;
        }
        // A child that shared these pages copy-on-write would silently part the device from its driver.
        memory.advise(libc::MADV_DONTFORK).map_err(system("keep from child processes", bytes))?;
        let desc_bytes = (o.pages * size_of::<Desc>()).next_multiple_of(HUGE);
        let descs =
            Mapping::new(None, desc_bytes, MapFlags::NORESERVE).map_err(system("map descriptors for", bytes))?;
        Ok(Self { memory, descs, fd, pages, used: AtomicU32::new(0), order: o.order, backing, kind: PhantomData })
    }

    /// Maps, places and populates the memory, of reserved huge pages or of whatever else can be had.
    fn prepare(
        o: &RegionOptions,
        bytes: usize,
        want: Backing,
    ) -> Result<(Mapping, Option<OwnedFd>, Backing), RegionError> {
        let system = |step| move |e: io::Error| RegionError::System { step, bytes, kind: M::NAME, source: e };
        let huge = want == Backing::Huge;
        // Reserved huge pages are counted by the system; of the rest it promises more than it has.
        if let Some(available) = available().filter(|&a| !huge && o.populate && bytes > a) {
            return Err(RegionError::TooLittle { bytes, available });
        }
        let fd = match (M::SHARED_BY_FD, huge) {
            (false, _) => None,
            (true, true) => Some(memfd(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)),
            (true, false) => Some(memfd(bytes, MemfdFlags::empty())),
        };
        let fd = fd.transpose().map_err(system("create a file of"))?;
        // What is to be resident only where it is touched may be larger than the machine's memory.
        let flags = if o.populate { MapFlags::empty() } else { MapFlags::NORESERVE };
        let file = fd.as_ref().map(AsFd::as_fd);
        let memory = if huge { Mapping::huge(file, bytes) } else { Mapping::new(file, bytes, flags) };
        let memory = memory.map_err(system("map"))?;
        if let Some(node) = o.node {
            bind(&memory, node).map_err(|source| RegionError::Node { node, source })?;
        }
        if o.populate {
            populate(&memory).map_err(system("populate"))?;
        }
        let found = if o.huge && !huge { make_transparent(&memory, M::SHARED_BY_FD, o.populate) } else { want };
        Ok((memory, fd, found))
    }

    /// How many pages there are.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Bytes in a page: a power of two, at least 4096.
    #[must_use]
    pub fn page_size(&self) -> usize {
        PAGE_SIZE << self.order
    }

    /// Bytes mapped: whole huge pages, so possibly more than the pages take.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len
    }

    /// Never: a region has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What the memory is made of.
    #[must_use]
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// The first byte's address in this process.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.at.as_ptr().cast()
    }

    /// The file to give to a peer, if the kind of memory has one. It is sealed: nobody can shrink it under us.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// The descriptor of page `index`, its constant fields filled in.
    pub(crate) fn desc(&self, index: u32) -> NonNull<Desc> {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        // Relaxed: whoever looks for its own pages has taken them before.
        self.used.fetch_max(index + 1, Ordering::Relaxed);
        // SAFETY: *described*: the index was just checked; an all-zero descriptor is a valid one.
        unsafe {
            let desc = self.descs.at.cast::<Desc>().add(index as usize);
            desc.as_ref().describe(index, self.as_ptr().add(index as usize * self.page_size()));
            desc
        }
    }

    /// Calls `f` with the descriptor of every page that was ever handed out.
    pub(crate) fn each_desc(&self, f: &mut dyn FnMut(&Desc)) {
        for i in 0..self.used.load(Ordering::Relaxed) as usize {
            // SAFETY: *described*: `i` is below the number of pages.
            f(unsafe { self.descs.at.cast::<Desc>().add(i).as_ref() });
        }
    }
}

impl<M: Memory> fmt::Debug for Region<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region<{}>({} pages of {} B, {})", M::NAME, self.pages, self.page_size(), self.backing)
    }
}

/// A file without a name, which nobody can make shorter: a peer's `ftruncate` would be our SIGBUS.
fn memfd(bytes: usize, flags: MemfdFlags) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("netmem", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Asks for transparent huge pages. `MADV_COLLAPSE` gives them to a memfd even where the system-wide setting for shared
/// memory is "never", as it is on most distributions, but makes every page resident.
fn make_transparent(memory: &Mapping, shared: bool, populated: bool) -> Backing {
    const MADV_COLLAPSE: libc::c_int = 25;
    let wanted = memory.advise(libc::MADV_HUGEPAGE).is_ok();
    let transparent = if populated {
        wanted && memory.advise(MADV_COLLAPSE).is_ok()
    } else {
        let setting = if shared { "shmem_enabled" } else { "enabled" };
        wanted
            && std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{setting}"))
                .is_ok_and(|s| !s.contains("[never]") && !s.contains("[deny]"))
    };
    if transparent { Backing::Transparent } else { Backing::Plain }
}

fn populate(memory: &Mapping) -> io::Result<()> {
    match memory.advise(libc::MADV_POPULATE_WRITE) {
        // Kernels before 5.14 do not know the advice: touch the pages instead.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            for at in (0..memory.len).step_by(PAGE_SIZE) {
                // SAFETY: `at` is within the mapping, which nobody else has seen yet.
                unsafe { memory.at.cast::<u8>().add(at).write_volatile(0) };
            }
            Ok(())
        }
        other => other,
    }
}

/// Bytes that could be had without swapping; `None` where the system does not say. Limits of a control group are not
/// looked at.
fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

fn lock(memory: &Mapping) -> io::Result<()> {
    // SAFETY: locking a range of ours changes no contents.
    Ok(unsafe { rustix::mm::mlock(memory.at.as_ptr(), memory.len) }?)
}

fn memlock_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX)
}

fn bind(memory: &Mapping, node: u32) -> io::Result<()> {
    if node >= 1024 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut mask = [0u64; 16];
    mask[node as usize / 64] = 1 << (node % 64);
    // SAFETY: the range is ours; the mask is 1024 bits long, and the kernel reads one bit less than `maxnode`.
    let done = unsafe {
        let (at, len) = (memory.at.as_ptr(), memory.len);
        libc::syscall(libc::SYS_mbind, at, len, libc::MPOL_BIND, mask.as_ptr(), 1025usize, 0usize)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
