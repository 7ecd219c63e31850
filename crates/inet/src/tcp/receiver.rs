//! The receiving half: what arrived, in order and out of order, and the window.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::assembler::Assembler;
use super::budget::{Budget, Held};
use super::{Chunk, SackBlocks, Seq};
use crate::Time;

/// The window that a connection begins with, if the window adapts.
const FIRST_WINDOW: u32 = 64 << 10;

/// What is to be known of a receiver to go on receiving, beside what was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedReceiver {
    nxt: Seq,
    edge: Seq,
    scale: u8,
    capacity: u32,
    finished: bool,
}

/// The largest window of at most `most` bytes, and the shift for it. The shift is announced in SYN, before it is known how large
/// the window will be.
pub(super) fn scale(most: u32) -> (u32, u8) {
    let scale = (0..14).find(|scale| most >> scale <= u32::from(u16::MAX)).unwrap_or(14);
    (most.min(u32::from(u16::MAX) << scale).max(1), scale)
}

/// The window of SYN, which is not scaled.
pub(super) fn first_window(most: u32) -> u16 {
    u16::try_from(most.min(FIRST_WINDOW)).unwrap_or(u16::MAX)
}

/// Payload of a connection on its way to the user.
///
/// ```text
///        read by the user │ queue: in order, not read │ gap │ out of order │ gap │ ..  │
///                         │                           │nxt                             │edge
///                         └───────────── at most `capacity` bytes ─────────────────────┘
/// ```
///
/// Three limits hold at the same time. The window promises bytes up to `edge`, which never moves back. The [`Budget`] counts
/// buffers, with those that the user holds. FIN ends the stream.
pub(super) struct Receiver<T> {
    nxt: Seq,
    edge: Seq,
    scale: u8,
    /// The announced MSS: the window moves by at least this much.
    mss: u32,
    capacity: u32,
    most: u32,
    queue: VecDeque<Held<T>>,
    queued: u32,
    assembler: Assembler<T>,
    budget: Budget,
    /// Payload in a buffer, smoothed: how many bytes the free buffers are worth.
    per_buffer: u32,
    /// The number of FIN.
    fin: Option<Seq>,
    finished: bool,
    /// A range that arrived twice, for the next acknowledgement (RFC 2883).
    duplicate: Option<(Seq, Seq)>,
    /// The round trip in which reads are counted, and what was read in it.
    round: (Time, u32),
}

/// What a segment did to the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    /// Bytes that became readable.
    pub(super) readable: u32,
    /// The segment must be acknowledged now: it came out of order, filled a gap, was a duplicate or was dropped.
    pub(super) acknowledge: bool,
    /// FIN is in order now.
    pub(super) finished: bool,
    /// Bytes that were dropped because there was no buffer for them.
    pub(super) dropped: u32,
}

impl<T: Chunk> Receiver<T> {
    /// A receiver with windows of up to `most` bytes. The window begins smaller and follows the rate of reading, unless `fixed`.
    pub(super) fn new(most: u32, fixed: bool, mss: u32, budget: Budget) -> Self {
        let (most, scale) = scale(most);
        let capacity = if fixed { most } else { most.min(FIRST_WINDOW) };
        Self {
            nxt: Seq(0),
            edge: Seq(0),
            scale,
            mss,
            capacity,
            most,
            queue: VecDeque::new(),
            queued: 0,
            assembler: Assembler::new(),
            budget,
            per_buffer: mss,
            fin: None,
            finished: false,
            duplicate: None,
            round: (Time::ZERO, 0),
        }
    }

    /// The shift to announce.
    pub(super) fn scale(&self) -> u8 {
        self.scale
    }

    /// The peer's first number is known; its window scale is not understood if `scaled` is false.
    pub(super) fn open(&mut self, irs: Seq, scaled: bool) {
        self.nxt = irs + 1;
        if !scaled {
            self.scale = 0;
            self.most = self.most.min(u32::from(u16::MAX));
            self.capacity = self.capacity.min(self.most);
        }
        self.edge = self.nxt + u32::from(first_window(self.capacity));
    }

