//! The segments of a connection on their way: to the device, or to this host.
//!
//! ```text
//!   a unit │ payload ................ │ ................ │ ....... │    chunks, by reference
//!            ├─── segment size ───┼─── segment size ───┼─── rest ──┤
//!   frames   │ headers │ payload  │ headers │ payload   │ headers │ payload
//! ```
//!
//! A device with segmentation offload gets a unit as one frame. For any other, the unit is cut
//! here: all segments share one set of headers, which is patched for each of them. If the ring has
//! no room for all, it gets the first ones.
//!
//! Why not in the state machine: it has no path, writes no headers, and knows no queue. It calls
//! this [`Output`] for each unit.

use crate::stack::carrier::HeaderTicket;
use crate::stack::egress::{Egress, Tso};
use crate::stack::path::{NextHop, Path};
use crate::stack::payload::{Payload, Transmit, Unsent};
use crate::stack::shared::host::Host;
use crate::tcp::{Accepted, Chunk, Flags, Full, IpFields, Outgoing, Output};
use crate::time::Time;
use crate::wire::{Body, Emitted, EthernetHeader, Flow, HeaderTemplate, Ip, Outer, emit_tcp};
use netmem_packet::{HeaderSlots, Meta, Packet, SlotFrame, Sum, TxQueue};
use netmem_pool::{Frag, Mapped};
use std::ops::Range;

/// The most payload of a unit: an IP packet is at most 65535 bytes long.
const MAX_UNIT: usize = 65535 - 40 - 60;

/// The output of a connection.
pub(crate) struct Segments<'a, P: Payload, T> {
    pub(crate) host: &'a Host<P>,
    pub(crate) egress: &'a mut Egress<P::Mem>,
    pub(crate) tx: &'a mut T,
    pub(crate) flow: &'a Flow,
    pub(crate) path: &'a mut Path<P>,
    pub(crate) now: Time,
    /// The connection uses explicit congestion notification: each segment may have its marks.
    pub(crate) ecn: bool,
    /// Fields of the IP headers.
    pub(crate) ip: IpFields,
}

impl<P: Transmit<T>, T: TxQueue<Mem = P::Mem>> Output<P> for Segments<'_, P, T> {
    fn max_payload(&self) -> usize {
        // What is not in host memory is cut by a device only.
        let cuts = !P::Sent::MIXED || self.device_cuts() || self.path.is_loopback();
        if cuts { MAX_UNIT } else { 0 }
    }

    fn transmit(&mut self, unit: Outgoing<'_, P>) -> Result<Accepted<HeaderTicket<P::Mem>>, Full> {
        let (link_header, to_self) = match self.path.next_hop(self.host, self.now) {
            NextHop::Device(header) => (header, false),
            NextHop::Loopback => (EthernetHeader::default(), true),
            NextHop::Pending => return Err(Full),
        };
        let ecn = if unit.ect { Ip::ECT0 } else { 0 };
        let outer = Outer {
            link: Some(link_header),
            traffic_class: self.ip.dscp << 2 | ecn,
            hop_limit: self.ip.hop_limit.max(1),
        };
        // A single segment needs no template if its headers are in a slot.
        let is_frame = match unit.payload_len <= unit.segment_size {
            true => self.egress.has_slots(self.tx),
            false => self.device_cuts(),
        };
        let as_frame = to_self || unit.payload_len == 0 || is_frame;
        if !as_frame && unit.payload.iter().all(|chunk| P::in_host(chunk).is_some()) {
            return self.cut(&outer, &unit);
        }
        let ticket = self.send_whole(&outer, &unit, to_self)?;
        Ok(Accepted { ticket, len: unit.payload_len })
    }
}

