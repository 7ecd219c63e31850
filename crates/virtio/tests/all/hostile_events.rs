//! Peers that attack by the event descriptors that they share: they fill the counter, clear
//! `O_NONBLOCK`, pass the same descriptor twice, or pass something that is no eventfd. No thread of
//! ours blocks, on either side.
//!
//! A failure would be a hang. Each test runs on a thread of its own, and a watchdog makes the hang
//! a failure.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

use netmem_packet::TxQueue;
use netmem_testing::device::{Driver, EventFd, Front, PLAIN, SIZE, asleep, until};
use netmem_testing::driver::hostile::{Behaviour, Harness};
use netmem_testing::driver::{DeviceThread, frame, receive, watched};
use netmem_virtio::device::port::{Echo, Gen};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode};
use netmem_virtio::virtqueue::DESC_NEXT;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl};

fn set_nonblocking(fd: &impl AsFd, nonblocking: bool) {
    let flags = fcntl_getfl(fd).unwrap();
    let flags = if nonblocking { flags | OFlags::NONBLOCK } else { flags - OFlags::NONBLOCK };
    fcntl_setfl(fd, flags).unwrap();
}

/// Another descriptor of the same open file: what the peer has.
fn shared(fd: &impl AsFd) -> File {
    fd.as_fd().try_clone_to_owned().unwrap().into()
}

/// Makes a plain write to this eventfd block.
fn fill(mut fd: &File) {
    set_nonblocking(&fd, true);
    let _ = fd.read(&mut [0; 8]);
    let _ = fd.write(&(u64::MAX - 1).to_ne_bytes());
    set_nonblocking(&fd, false);
}

