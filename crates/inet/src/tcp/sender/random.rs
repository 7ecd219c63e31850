//! Random tests of a sender with a receiver that follows RFC 9293 and 2018, over a path with seeded
//! faults. With all faults, all bytes arrive, counts stay correct, and nothing is sent again while
//! its earlier copy is in the ring.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::*;
use crate::tcp::testing::{Done, SharedBytes, TestCarrier};
use crate::tcp::{Chunk, Congestion, Seq};
use crate::time::Time;

/// The receiver: the ranges of bytes that it has.
struct Receiver {
    next: Seq,
    /// Ranges behind a hole, as distances from the first number.
    behind: BTreeMap<u32, u32>,
    recent: Vec<u32>,
    sack: bool,
}

impl Receiver {
    /// Processes a segment, and returns the SACK blocks of the acknowledgement. Their numbers are
    /// counted from 1.
    fn receive(&mut self, from: Seq, to: Seq) -> Vec<(Seq, Seq)> {
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

/// One connection over a path that loses, delays, reorders and marks.
struct Simulation {
    seed: u64,
    rng: fastrand::Rng,
    /// The part of the segments that is lost, in percent.
    loss: u64,
    /// The longest delay besides that of the path, in milliseconds.
    jitter: u64,
    timestamps: bool,
    /// Whether transmissions stay in the ring for a while.
    pending: bool,
    offload: usize,
    sender: Sender<TestCarrier>,
    receiver: Receiver,
    iss: Seq,
    /// What happens, in the order of the times. Of two events at a time, the one with the lower
    /// number was added first.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    added: u64,
    now: u64,
    total: u32,
    to_write: u32,
    finished: bool,
    window: u32,
    sent_segments: u64,
    /// Transmissions that may be in the ring, each with its first number and the one after its
    /// last.
    tickets: Vec<(Done, u32, u32)>,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (loss, jitter) = (rng.u64(0..15), rng.u64(0..40));
        let (sack, timestamps, ecn, pending) = (rng.u8(0..4) > 0, rng.bool(), rng.u8(0..4) == 0, rng.bool());
        let offload = if rng.bool() { 0 } else { 20_000 };
        let total = rng.u32(1..300_000);
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
        let mut sender = Sender::new(iss, 1460, options);
        let window = 100_000;
        let negotiated = Negotiated { mss: 1012, sack, timestamps, ecn, window, seq: Seq(0) };
        sender.establish(&negotiated, Time::ZERO);
        Self {
            seed,
            rng,
            loss,
            jitter,
            timestamps,
            pending,
            offload,
            sender,
            receiver: Receiver { next: Seq(1), behind: BTreeMap::new(), recent: vec![], sack },
            iss,
            events: BinaryHeap::from([Reverse((50_000, 0, Event::Write))]),
            added: 0,
            now: 0,
            total,
            to_write: total,
            finished: false,
            window,
            sent_segments: 0,
            tickets: Vec::new(),
        }
    }

    fn time(&self) -> Time {
        Time::from_micros(self.now)
    }

    fn add(&mut self, at: u64, event: Event) {
        self.events.push(Reverse((at, self.added, event)));
        self.added += 1;
    }

    fn is_lost(&mut self) -> bool {
        self.rng.u64(0..100) < self.loss
    }

    /// Runs the connection to its end. Returns its duration in milliseconds and the number of sent
    /// segments.
    fn run(mut self) -> (u64, u64) {
        loop {
            self.transmit();
            if self.sender.is_idle() && self.finished {
                assert_eq!(self.receiver.next.0, self.total + 2, "data and FIN");
                return (self.now / 1000, self.sent_segments);
            }
            let deadline = self.sender.poll_timeout().map(Time::micros);
            let event = self.events.peek().map(|Reverse((at, ..))| *at);
            let (seed, info) = (self.seed, self.sender.info(self.time()));
            assert!(deadline.is_some() || event.is_some(), "seed {seed}: nothing will ever happen");
            assert!(
                self.sent_segments < 20_000 && self.now < 4_000_000_000,
                "seed {seed}: no end: {} {} window {} {info:?} {:?}",
                self.now,
                self.sent_segments,
                self.window,
                self.sender.timer
            );
            if deadline.is_some_and(|deadline| event.is_none_or(|event| deadline < event)) {
                self.now = deadline.map_or(self.now, |deadline| deadline.max(self.now));
                let result = self.sender.handle_timeout(self.time());
                assert!(result.is_ok(), "seed {seed}: {result:?} {} {} {info:?}", self.loss, self.pending);
                self.sender.scoreboard.check();
                continue;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else { continue };
            self.now = at.max(self.now);
            self.handle(event);
        }
    }

    /// Makes the transmissions that the sender chooses. No range may be sent again while its
    /// earlier copy is in the ring.
    fn transmit(&mut self) {
        while let Some(transmission) = self.sender.poll_transmit(self.time(), self.offload) {
            let transmission = self.accepted(&transmission);
            let Transmission { seq, len, syn, fin, .. } = transmission;
            let end = seq + len + u32::from(syn) + u32::from(fin);
            let mut at = seq.0;
            for chunk in self.sender.payload(&transmission) {
                assert_eq!(chunk, &SharedBytes::numbered(at, chunk.len() as u32), "foreign bytes");
                at = at.wrapping_add(chunk.len() as u32);
            }
            assert_eq!(at, (seq + len).0);
            // The receiver counts from the first number.
            let (seq, end) = (Seq(seq - self.iss), Seq(end - self.iss));
            self.tickets.retain(|(ticket, ..)| !crate::tcp::Ticket::is_done(ticket));
            assert!(self.tickets.iter().all(|(_, s, e)| *e <= seq.0 || end.0 <= *s), "a copy is still in the ring");
            let ticket = if self.pending { Done::pending() } else { Done::at_once() };
            self.sender.handle_sent(&transmission, ticket.clone(), self.time());
            self.sender.scoreboard.check();
            if self.pending {
                self.tickets.push((ticket, seq.0, end.0));
                let at = self.now + self.rng.u64(1..3000);
                self.add(at, Event::Done(0));
            }
            self.carry(&transmission, seq, end);
        }
    }

    /// The part of a transmission for which the ring has room: whole segments.
    fn accepted(&mut self, transmission: &Transmission) -> Transmission {
        let Transmission { len, segment_size: size, .. } = *transmission;
        if len <= size || self.rng.bool() {
            return *transmission;
        }
        transmission.cut(self.rng.u32(1..=len / size) * size)
    }

    /// Cuts a transmission into segments, and puts those on the path that are not lost.
    fn carry(&mut self, transmission: &Transmission, mut from: Seq, end: Seq) {
        let Transmission { fin, segment_size, ect, .. } = *transmission;
        loop {
            let to = end.min(from + segment_size.max(1));
            let to = if end - to == u32::from(fin) { end } else { to };
            self.sent_segments += 1;
            if self.is_lost() {
                self.added += 1;
            } else {
                let delay = 10_000 + self.rng.u64(0..=self.jitter * 1000);
                let marked = ect && self.rng.u8(0..50) == 0;
                let stamp = self.sender.timestamp(self.time());
                self.add(self.now + delay, Event::Segment { from: from.0, to: to.0, marked, stamp });
            }
            from = to;
            if from >= end {
                break;
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Write => self.write(),
            Event::Segment { from, to, marked, stamp } => {
                let blocks = self.receiver.receive(Seq(from), Seq(to));
                if self.rng.u8(0..if self.window == 0 { 2 } else { 20 }) == 0 {
                    self.window = [0, 500, 3000, 100_000][self.rng.usize(0..4)];
                }
                if !self.is_lost() {
                    let blocks = blocks.iter().map(|(from, to)| (from.0, to.0)).collect();
                    let (ack, window) = (self.receiver.next.0, self.window);
                    let ack = Event::Ack { ack, window, blocks, echo: stamp, ece: marked };
                    let at = self.now + 10_000 + self.rng.u64(0..=self.jitter * 1000);
                    self.add(at, ack);
                }
            }
            Event::Ack { ack, window, blocks, echo, ece } => {
                let blocks: Vec<_> = blocks.iter().map(|(from, to)| (self.iss + *from, self.iss + *to)).collect();
                let echo = self.timestamps.then_some(echo);
                let ack = Ack { seq: Seq(1), ack: self.iss + ack, window, sack: &blocks, echo, ece, data: false };
                self.sender.handle_ack(&ack, self.time());
                self.sender.scoreboard.check();
                assert!(self.sender.window.cwnd > 0);
            }
            Event::Done(_) => {
                if let Some(n) = (!self.tickets.is_empty()).then(|| self.rng.usize(0..self.tickets.len())) {
                    self.tickets.swap_remove(n).0.finish();
                }
            }
        }
    }

    /// The user queues what the send buffer admits. FIN follows the last byte.
    fn write(&mut self) {
        while self.sender.room() > 0 && self.to_write > 0 && !self.finished {
            let len = self.rng.u32(1..20_000).min(self.to_write);
            let chunk = SharedBytes::numbered(self.sender.end().0, len);
            self.sender.send(chunk, self.rng.u8(0..5) == 0).expect("there is room");
            self.to_write -= len;
        }
        if self.to_write == 0 && !self.finished {
            self.sender.finish();
            self.finished = true;
        } else if !self.finished {
            let at = self.now + self.rng.u64(1..400_000);
            self.add(at, Event::Write);
        }
    }
}

#[test]
fn every_byte_arrives_whatever_the_path_does() {
    for seed in 0..300 {
        Simulation::new(seed).run();
    }
}

/// A peer that sends random acknowledgements, blocks, windows, timestamps and marks.
fn lie(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let iss = Seq(rng.u32(..));
    let options = SendOptions { send_buffer: 40_000, mtu_probing: rng.bool(), ..SendOptions::default() };
    let mut sender = Sender::<TestCarrier>::new(iss, 1460, options);
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
            1 | 2 => drop(sender.send(SharedBytes::numbered(sender.end().0, rng.u32(1..9000)), rng.bool())),
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
        sender.scoreboard.check();
        for _ in 0..1000 {
            let Some(transmission) = sender.poll_transmit(Time::from_micros(now), 20_000) else { break };
            let payload = sender.payload(&transmission).iter().map(Chunk::len).sum::<usize>();
            assert_eq!(payload, transmission.len as usize);
            sender.handle_sent(&transmission, Done::at_once(), Time::from_micros(now));
            sender.scoreboard.check();
        }
        assert!(sender.scoreboard.ranges() <= sender.scoreboard.unacked() as usize, "no more ranges than segments");
        assert!(sender.window.cwnd > 0 && sender.window.ssthresh > 1);
        let waits = !sender.scoreboard.is_empty() || (sender.unsent() > 0 && sender.agreed.is_some());
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
