//! The size of segments. It depends on the peer's MSS, on the announced path MTU (RFC 1191, 8201), and on the results
//! of probes (RFC 4821).
//!
//! A "packet too big" message can be forged, so it never reduces the size below a floor. On a path without such
//! messages, full segments are lost without a notice. After four timeouts in a row the size is therefore halved, and
//! then larger segments are tried one by one.

use super::recovery::State;
use super::{Kind, Sender, Transmission};
use crate::Time;
use crate::tcp::{Carrier, Seq};

/// After this number of timeouts in a row, the path is suspected of dropping large packets.
const SUSPECT: u32 = 4;
/// The search ends when its range is this small, in bytes.
const CLOSE: u32 = 8;
/// The number of segments that the congestion window must have for a probe.
const PROBE_WINDOW: u32 = 11;
/// After this number of microseconds the path may have changed, and the search begins again.
const SEARCH_AGAIN: u64 = 600_000_000;

/// Sizes are bytes of payload and options of one segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathSize {
    /// The size that is used now.
    size: u32,
    /// The size that the announced path MTU admits.
    path: u32,
    peer: u32,
    options: u32,
    floor: u32,
    /// The range of the search: `low` was proved to work, and `high` was not yet proved to fail.
    low: u32,
    high: u32,
    /// Whether the path dropped large segments, so that it is searched although the user did not ask for it.
    suspect: bool,
    probe: Option<(Seq, Seq)>,
    refuted: Option<u64>,
}

impl PathSize {
    pub(super) fn new(path: u32, floor: u32) -> Self {
        let path = path.max(48);
        let floor = floor.min(path);
        Self {
            size: path,
            path,
            peer: path,
            options: 0,
            floor,
            low: floor,
            high: path,
            suspect: false,
            probe: None,
            refuted: None,
        }
    }

    pub(super) fn set_peer(&mut self, mss: u32, options: u32) {
        (self.peer, self.options) = (mss.max(48), options);
    }

    /// The largest segment that the peer accepts.
    pub(super) fn peer(&self) -> u16 {
        u16::try_from(self.peer).unwrap_or(u16::MAX)
    }

    pub(super) fn has_timestamps(&self) -> bool {
        self.options > 0
    }

    /// Bytes of payload of a segment.
    pub(super) fn size(&self) -> u32 {
        self.size.min(self.peer) - self.options
    }

    /// The size that the announced path MTU admits.
    pub(super) fn path(&self) -> u32 {
        self.path
    }

    fn set_path(&mut self, path: u32, searches: bool) {
        let path = path.max(48);
        self.high = path;
        self.low = self.low.min(path);
        self.size = if searches && path > self.path { self.size.min(path) } else { path };
        (self.path, self.refuted) = (path, None);
    }

    /// The size to try next, if the range of the search is large enough.
    fn candidate(&mut self, now: u64) -> Option<u32> {
        if self.refuted.is_some_and(|at| now.saturating_sub(at) > SEARCH_AGAIN) {
            (self.high, self.refuted) = (self.path, None);
        }
        let high = self.high.min(self.peer);
        let mut candidate = self.low.midpoint(high);
        if candidate <= self.size {
            candidate = self.size.midpoint(high);
        }
        (high >= self.size + CLOSE && self.probe.is_none()).then(|| candidate - self.options)
    }

    /// Notes that a probe was sent.
    pub(super) fn probe_sent(&mut self, start: Seq, end: Seq) {
        self.probe = Some((start, end));
    }

    /// Takes the size of the probe, if the peer has received the probe: it has everything before `una`.
    pub(super) fn delivered(&mut self, una: Seq) {
        if let Some((start, end)) = self.probe.filter(|(_, end)| *end <= una) {
            self.probe = None;
            self.size = (end - start) + self.options;
            self.low = self.size;
        }
    }

    /// The start of the probe, if one is in flight.
    pub(super) fn probe(&self) -> Option<Seq> {
        self.probe.map(|(start, _)| start)
    }

    /// Notes that the probe was lost.
    pub(super) fn failed(&mut self, now: u64) {
        if let Some((start, end)) = self.probe.take() {
            self.high = (end - start + self.options - 1).max(self.size);
            self.refuted = Some(now);
        }
    }

