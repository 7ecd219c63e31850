//! The features by which a front end moves a guest or replaces the device: the dirty log, the announcement, device
//! status and reset, and in-flight state, also with a device process that is killed under traffic.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::time::Duration;

use netmem_testing::device::rings::*;
use netmem_testing::device::*;
use netmem_testing::skip;
use netmem_testing::tap::{Wire, tap_name, taps};
use netmem_testing::vhost_user::front::{request, u64s};
use netmem_virtio::device::port::{Gen, Port, Sink, Tap};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_WRITE, PackedDesc, PackedLayout, Position};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A port that keeps what the driver sends, and counts the front ends that left.
#[derive(Default)]
struct Record {
    sent: Vec<Vec<u8>>,
    left: usize,
}

impl Port for Record {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = 0;

    fn peek(&mut self) -> Option<&[u8]> {
        None
    }

    fn consume(&mut self) {}

    fn send(&mut self, wire: &[u8]) -> bool {
        self.sent.push(wire.to_vec());
        true
    }

    fn left(&mut self) -> u64 {
        self.left += 1;
        std::mem::take(&mut self.sent).len() as u64
    }
}

/// A file of `len` bytes that the front end shares beside its memory.
struct Shared {
    file: std::fs::File,
    at: *mut u8,
    len: usize,
}

impl Shared {
    fn new(file: std::fs::File, len: usize) -> Self {
        // SAFETY: a new mapping of the whole file.
        let at = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, 0).unwrap()
        };
        Self { file, at: at.cast(), len }
    }

    /// Where byte `n` is.
    fn at(&self, n: usize) -> *mut u8 {
        assert!(n < self.len);
        self.at.wrapping_add(n)
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: inside the mapping; read by bytes, while the device may write.
        (0..self.len).map(|n| unsafe { self.at(n).read_volatile() }).collect()
    }

    fn fill(&self, byte: impl Fn(usize) -> u8) {
        // SAFETY: inside the mapping.
        (0..self.len).for_each(|n| unsafe { self.at(n).write_volatile(byte(n)) });
    }

    fn u16(&self, n: usize) -> u16 {
        // SAFETY: inside the mapping; aligned by its callers.
        unsafe { self.at(n).cast::<u16>().read_volatile() }
    }

    fn set_u16(&self, n: usize, value: u16) {
        // SAFETY: as above.
        unsafe { self.at(n).cast::<u16>().write_volatile(value) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { munmap(self.at.cast(), self.len).unwrap() };
    }
}

const PAGE: usize = 4096;
/// Bytes of a log that reaches to the end of the driver's memory.
const LOG: usize = (GUEST as usize + MEMORY) / PAGE / 8;

impl Shared {
    fn log(len: usize) -> Self {
        Self::new(memfd(len), len)
    }

    fn set(&self, front: &Front) -> std::io::Result<()> {
        let answer = front.ask(request::SET_LOG_BASE, &u64s([self.len as u64, 0]), &[self.file.as_fd()])?;
        assert!(answer.body.is_empty());
        Ok(())
    }

    /// Pages of the driver's memory whose bits are set.
    fn pages(&self) -> BTreeSet<usize> {
        let (bytes, first) = (self.bytes(), GUEST as usize / PAGE);
        let bits = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
        let bits =
            bits.flat_map(|(at, byte)| (0..8).filter(move |bit| byte & 1 << bit != 0).map(move |bit| 8 * at + bit));
        bits.map(|page| page.checked_sub(first).expect("a page of the driver's memory")).collect()
    }
}

/// Entries of the rings that are logged: their used rings are longer than a page.
const LOGGED: u16 = 1024;

/// Where the used ring of ring `index` is in the driver's memory.
fn used_at(index: usize) -> usize {
    (Driver::addresses(index, LOGGED).used - USER) as usize
}

/// Switches the log on or off as QEMU does: the feature, then the addresses of every ring, while they run.
fn set_log(driver: &Driver, features: u64, on: bool) {
    let features = if on { features | feature::LOG_ALL } else { features };
    driver.front.set_features(features).unwrap();
    for index in 0..driver.rings.len() {
        let log = on.then_some(GUEST + used_at(index) as u64);
        driver.front.set_vring_addr(index, Addresses { log, ..Driver::addresses(index, LOGGED) }).unwrap();
    }
}

/// A driver with two rings that are enabled, and not logged yet.
fn logged<P: Port>(device: &NetDevice<P>, features: u64) -> Driver {
    let mut driver = Driver::connect(device, features);
    driver.share_memory();
    for index in 0..2 {
        driver.start_ring(LOGGED);
        driver.front.set_vring_enable(index, true).unwrap();
    }
    driver
}

