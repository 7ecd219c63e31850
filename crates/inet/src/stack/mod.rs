//! A stack over one queue pair: connections, sockets, timers.
//!
//! ```text
//!   rx ──► Gro ──► input: headers, read once ──► connections ──► Connection::handle_segment ─┐
//!   mailbox ─────────────┘        │ of another   └ listeners, UDP sockets                    │
//!                                 ▼ stack                                                    ▼
//!                          its mailbox                   due ──► Connection::poll_transmit ──► tx
//!   TcpStream::send, recv ───────────────────────────────▲ ▲
//!   timer wheel ───────────────────────────────────────────┘
//! ```
//!
//! **One thread.** A [`Stack`] owns its queue pair, its connections and its timers. The sockets
//! ([`Sockets`], [`TcpListener`], [`TcpStream`], [`UdpSocket`]) stay on the same thread;
//! [`Fragment`]s go anywhere. [`remote`] has listeners and streams for other threads. Stacks of a [`Host`] share its routes, its neighbours, its ports, its
//! secrets and a directory of connections.
//!
//! **The user drives the stack** by a loop. [`Stack::poll`] does all work that is due, and never
//! blocks. Between two polls, the user calls sockets. When there is nothing to do, the loop sleeps
//! until the stack's descriptor is readable, at most until [`Stack::poll_timeout`]. A
//! [`PollThenSleep`](netmem_packet::PollThenSleep) does that; [`StackWaker`] ends the sleep from
//! another thread.
//!
//! **Memory.** Types of a stack have a parameter, the memory of its payload ([`Payload`]): a kind
//! of host memory, such as `PeerShared`, or memory of a device.
//!
//! **Time** is an argument of each poll.
//!
//! The example is a complete server, which `tests/all/example_server.rs` runs:
//!
//! ```no_run
#![doc = include_str!("example.rs")]
//! ```

// What a file may use stands below it in this list of rooms:
//
//   stack, finish, tokio   the stack as its user drives it
//   remote/                the calls of users on other threads
//   sockets/               the calls of users
//   core                   the groups together; input: the way of received frames to them
//   transport/             TCP and UDP: connections, listeners, schedule, datagrams
//   control, fragments     ARP and ICMP; reassembly
//   resources              what the groups use together: egress, path, pages
//   shared/                what the stacks of a host share
//   payload, carrier, ...  the memory of payload; types without a stack

mod address;
mod carrier;
mod connection_info;
mod control;
mod core;
mod egress;
mod error;
mod finish;
mod fragments;
mod input;
mod options;
mod page_counts;
mod pages;
mod path;
mod payload;
mod places;
pub mod remote;
mod resources;
mod segments;
mod shared;
mod shrink_map;
mod sockets;
mod source;
#[expect(clippy::module_inception, reason = "the file is named for its type")]
mod stack;
mod stats;
mod table;
#[cfg(feature = "tokio")]
pub mod tokio;
mod transport;

pub use carrier::HeaderTicket;
pub use connection_info::ConnectionInfo;
pub use error::SocketError;
pub use options::StackOptions;
pub use payload::{Payload, ReceivedFrame, Transmit, Unsent};
pub use shared::host::Host;
pub use shared::mailbox::StackWaker;
pub use shared::saved::SavedStream;
pub use sockets::fragment::{Fragment, Packer};
pub use sockets::listener::{ListenOptions, ListenerStats, TcpListener};
pub use sockets::moving::Departed;
pub use sockets::sockets::Sockets;
pub use sockets::stream::TcpStream;
pub use sockets::udp::{Received, UdpSocket};
pub use source::{Merged, Packets, Source};
pub use stack::Stack;
pub use stats::StackStats;
