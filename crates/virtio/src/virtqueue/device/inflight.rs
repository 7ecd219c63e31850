//! In-flight state: memory that outlives the device, and that records which chains it has taken and not given back.
//!
//! The front end asks for the region (`GET_INFLIGHT_FD`), keeps it, and gives it to the back end that follows
//! (`SET_INFLIGHT_FD`). Per queue, with the specification's names:
//!
//! ```text
//!   0  features u64   0
//!   8  version u16    1; 0 in a region that no back end has used
//!  10  desc_num u16   entries that follow
//!  12  last_batch_head u16   head of the chain that was given back last
//!  14  used_idx u16   the used index up to which the entries are right
//!  16  desc_num entries of 16 bytes:  inflight u8 | padding | next u16 (at 6) | counter u64 (at 8)
//! ```
//!
//! Netmem's device takes chains in order and gives them back in order. If it has taken a chain and not given it back,
//! the chain follows the used index in the available ring. The next back end starts at the used index, and so takes
//! each of these chains exactly once. Therefore a running queue writes no entry, and only keeps `used_idx` right: one
//! store per publication. Entries matter when the device follows another back end, which may have given chains back out
//! of order: the chains that are marked in flight are taken first, in the order of their counters, and their marks are
//! cleared as the specification says, so that the device may itself be killed meanwhile.
//!
//! The front end can write the region at any time. Every word is read once and checked. A head that is out of range
//! ends a list, and a false mark makes the device give back a chain that the driver did not post. The driver's own
//! front end has then harmed the driver.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::device::DeviceError;
use crate::guest_memory::mapping::Mapping;
use crate::virtqueue::{PackedDesc, PackedRing, Position, SplitRing};

/// Bytes of the header, and of each entry, of a split queue's part.
const SPLIT: usize = 16;
/// The same of a packed queue's.
const PACKED: usize = 32;
/// The alignment of a queue's part of the region, as other back ends have it.
const ALIGN: usize = 64;
const VERSION: u16 = 1;

/// The in-flight region of a front end: one part per queue.
#[derive(Clone, Debug)]
pub(crate) struct InflightRegion {
    map: Arc<Mapping>,
    queues: u16,
    queue_size: u16,
}

/// Bytes of one queue's part.
fn stride(queue_size: u16, packed: bool) -> usize {
    // Header and entries are of the same size.
    let each = if packed { PACKED } else { SPLIT };
    (each + each * usize::from(queue_size)).next_multiple_of(ALIGN)
}

impl InflightRegion {
    /// Bytes of a region for `queues` queues of `queue_size` entries.
    pub(crate) fn bytes(queues: u16, queue_size: u16, packed: bool) -> u64 {
        (stride(queue_size, packed) * usize::from(queues)) as u64
    }

    /// # Errors
    ///
    /// [`DeviceError::InflightShape`]: `map` is too small for the queues.
    pub(crate) fn new(map: Mapping, queues: u16, queue_size: u16, packed: bool) -> Result<Self, DeviceError> {
        let bytes = Self::bytes(queues, queue_size, packed);
        if queue_size == 0 || bytes > map.len as u64 || !map.at.addr().is_multiple_of(8) {
            return Err(DeviceError::InflightShape { queues, queue_size, bytes: map.len as u64 });
        }
        Ok(Self { map: Arc::new(map), queues, queue_size })
    }

    /// The part of queue `index`, for a ring of `size` entries. `None` if the region has no part for it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InflightRing`]: the part does not fit the ring, or is of a version that is not known here.
    pub(crate) fn queue(&self, index: usize, size: u16, packed: bool) -> Result<Option<Part>, DeviceError> {
        if index >= usize::from(self.queues) {
            return Ok(None);
        }
        let bytes = stride(self.queue_size, packed);
        let wrong = |version| DeviceError::InflightRing { ring: index, size, entries: self.queue_size, version };
        // The ring's format may have changed since the region was received.
        if (index + 1) * bytes > self.map.len {
            return Err(wrong(0));
        }
        let part = Part { map: Arc::clone(&self.map), offset: index * bytes, bytes, entries: self.queue_size };
        let version = part.version().load(Ordering::Relaxed);
        if size > self.queue_size || version > VERSION {
            return Err(wrong(version));
        }
        Ok(Some(part))
    }
}

