//! Helpers of unit tests: payload whose bytes are computed from their numbers, and two ends of a
//! connection.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::{
    Accepted, Carrier, Chunk, Config, Connection, Event, Flags, Full, Header, Outgoing, Output, ReadOutcome,
    SegmentMeta, Seq, Start, State, Ticket,
};
use crate::time::Time;

/// A range of shared bytes.
#[derive(Clone, Debug)]
pub(crate) struct SharedBytes {
    bytes: Rc<[u8]>,
    from: usize,
    to: usize,
}

impl SharedBytes {
    /// `len` bytes, the first of which has the number `seq`.
    pub(crate) fn numbered(seq: u32, len: u32) -> Self {
        Self::from((0..len).map(|n| seq.wrapping_add(n).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]).collect::<Vec<_>>())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self { from: 0, to: bytes.len(), bytes: bytes.into() }
    }
}

/// Two ranges are equal if their bytes are equal, even in different memory.
impl PartialEq for SharedBytes {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Chunk for SharedBytes {
    type Tail = ();

    fn continues(&self, next: &Self) -> bool {
        Rc::ptr_eq(&self.bytes, &next.bytes) && self.to == next.from
    }

    fn join(&mut self, next: Self) {
        self.to = next.to;
    }

    fn len(&self) -> usize {
        self.to - self.from
    }

    fn advance(&mut self, n: usize) {
        assert!(n <= self.len());
        self.from += n;
    }

    fn truncate(&mut self, len: usize) {
        assert!(len <= self.len());
        self.to = self.from + len;
    }
}

/// How many segments of a transmission are complete; all are at `u32::MAX`.
#[derive(Clone, Debug)]
pub(crate) struct Done(Rc<Cell<u32>>);

impl Done {
    pub(crate) fn pending() -> Self {
        Self(Rc::new(Cell::new(0)))
    }

    pub(crate) fn at_once() -> Self {
        Self(Rc::new(Cell::new(u32::MAX)))
    }

    pub(crate) fn finish(&self) {
        self.0.set(u32::MAX);
    }

    /// Finishes the first `n` segments.
    pub(crate) fn finish_first(&self, n: u32) {
        self.0.set(n);
    }
}

impl Ticket for Done {
    fn is_done(&self) -> bool {
        self.0.get() == u32::MAX
    }

    fn is_done_with(&self, n: u32) -> bool {
        n < self.0.get()
    }
}

/// The carrier of the tests: shared bytes in both directions.
#[derive(Clone, Debug)]
pub(crate) struct TestCarrier;

impl Carrier for TestCarrier {
    type Received = SharedBytes;
    type Sent = SharedBytes;
    type Ticket = Done;
}

/// A segment on the link.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) header: Header,
    pub(crate) payload: Vec<SharedBytes>,
    pub(crate) ect: bool,
}

impl Sent {
    pub(crate) fn len(&self) -> u32 {
        self.payload.iter().map(|piece| piece.len() as u32).sum()
    }

    pub(crate) fn has(&self, flags: Flags) -> bool {
        self.header.flags.has(flags)
    }
}

/// A ring with `room` entries, whose transmissions are complete at once. It cuts up to `unit` bytes
/// into segments, each of which is an entry.
pub(crate) struct Ring {
    pub(crate) room: usize,
    pub(crate) unit: usize,
    pub(crate) segments: Vec<Sent>,
}

impl Ring {
    pub(crate) fn new() -> Self {
        Self { room: usize::MAX, unit: 0, segments: Vec::new() }
    }
}

impl Output<TestCarrier> for Ring {
    fn max_payload(&self) -> usize {
        self.unit
    }

    fn transmit(&mut self, segment: Outgoing<'_, TestCarrier>) -> Result<Accepted<Done>, Full> {
        self.room = self.room.checked_sub(1).ok_or(Full)?;
        let Outgoing { header, payload, payload_len: len, segment_size, ect, .. } = segment;
        assert_eq!(payload.iter().map(Chunk::len).sum::<usize>(), len as usize);
        if len <= segment_size {
            self.segments.push(Sent { header: *header, payload: payload.to_vec(), ect });
            return Ok(Accepted { ticket: Done::at_once(), len });
        }
        assert!(len as usize <= self.unit, "what cannot be cut is one segment");
        let bytes: Vec<u8> = payload.iter().flat_map(|chunk| chunk.bytes().to_vec()).collect();
        let room = (self.room + 1).min(len.div_ceil(segment_size) as usize);
        self.room -= room - 1;
        for (n, part) in bytes.chunks(segment_size as usize).enumerate().take(room) {
            let (at, last) = (n as u32 * segment_size, n as u32 * segment_size + part.len() as u32 == len);
            let keep = if last { header.flags } else { header.flags.without(Flags::FIN.with(Flags::PSH)) };
            let flags = if n == 0 { keep } else { keep.without(Flags::CWR) };
            let header = Header { seq: header.seq + at, flags, ..*header };
            self.segments.push(Sent { header, payload: vec![part.to_vec().into()], ect });
        }
        Ok(Accepted { ticket: Done::at_once(), len: len.min(room as u32 * segment_size) })
    }
}

