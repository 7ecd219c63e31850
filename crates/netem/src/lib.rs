//! A network link with faults, as a value: which packets are lost, duplicated or damaged, and when
//! the others arrive.
//!
//! Connections must be tested on bad links, and a failure must be reproducible. Linux's netem needs
//! a network namespace, privileges and real time. A [`Link`] has no clock and does no I/O: the
//! caller passes the time and the length of each packet, and receives the packets that have
//! arrived. So a simulation and a device's port have the same faults.
//!
//! ```text
//!   send ──► queue of the rate ──► lost? ──► delayed, in order ──┬──► receive
//!            100 ms, else dropped     └────► ahead: no delay ────┘
//! ```
//!
//! | file | what |
//! | --- | --- |
//! | `options.rs` | [`LinkOptions`]: what a link does to packets, and its text form |
//! | `link.rs` | [`Link`]: one direction of a link, and the packets on it |

mod link;
mod options;

pub use link::{Delivery, Link, LinkCounts, MAX_BYTES, MAX_PACKETS, MAX_WAIT, flip};
pub use options::{LinkError, LinkOptions};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
