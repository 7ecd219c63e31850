//! Offloads in software: checksums, segmentation and the joining of segments.
//!
//! A device offers each of these or not, and a packet can travel from a device that has an offload
//! to one that has none. So each exists here as a function of bytes and offsets, without a device.
//! Two parties use it: handlers and queues of packets ([`Gro`], [`SoftwareTx`],
//! [`Packet::segment`]), and devices, whose frames are slices.
//!
//! ```text
//!   received segments ──► join ──► one frame with Gso ──► segment ──► segments that are sent
//!                          ▲                                ▲
//!                         Gro                      SoftwareTx, Packet::segment
//! ```
//!
//! [`Packet::segment`]: crate::Packet::segment
//!
//! | file | what |
//! | --- | --- |
//! | `headers.rs` | the parser of TCP and UDP headers, which the others use |
//! | `checksum.rs` | the Internet checksum, of bytes and of packets |
//! | `words.rs` | the sum of bytes, by vectors or by words |
//! | `segment.rs` | one frame is cut into its segments |
//! | `join.rs` | the rules by which a segment continues those before it |
//! | `predict.rs` | the prediction of the next segment, by one comparison |
//! | `gro.rs` | a handler that joins the segments of a poll |
//! | `software.rs` | a transmit queue that does in software what its device does not offload |

mod checksum;
mod gro;
mod headers;
mod join;
mod predict;
mod segment;
mod software;
mod words;

pub use checksum::{ChecksumError, Sum, complete_checksum};
pub use gro::{Gro, GroStats};
pub use headers::{Headers, Transport};
pub use join::{Join, Joinable};
pub use segment::{MAX_SEGMENTS, NotSegmented, SegmentError, SegmentPlan, Segments};
pub use software::{SoftwareStats, SoftwareTx};
