//! How much work one pass over one queue does.
//!
//! A pass holds the lock of its pair, and the other pairs of its worker wait for it. The driver
//! decides how large a chain is, so the number of chains does not bound the time. A pass ends when
//! one of three counts is used up:
//!
//! | count | limit | what it bounds |
//! | --- | --- | --- |
//! | chains | [`CHAINS`] | descriptors of common chains, and calls of the port |
//! | pieces of memory | [`PIECES`] | descriptors that are read, checked and translated |
//! | bytes | [`BYTES`] | copies. A frame that is dropped counts as the longest |
//!
//! What is under way is finished: a group of frames, or one frame in up to 64 Ki pieces. Chains
//! that are popped and not completed count, and so do chains whose bytes cannot be copied. The rest
//! stays available for the next pass. It needs no notification: a worker whose ring has chains does
//! not sleep.

use super::port::MAX_WIRE;
use super::stats::Tally;

/// Chains of a pass.
pub(super) const CHAINS: u16 = 256;
/// Pieces of memory of a pass.
const PIECES: usize = 8192;
/// Bytes of a pass.
const BYTES: u64 = 4 << 20;

/// What is left of it.
#[derive(Debug)]
pub(super) struct Budget {
    chains: u16,
    pieces: usize,
    /// The bytes in the tally with which the pass ends.
    until: u64,
}

impl Budget {
    /// For a pass that begins with this tally.
    #[inline]
    pub(super) fn new(tally: &Tally) -> Self {
        Self { chains: CHAINS, pieces: PIECES, until: bytes(tally) + BYTES }
    }

    /// The same with fewer chains.
    pub(super) fn of(chains: u16, tally: &Tally) -> Self {
        Self { chains, ..Self::new(tally) }
    }

    /// Whether the pass continues.
    #[inline]
    pub(super) fn lasts(&self, tally: &Tally) -> bool {
        self.chains > 0 && self.pieces > 0 && bytes(tally) < self.until
    }

    /// Chains that may still be popped.
    #[inline]
    pub(super) fn chains(&self) -> u16 {
        self.chains
    }

    /// Counts chains of one piece each.
    #[inline]
    pub(super) fn spend(&mut self, chains: u16) {
        self.chains = self.chains.saturating_sub(chains);
    }

    /// Counts chains of `pieces` pieces together.
    #[inline]
    pub(super) fn spend_pieces(&mut self, chains: u16, pieces: usize) {
        self.spend(chains);
        self.pieces = self.pieces.saturating_sub(pieces);
    }
}

/// The bytes of all frames so far, in both directions.
#[inline]
fn bytes(tally: &Tally) -> u64 {
    tally.rx_bytes + tally.tx_bytes + tally.dropped() * MAX_WIRE as u64
}
