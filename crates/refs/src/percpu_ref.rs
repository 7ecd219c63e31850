//! `PercpuRef`: a count that no core shares while the object lives.
//!
//! # The idea
//!
//! Why not one counter: every core that gets and puts would write its cache line. The number of
//! references to an object that has an owner is needed only when the owner kills it. So while the
//! object is *live*, a get adds 1 to a word of the CPU that it runs on, and a put subtracts 1 from
//! the word of the CPU that it runs on. One word alone means nothing. When the owner *kills* the
//! object, the words are added up into one shared count, which from then on reaches zero as any
//! other count does.
//!
//! ```text
//!   live                             dying                                 released
//!   gate open                        gate closed                           count = 0
//!   shared = BIAS + initial          shared = DYING | what is held         a late try_get fails
//!   get/put: this CPU's word ──kill──► get/put: one atomic add ──last put──►
//!                            ◄─resurrect─┘
//! ```
//!
//! # The shared count
//!
//! ```text
//!   63      62                                0
//!   │ DYING │ count, with BIAS (2^62) while live │
//! ```
//!
//! It may be used at any time, live or not: by threads that find the gate closed, and by threads
//! that have no sequences. The bias keeps it from zero while part of the references are counted in
//! the words. One atomic addition subtracts the bias and adds the sum of the words. A get on a CPU
//! may be followed by a put on the shared count, or the other way round, because the two are read
//! only as a sum.
//!
//! # Killing
//!
//! ```text
//!   kill                             get, put on another CPU
//!   lock life
//!   shared |= DYING                  shared path: try_get_live fails from here on
//!   counter.close()                  sequence: committed before, and in the sum, or restarted, and
//!     gate closed; membarrier; sum     finds the gate closed: shared path
//!   shared += sum - BIAS
//!   unlock
//!   confirm()                        no try_get_live can succeed
//!   put the initial reference
//! ```
//!
//! There is no other grace period to wait for: closing the gate is one, as long as a membarrier
//! takes. Until the last line the initial reference keeps the count from zero, so the addition of
//! the sum cannot bring it to zero.
//!
//! # Races
//!
//! *Get against kill.* The get commits before the barrier, and is in the sum, or it is restarted,
//! finds the gate closed, and adds to the shared count, in which the bias or the initial reference
//! still is.
//!
//! *Put against kill*, the same; if the put comes after the fold and the initial reference is gone,
//! it may be the last.
//!
//! ```text
//!   put (holds the last reference)             kill
//!   finds the gate closed
//!                                              shared += sum - BIAS    (2: initial, and the put's)
//!                                              shared -= 1             (1)
//!   shared -= 1               (0: releases)
//! ```
//!
//! In the other order the kill releases. *Kill against kill*: the bit is set under the lock, the
//! second finds it.
//!
//! *Resurrect against put.* Resurrecting is one compare-and-swap that fails once the count is zero:
//! either the put is not the last, or there is nothing to resurrect.
//!
//! *Resurrect against a sequence that loaded the old gate.* A sequence that loaded the gate before
//! the kill is restarted by the barrier. A sequence that loads it after the reopening adds to words
//! that are zero and counted again.
//!
//! # Ordering
//!
//! The thread that releases the object sees what other threads did with it before their puts. The
//! commit of a put on a CPU is a release. The barrier of the kill makes it visible to the killing
//! thread, whose put of the initial reference is a release. A put on the shared count is a release,
//! and the last one an acquire. All of them are read-modify-writes of one word, so none hides an
//! earlier one. Gets need no order: the caller has loaded the object's address before.

use crate::faults;
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::unkilled;
use netmem_percpu::{BarrierError, Counter, NoMemory};
use std::sync::PoisonError;
use thiserror::Error;

