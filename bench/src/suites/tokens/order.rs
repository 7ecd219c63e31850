//! The pages that are received, and their order.

use netmem_bench::baselines::tokens::{BATCH, Fragment, Niovs};
use std::sync::Arc;

/// Pages in circulation, of all bindings together.
pub(super) const PAGES: u32 = 16 * 1024;
/// How often the pages are mixed before the sequence repeats.
const PASSES: u32 = 16;

/// How the pages of a binding follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sequence {
    /// The order in which a pool hands out pages that were returned in bulk: neighbours share cache
    /// lines of counts.
    InOrder,
    /// The worst order after a long time: the next page is never near the last one.
    Mixed,
}

impl Sequence {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::InOrder => "in order",
            Self::Mixed => "mixed",
        }
    }

    /// The suffix of a row's name.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::InOrder => "",
            Self::Mixed => "_mixed",
        }
    }
}

/// Bindings, and their pages in the order in which they are received: each page once, then each
/// once more.
pub(super) struct Order {
    pub(super) sequence: Sequence,
    pub(super) bindings: Vec<Arc<Niovs>>,
    fragments: Vec<Fragment>,
}

impl Order {
    /// The bindings take turns. All have the same number of pages.
    pub(super) fn new(sequence: Sequence, bindings: u32) -> Self {
        let mut pages: Vec<Fragment> =
            (0..PAGES).map(|n| Fragment { binding: n % bindings, index: n / bindings }).collect();
        let fragments = match sequence {
            Sequence::InOrder => pages,
            Sequence::Mixed => {
                let mut random = Random(0x2545_F491_4F6C_DD1D);
                let mut all = Vec::with_capacity((PASSES * PAGES) as usize);
                for _ in 0..PASSES {
                    (1..pages.len()).rev().for_each(|n| pages.swap(n, random.upto(n)));
                    all.extend_from_slice(&pages);
                }
                all
            }
        };
        Self { sequence, bindings: (0..bindings).map(|_| Niovs::new(PAGES / bindings)).collect(), fragments }
    }

    pub(super) fn bindings(&self) -> u32 {
        self.bindings.len() as u32
    }

    /// One batch after another, without end.
    pub(super) fn batches(&self) -> impl Iterator<Item = &[Fragment]> {
        self.fragments.chunks(BATCH).cycle()
    }
}

/// Xorshift: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn upto(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % (n as u64 + 1)) as usize
    }
}

/// The section of rows over so many bindings.
pub(super) fn section(sequence: Sequence, bindings: u32) -> &'static str {
    match (sequence, bindings) {
        (Sequence::InOrder, 1) => "1 binding, in order",
        (Sequence::InOrder, _) => "8 bindings, in order",
        (Sequence::Mixed, 1) => "1 binding, mixed",
        (Sequence::Mixed, _) => "8 bindings, mixed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_page_comes_once_before_any_comes_again() {
        for (sequence, bindings) in [(Sequence::InOrder, 8), (Sequence::Mixed, 1), (Sequence::Mixed, 8)] {
            let order = Order::new(sequence, bindings);
            let passes: Vec<&[Fragment]> = order.fragments.chunks(PAGES as usize).collect();
            for pass in &passes {
                let pages: HashSet<(u32, u32)> = pass.iter().map(|page| (page.binding, page.index)).collect();
                assert_eq!(pages.len(), PAGES as usize);
                assert!(pages.iter().all(|&(binding, index)| binding < bindings && index < PAGES / bindings));
            }
            assert!(passes.windows(2).all(|two| two[0] != two[1]));
            assert!(order.batches().take(PAGES as usize).all(|batch| batch.len() == BATCH));
        }
    }
}