/// One queue's part of the region.
#[derive(Debug)]
pub(crate) struct Part {
    map: Arc<Mapping>,
    offset: usize,
    bytes: usize,
    entries: u16,
}

impl Part {
    fn at<T>(&self, offset: usize) -> &T {
        debug_assert!(offset + size_of::<T>() <= self.bytes);
        // SAFETY: *mapped*; `InflightRegion::queue` checked that the mapping holds the part, and `new` that it is aligned to 8
        // bytes; `offset` lies within the part and is a multiple of the size of `T`, which is an atomic.
        unsafe { &*self.map.at.add(self.offset + offset).cast::<T>() }
    }

    fn version(&self) -> &AtomicU16 {
        self.at(8)
    }

    fn desc_num(&self) -> &AtomicU16 {
        self.at(10)
    }

    fn last_batch_head(&self) -> &AtomicU16 {
        self.at(12)
    }

    fn used_idx(&self) -> &AtomicU16 {
        self.at(14)
    }

    fn inflight(&self, head: u16) -> &AtomicU8 {
        self.at(SPLIT + SPLIT * usize::from(head))
    }

    fn next(&self, head: u16) -> &AtomicU16 {
        self.at(SPLIT + SPLIT * usize::from(head) + 6)
    }

    fn counter(&self, head: u16) -> &AtomicU64 {
        self.at(SPLIT + SPLIT * usize::from(head) + 8)
    }

    /// The chains in flight, in the order in which they were taken, for a ring of `size` entries at used index `used`.
    fn recover(&self, size: u16, used: u16) -> Vec<u16> {
        if self.version().load(Ordering::Relaxed) != VERSION {
            self.desc_num().store(self.entries, Ordering::Relaxed);
            self.used_idx().store(used, Ordering::Relaxed);
            self.version().store(VERSION, Ordering::Release);
            return Vec::new();
        }
        // The earlier back end ended after it had published a batch and before it had cleared the marks of the batch's
        // chains.
        let batch = used.wrapping_sub(self.used_idx().load(Ordering::Relaxed));
        if batch <= size {
            let mut head = self.last_batch_head().load(Ordering::Relaxed);
            for _ in 0..batch {
                if head >= self.entries {
                    break;
                }
                self.inflight(head).store(0, Ordering::Relaxed);
                head = self.next(head).load(Ordering::Relaxed);
            }
        }
        self.used_idx().store(used, Ordering::Release);
        let marked = (0..size).filter(|&head| self.inflight(head).load(Ordering::Relaxed) == 1);
        let mut chains: Vec<_> = marked.map(|head| (self.counter(head).load(Ordering::Relaxed), head)).collect();
        chains.sort_unstable();
        chains.into_iter().map(|(_, head)| head).collect()
    }
}

/// The in-flight state of a running split queue.
#[derive(Debug)]
pub(crate) struct SplitInflight {
    part: Part,
    /// The chains of the earlier back end that must still be given back, in their order. They are taken at the
    /// positions from `start` on, in place of the available ring's entries there.
    again: Vec<u16>,
    start: u16,
}

impl SplitInflight {
    /// For a ring of `size` entries, whose used index is `used`.
    pub(crate) fn new(part: Part, size: u16, used: u16) -> Self {
        let again = part.recover(size, used);
        if !again.is_empty() {
            tracing::info!("{} chains were in flight, and are taken again", again.len());
        }
        Self { part, again, start: used }
    }

    /// Whether there are chains left that must be taken again.
    pub(crate) fn has_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// The head of the chain that is taken again at position `at`. It is out of the front end's region, and not checked.
    #[inline]
    pub(crate) fn again(&self, at: u16) -> Option<u16> {
        self.again.get(usize::from(at.wrapping_sub(self.start))).copied()
    }

