//! The driver on our own device: what is sent arrives, byte for byte, in every mode, and every page
//! is returned.

use std::sync::atomic::Ordering::Relaxed;

use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::driver::*;
use netmem_virtio::device::port::{Echo, Gen, Pcap, Play};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode, VirtioRx};

/// Receives until as many frames as there are in `want` have come, in order and as they were sent.
fn compare(rx: &mut VirtioRx, want: &[Vec<u8>]) {
    let (mut seen, mut digest, mut bytes) = (0, Digest::new(), vec![0; 1 << 17]);
    until(|| {
        receive(rx, &mut |p: Packet<PeerShared>| {
            let got = &mut bytes[..p.len()];
            p.copy_to(0, got).unwrap();
            assert!(got == want[seen], "frame {seen}: {} bytes are not the {} sent", p.len(), want[seen].len());
            digest.add(got);
            seen += 1;
        });
        seen == want.len()
    });
    assert_eq!(digest, Digest::of(want));
    assert_eq!(receive(rx, &mut DropAll::default()), 0);
    let stats = rx.stats();
    assert_eq!((stats.frames, stats.passed, stats.stopped), (seen as u64, seen as u64, None));
    assert_eq!(stats.bytes, want.iter().map(|f| f.len() as u64).sum::<u64>());
    assert_eq!(stats.errors().filter(|e| e.0 != "out_of_buffers").count(), 0, "{stats:?}");
}

/// The options of `mode`, for frames of up to `max` bytes.
fn options(mode: RxMode, max: usize) -> NetOptions {
    NetOptions::new(mode).max_frame(max)
}

const CASES: [(RxMode, usize, usize); 6] = [
    (RxMode::Small, 1518, 4000),
    (RxMode::Mergeable, 1518, 4000),
    (RxMode::Mergeable, 9014, 4000),
    (RxMode::Mergeable, 65549, 3000),
    (RxMode::Big, 65549, 3000),
    (RxMode::Big, 1518, 4000),
];

/// Proves NET-1: a capture of thousands of frames of mixed sizes arrives in every mode.
#[test]
fn a_capture_arrives_whole() {
    for (mode, max, n) in CASES {
        let want = frames(n, max);
        let mut device_thread = DeviceThread::one(pcap(&want, Play::Once));
        let accounting = Accounting::default();
        let (net, mut pairs) = device_thread.probe(accounting.count(options(mode, max)));
        let mut pair = pairs.remove(0);
        compare(&mut pair.rx, &want);
        assert_eq!(pair.rx.stats().multi_buffer > 0, max > 4096, "{mode}");
        close_clean(pair);
        accounting.assert_balanced();
        drop(net);
        assert!(device_thread.stop().ports()[0].is_done());
    }
}

/// Proves NET-2: the same by pointer, with a pool that maps nothing.
#[test]
fn a_capture_arrives_whole_without_a_domain() {
    for (mode, max, n) in CASES {
        let want = frames(n, max);
        let mut device_thread = DeviceThread::one(pcap(&want, Play::Once));
        let (_net, mut pairs) = device_thread.probe(options(mode, max).premapped(false));
        let mut pair = pairs.remove(0);
        compare(&mut pair.rx, &want);
        assert_eq!(pair.rx.pool_stats().mapped, 0);
        close_clean(pair);
    }
}

/// Proves POOL-6: without headroom, or by an option, two buffers share a page.
#[test]
fn split_pages() {
    let all = [
        options(RxMode::Small, 1518).headroom(0),
        options(RxMode::Small, 1518).buffers_per_page(2),
        options(RxMode::Small, 1518).headroom(0).buffers_per_page(1),
        options(RxMode::Small, 1518).headroom(0).premapped(false),
    ];
    for (i, options) in all.into_iter().enumerate() {
        let want = frames(3000, 1518);
        let mut device_thread = DeviceThread::one(pcap(&want, Play::Once));
        let (_net, mut pairs) = device_thread.probe(options);
        let mut pair = pairs.remove(0);
        assert_eq!(pair.rx.posted(), 256);
        let pages = pair.rx.pool_stats().allocated();
        assert_eq!(pages, if i == 2 { 256 } else { 128 });
        compare(&mut pair.rx, &want);
        close_clean(pair);
    }
}

