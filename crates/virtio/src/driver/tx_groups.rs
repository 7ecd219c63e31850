//! Sending and completing packets many at a time.
//!
//! What a packet of one fragment costs is paid once for a run of them: see `runs.rs` of
//! [`virtqueue::driver`](crate::virtqueue::driver). Any other packet, and any other order of
//! completions, is handled one by one.

use super::stats::DeviceFault;
use super::tx::{Queue, TxPath, filled, needs};
use super::tx_mappings::TxMappings;
use crate::net::VnetHdr;
use crate::virtqueue::driver::{DriverFormat, LOOK, TakenRun};
use netmem_packet::{FragLists, Packet};
use netmem_pool::PeerMemory;

impl<M: PeerMemory> TxPath<M> {
    /// See [`TxQueue::send_group`](netmem_packet::TxQueue::send_group).
    pub(super) fn send_group<F: DriverFormat>(
        &mut self,
        queue: &mut Queue<F, M>,
        packets: &mut [Option<Packet<M>>],
    ) -> usize {
        let mut sent = 0;
        while sent < packets.len() {
            let run = self.send_run(queue, &mut packets[sent..]);
            sent += run;
            if run == 0 {
                let place = &mut packets[sent];
                if let Some(packet) = place.take()
                    && let Err(packet) = self.send_one(queue, packet)
                {
                    *place = Some(packet);
                    break;
                }
                sent += 1;
            }
        }
        sent
    }

    /// Queues the first packets that are of one fragment, can carry the device's header, and need
    /// neither an offload nor a sync, as far as there are consecutive free slots. Returns how many.
    ///
    /// It is not inlined, so that its loop has all registers.
    #[inline(never)]
    fn send_run<F: DriverFormat>(&mut self, queue: &mut Queue<F, M>, packets: &mut [Option<Packet<M>>]) -> usize {
        let Self { mappings, stats, dirty, .. } = self;
        if stats.stopped.is_some() || mappings.needs_sync() {
            return 0;
        }
        let (most, mut places, mut bytes) = (packets.len(), packets.iter_mut(), 0);
        let fill = |slot: &mut Option<Packet<M>>| {
            let Some(place) = places.next() else { return false };
            if !place.as_ref().is_some_and(|packet| is_plain(packet, mappings)) {
                return false;
            }
            debug_assert!(slot.is_none());
            // The packet is moved before its header is written, as in `send`.
            std::mem::swap(place, slot);
            let Some(packet) = slot else { return false };
            let len = packet.len() as u64;
            if !packet.prepend(&[0; VnetHdr::LEN]) {
                std::mem::swap(place, slot);
                return false;
            }
            bytes += len;
            true
        };
        let segment = |packet: &Option<Packet<M>>| {
            let head = filled(packet).head();
            (mappings.known(head), head.len() as u32)
        };
        let sent = queue.post_run(most, fill, segment);
        stats.frames += sent as u64;
        stats.bytes += bytes;
        *dirty |= sent > 0;
        sent
    }

    /// Not inlined, so that the loop over a group is short.
    #[inline(never)]
    fn send_one<F: DriverFormat>(&mut self, queue: &mut Queue<F, M>, packet: Packet<M>) -> Result<(), Packet<M>> {
        self.send(queue, packet, |_| ())
    }

    /// Reaps completed packets. Calls `done` with each slot before its packet is dropped.
    #[inline(always)]
    pub(super) fn reap<F: DriverFormat>(
        &mut self,
        queue: &mut Queue<F, M>,
        mut done: impl FnMut(u16),
    ) -> Result<usize, DeviceFault> {
        let mut reaped = 0;
        loop {
            // Most polls find nothing, or one run with nothing behind it.
            if queue.is_read() {
                return Ok(reaped);
            }
            if !self.mappings.has_mapped() {
                let run = self.reap_run(queue, &mut done);
                reaped += run.buffers;
                if !run.more {
                    return Ok(reaped);
                }
                if run.buffers > 0 {
                    continue;
                }
            }
            let pending = queue.pending()?;
            for _ in 0..pending {
                let Some((slot, packet)) = queue.take() else { return queue.outcome().map(|()| reaped) };
                self.stats.completed += 1;
                self.slots.complete(slot);
                let _sent = Sent(packet, &mut self.lists);
                if self.mappings.has_mapped() {
                    self.mappings.release(slot);
                }
                done(slot);
            }
            reaped += usize::from(pending);
            if pending < LOOK {
                return queue.outcome().map(|()| reaped);
            }
        }
    }

    /// Reaps packets of one segment that the device has used in order. No packet is mapped.
    #[inline(always)]
    fn reap_run<F: DriverFormat>(&mut self, queue: &mut Queue<F, M>, done: &mut impl FnMut(u16)) -> TakenRun {
        let Self { stats, slots, lists, .. } = self;
        queue.take_run(|slot, packet| {
            stats.completed += 1;
            slots.complete(slot);
            let _sent = Sent(packet, lists);
            done(slot);
        })
    }
}

/// Whether a packet is one fragment that the device reaches, and needs no offload.
#[inline(always)]
fn is_plain<M: PeerMemory>(packet: &Packet<M>, mappings: &TxMappings<M>) -> bool {
    let head = packet.head();
    packet.frags().is_empty() && needs(packet.meta) == 0 && mappings.address(head).is_some()
}

/// A packet that the device has completed. It is dropped with this value, also by a panic of user
/// code (a domain, a holder's release).
struct Sent<'q, M: PeerMemory>(&'q mut Option<Packet<M>>, &'q mut FragLists<M>);

impl<M: PeerMemory> Drop for Sent<'_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        self.1.drop_packet(self.0);
    }
}
