//! ICMP (RFC 792, RFC 1191) and ICMPv6 (RFC 4443): echo, and errors with the packet that they are
//! about.

use super::emit::{Body, EmitError, Emitted, ICMP_LEN, Outer, emit_icmp};
use super::flow::Flow;
use super::head::{ByteRange, Bytes, ParseError, be16, be32};
use super::ip::{Ip, protocol};
use super::neighbor::{ADVERTISEMENT, SOLICITATION};
use super::neighbor::{Advertisement, Solicitation};
use crate::tcp::{self, Seq, Unreachable};
use netmem_packet::Sum;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A message. Redirects and router advertisements are ignored, because routes and addresses are
/// static.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icmp {
    /// A request to send the payload back.
    EchoRequest {
        /// Identifier and sequence number, to be sent back as they are.
        id: [u8; 4],
        /// The payload to be sent back.
        payload: ByteRange,
    },
    /// An error about a TCP segment or a UDP datagram.
    Error(IcmpError),
    /// A neighbour asks for an address.
    Solicitation(Solicitation),
    /// A neighbour advertises its address.
    Advertisement(Advertisement),
    /// A message that is ignored.
    Unknown,
}

/// An error about a packet that this station may have sent. Any peer can forge one, so a connection
/// checks what is [quoted](QuotedTransport) before it acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError {
    /// The kind of the error.
    pub kind: IcmpKind,
    /// The packet that the error is about.
    pub quoted: Quoted,
}

/// A packet of this station, as an error quotes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quoted {
    /// The flow; its local address is the one that the error was sent to.
    pub flow: Flow,
    /// The part of its transport header by which its sender recognises it.
    pub transport: QuotedTransport,
}

/// What an error quotes of a transport header, besides the ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotedTransport {
    /// A segment.
    Tcp {
        /// Its sequence number.
        seq: Seq,
    },
    /// A datagram.
    Udp {
        /// Its length field: bytes of its header and its payload.
        len: u16,
    },
}

/// The kind of an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IcmpKind {
    /// There is no route.
    NetworkUnreachable,
    /// The destination does not answer on its network.
    HostUnreachable,
    /// The destination does not know the protocol.
    ProtocolUnreachable,
    /// No socket has the port.
    PortUnreachable,
    /// A router or the destination has forbidden it.
    Prohibited,
    /// The packet was too long for a link on the way.
    TooBig {
        /// Bytes of the longest packet that fits, its IP header included. This is the value in the
        /// error, which may be below the least path MTU.
        mtu: u32,
    },
    /// The hop limit was reached.
    TimeExceeded,
    /// Fragments were missing.
    ReassemblyTimeExceeded,
    /// A header was not understood.
    ParameterProblem,
}

/// Path MTUs that are tried if a router does not report the MTU (RFC 1191, section 7).
const PLATEAUS: [u16; 10] = [32000, 17914, 8166, 4352, 2002, 1492, 1006, 508, 296, 68];

impl IcmpKind {
    /// Type, code, and the second half of the header, for IPv4.
    fn to_v4(self) -> (u8, u8, u32) {
        match self {
            Self::NetworkUnreachable => (3, 0, 0),
            Self::HostUnreachable => (3, 1, 0),
            Self::ProtocolUnreachable => (3, 2, 0),
            Self::PortUnreachable => (3, 3, 0),
            Self::TooBig { mtu } => (3, 4, mtu.min(0xffff)),
            Self::Prohibited => (3, 13, 0),
            Self::TimeExceeded => (11, 0, 0),
            Self::ReassemblyTimeExceeded => (11, 1, 0),
            Self::ParameterProblem => (12, 0, 0),
        }
    }

    /// What the error means for a connection whose segments have `headers` bytes of IP and TCP
    /// headers, without options.
    #[must_use]
    pub fn for_connection(self, headers: u32) -> tcp::DeliveryError {
        tcp::DeliveryError::Unreachable(match self {
            Self::TooBig { mtu } => return tcp::DeliveryError::TooBig { max_payload: mtu.saturating_sub(headers) },
            Self::NetworkUnreachable => Unreachable::Network,
            Self::HostUnreachable => Unreachable::Host,
            Self::ProtocolUnreachable => Unreachable::Protocol,
            Self::PortUnreachable => Unreachable::Port,
            Self::Prohibited => Unreachable::Prohibited,
            Self::TimeExceeded | Self::ReassemblyTimeExceeded | Self::ParameterProblem => Unreachable::NotDelivered,
        })
    }

