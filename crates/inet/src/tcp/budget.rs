//! The page budget: the number of buffers that received payload may occupy, and the share of each
//! connection.
//!
//! Why not bytes: the window promises bytes, and it must not shrink. A peer that sends one byte in
//! each segment makes each of these bytes occupy a buffer. Buffers are therefore counted, for each
//! connection and for its queue. A buffer is counted from the moment in which its segment is stored
//! until the user drops the payload.
//!
//! Users drop payload on any thread, and mostly on that of the stack. That thread counts by plain
//! loads and stores, and others by atomic operations: see `count`. A connection whose window is
//! small because buffers are missing waits until one is returned.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Waker;

use count::Count;
pub(crate) use local::LocalBudget;

/// How many buffers a holder of `used` may occupy in all, if `free` of `limit` are free: the square
/// of what were free without it, by twice `limit`, but at least one.
///
/// Why the square: a holder whose peer or user is slow keeps what it has, so that holders come one
/// after the other and none goes. If each took a fixed part of what is free, `n` of them would
/// leave a part that falls with the power of `n`. With the square, they leave `limit / (1 + n /
/// 2)`: half after one, a fiftieth after a hundred. Nothing is computed when holders come and go.
pub(crate) fn share(free: u32, used: u32, limit: u32) -> u32 {
    let (without, limit) = (u64::from(free) + u64::from(used), u64::from(limit.max(1)));
    u32::try_from(without * without / (2 * limit)).unwrap_or(u32::MAX).max(1)
}

/// Whether `used` is less than the [`share`] of a holder of as many, without a division.
#[inline]
fn is_below_share(free: u32, used: u32, limit: u32) -> bool {
    let [free, used, limit] = [free, used, limit.max(1)].map(u128::from);
    used == 0 || (free + used) * (free + used) >= 2 * limit * (used + 1)
}

/// One of so many of a queue's buffers is kept for connections that have none.
const KEPT: u32 = 16;

/// A number of buffers that may be occupied. A clone is the same budget.
///
/// A connection's budget is part of its queue's: a buffer is counted in both. It has a share of the
/// queue's buffers, besides its own limit: half of the share can be promised to the peer, and the
/// other half is for what the peer sends although others have charged buffers meanwhile. A
/// sixteenth of the queue's buffers is kept for connections that have none, so that each makes
/// progress. Buffers whose charges were [detached](Charge::detach) are their user's business: they
/// count in both limits, and not in the share.
#[derive(Clone)]
pub struct Budget(Arc<Counts>);

/// The counts of a budget.
///
/// A charge has a pointer to them, and no counted reference: while `charged` counts anything or has
/// a home, one strong reference belongs to no value. The call that ends the last counting drops it.
struct Counts {
    /// Buffers, apart from those that are detached.
    charged: Count,
    detached: AtomicU32,
    limit: u32,
    /// The number of [`LocalBudget`]s, if `charged` has a home.
    locals: AtomicU32,
    parent: Option<Budget>,
    /// The waker that is called when a buffer is returned while a connection waits. Only the
    /// queue's budget has one.
    waker: Option<Box<Waker>>,
}

