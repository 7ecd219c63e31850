//! Frames through the device in each mode, with a driver of a few lines at the other end.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::time::Duration;

use netmem_testing::device::*;
use netmem_virtio::device::port::{ALL_OFFLOADS, Cross, Echo, Gen, Port, Sink};
use netmem_virtio::device::{DeviceError, DropReason, NetDevice, Options};
use netmem_virtio::net::{VnetHdr, ctrl, feature};
use netmem_virtio::virtqueue::DESC_WRITE;

fn generator(size: usize, limit: Option<u64>) -> NetDevice<Gen> {
    NetDevice::new(one_pair(), |_| Gen::new(size, limit)).unwrap()
}

fn header(bytes: &[u8]) -> VnetHdr {
    VnetHdr::from_bytes(*bytes.first_chunk().unwrap())
}

/// Proves NET-5 for the device side: many times the ring, one buffer per frame.
#[test]
fn small_frames_arrive_whole() {
    for size in [60, 64, 116, 117, 1514, 2036] {
        let mut device = generator(size, Some(1000));
        let want = device.ports()[0].frame().to_vec();
        let mut driver = Driver::start(&device, PLAIN, 2);
        driver.post_rx(0, 0, SIZE, 2048);
        let mut seen = 0;
        until(|| {
            device.poll();
            while let Some((id, len)) = driver.rings[0].take() {
                let (addr, at) = driver.buffer(0, id as u16, 2048);
                let got = driver.memory.read(at, len as usize);
                assert_eq!(header(&got), VnetHdr::PLAIN);
                assert_eq!(&got[12..], want);
                driver.memory.write(at, &[0xee; 2048]);
                driver.rings[0].chain(id as u16, &[(addr, 2048, DESC_WRITE)]);
                seen += 1;
            }
            seen == 1000
        });
        assert_eq!(device.poll(), 0);
        assert_eq!(driver.stats.rx_bytes.load(Relaxed), 1000 * size as u64);
        assert!(driver.stats.busy_ns.load(Relaxed) > 0);
        driver.hang_up();
    }
}

#[test]
fn a_frame_spans_mergeable_buffers() {
    for (size, each) in [(64, 2048), (1500, 256), (9000, 1536), (65549, 4096), (65549, 300)] {
        let mut device = generator(size, Some(20));
        let want = device.ports()[0].frame().to_vec();
        let mut driver = Driver::start(&device, MERGEABLE, 1);
        driver.post_rx(0, 0, SIZE, each);
        let (mut seen, mut frame, mut left) = (0, Vec::new(), 0u16);
        until(|| {
            device.poll();
            let mut visible = driver.rings[0].ring.used_idx().wrapping_sub(driver.rings[0].used);
            while let Some((id, len)) = driver.rings[0].take() {
                let (addr, at) = driver.buffer(0, id as u16, each);
                let got = driver.memory.read(at, len as usize);
                if frame.is_empty() {
                    left = header(&got).num_buffers;
                    assert_eq!(usize::from(left), (size + 12).div_ceil(each));
                    assert!(visible >= left, "a frame's buffers become visible together");
                }
                (left, visible) = (left - 1, visible - 1);
                frame.extend_from_slice(&got);
                if left == 0 {
                    assert_eq!(&frame[12..], want);
                    frame.clear();
                    seen += 1;
                }
                driver.rings[0].chain(id as u16, &[(addr, each as u32, DESC_WRITE)]);
            }
            seen == 20
        });
        assert!(driver.queue_errors().is_empty() && driver.drops().is_empty());
    }
}

#[test]
fn a_frame_waits_for_its_buffers() {
    let mut device = generator(4000, Some(1));
    let mut driver = Driver::start(&device, MERGEABLE, 1);
    driver.post_rx(0, 0, 3, 1024);
    for _ in 0..10 {
        assert_eq!(device.poll(), 0);
    }
    assert_eq!(driver.rings[0].ring.used_idx(), 0);
    assert!(driver.stats.out_of_buffers.load(Relaxed) > 0);
    driver.post_rx(0, 3, 1, 1024);
    assert_eq!(device.poll(), 1);
    assert_eq!(driver.rings[0].ring.used_idx(), 4);
}

