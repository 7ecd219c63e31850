//! A soak of AF_XDP under faults. A veth pair with two queues has traffic in both directions, in
//! frames with sequence numbers, while links go down and up, the interface is deleted and made
//! again, its number of queues changes, queues are opened again, rings are full, packets are held,
//! and processes with queues are killed. After each round the counters and pages agree:
//!
//! * No frame came twice, neither here nor at the peer.
//! * Each frame that was sent came to the program or to the kernel, or is in a counter. (While a
//!   link is down, and while queues or interfaces go, the kernel drops frames and counts none: then
//!   no more frames came than were sent.)
//! * Each page is with the kernel, in the pool, or held, and each that is held is named.
//! * No program of a process that was killed is on its interface.
//!
//! Seconds by default. `NETMEM_XSK_SOAK_SECS` sets how long (600 before a release), and
//! `NETMEM_XSK_SOAK_SEED` repeats a run's faults.
#![allow(clippy::unwrap_used)]

use fastrand::Rng;
use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::{KernelShared, RegionProvider};
use netmem_testing::namespace::{in_namespace, ip};
use netmem_testing::xsk::{Raw, frame, index, memory, name, until, veth};
use netmem_xsk::{
    ClosedQueue, Interface, InterfaceState, Program, ProgramOptions, QueueOptions, UmemOptions, XskError, XskRx, XskTx,
    reclaim,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const QUEUES: u32 = 2;
/// Chunks that the kernel has of each queue.
const LEVEL: u32 = 64;
/// Pages of the region: two openings of each queue, and what is held.
const PAGES: usize = 512;
/// The most packets that are held over the end of a round.
const HELD: usize = 40;
/// The interface whose queue a process has that is killed.
const CHILD: &str = "NETMEM_XSK_CHILD";

/// Of one queue, the RX ring is full first; of the other one, the kernel runs out of chunks.
fn options(queue: u32) -> QueueOptions {
    let ring = if queue == 0 { LEVEL / 2 } else { LEVEL * 2 };
    QueueOptions::new().fill(LEVEL).rx_ring(ring).tx_ring(64).cache(32)
}

/// The sequence number of a frame.
fn number(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[14..22].try_into().unwrap())
}

/// The sequence numbers that came.
#[derive(Default)]
struct Seen {
    all: Vec<u64>,
    n: u64,
}

impl Seen {
    #[track_caller]
    fn see(&mut self, number: u64, of: &str) {
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        self.all.resize(self.all.len().max(word + 1), 0);
        assert_eq!(self.all[word] & bit, 0, "frame {number} came twice {of}");
        self.all[word] |= bit;
        self.n += 1;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// A link is set down and up: ours or the peer's.
    Link,
    /// The interface is deleted and made again.
    Deleted,
    /// The interface has one queue for a while.
    Queues,
    /// A queue is closed and opened again.
    Reopened,
    /// The queues are not polled.
    Full,
    /// A process with a queue is killed.
    Killed,
}

const FAULTS: [Fault; 6] = [Fault::Link, Fault::Deleted, Fault::Queues, Fault::Reopened, Fault::Full, Fault::Killed];

impl Fault {
    /// Whether each frame is counted nevertheless.
    fn is_exact(self) -> bool {
        matches!(self, Self::Reopened | Self::Full | Self::Killed)
    }
}

/// The queues and everything that they use.
struct Soak {
    rng: Rng,
    ours: String,
    theirs: String,
    /// The interface of the processes that are killed, and its other end.
    killed: (String, String),
    memory: Arc<RegionProvider<KernelShared>>,
    program: Option<Program>,
    queues: Vec<Option<(XskRx, XskTx)>>,
    peer: Arc<Raw>,
    /// The kernel's side of our interface.
    kernel: Raw,
    held: Vec<Packet<KernelShared>>,
    /// Frames that the sender has sent.
    sent: Arc<AtomicU64>,
    /// Frames of the peer that came here, and our echoes that came to the peer.
    here: Seen,
    there: Seen,
    /// Frames that came to the program, and that were sent back.
    delivered: u64,
    echoed: u64,
    done: BTreeMap<Fault, u64>,
}

impl Soak {
    fn new(seed: u64) -> Self {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, QUEUES, 1500);
        let killed = (name("k"), name("l"));
        veth(&killed.0, &killed.1, 1, 1500);
        let (memory, umem) = memory::<KernelShared>(PAGES, &UmemOptions::new());
        let program = Program::attach(index(&ours), &ProgramOptions::default()).unwrap();
        let queues = (0..QUEUES).map(|queue| {
            let (rx, tx) = umem.open(index(&ours), queue, memory.clone(), options(queue)).unwrap();
            program.insert(queue, rx.socket().as_fd()).unwrap();
            Some((rx, tx))
        });
        Self {
            queues: queues.collect(),
            rng: Rng::with_seed(seed),
            peer: Arc::new(Raw::new(&theirs)),
            kernel: Raw::new(&ours),
            program: Some(program),
            ours,
            theirs,
            killed,
            memory,
            held: Vec::new(),
            sent: Arc::default(),
            here: Seen::default(),
            there: Seen::default(),
            delivered: 0,
            echoed: 0,
            done: BTreeMap::new(),
        }
    }
}

