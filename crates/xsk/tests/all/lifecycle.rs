//! The leak hunt: frames are held, returned from everywhere, and in flight when a socket, an
//! interface or a process ends. What is sent is what is received and named counters, and every page
//! is accounted for.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Armed, Handler, Packet, Poll, RxQueue, TxQueue, Verdict, Wait, XdpFrame};
use netmem_pool::{KernelShared, PagePool, PoolClosed, PoolOptions, RegionProvider, lingering};
use netmem_testing::namespace::{command, in_namespace, in_peer_namespace, ip, nics};
use netmem_testing::xsk;
use netmem_testing::xsk::{Harness, Raw, frame, index, memory, name, on_wire, reopen, until, veth, wire};
use netmem_xsk::{
    AttachError, AttachMode, Fault, Filter, Interface, InterfaceState, Program, ProgramOptions, QueueOptions, Rule,
    Umem, UmemOptions, XskError, XskRx, XskTx, reclaim,
};
use std::cell::Cell;
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Frames that an interface did not pass on when they were sent.
fn send_drops(interface: &str) -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{interface}:"))).unwrap();
    line.split_whitespace().nth(11).unwrap().parse().unwrap()
}

/// Everything that went out came back, or was quarantined.
#[track_caller]
fn assert_closed(closed: &PoolClosed) {
    assert_eq!((closed.outstanding, closed.stats.inflight()), (0, 0), "{closed:?}");
}

/// Frames that were lost on the way from the interface `theirs` to the queue, by the kernel's
/// counters.
fn lost(rx: &XskRx, theirs: &str) -> u64 {
    let kernel = rx.socket().kernel_stats().unwrap();
    assert_eq!(kernel.rx_invalid, 0);
    kernel.rx_dropped + kernel.rx_ring_full + send_drops(theirs)
}

/// Polls until each of `sent` frames was received, or is in a counter of the kernel: it may deliver
/// them late. `received` returns how many the handler got so far.
#[track_caller]
fn drain(
    rx: &mut XskRx,
    theirs: &str,
    sent: u64,
    mut packet: impl FnMut(Packet<KernelShared>),
    received: impl Fn() -> u64,
) {
    until("all frames that were sent", || {
        rx.poll(|poll| poll.receive(256, &mut packet));
        (received() + lost(rx, theirs) >= sent).then_some(())
    });
}

/// Proves XSK-1: pages are dropped at once, held for a second, and returned from eight threads,
/// under traffic. All come home, and each frame that was sent was received, or is in a counter.
#[test]
fn pages_come_home_from_eight_threads() {
    in_namespace(|| {
        let mut harness = Harness::new(8192, 1500, &UmemOptions::new().chunk(2048), QueueOptions::new());
        let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let received = thread::scope(|s| {
            let holders: Vec<_> = (0..8u64)
                .map(|i| {
                    let (give, take) = mpsc::channel::<Packet<KernelShared>>();
                    s.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(i);
                        let mut held = Vec::new();
                        for packet in take {
                            match random.u8(0..4) {
                                0 => drop(packet),
                                1 => held.push(packet.clone()),
                                _ => held.push(packet),
                            }
                            if held.len() > 100 {
                                thread::sleep(Duration::from_millis(random.u64(0..30)));
                                held.drain(..random.usize(0..100)).for_each(drop);
                            }
                        }
                        thread::sleep(Duration::from_secs(1));
                    });
                    give
                })
                .collect();
            let (peer, stop, sent) = (&harness.peer, &stop, &sent);
            let sender = s.spawn(move || {
                let mut i = 0;
                while !stop.load(Ordering::Relaxed) {
                    // One without room is counted as dropped.
                    peer.offer(&frame(60 + i as usize % 1400, i));
                    i += 1;
                    sent.store(i, Ordering::Relaxed);
                }
            });
            let stop = Stop(stop);
            let (rx, start, n) = (&mut harness.rx, Instant::now(), Cell::new(0));
            let mut hand = |packet: Packet<KernelShared>| {
                n.set(n.get() + 1);
                if n.get() % 5 == 0 {
                    drop(packet);
                } else {
                    holders[n.get() % 8].send(packet).unwrap();
                }
            };
            while start.elapsed() < Duration::from_secs(1) {
                rx.poll(|poll| poll.receive(64, &mut hand));
            }
            drop(stop);
            sender.join().unwrap();
            drain(rx, &harness.theirs, sent.load(Ordering::Relaxed), hand, || n.get() as u64);
            n.get() as u64
        });
        let stats = harness.rx.stats();
        assert_eq!((stats.frames, stats.passed, stats.stopped), (received, received, None));
        assert_eq!(sent.into_inner(), received + lost(&harness.rx, &harness.theirs), "{stats:?}");
        // The level is there again.
        until("chunks for the kernel", || {
            harness.rx.poll(|poll| poll.receive(1, &mut |packet: Packet<_>| drop(packet)));
            (harness.rx.posted() == harness.rx.fill_level()).then_some(())
        });
        // A chunk is half a page, and a page is out while one of its halves is; one page is being
        // cut.
        let pages = harness.rx.posted() as u64 / 2;
        assert!((pages..=2 * pages + 1).contains(&harness.rx.pool_stats().inflight()), "{:?}", harness.rx.pool_stats());
        let Harness { rx, tx, ours, .. } = harness;
        let closed = rx.close().unwrap();
        assert_closed(&closed);
        assert!((pages..=2 * pages).contains(&closed.stats.quarantined), "{closed:?}");
        drop(tx);
        assert!(!lingering().iter().any(|pool| pool.name.starts_with(&ours)), "{:?}", lingering());
    });
}

