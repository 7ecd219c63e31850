//! User code that panics while the driver holds pages: a provider or a DMA domain. No page that the
//! device has is used again, and no descriptor points to a page that a user has.

use netmem_packet::{Packet, TxQueue};
use netmem_pool::{
    Direction, DmaDomain, MapError, PeerShared, PoolOptions, Provider, RawPage, Region, RegionOptions, RegionProvider,
    VhostDomain,
};
use netmem_testing::driver::hostile::{Behaviour, DeviceRing, FEATURES, FORMATS, Harness, Hostile, OnStop};
use netmem_testing::driver::*;
use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// Panics if it is armed, once.
#[derive(Clone, Debug, Default)]
struct Fuse(Arc<AtomicBool>);

impl Fuse {
    fn arm(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn check(&self) {
        if self.0.swap(false, Ordering::Relaxed) {
            resume_unwind(Box::new("as the test wants it"));
        }
    }
}

/// A provider that panics when it is asked for pages, after it has passed out the first half of
/// them.
#[derive(Debug)]
struct Supply(Arc<RegionProvider<PeerShared>>, Fuse);

// SAFETY: it is the provider inside.
unsafe impl Provider<PeerShared> for Supply {
    fn alloc(&self, pages: &mut [Option<RawPage<PeerShared>>]) -> usize {
        let (first, second) = pages.split_at_mut(pages.len() / 2);
        let taken = self.0.alloc(first);
        self.1.check();
        taken + self.0.alloc(second)
    }

    unsafe fn release(&self, page: RawPage<PeerShared>) {
        // SAFETY: the caller's.
        unsafe { self.0.release(page) }
    }

    fn page_size(&self) -> usize {
        self.0.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<PeerShared>)) {
        self.0.each(f);
    }
}

/// When a [`Domain`] panics, and how many ranges it has mapped.
#[derive(Clone, Debug, Default)]
struct Calls {
    unmap: Fuse,
    map: Fuse,
    /// Of memory that the device will read.
    sync: Fuse,
    /// It panics at the call with which this becomes 0, of memory that the device has written.
    received: Arc<AtomicI64>,
    mapped: Arc<AtomicI64>,
}

#[derive(Debug)]
struct Domain(VhostDomain, Calls);

impl DmaDomain for Domain {
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError> {
        self.1.map.check();
        self.1.mapped.fetch_add(1, Ordering::Relaxed);
        self.0.map(addr, len, direction)
    }

    fn unmap(&self, _: u64, _: usize) {
        self.1.mapped.fetch_sub(1, Ordering::Relaxed);
        self.1.unmap.check();
    }

    fn needs_sync(&self) -> bool {
        true
    }

    fn sync_for_device(&self, _: u64, _: usize, direction: Direction) {
        if direction == Direction::ToDevice {
            self.1.sync.check();
        }
    }

    fn sync_for_cpu(&self, _: u64, _: usize) {
        if self.1.received.fetch_sub(1, Ordering::Relaxed) == 1 {
            resume_unwind(Box::new("as the test wants it"));
        }
    }
}

fn memory(pages: usize) -> Arc<RegionProvider<PeerShared>> {
    RegionProvider::new(RegionOptions::new(pages).huge_pages(false).build().unwrap())
}

/// A device that does not confirm its end keeps what was posted, also if the domain panics
/// meanwhile.
#[test]
fn a_panic_while_a_queue_stops() {
    for mode in [RxMode::Small, RxMode::Mergeable] {
        let (pages, calls) = (memory(512), Calls::default());
        let (device, backend) = Hostile::new(Behaviour { on_stop: OnStop::Refuse, ..Behaviour::default() });
        let in_domain = calls.clone();
        let options = NetOptions::new(mode)
            .memory(pages.region().clone(), pages.clone())
            .domain(move |table| Arc::new(Domain(table, in_domain)));
        let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
        let mut ring = device.ring(0);
        let posted = available(&mut ring);
        let pair = pairs.remove(0);
        assert_eq!(posted.len(), pair.rx.posted());
        calls.unmap.arm();
        assert!(catch_unwind(AssertUnwindSafe(|| pair.rx.close())).is_err(), "{mode}");
        let home: Vec<_> = std::iter::from_fn(|| pages.page()).collect();
        assert_eq!(home.len(), 512 - posted.len(), "{mode}: the device still has the others");
        drop((pair.tx, net, device));
    }
}

