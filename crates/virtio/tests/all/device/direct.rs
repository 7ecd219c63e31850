//! Frames from queue pair to queue pair by one copy: two devices of this process, each with a front
//! end of its own, and a cable between them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use netmem_netem::LinkOptions;
use netmem_pool::sigbus;
use netmem_testing::device::rings::*;
use netmem_testing::device::*;
use netmem_virtio::device::port::{Cross, LinkStats, Linked};
use netmem_virtio::device::{DropReason, NetDevice, Options, Stats};
use netmem_virtio::net::{VnetHdr, feature};
use rustix::fs::ftruncate;

use super::formats::{Random, combinations, cut};
use super::migration::LOG;
use super::shared_file::SharedFile;

/// Entries of a ring.
const ENTRIES: u16 = 64;

/// A device, its front end, and the rings of its pair.
pub(super) struct Guest {
    pub(super) device: NetDevice<Cross>,
    pub(super) driver: Driver,
    pub(super) rx: Queue,
    pub(super) tx: Queue,
}

impl Guest {
    fn new(port: Cross, features: u64) -> Self {
        Self::of(Options::default(), ENTRIES, port, features)
    }

    fn of(options: Options, entries: u16, port: Cross, features: u64) -> Self {
        let mut port = Some(port);
        let device = NetDevice::new(options, |_| Ok(port.take().unwrap())).unwrap();
        let mut driver = Driver::connect(&device, features);
        driver.share_memory();
        let [rx, tx] = [0, 1].map(|ring| Queue::start(&mut driver, ring, entries, features));
        Self { device, driver, rx, tx }
    }

    fn count(&self, what: fn(&Stats) -> &AtomicU64) -> u64 {
        what(&self.driver.stats).load(Relaxed)
    }

    /// Frames that were copied directly, of those that were sent.
    pub(super) fn sent(&self) -> (u64, u64) {
        (self.count(|s| &s.tx_direct), self.count(|s| &s.tx_frames))
    }

    /// Sends `wire` in a chain of one buffer. Returns the chain's id.
    pub(super) fn send(&mut self, wire: &[u8]) -> u16 {
        self.send_in(wire, &[])
    }

    /// Sends `wire` in a chain of buffers of these lengths, and one for the rest.
    pub(super) fn send_in(&mut self, wire: &[u8], lens: &[usize]) -> u16 {
        let id = self.tx.vacant(lens.len() + 1).expect("room");
        self.driver.memory.write(self.tx.offset(id), wire);
        let rest = wire.len() - lens.iter().sum::<usize>();
        let mut at = self.tx.buffer(id);
        let parts = lens.iter().chain([&rest]).map(|&len| {
            at += len as u64;
            (at - len as u64, len as u32, 0)
        });
        self.tx.post(&self.driver.memory, id, &parts.collect::<Vec<_>>(), false);
        id
    }

    /// Posts `count` buffers of `len` bytes.
    pub(super) fn post(&mut self, count: usize, len: u32) {
        for _ in 0..count {
            let id = self.rx.vacant(1).expect("room");
            self.rx.post(&self.driver.memory, id, &[(self.rx.buffer(id), len, WRITE)], false);
        }
    }

    /// The bytes of chains that came back.
    pub(super) fn received(&mut self) -> Vec<Vec<u8>> {
        let taken = self.rx.take();
        taken.iter().map(|&(id, len)| self.driver.memory.read(self.rx.offset(id), len as usize)).collect()
    }

    fn assert_clean(&self) {
        assert_eq!((self.driver.queue_errors(), self.driver.drops()), (vec![], vec![]));
    }
}

/// Two guests, whose ports know each other.
pub(super) fn linked(features: [u64; 2]) -> [Guest; 2] {
    linked_by(features, |_, port, features| Guest::new(port, features))
}

/// The same, of which `make` makes each.
fn linked_by(features: [u64; 2], make: impl Fn(usize, Cross, u64) -> Guest) -> [Guest; 2] {
    let mut ends = Cross::cable().into_iter();
    let mut guests = [0, 1].map(|n| make(n, ends.next().unwrap(), features[n]));
    for _ in 0..2 {
        guests.iter_mut().for_each(|guest| _ = guest.device.poll());
    }
    guests
}

/// A frame in wire form: the header, its number, and bytes that follow from it.
pub(super) fn wire(header: VnetHdr, n: usize, len: usize) -> Vec<u8> {
    let mut wire = header.to_bytes().to_vec();
    wire.extend((n as u32).to_le_bytes());
    wire.extend((4..len).map(|i| (i * 7 + n * 31) as u8));
    wire
}

