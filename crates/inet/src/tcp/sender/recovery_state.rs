//! The values of loss recovery: its state, what is needed to undo it, the measured reordering.

use super::prr::Prr;
use super::rack::DUPLICATES;
use crate::tcp::Seq;
use crate::tcp::congestion::Window;

/// The limit for the measured reordering, in segments.
const MOST_REORDERING: u32 = 300;

/// The state of loss recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecoveryState {
    /// No segment is missing.
    #[default]
    Open,
    /// A segment may be missing.
    Disorder,
    /// The peer saw a congestion mark, and the window shrinks.
    Cwr,
    /// A segment is lost and is sent again, and the window shrinks.
    Recovery,
    /// The retransmission timer expired.
    Loss,
}

/// The state with which a reduction of the window is undone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Undo {
    /// The first number that was in flight at the reduction.
    pub(super) from: Seq,
    pub(super) before: Window,
    /// Segments that were sent again, less those that the peer reported as duplicates. `None`
    /// before the first retransmission.
    pub(super) open: Option<u32>,
}

/// The window of a reduction that is not undone.
pub(super) const NOTHING: Window = Window { cwnd: 0, ssthresh: 0 };

/// The state of loss recovery.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Recovery {
    pub(super) state: RecoveryState,
    /// The number after the last one that was in flight when the state began.
    pub(super) recovery_point: Seq,
    pub(super) undo: Option<Undo>,
    pub(super) prr: Prr,
    /// The timestamp of the first retransmission.
    pub(super) first_retransmission: Option<u32>,
    /// Whether F-RTO is deciding if the timeout was needed.
    pub(super) frto: bool,
    /// Whether F-RTO requires that only new data is sent until the next acknowledgement.
    pub(super) new_only: bool,
    /// The number of segments whose arrival duplicate acknowledgements indicate, if the peer has no
    /// selective ones.
    pub(super) duplicates: u32,
    /// The largest reordering that was seen, in segments, and how often reordering was seen.
    pub(super) reordering: u32,
    pub(super) reordered: u32,
    /// Segments that were sent again since the connection began.
    pub(super) retransmitted: u32,
    /// The tail loss probe: the end of the numbers in flight, and whether the probe repeated a
    /// segment.
    pub(super) tail_probe: Option<(Seq, bool)>,
}

/// What remains of recoveries that are over: see the fields of [`Recovery`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RecoveryCounts {
    recovery_point: Seq,
    reordering: u32,
    reordered: u32,
    retransmitted: u32,
}

impl Recovery {
    pub(super) fn new(iss: Seq) -> Self {
        Self {
            state: RecoveryState::Open,
            recovery_point: iss,
            undo: None,
            prr: Prr::default(),
            first_retransmission: None,
            frto: false,
            new_only: false,
            duplicates: 0,
            reordering: DUPLICATES,
            reordered: 0,
            retransmitted: 0,
            tail_probe: None,
        }
    }

    /// No segment is missing, and what was counted before.
    pub(super) fn open(counts: RecoveryCounts) -> Self {
        let RecoveryCounts { recovery_point, reordering, reordered, retransmitted } = counts;
        Self { reordering, reordered, retransmitted, ..Self::new(recovery_point) }
    }

    /// What remains of earlier recoveries.
    pub(super) fn counts(&self) -> RecoveryCounts {
        let Self { recovery_point, reordering, reordered, retransmitted, .. } = *self;
        RecoveryCounts { recovery_point, reordering, reordered, retransmitted }
    }

    /// The values that count when nothing is in flight. Unless the window is being reduced, it will
    /// shrink from the beginning.
    pub(super) fn idle(&self) -> Self {
        let prr = if self.shrinks() { self.prr } else { Prr::default() };
        Self { prr, ..self.clone() }
    }

    pub(super) fn state(&self) -> RecoveryState {
        self.state
    }

    pub(super) fn recovery_point(&self) -> Seq {
        self.recovery_point
    }

    pub(super) fn reordering(&self) -> u32 {
        self.reordering
    }

    pub(super) fn prefers_new(&self) -> bool {
        self.new_only
    }

    /// Ends F-RTO: it cannot decide, because there is no new data to send.
    pub(super) fn no_new_data(&mut self) {
        (self.new_only, self.frto) = (false, false);
    }

    /// Whether the window is being reduced in steps.
    pub(super) fn shrinks(&self) -> bool {
        matches!(self.state, RecoveryState::Cwr | RecoveryState::Recovery)
    }

    /// Notes that segments were sent again.
    pub(super) fn note_retransmitted(&mut self, segments: u32, stamp: u32) {
        if let Some(undo) = &mut self.undo {
            undo.open = Some(undo.open.unwrap_or(0) + segments);
        }
        self.first_retransmission.get_or_insert(stamp);
        self.retransmitted = self.retransmitted.wrapping_add(segments);
    }

    /// Notes that the peer reported segments before `end` as duplicates.
    pub(super) fn duplicate(&mut self, end: Seq, segments: u32) {
        if let Some(undo) = &mut self.undo
            && end > undo.from
        {
            undo.open = undo.open.map(|open| open.saturating_sub(segments));
        }
    }

    /// Notes reordering: a segment at `low` was delivered for the first time after a segment that
    /// ends at `high`.
    pub(super) fn saw_reordering(&mut self, low: Seq, high: Seq, size: u32) {
        let segments = (high - low).div_ceil(size.max(1));
        self.reordering = self.reordering.max(segments.min(MOST_REORDERING));
        self.reordered += 1;
    }

    /// Whether `echo` is a timestamp from before the first retransmission.
    pub(super) fn is_early(&self, echo: Option<u32>) -> bool {
        matches!((echo, self.first_retransmission), (Some(echo), Some(first)) if Seq(echo) < Seq(first))
    }

    pub(super) fn all_were_duplicates(&self) -> bool {
        self.undo.is_some_and(|undo| undo.open == Some(0))
    }
}
