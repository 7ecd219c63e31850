//! A stack whose payload is in device memory, its device, and the [`Peer`] at the other end of its
//! streams.
//!
//! ```text
//!   Lane: streams, stack, driver ── Card: device, peer
//! ```
//!
//! The device and the stack take turns: [`Card::turn`] lets the device move all that it can. A lane
//! stays on its thread. The card may be on the same thread or on another one: see [`Turns`].

use super::peer::{OURS, PORT, Peer};
use super::rig::{HEADER_PAGES, Memory, PAGES, unavailable};
use crate::error::BenchError;
use netmem::device::port::PortError;
use netmem::device::{Connection, NetDevice, Options};
use netmem::pool::PoolOptions;
use netmem::refs::Worker;
use netmem::tcp::{Address, Config, Host, Interface, ListenOptions, Stack, StackOptions, Time};
use netmem::virtio::{NetOptions, QueueWait, RxMode, VhostUser, VirtioNet, VirtioRxQueues, VirtioSplitTx, feature};
use netmem_devmem::stream::{Bindings, DeviceStream, InFlight, OnDevice, StreamRx, StreamTx, Streams};
use netmem_devmem::{Binding, BindingCount, Netdev};
use std::hint::spin_loop;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long streams may take to connect, data to arrive, and a turn to end.
const PATIENCE: Duration = Duration::from_secs(20);
/// Passes of the device in a turn. Two are usual: one that moves everything, and one that finds
/// nothing.
const PASSES: usize = 64;

/// Waits in a spin until `done`. `what` is what is waited for.
pub(super) fn wait(done: impl Fn() -> bool, what: &'static str) -> Result<(), BenchError> {
    let (begin, mut idle) = (Instant::now(), 0);
    while !done() {
        pause(&mut idle);
        late(begin, what)?;
    }
    Ok(())
}

/// Passes a moment in a spin. Once in a while, the thread yields its CPU to another one, which may
/// be the thread that is waited for.
pub(super) fn pause(idle: &mut u32) {
    *idle += 1;
    if idle.is_multiple_of(256) { std::thread::yield_now() } else { spin_loop() }
}

/// An error if too much time has passed since `begin`.
pub(super) fn late(begin: Instant, what: &'static str) -> Result<(), BenchError> {
    if begin.elapsed() > PATIENCE { Err(BenchError::Late(what)) } else { Ok(()) }
}

/// The streams of a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) flows: usize,
    /// Bytes of a segment that the peer sends.
    pub(super) len: usize,
    /// Page order of the device memory.
    pub(super) order: u8,
    /// Whether a segment may be longer than the MSS, with offloads.
    pub(super) large: bool,
    /// Pages of the binding that are reserved for the ring and for data that is in flight.
    pub(super) reserve: usize,
}

/// A device with one queue pair, whose port is the peer.
pub(super) struct Card {
    device: NetDevice<Peer>,
    _connection: Connection,
}

impl Card {
    /// A device, and the driver's end of its connection.
    pub(super) fn new(shape: Shape) -> Result<(Self, UnixStream), BenchError> {
        let mut peer = Some(Peer::new(shape.flows, shape.len)?);
        // The device asks for a port for each of its queue pairs. It has one.
        let port = |_| peer.take().ok_or_else(|| PortError::Other("a second queue pair".into()));
        let withhold = if shape.large { 0 } else { feature::HOST_TSO4 | feature::HOST_TSO6 };
        let device = NetDevice::new(Options { withhold, ..Options::default() }, port).map_err(unavailable)?;
        let (ours, theirs) = UnixStream::pair().map_err(unavailable)?;
        let connection = device.control().serve(theirs).map_err(unavailable)?;
        Ok((Self { device, _connection: connection }, ours))
    }

    /// Lets the device move what it can. From now on, each flow of the peer may have sent `due`
    /// segments in all.
    pub(super) fn turn(&mut self, due: u64) {
        self.device.ports()[0].due = due;
        for _ in 0..PASSES {
            if self.device.poll() == 0 {
                break;
            }
        }
    }
}

/// Turns of a card on another thread.
#[derive(Debug, Default)]
pub(super) struct Turns {
    due: AtomicU64,
    /// Whether it is the device's turn.
    device: AtomicBool,
}

impl Turns {
    /// Lets the device run once, and waits for its end.
    pub(super) fn turn(&self, due: u64) -> Result<(), BenchError> {
        self.due.store(due, Ordering::Relaxed);
        self.device.store(true, Ordering::Release);
        wait(|| !self.device.load(Ordering::Acquire), "the end of the device's turn")
    }

