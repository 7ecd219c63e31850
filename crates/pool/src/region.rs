//! Regions: the memory that pages are cut from, and the page descriptors of it.
//!
//! ```text
//!   memory       [ page 0 ][ page 1 ][ page 2 ] ...   huge pages if there are any;
//!                                                     behind a sealed memfd if a peer needs it
//!   descriptors  [ 64 B   ][ 64 B   ][ 64 B   ] ...   always private and anonymous:
//!                                                     all-zero, resident only where used
//! ```

use crate::desc::Desc;
use crate::error::RegionError;
use crate::frag::Frag;
use crate::mapping::{HUGE, Mapping};
use crate::memory::{Mapped, Memory, PAGE_SIZE, PeerShared, TrustedPeer};
use crate::page::Page;
use crate::raw_page::RawPage;
use crate::recycle;
use crate::sigbus;
use netmem_percpu::prefetch;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::mm::MapFlags;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

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

/// Memory for pages, of one [kind](Memory), with a descriptor for each page.
///
/// | made by | kind | the memory is |
/// | --- | --- | --- |
/// | [`RegionOptions::build`](crate::RegionOptions::build) | every one that is [`SystemMemory`](crate::SystemMemory) | taken from the system |
/// | [`Region::from_raw`] | [`Private`](crate::Private), [`KernelShared`](crate::KernelShared) | a range of this process, provided by the user |
/// | [`Region::<PeerShared>::from_fd`](Region::from_fd) | [`PeerShared`] | a range of a file, provided by the user and mapped here |
/// | [`RegionOptions::build_in_process`](crate::RegionOptions::build_in_process) | [`TrustedPeer`] | taken from the system, for a device in this process |
/// | [`Region::<PeerShared>::trust_peer`](Region::trust_peer) | [`TrustedPeer`] | a region of [`PeerShared`] memory, if the user declares the peer trusted |
/// | [`Region::<Device>::unmapped`](Region::unmapped) | [`Device`](crate::Device) | a file, provided by the user and never mapped here |
///
/// # Fork
///
/// The memory is not in the address space of a child process (`MADV_DONTFORK`): otherwise
/// copy-on-write could separate a driver from its device. A child of a fork may drop everything
/// that it inherited: regions, providers, pages and fragments. That unmaps nothing, and does not
/// affect the parent. A child must not use bytes, also not those of pages that it inherited: at
/// their addresses there is nothing, or later something else. It may `exec`: descriptors are
/// close-on-exec. It may also make regions of its own. At the fork no other thread may be inside of
/// a provider, because the provider's lock would stay locked in the child. Memory of
/// [`Region::from_raw`] is shared with children in the way that its owner chose.
///
/// Invariant (*described*): descriptor `i` is that of page `i`; both stay where they are while the
/// region lives.
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
    /// Descriptors before this one may have been used; those from it on are zero, and perhaps not
    /// resident.
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

// SAFETY: the pointers are to mappings that the value owns; it hands out addresses, never
// references. Only the drop touches the owner.
unsafe impl<M: Memory> Send for Region<M> {}
// SAFETY: as above; descriptors are made of atomics and of cells that the owner of a page alone
// writes.
unsafe impl<M: Memory> Sync for Region<M> {}

impl Region<PeerShared> {
    /// Declares that every peer that gets this region's file is trusted. The region becomes one of
    /// [`TrustedPeer`] memory: its pages and fragments are slices, and its fragments turn into
    /// `Bytes`. Costs nothing: memory, file and descriptors do not change.
    ///
    /// ```
    /// use netmem_pool::{PeerShared, PoolOptions, RegionOptions, RegionProvider};
    ///
    /// let region = RegionOptions::new(8).huge_pages(false).build::<PeerShared>()?;
    /// // SAFETY: only our own switch process gets the file, and writes nothing but posted buffers.
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
    /// Until the region is dropped, each party that can write the file (a process that has its
    /// descriptor or a mapping of it, and a device that such a process sends it to) writes only to
    /// buffers that are posted to that party, and to each only until it has handed the buffer back
    /// or its queue was stopped. This includes other mappings of the file in this process. A party
    /// that breaks the promise changes bytes under a `&[u8]`, which is undefined behaviour here.
    #[must_use]
    pub unsafe fn trust_peer(self) -> Region<TrustedPeer> {
        let Self { at, len, descs, fd, in_process, offset, pages, used, order, backing, _owner, kind: PhantomData } =
            self;
        Region { at, len, descs, fd, in_process, offset, pages, used, order, backing, _owner, kind: PhantomData }
    }
}

impl Region<TrustedPeer> {
    /// The same region, whose file safe functions do not hand out.
    pub(crate) fn in_process(self) -> Self {
        Self { in_process: true, ..self }
    }
}

