//! The size of segments. It depends on the peer's MSS, on the announced path MTU, and on the
//! results of probes.
//!
//! Why probes: on a path without "packet too big" messages, full segments are lost without a
//! notice. After four timeouts in a row the size is therefore halved, and then larger segments are
//! tried one by one.

use crate::tcp::Seq;

/// After this number of timeouts in a row, the path is suspected of dropping large packets.
const SUSPECT: u32 = 4;

/// The search ends when its range is this small, in bytes.
const CLOSE: u32 = 8;

/// After this number of microseconds the path may have changed, and the search begins again.
const SEARCH_AGAIN: u64 = 600_000_000;

/// Sizes are bytes of payload and options of one segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PathSize {
    /// The size that is used now.
    pub(super) size: u32,
    /// The size that the announced path MTU admits.
    path: u32,
    peer: u32,
    options: u32,
    pub(super) floor: u32,
    /// The range of the search: `low` was proved to work, and `high` was not yet proved to fail.
    low: u32,
    high: u32,
    /// Whether the path dropped large segments, so that it is searched although the user did not
    /// ask for it.
    pub(super) suspect: bool,
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
    #[inline]
    pub(super) fn size(&self) -> u32 {
        self.size.min(self.peer) - self.options
    }

    /// The size that the announced path MTU admits.
    pub(super) fn path(&self) -> u32 {
        self.path
    }

    pub(super) fn set_path(&mut self, path: u32, searches: bool) {
        let path = path.max(48);
        self.high = path;
        self.low = self.low.min(path);
        self.size = if searches && path > self.path { self.size.min(path) } else { path };
        (self.path, self.refuted) = (path, None);
    }

    /// The size to try next, if the range of the search is large enough.
    pub(super) fn candidate(&mut self, now: u64) -> Option<u32> {
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

    /// Adopts the size of the probe, if the peer has received the probe: it has everything before
    /// `una`.
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
