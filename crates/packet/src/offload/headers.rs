//! The parser of the headers of TCP and UDP frames, for the code that cuts frames and the code that
//! joins them.
//!
//! ```text
//!   ├─ Ethernet, up to 2 VLAN tags ─┤─ IPv4, IPv6 and its extensions ─┤─ TCP, UDP ─┤─ payload ─┤
//!   0                              l3                                l4         payload
//! ```
//!
//! The parser runs for every frame that is joined, so it is written by hand: fixed offsets, no
//! allocation, on a private copy of the first [`MAX_HEADERS`] bytes.

use super::checksum::Sum;

/// The longest headers that are parsed. Ethernet with two VLAN tags, IPv6 and TCP with all options
/// are 122 bytes; the rest is for extensions of IPv6.
pub(crate) const MAX_HEADERS: usize = 192;

/// Offset of the TCP flags in the TCP header, and the flags.
pub(crate) mod tcp {
    pub(crate) const FLAGS: usize = 13;
    pub(crate) const CHECKSUM: usize = 16;
    pub(crate) const FIN: u8 = 0x01;
    pub(crate) const PSH: u8 = 0x08;
    pub(crate) const ACK: u8 = 0x10;
    pub(crate) const ECE: u8 = 0x40;
    pub(crate) const CWR: u8 = 0x80;
}

/// Offsets in the UDP header.
pub(crate) mod udp {
    pub(crate) const LENGTH: usize = 4;
    pub(crate) const CHECKSUM: usize = 6;
    pub(crate) const LEN: usize = 8;
}

/// The transport protocol of a frame with [`Headers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// Its number in an IP header.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// Where the checksum is in the header.
    pub(crate) fn checksum(self) -> usize {
        match self {
            Self::Tcp => tcp::CHECKSUM,
            Self::Udp => udp::CHECKSUM,
        }
    }
}

/// What a transport checksum is computed from: `len` bytes from byte `at` of the frame on, and the
/// pseudo header.
pub(crate) struct Covered {
    pub(crate) at: usize,
    pub(crate) len: usize,
    /// The sum of the pseudo header.
    pub(crate) pseudo: Sum,
}

/// Where the headers of a TCP or UDP frame are, in bytes from its first. All offsets are at most
/// the length of the bytes that were parsed.
///
/// ```
/// use netmem_packet::{Headers, Transport};
/// # let mut frame = vec![0u8; 54 + 1000];
/// # frame[12..15].copy_from_slice(&[8, 0, 0x45]);
/// # (frame[23], frame[46]) = (6, 0x50);
///
/// // A TCP frame over IPv4 without options.
/// let headers = Headers::parse(&frame).ok_or("no headers")?;
/// assert_eq!((headers.transport, headers.payload), (Transport::Tcp, 54));
/// # Ok::<(), &str>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// Whether the frame is IPv6.
    pub v6: bool,
    /// The transport protocol.
    pub transport: Transport,
    /// Where the IP header begins: behind Ethernet and up to two VLAN tags.
    pub l3: usize,
    /// Where the transport header begins: behind the options of IPv4, or the options' headers of
    /// IPv6.
    pub l4: usize,
    /// Where the payload begins.
    pub payload: usize,
}

impl Headers {
    /// Parses the first bytes of a frame, which hold at least its headers. `None` if it is no TCP
    /// and no UDP, is an IP fragment, or has headers that end beyond `head` or contradict
    /// themselves. It is not checked whether lengths in the IP header fit the frame.
    #[inline]
    #[must_use]
    pub fn parse(head: &[u8]) -> Option<Self> {
        let be = |at: usize| Some(u16::from_be_bytes([*head.get(at)?, *head.get(at + 1)?]));
        let mut l3 = 14;
        let mut ether_type = be(12)?;
        while [0x8100, 0x88a8].contains(&ether_type) && l3 < 22 {
            ether_type = be(l3 + 2)?;
            l3 += 4;
        }
        let (v6, number, l4) = match ether_type {
            0x0800 => {
                let first = *head.get(l3)?;
                let len = usize::from(first & 15) * 4;
                // More fragments, or an offset.
                let fragment = be(l3 + 6)? & 0x3fff != 0;
                if first >> 4 != 4 || len < 20 || fragment {
                    return None;
                }
                (false, *head.get(l3 + 9)?, l3 + len)
            }
            0x86dd => {
                if *head.get(l3)? >> 4 != 6 {
                    return None;
                }
                let (mut next, mut at) = (*head.get(l3 + 6)?, l3 + 40);
                // Hop-by-hop and destination options. Fragments are not whole, and behind a routing
                // header the sum of the pseudo header is not of the destination that the IP header
                // has.
                while [0, 60].contains(&next) {
                    next = *head.get(at)?;
                    at += 8 * (usize::from(*head.get(at + 1)?) + 1);
                }
                (true, next, at)
            }
            _ => return None,
        };
        let (transport, len) = match number {
            6 => (Transport::Tcp, usize::from(*head.get(l4 + 12)? >> 4) * 4),
            17 => (Transport::Udp, udp::LEN),
            _ => return None,
        };
        let payload = l4 + len;
        let whole = len >= if transport == Transport::Tcp { 20 } else { udp::LEN } && payload <= head.len();
        whole.then_some(Self { v6, transport, l3, l4, payload })
    }