    /// Called before the used index goes from `from` to `to`. Links the chains that are given back, so that the next
    /// back end can clear their marks.
    pub(crate) fn before(&self, ring: &SplitRing, from: u16, to: u16) {
        if !self.has_again() {
            return;
        }
        for head in given_back(ring, from, to).filter(|&head| head < self.part.entries) {
            let last = self.part.last_batch_head().load(Ordering::Relaxed);
            self.part.next(head).store(last, Ordering::Relaxed);
            self.part.last_batch_head().store(head, Ordering::Release);
        }
    }

    /// Called after the used index went from `from` to `to`; the next chain is at `next`.
    pub(crate) fn after(&mut self, ring: &SplitRing, from: u16, to: u16, next: u16) {
        if self.has_again() {
            for head in given_back(ring, from, to).filter(|&head| head < self.part.entries) {
                self.part.inflight(head).store(0, Ordering::Relaxed);
            }
            if usize::from(next.wrapping_sub(self.start)) >= self.again.len() {
                self.again = Vec::new();
            }
        }
        self.part.used_idx().store(to, Ordering::Release);
    }
}

/// The heads in the used ring from `from` to `to`.
fn given_back(ring: &SplitRing, from: u16, to: u16) -> impl Iterator<Item = u16> {
    (0..to.wrapping_sub(from)).filter_map(move |n| u16::try_from(ring.used_entry(from.wrapping_add(n)).0).ok())
}

/// The in-flight state of a running packed queue. The region's part has, with the specification's names:
///
/// ```text
///   0  features u64 | 8 version u16 | 10 desc_num u16
///  12  free_head u16        first entry that is free; each names the next one
///  14  old_free_head u16    the same before the current batch
///  16  used_idx u16         where the next used descriptor goes, with used_wrap_counter u8 (at 20)
///  18  old_used_idx u16     the same before the current batch, with old_used_wrap_counter u8 (at 21)
///  32  desc_num entries of 32 bytes:  inflight u8 | next u16 (at 2) | last u16 | num u16 | counter u64 | id u16 | flags u16
///      | len u32 | addr u64
/// ```
///
/// A batch is published by one store, the flags of its first used descriptor. If that store is not seen in the ring, the
/// batch is rolled back. A chain that is a batch by itself is then still in the ring, so it needs no entry. The later chains of
/// a longer batch are already overwritten by their used descriptors, so copies of all its chains are kept in entries, from
/// before the first is overwritten until after the batch is published.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    part: Part,
    size: u16,
    /// Where the queue begins: the next chain to take, and the next used descriptor.
    start: (Position, Position),
    /// The chains of the earlier back end that must still be given back: one behind the other, from the used position on.
    again: VecDeque<Again>,
    /// The free list, of which the region has a copy.
    free_head: u16,
    next: Vec<u16>,
    counter: u64,
    /// Used descriptors of the current batch, except the first.
    held: Vec<(Position, PackedDesc)>,
    /// Entries of the current batch.
    batch: Vec<u16>,
    /// The used position after the current batch.
    used: Position,
}

/// A chain that is taken again.
#[derive(Debug)]
struct Again {
    /// The position at which it is given back.
    at: Position,
    entry: u16,
    last: u16,
    chain: Vec<PackedDesc>,
}

