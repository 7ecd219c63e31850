//! Payload in host memory: the implementation of the connection's payload type.
//!
//! Headers are in the slots of the transmit queue's descriptors, which count their uses, or in
//! pages. Why a ticket is then a page: the queue reports no completions one by one. A transmission
//! is complete when its packet has been dropped, and then nothing else holds the page of its
//! headers.

use crate::tcp::{Carrier, Chunk, Ticket};
use netmem_packet::{SlotCompletions, SlotFrame};
use netmem_pool::{Frag, Mapped, Memory, Page};
use std::fmt;

impl<M: Mapped> Chunk for Frag<M> {
    type Tail = Page<M>;

    fn split_tail(&mut self) -> Option<Page<M>> {
        Frag::split_tail(self)
    }

    fn copy_to_tail(&self, tail: &mut Page<M>) -> Option<Self> {
        let len = Frag::len(self);
        if len > tail.len() {
            return None;
        }
        let mut bounce = [0; 512];
        let mut at = 0;
        while at < len {
            let part = &mut bounce[..(len - at).min(512)];
            self.copy_to(at, part).ok()?;
            tail.copy_from(at, part).ok()?;
            at += part.len();
        }
        Some(tail.split_to(len).freeze())
    }

    #[inline]
    fn continues(&self, next: &Self) -> bool {
        Frag::continues(self, next)
    }

    #[inline]
    fn join(&mut self, next: Self) {
        let joined = Frag::join(self, next);
        debug_assert!(joined.is_ok(), "it continues the fragment");
    }

    #[inline]
    fn len(&self) -> usize {
        Frag::len(self)
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        Frag::advance(self, n);
    }

    #[inline]
    fn truncate(&mut self, len: usize) {
        Frag::truncate(self, len);
    }
}

/// Payload in pages of host memory: received and sent payload consists of fragments.
impl<M: Mapped> Carrier for M {
    type Received = Frag<M>;
    type Sent = Frag<M>;
    type Ticket = HeaderTicket<M>;
}

/// A transmission of one frame, or of several that were cut here. The headers of each frame are in
/// a slot of the transmit queue, or in a page of their own, which the packet and this value hold.
/// When only this value holds the page, the device has completed the frame.
pub struct HeaderTicket<M: Memory>(Heads<M>);

/// The headers of the frames of a transmission.
enum Heads<M: Memory> {
    /// None need be waited for.
    None,
    One(Frag<M>),
    /// One of each segment. `None`: the queue would never have accepted it.
    Unit(Vec<Option<Frag<M>>>),
    /// In the slots of a queue.
    Slot(SlotCompletions, SlotFrame),
    /// The same, as of a unit.
    Slots(SlotCompletions, Vec<Option<SlotFrame>>),
}

impl<M: Memory> HeaderTicket<M> {
    /// A transmission whose headers are `head`. The page has no other values than `head`, its
    /// clones, and those that are dropped with the packet.
    pub(crate) fn new(head: Frag<M>) -> Self {
        Self(Heads::One(head))
    }

    /// A transmission without payload, which need not be waited for.
    pub(crate) fn none() -> Self {
        Self(Heads::None)
    }

    /// A transmission of several segments, whose headers are `heads`. See [`new`](Self::new).
    pub(crate) fn unit(heads: Vec<Option<Frag<M>>>) -> Self {
        Self(Heads::Unit(heads))
    }

    /// A transmission of segments whose headers are in slots of a queue. `None`: the queue would
    /// never have accepted it.
    pub(crate) fn slots(completions: SlotCompletions, frames: Vec<Option<SlotFrame>>) -> Self {
        Self(Heads::Slots(completions, frames))
    }

    /// A transmission whose headers are in a slot of a queue. See [`slots`](Self::slots).
    pub(crate) fn slot(completions: SlotCompletions, frame: Option<SlotFrame>) -> Self {
        Self(frame.map_or(Heads::None, |frame| Heads::Slot(completions, frame)))
    }
}

