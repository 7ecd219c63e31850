//! The fields of a segment's header, as values.

use serde::{Deserialize, Serialize};

use super::Seq;

/// The header of a segment without its ports, which are part of the flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The number of the first byte of payload, or of SYN.
    pub seq: Seq,
    /// The next number that the sender expects, if [`Flags::ACK`] is set.
    pub ack: Seq,
    /// Control bits.
    pub flags: Flags,
    /// The window, not scaled.
    pub window: u16,
    /// The urgent pointer, if [`Flags::URG`] is set: the last urgent byte is before `seq + urgent`.
    pub urgent: u16,
    /// Options.
    pub options: Options,
}

/// Control bits, as they are in the header's 14th byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flags(pub u8);

impl Flags {
    /// No more data from the sender.
    pub const FIN: Self = Self(1);
    /// Synchronise sequence numbers.
    pub const SYN: Self = Self(1 << 1);
    /// Reset the connection.
    pub const RST: Self = Self(1 << 2);
    /// Push.
    pub const PSH: Self = Self(1 << 3);
    /// The acknowledgement number is valid.
    pub const ACK: Self = Self(1 << 4);
    /// The urgent pointer is valid.
    pub const URG: Self = Self(1 << 5);
    /// ECN echo.
    pub const ECE: Self = Self(1 << 6);
    /// Congestion window reduced.
    pub const CWR: Self = Self(1 << 7);

    /// Whether all bits of `flags` are set.
    #[inline]
    #[must_use]
    pub const fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// These bits and those of `flags`.
    #[inline]
    #[must_use]
    pub const fn with(self, flags: Self) -> Self {
        Self(self.0 | flags.0)
    }

    /// These bits without those of `flags`.
    #[inline]
    #[must_use]
    pub const fn without(self, flags: Self) -> Self {
        Self(self.0 & !flags.0)
    }

    /// Whether a SYN with these bits asks for ECN, or a SYN-ACK with them agrees to it (RFC 3168,
    /// section 6.1.1).
    pub(super) const fn is_ecn_setup(self) -> bool {
        let bits = self.0 & Self::ECE.with(Self::CWR).0;
        bits == if self.has(Self::ACK) { Self::ECE.0 } else { Self::ECE.with(Self::CWR).0 }
    }
}

/// The supported options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The largest segment that the sender of this option accepts, in bytes of payload.
    pub mss: Option<u16>,
    /// The number of bits by which windows are shifted to the left. Values above 14 mean 14.
    pub window_scale: Option<u8>,
    /// Whether the sender supports selective acknowledgements.
    pub sack_permitted: bool,
    /// Timestamps.
    pub timestamps: Option<Timestamps>,
    /// Selective acknowledgements. The first block can be a D-SACK.
    pub sack: SackBlocks,
}

/// The timestamp option, in the sender's own unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timestamps {
    /// The sender's clock.
    pub value: u32,
    /// The value that the sender received, if ACK is set.
    pub echo: u32,
}

/// Up to four ranges of sequence numbers, each from its first number to the one after its last.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Vec<(Seq, Seq)>", into = "Vec<(Seq, Seq)>")]
pub struct SackBlocks {
    blocks: [(Seq, Seq); 4],
    len: u8,
}

impl SackBlocks {
    /// The number of blocks for which one header has room.
    pub const MOST: usize = 4;

    /// Adds a block at the end; returns false if there is no room.
    pub fn push(&mut self, from: Seq, to: Seq) -> bool {
        let free = self.blocks.get_mut(usize::from(self.len));
        free.map(|block| *block = (from, to)).inspect(|()| self.len += 1).is_some()
    }

    /// Keeps the first `n`.
    pub fn truncate(&mut self, n: usize) {
        self.len = self.len.min(u8::try_from(n).unwrap_or(u8::MAX));
    }
}

/// Blocks beyond the fourth are left out.
impl From<Vec<(Seq, Seq)>> for SackBlocks {
    fn from(ranges: Vec<(Seq, Seq)>) -> Self {
        let mut blocks = Self::default();
        ranges.into_iter().all(|(from, to)| blocks.push(from, to));
        blocks
    }
}

impl From<SackBlocks> for Vec<(Seq, Seq)> {
    fn from(blocks: SackBlocks) -> Self {
        blocks.to_vec()
    }
}

impl std::ops::Deref for SackBlocks {
    type Target = [(Seq, Seq)];

    #[inline]
    fn deref(&self) -> &[(Seq, Seq)] {
        &self.blocks[..usize::from(self.len)]
    }
}

impl PartialEq for SackBlocks {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for SackBlocks {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifth_block_has_no_room() {
        let mut blocks = SackBlocks::default();
        for n in 0..4 {
            assert!(blocks.push(Seq(n), Seq(n + 1)));
        }
        assert!(!blocks.push(Seq(9), Seq(10)));
        assert_eq!(blocks.len(), 4);
        blocks.truncate(1);
        assert_eq!(*blocks, [(Seq(0), Seq(1))]);
    }
}
