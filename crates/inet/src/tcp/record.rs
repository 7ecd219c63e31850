//! Recordings of the input and output of a connection, and their replay.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    Carrier, Chunk, Config, Connection, Full, Header, IcmpError, KeepAlive, Meta, Outgoing, Output, Seq, Start, Ticket,
};
use crate::Time;

/// A recording of a connection from its beginning: headers, times, calls, and the segments that it
/// sent. Payload is only counted.
///
/// [`replay`](Self::replay) repeats it with payload that occupies no memory. A failure in
/// production becomes a test in this way. The recording can be stored in any format of serde.
///
/// Two things are not part of a recording. First, payload that the user read counts as dropped at
/// once, so a replay differs if a budget was the limit. Second, transmissions count as complete in
/// the order in which they were made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recording {
    config: Config,
    start: Start,
    now: Time,
    /// The peer's SYN, if this side answered a SYN.
    syn: Option<Header>,
    steps: Vec<Step>,
    #[serde(skip)]
    left: Vec<Left>,
}

/// One call of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Step {
    Segment {
        header: Header,
        meta: Meta,
        chunks: Vec<u32>,
        now: Time,
    },
    Icmp {
        error: IcmpError,
        seq: Option<Seq>,
        now: Time,
    },
    Transmit {
        now: Time,
        offload: usize,
        left: Vec<Left>,
        done: u64,
        full: bool,
    },
    Timeout(Time),
    /// `joins`: the chunk continued the previous chunk in its memory.
    Send {
        len: u32,
        more: bool,
        joins: bool,
    },
    Recv(Time),
    MarkUrgent,
    Shutdown,
    ShutdownRead,
    Close(Time),
    Abort(Time),
    DeviceGone,
    Supersede,
    Evict,
    Nodelay(bool),
    Cork(bool),
    UserTimeout(Option<Duration>),
    SendBuffer(usize),
    LowWater(usize),
    KeepAlive(Option<KeepAlive>),
    AckEvery(u16),
    QuickAck(bool),
    MaxPayload(u16),
}

/// A segment that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Left {
    pub(super) header: Header,
    pub(super) len: u32,
    /// Whether the sender keeps the ticket of its transmission.
    pub(super) tracked: bool,
    /// The first transmission that was not complete when the sender chose this segment.
    pub(super) done: u64,
}

/// A replay differs from its recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step}: a segment differs from the recorded one")]
pub struct Diverged {
    /// The number of the call, from 0.
    pub step: usize,
}

impl Recording {
    pub(super) fn new(config: &Config, start: Start, syn: Option<&Header>, now: Time) -> Self {
        Self { config: *config, start, now, syn: syn.copied(), steps: Vec::new(), left: Vec::new() }
    }

