//! A host with a virtual clock: descriptors, connections and listeners, and the packets that it has
//! sent.
//!
//! # Time
//!
//! The clock stands still while the host works. It moves in three cases: when packetdrill sleeps;
//! by a microsecond each time packetdrill reads the time (it spins for the last part of a wait);
//! and to the next timer when packetdrill waits for a packet and there is none. On its way the
//! clock stops at each timer.
//!
//! # Threads
//!
//! packetdrill makes a call that may block on a second thread, and continues with the script. The
//! two threads pass the turn to each other, so that the order of events is that of the script.
//! After each event for which the blocked call could wait, the call tries again before the clock
//! moves. If the call returns, the clock stands still until packetdrill has read the time at which
//! it returned.
//!
//! | turn | moves on | passes to |
//! | --- | --- | --- |
//! | `Main` | packetdrill's main thread | `Caller`, after each packet and timer, if a call is blocked |
//! | `Caller` | the blocked call tries again | `Main` if it still blocks, `Ending` if it returns |
//! | `Ending` | the call returned | `Main`, when its thread asked for the time |

mod network;
mod sockets;
mod stream;

use crate::settings::Settings;
use netmem_inet::Time;
use netmem_inet::route::{MIN_PATH_MTU_V4, MIN_PATH_MTU_V6};
use netmem_inet::tcp::sender::SendOptions;
use netmem_inet::tcp::{Config, Ecn, Event, Listener, Secret};
use network::{Device, headers};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

pub(crate) use sockets::Reading;
pub(crate) use stream::{Options, Push, Stream};

/// An error number of `errno.h`.
pub(crate) type Errno = libc::c_int;

/// The size of a connection's send buffer. The buffer is never full: `write` applies the limits of
/// the socket.
const SEND_BUFFER: usize = 1 << 30;

/// How far the clock moves while packetdrill waits for a packet. After this time the test has
/// failed.
const PATIENCE: Duration = Duration::from_secs(600);

/// The world, which packetdrill's two threads share.
pub(crate) struct Shared {
    world: Mutex<World>,
    turns: Condvar,
    main: ThreadId,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Main,
    Caller,
    Ending,
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) settings: Settings,
    pub(crate) sockets: BTreeMap<i32, Socket>,
    pub(crate) streams: BTreeMap<usize, Stream>,
    listeners: BTreeMap<usize, Listening>,
    next: usize,
    port: u16,
    secret: Secret,
    sent: VecDeque<(Vec<u8>, Time)>,
    /// The path MTUs that ICMP errors have reported, by the peer's address.
    paths: BTreeMap<IpAddr, u16>,
    turn: Turn,
    /// Whether a call is blocked on packetdrill's second thread, and until when at most.
    blocked: Option<Option<Time>>,
}

pub(crate) struct Socket {
    pub(crate) kind: Kind,
    pub(crate) nonblocking: bool,
    pub(crate) options: Options,
    /// Whether a `connect` has not returned its result yet.
    connecting: bool,
    /// Whether its addresses are those of IPv4. A socket of IPv6 has IPv4 addresses mapped into
    /// IPv6.
    pub(crate) v4: bool,
    local: Option<SocketAddr>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    New,
    Listener(usize),
    Stream(usize),
}

struct Listening {
    local: SocketAddr,
    listener: Listener,
    config: Config,
    options: Options,
    /// Connections that `accept` returns.
    ready: VecDeque<usize>,
    half_open: Vec<usize>,
}

