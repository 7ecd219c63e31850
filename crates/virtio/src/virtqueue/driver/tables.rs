//! The segments of a buffer, and tables of descriptors that the device sees.

use super::super::sync::{AtomicU64, Ordering};

/// A part of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    /// Its address, as the device knows it.
    pub(crate) addr: u64,
    /// Bytes, not 0: many devices refuse empty ones.
    pub(crate) len: u32,
    /// Whether the device writes it, or reads it.
    pub(crate) writable: bool,
}

impl Segment {
    /// A segment that the device reads.
    pub(crate) fn read(addr: u64, len: u32) -> Self {
        Self { addr, len, writable: false }
    }
}

/// Memory for one table of descriptors for each slot of a queue, which the device sees.
///
/// Invariant: `words` is valid for reads and writes of `2 * per_slot` words for each slot of the
/// queue, for as long as the value exists.
#[derive(Debug)]
pub(crate) struct Tables {
    words: *const AtomicU64,
    /// The address of the first word, as the device knows it.
    addr: u64,
    /// Descriptors in each table.
    pub(super) per_slot: u16,
}

// SAFETY: the words are shared by design and touched through atomics alone.
unsafe impl Send for Tables {}

impl Tables {
    /// Bytes of a descriptor in a table.
    pub(crate) const ENTRY: usize = 16;

    /// # Safety
    ///
    /// The caller upholds the invariant, see the type; `base` is aligned to 8 bytes.
    pub(crate) unsafe fn new(base: *mut u8, addr: u64, per_slot: u16) -> Self {
        Self { words: base.cast(), addr, per_slot }
    }

    /// Writes `segments` into the table of `slot`: their addresses, and the other word of each
    /// descriptor, which `rest` returns for the descriptor's number and whether it is the last.
    /// Returns the table's address and length in bytes.
    pub(super) fn write(
        &self,
        slot: u16,
        segments: impl Iterator<Item = Segment>,
        rest: impl Fn(u16, Segment, bool) -> u64,
    ) -> (u64, u32) {
        let first = usize::from(slot) * usize::from(self.per_slot);
        let mut segments = segments.take(usize::from(self.per_slot)).peekable();
        let mut n = 0;
        while let Some(segment) = segments.next() {
            let at = 2 * (first + usize::from(n));
            // SAFETY: the type's invariant; `n` is below `per_slot`.
            let [addr, other] = unsafe { [&*self.words.add(at), &*self.words.add(at + 1)] };
            addr.store(segment.addr.to_le(), Ordering::Relaxed);
            other.store(rest(n, segment, segments.peek().is_none()).to_le(), Ordering::Relaxed);
            n += 1;
        }
        (self.addr + (first * Self::ENTRY) as u64, u32::from(n) * Self::ENTRY as u32)
    }

    /// Writes the first `n` of a slot's addresses into its table, which was written before. Not
    /// inline: queues whose buffers are one segment have no tables, and their loop stays short.
    #[inline(never)]
    pub(super) fn set_addrs(&self, slot: u16, addrs: &[u64], n: u16) {
        let first = usize::from(slot) * usize::from(self.per_slot);
        for (n, addr) in addrs.iter().take(self.per_slot.min(n).into()).enumerate() {
            // SAFETY: the type's invariant; `n` is below `per_slot`.
            unsafe { &*self.words.add(2 * (first + n)) }.store(addr.to_le(), Ordering::Relaxed);
        }
    }

    /// The address and the bytes of the table of `slot`, which has `entries`.
    #[inline(always)]
    pub(super) fn place(&self, slot: u16, entries: usize) -> (u64, u32) {
        let first = usize::from(slot) * usize::from(self.per_slot);
        (self.addr + (first * Self::ENTRY) as u64, (entries * Self::ENTRY) as u32)
    }
}
