//! A host with a virtual clock: descriptors, connections and listeners, and the packets that it has sent.
//!
//! # Time
//!
//! The clock stands still while the host works. It moves in three cases: when packetdrill sleeps; by a microsecond each
//! time packetdrill reads the time (it spins for the last part of a wait); and to the next timer when packetdrill waits
//! for a packet and there is none. On its way the clock stops at each timer.
//!
//! # Threads
//!
//! packetdrill makes a call that may block on a second thread, and continues with the script. The two threads pass the
//! turn to each other, so that the order of events is that of the script. After each event for which the blocked call
//! could wait, the call tries again before the clock moves. If the call returns, the clock stands still until
//! packetdrill has read the time at which it returned.
//!
//! | turn | moves on | passes to |
//! | --- | --- | --- |
//! | `Main` | packetdrill's main thread | `Caller`, after each packet and timer, if a call is blocked |
//! | `Caller` | the blocked call tries again | `Main` if it still blocks, `Ending` if it returns |
//! | `Ending` | the call returned | `Main`, when its thread asked for the time |

use crate::memory::{Done, Memory, Piece};
use crate::settings::Settings;
use netmem_inet::Time;
use netmem_inet::tcp::sender::SendOptions;
use netmem_inet::tcp::{
    Answer, Arriving, Chunk, Config, Connection, Ecn, Error, Event, Flags, Full, Header, Held, Listener, Meta,
    Outgoing, Output, Received, Secret, State, Station, reset_for,
};
use netmem_inet::wire::{self, Body, Flow, Ip, Outer, Transport};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// An error number of `errno.h`.
pub(crate) type Errno = libc::c_int;

/// The size of a connection's send buffer. The buffer is never full: `write` applies the limits of the socket.
const SEND_BUFFER: usize = 1 << 30;

/// How far the clock moves while packetdrill waits for a packet. After this time the test has failed.
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
    turn: Turn,
    /// Whether a call is blocked on packetdrill's second thread, and until when at most.
    blocked: Option<Option<Time>>,
}

pub(crate) struct Socket {
    pub(crate) kind: Kind,
    pub(crate) nonblocking: bool,
    pub(crate) options: Options,
    v4: bool,
    local: Option<SocketAddr>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    New,
    Listener(usize),
    Stream(usize),
}

#[derive(Clone, Copy)]
pub(crate) struct Options {
    /// The value of `TCP_MAXSEG`, or 0 if it is not set.
    pub(crate) max_segment: u16,
    pub(crate) no_delay: bool,
    pub(crate) cork: bool,
    /// The value of `SO_SNDBUF` as it is returned: twice the value that was set.
    pub(crate) send_buffer: usize,
    /// The value of `TCP_NOTSENT_LOWAT`, or 0 if it is not set.
    pub(crate) not_sent: usize,
    pub(crate) user_timeout: Duration,
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

/// A connection, and the state that the socket keeps for it.
pub(crate) struct Stream {
    flow: Flow,
    pub(crate) connection: Connection<Memory>,
    /// The listener of the connection, while it is half open.
    listener: Option<usize>,
    /// Whether the connection has a descriptor, or will get one.
    used: bool,
    /// The error that the next call reports.
    pub(crate) failure: Option<Errno>,
    ended: bool,
    pub(crate) options: Options,
    /// The largest window of the peer, and its scale.
    window: usize,
    scale: u8,
    /// The number of bytes in the last segment that is not sent: see `write`.
    tail: usize,
    /// The number of bytes since PSH was set last.
    pushed: usize,
    /// Records that wait until the record before them is sent: see `write`.
    records: VecDeque<(Vec<u8>, Push)>,
    /// Whether a `write` waits for room, and how long such calls waited although everything was sent.
    writing: bool,
    limited: (Option<Time>, Duration),
    /// The rest of a chunk that was read in part.
    rest: Option<Held<Piece>>,
    /// Whether the peer has sent FIN.
    end: bool,
}

/// The flag that follows the bytes of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Push {
    /// No flag.
    Plain,
    /// `MSG_MORE`.
    More,
    /// `MSG_EOR`.
    Record,
}