/// What the receiver gets of it, in one buffer.
pub(super) fn delivered(mut wire: Vec<u8>) -> Vec<u8> {
    wire[10] = 1;
    wire
}

/// Two guests on one cable, and two on another. When the users of two devices exchange their ends,
/// each frame goes to the guest at the other end of its cable as it is now, and never to that of an
/// earlier place: not directly, and not by way of the cable; also not while one of the two devices
/// has not been polled again.
#[test]
fn frames_follow_the_ends_of_exchanged_cables() {
    for keep_sleeping in [false, true] {
        let [mut a, mut b] = linked([PLAIN; 2]);
        let [mut c, mut d] = linked([PLAIN; 2]);
        let frame = |n| wire(VnetHdr::PLAIN, n, 100);
        [&mut a, &mut b, &mut c, &mut d].into_iter().for_each(|guest| guest.post(8, 2048));
        a.send(&frame(1));
        until(|| a.device.poll() > 0);
        assert_eq!((a.sent(), b.received()), ((1, 1), vec![delivered(frame(1))]), "it is copied directly");

        // The ends of b and d.
        std::mem::swap(&mut b.device.ports()[0], &mut d.device.ports()[0]);
        if !keep_sleeping {
            b.device.poll();
        }
        a.send(&frame(2));
        c.send(&frame(3));
        for _ in 0..4 {
            a.device.poll();
            c.device.poll();
        }
        assert_eq!(b.received(), if keep_sleeping { vec![] } else { vec![delivered(frame(3))] });
        assert_eq!(d.received(), Vec::<Vec<u8>>::new(), "it has not been polled");
        for _ in 0..4 {
            [&mut b, &mut d, &mut a, &mut c].into_iter().for_each(|guest| _ = guest.device.poll());
        }
        if keep_sleeping {
            assert_eq!(b.received(), [delivered(frame(3))]);
        }
        assert_eq!(d.received(), [delivered(frame(2))]);
        let direct = a.sent().0;
        a.send(&frame(4));
        until(|| a.device.poll() > 0);
        assert_eq!((a.sent().0, d.received()), (direct + 1, vec![delivered(frame(4))]), "directly again");
        [a, b, c, d].iter().for_each(Guest::assert_clean);
    }
}

/// Frames of every length from the shortest to one longer than a page arrive whole and in order,
/// whatever forms the chains of both have, in every combination of ring features. Only the sender's
/// device is polled.
#[test]
fn every_length_is_copied_once_in_every_combination() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let receivers: Vec<_> = combinations().collect();
    for (n, ring) in combinations().enumerate() {
        for merge in [0, feature::MRG_RXBUF] {
            let features = [ring, merge | receivers[(n * 5 + 3) % 16]].map(|ring| PLAIN | ring);
            let [mut a, mut b] = linked(features);
            let room = if merge != 0 { 256 } else { 8192 };
            let mut lengths: Vec<usize> = (14..=1600).step_by(3).chain([4000, 4085, 4096, 5000]).collect();
            for i in (1..lengths.len()).rev() {
                lengths.swap(i, random.below(i + 1));
            }
            let (mut sent, mut at, mut back) = (VecDeque::new(), 0, 0);
            let (mut frame, mut left): (Vec<u8>, _) = (Vec::new(), 0);
            // Whole phases of one form each, so that groups are copied, too.
            let mut phase = 0;
            until(|| {
                phase += 1;
                let several = phase / 8 % 2 == 1;
                while let Some(id) = b.rx.vacant(4) {
                    let most = if several && random.below(2) == 0 { 3 } else { 1 };
                    let parts = cut(&mut random, b.rx.buffer(id), room, most, WRITE);
                    b.rx.post(&b.driver.memory, id, &parts, several && random.below(2) == 0);
                }
                while at < lengths.len() && sent.len() < 2 {
                    let Some(id) = a.tx.vacant(6) else { break };
                    let wire = wire(VnetHdr::PLAIN, at, lengths[at]);
                    a.driver.memory.write(a.tx.offset(id), &wire);
                    let most = if several { 5 } else { 1 };
                    let parts = cut(&mut random, a.tx.buffer(id), wire.len(), most, 0);
                    a.tx.post(&a.driver.memory, id, &parts, several && random.below(2) == 0);
                    sent.push_back(wire);
                    at += 1;
                }
                a.device.poll();
                a.tx.take().iter().for_each(|&(_, len)| assert_eq!(len, 0));
                for (id, len) in b.rx.take() {
                    assert!(len as usize <= room, "{len} bytes in a buffer of {room}");
                    let got = b.driver.memory.read(b.rx.offset(id), len as usize);
                    if left == 0 {
                        left = u16::from_le_bytes([got[10], got[11]]);
                    }
                    frame.extend(got);
                    left -= 1;
                    if left == 0 {
                        let want: Vec<u8> = sent.pop_front().unwrap();
                        assert_eq!(frame[..10], want[..10], "{features:x?}");
                        assert_eq!(frame[12..], want[12..], "{features:x?}");
                        frame.clear();
                        back += 1;
                    }
                }
                back == lengths.len()
            });
            let frames = lengths.len() as u64;
            assert_eq!(a.sent(), (frames, frames), "{features:x?}");
            assert_eq!(b.count(|s| &s.rx_frames), frames);
            assert_eq!(b.count(|s| &s.rx_bytes), a.count(|s| &s.tx_bytes));
            assert_eq!(b.count(|s| &s.rx_bytes), lengths.iter().sum::<usize>() as u64);
            a.assert_clean();
            b.assert_clean();
        }
    }
}

