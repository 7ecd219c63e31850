//! Output of segments: replies, payload, acknowledgements.
//!
//! Why in this call only: what arrives and what the user calls only changes the state. Segments of
//! a poll therefore share one acknowledgement, and a full ring loses nothing.

use super::connection::{Connection, Stall};
#[cfg(feature = "record")]
use super::recording::SentSegment;
use super::sender::TransmissionKind;
use super::state::State;
use super::{Carrier, Ecn, Flags, Full, Header, Options, Outgoing, Output, SackBlocks, Seq};
use crate::time::Time;

impl<C: Carrier> Connection<C> {
    /// Sends everything that may be sent now: a reply, payload, acknowledgements.
    /// [`poll_event`](Self::poll_event) follows.
    ///
    /// # Errors
    /// The output has refused a segment. Segments that were not sent are kept: call this again when
    /// the ring has room, or the next hop is resolved. Until then a timer runs as long as a
    /// retransmission timer would, and its expirations count as retransmissions. Nothing was lost,
    /// so that the congestion window, the round trip and the detection of losses do not change.
    pub fn poll_transmit(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        self.transmit::<true>(now, out)
    }

    /// `SHORT`: a quiet sender is not asked to choose what it sends.
    #[inline]
    pub(super) fn transmit<const SHORT: bool>(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        let result = if SHORT && self.is_quiet() {
            debug_assert!(self.sender.chooses_nothing(now, self.offload(out)), "a quiet sender sends");
            self.sender.rest(now);
            self.schedule_buffer_retry(now);
            Ok(())
        } else {
            self.send_all::<SHORT>(now, out)
        };
        self.stall = match result {
            Ok(()) => None,
            Err(Full) => self.stall.or_else(|| Some(Stall { at: now + self.sender.backoff(0), expired: 0 })),
        };
        #[cfg(feature = "record")]
        if let Some(recording) = &mut self.recording {
            recording.transmitted(now, out.max_payload(), result.is_err(), self.sender.settled());
        }
        result
    }

    /// Whether an established connection has nothing to send before its user calls it, or time
    /// passes.
    #[cfg(feature = "stack")]
    #[inline]
    pub(crate) fn only_user_is_next(&self) -> bool {
        self.state == State::Established && self.is_quiet()
    }

    /// Whether nothing can be sent now, whatever the output accepts: most segments are followed by
    /// nothing before their user has read them.
    pub(super) fn is_quiet(&self) -> bool {
        self.state != State::Closed
            && self.reply.is_none()
            && !self.acks.is_due()
            && self.sender.is_quiet()
            && !self.receiver.update_is_due()
    }