impl PackedInflight {
    /// For `ring`, whose front end says that it stands at `base`.
    ///
    /// A batch that the earlier back end has not published is rolled back in the ring. `rolled_back` is then called with the
    /// first position and the number of descriptors that may have been written, for the dirty log.
    pub(crate) fn new(
        part: Part,
        ring: &PackedRing,
        base: [Position; 2],
        rolled_back: impl FnOnce(Position, u32),
    ) -> Self {
        let (size, entries) = (ring.size(), part.entries);
        let mut state = Self {
            size,
            start: (base[0], base[1]),
            again: VecDeque::new(),
            free_head: 0,
            next: vec![0; entries.into()],
            counter: 0,
            held: Vec::new(),
            batch: Vec::new(),
            used: base[1],
            part,
        };
        if state.part.version().load(Ordering::Relaxed) == VERSION {
            state.recover(ring, rolled_back);
        }
        // The entries that are not in flight are free.
        let mut used = vec![false; entries.into()];
        for entry in state.again.iter().flat_map(|again| state.entries_of(again)) {
            used[usize::from(entry)] = true;
        }
        let free: Vec<u16> = (0..entries).filter(|&entry| !used[usize::from(entry)]).collect();
        for (n, &entry) in free.iter().enumerate() {
            state.inflight(entry).store(0, Ordering::Relaxed);
            state.set_next(entry, free.get(n + 1).copied().unwrap_or(entries));
        }
        state.free_head = free.first().copied().unwrap_or(entries);
        state.part.desc_num().store(entries, Ordering::Relaxed);
        state.store(false);
        state.store(true);
        state.part.version().store(VERSION, Ordering::Release);
        state
    }

    /// Reads the state that the earlier back end has left. A position or an entry that the ring cannot have is ignored.
    fn recover(&mut self, ring: &PackedRing, rolled_back: impl FnOnce(Position, u32)) {
        let position = |index: usize, wrap: usize| {
            let wrap = u16::from(self.part.at::<AtomicU8>(wrap).load(Ordering::Relaxed) & 1) << 15;
            let index = self.part.at::<AtomicU16>(index).load(Ordering::Relaxed);
            (index < self.size).then(|| Position::from_bits(index | wrap))
        };
        let (Some(new), Some(old)) = (position(16, 20), position(18, 21)) else { return };
        let shown = new == old || !ring.used_desc(old.offset()).is_available(old);
        let used = if shown { new } else { old };
        if !shown {
            rolled_back(old, roll_back(ring, old, new));
        }
        let mut free = self.part.at::<AtomicU16>(if shown { 12 } else { 14 }).load(Ordering::Relaxed);
        for _ in 0..self.part.entries {
            if free >= self.part.entries {
                break;
            }
            self.inflight(free).store(0, Ordering::Relaxed);
            free = self.half(free, 2).load(Ordering::Relaxed);
        }
        let marked = (0..self.part.entries).filter(|&e| self.inflight(e).load(Ordering::Relaxed) == 1);
        let mut marked: Vec<_> = marked.map(|e| (self.word(e, 8).load(Ordering::Relaxed), e)).collect();
        marked.sort_unstable();
        let (mut at, mut left) = (used, self.size);
        let mut seen = vec![false; self.part.entries.into()];
        for (counter, entry) in marked {
            self.counter = self.counter.max(counter.wrapping_add(1));
            let Some(again) = self.chain(entry, at, left, &mut seen) else { continue };
            left -= again.chain.len() as u16;
            at = at.step(again.chain.len() as u16, self.size);
            self.again.push_back(again);
        }
        if !self.again.is_empty() {
            tracing::info!("{} chains were in flight, and are taken again", self.again.len());
        }
        // The chains that are taken again have the positions from the used one on, and the ring goes on behind them.
        (self.start, self.used) = ((used, used), used);
    }

    /// The chain of an entry that is marked, if its descriptors are entries that no other chain has, and `left` at most.
    fn chain(&self, entry: u16, at: Position, left: u16, seen: &mut [bool]) -> Option<Again> {
        let num = self.half(entry, 6).load(Ordering::Relaxed);
        if num == 0 || num > left {
            return None;
        }
        let (mut chain, mut this, mut last) = (Vec::new(), entry, entry);
        for _ in 0..num {
            if std::mem::replace(seen.get_mut(usize::from(this))?, true) {
                return None;
            }
            chain.push(PackedDesc {
                addr: self.word(this, 24).load(Ordering::Relaxed),
                len: self.part.at::<AtomicU32>(self.offset(this) + 20).load(Ordering::Relaxed),
                id: self.half(this, 16).load(Ordering::Relaxed),
                flags: self.half(this, 18).load(Ordering::Relaxed),
            });
            (last, this) = (this, self.half(this, 2).load(Ordering::Relaxed));
        }
        Some(Again { at, entry, last, chain })
    }

