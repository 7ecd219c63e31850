//! Pools to send from: their pages are in the device's memory table and domain, and apart from
//! those that are received into.

use netmem_packet::{Packet, TxBulk};
use netmem_pool::{PeerShared, PoolOptions, RegionOptions, RegionProvider};
use netmem_testing::driver::*;
use netmem_virtio::device::port::Gen;
use netmem_virtio::driver::{NetError, NetOptions, QueuePair, RxMode};
use std::sync::mpsc;

/// In every mode, with a domain and without: packets of a transmit pool are sent without being
/// mapped one by one, and all pages are returned.
#[test]
fn sent_without_being_mapped() {
    for mode in MODES {
        for premapped in [true, false] {
            let (came, arrived) = mpsc::channel();
            let mut device_thread = DeviceThread::one(Slow(came));
            let accounting = Accounting::default();
            let options = NetOptions::new(mode).premapped(premapped).tx_pages(100);
            let (net, mut pairs) = device_thread.probe(if premapped { accounting.count(options) } else { options });
            let QueuePair { rx, tx } = pairs.remove(0);
            let pool = net.tx_pool(PoolOptions::new("tx")).unwrap();
            assert_eq!(net.domain().is_some(), premapped);
            let want = frames(1000, 1518);
            let mut bulk = TxBulk::holding(tx, 64);
            let mut made = want.iter();
            until(|| {
                while bulk.room() > 0
                    && let Some(mut page) = pool.alloc()
                    && let Some(bytes) = made.next()
                {
                    page.copy_from(64, bytes).unwrap();
                    bulk.push(Packet::new(page.freeze_range(64..64 + bytes.len())));
                }
                bulk.flush();
                bulk.stats().sent == 1000 && bulk.target().posted() == 0
            });
            want.iter().for_each(|want| assert!(arrived.recv().unwrap() == *want));
            let s = bulk.into_target().stats();
            assert_eq!((s.frames, s.mapped, s.wrong_domain), (1000, 0, 0), "{mode}, premapped: {premapped}");
            assert_closed(&pool.close(), 0);
            assert_closed(&rx.close().unwrap(), 0);
            drop(net);
            if premapped {
                accounting.assert_balanced();
            }
        }
    }
}

/// Neither side uses the pages of the other: the transmit pools have as many as were set aside,
/// together, also while the queue has no page left to receive into; and the queue receives while
/// they have none left.
#[test]
fn each_side_has_its_pages() {
    for mode in MODES {
        let mut device_thread = DeviceThread::one(Gen::new(100, None).unwrap());
        let (net, mut pairs) = device_thread.probe(NetOptions::new(mode).ring_size(64).pages(1024).tx_pages(100));
        let mut pair = pairs.remove(0);
        let pools = [(); 2].map(|()| net.tx_pool(PoolOptions::new("tx")).unwrap());
        // All that can be received is kept.
        let mut kept = Vec::new();
        until(|| {
            let before = pair.rx.stats().out_of_buffers;
            receive(&mut pair.rx, &mut |p: Packet<PeerShared>| kept.push(p));
            pair.rx.stats().out_of_buffers > before && pair.rx.posted() == 0
        });
        let sent_from: Vec<_> =
            (0..).map_while(|n: usize| pools[n % 2].alloc().or_else(|| pools[(n + 1) % 2].alloc())).collect();
        assert_eq!(sent_from.len(), 100, "{mode}");
        // And the other way round.
        drop(kept);
        let mut frames = 0;
        until(|| {
            receive(&mut pair.rx, &mut |_: Packet<PeerShared>| frames += 1);
            frames > 5000
        });
        assert!(pools.iter().all(|pool| pool.alloc().is_none()));
        drop(sent_from);
        pools.into_iter().for_each(|pool| assert_closed(&pool.close(), 0));
        close_clean(pair);
        drop(net);
    }
}

/// A pool without pages is an error, and so are more pages than there are.
#[test]
fn pages_that_are_not_there() {
    let mut device_thread = DeviceThread::one(Gen::new(100, Some(1)).unwrap());
    let (net, pairs) = device_thread.probe(NetOptions::new(RxMode::Small));
    let error = net.tx_pool(PoolOptions::new("tx")).unwrap_err();
    assert!(matches!(error, NetError::NoTxPages), "{error:?}");
    assert!(error.to_string().contains("tx_pages"), "{error}");
    pairs.into_iter().for_each(close_clean);
    drop(net);

    let supply = RegionProvider::new(RegionOptions::new(600).build::<PeerShared>().unwrap());
    let options = || NetOptions::new(RxMode::Small).memory(supply.region().clone(), supply.clone());
    let free_pages = || std::iter::from_fn(|| supply.page()).collect::<Vec<_>>().len();
    device_thread.connection = None;
    let backend = device_thread.connect();
    let error = netmem_virtio::driver::VirtioNet::probe(backend, options().tx_pages(601)).unwrap_err();
    assert!(matches!(error, NetError::TxPages { asked: 601, had: 600 }), "{error:?}");
    assert_eq!(free_pages(), 600);
    // Reserved in memory of the user, and returned to it in the end.
    device_thread.connection = None;
    let backend = device_thread.connect();
    let (net, pairs) = netmem_virtio::driver::VirtioNet::probe(backend, options().tx_pages(300)).unwrap();
    let pool = net.tx_pool(PoolOptions::new("tx")).unwrap();
    let pages: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
    assert_eq!((pages.len(), free_pages()), (300, 600 - 300 - 256));
    pairs.into_iter().for_each(close_clean);
    drop((pages, pool, net));
    assert_eq!(free_pages(), 600);
}

