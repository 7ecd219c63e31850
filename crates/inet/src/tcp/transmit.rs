//! Output of segments.

use super::connection::{Connection, Stall, State};
use super::record::Left;
use super::sender::Kind;
use super::{Carrier, Ecn, Flags, Full, Header, Options, Outgoing, Output, SackBlocks, Seq};
use crate::Time;

impl<C: Carrier> Connection<C> {
    /// Sends everything that may be sent now: a reply, payload, acknowledgements.
    ///
    /// # Errors
    /// The output has refused a segment. Segments that were not sent are kept: call this again when the ring has room,
    /// or the next hop is resolved. Until then a timer runs as long as a retransmission timer would, and its expirations
    /// count as retransmissions. Nothing was lost, so that the congestion window, the round trip and the detection of
    /// losses do not change.
    pub fn transmit(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        let result = self.send_all(now, out);
        self.stall = match result {
            Ok(()) => None,
            Err(Full) => self.stall.or_else(|| Some(Stall { at: now + self.sender.backoff(0), expired: 0 })),
        };
        if let Some(tape) = &mut self.tape {
            tape.transmitted(now, out.max_payload(), result.is_err(), self.sender.settled());
        }
        result
    }

    fn send_all(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        if let Some(header) = self.reply {
            out.segment(empty(&header))?;
            self.reply = None;
            self.note_left(&header, 0, false);
            if header.flags.has(Flags::ACK) && !header.flags.has(Flags::RST) {
                let shift = if header.flags.has(Flags::SYN) { 0 } else { self.receiver.scale() };
                self.receiver.promised(header.ack + (u32::from(header.window) << shift));
            }
        }
        if self.state == State::Closed {
            return Ok(());
        }
        // A segment with payload has no room for SACK blocks.
        if self.acks.is_due() && self.sack && self.receiver.has_sack() {
            self.send_ack(now, out)?;
        }
        // Acknowledgement, window and options are the same in all segments of this call but a SYN.
        let mut common = None;
        while let Some(next) = self.sender.next(now, self.offload(out)) {
            let mut flags = if self.state == State::SynSent { Flags::default() } else { Flags::ACK };
            for (set, flag) in [
                (next.syn, Flags::SYN),
                (next.fin, Flags::FIN),
                (next.push, Flags::PSH),
                (next.cwr, Flags::CWR),
                (self.echo && !next.syn, Flags::ECE),
            ] {
                flags = if set { flags.with(flag) } else { flags };
            }
            if next.syn {
                flags = flags.with(self.ecn_flags());
            }
            let (mut header, edge) = match common {
                Some((header, edge)) if !next.syn => (Header { seq: next.seq, flags, ..header }, edge),
                _ => self.header(next.seq, flags, now),
            };
            common = Some((header, edge)).filter(|_| !next.syn);
            if let Some(urgent) = self.urgent_ahead(next.seq) {
                header.flags = header.flags.with(Flags::URG);
                header.urgent = urgent;
            }
            let ticket = out.segment(Outgoing {
                header: &header,
                payload: self.sender.payload(&next),
                payload_len: next.len,
                segment_size: next.segment_size,
                ect: next.ect,
                probe: next.kind == Kind::MtuProbe,
            })?;
            self.note_left(&header, next.len, true);
            self.sender.sent(&next, ticket, now);
            self.left(&header, edge, next.len > 0);
        }
        if self.state != State::SynSent && (self.acks.is_due() || self.receiver.update_is_due()) {
            self.send_ack(now, out)?;
        }
        self.look_for_buffers(now);
        Ok(())
    }

    fn send_ack(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        let flags = if self.echo { Flags::ACK.with(Flags::ECE) } else { Flags::ACK };
        let (mut header, edge) = self.header(self.sender.next_seq(), flags, now);
        if self.sack {
            header.options.sack = self.receiver.sack();
            // 40 bytes of options hold three blocks beside timestamps.
            header.options.sack.truncate(if self.clock.is_some() { 3 } else { SackBlocks::MOST });
        }
        out.segment(empty(&header))?;
        self.note_left(&header, 0, false);
        self.receiver.reported();
        self.left(&header, edge, false);
        Ok(())
    }

    /// A header with the current acknowledgement, window and options, and the edge that the window promises.
    pub(super) fn header(&self, seq: Seq, flags: Flags, now: Time) -> (Header, Seq) {
        let syn = flags.has(Flags::SYN);
        let mut options = Options { timestamps: self.timestamps(syn, now), ..Options::default() };
        if syn {
            let first = self.state == State::SynSent;
            options.mss = Some(self.config.mss);
            options.window_scale =
                (if first { self.config.window_scaling } else { self.scaled }).then(|| self.receiver.scale());
            options.sack_permitted = if first { self.config.sack } else { self.sack };
        }
        let ack = if flags.has(Flags::ACK) { self.receiver.nxt() } else { Seq(0) };
        let (window, edge) = self.receiver.window(syn);
        (Header { seq, ack, flags, window, urgent: 0, options }, edge)
    }

    /// Repeats the SYN-ACK, because the peer repeated its SYN.
    pub(super) fn syn_again(&mut self, now: Time) {
        // The first SYN-ACK still waits for the ring. The peer would acknowledge a number that was not sent yet.
        if self.sender.next_seq() == self.sender.una() {
            return;
        }
        let flags = Flags::SYN.with(Flags::ACK).with(self.ecn_flags());
        self.reply = Some(self.header(self.sender.una(), flags, now).0);
    }

