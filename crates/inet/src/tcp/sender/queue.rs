//! The bytes to be sent: chunks with their sequence numbers, which are held until they are acknowledged.

use std::collections::VecDeque;

use crate::tcp::{Chunk, Seq};

/// Chunks that one transmission carries at most: a frame has room for so many fragments behind its headers.
const MAX_CHUNKS: usize = 16;

#[derive(Debug)]
struct Entry<T> {
    start: Seq,
    chunk: T,
    /// The user's write ended here, and no more was announced.
    push: bool,
}

impl<T: Chunk> Entry<T> {
    fn end(&self) -> Seq {
        self.start + self.chunk.len() as u32
    }
}

/// Payload from the first unacknowledged byte to the last that the user gave.
#[derive(Debug)]
pub(super) struct Queue<T> {
    entries: VecDeque<Entry<T>>,
    start: Seq,
    end: Seq,
    /// The entry in which the last search ended. New data is sent in order, so that the next search ends there too.
    hint: usize,
}

impl<T: Chunk> Queue<T> {
    /// Nothing, before the byte `start`.
    pub(super) fn new(start: Seq) -> Self {
        Self { entries: VecDeque::new(), start, end: start, hint: 0 }
    }

    /// The number after the last byte.
    pub(super) fn end(&self) -> Seq {
        self.end
    }

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Adds `chunk` at the end. `push`: the receiver is to be told that no more follows for now.
    pub(super) fn push(&mut self, chunk: T, push: bool) {
        if chunk.is_empty() {
            return;
        }
        let start = self.end;
        self.end += chunk.len() as u32;
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

    /// The entry that has the byte `at`, which must be queued.
    fn find(&mut self, at: Seq) -> usize {
        let is_there = |entry: &Entry<T>| entry.start <= at && at < entry.end();
        let near = [self.hint, self.hint + 1];
        let found = near.into_iter().find(|n| self.entries.get(*n).is_some_and(is_there));
        self.hint = found.unwrap_or_else(|| self.entries.partition_point(|entry| entry.end() <= at));
        self.hint
    }

    /// How many of the `len` bytes from `from` on are in chunks that fit into one transmission.
    pub(super) fn fit(&mut self, from: Seq, len: u32) -> u32 {
        let first = self.find(from);
        match self.entries.get(first + MAX_CHUNKS - 1) {
            Some(last) => len.min(last.end() - from),
            None => len,
        }
    }

    /// Whether a write ended at `at`, and no more was announced.
    pub(super) fn is_pushed_at(&mut self, at: Seq) -> bool {
        let last = self.find(at - 1);
        self.entries.get(last).is_some_and(|entry| entry.push && entry.end() == at)
    }

    /// Puts `len` bytes from `from` on into `into`, by reference.
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
    use super::super::testing::Bytes;
    use super::*;

    fn queue(lens: &[u32]) -> Queue<Bytes> {
        let mut queue = Queue::new(Seq(u32::MAX - 4));
        for len in lens {
            queue.push(Bytes::new(queue.end().0, *len), *len != 7);
        }
        queue
    }

    #[test]
    fn a_copy_is_cut_out_of_chunks_across_the_wrap() {
        let mut queue = queue(&[10, 7, 100]);
        assert_eq!(queue.len(), 117);
        let mut out = Vec::new();
        queue.copy(Seq(3), 20, &mut out);
        assert_eq!(out, [Bytes::new(3, 2), Bytes::new(5, 7), Bytes::new(12, 11)]);
    }

    #[test]
    fn what_is_acknowledged_is_dropped_and_a_chunk_in_the_middle_is_trimmed() {
        let mut queue = queue(&[10, 7, 100]);
        queue.acknowledge(Seq(6));
        assert_eq!(queue.entries.len(), 2);
        let mut out = Vec::new();
        queue.copy(Seq(6), 8, &mut out);
        assert_eq!(out, [Bytes::new(6, 6), Bytes::new(12, 2)]);
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
    }

    #[test]
    fn a_transmission_carries_no_more_chunks_than_a_frame_holds() {
        let mut queue = queue(&[1; 40]);
        assert_eq!(queue.fit(Seq(u32::MAX - 4), 40), 16);
        assert_eq!(queue.fit(Seq(30), 5), 5);
    }
}
