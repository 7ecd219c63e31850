//! Regions: the memory that pages are cut from, and the page descriptors beside it.
//!
//! ```text
//!   memory       [ page 0 ][ page 1 ][ page 2 ] ...   huge pages if there are any; behind a sealed memfd if a peer needs it
//!   descriptors  [ 64 B   ][ 64 B   ][ 64 B   ] ...   always private and anonymous: all-zero, resident only where used
//! ```

use crate::PAGE_SIZE;
use crate::desc::{self, Desc};
use crate::frag::Frag;
use crate::home;
use crate::mapping::{self, HUGE, Mapping};
use crate::memory::{Mapped, Memory, PeerShared, SystemMemory, TrustedPeer};
use crate::page::Page;
use crate::provider::RawPage;
use crate::sigbus;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::mm::MapFlags;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fmt, io};

/// The backing of a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backing {
    /// Reserved 2 MiB pages (`vm.nr_hugepages`).
    Huge,
    /// Transparent huge pages.
    Transparent,
    /// Pages of 4 KiB.
    Plain,
    /// The user provided this memory; what it is made of was not checked.
    Provided,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Huge => "2M",
            Self::Transparent => "thp",
            Self::Plain => "none",
            Self::Provided => "provided",
        })
    }
}

/// Why a region could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// No pages were requested, or more than descriptors can count.
    #[error("a region of {pages} pages: it must have between 1 and {max}", max = u32::MAX)]
    Pages {
        /// Pages that were requested.
        pages: usize,
    },
    /// A page order that does not fit a huge page.
    #[error("page order {order}: the largest is 9 (2 MiB)")]
    Order {
        /// The order that was requested.
        order: u8,
    },
    /// A system call failed.
    #[error("cannot {step} {bytes} bytes of {kind} memory: {source}; ask for fewer pages or free some memory")]
    System {
        /// What was attempted.
        step: &'static str,
        /// The number of bytes.
        bytes: usize,
        /// The kind of memory.
        kind: &'static str,
        /// The system's answer.
        r#source: io::Error,
    },
    /// The system does not have this much memory. This is checked first, because the system kills a process that takes
    /// more than there is.
    #[error(
        "{bytes} bytes of memory asked for, and {available} are available; ask for fewer pages or free some memory"
    )]
    TooLittle {
        /// Bytes that were requested.
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
        /// The limit of the process.
        limit: u64,
    },
    /// Provided memory does not begin at a page boundary.
    #[error(
        "memory at {addr:#x} does not begin at a multiple of the page size, {page_size} bytes; provide memory that does, \
         or use a smaller page order"
    )]
    Unaligned {
        /// Where it begins.
        addr: usize,
        /// Bytes in a page.
        page_size: usize,
    },
    /// Provided memory is too small.
    #[error("{bytes} bytes hold no page of {page_size}; provide more memory, or use a smaller page order")]
    Small {
        /// Bytes that were provided.
        bytes: usize,
        /// Bytes in a page.
        page_size: usize,
    },
    /// The range is not inside the provided file, or does not begin where a mapping can begin.
    #[error(
        "bytes {start}..{end} of a file of {size} bytes cannot be mapped; begin at a multiple of 4096, and end within the \
         file"
    )]
    Range {
        /// Where the range begins in the file.
        start: u64,
        /// Where it ends.
        end: u64,
        /// Bytes in the file.
        size: u64,
    },
    /// A provided file cannot be used.
    #[error(
        "cannot {step} the provided file: {source}; it must have a size, be open for reading and writing, and be of a kind \
         that can be mapped"
    )]
    File {
        /// What was attempted.
        step: &'static str,
        /// The system's answer.
        r#source: io::Error,
    },
    /// A provided memfd can be made shorter, and cannot be sealed against that.
    #[error(
        "the provided memfd cannot be sealed against shrinking: {source}; seal it with F_SEAL_SHRINK, or make it with \
         MFD_ALLOW_SEALING"
    )]
    Shrinkable {
        /// The system's answer.
        r#source: io::Error,
    },
    /// The limit of a provider that grows is smaller than its first region.
    #[error(
        "{limit} pages are the limit of growth, and it grows by {step} at a time; raise the limit or make the step smaller"
    )]
    Growth {
        /// The limit, in pages.
        limit: usize,
        /// Pages in a region.
        step: usize,
    },
    /// The NUMA node does not exist, or has no memory for this process.
    #[error("cannot bind memory to NUMA node {node}: {source}")]
    Node {
        /// The node that was requested.
        node: u32,
        /// The system's answer.
        r#source: io::Error,
    },
}

