//! Device memory on our own device. Headers arrive in host memory. Payload arrives in device
//! memory, which this process reads only by system calls, and frames are sent from there.

use netmem_testing::driver;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use netmem_packet::{Checksum, DeviceFrag, Meta, Packet, SplitFrame, SplitTxQueue, TxQueue};
use netmem_pool::{PeerShared, RegionOptions, RegionProvider};
use netmem_testing::driver::split::{BoundDevice, DeviceMemory, bind, compare, take};
use netmem_testing::driver::*;
use netmem_virtio::device::port::{Echo, Gen, Play};
use netmem_virtio::device::{DropReason, NetDevice, Options};
use netmem_virtio::driver::{NetError, NetOptions, RxMode, SplitOptions, VirtioNet, VirtioSplitTx};
use netmem_virtio::net::feature;
use netmem_virtio::{VhostUser, VhostUserError};

/// Proves MEM-11 and POOL-3: frames of all sizes arrive complete in two kinds of memory, for any
/// length of the host part. They are many times the size of the ring and of the memory. At the end
/// the counters of both pools balance.
#[test]
fn frames_arrive_in_two_memories() {
    for (header, ring) in [(14, 256), (SplitOptions::UDP_V4, 64), (SplitOptions::UDP_V6, 256), (200, 2), (1012, 256)] {
        let (want, memory) = (frames(4000, 1518), DeviceMemory::new(200));
        let options = memory.options().ring_size(ring).pages(2048);
        let port = pcap(&want, Play::Once);
        let mut b = BoundDevice::new(port, options, &memory.split().header_bytes(header).cache(64));
        assert_eq!(b.rx.posted(), usize::from(ring) / 2);
        compare(&mut b.rx, &memory, &want);
        let stats = b.rx.stats();
        assert_eq!((stats.frames, stats.passed, stats.stopped), (4000, 4000, None));
        assert_eq!(stats.multi_buffer, want.iter().filter(|f| f.len() > header.into()).count() as u64);
        assert_eq!(stats.bytes, want.iter().map(|f| f.len() as u64).sum::<u64>());
        b.close();
    }
}

/// Proves MEM-11: a frame that ends in the host part has no payload, and uses no page of device
/// memory.
#[test]
fn headers_only() {
    let (want, memory) = ((0..500).map(|i| frame(i, 60)).collect::<Vec<_>>(), DeviceMemory::new(200));
    let mut b = BoundDevice::new(pcap(&want, Play::Once), memory.options(), &memory.split().header_bytes(60));
    let before = b.rx.pool_stats().1.allocated();
    compare(&mut b.rx, &memory, &want);
    assert_eq!((b.rx.stats().multi_buffer, b.rx.pool_stats().1.allocated()), (0, before));
    b.close();
}

/// Proves MEM-11: a frame that is too long for the host part and the page is dropped and counted by
/// the device. The frames before and after it arrive.
#[test]
fn frames_beyond_the_page() {
    let sizes = [60, 1518, 42 + 4096, 42 + 4097, 9014, 60];
    let all: Vec<_> = sizes.iter().zip(0..).map(|(&n, i)| frame(i, n)).collect();
    let want: Vec<_> = all.iter().filter(|f| f.len() <= 42 + 4096).cloned().collect();
    let memory = DeviceMemory::new(200);
    let mut b = BoundDevice::new(pcap(&all, Play::Once), memory.options(), &memory.split());
    compare(&mut b.rx, &memory, &want);
    until(|| b.device_thread.stats.dropped(DropReason::TooBig) == 2);
    assert_eq!(b.rx.stats().frames, 4);
    b.close();
}

