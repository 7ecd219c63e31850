//! The slow return of a page, and the end of a pool: which thread frees it.
//!
//! Why a state machine: pages outlive the owner of their pool, and any thread may return the last
//! one.
//!
//! ```text
//!   state        return stack    outstanding        a page that no magazine accepts
//!   ─────────    ────────────    ───────────────    ─────────────────────────────────────────────
//!   open         null or pages   0 - direct         circulating pool: pushed.
//!     │                                             page per packet: unmapped, released, -= 1
//!     │ close: the depot, then the stack; the owner collects what is in them
//!   closing      CLOSED          0 - direct         unmapped, released, -= 1
//!     │ the owner leaves: outstanding += out
//!   lingering    CLOSED          pages still out    unmapped, released, -= 1;
//!     │                                             the return that makes it 0 frees the pool
//!     │ 0
//!   gone         freed           0                  there is none
//! ```
//!
//! `direct` is the number of pages that returning threads have taken out of the pool: they released
//! the pages to the provider, or kept them in quarantine. `out` is the number of pages that the
//! owner took from the provider and that were not returned to the owner.
//!
//! **Waiting.** While threads wait for a page of a [`SharedPool`](crate::SharedPool), the head of
//! the stack is a mark, and the stack refuses pages as if it were closed. The returning thread
//! passes its page to a waiter instead: [`crate::waiters`].
//!
//! **Which thread frees the pool.** A thread that releases a page to the provider subtracts 1 from
//! `outstanding` afterwards, as its last access to the pool. The owner adds `out` as its last
//! access. The thread whose addition makes `outstanding` zero after the owner's addition frees the
//! pool:
//!
//! ```text
//!   owner                                   last return
//!   swap(head, CLOSED), pops all
//!   outstanding += out   (now 1)
//!                                           load(head) = CLOSED
//!                                           unmap, page -> provider
//!                                           outstanding -= 1   (now 0)  -> frees the pool
//! ```
//!
//! In the other order `outstanding` is -1, then 0, and the owner frees. A return before the owner
//! leaves finds 0 or less, and does not free. A push is the last access of its thread: the page is
//! on the stack then, and the owner counts it.
//!
//! **A barrier that fails at the end** leaves pages on CPUs, and sequences may not have ended. The
//! owner then adds one more than `out`, which keeps the pool. [`lingering`](crate::lingering) tries
//! again. If the barrier succeeds, the pages that are found on CPUs are returned as late pages are,
//! and that one is subtracted at last.
//!
//! **`device_gone`** unmaps every page, also those that are out ([`Shared::device_gone`]). A return
//! may be unmapping its page at that moment. The thread that unmaps a page first sets its CLAIMED
//! bit; only one thread can set it ([`Desc::claim_unmap`]):
//!
//! ```text
//!   device_gone (the owner)                return, page per packet or after the close
//!   claims, unmaps, clears the claim       cannot claim: pushes the page, because the owner may be
//!                                          unmapping it. If the stack is closed, the owner has
//!                                          finished: releases the page
//!   finds it claimed: waits                claims, unmaps, clears the claim; releases the page,
//!                                          outstanding -= 1
//! ```
//!
//! **Ordering.** The return stack passes a page's contents to the owner: see `return_stack.rs`. The
//! additions to `outstanding` are acquire-release, so every other thread's last access to the pool
//! happens before the thread that frees it. `MODELS.md` lists the models; they run
//! this file.

use crate::cache::PolledHeader;
use crate::desc::{Desc, ListNode};
use crate::header::{PoolHeader, desc_of};
use crate::linger;
use crate::list::split_first;
use crate::memory::Memory;
use crate::panics::Panics;
use crate::raw_page::RawPage;
use crate::return_path::ReturnPath;
use crate::shared::Shared;
use crate::stats::PoolClosed;
use crate::sync::Ordering;
use netmem_percpu::CpuCache;
use std::mem::offset_of;
use std::ptr::NonNull;

/// The return of pages that do not pass through the magazines, and the pool's end.
impl<M: Memory> Shared<M> {
    /// Returns a page that the depot does not accept. Called on any thread.
    pub(crate) unsafe fn remote_free(header: NonNull<PoolHeader>, desc: NonNull<Desc>) {
        const { assert!(offset_of!(Self, front) == 0 && offset_of!(PolledHeader, header) == 0) };
        let this = header.cast::<Self>().as_ptr();
        // SAFETY: the page that is being returned keeps the pool until it is pushed. No reference
        // to the pool is held across that.
        unsafe {
            if !(*this).circulates || ReturnPath::push(&raw const (*this).returns, desc).is_err() {
                Self::release_remote(this, desc);
            }
        }
    }