    /// The next number that is expected.
    pub(super) fn nxt(&self) -> Seq {
        self.nxt
    }

    /// Bytes that can be read.
    pub(super) fn readable(&self) -> u32 {
        self.queued
    }

    /// Buffers that payload occupies, with those that the user holds.
    pub(super) fn buffers(&self) -> u32 {
        self.budget.used()
    }

    /// FIN was in order.
    pub(super) fn finished(&self) -> bool {
        self.finished
    }

    /// The number of the next byte that the user reads.
    pub(super) fn read_position(&self) -> Seq {
        self.nxt - u32::from(self.finished) - self.queued
    }

    /// Whether a segment of `len` numbers from `seq` has one inside the window (RFC 9293, section 3.10.7.4).
    ///
    /// A segment that begins with the expected number always is: its acknowledgement and its control bits count even if the
    /// window is closed (MUST-66). Its payload is trimmed to the window.
    pub(super) fn is_acceptable(&self, seq: Seq, len: u32) -> bool {
        let window = self.edge - self.nxt;
        // A peer whose last window is lost acknowledges and probes with the number behind it, where an empty segment has no number
        // of its own.
        let behind = len == 0 && seq == self.edge;
        seq == self.nxt
            || behind
            || seq.is_in(self.nxt, window)
            || (len > 0 && (seq + (len - 1)).is_in(self.nxt, window))
    }

    /// Takes the payload of a segment, `len` bytes from `seq` on, and its FIN. Payload that is missing was dropped before.
    pub(super) fn accept(&mut self, seq: Seq, len: u32, payload: impl Iterator<Item = T>, fin: bool) -> Arrival {
        let mut arrival = Arrival::default();
        let before = self.nxt;
        let limit = self.fin.map_or(self.edge, |fin| fin.min(self.edge));
        let (mut at, last) = (seq, seq + len);
        for mut chunk in payload {
            // More payload than the header says would move FIN.
            chunk.truncate(chunk.len().min((last - at) as usize));
            let end = at + chunk.len() as u32;
            if chunk.is_empty() || limit <= at {
                arrival.dropped += chunk.len() as u32;
            } else {
                if limit < end {
                    arrival.dropped += end - limit;
                    chunk.truncate((limit - at) as usize);
                }
                self.take(at, chunk, &mut arrival);
            }
            at = end;
        }
        arrival.dropped += last - at;
        if fin && self.fin.is_none() && self.nxt <= last && last <= self.edge {
            self.fin = Some(last);
        }
        arrival.readable = self.nxt - before;
        if self.fin == Some(self.nxt) && !self.finished {
            self.finished = true;
            arrival.finished = true;
            self.nxt += 1;
            self.edge = self.edge.max(self.nxt);
            self.assembler.clear();
        }
        arrival.acknowledge |= fin || arrival.dropped > 0;
        arrival
    }

    fn take(&mut self, mut at: Seq, mut chunk: T, arrival: &mut Arrival) {
        if at < self.nxt {
            let known = chunk.len().min((self.nxt - at) as usize);
            self.duplicate.get_or_insert((at, at + known as u32));
            arrival.acknowledge = true;
            chunk.advance(known);
            at += known as u32;
            if chunk.is_empty() {
                return;
            }
        }
        let len = chunk.len() as u32;
        self.per_buffer = (self.per_buffer - self.per_buffer / 8 + len / 8).max(1);
        if at == self.nxt {
            match self.admit() {
                Some(charge) => self.append(Held::new(chunk, charge)),
                None => arrival.dropped += len,
            }
            if !self.assembler.is_empty() {
                arrival.acknowledge = true;
                while let Some(chunk) = self.assembler.pop(self.nxt) {
                    self.append(chunk);
                }
            }
        } else {
            let inserted = self.assembler.insert(at, chunk, &self.budget);
            arrival.acknowledge = true;
            if let Some(range) = inserted.duplicate {
                self.duplicate.get_or_insert(range);
            }
        }
    }

