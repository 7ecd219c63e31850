//! An allocation that finds no page at hand: all of them lie where another CPU dropped them.

use super::BATCH;
use super::books::{M, Pool};
use super::pipeline::drop_all;
use super::timing::Work;
use crate::bench::error::BenchError;
use crate::bench::lab::{Lab, Timed};
use netmem::pool::Page;
use rtrb::{Producer, RingBuffer};
use std::hint::spin_loop;
use std::sync::atomic::AtomicBool;

/// Pages of the pool: a little more than the largest magazine has.
pub(super) const PAGES: usize = 64;

/// A pool all of whose pages are dropped on the second CPU; then the first asks for one, until it gets it.
pub(super) struct Starved(pub(super) Pool);

impl Work for Starved {
    fn run(&mut self, lab: &Lab, blocks: u64) -> Result<Timed, BenchError> {
        let pool = &mut self.0;
        let (mut ring, end) = RingBuffer::new(PAGES);
        let dropper = |ended: &AtomicBool| drop_all(end, |pages| pages.into_iter().for_each(drop), ended);
        let sum = lab.served(vec![dropper], || {
            let mut sum = Timed::default();
            for _ in 0..blocks {
                for _ in 0..BATCH {
                    if !all_dropped_there(pool, &mut ring) {
                        return None;
                    }
                    let (timed, ()) = lab.time(|| wait_for_one(pool));
                    sum.ns += timed.ns;
                    sum.ticks += timed.ticks;
                    sum.lost_ns += timed.lost_ns;
                }
            }
            Some(sum)
        })?;
        sum.ok_or(BenchError::NoPage("starved"))
    }

    fn least(&self) -> u64 {
        1
    }
}

/// Sends all pages to where they are dropped, and waits until they are. `false` if nobody drops them.
fn all_dropped_there(pool: &mut Pool, ring: &mut Producer<Page<M>>) -> bool {
    let mut out = 0;
    // Those of the round before have to be got back, too.
    while out < PAGES {
        for page in pool.take(PAGES - out) {
            out += 1;
            if ring.push(page).is_err() {
                return false;
            }
        }
    }
    while ring.slots() < PAGES && !ring.is_abandoned() {
        spin_loop();
    }
    ring.slots() == PAGES
}

fn wait_for_one(pool: &mut Pool) {
    while pool.poll(|napi| napi.alloc().map(drop)).is_none() {
        spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::super::books::Books;
    use super::*;
    use crate::bench::plan::Plan;
    use netmem::PoolOptions;
    use std::time::Duration;

    /// No page is stranded: every one that was dropped elsewhere is had again. Proves POOL-4.
    #[test]
    fn a_starved_pool_gets_its_pages_back() {
        let (threads, cpus) = (vec![1], crate::cpus::allowed());
        let duration = Duration::from_millis(1);
        let lab = Lab::new(&Plan { suites: Vec::new(), threads, cpus, duration, runs: 1, budget: None });
        let books = Books::default();
        let pool = books.pool(PoolOptions::new("test"), PAGES, 0).unwrap();
        let mut work = Starved(pool);
        assert!(work.run(&lab, 1).unwrap().ns > 0);
        drop(work);
        let stats = books.stats();
        assert_eq!((stats.allocated(), stats.inflight()), (BATCH * (PAGES as u64 + 1), 0));
    }
}
