//! The SACK blocks of the last acknowledgement.
//!
//! Why they are kept: a peer repeats up to four blocks in each acknowledgement. Only the new part
//! of each block is processed, so that its cost is that of what has changed.

use crate::tcp::{SackBlocks, Seq};

/// The SACK blocks of the last acknowledgement. Peers repeat blocks, so only the new parts are
/// processed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sacks {
    pub(super) blocks: [(Seq, Seq); SackBlocks::MOST],
    pub(super) len: usize,
    /// The number after the last segment that was acknowledged selectively.
    pub(super) high: Option<Seq>,
}

impl Sacks {
    /// Forgets the blocks, because the peer dropped the payload that they report.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// The part of `from..to` that was not seen in the last acknowledgement.
    pub(super) fn rest(&self, from: Seq, to: Seq) -> (Seq, Seq) {
        let seen = self.blocks[..self.len].iter().find(|(start, end)| *start <= from && from <= *end);
        (seen.map_or(from, |(_, end)| *end), to)
    }
}
