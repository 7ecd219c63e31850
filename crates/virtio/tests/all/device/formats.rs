//! The device against a reference driver in every combination of ring features: split and packed
//! rings, event index, indirect tables, in-order batches, mergeable buffers.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use netmem_testing::device::rings::*;
use netmem_testing::device::*;
use netmem_virtio::device::port::{Echo, Gen, Port, Sink};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_INDIRECT, DESC_NEXT, Event, PackedDesc, PackedRing, Position};

/// Every set of ring features.
pub(super) fn combinations() -> impl Iterator<Item = u64> {
    let bits = [feature::RING_PACKED, feature::EVENT_IDX, feature::INDIRECT_DESC, feature::IN_ORDER];
    (0..16usize).map(move |n| bits.iter().enumerate().filter(|(i, _)| n >> i & 1 != 0).map(|(_, bit)| bit).sum())
}

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }
}

fn one_pair() -> Options {
    Options::default()
}

/// Cuts `len` bytes at `addr` into one to `most` parts.
pub(super) fn cut(random: &mut Random, addr: u64, len: usize, most: usize, flags: u16) -> Vec<(u64, u32, u16)> {
    let parts = 1 + random.below(most.min(len));
    let mut left = len;
    (0..parts)
        .map(|i| {
            let n = if i + 1 == parts { left } else { 1 + random.below(left - (parts - i - 1)) };
            left -= n;
            (addr + (len - left - n) as u64, n as u32, flags)
        })
        .collect()
}

/// Frames of every length from the shortest to one longer than a page come back from an echo, with
/// their addresses exchanged and otherwise byte for byte, whatever form the chains have.
#[test]
fn every_length_comes_back_in_every_combination() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for ring in combinations() {
        for merge in [0, feature::MRG_RXBUF] {
            let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
            let mut driver = Driver::connect(&device, PLAIN | merge | ring);
            driver.share_memory();
            let mut rx = Queue::start(&mut driver, 0, 64, ring);
            let mut tx = Queue::start(&mut driver, 1, 64, ring);
            let room = if merge != 0 { 256 } else { 8192 };
            let mut lengths: Vec<usize> = (14..=1600).chain([4000, 4085, 4096, 5000]).collect();
            for i in (1..lengths.len()).rev() {
                lengths.swap(i, random.below(i + 1));
            }
            let (mut sent, mut at, mut back) = (VecDeque::new(), 0, 0);
            let mut frame: Vec<u8> = Vec::new();
            let mut left = 0;
            while back < lengths.len() {
                // Receive buffers, in one part or several.
                while let Some(id) = rx.vacant(4) {
                    let most = if random.below(4) == 0 { 3 } else { 1 };
                    let parts = cut(&mut random, rx.buffer(id), room, most, WRITE);
                    rx.post(&driver.memory, id, &parts, random.below(2) == 0);
                }
                while at < lengths.len() && sent.len() < 24 {
                    let Some(id) = tx.vacant(6) else { break };
                    let mut wire = vec![0; VnetHdr::LEN];
                    wire.extend((0..lengths[at]).map(|_| random.below(256) as u8));
                    driver.memory.write(tx.offset(id), &wire);
                    let parts = cut(&mut random, tx.buffer(id), wire.len(), 5, 0);
                    tx.post(&driver.memory, id, &parts, random.below(2) == 0);
                    sent.push_back(wire);
                    at += 1;
                }
                device.poll();
                tx.take().iter().for_each(|&(_, len)| assert_eq!(len, 0));
                for (id, len) in rx.take() {
                    let got = driver.memory.read(rx.offset(id), len as usize);
                    if left == 0 {
                        left = u16::from_le_bytes([got[10], got[11]]);
                    }
                    frame.extend(got);
                    left -= 1;
                    if left == 0 {
                        let want: Vec<u8> = sent.pop_front().unwrap();
                        let (to, from) = (&want[12..18], &want[18..24]);
                        assert_eq!([&frame[12..18], &frame[18..24]], [from, to], "{ring:#x}");
                        assert_eq!(frame[24..], want[24..], "{ring:#x}");
                        frame.clear();
                        back += 1;
                    }
                }
            }
            assert!(driver.queue_errors().is_empty() && driver.drops().is_empty(), "{ring:#x}");
            driver.hang_up();
        }
    }
}