/// The options of a [`Region`]. Start with [`RegionOptions::new`].
#[derive(Clone, Debug)]
pub struct RegionOptions {
    pub(crate) pages: usize,
    order: u8,
    huge: bool,
    reserved: bool,
    node: Option<u32>,
    lock: bool,
    populate: bool,
}

impl RegionOptions {
    /// `pages` pages of 4 KiB, on transparent huge pages if there are any, resident from the start.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        // A fuzzer makes thousands of small regions a second.
        let (huge, populate) = (cfg!(not(fuzzing)), cfg!(not(fuzzing)));
        Self { pages, order: 0, huge, reserved: false, node: None, lock: false, populate }
    }

    /// Pages of `4 KiB << order`; at most 9 (2 MiB).
    #[must_use]
    pub fn order(mut self, order: u8) -> Self {
        self.order = order;
        self
    }

    /// Whether to try for huge pages (the default) or to stay with pages of 4 KiB. They are
    /// transparent huge pages, unless [`reserved_huge_pages`](Self::reserved_huge_pages) asks for
    /// others.
    #[must_use]
    pub fn huge_pages(mut self, huge: bool) -> Self {
        self.huge = huge;
        self
    }

    /// Whether to take 2 MiB pages that the administrator has reserved (`vm.nr_hugepages`), if
    /// there are enough of them. Otherwise the region has transparent ones: [`Region::backing`]
    /// says which it got. Off by default, because the reserved pages may be meant for another
    /// program, which would then start without them. Has no effect if
    /// [`huge_pages`](Self::huge_pages) is off.
    #[must_use]
    pub fn reserved_huge_pages(mut self, reserved: bool) -> Self {
        self.reserved = reserved;
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
    /// See [`RegionError`]. After an error nothing is left allocated or mapped.
    pub fn build<M: SystemMemory>(self) -> Result<Region<M>, RegionError> {
        Region::build(&self)
    }

    /// Makes a region for a device in this process, which maps the memory's file a second time. No
    /// safe function hands the file out, so nothing but the device can write the memory, and its
    /// pages are slices: see [`Region::in_process_fd`].
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn build_in_process(self) -> Result<Region<TrustedPeer>, RegionError> {
        let region = Region::<PeerShared>::build(&self)?;
        // SAFETY: a party gets the file by `in_process_fd` only, whose caller promises the same.
        Ok(Region { in_process: true, ..unsafe { region.trust_peer() } })
    }
}

