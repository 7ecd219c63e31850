//! Sockets for any thread. The stack stays on its thread, which drives it; these go to other
//! threads, and to the tasks of a runtime with several.
//!
//! ```text
//!   any thread                      the stack's thread
//!   TcpStream ── fragments ──► ring ──► Stack::poll ──► connection
//!             ◄── fragments ── ring ◄──
//! ```
//!
//! [`Stack::remote`](crate::Stack::remote) returns the [`Sockets`] that open them. They go to other
//! threads, too.
//!
//! **Payload is not copied between threads.** A ring of 16 places for each direction carries
//! fragments. Bytes that are written are copied into pages of the stack's pool by the thread that
//! writes them, and received bytes are copied out by the thread that reads.
//!
//! **Calls do not block**, and take effect when the stack is polled. The `poll_` calls register a
//! waker. A call wakes the stack's thread if it sleeps and a ring was empty, or was full. A program
//! without a runtime uses any `block_on`, such as that of `futures` or `pollster`.
//!
//! **Errors.** Each handle gets the error of its connection. If the stack is dropped, that is
//! [`SocketError::StackGone`](crate::SocketError::StackGone).
//!
//! **Memory.** An idle connection takes less than 2 KiB more than one of the stack's thread, and no
//! page.
//!
//! **Datagrams** have rings of 256 places: [`UdpSocket`]. They are copied by the thread that calls.
//!
//! Payload in memory of a device stays on the stack's thread.

mod datagrams;
mod ends;
#[cfg(feature = "futures")]
mod futures;
mod listener;
#[cfg(all(test, loom))]
mod model;
mod option;
mod parts;
mod port;
#[cfg(feature = "quinn")]
mod quinn;
mod read;
#[expect(clippy::module_inception, reason = "the file is named for its type")]
mod remote;
mod ring;
mod sockets;
mod stream;
mod sync;
#[cfg(feature = "tokio")]
mod tokio;
mod udp;
mod waiting;
mod write;

pub use listener::TcpListener;
pub use option::StreamOption;
pub use read::ReadHalf;
pub(crate) use remote::{Remote, Remotes};
pub use sockets::Sockets;
pub use stream::TcpStream;
pub use udp::{DatagramOptions, ReceivedGroup, UdpSocket};
pub use write::WriteHalf;