/// A domain panics over a further buffer of a merged frame. The frame is lost, and none of its
/// buffers is taken for a frame of its own.
#[test]
fn a_panic_inside_of_a_merged_frame() {
    for (format, at) in FORMATS.into_iter().flat_map(|format| [(format, 2), (format, 3)]) {
        let (pages, calls) = (memory(512), Calls::default());
        let behaviour = Behaviour { features: FEATURES | format, ..Behaviour::default() };
        let (device, backend) = Hostile::new(behaviour);
        let in_domain = calls.clone();
        let options = NetOptions::new(RxMode::Mergeable)
            .max_frame(9014)
            .ring_features(format)
            .memory(pages.region().clone(), pages.clone())
            .domain(move |table| Arc::new(Domain(table, in_domain)));
        let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
        let (mut ring, mut pair) = (device.ring(0), pairs.remove(0));
        let posted = pair.rx.posted();
        let (long, short) = (frame(1, 9000), frame(2, 100));
        device.deliver(&mut ring, &long);
        device.deliver(&mut ring, &short);
        calls.received.store(at, Ordering::Relaxed);
        let mut got = Vec::new();
        let mut handler = |packet: Packet<PeerShared>| got.push(packet.to_vec());
        assert!(catch_unwind(AssertUnwindSafe(|| receive(&mut pair.rx, &mut handler))).is_err());
        receive(&mut pair.rx, &mut handler);
        assert!(got == [short], "{format:#x}, at {at}: {} frames", got.len());
        let stats = pair.rx.stats();
        assert_eq!((stats.errors().count(), pair.rx.posted()), (0, posted), "{stats:?}");
        close_clean(pair);
        drop((net, device));
    }
}

/// The pages that the available heads point to. No head and no page is there twice.
fn available(ring: &mut DeviceRing) -> BTreeSet<u64> {
    let (mut heads, mut addrs) = (BTreeSet::new(), BTreeSet::new());
    while let Some(head) = ring.take() {
        assert!(heads.insert(head), "head {head} is exposed twice");
        let addr = ring.chain(head)[0].addr >> 12;
        assert!(addrs.insert(addr), "two buffers point to one page");
    }
    addrs
}

/// A provider panics in the middle of a refill: what has a page by then is posted later, where that
/// page is.
#[test]
fn a_panic_in_a_refill() {
    for mode in [RxMode::Small, RxMode::Mergeable] {
        let (pages, fuse) = (memory(512), Fuse::default());
        let supply = Arc::new(Supply(pages.clone(), fuse.clone()));
        let options = NetOptions::new(mode).ring_size(128).memory(pages.region().clone(), supply);
        let mut harness = Harness::new(options);
        for i in 0..100 {
            harness.deliver(&frame(i, 60));
        }
        // Of the first batch, 54 packets are kept: its refill finds 10 pages in the cache, and then
        // asks the provider.
        let mut kept: Vec<Packet<PeerShared>> = Vec::new();
        fuse.arm();
        let failed = catch_unwind(AssertUnwindSafe(|| {
            receive(&mut harness.pair.rx, &mut |p: Packet<PeerShared>| {
                if kept.len() < 54 {
                    kept.push(p);
                }
            });
        }));
        assert!(failed.is_err());
        let held: BTreeSet<_> = kept.iter().map(|p| p.head().dma_addr() >> 12).collect();
        receive(&mut harness.pair.rx, &mut DropAll::default());
        let posted = available(&mut harness.ring);
        assert!(posted.is_disjoint(&held), "{mode}: a buffer is in a packet that is held");
        drop(kept);
        harness.close();
    }
}

/// A provider panics in the second batch of a refill: the first is not posted again.
#[test]
fn a_panic_in_the_second_batch_of_a_refill() {
    for mode in [RxMode::Small, RxMode::Mergeable] {
        let (pages, fuse) = (memory(128), Fuse::default());
        let supply = Arc::new(Supply(pages.clone(), fuse.clone()));
        let options = NetOptions::new(mode).ring_size(128).memory(pages.region().clone(), supply);
        let mut harness = Harness::new(options);
        for i in 0..128 {
            harness.deliver(&frame(i, 60));
        }
        let mut kept = take(&mut harness.pair.rx);
        assert_eq!((kept.len(), harness.pair.rx.posted()), (128, 0));
        kept.truncate(28);
        fuse.arm();
        let failed = catch_unwind(AssertUnwindSafe(|| receive(&mut harness.pair.rx, &mut DropAll::default())));
        assert!(failed.is_err());
        drop(kept);
        until(|| {
            receive(&mut harness.pair.rx, &mut DropAll::default());
            harness.pair.rx.posted() == 128
        });
        assert_eq!(available(&mut harness.ring).len(), 128, "{mode}");
        harness.close();
    }
}

/// A domain panics when a packet is completed, or sent: the ring accepts as many packets afterwards
/// as before, and nothing that was mapped for one of them stays mapped.
#[test]
fn a_panic_over_a_sent_packet() {
    let (pages, calls) = (memory(1024), Calls::default());
    let Calls { unmap, map, sync, mapped, .. } = calls.clone();
    let (device, backend) = Hostile::new(Behaviour::default());
    let options = NetOptions::new(RxMode::Small)
        .memory(pages.region().clone(), pages.clone())
        .domain(move |table| Arc::new(Domain(table, calls)));
    let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
    let (mut ring, pair) = (device.ring(1), pairs.remove(0));
    let (rx, mut tx) = (pair.rx, pair.tx);
    let before = mapped.load(Ordering::Relaxed);
    // Pages of no pool are in no domain, and are mapped to be sent. Two fragments each.
    let packet = || {
        let mut packet = Packet::from(pages.page().unwrap());
        packet.push(pages.page().unwrap().freeze()).unwrap();
        packet
    };
    let mut rounds = Vec::new();
    for fuse in [None, Some(&unmap), Some(&map), Some(&sync), None] {
        if let Some(fuse) = fuse.filter(|_| rounds.len() >= 2) {
            fuse.arm();
            assert!(catch_unwind(AssertUnwindSafe(|| tx.send(packet()))).is_err());
        }
        let mut sent = 0;
        while tx.send(packet()).is_ok() {
            sent += 1;
        }
        tx.flush();
        rounds.push(sent);
        while let Some(head) = ring.take() {
            ring.add_used(head.into(), 0);
        }
        if let Some(fuse) = fuse.filter(|_| rounds.len() == 2) {
            fuse.arm();
            assert!(catch_unwind(AssertUnwindSafe(|| tx.complete())).is_err());
        }
        tx.complete();
        assert_eq!((tx.posted(), mapped.load(Ordering::Relaxed)), (0, before), "round {}", rounds.len());
    }
    assert_eq!(rounds, [rounds[0]; 5]);
    drop(tx);
    assert_closed(&rx.close().unwrap(), 0);
    drop((net, device));
}

