//! The count that never repeats an operation: get and put are one addition each, however many
//! threads get and put.
//!
//! Why not refcount? A compare-and-swap is repeated as often as other threads come between. The
//! value here is the number of references less one. The sign bit selects the slow path.
//!
//! ```text
//!   0x0000_0000 ..= 0x7FFF_FFFF   valid      value + 1 references
//!   0x8000_0000 ..= 0xBFFF_FFFF   saturated  overflowed: never freed   put back to 0xA000_0000
//!   0xC000_0000 ..= 0xFFFF_FFFE   dead       a put has returned true   put back to 0xE000_0000
//!   0xFFFF_FFFF                   none       the last one was put, no put has returned true yet
//! ```
//!
//! Both operations test the value that their own addition made. If its sign bit is clear, they are
//! done. Otherwise:
//!
//! ```text
//!   get   saturated    put back, got
//!         dead, none   put back to dead, refused
//!   put   saturated    put back, not the last
//!         dead         an imbalance: counted, put back, not the last
//!         none         exchange(none -> dead): the last if it succeeds
//! ```
//!
//! An operation that is refused or saturated has added nevertheless, and other threads see the sum.
//! Each zone is 2^29 wide on either side: to leave it, as many threads would have to be between
//! their addition and their store.
//!
//! # The races
//!
//! **Last put against get.** Between the put's addition and its exchange there is a window in which
//! a get finds *none*, makes it one reference, and has it: the sign bit is clear. Then the exchange
//! fails, and the put was not the last.
//!
//! ```text
//!   put                                   get
//!   0 -> none
//!                                         none -> 0, got
//!   exchange(none -> dead) fails
//!   not the last
//! ```
//! If the exchange comes first, the get lands in the dead zone and is refused.
//!
//! **Put against the put that marks dead.** In that window the thread that got may put again, and
//! both puts see *none*. One exchange succeeds. The put that loses decides from the value that its
//! own addition returned. If it read the count again, it would find the count dead, as after a put
//! too many, and report a fault where there is none.
//!
//! ```text
//!   put                            get, put
//!   0 -> none
//!                                  none -> 0, got
//!                                  0 -> none
//!                                  exchange(none -> dead): the last, destroys after a grace period
//!   exchange(none -> dead) fails
//!   not the last
//! ```
//! The losing put exchanges in a count whose object is about to be destroyed. So puts are in a
//! critical section, too, and the destruction waits for its end.
//!
//! **Double put.** A put too many finds the count dead, or at *none*, and moves it further into the
//! dead zone. It is counted as a fault. If the last put has not marked the count yet, its exchange
//! fails: no put returns true, and the object leaks. Two puts never return true. A put too many
//! while other threads hold references releases one of theirs; then only the last put is found to
//! be one too many.
//!
//! ```text
//!   put                                   put (one too many)
//!   0 -> none
//!                                         none -> 0xFFFF_FFFE: an imbalance
//!   exchange(none -> dead) fails
//!                                         stores dead
//! ```
//!
//! **Saturation from both sides.** Other threads see the overflow before the get has put the value
//! back. A put may take the value below the edge, and find nothing wrong. The store of the get
//! comes nevertheless, and the object leaks. A put that finds the saturated zone stores the same
//! value.
//!
//! ```text
//!   get                                   put
//!   0x7FFF_FFFF -> 0x8000_0000
//!                                         0x8000_0000 -> 0x7FFF_FFFF: valid, not the last
//!   stores 0xA000_0000
//! ```
//!
//! # Memory ordering
//!
//! Gets are relaxed: the caller has loaded the object's address before, and that load made its
//! contents visible. The additions of puts are releases. Each later addition, and the exchange,
//! reads from the chain of them, and the exchange that succeeds acquires: the destruction comes
//! after all that other threads did before their puts. A refused get orders nothing, because the
//! caller must not read the object. The plain stores break the chain; they are made only where no
//! put will return true any more.
//!
//! The guard, not the count, keeps the count's memory for a thread that lost a race: see
//! [`rcu`](crate::rcu).

use crate::faults;
use crate::rcu::{self, Guard};
use crate::sync::{AtomicU32, Ordering, put_back};
use std::fmt;