    /// `len` is that of the packet that is quoted.
    pub(super) fn from_v4(kind: u8, code: u8, rest: u32, len: u16) -> Option<Self> {
        Some(match (kind, code) {
            (3, 0 | 6) => Self::NetworkUnreachable,
            // Failed source routes, too: no packet of this station has one.
            (3, 1 | 5 | 7 | 8 | 11 | 12) => Self::HostUnreachable,
            (3, 2) => Self::ProtocolUnreachable,
            (3, 3) => Self::PortUnreachable,
            (3, 4) => match rest & 0xffff {
                0 => Self::TooBig { mtu: PLATEAUS.into_iter().find(|&mtu| mtu < len).unwrap_or(68).into() },
                mtu => Self::TooBig { mtu },
            },
            (3, 9 | 10 | 13..=15) => Self::Prohibited,
            (11, 0) => Self::TimeExceeded,
            (11, 1) => Self::ReassemblyTimeExceeded,
            (12, _) => Self::ParameterProblem,
            _ => return None,
        })
    }

    fn to_v6(self) -> (u8, u8, u32) {
        match self {
            Self::NetworkUnreachable => (1, 0, 0),
            Self::Prohibited => (1, 1, 0),
            Self::HostUnreachable => (1, 3, 0),
            Self::PortUnreachable => (1, 4, 0),
            Self::TooBig { mtu } => (2, 0, mtu),
            Self::TimeExceeded => (3, 0, 0),
            Self::ReassemblyTimeExceeded => (3, 1, 0),
            Self::ParameterProblem => (4, 0, 0),
            // The pointer is to the next-header field of the IPv6 header.
            Self::ProtocolUnreachable => (4, 1, 6),
        }
    }

    fn from_v6(kind: u8, code: u8, rest: u32) -> Option<Self> {
        Some(match (kind, code) {
            (1, 0 | 2) => Self::NetworkUnreachable,
            (1, 1 | 5 | 6) => Self::Prohibited,
            (1, 3 | 7) => Self::HostUnreachable,
            (1, 4) => Self::PortUnreachable,
            (2, _) => Self::TooBig { mtu: rest },
            (3, 0) => Self::TimeExceeded,
            (3, 1) => Self::ReassemblyTimeExceeded,
            (4, 1) => Self::ProtocolUnreachable,
            (4, _) => Self::ParameterProblem,
            _ => return None,
        })
    }
}

impl Icmp {
    pub(super) fn parse_v4(bytes: Bytes<'_>, ip: &Ip) -> Result<Self, ParseError> {
        let content = ip.content;
        let header = bytes.at::<ICMP_LEN>(content.at)?;
        if let ([8, 0], [_, _, _, _, id @ ..]) = (&header[..2], header) {
            return Ok(Self::EchoRequest {
                id: *id,
                payload: ByteRange { at: content.at + ICMP_LEN, len: content.len - ICMP_LEN },
            });
        }
        if !matches!(header[0], 3 | 11 | 12) {
            return Ok(Self::Unknown);
        }
        let at = content.at + ICMP_LEN;
        let quoted = bytes.at::<20>(at)?;
        let ihl = usize::from(quoted[0] & 15) * 4;
        if quoted[0] >> 4 != 4 || ihl < 20 {
            return Err(ParseError::Malformed);
        }
        // Only the first fragment has ports.
        if be16(quoted, 6) & 0x1fff != 0 {
            return Ok(Self::Unknown);
        }
        let source = Ipv4Addr::new(quoted[12], quoted[13], quoted[14], quoted[15]);
        let destination = Ipv4Addr::new(quoted[16], quoted[17], quoted[18], quoted[19]);
        let kind = IcmpKind::from_v4(header[0], header[1], be32(header, 4), be16(quoted, 2));
        Self::error(bytes, ip, kind, (source.into(), destination.into(), quoted[9], at + ihl))
    }

