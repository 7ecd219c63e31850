//! Sleeping until a queue has work: every reason to wake up wakes the thread, and no other event
//! does.
//!
//! A lost wake-up would be a hang. A watchdog makes the hang a failure.

use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use netmem_packet::{Armed, Packet, Poll, PollThenSleep, RxQueue, TxQueue, Wait};
use netmem_pool::PeerShared;
use netmem_testing::driver::hostile::{Behaviour, Harness, Hostile};
use netmem_testing::driver::split::{DeviceMemory, bind};
use netmem_testing::driver::*;
use netmem_virtio::device::port::Echo;
use netmem_virtio::driver::{DeviceFault, EitherRx, NetOptions, QueueStopped, RxMode, VirtioRxQueues};
use netmem_virtio::virtqueue::AVAIL_NO_INTERRUPT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::thread::gettid;

/// Whether a queue's descriptor is readable now.
fn ready(queue: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(queue, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

/// Sleeps until a queue's descriptor is readable.
fn sleep(queue: &impl AsFd) {
    let mut fds = [PollFd::new(queue, PollFlags::IN)];
    while poll(&mut fds, None).is_err() {}
}

/// Arms a queue until it waits: wake-ups from before are late.
#[track_caller]
fn arm(queue: &mut impl Wait) {
    until(|| queue.arm().unwrap() == Armed::Waits);
    assert!(!ready(queue));
}

fn signal(device: &Hostile, ring: usize) {
    (&device.calls()[ring]).write_all(&1u64.to_ne_bytes()).unwrap();
}

fn page_packet(rx: &mut netmem_virtio::driver::VirtioRx, bytes: &[u8]) -> Packet<PeerShared> {
    let mut page = rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
    page.copy_from(64, bytes).unwrap();
    Packet::new(page.freeze_range(64..64 + bytes.len()))
}

/// The device is asked for signals while the queue is armed, and then only.
#[test]
fn a_queue_asks_for_a_signal_while_it_is_armed() {
    for mode in MODES {
        let mut harness = Harness::new(NetOptions::new(mode));
        let asks = |harness: &Harness| harness.ring.split().avail_flags() & AVAIL_NO_INTERRUPT == 0;
        assert!(!asks(&harness));
        arm(&mut harness.pair.rx);
        assert!(asks(&harness));
        harness.pair.rx.disarm();
        assert!(!asks(&harness));
        // Published while the queue was not armed: found when it is.
        harness.deliver(&frame(0, 60));
        assert_eq!(harness.pair.rx.arm().unwrap(), Armed::Work);
        assert!(!asks(&harness), "a queue with work is not armed");
        assert_eq!(take(&mut harness.pair.rx).len(), 1);
        arm(&mut harness.pair.rx);
        harness.deliver(&frame(1, 60));
        signal(&harness.device, 0);
        assert!(ready(&harness.pair.rx) && ready(&harness.pair.rx), "readable until it is armed again");
        harness.pair.rx.disarm();
        assert_eq!(take(&mut harness.pair.rx).len(), 1);
        arm(&mut harness.pair.rx);
        harness.close();
    }
}

/// Frames go to the device and come back one at a time, and both sides sleep in between.
#[test]
fn no_wake_up_is_lost() {
    watched(|| {
        for mode in MODES {
            let mut device_thread = DeviceThread::one(Echo::new());
            let (net, mut pairs) = device_thread.probe(NetOptions::new(mode).pages(2048));
            let mut pair = pairs.remove(0);
            let mut pause = PollThenSleep::new(Duration::ZERO);
            let rounds = 2000;
            let mut packet = Some(page_packet(&mut pair.rx, &frame(0, 60)));
            for round in 0..rounds {
                pair.tx.send(packet.take().unwrap()).unwrap();
                pair.tx.flush();
                while packet.is_none() {
                    let n = pair.rx.poll(|poll| {
                        pair.tx.complete();
                        poll.receive(256, &mut |p: Packet<PeerShared>| packet = Some(p))
                    });
                    pause.turn(n, &mut [&mut pair.rx, &mut pair.tx], None).unwrap();
                }
                let back = packet.take().unwrap().to_vec();
                packet = Some(page_packet(&mut pair.rx, &back));
                assert_eq!(back[12..], frame(0, 60)[12..], "round {round}");
            }
            let stats = pause.stats();
            assert!(stats.wakeups > 0 && stats.sleeps == stats.wakeups + stats.others, "{stats:?}");
            drop((packet, pair, net));
        }
    });
}

/// A thread sleeps until the device has completed packets of a full transmit queue.
#[test]
fn a_transmit_queue_waits_for_room() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small).ring_size(4));
    arm(&mut harness.pair.tx);
    let refused = std::iter::repeat_with(|| {
        let packet = page_packet(&mut harness.pair.rx, &frame(0, 60));
        harness.pair.tx.send(packet)
    });
    let refused = refused.take(100).find_map(Result::err).expect("the ring is full at some time");
    // Arming flushes: the device could not complete what it does not see.
    arm(&mut harness.pair.tx);
    let head = harness.tx.take().expect("the device sees what was sent");
    harness.tx.add_used(head.into(), 0);
    signal(&harness.device, 1);
    sleep(&harness.pair.tx);
    assert_eq!(harness.pair.tx.arm().unwrap(), Armed::Work);
    assert_eq!(harness.pair.tx.complete(), 1);
    arm(&mut harness.pair.tx);
    // As a queue for device memory, it has the same descriptor.
    let fd = harness.pair.tx.as_fd().as_raw_fd();
    let mut tx = harness.pair.tx.into_split::<()>();
    assert_eq!(tx.as_fd().as_raw_fd(), fd);
    arm(&mut tx);
    let head = harness.tx.take().unwrap();
    harness.tx.add_used(head.into(), 0);
    assert_eq!(tx.arm().unwrap(), Armed::Work);
    tx.disarm();
    drop((tx, refused));
}

