//! A device on several threads: each serves its own pairs, sleeps by itself, and is stopped neither
//! by another one nor by messages about the rings of other pairs.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use netmem_packet::{Armed, Wait};
use netmem_testing::device::*;
use netmem_testing::flows::{FIRST_PORT, Flows, number};
use netmem_virtio::Spin;
use netmem_virtio::device::port::{Echo, Port, Steering};
use netmem_virtio::device::{Control, DeviceError, NetDevice, Options, Stats, Worker};
use netmem_virtio::net::VnetHdr;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

/// A watchdog: if the test hangs, it fails.
const WATCHDOG: Duration = Duration::from_secs(60);

/// An echo that records which threads use it, and that stops inside of a pass if it has a gate.
#[derive(Debug)]
struct Watched {
    echo: Echo,
    users: Arc<Mutex<BTreeSet<String>>>,
    gate: Option<Gate>,
}

/// The port reports that it is in a pass, and waits there until the test releases it.
#[derive(Debug)]
struct Gate {
    entered: Sender<()>,
    go_on: Receiver<()>,
}

impl Port for Watched {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = Echo::FEATURES;

    fn peek(&mut self) -> Option<&[u8]> {
        self.users.lock().unwrap().insert(format!("{:?}", thread::current().id()));
        self.echo.peek()
    }

    fn consume(&mut self) {
        self.echo.consume();
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        if let Some(gate) = self.gate.take() {
            gate.entered.send(()).unwrap();
            gate.go_on.recv_timeout(WATCHDOG).unwrap();
        }
        self.echo.send(wire)
    }

    fn room(&self) -> bool {
        self.echo.room()
    }
}

type Users = Vec<Arc<Mutex<BTreeSet<String>>>>;

/// A device with `pairs` echoes. The port of pair 0 has `gate`.
fn device(pairs: usize, mut gate: Option<Gate>) -> (NetDevice<Watched>, Users) {
    let users: Users = (0..pairs).map(|_| Arc::default()).collect();
    let port = |n: usize| {
        let gate = if n == 0 { gate.take() } else { None };
        Ok(Watched { echo: Echo::new(), users: Arc::clone(&users[n]), gate })
    };
    let device = NetDevice::new(Options { max_pairs: pairs, ..Options::default() }, port).unwrap();
    (device, users)
}

/// Runs `test` while the workers run, each on a thread, and returns these threads.
fn beside<P: Port>(workers: &mut [Worker<P>], control: &Control, spin: Spin, test: impl FnOnce()) -> Vec<ThreadId> {
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        let _ends = Ends { stop: &stop, control };
        let stop = &stop;
        let threads: Vec<_> = workers.iter_mut().map(|w| s.spawn(move || w.run(stop, spin).unwrap())).collect();
        test();
        threads.iter().map(|t| t.thread().id()).collect()
    })
}

/// Frame `n` of pair `pair`. No other frame has the same bytes, and lengths vary.
fn frame(pair: usize, n: usize) -> Vec<u8> {
    let mut wire = VnetHdr::default().to_bytes().to_vec();
    let len = 64 + (n * 97 + pair * 13) % 1400;
    // An echo exchanges the addresses, the first 12 bytes.
    wire.extend([pair as u8; 6].into_iter().chain([n as u8; 6]));
    wire.extend((12..len).map(|i| (i * 7 + n * 31 + pair * 101) as u8));
    wire
}

/// Sends frame `n` of a pair and kicks if the device asks for it.
fn send(driver: &mut Driver, pair: usize, n: usize) {
    let ring = 2 * pair + 1;
    let (wire, slot) = (frame(pair, n), (n % usize::from(SIZE)) as u16);
    let (addr, at) = driver.buffer(ring, slot, 2048);
    driver.memory.write(at, &wire);
    driver.rings[ring].chain(slot, &[(addr, wire.len() as u32, 0)]);
    kick(driver, ring);
}

fn kick(driver: &Driver, ring: usize) {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    if driver.rings[ring].ring.used_flags() == 0 {
        driver.rings[ring].kick.write(1).unwrap();
    }
}

