//! The ports that use files and the kernel: captures and tap devices.

use std::borrow::Cow;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use netmem_netem::{Link, flip};
use netmem_testing::device::*;
use netmem_testing::tap::{Wire, tap_name, taps};
use netmem_testing::{installed, skip};
use netmem_virtio::device::port::{CaptureError, LinkStats, Linked, Pcap, Play, Port, PortError, Tap, TapError};
use netmem_virtio::device::{DeviceError, DropReason, NetDevice};
use netmem_virtio::net::{OFFLOAD_FRAME, VnetHdr, feature};
use netmem_virtio::virtqueue::DESC_WRITE;
use pcap_file::DataLink;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionBlock;
use pcap_file::pcapng::blocks::simple_packet::SimplePacketBlock;

fn sample(n: usize, max: usize) -> Vec<Vec<u8>> {
    (0..n).map(|i| (0..14 + i * 97 % (max - 13)).map(|j| (i * 31 + j) as u8).collect()).collect()
}

fn pcap(frames: &[Vec<u8>]) -> Vec<u8> {
    let header = PcapHeader { snaplen: 1 << 20, datalink: DataLink::ETHERNET, ..PcapHeader::default() };
    let mut w = PcapWriter::with_header(Vec::new(), header).unwrap();
    for f in frames {
        w.write_packet(&PcapPacket::new(Duration::from_secs(1), f.len() as u32, f)).unwrap();
    }
    w.into_writer()
}

fn interface(linktype: DataLink) -> InterfaceDescriptionBlock<'static> {
    InterfaceDescriptionBlock { linktype, snaplen: 0, options: vec![] }
}

fn pcapng(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut w = PcapNgWriter::new(Vec::new()).unwrap();
    w.write_pcapng_block(interface(DataLink::ETHERNET)).unwrap();
    for (i, f) in frames.iter().enumerate() {
        let (original_len, data) = (f.len() as u32, Cow::Borrowed(&f[..]));
        if i % 3 == 0 {
            w.write_pcapng_block(SimplePacketBlock { original_len, data }).unwrap();
        } else {
            let timestamp = Duration::from_secs(1);
            w.write_pcapng_block(EnhancedPacketBlock {
                interface_id: 0,
                timestamp,
                original_len,
                data,
                options: vec![],
            })
            .unwrap();
        }
    }
    w.into_inner()
}

fn open(bytes: &[u8], play: Play) -> Result<Pcap, CaptureError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    Pcap::open(file.path(), play).map_err(|e| match e {
        PortError::Capture { source, .. } => source,
        e => panic!("{e}"),
    })
}

#[test]
fn a_capture_arrives_byte_for_byte() {
    let frames = sample(3000, 9000);
    for (bytes, features, each) in [(pcap(&frames), MERGEABLE, 1536), (pcapng(&frames), PLAIN, 9216)] {
        let port = open(&bytes, Play::Once).unwrap();
        let mut device = NetDevice::new(one_pair(), |_| Ok(port.clone())).unwrap();
        let mut driver = Driver::start(&device, features, 1);
        driver.post_rx(0, 0, 128, each);
        let (mut got, mut frame, mut left) = (Vec::new(), Vec::new(), 0);
        until(|| {
            device.poll();
            while let Some((id, len)) = driver.rings[0].take() {
                let (addr, at) = driver.buffer(0, id as u16, each);
                let part = driver.memory.read(at, len as usize);
                if left == 0 {
                    left = VnetHdr::from_bytes(*part.first_chunk().unwrap()).num_buffers;
                }
                left -= 1;
                frame.extend(part);
                if left == 0 {
                    got.push(frame.split_off(12));
                    frame.clear();
                }
                driver.rings[0].chain(id as u16, &[(addr, each as u32, DESC_WRITE)]);
            }
            device.ports()[0].is_done() && got.len() == frames.len()
        });
        assert!(got == frames);
    }
}

#[test]
fn a_capture_can_be_looped() {
    let mut port = open(&pcap(&sample(3, 100)), Play::Loop).unwrap();
    for i in 0..10 {
        let want = port.frame(i % 3).unwrap().to_vec();
        assert_eq!(&port.peek().unwrap()[12..], want);
        port.consume();
    }
}

