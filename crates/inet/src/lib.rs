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

mod address;
pub mod icmp;
mod interface;
pub mod neighbor;
mod ports;
pub mod reassembly;
mod route;
pub mod stack;
pub mod tcp;
mod time;
pub mod wire;

pub use address::BadAddress;
pub use interface::{Address, Cast, Interface};
pub use ports::Ports;
pub use route::RouteError;
pub use stack::{
    Departed, Fragment, HeaderTicket, Host, ListenOptions, ListenerStats, Packer, Packets, Payload, Received,
    ReceivedFrame, SavedStream, SocketError, Sockets, Source, Stack, StackOptions, StackStats, StackWaker, TcpListener,
    TcpStream, Transmit, UdpSocket, Unsent,
};
pub use time::Time;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