const DYING: u64 = 1 << 63;
/// What the shared count holds in addition while gets are counted by CPU. It is larger than the
/// number of references, and larger than the number of puts on the shared count whose gets were
/// counted on a CPU, so the shared count cannot reach zero.
const BIAS: u64 = 1 << 62;
/// More references than there can be to an object that is dying, and less than the bias of a live
/// one. A dying count that is not below it was contained.
const TOO_MANY: u64 = BIAS / 2;
/// The value of a count that was found unbalanced: no put brings it to zero.
const CONTAINED: u64 = DYING | (BIAS + TOO_MANY);

/// A reference count without a shared line, for objects that live long, are used from many cores,
/// and are ended by an owner: a binding, a pool, a device, a configuration.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use netmem_refs::PercpuRef;
///
/// let count = PercpuRef::new()?; // with the owner's, the initial reference
/// assert!(count.try_get_live()); // on any thread: a plain add
/// assert!(!count.kill()?); // the owner lets go; one reference is still held
/// assert!(!count.try_get_live());
/// assert!(count.put()); // the last: it is for this caller to release the object
/// # Ok(())
/// # }
/// ```
///
/// **Cost.** Live: get and put are thirteen instructions each and no atomic operation
/// ([`Counter::add`]). Dying: an atomic add each. Killing: a membarrier, about a microsecond, and a
/// load for each CPU. 24 bytes, and 8 in an arena for each CPU.
///
/// **It does not find the object**: the caller of [`try_get`](Self::try_get) must know by other
/// means that the memory of the count is there. [`Owner`](crate::Owner) and [`Ref`](crate::Ref) are
/// such means, and so is [`RcuCell`](crate::RcuCell).
#[derive(Debug)]
pub struct PercpuRef {
    counter: Counter,
    shared: AtomicU64,
    /// Locked during a kill and a resurrect, but not while user code runs.
    life: Mutex<()>,
}

/// Why a count was not killed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KillError {
    /// The count was killed before.
    #[error("the count has been killed before: only its owner may kill it, once")]
    AlreadyDying,
    /// The kernel refused the barrier. The count is still live.
    #[error("the count cannot be killed, and is live as before")]
    Barrier(#[from] BarrierError),
}

/// Why a count was not resurrected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ResurrectError {
    /// The count is live.
    #[error("the count is live: only one that was killed can be resurrected")]
    NotDying,
    /// The last reference has been put: the object is released, or about to be.
    #[error("the last reference has been put: there is nothing to resurrect")]
    Released,
}

fn held(shared: u64) -> u64 {
    shared & !DYING
}

