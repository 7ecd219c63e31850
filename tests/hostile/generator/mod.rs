//! A peer made of raw frames, and the server that it talks to: `netmem serve` behind a tap, in a
//! network namespace of its own.
//!
//! ```text
//!   netmem serve ── tap ── kernel: the tap as an interface ── AF_PACKET socket ── Link ── Peer ── connections
//! ```
//!
//! The kernel has no address on the tap, so that nothing but this peer answers. The peer keeps a
//! few numbers for each connection. It repeats nothing by itself: a frame that the server drops is
//! missed by the test. It paces itself by the kernel's count of the frames that the server has
//! read, so that the tap drops none.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs)] // Each program uses a part.

pub mod connection;
pub mod frame;
pub mod link;
pub mod namespace;
pub mod peer;
pub mod server;
pub mod witness;
