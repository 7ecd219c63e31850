//! The in-flight state of a running packed queue.
//!
//! A batch is published by one store, the flags of its first used descriptor. If that store is not
//! seen in the ring, the batch is rolled back. A chain that is a batch by itself is then still in
//! the ring, so it needs no entry. The later chains of a longer batch are already overwritten by
//! their used descriptors. Therefore copies of all chains of such a batch are kept in entries, from
//! before the first is overwritten until after the batch is published.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use super::layout::{PackedWords, VERSION};
use super::region::{InflightQueue, Words};
use crate::virtqueue::{PackedDesc, PackedRing, Position};

/// The in-flight state of a running packed queue.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    words: Words<PackedWords>,
    size: u16,
    /// Where the queue begins: the next chain to pop, and the next used descriptor.
    start: (Position, Position),
    /// The chains of the earlier back end that must still be completed: one behind the other, from
    /// the used position on.
    resubmitted: VecDeque<ResubmittedChain>,
    /// The free list, of which the region has a copy.
    free_head: u16,
    next: Vec<u16>,
    counter: u64,
    /// Used descriptors of the current batch, except the first.
    held: Vec<(Position, PackedDesc)>,
    /// Entries of the current batch.
    batch: Vec<u16>,
    /// The used position after the current batch.
    used: Position,
}

/// A chain that is resubmitted.
#[derive(Debug)]
pub(super) struct ResubmittedChain {
    /// The position at which it is completed.
    at: Position,
    /// Its first and its last entry.
    entry: u16,
    last: u16,
    pub(super) chain: Vec<PackedDesc>,
}

impl PackedInflight {
    /// For `ring`, which is at `base` as the front end has set it.
    ///
    /// A batch that the earlier back end has not published is rolled back in the ring.
    /// `rolled_back` is then called with the first position and the number of descriptors that may
    /// have been written, for the dirty log.
    pub(crate) fn new(
        part: InflightQueue,
        ring: &PackedRing,
        base: [Position; 2],
        rolled_back: impl FnOnce(Position, u32),
    ) -> Self {
        let words = part.words::<PackedWords>();
        let (size, entries) = (ring.size(), words.entries());
        let mut state = Self {
            words,
            size,
            start: (base[0], base[1]),
            resubmitted: VecDeque::new(),
            free_head: 0,
            next: vec![0; entries.into()],
            counter: 0,
            held: Vec::new(),
            batch: Vec::new(),
            used: base[1],
        };
        if state.words.header().version.load(Ordering::Relaxed) == VERSION {
            state.recover(ring, rolled_back);
        }
        // The entries that are not in flight are free.
        let mut in_flight = vec![false; entries.into()];
        for entry in state.resubmitted.iter().flat_map(|chain| state.entries_of(chain)) {
            in_flight[usize::from(entry)] = true;
        }
        let free: Vec<u16> = (0..entries).filter(|&entry| !in_flight[usize::from(entry)]).collect();
        for (n, &entry) in free.iter().enumerate() {
            state.words.entry(entry).inflight.store(0, Ordering::Relaxed);
            state.set_next(entry, free.get(n + 1).copied().unwrap_or(entries));
        }
        state.free_head = free.first().copied().unwrap_or(entries);
        state.words.header().desc_num.store(entries, Ordering::Relaxed);
        state.store_current();
        state.store_old();
        state.words.header().version.store(VERSION, Ordering::Release);
        state
    }

