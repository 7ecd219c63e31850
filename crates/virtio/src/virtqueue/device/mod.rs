//! The device's end of a virtqueue: chains are lent in the order in which the driver made them available, and given back in
//! the same order.
//!
//! ```text
//!   refresh ──► cursor ──► lend ──► Head + buffers ──► complete, or give_back_read ──► publish ──► should_notify
//!                 ▲          │                             │
//!                 └──────────┘                             └─ the queue's position moves here, and only here
//! ```
//!
//! * *A chain is given back once.* [`Head`] can neither be copied nor cloned, and both functions take it by value.
//! * *Bytes are written, then noted in the dirty log, then given back.* A front end that sees a page noted may copy it at once, and
//!   a driver that sees a chain may read it at once. Only [`complete`](DeviceQueue::complete) gives back a chain that was
//!   written, and it has the three steps in this order. A group of [`look_ahead`](DeviceQueue::look_ahead) is of a queue
//!   without a log.
//! * *A chain is not forgotten.* Lending does not move the queue: a caller walks ahead with a
//!   [cursor](DeviceQueue::cursor) of its own. If a head is dropped, its chain stays available, and the next pass finds
//!   it again.
//! * *No address outlives a pass.* A [`Buffer`] borrows the memory table ([`View`]).
//! * *Nothing that the driver wrote is trusted.* Every word is read once, into a private copy, and the functions of
//!   [`fault`](super::fault) check the copy. After a fault the caller does not touch the ring again.
//!
//! The format is the only generic: [`Side`] has the differences between split and packed rings. Everything else is
//! written once.
//!
//! # In order
//!
//! The device completes every chain in order, so it can offer `VIRTIO_F_IN_ORDER`. With that feature one used entry may stand
//! for a batch, with the id of the batch's last chain. An entry has one length, so only chains into which nothing is written
//! are batched: [`give_back_read`](DeviceQueue::give_back_read), for transmit. Received frames get one entry each.

use std::sync::Arc;

use netmem_pool::foreign::copy_out;

use self::inflight::InflightQueue;
use super::Armed;
pub(crate) use super::fault::Direction;
use super::fault::{ChainJudge, DriverFault};
use super::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc, Negotiated, SplitRing};
use crate::guest_memory::MemoryTable;
use crate::guest_memory::buffer::Buffer;
use crate::guest_memory::dirty_log::DirtyLog;
use crate::guest_memory::view::View;
use crate::net::VnetHdr;

pub(crate) mod inflight;
mod packed;
mod split;

pub(crate) use self::packed::{BASE, MappedRing, PackedSide, is_base};
pub(crate) use self::split::SplitSide;

/// A chain that is lent. It goes back with [`DeviceQueue::complete`] or [`DeviceQueue::give_back_read`]; a head that is dropped leaves its chain where it is.
#[derive(Debug)]
#[must_use = "the chain stays the queue's next one until its head is given back"]
pub(crate) struct Head<A> {
    /// The chain's position. Heads are given back in the order of their positions.
    at: A,
    /// The driver's id of the chain.
    id: u16,
    /// By how much the chain moves the queue's position: its descriptors in a packed ring, 1 in a split ring.
    span: u16,
    bytes: u32,
}

impl<A> Head<A> {
    /// Bytes in the chain's buffers.
    #[inline(always)]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// The driver's id of the chain.
    pub(crate) fn id(&self) -> u16 {
        self.id
    }
}

/// The chains that are lent for one frame. Only a frame of several chains allocates.
#[derive(Debug)]
pub(crate) struct Heads<A> {
    first: Head<A>,
    more: Vec<Head<A>>,
    bytes: usize,
}

impl<A> Heads<A> {
    /// One chain.
    #[inline]
    pub(crate) fn new(first: Head<A>) -> Self {
        Self { bytes: first.bytes(), first, more: Vec::new() }
    }

    /// Adds the chain that follows.
    pub(crate) fn push(&mut self, head: Head<A>) {
        self.bytes += head.bytes();
        self.more.push(head);
    }

    /// Bytes in the buffers of all chains.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Chains.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        1 + self.more.len()
    }

    /// How many of the chains have the first `bytes` bytes.
    #[inline]
    pub(crate) fn with_bytes(&self, bytes: usize) -> u16 {
        let (mut chains, mut held) = (1, self.first.bytes());
        for head in &self.more {
            if held >= bytes {
                break;
            }
            (held, chains) = (held + head.bytes(), chains + 1);
        }
        chains
    }
}

