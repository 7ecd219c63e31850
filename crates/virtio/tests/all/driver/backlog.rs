//! Back-pressure: packets and a full ring, with both policies of a bulk, on a device that the test
//! plays and on Netmem's device.

use netmem_packet::{Checksum, Meta, Packet, Poll, RxQueue, Sendable, TxBulk, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::driver::hostile::{Behaviour, DeviceRing, FEATURES, Harness, Hostile};
use netmem_testing::driver::*;
use netmem_virtio::device::port::{Play, Port, Sink};
use netmem_virtio::driver::{DeviceFault, NetOptions, QueuePair, RxMode, VirtioRx};
use netmem_virtio::net::{VnetHdr, feature};
use std::sync::mpsc;

/// A packet that begins with this number, in so many fragments.
fn numbered(rx: &mut VirtioRx, number: u64, fragments: usize) -> Packet<PeerShared> {
    let mut frags = (0..fragments).map(|n| {
        let mut page = rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
        page.copy_from(64, &number.to_le_bytes()).unwrap();
        page.freeze_range(64..if n == 0 { 124 } else { 65 })
    });
    let mut packet = Packet::new(frags.next().unwrap());
    frags.for_each(|frag| packet.push(frag).unwrap());
    packet
}

/// Heads that the device has popped, and the numbers of their packets, in the order of the ring.
fn take_all(ring: &mut DeviceRing, device: &Hostile) -> (Vec<u16>, Vec<u64>) {
    let heads: Vec<_> = std::iter::from_fn(|| ring.take()).collect();
    let number = |head: &u16| {
        let wire: Vec<u8> = ring.chain(*head).iter().flat_map(|d| device.read(d.addr, d.len as usize)).collect();
        u64::from_le_bytes(*wire[VnetHdr::LEN..].first_chunk().unwrap())
    };
    let numbers = heads.iter().map(number).collect();
    (heads, numbers)
}

/// A ring of so many entries, whose device is the test.
fn harness(entries: u16) -> Harness {
    Harness::new(NetOptions::new(RxMode::Small).ring_size(entries).pages(2048))
}

/// A full ring answers `Later`, and after completions `Now`. A packet that can never be sent is
/// distinguished from these, before it is sent and after.
#[test]
fn the_room_of_a_queue() {
    let behaviour = Behaviour { features: FEATURES & !feature::CSUM, ..Behaviour::default() };
    let mut harness = Harness::with(behaviour, NetOptions::new(RxMode::Small).ring_size(4).pages(64));
    let rx = &mut harness.pair.rx;
    let (one, two, four) = (numbered(rx, 0, 1), numbered(rx, 0, 3), numbered(rx, 0, 4));
    let mut offload = numbered(rx, 0, 1);
    offload.meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: None };
    let room = |harness: &Harness| [&one, &two, &four, &offload].map(|packet| harness.pair.tx.sendable(packet));
    assert_eq!(room(&harness), [Sendable::Now, Sendable::Now, Sendable::Never, Sendable::Never]);
    // An entry is kept free for a header without a place: a packet of three fragments wants all
    // four.
    let packet = numbered(&mut harness.pair.rx, 0, 1);
    harness.pair.tx.send(packet).unwrap();
    assert_eq!(room(&harness), [Sendable::Now, Sendable::Later, Sendable::Never, Sendable::Never]);
    for number in 1..3 {
        let packet = numbered(&mut harness.pair.rx, number, 1);
        harness.pair.tx.send(packet).unwrap();
    }
    assert_eq!(room(&harness), [Sendable::Later, Sendable::Later, Sendable::Never, Sendable::Never]);
    harness.pair.tx.flush();
    let before = harness.pair.tx.stats();
    let (heads, numbers) = take_all(&mut harness.tx, &harness.device);
    assert_eq!((numbers, before), (vec![0, 1, 2], harness.pair.tx.stats()));
    heads.iter().for_each(|head| harness.tx.add_used(u32::from(*head), 0));
    assert_eq!(room(&harness)[0], Sendable::Later, "not completed yet");
    harness.pair.tx.complete();
    assert_eq!(room(&harness), [Sendable::Now, Sendable::Now, Sendable::Never, Sendable::Never]);
    harness.tx.add_used(3, 0);
    harness.pair.tx.complete();
    assert_eq!(harness.pair.tx.stats().stopped, Some(DeviceFault::IndexJump { by: 1, posted: 0 }));
    assert_eq!(room(&harness), [Sendable::Never; 4]);
    drop((one, two, four, offload));
    harness.close();
}

