//! Address resolution for IPv4 on Ethernet (RFC 826).

use super::ethernet::{EthernetHeader, Mac, ether_type};
use super::head::{Bytes, ParseError};
use std::net::Ipv4Addr;

/// A request or a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// Whether it is a request, which asks for the target's address. Otherwise it is a reply.
    pub request: bool,
    /// The sender's Ethernet address.
    pub mac: Mac,
    /// The sender's IP address; unspecified in a probe (RFC 5227), which asks whether the target's
    /// address is in use.
    pub sender: Ipv4Addr,
    /// The IP address that is asked for, or that the reply goes to.
    pub target: Ipv4Addr,
    /// The Ethernet address that the reply goes to; zero in a request.
    pub target_mac: Mac,
}

/// Hardware type Ethernet, protocol IPv4, and the lengths of their addresses.
const KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];

impl Arp {
    /// Bytes behind the Ethernet header.
    pub const LEN: usize = 28;

    pub(super) fn parse(bytes: Bytes<'_>) -> Result<Self, ParseError> {
        let arp = bytes.at::<{ Self::LEN }>(EthernetHeader::LEN)?;
        let mac = |at: usize| Mac([arp[at], arp[at + 1], arp[at + 2], arp[at + 3], arp[at + 4], arp[at + 5]]);
        let ip = |at: usize| Ipv4Addr::new(arp[at], arp[at + 1], arp[at + 2], arp[at + 3]);
        let request = match (&arp[..6], arp[6], arp[7]) {
            (kind, 0, 1) if kind == KIND => true,
            (kind, 0, 2) if kind == KIND => false,
            _ => return Err(ParseError::Unknown),
        };
        let this = Self { request, mac: mac(8), sender: ip(14), target_mac: mac(18), target: ip(24) };
        let sender = this.sender;
        if !this.mac.is_unicast() || sender.is_multicast() || sender.is_broadcast() || sender.is_loopback() {
            return Err(ParseError::Martian);
        }
        Ok(this)
    }

    /// Writes the frame: the Ethernet header, and this. `None` if `out` has no room for 42 bytes.
    pub fn emit(&self, destination: Mac, out: &mut [u8]) -> Option<usize> {
        let (ethernet, out) = out.split_first_chunk_mut()?;
        let out = out.first_chunk_mut::<{ Self::LEN }>()?;
        EthernetHeader { destination, source: self.mac }.write(ether_type::ARP, ethernet);
        out[..6].copy_from_slice(&KIND);
        out[6..8].copy_from_slice(&[0, if self.request { 1 } else { 2 }]);
        out[8..14].copy_from_slice(&self.mac.0);
        out[14..18].copy_from_slice(&self.sender.octets());
        out[18..24].copy_from_slice(&self.target_mac.0);
        out[24..].copy_from_slice(&self.target.octets());
        Some(EthernetHeader::LEN + Self::LEN)
    }
}