/// Big mode: a chain of a small header part and pages, filled in order.
#[test]
fn a_chain_is_filled_in_order() {
    let mut device = generator(60000, Some(3));
    let want = device.ports()[0].frame().to_vec();
    let mut driver = Driver::start(&device, PLAIN | feature::GUEST_TSO4, 1);
    let (start, at) = driver.buffer(0, 0, 4096);
    // Backwards in memory, so that order is not an accident.
    let mut parts = vec![(start, 5, DESC_WRITE), (start + 64, 49, DESC_WRITE)];
    parts.extend((1..=16).rev().map(|i| (start + i * 4096, 4096, DESC_WRITE)));
    for _ in 0..3 {
        driver.rings[0].chain(0, &parts);
        poll_until(&mut device, || driver.rings[0].take().is_some_and(|e| e == (0, 60012)));
        let mut got = Vec::new();
        for &(addr, len, _) in &parts {
            got.extend(driver.memory.read(at + (addr - start) as usize, len as usize));
        }
        assert_eq!((header(&got).num_buffers, &got[12..60012]), (1, &want[..]));
    }
}

#[test]
fn what_never_fits_is_dropped() {
    let mut device = generator(1514, Some(5));
    let mut driver = Driver::start(&device, PLAIN, 1);
    driver.post_rx(0, 0, 2, 1525);
    poll_until(&mut device, || driver.stats.dropped(DropReason::TooBig) == 5);
    assert_eq!((driver.rings[0].ring.used_idx(), frames(&driver.stats).0), (0, 0));

    // Mergeable: a full ring of buffers, and all of them are too few.
    let mut device = generator(65549, Some(1));
    let mut driver = Driver::start(&device, MERGEABLE, 1);
    driver.post_rx(0, 0, SIZE, 64);
    poll_until(&mut device, || driver.stats.dropped(DropReason::TooBig) == 1);
}

fn frame_to_send(len: usize, seed: u8) -> Vec<u8> {
    let mut wire = VnetHdr::default().to_bytes().to_vec();
    wire.extend((0..len).map(|i| (i as u8).wrapping_mul(3).wrapping_add(seed)));
    wire
}

/// Splits `wire` over descriptors of at most `piece` bytes.
fn send(driver: &mut Driver, ring: usize, first: u16, wire: &[u8], piece: usize) {
    let (addr, at) = driver.buffer(ring, first, 2048);
    driver.memory.write(at, wire);
    let part = |(i, c): (usize, &[u8])| (addr + (i * piece) as u64, c.len() as u32, 0);
    let parts: Vec<_> = wire.chunks(piece).enumerate().map(part).collect();
    driver.rings[ring].chain(first, &parts);
}

#[test]
fn echo_answers_with_exchanged_addresses() {
    for (len, piece) in [(60, 2048), (60, 7), (1514, 2048), (1514, 100), (1514, 12)] {
        let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
        let mut driver = Driver::start(&device, MERGEABLE, 2);
        driver.post_rx(0, 0, SIZE, 2048);
        for round in 0..600u16 {
            let wire = frame_to_send(len, round as u8);
            send(&mut driver, 1, 0, &wire, piece);
            poll_until(&mut device, || driver.rings[1].take().is_some_and(|e| e == (0, 0)));
            let mut back = None;
            poll_until(&mut device, || {
                back = driver.rings[0].take();
                back.is_some()
            });
            let (id, n) = back.unwrap();
            let (addr, at) = driver.buffer(0, id as u16, 2048);
            let got = driver.memory.read(at, n as usize);
            assert_eq!(header(&got), VnetHdr::PLAIN);
            assert_eq!((&got[12..18], &got[18..24], &got[24..]), (&wire[18..24], &wire[12..18], &wire[24..]));
            driver.rings[0].chain(id as u16, &[(addr, 2048, DESC_WRITE)]);
        }
        assert_eq!(frames(&driver.stats), (600, 600));
    }
}

