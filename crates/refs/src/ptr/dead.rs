//! The error of a get that is refused.

/// The object has no references left, or has been killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the object is dead")]
pub struct Dead;
