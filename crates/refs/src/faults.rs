//! Contained faults: wrong uses of counts in this process, and panics without a caller.
//!
//! A count that is used wrongly leaks its object; it neither frees it early nor stops the program.
//! So that this is noticed, each case is counted here, and the first case of each kind
//! is an error event of `tracing`. There is not an event for each case: a peer that can cause a
//! fault must not be able to fill a log.
//!
//! A subscriber of `tracing` is code of the user, and may panic. Such a panic is caught here: a get
//! or a put continues, and a worker's thread does not end. The panic hook has reported it by then.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Contained faults since the process started, of all counts together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Faults {
    /// Counts that overflowed. Their objects are never freed.
    pub saturated: u64,
    /// Puts without a get, and gets of a count at zero that only a holder may get.
    pub imbalanced: u64,
    /// Objects that were not killed when their owner was dropped, because the kernel refused a
    /// barrier that it had promised. Each later kill for which it does not refuse tries again.
    /// Until then they are leaked.
    pub leaked: u64,
    /// Panics in user code that reached no caller: in the jobs of a worker, in releases after
    /// critical sections, and in a release during the panic of a `confirm`. Other panics reach the
    /// caller.
    pub panicked: u64,
}

/// Faults contained until now. Four relaxed loads, each right, but not all of one moment.
pub fn faults() -> Faults {
    counters::read()
}

#[cold]
pub(crate) fn saturated() {
    if counters::add(|f| &f.saturated) == 0 {
        report(|| netmem_percpu::trace::error!("a reference count overflowed and is saturated: its object is leaked"));
    }
}

#[cold]
pub(crate) fn imbalanced() {
    if counters::add(|f| &f.imbalanced) == 0 {
        report(|| netmem_percpu::trace::error!("a reference was put without a get, or taken from a count at zero"));
    }
}

#[cold]
pub(crate) fn leaked(why: &dyn std::fmt::Display) {
    if counters::add(|f| &f.leaked) == 0 {
        report(
            || netmem_percpu::trace::error!(%why, "an object that is counted per CPU could not be killed: it is leaked until a later kill succeeds"),
        );
    }
}

/// A reader stays in its section while retired objects wait. No fault, but reported in the same
/// way: once.
#[cfg_attr(loom, expect(dead_code, reason = "models leave out what calls it"))]
#[cold]
pub(crate) fn stalled(age: Duration) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if !REPORTED.swap(true, Ordering::Relaxed) {
        report(|| {
            netmem_percpu::trace::warn!(
                ?age,
                "a reader has been in a critical section for long: retired objects wait for it"
            )
        });
    }
}

/// Runs user code in a place where its panic has no caller to reach. The panic is counted.
pub(crate) fn contain(user: impl FnOnce()) {
    if let Err(what) = catch_unwind(AssertUnwindSafe(user)) {
        panicked(what);
    }
}

#[cold]
fn panicked(what: Box<dyn Any + Send>) {
    if counters::add(|f| &f.panicked) == 0 {
        let message = what.downcast_ref::<&str>().copied();
        let message = message.or_else(|| what.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        report(|| netmem_percpu::trace::error!(message, "a deferred cleanup panicked"));
    }
    drop_payload(what);
}

/// Sends an event to the user's subscriber, and catches its panic.
fn report(event: impl FnOnce()) {
    if let Err(what) = catch_unwind(AssertUnwindSafe(event)) {
        drop_payload(what);
    }
}

/// The payload of a panic is a value of the user, whose drop may panic again. Such a second payload
/// is leaked.
fn drop_payload(what: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(what))) {
        mem::forget(again);
    }
}

#[cfg(test)]
impl Faults {
    /// The faults since `before`: saturated, imbalanced.
    pub(crate) fn since(before: Self) -> (u64, u64) {
        let now = faults();
        (now.saturated - before.saturated, now.imbalanced - before.imbalanced)
    }
}

/// The process-wide counters, in builds that are not tests.
#[cfg(not(test))]
mod counters {
    use super::Faults;
    use super::Ordering;
    use std::sync::atomic::AtomicU64;

    pub(super) struct Counters {
        pub(super) saturated: AtomicU64,
        pub(super) imbalanced: AtomicU64,
        pub(super) leaked: AtomicU64,
        pub(super) panicked: AtomicU64,
    }

    static ALL: Counters = Counters {
        saturated: AtomicU64::new(0),
        imbalanced: AtomicU64::new(0),
        leaked: AtomicU64::new(0),
        panicked: AtomicU64::new(0),
    };

    pub(super) fn add(which: impl FnOnce(&Counters) -> &AtomicU64) -> u64 {
        which(&ALL).fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn read() -> Faults {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Faults {
            saturated: of(&ALL.saturated),
            imbalanced: of(&ALL.imbalanced),
            leaked: of(&ALL.leaked),
            panicked: of(&ALL.panicked),
        }
    }
}

/// Tests run side by side, so each thread has its own counters. All threads of a loom model are one
/// thread here.
#[cfg(test)]
mod counters {
    use super::Faults;
    use std::cell::Cell;

    pub(super) struct Counters {
        pub(super) saturated: Cell<u64>,
        pub(super) imbalanced: Cell<u64>,
        pub(super) leaked: Cell<u64>,
        pub(super) panicked: Cell<u64>,
    }

    thread_local! {
        static MINE: Counters =
            const { Counters { saturated: Cell::new(0), imbalanced: Cell::new(0), leaked: Cell::new(0), panicked: Cell::new(0) } };
    }

    pub(super) fn add(which: impl FnOnce(&Counters) -> &Cell<u64>) -> u64 {
        MINE.with(|mine| {
            let counter = which(mine);
            counter.replace(counter.get() + 1)
        })
    }

    pub(super) fn read() -> Faults {
        MINE.with(|mine| Faults {
            saturated: mine.saturated.get(),
            imbalanced: mine.imbalanced.get(),
            leaked: mine.leaked.get(),
            panicked: mine.panicked.get(),
        })
    }
}
