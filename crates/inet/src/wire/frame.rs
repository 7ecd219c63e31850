//! Ethernet frames: the entry of received headers.

use super::arp::Arp;
use super::ethernet::{EthernetHeader, Mac, ether_type};
use super::head::{Bytes, ParseError};
use super::ip::{self, Ip};

/// The network header of an Ethernet frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Address resolution for IPv4.
    Arp(Arp),
    /// IPv4 or IPv6.
    Ip(Ip),
}

/// Reads the headers of an Ethernet frame of `len` bytes, whose first bytes are `head`, up to the
/// transport header. `head` has the frame's first [`MAX_HEAD`](super::MAX_HEAD) bytes, or all of
/// them, or as many as a CPU can read.
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
