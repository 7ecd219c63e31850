//! Flows that are steered between queues of two bindings while they are received, checked byte by
//! byte and given back.
//!
//! ```text
//!                          ┌► queue 0 ─► binding ─┐               ┌► the receiver ─► the returning
//!   numbered datagrams ────┤   ▲  steered, restarted               │  compares           thread
//!   as many as were seen   └► queue 1 ─► binding ─┴─► 6 sockets ──┘
//!   and a window           ▲                                      │
//!                          └──────────────────────────────────────┘
//! ```

use crate::memory_common::{Memory, all, interface, until, worker};
use crate::net_common::{Harness, InTests};
use netmem_devmem::{
    Binding, BindingRef, FlowQueue, FlowStats, FlowTable, Fragment, Netdev, Received, RecvError, Returner, Socket,
    SocketOptions, Token, TokenRange,
};
use netmem_packet::{Packet, Poll, RxQueue};
use netmem_pool::PeerShared;
use netmem_testing::flows::{Ends, FIRST_PORT, Flows, number, payload};
use netmem_virtio::device::port::Steering;
use netmem_virtio::driver::{EitherRx, SplitOptions, VirtioRxQueues};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

const FLOWS: u64 = 6;
/// The most datagrams in flight. They are more than the device keeps for a queue, so it then waits
/// for the queue. Sockets have room for as many, so none is dropped there.
const WINDOW: u64 = 1024;
/// The datagrams that may be sent for each turn of the thread that steers, so that they do not pass
/// while this thread gets no CPU time.
const TURN: u64 = 256;
/// The number of tokens that are held before some are given back.
const HELD: usize = 200;

/// Runs one such test at a time: six threads poll, and a device that gets no CPU time answers no
/// message.
static CPUS: Mutex<()> = Mutex::new(());

/// The tokens that users hold. A token of a socket belongs to one page, and a page is held once.
#[derive(Default)]
struct Held {
    tokens: HashMap<(usize, Token), (u64, u64)>,
    pages: HashSet<(u64, u64)>,
}

impl Held {
    #[track_caller]
    fn take(&mut self, socket: usize, token: Token, page: (u64, u64)) {
        assert_eq!(self.tokens.insert((socket, token), page), None, "a token belongs to two pages");
        assert!(self.pages.insert(page), "a page was received into while it was held");
    }

    fn put(&mut self, socket: usize, token: Token) {
        let page = self.tokens.remove(&(socket, token)).expect("it is held");
        assert!(self.pages.remove(&page));
    }
}

/// Receives on all sockets, and compares.
struct User<'a> {
    sockets: &'a mut [Socket],
    memories: &'a HashMap<u64, Memory>,
    held: &'a Mutex<Held>,
    back: mpsc::Sender<(usize, Token)>,
    /// For each datagram by number, the id of its binding; 0 if it is in host memory only.
    seen: HashMap<u64, u64>,
}

impl User<'_> {
    /// Receives all queued datagrams. Returns how many there were.
    #[track_caller]
    fn receive(&mut self) -> u64 {
        (0..self.sockets.len()).map(|socket| (0..).take_while(|_| self.datagram(socket)).count() as u64).sum()
    }

    #[track_caller]
    fn datagram(&mut self, socket: usize) -> bool {
        let (mut bytes, mut into, mut end) = (Vec::new(), 0, false);
        let mut peer = None;
        while !end {
            // Receive every third datagram in parts.
            let mut out = [Fragment::Empty, Fragment::Empty];
            let room = if self.seen.len().is_multiple_of(3) { 1 } else { 2 };
            let received = match self.sockets[socket].recv(&mut out[..room]) {
                Ok(received) => received,
                Err(error) => {
                    assert!(error == RecvError::Empty && bytes.is_empty(), "{error}");
                    return false;
                }
            };
            let Received { fragments, verified, .. } = received;
            assert!(verified && (1..=room).contains(&fragments));
            (end, peer) = (received.end, Some(received.peer));
            for fragment in out.into_iter().take(fragments) {
                let at = bytes.len();
                match fragment {
                    Fragment::Linear(host) => {
                        bytes.resize(at + host.len(), 0);
                        host.copy_to(0, &mut bytes[at..]).expect("all of it");
                    }
                    Fragment::Device { binding, offset, len, token } => {
                        bytes.resize(at + len as usize, 0);
                        self.memories[&binding].read_exact_at(&mut bytes[at..], offset).expect("it is there");
                        self.held.lock().expect("it is ours").take(socket, token, (binding, offset / 4096));
                        self.back.send((socket, token)).expect("it is given back");
                        into = binding;
                    }
                    Fragment::Empty => panic!("nothing was received, and counted"),
                }
            }
        }
        let n = u64::from_le_bytes(*bytes.first_chunk().expect("a number"));
        assert!(bytes == payload(n), "datagram {n} is not as it was sent");
        assert_eq!(socket as u64, n % FLOWS, "datagram {n} is another socket's");
        assert_eq!(peer.map(|p| p.is_ipv6()), Some(n.is_multiple_of(3)));
        assert_eq!(self.seen.insert(n, into), None, "datagram {n} came twice");
        true
    }
}

