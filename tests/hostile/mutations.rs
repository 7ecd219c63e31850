//! Frames that are nearly right: made for connections that exist, and changed at random.

use crate::attack;
use crate::generator::frame::{self, ACK, ALL, FIN, Link, MSS, OFFLOADS, RST, SYN, Segment};
use crate::generator::peer::{MAC, Peer, v4, v6};
use crate::generator::server::{Server, Service, V4, V6};
use std::net::{IpAddr, SocketAddr};

/// Stations of each family.
const STATIONS: u32 = 32;
/// Frames between two answers to the established connection. In between, the connections of the
/// attackers come no further.
const ROUND: u64 = 200;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |number| number.parse().unwrap())
}

/// Prints the seed if the test fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("NETMEM_HOSTILE_SEED={}", self.0);
        }
    }
}

/// The address and port of a connection, of each family in turn.
fn local(n: u32) -> SocketAddr {
    let address = if n.is_multiple_of(2) { v4(200 + n / 2) } else { v6(200 + n / 2) };
    SocketAddr::new(address, 4000)
}

struct Mutator {
    random: fastrand::Rng,
    flows: Vec<usize>,
}

impl Mutator {
    /// A number that is right, near, or any.
    fn near(&mut self, right: u32) -> u32 {
        match self.random.u8(..8) {
            0..4 => right,
            4 => right.wrapping_add(self.random.u32(..3)).wrapping_sub(1),
            5 => right.wrapping_add(self.random.u32(..70_000)),
            6 => right.wrapping_sub(self.random.u32(..70_000)),
            _ => self.random.u32(..),
        }
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        let len = if self.random.bool() { 0 } else { self.random.usize(..=most) };
        std::iter::repeat_with(|| self.random.u8(..)).take(len).collect()
    }

    /// Whole words of options.
    fn options(&mut self) -> Vec<u8> {
        match self.random.u8(..4) {
            0 => MSS.to_vec(),
            // Window scale, SACK-permitted and timestamps.
            1 => [&MSS[..], &[1, 3, 3, self.random.u8(..20), 4, 2, 8, 10], &[0; 8]].concat(),
            2 => {
                let mut options = self.bytes(40);
                options.resize(options.len().next_multiple_of(4), 1);
                options
            }
            _ => Vec::new(),
        }
    }

    /// A segment with any flags.
    fn segment(&mut self, peer: &mut Peer) -> Vec<u8> {
        let at = self.random.usize(..self.flows.len());
        let connection = peer.connection(self.flows[at]);
        let (from, to) = (connection.local, connection.remote);
        let (next, expected) = (connection.next, connection.expected);
        let (seq, ack) = (self.near(next), self.near(expected));
        let (flags, window, options) = (self.random.u8(..), self.random.u16(..), self.options());
        let payload = self.bytes(1400);
        let to = if self.random.u8(..32) == 0 { SocketAddr::new(to.ip(), self.random.u16(..)) } else { to };
        let link = peer.ethernet();
        Segment { from, to, seq, ack, flags, window, options: &options, payload: &payload }.frame(link)
    }

    /// What a connection would send next. So there are connections to be damaged.
    fn step(&mut self, peer: &mut Peer) -> Vec<u8> {
        let at = self.random.usize(..self.flows.len());
        let (n, payload, again) = (self.flows[at], self.bytes(1400), self.random.u8(..16) == 0);
        let connection = peer.connection(n);
        let (local, established) = (connection.local, connection.established);
        if let Some(seq) = connection.challenged.take() {
            // The server has an older connection.
            connection.next = seq;
            peer.segment(n, RST, &[]);
            return peer.take_last();
        }
        if connection.reset || connection.finished || again {
            if established && !connection.reset && self.random.u8(..4) != 0 {
                peer.segment(n, [RST, FIN | ACK][self.random.usize(..2)], &[]);
            }
            self.flows[at] = peer.open(local);
        } else if established {
            peer.segment(n, ACK, &payload);
        } else {
            connection.next = connection.una;
            peer.segment(n, SYN, &[]);
        }
        peer.take_last()
    }

    /// Of another protocol, and possibly to all stations.
    fn other(&mut self, peer: &mut Peer) -> Vec<u8> {
        let link = if self.random.u8(..4) == 0 { Link { from: MAC, to: ALL } } else { peer.ethernet() };
        let (local, body) = (local(self.random.u32(..2 * STATIONS)), self.bytes(1400));
        let to = Server::address(&local.ip());
        match (self.random.u8(..3), local.ip()) {
            (0, _) => frame::udp(link, local, SocketAddr::new(to, self.random.u16(..)), &body),
            (1, IpAddr::V4(own)) => frame::arp(link, self.random.bool(), (MAC, own), (peer.to, V4)),
            (1, IpAddr::V6(own)) if self.random.bool() => frame::solicitation(link, own, V6, MAC),
            (1, IpAddr::V6(own)) => frame::advertisement(link, own, V6, MAC),
            (_, address) => {
                let kind = [self.random.u8(..), self.random.u8(..16)];
                frame::icmp(link, [address, to], kind, [0, 0, self.random.u8(..), self.random.u8(..)], &body)
            }
        }
    }

    /// Changes some bytes of the headers, cuts the frame, or makes a fragment of it. Half of the
    /// frames get right checksums.
    fn mutate(&mut self, frame: &mut Vec<u8>) {
        const START: usize = OFFLOADS + 12;
        for _ in 0..self.random.u8(..4) {
            let most = frame.len().min(START + 90);
            let at = self.random.usize(START..most);
            match self.random.u8(..3) {
                0 => frame[at] ^= 1 << self.random.u8(..8),
                1 => frame[at] = self.random.u8(..),
                _ => frame[at] = [0, 1, 0x7f, 0x80, 0xff][self.random.usize(..5)],
            }
        }
        match self.random.u8(..16) {
            0 => frame.truncate(self.random.usize(OFFLOADS + 14..=frame.len())),
            1 => frame.resize((frame.len() + self.random.usize(..64)).min(OFFLOADS + 1514), 0),
            // IPv4's flags and offset.
            2 if frame.len() > START + 10 => {
                frame[START + 8] = self.random.u8(..) & 0x3f;
                frame[START + 9] = self.random.u8(..);
            }
            _ => {}
        }
        if self.random.u8(..8) != 0 {
            frame::fix(frame);
        }
    }

    fn next(&mut self, peer: &mut Peer) -> Vec<u8> {
        let mut frame = match self.random.u8(..10) {
            0..3 => return self.step(peer),
            3..8 => self.segment(peer),
            _ => self.other(peer),
        };
        self.mutate(&mut frame);
        frame
    }
}

#[test]
fn mutated_frames() {
    let frames = number("NETMEM_HOSTILE_FRAMES", 200_000);
    let seed = Seed(number("NETMEM_HOSTILE_SEED", 23));
    let attacked = attack(Service::Echo, &[], |peer, witness| {
        let mut mutator = Mutator { random: fastrand::Rng::with_seed(seed.0), flows: Vec::new() };
        mutator.flows = (0..2 * STATIONS).map(|n| peer.open(local(n))).collect();
        for n in 0..frames {
            let frame = mutator.next(peer);
            peer.push(frame);
            if n % ROUND == 0 {
                witness.check(peer);
            }
        }
    });
    let Some(((), report)) = attacked else { return };
    eprintln!("{frames} mutated frames: {report}");
}
