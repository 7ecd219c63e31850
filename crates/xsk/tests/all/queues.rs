//! Several queues, interfaces and devices on one memory; waiting; what the device is asked to do
//! with a frame.
#![allow(clippy::unwrap_used)]

use netmem_packet::{
    Armed, Checksum, Handler, Meta, Packet, Poll, PollThenSleep, RxQueue, Sum, Turn, TxBulk, TxQueue, Verdict, Wait,
    XdpFrame, complete_checksum,
};
use netmem_pool::{KernelShared, PagePool, PeerShared, PoolOptions};
use netmem_testing::namespace::{command, in_namespace, ip, nics};
use netmem_testing::xsk;
use netmem_testing::xsk::{Harness, Raw, frame, index, memory, name, on_wire, receive, until, veth, wire};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::Echo;
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_xsk::{
    BusyPoll, CopyReason, Fault, Mode, NoLaunchTimes, Program, ProgramOptions, QueueOptions, QueueStopped, TxRequest,
    Umem, UmemMemory, UmemOptions, XskRx, XskTx,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Sends all that a handler gets to another queue.
struct To<'t, T: TxQueue>(TxBulk<&'t mut T>);

impl<'t, T: TxQueue> To<'t, T> {
    fn new(queue: &'t mut T) -> Self {
        Self(TxBulk::holding(queue, 256))
    }
}

impl<T: TxQueue> Handler<T::Mem> for To<'_, T> {
    fn run(&mut self, _: &mut XdpFrame<T::Mem>) -> Verdict {
        Verdict::Redirect
    }

    fn pass(&mut self, _: Packet<T::Mem>) {}

    fn redirect(&mut self, packet: Packet<T::Mem>) {
        self.0.push(packet);
    }

    fn flush(&mut self) {
        self.0.flush();
    }
}

/// The halves of sockets.
type Pairs<M> = Vec<(XskRx<M>, XskTx<M>)>;

/// All queues of an interface, each with a socket of one UMEM.
fn open<M: UmemMemory>(
    interface: &str,
    queues: u32,
    umem: &Umem<M>,
    memory: &std::sync::Arc<netmem_pool::RegionProvider<M>>,
) -> (Program, Pairs<M>) {
    let program = Program::attach(index(interface), &ProgramOptions::default()).unwrap();
    let open = |queue| {
        let (rx, tx) = umem.open(index(interface), queue, memory.clone(), QueueOptions::new().fill(256)).unwrap();
        program.insert(queue, rx.socket().as_fd()).unwrap();
        (rx, tx)
    };
    let queues = (0..queues).map(open).collect();
    (program, queues)
}