/// A packet in another device's memory is never sent, also if there is room.
#[test]
fn memory_out_of_reach() {
    for premapped in [true, false] {
        let options = || NetOptions::new(RxMode::Small).premapped(premapped);
        let (mut first, mut second) = (DeviceThread::one(Sink), DeviceThread::one(Sink));
        let (_a, mut a) = first.probe(options());
        let (_b, mut b) = second.probe(options());
        let foreign = numbered(&mut b[0].rx, 0, 1);
        // With a domain, only mapping shows it.
        assert_eq!(a[0].tx.sendable(&foreign), if premapped { Sendable::Now } else { Sendable::Never });
        let mut bulk = TxBulk::holding(&mut a[0].tx, 64);
        bulk.push(foreign);
        bulk.flush();
        assert_eq!((bulk.stats(), bulk.held()), (bulk_stats(0, 1), 0));
        drop(bulk);
        a.into_iter().chain(b).for_each(close_clean);
    }
}

/// A bulk that drops: a full ring accepts what fits, the rest is dropped at once, and counted.
#[test]
fn dropping() {
    for entries in [4, 32, 256] {
        let mut harness = harness(entries);
        let mut packets: Vec<_> = (0..300).map(|n| numbered(&mut harness.pair.rx, n, 1)).collect();
        let mut bulk = TxBulk::new(&mut harness.pair.tx);
        packets.drain(..).for_each(|packet| bulk.push(packet));
        bulk.flush();
        let fits = u64::from(entries) - 1;
        assert_eq!((bulk.stats(), bulk.held()), (bulk_stats(fits, 300 - fits), 0));
        drop(bulk);
        let (_, numbers) = take_all(&mut harness.tx, &harness.device);
        assert!(numbers.into_iter().eq(0..fits));
        harness.close();
    }
}

/// A bulk that holds: through a ring that is full most of the time, every packet leaves once and in
/// order, whatever order they are completed in; the caller stops making packets when there is no
/// room for them.
#[test]
fn holding() {
    const PACKETS: u64 = 2000;
    let mut rng = Rng(11);
    for (entries, limit) in [(4, 64), (32, 64), (32, 300), (256, 1)] {
        let mut harness = harness(entries);
        let mut bulk = TxBulk::holding(&mut harness.pair.tx, limit);
        let (mut made, mut waited, mut came, mut heads) = (0, 0, Vec::new(), Vec::new());
        while came.len() as u64 != PACKETS {
            // Of one to three fragments: the first may fit when the next does not, and must not be
            // overtaken.
            while made < PACKETS && bulk.room() > 0 {
                bulk.push(numbered(&mut harness.pair.rx, made, 1 + (made % 3) as usize));
                made += 1;
            }
            bulk.flush();
            waited += u64::from(bulk.room() == 0);
            assert_eq!(bulk.stats().sent + bulk.held() as u64, made);
            let (taken, numbers) = take_all(&mut harness.tx, &harness.device);
            came.extend(numbers);
            heads.extend(taken);
            for _ in 0..rng.below(heads.len() as u64 + 1) {
                let head = heads.swap_remove(rng.below(heads.len() as u64) as usize);
                harness.tx.add_used(u32::from(head), 0);
            }
        }
        assert!(came.into_iter().eq(0..PACKETS), "a ring of {entries}");
        assert_eq!((bulk.stats(), bulk.held()), (bulk_stats(PACKETS, 0), 0));
        assert!(waited > 10, "a ring of {entries} was full {waited} times");
        heads.drain(..).for_each(|head| harness.tx.add_used(u32::from(head), 0));
        bulk.flush();
        drop(bulk);
        assert_eq!(harness.pair.tx.stats().completed, PACKETS);
        harness.assert_all_posted(RxMode::Small);
        harness.close();
    }
}

