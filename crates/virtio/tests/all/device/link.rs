//! A port behind a bad link: its faults are those of the model, frames are cut before they cross
//! it, and a device that sleeps is awake when one arrives.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use netmem_netem::{Link, LinkOptions, flip};
use netmem_testing::device::*;
use netmem_virtio::Spin;
use netmem_virtio::device::NetDevice;
use netmem_virtio::device::port::{Echo, LinkCapture, LinkStats, Linked, Port};
use netmem_virtio::net::{VnetHdr, feature};
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};

/// Bytes of a buffer here.
const EACH: usize = 2048;

fn options(text: &str) -> LinkOptions {
    text.parse().unwrap()
}

fn echo(text: &str) -> (NetDevice<Linked<Echo>>, Arc<LinkStats>) {
    let (options, stats) = (options(text), Arc::<LinkStats>::default());
    let port = |pair| Ok(Linked::new(Echo::new(), options, pair, Arc::clone(&stats)));
    (NetDevice::new(one_pair(), port).unwrap(), stats)
}

/// An IPv4 packet, by its type, with a number in it.
fn numbered(n: u32) -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &[8, 0], &n.to_be_bytes(), &[0x5a; 60]].concat()
}

fn exchanged(mut frame: Vec<u8>) -> Vec<u8> {
    let (to, from) = frame.split_at_mut(6);
    to.swap_with_slice(&mut from[..6]);
    frame
}

/// What a link makes of frames that cross it at once.
fn crossed(frames: Vec<Vec<u8>>, options: LinkOptions, number: u64) -> Vec<Vec<u8>> {
    let mut link = Link::new(options, number);
    let cross = |frame: Vec<u8>| {
        link.send(frame, 0, Duration::ZERO);
        std::iter::from_fn(|| link.receive(Duration::ZERO)).collect::<Vec<_>>()
    };
    let arrived = frames.into_iter().flat_map(cross);
    let changed = arrived.map(|mut arrived| {
        if let Some(draw) = arrived.corrupt {
            flip(&mut arrived.packet[14..], draw);
        }
        arrived.packet
    });
    changed.collect()
}

/// Sends `wire`, whose header is in it, and runs a pass of the device.
fn send(device: &mut NetDevice<Linked<Echo>>, driver: &mut Driver, wire: &[u8]) {
    let (addr, at) = driver.buffer(1, 0, EACH);
    driver.memory.write(at, wire);
    driver.rings[1].chain(0, &[(addr, wire.len() as u32, 0)]);
    poll_until(device, || driver.rings[1].take().is_some());
}

/// The frames that the driver has received, in wire form. Their buffers are posted again.
fn received(driver: &mut Driver) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    while let Some((id, len)) = driver.rings[0].take() {
        frames.push(driver.memory.read(driver.buffer(0, id as u16, EACH).1, len as usize));
        driver.post_rx(0, id as u16, 1, EACH);
    }
    frames
}

