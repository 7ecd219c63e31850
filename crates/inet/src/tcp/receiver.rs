//! The receiving half: received payload, in order and out of order.
//!
//! Why no byte ring: payload stays in the buffer into which it was received. The receiver keeps
//! chunks and trims them by arithmetic. What it promises to the peer is in `window`.

use std::collections::VecDeque;
use std::mem;

use serde::{Deserialize, Serialize};

use super::assembler::Assembler;
use super::budget::{Budget, Charges, Held, LocalBudget};
use super::window::{FIRST_WINDOW, LARGEST_WINDOW, first_window, scale};
use super::{Chunk, SackBlocks, Seq};
use crate::time::Time;

/// The state of a receiver that another receiver needs to continue, besides the payload that was
/// not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedReceiver {
    nxt: Seq,
    edge: Seq,
    scale: u8,
    capacity: u32,
    finished: bool,
}

/// The received payload of a connection, until the user reads it.
///
/// ```text
///        read by the user │ queue: in order, not read │ gap │ out of order │ gap │ ..  │
///                         │                           │nxt                             │edge
///                         └───────────── at most `capacity` bytes ─────────────────────┘
/// ```
///
/// Three limits apply at the same time. The window promises bytes up to `edge`, which never moves
/// back. The [`Budget`] counts buffers, including those that the user holds. FIN ends the stream.
///
/// If payload in order had to be dropped because no buffer was free, the receiver announces less
/// than it has promised, until there are enough free buffers for the promise. While no buffer is
/// free, it announces a window of 0. Otherwise the peer would treat the drops as losses, and would
/// end the connection after a while. Payload within the promise is still accepted.
pub(super) struct Receiver<T: Chunk> {
    nxt: Seq,
    edge: Seq,
    /// Set after payload in order was dropped because no buffer was free, until `edge` is announced
    /// again: the edge that was announced last.
    reduced_edge: Option<Seq>,
    /// Bytes in order that were dropped because no buffer was free.
    out_of_buffers: u64,
    /// Set while the queue has too few buffers: payload in order was dropped before it came here.
    cut_short: bool,
    /// Set after [`compact`](Self::compact), until another chunk is stored.
    is_compact: bool,
    scale: u8,
    /// The announced MSS. The window edge moves by at least this much.
    mss: u32,
    capacity: u32,
    most: u32,
    queue: VecDeque<Held<T>>,
    queued: u32,
    assembler: Assembler<T>,
    budget: LocalBudget,
    /// The smoothed number of payload bytes in a buffer. It converts free buffers to bytes.
    per_buffer: u32,
    /// The sequence number of FIN.
    fin: Option<Seq>,
    finished: bool,
    /// A range that arrived twice, to be reported in the next acknowledgement (RFC 2883).
    duplicate: Option<(Seq, Seq)>,
    /// The current round trip, in which reads are counted: its start, and the bytes that were read
    /// in it.
    round: (Time, u32),
}

/// The effects of a segment on the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    /// Bytes that became readable.
    pub(super) readable: u32,
    /// Whether the segment must be acknowledged now: it was out of order, filled a gap, was a
    /// duplicate or was dropped.
    pub(super) acknowledge: bool,
    /// Whether FIN is in order now.
    pub(super) finished: bool,
    /// Bytes that were not stored: they were behind the window, or missing in the payload, or no
    /// buffer was free.
    pub(super) dropped: u32,
}

