//! One end: a connection, its user, its transmit ring, and the packets that it makes and reads.

use crate::both_ways::{Again, Sent, handle_segment};
use fastrand::Rng;
use netmem_inet::Time;
use netmem_inet::tcp::{
    Accepted, Answer, ArrivingSegment, Budget, Chunk, Config, Connection, ConnectionTemplate, DeliveryError, Error,
    Event, Flags, Full, Header, Listener, Outgoing, Output, ReadOutcome, Refused, Secret, SegmentMeta, Seq, State,
    reset_for,
};
use netmem_inet::wire::{self, Body, Flow, Ip, Outer, PredictedHeaders, Transport};
use netmem_packet::Sum;
use netmem_testing::simulated_memory::{Memory, Posted, SharedBytes};
use std::cell::Cell;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// What a user does when it has nothing more to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Shuts its sending side, reads to the end, and closes.
    Shutdown,
    /// Waits for the peer's end, and closes.
    Wait,
    /// Closes, even if there is something to read.
    Close,
    /// Resets the connection.
    Abort,
}

/// What a user does.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Bytes to send.
    pub(crate) send: usize,
    /// Most bytes of a write.
    pub(crate) write: usize,
    /// Longest pause between writes, and between reads, in microseconds.
    pub(crate) write_pause: u64,
    pub(crate) read_pause: u64,
    /// Before this time, nothing is read.
    pub(crate) read_from: Time,
    pub(crate) end: End,
    /// How often the connection moves: it is saved, and restored in another place.
    pub(crate) moves: u32,
    /// The interval at which timers are checked, in microseconds: the thread is busy, or the
    /// machine was asleep.
    pub(crate) tick: u64,
}

/// The transmit ring of a slow device.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    /// Segments that fit into the ring.
    pub(crate) room: usize,
    /// The longest time that a segment waits in the ring, in microseconds.
    pub(crate) wait: u64,
    /// How often the ring reports that it is full although it is not.
    pub(crate) refuse: f64,
    /// The largest payload that the device cuts into segments. 0: the device cannot do this.
    pub(crate) offload: usize,
    /// The host cuts in place of the device: each segment is an entry of the ring, and the ring may
    /// have room for the first ones only.
    pub(crate) cuts: bool,
    /// Segments that arrive at the same time are merged, and answered together.
    pub(crate) merges: bool,
}

pub(crate) struct Host {
    pub(crate) name: &'static str,
    flow: Flow,
    config: Config,
    secret: Secret,
    pub(crate) listener: Option<Listener>,
    pub(crate) connection: Option<Connection<Memory>>,
    /// That of its stack, on whose thread it counts, or any other one.
    budget: Box<dyn Deref<Target = Budget>>,
    /// How often a buffer was returned that `budget` waited for.
    woken: Arc<Woken>,
    rng: Rng,
    plan: Plan,
    ring: Ring,
    posted: Vec<Entry>,
    /// When a refused transmission is tried again.
    again: Option<Time>,
    /// The time of the connection's next move.
    next_move: Option<Time>,
    /// Bytes that were dropped before the last move because a buffer was missing.
    out_of_buffers: u64,
    pub(crate) out: Vec<Vec<u8>>,
    key: u64,
    /// Whether events have reported that the user can read, and write.
    readable: bool,
    writable: bool,
    pub(crate) connected: bool,
    next_read: Time,
    next_write: Time,
    pub(crate) sent: usize,
    pub(crate) received: usize,
    pub(crate) ended: bool,
    pub(crate) closed: bool,
    pub(crate) over: bool,
    pub(crate) failure: Option<Error>,
    /// Since the user has closed: the progress of the peer.
    orphan: Option<Orphan>,
    /// Whether the connection ended because its user had closed it, and the peer acknowledged
    /// nothing for long.
    pub(crate) orphaned: bool,
    pub(crate) watch: Watch,
    /// Whether the connection is kept in little memory whenever nothing is under way, and how often
    /// it was.
    pub(crate) rests: bool,
    pub(crate) rested: usize,
    /// The headers of the last segment, by which the next ones are predicted.
    known: Option<PredictedHeaders>,
    /// How often a short way was compared with the general one.
    pub(crate) compared: Compared,
}

