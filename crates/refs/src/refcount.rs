//! The count that most programs have: it increments unless zero, by compare-and-swap.
//!
//! ```text
//!   0            none: the object is being freed, or was
//!   1 ..= MAX    that many references                     MAX = 2^31 - 1
//!   sign bit     saturated: the object is never freed     each operation stores SATURATED
//! ```
//!
//! **Last put against `try_get`.** The thread that moves the value from 1 to 0 frees the object. A
//! `try_get` that comes after it finds 0. If the last put comes between the load and the exchange
//! of a `try_get`, the exchange fails, and the `try_get` tests the value again.
//!
//! ```text
//!   put                                   try_get
//!                                         load = 1
//!   1 -> 0, and it is the last
//!                                         exchange(1 -> 2) fails: 0
//!                                         refused
//! ```
//!
//! **Saturation from both sides.** A get adds before it can see that the count overflows, so other
//! threads see the value beyond the edge, and a put may bring it below again. That put tests the
//! value that it found, finds the saturated zone, and stores SATURATED as the get does. The object
//! leaks. To leave the zone by additions alone, 2^30 threads would have to be between their
//! addition and their store.
//!
//! ```text
//!   get                                   put
//!   MAX -> MAX + 1
//!                                         MAX + 1 -> MAX
//!                                         stores SATURATED
//!   stores SATURATED
//! ```
//!
//! **Memory ordering.** Gets are relaxed: the caller has loaded the object's address before, and
//! that load made the object's contents visible. A put is a release, and the last put acquires: the
//! thread that frees the object sees all that other threads did to it before their puts.

use crate::faults;
use crate::sync::{AtomicU32, Ordering, acquire, put_back};
use std::fmt;

const MAX: u32 = i32::MAX.cast_unsigned();
const SATURATED: u32 = 0xC000_0000;

const fn is_saturated(value: u32) -> bool {
    value > MAX
}

/// A saturating reference count in 4 bytes, with no rules about memory: the baseline.
///
/// A get and a put are one atomic operation each while one CPU uses the count. Under contention
/// `try_get` repeats its compare-and-swap, the more often the more CPUs there are: see
/// [`RcuRef`](crate::RcuRef) and [`PercpuRef`](crate::PercpuRef).
///
/// A count that overflows is saturated: it keeps its value, and its object is never freed. A put
/// without a reference is contained in the same way if it finds the count at zero. Both are counted
/// in [`faults`](crate::faults()).
///
/// ```
/// use netmem_refs::RefCount;
///
/// let refs = RefCount::new(1);
/// assert!(refs.try_get());
/// assert!(!refs.put());
/// assert!(refs.put(), "the last one");
/// assert!(!refs.try_get());
/// ```
#[repr(transparent)]
pub struct RefCount(AtomicU32);

#[cfg(not(loom))]
const _: () = assert!(size_of::<RefCount>() == 4);

impl RefCount {
    /// A count of that many references; saturated if there are more than 2^31 - 1.
    #[cfg(not(loom))]
    #[must_use]
    pub const fn new(count: u32) -> Self {
        Self(AtomicU32::new(if is_saturated(count) { SATURATED } else { count }))
    }

    /// As above, where loom's atomics know no constants.
    #[cfg(loom)]
    pub fn new(count: u32) -> Self {
        Self(AtomicU32::new(if is_saturated(count) { SATURATED } else { count }))
    }

    /// Acquires a reference, for a caller that holds one. Cannot fail. One atomic addition.
    #[inline]
    pub fn get(&self) {
        let old = self.0.fetch_add(1, Ordering::Relaxed);
        if !(1..MAX).contains(&old) {
            self.get_failed(old);
        }
    }

    #[cold]
    fn get_failed(&self, old: u32) {
        // Contained before it is reported: a subscriber of events may take its time.
        put_back(&self.0, SATURATED);
        match old {
            0 => faults::imbalanced(),
            MAX => faults::saturated(),
            _ => {}
        }
    }

    /// Acquires a reference, unless the last one has been put. The caller makes sure that the
    /// count's memory is there. A compare-and-swap loop.
    #[inline]
    #[must_use = "without a reference the object must not be used"]
    pub fn try_get(&self) -> bool {
        self.try_get_and(|| ())
    }

    /// [`try_get`](Self::try_get), and how often its compare-and-swap had to be repeated: the cost
    /// of contention. For measurements, and not stable.
    #[cfg(feature = "bench")]
    #[inline]
    #[must_use = "without a reference the object must not be used"]
    pub fn try_get_counting(&self) -> (bool, u32) {
        let mut retries = 0;
        (self.try_get_and(|| retries += 1), retries)
    }

    #[inline(always)]
    fn try_get_and(&self, mut retry: impl FnMut()) -> bool {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            if !(1..MAX).contains(&old) {
                return self.try_get_failed(old);
            }
            match self.0.compare_exchange_weak(old, old + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
            retry();
        }
    }

    #[cold]
    fn try_get_failed(&self, old: u32) -> bool {
        if old != 0 {
            // Contained before it is reported: a subscriber of events may take its time.
            put_back(&self.0, SATURATED);
            if old == MAX {
                faults::saturated();
            }
        }
        old != 0
    }

    /// Puts a reference. If it returns true, the reference was the last: only the caller may free
    /// the object, and all that other threads did with the object happened before. If it returns
    /// false, the caller must not touch the object any more. One atomic subtraction.
    #[inline]
    #[must_use = "the caller that puts the last reference frees the object"]
    pub fn put(&self) -> bool {
        let old = self.0.fetch_sub(1, Ordering::Release);
        if old == 1 {
            acquire(&self.0);
            return true;
        }
        if !(2..=MAX).contains(&old) {
            self.put_failed(old);
        }
        false
    }