/// Frames of random bytes and every length.
#[test]
fn random_frames_of_every_length() {
    in_namespace(|| {
        let mut harness = Harness::new(4096, 3000, &UmemOptions::new().chunk(2048), QueueOptions::new());
        let mut random = fastrand::Rng::with_seed(5);
        let (mut sent, mut dropped) = (Vec::<Vec<u8>>::new(), 0);
        let next = Cell::new(0);
        let mut lengths: Vec<usize> = (14..3014).collect();
        random.shuffle(&mut lengths);
        let compare = |packet: Packet<KernelShared>, sent: &[Vec<u8>]| {
            assert_eq!(packet.to_vec(), sent[next.get()]);
            next.set(next.get() + 1);
        };
        for len in lengths {
            sent.push((0..len).map(|_| random.u8(..)).collect());
            until("room for the frame", || {
                let gone = harness.peer.offer(&sent[sent.len() - 1]);
                dropped += u64::from(!gone);
                harness.rx.poll(|poll| poll.receive(64, &mut |packet: Packet<_>| compare(packet, &sent)));
                gone.then_some(())
            });
        }
        let all = sent.len() as u64;
        drain(&mut harness.rx, &harness.theirs, all + dropped, |packet| compare(packet, &sent), || next.get() as u64);
        // Those that the interface had no room for were sent again.
        assert_eq!((next.get(), lost(&harness.rx, &harness.theirs)), (sent.len(), dropped));
        assert_eq!(harness.rx.stats().frames, all);
    });
}

/// Traffic in both directions, until it is stopped. Frames are sent from pages of their own, and
/// echoed.
struct Traffic {
    rx: XskRx,
    tx: XskTx,
    echoed: u64,
}

impl Traffic {
    fn turn(&mut self) {
        let Self { rx, tx, echoed } = self;
        rx.poll(|poll| {
            tx.complete();
            poll.receive(64, &mut |packet: Packet<KernelShared>| {
                *echoed += u64::from(tx.send(packet).is_ok());
            });
            tx.flush();
        });
    }

    /// Closes both halves, in either order.
    #[track_caller]
    fn close(self, rx_first: bool) -> PoolClosed {
        let Self { rx, tx, .. } = self;
        if rx_first {
            let closed = rx.close().unwrap();
            drop(tx);
            closed
        } else {
            drop(tx);
            rx.close().unwrap()
        }
    }
}

