//! Failures before the first frame: each has a clear error, at once or within the back end's time
//! limit, and leaves nothing behind.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

use netmem_packet::{RxQueue, TxQueue};
use netmem_pool::{Memory, PeerShared, Region, RegionError, RegionOptions, RegionProvider};
use netmem_testing::driver::hostile::{Behaviour, FEATURES, Harness, Hostile, WITHOUT_CONTROL};
use netmem_testing::driver::*;
use netmem_virtio::device::port::{Gen, Sink};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetError, NetOptions, Offload, RxMode, VirtioNet, VirtioRx, VirtioTx};
use netmem_virtio::net::feature;
use netmem_virtio::socket::Listener;
use netmem_virtio::{Request, VhostUser, VhostUserError};

/// Proves POOL-10: a driver whose pages are a range of a provided file sends the device their
/// offset in the file, by whichever addresses the device knows them.
#[test]
fn memory_at_an_offset_of_a_file() {
    const START: u64 = 1 << 20;
    for premapped in [true, false] {
        let file = rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, START + (2 << 20)).unwrap();
        let front = std::fs::File::from(file.try_clone().unwrap());
        let supply = RegionProvider::new(Region::from_fd(file, START.., 0).unwrap());
        let options = NetOptions::new(RxMode::Small).memory(supply.region().clone(), supply.clone());
        let mut b = Harness::new(options.premapped(premapped));
        let want = frame(7, 500);
        b.deliver(&want);
        assert_eq!(take(&mut b.pair.rx).remove(0).to_vec(), want);
        drop(b);
        let mut before = vec![1; START as usize];
        front.read_exact_at(&mut before, 0).unwrap();
        assert!(before.iter().all(|&b| b == 0), "the device wrote in front of the pages");
    }
}

/// The error of a backend that does this with the connection.
fn stranger(server: impl FnOnce(UnixStream) + Send + 'static) -> VhostUserError {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stranger");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || server(listener.accept().unwrap().0));
    let error = VhostUser::connect(&path).unwrap_err();
    server.join().unwrap();
    error
}

#[test]
fn no_socket() {
    let error = VhostUser::connect("/nonexistent/netmem.sock").unwrap_err();
    assert!(matches!(error, VhostUserError::Connect { .. }));
    assert!(error.to_string().contains("/nonexistent/netmem.sock"), "{error}");
    // A file, and a socket without a listener.
    let dir = tempfile::tempdir().unwrap();
    let (file, socket) = (dir.path().join("file"), dir.path().join("socket"));
    std::fs::write(&file, "no socket").unwrap();
    // To drop it would not do: a child that another test makes has a copy of each descriptor, until
    // it runs.
    let listener = UnixListener::bind(&socket).unwrap();
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
    for path in [file, socket] {
        assert!(matches!(VhostUser::connect(&path), Err(VhostUserError::Connect { .. })));
    }
}

#[test]
fn strangers() {
    let garbage = |byte: u8| {
        stranger(move |mut s| {
            let _ = s.write_all(&[byte; 4096]);
            let _ = s.read_to_end(&mut Vec::new());
        })
    };
    for error in [garbage(0), garbage(0xff), garbage(b'\n')] {
        assert!(matches!(error, VhostUserError::Message { .. }), "{error}");
        assert!(error.to_string().contains("does it speak vhost-user"), "{error}");
    }
    // A process that hangs up at once may be a device that is busy.
    let error = stranger(drop);
    assert!(matches!(error, VhostUserError::Busy), "{error}");
    // A peer that sends back what it receives.
    let error = stranger(|mut s| {
        let mut to = s.try_clone().unwrap();
        let _ = std::io::copy(&mut s, &mut to);
    });
    assert!(matches!(error, VhostUserError::Message { .. }), "{error}");
}

