//! Peers, and other senders that are not the peer, that want to exhaust or end a connection.

use fastrand::Rng;
use netmem_inet::Time;
use netmem_inet::tcp::{
    Accepted, Budget, Chunk, Config, Connection, Flags, Full, Header, Options, Outgoing, Output, ReadOutcome, Secret,
    SegmentMeta, Seq, State,
};
use netmem_testing::simulated_memory::{self, Memory, Posted, SharedBytes};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// What a connection sends: only the last header is kept.
#[derive(Default)]
struct Sink {
    last: Header,
    segments: usize,
    resets: usize,
}

impl Output<Memory> for Sink {
    fn max_payload(&self) -> usize {
        0
    }

    fn transmit(&mut self, segment: Outgoing<'_, Memory>) -> Result<Accepted<Posted>, Full> {
        self.last = *segment.header;
        self.segments += 1;
        self.resets += usize::from(segment.header.flags.has(Flags::RST));
        Ok(Accepted { ticket: Posted(vec![Rc::new(Cell::new(true))]), len: segment.payload_len })
    }
}

/// A connection that the peer answered, and what the peer knows.
struct Victim {
    connection: Connection<Memory>,
    sink: Sink,
    /// The next sequence number of the peer's stream, and that of the victim's.
    seq: Seq,
    ack: Seq,
    now: Time,
}

fn victim(config: &Config, queue: &Budget) -> Victim {
    let now = Time::from_micros(1_000_000);
    let mut connection = Connection::connect(config, Secret::new([3; 16]).start(&1, now), Some(queue), now);
    let mut sink = Sink::default();
    connection.poll_transmit(now, &mut sink).unwrap();
    let seq = Seq(u32::MAX - 1000);
    let ack = sink.last.seq + 1;
    let options = Options { mss: Some(1460), window_scale: Some(7), sack_permitted: true, ..Options::default() };
    let header =
        Header { seq, ack, flags: Flags::SYN.with(Flags::ACK), window: u16::MAX, options, ..Header::default() };
    connection.handle_segment(&header, None, SegmentMeta::of(0), now);
    connection.poll_transmit(now, &mut sink).unwrap();
    assert_eq!(connection.state(), State::Established);
    Victim { connection, sink, seq: seq + 1, ack, now }
}

impl Victim {
    /// The peer sends payload from `seq` on. The value of each byte is the lowest byte of its
    /// sequence number.
    fn give(&mut self, seq: Seq, len: u32) {
        let header = Header { seq, ack: self.ack, flags: Flags::ACK, window: 1000, ..Header::default() };
        let payload = SharedBytes::new((0..len).map(|n| (seq + n).0 as u8).collect());
        self.connection.handle_segment(&header, Some(payload), SegmentMeta::of(len), self.now);
        self.connection.poll_transmit(self.now, &mut self.sink).unwrap();
    }

    /// The sequence number that the victim acknowledged last.
    fn expected(&self) -> Seq {
        self.sink.last.ack
    }

    /// Reads everything, and checks that it is the stream from `from` on. Returns how much was
    /// read.
    fn read(&mut self, from: Seq) -> u32 {
        let mut at = from;
        while let ReadOutcome::Chunk(chunk) = self.connection.recv(self.now).unwrap() {
            for byte in chunk.bytes().iter() {
                assert_eq!(*byte, at.0 as u8);
                at += 1;
            }
            assert!(!chunk.is_empty());
        }
        self.connection.poll_transmit(self.now, &mut self.sink).unwrap();
        at - from
    }
}

/// 64 buffers, and a window of a mebibyte.
fn tight() -> Config {
    Config { budget: 64, receive_buffer: 1 << 20, fixed_window: true, timestamps: false, ..Config::default() }
}