/// Posts `count` buffers of `each` bytes, has the device fill them and send as many frames. Answers which pages the device
/// changed: of used rings, and of buffers.
fn traffic(device: &mut NetDevice<Gen>, driver: &mut Driver, each: usize, count: u16) -> [BTreeSet<usize>; 2] {
    let used = |index: usize| used_at(index)..used_at(index) + 4 + 8 * usize::from(LOGGED);
    for index in 0..2 {
        driver.memory.write(used(index).start + 4, &vec![0xee; used(index).len() - 4]);
    }
    driver.memory.write(BUFFERS, &vec![0xee; MEMORY - BUFFERS]);
    let before = driver.memory.read(0, MEMORY);
    driver.post_rx(0, 0, count, each);
    let (addr, _) = driver.buffer(1, 0, 2048);
    for n in 0..count {
        driver.rings[1].chain(n, &[(addr, 76, 0)]);
    }
    let (rx, tx) = (driver.rings[0].avail, driver.rings[1].avail);
    poll_until(device, || driver.rings[0].ring.used_idx() == rx && driver.rings[1].ring.used_idx() == tx);
    let now = driver.memory.read(0, MEMORY);
    // Whole pages are compared at once; the first and the last may be parts.
    let changed = |bytes: std::ops::Range<usize>| -> BTreeSet<usize> {
        let pages = bytes.start / PAGE..=(bytes.end - 1) / PAGE;
        let part = |page: usize| bytes.start.max(page * PAGE)..bytes.end.min((page + 1) * PAGE);
        pages.filter(|&page| before[part(page)] != now[part(page)]).collect()
    };
    [&changed(used(0)) | &changed(used(1)), changed(BUFFERS..MEMORY)]
}

/// The log has a bit for every page that the device changed, payload and used rings, and no other; switched on and off
/// while the rings run.
#[test]
fn the_dirty_log_is_what_was_written() {
    for (features, size, each) in
        [(PLAIN, 64, 2048), (PLAIN, 1514, 1600), (MERGEABLE, 9000, 3000), (MERGEABLE, 64, 512)]
    {
        let mut device = NetDevice::new(one_pair(), |_| Gen::new(size, None)).unwrap();
        let mut driver = logged(&device, features);
        let log = Shared::log(LOG);
        // A multiple of what a frame takes, so that no frame waits for more.
        let count = 240;
        log.set(&driver.front).unwrap();
        traffic(&mut device, &mut driver, each, count);
        assert!(log.pages().is_empty(), "the feature was not accepted yet");
        for _ in 0..6 {
            set_log(&driver, features, true);
            log.fill(|_| 0);
            let [rings, payload] = traffic(&mut device, &mut driver, each, count);
            assert!(!rings.is_empty() && !payload.is_empty());
            assert_eq!(log.pages(), &rings | &payload, "frames of {size}");
            set_log(&driver, features, false);
            log.fill(|_| 0);
            traffic(&mut device, &mut driver, each, count);
            assert!(log.pages().is_empty(), "switched off");
            // Payload alone: the feature without the flag of the addresses.
            driver.front.set_features(features | feature::LOG_ALL).unwrap();
            let [_, payload] = traffic(&mut device, &mut driver, each, count);
            assert_eq!(log.pages(), payload, "frames of {size}");
        }
        assert_eq!(driver.stats.log_misses.load(Relaxed), 0);
        driver.hang_up();
    }
}

/// Frames of a tap, which the kernel writes into the driver's buffers, while the guest moves: the pages whose bits are set are copied
/// all the time, and once more when the rings have stopped. The copy then has all that the device has written. (The order of writes
/// and bits is shown by `bytes_are_noted_after_they_are_written`, without luck.)
#[test]
fn a_guest_on_a_tap_moves() {
    if !taps() {
        return;
    }
    for (features, each) in [(PLAIN, PAGE), (MERGEABLE, 512)] {
        let name = tap_name();
        let mut taps = Tap::open(&name, 1, true).unwrap();
        let wire = match Wire::new(&name) {
            Ok(wire) => wire,
            Err(e) => return skip(&format!("no packet sockets here: {e}")),
        };
        let mut device = NetDevice::new(one_pair(), |_| Ok(taps.remove(0))).unwrap();
        let mut driver = logged(&device, features);
        driver.memory.write(BUFFERS, &vec![0xee; MEMORY - BUFFERS]);
        let log = Shared::log(LOG);
        log.set(&driver.front).unwrap();
        set_log(&driver, features, true);
        let mut copy = driver.memory.read(0, MEMORY);
        let mut move_pages = |driver: &Driver| {
            for (at, first) in (0..LOG).map(|at| (at, 8 * at)).skip(GUEST as usize / PAGE / 8) {
                // SAFETY: inside the mapping.
                let bits = unsafe { &*log.at(at).cast::<AtomicU8>() }.swap(0, SeqCst);
                for page in (0..8).filter(|bit| bits & 1 << bit != 0).map(|bit| first + bit - GUEST as usize / PAGE) {
                    copy[page * PAGE..(page + 1) * PAGE].copy_from_slice(&driver.memory.read(page * PAGE, PAGE));
                }
            }
        };
        driver.post_rx(0, 0, 400, each);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let control = device.control();
            s.spawn(|| {
                while !stop.load(Relaxed) {
                    device.poll();
                }
            });
            let _ends = Ends { stop: &stop, control: &control };
            let mut sent = 0;
            until(|| {
                // The tap's queue has room for these.
                if sent < frames(&driver.stats).0 + 32 {
                    wire.send(&[0x5a; 1000]);
                    sent += 1;
                }
                move_pages(&driver);
                driver.rings[0].ring.used_idx() >= 300
            });
        });
        (0..2).for_each(|ring| _ = driver.front_base(ring));
        move_pages(&driver);
        let now = driver.memory.read(0, MEMORY);
        for part in [used_at(0)..used_at(0) + 4 + 8 * usize::from(LOGGED), BUFFERS..MEMORY] {
            let differs = part.clone().find(|&at| copy[at] != now[at]);
            assert_eq!(differs, None, "{part:?}");
        }
        assert!(driver.stats.rx_in_place.load(Relaxed) > 50);
        assert_eq!(driver.queue_errors(), []);
    }
}

