//! The choice of what is sent: lost segments first, then probes and new data.
//!
//! Why a choice that does not change until it is confirmed: the output may refuse the segment, and
//! then nothing was sent. Only `handle_sent` moves numbers on.

use super::core::{Probe, Purpose, Sender};
use super::options::{Transmission, TransmissionKind};
use super::posted::Id;
use super::scoreboard::Range;
use crate::tcp::{Carrier, Seq};
use crate::time::Time;

/// What was not sent yet, and what is admitted of it.
struct Unsent {
    len: u32,
    /// Whether FIN follows.
    fin: bool,
    /// Bytes of a segment.
    size: u32,
    /// The bytes that the peer's window admits, and the segments that the congestion window admits.
    room: u32,
    quota: u32,
    /// Whether a part of a segment may be sent, because the peer's window stays small.
    released: bool,
}

impl<C: Carrier> Sender<C> {
    /// Chooses the next transmission, if there is one: lost segments, new data, or a probe.
    /// `offload`: the bytes of payload that the device can cut into segments, or 0 if it cannot
    /// cut.
    ///
    /// The result is the same until [`handle_sent`](Self::handle_sent) is called for it. Call this
    /// until it returns `None`; [`poll_timeout`](Self::poll_timeout) follows.
    pub fn poll_transmit(&mut self, now: Time, offload: usize) -> Option<Transmission> {
        let at = now.micros();
        let in_ring = self.posted.settle();
        self.waits_for_ring = false;
        self.pacing.clear();
        if !self.syn_acked {
            let syn = self.next_syn();
            self.waiting_since = self.waiting_since.or(syn.map(|_| at));
            return syn;
        }
        self.agreed?;
        // If there is nothing to send, nothing waits.
        if in_ring > 0 && in_ring >= self.options.ring_bytes && !self.is_quiet() {
            self.waits_for_ring = true;
            return None;
        }
        let next = self.choose(at, offload);
        self.clocks.note(at, self.is_busy(), next.is_none() && self.is_blocked_by_peer());
        match next {
            None => self.arm_persist(at),
            // The user timeout also runs while the device's ring is full.
            Some(_) => self.waiting_since = self.waiting_since.or(Some(at)),
        }
        next
    }

    /// Whether [`poll_transmit`](Self::poll_transmit) has nothing to choose from: all that was
    /// queued has left, and nothing is known to be lost.
    pub(in crate::tcp) fn is_quiet(&self) -> bool {
        self.syn_acked
            && self.agreed.is_some()
            && self.unsent() == 0
            && (!self.fin || self.is_fin_sent())
            && self.scoreboard.lost() <= self.scoreboard.retransmitted()
            && self.probe.is_none()
            && !self.recovery.prefers_new()
    }

    /// Whether nothing is chosen. If the sender [is quiet](Self::is_quiet), this has no effect.
    pub(in crate::tcp) fn chooses_nothing(&mut self, now: Time, offload: usize) -> bool {
        self.choose(now.micros(), offload).is_none()
    }

    /// Does what [`poll_transmit`](Self::poll_transmit) does if the sender [is
    /// quiet](Self::is_quiet).
    pub(in crate::tcp) fn rest(&mut self, now: Time) {
        self.posted.settle();
        self.rest_behind(now);
    }

    /// The same directly behind a transmission, before which the posted ones were settled.
    #[inline]
    pub(in crate::tcp) fn rest_behind(&mut self, now: Time) {
        self.waits_for_ring = false;
        self.pacing.clear();
        self.clocks.note(now.micros(), self.is_busy(), false);
    }

    fn choose(&mut self, at: u64, offload: usize) -> Option<Transmission> {
        if self.recovery.prefers_new() {
            let new = self.next_new(at, offload);
            if new.is_some() || self.nxt > self.recovery.recovery_point() {
                return new;
            }
            self.recovery.no_new_data();
        }
        if let Some(lost) = self.next_lost(offload) {
            return Some(lost);
        }
        match self.probe {
            Some(Probe::Tail) => self.next_tail_probe(at),
            Some(Probe::Window) => self.next_new(at, offload).or_else(|| self.next_window_probe()),
            None => self.next_mtu_probe(at).or_else(|| self.next_new(at, offload)),
        }
    }