    /// The number of recorded calls. When it reaches [`Config::record`], the recording stops.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether nothing was recorded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub(super) fn add(&mut self, step: Step) {
        if self.steps.len() < self.config.record as usize {
            self.steps.push(step);
        }
    }

    pub(super) fn left(&mut self, left: Left) {
        if self.steps.len() < self.config.record as usize {
            self.left.push(left);
        }
    }

    pub(super) fn transmitted(&mut self, now: Time, offload: usize, full: bool, done: u64) {
        let left = std::mem::take(&mut self.left);
        self.add(Step::Transmit { now, offload, left, done, full });
    }

    /// Repeats the calls. Returns the connection in its state after the last one.
    ///
    /// # Errors
    /// A segment of the replay differs from that of the recording: either the code has changed, or
    /// the connection met a limit that is not recorded.
    pub fn replay(&self) -> Result<Connection<Counted>, Diverged> {
        let config = Config { record: 0, ..self.config };
        let mut tcp = match &self.syn {
            Some(syn) => Connection::answer(syn, &config, self.start, None, self.now),
            None => Connection::connect(&config, self.start, None, self.now),
        };
        let (done, mut transmissions) = (Rc::new(Cell::new(0)), 0);
        for (n, step) in self.steps.iter().enumerate() {
            match step {
                Step::Segment { header, meta, chunks, now } => {
                    tcp.handle_segment(header, chunks.iter().map(|len| Length::new(*len)), *meta, *now);
                }
                Step::Icmp { error, seq, now } => {
                    tcp.handle_icmp_error(*error, *seq, *now);
                }
                Step::Transmit { now, offload, left, done: at_end, full } => {
                    done.set(left.first().map_or(*at_end, |left| left.done));
                    let mut check = Check {
                        left,
                        offload: *offload,
                        at_end: *at_end,
                        done: &done,
                        transmissions: &mut transmissions,
                        same: true,
                    };
                    let was_full = tcp.poll_transmit(*now, &mut check).is_err();
                    if !check.same || !check.left.is_empty() || was_full != *full {
                        return Err(Diverged { step: n });
                    }
                }
                Step::Timeout(now) => tcp.handle_timeout(*now),
                // A refused call is refused in the replay, too.
                Step::Send { len, more, joins } => drop(tcp.send(Length { len: *len, joins: *joins }, *more)),
                Step::Recv(now) => drop(tcp.recv(*now)),
                Step::MarkUrgent => tcp.mark_urgent(),
                Step::Shutdown => tcp.shutdown(),
                Step::ShutdownRead => tcp.shutdown_read(),
                Step::Close(now) => tcp.close(*now),
                Step::Abort(now) => tcp.abort(*now),
                Step::DeviceGone => tcp.handle_device_gone(),
                Step::Supersede => tcp.supersede(),
                Step::Evict => drop(tcp.evict()),
                Step::Nodelay(nodelay) => tcp.set_nodelay(*nodelay),
                Step::Cork(cork) => tcp.set_cork(*cork),
                Step::UserTimeout(timeout) => tcp.set_user_timeout(*timeout),
                Step::SendBuffer(bytes) => tcp.set_send_buffer(*bytes),
                Step::LowWater(bytes) => tcp.set_low_water(*bytes),
                Step::KeepAlive(keep_alive) => tcp.set_keep_alive(*keep_alive),
                Step::AckEvery(segments) => tcp.set_ack_every(*segments),
                Step::QuickAck(quick) => tcp.set_quick_ack(*quick),
                Step::MaxPayload(max_payload) => tcp.set_max_payload(*max_payload),
            }
        }
        Ok(tcp)
    }
}

/// The carrier of a replay, whose payload is only counted.
#[derive(Debug)]
pub struct Counted;

/// A number of bytes that occupy no memory.
#[derive(Clone, Copy, Debug)]
pub struct Length {
    len: u32,
    /// Whether this chunk continued the chunk before it.
    joins: bool,
}

impl Length {
    fn new(len: u32) -> Self {
        Self { len, joins: false }
    }
}

impl Chunk for Length {
    type Tail = ();

    fn continues(&self, next: &Self) -> bool {
        next.joins
    }

    fn join(&mut self, next: Self) {
        self.len += next.len;
    }

    fn len(&self) -> usize {
        self.len as usize
    }

    fn advance(&mut self, n: usize) {
        self.len -= n as u32;
    }

    fn truncate(&mut self, len: usize) {
        self.len = len as u32;
    }
}

/// A transmission of a replay. It is complete when the recording says so.
#[derive(Debug)]
pub struct Numbered {
    number: u64,
    done: Rc<Cell<u64>>,
}

impl Ticket for Numbered {
    fn is_done(&self) -> bool {
        self.number < self.done.get()
    }
}

impl Carrier for Counted {
    type Received = Length;
    type Sent = Length;
    type Ticket = Numbered;
}

/// An output that compares the sent segments with the recording.
struct Check<'a> {
    left: &'a [Left],
    offload: usize,
    at_end: u64,
    done: &'a Rc<Cell<u64>>,
    transmissions: &'a mut u64,
    same: bool,
}