    #[cold]
    fn put_failed(&self, old: u32) {
        put_back(&self.0, SATURATED);
        if old == 0 {
            faults::imbalanced();
        }
    }

    /// The number of references at one moment; more than 2^31 - 1 if the count is saturated.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether there is one reference, which is then the caller's. What other threads did before
    /// their puts happened before.
    pub(crate) fn is_one(&self) -> bool {
        self.0.load(Ordering::Acquire) == 1
    }

    /// Whether the count overflowed or was unbalanced: its object will not be freed.
    #[must_use]
    pub fn is_saturated(&self) -> bool {
        is_saturated(self.count())
    }
}

impl fmt::Debug for RefCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RefCount").field(&self.count()).finish()
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::faults::{Faults, faults};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// A counted object: users write it, and the thread that is told to frees it.
    struct Object {
        refs: RefCount,
        contents: UnsafeCell<Option<u32>>,
    }

    // SAFETY: loom checks every access to the cell.
    unsafe impl Sync for Object {}
    // SAFETY: as above.
    unsafe impl Send for Object {}

    impl Object {
        fn new(refs: u32) -> Arc<Self> {
            Arc::new(Self { refs: RefCount::new(refs), contents: UnsafeCell::new(Some(0)) })
        }

        /// The value in the end, whatever a plain load may see.
        fn value(&self) -> u32 {
            self.refs.0.fetch_add(0, Ordering::SeqCst)
        }

        fn look(&self) {
            // SAFETY: loom checks that nothing writes.
            self.contents.with(|c| assert!(unsafe { *c }.is_some(), "freed"));
        }

        fn put(&self) -> bool {
            let last = self.refs.put();
            if last {
                // SAFETY: loom checks that nothing else reads or writes.
                self.contents.with_mut(|c| assert!(unsafe { (*c).take() }.is_some(), "freed twice"));
            }
            last
        }
    }

    /// Last put against `try_get`: a thread that is not refused has the object, which is freed
    /// once, after the last look.
    #[test]
    fn last_put_against_try_get() {
        loom::model(|| {
            let object = Object::new(1);
            let threads = [object.clone(), object.clone()].map(|o| {
                thread::spawn(move || {
                    o.refs.try_get() && {
                        o.look();
                        o.put()
                    }
                })
            });
            object.look();
            let mine = object.put();
            let told = threads.map(|t| t.join().unwrap()).into_iter().chain([mine]).filter(|last| *last).count();
            assert_eq!(told, 1);
            assert!(!object.refs.try_get());
        });
    }

    /// Saturation from both sides: gets and puts around the edge leave it saturated or in balance,
    /// and never near zero.
    #[test]
    fn saturation_from_both_sides() {
        loom::model(|| {
            let before = faults();
            let object = Object::new(MAX);
            let (a, b) = (object.clone(), object.clone());
            let get = thread::spawn(move || a.refs.get());
            let try_get = thread::spawn(move || assert!(b.refs.try_get()));
            assert!(!object.put());
            get.join().unwrap();
            try_get.join().unwrap();
            // Not only beyond the edge: back in the middle, but for what was added since.
            assert!(object.value().abs_diff(SATURATED) <= 2);
            assert!(!object.put() && object.refs.try_get() && is_saturated(object.value()));
            // The first to overflow counts; after a put in the right moment, so does the second.
            let (saturated, imbalanced) = Faults::since(before);
            assert!((1..=2).contains(&saturated) && imbalanced == 0, "{saturated} {imbalanced}");
        });
    }

    /// Double put: of two puts of one reference, one is told to free, and the other is counted as a
    /// fault.
    #[test]
    fn double_put() {
        loom::model(|| {
            let before = faults();
            let object = Object::new(1);
            let other = object.clone();
            let put = thread::spawn(move || other.put());
            let told = [object.put(), put.join().unwrap()];
            assert_eq!(told.into_iter().filter(|last| *last).count(), 1);
            assert_eq!(Faults::since(before), (0, 1));
            assert!(is_saturated(object.value()));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::faults::{Faults, faults};

    /// Proves REF-1.
    #[test]
    fn overflow_leaks() {
        for try_get in [false, true] {
            let before = faults();
            let refs = RefCount::new(MAX);
            if try_get {
                assert!(refs.try_get());
            } else {
                refs.get();
            }
            assert!(refs.is_saturated());
            assert!(refs.try_get());
            refs.get();
            assert!((0..1000).all(|_| !refs.put()));
            assert!(refs.is_saturated());
            assert_eq!(Faults::since(before), (1, 0));
        }
    }

    /// Proves REF-1.
    #[test]
    fn under_run_is_contained_and_counted() {
        let before = faults();
        let refs = RefCount::new(1);
        assert!(refs.put());
        assert!(!refs.put());
        assert!(refs.is_saturated());
        assert_eq!(Faults::since(before), (0, 1));
        let refs = RefCount::new(0);
        refs.get();
        assert!(refs.is_saturated());
        assert_eq!(Faults::since(before), (0, 2));
    }

    #[cfg(feature = "bench")]
    #[test]
    fn a_get_without_contention_is_not_repeated() {
        assert_eq!(RefCount::new(4).try_get_counting(), (true, 0));
    }

    #[test]
    fn counts() {
        let refs = RefCount::new(3);
        refs.get();
        assert_eq!((refs.count(), refs.try_get()), (4, true));
        assert_eq!(refs.count(), 5);
        assert!((0..4).all(|_| !refs.put()));
        assert!(refs.put());
        assert_eq!((refs.count(), refs.try_get()), (0, false));
        assert!(RefCount::new(u32::MAX).is_saturated());
        assert_eq!(format!("{refs:?}"), "RefCount(0)");
    }
}
