//! A queue in the negotiated format. A caller chooses the format once a poll.

use super::super::{Armed, Negotiated, PackedRing, SplitRing};
use super::packed::Packed;
use super::queue::DriverQueue;
use super::split::Split;
use super::tables::Tables;

/// The words of a ring in either format.
#[derive(Debug)]
pub(crate) enum AnyRing {
    /// A split ring.
    Split(SplitRing),
    /// A packed ring.
    Packed(PackedRing),
}

/// A queue in the negotiated format. A caller checks the format once a poll.
pub(crate) enum AnyDriverQueue<B> {
    /// On a split ring.
    Split(DriverQueue<Split, B>),
    /// On a packed ring.
    Packed(DriverQueue<Packed, B>),
}

/// Evaluates an expression on the queue of either format.
macro_rules! with_queue {
    ($any:expr, $queue:ident => $e:expr) => {
        match $any {
            $crate::virtqueue::driver::AnyDriverQueue::Split($queue) => $e,
            $crate::virtqueue::driver::AnyDriverQueue::Packed($queue) => $e,
        }
    };
}
pub(crate) use with_queue;

impl<B: Default> AnyDriverQueue<B> {
    /// See [`DriverQueue::shaped`].
    pub(crate) fn shaped(ring: AnyRing, negotiated: Negotiated, lens: &[u32], tables: Option<Tables>) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DriverQueue::shaped(ring, negotiated, lens, tables)),
            AnyRing::Packed(ring) => Self::Packed(DriverQueue::shaped(ring, negotiated, lens, tables)),
        }
    }

    /// See [`DriverQueue::new`].
    pub(crate) fn new(ring: AnyRing, negotiated: Negotiated, tables: Option<Tables>) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DriverQueue::new(ring, negotiated, tables)),
            AnyRing::Packed(ring) => Self::Packed(DriverQueue::new(ring, negotiated, tables)),
        }
    }
}

impl<B> AnyDriverQueue<B> {
    /// See [`DriverQueue::replace`]. The ring is of the same format, because a device is connected anew with the same features.
    pub(crate) fn replace(&mut self, ring: AnyRing, tables: Option<Tables>) {
        match (self, ring) {
            (Self::Split(queue), AnyRing::Split(ring)) => queue.replace(ring, tables),
            (Self::Packed(queue), AnyRing::Packed(ring)) => queue.replace(ring, tables),
            _ => unreachable!("the format is one of the features, which stay"),
        }
    }

    /// See [`DriverQueue::posted`].
    pub(crate) fn posted(&self) -> usize {
        with_queue!(self, queue => queue.posted())
    }

    /// The most buffers that the device can have at a time.
    pub(crate) fn holds(&self) -> usize {
        with_queue!(self, queue => queue.slots.len())
    }

    /// See [`DriverQueue::unread`].
    pub(crate) fn unread(&mut self) -> u16 {
        with_queue!(self, queue => queue.unread())
    }

    /// See [`DriverQueue::arm`].
    pub(crate) fn arm(&mut self) -> Armed {
        with_queue!(self, queue => queue.arm())
    }

    /// See [`DriverQueue::disarm`].
    pub(crate) fn disarm(&mut self) {
        with_queue!(self, queue => queue.disarm());
    }
}
