//! Capture files as queues: what is written is read, byte for byte, and every page returns.

use netmem_packet::{
    Armed, Capture, Checksum, Handler, Packet, PcapRx, PcapTx, Play, Poll, RxQueue, Sendable, TxQueue, Verdict, Wait,
    XdpFrame,
};
use netmem_pool::{PagePool, PoolOptions, Private, RegionOptions, RegionProvider, SharedPool};
use pcap_file::DataLink;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::{Block, PcapNgParser};
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

type Frames = Vec<Vec<u8>>;

fn memory(pages: usize) -> Arc<RegionProvider<Private>> {
    RegionProvider::new(RegionOptions::new(pages).huge_pages(false).build().unwrap())
}

fn pool(pages: usize) -> PagePool<Private> {
    PoolOptions::new("capture").cache(0).build(memory(pages), None).unwrap()
}

fn frames(lengths: impl IntoIterator<Item = usize>) -> Frames {
    let mut random = fastrand::Rng::with_seed(1);
    lengths.into_iter().map(|len| (0..len).map(|_| random.u8(..)).collect()).collect()
}

/// A packet in as many pages as it needs.
fn packet(pool: &SharedPool<Private>, bytes: &[u8]) -> Packet<Private> {
    let mut parts = bytes.chunks(4000).map(|part| {
        let mut page = pool.alloc().unwrap();
        page.as_mut_slice()[..part.len()].copy_from_slice(part);
        page.freeze_range(0..part.len())
    });
    let mut packet = Packet::new(parts.next().unwrap());
    parts.for_each(|part| packet.push(part).unwrap());
    packet
}

fn write(path: &Path, frames: &Frames) {
    let pool = PoolOptions::new("sent").build_shared(memory(64), None).unwrap();
    let mut tx = PcapTx::create(path).unwrap();
    for frame in frames {
        tx.send(packet(&pool, frame)).unwrap();
        assert_eq!(pool.stats().inflight, 0, "its pages return at once");
    }
    assert_eq!((tx.complete(), tx.complete()), (frames.len(), 0));
    let stats = tx.close().unwrap();
    assert_eq!((stats.frames, stats.bytes), (frames.len() as u64, frames.iter().map(|f| f.len() as u64).sum()));
}

/// A queue over a file with these frames.
fn queue(frames: &Frames, play: Play, pages: usize) -> PcapRx<Private> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("frames.pcapng");
    write(&path, frames);
    let capture = Capture::open(&path).unwrap();
    assert_eq!(capture.len(), frames.len());
    PcapRx::new(capture, play, pool(pages)).unwrap()
}

fn receive(rx: &mut PcapRx<Private>, budget: usize) -> Vec<Packet<Private>> {
    let mut got = Vec::new();
    rx.poll(|poll| poll.receive(budget, &mut |packet: Packet<Private>| got.push(packet)));
    got
}

#[test]
fn what_is_written_is_read() {
    let frames = frames((14..200).chain([1514, 3839, 3840, 3841, 4096, 9000, 7936, 7937, 65535, 65549]));
    let mut rx = queue(&frames, Play::Once, 32);
    let mut got = Frames::new();
    while !rx.is_done() {
        rx.check().unwrap();
        assert_eq!(rx.arm().unwrap(), Armed::Work);
        let packets = receive(&mut rx, 1);
        assert_eq!(packets.len(), 1);
        got.extend(packets.iter().map(Packet::to_vec));
    }
    assert!(got == frames);
    assert!(receive(&mut rx, 10).is_empty());
    for error in [rx.check().unwrap_err(), rx.arm().unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }
    let counts = rx.stats().counts;
    assert_eq!((counts.frames, counts.passed), (frames.len() as u64, frames.len() as u64));
    assert_eq!(rx.into_pool().close().outstanding, 0);
}

/// The times are nanoseconds, and so is the resolution that the file declares.
#[test]
fn times_are_those_of_sending() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("times.pcapng");
    let before = SystemTime::now();
    write(&path, &frames([60, 61]));
    let after = SystemTime::now();
    let file = std::fs::read(&path).unwrap();
    let (mut rest, mut parser) = PcapNgParser::new(&file).unwrap();
    let mut times = Vec::new();
    while !rest.is_empty() {
        let (behind, block) = parser.next_block(rest).unwrap();
        if let Block::EnhancedPacket(packet) = block {
            times.push(SystemTime::UNIX_EPOCH + packet.timestamp);
        }
        rest = behind;
    }
    assert_eq!(times.len(), 2);
    assert!(before <= times[0] && times[0] <= times[1] && times[1] <= after, "{before:?} {times:?} {after:?}");
    let interface = &parser.interfaces()[0];
    assert_eq!(interface.linktype, DataLink::ETHERNET);
    assert_eq!(interface.options, [InterfaceDescriptionOption::IfTsResol(9)]);
}