impl Budget {
    /// A budget of `limit` buffers.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self::within(limit, None)
    }

    /// A budget of `limit` buffers that are also counted in `parent`.
    #[must_use]
    pub fn within(limit: u32, parent: Option<&Self>) -> Self {
        Self::with(limit, parent.cloned(), None)
    }

    /// The budget of a queue. `waker` is called when a buffer is returned for which one of the
    /// queue's connections [waits](Self::wait).
    #[must_use]
    pub fn waking(limit: u32, waker: Waker) -> Self {
        Self::with(limit, None, Some(waker))
    }

    fn with(limit: u32, parent: Option<Self>, waker: Option<Waker>) -> Self {
        Self::counting(Count::new(false), limit, parent, waker)
    }

    fn counting(charged: Count, limit: u32, parent: Option<Self>, waker: Option<Waker>) -> Self {
        let (detached, locals) = Default::default();
        Self(Arc::new(Counts { charged, detached, limit, locals, parent, waker: waker.map(Box::new) }))
    }

    #[inline]
    fn levels(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |budget| budget.0.parent.as_ref())
    }

    /// Requests a call of the queue's waker when a buffer is returned that is counted here or in
    /// the parent. Check [`free`](Self::free) again after this call: buffers that were returned
    /// before it did not call the waker. For the thread of the stack.
    pub fn wait(&self) {
        self.levels().for_each(|budget| budget.0.charged.wait());
    }

    /// Buffers that are counted now.
    #[inline]
    #[must_use]
    pub fn used(&self) -> u32 {
        self.0.charged.sum().wrapping_add(self.0.detached.load(Ordering::SeqCst))
    }

    /// Buffers that can be promised to the peer, besides those that are counted. For a part of
    /// another budget, this is half of its share at most.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.room(2)
    }

    /// Whether one more buffer can be counted. The same as `self.room(1) > 0`, without a division.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        let (limit, shared) = (self.0.limit, self.0.charged.sum());
        let used = shared.wrapping_add(self.0.detached.load(Ordering::SeqCst));
        let Some(parent) = &self.0.parent else { return used < limit };
        let kept = parent.0.limit.div_ceil(KEPT);
        let free = parent.left().saturating_sub(kept);
        used < limit && free > 0 && is_below_share(free, shared, parent.0.limit - kept)
    }

    /// Whether the queue has no buffer for this budget, whatever its share is, but those that are
    /// kept.
    pub(super) fn is_short(&self) -> bool {
        let Some(parent) = &self.0.parent else { return !self.has_room() };
        parent.left() <= parent.0.limit.div_ceil(KEPT) && self.used() < self.0.limit
    }

    /// Buffers that can still be counted. `self` is nearly always a queue's budget, which has
    /// no parent.
    #[inline]
    fn left(&self) -> u32 {
        match self.0.parent {
            None => self.0.limit.saturating_sub(self.used()),
            Some(_) => self.room(1),
        }
    }

    /// Buffers that can still be counted, here and in the parent, if this budget may have the
    /// `part`th part of its share.
    fn room(&self, part: u32) -> u32 {
        let (limit, shared) = (self.0.limit, self.0.charged.sum());
        let used = shared.wrapping_add(self.0.detached.load(Ordering::SeqCst));
        let Some(parent) = &self.0.parent else { return limit.saturating_sub(used) };
        let kept = parent.0.limit.div_ceil(KEPT);
        let free = parent.left().saturating_sub(kept);
        let share = share(free, shared, parent.0.limit - kept) / part;
        limit.saturating_sub(used).min(share.max(1).saturating_sub(shared)).min(free)
    }

    /// Counts one more buffer, if the limits and the share allow it. Cost: an atomic addition here
    /// and in the parent, and none on the thread of a stack whose budgets they are.
    #[must_use]
    pub fn try_charge(&self) -> Option<Charge> {
        // Other threads can charge the last buffer at the same time, and what they read can be less
        // than what is counted. The limit is then exceeded, by what is charged meanwhile.
        self.has_room().then(|| self.charge())
    }

    /// Counts a first buffer, if none is counted here. It can be one of those that are kept.
    pub(super) fn try_charge_first(&self) -> Option<Charge> {
        let is_kept = self.0.parent.as_ref().is_none_or(|parent| parent.left() > 0);
        (is_kept && self.used() == 0).then(|| self.charge())
    }

    /// Counts one more buffer, even above the limits. This is for the one segment that is always
    /// admitted.
    #[must_use]
    pub fn charge(&self) -> Charge {
        Charge(Holding::Once(self.add(1)))
    }

    /// Whether the limits allow `n` more buffers.
    pub(crate) fn admits(&self, n: u32) -> bool {
        self.room(1) >= n
    }

    /// Counts `n` more buffers, if the limits allow all of them.
    #[must_use]
    pub(crate) fn try_charge_many(&self, n: u32) -> Option<Charges> {
        self.admits(n).then(|| self.charge_many(n))
    }

    /// Counts `n` more buffers, even above the limits.
    #[must_use]
    pub(crate) fn charge_many(&self, n: u32) -> Charges {
        Charges { counted: self.add(n), n }
    }

    fn add(&self, n: u32) -> Counted {
        for budget in self.levels() {
            if n > 0 && budget.0.charged.add(n) {
                // The reference that belongs to no value.
                std::mem::forget(budget.0.clone());
            }
        }
        Counted::new(self)
    }

    /// Ends the counting of `n` buffers whose charges were [detached](Charge::detach). Cost: an
    /// atomic subtraction here and in the parent.
    pub fn uncharge(&self, n: u32) {
        let mut awaited = false;
        for budget in self.levels() {
            budget.0.detached.fetch_sub(n, Ordering::SeqCst);
            awaited |= budget.0.charged.stop_waiting();
        }
        if awaited {
            self.wake();
        }
    }

    /// Buffers were returned on the thread that waits for them.
    #[cold]
    fn returned(&self) {
        if self.levels().filter(|budget| budget.0.charged.stop_waiting()).count() > 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.levels().filter_map(|budget| budget.0.waker.as_ref()).for_each(|waker| waker.wake_by_ref());
    }
}