#[test]
fn bad_captures_are_named() {
    let frames = sample(5, 1000);
    type Write = fn(&[Vec<u8>]) -> Vec<u8>;
    for write in [pcap as Write, pcapng as Write] {
        let good = write(&frames);
        // Cut anywhere: either an error that names it, or the end of a record.
        for cut in 0..good.len() {
            match open(&good[..cut], Play::Once) {
                Ok(p) => assert!(p.len() < frames.len()),
                Err(CaptureError::CutOff { record }) => assert!(record <= frames.len()),
                Err(CaptureError::NotACapture(_) | CaptureError::Empty) => assert!(cut < 64, "{cut}"),
                Err(e) => panic!("cut at {cut}: {e:?}"),
            }
        }
        // Any byte may be anything: no panic, whatever the answer.
        for at in 0..good.len().min(400) {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                let _ = open(&bad, Play::Once);
            }
        }
        let with = |f: Vec<u8>| open(&write(&[frames[0].clone(), f, frames[1].clone()]), Play::Once);
        assert!(matches!(with(vec![]), Err(CaptureError::TooShort { record: 2, len: 0 })));
        assert!(matches!(with(vec![0; 13]), Err(CaptureError::TooShort { record: 2, len: 13 })));
        assert!(with(vec![0; 65536]).is_ok() && with(vec![0; OFFLOAD_FRAME]).is_ok());
        assert!(matches!(with(vec![0; OFFLOAD_FRAME + 1]), Err(CaptureError::TooLong { record: 2, len: 65550, .. })));
        assert!(matches!(open(&write(&[]), Play::Once), Err(CaptureError::Empty)));
    }
    assert!(matches!(open(b"not a capture, but long enough for one", Play::Once), Err(CaptureError::NotACapture(_))));
    assert!(matches!(open(b"", Play::Once), Err(CaptureError::NotACapture(_))));
    let header = PcapHeader { datalink: DataLink::RAW, ..PcapHeader::default() };
    let raw = PcapWriter::with_header(Vec::new(), header).unwrap().into_writer();
    assert!(matches!(open(&raw, Play::Once), Err(CaptureError::NotEthernet(_))));
    let mut w = PcapWriter::new(Vec::new()).unwrap();
    w.write_packet(&PcapPacket::new(Duration::ZERO, 1500, &[0; 96])).unwrap();
    let e = open(&w.into_writer(), Play::Once);
    assert!(matches!(e, Err(CaptureError::Snapped { record: 1, captured: 96, len: 1500 })), "{e:?}");
    let missing = Pcap::open(Path::new("/nonexistent/netmem.pcap"), Play::Once).unwrap_err();
    assert!(matches!(missing, PortError::Capture { source: CaptureError::Read(_), .. }));
}

/// Whether taps can be made and changed here; reports it if not.
fn taps_and_ip() -> bool {
    if let Err(why) = installed(&["ip"]) {
        skip(&why);
        return false;
    }
    taps()
}

#[track_caller]
fn ip(args: &[&str]) {
    assert!(Command::new("ip").args(args).status().unwrap().success(), "ip {args:?}");
}

fn tap_error(name: &str, queues: usize) -> TapError {
    match Tap::open(name, queues, false).unwrap_err() {
        PortError::Tap { source, .. } => source,
        e => panic!("{e}"),
    }
}

#[test]
fn bad_tap_names_are_named() {
    for name in ["", "sixteen-bytes-xx", "a/b", "a b", "..", "tap%d", "a:b", "a\0b"] {
        assert!(matches!(tap_error(name, 1), TapError::Name), "{name}");
    }
    assert!(matches!(tap_error("nmq", 0), TapError::Queues { .. }));
    assert!(matches!(tap_error("nmq", 257), TapError::Queues { .. }));
    if !taps() {
        return;
    }
    assert!(matches!(tap_error("lo", 1), TapError::Taken));
    let name = tap_name();
    let _held = Tap::open(&name, 1, false).unwrap();
    assert!(matches!(tap_error(&name, 1), TapError::Taken));
    assert!(matches!(tap_error(&name, 2), TapError::Taken));
}

