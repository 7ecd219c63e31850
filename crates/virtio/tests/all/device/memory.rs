//! The memory of a front end: its limits, memory that is lost, and regions that are added and
//! removed under traffic.

use netmem_pool::sigbus;
use netmem_testing::device::*;
use netmem_testing::vhost_user::front::{self, request, u64s};
use netmem_virtio::Spin;
use netmem_virtio::device::port::{Gen, Port};
use netmem_virtio::device::{Control, NetDevice, Options, Stats};
use netmem_virtio::guest_memory::{MAX_BYTES, MAX_REGIONS, MemoryError, MemoryLimits, MemoryTable, RegionInfo};
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::DESC_WRITE;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const MIB: u64 = 1 << 20;
/// Where the regions that come and go lie for the guest.
const EXTRA: u64 = GUEST + (1 << 36);

/// Polls `device` on another thread while `work` runs on this one.
fn polled<P: Port>(device: &mut NetDevice<P>, work: impl FnOnce()) {
    let (control, stop) = (device.control(), AtomicBool::new(false));
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Relaxed) {
                device.poll();
            }
        });
        let _ends = Ends { stop: &stop, control: &control };
        work();
    });
}

/// Runs a device on `threads` threads, which sleep when there is nothing to do, while `work` runs
/// on this one.
fn on_threads<P: Port>(device: NetDevice<P>, threads: usize, work: impl FnOnce()) {
    let (control, stop) = (device.control(), AtomicBool::new(false));
    let mut workers = device.workers(threads).unwrap();
    std::thread::scope(|s| {
        let stop = &stop;
        for worker in &mut workers {
            s.spawn(move || worker.run(stop, Spin::NONE).unwrap());
        }
        let _ends = Ends { stop, control: &control };
        work();
    });
}

fn generators(pairs: usize) -> NetDevice<Gen> {
    NetDevice::new(Options { max_pairs: pairs, ..Options::default() }, |_| Gen::new(64, None)).unwrap()
}

/// Posts the buffers again that the device has filled, until `n` more frames have come.
fn take(driver: &mut Driver, ring: usize, n: usize) {
    let mut had = 0;
    until(|| {
        while let Some((id, _)) = driver.rings[ring].take() {
            driver.rings[ring].post(id as u16);
            had += 1;
        }
        had >= n
    });
}

fn running(device: &NetDevice<Gen>, rings: usize) -> Driver {
    running_over(&device.control(), device.stats(), rings)
}

/// The same of a device that is on other threads.
fn running_over(control: &Control, stats: Arc<Stats>, rings: usize) -> Driver {
    let mut driver = Driver::over(control, stats, MERGEABLE | if rings > 2 { feature::MQ } else { 0 });
    driver.share_memory();
    for ring in 0..rings {
        driver.start_ring(SIZE);
        driver.enable(ring);
    }
    driver
}

/// Mappings of files of this name in this process.
fn mapped(name: &str) -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|l| l.contains(name)).count()
}

