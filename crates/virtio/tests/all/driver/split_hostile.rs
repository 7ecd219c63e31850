//! A device that reports false values about chains of host and device memory, or ends while it has
//! them. Each case ends in a named error and a stopped queue, or in a counted frame. No page of
//! either kind is lost.

use netmem_testing::driver;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use netmem_packet::{Checksum, DeviceFrag, Packet, Queues, SplitFrame, SplitTxQueue, TxQueue};
use netmem_testing::driver::hostile::{Behaviour, DeviceRing, Hostile, OnStop, WITHOUT_CONTROL};
use netmem_testing::driver::split::{DeviceMemory, assert_split_closed, bind, take};
use netmem_testing::driver::*;
use netmem_virtio::driver::{
    DeviceFault, EitherRx, NetError, NetOptions, QueuesError, RestartError, RxClosed, SplitOptions, VirtioNet,
    VirtioRx, VirtioRxQueues, VirtioSplitRx, VirtioTx,
};
use netmem_virtio::net::VnetHdr;
use netmem_virtio::virtqueue::{DESC_NEXT, DESC_WRITE, Desc};

/// A bound queue, and the test in the place of its device.
struct Harness {
    device: Hostile,
    ring: DeviceRing,
    rx: VirtioSplitRx,
    tx: VirtioTx,
    net: VirtioNet,
    accounting: Accounting,
    memory: DeviceMemory,
}

fn probe(memory: &DeviceMemory, options: NetOptions) -> (Hostile, VirtioNet, VirtioRx, VirtioTx, Accounting) {
    let ((device, backend), accounting) = (Hostile::new(Behaviour::default()), Accounting::default());
    let (net, mut pairs) = VirtioNet::probe(backend, accounting.count(memory.add(options))).unwrap();
    let pair = pairs.remove(0);
    (device, net, pair.rx, pair.tx, accounting)
}

impl Harness {
    fn new() -> Self {
        Self::with(NetOptions::new(netmem_virtio::driver::RxMode::Small), 300)
    }

    fn with(options: NetOptions, pages: usize) -> Self {
        let memory = DeviceMemory::new(pages);
        let (device, net, rx, tx, accounting) = probe(&memory, options);
        let rx = bind(rx, &memory.split());
        Self { ring: device.ring(0), device, rx, tx, net, accounting, memory }
    }

    fn deliver(&mut self, frame: &[u8]) {
        self.device.deliver(&mut self.ring, frame);
    }

    fn poll(&mut self) -> usize {
        take(&mut self.rx).len()
    }

    #[track_caller]
    fn close(self) {
        assert_split_closed(&self.rx.close().unwrap(), 0);
        drop((self.tx, self.net));
        self.accounting.assert_balanced();
    }

    #[track_caller]
    fn assert_stopped(mut self, error: DeviceFault) {
        let before = self.rx.stats();
        assert_eq!(before.stopped, Some(error));
        for idx in [0, self.ring.used.wrapping_add(1), u16::MAX] {
            self.ring.split().set_used_idx(idx);
            assert_eq!(self.poll(), 0);
        }
        assert_eq!(self.rx.stats(), before);
        self.close();
    }
}

/// Invalid values first, and after good frames.
fn each(lie: impl Fn(&mut Harness) -> DeviceFault) {
    for good in [0, 3] {
        let mut harness = Harness::new();
        for i in 0..good {
            harness.deliver(&frame(i, 300));
        }
        let error = lie(&mut harness);
        assert_eq!(harness.poll() as u64, good);
        harness.assert_stopped(error);
    }
}