/// A transmit batch is one used entry where chains are completed in order, and each received frame
/// has its own.
#[test]
fn only_what_is_read_is_batched() {
    for ring in combinations() {
        let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
        let mut driver = Driver::connect(&device, PLAIN | ring);
        driver.share_memory();
        let mut rx = Queue::start(&mut driver, 0, 64, ring);
        let mut tx = Queue::start(&mut driver, 1, 64, ring);
        for n in 0..20 {
            rx.post(&driver.memory, n, &[(rx.buffer(n), 2048, WRITE)], false);
            tx.post(&driver.memory, n, &[(tx.buffer(n), 76, 0)], false);
        }
        device.poll();
        assert_eq!(rx.entries(), vec![76; 20], "{ring:#x}");
        let batched = ring & feature::IN_ORDER != 0;
        assert_eq!(tx.entries().len(), if batched { 1 } else { 20 }, "{ring:#x}");
        assert_eq!((rx.take().len(), tx.take().len()), (20, 20));
        driver.hang_up();
    }
}

/// The device signals once when its position passes the event, also if it jumps over it. A flag
/// turns signals on and off.
#[test]
fn interrupts_come_where_they_are_asked_for() {
    for ring in combinations() {
        let event_idx = ring & feature::EVENT_IDX != 0;
        let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
        let mut driver = Driver::connect(&device, PLAIN | ring);
        driver.share_memory();
        let mut tx = Queue::start(&mut driver, 1, 64, ring);
        let mut send = |tx: &mut Queue, n: usize| {
            for _ in 0..n {
                let id = tx.vacant(1).unwrap();
                tx.post(&driver.memory, id, &[(tx.buffer(id), 76, 0)], false);
            }
            device.poll();
            assert_eq!(tx.take().len(), n);
            tx.calls()
        };
        tx.interrupts(InterruptWish::Never);
        tx.calls();
        assert_eq!(send(&mut tx, 5), 0, "{ring:#x}");
        tx.interrupts(InterruptWish::Always);
        assert_eq!(send(&mut tx, 5), 1, "{ring:#x}");
        if event_idx {
            // Around the ring several times.
            for _ in 0..40 {
                tx.interrupts(InterruptWish::After(7));
                assert_eq!([send(&mut tx, 7), send(&mut tx, 1), send(&mut tx, 20)], [0, 1, 0], "{ring:#x}");
                tx.interrupts(InterruptWish::After(3));
                assert_eq!(
                    [send(&mut tx, 2), send(&mut tx, 11), send(&mut tx, 1)],
                    [0, 1, 0],
                    "jumped over, {ring:#x}"
                );
            }
        }
        driver.hang_up();
    }
}

/// If a driver asks for a signal at a position without the feature, the position is ignored, and
/// the driver gets a signal for each batch.
#[test]
fn an_event_that_was_not_negotiated_is_not_believed() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
    let mut driver = Driver::connect(&device, PLAIN | feature::RING_PACKED);
    driver.share_memory();
    let mut tx = Queue::start(&mut driver, 1, 64, feature::RING_PACKED);
    tx.packed().set_driver_event(Event { position: Position::START.step(40, 64).bits(), flags: Event::AT });
    tx.calls();
    tx.post(&driver.memory, 0, &[(tx.buffer(0), 76, 0)], false);
    device.poll();
    assert_eq!(tx.calls(), 1);
}

/// A device that sleeps is woken by the kick for which it has asked, in every combination.
#[test]
fn a_device_that_sleeps_asks_for_kicks() {
    for ring in combinations() {
        let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
        let mut driver = Driver::connect(&device, PLAIN | ring);
        driver.share_memory();
        let mut rx = Queue::start(&mut driver, 0, 64, ring);
        let mut tx = Queue::start(&mut driver, 1, 64, ring);
        let (stop, control, stats) = (AtomicBool::new(false), device.control(), device.stats());
        std::thread::scope(|s| {
            s.spawn(|| device.run(&stop, netmem_virtio::Spin::default()));
            let _ends = Ends { stop: &stop, control: &control };
            let (mut kicks, mut sleeps) = (0, 0);
            for n in 0..200 {
                if n % 4 == 0 {
                    // It sleeps again after the frame before, or for the first time.
                    until(|| stats.sleeps.load(Relaxed) > sleeps);
                }
                sleeps = stats.sleeps.load(Relaxed);
                let id = rx.vacant(1).unwrap();
                rx.post(&driver.memory, id, &[(rx.buffer(id), 2048, WRITE)], false);
                rx.kick();
                let id = tx.vacant(1).unwrap();
                tx.post(&driver.memory, id, &[(tx.buffer(id), 76, 0)], false);
                kicks += u32::from(tx.kick());
                until(|| !tx.take().is_empty());
                until(|| !rx.take().is_empty());
            }
            assert!(kicks > 0, "{ring:#x}");
        });
        driver.hang_up();
    }
}