fn named(name: &str, bytes: u64) -> OwnedFd {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// Proves NET-10: a front end shortens its memory under traffic. The rings stop with that fault,
/// and the front end's next table is served.
#[test]
fn memory_is_truncated_under_traffic() {
    sigbus::install().unwrap();
    let mut device = generators(1);
    let mut driver = running(&device, 2);
    driver.post_rx(0, 0, 64, 2048);
    polled(&mut device, || {
        take(&mut driver, 0, 1000);
        // The rings stay: this test reads them.
        ftruncate(&driver.memory.file, BUFFERS as u64).unwrap();
        // A device without buffers touches none.
        until(|| {
            while let Some((id, _)) = driver.rings[0].take() {
                driver.rings[0].post(id as u16);
            }
            driver.stats.queue_error("memory_lost") == 2
        });
        assert_eq!(driver.queue_errors(), [("memory_lost", 2)]);
        assert_eq!(driver.rings[0].err.read().unwrap(), 1);
        assert!(driver.stats.memory_lost.load(Relaxed) > 0);
        ftruncate(&driver.memory.file, MEMORY as u64).unwrap();
        driver.share_memory();
        let base = driver.front_base(0);
        driver.describe(0, SIZE, base);
        take(&mut driver, 0, 1000);
        assert_eq!(driver.queue_errors(), [("memory_lost", 2)]);
        driver.hang_up();
    });
}

/// The same with the rings, which the device reads all the time. Then the next front end is served.
#[test]
fn all_memory_is_truncated() {
    sigbus::install().unwrap();
    let mut device = generators(1);
    let (control, stats) = (device.control(), device.stats());
    for round in 1..4 {
        let mut driver = running_over(&control, Arc::clone(&stats), 2);
        driver.post_rx(0, 0, 64, 2048);
        polled(&mut device, || {
            take(&mut driver, 0, 100);
            ftruncate(&driver.memory.file, 0).unwrap();
            until(|| stats.queue_error("memory_lost") == 2 * round);
        });
        assert_eq!(driver.queue_errors(), [("memory_lost", 2 * round)]);
        driver.hang_up();
    }
}

/// The same with a thread for each pair. One thread meets the lost memory. The other one sleeps,
/// and has no reason to touch it: it is woken, and stops its rings too. The next table is served by
/// both.
#[test]
fn the_thread_that_sleeps_stops_its_rings() {
    sigbus::install().unwrap();
    let device = generators(2);
    let (control, stats) = (device.control(), device.stats());
    on_threads(device, 2, || {
        let mut driver = running_over(&control, Arc::clone(&stats), 4);
        until(|| asleep(&stats) == 2);
        ftruncate(&driver.memory.file, BUFFERS as u64).unwrap();
        driver.post_rx(0, 0, 64, 2048);
        driver.rings[0].kick.write(1).unwrap();
        until(|| stats.queue_error("memory_lost") == 4);
        assert_eq!(driver.queue_errors(), [("memory_lost", 4)]);
        ftruncate(&driver.memory.file, MEMORY as u64).unwrap();
        driver.share_memory();
        for ring in [0, 2] {
            let base = driver.front_base(ring);
            (driver.rings[ring].avail, driver.rings[ring].used) = (base, base);
            driver.rings[ring].ring.set_avail_idx(base);
            driver.post_rx(ring, 0, 64, 2048);
            driver.describe(ring, SIZE, base);
            until(|| driver.rings[ring].ring.used_idx() == base.wrapping_add(64));
        }
        assert_eq!(driver.queue_errors(), [("memory_lost", 4)]);
        driver.hang_up();
    });
}

fn sealed(bytes: u64) -> OwnedFd {
    let fd = named("netmem-sealed", bytes);
    fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

fn info(guest_addr: u64, user_addr: u64, size: u64) -> RegionInfo {
    RegionInfo { guest_addr, user_addr, size, mmap_offset: 0 }
}

#[test]
fn seals_are_counted_and_can_be_required() {
    let pair = [info(0, 0, MIB), info(MIB, MIB, MIB)];
    let table = |files, require_sealed| {
        MemoryTable::new(&pair, files, &MemoryLimits { require_sealed, ..MemoryLimits::default() })
    };
    assert_eq!(table(vec![sealed(MIB), named("a", MIB)], false).unwrap().unsealed(), 1);
    assert_eq!(table(vec![sealed(MIB), sealed(MIB)], true).unwrap().unsealed(), 0);
    let e = table(vec![sealed(MIB), named("a", MIB)], true);
    assert!(matches!(e, Err(MemoryError::RegionUnsealed { index: 1 })), "{e:?}");
    // A kind of file that cannot be sealed.
    let file = tempfile::tempfile().unwrap();
    file.set_len(MIB).unwrap();
    let e = table(vec![sealed(MIB), file.into()], true);
    assert!(matches!(e, Err(MemoryError::RegionUnsealed { index: 1 })), "{e:?}");
    // The device's own option, by a message.
    let options = Options { require_sealed: true, ..Options::default() };
    let device = NetDevice::new(options, |_| Gen::new(64, None)).unwrap();
    let driver = Driver::connect(&device, PLAIN);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| driver.share_memory()));
    assert!(result.is_err());
}