/// The back end sends nothing, or a byte now and then: the wait for a whole message is bounded.
#[test]
fn strangers_who_take_their_time() {
    let silent = thread::spawn(|| {
        stranger(|mut s| {
            let _ = s.read_to_end(&mut Vec::new());
        })
    });
    let slow = stranger(|mut s| {
        // The beginning of an answer to GET_FEATURES, a byte now and then.
        for byte in [1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1] {
            if s.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(500));
        }
        panic!("it was waited for without end");
    });
    for error in [slow, silent.join().unwrap()] {
        assert!(matches!(error, VhostUserError::Silent { message: Request::GET_FEATURES, .. }), "{error}");
    }
}

fn probe(behaviour: Behaviour, options: NetOptions) -> Result<(), NetError> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let _device = Hostile::over(theirs, behaviour);
    let backend = VhostUser::own_device(ours)?;
    VirtioNet::probe(backend, options).map(drop)
}

/// A failure at any message ends the probe with that message's name.
#[test]
fn failures_at_every_message() {
    let messages = [
        "GET_FEATURES",
        "SET_FEATURES",
        "GET_PROTOCOL_FEATURES",
        "GET_QUEUE_NUM",
        "SET_MEM_TABLE",
        "SET_VRING_CALL",
        "SET_VRING_NUM",
        "SET_VRING_BASE",
        "SET_VRING_ADDR",
        "SET_VRING_KICK",
        "SET_VRING_ENABLE",
    ];
    for mode in MODES {
        for message in messages {
            let behaviour = Behaviour { fail_at: Some(message), pairs: 2, ..Behaviour::default() };
            let error = probe(behaviour, NetOptions::new(mode).pairs(2)).unwrap_err().to_string();
            assert!(error.contains(message), "{message}: {error}");
        }
    }
    until(|| netmem_pool::lingering().is_empty());
}

/// Back ends treat the first SET_FEATURES as the driver's final choice, and passt ends if it lacks
/// VERSION_1. So the driver sends only one.
#[test]
fn messages_in_their_order() {
    const MTU_AND_STATUS: u64 = 1 << 4 | 1 << 16;
    let ring =
        ["SET_VRING_CALL", "SET_VRING_NUM", "SET_VRING_BASE", "SET_VRING_ADDR", "SET_VRING_KICK", "SET_VRING_ENABLE"];
    let protocol = ["GET_FEATURES", "GET_PROTOCOL_FEATURES", "SET_PROTOCOL_FEATURES", "GET_QUEUE_NUM", "SET_OWNER"];
    let status = ["SET_STATUS", "SET_FEATURES", "SET_STATUS", "GET_STATUS", "NET_SET_MTU", "SET_MEM_TABLE"];
    let all = [&protocol[..], &status, &ring, &ring, &["SET_STATUS"]].concat();
    let options = || NetOptions::new(RxMode::Mergeable);
    let features = FEATURES | feature::MTU;
    let behaviour = Behaviour { features, protocol: 1 | MTU_AND_STATUS, ..Behaviour::default() };
    let harness = Harness::with(behaviour.clone(), options());
    assert_eq!(harness.device.messages(), all);
    assert_eq!((harness.device.status(), harness.device.mtu()), (15, 1500));
    let chosen = harness.device.negotiated();
    assert_eq!(chosen & feature::VHOST_USER_PROTOCOL, feature::VHOST_USER_PROTOCOL);
    assert_eq!(chosen & !feature::VHOST_USER_PROTOCOL, harness.net.features());
    harness.close();
    // The rest, where a back end has none of it.
    let harness = Harness::with(Behaviour { features, protocol: 0, acks: false, ..Behaviour::default() }, options());
    let optional = ["GET_QUEUE_NUM", "SET_STATUS", "GET_STATUS", "NET_SET_MTU"];
    let least: Vec<_> = all.iter().copied().filter(|name| !optional.contains(name)).collect();
    until(|| harness.device.messages() == least);
    harness.close();
    let none = Behaviour { features: features & !feature::VHOST_USER_PROTOCOL, ..behaviour.clone() };
    let harness = Harness::with(none, options());
    let least: Vec<_> =
        least.into_iter().filter(|name| !name.contains("PROTOCOL") && !name.contains("ENABLE")).collect();
    until(|| harness.device.messages() == least);
    harness.close();
    // One that cannot work with the features together.
    let error = probe(Behaviour { status: !8, ..behaviour }, options()).unwrap_err();
    assert!(matches!(error, NetError::Backend(VhostUserError::FeaturesRefused { .. })), "{error}");
}

