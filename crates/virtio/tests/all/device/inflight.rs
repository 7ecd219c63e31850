//! In-flight state: chains that a back end which ended has left are resubmitted once each, also
//! when a device process is killed under traffic.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use netmem_testing::device::rings::*;
use netmem_testing::device::*;
use netmem_testing::vhost_user::front::{request, u64s};
use netmem_virtio::device::NetDevice;
use netmem_virtio::device::port::Gen;
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::{DESC_WRITE, PackedDesc, Position};

use super::shared_file::SharedFile;

/// Bytes of a queue's part of an in-flight region.
const PART: usize = (16 + 16 * SIZE as usize).next_multiple_of(64);

impl SharedFile {
    /// A region of the device's for two rings.
    pub(super) fn inflight(front: &Front) -> Self {
        let mut answer = front.query(request::GET_INFLIGHT_FD, &inflight_body(0, 2, SIZE), &[]).unwrap();
        let len = u64::from_le_bytes(answer.body[..8].try_into().unwrap());
        assert_eq!((len as usize, &answer.body[16..20]), (2 * PART, &[2, 0, 0, 1][..]));
        Self::new(answer.fds.pop().unwrap().into(), len as usize)
    }

    pub(super) fn give(&self, front: &Front) -> std::io::Result<()> {
        front.set(request::SET_INFLIGHT_FD, &inflight_body(self.len as u64, 2, SIZE), &[self.file.as_fd()])
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

    pub(super) fn marked(&self) -> usize {
        (0..usize::from(SIZE)).filter(|head| self.bytes()[16 + 16 * head] != 0).count()
    }
}

pub(super) fn inflight_body(len: u64, queues: u16, size: u16) -> Vec<u8> {
    [&u64s([len, 0])[..], &queues.to_le_bytes(), &size.to_le_bytes(), &[0; 4]].concat()
}

/// A driver whose ring 0 was run by another back end, up to used index 10: it had completed chains
/// out of order.
fn taken_over(device: &NetDevice<Gen>) -> (Driver, SharedFile) {
    let mut driver = Driver::connect(device, PLAIN);
    driver.share_memory();
    let region = SharedFile::inflight(&driver.front);
    region.give(&driver.front).unwrap();
    driver.start_ring(SIZE);
    driver.front.get_vring_base(0).unwrap();
    assert_eq!((region.u16(8), region.u16(10), region.u16(14)), (1, SIZE, 0), "version, entries, used index");
    // Fourteen chains, of which ten came back, and 2, 9, 7 are in flight: 5 is to be popped next.
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

/// Chains that another back end left in flight are completed first, in the order in which it popped
/// them, once each; then what the driver's ring holds behind them.
#[test]
fn chains_in_flight_are_resubmitted() {
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
    // Chains that have no mark are not linked, so the last chain of a batch is still the last one
    // that was marked.
    assert_eq!((region.marked(), region.u16(14), region.u16(12)), (0, 2014, 7));
    assert_eq!(driver.front.get_vring_base(0).unwrap(), 2014);
    driver.hang_up();
}

/// The back end before ended after it had shown its last batch to the driver, and before it had
/// cleared the marks.
#[test]
fn a_batch_that_was_published_is_not_resubmitted() {
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let (mut driver, region) = taken_over(&device);
    // The last batch is 9, then 7: two more than the region records.
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

/// While chains are resubmitted the memory table may be replaced, the ring may be stopped, and the
/// device may go.
#[test]
fn a_device_that_ends_while_it_resubmits_chains() {
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

/// The region has random contents: the device neither crashes nor loops, and serves the next front
/// end.
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
        let given = driver.front.set(request::SET_INFLIGHT_FD, &body, &[region.file.as_fd()]);
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
        let answer = driver.front.query(request::GET_INFLIGHT_FD, &inflight_body(0, queues, size), &[]);
        assert!(answer.is_err(), "it has an answer of its own, which cannot say no");
    }
}

const DEVICE_PROCESS: &str = "NETMEM_TEST_DEVICE_PROCESS";

/// The device process of the next test, whose front end is at its standard input. Ends when the
/// front end does.
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
        command.args(["--exact", "device::inflight::device_process", "--nocapture"]).env(DEVICE_PROCESS, "1");
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

/// A device process is killed at arbitrary points of its work, forty times, and the next one
/// continues with the in-flight region. Each chain comes back exactly once. The front end never
/// sets a ring's position: it does not have it.
#[test]
fn killed_under_traffic() {
    let mut chance = fastrand::Rng::with_seed(12);
    let mut driver = Driver::unconnected();
    let mut region: Option<SharedFile> = None;
    let mut outstanding = [[false; SIZE as usize]; 2];
    let mut back = [0u64; 2];
    for kill in 0..=40 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let process = Killed::serve(theirs);
        driver.front = Front::negotiated(ours, PLAIN);
        driver.share_memory();
        let region = region.get_or_insert_with(|| SharedFile::inflight(&driver.front));
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
            // Not only when the driver has just polled.
            std::thread::sleep(Duration::from_micros(chance.u64(..300)));
        }
        drop(process);
    }
    assert_eq!(back, [0, 1].map(|index: usize| u64::from(driver.rings[index].avail) + (back[index] & !0xffff)));
}

/// A driver whose packed ring was run by another back end, which had popped five chains, and had
/// completed the third of them.
#[test]
fn packed_chains_in_flight_are_resubmitted() {
    const SIZE: u16 = 64;
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(64, None)).unwrap();
    let want = device.ports()[0].frame().to_vec();
    let driver = Driver::connect(&device, PLAIN | feature::RING_PACKED);
    driver.share_memory();
    let mut answer = driver.front.query(request::GET_INFLIGHT_FD, &inflight_body(0, 2, SIZE), &[]).unwrap();
    let len = u64::from_le_bytes(answer.body[..8].try_into().unwrap()) as usize;
    assert_eq!(len, 2 * (32 + 32 * usize::from(SIZE)).next_multiple_of(64));
    let region = SharedFile::new(answer.fds.pop().unwrap().into(), len);
    let mut rx = Queue::laid_out(&driver.memory, 0, SIZE, feature::RING_PACKED);
    // Ids, places and descriptors of the chains; the last one is not popped yet.
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
    driver.front.set(request::SET_INFLIGHT_FD, &body, &[region.file.as_fd()]).unwrap();
    rx.describe(&driver, 0x8007_8007);
    poll_until(&mut device, || frames(&driver.stats).0 == 5);
    for (id, at, back) in [(10, 1, 40), (11, 2, 0), (13, 4, 40), (14, 5, 0), (15, 7, 40)] {
        let d = rx.packed().used_desc(at);
        assert_eq!((d.id, d.len, d.flags & turn), (id, 76, turn));
        assert_eq!(driver.memory.read(rx.offset(id) + back + 12, 64), want, "chain {id}");
    }
    let marked = (0..usize::from(SIZE)).filter(|e| region.bytes()[32 + 32 * e] != 0).count();
    assert_eq!((marked, region.u16(16), region.u16(18), region.u16(20)), (0, 8, 8, 0x0101));
    // It continues, many times around.
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