impl<M: Memory> Ticket for HeaderTicket<M> {
    #[inline]
    fn is_done(&self) -> bool {
        match &self.0 {
            Heads::None => true,
            Heads::One(head) => head.is_writable(),
            // Nearly all devices complete frames in order, so that the last one decides.
            Heads::Unit(heads) => heads.iter().rev().all(is_completed),
            Heads::Slot(completions, frame) => completions.is_completed(*frame),
            Heads::Slots(completions, frames) => {
                frames.iter().rev().flatten().all(|&frame| completions.is_completed(frame))
            }
        }
    }

    fn is_done_with(&self, n: u32) -> bool {
        match &self.0 {
            Heads::Unit(heads) => heads.get(n as usize).is_none_or(is_completed),
            Heads::Slots(completions, frames) => {
                frames.get(n as usize).copied().flatten().is_none_or(|frame| completions.is_completed(frame))
            }
            _ => self.is_done(),
        }
    }
}

/// Whether the device has completed the frame with these headers.
#[inline]
fn is_completed<M: Memory>(head: &Option<Frag<M>>) -> bool {
    head.as_ref().is_none_or(Frag::is_writable)
}

impl<M: Memory> fmt::Debug for HeaderTicket<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeaderTicket({})", if self.is_done() { "done" } else { "with the device" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_packet::{HeaderSlots, Packet};
    use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};

    #[test]
    fn a_transmission_is_done_when_its_packet_is_dropped() {
        let region = RegionOptions::new(8).huge_pages(false).build::<Private>().unwrap();
        let mut pool = PoolOptions::new("tx").build(RegionProvider::new(region), None).unwrap();
        let head = pool.alloc().unwrap().freeze_range(64..118);
        let (ticket, packet) = (HeaderTicket::new(head.clone()), Packet::new(head));
        assert!(!ticket.is_done());
        drop(packet);
        assert!(ticket.is_done());
        assert!(HeaderTicket::<Private>::none().is_done());
        // A unit whose frames are completed in another order.
        let heads: Vec<_> = (0..3).map(|_| pool.alloc().unwrap().freeze_range(64..118)).collect();
        let unit =
            HeaderTicket::unit(vec![Some(heads[0].clone()), None, Some(heads[1].clone()), Some(heads[2].clone())]);
        let mut packets = heads.into_iter().map(Packet::new);
        let (first, second) = (packets.next(), packets.next());
        drop(packets.next());
        assert_eq!([0, 1, 2, 3].map(|n| unit.is_done_with(n)), [false, true, false, true]);
        drop(first);
        assert!(unit.is_done_with(0) && !unit.is_done());
        drop(second);
        assert!(unit.is_done());
    }

    #[test]
    fn a_transmission_is_done_when_its_slot_is_completed() {
        let mut slots = HeaderSlots::new(4);
        let posted = [slots.post(2), slots.post(0), slots.post(1)];
        let one = HeaderTicket::<Private>::slot(slots.completions(), Some(posted[0]));
        let frames = vec![Some(posted[0]), None, Some(posted[1]), Some(posted[2])];
        let unit = HeaderTicket::<Private>::slots(slots.completions(), frames);
        assert!(HeaderTicket::<Private>::slot(slots.completions(), None).is_done());
        slots.complete(1);
        assert_eq!([0, 1, 2, 3, 4].map(|n| unit.is_done_with(n)), [false, true, false, true, true]);
        assert!(!one.is_done() && !one.is_done_with(0));
        slots.complete(2);
        assert!(one.is_done() && unit.is_done_with(0) && !unit.is_done());
        // Another frame in the slot of the first one.
        let next = slots.post(2);
        assert!(one.is_done() && !HeaderTicket::<Private>::slot(slots.completions(), Some(next)).is_done());
        drop(slots);
        assert!(unit.is_done());
    }
}
