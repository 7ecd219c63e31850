//! The memory of sockets on a device of 80 GB. This test is alone in its program, so that no other test allocates at the same time.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Binding, binding, give, received};
use netmem_devmem::TokenTable;

/// Proves MEM-4 and MEM-6: 256 sockets take memory only for the pages that they receive, and returns of tokens that were never received
/// make no memory resident.
#[test]
fn large_devices_cost_what_is_touched() {
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap() * 4096
    };
    let binding = binding(20_000_000);
    let before = resident();
    let mut sockets: Vec<TokenTable<Binding>> = (0..256).map(|_| TokenTable::new()).collect();
    for (socket, index) in sockets.iter_mut().zip((0..).step_by(70_000)) {
        received(socket, &binding, index);
        assert_eq!(socket.stats().bytes, 4096);
    }
    let opened = resident();
    // Each socket has 4 KiB of counts, 2.5 KiB of summary, and a little more.
    assert!(opened - before < 256 * 16 * 1024, "{}", opened - before);
    for socket in &sockets {
        let freed: usize = (0..200).map(|n| give(&socket.returner(), 1 + n * 100_000, 1024)).sum();
        assert!(freed <= 1 && socket.stats().excess > 200_000);
    }
    assert!(resident().saturating_sub(opened) < 256 * 16 * 1024, "{}", resident() - opened);
}
