//! Memory that the user provides: an address range of this process, or a file; and the memory of a
//! device, which is a file that stays unmapped.
//!
//! ```text
//!   from_raw   [ range of this process ], and its owner
//!              Private or KernelShared: the user's choice
//!   from_fd    [ range of a file ] ──mmap──► [ range of this process ]
//!              PeerShared: others who have the file can write it
//!   unmapped   [ file ]
//!              Device: numbers and offsets, no addresses
//! ```

use crate::error::RegionError;
use crate::mapping::{Mapping, huge_page};
use crate::memory::{Device, PAGE_SIZE, PeerShared, Readable, SystemMemory};
use crate::region::{Backing, Region, Source, check_order};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::MapFlags;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::ptr::{self, NonNull};

impl<M: Readable + SystemMemory> Region<M> {
    /// A region of the `len` bytes at `at`, in pages of `4 KiB << order`. Bytes behind the last
    /// whole page are not used. `owner` is dropped together with the region, or at once if the
    /// region cannot be made.
    ///
    /// The kind of memory follows from the other parties that write it. If another process can
    /// write the memory, use a file: see [`from_fd`](Region::from_fd). The user is responsible for
    /// huge pages, the NUMA node, locking, and for keeping the range from child processes
    /// (`MADV_DONTFORK`).
    ///
    /// ```
    /// # use netmem_pool::{PoolOptions, Private, Region, RegionProvider};
    /// # use std::alloc::{Layout, alloc_zeroed, dealloc};
    /// # use std::ptr::NonNull;
    /// struct Block(NonNull<u8>, Layout);
    ///
    /// // SAFETY: a block of memory is no thread's.
    /// unsafe impl Send for Block {}
    ///
    /// impl Drop for Block {
    ///     fn drop(&mut self) {
    ///         // SAFETY: allocated with this layout.
    ///         unsafe { dealloc(self.0.as_ptr(), self.1) }
    ///     }
    /// }
    ///
    /// let layout = Layout::from_size_align(64 * 4096, 4096)?;
    /// // SAFETY: the layout has a size. The block is ours, all zeros, and there until it is dropped.
    /// let region = unsafe {
    ///     let at = NonNull::new(alloc_zeroed(layout)).ok_or("no memory")?;
    ///     Region::<Private>::from_raw(at, layout.size(), 0, Block(at, layout))?
    /// };
    /// let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
    /// assert_eq!(pool.alloc().expect("64 pages").as_slice(), [0; 4096]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`RegionError::Order`], [`Unaligned`](RegionError::Unaligned),
    /// [`Small`](RegionError::Small), [`Pages`](RegionError::Pages), or
    /// [`System`](RegionError::System) if there is no room for descriptors.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped the bytes are mapped, initialised, readable and writable, and are
    /// accessed through the region only. If they are [`KernelShared`](crate::KernelShared) the
    /// kernel accesses them too, and writes no frame that it has delivered. A file behind them does
    /// not become shorter.
    pub unsafe fn from_raw(
        at: NonNull<u8>,
        len: usize,
        order: u8,
        owner: impl Send + 'static,
    ) -> Result<Self, RegionError> {
        let (pages, len) = whole_pages(len, order)?;
        let page_size = PAGE_SIZE << order;
        if !at.addr().get().is_multiple_of(page_size) {
            return Err(RegionError::Unaligned { addr: at.addr().get(), page_size });
        }
        let (at, owner) = (at.as_ptr(), Box::new(owner));
        Self::on(Source { at, len, fd: None, offset: 0, backing: Backing::Provided, owner }, pages, order)
    }
}

impl Region<PeerShared> {
    /// A region of a range of `file`, in bytes. The range is mapped, in pages of `4 KiB << order`.
    /// The file is a memfd, a file on hugetlbfs, a dma-buf that can be mapped, or any other file
    /// that has a size. Bytes behind the last whole page are not used. Pages become resident when
    /// they are touched.
    ///
    /// The range begins at a multiple of 4096, or on hugetlbfs at a multiple of the file system's
    /// page size. It may end anywhere. On hugetlbfs, the huge page in which the range ends is
    /// mapped and reserved as a whole. Two regions may be ranges of one file. If their ranges
    /// overlap, they share the same bytes, as two processes do. A peer that gets the file can write
    /// all of it.
    ///
    /// A memfd is sealed against shrinking, unless it already is. For other files the user makes
    /// sure that no process shortens them: otherwise the next access would raise SIGBUS.
    ///
    /// ```
    /// use netmem_pool::{PoolOptions, Region, RegionProvider};
    /// # use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    /// let file = memfd_create("frames", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    /// ftruncate(&file, 1 << 20)?;
    /// // The first 64 KiB are something else's.
    /// let region = Region::from_fd(file, 64 << 10.., 0)?;
    /// assert_eq!((region.pages(), region.file_offset()), (240, 64 << 10));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`RegionError::Order`], [`Range`](RegionError::Range), [`Small`](RegionError::Small),
    /// [`Pages`](RegionError::Pages); [`File`](RegionError::File) if it cannot be mapped for
    /// reading and writing; [`Shrinkable`](RegionError::Shrinkable); or
    /// [`System`](RegionError::System) if there is no room for descriptors.
    pub fn from_fd(file: impl Into<OwnedFd>, range: impl RangeBounds<u64>, order: u8) -> Result<Self, RegionError> {
        let file = file.into();
        let (offset, len) = within(&range, size(file.as_fd())?)?;
        let (pages, len) = whole_pages(len, order)?;
        let failed = |step| move |source| RegionError::File { step, source };
        // Only the kernel knows the alignment of reserved huge pages. It maps whole ones, and then
        // refuses to unmap, or to keep from child processes, a part of one. The file ends with a
        // whole one, too.
        let mapping = match huge_page(file.as_fd()) {
            Some(huge) => Mapping::of_file(file.as_fd(), offset, len.next_multiple_of(huge), huge),
            None => Mapping::new(Some((file.as_fd(), offset)), len, MapFlags::empty()),
        };
        let mut mapping = mapping.map_err(failed("map"))?;
        mapping.keep_from_children().map_err(failed("keep from child processes"))?;
        let at = mapping.at.as_ptr().cast();
        let (fd, owner) = (Some(file), Box::new(mapping));
        Self::on(Source { at, len, fd, offset, backing: Backing::Provided, owner }, pages, order)
    }
}