const MAX: u32 = 0x7FFF_FFFF;
const SATURATED: u32 = 0xA000_0000;
const DEAD_ZONE: u32 = 0xC000_0000;
const DEAD: u32 = 0xE000_0000;
const NONE: u32 = 0xFFFF_FFFF;

const fn initial(count: u32) -> u32 {
    if count > MAX { SATURATED } else { count.wrapping_sub(1) }
}

const fn is_dead(value: u32) -> bool {
    DEAD_ZONE <= value && value < NONE
}

const fn is_saturated(value: u32) -> bool {
    MAX < value && value < DEAD_ZONE
}

/// A reference count for objects whose memory outlives a grace period, in 4 bytes: get and put are
/// one atomic addition.
///
/// A compare-and-swap is repeated as often as other threads come between; an addition goes through
/// at once. But a get that adds first and tests afterwards needs memory that is still there when
/// the object is dead. So:
///
/// * a `try_get` is made in the critical section in which the object was found, a put in one of its
///   own or the caller's;
/// * a caller whose put was the last **defers the destruction past a grace period**.
///
/// [`Owner`](crate::Owner) and [`RcuCell`](crate::RcuCell) do both.
///
/// A count that overflows, or is put more often than it was got, leaks its object: see
/// [`faults`](crate::faults()).
///
/// ```
/// use netmem_refs::{RcuRef, rcu};
///
/// let refs = RcuRef::new(1);
/// rcu::read(|guard| {
///     assert!(refs.try_get(guard));
///     assert!(!refs.put_guarded(guard));
/// });
/// assert!(refs.put(), "the last one");
/// assert!(refs.is_dead() && !rcu::read(|guard| refs.try_get(guard)));
/// ```
#[repr(transparent)]
pub struct RcuRef(AtomicU32);

#[cfg(not(loom))]
const _: () = assert!(size_of::<RcuRef>() == 4);

impl RcuRef {
    /// A count of that many references; saturated if there are more than 2^31 - 1. A count that was
    /// created at zero is not dead; `get` revives it.
    #[cfg(not(loom))]
    #[must_use]
    pub const fn new(count: u32) -> Self {
        Self(AtomicU32::new(initial(count)))
    }

    /// As above, where loom's atomics know no constants.
    #[cfg(loom)]
    pub fn new(count: u32) -> Self {
        Self(AtomicU32::new(initial(count)))
    }

    /// Acquires a reference, for a caller that holds one. Cannot fail. One atomic addition.
    #[inline]
    pub fn get(&self) {
        let new = self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if new > MAX {
            self.get_failed(new);
        }
    }

    #[cold]
    fn get_failed(&self, new: u32) {
        if !self.add_failed(new) {
            faults::imbalanced();
        }
    }

    /// Acquires a reference, unless the object is dead, in the critical section in which the object
    /// was found. One atomic addition.
    #[inline]
    #[must_use = "without a reference the object must not be used"]
    pub fn try_get(&self, guard: &Guard) -> bool {
        let _ = guard;
        self.add()
    }

    /// Puts a reference. If it returns true, the reference was the last: only the caller may
    /// destroy the object, after a grace period. One atomic addition, in its own critical section.
    #[inline]
    #[must_use = "the caller that puts the last reference destroys the object, after a grace period"]
    pub fn put(&self) -> bool {
        rcu::read(|guard| self.put_guarded(guard))
    }

    /// [`put`](Self::put), for a caller that is in a critical section.
    #[inline]
    #[must_use = "the caller that puts the last reference destroys the object, after a grace period"]
    pub fn put_guarded(&self, guard: &Guard) -> bool {
        let _ = guard;
        self.sub()
    }

    /// [`try_get`](Self::try_get). The caller is in a critical section, or has a reference.
    #[inline]
    pub(crate) fn add(&self) -> bool {
        let new = self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if new <= MAX {
            return true;
        }
        self.add_failed(new)
    }

    #[cold]
    fn add_failed(&self, new: u32) -> bool {
        if new >= DEAD_ZONE {
            put_back(&self.0, DEAD);
            return false;
        }
        put_back(&self.0, SATURATED);
        if new == MAX + 1 {
            faults::saturated();
        }
        true
    }

    /// [`put`](Self::put). The caller is in a critical section.
    #[inline]
    fn sub(&self) -> bool {
        let new = self.0.fetch_sub(1, Ordering::Release).wrapping_sub(1);
        if new <= MAX {
            return false;
        }
        self.sub_failed(new)
    }

