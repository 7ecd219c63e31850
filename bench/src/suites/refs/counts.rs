//! The reference counts, behind one trait.
//!
//! Each count does what a lookup does: a get that may be refused (except for `Arc`, which cannot
//! refuse), and a put that returns whether it was the last. A branch that is never taken checks
//! both results. Only the plain increment, which is the limit, has no results.

use crate::error::BenchError;
use netmem_refs::rcu;
use netmem_refs::{PercpuRef, RcuRef, RefCount};
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Weak};

/// Pairs in a block. Variants with a guard for a batch hold it for one block. It is also the number
/// of counters that are used in turn.
pub(super) const BATCH: usize = 64;

/// A count that is measured.
pub(super) trait Variant: Send + Sync + Sized {
    /// The name in results.
    const NAME: &'static str;

    /// What is open around a block of operations, such as a guard.
    type Batch;

    /// A new count with one reference.
    fn new() -> Result<Self, BenchError>;

    /// Runs a block.
    fn batch<R>(block: impl FnOnce(&Self::Batch) -> R) -> R;
}

/// A count whose gets and puts are measured in pairs: no put is the last.
pub(super) trait Count: Variant {
    /// Whether all threads share one count. Otherwise each thread has its own.
    const SHARED: bool = true;

    /// One get and one put. `false` if the get was refused or the put was the last: then the count
    /// is broken.
    fn pair(&self, batch: &Self::Batch) -> bool;
}

/// A count whose last put is measured.
pub(super) trait Last: Variant {
    /// A count whose next put is the last.
    fn last() -> Result<Self, BenchError> {
        Self::new()
    }

    /// The last put. `false` if it was not the last: then the count is broken. Memory stays
    /// allocated.
    fn put(&mut self, batch: &Self::Batch) -> bool;
}

/// Counts whose operations need no critical section around them.
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

/// Prevents the compiler from merging a get and a put into one operation. It costs no instruction.
#[inline(always)]
fn apart() {
    compiler_fence(Ordering::SeqCst);
}

/// The limit: memory is loaded, incremented and stored by one instruction without a lock prefix.
/// Each thread has a cache line of its own. The accesses are relaxed atomics, so that the compiler
/// keeps them: on x86-64 they are `inc` and `dec` of memory.
///
/// With one counter the result depends more on the processor than with 64. Some processors pass a
/// stored value to the next load of the same address in a register (about half a nanosecond for the
/// pair), others through the store buffer (three).
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

/// `Arc`, cloned and dropped. Its counts have a cache line of their own, because its content is a
/// cache line.
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

/// A weak reference keeps the memory allocated, so that the put does not include freeing it.
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

/// `RefCount`. Its get is a compare-and-swap loop.
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

/// `RcuRef` with a guard for every operation: the cost of a lookup whose reference is dropped much
/// later.
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

/// `RcuRef` with a guard for a block of 64 pairs: the cost for code that works in batches, as for
/// packets.
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
    /// Ends the count's life as a per-CPU count, and puts the initial reference.
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
