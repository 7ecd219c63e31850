//! The page budget: the number of buffers that received payload may occupy, and the share of each
//! connection.
//!
//! Why not bytes: the window promises bytes, and it must not shrink. A peer that sends one byte in
//! each segment makes each of these bytes occupy a buffer. Buffers are therefore counted, for each
//! connection and for its queue. A buffer is counted from the moment in which its segment is stored
//! until the user drops the payload.
//!
//! Users drop payload on any thread. A connection whose window is small because buffers are missing
//! waits for that:
//!
//! ```text
//!   the stack's thread       the thread that drops payload
//!   1  awaited = true        1  used -= 1
//!   2  reads used            2  reads awaited; if true, swaps it and calls the queue's waker
//! ```
//!
//! All four accesses are sequentially consistent, so at least one thread sees the other thread's
//! store.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Waker;

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

struct Counts {
    used: AtomicU32,
    /// How many of `used` are detached.
    detached: AtomicU32,
    /// Whether a connection waits for a buffer.
    awaited: AtomicBool,
    limit: u32,
    parent: Option<Budget>,
    /// The waker that is called when a buffer is returned while a connection waits. Only the
    /// queue's budget has one.
    waker: Option<Waker>,
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
        let (used, detached, awaited) = Default::default();
        Self(Arc::new(Counts { used, detached, awaited, limit, parent, waker }))
    }

    #[inline]
    fn levels(&self) -> impl Iterator<Item = &Counts> {
        std::iter::successors(Some(self), |budget| budget.0.parent.as_ref()).map(|budget| &*budget.0)
    }

    /// Requests a call of the queue's waker when a buffer is returned that is counted here or in
    /// the parent. Check [`free`](Self::free) again after this call: buffers that were returned
    /// before it did not call the waker.
    pub fn wait(&self) {
        self.levels().for_each(|counts| counts.awaited.store(true, Ordering::SeqCst));
    }

    /// Buffers that are counted now.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.0.used.load(Ordering::SeqCst)
    }

    /// Buffers that can be promised to the peer, besides those that are counted. For a part of
    /// another budget, this is half of its share at most.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.room(2)
    }

    /// Whether one more buffer can be counted.
    pub(super) fn has_room(&self) -> bool {
        self.room(1) > 0
    }

    /// Whether the queue has no buffer for this budget, whatever its share is, but those that are
    /// kept.
    pub(super) fn is_short(&self) -> bool {
        let Some(parent) = &self.0.parent else { return !self.has_room() };
        parent.room(1) <= parent.0.limit.div_ceil(KEPT) && self.used() < self.0.limit
    }

    /// Buffers that can still be counted, here and in the parent, if this budget may have the
    /// `part`th part of its share.
    fn room(&self, part: u32) -> u32 {
        let (limit, used) = (self.0.limit, self.used());
        let Some(parent) = &self.0.parent else { return limit.saturating_sub(used) };
        let kept = parent.0.limit.div_ceil(KEPT);
        let free = parent.room(1).saturating_sub(kept);
        let shared = used.saturating_sub(self.0.detached.load(Ordering::Relaxed));
        let share = share(free, shared, parent.0.limit - kept) / part;
        limit.saturating_sub(used).min(share.max(1).saturating_sub(shared)).min(free)
    }

    /// Counts one more buffer, if the limits and the share allow it. Cost: an atomic addition here
    /// and in the parent.
    #[must_use]
    pub fn try_charge(&self) -> Option<Charge> {
        // Two queues can charge the parent's last buffer at the same time. The limit is then
        // exceeded by one buffer for each queue.
        self.has_room().then(|| self.charge())
    }

    /// Counts a first buffer, if none is counted here. It can be one of those that are kept.
    pub(super) fn try_charge_first(&self) -> Option<Charge> {
        let is_kept = self.0.parent.as_ref().is_none_or(|parent| parent.room(1) > 0);
        (is_kept && self.used() == 0).then(|| self.charge())
    }

    /// Counts one more buffer, even above the limits. This is for the one segment that is always
    /// admitted.
    #[must_use]
    pub fn charge(&self) -> Charge {
        self.add(1);
        Charge::new(self.clone())
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
        self.add(n);
        Charges { budget: self.clone(), n }
    }

    fn add(&self, n: u32) {
        let mut at = Some(self);
        while let Some(budget) = at {
            budget.0.used.fetch_add(n, Ordering::Relaxed);
            at = budget.0.parent.as_ref();
        }
    }

    /// Ends the counting of `n` buffers whose charges were [detached](Charge::detach). Cost: two
    /// atomic subtractions here, and one in the parent.
    pub fn uncharge(&self, n: u32) {
        self.0.detached.fetch_sub(n, Ordering::Relaxed);
        self.remove(n);
    }

    /// Ends the counting of `n` buffers.
    fn remove(&self, n: u32) {
        let mut awaited = false;
        for counts in self.levels() {
            counts.used.fetch_sub(n, Ordering::SeqCst);
            awaited |= counts.awaited.load(Ordering::SeqCst) && counts.awaited.swap(false, Ordering::SeqCst);
        }
        if awaited {
            self.levels().filter_map(|counts| counts.waker.as_ref()).for_each(Waker::wake_by_ref);
        }
    }
}

