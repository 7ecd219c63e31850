//! The end of a connection, and its timers.

use std::time::Duration;

use super::connection::{Connection, Stall, State};
use super::event::Events;
use super::record::Step;
use super::{Carrier, Error, Flags, Header, IcmpError, Seq};
use crate::Time;

/// A connection that reuses the ports of one in TIME-WAIT begins this far after the last number of
/// the old one.
const REUSE_GAP: u32 = 1 << 16;

/// The first and the longest interval at which a connection checks for free buffers.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LAST_LOOK: Duration = Duration::from_millis(500);

impl<C: Carrier> Connection<C> {
    /// Shuts the sending side down: FIN follows the queued payload. Payload is still received (half
    /// close).
    pub fn shutdown(&mut self) {
        self.note(|| Step::Shutdown);
        self.finish();
    }

    fn finish(&mut self) {
        if self.shut || self.state == State::Closed {
            return;
        }
        self.shut = true;
        match self.state {
            State::SynSent => return self.end(),
            // The state FIN-WAIT-1 begins when the handshake is complete.
            State::SynReceived => {}
            State::CloseWait => self.state = State::LastAck,
            _ => self.state = State::FinWait1,
        }
        self.sender.finish();
    }

    /// Shuts the reading side down: after the queued payload, [`recv`](Self::recv) returns the end
    /// of the stream. TCP has no message that tells the peer. Payload that still arrives is
    /// acknowledged.
    pub fn shutdown_read(&mut self) {
        self.note(|| Step::ShutdownRead);
        self.deaf = true;
    }

    /// Closes the connection for the user.
    ///
    /// Queued payload is sent, then FIN. If there is payload that the user has not read, the
    /// connection is reset instead: the peer must know that it was lost (RFC 9293, section 3.6.1).
    /// The connection is also reset if payload arrives later, or if the peer acknowledges nothing
    /// for [`Config::orphan`](super::Config::orphan).
    pub fn close(&mut self, now: Time) {
        self.note(|| Step::Close(now));
        let unread = self.receiver.readable() > 0;
        self.closed = true;
        if unread && matches!(self.state, State::Established | State::FinWait1 | State::FinWait2 | State::CloseWait) {
            return self.reset(Error::Aborted, now);
        }
        self.receiver.clear();
        self.finish();
        let limit = match self.state {
            State::Closed | State::TimeWait => return,
            State::FinWait2 => self.config.fin_wait_2,
            _ => self.config.orphan,
        };
        self.until.get_or_insert(now + limit);
        self.owe();
    }

    /// Notes what an orphan's peer owes. If each acknowledged byte began the orphan's time again, a
    /// peer could keep it for months.
    pub(super) fn owe(&mut self) {
        let step = (self.sender.end() - self.sender.una()) / 8;
        self.owed = (self.sender.una() + step.max(1), step.max(1));
    }

    /// Resets the connection.
    pub fn abort(&mut self, now: Time) {
        self.note(|| Step::Abort(now));
        match self.state {
            State::Closed => {}
            State::SynSent | State::Closing | State::LastAck | State::TimeWait => self.fail(Error::Aborted),
            _ => self.reset(Error::Aborted, now),
        }
    }

    /// Ends the connection because its device is gone: nothing can be sent or received any more.
    pub fn handle_device_gone(&mut self) {
        self.note(|| Step::DeviceGone);
        if self.state != State::Closed {
            self.fail(Error::DeviceGone);
        }
    }

