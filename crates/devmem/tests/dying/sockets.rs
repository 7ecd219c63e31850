//! Devices that die with a binding's pages: posted, received and held, queued on a socket, or in
//! flight to be sent. Exactly the posted pages are lost, and they are not used again. All other
//! pages are returned, and all objects are released.

use crate::Count;
use crate::memory_common::{Memory, all, ours, recv, udp4, until, worker};
use netmem_devmem::{
    AttachError, Binding, BindingRef, Endpoint, FlowQueue, FlowTable, Fragment, Netdev, Pages, Queues, Sender, Socket,
    SocketOptions, TokenRange,
};
use netmem_packet::TxQueue;
use netmem_pool::{
    CountingDomain, Device as DeviceMemory, Direction, DmaDomain, PeerShared, PoolOptions, Provider, RegionOptions,
    RegionProvider, VhostDomain,
};
use netmem_testing::driver::hostile::{Behaviour, Hostile, WITHOUT_CONTROL};
use netmem_testing::permutations;
use netmem_virtio::driver::{
    NetOptions, QueuePair, QueuesError, RxClosed, RxMode, SplitClosed, SplitOptions, VirtioNet, VirtioRxQueues,
    VirtioSplitRx, VirtioSplitTx,
};
use netmem_virtio::net::VnetHdr;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

/// Pages of a binding.
const PAGES: u64 = 300;
/// Pages that a queue posts: a chain has two of the 256 descriptors of its ring.
const POSTED: u64 = 128;
const PORT: u16 = 9;

/// The receive queues of a device that dies when a certain queue is attached: at once, or at a
/// certain message.
struct Dying {
    queues: VirtioRxQueues,
    device: Rc<RefCell<Hostile>>,
    dies: Option<(usize, Option<&'static str>)>,
}

impl Queues for Dying {
    type Error = QueuesError;

    fn queues(&self) -> usize {
        self.queues.queues()
    }

    fn attach(&mut self, queue: usize, memory: Arc<dyn Provider<DeviceMemory>>) -> Result<(), QueuesError> {
        match self.dies.filter(|dies| dies.0 == queue) {
            Some((_, None)) => self.device.borrow_mut().kill(),
            Some((_, message)) => self.device.borrow().behave(|b| b.fail_at = message),
            None => {}
        }
        let attached = self.queues.attach(queue, memory);
        assert!(!matches!(attached, Err(QueuesError::Unchanged { .. })), "{attached:?}");
        attached
    }

    fn detach(&mut self, queue: usize) -> Result<(), QueuesError> {
        self.queues.detach(queue)
    }
}

/// The statistics of the pools of a queue that could not be detached.
#[track_caller]
fn closed(error: &QueuesError) -> SplitClosed {
    let QueuesError::Stopped { closed, .. } = error else { panic!("it had not stopped: {error:?}") };
    let RxClosed::Split(closed) = **closed else { panic!("it was not in device memory: {error:?}") };
    closed
}

/// The driver of a device, and the test in the place of the device.
struct Harness {
    net: Netdev<Dying>,
    tx: VirtioSplitTx<BindingRef>,
    _more: Vec<VirtioSplitTx<BindingRef>>,
    device: VirtioNet,
    host: Arc<RegionProvider<PeerShared>>,
}

/// The parts that stay after the driver is dropped.
struct Peer {
    device: Rc<RefCell<Hostile>>,
    domain: Arc<CountingDomain<VhostDomain>>,
}

fn probe(binding: &Binding, pairs: u16) -> (Harness, Peer) {
    let (device, backend) =
        Hostile::new(Behaviour { pairs: pairs.into(), features: WITHOUT_CONTROL, ..Behaviour::default() });
    let (device, seen) = (Rc::new(RefCell::new(device)), Arc::new(OnceLock::new()));
    let host = RegionProvider::new(RegionOptions::new(2048).huge_pages(false).build::<PeerShared>().unwrap());
    let keep = seen.clone();
    let options = NetOptions::new(RxMode::Small).pairs(pairs).memory(host.region().clone(), host.clone());
    let options = options.device_memory(binding.region().clone()).domain(move |table| {
        let domain = Arc::new(CountingDomain::new(table));
        assert!(keep.set(domain.clone()).is_ok());
        domain
    });
    let (net, all) = VirtioNet::probe(backend, options).unwrap();
    let (rx, mut more): (Vec<_>, Vec<_>) = all.into_iter().map(|QueuePair { rx, tx }| (rx, tx.into_split())).unzip();
    let peer = Peer { device, domain: seen.get().unwrap().clone() };
    let queues = Dying {
        queues: VirtioRxQueues::new(rx).header_bytes(SplitOptions::UDP_V4).cache(16),
        device: peer.device.clone(),
        dies: None,
    };
    (Harness { net: Netdev::new(queues), tx: more.remove(0), _more: more, device: net, host }, peer)
}

impl Harness {
    /// Calls `f` with the queue, which receives into device memory.
    #[track_caller]
    fn split<R>(&mut self, f: impl FnOnce(&mut VirtioSplitRx) -> R) -> R {
        let mut rx = self.net.queues_mut().queues.get(0).unwrap();
        f(rx.split().expect("it is in device memory"))
    }