/// The device. It passes a transmission of several segments on as one packet.
struct Device<'w> {
    flow: Flow,
    now: Time,
    sent: &'w mut VecDeque<(Vec<u8>, Time)>,
    full: bool,
    /// The largest payload that it cuts.
    most: usize,
}

impl Output<Memory> for Device<'_> {
    fn max_payload(&self) -> usize {
        self.most
    }

    fn segment(&mut self, segment: Outgoing<'_, Memory>) -> Result<Done, Full> {
        if self.full {
            return Err(Full);
        }
        let payload: Vec<u8> = segment.payload.iter().flat_map(|piece| piece.bytes()).copied().collect();
        let traffic_class = if segment.ect { Ip::ECT0 } else { 0 };
        let packet = packet(&self.flow, segment.header, &payload, traffic_class);
        self.sent.push_back((packet, self.now));
        Ok(Done)
    }
}

/// A packet that begins with its IP header.
fn packet(flow: &Flow, header: &Header, payload: &[u8], traffic_class: u8) -> Vec<u8> {
    let mut sum = netmem_packet::Sum::default();
    sum.add(payload);
    let mut bytes = vec![0; wire::MAX_HEADERS];
    let outer = Outer { traffic_class, ..Outer::new(None) };
    let body = Body { len: payload.len(), sum: Some(sum), segment_size: None };
    let emitted = wire::emit_tcp(&mut bytes, &outer, flow, header, body).expect("a segment fits into an IP packet");
    bytes.truncate(emitted.len);
    bytes.extend_from_slice(payload);
    bytes
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

    /// Runs a call that waits until `attempt` returns something. At `deadline`, `attempt` is called for the last time.
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

    /// Lets the blocked call try again, and waits until it has done so. If the call returned, waits until its thread
    /// has read the time.
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
        let streams = self.streams.values().filter_map(|stream| stream.connection.deadline());
        streams.chain(self.blocked.flatten()).min()
    }

    /// Runs the due timers of connections. Returns whether some may have had no effect because the queue is full.
    fn timeout(&mut self) -> bool {
        let due: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, s)| s.connection.deadline().is_some_and(|at| at <= self.now))
            .map(|(id, _)| *id)
            .collect();
        for id in &due {
            if let Some(stream) = self.streams.get_mut(id) {
                stream.connection.timeout(self.now);
            }
            self.pump(*id);
        }
        true
    }

    /// Sends the segments of a connection, and processes its events.
    pub(crate) fn pump(&mut self, id: usize) {
        let full = self.settings.queue_is_full();
        // Without other settings, Linux's pacing rate lets two segments leave together at the rates of the scripts.
        let segments =
            if self.settings.has("device", "off") { 0 } else { self.settings.number("tcp_min_tso_segs", 2) as usize };
        let Some(stream) = self.streams.get_mut(&id) else { return };
        loop {
            let mut device = Device {
                flow: stream.flow,
                now: self.now,
                sent: &mut self.sent,
                full,
                most: segments * stream.segment(),
            };
            let result = stream.connection.transmit(self.now, &mut device);
            // The next record is passed on after the record before it was sent, so that no segment has bytes of both.
            if result.is_err() || stream.records.is_empty() || stream.not_sent() > 0 {
                break;
            }
            stream.flush_records();
            // A record is not held back if other records follow.
            if !stream.records.is_empty() {
                stream.connection.set_nodelay(true);
            }
        }
        while let Some(event) = stream.connection.event() {
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
                    stream.failure = error.map(errno);
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
        let headers: u64 = if v4 { 40 } else { 60 };
        let link = 1500 - headers;
        let route = s.after("route", "mtu").map_or(link, |mtu| mtu - headers);
        let announced = s.after("route", "advmss").unwrap_or(link);
        let mut config = Config {
            mss: announced as u16,
            max_payload: route as u16,
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
                restart_idle: s.is_on("tcp_slow_start_after_idle"),
                tail_probes: s.is_on("tcp_early_retrans"),
                mtu_probing: s.number("tcp_mtu_probing", 0) != 0,
                initial_window: s.after("route", "initcwnd").map_or(10, |segments| segments as u32),
                ..SendOptions::default()
            },
            ..Config::default()
        };
        if options.max_segment != 0 {
            config.mss = config.mss.min(options.max_segment);
            config.max_payload = config.max_payload.min(options.max_segment);
        }
        config
    }

    /// Processes a packet from packetdrill.
    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        let Ok(ip) = Ip::parse(bytes, bytes.len()) else { return };
        let Ok(transport) = ip.transport(bytes) else { return };
        let sum = |at: usize, len: usize| {
            let mut sum = netmem_packet::Sum::default();
            sum.add(&bytes[at..at + len]);
            sum
        };
        if ip.covered(&transport).is_some_and(|covered| !covered.holds(sum(covered.part.at, covered.part.len))) {
            return;
        }
        let Transport::Tcp(segment) = transport else { return };
        let flow = ip.flow(segment.source_port, segment.destination_port);
        let payload = &bytes[segment.payload.at..segment.payload.end()];
        self.segment(flow, &segment.header, payload, ip.is_ce());
    }

    fn segment(&mut self, flow: Flow, header: &Header, payload: &[u8], ce: bool) {
        let size = self.settings.number("segment", 1460).max(1) as usize;
        let meta = Meta { len: payload.len() as u32, segments: payload.len().div_ceil(size).max(1) as u16, ce };
        let known = self
            .streams
            .iter()
            .find(|(_, stream)| stream.flow == flow && !stream.connection.is_gone())
            .map(|(id, _)| *id);
        let mut after = None;
        if let Some(id) = known {
            let stream = self.streams.get_mut(&id).expect("it was found");
            after = stream.connection.reused_by(header);
            if after.is_none() {
                self.give(id, header, payload, meta);
                return;
            }
            self.streams.remove(&id);
        }
        let listening = self.listeners.iter_mut().find(|(_, l)| l.local == flow.local);
        let Some((&listener, listening)) = listening else {
            self.reply(&flow, reset_for(header, meta.len));
            return;
        };
        let arriving = Arriving { header, len: meta.len, flow: &flow, after, cookie_at: None };
        let station = Station { config: &listening.config, secret: &self.secret, queue: None };
        let path = || Some(station.config.max_payload);
        match listening.listener.segment::<Memory>(arriving, station, self.now, path) {
            Answer::HalfOpen(connection) => {
                let id = self.next;
                self.next += 1;
                listening.half_open.push(id);
                let stream = Stream::new(flow, connection, listening.options, Some(listener), header);
                self.streams.insert(id, stream);
                self.pump(id);
            }
            Answer::Connected(connection) => {
                let id = self.next;
                self.next += 1;
                listening.ready.push_back(id);
                let stream = Stream::new(flow, connection, listening.options, None, header);
                self.streams.insert(id, stream);
                self.give(id, header, payload, meta);
            }
            Answer::Reply(header) => self.reply(&flow, Some(header)),
            Answer::Drop => (),
        }
    }

    /// Passes a segment to a connection.
    fn give(&mut self, id: usize, header: &Header, payload: &[u8], meta: Meta) {
        let stream = self.streams.get_mut(&id).expect("it is there");
        if let Some(listening) = stream.listener.and_then(|id| self.listeners.get_mut(&id))
            && !listening.listener.admits(&stream.connection, header)
        {
            return;
        }
        stream.observe(header);
        let piece = (!payload.is_empty()).then(|| Piece::new(payload));
        stream.connection.segment(header, piece, meta, self.now);
        self.pump(id);
    }

    fn reply(&mut self, flow: &Flow, header: Option<Header>) {
        if let Some(header) = header {
            self.sent.push_back((packet(flow, &header, &[], 0), self.now));
        }
    }

    // ---- calls

    pub(crate) fn options(&self, fd: i32) -> Result<Options, Errno> {
        Ok(self.sockets.get(&fd).ok_or(libc::EBADF)?.options)
    }

    pub(crate) fn set_options(&mut self, fd: i32, options: Options) {
        let Some(socket) = self.sockets.get_mut(&fd) else { return };
        socket.options = options;
        match socket.kind {
            Kind::Stream(id) => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.options = options;
                    stream.apply();
                }
                self.pump(id);
            }
            Kind::Listener(id) => {
                let Some(v4) = self.listeners.get(&id).map(|listening| listening.local.is_ipv4()) else { return };
                let config = self.config(&options, v4);
                if let Some(listening) = self.listeners.get_mut(&id) {
                    (listening.options, listening.config) = (options, config);
                }
            }
            Kind::New => (),
        }
    }

    pub(crate) fn socket(&mut self, fd: i32, v4: bool) {
        let options = Options {
            max_segment: 0,
            no_delay: false,
            cork: false,
            send_buffer: self.settings.nth("tcp_wmem", 1, 16 << 10) as usize,
            not_sent: 0,
            user_timeout: Duration::ZERO,
        };
        self.sockets.insert(fd, Socket { kind: Kind::New, nonblocking: false, options, v4, local: None });
    }

    pub(crate) fn bind(&mut self, fd: i32, local: SocketAddr) -> Result<(), Errno> {
        self.sockets.get_mut(&fd).ok_or(libc::EBADF)?.local = Some(local);
        Ok(())
    }

    pub(crate) fn listen(&mut self, fd: i32, backlog: usize) -> Result<(), Errno> {
        let socket = self.sockets.get(&fd).ok_or(libc::EBADF)?;
        let (options, local) = (socket.options, socket.local.ok_or(libc::EINVAL)?);
        let listener = Listener::new(backlog + 1, 256);
        let config = self.config(&options, local.is_ipv4());
        let id = self.next;
        self.next += 1;
        self.listeners
            .insert(id, Listening { local, listener, config, options, ready: VecDeque::new(), half_open: Vec::new() });
        self.sockets.get_mut(&fd).ok_or(libc::EBADF)?.kind = Kind::Listener(id);
        Ok(())
    }

    /// Makes the next connection of a listener a socket, with the descriptor that `descriptor` makes.
    pub(crate) fn accept(
        &mut self,
        fd: i32,
        descriptor: impl FnOnce() -> i32,
    ) -> Option<Result<(i32, SocketAddr), Errno>> {
        let Some(socket) = self.sockets.get(&fd) else { return Some(Err(libc::EBADF)) };
        let (Kind::Listener(id), v4, nonblocking) = (socket.kind, socket.v4, socket.nonblocking) else {
            return Some(Err(libc::EINVAL));
        };
        let listening = self.listeners.get_mut(&id)?;
        let Some(stream) = listening.ready.pop_front() else { return nonblocking.then_some(Err(libc::EAGAIN)) };
        listening.listener.taken();
        let new = descriptor();
        let options = self.streams[&stream].options;
        self.sockets.insert(new, Socket { kind: Kind::Stream(stream), nonblocking: false, options, v4, local: None });
        Some(Ok((new, self.streams[&stream].flow.remote)))
    }

    /// Begins to connect. Returns the connection.
    pub(crate) fn connect(&mut self, fd: i32, remote: SocketAddr) -> Result<usize, Errno> {
        let socket = self.sockets.get(&fd).ok_or(libc::EBADF)?;
        let options = socket.options;
        let host: IpAddr = match remote {
            SocketAddr::V4(_) => crate::LOCAL_V4.into(),
            SocketAddr::V6(_) => crate::LOCAL_V6.into(),
        };
        self.port += 1;
        let local = socket.local.unwrap_or_else(|| SocketAddr::new(host, self.port));
        let flow = Flow { local, remote };
        let config = self.config(&options, remote.is_ipv4());
        let connection = Connection::connect(&config, self.secret.start(&flow, self.now), None, self.now);
        let id = self.next;
        self.next += 1;
        let stream = Stream::new(flow, connection, options, None, &Header::default());
        self.streams.insert(id, stream);
        self.sockets.get_mut(&fd).ok_or(libc::EBADF)?.kind = Kind::Stream(id);
        self.pump(id);
        Ok(id)
    }

    /// The result of a connection attempt: `None` while it is not known.
    pub(crate) fn connected(&mut self, id: usize) -> Option<Result<(), Errno>> {
        let stream = self.streams.get_mut(&id)?;
        if let Some(failure) = stream.failure.take() {
            return Some(Err(failure));
        }
        (stream.connection.state() != State::SynSent && stream.connection.state() != State::SynReceived)
            .then_some(Ok(()))
    }

    pub(crate) fn stream(&mut self, fd: i32) -> Result<(usize, &mut Stream), Errno> {
        match self.sockets.get(&fd).ok_or(libc::EBADF)?.kind {
            Kind::Stream(id) => Ok((id, self.streams.get_mut(&id).ok_or(libc::ENOTCONN)?)),
            _ => Err(libc::ENOTCONN),
        }
    }

    /// Reads up to `len` received bytes. Returns `None` while there are none.
    pub(crate) fn read(&mut self, fd: i32, len: usize) -> Option<Result<Vec<u8>, Errno>> {
        let now = self.now;
        let nonblocking = self.sockets.get(&fd).is_some_and(|socket| socket.nonblocking);
        let (id, stream) = match self.stream(fd) {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        let mut bytes = Vec::new();
        let result = loop {
            if bytes.len() == len {
                break Some(Ok(()));
            }
            match stream.next_piece(now) {
                Ok(Received::Chunk(mut piece)) => {
                    let take = piece.len().min(len - bytes.len());
                    bytes.extend_from_slice(&piece.bytes()[..take]);
                    piece.advance(take);
                    if !piece.is_empty() {
                        stream.rest = Some(piece);
                    }
                }
                Ok(Received::Empty) if bytes.is_empty() => break nonblocking.then_some(Err(libc::EAGAIN)),
                Ok(Received::Empty | Received::End) => break Some(Ok(())),
                Err(_) if !bytes.is_empty() => break Some(Ok(())),
                Err(error) => {
                    break Some(
                        stream
                            .failure
                            .take()
                            .map_or(Ok(()), Err)
                            .and_then(|()| if bytes.is_empty() { Err(errno(error)) } else { Ok(()) }),
                    );
                }
            }
        };
        self.pump(id);
        result.map(|result| result.map(|()| bytes))
    }

    /// Moves bytes from the front of `rest` to the send buffer. Returns `None` while there is no room for all of them.
    ///
    /// It has the limits of Linux, because the scripts depend on them. A segment that is not full is filled up to half
    /// of the peer's window, whatever the limits are. A new segment is begun if less than the send buffer is queued,
    /// and less than `TCP_NOTSENT_LOWAT` is unsent. A call that had to wait continues when a third of the buffer is
    /// free.
    pub(crate) fn write(&mut self, fd: i32, rest: &mut Vec<u8>, push: Push, waited: bool) -> Option<Result<(), Errno>> {
        let not_sent = match self.sockets.get(&fd).map_or(0, |socket| socket.options.not_sent) {
            0 => self.settings.number("tcp_notsent_lowat", u64::from(u32::MAX)) as usize,
            set => set,
        };
        let (id, stream) = match self.stream(fd) {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        if let Some(failure) = stream.failure.take() {
            return Some(Err(failure));
        }
        if waited && !stream.is_writable(usize::MAX) {
            return None;
        }
        if !stream.records.is_empty() {
            stream.records.push_back((std::mem::take(rest), push));
            return Some(Ok(()));
        }
        loop {
            let stream = self.streams.get_mut(&id)?;
            stream.tail = stream.tail.min(stream.not_sent());
            let room = match stream.tail {
                0 => stream.goal(),
                tail => stream.goal().saturating_sub(tail),
            };
            let room = match room {
                0 => stream.goal(),
                room => room,
            };
            let begins = stream.tail == 0 || stream.tail >= stream.goal();
            let full = stream.queued() >= stream.options.send_buffer || stream.not_sent() >= not_sent;
            if rest.is_empty() {
                return Some(Ok(()));
            }
            stream.writing = begins && full;
            if stream.writing {
                stream.note(self.now);
                return None;
            }
            let take = room.min(rest.len());
            let piece = Piece::new(&rest[..take]);
            stream.tail = if begins { take } else { stream.tail + take };
            // PSH is set once for each half of the window, at the end of a full segment.
            stream.pushed += take;
            let due = stream.tail >= stream.goal() && stream.pushed > stream.window / 2;
            let more = if take < rest.len() { !due } else { push == Push::More };
            if !more {
                stream.pushed = 0;
            }
            if stream.connection.send(piece, more).is_err() {
                return Some(Err(stream.failure.take().unwrap_or(libc::EPIPE)));
            }
            rest.drain(..take);
            if push == Push::Record && rest.is_empty() {
                stream.records.push_back((Vec::new(), Push::Plain));
            }
            self.pump(id);
        }
    }

    /// The events of `POLLIN`, `POLLOUT`, `POLLERR` and `POLLHUP` that are set.
    pub(crate) fn ready(&self, fd: i32) -> libc::c_short {
        let Some(socket) = self.sockets.get(&fd) else { return libc::POLLNVAL };
        let flag = |is: bool, flag| if is { flag } else { 0 };
        match socket.kind {
            Kind::New => libc::POLLOUT | libc::POLLHUP,
            Kind::Listener(id) => flag(self.listeners.get(&id).is_some_and(|l| !l.ready.is_empty()), libc::POLLIN),
            Kind::Stream(id) => {
                let Some(stream) = self.streams.get(&id) else { return libc::POLLHUP };
                let not_sent = match socket.options.not_sent {
                    0 => self.settings.number("tcp_notsent_lowat", u64::from(u32::MAX)) as usize,
                    set => set,
                };
                flag(stream.readable() > 0 || stream.is_at_end(), libc::POLLIN)
                    | flag(stream.is_writable(not_sent), libc::POLLOUT)
                    | flag(stream.failure.is_some(), libc::POLLERR)
                    | flag(stream.ended, libc::POLLHUP)
            }
        }
    }

    pub(crate) fn shutdown(&mut self, fd: i32, how: i32) -> Result<(), Errno> {
        let (id, stream) = self.stream(fd)?;
        if how != libc::SHUT_WR {
            stream.connection.shutdown_read();
        }
        if how != libc::SHUT_RD {
            stream.connection.shutdown();
        }
        self.pump(id);
        Ok(())
    }

    pub(crate) fn close(&mut self, fd: i32) -> Result<(), Errno> {
        match self.sockets.remove(&fd).ok_or(libc::EBADF)?.kind {
            Kind::New => (),
            Kind::Listener(id) => {
                let gone = self.listeners.remove(&id);
                for id in gone.into_iter().flat_map(|listening| listening.ready.into_iter().chain(listening.half_open))
                {
                    if let Some(stream) = self.streams.get_mut(&id) {
                        (stream.used, stream.listener) = (false, None);
                        stream.connection.abort(self.now);
                    }
                    self.pump(id);
                }
            }
            Kind::Stream(id) => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.used = false;
                    stream.connection.close(self.now);
                }
                self.pump(id);
            }
        }
        Ok(())
    }
}

