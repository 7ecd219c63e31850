//! Payload in host memory: the implementation of the connection's payload type.
//!
//! Why a ticket is a page: the driver reports no completions one by one. A transmission is complete
//! when its packet has been dropped, and then nothing else holds the page of its headers.

use crate::tcp::{Carrier, Chunk, Ticket};
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

/// A transmission. Its headers are in a separate page, which the packet and this value hold. When
/// only this value holds it, the device has completed the transmission. So the driver does not need
/// to report completions.
pub struct HeaderTicket<M: Memory>(Option<Frag<M>>);

impl<M: Memory> HeaderTicket<M> {
    /// A transmission whose headers are `head`. The page has no other values than `head`, its
    /// clones, and those that are dropped with the packet.
    pub(crate) fn new(head: Frag<M>) -> Self {
        Self(Some(head))
    }

    /// A transmission without payload, which need not be waited for.
    pub(crate) fn none() -> Self {
        Self(None)
    }
}

impl<M: Memory> Ticket for HeaderTicket<M> {
    #[inline]
    fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(Frag::is_writable)
    }
}

impl<M: Memory> fmt::Debug for HeaderTicket<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeaderTicket({})", if self.is_done() { "done" } else { "with the device" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_packet::Packet;
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
    }
}
