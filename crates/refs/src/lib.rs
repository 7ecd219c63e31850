//! Reference counts that scale.
mod faults;
mod percpu_ref;
mod sync;
pub use percpu_ref::*;
