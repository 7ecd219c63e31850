//! The messages of neighbour discovery (RFC 4861) by which addresses are resolved.

use super::emit::{Body, EmitError, Emitted, Outer, emit_icmp};
use super::ethernet::{EthernetHeader, Mac};
use super::head::{Bytes, ParseError};
use super::ip::Ip;
use netmem_packet::Sum;
use std::net::{IpAddr, Ipv6Addr};

pub(super) const SOLICITATION: u8 = 135;
pub(super) const ADVERTISEMENT: u8 = 136;
/// Messages with another hop limit have passed a router, and are not a neighbour's.
const HOP_LIMIT: u8 = 255;
/// Bytes of a message in front of its options.
const LEN: usize = 24;
/// Options with the sender's, and the target's Ethernet address.
const SOURCE_MAC: u8 = 1;
const TARGET_MAC: u8 = 2;

/// The group that every station is in.
#[must_use]
pub const fn all_nodes() -> Ipv6Addr {
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)
}

/// The group in which the station with `addr` listens to solicitations.
#[must_use]
pub const fn solicited_node(addr: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b] = addr.segments();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | a & 0xff, b)
}

/// A question for the Ethernet address of `target`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation {
    /// The address that is asked for.
    pub target: Ipv6Addr,
    /// The Ethernet address of the asking station. `None` if it asks whether the target's address
    /// is in use, or has no such option.
    pub mac: Option<Mac>,
}

/// An answer, or an unsolicited advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advertisement {
    /// The address that it is about.
    pub target: Ipv6Addr,
    /// Its Ethernet address.
    pub mac: Option<Mac>,
    /// The sender is a router.
    pub router: bool,
    /// Whether it answers a solicitation of the station that receives it.
    pub solicited: bool,
    /// Whether it replaces a known address.
    pub overrides: bool,
}

/// Reads the target, and the address in the option `wanted`.
fn parse(bytes: Bytes<'_>, ip: &Ip, wanted: u8) -> Result<(u8, Ipv6Addr, Option<Mac>), ParseError> {
    let content = ip.content;
    let message = bytes.at::<LEN>(content.at)?;
    let target = message.last_chunk::<16>().map_or(Ipv6Addr::UNSPECIFIED, |&addr| addr.into());
    if ip.hop_limit != HOP_LIMIT || message[1] != 0 || target.is_multicast() {
        return Err(ParseError::Malformed);
    }
    let mut options = bytes.range(content.at + LEN, content.len - LEN)?;
    let mut mac = None;
    while !options.is_empty() {
        let &[kind, len, ref rest @ ..] = options else { return Err(ParseError::Malformed) };
        let len = usize::from(len) * 8;
        if len == 0 || len > options.len() {
            return Err(ParseError::Malformed);
        }
        // An option is at least 8 bytes long.
        if let (true, Some(&addr)) = (kind == wanted, rest.first_chunk())
            && mac.is_none()
        {
            mac = Some(Mac(addr)).filter(|mac| mac.is_unicast());
        }
        options = &options[len..];
    }
    Ok((message[4], target, mac))
}

/// Writes a message with one option, or none.
fn emit(
    out: &mut [u8],
    link: EthernetHeader,
    (source, destination): (Ipv6Addr, Ipv6Addr),
    (kind, flags): (u8, u8),
    target: Ipv6Addr,
    option: Option<(u8, Mac)>,
) -> Result<Emitted, EmitError> {
    let outer = Outer { hop_limit: HOP_LIMIT, ..Outer::new(Some(link)) };
    let at = outer.len(false) + 8;
    let mut rest = [0; 24];
    rest[..16].copy_from_slice(&target.octets());
    let len = match option {
        Some((option, mac)) => {
            rest[16..18].copy_from_slice(&[option, 1]);
            rest[18..].copy_from_slice(&mac.0);
            24
        }
        None => 16,
    };
    out.get_mut(at..at + len).ok_or(EmitError::NoRoom)?.copy_from_slice(&rest[..len]);
    let mut sum = Sum::default();
    sum.add(&rest[..len]);
    let body = Body { len, sum: Some(sum), segment_size: None };
    let ends = (IpAddr::V6(source), IpAddr::V6(destination));
    let emitted = emit_icmp(out, &outer, ends.0, ends.1, (kind, 0, [flags, 0, 0, 0]), body)?;
    Ok(Emitted { len: emitted.len + len, ..emitted })
}

impl Solicitation {
    pub(super) fn parse(bytes: Bytes<'_>, ip: &Ip) -> Result<Self, ParseError> {
        let (_, target, mac) = parse(bytes, ip, SOURCE_MAC)?;
        let probe = ip.source.is_unspecified();
        if probe && (mac.is_some() || ip.destination != IpAddr::V6(solicited_node(target))) {
            return Err(ParseError::Malformed);
        }
        Ok(Self { target, mac })
    }

    /// Writes the frame.
    ///
    /// # Errors
    ///
    /// [`EmitError::NoRoom`]: it has at most 86 bytes.
    pub fn emit(
        &self,
        out: &mut [u8],
        link: EthernetHeader,
        source: Ipv6Addr,
        destination: Ipv6Addr,
    ) -> Result<Emitted, EmitError> {
        let option = self.mac.map(|mac| (SOURCE_MAC, mac));
        emit(out, link, (source, destination), (SOLICITATION, 0), self.target, option)
    }
}

impl Advertisement {
    pub(super) fn parse(bytes: Bytes<'_>, ip: &Ip) -> Result<Self, ParseError> {
        let (flags, target, mac) = parse(bytes, ip, TARGET_MAC)?;
        let solicited = flags & 0x40 != 0;
        if solicited && ip.destination.is_multicast() {
            return Err(ParseError::Malformed);
        }
        Ok(Self { target, mac, router: flags & 0x80 != 0, solicited, overrides: flags & 0x20 != 0 })
    }

    /// Writes the frame.
    ///
    /// # Errors
    ///
    /// [`EmitError::NoRoom`]: it has at most 86 bytes.
    pub fn emit(
        &self,
        out: &mut [u8],
        link: EthernetHeader,
        source: Ipv6Addr,
        destination: Ipv6Addr,
    ) -> Result<Emitted, EmitError> {
        let flags = u8::from(self.router) << 7 | u8::from(self.solicited) << 6 | u8::from(self.overrides) << 5;
        let option = self.mac.map(|mac| (TARGET_MAC, mac));
        emit(out, link, (source, destination), (ADVERTISEMENT, flags), self.target, option)
    }
}
