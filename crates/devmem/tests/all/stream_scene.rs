//! A connection with payload everywhere, in each state.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, reason = "not every test does everything")]

use crate::stream_wire::{LISTEN, Odd, Peer, Rig, Segment, remote};
use netmem_devmem::TokenRange;
use netmem_devmem::stream::{DeviceListener, DeviceStream, StreamFragment, StreamReturner};
use netmem_inet::ListenOptions;
use netmem_inet::tcp::Config;
use netmem_virtio::driver::RxMode;
use std::time::Duration;

/// Where our side sends from.
const PLACE: u64 = 400 * 4096;

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum State {
    /// Our side has sent SYN.
    SynSent,
    /// Both have sent SYN at the same time. Another peer has sent SYN to the listener, and is not
    /// connected yet.
    SynReceived,
    Established,
    /// The peer has closed.
    CloseWait,
    /// Our side has closed, with data unacknowledged.
    FinWait1,
    /// The same, acknowledged.
    FinWait2,
    /// Our side has closed, and the peer has, and neither has acknowledged that.
    Closing,
    /// The peer has closed, and our side then has. The peer has not acknowledged that.
    LastAck,
    /// Our side has closed, and the peer then has. Both have acknowledged.
    TimeWait,
}

pub const STATES: [State; 9] = [
    State::SynSent,
    State::SynReceived,
    State::Established,
    State::CloseWait,
    State::FinWait1,
    State::FinWait2,
    State::Closing,
    State::LastAck,
    State::TimeWait,
];

impl State {
    /// Whether the peer has sent FIN.
    pub fn peer_has_closed(self) -> bool {
        matches!(self, Self::CloseWait | Self::Closing | Self::LastAck | Self::TimeWait)
    }

    /// Whether our side waits for an acknowledgement.
    pub fn in_flight(self) -> bool {
        !matches!(self, Self::FinWait2 | Self::TimeWait)
    }
}

/// A connection with payload everywhere: held by the user, queued, out of order, in flight, and not
/// sent yet. Before the handshake is complete, all of it is not sent yet.
pub struct Scene {
    pub rig: Rig,
    pub peer: Peer,
    pub listener: DeviceListener,
    pub stream: DeviceStream,
    pub returner: StreamReturner,
    pub held: Vec<(TokenRange, u64, u32)>,
    /// What our side has sent.
    pub sent: Vec<Segment>,
}

/// Ranges that our side sends, of so many bytes.
pub const RANGES: u64 = 6;
pub const RANGE: u32 = 10_000;

impl Scene {
    pub fn new(state: State) -> Self {
        let mut rig = Rig::new(512, 100);
        rig.memory.write_all_at(&[0xaa; RANGES as usize * RANGE as usize], PLACE).unwrap();
        let local = ([0, 0, 0, 0], LISTEN).into();
        let mut listener = rig.streams.as_ref().unwrap().listen(local, ListenOptions::default()).unwrap();
        if matches!(state, State::SynSent | State::SynReceived) {
            return Self::opening(rig, listener, state);
        }
        let mut peer = Peer::connect(&mut rig, 5001);
        let mut stream = listener.accept().unwrap();
        let mut held = Vec::new();
        for n in 0..3 {
            peer.give(&mut rig, &[n; 1000]);
            let mut place = [StreamFragment::Empty];
            assert_eq!(stream.recv(&mut place).unwrap(), 1);
            let [StreamFragment::Device { offset, len, tokens, .. }] = place else { panic!("not in device memory") };
            held.push((tokens, offset, len));
        }
        for n in 3..6 {
            peer.give(&mut rig, &[n; 1000]);
        }
        if !state.peer_has_closed() {
            peer.give_at(&mut rig, peer.seq.wrapping_add(1000), &[9; 1000], &Odd::default());
            rig.settle();
        }
        send(&rig, &mut stream);
        let mut sent = rig.settle();
        if matches!(state, State::CloseWait | State::LastAck) {
            sent.extend(peer.fin(&mut rig));
        }
        if !matches!(state, State::Established | State::CloseWait) {
            stream.tcp_mut().shutdown();
            sent.extend(rig.settle());
        }
        if !state.in_flight() {
            assert_eq!(peer.take(&mut rig, sent.clone()).len(), 60_000);
        }
        if matches!(state, State::Closing | State::TimeWait) {
            sent.extend(peer.fin(&mut rig));
        }
        let in_time_wait = rig.stack.as_ref().unwrap().connections_in_time_wait();
        assert_eq!(in_time_wait, usize::from(state == State::TimeWait));
        let returner = stream.returner();
        Self { rig, peer, listener, stream, returner, held, sent }
    }

    /// Our side connects, and the peer does not answer, or does the same.
    fn opening(mut rig: Rig, listener: DeviceListener, state: State) -> Self {
        let mut stream = rig.streams.as_ref().unwrap().connect(remote(), &Config::default()).unwrap();
        send(&rig, &mut stream);
        let mut sent = rig.settle();
        let ack = sent.iter().find(|segment| segment.syn).expect("our side connects").seq.wrapping_add(1);
        let mut peer = Peer { port: remote().port(), to: stream.tcp().local_addr().port(), seq: 7_000_000, ack };
        if state == State::SynReceived {
            peer.syn(&mut rig, true);
            let answer = rig.settle();
            assert!(answer.iter().any(|segment| segment.syn && segment.ack == peer.seq), "{answer:?}");
            sent.extend(answer);
            Peer::open(&mut rig, 5002);
        }
        assert_eq!(stream.tcp().is_connected(), Ok(false));
        let returner = stream.returner();
        Self { rig, peer, listener, stream, returner, held: Vec::new(), sent }
    }
}

