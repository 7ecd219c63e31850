//! Frames that leave by another device's queue: where they arrive, what they are mapped for, and
//! how their pages are returned from a target that is full, that writes invalid values, and that
//! dies.
//!
//! ```text
//!   device A ──► A.rx ── Redirect ──► TxBulk ──► B.tx ──► device B          pages from one region, in one domain or in two
//!                 ▲                                │
//!                 └─────────── completion ◄────────┘
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use netmem_packet::{BulkStats, Handler, Packet, Poll, Reach, RxQueue, TxQueue, Verdict, XdpFrame};
use netmem_pool::{
    Direction, DmaDomain, MapError, PeerShared, PoolOptions, RegionOptions, RegionProvider, VhostDomain, lingering,
};
use netmem_testing::driver::hostile::{Behaviour, Harness, OnStop};
use netmem_testing::driver::*;
use netmem_virtio::driver::{DeviceFault, NetOptions, QueuePair, RxMode, VirtioRx, VirtioTx};

/// The two devices, with rings of these sizes.
fn two(domains: Domains, max_frame: usize, rings: [u16; 2]) -> (Harness, Harness) {
    let memory = common_memory(8192);
    let options = |ring| memory(RxMode::Mergeable).max_frame(max_frame).ring_size(ring);
    let a = Harness::new(options(rings[0]));
    let b = match domains {
        Domains::One => a.beside(Behaviour::default(), options(rings[1])),
        Domains::Two => Harness::new(options(rings[1])),
        Domains::Plain => Harness::new(options(rings[1]).premapped(false)),
    };
    (a, b)
}

/// Stops both, the receiver of the frames last or first, and checks the accounts.
#[track_caller]
fn close(a: Harness, b: Harness, domains: Domains, receiver_first: bool) {
    let Harness { pair: a, accounting, net: net_a, device: _device_a, .. } = a;
    let Harness { pair: QueuePair { rx, tx }, accounting: accounting_b, net: net_b, device: _device_b, .. } = b;
    if receiver_first {
        drop(a.tx);
        let closed = a.rx.close().unwrap();
        drop(tx);
        assert_eq!(closed.stats.allocated(), closed.stats.returned() + closed.outstanding);
    } else {
        drop(tx);
        close_clean(a);
    }
    assert_closed(&rx.close().unwrap(), 0);
    drop((net_a, net_b));
    accounting.assert_balanced();
    if domains == Domains::Two {
        accounting_b.assert_balanced();
    }
    until(|| lingering().is_empty());
}

/// One poll of the receiver; returns what became of its frames.
fn forward(rx: &mut VirtioRx, tx: &mut VirtioTx) -> BulkStats {
    let mut program = Forward::to(tx);
    rx.poll(|poll| poll.receive(256, &mut program));
    program.bulk.stats()
}

/// A frame that is redirected, or not.
fn marked(seed: u64, len: usize, redirected: bool) -> Vec<u8> {
    let mut bytes = frame(seed, len);
    bytes[0] = if redirected { 2 } else { 1 };
    bytes
}