/// Ends the thread that polls the flag, also if the test panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `test` while the peer sends.
fn under_traffic(peer: &Raw, test: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            let mut i = 0;
            while !stop.load(Ordering::Relaxed) {
                // Refused while the interface is down or gone.
                let _ = peer.try_send(&frame(60 + i as usize % 1400, i));
                i += 1;
                while peer.try_receive().is_some() {}
                if i % 64 == 0 {
                    thread::sleep(Duration::from_micros(500));
                }
            }
        });
        let _stop = Stop(&stop);
        test();
    });
}

/// Sockets are closed while frames are in flight, and opened again on the same UMEM: nothing is
/// lost, and all pages but those that the kernel had are used again.
#[test]
fn sockets_are_closed_with_frames_in_flight() {
    in_namespace(|| {
        let (ours, theirs) = wire(1500);
        let peer = Raw::new(&theirs);
        let program = Program::attach(index(&ours), &ProgramOptions::default()).unwrap();
        let (memory, umem) = memory::<KernelShared>(16384, &UmemOptions::new());
        let (mut quarantined, mut echoed) = (0, 0);
        // Each consumes the chunks that the kernel has, which are more for a NIC: as many as its
        // ring has entries, and a quarter more.
        let rounds = if nics().is_some() { 10 } else { 20 };
        under_traffic(&peer, || {
            for round in 0..rounds {
                let options = || on_wire(QueueOptions::new().fill(256));
                let (rx, tx) = reopen(&ours, &umem, &memory, options).unwrap();
                program.insert(0, rx.socket().as_fd()).unwrap();
                let level = rx.fill_level() as u64;
                let mut traffic = Traffic { rx, tx, echoed: 0 };
                while traffic.echoed < 200 {
                    traffic.turn();
                }
                echoed += traffic.echoed;
                let before = umem.held();
                let closed = traffic.close(round % 2 == 0);
                quarantined += closed.stats.quarantined;
                // What was being sent is held by the UMEM, and not lost. Some of it completes when
                // the transmit queue ends last.
                let held = (umem.held() - before) as u64;
                assert!(
                    held == closed.outstanding || round % 2 == 0 && held < closed.outstanding,
                    "{closed:?}, {held}"
                );
                assert!(closed.stats.quarantined <= level + 64, "{closed:?}");
            }
        });
        assert!(quarantined > 0 && echoed >= rounds * 200);
        let all = Arc::downgrade(memory.region());
        drop((memory, umem, program));
        until("the end of all pools", || {
            // Frames that the peer has not received keep their pages.
            while peer.try_receive().is_some() {}
            reclaim();
            all.upgrade().is_none().then_some(())
        });
    });
}

/// Proves XSK-1: a queue is opened many times on memory for two openings. The pages that the kernel
/// had return when it lets the queue be bound again. `NETMEM_OPENINGS` sets how often.
#[test]
fn a_queue_is_opened_many_times_on_a_small_region() {
    let openings = std::env::var("NETMEM_OPENINGS").map_or(100, |openings| openings.parse().unwrap());
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let peer = Raw::new(&theirs);
        let (memory, umem) = memory::<KernelShared>(160, &UmemOptions::new());
        for i in 0..openings {
            let options = || QueueOptions::new().fill(64).rx_ring(64).tx_ring(64).cache(0);
            let (rx, mut tx) = reopen(&ours, &umem, &memory, options).unwrap();
            assert_eq!((rx.posted(), umem.held()), (64, 0), "opening {i}");
            tx.send(Packet::new(memory.page().unwrap().freeze_range(0..60))).unwrap();
            tx.flush();
            assert_eq!(peer.receive().len(), 60);
            let closed = rx.close().unwrap();
            assert_eq!((closed.stats.quarantined, closed.outstanding), (64, 0));
        }
        drop(reopen(&ours, &umem, &memory, || QueueOptions::new().fill(64).cache(0)).unwrap());
        let rest: Vec<_> = std::iter::from_fn(|| memory.page()).collect();
        assert_eq!(rest.len(), 160 - 64);
    });
}

