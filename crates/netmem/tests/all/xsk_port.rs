//! A virtio-net device whose port is a queue of an interface: a driver on one side, the kernel on
//! the other.

use netmem::device::port::Port;
use netmem::device::{Connection, NetDevice, Options};
use netmem::net::{Meta, Packet, Poll, RxQueue, TxQueue};
use netmem::pool::{PeerShared, PoolOptions, SharedPool};
use netmem::virtio::{NetOptions, QueuePair, RxMode, VhostUser, VirtioNet};
use netmem::xdp::{Interface, ProgramOptions, QueueOptions, XskPort};
use netmem_testing::large_frames::{FrameKind, leave_partial};
use netmem_testing::namespace::{self, in_namespace, ip};
use netmem_testing::xsk::{Raw, frame, until, veth};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// A device over one end of a veth pair, its driver, and the other end.
struct Rig {
    device: NetDevice<XskPort>,
    pair: QueuePair,
    pool: SharedPool<PeerShared>,
    peer: Raw,
    _connection: (Connection, VirtioNet),
}

impl Rig {
    fn new(mtu: u32) -> Self {
        veth("v0", "v1", 1, mtu);
        let mut ports =
            XskPort::open("v0", None, ProgramOptions::default(), |_| QueueOptions::new()).unwrap().into_iter();
        let device = NetDevice::new(Options::default(), |_| Ok(ports.next().unwrap())).unwrap();
        let (front, back) = UnixStream::pair().unwrap();
        let connection = device.control().serve(back).unwrap();
        let options = NetOptions::new(RxMode::Mergeable).max_frame(65_549).tx_pages(1024);
        let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(front).unwrap(), options).unwrap();
        let pool = net.tx_pool(PoolOptions::new("sent")).unwrap();
        let pair = pairs.remove(0);
        let mut rig = Self { device, pair, pool, peer: Raw::new("v1"), _connection: (connection, net) };
        // Frames that came before the front end are dropped in the first pass.
        rig.turn();
        rig
    }

    fn send(&mut self, bytes: &[u8], meta: Meta) {
        let mut frags = bytes.chunks(3900).map(|bytes| {
            let mut page = self.pool.alloc().unwrap();
            page.copy_from(128, bytes).unwrap();
            page.freeze_range(128..128 + bytes.len())
        });
        let mut packet = Packet::new(frags.next().unwrap());
        frags.for_each(|frag| packet.push(frag).unwrap());
        packet.meta = meta;
        self.pair.tx.send(packet).unwrap();
        self.pair.tx.flush();
    }

    fn turn(&mut self) {
        self.device.poll();
        self.pair.tx.complete();
    }
}

/// What the driver leaves to the device leaves the interface whole: checksums are computed and
/// segments are cut. Frames arrive byte for byte as another library writes them, and none besides.
#[test]
fn offloads_are_done_before_frames_leave() {
    in_namespace(|| {
        let mut rig = Rig::new(1500);
        let mut rng = fastrand::Rng::with_seed(16);
        for turn in 0..100 {
            // The kernel removes tags before a packet socket sees them.
            let kind = FrameKind { vlan: false, ..FrameKind::random(&mut rng) };
            let payload: Vec<u8> = (0..rng.usize(1..[1300, 20_000][turn % 2])).map(|_| rng.u8(..)).collect();
            let size = payload.len().div_ceil(60).max(rng.usize(400..1400));
            let (want, gso) = match turn % 2 {
                0 => (vec![kind.frame(&payload)], None),
                _ => (kind.segments(&payload, size), Some(kind.gso(size as u16))),
            };
            let mut sent = kind.frame(&payload);
            leave_partial(&mut sent, &kind);
            rig.send(&sent, Meta { checksum: kind.partial(), gso });
            for want in want {
                let got = until("a frame at the peer", || {
                    rig.turn();
                    rig.peer.try_receive()
                });
                assert!(got == want, "{turn}: {} bytes for {} of {kind:?}", got.len(), want.len());
            }
        }
        rig.turn();
        assert_eq!(rig.peer.try_receive(), None);
        let port = &rig.device.ports()[0];
        assert_eq!((port.queues().1.stats().errors().count(), port.queues().1.stats().full), (0, 0));
    });
}

/// Frames from the interface reach the driver byte for byte, whether they are in one buffer of the
/// UMEM or in several.
#[test]
fn frames_of_every_size_reach_the_driver() {
    in_namespace(|| {
        let mut rig = Rig::new(9000);
        for len in (60..9014).step_by(61).chain([3839, 3840, 3841, 9014]) {
            let sent = frame(len, len as u64);
            rig.peer.send(&sent);
            let mut got = None;
            until("a packet", || {
                rig.turn();
                rig.pair.rx.poll(|poll| poll.receive(1, &mut |packet: Packet<PeerShared>| got = Some(packet.to_vec())));
                got.take().map(|got| assert!(got == sent, "{len} bytes"))
            });
            // And back, without offloads.
            rig.send(&sent, Meta::default());
            let back = until("a frame at the peer", || {
                rig.turn();
                rig.peer.try_receive()
            });
            assert!(back == sent, "{len} bytes back");
        }
    });
}

