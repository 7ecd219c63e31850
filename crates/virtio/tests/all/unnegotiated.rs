//! Proves NET-7: features that were not negotiated are neither trusted nor used. For each feature
//! bit that a side may use, the other side acts as if it had been negotiated, although it was not.

use netmem_testing::device;
use netmem_testing::driver;
use std::collections::VecDeque;
use std::os::fd::AsFd;

use etherparse::PacketBuilder;
use netmem_packet::{Checksum, Gso, GsoKind, Meta, Packet, TxQueue};
use netmem_testing::device::{Driver, EventFd, PLAIN, poll_until};
use netmem_testing::driver::hostile::{Behaviour, FEATURES, Harness};
use netmem_testing::driver::{frame, receive, take};
use netmem_testing::vhost_user::front::{request, u64s};
use netmem_virtio::device::port::{ALL_OFFLOADS, Port, Tap};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode};
use netmem_virtio::net::{Offloads, VnetHdr, feature};
use netmem_virtio::virtqueue::{AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_WRITE};

/// A frame, and a header that asks for an offload.
struct Asks {
    frame: Vec<u8>,
    header: VnetHdr,
    meta: Meta,
}

/// A frame of 1000 bytes of payload, to be cut into two.
fn asks(kind: Option<GsoKind>, v6: bool, ecn: bool) -> Asks {
    let ethernet = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let ip = if v6 { ethernet.ipv6([1; 16], [2; 16], 64) } else { ethernet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64) };
    let (mut frame, start) = (Vec::new(), if v6 { 54 } else { 34 });
    let udp = matches!(kind, Some(GsoKind::UdpFragment | GsoKind::UdpSegment));
    let payload = [7; 1000];
    match udp {
        true => ip.udp(7, 9).write(&mut frame, &payload).unwrap(),
        false => ip.tcp(7, 9, 1, 1000).write(&mut frame, &payload).unwrap(),
    }
    let (offset, headers) = if udp { (6, start + 8) } else { (16, start + 20) };
    let gso_type = match kind {
        None => VnetHdr::GSO_NONE,
        Some(GsoKind::TcpV4) => VnetHdr::GSO_TCPV4,
        Some(GsoKind::TcpV6) => VnetHdr::GSO_TCPV6,
        Some(GsoKind::UdpFragment) => VnetHdr::GSO_UDP,
        Some(GsoKind::UdpSegment) => VnetHdr::GSO_UDP_L4,
    };
    let header = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        gso_type: gso_type | if ecn { VnetHdr::GSO_ECN } else { 0 },
        hdr_len: if kind.is_some() { headers } else { 0 },
        gso_size: if kind.is_some() { 500 } else { 0 },
        csum_start: start,
        csum_offset: offset,
        num_buffers: 1,
    };
    let gso = kind.map(|kind| Gso { kind, size: 500, headers, ecn });
    Asks { frame, header, meta: Meta { checksum: Checksum::Partial { start, offset }, gso } }
}

/// A frame that needs the feature, towards the device and towards the driver. Where two features
/// are named, either allows it.
fn offloads() -> [(u64, u64, Asks); 7] {
    use feature::*;
    [
        (CSUM, GUEST_CSUM, asks(None, false, false)),
        (HOST_TSO4, GUEST_TSO4, asks(Some(GsoKind::TcpV4), false, false)),
        (HOST_TSO6, GUEST_TSO6, asks(Some(GsoKind::TcpV6), true, false)),
        (HOST_ECN, GUEST_ECN, asks(Some(GsoKind::TcpV4), false, true)),
        (HOST_UFO, GUEST_UFO, asks(Some(GsoKind::UdpFragment), false, false)),
        (HOST_USO, GUEST_USO4 | GUEST_USO6, asks(Some(GsoKind::UdpSegment), false, false)),
        (HOST_USO, GUEST_USO4 | GUEST_USO6, asks(Some(GsoKind::UdpSegment), true, false)),
    ]
}

/// A port that shows the frames of the test, and keeps what it is sent.
#[derive(Default)]
struct Speaks {
    frames: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
}

impl Port for Speaks {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS | <Tap as Port>::FEATURES;

    fn peek(&mut self) -> Option<&[u8]> {
        self.frames.front().map(Vec::as_slice)
    }

    fn consume(&mut self) {
        self.frames.pop_front();
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.sent.push(wire.to_vec());
        true
    }
}

