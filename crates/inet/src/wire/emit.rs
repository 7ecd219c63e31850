//! Writing the headers in front of transport headers, and the checksum of the payload behind them.
//!
//! Why the checksum is in one place: it is computed here, or left to the device as a partial sum.
//! `Sums::finish` decides that for all protocols.

use super::ethernet::{EthernetHeader, ether_type};
use super::ip::pseudo_sum;
use super::ip::{FragmentHeader, protocol};
use netmem_packet::{Checksum, Gso, Meta, Sum};
use std::net::IpAddr;

/// The headers in front of a transport header, apart from the two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    /// The Ethernet header; `None` to begin with the IP header.
    pub link: Option<EthernetHeader>,
    /// The traffic class, with the bits of ECN.
    pub traffic_class: u8,
    /// How many routers may forward the packet.
    pub hop_limit: u8,
}

impl Outer {
    /// How many routers may forward a packet, by default.
    pub const HOP_LIMIT: u8 = 64;

    /// Headers for packets of no special class.
    #[must_use]
    pub const fn new(link: Option<EthernetHeader>) -> Self {
        Self { link, traffic_class: 0, hop_limit: Self::HOP_LIMIT }
    }

    /// Bytes of the link and IP headers.
    #[inline]
    #[must_use]
    pub const fn len(&self, v4: bool) -> usize {
        (if self.link.is_some() { EthernetHeader::LEN } else { 0 }) + if v4 { 20 } else { 40 }
    }

    /// Always false: there is always an IP header.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Writes the link and IP headers for `len` bytes of content, and returns how many bytes that
    /// are.
    ///
    /// IPv4 packets may not be fragmented by routers, so their identification is 0 (RFC 6864).
    pub(super) fn emit(
        &self,
        source: IpAddr,
        destination: IpAddr,
        protocol: u8,
        len: usize,
        out: &mut [u8],
    ) -> Result<usize, EmitError> {
        let at = match &self.link {
            Some(link) => {
                let ether_type = if source.is_ipv4() { ether_type::IPV4 } else { ether_type::IPV6 };
                link.write(ether_type, out.first_chunk_mut().ok_or(EmitError::NoRoom)?);
                EthernetHeader::LEN
            }
            None => 0,
        };
        let out = &mut out[at..];
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let total = u16::try_from(20 + len).map_err(|_| EmitError::TooLong)?;
                let ip = out.first_chunk_mut::<20>().ok_or(EmitError::NoRoom)?;
                ip[..2].copy_from_slice(&[0x45, self.traffic_class]);
                ip[2..4].copy_from_slice(&total.to_be_bytes());
                // Identification 0; "do not fragment".
                ip[4..8].copy_from_slice(&[0, 0, 0x40, 0]);
                ip[8..12].copy_from_slice(&[self.hop_limit, protocol, 0, 0]);
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                let mut sum = Sum::default();
                sum.add(ip);
                ip[10..12].copy_from_slice(&(!sum.value()).to_be_bytes());
                Ok(at + 20)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let len = u16::try_from(len).map_err(|_| EmitError::TooLong)?;
                let ip = out.first_chunk_mut::<40>().ok_or(EmitError::NoRoom)?;
                ip[..4].copy_from_slice(&[0x60 | self.traffic_class >> 4, self.traffic_class << 4, 0, 0]);
                ip[4..6].copy_from_slice(&len.to_be_bytes());
                ip[6..8].copy_from_slice(&[protocol, self.hop_limit]);
                ip[8..24].copy_from_slice(&source.octets());
                ip[24..40].copy_from_slice(&destination.octets());
                Ok(at + 40)
            }
            _ => Err(EmitError::Family),
        }
    }
}