/// Every frame that comes back is the one that the model has, in its order, there and back.
#[test]
fn the_faults_are_those_of_the_seed() {
    let text = "loss=10%,duplicate=5%,corrupt=5%,seed=7";
    let (mut device, stats) = echo(text);
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.post_rx(0, 0, SIZE, EACH);
    let sent: Vec<_> = (0..3000).map(numbered).collect();
    let there = crossed(sent.clone(), options(text), 1);
    let back = crossed(there.clone().into_iter().map(exchanged).collect(), options(text), 0);
    let mut got = Vec::new();
    for frame in &sent {
        send(&mut device, &mut driver, &[&VnetHdr::PLAIN.to_bytes()[..], frame].concat());
        device.poll();
        got.extend(received(&mut driver).into_iter().map(|wire| wire[VnetHdr::LEN..].to_vec()));
    }
    assert!(got == back, "{} frames of {}", got.len(), back.len());
    let count = |counts: &dyn Fn() -> Vec<(&'static str, u64)>, name| counts().iter().find(|c| c.0 == name).unwrap().1;
    let (from, to) = (|| stats.from_driver().collect(), || stats.to_driver().collect());
    assert_eq!((count(&from, "sent"), count(&from, "received")), (3000, there.len() as u64));
    assert_eq!((count(&to, "sent"), count(&to, "received")), (there.len() as u64, back.len() as u64));
    for name in ["lost", "duplicated", "corrupted"] {
        assert!(count(&from, name) > 50 && count(&to, name) > 50, "{name}");
    }
    assert_eq!((count(&from, "overflowed"), stats.refused()), (0, 0));
}

/// A frame from segmentation offload crosses the link as its segments, each with its checksum.
#[test]
fn large_frames_are_cut_before_the_link() {
    let (mut device, stats) = echo("seed=1");
    let offloads = feature::CSUM | feature::HOST_TSO4 | feature::GUEST_CSUM | feature::GUEST_TSO4;
    let mut driver = Driver::start(&device, MERGEABLE | offloads, 2);
    driver.post_rx(0, 0, SIZE, EACH);
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).tcp(1, 2, 3, 4);
    builder.write(&mut frame, &[0x5a; 1000]).unwrap();
    let header = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        gso_type: VnetHdr::GSO_TCPV4,
        hdr_len: 54,
        gso_size: 100,
        csum_start: 34,
        csum_offset: 16,
        ..VnetHdr::PLAIN
    };
    send(&mut device, &mut driver, &[&header.to_bytes()[..], &frame].concat());
    let mut got = Vec::new();
    until(|| {
        device.poll();
        got.extend(received(&mut driver));
        got.len() == 10
    });
    for wire in got {
        let (header, frame) = wire.split_first_chunk().unwrap();
        assert_eq!(VnetHdr::from_bytes(*header), VnetHdr::PLAIN);
        let packet = SlicedPacket::from_ethernet(frame).unwrap();
        let (Some(etherparse::NetSlice::Ipv4(ip)), Some(TransportSlice::Tcp(tcp))) = (packet.net, packet.transport)
        else {
            panic!("not TCP")
        };
        let sum = tcp.to_header().calc_checksum_ipv4(&ip.header().to_header(), tcp.payload()).unwrap();
        assert_eq!((tcp.payload().len(), tcp.checksum()), (100, sum));
    }
    assert_eq!(stats.from_driver().next(), Some(("sent", 10)));
}

/// A device that sleeps while frames are on the link is woken when they arrive, and by nothing
/// before. Frames for which the driver has no buffers do not wake it.
#[test]
fn a_sleeping_device_is_woken_by_what_arrives() {
    let (mut device, _) = echo("delay=20ms");
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.post_rx(0, 0, 1, EACH);
    let (stop, control) = (AtomicBool::new(false), device.control());
    let stats = device.stats();
    std::thread::scope(|s| {
        let worker = s.spawn(|| device.run(&stop, Spin::default()));
        let _ends = Ends { stop: &stop, control: &control };
        let send = |driver: &mut Driver| {
            until(|| asleep(&stats) == 1);
            let (addr, at) = driver.buffer(1, 0, EACH);
            driver.memory.write(at, &[&VnetHdr::PLAIN.to_bytes()[..], &numbered(1)].concat());
            driver.rings[1].chain(0, &[(addr, 76, 0)]);
            driver.rings[1].kick.write(1).unwrap();
            until(|| driver.rings[1].take().is_some());
        };
        let deadlines = || stats.woken_by_deadline.load(Relaxed);
        loop {
            let begin = Instant::now();
            send(&mut driver);
            until(|| driver.rings[0].take().is_some());
            assert!(begin.elapsed() >= Duration::from_millis(40), "20 ms there and 20 ms back");
            if deadlines() >= 2 {
                break;
            }
            // A device that was kept from its CPU for 20 ms did not sleep before the frame arrived.
            // The next frame may find it asleep.
            driver.post_rx(0, 0, 1, EACH);
            driver.rings[0].kick.write(1).unwrap();
        }
        // The next frame finds no buffer, and waits for one.
        send(&mut driver);
        let before = stats.sleeps.load(Relaxed);
        std::thread::sleep(Duration::from_millis(200));
        until(|| asleep(&stats) == 1);
        // A device that is kept awake sleeps thousands of times.
        let sleeps = stats.sleeps.load(Relaxed) - before;
        assert!(sleeps < 10, "it spins while the driver has no buffers: {sleeps} sleeps");
        driver.post_rx(0, 1, 1, EACH);
        driver.rings[0].kick.write(1).unwrap();
        until(|| driver.rings[0].take().is_some());
        assert!(!worker.is_finished());
    });
}