/// Removes frame `n` of a pair if it has come back, and posts its buffer again.
fn take(driver: &mut Driver, pair: usize, n: usize) -> bool {
    let ring = 2 * pair;
    let Some((id, len)) = driver.rings[ring].take() else { return false };
    let (_, at) = driver.buffer(ring, id as u16, 2048);
    let mut want = frame(pair, n);
    want[10] = 1;
    let (to, from) = want[12..24].split_at_mut(6);
    to.swap_with_slice(from);
    assert_eq!(driver.memory.read(at, len as usize), want, "frame {n} of pair {pair}");
    driver.rings[ring].post(id as u16);
    kick(driver, ring);
    true
}

/// A driver with `pairs` pairs, whose receive buffers are posted.
fn driver(control: &Control, stats: Arc<netmem_virtio::device::Stats>, pairs: usize) -> Driver {
    let mut driver = Driver::over(control, stats, PLAIN);
    driver.share_memory();
    for index in 0..2 * pairs {
        driver.start_ring(SIZE);
        driver.enable(index);
    }
    for pair in 0..pairs {
        driver.post_rx(2 * pair, 0, SIZE, 2048);
        kick(&driver, 2 * pair);
    }
    driver
}

/// Four pairs on two threads, which sleep at once or never: every frame comes back on its pair,
/// byte for byte and in order, and each port is used by one thread.
#[test]
fn four_pairs_on_two_threads() {
    for spin in [Spin::NONE, Spin::default(), Spin::Forever] {
        let (device, users) = device(4, None);
        let (control, stats) = (device.control(), device.stats());
        let mut workers = device.workers(2).unwrap();
        let threads = beside(&mut workers, &control, spin, || {
            let mut driver = driver(&control, Arc::clone(&stats), 4);
            let (mut sent, mut came) = ([0; 4], [0; 4]);
            until(|| {
                for pair in 0..4 {
                    // Bursts that differ from pair to pair, at most what the ring holds.
                    if sent[pair] == came[pair] && sent[pair] < 2000 {
                        for _ in 0..(1 + (sent[pair] * 7 + pair) % 100) {
                            send(&mut driver, pair, sent[pair]);
                            sent[pair] += 1;
                        }
                    }
                    while take(&mut driver, pair, came[pair]) {
                        came[pair] += 1;
                    }
                    while driver.rings[2 * pair + 1].take().is_some() {}
                }
                came == sent && came.iter().all(|&n| n >= 2000)
            });
            assert_eq!((driver.queue_errors(), driver.drops()), (vec![], vec![]));
        });
        assert_ne!(threads[0], threads[1]);
        for (pair, users) in users.iter().enumerate() {
            let only = BTreeSet::from([format!("{:?}", threads[pair % 2])]);
            assert_eq!(*users.lock().unwrap(), only, "the port of pair {pair}");
        }
        if spin == Spin::NONE {
            assert!(stats.woken_by_kick.load(Relaxed) > 0 && stats.woken_by_control.load(Relaxed) > 0);
        }
    }
}

/// One thread is in a pass over pair 0 and stays there. Messages about pair 1 are answered, whether
/// the same thread serves it or not, and frames of pair 1 come back if another thread serves it.
#[test]
fn a_busy_pair_stops_no_other() {
    for threads in [1, 2] {
        let ((entered, in_pass), (let_go, go_on)) = (channel(), channel());
        let (device, _) = device(2, Some(Gate { entered, go_on }));
        let (control, stats) = (device.control(), device.stats());
        let mut workers = device.workers(threads).unwrap();
        beside(&mut workers, &control, Spin::NONE, || {
            let mut driver = driver(&control, stats, 2);
            send(&mut driver, 0, 0);
            in_pass.recv_timeout(WATCHDOG).unwrap();
            if threads == 2 {
                for n in 0..300 {
                    send(&mut driver, 1, n);
                    until(|| take(&mut driver, 1, n));
                    until(|| driver.rings[3].take().is_some());
                }
            }
            let (answered, answers) = channel();
            let (front, call) = (take_front(&mut driver), driver.rings[3].call.as_fd().try_clone_to_owned().unwrap());
            let messages = thread::spawn(move || {
                front.set_vring_enable(2, false).unwrap();
                front.set_vring_call(3, &call).unwrap();
                answered.send([2, 3].map(|ring| front.get_vring_base(ring).unwrap())).unwrap();
                front
            });
            let bases = answers.recv_timeout(WATCHDOG).expect("answers while the port of pair 0 is in its pass");
            if threads == 2 {
                assert_eq!(bases[1], 300);
            }
            assert_eq!(driver.rings[1].ring.used_idx(), 0, "the answers came in the middle of the pass");
            let_go.send(()).unwrap();
            driver.front = messages.join().unwrap();
            until(|| take(&mut driver, 0, 0));
        });
    }
}