/// Proves POOL-5 and MEM-2: payload that users hold outlives the queue, the pool and the device,
/// and is returned from other threads. If users hold all pages, the queue receives nothing; it goes
/// on when pages are returned.
#[test]
fn payload_is_the_users() {
    let (want, memory) = (frames(1000, 1518), DeviceMemory::new(160));
    let mut b = BoundDevice::new(pcap(&want, Play::Once), memory.options(), &memory.split().cache(0));
    let mut held = Vec::new();
    until(|| {
        held.extend(take(&mut b.rx));
        held.len() == 160
    });
    until(|| {
        take(&mut b.rx);
        b.rx.posted() == 0 && b.rx.stats().out_of_buffers > 0
    });
    for (f, want) in held.iter().zip(&want) {
        assert_eq!(memory.bytes(f), *want);
    }
    let (heads, payload): (Vec<_>, Vec<_>) =
        held.into_iter().map(SplitFrame::into_parts).map(|(head, payload, _)| (head, payload)).unzip();
    std::thread::spawn(move || drop(payload)).join().unwrap();
    compare(&mut b.rx, &memory, &want[160..]);
    let closed = b.rx.close().unwrap();
    assert_closed(&closed.device, 0);
    assert!(closed.host.outstanding > 0);
    drop(heads);
    drop((b.tx, b.net));
    b.accounting.assert_balanced();
}

/// The checksum information of the device comes with the frame. Our own device verifies the
/// checksum if the port has not verified it.
#[test]
fn what_is_known_of_checksums() {
    let memory = DeviceMemory::new(200);
    let mut b = BoundDevice::new(Gen::new(100, Some(10)).unwrap(), memory.options(), &memory.split());
    let mut metas = Vec::new();
    until(|| {
        metas.extend(take(&mut b.rx).iter().map(|f| f.meta));
        metas.len() == 10
    });
    assert_eq!(metas, [Meta { checksum: Checksum::Verified, gso: None }; 10]);
    b.close();
}

/// Proves MEM-11: device memory needs certain features and options. If one is missing, the error
/// names it.
#[test]
fn what_it_takes() {
    let memory = DeviceMemory::new(200);
    for missing in [feature::CSUM, feature::GUEST_CSUM] {
        let options = Options { withhold: missing, ..Options::default() };
        let mut device_thread = DeviceThread::new(NetDevice::new(options, |_| Ok(Echo::new())).unwrap());
        let error = VirtioNet::probe(device_thread.connect(), memory.options()).unwrap_err();
        assert!(error.to_string().contains(feature::name(missing)), "{error}");
        assert!(matches!(error, NetError::Backend(VhostUserError::MissingFeature { .. })));
    }
    for options in [NetOptions::new(RxMode::Mergeable), memory.options().premapped(false)] {
        let error = VirtioNet::probe(DeviceThread::one(Echo::new()).connect(), memory.add(options)).unwrap_err();
        assert!(matches!(error, NetError::DeviceMemory { .. }), "{error}");
    }
    let mut device_thread = DeviceThread::one(Echo::new());
    let (net, pairs) = device_thread.probe(memory.options());
    let segments = feature::GUEST_TSO4 | feature::GUEST_TSO6;
    let unwanted = feature::MRG_RXBUF | segments | feature::GUEST_UFO;
    assert_eq!(net.features() & unwanted, 0);
    pairs.into_iter().for_each(close_clean);
    // Big-packet mode has room for segments, and refuses a device without segmentation offload.
    let mut device_thread = DeviceThread::one(Echo::new());
    let (net, pairs) = device_thread.probe(memory.add(NetOptions::new(RxMode::Big)));
    assert_eq!(net.features() & (feature::MRG_RXBUF | segments), segments);
    pairs.into_iter().for_each(close_clean);
}

/// The headers of a frame of UDP over IPv4, without the payload. The checksum is that of the pseudo
/// header only, which the device completes.
fn udp_head(payload: &[u8]) -> (Vec<u8>, Meta) {
    let (from, to) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let builder =
        etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]).ipv4(from, to, 64).udp(7, 9);
    let mut bytes = Vec::new();
    builder.write(&mut bytes, payload).unwrap();
    bytes.truncate(42);
    let len = (payload.len() + 8) as u16;
    let words = [from, to].concat();
    let words = words.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum = words.sum::<u32>() + 17 + u32::from(len);
    let sum = (sum & 0xffff) + (sum >> 16);
    bytes[40..42].copy_from_slice(&(sum as u16).to_be_bytes());
    (bytes, Meta { checksum: Checksum::Partial { start: 34, offset: 6 }, gso: None })
}

/// Proves MEM-8: headers from host memory and payload from device memory make one frame. The holder
/// of the payload is dropped by the thread that completes the frame, when the device is done with
/// it and not before. With tables of descriptors, frames complete in runs.
#[test]
fn frames_leave_from_device_memory() {
    for ring in [0, feature::INDIRECT_DESC, feature::INDIRECT_DESC | feature::RING_PACKED] {
        leave_from_device_memory(ring);
    }
}

