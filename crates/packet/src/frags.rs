//! The fragments behind a frame's head.
//!
//! Most frames have none, and pay for none: the list is one pointer, which is null.

use crate::packet::Packet;
use netmem_pool::{Frag, Memory};
use std::fmt;

/// Fragments behind the head: as many pages of 4 KiB as 64 KiB can touch.
pub const MAX_FRAGS: usize = 17;

/// No fragments, or up to 17 on the heap. One pointer: a frame without any stays in registers, and
/// its drop is a test.
#[derive(Debug)]
#[allow(clippy::box_collection, reason = "a vector in place is three words and a call to drop")]
pub(crate) struct Frags<M: Memory>(Option<Box<Vec<Frag<M>>>>);

impl<M: Memory> Drop for Frags<M> {
    #[inline]
    fn drop(&mut self) {
        /// Out of line, so that the drop of a packet saves no registers for a list that it lacks.
        #[inline(never)]
        #[allow(clippy::box_collection, reason = "see above")]
        fn free<M: Memory>(frags: Box<Vec<Frag<M>>>) {
            drop(frags);
        }
        if let Some(frags) = self.0.take() {
            free(frags);
        }
    }
}

impl<M: Memory> Frags<M> {
    pub(crate) const NONE: Self = Self(None);

    /// Adds a fragment, or returns it if there are 17 already.
    pub(crate) fn push(&mut self, frag: Frag<M>) -> Result<(), Frag<M>> {
        let frags = self.0.get_or_insert_with(|| Box::new(Vec::with_capacity(MAX_FRAGS)));
        if frags.len() == MAX_FRAGS {
            return Err(frag);
        }
        frags.push(frag);
        Ok(())
    }

    /// Whether no list was allocated. An allocated list can be empty, too.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[Frag<M>] {
        self.0.as_ref().map_or(&[], |frags| frags.as_slice())
    }

    #[inline]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [Frag<M>] {
        self.0.as_mut().map_or(&mut [], |frags| frags.as_mut_slice())
    }

    /// Removes the first fragment, if there is one.
    pub(crate) fn pop_front(&mut self) -> Option<Frag<M>> {
        self.0.as_mut().filter(|frags| !frags.is_empty()).map(|frags| frags.remove(0))
    }

    /// Puts a fragment in front, or returns it if there are 17 already.
    pub(crate) fn push_front(&mut self, frag: Frag<M>) -> Result<(), Frag<M>> {
        self.push(frag)?;
        self.as_mut_slice().rotate_right(1);
        Ok(())
    }

    /// Removes `n` bytes from the front; there are at least `n`. Fragments that are used up are
    /// dropped after all bytes were removed, so that a panic in a drop leaves the rest in the
    /// right state.
    pub(crate) fn advance(&mut self, mut n: usize) {
        let Some(frags) = &mut self.0 else { return };
        let mut used_up = 0;
        for frag in frags.iter_mut() {
            if frag.len() > n {
                frag.advance(n);
                break;
            }
            n -= frag.len();
            used_up += 1;
        }
        frags.drain(..used_up);
    }

    /// Keeps the first `len` bytes. Fragments behind them are dropped, after all bytes were cut
    /// off.
    pub(crate) fn truncate(&mut self, mut len: usize) {
        let Some(frags) = &mut self.0 else { return };
        let mut kept = 0;
        for frag in frags.iter_mut() {
            if len == 0 {
                break;
            }
            frag.truncate(len);
            len -= frag.len();
            kept += 1;
        }
        frags.truncate(kept);
    }

    pub(crate) fn into_vec(mut self) -> Vec<Frag<M>> {
        self.0.take().map_or_else(Vec::new, |frags| *frags)
    }
}

impl<M: Memory> Clone for Frags<M> {
    fn clone(&self) -> Self {
        Self(self.0.as_ref().filter(|frags| !frags.is_empty()).map(|frags| {
            let mut all = Vec::with_capacity(MAX_FRAGS);
            all.extend(frags.iter().cloned());
            Box::new(all)
        }))
    }
}