/// The queues end while frames are in the ring, and the kernel has the socket still, because
/// another descriptor of it is open. The pages are kept, also beyond the end of the UMEM, and
/// return when the kernel has released the queue.
#[test]
fn sent_pages_are_kept_until_the_kernel_has_released_the_queue() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let (memory, umem) = memory::<KernelShared>(1024, &UmemOptions::new());
        let mut pool = PoolOptions::new("tx").build(memory.clone(), Some(umem.domain())).unwrap();
        let options = || QueueOptions::new().fill(64).cache(0);
        let close = |pool: &mut PagePool<_>| {
            let (rx, mut tx) = reopen(&ours, &umem, &memory, options).unwrap();
            assert_eq!((pool.stats().inflight(), umem.held()), (0, 0));
            // While it is down, the kernel sends no frames.
            ip(&format!("link set {ours} down"));
            for _ in 0..10 {
                tx.send(Packet::new(pool.alloc().unwrap().freeze_range(0..60))).unwrap();
            }
            tx.flush();
            let other = tx.socket().as_fd().try_clone_to_owned().unwrap();
            drop((tx, rx));
            ip(&format!("link set {ours} up"));
            assert_eq!((pool.stats().inflight(), umem.held()), (10, 10));
            other
        };
        let other = close(&mut pool);
        let busy = umem.open(index(&ours), 0, memory.clone(), options()).unwrap_err();
        assert!(matches!(busy, XskError::Busy { .. }), "{busy}");
        assert_eq!(umem.held(), 10);
        drop(other);
        let other = close(&mut pool);
        drop(umem);
        assert_eq!(pool.stats().inflight(), 10);
        assert!(reclaim() >= 10);
        drop(other);
        until("the queue's release", || {
            reclaim();
            (pool.stats().inflight() == 0).then_some(())
        });
    });
}

/// The interface is set down and up again under traffic: the queues go on.
#[test]
fn an_interface_that_is_down_for_a_while() {
    in_namespace(|| {
        let harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new());
        let Harness { peer, rx, tx, ours, program, .. } = harness;
        let mut traffic = Traffic { rx, tx, echoed: 0 };
        under_traffic(&peer, || {
            for _ in 0..5 {
                let goal = traffic.echoed + 200;
                while traffic.echoed < goal {
                    traffic.turn();
                }
                ip(&format!("link set {ours} down"));
                let mut pool_page = None;
                for _ in 0..50 {
                    traffic.turn();
                    pool_page = traffic.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).or(pool_page);
                    // One of our own, so that there is something to send.
                    if let Some(page) = pool_page.take() {
                        let _ = traffic.tx.send(Packet::new(page.freeze_range(0..60)));
                    }
                    traffic.tx.flush();
                }
                ip(&format!("link set {ours} up"));
            }
            assert!(traffic.tx.stats().down > 0);
            assert_eq!((traffic.rx.stats().stopped, traffic.tx.stats().stopped), (None, None));
        });
        until("completions", || {
            traffic.turn();
            while peer.try_receive().is_some() {}
            (traffic.tx.outstanding() == 0).then_some(())
        });
        assert_eq!(traffic.rx.pool_stats().inflight(), traffic.rx.posted() as u64);
        drop(program);
        assert_closed(&traffic.close(true));
    });
}

