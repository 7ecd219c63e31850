//! What arrives: segments, and ICMP errors about segments.
//!
//! Segments are processed in the order of RFC 9293, section 3.10.7. Why the order matters: each
//! check protects the steps behind it. Sequence number, reset, SYN and acknowledgement are checked
//! before anything in the segment is used, so that an attacker that does not see the connection
//! must guess them (RFC 5961).

#[cfg(feature = "record")]
use super::Chunk;
use super::connection::Connection;
use super::event::Events;
use super::receiver::Arrival;
use super::sender::Ack;
use super::state::State;
use super::{Carrier, DeliveryError, Ecn, Error, Flags, Header, SegmentMeta, Seq, reset_for};
use crate::time::Time;

/// After a pause of this length, in microseconds, the peer is in slow start again.
const IDLE: u64 = 1_000_000;

impl<C: Carrier> Connection<C> {
    /// Processes a segment that arrived for this connection.
    ///
    /// [`poll_transmit`](Self::poll_transmit) follows, once for all segments that arrived together.
    ///
    /// **Warning:** the checksums must have been verified. The payload is not read here.
    ///
    /// Cost: constant for a segment in order, and logarithmic in the number of gaps for a segment
    /// out of order.
    pub fn handle_segment(
        &mut self,
        header: &Header,
        payload: impl IntoIterator<Item = C::Received>,
        meta: SegmentMeta,
        now: Time,
    ) {
        let payload = payload.into_iter();
        #[cfg(feature = "record")]
        if self.recording.is_some() {
            let mut chunks = Vec::new();
            self.dispatch(header, payload.inspect(|chunk| chunks.push(chunk.len() as u32)), meta, now);
            record!(self, Step::Segment { header: *header, meta, chunks, now });
            return;
        }
        self.dispatch(header, payload, meta, now);
    }

    /// Whether a segment with this header and `len` bytes of payload would be processed: it is in
    /// the window, it acknowledges what was sent, and its timestamp is not old (RFC 9293, section
    /// 3.10.7.4; RFC 5961, section 5; RFC 7323, section 5.3).
    ///
    /// The owner of the connection needs this for segments that it drops itself, because it could
    /// not verify them. If the segment would not be processed anyway, it is no sign that the peer
    /// is alive.
    #[must_use]
    pub fn accepts(&self, header: &Header, len: u32, now: Time) -> bool {
        let flags = header.flags;
        let len = len + u32::from(flags.has(Flags::SYN)) + u32::from(flags.has(Flags::FIN));
        let expected = match self.state {
            State::Closed => false,
            State::SynSent => flags.has(Flags::SYN),
            _ => self.is_recent(header, now) && self.receiver.is_acceptable(header.seq, len),
        };
        expected && flags.has(Flags::ACK) && self.can_acknowledge(header.ack)
    }

    /// Whether the peer, or another host that sees the segments, can have sent this acknowledgement
    /// (RFC 5961, section 5). During the handshake, it must be that of SYN.
    fn can_acknowledge(&self, ack: Seq) -> bool {
        let (una, nxt) = (self.sender.una(), self.sender.next_seq());
        ack <= nxt
            && match self.state {
                State::SynSent | State::SynReceived => una < ack,
                _ => una - self.sender.max_window() <= ack,
            }
    }

    /// Handles an ICMP error that quotes a segment of this connection. The segment begins with
    /// `seq`. Without `seq`, this host itself found that the next hop does not answer.
    ///
    /// An ICMP error counts only if `seq` is in flight: an attacker that knows the ports must guess
    /// it (RFC 5927). During the handshake, a hard error ends the connection. An error of this host
    /// also ends it, because nothing was sent. After the handshake, errors are only the reason that
    /// is reported if the connection times out. Returns whether the error counts.
    /// [`poll_transmit`](Self::poll_transmit) follows: a path that is smaller than a segment in
    /// flight has it sent again.
    pub fn handle_delivery_error(&mut self, error: DeliveryError, seq: Option<Seq>, now: Time) -> bool {
        record!(self, Step::DeliveryError { error, seq, now });
        let (una, local) = (self.sender.una(), seq.is_none());
        let seq = seq.unwrap_or(una);
        let in_flight = local || (una <= seq && seq < self.sender.next_seq());
        if local && self.state == State::Closed {
            // The reset that is to be sent has no way to the peer.
            self.reply = None;
        }
        if !in_flight || self.state == State::Closed {
            return false;
        }
        match error {
            DeliveryError::TooBig { max_payload } => {
                self.sender.handle_too_big(seq, max_payload, now);
            }
            DeliveryError::Unreachable(what) => {
                if (what.is_hard() || local) && matches!(self.state, State::SynSent | State::SynReceived) {
                    self.fail(Error::Unreachable(what));
                } else {
                    self.soft_error = Some(what);
                }
            }
        }
        true
    }