impl Soak {
    /// Polls all queues once: frames are sent back, dropped, or held, and what came elsewhere is
    /// recorded.
    fn turn(&mut self) {
        let Self { rng, here, held, delivered, echoed, .. } = self;
        for (rx, tx) in self.queues.iter_mut().flatten() {
            rx.poll(|poll| {
                tx.complete();
                poll.receive(64, &mut |packet: Packet<KernelShared>| {
                    here.see(number(&packet.to_vec()), "here");
                    *delivered += 1;
                    match rng.u8(..8) {
                        0 => held.push(packet),
                        1..4 => *echoed += u64::from(tx.send(packet).is_ok()),
                        _ => {}
                    }
                });
                tx.flush();
            });
        }
        while let Some(bytes) = self.kernel.try_receive() {
            self.here.see(number(&bytes), "at the kernel");
        }
        while let Some(bytes) = self.peer.try_receive() {
            self.there.see(number(&bytes), "at the peer");
        }
        if self.held.len() > HELD {
            let rest = self.held.split_off(self.rng.usize(..HELD));
            // Packets return on other threads, too.
            if self.rng.bool() {
                thread::scope(|s| drop(s.spawn(move || drop(rest)).join()));
            }
        }
    }

    fn turns(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            self.turn();
        }
    }

    /// Closes a queue.
    fn close(&mut self, queue: usize) -> ClosedQueue {
        let (rx, tx) = self.queues[queue].take().unwrap();
        ClosedQueue::new(rx, tx).unwrap()
    }

    /// Opens a queue again, and puts its socket into the map, while the others go on.
    fn open(&mut self, queue: ClosedQueue) {
        let (number, mut closed) = (queue.queue(), Some(queue));
        let (rx, tx) = until("a free queue", || match closed.take().unwrap().reopen(options(number)) {
            Ok(queues) => Some(queues),
            Err(error) => {
                assert!(matches!(error.source, XskError::Busy { .. }), "{error}: {}", error.source);
                closed = Some(error.queue);
                self.turn();
                None
            }
        });
        self.program.as_ref().unwrap().insert(number, rx.socket().as_fd()).unwrap();
        self.queues[number as usize] = Some((rx, tx));
    }

    fn fault(&mut self, fault: Fault) {
        *self.done.entry(fault).or_default() += 1;
        let pause = Duration::from_millis(self.rng.u64(1..40));
        match fault {
            Fault::Link => self.link(pause),
            Fault::Deleted => self.delete(pause),
            Fault::Queues => self.change_queues(pause),
            Fault::Reopened => {
                let queue = self.rng.usize(..QUEUES as usize);
                let closed = self.close(queue);
                self.turns(pause);
                self.open(closed);
            }
            Fault::Full => thread::sleep(pause),
            Fault::Killed => self.kill(),
        }
    }

    fn link(&mut self, pause: Duration) {
        let end = if self.rng.bool() { self.ours.clone() } else { self.theirs.clone() };
        ip(&format!("link set {end} down"));
        let state = self.queues[0].as_ref().unwrap().0.socket().interface_state().unwrap();
        assert_eq!(state == InterfaceState::Down, end == self.ours, "{state:?}");
        self.turns(pause);
        if self.rng.bool() {
            let queue = self.rng.usize(..QUEUES as usize);
            let closed = self.close(queue);
            self.open(closed);
        }
        ip(&format!("link set {end} up"));
    }

    fn delete(&mut self, pause: Duration) {
        ip(&format!("link delete {}", self.ours));
        // A queue may be closed before it has noticed.
        if self.rng.bool() {
            for (rx, tx) in self.queues.iter_mut().flatten() {
                assert!(rx.socket().is_gone() && tx.socket().is_gone());
            }
        }
        // What was on its way to the peer when its end went.
        while let Some(bytes) = self.peer.try_receive() {
            self.there.see(number(&bytes), "at the peer");
        }
        self.program = None;
        let closed: Vec<_> = (0..QUEUES as usize).map(|queue| self.close(queue)).collect();
        let closed: Vec<_> = closed
            .into_iter()
            .map(|queue| {
                let number = queue.queue();
                let error = queue.reopen(options(number)).unwrap_err();
                assert!(matches!(error.source, XskError::NoInterface { .. }), "{}", error.source);
                error.queue
            })
            .collect();
        thread::sleep(pause);
        veth(&self.ours, &self.theirs, QUEUES, 1500);
        self.program = Some(Program::attach(index(&self.ours), &ProgramOptions::default()).unwrap());
        while let Some(bytes) = self.kernel.try_receive() {
            self.here.see(number(&bytes), "at the kernel");
        }
        (self.kernel, self.peer) = (Raw::new(&self.ours), Arc::new(Raw::new(&self.theirs)));
        closed.into_iter().for_each(|queue| self.open(queue));
    }

    /// The kernel takes no queue from a socket. A closed queue is refused while it is not in use.
    fn change_queues(&mut self, pause: Duration) {
        let channels = |interface: &str, n: u32| {
            let n = n.to_string();
            Command::new("ethtool").args(["-L", interface, "rx", &n, "tx", &n]).output().unwrap().status.success()
        };
        let (ours, theirs) = (self.ours.clone(), self.theirs.clone());
        // The peer may not send by more queues than an interface with a program receives by.
        assert!(channels(&theirs, 1));
        assert!(!channels(&ours, 1));
        let closed = self.close(1);
        until("fewer queues", || {
            self.turn();
            channels(&ours, 1).then_some(())
        });
        let error = closed.reopen(options(1)).unwrap_err();
        assert!(matches!(error.source, XskError::NoQueue { queue: 1, in_use: Some(1), .. }), "{}", error.source);
        self.turns(pause);
        assert!(channels(&ours, 2) && channels(&theirs, 2));
        self.open(error.queue);
    }

    /// Another process has a queue of another interface, and frames on their way, when it is
    /// killed.
    fn kill(&mut self) {
        let (interface, other) = self.killed.clone();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "a_process_that_is_killed", "--nocapture"]).env(CHILD, &interface);
        let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.map_while(Result::ok).any(|line| line.contains("the queue is open"));
        assert!(ready, "the process has ended: {:?}", child.wait());
        let raw = Raw::new(&other);
        let begun = Instant::now();
        let life = Duration::from_millis(self.rng.u64(1..60));
        while begun.elapsed() < life {
            let _ = raw.try_send(&frame(100, 1));
            while raw.try_receive().is_some() {}
            self.turn();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        until("an interface without a program", || {
            self.turn();
            Interface::by_name(&interface).unwrap().programs.is_empty().then_some(())
        });
    }

    /// Frames that were sent, came nowhere, and are in no counter.
    fn missing(&self) -> u64 {
        let lost: u64 = self.queues.iter().flatten().map(|(rx, _)| rx.drops().unwrap().frames()).sum();
        let (sent, came) = (self.sent.load(Relaxed), self.here.n);
        sent.checked_sub(came + lost).unwrap_or_else(|| panic!("{sent} frames were sent: {came} came, {lost} lost"))
    }

    /// A round: the peer sends, and something happens. Then the peer pauses, and the counters and
    /// pages are compared.
    fn round(&mut self) {
        let fault = FAULTS[self.rng.usize(..FAULTS.len())];
        let before = self.missing();
        let stop = Arc::new(AtomicBool::new(false));
        let (peer, flag, sent) = (self.peer.clone(), stop.clone(), self.sent.clone());
        let sender = thread::spawn(move || send(&peer, &flag, &sent));
        let stop = Stop(stop);
        self.turns(Duration::from_millis(20));
        self.fault(fault);
        self.turns(Duration::from_millis(20));
        drop(stop);
        sender.join().unwrap();
        if fault.is_exact() {
            until("all frames that were sent", || {
                self.turn();
                let missing = self.missing();
                assert!(missing >= before, "{fault:?}: {missing} {before}");
                (missing == before).then_some(())
            });
        } else {
            self.quiet();
        }
        self.balance();
        let keep = self.rng.usize(..=self.held.len());
        self.held.truncate(keep);
    }

    /// Polls until no frame has come for a while.
    fn quiet(&mut self) {
        let (mut before, mut since) = (self.here.n, Instant::now());
        while since.elapsed() < Duration::from_millis(30) {
            self.turn();
            if self.here.n != before {
                (before, since) = (self.here.n, Instant::now());
            }
        }
    }

    /// All pages are with the kernel, in a pool, or held, and those that are held are named.
    fn balance(&mut self) {
        until("completions, and chunks for the kernel", || {
            self.turn();
            let done = |(rx, tx): &(XskRx, XskTx)| tx.outstanding() == 0 && rx.posted() == LEVEL as usize;
            self.queues.iter().flatten().all(done).then_some(())
        });
        let (mut in_flight, mut named, mut frames) = (0, BTreeSet::new(), 0);
        for (rx, tx) in self.queues.iter_mut().flatten() {
            in_flight += rx.pool_stats().inflight();
            named.extend(rx.held_frames(Duration::ZERO).iter().map(|frame| frame.page));
            assert_eq!(tx.held_frames(Duration::ZERO), []);
            let (received, sent) = (rx.stats(), tx.stats());
            assert_eq!((received.stopped, sent.stopped), (None, None));
            assert_eq!(sent.descriptors, sent.completed + sent.unconfirmed, "{sent:?}");
            frames += received.passed;
        }
        assert_eq!(frames, self.delivered);
        assert!(self.there.n <= self.echoed);
        assert_eq!(in_flight, u64::from(QUEUES * LEVEL) + self.held.len() as u64);
        let region = self.memory.region();
        let held: BTreeSet<_> = self.held.iter().map(|packet| region.index_of(packet.head()).unwrap()).collect();
        assert_eq!(named, held);
    }

    /// Everything ends: no program is left, and all pages are back.
    fn end(mut self) {
        self.held.clear();
        let lost: Vec<_> =
            self.queues.iter().flatten().flat_map(|(rx, _)| rx.drops().unwrap().causes().collect::<Vec<_>>()).collect();
        eprintln!(
            "{:?}: {} frames sent, {} came, {} to the program, {} lost uncounted; lost by cause {lost:?}; {} sent back, {} at the peer",
            self.done,
            self.sent.load(Relaxed),
            self.here.n,
            self.delivered,
            self.missing(),
            self.echoed,
            self.there.n
        );
        drop((self.queues, self.program));
        for interface in [&self.ours, &self.theirs, &self.killed.0] {
            assert_eq!(Interface::by_name(interface).unwrap().programs, [], "{interface}");
        }
        ip(&format!("link delete {}", self.ours));
        reclaim();
        assert_eq!(std::iter::from_fn(|| self.memory.page()).collect::<Vec<_>>().len(), PAGES);
    }
}

