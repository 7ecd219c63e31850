//! Helpers that several tests use.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test binary uses some of it")]

use netmem_pool::{
    CountingDomain, Direction, DmaDomain, MapError, Page, PagePool, PoolOptions, PoolStats, Private, RegionOptions,
    RegionProvider, SystemMemory,
};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A domain without a table: the device's addresses are one page above those of this process.
#[derive(Debug, Default)]
pub struct Flat {
    /// Maps that succeed before the first one that fails; 0 means that all succeed.
    pub good: u64,
    asked: AtomicU64,
}

impl Flat {
    pub fn failing_after(good: u64) -> Self {
        Self { good, asked: AtomicU64::new(0) }
    }
}

impl DmaDomain for Flat {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        if self.good > 0 && self.asked.fetch_add(1, Ordering::Relaxed) >= self.good {
            return Err(MapError::Full("as the test wants it".into()));
        }
        Ok(addr.addr() as u64 + 4096)
    }

    fn unmap(&self, dma: u64, _len: usize) {
        assert!(dma > 4096, "unmapped what was never mapped: {dma:#x}");
    }
}

/// A domain that knows what is mapped. Addresses are never reused; a page is mapped once at a time,
/// and unmapped once.
#[derive(Debug, Default)]
pub struct Strict(Mutex<(u64, HashMap<u64, usize>, HashSet<usize>)>);

impl Strict {
    pub fn mapped(&self) -> usize {
        self.0.lock().unwrap().1.len()
    }
}

impl DmaDomain for Strict {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        let (next, by_dma, by_addr) = &mut *self.0.lock().unwrap();
        assert!(by_addr.insert(addr.addr()), "mapped while it was mapped");
        *next += 1 << 12;
        by_dma.insert(*next, addr.addr());
        Ok(*next)
    }

    fn unmap(&self, dma: u64, _len: usize) {
        let (_, by_dma, by_addr) = &mut *self.0.lock().unwrap();
        let addr = by_dma.remove(&dma).expect("unmapped what was not mapped");
        by_addr.remove(&addr);
    }
}

pub type Counting = CountingDomain<Flat>;

pub fn counting() -> Arc<Counting> {
    Arc::new(CountingDomain::new(Flat::default()))
}

pub fn provider<M: SystemMemory>(pages: usize) -> Arc<RegionProvider<M>> {
    RegionProvider::new(RegionOptions::new(pages).huge_pages(false).populate(false).build().unwrap())
}

/// A pool of private memory with a provider of its own, in a domain that counts.
pub fn pool(options: PoolOptions, pages: usize) -> (PagePool<Private>, Arc<Counting>) {
    let domain = counting();
    (options.build(provider(pages), Some(domain.clone())).unwrap(), domain)
}

pub fn alloc(pool: &mut PagePool<Private>, n: usize) -> Vec<Page<Private>> {
    (0..n).map(|_| pool.alloc().unwrap()).collect()
}

/// Pages that were returned from other CPUs, by any of the ways.
pub fn remote_frees(stats: PoolStats) -> u64 {
    stats.recycle_ring + stats.recycle_ring_full
}

/// Checks that all pages were returned, and that everything mapped that is not in the pool was
/// unmapped.
#[track_caller]
pub fn assert_balanced(stats: PoolStats, domain: &Counting) {
    assert_eq!(stats.inflight(), 0, "{stats:?}");
    assert_eq!(stats.allocated(), stats.returned() + stats.quarantined, "{stats:?}");
    assert_eq!((stats.mapped, stats.unmapped), (domain.maps(), domain.unmaps()), "{stats:?}");
}

/// Closes a pool that has no page in flight, and checks its accounting.
#[track_caller]
pub fn close_balanced(pool: PagePool<Private>, domain: &Counting) -> PoolStats {
    let closed = pool.close();
    assert_eq!(closed.outstanding, 0);
    assert_balanced(closed.stats, domain);
    assert_eq!(domain.maps(), domain.unmaps());
    closed.stats
}

/// The entry of `/proc/self/smaps` of the mapping that begins at `at`.
pub fn smaps(at: *const u8) -> String {
    let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = all.find(&format!("{:x}-", at.addr())).expect("mapped");
    let rest = &all[start..];
    rest[..rest.find("VmFlags").map_or(rest.len(), |n| n + rest[n..].find('\n').unwrap())].to_owned()
}

pub fn kilobytes(smaps: &str, field: &str) -> usize {
    let line = smaps.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