/// A descriptor of a chain, as a private copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link<A> {
    /// Flags other than those of [`Desc`] are cleared.
    desc: Desc,
    /// The descriptor's number in the ring, for messages.
    index: u16,
    /// Where the chain begins.
    at: A,
    /// The driver's id of the chain in this descriptor. In a packed ring, the id in the last descriptor counts.
    id: u16,
    /// Descriptors of the chain so far, as in [`Head`].
    span: u16,
}

/// The most chains that are looked at together, so that the thread waits for their cache lines at the same time.
pub(crate) const GROUP: usize = 64;

/// A chain of one buffer that lies in one region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole {
    /// The buffer's address in this process.
    pub(crate) host: *mut u8,
    /// Bytes in the buffer; when the chain is given back, bytes written.
    pub(crate) len: u32,
    id: u16,
}

/// The next chains of a queue, if each is one buffer in one region. [`DeviceQueue::look_ahead`] fills it.
#[derive(Debug)]
pub(crate) struct Group {
    chains: [Whole; GROUP],
    found: usize,
}

impl Group {
    /// A group of no chains.
    pub(crate) const EMPTY: Self =
        Self { chains: [Whole { host: std::ptr::null_mut(), len: 0, id: 0 }; GROUP], found: 0 };

    /// The chains that were found.
    #[inline(always)]
    pub(crate) fn chains(&mut self) -> &mut [Whole] {
        &mut self.chains[..self.found]
    }
}

/// The operations that differ between the formats.
pub(crate) trait Side: std::fmt::Debug + Sized {
    /// A ring in memory.
    type Ring: std::fmt::Debug;
    /// A place in the ring.
    type At: Copy + PartialEq + std::fmt::Debug;

    /// Takes over a ring.
    fn new(ring: Self::Ring, start: Start) -> Self;
    /// Tells it that the ring is at other addresses now.
    fn moved(self, ring: Self::Ring) -> Self;
    /// Entries of the ring.
    fn size(&self) -> u16;
    /// The answer to `GET_VRING_BASE`.
    fn base(&self) -> u32;
    /// Reads what the driver has made available. Returns whether there is a chain.
    fn refresh(&mut self) -> Result<bool, DriverFault>;
    /// Whether there is a chain at `next`.
    fn available(&self) -> bool;
    /// The first chain that was not given back.
    fn next(&self) -> Self::At;
    /// The place behind a chain.
    fn behind(&self, at: Self::At, span: u16) -> Self::At;
    /// The first descriptor of the chain at `at`. `None` if the driver has made none available there.
    fn first(&self, at: Self::At) -> Result<Option<Link<Self::At>>, DriverFault>;
    /// The descriptor that follows one with [`DESC_NEXT`].
    fn follow(&self, link: &Link<Self::At>) -> Result<Link<Self::At>, DriverFault>;
    /// The id of a chain that ends with `last`.
    fn id(&self, last: &Link<Self::At>) -> Result<u16, DriverFault>;
    /// See [`DeviceQueue::look_ahead`]. `kind` is what the flags of a descriptor must be.
    fn look_ahead(&self, memory: &mut View<'_>, most: u16, kind: u16, found: &mut [Whole; GROUP]) -> usize;
    /// Gives the next chain back. The driver sees it after `publish`.
    fn give_back(&mut self, id: u16, span: u16, len: u32);
    /// The same for several chains of one descriptor each.
    fn give_back_group(&mut self, chains: &[Whole]);
    /// The same for chains that were only read, and may be batched. `id` is that of the last chain, and `span` is the
    /// number by which all of them move the position.
    fn give_back_read(&mut self, id: u16, span: u16);
    /// See [`DeviceQueue::publish`].
    fn publish(&mut self);
    /// The same with in-flight state, and with notes in the dirty log. Returns whether there are chains left that must
    /// be taken again.
    fn publish_watched(&mut self, log: Option<&Logged>) -> bool;
    /// See [`DeviceQueue::should_notify`].
    fn should_notify(&mut self) -> bool;
    /// See [`DeviceQueue::arm`].
    fn arm(&mut self) -> Armed;
    /// See [`DeviceQueue::disarm`].
    fn disarm(&mut self);
    /// Notes in the dirty log that the event or flag for the driver was written.
    fn log_event(&self, log: &Logged);
    /// Remembers that no chain is available at `at`.
    fn starve(&mut self, at: Self::At);
    /// Whether there is still none, as of the last `refresh`.
    fn starved(&mut self) -> bool;
    /// A descriptor of an indirect table, from its 16 bytes. `next` is its successor's number; the table has `entries`.
    fn entry(&self, bytes: [u8; Desc::LEN], number: u16, entries: u16) -> Desc;
}

/// The dirty log of a queue's writes.
#[derive(Clone, Debug)]
pub(crate) struct Logged {
    pub(crate) log: Arc<DirtyLog>,
    /// Guest address of the used ring, if writes to it are noted too.
    pub(crate) used: Option<u64>,
}

/// The parameters with which a queue is started.
#[derive(Debug)]
pub(crate) struct Start {
    /// The position of `SET_VRING_BASE` at which to begin. In-flight state takes precedence over it.
    pub(crate) base: u32,
    pub(crate) negotiated: Negotiated,
    /// Whether frames are split behind their headers.
    pub(crate) splits: bool,
    pub(crate) inflight: Option<InflightQueue>,
    /// See [`DeviceQueue::set_log`].
    pub(crate) logged: Option<Logged>,
}

/// A running queue of one format.
#[derive(Debug)]
pub(crate) struct DeviceQueue<S> {
    side: S,
    negotiated: Negotiated,
    header: usize,
    /// See [`Self::splits`].
    splits: bool,
    /// Set while the front end wants to know which pages the device writes.
    logged: Option<Logged>,
    /// Whether there is in-flight state.
    kept: bool,
    /// Whether there are chains of the earlier back end that must be taken again.
    again: bool,
    /// Whether there is `logged` or `kept`, for the hot paths to test.
    watched: bool,
    /// See [`Self::plain`].
    plain: bool,
    /// The number of the region that the last buffer was in: where the next pass looks first.
    region: usize,
    /// Room for the copy of an indirect table.
    table: Vec<u8>,
}

impl<S: Side> DeviceQueue<S> {
    /// Takes over `ring`.
    pub(crate) fn new(ring: S::Ring, start: Start) -> Self {
        let (negotiated, kept, splits) = (start.negotiated, start.inflight.is_some(), start.splits);
        let logged = start.logged.clone();
        let mut queue = Self {
            side: S::new(ring, start),
            negotiated,
            header: negotiated.header_len(),
            // Header split needs a header of full length. Netmem's own drivers have no shorter (legacy) one.
            splits: splits && negotiated.header_len() == VnetHdr::LEN && !negotiated.mergeable(),
            logged,
            kept,
            again: kept,
            watched: false,
            plain: false,
            region: 0,
            table: Vec::new(),
        };
        queue.side.disarm();
        queue.watch();
        queue.log_event();
        queue
    }