/// Sends frames of `len` bytes until one is refused; returns how many were accepted.
fn fill_echo(device: &mut NetDevice<Echo>, driver: &mut Driver, len: usize) -> u64 {
    let wire = frame_to_send(len, 0);
    for sent in 0..3000 {
        send(driver, 1, 0, &wire, wire.len());
        let taken = (0..100).any(|_| {
            device.poll();
            driver.rings[1].take().is_some()
        });
        if !taken {
            return sent;
        }
    }
    panic!("it takes all");
}

/// What waits in an echo is bounded in frames and in bytes. The driver's next frame waits in its
/// own ring, and nothing is lost: room comes with the driver's receive buffers.
#[test]
fn echo_is_bounded() {
    for (len, most) in [(60, 1024), (65000, 8)] {
        let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
        let mut driver = Driver::start(&device, MERGEABLE, 2);
        let waiting = fill_echo(&mut device, &mut driver, len);
        assert!((most - 1..=most).contains(&waiting), "{waiting} of {len}");
        driver.post_rx(0, 0, 256, 2048);
        poll_until(&mut device, || driver.rings[1].take().is_some());
        assert_eq!((driver.drops(), frames(&driver.stats).1), (vec![], waiting + 1));
    }
}

/// A device whose port has no room sleeps until the driver posts receive buffers.
#[test]
fn a_full_echo_lets_the_device_sleep() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    fill_echo(&mut device, &mut driver, 60);
    let (stop, control) = (AtomicBool::new(false), device.control());
    std::thread::scope(|s| {
        let worker = s.spawn(|| device.run(&stop, netmem_virtio::Spin::default()));
        let _ends = Ends { stop: &stop, control: &control };
        until(|| asleep(&driver.stats) == 1);
        driver.post_rx(0, 0, 1, 2048);
        driver.rings[0].kick.write(1).unwrap();
        until(|| driver.rings[1].take().is_some());
        stop.store(true, Relaxed);
        control.wake();
        worker.join().unwrap().unwrap();
    });
}

/// Where the driver's receive ring is not served, an echo has nowhere to send them: it refuses what
/// it cannot keep.
#[test]
fn a_full_echo_refuses_frames_of_a_driver_that_cannot_receive() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.front.set_vring_enable(0, false).unwrap();
    let wire = frame_to_send(60, 0);
    for _ in 0..3000 {
        send(&mut driver, 1, 0, &wire, 2048);
        poll_until(&mut device, || driver.rings[1].take().is_some());
    }
    assert_eq!(frames(&driver.stats).1, 1024);
    assert_eq!(driver.drops(), [("port_refused", 3000 - 1024)]);
}

/// Proves NET-10: what one front end sent does not reach the next one, also where the next one is
/// there before the device has polled.
#[test]
fn frames_of_one_front_end_do_not_reach_the_next() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    for _ in 0..10 {
        send(&mut driver, 1, 0, &frame_to_send(60, 0), 2048);
        poll_until(&mut device, || driver.rings[1].take().is_some());
    }
    driver.hang_up();
    let mut next = Driver::start(&device, PLAIN, 2);
    next.post_rx(0, 0, 16, 2048);
    send(&mut next, 1, 0, &frame_to_send(60, 1), 2048);
    poll_until(&mut device, || next.rings[1].take().is_some());
    poll_until(&mut device, || next.rings[0].take().is_some());
    assert_eq!((frames(&next.stats).0, next.drops()), (1, vec![("front_end_left", 10)]));
}

#[test]
fn frames_from_the_driver_are_validated() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
    let mut driver = Driver::start(&device, PLAIN | feature::CSUM, 2);
    let mut bad = frame_to_send(100, 0);
    bad[1] = 99;
    for wire in [&bad[..], &bad[..20], &bad[..3]] {
        send(&mut driver, 1, 0, wire, 2048);
        poll_until(&mut device, || driver.rings[1].take().is_some());
    }
    let (addr, _) = driver.buffer(1, 0, 1);
    driver.rings[1].chain(0, &[(addr, 70000, 0)]);
    poll_until(&mut device, || driver.rings[1].take().is_some());
    assert_eq!(driver.drops(), [("runt", 2), ("too_long", 1), ("bad_header", 1)]);
    assert!(driver.queue_errors().is_empty());
}