    fn is_busy(&self) -> bool {
        !self.scoreboard.is_empty() || self.unsent() > 0
    }

    fn is_blocked_by_peer(&self) -> bool {
        let unsent = self.unsent() as u32;
        unsent > 0 && self.quota() > 0 && self.window_end().distance(self.nxt) < unsent.min(self.segment_size()) as i32
    }

    #[inline]
    fn transmission(&self, seq: Seq, len: u32, kind: TransmissionKind) -> Transmission {
        Transmission {
            seq,
            len,
            syn: false,
            fin: false,
            push: false,
            cwr: false,
            ect: false,
            segment_size: self.segment_size(),
            kind,
        }
    }

    fn next_syn(&mut self) -> Option<Transmission> {
        let kind = match self.scoreboard.front() {
            None => TransmissionKind::New,
            Some(syn) if !syn.lost || syn.retransmitted => return None,
            Some(syn) if !self.posted.is_done_with(syn.id, syn.start, 1) => {
                self.waits_for_ring = true;
                return None;
            }
            Some(_) => TransmissionKind::Retransmission,
        };
        Some(Transmission { syn: true, ..self.transmission(self.iss, 0, kind) })
    }

    /// Sends up to `len` bytes of `range` again, and also FIN behind them if the range has one. It
    /// is one segment, if the device is not done with the others.
    fn retransmit(&mut self, range: &Range, len: u32, kind: TransmissionKind) -> Option<Transmission> {
        let size = self.segment_size();
        let is_done = |len: &u32| self.posted.is_done_with(range.id, range.start, range.len().min(*len));
        let Some(len) = [len, len.min(size)].into_iter().find(is_done) else {
            self.waits_for_ring = true;
            return None;
        };
        let payload = range.len() - u32::from(range.end > self.queue.end());
        let len = if payload > 0 { self.fit(range.start, len.min(payload), size) } else { 0 };
        let fin = len == payload && payload < range.len();
        let push = len > size || (len > 0 && self.queue.is_pushed_at(range.start + len));
        Some(Transmission { fin, push, ..self.transmission(range.start, len, kind) })
    }

    /// The payload that fits into a transmission of up to `len` bytes from `from` on, in whole
    /// segments where it is less.
    fn fit(&mut self, from: Seq, len: u32, size: u32) -> u32 {
        let fit = self.queue.fit(from, len);
        if fit < len && fit >= size { fit / size * size } else { fit }
    }

    fn next_lost(&mut self, offload: usize) -> Option<Transmission> {
        let n = self.scoreboard.next_lost()?;
        let range = self.scoreboard.get(n).copied()?;
        let (quota, size) = (self.quota(), self.segment_size());
        if quota == 0 {
            return None;
        }
        let mut len = size.saturating_mul(quota.min(offload as u32 / size).max(1));
        if range.start != self.una {
            let room = self.window_end().distance(range.start);
            let room = u32::try_from(room).ok().filter(|room| *room > 0)?;
            len = if room < size { room } else { len.min(room / size * size) };
        }
        self.retransmit(&range, len, TransmissionKind::Retransmission)
    }

    fn next_tail_probe(&mut self, at: u64) -> Option<Transmission> {
        // New data is more useful than a repetition, and may exceed the congestion window.
        let size = self.segment_size();
        let unsent = self.unsent() as u32;
        let room = self.window_end().distance(self.nxt);
        let fin = self.fin && !self.is_fin_sent();
        if (unsent > 0 || fin) && i64::from(room) >= i64::from(unsent.min(size).max(1)) {
            let len = if unsent > 0 { self.queue.fit(self.nxt, unsent.min(size)) } else { 0 };
            return Some(self.new_data(len, size, TransmissionKind::TailProbe));
        }
        let probe = self.scoreboard.last().copied().and_then(|range| {
            let skip = (range.len() - 1) / range.size * range.size;
            let last = Range { start: range.start + skip, ..range };
            self.retransmit(&last, size, TransmissionKind::TailProbe)
        });
        if probe.is_none() && !self.waits_for_ring {
            self.probe = None;
            self.arm_retransmission(at);
        }
        probe
    }