    fn send_all<const SHORT: bool>(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        if let Some(header) = self.reply {
            out.transmit(empty(&header))?;
            self.reply = None;
            self.note_accepted();
            #[cfg(feature = "record")]
            self.record_segment(&header, 0, false);
            if header.flags.has(Flags::ACK) && !header.flags.has(Flags::RST) {
                let shift = if header.flags.has(Flags::SYN) { 0 } else { self.receiver.scale() };
                self.receiver.note_promised(header.ack + (u32::from(header.window) << shift));
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
        while let Some(next) = self.sender.poll_transmit(now, self.offload(out)) {
            let mut flags = if self.state == State::SynSent { Flags::default() } else { Flags::ACK };
            for (set, flag) in [
                (next.syn, Flags::SYN),
                (next.fin, Flags::FIN),
                (next.push, Flags::PSH),
                (next.cwr, Flags::CWR),
                (self.ecn_echo && !next.syn, Flags::ECE),
            ] {
                flags = if set { flags.with(flag) } else { flags };
            }
            if next.syn {
                flags = flags.with(self.ecn_flags(next.kind == TransmissionKind::Retransmission));
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
            let accepted = out.transmit(Outgoing {
                header: &header,
                payload: self.sender.payload(&next),
                payload_len: next.len,
                segment_size: next.segment_size,
                ect: next.ect,
                probe: next.kind == TransmissionKind::MtuProbe,
            })?;
            self.note_accepted();
            #[cfg(feature = "record")]
            self.record_segment(&header, accepted.len, true);
            let sent = next.cut(accepted.len);
            self.sender.handle_sent(&sent, accepted.ticket, now);
            self.note_sent(&header, edge, sent.len > 0);
            self.sent_plain_syn |= next.syn && !flags.is_ecn_setup();
            // Most messages are one segment, and nothing is to be chosen behind it.
            if SHORT && self.sender.is_quiet() {
                debug_assert!(self.sender.chooses_nothing(now, self.offload(out)), "a quiet sender sends");
                self.sender.rest_behind(now);
                break;
            }
        }
        if self.state != State::SynSent && (self.acks.is_due() || self.receiver.update_is_due()) {
            self.send_ack(now, out)?;
        }
        self.schedule_buffer_retry(now);
        Ok(())
    }

    fn send_ack(&mut self, now: Time, out: &mut impl Output<C>) -> Result<(), Full> {
        let flags = if self.ecn_echo { Flags::ACK.with(Flags::ECE) } else { Flags::ACK };
        let (mut header, edge) = self.header(self.sender.next_seq(), flags, now);
        if self.sack {
            header.options.sack = self.receiver.sack();
            // 40 bytes of options hold three blocks if there are timestamps (RFC 2018, section 3).
            header.options.sack.truncate(if self.peer_clock.is_some() { 3 } else { SackBlocks::MOST });
        }
        out.transmit(empty(&header))?;
        self.note_accepted();
        #[cfg(feature = "record")]
        self.record_segment(&header, 0, false);
        self.receiver.note_reported();
        self.note_sent(&header, edge, false);
        Ok(())
    }

    /// A header with the current acknowledgement, window and options, and the edge that the window
    /// promises.
    pub(super) fn header(&self, seq: Seq, flags: Flags, now: Time) -> (Header, Seq) {
        let syn = flags.has(Flags::SYN);
        let mut options = Options { timestamps: self.timestamps(syn, now), ..Options::default() };
        if syn {
            let first = self.state == State::SynSent;
            options.mss = Some(self.config.mss);
            options.window_scale =
                (if first { self.config.window_scaling } else { self.window_scaling }).then(|| self.receiver.scale());
            options.sack_permitted = if first { self.config.sack } else { self.sack };
        }
        let ack = if flags.has(Flags::ACK) { self.receiver.nxt() } else { Seq(0) };
        let (window, edge) = self.receiver.window(syn);
        (Header { seq, ack, flags, window, urgent: 0, options }, edge)
    }

    /// Repeats the SYN-ACK, because the peer repeated its SYN.
    pub(super) fn syn_again(&mut self, now: Time) {
        // The first SYN-ACK still waits for the ring. The peer would acknowledge a number that was
        // not sent yet.
        if self.sender.next_seq() == self.sender.una() {
            return;
        }
        let flags = Flags::SYN.with(Flags::ACK).with(self.ecn_flags(true));
        self.reply = Some(self.header(self.sender.una(), flags, now).0);
    }

    /// The ECN flags of a SYN or SYN-ACK. RFC 3168, section 6.1.1: SYN asks with both bits, and
    /// SYN-ACK agrees with one. A SYN that is sent `again` does not ask: a router or firewall may
    /// have dropped the first one because of its flags (section 6.1.1.1).
    fn ecn_flags(&self, again: bool) -> Flags {
        match self.state {
            State::SynSent if self.config.ecn == Ecn::Request && !again => Flags::ECE.with(Flags::CWR),
            State::SynSent => Flags::default(),
            _ if self.ecn && !self.sent_plain_syn => Flags::ECE,
            _ => Flags::default(),
        }
    }

    /// The urgent pointer of a segment from `seq` on, if urgent data is ahead. It points to the
    /// number after the last urgent byte.
    fn urgent_ahead(&self, seq: Seq) -> Option<u16> {
        let ahead = u32::try_from(self.urgent_sent?.distance(seq)).ok().filter(|ahead| *ahead > 0)?;
        Some(u16::try_from(ahead).unwrap_or(u16::MAX))
    }

    /// The bytes that the device may cut into segments. While urgent data is pending, it is 0: the
    /// device would copy the urgent pointer into each segment, and it would point too far.
    fn offload(&self, out: &impl Output<C>) -> usize {
        if self.urgent_sent.is_some_and(|urgent| self.sender.una() < urgent) { 0 } else { out.max_payload() }
    }

    /// Notes that the output accepted a segment: a timer that runs because it refused one begins
    /// again.
    #[inline]
    fn note_accepted(&mut self) {
        self.stall = None;
    }

    #[cfg(feature = "record")]
    fn record_segment(&mut self, header: &Header, len: u32, tracked: bool) {
        if let Some(recording) = &mut self.recording {
            recording.sent(SentSegment { header: *header, len, tracked, done: self.sender.settled() });
        }
    }

    /// Notes that a segment with `header` was sent.
    fn note_sent(&mut self, header: &Header, edge: Seq, payload: bool) {
        if header.flags.has(Flags::ACK) {
            self.last_acknowledged = header.ack;
            self.acks.sent(payload);
        }
        self.receiver.note_promised(edge);
    }
}

fn empty<C: Carrier>(header: &Header) -> Outgoing<'_, C> {
    Outgoing { header, payload: &[], payload_len: 0, segment_size: 0, ect: false, probe: false }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::testing::{End, Pair, Ring, Sent, SharedBytes, start, stream};
    use super::super::{Config, Connection, Ecn, Flags, Header, ReadOutcome, SegmentMeta, Seq, State};

    /// A ring that is full from time to time only delays segments. Neither payload nor window
    /// updates are lost.
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
                let full = pair.a.tcp.poll_transmit(pair.now, &mut ring).is_err();
                assert!(!full || ring.room == 0);
                ring.segments.iter().for_each(|sent| pair.b.input(sent, pair.now));
                let mut ring = Ring { room: random.usize(0..2), ..Ring::new() };
                let _ = pair.b.tcp.poll_transmit(pair.now, &mut ring);
                ring.segments.iter().for_each(|sent| pair.a.input(sent, pair.now));
                if random.u8(0..3) == 0 {
                    pair.b.read(pair.now);
                }
                // Timers are not needed, except the one of delayed acknowledgements.
                pair.now += Duration::from_millis(1);
                pair.b.tcp.handle_timeout(pair.now);
                if pair.b.read.len() == 40_000 {
                    break;
                }
            }
            assert_eq!(pair.b.read, SharedBytes::numbered(0, 40_000).bytes(), "seed {seed}");
        }
    }

    /// A ring that accepts one segment in each call, and is full then. Each call sends something,
    /// which is progress, and the connection lives.
    #[test]
    fn a_full_ring_that_takes_segments_is_no_timeout() {
        let mut pair = Pair::connected(&Config::default(), &Config::default());
        let (mut queued, begin) = (0, pair.now);
        while pair.now.since(begin) < Duration::from_secs(2000) {
            while pair.a.tcp.room() > 100_000 && pair.a.tcp.send(stream(queued, 5000), false).is_ok() {
                queued += 5000;
            }
            pair.a.tcp.handle_timeout(pair.now);
            let mut ring = Ring { room: 1, ..Ring::new() };
            assert!(pair.a.tcp.poll_transmit(pair.now, &mut ring).is_err(), "there is more than the ring takes");
            ring.segments.iter().for_each(|sent| pair.b.input(sent, pair.now));
            let mut back = pair.b.output(pair.now);
            pair.b.read(pair.now);
            pair.b.read.clear();
            back.extend(pair.b.output(pair.now));
            back.iter().for_each(|sent| pair.a.input(sent, pair.now));
            pair.now += Duration::from_millis(50);
            assert_eq!(pair.a.tcp.failure(), None, "after {:?}", pair.now.since(begin));
        }
    }

    /// If payload in order is dropped because no buffer is free, the window is closed, even for a
    /// peer that never ends the connection. The user then drops the fragments, which is no call of
    /// the connection, and the window opens nevertheless.
    #[test]
    fn a_window_without_buffers_is_closed_and_opens_with_them() {
        let mut pair = Pair::connected(&Config::default(), &Config { budget: 4, ..Config::default() });
        pair.a.tcp.set_nodelay(true);
        for n in 0..20 {
            pair.a.tcp.send(stream(n * 100, 100), false).unwrap();
            pair.settle();
        }
        let mut held = Vec::new();
        while let Ok(ReadOutcome::Chunk(chunk)) = pair.b.tcp.recv(pair.now) {
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

    const SYN_ACK: Flags = Flags::SYN.with(Flags::ACK);
    const ASKS: Flags = Flags::SYN.with(Flags::ECE).with(Flags::CWR);

    fn with_ecn(ecn: Ecn) -> Config {
        Config { ecn, ..Config::default() }
    }

    /// Two ends after the SYN of `a` was sent, which asks for ECN, and its repetition.
    fn repeated_syn() -> (Pair, Sent) {
        let mut pair = Pair::new(&with_ecn(Ecn::Request), &with_ecn(Ecn::Accept));
        assert_eq!(pair.log[0].1.header.flags, ASKS);
        pair.now = pair.a.tcp.poll_timeout().unwrap();
        pair.a.tcp.handle_timeout(pair.now);
        let again = pair.a.output(pair.now).remove(0);
        (pair, again)
    }

    /// Sends payload both ways. Returns whether that of `a`, and that of `b`, is ECN-capable.
    fn capable(pair: &mut Pair) -> (bool, bool) {
        pair.settle();
        pair.a.tcp.send(stream(0, 100), false).unwrap();
        pair.b.tcp.send(stream(0, 100), false).unwrap();
        let sent = pair.settle();
        let ect = |from_a: bool| sent.iter().any(|(from, sent)| *from == from_a && sent.ect);
        assert_eq!((ect(true), ect(false)), (pair.a.tcp.uses_ecn(), pair.b.tcp.uses_ecn()));
        (ect(true), ect(false))
    }

    #[test]
    fn a_repeated_syn_gives_ecn_up() {
        let (mut pair, again) = repeated_syn();
        assert_eq!(again.header.flags, Flags::SYN);
        // The first SYN was lost.
        pair.b = End::new(Connection::answer(&again.header, &with_ecn(Ecn::Accept), start(7), None, pair.now));
        assert_eq!(capable(&mut pair), (false, false));
        assert_eq!(pair.log[1].1.header.flags, SYN_ACK);
    }

    /// SYN-ACK was lost or is late. The peer has received a SYN with ECN, and one without.
    #[test]
    fn a_repeated_syn_without_ecn_is_answered_without_ecn() {
        let (mut pair, again) = repeated_syn();
        let first = pair.b.output(pair.now).remove(0);
        assert_eq!(first.header.flags, SYN_ACK.with(Flags::ECE));
        pair.b.input(&again, pair.now);
        let second = pair.b.output(pair.now).remove(0);
        assert_eq!(second.header.flags, SYN_ACK);
        // The timer repeats it without ECN, too.
        pair.now = pair.b.tcp.poll_timeout().unwrap();
        pair.b.tcp.handle_timeout(pair.now);
        assert_eq!(pair.b.output(pair.now).remove(0).header.flags, SYN_ACK);
        pair.a.input(&second, pair.now);
        assert_eq!(capable(&mut pair), (false, false));
    }

    /// The answer to the first SYN arrives late. The peer does not know of the second SYN yet, so
    /// its marks are echoed.
    #[test]
    fn data_is_not_ecn_capable_after_a_syn_without_ecn_but_marks_are_echoed() {
        let (mut pair, again) = repeated_syn();
        assert_eq!(capable(&mut pair), (false, true));
        pair.b.tcp.send(stream(100, 100), false).unwrap();
        let marked = pair.b.output(pair.now).remove(0);
        pair.a.tcp.handle_segment(
            &marked.header,
            marked.payload,
            SegmentMeta { len: 100, segments: 1, ce: true },
            pair.now,
        );
        assert!(pair.a.output(pair.now)[0].has(Flags::ECE));
        // The second SYN arrives last.
        assert!(pair.b.answer(again.header, pair.now)[0].has(Flags::ACK), "it is challenged");
        pair.b.tcp.send(stream(200, 100), false).unwrap();
        assert!(pair.b.output(pair.now).iter().all(|sent| !sent.ect));
    }

    #[test]
    fn both_sides_open_at_the_same_time_and_must_ask_for_ecn() {
        for (a, b) in [(Ecn::Request, Ecn::Request), (Ecn::Request, Ecn::Accept), (Ecn::Accept, Ecn::Request)] {
            let mut pair = Pair::new(&with_ecn(a), &with_ecn(b));
            pair.b = End::new(Connection::connect(&with_ecn(b), start(5), None, pair.now));
            let (one, two) = (pair.log.remove(0).1, pair.b.output(pair.now).remove(0));
            pair.a.input(&two, pair.now);
            pair.b.input(&one, pair.now);
            let both = (a, b) == (Ecn::Request, Ecn::Request);
            assert_eq!(capable(&mut pair), (both, both), "{a:?} {b:?}");
        }
        // The peer asks for ECN, and its SYN-ACK is without.
        let mut pair = Pair::new(&with_ecn(Ecn::Request), &Config::default());
        let syn_ack = pair.b.output(pair.now).remove(0).header;
        pair.a.answer(Header { flags: ASKS, ack: Seq(0), ..syn_ack }, pair.now);
        assert_eq!(pair.a.tcp.state(), State::SynReceived);
        pair.a.answer(Header { flags: SYN_ACK, ..syn_ack }, pair.now);
        assert_eq!((pair.a.tcp.state(), pair.a.tcp.uses_ecn()), (State::Established, false));
    }
}