/// Eight sockets, on the queues of two interfaces, share one UMEM. Frames go from queue to queue
/// and between the interfaces, and the page that was received is the page that is sent.
#[test]
fn eight_sockets_on_one_umem() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 4, 1500);
        let (memory, umem) = memory::<KernelShared>(16384, &UmemOptions::new());
        let (_a, mut near) = open(&ours, 4, &umem, &memory);
        let (_b, mut far) = open(&theirs, 4, &umem, &memory);
        assert!(near.iter().all(|(rx, _)| rx.socket().mode() == Mode::Copy && rx.socket().is_multi_buffer()));
        // veth has no zero-copy, which a kernel before 6.3 does not report.
        let reasons: Vec<_> = near.iter().map(|(rx, _)| rx.socket().copy_reason().unwrap()).collect();
        assert!(matches!(reasons[0], CopyReason::Driver | CopyReason::Unknown), "{reasons:?}");
        assert!(reasons[1..].iter().all(|&reason| reason == CopyReason::First), "{reasons:?}");
        let mut pool = PoolOptions::new("tx").build(memory.clone(), Some(umem.domain())).unwrap();
        let n = 300;
        for i in 0..n {
            let (queue, sent) = (i % 4, frame(60 + i, i as u64));
            let mut page = pool.alloc().unwrap();
            page.copy_from(0, &sent).unwrap();
            // Queue q of one end arrives at queue q of the other.
            far[queue].1.send(Packet::new(page.freeze_range(0..sent.len()))).unwrap();
            far[queue].1.flush();
            // And goes back by another queue, as it came.
            let (back, mut got) = ((queue + 1) % 4, receive(&mut near[queue].0));
            assert_eq!(got.to_vec(), sent);
            let at = got.head().as_ptr();
            got.meta = Meta::default();
            near[back].1.send(got).unwrap();
            near[back].1.flush();
            assert!(near[back].1.outstanding() > 0, "{at:?}");
            assert_eq!(receive(&mut far[back].0).to_vec(), sent);
            for (_, tx) in near.iter_mut().chain(&mut far) {
                tx.complete();
            }
        }
        until("all completions", || {
            near.iter_mut().chain(&mut far).for_each(|(_, tx)| _ = tx.complete());
            near.iter().chain(&far).all(|(_, tx)| tx.outstanding() == 0).then_some(())
        });
        assert_eq!(pool.stats().inflight(), 0);
        for (rx, _) in near.iter_mut().chain(&mut far) {
            assert_eq!((rx.stats().frames, rx.pool_stats().inflight()), (n as u64 / 4, rx.posted() as u64));
        }
    });
}

/// A device of ours on its thread.
fn with_device<R>(options: NetOptions, test: impl FnOnce(QueuePair) -> R) -> R {
    let mut port = Some(Echo::new());
    let mut device = NetDevice::new(Options::default(), |_| Ok(port.take().unwrap())).unwrap();
    let (control, stop) = (device.control(), AtomicBool::new(false));
    thread::scope(|s| {
        let thread = s.spawn(|| device.run(&stop, netmem_virtio::Spin::default()).unwrap());
        let (ours, theirs) = UnixStream::pair().unwrap();
        let _connection = control.serve(theirs).unwrap();
        let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(ours).unwrap(), options).unwrap();
        let answer = test(pairs.remove(0));
        drop(net);
        stop.store(true, Ordering::Relaxed);
        control.wake();
        thread.join().unwrap();
        answer
    })
}

/// Proves XSK-2: frames go from an AF_XDP queue to a virtio-net queue and back, in one region, and
/// neither side copies: each queue sends the pages that the other has received.
#[test]
fn frames_are_redirected_to_virtio_and_back() {
    in_namespace(|| {
        let (memory, umem) = memory::<PeerShared>(16384, &UmemOptions::new().headroom(64));
        let mut harness = Harness::with(memory.clone(), umem, 1500, QueueOptions::new().fill(512));
        let options = NetOptions::new(RxMode::Mergeable).memory(memory.region().clone(), memory.clone());
        with_device(options, |QueuePair { rx: mut virtio_rx, tx: mut virtio_tx }| {
            let n = 1000;
            let mut back = 0;
            {
                let (mut to_virtio, mut to_xsk) = (To::new(&mut virtio_tx), To::new(&mut harness.tx));
                let mut sent = 0;
                until("all frames back", || {
                    // At most as many are on their way as there are chunks to receive into.
                    while sent < n && sent - back < 256 {
                        harness.peer.send(&frame(60 + sent as usize % 1400, sent));
                        sent += 1;
                    }
                    harness.rx.poll(|poll| poll.receive(64, &mut to_virtio));
                    virtio_rx.poll(|poll| poll.receive(64, &mut to_xsk));
                    while let Some(got) = harness.peer.try_receive() {
                        let sent = frame(60 + back as usize % 1400, back);
                        assert_eq!(got, [&sent[6..12], &sent[..6], &sent[12..]].concat(), "{back}");
                        back += 1;
                    }
                    (back == n).then_some(())
                });
            }
            assert_eq!((harness.rx.stats().redirected, virtio_rx.stats().redirected), (n, n));
            // Of the other's domain, and mapped by an addition.
            assert_eq!((virtio_tx.stats().mapped, harness.tx.stats().unreachable), (n, 0));
            until("completions", || {
                virtio_tx.complete();
                harness.tx.complete();
                (virtio_tx.posted() == 0 && harness.tx.outstanding() == 0).then_some(())
            });
            assert_eq!(harness.rx.pool_stats().inflight(), harness.rx.posted() as u64);
            assert_eq!(virtio_rx.pool_stats().inflight(), virtio_rx.posted() as u64);
        });
    });
}