#[test]
fn a_peer_that_sends_one_byte_in_a_segment_takes_no_more_than_the_budget() {
    let queue = Budget::new(100);
    let mut victim = victim(&tight(), &queue);
    let start = victim.seq;
    // The window has room for all of them, and the user reads nothing.
    for n in 0..100_000 {
        victim.give(start + n, 1);
        assert!(victim.connection.info(victim.now).buffers <= 64 && queue.used() <= 64);
    }
    // Payload that is not read is compacted: 25 buffers hold it.
    let held = victim.connection.info(victim.now).buffers;
    assert_eq!(victim.expected() - start, 100_000, "the window promised it");
    assert!((25..64).contains(&held), "{held}");
    let mut at = start + victim.read(start);
    for _ in 0..1000 {
        victim.give(at, 1);
        at += victim.read(at);
    }
    assert_eq!(at - start, 100_000 + 1000);
    drop(victim);
    assert_eq!((queue.used(), simulated_memory::live()), (0, 0));
}

#[test]
fn a_peer_that_reorders_for_ever_does_not_stop_others() {
    let queue = Budget::new(80);
    let mut victims = [victim(&tight(), &queue), victim(&tight(), &queue)];
    let start = victims[0].seq;
    for n in 0..100_000 {
        // Every second byte, so that each is a gap of its own. The first byte is never sent.
        victims[0].give(start + 1 + 2 * n, 1);
        assert!(victims[0].connection.info(victims[0].now).buffers <= 64 && queue.used() <= 80);
    }
    assert_eq!(victims[0].expected(), start);
    // The other connection of this queue receives and reads undisturbed.
    for n in 0..1000 {
        victims[1].give(start + 1000 * n, 1000);
        assert_eq!(victims[1].read(start + 1000 * n), 1000);
    }
    // The first connection goes on when the gap is closed: payload out of order makes room for
    // payload in order.
    victims[0].give(start, 1);
    assert!(victims[0].read(start) >= 1);
    drop(victims);
    assert_eq!((queue.used(), simulated_memory::live()), (0, 0));
}

/// RFC 5961. The attacker knows addresses and ports, and guesses numbers. It sends 1,000 segments
/// each millisecond.
#[test]
fn a_million_forged_segments_change_nothing() {
    let queue = Budget::new(1000);
    let mut victim = victim(&Config { timestamps: false, ..Config::default() }, &queue);
    let mut rng = Rng::with_seed(1);
    let start = victim.seq;
    let payload = SharedBytes::new(vec![0xee; 100]);
    let mut answers = 0;
    for n in 0..1_000_000 {
        if n % 1000 == 0 {
            victim.now += Duration::from_millis(1);
        }
        // One segment in eight simulates a lucky guess: its number is in the window, but is not the
        // next expected number.
        let seq = if rng.u8(0..8) == 0 { victim.expected() + rng.u32(1..30_000) } else { Seq(rng.u32(..)) };
        let flags = [Flags::RST, Flags::SYN, Flags::ACK, Flags::FIN.with(Flags::ACK), Flags::RST.with(Flags::ACK)]
            [rng.usize(0..5)];
        let header = Header { seq, ack: Seq(rng.u32(..)), flags, window: rng.u16(..), ..Header::default() };
        let data = rng.bool().then(|| payload.clone());
        let len = if data.is_some() { 100 } else { 0 };
        let before = victim.sink.segments;
        victim.connection.handle_segment(&header, data, SegmentMeta::of(len), victim.now);
        victim.connection.poll_transmit(victim.now, &mut victim.sink).unwrap();
        // Payload or FIN outside of the window looks like a retransmission whose acknowledgement
        // was lost, so it is answered.
        answers += if len == 0 && !flags.has(Flags::FIN) { victim.sink.segments - before } else { 0 };
    }
    assert_eq!((victim.connection.state(), victim.sink.resets), (State::Established, 0));
    assert!((1..100).contains(&answers), "{answers} answers in a second");
    // Both directions work as before.
    victim.give(start, 1000);
    assert_eq!(victim.read(start), 1000);
    victim.connection.send(SharedBytes::new(vec![1; 10]), false).unwrap();
    victim.connection.poll_transmit(victim.now, &mut victim.sink).unwrap();
    assert_eq!(victim.sink.last.seq, victim.ack);
    drop((victim, payload));
    assert_eq!((queue.used(), simulated_memory::live()), (0, 0));
}