/// Large frames, of many buffers on both sides, up to the longest.
#[test]
fn large_frames() {
    let [mut a, mut b] = linked([PLAIN, MERGEABLE]);
    for (n, len) in [60_000, 65_549, 30_000, 65_553].into_iter().enumerate() {
        b.post(ENTRIES.into(), 2000);
        let wire = wire(VnetHdr::PLAIN, n, len);
        let id = a.tx.vacant(20).unwrap();
        a.driver.memory.write(a.tx.offset(id), &wire);
        let pieces = wire.len().div_ceil(4000);
        let parts = (0..pieces).map(|i| (a.tx.buffer(id) + 4000 * i as u64, 4000.min(wire.len() - 4000 * i) as u32, 0));
        a.tx.post(&a.driver.memory, id, &parts.collect::<Vec<_>>(), false);
        a.device.poll();
        assert_eq!(a.tx.take(), [(id, 0)]);
        let chains = b.received();
        assert_eq!(chains.len(), wire.len().div_ceil(2000));
        assert_eq!(usize::from(u16::from_le_bytes([chains[0][10], chains[0][11]])), chains.len());
        assert!(chains.concat()[12..] == wire[12..], "{len} bytes");
        // The rest of the buffers is used up by frames of one buffer.
        for n in chains.len()..ENTRIES.into() {
            a.send(&super::direct::wire(VnetHdr::PLAIN, n, 60));
            a.device.poll();
            a.tx.take();
        }
        assert_eq!(b.received().len(), usize::from(ENTRIES) - chains.len());
    }
    let (direct, sent) = a.sent();
    assert_eq!(direct, sent);
    a.assert_clean();
    b.assert_clean();
}

/// The receiver's buffers come late and in bursts, the receiver's device is polled now and then,
/// and some frames need work in software. Frames go directly and through the cable, all arrive, and
/// none overtakes another.
#[test]
fn no_frame_overtakes_another() {
    let mut random = Random(77);
    let [mut a, mut b] = linked([PLAIN | feature::CSUM, PLAIN]);
    let (mut next, mut came) = (0, 0);
    let sum = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..VnetHdr::PLAIN };
    until(|| {
        for _ in 0..random.below(20) {
            let header = if random.below(50) == 0 { sum } else { VnetHdr::PLAIN };
            if a.tx.vacant(1).is_some() {
                a.send(&wire(header, next, 60 + random.below(900)));
                next += 1;
            }
        }
        if random.below(3) == 0 {
            let count = random.below(80);
            for _ in 0..count {
                if b.rx.vacant(1).is_some() {
                    b.post(1, 2048);
                }
            }
        }
        for _ in 0..random.below(3) {
            b.device.poll();
        }
        a.device.poll();
        a.tx.take();
        for got in b.received() {
            assert_eq!(u32::from_le_bytes(*got[12..].first_chunk().unwrap()), came);
            assert_eq!(VnetHdr::from_bytes(*got.first_chunk().unwrap()), VnetHdr { num_buffers: 1, ..VnetHdr::PLAIN });
            came += 1;
        }
        came >= 20_000
    });
    let (direct, sent) = a.sent();
    assert!(direct > 1000 && sent - direct > 1000, "{direct} of {sent}");
    assert!(b.count(|s| &s.checksummed) > 100);
    a.assert_clean();
    b.assert_clean();
}

