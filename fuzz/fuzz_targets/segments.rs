//! A connection between a peer that sends anything and a user who calls anything, at any time.
//!
//! What is read has no gap and nothing twice, buffers stay within the budget, and when the
//! connection is dropped, no payload is held.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::Input;
use netmem_inet::Time;
use netmem_inet::tcp::sender::SendOptions;
use netmem_inet::tcp::{
    Accepted, Answer, ArrivingSegment, Budget, Chunk, Config, Connection, ConnectionTemplate, DeliveryError, Ecn,
    Flags, Full, Header, Held, KeepAlive, Listener, Options, Outgoing, Output, ReadOutcome, Secret, SegmentMeta, Seq,
    Timestamps, Unreachable,
};
use netmem_testing::simulated_memory::{self, Memory, Posted, SharedBytes};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

fuzz_target!(|data: &[u8]| {
    run(&mut Input(data));
    assert_eq!(simulated_memory::live(), 0, "payload is held by nothing");
});

/// A transmit ring with as much room as the fuzzer chooses.
struct Ring {
    room: usize,
    offload: usize,
    posted: Vec<Rc<Cell<bool>>>,
    /// The last header that was sent. Its number is the one after its payload.
    last: Header,
}

impl Output<Memory> for Ring {
    fn max_payload(&self) -> usize {
        self.offload
    }

    fn transmit(&mut self, segment: Outgoing<'_, Memory>) -> Result<Accepted<Posted>, Full> {
        if self.room == 0 {
            return Err(Full);
        }
        let len: usize = segment.payload.iter().map(Chunk::len).sum();
        assert_eq!(len, segment.payload_len as usize);
        assert!(len <= (segment.segment_size as usize).max(self.offload));
        // Each segment is an entry, and the first ones are accepted.
        let segments = segment.payload_len.div_ceil(segment.segment_size.max(1)).max(1) as usize;
        let entries = segments.min(self.room);
        self.room -= entries;
        let len = if entries < segments { entries as u32 * segment.segment_size } else { segment.payload_len };
        self.last = *segment.header;
        self.last.seq += len;
        let flags: Vec<_> = (0..entries).map(|_| Rc::new(Cell::new(false))).collect();
        self.posted.extend(flags.iter().cloned());
        Ok(Accepted { ticket: Posted(flags), len })
    }
}

/// A number that is most likely near to one that matters.
fn near(input: &mut Input, numbers: &[u32]) -> Seq {
    let choice = input.u8();
    if choice >= 240 {
        return Seq(input.u32());
    }
    let at = numbers[usize::from(choice) % numbers.len()];
    let off = if choice & 0x40 == 0 { i32::from(input.u8() as i8) } else { i32::from(input.u16() as i16) };
    Seq(at.wrapping_add(off as u32))
}

fn run(input: &mut Input) {
    let Some(mut run) = Run::begin(input) else { return };
    while !input.is_empty() {
        match input.u8() % 16 {
            0..=6 => run.segment(input),
            7 | 8 => {
                let len = usize::from(input.u16()) + 1;
                let _ = run.connection.send(SharedBytes::new(vec![0; len]), input.u8() & 3 == 0);
            }
            9 => run.read(input.u8() & 3 == 0),
            10 => run.held.clear(),
            11 => run.call(input),
            12 => run.icmp(input),
            13 => run.ring.posted.drain(..).for_each(|done| done.set(true)),
            14 => run.now += Duration::from_micros(1 << input.below(36)),
            _ => {
                if let Some(at) = run.connection.poll_timeout() {
                    run.now = run.now.max(at);
                    run.connection.handle_timeout(run.now);
                }
            }
        }
        run.ring.room = usize::from(input.u8() & 3) * 40;
        run.poll();
    }
}

