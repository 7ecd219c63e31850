//! Generic receive offload by reference: consecutive segments of a poll become one packet.
//!
//! ```text
//!   received   │ headers │ payload 0 │    │ headers │ payload 1 │    │ headers │ payload 2 │
//!                                                   └─────────┐                ┌──────────┘
//!   passed     │ headers'│ payload 0 │ ──────────── │ payload 1 │ ─── │ payload 2 │           meta.gso: how to cut it again
//! ```
//!
//! The first segment's page keeps the headers; of the others, the headers are cut off and the rest is appended as fragments. No
//! payload is copied or, if the device has vouched for its checksum, read. The packet that comes out can be sent by a queue with
//! segmentation offload as it is, or cut into what it was made of by [`Packet::segment`].

use crate::device::Handler;
use crate::frags::MAX_FRAGS;
use crate::headers::{Headers, Transport, tcp, udp};
use crate::meta::{Checksum, Gso, GsoKind, Meta};
use crate::packet::Packet;
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::Mapped;
use std::fmt;

/// Bytes of a frame that are looked at: Ethernet with two VLAN tags, IPv6, and TCP with all options.
const LOOK: usize = 128;
/// Flows that are held at a time. One more makes the oldest go.
const FLOWS: usize = 16;
/// The longest IP packet.
const MAX_IP: usize = u16::MAX as usize;

/// What a [`Gro`] has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroStats {
    /// Packets that were made of several segments.
    pub packets: u64,
    /// Segments in them.
    pub segments: u64,
    /// Segments that were not joined because their checksum is wrong. They were passed as they were.
    pub wrong_checksum: u64,
}

/// A handler that joins consecutive segments of TCP flows before `H` gets them as packets.
///
/// `H` runs for every frame. What it [passes](Verdict::Pass) is joined; frames with other verdicts are not touched, as the
/// Linux kernel does it with XDP in front of GRO. Segments wait for others at most until the end of the receive call in which they
/// came. Then, before the [flush](Handler::flush) of `H`, all of them are passed.
///
/// A segment is joined to those before it if all of this holds:
///
/// * Both are of one flow, and no other frame of the flow was between them. Frames of a flow are passed in the order in which
///   they came. A frame that is no TCP or UDP, or is an IP fragment, does not wait, and may overtake segments that do.
/// * All headers are equal except lengths, checksums, the IPv4 identification, the sequence number and PSH. So the window, the
///   acknowledgement, all TCP options, the congestion marks of IP and ECE are equal.
/// * The sequence number continues. The IPv4 identification does too, or the packets may not be fragmented.
/// * Flags are ACK, and ECE, PSH, CWR or none. A segment with PSH is the last one. CWR can be in the first one only, and sets
///   [`Gso::ecn`].
/// * It has payload, and no more than the first one. A segment with less is the last one.
/// * The IP packet has at most 65535 bytes then, and the [`Packet`] at most 17 fragments.
/// * The checksum of each is [`Checksum::Vouched`], or [`Checksum::Partial`], or it is computed here and right. The last reads all
///   payload, and happens only if there is something to join.
/// * No other holder is on the page with the first one's headers, which are rewritten.
///
/// The packet then has [`Meta::gso`] and a partial checksum. A consumer that ends the connection needs neither; it may take the
/// checksum as vouched for.
///
/// Cost: for each frame that is passed, the headers are copied and parsed, and compared with up to 16 flows. Allocates when it is
/// made, and the list of fragments of each joined packet.
///
/// ```
/// use netmem_packet::{Gro, Packet, Poll, RxQueue};
///
/// fn receive<Q: RxQueue>(queue: &mut Q, each: impl FnMut(Packet<Q::Mem>)) -> usize
/// where
///     Q::Mem: netmem_pool::Mapped,
/// {
///     let mut gro = Gro::new(each);
///     queue.poll(|poll| poll.receive(256, &mut gro))
/// }
/// ```
pub struct Gro<H, M: Mapped> {
    inner: H,
    /// In the order in which they came.
    held: Vec<Held<M>>,
    udp: bool,
    stats: GroStats,
}

/// One segment or several, which may be joined by more.
struct Held<M: Mapped> {
    packet: Packet<M>,
    /// The first one's headers, without what may differ.
    head: [u8; LOOK],
    at: Headers,
    first: Fields,
    /// Segments in it.
    segments: u32,
    /// What the next one's fields must be.
    sequence: u32,
    id: u16,
    /// Whether the last one had PSH.
    push: bool,
}