    #[cold]
    fn sub_failed(&self, new: u32) -> bool {
        if new == NONE {
            return self.0.compare_exchange(NONE, DEAD, Ordering::Acquire, Ordering::Relaxed).is_ok();
        }
        if new >= DEAD_ZONE {
            // Contained before it is reported: a subscriber of events may take its time.
            put_back(&self.0, DEAD);
            faults::imbalanced();
        } else {
            put_back(&self.0, SATURATED);
        }
        false
    }

    /// Whether there is one reference, which is then the caller's. What other threads did before
    /// their puts happened before.
    pub(crate) fn is_one(&self) -> bool {
        self.0.load(Ordering::Acquire) == initial(1)
    }

    /// Whether a put has returned that it was the last. Not the same as a count of zero, which a
    /// get can still raise.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        is_dead(self.0.load(Ordering::Relaxed))
    }

    /// Whether the count overflowed: its object will not be destroyed.
    #[must_use]
    pub fn is_saturated(&self) -> bool {
        is_saturated(self.0.load(Ordering::Relaxed))
    }

    /// The number of references at one moment; more than 2^31 if saturated, 0 if dead.
    #[must_use]
    pub fn count(&self) -> u32 {
        let value = self.0.load(Ordering::Relaxed);
        if value >= DEAD_ZONE { 0 } else { value + 1 }
    }
}

impl fmt::Debug for RcuRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RcuRef").field("count", &self.count()).field("dead", &self.is_dead()).finish()
    }
}