/// A frame needs more buffers than there are, and the device sleeps. It asks for a kick behind the
/// buffers that it has, so the driver that adds the missing ones wakes it.
#[test]
fn a_device_that_lacks_buffers_asks_for_a_kick() {
    for ring in combinations().map(|ring| ring | feature::MRG_RXBUF) {
        let mut device = NetDevice::new(one_pair(), |_| Gen::new(1000, None)).unwrap();
        let mut driver = Driver::connect(&device, PLAIN | ring);
        driver.share_memory();
        let mut rx = Queue::start(&mut driver, 0, 16, ring);
        let (stop, control, stats) = (AtomicBool::new(false), device.control(), device.stats());
        std::thread::scope(|s| {
            s.spawn(|| device.run(&stop, netmem_virtio::Spin::NONE));
            let _ends = Ends { stop: &stop, control: &control };
            for _ in 0..30 {
                // 1012 bytes fill three of these.
                for _ in 0..3 {
                    until(|| asleep(&stats) == 1);
                    let id = rx.vacant(1).unwrap();
                    rx.post(&driver.memory, id, &[(rx.buffer(id), 400, WRITE)], false);
                    rx.kick();
                }
                let mut back = Vec::new();
                until(|| {
                    back.extend(rx.take());
                    back.len() == 3
                });
                assert_eq!(back.iter().map(|chain| chain.1).sum::<u32>(), 1012, "{ring:#x}");
            }
        });
        driver.hang_up();
    }
}