/// Returns tokens in random order, except the last ones. Returns those.
fn return_tokens(
    returners: &[Returner<BindingRef>],
    held: &Mutex<Held>,
    tokens: &mpsc::Receiver<(usize, Token)>,
) -> Vec<(usize, Token)> {
    let (mut rng, mut mine) = (fastrand::Rng::with_seed(7), Vec::new());
    for token in tokens {
        mine.push(token);
        if mine.len() < HELD {
            continue;
        }
        rng.shuffle(&mut mine);
        let some = mine.split_off(rng.usize(..HELD - 1));
        for (socket, returner) in returners.iter().enumerate() {
            let ranges: Vec<TokenRange> = some.iter().filter(|t| t.0 == socket).map(|t| t.1.into()).collect();
            // Note it before the page can be received into again.
            let mut held = held.lock().expect("it is ours");
            some.iter().filter(|t| t.0 == socket).for_each(|t| held.put(socket, t.1));
            drop(held);
            for ranges in ranges.chunks(128) {
                assert_eq!(returner.return_tokens(ranges), Ok(ranges.len()));
            }
        }
    }
    mine
}

/// Two queues, of which each may receive into one of two bindings, and sockets.
struct Bench {
    harness: Harness,
    steering: Steering,
    limit: Arc<AtomicU64>,
    memories: HashMap<u64, Memory>,
    bindings: [Binding; 2],
    table: FlowTable,
    /// The handler with which each queue is polled.
    into: [Mutex<Option<FlowQueue>>; 2],
    sockets: Vec<Socket>,
    _alone: MutexGuard<'static, ()>,
}

impl Bench {
    /// Makes bindings with `pages` pages each.
    fn new(pages: usize) -> Self {
        let alone = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let (worker, limit, steering) = (worker(), Arc::new(AtomicU64::new(0)), Steering::new());
        let memories = [Memory::pages(pages), Memory::pages(pages)];
        let bindings = memories.each_ref().map(|memory| Binding::new(memory.fd(), 0, &worker).expect("a binding"));
        let ports = steering.spread(Flows::new(FLOWS, limit.clone()), 2).unwrap();
        let harness: Harness = Harness::new(ports, &[bindings[0].region(), bindings[1].region()], SplitOptions::UDP_V6);
        let table = FlowTable::new(interface([4; 6], &["10.9.8.7", "fefe:fefe:fefe:fefe:fefe:fefe:fefe:fefe"]));
        let options = SocketOptions::new().queue(WINDOW as usize);
        let sockets = (0..FLOWS).map(|flow| table.bind(all(FIRST_PORT + flow as u16), &options).expect("a port"));
        let sockets = sockets.collect();
        let memories = bindings.iter().map(|b| b.id()).zip(memories).collect();
        Self { harness, steering, limit, memories, bindings, table, into: Default::default(), sockets, _alone: alone }
    }