/// Frames of a few buffers arrive as they were sent and in their order, whatever their buffers are,
/// between frames of one buffer, and where the receiver's buffers are short.
#[test]
fn frames_of_a_few_buffers() {
    let shapes: [&[usize]; 9] =
        [&[12], &[78, 700], &[78], &[12, 1, 1], &[11], &[6, 6, 30], &[13, 20, 30, 40], &[], &[78, 500, 1]];
    for (sender, receiver) in combinations().flat_map(|sender| [0, feature::RING_PACKED].map(|to| (sender, to))) {
        let [mut a, mut b] = linked([PLAIN | sender, MERGEABLE | receiver]);
        let (mut sent, mut got, mut arrived) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..20 {
            for n in 0..9 {
                let wire = wire(VnetHdr::PLAIN, sent.len(), 1000 + 37 * n);
                let shape = shapes[if round % 3 == 0 { 1 } else { (round * 5 + n) % shapes.len() }];
                sent.push((a.send_in(&wire, shape), wire));
            }
            for n in 0..14 {
                b.post(1, if round % 4 == 1 && n % 5 == 3 { 700 } else { 2048 });
            }
            for _ in 0..3 {
                a.device.poll();
            }
            got.extend(a.tx.take());
            let mut frame: Vec<u8> = Vec::new();
            for chain in b.received() {
                frame.extend(chain);
                if frame.len() >= 1012 {
                    arrived.push(std::mem::take(&mut frame));
                }
            }
            // What is left of the buffers is used up.
            until(|| {
                if b.rx.vacant(usize::from(ENTRIES)).is_some() {
                    return true;
                }
                a.send(&wire(VnetHdr::PLAIN, 0, 60));
                a.device.poll();
                a.tx.take();
                b.received();
                false
            });
        }
        assert_eq!(got, sent.iter().map(|&(id, _)| (id, 0)).collect::<Vec<_>>(), "{sender:#x} {receiver:#x}");
        assert_eq!(arrived.len(), sent.len());
        for (arrived, (_, sent)) in arrived.iter().zip(&sent) {
            assert_eq!((arrived[..10] == sent[..10], arrived[12..] == sent[12..]), (true, true), "{sender:#x}");
        }
        let (direct, all) = a.sent();
        assert_eq!(direct, all);
        a.assert_clean();
        b.assert_clean();
    }
}

/// What a header may ask for is what the sender has negotiated. A header that the receiver does not
/// accept is changed in software, and one that it accepts arrives as it is. Frames are in one
/// buffer, or in two.
#[test]
fn headers() {
    let sum = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..VnetHdr::PLAIN };
    let nonsense = VnetHdr { csum_start: 9000, ..sum };
    let segments = VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 500, hdr_len: 54, ..sum };
    let sends = [PLAIN, PLAIN | feature::CSUM];
    let receives = [PLAIN, PLAIN | feature::GUEST_CSUM];
    let pairs = sends.into_iter().flat_map(|sender| receives.map(|receiver| (sender, receiver)));
    for ((sender, receiver), parts) in pairs.flat_map(|pair| [(pair, &[][..]), (pair, &[66])]) {
        let [mut a, mut b] = linked([sender, receiver]);
        b.post(ENTRIES.into(), 2048);
        for (n, header) in [VnetHdr::PLAIN, sum, nonsense, segments, VnetHdr::PLAIN].into_iter().enumerate() {
            a.send_in(&wire(header, n, 200), parts);
        }
        for _ in 0..8 {
            a.device.poll();
            b.device.poll();
        }
        assert_eq!(a.tx.take().len(), 5);
        let got: Vec<_> =
            b.received().iter().map(|w| (w[12], VnetHdr::from_bytes(*w.first_chunk().unwrap()))).collect();
        let plain = VnetHdr { num_buffers: 1, ..VnetHdr::PLAIN };
        let drops = a.driver.drops();
        if sender == PLAIN {
            // Without offloads the header has no meaning.
            assert_eq!(got, [0, 1, 2, 3, 4].map(|n| (n, plain)));
            assert_eq!((drops, a.sent()), (vec![], (5, 5)));
        } else {
            let second = if receiver == PLAIN { plain } else { VnetHdr { num_buffers: 1, ..sum } };
            assert_eq!(got, [(0, plain), (1, second), (4, plain)]);
            assert_eq!(drops, [("bad_header", 1), ("not_negotiated", 1)]);
        }
        assert_eq!(b.driver.drops(), []);
    }
}

