//! The same between threads: the devices of two guests on threads of their own, with the control
//! sides at work, sleeps, and queues that stop.

use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use netmem_pool::sigbus;
use netmem_testing::device::rings::*;
use netmem_testing::device::*;
use netmem_virtio::Spin;
use netmem_virtio::device::port::Cross;
use netmem_virtio::device::{Control, NetDevice, Options, Stats, Worker};
use netmem_virtio::net::{VnetHdr, feature};

use rustix::fs::ftruncate;

use super::formats::Random;

const ENTRIES: u16 = 64;

/// The rings of a pair, and how far its traffic has come.
struct Side {
    rx: Queue,
    tx: Queue,
    sent: u32,
    came: u32,
    /// A probe has come.
    linked: bool,
}

impl Side {
    fn start(driver: &mut Driver, pair: usize) -> Self {
        let [rx, tx] = [0, 1].map(|ring| Queue::start(driver, 2 * pair + ring, ENTRIES, PLAIN));
        Self { rx, tx, sent: 0, came: 0, linked: false }
    }

    /// Sends up to `count` frames.
    fn send(&mut self, memory: &Memory, count: usize) {
        self.tx.take();
        for _ in 0..count {
            let Some(id) = self.tx.vacant(1) else { break };
            let len = 60 + self.sent as usize * 37 % 1400;
            memory.write(self.tx.offset(id), &wire(self.sent, len));
            self.tx.post(memory, id, &[(self.tx.buffer(id), len as u32 + 12, 0)], false);
            self.sent += 1;
        }
        self.tx.kick();
    }

    fn post(&mut self, memory: &Memory, count: usize) {
        for _ in 0..count {
            let Some(id) = self.rx.vacant(1) else { break };
            self.rx.post(memory, id, &[(self.rx.buffer(id), 2048, WRITE)], false);
        }
        self.rx.kick();
    }

    /// Checks the frames that came.
    fn receive(&mut self, memory: &Memory) {
        for (id, len) in self.rx.take() {
            let got = memory.read(self.rx.offset(id), len as usize);
            if got[12..16] == PROBE.to_le_bytes() {
                self.linked = true;
                continue;
            }
            let mut want = wire(self.came, 60 + self.came as usize * 37 % 1400);
            want[10] = 1;
            assert!(got == want, "frame {}: {:?}", self.came, &got[..20]);
            self.came += 1;
        }
    }
}

/// The number of a frame that may be refused.
const PROBE: u32 = u32::MAX;

/// Waits until each side's frames are accepted: a port refuses them until the other pair was served
/// once.
fn link(memories: [&Memory; 2], sides: &mut [Side; 2]) {
    for (from, to) in [(0, 1), (1, 0)] {
        until(|| {
            let (sender, memory) = (&mut sides[from], memories[from]);
            sender.tx.take();
            if let Some(id) = sender.tx.vacant(ENTRIES.into()) {
                memory.write(sender.tx.offset(id), &wire(PROBE, 60));
                sender.tx.post(memory, id, &[(sender.tx.buffer(id), 72, 0)], false);
                sender.tx.kick();
            }
            sides[to].post(memories[to], 1);
            sides[to].receive(memories[to]);
            sides[to].linked
        });
    }
}

/// Sends in each direction until a frame was copied directly. A receiver whose worker sleeps with
/// buffers posted, and for which no frame waits, has its pair free. While workers are busy, it
/// depends on the scheduler whether a sender finds it so.
fn copy_directly(memories: [&Memory; 2], sides: &mut [Side; 2], stats: &[&Stats]) {
    let sum = |count: fn(&Stats) -> u64| stats.iter().map(|stats| count(stats)).sum::<u64>();
    let direct = || sum(|stats| stats.tx_direct.load(Relaxed));
    for (from, to) in [(0, 1), (1, 0)] {
        let before = direct();
        until(|| {
            sides[to].receive(memories[to]);
            sides[to].post(memories[to], ENTRIES.into());
            if sum(asleep) == 2 {
                sides[from].send(memories[from], 1);
            }
            direct() > before
        });
    }
}

/// Frames that were dropped, except those that were refused: only probes are.
fn lost(driver: &Driver) -> u64 {
    driver.drops().iter().filter(|drop| drop.0 != "port_refused").map(|drop| drop.1).sum()
}

