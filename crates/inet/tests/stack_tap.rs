//! A stack over the embedded virtio-net device, with the kernel's stack as peer behind a tap.
//!
//! ```text
//!   sockets of std (threads) ── kernel ── tap ── virtio-net device (thread) ── virtio-net driver ── Stack (this thread)
//! ```
#![allow(clippy::unwrap_used, reason = "test")]

#[path = "../../../tests/skip.rs"]
mod skip;

use netmem_inet::tcp::Config;
use netmem_inet::wire::Mac;
use netmem_inet::{
    Address, Fragment, Host, Interface, ListenOptions, SocketError, Sockets, Stack, StackOptions, TcpStream, Time,
};
use netmem_packet::PollThenSleep;
use netmem_pool::{PeerShared, PoolOptions};
use netmem_virtio::device::port::Tap;
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, Offload, RxMode, VirtioNet, VirtioRx, VirtioTx};
use netmem_virtio::{Spin, VhostUser};
use skip::skip;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

type OurStack = Stack<VirtioRx, VirtioTx>;

/// The kernel's addresses are 198.18.N.1 and fd00:18:N::1; ours end with 2.
fn address(net: u8, v6: bool, ours: bool) -> IpAddr {
    let last = if ours { 2 } else { 1 };
    if v6 { [0xfd00, 0x18, net.into(), 0, 0, 0, 0, last].into() } else { [198, 18, net, last as u8].into() }
}

/// Runs `peer` on a thread with the kernel's sockets, while `serve` is called after each poll of the stack. Ends with the peer.
fn beside_the_kernel(
    net: u8,
    options: NetOptions,
    peer: impl FnOnce() + Send + 'static,
    mut serve: impl FnMut(&Sockets<PeerShared>),
) {
    let name = format!("nmst{}n{net}", std::process::id() % 1_000_000);
    let mut taps = match Tap::open(&name, 1, true) {
        Ok(taps) => taps,
        Err(error) => return skip(&format!("no tap devices here: {error}")),
    };
    for v6 in [false, true] {
        let addr = format!("{}/{}", address(net, v6, false), if v6 { 64 } else { 24 });
        let mut args = vec!["addr", "add", &addr, "dev", &name];
        args.extend(v6.then_some("nodad"));
        match Command::new("ip").args(&args).status() {
            Ok(status) if status.success() => {}
            other => return skip(&format!("`ip addr add` is not to be had: {other:?}")),
        }
    }
    let mut device = NetDevice::new(Options::default(), |_| Ok(taps.remove(0))).unwrap();
    let control = device.control();
    let (front, back) = UnixStream::pair().unwrap();
    let connection = control.serve(back).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let running = thread::spawn(move || device.run(&flag, Spin::default()));
    let options = options.pages(2048).tx_pages(1024);
    let (driver, mut pairs) = VirtioNet::probe(VhostUser::own_device(front).unwrap(), options).unwrap();
    let pool = Arc::new(driver.tx_pool(PoolOptions::new("tx")).unwrap());
    let pair = pairs.remove(0);

    let addresses =
        [false, true].map(|v6| Address { addr: address(net, v6, true), prefix_len: if v6 { 64 } else { 24 } });
    let interface = Interface { mac: Mac([2, 0, 0, 0, 18, net]), mtu: 1500, addresses: addresses.to_vec() };
    let beginning = Instant::now();
    let now = || Time::ZERO + beginning.elapsed();
    let host = Host::new(interface);
    let mut stack = Stack::new(&host, pair.rx, pair.tx, pool.clone(), StackOptions::default(), now()).unwrap();
    let peer = thread::spawn(peer);
    let mut pause = PollThenSleep::new(Duration::from_micros(20));
    let sockets = stack.sockets();
    let mut turn = |stack: &mut OurStack, at_most: Duration| {
        let work = stack.poll(now());
        let sleep = stack.next_deadline().map_or(at_most, |at| at.since(now()).min(at_most));
        pause.turn(work, &mut [stack], Some(sleep)).unwrap();
    };
    while !peer.is_finished() {
        turn(&mut stack, Duration::from_millis(5));
        serve(&sockets);
    }
    peer.join().unwrap();
    // What the user has left goes, and then nothing is left.
    drop(serve);
    let patience = Instant::now();
    while stack.connections() > stack.connections_in_time_wait() && patience.elapsed() < Duration::from_secs(20) {
        turn(&mut stack, Duration::from_millis(5));
    }
    assert_eq!(stack.pages(), 0, "{:?}", stack.stats());
    let stats = stack.stats();
    assert_eq!((stats.malformed, stats.wrong_checksum, stats.refused), (0, 0, 0), "{stats:?}");
    drop(sockets);
    let (rx, tx) = stack.into_queues();
    drop(tx);
    let closed = rx.close().unwrap();
    assert_eq!(closed.outstanding, 0, "received pages are home");
    let pool = Arc::into_inner(pool).unwrap().close();
    assert_eq!(pool.outstanding, 0, "sent pages are home");
    drop((pairs, driver));
    stop.store(true, Ordering::Relaxed);
    control.wake();
    running.join().unwrap().unwrap();
    drop(connection);
}

/// The bytes of a transfer.
fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32).map(|n| ((n ^ seed).wrapping_mul(0x9E37_79B1) >> 24) as u8).collect()
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

/// What a stream of ours does: it echoes, by reference.
struct Echo {
    stream: TcpStream<PeerShared>,
    /// Received, and not sent yet: fragments are sent as they are.
    pending: Option<netmem_pool::Frag<PeerShared>>,
    held: Fragment<PeerShared>,
}

impl Echo {
    fn new(stream: TcpStream<PeerShared>) -> Self {
        Self { stream, pending: None, held: Fragment::default() }
    }

