//! Connections with the kernel's sockets, behind a tap: many one after the other, and many at once.
//! Nothing is left of them. `NETMEM_CONNECTIONS=1000000` is how many are opened and closed, and
//! `NETMEM_AT_ONCE=65000,100000` how many are open at the same time, one number after the other.
//! The defaults are a few thousand.
//!
//! ```text
//!   clients in Python (processes) ── kernel ── tap ── virtio-net device ── driver ── Stack (one thread)
//! ```
//!
//! The clients connect from two addresses, one of IPv4 and one of IPv6: an address has not enough
//! ports for them. They are processes, because a process may have too few descriptors.

use crate::idle::HEAP;
use netmem_inet::tcp::Error;
use netmem_inet::wire::Mac;
use netmem_inet::{
    Address, Host, Interface, ListenOptions, SocketError, Stack, StackOptions, TcpListener, TcpStream, Time,
};
use netmem_pool::{PeerShared, PoolOptions, SharedPool};
use netmem_testing::namespace::{in_a_network, ip};
use netmem_testing::{installed, skip};
use netmem_virtio::device::port::Tap;
use netmem_virtio::device::{NetDevice, Options, Worker};
use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet, VirtioRx, VirtioTx};
use netmem_virtio::{Spin, VhostUser};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

/// The most descriptors of a client.
const OPEN: usize = 15_000;
/// The most turns in which connections end that their clients have closed: a turn waits for 5 ms at
/// most. As many may pass in which a client does nothing that the stack notices.
const TURNS: usize = 100_000;
/// The most bytes that the stack's tables keep of each connection that was open at the same time as
/// others.
const KEPT: isize = 512;
/// The bytes of an answer.
const ANSWER: usize = 100;

/// ADDRESS: does what each line on standard input asks for, so often, and repeats the word then.
/// `churn` ends connections in three ways: the client closes, the server closes, or the client
/// resets because it has not read the answer.
const CLIENT: &str = r#"
import resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
open_ones = []
def connect():
    return socket.create_connection((sys.argv[1], 80), 300)
def ask(s, request):
    s.sendall(request)
    got = 0
    while got < 100:
        n = len(s.recv(100 - got))
        assert n, "the connection has ended"
        got += n
def churn(n):
    s = connect()
    if n % 3 == 0:
        ask(s, b"request")
    elif n % 3 == 1:
        ask(s, b"the end")
        assert s.recv(1) == b""
    else:
        s.sendall(b"request")
        s.recv(1, socket.MSG_PEEK)
    s.close()
work = {
    "churn": churn,
    "open": lambda n: open_ones.append(connect()),
    "ask": lambda n: ask(open_ones[n], b"request"),
    "close": lambda n: open_ones.pop().close(),
}
for line in sys.stdin:
    word, times = line.split()
    for n in range(int(times)):
        work[word](n)
    print(word, flush=True)
"#;

/// A process with the kernel's sockets. It ends with the test.
struct Client {
    process: Child,
    orders: ChildStdin,
    done: Receiver<String>,
}

impl Client {
    /// In this thread's network.
    fn start(address: &str) -> Self {
        let mut python = Command::new("python3");
        python.args(["-c", CLIENT, address]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = python.spawn().unwrap();
        let (orders, stdout) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (lines, done) = channel();
        thread::spawn(move || {
            BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| lines.send(line))
        });
        Self { process, orders, done }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A connection of the server, and the waker that names it.
struct Served {
    stream: TcpStream<PeerShared>,
    waker: Waker,
}

/// Puts the number of a connection into a list when its stream can be read.
struct Ready(usize, Arc<Mutex<Vec<usize>>>);

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.1.lock().unwrap().push(self.0);
    }
}

/// Answers each request.
struct Server {
    listener: TcpListener<PeerShared>,
    served: Vec<Option<Served>>,
    free: Vec<usize>,
    ready: Arc<Mutex<Vec<usize>>>,
    accepted: usize,
}

impl Server {
    fn new(listener: TcpListener<PeerShared>) -> Self {
        Self { listener, served: Vec::new(), free: Vec::new(), ready: Arc::default(), accepted: 0 }
    }

    /// Accepts connections and answers requests. Returns how many streams it has looked at.
    fn turn(&mut self) -> usize {
        while let Ok(stream) = self.listener.accept() {
            let place = self.free.pop().unwrap_or_else(|| {
                self.served.push(None);
                self.served.len() - 1
            });
            let waker = Waker::from(Arc::new(Ready(place, self.ready.clone())));
            self.served[place] = Some(Served { stream, waker });
            self.ready.lock().unwrap().push(place);
            self.accepted += 1;
        }
        let ready = std::mem::take(&mut *self.ready.lock().unwrap());
        for &place in &ready {
            let Some(served) = &mut self.served[place] else { continue };
            if !served.answer() {
                self.served[place] = None;
                self.free.push(place);
            }
        }
        ready.len()
    }
}