/// Counts its calls.
#[derive(Default)]
struct Woken(AtomicUsize);

impl std::task::Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// How often a short way was taken, and compared with the general one on a clone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compared {
    /// Segments whose headers were predicted.
    pub(crate) predicted: usize,
    /// Segments that brought the next bytes, and acknowledged nothing.
    pub(crate) expected: usize,
    /// The same, but they acknowledged all that was sent.
    pub(crate) answers: usize,
    /// Calls in which nothing could be sent.
    pub(crate) quiet: usize,
    /// Calls that sent one segment, behind which nothing could be sent.
    pub(crate) messages: usize,
}

/// What a host announced.
pub(crate) struct Watch {
    /// The right edge of its windows.
    pub(crate) edge: Option<Seq>,
    /// Bytes that had been dropped because a buffer was missing when the edge was announced.
    out_of_buffers: u64,
    /// The shift of its windows, and whether both ends announced one.
    scale: u8,
    scaled: bool,
}

impl Watch {
    /// Checks a sent header. `out_of_buffers`: bytes of payload in order that were dropped because
    /// a buffer was missing.
    fn announced(&mut self, name: &str, header: &Header, out_of_buffers: u64) {
        if header.flags.has(Flags::SYN) {
            self.scale = header.options.window_scale.unwrap_or(0);
            self.scaled &= header.options.window_scale.is_some();
        }
        if !header.flags.has(Flags::ACK) || header.flags.has(Flags::RST) {
            return;
        }
        let shift = if header.flags.has(Flags::SYN) || !self.scaled { 0 } else { self.scale };
        let edge = header.ack + (u32::from(header.window) << shift);
        // The window of a SYN cannot be larger than 64 KiB, and a SYN can be sent again after an
        // acknowledgement with a larger window. Its window can also be from before the last drop.
        // Rounding to the unit of the scale can reduce the window by less than a unit (RFC 7323,
        // section 2.4).
        let before = self.edge.unwrap_or(edge);
        let syn = header.flags.has(Flags::SYN);
        let whole = before.distance(edge) < 1 << shift;
        assert!(
            syn || whole || out_of_buffers > self.out_of_buffers,
            "{name}: the window shrank from {before:?} to {edge:?}"
        );
        if self.edge.is_none_or(|before| before <= edge && !syn) {
            (self.edge, self.out_of_buffers) = (Some(edge), out_of_buffers);
        }
    }
}

/// The `n`-th byte that the user with this key sends.
pub(crate) fn byte(key: u64, n: usize) -> u8 {
    let x = (n as u64 ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x >> 56) as u8 ^ (x >> 24) as u8
}

/// A connection that its user has closed. Its time is extended only if the peer acknowledges an
/// eighth of what was left.
struct Orphan {
    /// The number that the peer must acknowledge.
    next: Seq,
    step: u32,
    /// Since when it has not.
    since: Time,
}

impl Orphan {
    fn new(connection: &Connection<Memory>, since: Time) -> Self {
        let left: usize = connection.unacknowledged().map(|chunk| chunk.len()).sum();
        let step = (left as u32 / 8).max(1);
        Self { next: connection.una() + step, step, since }
    }
}

/// An entry of the ring.
struct Entry {
    /// When the device is done with it.
    at: Time,
    done: Rc<Cell<bool>>,
    /// Its first number, and how many bytes follow.
    seq: Seq,
    len: u32,
}

struct Device<'h> {
    flow: &'h Flow,
    ring: &'h Ring,
    rng: &'h mut Rng,
    posted: &'h mut Vec<Entry>,
    out: &'h mut Vec<Vec<u8>>,
    /// The segments that it accepted, each with its length.
    sent: Vec<Sent>,
    now: Time,
}