/// Settings of a connection. Each bit of `bits` is one of them.
fn config(bits: u16, input: &mut Input) -> Config {
    let bit = |n: u16| bits >> n & 1 != 0;
    Config {
        receive_buffer: [100, 3000, 70_000, 1 << 22][input.below(4)],
        fixed_window: bit(0),
        budget: [1, 4, 64, 1000][input.below(4)],
        window_scaling: !bit(1),
        sack: !bit(2),
        timestamps: !bit(3),
        ecn: if bit(4) { Ecn::Request } else { Ecn::Accept },
        keep_alive: bit(5).then(KeepAlive::default),
        send: SendOptions {
            nodelay: bit(6),
            mtu_probing: bit(7),
            send_buffer: if bit(8) { 2000 } else { 1 << 20 },
            ..SendOptions::default()
        },
        ..Config::default()
    }
}

/// A connection, its device, its user, and the number with which the peer continues.
struct Run {
    now: Time,
    config: Config,
    queue: Budget,
    ring: Ring,
    connection: Connection<Memory>,
    peer: u32,
    held: Vec<Held<SharedBytes>>,
    /// The byte that is read next.
    next: Option<u8>,
}

impl Run {
    /// A connection that was opened or accepted, and its handshake unless a bit leaves that to the
    /// fuzzer.
    fn begin(input: &mut Input) -> Option<Self> {
        let bits = input.u16();
        let bit = |n: u16| bits >> n & 1 != 0;
        let config = config(bits, input);
        let now = Time::from_micros(u64::from(input.u32()));
        let queue = Budget::new(config.budget);
        let offload = if bit(9) { 30_000 } else { 0 };
        let mut ring = Ring { room: 1000, offload, posted: Vec::new(), last: Header::default() };
        let secret = Secret::new([1; 16]);
        let peer = 1_000_000_u32;
        let options = Options {
            mss: (!bit(10)).then_some(1460),
            window_scale: (!bit(11)).then(|| input.u8()),
            sack_permitted: !bit(12),
            timestamps: (!bit(13)).then_some(Timestamps { value: 5, echo: 0 }),
            ..Options::default()
        };
        let syn = Header { seq: Seq(peer), flags: Flags::SYN, window: input.u16(), options, ..Header::default() };
        let mut connection: Connection<Memory> = if bit(14) {
            let arriving = ArrivingSegment { header: &syn, len: 0, flow: &1, after: None, cookie_at: None };
            let template = ConnectionTemplate { config: &config, secret: &secret, queue: Some(&queue) };
            match Listener::new(1, 1).handle_segment(arriving, template, now, || Some(config.max_payload)) {
                Answer::HalfOpen(connection) => connection,
                _ => return None,
            }
        } else {
            Connection::connect(&config, secret.start(&1, now), Some(&queue), now)
        };
        let _ = connection.poll_transmit(now, &mut ring);
        if !bit(15) {
            // The handshake, so that the fuzzer need not find it.
            let (ack, flags) = (ring.last.seq + 1, Flags::ACK);
            let ack = Header { seq: Seq(peer), ack, flags, window: u16::MAX, ..Header::default() };
            let echo = ring.last.options.timestamps.map_or(0, |stamps| stamps.value);
            let timestamps = options.timestamps.map(|stamps| Timestamps { echo, ..stamps });
            let header = if bit(14) {
                Header { seq: Seq(peer + 1), options: Options { timestamps, ..Options::default() }, ..ack }
            } else {
                Header { flags: Flags::SYN.with(Flags::ACK), options: Options { timestamps, ..options }, ..ack }
            };
            connection.handle_segment(&header, None, SegmentMeta::of(0), now);
        }
        Some(Self { now, config, queue, ring, connection, peer: peer + 1, held: Vec::new(), next: None })
    }