/// A log that is too small, or no memory file, or none at all.
#[test]
fn a_log_that_is_too_small() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = logged(&device, PLAIN);
    // The feature without a log does nothing.
    set_log(&driver, PLAIN, true);
    traffic(&mut device, &mut driver, 2048, 10);
    let log = Shared::log(LOG - 512);
    log.set(&driver.front).unwrap();
    traffic(&mut device, &mut driver, 2048, 10);
    assert!(driver.stats.log_misses.load(Relaxed) >= 20);
    assert!(log.bytes().iter().all(|&b| b == 0));
    driver.hang_up();
    let log = Shared::log(4096);
    let too_long = u64s([4097, 0]);
    let beyond = u64s([4096, u64::MAX]);
    let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    disk.set_len(4096).unwrap();
    let on_disk = rustix::fs::fcntl_get_seals(&disk).is_err();
    for (body, file, name) in
        [(too_long, &log.file, "SharedFile"), (beyond, &log.file, "SharedFile"), (u64s([4096, 0]), &disk, "NotMemory")]
    {
        if name == "NotMemory" && !on_disk {
            continue;
        }
        let mut driver = Driver::connect(&device, PLAIN);
        // The message has an answer of its own, which cannot say "no".
        assert!(driver.front.ask(request::SET_LOG_BASE, &body, &[file.as_fd()]).is_err());
        let e = driver.connection.take().unwrap().wait().unwrap_err();
        assert!(format!("{e:?}").contains("SET_LOG_BASE") && format!("{e:?}").contains(name), "{e:?}");
    }
}

/// The limit for memory that a front end may have mapped is a limit for its log, and for its in-flight region.
#[test]
fn a_log_has_a_limit() {
    let limit = 1 << 20;
    let device = NetDevice::new(Options { max_memory: Some(limit), ..one_pair() }, |_| Ok(Sink)).unwrap();
    let file = memfd(2 << 20);
    for (bytes, good) in [(limit, true), (limit + 1, false)] {
        let driver = Driver::connect(&device, PLAIN);
        let log = driver.front.ask(request::SET_LOG_BASE, &u64s([bytes, 0]), &[file.as_fd()]);
        assert_eq!(log.is_ok(), good, "a log of {bytes} bytes");
    }
    let driver = Driver::connect(&device, PLAIN);
    for (bytes, good) in [(limit, true), (limit + 1, false)] {
        let region = driver.front.tell(request::SET_INFLIGHT_FD, &inflight_body(bytes, 2, SIZE), &[file.as_fd()]);
        assert_eq!(region.is_ok(), good, "a region of {bytes} bytes");
    }
}

/// SEND_RARP puts a broadcast of the guest's address on the network, in front of anything else.
#[test]
fn a_guest_is_announced() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Record::default())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    driver.front.tell(request::SEND_RARP, &[&mac[..], &[0; 2]].concat(), &[]).unwrap();
    let (addr, at) = driver.buffer(1, 0, 2048);
    driver.memory.write(at, &[0; 76]);
    driver.rings[1].chain(0, &[(addr, 76, 0)]);
    poll_until(&mut device, || driver.rings[1].ring.used_idx() == 1);
    let sent = &device.ports()[0].sent;
    assert_eq!(sent.len(), 2);
    let frame = &sent[0][VnetHdr::LEN..];
    let want = [&[0xff; 6][..], &mac, &[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3], &mac, &[0; 4], &mac, &[0; 4], &[0; 18]];
    assert_eq!((frame, &sent[0][..12]), (&want.concat()[..], &VnetHdr::PLAIN.to_bytes()[..]));
    assert_eq!((driver.stats.announced.load(Relaxed), frames(&driver.stats).1), (1, 1));
    // Once for each message.
    device.poll();
    assert_eq!(device.ports()[0].sent.len(), 2);
    driver.hang_up();
}

