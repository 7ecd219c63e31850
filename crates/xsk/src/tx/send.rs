//! From a packet to descriptors in the TX ring.
//!
//! # Descriptors of a frame
//!
//! A frame has at most 18 descriptors in copy mode, and in zero-copy mode as many as the driver
//! reports (`xdp-zc-max-segs`). The kernel does not check this in zero-copy mode: it would drop the
//! first descriptors, never complete them, and send the rest as a frame. A packet that needs more
//! is copied into pages of its own, if its bytes fit.

use super::XskTx;
use crate::fault::Fault;
use crate::if_xdp::{Desc, PKT_CONTD, TX_METADATA, TX_METADATA_LEN};
use crate::layout::Layout;
use crate::metadata::TxRequest;
use crate::options::Mode;
use crate::umem_memory::UmemMemory;
use netmem_packet::{Checksum, MAX_FRAGS, Packet, TxQueue};
use netmem_pool::{Frag, Region};

/// The reason why a packet is not sent as it is.
pub(super) enum Unsendable {
    Unreachable,
    Shape,
    /// It has more descriptors than a frame may have. As a copy it has this number.
    Copy(u32),
}

impl Unsendable {
    /// The number of descriptors, if the packet is sent as a copy.
    pub(super) fn copied(self) -> Result<u32, Self> {
        if let Self::Copy(descriptors) = self { Ok(descriptors) } else { Err(self) }
    }
}

/// The largest number of descriptors of a sent frame. `zero_copy` is that of the driver in
/// zero-copy mode, or `None` if it is unknown.
pub(super) fn most_descriptors(mode: Mode, multi_buffer: bool, zero_copy: Option<u32>) -> u32 {
    const KERNEL: u32 = MAX_FRAGS as u32 + 1;
    match mode {
        _ if !multi_buffer => 1,
        Mode::Copy => KERNEL,
        Mode::ZeroCopy => zero_copy.unwrap_or(1).clamp(1, KERNEL),
    }
}

/// The descriptor of a plain packet: of one fragment in one chunk, without offloads or requests, as
/// most packets are. `None` for any other packet.
#[inline(always)]
fn plain<M: UmemMemory>(region: &Region<M>, layout: &Layout, packet: &Packet<M>) -> Option<Desc> {
    let (head, meta) = (packet.head(), packet.meta);
    let (index, len) = (region.index_of(head)?, head.len());
    let addr = layout.addr(index, head.offset());
    let in_chunk = len > 0 && (addr as usize & (layout.chunk - 1)) + len <= layout.chunk;
    let no_requests = meta.gso.is_none() && !matches!(meta.checksum, Checksum::Partial { .. });
    let plain = no_requests && in_chunk && packet.frags().is_empty();
    plain.then_some(Desc { addr, len: len as u32, options: 0 })
}

impl<M: UmemMemory> XskTx<M> {
    /// The address of a fragment in the UMEM. It is computed, and touches no memory of the page.
    #[inline(always)]
    pub(super) fn addr(&self, frag: &Frag<M>) -> Option<u64> {
        self.region.index_of(frag).map(|index| self.layout.addr(index, frag.offset()))
    }

    /// The number of descriptors that a packet needs.
    #[inline(always)]
    pub(super) fn descriptors(&self, packet: &Packet<M>) -> Result<u32, Unsendable> {
        let descriptors = |frag: &Frag<M>| {
            let addr = self.addr(frag).ok_or(Unsendable::Unreachable)?;
            Ok(self.layout.chunks_of(addr, frag.len()))
        };
        let mut n = descriptors(packet.head())?;
        for frag in packet.frags() {
            n += descriptors(frag)?;
        }
        if n.wrapping_sub(1) >= self.max_descriptors { Err(self.too_many(packet)) } else { Ok(n) }
    }

    /// The reason why a packet without descriptors, or with more than a frame may have, is not sent
    /// as it is.
    #[cold]
    #[inline(never)]
    fn too_many(&self, packet: &Packet<M>) -> Unsendable {
        match self.layout.chunks_of(self.copy_start() as u64, packet.len()) {
            n if n == 0 || n > self.max_descriptors => Unsendable::Shape,
            n => Unsendable::Copy(n),
        }
    }

    /// Where the bytes of a copied packet begin in its first page.
    fn copy_start(&self) -> usize {
        if self.layout.tx_metadata { TX_METADATA_LEN.next_multiple_of(64) } else { 0 }
    }

