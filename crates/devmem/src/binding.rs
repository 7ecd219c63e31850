//! Bindings: device memory that queues receive into and senders send from, and who keeps it.
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
//! A fragment that is received keeps its page, the page its pool, the pool the provider, and the provider the binding once.
//! Nothing on the way of a received fragment touches the binding's count.

use crate::Pages;
use crate::ledger::Ledger;
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

/// A reference to a binding's memory: a socket's, or that of a fragment being sent.
pub type BindingRef<C = PercpuRef> = Ref<BoundMemory, C>;

/// A reference count that a binding can have. [`PercpuRef`] is the one to use; the others are there to be compared with it.
pub trait BindingCount: Count {
    /// How reports call it.
    const NAME: &'static str;
    /// Whether counting touches no shared line while the binding lives.
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

/// Why memory was not bound. The descriptor is closed, nothing else has happened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The descriptor does not say how large its file is, or is one of something that is no memory.
    #[error("the descriptor that was to be bound has no size to tell: {source}; bind a dma-buf or a memfd")]
    Descriptor {
        /// The system's answer, or what it is instead.
        source: io::Error,
    },
    /// Some of the memory would be in no page.
    #[error(
        "{bytes} bytes of device memory are not whole pages of {page_size}: {rest} bytes are left; make the memory a \
         multiple of the page size, or use a smaller page order"
    )]
    Size {
        /// How much there is.
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

/// How a binding is counted at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CountMode {
    /// On the CPU that counts: no shared line.
    PerCpu,
    /// On one atomic: an ordinary count, or one whose binding was unbound.
    Atomic,
}

/// A binding's numbers. Each is right, and they are not of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BindingStats {
    /// Which binding.
    pub id: u64,
    /// Pages that it has.
    pub pages: u32,
    /// Pages that pools have: posted, at hand, or with users.
    pub in_use: u64,
    /// Queues that are attached.
    pub queues: usize,
    /// How it is counted.
    pub count: CountMode,
}

/// A binding's memory, as those who hold it share it. Reached by a [`Binding`] or a [`BindingRef`].
pub struct BoundMemory {
    id: u64,
    /// Passes out the pages of this memory. Only the [`BindingProvider`] takes pages from it.
    supply: Arc<RegionProvider<Device>>,
    ledger: Ledger,
    queues: Arc<AtomicUsize>,
    /// Domains that the whole of it is mapped in, to be sent from, and the address of its first byte there.
    mappings: Mutex<Vec<(Arc<dyn DmaDomain>, u64)>>,
    /// What makes devices forget the memory that they were given while they ran.
    unbinds: Mutex<Vec<Unbind>>,
    counted: (&'static str, bool),
}

impl BoundMemory {
    /// Which binding: a number that no other binding of this process has, ever.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The pages, as a device's memory table wants them.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<Device>> {
        self.supply.region()
    }

    /// The binding's numbers.
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

    /// `unbind` is called when the last reference has gone, on the [`Worker`].
    pub(crate) fn when_gone(&self, unbind: Unbind) {
        self.unbinds.lock().unwrap_or_else(PoisonError::into_inner).push(unbind);
    }

    /// The address of the first byte in `domain`, where the whole of the memory is mapped to be sent until the binding has gone.
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

    /// The last reference is gone. May block: it closes the file.
    fn cleanup(self) {
        let len = self.region().len();
        for (domain, base) in self.mappings.into_inner().unwrap_or_else(PoisonError::into_inner) {
            domain.unmap(base, len);
        }
        self.unbinds.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().for_each(|unbind| unbind());
        let lost = self.ledger.out();
        if lost > 0 {
            LOST.fetch_add(lost, Ordering::Relaxed);
            tracing::error!(binding = self.id, pages = lost, "a binding has gone, and pages of it did not come home");
        } else {
            tracing::debug!(binding = self.id, "a binding has gone");
        }
        drop(self.supply);
        CLEANED.fetch_add(1, Ordering::Release);
    }
}

static LOST: AtomicU64 = AtomicU64::new(0);
static CLEANED: AtomicU64 = AtomicU64::new(0);

/// Pages of this process's bindings that were not home when their binding had gone: those that a device kept when it
/// died ([quarantined](netmem_pool::PagePool::quarantine)), or that were leaked ([`forget`](std::mem::forget)). Else 0.
#[must_use]
pub fn lost_pages() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// Bindings of this process that have gone, with everything that they were.
#[must_use]
pub fn cleaned_up() -> u64 {
    CLEANED.load(Ordering::Acquire)
}

