//! Per-CPU data for user space: plain adds and pushes that no other CPU sees, until somebody closes the gate.
//!
//! ```text
//!   any thread, any CPU                              whoever wants the whole
//!   counter.add(1)                                   counter.close()
//!     a restartable sequence (rseq):                   closes the gate
//!     gate open? this CPU's word += 1                  membarrier: no sequence is left inside
//!       done, or restarted if the CPU changed          sums up all CPUs' words
//!     gate closed? Err(GateClosed): the shared path        leaves it closed, or reopens it
//! ```
//!
//! * [`Counter`] is a number; [`Depot`] collects items in arrays, *magazines*, that are handed on whole. A [`CpuCache`] holds items
//!   that any thread puts in and takes out.
//! * Each is one word, the gate, and a word per CPU in an arena where those of all lie side by side, CPU by CPU.
//! * [`mode`] says whether the process has sequences. Where it has none (another architecture, an old C library, one that was
//!   told `GLIBC_TUNABLES=glibc.pthread.rseq=0`, valgrind), a portable version keeps the same contract with a lock per
//!   CPU.
//!
//! # What may happen to a thread
//!
//! | event | consequence |
//! | --- | --- |
//! | it is preempted, or moved to another CPU, in a sequence | the sequence starts again; [`aborts`] counts |
//! | a signal handler runs in a sequence, and uses the same counter | so does it |
//! | a CPU goes away, or comes | its word is summed up with the others; there is one for each *possible* CPU |
//! | the process forks | the child has its own copy of all words, as they were: counts that other threads held stay held. As with any lock, no other thread may be in a call that makes, closes or collects meanwhile, nor, in portable mode, in one that adds or pushes |
//! | it ends, or there are thousands of it | nothing is kept per thread |
//! | it has no rseq area (by its own doing: the C library registers it, or ends the process) | with `cpu_id` its operations say [`GateClosed`]; with `mm_cid`, which reads 0 then, it must not use the library |
//! | the library is unloaded | it must not be: link with `-z nodelete`, and this crate into the final object |

#[cfg(not(target_pointer_width = "64"))]
compile_error!("a word holds an address and a count: it must have 64 bits");

mod arena;
mod barrier;
mod counter;
mod cpu_cache;
mod depot;
mod gate;
mod magazine;
mod mode;
#[cfg(all(test, loom))]
mod model;
mod portable;
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(loom)))]
mod rseq;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(loom))))]
#[path = "no_rseq.rs"]
mod rseq;
mod sequence;
mod sync;
mod tagged;

pub use barrier::BarrierError;
pub use counter::Counter;
pub use cpu_cache::{CpuCache, NothingFound};
pub use depot::{Depot, Taker};
pub use gate::NoMemory;
pub use magazine::MAGAZINE;
pub use mode::{Index, Mode, Why, cpus, mode};
#[cfg(loom)]
pub use portable::model::run_on;
pub use sequence::GateClosed;

/// Sequences that were restarted so far, in all threads of this process.
pub fn aborts() -> u64 {
    rseq::aborts()
}
