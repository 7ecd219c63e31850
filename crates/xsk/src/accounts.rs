//! Accounts of the chunks that the kernel has: one type for a receive queue, and one for a transmit
//! queue.
//!
//! Both are indexed by the chunk's number, because the kernel identifies a frame by its address
//! only, and returns frames in any order. While the kernel has a page, no page value exists: the
//! page was converted to a count ([`Page::into_count`](netmem_pool::Page::into_count)), and only
//! the number of the chunk is kept. The tables have one or two bytes for each chunk of the UMEM:
//! for a UMEM of 64 MiB they have 16 KiB and 32 KiB.

/// A chunk is in the set.
const POSTED: u8 = 1;
/// A chunk was removed from the set since the last sample.
const REMOVED: u8 = 2;

/// The chunks that the kernel has to receive into.
///
/// Invariant (*posted*): for each chunk in the set there is a count of its page, which the queue
/// owns, and only the kernel accesses the chunk's bytes.
///
/// The set has a byte for each chunk, and not a bit: neighbouring chunks are received one after the
/// other, and each change of a shared word would have to wait for the change before it. The byte
/// also records that the chunk was removed, for [`sample`](Self::sample): the same store, of
/// another constant.
#[derive(Debug)]
pub(crate) struct PostedChunks {
    of: Box<[u8]>,
    count: u32,
}

impl PostedChunks {
    pub(crate) fn new(chunks: u32) -> Self {
        Self { of: vec![0; chunks as usize].into(), count: 0 }
    }

    /// The number of chunks in the set.
    #[inline(always)]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Whether a chunk is in the set.
    #[inline(always)]
    pub(crate) fn contains(&self, chunk: u32) -> bool {
        self.of.get(chunk as usize).is_some_and(|of| of & POSTED != 0)
    }

    /// Adds a chunk, which must not be in the set.
    #[inline(always)]
    pub(crate) fn insert(&mut self, chunk: u32) {
        debug_assert!(!self.contains(chunk));
        self.of[chunk as usize] = POSTED;
        self.count += 1;
    }

    /// Removes a chunk, which must be in the set.
    #[inline(always)]
    pub(crate) fn remove(&mut self, chunk: u32) {
        debug_assert!(self.contains(chunk));
        self.of[chunk as usize] = REMOVED;
        self.count -= 1;
    }

    /// Removes all chunks, and returns them in ascending order. The set has no table then: nothing
    /// can be inserted. Reads the table once.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = u32> + use<> {
        self.count = 0;
        let of = std::mem::take(&mut self.of);
        (0..).zip(of).filter(|&(_, of)| of & POSTED != 0).map(|(chunk, _)| chunk)
    }

    /// Calls `f` for each chunk: its number, whether it is in the set, and whether it is not and
    /// was removed since the last sample.
    pub(crate) fn sample(&mut self, mut f: impl FnMut(u32, bool, bool)) {
        for (chunk, of) in (0..).zip(&mut self.of) {
            f(chunk, *of & POSTED != 0, *of & REMOVED != 0);
            *of &= POSTED;
        }
    }
}

/// The number of descriptors that the kernel has to send, for each chunk. A chunk can be in several
/// descriptors, because packets share pages.
///
/// Invariant (*sent*): for each descriptor in a chunk there is a count of the chunk's page, which
/// the queue owns.
#[derive(Debug)]
pub(crate) struct Outstanding {
    /// Twice the number of descriptors, and 1 if one was removed since the last sample.
    of: Box<[u16]>,
    total: u32,
}

impl Outstanding {
    /// The largest total.
    pub(crate) const MOST: u32 = u16::MAX as u32 / 2;

    pub(crate) fn new(chunks: u32) -> Self {
        Self { of: vec![0; chunks as usize].into(), total: 0 }
    }

    #[inline(always)]
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// Adds a descriptor. The total must be below [`MOST`](Self::MOST).
    #[inline(always)]
    pub(crate) fn insert(&mut self, chunk: u32) {
        self.of[chunk as usize] += 2;
        self.total += 1;
    }

    /// Removes one descriptor of a chunk. Returns false if there is none.
    #[inline(always)]
    pub(crate) fn remove(&mut self, chunk: u32) -> bool {
        match self.of.get_mut(chunk as usize) {
            Some(n @ 2..) => {
                *n = (*n - 2) | 1;
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
        (0..).zip(of).filter(|&(_, n)| n > 1).map(|(chunk, n)| (chunk, u32::from(n / 2)))
    }

    /// Calls `f` for each chunk: its number, whether it has descriptors, and whether one was
    /// removed since the last sample.
    pub(crate) fn sample(&mut self, mut f: impl FnMut(u32, bool, bool)) {
        for (chunk, n) in (0..).zip(&mut self.of) {
            f(chunk, *n > 1, *n & 1 != 0);
            *n &= !1;
        }
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
        assert_eq!(posted.drain().collect::<Vec<_>>(), [0, 64, 99]);
        assert_eq!((posted.count(), posted.contains(0), posted.drain().count()), (0, false, 0));
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

    fn changes(sample: impl FnOnce(&mut dyn FnMut(u32, bool, bool))) -> Vec<(u32, bool, bool)> {
        let mut all = Vec::new();
        sample(&mut |chunk, has, changed| {
            if has || changed {
                all.push((chunk, has, changed));
            }
        });
        all
    }

    #[test]
    fn a_sample_has_what_changed_since_the_last_one() {
        let mut posted = PostedChunks::new(4);
        [0, 1].into_iter().for_each(|chunk| posted.insert(chunk));
        let sample = |posted: &mut PostedChunks| changes(|f| posted.sample(f));
        assert_eq!(sample(&mut posted), [(0, true, false), (1, true, false)]);
        posted.remove(1);
        assert_eq!(sample(&mut posted), [(0, true, false), (1, false, true)]);
        assert_eq!(sample(&mut posted), [(0, true, false)]);
        assert!(posted.contains(0) && !posted.contains(1));

        let mut out = Outstanding::new(4);
        [2, 2].into_iter().for_each(|chunk| out.insert(chunk));
        let sample = |out: &mut Outstanding| changes(|f| out.sample(f));
        assert_eq!(sample(&mut out), [(2, true, false)]);
        assert!(out.remove(2));
        assert_eq!(sample(&mut out), [(2, true, true)]);
        assert!(out.remove(2) && !out.remove(2));
        assert_eq!(sample(&mut out), [(2, false, true)]);
        assert_eq!(sample(&mut out), []);
        // A chunk that a descriptor was removed from has none: the mark is no descriptor.
        out.insert(2);
        assert!(out.remove(2) && !out.remove(2));
        assert_eq!(out.drain().count(), 0);
    }

    /// The largest ring in one chunk.
    #[test]
    fn all_descriptors_can_be_of_one_chunk() {
        let mut out = Outstanding::new(1);
        (0..Outstanding::MOST).for_each(|_| out.insert(0));
        assert!((0..Outstanding::MOST).all(|_| out.remove(0)));
        assert!(!out.remove(0));
    }
}
