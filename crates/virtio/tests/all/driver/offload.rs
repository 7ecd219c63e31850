//! Offloads between a driver and a device that have few of them in common, or none. If neither side
//! does an offload, it is done in software on the way, and the kernel accepts the result.

use netmem_packet::{Checksum, Gso, GsoKind, Meta, Packet, SoftwareTx, TxBulk, complete_checksum};
use netmem_pool::{Page, PeerShared, PoolOptions, SharedPool};
use netmem_testing::driver::*;
use netmem_testing::large_frames::{CWR, ECE, FIN, FrameKind, PSH, assert_sums, leave_partial};
use netmem_testing::{installed, skip};
use netmem_virtio::device::port::{ALL_OFFLOADS, Echo, Port, Tap};
use netmem_virtio::device::{DropReason, NetDevice, Options};
use netmem_virtio::driver::{NetOptions, Offload, QueuePair, RxMode, VirtioNet};
use netmem_virtio::net::{OFFLOAD_FRAME, VnetHdr, feature};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A driver with these options, and a pool of its own to send from.
fn probe<P: Port + 'static>(
    device_thread: &mut DeviceThread<P>,
    options: NetOptions,
) -> (VirtioNet, QueuePair, SharedPool<PeerShared>) {
    let (net, mut pairs) = device_thread.probe(options.tx_pages(2048));
    let pool = net.tx_pool(PoolOptions::new("sent")).unwrap();
    (net, pairs.remove(0), pool)
}

/// Pages that were not returned. A page that the magazines refuse, because in portable mode the
/// lock of the CPU is held, is on the return stack until a reclaim.
fn in_flight(pool: &SharedPool<PeerShared>) -> u64 {
    pool.reclaim();
    pool.stats().inflight
}

/// A packet of as many pages as it needs.
fn packet(pool: &SharedPool<PeerShared>, bytes: &[u8]) -> Packet<PeerShared> {
    let mut frags = bytes.chunks(3900).map(|bytes| {
        let mut page = pool.alloc().expect("there are more pages than frames at a time");
        page.copy_from(128, bytes).unwrap();
        page.freeze_range(128..128 + bytes.len())
    });
    let mut packet = Packet::new(frags.next().unwrap());
    frags.for_each(|frag| packet.push(frag).unwrap());
    packet
}

/// The frames that a packet stands for, whole.
fn whole(packet: Packet<PeerShared>, page: impl FnMut() -> Option<Page<PeerShared>>) -> Vec<Vec<u8>> {
    let frames = match packet.meta.gso {
        Some(_) => packet.segment(true, page).unwrap().collect(),
        None => vec![packet],
    };
    let frames = frames.into_iter().map(|frame| {
        let mut bytes = frame.to_vec();
        if let Checksum::Partial { start, offset } = frame.meta.checksum {
            assert!(complete_checksum(&mut bytes, start, offset));
        }
        bytes
    });
    frames.collect()
}

/// A frame to be sent and its offloads, and the frames that it stands for.
fn random(rng: &mut fastrand::Rng) -> (Vec<u8>, Meta, Vec<Vec<u8>>) {
    let mut kind = FrameKind::random(rng);
    if let Some(tcp) = &mut kind.tcp {
        tcp.flags |= rng.u8(..) & (FIN | PSH | ECE | CWR);
    }
    let mut bytes = |n: usize| -> Vec<u8> { (0..n).map(|_| rng.u8(..)).collect() };
    match kind.id % 3 {
        0 => {
            let frame = kind.frame(&bytes(200));
            (frame.clone(), Meta::default(), vec![frame])
        }
        1 => {
            let frame = kind.frame(&bytes(1300));
            let mut partial = frame.clone();
            leave_partial(&mut partial, &kind);
            (partial, Meta { checksum: kind.partial(), gso: None }, vec![frame])
        }
        _ => {
            let payload = bytes(1 + usize::from(kind.id) % 20_000);
            let size = payload.len().div_ceil(100).max(300 + usize::from(kind.id) % 1000);
            let mut large = kind.frame(&payload);
            leave_partial(&mut large, &kind);
            let meta = Meta { checksum: kind.partial(), gso: Some(kind.gso(size as u16)) };
            (large, meta, kind.segments(&payload, size))
        }
    }
}