#[cfg(feature = "compare")]
impl Budget {
    /// The same as [`waking`](Self::waking), with the calling thread as its home as long as this
    /// value lives. It must be dropped there.
    #[doc(hidden)]
    #[must_use]
    pub fn at_home(limit: u32, waker: Waker) -> impl Deref<Target = Self> {
        LocalBudget::waking(limit, waker)
    }

    /// A budget with the same counts, as long as `copied` has the charges that are added to it
    /// here. What is counted in either budget is not counted in the other one.
    pub(super) fn copy(&self, copied: &mut Vec<Charges>) -> Self {
        self.copy_apart(0, copied)
    }

    /// The same, for a child that counts `n` of the buffers itself.
    fn copy_apart(&self, n: u32, copied: &mut Vec<Charges>) -> Self {
        let Counts { charged, detached, limit, locals: _, parent, waker: _ } = &*self.0;
        let all = charged.sum();
        let parent = parent.as_ref().map(|parent| parent.copy_apart(all, copied));
        let copy = Self::within(*limit, parent.as_ref());
        copied.push(copy.charge_many(all.saturating_sub(n)));
        copy.0.detached.store(detached.load(Ordering::SeqCst), Ordering::SeqCst);
        copy
    }

    /// The counts, for comparisons.
    pub(super) fn counts(&self) -> impl fmt::Debug {
        let levels = self.levels();
        let counts = |budget: &Self| (budget.0.charged.sum(), budget.0.detached.load(Ordering::SeqCst));
        levels.map(counts).collect::<Vec<_>>()
    }
}

#[cfg(feature = "compare")]
impl Charge {
    /// The charge of a chunk of a cloned connection. The clone counts all its buffers by itself
    /// ([`Budget::copy`]), and returns none of them before it ends.
    pub(super) fn of_clone() -> Self {
        Self(Holding::Detached)
    }
}

#[cfg(feature = "compare")]
impl<T: Clone> Held<T> {
    /// The same chunk, held by a cloned connection.
    pub(super) fn of_clone(&self) -> Self {
        Self { chunk: self.chunk.clone(), charge: Charge::of_clone() }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} buffers", self.used(), self.0.limit)
    }
}

/// A pointer to counts in which buffers are counted. It dangles as soon as they are not.
#[derive(Clone, Copy)]
struct Counted(NonNull<Counts>);

// SAFETY: it stands for a reference to counts, which are `Send` and `Sync` (below).
unsafe impl Send for Counted {}
// SAFETY: as above.
unsafe impl Sync for Counted {}

const _: () = {
    const fn goes<T: Send + Sync>() {}
    goes::<Arc<Counts>>();
};

impl Counted {
    fn new(budget: &Budget) -> Self {
        // SAFETY: it is the address of a value. It is not made of a reference, because the pointer
        // turns into an `Arc` again.
        Self(unsafe { NonNull::new_unchecked(Arc::as_ptr(&budget.0).cast_mut()) })
    }

    /// The budget.
    ///
    /// # Safety
    ///
    /// At least one buffer is counted, or this thread is the home of the counts.
    unsafe fn budget(self) -> Budget {
        // SAFETY: it comes from an `Arc`. As long as anything is counted, or the counts have a
        // home, one strong reference belongs to no value.
        unsafe {
            Arc::increment_strong_count(self.0.as_ptr());
            Budget(Arc::from_raw(self.0.as_ptr()))
        }
    }

    /// Ends the counting of `n` buffers, at least one, here and in the parents. Cost: loads and
    /// stores on the thread of the stack; and on others four atomic operations.
    ///
    /// # Safety
    ///
    /// [`Budget::add`] has counted them, and their counting was not ended before.
    #[inline]
    unsafe fn remove(self, n: u32) {
        // SAFETY: `n` buffers are counted.
        let counts = unsafe { self.0.as_ref() };
        if let Some(parent) = &counts.parent
            && counts.charged.is_home()
            && parent.0.charged.is_home()
            && parent.0.parent.is_none()
        {
            let awaited = [counts.charged.remove_own(n), parent.0.charged.remove_own(n)];
            if awaited.contains(&true) {
                // SAFETY: this thread is their home.
                unsafe { self.budget() }.returned();
            }
            return;
        }
        // SAFETY: as promised.
        unsafe { self.remove_anywhere(n) };
    }

