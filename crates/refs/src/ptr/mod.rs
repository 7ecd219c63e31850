//! Smart pointers over any count.

mod cell;
mod count;
mod dead;
#[cfg(all(test, loom))]
mod model;
mod owner;
mod reference;
mod shared;

pub use cell::{Borrowed, Changed, RcuCell};
pub use count::{Count, ExactCount, InfallibleCount};
pub use dead::Dead;
pub use owner::Owner;
pub use reference::Ref;
#[doc(hidden)]
pub use shared::Unsize;
