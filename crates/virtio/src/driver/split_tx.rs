//! Transmit from device memory: headers that this process has written, then payload that the device
//! reads and this process cannot.
//!
//! ```text
//!   segment      head ──► [head's fragments] ──► payload ──► payload
//!                header 12 B │ headers            dma, len    dma, len
//!   held by      Packet                           holder      holder       until it has completed
//! ```

use super::stats::TxStats;
use super::tx::VirtioTx;
use netmem_packet::{
    DeviceFrag, HeaderSlots, MAX_FRAGS, Meta, Packet, Reach, Sendable, SlotFrame, SplitTxQueue, TxQueue,
};
use netmem_pool::{Frag, PeerMemory, PeerShared};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// A transmit queue that also sends from device memory: a [`VirtioTx`] that
/// [holds](DeviceFrag::holder) something for every fragment that is not a page. See
/// [`SplitTxQueue`].
///
/// A holder is dropped when the device is done with the frame, by the call that
/// [completes](TxQueue::complete) it. The others are dropped when the queue is dropped, after its
/// ring was stopped.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioSplitTx<H, M: PeerMemory = PeerShared> {
    /// First, so that the ring has stopped when the holders are dropped.
    tx: VirtioTx<M>,
    /// By slot. A slot keeps its allocation.
    holders: Box<[Vec<H>]>,
    known: DeviceRanges,
}

/// The addresses of device memory as the queue has seen them last.
#[derive(Default)]
struct DeviceRanges {
    /// The number of their changes; `None` before the first read.
    version: Option<u32>,
    ranges: Vec<Range<u64>>,
}

impl DeviceRanges {
    /// Whether all of these bytes are in one region of device memory. The caller chooses the
    /// address, and the device would send any bytes at that address.
    fn has(&self, dma: u64, len: u32) -> bool {
        let within = |r: &Range<u64>| r.contains(&dma) && u64::from(len) <= r.end - dma;
        len > 0 && self.ranges.iter().any(within)
    }
}

impl<M: PeerMemory> VirtioTx<M> {
    /// The same queue, for frames from [device memory](super::NetOptions::device_memory) as well. A
    /// value of type `H` keeps a fragment's memory alive until the device has read it.
    pub fn into_split<H>(self) -> VirtioSplitTx<H, M> {
        let holders = (0..self.slots()).map(|_| Vec::new()).collect();
        VirtioSplitTx { tx: self, holders, known: DeviceRanges::default() }
    }
}

impl<H, M: PeerMemory> VirtioSplitTx<H, M> {
    pub(super) fn inner(&self) -> &VirtioTx<M> {
        &self.tx
    }

    pub(super) fn inner_mut(&mut self) -> &mut VirtioTx<M> {
        &mut self.tx
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> TxStats {
        self.tx.stats()
    }

    /// Packets that the device has.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.tx.posted()
    }

    /// As [`VirtioTx::is_connected`].
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.inner().is_connected()
    }

    /// Holders of fragments that the device has.
    #[must_use]
    pub fn held(&self) -> usize {
        self.holders.iter().map(Vec::len).sum()
    }
}

impl<H, M: PeerMemory> SplitTxQueue<H> for VirtioSplitTx<H, M> {
    fn send_split(&mut self, head: Packet<M>, payload: &mut Vec<DeviceFrag<H>>) -> Result<(), Packet<M>> {
        if self.known.version != Some(self.tx.state.memory.load(Ordering::Acquire)) {
            let (version, ranges) = self.tx.state.device_memory();
            self.known = DeviceRanges { version: Some(version), ranges };
        }
        if !payload.iter().all(|f| self.known.has(f.dma, f.len)) {
            self.tx.stats_mut().wrong_domain += 1;
            return Err(head);
        }
        if payload.len() > MAX_FRAGS {
            self.tx.stats_mut().full += 1;
            return Err(head);
        }
        let slot = self.tx.send_with(head, payload.iter().map(|f| (f.dma, f.len)))?;
        self.holders[usize::from(slot)].extend(payload.drain(..).map(|frag| frag.holder));
        Ok(())
    }

    fn sendable_split(&self, head: &Packet<M>, payload: &[DeviceFrag<H>]) -> Sendable {
        if payload.len() > MAX_FRAGS || !payload.iter().all(|f| self.known.has(f.dma, f.len)) {
            return Sendable::Never;
        }
        self.tx.sendable_with(head, payload.len())
    }
}

impl<H, M: PeerMemory> TxQueue for VirtioSplitTx<H, M> {
    type Mem = M;

    fn send(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        self.tx.send(packet)
    }

    fn send_group(&mut self, packets: &mut [Option<Packet<M>>]) -> usize {
        self.tx.send_group(packets)
    }

    fn send_held(&mut self, packet: Packet<M>) -> Result<Frag<M>, Packet<M>> {
        self.tx.send_held(packet)
    }

    fn header_slots(&self) -> Option<&HeaderSlots> {
        self.tx.header_slots()
    }

    fn send_behind(&mut self, headers: &[u8], payload: Packet<M>) -> Result<SlotFrame, Packet<M>> {
        self.tx.send_behind(headers, payload)
    }

    fn send_copied(&mut self, frame: &[u8], meta: Meta) -> Result<SlotFrame, Sendable> {
        self.tx.send_copied(frame, meta)
    }

    fn lend_list(&mut self, packet: &mut Packet<M>) {
        self.tx.lend_list(packet);
    }

    fn sendable(&self, packet: &Packet<M>) -> Sendable {
        self.tx.sendable(packet)
    }

    fn supports(&self, meta: Meta) -> bool {
        self.tx.supports(meta)
    }

    fn flush(&mut self) {
        self.tx.flush();
    }

    fn complete(&mut self) -> usize {
        let holders = &mut self.holders;
        if self.tx.is_replaced() {
            let done = self.tx.adopt(|slot| holders[usize::from(slot)].clear());
            holders.iter_mut().for_each(Vec::clear);
            return done;
        }
        if self.tx.stats().stopped.is_some() {
            return 0;
        }
        let done = self.tx.reap(|slot| holders[usize::from(slot)].clear());
        done.unwrap_or_else(|error| self.tx.stop(error))
    }

    fn reach(&self, frag: &Frag<M>) -> Reach {
        self.tx.reach(frag)
    }
}

impl<H, M: PeerMemory> fmt::Debug for VirtioSplitTx<H, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} for device memory", self.tx)
    }
}