/// A port hears of every front end that leaves, before the next one's frames, also where both accept the same features and
/// no pass lies between them.
#[test]
fn ports_hear_of_the_end() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Record::default())).unwrap();
    let mut left = 0;
    for _ in 0..3 {
        let mut driver = Driver::start(&device, PLAIN, 2);
        let (addr, at) = driver.buffer(1, 0, 2048);
        driver.memory.write(at, &[0; 76]);
        driver.rings[1].chain(0, &[(addr, 76, 0)]);
        poll_until(&mut device, || driver.rings[1].ring.used_idx() == 1);
        let port = &device.ports()[0];
        assert!(port.left > left && port.sent.len() == 1);
        left = port.left;
        driver.hang_up();
    }
}

/// The device status is kept; status 0 and RESET_DEVICE stop the rings and forget all about them, but not the memory.
#[test]
fn status_and_reset() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 2);
    let status = |d: &Driver| d.front.ask(request::GET_STATUS, &[], &[]).unwrap().u64();
    let set_status = |d: &Driver, status| d.front.tell(request::SET_STATUS, &u64s([status]), &[]);
    assert_eq!(status(&driver), 0);
    for reset in [request::SET_STATUS, request::RESET_DEVICE] {
        set_status(&driver, 15).unwrap();
        assert_eq!(status(&driver), 15);
        driver.post_rx(0, 0, 8, 2048);
        let avail = driver.rings[0].avail;
        poll_until(&mut device, || driver.rings[0].ring.used_idx() == avail);
        let body = if reset == request::SET_STATUS { u64s([0]) } else { Vec::new() };
        driver.front.tell(reset, &body, &[]).unwrap();
        assert_eq!(status(&driver), 0);
        driver.post_rx(0, 0, 8, 2048);
        for _ in 0..10 {
            assert_eq!(device.poll(), 0);
        }
        assert_eq!(driver.front.get_vring_base(0).unwrap(), 0);
        // Its kick alone does not start a ring: nothing is known of it any more.
        let e = driver.front.set_vring_kick(0, &driver.rings[0].kick).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PermissionDenied);
        // The driver begins anew, in the same memory.
        driver.front.set_features(MERGEABLE).unwrap();
        for index in 0..2 {
            driver.rings[index].ring.clear();
            (driver.rings[index].avail, driver.rings[index].used) = (0, 0);
            driver.describe(index, SIZE, 0);
            driver.front.set_vring_enable(index, true).unwrap();
        }
    }
    assert!(set_status(&driver, 256).is_err());
}

/// A driver that breaks a rule finds so in the status, until it resets the device. Nothing else clears the bit: neither a status that
/// lacks it, nor a ring that is stopped, or started again.
#[test]
fn a_broken_ring_needs_a_reset() {
    const NEEDS_RESET: u64 = 64;
    let mut device = NetDevice::new(Options { max_pairs: 2, ..Options::default() }, |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 4);
    let status = |d: &Driver| d.front.ask(request::GET_STATUS, &[], &[]).unwrap().u64();
    let set_status = |d: &Driver, status| d.front.tell(request::SET_STATUS, &u64s([status]), &[]).unwrap();
    for (ring, reset) in [(3, request::SET_STATUS), (0, request::RESET_DEVICE)] {
        set_status(&driver, 15);
        device.poll();
        assert_eq!(status(&driver), 15);
        driver.rings[ring].post(SIZE);
        poll_until(&mut device, || driver.rings[ring].err.read().is_ok());
        assert_eq!(status(&driver), 15 | NEEDS_RESET);
        set_status(&driver, 15);
        assert_eq!(status(&driver), 15 | NEEDS_RESET, "a status without the bit does not clear it");
        driver.front.get_vring_base(ring).unwrap();
        driver.rings[ring].ring.clear();
        driver.describe(ring, SIZE, 0);
        assert_eq!(status(&driver), 15 | NEEDS_RESET, "nor does the start of the ring");
        // A front end that adds a bit writes the others as it has read them.
        set_status(&driver, 15 | NEEDS_RESET);
        let body = if reset == request::SET_STATUS { u64s([0]) } else { Vec::new() };
        driver.front.tell(reset, &body, &[]).unwrap();
        assert_eq!(status(&driver), 0);
        driver.front.set_features(MERGEABLE).unwrap();
        for index in 0..4 {
            driver.rings[index].ring.clear();
            (driver.rings[index].avail, driver.rings[index].used) = (0, 0);
            driver.describe(index, SIZE, 0);
            driver.front.set_vring_enable(index, true).unwrap();
        }
    }
    assert_eq!(driver.stats.queue_error("head_out_of_range"), 2);
}

#[test]
fn an_mtu_is_compared_with_the_offer() {
    for (offered, mtu, good) in [
        (None, 1500, true),
        (None, 67, false),
        (None, 65536, false),
        (Some(1500), 1500, true),
        (Some(1500), 1501, false),
    ] {
        let device = NetDevice::new(Options { mtu: offered, ..one_pair() }, |_| Ok(Sink)).unwrap();
        let driver = Driver::connect(&device, PLAIN);
        assert_eq!(driver.front.tell(request::NET_SET_MTU, &u64s([mtu]), &[]).is_ok(), good, "{offered:?} {mtu}");
        driver.hang_up();
    }
}

