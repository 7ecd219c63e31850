//! The device's half of a split ring.
//!
//! Two indices, each written by one side, order everything: the driver's covers the available
//! ring, and the device's the used ring.

use super::super::Armed;
use super::super::event::{full_fence, passed};
use super::super::fault::DriverFault;
use super::super::{AVAIL_NO_INTERRUPT, Desc, SplitRing, USED_NO_NOTIFY};
use super::chain::ChainDescriptor;
use super::format::{DeviceFormat, Logged, Start};
use super::group::{Group, SingleBuffer};
use super::inflight::SplitInflight;
use crate::guest_memory::view::View;

/// Positions count chains, modulo 2^16.
#[derive(Debug)]
pub(crate) struct SplitDevice {
    ring: SplitRing,
    size: u16,
    event_idx: bool,
    /// The next chain to pop.
    next: u16,
    /// The driver's index as last read; at most `size` ahead of `next`.
    avail_idx: u16,
    /// Where the next used element goes.
    used: u16,
    /// The used index that the driver sees.
    published: u16,
    /// The last chain of a batch, and the chains in the batch.
    batch: (u16, u16),
    /// Used elements published since the driver's flag or event was last read.
    fresh: u32,
    /// The driver's index at which the chains were too few.
    out_of_buffers_at: Option<u16>,
    inflight: Option<SplitInflight>,
}

impl SplitDevice {
    /// Writes one element for a batch: it is at the place of the first one, and names the last
    /// chain. The index then skips the others.
    #[inline(always)]
    fn end_batch(&mut self) {
        if let (id, chains @ 1..) = self.batch {
            self.ring.set_used_entry(self.used, id.into(), 0);
            self.used = self.used.wrapping_add(chains);
            self.batch = (0, 0);
        }
    }
}

impl DeviceFormat for SplitDevice {
    type Ring = SplitRing;
    type At = u16;

    fn new(ring: SplitRing, start: Start) -> Self {
        let (used, size) = (ring.used_idx(), ring.size());
        let inflight = start.inflight.map(|part| SplitInflight::new(part, size, used));
        let next = if inflight.is_some() { used } else { start.base as u16 };
        // A driver that uses event indices must leave the flag 0.
        ring.set_used_flags(0);
        Self {
            ring,
            size,
            event_idx: start.negotiated.event_idx(),
            next,
            avail_idx: next,
            used,
            published: used,
            batch: (0, 0),
            fresh: 0,
            out_of_buffers_at: None,
            inflight,
        }
    }

    fn moved(self, ring: SplitRing) -> Self {
        Self { ring, ..self }
    }

    fn size(&self) -> u16 {
        self.size
    }

    fn base(&self) -> u32 {
        self.next.into()
    }

    #[inline]
    fn refresh(&mut self) -> Result<bool, DriverFault> {
        let to = self.ring.avail_idx();
        let ahead = DriverFault::ahead(self.next, to, self.size)?;
        self.avail_idx = to;
        Ok(ahead > 0)
    }

    #[inline(always)]
    fn available(&self) -> bool {
        self.next != self.avail_idx
    }

    #[inline(always)]
    fn next(&self) -> u16 {
        self.next
    }

    #[inline(always)]
    fn behind(&self, at: u16, span: u16) -> u16 {
        at.wrapping_add(span)
    }

    #[inline(always)]
    fn first(&self, at: u16) -> Result<Option<ChainDescriptor<u16>>, DriverFault> {
        if at == self.avail_idx {
            return Ok(None);
        }
        let again = self.inflight.as_ref().and_then(|inflight| inflight.resubmitted(at));
        let head = DriverFault::head(again.unwrap_or_else(|| self.ring.avail_entry(at)), self.size)?;
        Ok(Some(ChainDescriptor { desc: self.ring.desc(head), index: head, at, id: head, span: 1 }))
    }

    fn follow(&self, descriptor: &ChainDescriptor<u16>) -> Result<ChainDescriptor<u16>, DriverFault> {
        let next = DriverFault::next(descriptor.desc.next, self.size)?;
        Ok(ChainDescriptor { desc: self.ring.desc(next), index: next, ..*descriptor })
    }

    #[inline(always)]
    fn id(&self, last: &ChainDescriptor<u16>) -> Result<u16, DriverFault> {
        Ok(last.id)
    }