impl Shared {
    /// A world with the settings in `directory`. The calling thread is packetdrill's main thread.
    pub(crate) fn new(directory: &str) -> Self {
        let world = World {
            now: Time::from_micros(1_000_000_000),
            settings: Settings::new(directory),
            sockets: BTreeMap::new(),
            streams: BTreeMap::new(),
            listeners: BTreeMap::new(),
            next: 0,
            port: 40_000,
            secret: Secret::new([7; 16]),
            sent: VecDeque::new(),
            paths: BTreeMap::new(),
            turn: Turn::Main,
            blocked: None,
        };
        Self { world: Mutex::new(world), turns: Condvar::new(), main: std::thread::current().id() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_main(&self) -> bool {
        std::thread::current().id() == self.main
    }

    /// Runs a call that does not block. Its effects can let the blocked call return.
    pub(crate) fn call<T>(&self, call: impl FnOnce(&mut World) -> T) -> T {
        let mut world = self.lock();
        let result = call(&mut world);
        drop(self.settle(world));
        result
    }

    /// Runs a call that waits until `attempt` returns something. At `deadline`, `attempt` is called
    /// for the last time.
    pub(crate) fn blocking<T>(
        &self,
        deadline: Option<Duration>,
        mut attempt: impl FnMut(&mut World, bool) -> Option<T>,
    ) -> T {
        let mut world = self.lock();
        let deadline = deadline.map(|wait| world.now + wait);
        let mut blocked = false;
        loop {
            let over = deadline.is_some_and(|deadline| deadline <= world.now);
            if let Some(result) = attempt(&mut world, over) {
                if blocked {
                    world.blocked = None;
                    world.turn = Turn::Ending;
                    self.turns.notify_all();
                } else {
                    drop(self.settle(world));
                }
                return result;
            }
            if self.is_main() {
                world = self.wait(world, "a call that blocks");
            } else {
                blocked = true;
                world.blocked = Some(deadline);
                world.turn = Turn::Main;
                self.turns.notify_all();
                world = self
                    .turns
                    .wait_while(world, |world| world.turn != Turn::Caller)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Lets the blocked call try again, and waits until it has done so. If the call returned, waits
    /// until its thread has read the time.
    fn settle<'w>(&self, mut world: MutexGuard<'w, World>) -> MutexGuard<'w, World> {
        if world.blocked.is_some() {
            world.turn = Turn::Caller;
            self.turns.notify_all();
            world =
                self.turns.wait_while(world, |world| world.turn != Turn::Main).unwrap_or_else(PoisonError::into_inner);
        }
        world
    }

    /// Moves the clock to `to`, from timer to timer.
    fn advance<'w>(&self, mut world: MutexGuard<'w, World>, to: Time) -> MutexGuard<'w, World> {
        while let Some(at) = world.deadline().filter(|at| *at <= to) {
            world.now = world.now.max(at);
            let stuck = world.timeout();
            world = self.settle(world);
            if stuck && world.deadline() == Some(at) {
                break;
            }
        }
        world.now = world.now.max(to);
        world
    }

    /// Moves the clock to the next timer. If there is no timer, or none in time, the test ends.
    fn wait<'w>(&self, world: MutexGuard<'w, World>, what: &str) -> MutexGuard<'w, World> {
        match world.deadline() {
            Some(at) if at.since(world.now) <= PATIENCE => self.advance(world, at),
            _ => crate::fail(&format!("{what}: nothing will happen")),
        }
    }

    /// The time for packetdrill. Each call returns a later time.
    pub(crate) fn time(&self) -> Time {
        let mut world = self.lock();
        if world.turn == Turn::Ending && !self.is_main() {
            world.turn = Turn::Main;
            self.turns.notify_all();
        } else {
            let next = world.now + Duration::from_micros(1);
            world = self.advance(world, next);
        }
        world.now
    }

    pub(crate) fn sleep(&self, time: Duration) {
        let world = self.lock();
        let to = world.now + time;
        drop(self.advance(world, to));
    }

    /// The next packet that the host sent, and the time at which it was sent.
    pub(crate) fn sent(&self) -> (Vec<u8>, Time) {
        let mut world = self.lock();
        let since = world.now;
        loop {
            if let Some(packet) = world.sent.pop_front() {
                return packet;
            }
            if world.now.since(since) > PATIENCE {
                crate::fail("no packet for ten minutes");
            }
            world = self.wait(world, "waiting for a packet");
        }
    }
}

impl World {
    /// The time of the next timer.
    fn deadline(&self) -> Option<Time> {
        let streams = self.streams.values().filter_map(|stream| stream.connection.poll_timeout());
        streams.chain(self.blocked.flatten()).min()
    }

