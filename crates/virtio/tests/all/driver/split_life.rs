//! Queues of device memory with large segments, while their memory, their device and the flows'
//! queues change; what is sent from device memory; and what a bad link does to it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use netmem_netem::LinkOptions;
use netmem_packet::{
    Checksum, DeviceFrag, Gso, GsoKind, Headers, Meta, Packet, PollThenSleep, Queues, RxQueue, SplitTxQueue, TxQueue,
};
use netmem_pool::{PeerShared, RegionOptions, RegionProvider};
use netmem_testing::driver::split::{BoundDevice, DeviceMemory, assert_split_closed, bind, take};
use netmem_testing::driver::tcp::{RINGS, WireFrames, flow, payload, receive, tcp};
use netmem_testing::driver::*;
use netmem_virtio::device::port::{Echo, LinkStats, Linked, Play, Port, Steering};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{EitherRx, NetOptions, RxMode, SplitOptions, VirtioRxQueues};
use netmem_virtio::net::{VnetHdr, feature};

/// Proves MEM-10: frames cross a link that changes bits. Frames that are marked as verified are as
/// they were sent, also if the port had marked them before. The others are delivered without the
/// mark.
#[test]
fn frames_of_a_bad_link_are_unverified() {
    // As of a tap, which reports all of its frames.
    for flags in [0, VnetHdr::DATA_VALID] {
        let sent: Vec<_> = (0..2000)
            .map(|i| tcp(i % 2 == 0, i as u8, i, &[1; 12], &frame(i.into(), 200 + i as usize % 1200)))
            .collect();
        let header = VnetHdr { flags, ..VnetHdr::PLAIN };
        let options: LinkOptions = "corrupt=30%,seed=3".parse().unwrap();
        let stats = Arc::new(LinkStats::default());
        let port = Linked::new(WireFrames::new(header, &sent), options, 0, stats.clone());
        let memory = DeviceMemory::new(2000);
        let split = memory.split().header_bytes(244);
        let mut b = BoundDevice::new(port, memory.add(NetOptions::new(RxMode::Small)), &split);
        let (mut seen, mut damaged) = (0, 0);
        until(|| {
            for got in take(&mut b.rx) {
                let (bytes, verified) = (memory.bytes(&got), got.meta.checksum == Checksum::Verified);
                // What was changed in the IP header alone has a checksum of its own, which this
                // process can compute.
                let at = Headers::parse(&sent[seen]).unwrap();
                let same = bytes.get(at.l4..) == Some(&sent[seen][at.l4..]);
                assert!(!verified || same, "frame {seen} was changed, and is verified");
                damaged += u64::from(!verified);
                seen += 1;
            }
            seen == sent.len()
        });
        let corrupted = stats.to_driver().find(|(name, _)| *name == "corrupted").unwrap().1;
        // Most bits are in what the checksum covers.
        assert!(damaged > corrupted * 8 / 10 && damaged <= corrupted, "{damaged} of {corrupted}");
        b.close();
    }
}

/// A port whose frames a test releases.
struct Gate(WireFrames, Arc<AtomicBool>);