fn exists(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).exists()
}

#[test]
fn taps_have_queues_and_go_away() {
    if !taps() {
        return;
    }
    let name = tap_name();
    let taps = Tap::open(&name, 4, true).unwrap();
    assert_eq!((taps.len(), taps[3].name(), exists(&name)), (4, &*name, true));
    drop(taps);
    until(|| !exists(&name));
}

/// Frames from the kernel reach the driver, and the driver's frames the kernel.
#[test]
fn the_kernel_at_the_other_end() {
    if !taps() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 2);
    driver.post_rx(0, 0, SIZE, 2048);
    let wire = match Wire::new(&name) {
        Ok(wire) => wire,
        Err(e) => return skip(&format!("no packet sockets here: {e}")),
    };
    let payload = [0x5a; 700];
    let mut seen = 0;
    until(|| {
        wire.send(&payload);
        device.poll();
        while let Some((id, len)) = driver.rings[0].take() {
            let (addr, at) = driver.buffer(0, id as u16, 2048);
            let got = driver.memory.read(at, len as usize);
            let h = VnetHdr::from_bytes(*got.first_chunk().unwrap());
            assert_eq!((h.num_buffers, h.flags, h.gso_type), (1, 0, 0));
            if got.ends_with(&payload) {
                seen += 1;
            }
            driver.rings[0].chain(id as u16, &[(addr, 2048, DESC_WRITE)]);
        }
        seen >= 5
    });
    // And back: count what the kernel reports as received.
    let received = || {
        let path = format!("/sys/class/net/{name}/statistics/rx_packets");
        std::fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap()
    };
    let before = received();
    let mut wire = VnetHdr::default().to_bytes().to_vec();
    wire.extend([0xff; 6].into_iter().chain([2, 0, 0, 0, 0, 9, 0x88, 0xb5]).chain([0; 46]));
    let (addr, at) = driver.buffer(1, 0, 2048);
    driver.memory.write(at, &wire);
    for _ in 0..100 {
        driver.rings[1].chain(0, &[(addr, 12, 0), (addr + 12, 60, 0)]);
        poll_until(&mut device, || driver.rings[1].take().is_some());
    }
    assert_eq!((received() - before, frames(&driver.stats).1), (100, 100));
}

/// Frames of every length reach buffers of every shape, and the kernel writes them there: only a
/// frame that is longer than those before it, or that came between a pass and a sleep, is copied.
#[test]
fn the_kernel_writes_into_posted_buffers() {
    if !taps_and_ip() {
        return;
    }
    // Bytes of the descriptors of each chain, features, and bytes of the header.
    let shapes: [(&[u32], u64, usize); 5] = [
        (&[16384], PLAIN, 12),
        (&[12, 16384], PLAIN, 12),
        (&[5, 9, 1, 100, 16384], PLAIN, 12),
        (&[256], MERGEABLE, 12),
        (&[16384], feature::VHOST_USER_PROTOCOL, 10),
    ];
    for (shape, features, header) in shapes {
        let name = tap_name();
        let mut taps = Tap::open(&name, 1, true).unwrap();
        ip(&["link", "set", &name, "mtu", "9000"]);
        let wire = match Wire::new(&name) {
            Ok(wire) => wire,
            Err(e) => return skip(&format!("no packet sockets here: {e}")),
        };
        let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
        let mut driver = Driver::start(&device, features, 2);
        device.poll();
        let (parts, each) = (shape.len() as u16, shape.iter().sum::<u32>() as usize);
        let chains = (SIZE / parts).min(120);
        let post = |driver: &mut Driver, n: u16| {
            let (mut addr, _) = driver.buffer(0, n, each);
            let chain: Vec<_> = shape
                .iter()
                .map(|&len| {
                    addr += u64::from(len);
                    (addr - u64::from(len), len, DESC_WRITE)
                })
                .collect();
            driver.rings[0].chain(n * parts, &chain);
        };
        (0..chains).for_each(|n| post(&mut driver, n));
        let mut sent = 0;
        for len in (4..300).chain((300..8900).step_by(97)) {
            let payload: Vec<u8> = [&(len as u32).to_be_bytes()[..], &vec![len as u8; len - 4]].concat();
            wire.send(&payload);
            sent += 1;
            let (mut frame, mut left, mut came) = (Vec::new(), 0, false);
            until(|| {
                device.poll();
                while let Some((id, len)) = driver.rings[0].take() {
                    let n = id as u16 / parts;
                    let got = driver.memory.read(driver.buffer(0, n, each).1, len as usize);
                    post(&mut driver, n);
                    if left == 0 {
                        assert_eq!(got[..10], [0; 10]);
                        left = if header == 12 { u16::from_le_bytes([got[10], got[11]]) } else { 1 };
                    }
                    left -= 1;
                    frame.extend(got);
                    if left == 0 {
                        // The kernel has frames of its own for a new interface.
                        came |= frame[header + 14..] == payload;
                        frame.clear();
                    }
                }
                came
            });
        }
        let in_place = driver.stats.rx_in_place.load(Relaxed);
        assert!(in_place > sent / 2 && in_place <= frames(&driver.stats).0, "{in_place} of {sent}, {shape:?}");
        assert_eq!(driver.queue_errors(), []);
    }
}