/// A back end that connects to the driver, goes, and connects again.
#[test]
fn a_back_end_that_connects() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    let error = VhostUser::accept(&listener, Duration::from_millis(10)).unwrap_err();
    assert!(matches!(error, VhostUserError::NotConnected { .. }), "{error}");
    for pairs in [1, 2] {
        let behaviour = Behaviour { pairs, ..Behaviour::default() };
        let mut device = Hostile::over(UnixStream::connect(&path).unwrap(), behaviour);
        let backend = VhostUser::accept(&listener, Duration::from_secs(60)).unwrap();
        assert_eq!(backend.pairs(), pairs);
        device.kill();
    }
}

/// Our device answers with rings, and the driver knows that: it has the number of pairs, and finds
/// a control queue only where the device serves one. A foreign back end answers with pairs.
#[test]
fn our_device_counts_rings() {
    for (max_pairs, serve_control, split_headers) in
        [(1, false, true), (3, false, false), (3, true, true), (1, true, true)]
    {
        let options = Options { max_pairs, serve_control, split_headers, ..Options::default() };
        let device = NetDevice::new(options, |_| Ok(Sink)).unwrap();
        for connect in [VhostUser::own_device, VhostUser::from_stream] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let connection = device.control().serve(theirs).unwrap();
            let backend = connect(ours).unwrap();
            assert_eq!(backend.pairs(), max_pairs as u64);
            let wanted = NetOptions::<PeerShared>::new(RxMode::Small).pairs(max_pairs as u16 + 1);
            let error = VirtioNet::probe(backend, wanted).unwrap_err();
            assert!(matches!(error, NetError::Backend(VhostUserError::TooFewQueues { .. })), "{error}");
            drop(connection);
        }
    }
    let behaviour = Behaviour { pairs: 3, protocol: 1, ..Behaviour::default() };
    let (ours, theirs) = UnixStream::pair().unwrap();
    let _device = Hostile::over(theirs, behaviour);
    assert_eq!(VhostUser::from_stream(ours).unwrap().pairs(), 3);
}

/// Proves NET-1 as far as its needs go: what is missing is named, with its bit.
#[test]
fn missing_features() {
    let cases = [
        (RxMode::Small, feature::VERSION_1, "VIRTIO_F_VERSION_1 (bit 32)", "small mode"),
        (RxMode::Mergeable, feature::MRG_RXBUF, "VIRTIO_NET_F_MRG_RXBUF (bit 15)", "mergeable mode"),
        (RxMode::Mergeable, feature::VERSION_1, "VIRTIO_F_VERSION_1 (bit 32)", "mergeable mode"),
        (RxMode::Big, feature::GUEST_CSUM, "VIRTIO_NET_F_GUEST_CSUM (bit 1)", "big-packet mode"),
        (RxMode::Big, feature::GUEST_TSO4, "VIRTIO_NET_F_GUEST_TSO4 (bit 7)", "big-packet mode"),
        (RxMode::Big, feature::GUEST_TSO6, "VIRTIO_NET_F_GUEST_TSO6 (bit 8)", "big-packet mode"),
        (RxMode::Small, feature::MQ, "VIRTIO_NET_F_MQ (bit 22)", "small mode"),
    ];
    for (mode, without, name, why) in cases {
        let behaviour = Behaviour { features: FEATURES & !without, pairs: 2, ..Behaviour::default() };
        let error = probe(behaviour, NetOptions::new(mode).pairs(2)).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(why), "{error}");
    }
    // None of these is needed.
    let least = feature::VERSION_1 | feature::MRG_RXBUF;
    for mode in [RxMode::Small, RxMode::Mergeable] {
        let mut harness = Harness::with(Behaviour { features: least, ..Behaviour::default() }, NetOptions::new(mode));
        assert!(harness.device.enabled().is_empty(), "rings are enabled from the start");
        harness.deliver(&frame(1, 100));
        assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(1, 100));
        harness.close();
    }
    // A backend that confirms nothing.
    let mut harness = Harness::with(Behaviour { acks: false, ..Behaviour::default() }, NetOptions::new(RxMode::Small));
    // Its answer to a message that has one shows that the others were received.
    until(|| harness.device.enabled().len() == 2);
    harness.deliver(&frame(1, 100));
    assert_eq!(take(&mut harness.pair.rx).len(), 1);
    harness.close();
}