/// A device, and a driver that has accepted all of its features but `without`, in split rings.
fn device(without: u64) -> (NetDevice<Speaks>, Driver, u64) {
    let options = Options { max_pairs: 1, mac: Some([2; 6]), mtu: Some(9000), ..Options::default() };
    let device = NetDevice::new(options, |_| Ok(Speaks::default())).unwrap();
    let features = device.control().offered() & !without & !feature::RING_PACKED & !feature::LOG_ALL;
    let driver = Driver::start(&device, features | PLAIN, 2);
    (device, driver, features)
}

/// Sends the device a frame with a header.
fn send(driver: &mut Driver, wire: &[u8]) {
    let (addr, at) = driver.buffer(1, 0, 4096);
    driver.memory.write(at, wire);
    driver.rings[1].chain(0, &[(addr, wire.len() as u32, 0)]);
}

fn wire(header: VnetHdr, frame: &[u8]) -> Vec<u8> {
    [&header.to_bytes(), frame].concat()
}

/// The device neither follows an offload that was not negotiated nor passes it on.
#[test]
fn the_device_follows_no_offload() {
    for (bit, _, asks) in offloads() {
        let (mut device, mut driver, _) = device(bit);
        send(&mut driver, &wire(asks.header, &asks.frame));
        poll_until(&mut device, || driver.rings[1].take().is_some());
        assert_eq!(driver.drops(), [("not_negotiated", 1)], "{}", feature::name(bit));
        assert!(device.ports()[0].sent.is_empty());
    }
}

/// The driver gets no frame whose header uses an offload that it did not accept: the device does
/// the work itself.
#[test]
fn the_device_passes_no_offload_on() {
    for (_, bits, asks) in offloads() {
        let (mut device, mut driver, features) = device(bits);
        driver.post_rx(0, 0, 16, 2048);
        device.ports()[0].frames.push_back(wire(asks.header, &asks.frame));
        poll_until(&mut device, || driver.rings[0].ring.used_idx() > 0 || !driver.drops().is_empty());
        let mut frames = 0;
        while let Some((head, len)) = driver.rings[0].take() {
            let (_, at) = driver.buffer(0, head as u16, 2048);
            let header = VnetHdr::from_bytes(driver.memory.read(at, 12).try_into().unwrap());
            let checked = Offloads::received(features).check(header, len as usize - 12);
            assert_eq!(checked, Ok(header), "{}", feature::name(bits));
            frames += 1;
        }
        assert!(frames > 0 || asks.header.gso_type == VnetHdr::GSO_UDP, "{} is dropped", feature::name(bits));
        assert!(driver.drops().is_empty() || frames == 0);
    }
}

/// A frame without mergeable buffers is in one buffer, or nowhere.
#[test]
fn the_device_merges_no_buffers() {
    let (mut device, mut driver, _) = device(feature::MRG_RXBUF);
    driver.post_rx(0, 0, 16, 2048);
    for len in [3000, 100] {
        let frame = wire(VnetHdr::PLAIN, &vec![7; len]);
        device.ports()[0].frames.push_back(frame);
    }
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 1);
    assert_eq!((driver.rings[0].take(), driver.drops()), (Some((0, 112)), vec![("too_big", 1)]));
    let (_, at) = driver.buffer(0, 0, 2048);
    assert_eq!(driver.memory.read(at, 12), VnetHdr::PLAIN.to_bytes());
}

/// Tables are refused, in both directions.
#[test]
fn the_device_reads_no_tables() {
    for (ring, flags) in [(0, DESC_WRITE), (1, 0)] {
        let (mut device, mut driver, _) = device(feature::INDIRECT_DESC);
        let (addr, _) = driver.buffer(ring, 0, 2048);
        driver.rings[ring].chain(0, &[(addr, 160, flags | DESC_INDIRECT)]);
        device.ports()[0].frames.push_back(wire(VnetHdr::PLAIN, &[7; 100]));
        poll_until(&mut device, || driver.stats.queue_error("indirect") == 1);
    }
}

/// The device signals by the flag, whatever the event index is, and writes no event index of its
/// own.
#[test]
fn the_device_knows_no_event_index() {
    for (flags, event, wanted) in [(0, 1000, true), (AVAIL_NO_INTERRUPT, 0, false)] {
        let (mut device, mut driver, _) = device(feature::EVENT_IDX);
        let ring = &driver.rings[1].ring;
        ring.set_avail_flags(flags);
        ring.set_used_event(event);
        ring.set_avail_event(0xbeef);
        let _ = driver.rings[1].call.read();
        send(&mut driver, &wire(VnetHdr::PLAIN, &[7; 100]));
        poll_until(&mut device, || driver.rings[1].take().is_some());
        assert_eq!(signalled(&driver.rings[1].call), wanted, "flags {flags}, event index {event}");
        assert_eq!(driver.rings[1].ring.avail_event(), 0xbeef);
    }
}

