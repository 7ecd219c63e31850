//! Clients that share one address, as a port of the device. Each client sends a request, waits for
//! the answer, and sends the next.
//!
//! The clients know only as much of TCP as a connection without loss needs: they answer each
//! segment of the server by its flags. A server that was kept from its CPU for longer than its
//! retransmission timeout sends segments again. They are ignored, because the clients have answered
//! the first ones. A second answer could reach a server whose connection has ended, and the server
//! would reset it.
//!
//! ```text
//!   SYN ─►   ◄─ SYN, ACK   request ─►   ◄─ answer   FIN ─►   ◄─ FIN   ACK ─►   SYN of the next port
//! ```

use super::net::ADDRESSES;
use super::rig::address;
use netmem::device::port::{ALL_OFFLOADS, Port};
use netmem::virtio::VnetHdr;
use netmem_measure::endpoint::mac;
use std::collections::VecDeque;

/// The port of the first server. The servers of further threads have the next ports.
pub(super) const PORT: u16 = 11211;
/// Keys of a server.
pub(super) const KEYS: u32 = 1000;
/// Bytes of a value.
pub(super) const VALUE: usize = 64;
/// Requests that are in flight at the same time.
const AT_ONCE: usize = 64;
/// `get` commands for each `set`.
const GETS: u64 = 100;
/// Ports of the clients.
const PORTS: std::ops::Range<u16> = 10_000..60_000;
/// The offsets of the IP header and the TCP header in a frame in wire form.
const IP: usize = VnetHdr::LEN + 14;
const TCP: usize = IP + 20;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// The protocol that the clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proto {
    Udp,
    Tcp,
}

/// What the client at a port waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaits {
    Nothing,
    Syn,
    Answer,
    Fin,
}

/// The clients of a thread's server.
#[derive(Debug)]
pub(super) struct Clients {
    proto: Proto,
    server: u16,
    port: u16,
    requests: u64,
    /// For each of the [`PORTS`]. Only for TCP.
    awaits: Vec<Awaits>,
    /// Frames towards the server.
    frames: VecDeque<Vec<u8>>,
    /// Requests that were not answered yet, or connections that have not ended.
    open: usize,
    broken: u64,
}

/// A key.
pub(super) fn key(n: u32) -> [u8; 9] {
    let mut key = *b"key000000";
    let mut rest = n;
    for digit in key[3..].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    key
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]))
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
}