/// A thread sleeps until a frame comes, also one that comes while it arms, and until the kernel
/// returns frames.
#[test]
fn a_thread_sleeps_until_there_is_work() {
    in_namespace(|| {
        let mut harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new());
        let mut pool = harness.pool(256);
        assert_eq!(harness.rx.arm().unwrap(), Armed::Waits);
        let (go, wait) = mpsc::channel::<u64>();
        let peer = &harness.peer;
        let (rx, tx) = (&mut harness.rx, &mut harness.tx);
        thread::scope(|s| {
            s.spawn(move || {
                for i in wait {
                    // Now and then the queue is asleep by then, now and then not.
                    thread::sleep(Duration::from_micros(i % 200));
                    peer.send(&frame(100, i));
                }
            });
            let mut pause = PollThenSleep::new(Duration::ZERO);
            for i in 0..500 {
                go.send(i).unwrap();
                let mut got = 0;
                while got == 0 {
                    let work = rx.poll(|poll| poll.receive(64, &mut |packet: Packet<_>| assert_eq!(packet.len(), 100)));
                    got += work;
                    // Without a limit of time: a wake-up that is lost hangs the test.
                    pause.turn(work, &mut [rx], None).unwrap();
                }
            }
            assert!(pause.stats().wakeups > 0, "{:?}", pause.stats());
            // The transmit queue: asleep until the frame is back.
            let mut slept = 0;
            for i in 0..200 {
                let mut page = pool.alloc().unwrap();
                page.copy_from(0, &frame(60, i)).unwrap();
                tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
                while tx.outstanding() > 0 {
                    let work = tx.complete();
                    slept += u32::from(pause.turn(work, &mut [tx], None).unwrap() == Turn::Woken);
                }
                peer.receive();
            }
            assert_eq!(pool.stats().inflight(), 0);
            // In copy mode on a veth most frames are back before the thread could sleep.
            eprintln!("the sender was woken {slept} times");
            drop(go);
        });
    });
}

/// The kernel calls a set for each frame as long as the socket is in it, so it is there only while
/// a thread waits. The watch of the interface is always there.
#[test]
fn the_socket_is_in_the_set_of_a_queue_while_it_waits() {
    fn check(queue: &mut impl Wait) {
        let path = format!("/proc/self/fdinfo/{}", queue.as_fd().as_raw_fd());
        let members = || {
            let info = std::fs::read_to_string(&path).unwrap();
            info.lines().filter(|line| line.starts_with("tfd:")).count()
        };
        assert_eq!(members(), 1);
        for _ in 0..2 {
            assert_eq!(queue.arm().unwrap(), Armed::Waits);
            assert_eq!(queue.arm().unwrap(), Armed::Waits);
            assert_eq!(members(), 2);
            queue.disarm();
            queue.disarm();
            assert_eq!(members(), 1);
        }
    }
    in_namespace(|| {
        let mut harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new());
        check(&mut harness.rx);
        check(&mut harness.tx);
    });
}