    fn entries_of(&self, again: &Again) -> Vec<u16> {
        let next = |&entry: &u16| Some(self.half(entry, 2).load(Ordering::Relaxed)).filter(|&e| e < self.part.entries);
        std::iter::successors(Some(again.entry), next).take(again.chain.len()).collect()
    }

    fn offset(&self, entry: u16) -> usize {
        PACKED + PACKED * usize::from(entry)
    }

    fn inflight(&self, entry: u16) -> &AtomicU8 {
        self.part.at(self.offset(entry))
    }

    fn half(&self, entry: u16, field: usize) -> &AtomicU16 {
        self.part.at(self.offset(entry) + field)
    }

    fn word(&self, entry: u16, field: usize) -> &AtomicU64 {
        self.part.at(self.offset(entry) + field)
    }

    fn set_next(&mut self, entry: u16, next: u16) {
        self.next[usize::from(entry)] = next;
        self.half(entry, 2).store(next, Ordering::Relaxed);
    }

    /// Writes the free list's head and the used position, or (`old`) those before the current batch.
    fn store(&self, old: bool) {
        let n = usize::from(old);
        self.part.at::<AtomicU16>(12 + 2 * n).store(self.free_head, Ordering::Relaxed);
        self.part.at::<AtomicU8>(20 + n).store(self.used.wrap().into(), Ordering::Relaxed);
        self.part.at::<AtomicU16>(16 + 2 * n).store(self.used.offset(), Ordering::Release);
    }

    /// Where the queue begins: the next chain to take, and the next used descriptor.
    pub(crate) fn start(&self) -> (Position, Position) {
        self.start
    }

    /// Whether there are chains left that must be taken again.
    pub(crate) fn has_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// The chain that is taken again at position `at`: at least one descriptor, out of the front end's region, and not
    /// checked.
    pub(crate) fn again(&self, at: Position) -> Option<&[PackedDesc]> {
        // A position is looked up for each chain and for each of its descriptors, and there may be 32,768.
        let first = self.again.front()?.at;
        let behind = |again: &Again| again.at.since(first, self.size);
        let n = self.again.binary_search_by_key(&at.since(first, self.size), behind).ok()?;
        Some(&self.again[n].chain)
    }

    /// Adds a used descriptor to the current batch, which is not its first.
    pub(crate) fn hold(&mut self, at: Position, used: PackedDesc) {
        self.held.push((at, used));
    }

    /// Called before the first used descriptor of a batch from `from` to `to` is written. Writes the others.
    pub(crate) fn before(&mut self, ring: &PackedRing, from: Position, to: Position) {
        let held = std::mem::take(&mut self.held);
        let ends = held.iter().map(|&(at, _)| at).chain([to]);
        let chains: Vec<_> = [from].into_iter().chain(held.iter().map(|&(at, _)| at)).zip(ends).collect();
        let mut back = Vec::new();
        for &(at, end) in &chains {
            if self.again.front().is_some_and(|again| again.at == at) {
                back.extend(self.again.pop_front().map(|again| (again.entry, again.last)));
            } else if !held.is_empty() {
                back.extend(self.keep(ring, at, end.since(at, self.size)));
            }
        }
        self.part.at::<AtomicU16>(14).store(self.free_head, Ordering::Release);
        for (entry, last) in back {
            self.set_next(last, self.free_head);
            self.free_head = entry;
            self.batch.push(entry);
        }
        self.used = to;
        self.store(false);
        for &(at, d) in held.iter().rev() {
            ring.set_used_desc(at.offset(), d);
        }
        self.held = held;
        self.held.clear();
    }

