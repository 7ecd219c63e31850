//! A transmit queue that accepts every packet: offloads that its device lacks are done in software.
//!
//! A program forwards packets between devices whose offloads differ. It should send each packet in
//! one way, and not know which device computes which checksum. [`SoftwareTx`] is this one way.

use crate::device::{Reach, Sendable, TxQueue};
use crate::meta::Meta;
use crate::packet::Packet;
use netmem_pool::{Frag, Mapped, Page};
use std::collections::VecDeque;
use std::fmt;

/// The counters of a [`SoftwareTx`]. A packet is counted each time that it is sent or refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SoftwareStats {
    /// Packets whose checksum was computed.
    pub checksummed: u64,
    /// Packets that were cut into segments.
    pub segmented: u64,
    /// Segments into which they were cut.
    pub segments: u64,
    /// Packets refused because there was no page for headers.
    pub no_page: u64,
    /// Packets refused because their offload information cannot be true, or is of a kind that is
    /// not cut in software.
    pub refused: u64,
    /// Segments dropped because the queue would never accept them: it has stopped, for instance.
    pub dropped: u64,
}

/// A transmit queue in front of another one. If the other queue's device lacks an offload that a
/// packet needs, the checksum is computed, or the packet is cut into segments, in software.
///
/// If the queue [supports](TxQueue::supports) the offloads of a packet, the packet passes through,
/// for one comparison. Otherwise pages are allocated by `pages`: one for the headers of each
/// segment, and one for a checksum in a page with another holder. Payload is not copied. It is read
/// if checksums are computed.
///
/// Segments of a packet for which the queue has no room wait here, and no other packet is accepted
/// meanwhile. They are sent when the queue has room: [`complete`](TxQueue::complete) and
/// [`flush`](TxQueue::flush) try it. So a packet that was accepted is sent whole, unless the queue
/// stops; then what is left of it is dropped and counted.
///
/// If a packet cannot be sent, it is returned. It is unchanged, except that its checksum may have
/// been computed.
///
/// ```
/// use netmem_packet::{Packet, SoftwareTx, TxBulk, TxQueue};
/// use netmem_pool::{Mapped, Page};
///
/// /// Packets from other devices, with any offload, to a device that may have none.
/// fn target<T: TxQueue<Mem: Mapped>>(
///     queue: T,
///     pages: impl FnMut() -> Option<Page<T::Mem>>,
/// ) -> TxBulk<impl TxQueue<Mem = T::Mem>> {
///     TxBulk::holding(SoftwareTx::new(queue, pages), 256)
/// }
/// ```
#[must_use = "segments that wait are dropped with it"]
pub struct SoftwareTx<T: TxQueue, P> {
    queue: T,
    pages: P,
    /// Segments of the last packet that was cut, for which the queue had no room.
    waiting: VecDeque<Packet<T::Mem>>,
    /// Why the last packet that needed software was refused.
    sendable: Sendable,
    stats: SoftwareStats,
}

