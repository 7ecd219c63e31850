//! Reference counts that scale, and smart pointers over them.
//!
//! Three counts, for three kinds of object. With each, exactly one put returns that it was the
//! last. A put too many is detected when there is no reference left that it could put, and then
//! contained: see [`faults`]. The pointers make no put too many.
//!
//! | the object | count | get + put | under contention |
//! | --- | --- | --- | --- |
//! | is used by few CPUs at once, or must be freed the moment its last user goes | [`RefCount`], 4 bytes | a compare-and-swap and an addition | the compare-and-swap repeats |
//! | is found by lookup, by many threads, and comes and goes: a route, a flow, a neighbour | [`RcuRef`], 4 bytes; its memory outlives a grace period | an addition each, in a critical section; share one among many | an addition each, which does not repeat |
//! | is set up once, used everywhere and torn down on purpose: a binding, a device, a configuration | [`PercpuRef`], 24 bytes and 8 per CPU | a plain addition each | the same: nothing is shared |
//!
//! `netmem-bench refs` measures them side by side.
//!
//! * [`Owner`] holds the initial reference of an object over any of them, and makes the count.
//!   [`Ref`] is one of the other references. A release that blocks is handed to a [`Worker`].
//! * Readers find an object in an [`RcuCell`], in a critical section: [`rcu::read`]. It holds an
//!   owner of any count, and a store replaces the object: a route, or the configuration of the
//!   whole process.
//! * [`OwnLine`] keeps a count away from what is read after a get. The pointers' allocation does so
//!   already.
//!
//! Names show whether a get can fail, for all counts and pointers alike: `get` is for the holder of
//! a reference and cannot fail; `try_get` may find the object dead; `try_get_live` also fails if
//! the object was killed. Of the pointers they are functions and not methods, as those of an `Arc`:
//! `Owner::get(&owner)`. So the pointers hide no method of the value.
//!
//! The theory of each count opens its file; `docs/design/refcount.md`, `docs/design/rcuref.md` and
//! `docs/design/percpuref.md` have the proofs.

mod faults;
mod own_line;
mod percpu_ref;
mod ptr;
#[cfg(not(loom))]
pub mod rcu;
#[cfg(loom)]
#[path = "rcu_model.rs"]
pub mod rcu;
mod rcuref;
mod refcount;
mod sync;
mod unkilled;
mod worker;

pub use faults::{Faults, faults};
pub use netmem_percpu::NoMemory;
pub use own_line::{CACHE_LINE, OwnLine};
pub use percpu_ref::{KillError, PercpuRef, ResurrectError};
#[doc(hidden)]
pub use ptr::Unsize;
pub use ptr::{Borrowed, Changed, Count, Dead, ExactCount, InfallibleCount, Owner, RcuCell, Ref};
pub use rcuref::RcuRef;
pub use refcount::RefCount;
pub use worker::Worker;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