/// A driver asks for an offload without the feature, or for thousands of segments: the frame is
/// dropped and counted.
#[test]
fn offloads_from_the_driver_are_validated() {
    let plain = VnetHdr::PLAIN;
    let csum = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..plain };
    let segment = |gso_type, gso_size| VnetHdr { gso_type, gso_size, hdr_len: 54, ..csum };
    let (tso4, tso6) = (feature::HOST_TSO4, feature::HOST_TSO6);
    let cases = [
        // Features, header, and what becomes of the frame. Without any offload a header has no
        // meaning: not every driver clears what it does not use.
        (0, csum, ""),
        (
            0,
            VnetHdr {
                flags: 0xff,
                gso_type: 99,
                hdr_len: 1,
                gso_size: 2,
                csum_start: 3,
                csum_offset: 4,
                num_buffers: 5,
            },
            "",
        ),
        (feature::CSUM, VnetHdr { gso_type: 99, ..csum }, "bad_header"),
        (feature::CSUM, csum, ""),
        (feature::CSUM, segment(VnetHdr::GSO_TCPV4, 500), "not_negotiated"),
        (feature::CSUM | tso6, segment(VnetHdr::GSO_TCPV4, 500), "not_negotiated"),
        (tso4, segment(VnetHdr::GSO_TCPV4, 500), "not_negotiated"),
        (feature::CSUM | tso4, segment(VnetHdr::GSO_TCPV4, 500), ""),
        (feature::CSUM | tso4, segment(VnetHdr::GSO_TCPV4, 1), "bad_header"),
        (feature::CSUM | tso4 | tso6, segment(VnetHdr::GSO_TCPV6, 6), ""),
        (feature::CSUM | tso4, segment(VnetHdr::GSO_TCPV4 | VnetHdr::GSO_ECN, 500), "not_negotiated"),
        (feature::CSUM | tso4 | tso6, segment(VnetHdr::GSO_UDP, 500), "not_negotiated"),
        (feature::CSUM | tso4 | tso6, segment(VnetHdr::GSO_UDP_L4, 500), "not_negotiated"),
        // A driver verifies nothing, and flags without a name have no meaning.
        (0, VnetHdr { flags: 0xfe, ..plain }, ""),
    ];
    for (features, header, fate) in cases {
        let (sender, frames) = mpsc::channel();
        let mut device = NetDevice::new(one_pair(), |_| Ok(Collect(sender.clone()))).unwrap();
        let mut driver = Driver::start(&device, PLAIN | features, 2);
        let mut wire = frame_to_send(1500, 0);
        wire[..12].copy_from_slice(&header.to_bytes());
        send(&mut driver, 1, 0, &wire, 2048);
        poll_until(&mut device, || driver.rings[1].take().is_some());
        let drops = if fate.is_empty() { vec![] } else { vec![(fate, 1)] };
        assert_eq!(driver.drops(), drops, "{features:#x} {header:?}");
        let taken: Vec<Vec<u8>> = frames.try_iter().collect();
        assert_eq!(taken.len(), usize::from(fate.is_empty()), "{header:?}");
        if let Some(taken) = taken.first() {
            let flags = header.flags & VnetHdr::NEEDS_CSUM;
            let expected = if features == 0 { plain } else { VnetHdr { flags, ..header } };
            assert_eq!(self::header(taken), expected);
            assert_eq!(taken[12..], wire[12..]);
        }
    }
}

/// A port that keeps what the driver sends.
struct Collect(mpsc::Sender<Vec<u8>>);

impl Port for Collect {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        None
    }

    fn consume(&mut self) {}

    fn send(&mut self, wire: &[u8]) -> bool {
        self.0.send(wire.to_vec()).is_ok()
    }
}

#[test]
fn sink_counts() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Sink)).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    for n in 0..1000u64 {
        send(&mut driver, 1, 0, &frame_to_send(64, 0), if n % 2 == 0 { 2048 } else { 20 });
        poll_until(&mut device, || driver.rings[1].take().is_some());
    }
    assert_eq!((frames(&driver.stats).1, driver.stats.tx_bytes.load(Relaxed)), (1000, 64_000));
}