/// The connection, for another thread.
fn take_front(driver: &mut Driver) -> Front {
    std::mem::replace(&mut driver.front, Front::new(UnixStream::pair().unwrap().0))
}

/// Where the second region is, for guest and front end.
const AT: u64 = 0x9000_0000_0000;

/// The removal of a region is answered when no pass may use it any more.
#[test]
fn the_removal_of_memory_waits_for_the_pass_that_may_use_it() {
    let ((entered, in_pass), (let_go, go_on)) = (channel(), channel());
    let (device, _) = device(1, Some(Gate { entered, go_on }));
    let (control, stats) = (device.control(), device.stats());
    let mut workers = device.workers(1).unwrap();
    beside(&mut workers, &control, Spin::NONE, || {
        let mut driver = driver(&control, stats, 1);
        let more = memfd(1 << 20);
        driver.add_memory(&region(&more, AT, AT, 1 << 20, 0));
        send(&mut driver, 0, 0);
        in_pass.recv_timeout(WATCHDOG).unwrap();
        let released = Arc::new(AtomicBool::new(false));
        let (front, seen) = (take_front(&mut driver), Arc::clone(&released));
        let removed = thread::spawn(move || {
            front.remove_memory(&region(&more, AT, AT, 1 << 20, 0)).unwrap();
            assert!(seen.load(Relaxed), "answered in the middle of the pass");
            front
        });
        // Time for an answer that must not come.
        thread::sleep(Duration::from_millis(100));
        released.store(true, Relaxed);
        let_go.send(()).unwrap();
        driver.front = removed.join().unwrap();
        until(|| take(&mut driver, 0, 0));
    });
}

/// A driver that shares no kick descriptor for a ring sends no notifications for it. The thread
/// that serves the ring polls it, and the other one sleeps.
#[test]
fn a_ring_without_a_kick_is_polled() {
    let (device, _) = device(2, None);
    let (control, stats) = (device.control(), device.stats());
    let mut workers = device.workers(2).unwrap();
    beside(&mut workers, &control, Spin::NONE, || {
        let mut driver = driver(&control, Arc::clone(&stats), 2);
        driver.front.set_vring_kick_none(1).unwrap();
        for n in 0..100 {
            until(|| asleep(&stats) == 1);
            let (addr, at) = driver.buffer(1, n, 2048);
            let wire = frame(0, n.into());
            driver.memory.write(at, &wire);
            driver.rings[1].chain(n, &[(addr, wire.len() as u32, 0)]);
            until(|| take(&mut driver, 0, n.into()));
        }
        // With a descriptor again, both sleep.
        driver.front.set_vring_kick(1, &driver.rings[1].kick).unwrap();
        until(|| asleep(&stats) == 2);
    });
}

/// A worker's sleep is ended by kicks of its own rings alone.
#[test]
fn a_kick_wakes_the_worker_of_its_ring() {
    let (device, _) = device(2, None);
    let (control, stats) = (device.control(), device.stats());
    let mut workers = device.workers(2).unwrap();
    beside(&mut workers, &control, Spin::NONE, || {
        let mut driver = driver(&control, Arc::clone(&stats), 2);
        until(|| asleep(&stats) == 2);
        let kicks = || stats.woken_by_kick.load(Relaxed);
        let before = kicks();
        for n in 1..50 {
            driver.rings[3].kick.write(1).unwrap();
            until(|| kicks() >= before + n && asleep(&stats) == 2);
        }
        // Kicks of the start may still have come, one for each ring. If both threads were woken,
        // there would be twice as many.
        assert!(kicks() < before + 50 + 4, "{} sleeps were ended by 49 kicks", kicks() - before);
        send(&mut driver, 1, 0);
        until(|| take(&mut driver, 1, 0));
    });
}