/// Memory must be in a file that the kernel serves by itself. That comes before every other
/// question to the file: the files here are also too short. An option accepts the file of a disk.
#[test]
fn other_files_are_no_memory() {
    let one = [info(0, 0, MIB)];
    let table = |file: OwnedFd, any_memory_file| {
        MemoryTable::new(&one, vec![file], &MemoryLimits { any_memory_file, ..MemoryLimits::default() })
    };
    // A file of a disk if the sources are on one; the file of a device and of a pipe on every
    // machine.
    let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let on_disk = rustix::fs::fcntl_get_seals(&disk).is_err();
    let files: [(OwnedFd, bool); 3] =
        [(disk.try_clone().unwrap().into(), on_disk), (null.into(), true), (pipe.into(), true)];
    for (file, other) in files {
        let again = file.try_clone().unwrap();
        let e = table(file, false).unwrap_err();
        assert_eq!(matches!(e, MemoryError::RegionNotMemory { index: 0 }), other, "{e:?}");
        let e = table(again, true).unwrap_err();
        assert!(matches!(e, MemoryError::RegionBeyondFile { file: 0, .. }), "{e:?}");
    }
    disk.set_len(MIB).unwrap();
    assert_eq!(table(disk.try_clone().unwrap().into(), true).unwrap().unsealed(), 1);
    // By messages: the file is refused, the connection continues, and the device's option accepts
    // it.
    for (any_memory_file, accepted) in [(false, !on_disk), (true, true)] {
        let options = Options { any_memory_file, ..Options::default() };
        let device = NetDevice::new(options, |_| Gen::new(64, None)).unwrap();
        let driver = Driver::connect(&device, PLAIN);
        driver.share_memory();
        assert_eq!(driver.front.add_memory(&region(&disk, EXTRA, EXTRA, MIB, 0)).is_ok(), accepted);
        driver.hang_up();
    }
}

#[test]
fn a_front_end_maps_no_more_than_its_limit() {
    let limits = MemoryLimits { max_bytes: Some(3 * MIB), ..MemoryLimits::default() };
    let table = MemoryTable::new(&[info(0, 0, 2 * MIB)], vec![sealed(2 * MIB)], &limits).unwrap();
    assert_eq!(table.mapped(), 2 * MIB);
    let e = table.add(info(4 * MIB, 4 * MIB, 2 * MIB), sealed(2 * MIB), &limits);
    assert!(matches!(e, Err(MemoryError::Limit { bytes, max }) if (bytes, max) == (4 * MIB, 3 * MIB)), "{e:?}");
    assert_eq!(table.add(info(4 * MIB, 4 * MIB, MIB), sealed(MIB), &limits).unwrap().mapped(), 3 * MIB);
}

/// A front end cannot map a sparse file over all addresses that this process has: neither as
/// memory, nor as its log.
#[test]
fn a_front_end_leaves_addresses_free() {
    let vast = named("netmem-vast", MAX_BYTES + 4096);
    let device = generators(1);
    let mut driver = running(&device, 2);
    let add = |size| driver.front.add_memory(&region(&vast, 1 << 60, 1 << 60, size, 0));
    let left = MAX_BYTES - MEMORY as u64;
    assert!(add(left + 4096).is_err(), "more than the limit was mapped");
    add(left).unwrap();
    driver.remove_memory(&region(&vast, 1 << 60, 1 << 60, left, 0));
    driver.front.query(request::SET_LOG_BASE, &u64s([MAX_BYTES, 0]), &[vast.as_fd()]).unwrap();
    assert!(driver.front.query(request::SET_LOG_BASE, &u64s([MAX_BYTES + 1, 0]), &[vast.as_fd()]).is_err());
    let e = driver.connection.take().unwrap().wait().unwrap_err();
    assert!(format!("{e:?}").contains("Memory(Limit {"), "{e:?}");
    let over = MemoryLimits { max_bytes: Some(u64::MAX), ..MemoryLimits::default() };
    let e = MemoryTable::new(&[info(0, 0, MAX_BYTES + 4096)], vec![named("netmem-vast", MAX_BYTES + 4096)], &over);
    assert!(matches!(e, Err(MemoryError::Limit { max: MAX_BYTES, .. })), "{e:?}");
}