impl Output<Memory> for Device<'_> {
    fn max_payload(&self) -> usize {
        self.ring.offload
    }

    fn transmit(&mut self, segment: Outgoing<'_, Memory>) -> Result<Accepted<Posted>, Full> {
        let room = self.ring.room.saturating_sub(self.posted.len());
        if room == 0 || self.rng.f64() < self.ring.refuse {
            return Err(Full);
        }
        let payload: Vec<u8> = segment.payload.iter().flat_map(|piece| piece.bytes().to_vec()).collect();
        assert_eq!(payload.len(), segment.payload_len as usize, "the payload is as long as it says");
        let size = segment.segment_size as usize;
        assert!(
            payload.len() <= size || payload.len() <= self.ring.offload,
            "a device that cannot cut is given one segment"
        );
        let (mut at, mut flags) = (0, Vec::new());
        loop {
            let take = if size == 0 { payload.len() } else { (payload.len() - at).min(size) };
            let (first, last) = (at == 0, at + take == payload.len());
            let mut header = *segment.header;
            header.seq += at as u32;
            if !first {
                header.flags = header.flags.without(Flags::CWR);
            }
            if !last {
                header.flags = header.flags.without(Flags::FIN.with(Flags::PSH));
            }
            self.out.push(packet(self.flow, &header, &payload[at..at + take], segment.ect));
            if self.ring.cuts {
                flags.push(self.post(header.seq, take));
            }
            at += take;
            if at == payload.len() || flags.len() == room {
                break;
            }
        }
        if !self.ring.cuts {
            flags.push(self.post(segment.header.seq, at));
        }
        self.sent.push(Sent { header: *segment.header, ticket: Posted(flags.clone()), len: at as u32 });
        Ok(Accepted { ticket: Posted(flags), len: at as u32 })
    }
}

impl Device<'_> {
    /// Puts an entry with payload into the ring. Bytes are not sent again while an earlier copy of
    /// them is there.
    fn post(&mut self, seq: Seq, len: usize) -> Rc<Cell<bool>> {
        let len = len as u32;
        let overlaps = |entry: &Entry| entry.len > 0 && seq < entry.seq + entry.len && entry.seq < seq + len;
        assert!(len == 0 || !self.posted.iter().any(overlaps), "{seq:?}+{len} is in the ring, and is sent again");
        let at = self.now + Duration::from_micros(self.rng.u64(0..=self.ring.wait));
        let done = Rc::new(Cell::new(false));
        self.posted.push(Entry { at, done: done.clone(), seq, len });
        done
    }
}

/// A packet that begins with its IP header.
pub(crate) fn packet(flow: &Flow, header: &Header, payload: &[u8], ect: bool) -> Vec<u8> {
    let mut sum = Sum::default();
    sum.add(payload);
    let mut bytes = vec![0; wire::MAX_HEADERS];
    let outer = Outer { traffic_class: if ect { Ip::ECT0 } else { 0 }, ..Outer::new(None) };
    let body = Body { len: payload.len(), sum: Some(sum), segment_size: None };
    let emitted = wire::emit_tcp(&mut bytes, &outer, flow, header, body).unwrap();
    bytes.truncate(emitted.len);
    bytes.extend_from_slice(payload);
    bytes
}

/// The segment in a packet, if its checksums are right, and whether the packet is marked as capable
/// of ECN.
pub(crate) fn parse(bytes: &[u8]) -> Option<(wire::Segment, bool)> {
    let ip = Ip::parse(&bytes[..bytes.len().min(wire::MAX_HEAD)], bytes.len()).ok()?;
    let transport = ip.transport(bytes).ok()?;
    let covered = ip.covered(&transport)?;
    let mut sum = Sum::default();
    sum.add(&bytes[covered.range.at..covered.range.end()]);
    match transport {
        Transport::Tcp(segment) if covered.holds(sum) => Some((segment, ip.traffic_class & Ip::ECN == Ip::ECT0)),
        _ => None,
    }
}

/// A packet behind the header of a link, which says that it is IPv4.
fn on_link(packet: &[u8]) -> Vec<u8> {
    [&[2; 12][..], &[8, 0], packet].concat()
}

/// Whether a segment follows another one, or several merged ones, without a gap. Segments with
/// different marks or timestamps are not merged.
fn follows(first: &Header, all: &SegmentMeta, next: &Header, meta: &SegmentMeta) -> bool {
    let plain = |flags: Flags| flags.without(Flags::PSH) == Flags::ACK;
    let end = Header { seq: first.seq + all.len, flags: next.flags, ..*first };
    plain(first.flags) && plain(next.flags) && all.len > 0 && meta.len > 0 && all.ce == meta.ce && end == *next
}