/// Proves NET-6 and MEM-11, as do all tests here: chains are what an honest device expects.
#[test]
fn chains_have_two_parts() {
    let mut harness = Harness::new();
    assert_eq!(harness.ring.available(), 128);
    for i in 0..128 {
        let head = harness.ring.take().unwrap();
        let chain = harness.ring.chain(head);
        assert_eq!(chain.iter().map(|d| d.len).collect::<Vec<_>>(), [54, 4096]);
        assert_eq!([chain[0].flags, chain[1].flags], [DESC_WRITE | DESC_NEXT, DESC_WRITE]);
        assert_eq!(head, 2 * i);
    }
    harness.ring.seen = 0;
    for (i, n) in [42, 43, 14, 60, 42 + 4096, 1518].into_iter().enumerate() {
        harness.deliver(&frame(i as u64, n));
        let got = take(&mut harness.rx);
        assert_eq!(harness.memory.bytes(&got[0]), frame(i as u64, n));
        assert_eq!(got[0].payload().len(), n.saturating_sub(42));
    }
    harness.close();
}

#[test]
fn ids_out_of_range() {
    for id in [1, 255, 256, 257, 511, 65535, 65536, u32::MAX] {
        each(|b| {
            b.ring.add_used(id, 100);
            DeviceFault::BadId { id }
        });
    }
}

#[test]
fn a_chain_used_twice() {
    let mut harness = Harness::new();
    let head = harness.ring.split().avail_entry(0);
    harness.deliver(&frame(1, 88));
    harness.ring.add_used(u32::from(head), 100);
    assert_eq!(harness.poll(), 1);
    harness.assert_stopped(DeviceFault::NotPosted { id: head });
}

#[test]
fn a_chain_that_was_never_posted() {
    let mut harness =
        Harness::with(NetOptions::new(netmem_virtio::driver::RxMode::Small).ring_size(16).pages(64).cache(8), 8);
    harness.deliver(&frame(1, 100));
    let held = take(&mut harness.rx);
    assert_eq!(harness.rx.posted(), 7, "no page of device memory is left");
    harness.ring.add_used(0, 100);
    assert_eq!(harness.poll(), 0);
    assert_eq!(harness.rx.stats().stopped, Some(DeviceFault::NotPosted { id: 0 }));
    drop(held);
    harness.assert_stopped(DeviceFault::NotPosted { id: 0 });
}

#[test]
fn lengths_beyond_the_chain() {
    let have = 54 + 4096;
    for len in [have + 1, have + 100, 1 << 20, 1 << 31, u32::MAX] {
        each(|b| {
            let head = b.ring.take().unwrap();
            b.ring.add_used(u32::from(head), len);
            DeviceFault::BadLength { len, have }
        });
    }
}

#[test]
fn the_used_index_jumps() {
    for by in [129, 0x8000, u16::MAX] {
        let mut harness = Harness::new();
        harness.ring.split().set_used_idx(by);
        assert_eq!(harness.poll(), 0);
        harness.assert_stopped(DeviceFault::IndexJump { by, posted: 128 });
    }
}

/// Too short for a header, or a header that cannot be true, or of segments that were not
/// negotiated: the frame is counted, and what it was in is posted again.
#[test]
fn frames_that_are_none() {
    let mut harness = Harness::new();
    let before = (harness.rx.pool_stats().0.allocated(), harness.rx.pool_stats().1.allocated());
    for len in [0, 1, 11, 12, 13, 25] {
        let head = harness.ring.take().unwrap();
        harness.ring.add_used(u32::from(head), len);
    }
    let plain = VnetHdr::PLAIN;
    let nonsense = [
        VnetHdr { gso_type: 9, gso_size: 100, ..plain },
        VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 1448, hdr_len: 54, ..plain },
        VnetHdr { gso_type: VnetHdr::GSO_UDP_L4, gso_size: 1000, hdr_len: 42, ..plain },
        VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 999, csum_offset: 0, ..plain },
        VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: u16::MAX, csum_offset: u16::MAX, ..plain },
    ];
    for header in nonsense {
        harness.device.deliver_with(&mut harness.ring, header, &frame(1, 1000));
    }
    assert_eq!(harness.poll(), 0);
    let s = harness.rx.stats();
    assert_eq!((s.short, s.bad_header, s.not_negotiated, s.frames, s.stopped), (6, 3, 2, 0, None));
    assert_eq!((harness.rx.posted(), harness.rx.pool_stats().0.allocated()), (128, before.0));
    assert_eq!(harness.rx.pool_stats().1.allocated(), before.1);
    // What can be true is passed on in words of our own.
    for (header, checksum) in [
        (plain, Checksum::Unknown),
        (VnetHdr { flags: VnetHdr::DATA_VALID, ..plain }, Checksum::Verified),
        (
            VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..plain },
            Checksum::Partial { start: 34, offset: 6 },
        ),
    ] {
        harness.device.deliver_with(&mut harness.ring, header, &frame(1, 1000));
        let got = take(&mut harness.rx);
        assert_eq!((got[0].meta.checksum, got[0].meta.gso), (checksum, None));
    }
    harness.close();
}