    /// The same queue at other addresses, after the memory table was replaced.
    pub(crate) fn moved(self, ring: S::Ring) -> Self {
        Self { side: self.side.moved(ring), ..self }
    }

    /// Sets or removes the log in which the device's writes are noted. `used` is the guest address of the used ring.
    pub(crate) fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<u64>) {
        self.logged = log.map(|log| Logged { log, used });
        self.watch();
        self.log_event();
    }

    fn watch(&mut self) {
        self.watched = self.logged.is_some() || self.kept;
        self.plain = self.logged.is_none() && !self.again && self.header == VnetHdr::LEN;
    }

    /// Bytes of the virtio header in front of each frame.
    #[inline(always)]
    pub(crate) fn header(&self) -> usize {
        self.header
    }

    /// The features that driver and device have negotiated.
    #[inline(always)]
    pub(crate) fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// Whether the headers of each frame go to the first buffer of a chain, and what follows them to the others.
    #[inline(always)]
    pub(crate) fn splits(&self) -> bool {
        self.splits
    }

    /// Whether a frame may simply be copied into or out of a single buffer: its header has the usual form, nothing is
    /// logged, and no chain must be taken again.
    #[inline(always)]
    pub(crate) fn plain(&self) -> bool {
        self.plain
    }

    /// The queue's position, as the answer to `GET_VRING_BASE`.
    pub(crate) fn base(&self) -> u32 {
        self.side.base()
    }

    /// Entries of the ring.
    pub(crate) fn size(&self) -> u16 {
        self.side.size()
    }

    /// Reads what the driver has made available, and returns whether there is a chain. One load.
    #[inline]
    pub(crate) fn refresh(&mut self) -> Result<bool, DriverFault> {
        self.side.refresh()
    }

