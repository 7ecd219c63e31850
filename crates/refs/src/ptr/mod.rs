//! Smart pointers over any count.

mod cell;
mod count;
#[cfg(all(test, loom))]
mod model;
mod owner;
mod reference;
mod shared;

pub use cell::{Borrowed, Changed, RcuCell};
pub use count::{Count, ExactCount, InfallibleCount};
pub use owner::Owner;
pub use reference::Ref;
#[doc(hidden)]
pub use shared::Unsize;

/// The object has no references left, or has been killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the object is dead")]
pub struct Dead;