    fn dispatch(&mut self, header: &Header, payload: impl Iterator<Item = C::Received>, meta: SegmentMeta, now: Time) {
        match self.state {
            State::Closed => {}
            State::SynSent => self.handle_in_syn_sent(header, payload, meta, now),
            State::Established if self.is_expected(header, meta, now) => {
                self.handle_expected(header, payload, meta, now);
            }
            _ => self.handle_synchronized(header, payload, meta, now),
        }
    }

    /// Whether a segment brings the next bytes in order, nothing is out of order or missing, and
    /// nothing else is in it (header prediction): nearly all segments of a large transfer, which
    /// acknowledge nothing, and most requests and answers, which acknowledge what they answer.
    #[inline]
    pub(super) fn is_expected(&self, header: &Header, meta: SegmentMeta, now: Time) -> bool {
        self.state == State::Established
            && header.flags.without(Flags::PSH) == Flags::ACK
            && header.seq == self.receiver.nxt()
            && (header.ack == self.sender.una() || self.sender.is_answered_by(header.ack))
            && header.options.sack.is_empty()
            && meta.len > 0
            && !self.closed
            && self.receiver.is_in_order()
            && self.sender.is_untroubled()
            && self.is_recent(header, now)
    }

    /// Processes a segment that [is expected](Self::is_expected), without the steps of
    /// [`handle_synchronized`](Self::handle_synchronized) that have no effect then. The simulation
    /// runs both ways on clones.
    #[inline]
    fn handle_expected(
        &mut self,
        header: &Header,
        payload: impl Iterator<Item = C::Received>,
        meta: SegmentMeta,
        now: Time,
    ) {
        self.note_acceptable(header, now);
        let window = u32::from(header.window) << self.peer_scale;
        if header.ack == self.sender.una() {
            self.sender.handle_window(header.seq, header.ack, window, now);
        } else {
            if self.sender.handle_answer(header.seq, header.ack, window, now) {
                self.events.add(Events::WRITABLE);
            }
            self.soft_error = None;
        }
        if self.ecn {
            self.ecn_echo |= meta.ce;
        }
        let arrival = self.receiver.accept_next(meta.len, payload);
        self.note_arrival(arrival, meta, now);
    }

    /// Notes that an acceptable segment arrived.
    #[inline]
    fn note_acceptable(&mut self, header: &Header, now: Time) {
        self.last_received = now;
        self.keep_alive_probes = 0;
        if let (Some(clock), Some(stamps)) = (&mut self.peer_clock, header.options.timestamps)
            && header.seq <= self.last_acknowledged
        {
            clock.advance(stamps.value, now);
        }
    }

    /// Stores the payload of a segment, and its FIN. Returns whether FIN is in order now.
    #[inline]
    fn store(
        &mut self,
        seq: Seq,
        payload: impl Iterator<Item = C::Received>,
        meta: SegmentMeta,
        fin: bool,
        now: Time,
    ) -> bool {
        let arrival = self.receiver.accept(seq, meta.len, payload, fin);
        self.note_arrival(arrival, meta, now);
        arrival.finished
    }

    /// Notes what a segment with payload or FIN has brought.
    #[inline]
    fn note_arrival(&mut self, arrival: Arrival, meta: SegmentMeta, now: Time) {
        self.last_data_received = now;
        self.largest_segment = self.largest_segment.max(meta.len / u32::from(meta.segments.max(1)));
        if arrival.readable > 0 {
            self.acks.arrived(meta.segments, IDLE, now);
            self.events.add(Events::READABLE);
        }
        if arrival.acknowledge {
            self.acks.at_once();
        }
    }