/// What is on the link towards a driver that leaves is dropped and counted.
#[test]
fn frames_on_the_link_are_not_for_the_next_driver() {
    let (mut device, _) = echo("delay=1ms");
    let mut driver = Driver::start(&device, PLAIN, 2);
    let wire = [&VnetHdr::PLAIN.to_bytes()[..], &numbered(1)].concat();
    for _ in 0..5 {
        send(&mut device, &mut driver, &wire);
    }
    // They arrive at the echo, and are on their way back.
    until(|| {
        device.poll();
        device.ports()[0].deadline(false).is_none()
    });
    device.poll();
    let stats = driver.hang_up();
    device.poll();
    assert_eq!(stats.dropped(netmem_virtio::device::DropReason::FrontEndLeft), 5);
}

/// A capture has each packet once: when it has crossed the link, or when it is dropped, and then
/// why.
#[test]
fn packets_are_captured() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("capture.pcapng");
    let file = Arc::new(LinkCapture::create(&path).unwrap());
    let port = |pair| {
        let link = Linked::new(Echo::new(), LinkOptions::default(), pair, Arc::default());
        Ok(link.captured(Arc::clone(&file)))
    };
    let mut device = NetDevice::new(one_pair(), port).unwrap();
    let mut driver = Driver::start(&device, PLAIN | feature::CSUM, 2);
    driver.post_rx(0, 0, 4, VnetHdr::LEN + 100);
    let (fits, too_big, runt) = (numbered(1), [numbered(2), vec![0; 200]].concat(), vec![1; 5]);
    let segment = VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 100, hdr_len: 54, ..VnetHdr::PLAIN };
    let wrong = numbered(3);
    for (header, frame) in
        [(VnetHdr::PLAIN, &fits), (VnetHdr::PLAIN, &too_big), (VnetHdr::PLAIN, &runt), (segment, &wrong)]
    {
        send(&mut device, &mut driver, &[&header.to_bytes()[..], frame].concat());
        device.poll();
    }
    poll_until(&mut device, || driver.drops() == [("too_big", 1), ("runt", 1), ("not_negotiated", 1)]);
    drop(device);
    file.flush().unwrap();

    let mut reader = PcapNgReader::new(std::fs::File::open(&path).unwrap()).unwrap();
    let mut packets = Vec::new();
    while let Some(block) = reader.next_block() {
        let Block::EnhancedPacket(packet) = block.unwrap() else { continue };
        let (mut comment, mut direction) = (None, None);
        for option in &packet.options {
            match option {
                EnhancedPacketOption::Comment(text) => comment = Some(text.to_string()),
                EnhancedPacketOption::Flags(flags) => direction = Some(flags & 3),
                _ => {}
            }
        }
        packets.push((direction.unwrap(), comment, packet.data.to_vec()));
    }
    let dropped = |why: &str| Some(format!("dropped: {why}"));
    let (inbound, outbound) = (1, 2);
    let want = [
        (outbound, None, fits.clone()),
        (inbound, None, exchanged(fits)),
        (outbound, None, too_big.clone()),
        (inbound, dropped("too_big"), exchanged(too_big)),
        (outbound, dropped("runt"), runt),
        (outbound, dropped("not_negotiated"), wrong),
    ];
    assert_eq!(packets, want);
}