/// Proves POOL-9 and POOL-1: frames of one buffer and of several arrive at the other device, byte
/// for byte. In one domain nothing is mapped and what is used is synced; in two, each fragment is
/// mapped for the target until that is done with it; the answer to "same domain?" is the address
/// that is then posted to the target. Completion inside of the receiver's poll brings pages
/// straight into its cache (POOL-3). What the program aborts is counted and its pages are returned
/// at once.
#[test]
fn from_one_device_to_another() {
    for domains in DOMAINS {
        for (max, size) in [(1518, 100), (9014, 9000), (65549, 65549)] {
            let (mut a, mut b) = two(domains, max, [256, 128]);
            let posted = a.pair.rx.pool_stats().inflight();
            let buffer = synced(&a) / (posted + if domains == Domains::One { b.pair.rx.posted() as u64 } else { 0 });
            for round in 0..20 {
                let want: Vec<Vec<u8>> = (0..4).map(|i| marked(round * 4 + i, size, true)).collect();
                for bytes in &want {
                    a.deliver(bytes);
                    a.deliver(&marked(1, 60, false));
                }
                let before = (maps(&mut a, &mut b, domains), synced(&a), synced(&b));
                let mut program = Forward::to(&mut b.pair.tx);
                let got = a.pair.rx.poll(|poll| poll.receive(256, &mut program));
                assert_eq!((got, program.bulk.stats()), (8, bulk_stats(4, 0)), "{domains:?}");
                let reach = std::mem::take(&mut program.reach);
                let frags: usize = reach.iter().map(Vec::len).sum();
                assert_eq!(frags > 4, size > 4096);
                let mapped = maps(&mut a, &mut b, domains) - before.0;
                assert_eq!(mapped, if domains == Domains::Two { frags as u64 } else { 0 }, "{domains:?}");
                // The frames and their headers; at the receiver, whole buffers that are posted
                // again.
                let sent = 4 * (size as u64 + 12);
                let posted_again = (frags as u64 + 4) * buffer;
                match domains {
                    Domains::One => assert_eq!(synced(&a) - before.1, sent + posted_again),
                    Domains::Two => assert_eq!((synced(&a) - before.1, synced(&b) - before.2), (posted_again, sent)),
                    Domains::Plain => assert_eq!(synced(&a) - before.1, posted_again),
                }
                for (bytes, reach) in want.iter().zip(&reach) {
                    let head = b.tx.take().unwrap();
                    let chain = b.tx.chain(head);
                    let wire: Vec<u8> = chain.iter().flat_map(|d| b.device.read(d.addr, d.len as usize)).collect();
                    assert!(wire[12..] == bytes[..], "{domains:?}: {size} bytes arrive changed");
                    // The header took its place in front of the head, where there was room.
                    let at: Vec<u64> = chain.iter().map(|d| d.addr).collect();
                    let of_frags = &at[chain.len() - reach.len()..];
                    let in_place = u64::from(chain.len() == reach.len()) * 12;
                    for (i, (&at, &reach)) in of_frags.iter().zip(reach).enumerate() {
                        let at = if i == 0 { at + in_place } else { at };
                        let same = domains != Domains::Two;
                        assert_eq!(reach, if same { Reach::Mapped(at) } else { Reach::Map }, "{domains:?}");
                    }
                    b.tx.add_used(u32::from(head), 0);
                }
                // The target's completions are the next poll's first business.
                let before = a.pair.rx.pool_stats();
                assert_eq!(forward(&mut a.pair.rx, &mut b.pair.tx), BulkStats::default());
                let after = a.pair.rx.pool_stats();
                assert_eq!(after.recycle_cached - before.recycle_cached, frags as u64);
                assert_eq!((after.inflight(), b.pair.tx.posted()), (posted, 0));
            }
            let (rx, tx) = (a.pair.rx.stats(), b.pair.tx.stats());
            assert_eq!((rx.redirected, rx.aborted, rx.frames), (80, 80, 160));
            assert!(rx.errors().eq([("aborted", 80)]));
            assert_eq!((tx.frames, tx.completed, tx.bytes), (80, 80, 80 * size as u64));
            assert_eq!((tx.mapped, tx.wrong_domain), (if domains == Domains::Two { 80 } else { 0 }, 0));
            close(a, b, domains, false);
        }
    }
}

/// Mappings of the target's domain, if it has one, in addition to those of its pools.
fn maps(a: &mut Harness, b: &mut Harness, domains: Domains) -> u64 {
    let pools = b.pair.rx.pool_stats().mapped + if domains == Domains::One { a.pair.rx.pool_stats().mapped } else { 0 };
    if domains == Domains::Plain { 0 } else { b.accounting.domain().maps() - pools }
}

/// Bytes synced for the device.
fn synced(harness: &Harness) -> u64 {
    harness.accounting.synced.device.load(Ordering::Relaxed)
}

/// Proves POOL-9: in one domain a page has one address, however much memory each device's rings
/// take.
#[test]
fn rings_of_another_size() {
    let memory = common_memory(2048);
    let mut a = Harness::new(memory(RxMode::Mergeable));
    // More than the 2 MiB that regions are measured in; it takes the pages that are left.
    let mut b = a.beside(Behaviour::default(), memory(RxMode::Mergeable).ring_size(32768).cache(0));
    (0..4).for_each(|i| a.deliver(&marked(i, 500, true)));
    assert_eq!(forward(&mut a.pair.rx, &mut b.pair.tx).sent, 4);
    for i in 0..4 {
        let head = b.tx.take().unwrap();
        let at = b.tx.split().desc(head);
        assert!(b.device.read(at.addr, at.len as usize)[12..] == marked(i, 500, true));
    }
    close(a, b, Domains::One, false);
}

