//! The driver's end of a split ring.
//!
//! ```text
//!   shaped, K segments   slot s has descriptors s K ... s K + K - 1, chained for good; only addresses change
//!   shaped, with tables  slot s has descriptor s, which points to the table of s for good; only addresses in the table change
//!   free                 slot s has descriptor s, and takes others from the free ones for further segments
//!   free, with tables    slot s has descriptor s, which points to the table of s for more than one segment
//! ```

use super::super::event::full_fence;
use super::super::fault::DeviceFault;
use super::super::fours::{count_by_fours, for_each_by_fours};
use super::super::split::{Local, UsedWord};
use super::super::{
    AVAIL_NO_INTERRUPT, Armed, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc, SplitRing, USED_NO_NOTIFY, passed,
};
use super::format::{DriverFormat, Expected, NEXT_ID, UsedEntries, opaque};
use super::free::Free;
use super::shape::{Setup, Shape};
use super::tables::{Segment, Tables};
use std::iter;

pub(crate) struct Split {
    ring: SplitRing,
    /// The heads in the available ring, so that a head which stays the same is not written again.
    heads: Box<[u16]>,
    next_avail: u16,
    next_used: u16,
    /// Buffers made available since the last [`should_notify`](DriverFormat::should_notify), and
    /// the index then.
    fresh: u32,
    notified: u16,
    event_idx: bool,
    names: Names,
    tables: Option<Tables>,
    /// The private copy of each descriptor's successor, in a free queue.
    next: Box<[Option<u16>]>,
    /// Buffers that have successors there.
    chained: u16,
}

/// The ids of buffers in the ring: their first descriptors.
#[derive(Clone, Copy)]
struct Names {
    /// Descriptors between the heads of two slots.
    per_slot: u16,
    slots: u16,
}

impl Names {
    #[inline(always)]
    fn slot(self, id: u32) -> Result<u16, DeviceFault> {
        let slot = match u32::from(self.per_slot) {
            1 => id,
            n if id.is_multiple_of(n) => id / n,
            _ => u32::MAX,
        };
        DeviceFault::id(id, slot, self.slots)
    }
}

/// Writes the head of a chain into the available ring, unless `known`, the head at this position,
/// is the same.
#[inline(always)]
fn make_available(ring: &SplitRing, known: &mut u16, position: u16, head: u16) {
    if *known != head {
        *known = head;
        ring.set_avail_entry(position, head);
    }
}

/// The used entries that were not read.
pub(crate) struct Used<'r> {
    ring: Local<'r>,
    next: u16,
    /// How many there are.
    ready: u16,
}

impl UsedEntries for Used<'_> {
    type At = u16;

    #[inline(always)]
    fn left(&self) -> u16 {
        self.ready
    }

    #[inline(always)]
    fn entry(&self) -> Option<(u32, u32)> {
        Some(self.ring.used_entry(self.next))
    }

    #[inline(always)]
    fn skip(&mut self, _: u16) {
        self.skip_run(1);
    }

    #[inline(always)]
    fn skip_run(&mut self, n: u16) {
        self.next = self.next.wrapping_add(n);
        // The rest of a batch that was read before counts no more, if the index has moved back.
        self.ready = self.ready.saturating_sub(n);
    }

    /// The index was checked before the first entry.
    #[inline(always)]
    fn check_end(&self) -> Result<(), DeviceFault> {
        Ok(())
    }

    #[inline(always)]
    fn end(self) -> u16 {
        self.next
    }
}

fn flags(segment: Segment) -> u16 {
    if segment.writable { DESC_WRITE } else { 0 }
}

/// The word after the address in entry `n` of a table.
fn table_entry(n: u16, segment: Segment, last: bool) -> u64 {
    let next = if last { 0 } else { u64::from(DESC_NEXT) << 32 | u64::from(n + 1) << 48 };
    u64::from(segment.len) | u64::from(flags(segment)) << 32 | next
}

impl DriverFormat for Split {
    type Ring = SplitRing;
    type At = u16;
    type Used<'r> = Used<'r>;

    fn entries(ring: &SplitRing) -> u16 {
        ring.size()
    }

    fn new(ring: SplitRing, setup: Setup, shape: Shape<'_>, tables: Option<Tables>) -> Self {
        let (size, per_slot) = (ring.size(), setup.per_slot);
        let slots = size / per_slot.max(1);
        for slot in 0..slots {
            if let (true, Some(tables)) = (per_slot > 0, &tables) {
                let (addr, len) = tables.write(slot, shape.segments(slot), table_entry);
                ring.set_desc(slot, Desc { addr, len, flags: DESC_INDIRECT, next: 0 });
                continue;
            }
            for (i, &len) in shape.lens.iter().enumerate() {
                let id = slot * per_slot + i as u16;
                let next = if i + 1 < shape.lens.len() { id + 1 } else { 0 };
                ring.set_desc(id, Desc { addr: 0, len, flags: shape.flags(i), next });
            }
        }
        let free = if per_slot == 0 { usize::from(size) } else { 0 };
        let mut this = Self {
            ring,
            heads: vec![u16::MAX; usize::from(size)].into(),
            next_avail: 0,
            next_used: 0,
            fresh: 0,
            notified: 0,
            event_idx: setup.negotiated.event_idx(),
            names: Names { per_slot: per_slot.max(1), slots },
            tables,
            next: vec![None; free].into(),
            chained: 0,
        };
        this.disarm();
        this
    }