/// Ends the sender, also if an assertion fails.
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends numbered frames in bursts. What the interface refuses is not sent.
fn send(peer: &Raw, stop: &AtomicBool, sent: &AtomicU64) {
    let mut bytes = frame(100, 0);
    while !stop.load(Relaxed) {
        for _ in 0..32 {
            let number = sent.load(Relaxed);
            bytes[14..22].copy_from_slice(&number.to_be_bytes());
            sent.store(number + u64::from(peer.try_send(&bytes).is_ok()), Relaxed);
        }
        thread::sleep(Duration::from_micros(300));
    }
}

#[test]
fn counters_and_pages_agree_under_faults() {
    let variable = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    let time = Duration::from_secs(variable("NETMEM_XSK_SOAK_SECS").unwrap_or(5));
    let seed = variable("NETMEM_XSK_SOAK_SEED").unwrap_or_else(|| Rng::new().u64(..));
    eprintln!("NETMEM_XSK_SOAK_SEED={seed}");
    in_namespace(|| {
        let mut soak = Soak::new(seed);
        let start = Instant::now();
        while start.elapsed() < time {
            soak.round();
        }
        soak.end();
    });
}

/// The process that is killed: it has a queue of an interface, and sends back what comes.
#[test]
fn a_process_that_is_killed() {
    let Ok(interface) = std::env::var(CHILD) else { return };
    let (memory, umem) = memory::<KernelShared>(256, &UmemOptions::new());
    let (mut rx, mut tx) =
        until("a free queue", || match umem.open(index(&interface), 0, memory.clone(), options(0)) {
            Err(XskError::Busy { .. }) => None,
            other => Some(other.unwrap()),
        });
    let program = Program::attach(index(&interface), &ProgramOptions::default()).unwrap();
    program.insert(0, rx.socket().as_fd()).unwrap();
    println!("the queue is open");
    loop {
        rx.poll(|poll| {
            tx.complete();
            poll.receive(64, &mut |packet: Packet<KernelShared>| drop(tx.send(packet)));
            tx.flush();
        });
    }
}