impl<P: Transmit<T>, T: TxQueue<Mem = P::Mem>> Segments<'_, P, T> {
    /// Whether the device cuts units of this connection.
    fn device_cuts(&self) -> bool {
        match self.egress.tso[usize::from(self.flow.local.is_ipv6())] {
            Tso::All => true,
            Tso::WithoutEcn => !self.ecn,
            Tso::None => false,
        }
    }

    /// Cuts a unit in host memory into segments, and sends as many as the ring has room for.
    fn cut(&mut self, outer: &Outer, unit: &Outgoing<'_, P>) -> Result<Accepted<HeaderTicket<P::Mem>>, Full> {
        if let Some(completions) = self.egress.slots(self.tx) {
            let Cut { posted, len } = self.cut_by::<InSlot>(outer, unit)?;
            let ticket = match posted {
                Posted::One(frame) => HeaderTicket::slot(completions, frame),
                Posted::Unit(frames) => HeaderTicket::slots(completions, frames),
            };
            return Ok(Accepted { ticket, len });
        }
        let Cut { posted, len } = self.cut_by::<InPage>(outer, unit)?;
        let ticket = match posted {
            Posted::One(head) => head.map_or_else(HeaderTicket::none, HeaderTicket::new),
            Posted::Unit(heads) => HeaderTicket::unit(heads),
        };
        Ok(Accepted { ticket, len })
    }

    /// The same, with headers in one kind of place.
    fn cut_by<W: Way>(&mut self, outer: &Outer, unit: &Outgoing<'_, P>) -> Result<Cut<W::Sent<P::Mem>>, Full> {
        let Self { egress, tx, flow, .. } = self;
        let Outgoing { header, payload, payload_len, segment_size, .. } = *unit;
        let size = segment_size.max(1);
        let mut posted = Posted::new(payload_len.div_ceil(size) as usize);
        let (mut template, mut template_len) = (HeaderTemplate::default(), 0);
        let (mut place, mut sent) = (Place::default(), 0);
        while sent < payload_len {
            let len = size.min(payload_len - sent);
            if len != template_len {
                let made = HeaderTemplate::new(outer, flow, header, len as usize, !egress.checksums);
                // It fits: the path's MTU does.
                debug_assert!(made.is_ok(), "{made:?}");
                let Ok(made) = made else { break };
                (template, template_len) = (made, len);
            }
            let mut sum = Sum::default();
            if !egress.checksums {
                place.walk::<P>(payload, len as usize, |frag, range| sum.add_fragment(frag, range));
            }
            let meta = template.meta();
            let flags = flags_of(header.flags, sent == 0, sent + len == payload_len);
            let headers = template.segment(header.seq + sent, flags, sum);
            let Some(mut packet) = W::begin(egress, headers) else { break };
            // A unit has so few chunks that those of a segment fit.
            let next =
                place.walk::<P>(payload, len as usize, |frag, range| append(*tx, &mut packet, frag.slice(range)));
            let Some(mut packet) = packet else { break };
            packet.meta = meta;
            let Ok(frame) = W::send(egress, *tx, headers, packet) else { break };
            egress.stats.checksummed_sent += u64::from(!egress.checksums && frame.is_some());
            posted.push(frame);
            (place, sent) = (next, sent + len);
        }
        if sent == 0 { Err(Full) } else { Ok(Cut { posted, len: sent }) }
    }

    /// Sends a unit of payload in host memory as one frame, whose headers are in a slot of the
    /// queue. `None` if it was dropped.
    fn send_behind(&mut self, headers: &[u8], meta: Meta, payload: &[P::Sent]) -> Result<Option<SlotFrame>, Full> {
        let mut packet = None;
        payload.iter().filter_map(P::in_host).for_each(|frag| append(self.tx, &mut packet, frag.clone()));
        let mut packet = packet.ok_or(Full)?;
        packet.meta = meta;
        self.egress.send_behind(self.tx, headers, packet).map_err(|_| Full)
    }

    /// Sends a unit without payload, or of little payload in host memory, as one frame that is
    /// copied into a slot of the queue: one piece of memory for the device, and no reference.
    /// `frame` begins with the headers, and has room for the payload. `None` if it is too long, or
    /// if the queue never accepts it as a copy.
    fn send_copied(
        &mut self,
        frame: &mut [u8; HeaderSlots::ROOM],
        headers: Emitted,
        payload: &[P::Sent],
    ) -> Option<Result<HeaderTicket<P::Mem>, Full>> {
        let mut at = headers.len;
        for frag in payload.iter().filter_map(P::in_host) {
            frag.copy_to(0, frame.get_mut(at..at + frag.len())?).ok()?;
            at += frag.len();
        }
        let sent = match self.egress.send_copied(self.tx, &frame[..at], headers.meta)? {
            Ok(sent) => sent,
            Err(full) => return Some(Err(full)),
        };
        // A segment without payload can be sent again at any time.
        let is_awaited = at > headers.len;
        let completions = if is_awaited { self.egress.slots(self.tx) } else { None };
        Some(Ok(completions.map_or_else(HeaderTicket::none, |completions| HeaderTicket::slot(completions, Some(sent)))))
    }

    /// Sends a unit as one frame.
    fn send_whole(
        &mut self,
        outer: &Outer,
        unit: &Outgoing<'_, P>,
        to_self: bool,
    ) -> Result<HeaderTicket<P::Mem>, Full> {
        let Self { egress, tx, flow, .. } = self;
        let Outgoing { header, payload, payload_len, segment_size, .. } = *unit;
        // It fits: the path's MTU does.
        let segment_size = (payload_len > segment_size).then_some(segment_size as u16);
        let payload_len = payload_len as usize;
        let mut head = [0; HeaderSlots::ROOM];
        let in_host = payload.iter().all(|chunk| P::in_host(chunk).is_some());
        // What goes to this host is never on a wire.
        let complete = !egress.checksums && in_host && (payload_len == 0 || !to_self);
        let sum = complete.then(|| sum_of::<P>(payload));
        let body = Body { len: payload_len, sum, segment_size };
        let emitted = emit_tcp(&mut head, outer, flow, header, body);
        debug_assert!(emitted.is_ok(), "{emitted:?}");
        let Some(emitted) = emitted.ok() else { return Ok(HeaderTicket::none()) };
        if !to_self
            && in_host
            && egress.has_slots(*tx)
            && emitted.len + payload_len <= HeaderSlots::ROOM
            && let Some(sent) = self.send_copied(&mut head, emitted, payload)
        {
            self.egress.stats.checksummed_sent += u64::from(complete && sent.is_ok());
            return sent;
        }
        let Self { egress, tx, .. } = self;
        if payload_len > 0
            && !to_self
            && in_host
            && let Some(completions) = egress.slots(*tx)
        {
            let frame = self.send_behind(&head[..emitted.len], emitted.meta, payload)?;
            self.egress.stats.checksummed_sent += u64::from(complete && frame.is_some());
            return Ok(HeaderTicket::slot(completions, frame));
        }
        let mut packet = egress.header_frame(&head, emitted).ok_or(Full)?;
        // A segment has so few chunks that they fit.
        let mut rest = payload;
        while let [first, others @ ..] = rest
            && let Some(frag) = P::in_host(first)
        {
            packet.push(frag.clone()).map_err(|_| Full)?;
            rest = others;
        }
        if !rest.is_empty() {
            let ticket = ticket(&packet, payload_len);
            // A packet to this host is received in host memory.
            let sent = if to_self { Err(Unsent::Never) } else { P::transmit(tx, packet, rest) };
            match sent {
                Ok(()) => egress.stats.sent += 1,
                Err(Unsent::Later) => return Err(Full),
                Err(Unsent::Never) => egress.stats.refused += 1,
            }
            return Ok(ticket);
        }
        if to_self {
            let ticket = ticket(&packet, payload_len);
            return egress.send_to_self(packet).map(|()| ticket).map_err(|_| Full);
        }
        let done = match payload_len {
            0 => egress.transmit(*tx, packet, T::send).map(|sent| sent.map(|()| HeaderTicket::none())),
            _ => egress.transmit(*tx, packet, T::send_held).map(|head| head.map(HeaderTicket::new)),
        };
        let ticket = done.map_err(|_| Full)?;
        egress.stats.checksummed_sent += u64::from(complete && ticket.is_some());
        Ok(ticket.unwrap_or_else(HeaderTicket::none))
    }
}

