//! The kernel's sockets as peers of a stack, over any queues: the exchanges between them, and the
//! loop of the stack.

use netmem_inet::tcp::Config;
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Fragment, Host, Interface, ListenOptions, SocketError, Sockets, Stack, TcpStream, Time};
use netmem_packet::{PollThenSleep, RxQueue, TxQueue, Wait};
use netmem_pool::PeerShared;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The address of a host. The kernel's addresses are 198.18.N.1 and fd00:18:N::1. Those of the
/// stack end with 2.
pub(crate) fn address(net: u8, v6: bool, ours: bool) -> IpAddr {
    let last = if ours { 2 } else { 1 };
    if v6 { [0xfd00, 0x18, net.into(), 0, 0, 0, 0, last].into() } else { [198, 18, net, last as u8].into() }
}

/// Runs `peer` on a thread with the kernel's sockets, and calls `serve` after each poll of the
/// stack. Ends when `peer` returns. The stack then has no connections and holds no pages.
pub(crate) fn drive<R, T>(
    stack: &mut Stack<R, T>,
    now: impl Fn() -> Time,
    peer: impl FnOnce() + Send + 'static,
    mut serve: impl FnMut(&Sockets<PeerShared>),
) where
    R: RxQueue<Mem = PeerShared> + Wait,
    T: TxQueue<Mem = PeerShared> + Wait,
{
    let peer = thread::spawn(peer);
    let mut pause = PollThenSleep::new(Duration::from_micros(20));
    let sockets = stack.sockets();
    let mut turn = |stack: &mut Stack<R, T>, at_most: Duration| {
        let work = stack.poll(now());
        let sleep = stack.poll_timeout().map_or(at_most, |at| at.since(now()).min(at_most));
        pause.turn(work, &mut [stack], Some(sleep)).unwrap();
    };
    while !peer.is_finished() {
        turn(stack, Duration::from_millis(5));
        serve(&sockets);
    }
    peer.join().unwrap();
    // The user's remaining sockets are dropped, and then nothing is left.
    drop(serve);
    let patience = Instant::now();
    while stack.connections() > stack.connections_in_time_wait() && patience.elapsed() < Duration::from_secs(120) {
        turn(stack, Duration::from_millis(5));
    }
    assert_eq!(stack.pages(), 0, "{:?}", stack.stats());
    let stats = stack.stats();
    assert_eq!((stats.malformed, stats.wrong_checksum, stats.refused), (0, 0, 0), "{stats:?}");
}

/// The host of the stack.
pub(crate) fn host(net: u8) -> Host<PeerShared> {
    let addresses =
        [false, true].map(|v6| Address { addr: address(net, v6, true), prefix_len: if v6 { 64 } else { 24 } });
    Host::new(Interface { mac: Mac([2, 0, 0, 0, 18, net]), mtu: 1500, addresses: addresses.to_vec() })
}

/// The bytes of a transfer, which depend on the seed.
fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32).map(|n| ((n ^ seed).wrapping_mul(0x9E37_79B1) >> 24) as u8).collect()
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

/// A stream of the stack that sends everything back by reference.
struct Echo {
    stream: TcpStream<PeerShared>,
    /// The fragment that was received and is not sent yet. It is sent as it is.
    pending: Option<netmem_pool::Frag<PeerShared>>,
    held: Fragment<PeerShared>,
}

impl Echo {
    fn new(stream: TcpStream<PeerShared>) -> Self {
        Self { stream, pending: None, held: Fragment::default() }
    }

