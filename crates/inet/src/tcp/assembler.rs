//! Payload that arrived out of order.
//!
//! Why it is stored: the peer would have to send it again (RFC 9293, section 3.10.7.4, SHLD-31),
//! and selective acknowledgements report it (RFC 2018). Only the receiver uses it.

use std::collections::VecDeque;

use super::budget::{Budget, Charge, Held};
use super::{Chunk, SackBlocks, Seq};

/// Out-of-order payload: blocks in the order of their numbers, with a gap before each one. Chunks
/// in it do not overlap.
///
/// A chunk that overlaps stored payload is trimmed. A chunk that fills several gaps is cloned. The
/// number of buffers is bounded by the [`Budget`] in which each of them is counted.
///
/// Small chunks are copied behind each other, into the buffer of the first one, which is counted
/// once. Otherwise a peer could occupy a buffer by each byte.
pub(super) struct Assembler<T: Chunk> {
    blocks: VecDeque<Block<T>>,
    chunks: usize,
    /// The buffer into which small chunks are copied, and a charge for it.
    tail: Option<(T::Tail, Charge)>,
    /// One number in each of the blocks that changed last, the latest first. This is the order of
    /// SACK blocks (RFC 2018, section 4).
    recent: [Option<Seq>; SackBlocks::MOST],
}

/// Payload that is at most so long is copied if its buffer could hold more: a fortieth of a page.
const SMALL: usize = 100;

/// No small chunk is stored if there are so many chunks: many of them are in a buffer, so that the
/// budget does not bound the memory of their blocks, nor the time to merge them.
const MOST_SMALL: usize = 1024;

struct Block<T> {
    from: Seq,
    to: Seq,
    chunks: VecDeque<Held<T>>,
}

#[cfg(feature = "compare")]
impl<T: Chunk + std::fmt::Debug> Assembler<T> {
    /// The same values, if no payload is stored.
    pub(super) fn copy_of_empty(&self) -> Option<Self> {
        let is_empty = self.is_empty() && self.tail.is_none();
        is_empty.then(|| Self { blocks: VecDeque::new(), tail: None, ..*self })
    }

    /// All values, for comparisons.
    pub(super) fn values(&self) -> impl std::fmt::Debug {
        let block = |block: &Block<T>| {
            let chunks: Vec<_> = block.chunks.iter().map(|held| (**held).clone()).collect();
            (block.from, block.to, chunks)
        };
        let blocks: Vec<_> = self.blocks.iter().map(block).collect();
        (blocks, self.chunks, self.tail.is_some(), self.recent)
    }
}

/// The result of inserting a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inserted {
    /// Whether all of its bytes are stored now, or were stored before.
    pub(super) complete: bool,
    /// The first range of its bytes that were stored before.
    pub(super) duplicate: Option<(Seq, Seq)>,
}