impl<T: Chunk> Receiver<T> {
    /// A receiver with windows of up to `most` bytes. Unless `fixed`, the window begins smaller and
    /// adapts to the rate of reading.
    pub(super) fn new(most: u32, fixed: bool, mss: u32, budget: LocalBudget) -> Self {
        let (most, scale) = scale(most);
        let capacity = if fixed { most } else { most.min(FIRST_WINDOW) };
        Self {
            nxt: Seq(0),
            edge: Seq(0),
            reduced_edge: None,
            out_of_buffers: 0,
            cut_short: false,
            is_compact: false,
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

    /// The shift that this side announces.
    pub(super) fn scale(&self) -> u8 {
        self.scale
    }

    /// Sets the peer's first number. If `scaled` is false, the peer does not support window
    /// scaling. `promised` is the window that the peer was promised already, by a cookie; otherwise
    /// the first window follows the free buffers.
    pub(super) fn open(&mut self, irs: Seq, scaled: bool, promised: Option<u16>) {
        let announced = self.edge - self.nxt;
        self.nxt = irs + 1;
        if !scaled {
            self.scale = 0;
            self.most = self.most.min(u32::from(u16::MAX));
            self.capacity = self.capacity.min(self.most);
        }
        let first = match promised {
            Some(window) => u32::from(window),
            // The window of this side's own SYN.
            None if announced > 0 => announced,
            None => u32::from(first_window(self.room())),
        };
        self.edge = self.nxt + first;
    }

    /// The next expected number.
    pub(super) fn nxt(&self) -> Seq {
        self.nxt
    }

    /// Whether the peer was promised bytes that did not come in order yet.
    pub(super) fn is_open(&self) -> bool {
        self.nxt < self.edge
    }

    /// Bytes that can be read.
    pub(super) fn readable(&self) -> u32 {
        self.queued
    }

    /// Whether no payload is stored.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.assembler.is_empty()
    }

    /// The number of buffers that payload occupies, including those that the user holds.
    pub(super) fn buffers(&self) -> u32 {
        self.budget.used()
    }

    /// Bytes in order that were dropped because no buffer was free.
    pub(super) fn out_of_buffers(&self) -> u64 {
        self.out_of_buffers
    }

    /// Whether FIN was received in order.
    pub(super) fn finished(&self) -> bool {
        self.finished
    }

    /// The number of the next byte that the user reads.
    pub(super) fn read_position(&self) -> Seq {
        self.nxt - u32::from(self.finished) - self.queued
    }

    /// Whether a segment of `len` numbers from `seq` on has a number inside the window (RFC 9293,
    /// section 3.10.7.4).
    ///
    /// A segment that begins with the expected number is always acceptable: its acknowledgement and
    /// its control bits are processed even if the window is closed (MUST-66). Its payload is
    /// trimmed to the window.
    pub(super) fn is_acceptable(&self, seq: Seq, len: u32) -> bool {
        let window = self.edge - self.nxt;
        // If a peer has filled the window, its acknowledgements and probes have the number directly
        // behind the window. An empty segment there has no number of its own.
        let behind = len == 0 && seq == self.edge;
        seq == self.nxt
            || behind
            || seq.is_in(self.nxt, window)
            || (len > 0 && (seq + (len - 1)).is_in(self.nxt, window))
    }

    /// Whether neither payload nor FIN is out of order.
    #[inline]
    pub(super) fn is_in_order(&self) -> bool {
        self.assembler.is_empty() && self.fin.is_none()
    }

    /// Stores the payload of a segment, `len` bytes from `seq` on, and its FIN. If `payload` is
    /// shorter than `len`, the rest was dropped before.
    pub(super) fn accept(&mut self, seq: Seq, len: u32, payload: impl Iterator<Item = T>, fin: bool) -> Arrival {
        let mut arrival = Arrival::default();
        let before = self.nxt;
        let limit = self.fin.map_or(self.edge, |fin| fin.min(self.edge));
        let (mut at, last) = (seq, seq + len);
        let mut charges = self.charge_together(seq, payload.size_hint().1);
        for mut chunk in payload {
            // More payload than the length in the header would move the number of FIN.
            chunk.truncate(chunk.len().min((last - at) as usize));
            let end = at + chunk.len() as u32;
            if chunk.is_empty() || limit <= at {
                arrival.dropped += chunk.len() as u32;
            } else {
                if limit < end {
                    arrival.dropped += end - limit;
                    chunk.truncate((limit - at) as usize);
                }
                self.store(at, chunk, charges.as_mut(), &mut arrival);
            }
            at = end;
        }
        arrival.dropped += last - at;
        if at < last && seq <= self.nxt && self.nxt < last {
            // The window closes, so that the peer waits. If it detected a loss instead, it would
            // end the connection while the queue is out of buffers for long.
            self.note_out_of_buffers(last - at);
            self.cut_short = true;
        }
        let fin_again = fin && self.fin == Some(last);
        if fin && self.fin.is_none() && self.nxt <= last && last <= self.edge {
            self.fin = Some(last);
        }
        arrival.readable = self.nxt - before;
        if self.fin == Some(self.nxt) && !self.finished {
            self.finished = true;
            arrival.finished = true;
            self.nxt += 1;
            // An earlier FIN cannot be reported, because it is not in a block.
            if fin_again {
                self.note_duplicate(last, self.nxt);
            }
            self.edge = self.edge.max(self.nxt);
            self.assembler.clear();
        }
        arrival.acknowledge |= fin || arrival.dropped > 0;
        arrival
    }

    /// Does what [`accept`](Self::accept) does for the next `len` bytes in order without FIN, if
    /// nothing is [out of order](Self::is_in_order).
    #[inline]
    pub(super) fn accept_next(&mut self, len: u32, mut payload: impl Iterator<Item = T>) -> Arrival {
        let Some(chunk) = payload.next() else { return self.accept(self.nxt, len, payload, false) };
        if chunk.len() == len as usize
            && len <= self.edge - self.nxt
            && let Some(charge) = self.budget.try_charge()
        {
            self.note_size(len);
            self.cut_short = false;
            self.append(Held::new(chunk, charge));
            return Arrival { readable: len, ..Arrival::default() };
        }
        self.accept(self.nxt, len, std::iter::once(chunk).chain(payload), false)
    }

    /// Notes how many bytes of payload are in a buffer.
    #[inline]
    fn note_size(&mut self, len: u32) {
        self.per_buffer = (self.per_buffer - self.per_buffer / 8 + len / 8).max(1);
    }

    /// Counts the buffers of several chunks in order at once, if all of them are free. What is not
    /// used is returned.
    fn charge_together(&self, seq: Seq, chunks: Option<usize>) -> Option<Charges> {
        let chunks = u32::try_from(chunks?).ok().filter(|chunks| *chunks > 1 && seq == self.nxt)?;
        self.budget.try_charge_many(chunks)
    }

    fn store(&mut self, mut at: Seq, mut chunk: T, charges: Option<&mut Charges>, arrival: &mut Arrival) {
        if at < self.nxt {
            let known = chunk.len().min((self.nxt - at) as usize);
            self.note_duplicate(at, at + known as u32);
            arrival.acknowledge = true;
            chunk.advance(known);
            at += known as u32;
            if chunk.is_empty() {
                return;
            }
        }
        let len = chunk.len() as u32;
        self.note_size(len);
        if at == self.nxt {
            match charges.and_then(Charges::take).or_else(|| self.admit()) {
                Some(charge) => {
                    self.cut_short = false;
                    self.append(Held::new(chunk, charge));
                }
                None if self.absorb(&chunk) => {}
                None => {
                    arrival.dropped += len;
                    self.note_out_of_buffers(len);
                }
            }
            if !self.assembler.is_empty() {
                arrival.acknowledge = true;
                if let Some((from, to)) = self.assembler.overlap(self.nxt) {
                    self.note_duplicate(from, to);
                }
                while let Some(chunk) = self.assembler.pop(self.nxt) {
                    self.append(chunk);
                }
            }
        } else {
            let inserted = self.assembler.insert(at, chunk, &self.budget);
            arrival.acknowledge = true;
            if let Some((from, to)) = inserted.duplicate {
                self.note_duplicate(from, to);
            }
        }
    }

    /// Notes that payload in order was dropped because no buffer was free: the window closes.
    fn note_out_of_buffers(&mut self, bytes: u32) {
        self.out_of_buffers += u64::from(bytes);
        self.reduced_edge.get_or_insert(self.edge);
    }

    /// Whether payload is dropped because the queue has too few buffers.
    pub(super) fn is_cut_short(&self) -> bool {
        self.cut_short
    }

    /// Opens the window, because the queue may have buffers again. The peer then sends, and the
    /// payload is stored or dropped.
    pub(super) fn retry_buffers(&mut self) {
        self.cut_short = false;
    }

    /// Counts a buffer for a chunk that is in order. If none is free, payload that is out of order
    /// is evicted, and then payload that was not read is compacted. For a connection that occupies
    /// no buffer, some are kept, so that it makes progress while others have theirs.
    fn admit(&mut self) -> Option<super::budget::Charge> {
        loop {
            if let Some(charge) = self.budget.try_charge() {
                return Some(charge);
            }
            if !self.assembler.evict() {
                break;
            }
        }
        if let Some(charge) = self.budget.try_charge_first() {
            return Some(charge);
        }
        if mem::replace(&mut self.is_compact, true) {
            return None;
        }
        self.compact();
        self.budget.try_charge()
    }

    /// Copies payload that was not read behind the payload in front of it, as far as there is room
    /// in the buffers. Small segments then occupy as many buffers as their bytes fill, so that the
    /// window's promise is kept for segments of any size. Cost: each chunk is visited, and bytes
    /// that move are copied once or twice.
    #[cold]
    fn compact(&mut self) {
        let mut chunks = mem::take(&mut self.queue).into_iter();
        let Some(mut last) = chunks.next() else { return };
        for chunk in chunks {
            if !absorb(&mut last, &chunk) {
                self.queue.push_back(mem::replace(&mut last, chunk));
            }
        }
        self.queue.push_back(last);
    }

    /// No buffer is free: copies a chunk that is in order behind the last one that was not read.
    /// Returns whether there was room.
    fn absorb(&mut self, chunk: &T) -> bool {
        let absorbed = self.queue.back_mut().is_some_and(|last| absorb(last, chunk));
        if absorbed {
            self.nxt += chunk.len() as u32;
            self.queued += chunk.len() as u32;
        }
        absorbed
    }

    /// The number of chunks that are out of order.
    pub(super) fn out_of_order(&self) -> usize {
        self.assembler.chunks()
    }

    /// Drops a chunk that is out of order, the one with the highest numbers. Returns false if there
    /// is none.
    pub(super) fn evict(&mut self) -> bool {
        self.assembler.evict()
    }

    fn append(&mut self, chunk: Held<T>) {
        self.is_compact = false;
        self.nxt += chunk.len() as u32;
        self.queued += chunk.len() as u32;
        self.queue.push_back(chunk);
    }

    /// Removes and returns the next chunk for the user. The capacity grows to twice the bytes that
    /// are read in a round trip of `round_trip` microseconds, because a sender can use that much.
    #[inline]
    pub(super) fn read(&mut self, now: Time, round_trip: u64) -> Option<Held<T>> {
        let chunk = self.queue.pop_front()?;
        self.queued -= chunk.len() as u32;
        let (since, read) = &mut self.round;
        *read = read.saturating_add(chunk.len() as u32);
        if now.micros_since(*since) >= round_trip {
            self.capacity = self.capacity.max(read.saturating_mul(2).min(self.most));
            self.round = (now, 0);
        }
        Some(chunk)
    }

    /// The payload that was not read, in order.
    pub(super) fn chunks(&self) -> impl Iterator<Item = &T> {
        self.queue.iter().map(|held| &**held)
    }

    /// The state with which another receiver can continue. Payload that is out of order is not part
    /// of it: the peer keeps that payload until it is acknowledged (RFC 2018, section 8).
    pub(super) fn save(&self) -> SavedReceiver {
        let Self { nxt, edge, scale, capacity, finished, .. } = *self;
        SavedReceiver { nxt, edge, scale, capacity, finished }
    }

    /// Continues from the state of another receiver, with the payload that was not read there.
    pub(super) fn restore(&mut self, saved: &SavedReceiver, unread: impl IntoIterator<Item = T>) {
        (self.scale, self.finished) = (saved.scale.min(14), saved.finished);
        self.capacity = saved.capacity.min(LARGEST_WINDOW);
        self.most = self.most.max(self.capacity);
        for chunk in unread.into_iter().filter(|chunk| !chunk.is_empty()) {
            self.append(Held::new(chunk, self.budget.charge()));
        }
        let promised = saved.edge.max(saved.nxt) - saved.nxt;
        (self.nxt, self.edge) = (saved.nxt, saved.nxt + promised.min(LARGEST_WINDOW));
        self.fin = self.finished.then(|| self.nxt - 1);
    }

    /// Frees memory that is not in use.
    pub(super) fn shrink(&mut self) {
        self.queue.shrink_to_fit();
    }

    /// Drops all payload, because the user has closed the connection.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.queued = 0;
        self.assembler.clear();
    }

