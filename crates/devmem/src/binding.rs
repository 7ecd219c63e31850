//! Bindings: device memory that queues receive into and senders send from, and the references that
//! keep that memory.
//!
//! A user unbinds memory while pages are with a device, in sockets and in flight, and may free it
//! only when no page is used any more. No thread knows when that is. So each of these holds a
//! reference, and the last of them releases the memory.
//!
//! ```text
//!   Binding (owner) ─────────────────────────────┐
//!   Socket, once for each binding it has met ────┤
//!   fragment being sent, each ───────────────────┼──► count ── BoundMemory ── Region ── dma-buf
//!   provider ────────────────────────────────────┘     │
//!      ▲                                               └─ the last put: cleanup, on a Worker
//!      │  kept by count
//!   page pool ◄── page ◄── fragment received            no count on the binding
//! ```
//!
//! A received fragment keeps its page, the page keeps its pool, and the pool keeps the provider.
//! The provider holds one reference to the binding. So receiving a fragment does not touch the
//! binding's count.

use crate::ledger::Ledger;
use crate::tokens::Pages;
use netmem_packet::Unbind;
use netmem_pool::{Device, Direction, DmaDomain, MapError, Provider, RawPage, Region, RegionError, RegionProvider};
use netmem_refs::{Count, NoMemory, Owner, PercpuRef, RcuRef, Ref, RefCount, Worker};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::FileType;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// A reference to a binding's memory, held by a socket or by a fragment that is being sent.
pub type BindingRef<C = PercpuRef> = Ref<BoundMemory, C>;

/// A kind of reference count that a binding can have. Use [`PercpuRef`]; the other kinds exist to
/// be compared with it.
pub trait BindingCount: Count {
    /// The name of this kind in reports.
    const NAME: &'static str;
    /// Whether counting writes no shared cache line while the binding lives.
    const PER_CPU: bool = false;
}

impl BindingCount for PercpuRef {
    const NAME: &'static str = "percpuref";
    const PER_CPU: bool = true;
}

impl BindingCount for RefCount {
    const NAME: &'static str = "refcount";
}

impl BindingCount for RcuRef {
    const NAME: &'static str = "rcuref";
}

/// The reason why memory was not bound. The descriptor is closed, and nothing else has changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The descriptor does not report the size of its file, or its file is not memory.
    #[error("the descriptor that was to be bound has no size to tell: {source}; bind a dma-buf or a memfd")]
    Descriptor {
        /// The error of the system, or the type of the file.
        r#source: io::Error,
    },
    /// The size of the memory is not a multiple of the page size.
    #[error(
        "{bytes} bytes of device memory are not whole pages of {page_size}: {rest} bytes are left; make the memory a \
         multiple of the page size, or use a smaller page order"
    )]
    Size {
        /// Bytes of memory.
        bytes: u64,
        /// Bytes in a page.
        page_size: u64,
        /// Bytes behind the last whole page.
        rest: u64,
    },
    /// The memory cannot be cut into pages.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// There is no memory for the count.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// The way in which a binding is counted at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CountMode {
    /// On a counter of each CPU: counting writes no shared cache line.
    PerCpu,
    /// On one atomic: the count is not a [`PercpuRef`], or the binding was unbound.
    Atomic,
}

/// Counters of a binding. Each value is correct, but they are not of the same moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BindingStats {
    /// The id of the binding.
    pub id: u64,
    /// The number of pages of the binding.
    pub pages: u32,
    /// The number of pages that the pools have allocated: posted to a device, free in a pool, or
    /// held by users.
    pub in_use: u64,
    /// The number of attached queues.
    pub queues: usize,
    /// The way in which the binding is counted.
    pub count: CountMode,
}

/// A binding's memory, which all holders of references share. It is reached by a [`Binding`] or a
/// [`BindingRef`].
pub struct BoundMemory {
    id: u64,
    /// Allocates the pages of this memory, to the [`BindingProvider`] only.
    supply: Arc<RegionProvider<Device>>,
    ledger: Ledger,
    queues: Arc<AtomicUsize>,
    /// The DMA domains in which the whole memory is mapped for sending, and the address of its
    /// first byte in each.
    mappings: Mutex<Vec<(Arc<dyn DmaDomain>, u64)>>,
    /// Calls that remove the memory from devices to which it was added while they were running.
    unbinds: Mutex<Vec<Unbind>>,
    counted: (&'static str, bool),
}

impl BoundMemory {
    /// The binding's id: a number that no other binding of this process ever has.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The pages, in the form of an entry of a device's memory table.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<Device>> {
        self.supply.region()
    }

    /// The counters of the binding.
    #[must_use]
    pub fn stats(&self) -> BindingStats {
        let per_cpu = self.counted.1 && !self.ledger.is_closed();
        BindingStats {
            id: self.id,
            pages: self.region().pages(),
            in_use: self.ledger.out(),
            queues: self.queues.load(Ordering::Relaxed),
            count: if per_cpu { CountMode::PerCpu } else { CountMode::Atomic },
        }
    }

    pub(crate) fn attached(&self) -> &Arc<AtomicUsize> {
        &self.queues
    }