/// A thread that sleeps through the death of a back end wakes once. A reconnect wakes it again;
/// then it switches to the new ring, and the new back end wakes it by the same descriptor.
#[test]
fn a_sleeper_lives_through_a_reconnect() {
    watched(|| {
        for (mode, device_memory) in
            [(RxMode::Small, false), (RxMode::Mergeable, false), (RxMode::Big, false), (RxMode::Small, true)]
        {
            let memory = DeviceMemory::new(1024);
            let options = NetOptions::new(mode);
            let mut harness = Harness::new(if device_memory { memory.add(options) } else { options });
            let (wakes, armed) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
            let (count, waits) = (Arc::clone(&wakes), Arc::clone(&armed));
            let mut pair = harness.pair;
            let thread = std::thread::spawn(move || {
                let (mut split, mut frames) = (None, 0);
                if device_memory {
                    split = Some(bind(pair.rx, &memory.split()));
                } else {
                    arm(&mut pair.rx);
                    split.take();
                    return sleep_and_receive(
                        &mut pair.rx,
                        &count,
                        &waits,
                        |rx| receive(rx, &mut DropAll::default()),
                        &mut frames,
                    );
                }
                if let Some(rx) = &mut split {
                    sleep_and_receive(rx, &count, &waits, |rx| split::take(rx).len(), &mut frames);
                }
            });
            until(|| armed.load(SeqCst) == 1);
            harness.device.kill();
            until(|| armed.load(SeqCst) == 2);
            let (device, backend) = Hostile::new(Behaviour::default());
            harness.net.reconnect(backend).unwrap();
            until(|| armed.load(SeqCst) == 3);
            assert_eq!(wakes.load(SeqCst), 2, "one for the death, one for the reconnect");
            let mut ring = device.ring(0);
            device.deliver(&mut ring, &frame(7, 60));
            assert_eq!(ring.split().avail_flags() & AVAIL_NO_INTERRUPT, 0, "armed on the new ring");
            signal(&device, 0);
            thread.join().unwrap();
            assert_eq!(wakes.load(SeqCst), 3);
        }
    });
}

/// A queue's error: its device has closed the connection.
#[track_caller]
fn assert_disconnected(error: &std::io::Error, queue: usize) {
    let stopped = error.get_ref().and_then(|error| error.downcast_ref::<QueueStopped>()).unwrap();
    assert_eq!((error.kind(), *stopped), (ErrorKind::NotConnected, QueueStopped::Disconnected { queue }));
}

