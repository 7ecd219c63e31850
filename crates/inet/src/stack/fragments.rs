//! Received fragments of datagrams: their pages are counted, and they are put together.
//!
//! Why a budget of their own: a peer can send fragments of many datagrams that are never complete,
//! and they must not occupy the pages of connections.

use crate::reassembly::Reassembly;
use crate::stack::payload::{Payload, ReceivedFrame};
use crate::stack::resources::Resources;
use crate::tcp::{Budget, Charges, Chunk, LocalBudget};
use crate::time::Time;
use crate::wire::Ip;
use netmem_packet::{Meta, Packet};
use netmem_pool::{Frag, Mapped};
use std::rc::Rc;

/// The incomplete datagrams of a stack. A quarter of its page budget is for them.
pub(crate) struct Fragments<M: Mapped> {
    reassembly: Reassembly<FragmentContent<M>>,
    budget: LocalBudget,
}

impl<M: Mapped> Fragments<M> {
    /// `budget` is the stack's, of `pages` pages.
    pub(crate) fn new(pages: u32, budget: &Budget) -> Self {
        Self { reassembly: Reassembly::new(), budget: LocalBudget::within(pages / 4, Some(budget)) }
    }

    /// When the first datagram has waited for too long.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.reassembly.poll_timeout()
    }

    /// Drops datagrams that have waited for too long.
    #[inline]
    pub(crate) fn handle_timeout(&mut self, now: Time) {
        self.reassembly.handle_timeout(now);
    }

    /// Processes a fragment: `packet` is its content. Returns the datagram if it is complete now.
    pub(crate) fn handle_fragment<P: Payload<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        ip: &Ip,
        packet: Packet<M>,
    ) -> Option<(Ip, Packet<M>)> {
        self.reassembly.handle_timeout(resources.now);
        let charges = loop {
            match self.budget.try_charge_many(packet.pages()) {
                Some(charges) => break charges,
                // The oldest datagram makes room.
                None if self.reassembly.give_up_oldest() => {}
                None => {
                    resources.egress.stats.over_budget += 1;
                    return None;
                }
            }
        };
        let content = FragmentContent { packet, charges: Rc::new(charges) };
        let datagram = self.reassembly.handle_fragment(ip, content, resources.now)?;
        let mut contents = datagram.contents.into_iter().map(|content| content.packet);
        let mut packet = contents.next()?;
        let mut rest: Vec<Packet<M>> = Vec::new();
        for content in contents {
            if rest.is_empty() {
                rest.extend(packet.append(content).err());
            } else {
                rest.push(content);
            }
        }
        if !rest.is_empty() {
            // There are more fragments than a packet can have, so they are copied.
            let packets = std::iter::once(&packet).chain(&rest);
            let frags: Vec<Frag<M>> = packets.flat_map(|packet| packet.fragments().cloned()).collect();
            packet = resources.egress.copied(&frags)?;
        }
        // No device has seen the complete datagram.
        packet.meta = Meta::default();
        Some((datagram.ip, packet))
    }
}

/// The content of a fragment that waits for reassembly. Its pages are counted.
struct FragmentContent<M: Mapped> {
    packet: Packet<M>,
    /// Count until the last clone is dropped.
    charges: Rc<Charges>,
}

impl<M: Mapped> Clone for FragmentContent<M> {
    fn clone(&self) -> Self {
        Self { packet: self.packet.clone(), charges: self.charges.clone() }
    }
}

impl<M: Mapped> Chunk for FragmentContent<M> {
    type Tail = ();

    fn len(&self) -> usize {
        self.packet.len()
    }

    fn advance(&mut self, n: usize) {
        let pulled = self.packet.pull(n);
        debug_assert!(pulled.is_ok(), "there are so many bytes");
    }

    fn truncate(&mut self, len: usize) {
        self.packet.truncate(len);
    }
}