    /// Handles an ICMP error that quotes a segment of this connection. The segment begins with
    /// `seq`. Without `seq`, this host itself found that the next hop does not answer.
    ///
    /// An ICMP error counts only if `seq` is in flight: an attacker that knows the ports must guess
    /// it (RFC 5927). During the handshake, a hard error ends the connection. An error of this host
    /// also ends it, because nothing was sent. After the handshake, errors are only the reason that
    /// is reported if the connection times out. Returns whether the error counts.
    pub fn handle_icmp_error(&mut self, error: IcmpError, seq: Option<Seq>, now: Time) -> bool {
        self.note(|| Step::Icmp { error, seq, now });
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
            IcmpError::TooBig { max_payload } => {
                self.sender.handle_too_big(seq, max_payload, now);
            }
            IcmpError::Unreachable(what) => {
                if (what.is_hard() || local) && matches!(self.state, State::SynSent | State::SynReceived) {
                    self.fail(Error::Unreachable(what));
                } else {
                    self.soft = Some(what);
                }
            }
        }
        true
    }

    /// The time at which [`handle_timeout`](Self::handle_timeout) is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let stall = self.stall.map(|stall| stall.at);
        if self.state == State::Closed {
            return stall;
        }
        let look = self.look.map(|(at, _)| at);
        [self.sender.poll_timeout(), self.acks.poll_timeout(), self.until, look, self.keep_alive_at(), stall]
            .into_iter()
            .flatten()
            .min()
    }

    /// Acts on the timers that have expired at `now`. Call it at the [`poll_timeout`](Self::poll_timeout).
    /// An earlier call does nothing.
    pub fn handle_timeout(&mut self, now: Time) {
        self.note(|| Step::Timeout(now));
        if let Some(stall) = self.stall.filter(|stall| stall.at <= now) {
            self.stalled(stall, now);
        }
        if self.state == State::Closed {
            return;
        }
        if self.until.is_some_and(|until| until <= now) {
            return match self.state {
                State::FinWait2 | State::TimeWait => self.end(),
                _ => self.reset(self.soft.map_or(Error::TimedOut, Error::Unreachable), now),
            };
        }
        if self.sender.poll_timeout().is_some_and(|deadline| deadline <= now)
            && self.sender.handle_timeout(now).is_err()
        {
            return self.fail(self.soft.map_or(Error::TimedOut, Error::Unreachable));
        }
        self.acks.handle_timeout(now);
        // The next transmission announces the window, if the window has opened.
        if let Some((at, wait)) = &mut self.look
            && *at <= now
        {
            *wait = (*wait * 2).min(LAST_LOOK);
            *at = now + *wait;
            self.receiver.try_again();
        }
        if self.keep_alive_at().is_some_and(|at| at <= now) {
            self.keep_alive(now);
        }
    }

    /// The output refuses segments for as long as a retransmission timer runs. This counts as a
    /// retransmission if payload, SYN or FIN waits, so that the connection ends where nothing
    /// leaves any more (RFC 9293, section 3.8.3).
    fn stalled(&mut self, stall: Stall, now: Time) {
        if self.state == State::Closed {
            // The last segment is a reset, which is not repeated.
            (self.reply, self.stall) = (None, None);
            return;
        }
        let expired = stall.expired + u32::from(!self.sender.is_idle());
        if expired > self.sender.most_retries() {
            self.fail(self.soft.map_or(Error::TimedOut, Error::Unreachable));
            self.stall = None;
            return;
        }
        self.stall = Some(Stall { at: now + self.sender.backoff(expired), expired });
    }

    /// The time at which the next probe of an idle peer is due.
    fn keep_alive_at(&self) -> Option<Time> {
        let keep_alive = self.config.keep_alive?;
        let open = !matches!(self.state, State::SynSent | State::SynReceived | State::TimeWait);
        let at = if self.probes == 0 { self.heard + keep_alive.idle } else { self.probed + keep_alive.interval };
        (open && self.sender.is_idle()).then_some(at)
    }

    /// Sends a probe: a segment without payload, whose number the peer has already acknowledged.
    /// The peer must answer it (RFC 9293, section 3.8.4).
    fn keep_alive(&mut self, now: Time) {
        if self.config.keep_alive.is_some_and(|keep_alive| self.probes >= keep_alive.probes) {
            return self.reset(self.soft.map_or(Error::TimedOut, Error::Unreachable), now);
        }
        self.probes += 1;
        self.probed = now;
        self.reply = Some(self.header(self.sender.next_seq() - 1, Flags::ACK, now).0);
    }

    /// Starts or stops the timer that checks for free buffers. It runs while a closed window waits
    /// for buffers: the user returns a buffer by dropping payload, which is no call of this
    /// connection.
    pub(super) fn look_for_buffers(&mut self, now: Time) {
        // A queue is short for long if it is short at all, and the check costs a segment of the
        // peer.
        let first = if self.receiver.is_cut() { LAST_LOOK } else { FIRST_LOOK };
        self.look = self.receiver.waits_for_buffers().then(|| self.look.unwrap_or((now + first, first)));
    }

    /// Whether `syn` may begin a new connection with the same addresses and ports while this one is
    /// in TIME-WAIT. `syn` must be later by its timestamp (RFC 6191) or by its number. Returns the
    /// least initial number for this side.
    #[must_use]
    pub fn reused_by(&self, syn: &Header) -> Option<Seq> {
        let begins = syn.flags.has(Flags::SYN) && !syn.flags.has(Flags::ACK) && !syn.flags.has(Flags::RST);
        let by_number = self.receiver.nxt() < syn.seq;
        let later = match (&self.clock, syn.options.timestamps) {
            (Some(clock), Some(stamps)) if stamps.value != clock.recent() => {
                0 < stamps.value.wrapping_sub(clock.recent()) as i32
            }
            _ => by_number,
        };
        (self.state == State::TimeWait && begins && later).then(|| self.sender.next_seq() + REUSE_GAP)
    }

    /// Ends TIME-WAIT, because a new connection with the same addresses and ports has begun
    /// ([`reused_by`] has allowed it). The user can still read what was received, and then the end
    /// of the stream.
    ///
    /// [`reused_by`]: Self::reused_by
    pub fn supersede(&mut self) {
        self.note(|| Step::Supersede);
        if self.state == State::TimeWait {
            self.end();
        }
    }

    /// Enters TIME-WAIT: both sides sent FIN, and both were acknowledged. The last acknowledgement
    /// may have to be repeated.
    pub(super) fn time_wait(&mut self, now: Time) {
        self.state = State::TimeWait;
        self.until = Some(now + self.config.time_wait);
    }

    /// Ends the connection because of `error`, and sends a reset to the peer.
    pub(super) fn reset(&mut self, error: Error, now: Time) {
        let (header, _) = self.header(self.sender.next_seq(), Flags::RST.with(Flags::ACK), now);
        self.fail(error);
        self.reply = Some(header);
    }

    /// Ends the connection because of `error`. Received payload can still be read, unless the user
    /// has closed the connection.
    pub(super) fn fail(&mut self, error: Error) {
        self.error = Some(error);
        self.end();
    }

    /// Ends the connection.
    pub(super) fn end(&mut self) {
        self.state = State::Closed;
        self.until = None;
        self.reply = None;
        self.sender.clear();
        self.events.add(Events::CLOSED);
        if self.closed {
            self.receiver.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::testing::{End, Pair, Piece, start, stream};
    use super::super::{Config, Event, Received, Refused, Timestamps, Unreachable};
    use super::*;

    fn pair() -> Pair {
        Pair::connected(&Config::default(), &Config::default())
    }

    fn resets(sent: &[(bool, super::super::testing::Sent)]) -> usize {
        sent.iter().filter(|(_, sent)| sent.has(Flags::RST)).count()
    }

    #[test]
    fn both_sides_close_at_the_same_time() {
        let mut pair = pair();
        pair.a.tcp.close(pair.now);
        pair.b.tcp.close(pair.now);
        let (one, two) = (pair.a.output(pair.now).remove(0), pair.b.output(pair.now).remove(0));
        assert!(one.has(Flags::FIN) && two.has(Flags::FIN));
        pair.a.input(&two, pair.now);
        pair.b.input(&one, pair.now);
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::Closing, State::Closing));
        pair.settle();
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::TimeWait, State::TimeWait));
    }

    #[test]
    fn what_is_queued_leaves_before_fin() {
        let mut pair = pair();
        for n in 0..100 {
            pair.a.tcp.send(stream(n * 1000, 1000), false).unwrap();
        }
        pair.a.tcp.close(pair.now);
        assert_eq!(pair.a.tcp.send(stream(0, 1), false).unwrap_err().why, Refused::Shutdown);
        for _ in 0..100 {
            pair.pass(Duration::from_millis(50));
            pair.b.read(pair.now);
        }
        assert_eq!(pair.b.read, Piece::numbered(0, 100_000).bytes());
        assert!(matches!(pair.b.tcp.recv(pair.now), Ok(Received::End)));
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::FinWait2, State::CloseWait));
    }

    #[test]
    fn close_with_unread_payload_resets() {
        let mut pair = pair();
        pair.a.tcp.send(stream(0, 100), false).unwrap();
        pair.settle();
        pair.b.tcp.close(pair.now);
        let sent = pair.settle();
        let reset = &sent[0].1.header;
        assert_eq!((sent.len(), reset.flags), (1, Flags::RST.with(Flags::ACK)));
        assert!(reset.options.timestamps.is_some());
        assert_eq!(pair.a.events.last(), Some(&Event::Closed(Some(Error::Reset))));
        assert!(pair.a.tcp.is_gone() && pair.b.tcp.is_gone());
        assert_eq!(pair.b.tcp.info(pair.now).buffers, 0);
    }

    #[test]
    fn payload_after_close_resets() {
        let mut pair = pair();
        pair.b.tcp.close(pair.now);
        pair.settle();
        pair.a.tcp.send(stream(0, 100), false).unwrap();
        assert_eq!(resets(&pair.settle()), 1);
        assert_eq!(pair.a.tcp.failure(), Some(Error::Reset));
    }

    #[test]
    fn payload_after_shutdown_read_is_taken() {
        let mut pair = pair();
        pair.b.tcp.shutdown_read();
        assert!(matches!(pair.b.tcp.recv(pair.now), Ok(Received::End)));
        pair.a.tcp.send(stream(0, 100), false).unwrap();
        assert_eq!(resets(&pair.settle()), 0);
        pair.b.read(pair.now);
        assert_eq!(pair.b.read.len(), 100);
    }

    /// Proves INET-6.
    #[test]
    fn a_closed_connection_does_not_wait_for_ever_for_fin() {
        let mut pair = pair();
        pair.a.tcp.shutdown();
        pair.settle();
        pair.pass(Duration::from_secs(3600));
        assert_eq!(pair.a.tcp.state(), State::FinWait2, "the user still reads");
        pair.a.tcp.close(pair.now);
        pair.pass(Duration::from_secs(59));
        assert_eq!(pair.a.tcp.state(), State::FinWait2);
        pair.pass(Duration::from_secs(1));
        assert!(pair.a.tcp.is_gone());
    }

    /// Two ends, where `b` has a window of 1,000 bytes and does not read. `a` has sent 5,000 bytes.
    fn closed_window() -> Pair {
        let mut pair = Pair::connected(
            &Config::default(),
            &Config { receive_buffer: 1000, fixed_window: true, ..Config::default() },
        );
        pair.a.tcp.send(stream(0, 5000), false).unwrap();
        pair.settle();
        pair
    }

    /// Proves INET-6.
    #[test]
    fn an_orphan_whose_peer_keeps_its_window_closed_is_reset() {
        let mut pair = closed_window();
        pair.pass(Duration::from_secs(3600));
        pair.a.tcp.shutdown();
        pair.pass(Duration::from_secs(3600));
        assert_eq!(pair.a.tcp.state(), State::FinWait1, "the user may wait as long as it wants");
        pair.a.tcp.close(pair.now);
        let probes = pair.pass(Duration::from_secs(179));
        assert!(probes.iter().any(|(from_a, _)| !from_a), "the peer answers");
        assert_eq!(pair.a.tcp.state(), State::FinWait1);
        assert_eq!(resets(&pair.pass(Duration::from_secs(1))), 1);
        assert_eq!((pair.a.tcp.is_gone(), pair.a.tcp.failure()), (true, Some(Error::TimedOut)));
        assert_eq!((pair.a.tcp.poll_timeout(), pair.a.tcp.unacknowledged().count()), (None, 0));
        pair.b.read(pair.now);
        assert_eq!((pair.b.read.len(), pair.b.tcp.recv(pair.now).err()), (1000, Some(Error::Reset)));
    }

    #[test]
    fn an_orphan_lives_while_its_peer_reads() {
        let mut pair = closed_window();
        pair.a.tcp.close(pair.now);
        for _ in 0..20 {
            pair.pass(Duration::from_secs(150));
            pair.b.read(pair.now);
        }
        assert_eq!(pair.b.read, Piece::numbered(0, 5000).bytes());
        assert!(matches!(pair.b.tcp.recv(pair.now), Ok(Received::End)));
    }

    /// The peer acknowledges a byte from time to time. Without an end, it could keep an orphan for
    /// months.
    #[test]
    fn an_orphan_is_not_kept_by_single_bytes() {
        let mut pair = pair();
        pair.a.tcp.send(stream(0, 8000), false).unwrap();
        pair.a.output(pair.now);
        pair.a.tcp.close(pair.now);
        let mut header = pair.b.tcp.header(pair.b.tcp.una(), Flags::ACK, pair.now).0;
        let mut seconds = 0;
        while !pair.a.tcp.is_gone() && seconds < 10_000 {
            seconds += 100;
            pair.now += Duration::from_secs(100);
            header.ack = pair.a.tcp.una() + 1;
            header.options.timestamps = pair.b.tcp.timestamps(false, pair.now);
            pair.a.answer(header, pair.now);
            pair.a.tcp.handle_timeout(pair.now);
            pair.a.output(pair.now);
        }
        assert_eq!(seconds, 200);
    }

    /// A window that opens and closes again is no progress.
    #[test]
    fn an_orphan_is_not_kept_by_windows_in_which_nothing_fits() {
        let mut pair = closed_window();
        pair.a.tcp.close(pair.now);
        let mut header = pair.b.tcp.header(pair.b.tcp.una(), Flags::ACK, pair.now).0;
        let mut seconds = 0;
        while !pair.a.tcp.is_gone() && seconds < 1000 {
            seconds += 1;
            pair.now += Duration::from_secs(1);
            for window in [1, 0] {
                header.window = window;
                header.options.timestamps = pair.b.tcp.timestamps(false, pair.now);
                pair.a.answer(header, pair.now);
            }
            pair.a.tcp.handle_timeout(pair.now);
            pair.a.output(pair.now);
        }
        assert_eq!(seconds, 180);
    }

    #[test]
    fn close_before_the_answer_to_syn_is_silent() {
        let mut pair = Pair::new(&Config::default(), &Config::default());
        pair.a.tcp.close(pair.now);
        assert!(pair.a.output(pair.now).is_empty() && pair.a.tcp.is_gone());
    }

    #[test]
    fn close_before_the_handshake_is_complete_follows_it() {
        let mut pair = Pair::new(&Config::default(), &Config::default());
        pair.b.tcp.close(pair.now);
        pair.settle();
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::CloseWait, State::FinWait2));
    }

    #[test]
    fn abort_resets_and_drops_what_is_queued() {
        let mut pair = pair();
        pair.a.tcp.send(stream(0, 100_000), false).unwrap();
        pair.a.tcp.abort(pair.now);
        let sent = pair.settle();
        assert_eq!((sent.len(), resets(&sent)), (1, 1));
        assert_eq!(pair.b.tcp.failure(), Some(Error::Reset));
        assert_eq!(pair.a.tcp.send(stream(0, 1), false).unwrap_err().why, Refused::Over(Error::Aborted));
    }

    #[test]
    fn a_repeated_fin_is_answered_and_time_wait_begins_again() {
        let mut pair = pair();
        pair.b.tcp.close(pair.now);
        pair.settle();
        pair.a.tcp.close(pair.now);
        let fin = pair.a.output(pair.now).remove(0);
        pair.b.input(&fin, pair.now);
        assert_eq!(pair.b.output(pair.now).len(), 1);
        let until = pair.b.tcp.poll_timeout().unwrap();
        pair.now += Duration::from_secs(30);
        pair.b.input(&fin, pair.now);
        assert_eq!(pair.b.output(pair.now)[0].header.ack, fin.header.seq + 1);
        assert_eq!(pair.b.tcp.poll_timeout(), Some(until + Duration::from_secs(30)));
    }

    /// Only the peer's own FIN is the last segment before `RCV.NXT`. All others are answered at
    /// most. Proves INET-6.
    #[test]
    fn another_fin_does_not_begin_time_wait_again() {
        for timestamps in [true, false] {
            let config = Config { timestamps, ..Config::default() };
            let mut pair = Pair::connected(&config, &config);
            pair.a.tcp.send(stream(0, 5000), false).unwrap();
            pair.settle();
            pair.b.read(pair.now);
            pair.b.tcp.close(pair.now);
            pair.settle();
            pair.a.tcp.close(pair.now);
            let fin = pair.a.output(pair.now).remove(0);
            pair.b.input(&fin, pair.now);
            pair.b.output(pair.now);
            let until = pair.b.tcp.poll_timeout().unwrap();
            assert_eq!(pair.b.tcp.state(), State::TimeWait);
            pair.now += Duration::from_secs(30);
            let nxt = fin.header.seq + 1;
            for (seq, len) in [(nxt - 5000, 0), (nxt - 2, 0), (nxt - 1000, 500), (nxt + (1 << 24), 0), (nxt - 10, 10)] {
                let other = Header { seq, ..fin.header };
                pair.b.answer_text(other, len, pair.now);
                assert_eq!(pair.b.tcp.poll_timeout(), Some(until), "{seq:?} {len}");
            }
            if let Some(stamps) = fin.header.options.timestamps {
                let mut old = fin.header;
                old.options.timestamps = Some(Timestamps { value: stamps.value.wrapping_sub(1), ..stamps });
                pair.b.answer(old, pair.now);
                assert_eq!(pair.b.tcp.poll_timeout(), Some(until), "an old timestamp");
            }
            // The FIN may come with payload that was received before.
            pair.b.answer_text(Header { seq: nxt - 11, ..fin.header }, 10, pair.now);
            assert_eq!(pair.b.tcp.poll_timeout(), Some(until + Duration::from_secs(30)));
        }
    }

    #[test]
    fn a_later_syn_reuses_time_wait() {
        let mut pair = pair();
        pair.a.tcp.close(pair.now);
        pair.settle();
        let mut syn = Header { seq: pair.a.tcp.receiver.nxt() + 100, flags: Flags::SYN, ..Header::default() };
        assert_eq!(pair.a.tcp.reused_by(&syn), None, "not in TIME-WAIT");
        pair.b.tcp.close(pair.now);
        pair.settle();
        assert_eq!(pair.a.tcp.state(), State::TimeWait);
        let recent = pair.a.tcp.clock.unwrap().recent();
        let least = pair.a.tcp.reused_by(&syn).unwrap();
        assert!(pair.a.tcp.sender.next_seq() < least);
        let mut with = |value: u32, seq: Seq| {
            syn.seq = seq;
            syn.options.timestamps = Some(Timestamps { value, echo: 0 });
            pair.a.tcp.reused_by(&syn).is_some()
        };
        let nxt = pair.b.tcp.sender.next_seq();
        assert!(with(recent.wrapping_add(1), nxt - 5), "by timestamp");
        assert!(!with(recent.wrapping_sub(1), nxt + 5), "an old SYN");
        assert!(with(recent, nxt + 5) && !with(recent, nxt - 5), "by number");
        syn.options.timestamps = None;
        syn.seq = nxt - 5;
        assert_eq!(pair.a.tcp.reused_by(&syn), None);
    }

    #[test]
    fn icmp_errors_are_believed_for_segments_in_flight() {
        let port = IcmpError::Unreachable(Unreachable::Port);
        let mut end = End::new(super::super::Connection::connect(&Config::default(), start(100), None, Time::ZERO));
        assert!(!end.tcp.handle_icmp_error(port, Some(Seq(100)), Time::ZERO), "nothing is in flight");
        end.output(Time::ZERO);
        for seq in [99, 101, 5_000_000] {
            assert!(!end.tcp.handle_icmp_error(port, Some(Seq(seq)), Time::ZERO));
        }
        assert!(end.tcp.handle_icmp_error(IcmpError::Unreachable(Unreachable::Network), Some(Seq(100)), Time::ZERO));
        assert_eq!(end.tcp.state(), State::SynSent, "a soft error");
        assert!(end.tcp.handle_icmp_error(port, Some(Seq(100)), Time::ZERO));
        assert_eq!(end.tcp.failure(), Some(Error::Unreachable(Unreachable::Port)));
    }

    #[test]
    fn a_next_hop_that_does_not_answer_ends_the_handshake() {
        let mut end = End::new(super::super::Connection::connect(&Config::default(), start(100), None, Time::ZERO));
        assert!(end.tcp.handle_icmp_error(IcmpError::Unreachable(Unreachable::Host), None, Time::ZERO));
        assert_eq!(end.tcp.failure(), Some(Error::Unreachable(Unreachable::Host)));
    }

    #[test]
    fn an_icmp_error_does_not_end_an_established_connection_but_names_the_cause() {
        let mut pair = pair();
        pair.a.tcp.send(stream(0, 100), false).unwrap();
        pair.a.output(pair.now);
        let una = pair.a.tcp.una();
        assert!(pair.a.tcp.handle_icmp_error(IcmpError::Unreachable(Unreachable::Port), Some(una), pair.now));
        assert_eq!(pair.a.tcp.state(), State::Established);
        while let Some(next) = pair.a.tcp.poll_timeout() {
            pair.a.tcp.handle_timeout(next);
            pair.a.output(next);
        }
        assert_eq!(pair.a.tcp.failure(), Some(Error::Unreachable(Unreachable::Port)));
    }

    #[test]
    fn a_peer_that_does_not_answer_times_out() {
        let mut end = End::new(super::super::Connection::connect(&Config::default(), start(100), None, Time::ZERO));
        let (mut now, mut syns) = (Time::ZERO, end.output(Time::ZERO).len());
        while let Some(next) = end.tcp.poll_timeout() {
            now = next;
            end.tcp.handle_timeout(now);
            syns += end.output(now).len();
        }
        assert_eq!((syns, end.tcp.failure()), (8, Some(Error::TimedOut)));
        assert!(now.since(Time::ZERO) > Duration::from_secs(180));
        assert!(matches!(end.tcp.recv(now), Err(Error::TimedOut)));
    }

    #[test]
    fn a_device_that_is_gone_ends_the_connection() {
        let mut pair = pair();
        pair.a.tcp.handle_device_gone();
        assert!(pair.a.output(pair.now).is_empty() && pair.a.tcp.is_gone());
        assert_eq!(pair.a.events, [Event::Closed(Some(Error::DeviceGone))]);
    }
}
