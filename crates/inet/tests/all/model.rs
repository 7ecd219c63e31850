//! A stack is driven by random segments and random calls, in any order: open, accept, reset, close,
//! drop, the reuse of ports, replayed segments. A model knows which bytes each connection of the
//! peer has sent. What must hold:
//!
//! * A stream delivers the bytes of one connection of its peer, from the first one on, in order.
//! * What the stack has acknowledged, the connection's stream delivers, if its user still has it.
//! * Nothing panics, and in the end nothing is left: no connection, no flow, no page.
//!
//! A seed that fails is printed. `NETMEM_SEED=n` runs it alone, and `NETMEM_SEEDS=n` runs so many.

use crate::common::addr;
use crate::common::peer::{ACK, FIN, PSH, RST, SYN, Seg, Wire};
use netmem_inet::{ListenOptions, StackOptions, TcpListener, TcpStream};
use netmem_pool::Private;
use std::collections::BTreeMap;
use std::time::Duration;

/// Few ports, so that connections follow each other on the same flow.
const PORTS: [u16; 3] = [5001, 5002, 5003];
const STEPS: usize = 300;

/// A connection, as the peer sees it. The peer can have forgotten it, and opened a later one from
/// the same port.
#[derive(Clone, Debug)]
struct Remote {
    peer: u16,
    iss: u32,
    /// The next numbers of the peer and of the stack, if SYN-ACK has arrived.
    next: Option<(u32, u32)>,
    /// Bytes that the stack has acknowledged.
    acknowledged: u32,
    finished: bool,
}

impl Remote {
    fn segment(&self, flags: u8, payload: Vec<u8>) -> Option<Seg> {
        let (seq, ack) = self.next?;
        Some(Seg { peer: self.peer, port: 80, flags, seq, ack, window: u16::MAX, payload })
    }
}

/// The byte that a connection of the peer sends at an offset.
fn byte(iss: u32, offset: u32) -> u8 {
    (iss.wrapping_mul(0x9E37_79B1) ^ offset.wrapping_mul(0x85EB_CA77)).wrapping_mul(0xC2B2_AE3D).to_be_bytes()[0]
}

/// A stream of the user, and what it has read.
struct Local {
    stream: TcpStream<Private>,
    read: Vec<u8>,
}

struct Model {
    wire: Wire,
    rng: fastrand::Rng,
    listener: Option<TcpListener<Private>>,
    remotes: Vec<Remote>,
    streams: Vec<Local>,
    /// Connections of the peer whose streams the user has dropped, or that were reset before they
    /// were accepted.
    log: Vec<Seg>,
    next_iss: u32,
}

impl Model {
    fn new(seed: u64) -> Self {
        let options = StackOptions { time_wait: 4, ..StackOptions::default() };
        let rng = fastrand::Rng::with_seed(seed);
        let (remotes, streams, log) = Default::default();
        let mut model =
            Self { wire: Wire::new(options), rng, listener: None, remotes, streams, log, next_iss: 1_000_000 };
        model.listen();
        model
    }

    fn listen(&mut self) {
        let options =
            ListenOptions { backlog: self.rng.usize(1..5), half_open: self.rng.usize(0..3), ..Default::default() };
        self.listener = self.wire.stack.sockets().listen(addr("0.0.0.0:80"), options).ok();
    }

    /// Puts a segment on the cable. Sometimes the stack is polled only later.
    fn send(&mut self, seg: Seg) {
        self.wire.put(&seg);
        self.log.push(seg);
        if self.rng.u8(0..4) > 0 {
            self.receive();
        }
    }

    /// Processes what the stack has sent.
    fn receive(&mut self) {
        let sent = self.wire.poll();
        self.process(sent);
    }

    fn process(&mut self, sent: Vec<Seg>) {
        for seg in sent {
            // The latest connection of the port to which it belongs.
            let Some(remote) = self.remotes.iter_mut().rfind(|remote| {
                remote.peer == seg.peer && seg.has(ACK) && seg.ack.wrapping_sub(remote.iss) <= 1_000_000
            }) else {
                continue;
            };
            if seg.has(SYN) && remote.next.is_none() {
                remote.next = Some((remote.iss + 1, seg.end()));
            } else if !seg.has(RST)
                && let Some((next, ack)) = &mut remote.next
            {
                if seg.seq == *ack {
                    *ack = seg.end();
                }
                let offset = seg.ack.wrapping_sub(remote.iss + 1);
                if offset <= *next - (remote.iss + 1) {
                    remote.acknowledged =
                        remote.acknowledged.max(offset - u32::from(remote.finished && seg.ack == *next));
                }
            }
        }
    }

    /// A random segment of the peer, a random call of the user, or a pause.
    fn step(&mut self) {
        let port = self.rng.choice(PORTS).unwrap();
        let which = self.remotes.len().saturating_sub(1 + self.rng.usize(0..4));
        let stream = (!self.streams.is_empty()).then(|| self.rng.usize(0..self.streams.len()));
        match (self.rng.u8(0..20), stream) {
            (0..=2, _) => self.open(port),
            (kind @ 3..=13, _) => drop(self.send_of(kind, which)),
            (14, _) => self.accept(),
            (15, Some(n)) => {
                let len = self.rng.usize(1..100);
                self.read(n, len);
            }
            (16, Some(n)) => {
                let local = &mut self.streams[n];
                match self.rng.u8(0..4) {
                    0 => local.stream.shutdown(),
                    1 => local.stream.reset(),
                    _ => drop(local.stream.write(b"answer")),
                }
            }
            (17, Some(n)) => drop(self.streams.swap_remove(n)),
            (15..=17, None) => {}
            (18, _) if self.rng.u8(0..10) == 0 => {
                self.listener = None;
                self.listen();
            }
            _ => {
                let micros = 1 << self.rng.u32(0..28);
                let (sent, _) = self.wire.pass(Duration::from_micros(micros));
                self.process(sent);
            }
        }
    }