/// The driver of firmware: no VERSION_1, and so a header of ten bytes, in a descriptor of its own.
#[test]
fn a_legacy_header() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(1000, None)).unwrap();
    let want = device.ports()[0].frame().to_vec();
    let mut driver = Driver::start(&device, feature::VHOST_USER_PROTOCOL, 2);
    driver.memory.write(BUFFERS, &[0xee; 8192]);
    let (addr, at) = driver.buffer(0, 0, 2048);
    driver.rings[0].chain(0, &[(addr, 10, DESC_WRITE), (addr + 64, 1522, DESC_WRITE)]);
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 1);
    assert_eq!(driver.rings[0].take(), Some((0, 1010)));
    assert_eq!(driver.memory.read(at, 12), [&[0; 10][..], &[0xee; 2]].concat());
    assert_eq!(driver.memory.read(at + 64, 1001), [&want[..], &[0xee]].concat());
    driver.hang_up();
    // From the driver: in one buffer, and in two.
    let mut device = NetDevice::new(one_pair(), |_| Ok(Record::default())).unwrap();
    let mut driver = Driver::start(&device, feature::VHOST_USER_PROTOCOL, 2);
    let (addr, at) = driver.buffer(1, 0, 2048);
    driver.memory.write(at, &[&[0; 10][..], &want].concat());
    driver.rings[1].chain(0, &[(addr, 1010, 0)]);
    driver.rings[1].chain(1, &[(addr, 10, 0), (addr + 10, 1000, 0)]);
    // A runt by its own header.
    driver.rings[1].chain(3, &[(addr, 23, 0)]);
    driver.rings[1].chain(4, &[(addr, 24, 0)]);
    poll_until(&mut device, || driver.rings[1].ring.used_idx() == 4);
    let sent = &device.ports()[0].sent;
    assert_eq!(sent.len(), 3);
    for wire in &sent[..2] {
        assert_eq!((&wire[..12], &wire[12..]), (&[0; 12][..], &want[..]));
    }
    assert_eq!(sent[2][12..], want[..14]);
    assert_eq!(driver.drops(), [("runt", 1)]);
}

/// Bytes of a queue's part of an in-flight region.
const PART: usize = (16 + 16 * SIZE as usize).next_multiple_of(64);

impl Shared {
    /// A region of the device's for two rings.
    fn inflight(front: &Front) -> Self {
        let mut answer = front.ask(request::GET_INFLIGHT_FD, &inflight_body(0, 2, SIZE), &[]).unwrap();
        let len = u64::from_le_bytes(answer.body[..8].try_into().unwrap());
        assert_eq!((len as usize, &answer.body[16..20]), (2 * PART, &[2, 0, 0, 1][..]));
        Self::new(answer.fds.pop().unwrap().into(), len as usize)
    }

    fn give(&self, front: &Front) -> std::io::Result<()> {
        front.tell(request::SET_INFLIGHT_FD, &inflight_body(self.len as u64, 2, SIZE), &[self.file.as_fd()])
    }

    /// Marks chain `head` of the first ring as in flight.
    fn mark(&self, head: u16, counter: u64) {
        let at = 16 + 16 * usize::from(head);
        // SAFETY: inside the mapping, aligned.
        unsafe {
            self.at(at).write_volatile(1);
            self.at(at + 8).cast::<u64>().write_volatile(counter);
        }
    }

    fn marked(&self) -> usize {
        (0..usize::from(SIZE)).filter(|head| self.bytes()[16 + 16 * head] != 0).count()
    }
}

fn inflight_body(len: u64, queues: u16, size: u16) -> Vec<u8> {
    [&u64s([len, 0])[..], &queues.to_le_bytes(), &size.to_le_bytes(), &[0; 4]].concat()
}

/// A driver whose ring 0 was run by another back end, up to used index 10: it had taken chains out of order.
fn taken_over(device: &NetDevice<Gen>) -> (Driver, Shared) {
    let mut driver = Driver::connect(device, PLAIN);
    driver.share_memory();
    let region = Shared::inflight(&driver.front);
    region.give(&driver.front).unwrap();
    driver.start_ring(SIZE);
    driver.front.get_vring_base(0).unwrap();
    assert_eq!((region.u16(8), region.u16(10), region.u16(14)), (1, SIZE, 0), "version, entries, used index");
    // Fourteen chains, of which ten came back, and 2, 9, 7 are in flight: 5 is to be taken next.
    for head in [0, 1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 7, 13, 5] {
        let (addr, _) = driver.buffer(0, head, 2048);
        driver.rings[0].chain(head, &[(addr, 2048, DESC_WRITE)]);
    }
    driver.rings[0].ring.set_used_idx(10);
    driver.rings[0].used = 10;
    region.set_u16(14, 10);
    for (head, counter) in [(7, 12), (2, 3), (9, 8)] {
        region.mark(head, counter);
    }
    (driver, region)
}