    /// Room for a chunk that is in order. Payload that is out of order goes first; a connection that occupies nothing always gets
    /// one buffer, so that it goes on when others have the queue's budget.
    fn admit(&mut self) -> Option<super::budget::Charge> {
        loop {
            if let Some(charge) = self.budget.take() {
                return Some(charge);
            }
            if !self.assembler.evict() {
                return (self.budget.used() == 0).then(|| self.budget.force());
            }
        }
    }

    fn append(&mut self, chunk: Held<T>) {
        self.nxt += chunk.len() as u32;
        self.queued += chunk.len() as u32;
        self.queue.push_back(chunk);
    }

    /// The next chunk for the user. The window follows what is read in a round trip of `round_trip`: a sender can use twice that.
    pub(super) fn read(&mut self, now: Time, round_trip: Duration) -> Option<Held<T>> {
        let chunk = self.queue.pop_front()?;
        self.queued -= chunk.len() as u32;
        let (since, read) = &mut self.round;
        *read = read.saturating_add(chunk.len() as u32);
        if now.since(*since) >= round_trip {
            self.capacity = self.capacity.max(read.saturating_mul(2).min(self.most));
            self.round = (now, 0);
        }
        Some(chunk)
    }

    /// Payload that was not read, in order.
    pub(super) fn chunks(&self) -> impl Iterator<Item = &T> {
        self.queue.iter().map(|held| &**held)
    }

    /// The numbers that another receiver can go on with. What is out of order is not part of it: the peer keeps it until it is
    /// acknowledged (RFC 2018, section 8).
    pub(super) fn save(&self) -> SavedReceiver {
        let Self { nxt, edge, scale, capacity, finished, .. } = *self;
        SavedReceiver { nxt, edge, scale, capacity, finished }
    }

    /// Goes on where another receiver was saved, with what was not read there.
    pub(super) fn restore(&mut self, saved: &SavedReceiver, unread: impl IntoIterator<Item = T>) {
        (self.scale, self.finished) = (saved.scale.min(14), saved.finished);
        self.capacity = saved.capacity;
        self.most = self.most.max(saved.capacity);
        for chunk in unread.into_iter().filter(|chunk| !chunk.is_empty()) {
            self.append(Held::new(chunk, self.budget.force()));
        }
        (self.nxt, self.edge) = (saved.nxt, saved.edge.max(saved.nxt));
        self.fin = self.finished.then(|| self.nxt - 1);
    }