/// All sorts of drivers, and the MTU that each can have.
fn drivers() -> [(NetOptions, usize); 6] {
    let new = NetOptions::new;
    [
        (new(RxMode::Small).offloads(Offload::None), 1500),
        (new(RxMode::Small), 1500),
        (new(RxMode::Mergeable).offloads(Offload::Checksum), 1500),
        (new(RxMode::Mergeable).max_frame(9018).offloads(Offload::None), 9000),
        (new(RxMode::Mergeable).max_frame(OFFLOAD_FRAME), 9000),
        (new(RxMode::Big).max_frame(9018), 9000),
    ]
}

/// Proves NET-9: frames with any offload, through the driver, the device's echo and back, arrive as
/// the frames that they stand for, all of them and in order, whatever features the driver and the
/// device have negotiated; and every page is returned.
#[test]
fn any_offload_through_an_echo() {
    let mut rng = fastrand::Rng::with_seed(21);
    let some = feature::HOST_TSO4 | feature::HOST_USO | feature::GUEST_TSO6;
    for withhold in [0, feature::HOST_OFFLOADS, feature::GUEST_OFFLOADS, some, ALL_OFFLOADS] {
        for (options, _) in drivers() {
            let name = format!("{options:?} without {withhold:#x}");
            let mut echo = Some(Echo::new());
            let device = Options { withhold, ..Options::default() };
            let mut device_thread = DeviceThread::new(NetDevice::new(device, |_| Ok(echo.take().unwrap())).unwrap());
            let (net, QueuePair { mut rx, tx }, pool) = probe(&mut device_thread, options);
            let mut bulk = TxBulk::holding(SoftwareTx::new(tx, || pool.alloc()), 64);
            let (mut want, mut got, mut left) = (Vec::new(), Vec::new(), 60);
            until(|| {
                if left > 0 && bulk.room() > 0 {
                    let (frame, meta, frames) = random(&mut rng);
                    let mut sent = packet(&pool, &frame);
                    sent.meta = meta;
                    bulk.push(sent);
                    want.extend(frames);
                    left -= 1;
                }
                bulk.flush();
                for received in take(&mut rx) {
                    got.extend(whole(received, || pool.alloc()));
                }
                left == 0 && got.len() >= want.len() && bulk.target().queue().posted() == 0
            });
            let (soft, dropped) = (bulk.target().stats(), bulk.stats().dropped);
            assert_eq!((soft.refused, soft.dropped, dropped), (0, 0, 0), "{name}");
            for frame in &mut want {
                let (a, b) = frame[..12].split_at_mut(6);
                a.swap_with_slice(b);
            }
            assert!(got == want, "{name}");
            // Each side did what the negotiated features do not allow.
            let sent = net.features() & feature::HOST_OFFLOADS;
            assert_eq!(soft.segmented > 0, sent & feature::HOST_TSO4 == 0, "{name}");
            assert_eq!(soft.checksummed > 0, sent & feature::CSUM == 0, "{name}");
            let (checksummed, segmented) = (&device_thread.stats.checksummed, &device_thread.stats.segmented);
            let all = net.features() & feature::GUEST_OFFLOADS == feature::GUEST_OFFLOADS;
            // The device counts at the end of a pass, after the driver has the frames.
            if sent & feature::HOST_TSO6 != 0 {
                until(|| (segmented.load(Relaxed) > 0) != all);
            }
            if sent != 0 {
                until(|| (checksummed.load(Relaxed) > 0) == (net.features() & feature::GUEST_CSUM == 0));
            }
            assert_eq!(device_thread.stats.drops().map(|d| d.1).sum::<u64>(), 0, "{name}");
            drop((bulk, net));
            assert_closed(&rx.close().unwrap(), 0);
            assert_eq!(in_flight(&pool), 0, "{name}");
        }
    }
}

use std::sync::atomic::Ordering::Relaxed;

/// A port that supports no offloads, and keeps what it is sent.
#[derive(Default)]
struct Plain(Arc<Mutex<Vec<Vec<u8>>>>);

impl Port for Plain {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = 0;

    fn peek(&mut self) -> Option<&[u8]> {
        None
    }

    fn consume(&mut self) {}

    fn send(&mut self, wire: &[u8]) -> bool {
        self.0.lock().unwrap().push(wire.to_vec());
        true
    }
}

