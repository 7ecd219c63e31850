//! The prediction of the next segment of a flow: nearly all segments of a large transfer differ
//! from the one before in their numbers and checksums alone.
//!
//! ```text
//!   headers   │ Ethernet │ IPv4: .. length id .. checksum .. │ TCP: .. number .. flags .. checksum .. │
//!   mask        11111111         11     00 00 11   00     11        11   00   11  11   11   00    11
//! ```
//!
//! The fields under the mask are compared with those of the first segment all at once, and the
//! others one by one. A prediction that holds implies all that [`Joinable`](super::Joinable) and
//! [`Join`](super::Join) require. If it fails, they decide.

use super::checksum::Sum;
use super::headers::{Headers, Transport, tcp};
use super::join::MAX_HEAD;

/// What the next segment of a TCP flow has in common with the first one.
pub(crate) struct Prediction {
    /// The headers of the first segment under the mask.
    head: [u8; MAX_HEAD],
    mask: [u8; MAX_HEAD],
    l3: usize,
    l4: usize,
    v6: bool,
    /// The length in the IP header.
    len: u16,
    /// The sum of the identification and the checksum of the IPv4 header, modulo 0xffff.
    sum: u16,
    /// Whether the packets may not be fragmented, so that their identification means nothing.
    whole: bool,
    /// The sum of the pseudo header.
    pseudo: Sum,
}

fn be16(head: &[u8; MAX_HEAD], at: usize) -> u16 {
    u16::from_be_bytes([head[at], head[at + 1]])
}

impl Prediction {
    /// A prediction from the headers of a segment that can be continued. `None` if it is not of
    /// TCP.
    #[inline]
    pub(crate) fn new(head: &[u8; MAX_HEAD], at: &Headers, pseudo: Sum) -> Option<Self> {
        let Headers { v6, transport, l3, l4, payload } = *at;
        if transport != Transport::Tcp {
            return None;
        }
        let mut mask = [0; MAX_HEAD];
        mask[..payload].fill(0xff);
        if v6 {
            mask[l3 + 4..l3 + 6].fill(0);
        } else {
            mask[l3 + 2..l3 + 6].fill(0);
            mask[l3 + 10..l3 + 12].fill(0);
        }
        mask[l4 + 4..l4 + 8].fill(0);
        mask[l4 + tcp::CHECKSUM..l4 + tcp::CHECKSUM + 2].fill(0);
        let mut masked = *head;
        masked.iter_mut().zip(&mask).for_each(|(byte, mask)| *byte &= mask);
        // CWR is in the first segment of a unit only.
        masked[l4 + tcp::FLAGS] &= !tcp::CWR;
        let len = be16(head, if v6 { l3 + 4 } else { l3 + 2 });
        let whole = v6 || head[l3 + 6] & 0x40 != 0;
        Some(Self { head: masked, mask, l3, l4, v6, len, sum: Self::ip_sum(head, l3), whole, pseudo })
    }

    fn ip_sum(head: &[u8; MAX_HEAD], l3: usize) -> u16 {
        ((u32::from(be16(head, l3 + 4)) + u32::from(be16(head, l3 + 10))) % 0xffff) as u16
    }

    /// Whether a frame with these first bytes is of the flow, has the length of the first segment,
    /// and continues with the number `sequence` and, where it matters, the identification `id`.
    #[inline]
    pub(crate) fn holds(&self, head: &[u8; MAX_HEAD], sequence: u32, id: u16) -> bool {
        let Self { l3, l4, v6, .. } = *self;
        let bytes = self.head.iter().zip(&self.mask).zip(head);
        let differs = bytes.fold(0, |differs, ((first, mask), next)| differs | (first ^ (next & mask)));
        let number = head[l4 + 4..l4 + 8].first_chunk().map(|number| u32::from_be_bytes(*number));
        differs == 0
            && number == Some(sequence)
            && be16(head, if v6 { l3 + 4 } else { l3 + 2 }) == self.len
            && (v6 || Self::ip_sum(head, l3) == self.sum)
            && (self.whole || be16(head, l3 + 4) == id)
    }

    /// The sum of the pseudo header of a segment for which it holds.
    #[inline]
    pub(crate) fn pseudo(&self) -> Sum {
        self.pseudo
    }
}

#[cfg(test)]
mod tests {
    use super::super::join::{Join, Joinable};
    use super::*;
    use crate::meta::Meta;
    use etherparse::PacketBuilder;

