//! Two connections over a bad link, with a seed for everything that happens. Both are pure values, so that a seed does the same each time.
//!
//! A thousand seeds are run; `NETMEM_SIM_SEEDS=FIRST-LAST` names others, and `run.sh` runs a hundred thousand on all CPUs. A seed that
//! fails is printed, with what it stands for; `NETMEM_SIM_SEEDS=N NETMEM_SIM_TRACE=1` runs it again and prints each packet.
//!
//! What must hold, whatever the link does:
//!
//! * Each byte that is read is the byte that was sent there. Unless a user resets or closes early, all are read, and then the end.
//! * Something is always going to happen until both ends are gone: a packet, a timer, or a user who has something to do.
//! * Windows do not shrink, nothing is sent beyond what the peer announced, and buffers stay within the budget.
//! * When both ends are dropped, no payload is held.
#![allow(clippy::unwrap_used, missing_docs)]

mod host;
mod hostile;
mod memory;

use fastrand::Rng;
use host::{End, Host, Plan, Ring};
use netmem_inet::Time;
use netmem_inet::tcp::sender::SendOptions;
use netmem_inet::tcp::{Config, Congestion, Ecn, Error, Flags, KeepAlive, Listener};
use netmem_inet::wire::Flow;
use netmem_packet::link::{Link, LinkOptions, flip};
use std::fmt::Write;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Events of a run. One that has more makes no progress.
const MOST_EVENTS: usize = 60_000;

struct World {
    hosts: [Host; 2],
    links: [Link<Vec<u8>>; 2],
    now: Time,
    /// The path's MTU, from a time on.
    mtu: Vec<(Time, usize)>,
    /// How often the sender hears that a packet was too big.
    told: f64,
    /// How often a packet that may be is marked.
    mark: f64,
    rng: Rng,
    loss: f64,
    /// The server sends cookies.
    cookies: bool,
    trace: bool,
}

