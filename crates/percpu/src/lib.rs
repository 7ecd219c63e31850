//! Per-CPU data for user space: plain adds and pushes on data that no other CPU touches, until a
//! thread closes the gate.
//!
//! ```text
//!   any thread, any CPU                              a thread that wants the sum
//!   counter.add(1)                                   counter.close()
//!     a restartable sequence (rseq):                   closes the gate
//!     gate open? this CPU's word += 1                  membarrier: no sequence is left inside
//!       done, or restarted if the CPU changed          sums up all CPUs' words
//!     gate closed? Err(GateClosed): the shared path        leaves it closed, or reopens it
//! ```
//!
//! * [`Counter`] is a number; [`Depot`] collects items in arrays, *magazines*, that are handed on
//!   whole. A [`CpuCache`] holds items that any thread puts in and takes out.
//! * Each is one word, the gate, and a word per CPU in an arena. In the arena, the words of one CPU
//!   lie side by side.
//! * [`mode`] returns whether the process has sequences. Without them (another architecture, an old
//!   C library, `GLIBC_TUNABLES=glibc.pthread.rseq=0`, valgrind), a portable version keeps the same
//!   contract with a lock per CPU.
//!
//! # What may happen to a thread
//!
//! | event | consequence |
//! | --- | --- |
//! | it is preempted, or moved to another CPU, in a sequence | the sequence starts again; [`aborts`] counts |
//! | a signal handler runs in a sequence, and uses the same counter | the sequence starts again after the handler |
//! | a CPU goes away, or comes | nothing: there is a word for each index that the kernel can assign, and a sum covers all of them |
//! | the process forks | the child has its own copy: see below |
//! | it ends, or there are thousands of it | nothing is kept per thread |
//! | it has no rseq area (by its own doing: the C library registers it, or ends the process) | with `cpu_id` its operations return [`GateClosed`]; with `mm_cid`, which reads 0 then, it must not use the library |
//! | a library that contains this crate, or code that was inlined from it, is unloaded | it stays loaded. Each such library pins itself when it is loaded, for the kernel reads the descriptor of a thread's last sequence later |
//!
//! # What a child of a fork may do
//!
//! The child has a copy of everything as it was when the process split, and one thread. Parent and
//! child do not see each other's changes. Items that other threads of the parent held at that
//! moment are lost to the child. The same holds for a child that is made by a plain system call, as
//! far as the C library's allocator works there.
//!
//! | type | the child may | if another thread of the parent was in the middle of |
//! | --- | --- | --- |
//! | [`Counter`] | use all methods, and make and drop counters | an add: it is in the child's words or not. A close: the gate stays closed in the child, where adds return [`GateClosed`] and [`close`](Counter::close) says `None` |
//! | [`Depot`] and [`Taker`] | use all methods. The child's taker has the same items as the parent's: what they stand for is in both processes | a give: its item is in the depot or not, or the giver's full magazine is missing with all its items. A reclaim or a close: the items that the taker had in hand are missing, and givers are refused |
//! | [`CpuCache`] | use all methods | a push or a pop: as for a depot. A reclaim or a close: the child must push and pop only, for it would wait for a lock of that thread |

#[cfg(not(target_pointer_width = "64"))]
compile_error!("a word holds an address and a count: it must have 64 bits");

mod arena;
mod barrier;
mod counter;
mod cpu_cache;
mod cpus;
mod decision;
mod depot;
mod error;
mod gate;
mod intake;
mod lane;
mod line;
mod machine;
mod magazine;
mod membarrier;
mod mode;
#[cfg(all(test, loom))]
mod model;
mod outcome;
#[cfg_attr(
    any(loom, not(all(target_arch = "x86_64", target_env = "gnu")), target_feature = "crt-static"),
    path = "no_pin.rs"
)]
mod pin;
mod portable;
pub mod prefetch;
#[cfg(not(loom))]
mod process;
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(loom)))]
mod rseq;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(loom))))]
#[path = "no_rseq.rs"]
mod rseq;
mod sequence;
mod sync;
mod tagged;
#[doc(hidden)]
pub mod trace;
mod word;

pub use counter::Counter;
pub use cpu_cache::CpuCache;
pub use cpus::cpus;
#[cfg(loom)]
pub use cpus::model::run_on;
pub use decision::{forced_mode, mode};
pub use depot::{Depot, Taker};
pub use error::{BarrierError, GateClosed, NewCacheError, NoMemory, NothingFound};
pub use intake::Intake;
pub use magazine::MAGAZINE;
pub use mode::{ForcedModeError, Index, Mode, Why};
#[cfg(loom)]
pub use portable::model::{both_ways, check};

/// Sequences that were restarted so far, in all threads of this process.
pub fn aborts() -> u64 {
    rseq::aborts()
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