    /// The same for a page that the return stack does not accept, or has not accepted.
    #[inline(never)]
    unsafe fn release_remote(this: *mut Self, desc: NonNull<Desc>) {
        let mut panics = Panics::default();
        // SAFETY: the page that is being returned keeps the pool until it is pushed or passed on,
        // or until it is counted by `leave`. No reference to the pool is held across any of them.
        unsafe {
            let returns = &raw const (*this).returns;
            if (*this).circulates && ReturnPath::pass(returns, desc, &mut panics) {
                return panics.resume();
            }
            if let Some(domain) = &(*this).domain {
                match desc.as_ref().claim_unmap((*this).id) {
                    Some(dma) => {
                        panics.call(|| domain.unmap(dma, (*this).page_size()));
                        ReturnPath::touch(returns);
                        // Also after a panic, because the domain is called once for each mapping.
                        desc.as_ref().finish_unmap(&(*this).unmap_event);
                    }
                    // The device has gone, and the owner may be unmapping this page now. The owner
                    // releases the page then.
                    None if ReturnPath::push(returns, desc).is_ok() => return,
                    None => {}
                }
            }
            panics.call(|| (*this).provider.release(RawPage::from_desc(desc)));
            if ReturnPath::leave(returns) {
                Self::free(this, &mut panics);
            }
        }
        panics.resume();
    }

    /// Returns a page in quarantine: it is counted, and never used again. Called on any thread.
    /// `kept` is never entered as a poll context, so every such page is returned by this function.
    pub(crate) unsafe fn quarantine_remote(kept: NonNull<PoolHeader>, desc: NonNull<Desc>) {
        let mut panics = Panics::default();
        // SAFETY: as for `remote_free`; the page's header is `kept`, which lies in its pool.
        unsafe {
            let this = kept.as_ptr().byte_sub(offset_of!(Self, quarantine)).cast::<Self>();
            let returns = &raw const (*this).returns;
            // Also while threads wait, whom this page does not help.
            if ReturnPath::push(returns, desc).is_err() {
                // The record may outlive the pool, and is needed until the lock is released.
                let record = (*returns).record.clone();
                let last = {
                    let mut accounting = record.accounting();
                    accounting.quarantined += 1;
                    ReturnPath::leave(returns)
                };
                if last {
                    Self::free(this, &mut panics);
                }
            }
        }
        panics.resume();
    }

    /// Pops the pages that were pushed on the stack since the last time. Only the owner calls it.
    pub(crate) fn drain_stack(&self, panics: &mut Panics) {
        if !self.returns.stack.is_empty() {
            self.accept_list(self.returns.stack.take_all(), panics);
        }
    }

    /// Counts the pages of a list that was on the stack, and keeps them. Only the owner calls it.
    pub(crate) fn accept_list(&self, mut list: *mut ListNode, panics: &mut Panics) {
        // SAFETY: pages on the stack belong to the pool.
        while let Some((desc, rest)) = unsafe { split_first(list) } {
            list = rest;
            if self.account(desc) {
                self.keep_or_release(desc, panics);
            }
        }
    }

    /// Counts a page from the stack. False if the page must not be used again.
    fn account(&self, desc: NonNull<Desc>) -> bool {
        let cache = &self.front.cache;
        // SAFETY: pages on the stack belong to the pool.
        let kept = unsafe { desc.as_ref() }.header().cast_const() == &raw const self.quarantine;
        if kept {
            cache.counters.quarantined.bump();
            cache.held.set(cache.held.get() - 1);
        } else {
            cache.counters.recycle_ring_full.bump();
        }
        !kept
    }

    /// Unmaps every page of the pool, wherever it is. Only the owner calls it.
    pub(crate) fn device_gone(&self) {
        if self.front.cache.counters.all_unmapped.get() {
            return;
        }
        self.gone.set(true);
        let (mut panics, mut walk) = (Panics::default(), Panics::default());
        walk.call(|| {
            self.provider.each(&mut |region| {
                region.each_desc(&mut |desc| {
                    self.unmap_anywhere(desc, &mut panics);
                    // A return may be unmapping the page now.
                    desc.wait_unmapped(self.id, &self.unmap_event);
                });
            });
        });
        // If the provider could not name all of its regions, some pages are still mapped: another
        // call goes on with them.
        if !walk.any() {
            self.front.cache.counters.all_unmapped.set();
        }
        self.release_all(&mut panics);
        panics.call(|| {
            let (pool, out) = (self.name(), self.held());
            netmem_percpu::trace::info!(pool, out, "device gone: its pool's pages are unmapped");
        });
        walk.resume();
        panics.resume();
    }