#[test]
fn numbers_of_queues() {
    let asked = |pairs, has| {
        probe(
            Behaviour { pairs: has, features: WITHOUT_CONTROL, ..Behaviour::default() },
            NetOptions::new(RxMode::Small).pairs(pairs),
        )
    };
    let error = asked(3, 2).unwrap_err();
    assert!(matches!(error, NetError::Backend(VhostUserError::TooFewQueues { wanted: 3, has: 2 })), "{error}");
    assert!(error.to_string().contains("3 queue pairs asked for, but the backend has 2"), "{error}");
    assert!(matches!(asked(0, 2).unwrap_err(), NetError::Pairs { asked: 0, .. }));
    assert!(matches!(asked(1, 0).unwrap_err(), NetError::Backend(VhostUserError::TooFewQueues { .. })));
    assert!(asked(u16::MAX, 2).is_err());
    for absurd in [0x8001, u64::MAX / 2 + 1, u64::MAX] {
        assert!(matches!(asked(1, absurd).unwrap_err(), NetError::Backend(VhostUserError::Message { .. })));
    }
    asked(2, 2).unwrap();
}

#[test]
fn ring_sizes() {
    for mode in MODES {
        for size in [0, 1, 3, 255, 257, 32769, 65535] {
            let error = probe(Behaviour::default(), NetOptions::new(mode).ring_size(size)).unwrap_err();
            assert!(matches!(error, NetError::RingSize { .. }), "{error}");
            assert!(error.to_string().contains("power of two"), "{error}");
        }
    }
    assert!(probe(Behaviour::default(), NetOptions::new(RxMode::Big).ring_size(16)).is_err());
    probe(Behaviour::default(), NetOptions::new(RxMode::Small).ring_size(8192).pages(8192)).unwrap();
}

#[test]
fn frame_sizes_and_headroom() {
    for (mode, size) in
        [(RxMode::Small, 1519), (RxMode::Mergeable, 65550), (RxMode::Big, 65550), (RxMode::Big, usize::MAX)]
    {
        let error = probe(Behaviour::default(), NetOptions::new(mode).max_frame(size)).unwrap_err();
        assert!(matches!(error, NetError::FrameSize { asked, max, .. } if asked == size && max < size), "{error}");
        assert!(error.to_string().contains(&size.to_string()), "{error}");
    }
    let small = || NetOptions::new(RxMode::Small);
    for options in [
        small().headroom(u16::MAX),
        small().headroom(2600),
        small().buffers_per_page(3),
        small().buffers_per_page(u16::MAX),
        small().headroom(1000).buffers_per_page(2),
        NetOptions::new(RxMode::Mergeable).headroom(4096),
        NetOptions::new(RxMode::Mergeable).headroom(2600),
        NetOptions::new(RxMode::Mergeable).max_frame(9018).offloads(Offload::Checksum).headroom(2600),
        // Each of 18 buffers must hold its part of the longest segment.
        NetOptions::new(RxMode::Mergeable).max_frame(9018).headroom(512),
    ] {
        let error = probe(Behaviour::default(), options).unwrap_err();
        assert!(matches!(error, NetError::Headroom { .. }), "{error}");
    }
    // To the last byte, and what a mode has no use for.
    for options in [
        small().headroom(2560),
        small().headroom(512).buffers_per_page(2),
        small().buffers_per_page(0),
        NetOptions::new(RxMode::Mergeable).headroom(2560),
        NetOptions::new(RxMode::Mergeable).max_frame(9018).offloads(Offload::Checksum).headroom(2560),
        NetOptions::new(RxMode::Mergeable).max_frame(9018).headroom(448),
        NetOptions::new(RxMode::Big).headroom(u16::MAX),
        small().max_frame(0),
        NetOptions::new(RxMode::Mergeable).max_frame(0),
        NetOptions::new(RxMode::Big).max_frame(0),
    ] {
        let mut harness = Harness::new(options);
        harness.deliver(&frame(1, 1000));
        assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(1, 1000));
        harness.close();
    }
}

