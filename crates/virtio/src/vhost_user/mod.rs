//! vhost-user: the protocol by which a virtio driver in one process (the front end) sets up a device in another (the back
//! end). The two share a Unix stream socket. The front end sends [messages](message::Message) that carry file descriptors:
//! its memory, and an event per ring in each direction. The back end answers the messages that ask for something.
//!
//! * `message` has the messages of the specification, for both sides: one definition that encodes and decodes.
//! * `line` is one connected socket: messages go out and come in, each within a time limit.
//! * `front` is the front end, by which the [driver](crate::driver) reaches its device. The back end is in
//!   [`device`](crate::device).

mod front;
#[allow(dead_code, reason = "both sides move to it in the next commits")]
pub(crate) mod line;
#[allow(dead_code, reason = "both sides move to it in the next commits")]
pub(crate) mod message;

pub(crate) use front::RingAddresses;
pub use front::{VhostUser, VhostUserError};
pub use line::LineError;
pub use message::{Malformed, Request};
