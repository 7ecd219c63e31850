//! A stack whose streams are in device memory, and users of its streams. The device is in another
//! process.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use crate::device_end::{DeviceEnd, Span, pattern};
use crate::kernel_common::addresses;
use crate::memory_common::{Memory, worker};
use crate::net_common::Harness;
use netmem_devmem::stream::{
    Bindings, DeviceStream, InFlight, OnDevice, StreamError, StreamFragment, StreamRx, StreamSendError, StreamTx,
    Streams,
};
use netmem_devmem::{Binding, BindingRef, TokenRange};
use netmem_inet::tcp::Config;
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface, SocketError, Stack, StackOptions, Time};
use netmem_packet::PollThenSleep;
use netmem_pool::{PeerShared, PoolOptions, SharedPool};
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, QueueWait, SplitOptions, VirtioSplitTx};
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub type OurStack = Stack<StreamRx<QueueWait>, StreamTx<VirtioSplitTx<InFlight>>>;

/// The number of pages of device memory, and how many of them users may hold.
pub const PAGES: usize = 4096;
pub const HELD: u32 = 3000;

/// This limit only makes a failing test end.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// Our address: 10.79.0.2 and fd79::2.
pub fn our(v6: bool) -> IpAddr {
    if v6 { [0xfd79, 0, 0, 0, 0, 0, 0, 2].into() } else { [10, 79, 0, 2].into() }
}

/// The kernel's address.
pub fn kernel(v6: bool) -> IpAddr {
    if v6 { [0xfd79, 0, 0, 0, 0, 0, 0, 1].into() } else { [10, 79, 0, 1].into() }
}

/// A stack, with its device, driver and binding.
pub struct Ours {
    pub stack: OurStack,
    pub streams: Streams,
    binding: Binding,
    /// The reference from which streams send.
    pub from: BindingRef,
    pub memory: Memory,
    pub end: DeviceEnd,
    harness: Harness<InFlight>,
    headers: Arc<SharedPool<PeerShared>>,
    beginning: Instant,
    pause: PollThenSleep,
    /// Whether the link damages packets, including their headers.
    bad_link: bool,
}

impl Ours {
    /// Makes a stack on a tap in this thread's network, with a bad link if `link` is set.
    pub fn new(link: Option<&str>) -> Result<Self, String> {
        let memory = Memory::pages(PAGES);
        let mut end = DeviceEnd::spawn("nm0", 1, link, &[&memory]);
        addresses("nm0")?;
        let front = end.front.take().expect("the first to take it");
        let backend = VhostUser::own_device(front).expect("the device answers");
        Ok(Self::on(backend, SplitOptions::TCP_V6, memory, end, link.is_some()))
    }

    /// Makes a stack on a back end, whose frames have `header_bytes` in host memory at most. `end`
    /// reads `memory` from the device's side.
    pub fn on(backend: VhostUser, header_bytes: u16, memory: Memory, end: DeviceEnd, bad_link: bool) -> Self {
        let worker = worker();
        let binding = Binding::new(memory.fd(), 0, &worker).expect("it can be bound");
        let region = binding.region().clone();
        let options = |options: NetOptions| options.device_memory(region).tx_pages(2048);
        let mut harness: Harness<InFlight> = Harness::on(backend, 1, header_bytes, options);
        let bindings = Bindings::new();
        bindings.add(&binding);
        let rx = StreamRx::new(harness.queues().wait(0).expect("there is one"), &bindings);
        harness.net.attach(&binding, &[0]).expect("it is free");
        let tx = StreamTx::new(harness.tx.remove(0), harness.device.domain().expect("it has one"));
        let headers = Arc::new(harness.device.tx_pool(PoolOptions::new("headers")).expect("a pool"));
        let addresses = [false, true].map(|v6| Address { addr: our(v6), prefix_len: if v6 { 64 } else { 24 } });
        let host =
            Host::<OnDevice>::new(Interface { mac: Mac([2, 0, 0, 0, 0, 2]), mtu: 1500, addresses: addresses.to_vec() });
        let options = StackOptions { pages: HELD, ..StackOptions::default() };
        let mut stack = Stack::new(&host, rx, tx, headers.clone(), options, Time::ZERO).expect("a stack");
        let streams = Streams::new(&mut stack);
        let (beginning, pause) = (Instant::now(), PollThenSleep::new(Duration::from_micros(20)));
        let from = binding.reference();
        Self { stack, streams, binding, from, memory, end, harness, headers, beginning, pause, bad_link }
    }

    /// Polls the stack once, and sleeps for a moment if there is nothing to do. Checks that this
    /// process has no mapping of the memory.
    #[track_caller]
    pub fn turn(&mut self) {
        assert!(self.beginning.elapsed() < PATIENCE, "it never happens: {:?}", self.stack.stats());
        let now = Time::ZERO + self.beginning.elapsed();
        let work = self.stack.poll(now);
        let most = Duration::from_millis(5);
        let sleep = self.stack.poll_timeout().map_or(most, |at| at.since(now).min(most));
        self.pause.turn(work, &mut [&mut self.stack], Some(sleep)).expect("it sleeps");
        assert_eq!(self.memory.mappings(), 0, "device memory is mapped here");
    }

