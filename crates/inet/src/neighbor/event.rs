//! What the cache of neighbours answers, and what its owner carries out.

use crate::wire::Mac;
use std::collections::VecDeque;
use std::net::IpAddr;

/// The answer to a solicitation for a neighbour's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// It is this.
    Known(Mac),
    /// It was solicited.
    Pending,
    /// No station answered. It will be solicited again, not before a second has passed. Or the
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

/// An action that the cache requires, or a change that it reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<P> {
    /// Send what [`Interface::solicit`](crate::Interface::solicit) writes.
    Solicit {
        /// The IP address that the solicitation is for.
        target: IpAddr,
        /// The station to send it to; `None` for all.
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
