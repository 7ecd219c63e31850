//! A foreign back end, DPDK's vhost, is killed and started again under traffic, with the socket on
//! either side.
//!
//! Needs `dpdk-testpmd` and two CPUs, and is skipped, saying so, without. No huge pages and no
//! privileges.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::driver::testpmd::Testpmd;
use netmem_testing::driver::*;
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet};
use netmem_virtio::socket::Listener;

/// How often each is killed. DPDK starts in a second or two.
const RESTARTS: u64 = 2;

/// Proves NET-11 on a back end that is not ours.
#[test]
fn dpdk_is_killed_under_traffic() {
    let _alone = crate::alone();
    for client in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vhost.sock");
        let listener = client.then(|| Listener::bind(&socket).unwrap());
        // A listening testpmd has its socket before it forwards; what was killed leaves a socket
        // that is in the way.
        let start = || {
            if !client {
                let _ = std::fs::remove_file(&socket);
            }
            let testpmd = Testpmd::start(&socket, client)?;
            let backend = match &listener {
                Some(listener) => VhostUser::accept(listener, Duration::from_secs(60)),
                None => VhostUser::connect(&socket),
            };
            Some((testpmd, backend.unwrap()))
        };
        let Some((mut testpmd, backend)) = start() else { return };
        let accounting = Accounting::default();
        let (mut net, mut pairs) =
            VirtioNet::probe(backend, accounting.count(NetOptions::new(RxMode::Mergeable).pages(2048))).unwrap();
        let mut pair = pairs.remove(0);
        let (stop, came) = (AtomicBool::new(false), AtomicU64::new(0));
        let ((mut pair, sent), _testpmd) = std::thread::scope(|s| {
            let polls = s.spawn(|| {
                let mut sent = 0;
                while !stop.load(Relaxed) {
                    pair.tx.complete();
                    while pair.tx.posted() < 64 {
                        let page = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc()));
                        let Some(mut page) = page else { break };
                        page.copy_from(64, &frame(sent, 200)).unwrap();
                        pair.tx.send(Packet::new(page.freeze_range(64..264))).unwrap();
                        sent += 1;
                    }
                    pair.tx.flush();
                    receive(&mut pair.rx, &mut |p: Packet<PeerShared>| {
                        assert_eq!(p.len(), 200);
                        came.fetch_add(1, Relaxed);
                    });
                    std::thread::yield_now();
                }
                (pair, sent)
            });
            let flows = || {
                let before = came.load(Relaxed);
                until(|| came.load(Relaxed) > before + 2000);
            };
            for _ in 0..RESTARTS {
                flows();
                drop(testpmd);
                until(|| !net.is_connected());
                let (again, backend) = start().unwrap();
                testpmd = again;
                net.reconnect(backend).unwrap();
            }
            flows();
            stop.store(true, Relaxed);
            (polls.join().unwrap(), testpmd)
        });
        until(|| {
            receive(&mut pair.rx, &mut |_: Packet<PeerShared>| _ = came.fetch_add(1, Relaxed));
            pair.tx.complete();
            pair.tx.posted() == 0
        });
        let (rx, tx) = (pair.rx.stats(), pair.tx.stats());
        assert_eq!((rx.restarts, tx.restarts, rx.stopped, tx.stopped), (RESTARTS, RESTARTS, None, None));
        assert_eq!(tx.completed + tx.unconfirmed, sent, "{tx:?}");
        println!("{sent} frames, {} came back, {} unconfirmed in {RESTARTS} kills", came.load(Relaxed), tx.unconfirmed);
        assert!(tx.unconfirmed <= RESTARTS * 64);
        close_clean(pair);
        drop(net);
        accounting.assert_balanced();
    }
}