    /// The same, whichever budgets have their home on this thread.
    ///
    /// # Safety
    ///
    /// As for [`remove`](Self::remove).
    #[cold]
    unsafe fn remove_anywhere(self, n: u32) {
        // As soon as the counting has ended, another thread may drop the counts.
        // SAFETY: `n` buffers are counted.
        let budget = unsafe { self.budget() };
        let mut awaited = false;
        for level in budget.levels() {
            let count = &level.0.charged;
            let ended = count.remove_at_home(n).unwrap_or_else(|| count.remove_elsewhere(n));
            awaited |= ended.awaited;
            if ended.all {
                // SAFETY: it is the reference that belongs to no value, and `budget` or the child
                // of this level has another one.
                unsafe { Arc::decrement_strong_count(Arc::as_ptr(&level.0)) };
            }
        }
        if awaited {
            budget.wake();
        }
    }
}

/// One counted buffer. Dropping this value ends the counting.
pub struct Charge(Holding);

enum Holding {
    Once(Counted),
    /// Several chunks are in the buffer, which counts until the last of their charges is dropped.
    Shared(Arc<Charge>),
    Detached,
}

impl Charge {
    /// Another charge for the same buffer, which is then counted until both are dropped.
    pub(super) fn share(&mut self) -> Self {
        if !matches!(self.0, Holding::Shared(_)) {
            self.0 = Holding::Shared(Arc::new(Self(std::mem::replace(&mut self.0, Holding::Detached))));
        }
        match &self.0 {
            Holding::Shared(charge) => Self(Holding::Shared(charge.clone())),
            Holding::Once(_) | Holding::Detached => Self(Holding::Detached),
        }
    }

    /// Leaves the buffer counted. [`Budget::uncharge`] ends the counting. This is for holders that
    /// keep a number of buffers instead of charges.
    ///
    /// If several chunks are in the buffer, the others keep its charge. This one then counts as a
    /// buffer of its own.
    pub fn detach(self) {
        let Some(budget) = self.budget() else { return };
        // The buffer is counted twice until the charge is dropped, and never not at all.
        for level in budget.levels() {
            level.0.detached.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn budget(&self) -> Option<Budget> {
        match &self.0 {
            // SAFETY: this charge is counted.
            Holding::Once(counted) => Some(unsafe { counted.budget() }),
            Holding::Shared(charge) => charge.budget(),
            Holding::Detached => None,
        }
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        if let Holding::Once(counted) = self.0 {
            // SAFETY: this charge was counted, and `share` replaces the value that it moves.
            unsafe { counted.remove(1) };
        }
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Charge").field(&self.budget()).finish()
    }
}

/// Several buffers that are counted together. Dropping this value ends the counting.
pub(crate) struct Charges {
    /// Dangles if `n` is 0.
    counted: Counted,
    n: u32,
}

impl Charges {
    /// Counts `n` more buffers of the same budget, even above the limits.
    #[cfg(feature = "stack")]
    pub(crate) fn add(&mut self, budget: &Budget, n: u32) {
        assert!(self.n == 0 || self.counted.0 == Counted::new(budget).0, "of another budget");
        self.counted = budget.add(n);
        self.n += n;
    }

    /// Separates the charges of up to `n` buffers, without counting anew.
    #[cfg(feature = "stack")]
    pub(crate) fn split(&mut self, n: u32) -> Self {
        let n = n.min(self.n);
        self.n -= n;
        Self { counted: self.counted, n }
    }

    /// Separates the charge of one buffer, without counting anew. `None` if none is left.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Charge> {
        self.n = self.n.checked_sub(1)?;
        Some(Charge(Holding::Once(self.counted)))
    }
}

impl Drop for Charges {
    #[inline]
    fn drop(&mut self) {
        if self.n > 0 {
            // SAFETY: they were counted, and `take` and `split` have subtracted those of others.
            unsafe { self.counted.remove(self.n) };
        }
    }
}

impl fmt::Debug for Charges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Charges({})", self.n)
    }
}

/// Payload that is counted in its connection's [`Budget`] until it is dropped. It can be sent to
/// other threads.
#[derive(Debug)]
pub struct Held<T> {
    chunk: T,
    charge: Charge,
}

impl<T> Held<T> {
    /// `chunk`, counted by `charge`.
    #[must_use]
    pub fn new(chunk: T, charge: Charge) -> Self {
        Self { chunk, charge }
    }

    /// Splits this value into the payload and its charge.
    #[must_use]
    pub fn into_parts(self) -> (T, Charge) {
        (self.chunk, self.charge)
    }
}

impl<T> Deref for Held<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.chunk
    }
}

impl<T> DerefMut for Held<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.chunk
    }
}

mod count;
mod local;
#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
