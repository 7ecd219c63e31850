//! IPv4 (RFC 791) and IPv6 (RFC 8200), up to the transport header.

use super::flow::Flow;
use super::head::{ByteRange, Bytes, ParseError, be16, be32};
use netmem_packet::Sum;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Numbers of protocols in IP headers.
pub mod protocol {
    /// ICMP for IPv4.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// ICMP for IPv6.
    pub const ICMPV6: u8 = 58;
    pub(super) const HOP_BY_HOP: u8 = 0;
    pub(super) const ROUTING: u8 = 43;
    pub(in crate::wire) const FRAGMENT: u8 = 44;
    pub(super) const DESTINATION: u8 = 60;
}

/// The most extension headers of IPv6 that are parsed. A packet with more is dropped, because each
/// costs time, and real packets have one or two.
pub const MAX_EXTENSIONS: usize = 6;

/// The values of an IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ip {
    /// The source address.
    pub source: IpAddr,
    /// The destination address, of the same family.
    pub destination: IpAddr,
    /// The traffic class. The lower two bits are those of ECN (RFC 3168).
    pub traffic_class: u8,
    /// How many routers may still forward it.
    pub hop_limit: u8,
    /// The protocol of the content: see [`protocol`].
    pub protocol: u8,
    /// The bytes after the header and its options, without padding.
    pub content: ByteRange,
    /// Set if the packet is a fragment: its content is a part of a datagram's.
    pub fragment: Option<FragmentHeader>,
}

/// The place of a fragment in its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// Equal in all fragments of a datagram.
    pub id: u32,
    /// Where its content begins in the datagram's, in bytes; a multiple of 8.
    pub offset: u16,
    /// Whether more fragments follow.
    pub more: bool,
}

impl Ip {
    /// The mask of ECN's bits in the traffic class.
    pub const ECN: u8 = 3;
    /// Congestion experienced: both of ECN's bits.
    pub const CE: u8 = 3;
    /// ECN-capable transport, the codepoint that TCP senders use.
    pub const ECT0: u8 = 2;

    /// Reads a packet of `len` bytes that begins with its IP header, and whose first bytes are
    /// `head`.
    ///
    /// # Errors
    ///
    /// [`ParseError`].
    pub fn parse(head: &[u8], len: usize) -> Result<Self, ParseError> {
        let bytes = Bytes::new(head, len);
        match bytes.at::<1>(0)?[0] >> 4 {
            4 => parse_v4(bytes, 0),
            6 => parse_v6(bytes, 0),
            _ => Err(ParseError::Unknown),
        }
    }

    /// Whether a router marked the packet because of congestion.
    #[inline]
    #[must_use]
    pub const fn is_ce(&self) -> bool {
        self.traffic_class & Self::ECN == Self::CE
    }

    /// The flow of a packet that was received, with the ports of its transport header.
    #[inline]
    #[must_use]
    pub fn flow(&self, source_port: u16, destination_port: u16) -> Flow {
        let local = SocketAddr::new(self.destination, destination_port);
        Flow { local, remote: SocketAddr::new(self.source, source_port) }
    }
}

/// The sum of the pseudo header. A length beyond 16 bits does not occur in a packet.
#[inline]
pub(super) fn pseudo_sum(source: IpAddr, destination: IpAddr, protocol: u8, len: usize) -> Sum {
    let mut sum = Sum::default();
    for addr in [source, destination] {
        match addr {
            IpAddr::V4(addr) => sum.add(&addr.octets()),
            IpAddr::V6(addr) => sum.add(&addr.octets()),
        }
    }
    sum.add_word(protocol.into());
    sum.add_word(len as u16);
    sum
}

#[inline]
pub(super) fn parse_v4(bytes: Bytes<'_>, at: usize) -> Result<Ip, ParseError> {
    let ip = bytes.at::<20>(at)?;
    let header = usize::from(ip[0] & 15) * 4;
    let total = usize::from(be16(ip, 2));
    if ip[0] >> 4 != 4 || header < 20 || total < header || at + total > bytes.len {
        return Err(ParseError::Malformed);
    }
    let mut sum = Sum::default();
    sum.add(ip);
    if header > 20 {
        let options = bytes.range(at + 20, header - 20)?;
        sum.add(options);
        v4_options(options)?;
    }
    if sum.value() != 0xffff {
        return Err(ParseError::Malformed);
    }
    let source = Ipv4Addr::new(ip[12], ip[13], ip[14], ip[15]);
    let destination = Ipv4Addr::new(ip[16], ip[17], ip[18], ip[19]);
    let martian = source.is_multicast() || source.is_broadcast() || source.is_loopback() || source.is_unspecified();
    if martian || destination.is_loopback() || destination.is_unspecified() {
        return Err(ParseError::Martian);
    }
    let content = ByteRange { at: at + header, len: total - header };
    let (flags, offset) = (be16(ip, 6), be16(ip, 6) << 3);
    let more = flags & 0x2000 != 0;
    let fragment = (more || offset != 0).then(|| FragmentHeader { id: be16(ip, 4).into(), offset, more });
    Ok(Ip {
        source: source.into(),
        destination: destination.into(),
        traffic_class: ip[1],
        hop_limit: ip[8],
        protocol: ip[9],
        content,
        fragment,
    })
}

