//! The send queue: chunks with their sequence numbers, which are held until they are acknowledged.

use std::collections::VecDeque;

use crate::tcp::{Chunk, Seq};

/// The largest chunk: sequence numbers further apart than 2^31 cannot be compared.
pub(super) const MAX_CHUNK: usize = 1 << 30;

/// The most chunks in one transmission. A frame has room for this number of fragments behind its
/// headers.
const MAX_CHUNKS: usize = 16;

#[derive(Debug)]
#[cfg_attr(feature = "compare", derive(Clone))]
struct Entry<T> {
    start: Seq,
    chunk: T,
    /// Whether a write of the user ended here, and no more payload was announced.
    push: bool,
}

impl<T: Chunk> Entry<T> {
    fn end(&self) -> Seq {
        self.start + self.chunk.len() as u32
    }
}

/// The payload from the first unacknowledged byte to the last byte that the user has queued.
#[derive(Debug)]
#[cfg_attr(feature = "compare", derive(Clone))]
pub(super) struct Queue<T> {
    entries: VecDeque<Entry<T>>,
    start: Seq,
    end: Seq,
    /// The entry in which the last search ended. New data is sent in order, so the next search
    /// usually ends there too.
    hint: usize,
}

impl<T: Chunk> Queue<T> {
    /// An empty queue that begins at the byte `start`.
    pub(super) fn new(start: Seq) -> Self {
        Self { entries: VecDeque::new(), start, end: start, hint: 0 }
    }

    /// Frees memory that is not in use.
    pub(super) fn shrink(&mut self) {
        self.entries.shrink_to_fit();
    }

    /// The number after the last byte.
    pub(super) fn end(&self) -> Seq {
        self.end
    }

    /// The number of queued bytes.
    pub(super) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether `chunk` would be joined with the last chunk.
    pub(super) fn joins(&self, chunk: &T) -> bool {
        let last = self.entries.back();
        // An entry is at most as long as the largest chunk.
        last.is_some_and(|last| last.chunk.continues(chunk) && last.chunk.len() + chunk.len() < MAX_CHUNK)
    }

    /// Adds `chunk` at the end. `push`: PSH follows the last byte, because no more payload is
    /// announced.
    ///
    /// Many small writes into one page are joined to one chunk, because a frame has room for few
    /// chunks, and each chunk costs a reference count.
    #[inline]
    pub(super) fn push(&mut self, chunk: T, push: bool) {
        if chunk.is_empty() {
            return;
        }
        let start = self.end;
        self.end += chunk.len() as u32;
        if self.joins(&chunk)
            && let Some(last) = self.entries.back_mut()
        {
            last.chunk.join(chunk);
            last.push = push;
            return;
        }
        self.entries.push_back(Entry { start, chunk, push });
    }

    /// Drops everything before `to`.
    pub(super) fn acknowledge(&mut self, to: Seq) {
        if to <= self.start {
            return;
        }
        let to = to.min(self.end);
        while let Some(front) = self.entries.front_mut() {
            if front.end() <= to {
                self.entries.pop_front();
                self.hint = self.hint.saturating_sub(1);
            } else {
                if front.start < to {
                    front.chunk.advance((to - front.start) as usize);
                    front.start = to;
                }
                break;
            }
        }
        self.start = to;
    }