fn signalled(call: &EventFd) -> bool {
    call.read().is_ok()
}

/// Each buffer has a used entry of its own.
#[test]
fn the_device_uses_no_batches() {
    let (mut device, mut driver, _) = device(feature::IN_ORDER);
    for head in 0..16 {
        let (addr, at) = driver.buffer(1, head, 128);
        driver.memory.write(at, &wire(VnetHdr::PLAIN, &[7; 64]));
        driver.rings[1].chain(head, &[(addr, 76, 0)]);
    }
    poll_until(&mut device, || driver.rings[1].ring.used_idx() == 16);
    let used: Vec<_> = std::iter::from_fn(|| driver.rings[1].take()).map(|(head, _)| head).collect();
    assert_eq!(used, (0..16).collect::<Vec<_>>());
}

/// A log that was set and not negotiated is not written.
#[test]
fn the_device_writes_no_log() {
    let (mut device, mut driver, _) = device(feature::LOG_ALL);
    let log = device::memfd(1 << 20);
    driver.front.query(request::SET_LOG_BASE, &u64s([1 << 20, 0]), &[log.as_fd()]).unwrap();
    driver.post_rx(0, 0, 16, 2048);
    device.ports()[0].frames.push_back(wire(VnetHdr::PLAIN, &[7; 100]));
    poll_until(&mut device, || driver.rings[0].take().is_some());
    let mut bits = vec![1; 1 << 20];
    std::os::unix::fs::FileExt::read_exact_at(&log, &mut bits, 0).unwrap();
    assert!(
        bits.iter().all(|&byte| byte == 0) && driver.stats.log_misses.load(std::sync::atomic::Ordering::Relaxed) == 0
    );
}

/// What split rings can have.
const RINGS: u64 = feature::INDIRECT_DESC | feature::EVENT_IDX | feature::IN_ORDER;

/// A driver of a back end that has everything but `without`, in split rings.
fn driver(without: u64, options: NetOptions) -> Harness {
    let every = Speaks::FEATURES | FEATURES | RINGS;
    Harness::with(Behaviour { features: every & !without, ..Behaviour::default() }, options)
}

fn large() -> NetOptions {
    NetOptions::new(RxMode::Mergeable).max_frame(65549)
}

/// A frame whose header claims an offload that was not negotiated is dropped and counted.
#[test]
fn the_driver_believes_no_offload() {
    for (_, bits, asks) in offloads() {
        let mut harness = driver(bits, large());
        assert_eq!(harness.net.features() & bits, 0);
        harness.device.deliver_with(&mut harness.ring, asks.header, &asks.frame);
        assert_eq!(take(&mut harness.pair.rx).len(), 0, "{}", feature::name(bits));
        assert_eq!(harness.pair.rx.stats().not_negotiated, 1, "{}", feature::name(bits));
        harness.close();
    }
    // A verified checksum is a hint, and is ignored.
    let mut harness = driver(feature::GUEST_CSUM, large());
    let verified = VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN };
    harness.device.deliver_with(&mut harness.ring, verified, &frame(1, 100));
    assert_eq!(take(&mut harness.pair.rx)[0].meta, Meta::default());
    harness.close();
}

/// The driver's frames use no offload that the device lacks.
#[test]
fn the_driver_asks_for_no_offload() {
    for (bit, _, asks) in offloads() {
        let mut harness = driver(bit, large());
        harness.deliver(&asks.frame);
        let mut packet = take(&mut harness.pair.rx).remove(0);
        packet.meta = asks.meta;
        let features = harness.net.features();
        let sent = harness.pair.tx.send(packet).is_ok();
        harness.pair.tx.flush();
        // Refused, or done by the driver itself.
        let mut frames = 0;
        while let Some(head) = harness.tx.take() {
            let at = harness.tx.chain(head)[0].addr;
            let header = VnetHdr::from_bytes(harness.device.read(at, 12).try_into().unwrap());
            assert_eq!(Offloads::sent(features & !bit).check(header, 1 << 16), Ok(header), "{}", feature::name(bit));
            harness.tx.add_used(u32::from(head), 0);
            frames += 1;
        }
        assert_eq!(frames > 0, sent, "{}", feature::name(bit));
        harness.pair.tx.complete();
        harness.close();
    }
}