    /// A segment of the peer.
    fn segment(&mut self, input: &mut Input) {
        let (ours, acked) = (self.ring.last.seq.0, self.ring.last.ack.0);
        let flags = match input.u8() {
            flags @ 0..64 => Flags(flags).with(Flags::ACK),
            flags @ 64..128 => Flags(flags),
            _ => Flags::ACK,
        };
        let len = [0, 0, 1, 100, 1448, 1460][input.below(6)];
        let mut options = Options::default();
        let stamped = self.ring.last.options.timestamps;
        if let Some(stamps) = stamped.filter(|_| input.u8() & 7 != 0) {
            let (value, echo) = (near(input, &[stamps.echo, 5]).0, near(input, &[stamps.value]).0);
            options.timestamps = Some(Timestamps { value, echo });
        }
        for _ in 0..input.below(5) {
            let from = near(input, &[ours, ours.wrapping_sub(3000)]);
            options.sack.push(from, from + u32::from(input.u16()));
        }
        let behind = acked.wrapping_add(u32::from(self.ring.last.window));
        let header = Header {
            seq: near(input, &[self.peer, acked, acked.wrapping_add(1448), behind]),
            ack: near(input, &[ours, ours, ours.wrapping_sub(1448), ours.wrapping_add(1)]),
            flags,
            window: if input.u8() & 3 == 0 { input.u16() } else { 0x7fff },
            urgent: u16::from(input.u8()),
            options,
        };
        let missing = input.u8() == 0;
        // The byte of each number is the number's lowest.
        let bytes = || (0..len).map(|n| (header.seq + n).0 as u8).collect();
        let payload = (len > 0 && !missing).then(|| SharedBytes::new(bytes()));
        let meta =
            SegmentMeta { segments: 1 + u16::from(input.u8() & 3), ce: input.u8() & 31 == 0, ..SegmentMeta::of(len) };
        self.connection.handle_segment(&header, payload, meta, self.now);
        self.peer = header.seq.0.wrapping_add(len);
    }

    /// The user reads one chunk and keeps it, or reads all.
    fn read(&mut self, keep: bool) {
        while let Ok(ReadOutcome::Chunk(chunk)) = self.connection.recv(self.now) {
            assert!(!chunk.is_empty());
            for byte in chunk.bytes().iter() {
                assert_eq!(*byte, self.next.unwrap_or(*byte), "the stream has a gap");
                self.next = Some(byte.wrapping_add(1));
            }
            if keep {
                self.held.push(chunk);
                break;
            }
        }
    }

    /// Another call of the user.
    fn call(&mut self, input: &mut Input) {
        let connection = &mut self.connection;
        match input.below(10) {
            0 => connection.shutdown(),
            1 => connection.shutdown_read(),
            2 => connection.close(self.now),
            3 => connection.abort(self.now),
            4 => connection.mark_urgent(),
            5 => connection.set_cork(input.u8() & 1 == 0),
            6 => connection.set_max_payload(input.u16()),
            7 => connection.set_nodelay(input.u8() & 1 == 0),
            8 => connection.set_send_buffer(usize::from(input.u16())),
            _ => connection.set_user_timeout(Some(Duration::from_millis(input.u16().into()))),
        }
    }

    fn icmp(&mut self, input: &mut Input) {
        let seq = near(input, &[self.ring.last.seq.0]);
        let error = match input.u8() & 1 {
            0 => DeliveryError::TooBig { max_payload: input.u16().into() },
            _ => DeliveryError::Unreachable(Unreachable::Port),
        };
        self.connection.handle_delivery_error(error, (input.u8() & 7 != 0).then_some(seq), self.now);
    }

    /// What a stack asks after each call.
    fn poll(&mut self) {
        let connection = &mut self.connection;
        if connection.poll_timeout().is_some_and(|at| at <= self.now) {
            connection.handle_timeout(self.now);
        }
        let _ = connection.poll_transmit(self.now, &mut self.ring);
        while connection.poll_event().is_some() {}
        let buffers = connection.info(self.now).buffers;
        assert!(buffers <= self.config.budget, "{buffers} buffers of {}", self.config.budget);
        assert_eq!(self.queue.used(), buffers, "the queue counts what its connection counts");
    }
}