/// Options are skipped, and must have lengths that end in the header.
#[cold]
fn v4_options(mut options: &[u8]) -> Result<(), ParseError> {
    while let [kind, rest @ ..] = options {
        options = match (kind, rest) {
            (0, _) => return Ok(()),
            (1, rest) => rest,
            // Loose and strict source route.
            (131 | 137, _) => return Err(ParseError::SourceRoute),
            (_, [len, ..]) if *len >= 2 => options.get(usize::from(*len)..).ok_or(ParseError::Malformed)?,
            _ => return Err(ParseError::Malformed),
        };
    }
    Ok(())
}

#[inline]
pub(super) fn parse_v6(bytes: Bytes<'_>, at: usize) -> Result<Ip, ParseError> {
    let ip = bytes.at::<40>(at)?;
    let len = usize::from(be16(ip, 4));
    if ip[0] >> 4 != 6 || at + 40 + len > bytes.len {
        return Err(ParseError::Malformed);
    }
    let addr = |at: usize| ip[at..].first_chunk::<16>().map_or(Ipv6Addr::UNSPECIFIED, |&addr| addr.into());
    let (source, destination) = (addr(8), addr(24));
    let mapped = |addr: Ipv6Addr| addr.to_ipv4_mapped().is_some();
    let martian = source.is_multicast() || source.is_loopback() || mapped(source);
    if martian || destination.is_unspecified() || destination.is_loopback() || mapped(destination) {
        return Err(ParseError::Martian);
    }
    let mut ip = Ip {
        source: source.into(),
        destination: destination.into(),
        traffic_class: ip[0] << 4 | ip[1] >> 4,
        hop_limit: ip[7],
        protocol: ip[6],
        content: ByteRange { at: at + 40, len },
        fragment: None,
    };
    // The end of this packet, and not of the frame.
    extensions(&mut ip, Bytes { len: at + 40 + len, ..bytes })?;
    Ok(ip)
}

impl Ip {
    /// Parses the extension headers of a reassembled datagram of IPv6: those behind the fragment
    /// header are in its content. `head` is as for [`transport`](Self::transport). Does nothing to
    /// IPv4.
    ///
    /// # Errors
    ///
    /// [`ParseError`].
    pub fn skip_extensions(&mut self, head: &[u8]) -> Result<(), ParseError> {
        let bytes = Bytes::new(head, self.content.end());
        if self.source.is_ipv6() { extensions(self, bytes) } else { Ok(()) }
    }
}

/// Skips extension headers up to the transport header, or to the fragment header of a real
/// fragment.
#[inline]
fn extensions(ip: &mut Ip, bytes: Bytes<'_>) -> Result<(), ParseError> {
    match ip.protocol {
        protocol::HOP_BY_HOP | protocol::ROUTING | protocol::FRAGMENT | protocol::DESTINATION => walk(ip, bytes),
        _ => Ok(()),
    }
}

#[cold]
fn walk(ip: &mut Ip, bytes: Bytes<'_>) -> Result<(), ParseError> {
    let start = ip.content.at;
    for n in 0.. {
        let at = ip.content.at;
        let len = match ip.protocol {
            protocol::HOP_BY_HOP | protocol::DESTINATION => {
                if ip.protocol == protocol::HOP_BY_HOP && at != start {
                    return Err(ParseError::Malformed);
                }
                let len = 8 * (usize::from(bytes.at::<2>(at)?[1]) + 1);
                v6_options(&bytes.range(at, len)?[2..])?;
                len
            }
            protocol::ROUTING => {
                let [_, len, _, left] = *bytes.at(at)?;
                if left != 0 {
                    return Err(ParseError::SourceRoute);
                }
                8 * (usize::from(len) + 1)
            }
            protocol::FRAGMENT => {
                let header = bytes.at::<8>(at)?;
                let (place, id) = (be16(header, 2), be32(header, 4));
                let (offset, more) = (place & !7, place & 1 != 0);
                if more || offset != 0 {
                    ip.fragment = Some(FragmentHeader { id, offset, more });
                }
                8
            }
            _ => return Ok(()),
        };
        if n == MAX_EXTENSIONS || len > ip.content.len {
            return Err(ParseError::Malformed);
        }
        ip.protocol = bytes.at::<1>(at)?[0];
        ip.content = ByteRange { at: at + len, len: ip.content.len - len };
        if ip.fragment.is_some() {
            return Ok(());
        }
    }
    Ok(())
}

/// The upper two bits of an unknown option are its action (RFC 8200, section 4.2): if they are
/// zero, the option is skipped; otherwise the packet is dropped.
fn v6_options(mut options: &[u8]) -> Result<(), ParseError> {
    while let [kind, rest @ ..] = options {
        options = match (kind, rest) {
            (0, rest) => rest,
            (kind, [len, rest @ ..]) if kind >> 6 == 0 => rest.get(usize::from(*len)..).ok_or(ParseError::Malformed)?,
            _ => return Err(ParseError::Malformed),
        };
    }
    Ok(())
}