fn leave_from_device_memory(ring: u64) {
    let memory = DeviceMemory::new(512);
    let supply = RegionProvider::new(RegionOptions::new(1024).build::<PeerShared>().unwrap());
    let options = memory.options().memory(supply.region().clone(), supply.clone()).ring_features(ring);
    let mut b = BoundDevice::new(Echo::new(), options, &memory.split());
    let mut tx = b.tx.into_split::<Arc<u64>>();
    // Compute the device's address of its memory from a page of it.
    let (_, base) = b.rx.poll(|poll| {
        poll.with_napi(|_, device| {
            let page = device.alloc().unwrap();
            (page.index(), page.dma_addr() - page.file_offset())
        })
    });
    let (mut rng, mut sent, mut back) = (Rng(1), Vec::new(), 0);
    let binding = Arc::new(7);
    // Use pages into which nothing is received. The ring has the first pages and those that replace
    // them.
    let place = 400 * 4096;
    let mut payload = Vec::new();
    for round in 0..300 {
        for i in 0..4 {
            let at = place + i * 8192;
            let data = frame(round * 4 + i, 1 + rng.below(1400) as usize);
            memory.write(at, &data);
            let cut = rng.below(data.len() as u64) as usize;
            for part in [0..cut, cut..data.len()].into_iter().filter(|p| !p.is_empty()) {
                let (dma, len) = (base + at + part.start as u64, part.len() as u32);
                payload.push(DeviceFrag { dma, len, holder: binding.clone() });
            }
            let (head, meta) = udp_head(&data);
            let mut page = b.rx.poll(|poll| poll.with_napi(|host, _| host.alloc())).unwrap();
            // Send frames with and without room for the virtio header.
            let start = if i % 2 == 0 { 64 } else { 0 };
            page.copy_from(start, &head).unwrap();
            let mut packet = Packet::new(page.freeze_range(start..start + head.len()));
            packet.meta = meta;
            let held = tx.held();
            let n = payload.len();
            tx.send_split(packet, &mut payload).unwrap();
            assert_eq!((payload.len(), tx.held()), (0, held + n));
            assert_eq!(Arc::strong_count(&binding), 1 + tx.held());
            sent.push([&head[..], &data].concat());
        }
        tx.flush();
        until(|| {
            for f in take(&mut b.rx) {
                let mut want = sent[back].clone();
                want[..12].rotate_left(6);
                assert_eq!(memory.bytes(&f), want, "frame {back}");
                assert_eq!(f.meta.checksum, Checksum::Partial { start: 34, offset: 6 });
                back += 1;
            }
            back == sent.len()
        });
        if round % 2 == 0 {
            let mut done = 0;
            until(|| {
                done += tx.complete();
                tx.posted() == 0
            });
            assert_eq!((tx.held(), Arc::strong_count(&binding)), (0, 1));
        }
    }
    assert_eq!(tx.stats().frames, 1200);
    // Frames that are never completed are dropped with the queue.
    assert!(Arc::strong_count(&binding) > 1);
    drop(tx);
    assert_eq!(Arc::strong_count(&binding), 1);
    driver::split::assert_split_closed(&b.rx.close().unwrap(), 0);
    drop(b.net);
    b.accounting.assert_balanced();
}

