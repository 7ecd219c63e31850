//! Generic receive offload by reference: consecutive segments of a poll become one packet.
//!
//! A stack's cost is per packet, and a large transfer arrives as consecutive segments of one flow.
//! Joined, they cost the stack one lookup, one header check and one acknowledgement.
//!
//! ```text
//!   received   │ headers │ payload 0 │    │ headers │ payload 1 │    │ headers │ payload 2 │
//!                                                   └─────────┐                ┌──────────┘
//!   passed     │ headers'│ payload 0 │ ──────────── │ payload 1 │ ─── │ payload 2 │
//!              meta.gso: how to cut it again
//! ```
//!
//! The first segment's page keeps the headers; of the others, the headers are cut off and the rest
//! is appended as fragments. Payload is not copied. It is not read either, if the device has
//! verified its checksum. The joined packet can be sent as it is by a queue with segmentation
//! offload, or cut into its segments again by [`Packet::segment`].

use super::checksum::Sum;
use super::headers::{Covered, Transport, tcp};
use super::join::{Join, Joinable, MAX_HEAD};
use super::predict::Prediction;
use crate::device::Handler;
use crate::frags::MAX_FRAGS;
use crate::meta::{Checksum, Meta};
use crate::packet::Packet;
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::Mapped;
use std::fmt;

/// The most flows that are held at a time. For a further one, the oldest is passed on.
const FLOWS: usize = 16;

/// The counters of a [`Gro`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroStats {
    /// Packets that were joined from several segments.
    pub packets: u64,
    /// Segments in them.
    pub segments: u64,
    /// Segments that were not joined because their checksum is wrong. They were passed as they
    /// were.
    pub wrong_checksum: u64,
}

/// A handler that joins consecutive segments of TCP flows and passes the joined packets to `H`.
///
/// `H` runs for every frame. What it [passes](Verdict::Pass) is joined; frames with other verdicts
/// are not touched, as the Linux kernel does it with XDP in front of GRO. Segments wait for others
/// at most until the end of the receive call in which they arrived. Then all of them are passed,
/// before the [flush](Handler::flush) of `H`.
///
/// A segment is joined to those before it if all of this holds:
///
/// * Both are of one flow, and no other frame of the flow was between them. Frames of a flow are
///   passed in the order of their arrival. A frame that is no TCP or UDP, or is an IP fragment,
///   does not wait, and may overtake segments that do.
/// * It continues them: see [`Join`].
/// * The [`Packet`] has at most 17 fragments then.
/// * The checksum of each is [`Checksum::Verified`] or [`Checksum::Partial`], or it is verified
///   here and right. To verify it, all payload is read; this happens only if there is a segment to
///   join.
/// * The page with the first one's headers has no other holder, because these headers are
///   rewritten.
///
/// The packet then has [`Meta::gso`](Meta) and a partial checksum. A receiver that is the end of
/// the connection needs neither, and may treat the checksum as verified.
///
/// Cost: for each frame that is passed, the headers are copied, and compared with what the segment
/// before predicts. If they differ, they are parsed, and compared with up to 16 flows. Allocates
/// when it is made, and the list of fragments of each joined packet.
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
    /// In the order of arrival.
    held: Vec<Held<M>>,
    /// The place of the segments to which one was joined last.
    last: usize,
    udp: bool,
    stats: GroStats,
}

/// One segment or several, which may be joined by more.
struct Held<M: Mapped> {
    packet: Packet<M>,
    join: Join,
    prediction: Option<Prediction>,
    /// Whether the checksum of the first one need not be verified.
    verified: bool,
}

/// Whether the checksum of a frame need not be verified.
#[inline]
fn is_verified(meta: Meta) -> bool {
    meta.checksum != Checksum::Unknown
}

/// Where the flags are in a frame of TCP over IPv4 without options.
const FLAGS: usize = 14 + 20 + tcp::FLAGS;

/// The bytes up to and including [`FLAGS`]. They are zeros if the packet's head has fewer.
#[inline]
fn first_bytes<M: Mapped>(packet: &Packet<M>) -> [u8; FLAGS + 1] {
    let mut head = [0; _];
    // Without an effect if the head has fewer.
    let _ = packet.head().copy_to(0, &mut head);
    head
}

/// Whether a frame with these first bytes is a segment behind which no other can be joined: of TCP
/// over IPv4 without options, with PSH. Requests and their answers are such segments. False proves
/// nothing.
#[inline]
fn ends_a_packet(head: &[u8; FLAGS + 1]) -> bool {
    const L3: usize = 14;
    head[FLAGS] & tcp::PSH != 0
        && head[12..=L3] == [8, 0, 0x45]
        && head[L3 + 9] == Transport::Tcp.number()
        // No fragment.
        && (head[L3 + 6] & 0x3f, head[L3 + 7]) == (0, 0)
}

