//! vhost-user: the protocol by which a virtio driver in one process (the front end) sets up a
//! device in another (the back end). The two share a Unix stream socket. The front end sends
//! [messages](message::Message) that carry file descriptors: its memory, and an event per ring in
//! each direction. The back end answers the messages that ask for something.
//!
//! * `message` has the messages of the specification, for both sides: one definition that encodes
//!   and decodes.
//! * `message_socket` is one connected socket: messages go out and come in, each within a time
//!   limit.
//! * `received` closes a peer's descriptors without a wait for the peer.
//! * [`socket`] makes a connection, in either role.
//! * `front` is the front end, by which the [driver](crate::driver) reaches its device. The back
//!   end is in [`device`](crate::device).

mod error;
mod front;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
pub(crate) mod message;
pub(crate) mod message_socket;
pub(crate) mod received;
pub mod socket;

pub use error::VhostUserError;
pub(crate) use front::RingAddresses;
pub use front::VhostUser;
pub use message::{Malformed, Request};
pub use message_socket::MessageError;
