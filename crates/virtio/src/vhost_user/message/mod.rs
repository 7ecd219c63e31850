//! The messages of vhost-user, as the specification numbers them and lays them out.
//!
//! A message is a header, a payload and file descriptors (`SCM_RIGHTS`):
//!
//! ```text
//!  0 request  u32   what is asked for: a [`Request`]
//!  4 flags    u32   bits 0-1: version, 1; bit 2: this is an answer; bit 3: an answer is wanted
//!  8 size     u32   bytes of payload
//! 12 payload        integers in the byte order of the host
//! ```
//!
//! [`Message`] and [`Reply`] are generic over the descriptors: a message to send borrows them
//! (`BorrowedFd`), a received one owns them ([`Received`](super::received::Received)). `decode`
//! checks every length and the number of descriptors. A message that is refused closes its
//! descriptors, because it is dropped.

mod decode;
mod encode;
mod front_end;
mod header;
mod malformed;
mod payload;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub(crate) use encode::EncodedMessage;
pub(crate) use front_end::Message;
#[cfg(fuzzing)]
pub(crate) use header::MAX_PAYLOAD;
pub(crate) use header::{HEADER, MAX_FDS, RawMessage};
pub use malformed::Malformed;
#[cfg(feature = "device")]
pub(crate) use payload::Inflight;
pub(crate) use payload::{MemoryRegion, VringAddresses};
pub(crate) use reply::Reply;
pub use request::Request;
pub(crate) use request::protocol;