/// Packets that begin with the worker's number and their own.
fn numbered(page: netmem_pool::Page<PeerShared>, worker: u64, number: u64) -> Packet<PeerShared> {
    let mut page = page;
    page.copy_from(64, &frame(worker << 32 | number, 300)).unwrap();
    page.copy_from(64, &worker.to_le_bytes()).unwrap();
    page.copy_from(72, &number.to_le_bytes()).unwrap();
    Packet::new(page.freeze_range(64..364))
}

/// Two worker threads allocate from one pool, fill, and hand packets to the transmit thread, which
/// sends them and drops them when the device is done. Pages are fewer than packets, so a worker
/// waits until some are back. Each worker's packets leave in order, whole, and every page is
/// returned.
#[test]
fn workers_fill_and_another_thread_sends() {
    const PACKETS: u64 = 3000;
    let (came, arrived) = mpsc::channel();
    let mut device_thread = DeviceThread::one(Slow(came));
    let accounting = Accounting::default();
    let (net, mut pairs) = device_thread.probe(accounting.count(NetOptions::new(RxMode::Small).tx_pages(400)));
    let QueuePair { rx, tx } = pairs.remove(0);
    let (hand, packets) = mpsc::sync_channel(32);
    let pool = net.tx_pool(PoolOptions::new("tx")).unwrap();
    let tx = std::thread::scope(|s| {
        for worker in 0..2 {
            let (hand, pool) = (hand.clone(), &pool);
            s.spawn(move || {
                for number in 0..PACKETS {
                    let mut page = None;
                    until(|| {
                        page = pool.alloc();
                        page.is_some()
                    });
                    hand.send(numbered(page.unwrap(), worker, number)).unwrap();
                }
            });
        }
        drop(hand);
        let mut bulk = TxBulk::holding(tx, 64);
        until(|| {
            while bulk.room() > 0
                && let Ok(packet) = packets.try_recv()
            {
                bulk.push(packet);
            }
            bulk.flush();
            bulk.stats() == bulk_stats(2 * PACKETS, 0) && bulk.target().posted() == 0
        });
        bulk.into_target()
    });
    let mut next = [0; 2];
    for _ in 0..2 * PACKETS {
        let bytes = arrived.recv().unwrap();
        let [worker, number] = [0, 8].map(|at| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap()));
        assert_eq!(number, next[worker as usize], "worker {worker}");
        assert!(bytes[16..] == frame(worker << 32 | number, 300)[16..], "packet {number} of worker {worker}");
        next[worker as usize] += 1;
    }
    assert_eq!((next, tx.stats().mapped, tx.stats().wrong_domain), ([PACKETS; 2], 0, 0));
    drop(tx);
    assert_closed(&pool.close(), 0);
    assert_closed(&rx.close().unwrap(), 0);
    drop(net);
    accounting.assert_balanced();
}

/// Moves the calling thread to one of the CPUs that the process may use.
fn move_to(n: usize) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).unwrap();
    let cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    let mut one = CpuSet::new();
    one.set(cpus[n % cpus.len()]);
    sched_setaffinity(None, &one).unwrap();
}

/// A transmit pool sizes its magazines by the pages that were set aside, and not by all of the
/// device's. So few pages have no magazines: none is held by another CPU, which this pool does not
/// ask. (With one CPU, the test cannot fail.)
#[test]
fn a_small_pool_strands_no_page() {
    let mut device_thread = DeviceThread::one(Gen::new(100, Some(0)).unwrap());
    let (net, pairs) = device_thread.probe(NetOptions::new(RxMode::Small).tx_pages(7));
    let pool = net.tx_pool(PoolOptions::new("tx").interrupt_cpus(false)).unwrap();
    for round in 0..10 {
        std::thread::scope(|s| {
            let allocated = s.spawn(|| {
                move_to(round);
                std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>()
            });
            let pages = allocated.join().unwrap();
            assert_eq!(pages.len(), 7, "round {round}");
            s.spawn(move || {
                move_to(round);
                drop(pages);
            });
        });
    }
    assert_closed(&pool.close(), 0);
    pairs.into_iter().for_each(close_clean);
}