    /// Serves the device on this thread, until `ended` is set.
    pub(super) fn serve(&self, card: &mut Card, ended: &AtomicBool) {
        let mut idle = 0;
        while !ended.load(Ordering::Acquire) {
            if self.device.load(Ordering::Acquire) {
                card.turn(self.due.load(Ordering::Relaxed));
                self.device.store(false, Ordering::Release);
                idle = 0;
            } else {
                pause(&mut idle);
            }
        }
    }
}

/// A stack whose payload is in device memory.
type Near<C> = Stack<StreamRx<QueueWait, C>, StreamTx<VirtioSplitTx<InFlight<C>>, C>>;

/// Connected streams and their stack. Fields are dropped in their order.
pub(super) struct Lane<C: BindingCount> {
    /// In the order of the peer's flows.
    pub(super) streams: Vec<DeviceStream<C>>,
    pub(super) stack: Near<C>,
    _sockets: Streams<C>,
    _queues: Netdev<VirtioRxQueues>,
    net: VirtioNet,
    begin: Instant,
}

/// A binding of the suite's memory.
pub(super) fn bind<C: BindingCount>(memory: &Memory, order: u8) -> Result<Binding<C>, BenchError> {
    let worker = Arc::new(Worker::new("netmem-cleanup").map_err(unavailable)?);
    Binding::<C>::counted(memory.file()?, order, &worker).map_err(unavailable)
}

impl<C: BindingCount> Lane<C> {
    /// Connects a lane. `device` lets the device run once.
    pub(super) fn new(
        binding: &Binding<C>,
        shape: Shape,
        ours: UnixStream,
        mut device: impl FnMut() -> Result<(), BenchError>,
    ) -> Result<Self, BenchError> {
        let mode = if shape.large { RxMode::Big } else { RxMode::Small };
        let options = NetOptions::new(mode).tx_pages(HEADER_PAGES).device_memory(binding.region().clone());
        let backend = VhostUser::own_device(ours).map_err(unavailable)?;
        let (net, pairs) = VirtioNet::probe(backend, options).map_err(unavailable)?;
        let pair = pairs.into_iter().next().ok_or(BenchError::NoPage("a queue pair"))?;
        let queues = VirtioRxQueues::new([pair.rx]);
        let bindings = Bindings::new();
        bindings.add(binding);
        let rx = StreamRx::new(queues.wait(0).ok_or(BenchError::NoPage("a queue"))?, &bindings);
        let mut queues = Netdev::new(queues);
        queues.attach(binding, &[0]).map_err(unavailable)?;
        let tx = StreamTx::new(pair.tx.into_split(), net.domain().ok_or(BenchError::NoPage("a domain"))?);
        let headers = net.tx_pool(PoolOptions::new("tx-headers")).map(Arc::new).map_err(unavailable)?;
        let address = Address { addr: OURS.1.into(), prefix_len: 24 };
        let host = Host::<OnDevice<C>>::new(Interface { mac: OURS.0, mtu: 1500, addresses: vec![address] });
        let pages = ((PAGES >> shape.order) - shape.reserve) as u32;
        let options = StackOptions { pages, ..StackOptions::default() };
        let mut stack = Stack::new(&host, rx, tx, headers, options, Time::ZERO).map_err(unavailable)?;
        let sockets = Streams::new(&mut stack);
        let connection = Config { fixed_window: true, ..Config::default() };
        let listen = ListenOptions { connection, ..ListenOptions::default() };
        let mut listener = sockets.listen(SocketAddr::new(OURS.1.into(), PORT), listen).map_err(unavailable)?;
        let (begin, mut streams) = (Instant::now(), Vec::with_capacity(shape.flows));
        while streams.len() < shape.flows {
            device()?;
            stack.poll(Time::ZERO + begin.elapsed());
            streams.extend(listener.accept());
            late(begin, "a connection")?;
        }
        streams.sort_by_key(|stream| stream.tcp().peer_addr().port());
        for stream in &mut streams {
            // Every range that is sent ends with a segment.
            stream.tcp_mut().set_nodelay(true);
            stream.tcp_mut().set_send_buffer(16 << 20);
        }
        let (_sockets, _queues) = (sockets, queues);
        Ok(Self { streams, stack, _sockets, _queues, net, begin })
    }

    /// The features that the stack's driver and its device have negotiated.
    pub(super) fn features(&self) -> u64 {
        self.net.features()
    }

    pub(super) fn now(&self) -> Time {
        Time::ZERO + self.begin.elapsed()
    }
}
