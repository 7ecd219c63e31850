//! The numbers of CPUs, and this thread's.
//!
//! **Two numbers of CPUs.** [`areas`] bounds every index that a sequence can see; chunks, sums and
//! locks all use it. It comes from the kernel, for memory safety depends on it. [`cpus`] is how
//! many indices may come. Sizes use it; nothing else depends on it. Neither the affinity of today's
//! threads bounds them, for a thread may start later or be moved, nor the CPU time of a cgroup: any
//! number of threads may run at once until it is used up.

use crate::decision::{PRETENDED, decided};
use crate::machine::{MAX_CPUS, kernel_set, possible};
#[cfg(not(loom))]
use std::cell::Cell;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many indices this process's threads may have, at any time: the CPUs that the machine can
/// have, those included that are not online. At least 1.
///
/// For sizes. With [`Index::MmCid`](crate::Index::MmCid) a process with few threads uses few of
/// them, but more threads may start. With [`Index::CpuId`](crate::Index::CpuId) the index is the
/// CPU's number, and can be larger. Reads a file.
pub fn cpus() -> usize {
    if decided().pretends {
        return PRETENDED;
    }
    let listed = std::fs::read_to_string("/sys/devices/system/cpu/possible");
    listed.ok().and_then(|list| possible(&list)).unwrap_or_else(kernel_set).clamp(1, MAX_CPUS)
}

/// Areas in a chunk, words in a sum, locks: one for every index that there can be. An index is
/// below the number of bits in the kernel's own set of CPUs.
#[cfg(not(loom))]
pub(crate) fn areas() -> usize {
    decided().areas
}

/// The index of this thread in the portable version. It may be out of date at once.
#[cfg(not(loom))]
#[inline]
pub(crate) fn this_cpu() -> usize {
    let decided = decided();
    if decided.pretends {
        return pretended();
    }
    // SAFETY: no arguments; -1 where the kernel has no answer.
    let cpu = usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0);
    if cpu < decided.areas { cpu } else { 0 }
}

/// An index for each thread, far from that of the thread before.
#[cfg(not(loom))]
#[cold]
#[inline(never)]
fn pretended() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        /// Number of the thread and 1, or 0.
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(THREADS.fetch_add(1, Ordering::Relaxed) + 1);
        }
        number.get().wrapping_mul(37) % PRETENDED
    })
}

#[cfg(loom)]
pub(crate) use model::{areas, this_cpu};

/// What a model has instead of a machine: two CPUs, and a thread is on the one that it chose.
#[cfg(loom)]
pub(crate) mod model {
    use std::cell::Cell;

    pub(crate) fn areas() -> usize {
        2
    }

    loom::thread_local! {
        static CPU: Cell<usize> = Cell::new(0);
    }

    pub(crate) fn this_cpu() -> usize {
        CPU.with(Cell::get)
    }

    /// Moves this thread to `cpu`.
    pub fn run_on(cpu: usize) {
        CPU.with(|at| at.set(cpu % areas()));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::machine::{CpuSet, ask};

    /// Each CPU that this thread may use has an area.
    #[test]
    fn every_cpu_has_an_area() {
        let mut set: CpuSet = [0; _];
        ask(&mut set);
        let last = set.iter().rposition(|bits| *bits != 0);
        assert!(last.is_some_and(|at| (at + 1) * 64 <= areas()));
    }
}