/// The statistics show the memory that a driver makes the device allocate: buffers in a sparse
/// file, which the device writes first.
#[test]
fn allocations_are_counted() {
    let mut device = generators(1);
    let control = device.control();
    let mut driver = running(&device, 2);
    let fd = named("netmem-sparse", 64 * MIB);
    driver.add_memory(&region(&fd, EXTRA, EXTRA, 64 * MIB, 0));
    // A second region of a file, which counts once.
    driver.add_memory(&region(&driver.memory.file, EXTRA << 1, EXTRA << 1, MIB, 0));
    let before = control.memory_use();
    assert_eq!((before.regions, before.unsealed, before.mapped), (3, 3, 65 * MIB + MEMORY as u64));
    for n in 0..200u16 {
        driver.rings[0].chain(n, &[(EXTRA + u64::from(n) * 65536, 2048, DESC_WRITE)]);
    }
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 200);
    let after = control.memory_use();
    // Some of the pages of the ring are new, too.
    let new = (after.allocated - before.allocated) / 4096;
    assert!((200..216).contains(&new), "{new} pages");
    assert_eq!(after.allocated_before, before.allocated_before);
    let stats = [&driver.stats.memory_regions, &driver.stats.memory_bytes, &driver.stats.memory_unsealed];
    assert_eq!(stats.map(|n| n.load(Relaxed)), [3, after.mapped, 3]);
    let stats = driver.hang_up();
    assert_eq!(stats.memory_regions.load(Relaxed), 0);
}

/// A region is added while both pairs receive; one then receives into it.
#[test]
fn memory_is_added_under_traffic() {
    let mut device = generators(2);
    let mut driver = running(&device, 4);
    driver.post_rx(0, 0, 64, 2048);
    driver.post_rx(2, 0, 64, 2048);
    let slots = driver.front.query(front::request::GET_MAX_MEM_SLOTS, &[], &[]).unwrap();
    assert_eq!(slots.u64(), MAX_REGIONS as u64);
    polled(&mut device, || {
        take(&mut driver, 0, 500);
        let fd = named("netmem-added", MIB);
        driver.add_memory(&region(&fd, EXTRA, EXTRA, MIB, 0));
        driver.rings[0].chain(64, &[(EXTRA + 4096, 2048, DESC_WRITE)]);
        take(&mut driver, 0, 500);
        take(&mut driver, 2, 500);
        let mut header = [0; 14];
        rustix::io::pread(&fd, &mut header, 4096 + 12).unwrap();
        assert_ne!(header, [0; 14], "a frame is in the added region");
        assert_eq!(driver.queue_errors(), []);
    });
}

