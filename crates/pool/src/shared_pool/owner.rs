//! The owner of a [`SharedPool`](crate::SharedPool): a [`PagePool`] without a depot, under a lock.
//!
//! **The lock is never held by a thread that waits for this pool.** The owner calls the provider
//! and the domain under the lock. If such a call allocates from this pool, it gets no page. If it
//! drops pages of this pool, they are returned without the lock.

use crate::desc::Desc;
use crate::header::{desc_of, item_of};
use crate::memory::Memory;
use crate::panics::Panics;
use crate::pool::PagePool;
use crate::sync::{Mutex, MutexGuard};
use netmem_percpu::{CpuCache, MAGAZINE};
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The owner and its lock, on cache lines of their own, because every allocation reads the fields
/// next to them.
#[repr(align(128))]
pub(super) struct OwnerLock<M: Memory> {
    pub(super) pool: Mutex<Owner<M>>,
    /// The thread that has the lock ([`this_thread`]), or 0.
    holder: AtomicUsize,
    /// Allocations that found no page.
    pub(super) failed: AtomicU64,
}

pub(super) struct Owner<M: Memory> {
    /// Moved out when the pool ends.
    pub(super) pool: ManuallyDrop<PagePool<M>>,
    /// When the pages on CPUs were last reclaimed.
    reclaimed: Option<Instant>,
}

/// A number that no other running thread has, and that is not 0.
fn this_thread() -> usize {
    #[cfg(not(loom))]
    thread_local! {
        static HERE: Cell<u8> = const { Cell::new(0) };
    }
    // Boxed: the address of an empty value would be that of every thread's.
    #[cfg(loom)]
    loom::thread_local! {
        static HERE: Box<Cell<u8>> = Box::default();
    }
    HERE.with(|here| std::ptr::from_ref::<Cell<u8>>(here).addr())
}

impl<M: Memory> OwnerLock<M> {
    pub(super) fn new(pool: PagePool<M>) -> Self {
        let owner = Owner { pool: ManuallyDrop::new(pool), reclaimed: None };
        owner.fill_magazines();
        Self { pool: Mutex::new(owner), holder: AtomicUsize::new(0), failed: AtomicU64::new(0) }
    }

    /// Acquires the lock. `None` if this thread has it already: the thread is in a call of the
    /// provider or the domain.
    pub(super) fn lock(&self) -> Option<OwnerGuard<'_, M>> {
        let Self { pool, holder, .. } = self;
        if holder.load(Ordering::Relaxed) == this_thread() {
            return None;
        }
        // A poisoned lock is used: a panic of the provider or the domain leaves the owner
        // consistent.
        let owner = pool.lock().unwrap_or_else(PoisonError::into_inner);
        holder.store(this_thread(), Ordering::Relaxed);
        Some(OwnerGuard { owner, holder })
    }
}

/// The lock, held.
pub(super) struct OwnerGuard<'p, M: Memory> {
    owner: MutexGuard<'p, Owner<M>>,
    holder: &'p AtomicUsize,
}

impl<M: Memory> Drop for OwnerGuard<'_, M> {
    fn drop(&mut self) {
        self.holder.store(0, Ordering::Relaxed);
    }
}

impl<M: Memory> Deref for OwnerGuard<'_, M> {
    type Target = Owner<M>;

    fn deref(&self) -> &Owner<M> {
        &self.owner
    }
}

impl<M: Memory> DerefMut for OwnerGuard<'_, M> {
    fn deref_mut(&mut self) -> &mut Owner<M> {
        &mut self.owner
    }
}

impl<M: Memory> Owner<M> {
    fn cpus(&self) -> Option<&CpuCache> {
        self.pool.shared().front.header.cpus()
    }

    /// Pops a page from the return stack, or allocates one from the provider. Further pages that
    /// this yields are moved to the depot.
    pub(super) fn alloc(&mut self) -> Option<NonNull<Desc>> {
        let desc = self.pool.alloc()?.into_desc();
        self.fill_magazines();
        Some(desc)
    }

    /// Moves pages from the owner's array to the depot, while the depot has empty magazines.
    pub(super) fn fill_magazines(&self) {
        let (Some(cpus), cache) = (self.cpus(), &self.pool.shared().front.cache) else { return };
        let mut items = [NonZeroUsize::MIN; MAGAZINE];
        while !cpus.is_full() {
            let mut n = 0;
            while n < cpus.capacity()
                && let Some(desc) = cache.take()
            {
                items[n] = item_of(desc);
                n += 1;
            }
            // SAFETY: the owner keeps the cache.
            let shared = unsafe { CpuCache::push_many(cpus, &items[..n]) };
            cache.counters.alloc_refill.add(shared as u64);
            items[shared..n].iter().for_each(|&item| cache.put(desc_of(item)));
            // None is left, or the magazines are closed.
            if n == 0 || shared < n {
                return;
            }
        }
    }

    /// Moves the pages that CPUs hold to the depot, unless that was done less than `rest` ago.
    /// Returns whether it did.
    pub(super) fn reclaim(&mut self, interval: Duration) -> bool {
        let (Some(cpus), shared) = (self.cpus(), self.pool.shared()) else { return false };
        let counters = &shared.front.cache.counters;
        if cpus.on_cpus() == 0 {
            return false;
        }
        if !shared.interrupts {
            counters.unasked.bump();
            return false;
        }
        let now = Instant::now();
        if self.reclaimed.is_some_and(|last| now.duration_since(last) < interval) {
            return false;
        }
        match cpus.reclaim() {
            Ok(n) => {
                self.count_reclaimed(n);
                self.reclaimed = Some(now);
                true
            }
            Err(error) => {
                netmem_percpu::trace::warn!(pool = self.pool.name(), %error, "pages that other CPUs hold cannot be reclaimed");
                false
            }
        }
    }

    /// Counts pages that were moved from CPUs to the depot.
    pub(super) fn count_reclaimed(&self, pages: usize) {
        let counters = &self.pool.shared().front.cache.counters;
        if pages > 0 {
            counters.reclaims.bump();
        }
        counters.reclaimed.add(pages as u64);
    }

    /// From now on no page goes into a magazine.
    pub(super) fn close_cpus(&self, panics: &mut Panics) {
        let Some(cpus) = self.cpus() else { return };
        if let Err(error) = cpus.close() {
            panics.call(|| {
                let pool = self.pool.name();
                netmem_percpu::trace::error!(pool, %error, "pages that other CPUs hold stay with a pool that lingers");
            });
        }
    }

    /// Releases the pages that are in magazines to the provider. The magazines are closed.
    pub(super) fn empty_cpus(&self, panics: &mut Panics) {
        let (Some(cpus), shared) = (self.cpus(), self.pool.shared()) else { return };
        while let Ok(item) = cpus.pop() {
            shared.front.cache.counters.recycle_ring.bump();
            shared.release(desc_of(item), panics);
        }
    }
}