    fn poll(&mut self, queue: &mut FlowQueue) -> usize {
        self.split(|rx| rx.poll(|poll| poll.receive(64, queue)))
    }

    fn sender(&self, binding: &Binding, peer: &Peer) -> Sender {
        let domain: Arc<dyn DmaDomain> = peer.domain.clone();
        let headers = PoolOptions::new("headers").build_shared(self.host.clone(), Some(domain.clone())).unwrap();
        let end = |mac, addr: &str| Endpoint { mac: [mac; 6], addr: addr.parse().unwrap() };
        Sender::new(binding, &domain, headers, end(2, "10.0.0.1:7"), end(4, "10.0.0.2:9")).unwrap()
    }
}

impl Peer {
    /// The device's address of the binding's first byte.
    fn base(&self, binding: &Binding) -> u64 {
        let (file, len) = (binding.region().fd().unwrap(), binding.region().len());
        let base = self.domain.map_file(file, 0, len, Direction::ToDevice).unwrap();
        self.domain.unmap(base, len);
        base
    }

    /// Checks that nothing of the driver is left, that nothing is mapped for the device, and that
    /// the file is closed.
    #[track_caller]
    fn assert_alone(self, memory: &Memory) {
        assert_eq!(self.domain.maps(), self.domain.unmaps());
        drop(self.domain);
        assert_eq!(memory.descriptors(), 1, "only the peer still has the file");
        drop(self.device);
        assert_eq!(memory.descriptors(), 0);
    }
}

/// A datagram's payload.
fn payload(seed: u8) -> Vec<u8> {
    (0..500_u16).map(|i| seed.wrapping_mul(37) ^ i as u8).collect()
}

/// A frame whose checksum the device has verified.
fn datagram(seed: u8) -> Vec<u8> {
    let mut bytes = udp4(PORT, 500);
    bytes[42..].copy_from_slice(&payload(seed));
    bytes
}

const VERIFIED: VnetHdr = VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN };

/// A datagram that a user holds.
struct Held {
    offset: u64,
    token: TokenRange,
    seed: u8,
}

impl Held {
    #[track_caller]
    fn receive(socket: &mut Socket, seed: u8) -> Self {
        let (received, [Fragment::Device { offset, len: 500, token, .. }, _]) = recv(socket) else {
            panic!("not in device memory")
        };
        assert!(received.verified);
        Self { offset, token: token.into(), seed }
    }

    #[track_caller]
    fn assert_whole(&self, memory: &Memory) {
        let mut bytes = [0; 500];
        memory.read_exact_at(&mut bytes, self.offset).unwrap();
        assert!(bytes[..] == payload(self.seed), "datagram {} is not as it was sent", self.seed);
    }

    fn page(&self) -> u64 {
        self.offset / 4096
    }
}

/// A device that has died with pages of a binding.
struct Scene {
    memory: Memory,
    binding: Binding,
    harness: Harness,
    peer: Peer,
    socket: Socket,
    queue: FlowQueue,
    sender: Sender,
    /// The received datagrams. Three more are queued on the socket, with numbers from 3 on.
    held: Vec<Held>,
    /// Pages that the device has. Two of them have a datagram that no poll will find.
    posted: BTreeSet<u64>,
}

