//! The count of a destination entry in a send path: a server like memcached, whose clients are all
//! at one address.
//!
//! ```text
//!   thread:  Clients (a port) ── device ── driver ── stack ── server ── the same way back        one of these for each thread
//!                                                     └── the host's destination entry for the clients, one for all threads
//! ```
//!
//! A datagram with an answer reads the entry twice: once for its source address and the path MTU,
//! and once when it is sent. A connection reads it once. Each lookup is a get, and later a put.
//! Requests are 100 `get` for each `set`; a connection has one request. Variants differ only in the
//! count. Each thread polls everything that belongs to it, so that threads share nothing else but
//! the directory of connections.

use super::rig::address;
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use anyhow::{Context, ensure};
use netmem::device::{Connection, NetDevice, Options};
use netmem::net::{Armed, Packet, TxQueue, Wait};
use netmem::pool::{Frag, PoolOptions, SharedPool};
use netmem::refs::Count;
use netmem::virtio::{NetOptions, QueuePair, RxMode, VhostUser, VirtioNet, VirtioRx, VirtioTx};
use netmem_inet::tcp::Carrier;
use netmem_inet::wire::Mac;
use netmem_inet::{
    Fragment, HeaderTicket, Host, Interface, ListenOptions, Payload, SocketError, Source, Stack, StackOptions,
    TcpListener, TcpStream, Transmit, UdpSocket, Unsent,
};
use netmem_measure::cpus::pin;
use netmem_measure::endpoint::{self, Clock, LARGE_FRAME, Mem};
use netmem_measure::threads::propagate;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::clients::{Clients, KEYS, PORT, Proto, VALUE, key};

/// Pages for headers and answers.
const SENT: usize = 2048;
/// Answers of each thread before the measurement begins.
const ENOUGH: u64 = 100;
/// The longest time until the first answers.
const PATIENCE: Duration = Duration::from_secs(60);

/// Payload in host memory, for stacks that count their destination entries with `C`.
struct Counted<C>(PhantomData<C>);

impl<C: Count> Carrier for Counted<C> {
    type Received = Frag<Mem>;
    type Sent = Frag<Mem>;
    type Ticket = HeaderTicket<Mem>;
}

impl<C: Count> Payload for Counted<C> {
    type Mem = Mem;
    type Frame = Packet<Mem>;
    type Count = C;

    #[inline]
    fn received(frame: Packet<Mem>, at: usize, len: usize) -> impl Iterator<Item = Frag<Mem>> {
        <Mem as Payload>::received(frame, at, len)
    }

    #[inline]
    fn from_host(frag: Frag<Mem>) -> Frag<Mem> {
        frag
    }

    #[inline]
    fn in_host(sent: &Frag<Mem>) -> Option<&Frag<Mem>> {
        Some(sent)
    }
}

impl<C: Count, T: TxQueue<Mem = Mem>> Transmit<T> for Counted<C> {
    fn transmit(_: &mut T, _: Packet<Mem>, _: &[Frag<Mem>]) -> Result<(), Unsent> {
        Err(Unsent::Never)
    }
}

/// The receive queue of such a stack.
struct Rx<C>(VirtioRx<Mem>, PhantomData<C>);

impl<C> AsFd for Rx<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<C> Wait for Rx<C> {
    fn arm(&mut self) -> std::io::Result<Armed> {
        self.0.arm()
    }

    fn disarm(&mut self) {
        self.0.disarm();
    }

    fn check(&self) -> std::io::Result<()> {
        self.0.check()
    }
}

impl<C: Count> Source for Rx<C> {
    type Payload = Counted<C>;
    type Batch = <VirtioRx<Mem> as Source>::Batch;

    fn batch(capacity: usize) -> Self::Batch {
        <VirtioRx<Mem> as Source>::batch(capacity)
    }

    #[inline]
    fn frames(batch: &mut Self::Batch) -> &mut Vec<Packet<Mem>> {
        <VirtioRx<Mem> as Source>::frames(batch)
    }

    #[inline]
    fn poll<R>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Self::Batch) -> usize) -> R) -> R {
        Source::poll(&mut self.0, f)
    }
}

/// The items of a server.
type Store = HashMap<Vec<u8>, Vec<u8>>;

