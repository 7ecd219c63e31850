//! The features by which a front end moves a guest: the dirty log, the announcement, device status
//! and reset. In-flight state is in `inflight.rs`.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8};

use netmem_testing::device::rings::*;
use netmem_testing::device::*;
use netmem_testing::skip;
use netmem_testing::tap::{Wire, tap_name, taps};
use netmem_testing::vhost_user::front::{request, u64s};
use netmem_virtio::device::port::{Gen, Port, Sink, Tap};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_WRITE, PackedLayout};

use super::inflight::inflight_body;
use super::shared_file::SharedFile;

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

    fn drop_waiting(&mut self) -> u64 {
        self.left += 1;
        std::mem::take(&mut self.sent).len() as u64
    }
}

const PAGE: usize = 4096;
/// Bytes of a log that reaches to the end of the driver's memory.
pub(super) const LOG: usize = (GUEST as usize + MEMORY) / PAGE / 8;

impl SharedFile {
    pub(super) fn log(len: usize) -> Self {
        Self::new(memfd(len), len)
    }

    pub(super) fn set(&self, front: &Front) -> std::io::Result<()> {
        let answer = front.query(request::SET_LOG_BASE, &u64s([self.len as u64, 0]), &[self.file.as_fd()])?;
        assert!(answer.body.is_empty());
        Ok(())
    }

    /// Pages of the driver's memory whose bits are set.
    pub(super) fn pages(&self) -> BTreeSet<usize> {
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

/// Switches the log on or off as QEMU does: the feature, then the addresses of every ring, while
/// they run.
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

/// Posts `count` buffers of `each` bytes, has the device fill them and send as many frames. Answers
/// which pages the device changed: of used rings, and of buffers.
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

/// The log has a bit for every page that the device changed, payload and used rings, and no other;
/// switched on and off while the rings run.
#[test]
fn the_dirty_log_is_what_was_written() {
    for (features, size, each) in
        [(PLAIN, 64, 2048), (PLAIN, 1514, 1600), (MERGEABLE, 9000, 3000), (MERGEABLE, 64, 512)]
    {
        let mut device = NetDevice::new(one_pair(), |_| Gen::new(size, None)).unwrap();
        let mut driver = logged(&device, features);
        let log = SharedFile::log(LOG);
        // A multiple of what a frame fills, so that no frame waits for more.
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

/// Frames of a tap, which the kernel writes into the driver's buffers, while the guest moves: the
/// pages whose bits are set are copied all the time, and once more when the rings have stopped. The
/// copy then has all that the device has written. (The order of writes and bits is shown by
/// `bytes_are_noted_after_they_are_written`, without luck.)
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
        let log = SharedFile::log(LOG);
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
    let log = SharedFile::log(LOG - 512);
    log.set(&driver.front).unwrap();
    traffic(&mut device, &mut driver, 2048, 10);
    assert!(driver.stats.log_misses.load(Relaxed) >= 20);
    assert!(log.bytes().iter().all(|&b| b == 0));
    driver.hang_up();
    let log = SharedFile::log(4096);
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
        // The message has an answer of its own, which cannot be a refusal.
        assert!(driver.front.query(request::SET_LOG_BASE, &body, &[file.as_fd()]).is_err());
        let e = driver.connection.take().unwrap().wait().unwrap_err();
        assert!(format!("{e:?}").contains("SET_LOG_BASE") && format!("{e:?}").contains(name), "{e:?}");
    }
}

/// The limit for memory that a front end may have mapped is a limit for its log, and for its
/// in-flight region.
#[test]
fn a_log_has_a_limit() {
    let limit = 1 << 20;
    let device = NetDevice::new(Options { max_memory: Some(limit), ..one_pair() }, |_| Ok(Sink)).unwrap();
    let file = memfd(2 << 20);
    for (bytes, good) in [(limit, true), (limit + 1, false)] {
        let driver = Driver::connect(&device, PLAIN);
        let log = driver.front.query(request::SET_LOG_BASE, &u64s([bytes, 0]), &[file.as_fd()]);
        assert_eq!(log.is_ok(), good, "a log of {bytes} bytes");
    }
    let driver = Driver::connect(&device, PLAIN);
    for (bytes, good) in [(limit, true), (limit + 1, false)] {
        let region = driver.front.set(request::SET_INFLIGHT_FD, &inflight_body(bytes, 2, SIZE), &[file.as_fd()]);
        assert_eq!(region.is_ok(), good, "a region of {bytes} bytes");
    }
}

/// SEND_RARP puts a broadcast of the guest's address on the network, in front of anything else.
#[test]
fn a_guest_is_announced() {
    let mut device = NetDevice::new(one_pair(), |_| Ok(Record::default())).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    driver.front.set(request::SEND_RARP, &[&mac[..], &[0; 2]].concat(), &[]).unwrap();
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

/// The device reports every front end that leaves to the port, before the next one's frames, also
/// where both accept the same features and no pass lies between them.
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

/// The device status is kept; status 0 and RESET_DEVICE stop the rings and forget all about them,
/// but not the memory.
#[test]
fn status_and_reset() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 2);
    let status = |d: &Driver| d.front.query(request::GET_STATUS, &[], &[]).unwrap().u64();
    let set_status = |d: &Driver, status| d.front.set(request::SET_STATUS, &u64s([status]), &[]);
    assert_eq!(status(&driver), 0);
    for reset in [request::SET_STATUS, request::RESET_DEVICE] {
        set_status(&driver, 15).unwrap();
        assert_eq!(status(&driver), 15);
        driver.post_rx(0, 0, 8, 2048);
        let avail = driver.rings[0].avail;
        poll_until(&mut device, || driver.rings[0].ring.used_idx() == avail);
        let body = if reset == request::SET_STATUS { u64s([0]) } else { Vec::new() };
        driver.front.set(reset, &body, &[]).unwrap();
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

/// A driver that breaks a rule finds so in the status, until it resets the device. Nothing else
/// clears the bit: neither a status that lacks it, nor a ring that is stopped, or started again.
#[test]
fn a_broken_ring_needs_a_reset() {
    const NEEDS_RESET: u64 = 64;
    let mut device = NetDevice::new(Options { max_pairs: 2, ..Options::default() }, |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE, 4);
    let status = |d: &Driver| d.front.query(request::GET_STATUS, &[], &[]).unwrap().u64();
    let set_status = |d: &Driver, status| d.front.set(request::SET_STATUS, &u64s([status]), &[]).unwrap();
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
        driver.front.set(reset, &body, &[]).unwrap();
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
        assert_eq!(driver.front.set(request::NET_SET_MTU, &u64s([mtu]), &[]).is_ok(), good, "{offered:?} {mtu}");
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

/// The dirty log of packed rings: the pages of the descriptors and of the device's event structure,
/// where the memory table has that they are, and the pages of the payload.
#[test]
fn the_dirty_log_of_packed_rings() {
    let features = PLAIN | feature::RING_PACKED | feature::LOG_ALL;
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::connect(&device, features);
    driver.share_memory();
    // Descriptors of four pages.
    let mut rx = Queue::start(&mut driver, 0, 1024, feature::RING_PACKED);
    let log = SharedFile::log(LOG);
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