/// Large frames from the driver reach the kernel byte for byte, however their chains are cut, and
/// of those of 16 KiB and more only the first bytes are copied.
#[test]
fn the_kernel_reads_large_frames_in_place() {
    if !taps() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 2);
    let wire = match Wire::new(&name) {
        Ok(wire) => wire,
        Err(e) => return skip(&format!("no packet sockets here: {e}")),
    };
    wire.listen();
    let mut word = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (word >> 33) as usize
    };
    let (mut in_place, mut sent) = (0, 0);
    // Bytes in wire form, and the most descriptors of the chain: in one call of the kernel there is
    // room for 62.
    for len in [1000, 16383, 16384, 20000, 40000, 64000, 65535] {
        for most in [1, 2, 3, 17, 62, 63, 200] {
            let mut bytes = VnetHdr::default().to_bytes().to_vec();
            bytes.extend([0xff; 6].into_iter().chain([2, 0, 0, 0, 0, 9, 0x88, 0xb5]));
            bytes.extend((bytes.len()..len).map(|_| random() as u8));
            let (addr, at) = driver.buffer(1, 0, 1 << 17);
            driver.memory.write(at, &bytes);
            let mut cuts: Vec<usize> = (1..most).map(|_| 1 + random() % (len - 1)).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            cuts.dedup();
            let chain: Vec<_> = cuts.windows(2).map(|c| (addr + c[0] as u64, (c[1] - c[0]) as u32, 0)).collect();
            driver.rings[1].chain(0, &chain);
            poll_until(&mut device, || driver.rings[1].take().is_some());
            let mut got = None;
            until(|| {
                got = wire.receive();
                got.is_some()
            });
            assert!(got.unwrap() == bytes[12..], "{len} bytes in {} parts", chain.len());
            (in_place, sent) = (in_place + u64::from(len >= 16384 && chain.len() <= 62), sent + 1);
        }
    }
    assert_eq!(driver.stats.tx_in_place.load(Relaxed), in_place);
    assert_eq!(frames(&driver.stats).1, sent);
    // A header that asks for what was not negotiated, or for nonsense, is refused as it is for
    // small frames.
    let (addr, at) = driver.buffer(1, 0, 1 << 17);
    let (needs, segment) = (VnetHdr { flags: VnetHdr::NEEDS_CSUM, ..VnetHdr::default() }, 1);
    for header in [needs, VnetHdr { gso_type: segment, gso_size: 1000, ..needs }] {
        driver.memory.write(at, &header.to_bytes());
        driver.rings[1].chain(0, &[(addr, 64000, 0)]);
        poll_until(&mut device, || driver.rings[1].take().is_some());
    }
    assert_eq!(driver.stats.tx_in_place.load(Relaxed), in_place + 2, "without offloads, a header has no meaning");
    assert!(driver.queue_errors().is_empty());
}

