//! IP, UDP and TCP over the receive and transmit queues of `netmem-packet`. Payload stays in the
//! page into which it was received. A received segment is a fragment with an offset and a length. A
//! sent segment is a fragment that is held until it is acknowledged.
//!
//! ```text
//!   queue ──► Stack::poll(now) ──► wire: headers, validated once ──► tcp::Connection ──► recv
//!   queue ◄── Stack::poll(now) ◄── wire: headers are written ◄─────────────┘ ◄────────── send
//! ```
//!
//! No code in this crate reads a clock: [`Time`] is an argument. So a simulated link with a seed, a
//! replayed recording and a production program run the same code.

#[cfg(feature = "stack")]
mod address;
#[cfg(feature = "stack")]
pub mod icmp;
#[cfg(feature = "stack")]
mod interface;
#[cfg(feature = "stack")]
pub mod neighbor;
#[cfg(feature = "stack")]
mod ports;
#[cfg(feature = "stack")]
pub mod reassembly;
#[cfg(feature = "stack")]
mod route;
#[cfg(feature = "stack")]
pub mod stack;
#[cfg(feature = "tcp")]
pub mod tcp;
#[cfg(feature = "tcp")]
mod time;
#[cfg(feature = "stack")]
pub mod wire;

#[cfg(feature = "stack")]
pub use address::BadAddress;
#[cfg(feature = "stack")]
pub use interface::{Address, Cast, Interface};
#[cfg(feature = "stack")]
pub use ports::Ports;
#[cfg(feature = "stack")]
pub use route::RouteError;
#[cfg(feature = "stack")]
pub use stack::{
    ConnectionInfo, Departed, Fragment, HeaderTicket, Host, ListenOptions, ListenerStats, Packer, Packets, Payload,
    Received, ReceivedFrame, SavedStream, SocketError, Sockets, Source, Stack, StackOptions, StackStats, StackWaker,
    TcpListener, TcpStream, Transmit, UdpSocket, Unsent,
};
#[cfg(feature = "tcp")]
pub use time::Time;

#[cfg(all(doctest, feature = "stack"))]
#[doc = include_str!("../README.md")]
struct Readme;
