//! The device's end of a split virtqueue: chains are taken in order, walked within bounds, and given back in order.
//!
//! Nothing that the driver wrote is believed: every word is read once, into a private copy, and the copy is checked.
//! Whatever is wrong is a [`DriverFault`]; the caller then never touches the ring again.

use std::marker::PhantomData;
use std::sync::Arc;

use super::DriverFault;
use super::inflight::{Inflight, Part};
use super::log::DirtyLog;
use super::memory::{MemoryTable, View};
use crate::net::VnetHdr;
use crate::virtqueue::event::full_fence;
use crate::virtqueue::{AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc, SplitRing, USED_NO_NOTIFY};

/// What the buffers of a chain must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// Only readable ones: a frame from the driver.
    Read,
    /// Only writable ones: room for a frame to the driver.
    Write,
    /// Readable ones, then writable ones: a command and its answer.
    ReadThenWrite,
}

/// A piece of the driver's memory, of the table that is borrowed for `'t`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer<'t> {
    pub(super) host: *mut u8,
    pub(super) len: usize,
    pub(super) write: bool,
    /// Its address as the driver says it.
    pub(super) guest: u64,
    table: PhantomData<&'t MemoryTable>,
}

/// Room for the buffers of a chain, kept between passes to spare an allocation. It has no buffers then.
#[derive(Debug, Default)]
pub(super) struct Buffers(Vec<Buffer<'static>>);

// SAFETY: it is empty between passes, and a pass is on one thread.
unsafe impl Send for Buffers {}

impl Buffers {
    /// The room, for a pass.
    pub(super) fn lend<'t>(&mut self) -> Vec<Buffer<'t>> {
        std::mem::take(&mut self.0)
    }

    /// Takes the room back. The buffers are forgotten, because no address outlives its pass.
    pub(super) fn put(&mut self, mut room: Vec<Buffer<'_>>) {
        room.clear();
        // The elements, of which there are none, get another lifetime; the allocation stays.
        self.0 = room.into_iter().map(|b| Buffer { table: PhantomData, ..b }).collect();
    }
}

/// Chains that are looked at together: their cache lines are waited for together, too.
pub(super) const GROUP: usize = 64;

/// A chain of one buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole {
    pub(super) host: *mut u8,
    pub(super) len: u32,
    pub(super) head: u16,
}

impl Whole {
    pub(super) const NONE: Self = Self { host: std::ptr::null_mut(), len: 0, head: 0 };
}

/// Where the dirty log notes what a queue writes.
#[derive(Debug)]
struct Logged {
    log: Arc<DirtyLog>,
    /// Guest address of the used ring, if writes to it are noted too.
    used: Option<u64>,
}

/// What a queue is started with.
#[derive(Debug)]
pub(super) struct Start {
    /// The available index to begin at; in-flight state takes precedence over it.
    pub(super) base: u16,
    /// Bytes of the virtio header in front of each frame: [`crate::net::VnetHdr::LEN`], or two less for a legacy driver.
    pub(super) header: usize,
    pub(super) inflight: Option<Part>,
}

/// A running queue.
#[derive(Debug)]
pub(super) struct Queue {
    ring: SplitRing,
    size: u16,
    header: usize,
    /// There while the front end wants to know which pages the device writes.
    logged: Option<Logged>,
    inflight: Option<Inflight>,
    /// Whether there is `logged` or `inflight`, for the hot paths to test.
    watched: bool,
    /// See [`Self::plain`].
    plain: bool,
    /// The number of the region that the last buffer was in: where the next pass looks first.
    region: usize,
    /// The next chain to take.
    next_avail: u16,
    /// The driver's index as last read; at most `size` ahead of `next_avail`.
    avail_idx: u16,
    /// Where the next used element goes.
    next_used: u16,
    /// The used index that the driver sees.
    published: u16,
    /// The driver's index at which the buffers were too few for the frame at hand.
    starved_at: Option<u16>,
}

impl Queue {
    /// Takes over `ring`.
    pub(super) fn new(ring: SplitRing, start: Start) -> Self {
        let used = ring.used_idx();
        ring.set_used_flags(USED_NO_NOTIFY);
        let (size, watched) = (ring.size(), start.inflight.is_some());
        let (base, inflight, ring) = match start.inflight {
            Some(part) => {
                let (inflight, ring) = Inflight::new(part, ring, used);
                (used, Some(inflight), ring)
            }
            None => (start.base, None, ring),
        };
        Self {
            ring,
            size,
            header: start.header,
            logged: None,
            inflight,
            watched,
            plain: start.header == VnetHdr::LEN,
            region: 0,
            next_avail: base,
            avail_idx: base,
            next_used: used,
            published: used,
            starved_at: None,
        }
    }

