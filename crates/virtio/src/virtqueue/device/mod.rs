//! The device's end of a virtqueue: chains are lent in the order in which the driver made them available, and given back in
//! the same order.
//!
//! ```text
//!   refresh ──► cursor ──► pop_chain ──► Head + buffers ──► complete, or add_used_read ──► publish ──► should_notify
//!                 ▲          │                             │
//!                 └──────────┘                             └─ the queue's position moves here, and only here
//! ```
//!
//! * *A chain is given back once.* [`Head`] can neither be copied nor cloned, and both functions take it by value.
//! * *Bytes are written, then noted in the dirty log, then given back.* A front end that sees a page noted may copy it at once, and
//!   a driver that sees a chain may read it at once. Only [`complete`](DeviceQueue::complete) gives back a chain that was
//!   written, and it has the three steps in this order. A group of [`peek_group`](DeviceQueue::peek_group) is of a queue
//!   without a log.
//! * *A chain is not forgotten.* Lending does not move the queue: a caller walks ahead with a
//!   [cursor](DeviceQueue::cursor) of its own. If a head is dropped, its chain stays available, and the next pass finds
//!   it again.
//! * *No address outlives a pass.* A [`Buffer`] borrows the memory table ([`View`]).
//! * *Nothing that the driver wrote is trusted.* Every word is read once, into a private copy, and the functions of
//!   [`fault`](super::fault) check the copy. After a fault the caller does not touch the ring again.
//!
//! The format is the only generic: [`DeviceFormat`] has the differences between split and packed rings. Everything else is
//! written once.
//!
//! # In order
//!
//! The device completes every chain in order, so it can offer `VIRTIO_F_IN_ORDER`. With that feature one used entry may stand
//! for a batch, with the id of the batch's last chain. An entry has one length, so only chains into which nothing is written
//! are batched: [`add_used_read`](DeviceQueue::add_used_read), for transmit. Received frames get one entry each.

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
pub(crate) use self::group::{GROUP, Group, SingleBuffer};
#[cfg(test)]
pub(crate) use self::packed::PackedDevice;
pub(crate) use self::packed::{BASE, MappedRing, is_base};
pub(crate) use self::queue::DeviceQueue;
#[cfg(all(test, loom))]
pub(crate) use self::split::SplitDevice;
pub(crate) use super::fault::Direction;