/// Frames that are too short or too long are dropped as ever, whatever is before them and behind.
#[test]
fn lengths_that_no_frame_has() {
    let [mut a, mut b] = linked([PLAIN, MERGEABLE]);
    let lens = [(13, DropReason::Runt), (0, DropReason::Runt), (70_000, DropReason::TooLong)];
    for ((len, reason), parts) in lens.into_iter().flat_map(|len| [(len, &[][..]), (len, &[30])]) {
        b.post(ENTRIES.into(), 2048);
        a.send_in(&wire(VnetHdr::PLAIN, 1, 60), parts);
        let (id, first) = (a.tx.vacant(2).unwrap(), a.tx.buffer(0));
        // In two buffers, if the others are, and if there are bytes for both.
        let second = if parts.is_empty() { 0 } else { len / 2 };
        let pieces = [(first, 12 + len - second, 0), (first, second, 0)];
        a.tx.post(&a.driver.memory, id, &pieces[..1 + usize::from(second > 0)], false);
        a.send_in(&wire(VnetHdr::PLAIN, 2, 60), parts);
        for _ in 0..4 {
            a.device.poll();
            b.device.poll();
        }
        assert_eq!(a.tx.take().len(), 3);
        assert_eq!(b.received(), [1, 2].map(|n| delivered(wire(VnetHdr::PLAIN, n, 60))));
        assert!(a.driver.stats.dropped(reason) > 0);
        // The buffers that are left are used up.
        until(|| {
            if a.tx.vacant(1).is_some() {
                a.send(&wire(VnetHdr::PLAIN, 3, 60));
            }
            a.device.poll();
            b.device.poll();
            a.tx.take();
            b.received();
            b.rx.vacant(usize::from(ENTRIES)).is_some()
        });
    }
    assert_eq!(b.driver.drops(), []);
}

/// A receiver that is disabled, stopped or gone gets nothing, and its port's statistics stay as
/// they are; frames are refused as without the direct copy. When it is back, they arrive again.
#[test]
fn a_receiver_that_is_not_served() {
    let [mut a, mut b] = linked([PLAIN, PLAIN]);
    b.post(32, 2048);
    b.driver.front.set_vring_enable(0, false).unwrap();
    a.send(&wire(VnetHdr::PLAIN, 1, 60));
    a.device.poll();
    assert_eq!((a.tx.take().len(), b.received().len(), a.sent().0), (1, 0, 0));
    b.driver.front.set_vring_enable(0, true).unwrap();
    for _ in 0..2 {
        b.device.poll();
        a.device.poll();
    }
    // The frame was in the cable, which the pass before had shown as served.
    assert_eq!(b.received().len(), 1);
    a.send(&wire(VnetHdr::PLAIN, 2, 60));
    a.device.poll();
    assert_eq!((b.received().len(), a.sent().0), (1, 1));
    let base = b.driver.front.get_vring_base(0).unwrap();
    assert_eq!(base, 2);
    b.device.poll();
    a.send(&wire(VnetHdr::PLAIN, 3, 60));
    a.device.poll();
    assert_eq!((b.received().len(), a.driver.drops()), (0, vec![("port_refused", 1)]));
    let Guest { device, driver, .. } = b;
    driver.hang_up();
    a.send(&wire(VnetHdr::PLAIN, 4, 60));
    a.device.poll();
    drop(device);
    for _ in 0..3 {
        a.send(&wire(VnetHdr::PLAIN, 5, 60));
        a.device.poll();
    }
    assert_eq!((a.tx.take().len(), a.driver.drops()), (5 + 1, vec![("port_refused", 5)]));
}

/// A device that is dropped while its front end is connected: its rings are no longer written.
#[test]
fn a_device_that_is_dropped() {
    let [mut a, mut b] = linked([PLAIN, PLAIN]);
    b.post(8, 2048);
    drop(b.device);
    a.send(&wire(VnetHdr::PLAIN, 1, 60));
    a.device.poll();
    assert_eq!((a.tx.take().len(), b.rx.take().len()), (1, 0));
    assert_eq!(a.driver.drops(), [("port_refused", 1)]);
}

