//! The error of the sockets' calls.

use crate::tcp;
use std::io;

/// Why a call of a socket did nothing, or did not finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// There is nothing to receive, no room to send, no connection to accept. The waker of a
    /// `poll_` call is called when that changes.
    #[error("not now")]
    WouldBlock,
    /// The connection has ended, for this reason.
    #[error("the connection has ended: {0}")]
    Closed(tcp::Error),
    /// This side of the connection was shut down by the user.
    #[error("this side was shut down")]
    ShutDown,
    /// The address and port are in use by another socket of the stack.
    #[error("the port is in use")]
    InUse,
    /// No port is left for a connection to that destination.
    #[error("all ports for that destination are in use")]
    NoPort,
    /// The host does not have this address.
    #[error("the address is none of this host's")]
    NotOurs,
    /// No route leads to the destination, or it cannot be a destination.
    #[error("no route to the destination")]
    NoRoute,
    /// The stack has as many connections as its options allow.
    #[error("the stack has as many connections as it may have")]
    TooMany,
    /// A datagram that is longer than the path admits. Datagrams are not fragmented.
    #[error("a datagram of {len} bytes: the path admits {most}")]
    TooLong {
        /// Bytes of payload.
        len: usize,
        /// The most that is possible.
        most: usize,
    },
    /// An ICMP message reported that the destination of an earlier datagram has no socket on the
    /// port.
    #[error("the destination has no socket on that port")]
    Refused,
    /// The socket is connected to no station.
    #[error("the socket is not connected; send to an address, or connect it")]
    NotConnected,
    /// The stack was dropped.
    #[error("the stack is gone")]
    StackGone,
}

impl SocketError {
    /// Whether the call can succeed later.
    #[must_use]
    pub fn would_block(&self) -> bool {
        *self == Self::WouldBlock
    }
}

impl From<tcp::Refused> for SocketError {
    fn from(why: tcp::Refused) -> Self {
        match why {
            tcp::Refused::Full => Self::WouldBlock,
            tcp::Refused::Shutdown => Self::ShutDown,
            tcp::Refused::Over(error) => Self::Closed(error),
        }
    }
}

impl From<SocketError> for io::Error {
    fn from(error: SocketError) -> Self {
        let kind = match error {
            SocketError::WouldBlock => io::ErrorKind::WouldBlock,
            SocketError::Closed(tcp::Error::Refused) | SocketError::Refused => io::ErrorKind::ConnectionRefused,
            SocketError::Closed(tcp::Error::Reset) => io::ErrorKind::ConnectionReset,
            SocketError::Closed(tcp::Error::TimedOut) => io::ErrorKind::TimedOut,
            SocketError::Closed(tcp::Error::Aborted) => io::ErrorKind::ConnectionAborted,
            SocketError::Closed(_) | SocketError::NoRoute => io::ErrorKind::HostUnreachable,
            SocketError::ShutDown | SocketError::StackGone => io::ErrorKind::BrokenPipe,
            SocketError::InUse | SocketError::NoPort => io::ErrorKind::AddrInUse,
            SocketError::NotOurs => io::ErrorKind::AddrNotAvailable,
            SocketError::TooMany => io::ErrorKind::QuotaExceeded,
            SocketError::NotConnected => io::ErrorKind::NotConnected,
            SocketError::TooLong { .. } => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}
