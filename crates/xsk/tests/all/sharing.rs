//! Sockets in the map of a program that another library or process owns, and queues that only send.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Armed, Packet, Poll, RxQueue, TxQueue, Wait};
use netmem_pool::{KernelShared, RegionProvider};
use netmem_testing::bpf::{self, ARRAY, XSKMAP, insn, pin};
use netmem_testing::namespace::{command, in_namespace, ip};
use netmem_testing::xsk::{Raw, frame, index, memory, name, on_wire, until, veth, wire};
use netmem_xsk::{
    AttachError, Fault, Interface, Program, QueueOptions, UmemOptions, Xsk, XskError, XskOptions, XskRx, XskTx,
};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

fn open(interface: &str, map: Program) -> Result<Xsk, XskError> {
    Xsk::open(XskOptions::new(interface).pages(256).map(map), |_| QueueOptions::new().fill(64))
}

fn of(map: &OwnedFd) -> Program {
    Program::map(map.try_clone().unwrap()).unwrap()
}

/// Waits until no program is on an interface. A process that another test starts has a copy of the
/// link's descriptor until it executes its program.
fn detached(interface: &str) {
    until("the end of a link", || Interface::by_name(interface).unwrap().programs.is_empty().then_some(()));
}

fn try_receive(rx: &mut XskRx) -> Option<Vec<u8>> {
    let mut got = None;
    rx.poll(|poll| poll.receive(1, &mut |packet: Packet<_>| got = Some(packet.to_vec())));
    got
}

/// The sockets are put into the map of a program that is attached already: by the map's descriptor,
/// or where it is pinned. No program is loaded. Their end leaves the program as it was, and the
/// kernel gets the frames.
#[test]
fn sockets_in_the_map_of_another_program() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 2, 1500);
        let folder = tempfile::tempdir().unwrap();
        command(&format!("mount -t bpf bpf {}", folder.path().display()));
        let (peer, kernel) = (Raw::new(&theirs), Raw::new(&ours));
        let map = bpf::map(XSKMAP, 2);
        let link = bpf::attach(&bpf::redirect(&map), index(&ours));
        let pinned = folder.path().join("map");
        pin(&map, &pinned);
        let before = Interface::by_name(&ours).unwrap().programs;
        assert_eq!(before.len(), 1);
        for by_path in [false, true] {
            let shared = || if by_path { Program::pinned_map(&pinned).unwrap() } else { of(&map) };
            let mut xsk = until("free queues", || match open(&ours, shared()) {
                Err(XskError::Busy { .. }) => None,
                other => Some(other.unwrap()),
            });
            assert_eq!(xsk.program.as_ref().map(|program| (program.mode(), program.attached_to())), Some((None, None)));
            assert_eq!(xsk.pairs.iter().map(|(rx, _)| rx.socket().queue()).collect::<Vec<_>>(), [0, 1]);
            for i in 0..100 {
                peer.send(&frame(100, i));
                let got = until("a frame", || xsk.pairs.iter_mut().find_map(|(rx, _)| try_receive(rx)));
                assert_eq!(got, frame(100, i));
            }
            assert_eq!(kernel.try_receive(), None);
            assert_eq!(Interface::by_name(&ours).unwrap().programs, before);
            // The transmit queues keep the sockets open.
            let (receive, transmit): (Vec<_>, Vec<_>) = xsk.pairs.drain(..).unzip();
            drop(receive);
            peer.send(&frame(100, 7));
            assert_eq!(kernel.receive(), frame(100, 7));
            drop((transmit, xsk));
            assert_eq!(Interface::by_name(&ours).unwrap().programs, before);
        }
        drop(link);
        detached(&ours);
        command(&format!("umount {}", folder.path().display()));
    });
}

