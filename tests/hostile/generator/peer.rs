//! A host of many addresses: it answers questions for them, and keeps connections.

use super::connection::{Connection, mss};
use super::frame::{self, ACK, ALL, Mac, PSH, Received, SYN};
use super::link::{Hears, Link, QUEUE};
use super::namespace::ip;
use super::server::{Report, Server, Service, TAP, V4, V6};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// What does not come in this time is missing. Nothing takes long; the machine may have much else
/// to do.
const PATIENCE: Duration = Duration::from_secs(30);
/// The peer's Ethernet address.
pub const MAC: Mac = [0x02, 0xaa, 0, 0, 0x5a, 0x5a];
/// Connections that are opened at once: not more than wait for accept.
const OPENED: usize = 256;

/// An address of the peer, as the server's neighbour.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host {
    /// It has asked for the server's Ethernet address, and so made its own known.
    known: bool,
    /// It answers no questions.
    pub silent: bool,
    /// Its Ethernet address, if it is not the peer's.
    pub mac: Option<Mac>,
    /// Questions for it that went to all stations, and to it alone.
    pub asked: [u32; 2],
}

pub struct Peer {
    pub server: Server,
    pub link: Link,
    /// The server's Ethernet address.
    pub to: Mac,
    pub hosts: HashMap<IpAddr, Host>,
    /// The answers to echo requests of this round.
    echoes: HashSet<[u8; 4]>,
    round: u32,
    connections: Vec<Connection>,
    /// By the peer's address and port, and the server's port.
    index: HashMap<(SocketAddr, u16), usize>,
    out: Vec<Vec<u8>>,
    buffer: Box<[u8]>,
}

/// Address `n` of the peer.
pub fn v4(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 1, 0, 0).to_bits() + n).into()
}

/// Address `n` of the peer, of the other family.
pub fn v6(n: u32) -> IpAddr {
    Ipv6Addr::from_bits(Ipv6Addr::new(0xfd79, 0, 0, 0, 1, 0, 0, 0).to_bits() + u128::from(n)).into()
}

/// `n` addresses and ports of the peer: 40 ports of each address, and each connection has another
/// one. The server knows 1024 neighbours at most.
pub fn locals(n: usize) -> Vec<SocketAddr> {
    (0..n as u32).map(|n| SocketAddr::new(v4(n / 40), 2000 + (n % 40) as u16)).collect()
}

impl Peer {
    /// Starts the server, and asks for its Ethernet address.
    #[track_caller]
    pub fn start(command: &Path, service: Service, args: &[&str]) -> Self {
        let server = Server::start(command, service, args);
        ip(&format!("link set {TAP} txqueuelen {QUEUE}"));
        let link = Link::open(TAP, Hears::All);
        let mut peer = Self {
            server,
            link,
            to: ALL,
            hosts: HashMap::new(),
            echoes: HashSet::new(),
            round: 0,
            connections: Vec::new(),
            index: HashMap::new(),
            out: Vec::new(),
            buffer: vec![0; 1 << 17].into(),
        };
        peer.introduce(v4(0));
        peer.until("the server's Ethernet address", |peer| peer.to != ALL);
        peer
    }

    /// The addresses of each frame.
    pub fn ethernet(&self) -> frame::Link {
        frame::Link { from: MAC, to: self.to }
    }

    /// Sends a frame with the next call that receives.
    pub fn push(&mut self, frame: Vec<u8>) {
        self.out.push(frame);
    }

    /// The frame that was pushed last, which is not sent.
    pub fn take_last(&mut self) -> Vec<u8> {
        self.out.pop().unwrap()
    }

    #[track_caller]
    pub fn flush(&mut self) {
        let mut out = std::mem::take(&mut self.out);
        if self.link.send(&out).is_err() {
            self.server.ended();
        }
        out.clear();
        self.out = out;
    }

    // ---- connections

    /// The server's address and port for a connection from `local`.
    fn remote(&self, local: SocketAddr) -> SocketAddr {
        SocketAddr::new(Server::address(&local.ip()), self.server.service().port())
    }

