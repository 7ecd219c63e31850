//! UDP whose payload is in device memory: sockets that receive, and senders.
//!
//! ```text
//!   SplitFrame ──► FlowQueue ──► mailbox ──► Socket::recv ──► Fragment, Token
//!                  flow.rs       mailbox.rs  socket.rs
//!                   └─ bound.rs: which socket       └─ notifier.rs: a thread that waits
//!   Sender ──► SplitTxQueue                                      sender.rs
//! ```

#[cfg(not(loom))]
mod bound;
#[cfg(not(loom))]
mod flow;
#[cfg(not(loom))]
mod mailbox;
#[cfg(all(test, loom))]
mod model_notifier;
#[cfg(any(test, not(loom)))]
mod notifier;
#[cfg(not(loom))]
mod sender;
#[cfg(not(loom))]
mod socket;

#[cfg(not(loom))]
pub use flow::{FlowBindError, FlowQueue, FlowStats, FlowTable};
#[cfg(not(loom))]
pub use sender::{Endpoint, Message, SendError, Sender, SenderError};
#[cfg(not(loom))]
pub use socket::{Fragment, Received, RecvError, Socket, SocketOptions, SocketStats};