/// A device with two pairs, of which the first is attacked on ring `index`: only that ring is
/// stopped, `name` is counted once, the error descriptor is signalled, the ring's words stay as
/// they are, and the other pair still works.
fn attack(features: u64, index: usize, name: &str, attack: impl Fn(&mut Queue, &Driver)) {
    const N: u16 = 64;
    let options = Options { max_pairs: 2, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::connect(&device, PLAIN | feature::MQ | features);
    driver.share_memory();
    let mut queues: Vec<Queue> = (0..4).map(|i| Queue::start(&mut driver, i, N, features)).collect();
    attack(&mut queues[index], &driver);
    poll_until(&mut device, || driver.stats.queue_error(name) == 1);
    assert_eq!(driver.queue_errors(), [(name, 1)]);
    assert_eq!(queues[index].err.read().unwrap(), 1);
    for (i, write) in [(2, WRITE), (3, 0)] {
        let addr = queues[i].buffer(0);
        queues[i].post(&driver.memory, 0, &[(addr, 76, write)], false);
    }
    poll_until(&mut device, || queues[3].take().len() == 1);
    poll_until(&mut device, || queues[2].take() == [(0, 76)]);
    assert!(queues[index].entries().is_empty(), "{name}");
    assert_eq!(driver.queue_errors(), [(name, 1)]);
    driver.hang_up();
}

/// The same bad chain towards the driver and from it. `parts` gets the flag of the ring's proper
/// direction and the address of a buffer.
fn bad_chain(features: u64, name: &str, parts: impl Fn(u16, u64) -> Vec<(u64, u32, u16)>) {
    for (index, write) in [(0, WRITE), (1, 0)] {
        attack(features, index, name, |q, _| {
            let parts = parts(write, q.buffer(0));
            q.post_as_is(0, &parts);
        });
    }
}

/// Chains of a packed ring are checked as those of a split ring are.
#[test]
fn packed_chains_are_validated() {
    let packed = feature::RING_PACKED;
    let end = GUEST + MEMORY as u64;
    for addr in [0, GUEST - 1, end - 1, end, u64::MAX, USER] {
        bad_chain(packed, "outside_table", |write, _| vec![(addr, 2048, write)]);
        bad_chain(packed, "outside_table", |write, good| vec![(good, 12, write), (addr, 2048, write)]);
    }
    bad_chain(packed, "outside_table", |write, good| vec![(good, u32::MAX, write)]);
    bad_chain(packed, "zero_length", |write, good| vec![(good, 0, write)]);
    bad_chain(packed, "zero_length", |write, good| vec![(good, 12, write), (good, 0, write)]);
    bad_chain(packed, "wrong_direction", |write, good| vec![(good, 2048, write ^ WRITE)]);
    bad_chain(packed, "wrong_direction", |write, good| vec![(good, 12, write), (good, 2048, write ^ WRITE)]);
    bad_chain(packed, "indirect", |_, good| vec![(good, 64, DESC_INDIRECT)]);
    bad_chain(packed, "indirect", |write, good| vec![(good, 12, write), (good, 64, DESC_INDIRECT)]);
}

/// Ids that no descriptor of the ring has, chains that go around the whole ring, and chains whose
/// end is not there.
#[test]
fn packed_rings_are_validated() {
    let put = |q: &Queue, n: u16, id: u16, flags: u16| {
        let at = q.position().step(n, 64);
        // Long enough for a frame: also on the path that pops such buffers in groups.
        q.packed()
            .set_desc(at.offset(), PackedDesc { addr: q.buffer(0), len: 2048, id, flags: flags | at.available() });
    };
    for (index, write) in [(0, WRITE), (1, 0)] {
        for id in [64, 65, u16::MAX] {
            attack(feature::RING_PACKED, index, "head_out_of_range", |q, _| put(q, 0, id, write));
            attack(feature::RING_PACKED, index, "head_out_of_range", |q, _| {
                put(q, 1, id, write);
                put(q, 0, 0, write | DESC_NEXT);
            });
        }
        attack(feature::RING_PACKED, index, "chain_too_long", |q, _| {
            (0..64).rev().for_each(|n| put(q, n, 0, write | DESC_NEXT));
        });
        for n in [1, 2, 63] {
            attack(feature::RING_PACKED, index, "unfinished", |q, _| {
                (0..n).rev().for_each(|n| put(q, n, 0, write | DESC_NEXT));
            });
        }
    }
}

/// Two chains may have one id: both are completed.
#[test]
fn an_id_may_come_twice() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
    let mut driver = Driver::connect(&device, PLAIN | feature::RING_PACKED);
    driver.share_memory();
    let mut tx = Queue::start(&mut driver, 1, 64, feature::RING_PACKED);
    for _ in 0..2 {
        tx.post_as_is(5, &[(tx.buffer(5), 76, 0)]);
    }
    poll_until(&mut device, || tx.entries().len() == 2);
    assert_eq!(tx.take(), [(5, 0), (5, 0)]);
}

/// Makes the ring's next descriptor available again, of the next turn too, whenever the device has
/// read a frame.
struct Again {
    ring: PackedRing,
    at: Position,
    addr: u64,
}

impl Port for Again {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = 0;

    fn peek(&mut self) -> Option<&[u8]> {
        None
    }

    fn consume(&mut self) {}

    fn send(&mut self, _: &[u8]) -> bool {
        let d = PackedDesc { addr: self.addr, len: 76, id: 3, flags: self.at.available() };
        self.ring.set_desc(self.at.offset(), d);
        self.at = self.at.step(1, self.ring.size());
        true
    }
}

/// A driver makes descriptors available before they were used, while the device is in its pass: the
/// device pops more of them than the ring has. A batch does not become longer than the ring, and
/// the driver is notified.
#[test]
fn more_is_available_than_the_ring_has() {
    for ring in [0, feature::IN_ORDER, feature::EVENT_IDX].map(|other| feature::RING_PACKED | other) {
        // What is published does not end at the end of the ring.
        const N: u16 = 12;
        let memory = Memory::new();
        // SAFETY: the memory of ring 1, aligned, with room for it; it stays until the end of the
        // test.
        let words = unsafe { PackedRing::from_layout(memory.base.add(RING_ROOM), N) };
        let mut driver = Driver { memory, ..Driver::unconnected() };
        let again = Again { ring: words, at: Position::START, addr: GUEST + BUFFERS as u64 };
        let mut again = Some(again);
        let mut device = NetDevice::new(one_pair(), |_| Ok(again.take().unwrap())).unwrap();
        driver.stats = device.stats();
        driver.reconnect(&device.control(), PLAIN | ring);
        driver.share_memory();
        let tx = Queue::start(&mut driver, 1, N, ring);
        let wanted = Event { position: Position::START.step(5, N).bits(), flags: Event::AT };
        tx.packed().set_driver_event(wanted);
        // The first one.
        device.ports()[0].send(&[]);
        assert!(device.poll() > usize::from(N), "{ring:#x}: more than the ring has");
        assert_eq!(tx.calls(), 1, "{ring:#x}: every event was passed");
        assert_eq!(driver.queue_errors(), []);
        driver.hang_up();
    }
}

