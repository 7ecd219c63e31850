//! In-flight state: memory that outlives the device, and that records which chains the device has
//! popped and not completed.
//!
//! Why: when a back end ends, the chains that it has popped are lost to the driver, unless the next
//! back end learns which they are. The front end asks for the region (`GET_INFLIGHT_FD`), keeps it,
//! and passes it to the back end that follows (`SET_INFLIGHT_FD`).
//!
//! | file | what it has |
//! | --- | --- |
//! | `layout.rs` | the words of the region, as the vhost-user specification names them |
//! | `region.rs` | the region of a front end, with a part for each queue |
//! | `split.rs`, `packed.rs` | the state of a running queue of each format |
//!
//! Netmem's device completes chains in the order in which it pops them. The chains that it has
//! popped and not completed therefore follow the used index in the available ring. The next back
//! end begins at the used index, and so pops each of these chains exactly once. Therefore a running
//! queue writes no entry, and only keeps the used index right: one store for each publication.
//!
//! Entries matter when the device follows another back end, which may have completed chains out of
//! order. The chains that are marked in flight are then *resubmitted*: popped first, in the order
//! of their counters. Their marks are cleared as the specification has it, so that the device may
//! itself be killed meanwhile.
//!
//! The front end can write the region at any time. Every word is read once and checked. A head that
//! is out of range ends a list. A false mark makes the device complete a chain that the driver did
//! not post: the driver's own front end has then harmed the driver.

mod layout;
mod packed;
mod region;
mod split;
#[cfg(test)]
mod tests;

pub(crate) use self::packed::PackedInflight;
pub use self::region::InflightError;
pub(crate) use self::region::{InflightQueue, InflightRegion};
pub(crate) use self::split::SplitInflight;