/// Where the headers of segments are.
trait Way {
    /// What reports that the device has completed a segment.
    type Sent<M: Mapped>;

    /// The beginning of the segment's packet, if the headers are in it. `None` if there is no page.
    fn begin<M: Mapped>(egress: &mut Egress<M>, headers: &[u8]) -> Option<Option<Packet<M>>>;

    /// Sends the packet of a segment, as [`Egress::transmit`] does.
    fn send<M: Mapped, T: TxQueue<Mem = M>>(
        egress: &mut Egress<M>,
        tx: &mut T,
        headers: &[u8],
        packet: Packet<M>,
    ) -> Result<Option<Self::Sent<M>>, Packet<M>>;
}

/// In a page for each segment.
struct InPage;

impl Way for InPage {
    type Sent<M: Mapped> = Frag<M>;

    #[inline]
    fn begin<M: Mapped>(egress: &mut Egress<M>, headers: &[u8]) -> Option<Option<Packet<M>>> {
        egress.header_page(headers).map(Packet::new).map(Some)
    }

    #[inline]
    fn send<M: Mapped, T: TxQueue<Mem = M>>(
        egress: &mut Egress<M>,
        tx: &mut T,
        _: &[u8],
        packet: Packet<M>,
    ) -> Result<Option<Frag<M>>, Packet<M>> {
        egress.transmit(tx, packet, T::send_held)
    }
}