/// Proves MEM-8: a frame that cannot be sent comes back unchanged, with the holders of its payload.
#[test]
fn what_cannot_be_sent() {
    let memory = DeviceMemory::new(200);
    let mut b = BoundDevice::new(Echo::new(), memory.options().ring_size(16).pages(600), &memory.split());
    let mut tx = b.tx.into_split::<Arc<()>>();
    let binding = Arc::new(());
    let (base, host) = b.rx.poll(|poll| {
        poll.with_napi(|host, device| {
            let page = device.alloc().unwrap();
            (page.dma_addr() - page.file_offset(), host.alloc().unwrap().dma_addr())
        })
    });
    let (end, bytes) = (base + 200 * 4096, frame(1, 42));
    let mut head = || {
        let mut page = b.rx.poll(|poll| poll.with_napi(|host, _| host.alloc())).unwrap();
        page.copy_from(64, &bytes).unwrap();
        Packet::new(page.freeze_range(64..106))
    };
    let frag = |dma, len| DeviceFrag { dma, len, holder: binding.clone() };
    let mut refused = |tx: &mut VirtioSplitTx<Arc<()>>, payload: &mut Vec<_>| {
        let (held, n) = (Arc::strong_count(&binding), payload.len());
        let packet = tx.send_split(head(), payload).unwrap_err();
        assert_eq!(packet.to_vec(), bytes);
        assert_eq!((Arc::strong_count(&binding), payload.len()), (held, n));
    };
    let outside = [(base - 1, 10), (end - 9, 10), (end, 1), (base, u32::MAX), (base, 0), (u64::MAX, 2)];
    // The device knows this memory, but it is not device memory, so it must not be sent by address.
    for (dma, len) in outside.into_iter().chain([(host, 64)]) {
        let before = tx.stats().wrong_domain;
        refused(&mut tx, &mut vec![frag(base, 100), frag(dma, len)]);
        assert_eq!(tx.stats().wrong_domain, before + 1, "{dma:#x} {len}");
    }
    // A ring of 16 descriptors never has room for so many fragments.
    refused(&mut tx, &mut (0..15).map(|_| frag(base, 100)).collect());
    refused(&mut tx, &mut (0..18).map(|_| frag(base, 100)).collect());
    assert_eq!((tx.stats().full, tx.stats().frames, tx.posted(), tx.held()), (2, 0, 0, 0));
    let stranger = RegionProvider::new(RegionOptions::new(1).build::<PeerShared>().unwrap());
    let elsewhere = Packet::new(stranger.page().unwrap().freeze_range(0..42));
    assert!(tx.send_split(elsewhere, &mut vec![frag(base, 100)]).is_err());
    drop(tx);
    assert_eq!(Arc::strong_count(&binding), 1);
    driver::split::assert_split_closed(&b.rx.close().unwrap(), 0);
    drop(b.net);
    b.accounting.assert_balanced();
}

/// The device's process of [`never_mapped_here`].
#[test]
fn another_process() {
    let Some(path) = std::env::var_os("NETMEM_TEST_DEVICE") else { return };
    let listener = UnixListener::bind(path).unwrap();
    println!("listening");
    std::io::stdout().flush().unwrap();
    let port = Gen::new(1000, None).unwrap();
    let (mut device, stop) =
        (NetDevice::new(Options::default(), |_| Ok(port.clone())).unwrap(), AtomicBool::new(false));
    let control = device.control();
    std::thread::scope(|s| {
        s.spawn(|| device.run(&stop, netmem_virtio::Spin::default()).unwrap());
        control.handle(listener.accept().unwrap().0).unwrap();
        stop.store(true, Relaxed);
        control.wake();
    });
}

/// If the device is in a process of its own, device memory is never mapped in this process.
#[test]
fn never_mapped_here() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vhost.sock");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "driver::split::another_process", "--nocapture"])
        .env("NETMEM_TEST_DEVICE", &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("listening")));
    let memory = DeviceMemory::new(333);
    let (accounting, want) = (Accounting::default(), Gen::new(1000, None).unwrap().frame().to_vec());
    let backend = VhostUser::connect(&path).unwrap();
    let (net, mut pairs) = VirtioNet::probe(backend, accounting.count(memory.options())).unwrap();
    let pair = pairs.remove(0);
    let mut rx = bind(pair.rx, &memory.split());
    let mut seen = 0;
    let inode = memory.inode();
    until(|| {
        for f in take(&mut rx) {
            assert_eq!(memory.bytes(&f), want);
            seen += 1;
        }
        seen > 10_000
    });
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|l| l.split_whitespace().nth(4) == Some(&inode)).count();
    assert_eq!(mapped, 0, "{maps}");
    let there = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
    assert!(there.lines().any(|l| l.split_whitespace().nth(4) == Some(&inode)), "{there}");
    drop(pair.tx);
    driver::split::assert_split_closed(&rx.close().unwrap(), 0);
    drop(net);
    accounting.assert_balanced();
    assert!(child.wait().unwrap().success());
}