    /// From open to closing: collects all returned pages, for the last time. From now on the
    /// returning threads release pages to the provider. Returns false if CPUs may still hold pages,
    /// because the barrier failed.
    fn close(&self, panics: &mut Panics) -> bool {
        let mut n = 0;
        let closed = self.front.with_taker(|taker, depot| {
            taker.close(depot, |item| {
                self.keep_or_release(desc_of(item), panics);
                n += 1;
            })
        });
        self.front.cache.counters.recycle_ring.add(n);
        if let Some(Err(error)) = &closed {
            panics.call(|| {
                let pool = self.name();
                netmem_percpu::trace::error!(pool, %error, "pages that other CPUs hold stay with a pool that lingers");
            });
        }
        self.accept_list(self.returns.stack.close(), panics);
        // The magazines of a pool for every thread are closed by that.
        !matches!(closed, Some(Err(_))) && !self.front.header.cpus().is_some_and(CpuCache::close_failed)
    }

    /// Tries again to take the pages that CPUs hold, for a pool whose end found the barrier
    /// refused. Returns false if it is refused again. Otherwise the pool may be gone.
    ///
    /// # Safety
    ///
    /// The owner has left with a barrier to be tried again, and no other thread tries. After true,
    /// none tries again.
    unsafe fn finish_end(this: NonNull<()>, panics: &mut Panics) -> bool {
        let this = this.cast::<Self>();
        let mut late = Vec::new();
        // SAFETY: the one that the owner has added to `left` keeps the pool, and this thread has
        // the owner's part.
        let finished = unsafe {
            let front = &this.as_ref().front;
            let depot = front.with_taker(|taker, depot| taker.close(depot, |item| late.push(item)).is_ok());
            let cpus = front.header.cpus().map(|cpus| {
                let closed = cpus.close().is_ok();
                late.extend(std::iter::from_fn(|| cpus.pop().ok()));
                closed
            });
            depot.or(cpus).unwrap_or(true)
        };
        for item in late {
            // SAFETY: a page that a thread has returned: no other holder has it.
            panics.call(|| unsafe { Self::remote_free(this.cast(), desc_of(item)) });
        }
        if finished {
            // SAFETY: subtracted once; after that the pool is touched only to free it.
            unsafe {
                let returns = &raw const (*this.as_ptr()).returns;
                let record = &(*returns).record;
                record.unfinished.store(0, Ordering::Relaxed);
                if ReturnPath::leave(returns) {
                    Self::free(this.as_ptr(), panics);
                }
            }
        }
        finished
    }

    /// The owner's end of the pool.
    ///
    /// # Safety
    ///
    /// The caller is the owner, and does not use the pool afterwards.
    pub(crate) unsafe fn end(this: NonNull<Self>) -> PoolClosed {
        let mut panics = Panics::default();
        // SAFETY: the owner keeps the pool until it has left; after that it is touched only to free
        // it.
        unsafe {
            let s = this.as_ref();
            s.release_all(&mut panics);
            let unfinished = u64::from(!s.close(&mut panics));
            let record = s.returns.record.clone();
            record.unfinished.store(unfinished.cast_signed(), Ordering::Relaxed);
            let out = s.front.cache.held.get() + unfinished;
            ReturnPath::touch(&raw const s.returns);
            let (direct, stats) = {
                // The record's pointer to the pool is cleared before the pool can be freed.
                let mut accounting = record.accounting();
                accounting.stats = s.front.stats(0);
                accounting.unmaps = s.domain.is_some() && !s.front.cache.counters.all_unmapped.get();
                (accounting.out, accounting.pool) = (out, None);
                // Closing to lingering.
                let direct = record.outstanding.fetch_add(out.cast_signed(), Ordering::AcqRel).unsigned_abs();
                (direct, accounting.stats(direct))
            };
            let outstanding = out - unfinished - direct;
            if unfinished > 0 {
                linger::try_again(this.cast(), Self::finish_end);
            } else if outstanding == 0 {
                Self::free(this.as_ptr(), &mut panics);
            }
            panics.call(|| netmem_percpu::trace::debug!(pool = record.name(), ?stats, outstanding, "pool closed"));
            // Not in a model, because the list outlives a model's execution.
            if outstanding > 0 && !cfg!(loom) {
                linger::begin(record, outstanding, &mut panics);
            }
            panics.resume();
            PoolClosed { stats, outstanding }
        }
    }

    /// Lingering to gone.
    ///
    /// # Safety
    ///
    /// The owner has left, all pages are back, and the caller's addition made `left` zero.
    unsafe fn free(this: *mut Self, panics: &mut Panics) {
        // SAFETY: made by `PagePool::build`, and no other thread touches it any more.
        let pool = unsafe { Box::from_raw(this) };
        #[cfg(all(loom, test))]
        {
            pool.returns.stack.freed();
            crate::model::bury(pool);
        }
        #[cfg(not(all(loom, test)))]
        panics.call(|| drop(pool));
        #[cfg(all(loom, test))]
        let _ = panics;
    }
}