/// Proves POOL-9 and POOL-3: what a full target refuses is dropped in the receiver's poll, straight
/// into its cache, and counted; the pages of what it took are returned at completion.
#[test]
fn a_full_target() {
    for domains in DOMAINS {
        let (mut a, mut b) = two(domains, 1518, [256, 8]);
        let posted = a.pair.rx.pool_stats().inflight();
        // Without syncs they leave as a group, for which no entry is kept for a header apart.
        let fits = if domains == Domains::Plain { 8 } else { 7 };
        for round in 1..=3 {
            // More than a bulk.
            (0..100).for_each(|i| a.deliver(&marked(i, 200, true)));
            let (before, maps_before) = (a.pair.rx.pool_stats(), maps(&mut a, &mut b, domains));
            assert_eq!(forward(&mut a.pair.rx, &mut b.pair.tx), bulk_stats(fits, 100 - fits));
            let after = a.pair.rx.pool_stats();
            assert_eq!(after.recycle_cached - before.recycle_cached, 100 - fits);
            assert_eq!(after.inflight(), posted + fits);
            assert_eq!(b.pair.tx.stats().full, (100 - fits) * round);
            let mapped = if domains == Domains::Two { 7 } else { 0 };
            assert_eq!(maps(&mut a, &mut b, domains) - maps_before, mapped, "what is refused is not mapped");
            while let Some(head) = b.tx.take() {
                b.tx.add_used(u32::from(head), 0);
            }
            assert_eq!(a.pair.rx.poll(|_| b.pair.tx.complete() as u64), fits);
            assert_eq!(a.pair.rx.pool_stats().inflight(), posted);
        }
        close(a, b, domains, false);
    }
}

/// Proves POOL-9, POOL-1 and POOL-11: a target that dies, refuses to stop or writes invalid values
/// with frames in its ring loses none of them: what it no longer accepts is dropped and counted,
/// the pages that it has are returned when its queue ends, before the receiver or after it, and is
/// unmapped once.
#[test]
fn a_target_that_is_dead() {
    for domains in DOMAINS {
        for end in ["dies", "refuses", "lies", "lives"] {
            for receiver_first in [false, true] {
                let (mut a, mut b) = two(domains, 9014, [256, 64]);
                let posted = a.pair.rx.pool_stats().inflight();
                // Of three buffers each, of which some are done with.
                let more = |a: &mut Harness, n: u64| (0..n).for_each(|i| a.deliver(&marked(i, 9000, true)));
                more(&mut a, 8);
                assert_eq!(forward(&mut a.pair.rx, &mut b.pair.tx).sent, 8);
                for _ in 0..3 {
                    let head = b.tx.take().unwrap();
                    b.tx.add_used(u32::from(head), 0);
                }
                match end {
                    "dies" => b.device.kill(),
                    "refuses" => b.device.behave(|b| b.on_stop = OnStop::Refuse),
                    "lies" => b.tx.add_used(1 << 20, 0),
                    _ => {}
                }
                let stopped = (end == "lies").then_some(DeviceFault::BadId { id: 1 << 20 });
                more(&mut a, 40);
                let went = forward(&mut a.pair.rx, &mut b.pair.tx);
                assert_eq!(b.pair.tx.stats().stopped, stopped);
                assert_eq!((b.pair.tx.stats().completed, went.sent + went.dropped), (3, 40));
                assert!(went.dropped > 0 && (end == "lies") == (went.sent == 0), "{went:?}");
                let held = 5 + went.sent;
                assert_eq!(b.pair.tx.posted() as u64, held);
                assert_eq!(a.pair.rx.pool_stats().inflight(), posted + 3 * held);
                if ["dies", "refuses"].contains(&end) {
                    dead(a, b, domains, receiver_first);
                } else {
                    close(a, b, domains, receiver_first);
                }
            }
        }
    }
}

/// Stops two devices of which the second is gone, or hangs up when it is to stop: what it had
/// posted is quarantined, what it had to send is not.
#[track_caller]
fn dead(a: Harness, b: Harness, domains: Domains, receiver_first: bool) {
    let posted = b.pair.rx.posted() as u64;
    let QueuePair { rx, tx } = b.pair;
    if receiver_first {
        drop(a.pair.tx);
        let closed = a.pair.rx.close().unwrap();
        assert!(closed.outstanding > 0 && closed.stats.quarantined == 0);
        drop(tx);
    } else {
        drop(tx);
        close_clean(a.pair);
    }
    assert_closed(&rx.close().unwrap(), posted);
    a.accounting.assert_balanced();
    if domains == Domains::Two {
        b.accounting.assert_balanced();
    }
    until(|| lingering().is_empty());
}

