//! The headers of the last segment that was parsed, by which those of the next ones are read.
//!
//! Why: nearly all segments of a connection have the same link, the same addresses and ports, and
//! the same options. They are compared with those of the one that was parsed, all at once, instead
//! of being read, validated and looked up again.
//!
//! ```text
//!   │ Ethernet │ IPv4                 │ TCP                                      │ timestamps │
//!     equal      equal but length,      equal but numbers, PSH, window, checksum   differ
//!                id and checksum
//! ```
//!
//! What differs is read and validated. Headers of any other form are for [`parse`](super::parse):
//! IPv6, options of IPv4, other flags or options of TCP.

use super::head::{ByteRange, be16, be32};
use super::ip::protocol;
use super::transport::Covered;
use crate::tcp::{Flags, Header, Options, Seq, Timestamps};
use netmem_packet::Sum;

const L3: usize = 14;
const L4: usize = L3 + 20;
/// Ethernet, IPv4, and TCP with timestamps.
const LEN: usize = L4 + 32;

/// The bits that are the same in the next segment.
const SAME: [u8; LEN] = {
    let mut same = [0xff; LEN];
    let differ = [(L3 + 2, 4), (L3 + 10, 2), (L4 + 4, 8), (L4 + FLAGS, 1), (L4 + 14, 4), (L4 + TIMES, 8)];
    let mut n = 0;
    while n < differ.len() {
        let mut at = differ[n].0;
        while at < differ[n].0 + differ[n].1 {
            same[at] = 0;
            at += 1;
        }
        n += 1;
    }
    same[L4 + FLAGS] = !Flags::PSH.0;
    same
};

/// Offsets in the TCP header.
const FLAGS: usize = 13;
const TIMES: usize = 24;

/// The headers of a segment that was read, validated and found to be of a connection.
#[derive(Clone, Debug)]
pub(crate) struct KnownHeaders {
    head: [u8; LEN],
    /// The sum of the pseudo header, without the length.
    pseudo: Sum,
}

/// A segment of a known flow, as [`Segment`](super::Segment) is one of any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownSegment {
    pub(crate) header: Header,
    pub(crate) payload: ByteRange,
    /// What its checksum covers.
    pub(crate) covered: Covered,
    /// Whether a router marked it because of congestion.
    pub(crate) ce: bool,
}

impl KnownHeaders {
    /// Headers by which the next ones can be read. `head` are the first bytes of a frame that was
    /// validated. `None` if they are of another form.
    pub(crate) fn new(head: &[u8]) -> Option<Self> {
        let head = *head.first_chunk::<LEN>()?;
        let ethernet_and_ip = head[12..=L3] == [8, 0, 0x45] && head[L3 + 9] == protocol::TCP;
        let is_fragment = be16(&head, L3 + 6) & 0x3fff != 0;
        let plain = head[L4 + 12] == 0x80 && head[L4 + FLAGS] & !Flags::PSH.0 == Flags::ACK.0;
        let options = head[L4 + 18..L4 + TIMES] == [0, 0, 1, 1, 8, 10];
        if !ethernet_and_ip || is_fragment || !plain || !options {
            return None;
        }
        let mut pseudo = Sum::default();
        pseudo.add(&head[L3 + 12..L4]);
        pseudo.add_word(protocol::TCP.into());
        Some(Self { head, pseudo })
    }

    /// Reads the headers of a frame of `len` bytes, whose first bytes are `head`. `None` if they
    /// differ in more than they may, or are malformed. The checksum of TCP is not verified.
    #[inline]
    pub(crate) fn read(&self, head: &[u8], len: usize) -> Option<KnownSegment> {
        let head = head.first_chunk::<LEN>()?;
        let bytes = self.head.iter().zip(&SAME).zip(head);
        if bytes.fold(0, |differs, ((last, same), next)| differs | ((last ^ next) & same)) != 0 {
            return None;
        }
        let total = usize::from(be16(head, L3 + 2));
        let mut sum = Sum::default();
        sum.add(&head[L3..L4]);
        if total < LEN - L3 || L3 + total > len || sum.value() != 0xffff {
            return None;
        }
        let timestamps = Timestamps { value: be32(head, L4 + TIMES), echo: be32(head, L4 + TIMES + 4) };
        let header = Header {
            seq: Seq(be32(head, L4 + 4)),
            ack: Seq(be32(head, L4 + 8)),
            flags: Flags(head[L4 + FLAGS]),
            window: be16(head, L4 + 14),
            urgent: 0,
            options: Options { timestamps: Some(timestamps), ..Options::default() },
        };
        let content = ByteRange { at: L4, len: total - (L4 - L3) };
        let mut pseudo = self.pseudo;
        pseudo.add_word(content.len as u16);
        Some(KnownSegment {
            header,
            payload: ByteRange { at: LEN, len: content.end() - LEN },
            covered: Covered { range: content, pseudo: pseudo.value(), missing: false },
            ce: head[L3 + 1] & 3 == 3,
        })
    }
}

