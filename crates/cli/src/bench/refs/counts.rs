//! The counts, each behind the same face.
//!
//! What is asked of all of them is what a lookup does: a get that may be refused (except of `Arc`, which cannot refuse),
//! and a put that says whether it was the last. Both answers are looked at, by a branch that is never taken; only the plain
//! increment, which is the limit, asks nothing.

use super::rcu;
use crate::bench::error::BenchError;
use netmem_refs::{PercpuRef, RcuRef, RefCount};
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Weak};

/// A count that is measured.
pub(super) trait Variant: Send + Sync + Sized {
    /// As results name it.
    const NAME: &'static str;

    /// What a block of operations has open around it.
    type Batch;

    /// One reference is held from the beginning.
    fn new() -> Result<Self, BenchError>;

    /// Runs a block.
    fn batch<R>(block: impl FnOnce(&Self::Batch) -> R) -> R;
}

/// As gets and puts in pairs are measured: no put is the last.
pub(super) trait Count: Variant {
    /// Whether one is shared by all threads; otherwise each thread has its own.
    const SHARED: bool = true;

    /// One get and one put. `false` if the get was refused or the put told that it was the last: the count is broken.
    fn pair(&self, batch: &Self::Batch) -> bool;
}

/// As the put that ends it is measured.
pub(super) trait Last: Variant {
    /// One whose next put is the last.
    fn last() -> Result<Self, BenchError> {
        Self::new()
    }

    /// Puts it. `false` if that was not the last: the count is broken. Memory stays allocated.
    fn put(&mut self, batch: &Self::Batch) -> bool;
}

/// What most need: nothing is open around their operations.
macro_rules! variant {
    ($count:ty, $name:literal, $new:expr) => {
        impl Variant for $count {
            const NAME: &'static str = $name;
            type Batch = ();

            fn new() -> Result<Self, BenchError> {
                Ok($new)
            }

            #[inline(always)]
            fn batch<R>(block: impl FnOnce(&()) -> R) -> R {
                block(&())
            }
        }
    };
}

/// Keeps the compiler from making one operation of a get and a put, and costs no instruction.
#[inline(always)]
fn apart() {
    compiler_fence(Ordering::SeqCst);
}

/// The limit: memory that is loaded, incremented and stored, in one instruction without a lock, on a line of each thread's
/// own. The accesses are relaxed atomics so that they stay what they are; on x86-64 that is `inc` and `dec` of memory.
///
/// On one counter, what it takes says more about the processor than on 64: some hand a stored value on to the next load of
/// the same address in a register (about half a nanosecond for the pair), others through the store buffer (three).
pub(super) struct Plain(AtomicU64);

impl Plain {
    #[inline(always)]
    fn add(&self, n: u64) -> u64 {
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(sum, Ordering::Relaxed);
        sum
    }
}

variant!(Plain, "plain", Self(AtomicU64::new(1)));

impl Count for Plain {
    const SHARED: bool = false;

    #[inline(always)]
    fn pair(&self, (): &()) -> bool {
        self.add(1);
        apart();
        self.add(1u64.wrapping_neg());
        apart();
        true
    }
}

impl Last for Plain {
    #[inline(always)]
    fn put(&mut self, (): &()) -> bool {
        self.add(1u64.wrapping_neg()) == 0
    }
}

/// `Arc`, cloned and dropped. Its counts are on a line of their own, for what it holds is a line.
pub(super) struct Strong(Arc<Line>);

#[repr(align(64))]
#[derive(Default)]
pub(super) struct Line;

variant!(Strong, "arc", Self(Arc::new(Line)));

impl Count for Strong {
    #[inline(always)]
    fn pair(&self, (): &()) -> bool {
        let held = Arc::clone(&self.0);
        apart();
        drop(held);
        apart();
        true
    }
}

/// A weak reference keeps the memory, so that freeing it is not part of the put.
pub(super) struct StrongLast {
    held: Option<Arc<Line>>,
    _memory: Weak<Line>,
}

variant!(StrongLast, "arc", {
    let held = Arc::new(Line);
    Self { _memory: Arc::downgrade(&held), held: Some(held) }
});

impl Last for StrongLast {
    #[inline(always)]
    fn put(&mut self, (): &()) -> bool {
        self.held.take().is_some()
    }
}

/// `RefCount`, whose get is a compare-and-swap loop.
pub(super) struct Swapped(RefCount);