/// The end of a connection that comes between a poll and `arm` is an error, once: then the queue
/// waits for the next back end. A loop that only polls can ask, as often as it likes.
#[test]
fn a_dead_back_end_is_an_error_once() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    arm(&mut harness.pair.rx);
    arm(&mut harness.pair.tx);
    harness.device.kill();
    assert!(ready(&harness.pair.rx) && ready(&harness.pair.tx));
    harness.pair.rx.check().unwrap();
    assert_disconnected(&harness.pair.rx.arm().unwrap_err(), 0);
    assert_disconnected(&harness.pair.tx.arm().unwrap_err(), 1);
    for _ in 0..2 {
        assert_eq!((harness.pair.rx.arm().unwrap(), harness.pair.tx.arm().unwrap()), (Armed::Waits, Armed::Waits));
        assert!(!ready(&harness.pair.rx) && !ready(&harness.pair.tx));
        assert_disconnected(&harness.pair.rx.check().unwrap_err(), 0);
        assert_disconnected(&harness.pair.tx.check().unwrap_err(), 1);
    }
    let (device, backend) = Hostile::new(Behaviour::default());
    harness.net.reconnect(backend).unwrap();
    harness.device = device;
    harness.pair.rx.check().unwrap();
    assert_eq!((harness.pair.rx.arm().unwrap(), harness.pair.tx.arm().unwrap()), (Armed::Work, Armed::Work));
    harness.close();
}

/// Polls until the end of the connection is seen. A queue checks the connection at least once in
/// 65,536 polls that find nothing.
#[track_caller]
fn within_the_polls(mut poll: impl FnMut() -> bool) {
    assert!((0..=65_536).any(|_| poll()), "the end of the connection was not seen");
}

/// A queue that is only polled notices the end of the connection by itself, and so does one that is
/// armed. A queue that goes on with another back end is connected again.
#[test]
fn a_dead_back_end_is_seen_in_a_poll() {
    for (polls, mode) in [(true, RxMode::Small), (true, RxMode::Mergeable), (true, RxMode::Big), (false, RxMode::Small)]
    {
        let mut harness = Harness::new(NetOptions::new(mode));
        assert!(harness.pair.rx.is_connected() && harness.pair.tx.is_connected());
        for back_ends in 0..2 {
            harness.device.kill();
            if polls {
                within_the_polls(|| {
                    receive(&mut harness.pair.rx, &mut DropAll::default());
                    !harness.pair.rx.is_connected()
                });
            } else {
                assert_disconnected(&harness.pair.rx.arm().unwrap_err(), 0);
            }
            assert!(!harness.pair.rx.is_connected() && !harness.pair.tx.is_connected(), "{mode}");
            let (device, backend) = Hostile::new(Behaviour::default());
            harness.net.reconnect(backend).unwrap();
            harness.device = device;
            assert!(harness.pair.rx.is_connected() && harness.net.is_connected(), "{back_ends} back ends before");
        }
        // A queue that only sends.
        harness.device.kill();
        within_the_polls(|| {
            harness.pair.tx.complete();
            !harness.pair.tx.is_connected()
        });
    }
}

/// The same for frames with payload in device memory.
#[test]
fn a_dead_back_end_is_seen_in_a_poll_of_device_memory() {
    let memory = DeviceMemory::new(1024);
    let mut harness = Harness::new(memory.options());
    let mut rx = bind(harness.pair.rx, &memory.split());
    harness.device.kill();
    within_the_polls(|| {
        split::take(&mut rx);
        !rx.is_connected()
    });
}

/// Arms, sleeps and polls until a frame has come. Counts the sleeps that began and those that
/// ended.
fn sleep_and_receive<Q: Wait>(
    rx: &mut Q,
    wakes: &AtomicU32,
    armed: &AtomicU32,
    mut poll: impl FnMut(&mut Q) -> usize,
    frames: &mut usize,
) {
    let fd = rx.as_fd().as_raw_fd();
    while *frames == 0 {
        *frames += poll(rx);
        match rx.arm() {
            _ if *frames > 0 => continue,
            Ok(Armed::Waits) => {}
            Ok(Armed::Work) => continue,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NotConnected, "{error}");
                continue;
            }
        }
        armed.fetch_add(1, SeqCst);
        sleep(rx);
        wakes.fetch_add(1, SeqCst);
        assert_eq!(rx.as_fd().as_raw_fd(), fd);
    }
}

