//! Headers on the fast path: fixed offsets, no allocation, each length is checked once.
//!
//! ```text
//!   ├─ Ethernet ─┤─ IPv4, or IPv6 and its extensions ─┤─ TCP, UDP, ICMP ─┤─ payload ─┤─ padding ─┤
//!                │                                    ├──── Ip::content ─────────────┤
//!   EthernetHeader         Ip::parse                            Ip::transport      ByteRange
//! ```
//!
//! **Reading.** The caller copies the first bytes of a frame, at most [`MAX_HEAD`], into memory of
//! its own. The peer or the device may change the frame meanwhile, so nothing is read twice from
//! there. [`parse`] reads a frame of Ethernet. [`Ip::parse`] reads a packet that begins with its IP
//! header. Both get the length of the frame, and return values and places ([`ByteRange`]) that are
//! inside of the frame. Checksums of transport headers cover payload, which the copy does not have:
//! [`Ip::covered`] says which bytes to add up.
//!
//! **Writing.** Functions called `emit` write headers from the first byte of a slice on, and return
//! how many bytes they wrote, with the offload information of the frame ([`Emitted`]). A page for
//! headers therefore has [`HEADROOM`] bytes in front, for a device's own header, and
//! [`MAX_HEADERS`] after them.
//!
//! **What is refused.** VLAN tags, because a stack has one network, and does not know the tag of
//! it. IPv4 with source routing, and IPv6 routing headers with segments left. Addresses that cannot
//! be on a link. Extensions of IPv6 beyond [`MAX_EXTENSIONS`]. [`ParseError`] says why.

mod arp;
mod emit;
mod icmp;
mod ip;
mod neighbor;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;

pub use arp::Arp;
pub use emit::{Body, EmitError, Emitted, Outer, emit_fragment};
pub use icmp::{Icmp, IcmpError, IcmpKind, Quoted, QuotedTransport, emit_echo_reply, emit_icmp_error};
pub use ip::{Covered, FragmentHeader, Ip, MAX_EXTENSIONS, Transport, protocol};
pub use neighbor::{Advertisement, Solicitation, all_nodes, solicited_node};
pub use tcp::{Segment, emit_tcp, tcp_header_len};
pub use udp::{Datagram, emit_udp};

use std::fmt;
use std::net::SocketAddr;

/// The number of a frame's first bytes that are parsed.
pub const MAX_HEAD: usize = 192;

/// Bytes to leave free in front of headers, for a device's own header.
pub const HEADROOM: usize = 64;

/// The longest headers that are written: Ethernet, IPv6, TCP with 40 bytes of options. Errors of
/// ICMP quote more.
pub const MAX_HEADERS: usize = EthernetHeader::LEN + 40 + 60;

/// An Ethernet address.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The address of all stations.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Whether it is the address of a group. [`Mac::BROADCAST`] is one.
    #[inline]
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 == 1
    }

    /// Whether a station can have it: it is not the address of a group, and not zero.
    #[inline]
    #[must_use]
    pub fn is_unicast(self) -> bool {
        !self.is_multicast() && self != Self::default()
    }

    /// The group that frames for an IP multicast address are sent to.
    #[must_use]
    pub fn of_multicast(group: std::net::IpAddr) -> Self {
        match group {
            std::net::IpAddr::V4(group) => {
                let [_, b, c, d] = group.octets();
                Self([0x01, 0, 0x5e, b & 0x7f, c, d])
            }
            std::net::IpAddr::V6(group) => {
                let [.., a, b, c, d] = group.octets();
                Self([0x33, 0x33, a, b, c, d])
            }
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The Ethernet header, without its type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EthernetHeader {
    /// The destination.
    pub destination: Mac,
    /// The source.
    pub source: Mac,
}

impl EthernetHeader {
    /// Bytes of the header.
    pub const LEN: usize = 14;

    fn write(self, ether_type: u16, out: &mut [u8; Self::LEN]) {
        out[..6].copy_from_slice(&self.destination.0);
        out[6..12].copy_from_slice(&self.source.0);
        out[12..].copy_from_slice(&ether_type.to_be_bytes());
    }
}

/// The two ends of a connection, or of a datagram. Both are of the same family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// This end.
    pub local: SocketAddr,
    /// The peer.
    pub remote: SocketAddr,
}

/// A range of bytes that lies within a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteRange {
    /// The first, counted from the frame's first.
    pub at: usize,
    /// How many.
    pub len: usize,
}