#[test]
fn indirect_tables_are_validated() {
    for format in [0, feature::RING_PACKED] {
        let features = format | feature::INDIRECT_DESC;
        let packed = format != 0;
        // A table that begins 4096 bytes into the buffer.
        let table = |q: &Queue, d: &Driver, n: usize, addr: u64, len: u32, flags: u16, next: u16| {
            let (a, b) = if packed { (next, flags) } else { (flags, next) };
            let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &a.to_le_bytes(), &b.to_le_bytes()].concat();
            d.memory.write(q.offset(0) + 4096 + 16 * n, &bytes);
        };
        for len in [0, 1, 8, 15, 17, 16 * 65, 1 << 20, u32::MAX - 15] {
            bad_chain(features, "indirect_length", |_, good| vec![(good + 4096, len, DESC_INDIRECT)]);
            bad_chain(features, "indirect_length", |w, good| vec![(good, 12, w), (good, len, DESC_INDIRECT)]);
        }
        let end = GUEST + MEMORY as u64;
        for addr in [0, GUEST - 1, end - 16, end, u64::MAX, u64::MAX - 31] {
            bad_chain(features, "outside_table", |_, _| vec![(addr, 32, DESC_INDIRECT)]);
        }
        bad_chain(features, "indirect_next", |w, good| vec![(good, 32, DESC_INDIRECT), (good, 12, w)]);
        for (index, write) in [(0, WRITE), (1, 0)] {
            let with = |name: &str, entry: &dyn Fn(u64) -> (u64, u32, u16, u16)| {
                attack(features, index, name, |q, d| {
                    let (addr, len, flags, next) = entry(q.buffer(0));
                    table(q, d, 0, q.buffer(0), 12, write | DESC_NEXT, 1);
                    table(q, d, 1, addr, len, flags, next);
                    q.post_as_is(0, &[(q.buffer(0) + 4096, 32, DESC_INDIRECT)]);
                });
            };
            with("indirect_nested", &|good| (good, 32, DESC_INDIRECT, 0));
            with("zero_length", &|good| (good, 0, write, 0));
            if index == 0 {
                with("wrong_direction", &|good| (good, 64, 0, 0));
            }
            with("outside_table", &|_| (end - 1, 2, write, 0));
            if !packed {
                with("chain_too_long", &|good| (good, 64, write | DESC_NEXT, 0));
                with("next_out_of_range", &|good| (good, 64, write | DESC_NEXT, 2));
            }
        }
    }
}

/// DPDK's virtio_user calls some buffers in the tables of its packed transmit rings writable. They
/// are read.
#[test]
fn a_table_that_is_only_read_may_call_buffers_writable() {
    for format in [0, feature::RING_PACKED] {
        let features = format | feature::INDIRECT_DESC;
        let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
        let mut driver = Driver::connect(&device, PLAIN | features);
        driver.share_memory();
        let mut tx = Queue::start(&mut driver, 1, 64, features);
        let addr = tx.buffer(0);
        tx.post(&driver.memory, 0, &[(addr, 12, WRITE), (addr + 12, 64, 0), (addr + 76, 64, WRITE)], true);
        poll_until(&mut device, || tx.take() == [(0, 0)]);
        assert_eq!(driver.stats.tx_bytes.load(Relaxed), 128);
        assert!(driver.queue_errors().is_empty());
        driver.hang_up();
    }
}