/// An end of the cable behind a link: frames towards it cross the link, and are not copied past it.
#[test]
fn a_link_is_not_bypassed() {
    let [near, far] = Cross::cable();
    let (mut far, stats) = (Some(far), Arc::<LinkStats>::default());
    let mut device = NetDevice::new(Options::default(), |_| {
        Ok(Linked::new(far.take().unwrap(), LinkOptions::default(), 0, Arc::clone(&stats)))
    })
    .unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.post_rx(0, 0, 8, 2048);
    device.poll();
    let mut a = Guest::new(near, PLAIN);
    a.device.poll();
    a.send(&wire(VnetHdr::PLAIN, 1, 60));
    until(|| {
        a.device.poll();
        device.poll();
        driver.rings[0].take().is_some()
    });
    assert_eq!(a.sent(), (0, 1));
}

/// A buffer of the guest that is posted on both pairs: the bytes are arbitrary, and the rings go
/// on.
#[test]
fn the_source_is_the_destination() {
    let mut ends = Cross::cable().into_iter();
    let options = Options { max_pairs: 2, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Ok(ends.next().unwrap())).unwrap();
    let features = PLAIN | feature::MQ;
    let mut driver = Driver::connect(&device, features);
    driver.share_memory();
    let mut queues: Vec<_> = (0..4).map(|ring| Queue::start(&mut driver, ring, ENTRIES, features)).collect();
    (0..3).for_each(|_| _ = device.poll());
    for (n, by) in [0u64, 1, 12, 40, 200].into_iter().cycle().take(100).enumerate() {
        let (len, addr) = (100 + 15 * n as u32, queues[1].buffer(3));
        let parts = |from: u64, len: u32, flags| {
            let first = if n % 2 == 0 { len } else { 50 };
            [(from, first, flags), (from + u64::from(first), len - first, flags)][..1 + n % 2].to_vec()
        };
        let id = queues[2].vacant(2).unwrap();
        queues[2].post(&driver.memory, id, &parts(addr + by, len, WRITE), false);
        let id = queues[1].vacant(2).unwrap();
        driver.memory.write(queues[1].offset(3), &vec![0; 4000]);
        queues[1].post(&driver.memory, id, &parts(addr, len, 0), false);
        device.poll();
        assert_eq!(queues[2].take().iter().map(|used| used.1).collect::<Vec<_>>(), [len]);
        assert_eq!(queues[1].take().len(), 1);
    }
    assert_eq!(driver.stats.tx_direct.load(Relaxed), 100);
    assert_eq!((driver.queue_errors(), driver.drops()), (vec![], vec![]));
}

/// The memory of one guest is gone, where its buffers are. That guest's rings stop with this fault,
/// and the other's run.
#[test]
fn lost_memory_stops_its_guest() {
    sigbus::install().unwrap();
    for lost in [0, 1] {
        let mut guests = linked([PLAIN, PLAIN]);
        guests[1].post(32, 2048);
        (0..16).for_each(|n| _ = guests[0].send(&wire(VnetHdr::PLAIN, n, 1000)));
        ftruncate(&guests[lost].driver.memory.file, BUFFERS as u64).unwrap();
        let [a, b] = &mut guests;
        for _ in 0..3 {
            a.device.poll();
            b.device.poll();
        }
        assert_eq!(guests[lost].driver.queue_errors(), [("memory_lost", 2)]);
        assert!(guests[lost].count(|s| &s.memory_lost) > 0);
        assert_eq!((guests[1 - lost].driver.queue_errors(), guests[1 - lost].count(|s| &s.memory_lost)), (vec![], 0));
        assert_eq!(guests[0].sent().0, 16, "the frames were copied before the loss was known");
    }
}

/// A move of both guests: the log of each has a bit for every page that the device wrote in its
/// memory, and no other. What is read is not marked.
#[test]
fn each_guest_has_its_own_dirty_log() {
    const PAGE: usize = 4096;
    for merge in [0, feature::MRG_RXBUF] {
        let features = PLAIN | feature::LOG_ALL | merge;
        let [mut a, mut b] = linked([features, features]);
        let logs = [&a, &b].map(|guest| {
            let log = SharedFile::log(LOG);
            log.set(&guest.driver.front).unwrap();
            log
        });
        (0..2).for_each(|_| _ = (a.device.poll(), b.device.poll()));
        b.post(ENTRIES.into(), 2048);
        let (mut want, mut sent) = (std::collections::BTreeSet::new(), 0);
        for (n, len) in [60, 1500, 2036, 100, 1900].into_iter().enumerate() {
            if merge != 0 || len <= 2036 {
                a.send(&wire(VnetHdr::PLAIN, n, len));
                sent += 1;
            }
        }
        a.device.poll();
        let taken = b.rx.take();
        assert_eq!(taken.len(), sent);
        for (id, len) in taken {
            let at = b.rx.offset(id);
            want.extend(at / PAGE..=(at + len as usize - 1) / PAGE);
        }
        assert_eq!((a.sent(), logs[1].pages()), ((sent as u64, sent as u64), want));
        assert_eq!(logs[0].pages(), std::collections::BTreeSet::new());
        a.assert_clean();
        b.assert_clean();
    }
}