    /// A station asks for the server's Ethernet address before it sends the first packet, and so
    /// makes its own known.
    fn introduce(&mut self, address: IpAddr) {
        if !std::mem::replace(&mut self.hosts.entry(address).or_default().known, true) {
            let link = frame::Link { from: MAC, to: ALL };
            self.push(match address {
                IpAddr::V4(own) => frame::arp(link, true, (MAC, own), ([0; 6], V4)),
                IpAddr::V6(own) => frame::solicitation(self.ethernet(), own, V6, MAC),
            });
        }
    }

    /// Sends SYN. If there was a connection from `local`, the new one has later numbers.
    pub fn open(&mut self, local: SocketAddr) -> usize {
        self.introduce(local.ip());
        let remote = self.remote(local);
        let before = self.index.get(&(local, remote.port())).map(|&n| self.connections[n].next);
        let n = self.connections.len();
        let start = before.map_or((n as u32).wrapping_mul(1_000_003), |next| next.wrapping_add(200_000));
        self.connections.push(Connection::new(local, remote, start));
        self.index.insert((local, remote.port()), n);
        self.segment(n, SYN, &[]);
        n
    }

    pub fn connection(&mut self, n: usize) -> &mut Connection {
        &mut self.connections[n]
    }

    /// Opens connections, and waits until they are established.
    #[track_caller]
    pub fn connect(&mut self, locals: &[SocketAddr]) -> Vec<usize> {
        let mut all = Vec::new();
        for locals in locals.chunks(OPENED) {
            let opened: Vec<_> = locals.iter().map(|&local| self.open(local)).collect();
            self.all("connections are established", &opened, |connection| connection.established);
            self.flush();
            all.extend(opened);
        }
        all
    }

    /// Sends a segment, and counts what it occupies.
    pub fn segment(&mut self, n: usize, flags: u8, payload: &[u8]) {
        let frame = self.connections[n].segment(0, flags, payload).frame(self.ethernet());
        let occupies = payload.len() + (flags & (SYN | frame::FIN)).count_ones() as usize;
        let connection = &mut self.connections[n];
        connection.next = connection.next.wrapping_add(occupies as u32);
        self.push(frame);
    }

    /// Sends a segment whose number is later than the next one by `ahead`.
    pub fn out_of_order(&mut self, n: usize, ahead: u32, flags: u8, payload: &[u8]) {
        let frame = self.connections[n].segment(ahead, flags, payload).frame(self.ethernet());
        self.push(frame);
    }

    /// Sends bytes in full segments, whatever the server's window is.
    pub fn send(&mut self, n: usize, bytes: &[u8]) {
        for part in bytes.chunks(mss(self.connections[n].local)) {
            self.segment(n, ACK | PSH, part);
        }
    }

    /// Acknowledges what has arrived.
    pub fn acknowledge(&mut self, n: usize) {
        self.segment(n, ACK, &[]);
    }

    // ---- what arrives