    #[inline]
    fn size(&self) -> u16 {
        self.ring.size()
    }

    #[inline(always)]
    fn room(&self, free: &Free) -> usize {
        usize::from(free.len())
    }

    #[inline(always)]
    fn takes(&self, segments: usize) -> Option<usize> {
        match &self.tables {
            None => Some(segments),
            Some(tables) => (segments <= usize::from(tables.per_slot.min(self.size()))).then_some(1),
        }
    }

    #[inline(always)]
    fn expose(&mut self, slots: impl ExactSizeIterator<Item = (u16, u16)>, shape: Shape<'_>, steady: bool) {
        let (ring, heads, mut at) = (self.ring.local(), &mut *self.heads, self.next_avail);
        self.fresh += slots.len() as u32;
        if steady && self.names.per_slot == 1 && self.tables.is_none() {
            // Each head is in the ring already.
            self.next_avail = at.wrapping_add(slots.len() as u16);
            for (slot, changed) in slots {
                if changed > 0 {
                    ring.set_desc_addr(slot, shape.addrs(slot)[0]);
                }
            }
            return;
        }
        for (slot, changed) in slots {
            let head = slot * self.names.per_slot;
            match &self.tables {
                _ if changed == 0 => {}
                Some(tables) => tables.set_addrs(slot, shape.addrs(slot), changed),
                None => (head..).zip(shape.addrs(slot)).for_each(|(id, &addr)| ring.set_desc_addr(id, addr)),
            }
            let place = usize::from(at) & (heads.len() - 1);
            make_available(&ring, &mut heads[place], at, head);
            at = at.wrapping_add(1);
        }
        self.next_avail = at;
    }

    #[inline(always)]
    fn expose_run(&mut self, first: u16, addrs: &[u64], _: u32, changed: u64) {
        let descs = self.ring.descs();
        let descs = &descs[usize::from(first)..][..addrs.len()];
        let all = u64::MAX.checked_shr(u64::BITS - addrs.len() as u32).unwrap_or(0);
        if changed == all {
            for_each_by_fours(descs, addrs, |_, desc, addr| desc.set_addr(addr));
        } else {
            let mut left = changed;
            while left != 0 {
                let i = left.trailing_zeros() as usize;
                descs[i].set_addr(addrs[i]);
                left &= left - 1;
            }
        }
        // Each head is in the ring already.
        self.fresh += addrs.len() as u32;
        self.next_avail = self.next_avail.wrapping_add(addrs.len() as u16);
    }

    #[inline(always)]
    fn post(&mut self, head: u16, mut segments: impl Iterator<Item = Segment>, free: &mut Free) {
        let Some(mut at) = segments.next() else { return };
        let mut following = segments.next();
        free.taken();
        if let (Some(tables), Some(second)) = (&self.tables, following) {
            let all = [at, second].into_iter().chain(segments);
            let (addr, len) = tables.write(head, all, table_entry);
            self.ring.set_desc(head, Desc { addr, len, flags: DESC_INDIRECT, next: 0 });
        } else {
            let mut id = head;
            while let Some(segment) = following {
                // The caller has checked that there is room.
                let Some(next) = free.pop() else { break };
                self.chained += u16::from(id == head);
                self.next[usize::from(id)] = Some(next);
                self.ring.set_desc(id, Desc { addr: at.addr, len: at.len, flags: flags(at) | DESC_NEXT, next });
                (id, at) = (next, segment);
                following = segments.next();
            }
            self.ring.set_desc(id, Desc { addr: at.addr, len: at.len, flags: flags(at), next: 0 });
        }
        let place = usize::from(self.next_avail) & (self.heads.len() - 1);
        make_available(&self.ring, &mut self.heads[place], self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.fresh += 1;
    }

    #[inline(always)]
    fn run(&self) -> u16 {
        // Up to the end of the available ring.
        self.size() - (self.next_avail & (self.size() - 1))
    }

    #[inline(always)]
    fn post_run(&mut self, first: u16, segments: impl ExactSizeIterator<Item = (u64, u32)>) {
        let n = segments.len();
        let descs = &self.ring.descs()[usize::from(first)..][..n];
        for (desc, (addr, len)) in descs.iter().zip(segments) {
            desc.set_readable(addr, len);
        }
        let at = usize::from(self.next_avail) & (self.heads.len() - 1);
        for (known, i) in self.heads[at..at + n].iter_mut().zip(0..) {
            make_available(&self.ring, known, self.next_avail.wrapping_add(i), first + i);
        }
        self.next_avail = self.next_avail.wrapping_add(n as u16);
        self.fresh += n as u32;
    }

    #[inline(always)]
    fn publish(&mut self) {
        self.ring.set_avail_idx(self.next_avail);
    }

    #[inline]
    fn should_notify(&mut self) -> bool {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh == 0 {
            return false;
        }
        let old = std::mem::replace(&mut self.notified, self.next_avail);
        full_fence();
        if self.event_idx {
            // After so many entries the index may have wrapped around.
            fresh > u32::from(self.size()) || passed(self.ring.avail_event(), old, self.next_avail)
        } else {
            self.ring.used_flags() & USED_NO_NOTIFY == 0
        }
    }

    #[inline(always)]
    fn used(&self, found: u16, posted: u16) -> Result<Used<'_>, DeviceFault> {
        let ready = DeviceFault::ahead(self.ring.used_idx().wrapping_sub(self.next_used), posted - found)?;
        Ok(Used { ring: self.ring.local(), next: self.next_used, ready })
    }