/// What may differ between segments that are joined, and what is known of one of them.
#[derive(Clone, Copy)]
struct Fields {
    sequence: u32,
    id: u16,
    /// TCP flags; none of UDP.
    flags: u8,
    payload: usize,
    /// Whether its checksum needs no look.
    verified: bool,
}

/// Takes out of headers what may differ between segments that are joined, and returns it. `None` if the segment is joined to none.
#[inline]
fn take_fields<M: Mapped>(head: &mut [u8; LOOK], at: &Headers, packet: &Packet<M>, udp_too: bool) -> Option<Fields> {
    let Headers { v6, transport, l3, l4, payload } = *at;
    let end = at.end(head);
    let payload = end.checked_sub(payload).filter(|&n| n > 0 && end <= packet.len())?;
    // No options of IPv4, no extensions of IPv6.
    if packet.meta.gso.is_some() || l4 - l3 != if v6 { 40 } else { 20 } {
        return None;
    }
    let place = transport.checksum();
    let verified = match packet.meta.checksum {
        Checksum::Unknown => false,
        Checksum::Vouched => true,
        Checksum::Partial { start, offset } if (start.into(), offset.into()) == (l4, place) => true,
        Checksum::Partial { .. } => return None,
    };
    let be16 = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
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
    Some(Fields { sequence, id, flags, payload, verified })
}

/// Whether the transport checksum of a packet is right. Reads all of it.
#[cold]
fn is_right<M: Mapped>(packet: &Packet<M>, at: &Headers, head: &[u8], payload: usize) -> bool {
    let len = at.payload - at.l4 + payload;
    let Ok(sum) = packet.sum(at.l4, len) else { return false };
    let mut whole = at.pseudo(head, len);
    whole.add_word(sum.value());
    whole.value() == 0xffff
}

impl<M: Mapped> Held<M> {
    /// Whether a frame is of this flow.
    #[inline]
    fn is_flow(&self, at: &Headers, head: &[u8]) -> bool {
        let ports = |at: &Headers| at.l4..at.l4 + 4;
        self.at.transport == at.transport
            && self.head[ports(&self.at)] == head[ports(at)]
            && self.at.addresses(&self.head) == at.addresses(head)
    }

    /// Whether a segment of this flow continues what is held.
    #[inline]
    fn is_continued_by(&self, head: &[u8; LOOK], at: &Headers, next: &Fields, packet: &Packet<M>) -> bool {
        let headers = at.payload;
        // May not be fragmented.
        let whole = at.v6 || self.head[at.l3 + 6] & 0x40 != 0;
        self.at == *at
            && self.head[..headers] == head[..headers]
            && next.sequence == self.sequence
            && (whole || next.id == self.id)
            && next.payload <= self.first.payload
            && next.flags & tcp::CWR == 0
            && self.packet.len() + next.payload - at.l3 <= MAX_IP
            && self.packet.frags().len() + 1 + packet.frags().len() <= MAX_FRAGS
            && packet.head().len() >= headers
            && self.packet.head().len() >= headers
            && self.packet.head().is_writable()
    }

    /// Whether the checksum of the first one is right, if nothing else was said of it.
    fn is_verified(&mut self) -> bool {
        let first = &mut self.first;
        first.verified = first.verified || is_right(&self.packet, &self.at, &self.head, first.payload);
        first.verified
    }

    /// Appends the next segment.
    fn join(&mut self, mut packet: Packet<M>, next: &Fields) {
        packet.truncate(self.at.payload + next.payload);
        let joined = packet.pull(self.at.payload).is_ok() && self.packet.append(packet).is_ok();
        debug_assert!(joined, "`is_continued_by` has looked at the lengths");
        self.segments += 1;
        if self.at.transport == Transport::Tcp {
            self.sequence = self.sequence.wrapping_add(next.payload as u32);
        }
        self.id = self.id.wrapping_add(1);
        self.push = next.flags & tcp::PSH != 0;
    }

    /// The packet, with the headers of all of it.
    fn into_packet(mut self) -> Packet<M> {
        if self.segments == 1 {
            return self.packet;
        }
        let Headers { v6, transport, l3, l4, payload } = self.at;
        let (head, len) = (&mut self.head[..payload], self.packet.len());
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
        let written = self.packet.write_at(0, head);
        debug_assert!(written.is_ok(), "`is_continued_by` has looked for other holders, and this one is exclusive");
        let kind = match (transport, v6) {
            (Transport::Tcp, false) => GsoKind::TcpV4,
            (Transport::Tcp, true) => GsoKind::TcpV6,
            (Transport::Udp, _) => GsoKind::UdpSegment,
        };
        // Offsets are below `LOOK`, and the payload of the first is that of an IP packet.
        let gso = Gso {
            kind,
            size: self.first.payload as u16,
            headers: payload as u16,
            ecn: self.first.flags & tcp::CWR != 0,
        };
        let checksum = Checksum::Partial { start: l4 as u16, offset: transport.checksum() as u16 };
        self.packet.meta = Meta { checksum, gso: Some(gso) };
        self.packet
    }
}

