//! The transport header behind an IP header, and what its checksum covers.

use super::head::{ByteRange, Bytes, ParseError};
use super::icmp::Icmp;
use super::ip::{Ip, protocol, pseudo_sum};
use super::tcp::Segment;
use super::udp::Datagram;
use netmem_packet::Sum;

/// The transport header of an IP packet that is not a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A TCP segment.
    Tcp(Segment),
    /// A UDP datagram.
    Udp(Datagram),
    /// ICMP of the family of the packet's addresses.
    Icmp(Icmp),
    /// An unknown protocol. The answer is
    /// [`IcmpKind::ProtocolUnreachable`](super::IcmpKind::ProtocolUnreachable).
    Unknown,
}

/// The data that a transport checksum covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Covered {
    /// The bytes to add up.
    pub range: ByteRange,
    /// The sum of the pseudo header.
    pub(super) pseudo: u16,
    /// Whether a checksum that must be there is missing.
    pub(super) missing: bool,
}

impl Covered {
    /// Whether the checksum is right, given the sum of [`range`](Self::range).
    #[inline]
    #[must_use]
    pub fn holds(&self, mut sum: Sum) -> bool {
        sum.add_word(self.pseudo);
        sum.value() == 0xffff && !self.missing
    }
}

impl Ip {
    /// Reads the transport header. `head` are the bytes from which the IP header was read; for a
    /// reassembled datagram, they are the first bytes of its [`content`](Self::content), which then
    /// begins at 0.
    ///
    /// # Errors
    ///
    /// [`ParseError`]. A fragment has no transport header: [`ParseError::Unknown`].
    #[inline]
    pub fn transport(&self, head: &[u8]) -> Result<Transport, ParseError> {
        if self.fragment.is_some() {
            return Err(ParseError::Unknown);
        }
        let bytes = Bytes::new(head, self.content.end());
        let v6 = self.source.is_ipv6();
        // With this source address, only a neighbour that has no address yet may ask.
        if self.source.is_unspecified() && self.protocol != protocol::ICMPV6 {
            return Err(ParseError::Martian);
        }
        match self.protocol {
            protocol::TCP => Segment::parse(bytes, self.content).map(Transport::Tcp),
            protocol::UDP => Datagram::parse(bytes, self.content).map(Transport::Udp),
            protocol::ICMP if !v6 => Icmp::parse_v4(bytes, self).map(Transport::Icmp),
            protocol::ICMPV6 if v6 => Icmp::parse_v6(bytes, self).map(Transport::Icmp),
            _ => Ok(Transport::Unknown),
        }
    }

    /// The data that the transport checksum covers. `None` if there is no checksum.
    ///
    /// Devices verify checksums of TCP and UDP. That of ICMP is always verified by the CPU, except
    /// if the frame's checksum was not computed yet.
    #[inline]
    #[must_use]
    pub fn covered(&self, transport: &Transport) -> Option<Covered> {
        let (mut part, mut missing) = (self.content, false);
        let pseudo = match transport {
            Transport::Tcp(_) => true,
            Transport::Udp(datagram) => {
                part.len = datagram.payload.end() - part.at;
                missing = !datagram.checksum;
                if missing && self.source.is_ipv4() {
                    return None;
                }
                true
            }
            Transport::Icmp(_) => self.source.is_ipv6(),
            Transport::Unknown => return None,
        };
        let pseudo =
            if pseudo { pseudo_sum(self.source, self.destination, self.protocol, part.len).value() } else { 0 };
        Some(Covered { range: part, pseudo, missing })
    }
}