fn set_pairs(device: &mut NetDevice<Gen>, driver: &mut Driver, ring: usize, pairs: u16) -> u8 {
    let (addr, at) = driver.buffer(ring, 0, 64);
    let [low, high] = pairs.to_le_bytes();
    driver.memory.write(at, &[ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET, low, high, 0xff]);
    driver.rings[ring].chain(0, &[(addr, 2, 0), (addr + 2, 2, 0), (addr + 4, 1, DESC_WRITE)]);
    poll_until(device, || driver.rings[ring].take().is_some());
    driver.memory.read(at + 4, 1)[0]
}

#[test]
fn the_control_queue_sets_the_pairs() {
    let options = Options { max_pairs: 2, serve_control: true, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, PLAIN | feature::MQ | feature::CTRL_VQ, 5);
    driver.post_rx(0, 0, SIZE, 2048);
    driver.post_rx(2, 0, SIZE, 2048);
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == SIZE);
    assert_eq!(driver.rings[2].ring.used_idx(), 0, "one pair is in use at first");
    assert_eq!(set_pairs(&mut device, &mut driver, 4, 3), ctrl::ERR);
    assert_eq!(set_pairs(&mut device, &mut driver, 4, 0), ctrl::ERR);
    assert_eq!(driver.rings[2].ring.used_idx(), 0);
    assert_eq!(set_pairs(&mut device, &mut driver, 4, 2), ctrl::OK);
    poll_until(&mut device, || driver.rings[2].ring.used_idx() == SIZE);
    assert_eq!(driver.stats.commands.load(Relaxed), 3);
    // A front end that serves the queue itself is offered the feature, but no ring, and its pairs
    // are all in use.
    let mut device = NetDevice::new(Options { max_pairs: 2, ..Options::default() }, |_| Gen::new(64, None)).unwrap();
    let control = feature::CTRL_VQ | feature::MQ | feature::GUEST_ANNOUNCE;
    assert_eq!(device.control().offered() & control, feature::CTRL_VQ | feature::MQ);
    let mut driver = Driver::start(&device, PLAIN | feature::MQ | feature::CTRL_VQ, 4);
    assert!(driver.front.set_vring_num(4, SIZE).is_err());
    driver.post_rx(2, 0, SIZE, 2048);
    poll_until(&mut device, || driver.rings[2].ring.used_idx() == SIZE);
}

#[test]
fn rings_are_enabled_and_disabled_under_traffic() {
    let device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let (control, mut device, stop) = (device.control(), device, &stop);
        s.spawn(move || {
            while !stop.load(Relaxed) {
                device.poll();
            }
        });
        for _ in 0..20 {
            let seen = frames(&driver.stats).0;
            until(|| {
                while let Some((id, _)) = driver.rings[0].take() {
                    driver.rings[0].post(id as u16);
                }
                if driver.rings[0].avail == 0 {
                    driver.post_rx(0, 0, SIZE, 2048);
                }
                frames(&driver.stats).0 > seen + 1000
            });
            driver.front.set_vring_enable(0, false).unwrap();
            let idx = driver.rings[0].ring.used_idx();
            let wire = frame_to_send(64, 1);
            let sent = frames(&driver.stats).1;
            send(&mut driver, 1, 0, &wire, 2048);
            until(|| driver.rings[1].take().is_some());
            until(|| frames(&driver.stats).1 > sent);
            assert_eq!(driver.rings[0].ring.used_idx(), idx, "disabled means no frames");
            driver.front.set_vring_enable(0, true).unwrap();
        }
        // After this answer the ring is the driver's alone.
        let base = driver.front.get_vring_base(0).unwrap();
        let idx = driver.rings[0].ring.used_idx();
        assert_eq!(base as u16, idx);
        let polls = driver.stats.polls.load(Relaxed);
        until(|| driver.stats.polls.load(Relaxed) > polls + 1000);
        assert_eq!(driver.rings[0].ring.used_idx(), idx);
        // And it continues where it stopped.
        driver.describe(0, SIZE, idx);
        until(|| {
            while let Some((id, _)) = driver.rings[0].take() {
                driver.rings[0].post(id as u16);
            }
            driver.rings[0].ring.used_idx() != idx
        });
        stop.store(true, Relaxed);
        control.wake();
    });
}