/// Proves NET-9: a port that supports no offloads gets the frames that the driver's segments stand
/// for; one that cannot be cut is counted as refused.
#[test]
fn a_port_without_offloads() {
    let mut rng = fastrand::Rng::with_seed(22);
    let port = Plain::default();
    let sent = Arc::clone(&port.0);
    let mut device_thread = DeviceThread::one(port);
    let (net, QueuePair { rx, tx }, pool) = probe(&mut device_thread, NetOptions::new(RxMode::Small));
    assert_eq!(net.features() & feature::HOST_OFFLOADS, feature::HOST_OFFLOADS & !feature::HOST_UFO);
    let (mut bulk, mut want) = (TxBulk::holding(tx, 64), Vec::new());
    for _ in 0..200 {
        let (frame, meta, frames) = random(&mut rng);
        let mut packet = packet(&pool, &frame);
        packet.meta = meta;
        until(|| {
            bulk.flush();
            bulk.room() > 0
        });
        bulk.push(packet);
        want.extend(frames);
    }
    // The headers are those of UDP, and the frame's type is TCP.
    let kind = FrameKind { tcp: None, v6: false, ..FrameKind::random(&mut rng) };
    let mut lie = packet(&pool, &kind.frame(&[1; 1000]));
    lie.meta.gso = Some(Gso { kind: GsoKind::TcpV4, ..kind.gso(100) });
    bulk.push(lie);
    until(|| {
        bulk.flush();
        bulk.held() == 0 && bulk.target().posted() == 0
    });
    let plain = VnetHdr { num_buffers: 1, ..VnetHdr::PLAIN }.to_bytes();
    let sent = sent.lock().unwrap();
    assert_eq!(sent.len(), want.len());
    for (sent, want) in sent.iter().zip(&want) {
        assert!(sent[VnetHdr::LEN..] == want[..]);
        assert!(sent[..10] == plain[..10]);
    }
    // The device counts at the end of a pass, after the driver has its buffers back.
    until(|| device_thread.stats.dropped(DropReason::PortRefused) == 1);
    drop((bulk, net));
    assert_closed(&rx.close().unwrap(), 0);
    assert_eq!(in_flight(&pool), 0);
}

/// Proves NET-7: neither side negotiates an offload without those that it needs, whatever the other
/// side requests.
#[test]
fn offloads_come_with_what_they_need() {
    let lacks = [feature::CSUM | feature::GUEST_CSUM, feature::GUEST_USO4, feature::GUEST_TSO4 | feature::GUEST_TSO6];
    for lacks in lacks {
        let offered = feature::with_needs(ALL_OFFLOADS & !lacks);
        assert_ne!(offered, ALL_OFFLOADS & !lacks);
        let device = NetDevice::new(Options { withhold: lacks, ..Options::default() }, |_| Ok(Echo::new())).unwrap();
        assert_eq!(device.control().offered() & ALL_OFFLOADS, offered);
        let features = hostile::FEATURES | ALL_OFFLOADS & !lacks;
        let behaviour = hostile::Behaviour { features: features & !lacks, ..hostile::Behaviour::default() };
        let (device, backend) = hostile::Hostile::new(behaviour);
        let probed = VirtioNet::probe(backend, NetOptions::new(RxMode::Mergeable).max_frame(OFFLOAD_FRAME)).unwrap();
        assert_eq!(device.negotiated() & ALL_OFFLOADS, offered);
        drop(probed);
    }
}

/// Runs a test on a thread in a network namespace of its own, which ends with the thread and what
/// it has opened; reports it if there can be none.
fn in_namespace(test: fn()) {
    if let Err(why) = installed(&["ip"]) {
        return skip(&why);
    }
    let thread = std::thread::current().name().unwrap_or("a test").to_owned();
    let run = move || {
        // SAFETY: takes no pointer; the calling thread alone moves.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 || Tap::open("nmo0", 1, false).is_err() {
            return skip("no network namespaces or taps here");
        }
        test();
    };
    let thread = std::thread::Builder::new().name(thread).spawn(run).unwrap();
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

fn ip(args: &str) {
    assert!(Command::new("ip").args(args.split(' ')).status().unwrap().success(), "ip {args}");
}

/// A UDP frame from the driver to the kernel's socket.
fn to_kernel(payload: &[u8], port: u16) -> Vec<u8> {
    let mut frame = Vec::new();
    let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]);
    builder.ipv4([192, 0, 2, 2], [192, 0, 2, 1], 9).udp(7, port).write(&mut frame, payload).unwrap();
    frame
}

