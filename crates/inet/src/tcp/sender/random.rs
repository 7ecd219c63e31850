//! Random tests of a sender with a receiver that follows RFC 9293 and 2018, over a path with seeded faults. With all
//! faults, all bytes arrive, counts stay correct, and nothing is sent again while its earlier copy is in the ring.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::*;
use crate::tcp::Congestion;
use crate::tcp::testing::{Done, Piece, Pieces};

/// The receiver: the ranges of bytes that it has.
struct Receiver {
    next: Seq,
    /// Ranges behind a hole, as distances from the first number.
    behind: BTreeMap<u32, u32>,
    recent: Vec<u32>,
    sack: bool,
}

impl Receiver {
    /// Takes a segment, and returns the SACK blocks of the acknowledgement. Their numbers are counted from 1.
    fn take(&mut self, from: Seq, to: Seq) -> Vec<(Seq, Seq)> {
        let mut blocks = Vec::new();
        let known = to <= self.next || self.behind.iter().any(|(start, end)| Seq(*start) <= from && to <= Seq(*end));
        if known {
            blocks.push((from, to)); // D-SACK
        } else {
            let (mut start, mut end) = (from.max(self.next).0, to.0);
            let touched: Vec<_> =
                self.behind.range(..=end).filter(|(_, e)| **e >= start).map(|(s, e)| (*s, *e)).collect();
            for (s, e) in touched {
                (start, end) = (start.min(s), end.max(e));
                self.behind.remove(&s);
                self.recent.retain(|r| *r != s);
            }
            if start == self.next.0 {
                self.next = Seq(end);
            } else {
                self.behind.insert(start, end);
                self.recent.insert(0, start);
            }
        }
        blocks.extend(self.recent.iter().map(|start| (Seq(*start), Seq(self.behind[start]))));
        blocks.truncate(if self.sack { 3 } else { 0 });
        blocks
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Segment { from: u32, to: u32, marked: bool, stamp: u32 },
    Ack { ack: u32, window: u32, blocks: Vec<(u32, u32)>, echo: u32, ece: bool },
    Done(usize),
    Write,
}

/// Runs one connection to its end. Returns its duration in milliseconds and the number of sent segments.
fn run(seed: u64) -> (u64, u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (loss, jitter) = (rng.u64(0..15), rng.u64(0..40));
    let (sack, timestamps, ecn, pending) = (rng.u8(0..4) > 0, rng.bool(), rng.u8(0..4) == 0, rng.bool());
    let offload = if rng.bool() { 0 } else { 20_000 };
    let mut to_write = rng.u32(1..300_000);
    let total = to_write;
    let options = SendOptions {
        congestion: if rng.bool() { Congestion::Cubic } else { Congestion::NewReno },
        send_buffer: 60_000,
        ring_bytes: 20_000,
        syn_retries: 20,
        retries: 30,
        mtu_probing: rng.bool(),
        ..SendOptions::default()
    };
    let iss = Seq(if rng.bool() { rng.u32(..) } else { 0_u32.wrapping_sub(rng.u32(0..=total)) });
    let mut sender = Sender::<Pieces>::new(iss, 1460, options);
    let mut receiver = Receiver { next: Seq(1), behind: BTreeMap::new(), recent: vec![], sack };
    let mut events = BinaryHeap::from([Reverse((50_000, 0, Event::Write))]);
    let (mut now, mut count, mut sent_segments, mut done) = (0, 0_u64, 0, false);
    let mut tickets: Vec<(Done, u32, u32)> = Vec::new();
    let mut window = 100_000;
    let negotiated = Negotiated { mss: 1012, sack, timestamps, ecn, window, seq: Seq(0) };
    sender.establish(&negotiated, Time::ZERO);
    loop {
        let time = Time::from_micros(now);
        while let Some(transmission) = sender.poll_transmit(time, offload) {
            let Transmission { seq, len, syn, fin, segment_size, ect, .. } = transmission;
            let end = seq + len + u32::from(syn) + u32::from(fin);
            let mut at = seq.0;
            for chunk in sender.payload(&transmission) {
                assert_eq!(chunk, &Piece::numbered(at, chunk.len() as u32), "foreign bytes");
                at = at.wrapping_add(chunk.len() as u32);
            }
            assert_eq!(at, (seq + len).0);
            // The receiver counts from the first number.
            let (seq, end) = (Seq(seq - iss), Seq(end - iss));
            tickets.retain(|(ticket, ..)| !crate::tcp::Ticket::is_done(ticket));
            assert!(tickets.iter().all(|(_, s, e)| *e <= seq.0 || end.0 <= *s), "a copy is still in the ring");
            let ticket = if pending { Done::pending() } else { Done::at_once() };
            sender.handle_sent(&transmission, ticket.clone(), time);
            sender.board.check();
            if pending {
                tickets.push((ticket, seq.0, end.0));
                events.push(Reverse((now + rng.u64(1..3000), count, Event::Done(0))));
                count += 1;
            }
            let mut from = seq;
            loop {
                let to = end.min(from + segment_size.max(1));
                let to = if end - to == u32::from(fin) { end } else { to };
                sent_segments += 1;
                if rng.u64(0..100) >= loss {
                    let delay = 10_000 + rng.u64(0..=jitter * 1000);
                    let marked = ect && rng.u8(0..50) == 0;
                    let stamp = sender.timestamp(time);
                    events.push(Reverse((
                        now + delay,
                        count,
                        Event::Segment { from: from.0, to: to.0, marked, stamp },
                    )));
                }
                count += 1;
                from = to;
                if from >= end {
                    break;
                }
            }
        }
        if sender.is_idle() && done {
            assert_eq!(receiver.next.0, total + 2, "data and FIN");
            return (now / 1000, sent_segments);
        }
        let deadline = sender.poll_timeout().map(Time::micros);
        let event = events.peek().map(|Reverse((at, ..))| *at);
        assert!(deadline.is_some() || event.is_some(), "seed {seed}: nothing will ever happen");
        assert!(
            sent_segments < 20_000 && now < 4_000_000_000,
            "seed {seed}: no end: {now} {sent_segments} window {window} {:?} {:?}",
            sender.info(time),
            sender.timer
        );
        if deadline.is_some_and(|deadline| event.is_none_or(|event| deadline < event)) {
            now = deadline.map_or(now, |deadline| deadline.max(now));
            let result = sender.handle_timeout(Time::from_micros(now));
            assert!(result.is_ok(), "seed {seed}: {result:?} {loss} {pending} {:?}", sender.info(time));
            sender.board.check();
            continue;
        }
        let Some(Reverse((at, _, event))) = events.pop() else { continue };
        now = at.max(now);
        let time = Time::from_micros(now);
        match event {
            Event::Write => {
                while sender.room() > 0 && to_write > 0 && !done {
                    let len = rng.u32(1..20_000).min(to_write);
                    sender.send(Piece::numbered(sender.end().0, len), rng.u8(0..5) == 0).expect("there is room");
                    to_write -= len;
                }
                if to_write == 0 && !done {
                    sender.finish();
                    done = true;
                } else if !done {
                    events.push(Reverse((now + rng.u64(1..400_000), count, Event::Write)));
                    count += 1;
                }
            }
            Event::Segment { from, to, marked, stamp } => {
                let blocks = receiver.take(Seq(from), Seq(to));
                if rng.u8(0..if window == 0 { 2 } else { 20 }) == 0 {
                    window = [0, 500, 3000, 100_000][rng.usize(0..4)];
                }
                if rng.u64(0..100) >= loss {
                    let blocks = blocks.iter().map(|(from, to)| (from.0, to.0)).collect();
                    let ack = Event::Ack { ack: receiver.next.0, window, blocks, echo: stamp, ece: marked };
                    events.push(Reverse((now + 10_000 + rng.u64(0..=jitter * 1000), count, ack)));
                    count += 1;
                }
            }
            Event::Ack { ack, window, blocks, echo, ece } => {
                let blocks: Vec<_> = blocks.iter().map(|(from, to)| (iss + *from, iss + *to)).collect();
                let echo = timestamps.then_some(echo);
                let ack = Ack { seq: Seq(1), ack: iss + ack, window, sack: &blocks, echo, ece, data: false };
                sender.handle_ack(&ack, time);
                sender.board.check();
                assert!(sender.window.cwnd > 0);
            }
            Event::Done(_) => {
                if let Some(n) = (!tickets.is_empty()).then(|| rng.usize(0..tickets.len())) {
                    tickets.swap_remove(n).0.finish();
                }
            }
        }
    }
}

#[test]
fn every_byte_arrives_whatever_the_path_does() {
    for seed in 0..300 {
        run(seed);
    }
}

/// A peer that sends random acknowledgements, blocks, windows, timestamps and marks.
fn lie(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let iss = Seq(rng.u32(..));
    let options = SendOptions { send_buffer: 40_000, mtu_probing: rng.bool(), ..SendOptions::default() };
    let mut sender = Sender::<Pieces>::new(iss, 1460, options);
    let (sack, ecn) = (rng.u8(0..4) > 0, rng.bool());
    let mut now = 0;
    for step in 0..400 {
        let time = Time::from_micros(now);
        let near = |rng: &mut fastrand::Rng| match rng.u8(0..10) {
            0 => Seq(rng.u32(..)),
            1..=3 => sender.una + rng.u32(0..45) * 1000,
            4 => sender.una - rng.u32(0..3000),
            _ => sender.una + rng.u32(0..=(sender.nxt - sender.una) + 1),
        };
        match rng.u8(0..12) {
            0 if step == 0 || sender.agreed.is_none() => {
                let mss = [0, 1, 100, 1460, u16::MAX][rng.usize(0..5)];
                let window = rng.u32(0..1 << 30);
                sender.establish(&Negotiated { mss, sack, timestamps: rng.bool(), ecn, window, seq: Seq(0) }, time);
            }
            0 => drop(sender.handle_too_big(near(&mut rng), rng.u32(0..2000), time)),
            1 | 2 => drop(sender.send(Piece::numbered(sender.end().0, rng.u32(1..9000)), rng.bool())),
            3 => now += rng.u64(0..100_000),
            4 => {
                if let Some(deadline) = sender.poll_timeout() {
                    now = now.max(deadline.micros());
                    if sender.handle_timeout(Time::from_micros(now)).is_err() {
                        return;
                    }
                }
            }
            _ => {
                let blocks: Vec<_> = (0..rng.usize(0..5)).map(|_| (near(&mut rng), near(&mut rng))).collect();
                let window = [0, 1, 700, 1 << 20][rng.usize(0..4)];
                let (ack, echo) = (near(&mut rng), rng.bool().then(|| rng.u32(..)));
                let ack = Ack {
                    seq: Seq(rng.u32(0..9)),
                    ack,
                    window,
                    sack: &blocks,
                    echo,
                    ece: rng.bool(),
                    data: rng.bool(),
                };
                sender.handle_ack(&ack, time);
            }
        }
        sender.board.check();
        for _ in 0..1000 {
            let Some(transmission) = sender.poll_transmit(Time::from_micros(now), 20_000) else { break };
            let payload = sender.payload(&transmission).iter().map(Chunk::len).sum::<usize>();
            assert_eq!(payload, transmission.len as usize);
            sender.handle_sent(&transmission, Done::at_once(), Time::from_micros(now));
            sender.board.check();
        }
        assert!(sender.board.ranges() <= sender.board.out() as usize, "no more ranges than segments");
        assert!(sender.window.cwnd > 0 && sender.window.ssthresh > 1);
        let waits = !sender.board.is_empty() || (sender.unsent() > 0 && sender.agreed.is_some());
        assert!(
            !waits || sender.poll_timeout().is_some(),
            "seed {seed}, step {step}: nothing would ever happen: {sender:?}"
        );
    }
}

#[test]
fn a_peer_that_lies_gets_no_more_than_segments() {
    for seed in 0..500 {
        lie(seed);
    }
}