/// Memory for pages, of one [kind](Memory), with a descriptor for each page.
///
/// | made by | kind | the memory is |
/// | --- | --- | --- |
/// | [`RegionOptions::build`] | every one that is [`SystemMemory`] | taken from the system |
/// | [`Region::from_raw`] | [`Private`](crate::Private), [`KernelShared`](crate::KernelShared) | a range of this process, provided by the user |
/// | [`Region::<PeerShared>::from_fd`](Region::from_fd) | [`PeerShared`] | a range of a file, provided by the user and mapped here |
/// | [`RegionOptions::build_in_process`] | [`TrustedPeer`] | taken from the system, for a device in this process |
/// | [`Region::<PeerShared>::trust_peer`](Region::trust_peer) | [`TrustedPeer`] | a region of [`PeerShared`] memory, if the user declares the peer trusted |
/// | [`Region::<Device>::unmapped`](Region::unmapped) | [`Device`](crate::Device) | a file, provided by the user and never mapped here |
///
/// # Fork
///
/// The memory is not in the address space of a child process (`MADV_DONTFORK`): otherwise copy-on-write could separate
/// a driver from its device. A child of a fork may drop everything that it inherited: regions, providers, pages and
/// fragments. That unmaps nothing, and does not affect the parent. A child must not use bytes, also not those of pages
/// that it inherited: at their addresses there is nothing, or later something else. It may `exec`: descriptors are
/// close-on-exec. It may also make regions of its own. At the fork no other thread may be inside of a provider, because
/// the provider's lock would stay locked in the child. Memory of [`Region::from_raw`] is shared with children in the
/// way that its owner chose.
///
/// Invariant (*described*): descriptor `i` is beside page `i`; both stay where they are while the region lives.
pub struct Region<M: Memory> {
    /// The first byte in this process; null where the memory is not mapped.
    at: *mut u8,
    len: usize,
    descs: Mapping,
    fd: Option<OwnedFd>,
    /// The file is not handed out by safe functions.
    in_process: bool,
    /// Where in the file the first byte is.
    offset: u64,
    pages: u32,
    /// Descriptors before this one may have been used; those from it on are zero, and perhaps not resident.
    used: AtomicU32,
    order: u8,
    backing: Backing,
    /// The owner of the memory. It is dropped with the region.
    _owner: Box<dyn Send>,
    kind: PhantomData<M>,
}

/// The parts of a region: the memory, its file if it has one, and the owner of both.
pub(crate) struct Source {
    pub(crate) at: *mut u8,
    pub(crate) len: usize,
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) offset: u64,
    pub(crate) backing: Backing,
    pub(crate) owner: Box<dyn Send>,
}

// SAFETY: the pointers are to mappings that the value owns; it hands out addresses, never references. Only the drop touches
// the owner.
unsafe impl<M: Memory> Send for Region<M> {}
// SAFETY: as above; descriptors are made of atomics and of cells that the owner of a page alone writes.
unsafe impl<M: Memory> Sync for Region<M> {}

impl<M: SystemMemory> Region<M> {
    fn build(o: &RegionOptions) -> Result<Self, RegionError> {
        check_order(o.order)?;
        let pages = u32::try_from(o.pages).ok().filter(|&n| n > 0).ok_or(RegionError::Pages { pages: o.pages })?;
        let bytes = (o.pages.checked_mul(PAGE_SIZE << o.order))
            .and_then(|b| b.checked_next_multiple_of(HUGE))
            .ok_or(RegionError::Pages { pages: o.pages })?;

        let huge = if o.huge && o.reserved { Self::prepare(o, bytes, Backing::Huge).ok() } else { None };
        let (mut memory, fd, backing) = match huge {
            Some(region) => region,
            None => Self::prepare(o, bytes, Backing::Plain)?,
        };
        if o.lock {
            let limit = mapping::memlock_limit();
            mapping::lock(&memory).map_err(|_| RegionError::Memlock { bytes, limit })?;
        }
        let system = |source| RegionError::System { step: "keep from child processes", bytes, kind: M::NAME, source };
        memory.keep_from_children().map_err(system)?;
        let (at, len) = (memory.at.as_ptr().cast(), memory.len);
        Self::on(Source { at, len, fd, offset: 0, backing, owner: Box::new(memory) }, pages, o.order)
    }