fn flow(client: bool) -> Flow {
    let (a, b): (SocketAddr, SocketAddr) = ("10.0.0.1:4000".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
    if client { Flow { local: a, remote: b } } else { Flow { local: b, remote: a } }
}

/// One of `n` values, the first more often than the others.
fn pick<T: Copy>(rng: &mut Rng, values: &[T]) -> T {
    if rng.bool() { values[0] } else { values[rng.usize(0..values.len())] }
}

fn config(rng: &mut Rng) -> Config {
    let largest = pick(rng, &[64 << 10, 1 << 20, 6 << 20, 3000, 600, 100]);
    Config {
        receive_buffer: largest,
        fixed_window: rng.bool(),
        budget: pick(rng, &[4096, 64, 8, 1]),
        window_scaling: pick(rng, &[true, false]),
        sack: pick(rng, &[true, false]),
        timestamps: pick(rng, &[true, false]),
        ecn: pick(rng, &[Ecn::Off, Ecn::Accept, Ecn::Request]),
        ack_every: pick(rng, &[2, 1, 4]),
        send: SendOptions {
            congestion: pick(rng, &[Congestion::Cubic, Congestion::NewReno]),
            send_buffer: pick(rng, &[256 << 10, 20_000, 3000]),
            ring_bytes: pick(rng, &[256 << 10, 6000, 1]),
            nodelay: rng.bool(),
            initial_window: pick(rng, &[10, 2]),
            tail_probes: pick(rng, &[true, false]),
            mtu_probing: pick(rng, &[false, true]),
            ..SendOptions::default()
        },
        ..Config::default()
    }
}

fn plan(rng: &mut Rng, tiny: bool, end: End) -> Plan {
    let most = pick(rng, &[20_000, 60_000, 2000]);
    Plan {
        send: if rng.u8(0..5) == 0 { 0 } else { rng.usize(1..if tiny { 300 } else { most }) },
        write: if tiny { 1 } else { pick(rng, &[5000, 50_000, 700]) },
        write_pause: pick(rng, &[0, 1000, 300_000]),
        read_pause: pick(rng, &[0, 1000, 100_000]),
        read_from: Time::from_micros(pick(rng, &[0, 0, 5_000_000, 400_000_000])),
        end,
    }
}

fn ring(rng: &mut Rng) -> Ring {
    Ring {
        room: pick(rng, &[256, 4, 1]),
        wait: pick(rng, &[10, 2000, 300_000]),
        refuse: pick(rng, &[0.0, 0.0, 0.3]),
        offload: pick(rng, &[0, 65_000, 3000]),
    }
}

impl World {
    fn new(seed: u64, trace: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let rng = &mut rng;
        let loss = pick(rng, &[0.0, 0.01, 0.1, 0.25]);
        let options = LinkOptions {
            loss,
            delay: Duration::from_micros(pick(rng, &[1000, 0, 20_000, 300_000])),
            jitter: Duration::from_micros(pick(rng, &[0, 500, 30_000])),
            reorder: pick(rng, &[0.0, 0.01, 0.3]),
            duplicate: pick(rng, &[0.0, 0.01, 0.2]),
            corrupt: pick(rng, &[0.0, 0.01, 0.1]),
            rate: pick(rng, &[None, NonZeroU64::new(10_000_000), NonZeroU64::new(500_000)]),
            seed,
        };
        let ends = pick(
            rng,
            &[
                (End::Shut, End::Wait),
                (End::Wait, End::Shut),
                (End::Shut, End::Shut),
                (End::Close, End::Wait),
                (End::Close, End::Close),
                (End::Abort, End::Wait),
                (End::Shut, End::Abort),
            ],
        );
        let tiny = rng.u8(0..8) == 0;
        // Without it, an end whose peer's reset was lost would stay for ever.
        let graceful = [ends.0, ends.1].iter().all(|end| matches!(end, End::Shut | End::Wait));
        let keep_alive = KeepAlive { idle: Duration::from_secs(100), interval: Duration::from_secs(10), probes: 9 };
        let host = |name, client, end, rng: &mut Rng| {
            let config = Config { keep_alive: (!graceful).then_some(keep_alive), ..config(rng) };
            Host::new(name, flow(client), config, plan(rng, tiny, end), ring(rng), rng.u64(..))
        };
        let client = host("client", true, ends.0, rng);
        let mut server = host("server", false, ends.1, rng);
        let half_open = pick(rng, &[4, 0]);
        server.listener = Some(Listener::new(4, half_open));
        let mut mtu = vec![(Time::ZERO, 1500)];
        if rng.u8(0..4) == 0 {
            for _ in 0..rng.usize(1..4) {
                let last = mtu.last().unwrap().0;
                mtu.push((last + Duration::from_micros(rng.u64(0..200_000)), rng.usize(600..=1500)));
            }
        }
        Self {
            hosts: [client, server],
            links: [Link::new(options, 0), Link::new(options, 1)],
            now: Time::from_micros(rng.u64(0..1 << 34)),
            mtu,
            told: pick(rng, &[1.0, 0.7]),
            mark: pick(rng, &[0.0, 0.02, 0.5]),
            rng: rng.fork(),
            loss: options.loss + options.corrupt,
            cookies: half_open == 0,
            trace,
        }
    }

    fn time(&self) -> Duration {
        self.now - Time::ZERO
    }

    /// Puts what a host sent on the link.
    fn carry(&mut self, n: usize) {
        loop {
            let packets = std::mem::take(&mut self.hosts[n].out);
            if packets.is_empty() {
                return;
            }
            for packet in packets {
                let (segment, _) = host::parse(&packet).expect("what leaves a host is right");
                let header = &segment.header;
                if self.trace {
                    let state = self.hosts[n].name;
                    let (seq, ack, window) = (header.seq.0, header.ack.0, header.window);
                    eprintln!(
                        "{} {state} {:?} {seq}+{} ack {ack} win {window} sack {:?}",
                        self.now, header.flags, segment.payload.len, &*header.options.sack
                    );
                }
                if let Some(edge) = self.hosts[1 - n].watch.edge
                    && !header.flags.has(Flags::SYN)
                    && !header.flags.has(Flags::RST)
                    && segment.payload.len > 0
                {
                    let end = header.seq + segment.payload.len as u32;
                    assert!(end <= edge, "{}: {end:?} was sent, and the window ends at {edge:?}", self.hosts[n].name);
                }
                let mtu = self.mtu.iter().rev().find(|(from, _)| *from <= self.now).map_or(1500, |(_, mtu)| *mtu);
                if packet.len() > mtu {
                    if self.rng.f64() < self.told {
                        let (seq, now) = (header.seq, self.now);
                        self.hosts[n].too_big(seq, mtu as u32 - 40, now);
                    }
                    continue;
                }
                let len = packet.len();
                let now = self.time();
                self.links[n].send(packet, len, now);
            }
        }
    }

    fn next(&self) -> Option<Time> {
        // A link knows nanoseconds.
        let links = self.links.iter().filter_map(Link::deadline).map(|at| Time::ZERO + at + Duration::from_micros(1));
        links.chain(self.hosts.iter().filter_map(Host::deadline)).min()
    }

    /// Runs until both ends are gone.
    fn run(&mut self) {
        let now = self.now;
        for (from, _) in &mut self.mtu {
            *from = now + (*from - Time::ZERO);
        }
        for host in &mut self.hosts {
            host.begin(now);
        }
        self.hosts[0].connect(now);
        self.carry(0);
        let mut events = 0;
        while !self.hosts.iter().all(Host::is_gone) {
            // A client that gave up before the server heard of it.
            if self.hosts[0].is_gone()
                && self.hosts[1].connection.is_none()
                && self.links.iter().all(|link| link.deadline().is_none())
            {
                break;
            }
            let Some(next) = self.next() else { panic!("nothing will happen any more\n{}", self.state()) };
            self.now = self.now.max(next);
            events += 1;
            assert!(events < MOST_EVENTS, "no end\n{}", self.state());
            let time = self.time();
            for n in [0, 1] {
                while let Some(delivery) = self.links[n].receive(time) {
                    let mut packet = delivery.packet;
                    if let Some(draw) = delivery.corrupt {
                        flip(&mut packet, draw);
                    }
                    let (mark, now) = (self.mark, self.now);
                    self.hosts[1 - n].receive(&packet, mark, now);
                    self.carry(1 - n);
                }
                if self.hosts[n].deadline().is_some_and(|at| at <= self.now) {
                    let (peer, now) = (self.hosts[1 - n].key(), self.now);
                    self.hosts[n].act(peer, now);
                }
                self.carry(n);
            }
        }
    }

    /// What must be true at the end.
    fn check(&self) {
        let graceful = self.hosts.iter().all(|host| matches!(host.plan().end, End::Shut | End::Wait));
        for n in [0, 1] {
            let (host, peer) = (&self.hosts[n], &self.hosts[1 - n]);
            assert!(host.received <= peer.sent);
            let lossy = self.loss >= 0.05;
            match host.failure {
                None | Some(Error::Reset | Error::Aborted) => {}
                Some(Error::Refused) if !host.connected => {}
                // Seven SYNs in a row, or an end that is gone before the other's last FIN is acknowledged.
                Some(Error::TimedOut) if lossy || !graceful => {}
                failure => panic!("{}: {failure:?}\n{}", host.name, self.state()),
            }
        }
        // A cookie that overtakes or is lost is answered with a reset: nothing is known of the connection.
        let reset = self.cookies && self.hosts[0].failure == Some(Error::Reset);
        let refused = self.hosts[0].failure == Some(Error::TimedOut) && !self.hosts[1].connected;
        if graceful && !reset && !refused {
            for n in [0, 1] {
                let (host, peer) = (&self.hosts[n], &self.hosts[1 - n]);
                assert_eq!(host.received, peer.plan().send, "not all arrived\n{}", self.state());
                assert!(host.ended, "the end did not arrive\n{}", self.state());
            }
        }
    }

    fn state(&self) -> String {
        let mut text = format!("at {}\n", self.now);
        for host in &self.hosts {
            let _ = writeln!(text, "{}", host.state());
        }
        text
    }
}

/// Runs one seed.
fn simulate(seed: u64, trace: bool) {
    let mut world = World::new(seed, trace);
    world.run();
    world.check();
    drop(world);
    assert_eq!(memory::live(), 0, "payload is held by nothing");
}

#[test]
fn two_connections_over_a_bad_link() {
    let (first, last) = match std::env::var("NETMEM_SIM_SEEDS") {
        Ok(range) => match range.split_once('-') {
            Some((first, last)) => (first.parse().unwrap(), last.parse().unwrap()),
            None => (range.parse().unwrap(), range.parse().unwrap()),
        },
        Err(_) => (0, 999),
    };
    let trace = std::env::var_os("NETMEM_SIM_TRACE").is_some();
    let mut failed = Vec::new();
    for seed in first..=last {
        // The panic's message has been printed by then.
        let result = std::thread::spawn(move || catch_unwind(AssertUnwindSafe(|| simulate(seed, trace)))).join();
        if !matches!(result, Ok(Ok(()))) {
            eprintln!(
                "seed {seed} failed: NETMEM_SIM_SEEDS={seed} NETMEM_SIM_TRACE=1 cargo test -p netmem-inet --test sim two_conn"
            );
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "{} of {} seeds failed: {failed:?}", failed.len(), last - first + 1);
}