impl Port for Gate {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = WireFrames::FEATURES;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.1.load(Relaxed) { self.0.peek() } else { None }
    }

    fn consume(&mut self) {
        self.0.consume();
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

/// Proves MEM-1 and MEM-10: TCP is steered by both addresses and ports, and else by the local port,
/// while frames come.
#[test]
fn tcp_is_steered() {
    let flows: Vec<_> = (0..3).map(|n| flow(n == 1, n as u8, n, &[1000; 30])).collect();
    let ends = |frame: &[u8]| {
        let at = Headers::parse(frame).unwrap();
        let ip = |bytes: &[u8]| -> std::net::IpAddr {
            match <[u8; 4]>::try_from(bytes) {
                Ok(v4) => v4.into(),
                Err(_) => <[u8; 16]>::try_from(bytes).unwrap().into(),
            }
        };
        let (from, to) = at.addresses(frame).split_at(at.addresses(frame).len() / 2);
        let (source, destination) = at.ports(frame);
        ((ip(from), source).into(), (ip(to), destination).into())
    };
    let steering = Steering::new();
    // One connection by itself, the others by their port; UDP with the same port is not concerned.
    let (remote, local) = ends(&flows[2][0]);
    steering.steer_tcp(80, 1);
    steering.steer_connection(remote, local, Some(0));
    let turns: Vec<_> = (0..30).flat_map(|i| flows.iter().map(move |flow| flow[i].clone())).collect();
    let open = Arc::new(AtomicBool::new(false));
    let port = Gate(WireFrames::new(VnetHdr::PLAIN, &turns), open.clone());
    let mut ports = steering.spread(port, 2).unwrap().into_iter();
    let memory = DeviceMemory::new(1000);
    let device = Options { max_pairs: 2, serve_control: true, ..Options::default() };
    let device = NetDevice::new(device, |_| Ok(ports.next().unwrap())).unwrap();
    let mut device_thread = DeviceThread::new(device);
    let (net, mut pairs) = device_thread.probe(memory.add(NetOptions::new(RxMode::Big)).pairs(2).pages(3000));
    let split = memory.split().header_bytes(SplitOptions::TCP_V6).cache(64);
    let (second, first) = (pairs.pop().unwrap(), pairs.pop().unwrap());
    let mut queues = [bind(first.rx, &split), bind(second.rx, &split)];
    open.store(true, Relaxed);
    device_thread.control.wake();
    let mut got: HashMap<usize, Vec<Vec<u8>>> = HashMap::new();
    until(|| {
        for (n, rx) in queues.iter_mut().enumerate() {
            got.entry(n).or_default().extend(take(rx).iter().map(|frame| {
                assert_ne!(frame.meta.checksum, Checksum::Unknown);
                payload(&memory, frame)
            }));
        }
        got.values().flatten().map(Vec::len).sum::<usize>() == 90_000
    });
    assert!(got[&0].concat() == frame(2, 30_000), "the connection that was steered");
    assert_eq!(got[&1].iter().map(Vec::len).sum::<usize>(), 60_000);
    for rx in queues {
        assert_split_closed(&rx.close().unwrap(), 0);
    }
    drop((first.tx, second.tx, net, device_thread));
}

/// Proves MEM-8: a large segment leaves from device memory, from up to 17 places, and comes back
/// through an echo into pages of device memory; or cut into segments, where the device has no
/// segmentation. In every format of rings.
#[test]
fn large_segments_leave_from_device_memory() {
    for (rings, cut) in RINGS.into_iter().flat_map(|rings| [(rings, false), (rings, true)]) {
        // More than all buffers have.
        let memory = DeviceMemory::new(4700);
        let supply = RegionProvider::new(RegionOptions::new(2048).build::<PeerShared>().unwrap());
        // A receiver of small mode accepts no segments: its device cuts them.
        let mode = if cut { RxMode::Small } else { RxMode::Big };
        let options = memory.add(NetOptions::new(mode)).ring_features(rings);
        let options = if cut { options.memory(supply.region().clone(), supply.clone()) } else { options.tx_pages(64) };
        let mut b =
            BoundDevice::new(Echo::new(), options, &memory.split().header_bytes(SplitOptions::TCP_V6).cache(64));
        let mut tx = b.tx.into_split::<Arc<u64>>();
        let (base, page) = b.rx.poll(|poll| {
            poll.with_napi(|host, device| {
                let page = device.alloc().unwrap();
                (page.dma_addr() - page.file_offset(), host.alloc().unwrap())
            })
        });
        let (binding, mut data) = (Arc::new(7), Vec::new());
        let mut places = Vec::new();
        for n in 0..17 {
            let part = frame(n, 3000 + n as usize);
            let at = (4600 + 3 * n) * 4096 + 17 * n;
            memory.write(at, &part);
            data.extend(part);
            places.push(DeviceFrag { dma: base + at, len: 3000 + n as u32, holder: binding.clone() });
        }
        let whole = tcp(false, 9, 1000, &[1; 12], &data);
        let at = Headers::parse(&whole).unwrap();
        let mut head = whole[..at.payload].to_vec();
        // Only the pseudo header is summed.
        let mut sum = netmem_packet::Sum::default();
        sum.add(at.addresses(&whole));
        sum.add_word(6);
        sum.add_word((whole.len() - at.l4) as u16);
        head[at.l4 + 16..at.l4 + 18].copy_from_slice(&sum.value().to_be_bytes());
        let mut page = page;
        page.copy_from(64, &head).unwrap();
        let mut packet = Packet::new(page.freeze_range(64..64 + head.len()));
        let gso = Gso { kind: GsoKind::TcpV4, size: 1448, headers: head.len() as u16, ecn: false };
        packet.meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: Some(gso) };
        assert_eq!((places.len(), packet.len()), (17, 66));
        tx.send_split(packet, &mut places).unwrap();
        tx.flush();
        assert_eq!((tx.held(), Arc::strong_count(&binding)), (17, 18));
        let n = if cut { data.len().div_ceil(1448) } else { 1 };
        let frames = receive(&mut b.rx, n);
        let got: Vec<u8> = frames.iter().flat_map(|frame| payload(&memory, frame)).collect();
        assert!(got == data, "{rings:#x}");
        for frame in &frames {
            assert!(frame.meta.gso.is_some() != cut && frame.meta.checksum != Checksum::Unknown);
            assert_eq!(frame.head().len(), 66);
        }
        until(|| {
            tx.complete();
            tx.posted() == 0
        });
        assert_eq!((tx.held(), Arc::strong_count(&binding)), (0, 1));
        drop((frames, tx));
        assert_split_closed(&b.rx.close().unwrap(), 0);
        drop(b.net);
    }
}

