//! What all buffers of a shaped queue have in common.

use super::super::{DESC_NEXT, DESC_WRITE, Negotiated};
use super::tables::{Segment, Tables};

/// The parameters with which both formats are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(super) negotiated: Negotiated,
    /// Descriptors of each slot in the ring of a shaped queue: 1 where it has a table. 0 in a free
    /// one.
    pub(super) per_slot: u16,
}

impl Setup {
    /// The tables, if a shaped queue is to use them.
    pub(super) fn tables(self, shape: Shape<'_>, tables: Option<Tables>) -> Option<Tables> {
        tables.filter(|_| usize::from(self.per_slot) != shape.lens.len())
    }
}

/// The segments of every buffer of a shaped queue, and their addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape<'q> {
    /// The bytes of each segment.
    pub(super) lens: &'q [u32],
    /// The addresses of all segments, slot by slot.
    pub(super) addrs: &'q [u64],
}

impl<'q> Shape<'q> {
    /// That of a free queue.
    pub(super) const NONE: Self = Self { lens: &[], addrs: &[] };

    #[inline(always)]
    pub(super) fn addrs(self, slot: u16) -> &'q [u64] {
        let n = self.lens.len();
        let first = usize::from(slot) * n;
        &self.addrs[first..first + n]
    }

    /// The segments of a slot.
    pub(super) fn segments(self, slot: u16) -> impl Iterator<Item = Segment> {
        self.addrs(slot).iter().zip(self.lens).map(|(&addr, &len)| Segment { addr, len, writable: true })
    }

    /// The flags of segment `i`, without those of a format.
    #[inline(always)]
    pub(super) fn flags(self, i: usize) -> u16 {
        if i + 1 < self.lens.len() { DESC_WRITE | DESC_NEXT } else { DESC_WRITE }
    }
}