    fn next_window_probe(&mut self) -> Option<Transmission> {
        if !self.scoreboard.is_empty() || (self.unsent() == 0 && (!self.fin || self.is_fin_sent())) {
            self.probe = None;
            return None;
        }
        Some(self.transmission(self.una - 1, 0, TransmissionKind::WindowProbe))
    }

    /// Chooses new data that the congestion window, the peer's window and Nagle's algorithm admit.
    fn next_new(&mut self, at: u64, offload: usize) -> Option<Transmission> {
        let unsent = self.unsent() as u32;
        let fin = self.fin && !self.is_fin_sent();
        if unsent == 0 && !fin {
            return None;
        }
        let size = self.segment_size();
        let room = u32::try_from(self.window_end().distance(self.nxt)).unwrap_or(0);
        // A part of a segment is sent only if the peer's window stays small for long.
        let released = self.probe == Some(Probe::Window);
        if room == 0 || (room < unsent.min(size) && !released) {
            return None;
        }
        self.restart_after_idle(at);
        // A FIN without payload does not wait for the congestion window.
        let quota = if unsent == 0 { self.quota().max(1) } else { self.quota() };
        if quota == 0 {
            self.usage.note(true, self.scoreboard.unacked(), self.una, self.nxt);
            return None;
        }
        let new = Unsent { len: unsent, fin, size, room, quota, released };
        if unsent > size || unsent > room || fin || !self.scoreboard.is_empty() {
            return self.next_of_several(at, &new, offload);
        }
        // A message that is one segment, with nothing in flight: pacing and both windows admit it.
        let len = if self.is_end_held(&new) { 0 } else { self.fit(self.nxt, unsent, size) };
        let message = (len > 0).then(|| self.new_data(len, size, TransmissionKind::New));
        debug_assert_eq!(message, self.next_of_several(at, &new, offload));
        message
    }

    /// As much new data as pacing and both windows admit.
    fn next_of_several(&mut self, at: u64, new: &Unsent, offload: usize) -> Option<Transmission> {
        let Unsent { len: unsent, size, room, quota, .. } = *new;
        let rate = self.pace();
        if rate.is_some() && !self.scoreboard.is_empty() && self.pacing.must_wait(at, self.initial_window()) {
            return None;
        }
        // At most half of the window is sent at once, so that acknowledgements of the first half
        // clock the second half.
        let segments = quota.min((self.window.cwnd / 2).max(1)).min((offload as u32 / size).max(1));
        let segments = rate.map_or(segments, |rate| segments.min(rate.unit()));
        let most = size.saturating_mul(segments);
        let mut len = unsent.min(most).min(room);
        if len < unsent {
            len = if len > size { len / size * size } else { len };
        } else if self.is_end_held(new) {
            len -= unsent % size;
        }
        if len == 0 && unsent > 0 {
            return None;
        }
        if len > 0 {
            len = self.fit(self.nxt, len, size);
        }
        Some(self.new_data(len, size, TransmissionKind::New))
    }

    /// Whether the last segment of what is unsent is small, and must not be sent now.
    #[inline]
    fn is_end_held(&self, new: &Unsent) -> bool {
        !new.fin && !new.released && !self.may_send_small(self.nxt + new.len, new.len % new.size)
    }

    /// Whether a small segment of `small` bytes that ends at `end` may be sent now: Nagle's
    /// algorithm in Minshall's variant, and cork.
    fn may_send_small(&self, end: Seq, small: u32) -> bool {
        let held = self.cork || self.more_announced || (!self.options.nodelay && self.last_small_end > self.una);
        small == 0 || !held || end <= self.small_until
    }

    pub(super) fn new_data(&mut self, len: u32, size: u32, kind: TransmissionKind) -> Transmission {
        let all = len as usize == self.unsent();
        let room = i64::from(self.window_end().distance(self.nxt));
        let fin = self.fin && all && i64::from(len) < room.max(1);
        // PSH is set at the end of a write. On a large transmission it lets the receiver deliver
        // without waiting for more.
        let push =
            len > size || (len > 0 && (self.queue.is_pushed_at(self.nxt + len) || self.probe == Some(Probe::Window)));
        let ecn = len > 0 && self.uses_ecn();
        let cwr = ecn && self.cwr;
        Transmission { fin, push, ect: ecn, cwr, segment_size: size, ..self.transmission(self.nxt, len, kind) }
    }

