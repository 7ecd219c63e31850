//! What the user of a stack calls: sockets, and the payload that they receive.

pub(crate) mod fragment;
#[cfg(feature = "futures")]
mod futures;
pub(crate) mod listener;
pub(crate) mod moving;
mod receive;
mod send;
#[expect(clippy::module_inception, reason = "the file is named for its type")]
pub(crate) mod sockets;
pub(crate) mod stream;
pub(crate) mod udp;