impl<M: Mapped> Region<M> {
    /// The first byte's address in this process.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.at
    }

    /// The fragment of `bytes`, found by their address: another holder of the bytes. It is found
    /// for a [`Bytes`](bytes::Bytes) that was made from a fragment by `From`, while that was the
    /// only value on its page, and for its clones and slices. `None` for all other bytes. `None`
    /// also for bytes of this region that a page has, or a `Bytes` with an owner of another type:
    /// they could be written again while a fragment of them is alive.
    ///
    /// Cost: arithmetic, a load of the page's descriptor, and one atomic addition.
    #[must_use]
    pub fn frag_of(&self, bytes: &[u8]) -> Option<Frag<M>> {
        let at = bytes.as_ptr().addr().wrapping_sub(self.at.addr());
        let (index, offset) = (at / self.page_size(), at % self.page_size());
        let fits = !bytes.is_empty() && index < self.pages as usize && bytes.len() <= self.page_size() - offset;
        if !fits {
            return None;
        }
        // SAFETY: *described*: the index was just checked. Descriptors that were never used are
        // zero, and not frozen.
        let desc = unsafe { self.descs.at.cast::<Desc>().add(index) };
        // SAFETY: as above; the region keeps descriptors.
        let d = unsafe { desc.as_ref() };
        if !d.is_frozen() {
            return None;
        }
        d.get();
        // SAFETY: the caller borrows bytes of the page. Safe code borrows them from a value on the
        // page. Code that makes a reference from an address has promised that the bytes do not
        // change meanwhile. So there is another count besides the one just made, and the page is in
        // use. *frozen*: the value was a fragment at some moment of the borrow. It cannot become a
        // page while it is borrowed, and not afterwards while this count exists. So no value writes
        // the bytes.
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

    /// Bytes of memory. A region that made its memory itself has whole huge pages, so this can be
    /// more than the pages take.
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

    /// The file behind the memory, if there is one, to be sent to a peer. A file that the region
    /// made itself is sealed: no process can make it shorter. `None` for a region that was built
    /// for a device [in this process](crate::RegionOptions::build_in_process).
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| !self.in_process).map(AsFd::as_fd)
    }

    /// The file behind the memory, also of a region that was built for a device [in this
    /// process](crate::RegionOptions::build_in_process).
    ///
    /// # Safety
    ///
    /// For such a region, what [`trust_peer`](Region::trust_peer) requires holds for each party
    /// that gets the file by this.
    #[must_use]
    pub unsafe fn in_process_fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// The offset of the first byte in [its file](Self::fd): 0, unless [`from_fd`](Region::from_fd)
    /// got a range that begins later.
    #[must_use]
    pub fn file_offset(&self) -> u64 {
        self.offset
    }

    /// The number of accesses that found a page of the memory gone: another process that has the
    /// file has truncated it, or punched a hole into it that cannot be filled. 0 without the
    /// [handler](crate::sigbus) of SIGBUS, for memory without a file, and for memory that was
    /// provided as a range of this process. Searches the list of all mappings.
    #[must_use]
    pub fn lost(&self) -> u64 {
        sigbus::lost_at(self.addr())
    }

    /// Page `index`, to be handed out by a [`Provider`](crate::Provider) that keeps its pages by
    /// number.
    ///
    /// A page in [quarantine](crate::PagePool::quarantine) leaves it so, after its device has
    /// stopped for good. It goes back to the provider from which its pool had it
    /// ([`Provider::release`](crate::Provider::release)).
    ///
    /// # Safety
    ///
    /// No pool and no user has the page: each [`RawPage`] that was claimed for it was returned to
    /// the caller or dropped, or is in quarantine, whose last part was dropped, and to which no
    /// device writes any more. No other provider hands out pages of the region, and the region
    /// lives until the page is returned.
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

    /// The number of the page that a fragment is in, or `None` if the fragment is in another
    /// region. Costs only arithmetic: the page's descriptor, which another CPU may have written
    /// last, is not read.
    #[inline]
    #[must_use]
    pub fn index_of(&self, frag: &Frag<M>) -> Option<u32> {
        let at = frag.desc_addr().wrapping_sub(self.descs.at.as_ptr().addr());
        let index = at / size_of::<Desc>();
        (index < self.pages as usize).then_some(index as u32)
    }

    /// Puts `n` counts of page `index`. With the last count of all, the page is returned, as after
    /// a drop. May be called on any thread. Acquires no lock; only if the pool has ended, it
    /// acquires the provider's lock.
    ///
    /// # Safety
    ///
    /// `n` is at least one. The caller has turned at least `n` fragments of this page of this
    /// region into counts by [`Frag::into_count`], has not put these counts before, and does not
    /// use them afterwards.
    #[inline]
    pub unsafe fn put(&self, index: u32, n: u32) {
        debug_assert!(index < self.pages && n > 0);
        // SAFETY: *described*: a fragment had this page, so the page exists. The caller guarantees
        // the counts.
        unsafe { recycle::put_many(self.descs.at.cast::<Desc>().add(index as usize), n) };
    }

    /// Turns a count of page `index` that [`Page::into_count`] made into a page of `bytes`, the
    /// same bytes as before or others.
    ///
    /// # Safety
    ///
    /// The caller has turned a page of this region into this count, has not used the count since,
    /// and does not use it afterwards. The page has these bytes, and no other value has them.
    #[inline]
    #[must_use]
    pub unsafe fn page(&self, index: u32, bytes: Range<usize>) -> Page<M> {
        debug_assert!(
            index < self.pages && bytes.start <= bytes.end && bytes.end <= self.page_size(),
            "{bytes:?} of page {index}"
        );
        // SAFETY: *described*: a page has this index. The caller guarantees the count and the
        // bytes.
        unsafe {
            let desc = self.descs.at.cast::<Desc>().add(index as usize);
            Page::from_desc(desc, bytes.start as u32, (bytes.end - bytes.start) as u32)
        }
    }

    /// Prefetches the descriptor of page `index`, if there is one, for the next owner of the
    /// [page](Self::page). This is a hint, and does not wait.
    #[inline]
    pub fn prefetch(&self, index: u32) {
        if index < self.pages {
            // SAFETY: *described*: the index was just checked.
            prefetch::to_read(unsafe { self.descs.at.cast::<Desc>().add(index as usize) }.as_ptr());
        }
    }

    /// The descriptor of page `index`. Its constant fields are filled in.
    #[inline]
    pub(crate) fn desc(&self, index: u32) -> NonNull<Desc> {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        // Relaxed: a thread that looks up its own pages has taken them before. The number only
        // grows, so the load saves the atomic operation for a page that was handed out before.
        // Providers without a pool's cache come here for each packet.
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