    /// Reads the state that the earlier back end has left. A position or an entry that the ring
    /// cannot have is ignored.
    fn recover(&mut self, ring: &PackedRing, rolled_back: impl FnOnce(Position, u32)) {
        let (header, entries) = (self.words.header(), self.words.entries());
        let position = |index: &AtomicU16, wrap: &AtomicU8| {
            let wrap = u16::from(wrap.load(Ordering::Relaxed) & 1) << 15;
            let index = index.load(Ordering::Relaxed);
            (index < self.size).then(|| Position::from_bits(index | wrap))
        };
        let new = position(&header.used_idx, &header.used_wrap_counter);
        let old = position(&header.old_used_idx, &header.old_used_wrap_counter);
        let (Some(new), Some(old)) = (new, old) else { return };
        let published = new == old || !ring.used_desc(old.offset()).is_available(old);
        let (used, free_head) = if published { (new, &header.free_head) } else { (old, &header.old_free_head) };
        if !published {
            rolled_back(old, roll_back(ring, old, new));
        }
        let mut free = free_head.load(Ordering::Relaxed);
        for _ in 0..entries {
            if free >= entries {
                break;
            }
            let entry = self.words.entry(free);
            entry.inflight.store(0, Ordering::Relaxed);
            free = entry.next.load(Ordering::Relaxed);
        }
        let marked = (0..entries).filter(|&e| self.words.entry(e).inflight.load(Ordering::Relaxed) == 1);
        let mut marked: Vec<_> = marked.map(|e| (self.words.entry(e).counter.load(Ordering::Relaxed), e)).collect();
        marked.sort_unstable();
        let (mut at, mut left) = (used, self.size);
        let mut seen = vec![false; entries.into()];
        for (counter, entry) in marked {
            self.counter = self.counter.max(counter.wrapping_add(1));
            let Some(chain) = self.chain(entry, at, left, &mut seen) else { continue };
            left -= chain.chain.len() as u16;
            at = at.step(chain.chain.len() as u16, self.size);
            self.resubmitted.push_back(chain);
        }
        if !self.resubmitted.is_empty() {
            netmem_pool::trace::info!("{} chains were in flight, and are taken again", self.resubmitted.len());
        }
        // The chains that are resubmitted have the positions from the used one on, and the ring
        // continues behind them.
        (self.start, self.used) = ((used, used), used);
    }

    /// The chain of an entry that is marked, if its descriptors are entries that no other chain
    /// has, and `left` at most.
    fn chain(&self, entry: u16, at: Position, left: u16, seen: &mut [bool]) -> Option<ResubmittedChain> {
        let num = self.words.entry(entry).num.load(Ordering::Relaxed);
        if num == 0 || num > left {
            return None;
        }
        let (mut chain, mut this, mut last) = (Vec::new(), entry, entry);
        for _ in 0..num {
            if std::mem::replace(seen.get_mut(usize::from(this))?, true) {
                return None;
            }
            let words = self.words.entry(this);
            chain.push(PackedDesc {
                addr: words.addr.load(Ordering::Relaxed),
                len: words.len.load(Ordering::Relaxed),
                id: words.id.load(Ordering::Relaxed),
                flags: words.flags.load(Ordering::Relaxed),
            });
            (last, this) = (this, words.next.load(Ordering::Relaxed));
        }
        Some(ResubmittedChain { at, entry, last, chain })
    }

    fn entries_of(&self, chain: &ResubmittedChain) -> Vec<u16> {
        let entries = self.words.entries();
        let next = |&e: &u16| Some(self.words.entry(e).next.load(Ordering::Relaxed)).filter(|&e| e < entries);
        std::iter::successors(Some(chain.entry), next).take(chain.chain.len()).collect()
    }

    fn set_next(&mut self, entry: u16, next: u16) {
        self.next[usize::from(entry)] = next;
        self.words.entry(entry).next.store(next, Ordering::Relaxed);
    }

    /// Writes the free list's head and the used position to the header.
    fn store_current(&self) {
        let header = self.words.header();
        header.free_head.store(self.free_head, Ordering::Relaxed);
        header.used_wrap_counter.store(self.used.wrap().into(), Ordering::Relaxed);
        header.used_idx.store(self.used.offset(), Ordering::Release);
    }

    /// The same as those from before the next batch.
    fn store_old(&self) {
        let header = self.words.header();
        header.old_free_head.store(self.free_head, Ordering::Relaxed);
        header.old_used_wrap_counter.store(self.used.wrap().into(), Ordering::Relaxed);
        header.old_used_idx.store(self.used.offset(), Ordering::Release);
    }

    /// Where the queue begins: the next chain to pop, and the next used descriptor.
    pub(crate) fn start(&self) -> (Position, Position) {
        self.start
    }

    /// Whether there are chains left that are resubmitted.
    pub(crate) fn has_resubmitted(&self) -> bool {
        !self.resubmitted.is_empty()
    }