impl<H, M: Mapped> Gro<H, M> {
    /// Joins segments of TCP flows in front of `inner`.
    pub fn new(inner: H) -> Self {
        Self { inner, held: Vec::with_capacity(FLOWS), udp: false, stats: GroStats::default() }
    }

    /// Whether datagrams of UDP flows are joined too: consecutive ones of equal length, the last of which may be shorter. A
    /// consumer finds their boundaries by [`Gso::size`]. Not by default, because a consumer that does not know of
    /// [`GsoKind::UdpSegment`] would take them as one.
    #[must_use]
    pub fn udp(mut self, udp: bool) -> Self {
        self.udp = udp;
        self
    }

    /// What was joined so far.
    #[must_use]
    pub fn stats(&self) -> GroStats {
        self.stats
    }

    /// The handler behind it.
    pub fn inner(&mut self) -> &mut H {
        &mut self.inner
    }

    /// Passes the segments in place `index`.
    fn release(&mut self, index: usize)
    where
        H: Handler<M>,
    {
        let held = self.held.remove(index);
        if held.segments > 1 {
            self.stats.packets += 1;
            self.stats.segments += u64::from(held.segments);
        }
        self.inner.pass(held.into_packet());
    }

    /// Whether the segment may be joined to those in place `index`, by the checksums of both.
    fn verified(&mut self, index: usize, packet: &Packet<M>, head: &[u8], next: &Fields) -> bool {
        let held = &mut self.held[index];
        let right = held.is_verified() && (next.verified || is_right(packet, &held.at, head, next.payload));
        self.stats.wrong_checksum += u64::from(!right);
        right
    }
}

impl<H: Handler<M>, M: Mapped> Handler<M> for Gro<H, M> {
    const LINEAR: bool = H::LINEAR;

    #[inline]
    fn run(&mut self, frame: &mut XdpFrame<M>) -> Verdict {
        self.inner.run(frame)
    }

    fn pass(&mut self, mut packet: Packet<M>) {
        let mut head = [0; LOOK];
        let have = packet.head().len().min(LOOK);
        let parsed = packet.head().copy_to(0, &mut head[..have]).ok().and_then(|()| Headers::parse(&head[..have]));
        let Some(at) = parsed else { return self.inner.pass(packet) };
        let fields = take_fields(&mut head, &at, &packet, self.udp);
        let found = self.held.iter().position(|held| held.is_flow(&at, &head));
        if let Some(index) = found {
            if let Some(next) = &fields
                && self.held[index].is_continued_by(&head, &at, next, &packet)
                && self.verified(index, &packet, &head, next)
            {
                let held = &mut self.held[index];
                held.join(packet, next);
                if held.push || next.payload < held.first.payload {
                    self.release(index);
                }
                return;
            }
            self.release(index);
        }
        // What ends a packet is not held: nothing can be joined to it.
        match fields.filter(|first| first.flags & tcp::PSH == 0) {
            Some(first) => {
                packet.truncate(at.payload + first.payload);
                if self.held.len() == FLOWS {
                    self.release(0);
                }
                let (sequence, id) = (first.sequence.wrapping_add(first.payload as u32), first.id.wrapping_add(1));
                // The sequence numbers of UDP are all 0.
                let sequence = if at.transport == Transport::Tcp { sequence } else { 0 };
                self.held.push(Held { packet, head, at, first, segments: 1, sequence, id, push: false });
            }
            None => self.inner.pass(packet),
        }
    }

    #[inline]
    fn tx(&mut self, packet: Packet<M>) {
        self.inner.tx(packet);
    }

    #[inline]
    fn redirect(&mut self, packet: Packet<M>) {
        self.inner.redirect(packet);
    }

    fn flush(&mut self) {
        while !self.held.is_empty() {
            self.release(0);
        }
        self.inner.flush();
    }
}

impl<H, M: Mapped> fmt::Debug for Gro<H, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gro({} held, {:?})", self.held.len(), self.stats)
    }
}