/// A table may lie across two regions whose addresses meet, and a chain may end with one after
/// other descriptors.
#[test]
fn a_table_across_two_regions() {
    for format in [0, feature::RING_PACKED] {
        let features = format | feature::INDIRECT_DESC;
        let mut device = NetDevice::new(one_pair(), |_| Gen::new(1000, Some(1))).unwrap();
        let want = device.ports()[0].frame().to_vec();
        let mut driver = Driver::connect(&device, PLAIN | features);
        let half = MEMORY as u64 / 2;
        let low = region(&driver.memory.file, GUEST, USER, half, 0);
        let high = region(&driver.memory.file, GUEST + half, USER + half, half, half);
        driver.front.set_mem_table(&[low, high]).unwrap();
        let mut rx = Queue::start(&mut driver, 0, 64, features);
        let at = half - 24;
        for (n, (offset, len)) in [(100, 500u32), (600, 1000)].into_iter().enumerate() {
            let addr = rx.buffer(0) + offset;
            let (flags, next) = if n == 0 && format == 0 { (WRITE | DESC_NEXT, 1u16) } else { (WRITE, 0) };
            let (a, b) = if format == 0 { (flags, next) } else { (next, flags) };
            let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &a.to_le_bytes(), &b.to_le_bytes()].concat();
            driver.memory.write(at as usize + 16 * n, &bytes);
        }
        // The flag of the direction is ignored in a descriptor that refers to a table.
        rx.post_as_is(0, &[(rx.buffer(0), 100, WRITE), (GUEST + at, 32, DESC_INDIRECT | WRITE)]);
        poll_until(&mut device, || rx.take() == [(0, 1012)]);
        assert_eq!(driver.memory.read(rx.offset(0) + 12, 1000), want);
        driver.hang_up();
    }
}

/// A ring stops and starts at the same position, anywhere in the ring, and with either wrap
/// counter. A front end may use only one half of a packed ring's base.
#[test]
fn a_ring_goes_on_where_it_stopped() {
    for (ring, half) in combinations().flat_map(|ring| [(ring, false), (ring, true)]) {
        let packed = ring & feature::RING_PACKED != 0;
        // A packed ring may have any size.
        let size = if packed { 60 } else { 64 };
        let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
        let mut driver = Driver::connect(&device, PLAIN | ring);
        driver.share_memory();
        let mut tx = Queue::start(&mut driver, 1, size, ring);
        for n in 0..30u32 {
            for _ in 0..7 {
                let id = tx.vacant(2).unwrap();
                tx.post(&driver.memory, id, &[(tx.buffer(id), 12, 0), (tx.buffer(id), 64, 0)], false);
            }
            poll_until(&mut device, || !tx.entries().is_empty());
            assert_eq!(tx.take().len(), 7, "{ring:#x}");
            let base = driver.front.get_vring_base(1).unwrap();
            if packed {
                let at = u32::from(tx.position().bits());
                assert_eq!(base, at | at << 16);
            } else {
                assert_eq!(base, 7 * (n + 1));
            }
            tx.describe(&driver, if half { base & 0xffff } else { base });
        }
        assert_eq!(frames(&driver.stats).1, 210);
        driver.hang_up();
    }
}

/// A used position whose bits are all 0 is one, if the ring shows that nothing was used behind it:
/// another back end popped three chains, completed none, and stopped.
#[test]
fn a_used_position_of_zero() {
    const SIZE: u16 = 8;
    let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
    for taken in [1, 3, SIZE - 1] {
        let ring = feature::RING_PACKED;
        let mut driver = Driver::connect(&device, PLAIN | ring);
        driver.share_memory();
        let mut tx = Queue::start(&mut driver, 1, SIZE, ring);
        let post = |tx: &mut Queue, id| tx.post_as_is(id, &[(tx.buffer(id), 76, 0)]);
        (0..SIZE).for_each(|id| post(&mut tx, id));
        poll_until(&mut device, || tx.packed().used_desc(0).is_used(Position::START));
        driver.front.get_vring_base(1).unwrap();
        // Each chain has a used descriptor, as other back ends have it.
        for n in 0..SIZE {
            let at = Position::START.step(n, SIZE);
            tx.packed().set_used_desc(n, PackedDesc { addr: 0, len: 0, id: n, flags: at.used() });
        }
        assert_eq!(tx.take().len(), usize::from(SIZE));
        (0..taken).for_each(|id| post(&mut tx, id));
        tx.describe(&driver, u32::from(tx.position().bits()));
        post(&mut tx, 7);
        let zero = Position::from_bits(0);
        poll_until(&mut device, || !tx.packed().used_desc(0).is_available(zero) || used_at(&tx, taken));
        let d = tx.packed().used_desc(0);
        assert!(d.is_used(zero) && d.id == 7, "{taken} taken: {d:?}");
        driver.hang_up();
    }
}