/// The example `xsk_vm`: frames go between the wire and its guest byte for byte, and a checksum
/// that the guest leaves to the device is completed. It serves one guest after another, and leaves
/// no program when it is killed.
#[test]
fn the_example_serves_guests_one_after_another() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--offline", "--target-dir"]).arg(folder).current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["--package", "netmem", "--all-features", "--example", "xsk_vm"]);
    assert!(cargo.status().unwrap().success());
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vm.sock");
        let mut example = Command::new(folder.join("debug/examples/xsk_vm"));
        example.arg(&socket).arg("v0").stdout(Stdio::null()).stderr(Stdio::piped());
        let mut example = example.spawn().unwrap();
        let mut said = String::new();
        BufReader::new(example.stderr.take().unwrap()).read_line(&mut said).unwrap();
        assert!(said.contains("ready:"), "{said}");
        let peer = Raw::new("v1");
        for guest in 0..2 {
            let front = until("the last guest has left", || VhostUser::connect(&socket).ok());
            let options = NetOptions::new(RxMode::Mergeable).tx_pages(64);
            let (net, mut pairs) = VirtioNet::probe(front, options).unwrap();
            let pool = net.tx_pool(PoolOptions::new("sent")).unwrap();
            let QueuePair { rx, tx } = &mut pairs[0];
            for len in [60, 61, 777, 1514] {
                let sent = frame(len, guest + len as u64);
                let mut got = None;
                until("a packet", || {
                    // Frames that come before the guest is there are dropped.
                    peer.offer(&sent);
                    rx.poll(|poll| poll.receive(1, &mut |packet: Packet<PeerShared>| got = Some(packet.to_vec())));
                    got.take().filter(|got| *got == sent)
                });
                let kind = FrameKind { vlan: false, ..FrameKind::random(&mut fastrand::Rng::with_seed(len as u64)) };
                let want = kind.frame(&sent[..len - 60]);
                let mut partial = want.clone();
                leave_partial(&mut partial, &kind);
                let mut page = pool.alloc().unwrap();
                page.copy_from(128, &partial).unwrap();
                let mut packet = Packet::new(page.freeze_range(128..128 + partial.len()));
                packet.meta = Meta { checksum: kind.partial(), gso: None };
                tx.send(packet).unwrap();
                tx.flush();
                assert!(peer.receive() == want, "{len} bytes from the guest");
                tx.complete();
            }
        }
        assert_eq!(Interface::by_name("v0").unwrap().programs.len(), 1);
        example.kill().unwrap();
        example.wait().unwrap();
        until("an interface without a program", || Interface::by_name("v0").unwrap().programs.is_empty().then_some(()));
    });
}

/// Frames that wait when a front end leaves are dropped and counted: the next front end does not
/// get them.
#[test]
fn frames_for_a_front_end_that_has_left_are_dropped() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let peer = Raw::new("v1");
        let mut ports = XskPort::open("v0", None, ProgramOptions::default(), |_| QueueOptions::new()).unwrap();
        let port = &mut ports[0];
        (0..100).for_each(|i| peer.send(&frame(60, i)));
        let mut dropped = 0;
        until("all frames", || {
            dropped += port.drop_waiting();
            (dropped == 100).then_some(())
        });
        assert!(port.peek().is_none());
        peer.send(&frame(61, 1));
        until("a frame for the next one", || port.peek().map(|wire| assert_eq!(wire[12..], frame(61, 1))));
    });
}

/// The interface is promiscuous and has a program while the port is there, and neither afterwards.
/// The port fails when the interface is deleted.
#[test]
fn a_port_leaves_nothing_and_notices_the_end_of_its_interface() {
    in_namespace(|| {
        veth("v0", "v1", 2, 1500);
        let state = || {
            (
                Interface::by_name("v0").unwrap().programs.len(),
                namespace::command("ip -d link show v0").contains("promiscuity 1"),
            )
        };
        let ports = XskPort::open("v0", None, ProgramOptions::default(), |_| QueueOptions::new()).unwrap();
        assert_eq!((ports.len(), state()), (2, (1, true)));
        drop(ports);
        assert_eq!(state(), (0, false));
        let mut ports = until("the queues are free", || {
            XskPort::open("v0", Some(vec![1]), ProgramOptions::default(), |_| QueueOptions::new()).ok()
        });
        assert!(ports[0].take_error().is_none());
        // A thread that sleeps is woken, and then has the error. The time is only there so that a
        // failure ends.
        assert!(!ports[0].arm());
        assert!(ports[0].deadline(true).is_none());
        ip("link del v0");
        let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
        let woken = poll(&mut [PollFd::from_borrowed_fd(ports[0].fd().unwrap(), PollFlags::IN)], Some(&patience));
        assert_eq!(woken.unwrap(), 1, "the thread sleeps on");
        assert!(ports[0].arm());
        let error = ports[0].take_error().unwrap().to_string();
        assert!(error.starts_with("queue 1 of v0 has stopped: the interface is gone"), "{error}");
        assert!(
            XskPort::open("v0", None, ProgramOptions::default(), |_| QueueOptions::new())
                .unwrap_err()
                .to_string()
                .contains("no interface v0")
        );
    });
}