/// In a slot of the transmit queue.
struct InSlot;

impl Way for InSlot {
    type Sent<M: Mapped> = SlotFrame;

    #[inline]
    fn begin<M: Mapped>(_: &mut Egress<M>, _: &[u8]) -> Option<Option<Packet<M>>> {
        Some(None)
    }

    #[inline]
    fn send<M: Mapped, T: TxQueue<Mem = M>>(
        egress: &mut Egress<M>,
        tx: &mut T,
        headers: &[u8],
        packet: Packet<M>,
    ) -> Result<Option<SlotFrame>, Packet<M>> {
        egress.send_behind(tx, headers, packet)
    }
}

/// The part of a unit that was sent.
struct Cut<S> {
    posted: Posted<S>,
    /// Bytes of payload.
    len: u32,
}

/// What stands for the segments that were sent. `None`: the queue would never have accepted the
/// segment.
enum Posted<S> {
    /// Of a unit of one segment.
    One(Option<S>),
    Unit(Vec<Option<S>>),
}

impl<S> Posted<S> {
    fn new(segments: usize) -> Self {
        if segments == 1 { Self::One(None) } else { Self::Unit(Vec::with_capacity(segments)) }
    }

    #[inline]
    fn push(&mut self, segment: Option<S>) {
        match self {
            Self::One(one) => *one = segment,
            Self::Unit(unit) => unit.push(segment),
        }
    }
}

/// Adds payload to a packet for this queue, which it begins if there is none.
#[inline]
fn append<T: TxQueue>(tx: &mut T, packet: &mut Option<Packet<T::Mem>>, frag: Frag<T::Mem>) {
    match packet {
        Some(packet) => {
            tx.lend_list(packet);
            let pushed = packet.push(frag);
            debug_assert!(pushed.is_ok());
        }
        None => *packet = Some(Packet::new(frag)),
    }
}

/// The sum of payload in host memory.
#[inline]
fn sum_of<P: Payload>(payload: &[P::Sent]) -> Sum {
    let mut sum = Sum::default();
    payload.iter().filter_map(P::in_host).for_each(|frag| sum.add_fragment(frag, 0..frag.len()));
    sum
}

/// A packet without payload can be sent again at any time.
fn ticket<M: Mapped>(packet: &Packet<M>, payload: usize) -> HeaderTicket<M> {
    if payload == 0 { HeaderTicket::none() } else { HeaderTicket::new(packet.head().clone()) }
}

/// The flags of a segment of a unit: CWR is in the first one only, and FIN and PSH in the last.
fn flags_of(unit: Flags, first: bool, last: bool) -> Flags {
    let flags = if first { unit } else { unit.without(Flags::CWR) };
    if last { flags } else { flags.without(Flags::FIN.with(Flags::PSH)) }
}

/// A place in the payload of a unit.
#[derive(Clone, Copy, Default)]
struct Place {
    chunk: usize,
    offset: usize,
}

impl Place {
    /// Calls `each` with the fragments of the next `len` bytes, and which of their bytes are meant.
    /// Returns the place behind them.
    fn walk<'p, P: Payload>(
        mut self,
        payload: &'p [P::Sent],
        mut len: usize,
        mut each: impl FnMut(&'p Frag<P::Mem>, Range<usize>),
    ) -> Self {
        while len > 0
            && let Some(frag) = payload.get(self.chunk).and_then(P::in_host)
        {
            let now = len.min(frag.len() - self.offset);
            each(frag, self.offset..self.offset + now);
            len -= now;
            self.offset += now;
            if self.offset == frag.len() {
                self = Self { chunk: self.chunk + 1, offset: 0 };
            }
        }
        self
    }
}
