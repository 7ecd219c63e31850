//! The driver's end of a split ring.
//!
//! ```text
//!   shaped, K segments   slot s has descriptors s K ... s K + K - 1, chained for good; only addresses change
//!   free                 slot s has descriptor s, and takes others from the free ones for further segments
//!   free, with tables    slot s has descriptor s, which points to the table of s for more than one segment
//! ```

use super::super::event::full_fence;
use super::super::fault::DeviceFault;
use super::super::{
    AVAIL_NO_INTERRUPT, Armed, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc, SplitRing, USED_NO_NOTIFY, passed,
};
use super::{DriverFormat, Free, Segment, Setup, Shape, Tables};

pub(crate) struct Split {
    ring: SplitRing,
    /// Heads as written into the available ring, so that one which stays is not written again. Where buffers are used in
    /// order, they also say which ones come back next.
    heads: Box<[u16]>,
    next_avail: u16,
    next_used: u16,
    /// The used index as last read and judged.
    used_idx: u16,
    /// Buffers made available since the last [`should_notify`](DriverFormat::should_notify), and the index then.
    fresh: u32,
    notified: u16,
    event_idx: bool,
    in_order: bool,
    /// The last buffer of the batch that is being taken, and its length. Only where buffers are used in order.
    batch: Option<(u16, u32)>,
    /// Descriptors between the heads of two slots.
    per_slot: u16,
    tables: Option<Tables>,
    /// The private copy of each descriptor's successor, in a free queue.
    next: Box<[Option<u16>]>,
    /// Buffers that have successors there.
    chained: u16,
}

impl Split {
    #[inline(always)]
    fn head_at(&self, position: u16) -> u16 {
        self.heads[usize::from(position) & (self.heads.len() - 1)]
    }

