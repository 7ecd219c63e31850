//! The driver's end of a virtqueue: buffers are posted to the device, and taken back from it, in
//! batches.
//!
//! A queue owns its buffers by *slot*. A buffer stays in its slot while the device has it, and may
//! stay there afterwards: if a buffer is posted again unchanged, the only store that the device
//! must see is the entry that makes it available.
//!
//! There are two kinds of queues:
//!
//! * A [*shaped*](ShapedQueue) one, for receiving: every buffer consists of the same writable
//!   segments (one page, a chain of pages, a host part and device pages). They are a chain of
//!   descriptors, or a table in [`Tables`] where the caller has one for each slot.
//!   [`refill`](ShapedQueue::refill) posts all free slots that the caller can fill, oldest first.
//! * A [free](DriverQueue) one, for sending and for commands: each buffer has its own segments.
//!   [`post`](DriverQueue::post) puts one into the slot that is [`vacant`](DriverQueue::vacant).
//!   Several segments become a chain of descriptors, or a table in [`Tables`] where that was
//!   negotiated. Buffers of one segment are posted and taken back in [runs](runs).
//!
//! Nothing that the driver wrote is read back from the ring: heads, addresses and positions have
//! private copies. The device's words are read once, for a group of buffers at a time, and checked
//! by [`fault`](super::fault). After a fault the caller stops the queue.
//!
//! User code runs between two operations, and may panic. A slot counts as posted only after it was
//! exposed, and an address is written to the ring after the last call of user code in a batch. So a
//! panic leaves no slot exposed twice, and no slot that is exposed with an address of a buffer that
//! it does not have any more.

mod any;
mod format;
mod found;
mod free;
mod packed;
mod queue;
mod runs;
mod shape;
mod shaped;
mod split;
mod tables;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use self::any::{AnyDriverQueue, AnyQueue, AnyRing, AnyShapedQueue, RingEnd, with_queue};
pub(crate) use self::format::DriverFormat;
pub(crate) use self::found::LOOK;
#[cfg(all(test, loom))]
pub(crate) use self::packed::Packed;
pub(crate) use self::queue::{DriverQueue, Vacant};
pub(crate) use self::runs::TakenRun;
pub(crate) use self::shaped::{BATCH, Fill, FillRun, LOOK as SHAPED_LOOK, Lent, Segments, ShapedQueue, Take, Taken};
#[cfg(all(test, loom))]
pub(crate) use self::split::Split;
pub(crate) use self::tables::{Segment, Tables};