/// A domain panics when a packet of its own pages is synced: the packet leaves the queue, and the
/// ring accepts as many packets afterwards as before.
#[test]
fn a_panic_over_a_packet_of_the_domain() {
    let (pages, calls) = (memory(1024), Calls::default());
    let sync = calls.sync.clone();
    let (device, backend) = Hostile::new(Behaviour::default());
    let options = NetOptions::new(RxMode::Small)
        .memory(pages.region().clone(), pages.clone())
        .tx_pages(512)
        .domain(move |table| Arc::new(Domain(table, calls)));
    let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
    let pool = net.tx_pool(PoolOptions::new("tx")).unwrap();
    let (mut ring, pair) = (device.ring(1), pairs.remove(0));
    let (rx, mut tx) = (pair.rx, pair.tx);
    // With room for the header in front, and without.
    let mut rounds = Vec::new();
    for (headroom, panics) in [(64, false), (64, true), (0, true), (64, false)] {
        let packet = |headroom: usize| Packet::new(pool.alloc().unwrap().freeze_range(headroom..headroom + 60));
        if panics {
            sync.arm();
            assert!(catch_unwind(AssertUnwindSafe(|| tx.send(packet(headroom)))).is_err());
            assert_eq!(tx.posted(), 0);
        }
        let mut sent = 0;
        while tx.send(packet(64)).is_ok() {
            sent += 1;
        }
        tx.flush();
        rounds.push(sent);
        while let Some(head) = ring.take() {
            ring.add_used(head.into(), 0);
        }
        tx.complete();
        assert_eq!(tx.posted(), 0);
    }
    assert_eq!(rounds, [rounds[0]; 4]);
    assert_eq!(tx.stats().frames, 4 * rounds[0]);
    drop(tx);
    assert_closed(&pool.close(), 0);
    assert_closed(&rx.close().unwrap(), 0);
    drop((net, device));
}

/// A domain panics over the first page of a frame that fills several: none of them stays mapped
/// without being posted.
#[test]
fn a_panic_over_a_chain() {
    let calls = Calls::default();
    let Calls { unmap, mapped, .. } = calls.clone();
    let (device, backend) = Hostile::new(Behaviour::default());
    let options = NetOptions::new(RxMode::Big).max_frame(9014).domain(move |table| Arc::new(Domain(table, calls)));
    let (net, mut pairs) = VirtioNet::probe(backend, options).unwrap();
    let (mut ring, pair) = (device.ring(0), pairs.remove(0));
    let (mut rx, tx) = (pair.rx, pair.tx);
    let before = mapped.load(Ordering::Relaxed);
    device.deliver(&mut ring, &frame(1, 9000));
    unmap.arm();
    assert!(catch_unwind(AssertUnwindSafe(|| receive(&mut rx, &mut DropAll::default()))).is_err());
    assert_eq!(mapped.load(Ordering::Relaxed), before - 3);
    receive(&mut rx, &mut DropAll::default());
    assert_eq!(mapped.load(Ordering::Relaxed), before, "the chain is filled up again");
    device.deliver(&mut ring, &frame(2, 9000));
    assert_eq!(take(&mut rx)[0].to_vec(), frame(2, 9000));
    assert_closed(&rx.close().unwrap(), 0);
    assert_eq!(mapped.load(Ordering::Relaxed), 0);
    drop((tx, net, device));
}

/// A provider panics while pages are set aside for sending: it gets back all that it has passed
/// out.
#[test]
fn a_panic_while_pages_are_set_aside() {
    let (pages, fuse) = (memory(512), Fuse::default());
    let supply = Arc::new(Supply(pages.clone(), fuse.clone()));
    let (device, backend) = Hostile::new(Behaviour::default());
    let options = NetOptions::new(RxMode::Small).memory(pages.region().clone(), supply).tx_pages(100);
    fuse.arm();
    assert!(catch_unwind(AssertUnwindSafe(|| VirtioNet::probe(backend, options))).is_err());
    assert_eq!(std::iter::from_fn(|| pages.page()).collect::<Vec<_>>().len(), 512);
    drop(device);
}
