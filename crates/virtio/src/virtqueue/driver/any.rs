//! A queue in the negotiated format. A caller chooses the format once a poll.

use super::super::{Armed, Negotiated, PackedRing, SplitRing};
use super::packed::Packed;
use super::queue::DriverQueue;
use super::shaped::ShapedQueue;
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

/// The operations of a queue that are the same for all kinds of buffers.
pub(crate) trait RingEnd {
    /// The words of the ring.
    type Words;

    /// Takes another ring, which is all zero: that of a new connection, or the old one after it was
    /// cleared. No buffer is posted there. Buffers stay in their slots.
    fn replace(&mut self, ring: Self::Words, tables: Option<Tables>);

    /// Buffers that the device has.
    fn posted(&self) -> usize;

    /// Whether the device wants a notification for what was published since the last call: the
    /// caller then signals the ring's kick. To be called once a poll, before a thread waits for
    /// what was published: it executes a full fence, see [`event`](crate::virtqueue::event).
    fn should_notify(&mut self) -> bool;

    /// Asks the device for an interrupt at the next used buffer and looks at the ring once more. If
    /// there is work, the queue is disarmed again.
    fn arm(&mut self) -> Armed;

    /// Asks the device for no interrupts: the driver polls.
    fn disarm(&mut self);
}

/// A queue in the negotiated format.
pub(crate) enum AnyQueue<S, P> {
    /// On a split ring.
    Split(S),
    /// On a packed ring.
    Packed(P),
}

/// A queue whose buffers each have their own segments.
pub(crate) type AnyDriverQueue<B> = AnyQueue<DriverQueue<Split, B>, DriverQueue<Packed, B>>;
/// A queue whose buffers all have the same segments.
pub(crate) type AnyShapedQueue<B> = AnyQueue<ShapedQueue<Split, B>, ShapedQueue<Packed, B>>;

/// Evaluates an expression on the queue of either format.
macro_rules! with_queue {
    ($any:expr, $queue:ident => $e:expr) => {
        match $any {
            $crate::virtqueue::driver::AnyQueue::Split($queue) => $e,
            $crate::virtqueue::driver::AnyQueue::Packed($queue) => $e,
        }
    };
}
pub(crate) use with_queue;

impl<B: Default> AnyShapedQueue<B> {
    /// See [`ShapedQueue::new`].
    pub(crate) fn new(ring: AnyRing, negotiated: Negotiated, lens: &[u32], tables: Option<Tables>) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(ShapedQueue::new(ring, negotiated, lens, tables)),
            AnyRing::Packed(ring) => Self::Packed(ShapedQueue::new(ring, negotiated, lens, tables)),
        }
    }
}

impl<B> AnyShapedQueue<B> {
    /// The most buffers that the device can have at a time.
    pub(crate) fn holds(&self) -> usize {
        with_queue!(self, queue => queue.holds())
    }

    /// See [`ShapedQueue::unread`].
    pub(crate) fn unread(&mut self) -> u16 {
        with_queue!(self, queue => queue.unread())
    }
}

impl<B: Default> AnyDriverQueue<B> {
    /// See [`DriverQueue::new`].
    pub(crate) fn new(ring: AnyRing, negotiated: Negotiated, tables: Option<Tables>) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DriverQueue::new(ring, negotiated, tables)),
            AnyRing::Packed(ring) => Self::Packed(DriverQueue::new(ring, negotiated, tables)),
        }
    }
}

impl<S: RingEnd<Words = SplitRing>, P: RingEnd<Words = PackedRing>> RingEnd for AnyQueue<S, P> {
    type Words = AnyRing;

    /// The ring is of the same format, because a device is connected anew with the same features.
    fn replace(&mut self, ring: AnyRing, tables: Option<Tables>) {
        match (self, ring) {
            (Self::Split(queue), AnyRing::Split(ring)) => queue.replace(ring, tables),
            (Self::Packed(queue), AnyRing::Packed(ring)) => queue.replace(ring, tables),
            _ => unreachable!("the format is one of the features, which stay"),
        }
    }

    #[inline]
    fn posted(&self) -> usize {
        with_queue!(self, queue => queue.posted())
    }

    #[inline]
    fn should_notify(&mut self) -> bool {
        with_queue!(self, queue => queue.should_notify())
    }

    fn arm(&mut self) -> Armed {
        with_queue!(self, queue => queue.arm())
    }

    fn disarm(&mut self) {
        with_queue!(self, queue => queue.disarm());
    }
}
