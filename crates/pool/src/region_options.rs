//! The options of a region, and how its memory is taken from the system.

use crate::error::RegionError;
use crate::mapping::{self, HUGE, Mapping};
use crate::memory::{Memory, PAGE_SIZE, PeerShared, SystemMemory, TrustedPeer};
use crate::region::{Backing, Region, Source, check_order};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::mm::MapFlags;
use std::io;

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
    /// transparent huge pages, unless [`reserved_huge_pages`](Self::reserved_huge_pages) requests
    /// others.
    #[must_use]
    pub fn huge_pages(mut self, huge: bool) -> Self {
        self.huge = huge;
        self
    }

    /// Whether to take 2 MiB pages that the administrator has reserved (`vm.nr_hugepages`), if
    /// there are enough of them. Otherwise the region has transparent ones: [`Region::backing`]
    /// returns which it has. Off by default, because the reserved pages may be meant for another
    /// program, which would then start without them. Has no effect if
    /// [`huge_pages`](Self::huge_pages) is off.
    #[must_use]
    pub fn reserved_huge_pages(mut self, reserved: bool) -> Self {
        self.reserved = reserved;
        self
    }

    /// Allocates the memory on one NUMA node.
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
        self.make()
    }

    /// Makes a region for a device in this process, which maps the memory's file a second time. No
    /// safe function hands the file out, so nothing but the device can write the memory, and its
    /// pages are slices: see [`Region::in_process_fd`].
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn build_in_process(self) -> Result<Region<TrustedPeer>, RegionError> {
        let region = self.make::<PeerShared>()?;
        // SAFETY: a party gets the file by `in_process_fd` only, whose caller promises the same.
        Ok(unsafe { region.trust_peer() }.in_process())
    }

    fn make<M: SystemMemory>(&self) -> Result<Region<M>, RegionError> {
        check_order(self.order)?;
        let pages =
            u32::try_from(self.pages).ok().filter(|&n| n > 0).ok_or(RegionError::Pages { pages: self.pages })?;
        let bytes = (self.pages.checked_mul(PAGE_SIZE << self.order))
            .and_then(|b| b.checked_next_multiple_of(HUGE))
            .ok_or(RegionError::Pages { pages: self.pages })?;

        let huge = if self.huge && self.reserved { self.prepare::<M>(bytes, Backing::Huge).ok() } else { None };
        let (mut memory, fd, backing) = match huge {
            Some(region) => region,
            None => self.prepare::<M>(bytes, Backing::Plain)?,
        };
        if self.lock {
            let limit = mapping::memlock_limit();
            mapping::lock(&memory).map_err(|_| RegionError::Memlock { bytes, limit })?;
        }
        let system = |source| RegionError::System { step: "keep from child processes", bytes, kind: M::NAME, source };
        memory.keep_from_children().map_err(system)?;
        let (at, len) = (memory.at.as_ptr().cast(), memory.len);
        Region::on(Source { at, len, fd, offset: 0, backing, owner: Box::new(memory) }, pages, self.order)
    }

    /// Maps, places and populates the memory, of reserved huge pages or of others.
    fn prepare<M: Memory>(
        &self,
        bytes: usize,
        want: Backing,
    ) -> Result<(Mapping, Option<OwnedFd>, Backing), RegionError> {
        let system = |step| move |e: io::Error| RegionError::System { step, bytes, kind: M::NAME, source: e };
        let huge = want == Backing::Huge;
        // The system counts reserved huge pages exactly. Of other memory it promises more than it
        // has.
        if let Some(available) = mapping::available().filter(|&a| !huge && self.populate && bytes > a) {
            return Err(RegionError::TooLittle { bytes, available });
        }
        let fd = match (M::SHARED_BY_FD, huge) {
            (false, _) => None,
            (true, true) => Some(mapping::memfd(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)),
            (true, false) => Some(mapping::memfd(bytes, MemfdFlags::empty())),
        };
        let fd = fd.transpose().map_err(system("create a file of"))?;
        // A region that becomes resident only where it is touched may be larger than the machine's
        // memory.
        let flags = if self.populate { MapFlags::empty() } else { MapFlags::NORESERVE };
        let file = fd.as_ref().map(AsFd::as_fd);
        let memory = if huge { Mapping::huge(file, bytes) } else { Mapping::new(file.map(|fd| (fd, 0)), bytes, flags) };
        let memory = memory.map_err(system("map"))?;
        if let Some(node) = self.node {
            mapping::bind(&memory, node).map_err(|source| RegionError::Node { node, source })?;
        }
        if self.populate {
            mapping::populate(&memory).map_err(system("populate"))?;
        }
        let transparent = self.huge && !huge && mapping::make_transparent(&memory, M::SHARED_BY_FD, self.populate);
        Ok((memory, fd, if transparent { Backing::Transparent } else { want }))
    }
}
