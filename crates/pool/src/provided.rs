//! Memory that the user brings: a range of this process, or a file; and a device's memory, a file that stays unmapped.
//!
//! ```text
//!   from_raw    [ range of this process ]  + whoever keeps it         Private or KernelShared, by the user's word
//!   from_fd     [ file ] ──mmap──► [ range of this process ]          PeerShared: whoever else has the file can write it
//!   unmapped    [ file ]                                              Device: numbers and offsets, no addresses
//! ```

use crate::PAGE_SIZE;
use crate::mapping::Mapping;
use crate::memory::{Device, PeerShared, Readable};
use crate::region::{Backing, Ground, Region, RegionError, check_order};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::MapFlags;
use std::io;
use std::ptr::{self, NonNull};

impl<M: Readable> Region<M> {
    /// A region of the `len` bytes at `at`, in pages of `4 KiB << order`; what is left behind the last whole page is not
    /// used. `owner` is dropped when the region goes, or at once if it cannot be made.
    ///
    /// Which kind of memory it is follows from who else writes there. Memory that another process can write is a file: see
    /// [`from_fd`](Region::from_fd). Huge pages, NUMA node, locking, and keeping it from child processes
    /// (`MADV_DONTFORK`) are the user's affair.
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
    /// [`RegionError::Order`], [`Unaligned`](RegionError::Unaligned), [`Small`](RegionError::Small),
    /// [`Pages`](RegionError::Pages), or [`System`](RegionError::System) if there is no room for descriptors.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped the bytes are mapped, initialised, readable and writable, and nobody touches them but by
    /// way of the region; except, if they are [`KernelShared`](crate::KernelShared), the kernel, and it no frame that it
    /// has delivered. A file behind them does not become shorter.
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
        let ground = Ground { at: at.as_ptr(), len, fd: None, backing: Backing::Brought, owner: Box::new(owner) };
        Self::on(ground, pages, order)
    }
}

impl Region<PeerShared> {
    /// A region of the whole of `file`, mapped, in pages of `4 KiB << order`: a memfd, a file on hugetlbfs, a dma-buf that
    /// can be mapped, or any other that has a size. What is left behind the last whole page is not used. Pages become
    /// resident when they are touched.
    ///
    /// A memfd is sealed against shrinking, unless it is already. Of other files the user sees to it that nobody makes
    /// them shorter: the next access would be a SIGBUS.
    ///
    /// # Errors
    ///
    /// [`RegionError::Order`], [`Small`](RegionError::Small), [`Pages`](RegionError::Pages);
    /// [`File`](RegionError::File) if it cannot be mapped for reading and writing;
    /// [`Shrinkable`](RegionError::Shrinkable); or [`System`](RegionError::System) if there is no room for descriptors.
    pub fn from_fd(file: impl Into<OwnedFd>, order: u8) -> Result<Self, RegionError> {
        let file = file.into();
        let (pages, len) = whole_pages(size(file.as_fd())?, order)?;
        let failed = |step| move |source| RegionError::File { step, source };
        // Only the kernel knows how reserved huge pages are to be aligned.
        let mapping = match on_hugetlbfs(file.as_fd()) {
            true => Mapping::huge(Some(file.as_fd()), len),
            false => Mapping::new(Some(file.as_fd()), len, MapFlags::empty()),
        };
        let mapping = mapping.map_err(failed("map"))?;
        mapping.advise(libc::MADV_DONTFORK).map_err(failed("keep from child processes"))?;
        let at = mapping.at.as_ptr().cast();
        let ground = Ground { at, len, fd: Some(file), backing: Backing::Brought, owner: Box::new(mapping) };
        Self::on(ground, pages, order)
    }
}

impl Region<Device> {
    /// A region of the whole of `file`, a dma-buf or what stands in for one, in pages of `4 KiB << order`. The file is kept
    /// open and never mapped; that it can be is not asked for, nor a permission to read or write. What is left behind the
    /// last whole page is not used.
    ///
    /// Costs no memory but 64 bytes for each page in use, whatever the file's size. A memfd is sealed as in
    /// [`from_fd`](Region::from_fd), for whoever maps it instead.
    ///
    /// # Errors
    ///
    /// [`RegionError::Order`], [`Small`](RegionError::Small), [`Pages`](RegionError::Pages),
    /// [`File`](RegionError::File), [`Shrinkable`](RegionError::Shrinkable), or [`System`](RegionError::System) if there
    /// is no room for descriptors.
    pub fn unmapped(file: impl Into<OwnedFd>, order: u8) -> Result<Self, RegionError> {
        let file = file.into();
        let (pages, len) = whole_pages(size(file.as_fd())?, order)?;
        let (at, owner) = (ptr::null_mut(), Box::new(()));
        Self::on(Ground { at, len, fd: Some(file), backing: Backing::Brought, owner }, pages, order)
    }
}

/// How many pages `bytes` hold, and the bytes that they take.
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

/// A file's size, which it will not fall below if it is a memfd.
fn size(file: BorrowedFd<'_>) -> Result<usize, RegionError> {
    seal(file).map_err(|e| RegionError::Shrinkable { source: e.into() })?;
    let size = rustix::fs::fstat(file)
        .map_err(io::Error::from)
        .and_then(|stat| usize::try_from(stat.st_size).map_err(io::Error::other))
        .map_err(|source| RegionError::File { step: "ask for the size of", source })?;
    Ok(size)
}

/// Sees to it that nobody makes a memfd shorter. Other files cannot be sealed, though some of them have seals to show.
fn seal(file: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::fcntl_get_seals(file) {
        Ok(seals) if !seals.contains(SealFlags::SHRINK) => rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK)
            .or_else(|e| if is_memfd(file) { Err(e) } else { Ok(()) }),
        _ => Ok(()),
    }
}

/// By its name, for want of anything better: a file on tmpfs or hugetlbfs answers all other questions alike.
fn is_memfd(file: BorrowedFd<'_>) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_or(true, |name| name.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"))
}

fn on_hugetlbfs(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == libc::HUGETLBFS_MAGIC)
}