    /// Drops all payload: the user is gone.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.queued = 0;
        self.assembler.clear();
    }

    /// Bytes from `nxt` that could be promised now.
    fn room(&self) -> u32 {
        let free = self.budget.free();
        let buffers = free.saturating_mul(self.per_buffer);
        // Where a segment would be admitted, the window has room for it.
        let buffers = if free > 0 || self.budget.used() == 0 { buffers.max(self.mss) } else { buffers };
        self.capacity.saturating_sub(self.queued).min(buffers)
    }

    /// How far the edge would move if an acknowledgement were sent now. The edge moves by a segment at least, or by half the
    /// capacity (silly window avoidance, RFC 9293, section 3.8.6.2.2).
    fn advance(&self) -> u32 {
        let advance = (self.nxt + self.room()).distance(self.edge);
        let least = self.mss.min(self.capacity / 2).max(1);
        u32::try_from(advance).ok().filter(|advance| *advance >= least).unwrap_or(0)
    }

    /// Whether the window opened so much that the peer must hear of it now: to twice of what it has.
    pub(super) fn update_is_due(&self) -> bool {
        let advance = self.advance();
        advance > 0 && advance >= self.edge - self.nxt && !self.finished
    }

    /// The window for a header that is sent now, and the edge that it promises: see [`promised`](Self::promised).
    pub(super) fn window(&self, syn: bool) -> (u16, Seq) {
        let shift = if syn { 0 } else { self.scale };
        let unit = 1 << shift;
        let advance = self.advance();
        let open = self.edge - self.nxt + advance;
        // Rounding down would take back what was promised, and rounding up for ever would promise more than the capacity.
        let most = self.capacity.saturating_sub(self.queued) + unit;
        let up = advance == 0 && open.next_multiple_of(unit) <= most;
        let units = (if up { open.div_ceil(unit) } else { open >> shift }).min(u32::from(u16::MAX));
        (units as u16, self.nxt + (units << shift))
    }

    /// A header with the window that promises `edge` has left.
    pub(super) fn promised(&mut self, edge: Seq) {
        self.edge = self.edge.max(edge);
    }

    /// The blocks for an acknowledgement that is sent now: first a range that arrived twice, then what is out of order.
    pub(super) fn sack(&self) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        if let Some((from, to)) = self.duplicate {
            blocks.push(from, to);
        }
        // RFC 2883, section 4: the block around a duplicate comes second. It is the latest one.
        self.assembler.report(&mut blocks);
        blocks
    }

    /// Whether there is anything for [`sack`](Self::sack).
    pub(super) fn has_sack(&self) -> bool {
        self.duplicate.is_some() || !self.assembler.is_empty()
    }

    /// A duplicate is reported once.
    pub(super) fn reported(&mut self) {
        self.duplicate = None;
    }

    /// A range that is not kept arrived again, outside the window.
    pub(super) fn repeated(&mut self, from: Seq, to: Seq) {
        if from < to && to <= self.nxt {
            self.duplicate.get_or_insert((from, to));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Piece;
    use super::*;

    const START: Seq = Seq(u32::MAX - 999);

    fn receiver(most: u32, mss: u32, budget: Budget) -> Receiver<Piece> {
        let mut receiver = Receiver::new(most, true, mss, budget);
        receiver.open(START - 1, true);
        receiver
    }

    fn accept(receiver: &mut Receiver<Piece>, from: u32, len: u32, fin: bool) -> Arrival {
        let seq = START + from;
        receiver.accept(seq, len, std::iter::once(Piece::numbered(seq.0, len)), fin)
    }

    /// Sends an acknowledgement: what the peer may send from `nxt` on.
    fn advertise(receiver: &mut Receiver<Piece>) -> u32 {
        let (units, edge) = receiver.window(false);
        receiver.promised(edge);
        u32::from(units) << receiver.scale
    }

    fn read(receiver: &mut Receiver<Piece>) -> Option<Held<Piece>> {
        receiver.read(Time::ZERO, Duration::from_secs(1))
    }

    #[test]
    fn payload_beyond_the_window_is_trimmed() {
        let mut receiver = receiver(1000, 100, Budget::new(100));
        let arrival = accept(&mut receiver, 0, 1500, true);
        assert_eq!((arrival.readable, arrival.dropped, arrival.finished), (1000, 500, false));
        assert_eq!(advertise(&mut receiver), 0);
        assert_eq!(accept(&mut receiver, 1000, 1, false).readable, 0);
    }

    #[test]
    fn fin_waits_for_the_payload_before_it() {
        let mut receiver = receiver(1000, 100, Budget::new(100));
        assert!(!accept(&mut receiver, 100, 50, true).finished);
        assert!(!accept(&mut receiver, 150, 50, false).finished, "there is nothing behind FIN");
        let arrival = accept(&mut receiver, 0, 100, false);
        assert_eq!((arrival.readable, arrival.finished, receiver.nxt()), (150, true, START + 151));
        assert!(!accept(&mut receiver, 150, 0, true).finished, "FIN counts once");
        assert_eq!(receiver.read_position(), START);
    }

    /// The window that the peer sees never takes back what it promised, and never lets in more than the buffer.
    #[test]
    fn the_right_edge_never_moves_back() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let most = random.u32(2000..400_000);
            let mut receiver = receiver(most, 1000, Budget::new(1_000_000));
            let (mut edge, mut sent, mut taken) = (0, 0, 0);
            for _ in 0..500 {
                match random.u8(0..3) {
                    0 if sent < edge => {
                        let len = random.u32(1..=(edge - sent).min(3000));
                        assert_eq!(accept(&mut receiver, sent, len, false).readable, len, "seed {seed}");
                        sent += len;
                    }
                    1 => taken += read(&mut receiver).map_or(0, |chunk| chunk.len() as u32),
                    _ => {
                        let window = advertise(&mut receiver);
                        let unit = 1 << receiver.scale;
                        assert!(sent + window + unit > edge, "seed {seed}: {sent} {window} {edge}");
                        edge = edge.max(sent + window);
                        assert!(edge <= taken + most + unit, "seed {seed}: {edge} {taken} {most}");
                    }
                }
            }
        }
    }

    #[test]
    fn rounding_takes_nothing_back() {
        let mut receiver = receiver(400_000, 1000, Budget::new(1_000_000));
        let edge = advertise(&mut receiver);
        accept(&mut receiver, 0, 1, false);
        assert!(receiver.scale > 0 && 1 + advertise(&mut receiver) >= edge);
    }

    #[test]
    fn the_window_opens_by_a_segment_at_least() {
        let mut receiver = receiver(10_000, 1000, Budget::new(100));
        for n in 0..100 {
            accept(&mut receiver, n * 100, 100, false);
        }
        assert_eq!(advertise(&mut receiver), 0);
        for n in 1..10 {
            read(&mut receiver);
            assert_eq!(
                (advertise(&mut receiver), receiver.update_is_due()),
                (0, false),
                "{n}00 bytes are a silly window"
            );
        }
        read(&mut receiver);
        assert!(receiver.update_is_due());
        assert_eq!(advertise(&mut receiver), 1000);
    }

    #[test]
    fn the_window_follows_what_is_read_in_a_round_trip() {
        let mut receiver: Receiver<Piece> = Receiver::new(1 << 18, false, 1000, Budget::new(10_000));
        receiver.open(START - 1, true);
        let (mut now, mut sent, mut first) = (Time::ZERO, 0, None);
        for _ in 0..8 {
            let window = advertise(&mut receiver);
            first.get_or_insert(window);
            accept(&mut receiver, sent, window, false);
            sent += window;
            now += Duration::from_millis(10);
            while receiver.read(now, Duration::from_millis(10)).is_some() {}
        }
        let wide = advertise(&mut receiver);
        assert!(first <= Some(FIRST_WINDOW) && wide > 260_000, "{first:?} {wide}");
        // A user that reads slowly gets no more than it reads.
        let mut receiver: Receiver<Piece> = Receiver::new(1 << 18, false, 1000, Budget::new(10_000));
        receiver.open(START - 1, true);
        for n in 0..30 {
            accept(&mut receiver, n * 1000, 1000, false);
            now += Duration::from_millis(10);
            receiver.read(now, Duration::from_millis(10));
        }
        assert!(advertise(&mut receiver) <= FIRST_WINDOW);
    }

    #[test]
    fn duplicates_are_reported_once_and_first() {
        let mut receiver = receiver(10_000, 1000, Budget::new(100));
        accept(&mut receiver, 0, 300, false);
        accept(&mut receiver, 500, 100, false);
        accept(&mut receiver, 700, 200, false);
        let blocks = |receiver: &Receiver<Piece>| -> Vec<_> {
            receiver.sack().iter().map(|(from, to)| (*from - START, *to - START)).collect()
        };
        assert_eq!(blocks(&receiver), [(700, 900), (500, 600)]);
        assert!(accept(&mut receiver, 100, 100, false).acknowledge);
        assert_eq!(blocks(&receiver), [(100, 200), (700, 900), (500, 600)]);
        receiver.reported();
        assert_eq!(blocks(&receiver), [(700, 900), (500, 600)]);
        accept(&mut receiver, 720, 50, false);
        assert_eq!(blocks(&receiver), [(720, 770), (700, 900), (500, 600)], "the block around it comes second");
        receiver.reported();
        accept(&mut receiver, 250, 100, false);
        assert_eq!(blocks(&receiver)[0], (250, 300), "only what is known is a duplicate");
    }

    #[test]
    fn buffers_are_counted_with_those_of_the_user() {
        let mut receiver = receiver(1 << 20, 1000, Budget::new(10));
        let held: Vec<_> = (0..10)
            .map(|n| {
                assert_eq!(accept(&mut receiver, n, 1, false).readable, 1);
                read(&mut receiver)
            })
            .collect();
        let arrival = accept(&mut receiver, 10, 1, false);
        assert_eq!((arrival.readable, arrival.dropped, receiver.nxt()), (0, 1, START + 10), "not acknowledged");
        drop(held);
        assert_eq!(accept(&mut receiver, 10, 1, false).readable, 1);
    }

    #[test]
    fn out_of_order_payload_goes_first() {
        let mut receiver = receiver(1 << 20, 1000, Budget::new(10));
        for n in 0..20 {
            accept(&mut receiver, 100 + n * 10, 5, false);
        }
        assert_eq!((receiver.buffers(), receiver.assembler.ranges().len()), (10, 10));
        for n in 0..10 {
            assert_eq!(accept(&mut receiver, n, 1, false).readable, 1, "{n}");
        }
        assert_eq!((receiver.buffers(), receiver.assembler.is_empty()), (10, true));
        assert_eq!(accept(&mut receiver, 10, 1, false).readable, 0);
    }

    #[test]
    fn one_segment_in_order_is_always_admitted() {
        let queue = Budget::new(0);
        let mut receiver = receiver(1 << 20, 1000, Budget::within(10, Some(&queue)));
        for n in 0..5 {
            assert_eq!(accept(&mut receiver, n * 2 + 1, 1, false).readable, 0, "out of order");
            assert_eq!(accept(&mut receiver, n, 1, false).readable, 1);
            assert_eq!(accept(&mut receiver, n + 1, 1, false).readable, 0);
            read(&mut receiver);
        }
        assert_eq!(queue.used(), 0);
    }

    /// Segments that overlap, repeat and overtake each other come out as the stream, and no more buffers are used than allowed.
    #[test]
    fn any_segments_give_the_stream() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let budget = Budget::new(random.u32(3..40));
            let limit = budget.free();
            let mut receiver = receiver(5000, 100, budget.clone());
            let (mut stream, mut edge, mut finished) = (Vec::new(), 0, false);
            while !finished {
                edge = edge.max((receiver.nxt() - START) + advertise(&mut receiver));
                let from = random.u32(stream.len().saturating_sub(200) as u32..=edge.min(9999));
                // The sender repeats the first missing byte now and then.
                let from = if random.u8(0..4) == 0 { (receiver.nxt() - START).min(9999) } else { from };
                let len = random.u32(0..200).min(10_000 - from);
                let arrival = accept(&mut receiver, from, len, from + len == 10_000);
                finished = arrival.finished;
                assert!(budget.used() <= limit, "seed {seed}");
                if random.bool() {
                    stream.extend(read(&mut receiver).iter().flat_map(|chunk| chunk.bytes().to_vec()));
                }
            }
            while let Some(chunk) = read(&mut receiver) {
                stream.extend_from_slice(chunk.bytes());
            }
            assert_eq!(stream, Piece::numbered(START.0, 10_000).bytes(), "seed {seed}");
            assert_eq!(budget.used(), 0);
        }
    }
}