/// One end of a connection, with the segments that it sent last, and its events.
pub(crate) struct End {
    pub(crate) tcp: Connection<TestCarrier>,
    pub(crate) events: Vec<Event>,
    pub(crate) read: Vec<u8>,
}

impl End {
    pub(crate) fn new(tcp: Connection<TestCarrier>) -> Self {
        Self { tcp, events: Vec::new(), read: Vec::new() }
    }

    pub(crate) fn output(&mut self, now: Time) -> Vec<Sent> {
        let mut ring = Ring::new();
        self.tcp.poll_transmit(now, &mut ring).unwrap();
        self.events.extend(std::iter::from_fn(|| self.tcp.poll_event()));
        ring.segments
    }

    pub(crate) fn input(&mut self, sent: &Sent, now: Time) {
        self.tcp.handle_segment(&sent.header, sent.payload.clone(), SegmentMeta::of(sent.len()), now);
    }

    /// Passes a segment without payload to the connection, and returns the segments that it sends
    /// then.
    pub(crate) fn answer(&mut self, header: Header, now: Time) -> Vec<Sent> {
        self.input(&Sent { header, payload: Vec::new(), ect: false }, now);
        self.output(now)
    }

    /// Passes a segment with `len` bytes, whose values are computed from their numbers.
    pub(crate) fn answer_text(&mut self, header: Header, len: u32, now: Time) -> Vec<Sent> {
        self.input(&Sent { header, payload: vec![SharedBytes::numbered(header.seq.0, len)], ect: false }, now);
        self.output(now)
    }

    pub(crate) fn read(&mut self, now: Time) {
        while let Ok(ReadOutcome::Chunk(chunk)) = self.tcp.recv(now) {
            self.read.extend_from_slice(chunk.bytes());
        }
    }
}

/// Two ends and a link without delay.
pub(crate) struct Pair {
    pub(crate) a: End,
    pub(crate) b: End,
    pub(crate) now: Time,
    /// All segments that were sent, each with whether `a` sent it.
    pub(crate) log: Vec<(bool, Sent)>,
}

pub(crate) fn start(iss: u32) -> Start {
    Start { iss: Seq(iss), timestamp_offset: iss.rotate_left(7) }
}

impl Pair {
    /// Two ends, after SYN was sent and answered once. `a` has opened the connection.
    pub(crate) fn new(a: &Config, b: &Config) -> Self {
        let now = Time::from_micros(1_000_000);
        let mut a = End::new(Connection::connect(a, start(u32::MAX - 10), None, now));
        let syn = a.output(now).remove(0);
        let b = End::new(Connection::answer(&syn.header, b, start(7), None, now));
        Self { a, b, now, log: vec![(true, syn)] }
    }

    /// Both ends, connected.
    pub(crate) fn connected(a: &Config, b: &Config) -> Self {
        let mut pair = Self::new(a, b);
        pair.settle();
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::Established, State::Established));
        assert_eq!((pair.a.events.remove(0), pair.b.events.remove(0)), (Event::Connected, Event::Connected));
        pair
    }

    /// Exchanges segments until none is left. Returns the segments that were sent, each with
    /// whether `a` sent it.
    pub(crate) fn settle(&mut self) -> Vec<(bool, Sent)> {
        let before = self.log.len();
        loop {
            let sent = self.a.output(self.now);
            sent.iter().for_each(|sent| self.b.input(sent, self.now));
            let back = self.b.output(self.now);
            back.iter().for_each(|sent| self.a.input(sent, self.now));
            if sent.is_empty() && back.is_empty() {
                return self.log[before..].to_vec();
            }
            self.log.extend(sent.into_iter().map(|sent| (true, sent)));
            self.log.extend(back.into_iter().map(|sent| (false, sent)));
        }
    }

    /// Advances the time by `time`, with timeouts and segments.
    pub(crate) fn pass(&mut self, time: Duration) -> Vec<(bool, Sent)> {
        let (until, before) = (self.now + time, self.log.len());
        self.settle();
        while let Some(next) = self.a.tcp.poll_timeout().into_iter().chain(self.b.tcp.poll_timeout()).min()
            && next <= until
        {
            self.now = self.now.max(next);
            self.a.tcp.handle_timeout(self.now);
            self.b.tcp.handle_timeout(self.now);
            self.settle();
        }
        self.now = until;
        self.log[before..].to_vec()
    }

    /// A header that `a` would send now.
    pub(crate) fn header_of_a(&self, flags: Flags) -> Header {
        self.a.tcp.header(self.a.tcp.sender.next_seq(), flags, self.now).0
    }
}

/// `len` bytes to be sent, whose values follow from their places in the stream.
pub(crate) fn stream(from: usize, len: usize) -> SharedBytes {
    SharedBytes::numbered(from as u32, len as u32)
}