/// A restart by another thread wakes the thread that sleeps for the queue, which does not hold its
/// lock.
#[test]
fn a_sleeper_lives_through_a_restart() {
    watched(|| {
        let memory = DeviceMemory::new(1024);
        let harness = Harness::new(memory.options());
        let (_tx, queues) = (harness.pair.tx, VirtioRxQueues::new([harness.pair.rx]));
        assert!(queues.wait(1).is_none());
        let mut control = queues.clone();
        let armed = Arc::new(AtomicU32::new(0));
        let waits = Arc::clone(&armed);
        let thread = std::thread::spawn(move || {
            let mut wait = queues.wait(0).unwrap();
            let mut polls = 0;
            loop {
                let n = match &mut *queues.get(0).unwrap() {
                    EitherRx::Host(rx) => receive(rx, &mut DropAll::default()),
                    EitherRx::Split(rx) => split::take(rx).len(),
                    EitherRx::Stopped => return polls,
                };
                polls += 1;
                if n == 0 && matches!(wait.arm(), Ok(Armed::Waits)) {
                    waits.fetch_add(1, SeqCst);
                    sleep(&wait);
                    wait.disarm();
                }
            }
        });
        let provider = memory.provider.clone();
        for round in 0..4 {
            until(|| armed.load(SeqCst) == round + 1);
            if round % 2 == 0 {
                netmem_packet::Queues::attach(&mut control, 0, provider.clone()).unwrap();
            } else {
                netmem_packet::Queues::detach(&mut control, 0).unwrap();
            }
        }
        until(|| armed.load(SeqCst) == 5);
        // A restart that fails stops the queue, and its sleeper sees that.
        harness.device.behave(|b| b.on_stop = hostile::OnStop::Refuse);
        netmem_packet::Queues::attach(&mut control, 0, provider).unwrap_err();
        thread.join().unwrap();
        drop(harness.net);
    });
}

/// A queue without buffers for a frame does not sleep, because pages that are returned wake no
/// thread.
#[test]
fn a_queue_without_pages_is_polled() {
    for (mode, fewest) in [(RxMode::Small, 1), (RxMode::Mergeable, 18), (RxMode::Big, 1)] {
        let mut harness =
            Harness::new(NetOptions::new(mode).ring_size(64).pages(if mode == RxMode::Big { 256 } else { 64 }));
        let mut held = Vec::new();
        // What it takes to leave the ring with the fewest buffers that a frame could need, and then
        // with one less.
        loop {
            let posted = usize::from(harness.ring.available());
            let armed = harness.pair.rx.arm().unwrap();
            assert_eq!(armed.waits(), posted >= fewest, "{mode}: {posted} posted");
            harness.pair.rx.disarm();
            if posted == 0 {
                break;
            }
            harness.deliver(&frame(0, 60));
            held.extend(take(&mut harness.pair.rx));
        }
        let before = harness.pair.rx.stats().out_of_buffers;
        held.truncate(held.len() - 40);
        // The poll that an armed queue asks for posts the pages that were returned.
        receive(&mut harness.pair.rx, &mut DropAll::default());
        assert_eq!(harness.pair.rx.arm().unwrap(), Armed::Waits, "{mode}, {before}");
        drop(held);
        harness.close();
    }
}

/// If a device breaks a rule, the queue's owner wakes up, and gets the error that the queue has
/// stopped.
#[test]
fn a_stopped_queue_is_an_error() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    arm(&mut harness.pair.rx);
    let head = harness.ring.take().unwrap();
    harness.ring.add_used(head.into(), 100_000);
    signal(&harness.device, 0);
    sleep(&harness.pair.rx);
    assert_eq!(harness.pair.rx.arm().unwrap(), Armed::Work);
    assert_eq!(receive(&mut harness.pair.rx, &mut DropAll::default()), 0);
    let fault = harness.pair.rx.stats().stopped.unwrap();
    assert!(matches!(fault, DeviceFault::BadLength { .. }));
    // The ring has nothing more; the queue does not wait for ever, and a loop does not spin for it.
    let mut pause = PollThenSleep::new(Duration::ZERO);
    for _ in 0..3 {
        let turn = pause.turn(0, &mut [&mut harness.pair.rx], None).unwrap_err();
        for error in [turn, harness.pair.rx.arm().unwrap_err(), harness.pair.rx.check().unwrap_err()] {
            let stopped = error.get_ref().and_then(|error| error.downcast_ref::<QueueStopped>()).unwrap();
            assert_eq!((error.kind(), *stopped), (ErrorKind::InvalidData, QueueStopped::Fault { queue: 0, fault }));
        }
    }
    harness.pair.tx.check().unwrap();
}