    /// Copies a packet that has more descriptors than a frame may have.
    #[cold]
    #[inline(never)]
    fn linearise(&mut self, packet: Packet<M>, descriptors: u32) -> Result<Packet<M>, Packet<M>> {
        match self.has_room(descriptors) {
            Ok(true) => {
                if let Some(copy) = self.copies.copy(&packet, self.copy_start(), &self.umem) {
                    self.stats.linearised += 1;
                    return Ok(copy);
                }
            }
            // It would be copied in vain.
            Ok(false) => {}
            Err(fault) => self.stop(fault),
        }
        self.stats.full += 1;
        Err(packet)
    }

    /// Whether this number of descriptors can be queued.
    #[inline(always)]
    pub(super) fn has_room(&mut self, descriptors: u32) -> Result<bool, Fault> {
        Ok(self.limit - self.out.total() >= descriptors && self.tx.free(descriptors)? >= descriptors)
    }

    /// Queues a plain packet. Returns any other packet. Also returns the packet if there is no
    /// room.
    #[inline(always)]
    pub(super) fn queue_plain(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        let Some(desc) = plain(&self.region, &self.layout, &packet) else { return Err(packet) };
        let room = self.out.total() < self.limit && self.tx.known_free() > 0 && self.stats.stopped.is_none();
        if !room {
            return Err(packet);
        }
        let head = packet.into_head()?;
        self.stats.frames += 1;
        self.stats.bytes += u64::from(desc.len);
        self.stats.descriptors += 1;
        let _ = head.into_count();
        self.out.insert((desc.addr >> self.layout.shift) as u32);
        self.tx.push(desc);
        Ok(())
    }

    /// Queues plain packets from the front of `packets`, as long as there is room. Returns how many
    /// places are empty now. No user code runs, so that all of them are counted at the end.
    #[inline(always)]
    pub(super) fn queue_plain_group(&mut self, packets: &mut [Option<Packet<M>>]) -> usize {
        let stopped = self.stats.stopped.is_some();
        let room = if stopped { 0 } else { self.tx.known_free().min(self.limit - self.out.total()) };
        let (layout, mut queued, mut bytes, mut done) = (self.layout, 0, 0, 0);
        let mut ring = self.tx.writer();
        for place in packets {
            if let Some(packet) = place {
                let Some(desc) = plain(&self.region, &layout, packet).filter(|_| queued < room) else { break };
                match place.take().map(Packet::into_head) {
                    Some(Ok(head)) => _ = head.into_count(),
                    // Not plain.
                    Some(Err(packet)) => {
                        *place = Some(packet);
                        break;
                    }
                    None => {}
                }
                queued += 1;
                bytes += u64::from(desc.len);
                self.out.insert((desc.addr >> layout.shift) as u32);
                ring.push(desc);
            }
            done += 1;
        }
        drop(ring);
        self.stats.frames += u64::from(queued);
        self.stats.bytes += bytes;
        self.stats.descriptors += u64::from(queued);
        done
    }

    /// The part of [`send`](TxQueue::send) for a packet that is not [plain](Self::queue_plain), or
    /// for which there may be no room.
    #[inline(never)]
    pub(super) fn send_slowly(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        if self.stats.stopped.is_some() {
            return Err(packet);
        }
        if packet.meta.gso.is_some() || matches!(packet.meta.checksum, Checksum::Partial { .. }) {
            return self.send_metadata(packet, TxRequest::default());
        }
        let (packet, descriptors) = match self.descriptors(&packet) {
            Ok(descriptors) => (packet, descriptors),
            Err(refusal) => self.copy_or_refuse(packet, &refusal)?,
        };
        self.queue(packet, descriptors, 0)
    }

    /// Queues a packet that has no request, or that has its metadata in front of it.
    fn queue(&mut self, packet: Packet<M>, descriptors: u32, options: u32) -> Result<(), Packet<M>> {
        match self.has_room(descriptors) {
            Ok(true) => {}
            Ok(false) => {
                self.stats.full += 1;
                return Err(packet);
            }
            Err(fault) => {
                self.stop(fault);
                return Err(packet);
            }
        }
        self.stats.frames += 1;
        self.stats.bytes += packet.len() as u64;
        self.stats.descriptors += u64::from(descriptors);
        let (head, frags) = packet.into_fragments();
        let (mut left, mut options) = (descriptors, options);
        self.push(head, &mut left, &mut options);
        for frag in frags {
            self.push(frag, &mut left, &mut options);
        }
        Ok(())
    }