/// Frames are held until the pool is empty: the next one waits, and none is lost.
#[test]
fn a_pool_without_pages_loses_no_frame() {
    let frames = frames((0..100).map(|i| if i % 7 == 0 { 9000 } else { 60 + i }));
    let mut rx = queue(&frames, Play::Once, 8);
    let mut got = Frames::new();
    while !rx.is_done() {
        let held = receive(&mut rx, 64);
        assert!(!held.is_empty());
        got.extend(held.iter().map(Packet::to_vec));
    }
    assert!(got == frames);
    assert!(rx.stats().out_of_buffers > 10);
    assert_eq!(rx.into_pool().close().outstanding, 0);
}

#[test]
fn a_capture_is_played_again() {
    let frames = frames([60, 70, 80]);
    let mut rx = queue(&frames, Play::Loop, 64);
    for i in 0..10 {
        assert_eq!(receive(&mut rx, 1)[0].to_vec(), frames[i % 3]);
    }
    assert_eq!(receive(&mut rx, 0).len(), 0);
    assert_eq!(receive(&mut rx, 50).len(), 50);
    assert!(!rx.is_done());
}

/// A program whose verdict is the frame's first byte, and which fails on one of its frames.
#[derive(Default)]
struct Program {
    passed: Vec<usize>,
    left: usize,
    flushes: usize,
}

impl Handler<Private> for Program {
    const LINEAR: bool = true;

    fn run(&mut self, frame: &mut XdpFrame<Private>) -> Verdict {
        assert!(!frame.is_multi_buffer() && frame.headroom() >= 100);
        let [first] = frame.read_at(0).unwrap();
        match first {
            0 => Verdict::Pass,
            1 => Verdict::Drop,
            2 => Verdict::Tx,
            3 => Verdict::Redirect,
            4 => Verdict::Aborted,
            _ => panic!("planted"),
        }
    }

    fn pass(&mut self, packet: Packet<Private>) {
        self.passed.push(packet.len());
    }

    fn tx(&mut self, _: Packet<Private>) {
        self.left += 1;
    }

    fn redirect(&mut self, _: Packet<Private>) {
        self.left += 1;
    }

    fn flush(&mut self) {
        self.flushes += 1;
    }
}

/// Each verdict is executed and counted. A frame on which the program panics is not played again.
#[test]
fn verdicts() {
    let frames: Frames =
        [0, 1, 2, 3, 4, 9, 0, 0].iter().zip([60, 60, 60, 60, 60, 60, 9000, 61]).map(|(v, n)| vec![*v; n]).collect();
    let mut rx = queue(&frames, Play::Once, 16);
    let mut program = Program::default();
    let failed = catch_unwind(AssertUnwindSafe(|| rx.poll(|poll| poll.receive(64, &mut program))));
    assert!(failed.is_err());
    assert_eq!(rx.poll(|poll| poll.receive(64, &mut program)), 2);
    assert_eq!((&program.passed[..], program.left, program.flushes), (&[60, 61][..], 2, 1));
    let stats = rx.stats();
    assert_eq!((stats.counts.frames, stats.not_linear, stats.too_long), (7, 1, 0));
    let counts = stats.counts;
    let each = [counts.passed, counts.dropped, counts.transmitted, counts.redirected, counts.aborted];
    assert_eq!(each, [2, 1, 1, 1, 1]);
    assert_eq!(rx.into_pool().close().outstanding, 0);
}

#[test]
fn offloads_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pool = PoolOptions::new("sent").build_shared(memory(64), None).unwrap();
    let mut tx = PcapTx::create(&dir.path().join("offloads.pcapng")).unwrap();
    let mut partial = packet(&pool, &[0; 60]);
    partial.meta.checksum = Checksum::Partial { start: 34, offset: 6 };
    assert_eq!(tx.sendable(&partial), Sendable::Never);
    let refused = tx.send(partial).unwrap_err();
    assert_eq!(refused.to_vec(), [0; 60]);
    assert_eq!(tx.close().unwrap().frames, 0);
}

/// A file that cannot be written stops the queue, with the reason, and no packet is lost.
#[test]
fn a_full_file_system() {
    let pool = PoolOptions::new("sent").build_shared(memory(64), None).unwrap();
    let mut tx = PcapTx::create(Path::new("/dev/full")).unwrap();
    tx.send(packet(&pool, &[7; 60])).unwrap();
    assert_eq!(tx.arm().unwrap(), Armed::Work);
    assert_eq!(tx.complete(), 1);
    assert_eq!(tx.arm().unwrap(), Armed::Waits);
    tx.flush();
    for error in [tx.check().unwrap_err(), tx.arm().unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    }
    let next = packet(&pool, &[8; 60]);
    assert_eq!(tx.sendable(&next), Sendable::Never);
    assert_eq!(tx.send(next).unwrap_err().to_vec(), [8; 60]);
    assert_eq!(tx.close().unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(pool.stats().inflight, 0);
    let missing = PcapTx::<Private>::create(Path::new("/nonexistent/netmem.pcapng")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}