/// The device overwrites what is the driver's: the driver reads neither descriptors nor the
/// available ring.
#[test]
fn the_drivers_part_of_the_ring_is_overwritten() {
    let mut harness = Harness::new();
    let heads: Vec<u16> = std::iter::from_fn(|| harness.ring.take()).collect();
    let chains: Vec<_> = heads.iter().map(|&h| harness.ring.chain(h)).collect();
    for i in 0..256 {
        harness.ring.split().set_desc(i, Desc { addr: u64::MAX, len: u32::MAX, flags: 0xffff, next: 0xffff });
        harness.ring.split().set_avail_entry(i, 0x7fff);
    }
    for (i, (&head, chain)) in heads.iter().zip(&chains).enumerate() {
        let wire = [&VnetHdr::PLAIN.to_bytes()[..], &frame(i as u64, 200)].concat();
        harness.device.write(chain[0].addr, &wire[..54]);
        harness.device.write(chain[1].addr, &wire[54..]);
        harness.ring.add_used(u32::from(head), wire.len() as u32);
    }
    let mut seen = 0;
    while seen < heads.len() {
        for f in take(&mut harness.rx) {
            assert_eq!(harness.memory.bytes(&f), frame(seen as u64, 200));
            seen += 1;
        }
    }
    harness.close();
}

/// Headers, used entries and index change all the time while the driver polls. In each case,
/// delivered frames lie within the buffers, and no page is lost.
#[test]
fn everything_changes_between_two_reads() {
    for seed in 0..12 {
        let mut harness = Harness::new();
        let stop = AtomicBool::new(false);
        let heads: Vec<u16> = (0..128).map(|i| harness.ring.split().avail_entry(i)).collect();
        let buffers: Vec<u64> = heads.iter().map(|&h| harness.ring.split().desc(h).addr).collect();
        let (device, ring, rx) = (&harness.device, harness.device.ring(0), &mut harness.rx);
        let mut frames = 0;
        std::thread::scope(|s| {
            let stop = &stop;
            s.spawn(move || {
                let (mut rng, mut used) = (Rng(seed), 0_u16);
                while !stop.load(Relaxed) {
                    let at = rng.below(128) as usize;
                    device.write(buffers[at] + rng.below(12), &rng.next().to_le_bytes()[..1]);
                    let id = heads[usize::from(used) % heads.len()];
                    let most = if rng.below(500) == 0 { 9000 } else { 4096 + 28 };
                    ring.set_used_entry_of(used, id, 26 + rng.below(most));
                    if ring.lag(used) > 1 {
                        used = used.wrapping_add(1);
                        ring.split().set_used_idx(used);
                    }
                }
            });
            for _ in 0..3000 {
                rx.poll(|poll| {
                    poll.receive(64, &mut |f: SplitFrame| {
                        assert!(f.head().len() <= 42 && f.payload().len() <= 4096);
                        assert!(f.len() >= 14 && f.meta.gso.is_none());
                        frames += 1;
                    })
                });
            }
            stop.store(true, Relaxed);
        });
        assert_eq!(harness.rx.stats().frames, frames);
        harness.close();
    }
}