/// In-flight regions of both: a chain that was completed is not in flight, and one that waits is
/// resubmitted by the next device.
#[test]
fn in_flight_regions_of_both() {
    let mut ends = Cross::cable().into_iter();
    let mut guests = [(); 2].map(|()| {
        let mut port = ends.next();
        let device = NetDevice::new(Options::default(), |_| Ok(port.take().unwrap())).unwrap();
        let mut driver = Driver::connect(&device, PLAIN);
        driver.share_memory();
        let region = SharedFile::inflight(&driver.front);
        region.give(&driver.front).unwrap();
        for ring in 0..2 {
            driver.start_ring(SIZE);
            driver.enable(ring);
        }
        (device, driver, region)
    });
    guests.iter_mut().for_each(|guest| _ = guest.0.poll());
    let [(device, sender, sent), (_, receiver, received)] = &mut guests;
    for round in 0..1000u16 {
        let frames = 1 + round % 50;
        receiver.post_rx(0, 0, frames, 2048);
        for n in 0..frames {
            let (addr, at) = sender.buffer(1, n, 2048);
            sender.memory.write(at, &wire(VnetHdr::PLAIN, n.into(), 100));
            sender.rings[1].chain(n, &[(addr, 112, 0)]);
        }
        device.poll();
        for n in 0..u32::from(frames) {
            assert_eq!((sender.rings[1].take(), receiver.rings[0].take()), (Some((n, 0)), Some((n, 112))));
        }
        // The used indices that the regions record: of the second ring of one, of the first of the
        // other.
        let part = sent.len / 2;
        assert_eq!((sent.u16(part + 14), received.u16(14)), (sender.rings[1].used, receiver.rings[0].used));
        if round % 100 == 0 {
            assert_eq!(received.marked(), 0);
        }
    }
    assert_eq!(sender.stats.tx_direct.load(Relaxed), sender.stats.tx_frames.load(Relaxed));
}

/// A pass has the budget of any other: 256 chains, or 4 MiB.
#[test]
fn a_pass_is_bounded() {
    const RING: u16 = 1024;
    let mut ends = Cross::cable().into_iter();
    let mut guests = [(); 2].map(|()| {
        let mut port = ends.next();
        let device = NetDevice::new(Options::default(), |_| Ok(port.take().unwrap())).unwrap();
        let mut driver = Driver::connect(&device, MERGEABLE);
        driver.share_memory();
        for ring in 0..2 {
            driver.start_ring(RING);
            driver.enable(ring);
        }
        (device, driver)
    });
    guests.iter_mut().for_each(|guest| _ = guest.0.poll());
    let [(device, sender), (other, receiver)] = &mut guests;
    let addr = GUEST + BUFFERS as u64;
    for (parts, len, most) in [(1, 100, 256), (2, 100, 256), (2, 65_000, (4 << 20) / 65_000 + 1)] {
        let chains = RING / parts;
        for n in 0..RING {
            receiver.rings[0].chain(n, &[(addr, 200 + u32::from(n % 2) * 70_000, WRITE)]);
        }
        for n in 0..chains {
            let pieces = [(addr, 50, 0), (addr, len - 50, 0)];
            sender.rings[1].chain(n * parts, &pieces[..usize::from(parts)]);
        }
        let before = receiver.stats.rx_frames.load(Relaxed);
        device.poll();
        assert_eq!(receiver.stats.rx_frames.load(Relaxed) - before, most, "{parts} parts of {len} bytes");
        while device.poll() > 0 {}
        let base = receiver.front.get_vring_base(0).unwrap() as u16;
        (receiver.rings[0].avail, receiver.rings[0].used) = (base, base);
        receiver.rings[0].ring.set_avail_idx(base);
        receiver.describe(0, RING, base);
        other.poll();
    }
    assert_eq!((sender.queue_errors(), receiver.queue_errors()), (vec![], vec![]));
}

/// `n` pieces of `len` bytes from `at` on.
fn pieces(at: u64, n: usize, len: u32, flags: u16) -> Vec<(u64, u32, u16)> {
    (0..n).map(|i| (at + i as u64 * u64::from(len), len, flags)).collect()
}