/// The driver's memory is gone when the kernel reads a frame there: the ring stops for that, and
/// the port continues.
#[test]
fn a_large_frame_of_memory_that_is_gone() {
    if !taps() {
        return;
    }
    netmem_pool::sigbus::install().unwrap();
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 2);
    let (addr, at) = driver.buffer(1, 0, 1 << 17);
    driver.memory.write(at, &VnetHdr::default().to_bytes());
    rustix::fs::ftruncate(&driver.memory.file, at as u64 + 8192).unwrap();
    driver.rings[1].chain(0, &[(addr, 64000, 0)]);
    poll_until(&mut device, || !driver.queue_errors().is_empty());
    assert!(driver.queue_errors().iter().all(|(name, _)| *name == "memory_lost"), "{:?}", driver.queue_errors());
    assert!(device.ports()[0].take_error().is_none());
    rustix::fs::ftruncate(&driver.memory.file, MEMORY as u64).unwrap();
}

/// The driver's memory is gone when the kernel writes a frame there: the ring stops for that, and
/// the port continues.
#[test]
fn a_frame_for_memory_that_is_gone() {
    if !taps() {
        return;
    }
    netmem_pool::sigbus::install().unwrap();
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let wire = match Wire::new(&name) {
        Ok(wire) => wire,
        Err(e) => return skip(&format!("no packet sockets here: {e}")),
    };
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 2);
    // The headers are in a page that stays, and the frames in pages that go.
    let (headers, frames) = (BUFFERS, BUFFERS + 8192);
    for n in 0..100 {
        let (header, frame) = (GUEST + headers as u64 + 12 * u64::from(n), GUEST + frames as u64 + 2048 * u64::from(n));
        driver.rings[0].chain(2 * n, &[(header, 12, DESC_WRITE), (frame, 2048, DESC_WRITE)]);
    }
    // Nothing waits in private memory then.
    until(|| {
        wire.send(&[0x5a; 100]);
        device.poll();
        driver.stats.rx_in_place.load(Relaxed) > 0
    });
    rustix::fs::ftruncate(&driver.memory.file, frames as u64).unwrap();
    until(|| {
        wire.send(&[0x5a; 100]);
        device.poll();
        !driver.queue_errors().is_empty()
    });
    assert!(driver.queue_errors().iter().all(|(name, _)| *name == "memory_lost"), "{:?}", driver.queue_errors());
    assert!(device.ports()[0].take_error().is_none());
    rustix::fs::ftruncate(&driver.memory.file, MEMORY as u64).unwrap();
}