    /// Writes a fragment's descriptors. `left` is the number of descriptors of the packet from here
    /// on. `options` are the flags of the first one.
    #[inline(always)]
    fn push(&mut self, frag: Frag<M>, left: &mut u32, options: &mut u32) {
        // The address exists: it was found when the descriptors were counted.
        let Some(mut addr) = self.addr(&frag) else { return };
        let mut len = frag.len();
        let mut frag = Some(frag);
        while len > 0 {
            let here = len.min(self.layout.chunk - (addr as usize & (self.layout.chunk - 1)));
            // The queue owns one count of the page for each descriptor.
            let count = if here == len { frag.take() } else { frag.clone() };
            let _ = count.map(Frag::into_count);
            *left -= 1;
            let goes_on = if *left > 0 { PKT_CONTD } else { 0 };
            self.out.insert((addr >> self.layout.shift) as u32);
            self.tx.push(Desc { addr, len: here as u32, options: std::mem::take(options) | goes_on });
            addr += here as u64;
            len -= here;
        }
    }

    #[cold]
    #[inline(never)]
    fn copy_or_refuse(&mut self, packet: Packet<M>, refusal: &Unsendable) -> Result<(Packet<M>, u32), Packet<M>> {
        match *refusal {
            Unsendable::Unreachable => self.stats.unreachable += 1,
            Unsendable::Shape => self.stats.bad_shape += 1,
            Unsendable::Copy(descriptors) => {
                return self.linearise(packet, descriptors).map(|copy| (copy, descriptors));
            }
        }
        Err(packet)
    }

    /// Whether the checksum that the packet's `meta` requests is stored in the first descriptor.
    /// The kernel neither sends nor completes another one, and sends no frame behind it.
    fn has_checksum(&self, packet: &Packet<M>) -> bool {
        let Checksum::Partial { start, offset } = packet.meta.checksum else { return true };
        let in_chunk = packet.head().offset() & (self.layout.chunk - 1);
        let first = packet.head().len().min(self.layout.chunk - in_chunk);
        usize::from(start) + usize::from(offset) + size_of::<u16>() <= first
    }

    /// Queues a packet whose checksum the device computes, or with another request.
    #[cold]
    #[inline(never)]
    pub(super) fn send_metadata(&mut self, packet: Packet<M>, request: TxRequest) -> Result<(), Packet<M>> {
        let possible = self.supports(packet.meta)
            && self.has_checksum(&packet)
            && (request.launch_time.is_none() || self.launch_times.is_ok());
        let metadata = if possible { request.encode(packet.meta) } else { None };
        let Some(metadata) = metadata else {
            self.stats.no_offload += 1;
            return Err(packet);
        };
        let (mut packet, descriptors) = match self.descriptors(&packet) {
            Ok(descriptors) => (packet, descriptors),
            Err(refusal) => self.copy_or_refuse(packet, &refusal)?,
        };
        let room = self.addr(packet.head()).map(|addr| addr as usize & (self.layout.chunk - 1));
        if !self.layout.tx_metadata || room.is_none_or(|room| room < TX_METADATA_LEN) {
            self.stats.no_offload += 1;
            return Err(packet);
        }
        let meta = packet.meta;
        if !packet.prepend(&metadata) {
            self.stats.no_offload += 1;
            return Err(packet);
        }
        let undone = packet.pull(TX_METADATA_LEN);
        debug_assert!(undone.is_ok());
        packet.meta = meta;
        let addr = self.addr(packet.head());
        self.queue(packet, descriptors, TX_METADATA)?;
        if let (Some(addr), Some(id)) = (addr, request.timestamp) {
            self.timestamps.expect(addr, id, &metadata);
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_driver_limits_the_descriptors_of_a_frame() {
        use Mode::{Copy, ZeroCopy};
        for (mode, multi_buffer, zero_copy, most) in [
            (Copy, false, Some(8), 1),
            (Copy, true, Some(1), 18),
            (Copy, true, None, 18),
            (ZeroCopy, false, Some(8), 1),
            (ZeroCopy, true, Some(8), 8),
            (ZeroCopy, true, Some(64), 18),
            (ZeroCopy, true, Some(0), 1),
            (ZeroCopy, true, None, 1),
        ] {
            assert_eq!(most_descriptors(mode, multi_buffer, zero_copy), most, "{mode} {multi_buffer} {zero_copy:?}");
        }
    }
}