/// The answer to a command.
fn answer<'a>(store: &'a mut Store, command: &[u8], out: &'a mut Vec<u8>) -> &'a [u8] {
    out.clear();
    let line = command.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    match (words.next(), words.next()) {
        (Some(b"get"), Some(key)) => {
            if let Some(value) = store.get(key) {
                out.extend_from_slice(b"VALUE ");
                out.extend_from_slice(key);
                out.extend_from_slice(b" 0 64\r\n");
                out.extend_from_slice(value);
                out.extend_from_slice(b"\r\n");
            }
            out.extend_from_slice(b"END\r\n");
        }
        (Some(b"set"), Some(key)) => {
            let value = command.get(line.len() + 2..line.len() + 2 + VALUE).unwrap_or_default();
            store.insert(key.to_vec(), value.to_vec());
            out.extend_from_slice(b"STORED\r\n");
        }
        _ => out.extend_from_slice(b"ERROR\r\n"),
    }
    out
}

/// A thread's server.
struct Server<C: Count> {
    udp: Option<UdpSocket<Counted<C>>>,
    listener: Option<TcpListener<Counted<C>>>,
    streams: Vec<TcpStream<Counted<C>>>,
    store: Store,
    out: Vec<u8>,
    answered: u64,
    /// Dropped last, because sockets hold pages of its pool.
    stack: Stack<Rx<C>, VirtioTx<Mem>>,
}

impl<C: Count> Server<C> {
    fn datagrams(&mut self) {
        let Self { udp: Some(socket), store, out, answered, .. } = self else { return };
        let mut places = [Fragment::default()];
        while let Ok(received) = socket.recv_from(&mut places) {
            let [fragment] = std::mem::take(&mut places);
            match socket.send_to(answer(store, &fragment, out), received.from) {
                Ok(()) => *answered += 1,
                // The next poll of the stack makes room. This request stays unanswered, and its
                // client sends no further one.
                Err(_) => break,
            }
        }
    }

    fn connections(&mut self) {
        let Self { listener: Some(listener), streams, store, out, answered, .. } = self else { return };
        streams.extend(std::iter::from_fn(|| listener.accept().ok()));
        streams.retain_mut(|stream| {
            loop {
                match stream.recv_chunk(|_| true) {
                    Ok(Some(chunk)) => {
                        let sent = stream.write(answer(store, &chunk, out));
                        *answered += u64::from(sent.is_ok());
                    }
                    Err(SocketError::WouldBlock) => break true,
                    // The client has closed, so this end closes too.
                    Ok(None) | Err(_) => break false,
                }
            }
        });
    }
}

/// What the threads of a run share.
#[derive(Default)]
struct Watch {
    over: AtomicBool,
    answered: Vec<AtomicU64>,
    lookups: Vec<AtomicU64>,
}

/// The parts that are made once for each thread, before it starts.
struct Parts {
    device: NetDevice<Clients>,
    net: VirtioNet<Mem>,
    pair: QueuePair<Mem>,
    pool: SharedPool<Mem>,
    connection: Connection,
}

impl Parts {
    fn new(proto: Proto, thread: usize) -> anyhow::Result<Self> {
        let device = NetDevice::new(Options::default(), |_| Ok(Clients::new(proto, thread)))?;
        let (front, back) = UnixStream::pair()?;
        let connection = device.control().serve(back)?;
        // SAFETY: the back end is the device above, in this process, and no other process gets the
        // region's file.
        let options = unsafe { NetOptions::<Mem>::trust_peer(RxMode::Mergeable) }.reserved_huge_pages(true);
        let (net, pairs) =
            VirtioNet::probe(VhostUser::own_device(front)?, options.max_frame(LARGE_FRAME).tx_pages(SENT))?;
        let pair = pairs.into_iter().next().context("a queue pair")?;
        let pool = net.tx_pool(PoolOptions::new("answers").limit(SENT))?;
        Ok(Self { device, net, pair, pool, connection })
    }