/// The interface goes under traffic: deleted, or moved to another namespace. Both queues stop, and
/// name the reason.
#[test]
fn an_interface_that_goes() {
    for moved in [false, true] {
        in_namespace(|| {
            let harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new());
            let Harness { peer, rx, tx, ours, program, umem, memory, .. } = harness;
            let mut traffic = Traffic { rx, tx, echoed: 0 };
            // The namespace that the interface is moved to lasts until the queues have ended.
            let (done, wait) = mpsc::channel::<()>();
            let mut other = None;
            under_traffic(&peer, || {
                while traffic.echoed < 500 {
                    traffic.turn();
                }
                if moved {
                    other = Some(in_peer_namespace(&ours, move || _ = wait.recv()));
                } else {
                    ip(&format!("link delete {ours}"));
                }
                until("the queues' end", || {
                    traffic.turn();
                    let tx = &mut traffic.tx;
                    if tx.stats().stopped.is_none()
                        && let Some(page) = memory.page()
                    {
                        let _ = tx.send(Packet::new(page.freeze_range(0..60)));
                        tx.flush();
                    }
                    let (rx, tx) = (traffic.rx.stats().stopped, traffic.tx.stats().stopped);
                    (rx.is_some() && tx.is_some()).then(|| assert_eq!((rx, tx), (Some(Fault::Gone), Some(Fault::Gone))))
                });
            });
            drop(done);
            other.into_iter().for_each(|other| other.join().unwrap());
            drop(program);
            let before = umem.held() as u64;
            assert_eq!(before, 0);
            let out = traffic.tx.outstanding();
            let closed = traffic.close(moved);
            assert!(closed.outstanding <= out as u64, "{closed:?}, {out} out");
            let all = Arc::downgrade(memory.region());
            drop((memory, umem));
            until("the end of all pools", || {
                reclaim();
                all.upgrade().is_none().then_some(())
            });
        });
    }
}

/// The interface is set down and up, then deleted or moved to another namespace: the socket reports
/// each state by name. A thread of another namespace gets an error while the socket is bound.
#[test]
fn the_state_of_the_interface_is_reported() {
    for deleted in [false, true] {
        in_namespace(|| {
            let harness = Harness::new(1024, 1500, &UmemOptions::new(), QueueOptions::new().fill(64));
            let (ours, socket) = (&harness.ours, harness.rx.socket());
            let steps = [("up", InterfaceState::Up), ("down", InterfaceState::Down), ("up", InterfaceState::Up)];
            for (change, state) in steps {
                ip(&format!("link set {ours} {change}"));
                assert_eq!(socket.interface_state().unwrap(), state);
            }
            let (done, wait) = mpsc::channel::<()>();
            let (tell, told) = mpsc::channel();
            thread::scope(|s| {
                // It ends the other thread also if an assertion fails.
                let done = done;
                let other = s.spawn(move || {
                    // SAFETY: as in `in_namespace`.
                    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
                    let refused = socket.interface_state().map_err(|error| error.kind());
                    // SAFETY: has no condition.
                    tell.send((unsafe { libc::gettid() }, refused)).unwrap();
                    let _ = wait.recv();
                    socket.interface_state().unwrap()
                });
                let (tid, refused) = told.recv().unwrap();
                assert_eq!(refused, Err(ErrorKind::Unsupported));
                ip(&if deleted { format!("link delete {ours}") } else { format!("link set {ours} netns {tid}") });
                assert_eq!(socket.interface_state().unwrap(), InterfaceState::Gone);
                drop(done);
                assert_eq!(other.join().unwrap(), InterfaceState::Gone);
            });
        });
    }
}

