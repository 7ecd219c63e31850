//! The order of writes and of marks in the dirty log, in all ways by which the device writes guest
//! memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::port::{Cross, Gen, Port, Posted};
use super::session::Session;
use super::{NetDevice, Options};
use crate::guest_memory::dirty_log::{DirtyLog, copies::Copies};
use crate::guest_memory::mapping::Mapping;
use crate::net::{Offloads, VnetHdr, feature};
use crate::vhost_user::message::{MemoryRegion, Message, VringAddresses, protocol};
use crate::vhost_user::received::Received;
use crate::virtqueue::{
    DESC_NEXT, DESC_WRITE, Desc, PackedDesc, PackedLayout, PackedRing, Position, SplitLayout, SplitRing,
};

const GUEST: u64 = 1 << 32;
const BYTES: u64 = 1 << 20;
const SIZE: u16 = 16;
const BUFFERS: u64 = 64 << 10;
const EACH: u64 = 4096;

/// A generator that writes its frames into posted buffers, as a tap does.
struct InPlace(Gen);

impl Port for InPlace {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = 0;
    const READS: bool = true;

    fn peek(&mut self) -> Option<&[u8]> {
        None
    }

    fn consume(&mut self) {}

    fn expects(&self) -> Option<usize> {
        Some(1000)
    }