/// A region is removed while one ring has buffers in it: that ring stops with a named fault, and
/// the region is unmapped. The other continues.
#[test]
fn memory_is_removed_under_traffic() {
    let mut device = generators(2);
    let mut driver = running(&device, 4);
    let fd = named("netmem-removed", MIB);
    let extra = region(&fd, EXTRA, EXTRA, MIB, 0);
    driver.add_memory(&extra);
    for n in 0..64 {
        driver.rings[0].chain(n, &[(EXTRA + 4096 * u64::from(n), 2048, DESC_WRITE)]);
    }
    driver.post_rx(2, 0, 64, 2048);
    polled(&mut device, || {
        take(&mut driver, 0, 500);
        assert_eq!(mapped("netmem-removed"), 1);
        driver.remove_memory(&extra);
        assert_eq!(mapped("netmem-removed"), 0, "unmapped when the answer comes");
        let mut posted = 0;
        until(|| {
            while let Some((id, _)) = driver.rings[0].take() {
                driver.rings[0].post(id as u16);
                posted += 1;
            }
            driver.stats.queue_error("outside_table") == 1
        });
        take(&mut driver, 2, 500);
        assert_eq!(driver.queue_errors(), [("outside_table", 1)]);
    });
}

/// A ring waits while its memory is removed, and continues at its position: a front end resizes a
/// region so.
#[test]
fn a_ring_waits_for_its_memory() {
    let mut device = generators(1);
    let mut driver = Driver::connect(&device, MERGEABLE);
    let file = driver.memory.file.try_clone().unwrap();
    let low = region(&file, GUEST, USER, BUFFERS as u64, 0);
    let at = BUFFERS as u64;
    let high = region(&file, GUEST + at, USER + at, MEMORY as u64 - at, at);
    driver.set_memory(&[low, high]);
    driver.start_ring(SIZE);
    driver.enable(0);
    driver.post_rx(0, 0, 64, 2048);
    polled(&mut device, || {
        for _ in 0..20 {
            take(&mut driver, 0, 100);
            driver.remove_memory(&low);
            let idx = driver.rings[0].ring.used_idx();
            driver.add_memory(&low);
            assert!(idx.wrapping_sub(driver.rings[0].used) <= 64);
        }
        take(&mut driver, 0, 100);
        driver.remove_memory(&low);
        let idx = driver.rings[0].ring.used_idx();
        assert_eq!(driver.front_base(0), idx, "a ring that waits says where it stands");
        driver.add_memory(&low);
        assert_eq!(driver.rings[0].ring.used_idx(), idx, "stopped meanwhile: it does not go on");
        assert_eq!(driver.queue_errors(), []);
    });
}

#[test]
fn tables_are_changed_by_regions() {
    let limits = MemoryLimits::default();
    let base = MemoryTable::default().add(info(MIB, 8 * MIB, MIB), sealed(MIB), &limits).unwrap();
    let add = |table: &MemoryTable, r| table.add(r, sealed(MIB), &limits);
    // The same twice; each address that meets another; what wraps; what is not there.
    for r in [info(MIB, 8 * MIB, MIB), info(4 * MIB, 9 * MIB - 4096, MIB), info(2 * MIB - 4096, 16 * MIB, MIB)] {
        let e = add(&base, r);
        assert!(matches!(e, Err(MemoryError::RegionOverlap { a: 0, b: 1 })), "{e:?}");
    }
    assert!(matches!(add(&base, info(u64::MAX, 0, 2)), Err(MemoryError::RegionRange { .. })));
    assert!(matches!(add(&base, info(4 * MIB, 4 * MIB, 2 * MIB)), Err(MemoryError::RegionBeyondFile { .. })));
    for r in [info(MIB, 8 * MIB, MIB - 1), info(MIB, 8 * MIB + 1, MIB), info(MIB + 1, 8 * MIB, MIB), info(0, 0, 0)] {
        assert!(matches!(base.remove(&r), Err(MemoryError::NoSuchRegion { .. })), "{r:?}");
    }
    // A table never changes: the old one has what it had. A hole is in no table.
    let three = add(&add(&base, info(4 * MIB, 4 * MIB, MIB)).unwrap(), info(2 * MIB, 32 * MIB, MIB)).unwrap();
    let two = three.remove(&info(4 * MIB, 4 * MIB, MIB)).unwrap();
    assert_eq!([base.len(), three.len(), two.len()], [1, 3, 2]);
    assert_eq!(two.translate(MIB + 5, 10), base.translate(MIB + 5, 10), "it was not mapped anew");
    assert!(three.translate(4 * MIB, 1).is_some() && two.translate(4 * MIB, 1).is_none());
    assert!(three.translate(3 * MIB, 1).is_none() && three.translate(3 * MIB - 1, 2).is_none());
    assert!(base.remove(&info(MIB, 8 * MIB, MIB)).unwrap().is_empty());
    // As many as there may be, each found by both of its addresses.
    let mut full = MemoryTable::default();
    for n in (0..MAX_REGIONS as u64).rev() {
        full = full.add(info(2 * n * 4096, (1 << 40) + 2 * n * 4096, 4096), sealed(4096), &limits).unwrap();
    }
    assert!(matches!(add(&full, info(1 << 50, 1 << 50, 4096)), Err(MemoryError::RegionCount { count: 510, max: 509 })));
    for n in 0..MAX_REGIONS as u64 {
        let at = full.translate(2 * n * 4096 + 7, 4096 - 7);
        assert!(at.is_some() && at == full.translate_user((1 << 40) + 2 * n * 4096 + 7, 4096 - 7), "{n}");
        assert!(full.translate((2 * n + 1) * 4096, 1).is_none(), "{n}");
    }
}