    /// The budget in which the connection's buffers are counted.
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The next chunk for the user.
    pub(super) fn peek(&self) -> Option<&T> {
        self.queue.front().map(|held| &**held)
    }

    /// The chunks for the user, in order, from chunk `first` on.
    pub(super) fn queued_from(&self, first: usize) -> impl Iterator<Item = &T> {
        self.queue.range(first.min(self.queue.len())..).map(|held| &**held)
    }

    /// The blocks for an acknowledgement that is sent now: first a range that arrived twice, then
    /// the ranges that are out of order.
    pub(super) fn sack(&self) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        if let Some((from, to)) = self.duplicate {
            blocks.push(from, to);
        }
        // RFC 2883, section 4: the block around a duplicate is the second one. It is the block that
        // changed last.
        self.assembler.report(&mut blocks);
        blocks
    }

    /// Whether [`sack`](Self::sack) returns any block.
    pub(super) fn has_sack(&self) -> bool {
        self.duplicate.is_some() || !self.assembler.is_empty()
    }

    /// Removes the duplicate, because it was reported. Each duplicate is reported once.
    pub(super) fn note_reported(&mut self) {
        self.duplicate = None;
    }

    /// Notes that a segment outside of the window arrived. Its numbers before `nxt` were received
    /// before.
    pub(super) fn note_repeated(&mut self, from: Seq, to: Seq) {
        let to = to.min(self.nxt);
        if from < to {
            self.note_duplicate(from, to);
        }
    }

    /// Notes a range that arrived twice. An acknowledgement reports the first such range, together
    /// with the ranges that directly follow it: segments of a poll share an acknowledgement (RFC
    /// 2883, section 4).
    fn note_duplicate(&mut self, from: Seq, to: Seq) {
        match &mut self.duplicate {
            Some((_, end)) if *end == from => *end = to,
            Some(_) => {}
            none => *none = Some((from, to)),
        }
    }
}

/// Copies `next` behind `chunk`, into its buffer. Returns false if another value uses that, or if
/// it has no room.
fn absorb<T: Chunk>(chunk: &mut Held<T>, next: &T) -> bool {
    let Some(mut tail) = chunk.split_tail() else { return false };
    let Some(copy) = next.copy_to_tail(&mut tail) else { return false };
    debug_assert!(chunk.continues(&copy));
    chunk.join(copy);
    true
}

#[cfg(feature = "compare")]
mod compare;
mod idle;
#[cfg(test)]
mod tests;
mod window;

pub(super) use idle::IdleReceiver;