    fn read(&mut self, _: Offloads, posted: Posted<'_>) -> Option<(VnetHdr, usize)> {
        posted.fill(self.0.frame());
        Some((VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN }, self.0.frame().len()))
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

fn file(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create(c"netmem-log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

/// Makes as many chains available as the ring at `base` has room for, each of buffers of `lens`.
fn post(base: *mut u8, packed: bool, ring: u8, lens: &[u32]) {
    let chains = SIZE as usize / lens.len();
    let parts = |chain: usize| {
        lens.iter().enumerate().map(move |(i, &len)| {
            let more = if i + 1 < lens.len() { DESC_NEXT } else { 0 };
            // The first part of a command is read.
            let write = if ring == 2 && i == 0 { 0 } else { DESC_WRITE };
            (GUEST + BUFFERS + (chain * lens.len() + i) as u64 * EACH, len, more | write)
        })
    };
    let descs = (0..chains).flat_map(parts).enumerate();
    if packed {
        // SAFETY: *mapped*, aligned, and large enough.
        let ring = unsafe { PackedRing::from_layout(base, SIZE) };
        for (n, (addr, len, flags)) in descs {
            let flags = flags | Position::START.available();
            ring.set_desc(n as u16, PackedDesc { addr, len, id: n as u16, flags });
        }
    } else {
        // SAFETY: as above.
        let ring = unsafe { SplitRing::from_layout(base, SIZE) };
        for (n, (addr, len, flags)) in descs {
            ring.set_desc(n as u16, Desc { addr, len, flags, next: n as u16 + 1 });
        }
        (0..chains).for_each(|chain| ring.set_avail_entry(chain as u16, (chain * lens.len()) as u16));
        ring.set_avail_idx(chains as u16);
    }
}

/// Runs one ring of a device whose writes are logged, until it has completed chains. The buffers of
/// the chains are `lens`. Each byte that is marked must have its last value by then, and all bytes
/// of the first chains must have been marked.
#[track_caller]
fn logged<P: Port>(port: P, ring: u8, features: u64, splits: bool, lens: &[u32], least: usize) {
    let mut port = Some(port);
    let options = Options { serve_control: true, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Ok(port.take().unwrap())).unwrap();
    let shared = Arc::clone(&device.worker.shared);
    let mut session = Session::new(Arc::clone(&shared));
    let mut tell = |message: Message<Received>| _ = session.handle(message).unwrap();
    let packed = features & feature::RING_PACKED != 0;
    let all = features
        | feature::VERSION_1
        | feature::VHOST_USER_PROTOCOL
        | feature::LOG_ALL
        | feature::CTRL_VQ
        | feature::STATUS
        | feature::GUEST_ANNOUNCE;
    tell(Message::SetProtocolFeatures(protocol::NETMEM_SPLIT));
    tell(Message::SetFeatures(all));
    let region = MemoryRegion { guest_addr: GUEST, size: BYTES, user_addr: GUEST, mmap_offset: 0 };
    tell(Message::SetMemTable(vec![(region, file(BYTES).into())]));
    let table = shared.memory();
    let base = table.translate(GUEST, 1).unwrap();
    // SAFETY: *mapped*; the device runs on this thread, and not now.
    unsafe { base.write_bytes(0xee, BYTES as usize) };
    // SAFETY: as above, and the rings lie in front of the buffers.
    unsafe { base.write_bytes(0, BUFFERS as usize) };
    let map = Mapping::new("log", file(BYTES), 0, BYTES).unwrap();
    let mut log = DirtyLog::new(map, Arc::clone(&shared.stats.log_misses));
    let copies = Copies::of(&mut log, Arc::clone(&table));
    shared.set_log(log);
    let (split, pack) = (SplitLayout::new(SIZE), PackedLayout::new(SIZE));
    let (used, avail) = if packed { (pack.device, pack.driver) } else { (split.used, split.avail) };
    let index = ring.into();
    tell(Message::SetVringNum { index, num: SIZE.into() });
    let at = |offset: usize| GUEST + offset as u64;
    let addresses = VringAddresses {
        descriptors: GUEST,
        used: at(used),
        available: at(avail),
        log_addr: at(used),
        log: true,
        splits,
    };
    tell(Message::SetVringAddr { index, addresses });
    tell(Message::SetVringKick { index: ring, fd: None });
    tell(Message::SetVringEnable { index, enable: true });
    post(base, packed, ring, lens);
    // The ring's events were marked when it was started and armed.
    copies.take();
    device.poll();
    let (noted, stale) = copies.take();
    let buffers = noted.range(GUEST + BUFFERS..).count();
    assert!(buffers >= least, "{buffers} bytes of buffers were noted");
    assert!(noted.range(..GUEST + BUFFERS).count() >= 8, "the used entries were noted");
    assert_eq!(stale, [0; 0], "noted before they were written");
    // SAFETY: *mapped*; only this thread uses it.
    let all = unsafe { std::slice::from_raw_parts(base, BYTES as usize) };
    let changed = (BUFFERS..BYTES).filter(|&at| all[at as usize] != 0xee).map(|at| GUEST + at);
    let missed: Vec<u64> = changed.filter(|addr| !noted.contains_key(addr)).collect();
    assert_eq!(missed, [0; 0], "written, and not noted");
    drop(table);
}

/// A byte is marked after it was written for the last time: a front end that copies each page as
/// soon as it is marked has all bytes. For a frame that the device copies, into one chain and into
/// several; that a port reads into the driver's buffers; that is split behind its headers; and for
/// the answer to a command; in both formats.
#[test]
fn bytes_are_noted_after_they_are_written() {
    let frames = |size| Gen::new(size, Some(4)).unwrap();
    let mergeable = feature::MRG_RXBUF;
    for format in [0, feature::RING_PACKED] {
        logged(frames(1000), 0, format, false, &[2048], 4 * 1012);
        logged(frames(1000), 0, format, false, &[12, 2048], 4 * 1012);
        logged(frames(1000), 0, format | mergeable, false, &[400], 4 * 1012);
        logged(InPlace(frames(1000)), 0, format, false, &[2048], 4 * 1012);
        logged(InPlace(frames(1000)), 0, format, false, &[5, 20, 2048], 4 * 1012);
        logged(InPlace(frames(1000)), 0, format | mergeable, false, &[400], 4 * 1012);
        logged(frames(1000), 0, format, true, &[128, 2048], 4 * 1000);
        logged(frames(1000), 2, format, false, &[2, 1], 1);
    }
}

/// From queue pair to queue pair: the frame is marked, then the used index of the receiver, and
/// then that of the sender. A front end that sees a chain as sent finds the frame in the receiver's
/// ring.
#[test]
fn a_sender_is_completed_after_its_receiver() {
    /// Where the ring of the sender is.
    const SENDER: u64 = 16 << 10;
    let mut ends = Cross::cable().into_iter();
    let options = Options { max_pairs: 2, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Ok(ends.next().unwrap())).unwrap();
    let shared = Arc::clone(&device.worker.shared);
    let mut session = Session::new(Arc::clone(&shared));
    let mut tell = |message: Message<Received>| _ = session.handle(message).unwrap();
    tell(Message::SetFeatures(feature::VERSION_1 | feature::LOG_ALL | feature::MQ | feature::CTRL_VQ));
    let region = MemoryRegion { guest_addr: GUEST, size: BYTES, user_addr: GUEST, mmap_offset: 0 };
    tell(Message::SetMemTable(vec![(region, file(BYTES).into())]));
    let table = shared.memory();
    let map = Mapping::new("log", file(BYTES), 0, BYTES).unwrap();
    let mut log = DirtyLog::new(map, Arc::clone(&shared.stats.log_misses));
    let copies = Copies::of(&mut log, Arc::clone(&table));
    shared.set_log(log);
    let layout = SplitLayout::new(SIZE);
    for (ring, at) in [(2, GUEST), (1, GUEST + SENDER)] {
        let (descriptors, available, used) = (at, at + layout.avail as u64, at + layout.used as u64);
        let index = u32::from(ring);
        tell(Message::SetVringNum { index, num: SIZE.into() });
        let addresses = VringAddresses { descriptors, used, available, log_addr: used, log: true, splits: false };
        tell(Message::SetVringAddr { index, addresses });
        tell(Message::SetVringKick { index: ring, fd: None });
    }
    (0..2).for_each(|_| _ = device.poll());
    for (at, flags, len) in [(GUEST, DESC_WRITE, 2048), (GUEST + SENDER, 0, 100)] {
        // SAFETY: *mapped*, aligned, and large enough.
        let ring = unsafe { SplitRing::from_layout(table.translate(at, 1).unwrap(), SIZE) };
        let addr = GUEST + BUFFERS + u64::from(flags) * EACH;
        ring.set_desc(0, Desc { addr, len, flags, next: 0 });
        ring.set_avail_idx(1);
    }
    copies.marks();
    device.poll();
    let marks = copies.marks();
    let place = |addr: u64| marks.iter().position(|&mark| mark == addr).expect("it is marked");
    let used = layout.used as u64;
    let (frame, receiver, sender) =
        (place(GUEST + BUFFERS + u64::from(DESC_WRITE) * EACH), place(GUEST + used), place(GUEST + SENDER + used));
    assert!(frame < receiver && receiver < sender, "{marks:x?}");
    assert_eq!((copies.take().1, device.stats().tx_direct.load(Relaxed)), (vec![], 1));
}