/// A frame in more than 48 pieces on one side takes the cable: a guest's long chains are not walked
/// while the other guest's pair is locked.
#[test]
fn frames_in_many_pieces_take_the_cable() {
    let cases = [(48, 1, 1, 1), (49, 1, 1, 0), (1, 48, 1, 1), (1, 49, 1, 0), (1, 1, 48, 1), (1, 1, 49, 0)];
    for ((sent, posted, chains, direct), indirect) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let [mut a, mut b] = linked([PLAIN, MERGEABLE].map(|features| features | feature::INDIRECT_DESC));
        let total = 4 * [sent, posted, chains].into_iter().max().unwrap();
        for _ in 0..chains {
            let id = b.rx.vacant(posted).unwrap();
            let parts = pieces(b.rx.buffer(id), posted, (total / posted / chains) as u32, WRITE);
            b.rx.post(&b.driver.memory, id, &parts, indirect);
        }
        let (wire, id) = (wire(VnetHdr::PLAIN, 1, total - 12), a.tx.vacant(sent).unwrap());
        a.driver.memory.write(a.tx.offset(id), &wire);
        let parts = pieces(a.tx.buffer(id), sent, (total / sent) as u32, 0);
        a.tx.post(&a.driver.memory, id, &parts, indirect);
        a.device.poll();
        assert_eq!(a.sent(), (direct, 1), "{sent} pieces to {chains} chains of {posted}");
        assert_eq!(b.rx.entries().len(), chains * direct as usize);
        b.device.poll();
        assert_eq!(b.received().concat()[12..], wire[12..]);
        a.assert_clean();
        b.assert_clean();
    }
}

/// What was walked in vain is charged to the budget of the same pass: 8,192 pieces.
#[test]
fn a_walk_that_is_given_up_is_charged() {
    const RING: u16 = 256;
    let features = [PLAIN | feature::INDIRECT_DESC, MERGEABLE];
    let [mut a, mut b] = linked_by(features, |_, port, features| Guest::of(Options::default(), RING, port, features));
    b.post(64, 4);
    for _ in 0..RING {
        let id = a.tx.vacant(1).unwrap();
        a.tx.post(&a.driver.memory, id, &pieces(a.tx.buffer(0), 32, 8, 0), true);
    }
    a.device.poll();
    // The chain of the first frame, and 49 buffers.
    assert_eq!(a.sent(), (0, (8192 - 32 - 49u64).div_ceil(32)));
}

/// A device whose memory another process may serve is neither the sender nor the receiver of a
/// direct copy.
#[test]
fn any_memory_file_excludes_the_direct_copy() {
    for excluded in [0, 1] {
        let mut guests = linked_by([PLAIN, PLAIN], |n, port, features| {
            let options = Options { any_memory_file: n == excluded, ..Options::default() };
            Guest::of(options, ENTRIES, port, features)
        });
        let [a, b] = &mut guests;
        b.post(8, 2048);
        (0..8).for_each(|n| _ = a.send(&wire(VnetHdr::PLAIN, n, 100)));
        a.device.poll();
        assert_eq!((a.sent(), b.rx.entries().len()), ((0, 8), 0));
        b.device.poll();
        assert_eq!(b.received(), [0, 1, 2, 3, 4, 5, 6, 7].map(|n| delivered(wire(VnetHdr::PLAIN, n, 100))));
        guests.iter().for_each(Guest::assert_clean);
    }
}

/// Interrupts go to the driver that has asked for them: the receiver's for what has arrived, the
/// sender's for what is completed.
#[test]
fn each_driver_gets_its_interrupts() {
    for (wishes, want) in [
        ([InterruptWish::Always, InterruptWish::Never], [1, 0]),
        ([InterruptWish::Never, InterruptWish::Always], [0, 1]),
        ([InterruptWish::Always, InterruptWish::Always], [1, 1]),
    ] {
        let [mut a, mut b] = linked([PLAIN, PLAIN]);
        a.tx.interrupts(wishes[0]);
        b.rx.interrupts(wishes[1]);
        let _start = (a.tx.calls(), b.rx.calls(), a.rx.calls(), b.tx.calls());
        for n in 0..3 {
            b.post(1, 2048);
            a.send(&wire(VnetHdr::PLAIN, n, 100));
            a.device.poll();
            assert_eq!([a.tx.calls(), b.rx.calls(), a.rx.calls(), b.tx.calls()], [want[0], want[1], 0, 0]);
        }
        assert_eq!([&a, &b].map(|guest| guest.count(|s| &s.calls)), want.map(|n| 3 * n));
    }
}
