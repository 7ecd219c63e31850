//! Accounts of the chunks that the kernel has: one type for a receive queue, and one for a transmit
//! queue.
//!
//! Both are indexed by the chunk's number, because the kernel identifies a frame by its address
//! only, and returns frames in any order. While the kernel has a page, no page value exists: the
//! page was converted to a count ([`Page::into_count`](netmem_pool::Page::into_count)), and only
//! the number of the chunk is kept. The tables have one or two bytes for each chunk of the UMEM:
//! for a UMEM of 64 MiB they have 16 KiB and 32 KiB.

/// The chunks that the kernel has to receive into.
///
/// Invariant (*posted*): for each chunk in the set there is a count of its page, which the queue
/// owns, and only the kernel accesses the chunk's bytes.
///
/// The set has a byte for each chunk, and not a bit: neighbouring chunks are received one after the
/// other, and each change of a shared word would have to wait for the change before it.
#[derive(Debug)]
pub(crate) struct PostedChunks {
    has: Box<[bool]>,
    count: u32,
}

impl PostedChunks {
    pub(crate) fn new(chunks: u32) -> Self {
        Self { has: vec![false; chunks as usize].into(), count: 0 }
    }

    /// The number of chunks in the set.
    #[inline(always)]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Whether a chunk is in the set.
    #[inline(always)]
    pub(crate) fn contains(&self, chunk: u32) -> bool {
        self.has.get(chunk as usize).is_some_and(|has| *has)
    }

    /// Adds a chunk, which must not be in the set.
    #[inline(always)]
    pub(crate) fn insert(&mut self, chunk: u32) {
        debug_assert!(!self.has[chunk as usize]);
        self.has[chunk as usize] = true;
        self.count += 1;
    }

    /// Removes a chunk, which must be in the set.
    #[inline(always)]
    pub(crate) fn remove(&mut self, chunk: u32) {
        debug_assert!(self.has[chunk as usize]);
        self.has[chunk as usize] = false;
        self.count -= 1;
    }

    /// Removes any chunk and returns it.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        let chunk = self.has.iter().position(|has| *has)? as u32;
        self.remove(chunk);
        Some(chunk)
    }
}

/// The number of descriptors that the kernel has to send, for each chunk. A chunk can be in several
/// descriptors, because packets share pages.
///
/// Invariant (*sent*): for each descriptor in a chunk there is a count of the chunk's page, which
/// the queue owns.
#[derive(Debug)]
pub(crate) struct Outstanding {
    of: Box<[u16]>,
    total: u32,
}

impl Outstanding {
    /// The total is never above `u16::MAX`, because the rings are smaller.
    pub(crate) fn new(chunks: u32) -> Self {
        Self { of: vec![0; chunks as usize].into(), total: 0 }
    }

    #[inline(always)]
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    #[inline(always)]
    pub(crate) fn insert(&mut self, chunk: u32) {
        self.of[chunk as usize] += 1;
        self.total += 1;
    }

    /// Removes one descriptor of a chunk. Returns false if there is none.
    #[inline(always)]
    pub(crate) fn remove(&mut self, chunk: u32) -> bool {
        match self.of.get_mut(chunk as usize) {
            Some(n @ 1..) => {
                *n -= 1;
                self.total -= 1;
                true
            }
            _ => false,
        }
    }

    /// Removes all descriptors. Returns the chunks, each with its number of descriptors.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = (u32, u32)> {
        self.total = 0;
        let of = std::mem::take(&mut self.of);
        (0..).zip(of).filter(|&(_, n)| n > 0).map(|(chunk, n)| (chunk, u32::from(n)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_posted_once_and_taken_once() {
        let mut posted = PostedChunks::new(100);
        [0, 63, 64, 99].into_iter().for_each(|chunk| posted.insert(chunk));
        assert!(posted.contains(63) && !posted.contains(1));
        posted.remove(63);
        assert!(!posted.contains(63));
        assert!(!posted.contains(100) && !posted.contains(u32::MAX), "there are no such chunks");
        assert_eq!(posted.count(), 3);
        assert_eq!(std::iter::from_fn(|| posted.pop()).collect::<Vec<_>>(), [0, 64, 99]);
        assert_eq!(posted.count(), 0);
    }

    #[test]
    fn a_chunk_is_sent_several_times_and_completed_as_often() {
        let mut out = Outstanding::new(10);
        [3, 3, 9].into_iter().for_each(|chunk| out.insert(chunk));
        assert!(out.remove(3) && !out.remove(4) && !out.remove(10));
        assert_eq!(out.total(), 2);
        assert_eq!(out.drain().collect::<Vec<_>>(), [(3, 1), (9, 1)]);
        assert_eq!(out.total(), 0);
        assert!(!out.remove(3));
    }
}