#[test]
fn a_disabled_ring_discards() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.front.set_vring_enable(1, false).unwrap();
    send(&mut driver, 1, 0, &frame_to_send(64, 1), 2048);
    poll_until(&mut device, || driver.rings[1].take().is_some());
    assert_eq!(driver.drops(), [("disabled", 1)]);
}

#[test]
fn interrupts_are_sent_when_wanted() {
    let mut device = generator(64, None);
    let mut driver = Driver::start(&device, PLAIN, 1);
    driver.post_rx(0, 0, 1, 2048);
    poll_until(&mut device, || driver.rings[0].take().is_some());
    assert_eq!(driver.stats.calls.load(Relaxed), 0);
    driver.rings[0].ring.set_avail_flags(0);
    driver.post_rx(0, 1, 1, 2048);
    poll_until(&mut device, || driver.rings[0].take().is_some());
    assert_eq!((driver.stats.calls.load(Relaxed), driver.rings[0].call.read().unwrap()), (1, 1));
}

/// The device sleeps when there is nothing to do, and a kick wakes it: no frame is lost between
/// looking and sleeping.
#[test]
fn a_sleeping_device_is_woken_by_kicks() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Echo::new())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    let (stop, control) = (AtomicBool::new(false), device.control());
    std::thread::scope(|s| {
        let worker = s.spawn(|| device.run(&stop, netmem_virtio::Spin::default()));
        driver.post_rx(0, 0, SIZE, 2048);
        for n in 0..2000u64 {
            if n % 100 == 0 {
                until(|| asleep(&driver.stats) == 1);
            }
            send(&mut driver, 1, 0, &frame_to_send(64, 1), 2048);
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            if driver.rings[1].ring.used_flags() == 0 {
                driver.rings[1].kick.write(1).unwrap();
            }
            until(|| driver.rings[1].take().is_some());
            let mut id = 0;
            until(|| driver.rings[0].take().map(|e| id = e.0 as u16).is_some());
            driver.rings[0].post(id);
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            if driver.rings[0].ring.used_flags() == 0 {
                driver.rings[0].kick.write(1).unwrap();
            }
        }
        stop.store(true, Relaxed);
        control.wake();
        worker.join().unwrap().unwrap();
    });
    assert_eq!(frames(&driver.stats), (2000, 2000));
    assert!(driver.stats.sleeps.load(Relaxed) > 0);
}

#[test]
fn the_memory_table_can_change_under_traffic() {
    let device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 1);
    driver.post_rx(0, 0, SIZE, 2048);
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let (mut device, stop) = (device, &stop);
        s.spawn(move || {
            while !stop.load(Relaxed) {
                device.poll();
            }
        });
        for round in 0..50u64 {
            let seen = frames(&driver.stats).0;
            until(|| {
                while let Some((id, _)) = driver.rings[0].take() {
                    driver.rings[0].post(id as u16);
                }
                frames(&driver.stats).0 > seen + 500
            });
            // The same addresses, cut differently.
            let cut = (round + 1) * 64 * 1024;
            let low = region(&driver.memory.file, GUEST, USER, cut, 0);
            let high = region(&driver.memory.file, GUEST + cut, USER + cut, MEMORY as u64 - cut, cut);
            driver.front.set_mem_table(&[high, low]).unwrap();
        }
        stop.store(true, Relaxed);
    });
    assert!(driver.queue_errors().is_empty());
}

/// A port in which a pass stays until the test releases it.
struct BusyHead {
    entered: mpsc::Sender<()>,
    go_on: mpsc::Receiver<()>,
}

impl Port for BusyHead {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = 0;

    fn peek(&mut self) -> Option<&[u8]> {
        self.entered.send(()).unwrap();
        self.go_on.recv_timeout(Duration::from_secs(60)).expect("the front end waits for the end of the pass");
        None
    }

