//! Packets on their way to a transmit queue, gathered and handed over in bulk.

use crate::device::TxQueue;
use crate::packet::Packet;
use std::fmt;

/// What became of the packets of a [`TxBulk`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BulkStats {
    /// Packets that the queue took.
    pub sent: u64,
    /// Packets that it refused, full, stopped or unable to reach them, and that were dropped.
    pub dropped: u64,
}

/// A transmit queue with a bulk of packets in front of it: how frames are redirected, or transmitted.
///
/// ```text
///   Handler::redirect ── push ──► [ up to 64 packets ] ── flush ──► complete · send each · flush ──► the queue
///                                                                      │           └── refused: dropped, counted
///                                                                      └── what the device is done with comes home
/// ```
///
/// Its place is in a [`Handler`](crate::Handler), whose `redirect` pushes and whose `flush` flushes: both run in the poll
/// context of the queue that received the frames. There the bulk's target completes, and there it refuses: in both cases
/// pages of that poll's pool go straight back to their cache. The queue's memory is touched once for 64 frames. A push
/// allocates nothing.
///
/// The target is a queue or a queue that is lent, `&mut queue`. What a bulk holds when it is dropped is dropped with it.
///
/// ```
/// use netmem_packet::{Handler, Packet, TxBulk, TxQueue, Verdict, XdpFrame};
///
/// struct Forward<T: TxQueue>(TxBulk<T>);
///
/// impl<T: TxQueue> Handler<T::Mem> for Forward<T> {
///     fn run(&mut self, _: &mut XdpFrame<T::Mem>) -> Verdict {
///         Verdict::Redirect
///     }
///     fn pass(&mut self, _: Packet<T::Mem>) {}
///     fn redirect(&mut self, packet: Packet<T::Mem>) {
///         self.0.push(packet);
///     }
///     fn flush(&mut self) {
///         self.0.flush();
///     }
/// }
/// ```
pub struct TxBulk<T: TxQueue> {
    target: T,
    held: Vec<Packet<T::Mem>>,
    stats: BulkStats,
}

impl<T: TxQueue> TxBulk<T> {
    /// Packets in a full bulk.
    pub const CAPACITY: usize = 64;

    /// An empty bulk for `target`. Allocates the room for its packets.
    #[must_use]
    pub fn new(target: T) -> Self {
        Self { target, held: Vec::with_capacity(Self::CAPACITY), stats: BulkStats::default() }
    }

    /// Adds a packet, and flushes if the bulk is full with it.
    #[inline]
    pub fn push(&mut self, packet: Packet<T::Mem>) {
        self.held.push(packet);
        if self.held.len() == Self::CAPACITY {
            self.flush();
        }
    }

    /// Completes what the target's device is done with, also if there is nothing to send, and hands over what the bulk
    /// holds. What the target refuses is dropped, here and now, and counted.
    pub fn flush(&mut self) {
        self.target.complete();
        if self.held.is_empty() {
            return;
        }
        for packet in self.held.drain(..) {
            match self.target.send(packet) {
                Ok(()) => self.stats.sent += 1,
                Err(packet) => {
                    self.stats.dropped += 1;
                    drop(packet);
                }
            }
        }
        self.target.flush();
    }

    /// What became of the packets so far.
    #[inline]
    #[must_use]
    pub fn stats(&self) -> BulkStats {
        self.stats
    }

    /// Packets that were pushed and not flushed.
    #[inline]
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// The queue, past the bulk.
    #[inline]
    pub fn target(&mut self) -> &mut T {
        &mut self.target
    }

    /// The queue, after a last [`flush`](Self::flush).
    #[must_use]
    pub fn into_target(mut self) -> T {
        self.flush();
        self.target
    }
}

impl<T: TxQueue> fmt::Debug for TxBulk<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TxBulk({} held, {:?})", self.held(), self.stats)
    }
}