impl Output<Counted> for Check<'_> {
    fn max_payload(&self) -> usize {
        self.offload
    }

    fn transmit(&mut self, segment: Outgoing<'_, Counted>) -> Result<Numbered, Full> {
        // After the last recorded segment, either the ring was full, or the replay sends one
        // segment too many. The caller tells these cases apart.
        let (left, rest) = self.left.split_first().ok_or(Full)?;
        self.same &= (left.header, left.len) == (*segment.header, segment.payload_len);
        self.left = rest;
        self.done.set(rest.first().map_or(self.at_end, |next| next.done));
        *self.transmissions += u64::from(left.tracked);
        Ok(Numbered { number: *self.transmissions, done: Rc::clone(self.done) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::testing::{Pair, Ring, stream};
    use super::*;

    /// Runs two ends over a link with losses and full rings, with calls of all kinds. Returns the
    /// recordings as JSON, and the final states.
    fn recorded(seed: u64) -> [(String, State); 2] {
        let mut random = fastrand::Rng::with_seed(seed);
        let config = Config {
            record: 100_000,
            receive_buffer: random.u32(3000..100_000),
            timestamps: random.bool(),
            sack: random.bool(),
            ..Config::default()
        };
        let mut pair = Pair::new(&config, &config);
        let mut sent = 0;
        for _ in 0..400 {
            let (to, from) = if random.bool() { (&mut pair.a, &mut pair.b) } else { (&mut pair.b, &mut pair.a) };
            let mut ring = Ring { room: random.usize(0..8), ..Ring::new() };
            let _ = from.tcp.poll_transmit(pair.now, &mut ring);
            for sent in ring.segments.iter().filter(|_| random.u8(0..20) > 0) {
                to.input(sent, pair.now);
            }
            match random.u8(0..60) {
                0..15 => {
                    sent += usize::from(from.tcp.send(stream(sent, 900), random.bool()).is_ok()) * 900;
                }
                // The payload has more parts than one transmission has chunks.
                15..20 => {
                    let (mut whole, more) = (stream(sent, 900), random.bool());
                    for _ in 0..30 {
                        let mut part = whole.clone();
                        part.truncate(30);
                        whole.advance(30);
                        sent += usize::from(from.tcp.send(part, more).is_ok()) * 30;
                    }
                }
                20..30 => from.read(pair.now),
                30 => from.tcp.set_nodelay(random.bool()),
                31 => from.tcp.set_cork(random.bool()),
                32 => from.tcp.set_quick_ack(random.bool()),
                33 => drop(from.tcp.handle_icmp_error(
                    IcmpError::TooBig { max_payload: 800 },
                    Some(from.tcp.una()),
                    pair.now,
                )),
                34 => from.tcp.mark_urgent(),
                35 if seed.is_multiple_of(3) => from.tcp.shutdown(),
                36 if seed.is_multiple_of(7) => from.tcp.close(pair.now),
                _ => {}
            }
            pair.now += Duration::from_micros(random.u64(0..20_000));
            for end in [&mut pair.a, &mut pair.b] {
                if end.tcp.poll_timeout().is_some_and(|at| at <= pair.now) {
                    end.tcp.handle_timeout(pair.now);
                }
            }
        }
        [&pair.a, &pair.b].map(|end| (serde_json::to_string(end.tcp.recording().unwrap()).unwrap(), end.tcp.state()))
    }

    #[test]
    fn what_was_recorded_happens_again() {
        for seed in 0..30 {
            for (n, (text, state)) in recorded(seed).into_iter().enumerate() {
                let recording: Recording = serde_json::from_str(&text).unwrap();
                let again = recording.replay().unwrap_or_else(|diverged| panic!("seed {seed}, end {n}: {diverged}"));
                assert_eq!(again.state(), state, "seed {seed}, end {n}");
                assert!(recording.len() > 200);
            }
        }
    }

    #[test]
    fn a_difference_is_found() {
        let [(text, _), _] = recorded(1);
        let mut recording: Recording = serde_json::from_str(&text).unwrap();
        let lost = recording.steps.iter().position(|step| matches!(step, Step::Segment { .. })).unwrap();
        recording.steps.remove(lost);
        assert!(matches!(recording.replay(), Err(Diverged { step }) if step >= lost));
    }

    #[test]
    fn a_recording_is_bounded() {
        let config = Config { record: 10, ..Config::default() };
        let mut pair = Pair::connected(&config, &config);
        for n in 0..100 {
            pair.a.tcp.send(stream(n, 1), false).unwrap();
            pair.settle();
        }
        assert_eq!(pair.a.tcp.recording().map(Recording::len), Some(10));
        assert!(pair.a.tcp.recording().is_some_and(|recording| recording.left.is_empty()));
    }
}