impl Host {
    pub(crate) fn new(name: &'static str, flow: Flow, config: Config, plan: Plan, ring: Ring, seed: u64) -> Self {
        let woken = Arc::new(Woken::default());
        let waker = woken.clone().into();
        let budget: Box<dyn Deref<Target = Budget>> = if seed / 2 % 2 == 1 {
            Box::new(Budget::at_home(config.budget, waker))
        } else {
            Box::new(Rc::new(Budget::waking(config.budget, waker)))
        };
        Self {
            name,
            flow,
            config,
            secret: Secret::new([seed as u8; 16]),
            listener: None,
            connection: None,
            budget,
            woken,
            rng: Rng::with_seed(seed),
            next_read: plan.read_from,
            plan,
            ring: Ring { cuts: seed % 2 == 1, ..ring },
            posted: Vec::new(),
            again: None,
            next_move: None,
            out_of_buffers: 0,
            out: Vec::new(),
            key: seed,
            readable: false,
            writable: false,
            connected: false,
            next_write: Time::ZERO,
            sent: 0,
            received: 0,
            ended: false,
            closed: false,
            over: false,
            failure: None,
            orphan: None,
            orphaned: false,
            watch: Watch { edge: None, out_of_buffers: 0, scale: 0, scaled: true },
            rests: false,
            rested: 0,
            known: None,
            compared: Compared::default(),
        }
    }

    /// Starts the host at the beginning of the simulation.
    pub(crate) fn begin(&mut self, now: Time) {
        self.next_read = now + (self.plan.read_from - Time::ZERO);
        self.next_write = now;
        self.next_move = (self.plan.moves > 0).then(|| now + Duration::from_micros(self.rng.u64(1..1_000_000)));
    }

    pub(crate) fn connect(&mut self, now: Time) {
        let start = self.secret.start(&self.flow, now);
        self.connection = Some(Connection::connect(&self.config, start, Some(&**self.budget), now));
        self.transmit(now);
    }

    /// The first number that the peer has not acknowledged.
    pub(crate) fn una(&self) -> Option<Seq> {
        self.connection.as_ref().map(Connection::una)
    }