    /// Maps, places and populates the memory, of reserved huge pages or of others.
    fn prepare(
        o: &RegionOptions,
        bytes: usize,
        want: Backing,
    ) -> Result<(Mapping, Option<OwnedFd>, Backing), RegionError> {
        let system = |step| move |e: io::Error| RegionError::System { step, bytes, kind: M::NAME, source: e };
        let huge = want == Backing::Huge;
        // The system counts reserved huge pages exactly. Of other memory it promises more than it has.
        if let Some(available) = mapping::available().filter(|&a| !huge && o.populate && bytes > a) {
            return Err(RegionError::TooLittle { bytes, available });
        }
        let fd = match (M::SHARED_BY_FD, huge) {
            (false, _) => None,
            (true, true) => Some(mapping::memfd(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)),
            (true, false) => Some(mapping::memfd(bytes, MemfdFlags::empty())),
        };
        let fd = fd.transpose().map_err(system("create a file of"))?;
        // A region that becomes resident only where it is touched may be larger than the machine's memory.
        let flags = if o.populate { MapFlags::empty() } else { MapFlags::NORESERVE };
        let file = fd.as_ref().map(AsFd::as_fd);
        let memory = if huge { Mapping::huge(file, bytes) } else { Mapping::new(file.map(|fd| (fd, 0)), bytes, flags) };
        let memory = memory.map_err(system("map"))?;
        if let Some(node) = o.node {
            mapping::bind(&memory, node).map_err(|source| RegionError::Node { node, source })?;
        }
        if o.populate {
            mapping::populate(&memory).map_err(system("populate"))?;
        }
        let transparent = o.huge && !huge && mapping::make_transparent(&memory, M::SHARED_BY_FD, o.populate);
        Ok((memory, fd, if transparent { Backing::Transparent } else { want }))
    }
}

impl Region<PeerShared> {
    /// Declares that every peer that gets this region's file is trusted. The region becomes one of [`TrustedPeer`]
    /// memory: its pages and fragments are slices, and its fragments turn into `Bytes`. Costs nothing: memory, file and
    /// descriptors do not change.
    ///
    /// ```
    /// use netmem_pool::{PeerShared, PoolOptions, RegionOptions, RegionProvider};
    ///
    /// let region = RegionOptions::new(8).huge_pages(false).build::<PeerShared>()?;
    /// // SAFETY: the file is given to our own switch process only, which writes nothing but posted buffers.
    /// let region = unsafe { region.trust_peer() };
    /// let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
    /// let mut page = pool.alloc().ok_or("no page")?;
    /// page[..5].copy_from_slice(b"hello");
    /// let bytes = bytes::Bytes::from(page.freeze_range(0..5));
    /// assert_eq!(bytes, &b"hello"[..]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Safety
    ///
    /// Until the region is dropped, each party that can write the file (a process that has its descriptor or a mapping of
    /// it, and a device that such a process gives it to) writes only to buffers that are posted to that party, and to
    /// each only until it has handed the buffer back or its queue was stopped. This includes other mappings of the file in
    /// this process. A party that breaks the promise changes bytes under a `&[u8]`, which is undefined behaviour here.
    #[must_use]
    pub unsafe fn trust_peer(self) -> Region<TrustedPeer> {
        let Self { at, len, descs, fd, in_process, offset, pages, used, order, backing, _owner, kind: PhantomData } =
            self;
        Region { at, len, descs, fd, in_process, offset, pages, used, order, backing, _owner, kind: PhantomData }
    }
}

impl<M: Mapped> Region<M> {
    /// The first byte's address in this process.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.at
    }
}

impl<M: Mapped> Region<M> {
    /// The fragment of `bytes`, found by their address: another holder of the bytes. It is found for a
    /// [`Bytes`](bytes::Bytes) that was made from a fragment by `From`, while that was the only value on its page, and
    /// for its clones and slices. `None` for all other bytes. `None` also for bytes of this region that a page has, or
    /// a `Bytes` with an owner of another type: they could be written again while a fragment of them is alive.
    ///
    /// Cost: arithmetic, a look at the page's descriptor, and one atomic addition.
    #[must_use]
    pub fn frag_of(&self, bytes: &[u8]) -> Option<Frag<M>> {
        let at = bytes.as_ptr().addr().wrapping_sub(self.at.addr());
        let (index, offset) = (at / self.page_size(), at % self.page_size());
        let fits = !bytes.is_empty() && index < self.pages as usize && bytes.len() <= self.page_size() - offset;
        if !fits {
            return None;
        }
        // SAFETY: *described*: the index was just checked. Descriptors that were never used are zero, and not frozen.
        let desc = unsafe { self.descs.at.cast::<Desc>().add(index) };
        // SAFETY: as above; the region keeps descriptors.
        let d = unsafe { desc.as_ref() };
        if !d.is_frozen() {
            return None;
        }
        d.get();
        // SAFETY: the caller borrows bytes of the page. Safe code borrows them from a value on the page. Code that
        // makes a reference from an address has promised that the bytes do not change meanwhile. So there is another
        // count besides the one just made, and the page is in use. *frozen*: the value was a fragment at some moment of
        // the borrow. It cannot become a page while it is borrowed, and not afterwards while this count exists. So no
        // value writes the bytes.
        Some(unsafe { Page::from_desc(desc, offset as u32, bytes.len() as u32) }.freeze())
    }
}