impl ByteRange {
    /// The byte behind the last.
    #[inline]
    #[must_use]
    pub const fn end(self) -> usize {
        self.at + self.len
    }
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// A length or a checksum of a header is wrong.
    #[error("a length or a checksum of a header is wrong")]
    Malformed,
    /// The headers are longer than the bytes that can be read; the frame has more bytes.
    #[error("headers go on behind the bytes that can be read")]
    Beyond {
        /// The port that a UDP datagram is for, if that much could be read.
        port: Option<u16>,
    },
    /// An unknown protocol, or a VLAN tag.
    #[error("a protocol that is not known")]
    Unknown,
    /// The sender wants to determine the route.
    #[error("a source route")]
    SourceRoute,
    /// An address that a frame on a link cannot have there.
    #[error("an address that a frame cannot have there")]
    Martian,
}

/// The network header of an Ethernet frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Address resolution for IPv4.
    Arp(Arp),
    /// IPv4 or IPv6.
    Ip(Ip),
}

/// The types of Ethernet frames that are understood.
mod ether_type {
    pub(super) const ARP: u16 = 0x0806;
    pub(super) const IPV4: u16 = 0x0800;
    pub(super) const IPV6: u16 = 0x86dd;
}

/// The first bytes of a frame, and how many there are in all.
#[derive(Clone, Copy)]
struct Bytes<'h> {
    head: &'h [u8],
    len: usize,
}

impl<'h> Bytes<'h> {
    /// `head` may have more bytes than the frame; those are not looked at.
    #[inline]
    fn new(head: &'h [u8], len: usize) -> Self {
        Self { head: &head[..head.len().min(len)], len }
    }

    /// `N` bytes from `at` on.
    #[inline]
    fn at<const N: usize>(self, at: usize) -> Result<&'h [u8; N], ParseError> {
        match self.head.get(at..).and_then(|rest| rest.first_chunk()) {
            Some(bytes) => Ok(bytes),
            None => Err(self.missing(at, N)),
        }
    }

    /// `len` bytes from `at` on.
    #[inline]
    fn range(self, at: usize, len: usize) -> Result<&'h [u8], ParseError> {
        match self.head.get(at..at + len) {
            Some(bytes) => Ok(bytes),
            None => Err(self.missing(at, len)),
        }
    }

    #[cold]
    fn missing(self, at: usize, len: usize) -> ParseError {
        if at + len <= self.len { ParseError::Beyond { port: None } } else { ParseError::Malformed }
    }
}

#[inline]
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads the headers of an Ethernet frame of `len` bytes, whose first bytes are `head`, up to the
/// transport header. `head` has the frame's first [`MAX_HEAD`] bytes, or all of them, or as many as
/// a CPU can read.
///
/// The caller checks whether the frame is for this station.
///
/// # Errors
///
/// [`ParseError`]: the frame must be dropped.
#[inline]
pub fn parse(head: &[u8], len: usize) -> Result<(EthernetHeader, Network), ParseError> {
    let bytes = Bytes::new(head, len);
    let ethernet = bytes.at::<{ EthernetHeader::LEN }>(0)?;
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1] = *ethernet;
    let link = EthernetHeader { destination: Mac([d0, d1, d2, d3, d4, d5]), source: Mac([s0, s1, s2, s3, s4, s5]) };
    if link.source.is_multicast() {
        return Err(ParseError::Martian);
    }
    let network = match u16::from_be_bytes([t0, t1]) {
        ether_type::IPV4 => Network::Ip(ip::parse_v4(bytes, EthernetHeader::LEN)?),
        ether_type::IPV6 => Network::Ip(ip::parse_v6(bytes, EthernetHeader::LEN)?),
        ether_type::ARP => Network::Arp(Arp::parse(bytes)?),
        _ => return Err(ParseError::Unknown),
    };
    Ok((link, network))
}