/// Writes the headers in front of a fragment of a datagram, from the link on: `len` bytes of its
/// content follow, which is of the protocol `content`.
///
/// # Errors
///
/// [`EmitError`]. Bytes of `out` may have been written.
pub fn emit_fragment(
    out: &mut [u8],
    outer: &Outer,
    (source, destination): (IpAddr, IpAddr),
    content: u8,
    fragment: FragmentHeader,
    len: usize,
) -> Result<usize, EmitError> {
    let FragmentHeader { id, offset, more } = fragment;
    if source.is_ipv6() {
        let at = outer.emit(source, destination, protocol::FRAGMENT, FRAGMENT + len, out)?;
        let header = out.get_mut(at..at + FRAGMENT).ok_or(EmitError::NoRoom)?;
        header[..2].copy_from_slice(&[content, 0]);
        header[2..4].copy_from_slice(&((offset & !7) | u16::from(more)).to_be_bytes());
        header[4..].copy_from_slice(&id.to_be_bytes());
        return Ok(at + FRAGMENT);
    }
    let end = outer.emit(source, destination, content, len, out)?;
    let ip = &mut out[end - 20..end];
    ip[4..6].copy_from_slice(&(id as u16).to_be_bytes());
    ip[6..8].copy_from_slice(&((offset / 8) | (u16::from(more) << 13)).to_be_bytes());
    ip[10..12].fill(0);
    let sum = header_sum(ip);
    ip[10..12].copy_from_slice(&(!sum).to_be_bytes());
    Ok(end)
}

/// Bytes of IPv6's fragment header.
const FRAGMENT: usize = 8;

/// The payload behind the written headers.
#[derive(Clone, Copy, Debug)]
pub struct Body {
    /// Bytes of payload.
    pub len: usize,
    /// The sum of the payload, with which the checksum is computed here. If it is `None`, the
    /// device computes the checksum, and the headers get the sum of the pseudo header.
    pub sum: Option<Sum>,
    /// The device cuts the payload into segments of so many bytes. `sum` is `None` then.
    pub segment_size: Option<u16>,
}

/// No payload, and the checksum is computed here.
impl Default for Body {
    fn default() -> Self {
        Self { len: 0, sum: Some(Sum::default()), segment_size: None }
    }
}

/// The written headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// Bytes.
    pub len: usize,
    /// The frame's offload information.
    pub meta: Meta,
}

/// Why headers were not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// The slice is too short.
    #[error("there is no room for the headers")]
    NoRoom,
    /// More payload than an IP packet can have.
    #[error("an IP packet has at most 65,535 bytes")]
    TooLong,
    /// One address is IPv4, the other IPv6.
    #[error("the two addresses are of different families")]
    Family,
}

/// The data from which a transport checksum is computed.
pub(super) struct Sums {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) protocol: u8,
    /// Its offset in the transport header.
    pub(super) offset: u16,
}

impl Sums {
    /// Stores the checksum of a transport header of `len` bytes at `at`, or what the device needs
    /// to compute it.
    #[inline]
    pub(super) fn finish(&self, out: &mut [u8], at: usize, len: usize, body: Body, gso: Option<Gso>) -> Emitted {
        // ICMP of IPv4 has no pseudo header.
        let pseudo = match self.protocol {
            protocol::ICMP => 0,
            protocol => pseudo_sum(self.source, self.destination, protocol, len + body.len).value(),
        };
        let place = at + usize::from(self.offset);
        let (value, checksum) = match body.sum {
            Some(mut sum) => {
                // The payload's sum stands by itself, so a header of an even number of bytes can be
                // added in any order.
                sum.add_word(header_sum(&out[at..at + len]));
                sum.add_word(pseudo);
                (sum.checksum(), Checksum::Verified)
            }
            // Headers are at most `MAX_HEADERS` long.
            None => (pseudo, Checksum::Partial { start: at as u16, offset: self.offset }),
        };
        out[place..place + 2].copy_from_slice(&value.to_be_bytes());
        Emitted { len: at + len, meta: Meta { checksum, gso } }
    }
}

pub(super) fn header_sum(bytes: &[u8]) -> u16 {
    let mut sum = Sum::default();
    sum.add(bytes);
    sum.value()
}

/// Bytes of the header of ICMP.
pub(super) const ICMP_LEN: usize = 8;

/// Writes a header of 8 bytes, and those in front of it.
pub(super) fn emit_icmp(
    out: &mut [u8],
    outer: &Outer,
    source: IpAddr,
    destination: IpAddr,
    (kind, code, rest): (u8, u8, [u8; 4]),
    body: Body,
) -> Result<Emitted, EmitError> {
    let protocol = if source.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 };
    let at = outer.emit(source, destination, protocol, ICMP_LEN + body.len, out)?;
    let icmp = out.get_mut(at..at + ICMP_LEN).ok_or(EmitError::NoRoom)?;
    icmp[..4].copy_from_slice(&[kind, code, 0, 0]);
    icmp[4..].copy_from_slice(&rest);
    Ok(Sums { source, destination, protocol, offset: 2 }.finish(out, at, ICMP_LEN, body, None))
}