    const PAYLOAD: usize = 40;

    /// A segment with the number `seq`. Its IPv4 identification is `id`.
    fn segment(v6: bool, whole: bool, seq: u32, id: u16) -> Vec<u8> {
        let link = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let builder = if v6 {
            link.ipv6([1; 16], [2; 16], 64)
        } else {
            let mut ip =
                etherparse::Ipv4Header::new(0, 64, etherparse::IpNumber::TCP, [10, 0, 0, 1], [10, 0, 0, 2]).unwrap();
            (ip.identification, ip.dont_fragment) = (id, whole);
            link.ip(etherparse::IpHeaders::Ipv4(ip, etherparse::Ipv4Extensions::default()))
        };
        let mut bytes = Vec::new();
        builder.tcp(1000, 80, seq, 500).ack(77).write(&mut bytes, &[7; PAYLOAD]).unwrap();
        bytes
    }

    fn head(bytes: &[u8]) -> [u8; MAX_HEAD] {
        let mut head = [0; MAX_HEAD];
        let n = bytes.len().min(MAX_HEAD);
        head[..n].copy_from_slice(&bytes[..n]);
        head
    }

    fn parse(bytes: &[u8]) -> Option<Joinable> {
        Joinable::parse(&bytes[..bytes.len().min(MAX_HEAD)], bytes.len(), Meta::default(), true)
    }

    /// What is predicted is what the rules join: of the next segment, and of all that differ from
    /// it in one byte of their headers.
    #[test]
    fn a_prediction_that_holds_is_what_the_rules_say() {
        for (v6, whole) in [(true, true), (false, true), (false, false)] {
            let first = segment(v6, whole, u32::MAX - 9, 5);
            let parsed = parse(&first).unwrap();
            let join = Join::new(&parsed).unwrap();
            let prediction = Prediction::new(&head(&first), join.headers(), join.covered().pseudo).unwrap();
            let next = segment(v6, whole, (u32::MAX - 9).wrapping_add(PAYLOAD as u32), 6);
            assert!(join.is_as_predicted(&prediction, &head(&next)));
            let headers = join.headers().payload;
            let checksum = join.headers().l4 + tcp::CHECKSUM;
            let mut predicted = 0;
            for at in 0..headers {
                for bit in 0..8 {
                    let mut other = next.clone();
                    other[at] ^= 1 << bit;
                    let joined = parse(&other).is_some_and(|other| {
                        join.is_flow(&other) && join.is_continued_by(&other) && other.payload() == Some(PAYLOAD)
                    });
                    let holds = join.is_as_predicted(&prediction, &head(&other));
                    assert!(joined || !holds, "byte {at}, bit {bit}");
                    predicted += usize::from(holds);
                    assert_eq!(holds, (checksum..checksum + 2).contains(&at), "byte {at}, bit {bit}");
                }
            }
            assert_eq!(predicted, 16, "the transport checksum is verified by the payload");
        }
    }

    #[test]
    fn the_segment_behind_one_with_cwr_has_none() {
        let mut first = segment(false, true, 1, 0);
        let flags = 34 + tcp::FLAGS;
        first[flags] |= tcp::CWR;
        let join = Join::new(&parse(&first).unwrap()).unwrap();
        let prediction = Prediction::new(&head(&first), join.headers(), join.covered().pseudo).unwrap();
        let mut next = segment(false, true, 1 + PAYLOAD as u32, 0);
        assert!(join.is_as_predicted(&prediction, &head(&next)));
        next[flags] |= tcp::CWR;
        assert!(!join.is_as_predicted(&prediction, &head(&next)));
    }

    #[test]
    fn the_next_identification_is_predicted_and_another_length_is_not() {
        for id in [5_u16, 0xfffe, 0xffff] {
            let first = segment(false, false, 1, id);
            let join = Join::new(&parse(&first).unwrap()).unwrap();
            let prediction = Prediction::new(&head(&first), join.headers(), join.covered().pseudo).unwrap();
            let next = segment(false, false, 1 + PAYLOAD as u32, id.wrapping_add(1));
            assert!(join.is_as_predicted(&prediction, &head(&next)), "{id}");
            let same = segment(false, false, 1 + PAYLOAD as u32, id);
            assert!(!join.is_as_predicted(&prediction, &head(&same)), "{id}");
        }
    }
}
