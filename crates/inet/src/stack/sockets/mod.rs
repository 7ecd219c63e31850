//! What the user of a stack calls: sockets, and the payload that they receive.

pub(crate) mod fragment;
#[cfg(feature = "futures")]
mod futures;
pub(crate) mod moving;
pub(crate) mod stream;