fn wire(n: u32, len: usize) -> Vec<u8> {
    let mut wire = VnetHdr::PLAIN.to_bytes().to_vec();
    wire.extend(n.to_le_bytes());
    wire.extend((4..len).map(|i| (i as u32 * 7).wrapping_add(n.wrapping_mul(31)) as u8));
    wire
}

/// Runs `test` while each worker runs on a thread.
fn beside(workers: Vec<Worker<Cross>>, controls: &[Control], spin: Spin, test: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        let _ends: Vec<_> = controls.iter().map(|control| Ends { stop: &stop, control }).collect();
        let stop = &stop;
        for mut worker in workers {
            s.spawn(move || worker.run(stop, spin).unwrap());
        }
        test();
    });
}

/// Two devices of one pair each, connected to each other.
fn connected() -> [NetDevice<Cross>; 2] {
    let mut ends = Cross::cable().into_iter();
    [(); 2].map(|()| NetDevice::new(Options::default(), |_| Ok(ends.next().unwrap())).unwrap())
}

/// Starts both rings of the sender, and the receive ring of the receiver, without buffers.
fn one_way(from: &mut Driver, to: &mut Driver) -> Side {
    from.share_memory();
    to.share_memory();
    let side = Side::start(from, 0);
    to.start_ring(SIZE);
    to.enable(0);
    side
}

/// Traffic in both directions: bursts, pauses, and receivers without buffers for a time. All frames
/// arrive in order.
fn exchange(memories: [&Memory; 2], sides: &mut [Side; 2], frames: u32) {
    let mut random = Random(99);
    until(|| {
        for end in 0..2 {
            let (memory, side) = (memories[end], &mut sides[end]);
            if side.sent < frames {
                let most = (frames - side.sent).min(50) as usize;
                side.send(memory, random.below(most + 1));
            } else {
                side.tx.take();
            }
            side.receive(memory);
            if random.below(4) > 0 {
                let count = random.below(80);
                side.post(memory, count);
            }
        }
        sides.iter().all(|side| side.came == frames)
    });
}

const FRAMES: u32 = if cfg!(debug_assertions) { 3000 } else { 100_000 };

/// Two devices, a thread each, that send to each other. Messages change the memory of both and stop
/// transmit rings meanwhile. Nothing hangs, no frame is lost, and none overtakes another.
#[test]
fn two_devices_that_send_to_each_other() {
    for spin in [Spin::NONE, Spin::default(), Spin::Forever] {
        let mut ends = Cross::cable().into_iter();
        let devices = [(); 2].map(|()| NetDevice::new(Options::default(), |_| Ok(ends.next().unwrap())).unwrap());
        let (controls, stats) = (devices.each_ref().map(NetDevice::control), devices.each_ref().map(NetDevice::stats));
        let workers = devices.into_iter().flat_map(|device| device.workers(1).unwrap()).collect();
        beside(workers, &controls, spin, || {
            let mut drivers = [0, 1].map(|n: usize| Driver::over(&controls[n], stats[n].clone(), PLAIN));
            let mut sides = drivers.each_mut().map(|driver| {
                driver.share_memory();
                Side::start(driver, 0)
            });
            let memories = drivers.each_ref().map(|driver| &driver.memory);
            link(memories, &mut sides);
            // Workers that poll without pause never sleep.
            if spin != Spin::Forever {
                copy_directly(memories, &mut sides, &stats.each_ref().map(|stats| &**stats));
            }
            let (done, fronts) = (AtomicBool::new(false), drivers.each_mut().map(take_front));
            thread::scope(|s| {
                let done = &done;
                let messages = s.spawn(move || {
                    let more = [memfd(1 << 20), memfd(1 << 20)];
                    while !done.load(Relaxed) {
                        for (front, file) in fronts.iter().zip(&more) {
                            front.add_memory(&region(file, AT, AT, 1 << 20, 0)).unwrap();
                            front.remove_memory(&region(file, AT, AT, 1 << 20, 0)).unwrap();
                        }
                    }
                    fronts
                });
                exchange(drivers.each_ref().map(|driver| &driver.memory), &mut sides, FRAMES);
                done.store(true, Relaxed);
                drop(messages.join().unwrap());
            });
            for driver in &drivers {
                assert_eq!((driver.queue_errors(), lost(driver)), (vec![], 0));
            }
        });
    }
}