    /// Where the IP packet ends, by the length in its header. Bytes behind that are padding. `head`
    /// is what was parsed.
    ///
    /// # Panics
    ///
    /// If `head` is shorter than what was parsed.
    #[inline]
    #[must_use]
    pub fn end(&self, head: &[u8]) -> usize {
        let at = if self.v6 { 4 } else { 2 };
        let len = usize::from(u16::from_be_bytes([head[self.l3 + at], head[self.l3 + at + 1]]));
        self.l3 + len + if self.v6 { 40 } else { 0 }
    }

    /// The two IP addresses, the source's first: 8 bytes, or 32. `head` is what was parsed.
    ///
    /// # Panics
    ///
    /// If `head` is shorter than what was parsed.
    #[inline]
    #[must_use]
    pub fn addresses<'h>(&self, head: &'h [u8]) -> &'h [u8] {
        if self.v6 { &head[self.l3 + 8..self.l3 + 40] } else { &head[self.l3 + 12..self.l3 + 20] }
    }

    /// Writes the IP header's length for a frame of `len` bytes and, for IPv4, the header's
    /// checksum. `len` is at most what the length field can hold.
    pub(crate) fn write_length(&self, head: &mut [u8], len: usize) {
        let l3 = self.l3;
        if self.v6 {
            head[l3 + 4..l3 + 6].copy_from_slice(&((len - l3 - 40) as u16).to_be_bytes());
        } else {
            head[l3 + 2..l3 + 4].copy_from_slice(&((len - l3) as u16).to_be_bytes());
            self.write_ip_checksum(head);
        }
    }

    /// Computes the checksum of the IPv4 header.
    pub(crate) fn write_ip_checksum(&self, head: &mut [u8]) {
        let (l3, header) = (self.l3, self.l3..self.l3 + usize::from(head[self.l3] & 15) * 4);
        head[l3 + 10..l3 + 12].fill(0);
        let mut sum = Sum::default();
        sum.add(&head[header]);
        head[l3 + 10..l3 + 12].copy_from_slice(&(!sum.value()).to_be_bytes());
    }

    /// The source's port and the destination's. `head` is what was parsed.
    ///
    /// # Panics
    ///
    /// If `head` is shorter than what was parsed.
    #[inline]
    #[must_use]
    pub fn ports(&self, head: &[u8]) -> (u16, u16) {
        let be = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        (be(self.l4), be(self.l4 + 2))
    }

    /// Whether the transport checksum of the frame is there and right. False also for a datagram
    /// without a checksum, and for one whose length is not that of its IP packet. Reads all of the
    /// frame's payload, once.
    #[must_use]
    pub fn has_right_checksum(&self, frame: &[u8]) -> bool {
        let end = self.end(frame);
        let Some(segment) = frame.get(self.l4..end).filter(|segment| segment.len() >= self.payload - self.l4) else {
            return false;
        };
        let be = |at: usize| u16::from_be_bytes([segment[at], segment[at + 1]]);
        if self.transport == Transport::Udp && (usize::from(be(udp::LENGTH)) != segment.len() || be(udp::CHECKSUM) == 0)
        {
            return false;
        }
        let mut sum = self.pseudo(frame, segment.len());
        sum.add(segment);
        sum.value() == 0xffff
    }

    /// What the transport checksum of a segment with `payload` bytes is computed from. `head` is
    /// what was parsed, or at least has its addresses.
    #[inline]
    pub(crate) fn covered(&self, head: &[u8], payload: usize) -> Covered {
        let len = self.payload - self.l4 + payload;
        Covered { at: self.l4, len, pseudo: self.pseudo(head, len) }
    }

    /// The sum of the pseudo header of a transport segment of `len` bytes, its header included.
    #[inline]
    pub(crate) fn pseudo(&self, head: &[u8], len: usize) -> Sum {
        let mut sum = Sum::default();
        sum.add(self.addresses(head));
        sum.add_word(u16::from(self.transport.number()));
        // A length beyond 16 bits (jumbograms) does not occur: frames are shorter.
        sum.add_word(len as u16);
        sum
    }
}