impl Served {
    /// Returns false when the connection has ended.
    fn answer(&mut self) -> bool {
        let mut cx = Context::from_waker(&self.waker);
        loop {
            let mut request = [0; 7];
            match self.stream.poll_read(&mut cx, &mut request) {
                Poll::Pending => return true,
                Poll::Ready(Ok(7)) => assert_eq!(self.stream.write(&[b'x'; ANSWER]), Ok(ANSWER)),
                Poll::Ready(Ok(0) | Err(SocketError::Closed(Error::Reset))) => return false,
                Poll::Ready(other) => panic!("{other:?}"),
            }
            if request == *b"the end" {
                return false;
            }
        }
    }
}

/// A stack with the device and the kernel behind it, and the clients there.
struct World {
    host: Host<PeerShared>,
    stack: Stack<VirtioRx<PeerShared>, VirtioTx<PeerShared>>,
    device: Worker<Tap>,
    pool: Arc<SharedPool<PeerShared>>,
    server: Server,
    clients: Vec<Client>,
    begin: Instant,
    /// What the stack's time is ahead of the clock.
    ahead: Duration,
    /// The most connections that were in TIME-WAIT.
    time_wait: usize,
}

impl World {
    fn now(&self) -> Time {
        Time::ZERO + self.begin.elapsed() + self.ahead
    }

    /// Returns whether there was something to do.
    fn turn(&mut self) -> bool {
        let mut work = self.device.poll() + self.stack.poll(self.now());
        work += self.server.turn();
        if work > 0 {
            self.stack.poll(self.now());
        }
        let at_most = Duration::from_millis(5);
        let sleep = self.stack.poll_timeout().map_or(at_most, |at| at.since(self.now()).min(at_most));
        self.device.turn(work, Spin::NONE, &mut [&mut self.stack], Some(sleep)).unwrap();
        work > 0
    }

    /// Has the clients do something so many times in total. Each has as many connections as the
    /// next one, but for one.
    fn clients(&mut self, what: &str, times: usize) {
        let clients = self.clients.len();
        for (n, client) in self.clients.iter_mut().enumerate() {
            writeln!(client.orders, "{what} {}", times / clients + usize::from(n < times % clients)).unwrap();
        }
        let mut without_progress = 0;
        for n in 0..clients {
            loop {
                assert!(without_progress < TURNS, "client {n} does not end: {what}");
                match self.clients[n].done.try_recv() {
                    Ok(word) => break assert_eq!(word, what),
                    Err(TryRecvError::Disconnected) => panic!("a client has failed"),
                    Err(TryRecvError::Empty) if self.turn() => without_progress = 0,
                    Err(TryRecvError::Empty) => without_progress += 1,
                }
            }
        }
    }

    /// Takes turns until this many connections are left, and no page is with the device.
    #[track_caller]
    fn until(&mut self, left: impl Fn(&Self) -> usize) {
        for _ in 0..TURNS {
            if self.stack.connections() <= left(self) && self.pool.stats().inflight == 0 {
                return;
            }
            self.turn();
        }
        panic!("{} connections and {} pages are left", self.stack.connections(), self.pool.stats().inflight);
    }

    /// Waits until all connections have ended, and skips the time of TIME-WAIT. Nothing is left.
    fn ended(&mut self) {
        self.until(|world| world.stack.connections_in_time_wait());
        self.time_wait = self.time_wait.max(self.stack.connections_in_time_wait());
        self.ahead += Duration::from_secs(61);
        self.until(|_| 0);
        assert_eq!((self.host.connections(), self.stack.pages()), (0, 0));
        assert!(self.server.served.iter().all(Option::is_none));
        let stats = self.stack.stats();
        assert_eq!((stats.malformed, stats.wrong_checksum, stats.refused), (0, 0, 0), "{stats:?}");
        // The server's own lists.
        (self.server.served, self.server.free) = Default::default();
        *self.server.ready.lock().unwrap() = Vec::new();
    }

    /// So many connections are opened and closed.
    fn churn(&mut self, number: usize) -> String {
        let before = self.server.accepted;
        self.clients("churn", number);
        self.ended();
        assert_eq!(self.server.accepted - before, number);
        format!("{number} connections")
    }

    /// So many connections are open at the same time, idle, and answer then.
    fn at_once(&mut self, number: usize) -> String {
        let before = self.server.accepted;
        self.clients("open", number);
        // The last handshake may not be complete.
        for _ in 0..TURNS {
            if self.server.accepted == before + number {
                break;
            }
            self.turn();
        }
        // What a connection keeps for a while is let go.
        self.ahead += Duration::from_secs(10);
        self.until(|_| number);
        assert_eq!((self.stack.connections(), self.stack.pages()), (number, 0), "idle ones hold no page");
        self.clients("ask", number);
        self.clients("close", number);
        self.ended();
        format!("{number} connections at once")
    }
}