/// A domain that records its calls, in order, and can be set to refuse.
#[derive(Debug)]
struct Fussy {
    table: VhostDomain,
    left: Arc<AtomicU64>,
    /// Maps, and unmaps negated.
    asked: Arc<Mutex<Vec<i64>>>,
}

impl DmaDomain for Fussy {
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError> {
        let one_less = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        one_less.map_err(|_| MapError::Full("as the test wants it".into()))?;
        let dma = self.table.map(addr, len, direction)?;
        self.asked.lock().unwrap().push(dma as i64);
        Ok(dma)
    }

    fn unmap(&self, dma: u64, _: usize) {
        self.asked.lock().unwrap().push(-(dma as i64));
    }
}

/// Proves POOL-1 and POOL-9: a packet of which a part cannot be mapped is refused as it was; what
/// was mapped of it is unmapped, last first, and nothing is left in the ring. Redirected, it is
/// dropped and counted.
#[test]
fn maps_that_fail_half_way() {
    let memory = common_memory(2048);
    let mut a = Harness::new(memory(RxMode::Mergeable).max_frame(9014));
    let (left, asked) = (Arc::new(AtomicU64::new(u64::MAX)), Arc::new(Mutex::new(Vec::new())));
    let (l, r) = (Arc::clone(&left), Arc::clone(&asked));
    // As many descriptors as it needs, if those of refused packets are free again.
    let options = memory(RxMode::Mergeable).ring_size(8);
    let options = options.domain(move |table| Arc::new(Fussy { table, left: l, asked: r }));
    let mut b = Harness::over(Behaviour::default(), options, Accounting::default());
    for can in 0..=3 {
        let want = marked(can, 9000, true);
        a.deliver(&want);
        let packet = take(&mut a.pair.rx).remove(0);
        let offset = packet.head().offset();
        assert_eq!(packet.frags().len(), 2);
        left.store(can, Ordering::Relaxed);
        asked.lock().unwrap().clear();
        let sent = b.pair.tx.send(packet);
        let mut asked = asked.lock().unwrap().clone();
        assert_eq!(sent.is_ok(), can == 3);
        if let Err(packet) = sent {
            assert_eq!((packet.to_vec() == want, packet.head().offset()), (true, offset));
            let (maps, unmaps) = asked.split_at_mut(can as usize);
            unmaps.reverse();
            assert!(maps.iter().zip(unmaps.iter()).all(|(m, u)| m + u == 0) && maps.len() == unmaps.len());
        } else {
            assert_eq!(asked.len(), 3);
        }
    }
    assert_eq!((b.pair.tx.stats().wrong_domain, b.pair.tx.posted()), (3, 1));
    left.store(1, Ordering::Relaxed);
    (0..4).for_each(|i| a.deliver(&marked(i, 9000, true)));
    assert_eq!(forward(&mut a.pair.rx, &mut b.pair.tx), bulk_stats(0, 4));
    assert_eq!((b.pair.tx.stats().wrong_domain, b.tx.available()), (7, 1));
    assert_posted_but(&mut a, 3);
    drop(b.pair.tx);
    // Of those that were sent all three parts, of the others the first of one.
    assert_eq!(asked.lock().unwrap().iter().filter(|a| **a > 0).count(), 3 + 1);
    assert_eq!(asked.lock().unwrap().iter().sum::<i64>(), 0);
    assert_closed(&b.pair.rx.close().unwrap(), 0);
    a.close();
}

/// All pages of the receive queue are posted, but for this many.
#[track_caller]
fn assert_posted_but(device: &mut Harness, pages: u64) {
    let posted = device.pair.rx.posted() as u64;
    assert_eq!(device.pair.rx.pool_stats().inflight(), posted + pages);
}

