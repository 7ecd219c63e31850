//! The memory of values: pages of a pool, which the device can read.

use super::store::Memory;
use crate::serve::service::BY_REFERENCE;
use netmem::pool::{Frag, Page, Readable, SharedPool};
use std::sync::Arc;

const PAGE: usize = 4096;
/// The least number of pages that are not the store's.
const SPARE: usize = 1024;

/// Pages for a store of `limit` bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct Sizes {
    pub(super) limit: usize,
    /// Pages of the store: a quarter more than `limit`, because a page is free only when its last
    /// value is gone.
    pub(super) store: usize,
    /// All pages. The others are for values that are received or sent.
    pub(in crate::serve) pages: usize,
}

impl Sizes {
    pub(in crate::serve) fn new(limit: usize) -> Self {
        let quarter = limit.div_ceil(PAGE) / 4;
        let store = 5 * quarter + 1;
        Self { limit, store, pages: store + quarter.max(SPARE) }
    }
}

/// The memory of values: pages, each of which has many small values.
pub(super) struct Pages<M: Readable> {
    pool: Arc<SharedPool<M>>,
    open: Option<Page<M>>,
}

impl<M: Readable> Pages<M> {
    pub(super) fn new(pool: Arc<SharedPool<M>>) -> Self {
        Self { pool, open: None }
    }

    /// Whether there is memory for at least one byte.
    pub(super) fn has_some(&mut self) -> bool {
        if self.open.is_none() {
            // Pages that other threads have returned are not always found at once.
            self.open = self.pool.alloc().or_else(|| {
                self.pool.reclaim();
                self.pool.alloc()
            });
        }
        self.open.is_some()
    }
}

impl<M: Readable> Memory for Pages<M> {
    type Part = Frag<M>;

    /// Pieces are long enough to be sent by reference, except the last one of a value: otherwise a
    /// value that comes in tiny segments would have a list of pieces that is longer than the value.
    fn append(&mut self, bytes: &[u8], value: &mut Vec<Frag<M>>) -> usize {
        let end = value.last().map(|last| last.as_ptr_range().end);
        let continues = |page: &Page<M>| end == Some(page.as_ptr().cast_const());
        // Another value may have been stored behind the last piece. A short piece then moves, so
        // that it can grow.
        let short = value.last_mut().filter(|last| last.len() < BY_REFERENCE);
        let least = bytes.len().min(BY_REFERENCE);
        let least_after_move = least + short.as_ref().map_or(0, |last| last.len());
        let open = self.open.take();
        let open = open.filter(|page| page.len() >= if continues(page) { least } else { least_after_move });
        let Some(mut page) = open.or_else(|| self.pool.alloc()) else { return 0 };
        if let Some(last) = short.filter(|_| !continues(&page)) {
            page.as_mut_slice()[..last.len()].copy_from_slice(last);
            *last = page.split_to(last.len()).freeze();
        }
        let n = bytes.len().min(page.len());
        page.as_mut_slice()[..n].copy_from_slice(&bytes[..n]);
        let part = if n < page.len() {
            let part = page.split_to(n).freeze();
            self.open = Some(page);
            part
        } else {
            page.freeze()
        };
        let part = match value.last_mut() {
            Some(last) => last.join(part).err(),
            None => Some(part),
        };
        value.extend(part);
        n
    }

    fn bytes(part: &Frag<M>) -> &[u8] {
        part
    }

    fn page(part: &Frag<M>) -> usize {
        part.as_ptr() as usize / PAGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem::pool::{PoolOptions, Private, RegionOptions, RegionProvider};

    fn pages(number: usize) -> Pages<Private> {
        let region = RegionOptions::new(number).huge_pages(false).build::<Private>().unwrap();
        let pool = PoolOptions::new("values").build_shared(RegionProvider::new(region), None).unwrap();
        Pages::new(Arc::new(pool))
    }

    fn bytes(value: &[Frag<Private>]) -> Vec<u8> {
        value.iter().flat_map(|part| part.iter().copied()).collect()
    }

    /// Two values that come at the same time, in segments of any size: all pieces but the last are
    /// long, and the bytes are right.
    #[test]
    fn values_in_tiny_segments_have_few_pieces() {
        for size in [1, 7, 100, 511, 512, 1448, 4096, 9000] {
            let mut pages = pages(128);
            let expected: [Vec<u8>; 2] = [3_u8, 5].map(|n| (0..20_000).map(|at| (at as u8).wrapping_mul(n)).collect());
            let mut values = [Vec::new(), Vec::new()];
            for at in (0..20_000).step_by(size) {
                for (value, expected) in values.iter_mut().zip(&expected) {
                    let mut segment = &expected[at..(at + size).min(20_000)];
                    while !segment.is_empty() {
                        let n = pages.append(segment, value);
                        assert_ne!(n, 0, "segments of {size}");
                        segment = &segment[n..];
                    }
                }
            }
            for (value, expected) in values.iter().zip(&expected) {
                assert!(bytes(value) == *expected, "segments of {size}");
                let (_, before) = value.split_last().unwrap();
                assert!(before.iter().all(|part| part.len() >= BY_REFERENCE), "segments of {size}: {value:?}");
            }
        }
    }

    /// Small values share pages, and a value of one piece is not divided.
    #[test]
    fn small_values_share_a_page() {
        let mut pages = pages(8);
        let mut values = Vec::new();
        for n in 0..100_u8 {
            let mut value = Vec::new();
            assert_eq!(pages.append(&[n; 60], &mut value), 60);
            values.push(value);
        }
        assert!(values.iter().enumerate().all(|(n, value)| bytes(value) == [n as u8; 60] && value.len() == 1));
        let numbers: std::collections::BTreeSet<usize> = values.iter().flatten().map(Pages::<Private>::page).collect();
        assert_eq!(numbers.len(), 2);
        drop(pages);
    }

    #[test]
    fn an_empty_pool_is_reported() {
        let mut pages = pages(2);
        let mut value = Vec::new();
        let mut copied = 0;
        loop {
            match pages.append(&[1; 3000], &mut value) {
                0 => break,
                n => copied += n,
            }
        }
        assert!(copied >= 6000 && !pages.has_some());
        value.clear();
        assert!(pages.has_some());
    }

    #[test]
    fn a_store_leaves_pages_to_connections() {
        for limit in [1 << 20, 64 << 20, 1 << 30] {
            let sizes = Sizes::new(limit);
            assert!(
                sizes.store * PAGE >= limit && sizes.pages >= sizes.store + SPARE.max(sizes.store / 6),
                "{sizes:?}"
            );
        }
    }
}