/// Another process wants the interface under traffic: it attaches a program in either mode, or
/// detaches ours as `ip` does. It is refused each time. The queues notice nothing, and each frame
/// is received or counted.
#[test]
fn another_process_wants_the_interface() {
    in_namespace(|| {
        let mut harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new());
        let ours = harness.ours.clone();
        let before = Interface::by_name(&ours).unwrap().programs;
        let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let received = Cell::new(0);
        let count = |packet: Packet<KernelShared>| {
            received.set(received.get() + 1);
            drop(packet);
        };
        thread::scope(|s| {
            let (peer, flag, sent) = (&harness.peer, &stop, &sent);
            s.spawn(move || {
                while !flag.load(Ordering::Relaxed) {
                    let i = sent.load(Ordering::Relaxed);
                    // One without room is counted as dropped.
                    peer.offer(&frame(60 + i as usize % 1400, i));
                    sent.store(i + 1, Ordering::Relaxed);
                }
            });
            let others = s.spawn(|| {
                for _ in 0..5 {
                    let mut child = Command::new(std::env::current_exe().unwrap());
                    child.args(["--exact", "lifecycle::attaching_child", "--nocapture"]).env("NETMEM_XSK_CHILD", &ours);
                    let said = String::from_utf8(child.output().unwrap().stdout).unwrap();
                    assert_eq!(said.matches("interface is taken by netmem_xsk").count(), 2, "{said}");
                    for mode in ["xdp", "xdpdrv", "xdpgeneric"] {
                        let off = Command::new("ip").args(["link", "set", "dev", &ours, mode, "off"]).output().unwrap();
                        // In the other mode there is nothing to detach.
                        assert!(mode == "xdpgeneric" || !off.status.success(), "{mode}: {off:?}");
                    }
                }
            });
            let stop = Stop(&stop);
            while !others.is_finished() {
                harness.rx.poll(|poll| poll.receive(64, &mut |packet: Packet<_>| count(packet)));
            }
            drop(stop);
        });
        let sent = sent.into_inner();
        drain(&mut harness.rx, &harness.theirs, sent, count, || received.get());
        let received = received.get();
        assert_eq!(Interface::by_name(&ours).unwrap().programs, before);
        let stats = harness.rx.stats();
        assert!(received > 0 && (stats.frames, stats.stopped) == (received, None), "{stats:?}");
        assert_eq!(sent, received + lost(&harness.rx, &harness.theirs));
        let Harness { rx, tx, program, .. } = harness;
        drop((program, tx));
        assert_closed(&rx.close().unwrap());
    });
}

/// The other process: it tries to attach a program, in each mode.
#[test]
fn attaching_child() {
    let Ok(interface) = std::env::var("NETMEM_XSK_CHILD") else { return };
    for mode in [AttachMode::Driver, AttachMode::Generic] {
        match Program::attach(index(&interface), &ProgramOptions { mode: Some(mode), ..ProgramOptions::default() }) {
            Err(AttachError::Occupied { name, .. }) => println!("interface is taken by {}", name.unwrap()),
            other => println!("{other:?}"),
        }
    }
}

/// The program on the interface is exchanged for one that redirects no frames, and put back, again
/// and again. Meanwhile the kernel has the frames: the queue receives nothing, goes on, and keeps
/// all chunks.
#[test]
fn a_program_without_our_frames_comes_and_goes() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let (peer, kernel) = (Raw::new(&theirs), Raw::new(&ours));
        let program = Program::attach(index(&ours), &ProgramOptions::default()).unwrap();
        let (memory, umem) = memory::<KernelShared>(4096, &UmemOptions::new());
        let (mut rx, tx) = umem.open(index(&ours), 0, memory, QueueOptions::new()).unwrap();
        program.insert(0, rx.socket().as_fd()).unwrap();
        let nothing = Rule { protocol: Some(253), ..Rule::default() };
        let mut frames = 0;
        for round in 0..10 {
            let taken = round % 2 == 0;
            let filter = if taken { Filter::default() } else { Filter::new([nothing]).unwrap() };
            program.set_filter(&filter).unwrap();
            for i in 0..100 {
                let sent = frame(60 + i, round * 100 + i as u64);
                peer.send(&sent);
                if taken {
                    assert_eq!(xsk::receive(&mut rx).to_vec(), sent);
                    assert_eq!(kernel.try_receive(), None);
                } else {
                    assert_eq!(kernel.receive(), sent);
                }
            }
            frames += if taken { 100 } else { 0 };
            rx.poll(|poll| poll.receive(64, &mut |_: Packet<_>| panic!("a frame of the kernel's")));
            assert_eq!((rx.stats().frames, rx.stats().stopped), (frames, None));
            assert_eq!(rx.posted(), rx.fill_level());
        }
        // It goes for good.
        drop(program);
        assert_eq!(Interface::by_name(&ours).unwrap().programs, []);
        peer.send(&frame(60, 1));
        assert_eq!(kernel.receive(), frame(60, 1));
        drop(tx);
        assert_closed(&rx.close().unwrap());
    });
}