/// Chains that another back end left in flight are given back first, in the order in which it took them, once each; then
/// what the driver's ring holds behind them.
#[test]
fn chains_in_flight_are_taken_again() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let (mut driver, region) = taken_over(&device);
    driver.describe(0, SIZE, 10);
    driver.front.set_vring_enable(0, true).unwrap();
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 14);
    let back: Vec<_> = std::iter::from_fn(|| driver.rings[0].take()).map(|(head, _)| head).collect();
    assert_eq!(back, [2, 9, 7, 5]);
    assert_eq!((region.marked(), region.u16(14)), (0, 14));
    // And on, many times around.
    for n in 0..2000u16 {
        driver.rings[0].post(n % SIZE);
        let (addr, _) = driver.buffer(0, 0, 2048);
        let d = netmem_virtio::virtqueue::Desc { addr, len: 2048, flags: DESC_WRITE, next: 0 };
        driver.rings[0].ring.set_desc(n % SIZE, d);
        poll_until(&mut device, || driver.rings[0].take() == Some((u32::from(n % SIZE), 76)));
    }
    // Chains that have no mark are not linked, so the last chain of a batch is still the last one that was marked.
    assert_eq!((region.marked(), region.u16(14), region.u16(12)), (0, 2014, 7));
    assert_eq!(driver.front.get_vring_base(0).unwrap(), 2014);
    driver.hang_up();
}

/// The back end before ended after it had shown its last batch to the driver, and before it had cleared the marks.
#[test]
fn a_batch_that_was_shown_is_not_taken_again() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let (mut driver, region) = taken_over(&device);
    // The last batch is 9, then 7: two more than the region knows of.
    region.set_u16(16 + 16 * 7 + 6, 9);
    region.set_u16(12, 7);
    driver.rings[0].ring.set_used_idx(12);
    driver.rings[0].used = 12;
    driver.describe(0, SIZE, 12);
    driver.front.set_vring_enable(0, true).unwrap();
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 14);
    let back: Vec<_> = std::iter::from_fn(|| driver.rings[0].take()).map(|(head, _)| head).collect();
    assert_eq!(back, [2, 5]);
    assert_eq!((region.marked(), region.u16(14)), (0, 14));
}

/// While chains are taken again the memory table may be replaced, the ring may be stopped, and the device may go.
#[test]
fn a_device_that_ends_while_it_takes_chains_again() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, Some(2))).unwrap();
    let (mut driver, region) = taken_over(&device);
    driver.describe(0, SIZE, 10);
    driver.share_memory();
    driver.front.set_vring_enable(0, true).unwrap();
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 12);
    assert_eq!((region.marked(), region.u16(14)), (1, 12));
    assert_eq!(driver.front.get_vring_base(0).unwrap(), 12);
    // The device that follows has a frame for the third, and one for the chain behind it.
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    driver.reconnect(&device.control(), PLAIN);
    driver.share_memory();
    region.give(&driver.front).unwrap();
    driver.describe(0, SIZE, 12);
    driver.front.set_vring_enable(0, true).unwrap();
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 14);
    let back: Vec<_> = std::iter::from_fn(|| driver.rings[0].take()).map(|(head, _)| head).collect();
    assert_eq!((back, region.marked()), (vec![2, 9, 7, 5], 0));
}

/// The region has random contents: the device neither crashes nor loops, and serves the next front end.
#[test]
fn a_region_that_lies() {
    let mut noise = fastrand::Rng::with_seed(7);
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    for round in 0..200 {
        let (mut driver, region) = taken_over(&device);
        let bytes: Vec<_> =
            (0..region.len).map(|_| if round % 2 == 0 { noise.u8(..) } else { noise.u8(..2) }).collect();
        region.fill(|n| bytes[n]);
        region.set_u16(8, 1);
        if round % 4 == 0 {
            // A last batch of two, whose list leaves the region at once, or at its second entry.
            region.set_u16(14, 8);
            region.set_u16(12, if round % 8 == 0 { 0xffff } else { 3 });
        }
        driver.describe(0, SIZE, 10);
        driver.front.set_vring_enable(0, true).unwrap();
        for _ in 0..20 {
            device.poll();
            let n = noise.usize(..region.len);
            // SAFETY: inside the mapping.
            unsafe { region.at(n).write_volatile(noise.u8(..)) };
            driver.rings[0].post(noise.u16(..SIZE));
        }
        driver.front.get_vring_base(0).unwrap();
        driver.hang_up();
    }
    // What cannot be a region is refused, by name.
    let check = |name: &str, version: u16, body: Vec<u8>| {
        let (driver, region) = taken_over(&device);
        region.set_u16(8, version);
        let given = driver.front.tell(request::SET_INFLIGHT_FD, &body, &[region.file.as_fd()]);
        let started = given.and_then(|()| {
            driver.front.set_vring_num(0, SIZE)?;
            driver.front.set_vring_kick(0, &driver.rings[0].kick)
        });
        assert_eq!(started.unwrap_err().kind(), ErrorKind::PermissionDenied, "{name}");
        driver.hang_up();
    };
    let len = 2 * PART as u64;
    check("a version from the future", 2, inflight_body(len, 2, SIZE));
    check("more queues than the region has", 1, inflight_body(len, 3, SIZE));
    check("a longer region than the file", 1, inflight_body(len + 1, 2, SIZE));
    check("parts that are smaller than the ring", 1, inflight_body(len, 2, SIZE / 2));
    check("no entries", 1, inflight_body(len, 2, 0));
    for (queues, size) in [(0, SIZE), (3, SIZE), (2, 0), (2, 32769)] {
        let driver = Driver::connect(&device, PLAIN);
        let answer = driver.front.ask(request::GET_INFLIGHT_FD, &inflight_body(0, queues, size), &[]);
        assert!(answer.is_err(), "it has an answer of its own, which cannot say no");
    }
}