    /// Serves until the run is over.
    fn serve<C: Count>(
        self,
        host: &Host<Counted<C>>,
        proto: Proto,
        thread: usize,
        watch: &Watch,
    ) -> anyhow::Result<()> {
        let Self { mut device, net, pair, pool, connection } = self;
        let clock = Clock::start();
        let options = StackOptions { pages: 512, ..StackOptions::default() };
        let stack = Stack::new(host, Rx(pair.rx, PhantomData), pair.tx, Arc::new(pool), options, clock.now())?;
        let at = SocketAddr::new(address(1).addr, PORT + thread as u16);
        let (mut udp, mut listener) = (None, None);
        match proto {
            Proto::Udp => udp = Some(stack.sockets().bind(at)?),
            Proto::Tcp => listener = Some(stack.sockets().listen(at, ListenOptions::default())?),
        }
        let store = (0..KEYS).map(|n| (key(n).to_vec(), vec![b'v'; VALUE])).collect();
        let mut server = Server { stack, udp, listener, streams: Vec::new(), store, out: Vec::new(), answered: 0 };
        while !watch.over.load(Ordering::Relaxed) {
            device.poll();
            server.stack.poll(clock.now());
            match proto {
                Proto::Udp => server.datagrams(),
                Proto::Tcp => server.connections(),
            }
            server.stack.poll(clock.now());
            watch.answered[thread].store(server.answered, Ordering::Relaxed);
            watch.lookups[thread].store(server.stack.stats().lookups, Ordering::Relaxed);
        }
        let broken = device.ports().iter().map(Clients::broken).sum::<u64>();
        drop(server);
        drop((net, connection));
        ensure!(broken == 0, "{broken} connections of clients were reset");
        Ok(())
    }
}

/// A count, a protocol and a number of threads.
struct Replies<C> {
    count: &'static str,
    proto: Proto,
    threads: usize,
    /// If there are more threads than CPUs, each thread must run several times.
    turns: u32,
    _count: PhantomData<C>,
}

impl<C: Count> Replies<C> {
    fn run(&self, harness: &Harness) -> anyhow::Result<(Sample, [f64; 2])> {
        let addresses = vec![address(1)];
        let interface = Interface { mac: Mac(endpoint::mac(&addresses)), mtu: 1500, addresses };
        let host = Host::<Counted<C>>::new(interface);
        let counters = || (0..self.threads).map(|_| AtomicU64::new(0)).collect();
        let watch = Watch { over: AtomicBool::new(false), answered: counters(), lookups: counters() };
        let cpus = harness.cpus(usize::MAX);
        let parts = (0..self.threads).map(|n| Parts::new(self.proto, n)).collect::<anyhow::Result<Vec<_>>>()?;
        let features = parts.first().map_or(0, |parts| parts.net.features());
        let sum = |of: &[AtomicU64]| of.iter().map(|n| n.load(Ordering::Relaxed)).sum::<u64>();
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (thread, parts) in parts.into_iter().enumerate() {
                let (host, watch, cpu) = (&host, &watch, cpus[thread % cpus.len()]);
                threads.push(scope.spawn(move || {
                    pin(cpu);
                    parts.serve(host, self.proto, thread, watch)
                }));
            }
            let measured = (|| {
                let begin = Instant::now();
                while watch.answered.iter().any(|n| n.load(Ordering::Relaxed) < ENOUGH) {
                    ensure!(begin.elapsed() < PATIENCE, "almost no answers in {} s", PATIENCE.as_secs());
                    ensure!(!threads.iter().any(|thread| thread.is_finished()), "a server has ended before its time");
                    std::thread::sleep(Duration::from_millis(1));
                }
                // Last, the requests that were answered while the counters were read: many, if this
                // thread lost its CPU meanwhile.
                let now = || {
                    let (answered, lookups) = (sum(&watch.answered), sum(&watch.lookups));
                    (answered, lookups, host.route_retries(), sum(&watch.answered) - answered)
                };
                let (since, before) = (Instant::now(), now());
                let duration = Duration::from_nanos(harness.duration_ns()) * self.turns;
                // Goes on until the requests in flight, and those that were answered while the
                // counters were read, are few compared with those that were counted.
                let (elapsed, after) = loop {
                    let (elapsed, after) = (since.elapsed(), now());
                    let few = ENOUGH.max(before.3 + after.3);
                    if elapsed >= duration && after.0 - before.0 >= 20 * few {
                        break (elapsed, after);
                    }
                    ensure!(elapsed < duration + PATIENCE, "almost no answers in {} s", PATIENCE.as_secs());
                    std::thread::sleep(duration.saturating_sub(elapsed).max(Duration::from_millis(1)));
                };
                let operations = Some(after.0 - before.0);
                let answered = (after.0 - before.0).max(1) as f64;
                let lookups = (after.1 - before.1) as f64;
                let retries = (after.2 - before.2) as f64;
                let (value, elapsed_ns) = (answered / elapsed.as_secs_f64(), u64::try_from(elapsed.as_nanos()).ok());
                let rate = Sample { value, elapsed_ns, operations, features, ..Sample::default() };
                Ok((rate, [lookups / answered, retries / lookups.max(1.0)]))
            })();
            watch.over.store(true, Ordering::Relaxed);
            for thread in threads {
                propagate(thread.join())?;
            }
            measured
        })
    }

    fn name(&self) -> String {
        let proto = if self.proto == Proto::Udp { "udp" } else { "connections" };
        format!("{proto}_{}", self.count)
    }
}

