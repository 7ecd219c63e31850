//! Joining of consecutive segments of a flow into one large segment: the rules by which a segment
//! continues those before it, and the headers of the joined segment. [`Gro`](crate::Gro) joins
//! packets with it, and a device joins the frames that it writes to a driver.

use super::headers::{Covered, Headers, Transport, tcp, udp};
use super::predict::Prediction;
use crate::meta::{Checksum, Gso, GsoKind, Meta};
use std::fmt;

/// Bytes of a frame that are parsed: Ethernet with two VLAN tags, IPv6, and TCP with all options.
pub(crate) const MAX_HEAD: usize = 128;
/// The longest IP packet.
const MAX_IP: usize = u16::MAX as usize;

/// The parts of a TCP or UDP frame that decide whether it continues another one.
pub struct Joinable {
    /// The headers, without the fields that may differ.
    head: [u8; MAX_HEAD],
    at: Headers,
    /// `None` if the segment cannot be joined.
    fields: Option<Fields>,
}

/// The fields that may differ between joined segments.
#[derive(Clone, Copy)]
struct Fields {
    sequence: u32,
    id: u16,
    /// TCP flags; none of UDP.
    flags: u8,
    payload: usize,
}

impl Joinable {
    /// The number of first bytes of a frame that [`parse`](Self::parse) needs, if the frame has as
    /// many.
    pub const MAX_HEAD: usize = MAX_HEAD;

    /// Parses a frame of `len` bytes, of which `head` holds the first ones. `udp` is whether
    /// datagrams of UDP can be joined. `None` if it is no TCP and no UDP, or is an IP fragment.
    /// Copies the headers; reads no payload.
    #[inline]
    #[must_use]
    pub fn parse(head: &[u8], len: usize, meta: Meta, udp: bool) -> Option<Self> {
        let have = head.len().min(MAX_HEAD);
        let at = Headers::parse(&head[..have])?;
        let mut copy = [0; MAX_HEAD];
        copy[..have].copy_from_slice(&head[..have]);
        let fields = take_fields(&mut copy, &at, len, meta, udp);
        Some(Self { head: copy, at, fields })
    }

    /// Where the headers are.
    #[inline]
    #[must_use]
    pub fn headers(&self) -> &Headers {
        &self.at
    }

    /// Bytes of payload without padding, if the segment can be joined to others.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> Option<usize> {
        self.fields.map(|fields| fields.payload)
    }

    /// What its transport checksum is computed from, if the segment can be joined to others.
    #[inline]
    pub(crate) fn covered(&self) -> Option<Covered> {
        Some(self.at.covered(&self.head, self.payload()?))
    }
}

/// Removes the fields that may differ between joined segments from the headers, and returns them.
/// `None` if the segment cannot be joined.
#[inline]
fn take_fields(head: &mut [u8; MAX_HEAD], at: &Headers, len: usize, meta: Meta, udp_too: bool) -> Option<Fields> {
    let Headers { v6, transport, l3, l4, payload } = *at;
    let end = at.end(head);
    let payload = end.checked_sub(payload).filter(|&n| n > 0 && end <= len)?;
    // No options of IPv4, no extensions of IPv6.
    if meta.gso.is_some() || l4 - l3 != if v6 { 40 } else { 20 } {
        return None;
    }
    let place = transport.checksum();
    if let Checksum::Partial { start, offset } = meta.checksum
        && (usize::from(start), usize::from(offset)) != (l4, place)
    {
        return None;
    }
    let be16 = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    // The header of the joined segment has a right checksum, so a segment with a wrong one must not
    // be joined.
    if !v6 {
        let (words, _) = head[l3..].first_chunk::<20>()?.as_chunks::<2>();
        if words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum::<u32>() % 0xffff != 0 {
            return None;
        }
    }
    let (sequence, flags) = match transport {
        Transport::Tcp => {
            let flags = head[l4 + tcp::FLAGS];
            if flags & !(tcp::ECE | tcp::CWR | tcp::PSH) != tcp::ACK {
                return None;
            }
            (u32::from(be16(l4 + 4)) << 16 | u32::from(be16(l4 + 6)), flags)
        }
        Transport::Udp => {
            let whole = usize::from(be16(l4 + udp::LENGTH)) == end - l4;
            if !udp_too || !whole || be16(l4 + place) == 0 {
                return None;
            }
            (0, 0)
        }
    };
    let id = if v6 { 0 } else { be16(l3 + 4) };
    if v6 {
        head[l3 + 4..l3 + 6].fill(0);
    } else {
        // Length and identification; checksum.
        head[l3 + 2..l3 + 6].fill(0);
        head[l3 + 10..l3 + 12].fill(0);
    }
    head[l4 + place..l4 + place + 2].fill(0);
    match transport {
        Transport::Tcp => {
            head[l4 + 4..l4 + 8].fill(0);
            head[l4 + tcp::FLAGS] &= !(tcp::PSH | tcp::CWR);
        }
        Transport::Udp => head[l4 + udp::LENGTH..l4 + udp::LENGTH + 2].fill(0),
    }
    Some(Fields { sequence, id, flags, payload })
}

