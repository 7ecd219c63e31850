//! A connection between a peer that sends anything and a user who calls anything, at any time.
//!
//! What is read has no gap and nothing twice, buffers stay within the budget, and when the connection is dropped, no payload is held.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netmem_fuzz::Input;
use netmem_inet::Time;
use netmem_inet::tcp::sender::SendOptions;
use netmem_inet::tcp::{
    Answer, ArrivingSegment, Budget, Chunk, Config, Connection, Ecn, Flags, Full, Header, Held, IcmpError, KeepAlive,
    Listener, Meta, Options, Outgoing, Output, Received, Secret, Seq, ConnectionTemplate, Timestamps, Unreachable,
};
use netmem_testing::simulated_memory::{self, Memory, SharedBytes, Posted};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

fuzz_target!(|data: &[u8]| {
    run(&mut Input(data));
    assert_eq!(simulated_memory::live(), 0, "payload is held by nothing");
});

/// What a segment brings, from a ring that says what the fuzzer says.
struct Ring {
    room: usize,
    offload: usize,
    posted: Vec<Rc<Cell<bool>>>,
    /// The last header that left, and how many did.
    last: Header,
    segments: usize,
}

impl Output<Memory> for Ring {
    fn max_payload(&self) -> usize {
        self.offload
    }