#[cfg(feature = "compare")]
impl Budget {
    /// A budget with the same counts. What is counted in either is not counted in the other one.
    pub(super) fn copy(&self) -> Self {
        let Counts { used, detached, awaited, limit, parent, waker: _ } = &*self.0;
        Self(Arc::new(Counts {
            used: used.load(Ordering::SeqCst).into(),
            detached: detached.load(Ordering::SeqCst).into(),
            awaited: awaited.load(Ordering::SeqCst).into(),
            limit: *limit,
            parent: parent.as_ref().map(Self::copy),
            waker: None,
        }))
    }

    /// The counts, for comparisons.
    pub(super) fn counts(&self) -> impl fmt::Debug {
        let levels = self.levels();
        let counts = |counts: &Counts| (counts.used.load(Ordering::SeqCst), counts.detached.load(Ordering::SeqCst));
        levels.map(counts).collect::<Vec<_>>()
    }
}

#[cfg(feature = "compare")]
impl Charge {
    /// The charge of a chunk of a cloned connection. The clone counts all its buffers from the
    /// beginning, and never returns one of them: a comparison ends before it would.
    pub(super) fn of_clone() -> Self {
        Self(Counted::Detached)
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

/// One counted buffer. Dropping this value ends the counting.
#[derive(Debug)]
pub struct Charge(Counted);

#[derive(Debug)]
enum Counted {
    Once(Budget),
    /// Several chunks are in the buffer, which counts until the last of their charges is dropped.
    Shared(Arc<Charge>),
    Detached,
}

impl Charge {
    fn new(budget: Budget) -> Self {
        Self(Counted::Once(budget))
    }

    /// Another charge for the same buffer, which is then counted until both are dropped.
    pub(super) fn share(&mut self) -> Self {
        if !matches!(self.0, Counted::Shared(_)) {
            self.0 = Counted::Shared(Arc::new(Self(std::mem::replace(&mut self.0, Counted::Detached))));
        }
        match &self.0 {
            Counted::Shared(charge) => Self(Counted::Shared(charge.clone())),
            Counted::Once(_) | Counted::Detached => Self(Counted::Detached),
        }
    }

    /// Leaves the buffer counted. [`Budget::uncharge`] ends the counting. This is for holders that
    /// keep a number of buffers instead of charges.
    pub fn detach(mut self) {
        if let Counted::Shared(charge) = &self.0 {
            // The other chunks in the buffer keep its charge. This one counts as a buffer of its
            // own.
            charge.budget().inspect(|budget| budget.add(1));
        }
        if let Some(budget) = self.budget() {
            budget.0.detached.fetch_add(1, Ordering::Relaxed);
        }
        if let Counted::Once(_) = &self.0 {
            self.0 = Counted::Detached;
        }
    }

    fn budget(&self) -> Option<&Budget> {
        match &self.0 {
            Counted::Once(budget) => Some(budget),
            Counted::Shared(charge) => charge.budget(),
            Counted::Detached => None,
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Counted::Once(budget) = &self.0 {
            budget.remove(1);
        }
    }
}

/// Several buffers that are counted together. Dropping this value ends the counting.
#[derive(Debug)]
pub(crate) struct Charges {
    budget: Budget,
    n: u32,
}

impl Charges {
    /// Counts `n` more buffers, even above the limits.
    #[cfg(feature = "stack")]
    pub(crate) fn add(&mut self, n: u32) {
        self.budget.add(n);
        self.n += n;
    }

    /// Separates the charges of up to `n` buffers, without counting anew.
    #[cfg(feature = "stack")]
    pub(crate) fn split(&mut self, n: u32) -> Self {
        let n = n.min(self.n);
        self.n -= n;
        Self { budget: self.budget.clone(), n }
    }

    /// Separates the charge of one buffer, without counting anew. `None` if none is left.
    pub(super) fn take(&mut self) -> Option<Charge> {
        self.n = self.n.checked_sub(1)?;
        Some(Charge::new(self.budget.clone()))
    }
}

impl Drop for Charges {
    fn drop(&mut self) {
        if self.n > 0 {
            self.budget.remove(self.n);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_counts_in_both_budgets_until_it_is_dropped() {
        let queue = Budget::new(30);
        let one = Budget::within(2, Some(&queue));
        let two = Budget::within(20, Some(&queue));
        let held: Vec<_> =
            [one.try_charge(), one.try_charge(), two.try_charge()].into_iter().map(Option::unwrap).collect();
        assert!(one.try_charge().is_none(), "the connection's limit");
        let forced = Held::new(7, one.charge());
        assert_eq!((one.used(), two.used(), queue.used(), queue.free()), (3, 1, 4, 26));
        drop(held);
        assert_eq!((one.used(), two.used(), queue.used()), (1, 0, 1));
        let (chunk, charge) = forced.into_parts();
        assert_eq!((chunk, one.used()), (7, 1));
        drop(charge);
        assert_eq!((one.used(), queue.used()), (0, 0));
        one.try_charge().unwrap().detach();
        assert_eq!((one.used(), queue.used()), (1, 1));
        one.uncharge(1);
        assert_eq!((one.used(), queue.used()), (0, 0));
        assert!(one.try_charge_many(3).is_none());
        let (some, more) = (one.try_charge_many(2), two.charge_many(3));
        assert_eq!((one.used(), queue.used()), (2, 5));
        drop((some, more));
        assert_eq!((one.used(), two.used(), queue.used()), (0, 0, 0));
    }

    /// Connections that come one after the other and keep all that they may have. The next one has
    /// some, and half of that can be promised.
    #[test]
    fn a_connection_has_a_share_of_what_is_free() {
        let queue = Budget::new(4096);
        let mut greedy = Vec::new();
        for n in 0..100 {
            let budget = Budget::within(4096, Some(&queue));
            let promised = budget.free();
            let held: Vec<_> = std::iter::from_fn(|| budget.try_charge()).collect();
            assert!((promised..=promised.max(1) * 2 + 1).contains(&(held.len() as u32)) && promised > 0, "{n}");
            greedy.push((budget, held));
        }
        assert!(greedy[0].1.len() > 1000 && queue.free() > 60, "{}", queue.free());
        assert!(Budget::within(4096, Some(&queue)).try_charge().is_some());
    }

    /// Detached charges do not reduce the share of what the peer sends.
    #[test]
    fn buffers_that_were_left_counted_are_not_in_the_share() {
        let queue = Budget::new(1600);
        let (holder, other) = (Budget::within(1500, Some(&queue)), Budget::within(1500, Some(&queue)));
        for held in 0..1500 {
            let charge = holder.try_charge().unwrap_or_else(|| panic!("{held}"));
            charge.detach();
        }
        assert!(holder.try_charge().is_none(), "the connection's limit");
        assert_eq!((holder.free(), queue.used(), other.try_charge_first().is_some()), (0, 1500, true));
        holder.uncharge(1000);
        assert_eq!((holder.used(), holder.free()), (500, other.free()));
    }

    #[test]
    fn a_buffer_with_several_chunks_counts_once() {
        let budget = Budget::new(10);
        let mut first = budget.try_charge().unwrap();
        let mut second = first.share();
        let third = second.share();
        assert_eq!(budget.used(), 1);
        drop((first, third));
        assert_eq!(budget.used(), 1);
        let left = second.share();
        left.detach();
        drop(second);
        assert_eq!(budget.used(), 1, "it is counted by number");
        budget.uncharge(1);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_buffer_that_is_awaited_calls_the_waker_once() {
        struct Calls(AtomicU32);
        impl std::task::Wake for Calls {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let calls = Arc::new(Calls(AtomicU32::new(0)));
        let queue = Budget::waking(30, calls.clone().into());
        let (one, two) = (Budget::within(3, Some(&queue)), Budget::within(3, Some(&queue)));
        let held: Vec<_> = [&one, &one, &two].map(|budget| budget.try_charge().unwrap()).into();
        drop(two.try_charge());
        let [first, second, third] = held.try_into().unwrap();
        drop(first);
        assert_eq!(calls.0.load(Ordering::Relaxed), 0, "none was awaited");
        two.wait();
        drop(second);
        assert_eq!(calls.0.load(Ordering::Relaxed), 1, "another connection's makes room in the queue's");
        drop(third);
        assert_eq!(calls.0.load(Ordering::Relaxed), 2, "the connection's own");
        drop(two.try_charge());
        assert_eq!(calls.0.load(Ordering::Relaxed), 2);
    }
}