    /// Notes that the retransmission timer expired `timeouts` times in a row.
    pub(super) fn timed_out(&mut self, timeouts: u32, now: u64) {
        self.failed(now);
        if timeouts >= SUSPECT && self.size.min(self.peer) > self.floor {
            self.high = self.size - 1;
            self.size = (self.size.min(self.peer) / 2).max(self.floor);
            (self.low, self.suspect, self.refuted) = (self.floor, true, Some(now));
        }
    }
}

impl<C: Carrier> Sender<C> {
    /// Applies a change of the route's path MTU: `max_payload` bytes of payload and options fit into a segment.
    pub fn set_max_payload(&mut self, max_payload: u32) {
        self.path.set_path(max_payload, self.options.mtu_probing || self.path.suspect);
    }

    /// Handles a router's message that the segment with number `seq` was too big, and that `max_payload` bytes of
    /// payload and options would fit. Returns whether the message is used: the number must be in flight. Payload that
    /// was sent in larger segments is sent again, and the congestion window is not reduced.
    pub fn handle_too_big(&mut self, seq: Seq, max_payload: u32, now: Time) -> bool {
        let max_payload = max_payload.max(self.path.floor);
        let in_flight = self.una <= seq && seq < self.nxt;
        if !in_flight || max_payload >= self.path.size {
            return false;
        }
        self.path.failed(now.micros());
        self.set_max_payload(max_payload);
        let size = self.segment_size();
        self.board.mark_lost_if(|range| range.len().min(range.size) > size);
        self.repeat_at_full_window();
        true
    }

    /// A probe: a segment that is larger than the others. Its arrival proves that the size works.
    pub(super) fn next_mtu_probe(&mut self, at: u64) -> Option<Transmission> {
        if !(self.options.mtu_probing || self.path.suspect)
            || self.recovery.state() != State::Open
            || self.board.sacked() > 0
        {
            return None;
        }
        if self.window.cwnd < PROBE_WINDOW || self.quota() < 2 {
            return None;
        }
        let len = self.path.candidate(at)?;
        // If the probe is lost, the payload behind it must cause enough acknowledgements to detect the loss.
        let needed = len + (self.recovery.reordering() + 1) * self.segment_size();
        let room = i64::from(self.window_end().distance(self.nxt));
        if (self.unsent() as u64) < u64::from(needed) || room < i64::from(needed) || self.queue.fit(self.nxt, len) < len
        {
            return None;
        }
        Some(Transmission { push: false, ..self.new_data(len, len, Kind::MtuProbe) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_halves_what_is_open_and_ends() {
        let mut path = PathSize::new(600, 512);
        path.set_peer(1460, 0);
        assert_eq!(path.candidate(0), None, "the path takes no more");
        path.set_path(1460, true);
        assert_eq!((path.size(), path.candidate(0)), (600, Some(986)));
        path.probe_sent(Seq(1), Seq(987));
        assert_eq!(path.candidate(0), None, "one at a time");
        path.delivered(Seq(986));
        assert_eq!(path.size(), 600);
        path.delivered(Seq(987));
        assert_eq!((path.size(), path.candidate(0)), (986, Some(1223)));
        path.probe_sent(Seq(2000), Seq(3223));
        path.failed(5);
        assert_eq!((path.size(), path.candidate(5)), (986, Some(1104)));
        for _ in 0..20 {
            if let Some(size) = path.candidate(5) {
                path.probe_sent(Seq(0), Seq(size));
                path.failed(5);
            }
        }
        assert_eq!((path.size(), path.candidate(5)), (986, None));
        assert!(path.candidate(5 + SEARCH_AGAIN + 1).is_some());
    }

    #[test]
    fn large_segments_that_vanish_are_halved_down_to_the_floor() {
        let mut path = PathSize::new(1460, 512);
        path.set_peer(1460, 12);
        path.timed_out(3, 0);
        assert_eq!(path.size(), 1448);
        path.timed_out(4, 0);
        assert_eq!(path.size(), 718);
        path.timed_out(5, 0);
        path.timed_out(6, 0);
        assert_eq!(path.size(), 500, "512 with options");
        assert!(path.suspect);
    }
}