    #[inline(always)]
    fn make_available(&mut self, head: u16) {
        let at = usize::from(self.next_avail) & (self.heads.len() - 1);
        if self.heads[at] != head {
            self.heads[at] = head;
            self.ring.set_avail_entry(self.next_avail, head);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// The next buffer where buffers are used in order. One used element can stand for a batch, whose last buffer it names.
    #[inline(never)]
    fn front_in_order(&mut self, have: u32) -> Result<(u32, u32), DeviceFault> {
        let head = self.head_at(self.next_used);
        let (last, len) = match self.batch {
            Some(batch) => batch,
            None => {
                let (id, len) = self.ring.used_entry(self.next_used);
                let last = DeviceFault::id(id, self.heads.len())?;
                let ready = self.used_idx.wrapping_sub(self.next_used);
                let mut batch = (0..ready).map(|n| self.head_at(self.next_used.wrapping_add(n)));
                DeviceFault::posted(last, batch.find(|&head| head == last))?;
                self.batch = Some((last, len));
                (last, len)
            }
        };
        if head != last {
            return Ok((u32::from(head), have));
        }
        self.batch = None;
        Ok((u32::from(head), len))
    }
}

fn flags(segment: Segment) -> u16 {
    if segment.writable { DESC_WRITE } else { 0 }
}

impl DriverFormat for Split {
    type Ring = SplitRing;

    fn new(ring: SplitRing, setup: Setup, shape: &Shape, tables: Option<Tables>) -> Self {
        let (size, per_slot) = (ring.size(), setup.per_slot);
        let slots = size.checked_div(per_slot).unwrap_or(0);
        for slot in 0..slots {
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
            used_idx: 0,
            fresh: 0,
            notified: 0,
            event_idx: setup.negotiated.event_idx(),
            in_order: setup.negotiated.in_order(),
            batch: None,
            per_slot: per_slot.max(1),
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
        usize::from(free.len)
    }

    #[inline(always)]
    fn takes(&self, segments: usize) -> Option<usize> {
        match &self.tables {
            None => Some(segments),
            Some(tables) => (segments <= usize::from(tables.per_slot.min(self.size()))).then_some(1),
        }
    }

    #[inline(always)]
    fn point(&mut self, slot: u16, shape: &Shape) {
        if self.per_slot == 1 {
            return self.ring.set_desc_addr(slot, shape.addrs[usize::from(slot)]);
        }
        for (id, &addr) in (slot * self.per_slot..).zip(shape.addrs(slot)) {
            self.ring.set_desc_addr(id, addr);
        }
    }

    #[inline(always)]
    fn expose(&mut self, slots: &[u16], _: &Shape) {
        for &slot in slots {
            self.make_available(slot * self.per_slot);
        }
        self.fresh += slots.len() as u32;
    }

    #[inline(always)]
    fn post(&mut self, mut segments: impl Iterator<Item = Segment>, free: &mut Free) -> Option<u16> {
        let mut at = segments.next()?;
        let mut following = segments.next();
        let head = free.pop()?;
        if let (Some(tables), Some(second)) = (&self.tables, following) {
            let all = [at, second].into_iter().chain(segments);
            let (addr, len) = tables.write(head, all, |n, segment, last| {
                let next = if last { 0 } else { u64::from(DESC_NEXT) << 32 | u64::from(n + 1) << 48 };
                u64::from(segment.len) | u64::from(flags(segment)) << 32 | next
            });
            self.ring.set_desc(head, Desc { addr, len, flags: DESC_INDIRECT, next: 0 });
        } else {
            let mut id = head;
            while let Some(segment) = following {
                // There is room, the caller has seen.
                let Some(next) = free.pop() else { break };
                self.chained += u16::from(id == head);
                self.next[usize::from(id)] = Some(next);
                self.ring.set_desc(id, Desc { addr: at.addr, len: at.len, flags: flags(at) | DESC_NEXT, next });
                (id, at) = (next, segment);
                following = segments.next();
            }
            self.ring.set_desc(id, Desc { addr: at.addr, len: at.len, flags: flags(at), next: 0 });
        }
        self.make_available(head);
        self.fresh += 1;
        Some(head)
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
            // After so many the index may have gone around.
            fresh > u32::from(self.size()) || passed(self.ring.avail_event(), old, self.next_avail)
        } else {
            self.ring.used_flags() & USED_NO_NOTIFY == 0
        }
    }

    #[inline(always)]
    fn pending(&mut self, _: usize, posted: u16) -> Result<u16, DeviceFault> {
        let used_idx = self.ring.used_idx();
        let by = DeviceFault::ahead(used_idx.wrapping_sub(self.next_used), posted)?;
        self.used_idx = used_idx;
        Ok(by)
    }

    #[inline(always)]
    fn peek(&self, i: u16) -> Option<u32> {
        let at = self.next_used.wrapping_add(i);
        self.slot(if self.in_order { u32::from(self.head_at(at)) } else { self.ring.used_entry(at).0 })
    }

    #[inline(always)]
    fn slot(&self, id: u32) -> Option<u32> {
        match u32::from(self.per_slot) {
            1 => Some(id),
            n => id.is_multiple_of(n).then_some(id / n),
        }
    }

    #[inline(always)]
    fn front(&mut self, have: u32) -> Result<(u32, u32), DeviceFault> {
        if self.in_order { self.front_in_order(have) } else { Ok(self.ring.used_entry(self.next_used)) }
    }

    #[inline(always)]
    fn consume(&mut self, slot: u16, free: &mut Free) {
        self.next_used = self.next_used.wrapping_add(1);
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

    fn arm(&mut self) -> Armed {
        if self.event_idx {
            self.ring.set_used_event(self.next_used);
        } else {
            self.ring.set_avail_flags(0);
        }
        full_fence();
        if self.ring.used_idx() == self.next_used {
            return Armed::Waits;
        }
        self.disarm();
        Armed::Work
    }

    fn disarm(&mut self) {
        if self.event_idx {
            // An entry that was passed already. The index reaches it again after 65535 more, and the signal then is one too many.
            self.ring.set_used_event(self.next_used.wrapping_sub(1));
        } else {
            self.ring.set_avail_flags(AVAIL_NO_INTERRUPT);
        }
    }
}