/// Makes plain writes to these eventfds block, and clears `O_NONBLOCK` again as soon as a victim
/// may have set it.
struct Filler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Filler {
    fn new(fds: Vec<File>) -> Self {
        fds.iter().for_each(fill);
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !flag.load(Relaxed) {
                fds.iter().for_each(|fd| set_nonblocking(fd, false));
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// The next front end is served, and the device ends on request.
fn next_is_served(device: DeviceThread<Gen>) {
    let mut driver = Driver::over(&device.control, Arc::clone(&device.stats), PLAIN);
    driver.share_memory();
    driver.start_ring(SIZE);
    driver.front.set_vring_enable(0, true).unwrap();
    driver.post_rx(0, 0, 8, 2048);
    driver.rings[0].kick.write(1).unwrap();
    until(|| driver.rings[0].ring.used_idx() == 8);
    driver.hang_up();
    device.stop();
}

fn driver(device: &DeviceThread<Gen>) -> Driver {
    let mut driver = Driver::over(&device.control, Arc::clone(&device.stats), PLAIN);
    driver.share_memory();
    for index in 0..2 {
        driver.start_ring(SIZE);
        driver.front.set_vring_enable(index, true).unwrap();
    }
    driver
}

fn generator() -> DeviceThread<Gen> {
    DeviceThread::one(Gen::new(64, None).unwrap())
}

/// The call descriptor is full and blocking: the device interrupts, and continues.
#[test]
fn a_full_call() {
    watched(|| {
        for keep_filling in [false, true] {
            let device = generator();
            let mut driver = driver(&device);
            let call = shared(&driver.rings[0].call);
            fill(&call);
            let filler = keep_filling.then(|| Filler::new(vec![call]));
            driver.rings[0].ring.set_avail_flags(0);
            for n in 0..SIZE {
                driver.post_rx(0, n, 1, 2048);
                driver.rings[0].kick.write(1).unwrap();
                until(|| driver.rings[0].ring.used_idx() == n + 1);
            }
            // The counter is as full as it gets, and the flags are the peer's.
            assert!(device.stats.calls.load(Relaxed) > 0);
            drop(filler);
            assert!(!fcntl_getfl(shared(&driver.rings[0].call)).unwrap().contains(OFlags::NONBLOCK));
            assert_eq!(driver.front.get_vring_base(0).unwrap(), u32::from(SIZE));
            driver.hang_up();
            next_is_served(device);
        }
    });
}

/// The same while call descriptors are set on a running ring: the control thread signals each.
#[test]
fn a_full_call_is_set() {
    watched(|| {
        let device = generator();
        let driver = driver(&device);
        let call = shared(&driver.rings[0].call);
        let filler = Filler::new(vec![call]);
        for _ in 0..1000 {
            driver.front.set_vring_call(0, &driver.rings[0].call).unwrap();
        }
        drop(filler);
        driver.hang_up();
        next_is_served(device);
    });
}

/// The error descriptor is full and blocking when a ring is stopped.
#[test]
fn a_full_err() {
    watched(|| {
        for keep_filling in [false, true] {
            let device = generator();
            let mut driver = driver(&device);
            let err = shared(&driver.rings[0].err);
            fill(&err);
            let filler = keep_filling.then(|| Filler::new(vec![err]));
            driver.rings[0].chain(0, &[(0, 2048, DESC_NEXT)]);
            driver.rings[0].kick.write(1).unwrap();
            until(|| device.stats.queue_errors().any(|(_, n)| n > 0));
            drop(filler);
            driver.front.get_vring_base(1).unwrap();
            driver.hang_up();
            next_is_served(device);
        }
    });
}

/// One eventfd is the kick of two rings, and blocking; a peer reads it, so that it is empty when
/// the device polls.
#[test]
fn one_kick_for_two_rings() {
    watched(|| {
        for empty in [false, true] {
            let device = generator();
            let mut driver = driver(&device);
            let kick = EventFd::new();
            let peer = shared(&kick);
            for index in 0..2 {
                driver.front.set_vring_kick(index, &kick).unwrap();
            }
            set_nonblocking(&peer, false);
            for n in 0..SIZE {
                driver.post_rx(0, n, 1, 2048);
                kick.write(1).unwrap();
                if empty {
                    set_nonblocking(&peer, true);
                    let _ = (&peer).read(&mut [0; 8]);
                    set_nonblocking(&peer, false);
                }
                until(|| {
                    // A kick that the peer reads before the device polls is the peer's loss: it
                    // kicks again.
                    if empty {
                        kick.write(1).unwrap();
                    }
                    driver.rings[0].ring.used_idx() == n + 1
                });
            }
            driver.front.get_vring_base(1).unwrap();
            driver.hang_up();
            next_is_served(device);
        }
    });
}

/// A kick that is an `EFD_SEMAPHORE` eventfd with a full counter: each read would subtract 1, and
/// so it would be ready for ever. The device sleeps.
#[test]
fn a_kick_that_is_always_ready() {
    watched(|| {
        let device = generator();
        let mut driver = driver(&device);
        let kick: File = eventfd(0, EventfdFlags::SEMAPHORE).unwrap().into();
        (&kick).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        // The buffer is there first: the device polls when it gets the kick, and need not poll
        // again.
        driver.post_rx(0, 0, 1, 2048);
        driver.front.set_vring_kick(0, &kick).unwrap();
        until(|| driver.rings[0].ring.used_idx() == 1);
        let before = device.stats.sleeps.load(Relaxed);
        sleep(Duration::from_millis(500));
        let sleeps = device.stats.sleeps.load(Relaxed) - before;
        // A device that is kept awake sleeps thousands of times; this one may fall asleep once
        // more.
        assert!(sleeps < 5, "{sleeps} sleeps in half a second");
        driver.hang_up();
        next_is_served(device);
    });
}

/// Files that are no eventfds, by what they are.
fn others() -> Vec<(&'static str, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut full = File::from(writer);
    set_nonblocking(&full, true);
    while full.write(&[0; 4096]).is_ok() {}
    set_nonblocking(&full, false);
    // The reader stays open, or a write would fail at once.
    let reader_stays = reader.try_clone().unwrap();
    std::mem::forget(reader_stays);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let fifo = File::options().read(true).write(true).open(&path).unwrap();
    let (socket, other) = UnixStream::pair().unwrap();
    std::mem::forget(other);
    let open = |path| File::options().read(true).write(true).open(path).unwrap();
    let timer =
        rustix::time::timerfd_create(rustix::time::TimerfdClockId::Monotonic, rustix::time::TimerfdFlags::empty());
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::empty());
    vec![
        ("a full pipe", full.into()),
        ("the end of a pipe for reading", reader),
        ("a FIFO", fifo.into()),
        ("a socket", socket.into()),
        ("/dev/full", open("/dev/full").into()),
        ("/dev/zero", open("/dev/zero").into()),
        ("a file", tempfile::tempfile().unwrap().into()),
        ("a timer", timer.unwrap()),
        ("an epoll descriptor", epoll.unwrap()),
        ("a name (O_PATH)", rustix::fs::open("/", OFlags::PATH, Mode::empty()).unwrap()),
    ]
}

/// A file that is no eventfd is refused with a named error, as call, kick and err. The next front
/// end is served.
#[test]
fn other_files_are_refused() {
    watched(|| {
        for what in ["CALL", "KICK", "ERR"] {
            for (name, fd) in others() {
                let device = generator();
                let mut driver = driver(&device);
                let pass = |front: &Front| match what {
                    "CALL" => front.set_vring_call(0, &fd),
                    "KICK" => front.set_vring_kick(0, &fd),
                    _ => front.set_vring_err(0, &fd),
                };
                assert!(pass(&driver.front).is_err(), "{name} was taken as {what}");
                // A front end that does not ask how it went loses the connection.
                driver.front.acknowledged = false;
                pass(&driver.front).unwrap();
                let error = driver.connection.take().unwrap().wait().unwrap_err();
                let error = format!("{error:?}");
                assert!(error.contains("NotEventfd") && error.contains(what), "{name}: {error}");
                driver.hang_up();
                next_is_served(device);
            }
        }
    });
}

/// The driver's kick is full and blocking: the driver sends and receives all the same.
#[test]
fn a_full_kick_of_the_driver() {
    watched(|| {
        for keep_filling in [false, true] {
            let mut harness = Harness::with(Behaviour::default(), NetOptions::new(RxMode::Small));
            let kicks = harness.device.kicks();
            assert_eq!(kicks.len(), 2);
            kicks.iter().for_each(fill);
            let filler = keep_filling.then(|| Filler::new(kicks));
            for i in 0..500 {
                harness.deliver(&frame(i, 60));
                let mut held = Vec::new();
                receive(&mut harness.pair.rx, &mut |p| held.push(p));
                held.into_iter().for_each(|p| harness.pair.tx.send(p).unwrap());
                harness.pair.tx.flush();
                while let Some(head) = harness.tx.take() {
                    harness.tx.add_used(u32::from(head), 0);
                }
                harness.pair.tx.complete();
            }
            assert_eq!(harness.pair.tx.stats().completed, 500);
            drop(filler);
            harness.close();
        }
    });
}

/// A device with echo and two rings that share one kick is woken by it while it sleeps.
#[test]
fn a_sleeping_device_is_woken() {
    watched(|| {
        let device = DeviceThread::new(NetDevice::new(Options::default(), |_| Ok(Echo::new())).unwrap());
        let mut driver = Driver::over(&device.control, Arc::clone(&device.stats), PLAIN);
        driver.share_memory();
        for index in 0..2 {
            driver.start_ring(SIZE);
            driver.front.set_vring_enable(index, true).unwrap();
        }
        driver.post_rx(0, 0, 128, 2048);
        for n in 0..20u16 {
            until(|| asleep(&device.stats) == 1);
            let (addr, _) = driver.buffer(1, n, 2048);
            driver.rings[1].chain(n, &[(addr, 76, 0)]);
            driver.rings[1].kick.write(1).unwrap();
            until(|| driver.rings[1].ring.used_idx() == n + 1);
        }
        driver.hang_up();
        device.stop();
    });
}
