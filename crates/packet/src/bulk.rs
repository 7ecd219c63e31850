//! A transmit queue with packets in front of it, which are sent in bulk.
//!
//! A handler sees one frame at a time, and the memory of the target queue is cold by then. Sent one
//! by one, each redirected frame would load it again, and notify the device. So packets are
//! gathered, and the queue is touched once for up to 64 of them, which it
//! [sends as a group](TxQueue::send_group). A gathered packet also needs a policy for a full queue:
//! [`TxBulk::new`] drops, [`TxBulk::holding`] keeps.

use crate::device::{Sendable, TxQueue};
use crate::packet::Packet;
use std::fmt;

/// The counters of a [`TxBulk`]. Each pushed packet was sent, was dropped, or is
/// [held](TxBulk::held).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BulkStats {
    /// Packets that the queue accepted.
    pub sent: u64,
    /// Packets that were dropped: the queue cannot send them or could not map them, or it was full
    /// and the bulk does not hold packets.
    pub dropped: u64,
}

/// A transmit queue with packets in front of it: how frames are redirected or transmitted, and
/// where packets wait while the queue is full.
///
/// ```text
///   Handler::redirect ── push ──► [ packets ] ── flush ──► complete · send · flush ───────► queue
///                                      ▲                      │         │
///                                      │   full: holding()    │         │
///                                      └── stays, in order ───┼─────────┤
///                                                             │         └── full: new()
///         completed packets return their pages ◄──────────────┘             dropped, counted
/// ```
///
/// A full queue is handled in one of two ways:
///
/// * [`new`](Self::new) drops, as a network card does. Each packet that the queue refuses is
///   dropped and counted.
/// * [`holding`](Self::holding) is back-pressure. Packets that the queue has no room for stay in
///   the bulk, in order, and each [`flush`](Self::flush) tries again. The caller stops making
///   packets while [`room`](Self::room) is 0; a forwarding caller receives at most `room` frames.
///   Then no packet is lost because the queue has no room.
///
/// A packet that the queue refuses for another reason is dropped and counted in both cases, so that
/// it does not block the packets behind it. The queue may never accept it ([`Sendable::Never`]). Or
/// the queue has room for it ([`Sendable::Now`]), and it could not be mapped into the device's DMA
/// domain at that moment, for instance because the domain was full. No second attempt is made,
/// although it might map the packet. Only packets of another domain are mapped when they are sent.
///
/// Put a bulk into a [`Handler`](crate::Handler), whose `redirect` pushes and whose `flush`
/// flushes. Both run in the poll context of the queue that received the frames, so packets that are
/// completed or dropped there return straight to the cache of that poll's pool. The target queue's
/// memory is touched once for 64 frames. A push allocates nothing.
///
/// The target is a queue, or a reference to one (`&mut queue`). Packets that a bulk holds when it
/// is dropped are dropped too.
///
/// ```
/// use netmem_packet::{Handler, Packet, Poll, RxQueue, TxBulk, TxQueue, Verdict, XdpFrame};
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
///
/// /// Receives no more frames than there is room for: a slow target slows the sender down.
/// fn forward<Q: RxQueue, T: TxQueue<Mem = Q::Mem>>(rx: &mut Q, to: &mut Forward<T>) -> usize {
///     let budget = to.0.room().min(256);
///     rx.poll(|poll| poll.receive(budget, to))
/// }
/// # fn by_reference<T: TxQueue>(tx: &mut T) -> Forward<&mut T> {
/// #     Forward(TxBulk::holding(tx, 256))
/// # }
/// ```
#[must_use = "packets that a bulk holds are dropped with it"]
pub struct TxBulk<T: TxQueue> {
    target: T,
    /// A ring of packets, with a place for each that may be held. The others are empty.
    places: Box<[Option<Packet<T::Mem>>]>,
    /// The place of the oldest.
    first: usize,
    /// Packets that are held, from there on.
    held: usize,
    /// Whether packets stay that the target has no room for.
    holds: bool,
    /// Packets pushed since the last flush.
    pushed: usize,
    stats: BulkStats,
}

impl<T: TxQueue> TxBulk<T> {
    /// Packets between two flushes, at most: the bulk flushes itself then.
    pub const CAPACITY: usize = 64;

    /// An empty bulk for `target`, which drops what `target` refuses. Allocates the room for its
    /// packets.
    pub fn new(target: T) -> Self {
        Self::with(target, Self::CAPACITY, false)
    }

    /// An empty bulk for `target`, which holds up to `packets` packets, at least 64, while `target`
    /// is full. A packet that cannot be mapped into the target's DMA domain is dropped and counted,
    /// also if a later attempt might map it. Allocates the room for the packets.
    pub fn holding(target: T, packets: usize) -> Self {
        Self::with(target, packets.max(Self::CAPACITY), true)
    }