/// The device makes the call descriptor blocking, fills it and empties it. Arming and sleeping go
/// on as before: nothing of ours reads or writes it.
#[test]
fn a_call_descriptor_as_a_weapon() {
    watched(|| {
        let mut harness = Harness::new(NetOptions::new(RxMode::Small));
        let call = harness.device.calls().remove(0);
        for round in 0..100 {
            let flags = fcntl_getfl(&call).unwrap();
            fcntl_setfl(&call, flags | OFlags::NONBLOCK).unwrap();
            match round % 3 {
                0 => _ = rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()),
                1 => _ = rustix::io::read(&call, &mut [0; 8]),
                _ => {}
            }
            fcntl_setfl(&call, flags - OFlags::NONBLOCK).unwrap();
            arm(&mut harness.pair.rx);
            harness.deliver(&frame(round, 60));
            // A signal that can be made: the counter has room after a read.
            fcntl_setfl(&call, flags | OFlags::NONBLOCK).unwrap();
            let _ = rustix::io::read(&call, &mut [0; 8]);
            rustix::io::write(&call, &1u64.to_ne_bytes()).unwrap();
            fcntl_setfl(&call, flags - OFlags::NONBLOCK).unwrap();
            sleep(&harness.pair.rx);
            harness.pair.rx.disarm();
            assert_eq!(take(&mut harness.pair.rx).len(), 1);
        }
        harness.close();
    });
}

/// Context switches of a thread so far, those that it wanted and those that it did not.
fn switches(thread: rustix::thread::Pid) -> (String, u64) {
    let status = std::fs::read_to_string(format!("/proc/self/task/{}/status", thread.as_raw_nonzero())).unwrap();
    let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    let count = |name: &str| value(name).parse::<u64>().unwrap();
    (value("State:"), count("voluntary_ctxt_switches:") + count("nonvoluntary_ctxt_switches:"))
}

/// Proves NET-9's idle half for the driver: a thread that sleeps for its queues does not run at all
/// while nothing comes.
#[test]
fn an_idle_driver_makes_no_context_switches() {
    watched(|| {
        let mut harness = Harness::new(NetOptions::new(RxMode::Small));
        let (mut pair, asleep) = (harness.pair, Arc::new(AtomicU32::new(0)));
        let tid = Arc::clone(&asleep);
        let thread = std::thread::spawn(move || {
            let mut pause = PollThenSleep::new(Duration::from_micros(50));
            let mut frames = 0;
            while frames == 0 {
                tid.store(gettid().as_raw_nonzero().get() as u32, Relaxed);
                frames = receive(&mut pair.rx, &mut DropAll::default()) + pair.tx.complete();
                pause.turn(frames, &mut [&mut pair.rx, &mut pair.tx], None).unwrap();
            }
            (pair, pause.stats())
        });
        until(|| asleep.load(Relaxed) != 0);
        let tid = rustix::thread::Pid::from_raw(asleep.load(Relaxed) as i32).unwrap();
        // Late wake-ups are over.
        let armed = || harness.ring.split().avail_flags() & AVAIL_NO_INTERRUPT == 0;
        until(|| armed() && switches(tid).0.starts_with('S'));
        std::thread::sleep(Duration::from_millis(200));
        let before = switches(tid);
        std::thread::sleep(Duration::from_secs(10));
        assert_eq!(switches(tid), before);
        assert!(before.0.starts_with('S'));
        harness.device.deliver(&mut harness.ring, &frame(0, 60));
        signal(&harness.device, 0);
        let (pair, stats) = thread.join().unwrap();
        assert!(stats.sleeps <= 2, "{stats:?}");
        close_clean(pair);
        drop(harness.net);
    });
}