    /// Processes a segment in SYN-SENT: RFC 9293, section 3.10.7.3.
    fn handle_in_syn_sent(
        &mut self,
        header: &Header,
        payload: impl Iterator<Item = C::Received>,
        meta: SegmentMeta,
        now: Time,
    ) {
        let flags = header.flags;
        let acks = flags.has(Flags::ACK);
        // The acknowledgement is checked first, before anything else in the segment is used.
        if acks && !self.can_acknowledge(header.ack) {
            if !flags.has(Flags::RST) {
                self.reply = Some(Header { seq: header.ack, flags: Flags::RST, ..Header::default() });
            }
            return;
        }
        if flags.has(Flags::RST) {
            if acks {
                self.fail(Error::Refused);
            }
            return;
        }
        if !flags.has(Flags::SYN) {
            return;
        }
        // If ECN is not requested, a SYN without ECN was sent, and data must not be ECN-capable.
        let ecn = self.config.ecn == Ecn::Request && flags.is_ecn_setup();
        self.last_received = now;
        if acks {
            self.negotiate(header, ecn, None, now);
            self.handle_ack(header, u32::from(header.window), false, now);
            self.establish(header.seq, u32::from(header.window), now);
            self.acks.at_once();
            let payload_header = Header { seq: header.seq + 1, ..*header };
            self.handle_payload(&payload_header, payload, meta, now);
        } else {
            // Both sides opened at the same time. The SYN is repeated as SYN-ACK. Payload of the
            // peer's SYN is ignored: the peer sends it again.
            self.negotiate(header, ecn, None, now);
            self.state = State::SynReceived;
            self.syn_again(now);
        }
    }

    /// Processes a segment in the other states: RFC 9293, section 3.10.7.4, with RFC 5961 and RFC
    /// 7323.
    pub(super) fn handle_synchronized(
        &mut self,
        header: &Header,
        payload: impl Iterator<Item = C::Received>,
        meta: SegmentMeta,
        now: Time,
    ) {
        let mut header = *header;
        let flags = header.flags;
        let (syn, fin, rst) = (flags.has(Flags::SYN), flags.has(Flags::FIN), flags.has(Flags::RST));
        if !flags.has(Flags::ACK) && !rst && !syn {
            return;
        }
        // Both sides opened at the same time, and this is the peer's SYN-ACK. Its SYN was already
        // received, and only its acknowledgement is new.
        if self.state == State::SynReceived && syn && flags.has(Flags::ACK) && header.seq == self.irs {
            self.check_ecn(flags);
            header.seq += 1;
            header.flags = flags.without(Flags::SYN);
            self.acks.at_once();
            return self.handle_synchronized(&header, payload, meta, now);
        }
        let len = meta.len + u32::from(syn) + u32::from(fin);
        if !rst && !self.is_recent(&header, now) {
            // Without a timestamp, it is not answered.
            if header.options.timestamps.is_some() {
                self.handle_unacceptable(&header, len, now);
            }
            return;
        }
        if !self.receiver.is_acceptable(header.seq, len) {
            if !rst {
                self.handle_unacceptable(&header, len, now);
            }
            // The last acknowledgement was lost, and the peer repeats its FIN. Any other FIN is
            // from an older segment or forged: it must not keep the ports occupied.
            if self.state == State::TimeWait && fin && header.seq + len == self.receiver.nxt() {
                self.time_wait(now);
            }
            return;
        }
        if rst {
            // A reset is accepted only with the exact number. A reset with another number in the
            // window can be forged by guessing. It is answered by a challenge, and the answer of
            // the true peer has the exact number (RFC 5961, section 3).
            if header.seq != self.receiver.nxt() {
                return self.challenge(now);
            }
            match self.state {
                State::SynReceived => self.fail(Error::Refused),
                State::TimeWait | State::Closing | State::LastAck => self.end(),
                _ => self.fail(Error::Reset),
            }
            return;
        }
        if syn {
            return self.challenge(now);
        }
        if !self.can_acknowledge(header.ack) {
            if self.state != State::SynReceived {
                return self.challenge(now);
            }
            self.reply = Some(Header { seq: header.ack, flags: Flags::RST, ..Header::default() });
            return;
        }
        self.note_acceptable(&header, now);
        let window = u32::from(header.window) << self.peer_scale;
        self.handle_ack(&header, window, len > 0, now);
        if self.state == State::SynReceived {
            self.establish(header.seq, window, now);
        }
        self.handle_payload(&header, payload, meta, now);
    }

    /// Checks the timestamp (PAWS): returns whether the segment is not older than the latest one.
    /// RFC 7323, section 5.3. All segments of a connection with timestamps have a timestamp
    /// (section 3.2).
    fn is_recent(&self, header: &Header, now: Time) -> bool {
        let Some(clock) = &self.peer_clock else { return true };
        header.options.timestamps.is_some_and(|stamps| !clock.is_old(stamps.value, now))
    }