/// Whether the device has used the descriptor at `offset` of the second turn.
fn used_at(queue: &Queue, offset: u16) -> bool {
    queue.packed().used_desc(offset).is_used(Position::from_bits(offset))
}

/// A position that the ring does not have, and a size that only a packed ring can have.
#[test]
fn a_base_and_a_size_are_validated() {
    let device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
    for (features, size, base, good) in [
        (feature::RING_PACKED, 60, 59 | 59 << 16, true),
        (feature::RING_PACKED, 60, 60 | 59 << 16, false),
        (feature::RING_PACKED, 60, 59 | 60 << 16, false),
        (feature::RING_PACKED, 60, 0x8000 | 59, true),
        (0, 64, 0x1_0000, false),
        (0, 60, 0, false),
    ] {
        let driver = Driver::connect(&device, PLAIN | features);
        driver.share_memory();
        let at = Addresses { desc: USER, used: USER + 4096, avail: USER + 8192, log: None };
        let started = driver
            .front
            .set_vring_num(0, size)
            .and_then(|()| driver.front.set_vring_base_bits(0, base))
            .and_then(|()| driver.front.set_vring_addr(0, at))
            .and_then(|()| driver.front.set_vring_kick(0, &EventFd::new()));
        assert_eq!(started.is_ok(), good, "{features:#x} {size} {base:#x}");
        driver.hang_up();
    }
}

/// Random words in packed rings, tables and events: each ring that is stopped has a named fault,
/// and the device goes on.
#[test]
fn noise_in_packed_rings() {
    let features = feature::RING_PACKED | feature::EVENT_IDX | feature::INDIRECT_DESC | feature::MRG_RXBUF;
    let mut random = Random(0x0bad_cafe_0bad_cafe);
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(2000, None)).unwrap();
    let mut driver = Driver::connect(&device, PLAIN | features);
    driver.share_memory();
    let mut queues: Vec<Queue> = (0..2).map(|i| Queue::start(&mut driver, i, 64, features)).collect();
    let mut at = [Position::START; 2];
    for _ in 0..6000 {
        let i = random.below(2);
        let q = &queues[i];
        driver.memory.write(q.offset(0), &random.below(usize::MAX).to_le_bytes().repeat(8));
        for _ in 0..random.below(6) {
            // Mostly plausible, so that the walks get somewhere.
            let odd =
                |n: u16, random: &mut Random| if random.below(20) == 0 { random.below(1 << 16) as u16 } else { n };
            let addr = match random.below(8) {
                0 => random.below(usize::MAX) as u64,
                1 => GUEST + MEMORY as u64 - random.below(100) as u64,
                _ => q.buffer(random.below(60) as u16),
            };
            let kind = [0, 0, 0, WRITE, DESC_INDIRECT][random.below(5)] ^ if i == 0 { WRITE } else { 0 };
            let next = if random.below(3) == 0 { DESC_NEXT } else { 0 };
            let flags = odd(kind | next | at[i].available(), &mut random);
            let len = if random.below(3) == 0 { 16 * random.below(5) as u32 } else { random.below(3000) as u32 };
            let id = odd(random.below(64) as u16, &mut random);
            q.packed().set_desc(at[i].offset(), PackedDesc { addr, len, id, flags });
            at[i] = at[i].step(1, 64);
        }
        let position = random.below(1 << 16) as u16;
        q.packed().set_driver_event(Event { position, flags: random.below(8) as u16 });
        device.poll();
        device.poll();
        for (i, q) in queues.iter_mut().enumerate() {
            if q.err.read().is_ok() {
                let base = driver.front.get_vring_base(i).unwrap();
                at[i] = Position::from_bits(base as u16);
                (0..64)
                    .for_each(|n| q.packed().set_desc(n, PackedDesc { flags: at[i].used(), ..PackedDesc::default() }));
                q.describe(&driver, base);
            }
        }
    }
    let seen = driver.queue_errors();
    let named: Vec<_> = seen.iter().map(|e| e.0).collect();
    for name in
        ["head_out_of_range", "indirect_length", "indirect_next", "unfinished", "zero_length", "wrong_direction"]
    {
        assert!(named.contains(&name), "{name} in {seen:?}");
    }
    assert!(named.contains(&"outside_table") && named.contains(&"indirect_nested"), "{seen:?}");
    driver.hang_up();
}
