//! A transmit queue for every packet: what its device does not take is done in software on the way.

use crate::device::{Reach, Room, TxQueue};
use crate::meta::Meta;
use crate::packet::Packet;
use netmem_pool::{Frag, Mapped, Page};
use std::collections::VecDeque;
use std::fmt;

/// What a [`SoftwareTx`] has done. A packet is counted once its fate is known: a packet that is refused and sent again later
/// counts each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SoftwareStats {
    /// Packets whose checksum was computed.
    pub checksummed: u64,
    /// Packets that were cut.
    pub segmented: u64,
    /// Segments that they became.
    pub segments: u64,
    /// Packets refused because there was no page for headers.
    pub no_page: u64,
    /// Packets refused because their offload information cannot be true, or is of a kind that is not cut in software.
    pub refused: u64,
    /// Segments dropped because the queue would never take them: it has stopped, for instance.
    pub dropped: u64,
}

/// A transmit queue whose device lacks offloads that packets ask for: checksums are computed and segments are cut in software
/// before the queue gets them.
///
/// A packet that the queue [takes](TxQueue::takes) as it is passes through, for one comparison. For another, `pages` is asked for
/// pages: one for each segment's headers, one for a checksum in a page with another holder. The payload of a packet is not
/// copied; where checksums are computed, it is read.
///
/// Segments of a packet for which the queue has no room wait here, and no other packet is accepted meanwhile. They are
/// sent when the queue has room: [`complete`](TxQueue::complete) and [`flush`](TxQueue::flush) try it. So a packet that was
/// accepted is sent whole, unless the queue stops; then what is left of it is dropped and counted.
///
/// A packet that cannot be sent comes back, with one exception to "as it was": its checksum may have been computed.
///
/// ```
/// use netmem_packet::{Packet, SoftwareTx, TxBulk, TxQueue};
/// use netmem_pool::{Mapped, Page};
///
/// /// Packets from other devices, with any offload, to a device that may have none.
/// fn target<T: TxQueue>(queue: T, pages: impl FnMut() -> Option<Page<T::Mem>>) -> TxBulk<impl TxQueue<Mem = T::Mem>>
/// where
///     T::Mem: Mapped,
/// {
///     TxBulk::holding(SoftwareTx::new(queue, pages), 256)
/// }
/// ```
#[must_use = "segments that wait are dropped with it"]
pub struct SoftwareTx<T: TxQueue, P> {
    queue: T,
    pages: P,
    /// Segments of the last packet that was cut, which the queue had no room for.
    waiting: VecDeque<Packet<T::Mem>>,
    /// Why the last packet that needed software was refused.
    room: Room,
    stats: SoftwareStats,
}

impl<T: TxQueue, P: FnMut() -> Option<Page<T::Mem>>> SoftwareTx<T, P>
where
    T::Mem: Mapped,
{
    /// In front of `queue`. `pages` are in memory that the queue's device reaches, as those of a pool of the device are.
    pub fn new(queue: T, pages: P) -> Self {
        Self { queue, pages, waiting: VecDeque::new(), room: Room::Now, stats: SoftwareStats::default() }
    }

    /// What was done in software so far.
    #[must_use]
    pub fn stats(&self) -> SoftwareStats {
        self.stats
    }

    /// Segments that the queue had no room for so far.
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
                Err(segment) if self.queue.room(&segment) == Room::Later => {
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

    /// Does what the queue does not.
    #[cold]
    fn soften(&mut self, mut packet: Packet<T::Mem>) -> Result<(), Packet<T::Mem>> {
        self.drain();
        let meta = std::mem::take(&mut packet.meta);
        self.room = if self.waiting.is_empty() { self.queue.room(&packet) } else { Room::Later };
        packet.meta = meta;
        if self.room == Room::Now && self.queue.takes(meta) {
            return self.queue.send(packet);
        }
        // What is cut can be sent at least in part.
        if self.room != Room::Now {
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
        let complete = !self.queue.takes(Meta { gso: None, ..meta });
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
            self.room = Room::Never;
        } else {
            self.stats.no_page += 1;
            self.room = Room::Later;
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
        if self.waiting.is_empty() && self.queue.takes(packet.meta) {
            return self.queue.send(packet);
        }
        self.soften(packet)
    }

    /// As the queue says, and [`Room::Later`] while segments wait. For a packet that needs software it is what its last
    /// attempt has shown: sending can fail, and this tells why.
    fn room(&self, packet: &Packet<T::Mem>) -> Room {
        if !self.waiting.is_empty() {
            return Room::Later;
        }
        if self.queue.takes(packet.meta) { self.queue.room(packet) } else { self.room }
    }

    fn flush(&mut self) {
        self.drain();
        self.queue.flush();
    }

    fn complete(&mut self) -> usize {
        let completed = self.queue.complete();
        if completed > 0 {
            self.room = Room::Now;
        }
        if !self.waiting.is_empty() {
            // The caller may have nothing to send, and so no reason to flush.
            self.drain();
            self.queue.flush();
        }
        completed
    }

    #[inline]
    fn takes(&self, _: Meta) -> bool {
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