    #[inline(always)]
    fn peek_group(&self, memory: &mut View<'_>, most: u16, kind: u16, group: &mut Group) {
        let (ring, size, next) = (self.ring.local(), self.size, self.next);
        let most = most.min(self.avail_idx.wrapping_sub(next));
        group.find(most.into(), |n| {
            let id = DriverFault::head(ring.avail_entry(next.wrapping_add(n)), size).ok()?;
            let d = ring.desc(id);
            if d.flags != kind || d.len == 0 {
                return None;
            }
            Some(SingleBuffer { host: memory.translate(d.addr, d.len)?, len: d.len, id })
        });
    }

    #[inline(always)]
    fn add_used(&mut self, id: u16, _: u16, len: u32) {
        self.ring.set_used_entry(self.used, id.into(), len);
        self.used = self.used.wrapping_add(1);
        self.next = self.next.wrapping_add(1);
    }

    /// The position is kept in a register. In memory, each chain would wait for the store of the
    /// one before.
    #[inline(always)]
    fn add_used_group(&mut self, chains: &[SingleBuffer]) {
        let (ring, mut used) = (self.ring.local(), self.used);
        for w in chains {
            ring.set_used_entry(used, w.id.into(), w.len);
            used = used.wrapping_add(1);
        }
        self.used = used;
        self.next = self.next.wrapping_add(chains.len() as u16);
    }

    #[inline(always)]
    fn add_used_read(&mut self, id: u16, span: u16) {
        self.batch = (id, self.batch.1 + span);
        self.next = self.next.wrapping_add(span);
    }

    #[inline(always)]
    fn publish(&mut self) {
        self.end_batch();
        if self.published != self.used {
            self.fresh = self.fresh.saturating_add(self.used.wrapping_sub(self.published).into());
            self.published = self.used;
            self.ring.set_used_idx(self.used);
        }
    }

    fn publish_watched(&mut self, log: Option<&Logged>) -> bool {
        let (from, to) = (self.published, self.used);
        if from != to {
            if let Some(inflight) = &self.inflight {
                inflight.before_publish(&self.ring, from, to);
            }
            self.publish();
            if let Some(Logged { log, used: Some(at) }) = log {
                // Elements of 8 bytes behind flags and index. A batch that goes around the end is
                // two runs.
                let (first, count) = (u64::from(from & (self.size - 1)), u64::from(to.wrapping_sub(from)));
                let straight = count.min(u64::from(self.size) - first);
                log.mark(at.wrapping_add(4 + 8 * first), 8 * straight);
                log.mark(at.wrapping_add(4), 8 * (count - straight));
                log.mark(*at, 4);
            }
            if let Some(inflight) = &mut self.inflight {
                inflight.after_publish(&self.ring, from, to, self.next);
            }
        }
        self.inflight.as_ref().is_some_and(SplitInflight::has_resubmitted)
    }

    fn should_notify(&mut self) -> bool {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh == 0 {
            return false;
        }
        full_fence();
        if !self.event_idx {
            return self.ring.avail_flags() & AVAIL_NO_INTERRUPT == 0;
        }
        // More than 2^16 elements have passed every event.
        let Ok(fresh) = u16::try_from(fresh) else { return true };
        passed(self.ring.used_event(), self.published.wrapping_sub(fresh), self.published)
    }

    fn arm(&mut self) -> Armed {
        match self.event_idx {
            true => self.ring.set_avail_event(self.avail_idx),
            false => self.ring.set_used_flags(0),
        }
        full_fence();
        if self.ring.avail_idx() == self.avail_idx { Armed::Waits } else { Armed::Work }
    }

    /// With event indices nothing is written: the event lies behind the driver's index after the
    /// first notification, and is passed again 2^16 chains later.
    fn disarm(&mut self) {
        if !self.event_idx {
            self.ring.set_used_flags(USED_NO_NOTIFY);
        }
    }

    fn log_event(&self, Logged { log, used }: &Logged) {
        let Some(at) = used else { return };
        match self.event_idx {
            true => log.mark(at.wrapping_add(4 + 8 * u64::from(self.size)), 2),
            false => log.mark(*at, 4),
        }
    }

    fn set_out_of_buffers(&mut self, _: u16) {
        self.out_of_buffers_at = Some(self.avail_idx);
    }

    #[inline(always)]
    fn out_of_buffers(&mut self) -> bool {
        if self.out_of_buffers_at == Some(self.avail_idx) {
            return true;
        }
        self.out_of_buffers_at = None;
        false
    }

    fn entry(&self, bytes: [u8; Desc::LEN], _: u16, _: u16) -> Desc {
        let word = u128::from_le_bytes(bytes);
        Desc { addr: word as u64, len: (word >> 64) as u32, flags: (word >> 96) as u16, next: (word >> 112) as u16 }
    }
}