/// A device that completes a buffer which it does not have: the queue stops, and the held payload
/// is released with it.
#[test]
fn lies_about_what_was_sent() {
    for id in [0_u32, 1, 999] {
        let mut harness = Harness::new();
        let mut tx = harness.tx.into_split::<std::sync::Arc<()>>();
        let binding = std::sync::Arc::new(());
        let (page, base) = harness.rx.poll(|poll| {
            poll.with_napi(|host, device| {
                let page = device.alloc().unwrap();
                (host.alloc().unwrap(), page.dma_addr() - page.file_offset())
            })
        });
        let mut payload = vec![DeviceFrag { dma: base, len: 100, holder: binding.clone() }];
        tx.send_split(Packet::new(page.freeze_range(64..106)), &mut payload).unwrap();
        tx.flush();
        let mut ring = harness.device.ring(1);
        let head = u32::from(ring.take().unwrap());
        // The payload's descriptor is in the chain and not its head.
        ring.add_used(if id == 0 { u32::from(ring.chain(head as u16)[0].next) } else { head + id }, 0);
        assert_eq!(tx.complete(), 0);
        assert!(tx.stats().stopped.is_some());
        assert_eq!(std::sync::Arc::strong_count(&binding), 2);
        drop(tx);
        assert_eq!(std::sync::Arc::strong_count(&binding), 1);
        assert_split_closed(&harness.rx.close().unwrap(), 0);
        drop(harness.net);
        harness.accounting.assert_balanced();
    }
}

/// Proves NET-6 for device memory: a backend that dies keeps what it has, of both kinds, and it is
/// not used again; what users hold is theirs.
#[test]
fn a_backend_that_dies() {
    let mut harness = Harness::new();
    for i in 0..10 {
        harness.deliver(&frame(i, 200));
    }
    let mut held = take(&mut harness.rx);
    held.truncate(5);
    for i in 0..5 {
        harness.deliver(&frame(100 + i, 200));
    }
    harness.device.kill();
    assert_eq!(harness.poll(), 5);
    let closed = harness.rx.close().unwrap();
    assert_eq!((closed.device.stats.quarantined, closed.device.outstanding), (128, 5));
    assert!(closed.host.stats.quarantined > 0);
    harness.accounting.assert_balanced();
    for (i, f) in held.iter().enumerate() {
        assert_eq!(harness.memory.bytes(f), frame(i as u64, 200));
    }
    drop((harness.tx, harness.net));
    std::thread::spawn(move || drop(held)).join().unwrap();
    // 128 pages are lost until the region goes, and no more.
    assert_eq!(harness.memory.free_pages(), 300 - 128);
}

/// Proves MEM-1: a bind that fails before anything was stopped leaves the queue as it was, with
/// every page it had.
#[test]
fn a_bind_that_cannot_be() {
    let memory = DeviceMemory::new(300);
    let (device, net, mut rx, tx, accounting) = probe(&memory, NetOptions::new(netmem_virtio::driver::RxMode::Small));
    let (small, stranger) = (DeviceMemory::new(127), DeviceMemory::new(300));
    let mut ring = device.ring(0);
    for (i, options) in
        [memory.split().header_bytes(13), memory.split().header_bytes(1013), small.split(), stranger.split()]
            .iter()
            .enumerate()
    {
        let before = rx.pool_stats();
        let Err(RestartError::Unchanged { queue, source }) = rx.restart_split(options) else { panic!("{i}") };
        match i {
            0 | 1 => assert!(matches!(source, NetError::HeaderBytes { min: 14, max: 1012, .. })),
            _ => assert!(matches!(source, NetError::Pool(_)), "{source}"),
        }
        rx = *queue;
        assert_eq!(rx.pool_stats(), before);
        device.deliver(&mut ring, &frame(i as u64, 500));
        assert_eq!(driver::take(&mut rx)[0].to_vec(), frame(i as u64, 500));
    }
    assert_eq!(device.stops(), [] as [u32; 0]);
    drop(tx);
    assert_closed(&rx.close().unwrap(), 0);
    drop(net);
    accounting.assert_balanced();
    // This device has none.
    let mut harness = driver::hostile::Harness::new(NetOptions::new(netmem_virtio::driver::RxMode::Small));
    let error = harness.pair.rx.restart_split(&SplitOptions::new(memory.provider.clone())).unwrap_err();
    let RestartError::Unchanged { queue, source: NetError::NoDeviceMemory } = error else { panic!("{error:?}") };
    harness.pair.rx = *queue;
    harness.close();
    // Big mode, whose pages are from no pool, restarts with the host's memory, too.
    let mut harness = driver::hostile::Harness::new(NetOptions::new(netmem_virtio::driver::RxMode::Big));
    harness.pair.rx = harness.pair.rx.restart(None).unwrap().queue;
    harness.close();
}

