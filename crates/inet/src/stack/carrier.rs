//! Payload in host memory, as the state machine sees it.

use crate::tcp::{Carrier, Chunk, Ticket};
use netmem_packet::Packet;
use netmem_pool::{Frag, Memory};
use std::fmt;
use std::marker::PhantomData;

/// Payload in pages of host memory: what is received and what is sent are fragments of the kind `M`.
pub struct HostCarrier<M: Memory>(PhantomData<M>);

impl<M: Memory> Chunk for Frag<M> {
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

/// What a fragment of IP carries, on its way to be put together with others.
impl<M: Memory> Chunk for Packet<M> {
    fn len(&self) -> usize {
        Packet::len(self)
    }

    fn advance(&mut self, n: usize) {
        let pulled = self.pull(n);
        debug_assert!(pulled.is_ok(), "there are so many bytes");
    }

    fn truncate(&mut self, len: usize) {
        Packet::truncate(self, len);
    }
}

impl<M: Memory> Carrier for HostCarrier<M> {
    type Received = Frag<M>;
    type Sent = Frag<M>;
    type Ticket = HeaderTicket<M>;
}

/// A transmission, by its headers: they are in a page of their own, and the packet and this value hold it. The device is done when only
/// this value does. So the driver needs to know nothing of tickets.
pub struct HeaderTicket<M: Memory>(Option<Frag<M>>);

impl<M: Memory> HeaderTicket<M> {
    /// A transmission whose headers are `head`. The page has no other values than `head`, its clones, and those that are dropped with the
    /// packet.
    pub(super) fn new(head: Frag<M>) -> Self {
        Self(Some(head))
    }

    /// A transmission without payload: there is nothing to wait for.
    pub(super) fn none() -> Self {
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
