//! A network link with faults, as a value: see [`Link`].

mod link;

pub use link::{Delivery, Link, LinkCounts, LinkError, LinkOptions, MAX_BYTES, MAX_PACKETS, MAX_WAIT, flip};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