/// A queue that is only sent from has chunks for the driver all the same, and frames that come in
/// use up none.
#[test]
fn a_queue_that_only_sends_is_filled() {
    in_namespace(|| {
        let mut harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new().fill(512).rx_ring(64));
        let mut pool = harness.pool(256);
        for i in 0..2000 {
            harness.peer.send(&frame(60, i));
            let mut page = pool.alloc().unwrap();
            page.copy_from(0, &frame(60, !i)).unwrap();
            harness.send(Packet::new(page.freeze_range(0..60)));
            assert_eq!(harness.peer.receive(), frame(60, !i));
        }
        assert_eq!(harness.rx.posted(), 512);
        let kernel = until("all frames", || {
            let kernel = harness.rx.socket().kernel_stats().unwrap();
            (kernel.rx_ring_full >= 2000 - 64).then_some(kernel)
        });
        assert_eq!((kernel.rx_ring_full, kernel.rx_fill_empty), (2000 - 64, 0));
        // It can receive at any time.
        for n in 0..64 {
            assert_eq!(harness.receive().to_vec(), frame(60, n));
        }
        harness.rx.poll(|poll| poll.receive(64, &mut |_: Packet<_>| panic!("there were 64")));
    });
}

/// Lost frames are counted once, by cause: a full ring, no chunk, and the program's verdicts. What
/// was sent is what was delivered and what was lost.
#[test]
fn lost_frames_are_counted_by_cause() {
    struct Thirds(u64);
    impl Handler<KernelShared> for Thirds {
        fn run(&mut self, frame: &mut XdpFrame<KernelShared>) -> Verdict {
            assert_eq!(frame.len(), 60);
            self.0 += 1;
            [Verdict::Drop, Verdict::Aborted, Verdict::Pass][self.0 as usize % 3]
        }

        fn pass(&mut self, _: Packet<KernelShared>) {}
    }

    // (chunks in the fill ring, entries of the RX ring)
    for (fill, ring) in [(256, 64), (64, 256)] {
        in_namespace(|| {
            let options = QueueOptions::new().fill(fill).rx_ring(ring);
            let mut harness = Harness::new(4096, 1500, &UmemOptions::new(), options);
            (0..200).for_each(|i| harness.peer.send(&frame(60, i)));
            let drops = until("the frames that there is no room for", || {
                let drops = harness.rx.drops().unwrap();
                (drops.frames() >= 200 - 64).then_some(drops)
            });
            let cause = if ring == 64 { "ring_full" } else { "no_buffer" };
            assert_eq!(drops.causes().collect::<Vec<_>>(), [(cause, 200 - 64)]);
            let mut thirds = Thirds(0);
            until("the frames that are in the ring", || {
                harness.rx.poll(|poll| poll.receive(64, &mut thirds));
                (harness.rx.stats().frames == 64).then_some(())
            });
            let drops = harness.rx.drops().unwrap();
            assert_eq!((drops.program, drops.aborted), (21, 22));
            assert_eq!(harness.rx.stats().passed + drops.frames(), 200);
        });
    }
}

/// Each half can go first, and to another thread.
#[test]
fn the_halves_of_a_socket_part() {
    in_namespace(|| {
        let harness = Harness::new(8192, 1500, &UmemOptions::new(), QueueOptions::new().fill(256));
        let Harness { peer, rx, mut tx, program, umem, memory, .. } = harness;
        let level = rx.fill_level() as u64;
        let closed = thread::spawn(move || rx.close().unwrap()).join().unwrap();
        assert_eq!((closed.stats.quarantined, closed.outstanding), (level, 0));
        let mut pool = PoolOptions::new("tx").build(memory.clone(), Some(umem.domain())).unwrap();
        for i in 0..100 {
            let mut page = pool.alloc().unwrap();
            page.copy_from(0, &frame(60, i)).unwrap();
            tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
            tx.flush();
            assert_eq!(peer.receive(), frame(60, i));
            tx.complete();
        }
        drop((tx, program));
        drop(umem);
        assert_eq!(pool.stats().inflight(), 0);
    });
}