impl Scene {
    fn new() -> Self {
        let (worker, memory) = (worker(), Memory::pages(PAGES as usize));
        let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
        let (mut harness, peer) = probe(&binding, 1);
        harness.net.attach(&binding, &[0]).unwrap();
        let table = FlowTable::new(ours());
        let (mut socket, mut queue) = (table.bind(all(PORT), &SocketOptions::new()).unwrap(), table.queue(&binding));
        let (mut sender, base) = (harness.sender(&binding, &peer), peer.base(&binding));
        let mut ring = peer.device.borrow().ring(0);
        for seed in 0..6 {
            peer.device.borrow().deliver_with(&mut ring, VERIFIED, &datagram(seed));
        }
        assert_eq!(harness.poll(&mut queue), 6);
        let held: Vec<_> = (0..3).map(|seed| Held::receive(&mut socket, seed)).collect();
        // In flight, to be sent.
        for n in 0..4 {
            sender.send(&mut harness.tx, &[(held[0].offset, 500), (n * 4096, 100)]).unwrap();
        }
        harness.tx.flush();
        let device = peer.device.borrow();
        assert_eq!((harness.tx.held(), device.ring(1).available()), (8, 4));
        let seen = ring.seen;
        let posted = std::iter::from_fn(|| ring.take()).map(|head| (ring_page(&device, head) - base) / 4096).collect();
        ring.seen = seen;
        // Arrived, but never polled.
        device.deliver_with(&mut ring, VERIFIED, &datagram(100));
        device.deliver_with(&mut ring, VERIFIED, &datagram(101));
        drop(device);
        peer.device.borrow_mut().kill();
        until(|| !harness.device.is_connected());
        Self { memory, binding, harness, peer, socket, queue, sender, held, posted }
    }
}

/// The address of the device page of the chain that begins at `head`.
fn ring_page(device: &Hostile, head: u16) -> u64 {
    device.ring(0).chain(head)[1].addr
}

/// Proves MEM-2 and POOL-11: a dead back end may write to the pages that it has for an unlimited
/// time. Pages that users hold, or that are queued, stay valid and are returned. The pages that the
/// device had are handed out to no pool, keep the binding from being drained, and are counted as
/// lost.
#[test]
fn a_backend_that_dies() {
    let count = Count::begin();
    let Scene { memory, binding, mut harness, peer, mut socket, queue, sender, held, posted } = Scene::new();
    assert_eq!((posted.len() as u64, harness.split(|rx| rx.posted()) as u64), (POSTED, POSTED));
    let error = harness.net.unbind(binding).unwrap_err();
    let detach = error.source.as_ref().unwrap();
    assert_eq!(detach.queue, 0);
    let closed = closed(&detach.source).device;
    let binding = *error.binding;
    assert_eq!((closed.stats.quarantined, closed.outstanding), (POSTED, 6));
    assert_eq!(
        closed.stats.mapped, closed.stats.unmapped,
        "all pages are unmapped for a device that is gone, also those that users hold"
    );
    assert_eq!(binding.stats().in_use, POSTED + 6);

    // The dead back end writes to all pages that were posted to it.
    let base = peer.base(&binding);
    posted.iter().for_each(|page| peer.device.borrow().write(base + page * 4096, &[0xee; 64]));
    let queued: Vec<_> = (3..6).map(|seed| Held::receive(&mut socket, seed)).collect();
    let all: Vec<_> = held.iter().chain(&queued).collect();
    all.iter().for_each(|held| held.assert_whole(&memory));

    // A pool that allocates pages of the binding gets all pages except those.
    let mut pool = PoolOptions::new("again").build(binding.provider(), None).unwrap();
    let pages: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
    let out: BTreeSet<_> = pages.iter().map(|page| u64::from(page.index())).collect();
    assert_eq!(out.len() as u64, PAGES - POSTED - 6);
    assert!(out.is_disjoint(&posted) && all.iter().all(|held| !out.contains(&held.page())));
    drop((pages, pool));

    let tokens: Vec<_> = all.iter().map(|held| held.token).collect();
    assert_eq!(socket.returner().return_tokens(&tokens), Ok(6));
    assert_eq!(binding.stats().in_use, POSTED);
    // No thread waits for the other pages, and the binding does not count as drained.
    let memory_of = binding.reference();
    drop((queue, harness));
    binding.unbind().expect("the device is gone, and its queues are, too");
    assert!(!memory_of.drained());
    assert_eq!((socket.release_drained(), socket.stats().bindings), (0, 1));
    drop((sender, memory_of));
    count.assert(0, 0);
    drop(socket);
    count.assert(1, POSTED);
    peer.assert_alone(&memory);
}

