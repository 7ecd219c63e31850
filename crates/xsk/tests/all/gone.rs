//! Pages that the kernel had when the interface of their queue was deleted, or moved to another
//! network namespace. No socket is ever bound to that queue again, which returns them otherwise.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Packet, TxQueue};
use netmem_pool::{KernelShared, RegionProvider};
use netmem_testing::namespace::{in_namespace, in_peer_namespace, ip};
use netmem_testing::xsk::{Harness, frame, index, memory};
use netmem_xsk::{ClosedQueue, QueueOptions, UmemOptions, XskError, reclaim};
use std::sync::Arc;
use std::thread;

/// Pages of the region: enough for one queue, and not for two.
const PAGES: usize = 80;

fn queue() -> QueueOptions {
    QueueOptions::new().fill(64)
}

fn free(memory: &Arc<RegionProvider<KernelShared>>) -> usize {
    std::iter::from_fn(|| memory.page()).collect::<Vec<_>>().len()
}

/// Deletes an interface, or moves it to a namespace that then ends.
fn remove(interface: &str, moved: bool) {
    if moved {
        in_peer_namespace(interface, || ()).join().unwrap();
    } else {
        ip(&format!("link delete {interface}"));
    }
}

/// The interface goes first, and the queue ends then: its pages return at once, on a thread of any
/// namespace, while the transmit queue keeps the socket open.
#[test]
fn pages_return_when_the_queue_ends() {
    for moved in [false, true] {
        in_namespace(|| {
            let (memory, umem) = memory(PAGES, &UmemOptions::new());
            for _ in 0..3 {
                let harness = Harness::with(memory.clone(), umem.clone(), 1500, queue());
                let Harness { rx, tx, ours, .. } = harness;
                remove(&ours, moved);
                assert!(free(&memory) <= PAGES - rx.posted());
                let closed = thread::spawn(move || {
                    // SAFETY: this thread uses nothing of its old namespace but what it is passed.
                    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
                    rx.close().unwrap()
                });
                assert_eq!(closed.join().unwrap().stats.quarantined, 64);
                assert_eq!(free(&memory), PAGES);
                drop(tx);
            }
        });
    }
}

/// Pages that are being sent return, too, when the transmit queue ends: nothing is kept, for which
/// a thread would need the privilege to ask the kernel.
#[test]
fn sent_pages_return_when_the_queue_ends() {
    in_namespace(|| {
        let (memory, umem) = memory(PAGES, &UmemOptions::new());
        let harness = Harness::with(memory.clone(), umem.clone(), 1500, queue());
        let Harness { rx, mut tx, ours, .. } = harness;
        // Frames that the interface has not sent do not complete at its end.
        ip(&format!("link set {ours} down"));
        for i in 0..10 {
            let mut page = memory.page().unwrap();
            page.copy_from(0, &frame(60, i)).unwrap();
            tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
        }
        tx.flush();
        remove(&ours, false);
        tx.complete();
        assert_eq!(tx.outstanding(), 10);
        drop((tx, rx));
        assert_eq!((umem.held(), free(&memory)), (0, PAGES));
    });
}

/// A queue that is closed before its interface is deleted, and dropped then.
#[test]
fn a_closed_queue_returns_pages_when_it_is_dropped() {
    in_namespace(|| {
        let (memory, umem) = memory(PAGES, &UmemOptions::new());
        let Harness { rx, tx, ours, .. } = Harness::with(memory.clone(), umem, 1500, queue());
        let queue = ClosedQueue::new(rx, tx).unwrap();
        assert_eq!((queue.left(), free(&memory)), (64, PAGES - 64));
        remove(&ours, false);
        drop(queue);
        assert_eq!(free(&memory), PAGES);
    });
}

/// The queue ends first, and the interface goes then: its pages return when another queue is
/// opened, of whichever interface, or when they are reclaimed.
#[test]
fn pages_return_when_another_queue_is_opened() {
    for moved in [false, true] {
        in_namespace(|| {
            let (memory, umem) = memory(PAGES, &UmemOptions::new());
            for _ in 0..3 {
                let harness = Harness::with(memory.clone(), umem.clone(), 1500, queue());
                let Harness { rx, tx, ours, .. } = harness;
                drop((rx, tx));
                assert_eq!(free(&memory), PAGES - 64);
                // The interface may still write: its queue must be bound to return them.
                reclaim();
                assert_eq!(free(&memory), PAGES - 64);
                remove(&ours, moved);
            }
            assert_eq!(free(&memory), PAGES - 64);
            reclaim();
            assert_eq!(free(&memory), PAGES);
        });
    }
}

/// A queue that cannot be opened returns them, too.
#[test]
fn an_open_that_fails_returns_pages() {
    in_namespace(|| {
        let (memory, umem) = memory(PAGES, &UmemOptions::new());
        let Harness { rx, tx, ours, .. } = Harness::with(memory.clone(), umem.clone(), 1500, queue());
        let ifindex = index(&ours);
        drop((rx, tx));
        remove(&ours, false);
        let refused = umem.open(ifindex, 0, memory.clone(), queue()).unwrap_err();
        assert!(matches!(refused, XskError::NoInterface { .. }), "{refused}");
        assert_eq!(free(&memory), PAGES);
    });
}