    /// Stores `unbind`, which the [`Worker`] calls after the last reference was dropped.
    pub(crate) fn when_gone(&self, unbind: Unbind) {
        self.unbinds.lock().unwrap_or_else(PoisonError::into_inner).push(unbind);
    }

    /// Maps the whole memory in `domain` for sending, until the binding is gone. Returns the
    /// address of the first byte there.
    pub(crate) fn map_for(&self, domain: &Arc<dyn DmaDomain>) -> Result<u64, MapError> {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, base)) = mappings.iter().find(|(known, _)| Arc::ptr_eq(known, domain)) {
            return Ok(*base);
        }
        let len = self.region().len();
        let file = self.region().fd().ok_or(MapError::File { offset: 0, len })?;
        let base = domain.map_file(file, 0, len, Direction::ToDevice)?;
        mappings.push((domain.clone(), base));
        Ok(base)
    }

    /// Releases the memory when the last reference is gone. May block, because it closes the file.
    fn cleanup(self) {
        let len = self.region().len();
        for (domain, base) in self.mappings.into_inner().unwrap_or_else(PoisonError::into_inner) {
            domain.unmap(base, len);
        }
        self.unbinds.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().for_each(|unbind| unbind());
        let lost = self.ledger.out();
        if lost > 0 {
            LOST.fetch_add(lost, Ordering::Relaxed);
            netmem_pool::trace::error!(
                binding = self.id,
                pages = lost,
                "a binding was released, and some of its pages were not returned"
            );
        } else {
            netmem_pool::trace::debug!(binding = self.id, "a binding has gone");
        }
        drop(self.supply);
        CLEANED.fetch_add(1, Ordering::Release);
    }
}

static LOST: AtomicU64 = AtomicU64::new(0);
static CLEANED: AtomicU64 = AtomicU64::new(0);

/// The number of pages of this process's bindings that had not been returned when their binding was
/// released. A page is lost if a device kept it when the device died
/// ([quarantined](netmem_pool::PagePool::quarantine)), or if it was leaked
/// ([`forget`](std::mem::forget)). Otherwise this is 0.
#[must_use]
pub fn lost_pages() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// The number of bindings of this process whose memory was released after their last reference.
#[must_use]
pub fn cleaned_up() -> u64 {
    CLEANED.load(Ordering::Acquire)
}

// SAFETY: an id is used once, and the pages of a region never change. If a ledger is closed
// and has no pages out, it stays so. A page to which there is a reference is out. `is_drained` is
// an acquire, so a thread that finds the ledger drained sees everything that happened before the
// last put.
unsafe impl Pages for BoundMemory {
    #[inline]
    fn id(&self) -> u64 {
        self.id
    }

    #[inline]
    fn pages(&self) -> u32 {
        self.region().pages()
    }

    #[inline]
    unsafe fn put(&self, index: u32, n: u32) {
        // SAFETY: the caller's promise. References to pages of a binding are counts into which
        // fragments were converted.
        unsafe { self.region().put(index, n) };
    }

    #[inline]
    fn drained(&self) -> bool {
        self.ledger.is_drained()
    }
}

impl fmt::Debug for BoundMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BoundMemory({:?}, {})", self.stats(), self.counted.0)
    }
}

/// Allocates the pages of a binding to the pools of queues that receive into it. Each binding has
/// one provider, which holds one reference to it.
///
/// After the unbinding, the provider allocates no pages.
pub(crate) struct BindingProvider<C: BindingCount> {
    pub(crate) binding: BindingRef<C>,
}

// SAFETY: pages come from the region's supply, which allocates a page to one holder at a time, and
// return to it. The provider has a reference to the binding, which keeps the region and the supply.
unsafe impl<C: BindingCount> Provider<Device> for BindingProvider<C> {
    fn alloc(&self, pages: &mut [Option<RawPage<Device>>]) -> usize {
        let BoundMemory { supply, ledger, .. } = &*self.binding;
        let want = pages.len() as u64;
        if !ledger.take(want) {
            return 0;
        }
        let taken = supply.alloc(pages);
        if (taken as u64) < want {
            ledger.give(want - taken as u64);
        }
        taken
    }

    unsafe fn release(&self, page: RawPage<Device>) {
        // SAFETY: the caller promises that `alloc` returned the page, and `alloc` allocates from
        // the supply.
        unsafe { self.binding.supply.release(page) };
        self.binding.ledger.give(1);
    }

    fn page_size(&self) -> usize {
        self.binding.region().page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<Device>)) {
        f(self.binding.region());
    }
}

impl<C: BindingCount> fmt::Debug for BindingProvider<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BindingProvider({:?})", *self.binding)
    }
}

/// The owner of bound device memory. Dropping it unbinds the memory.
///
/// After the unbinding, no page is allocated and nothing new is sent. Pages that are out stay
/// valid, and are returned as before. Pools with pages out, sockets and fragments that are being
/// sent still hold references. When the last reference is gone, the memory is released. The
/// [`Worker`] closes its file, because closing may block.
#[must_use = "a binding that is dropped is unbound"]
pub struct Binding<C: BindingCount = PercpuRef> {
    owner: Owner<BoundMemory, C>,
    provider: Arc<BindingProvider<C>>,
}

