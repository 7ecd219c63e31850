//! IP, UDP and TCP over the receive and transmit queues of `netmem-packet`. Payload stays where it landed: a received segment is a
//! fragment with an offset and a length, and a sent one is a fragment that is held until it is acknowledged.
//!
//! ```text
//!   queue ──► Stack::poll(now) ──► wire: headers, checked once ──► flow ──► tcp::Connection ──► recv(&mut [Fragment])
//!                                                                                │
//!   queue ◄── Stack::poll(now) ◄── wire: headers are written  ◄──────────────────┘◄── send(fragments)
//! ```
//!
//! Nothing here reads a clock: [`Time`] is an argument. A simulated link with a seed, a replayed recording and production run the
//! same code.

pub mod icmp;
mod interface;
pub mod neighbor;
mod ports;
pub mod reassembly;
pub mod route;
pub mod stack;
pub mod tcp;
mod time;
pub mod wire;

pub use interface::{Address, Cast, Interface};
pub use ports::Ports;
pub use stack::{
    Departed, Fragment, Host, HostCarrier, ListenOptions, Packer, Received, SavedStream, SocketError, Sockets, Stack,
    StackOptions, StackStats, StackWaker, TcpListener, TcpStream, UdpSocket,
};
pub use time::Time;