/// A packet that is pushed although there is no room is dropped and counted, not one of those that
/// wait; what can never be sent blocks none of them.
#[test]
fn what_does_not_fit() {
    let mut harness = harness(4);
    let mut bulk = TxBulk::holding(&mut harness.pair.tx, 64);
    for number in 0..100 {
        bulk.push(numbered(&mut harness.pair.rx, number, 1));
    }
    assert_eq!((bulk.stats(), bulk.held(), bulk.room()), (bulk_stats(3, 33), 64, 0));
    let mut came = Vec::new();
    while bulk.held() > 0 {
        let (heads, numbers) = take_all(&mut harness.tx, &harness.device);
        came.extend(numbers);
        heads.into_iter().for_each(|head| harness.tx.add_used(u32::from(head), 0));
        bulk.flush();
    }
    // Three in the ring, 64 held.
    came.extend(take_all(&mut harness.tx, &harness.device).1);
    assert!(came.into_iter().eq(0..67));
    drop(bulk);
    harness.close();

    let mut harness = Harness::new(NetOptions::new(RxMode::Small).ring_size(4).pages(256));
    let mut bulk = TxBulk::holding(&mut harness.pair.tx, 64);
    for number in 0..30 {
        // Every third has more fragments than the ring has entries.
        bulk.push(numbered(&mut harness.pair.rx, number, if number % 3 == 2 { 4 } else { 1 }));
    }
    let mut came = Vec::new();
    bulk.flush();
    while came.len() < 20 {
        let (heads, numbers) = take_all(&mut harness.tx, &harness.device);
        assert!(!heads.is_empty(), "it is stuck after {came:?}");
        came.extend(numbers);
        heads.into_iter().for_each(|head| harness.tx.add_used(u32::from(head), 0));
        bulk.flush();
    }
    assert!(came.into_iter().eq((0..30).filter(|n| n % 3 != 2)));
    assert_eq!((bulk.stats(), bulk.held()), (bulk_stats(20, 10), 0));
    drop(bulk);
    harness.close();
}

/// A device that writes invalid values stops the queue. What waits for it is then dropped, and
/// counted: it would wait for ever.
#[test]
fn a_queue_that_stops_while_packets_wait() {
    let mut harness = harness(4);
    let mut bulk = TxBulk::holding(&mut harness.pair.tx, 64);
    for number in 0..50 {
        bulk.push(numbered(&mut harness.pair.rx, number, 1));
    }
    bulk.flush();
    assert_eq!((bulk.stats(), bulk.held()), (bulk_stats(3, 0), 47));
    harness.tx.add_used(77, 0);
    bulk.flush();
    assert_eq!((bulk.stats(), bulk.held()), (bulk_stats(3, 47), 0));
    assert_eq!(bulk.into_target().stats().stopped, Some(DeviceFault::BadId { id: 77 }));
    harness.close();
}

/// A slow port that accepts its first frame when `gate` is closed.
struct Gated {
    gate: Option<mpsc::Receiver<()>>,
    port: Slow,
}

impl Port for Gated {
    const WANTS_BYTES: bool = Slow::WANTS_BYTES;
    const FEATURES: u64 = Slow::FEATURES;

    fn peek(&mut self) -> Option<&[u8]> {
        self.port.peek()
    }

    fn consume(&mut self) {
        self.port.consume();
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        if let Some(gate) = self.gate.take() {
            gate.recv().unwrap_err();
        }
        self.port.send(wire)
    }
}

/// Frames go from one device of ours to a slower one, through a ring of eight entries. With
/// back-pressure, the receiver takes no more frames than there is room for: all arrive, in order,
/// and what has not been received waits at the first device. The slow device accepts no frame
/// before the bulk is full.
#[test]
fn forwarded_to_a_slow_device() {
    let n = if cfg!(debug_assertions) { 2_000 } else { 20_000 };
    let mut want = frames(n, 1518);
    want.iter_mut().for_each(|f| f[0] = 2);
    let memory = common_memory(4096);
    let ((came, arrived), (open, gate)) = (mpsc::channel(), mpsc::channel());
    let slow = Gated { gate: Some(gate), port: Slow(came) };
    let (mut first, mut second) = (DeviceThread::one(pcap(&want, Play::Once)), DeviceThread::one(slow));
    let mut open = Some(open);
    let (net_a, mut a) = first.probe(memory(RxMode::Small));
    let (net_b, b) = second.probe(memory(RxMode::Small).ring_size(8));
    let QueuePair { rx: far, mut tx } = b.into_iter().next().unwrap();
    let mut program = Forward { bulk: TxBulk::holding(&mut tx, 64), reach: Vec::new(), fail: false };
    let rx = &mut a[0].rx;
    until(|| {
        let budget = program.bulk.room();
        if budget == 0 {
            open = None;
        }
        rx.poll(|poll| poll.receive(budget, &mut program));
        let s = program.bulk.stats();
        assert_eq!(s.dropped, 0);
        s.sent == n as u64 && program.bulk.target().posted() == 0
    });
    for (number, want) in want.iter().enumerate() {
        assert!(arrived.try_recv().unwrap() == *want, "frame {number}");
    }
    drop(program);
    assert!(tx.stats().full > 0);
    drop(tx);
    assert_closed(&far.close().unwrap(), 0);
    a.into_iter().for_each(close_clean);
    drop((net_a, net_b));
}