    /// Sends what is due and processes what has arrived. Waits for a frame at most this long. Fails
    /// if the server has ended.
    #[track_caller]
    pub fn pump(&mut self, most: Duration) {
        self.flush();
        if self.receive() == 0 {
            let mut ready =
                [self.link.as_fd(), self.server.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let most = Timespec::try_from(most).unwrap();
            let polled = rustix::event::poll(&mut ready, Some(&most));
            assert!(polled.is_ok() || polled == Err(rustix::io::Errno::INTR), "{polled:?}");
            let ended = !ready[1].revents().is_empty();
            if ended {
                self.server.ended();
            }
            self.receive();
        }
        self.flush();
    }

    fn receive(&mut self) -> usize {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut frames = 0;
        while frames < 1024
            && let Some(len) = self.link.receive(&mut buffer)
        {
            frames += 1;
            match frame::read(&buffer[..len]) {
                Received::Segment(segment) => self.arrives(&segment),
                Received::Question { target, to, asker } => self.asked(target, to, asker),
                Received::Answer(mac, address) if address == IpAddr::V4(V4) => self.to = mac,
                Received::Echo(id) => {
                    self.echoes.insert(id);
                }
                Received::Answer(..) | Received::Other => {}
            }
        }
        self.buffer = buffer;
        frames
    }

    fn arrives(&mut self, segment: &frame::Arrived<'_>) {
        let Some(&n) = self.index.get(&(segment.to, segment.from.port())) else { return };
        if self.connections[n].arrives(segment) {
            self.acknowledge(n);
        }
    }

    fn asked(&mut self, target: IpAddr, to: Mac, (mac, asker): (Mac, IpAddr)) {
        let host = self.hosts.entry(target).or_default();
        // A solicitation for all goes to a group.
        host.asked[usize::from(to[0] & 1 == 0)] += 1;
        if host.silent {
            return;
        }
        let own = host.mac.unwrap_or(MAC);
        let link = frame::Link { from: own, to: mac };
        match (target, asker) {
            (IpAddr::V4(target), IpAddr::V4(asker)) => {
                self.push(frame::arp(link, false, (own, target), (mac, asker)));
            }
            (IpAddr::V6(target), IpAddr::V6(asker)) => self.push(frame::advertisement(link, target, asker, own)),
            _ => {}
        }
    }

    /// Waits until `done`. A server that never does it fails the test.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let begin = Instant::now();
        loop {
            self.flush();
            self.receive();
            if done(self) {
                return;
            }
            assert!(begin.elapsed() < PATIENCE, "{what}: they do not come");
            self.pump(Duration::from_millis(20));
        }
    }

    /// Waits until all of these connections are `done`.
    #[track_caller]
    pub fn all(&mut self, what: &str, numbers: &[usize], mut done: impl FnMut(&Connection) -> bool) {
        let mut left = numbers.to_vec();
        let begin = Instant::now();
        loop {
            self.flush();
            self.receive();
            left.retain(|&n| !done(&self.connections[n]));
            if left.is_empty() {
                return;
            }
            assert!(begin.elapsed() < PATIENCE, "{what}: not {} of {}, the first: {:?}", left.len(), numbers.len(), {
                let first = &self.connections[left[0]];
                (first.local, first.established, first.finished, first.reset, first.received.len(), first.in_flight())
            });
            self.pump(Duration::from_millis(20));
        }
    }

    /// Waits until the server has processed all frames that were sent: it answers an echo request
    /// that came after them.
    #[track_caller]
    pub fn settle(&mut self) {
        self.settle_from(1);
    }

    /// The same for a server with several queues. Stations of many addresses ask, so that some ask
    /// on each queue; and they ask twice, because what a queue hands to another one is processed a
    /// turn later.
    #[track_caller]
    pub fn settle_on_all_queues(&mut self) {
        self.settle_from(32);
        self.settle_from(32);
    }

    #[track_caller]
    fn settle_from(&mut self, stations: u32) {
        self.echoes.clear();
        self.round += 1;
        let id = |station: u32, round: u32| (round << 8 | station).to_be_bytes();
        self.until("answers to echo requests", |peer| {
            let round = peer.round;
            let asks: Vec<u32> = (0..stations).filter(|&n| !peer.echoes.contains(&id(n, round))).collect();
            for &station in &asks {
                peer.introduce(v4(station));
                // The server limits its answers, so that one request may not be enough.
                let addresses = [v4(station), V4.into()];
                peer.push(frame::icmp(peer.ethernet(), addresses, [8, 0], id(station, round), b"settle"));
            }
            asks.is_empty()
        });
    }

    /// Ends the server. No frame was lost on the way to it or back.
    #[track_caller]
    pub fn end(self) -> Report {
        let ((sent, dropped), missed) = (self.link.sent().unwrap(), self.link.missed());
        assert_eq!((dropped, missed), (0, 0), "frames that were lost outside of the server, of {sent}");
        self.server.end()
    }
}
