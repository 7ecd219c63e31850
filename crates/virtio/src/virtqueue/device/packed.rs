//! The device's half of a packed ring.
//!
//! A used descriptor is written where its chain began, so the device never overwrites a chain that
//! it has not completed. A batch of used descriptors becomes visible as a whole: the flags of the
//! first one are written last, and a driver reads descriptors in their order.

use super::super::Armed;
use super::super::event::{full_fence, passed_packed};
use super::super::fault::DriverFault;
use super::super::{DESC_NEXT, DESC_WRITE, Desc, Event, PackedDesc, PackedRing, Position};
use super::chain::ChainDescriptor;
use super::format::{DeviceFormat, Logged, Start};
use super::group::{Group, SingleBuffer};
use super::inflight::PackedInflight;
use crate::guest_memory::view::View;

/// A packed ring, and where its parts lie in the guest's addresses.
#[derive(Debug)]
pub(crate) struct MappedRing {
    pub(crate) ring: PackedRing,
    /// Of the descriptor ring, for the dirty log.
    pub(crate) descriptors: u64,
    /// Of the device's event structure, for the dirty log.
    pub(crate) event: u64,
}

/// Positions count descriptors.
#[derive(Debug)]
pub(crate) struct PackedDevice {
    ring: PackedRing,
    descriptors: u64,
    event: u64,
    size: u16,
    event_idx: bool,
    /// The next chain to pop.
    next: Position,
    /// Whether it was available at the last `refresh`.
    seen: bool,
    /// The position of the next used descriptor.
    used: Position,
    /// The used position that the driver sees.
    published: Position,
    /// The first used descriptor behind `published`, which is written last.
    held: Option<PackedDesc>,
    /// The last chain of a batch, and the descriptors of the batch.
    batch: (u16, u16),
    /// Descriptors published since the driver's event structure was last read.
    fresh: u32,
    /// The position at which no chain was available for the current frame.
    out_of_buffers_at: Option<Position>,
    inflight: Option<PackedInflight>,
}

impl PackedDevice {
    /// The descriptor at `at`, if the driver has made it available.
    #[inline(always)]
    fn desc(&self, at: Position) -> Option<PackedDesc> {
        let d = self.ring.desc(at.offset());
        d.is_available(at).then_some(d)
    }

    /// Whether the driver has made the descriptor at `at` available.
    #[inline(always)]
    fn is_available(&self, at: Position) -> bool {
        self.ring.used_desc(at.offset()).is_available(at)
    }

    /// Writes a used descriptor, or keeps it if it is the first that the driver does not see.
    #[inline(always)]
    fn put(&mut self, id: u16, span: u16, len: u32) {
        let written = if len > 0 { DESC_WRITE } else { 0 };
        let d = PackedDesc { addr: 0, len, id, flags: self.used.used() | written };
        if self.used == self.published {
            self.held = Some(d);
        } else if let Some(inflight) = &mut self.inflight {
            inflight.hold(self.used, d);
        } else {
            self.ring.set_used_desc(self.used.offset(), d);
        }
        self.used = self.used.step(span, self.size);
    }

    /// The first place from `next` on where no descriptor is available. `None` if all are
    /// available.
    fn end(&self) -> Option<Position> {
        let mut at = self.next;
        for _ in 0..self.size {
            if !self.is_available(at) {
                return Some(at);
            }
            at = at.step(1, self.size);
        }
        None
    }

    /// Writes one used descriptor for a batch: it is at the place of the first one, and names the
    /// last chain. The driver skips the others.
    #[inline(always)]
    fn end_batch(&mut self) {
        if let (id, span @ 1..) = self.batch {
            self.batch = (0, 0);
            self.put(id, span, 0);
        }
    }
}

impl DeviceFormat for PackedDevice {
    type Ring = MappedRing;
    type At = Position;

    fn new(mapped: MappedRing, start: Start) -> Self {
        let MappedRing { ring, descriptors, event } = mapped;
        let (size, [mut next, mut used]) = (ring.size(), positions(start.base, &ring));
        let inflight = start.inflight.map(|part| {
            let inflight = PackedInflight::new(part, &ring, [next, used], |from, count| {
                note(start.logged.as_ref(), descriptors, size, from, count);
            });
            (next, used) = inflight.start();
            inflight
        });
        Self {
            ring,
            descriptors,
            event,
            size,
            event_idx: start.negotiated.event_idx(),
            next,
            seen: false,
            used,
            published: used,
            held: None,
            batch: (0, 0),
            fresh: 0,
            out_of_buffers_at: None,
            inflight,
        }
    }

    fn moved(self, mapped: MappedRing) -> Self {
        let MappedRing { ring, descriptors, event } = mapped;
        Self { ring, descriptors, event, ..self }
    }

    fn size(&self) -> u16 {
        self.size
    }

    fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }

    #[inline]
    fn refresh(&mut self) -> Result<bool, DriverFault> {
        self.seen = self.available();
        Ok(self.seen)
    }

    #[inline(always)]
    fn available(&self) -> bool {
        self.is_available(self.next) || self.inflight.as_ref().is_some_and(PackedInflight::has_resubmitted)
    }

    #[inline(always)]
    fn next(&self) -> Position {
        self.next
    }

    #[inline(always)]
    fn behind(&self, at: Position, span: u16) -> Position {
        at.step(span, self.size)
    }

    #[inline(always)]
    fn first(&self, at: Position) -> Result<Option<ChainDescriptor<Position>>, DriverFault> {
        let again = self
            .inflight
            .as_ref()
            .and_then(|inflight| inflight.resubmitted(at))
            .and_then(|chain| chain.first().copied());
        Ok(again.or_else(|| self.desc(at)).map(|d| descriptor(at, at, &d, 1)))
    }

    fn follow(&self, last: &ChainDescriptor<Position>) -> Result<ChainDescriptor<Position>, DriverFault> {
        // If a chain goes around the whole ring, it ends here, before it reaches its own first
        // descriptor again.
        let span = DriverFault::span(last.index, last.span + 1, self.size)?;
        let at = last.at.step(last.span, self.size);
        let d = match self.inflight.as_ref().and_then(|inflight| inflight.resubmitted(last.at)) {
            Some(chain) => chain.get(usize::from(last.span)).copied(),
            None => self.desc(at),
        };
        let d = DriverFault::finished(last.index, d)?;
        Ok(descriptor(last.at, at, &d, span))
    }

    #[inline(always)]
    fn id(&self, last: &ChainDescriptor<Position>) -> Result<u16, DriverFault> {
        DriverFault::head(last.id, self.size)
    }

    #[inline(always)]
    fn peek_group(&self, memory: &mut View<'_>, most: u16, kind: u16, group: &mut Group) {
        let (mut at, size) = (self.ring.available_from(self.next), self.size);
        group.find(most.min(size).into(), |_| {
            let d = at.desc();
            if d.flags & PackedDesc::MEANING != kind | at.flags() || d.len == 0 {
                return None;
            }
            let id = DriverFault::head(d.id, size).ok()?;
            let host = memory.translate(d.addr, d.len)?;
            at.advance(1);
            Some(SingleBuffer { host, len: d.len, id })
        });
    }

    #[inline(always)]
    fn add_used(&mut self, id: u16, span: u16, len: u32) {
        self.put(id, span, len);
        self.next = self.next.step(span, self.size);
    }

    /// The position is kept in registers. In memory, each chain would wait for the store of the one
    /// before.
    #[inline(always)]
    fn add_used_group(&mut self, chains: &[SingleBuffer]) {
        let Some((first, rest)) = chains.split_first() else { return };
        self.add_used(first.id, 1, first.len);
        if self.inflight.is_some() {
            return rest.iter().for_each(|w| self.add_used(w.id, 1, w.len));
        }
        let mut at = self.ring.used_from(self.used);
        for w in rest {
            let written = if w.len > 0 { DESC_WRITE } else { 0 };
            at.set_used_desc(PackedDesc { addr: 0, len: w.len, id: w.id, flags: at.flags() | written });
            at.advance(1);
        }
        self.used = at.position();
        self.next = self.next.step(rest.len() as u16, self.size);
    }

    #[inline(always)]
    fn add_used_read(&mut self, id: u16, span: u16) {
        // A driver that changes its flags meanwhile can have more descriptors than the ring.
        if self.batch.1 > self.size - span {
            self.end_batch();
        }
        self.batch = (id, self.batch.1 + span);
        self.next = self.next.step(span, self.size);
    }

    #[inline(always)]
    fn publish(&mut self) {
        self.end_batch();
        if let Some(first) = self.held.take() {
            self.ring.set_used_desc(self.published.offset(), first);
            self.fresh = self.fresh.saturating_add(self.used.since(self.published, self.size));
            self.published = self.used;
        }
    }

    fn publish_watched(&mut self, log: Option<&Logged>) -> bool {
        let from = self.published;
        if let (Some(inflight), Some(_)) = (&mut self.inflight, self.held) {
            inflight.before_publish(&self.ring, from, self.used);
        }
        self.publish();
        if let Some(inflight) = &mut self.inflight {
            inflight.after_publish();
        }
        note(log, self.descriptors, self.size, from, self.published.since(from, self.size));
        self.inflight.as_ref().is_some_and(PackedInflight::has_resubmitted)
    }

    fn should_notify(&mut self) -> bool {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh == 0 {
            return false;
        }
        full_fence();
        let event = self.ring.driver_event();
        match event.kind() {
            Event::DISABLE => false,
            // A turn or more has passed every event.
            Event::AT if self.event_idx && fresh < self.size.into() => {
                let old = self.published.step(self.size, self.size).step(self.size - fresh as u16, self.size);
                passed_packed(Position::from_bits(event.position), old, self.published, self.size)
            }
            _ => true,
        }
    }

    /// The event is the first descriptor that is not available. Finding it costs a load for each
    /// one that is.
    fn arm(&mut self) -> Armed {
        let end = self.end();
        let event = match end {
            Some(at) if self.event_idx => Event { position: at.bits(), flags: Event::AT },
            _ => Event { position: 0, flags: Event::ENABLE },
        };
        self.ring.set_device_event(event);
        full_fence();
        // A chain that became available after the last refresh may be before the event.
        let came = end.is_some_and(|at| self.is_available(at)) || !self.seen && self.available();
        if came { Armed::Work } else { Armed::Waits }
    }

    fn disarm(&mut self) {
        self.ring.set_device_event(Event { position: 0, flags: Event::DISABLE });
    }

    fn log_event(&self, Logged { log, used }: &Logged) {
        if used.is_some() {
            log.mark(self.event, 4);
        }
    }

    fn set_out_of_buffers(&mut self, at: Position) {
        self.out_of_buffers_at = Some(at);
    }

    #[inline(always)]
    fn out_of_buffers(&mut self) -> bool {
        match self.out_of_buffers_at {
            Some(at) if !self.is_available(at) => true,
            _ => {
                self.out_of_buffers_at = None;
                false
            }
        }
    }

    /// No flag marks a successor: the descriptors of a table follow each other to its end.
    fn entry(&self, bytes: [u8; Desc::LEN], number: u16, entries: u16) -> Desc {
        let word = u128::from_le_bytes(bytes);
        let flags = (word >> 112) as u16 & PackedDesc::KIND & !DESC_NEXT;
        let more = if number + 1 < entries { DESC_NEXT } else { 0 };
        Desc { addr: word as u64, len: (word >> 64) as u32, flags: flags | more, next: number + 1 }
    }
}

