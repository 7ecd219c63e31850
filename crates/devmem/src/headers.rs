//! What the first bytes of a frame say: whom a UDP datagram is for, and where its payload is. On a private copy, each length
//! checked; nothing is believed that the device or the peer wrote.

use etherparse::{
    EtherType, Ethernet2HeaderSlice, IpNumber, Ipv4HeaderSlice, Ipv6HeaderSlice, UdpHeaderSlice, ether_type, ip_number,
};
use netmem_packet::SplitFrame;
use netmem_pool::Mapped;
use std::net::{IpAddr, SocketAddr};

/// As many bytes as headers can have that are understood: Ethernet, IPv4 with all options, UDP.
const MOST: usize = 14 + 60 + 8;
const UDP: usize = 8;

/// A UDP datagram in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Headers {
    /// Who sent it.
    pub(crate) peer: SocketAddr,
    /// The port that it is for.
    pub(crate) port: u16,
    /// Where the payload begins, in bytes from the frame's first; in the head or at its end.
    pub(crate) start: usize,
    /// Bytes of payload, all of which are in the frame.
    pub(crate) len: usize,
}

/// Why a frame has no datagram for any socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drop {
    /// Headers go on in device memory, which the CPU cannot read. The port, if that much was in the head.
    InDeviceMemory(Option<u16>),
    /// A fragment of an IP datagram.
    Fragment,
    /// Not UDP over IP.
    Other,
    /// A length or a checksum is wrong.
    Malformed,
}

/// Reads the headers of a frame.
pub(crate) fn parse<M: Mapped>(frame: &SplitFrame<M>) -> Result<Headers, Drop> {
    let mut copy = [0; MOST];
    let have = frame.head().len().min(MOST);
    let copy = &mut copy[..have];
    frame.head().copy_to(0, copy).map_err(|_| Drop::Malformed)?;
    Bytes { head: copy, all: frame.len() }.headers()
}

/// The copied bytes, and how many there are in the frame.
struct Bytes<'b> {
    head: &'b [u8],
    all: usize,
}

impl Bytes<'_> {
    /// `len` bytes of headers from `at` on.
    fn at(&self, at: usize, len: usize) -> Result<&[u8], Drop> {
        let short = if at + len <= self.all { Drop::InDeviceMemory(None) } else { Drop::Malformed };
        self.head.get(at..at + len).ok_or(short)
    }

    fn headers(&self) -> Result<Headers, Drop> {
        let ethernet = Ethernet2HeaderSlice::from_slice(self.at(0, 14)?).map_err(|_| Drop::Malformed)?;
        let (peer, ip, inner) = match ethernet.ether_type() {
            ether_type::IPV4 => self.ipv4()?,
            ether_type::IPV6 => self.ipv6()?,
            EtherType(_) => return Err(Drop::Other),
        };
        let at = 14 + ip;
        let udp = self.at(at, UDP).map_err(|drop| match drop {
            Drop::InDeviceMemory(_) => Drop::InDeviceMemory(self.port(at)),
            drop => drop,
        })?;
        let udp = UdpHeaderSlice::from_slice(udp).map_err(|_| Drop::Malformed)?;
        let len = usize::from(udp.length());
        if len < UDP || len > inner {
            return Err(Drop::Malformed);
        }
        let peer = SocketAddr::new(peer, udp.source_port());
        Ok(Headers { peer, port: udp.destination_port(), start: at + UDP, len: len - UDP })
    }

    /// The port of a UDP header that is not there as a whole.
    fn port(&self, at: usize) -> Option<u16> {
        let &[high, low] = self.head.get(at + 2..at + 4)? else { return None };
        Some(u16::from_be_bytes([high, low]))
    }

    /// The sender, the header's length, and the length of what is in it.
    fn ipv4(&self) -> Result<(IpAddr, usize, usize), Drop> {
        let len = usize::from(self.at(14, 1)?[0] & 15) * 4;
        let ip = Ipv4HeaderSlice::from_slice(self.at(14, len.max(20))?).map_err(|_| Drop::Malformed)?;
        let total = usize::from(ip.total_len());
        if total < len || 14 + total > self.all || checksum(ip.slice()) != 0 {
            return Err(Drop::Malformed);
        }
        self.only_udp(ip.protocol(), ip.is_fragmenting_payload())?;
        Ok((IpAddr::V4(ip.source_addr()), len, total - len))
    }

    fn ipv6(&self) -> Result<(IpAddr, usize, usize), Drop> {
        let ip = Ipv6HeaderSlice::from_slice(self.at(14, 40)?).map_err(|_| Drop::Malformed)?;
        let inner = usize::from(ip.payload_length());
        if 14 + 40 + inner > self.all {
            return Err(Drop::Malformed);
        }
        self.only_udp(ip.next_header(), ip.next_header() == ip_number::IPV6_FRAG)?;
        Ok((IpAddr::V6(ip.source_addr()), 40, inner))
    }

    fn only_udp(&self, protocol: IpNumber, fragment: bool) -> Result<(), Drop> {
        match protocol {
            _ if fragment => Err(Drop::Fragment),
            ip_number::UDP => Ok(()),
            _ => Err(Drop::Other),
        }
    }
}

/// The Internet checksum of bytes, in words of 16 bits: 0 if they contain it and it is right.
pub(crate) fn checksum(bytes: &[u8]) -> u16 {
    !fold(sum(bytes))
}

/// The sum of bytes as words of 16 bits.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(2).map(|w| u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)]));
    words.map(u64::from).sum()
}

/// A sum in one's complement.
pub(crate) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}