impl PercpuRef {
    /// A live count with one reference, the owner's.
    ///
    /// # Errors
    ///
    /// There is no memory for the words. Nothing stays allocated.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self { counter: Counter::new()?, shared: AtomicU64::new(BIAS + 1), life: Mutex::new(()) })
    }

    /// Acquires a reference, for a caller that holds one, or is the owner before it kills. Cannot
    /// fail.
    #[inline(always)]
    pub fn get(&self) {
        self.get_many(1);
    }

    /// Acquires `n` references at once: no more than 2^61 in all are ever held. As for
    /// [`get`](Self::get).
    #[inline(always)]
    pub fn get_many(&self, n: u32) {
        if self.counter.add(n as isize).is_err() {
            self.get_shared(n);
        }
    }

    #[cold]
    fn get_shared(&self, n: u32) {
        if held(self.shared.fetch_add(n.into(), Ordering::Relaxed)) == 0 {
            self.imbalance();
        }
    }

    /// Acquires a reference, unless the last one has been put. It succeeds also if the count was
    /// killed: for work under way, such as to send a packet again.
    #[inline(always)]
    #[must_use = "without a reference the object must not be used"]
    pub fn try_get(&self) -> bool {
        self.counter.add(1).is_ok() || self.try_get_shared(|shared| held(shared) != 0)
    }

    /// Acquires a reference, unless the count was killed.
    #[inline(always)]
    #[must_use = "without a reference the object must not be used"]
    pub fn try_get_live(&self) -> bool {
        self.counter.add(1).is_ok() || self.try_get_shared(|shared| shared & DYING == 0)
    }

    #[cold]
    fn try_get_shared(&self, may: impl Fn(u64) -> bool) -> bool {
        let more = |shared| may(shared).then_some(shared + 1);
        self.shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Puts a reference. If it returns true, the reference was the last: the caller releases the
    /// object, which no other thread can reach.
    #[inline(always)]
    #[must_use = "the caller that puts the last reference releases the object"]
    pub fn put(&self) -> bool {
        self.put_many(1)
    }

    /// Puts `n` references at once. As for [`put`](Self::put).
    #[inline(always)]
    #[must_use = "the caller that puts the last reference releases the object"]
    pub fn put_many(&self, n: u32) -> bool {
        self.counter.add(-(n as isize)).is_err() && self.put_shared(n)
    }

    #[cold]
    fn put_shared(&self, n: u32) -> bool {
        let held = held(self.shared.fetch_sub(n.into(), Ordering::AcqRel));
        if held < n.into() {
            self.imbalance();
        }
        held == n.into()
    }

    /// Contains an imbalance: puts without gets, or a get at zero. The object must not be released,
    /// because it may have been released before, or be in use. The count gets a value that no put
    /// brings to zero.
    #[cold]
    fn imbalance(&self) {
        // Contained before it is reported: a subscriber of events may take its time.
        self.shared.store(CONTAINED, Ordering::Relaxed);
        faults::imbalanced();
    }

    /// Puts the owner's reference. From then on, gets and puts are atomic additions to a shared
    /// count. Returns whether the reference was the last, as [`put`](Self::put).
    ///
    /// # Errors
    ///
    /// [`KillError::AlreadyDying`]; [`KillError::Barrier`], and the count is live.
    pub fn kill(&self) -> Result<bool, KillError> {
        self.kill_and_confirm(|| ())
    }

    /// As [`kill`](Self::kill), and calls `confirm` as soon as no
    /// [`try_get_live`](Self::try_get_live) can succeed any more, before the initial reference
    /// goes: on this thread, with no lock held. If `confirm` panics, the initial reference is still
    /// there, and [`put`](Self::put) releases it.
    ///
    /// # Errors
    ///
    /// As for [`kill`](Self::kill); then `confirm` is not called.
    pub fn kill_and_confirm(&self, confirm: impl FnOnce()) -> Result<bool, KillError> {
        let balanced = {
            let _life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
            if self.shared.fetch_or(DYING, Ordering::Relaxed) & DYING != 0 {
                return Err(KillError::AlreadyDying);
            }
            let sum = match self.counter.close() {
                // The gate was open: only a holder of the lock closes and reopens it.
                Ok(sum) => sum.unwrap_or(0),
                Err(e) => {
                    self.shared.fetch_and(!DYING, Ordering::Relaxed);
                    return Err(e.into());
                }
            };
            let fold = (sum as i64).cast_unsigned().wrapping_sub(BIAS);
            let folded = self.shared.fetch_add(fold, Ordering::Relaxed).wrapping_add(fold);
            // The initial reference is in it. Less than that, or more than there can be, comes of
            // puts without gets.
            let balanced = folded & DYING != 0 && (1..TOO_MANY).contains(&held(folded));
            if !balanced {
                self.shared.store(CONTAINED, Ordering::Relaxed);
            }
            balanced
        };
        if !balanced {
            faults::imbalanced();
        }
        confirm();
        let last = self.put_shared(1);
        // This count may be gone.
        unkilled::retry();
        Ok(last)
    }

    /// Revives a killed count, with an owner's reference again. The caller holds a reference.
    ///
    /// # Errors
    ///
    /// The count is live, or its last reference has gone.
    pub fn resurrect(&self) -> Result<(), ResurrectError> {
        let _life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let back =
            |shared| (shared & DYING != 0 && (1..TOO_MANY).contains(&held(shared))).then(|| held(shared) + BIAS + 1);
        match self.shared.fetch_update(Ordering::AcqRel, Ordering::Relaxed, back) {
            Ok(_) => {
                // After the bias is in: from here on the shared count is only part of the number of
                // references.
                self.counter.reopen();
                Ok(())
            }
            Err(shared) if shared & DYING == 0 => Err(ResurrectError::NotDying),
            Err(_) => Err(ResurrectError::Released),
        }
    }

    /// About how many references there are, the owner's included, for statistics. A load for each
    /// CPU.
    ///
    /// While the count is live, each CPU's word is read at another moment: the result is off by at
    /// most the gets and puts that other threads make during the call. It is at least 1, for the
    /// owner's reference. Once the count has been killed, the result was right at one moment. After
    /// an imbalance was found, it is more than 2^60.
    #[must_use]
    pub fn approximate_count(&self) -> u64 {
        let shared = self.shared.load(Ordering::Relaxed);
        if shared & DYING != 0 && held(shared) < TOO_MANY {
            return held(shared);
        }
        // Live, or the bias is still in the shared count.
        let on_cpus = (self.counter.approximate() as i64).cast_unsigned();
        held(shared).wrapping_sub(BIAS).wrapping_add(on_cpus).cast_signed().max(1).cast_unsigned()
    }

    /// Whether the last reference has been put.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        held(self.shared.load(Ordering::Acquire)) == 0
    }

    /// Whether it has been killed, and not resurrected.
    #[must_use]
    pub fn is_dying(&self) -> bool {
        self.shared.load(Ordering::Acquire) & DYING != 0
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Proves REF-4: one life, from the first reference to the last.
    #[test]
    fn a_life() {
        let count = PercpuRef::new().unwrap();
        assert!(!count.is_dying() && !count.is_zero());
        count.get();
        count.get_many(3);
        assert!(count.try_get() && count.try_get_live());
        assert!(!count.put_many(5));
        let mut confirmed = 0;
        assert!(!count.kill_and_confirm(|| confirmed += 1).unwrap());
        assert_eq!(confirmed, 1);
        assert!(count.is_dying() && !count.is_zero());
        assert!(count.try_get() && !count.try_get_live());
        assert!(!count.put());
        assert!(count.put(), "the last");
        assert!(count.is_zero() && !count.try_get());
    }

    /// Proves REF-4: a second kill is an error, and changes nothing.
    #[test]
    fn a_second_kill_is_an_error() {
        let count = PercpuRef::new().unwrap();
        count.get();
        assert!(!count.kill().unwrap());
        assert!(matches!(count.kill_and_confirm(|| panic!("not confirmed twice")), Err(KillError::AlreadyDying)));
        assert!(count.put());
        assert!(matches!(count.kill(), Err(KillError::AlreadyDying)));
    }

    /// Proves REF-4: resurrect, which is for what was killed and is not yet released.
    #[test]
    fn resurrect() {
        let count = PercpuRef::new().unwrap();
        assert_eq!(count.resurrect(), Err(ResurrectError::NotDying));
        count.get();
        assert!(!count.kill().unwrap());
        assert_eq!(count.resurrect(), Ok(()));
        assert!(!count.is_dying() && count.try_get_live());
        assert!(!count.put_many(2));
        assert!(count.kill().unwrap(), "the owner's was the last");
        assert_eq!(count.resurrect(), Err(ResurrectError::Released));
    }

    /// Proves REF-4: puts without gets are found when the count is killed, or when they happen;
    /// nothing is released twice.
    #[test]
    fn imbalance_is_contained() {
        let before = faults::faults();
        let count = PercpuRef::new().unwrap();
        assert!(!count.put_many(2));
        assert!(!count.kill().unwrap());
        assert_eq!(count.resurrect(), Err(ResurrectError::Released));
        let dead = PercpuRef::new().unwrap();
        assert!(dead.kill().unwrap());
        assert!(!dead.put());
        dead.get();
        assert!(!dead.put());
        assert_eq!(faults::Faults::since(before), (0, 2));
    }
}
