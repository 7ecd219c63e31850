//! The slow paths of a [`SharedPool`]'s allocation: the depot, the owner under its lock, the pages
//! of other CPUs; and the wait for a page, if there is none.
//!
//! **A lost race is not "no page".** A thread that finds nothing acquires the lock and searches
//! again, because the thread that had the lock may have taken pages from the provider. At the end
//! of its search it compares how many magazines have left the depot. If another thread has taken
//! one in between, or holds one on its way between the depot and a CPU, the thread releases the
//! lock, yields and searches again. One bound holds for all searches of an allocation, `SEARCHES`.

use super::SharedPool;
use super::owner::Owner;
use crate::desc::Desc;
use crate::error::WaitError;
use crate::header::desc_of;
use crate::memory::Memory;
use crate::page::Page;
use crate::panics::Panics;
use crate::shared::RECLAIM_INTERVAL;
use crate::sync::yield_now;
use crate::waiters::{AllocFuture, Wakers};
use netmem_percpu::NothingFound;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl<M: Memory> SharedPool<M> {
    #[cold]
    #[inline(never)]
    pub(super) fn slow(&self) -> Option<NonNull<Desc>> {
        match self.cpus().pop() {
            Ok(item) => self.unless_closed(desc_of(item)),
            Err(_) => self.search_all(),
        }
    }

    /// Searches everywhere. In portable mode every allocation calls [`slow`](Self::slow), and few
    /// call this.
    #[cold]
    #[inline(never)]
    pub(super) fn search_all(&self) -> Option<NonNull<Desc>> {
        /// The most searches of one allocation. In a model there are more than loom preempts.
        const SEARCHES: usize = if cfg!(loom) { 5 } else { 32 };
        let mut has_reclaimed = false;
        for search in 0..SEARCHES {
            let taken = self.cpus().magazines_taken();
            // This reads a line of each magazine. It is read before the search, because a magazine
            // that a thread holds now may be on a CPU again when the reclaim is over. If a pop
            // removes a magazine later, that is counted. If a push replaces a magazine later, the
            // reclaim finds the item.
            let on_the_way = search > 0 && self.cpus().is_on_the_way();
            let mut owner = self.owner.lock()?;
            if self.cpus().is_closed() {
                drop(owner);
                return self.while_closed(None);
            }
            if let Some(desc) = self.search(&mut owner, &mut has_reclaimed) {
                return Some(desc);
            }
            drop(owner);
            if search == 0 {
                continue;
            }
            if !on_the_way && self.cpus().magazines_taken() == taken {
                break;
            }
            yield_now();
        }
        self.owner.failed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// One search: the magazines, the return stack and the provider, the pages of other CPUs.
    fn search(&self, owner: &mut Owner<M>, has_reclaimed: &mut bool) -> Option<NonNull<Desc>> {
        let refused = match self.cpus().pop() {
            Ok(item) => return Some(desc_of(item)),
            Err(why) => why == NothingFound::Refused,
        };
        if let Some(desc) = owner.alloc() {
            return Some(desc);
        }
        // In portable mode a pop can be refused, and then this CPU's magazine need not be empty. A
        // search that begins anew may find pages that the last reclaim has missed. In both cases
        // the pause between reclaims is ignored.
        *has_reclaimed |= owner.reclaim(if refused || *has_reclaimed { Duration::ZERO } else { RECLAIM_INTERVAL });
        self.cpus().pop().ok().map(desc_of)
    }

    /// A page that was found outside of the lock. Threads may have begun to wait meanwhile, and
    /// have not found what this thread has put back; or the device may have gone.
    #[inline]
    pub(super) fn unless_closed(&self, desc: NonNull<Desc>) -> Option<NonNull<Desc>> {
        if self.cpus().is_closed() { self.while_closed(Some(desc)) } else { Some(desc) }
    }

    /// The end of an allocation that finds the magazines closed, and perhaps has a page: threads
    /// wait, or the device is gone.
    #[cold]
    #[inline(never)]
    pub(super) fn while_closed(&self, found: Option<NonNull<Desc>>) -> Option<NonNull<Desc>> {
        // SAFETY: the page is this thread's alone from the commit of the pop on.
        let mut found = found.map(|desc| unsafe { Page::<M>::from_desc(desc, 0, self.page_size) });
        let mut wakers = Wakers::default();
        if let Some(mut owner) = self.owner.lock() {
            if self.gone.load(Ordering::Relaxed) {
                // The page that was found, what was put back into the depot, and what was returned
                // go to the provider.
                let mut panics = Panics::default();
                panics.call(|| drop(found.take()));
                owner.empty_cpus(&mut panics);
                panics.call(|| owner.pool.reclaim());
                panics.resume();
            } else {
                self.serve(&mut owner, &mut wakers);
                match found.take().map(|page| self.waiters.pass(page.into_desc())) {
                    // Waiters that are left came first.
                    Some(Ok(waker)) => wakers.0.extend(waker),
                    // SAFETY: the page is this thread's alone.
                    Some(Err(desc)) => found = Some(unsafe { Page::from_desc(desc, 0, self.page_size) }),
                    None if self.cpus().is_closed() => {}
                    None => return self.search(&mut owner, &mut false),
                }
            }
        } else if self.gone.load(Ordering::Relaxed) {
            found = None;
        }
        if found.is_none() {
            self.owner.failed.fetch_add(1, Ordering::Relaxed);
        }
        found.map(Page::into_desc)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn wait(&self) -> Result<AllocFuture<M>, WaitError> {
        let found = |desc| Ok(AllocFuture::found(desc, self.page_size));
        if let Ok(item) = self.cpus().pop()
            && let Some(desc) = self.unless_closed(desc_of(item))
        {
            return found(desc);
        }
        let mut wakers = Wakers::default();
        let mut owner = self.owner.lock().ok_or(WaitError::InProvider)?;
        // Without an interrupt of other CPUs first.
        if !self.cpus().is_closed()
            && let Some(desc) = owner.alloc()
        {
            return found(desc);
        }
        if !self.shared().interrupts && self.cpus().magazines() > 0 {
            return Err(WaitError::NoInterrupts);
        }
        let (number, list, moved) = self.waiters.wait()?;
        // From here on the waiter leaves the queue if the provider panics.
        let future = AllocFuture::waits(self.waiters.clone(), number, self.page_size);
        let mut panics = Panics::default();
        owner.count_reclaimed(moved);
        self.shared().accept_list(list, &mut panics);
        panics.resume();
        self.serve(&mut owner, &mut wakers);
        Ok(future)
    }

    /// Passes the pages that there are to the waiters, whose wakers are woken by the caller, after
    /// it has released the lock.
    pub(super) fn serve(&self, owner: &mut Owner<M>, wakers: &mut Wakers) {
        // No lock is held across the search, because it calls the provider, which may drop pages of
        // this pool.
        while self.waiters.any() {
            let in_depot = self.cpus().take_from_depot().map(desc_of);
            let Some(desc) = in_depot.or_else(|| owner.pool.alloc().map(Page::into_desc)) else { return };
            match self.waiters.pass(desc) {
                Ok(waker) => wakers.0.extend(waker),
                // SAFETY: the page is this thread's alone.
                Err(desc) => drop(unsafe { Page::<M>::from_desc(desc, 0, self.page_size) }),
            }
        }
        owner.fill_magazines();
    }
}
