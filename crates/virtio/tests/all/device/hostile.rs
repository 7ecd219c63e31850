//! Drivers and front ends that break the rules. Each case ends in a named error, and all other
//! rings continue.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use netmem_testing::device::*;
use netmem_virtio::device::port::{Echo, Gen};
use netmem_virtio::device::{DeviceError, NetDevice, Options};
use netmem_virtio::guest_memory::{MAX_REGIONS, MemoryError, MemoryLimits, MemoryTable, RegionInfo};
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc};
use netmem_virtio::{VhostUser, VhostUserError};

fn echo(pairs: usize, serve_control: bool) -> NetDevice<Echo> {
    let options = Options { max_pairs: pairs, serve_control, ..Options::default() };
    NetDevice::new(options, |_| Ok(Echo::new())).unwrap()
}

/// Runs `attack` on one of the rings of a device with two pairs and a control queue. Only that ring
/// is then stopped, `name` is counted once, its error descriptor is signalled, and the other pair
/// still works.
fn attack(ring: usize, name: &str, attack: impl Fn(&mut Driver)) {
    let mut device =
        NetDevice::new(Options { max_pairs: 2, serve_control: true, ..Options::default() }, |_| Gen::new(64, None))
            .unwrap();
    let mut driver = Driver::start(&device, MERGEABLE | feature::CTRL_VQ, 5);
    attack(&mut driver);
    poll_until(&mut device, || driver.stats.queue_error(name) == 1);
    assert_eq!(driver.queue_errors(), [(name, 1)]);
    assert_eq!(driver.rings[ring].err.read().unwrap(), 1);
    let stuck = driver.rings[ring].ring.used_idx();
    // The ring is repaired. The device does not read it any more.
    let (addr, _) = driver.buffer(ring, 0, 2048);
    for n in 0..4 {
        driver.rings[ring].chain(n, &[(addr, 2048, DESC_WRITE)]);
    }
    let other = if ring / 2 == 0 { 2 } else { 0 };
    driver.post_rx(other, 0, 16, 2048);
    let (addr, _) = driver.buffer(other + 1, 0, 2048);
    driver.rings[other + 1].chain(0, &[(addr, 76, 0)]);
    poll_until(&mut device, || driver.rings[other].ring.used_idx() == 16);
    poll_until(&mut device, || driver.rings[other + 1].ring.used_idx() == 1);
    assert_eq!(driver.rings[ring].ring.used_idx(), stuck);
    assert_eq!(driver.queue_errors(), [(name, 1)]);
    // Stopping it returns its position.
    assert_eq!(driver.front.get_vring_base(ring).unwrap() as u16, stuck);
    driver.hang_up();
}

/// The same bad chain towards the driver and from it. `parts` gets the flag of the ring's proper
/// direction.
fn bad_chain(name: &str, parts: impl Fn(u16, u64) -> Vec<(u64, u32, u16)>) {
    for (ring, write) in [(0, DESC_WRITE), (1, 0), (2, DESC_WRITE), (3, 0)] {
        attack(ring, name, |d| {
            let (addr, _) = d.buffer(ring, 0, 2048);
            let parts = parts(write, addr);
            d.rings[ring].chain(0, &parts);
        });
    }
}

/// Proves NET-6 from the other side, as do all tests here.
#[test]
fn addresses_outside_the_table() {
    let end = GUEST + MEMORY as u64;
    for addr in [0, GUEST - 1, end - 1, end, end + 4096, u64::MAX, u64::MAX - 2047, USER] {
        bad_chain("outside_table", |write, _| vec![(addr, 2048, write)]);
        bad_chain("outside_table", |write, good| vec![(good, 12, write), (addr, 2048, write)]);
    }
}

#[test]
fn huge_descriptors() {
    bad_chain("outside_table", |write, good| vec![(good, u32::MAX, write)]);
    bad_chain("outside_table", |write, _| vec![(GUEST, MEMORY as u32 + 1, write)]);
    // Every part lies in the table; together they have 4 GiB.
    bad_chain("huge_chain", |write, _| vec![(GUEST, MEMORY as u32, write); 256]);
}