/// Proves POOL-9: fragments of either domain in one packet, some of them without bytes, a head that
/// is shared or has no room for the header: what is the target's own is not mapped, the rest is,
/// each for its descriptor.
#[test]
fn packets_of_two_domains() {
    let (mut a, mut b) = two(Domains::Two, 1518, [64, 64]);
    for (turn, (room, share)) in [(64, false), (64, true), (0, false)].into_iter().cycle().take(90).enumerate() {
        let parts: Vec<Vec<u8>> = (0..5).map(|i| frame(turn as u64 + i, [200, 300, 0, 70, 90][i as usize])).collect();
        // The second and the fourth are the target's.
        let mut frags = parts.iter().enumerate().map(|(i, bytes)| {
            let rx = if i % 2 == 1 { &mut b.pair.rx } else { &mut a.pair.rx };
            let mut page = rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
            page.copy_from(room, bytes).unwrap();
            page.freeze_range(room..room + bytes.len())
        });
        let mut packet = Packet::new(frags.next().unwrap());
        frags.for_each(|f| packet.push(f).unwrap());
        let kept = share.then(|| packet.head().clone());
        let before = (maps(&mut a, &mut b, Domains::Two), b.accounting.domain().unmaps());
        b.pair.tx.send(packet).unwrap();
        b.pair.tx.flush();
        let head = b.tx.take().unwrap();
        let chain = b.tx.chain(head);
        assert_eq!(chain.len(), if room > 0 && !share { 4 } else { 5 });
        let wire: Vec<u8> = chain.iter().flat_map(|d| b.device.read(d.addr, d.len as usize)).collect();
        assert!(wire[12..] == parts.concat(), "turn {turn}");
        b.tx.add_used(u32::from(head), 0);
        assert_eq!(b.pair.tx.complete(), 1);
        let after = (maps(&mut a, &mut b, Domains::Two), b.accounting.domain().unmaps());
        assert_eq!((after.0 - before.0, after.1 - before.1), (2, 2));
        drop(kept);
    }
    assert_eq!(b.pair.tx.stats().mapped, 90);
    close(a, b, Domains::Two, false);
}

/// Proves POOL-9: nothing is mapped for a packet whose only fragment of another domain is empty.
/// The next packet in its slot is read at its own addresses.
#[test]
fn an_empty_fragment_of_another_domain() {
    let (mut a, mut b) = two(Domains::Two, 1518, [64, 8]);
    let page = |rx: &mut VirtioRx, bytes: &[u8]| {
        let mut page = rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
        page.copy_from(64, bytes).unwrap();
        page.freeze_range(64..64 + bytes.len())
    };
    // Each slot has such a packet first, and then packets that are mapped.
    for turn in 0..24 {
        let (bytes, mapped) = (frame(turn, 200), turn >= 8);
        let head = page(if mapped { &mut a.pair.rx } else { &mut b.pair.rx }, &bytes);
        let mut packet = Packet::new(head);
        packet.push(page(&mut a.pair.rx, &[])).unwrap();
        let before = maps(&mut a, &mut b, Domains::Two);
        b.pair.tx.send(packet).unwrap();
        b.pair.tx.flush();
        assert_eq!(maps(&mut a, &mut b, Domains::Two) - before, u64::from(mapped));
        let head = b.tx.take().unwrap();
        let wire: Vec<u8> = b.tx.chain(head).iter().flat_map(|d| b.device.read(d.addr, d.len as usize)).collect();
        assert!(wire[12..] == bytes, "turn {turn}");
        b.tx.add_used(u32::from(head), 0);
        assert_eq!(b.pair.tx.complete(), 1);
    }
    close(a, b, Domains::Two, false);
}

/// Proves POOL-1: pages whose own device is gone are unmapped at once, also for those who share its
/// domain: a target knows, and maps them for itself. What it had in its ring then stays its to
/// send.
#[test]
fn pages_of_a_device_that_is_gone() {
    let (mut a, mut b) = two(Domains::One, 9014, [256, 256]);
    (0..4).for_each(|i| a.deliver(&marked(i, 9000, true)));
    assert_eq!(forward(&mut a.pair.rx, &mut b.pair.tx).sent, 4);
    (4..8).for_each(|i| a.deliver(&marked(i, 9000, true)));
    let held = take(&mut a.pair.rx);
    assert!(held.iter().flat_map(Packet::fragments).all(|f| matches!(b.pair.tx.reach(f), Reach::Mapped(_))));
    a.device.kill();
    drop(a.pair.tx);
    let posted = a.pair.rx.posted() as u64;
    let closed = a.pair.rx.close().unwrap();
    assert_eq!((closed.outstanding, closed.stats.quarantined), (24, posted));
    assert!(held.iter().flat_map(Packet::fragments).all(|f| b.pair.tx.reach(f) == Reach::Map));
    held.into_iter().for_each(|p| b.pair.tx.send(p).unwrap());
    b.pair.tx.flush();
    assert_eq!(b.pair.tx.stats().mapped, 4);
    for i in 0..8 {
        let head = b.tx.take().unwrap();
        let chain = b.tx.chain(head);
        let wire: Vec<u8> = chain.iter().flat_map(|d| b.device.read(d.addr, d.len as usize)).collect();
        assert!(wire[12..] == marked(i, 9000, true), "frame {i}");
        b.tx.add_used(u32::from(head), 0);
    }
    assert_eq!(b.pair.tx.complete(), 8);
    b.close();
    until(|| lingering().is_empty());
}