    fn with(target: T, limit: usize, holds: bool) -> Self {
        let places = (0..limit).map(|_| None).collect();
        Self { target, places, first: 0, held: 0, holds, pushed: 0, stats: BulkStats::default() }
    }

    /// Adds a packet. Flushes after the 64th since the last flush.
    ///
    /// A caller that pushes although [`room`](Self::room) is 0 makes the bulk flush; if that makes
    /// no room, the packet is dropped and counted.
    #[inline]
    pub fn push(&mut self, packet: Packet<T::Mem>) {
        if self.held == self.places.len() && !self.make_room() {
            self.stats.dropped += 1;
            return;
        }
        let place = self.first + self.held;
        let place = if place < self.places.len() { place } else { place - self.places.len() };
        self.places[place] = Some(packet);
        self.held += 1;
        self.pushed += 1;
        if self.pushed == Self::CAPACITY {
            self.flush();
        }
    }

    #[cold]
    fn make_room(&mut self) -> bool {
        self.flush();
        self.held < self.places.len()
    }

    /// Completes packets of the target, also if there is nothing to send. Then sends the packets
    /// that the bulk holds, in order.
    ///
    /// A bulk made by [`holding`](Self::holding) keeps the first packet that the target has no room
    /// for, and all behind it. A packet that the target refuses for another reason is dropped and
    /// counted by this call: also a packet that could not be mapped at this moment.
    ///
    /// If the target panics, the packets that it took count as sent, also the one over which it
    /// panicked. The others stay held.
    pub fn flush(&mut self) {
        self.pushed = 0;
        self.target.complete();
        if self.held == 0 {
            return;
        }
        while self.held > 0 {
            if self.send_group() {
                continue;
            }
            if self.holds
                && let Some(refused) = &self.places[self.first]
                && self.target.sendable(refused) == Sendable::Later
            {
                break;
            }
            // No longer held before its drop, which can be user code.
            let refused = self.places[self.first].take();
            self.stats.dropped += 1;
            self.advance(1);
            drop(refused);
        }
        self.target.flush();
    }

    /// Sends the packets up to the end of the places. Returns whether the target accepted all of
    /// them.
    fn send_group(&mut self) -> bool {
        let (first, most) = (self.first, self.held.min(self.places.len() - self.first));
        let mut sending = Sending { bulk: self, most, sent: None };
        let TxBulk { target, places, .. } = &mut *sending.bulk;
        let sent = target.send_group(&mut places[first..first + most]).min(most);
        sending.sent = Some(sent);
        sent == most
    }

    /// The first `n` places are empty now.
    fn advance(&mut self, n: usize) {
        self.held -= n;
        self.first += n;
        // If nothing is held, the next packets use the places that these had.
        if self.held == 0 || self.first == self.places.len() {
            self.first = 0;
        }
    }

    /// The counters so far.
    #[inline]
    #[must_use]
    pub fn stats(&self) -> BulkStats {
        self.stats
    }

    /// Packets that were pushed, and neither sent nor dropped.
    #[inline]
    #[must_use]
    pub fn held(&self) -> usize {
        self.held
    }

    /// How many packets can be pushed before one of them is dropped because the bulk has no room.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        self.places.len() - self.held
    }

    /// The queue itself. Packets that are sent directly overtake those that the bulk holds.
    #[inline]
    pub fn target(&mut self) -> &mut T {
        &mut self.target
    }

    /// The queue, after a last [`flush`](Self::flush). Packets that the bulk then still
    /// [holds](Self::held) are dropped.
    #[must_use]
    pub fn into_target(mut self) -> T {
        self.flush();
        self.target
    }
}

/// A group of `most` packets that is being sent. Its drop counts the packets that were sent.
struct Sending<'b, T: TxQueue> {
    bulk: &'b mut TxBulk<T>,
    most: usize,
    /// `None` if the target has panicked. The packets in front of the first that is still there
    /// then count as sent, also the one over which it panicked.
    sent: Option<usize>,
}

impl<T: TxQueue> Drop for Sending<'_, T> {
    fn drop(&mut self) {
        let Self { bulk, most, sent } = self;
        let group = &bulk.places[bulk.first..bulk.first + *most];
        let sent = sent.unwrap_or_else(|| group.iter().take_while(|place| place.is_none()).count());
        bulk.stats.sent += sent as u64;
        bulk.advance(sent);
    }
}

impl<T: TxQueue> fmt::Debug for TxBulk<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TxBulk({} held, {:?})", self.held(), self.stats)
    }
}