#[test]
fn zero_length_descriptors() {
    bad_chain("zero_length", |write, good| vec![(good, 0, write)]);
    bad_chain("zero_length", |write, good| vec![(good, 12, write), (good, 0, write)]);
}

#[test]
fn wrong_directions() {
    bad_chain("wrong_direction", |write, good| vec![(good, 2048, write ^ DESC_WRITE)]);
    bad_chain("wrong_direction", |write, good| vec![(good, 12, write), (good, 2048, write ^ DESC_WRITE)]);
}

#[test]
fn indirect_tables_were_not_negotiated() {
    bad_chain("indirect", |write, good| vec![(good, 2048, write | DESC_INDIRECT)]);
    bad_chain("indirect", |write, good| vec![(good, 12, write), (good, 2048, write | DESC_INDIRECT)]);
}

#[test]
fn loops_and_chains_without_end() {
    for (ring, write) in [(0, DESC_WRITE), (1, 0)] {
        for length in [1u16, 2, SIZE] {
            attack(ring, "chain_too_long", |d| {
                let (addr, _) = d.buffer(ring, 0, 2048);
                for id in 0..length {
                    let (flags, next) = (write | DESC_NEXT, (id + 1) % length);
                    d.rings[ring].ring.set_desc(id, Desc { addr, len: 1, flags, next });
                }
                d.rings[ring].post(0);
            });
        }
    }
}

#[test]
fn ids_out_of_range() {
    for (ring, write) in [(0, DESC_WRITE), (1, 0), (4, 0)] {
        for id in [SIZE, SIZE + 1, u16::MAX] {
            attack(ring, "head_out_of_range", |d| d.rings[ring].post(id));
            attack(ring, "next_out_of_range", |d| {
                let (addr, _) = d.buffer(ring, 0, 2048);
                let flags = write | DESC_NEXT;
                d.rings[ring].ring.set_desc(0, Desc { addr, len: 1, flags, next: id });
                d.rings[ring].post(0);
            });
        }
    }
}

#[test]
fn the_available_index_jumps() {
    for ring in [0, 1, 4] {
        for idx in [SIZE + 1, u16::MAX, 0x8000] {
            attack(ring, "avail_jump", |d| d.rings[ring].ring.set_avail_idx(idx));
        }
    }
}

#[test]
fn a_command_without_room_for_an_answer() {
    attack(4, "no_answer_byte", |d| {
        let (addr, _) = d.buffer(4, 0, 2048);
        d.rings[4].chain(0, &[(addr, 4, 0)]);
    });
    attack(4, "wrong_direction", |d| {
        let (addr, _) = d.buffer(4, 0, 2048);
        d.rings[4].chain(0, &[(addr, 1, DESC_WRITE), (addr, 4, 0)]);
    });
}

/// Good frames before the bad chain are completed all the same.
#[test]
fn what_came_before_counts() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.post_rx(0, 0, 10, 2048);
    driver.rings[0].post(SIZE);
    poll_until(&mut device, || driver.stats.queue_error("head_out_of_range") == 1);
    assert_eq!((driver.rings[0].ring.used_idx(), frames(&driver.stats).0), (10, 10));
    assert_eq!(driver.front.get_vring_base(0).unwrap(), 10);
}

/// The same for commands.
#[test]
fn what_was_answered_before_counts() {
    let mut device = echo(2, true);
    let mut driver = Driver::start(&device, PLAIN | feature::MQ | feature::CTRL_VQ, 5);
    let (addr, _) = driver.buffer(4, 0, 2048);
    driver.rings[4].chain(0, &[(addr, 4, 0), (addr, 1, DESC_WRITE)]);
    driver.rings[4].post(SIZE);
    poll_until(&mut device, || driver.stats.queue_error("head_out_of_range") == 1);
    assert_eq!((driver.rings[4].ring.used_idx(), driver.front.get_vring_base(4).unwrap()), (1, 1));
}