impl Stream {
    fn new(
        flow: Flow,
        connection: Connection<Memory>,
        options: Options,
        listener: Option<usize>,
        syn: &Header,
    ) -> Self {
        let mut stream = Self {
            flow,
            connection,
            listener,
            used: true,
            failure: None,
            ended: false,
            options,
            window: 0,
            scale: 0,
            tail: 0,
            pushed: 0,
            records: VecDeque::new(),
            writing: false,
            limited: (None, Duration::ZERO),
            rest: None,
            end: false,
        };
        stream.apply();
        stream.observe(syn);
        stream
    }

    /// Applies the options of its socket to the connection.
    pub(crate) fn apply(&mut self) {
        self.connection.set_nodelay(self.options.no_delay);
        self.connection.set_cork(self.options.cork);
        let user_timeout = Some(self.options.user_timeout).filter(|timeout| !timeout.is_zero());
        self.connection.set_user_timeout(user_timeout);
    }

    /// Records the peer's largest window.
    fn observe(&mut self, header: &Header) {
        if header.flags.has(Flags::SYN) {
            self.scale = header.options.window_scale.unwrap_or(0).min(14);
            self.window = usize::from(header.window);
        } else {
            self.window = self.window.max(usize::from(header.window) << self.scale);
        }
    }

    /// The number of bytes up to which `write` fills a segment: half of the peer's largest window, in whole segments.
    fn goal(&self) -> usize {
        let mss = self.segment();
        let most = (self.window / 2).min(65_216);
        (most / mss * mss).max(mss)
    }