/// Proves POOL-1: pages are mapped when they enter the pool, not again in circulation, and synced
/// as far as they are used.
#[test]
fn syncs_cover_the_bytes_in_use() {
    for (mode, max) in
        [(RxMode::Small, 1518), (RxMode::Mergeable, 1518), (RxMode::Mergeable, 9014), (RxMode::Big, 9014)]
    {
        let want = frames(2000, max);
        let sent: u64 = want.iter().map(|f| f.len() as u64 + 12).sum();
        let mut device_thread = DeviceThread::one(pcap(&want, Play::Once));
        let accounting = Accounting::default();
        let (_net, mut pairs) = device_thread.probe(accounting.count(options(mode, max)));
        let mut pair = pairs.remove(0);
        let maps = accounting.domain().maps();
        compare(&mut pair.rx, &want);
        if mode != RxMode::Big {
            // Packets were dropped as they came: what was mapped at the start was enough.
            assert_eq!(accounting.domain().maps(), maps);
        }
        assert_eq!(accounting.synced.cpu.load(Relaxed), sent, "{mode} {max}");
        // Posted: the ring at first, and then for every buffer that came back another.
        let buffers = want.len() as u64 * (max as u64 + 12).div_ceil(3904) + 256;
        let device = accounting.synced.device.load(Relaxed);
        assert!(device > 0 && device <= buffers * 4096, "{mode} {max}: {device} bytes");
        close_clean(pair);
        accounting.assert_balanced();
    }
}

/// Proves NET-5: a million packets through a ring of 256, dropped in the poll and outside of it, in
/// every mode.
#[test]
fn circulation() {
    let n = 1_000_000;
    let cases = [
        (RxMode::Small, 1518, 64, true),
        (RxMode::Mergeable, 1518, 64, true),
        (RxMode::Mergeable, 9014, 5000, true),
        (RxMode::Big, 65549, 64, true),
        (RxMode::Small, 1518, 64, false),
    ];
    for (mode, max, size, premapped) in cases {
        // Unoptimised code is slow with long frames.
        let n = if cfg!(debug_assertions) && size > 64 { n / 10 } else { n };
        let mut device_thread = DeviceThread::one(Gen::new(size, Some(n)).unwrap());
        let (_net, mut pairs) = device_thread.probe(options(mode, max).premapped(premapped));
        let mut pair = pairs.remove(0);
        let mut kept = Vec::new();
        let (mut seen, mut turn) = (0, 0u32);
        until(|| {
            turn += 1;
            seen += pair.rx.poll(|poll| {
                let seen = poll.receive(256, &mut |p: Packet<PeerShared>| kept.push(p));
                if turn.is_multiple_of(2) {
                    kept.clear();
                }
                seen as u64
            });
            kept.clear();
            seen == n
        });
        let (rx, pool) = (pair.rx.stats(), pair.rx.pool_stats());
        assert_eq!((rx.frames, rx.bytes, rx.stopped), (n, n * size as u64, None));
        if mode != RxMode::Big {
            assert!(pool.allocated() >= n && pool.mapped <= 256 + 1024, "{pool:?}");
        }
        close_clean(pair);
        // The device counts at the end of a pass, after the driver has the frames.
        until(|| device_thread.stats.rx_frames.load(Relaxed) == n);
    }
}

fn several(pairs: usize, serve_control: bool) -> DeviceThread<Gen> {
    let options = Options { max_pairs: pairs, serve_control, ..Options::default() };
    DeviceThread::new(NetDevice::new(options, |pair| Gen::new(100 + pair, None)).unwrap())
}