    /// The peer opens a connection.
    fn open(&mut self, peer: u16) {
        self.next_iss += 2_000_000;
        let iss = self.next_iss;
        self.remotes.push(Remote { peer, iss, next: None, acknowledged: 0, finished: false });
        self.send(Seg { peer, port: 80, flags: SYN, seq: iss, window: u16::MAX, ..Seg::default() });
    }

    /// The user accepts a connection, or all that wait.
    fn accept(&mut self) {
        while let Some(Ok(stream)) = self.listener.as_mut().map(TcpListener::accept) {
            self.streams.push(Local { stream, read: Vec::new() });
            if self.rng.bool() {
                break;
            }
        }
    }

    /// The peer sends a segment of a connection: an acknowledgement, payload, FIN, RST, or an old
    /// segment. `None` if the connection cannot.
    fn send_of(&mut self, kind: u8, which: usize) -> Option<()> {
        let remote = self.remotes.get_mut(which);
        let segment = match kind {
            3..=4 => remote?.segment(ACK, Vec::new())?,
            5..=8 => {
                let remote = remote.filter(|remote| !remote.finished)?;
                let (seq, _) = remote.next?;
                let (len, from) = (self.rng.u32(1..50), seq - remote.iss - 1);
                let payload = (from..from + len).map(|offset| byte(remote.iss, offset)).collect();
                let segment = remote.segment(ACK | PSH, payload)?;
                remote.next.as_mut()?.0 += len;
                segment
            }
            9 => {
                let remote = remote.filter(|remote| !remote.finished)?;
                let fin = remote.segment(FIN | ACK, Vec::new())?;
                remote.finished = true;
                remote.next.as_mut()?.0 += 1;
                fin
            }
            10..=11 => {
                let mut reset = remote?.segment(RST, Vec::new())?;
                reset.seq = reset.seq.wrapping_add(if self.rng.bool() { 0 } else { self.rng.u32(..100) });
                reset
            }
            _ => {
                let old = self.log.len().saturating_sub(1 + self.rng.usize(0..30));
                self.log.get(old).cloned()?
            }
        };
        self.send(segment);
        Some(())
    }

    fn read(&mut self, n: usize, len: usize) {
        let mut bytes = vec![0; len];
        let Local { stream, read } = &mut self.streams[n];
        while let Ok(len) = stream.read(&mut bytes)
            && len > 0
        {
            read.extend_from_slice(&bytes[..len]);
            if bytes.len() < 100 {
                break;
            }
        }
    }

    /// Reads all that there is, and compares it with what the peer has sent.
    fn check(&mut self) {
        self.receive();
        let mut delivered: BTreeMap<u32, usize> = BTreeMap::new();
        for n in 0..self.streams.len() {
            self.read(n, 100);
            let Local { stream, read } = &self.streams[n];
            let sends = |remote: &&Remote| {
                let sent = remote.next.map_or(0, |(seq, _)| seq - remote.iss - 1) as usize;
                let is_its = |(at, got): (usize, &u8)| *got == byte(remote.iss, at as u32);
                remote.peer == stream.peer_addr().port() && read.len() <= sent && read.iter().enumerate().all(is_its)
            };
            let from: Vec<&Remote> = self.remotes.iter().filter(sends).collect();
            assert!(read.is_empty() || !from.is_empty(), "{stream:?} has bytes of no connection: {read:?}");
            if let ([remote], false) = (&from[..], read.is_empty()) {
                let most = delivered.entry(remote.iss).or_default();
                *most = read.len().max(*most);
            }
        }
        for remote in &self.remotes {
            if let Some(&delivered) = delivered.get(&remote.iss).filter(|&&delivered| delivered > 3) {
                assert!(delivered >= remote.acknowledged as usize, "{remote:?}: {delivered} bytes were delivered");
            }
        }
    }

    fn end(mut self) {
        self.check();
        self.streams.clear();
        self.listener = None;
        let (sent, _) = self.wire.pass(Duration::from_secs(2000));
        self.process(sent);
        let Wire { stack, host, .. } = &self.wire;
        assert_eq!((stack.connections(), host.connections(), stack.pages()), (0, 0, 0), "{:?}", stack.stats());
    }
}

#[test]
fn any_order_of_segments_and_calls_keeps_streams_apart() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds = match number("NETMEM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("NETMEM_SEEDS").unwrap_or(200),
    };
    let (mut ended, mut delivered) = (0, 0);
    for seed in seeds {
        println!("seed {seed}");
        let mut model = Model::new(seed);
        for _ in 0..STEPS {
            model.step();
        }
        model.check();
        ended += model.wire.stack.stats().ended_unaccepted;
        delivered += model.streams.iter().map(|local| local.read.len()).sum::<usize>();
        model.end();
    }
    // The steps have reached what they are for.
    assert!(ended > 0 && delivered > 0, "{ended} {delivered}");
}