/// A buffer may cross from one region into another whose guest addresses follow.
#[test]
fn a_buffer_across_two_regions() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(1000, Some(1))).unwrap();
    let want = device.ports()[0].frame().to_vec();
    let mut driver = Driver::connect(&device, PLAIN);
    let half = MEMORY as u64 / 2;
    let low = region(&driver.memory.file, GUEST, USER, half, 0);
    let high = region(&driver.memory.file, GUEST + half, USER + half, half, half);
    driver.front.set_mem_table(&[low, high]).unwrap();
    driver.start_ring(SIZE);
    driver.front.set_vring_enable(0, true).unwrap();
    driver.rings[0].chain(0, &[(GUEST + half - 100, 2048, DESC_WRITE)]);
    poll_until(&mut device, || driver.rings[0].take().is_some());
    assert_eq!(driver.memory.read(half as usize - 100 + 12, 1000), want);
}

fn info(guest_addr: u64, user_addr: u64, size: u64, mmap_offset: u64) -> RegionInfo {
    RegionInfo { guest_addr, user_addr, size, mmap_offset }
}

#[test]
fn memory_tables_are_checked() {
    let limits = MemoryLimits::default();
    let table = |regions: &[RegionInfo]| {
        let files = regions.iter().map(|_| memfd(1 << 20).into()).collect();
        MemoryTable::new(regions, files, &limits)
    };
    let mib = 1u64 << 20;
    assert!(table(&[info(0, 0, mib, 0), info(mib, mib, mib, 0)]).is_ok());
    assert!(matches!(table(&[]), Err(MemoryError::RegionCount { count: 0, .. })));
    let many: Vec<_> = (0..=MAX_REGIONS as u64).map(|i| info(i * mib, i * mib, mib, 0)).collect();
    assert!(matches!(table(&many), Err(MemoryError::RegionCount { .. })));
    assert!(matches!(
        MemoryTable::new(&many[..2], vec![memfd(1 << 20).into()], &limits),
        Err(MemoryError::RegionFds { .. })
    ));
    for (size, offset) in [(mib + 4096, 0), (mib, 4096), (4096, mib), (1 << 40, 0)] {
        let e = table(&[info(0, 0, size, offset)]);
        assert!(matches!(e, Err(MemoryError::RegionBeyondFile { file: 1_048_576, .. })), "{e:?}");
    }
    for r in [info(0, 0, 0, 0), info(u64::MAX, 0, 2, 0), info(0, u64::MAX, 2, 0), info(0, 0, 2, u64::MAX)] {
        assert!(matches!(table(&[r]), Err(MemoryError::RegionRange { .. })));
    }
    for (a, b) in [(0, 8 * mib), (8 * mib, 0), (8 * mib, mib - 4096), (mib / 2, mib / 2)] {
        let e = table(&[info(0, 0, mib, 0), info(a, b, mib, 0)]);
        assert!(matches!(e, Err(MemoryError::RegionOverlap { a: 0, b: 1 })), "{e:?}");
    }
    // Both ends of what can be reached.
    let t = table(&[info(0x1000, 0x9000, 4096, 12288)]).unwrap();
    assert!(t.translate(0x1000, 4096).is_some() && t.translate(0x1000 + 4095, 1).is_some());
    assert!(
        t.translate(0x1000, 4097).is_none()
            && t.translate(0x1000 + 4096, 1).is_none()
            && t.translate(0xfff, 1).is_none()
    );
    assert_eq!(t.translate_user(0x9000 + 7, 4089), t.translate(0x1000 + 7, 4089));
    assert!(t.translate_user(0x9000 + 7, 4090).is_none() && t.translate_user(0x8fff, 1).is_none());
    // Not a file that can be measured.
    let (pipe, _w) = rustix::pipe::pipe().unwrap();
    let e = MemoryTable::new(&[info(0, 0, 4096, 0)], vec![pipe], &limits);
    assert!(matches!(e, Err(MemoryError::RegionNotMemory { index: 0 })), "{e:?}");
}