/// Where the second region is, for guest and front end.
const AT: u64 = 0x9000_0000_0000;

fn take_front(driver: &mut Driver) -> Front {
    std::mem::replace(&mut driver.front, Front::new(std::os::unix::net::UnixStream::pair().unwrap().0))
}

/// Two pairs of one device, on a thread each.
#[test]
fn two_pairs_on_two_threads() {
    for spin in [Spin::NONE, Spin::default()] {
        let mut ends = Cross::cable().into_iter();
        let options = Options { max_pairs: 2, ..Options::default() };
        let device = NetDevice::new(options, |_| Ok(ends.next().unwrap())).unwrap();
        let (control, stats) = (device.control(), device.stats());
        let workers = device.workers(2).unwrap();
        beside(workers, std::slice::from_ref(&control), spin, || {
            let mut driver = Driver::over(&control, stats.clone(), PLAIN | feature::MQ);
            driver.share_memory();
            let mut sides = [0, 1].map(|pair| Side::start(&mut driver, pair));
            let memories = [&driver.memory; 2];
            link(memories, &mut sides);
            copy_directly(memories, &mut sides, &[&stats]);
            exchange(memories, &mut sides, FRAMES);
            assert_eq!((driver.queue_errors(), lost(&driver)), (vec![], 0));
        });
    }
}

/// A sender and its receiver, of which only the sender's device is polled, on a thread. What the
/// sender sees as completed has arrived.
#[test]
fn a_chain_is_completed_after_its_frame_has_arrived() {
    let mut ends = Cross::cable().into_iter();
    let mut devices = [(); 2].map(|()| NetDevice::new(Options::default(), |_| Ok(ends.next().unwrap())).unwrap());
    let mut drivers = devices.each_ref().map(|device| Driver::connect(device, PLAIN));
    let [mut a, mut b] = drivers.each_mut().map(|driver| {
        driver.share_memory();
        Side::start(driver, 0)
    });
    (0..2).for_each(|_| devices.iter_mut().for_each(|device| _ = device.poll()));
    let [mut sender, _receiver] = devices;
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        let _ends = netmem_testing::flows::Ends(&stop);
        s.spawn(|| {
            while !stop.load(Relaxed) {
                sender.poll();
            }
        });
        until(|| {
            b.post(&drivers[1].memory, ENTRIES.into());
            a.send(&drivers[0].memory, ENTRIES.into());
            let target = a.tx.split().avail_idx();
            until(|| {
                let completed = a.tx.split().used_idx();
                let arrived = b.rx.split().used_idx();
                let ahead = arrived.wrapping_sub(completed) as i16;
                assert!(ahead >= 0, "{completed} are completed, {arrived} have arrived");
                completed == target
            });
            b.receive(&drivers[1].memory);
            b.came >= FRAMES
        });
    });
    assert_eq!(drivers[0].stats.tx_direct.load(Relaxed), u64::from(a.sent));
}

/// A receive ring is stopped while the other guest sends without pause. From the answer on, its
/// buffers and its used ring are not written, until the ring is started again.
#[test]
fn a_receiver_that_has_stopped_is_not_written() {
    let devices = connected();
    let controls = devices.each_ref().map(NetDevice::control);
    let stats = devices.each_ref().map(NetDevice::stats);
    let workers = devices.into_iter().flat_map(|device| device.workers(1).unwrap()).collect();
    beside(workers, &controls, Spin::Forever, || {
        let [mut from, mut to] = [0, 1].map(|n: usize| Driver::over(&controls[n], stats[n].clone(), PLAIN));
        let mut a = one_way(&mut from, &mut to);
        let frames = || stats[1].rx_frames.load(Relaxed);
        // Until some were copied directly: it depends on the scheduler whether a sender finds a pair
        // free.
        let direct = || stats[0].tx_direct.load(Relaxed) > 0;
        for _ in (0..3000).take_while(|&n| n < 30 || !direct()) {
            // Frames of the cable may fill all buffers at once.
            let before = frames();
            to.post_rx(0, 0, SIZE, 2048);
            until(|| {
                a.send(&from.memory, 20);
                frames() > before + 5
            });
            let base = to.front.get_vring_base(0).unwrap();
            let (_, buffers) = to.buffer(0, 0, 2048);
            let bytes = 2048 * usize::from(SIZE);
            to.memory.write(buffers, &vec![0xee; bytes]);
            for _ in 0..20 {
                a.send(&from.memory, 20);
                thread::sleep(Duration::from_micros(100));
            }
            assert_eq!(to.rings[0].ring.used_idx(), base as u16);
            assert!(to.memory.read(buffers, bytes).iter().all(|&byte| byte == 0xee));
            // The chains that are left are dropped, as by a driver that resets its ring.
            to.rings[0].avail = base as u16;
            to.rings[0].ring.set_avail_idx(base as u16);
            to.describe(0, SIZE, base as u16);
        }
        assert!(direct());
        assert_eq!((from.queue_errors(), to.queue_errors()), (vec![], vec![]));
    });
}

