//! The resident memory of bindings and sockets on devices of 80 GB. These tests are alone in their
//! process, and run one after the other, because resident memory is measured for the process.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

#[path = "all/common.rs"]
mod common;
#[path = "all/memory_common.rs"]
mod memory_common;

use common::{Binding, binding, give, received};
use memory_common::{Memory, worker};
use netmem_devmem::TokenTable;
use netmem_testing::heap::Counting;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
static HEAP: Counting = Counting::new();

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap() * 4096
}

/// Proves MEM-4 and MEM-6: 256 sockets take memory only for the pages that they receive, and
/// returns of tokens that were never received make no memory resident.
#[test]
fn large_devices_cost_what_is_touched() {
    let _alone = alone();
    let binding = binding(20_000_000);
    let before = resident();
    let mut sockets: Vec<TokenTable<Binding>> = (0..256).map(|_| TokenTable::new()).collect();
    for (socket, index) in sockets.iter_mut().zip((0..).step_by(70_000)) {
        received(socket, &binding, index);
        assert_eq!(socket.stats().bytes, 128, "the numbers of 16 pages");
    }
    let opened = resident();
    // Each socket has 128 bytes of numbers, and less than 1 KiB in all.
    assert!(opened.saturating_sub(before) < 256 * 2 * 1024, "{}", opened - before);
    for socket in &sockets {
        let freed: usize = (0..200).map(|n| give(&socket.returner(), 1 + n * 100_000, 1024)).sum();
        assert!(freed <= 1 && socket.stats().excess > 200_000);
    }
    assert!(resident().saturating_sub(opened) < 256 * 16 * 1024, "{}", resident() - opened);
}

/// Proves MEM-4: a socket that received from a binding of 4,096 pages costs about 1 KiB of the heap,
/// and no mapping.
#[test]
fn many_sockets_are_small() {
    const SOCKETS: usize = 4096;
    let _alone = alone();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let (binding, before, mapped) = (binding(4096), HEAP.bytes(), mappings());
    let mut sockets: Vec<TokenTable<Binding>> = (0..SOCKETS).map(|_| TokenTable::new()).collect();
    for (socket, index) in sockets.iter_mut().zip((0..).map(|n| n * 7 % 4096)) {
        received(socket, &binding, index);
    }
    let each = (HEAP.bytes() - before) / SOCKETS;
    println!("{each} bytes for a socket, {} mappings more for all", mappings().saturating_sub(mapped));
    assert!(each <= 1100, "{each} bytes");
    assert!(mappings() < mapped + SOCKETS / 16);
}

/// Proves MEM-4: 80 GB in one binding and 256 queues with 64 pages each.
#[test]
fn eighty_gigabytes_and_256_queues() {
    let _alone = alone();
    let (worker, memory) = (worker(), Memory::bytes(80 << 30));
    let (before, begin) = (resident(), std::time::Instant::now());
    let binding = netmem_devmem::Binding::new(memory.fd(), 0, &worker).unwrap();
    let bound = begin.elapsed();
    let mut pools: Vec<_> = (0..256)
        .map(|q| {
            let pool = netmem_pool::PoolOptions::new(format!("rx{q}")).cache(64).prefill(64);
            pool.build(binding.provider(), None).unwrap()
        })
        .collect();
    let (all, after) = (begin.elapsed(), resident());
    println!(
        "80 GiB: bound in {bound:?}; 256 queues of 64 pages in {all:?}; {} KiB resident more",
        after.saturating_sub(before) >> 10
    );
    let stats = binding.stats();
    assert_eq!((stats.pages, stats.in_use), (80 << 18, 256 * 64));
    assert_eq!(memory.file.metadata().map(|m| std::os::unix::fs::MetadataExt::blocks(&m)).unwrap(), 0);
    // 64 bytes for each page in use are 1 MiB.
    assert!(after.saturating_sub(before) < 256 << 20, "{before} bytes, then {after}");
    let last = pools[255].alloc().unwrap();
    assert!(last.index() < 80 << 18);
    drop((last, pools, binding));
    memory.assert_gone();
}