/// Critical sections are not in these models. The count's memory lives as long as the model, as if
/// a grace period ended when all threads have ended. The object that the count protects is
/// destroyed at once, by the thread that is told to. All interleavings are tried.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::faults::{Faults, faults};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Object {
        refs: RcuRef,
        contents: UnsafeCell<Option<u32>>,
    }

    // SAFETY: loom checks every access to the cell.
    unsafe impl Sync for Object {}
    // SAFETY: as above.
    unsafe impl Send for Object {}

    impl Object {
        fn new(refs: u32) -> Arc<Self> {
            Arc::new(Self { refs: RcuRef::new(refs), contents: UnsafeCell::new(Some(0)) })
        }

        /// The value in the end, whatever a plain load may see.
        fn value(&self) -> u32 {
            self.refs.0.fetch_add(0, Ordering::SeqCst)
        }

        /// Uses the object, as a holder of a reference does.
        fn look(&self) {
            // SAFETY: loom checks that nothing writes.
            self.contents.with(|c| assert!(unsafe { *c }.is_some(), "destroyed"));
        }

        fn put(&self) -> bool {
            let last = self.refs.sub();
            if last {
                // SAFETY: loom checks that nothing else reads or writes.
                self.contents.with_mut(|c| assert!(unsafe { (*c).take() }.is_some(), "destroyed twice"));
            }
            last
        }

        fn get_look_put(&self) -> bool {
            self.refs.add() && {
                self.look();
                self.put()
            }
        }
    }

    fn told(last: impl IntoIterator<Item = bool>) -> usize {
        last.into_iter().filter(|last| *last).count()
    }

    /// Last put against get: a thread that got has the object until it puts, one put is told, and a
    /// get after that is refused.
    #[test]
    fn last_put_against_get() {
        loom::model(|| {
            let before = faults();
            let object = Object::new(1);
            let getter = object.clone();
            let getter = thread::spawn(move || getter.get_look_put());
            object.look();
            let mine = object.put();
            assert_eq!(told([mine, getter.join().unwrap()]), 1);
            assert!(is_dead(object.value()) && !object.refs.add() && object.value() == DEAD);
            assert_eq!(Faults::since(before), (0, 0));
        });
    }

    /// Put against the put that marks dead: of all puts that see the count at none, one is told,
    /// and none of them reports an imbalance.
    #[test]
    fn put_against_put_that_marks_dead() {
        loom::model(|| {
            let before = faults();
            let object = Object::new(2);
            let threads = [object.clone(), object.clone()];
            let [other, getter] = threads;
            let other = thread::spawn(move || other.put());
            let getter = thread::spawn(move || getter.get_look_put());
            let mine = object.put();
            assert_eq!(told([mine, other.join().unwrap(), getter.join().unwrap()]), 1);
            assert!(is_dead(object.value()));
            assert_eq!(Faults::since(before), (0, 0));
        });
    }

    /// Double put: a put too many, beside the last one and a get, is counted, and at most one is
    /// told.
    #[test]
    fn double_put() {
        loom::model(|| {
            let before = faults();
            let object = Object::new(1);
            let (other, late) = (object.clone(), object.clone());
            let other = thread::spawn(move || other.put());
            let late = thread::spawn(move || late.refs.add());
            let mine = object.put();
            let (other, got) = (other.join().unwrap(), late.join().unwrap());
            assert!(told([mine, other]) <= 1);
            if got {
                // It got in between: with its reference there were two, and both were put. What is
                // left is the getter's mistaken belief, and its put is the one too many.
                assert!(!object.refs.sub());
            }
            assert_eq!(Faults::since(before), (0, 1));
            assert!(is_dead(object.value()));
        });
    }

    /// Saturation from both sides: gets and puts at the edge leave a saturated count, and no put is
    /// told to destroy.
    #[test]
    fn saturation_from_both_sides() {
        loom::model(|| {
            let before = faults();
            let object = Object::new(0);
            object.refs.0.store(MAX, Ordering::Relaxed);
            let threads = [object.clone(), object.clone()];
            let [a, b] = threads.map(|o| thread::spawn(move || assert!(o.refs.add())));
            assert!(!object.put());
            a.join().unwrap();
            b.join().unwrap();
            assert!(is_saturated(object.value()));
            assert!(!object.put() && object.refs.add() && is_saturated(object.value()));
            let (saturated, imbalanced) = Faults::since(before);
            assert!((1..=2).contains(&saturated) && imbalanced == 0, "{saturated} {imbalanced}");
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::faults::{Faults, faults};

    /// Proves REF-2.
    #[test]
    fn starts_at_any_count() {
        for count in [1, 2, 100, MAX] {
            let refs = RcuRef::new(count);
            assert_eq!((refs.count(), refs.is_dead(), refs.is_saturated()), (count, false, false));
        }
        for count in [MAX + 1, u32::MAX] {
            let refs = RcuRef::new(count);
            assert!(refs.is_saturated() && refs.count() > MAX && !refs.put());
        }
        let refs = RcuRef::new(3);
        assert_eq!([refs.put(), refs.put(), refs.put()], [false, false, true]);
    }

    /// A count of zero is not dead. Proves REF-2.
    #[test]
    fn none_is_not_dead() {
        let refs = RcuRef::new(0);
        assert_eq!((refs.count(), refs.is_dead()), (0, false));
        assert!(rcu::read(|guard| refs.try_get(guard)));
        assert!(refs.put());
        assert_eq!((refs.count(), refs.is_dead()), (0, true));
    }

    /// Proves REF-2.
    #[test]
    fn late_gets_fail_and_puts_too_many_are_counted() {
        let before = faults();
        let refs = RcuRef::new(1);
        assert!(refs.put());
        for _ in 0..1000 {
            assert!(!rcu::read(|guard| refs.try_get(guard)));
        }
        assert_eq!(Faults::since(before), (0, 0));
        assert!(!refs.put() && refs.is_dead());
        assert_eq!(Faults::since(before), (0, 1));
        // A get by a holder, which cannot be one.
        refs.get();
        assert!(refs.is_dead());
        assert_eq!(Faults::since(before), (0, 2));
        // At none, before a put was told that it was the last.
        let refs = RcuRef::new(0);
        assert!(!refs.put() && refs.is_dead());
        assert_eq!(Faults::since(before), (0, 3));
    }

    /// Proves REF-2.
    #[test]
    fn overflow_leaks() {
        let before = faults();
        let refs = RcuRef::new(MAX);
        rcu::read(|guard| {
            // MAX references, and one more, which is still counted right; the next one is too many.
            assert!(refs.try_get(guard) && !refs.is_saturated());
            assert!(refs.try_get(guard) && refs.is_saturated());
            assert!((0..1000).all(|_| refs.try_get(guard) && !refs.put_guarded(guard) && !refs.put_guarded(guard)));
        });
        assert!(refs.is_saturated());
        assert_eq!(Faults::since(before), (1, 0));
        assert_eq!(format!("{:?}", RcuRef::new(2)), "RcuRef { count: 2, dead: false }");
    }
}