/// A thread that sleeps for either half of a socket, without a limit of time, is woken when the
/// interface is deleted or leaves the namespace, and has the reason. So has a thread that polls.
#[test]
fn a_thread_that_sleeps_is_told_that_its_interface_is_gone() {
    fn sleeps(queue: &mut impl Wait, ours: &str, end: impl FnOnce()) {
        assert_eq!(queue.arm().unwrap(), Armed::Waits);
        queue.check().unwrap();
        end();
        // The time is only there so that a failure ends.
        let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
        let woken = poll(&mut [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)], Some(&patience));
        assert_eq!(woken.unwrap(), 1, "it sleeps on");
        queue.disarm();
        let turn = PollThenSleep::new(Duration::ZERO).turn(0, &mut [&mut *queue], None).unwrap_err();
        for error in [turn, queue.arm().unwrap_err(), queue.check().unwrap_err()] {
            let stopped = error.get_ref().and_then(|error| error.downcast_ref::<QueueStopped>()).unwrap();
            assert_eq!((error.kind(), stopped.fault), (ErrorKind::NetworkDown, Fault::Gone));
            let says = format!("queue 0 of {ours} has stopped: the interface is gone");
            assert!(error.to_string().starts_with(&says), "{error}");
        }
    }
    for moved in [false, true] {
        in_namespace(|| {
            for receives in [true, false] {
                let Harness { mut rx, mut tx, ours, .. } =
                    Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new());
                let (done, wait) = mpsc::channel::<()>();
                let (tell, told) = mpsc::channel();
                let other = thread::spawn(move || {
                    // SAFETY: this thread uses no descriptor of the namespace that it leaves.
                    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
                    tell.send(rustix::thread::gettid().as_raw_pid()).unwrap();
                    let _ = wait.recv();
                });
                let thread = told.recv().unwrap();
                let end = || {
                    ip(&if moved { format!("link set {ours} netns {thread}") } else { format!("link delete {ours}") });
                };
                if receives {
                    sleeps(&mut rx, &ours, end)
                } else {
                    sleeps(&mut tx, &ours, end)
                }
                drop(done);
                other.join().unwrap();
            }
        });
    }
}

/// Completions that another thread causes wake the sender: the peer's socket has the frames, and
/// releases them one by one.
#[test]
fn a_sender_is_woken_by_late_completions() {
    in_namespace(|| {
        let mut harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new());
        let mut pool = harness.pool(256);
        let n = 100;
        for i in 0..n {
            let mut page = pool.alloc().unwrap();
            page.copy_from(0, &frame(60, i)).unwrap();
            harness.tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
        }
        harness.tx.flush();
        let (peer, tx) = (&harness.peer, &mut harness.tx);
        thread::scope(|s| {
            s.spawn(|| (0..n).for_each(|_| _ = peer.receive()));
            let mut pause = PollThenSleep::new(Duration::ZERO);
            while tx.outstanding() > 0 {
                let work = tx.complete();
                pause.turn(work, &mut [tx], None).unwrap();
            }
        });
        assert_eq!((pool.stats().inflight(), harness.tx.stats().completed), (0, n));
    });
}

/// A frame comes from the peer, and a frame is sent to it.
fn one_each_way(harness: &mut Harness, pool: &mut PagePool<KernelShared>, i: u64) {
    harness.peer.send(&frame(100, i));
    assert_eq!(harness.receive().to_vec(), frame(100, i));
    let mut page = pool.alloc().unwrap();
    page.copy_from(0, &frame(60, i)).unwrap();
    harness.send(Packet::new(page.freeze_range(0..60)));
    assert_eq!(harness.peer.receive(), frame(60, i));
}

/// Without need-wakeup each flush is a system call, and no frame waits for another one. A socket on
/// a veth has the flag set in either case, so that this also holds if only the flag is read.
#[test]
fn without_need_wakeup_each_flush_is_a_call() {
    in_namespace(|| {
        let mut harness = Harness::new(4096, 1500, &UmemOptions::new(), QueueOptions::new().need_wakeup(false));
        let mut pool = harness.pool(256);
        for i in 0..200 {
            one_each_way(&mut harness, &mut pool, i);
            assert!(harness.tx.stats().kicks > i);
        }
    });
}