    /// Keeps copies of the `n` descriptors of the chain at `at`. Returns the first and the last entry; `None` if there
    /// are too few, which happens if the driver changes its flags meanwhile.
    fn keep(&mut self, ring: &PackedRing, at: Position, n: u32) -> Option<(u16, u16)> {
        let entry = self.free_head;
        let (mut last, mut free, mut at) = (entry, entry, at);
        for _ in 0..n {
            last = free;
            free = *self.next.get(usize::from(last))?;
            let d = ring.desc(at.offset());
            self.word(last, 24).store(d.addr, Ordering::Relaxed);
            self.part.at::<AtomicU32>(self.offset(last) + 20).store(d.len, Ordering::Relaxed);
            self.half(last, 16).store(d.id, Ordering::Relaxed);
            self.half(last, 18).store(d.flags, Ordering::Relaxed);
            at = at.step(1, self.size);
        }
        self.half(entry, 4).store(last, Ordering::Relaxed);
        self.half(entry, 6).store(n as u16, Ordering::Relaxed);
        self.word(entry, 8).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.inflight(entry).store(1, Ordering::Release);
        self.free_head = free;
        Some((entry, last))
    }

    /// Called after the batch was published.
    pub(crate) fn after(&mut self) {
        for entry in std::mem::take(&mut self.batch) {
            self.inflight(entry).store(0, Ordering::Release);
        }
        self.store(true);
    }
}