    /// The features that the driver and the device have negotiated.
    pub fn features(&self) -> u64 {
        self.harness.device.features()
    }

    /// Polls until no connection waits for its peer any more.
    #[track_caller]
    pub fn end_connections(&mut self) {
        let patience = Instant::now() + Duration::from_secs(60);
        while self.stack.connections() > self.stack.connections_in_time_wait() {
            assert!(Instant::now() < patience, "connections do not end: {:?}", self.stack.stats());
            self.turn();
        }
    }

    /// Drops everything, and checks that all pages come home.
    #[track_caller]
    pub fn close(mut self) {
        self.end_connections();
        let Self { stack, streams, binding, from, memory, end, mut harness, headers, bad_link, .. } = self;
        let stats = stack.stats();
        assert_eq!((stack.pages(), stats.refused), (0, 0), "{stats:?}");
        assert!(bad_link || stats.malformed == 0, "{stats:?}");
        drop(streams);
        let (rx, tx) = stack.into_queues();
        drop((rx, tx));
        harness.net.unbind(binding).expect("the device goes on");
        drop(harness);
        assert_eq!(from.stats().in_use, 0);
        drop(from);
        let headers = Arc::into_inner(headers).expect("the last of it").close();
        assert_eq!(headers.outstanding, 0, "header pages are home");
        memory.assert_gone();
        drop(end);
    }
}

/// Received payload.
pub enum ReceivedFragment {
    Device { offset: u64, len: u32, tokens: TokenRange },
    Host(netmem_inet::Fragment<PeerShared>),
}

/// A stream's receiving side. It compares each byte with the pattern of `seed`; bytes in device
/// memory are compared by the device's process.
pub struct Receiver {
    pub seed: u64,
    pub position: u64,
    pub in_device: u64,
    pub in_host: u64,
    /// Parts in host memory, and the bytes of the longest.
    pub host_parts: u64,
    pub longest_in_host: usize,
}

impl Receiver {
    pub fn new(seed: u64) -> Self {
        Self { seed, position: 0, in_device: 0, in_host: 0, host_parts: 0, longest_in_host: 0 }
    }

    /// Returns the queued payload; `None` at the end of the stream.
    #[track_caller]
    pub fn receive(&mut self, stream: &mut DeviceStream, end: &mut DeviceEnd) -> Option<Vec<ReceivedFragment>> {
        let mut places = [const { StreamFragment::Empty }; 16];
        let n = match stream.recv(&mut places) {
            Ok(0) => return None,
            Ok(n) => n,
            Err(StreamError::Socket(SocketError::WouldBlock)) => return Some(Vec::new()),
            Err(error) => panic!("{error}"),
        };
        let (mut parts, mut pieces) = (Vec::new(), Vec::new());
        for place in places.into_iter().take(n) {
            let (position, seed) = (self.position, self.seed);
            match place {
                StreamFragment::Device { offset, len, tokens, .. } => {
                    pieces.push(Span { memory: 0, offset, len, seed, position });
                    (self.position, self.in_device) = (position + u64::from(len), self.in_device + u64::from(len));
                    parts.push(ReceivedFragment::Device { offset, len, tokens });
                }
                StreamFragment::Linear(host) => {
                    let (is, mut want) = (host.to_vec(), vec![0; host.len()]);
                    pattern(seed, position, &mut want);
                    assert!(is == want, "{} bytes in host memory at {position} are wrong", is.len());
                    (self.position, self.in_host) = (position + is.len() as u64, self.in_host + is.len() as u64);
                    (self.host_parts, self.longest_in_host) = (self.host_parts + 1, self.longest_in_host.max(is.len()));
                    parts.push(ReceivedFragment::Host(host));
                }
                StreamFragment::Empty => panic!("nothing was received, and counted"),
            }
        }
        end.check(&pieces);
        Some(parts)
    }
}

/// A user that sends received payload back from where it landed.
pub struct Echo {
    stream: DeviceStream,
    pub receiver: Receiver,
    /// Parts that were received and not sent yet.
    waiting: VecDeque<ReceivedFragment>,
    /// Tokens of ranges that are being sent: they are given back when the range may be used again.
    sending: HashMap<u64, TokenRange>,
    ended: bool,
    shut_down: bool,
}

impl Echo {
    /// The peer sends the pattern of its port.
    pub fn new(stream: DeviceStream) -> Self {
        let receiver = Receiver::new(stream.tcp().peer_addr().port().into());
        let (waiting, sending) = Default::default();
        Self { stream, receiver, waiting, sending, ended: false, shut_down: false }
    }