/// Proves MEM-1: a restart at which the device is dead, or does not report where it stopped,
/// quarantines what it had; the queue is no more, and nothing of the new pools is lost.
#[test]
fn a_restart_without_a_device() {
    for dead in [false, true] {
        let memory = DeviceMemory::new(300);
        let (mut device, net, rx, tx, accounting) =
            probe(&memory, NetOptions::new(netmem_virtio::driver::RxMode::Small));
        device.behave(|b| b.on_stop = OnStop::Refuse);
        if dead {
            device.kill();
        }
        let error = rx.restart_split(&memory.split()).unwrap_err();
        assert!(error.to_string().contains("stopped"), "{error}");
        let RestartError::Stopped { closed, source } = error else { panic!("{error:?}") };
        assert!(matches!(source, NetError::Backend(_)), "{source}");
        assert_closed(&closed, 256);
        drop((tx, net));
        accounting.assert_balanced();
        assert_eq!(memory.free_pages(), 300, "device memory was never lent");
    }
    // The other way round: it is the device's memory that is lost.
    let harness = Harness::new();
    harness.device.behave(|b| b.on_stop = OnStop::Refuse);
    let RestartError::Stopped { closed, .. } = harness.rx.restart(None).unwrap_err() else { panic!() };
    assert_split_closed(&closed, 128);
    drop((harness.tx, harness.net));
    harness.accounting.assert_balanced();
}

/// Proves MEM-1: a device that stops a ring and does not start it again. Pages that were posted for
/// it are returned if it confirms once more that it has stopped. All pages from before have been
/// returned already.
#[test]
fn a_restart_that_fails_at_the_end() {
    for message in ["SET_VRING_NUM", "SET_VRING_ADDR", "SET_VRING_KICK", "SET_VRING_ENABLE"] {
        let memory = DeviceMemory::new(300);
        let (device, net, rx, tx, accounting) = probe(&memory, NetOptions::new(netmem_virtio::driver::RxMode::Small));
        device.behave(|b| b.fail_at = Some(message));
        let RestartError::Stopped { closed, .. } = rx.restart_split(&memory.split()).unwrap_err() else { panic!() };
        assert_closed(&closed, 0);
        drop((tx, net));
        accounting.assert_balanced();
        let home = memory.free_pages();
        let answered = device.stops().iter().filter(|&&ring| ring == 0).count() == 2;
        assert_eq!(home, if answered { 300 } else { 300 - 128 }, "{message}");
    }
}