impl Region<Device> {
    /// A region of the whole of `file`, a dma-buf or a file that stands in for one, in pages of `4
    /// KiB << order`. The file is kept open and never mapped. It need not be mappable, readable or
    /// writable. Bytes behind the last whole page are not used.
    ///
    /// Costs no memory but 64 bytes for each page in use, whatever the file's size. A memfd is
    /// sealed as in [`from_fd`](Region::from_fd), for the process that maps it.
    ///
    /// # Errors
    ///
    /// [`RegionError::Order`], [`Small`](RegionError::Small), [`Pages`](RegionError::Pages),
    /// [`File`](RegionError::File), [`Shrinkable`](RegionError::Shrinkable), or
    /// [`System`](RegionError::System) if there is no room for descriptors.
    pub fn unmapped(file: impl Into<OwnedFd>, order: u8) -> Result<Self, RegionError> {
        let file = file.into();
        let len = size(file.as_fd())?;
        Self::exported(file, len, order)
    }

    /// The same of a file that does not report the size of its memory: its creator declares that it
    /// has `len` bytes. What the driver of a GPU exports is such a file. A device that cannot
    /// import it refuses the region.
    ///
    /// # Errors
    ///
    /// [`RegionError::Order`], [`Range`](RegionError::Range), [`Small`](RegionError::Small),
    /// [`Pages`](RegionError::Pages), or [`System`](RegionError::System) if there is no room for
    /// descriptors.
    pub fn exported(file: impl Into<OwnedFd>, len: u64, order: u8) -> Result<Self, RegionError> {
        let (_, len) = within(&.., len)?;
        let (pages, len) = whole_pages(len, order)?;
        let (file, at, owner) = (file.into(), ptr::null_mut(), Box::new(()));
        Self::on(Source { at, len, fd: Some(file), offset: 0, backing: Backing::Provided, owner }, pages, order)
    }
}

/// The number of whole pages in `bytes`, and their length in bytes. An error if there is no whole
/// page, or if there are too many.
fn whole_pages(bytes: usize, order: u8) -> Result<(u32, usize), RegionError> {
    check_order(order)?;
    let page_size = PAGE_SIZE << order;
    match bytes / page_size {
        0 => Err(RegionError::Small { bytes, page_size }),
        n => match u32::try_from(n) {
            Ok(pages) => Ok((pages, n * page_size)),
            Err(_) => Err(RegionError::Pages { pages: n }),
        },
    }
}

/// Where a range of a file of `size` bytes begins, and how long it is.
fn within(range: &impl RangeBounds<u64>, size: u64) -> Result<(u64, usize), RegionError> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => size.max(start),
    };
    let len = end.checked_sub(start).and_then(|len| usize::try_from(len).ok());
    match len.filter(|_| end <= size && start.is_multiple_of(PAGE_SIZE as u64)) {
        Some(len) => Ok((start, len)),
        None => Err(RegionError::Range { start, end, size }),
    }
}

/// A file's size, below which it will not fall if it is a memfd.
fn size(file: BorrowedFd<'_>) -> Result<u64, RegionError> {
    seal(file).map_err(|e| RegionError::Shrinkable { source: e.into() })?;
    rustix::fs::fstat(file)
        .map_err(io::Error::from)
        .and_then(|stat| u64::try_from(stat.st_size).map_err(io::Error::other))
        .map_err(|source| RegionError::File { step: "ask for the size of", source })
}

/// Makes sure that no process makes a memfd shorter. Other files cannot be sealed, though some of
/// them report seals.
fn seal(file: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::fcntl_get_seals(file) {
        Ok(seals) if !seals.contains(SealFlags::SHRINK) => rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK)
            .or_else(|e| if is_memfd(file) { Err(e) } else { Ok(()) }),
        _ => Ok(()),
    }
}

/// By its name, because a file on tmpfs or hugetlbfs answers all other questions alike.
fn is_memfd(file: BorrowedFd<'_>) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_or(true, |name| name.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"))
}