impl<M: Memory> Region<M> {
    /// Makes a region of `pages` pages on memory that has room for them, with descriptors.
    pub(crate) fn on(source: Source, pages: u32, order: u8) -> Result<Self, RegionError> {
        let Source { at, len, fd, offset, backing, owner } = source;
        let bytes = (pages as usize * size_of::<Desc>()).next_multiple_of(HUGE);
        let descs = Mapping::new(None, bytes, MapFlags::NORESERVE).map_err(|source| {
            let step = "map descriptors for";
            RegionError::System { step, bytes: len, kind: M::NAME, source }
        })?;
        // In a model, descriptors of zeros are not valid.
        #[cfg(all(test, loom))]
        for i in 0..pages as usize {
            // SAFETY: *described*: there is room for this many descriptors.
            unsafe { descs.at.cast::<Desc>().add(i).write(Desc::for_model(1)) };
        }
        let used = AtomicU32::new(0);
        let (in_process, kind) = (false, PhantomData);
        Ok(Self { at, len, descs, fd, in_process, offset, pages, used, order, backing, _owner: owner, kind })
    }

    /// The first byte's address in this process; 0 if the memory is not mapped.
    #[inline]
    pub(crate) fn addr(&self) -> usize {
        self.at.addr()
    }

    /// How many pages there are.
    #[must_use]
    #[inline]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Bytes in a page: a power of two, at least 4096.
    #[must_use]
    #[inline]
    pub fn page_size(&self) -> usize {
        PAGE_SIZE << self.order
    }