/// No translation outlives its pass: regions come and go as fast as messages do, while the device
/// writes into all of them, with one thread and with one for each pair. A write into a region that
/// was removed would be a fault, because nothing is mapped there.
#[test]
fn regions_come_and_go_under_traffic() {
    for pairs in [1, 2] {
        let options = Options { max_pairs: pairs, ..Options::default() };
        let device = NetDevice::new(options, |_| Gen::new(1514, None)).unwrap();
        let rings: Vec<usize> = (0..pairs).map(|pair| 2 * pair).collect();
        let (control, stats) = (device.control(), device.stats());
        let fds: Vec<_> = (0..4).map(|_| named("netmem-churn", MIB)).collect();
        let at = |n: usize| EXTRA + (n as u64) * MIB;
        let regions: Vec<_> = (0..4).map(|n| region(&fds[n], at(n), at(n), MIB, 0)).collect();
        on_threads(device, pairs, || {
            let mut driver = running_over(&control, stats, 2 * pairs);
            for round in 0..300 / pairs {
                let n = round % 4;
                driver.add_memory(&regions[n]);
                // Half of the buffers are in the new region, some across it and its neighbour,
                // which is not there.
                for &ring in &rings {
                    for id in 0..64u16 {
                        let inside = at(n) + u64::from(id) * 4096;
                        let place = if id % 2 == 0 { inside } else { driver.buffer(ring, id, 2048).0 };
                        driver.rings[ring].chain(id, &[(place, 2048, DESC_WRITE)]);
                    }
                    driver.rings[ring].kick.write(1).unwrap();
                }
                until(|| rings.iter().all(|&ring| driver.rings[ring].ring.used_idx() == driver.rings[ring].avail));
                // Posted, and removed before the device has used all of it.
                for &ring in &rings {
                    for id in 0..64u16 {
                        driver.rings[ring].chain(id, &[(at(n) + u64::from(id) * 4096, 2048, DESC_WRITE)]);
                    }
                    driver.rings[ring].kick.write(1).unwrap();
                }
                driver.remove_memory(&regions[n]);
                // The ring was through in time, or stopped. Either way it begins anew.
                for &ring in &rings {
                    let base = driver.front_base(ring);
                    driver.rings[ring].avail = base;
                    driver.rings[ring].ring.set_avail_idx(base);
                    driver.describe(ring, SIZE, base);
                }
            }
            assert!(
                driver.queue_errors().iter().all(|(name, _)| *name == "outside_table"),
                "{:?}",
                driver.queue_errors()
            );
            driver.hang_up();
        });
    }
}