/// Known headers, for the simulation, which compares what is read with what the parser reads.
#[cfg(feature = "compare")]
#[doc(hidden)]
#[derive(Debug)]
pub struct PredictedHeaders(KnownHeaders);

#[cfg(feature = "compare")]
impl PredictedHeaders {
    #[must_use]
    pub fn new(head: &[u8]) -> Option<Self> {
        KnownHeaders::new(head).map(Self)
    }

    /// Header, payload, what the checksum covers, and whether the segment was marked.
    #[must_use]
    pub fn read(&self, head: &[u8], len: usize) -> Option<(Header, ByteRange, Covered, bool)> {
        let KnownSegment { header, payload, covered, ce } = self.0.read(head, len)?;
        Some((header, payload, covered, ce))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Network, Transport, parse};
    use super::*;
    use etherparse::{PacketBuilder, TcpOptionElement};

    fn frame(seq: u32, psh: bool, payload: &[u8]) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        let mut tcp = etherparse::TcpHeader::new(1000, 80, seq, 500);
        (tcp.ack, tcp.acknowledgment_number, tcp.psh) = (true, 77, psh);
        let times = [TcpOptionElement::Noop, TcpOptionElement::Noop, TcpOptionElement::Timestamp(seq ^ 9, 3)];
        tcp.set_options(&times).unwrap();
        let mut bytes = Vec::new();
        builder.tcp_header(tcp).write(&mut bytes, payload).unwrap();
        bytes
    }

    /// What the parser reads of a segment: the ends, the header and the payload, whether it was
    /// marked, and whether its checksum is right.
    fn parsed(bytes: &[u8]) -> Option<([u8; 12], Header, ByteRange, bool, bool)> {
        let (_, Network::Ip(ip)) = parse(bytes, bytes.len()).ok()? else { return None };
        let Transport::Tcp(segment) = ip.transport(bytes).ok()? else { return None };
        let covered = ip.covered(&Transport::Tcp(segment))?;
        let ends = *bytes[L3 + 12..].first_chunk()?;
        Some((ends, segment.header, segment.payload, ip.is_ce(), right(covered, bytes)))
    }

    fn right(covered: Covered, bytes: &[u8]) -> bool {
        let mut sum = Sum::default();
        sum.add(&bytes[covered.range.at..covered.range.end()]);
        covered.holds(sum)
    }

    /// Of the next segment, and of all that differ from it in one bit of their headers: what is
    /// read here is what the parser reads.
    #[test]
    fn what_is_read_of_a_known_flow_is_what_the_parser_reads() {
        let known = KnownHeaders::new(&frame(5, true, b"first")).unwrap();
        for payload in [&b""[..], b"next", &[7; 300]] {
            let next = frame(10, false, payload);
            let mut read = 0;
            for bit in 0..=8 * LEN {
                let mut other = next.clone();
                if let Some(byte) = other.get_mut(bit / 8).filter(|_| bit < 8 * LEN) {
                    *byte ^= 1 << (bit % 8);
                }
                // Behind a frame, there may be padding.
                other.extend([0; 4]);
                if let Some(segment) = known.read(&other, other.len()) {
                    let KnownSegment { header, payload, covered, ce } = segment;
                    let ends = *next[L3 + 12..].first_chunk().unwrap();
                    let expected = parsed(&other).unwrap();
                    assert_eq!((ends, header, payload, ce, right(covered, &other)), expected, "bit {bit}");
                    read += 1;
                }
            }
            // The segment itself, and those with a wrong checksum: numbers, window, times, PSH.
            assert_eq!(read, 1 + 8 * (8 + 2 + 2 + 8) + 1);
        }
    }

    #[test]
    fn other_headers_are_for_the_parser() {
        let syn = {
            let mut bytes = frame(5, false, b"");
            bytes[L4 + FLAGS] |= Flags::SYN.0;
            bytes
        };
        assert!(KnownHeaders::new(&syn).is_none());
        assert!(KnownHeaders::new(&frame(5, false, b"")[..LEN - 1]).is_none());
        let known = KnownHeaders::new(&frame(5, false, b"")).unwrap();
        let next = frame(5, false, b"four");
        assert!(known.read(&next, next.len()).is_some() && known.read(&next, next.len() - 1).is_none());
        assert!(known.read(&syn, syn.len()).is_none());
    }
}