/// The receive queue ends before the transmit queue: the socket leaves the program's map, so that
/// the kernel gets the frames from then on, and those that were not polled return to their pool.
#[test]
fn a_receive_queue_that_ends_alone_leaves_the_map() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let (peer, kernel) = (Raw::new(&theirs), Raw::new(&ours));
        let program = Program::attach(index(&ours), &ProgramOptions::default()).unwrap();
        let (memory, umem) = memory::<KernelShared>(4096, &UmemOptions::new());
        let options = QueueOptions::new().fill(64);
        let (mut rx, mut tx) = umem.open(index(&ours), 0, memory.clone(), options).unwrap();
        program.insert(0, rx.socket().as_fd()).unwrap();
        for _ in 0..2 {
            peer.send(&frame(60, 1));
        }
        until("frames that are not polled", || {
            let stats = rx.socket().kernel_stats().unwrap();
            assert_eq!(stats.rx_dropped + stats.rx_ring_full, 0);
            (rx.arm().unwrap() == Armed::Work).then_some(())
        });
        assert_eq!(kernel.try_receive(), None);
        thread::spawn(move || assert_closed(&rx.close().unwrap())).join().unwrap();
        for i in 0..100 {
            peer.send(&frame(60, i));
            assert_eq!(kernel.receive(), frame(60, i));
        }
        // The transmit queue goes on.
        let page = memory.page().unwrap();
        tx.send(Packet::new(page.freeze_range(0..60))).unwrap();
        tx.flush();
        assert_eq!(peer.receive().len(), 60);
    });
}

/// The process that is killed: it echoes, until it is.
#[test]
fn child() {
    let Ok(interface) = std::env::var("NETMEM_XSK_CHILD") else { return };
    let ifindex = index(&interface);
    let (memory, umem): (Arc<RegionProvider<KernelShared>>, Umem<_>) = memory(4096, &UmemOptions::new());
    let program = Program::attach(ifindex, &ProgramOptions::default()).unwrap();
    let (rx, tx) = reopen(&interface, &umem, &memory, || on_wire(QueueOptions::new().fill(512))).unwrap();
    program.insert(0, rx.socket().as_fd()).unwrap();
    let mut traffic = Traffic { rx, tx, echoed: 0 };
    println!("the queue is open");
    loop {
        traffic.turn();
    }
}

/// Proves XSK-3 and XSK-1: a process that is killed at any moment leaves no program on the
/// interface and nothing bound to the queue: the next process starts as the first did.
/// `NETMEM_KILLS` sets how often.
#[test]
fn a_process_that_is_killed_leaves_nothing() {
    let kills = std::env::var("NETMEM_KILLS").map_or(100, |kills| kills.parse().unwrap());
    in_namespace(|| {
        let (ours, theirs) = wire(1500);
        let peer = Raw::new(&theirs);
        let mut random = fastrand::Rng::with_seed(7);
        under_traffic(&peer, || {
            for kill in 0..kills {
                let mut child = Command::new(std::env::current_exe().unwrap());
                child.args(["--exact", "lifecycle::child", "--nocapture"]).env("NETMEM_XSK_CHILD", &ours);
                let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
                // Every third is killed at any moment of its start.
                let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
                if kill % 3 != 2 {
                    assert!(
                        lines.any(|line| line.unwrap().ends_with("the queue is open")),
                        "the process {kill} started"
                    );
                }
                thread::sleep(Duration::from_micros(random.u64(0..30_000)));
                child.kill().unwrap();
                child.wait().unwrap();
                until("an interface without a program", || {
                    Interface::by_name(&ours).unwrap().programs.is_empty().then_some(())
                });
            }
        });
        // Nothing is left.
        let program = Program::attach(index(&ours), &ProgramOptions::default()).unwrap();
        let (memory, umem) = memory::<KernelShared>(4096, &UmemOptions::new());
        let (mut rx, _tx) = reopen(&ours, &umem, &memory, || on_wire(QueueOptions::new())).unwrap();
        program.insert(0, rx.socket().as_fd()).unwrap();
        peer.send(&frame(100, 1));
        assert_eq!(xsk::receive(&mut rx).len(), 100);
        command("ip link show");
    });
}