    /// All chains that are resubmitted, oldest first.
    #[cfg(test)]
    pub(super) fn all_resubmitted(&self) -> &VecDeque<ResubmittedChain> {
        &self.resubmitted
    }

    /// The chain that is resubmitted at position `at`: at least one descriptor, out of the front
    /// end's region, and not checked.
    pub(crate) fn resubmitted(&self, at: Position) -> Option<&[PackedDesc]> {
        // A position is searched for each chain and for each of its descriptors, and there may be
        // 32,768.
        let first = self.resubmitted.front()?.at;
        let behind = |chain: &ResubmittedChain| chain.at.since(first, self.size);
        let n = self.resubmitted.binary_search_by_key(&at.since(first, self.size), behind).ok()?;
        Some(&self.resubmitted[n].chain)
    }

    /// Adds a used descriptor to the current batch, which is not its first.
    pub(crate) fn hold(&mut self, at: Position, used: PackedDesc) {
        self.held.push((at, used));
    }

    /// Called before the first used descriptor of a batch from `from` to `to` is written. Writes
    /// the others.
    pub(crate) fn before_publish(&mut self, ring: &PackedRing, from: Position, to: Position) {
        let held = std::mem::take(&mut self.held);
        let ends = held.iter().map(|&(at, _)| at).chain([to]);
        let chains: Vec<_> = [from].into_iter().chain(held.iter().map(|&(at, _)| at)).zip(ends).collect();
        let mut completed = Vec::new();
        for &(at, end) in &chains {
            if self.resubmitted.front().is_some_and(|chain| chain.at == at) {
                completed.extend(self.resubmitted.pop_front().map(|chain| (chain.entry, chain.last)));
            } else if !held.is_empty() {
                completed.extend(self.save_chain(ring, at, end.since(at, self.size)));
            }
        }
        self.words.header().old_free_head.store(self.free_head, Ordering::Release);
        for (entry, last) in completed {
            self.set_next(last, self.free_head);
            self.free_head = entry;
            self.batch.push(entry);
        }
        self.used = to;
        self.store_current();
        for &(at, d) in held.iter().rev() {
            ring.set_used_desc(at.offset(), d);
        }
        self.held = held;
        self.held.clear();
    }

    /// Copies the `n` descriptors of the chain at `at` to entries. Returns the first and the last
    /// entry; `None` if there are too few, which happens if the driver changes its flags meanwhile.
    fn save_chain(&mut self, ring: &PackedRing, at: Position, n: u32) -> Option<(u16, u16)> {
        let first = self.free_head;
        let (mut last, mut free, mut at) = (first, first, at);
        for _ in 0..n {
            last = free;
            free = *self.next.get(usize::from(last))?;
            let d = ring.desc(at.offset());
            let words = self.words.entry(last);
            words.addr.store(d.addr, Ordering::Relaxed);
            words.len.store(d.len, Ordering::Relaxed);
            words.id.store(d.id, Ordering::Relaxed);
            words.flags.store(d.flags, Ordering::Relaxed);
            at = at.step(1, self.size);
        }
        let words = self.words.entry(first);
        words.last.store(last, Ordering::Relaxed);
        words.num.store(n as u16, Ordering::Relaxed);
        words.counter.store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        words.inflight.store(1, Ordering::Release);
        self.free_head = free;
        Some((first, last))
    }

    /// Called after the batch was published.
    pub(crate) fn after_publish(&mut self) {
        for entry in std::mem::take(&mut self.batch) {
            self.words.entry(entry).inflight.store(0, Ordering::Release);
        }
        self.store_old();
    }
}

/// Rolls back a batch. The earlier back end ended while it published the used descriptors from
/// `old` to `new`, and has not written the first. The driver must not read those that it has
/// written already as descriptors of this back end. Returns how many there are at most, from `old`
/// on.
fn roll_back(ring: &PackedRing, old: Position, new: Position) -> u32 {
    let size = ring.size();
    let count = new.since(old, size).min(size.into());
    for n in 1..count {
        let at = old.step(n as u16, size);
        let d = ring.used_desc(at.offset());
        if d.is_used(at) {
            ring.set_used_desc(at.offset(), PackedDesc { flags: at.available(), ..d });
        }
    }
    count
}