/// Segments of ten flows, in turn, each with its number in its bytes.
fn all_flows() -> Vec<Vec<u8>> {
    let flows: Vec<_> = (0..10).map(|n| flow(n % 2 == 1, n as u8, n, &[1300; 8])).collect();
    (0..8).flat_map(|i| flows.iter().map(move |flow| flow[i].clone())).collect()
}

/// Whether bytes are the payload of consecutive segments of [`all_flows`].
fn is_of_a_flow(head: &[u8], bytes: &[u8]) -> bool {
    let at = Headers::parse(head).unwrap();
    let number = *at.addresses(head).last().unwrap();
    let seq = u32::from_be_bytes(head[at.l4 + 4..at.l4 + 8].try_into().unwrap());
    let from = seq.wrapping_sub(0xffff_0000) as usize;
    let all = frame(number.into(), 8 * 1300);
    all.get(from..from + bytes.len()) == Some(bytes)
}

/// Proves MEM-1 and MEM-11: a queue changes between host memory and device memory of either page
/// size, under traffic of large segments. Every frame is whole, no page is lost, and the device
/// splits again after each restart.
#[test]
fn queues_are_restarted_under_large_segments() {
    for rings in [0, feature::INDIRECT_DESC, feature::RING_PACKED | feature::INDIRECT_DESC] {
        let memories = [DeviceMemory::of_order(640, 0), DeviceMemory::of_order(64, 4)];
        let port = pcap(&all_flows(), Play::Loop);
        let mut device_thread = DeviceThread::one(port);
        let options = memories.iter().fold(NetOptions::new(RxMode::Big), |options, memory| memory.add(options));
        let accounting = Accounting::default();
        let (net, mut pairs) = device_thread.probe(accounting.count(options.ring_features(rings)));
        let pair = pairs.remove(0);
        let mut queues = VirtioRxQueues::new([pair.rx]).header_bytes(SplitOptions::TCP_V6).cache(64);
        for round in 0..6 {
            let memory = &memories[round % 2];
            if round % 3 == 2 {
                queues.detach(0).unwrap();
            } else {
                queues.attach(0, memory.provider.clone()).unwrap();
            }
            let (mut large, mut seen) = (0, 0);
            until(|| {
                match &mut *queues.get(0).unwrap() {
                    EitherRx::Split(rx) => {
                        assert!(rx.splits_headers());
                        for got in take(rx) {
                            let mut head = vec![0; got.head().len()];
                            got.head().copy_to(0, &mut head).unwrap();
                            assert!(is_of_a_flow(&head, &payload(memory, &got)), "round {round}");
                            large += u64::from(got.meta.gso.is_some());
                            seen += 1;
                        }
                    }
                    EitherRx::Host(rx) => rx.poll(|poll| {
                        use netmem_packet::Poll;
                        poll.receive(64, &mut |packet: Packet<PeerShared>| {
                            let bytes = packet.to_vec();
                            let at = Headers::parse(&bytes).unwrap();
                            assert!(is_of_a_flow(&bytes[..at.payload], &bytes[at.payload..]), "round {round}");
                            seen += 1;
                        });
                    }),
                    EitherRx::Stopped => panic!("round {round}"),
                }
                seen > 60
            });
            assert!(round % 3 == 2 || large > 0, "round {round}: nothing was joined");
        }
        drop(pair.tx);
        drop(queues);
        drop(net);
        accounting.assert_balanced();
        assert_eq!((memories[0].free_pages(), memories[1].free_pages()), (640, 64));
    }
}