    /// Whether the connection is open, and its user does nothing more before the peer does.
    pub(crate) fn is_idle(&self) -> bool {
        self.connected && !self.over && self.deadline().is_none()
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Processes packets that arrived at the same time. Returns how many of them were damaged.
    pub(crate) fn receive(&mut self, packets: &[Vec<u8>], mark: f64, now: Time) -> u64 {
        let mut damaged = 0;
        let mut merged: Option<(Header, Vec<&[u8]>, SegmentMeta)> = None;
        for bytes in packets {
            // The checksum is wrong: the packet is dropped.
            let Some((segment, ect)) = parse(bytes) else {
                damaged += 1;
                continue;
            };
            self.compare_headers(bytes, &segment);
            let (header, payload) = (segment.header, &bytes[segment.payload.at..segment.payload.end()]);
            let meta = SegmentMeta { ce: ect && self.rng.f64() < mark, ..SegmentMeta::of(payload.len() as u32) };
            if let Some((first, chunks, all)) = &mut merged {
                if self.ring.merges && follows(first, all, &header, &meta) {
                    first.flags = first.flags.with(header.flags);
                    chunks.push(payload);
                    (all.len, all.segments) = (all.len + meta.len, all.segments + 1);
                    continue;
                }
                self.segment(first, chunks, *all, now);
            }
            merged = Some((header, vec![payload], meta));
            if !self.ring.merges
                && let Some((header, chunks, meta)) = merged.take()
            {
                self.segment(&header, &chunks, meta, now);
                self.transmit(now);
            }
        }
        if let Some((header, chunks, meta)) = merged {
            self.segment(&header, &chunks, meta, now);
        }
        self.transmit(now);
        damaged
    }

    /// Compares what is read of a packet by the headers of the one before with what the parser has
    /// read. Their segments are equal then, so that a connection does the same with either.
    fn compare_headers(&mut self, packet: &[u8], parsed: &wire::Segment) {
        let frame = on_link(packet);
        if let Some((header, payload, covered, marked)) =
            self.known.as_ref().and_then(|known| known.read(&frame, frame.len()))
        {
            let ip = Ip::parse(packet, packet.len()).expect("the parser has read it");
            let mut sum = Sum::default();
            sum.add(&frame[covered.range.at..covered.range.end()]);
            assert_eq!(header, parsed.header, "a prediction");
            assert_eq!((payload.at - 14, payload.len), (parsed.payload.at, parsed.payload.len), "a prediction");
            assert!(covered.holds(sum), "the parser has found the checksum right");
            assert_eq!(marked, ip.is_ce(), "a prediction");
            self.compared.predicted += 1;
        }
        if let Some(known) = PredictedHeaders::new(&frame) {
            self.known = Some(known);
        }
    }

    fn segment(&mut self, header: &Header, payload: &[&[u8]], meta: SegmentMeta, now: Time) {
        let mut after = None;
        if let Some(connection) = &self.connection {
            after = connection.reused_by(header);
            if after.is_some() {
                self.connection = None;
            } else if connection.is_gone() {
                // The connection is not in a table of connections any more, but its user may still
                // read.
                self.out.extend(reset_for(header, meta.len).map(|header| packet(&self.flow, &header, &[], false)));
                return;
            }
        }
        if header.flags.has(Flags::SYN) && header.options.window_scale.is_none() {
            self.watch.scaled = false;
        }
        if self.connection.is_none()
            && !self.over
            && let Some(listener) = &mut self.listener
        {
            let arriving = ArrivingSegment { header, len: meta.len, flow: &self.flow, after, cookie_at: None };
            let template =
                ConnectionTemplate { config: &self.config, secret: &self.secret, queue: Some(&**self.budget) };
            let path = || Some(self.config.max_payload);
            match listener.handle_segment::<Memory>(arriving, template, now, path) {
                Answer::HalfOpen(connection) => {
                    self.connection = Some(connection);
                    return;
                }
                Answer::Connected(connection) => self.connection = Some(connection),
                Answer::Reply(header) => {
                    self.watch.announced(self.name, &header, 0);
                    self.out.push(packet(&self.flow, &header, &[], false));
                    return;
                }
                Answer::Drop => return,
            }
        }
        match &mut self.connection {
            Some(connection) => {
                if connection.state() == State::SynReceived
                    && self.listener.as_mut().is_some_and(|listener| !listener.admits(connection, header))
                {
                    return;
                }
                let chunks = payload.iter().filter(|bytes| !bytes.is_empty());
                let chunks: Vec<_> = chunks.map(|bytes| SharedBytes::new(bytes.to_vec())).collect();
                // One of the two runs of a seed compares.
                let compares = !self.rests && connection.expects(header, meta, now);
                let Compared { expected, answers, .. } = &mut self.compared;
                let times = if header.ack == connection.una() { expected } else { answers };
                *times += usize::from(handle_segment(connection, compares, header, chunks, meta, now));
                let buffers = connection.info(now).buffers;
                assert!(
                    buffers <= self.config.budget.max(1),
                    "{}: {buffers} buffers of {}",
                    self.name,
                    self.config.budget
                );
            }
            None => self.out.extend(reset_for(header, meta.len).map(|header| packet(&self.flow, &header, &[], false))),
        }
    }

    pub(crate) fn too_big(&mut self, seq: Seq, max_payload: u32, now: Time) {
        if let Some(connection) = &mut self.connection {
            connection.handle_delivery_error(DeliveryError::TooBig { max_payload }, Some(seq), now);
            self.transmit(now);
        }
    }

    /// Sends what may be sent, and handles the results.
    fn transmit(&mut self, now: Time) {
        let Some(connection) = &mut self.connection else { return };
        // One of the two runs of a seed compares.
        let quiet = connection.sends_nothing();
        let clone = (!self.rests).then(|| connection.cloned(0)).flatten();
        let mut device = Device {
            flow: &self.flow,
            ring: &self.ring,
            rng: &mut self.rng,
            posted: &mut self.posted,
            out: &mut self.out,
            sent: Vec::new(),
            now,
        };
        let result = connection.poll_transmit(now, &mut device);
        let sent = device.sent;
        if let Some(mut clone) = clone {
            let mut again = Again { offload: self.ring.offload, sent: &sent, result };
            assert_eq!(clone.poll_transmit_generally(now, &mut again), result, "{}: a short way", self.name);
            assert!(again.sent.is_empty(), "{}: the general way sends less", self.name);
            assert_eq!(connection.values(), clone.values(), "{}: what follows differs", self.name);
            self.compared.quiet += usize::from(quiet);
            self.compared.messages += usize::from(sent.len() == 1 && connection.sends_nothing());
        }
        self.again = match result {
            Ok(()) => None,
            // When the ring has room: when the next transmission is done, or after a short time.
            Err(Full) => Some(now + Duration::from_micros(self.rng.u64(1..5000))),
        };
        let out_of_buffers = self.out_of_buffers + connection.info(now).out_of_buffers;
        sent.iter().for_each(|sent| self.watch.announced(self.name, &sent.header, out_of_buffers));
        while let Some(event) = connection.poll_event() {
            match event {
                Event::Connected => {
                    (self.connected, self.writable) = (true, true);
                    if let Some(listener) = &mut self.listener {
                        listener.connected();
                        listener.accepted();
                    }
                }
                Event::Readable | Event::End => self.readable = true,
                Event::Writable => self.writable = true,
                Event::Urgent => {}
                Event::Closed(error) => {
                    if !self.connected
                        && let Some(listener) = &mut self.listener
                    {
                        listener.failed();
                    }
                    (self.failure, self.readable) = (error, true);
                    self.over = true;
                    let late = |orphan: &Orphan| now.since(orphan.since) >= self.config.orphan;
                    self.orphaned = self.orphan.as_ref().is_some_and(late);
                }
            }
        }
        match &mut self.orphan {
            None if self.closed => self.orphan = Some(Orphan::new(connection, now)),
            Some(orphan) if orphan.next <= connection.una() => {
                (orphan.next, orphan.since) = (connection.una() + orphan.step, now);
            }
            _ => {}
        }
        if self.rests
            && let Some(idle) = connection.idle(Arc::new)
        {
            *connection = idle.wake();
            self.rested += 1;
        }
    }

    /// The time at which this host acts next without a packet.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let connection = self.connection.as_ref()?;
        let ring = self.posted.iter().map(|entry| entry.at).min();
        let read = (self.readable && !self.closed).then_some(self.next_read);
        let write = (self.writable && !self.closed && !self.over).then_some(self.next_write);
        let timer = connection.poll_timeout().map(|at| match self.plan.tick {
            0 => at,
            tick => Time::from_micros(at.micros().next_multiple_of(tick)),
        });
        [timer, ring, self.again, read, write, self.next_move].into_iter().flatten().min()
    }