    /// Returns false when the stream is over.
    #[track_caller]
    pub fn turn(&mut self, from: &BindingRef, end: &mut DeviceEnd) -> bool {
        let returner = self.stream.returner();
        while let Some(sent) = self.stream.sent() {
            if let Some(tokens) = self.sending.remove(&sent.range) {
                assert_eq!(returner.return_tokens(&[tokens]), Ok(tokens.count as usize));
            }
        }
        if !self.ended && self.waiting.len() < 64 {
            match self.receiver.receive(&mut self.stream, end) {
                Some(parts) => self.waiting.extend(parts),
                None => self.ended = true,
            }
        }
        while let Some(part) = self.waiting.pop_front() {
            let more = !self.waiting.is_empty();
            let refused = match &part {
                ReceivedFragment::Device { offset, len, tokens } => match self.stream.send(from, *offset, *len, more) {
                    Ok(range) => {
                        self.sending.insert(range, *tokens);
                        false
                    }
                    Err(StreamSendError::Socket(SocketError::WouldBlock)) => true,
                    Err(error) => panic!("{error}"),
                },
                ReceivedFragment::Host(host) => match self.stream.send_host(host.share().expect("a fragment"), more) {
                    Ok(()) => false,
                    Err((SocketError::WouldBlock, _)) => true,
                    Err((error, _)) => panic!("{error}"),
                },
            };
            if refused {
                self.waiting.push_front(part);
                break;
            }
        }
        if self.ended && self.waiting.is_empty() && !self.shut_down {
            self.stream.tcp_mut().shutdown();
            self.shut_down = true;
        }
        !(self.shut_down && self.sending.is_empty())
    }
}

/// Sends `len` bytes from a binding that the device has filled, in ranges of many lengths at any
/// place, and then the end.
pub struct Source {
    stream: DeviceStream,
    at: u64,
    len: u64,
    unfinished: u64,
    shut_down: bool,
}

/// Where a stream's bytes are in device memory.
pub const PLACE: u64 = 1000 * 4096 + 13;

impl Source {
    pub fn new(stream: DeviceStream, seed: u64, len: u64, ours: &mut Ours) -> Self {
        for position in (0..len).step_by(1 << 16) {
            let piece = (len - position).min(1 << 16) as u32;
            ours.end.fill(&[Span { memory: 0, offset: PLACE + position, len: piece, seed, position }]);
        }
        Self { stream, at: 0, len, unfinished: 0, shut_down: false }
    }

    /// Returns false when everything was acknowledged.
    #[track_caller]
    pub fn turn(&mut self, ours: &Ours, rng: &mut fastrand::Rng) -> bool {
        while let Some(sent) = self.stream.sent() {
            assert!(sent.offset >= PLACE && sent.binding == ours.from.id(), "{sent:?}");
            self.unfinished -= 1;
        }
        if !matches!(self.stream.tcp().is_connected(), Ok(true)) {
            return true;
        }
        while self.at < self.len {
            let len = rng.u64(1..=100_000).min(self.len - self.at);
            match self.stream.send(&ours.from, PLACE + self.at, len as u32, false) {
                Ok(_) => (self.at, self.unfinished) = (self.at + len, self.unfinished + 1),
                Err(StreamSendError::Socket(SocketError::WouldBlock)) => return true,
                Err(error) => panic!("{error}"),
            }
        }
        if !self.shut_down {
            self.stream.tcp_mut().shutdown();
            self.shut_down = true;
        }
        self.unfinished > 0
    }
}

/// Our side connects to the kernel, and sends `len` bytes from device memory. The kernel's side
/// compares them.
#[track_caller]
pub fn send_to_the_kernel(ours: &mut Ours, v6: bool, len: u64) {
    use std::io::Read;
    let listener = TcpListener::bind(SocketAddr::new(kernel(v6), 0)).expect("a port");
    let to = listener.local_addr().expect("it is bound");
    let seed = to.port().into();
    let peer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let (mut received, mut want) = (Vec::new(), vec![0; len as usize]);
        stream.read_to_end(&mut received).expect("the peer ends in order");
        pattern(seed, 0, &mut want);
        assert!(received == want, "{} of {len} bytes, or others", received.len());
    });
    let stream = ours.streams.connect(to, &Config::default()).expect("a connection");
    let mut source = Source::new(stream, seed, len, ours);
    let mut rng = fastrand::Rng::with_seed(7);
    while source.turn(ours, &mut rng) || !peer.is_finished() {
        ours.turn();
    }
    peer.join().expect("the kernel has received every byte");
}

/// The kernel's side of an echo: it sends the pattern of its port, and compares what comes back.
#[track_caller]
pub fn exchange(to: SocketAddr, len: usize) {
    use std::io::{Read, Write};
    let stream = std::net::TcpStream::connect(to).expect("a connection");
    let seed = stream.local_addr().expect("a port").port().into();
    let mut sent = vec![0; len];
    pattern(seed, 0, &mut sent);
    let mut writer = stream.try_clone().expect("a descriptor");
    let copy = sent.clone();
    let thread = std::thread::spawn(move || {
        writer.write_all(&copy).expect("the peer takes it");
        writer.shutdown(std::net::Shutdown::Write).expect("it is open");
    });
    let mut received = Vec::new();
    (&stream).read_to_end(&mut received).expect("the peer ends in order");
    thread.join().expect("it was sent");
    assert!(received == sent, "{to}: {} of {len} bytes came back, or others", received.len());
}