/// Proves NET-1: the number of queues in use changes under traffic, by the control queue or by
/// enabling rings; what was on its way is received, and nothing more comes to a queue that is out
/// of use.
#[test]
fn the_number_of_queues_changes_under_traffic() {
    for serve_control in [true, false] {
        let mut device_thread = several(3, serve_control);
        let accounting = Accounting::default();
        let (mut net, mut pairs) = device_thread.probe(accounting.count(NetOptions::new(RxMode::Mergeable).pairs(3)));
        assert_eq!((net.active_pairs(), pairs.len()), (3, 3));
        let mut rng = Rng(1);
        for round in 0..60 {
            let active = if round == 0 { 1 } else { 1 + rng.below(3) as u16 };
            net.set_active_pairs(active).unwrap();
            assert_eq!(net.active_pairs(), active);
            // What was on its way.
            for pair in &mut pairs[usize::from(active)..] {
                until(|| receive(&mut pair.rx, &mut DropAll::default()) == 0);
            }
            let before: Vec<u64> = pairs.iter().map(|p| p.rx.stats().frames).collect();
            until(|| {
                for (i, pair) in pairs.iter_mut().enumerate() {
                    receive(&mut pair.rx, &mut |p: Packet<PeerShared>| assert_eq!(p.len(), 100 + i));
                }
                (0..usize::from(active)).all(|i| pairs[i].rx.stats().frames > before[i] + 300)
            });
            for i in usize::from(active)..3 {
                assert_eq!(pairs[i].rx.stats().frames, before[i], "queue {i} is out of use");
            }
        }
        for asked in [0, 4, u16::MAX] {
            assert!(net.set_active_pairs(asked).is_err());
        }
        pairs.into_iter().for_each(close_clean);
        accounting.assert_balanced();
    }
}

/// Frames of each queue pair come back by the same pair, right after a probe: with a control queue
/// and without one.
#[test]
fn all_pairs_that_were_asked_for_are_in_use() {
    for serve_control in [true, false] {
        let options = Options { max_pairs: 3, serve_control, ..Options::default() };
        let mut device_thread = DeviceThread::new(NetDevice::new(options, |_| Ok(Echo::new())).unwrap());
        let (net, mut pairs) = device_thread.probe(NetOptions::new(RxMode::Small).pairs(3));
        assert_eq!(net.active_pairs(), 3);
        for (i, pair) in pairs.iter_mut().enumerate() {
            let mut bytes = frame(i as u64, 80);
            let mut page = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
            page.copy_from(64, &bytes).unwrap();
            pair.tx.send(Packet::new(page.freeze_range(64..64 + bytes.len()))).unwrap();
            pair.tx.flush();
            let mut got = Vec::new();
            until(|| {
                receive(&mut pair.rx, &mut |p: Packet<PeerShared>| got.push(p.to_vec()));
                !got.is_empty()
            });
            bytes[..12].rotate_left(6);
            assert_eq!(got, [bytes]);
        }
        pairs.into_iter().for_each(close_clean);
    }
}

/// Queues on threads of their own, each with its own frames.
#[test]
fn queues_on_threads() {
    let mut device_thread = several(4, true);
    let (_net, pairs) = device_thread.probe(NetOptions::new(RxMode::Small).pairs(4));
    std::thread::scope(|s| {
        for (i, mut pair) in pairs.into_iter().enumerate() {
            s.spawn(move || {
                let mut seen = 0;
                until(|| {
                    seen += receive(&mut pair.rx, &mut |p: Packet<PeerShared>| assert_eq!(p.len(), 100 + i));
                    seen >= 20_000
                });
                close_clean(pair);
            });
        }
    });
}

/// Proves NET-5 for the smallest rings and an odd budget.
#[test]
fn small_rings_and_budgets() {
    for (mode, ring) in [(RxMode::Small, 2), (RxMode::Small, 4), (RxMode::Mergeable, 32), (RxMode::Big, 32)] {
        for budget in [0, 1, 3, usize::MAX] {
            let max = if mode == RxMode::Small { 1518 } else { 65549 };
            let want = frames(300, max);
            let mut device_thread: DeviceThread<Pcap> = DeviceThread::one(pcap(&want, Play::Once));
            let (_net, mut pairs) = device_thread.probe(options(mode, max).ring_size(ring));
            let mut pair = pairs.remove(0);
            let mut seen = 0;
            until(|| {
                let n = pair.rx.poll(|poll| {
                    poll.receive(budget, &mut |p: Packet<PeerShared>| {
                        assert_eq!(p.to_vec(), want[seen]);
                        seen += 1;
                    })
                });
                assert!(n <= budget);
                budget == 0 || seen == want.len()
            });
            close_clean(pair);
        }
    }
}