/// The memory in which a receiver's buffers are is removed while the other guest sends without
/// pause, as one region and by another table. From the answer on, it is not mapped and not written;
/// the ring stops, and the sender goes on.
#[test]
fn removed_memory_is_not_written() {
    let devices = connected();
    let controls = devices.each_ref().map(NetDevice::control);
    let stats = devices.each_ref().map(NetDevice::stats);
    let workers = devices.into_iter().flat_map(|device| device.workers(1).unwrap()).collect();
    beside(workers, &controls, Spin::NONE, || {
        let [mut from, mut to] = [0, 1].map(|n: usize| Driver::over(&controls[n], stats[n].clone(), PLAIN));
        let mut a = one_way(&mut from, &mut to);
        let frames = || stats[1].rx_frames.load(Relaxed);
        let stopped = || stats[1].queue_errors().map(|error| error.1).sum::<u64>();
        let direct = || stats[0].tx_direct.load(Relaxed) > 0;
        for n in (0..2000).take_while(|&n| n < 20 || !direct()) {
            let bytes = 2048 * usize::from(SIZE);
            let file = memfd(bytes);
            let extra = region(&file, AT, AT, bytes as u64, 0);
            to.add_memory(&extra);
            let before = frames();
            for id in 0..SIZE {
                to.rings[0].chain(id, &[(AT + 2048 * u64::from(id), 2048, WRITE)]);
            }
            to.rings[0].kick.write(1).unwrap();
            until(|| {
                a.send(&from.memory, 20);
                frames() > before + 5
            });
            match n % 2 {
                0 => to.remove_memory(&extra),
                _ => to.share_memory(),
            }
            let used = to.rings[0].ring.used_idx();
            // Frames of the cable may have filled all buffers.
            if used == to.rings[0].avail {
                to.rings[0].post(0);
                to.rings[0].kick.write(1).unwrap();
            }
            file.write_all_at(&vec![0xee; bytes], 0).unwrap();
            until(|| {
                a.send(&from.memory, 20);
                stopped() == n + 1
            });
            let mut now = vec![0; bytes];
            file.read_exact_at(&mut now, 0).unwrap();
            assert!(now.iter().all(|&byte| byte == 0xee));
            assert_eq!(to.rings[0].ring.used_idx(), used);
            let base = to.front.get_vring_base(0).unwrap() as u16;
            (to.rings[0].avail, to.rings[0].used) = (base, base);
            to.rings[0].ring.set_avail_idx(base);
            to.describe(0, SIZE, base);
        }
        assert!(direct());
        assert_eq!(from.queue_errors(), []);
    });
}

/// A frame that must be changed in software waits in the cable, and wakes the receiver's worker,
/// which sleeps while it has buffers.
#[test]
fn a_frame_in_the_cable_wakes_its_worker() {
    let devices = connected();
    let (controls, stats) = (devices.each_ref().map(NetDevice::control), devices.each_ref().map(NetDevice::stats));
    let workers = devices.into_iter().flat_map(|device| device.workers(1).unwrap()).collect();
    beside(workers, &controls, Spin::NONE, || {
        let features = [PLAIN | feature::CSUM, PLAIN];
        let mut drivers = [0, 1].map(|n: usize| Driver::over(&controls[n], stats[n].clone(), features[n]));
        let mut sides = drivers.each_mut().map(|driver| {
            driver.share_memory();
            Side::start(driver, 0)
        });
        link(drivers.each_ref().map(|driver| &driver.memory), &mut sides);
        let [mut a, mut b] = sides;
        let header = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..VnetHdr::PLAIN };
        let frame = [&header.to_bytes()[..], &[7; 100]].concat();
        for n in 1..=50 {
            b.post(&drivers[1].memory, 1);
            until(|| stats.each_ref().map(|stats| asleep(stats)) == [1, 1]);
            a.tx.take();
            let id = a.tx.vacant(1).unwrap();
            drivers[0].memory.write(a.tx.offset(id), &frame);
            a.tx.post(&drivers[0].memory, id, &[(a.tx.buffer(id), frame.len() as u32, 0)], false);
            a.tx.kick();
            until(|| {
                b.rx.take();
                stats[1].checksummed.load(Relaxed) == n
            });
        }
    });
}

