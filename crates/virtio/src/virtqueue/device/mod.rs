//! The device's half of a virtqueue: chains are popped in the order in which the driver made them
//! available, and added to the used ring in the same order.
//!
//! Why one module: a chain that is completed twice, or read after it was completed, corrupts the
//! driver's memory. The types here exclude both, for every pass and both formats.
//!
//! ```text
//!   refresh ─► cursor ─► pop_chain ─► Head + buffers ─► complete, or add_used_read ─► publish
//!                 ▲          │                             │                        should_notify
//!                 └──────────┘                             └─ the queue's position moves here alone
//! ```
//!
//! * *A chain is completed once.* [`Head`] can neither be copied nor cloned, and both functions
//!   consume it.
//! * *Bytes are written, then marked in the dirty log, then completed.* A front end that sees a
//!   mark may copy the page at once, and a driver that sees a used chain may read it at once. Only
//!   [`complete`](DeviceQueue::complete) completes a chain that was written, and it has the three
//!   steps in this order. A group of [`peek_group`](DeviceQueue::peek_group) is of a queue without
//!   a log.
//! * *A chain is not forgotten.* A pop does not move the queue: a caller walks ahead with a
//!   [cursor](DeviceQueue::cursor) of its own. If a head is dropped, its chain stays available, and
//!   the next pass pops it again.
//! * *No address outlives a pass.* A [`Buffer`](crate::guest_memory::buffer::Buffer) borrows the
//!   memory table ([`View`](crate::guest_memory::view::View)).
//! * *Nothing that the driver wrote is trusted.* Every word is read once, into a private copy, and
//!   the functions of [`fault`](super::fault) check the copy. After a fault the caller does not
//!   touch the ring again.
//!
//! The format is the only generic: [`DeviceFormat`] has the differences between split and packed
//! rings. Everything else is written once.
//!
//! | file | what it has |
//! | --- | --- |
//! | `queue.rs` | a running queue of one format |
//! | `chain.rs`, `group.rs` | what a queue pops: a chain, or the next chains of one buffer each |
//! | `format.rs` | the operations that differ between the formats |
//! | `split.rs`, `packed.rs` | the two formats |
//! | `any.rs` | a queue of either format |
//! | `inflight/` | chains that a device which ended has left in flight |
//!
//! # In order
//!
//! The device completes every chain in order, so it can offer `VIRTIO_F_IN_ORDER` (virtio 1.3,
//! section 2.7.9). With that feature one used entry may stand for a batch, with the id of the
//! batch's last chain. An entry has one length, so only chains into which nothing is written are
//! batched: [`add_used_read`](DeviceQueue::add_used_read), for transmit. Received frames get one
//! entry each.

mod any;
mod chain;
mod format;
mod group;
pub(crate) mod inflight;
mod packed;
mod queue;
mod split;

pub(crate) use self::any::{AnyDeviceQueue, AnyRing, each};
pub(crate) use self::chain::{Head, Heads};
pub(crate) use self::format::{DeviceFormat, Logged, Start};
pub(crate) use self::group::{GROUP, Group, ShortChain, SingleBuffer};
#[cfg(test)]
pub(crate) use self::packed::PackedDevice;
pub(crate) use self::packed::{BASE, MappedRing, is_base};
pub(crate) use self::queue::DeviceQueue;
#[cfg(all(test, loom))]
pub(crate) use self::split::SplitDevice;
pub(crate) use super::fault::Direction;