// SAFETY: ids are given out once, and pages are those of a region, which never change. A ledger that is closed and has no
// pages out stays so, and a page that a reference is to is out. What came before the last put is seen by who finds that.
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
        // SAFETY: the caller's: references to pages of a binding are counts that fragments were made into.
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

/// The pages of a binding, for the pools of queues that receive into it. There is one of each binding, and each holds it once.
///
/// Hands out nothing once the binding is unbound.
pub(crate) struct BindingProvider<C: BindingCount> {
    pub(crate) binding: BindingRef<C>,
}

// SAFETY: pages come from the supply of the region, which gives them to one holder at a time, and go there; the binding, of
// which the provider has a reference, keeps both.
unsafe impl<C: BindingCount> Provider<Device> for BindingProvider<C> {
    fn take(&self, pages: &mut [Option<RawPage<Device>>]) -> usize {
        let BoundMemory { supply, ledger, .. } = &*self.binding;
        let want = pages.len() as u64;
        if !ledger.take(want) {
            return 0;
        }
        let taken = supply.take(pages);
        if (taken as u64) < want {
            ledger.give(want - taken as u64);
        }
        taken
    }

    unsafe fn give(&self, page: RawPage<Device>) {
        // SAFETY: it came out of `take`, says the caller, and so from the supply.
        unsafe { self.binding.supply.give(page) };
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

/// Device memory that is bound: the owner. Dropping it unbinds.
///
/// From then on no page is handed out and nothing new is sent; what is out stays valid, and comes home as ever. With the
/// last reference, of a pool with pages out, a socket or a fragment being sent, the memory goes: its file is closed on the
/// [`Worker`], for that may block.
#[must_use = "a binding that is dropped is unbound"]
pub struct Binding<C: BindingCount = PercpuRef> {
    owner: Owner<BoundMemory, C>,
    provider: Arc<BindingProvider<C>>,
}

impl Binding<PercpuRef> {
    /// Binds a dma-buf, or what stands in for one, in pages of `4 KiB << order`. The memory is never mapped here. Costs no
    /// memory that depends on its size: page descriptors are resident once their pages are used.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn new(file: impl Into<OwnedFd>, order: u8, worker: &Arc<Worker>) -> Result<Self, BindError> {
        Self::counted(file, order, worker)
    }
}

/// Bytes of memory behind a descriptor.
fn size(file: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    // A dma-buf is of no type on some systems. What is of one of these may have a size, of something else.
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
    /// [`new`](Binding::new) with another count.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn counted(file: impl Into<OwnedFd>, order: u8, worker: &Arc<Worker>) -> Result<Self, BindError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let file = file.into();
        let bytes = size(file.as_fd()).map_err(|source| BindError::Descriptor { source })?;
        let region = Region::unmapped(file, order)?;
        let page_size = region.page_size() as u64;
        if bytes % page_size != 0 {
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
        let provider = Arc::new(BindingProvider { binding: owner.get() });
        Ok(Self { owner, provider })
    }

    /// Where the pools of its queues take their pages. A user's provider that hands out pages of this one must keep this one, not
    /// only the region: what is queued on sockets relies on it.
    #[must_use]
    pub fn provider(&self) -> Arc<dyn Provider<Device>> {
        self.provider.clone()
    }

    pub(crate) fn own_provider(&self) -> &Arc<BindingProvider<C>> {
        &self.provider
    }

    /// A reference to the memory, which keeps it past its unbinding.
    pub fn reference(&self) -> BindingRef<C> {
        self.provider.binding.clone()
    }

    /// Unbinds: what dropping it does, but not while queues are attached, which would starve.
    /// [`Netdev::unbind`](crate::Netdev::unbind) detaches them first.
    ///
    /// # Errors
    ///
    /// The binding itself, live as before, if there are.
    pub fn unbind(self) -> Result<(), StillAttached<C>> {
        match self.stats().queues {
            0 => Ok(()),
            queues => Err(StillAttached { binding: Box::new(self), queues }),
        }
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
        // Before the count is killed, by the owner's drop: who was refused a page would be refused a reference, too.
        self.ledger.close();
    }
}

impl<C: BindingCount> fmt::Debug for Binding<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Binding({:?})", **self)
    }
}

/// Queues receive into the binding that was to be unbound. Nothing has changed.
#[derive(Error)]
#[error("binding {} is attached to {queues} queues; detach them first, or drop it and let them starve", binding.id())]
pub struct StillAttached<C: BindingCount> {
    /// The binding.
    pub binding: Box<Binding<C>>,
    /// How many queues there are.
    pub queues: usize,
}

impl<C: BindingCount> fmt::Debug for StillAttached<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StillAttached({:?}, {} queues)", self.binding, self.queues)
    }
}