    /// Whether there is a next chain, as of the last [`Self::refresh`].
    #[inline(always)]
    pub(crate) fn available(&self) -> bool {
        self.side.available()
    }

    /// The view by which a pass over this queue reaches memory.
    #[inline]
    pub(crate) fn view<'t>(&self, memory: &'t MemoryTable) -> View<'t> {
        View::new(memory, self.region)
    }

    /// Ends a pass over this queue, which used the view `memory`.
    #[inline]
    pub(crate) fn viewed(&mut self, memory: &View<'_>) {
        self.region = memory.index();
    }

    /// Looks ahead, over up to `most` chains of one buffer each in one region, without taking them. The first chain of
    /// another form, also a wrong one, ends it. Only for a [plain](Self::plain) queue.
    #[inline(always)]
    pub(crate) fn look_ahead(&self, memory: &mut View<'_>, most: u16, direction: Direction, group: &mut Group) {
        let kind = if direction == Direction::Write { DESC_WRITE } else { 0 };
        group.found = self.side.look_ahead(memory, most, kind, &mut group.chains);
    }

    /// Gives back the first `taken` chains of a group, each with its `len` written. The rest stays available.
    #[inline(always)]
    pub(crate) fn give_back_group(&mut self, group: &mut Group, taken: usize) {
        debug_assert!(taken == 0 || self.logged.is_none(), "the bytes of a group are not noted");
        self.side.give_back_group(&group.chains[..taken]);
        group.found = 0;
    }

    /// The same for chains that were only read, see [`give_back_read`](Self::give_back_read).
    #[inline(always)]
    pub(crate) fn give_back_group_read(&mut self, group: &mut Group, taken: usize) {
        if self.batches() {
            if let Some(last) = group.chains[..taken].last() {
                self.side.give_back_read(last.id, taken as u16);
            }
            group.found = 0;
        } else {
            for w in &mut group.chains[..taken] {
                w.len = 0;
            }
            self.give_back_group(group, taken);
        }
    }

    /// The cursor at which lending begins.
    #[inline]
    pub(crate) fn cursor(&self) -> S::At {
        self.side.next()
    }

    /// Lends the chain at `cursor`, which moves behind it, and appends the chain's buffers to `out`. Returns `None` if
    /// the driver has made no chain available there.
    ///
    /// At most as many descriptors as the ring has are read, and at most [`MAX_PIECES`](super::fault::MAX_PIECES) buffers are
    /// appended. A buffer may span regions whose guest addresses meet: it becomes
    /// several.
    pub(crate) fn lend<'t>(
        &mut self,
        cursor: &mut S::At,
        memory: &mut View<'t>,
        direction: Direction,
        out: &mut Vec<Buffer<'t>>,
    ) -> Result<Option<Head<S::At>>, DriverFault> {
        let Some(mut link) = self.side.first(*cursor)? else { return Ok(None) };
        let mut judge = ChainJudge::new(link.index, self.size(), direction);
        loop {
            let Link { desc, index, .. } = link;
            if desc.flags & DESC_INDIRECT != 0 {
                self.lend_table(&mut judge, index, &desc, memory, out)?;
                break;
            }
            judge.buffer(index, &desc)?;
            buffer(&mut judge, memory, index, &desc, out)?;
            if desc.flags & DESC_NEXT == 0 {
                break;
            }
            link = self.side.follow(&link)?;
        }
        let id = self.side.id(&link)?;
        *cursor = self.side.behind(*cursor, link.span);
        Ok(Some(Head { at: link.at, id, span: link.span, bytes: judge.bytes() }))
    }

    /// The buffers of an indirect table, which is copied before it is read: it may lie across regions, and the driver may
    /// change it.
    #[cold]
    fn lend_table<'t>(
        &mut self,
        judge: &mut ChainJudge,
        index: u16,
        table: &Desc,
        memory: &mut View<'t>,
        out: &mut Vec<Buffer<'t>>,
    ) -> Result<(), DriverFault> {
        let entries = judge.table(index, table, self.negotiated.indirect())?;
        self.table.resize(table.len as usize, 0);
        let (mut addr, mut left) = (table.addr, &mut self.table[..]);
        while !left.is_empty() {
            let piece = memory.mapped_run(addr, left.len() as u32);
            let (host, n) = DriverFault::inside(index, table.addr, table.len, piece)?;
            let (now, rest) = left.split_at_mut(n as usize);
            // SAFETY: `host` is *mapped* for `n` bytes (its `MemoryTable` is borrowed by the pass).
            unsafe { copy_out(host, now) };
            (addr, left) = (addr.wrapping_add(n.into()), rest);
        }
        let mut number = 0;
        loop {
            let (bytes, _) =
                self.table[Desc::LEN * usize::from(number)..].split_first_chunk().unwrap_or((&[0; 16], &[]));
            let desc = self.side.entry(*bytes, number, entries);
            judge.entry(index, &desc)?;
            buffer(judge, memory, index, &desc, out)?;
            if desc.flags & DESC_NEXT == 0 {
                return Ok(());
            }
            number = DriverFault::next(desc.next, entries)?;
        }
    }

    /// Writes a frame into chains, notes it in the dirty log, and gives the chains back, in this order.
    ///
    /// `write` writes into `buffers`, which are those of `heads`, and returns how many bytes from the first one on count as
    /// written. The chains that have these bytes are given back, each with its part; the driver sees them after
    /// [`publish`](Self::publish). The others stay available. Returns how many chains were given back.
    ///
    /// # Errors
    ///
    /// That of `write`. All chains stay available then. What was written of the frame is noted with the next frame that they
    /// get; until then their bytes mean nothing to the driver.
    #[inline]
    pub(crate) fn complete<E>(
        &mut self,
        heads: Heads<S::At>,
        buffers: &[Buffer<'_>],
        write: impl FnOnce(&Heads<S::At>) -> Result<usize, E>,
    ) -> Result<u16, E> {
        let mut left = write(&heads)?;
        self.note(buffers, left);
        let mut chains = 0;
        for head in std::iter::once(heads.first).chain(heads.more) {
            if left == 0 {
                break;
            }
            let n = left.min(head.bytes());
            self.give_back(head, n as u32);
            (left, chains) = (left - n, chains + 1);
        }
        Ok(chains)
    }

    /// Notes that the first `len` bytes of `buffers` were written.
    fn note(&self, buffers: &[Buffer<'_>], len: usize) {
        let Some(Logged { log, .. }) = &self.logged else { return };
        let mut left = len;
        for b in buffers {
            let n = left.min(b.len);
            log.mark(b.guest, n as u64);
            left -= n;
        }
    }

    /// Gives back a chain with `len` bytes written. The driver sees it after [`Self::publish`].
    #[inline(always)]
    fn give_back(&mut self, head: Head<S::At>, len: u32) {
        debug_assert_eq!(head.at, self.side.next(), "chains are given back in order");
        self.side.give_back(head.id, head.span, len);
    }

    /// Gives back a chain that was only read. With `VIRTIO_F_IN_ORDER` the chains up to the next [`Self::publish`] share one
    /// used entry. A queue uses either this or [`complete`](Self::complete).
    #[inline(always)]
    pub(crate) fn give_back_read(&mut self, head: Head<S::At>) {
        debug_assert_eq!(head.at, self.side.next(), "chains are given back in order");
        if self.batches() {
            self.side.give_back_read(head.id, head.span);
        } else {
            self.side.give_back(head.id, head.span, 0);
        }
    }

    /// Whether chains that were only read share used entries. In-flight state is kept by the used entries, of which there must be
    /// one for each chain.
    #[inline(always)]
    fn batches(&self) -> bool {
        self.negotiated.in_order() && !self.watched
    }

    /// Lets the driver see all chains that were given back so far.
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        if self.watched {
            return self.publish_watched();
        }
        self.side.publish();
    }

    #[cold]
    fn publish_watched(&mut self) {
        let again = self.side.publish_watched(self.logged.as_ref());
        if self.again != again {
            self.again = again;
            self.watch();
        }
    }

    /// Whether the driver wants an interrupt for what was published since the last call. One full fence if anything was.
    #[inline]
    pub(crate) fn should_notify(&mut self) -> bool {
        self.side.should_notify()
    }

    /// Asks the driver for a notification when it makes a chain available that was not there at the last
    /// [`refresh`](Self::refresh), and looks whether it has done so already.
    pub(crate) fn arm(&mut self) -> Armed {
        let armed = self.side.arm();
        self.log_event();
        armed
    }

    /// Asks the driver for no notifications: the device polls from now on.
    pub(crate) fn disarm(&mut self) {
        self.side.disarm();
        self.log_event();
    }

    fn log_event(&self) {
        if let Some(logged) = &self.logged {
            self.side.log_event(logged);
        }
    }

    /// Records that the chains up to `cursor`, where there is none, are too few.
    pub(crate) fn starve(&mut self, cursor: S::At) {
        self.side.starve(cursor);
    }

    /// Whether no chain has become available since [`Self::starve`], as of the last [`Self::refresh`].
    #[inline(always)]
    pub(crate) fn starved(&mut self) -> bool {
        self.side.starved()
    }
}