/// Proves MEM-2: lost pages are lost to that binding and not to the memory. If the memory is bound
/// again, all its pages can be used, also while a dead peer has it mapped.
#[test]
fn bound_again_after_a_death() {
    let count = Count::begin();
    let Scene { memory, binding, harness, peer: dead, socket, queue, sender, .. } = Scene::new();
    drop((harness, socket, queue, sender, binding));
    count.assert(1, POSTED);
    let worker = worker();
    let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
    let (mut harness, peer) = probe(&binding, 1);
    harness.net.attach(&binding, &[0]).unwrap();
    let table = FlowTable::new(ours());
    let (mut socket, mut queue) = (table.bind(all(PORT), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let (mut ring, mut held, mut pages) = (peer.device.borrow().ring(0), Vec::new(), BTreeSet::new());
    // The user holds as many datagrams as it can without starving the queue, and returns the oldest
    // first.
    for n in 0..2 * PAGES {
        peer.device.borrow().deliver_with(&mut ring, VERIFIED, &datagram(n as u8));
        assert_eq!(harness.poll(&mut queue), 1);
        held.push(Held::receive(&mut socket, n as u8));
        pages.insert(held[held.len() - 1].page());
        if held.len() as u64 == PAGES - POSTED {
            held.iter().for_each(|held| held.assert_whole(&memory));
            let tokens: Vec<_> = held.drain(..).map(|held| held.token).collect();
            tokens.chunks(100).for_each(|some| assert_eq!(socket.returner().return_tokens(some), Ok(some.len())));
        }
    }
    assert_eq!(pages.len() as u64, PAGES);
    drop((socket, queue));
    harness.net.unbind(binding).unwrap();
    drop(harness);
    count.assert(2, POSTED);
    drop(dead);
    peer.assert_alone(&memory);
}

/// Proves POOL-11 and MEM-2: after the death, all objects are dropped in every order, the socket on
/// another thread. The last one releases the binding.
#[test]
fn every_order_of_ends_after_a_death() {
    let count = Count::begin();
    for (n, order) in (0..).zip(permutations(4)) {
        let Scene { memory, binding, harness, peer, socket, queue, sender, held, .. } = Scene::new();
        let (mut binding, mut harness, mut socket) = (Some(binding), Some(harness), Some(socket));
        let mut users = Some((queue, sender));
        for part in order {
            count.assert(n, n * POSTED);
            match part {
                0 => drop(binding.take()),
                1 => drop(harness.take()),
                2 => {
                    held.iter().for_each(|held| held.assert_whole(&memory));
                    let socket = socket.take();
                    std::thread::spawn(move || drop(socket)).join().unwrap();
                }
                _ => drop(users.take()),
            }
        }
        count.assert(n + 1, (n + 1) * POSTED);
        peer.assert_alone(&memory);
    }
}

/// Proves MEM-1 and MEM-2: the device dies while the second of two queues is restarted. The first
/// queue cannot be detached again: the error names it, and it counts as attached until the binding
/// is unbound. The posted pages of both queues are lost.
#[test]
fn a_bind_whose_device_dies() {
    let (count, mut lost) = (Count::begin(), 0);
    let messages = ["SET_VRING_CALL", "SET_VRING_NUM", "SET_VRING_BASE", "SET_VRING_ADDR", "SET_VRING_KICK"];
    let messages = messages.into_iter().chain(["SET_VRING_ENABLE"]).map(|message| (Some(message), 2 * POSTED));
    // After the second ring was stopped, pages are posted to its successor. These belong to the
    // device, because the driver cannot know how far the device came.
    for (n, (message, had)) in (1..).zip(std::iter::once((None, POSTED)).chain(messages)) {
        let (worker, memory) = (worker(), Memory::pages(PAGES as usize));
        let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
        let (mut harness, peer) = probe(&binding, 2);
        harness.net.queues_mut().dies = Some((1, message));
        let error = harness.net.attach(&binding, &[0, 1]).unwrap_err();
        let AttachError::Restart { queue: 1, stuck, .. } = &error else { panic!("{message:?}: {error:?}") };
        assert_eq!(stuck.iter().map(|stuck| stuck.0).collect::<Vec<_>>(), [0]);
        assert!(error.to_string().contains("1 queues did not get their own back"), "{error}");
        until(|| !harness.device.is_connected());
        assert_eq!((harness.net.attached(0), harness.net.attached(1)), (Some(binding.id()), None));
        assert_eq!((binding.stats().queues, binding.stats().in_use), (1, had), "{message:?}");
        assert_eq!(closed(&stuck[0].1).device.stats.quarantined, POSTED);
        harness.net.unbind(binding).expect("a stopped queue receives nothing");
        drop(harness);
        lost += had;
        count.assert(n, lost);
        peer.assert_alone(&memory);
    }
}
