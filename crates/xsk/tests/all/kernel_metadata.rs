//! The program that reads the kernel's metadata functions, on a veth: hash and VLAN tag of frames
//! that the kernel sends. A veth has no clock, so no frame has a time.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::{KernelShared, RegionProvider};
use netmem_testing::bpf::{attach, insn, load, push_vlan};
use netmem_testing::metadata_program::pin_metadata_program;
use netmem_testing::namespace::{command, in_namespace, ip, nics};
use netmem_testing::skip;
use netmem_testing::xsk::{Raw, frame, index, memory, name, reopen, until, veth};
use netmem_xsk::{
    AttachError, KernelMetadata, NoRxMetadata, Program, ProgramOptions, QueueOptions, RxHash, RxMetadata,
    RxMetadataReader, Umem, UmemMemory, UmemOptions, VlanTag, XskRx, XskTx,
};
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

type Received = (Option<RxMetadata>, Vec<u8>);

/// Reads the metadata of each frame.
struct Read(RxMetadataReader, Vec<Received>);

impl<M: UmemMemory> Handler<M> for Read {
    fn run(&mut self, frame: &mut XdpFrame<M>) -> Verdict {
        let metadata = self.0.read(frame);
        // Reading leaves the frame as it is.
        assert_eq!(self.0.read(frame), metadata);
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(0, &mut bytes).unwrap();
        self.1.push((metadata, bytes));
        Verdict::Drop
    }

    fn pass(&mut self, _: Packet<M>) {}
}

fn with_metadata(interface: &str) -> Result<Program, AttachError> {
    let metadata = KernelMetadata::Required;
    Program::attach(index(interface), &ProgramOptions { metadata, ..ProgramOptions::default() })
}

/// Runs a test on a veth pair of this namespace, unless the kernel has no metadata functions.
fn on_veth(test: impl FnOnce(&str, &str) + Send) {
    in_namespace(|| {
        if nics().is_some() {
            return;
        }
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        match with_metadata(&ours) {
            Err(AttachError::NoMetadata {
                reason: reason @ (NoRxMetadata::Kernel(_) | NoRxMetadata::NoBtf(_) | NoRxMetadata::Btf(_)),
                ..
            }) => skip(&reason.to_string()),
            attached => {
                drop(attached.unwrap());
                test(&ours, &theirs);
            }
        }
    });
}

/// The queue of one end.
struct Queue {
    rx: XskRx<KernelShared>,
    _tx: XskTx<KernelShared>,
    umem: Umem<KernelShared>,
    memory: Arc<RegionProvider<KernelShared>>,
}

impl Queue {
    fn new(interface: &str, options: &UmemOptions) -> Self {
        let (memory, umem) = memory(4096, options);
        let (rx, tx) = umem.open(index(interface), 0, memory.clone(), QueueOptions::new()).unwrap();
        Self { rx, _tx: tx, umem, memory }
    }

    /// The next frames, which are on their way.
    #[track_caller]
    fn receive(&mut self, reader: RxMetadataReader, frames: usize) -> Vec<Received> {
        let mut read = Read(reader, Vec::new());
        until("the frames", || {
            self.rx.poll(|poll| poll.receive(64, &mut read));
            (read.1.len() >= frames).then_some(())
        });
        assert_eq!(read.1.len(), frames);
        read.1
    }
}

fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

fn hash(of: &Received) -> RxHash {
    of.0.expect("metadata").hash.expect("a hash")
}

/// Each connected UDP socket has a hash of its own, which covers the ports; a frame that is no IP
/// has one that does not. There is neither a time, because a veth has no clock, nor a tag.
#[test]
fn the_hash_of_what_sockets_send() {
    on_veth(|ours, theirs| {
        let mut queue = Queue::new(ours, &UmemOptions::new());
        let program = with_metadata(ours).unwrap();
        program.insert(0, queue.rx.socket().as_fd()).unwrap();
        let reader = program.rx_metadata().unwrap();
        ip(&format!("address add 192.0.2.1/24 dev {theirs}"));
        ip(&format!("neighbour add 192.0.2.2 lladdr 02:00:00:00:00:02 dev {theirs}"));
        let mut of_sockets = Vec::new();
        for _ in 0..8 {
            let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
            socket.connect("192.0.2.2:7").unwrap();
            for payload in [&b"first"[..], b"second"] {
                assert_eq!(socket.send(payload).unwrap(), payload.len());
            }
            let received = queue.receive(reader, 2);
            assert!(received[0].1.ends_with(b"first") && received[1].1.ends_with(b"second"));
            let (first, second) = (hash(&received[0]), hash(&received[1]));
            assert_eq!((first, first.covers_ports()), (second, true));
            for (metadata, _) in &received {
                assert_eq!((metadata.unwrap().time, metadata.unwrap().vlan), (None, None));
            }
            of_sockets.push(first.value);
        }
        of_sockets.sort_unstable();
        of_sockets.dedup();
        // That two of eight are equal is possible, and that most are is not.
        assert!(of_sockets.len() > 4, "{of_sockets:x?}");
        Raw::new(theirs).send(&frame(60, 1));
        let received = queue.receive(reader, 1);
        assert_eq!((hash(&received[0]).covers_ports(), &received[0].1), (false, &frame(60, 1)));
    });
}