    pub(super) fn parse_v6(bytes: Bytes<'_>, ip: &Ip) -> Result<Self, ParseError> {
        let content = ip.content;
        let header = bytes.at::<ICMP_LEN>(content.at)?;
        if ip.source.is_unspecified() && header[0] != SOLICITATION {
            return Err(ParseError::Martian);
        }
        match (header[0], header[1], header) {
            (128, 0, [_, _, _, _, id @ ..]) => {
                return Ok(Self::EchoRequest {
                    id: *id,
                    payload: ByteRange { at: content.at + ICMP_LEN, len: content.len - ICMP_LEN },
                });
            }
            (SOLICITATION, ..) => return Solicitation::parse(bytes, ip).map(Self::Solicitation),
            (ADVERTISEMENT, ..) => return Advertisement::parse(bytes, ip).map(Self::Advertisement),
            (1..=4, ..) => {}
            _ => return Ok(Self::Unknown),
        }
        let at = content.at + ICMP_LEN;
        let quoted = bytes.at::<40>(at)?;
        if quoted[0] >> 4 != 6 {
            return Err(ParseError::Malformed);
        }
        let addr = |at: usize| quoted[at..].first_chunk::<16>().map_or(Ipv6Addr::UNSPECIFIED, |&addr| addr.into());
        let kind = IcmpKind::from_v6(header[0], header[1], be32(header, 4));
        // No packet of this station has extension headers.
        Self::error(bytes, ip, kind, (addr(8).into(), addr(24).into(), quoted[6], at + 40))
    }

    fn error(
        bytes: Bytes<'_>,
        ip: &Ip,
        kind: Option<IcmpKind>,
        (source, destination, number, at): (IpAddr, IpAddr, u8, usize),
    ) -> Result<Self, ParseError> {
        if source != ip.destination {
            return Err(ParseError::Martian);
        }
        let Some(kind) = kind.filter(|_| [protocol::TCP, protocol::UDP].contains(&number)) else {
            return Ok(Self::Unknown);
        };
        // The least that the oldest rules require of a quotation: 8 bytes.
        let header = bytes.at::<8>(at)?;
        let flow = Flow {
            local: SocketAddr::new(source, be16(header, 0)),
            remote: SocketAddr::new(destination, be16(header, 2)),
        };
        let transport = match number {
            protocol::TCP => QuotedTransport::Tcp { seq: Seq(be32(header, 4)) },
            _ => QuotedTransport::Udp { len: be16(header, 4) },
        };
        Ok(Self::Error(IcmpError { kind, quoted: Quoted { flow, transport } }))
    }
}

/// Writes the headers of an echo reply, whose payload is the request's.
///
/// # Errors
///
/// [`EmitError`]. Bytes of `out` may have been written.
pub fn emit_echo_reply(
    out: &mut [u8],
    outer: &Outer,
    source: IpAddr,
    destination: IpAddr,
    id: [u8; 4],
    body: Body,
) -> Result<Emitted, EmitError> {
    let kind = if source.is_ipv4() { 0 } else { 129 };
    emit_icmp(out, outer, source, destination, (kind, 0, id), body)
}

/// Writes an error about a packet, whose first bytes are `packet`, from its IP header on. As many
/// of them are quoted as there is room for in `out`, at most 500. There should be room for at least
/// 28 with IPv4 and 48 with IPv6, so that the receiver can find the flow.
///
/// # Errors
///
/// [`EmitError`]. Bytes of `out` may have been written.
pub fn emit_icmp_error(
    out: &mut [u8],
    outer: &Outer,
    source: IpAddr,
    destination: IpAddr,
    kind: IcmpKind,
    packet: &[u8],
) -> Result<Emitted, EmitError> {
    let at = outer.len(source.is_ipv4()) + ICMP_LEN;
    let room = out.get_mut(at..).ok_or(EmitError::NoRoom)?;
    // Of IPv4, an error is at most 576 bytes long (RFC 1812).
    let len = packet.len().min(room.len()).min(500);
    room[..len].copy_from_slice(&packet[..len]);
    let mut sum = Sum::default();
    sum.add(&packet[..len]);
    let (kind, code, rest) = if source.is_ipv4() { kind.to_v4() } else { kind.to_v6() };
    let body = Body { len, sum: Some(sum), segment_size: None };
    let emitted = emit_icmp(out, outer, source, destination, (kind, code, rest.to_be_bytes()), body)?;
    Ok(Emitted { len: emitted.len + len, ..emitted })
}