    /// The ECN flags of a SYN or SYN-ACK. RFC 3168, section 6.1.1: SYN asks with both bits, and SYN-ACK agrees with
    /// one.
    fn ecn_flags(&self) -> Flags {
        match self.state {
            State::SynSent if self.config.ecn == Ecn::Request => Flags::ECE.with(Flags::CWR),
            State::SynSent => Flags::default(),
            _ if self.ecn => Flags::ECE,
            _ => Flags::default(),
        }
    }

    /// The urgent pointer of a segment from `seq` on, if urgent data is ahead. It points to the number after the last
    /// urgent byte.
    fn urgent_ahead(&self, seq: Seq) -> Option<u16> {
        let ahead = u32::try_from(self.urgent_sent?.distance(seq)).ok().filter(|ahead| *ahead > 0)?;
        Some(u16::try_from(ahead).unwrap_or(u16::MAX))
    }

    /// The bytes that the device may cut into segments. While urgent data is pending, it is 0: the device would copy
    /// the urgent pointer into each segment, and it would point too far.
    fn offload(&self, out: &impl Output<C>) -> usize {
        if self.urgent_sent.is_some_and(|urgent| self.sender.una() < urgent) { 0 } else { out.max_payload() }
    }

    #[inline]
    fn note_left(&mut self, header: &Header, len: u32, tracked: bool) {
        if let Some(tape) = &mut self.tape {
            tape.left(Left { header: *header, len, tracked, done: self.sender.settled() });
        }
    }

    /// Notes that a segment with `header` was sent.
    fn left(&mut self, header: &Header, edge: Seq, payload: bool) {
        if header.flags.has(Flags::ACK) {
            self.acknowledged = header.ack;
            self.acks.sent(payload);
        }
        self.receiver.promised(edge);
    }
}

fn empty<C: Carrier>(header: &Header) -> Outgoing<'_, C> {
    Outgoing { header, payload: &[], payload_len: 0, segment_size: 0, ect: false, probe: false }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::testing::{Pair, Piece, Ring, Sent, stream};
    use super::super::{Config, Received, State};

    /// A ring that is full from time to time only delays segments. Neither payload nor window updates are lost.
    #[test]
    fn a_full_ring_forgets_nothing() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let small = Config { receive_buffer: 8000, fixed_window: true, ..Config::default() };
            let mut pair = Pair::connected(&small, &small);
            for n in 0..40 {
                pair.a.tcp.send(stream(n * 1000, 1000), false).unwrap();
            }
            for _ in 0..20_000 {
                let mut ring = Ring { room: random.usize(0..3), ..Ring::new() };
                let full = pair.a.tcp.transmit(pair.now, &mut ring).is_err();
                assert!(!full || ring.room == 0);
                ring.segments.iter().for_each(|sent| pair.b.input(sent, pair.now));
                let mut ring = Ring { room: random.usize(0..2), ..Ring::new() };
                let _ = pair.b.tcp.transmit(pair.now, &mut ring);
                ring.segments.iter().for_each(|sent| pair.a.input(sent, pair.now));
                if random.u8(0..3) == 0 {
                    pair.b.read(pair.now);
                }
                // Timers are not needed, except the one of delayed acknowledgements.
                pair.now += Duration::from_millis(1);
                pair.b.tcp.timeout(pair.now);
                if pair.b.read.len() == 40_000 {
                    break;
                }
            }
            assert_eq!(pair.b.read, Piece::numbered(0, 40_000).bytes(), "seed {seed}");
        }
    }

    /// If payload in order is dropped because no buffer is free, the window is closed, even for a peer that never gives
    /// up. The user then drops the fragments, which is no call of the connection, and the window opens nevertheless.
    #[test]
    fn a_window_without_buffers_is_closed_and_opens_with_them() {
        let mut pair = Pair::connected(&Config::default(), &Config { budget: 4, ..Config::default() });
        pair.a.tcp.set_nodelay(true);
        for n in 0..20 {
            pair.a.tcp.send(stream(n * 100, 100), false).unwrap();
            pair.settle();
        }
        let mut held = Vec::new();
        while let Ok(Received::Chunk(chunk)) = pair.b.tcp.recv(pair.now) {
            held.push(chunk);
        }
        let closed =
            |log: &[(bool, Sent)]| log.iter().filter(|(from_a, sent)| !from_a && sent.header.window == 0).count();
        assert!((1..=4).contains(&held.len()) && closed(&pair.log) > 0);
        let log = pair.pass(Duration::from_secs(3600));
        assert!(closed(&log) > 10 && log.len() < 200, "{}", log.len());
        assert_eq!(pair.a.tcp.state(), State::Established);
        drop(held);
        let log = pair.pass(Duration::from_millis(600));
        assert!(!log[0].0 && log[0].1.header.window > 0, "the receiver speaks first");
        for _ in 0..100 {
            pair.b.read(pair.now);
            pair.pass(Duration::from_secs(2));
        }
        let got = pair.b.read.len();
        assert!(got > 1500 && pair.a.tcp.una() == pair.b.tcp.receiver.nxt(), "{got}");
    }

    #[test]
    fn a_window_that_opens_wide_is_announced() {
        let mut pair = Pair::connected(
            &Config::default(),
            &Config { receive_buffer: 10_000, fixed_window: true, ..Config::default() },
        );
        pair.a.tcp.send(stream(0, 50_000), false).unwrap();
        pair.pass(Duration::from_millis(100));
        assert!(pair.b.tcp.readable() > 8000);
        pair.b.read(pair.now);
        let sent = pair.settle();
        assert!(!sent[0].0 && sent[0].1.header.window > 0, "the receiver speaks first");
    }
}