    /// Bytes of payload of a segment.
    fn segment(&self) -> usize {
        (self.connection.info(Time::ZERO).send.segment_size as usize).max(1)
    }

    fn not_sent(&self) -> usize {
        self.connection.info(Time::ZERO).send.unsent
    }

    /// The number of bytes that are not acknowledged.
    pub(crate) fn queued(&self) -> usize {
        SEND_BUFFER - self.connection.room()
    }

    /// Whether `POLLOUT` is set: a third of the send buffer is free, and less than half of `not_sent` is unsent.
    fn is_writable(&self, not_sent: usize) -> bool {
        self.ended
            || (self.queued() <= self.options.send_buffer / 3 * 2 && self.not_sent().saturating_mul(2) < not_sent)
    }

    fn is_at_end(&self) -> bool {
        self.ended || self.end
    }

    pub(crate) fn readable(&self) -> usize {
        self.connection.readable() + self.rest.as_ref().map_or(0, |rest| rest.len())
    }

    /// How long the send buffer has held data back.
    pub(crate) fn buffer_limited(&self, now: Time) -> Duration {
        let (since, before) = self.limited;
        before + since.map_or(Duration::ZERO, |since| now - since)
    }

    /// Notes whether the send buffer holds data back from now on.
    fn note(&mut self, now: Time) {
        let limited = self.writing && self.not_sent() == 0;
        if limited != self.limited.0.is_some() {
            self.limited = (limited.then_some(now), self.buffer_limited(now));
        }
    }

    fn next_piece(&mut self, now: Time) -> Result<Received<Piece>, Error> {
        match self.rest.take() {
            Some(piece) => Ok(Received::Chunk(piece)),
            None => self.connection.recv(now),
        }
    }

    /// Passes the queued records to the connection, up to the end of the next record.
    fn flush_records(&mut self) {
        while let Some((bytes, push)) = self.records.pop_front() {
            let more = push == Push::More;
            if !bytes.is_empty() && self.connection.send(Piece::new(&bytes), more).is_err() {
                self.records.clear();
            }
            if push == Push::Record {
                self.records.push_front((Vec::new(), Push::Plain));
                return;
            }
        }
    }
}

/// The error number that a socket call reports for an error of a connection.
fn errno(error: Error) -> Errno {
    match error {
        Error::Refused => libc::ECONNREFUSED,
        Error::Reset => libc::ECONNRESET,
        Error::TimedOut => libc::ETIMEDOUT,
        Error::Unreachable(_) => libc::EHOSTUNREACH,
        Error::DeviceGone => libc::ENETDOWN,
        Error::Aborted => libc::ECONNABORTED,
    }
}
