//! How large a segment may be: what the peer accepts, what the path is said to take (RFC 1191, 8201), and what was tried
//! (RFC 4821).
//!
//! A "packet too big" is a hint that can be forged: it never goes below a floor. Where no such message comes through, full segments
//! vanish without a word. After four timeouts in a row the size is therefore halved, and then larger segments are tried one by one.

use super::recovery::State;
use super::{Kind, Sender, Transmission};
use crate::Time;
use crate::tcp::{Carrier, Seq};

/// Timeouts in a row that make a path suspect of swallowing large packets.
const SUSPECT: u32 = 4;
/// The search ends when it is so exact, in bytes.
const CLOSE: u32 = 8;
/// Segments that the congestion window must have for a probe.
const PROBE_WINDOW: u32 = 11;
/// After so many microseconds the path may have changed.
const SEARCH_AGAIN: u64 = 600_000_000;

/// Sizes are bytes of payload and options of one segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathSize {
    /// What is used now.
    size: u32,
    /// What the path is said to take.
    path: u32,
    peer: u32,
    options: u32,
    floor: u32,
    /// The search is between these: proved, and not yet refuted.
    low: u32,
    high: u32,
    /// The path swallowed large segments, so that it is searched although the user did not ask for it.
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

    /// Payload of a segment.
    pub(super) fn size(&self) -> u32 {
        self.size.min(self.peer) - self.options
    }

    /// What the path is said to take.
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

    /// The size to try, if one is worth it.
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

    /// A probe was sent.
    pub(super) fn probe_sent(&mut self, start: Seq, end: Seq) {
        self.probe = Some((start, end));
    }

    /// Whether the peer has the probe, given that it has everything before `una`.
    pub(super) fn delivered(&mut self, una: Seq) {
        if let Some((start, end)) = self.probe.filter(|(_, end)| *end <= una) {
            self.probe = None;
            self.size = (end - start) + self.options;
            self.low = self.size;
        }
    }

    /// The start of the probe, if there is one on the way.
    pub(super) fn probe(&self) -> Option<Seq> {
        self.probe.map(|(start, _)| start)
    }

    /// The probe did not arrive.
    pub(super) fn failed(&mut self, now: u64) {
        if let Some((start, end)) = self.probe.take() {
            self.high = (end - start + self.options - 1).max(self.size);
            self.refuted = Some(now);
        }
    }

    /// The retransmission timer expired `timeouts` times in a row.
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
    /// The route's path MTU changed: `max_payload` bytes of payload and options fit into a segment.
    pub fn set_max_payload(&mut self, max_payload: u32) {
        self.path.set_path(max_payload, self.options.mtu_probing || self.path.suspect);
    }

    /// A router said that the segment with number `seq` was too big, and that `max_payload` bytes of payload and options would fit.
    /// Returns whether that is believed: the number must be in flight. What was sent in larger segments is sent again, and the
    /// congestion window stays as it is.
    pub fn too_big(&mut self, seq: Seq, max_payload: u32, now: Time) -> bool {
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

    /// A segment that is larger than the others, to learn whether it arrives.
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
        // If the probe is lost, what is sent behind it must draw enough acknowledgements to notice.
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