fn send(rig: &Rig, stream: &mut DeviceStream) {
    let from = rig.binding.as_ref().unwrap().reference();
    for n in 0..RANGES {
        stream.send(&from, PLACE + n * u64::from(RANGE), RANGE, false).unwrap();
    }
}

/// A connection on a queue with chains of 17 parts, with large segments everywhere: two are held by
/// the user, two are queued, one is out of order, one was written by the device and not polled, and
/// six are in flight to the device.
pub struct Large {
    pub rig: Rig,
    pub peer: Peer,
    pub listener: DeviceListener,
    pub stream: DeviceStream,
    pub returner: StreamReturner,
    /// The parts of the segments that the user holds.
    pub held: Vec<(TokenRange, u64, u32)>,
}

/// Bytes of a large segment: 16 pages of device memory.
pub const LARGE: usize = 64_000;
/// Pages of device memory in a buffer.
pub const CHAIN: u64 = 16;
/// Pages of the scene's device memory.
const LARGE_PAGES: usize = 2048;

impl Large {
    pub fn new() -> Self {
        let mut rig = Rig::with(RxMode::Big, LARGE_PAGES, 800);
        rig.memory.write_all_at(&[0xaa; LARGE], PLACE).unwrap();
        let connection =
            Config { receive_buffer: 1 << 20, fixed_window: true, budget: 800, timestamps: false, ..Config::default() };
        let options = ListenOptions { connection, ..ListenOptions::default() };
        let mut listener = rig.streams.as_ref().unwrap().listen(([0, 0, 0, 0], LISTEN).into(), options).unwrap();
        let mut peer = Peer::connect(&mut rig, 5001);
        let mut stream = listener.accept().unwrap();
        // The congestion window opens.
        let from = rig.binding.as_ref().unwrap().reference();
        for _ in 0..12 {
            stream.send(&from, PLACE, LARGE as u32, false).unwrap();
            let sent = rig.settle();
            assert_eq!(peer.take(&mut rig, sent).len(), LARGE);
            assert!(stream.sent().is_some());
        }
        let mut held = Vec::new();
        for n in 0..4 {
            peer.give_large(&mut rig, &[n; LARGE]);
            rig.settle();
            while n < 2 && stream.tcp().readable() > 0 {
                let mut place = [StreamFragment::Empty];
                assert_eq!(stream.recv(&mut place).unwrap(), 1);
                let [StreamFragment::Device { offset, len, tokens, .. }] = place else { panic!("in device memory") };
                held.push((tokens, offset, len));
            }
        }
        assert_eq!(held.iter().map(|held| held.2 as usize).sum::<usize>(), 2 * LARGE);
        let mut later = peer.clone();
        later.seq = later.seq.wrapping_add(LARGE as u32);
        later.give_large(&mut rig, &[5; LARGE]);
        rig.settle();
        // The device writes the segment in between into a buffer. The stack has not polled since.
        peer.give_large(&mut rig, &[4; LARGE]);
        rig.device.as_mut().unwrap().0.poll();
        peer.seq = later.seq;
        for _ in 0..RANGES {
            stream.send(&from, PLACE, LARGE as u32, false).unwrap();
        }
        let returner = stream.returner();
        Self { rig, peer, listener, stream, returner, held }
    }

    /// Receives what is queued, and checks that it is the segments from number 2 on. Returns the
    /// tokens.
    #[track_caller]
    pub fn receive(&mut self) -> Vec<TokenRange> {
        let (mut tokens, mut all) = (Vec::new(), Vec::new());
        let mut place = [StreamFragment::Empty];
        while let Ok(1) = self.stream.recv(&mut place) {
            let [StreamFragment::Device { offset, len, tokens: more, .. }] = &place else { panic!("in device memory") };
            let at = all.len();
            all.resize(at + *len as usize, 0);
            self.rig.memory.read_exact_at(&mut all[at..], *offset).unwrap();
            tokens.push(*more);
        }
        assert_eq!(all.len(), 4 * LARGE, "segments 2 and 3 were queued, and 4 and 5 are after the last poll");
        assert!(all.chunks(LARGE).zip(2..).all(|(segment, n)| segment.iter().all(|byte| *byte == n)));
        tokens
    }
}

/// The peer receives what was sent and what comes then, and has all of it.
#[track_caller]
pub fn take_all(rig: &mut Rig, peer: &mut Peer, mut next: Vec<Segment>) {
    let mut all = Vec::new();
    for _ in 0..20 {
        all.extend(peer.take(rig, next));
        if all.len() >= 60_000 {
            break;
        }
        next = rig.pass(Duration::from_millis(300));
    }
    assert_eq!(all.len(), 60_000);
    assert!(all.iter().all(|&byte| byte == 0xaa));
}