impl fmt::Debug for Joinable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Joinable({:?}, {:?} bytes)", self.at, self.payload())
    }
}

/// One segment or several of a flow, which may be continued by more.
///
/// A segment continues those before it if all of this holds:
///
/// * All headers are equal except lengths, checksums, the IPv4 identification, the sequence number
///   and PSH. So the window, the acknowledgement, all TCP options, the congestion marks of IP and
///   ECE are equal. IPv4 headers have no options and a right checksum, IPv6 headers no extensions.
/// * The sequence number continues. The IPv4 identification does too, or the packets may not be
///   fragmented.
/// * Flags are ACK, and ECE, PSH, CWR or none. A segment with PSH is the last one. CWR can be in
///   the first one only, and sets [`Gso::ecn`].
/// * It has payload, and no more than the first one. A segment with less is the last one.
/// * The IP packet has at most 65535 bytes then.
///
/// The caller makes sure that no other frame of the flow arrived between them, and that the
/// checksum of each is right.
pub struct Join {
    head: [u8; MAX_HEAD],
    at: Headers,
    first: Fields,
    segments: u32,
    /// Bytes of payload.
    payload: usize,
    /// The values that the next segment's fields must have.
    sequence: u32,
    id: u16,
    /// Whether the last one had PSH.
    push: bool,
    /// Whether the last one was shorter than the first.
    short: bool,
}

impl Join {
    /// Begins with a segment. `None` if nothing can be joined to it.
    #[inline]
    #[must_use]
    pub fn new(segment: &Joinable) -> Option<Self> {
        let Joinable { head, at, fields } = segment;
        let first = fields.filter(|first| first.flags & tcp::PSH == 0)?;
        // The sequence numbers of UDP are all 0.
        let sequence =
            if at.transport == Transport::Tcp { first.sequence.wrapping_add(first.payload as u32) } else { 0 };
        Some(Self {
            head: *head,
            at: *at,
            first,
            segments: 1,
            payload: first.payload,
            sequence,
            id: first.id.wrapping_add(1),
            push: false,
            short: false,
        })
    }

    /// Whether a frame is of this flow.
    #[inline]
    #[must_use]
    pub fn is_flow(&self, frame: &Joinable) -> bool {
        let ports = |at: &Headers| at.l4..at.l4 + 4;
        self.at.transport == frame.at.transport
            && self.head[ports(&self.at)] == frame.head[ports(&frame.at)]
            && self.at.addresses(&self.head) == frame.at.addresses(&frame.head)
    }

    /// Whether a frame of this flow continues these segments.
    #[inline]
    #[must_use]
    pub fn is_continued_by(&self, frame: &Joinable) -> bool {
        let Joinable { head, at, fields: Some(next) } = frame else { return false };
        let headers = at.payload;
        // May not be fragmented.
        let whole = at.v6 || self.head[at.l3 + 6] & 0x40 != 0;
        self.at == *at
            && !self.is_complete()
            && self.head[..headers] == head[..headers]
            && next.sequence == self.sequence
            && (whole || next.id == self.id)
            && next.payload <= self.first.payload
            && next.flags & tcp::CWR == 0
            && headers + self.payload + next.payload - at.l3 <= MAX_IP
    }