/// A tag that the driver keeps beside the frame is in the metadata, and one in the frame is not.
/// The memory has small chunks with headroom.
#[test]
fn a_tag_that_is_not_in_the_frame() {
    const TCI: u16 = 0x6123;
    on_veth(|ours, theirs| {
        if kernel() < (6, 8) {
            return skip("the kernel has no metadata function for the tag (Linux 6.8)");
        }
        let mut queue = Queue::new(ours, &UmemOptions::new().chunk(2048).headroom(64));
        let program = with_metadata(ours).unwrap();
        program.insert(0, queue.rx.socket().as_fd()).unwrap();
        let reader = program.rx_metadata().unwrap();
        let _link = push_vlan(index(theirs), TCI);
        for offload in ["on", "off"] {
            command(&format!("ethtool -K {theirs} txvlan {offload}"));
            Raw::new(theirs).send(&frame(80, 2));
            let received = queue.receive(reader, 1);
            let tagged = [&frame(80, 2)[..12], &[0x81, 0], &TCI.to_be_bytes(), &frame(80, 2)[12..]].concat();
            let found = (received[0].0.unwrap().vlan, &received[0].1);
            match offload {
                "on" => assert_eq!(found, (Some(VlanTag { tpid: 0x8100, tci: TCI }), &frame(80, 2))),
                _ => assert_eq!(found, (None, &tagged)),
            }
        }
    });
}

/// A program that redirects each frame to an interface.
fn redirect_to(interface: &str) -> OwnedFd {
    let code = [
        insn(0xb7, 1, 0, 0, index(interface) as i32), // redirect(interface, 0)
        insn(0xb7, 2, 0, 0, 0),
        insn(0x85, 0, 0, 0, 23),
        insn(0x95, 0, 0, 0, 0),
    ];
    load(&code, "")
}

/// A frame that another XDP program has redirected to the veth has no socket buffer, and the driver
/// knows nothing about it: all fields are absent, and not those of the frame before.
#[test]
fn what_the_driver_does_not_know_is_absent() {
    on_veth(|ours, theirs| {
        let mut queue = Queue::new(ours, &UmemOptions::new());
        let program = with_metadata(ours).unwrap();
        program.insert(0, queue.rx.socket().as_fd()).unwrap();
        let reader = program.rx_metadata().unwrap();
        let (from, sender) = (name("f"), name("s"));
        veth(&from, &sender, 1, 1500);
        let _link = attach(&redirect_to(theirs), index(&from));
        let (direct, redirected) = (Raw::new(theirs), Raw::new(&sender));
        for i in 0..50 {
            direct.send(&frame(64, i));
            let received = queue.receive(reader, 1);
            assert_eq!((received[0].0.unwrap().hash.is_some(), &received[0].1), (true, &frame(64, i)));
            redirected.send(&frame(90, i));
            let received = queue.receive(reader, 1);
            assert_eq!(received[0], (Some(RxMetadata::default()), frame(90, i)));
        }
    });
}

/// The metadata of a foreign program, and the records of an earlier program of ours in the same
/// memory, are not read.
#[test]
fn the_metadata_of_other_programs_is_not_read() {
    on_veth(|ours, theirs| {
        let mut queue = Queue::new(ours, &UmemOptions::new());
        let peer = Raw::new(theirs);
        let program = with_metadata(ours).unwrap();
        program.insert(0, queue.rx.socket().as_fd()).unwrap();
        let earlier = program.rx_metadata().unwrap();
        // More than the chunks that the kernel has: the old contents of each are a record.
        for i in 0..1500 {
            peer.send(&frame(60, i));
            assert!(queue.receive(earlier, 1)[0].0.is_some());
        }
        drop(program);

        // Its number is that of no other program.
        let program = with_metadata(ours).unwrap();
        program.insert(0, queue.rx.socket().as_fd()).unwrap();
        let reader = program.rx_metadata().unwrap();
        for i in 0..100 {
            peer.send(&frame(60, i));
            assert_eq!(queue.receive(earlier, 1)[0].0, None);
            peer.send(&frame(60, i));
            assert!(queue.receive(reader, 1)[0].0.is_some());
        }
        drop(program);
        let place = tempfile::tempdir().unwrap();
        command(&format!("mount -t bpf bpf {}", place.path().display()));
        let (program_at, map_at) = pin_metadata_program(place.path());
        let foreign = Program::attach_pinned(index(ours), None, &program_at, &map_at).unwrap();
        assert_eq!(foreign.rx_metadata(), None);
        let Queue { rx, _tx: tx, umem, memory } = queue;
        drop((rx, tx));
        let (rx, tx) = reopen(ours, &umem, &memory, QueueOptions::new).unwrap();
        queue = Queue { rx, _tx: tx, umem, memory };
        foreign.insert(0, queue.rx.socket().as_fd()).unwrap();
        for i in 0..1500 {
            let mut sent = frame(60, i);
            sent[14] |= 1;
            peer.send(&sent);
            assert_eq!(queue.receive(reader, 1)[0].0, None);
        }
        drop((queue, foreign));
        command(&format!("umount {}", place.path().display()));
    });
}

/// A tap has XDP in driver mode and no metadata functions.
#[test]
fn a_driver_without_metadata_functions() {
    on_veth(|_, _| {
        let tap = name("p");
        ip(&format!("tuntap add {tap} mode tap"));
        let error = with_metadata(&tap).unwrap_err();
        let AttachError::NoMetadata { interface, reason } = &error else { panic!("{error}") };
        assert_eq!((interface, reason), (&tap, &NoRxMetadata::Driver));
        let metadata = KernelMetadata::IfSupported;
        let options = ProgramOptions { metadata, ..ProgramOptions::default() };
        let program = Program::attach(index(&tap), &options).unwrap();
        assert_eq!(program.rx_metadata(), None);
    });
}