/// Appends the buffer of a checked descriptor.
#[inline]
fn buffer<'t>(
    judge: &mut ChainJudge,
    memory: &mut View<'t>,
    index: u16,
    d: &Desc,
    out: &mut Vec<Buffer<'t>>,
) -> Result<(), DriverFault> {
    let Some(host) = memory.translate(d.addr, d.len) else { return pieces(judge, memory, index, d, out) };
    let write = d.flags & DESC_WRITE != 0;
    out.push(Buffer::mapped(memory, host, d.len as usize, write, d.addr));
    Ok(())
}

/// The same for a buffer in several regions whose guest addresses are adjacent, or in an imported region.
#[cold]
fn pieces<'t>(
    judge: &mut ChainJudge,
    memory: &mut View<'t>,
    index: u16,
    d: &Desc,
    out: &mut Vec<Buffer<'t>>,
) -> Result<(), DriverFault> {
    let (mut addr, mut left) = (d.addr, d.len);
    while left > 0 {
        if left < d.len {
            judge.piece()?;
        }
        let run = Buffer::first_run(memory, addr, left, d.flags & DESC_WRITE != 0);
        let buffer = DriverFault::inside(index, d.addr, d.len, run)?;
        out.push(buffer);
        left -= buffer.len as u32;
        // A region's end does not wrap around, so this cannot either, except to an address in no region.
        addr = addr.wrapping_add(buffer.len as u64);
    }
    Ok(())
}