    /// Steers, receives and returns tokens until `frames` datagrams have come or are known to be
    /// lost. Meanwhile `restart` runs on a thread of its own. It calls a function that waits until
    /// a number of datagrams have come, and lets few more come until the next call. Returns what
    /// was received.
    fn run(&mut self, frames: u64, restart: impl FnOnce(&mut Attached<'_>, &dyn Fn(u64)) + Send) -> Outcome {
        let Self { harness, steering, limit, memories, bindings, table, into, sockets, .. } = self;
        let (queues, control) = (harness.queues(), harness.control());
        let mut attached = Attached { net: &mut harness.net, bindings, table, into };
        (0..2).for_each(|queue| attached.attach(queue, queue));
        let returners: Vec<_> = sockets.iter().map(Socket::returner).collect();
        let (seen, on_host) = (AtomicU64::new(0), Mutex::new(Vec::new()));
        let (held, stop) = (Mutex::default(), AtomicBool::new(false));
        let (back, tokens) = mpsc::channel();
        let mut user = User { sockets, memories, held: &held, back, seen: HashMap::new() };
        // Each datagram was received, or a restart or the device has counted it as lost.
        let accounted = {
            let (queues, steering, seen) = (queues.clone(), steering.clone(), &seen);
            move || seen.load(Relaxed) + queues.unread() + steering.dropped()
        };
        // The turns of the thread that steers, and how many datagrams the thread that restarts
        // allows.
        let (turns, allowed) = (AtomicU64::new(0), AtomicU64::new(0));
        let (seen, on_host, held, stop, accounted) = (&seen, &on_host, &held, &stop, &accounted);
        let (turns, allowed) = (&turns, &allowed);
        let (datagrams, kept) = thread::scope(|s| {
            for (queue, into) in into.iter().enumerate() {
                let queues = queues.clone();
                s.spawn(move || {
                    until(|| {
                        let numbers = poll(&queues, queue, into);
                        seen.fetch_add(numbers.len() as u64, Relaxed);
                        on_host.lock().unwrap().extend(numbers);
                        stop.load(Relaxed)
                    });
                });
            }
            let steers = steering.clone();
            s.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(3);
                until(|| {
                    // Make many changes, concurrently with the device and not between its passes.
                    for _ in 0..1000 {
                        steers.steer(FIRST_PORT + rng.u16(..FLOWS as u16), rng.u8(..2));
                    }
                    turns.fetch_add(1, Relaxed);
                    stop.load(Relaxed)
                });
            });
            let restarts = s.spawn(move || {
                restart(&mut attached, &|come| {
                    // More than it waits for, so that they are in flight when it goes on.
                    allowed.store(come + WINDOW / 2, Relaxed);
                    until(|| accounted() >= come);
                });
                allowed.store(frames, Relaxed);
            });
            let gives = s.spawn(move || return_tokens(&returners, held, &tokens));
            let ends = Ends(stop);
            until(|| {
                seen.fetch_add(user.receive(), Relaxed);
                let so_far = accounted();
                let paced = allowed.load(Relaxed).min(TURN * turns.load(Relaxed));
                let upto = frames.min(so_far + WINDOW).min(paced);
                if limit.swap(upto, Relaxed) != upto {
                    // The device may have found no frames, and sleep.
                    control.wake();
                }
                so_far == frames
            });
            restarts.join().unwrap();
            drop(ends);
            let User { back, seen, .. } = user;
            drop(back);
            (seen, gives.join().unwrap())
        });
        let on_host = std::mem::take(&mut *on_host.lock().unwrap());
        Outcome { datagrams, on_host, kept }
    }

    /// Drops everything, with tokens out.
    fn close(self, outcome: Outcome) {
        let Self { mut harness, memories, bindings, into, sockets, .. } = self;
        let memory_of = bindings.each_ref().map(Binding::reference);
        drop(into);
        for binding in bindings {
            harness.net.unbind(binding).unwrap();
        }
        assert_eq!(memory_of.each_ref().map(|m| m.stats().queues), [0, 0]);
        let in_use = || memory_of.iter().map(|m| m.stats().in_use).sum::<u64>();
        assert_eq!(in_use(), outcome.kept.len() as u64, "only held pages are out");
        for (socket, token) in outcome.kept {
            assert_eq!(sockets[socket].returner().return_tokens(&[token.into()]), Ok(1));
        }
        assert_eq!(in_use(), 0);
        for socket in &sockets {
            socket.release_drained();
            let s = socket.stats();
            assert_eq!((s.bindings, s.queued, s.foreign, s.excess), (0, 0, 0, 0), "{s:?}");
        }
        drop((sockets, memory_of, harness));
        memories.values().for_each(Memory::assert_gone);
    }
}

/// Attaches queues to bindings, and detaches them.
struct Attached<'a> {
    net: &'a mut Netdev<VirtioRxQueues>,
    bindings: &'a [Binding; 2],
    table: &'a FlowTable,
    into: &'a [Mutex<Option<FlowQueue>>; 2],
}

impl Attached<'_> {
    fn attach(&mut self, queue: usize, binding: usize) {
        let binding = &self.bindings[binding];
        self.net.attach(binding, &[queue]).expect("the device goes on");
        *self.into[queue].lock().expect("it is ours") = Some(self.table.queue(binding));
    }

    fn detach(&mut self, queue: usize) {
        assert!(self.net.detach(queue).expect("the device goes on"));
        *self.into[queue].lock().expect("it is ours") = None;
    }
}

/// What a run has received.
struct Outcome {
    /// The binding of each datagram, by number.
    datagrams: HashMap<u64, u64>,
    /// The numbers of datagrams that came through queues without a binding.
    on_host: Vec<u64>,
    /// Tokens that were not given back.
    kept: Vec<(usize, Token)>,
}

impl Outcome {
    /// How often each flow has changed from one binding to another.
    fn changes(&self) -> Vec<u64> {
        let mut changes = vec![0; FLOWS as usize];
        for (&n, into) in self.datagrams.iter().filter(|(_, into)| **into != 0) {
            let next = self.datagrams.get(&(n + FLOWS));
            changes[(n % FLOWS) as usize] += u64::from(next.is_some_and(|next| *next != 0 && next != into));
        }
        changes
    }
}