/// Proves XSK-1: a user that only sends has all chunks posted from the start to the end, more than
/// the ring of the device has entries, so that the device goes on receiving for the kernel, however
/// long the user sends.
#[test]
fn a_queue_that_only_sends_is_filled() {
    in_namespace(|| {
        let (ours, theirs) = wire(1500);
        let (memory, umem) = memory::<KernelShared>(4096, &UmemOptions::new());
        // No program: what the interface receives is the kernel's.
        let (rx, mut tx) = umem.open(index(&ours), 0, memory.clone(), on_wire(QueueOptions::new().fill(1))).unwrap();
        // The ring of the guest's card has 1024 entries.
        assert_eq!(rx.fill_level(), if nics().is_some() { 1280 } else { 1 });
        let (kernel, peer) = (Raw::new(&ours), Raw::new(&theirs));
        let mut pool = PoolOptions::new("tx").limit(256).build(memory, Some(umem.domain())).unwrap();
        let level = rx.fill_level();
        // More than the chunks, so that each would be used up.
        for i in 0..level as u64 + 200 {
            let mut page = pool.alloc().unwrap();
            page.copy_from(0, &frame(60, i)).unwrap();
            tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
            tx.flush();
            assert_eq!(peer.receive(), frame(60, i));
            peer.send(&frame(61, i));
            assert_eq!(until("a frame for the kernel", || kernel.try_receive()), frame(61, i));
            until("completion", || (tx.complete() > 0).then_some(()));
            assert_eq!(rx.posted(), level);
        }
    });
}

/// A UDP datagram in a frame, its checksum to be computed.
fn partial(len: usize) -> (Vec<u8>, Meta) {
    let mut bytes = frame(len, 9);
    let udp = (len - 34) as u16;
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[14..34].copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes[16..18].copy_from_slice(&(udp + 20).to_be_bytes());
    bytes[38..40].copy_from_slice(&udp.to_be_bytes());
    // The pseudo header's sum.
    let mut sum = Sum::default();
    sum.add(&bytes[26..34]);
    sum.add(&[0, 17]);
    sum.add(&udp.to_be_bytes());
    bytes[40..42].copy_from_slice(&sum.value().to_be_bytes());
    (bytes, Meta { checksum: Checksum::Partial { start: 34, offset: 6 }, gso: None })
}

/// With metadata in front of a frame the kernel computes its checksum, as it asks a device to.
#[test]
fn the_device_computes_checksums() {
    in_namespace(|| {
        let umem = UmemOptions::new().chunk(2048).tx_metadata(true).software_checksums(true);
        let mut harness = Harness::new(4096, 1500, &umem, QueueOptions::new());
        let mut pool = harness.pool(256);
        let start = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        for len in [60, 61, 777, 1514] {
            let (bytes, meta) = partial(len);
            assert!(harness.tx.supports(meta));
            let mut page = pool.alloc().unwrap();
            page.copy_from(64, &bytes).unwrap();
            let mut packet = Packet::new(page.freeze_range(64..64 + len));
            packet.meta = meta;
            let mut want = bytes;
            assert!(complete_checksum(&mut want, 34, 6));
            // A veth has no launch times, and the frame would leave at once.
            assert_eq!(harness.tx.launch_times(), Err(NoLaunchTimes::Driver));
            let packet = harness.tx.send_with(packet, TxRequest { launch_time: Some(1), timestamp: None }).unwrap_err();
            // The metadata cannot be written in front of a frame that has another holder.
            let holder = packet.clone();
            let packet = harness.tx.send(packet).unwrap_err();
            drop(holder);
            harness.tx.send_with(packet, TxRequest { timestamp: Some(len as u64), launch_time: None }).unwrap();
            harness.tx.flush();
            assert_eq!(harness.peer.receive(), want, "{len}");
            until("completion", || (harness.tx.complete() > 0).then_some(()));
            // A veth reports the time of the system's clock. The checksum's place in the metadata
            // is not mistaken for one.
            let stamp = harness.tx.timestamp().unwrap();
            assert_eq!(stamp.id, len as u64);
            assert!(stamp.time.is_none_or(|time| u128::from(time) >= start.as_nanos()), "{stamp:?}");
        }
        // Without room in front of the frame: what is there is another chunk.
        let (bytes, meta) = partial(60);
        let mut page = pool.alloc().unwrap();
        page.copy_from(2064, &bytes).unwrap();
        let mut packet = Packet::new(page.freeze_range(2064..2124));
        packet.meta = meta;
        let back = harness.tx.send(packet).unwrap_err();
        assert_eq!((back.meta, back.to_vec()), (meta, bytes));
        drop(back);
        // A checksum in the second chunk, and one beyond the end: the kernel would keep such a
        // frame in the ring.
        for (len, start) in [(2500, 2000), (100, 99)] {
            let mut packet = Packet::new(pool.alloc().unwrap().freeze_range(64..64 + len));
            packet.meta.checksum = Checksum::Partial { start, offset: 0 };
            harness.tx.send(packet).unwrap_err();
        }
        assert_eq!((harness.tx.stats().no_offload, pool.stats().inflight()), (11, 0));
    });
}