    /// False when it is over.
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

/// The kernel connects, sends and receives at the same time, and compares every byte.
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

fn echo(net: u8, options: NetOptions) {
    let peer = move || {
        for v6 in [false, true] {
            let to = SocketAddr::new(address(net, v6, true), 7);
            exchange(to, 1, 5_000_000);
            let many: Vec<_> =
                (0..50).map(|n| thread::spawn(move || exchange(to, n, 10_000 + 1000 * n as usize))).collect();
            many.into_iter().for_each(|thread| thread.join().unwrap());
            // A port that nothing listens on.
            let refused = std::net::TcpStream::connect(SocketAddr::new(to.ip(), 8)).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
            // A datagram in three fragments, whose length is answered.
            let socket = UdpSocket::bind(SocketAddr::new(address(net, v6, false), 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let large = pattern(3, 4000);
            socket.send_to(&large, to).unwrap();
            let mut answer = [0; 100];
            let n = socket.recv(&mut answer).unwrap();
            assert_eq!(&answer[..n], format!("{} {}", large.len(), sum(&large)).as_bytes());
        }
    };
    let (mut listener, mut datagrams, mut echoes) = (None, None, Vec::<Echo>::new());
    beside_the_kernel(net, options, peer, move |sockets| {
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
    });
}

#[test]
fn the_kernel_connects_with_offloads() {
    echo(1, NetOptions::new(RxMode::Mergeable).max_frame(65549));
}

#[test]
fn the_kernel_connects_without_offloads() {
    echo(2, NetOptions::new(RxMode::Small).offloads(Offload::None));
}

/// Our stack connects to the kernel, which echoes; and datagrams.
#[test]
fn the_stack_connects_to_the_kernel() {
    const CONNECTIONS: usize = 20;
    let peer = move || {
        for v6 in [false, true] {
            let ip = address(3, v6, false);
            // Addresses are there, but IPv6 may need a moment.
            let listener = std::net::TcpListener::bind(SocketAddr::new(ip, 7007)).unwrap();
            let datagrams = UdpSocket::bind(SocketAddr::new(ip, 5353)).unwrap();
            datagrams.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let echoes: Vec<_> = (0..CONNECTIONS)
                .map(|_| {
                    let (mut stream, _) = listener.accept().unwrap();
                    thread::spawn(move || {
                        let mut all = Vec::new();
                        stream.read_to_end(&mut all).unwrap();
                        stream.write_all(&all).unwrap();
                    })
                })
                .collect();
            let mut bytes = [0; 2000];
            let (n, from) = datagrams.recv_from(&mut bytes).unwrap();
            datagrams.send_to(&bytes[..n], from).unwrap();
            echoes.into_iter().for_each(|thread| thread.join().unwrap());
        }
        // Time for the last bytes.
        thread::sleep(Duration::from_millis(300));
    };
    struct Client {
        stream: TcpStream<PeerShared>,
        sent: Vec<u8>,
        at: usize,
        received: Vec<u8>,
    }
    let mut round = 0;
    let mut clients: Vec<Client> = Vec::new();
    let mut datagrams = None;
    let (done, mut finished) = (std::rc::Rc::new(std::cell::Cell::new(0)), 0);
    let count = done.clone();
    beside_the_kernel(3, NetOptions::new(RxMode::Mergeable).max_frame(65549), peer, move |sockets| {
        if clients.is_empty() && round < 2 {
            // The kernel's socket may not be there yet: a connection that is refused is tried again.
            let to = SocketAddr::new(address(3, round == 1, false), 7007);
            let connect = |n: usize| Client {
                stream: sockets.connect(to, &Config::default()).unwrap(),
                sent: pattern(n as u32, 100_000 + n),
                at: 0,
                received: Vec::new(),
            };
            clients = (0..CONNECTIONS).map(connect).collect();
            let mut socket = sockets.bind(SocketAddr::new(address(3, round == 1, true), 0)).unwrap();
            let _ = socket.send_to(b"datagram", SocketAddr::new(to.ip(), 5353));
            datagrams = Some((socket, Instant::now()));
            round += 1;
        }
        if let Some((socket, at)) = &mut datagrams {
            let mut places: [Fragment<_>; 1] = Default::default();
            let to = SocketAddr::new(address(3, round == 2, false), 5353);
            if socket.recv_from(&mut places).is_ok_and(|received| received.len == 8) {
                assert_eq!(places[0].to_vec(), b"datagram");
                datagrams = None;
                finished += 1;
            } else if at.elapsed() > Duration::from_millis(100) {
                *at = Instant::now();
                let _ = socket.send_to(b"datagram", to);
            }
        }
        clients.retain_mut(|client| {
            match client.stream.is_connected() {
                Ok(true) => {}
                Ok(false) => return true,
                Err(_) => {
                    client.stream = sockets.connect(client.stream.peer_addr(), &Config::default()).unwrap();
                    return true;
                }
            }
            if client.at < client.sent.len() {
                client.at += client.stream.write(&client.sent[client.at..]).unwrap_or(0);
                if client.at == client.sent.len() {
                    client.stream.shutdown();
                }
            }
            let mut bytes = vec![0; 20_000];
            match client.stream.read(&mut bytes) {
                Ok(0) => {
                    assert!(client.received == client.sent, "{} bytes", client.received.len());
                    finished += 1;
                    count.set(finished);
                    false
                }
                Ok(n) => {
                    client.received.extend_from_slice(&bytes[..n]);
                    true
                }
                Err(SocketError::WouldBlock) => true,
                Err(error) => panic!("{error}"),
            }
        });
    });
    // All of them, or the test was skipped.
    assert!(done.get() == 0 || done.get() >= 2 * CONNECTIONS, "{}", done.get());
}
