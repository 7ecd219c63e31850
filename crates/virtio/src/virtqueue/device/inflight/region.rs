//! The in-flight region of a front end, and each queue's part of it.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::{CommonHeader, Layout, PackedWords, SplitWords, VERSION};
use crate::guest_memory::mapping::Mapping;

/// The alignment of a queue's part of the region, as other back ends have it.
const ALIGN: usize = 64;

/// Why an in-flight region cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InflightError {
    /// A region that is too small for its queues, or for more queues than there are.
    #[error("an in-flight region of {bytes} bytes for {queues} queues of {queue_size} entries")]
    Shape {
        /// Queues.
        queues: u16,
        /// Entries of each.
        queue_size: u16,
        /// Bytes of the region.
        bytes: u64,
    },
    /// A ring that does not fit its part of the region.
    #[error("ring {ring} has {size} entries; its in-flight region has {entries} and version {version}")]
    Ring {
        /// The ring.
        ring: usize,
        /// Entries of the ring.
        size: u16,
        /// Entries of the region's part.
        entries: u16,
        /// Version of the region.
        version: u16,
    },
}

/// The in-flight region of a front end: one part for each queue.
#[derive(Clone, Debug)]
pub(crate) struct InflightRegion {
    map: Arc<Mapping>,
    queues: u16,
    queue_size: u16,
}

/// Bytes of a header and `queue_size` entries.
fn bytes_of<L: Layout>(queue_size: u16) -> usize {
    L::SIZE * (1 + usize::from(queue_size))
}

/// Bytes of one queue's part.
fn stride(queue_size: u16, packed: bool) -> usize {
    let bytes = if packed { bytes_of::<PackedWords> } else { bytes_of::<SplitWords> };
    bytes(queue_size).next_multiple_of(ALIGN)
}

impl InflightRegion {
    /// Bytes of a region for `queues` queues of `queue_size` entries.
    pub(crate) fn bytes(queues: u16, queue_size: u16, packed: bool) -> u64 {
        (stride(queue_size, packed) * usize::from(queues)) as u64
    }

    /// A region in `map`, for `queues` queues of `queue_size` entries.
    ///
    /// # Errors
    ///
    /// [`InflightError::Shape`]: `map` is too small for the queues.
    pub(crate) fn new(map: Mapping, queues: u16, queue_size: u16, packed: bool) -> Result<Self, InflightError> {
        let bytes = Self::bytes(queues, queue_size, packed);
        if queue_size == 0 || bytes > map.len as u64 || !map.at.addr().is_multiple_of(8) {
            return Err(InflightError::Shape { queues, queue_size, bytes: map.len as u64 });
        }
        Ok(Self { map: Arc::new(map), queues, queue_size })
    }

    /// The part of queue `index`, for a ring of `size` entries. `None` if the region has no part
    /// for it.
    ///
    /// # Errors
    ///
    /// [`InflightError::Ring`]: the part does not fit the ring, or has an unknown version.
    pub(crate) fn queue(&self, index: usize, size: u16, packed: bool) -> Result<Option<InflightQueue>, InflightError> {
        if index >= usize::from(self.queues) {
            return Ok(None);
        }
        let bytes = stride(self.queue_size, packed);
        let wrong = |version| InflightError::Ring { ring: index, size, entries: self.queue_size, version };
        // The ring's format may have changed since the region was received.
        if (index + 1) * bytes > self.map.len {
            return Err(wrong(0));
        }
        let part = InflightQueue { map: Arc::clone(&self.map), offset: index * bytes, bytes, entries: self.queue_size };
        let version = part.version();
        if size > self.queue_size || version > VERSION {
            return Err(wrong(version));
        }
        Ok(Some(part))
    }
}

/// One queue's part of the region.
///
/// Invariant (*part*): the mapping has `bytes` bytes from `offset` on, which are at least a
/// [`CommonHeader`]; their address is a multiple of 8.
#[derive(Debug)]
pub(crate) struct InflightQueue {
    map: Arc<Mapping>,
    offset: usize,
    bytes: usize,
    entries: u16,
}

impl InflightQueue {
    fn version(&self) -> u16 {
        // SAFETY: *part*; the header consists of atomics.
        let header = unsafe { &*self.map.at.add(self.offset).cast::<CommonHeader>() };
        header.version.load(Ordering::Relaxed)
    }

    /// The part's words in format `L`.
    pub(super) fn words<L: Layout>(self) -> Words<L> {
        assert!(bytes_of::<L>(self.entries) <= self.bytes, "the part is of this format");
        Words { part: self, layout: PhantomData }
    }
}

/// The words of a queue's part in format `L`.
///
/// Invariant: the part has a header and `entries` entries of the format.
#[derive(Debug)]
pub(super) struct Words<L> {
    part: InflightQueue,
    layout: PhantomData<L>,
}

impl<L: Layout> Words<L> {
    /// Entries of the part.
    pub(super) fn entries(&self) -> u16 {
        self.part.entries
    }

    /// The header.
    pub(super) fn header(&self) -> &L::Header {
        // SAFETY: *part*, and the invariant; a header consists of atomics.
        unsafe { &*self.part.map.at.add(self.part.offset).cast::<L::Header>() }
    }

    /// Entry `index`, which is below [`entries`](Self::entries).
    pub(super) fn entry(&self, index: u16) -> &L::Entry {
        assert!(index < self.part.entries, "callers check an index that the front end can write");
        let offset = self.part.offset + L::SIZE * (1 + usize::from(index));
        // SAFETY: *part*, and the invariant; the entry lies behind the header and the entries
        // before it, and consists of atomics.
        unsafe { &*self.part.map.at.add(offset).cast::<L::Entry>() }
    }

    /// Every second byte on, as words of two bytes: a region of any content.
    #[cfg(test)]
    pub(super) fn halves(&self) -> impl Iterator<Item = &std::sync::atomic::AtomicU16> {
        let bytes = bytes_of::<L>(self.part.entries);
        // SAFETY: *part*, and the invariant.
        (0..bytes).step_by(2).map(|at| unsafe { &*self.part.map.at.add(self.part.offset + at).cast() })
    }
}