/// The memory of lists of fragments, which a transmit queue uses again: see
/// [`TxQueue::lend_list`](crate::TxQueue::lend_list).
///
/// Why: the list of a packet is two allocations. A packet of a few fragments is made, sent and
/// completed by one thread, so that the next one can have its list. At most 64 lists are kept, of
/// 432 bytes each.
#[allow(clippy::vec_box, clippy::box_collection, reason = "the packet's own form of a list")]
pub struct FragLists<M: Memory>(Vec<Box<Vec<Frag<M>>>>);

impl<M: Memory> FragLists<M> {
    /// No lists.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The packet gets an empty list, if it has none and there is one here.
    #[inline]
    pub fn lend(&mut self, packet: &mut Packet<M>) {
        let frags = packet.list();
        if frags.0.is_none() {
            frags.0 = self.0.pop();
        }
    }

    /// Drops a packet, and keeps its list. Costs a comparison if it has none. If the drop of a
    /// fragment panics, all of the packet is dropped nevertheless, and so is the list.
    #[inline(always)]
    pub fn drop_packet(&mut self, packet: &mut Option<Packet<M>>) {
        if packet.as_ref().is_some_and(Packet::has_list) {
            self.drop_with_list(packet);
        } else if let Some(packet) = packet.take() {
            packet.release_head();
        }
    }

    /// Not in line, so that the drop of a packet without a list stays as short as it is.
    #[inline(never)]
    fn drop_with_list(&mut self, packet: &mut Option<Packet<M>>) {
        let list = packet.as_mut().and_then(|packet| packet.list().0.take());
        *packet = None;
        if let Some(mut list) = list {
            list.clear();
            if self.0.len() < 64 {
                self.0.push(list);
            }
        }
    }
}

impl<M: Memory> Default for FragLists<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Memory> fmt::Debug for FragLists<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FragLists({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};

    #[test]
    fn a_list_is_used_again_and_its_fragments_are_dropped() {
        let region = RegionOptions::new(8).huge_pages(false).build::<Private>().unwrap();
        let mut pool = PoolOptions::new("tx").build(RegionProvider::new(region), None).unwrap();
        let mut frag = |n: usize| pool.alloc().unwrap().freeze_range(0..n);
        let (head, second, third) = (frag(10), frag(20), frag(30));
        let mut lists = FragLists::new();
        let mut packet = Packet::new(head.clone());
        lists.lend(&mut packet);
        assert!(packet.list().is_none(), "there is none to lend");
        packet.push(second.clone()).unwrap();
        let place = packet.frags().as_ptr();
        let mut packet = Some(packet);
        lists.drop_packet(&mut packet);
        assert!(packet.is_none() && head.is_writable() && second.is_writable());
        // Packets without a list, and no packet.
        lists.drop_packet(&mut packet);
        lists.drop_packet(&mut Some(Packet::new(head.clone())));
        assert!(head.is_writable() && lists.0.len() == 1);
        let mut packet = Packet::new(head);
        lists.lend(&mut packet);
        assert!(lists.0.is_empty() && packet.frags().is_empty() && packet.len() == 10);
        packet.push(third.clone()).unwrap();
        assert_eq!((packet.frags().as_ptr(), packet.len()), (place, 40));
        // A packet that has a list keeps it.
        lists.lend(&mut packet);
        assert_eq!(packet.frags().len(), 1);
        drop(packet);
        assert!(third.is_writable());
        for _ in 0..2 {
            let packets: Vec<_> = (0..100)
                .map(|_| {
                    let mut packet = Packet::new(second.clone());
                    packet.push(third.clone()).unwrap();
                    packet
                })
                .collect();
            packets.into_iter().for_each(|packet| lists.drop_packet(&mut Some(packet)));
            assert_eq!(lists.0.len(), 64);
        }
    }
}