    fn transmit(&mut self, segment: Outgoing<'_, Memory>) -> Result<Posted, Full> {
        if self.room == 0 {
            return Err(Full);
        }
        self.room -= 1;
        self.segments += 1;
        let len: usize = segment.payload.iter().map(Chunk::len).sum();
        assert_eq!(len, segment.payload_len as usize);
        assert!(len <= (segment.segment_size as usize).max(self.offload));
        self.last = *segment.header;
        self.last.seq += len as u32;
        let done = Rc::new(Cell::new(false));
        self.posted.push(done.clone());
        Ok(Posted(done))
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
    let bits = input.u16();
    let bit = |n: u16| bits >> n & 1 != 0;
    let config = Config {
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
    };
    let mut now = Time::from_micros(u64::from(input.u32()));
    let queue = Budget::new(config.budget);
    let mut ring = Ring {
        room: 1000,
        offload: if bit(9) { 30_000 } else { 0 },
        posted: Vec::new(),
        last: Header::default(),
        segments: 0,
    };
    let secret = Secret::new([1; 16]);
    let mut peer = 1_000_000_u32;
    let syn_options = Options {
        mss: (!bit(10)).then_some(1460),
        window_scale: (!bit(11)).then(|| input.u8()),
        sack_permitted: !bit(12),
        timestamps: (!bit(13)).then_some(Timestamps { value: 5, echo: 0 }),
        ..Options::default()
    };
    let syn =
        Header { seq: Seq(peer), flags: Flags::SYN, window: input.u16(), options: syn_options, ..Header::default() };
    let mut connection: Connection<Memory> = if bit(14) {
        let arriving = ArrivingSegment { header: &syn, len: 0, flow: &1, after: None, cookie_at: None };
        let template = ConnectionTemplate { config: &config, secret: &secret, queue: Some(&queue) };
        match Listener::new(1, 1).handle_segment(arriving, template, now, || Some(config.max_payload)) {
            Answer::HalfOpen(connection) => connection,
            _ => return,
        }
    } else {
        Connection::connect(&config, secret.start(&1, now), Some(&queue), now)
    };
    let _ = connection.poll_transmit(now, &mut ring);
    if !bit(15) {
        // The handshake, so that the fuzzer need not find it.
        let ack =
            Header { seq: Seq(peer), ack: ring.last.seq + 1, flags: Flags::ACK, window: u16::MAX, ..Header::default() };
        let echo = ring.last.options.timestamps.map_or(0, |stamps| stamps.value);
        let timestamps = syn_options.timestamps.map(|stamps| Timestamps { echo, ..stamps });
        let header = if bit(14) {
            Header { seq: Seq(peer + 1), options: Options { timestamps, ..Options::default() }, ..ack }
        } else {
            Header { flags: Flags::SYN.with(Flags::ACK), options: Options { timestamps, ..syn_options }, ..ack }
        };
        connection.handle_segment(&header, None, Meta::of(0), now);
    }
    peer += 1;
    let mut held: Vec<Held<SharedBytes>> = Vec::new();
    // The byte that is read next.
    let mut next = None;
    while !input.is_empty() {
        match input.u8() % 16 {
            // A segment of the peer's.
            0..=6 => {
                let ours = ring.last.seq.0;
                let acked = ring.last.ack.0;
                let flags = match input.u8() {
                    flags @ 0..64 => Flags(flags).with(Flags::ACK),
                    flags @ 64..128 => Flags(flags),
                    _ => Flags::ACK,
                };
                let len = [0, 0, 1, 100, 1448, 1460][input.below(6)];
                let mut options = Options::default();
                let stamped = ring.last.options.timestamps;
                if let Some(stamps) = stamped.filter(|_| input.u8() & 7 != 0) {
                    options.timestamps = Some(Timestamps {
                        value: near(input, &[stamps.echo, 5]).0,
                        echo: near(input, &[stamps.value]).0,
                    });
                }
                for _ in 0..input.below(5) {
                    let from = near(input, &[ours, ours.wrapping_sub(3000)]);
                    options.sack.push(from, from + u32::from(input.u16()));
                }
                let header = Header {
                    seq: near(
                        input,
                        &[peer, acked, acked.wrapping_add(1448), acked.wrapping_add(u32::from(ring.last.window))],
                    ),
                    ack: near(input, &[ours, ours, ours.wrapping_sub(1448), ours.wrapping_add(1)]),
                    flags,
                    window: if input.u8() & 3 == 0 { input.u16() } else { 0x7fff },
                    urgent: u16::from(input.u8()),
                    options,
                };
                let missing = input.u8() == 0;
                // The byte of each number is the number's lowest.
                let payload =
                    (len > 0 && !missing).then(|| SharedBytes::new((0..len).map(|n| (header.seq + n).0 as u8).collect()));
                let meta = Meta { segments: 1 + u16::from(input.u8() & 3), ce: input.u8() & 31 == 0, ..Meta::of(len) };
                connection.handle_segment(&header, payload, meta, now);
                peer = header.seq.0.wrapping_add(len);
            }
            7 | 8 => {
                let len = usize::from(input.u16()) + 1;
                let _ = connection.send(SharedBytes::new(vec![0; len]), input.u8() & 3 == 0);
            }
            9 => {
                let keep = input.u8() & 3 == 0;
                while let Ok(Received::Chunk(chunk)) = connection.recv(now) {
                    assert!(!chunk.is_empty());
                    for byte in chunk.bytes().iter() {
                        assert_eq!(*byte, next.unwrap_or(*byte), "the stream has a gap");
                        next = Some(byte.wrapping_add(1));
                    }
                    if keep {
                        held.push(chunk);
                        break;
                    }
                }
            }
            10 => held.clear(),
            11 => match input.below(10) {
                0 => connection.shutdown(),
                1 => connection.shutdown_read(),
                2 => connection.close(now),
                3 => connection.abort(now),
                4 => connection.mark_urgent(),
                5 => connection.set_cork(input.u8() & 1 == 0),
                6 => connection.set_max_payload(input.u16()),
                7 => connection.set_nodelay(input.u8() & 1 == 0),
                8 => connection.set_send_buffer(usize::from(input.u16())),
                _ => connection.set_user_timeout(Some(Duration::from_millis(input.u16().into()))),
            },
            12 => {
                let seq = near(input, &[ring.last.seq.0]);
                let error = match input.u8() & 1 {
                    0 => IcmpError::TooBig { max_payload: input.u16().into() },
                    _ => IcmpError::Unreachable(Unreachable::Port),
                };
                connection.handle_icmp_error(error, (input.u8() & 7 != 0).then_some(seq), now);
            }
            13 => ring.posted.drain(..).for_each(|done| done.set(true)),
            14 => now += Duration::from_micros(1 << input.below(36)),
            _ => {
                if let Some(at) = connection.poll_timeout() {
                    now = now.max(at);
                    connection.handle_timeout(now);
                }
            }
        }
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        (ring.room, ring.segments) = (usize::from(input.u8() & 3) * 40, 0);
        let _ = connection.poll_transmit(now, &mut ring);
        while connection.poll_event().is_some() {}
        let buffers = connection.info(now).buffers;
        assert!(buffers <= config.budget, "{buffers} buffers of {}", config.budget);
        assert_eq!(queue.used(), buffers, "the queue counts what its connection counts");
    }
}