/// Between the kernel and the driver is a bad link: what arrives is what the model predicts, in
/// both directions.
#[test]
fn a_bad_link_before_the_kernel() {
    if !taps_and_ip() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, false).unwrap();
    // The kernel sends nothing by itself then.
    if let Err(e) = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1") {
        return skip(&format!("no way to turn IPv6 off: {e}"));
    }
    ip(&["link", "set", &name, "up"]);
    let wire = match Wire::new(&name) {
        Ok(wire) => wire,
        Err(e) => return skip(&format!("no packet sockets here: {e}")),
    };
    let (options, stats) = ("loss=10%,duplicate=5%,corrupt=5%,seed=3".parse().unwrap(), Arc::<LinkStats>::default());
    let port = |pair| Ok(Linked::new(taps.remove(0), options, pair, Arc::clone(&stats)));
    let mut device = NetDevice::new(one_pair(), port).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 2);
    driver.post_rx(0, 0, SIZE, 2048);
    // Frames that came before the driver are dropped.
    device.poll();
    const FRAMES: u32 = 2000;
    let frame = |n: u32| [&[0xff; 6][..], &[2, 0, 0, 0, 0, 7], &[8, 0], &n.to_be_bytes(), &[0x5a; 100]].concat();
    let (mut model, mut expected, mut got) = (Link::new(options, 0), Vec::new(), Vec::new());
    for n in 0..FRAMES {
        wire.send_frame(&frame(n));
        model.send(frame(n), 0, Duration::ZERO);
        while let Some(mut arrived) = model.receive(Duration::ZERO) {
            if let Some(draw) = arrived.corrupt {
                flip(&mut arrived.packet[14..], draw);
            }
            expected.push(arrived.packet);
        }
        until(|| {
            device.poll();
            while let Some((id, len)) = driver.rings[0].take() {
                got.push(driver.memory.read(driver.buffer(0, id as u16, 2048).1 + 12, len as usize - 12));
                driver.post_rx(0, id as u16, 1, 2048);
            }
            got.len() >= expected.len()
        });
    }
    assert!(got == expected);
    // And back.
    let received = || {
        let path = format!("/sys/class/net/{name}/statistics/rx_packets");
        std::fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap()
    };
    let (before, mut model) = (received(), Link::new(options, 1));
    let (addr, at) = driver.buffer(1, 0, 2048);
    driver.memory.write(at, &[&VnetHdr::PLAIN.to_bytes()[..], &frame(0)].concat());
    for _ in 0..FRAMES {
        driver.rings[1].chain(0, &[(addr, 130, 0)]);
        poll_until(&mut device, || driver.rings[1].take().is_some());
        model.send((), 0, Duration::ZERO);
    }
    device.poll();
    while model.receive(Duration::ZERO).is_some() {}
    let counts = model.counts();
    assert_eq!(received() - before, counts.received);
    assert_eq!(stats.from_driver().map(|count| count.1).collect::<Vec<_>>(), counts.values());
    assert!(counts.lost > 100 && counts.duplicated > 50 && counts.corrupted > 50);
}

/// A device that sleeps is woken by a frame from the kernel.
#[test]
fn a_sleeping_device_is_woken_by_its_port() {
    if !taps() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let wire = match Wire::new(&name) {
        Ok(wire) => wire,
        Err(e) => return skip(&format!("no packet sockets here: {e}")),
    };
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 1);
    driver.post_rx(0, 0, SIZE, 2048);
    let (stop, control) = (AtomicBool::new(false), device.control());
    std::thread::scope(|s| {
        let worker = s.spawn(|| device.run(&stop, netmem_virtio::Spin::default()));
        for _ in 0..5 {
            until(|| asleep(&driver.stats) == 1);
            wire.send(&[0x5a; 100]);
            until(|| driver.rings[0].take().is_some());
        }
        stop.store(true, Relaxed);
        control.wake();
        worker.join().unwrap().unwrap();
    });
}

#[test]
fn a_deleted_tap_ends_the_run() {
    if !taps_and_ip() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.post_rx(0, 0, 16, 2048);
    ip(&["link", "del", &name]);
    let e = device.run(&AtomicBool::new(false), netmem_virtio::Spin::default()).unwrap_err();
    assert!(matches!(e, DeviceError::Port(PortError::Tap { .. })), "{e:?}");
}

/// A queue that is not read does not notice by itself that its interface was deleted.
#[test]
fn a_tap_that_is_deleted_without_a_front_end_ends_the_run() {
    if !taps_and_ip() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let stats = device.stats();
    let (stop, control) = (AtomicBool::new(false), device.control());
    std::thread::scope(|s| {
        let worker = s.spawn(|| device.run(&stop, netmem_virtio::Spin::default()));
        let _ends = Ends { stop: &stop, control: &control };
        until(|| asleep(&stats) == 1);
        ip(&["link", "del", &name]);
        until(|| worker.is_finished());
        let e = worker.join().unwrap().unwrap_err();
        assert!(matches!(e, DeviceError::Port(PortError::Tap { .. })), "{e:?}");
    });
}