/// A count of buffers means nothing where frames are in one buffer.
#[test]
fn the_driver_merges_no_buffers() {
    let mut harness = driver(feature::MRG_RXBUF, NetOptions::new(RxMode::Small));
    for n in 1..3 {
        let head = harness.ring.take().unwrap();
        let at = harness.ring.chain(head)[0].addr;
        harness.device.write(at, &wire(VnetHdr { num_buffers: 2, ..VnetHdr::PLAIN }, &frame(n, 100)));
        harness.ring.add_used(u32::from(head), 112);
        let frames: Vec<_> = take(&mut harness.pair.rx).iter().map(Packet::to_vec).collect();
        assert_eq!(frames, [frame(n, 100)]);
    }
    harness.close();
}

/// The driver describes buffers by chains, never by a table.
#[test]
fn the_driver_writes_no_tables() {
    let mut harness = driver(feature::INDIRECT_DESC, large().ring_features(RINGS & !feature::INDIRECT_DESC));
    harness.deliver(&vec![7; 9000]);
    let packet = take(&mut harness.pair.rx).remove(0);
    harness.pair.tx.send(packet).unwrap();
    harness.pair.tx.flush();
    let head = harness.tx.take().unwrap();
    let chain = harness.tx.chain(head);
    assert!(chain.len() >= 3 && chain.iter().all(|d| d.flags & DESC_INDIRECT == 0), "{chain:?}");
    harness.tx.add_used(u32::from(head), 0);
    harness.pair.tx.complete();
    harness.close();
}

/// The driver kicks by the flag, whatever the event index is, and writes no event index of its own.
#[test]
fn the_driver_knows_no_event_index() {
    for (flags, wanted) in [(0, true), (1, false)] {
        let mut harness =
            driver(feature::EVENT_IDX, NetOptions::new(RxMode::Small).ring_features(RINGS & !feature::EVENT_IDX));
        harness.deliver(&frame(1, 100));
        let packet = take(&mut harness.pair.rx).remove(0);
        harness.tx.split().set_used_flags(flags);
        harness.tx.split().set_avail_event(if wanted { 1000 } else { 0 });
        harness.ring.split().set_used_event(0xbeef);
        let kicks = || EventFdOf(&harness.device.kicks()[1]).take();
        kicks();
        harness.pair.tx.send(packet).unwrap();
        harness.pair.tx.flush();
        assert_eq!(kicks(), wanted, "flags {flags}");
        let _ = netmem_packet::Wait::arm(&mut harness.pair.rx);
        assert_eq!(harness.ring.split().used_event(), 0xbeef);
        let head = harness.tx.take().unwrap();
        harness.tx.add_used(u32::from(head), 0);
        harness.pair.tx.complete();
        harness.close();
    }
}

/// A back end's end of an eventfd.
struct EventFdOf<'a>(&'a std::fs::File);

impl EventFdOf<'_> {
    /// Whether it was signalled since the last time.
    fn take(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(self.0, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0;
        if ready {
            rustix::io::read(self.0, &mut [0u8; 8]).unwrap();
        }
        ready
    }
}

/// A used entry stands for its own buffer, and not for those before it.
#[test]
fn the_driver_takes_no_batches() {
    let mut harness =
        driver(feature::IN_ORDER, NetOptions::new(RxMode::Small).ring_features(RINGS & !feature::IN_ORDER));
    for n in 0..4 {
        harness.deliver(&frame(n, 100));
    }
    for packet in take(&mut harness.pair.rx) {
        harness.pair.tx.send(packet).unwrap();
    }
    harness.pair.tx.flush();
    let heads: Vec<_> = std::iter::from_fn(|| harness.tx.take()).collect();
    harness.tx.add_used(u32::from(heads[3]), 0);
    assert_eq!((harness.pair.tx.complete(), harness.pair.tx.posted()), (1, 3));
    for head in &heads[..3] {
        harness.tx.add_used(u32::from(*head), 0);
    }
    assert_eq!((harness.pair.tx.complete(), harness.pair.tx.posted(), harness.pair.tx.stats().stopped), (3, 0, None));
    receive(&mut harness.pair.rx, &mut driver::DropAll::default());
    harness.close();
}