    /// Runs the actions that are due.
    pub(crate) fn act(&mut self, peer: u64, now: Time) {
        self.posted.retain(|Entry { at, done, .. }| {
            done.set(*at <= now);
            !done.get()
        });
        let Some(connection) = &mut self.connection else { return };
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
            // A full ring does not call the connection again at once.
            let next = connection.poll_timeout();
            assert!(next.is_none_or(|next| next > now), "{}: the deadline is in the past", self.name);
        }
        if self.next_move.is_some_and(|at| at <= now) {
            self.go_on_elsewhere(now);
        }
        if self.readable && !self.closed && self.next_read <= now {
            self.read(peer, now);
        }
        if self.writable && !self.closed && !self.over && self.next_write <= now {
            self.write(now);
        }
        self.transmit(now);
    }

    /// Saves the connection, and continues it in another one with its sequence numbers and its
    /// payload.
    fn go_on_elsewhere(&mut self, now: Time) {
        let Some(connection) = &self.connection else { return };
        self.plan.moves -= 1;
        self.next_move = (self.plan.moves > 0).then(|| now + Duration::from_micros(self.rng.u64(1..1_000_000)));
        let Some(saved) = connection.save(now) else { return };
        let (unread, unacknowledged): (Vec<_>, Vec<_>) =
            (connection.unread().cloned().collect(), connection.unacknowledged().cloned().collect());
        self.out_of_buffers += connection.info(now).out_of_buffers;
        self.connection = None;
        // The new one does not know what is in the ring.
        self.posted.iter_mut().for_each(|entry| entry.len = 0);
        let queue = Some(&**self.budget);
        let connection = Connection::restore(&saved, &self.config, unread, unacknowledged, queue, now);
        self.orphan = self.orphan.as_ref().map(|orphan| Orphan::new(&connection, orphan.since));
        self.connection = Some(connection);
        // Its events are lost, so the user checks the state itself.
        (self.readable, self.writable) = (true, true);
    }

    fn read(&mut self, peer: u64, now: Time) {
        let Some(connection) = &mut self.connection else { return };
        self.next_read = now + Duration::from_micros(self.rng.u64(0..=self.plan.read_pause));
        let (used, woken) = (self.budget.used(), self.woken.0.load(Ordering::Relaxed));
        connection.budget().wait();
        for _ in 0..self.rng.usize(1..8) {
            match connection.recv(now) {
                Ok(ReadOutcome::Chunk(chunk)) => {
                    for (i, b) in chunk.bytes().iter().enumerate() {
                        assert_eq!(*b, byte(peer, self.received + i), "{}: byte {}", self.name, self.received + i);
                    }
                    assert!(!chunk.is_empty());
                    self.received += chunk.len();
                }
                Ok(ReadOutcome::Empty) => {
                    self.readable = false;
                    break;
                }
                Ok(ReadOutcome::End) => {
                    (self.ended, self.readable) = (!self.over || self.failure.is_none(), false);
                    if self.sent == self.plan.send {
                        self.closed = true;
                        connection.close(now);
                    }
                    break;
                }
                Err(error) => {
                    assert_eq!(self.failure, Some(error));
                    self.closed = true;
                    connection.close(now);
                    break;
                }
            }
        }
        let woken = self.woken.0.load(Ordering::Relaxed) - woken;
        assert_eq!(woken, usize::from(self.budget.used() < used), "{}: a buffer that was returned", self.name);
    }

    fn write(&mut self, now: Time) {
        let Some(connection) = &mut self.connection else { return };
        self.next_write = now + Duration::from_micros(self.rng.u64(0..=self.plan.write_pause));
        let left = self.plan.send - self.sent;
        if left > 0 {
            let len = self.rng.usize(1..=self.plan.write.min(left));
            let more = len < left && self.rng.u8(0..10) == 0;
            let bytes = (self.sent..self.sent + len).map(|n| byte(self.key, n)).collect();
            match connection.send(SharedBytes::new(bytes), more) {
                Ok(()) => self.sent += len,
                Err(refusal) => {
                    assert_ne!(refusal.why, Refused::Shutdown);
                    self.writable = false;
                }
            }
            return;
        }
        self.writable = false;
        match self.plan.end {
            End::Shutdown => connection.shutdown(),
            // The user may have read the end already.
            End::Wait if !self.ended => {}
            End::Close | End::Wait => {
                self.closed = true;
                connection.close(now);
            }
            End::Abort => {
                self.closed = true;
                connection.abort(now);
            }
        }
        if self.ended && !self.closed {
            self.closed = true;
            connection.close(now);
        }
    }

    /// Whether a connection that existed is gone, and its user has read everything.
    pub(crate) fn is_gone(&self) -> bool {
        self.over && (self.closed || !self.readable) && self.connection.as_ref().is_none_or(Connection::is_gone)
    }

    pub(crate) fn state(&self) -> String {
        let connection = self.connection.as_ref().map(|c| (c.state(), c.poll_timeout(), c.readable(), c.room()));
        format!(
            "{}: {connection:?}, sent {} of {}, received {}, readable {}, writable {}, closed {}, over {}, {:?}",
            self.name,
            self.sent,
            self.plan.send,
            self.received,
            self.readable,
            self.writable,
            self.closed,
            self.over,
            self.failure
        )
    }
}
