//! The in-flight state of a running split queue.

use std::sync::atomic::Ordering;

use super::layout::{SplitWords, VERSION};
use super::region::{InflightQueue, Words};
use crate::virtqueue::SplitRing;

/// The chains in flight, in the order in which they were popped, for a ring of `size` entries at
/// used index `used`.
fn recover(words: &Words<SplitWords>, size: u16, used: u16) -> Vec<u16> {
    let header = words.header();
    if header.version.load(Ordering::Relaxed) != VERSION {
        header.desc_num.store(words.entries(), Ordering::Relaxed);
        header.used_idx.store(used, Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Release);
        return Vec::new();
    }
    // The earlier back end ended after it had published a batch and before it had cleared the marks
    // of the batch's chains.
    let batch = used.wrapping_sub(header.used_idx.load(Ordering::Relaxed));
    if batch <= size {
        let mut head = header.last_batch_head.load(Ordering::Relaxed);
        for _ in 0..batch {
            if head >= words.entries() {
                break;
            }
            let entry = words.entry(head);
            entry.inflight.store(0, Ordering::Relaxed);
            head = entry.next.load(Ordering::Relaxed);
        }
    }
    header.used_idx.store(used, Ordering::Release);
    let marked = (0..size).filter(|&head| words.entry(head).inflight.load(Ordering::Relaxed) == 1);
    let mut chains: Vec<_> = marked.map(|head| (words.entry(head).counter.load(Ordering::Relaxed), head)).collect();
    chains.sort_unstable();
    chains.into_iter().map(|(_, head)| head).collect()
}

/// The in-flight state of a running split queue.
#[derive(Debug)]
pub(crate) struct SplitInflight {
    words: Words<SplitWords>,
    /// The heads of the chains of the earlier back end that must still be completed, in their
    /// order. They are popped at the positions from `start` on, in place of the available ring's
    /// entries there.
    resubmitted: Vec<u16>,
    start: u16,
}

impl SplitInflight {
    /// For a ring of `size` entries, whose used index is `used`.
    pub(crate) fn new(part: InflightQueue, size: u16, used: u16) -> Self {
        let words = part.words();
        let resubmitted = recover(&words, size, used);
        if !resubmitted.is_empty() {
            netmem_pool::trace::info!("{} chains were in flight, and are taken again", resubmitted.len());
        }
        Self { words, resubmitted, start: used }
    }

    /// Whether there are chains left that are resubmitted.
    pub(crate) fn has_resubmitted(&self) -> bool {
        !self.resubmitted.is_empty()
    }

    /// The head of the chain that is resubmitted at position `at`. It is out of the front end's
    /// region, and not checked.
    #[inline]
    pub(crate) fn resubmitted(&self, at: u16) -> Option<u16> {
        self.resubmitted.get(usize::from(at.wrapping_sub(self.start))).copied()
    }

    /// Called before the used index goes from `from` to `to`. Links the chains that are completed,
    /// so that the next back end can clear their marks.
    pub(crate) fn before_publish(&self, ring: &SplitRing, from: u16, to: u16) {
        if !self.has_resubmitted() {
            return;
        }
        let last_batch_head = &self.words.header().last_batch_head;
        for head in self.completed(ring, from, to) {
            let last = last_batch_head.load(Ordering::Relaxed);
            self.words.entry(head).next.store(last, Ordering::Relaxed);
            last_batch_head.store(head, Ordering::Release);
        }
    }

    /// Called after the used index went from `from` to `to`; the next chain is at `next`.
    pub(crate) fn after_publish(&mut self, ring: &SplitRing, from: u16, to: u16, next: u16) {
        if self.has_resubmitted() {
            for head in self.completed(ring, from, to) {
                self.words.entry(head).inflight.store(0, Ordering::Relaxed);
            }
            if usize::from(next.wrapping_sub(self.start)) >= self.resubmitted.len() {
                self.resubmitted = Vec::new();
            }
        }
        self.words.header().used_idx.store(to, Ordering::Release);
    }

    /// The heads in the used ring from `from` to `to` that have an entry.
    fn completed(&self, ring: &SplitRing, from: u16, to: u16) -> impl Iterator<Item = u16> {
        let entries = self.words.entries();
        let heads = (0..to.wrapping_sub(from)).map(move |n| ring.used_entry(from.wrapping_add(n)).0);
        heads.filter_map(|head| u16::try_from(head).ok()).filter(move |&head| head < entries)
    }
}