    /// All chunks in order.
    pub(super) fn chunks(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|entry| &entry.chunk)
    }

    /// The index of the entry that contains the byte `at`, which must be queued.
    #[inline]
    fn find(&mut self, at: Seq) -> usize {
        let is_there = |entry: &Entry<T>| entry.start <= at && at < entry.end();
        let near = [self.hint, self.hint + 1];
        let found = near.into_iter().find(|n| self.entries.get(*n).is_some_and(is_there));
        self.hint = found.unwrap_or_else(|| self.entries.partition_point(|entry| entry.end() <= at));
        self.hint
    }

    /// The number of the `len` bytes from `from` on that are in chunks which fit into one
    /// transmission.
    #[inline]
    pub(super) fn fit(&mut self, from: Seq, len: u32) -> u32 {
        if !T::MIXED && self.entries.len() <= MAX_CHUNKS {
            return len;
        }
        let first = self.find(from);
        let mut last = first + MAX_CHUNKS - 1;
        if T::MIXED {
            let apart = |pair: &usize| match (self.entries.get(*pair), self.entries.get(*pair + 1)) {
                (Some(one), Some(next)) => !one.chunk.precedes(&next.chunk),
                _ => false,
            };
            last = (first..last).find(apart).unwrap_or(last);
        }
        match self.entries.get(last) {
            Some(last) => len.min(last.end() - from),
            None => len,
        }
    }

    /// Whether a write ended at `at`, and no more payload was announced.
    #[inline]
    pub(super) fn is_pushed_at(&mut self, at: Seq) -> bool {
        if at == self.end {
            return self.entries.back().is_some_and(|entry| entry.push);
        }
        let last = self.find(at - 1);
        self.entries.get(last).is_some_and(|entry| entry.push && entry.end() == at)
    }

    /// The entry that is exactly the `len` bytes from `from` on, if there is one.
    #[inline]
    pub(super) fn find_whole(&mut self, from: Seq, len: u32) -> Option<usize> {
        let n = self.find(from);
        self.entries.get(n).is_some_and(|entry| entry.start == from && entry.chunk.len() == len as usize).then_some(n)
    }

    /// The chunk of an entry that was [found](Self::find_whole).
    pub(super) fn chunk(&self, n: usize) -> &[T] {
        self.entries.get(n).map_or(&[], |entry| std::slice::from_ref(&entry.chunk))
    }

    /// Adds clones of the chunks with the `len` bytes from `from` on to `into`, without copying
    /// bytes.
    pub(super) fn copy(&mut self, from: Seq, len: u32, into: &mut Vec<T>) {
        let (mut at, to) = (from, from + len);
        let first = self.find(from);
        for entry in self.entries.range(first.min(self.entries.len())..) {
            if at >= to {
                break;
            }
            let mut chunk = entry.chunk.clone();
            if at > entry.start {
                chunk.advance((at - entry.start) as usize);
            }
            let take = chunk.len().min((to - at) as usize);
            chunk.truncate(take);
            at += take as u32;
            into.push(chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::testing::SharedBytes;

    fn queue(lens: &[u32]) -> Queue<SharedBytes> {
        let mut queue = Queue::new(Seq(u32::MAX - 4));
        for len in lens {
            queue.push(SharedBytes::numbered(queue.end().0, *len), *len != 7);
        }
        queue
    }

    #[test]
    fn a_copy_is_cut_out_of_chunks_across_the_wrap() {
        let mut queue = queue(&[10, 7, 100]);
        assert_eq!(queue.len(), 117);
        let mut out = Vec::new();
        queue.copy(Seq(3), 20, &mut out);
        assert_eq!(out, [SharedBytes::numbered(3, 2), SharedBytes::numbered(5, 7), SharedBytes::numbered(12, 11)]);
    }

    #[test]
    fn a_chunk_is_found_if_it_is_all_that_is_sent() {
        let mut queue = queue(&[10, 7, 100]);
        let mut whole = |from, len| queue.find_whole(Seq(from), len).map(|n| queue.chunk(n).to_vec());
        assert_eq!(whole(5, 7), Some(vec![SharedBytes::numbered(5, 7)]));
        assert_eq!(whole(u32::MAX - 4, 10), Some(vec![SharedBytes::numbered(u32::MAX - 4, 10)]));
        assert_eq!([(5, 6), (5, 8), (6, 6), (112, 5)].map(|(from, len)| whole(from, len)), [const { None }; 4]);
        queue.acknowledge(Seq(7));
        assert_eq!(queue.find_whole(Seq(7), 5).map(|n| queue.chunk(n)), Some(&[SharedBytes::numbered(7, 5)][..]));
    }

    #[test]
    fn what_is_acknowledged_is_dropped_and_a_chunk_in_the_middle_is_trimmed() {
        let mut queue = queue(&[10, 7, 100]);
        queue.acknowledge(Seq(6));
        assert_eq!(queue.entries.len(), 2);
        let mut out = Vec::new();
        queue.copy(Seq(6), 8, &mut out);
        assert_eq!(out, [SharedBytes::numbered(6, 6), SharedBytes::numbered(12, 2)]);
        queue.acknowledge(Seq(1));
        assert_eq!(queue.len(), 106, "an old acknowledgement changes nothing");
        queue.acknowledge(queue.end());
        assert_eq!((queue.len(), queue.entries.len()), (0, 0));
    }

    #[test]
    fn a_write_without_more_is_pushed_at_its_end() {
        let mut queue = queue(&[10, 7, 100]);
        assert!(queue.is_pushed_at(Seq(5)) && !queue.is_pushed_at(Seq(4)));
        assert!(!queue.is_pushed_at(Seq(12)), "more was announced");
        assert!(queue.is_pushed_at(queue.end()));
        let mut announced = self::queue(&[10, 7]);
        assert!(!announced.is_pushed_at(announced.end()), "more was announced");
    }

    #[test]
    fn a_transmission_carries_no_more_chunks_than_a_frame_holds() {
        let mut queue = queue(&[1; 40]);
        assert_eq!(queue.fit(Seq(u32::MAX - 4), 40), 16);
        assert_eq!(queue.fit(Seq(30), 5), 5);
        for (chunks, fit) in [(16, 16), (17, 16)] {
            let mut queue = self::queue(&vec![1; chunks]);
            assert_eq!(queue.fit(Seq(u32::MAX - 4), chunks as u32), fit);
        }
    }

    /// Payload of two kinds. In a frame, the first kind must be before the second.
    #[derive(Clone)]
    struct Either(SharedBytes, bool);

    impl Chunk for Either {
        type Tail = ();

        const MIXED: bool = true;

        fn precedes(&self, next: &Self) -> bool {
            !self.1 || next.1
        }

        fn len(&self) -> usize {
            self.0.len()
        }

        fn advance(&mut self, n: usize) {
            self.0.advance(n);
        }

        fn truncate(&mut self, len: usize) {
            self.0.truncate(len);
        }
    }

    #[test]
    fn a_transmission_ends_where_the_next_chunk_cannot_follow() {
        let mut queue = Queue::new(Seq(0));
        for (n, second) in [false, false, true, true, false, true].into_iter().enumerate() {
            queue.push(Either(SharedBytes::numbered(10 * n as u32, 10), second), false);
        }
        assert_eq!([0, 5, 25, 39, 40, 55].map(|at| queue.fit(Seq(at), 60 - at)), [40, 35, 15, 1, 20, 5]);
        assert_eq!(queue.fit(Seq(0), 30), 30);
    }
}