    /// Runs the due timers of connections. Returns whether some may have had no effect because the
    /// queue is full.
    fn timeout(&mut self) -> bool {
        let due: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, s)| s.connection.poll_timeout().is_some_and(|at| at <= self.now))
            .map(|(id, _)| *id)
            .collect();
        for id in &due {
            if let Some(stream) = self.streams.get_mut(id) {
                stream.connection.handle_timeout(self.now);
            }
            self.pump(*id);
        }
        true
    }

    /// Sends the segments of a connection, and processes its events.
    pub(crate) fn pump(&mut self, id: usize) {
        let full = self.settings.queue_is_full();
        // Without other settings, Linux's pacing rate lets two segments leave together at the rates
        // of the scripts.
        let segments =
            if self.settings.has("device", "off") { 0 } else { self.settings.number("tcp_min_tso_segs", 2) as usize };
        let Some(stream) = self.streams.get_mut(&id) else { return };
        loop {
            let mut device = Device {
                flow: stream.flow,
                ip: stream.connection.ip(),
                now: self.now,
                sent: &mut self.sent,
                full,
                most: segments * stream.segment(),
            };
            let result = stream.connection.poll_transmit(self.now, &mut device);
            // The next record is passed on after the record before it was sent, so that no segment
            // has bytes of both.
            if result.is_err() || stream.records.is_empty() || stream.not_sent() > 0 {
                break;
            }
            stream.flush_records();
            // A record is not held back if other records follow.
            if !stream.records.is_empty() {
                stream.connection.set_nodelay(true);
            }
        }
        while let Some(event) = stream.connection.poll_event() {
            let listener = stream.listener.and_then(|id| self.listeners.get_mut(&id));
            match event {
                Event::Connected => {
                    if let Some(listening) = listener {
                        listening.half_open.retain(|half| *half != id);
                        listening.listener.connected();
                        listening.ready.push_back(id);
                        stream.listener = None;
                    }
                }
                Event::Closed(error) => {
                    if let Some(listening) = listener {
                        listening.half_open.retain(|half| *half != id);
                        listening.listener.failed();
                        stream.used = false;
                    }
                    stream.ended = true;
                    stream.failure = error.map(stream::errno);
                }
                Event::End => stream.end = true,
                _ => (),
            }
        }
        if stream.records.is_empty() && !stream.options.no_delay {
            stream.connection.set_nodelay(false);
        }
        stream.note(self.now);
        if !stream.used && stream.connection.is_gone() {
            self.streams.remove(&id);
        }
    }

    fn config(&self, options: &Options, v4: bool) -> Config {
        let s = &self.settings;
        let headers = u64::from(headers(v4));
        let link = s.after("link", "mtu").unwrap_or(1500) - headers;
        let route = s.after("route", "mtu").map_or(link, |mtu| mtu - headers);
        let least = if v4 { MIN_PATH_MTU_V4 } else { MIN_PATH_MTU_V6 } - headers as u16;
        let announced = s.after("route", "advmss").unwrap_or(link);
        let mut config = Config {
            mss: announced as u16,
            max_payload: route as u16,
            default_mss: if v4 { 536 } else { least },
            receive_buffer: s.nth("tcp_rmem", 2, 6 << 20) as u32,
            budget: 1 << 20,
            window_scaling: s.is_on("tcp_window_scaling"),
            sack: s.is_on("tcp_sack"),
            timestamps: s.is_on("tcp_timestamps"),
            ecn: match s.number("tcp_ecn", 2) {
                0 => Ecn::Off,
                1 => Ecn::Request,
                _ => Ecn::Accept,
            },
            send: SendOptions {
                send_buffer: SEND_BUFFER,
                syn_retries: match options.syn_retries {
                    0 => s.number("tcp_syn_retries", 6) as u32,
                    set => set,
                },
                retries: s.number("tcp_retries2", 15) as u32,
                path_floor: least.into(),
                restart_idle: s.is_on("tcp_slow_start_after_idle"),
                tail_probes: s.is_on("tcp_early_retrans"),
                mtu_probing: s.number("tcp_mtu_probing", 0) != 0,
                initial_window: s.after("route", "initcwnd").map_or(10, |segments| segments as u32),
                ..SendOptions::default()
            },
            syn_ack_retries: s.number("tcp_synack_retries", 5) as u32,
            fin_wait_2: Duration::from_secs(s.number("tcp_fin_timeout", 60)),
            ip: options.ip,
            ..Config::default()
        };
        if options.max_segment != 0 {
            config.mss = config.mss.min(options.max_segment);
            config.max_payload = config.max_payload.min(options.max_segment);
        }
        config
    }
}
