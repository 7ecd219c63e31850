//! How much work a front end can make the device do in one pass: a chain has a bounded number of
//! pieces, and a pass ends when its budget is used up. What is left is done in the next passes,
//! without a further kick.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use netmem_testing::device::rings::{Queue, WRITE};
use netmem_testing::device::*;
use netmem_testing::vhost_user::front::{request, u32s, u64s};
use netmem_virtio::Spin;
use netmem_virtio::device::port::{Echo, Gen, Port};
use netmem_virtio::device::{DropReason, NetDevice, Options};
use netmem_virtio::guest_memory::import::{ImportedMemory, Importer};
use netmem_virtio::guest_memory::{MAX_REGIONS, MemoryError, MemoryLimits, MemoryTable, RegionInfo};
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::{DESC_NEXT, DESC_WRITE, Desc};

/// Where the regions of a page each lie for the guest.
const FAR: u64 = GUEST + (1 << 36);
const FAR_USER: u64 = USER + (1 << 36);
const PAGE: u64 = 4096;
/// Entries of the rings, and how often each chain is available in them.
const RING: u16 = 1024;
const POSTED: u16 = 1000;

/// Shares as many regions of a page as there may be. All of them are one page of the file, and
/// their addresses meet.
fn share_pages(driver: &Driver) -> u32 {
    driver.share_memory();
    let pages = MAX_REGIONS as u64 - 1;
    for n in 0..pages {
        let (at, offset) = (n * PAGE, MEMORY as u64 - PAGE);
        driver.add_memory(&region(&driver.memory.file, FAR + at, FAR_USER + at, PAGE, offset));
    }
    (pages * PAGE) as u32
}

/// Regions are whole pages.
#[test]
fn regions_are_whole_pages() {
    let info = |guest_addr, user_addr, size, mmap_offset| RegionInfo { guest_addr, user_addr, size, mmap_offset };
    let table = |info| MemoryTable::new(&[info], vec![memfd(1 << 20).into()], &MemoryLimits::default());
    table(info(PAGE, PAGE, PAGE, PAGE)).unwrap();
    for n in [1, 512, PAGE - 1] {
        for info in [
            info(PAGE + n, PAGE, PAGE, PAGE),
            info(PAGE, PAGE + n, PAGE, PAGE),
            info(PAGE, PAGE, n, PAGE),
            info(PAGE, PAGE, PAGE, n),
        ] {
            let e = table(info).unwrap_err();
            assert!(matches!(e, MemoryError::RegionUnaligned { index: 0, .. }), "{info:?}: {e:?}");
        }
    }
}

/// Chains that lie across as many regions as there may be: two such buffers are 1016 pieces, and a
/// third one is a fault of the driver. In both formats, in rings in both directions and the control
/// queue, with and without a table.
#[test]
fn a_chain_of_too_many_pieces() {
    for format in [0, feature::RING_PACKED] {
        for (ring, table) in [(0, false), (1, false), (2, false), (0, true), (1, true)] {
            let features = format | if table { feature::INDIRECT_DESC } else { 0 };
            let options = Options { serve_control: true, ..Options::default() };
            let mut device = NetDevice::new(options, |_| Gen::new(64, None)).unwrap();
            let mut driver = Driver::connect(&device, PLAIN | feature::CTRL_VQ | features);
            let all = share_pages(&driver);
            let mut queue = Queue::start(&mut driver, ring, 64, features);
            let flags = if ring == 0 { WRITE } else { 0 };
            let post = |queue: &mut Queue, id, buffers| {
                let mut parts = vec![(FAR, all, flags); buffers];
                if ring == 2 {
                    parts.push((queue.buffer(0), 1, WRITE));
                }
                queue.post(&driver.memory, id, &parts, table);
            };
            post(&mut queue, 0, 2);
            poll_until(&mut device, || queue.take().len() == 1);
            assert_eq!(driver.queue_errors(), [], "1016 pieces are not too many");
            post(&mut queue, 1, 3);
            poll_until(&mut device, || !driver.queue_errors().is_empty());
            assert_eq!(driver.queue_errors(), [("too_many_pieces", 1)]);
            assert!(queue.take().is_empty());
            driver.hang_up();
        }
    }
}

/// Makes the chain at descriptor 0 available [`POSTED`] times.
fn post_again_and_again(driver: &mut Driver, ring: usize) {
    for n in 0..POSTED {
        driver.rings[ring].ring.set_avail_entry(n, 0);
    }
    driver.rings[ring].ring.set_avail_idx(POSTED);
}

/// A chain of 1000 pieces of a byte each. In the control queue, the last one is for the answer.
fn long_chain(driver: &mut Driver, ring: usize) {
    let (addr, _) = driver.buffer(ring, 0, 2048);
    for id in 0..1000 {
        let write = if ring == 0 || ring == 2 && id == 999 { DESC_WRITE } else { 0 };
        let next = if id < 999 { DESC_NEXT } else { 0 };
        let desc = Desc { addr: addr + u64::from(id), len: 1, flags: write | next, next: id + 1 };
        driver.rings[ring].ring.set_desc(id, desc);
    }
    post_again_and_again(driver, ring);
}

/// A device and a driver whose rings have [`RING`] entries: of one pair, and the control queue.
fn rings<P: Port>(options: Options, port: impl FnMut(usize) -> P) -> (NetDevice<P>, Driver) {
    let mut port = port;
    let device = NetDevice::new(Options { serve_control: true, ..options }, |n| Ok(port(n))).unwrap();
    let mut driver = Driver::connect(&device, PLAIN | feature::CTRL_VQ);
    driver.share_memory();
    for ring in 0..3 {
        driver.start_ring(RING);
        driver.enable(ring);
    }
    (device, driver)
}

