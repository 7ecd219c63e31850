//! What the cache of neighbours answers, and what its owner carries out.

use crate::wire::Mac;
use std::collections::VecDeque;
use std::net::IpAddr;

/// The answer to a question for a neighbour's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// It is this.
    Known(Mac),
    /// It was asked for.
    Pending,
    /// No station answered. It will be asked for again, not before a second has passed. Or the
    /// cache has no room for it.
    Failed,
}

/// What happens to a packet for a neighbour.
#[derive(Debug, PartialEq, Eq)]
pub enum Sent<P> {
    /// It can be sent, to this address.
    Now(Mac, P),
    /// It waits for the neighbour's address. If too many packets wait for this neighbour, its
    /// oldest is returned here.
    Queued(Option<P>),
    /// The neighbour does not answer, or too many packets wait for others.
    Failed(P),
}

/// An action that the cache asks for, or a change that it reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<P> {
    /// Send what [`Interface::ask`](crate::Interface::ask) writes.
    Ask {
        /// The IP address that the question is for.
        target: IpAddr,
        /// The station to ask; `None` for all.
        at: Option<Mac>,
    },
    /// The address is known. The waiting packets must be sent to it.
    Resolved {
        /// The neighbour.
        addr: IpAddr,
        /// Its address.
        mac: Mac,
        /// Packets that waited for it, the oldest first.
        packets: VecDeque<P>,
    },
    /// The neighbour does not answer, or there were too many neighbours.
    Failed {
        /// The neighbour.
        addr: IpAddr,
        /// Packets that waited for it.
        packets: VecDeque<P>,
    },
}