    /// The same queue at other addresses, after the memory table was replaced.
    pub(super) fn moved(self, ring: SplitRing) -> Self {
        let Self { mut inflight, .. } = self;
        let ring = match &mut inflight {
            Some(inflight) => inflight.moved(ring),
            None => ring,
        };
        Self { ring, inflight, ..self }
    }

    /// From now on the device's writes are noted in `log`, or no longer. `used` is the guest address of the used ring.
    pub(super) fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<u64>) {
        self.logged = log.map(|log| Logged { log, used });
        self.watched = self.logged.is_some() || self.inflight.is_some();
        self.plain = self.logged.is_none() && self.header == VnetHdr::LEN;
        self.log_used_head();
    }

    /// Bytes of the virtio header in front of each frame.
    #[inline(always)]
    pub(super) fn header(&self) -> usize {
        self.header
    }

    /// Whether a frame may be copied into or out of a single buffer without more ado: its header is the usual one, and
    /// nothing is logged.
    #[inline(always)]
    pub(super) fn plain(&self) -> bool {
        self.plain
    }

    /// The first `len` bytes of `buffers` were written.
    pub(super) fn wrote(&self, buffers: &[Buffer<'_>], len: usize) {
        let Some(Logged { log, .. }) = &self.logged else { return };
        let mut left = len;
        for b in buffers {
            let n = left.min(b.len);
            log.mark(b.guest, n as u64);
            left -= n;
        }
    }

    /// The used ring's flags or index were written.
    fn log_used_head(&self) {
        if let Some(Logged { log, used: Some(at) }) = &self.logged {
            log.mark(*at, 4);
        }
    }

    /// The available index up to which chains were taken.
    pub(super) fn base(&self) -> u16 {
        self.next_avail
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Reads the driver's index, once, and says how many chains may be taken.
    #[inline]
    pub(super) fn refresh(&mut self) -> Result<u16, DriverFault> {
        if self.watched
            && let Some(inflight) = &mut self.inflight
        {
            inflight.refresh(&self.ring, self.next_avail);
        }
        let to = self.ring.avail_idx();
        let ahead = DriverFault::ahead(self.next_avail, to, self.size)?;
        self.avail_idx = to;
        Ok(ahead)
    }

    /// Chains that may be taken, as of the last [`Self::refresh`].
    #[inline(always)]
    pub(super) fn ahead(&self) -> u16 {
        self.avail_idx.wrapping_sub(self.next_avail)
    }

    /// The head of the chain `n` places after the next one.
    #[inline(always)]
    pub(super) fn head(&self, n: u16) -> Result<u16, DriverFault> {
        DriverFault::head(self.ring.avail_entry(self.next_avail.wrapping_add(n)), self.size)
    }

    #[inline(always)]
    pub(super) fn desc(&self, id: u16) -> Desc {
        self.ring.desc(id)
    }

    /// How a pass over this queue reaches memory.
    #[inline]
    pub(super) fn view<'t>(&self, memory: &'t MemoryTable) -> View<'t> {
        memory.view(self.region)
    }

    /// The pass is over.
    #[inline]
    pub(super) fn viewed(&mut self, memory: &View<'_>) {
        self.region = memory.index();
    }

    /// Looks ahead, over up to `most` chains of one writable buffer each, without taking them; says how many it found. The
    /// first one that is anything else, wrong ones too, ends it.
    #[inline(always)]
    pub(super) fn look_ahead(&self, memory: &mut View<'_>, most: u16, found: &mut [Whole; GROUP]) -> usize {
        let mut n = 0;
        while n < usize::from(most).min(GROUP) {
            let Ok(head) = self.head(n as u16) else { break };
            let d = self.desc(head);
            if d.flags != DESC_WRITE || d.len == 0 {
                break;
            }
            let Some(host) = memory.translate(d.addr, d.len) else { break };
            found[n] = Whole { host, len: d.len, head };
            n += 1;
        }
        n
    }

    /// Walks the chain at `head` and appends its buffers to `out`; says how many bytes they have. At most as many
    /// descriptors as the ring has are read. A buffer may span regions whose guest addresses meet: it becomes several.
    pub(super) fn chain<'t>(
        &self,
        memory: &mut View<'t>,
        head: u16,
        direction: Direction,
        out: &mut Vec<Buffer<'t>>,
    ) -> Result<u32, DriverFault> {
        let (mut id, mut total, mut writing) = (head, 0u64, direction == Direction::Write);
        for _ in 0..self.size {
            let d = self.ring.desc(id);
            if d.flags & DESC_INDIRECT != 0 {
                return Err(DriverFault::Indirect { id });
            }
            if d.len == 0 {
                return Err(DriverFault::ZeroLength { id });
            }
            let write = d.flags & DESC_WRITE != 0;
            if write != writing {
                if direction != Direction::ReadThenWrite || writing {
                    return Err(DriverFault::WrongDirection { id, flags: d.flags });
                }
                writing = true;
            }
            total += u64::from(d.len);
            if total > u64::from(u32::MAX) {
                return Err(DriverFault::HugeChain { head, len: total });
            }
            match memory.translate(d.addr, d.len) {
                Some(host) => {
                    out.push(Buffer { host, len: d.len as usize, write, guest: d.addr, table: PhantomData });
                }
                None => pieces(memory, id, &d, out)?,
            }
            if d.flags & DESC_NEXT == 0 {
                return Ok(total as u32);
            }
            id = DriverFault::next(d.next, self.size)?;
        }
        Err(DriverFault::ChainTooLong { head, size: self.size })
    }

    /// The next chain is taken, and goes back with `len` bytes written. The driver sees it after [`Self::publish`].
    #[inline(always)]
    pub(super) fn give_back(&mut self, head: u16, len: u32) {
        self.ring.set_used_entry(self.next_used, u32::from(head), len);
        self.next_used = self.next_used.wrapping_add(1);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Shows the driver everything given back so far.
    #[inline(always)]
    pub(super) fn publish(&mut self) {
        if self.published != self.next_used {
            if self.watched {
                return self.publish_watched();
            }
            self.published = self.next_used;
            self.ring.set_used_idx(self.next_used);
        }
    }

    /// The same with in-flight state or a dirty log.
    #[cold]
    fn publish_watched(&mut self) {
        let (from, to) = (self.published, self.next_used);
        self.published = to;
        if let Some(inflight) = &self.inflight {
            inflight.before(&self.ring, from, to);
        }
        self.ring.set_used_idx(to);
        if let Some(Logged { log, used: Some(at) }) = &self.logged {
            // Elements of 8 bytes behind flags and index. A batch that goes around the end is two runs.
            let (first, count) = (u64::from(from & (self.size - 1)), u64::from(to.wrapping_sub(from)));
            let straight = count.min(u64::from(self.size) - first);
            log.mark(at.wrapping_add(4 + 8 * first), 8 * straight);
            log.mark(at.wrapping_add(4), 8 * (count - straight));
        }
        self.log_used_head();
        if let Some(inflight) = &mut self.inflight
            && let Some(ring) = inflight.after(&self.ring, from, to, self.next_avail)
        {
            self.ring = ring;
        }
    }

    /// Whether the driver wants an interrupt for what was published.
    pub(super) fn wants_call(&self) -> bool {
        full_fence();
        self.ring.avail_flags() & AVAIL_NO_INTERRUPT == 0
    }

    /// Asks the driver to notify us, or not to.
    pub(super) fn want_kicks(&self, wanted: bool) {
        self.ring.set_used_flags(if wanted { 0 } else { USED_NO_NOTIFY });
        if self.watched {
            self.log_used_head();
        }
    }

    /// Remembers that the buffers at hand are too few.
    pub(super) fn starve(&mut self) {
        self.starved_at = Some(self.avail_idx);
    }

    /// Whether nothing has come since [`Self::starve`]; as of the last [`Self::refresh`].
    #[inline(always)]
    pub(super) fn starved(&mut self) -> bool {
        if self.starved_at == Some(self.avail_idx) {
            return true;
        }
        self.starved_at = None;
        false
    }
}

/// A buffer of several regions whose guest addresses meet.
#[cold]
fn pieces<'t>(memory: &mut View<'t>, id: u16, d: &Desc, out: &mut Vec<Buffer<'t>>) -> Result<(), DriverFault> {
    let (mut addr, mut left) = (d.addr, d.len);
    while left > 0 {
        let outside = DriverFault::OutsideTable { id, addr: d.addr, len: d.len };
        let (host, n) = memory.piece(addr, left).ok_or(outside)?;
        out.push(Buffer { host, len: n as usize, write: d.flags & DESC_WRITE != 0, guest: addr, table: PhantomData });
        left -= n;
        // A region's end does not wrap around, so this cannot either, except to an address in no region.
        addr = addr.wrapping_add(u64::from(n));
    }
    Ok(())
}
