//! An allocation while the pool has no page at hand: all pages are in the magazine of another CPU,
//! which is not full.

use super::pipeline::drop_all;
use crate::accounting::{CountedPool, M};
use crate::error::BenchError;
use crate::harness::{Harness, Timed};
use crate::timing::{BATCH, Work};
use netmem::pool::Page;
use rtrb::{Producer, RingBuffer};
use std::hint::spin_loop;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A pool reclaims the pages that CPUs hold at most every 100 us. An allocation that comes after
/// this pause does not wait for that limit.
const PAUSE: Duration = Duration::from_micros(120);

/// A pool with so few pages that one magazine holds all of them. They are dropped on the second
/// CPU. Then the first CPU allocates until it gets one.
pub(super) struct Starved {
    pool: CountedPool,
    pages: usize,
    pause: Duration,
}

impl Starved {
    /// Each measured allocation comes after a pause, so the pool may reclaim at once.
    pub(super) fn new(pool: CountedPool, pages: usize) -> Self {
        Self { pool, pages, pause: PAUSE }
    }

    /// Each measured allocation follows at once, so the pool may have to wait before it reclaims.
    pub(super) fn without_pause(pool: CountedPool, pages: usize) -> Self {
        Self { pool, pages, pause: Duration::ZERO }
    }
}

impl Work for Starved {
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let (mut ring, end) = RingBuffer::new(self.pages);
        let dropper = |ended: &AtomicBool| drop_all(end, |pages| pages.into_iter().for_each(drop), ended, spin_loop);
        let sum = harness.served(vec![dropper], || {
            let mut sum = Timed::default();
            for _ in 0..blocks * BATCH {
                if !self.all_dropped_there(&mut ring) {
                    return None;
                }
                let (timed, ()) = harness.time(|| self.wait_for_one());
                sum.ns += timed.ns;
                sum.ticks += timed.ticks;
                sum.lost_ns += timed.lost_ns;
            }
            Some(sum)
        })?;
        sum.ok_or(BenchError::NoPage("starved"))
    }

    fn least(&self) -> u64 {
        1
    }
}

impl Starved {
    /// Sends all pages to the other CPU, and waits until they are dropped there. `false` if the
    /// thread there has ended.
    fn all_dropped_there(&mut self, ring: &mut Producer<Page<M>>) -> bool {
        let mut out = Vec::with_capacity(self.pages);
        while out.len() < self.pages {
            out.extend(self.pool.take(self.pages - out.len()));
        }
        let begin = Instant::now();
        if !out.into_iter().all(|page| ring.push(page).is_ok()) {
            return false;
        }
        while ring.slots() < self.pages && !ring.is_abandoned() {
            spin_loop();
        }
        while begin.elapsed() < self.pause {
            spin_loop();
        }
        ring.slots() == self.pages
    }

    fn wait_for_one(&mut self) {
        while self.pool.poll(|napi| napi.alloc().map(drop)).is_none() {
            spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::Accounting;
    use netmem::pool::PoolOptions;

    /// No page is stranded: every page that was dropped on the other CPU can be allocated again,
    /// after a reclaim. Proves POOL-4.
    #[test]
    fn a_starved_pool_gets_its_pages_back() {
        let harness = Harness::for_tests();
        let accounting = Accounting::default();
        let pool = accounting.pool(PoolOptions::new("test").magazine(8), 7, 0).unwrap();
        let mut work = Starved::new(pool, 7);
        assert!(work.run(&harness, 1).unwrap().ns > 0);
        drop(work);
        let stats = accounting.stats();
        assert_eq!((stats.allocated(), stats.inflight()), (BATCH * 8, 0));
        assert!(stats.reclaims > 0 && stats.reclaimed > 0, "{stats:?}");
    }
}