/// A descriptor at `at` of the chain at `first`.
#[inline(always)]
fn descriptor(first: Position, at: Position, d: &PackedDesc, span: u16) -> ChainDescriptor<Position> {
    let desc = Desc { addr: d.addr, len: d.len, flags: d.flags & PackedDesc::KIND, next: 0 };
    ChainDescriptor { desc, index: at.offset(), at: first, id: d.id, span }
}

/// The answer to `GET_VRING_BASE` for a packed ring that has not run.
pub(crate) const BASE: u32 = Position::START.bits() as u32 * 0x1_0001;

/// Marks in the dirty log that `count` descriptors from `from` on were written, in the ring of
/// `size` at guest address `descriptors`.
fn note(log: Option<&Logged>, descriptors: u64, size: u16, from: Position, count: u32) {
    if let Some(Logged { log, used: Some(_) }) = log {
        // Descriptors that go around the end are two runs.
        let straight = count.min(u32::from(size - from.offset()));
        let bytes = |n: u32| u64::from(n) * Desc::LEN as u64;
        log.mark(descriptors.wrapping_add(bytes(from.offset().into())), bytes(straight));
        log.mark(descriptors, bytes(count - straight));
    }
}

/// The available and the used position in the `base` of a front end.
///
/// Some front ends send the available position alone, because that is what some back ends answer.
/// The used position is the same then. A used half of 0 is either that, or the beginning of a turn
/// whose wrap counter is 0; the ring shows which.
fn positions(base: u32, ring: &PackedRing) -> [Position; 2] {
    let [available, used] = [base as u16, (base >> 16) as u16].map(Position::from_bits);
    [available, if used == ZERO && !is_used_to_zero(ring, available) { available } else { used }]
}

/// The position whose bits are 0.
const ZERO: Position = Position::from_bits(0);

/// Whether the device has used the descriptors of `ring` up to [`ZERO`] and none behind it, and
/// `available` is ahead of it.
///
/// All from there to `available` are then as the driver has made them available. This is also so if
/// one chain or one batch began in the turn before and ends at `available`; then the last
/// descriptor of the ring continues a chain, or the last used one has the id of the chain that ends
/// at `available`. Both are read as used up to `available`: back ends that answer one half have
/// used all, and of those that answer both, few stop with chains in flight.
fn is_used_to_zero(ring: &PackedRing, available: Position) -> bool {
    let size = ring.size();
    let ahead = available.since(ZERO, size);
    let untouched = |n| ring.used_desc(n).is_available(ZERO.step(n, size));
    let last_used = || {
        let mut used = (0..size).rev().filter(|&n| ring.used_desc(n).is_used(Position::START.step(n, size)));
        used.next().map(|n| ring.used_desc(n).id)
    };
    (1..=u32::from(size)).contains(&ahead)
        && (0..ahead as u16).all(untouched)
        && ring.used_desc(size - 1).flags & DESC_NEXT == 0
        && last_used() != Some(ring.used_desc((ahead - 1) as u16).id)
}

/// Whether a ring of `size` entries has the positions of `base`.
pub(crate) fn is_base(base: u32, size: u16) -> bool {
    [base as u16, (base >> 16) as u16].iter().all(|&bits| Position::from_bits(bits).offset() < size)
}