/// Whether a frame with these first bytes is a datagram of UDP over IPv4 without options, or an IP
/// fragment of one. False proves nothing.
#[inline]
fn is_datagram(head: &[u8]) -> bool {
    const L3: usize = 14;
    head.get(L3 + 9) == Some(&Transport::Udp.number()) && head[12..=L3] == [8, 0, 0x45]
}

/// Whether the transport checksum of a packet is right. Reads all that the checksum is computed
/// from.
#[cold]
fn is_right<M: Mapped>(packet: &Packet<M>, covered: Covered) -> bool {
    let Covered { at, len, pseudo: mut whole } = covered;
    let Ok(sum) = packet.sum(at, len) else { return false };
    whole.add_word(sum.value());
    whole.value() == 0xffff
}

impl<M: Mapped> Held<M> {
    /// Whether a packet of this flow continues the held segments.
    #[inline]
    fn is_continued_by(&self, next: &Joinable, packet: &Packet<M>) -> bool {
        let headers = next.headers().payload;
        self.join.is_continued_by(next)
            && self.packet.frags().len() + 1 + packet.frags().len() <= MAX_FRAGS
            && packet.head().len() >= headers
            && self.packet.head().len() >= headers
            && self.packet.head().is_writable()
    }

    /// Whether a packet with these first bytes continues the held segments as predicted. It is in
    /// one piece, and nothing is known of its checksum but that the headers are not to be
    /// completed.
    #[inline]
    fn is_predicted(&self, head: &[u8; MAX_HEAD], packet: &Packet<M>) -> bool {
        let Some(prediction) = &self.prediction else { return false };
        self.join.is_as_predicted(prediction, head)
            && packet.frags().is_empty()
            && packet.len() >= self.join.headers().payload + self.join.first_payload()
            && !matches!(packet.meta, Meta { gso: Some(_), .. } | Meta { checksum: Checksum::Partial { .. }, .. })
            && self.packet.frags().len() < MAX_FRAGS
            && self.packet.head().is_writable()
    }

    /// Whether the checksum of a packet that is as predicted is right.
    #[inline]
    fn has_right_checksum(&self, packet: &Packet<M>) -> bool {
        if is_verified(packet.meta) {
            return true;
        }
        let (Some(prediction), headers) = (&self.prediction, self.join.headers()) else { return false };
        let (mut sum, mut whole) = (Sum::default(), prediction.pseudo());
        sum.add_fragment(packet.head(), headers.l4..headers.payload + self.join.first_payload());
        whole.add_word(sum.value());
        whole.value() == 0xffff
    }

    /// Appends a packet that is as predicted.
    #[inline]
    fn join_predicted(&mut self, packet: Packet<M>) {
        let (headers, payload) = (self.join.headers().payload, self.join.add_predicted());
        let Ok(mut frag) = packet.into_head() else { return };
        frag.truncate(headers + payload);
        frag.advance(headers);
        let pushed = self.packet.push(frag);
        debug_assert!(pushed.is_ok(), "`is_predicted` has looked at the fragments");
    }

    /// Whether the checksum of the first one is right. It is verified if it is not known yet.
    fn is_verified(&mut self) -> bool {
        self.verified = self.verified || is_right(&self.packet, self.join.covered());
        self.verified
    }

    /// Appends the next segment.
    fn join(&mut self, mut packet: Packet<M>, next: &Joinable) {
        let headers = next.headers().payload;
        packet.truncate(headers + next.payload().unwrap_or(0));
        let joined = packet.pull(headers).is_ok() && self.packet.append(packet).is_ok();
        debug_assert!(joined, "`is_continued_by` has looked at the lengths");
        self.join.add(next);
    }

    /// The joined packet, with headers for all of it.
    fn into_packet(mut self) -> Packet<M> {
        if self.join.segments() > 1 {
            let written = self.packet.write_at(0, self.join.head());
            debug_assert!(written.is_ok(), "`is_continued_by` has looked for other holders, and this one is exclusive");
            self.packet.meta = self.join.meta();
        }
        self.packet
    }
}

impl<H, M: Mapped> Gro<H, M> {
    /// Joins segments of TCP flows in front of `inner`.
    pub fn new(inner: H) -> Self {
        Self { inner, held: Vec::with_capacity(FLOWS), last: 0, udp: false, stats: GroStats::default() }
    }

    /// Whether datagrams of UDP flows are joined too: consecutive ones of equal length, the last of
    /// which may be shorter. A consumer finds their boundaries by [`Gso::size`](crate::Gso::size).
    /// Off by default, because a receiver that does not know
    /// [`GsoKind::UdpSegment`](crate::GsoKind::UdpSegment) would treat them as one datagram.
    #[must_use]
    pub fn udp(mut self, udp: bool) -> Self {
        self.udp = udp;
        self
    }

