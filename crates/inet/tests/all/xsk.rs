//! A stack over queues of AF_XDP, with the kernel's stack as peer behind a veth pair: the same
//! exchanges as over a tap.
//!
//! ```text
//!   sockets of std (threads) ── kernel ── veth ── veth ── XskRx, XskTx ── Stack (this thread)
//! ```

use crate::kernel_peer::{Peer, Serve, address, connect, drive, echo, host};
use netmem_inet::{Stack, StackOptions, Time};
use netmem_packet::TxQueue;
use netmem_pool::{PeerShared, PoolOptions};
use netmem_testing::namespace::{command, in_namespace, ip};
use netmem_xsk::{QueueOptions, Xsk, XskOptions};
use std::sync::Arc;
use std::time::Instant;

/// Runs the peer on the kernel's end of the pair, and the stack on the other end, which has no
/// address in the kernel.
fn beside_the_kernel(net: u8, peer: Peer, serve: Serve) {
    ip("link add v0 type veth peer name v1");
    for end in ["v0", "v1"] {
        // AF_XDP does not mark frames whose checksum or segmentation the kernel leaves to the
        // device.
        command(&format!("ethtool -K {end} tx off rx off gso off tso off gro off txvlan off rxvlan off"));
        ip(&format!("link set {end} up"));
    }
    for v6 in [false, true] {
        let nodad = if v6 { "nodad" } else { "" };
        ip(&format!("addr add {}/{} dev v1 {nodad}", address(net, v6, false), if v6 { 64 } else { 24 }));
    }
    let mut xsk = Xsk::<PeerShared>::open(XskOptions::new("v0"), |_| QueueOptions::new()).unwrap();
    let (rx, tx) = xsk.pairs.pop().unwrap();
    let pool = Arc::new(xsk.pool(PoolOptions::new("tx").limit(1024)).unwrap());
    let beginning = Instant::now();
    let now = || Time::ZERO + beginning.elapsed();
    let mut stack = Stack::new(&host(net), rx, tx, pool.clone(), StackOptions::default(), now()).unwrap();
    drive(&mut stack, now, peer, serve);
    let (rx, mut tx) = stack.into_queues();
    // The kernel may still have the last frames that were sent. Their pages would stay with the
    // UMEM.
    while tx.outstanding() > 0 {
        tx.complete();
        std::thread::yield_now();
    }
    // A frame that arrived after the last poll is not quarantined: closing returns its page.
    let posted = rx.posted();
    drop(tx);
    let closed = rx.close().unwrap();
    let s = &closed.stats;
    assert_eq!(closed.outstanding, 0, "received pages are home");
    assert_eq!(s.allocated(), s.returned() + s.quarantined, "{s:?}");
    assert!(s.quarantined <= posted as u64, "{posted} were posted: {s:?}");
    assert_eq!(Arc::into_inner(pool).unwrap().close().outstanding, 0, "sent pages are home");
}

#[test]
fn the_kernel_connects() {
    in_namespace(|| echo(1, |peer, serve| beside_the_kernel(1, peer, serve)));
}

#[test]
fn the_stack_connects_to_the_kernel() {
    in_namespace(|| connect(2, |peer, serve| beside_the_kernel(2, peer, serve)));
}