/// Polls a queue in its present state. Returns the numbers of the frames that came into host
/// memory.
fn poll(queues: &VirtioRxQueues, queue: usize, into: &Mutex<Option<FlowQueue>>) -> Vec<u64> {
    let mut numbers = Vec::new();
    let mut into = into.lock().expect("it is ours");
    match (&mut *queues.queue(queue), into.as_mut()) {
        (EitherRx::Split(rx), Some(into)) => _ = rx.poll(|poll| poll.receive(64, into)),
        (EitherRx::Host(rx), _) => {
            let mut handler = |p: Packet<PeerShared>| numbers.push(number(&p.to_vec(), FLOWS));
            rx.poll(|poll| poll.receive(64, &mut handler));
        }
        // The queue was attached a moment ago.
        (EitherRx::Split(_), None) => {}
        (EitherRx::Stopped, _) => panic!("a restart has failed"),
    }
    numbers
}

/// Proves MEM-4, MEM-3 and MEM-6: six sockets receive from two bindings, and their flows are
/// steered between the queues all the time. Every datagram arrives once, and its bytes are where
/// the socket reports them. No token belongs to two pages, while another thread returns tokens. Then both
/// bindings are unbound with tokens out, and drain.
#[test]
fn flows_are_steered_between_bindings() {
    const FRAMES: u64 = 30_000;
    // So few pages that queues run out of them now and then.
    let mut bench = Bench::new(400);
    let outcome = bench.run(FRAMES, |_, _| {});
    assert!((0..FRAMES).all(|n| outcome.datagrams.contains_key(&n)) && outcome.on_host.is_empty());
    assert_eq!((outcome.datagrams.len() as u64, bench.steering.dropped()), (FRAMES, 0));
    assert_eq!(bench.table.stats(), FlowStats::default());
    let changes = outcome.changes();
    println!("changes of binding by flow: {changes:?}");
    assert!(changes.iter().all(|&n| n > 10), "{changes:?}");
    for (flow, socket) in bench.sockets.iter().enumerate() {
        let of = |binding: &Binding| {
            let mine =
                outcome.datagrams.iter().filter(|(n, into)| **n % FLOWS == flow as u64 && **into == binding.id());
            mine.count() as u64
        };
        let (by_binding, s) = (bench.bindings.each_ref().map(of), socket.stats());
        assert!(by_binding.iter().all(|&n| n > 100), "both are used: {by_binding:?}");
        assert_eq!((s.fragments, s.bindings), (by_binding.iter().sum(), 2), "{s:?}");
        assert_eq!((s.queue_full, s.unverified, s.headers_in_device), (0, 0, 0), "{s:?}");
    }
    bench.close(outcome);
}

/// Proves MEM-1 and MEM-4: the same while the queues are detached and attached again, each to its
/// own binding or both to one. Every frame that does not arrive was counted as unread by a restart,
/// or as dropped by the device while a queue was not served. Frames of a queue without a binding
/// are complete, too.
#[test]
fn queues_are_restarted_meanwhile() {
    const FRAMES: u64 = 30_000;
    const ROUNDS: u64 = 24;
    // There are enough pages to fill the ring of a queue that was just attached, also if the other
    // queue has the same binding.
    let mut bench = Bench::new(2048);
    let outcome = bench.run(FRAMES, |attached, come| {
        let mut rng = fastrand::Rng::with_seed(9);
        // Frames come in all states: each state lasts until a number of further frames has come.
        let wait = |round| come(round * FRAMES / ROUNDS);
        for round in (0..ROUNDS).step_by(2) {
            let queue = rng.usize(..2);
            wait(round);
            attached.detach(queue);
            wait(round + 1);
            attached.attach(queue, rng.usize(..2));
        }
    });
    let (came, on_host) = (outcome.datagrams.len() as u64, outcome.on_host.len() as u64);
    let (unread, dropped) = (bench.harness.queues().unread(), bench.steering.dropped());
    println!("{came} came, {on_host} without a binding, {unread} unread, {dropped} dropped");
    assert_eq!(came + on_host + unread + dropped, FRAMES);
    assert!(came > FRAMES / 4 && on_host > FRAMES / 100, "{came} and {on_host}");
    let twice = outcome.on_host.iter().find(|n| outcome.datagrams.contains_key(n));
    assert_eq!(twice, None, "it came twice");
    assert_eq!(outcome.on_host.iter().collect::<HashSet<_>>().len() as u64, on_host);
    assert_eq!(bench.table.stats(), FlowStats::default());
    assert!(bench.sockets.iter().all(|s| s.stats().queue_full == 0));
    bench.close(outcome);
}
