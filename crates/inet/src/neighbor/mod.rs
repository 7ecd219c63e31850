//! The cache of neighbours: the Ethernet addresses of the IP addresses on the link (RFC 826, RFC
//! 4861).
//!
//! ```text
//!                    resolve                answered                  30 s without a confirmation
//!   (not known) ──────────────► Incomplete ──────────► Reachable ◄───────────────────────┐
//!        ▲                        │ 3 solicitations        │  30 s                       │
//!        │ 1 s                    ▼                        ▼               answered, or  │
//!      Failed ◄────────────────── ┴ ◄── Probe ◄── Delay ◄── Stale          confirmed     │
//!                    3 solicitations      │   5 s    │ used  ▲                          │
//!                                         │          │       └── reported, not solicited │
//!                                         └──────────┴─────────────────────────────────┘
//! ```
//!
//! Users of a neighbour share a [`Hop`] with the cache. It has the Ethernet address, which a sender
//! reads for each frame without a lock, if the cache has marked it as usable. If not, the sender
//! calls the cache ([`Neighbors::resolve`]), under the lock that protects it.
//!
//! The cache returns [`Event`]s, which its owner carries out. All that a neighbour can make grow is
//! bounded: entries, packets that wait for an answer, and solicitations, of which there is one a
//! second for each entry.
//!
//! **A full cache** replaces entries that carry no traffic. Traffic is what a user marks as such
//! ([`Hop::touch`]) or has acknowledged ([`Hop::confirm`]); the answer to the first packet of a
//! station is none. If no entry near the hand of the clock is without traffic for [`IN_USE`], a new
//! neighbour is refused.

mod event;
mod hop;
mod neighbors;
#[cfg(test)]
mod tests;

pub use event::{Event, Resolution, Sent};
pub use hop::{Hop, IN_USE};
pub use neighbors::{MAX_NEIGHBORS, MAX_WAITING, MAX_WAITING_IN_ALL, Neighbors};
