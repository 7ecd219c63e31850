//! TCP and UDP over a queue pair, whose payload is fragments of pages: no copy, no byte ring.
//!
//! A [`Stack`] runs on one thread with a queue pair; a [`Host`] is what the stacks of several
//! queues share. [`host`](crate::host) opens both, on a tap or on an interface, in a few lines.
//!
//! The package is `netmem-inet`. Its modules `tcp` (a connection as a value) and `wire` (parsers
//! and emitters of headers) are for programs that have a stack of their own.

#[doc(inline)]
pub use netmem_inet::stack::remote;
#[cfg(feature = "tokio")]
#[doc(inline)]
pub use netmem_inet::stack::tokio;
#[doc(inline)]
pub use netmem_inet::tcp::sender::{RecoveryState, SendInfo, SendOptions};
#[doc(inline)]
pub use netmem_inet::tcp::{
    Budget, Charge, Config, Congestion, DeliveryError, Ecn, Error, Held, Info, IpFields, KeepAlive, Refused, State,
    Unreachable,
};
#[doc(inline)]
pub use netmem_inet::wire::Mac;
#[doc(inline)]
pub use netmem_inet::{
    Address, BadAddress, Cast, ConnectionInfo, Departed, Fragment, Host, Interface, ListenOptions, ListenerStats,
    Packer, Payload, Received, RouteError, SavedStream, SocketError, Sockets, Source, Stack, StackOptions, StackStats,
    StackWaker, TcpListener, TcpStream, Time, Transmit, UdpSocket, Unsent,
};