const DEVICE_PROCESS: &str = "NETMEM_TEST_DEVICE_PROCESS";

/// The device process of the next test, whose front end is at its standard input. Ends when the front end does.
#[test]
fn device_process() {
    if std::env::var_os(DEVICE_PROCESS).is_none() {
        return;
    }
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let connection = device.control().serve(stream).unwrap();
    while !connection.is_finished() {
        if device.poll() == 0 {
            std::thread::yield_now();
        }
    }
}

/// A process that is killed when it is dropped.
struct Killed(Child);

impl Killed {
    fn serve(stream: UnixStream) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "device::migration::device_process", "--nocapture"]).env(DEVICE_PROCESS, "1");
        command.stdin(Stdio::from(OwnedFd::from(stream))).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A device process is killed at arbitrary points of its work, forty times, and the next one goes on with the in-flight
/// region. Each chain comes back exactly once. The front end never says where a ring stood: it cannot know.
#[test]
fn killed_under_traffic() {
    let mut chance = fastrand::Rng::with_seed(12);
    let mut driver = Driver::unconnected();
    let mut region: Option<Shared> = None;
    let mut outstanding = [[false; SIZE as usize]; 2];
    let mut back = [0u64; 2];
    for kill in 0..=40 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let process = Killed::serve(theirs);
        driver.front = Front::negotiated(ours, PLAIN);
        driver.share_memory();
        let region = region.get_or_insert_with(|| Shared::inflight(&driver.front));
        region.give(&driver.front).unwrap();
        for index in 0..2 {
            if kill == 0 {
                driver.start_ring(SIZE);
            } else {
                driver.describe(index, SIZE, 0xdead);
            }
            driver.front.set_vring_enable(index, true).unwrap();
        }
        let last = kill == 40;
        let mut left = chance.u64(50..5000);
        until(|| {
            for index in 0..2 {
                while let Some((head, _)) = driver.rings[index].take() {
                    assert!(std::mem::take(&mut outstanding[index][head as usize]), "chain {head} came back twice");
                    back[index] += 1;
                    left = left.saturating_sub(1);
                }
                for _ in 0..chance.u16(..64) {
                    let head = chance.u16(..SIZE);
                    if left == 0 || std::mem::replace(&mut outstanding[index][usize::from(head)], true) {
                        continue;
                    }
                    let (addr, _) = driver.buffer(index, head, 2048);
                    let (len, flags) = if index == 0 { (2048, DESC_WRITE) } else { (76, 0) };
                    driver.rings[index].chain(head, &[(addr, len, flags)]);
                }
            }
            left == 0 && (!last || outstanding.as_flattened().iter().all(|out| !out))
        });
        if !last {
            // Not only when the driver has just looked.
            std::thread::sleep(Duration::from_micros(chance.u64(..300)));
        }
        drop(process);
    }
    assert_eq!(back, [0, 1].map(|index: usize| u64::from(driver.rings[index].avail) + (back[index] & !0xffff)));
}

/// The dirty log of packed rings: the pages of the descriptors and of the device's event structure, where the memory table says
/// that they are, and the pages of the payload.
#[test]
fn the_dirty_log_of_packed_rings() {
    let features = PLAIN | feature::RING_PACKED | feature::LOG_ALL;
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::connect(&device, features);
    driver.share_memory();
    // Descriptors of four pages.
    let mut rx = Queue::start(&mut driver, 0, 1024, feature::RING_PACKED);
    let log = Shared::log(LOG);
    log.set(&driver.front).unwrap();
    let at = USER;
    let layout = PackedLayout::new(1024);
    let (used, avail) = (at + layout.device as u64, at + layout.driver as u64);
    let addresses = |log| Addresses { desc: at, used, avail, log };
    let page = |addr: u64| addr / PAGE as u64;
    for logged in [false, true] {
        // Front ends do not agree on this address, and the device does not use it.
        driver.front.set_vring_addr(0, addresses(logged.then_some(GUEST + (8 << 20)))).unwrap();
        for turn in 0..30u16 {
            let first = rx.position().offset();
            let mut want = BTreeSet::new();
            log.fill(|_| 0);
            for id in 0..100 {
                rx.post_as_is(id, &[(rx.buffer(id), 2048, WRITE)]);
                want.insert(page(rx.buffer(id) - GUEST));
            }
            if logged {
                want.extend((0..100).map(|n| page(16 * u64::from((first + n) % 1024))));
            }
            poll_until(&mut device, || rx.entries().len() == 100);
            assert_eq!(rx.take().len(), 100);
            assert_eq!(log.pages().into_iter().map(|p| p as u64).collect::<BTreeSet<_>>(), want, "{turn}");
        }
    }
    driver.hang_up();
}