impl<C: Count> Benchmark for Replies<C> {
    fn heads(&self) -> Vec<Head> {
        let rows = [
            ("replies: throughput", "second", "requests"),
            ("replies: gets", "request", "gets"),
            ("replies: retries", "get", "retries"),
        ];
        let head = |(section, per, unit)| Head {
            name: self.name(),
            section,
            threads: self.threads,
            per,
            unit,
            ..Head::default()
        };
        rows.map(head).into()
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let (rate, [gets, retries]) =
            self.run(harness).map_err(|source| BenchError::Stream { variant: self.name(), source })?;
        let with = |value| Sample { value, ..rate.clone() };
        Ok(vec![rate.clone(), with(gets), with(retries)])
    }

    /// Devices, stacks and clients are made, too.
    fn takes(&self, duration: Duration) -> Duration {
        self.turns * duration + Duration::from_millis(50)
    }
}

/// All counts, with these numbers of threads and with more threads than there are CPUs.
pub(super) fn benchmarks(threads: &[usize], cpus: usize) -> Vec<Box<dyn Benchmark>> {
    use netmem::refs::{PercpuRef, RcuRef, RefCount};
    fn benchmark<C: Count>(count: &'static str, proto: Proto, (threads, turns): (usize, u32)) -> Box<dyn Benchmark> {
        Box::new(Replies::<C> { count, proto, threads, turns, _count: PhantomData })
    }
    let mut benchmarks = Vec::new();
    let turns = |threads: usize| (threads, threads.div_ceil(cpus.max(1)).max(1) as u32);
    for proto in [Proto::Udp, Proto::Tcp] {
        for threads in threads.iter().copied().chain([2 * cpus]).map(turns) {
            benchmarks.push(benchmark::<RefCount>("refcount", proto, threads));
            benchmarks.push(benchmark::<RcuRef>("rcuref", proto, threads));
            benchmarks.push(benchmark::<PercpuRef>("percpuref", proto, threads));
        }
    }
    benchmarks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves REF-8 as far as counters can: a datagram's entry is looked up twice, a connection's
    /// once.
    #[test]
    fn answers_look_their_destination_up() {
        for (proto, gets) in [(Proto::Udp, 2.0), (Proto::Tcp, 1.0)] {
            let (count, threads, turns) = ("rcuref", 2, 1);
            let replies = Replies::<netmem::refs::RcuRef> { count, proto, threads, turns, _count: PhantomData };
            let (rate, [lookups, retries]) = replies.run(&Harness::for_tests()).unwrap();
            assert!(rate.value > 0.0 && (0.8..1.2).contains(&(lookups / gets)), "{proto:?}: {lookups} lookups");
            assert_eq!(retries, 0.0);
        }
    }

    #[test]
    fn a_server_stores_and_finds() {
        let (mut store, mut out) = (Store::new(), Vec::new());
        let set = [&b"set k1 0 0 64\r\n"[..], &[b'x'; VALUE], b"\r\n"].concat();
        assert_eq!(answer(&mut store, b"get k1\r\n", &mut out), b"END\r\n");
        assert_eq!(answer(&mut store, &set, &mut out), b"STORED\r\n");
        let expected = [&b"VALUE k1 0 64\r\n"[..], &[b'x'; VALUE], b"\r\nEND\r\n"].concat();
        assert_eq!(answer(&mut store, b"get k1\r\n", &mut out), expected);
        assert_eq!(answer(&mut store, b"what", &mut out), b"ERROR\r\n");
    }
}
