//! Reference counts that scale with cores, and smart pointers over them.
//!
//! [`PercpuRef`] counts on the CPU's own data until its owner ends it. [`RcuRef`] can be found by a
//! lookup and counted in one atomic operation. [`RefCount`] is one word. [`Owner`] and [`Ref`] are
//! pointers that use one of them; [`RcuCell`] is a place whose value readers find without a lock.
//!
//! The package is `netmem-refs`.

#[doc(inline)]
pub use netmem_refs::{
    Borrowed, Changed, Count, Dead, ExactCount, Faults, InfallibleCount, KillError, NoMemory, Owner, PercpuRef,
    RcuCell, RcuRef, Ref, RefCount, ResurrectError, Worker, faults, rcu,
};