/// A queue with busy polling receives and sends; without the privilege the error names it.
#[test]
fn busy_polling() {
    in_namespace(|| {
        let options = || QueueOptions::new().busy_poll(BusyPoll { microseconds: 50, budget: 64 });
        let mut harness = Harness::new(4096, 1500, &UmemOptions::new(), options());
        // The one that is mounted shows another namespace.
        command("mount -t sysfs sysfs /sys");
        netmem_xsk::defer_interrupts(&harness.ours, 2, Duration::from_micros(200)).unwrap();
        let mut pool = harness.pool(256);
        // The kernel learns what to poll from a frame, if at all.
        assert_eq!(harness.rx.socket().is_busy_polled(), Some(false));
        for i in 0..200 {
            one_each_way(&mut harness, &mut pool, i);
        }
        assert!(harness.rx.stats().wakeups >= 200);
        let plain = Harness::new(4096, 1500, &UmemOptions::new(), QueueOptions::new());
        assert_eq!(plain.rx.socket().is_busy_polled(), None);
    });
}

/// What the kernel refuses, by name.
#[test]
fn errors_say_what_is_wrong() {
    use netmem_xsk::XskError;
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let ifindex = index(&ours);
        let (memory, umem) = memory::<KernelShared>(4096, &UmemOptions::new());
        let (other, other_umem) = xsk::memory::<KernelShared>(4096, &UmemOptions::new());
        let open = |ifindex, queue, options| umem.open(ifindex, queue, memory.clone(), options).unwrap_err();
        let new = QueueOptions::new;
        assert_eq!(open(9999, 0, new()).to_string(), "there is no interface number 9999 in this network namespace");
        assert!(matches!(open(ifindex, 1, new()), XskError::NoQueue { queue: 1, .. }));
        assert!(matches!(open(ifindex, 0, new().tx_ring(100)), XskError::RingSize { ring: "completion", .. }));
        assert!(matches!(
            open(ifindex, 0, new().mode(Mode::ZeroCopy)),
            XskError::Unsupported { what: "zero-copy mode", .. }
        ));
        assert!(matches!(open(ifindex, 0, new().fill(8192)), XskError::Pages { want: 8192, got: 4096 }));
        assert!(matches!(umem.open(ifindex, 0, other.clone(), new()).unwrap_err(), XskError::Provider));
        // After each of these all pages are back: this uses most of them.
        let pair = umem.open(ifindex, 0, memory.clone(), new().fill(4000)).unwrap();
        assert!(matches!(
            other_umem.open(ifindex, 0, other.clone(), new()).unwrap_err(),
            XskError::Busy { queue: 0, .. }
        ));
        drop(pair);
        // A socket that was closed just now is waited for.
        drop(other_umem.open(ifindex, 0, other, new()).unwrap());
    });
}