/// The one's complement checksum of the IP header.
fn header_checksum(header: &[u8]) -> u16 {
    let sum: u32 = header.chunks(2).map(|pair| u32::from(be16(pair, 0))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

fn link(ether_type: u16) -> Vec<u8> {
    let mut wire = VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN }.to_bytes().to_vec();
    wire.extend_from_slice(&mac(&[address(1)]));
    wire.extend_from_slice(&mac(&[address(0)]));
    wire.extend_from_slice(&ether_type.to_be_bytes());
    wire
}

/// A frame up to the end of its IP header.
fn packet(protocol: u8, content: usize) -> Vec<u8> {
    let mut wire = link(0x0800);
    let len = (20 + content) as u16;
    wire.extend_from_slice(&[0x45, 0]);
    wire.extend_from_slice(&len.to_be_bytes());
    wire.extend_from_slice(&[0, 0, 0x40, 0, 64, protocol, 0, 0]);
    ADDRESSES.iter().for_each(|address| wire.extend_from_slice(&address.octets()));
    let sum = header_checksum(&wire[IP..]);
    wire[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
    wire
}

impl Clients {
    pub(super) fn new(proto: Proto, thread: usize) -> Self {
        // From this ARP request the server's host learns the clients' link address.
        let mut question = link(0x0806);
        question.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
        question.extend_from_slice(&mac(&[address(0)]));
        question.extend_from_slice(&ADDRESSES[0].octets());
        question.extend_from_slice(&[0; 6]);
        question.extend_from_slice(&ADDRESSES[1].octets());
        let frames = VecDeque::from([question]);
        let (server, awaits) = (PORT + thread as u16, vec![Awaits::Nothing; PORTS.len()]);
        Self { proto, server, port: PORTS.start, requests: 0, awaits, frames, open: 0, broken: 0 }
    }

    /// Connections that the server has reset.
    pub(super) fn broken(&self) -> u64 {
        self.broken
    }

    fn request(&mut self) -> Vec<u8> {
        self.requests += 1;
        // The order of the keys differs from the order of their numbers.
        let key = key((self.requests.wrapping_mul(7919) % u64::from(KEYS)) as u32);
        match self.requests.is_multiple_of(GETS + 1) {
            true => [&b"set "[..], &key, b" 0 0 64\r\n", &[b'w'; VALUE], b"\r\n"].concat(),
            false => [&b"get "[..], &key, b"\r\n"].concat(),
        }
    }

    fn next_port(&mut self) -> u16 {
        self.port = if self.port + 1 < PORTS.end { self.port + 1 } else { PORTS.start };
        self.port
    }

    fn datagram(&mut self) -> Vec<u8> {
        let (request, port) = (self.request(), self.next_port());
        let len = 8 + request.len();
        let mut wire = packet(17, len);
        for field in [port, self.server, len as u16, 0] {
            wire.extend_from_slice(&field.to_be_bytes());
        }
        wire.extend_from_slice(&request);
        wire
    }

    fn segment(&mut self, port: u16, seq: u32, ack: u32, flags: u8, payload: &[u8]) {
        let mut wire = packet(6, 20 + payload.len());
        wire.extend_from_slice(&port.to_be_bytes());
        wire.extend_from_slice(&self.server.to_be_bytes());
        wire.extend_from_slice(&seq.to_be_bytes());
        wire.extend_from_slice(&ack.to_be_bytes());
        wire.extend_from_slice(&[5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
        wire.extend_from_slice(payload);
        self.frames.push_back(wire);
    }

    fn open(&mut self) {
        match self.proto {
            Proto::Udp => {
                let datagram = self.datagram();
                self.frames.push_back(datagram);
            }
            Proto::Tcp => {
                let port = self.next_port();
                self.awaits[usize::from(port - PORTS.start)] = Awaits::Syn;
                self.segment(port, u32::from(port) << 8, 0, SYN, &[]);
            }
        }
        self.open += 1;
    }

    /// Handles a segment of the server.
    fn answer(&mut self, wire: &[u8]) {
        let (port, seq, ack) = (be16(wire, TCP + 2), be32(wire, TCP + 4), be32(wire, TCP + 8));
        let (header, flags) = (usize::from(wire[TCP + 12] >> 4) * 4, wire[TCP + 13]);
        let payload = usize::from(be16(wire, IP + 2)).saturating_sub(20 + header);
        let Some(awaits) = self.awaits.get_mut(usize::from(port.wrapping_sub(PORTS.start))) else { return };
        match *awaits {
            was if flags & RST != 0 => {
                *awaits = Awaits::Nothing;
                self.broken += 1;
                self.open -= usize::from(was != Awaits::Nothing);
            }
            Awaits::Syn if flags & SYN != 0 => {
                *awaits = Awaits::Answer;
                let request = self.request();
                self.segment(port, ack, seq.wrapping_add(1), PSH | ACK, &request);
            }
            Awaits::Answer if payload > 0 => {
                *awaits = Awaits::Fin;
                self.segment(port, ack, seq.wrapping_add(payload as u32), FIN | ACK, &[]);
            }
            Awaits::Fin if flags & FIN != 0 => {
                *awaits = Awaits::Nothing;
                self.segment(port, ack, seq.wrapping_add(1 + payload as u32), ACK, &[]);
                self.open -= 1;
            }
            _ => {}
        }
    }
}

impl Port for Clients {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.frames.is_empty() && self.open < AT_ONCE {
            self.open();
        }
        self.frames.front().map(Vec::as_slice)
    }

    fn consume(&mut self) {
        self.frames.pop_front();
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        if be16(wire, IP - 2) != 0x0800 || wire.len() < TCP + 8 {
            return true;
        }
        match (self.proto, wire[IP + 9]) {
            (Proto::Udp, 17) => self.open = self.open.saturating_sub(1),
            (Proto::Tcp, 6) if wire.len() >= TCP + 20 => self.answer(wire),
            _ => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_digits() {
        assert_eq!(&key(0), b"key000000");
        assert_eq!(&key(907), b"key000907");
    }

    /// Each segment of the server is answered once. A reset counts in any state.
    #[test]
    fn segments_that_are_sent_again_are_not_answered() {
        let mut clients = Clients::new(Proto::Tcp, 0);
        clients.open();
        let segment = |flags: u8, payload: usize| {
            let mut wire = packet(6, 20 + payload);
            wire.resize(TCP + 20 + payload, 0);
            wire[TCP + 2..TCP + 4].copy_from_slice(&(PORTS.start + 1).to_be_bytes());
            [wire[TCP + 12], wire[TCP + 13]] = [5 << 4, flags];
            wire
        };
        for (flags, payload) in [(SYN | ACK, 0), (PSH | ACK, 64), (FIN | ACK, 0)] {
            clients.frames.clear();
            for _ in 0..3 {
                assert!(clients.send(&segment(flags, payload)));
            }
            assert_eq!(clients.frames.len(), 1);
        }
        assert_eq!((clients.open, clients.broken()), (0, 0));
        assert!(clients.send(&segment(RST, 0)));
        assert_eq!((clients.open, clients.broken()), (0, 1));
    }

    #[test]
    fn the_sum_of_a_header_with_its_checksum_is_zero() {
        assert_eq!(header_checksum(&packet(6, 100)[IP..]), 0);
    }
}