/// The value of the program is dropped before the queues, as by `let Xsk { pairs, .. } = xsk`:
/// their sockets leave the map nevertheless.
#[test]
fn sockets_leave_the_map_after_the_value_of_its_program_is_dropped() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let (peer, kernel) = (Raw::new(&theirs), Raw::new(&ours));
        let map = bpf::map(XSKMAP, 1);
        let _link = bpf::attach(&bpf::redirect(&map), index(&ours));
        let Xsk { mut pairs, .. } = open(&ours, of(&map)).unwrap();
        let (mut rx, tx) = pairs.pop().unwrap();
        peer.send(&frame(100, 1));
        assert_eq!(until("a frame", || try_receive(&mut rx)), frame(100, 1));
        // The transmit queue keeps the socket open.
        drop(rx);
        peer.send(&frame(100, 2));
        assert_eq!(kernel.receive(), frame(100, 2));
        drop(tx);
    });
}

/// The same for a pinned map whose program was attached by this value: another process may attach
/// the program again, which redirects to the map.
#[test]
fn sockets_leave_a_pinned_map_after_its_program_is_detached() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let folder = tempfile::tempdir().unwrap();
        command(&format!("mount -t bpf bpf {}", folder.path().display()));
        let (peer, kernel) = (Raw::new(&theirs), Raw::new(&ours));
        let map = bpf::map(XSKMAP, 1);
        let redirect = bpf::redirect(&map);
        let [map_at, program_at] = ["map", "program"].map(|name| folder.path().join(name));
        pin(&map, &map_at);
        pin(&redirect, &program_at);
        let program = Program::attach_pinned(index(&ours), None, &program_at, &map_at).unwrap();
        let (memory, umem) = memory::<KernelShared>(256, &UmemOptions::new());
        let (rx, tx) = umem.open(index(&ours), 0, memory, QueueOptions::new().fill(64)).unwrap();
        program.insert(0, rx.socket().as_fd()).unwrap();
        drop((program, rx));
        let link = bpf::attach(&redirect, index(&ours));
        peer.send(&frame(100, 1));
        assert_eq!(kernel.receive(), frame(100, 1));
        drop((tx, link));
        command(&format!("umount {}", folder.path().display()));
    });
}

/// A map with too few entries, something that is no map of sockets, and the map of a program on
/// another interface: the error names it before anything is opened.
#[test]
fn maps_that_cannot_be_used() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 2, 1500);
        let error = |interface: &str, map: &OwnedFd| match open(interface, of(map)) {
            Err(XskError::Attach(error)) => error,
            other => panic!("{other:?}"),
        };
        let small = bpf::map(XSKMAP, 1);
        // A queue that cannot be opened is not tried.
        let (memory, umem) = memory::<KernelShared>(256, &UmemOptions::new());
        let _other = umem.open(index(&ours), 0, memory, QueueOptions::new().fill(64)).unwrap();
        let refused = error(&ours, &small);
        assert!(matches!(refused, AttachError::Queue { queue: 1, entries: 1 }), "{refused:?}");
        for (not_a_map, kind) in [
            (bpf::map(ARRAY, 4), Some(ARRAY)),
            (bpf::redirect(&small), None),
            (UnixStream::pair().unwrap().0.into(), None),
        ] {
            let refused = Program::map(not_a_map).unwrap_err();
            assert!(matches!(refused, AttachError::NoSocketMap { map_type } if map_type == kind), "{refused:?}");
        }
        // The map's program is on the other end.
        let map = bpf::map(XSKMAP, 2);
        let program = bpf::redirect(&map);
        let link = bpf::attach(&program, index(&theirs));
        let refused = error(&ours, &map);
        let AttachError::OtherInterface { interface, other, .. } = &refused else { panic!("{refused:?}") };
        assert_eq!((interface, other), (&ours, &theirs));
        // Another program on the interface of the sockets does not use the map either.
        let else_ = bpf::attach(&bpf::redirect(&small), index(&ours));
        assert!(matches!(error(&ours, &map), AttachError::OtherInterface { .. }));
        drop(else_);
        detached(&ours);
        // libxdp's dispatcher calls programs that are not listed.
        let passes = bpf::load(&[insn(0xb7, 0, 0, 0, 2), insn(0x95, 0, 0, 0, 0)], "xdp_dispatcher");
        let dispatcher = bpf::attach(&passes, index(&ours));
        of(&map).check_interface(index(&ours)).unwrap();
        drop(dispatcher);
        detached(&ours);
        // On both, and on none yet.
        let both = bpf::attach(&program, index(&ours));
        of(&map).check_interface(index(&ours)).unwrap();
        drop((both, link));
        detached(&ours);
        detached(&theirs);
        of(&map).check_interface(index(&ours)).unwrap();
    });
}