    fn consume(&mut self) {}

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

/// What is asked that has nothing to do with rings is answered in the middle of a pass, again and
/// again: of a device that is in a pass nearly always, no thread waits for the end of one without
/// need.
#[test]
fn questions_are_answered_in_a_pass() {
    let ((entered, in_pass), (answered, go_on)) = (mpsc::channel(), mpsc::channel());
    let mut port = Some(BusyHead { entered, go_on });
    let mut device = NetDevice::new(one_pair(), |_| Ok(port.take().unwrap())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 1);
    driver.post_rx(0, 0, 1, 2048);
    std::thread::scope(|s| {
        let front = &mut driver.front;
        s.spawn(move || {
            in_pass.recv().unwrap();
            for _ in 0..3 {
                assert_eq!(front.get_features().unwrap() & PLAIN, PLAIN);
                assert_eq!(front.get_queue_num().unwrap(), 2);
            }
            answered.send(()).unwrap();
        });
        assert_eq!(device.poll(), 0);
    });
}

#[test]
fn configuration_space_is_readable() {
    let mac = [2, 1, 2, 3, 4, 5];
    let options = Options { max_pairs: 3, mac: Some(mac), mtu: Some(9000), ..Options::default() };
    let device = NetDevice::new(options, |_| Ok(Sink)).unwrap();
    let driver = Driver::connect(&device, PLAIN);
    assert_eq!(driver.front.get_queue_num().unwrap(), 6);
    let config = driver.front.get_config(0, 12).unwrap();
    assert_eq!((&config[..6], &config[8..]), (&mac[..], &[3, 0, 0x28, 0x23][..]));
}

#[test]
fn options_are_checked() {
    for pairs in [0, 128] {
        let options = Options { max_pairs: pairs, ..Options::default() };
        assert!(matches!(NetDevice::new(options, |_| Ok(Sink)), Err(DeviceError::Pairs { .. })));
    }
    for size in [0, 59, 65550] {
        assert!(Gen::new(size, None).is_err());
    }
    let parsed = |size| {
        let g = Gen::new(size, None).unwrap();
        assert_eq!(g.frame().len(), size);
        etherparse::SlicedPacket::from_ethernet(g.frame()).map(|p| p.transport.is_some()).unwrap()
    };
    assert!([60, 64, 1514, 65549].into_iter().all(parsed));
}

/// What is sent on one pair is received on the other, in both directions and in order. While there
/// is no room, the sender waits.
#[test]
fn two_pairs_are_crossed() {
    const EACH: usize = 2048;
    const FRAMES: u16 = 5000;
    let mut ends = Cross::cable().into_iter();
    let options = Options { max_pairs: 2, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Ok(ends.next().unwrap())).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE | feature::MQ, 4);
    let send = |driver: &mut Driver, ring: usize, slot: u16, n: u16| {
        let (addr, at) = driver.buffer(ring, slot, EACH);
        let frame = [&VnetHdr::PLAIN.to_bytes()[..], &[7; 14], &n.to_le_bytes(), &[7; 1000]].concat();
        driver.memory.write(at, &frame);
        driver.rings[ring].chain(slot, &[(addr, frame.len() as u32, 0)]);
    };
    device.poll();
    for (tx, rx) in [(1, 2), (3, 0)] {
        driver.post_rx(rx, 0, 64, EACH);
        (0..SIZE).for_each(|n| send(&mut driver, tx, n, n));
        let (mut next, mut got, mut waits) = (SIZE, Vec::new(), 0);
        until(|| {
            device.poll();
            let mut taken = 0;
            while let Some((slot, _)) = driver.rings[tx].take() {
                taken += 1;
                if next < FRAMES {
                    send(&mut driver, tx, slot as u16, next);
                    next += 1;
                }
            }
            // Buffers are posted only when the sender can go no further.
            if taken > 0 {
                return false;
            }
            waits += 1;
            while let Some((id, len)) = driver.rings[rx].take() {
                let wire = driver.memory.read(driver.buffer(rx, id as u16, EACH).1, len as usize);
                assert_eq!((header(&wire), wire.len()), (VnetHdr::PLAIN, 1028));
                got.push(u16::from_le_bytes([wire[26], wire[27]]));
                driver.post_rx(rx, id as u16, 1, EACH);
            }
            got.len() == usize::from(FRAMES)
        });
        assert!(got.into_iter().eq(0..FRAMES) && waits > 10, "{waits}");
    }
    assert_eq!(driver.drops(), []);
}