/// Proves NET-10: what the kernel queued for one front end, or for none, is not for the next one.
#[test]
fn frames_for_one_front_end_do_not_reach_the_next() {
    if !taps() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 1, true).unwrap();
    let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
    let wire = match Wire::new(&name) {
        Ok(wire) => wire,
        Err(e) => return skip(&format!("no packet sockets here: {e}")),
    };
    let old = [0xa1; 100];
    // Without buffers, so that the frames stay where they are.
    let driver = Driver::start(&device, PLAIN, 2);
    (0..10).for_each(|_| wire.send(&old));
    device.poll();
    let stats = driver.hang_up();
    device.poll();
    let left = || stats.dropped(DropReason::FrontEndLeft);
    assert!(left() >= 10);
    (0..10).for_each(|_| wire.send(&old));
    let mut driver = Driver::start(&device, PLAIN, 2);
    device.poll();
    assert!(left() >= 20);
    driver.post_rx(0, 0, SIZE, 2048);
    let new = [0xb2; 100];
    wire.send(&new);
    let mut came = false;
    until(|| {
        device.poll();
        while let Some((id, len)) = driver.rings[0].take() {
            let got = driver.memory.read(driver.buffer(0, id as u16, 2048).1, len as usize);
            assert!(!got.ends_with(&old), "a frame for the front end before");
            came |= got.ends_with(&new);
        }
        came
    });
}

/// Queues of other processes are seen: the kernel sends them frames, too.
#[test]
fn queues_of_other_processes_are_counted() {
    if !taps() {
        return;
    }
    let name = tap_name();
    let mut mine = Tap::open(&name, 2, false).unwrap();
    let queues = mine[0].queues().clone();
    let Some(attached) = Tap::attached(&name) else { return skip("no sysfs") };
    assert_eq!((attached, queues.others()), (2, Some(0)));
    let mut other = Tap::open(&name, 3, false).unwrap();
    assert_eq!((Tap::attached(&name), queues.others()), (Some(5), Some(3)));
    // Each detaches a queue that it does not need: two are left here, which is no more than this
    // side has opened.
    mine[1].served(false);
    other[1].served(false);
    other[2].served(false);
    assert_eq!((Tap::attached(&name), queues.others()), (Some(2), Some(1)));
    drop(other);
    // A child that another test makes has a copy of each descriptor, until it runs.
    until(|| Tap::attached(&name) == Some(1));
    mine[1].served(true);
    assert_eq!((Tap::attached(&name), queues.others()), (Some(2), Some(0)));
}

/// A queue whose pair the driver no longer uses is detached, and its flows' frames come by the
/// queues that are left. The first stays.
#[test]
fn a_queue_that_is_not_served_gets_no_frames() {
    if !taps() {
        return;
    }
    let name = tap_name();
    let mut taps = Tap::open(&name, 3, false).unwrap();
    let Some(3) = Tap::attached(&name) else { return skip("no sysfs") };
    for (queue, served, attached) in
        [(1, false, 2), (1, false, 2), (2, false, 1), (0, false, 1), (2, true, 2), (0, true, 2), (1, true, 3)]
    {
        taps[queue].served(served);
        assert_eq!(Tap::attached(&name), Some(attached), "queue {queue}, served: {served}");
    }
    assert!(taps.iter_mut().all(|tap| tap.take_error().is_none() && tap.peek().is_none()));
}

/// A pipe is read as far as its writer goes, and a pipe without one is named instead of waited for.
#[test]
fn captures_from_pipes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe.pcap");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let error = |path: &Path| match Pcap::open(path, Play::Loop).unwrap_err() {
        PortError::Capture { source, .. } => source,
        e => panic!("{e}"),
    };
    assert!(matches!(error(&path), CaptureError::NoWriter));
    assert!(matches!(error(Path::new("/dev/null")), CaptureError::NotAFile));
    let frames = sample(2000, 1500);
    // Open for reading and writing: the open does not wait for another process, and it keeps the
    // pipe open before the writer writes.
    let mut writer = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let writes = std::thread::spawn({
        let bytes = pcap(&frames);
        move || writer.write_all(&bytes).unwrap()
    });
    let capture = Pcap::open(&path, Play::Loop).unwrap();
    writes.join().unwrap();
    assert_eq!(capture.len(), frames.len());
    assert_eq!(capture.frame(1999), Some(&frames[1999][..]));
}