    /// Adds a frame that continues these segments.
    #[inline]
    pub fn add(&mut self, frame: &Joinable) {
        let Some(next) = frame.fields else { return };
        self.segments += 1;
        self.payload += next.payload;
        if self.at.transport == Transport::Tcp {
            self.sequence = self.sequence.wrapping_add(next.payload as u32);
        }
        self.id = self.id.wrapping_add(1);
        self.push = next.flags & tcp::PSH != 0;
        self.short = next.payload < self.first.payload;
    }

    /// Whether a frame with these first bytes continues these segments, as the prediction that was
    /// made from the first one. If it does, it has as many bytes of payload as the first one.
    #[inline]
    pub(crate) fn is_as_predicted(&self, prediction: &Prediction, head: &[u8; MAX_HEAD]) -> bool {
        let headers = self.at.payload;
        !self.is_complete()
            && prediction.holds(head, self.sequence, self.id)
            && headers + self.payload + self.first.payload - self.at.l3 <= MAX_IP
    }

    /// Adds a frame that [is as predicted](Self::is_as_predicted). Returns the bytes of its
    /// payload.
    #[inline]
    pub(crate) fn add_predicted(&mut self) -> usize {
        let payload = self.first.payload;
        self.segments += 1;
        self.payload += payload;
        self.sequence = self.sequence.wrapping_add(payload as u32);
        self.id = self.id.wrapping_add(1);
        payload
    }

    /// Whether nothing can be joined to it any more.
    #[inline]
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.push || self.short
    }

    /// Segments.
    #[inline]
    #[must_use]
    pub fn segments(&self) -> u32 {
        self.segments
    }

    /// Where the headers are, in each of the segments.
    #[inline]
    #[must_use]
    pub fn headers(&self) -> &Headers {
        &self.at
    }

    /// What the transport checksum is computed from, of the only segment so far.
    #[inline]
    pub(crate) fn covered(&self) -> Covered {
        self.at.covered(&self.head, self.payload)
    }

    /// Bytes of payload in all of them.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> usize {
        self.payload
    }

    /// Bytes of payload in the first of them.
    #[inline]
    pub(crate) fn first_payload(&self) -> usize {
        self.first.payload
    }

    /// The offload information of the joined segment.
    #[must_use]
    pub fn meta(&self) -> Meta {
        let Headers { v6, transport, l4, payload, .. } = self.at;
        let kind = match (transport, v6) {
            (Transport::Tcp, false) => GsoKind::TcpV4,
            (Transport::Tcp, true) => GsoKind::TcpV6,
            (Transport::Udp, _) => GsoKind::UdpSegment,
        };
        // Offsets are below `MAX_HEAD`, and the payload of the first is that of an IP packet.
        let (size, headers) = (self.first.payload as u16, payload as u16);
        let gso = Gso { kind, size, headers, ecn: self.first.flags & tcp::CWR != 0 };
        let checksum = Checksum::Partial { start: l4 as u16, offset: transport.checksum() as u16 };
        Meta { checksum, gso: Some(gso) }
    }

    /// The headers of the joined segment, for a frame with this [`meta`](Self::meta): in the place
    /// of the transport checksum is the sum of the pseudo header.
    pub fn head(&mut self) -> &[u8] {
        let Headers { v6, transport, l3, l4, payload } = self.at;
        let (head, len) = (&mut self.head[..payload], payload + self.payload);
        if !v6 {
            head[l3 + 4..l3 + 6].copy_from_slice(&self.first.id.to_be_bytes());
        }
        self.at.write_length(head, len);
        match transport {
            Transport::Tcp => {
                head[l4 + 4..l4 + 8].copy_from_slice(&self.first.sequence.to_be_bytes());
                head[l4 + tcp::FLAGS] = self.first.flags | if self.push { tcp::PSH } else { 0 };
            }
            Transport::Udp => {
                let len = (len - l4) as u16;
                head[l4 + udp::LENGTH..l4 + udp::LENGTH + 2].copy_from_slice(&len.to_be_bytes());
            }
        }
        let (place, pseudo) = (l4 + transport.checksum(), self.at.pseudo(head, len - l4).value());
        head[place..place + 2].copy_from_slice(&pseudo.to_be_bytes());
        head
    }
}

impl fmt::Debug for Join {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Join({} segments, {} bytes)", self.segments, self.payload)
    }
}