    #[inline(always)]
    fn read_to(&mut self, next: u16) {
        self.next_used = next;
    }

    #[inline(always)]
    fn read_run<B>(&self, expected: Expected, buffers: &mut [B], mut seen: impl FnMut(&mut B, u32)) -> (u16, bool) {
        let (first, ready) = (expected.first, self.ring.used_idx().wrapping_sub(self.next_used));
        debug_assert_eq!(first, self.used_place());
        let n = if ready <= expected.posted { usize::from(ready).min(buffers.len()) } else { 0 };
        let Some(used) = self.ring.used_run(first, n) else { return (0, false) };
        if used.first_id() != u32::from(first) {
            return (0, true);
        }
        let (mut next, span) = (expected.word(u32::from(first) + 1), u64::from(expected.span));
        let Some((last, buffers)) = buffers[..n].split_last_mut() else { return (0, false) };
        let accepted = count_by_fours(buffers, used.words(), |buffer, word| {
            // The length of this entry and the id of the next one. If only the id is wrong, this
            // entry is left out, too.
            let more = word.read().wrapping_sub(next);
            if more > span {
                return false;
            }
            seen(buffer, more as u32);
            next = opaque(next + NEXT_ID);
            true
        });
        if accepted < buffers.len() {
            return (accepted as u16, true);
        }
        let len = used.last_len();
        if !expected.allows(len) {
            return (n as u16 - 1, true);
        }
        seen(last, len - expected.shortest);
        (n as u16, false)
    }

    #[inline(always)]
    fn used_ids(&self, posted: u16, most: u16) -> impl Iterator<Item = u32> {
        let ready = self.ring.used_idx().wrapping_sub(self.next_used);
        let n = if ready <= posted { ready.min(most).min(self.size() - self.used_place()) } else { 0 };
        let used = self.ring.used_run(self.next_used, n.into());
        used.into_iter().flat_map(|used| iter::once(used.first_id()).chain(used.words().iter().map(UsedWord::next_id)))
    }

    #[inline(always)]
    fn has_used(&self) -> bool {
        self.ring.used_idx() != self.next_used
    }

    #[inline(always)]
    fn used_place(&self) -> u16 {
        self.next_used & (self.size() - 1)
    }

    #[inline(always)]
    fn is_single(&self) -> bool {
        self.chained == 0
    }

    #[inline(always)]
    fn consume(&mut self, n: u16) {
        self.next_used = self.next_used.wrapping_add(n);
    }

    #[inline(always)]
    fn count(&self, _: u16) -> Result<u16, DeviceFault> {
        // A used entry is one for each buffer.
        Ok(1)
    }

    #[inline(always)]
    fn slot(&self, id: u32) -> Result<u16, DeviceFault> {
        self.names.slot(id)
    }

    #[inline(always)]
    fn id(&self, slot: u16) -> u16 {
        slot * self.names.per_slot
    }

    #[inline(always)]
    fn release(&mut self, slot: u16, free: &mut Free) {
        free.push(slot);
        if self.chained > 0 {
            let mut id = slot;
            while let Some(next) = self.next[usize::from(id)].take() {
                self.chained -= u16::from(id == slot);
                free.push(next);
                id = next;
            }
        }
    }

    #[inline(always)]
    fn release_run(&mut self, _: u16, _: u16) {}

    fn arm(&mut self) -> Armed {
        if self.event_idx {
            self.ring.set_used_event(self.next_used);
        } else {
            self.ring.set_avail_flags(0);
        }
        full_fence();
        if !self.has_used() {
            return Armed::Waits;
        }
        self.disarm();
        Armed::Work
    }

    fn disarm(&mut self) {
        if self.event_idx {
            // The event is set to an entry that was passed already. The index reaches it again
            // after 65535 more entries; the device then sends one unneeded signal.
            self.ring.set_used_event(self.next_used.wrapping_sub(1));
        } else {
            self.ring.set_avail_flags(AVAIL_NO_INTERRUPT);
        }
    }
}