#[test]
fn messages_out_of_order_or_out_of_range() {
    type Attack = fn(&mut Driver) -> std::io::Result<()>;
    let cases: &[(&str, &str, Attack)] = &[
        // A kick before anything else is known.
        ("SET_VRING_KICK", "NotReady", |d| d.front.set_vring_kick(0, &EventFd::new())),
        ("SET_VRING_KICK", "NotReady", |d| {
            d.share_memory();
            d.front.set_vring_kick(0, &EventFd::new())
        }),
        ("SET_VRING_NUM", "NoSuchRing", |d| d.front.set_vring_num(2, 256)),
        ("SET_VRING_NUM", "RingSize", |d| d.front.set_vring_num(0, 100)),
        ("SET_VRING_NUM", "RingSize", |d| d.front.set_vring_num(0, 0)),
        ("SET_FEATURES", "NotOffered", |d| d.front.set_features(1 << 40)),
        ("SET_VRING_NUM", "Running", |d| {
            d.share_memory();
            d.start_ring(SIZE);
            d.front.set_vring_num(0, 256)
        }),
        ("SET_FEATURES", "Running", |d| {
            d.share_memory();
            d.start_ring(SIZE);
            d.front.set_features(PLAIN | feature::CSUM)
        }),
        ("SET_VRING_ADDR", "Running", |d| {
            d.share_memory();
            d.start_ring(SIZE);
            d.front.set_vring_addr(0, Driver::addresses(1, SIZE))
        }),
        ("SET_MEM_TABLE", "Memory(RegionBeyondFile", |d| {
            let r = region(&d.memory.file, GUEST, USER, MEMORY as u64 + 4096, 0);
            d.front.set_mem_table(&[r])
        }),
        ("SET_MEM_TABLE", "Memory(RegionOverlap", |d| {
            let r = region(&d.memory.file, GUEST, USER, 4096, 0);
            d.front.set_mem_table(&[r, r])
        }),
        ("SET_VRING_KICK", "RingAddress", |d| {
            // The memory ends in the middle of the ring.
            d.front.set_mem_table(&[region(&d.memory.file, GUEST, USER, 4096, 0)]).unwrap();
            d.front.set_vring_num(0, 256).unwrap();
            let at = Addresses { desc: USER, used: USER + 4096, avail: USER + 4096, log: None };
            d.front.set_vring_addr(0, at).unwrap();
            d.front.set_vring_kick(0, &EventFd::new())
        }),
    ];
    for (message, name, attack) in cases {
        // The front end asks for acknowledgements: it gets a non-zero one, and nothing else has
        // happened.
        let mut device = echo(1, false);
        let mut driver = Driver::connect(&device, PLAIN);
        let refused = attack(&mut driver).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied, "{message} {name}");
        driver.front.sync().unwrap();
        assert_eq!(device.poll(), 0);
        let stats = driver.hang_up();
        assert_eq!((stats.refused.load(Relaxed), stats.connection_errors.load(Relaxed)), (1, 0));
        // It does not, and so would not notice the refusal: the connection ends.
        let device = echo(1, false);
        let mut driver = Driver::connect(&device, PLAIN);
        driver.front.acknowledged = false;
        attack(&mut driver).unwrap();
        let e = driver.connection.take().unwrap().wait().unwrap_err();
        let DeviceError::Refused { request, why } = e else { panic!("{e:?}") };
        assert_eq!((request.name(), driver.stats.connection_errors.load(Relaxed)), (Some(*message), 1));
        assert!(format!("{why:?}").starts_with(name), "{why:?} is not {name}");
    }
}

/// A front end that reads the answer to GET_QUEUE_NUM as pairs may begin with more pairs than there
/// are. The refusal names how many there are, and what raises the number.
#[test]
fn a_ring_that_does_not_exist_is_refused_by_name() {
    let device = echo(2, false);
    let mut driver = Driver::connect(&device, PLAIN);
    driver.front.acknowledged = false;
    driver.front.set_vring_call(4, &EventFd::new()).unwrap();
    let DeviceError::Refused { why, .. } = driver.connection.take().unwrap().wait().unwrap_err() else { panic!() };
    let why = why.to_string();
    for part in ["no ring 4", "at least 3 queue pairs", "the device has 2", "Options::max_pairs", "--queues"] {
        assert!(why.contains(part), "{part}: {why}");
    }
}