    /// Stops using ECN if the flags of a repeated SYN or SYN-ACK are without it: the peer sends no
    /// ECN-capable data then, and expects none (RFC 3168, sections 6.1.1 and 6.1.1.1).
    fn check_ecn(&mut self, flags: Flags) {
        if !flags.is_ecn_setup() {
            (self.ecn, self.ecn_echo) = (false, false);
            self.sender.give_up_ecn();
        }
    }

    /// Answers a segment that is old or outside the window by an acknowledgement.
    fn handle_unacceptable(&mut self, header: &Header, len: u32, now: Time) {
        let syn = header.flags.has(Flags::SYN);
        if syn && header.seq == self.irs {
            self.check_ecn(header.flags);
            if self.state == State::SynReceived {
                // The peer has not received the SYN-ACK.
                return self.syn_again(now);
            }
        }
        if syn || len == 0 {
            return self.challenge(now);
        }
        // The payload was received before, so the acknowledgement was lost. It is repeated for each
        // such segment.
        self.receiver.note_repeated(header.seq, header.seq + len);
        self.acks.at_once();
    }

    /// Sends a challenge: an acknowledgement with the expected number, for the true peer (RFC 5961,
    /// section 3.2). The
    /// number of challenges is limited.
    fn challenge(&mut self, now: Time) {
        if self.challenge_limit.allows(now) {
            self.acks.at_once();
        }
    }

    /// Processes the acknowledgement, the window in bytes and the SACK blocks of a segment.
    fn handle_ack(&mut self, header: &Header, window: u32, data: bool, now: Time) {
        let acked = self.sender.handle_ack(
            &Ack {
                seq: header.seq,
                ack: header.ack,
                window,
                sack: if self.sack { &header.options.sack } else { &[] },
                echo: self.peer_clock.and(header.options.timestamps).map(|stamps| stamps.echo),
                ece: self.ecn && header.flags.has(Flags::ECE),
                data,
            },
            now,
        );
        if acked.writable {
            self.events.add(Events::WRITABLE);
        }
        if acked.bytes > 0 || acked.fin {
            self.soft_error = None;
        }
        if self.closed && (acked.bytes > 0 || acked.fin || acked.syn) && self.orphan_progress.0 <= self.sender.una() {
            self.expires_at = Some(now + self.config.orphan);
            self.orphan_progress.0 = self.sender.una() + self.orphan_progress.1;
        }
        if acked.fin {
            match self.state {
                State::FinWait1 => {
                    self.state = State::FinWait2;
                    self.expires_at = self.closed.then(|| now + self.config.fin_wait_2);
                }
                State::Closing => self.time_wait(now),
                State::LastAck => self.end(),
                _ => {}
            }
        }
    }

    /// Processes urgent data, payload and FIN.
    fn handle_payload(
        &mut self,
        header: &Header,
        payload: impl Iterator<Item = C::Received>,
        meta: SegmentMeta,
        now: Time,
    ) {
        let fin = header.flags.has(Flags::FIN);
        if !matches!(self.state, State::Established | State::FinWait1 | State::FinWait2) {
            return;
        }
        if self.ecn && meta.len > 0 {
            // CWR ends the echo of earlier marks. A mark on the same segment begins a new echo.
            self.ecn_echo = (self.ecn_echo && !header.flags.has(Flags::CWR)) || meta.ce;
        }
        if header.flags.has(Flags::URG) {
            self.handle_urgent_pointer(header.seq + u32::from(header.urgent));
        }
        if meta.len == 0 && !fin {
            return;
        }
        let end = header.seq + meta.len;
        if self.closed && meta.len > 0 && self.receiver.nxt() < end {
            // The user can never read this payload, so the connection is reset (RFC 9293, section
            // 3.6.1, MUST-17 and SHLD-3). The reset has the number that the peer expects. This
            // number is before a FIN that the peer has not received yet (RFC 5961, section 3).
            self.fail(Error::Aborted);
            self.reply = reset_for(header, meta.len);
            return;
        }
        if self.store(header.seq, payload, meta, fin, now) {
            self.events.add(Events::END);
            match self.state {
                State::Established => self.state = State::CloseWait,
                State::FinWait1 => self.state = State::Closing,
                _ => self.time_wait(now),
            }
        }
    }

    /// Notes that the peer's urgent data ends before `end`. The pointer only moves forward.
    fn handle_urgent_pointer(&mut self, end: Seq) {
        if self.receiver.read_position() < end && self.urgent.is_none_or(|urgent| urgent < end) {
            self.urgent = Some(end);
            self.events.add(Events::URGENT);
        }
    }
}

#[cfg(test)]
mod tests;