impl Binding<PercpuRef> {
    /// Binds a dma-buf, or a memfd in its place, in pages of `4 KiB << order`. The memory is never
    /// mapped into this process. The host memory of a binding does not depend on its size:
    /// a page descriptor becomes resident when its page is first used.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn new(file: impl Into<OwnedFd>, order: u8, worker: &Arc<Worker>) -> Result<Self, BindError> {
        Self::counted(file, order, worker)
    }

    /// The same for `len` bytes of memory whose file does not report its size, as the driver of a
    /// GPU exports. A device that cannot import the file refuses it when a queue is attached, or
    /// when the device is probed.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn exported(file: impl Into<OwnedFd>, len: u64, order: u8, worker: &Arc<Worker>) -> Result<Self, BindError> {
        Self::over(Region::exported(file, len, order)?, len, worker)
    }
}

/// The size in bytes of the memory of a descriptor.
fn size(file: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    // On some systems the file of a dma-buf has no type. Files of the types below may have a size,
    // too, but not that of memory.
    let other = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => "a directory",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device file",
        _ => return Ok(stat.st_size.unsigned_abs()),
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {other}")))
}

impl<C: BindingCount> Binding<C> {
    /// [`new`](Binding::new) with another kind of count.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn counted(file: impl Into<OwnedFd>, order: u8, worker: &Arc<Worker>) -> Result<Self, BindError> {
        let file = file.into();
        let bytes = size(file.as_fd()).map_err(|source| BindError::Descriptor { source })?;
        Self::over(Region::unmapped(file, order)?, bytes, worker)
    }

    /// Binds a region of `bytes` bytes of memory.
    fn over(region: Region<Device>, bytes: u64, worker: &Arc<Worker>) -> Result<Self, BindError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let page_size = region.page_size() as u64;
        if !bytes.is_multiple_of(page_size) {
            return Err(BindError::Size { bytes, page_size, rest: bytes % page_size });
        }
        let memory = BoundMemory {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            supply: RegionProvider::new(region),
            ledger: Ledger::new(),
            queues: Arc::default(),
            mappings: Mutex::default(),
            unbinds: Mutex::default(),
            counted: (C::NAME, C::PER_CPU),
        };
        let worker = worker.clone();
        let release = move |memory| worker.defer(move || BoundMemory::cleanup(memory));
        let owner = Owner::try_with_release(memory, release)?;
        let provider = Arc::new(BindingProvider { binding: Owner::get(&owner) });
        Ok(Self { owner, provider })
    }

    /// The provider from which the pools of the binding's queues allocate their pages. If a user's
    /// own provider allocates pages from this provider, it must keep this provider and not only the
    /// region: payload that is queued on sockets relies on it.
    #[must_use]
    pub fn provider(&self) -> Arc<dyn Provider<Device>> {
        self.provider.clone()
    }

    pub(crate) fn own_provider(&self) -> &Arc<BindingProvider<C>> {
        &self.provider
    }

    /// Returns a reference to the memory. It keeps the memory even after the unbinding.
    /// [`as_ref`](AsRef::as_ref) borrows one.
    pub fn reference(&self) -> BindingRef<C> {
        self.provider.binding.clone()
    }

    /// Unbinds the memory, as dropping the binding does, but only if no queue is attached: an
    /// attached queue would receive no more pages. [`Netdev::unbind`](crate::Netdev::unbind)
    /// detaches the queues first.
    ///
    /// # Errors
    ///
    /// If queues are attached, the error contains the binding, which is live as before.
    pub fn unbind(self) -> Result<(), StillAttached<C>> {
        match self.stats().queues {
            0 => Ok(()),
            queues => Err(StillAttached { binding: Box::new(self), queues }),
        }
    }
}

impl<C: BindingCount> AsRef<BindingRef<C>> for Binding<C> {
    fn as_ref(&self) -> &BindingRef<C> {
        &self.provider.binding
    }
}

impl<C: BindingCount> Deref for Binding<C> {
    type Target = BoundMemory;

    fn deref(&self) -> &BoundMemory {
        &self.owner
    }
}

impl<C: BindingCount> Drop for Binding<C> {
    fn drop(&mut self) {
        // The ledger is closed before the owner's drop kills the count. So once the binding refuses
        // references, it allocates no pages either.
        self.ledger.close();
    }
}

impl<C: BindingCount> fmt::Debug for Binding<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Binding({:?})", **self)
    }
}

/// The error that a binding was not unbound because queues receive into it. Nothing has changed.
#[derive(Error)]
#[error("binding {} is attached to {queues} queues; detach them first, or drop it and let them starve", binding.id())]
pub struct StillAttached<C: BindingCount> {
    /// The binding.
    pub binding: Box<Binding<C>>,
    /// The number of attached queues.
    pub queues: usize,
}

impl<C: BindingCount> fmt::Debug for StillAttached<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StillAttached({:?}, {} queues)", self.binding, self.queues)
    }
}