    /// The counters so far.
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
        if held.join.segments() > 1 {
            self.stats.packets += 1;
            self.stats.segments += u64::from(held.join.segments());
        }
        self.inner.pass(held.into_packet());
    }

    /// Whether the segment may be joined to those in place `index`, by the checksums of both.
    fn verified(&mut self, index: usize, packet: &Packet<M>, next: &Joinable) -> bool {
        let held = &mut self.held[index];
        let of_next = || is_verified(packet.meta) || next.covered().is_some_and(|covered| is_right(packet, covered));
        let right = held.is_verified() && of_next();
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

    #[inline]
    fn pass(&mut self, packet: Packet<M>) {
        // Nothing is held that this segment could be joined to, and it would not be held either.
        if self.held.is_empty() && ends_a_packet(&first_bytes(&packet)) {
            return self.inner.pass(packet);
        }
        let mut head = [0; MAX_HEAD];
        let have = packet.head().len().min(MAX_HEAD);
        let copied = packet.head().copy_to(0, &mut head[..have]);
        debug_assert!(copied.is_ok());
        if let Some(held) = self.held.get_mut(self.last)
            && held.is_predicted(&head, &packet)
            && held.is_verified()
            && held.has_right_checksum(&packet)
        {
            return held.join_predicted(packet);
        }
        self.pass_unpredicted(&head, have, packet);
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

impl<H: Handler<M>, M: Mapped> Gro<H, M> {
    /// Passes a packet that is not as predicted. `head` are its first bytes.
    fn pass_unpredicted(&mut self, head: &[u8; MAX_HEAD], have: usize, mut packet: Packet<M>) {
        // Nothing waits of its flow, and it would not wait either.
        if !self.udp && is_datagram(&head[..have]) {
            return self.inner.pass(packet);
        }
        let parsed = Joinable::parse(&head[..have], packet.len(), packet.meta, self.udp);
        let Some(next) = parsed else { return self.inner.pass(packet) };
        let found = self.held.iter().position(|held| held.join.is_flow(&next));
        if let Some(index) = found {
            if self.held[index].is_continued_by(&next, &packet) && self.verified(index, &packet, &next) {
                let held = &mut self.held[index];
                held.join(packet, &next);
                self.last = index;
                if held.join.is_complete() {
                    self.release(index);
                }
                return;
            }
            self.release(index);
        }
        // A segment that ends a packet is not held, because no other can be joined to it.
        match Join::new(&next) {
            Some(join) => {
                packet.truncate(next.headers().payload + join.payload());
                if self.held.len() == FLOWS {
                    self.release(0);
                }
                let verified = is_verified(packet.meta);
                let prediction = Prediction::new(head, join.headers(), join.covered().pseudo);
                self.last = self.held.len();
                self.held.push(Held { packet, join, prediction, verified });
            }
            None => self.inner.pass(packet),
        }
    }
}

impl<H, M: Mapped> fmt::Debug for Gro<H, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gro({} held, {:?})", self.held.len(), self.stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;

    /// Nothing can be joined to the segments that are passed at once: those with PSH, and all that
    /// differ from them in one bit of their headers.
    #[test]
    fn what_is_passed_at_once_would_not_wait() {
        let mut bytes = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        builder.tcp(1000, 80, 5, 500).ack(77).psh().write(&mut bytes, &[7; 40]).unwrap();
        let joins = |bytes: &[u8]| {
            Joinable::parse(bytes, bytes.len(), Meta::default(), true).is_some_and(|next| Join::new(&next).is_some())
        };
        let ends = |bytes: &[u8]| ends_a_packet(bytes.first_chunk().unwrap());
        let mut passed = 0;
        for bit in 0..8 * 54 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            passed += usize::from(ends(&other));
            assert!(!ends(&other) || !joins(&other), "bit {bit}");
        }
        assert!(passed > 200 && ends(&bytes));
        bytes[FLAGS] &= !tcp::PSH;
        assert!(joins(&bytes) && !ends(&bytes));
    }

    /// If datagrams are not joined, those that are passed at once would not wait: all that differ
    /// from one in one bit of their headers.
    #[test]
    fn datagrams_that_are_passed_at_once_would_not_wait() {
        let mut bytes = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        builder.udp(1000, 80).write(&mut bytes, &[7; 40]).unwrap();
        let joins = |bytes: &[u8], udp| {
            Joinable::parse(bytes, bytes.len(), Meta::default(), udp).is_some_and(|next| Join::new(&next).is_some())
        };
        let mut passed = 0;
        for bit in 0..8 * 42 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            passed += usize::from(is_datagram(&other));
            assert!(!is_datagram(&other) || !joins(&other, false), "bit {bit}");
        }
        assert!(passed > 200 && is_datagram(&bytes) && joins(&bytes, true));
        assert!((0..=23).all(|len| !is_datagram(&bytes[..len])));
    }
}