/// Proves POOL-9: a device that has neither the domain nor the memory reports it, and refuses.
#[test]
fn a_target_out_of_reach() {
    for premapped in [true, false] {
        let mut a = Harness::new(NetOptions::new(RxMode::Mergeable));
        let mut b = Harness::new(NetOptions::new(RxMode::Mergeable).premapped(premapped));
        a.deliver(&marked(1, 100, true));
        let mut program = Forward::to(&mut b.pair.tx);
        a.pair.rx.poll(|poll| poll.receive(256, &mut program));
        assert_eq!(program.reach, [[if premapped { Reach::Map } else { Reach::Never }]]);
        assert_eq!(program.bulk.stats(), bulk_stats(0, 1));
        assert_eq!(b.pair.tx.stats().wrong_domain, 1);
        a.assert_all_posted(RxMode::Mergeable);
        close(a, b, if premapped { Domains::Two } else { Domains::Plain }, false);
    }
}

/// Proves POOL-1: pages of a pool in the device's domain are sent as they are mapped if they are
/// mapped to be read, and mapped for the transmission if not.
#[test]
fn pools_in_one_direction() {
    let supply = RegionProvider::new(RegionOptions::new(512).build::<PeerShared>().unwrap());
    let options = NetOptions::new(RxMode::Small).memory(supply.region().clone(), supply.clone());
    let mut b = Harness::new(options);
    let mapped_to_send = [(Direction::ToDevice, 0), (Direction::Bidirectional, 0), (Direction::FromDevice, 1)];
    for (direction, maps) in mapped_to_send {
        let options = PoolOptions::new("headers").direction(direction).cache(1);
        let mut pool = options.build(supply.clone(), Some(b.accounting.domain().clone())).unwrap();
        let page = pool.alloc().unwrap();
        let packet = Packet::new(page.freeze_range(64..164));
        let (at, before) = (packet.head().dma_addr(), b.accounting.domain().maps());
        let reach = if maps == 0 { Reach::Mapped(at) } else { Reach::Map };
        assert_eq!(b.pair.tx.reach(packet.head()), reach);
        b.pair.tx.send(packet).unwrap();
        b.pair.tx.flush();
        assert_eq!(b.accounting.domain().maps() - before, maps, "{direction:?}");
        let head = b.tx.take().unwrap();
        b.tx.add_used(u32::from(head), 0);
        assert_eq!(b.pair.tx.complete(), 1);
    }
    b.close();
}

/// A program that panics leaves in the bulk what was redirected before; the next poll sends it.
#[test]
fn a_panic_before_the_flush() {
    let (mut a, mut b) = two(Domains::Two, 1518, [256, 256]);
    let mut program = Forward::to(&mut b.pair.tx);
    (0..3).for_each(|i| a.deliver(&marked(i, 100, true)));
    a.pair.rx.poll(|poll| poll.receive(2, &mut program));
    assert_eq!(program.bulk.held(), 0);
    a.deliver(&marked(3, 100, true));
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        a.pair.rx.poll(|poll| {
            let mut budget = || poll.receive(1, &mut Late(&mut program));
            budget();
            budget()
        })
    }));
    assert!(unwound.is_err());
    assert_eq!((program.bulk.held(), program.bulk.stats().sent), (1, 2));
    program.fail = false;
    a.pair.rx.poll(|poll| poll.receive(256, &mut program));
    assert_eq!((program.bulk.held(), program.bulk.stats()), (0, bulk_stats(3, 0)));
    assert_posted_but(&mut a, 3);
    close(a, b, Domains::Two, true);
}

/// Does not flush, and panics from the second frame on.
struct Late<'a, 't>(&'a mut Forward<'t>);

impl Handler<PeerShared> for Late<'_, '_> {
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        self.0.run(frame)
    }

    fn pass(&mut self, _: Packet<PeerShared>) {}

    fn redirect(&mut self, packet: Packet<PeerShared>) {
        self.0.redirect(packet);
        self.0.fail = true;
    }
}