/// Has the kernel cut each datagram of a socket into segments of `size` bytes; 0 for no segments.
fn segment_datagrams(socket: &UdpSocket, size: libc::c_int) {
    let (level, option) = (libc::SOL_UDP, libc::UDP_SEGMENT);
    // SAFETY: an int, and its size.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const size).cast(), 4) };
    assert_eq!(set, 0);
}

/// Proves NET-9 by the kernel: datagrams with partial checksums, large ones that are to be cut, and
/// ones of an MTU of 9000 reach a socket of the kernel from our driver, and our driver from the
/// socket, byte for byte, whatever the three of them have agreed on.
#[test]
fn the_kernel_takes_what_we_offload() {
    in_namespace(|| {
        let mut rng = fastrand::Rng::with_seed(23);
        for withhold in [0, ALL_OFFLOADS, feature::HOST_USO | feature::GUEST_USO4 | feature::GUEST_TSO4] {
            for (options, mtu) in drivers() {
                let name = format!("{options:?} without {withhold:#x}, MTU {mtu}");
                let mut taps = Tap::open("nmo0", 1, true).unwrap();
                ip(&format!("link set nmo0 address 02:00:00:00:00:01 mtu {mtu}"));
                for args in ["addr add 192.0.2.1/24 dev nmo0", "neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev nmo0"]
                {
                    ip(args);
                }
                let device = Options { withhold, ..Options::default() };
                let mut device_thread = DeviceThread::new(NetDevice::new(device, |_| Ok(taps.remove(0))).unwrap());
                let (net, QueuePair { mut rx, tx }, pool) = probe(&mut device_thread, options);
                let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let port = socket.local_addr().unwrap().port();
                let mut bytes = |n: usize| -> Vec<u8> { (0..n).map(|_| rng.u8(..)).collect() };
                let small = bytes(1000);
                let large = bytes(4321);
                let longest = bytes(mtu - 28);

                let mut soft = SoftwareTx::new(tx, || pool.alloc());
                let place = Checksum::Partial { start: 34, offset: 6 };
                let gso = Gso { kind: GsoKind::UdpSegment, size: 1000, headers: 42, ecn: false };
                for (payload, gso) in [(&small, None), (&large, Some(gso)), (&longest, None)] {
                    let mut frame = to_kernel(payload, port);
                    frame[40..42].fill(0);
                    let mut pseudo = netmem_packet::Sum::default();
                    pseudo.add(&frame[26..34]);
                    [17, 8 + payload.len() as u16].into_iter().for_each(|word| pseudo.add_word(word));
                    frame[40..42].copy_from_slice(&pseudo.value().to_be_bytes());
                    let mut sent = packet(&pool, &frame);
                    sent.meta = Meta { checksum: place, gso };
                    netmem_packet::TxQueue::send(&mut soft, sent).unwrap();
                }
                netmem_packet::TxQueue::flush(&mut soft);
                let mut want: Vec<&[u8]> = vec![&small];
                want.extend(large.chunks(1000));
                want.push(&longest);
                for want in &want {
                    let mut got = [0; 10_000];
                    let (n, from) = socket.recv_from(&mut got).unwrap_or_else(|e| panic!("{name}: {e}"));
                    assert!(&got[..n] == *want && from.to_string() == "192.0.2.2:7", "{name}");
                }

                socket.connect("192.0.2.2:7").unwrap();
                socket.send(&small).unwrap();
                segment_datagrams(&socket, 1000);
                socket.send(&large).unwrap();
                segment_datagrams(&socket, 0);
                socket.send(&longest).unwrap();
                let (mut got, mut large_frames) = (Vec::new(), 0);
                until(|| {
                    for received in take(&mut rx) {
                        large_frames += u64::from(received.meta.gso.is_some());
                        for frame in whole(received, || pool.alloc()) {
                            if frame[12..14] == [8, 0] && frame[23] == 17 && frame[30..34] == [192, 0, 2, 2] {
                                assert_sums(&frame);
                                got.push(frame[42..].to_vec());
                            }
                        }
                    }
                    got.len() >= want.len()
                });
                assert!(got == want, "{name}");
                let uso = feature::GUEST_USO4 | feature::GUEST_USO6;
                assert_eq!(large_frames > 0, net.features() & uso == uso, "{name}");
                drop((soft, net));
                assert_closed(&rx.close().unwrap(), 0);
                assert_eq!(in_flight(&pool), 0, "{name}");
            }
        }
    });
}