/// Polls until all chains of `ring` are completed. None of the passes may complete more than
/// `most`.
fn in_passes_of<P: Port>(device: &mut NetDevice<P>, driver: &Driver, ring: usize, most: u16) {
    let mut used = 0;
    while used < POSTED {
        device.poll();
        let now = driver.rings[ring].ring.used_idx();
        assert!(now > used, "a pass without progress");
        assert!(now - used <= most, "{} chains of ring {ring} in one pass", now - used);
        used = now;
    }
    assert_eq!(driver.queue_errors(), []);
}

/// Proves NET-10: a pass ends after 8192 pieces, and the next one continues.
#[test]
fn a_pass_has_a_budget_of_pieces() {
    for ring in 0..3 {
        let (mut device, mut driver) = rings(Options::default(), |_| Gen::new(64, None).unwrap());
        long_chain(&mut driver, ring);
        in_passes_of(&mut device, &driver, ring, 9);
        driver.hang_up();
    }
}

/// A pass ends after 4 MiB: with the group of frames in which that happens, of up to 128 KiB to the
/// driver and of up to 32 frames from it.
#[test]
fn a_pass_has_a_budget_of_bytes() {
    const LEN: usize = 60_000;
    const FRAMES: u16 = ((4 << 20) / LEN + 1) as u16;
    for (ring, most) in [(0, FRAMES + 3), (1, FRAMES + 32)] {
        let (mut device, mut driver) = rings(Options::default(), |_| Gen::new(LEN, None).unwrap());
        let (addr, _) = driver.buffer(ring, 0, 65536);
        let flags = if ring == 0 { DESC_WRITE } else { 0 };
        driver.rings[ring].ring.set_desc(0, Desc { addr, len: LEN as u32 + 12, flags, next: 0 });
        post_again_and_again(&mut driver, ring);
        in_passes_of(&mut device, &driver, ring, most);
        driver.hang_up();
    }
}

/// No notification is lost where a pass ends before its ring is empty: one kick is enough for a
/// worker that sleeps at once.
#[test]
fn one_kick_is_enough_for_many_passes() {
    for ring in 0..3 {
        let (mut device, mut driver) = rings(Options::default(), |_| Gen::new(64, Some(POSTED.into())).unwrap());
        let (control, stats, stop) = (device.control(), device.stats(), AtomicBool::new(false));
        std::thread::scope(|s| {
            s.spawn(|| device.run(&stop, Spin::NONE).unwrap());
            let _ends = Ends { stop: &stop, control: &control };
            until(|| asleep(&stats) == 1);
            long_chain(&mut driver, ring);
            driver.rings[ring].kick.write(1).unwrap();
            until(|| driver.rings[ring].ring.used_idx() == POSTED);
        });
        driver.hang_up();
    }
}

/// Memory whose copies all fail.
#[derive(Debug)]
struct Fails;

impl ImportedMemory for Fails {
    fn write(&self, _: u64, _: &[u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Other.into())
    }

    fn read(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Other.into())
    }
}

impl Importer for Fails {
    fn import(&self, _: BorrowedFd<'_>, _: u64) -> std::io::Result<Box<dyn ImportedMemory>> {
        Ok(Box::new(Self))
    }
}

/// Chains whose copies fail count towards the pass as others do: from the driver, to it, and to a
/// driver whose frames are split behind their headers.
#[test]
fn copies_that_fail_count() {
    let port = || Gen::new(1000, None).unwrap();
    copies_fail(0, false, port);
    copies_fail(0, true, port);
    copies_fail(1, false, Echo::new);
}

fn copies_fail<P: Port>(ring: usize, splits: bool, port: impl Fn() -> P) {
    let options = Options { importer: Some(Arc::new(Fails)), ..Options::default() };
    let (mut device, mut driver) = rings(options, |_| port());
    let file: OwnedFd = UnixStream::pair().unwrap().0.into();
    driver.add_memory(&region(&file, FAR, FAR_USER, 1 << 20, 0));
    if splits {
        // The ring stops, and starts with the flag that asks for it, and the protocol feature.
        driver.front.get_vring_base(0).unwrap();
        let features = driver.front.get_protocol_features().unwrap();
        driver.front.set_protocol_features(features).unwrap();
        let at = Driver::addresses(0, RING);
        let body = [u32s([0, 1 << 31]), u64s([at.desc, at.used, at.avail, 0])].concat();
        driver.front.set(request::SET_VRING_ADDR, &body, &[]).unwrap();
        driver.front.set_vring_kick(0, &driver.rings[0].kick).unwrap();
    }
    let flags = if ring == 0 { DESC_WRITE } else { 0 };
    let (addr, _) = driver.buffer(ring, 0, 2048);
    driver.rings[ring].ring.set_desc(0, Desc { addr, len: 512, flags: flags | DESC_NEXT, next: 1 });
    driver.rings[ring].ring.set_desc(1, Desc { addr: FAR, len: 2000, flags, next: 0 });
    post_again_and_again(&mut driver, ring);
    let mut before = 0;
    for _ in 0..4 {
        device.poll();
        // By the budget of bytes: each counts as the longest frame.
        let failed = driver.stats.dropped(DropReason::CopyFailed) - before;
        assert!((1..=65).contains(&failed), "{failed} copies in one pass (ring {ring}, split {splits})");
        before += failed;
    }
    assert_eq!(driver.rings[ring].ring.used_idx() > 0, ring == 1, "chains to the driver stay");
    assert_eq!(driver.queue_errors(), []);
    driver.hang_up();
}