/// Proves MEM-11: after a reconnect the new device is asked to split, and one that cannot fills
/// chains in order. The queue, which sleeps between frames, follows either.
#[test]
fn a_queue_follows_its_device() {
    let memory = DeviceMemory::new(640);
    let accounting = Accounting::default();
    let device = |split_headers| {
        let mut port = Some(pcap(&all_flows(), Play::Loop));
        DeviceThread::new(
            NetDevice::new(Options { split_headers, ..Options::default() }, |_| Ok(port.take().unwrap())).unwrap(),
        )
    };
    let mut device_thread = device(true);
    let (mut net, mut pairs) = device_thread.probe(accounting.count(memory.add(NetOptions::new(RxMode::Big))));
    let pair = pairs.remove(0);
    let mut rx = bind(pair.rx, &memory.split().header_bytes(SplitOptions::TCP_V6).cache(64));
    for (round, splits) in [true, false, true, true, false].into_iter().enumerate() {
        if round > 0 {
            device_thread = device(splits);
            net.reconnect(device_thread.connect()).unwrap();
            // The next poll switches to the new ring.
            rx.poll(|_| ());
        }
        assert_eq!(rx.splits_headers(), splits);
        let mut seen = 0;
        let mut sleep = PollThenSleep::new(Duration::ZERO);
        while seen < 200 {
            let mut moved = 0;
            for got in take(&mut rx) {
                let mut bytes = vec![0; got.head().len()];
                got.head().copy_to(0, &mut bytes).unwrap();
                let at = Headers::parse(&bytes).unwrap();
                let linear = bytes.split_off(at.payload);
                // With options of 12 bytes, 28 or 48 bytes of payload are in the host part where it
                // is filled first.
                assert_eq!(linear.is_empty(), splits);
                assert!(is_of_a_flow(&bytes, &[linear, payload(&memory, &got)].concat()), "round {round}");
                moved += 1;
            }
            seen += moved;
            sleep.turn(moved, &mut [&mut rx], Some(Duration::from_secs(60))).unwrap();
        }
    }
    drop(pair.tx);
    assert_split_closed(&rx.close().unwrap(), 0);
    drop(net);
    accounting.assert_balanced();
    assert_eq!(memory.free_pages(), 640);
}