/// Rolls back a batch. The earlier back end ended while it published the used descriptors from `old` to `new`, and has
/// not written the first. Those that it has written already must not be taken for descriptors of this back end. Returns how
/// many there are at most, from `old` on.
fn roll_back(ring: &PackedRing, old: Position, new: Position) -> u32 {
    let size = ring.size();
    let count = new.since(old, size).min(size.into());
    for n in 1..count {
        let at = old.step(n as u16, size);
        let d = ring.used_desc(at.offset());
        if d.is_used(at) {
            ring.set_used_desc(at.offset(), PackedDesc { flags: at.available(), ..d });
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_memory::dirty_log::DirtyLog;
    use crate::net::feature;
    use crate::virtqueue::Negotiated;
    use crate::virtqueue::device::{BASE, Logged, MappedRing, PackedSide, Side, Start};
    use crate::virtqueue::{DESC_NEXT, DESC_WRITE, PackedLayout};

    const SIZE: u16 = 16;

    /// A packed ring, and an in-flight region for it.
    struct Bench {
        block: Vec<u64>,
        region: InflightRegion,
    }

    impl Bench {
        fn new() -> Self {
            let file = rustix::fs::memfd_create(c"netmem-test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
            let bytes = InflightRegion::bytes(1, SIZE, true);
            rustix::fs::ftruncate(&file, bytes).unwrap();
            let map = Mapping::new("a test", &file, 0, bytes).unwrap();
            let block = vec![0; PackedLayout::new(SIZE).total / 8 + 16];
            Self { block, region: InflightRegion::new(map, 1, SIZE, true).unwrap() }
        }

        fn ring(&self) -> PackedRing {
            let base = self.block.as_ptr().cast_mut().cast::<u8>();
            let base = base.wrapping_add(base.align_offset(PackedLayout::ALIGN));
            // SAFETY: the block is large enough, aligned, and outlives the rings of the tests.
            unsafe { PackedRing::from_layout(base, SIZE) }
        }

        fn part(&self) -> Part {
            self.region.queue(0, SIZE, true).unwrap().unwrap()
        }

        fn inflight(&self) -> PackedInflight {
            PackedInflight::new(self.part(), &self.ring(), [Position::START; 2], |_, _| {})
        }

        /// Makes a chain of descriptors available at `at`, of which the first has address `addr`.
        fn post(&self, at: Position, addr: u64, id: u16, descs: u16) {
            for n in (0..descs).rev() {
                let (at, more) = (at.step(n, SIZE), if n + 1 < descs { DESC_NEXT } else { 0 });
                let flags = DESC_WRITE | more | at.available();
                self.ring().set_desc(at.offset(), PackedDesc { addr: addr + u64::from(n), len: 100, id, flags });
            }
        }

        fn marks(&self) -> usize {
            let part = self.part();
            (0..SIZE)
                .filter(|&e| part.at::<AtomicU8>(PACKED + PACKED * usize::from(e)).load(Ordering::Relaxed) != 0)
                .count()
        }
    }

    /// The used descriptor that the device writes at `at`.
    fn used(at: Position, id: u16) -> PackedDesc {
        PackedDesc { addr: 0, len: 50, id, flags: at.used() | DESC_WRITE }
    }

    /// A back end ends at each point of a batch of three chains, anywhere in the ring: the next one takes all of them
    /// again, with the addresses that the driver wrote, or none.
    #[test]
    fn a_batch_that_was_cut_off_is_rolled_back_or_shown() {
        for start in 0..2 * SIZE {
            for shown in [false, true] {
                let bench = Bench::new();
                // Chains of one descriptor each, up to the beginning of the batch.
                let mut at = Position::START;
                let mut inflight = bench.inflight();
                for _ in 0..start {
                    inflight.before(&bench.ring(), at, at.step(1, SIZE));
                    inflight.after();
                    at = at.step(1, SIZE);
                }
                let places = [(at, 7, 1), (at.step(1, SIZE), 3, 2), (at.step(3, SIZE), 9, 1)];
                for (at, id, descs) in places {
                    bench.post(at, 1000 * u64::from(id), id, descs);
                }
                for &(at, id, _) in &places[1..] {
                    inflight.hold(at, used(at, id));
                }
                let end = at.step(4, SIZE);
                inflight.before(&bench.ring(), at, end);
                assert_eq!(bench.marks(), 3);
                if shown {
                    bench.ring().set_used_desc(at.offset(), used(at, 7));
                }
                drop(inflight);
                let next = bench.inflight();
                if shown {
                    assert_eq!((next.start(), next.has_again(), bench.marks()), ((end, end), false, 0));
                    continue;
                }
                assert_eq!(next.start(), (at, at));
                for (at, id, descs) in places {
                    let chain = next.again(at).unwrap();
                    assert_eq!(chain.len(), usize::from(descs));
                    assert_eq!((chain[0].addr, chain[chain.len() - 1].id), (1000 * u64::from(id), id));
                    let d = bench.ring().used_desc(at.offset());
                    assert!(!d.is_used(at), "the driver would take it for used");
                }
                // They are given back one at a time.
                let mut next = next;
                for (n, (at, _, descs)) in places.into_iter().enumerate() {
                    next.before(&bench.ring(), at, at.step(descs, SIZE));
                    next.after();
                    assert_eq!((bench.marks(), next.has_again()), (2 - n, n < 2));
                }
                drop(next);
                assert_eq!(bench.inflight().start(), (end, end));
            }
        }
    }

    /// The positions that are rolled back are noted in the dirty log before the ring is used.
    #[test]
    fn what_is_rolled_back_is_noted() {
        let bench = Bench::new();
        let mut inflight = bench.inflight();
        let at = Position::START;
        (0..3).for_each(|n| bench.post(at.step(n, SIZE), 0, n, 1));
        (1..3).for_each(|n| inflight.hold(at.step(n, SIZE), used(at.step(n, SIZE), n)));
        inflight.before(&bench.ring(), at, at.step(3, SIZE));
        drop(inflight);
        let file = rustix::fs::memfd_create(c"netmem-log", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let log = Arc::new(DirtyLog::new(Mapping::new("a test", &file, 0, 4096).unwrap(), Arc::default()));
        let start = Start {
            base: BASE,
            negotiated: Negotiated::new(feature::VERSION_1 | feature::RING_PACKED),
            splits: false,
            inflight: Some(bench.part()),
            logged: Some(Logged { log, used: Some(3 * 4096) }),
        };
        let ring = MappedRing { ring: bench.ring(), descriptors: 3 * 4096, event: 0 };
        let _side = <PackedSide as Side>::new(ring, start);
        assert!(!bench.ring().used_desc(1).is_used(at.step(1, SIZE)), "it is rolled back");
        let mut bits = [0];
        rustix::io::pread(&file, &mut bits, 0).unwrap();
        assert_eq!(bits, [1 << 3]);
    }

    /// Each chain of a region of the largest size is found at its position, and given back once. Linear searches would make
    /// this test run for minutes.
    #[test]
    fn a_region_of_the_largest_size() {
        const LARGEST: u16 = 32768;
        let mut bench = Bench::new();
        let file = rustix::fs::memfd_create(c"netmem-test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        let bytes = InflightRegion::bytes(1, LARGEST, true);
        rustix::fs::ftruncate(&file, bytes).unwrap();
        bench.region = InflightRegion::new(Mapping::new("a test", &file, 0, bytes).unwrap(), 1, LARGEST, true).unwrap();
        bench.block = vec![0; PackedLayout::new(LARGEST).total / 8 + 16];
        let base = bench.block.as_ptr().cast_mut().cast::<u8>();
        // SAFETY: as in `Bench::ring`.
        let ring = unsafe { PackedRing::from_layout(base.add(base.align_offset(PackedLayout::ALIGN)), LARGEST) };
        let part = || bench.region.queue(0, LARGEST, true).unwrap().unwrap();
        let state = part();
        for entry in 0..LARGEST {
            let at = PACKED + PACKED * usize::from(entry);
            state.at::<AtomicU8>(at).store(1, Ordering::Relaxed);
            state.at::<AtomicU16>(at + 6).store(1, Ordering::Relaxed);
            state.at::<AtomicU64>(at + 8).store(entry.into(), Ordering::Relaxed);
            state.at::<AtomicU16>(at + 16).store(entry, Ordering::Relaxed);
        }
        // The free list is empty, and the used positions are the first.
        state.at::<AtomicU16>(12).store(LARGEST, Ordering::Relaxed);
        state.at::<AtomicU16>(20).store(0x0101, Ordering::Relaxed);
        state.version().store(VERSION, Ordering::Relaxed);
        let mut inflight = PackedInflight::new(part(), &ring, [Position::START; 2], |_, _| {});
        assert_eq!(inflight.again.len(), LARGEST.into());
        for n in 0..LARGEST {
            let (at, to) = (Position::START.step(n, LARGEST), Position::START.step(n + 1, LARGEST));
            assert_eq!(inflight.again(at).map(|chain| (chain.len(), chain[0].id)), Some((1, n)));
            assert!(inflight.again(to).is_some() == (n + 1 < LARGEST));
            inflight.before(&ring, at, to);
            inflight.after();
        }
        assert!(!inflight.has_again());
    }

    /// A region of any bytes gives chains that the ring can have, and no more.
    #[test]
    fn a_packed_region_that_lies() {
        let mut word = 0x1234_5678_9abc_def1_u64;
        let mut random = move || {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            word >> 8
        };
        let mut chains = 0;
        for _ in 0..3000 {
            let bench = Bench::new();
            let part = bench.part();
            for at in (0..PACKED + PACKED * usize::from(SIZE)).step_by(2) {
                // Mostly small numbers, so that some are valid.
                let value = if random() % 8 == 0 { random() } else { random() % 4 } as u16;
                part.at::<AtomicU16>(at).store(value, Ordering::Relaxed);
            }
            part.version().store(VERSION, Ordering::Relaxed);
            let inflight = bench.inflight();
            let descs: usize = inflight.again.iter().map(|again| again.chain.len()).sum();
            assert!(descs <= usize::from(SIZE));
            assert!(inflight.start.0.offset() < SIZE && inflight.start.1.offset() < SIZE);
            chains += inflight.again.len();
        }
        assert!(chains > 100, "{chains}");
    }
}