/// Proves MEM-1: the queues of a device as one value, each restarted in place: to device memory, to
/// other device memory, back, and not at all where there is nothing to do. A queue whose device
/// refuses has stopped, and reports it from then on.
#[test]
fn queues_restarted_in_place() {
    let (memory, other) = (DeviceMemory::new(300), DeviceMemory::new(300));
    let accounting = Accounting::default();
    let (device, backend) = Hostile::new(Behaviour { pairs: 2, features: WITHOUT_CONTROL, ..Behaviour::default() });
    let options = NetOptions::new(netmem_virtio::driver::RxMode::Small).pairs(2);
    let (net, pairs) = VirtioNet::probe(backend, accounting.count(other.add(memory.add(options)))).unwrap();
    let (rx, tx): (Vec<_>, Vec<_>) = pairs.into_iter().map(|pair| (pair.rx, pair.tx)).unzip();
    let mut queues = VirtioRxQueues::new(rx).header_bytes(100).cache(16);
    let polling = queues.clone();
    assert!(queues.queues() == 2 && polling.get(2).is_none());
    let error = queues.attach(2, memory.provider.clone()).unwrap_err();
    assert!(matches!(error, QueuesError::NoSuchQueue { queue: 2, queues: 2 }), "{error:?}");

    // One frame each time, which is polled; and one which is not.
    let expect = |queue: usize, seed: u64, memory: Option<&DeviceMemory>| {
        let mut ring = device.ring(2 * queue);
        device.deliver(&mut ring, &frame(seed, 500));
        let mut rx = polling.get(queue).unwrap();
        match (&mut *rx, memory) {
            (EitherRx::Host(rx), None) => assert_eq!(driver::take(rx)[0].to_vec(), frame(seed, 500)),
            (EitherRx::Split(rx), Some(memory)) => {
                assert_eq!(rx.header_bytes(), 100);
                assert_eq!(memory.bytes(&take(rx)[0]), frame(seed, 500));
            }
            (rx, memory) => panic!("{rx:?}, and device memory: {}", memory.is_some()),
        }
        drop(rx);
        device.deliver(&mut ring, &frame(seed, 500));
    };
    expect(0, 1, None);
    queues.attach(0, memory.provider.clone()).unwrap();
    expect(0, 2, Some(&memory));
    expect(1, 3, None);
    queues.attach(0, other.provider.clone()).unwrap();
    expect(0, 4, Some(&other));
    assert_eq!(memory.free_pages(), 300);
    queues.detach(0).unwrap();
    assert_eq!((polling.unread(), device.stops()), (3, vec![0, 0, 0]));
    queues.detach(0).unwrap();
    queues.detach(1).unwrap();
    assert_eq!((polling.unread(), device.stops()), (3, vec![0, 0, 0]), "nothing to do");
    expect(0, 5, None);

    // What cannot be had leaves the queue as it was.
    let small = DeviceMemory::new(127);
    let error = queues.attach(1, small.provider.clone()).unwrap_err();
    assert!(matches!(error, QueuesError::Unchanged { source: NetError::Pool(_) }), "{error:?}");
    assert!(polling.get(1).unwrap().host().is_some() && polling.get(1).unwrap().split().is_none());

    // One is moved out; the device of the second does not report where it has stopped.
    let taken = std::mem::take(&mut *polling.get(0).unwrap());
    assert!(matches!(queues.attach(0, memory.provider.clone()), Err(QueuesError::NotRunning)));
    let Some(RxClosed::Host(closed)) = taken.close() else { panic!("it received into host memory") };
    assert_closed(&closed, 0);
    queues.attach(1, memory.provider.clone()).unwrap();
    device.behave(|b| b.on_stop = OnStop::Refuse);
    let error = queues.detach(1).unwrap_err();
    let QueuesError::Stopped { closed, source: NetError::Backend(_) } = &error else { panic!("{error:?}") };
    let RxClosed::Split(closed) = **closed else { panic!("{error:?}") };
    assert_split_closed(&closed, 128);
    assert!(matches!(queues.attach(1, memory.provider.clone()), Err(QueuesError::NotRunning)));
    queues.detach(1).expect("a stopped queue receives nothing");
    assert!(polling.get(1).is_some_and(|rx| matches!(*rx, EitherRx::Stopped)));
    drop((queues, polling, tx, net));
    accounting.assert_balanced();
}