/// The memory of a receiver is gone, and its worker sleeps. The sender's worker meets the loss, and
/// wakes the receiver's, which stops its rings.
#[test]
fn a_receiver_that_sleeps_loses_its_memory() {
    sigbus::install().unwrap();
    let devices = connected();
    let (controls, stats) = (devices.each_ref().map(NetDevice::control), devices.each_ref().map(NetDevice::stats));
    let workers = devices.into_iter().flat_map(|device| device.workers(1).unwrap()).collect();
    beside(workers, &controls, Spin::NONE, || {
        let mut drivers = [0, 1].map(|n: usize| Driver::over(&controls[n], stats[n].clone(), PLAIN));
        let mut sides = drivers.each_mut().map(|driver| {
            driver.share_memory();
            Side::start(driver, 0)
        });
        link(drivers.each_ref().map(|driver| &driver.memory), &mut sides);
        // Both control sides have done what they were asked to: a ring that is not enabled yet
        // drops what its driver sends.
        link(drivers.each_ref().map(|driver| &driver.memory), &mut sides);
        let [mut a, mut b] = sides;
        b.post(&drivers[1].memory, ENTRIES.into());
        // No kick is on its way any more.
        until(|| {
            let before = stats[1].sleeps.load(Relaxed);
            thread::sleep(Duration::from_millis(20));
            asleep(&stats[1]) == 1 && stats[1].sleeps.load(Relaxed) == before
        });
        ftruncate(&drivers[1].memory.file, BUFFERS as u64).unwrap();
        a.send(&drivers[0].memory, 1);
        until(|| stats[1].queue_error("memory_lost") == 2);
        assert_eq!(drivers[0].queue_errors(), []);
    });
}

/// A receiver without buffers: the cable is full, the sender's frames wait in their ring, and both
/// devices sleep. When there are buffers, the rest goes on by itself, and arrives in order.
#[test]
fn a_full_cable_lets_both_sleep() {
    const MANY: u32 = 3000;
    let devices = connected();
    let (controls, stats) = (devices.each_ref().map(NetDevice::control), devices.each_ref().map(NetDevice::stats));
    let workers = devices.into_iter().flat_map(|device| device.workers(1).unwrap()).collect();
    beside(workers, &controls, Spin::NONE, || {
        let mut drivers = [0, 1].map(|n: usize| Driver::over(&controls[n], stats[n].clone(), PLAIN));
        let mut sides = drivers.each_mut().map(|driver| {
            driver.share_memory();
            Side::start(driver, 0)
        });
        link(drivers.each_ref().map(|driver| &driver.memory), &mut sides);
        let [mut a, mut b] = sides;
        let asleep = || asleep(&stats[0]) + asleep(&stats[1]) == 2;
        // Nothing moves any more.
        let mut still = 0;
        until(|| {
            let (frames, sent) = (stats[0].tx_frames.load(Relaxed), a.sent);
            if sent < MANY {
                a.send(&drivers[0].memory, 20);
            }
            thread::sleep(Duration::from_micros(200));
            let moved = stats[0].tx_frames.load(Relaxed) != frames || a.sent != sent;
            still = if moved || !asleep() { 0 } else { still + 1 };
            still == 50
        });
        assert!(a.sent < MANY && a.tx.vacant(1).is_none(), "{} frames were sent", a.sent);
        let waiting = a.sent;
        until(|| {
            b.receive(&drivers[1].memory);
            b.post(&drivers[1].memory, ENTRIES.into());
            b.came == waiting
        });
        assert_eq!((lost(&drivers[0]), lost(&drivers[1])), (0, 0));
    });
}