/// A ring of either format in memory.
#[derive(Debug)]
pub(crate) enum AnyRing {
    /// A split ring.
    Split(SplitRing),
    /// A packed ring.
    Packed(MappedRing),
}

/// A running queue of either format. A pass chooses once.
#[derive(Debug)]
pub(crate) enum AnyDeviceQueue {
    /// Of a split ring.
    Split(DeviceQueue<SplitSide>),
    /// Of a packed ring.
    Packed(DeviceQueue<PackedSide>),
}

/// Does the same with the queue of either format.
macro_rules! each {
    ($queue:expr, $q:ident => $do:expr) => {
        match $queue {
            $crate::virtqueue::device::AnyDeviceQueue::Split($q) => $do,
            $crate::virtqueue::device::AnyDeviceQueue::Packed($q) => $do,
        }
    };
}
pub(crate) use each;

impl AnyDeviceQueue {
    /// Takes over `ring`.
    pub(crate) fn new(ring: AnyRing, start: Start) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DeviceQueue::new(ring, start)),
            AnyRing::Packed(ring) => Self::Packed(DeviceQueue::new(ring, start)),
        }
    }

    /// The same queue at other addresses. `None` if `ring` is of another format.
    pub(crate) fn moved(self, ring: AnyRing) -> Option<Self> {
        match (self, ring) {
            (Self::Split(q), AnyRing::Split(ring)) => Some(Self::Split(q.moved(ring))),
            (Self::Packed(q), AnyRing::Packed(ring)) => Some(Self::Packed(q.moved(ring))),
            _ => None,
        }
    }

    /// See [`DeviceQueue::set_log`].
    pub(crate) fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<u64>) {
        each!(self, q => q.set_log(log, used));
    }

    /// See [`DeviceQueue::base`].
    pub(crate) fn base(&self) -> u32 {
        each!(self, q => q.base())
    }

    /// See [`DeviceQueue::refresh`].
    #[inline]
    pub(crate) fn refresh(&mut self) -> Result<bool, DriverFault> {
        each!(self, q => q.refresh())
    }

    /// See [`DeviceQueue::starved`].
    #[inline]
    pub(crate) fn starved(&mut self) -> bool {
        each!(self, q => q.starved())
    }

    /// See [`DeviceQueue::should_notify`].
    #[inline]
    pub(crate) fn should_notify(&mut self) -> bool {
        each!(self, q => q.should_notify())
    }

    /// See [`DeviceQueue::arm`].
    pub(crate) fn arm(&mut self) -> Armed {
        each!(self, q => q.arm())
    }

    /// See [`DeviceQueue::disarm`].
    pub(crate) fn disarm(&mut self) {
        each!(self, q => q.disarm());
    }
}
