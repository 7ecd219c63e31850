//! Routes, and the cache of destinations.
//!
//! ```text
//!   find(destination)
//!     bucket ──► Dst ──► Dst ──► Dst   in a critical section; 8 in a bucket, 16384 in all
//!       hit: a get of the count        no lock, and nothing shared is written but the count
//!       miss: longest prefix           under a lock; a new Dst is put at the end of the bucket
//! ```
//!
//! A [`Dst`] has what a sender needs for a destination: the source address, the neighbour, and the
//! longest packet. [`RcuRef`] counts its references, because it is found by lookup, has many users
//! (connections and replies), and is often made and dropped.
//!
//! **A socket caches its entry**, and asks for each use whether it is still current: one load of a
//! number that all entries share ([`Routes::is_current`]). That number, the *generation*, changes
//! when a route is added or removed. A neighbour's Ethernet address and the path MTU change more
//! often. They are in the entry, where all its users see them. So no packet of a peer changes the
//! generation.
//!
//! **Entries are replaced.** A full bucket drops the entry that was looked up the longest ago. Its
//! users keep using it, because it is right as long as the generation is. Users that look the
//! destination up later get a new entry, and do not share what was learned about the path MTU. The
//! release of an entry costs a barrier on all CPUs, some microseconds. If a peer forges more
//! senders than the buckets have room for, each of them costs such a release.
//!
//! **Cache lines.** The pointers' allocation keeps the count on a line of its own. A get or put by
//! another CPU invalidates only that line; the members that are read after a get are on other
//! lines.
//!
//! **Readers against writers.** An entry is removed from its bucket in two steps: its place is
//! emptied, then filled with the rest of the chain. A reader in between finds the chain cut,
//! misses, and repeats the lookup under the lock. A reader that has passed into an entry that is
//! being removed finds its `next` empty, and does the same. So a lookup never misses an entry that
//! is there, and each found entry was in the bucket at some moment of the lookup.

mod dst;
mod prefixes;
mod routes;
// The collector does not run in models.
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub(crate) use dst::{Dst, MIN_PATH_MTU_V4, MIN_PATH_MTU_V6};
pub use routes::RouteError;
pub(crate) use routes::Routes;