/// Two pairs of one steered port, each with a thread. A thread reads a frame for the other pair
/// from the port, and puts it into the other's backlog: that wakes the other thread, which sleeps.
/// Only the first thread is woken by the test.
#[test]
fn a_frame_that_another_thread_leaves_wakes_the_worker() {
    let (limit, steering) = (Arc::new(AtomicU64::new(0)), Steering::new());
    let mut ports = steering.spread(Flows::new(2, Arc::clone(&limit)), 2).unwrap().into_iter();
    steering.steer(FIRST_PORT + 1, 1);
    let options = Options { max_pairs: 2, ..Options::default() };
    let device = NetDevice::new(options, |_| Ok(ports.next().unwrap())).unwrap();
    let (control, stats) = (device.control(), device.stats());
    let mut workers = device.workers(2).unwrap();
    beside(&mut workers, &control, Spin::NONE, || {
        let mut driver = driver(&control, Arc::clone(&stats), 2);
        // A port drops the frames that wait when its thread reports new features to it. A completed
        // chain shows that each thread has done so.
        for pair in 0..2 {
            send(&mut driver, pair, 0);
            until(|| driver.rings[2 * pair + 1].take().is_some());
        }
        for n in 0..100 {
            until(|| asleep(&stats) == 2);
            limit.store(n + 1, Relaxed);
            let (this, other) = (2 * (n % 2) as usize, 2 * ((n + 1) % 2) as usize);
            driver.rings[other].kick.write(1).unwrap();
            until(|| match driver.rings[this].take() {
                None => false,
                Some((id, len)) => {
                    let (_, at) = driver.buffer(this, id as u16, 2048);
                    assert_eq!(number(&driver.memory.read(at + VnetHdr::LEN, len as usize - VnetHdr::LEN), 2), n);
                    true
                }
            });
        }
        until(|| asleep(&stats) == 2);
        assert_eq!((driver.queue_errors(), driver.drops()), (vec![], vec![]));
    });
}

/// A number of threads that is not possible is refused, and so is a division among them under a
/// front end.
#[test]
fn pairs_are_divided_before_a_front_end_comes() {
    for count in [0, 3] {
        let e = device(2, None).0.workers(count).unwrap_err();
        assert!(matches!(e, DeviceError::Workers { asked, max: 2 } if asked == count), "{e:?}");
    }
    let (device, _) = device(2, None);
    let _driver = Driver::connect(&device, PLAIN);
    assert!(matches!(device.workers(2).unwrap_err(), DeviceError::Busy));
}

/// A queue of another kind that the thread of a worker waits for as well.
struct Other {
    fd: OwnedFd,
    /// What it finds when it is armed.
    work: bool,
    stopped: bool,
    armed: bool,
    arms: u32,
}

impl Other {
    fn new() -> Self {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Self { fd, work: false, stopped: false, armed: false, arms: 0 }
    }
}

impl AsFd for Other {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Wait for Other {
    fn arm(&mut self) -> std::io::Result<Armed> {
        self.arms += 1;
        self.check()?;
        self.armed = !self.work;
        Ok(if self.work { Armed::Work } else { Armed::Waits })
    }

    fn disarm(&mut self) {
        self.armed = false;
    }