/// A driver whose packed ring was run by another back end, which had taken five chains, and had given back the third of them.
#[test]
fn packed_chains_in_flight_are_taken_again() {
    const SIZE: u16 = 64;
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let want = device.ports()[0].frame().to_vec();
    let driver = Driver::connect(&device, PLAIN | feature::RING_PACKED);
    driver.share_memory();
    let mut answer = driver.front.ask(request::GET_INFLIGHT_FD, &inflight_body(0, 2, SIZE), &[]).unwrap();
    let len = u64::from_le_bytes(answer.body[..8].try_into().unwrap()) as usize;
    assert_eq!(len, 2 * (32 + 32 * usize::from(SIZE)).next_multiple_of(64));
    let region = Shared::new(answer.fds.pop().unwrap().into(), len);
    let mut rx = Queue::laid_out(&driver.memory, 0, SIZE, feature::RING_PACKED);
    // Ids, places and descriptors of the chains; the last one is not taken yet.
    let chains = [(10, 0, 1), (11, 1, 2), (12, 3, 1), (13, 4, 1), (14, 5, 2), (15, 7, 1)];
    for (id, _, descs) in chains {
        let parts = [(rx.buffer(id), 40, WRITE), (rx.buffer(id) + 40, 2048, WRITE)];
        rx.post_as_is(id, if descs == 1 { &parts[1..] } else { &parts });
    }
    let copy = |at: u16| rx.packed().desc(at);
    for (n, &(_, at, descs)) in chains[..5].iter().enumerate() {
        let entry = |at: u16| 32 + 32 * usize::from(at);
        for at in at..at + descs {
            let d = copy(at);
            for (i, word) in [d.id, d.flags, d.len as u16, (d.len >> 16) as u16].into_iter().enumerate() {
                region.set_u16(entry(at) + 16 + 2 * i, word);
            }
            (0..4).for_each(|i| region.set_u16(entry(at) + 24 + 2 * i, (d.addr >> (16 * i)) as u16));
            region.set_u16(entry(at) + 2, at + 1);
        }
        region.set_u16(entry(at), u16::from(n != 2));
        region.set_u16(entry(at) + 4, at + descs - 1);
        region.set_u16(entry(at) + 6, descs);
        region.set_u16(entry(at) + 8, 100 + n as u16);
    }
    // The third chain's entry is free, and the first used descriptor is its.
    region.set_u16(32 + 32 * 3 + 2, 7);
    (7..SIZE).for_each(|e| region.set_u16(32 + 32 * usize::from(e) + 2, e + 1));
    // Version, entries, free list and used position, twice.
    for (at, value) in [(8, 1), (10, SIZE), (12, 3), (14, 3), (16, 1), (18, 1), (20, 0x0101)] {
        region.set_u16(at, value);
    }
    let turn = PackedDesc::AVAIL | PackedDesc::USED;
    rx.packed().set_used_desc(0, PackedDesc { addr: 0, len: 76, id: 12, flags: turn | WRITE });
    let body = inflight_body(len as u64, 2, SIZE);
    driver.front.tell(request::SET_INFLIGHT_FD, &body, &[region.file.as_fd()]).unwrap();
    rx.describe(&driver, 0x8007_8007);
    poll_until(&mut device, || frames(&driver.stats).0 == 5);
    for (id, at, back) in [(10, 1, 40), (11, 2, 0), (13, 4, 40), (14, 5, 0), (15, 7, 40)] {
        let d = rx.packed().used_desc(at);
        assert_eq!((d.id, d.len, d.flags & turn), (id, 76, turn));
        assert_eq!(driver.memory.read(rx.offset(id) + back + 12, 64), want, "chain {id}");
    }
    let marked = (0..usize::from(SIZE)).filter(|e| region.bytes()[32 + 32 * e] != 0).count();
    assert_eq!((marked, region.u16(16), region.u16(18), region.u16(20)), (0, 8, 8, 0x0101));
    // It goes on, many times around.
    let mut at = Position::START.step(8, SIZE);
    for id in (0..SIZE).cycle().take(1000) {
        let d = PackedDesc { addr: rx.buffer(id), len: 2048, id, flags: WRITE | at.available() };
        rx.packed().set_desc(at.offset(), d);
        poll_until(&mut device, || rx.packed().used_desc(at.offset()).is_used(at));
        assert_eq!(rx.packed().used_desc(at.offset()).id, id);
        at = at.step(1, SIZE);
    }
    assert_eq!(driver.front.get_vring_base(0).unwrap(), u32::from(at.bits()) * 0x1_0001);
    assert_eq!((region.u16(16), region.u16(18)), (at.offset(), at.offset()));
    driver.hang_up();
}