/// The numbers that a variable of the environment lists.
fn numbers(variable: &str, default: usize) -> Vec<usize> {
    let listed = std::env::var(variable).map(|list| list.split(',').map(|n| n.parse().unwrap()).collect());
    listed.unwrap_or_else(|_| vec![default])
}

/// Makes a tap in this thread's network, and a stack for so many connections behind it.
fn with_world(connections: usize, clients: usize, test: impl FnOnce(&mut World)) {
    let mut taps = Tap::open("t0", 1, true).unwrap();
    // Many connections from one address, and the ports of those that the client has closed again
    // after a second.
    for (file, value) in [("ip_local_port_range", "1024 65535"), ("tcp_tw_reuse", "1")] {
        std::fs::write(format!("/proc/sys/net/ipv4/{file}"), value).unwrap();
    }
    // The clients close all connections without a wait. If the tap has no room for their segments,
    // the kernel sends them again in groups, which the tap has no room for either.
    ip(&format!("link set t0 txqueuelen {connections}"));
    ip("addr add 198.18.0.1/24 dev t0");
    ip("addr add fd00:18::1/64 dev t0 nodad");
    let device = NetDevice::new(Options::default(), |_| Ok(taps.remove(0))).unwrap();
    let (control, mut workers) = (device.control(), device.workers(1).unwrap());
    let (front, back) = UnixStream::pair().unwrap();
    let connection = control.serve(back).unwrap();
    let options = NetOptions::new(RxMode::Mergeable).max_frame(65549).pages(2048).tx_pages(1024);
    let (driver, mut pairs) = VirtioNet::probe(VhostUser::own_device(front).unwrap(), options).unwrap();
    let pool = Arc::new(driver.tx_pool(PoolOptions::new("tx")).unwrap());
    let pair = pairs.remove(0);
    let addresses = ["198.18.0.2/24", "fd00:18::2/64"].map(|address| address.parse::<Address>().unwrap());
    let host = Host::new(Interface { mac: Mac([2, 0, 0, 0, 18, 0]), mtu: 1500, addresses: addresses.into() });
    let options = StackOptions { connections, ..StackOptions::default() };
    let stack = Stack::new(&host, pair.rx, pair.tx, pool.clone(), options, Time::ZERO).unwrap();
    let listener = stack.sockets().listen(([0, 0, 0, 0], 80).into(), ListenOptions::default()).unwrap();
    let mut world = World {
        host,
        stack,
        device: workers.remove(0),
        pool,
        server: Server::new(listener),
        clients: (0..clients).map(|n| Client::start(["198.18.0.2", "fd00:18::2"][n % 2])).collect(),
        begin: Instant::now(),
        ahead: Duration::ZERO,
        time_wait: 0,
    };
    test(&mut world);
    let World { stack, pool, server, clients, device, .. } = world;
    drop((server, clients));
    let (rx, tx) = stack.into_queues();
    drop(tx);
    assert_eq!(rx.close().unwrap().outstanding, 0, "all received pages were returned");
    assert_eq!(Arc::into_inner(pool).unwrap().close().outstanding, 0, "all sent pages were returned");
    drop((pairs, driver, connection, device));
}

#[test]
fn nothing_is_left_of_connections_with_the_kernel() {
    if let Err(why) = installed(&["python3"]) {
        return skip(&why);
    }
    let _alone = crate::alone();
    in_a_network(|| {
        let (churned, at_once) = (numbers("NETMEM_CONNECTIONS", 3000)[0], numbers("NETMEM_AT_ONCE", 2000));
        let most = at_once.iter().copied().max().unwrap_or(0);
        // An even number: half of them use each address.
        let clients = 2 * most.div_ceil(2 * OPEN).max(2);
        with_world(most + 1024, clients, |world| {
            // What is allocated once: tables, routes, neighbours.
            world.clients("churn", 600);
            world.ended();
            let mut level = HEAP.bytes();
            println!("{level} bytes of the heap before");
            let mut heap = |what: String| {
                let kept = HEAP.bytes() as isize - level as isize;
                println!("{what} opened and closed: {kept:+} bytes of the heap");
                level = HEAP.bytes();
                kept
            };
            // The tables keep the room of the most connections that were at once, those in
            // TIME-WAIT included. What comes later keeps nothing.
            let first = heap(world.churn(churned / 2));
            let second = heap(world.churn(churned - churned / 2));
            let at_once: Vec<_> = at_once.iter().map(|&number| heap(world.at_once(number))).collect();
            let kept = first + second + at_once.iter().sum::<isize>();
            let peak = most.max(world.time_wait) as isize;
            assert!(kept <= peak * KEPT, "{kept} bytes are kept of {peak} connections at once");
            assert!(second <= peak * KEPT / 8, "the second half keeps {second} bytes more");
            println!("{} accepted; {:?}", world.server.accepted, world.stack.stats());
        });
    });
}