impl<T: Chunk> Assembler<T> {
    pub(super) fn new() -> Self {
        Self { blocks: VecDeque::new(), chunks: 0, tail: None, recent: [None; SackBlocks::MOST] }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The number of chunks that are stored.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Counts a chunk, and copies it if it is small. `None` if no buffer is free for it.
    fn hold(&mut self, mut chunk: T, budget: &Budget) -> Option<Held<T>> {
        if chunk.len() > SMALL {
            return budget.try_charge().map(|charge| Held::new(chunk, charge));
        }
        if self.chunks >= MOST_SMALL {
            return None;
        }
        if let Some((tail, charge)) = &mut self.tail
            && let Some(copy) = chunk.copy_to_tail(tail)
        {
            return Some(Held::new(copy, charge.share()));
        }
        let mut charge = budget.try_charge()?;
        self.tail = chunk.split_tail().map(|tail| (tail, charge.share()));
        Some(Held::new(chunk, charge))
    }

    /// Stores the new bytes of `chunk`, whose first number is `seq`, while `budget` has room.
    pub(super) fn insert(&mut self, mut seq: Seq, mut chunk: T, budget: &Budget) -> Inserted {
        let mut result = Inserted { complete: true, duplicate: None };
        let mut changed = None;
        while !chunk.is_empty() {
            // The first block that ends after `seq`.
            let at = self.blocks.partition_point(|block| block.to <= seq);
            let next = self.blocks.get(at).map(|block| (block.from, block.to));
            if let Some((from, to)) = next
                && from <= seq
            {
                let known = chunk.len().min((to - seq) as usize);
                result.duplicate.get_or_insert((seq, seq + known as u32));
                changed.get_or_insert(seq);
                chunk.advance(known);
                seq += known as u32;
                continue;
            }
            let gap = next.map_or(usize::MAX, |(from, _)| (from - seq) as usize);
            let len = chunk.len().min(gap);
            let rest = (len < chunk.len()).then(|| {
                let mut rest = chunk.clone();
                rest.advance(len);
                rest
            });
            chunk.truncate(len);
            let Some(held) = self.hold(chunk, budget) else {
                result.complete = false;
                break;
            };
            self.place(at, seq, held);
            changed = Some(seq);
            seq += len as u32;
            match rest {
                Some(rest) => chunk = rest,
                None => break,
            }
        }
        if let Some(seq) = changed {
            self.touch(seq);
        }
        result
    }

    /// Puts `piece` into the gap before block `at`, and merges blocks that are adjacent now.
    fn place(&mut self, at: usize, from: Seq, piece: Held<T>) {
        self.chunks += 1;
        let to = from + piece.len() as u32;
        let joins_before = at > 0 && self.blocks[at - 1].to == from;
        let joins_after = self.blocks.get(at).is_some_and(|block| block.from == to);
        match (joins_before, joins_after) {
            (true, true) => {
                let after = self.blocks.remove(at);
                let before = &mut self.blocks[at - 1];
                before.chunks.push_back(piece);
                before.to = to;
                if let Some(mut after) = after {
                    before.chunks.append(&mut after.chunks);
                    before.to = after.to;
                }
            }
            (true, false) => {
                let before = &mut self.blocks[at - 1];
                before.chunks.push_back(piece);
                before.to = to;
            }
            (false, true) => {
                let after = &mut self.blocks[at];
                after.chunks.push_front(piece);
                after.from = from;
            }
            (false, false) => self.blocks.insert(at, Block { from, to, chunks: VecDeque::from([piece]) }),
        }
    }

    /// Moves the block with `seq` to the front of the list of changed blocks.
    fn touch(&mut self, seq: Seq) {
        let Some((from, to)) = self.block_with(seq) else { return };
        let is_other = |recent: &Option<Seq>| recent.is_some_and(|seq| !(from <= seq && seq < to));
        let mut order = [None; SackBlocks::MOST];
        order[0] = Some(seq);
        for (slot, other) in order[1..].iter_mut().zip(self.recent.iter().filter(|recent| is_other(recent))) {
            *slot = *other;
        }
        self.recent = order;
    }

    fn block_with(&self, seq: Seq) -> Option<(Seq, Seq)> {
        let at = self.blocks.partition_point(|block| block.to <= seq);
        self.blocks.get(at).map(|block| (block.from, block.to)).filter(|(from, _)| *from <= seq)
    }

    /// Adds the blocks that changed last to `blocks`, the latest first, while there is room.
    pub(super) fn report(&self, blocks: &mut SackBlocks) {
        for (from, to) in self.recent.iter().flatten().filter_map(|seq| self.block_with(*seq)) {
            if !blocks.push(from, to) {
                return;
            }
        }
    }

    /// Removes and returns the next chunk if it starts at `nxt` or before it. Bytes before `nxt`
    /// are trimmed or dropped.
    pub(super) fn pop(&mut self, nxt: Seq) -> Option<Held<T>> {
        while let Some(block) = self.blocks.front_mut()
            && block.from <= nxt
        {
            let known = (nxt - block.from) as usize;
            let chunk = block.chunks.pop_front();
            self.chunks -= usize::from(chunk.is_some());
            block.from += chunk.as_ref().map_or(0, |chunk| chunk.len() as u32);
            if block.chunks.is_empty() {
                self.blocks.pop_front();
                self.forget_tail();
            }
            if let Some(mut chunk) = chunk.filter(|chunk| known < chunk.len()) {
                chunk.advance(known);
                return Some(chunk);
            }
        }
        None
    }

    /// The first range before `nxt` that is stored. [`pop`](Self::pop) drops it, because it arrived
    /// again in order.
    pub(super) fn overlap(&self, nxt: Seq) -> Option<(Seq, Seq)> {
        self.blocks.front().filter(|block| block.from < nxt).map(|block| (block.from, block.to.min(nxt)))
    }

    /// Drops the chunk with the highest numbers, because payload that is in order needs the buffer.
    /// Returns false if there is none.
    pub(super) fn evict(&mut self) -> bool {
        let Some(last) = self.blocks.back_mut() else { return false };
        if let Some(chunk) = last.chunks.pop_back() {
            self.chunks -= 1;
            last.to = last.to - chunk.len() as u32;
        }
        if last.chunks.is_empty() {
            self.blocks.pop_back();
            self.forget_tail();
        }
        true
    }

    pub(super) fn clear(&mut self) {
        self.blocks = VecDeque::new();
        self.chunks = 0;
        self.forget_tail();
    }

    /// Nothing is stored: no buffer is kept for what may come.
    fn forget_tail(&mut self) {
        if self.blocks.is_empty() {
            self.tail = None;
        }
    }

    #[cfg(test)]
    pub(super) fn ranges(&self) -> Vec<(Seq, Seq)> {
        self.blocks.iter().map(|block| (block.from, block.to)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::SharedBytes;
    use super::*;

    fn insert(assembler: &mut Assembler<SharedBytes>, budget: &Budget, from: u32, to: u32) -> Inserted {
        assembler.insert(Seq(from), SharedBytes::numbered(from, to - from), budget)
    }

    fn reported(assembler: &Assembler<SharedBytes>) -> Vec<(u32, u32)> {
        let mut blocks = SackBlocks::default();
        assembler.report(&mut blocks);
        blocks.iter().map(|(from, to)| (from.0, to.0)).collect()
    }

    #[test]
    fn blocks_are_reported_latest_first_and_merge() {
        let (mut assembler, budget) = (Assembler::new(), Budget::new(100));
        for (from, to) in [(10, 20), (30, 40), (50, 60), (70, 80), (90, 95)] {
            assert_eq!(insert(&mut assembler, &budget, from, to), Inserted { complete: true, duplicate: None });
        }
        assert_eq!(reported(&assembler), [(90, 95), (70, 80), (50, 60), (30, 40)]);
        insert(&mut assembler, &budget, 40, 50);
        assert_eq!(reported(&assembler), [(30, 60), (90, 95), (70, 80)], "two blocks became one");
        assert_eq!(insert(&mut assembler, &budget, 35, 62).duplicate, Some((Seq(35), Seq(60))));
        assert_eq!(reported(&assembler)[0], (30, 62));
    }

    #[test]
    fn the_highest_numbers_go_first() {
        let (mut assembler, budget) = (Assembler::new(), Budget::new(3));
        for from in [10, 30, 50] {
            insert(&mut assembler, &budget, from, from + 10);
        }
        assert!(!insert(&mut assembler, &budget, 20, 30).complete);
        assert!(assembler.evict());
        assert_eq!(assembler.ranges(), [(Seq(10), Seq(20)), (Seq(30), Seq(40))]);
        assert_eq!(budget.used(), 2);
        assert!(assembler.evict() && assembler.evict() && !assembler.evict());
    }

    /// Many small chunks are in a buffer, so that buffers do not bound their number. They come in
    /// any order, and the time to merge them is bounded, too.
    #[test]
    fn the_number_of_small_chunks_is_bounded() {
        for descending in [false, true] {
            let (mut assembler, budget) = (Assembler::new(), Budget::new(10_000));
            for n in 0..5000 {
                let from = if descending { 10_000 - 2 * n } else { 2 * n + 1 };
                insert(&mut assembler, &budget, from, from + 1);
            }
            assert_eq!((assembler.chunks(), assembler.blocks.len()), (MOST_SMALL, MOST_SMALL));
            assert!(insert(&mut assembler, &budget, 20_000, 20_500).complete, "a large one is stored");
        }
    }

    /// Random chunks that overlap are returned as the bytes that were inserted, each byte once, in
    /// any order of insertion.
    #[test]
    fn any_order_gives_the_same_bytes() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let start = Seq(u32::MAX - 500);
            let (mut assembler, budget) = (Assembler::new(), Budget::new(10_000));
            let mut covered = [false; 1000];
            for _ in 0..random.usize(1..60) {
                let from = random.u32(1..990);
                let len = random.u32(1..=(1000 - from).min(80));
                let seq = start + from;
                let result = assembler.insert(seq, SharedBytes::numbered(seq.0, len), &budget);
                let there = covered[from as usize..(from + len) as usize].iter().any(|there| *there);
                assert_eq!(result.duplicate.is_some(), there, "seed {seed}");
                covered[from as usize..(from + len) as usize].fill(true);
            }
            let mut nxt = start;
            while let Some(gap) = (0..1000).skip((nxt - start) as usize).find(|at| covered[*at]) {
                nxt = start + gap as u32;
                while let Some(chunk) = assembler.pop(nxt) {
                    assert_eq!(chunk.bytes(), SharedBytes::numbered(nxt.0, chunk.len() as u32).bytes(), "seed {seed}");
                    let at = (nxt - start) as usize;
                    covered[at..at + chunk.len()].iter_mut().for_each(|there| assert!(std::mem::take(there)));
                    nxt += chunk.len() as u32;
                }
            }
            assert!(assembler.is_empty() && budget.used() == 0, "seed {seed}");
        }
    }
}