impl<T: TxQueue, P: FnMut() -> Option<Page<T::Mem>>> SoftwareTx<T, P>
where
    T::Mem: Mapped,
{
    /// A queue in front of `queue`. `pages` must be in memory that the queue's device reaches, such
    /// as pages of one of the device's pools.
    pub fn new(queue: T, pages: P) -> Self {
        Self { queue, pages, waiting: VecDeque::new(), sendable: Sendable::Now, stats: SoftwareStats::default() }
    }

    /// The counters so far.
    #[must_use]
    pub fn stats(&self) -> SoftwareStats {
        self.stats
    }

    /// Segments that wait for room in the queue.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The queue. Packets that are sent here overtake segments that wait.
    pub fn queue(&mut self) -> &mut T {
        &mut self.queue
    }

    /// Sends segments that wait, as far as there is room.
    fn drain(&mut self) {
        while let Some(segment) = self.waiting.pop_front() {
            match self.queue.send(segment) {
                Ok(()) => {}
                Err(segment) if self.queue.sendable(&segment) == Sendable::Later => {
                    self.waiting.push_front(segment);
                    break;
                }
                Err(segment) => {
                    self.stats.dropped += 1;
                    drop(segment);
                }
            }
        }
    }

    /// Does in software what the queue cannot offload.
    #[cold]
    fn soften(&mut self, mut packet: Packet<T::Mem>) -> Result<(), Packet<T::Mem>> {
        self.drain();
        let meta = std::mem::take(&mut packet.meta);
        self.sendable = if self.waiting.is_empty() { self.queue.sendable(&packet) } else { Sendable::Later };
        packet.meta = meta;
        if self.sendable == Sendable::Now && self.queue.supports(meta) {
            return self.queue.send(packet);
        }
        // At least a part of the segments can be sent.
        if self.sendable != Sendable::Now {
            return Err(packet);
        }
        let mut had_page = true;
        let pages = &mut self.pages;
        let mut page = || {
            pages().or_else(|| {
                had_page = false;
                None
            })
        };
        if meta.gso.is_none() {
            if packet.complete_checksum(&mut page).is_err() {
                return Err(self.refuse(packet, had_page));
            }
            self.stats.checksummed += 1;
            return self.queue.send(packet);
        }
        let complete = !self.queue.supports(Meta { gso: None, ..meta });
        match packet.segment(complete, &mut page) {
            Ok(segments) => {
                self.stats.segmented += 1;
                self.stats.segments += segments.len() as u64;
                self.waiting.extend(segments);
                self.drain();
                Ok(())
            }
            Err(refused) => Err(self.refuse(refused.packet, had_page)),
        }
    }

    fn refuse(&mut self, packet: Packet<T::Mem>, had_page: bool) -> Packet<T::Mem> {
        if had_page {
            self.stats.refused += 1;
            self.sendable = Sendable::Never;
        } else {
            self.stats.no_page += 1;
            self.sendable = Sendable::Later;
        }
        packet
    }
}

impl<T: TxQueue, P: FnMut() -> Option<Page<T::Mem>>> TxQueue for SoftwareTx<T, P>
where
    T::Mem: Mapped,
{
    type Mem = T::Mem;

    #[inline]
    fn send(&mut self, packet: Packet<T::Mem>) -> Result<(), Packet<T::Mem>> {
        if self.waiting.is_empty() && self.queue.supports(packet.meta) {
            return self.queue.send(packet);
        }
        self.soften(packet)
    }

    /// Packets in a row that pass through are sent as a group.
    fn send_group(&mut self, packets: &mut [Option<Packet<T::Mem>>]) -> usize {
        let mut sent = 0;
        while sent < packets.len() {
            let rest = &mut packets[sent..];
            let waits = !self.waiting.is_empty();
            let supported = |packet: &Packet<T::Mem>| !waits && self.queue.supports(packet.meta);
            let through = rest.iter().take_while(|place| place.as_ref().is_none_or(supported)).count();
            if through > 0 {
                let accepted = self.queue.send_group(&mut rest[..through]);
                sent += accepted;
                if accepted < through {
                    break;
                }
            } else if let Some(packet) = rest[0].take() {
                if let Err(packet) = self.soften(packet) {
                    rest[0] = Some(packet);
                    break;
                }
                sent += 1;
            }
        }
        sent
    }

    /// The queue's answer, and [`Sendable::Later`] while segments wait. For a packet that needs
    /// software, the answer follows from its last attempt: sending can fail, and this is the
    /// reason.
    fn sendable(&self, packet: &Packet<T::Mem>) -> Sendable {
        if !self.waiting.is_empty() {
            return Sendable::Later;
        }
        if self.queue.supports(packet.meta) { self.queue.sendable(packet) } else { self.sendable }
    }

    fn flush(&mut self) {
        self.drain();
        self.queue.flush();
    }

    fn complete(&mut self) -> usize {
        let completed = self.queue.complete();
        if completed > 0 {
            self.sendable = Sendable::Now;
        }
        if !self.waiting.is_empty() {
            // Done here, because a caller that has nothing to send may not flush.
            self.drain();
            self.queue.flush();
        }
        completed
    }

    #[inline]
    fn supports(&self, _: Meta) -> bool {
        true
    }

    #[inline]
    fn reach(&self, frag: &Frag<T::Mem>) -> Reach {
        self.queue.reach(frag)
    }
}

impl<T: TxQueue, P> fmt::Debug for SoftwareTx<T, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SoftwareTx({} waiting, {:?})", self.waiting.len(), self.stats)
    }
}