    /// Bytes of memory. A region that made its memory itself has whole huge pages, so this can be more than the pages
    /// take.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a region has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The backing of the memory.
    #[must_use]
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// The file behind the memory, if there is one, to be given to a peer. A file that the region made itself is
    /// sealed: no process can make it shorter. `None` for a region that was built for a device
    /// [in this process](RegionOptions::build_in_process).
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| !self.in_process).map(AsFd::as_fd)
    }

    /// The file behind the memory, also of a region that was built for a device [in this
    /// process](RegionOptions::build_in_process).
    ///
    /// # Safety
    ///
    /// For such a region, what [`trust_peer`](Region::trust_peer) asks for holds for each party
    /// that gets the file by this.
    #[must_use]
    pub unsafe fn in_process_fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// The offset of the first byte in [its file](Self::fd): 0, unless [`from_fd`](Region::from_fd) got a range that
    /// begins later.
    #[must_use]
    pub fn file_offset(&self) -> u64 {
        self.offset
    }

    /// The number of accesses that found a page of the memory gone: another process that has the file has truncated it,
    /// or punched a hole into it that cannot be filled. 0 without the [handler](crate::sigbus) of SIGBUS, for memory
    /// without a file, and for memory that was provided as a range of this process. Looks through the list of all
    /// mappings.
    #[must_use]
    pub fn lost(&self) -> u64 {
        sigbus::lost_at(self.addr())
    }

    /// Page `index`, to be handed out by a [`Provider`](crate::Provider) that keeps its pages by number.
    ///
    /// A page in [quarantine](crate::PagePool::quarantine) leaves it so, after its device has stopped for good. It goes
    /// back to the provider from which its pool had it ([`Provider::give`](crate::Provider::give)).
    ///
    /// # Safety
    ///
    /// No pool and no user has the page: each [`RawPage`] that was claimed for it was returned to the caller or
    /// dropped, or is in quarantine, whose last part was dropped, and to which no device writes any more. No other
    /// provider hands out pages of the region, and the region lives until the page is returned.
    ///
    /// # Panics
    ///
    /// If there is no such page.
    #[inline]
    pub unsafe fn claim(&self, index: u32) -> RawPage<M> {
        let desc = self.desc(index);
        // SAFETY: *described*; and the caller guarantees that the page has no other owner.
        unsafe {
            desc.as_ref().leave_quarantine();
            RawPage::from_desc(desc)
        }
    }

    /// The number of the page that a fragment is in, or `None` if the fragment is in another region. Costs only
    /// arithmetic: the page's descriptor, which another CPU may have written last, is not read.
    #[inline]
    #[must_use]
    pub fn index_of(&self, frag: &Frag<M>) -> Option<u32> {
        let at = frag.desc_addr().wrapping_sub(self.descs.at.as_ptr().addr());
        let index = at / size_of::<Desc>();
        (index < self.pages as usize).then_some(index as u32)
    }

    /// Gives back `n` counts of page `index`. With the last count of all, the page is returned, as after a drop. May be
    /// called on any thread. Takes no lock; only if the pool has ended, it takes the provider's lock.
    ///
    /// # Safety
    ///
    /// `n` is at least one. The caller has turned at least `n` fragments of this page of this region into counts by
    /// [`Frag::into_count`], has not given these counts back, and gives them up now.
    #[inline]
    pub unsafe fn put(&self, index: u32, n: u32) {
        debug_assert!(index < self.pages && n > 0);
        // SAFETY: *described*: a fragment had this page, so the page exists. The caller guarantees the counts.
        unsafe { desc::put_many(self.descs.at.cast::<Desc>().add(index as usize), n) };
    }

    /// Turns a count of page `index` that [`Page::into_count`] made into a page of `bytes`, the same bytes as before or
    /// others.
    ///
    /// # Safety
    ///
    /// The caller has turned a page of this region into this count, has not used the count since, and gives it up now.
    /// The page has these bytes, and no other value has them.
    #[inline]
    #[must_use]
    pub unsafe fn page(&self, index: u32, bytes: Range<usize>) -> Page<M> {
        debug_assert!(
            index < self.pages && bytes.start <= bytes.end && bytes.end <= self.page_size(),
            "{bytes:?} of page {index}"
        );
        // SAFETY: *described*: a page has this index. The caller guarantees the count and the bytes.
        unsafe {
            let desc = self.descs.at.cast::<Desc>().add(index as usize);
            Page::from_desc(desc, bytes.start as u32, (bytes.end - bytes.start) as u32)
        }
    }

    /// Prefetches the descriptor of page `index`, if there is one, for the next owner of the [page](Self::page). This
    /// is a hint, and does not wait.
    #[inline]
    pub fn prefetch(&self, index: u32) {
        if index < self.pages {
            // SAFETY: *described*: the index was just checked.
            home::prefetch(unsafe { self.descs.at.cast::<Desc>().add(index as usize) });
        }
    }

    /// The descriptor of page `index`. Its constant fields are filled in.
    #[inline]
    pub(crate) fn desc(&self, index: u32) -> NonNull<Desc> {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        // Relaxed: a thread that looks for its own pages has taken them before. The number only grows, so the load saves the atomic
        // operation for a page that was handed out before. Providers without a pool's cache come here for each packet.
        if self.used.load(Ordering::Relaxed) <= index {
            self.used.fetch_max(index + 1, Ordering::Relaxed);
        }
        // Where nothing is mapped this is the offset, in the shape of a pointer.
        let addr = self.at.wrapping_add(index as usize * self.page_size());
        let file = self.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: *described*: the index was just checked; an all-zero descriptor is a valid one.
        unsafe {
            let desc = self.descs.at.cast::<Desc>().add(index as usize);
            desc.as_ref().describe(index, addr, file);
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

/// # Errors
///
/// [`RegionError::Order`].
pub(crate) fn check_order(order: u8) -> Result<(), RegionError> {
    if order > 9 { Err(RegionError::Order { order }) } else { Ok(()) }
}