    /// Returns false when the stream has ended.
    fn turn(&mut self) -> bool {
        loop {
            if let Some(frag) = self.pending.take() {
                match self.stream.send(frag, false) {
                    Ok(()) => {}
                    Err((SocketError::WouldBlock, frag)) => {
                        self.pending = Some(frag);
                        return true;
                    }
                    Err((error, _)) => panic!("{error}"),
                }
            }
            let mut places = [std::mem::take(&mut self.held)];
            match self.stream.recv(&mut places) {
                Ok(0) => {
                    self.stream.shutdown();
                    return false;
                }
                Ok(_) => self.pending = places[0].share(),
                Err(SocketError::WouldBlock) => return true,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// The kernel's side: connects, sends and receives at the same time, and compares every byte.
fn exchange(to: SocketAddr, seed: u32, len: usize) {
    let stream = std::net::TcpStream::connect(to).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let sent = pattern(seed, len);
    let copy = sent.clone();
    let thread = thread::spawn(move || {
        writer.write_all(&copy).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    (&stream).read_to_end(&mut received).unwrap();
    thread.join().unwrap();
    assert!(received == sent, "{to}: {} of {len} bytes", received.len());
}

/// The two parts that run: the peer's thread, and the sockets of the stack.
pub(crate) type Peer = Box<dyn FnOnce() + Send>;
pub(crate) type Serve = Box<dyn FnMut(&Sockets<PeerShared>)>;

/// The kernel connects to the stack, which sends everything back. It also sends datagrams in
/// fragments.
pub(crate) fn echo(net: u8, run: impl FnOnce(Peer, Serve)) {
    let peer = move || {
        for v6 in [false, true] {
            let to = SocketAddr::new(address(net, v6, true), 7);
            exchange(to, 1, 5_000_000);
            let many: Vec<_> =
                (0..50).map(|n| thread::spawn(move || exchange(to, n, 10_000 + 1000 * n as usize))).collect();
            many.into_iter().for_each(|thread| thread.join().unwrap());
            // The port has no listener.
            let refused = std::net::TcpStream::connect(SocketAddr::new(to.ip(), 8)).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
            // A datagram in three fragments. The answer is its length.
            let socket = UdpSocket::bind(SocketAddr::new(address(net, v6, false), 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
            let large = pattern(3, 4000);
            socket.send_to(&large, to).unwrap();
            let mut answer = [0; 100];
            let n = socket.recv(&mut answer).unwrap();
            assert_eq!(&answer[..n], format!("{} {}", large.len(), sum(&large)).as_bytes());
        }
    };
    let (mut listener, mut datagrams, mut echoes) = (None, None, Vec::<Echo>::new());
    let serve = move |sockets: &Sockets<PeerShared>| {
        let listener =
            listener.get_or_insert_with(|| sockets.listen(([0, 0, 0, 0], 7).into(), ListenOptions::default()).unwrap());
        while let Ok(stream) = listener.accept() {
            echoes.push(Echo::new(stream));
        }
        let datagrams = datagrams.get_or_insert_with(|| sockets.bind(([0, 0, 0, 0], 7).into()).unwrap());
        let mut places: [Fragment<_>; 8] = Default::default();
        if let Ok(received) = datagrams.recv_from(&mut places) {
            let all: Vec<u8> = places.iter().flat_map(Fragment::to_vec).collect();
            datagrams.send_to(format!("{} {}", received.len, sum(&all)).as_bytes(), received.from).unwrap();
        }
        echoes.retain_mut(Echo::turn);
    };
    run(Box::new(peer), Box::new(serve));
}

/// The streams of a round in which the stack connects.
const CONNECTIONS: usize = 20;
/// The streams and datagrams of both rounds that come back.
const ALL: usize = 2 * (CONNECTIONS + 1);

/// The stack connects to the kernel, which sends everything back. It also sends datagrams.
pub(crate) fn connect(net: u8, run: impl FnOnce(Peer, Serve)) {
    let finished = Arc::new(AtomicUsize::new(0));
    let so_far = finished.clone();
    let peer = move || {
        [false, true].into_iter().for_each(|v6| answer_round(address(net, v6, false)));
        // The stack is driven until this thread ends: the last bytes have to arrive.
        while so_far.load(Ordering::Relaxed) < ALL {
            thread::sleep(Duration::from_millis(1));
        }
    };
    let mut round = 0;
    let mut clients: Vec<Client> = Vec::new();
    let mut datagram: Option<DatagramClient> = None;
    let count = finished.clone();
    let serve = move |sockets: &Sockets<PeerShared>| {
        // A round ends with its datagram, too: the kernel waits for it.
        if clients.is_empty() && datagram.is_none() && round < 2 {
            let v6 = round == 1;
            // The kernel's socket may not exist yet, so a refused connection is tried again.
            let to = SocketAddr::new(address(net, v6, false), 7007);
            clients = (0..CONNECTIONS).map(|n| Client::new(sockets, to, n)).collect();
            let from = SocketAddr::new(address(net, v6, true), 0);
            datagram = Some(DatagramClient::new(sockets, from, SocketAddr::new(to.ip(), 5353)));
            round += 1;
        }
        if datagram.as_mut().is_some_and(DatagramClient::turn) {
            datagram = None;
            count.fetch_add(1, Ordering::Relaxed);
        }
        let open = clients.len();
        clients.retain_mut(|client| client.turn(sockets));
        count.fetch_add(open - clients.len(), Ordering::Relaxed);
    };
    run(Box::new(peer), Box::new(serve));
    // Either all connections were made, or the test was skipped.
    let finished = finished.load(Ordering::Relaxed);
    assert!(finished == 0 || finished == ALL, "{finished}");
}

/// The kernel's side of a round: accepts all connections and a datagram, and sends everything back.
fn answer_round(ip: IpAddr) {
    // The addresses exist, but IPv6 may need a moment.
    let listener = std::net::TcpListener::bind(SocketAddr::new(ip, 7007)).unwrap();
    let datagrams = UdpSocket::bind(SocketAddr::new(ip, 5353)).unwrap();
    datagrams.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let echo = |mut stream: std::net::TcpStream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        stream.write_all(&all).unwrap();
    };
    let accept = |_| {
        let (stream, _) = listener.accept().unwrap();
        thread::spawn(move || echo(stream))
    };
    let echoes: Vec<_> = (0..CONNECTIONS).map(accept).collect();
    let mut bytes = [0; 2000];
    let (n, from) = datagrams.recv_from(&mut bytes).unwrap();
    datagrams.send_to(&bytes[..n], from).unwrap();
    echoes.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A connection of the stack to the kernel, which sends bytes and expects them back.
struct Client {
    stream: TcpStream<PeerShared>,
    sent: Vec<u8>,
    at: usize,
    received: Vec<u8>,
}

impl Client {
    fn new(sockets: &Sockets<PeerShared>, to: SocketAddr, n: usize) -> Self {
        let stream = sockets.connect(to, &Config::default()).unwrap();
        Self { stream, sent: pattern(n as u32, 100_000 + n), at: 0, received: Vec::new() }
    }

    /// Returns false when all bytes have come back.
    fn turn(&mut self, sockets: &Sockets<PeerShared>) -> bool {
        match self.stream.is_connected() {
            Ok(true) => {}
            Ok(false) => return true,
            Err(_) => {
                self.stream = sockets.connect(self.stream.peer_addr(), &Config::default()).unwrap();
                return true;
            }
        }
        if self.at < self.sent.len() {
            self.at += self.stream.write(&self.sent[self.at..]).unwrap_or(0);
            if self.at == self.sent.len() {
                self.stream.shutdown();
            }
        }
        let mut bytes = vec![0; 20_000];
        match self.stream.read(&mut bytes) {
            Ok(0) => {
                assert!(self.received == self.sent, "{} bytes", self.received.len());
                false
            }
            Ok(n) => {
                self.received.extend_from_slice(&bytes[..n]);
                true
            }
            Err(SocketError::WouldBlock) => true,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A datagram of the stack to the kernel, which is sent again until it comes back.
struct DatagramClient {
    socket: netmem_inet::UdpSocket<PeerShared>,
    to: SocketAddr,
    sent: Instant,
}

impl DatagramClient {
    fn new(sockets: &Sockets<PeerShared>, from: SocketAddr, to: SocketAddr) -> Self {
        let mut client = Self { socket: sockets.bind(from).unwrap(), to, sent: Instant::now() };
        client.send();
        client
    }

    fn send(&mut self) {
        self.sent = Instant::now();
        let _ = self.socket.send_to(b"datagram", self.to);
    }

    /// Returns true when the datagram has come back.
    fn turn(&mut self) -> bool {
        let mut places: [Fragment<_>; 1] = Default::default();
        let came = self.socket.recv_from(&mut places).is_ok_and(|received| received.len == 8);
        if came {
            assert_eq!(places[0].to_vec(), b"datagram");
        } else if self.sent.elapsed() > Duration::from_millis(100) {
            self.send();
        }
        came
    }
}
