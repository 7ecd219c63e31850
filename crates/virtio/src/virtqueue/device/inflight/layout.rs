//! The words of one queue's part of the in-flight region, as the vhost-user specification names
//! them (`QueueRegionSplit`, `QueueRegionPacked`).
//!
//! A part is a header and one entry for each descriptor of the ring. All words are atomics, because
//! the front end shares them and can write them at any time.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// The version of a part that a back end has used. It is 0 in a part that none has used.
pub(super) const VERSION: u16 = 1;

/// The words of one format.
///
/// # Safety
///
/// Both types consist of atomics alone, have the same size, and are aligned to at most 8 bytes.
pub(super) unsafe trait Layout {
    /// The first words of a part. They begin with those of [`CommonHeader`].
    type Header;
    /// The words of one descriptor.
    type Entry;
    /// Bytes of the header, and of each entry.
    const SIZE: usize = size_of::<Self::Entry>();
}

/// The first words of a part in either format.
#[derive(Debug)]
#[repr(C)]
pub(super) struct CommonHeader {
    features: AtomicU64,
    /// [`VERSION`], or 0.
    pub(super) version: AtomicU16,
}

/// The header of a split queue's part.
#[derive(Debug)]
#[repr(C)]
pub(super) struct SplitHeader {
    features: AtomicU64,
    pub(super) version: AtomicU16,
    /// Entries that follow.
    pub(super) desc_num: AtomicU16,
    /// The head of the chain that was completed last.
    pub(super) last_batch_head: AtomicU16,
    /// The used index up to which the entries are right.
    pub(super) used_idx: AtomicU16,
}

/// The entry of a descriptor of a split queue.
#[derive(Debug)]
#[repr(C)]
pub(super) struct SplitEntry {
    /// 1 if the chain that begins here is in flight.
    pub(super) inflight: AtomicU8,
    padding: [AtomicU8; 5],
    /// The head of the chain that was completed before this one.
    pub(super) next: AtomicU16,
    /// Orders the chains by when they were popped.
    pub(super) counter: AtomicU64,
}

/// The format of a split queue's part.
#[derive(Debug)]
pub(super) struct SplitWords;

// SAFETY: atomics alone, of 16 bytes each, see below.
unsafe impl Layout for SplitWords {
    type Header = SplitHeader;
    type Entry = SplitEntry;
}

/// The header of a packed queue's part. The *old* words are those from before the current batch.
#[derive(Debug)]
#[repr(C)]
pub(super) struct PackedHeader {
    features: AtomicU64,
    pub(super) version: AtomicU16,
    /// Entries that follow.
    pub(super) desc_num: AtomicU16,
    /// The first entry that is free. Each names the next one.
    pub(super) free_head: AtomicU16,
    pub(super) old_free_head: AtomicU16,
    /// Where the next used descriptor goes: an offset in the ring.
    pub(super) used_idx: AtomicU16,
    pub(super) old_used_idx: AtomicU16,
    /// The wrap counter of `used_idx`, in bit 0.
    pub(super) used_wrap_counter: AtomicU8,
    pub(super) old_used_wrap_counter: AtomicU8,
    padding: [AtomicU8; 10],
}

/// The entry of a descriptor of a packed queue.
#[derive(Debug)]
#[repr(C)]
pub(super) struct PackedEntry {
    /// 1 if the chain that begins here is in flight.
    pub(super) inflight: AtomicU8,
    padding: AtomicU8,
    /// The entry of the chain's next descriptor, or the next free entry.
    pub(super) next: AtomicU16,
    /// The entry of the chain's last descriptor.
    pub(super) last: AtomicU16,
    /// Descriptors of the chain.
    pub(super) num: AtomicU16,
    /// Orders the chains by when they were popped.
    pub(super) counter: AtomicU64,
    /// The descriptor, as the driver has written it.
    pub(super) id: AtomicU16,
    pub(super) flags: AtomicU16,
    pub(super) len: AtomicU32,
    pub(super) addr: AtomicU64,
}

/// The format of a packed queue's part.
#[derive(Debug)]
pub(super) struct PackedWords;

// SAFETY: atomics alone, of 32 bytes each, see below.
unsafe impl Layout for PackedWords {
    type Header = PackedHeader;
    type Entry = PackedEntry;
}

// The offsets of the specification.
const _: () = {
    assert!(size_of::<SplitHeader>() == 16 && size_of::<SplitEntry>() == 16);
    assert!(size_of::<PackedHeader>() == 32 && size_of::<PackedEntry>() == 32);
    assert!(offset_of!(CommonHeader, version) == 8);
    assert!(offset_of!(SplitHeader, version) == 8 && offset_of!(SplitHeader, used_idx) == 14);
    assert!(offset_of!(SplitEntry, next) == 6 && offset_of!(SplitEntry, counter) == 8);
    assert!(offset_of!(PackedHeader, version) == 8 && offset_of!(PackedHeader, free_head) == 12);
    assert!(offset_of!(PackedHeader, used_idx) == 16 && offset_of!(PackedHeader, used_wrap_counter) == 20);
    assert!(offset_of!(PackedEntry, next) == 2 && offset_of!(PackedEntry, counter) == 8);
    assert!(
        offset_of!(PackedEntry, id) == 16 && offset_of!(PackedEntry, len) == 20 && offset_of!(PackedEntry, addr) == 24
    );
};