/// A queue that only sends, in either mode: the frames that come in go to the kernel all the same,
/// more of them than there are chunks.
#[test]
fn a_queue_that_only_sends() {
    in_namespace(|| {
        let (ours, theirs) = wire(1500);
        let (peer, kernel) = (Raw::new(&theirs), Raw::new(&ours));
        let (memory, umem) = memory::<KernelShared>(4096, &UmemOptions::new());
        let options = || on_wire(QueueOptions::new().fill(64));
        let mut tx = until("a free queue", || match umem.open_tx(index(&ours), 0, memory.clone(), options()) {
            Err(XskError::Busy { .. }) => None,
            other => Some(other.unwrap()),
        });
        for i in 0..800 {
            let mut page = memory.page().unwrap();
            page.copy_from(0, &frame(60, i)).unwrap();
            tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
            tx.flush();
            assert_eq!(peer.receive(), frame(60, i));
            peer.send(&frame(61, i));
            assert_eq!(kernel.receive(), frame(61, i));
            until("completion", || (tx.complete() > 0).then_some(()));
        }
    });
}

/// A queue that only sends: no program, no chunk in the fill ring, and a region of few pages. What
/// the interface receives goes to the kernel. All pages come back, also when the interface ends.
#[test]
fn a_queue_that_only_sends_uses_no_fill_ring() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let (peer, kernel) = (Raw::new(&theirs), Raw::new(&ours));
        let (memory, umem) = memory::<KernelShared>(16, &UmemOptions::new());
        let free =
            |memory: &Arc<RegionProvider<KernelShared>>| std::iter::from_fn(|| memory.page()).collect::<Vec<_>>().len();
        // A queue that receives needs more pages than there are.
        let pair = umem.open(index(&ours), 0, memory.clone(), QueueOptions::new());
        assert!(matches!(pair, Err(XskError::Pages { .. })), "{pair:?}");
        let again = || {
            until("a free queue", || match umem.open_tx(index(&ours), 0, memory.clone(), QueueOptions::new()) {
                Err(XskError::Busy { .. }) => None,
                other => Some(other.unwrap()),
            })
        };
        let send = |tx: &mut XskTx, i: u64| {
            let mut page = memory.page().unwrap();
            page.copy_from(0, &frame(60, i)).unwrap();
            tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
            tx.flush();
        };
        for round in 0..3 {
            let mut tx = again();
            assert_eq!(free(&memory), 16);
            for i in 0..200 {
                send(&mut tx, i);
                assert_eq!(peer.receive(), frame(60, i));
                until("completion", || (tx.complete() > 0).then_some(()));
                peer.send(&frame(61, i));
                assert_eq!(kernel.receive(), frame(61, i));
            }
            assert_eq!(tx.arm().unwrap(), Armed::Waits);
            let counted = tx.socket().kernel_stats().unwrap();
            assert_eq!((counted.rx_dropped, counted.rx_ring_full, counted.rx_fill_empty), (0, 0, 0));
            assert_eq!(Interface::by_name(&ours).unwrap().programs, []);
            assert_eq!((free(&memory), tx.stats().completed), (16, 200), "round {round}");
        }
        let mut tx = again();
        ip(&format!("link set {ours} down"));
        send(&mut tx, 1);
        assert_eq!(tx.stats().down, 1);
        ip(&format!("link set {ours} up"));
        tx.flush();
        assert_eq!(
            until("the frame", || {
                tx.flush();
                peer.try_receive()
            }),
            frame(60, 1)
        );
        ip(&format!("link delete {ours}"));
        let stopped = until("the end", || tx.arm().err());
        assert!(stopped.to_string().contains("the interface is gone"), "{stopped}");
        assert_eq!(tx.stats().stopped, Some(Fault::Gone));
        drop(tx);
        netmem_xsk::reclaim();
        assert_eq!(free(&memory), 16);
    });
}