    fn check(&self) -> std::io::Result<()> {
        if self.stopped { Err(std::io::Error::other("it has stopped")) } else { Ok(()) }
    }
}

/// A thread drives a worker together with other queues. A sleep is ended by a kick, by one of the
/// queues and by its time. There is no sleep if a queue has work, if the round had work, or while
/// the thread still polls. No queue stays armed.
#[test]
fn a_worker_sleeps_beside_other_queues() {
    let (device, _) = device(1, None);
    let (control, stats) = (device.control(), device.stats());
    let mut worker = device.workers(1).unwrap().remove(0);
    let mut driver = driver(&control, Arc::clone(&stats), 1);
    let count = |what: fn(&Stats) -> &AtomicU64| what(&stats).load(Relaxed);
    let (sleeps, timeouts) = (|| count(|s| &s.sleeps), || count(|s| &s.woken_by_deadline));
    let (mut a, mut b) = (Other::new(), Other::new());
    let soon = Some(Duration::from_millis(1));
    // Kicks and messages of the start end the first sleeps.
    until(|| {
        while worker.poll() > 0 {}
        worker.turn(0, Spin::NONE, &mut [&mut a, &mut b], soon).unwrap();
        timeouts() > 0
    });
    assert!(a.arms > 0 && !a.armed && !b.armed);

    let before = (sleeps(), a.arms);
    worker.turn(1, Spin::NONE, &mut [&mut a, &mut b], None).unwrap();
    worker.turn(0, Spin::For(WATCHDOG), &mut [&mut a, &mut b], None).unwrap();
    worker.turn(0, Spin::Forever, &mut [&mut a, &mut b], None).unwrap();
    assert_eq!((sleeps(), a.arms), before);
    b.work = true;
    worker.turn(0, Spin::NONE, &mut [&mut a, &mut b], None).unwrap();
    assert_eq!((sleeps(), a.arms, a.armed, b.armed), (before.0, before.1 + 1, false, false));
    b.work = false;
    b.stopped = true;
    let stopped = worker.turn(0, Spin::NONE, &mut [&mut a, &mut b], None).unwrap_err();
    assert!(matches!(stopped, DeviceError::Queue(_)) && stopped.to_string() == "it has stopped", "{stopped}");
    assert_eq!((sleeps(), a.armed), (before.0, false));
    b.stopped = false;

    let timed_out = timeouts();
    rustix::io::write(&b.fd, &1u64.to_ne_bytes()).unwrap();
    worker.turn(0, Spin::NONE, &mut [&mut a, &mut b], Some(WATCHDOG)).unwrap();
    rustix::io::read(&b.fd, &mut [0; 8]).unwrap();
    assert_eq!((sleeps(), timeouts(), a.armed, b.armed), (before.0 + 1, timed_out, false, false));

    // The driver kicks only if the device asks for it, which it does while it sleeps.
    thread::scope(|s| {
        s.spawn(|| {
            worker.poll();
            worker.turn(0, Spin::NONE, &mut [&mut a, &mut b], Some(WATCHDOG)).unwrap();
        });
        until(|| asleep(&stats) == 1);
        send(&mut driver, 0, 0);
    });
    assert_eq!((sleeps(), timeouts(), a.armed, b.armed), (before.0 + 2, timed_out, false, false));
    until(|| {
        worker.poll();
        take(&mut driver, 0, 0)
    });
}

/// Which of the descriptors of the worker are readable: that of messages, that of kicks.
fn readable(device: &NetDevice<Watched>) -> [bool; 2] {
    let mut fds = device.wait_fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    fds.map(|fd| !fd.revents().is_empty())
}

/// The end of a round of a loop of the caller's own: what has come is done, and the worker is
/// armed.
fn settle(device: &mut NetDevice<Watched>) {
    until(|| {
        device.disarm();
        while device.poll() > 0 {}
        device.arm() == Armed::Waits
    });
}

/// A loop of the caller's own is woken by the descriptors of its worker: by each frame of the
/// driver, by `Control::wake`, and by a message of the front end, or no ring would start. What has
/// woken it is forgotten then. The driver is on the same thread, so that it kicks when the test
/// says.
#[test]
fn a_loop_of_the_callers_own_sleeps_and_is_woken() {
    let (mut device, _) = device(1, None);
    let (control, stats) = (device.control(), device.stats());
    settle(&mut device);
    assert_eq!(readable(&device), [false, false]);
    let mut driver = driver(&control, stats, 1);
    until(|| readable(&device)[0]);
    for n in 0..100 {
        settle(&mut device);
        assert!(!readable(&device)[1]);
        send(&mut driver, 0, n);
        assert!(readable(&device)[1]);
        settle(&mut device);
        assert!(!readable(&device)[1]);
        assert!(take(&mut driver, 0, n));
    }
    settle(&mut device);
    assert_eq!(readable(&device), [false, false]);
    control.wake();
    assert_eq!(readable(&device), [true, false]);
}