#[test]
fn a_second_front_end_is_refused() {
    let device = echo(1, false);
    let driver = Driver::connect(&device, PLAIN);
    let (ours, theirs) = UnixStream::pair().unwrap();
    assert!(matches!(device.control().handle(theirs), Err(DeviceError::Busy)));
    let (second, theirs) = UnixStream::pair().unwrap();
    assert!(matches!(device.control().serve(theirs), Err(DeviceError::Busy)));
    // Both have seen the refusal at once, by the end of their connections.
    for stream in [ours, second] {
        let e = Front::new(stream).get_features().unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe), "{e}");
    }
    let (third, theirs) = UnixStream::pair().unwrap();
    device.control().serve(theirs).unwrap_err();
    // Our driver's error explains that.
    let e = VhostUser::from_stream(third).unwrap_err();
    assert!(matches!(e, VhostUserError::Busy) && e.to_string().contains("another front end connected"), "{e}");
    driver.hang_up();
    let driver = Driver::start(&device, PLAIN, 2);
    driver.hang_up();
}

/// The connection ends in the middle of traffic: the rings stop, nothing is touched any more.
#[test]
fn disconnects_under_traffic() {
    let device = NetDevice::new(one_pair(), |_| Gen::new(1514, None)).unwrap();
    let (stop, control, stats) = (AtomicBool::new(false), device.control(), device.stats());
    std::thread::scope(|s| {
        let stop = &stop;
        let worker = s.spawn(move || {
            let mut device = device;
            while !stop.load(Relaxed) {
                device.poll();
            }
        });
        for round in 0..20 {
            let features = if round % 2 == 0 { PLAIN } else { MERGEABLE };
            let mut driver = Driver::over(&control, Arc::clone(&stats), features);
            driver.share_memory();
            driver.start_ring(SIZE);
            driver.front.set_vring_enable(0, true).unwrap();
            let moved = frames(&stats).0;
            driver.post_rx(0, 0, SIZE, 2048);
            until(|| {
                while let Some((id, _)) = driver.rings[0].take() {
                    driver.rings[0].post(id as u16);
                }
                frames(&stats).0 > moved + 500
            });
            let Driver { memory, rings, front, connection, .. } = driver;
            drop(front);
            if let Some(c) = connection {
                c.wait().unwrap();
            }
            let idx = rings[0].ring.used_idx();
            rings[0].ring.set_avail_idx(idx.wrapping_add(SIZE));
            let before = memory.read(BUFFERS, 1 << 20);
            memory.write(BUFFERS, &vec![0; 1 << 20]);
            std::thread::yield_now();
            assert_eq!((rings[0].ring.used_idx(), memory.read(BUFFERS, 1 << 20)), (idx, vec![0; 1 << 20]));
            assert_ne!(before, vec![0; 1 << 20]);
        }
        stop.store(true, Relaxed);
        worker.join().unwrap();
        assert_eq!(stats.connection_errors.load(Relaxed), 0);
    });
}

/// A table that no longer holds a running ring stops that ring.
#[test]
fn a_table_that_loses_a_ring() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let mut driver = Driver::start(&device, PLAIN, 2);
    driver.post_rx(0, 0, 8, 2048);
    poll_until(&mut device, || driver.rings[0].ring.used_idx() == 8);
    let at = BUFFERS as u64;
    let r = region(&driver.memory.file, GUEST + at, USER + at, MEMORY as u64 - at, at);
    driver.front.set_mem_table(&[r]).unwrap();
    assert_eq!(driver.queue_errors(), [("ring_unmapped", 2)]);
    driver.post_rx(0, 8, 8, 2048);
    for _ in 0..10 {
        assert_eq!(device.poll(), 0);
    }
    assert_eq!(driver.front.get_vring_base(0).unwrap(), 8);
}