variant!(Swapped, "refcount", Self(RefCount::new(1)));

impl Count for Swapped {
    #[inline(always)]
    fn pair(&self, (): &()) -> bool {
        let got = self.0.try_get();
        apart();
        let last = got && self.0.put();
        apart();
        got && !last
    }
}

impl Last for Swapped {
    #[inline(always)]
    fn put(&mut self, (): &()) -> bool {
        self.0.put()
    }
}

/// `RcuRef`, a guard for every operation: what somebody pays who looks up, and drops much later.
pub(super) struct Guarded(RcuRef);

variant!(Guarded, "rcuref", Self(RcuRef::new(1)));

impl Count for Guarded {
    #[inline(always)]
    fn pair(&self, (): &()) -> bool {
        let got = rcu::read(|guard| self.0.try_get(guard));
        apart();
        let last = got && self.0.put();
        apart();
        got && !last
    }
}

impl Last for Guarded {
    #[inline(always)]
    fn put(&mut self, (): &()) -> bool {
        self.0.put()
    }
}

/// `RcuRef`, a guard for a block of 64 pairs: what somebody pays who works in batches, as packets come.
pub(super) struct Batched(RcuRef);

impl Variant for Batched {
    const NAME: &'static str = "rcuref_batched";
    type Batch = rcu::Guard;

    fn new() -> Result<Self, BenchError> {
        Ok(Self(RcuRef::new(1)))
    }

    #[inline(always)]
    fn batch<R>(block: impl FnOnce(&rcu::Guard) -> R) -> R {
        rcu::read(block)
    }
}

impl Count for Batched {
    #[inline(always)]
    fn pair(&self, guard: &rcu::Guard) -> bool {
        let got = self.0.try_get(guard);
        apart();
        let last = got && self.0.put_guarded(guard);
        apart();
        got && !last
    }
}

impl Last for Batched {
    #[inline(always)]
    fn put(&mut self, guard: &rcu::Guard) -> bool {
        self.0.put_guarded(guard)
    }
}

/// `PercpuRef`, alive: plain adds to this CPU's counter.
pub(super) struct PerCpu(PercpuRef);

impl PerCpu {
    /// Ends its life as a per-CPU count, and puts the reference held from the beginning.
    pub(super) fn kill(&self) -> Result<(), BenchError> {
        self.0.kill().map(|_last| ()).map_err(unavailable)
    }
}

variant!(PerCpu, "percpuref", Self(PercpuRef::new().map_err(unavailable)?));

impl Count for PerCpu {
    #[inline(always)]
    fn pair(&self, (): &()) -> bool {
        let got = self.0.try_get();
        apart();
        let last = got && self.0.put();
        apart();
        got && !last
    }
}

/// `PercpuRef`, killed: while it is alive, no put can be the last.
impl Last for PerCpu {
    fn last() -> Result<Self, BenchError> {
        let count = Self::new()?;
        if !count.0.try_get() {
            return Err(BenchError::Unbalanced("percpuref".into()));
        }
        count.kill()?;
        Ok(count)
    }

    #[inline(always)]
    fn put(&mut self, (): &()) -> bool {
        self.0.put()
    }
}

fn unavailable(error: impl Error + Send + Sync + 'static) -> BenchError {
    BenchError::Unavailable { what: "percpuref", why: format!("{:#}", anyhow::Error::new(error)) }
}

/// The guard alone, entered and left.
pub(super) struct Guard;

variant!(Guard, "guard", Self);

impl Count for Guard {
    #[inline(always)]
    fn pair(&self, (): &()) -> bool {
        rcu::read(|_guard| apart());
        apart();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs<C: Count>() {
        let count = C::new().unwrap();
        assert!(C::batch(|batch| (0..1000).all(|_| count.pair(batch))), "{}", C::NAME);
    }

    fn last<C: Last>() {
        let mut count = C::last().unwrap();
        assert!(C::batch(|batch| count.put(batch)), "{}", C::NAME);
    }

    #[test]
    fn pairs_never_end_a_count_and_the_last_put_does() {
        pairs::<Plain>();
        pairs::<Strong>();
        pairs::<Swapped>();
        pairs::<Guarded>();
        pairs::<Batched>();
        pairs::<PerCpu>();
        pairs::<Guard>();
        last::<Plain>();
        last::<StrongLast>();
        last::<Swapped>();
        last::<Guarded>();
        last::<Batched>();
        last::<PerCpu>();
    }
}
