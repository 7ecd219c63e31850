//! Events and errors of a connection, for its user.
//!
//! Why events are flags and not a queue: a peer decides how often something happens. So each kind
//! waits at most once, and nothing piles up.

use serde::{Deserialize, Serialize};

/// An event of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is complete.
    Connected,
    /// More payload can be read than before.
    Readable,
    /// Urgent data was announced ([`Connection::urgent`](super::Connection::urgent)).
    Urgent,
    /// The peer sent FIN: after the payload that can be read, the stream ends.
    End,
    /// There is room in the send buffer again.
    Writable,
    /// The connection is over. Without an error, both sides have closed it.
    Closed(Option<Error>),
}

/// The reason why a connection ended, or was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The peer answered SYN with a reset.
    #[error("connection refused")]
    Refused,
    /// The peer reset the connection.
    #[error("connection reset by the peer")]
    Reset,
    /// The peer did not answer in time.
    #[error("connection timed out")]
    TimedOut,
    /// A router or the peer's host reported that the peer cannot be reached.
    #[error("the peer cannot be reached: {0}")]
    Unreachable(Unreachable),
    /// The device is gone.
    #[error("the device is gone")]
    DeviceGone,
    /// This side reset the connection.
    #[error("connection aborted")]
    Aborted,
}

/// What is unreachable, according to ICMP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Unreachable {
    /// No route to the network.
    #[error("network unreachable")]
    Network,
    /// No route to the host, or no answer from it on its link.
    #[error("host unreachable")]
    Host,
    /// The host does not know the protocol.
    #[error("protocol unreachable")]
    Protocol,
    /// The port is closed.
    #[error("port unreachable")]
    Port,
    /// A firewall forbids the connection.
    #[error("administratively prohibited")]
    Prohibited,
    /// The hop limit was exceeded, or a header was not understood.
    #[error("not delivered")]
    NotDelivered,
}

impl Unreachable {
    /// Whether another attempt cannot help, because the peer's host itself refuses (RFC 9293,
    /// section 3.9.2.2).
    #[must_use]
    pub fn is_hard(self) -> bool {
        matches!(self, Self::Protocol | Self::Port | Self::Prohibited)
    }
}

/// An error in the delivery of a segment: ICMP, or this host's own resolution of the next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeliveryError {
    /// The segment did not arrive.
    Unreachable(Unreachable),
    /// The segment is larger than the path allows.
    TooBig {
        /// Bytes of payload of a segment that fit into the announced MTU, without options.
        max_payload: u32,
    },
}

/// The events that wait for the user. Each kind waits at most once, so that the peer cannot make
/// them pile up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Events(u8);

impl Events {
    pub(super) const CONNECTED: u8 = 1;
    pub(super) const READABLE: u8 = 1 << 1;
    pub(super) const URGENT: u8 = 1 << 2;
    pub(super) const END: u8 = 1 << 3;
    pub(super) const WRITABLE: u8 = 1 << 4;
    pub(super) const CLOSED: u8 = 1 << 5;

    pub(super) fn add(&mut self, event: u8) {
        self.0 |= event;
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Removes and returns the first waiting event, in the order above.
    pub(super) fn take(&mut self, error: Option<Error>) -> Option<Event> {
        let first = self.0 & self.0.wrapping_neg();
        self.0 &= !first;
        Some(match first {
            Self::CONNECTED => Event::Connected,
            Self::READABLE => Event::Readable,
            Self::URGENT => Event::Urgent,
            Self::END => Event::End,
            Self::WRITABLE => Event::Writable,
            Self::CLOSED => Event::Closed(error),
            _ => return None,
        })
    }
}