    /// Shrinks the window after an idle time, because the path may have changed (RFC 5681, 4.1).
    fn restart_after_idle(&mut self, at: u64) {
        let idle = at.saturating_sub(self.last_sent);
        if !self.scoreboard.is_empty() || idle == 0 {
            return;
        }
        self.controller.control().idle(idle);
        if self.options.restart_idle && idle > self.rtt.timeout(0) {
            self.window.ssthresh = self.window.ssthresh.max(self.window.cwnd / 4 * 3);
            self.window.cwnd = self.window.cwnd.min(self.initial_window());
        }
        self.last_sent = at;
    }

    /// The payload of a transmission, by reference. It is valid until the next call.
    pub fn payload(&mut self, transmission: &Transmission) -> &[C::Sent] {
        self.scratch.clear();
        let Transmission { seq, len, .. } = *transmission;
        if len > 0 {
            // A message that is one write is one chunk. A clone of it would cost a count.
            if let Some(n) = self.queue.find_whole(seq, len) {
                return self.queue.chunk(n);
            }
            self.queue.copy(seq, len, &mut self.scratch);
        }
        &self.scratch
    }

    /// Handles that a transmission was posted to the device: the one that
    /// [`poll_transmit`](Self::poll_transmit) returned, or the first [part](Transmission::cut) of
    /// it. `poll_transmit` is to be called again.
    pub fn handle_sent(&mut self, transmission: &Transmission, ticket: C::Ticket, now: Time) {
        let at = now.micros();
        self.scratch.clear();
        let Transmission { seq, len, syn, fin, segment_size: size, kind, .. } = *transmission;
        if kind == TransmissionKind::WindowProbe {
            self.probe = None;
            self.window_probe_sent(at);
            return;
        }
        let id = self.posted.push(ticket, seq, len, size);
        let end = seq + len + u32::from(syn) + u32::from(fin);
        let (was_empty, is_new) = (self.scoreboard.is_empty(), seq == self.nxt);
        self.rack.sent(seq, end, at);
        if let Some(rate) = self.pace() {
            self.pacing.sent(len.div_ceil(size.max(1)), was_empty, rate, self.initial_window(), at);
        }
        if transmission.cwr {
            self.cwr = false;
        }
        if is_new {
            let range = Range::new(seq, end, size, at, id);
            self.recovery.prr.sent(range.segments());
            self.scoreboard.push(range);
            self.nxt = end;
            if len % size != 0 {
                self.last_small_end = seq + len;
            }
            let limited = self.quota() == 0;
            self.usage.note(limited, self.scoreboard.unacked(), self.una, self.nxt);
        } else {
            self.note_retransmitted(seq, end, size, at, id);
        }
        self.last_sent = at;
        match kind {
            TransmissionKind::TailProbe => self.tail_probe_sent(!is_new, at),
            TransmissionKind::Retransmission if seq == self.una => self.arm_retransmission(at),
            TransmissionKind::Retransmission => {}
            TransmissionKind::New | TransmissionKind::MtuProbe | TransmissionKind::WindowProbe => {
                self.probe = None;
                if kind == TransmissionKind::MtuProbe {
                    self.path.probe_sent(seq, end);
                }
                let pending = self.timer.map(|timer| timer.purpose);
                if was_empty || matches!(pending, None | Some(Purpose::TailProbe | Purpose::Persist)) {
                    self.arm_retransmission(at);
                }
                self.arm_tail_probe(at);
            }
        }
    }

    fn note_retransmitted(&mut self, seq: Seq, end: Seq, size: u32, at: u64, id: Id) {
        self.scoreboard.split(seq);
        self.scoreboard.split(end);
        let n = self.scoreboard.find(seq);
        let mut segments = 0;
        self.scoreboard.change(n, |range| {
            (range.sent, range.id, range.size) = (at, id, size);
            (range.ever_retransmitted, range.retransmitted) = (true, true);
            segments = range.segments();
        });
        self.recovery.note_retransmitted(segments, self.stamp(at));
        self.recovery.prr.sent(segments);
    }
}