#[test]
fn numbers_of_pages() {
    for (pages, name) in [(0, "Region"), (usize::MAX, "Region"), (usize::MAX / 4096, "Region"), (255, "Pool")] {
        let error = probe(Behaviour::default(), NetOptions::new(RxMode::Small).pages(pages)).unwrap_err();
        assert!(format!("{error:?}").starts_with(name), "{pages}: {error:?}");
    }
    // More than there is memory: refused before it is used.
    let error = probe(Behaviour::default(), NetOptions::new(RxMode::Small).pages(1 << 31)).unwrap_err();
    assert!(matches!(error, NetError::Region(RegionError::TooLittle { .. })), "{error:?}");
}

/// Too little memory for the process: an error, and no harm.
#[test]
fn no_memory() {
    const CHILD: &str = "NETMEM_TEST_NO_MEMORY";
    if std::env::var_os(CHILD).is_none() {
        // A process of its own, for the limit is the process's.
        let me = std::env::current_exe().unwrap();
        let out = std::process::Command::new(me)
            .args(["--exact", "driver::probe::no_memory"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
        return;
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    let _device = Hostile::over(theirs, Behaviour::default());
    let backend = VhostUser::own_device(ours).unwrap();
    // From what there is now: a sanitizer has reserved terabytes.
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let now = statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
    let limit = Some(now + (512 << 20));
    let limit = rustix::process::Rlimit { current: limit, maximum: limit };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
    let error = VirtioNet::probe(backend, NetOptions::new(RxMode::Small).pages(1 << 18)).unwrap_err();
    assert!(matches!(error, NetError::Region(_)), "{error:?}");
    let mut chain: &dyn std::error::Error = &error;
    let mut text = chain.to_string();
    while let Some(source) = chain.source() {
        chain = source;
        text += &format!(": {chain}");
    }
    assert!(text.contains("ask for fewer pages"), "{text}");
}

/// Memory that the user provides: its kind and the mode must fit.
#[test]
fn memory_of_the_users() {
    let supply = RegionProvider::new(RegionOptions::new(1024).build::<PeerShared>().unwrap());
    let given = |mode| NetOptions::new(mode).memory(supply.region().clone(), supply.clone());
    assert!(matches!(probe(Behaviour::default(), given(RxMode::Big)), Err(NetError::GivenMemory)));
    for mode in [RxMode::Small, RxMode::Mergeable] {
        let mut device_thread = DeviceThread::one(Gen::new(100, Some(1000)).unwrap());
        let accounting = Accounting::default();
        let (net, mut pairs) = device_thread.probe(accounting.count(given(mode)));
        assert_eq!(net.region().as_ptr(), supply.region().as_ptr());
        let mut pair = pairs.remove(0);
        let mut all = DropAll::default();
        until(|| {
            receive(&mut pair.rx, &mut all);
            all.0 == 1000
        });
        close_clean(pair);
        accounting.assert_balanced();
    }
    // All of it is back.
    assert_eq!(std::iter::from_fn(|| supply.page()).collect::<Vec<_>>().len(), 1024);
}

/// Proves POOL-8: queues declare the memory that they deliver from and accept, to code that is
/// generic over queues.
#[test]
fn queues_declare_their_memory() {
    fn delivers<Q: RxQueue>() -> &'static str {
        <Q::Mem as Memory>::NAME
    }
    fn takes<Q: TxQueue>() -> &'static str {
        <Q::Mem as Memory>::NAME
    }
    assert_eq!((delivers::<VirtioRx>(), takes::<VirtioTx>()), (PeerShared::NAME, PeerShared::NAME));
}
