//! A running queue of one format, as the device's passes use it.
//!
//! A pass asks for the next chains, fills or reads their buffers, and completes them. What differs
//! between the formats is behind [`DeviceFormat`]; what is the same, and what must be done in one
//! order (write, mark, complete), is here.

use std::sync::Arc;

use netmem_pool::foreign::copy_out;

use super::super::{Armed, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc, Negotiated};
use super::chain::{ChainDescriptor, Head, Heads};
use super::format::{DeviceFormat, Logged, Start};
use super::group::{Group, ShortChain};
use crate::guest_memory::MemoryTable;
use crate::guest_memory::buffer::Buffer;
use crate::guest_memory::dirty_log::DirtyLog;
use crate::guest_memory::view::View;
use crate::net::VnetHdr;
use crate::virtqueue::fault::{ChainValidator, Direction, DriverFault};

/// A running queue of one format.
#[derive(Debug)]
pub(crate) struct DeviceQueue<S> {
    format: S,
    negotiated: Negotiated,
    header: usize,
    /// See [`Self::splits`].
    splits: bool,
    /// Set while the front end logs which pages the device writes.
    logged: Option<Logged>,
    /// Whether there is in-flight state.
    kept: bool,
    /// Whether there are chains of the earlier back end that are resubmitted.
    again: bool,
    /// Whether there is `logged` or `kept`, for the hot paths to test.
    watched: bool,
    /// See [`Self::plain`].
    plain: bool,
    /// The number of the region that the last buffer was in: where the next pass searches first.
    region: usize,
    /// Room for the copy of an indirect table.
    table: Vec<u8>,
}

impl<S: DeviceFormat> DeviceQueue<S> {
    /// A queue on `ring`.
    pub(crate) fn new(ring: S::Ring, start: Start) -> Self {
        let (negotiated, kept, splits) = (start.negotiated, start.inflight.is_some(), start.splits);
        let logged = start.logged.clone();
        let mut queue = Self {
            format: S::new(ring, start),
            negotiated,
            header: negotiated.header_len(),
            // Header split needs a header of full length. Netmem's own drivers have no shorter
            // (legacy) one.
            splits: splits && negotiated.header_len() == VnetHdr::LEN && !negotiated.mergeable(),
            logged,
            kept,
            again: kept,
            watched: false,
            plain: false,
            region: 0,
            table: Vec::new(),
        };
        queue.format.disarm();
        queue.watch();
        queue.log_event();
        queue
    }

    /// The same queue at other addresses, after the memory table was replaced.
    pub(crate) fn moved(self, ring: S::Ring) -> Self {
        Self { format: self.format.moved(ring), ..self }
    }

    /// Sets or removes the log in which the device's writes are marked. `used` is the guest address
    /// of the used ring.
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

    /// Whether the headers of each frame go to the first buffer of a chain, and what follows them
    /// to the others.
    #[inline(always)]
    pub(crate) fn splits(&self) -> bool {
        self.splits
    }

    /// Whether a frame may simply be copied into or out of a single buffer: its header has the
    /// usual form, nothing is logged, and no chain is resubmitted.
    #[inline(always)]
    pub(crate) fn plain(&self) -> bool {
        self.plain
    }

    /// The queue's position, as the answer to `GET_VRING_BASE`.
    pub(crate) fn base(&self) -> u32 {
        self.format.base()
    }

    /// Entries of the ring.
    pub(crate) fn size(&self) -> u16 {
        self.format.size()
    }

    /// Reads what the driver has made available, and returns whether there is a chain. One load.
    #[inline]
    pub(crate) fn refresh(&mut self) -> Result<bool, DriverFault> {
        self.format.refresh()
    }

    /// Whether there is a next chain, as of the last [`Self::refresh`].
    #[inline(always)]
    pub(crate) fn available(&self) -> bool {
        self.format.available()
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

    /// Reads up to `most` of the next chains, each of one buffer in one region, without popping
    /// them. The first chain of another form, also a wrong one, ends it. Only for a
    /// [plain](Self::plain) queue.
    #[inline(always)]
    pub(crate) fn peek_group(&self, memory: &mut View<'_>, most: u16, direction: Direction, group: &mut Group) {
        let kind = if direction == Direction::Write { DESC_WRITE } else { 0 };
        self.format.peek_group(memory, most, kind, group);
    }

    /// Reads the next chain without popping it, if it is a few buffers outside of tables, each in
    /// one region. `None` for a chain of another form, also for a wrong one, and if there is none.
    /// Only for a [plain](Self::plain) queue. Reads each descriptor once.
    #[inline(always)]
    pub(crate) fn peek_short(
        &self,
        memory: &mut View<'_>,
        direction: Direction,
        chain: &mut ShortChain,
    ) -> Option<Head<S::At>> {
        let kind = if direction == Direction::Write { DESC_WRITE } else { 0 };
        let mut descriptor = self.format.first(self.format.next()).ok()??;
        let mut bytes = 0u32;
        for (n, buffer) in chain.buffers.iter_mut().enumerate() {
            let Desc { addr, len, flags, .. } = descriptor.desc;
            if flags & !DESC_NEXT != kind || len == 0 {
                return None;
            }
            *buffer = (memory.translate(addr, len)?, len);
            bytes = bytes.checked_add(len)?;
            if flags & DESC_NEXT == 0 {
                chain.found = n + 1;
                let id = self.format.id(&descriptor).ok()?;
                return Some(Head { at: descriptor.at, id, span: descriptor.span, bytes });
            }
            descriptor = self.format.follow(&descriptor).ok()?;
        }
        None
    }

    /// Adds the first `taken` chains of a group to the used ring, each with its `len` written. The
    /// rest stays available.
    #[inline(always)]
    pub(crate) fn add_used_group(&mut self, group: &mut Group, taken: usize) {
        debug_assert!(taken == 0 || self.logged.is_none(), "the bytes of a group are not noted");
        self.format.add_used_group(&group.chains()[..taken]);
        group.forget();
    }

    /// The same for chains that were only read, see [`add_used_read`](Self::add_used_read).
    #[inline(always)]
    pub(crate) fn add_used_group_read(&mut self, group: &mut Group, taken: usize) {
        if self.batches() {
            if let Some(last) = group.chains()[..taken].last() {
                self.format.add_used_read(last.id, taken as u16);
            }
            group.forget();
        } else {
            for w in &mut group.chains()[..taken] {
                w.len = 0;
            }
            self.add_used_group(group, taken);
        }
    }

    /// The cursor at which lending begins.
    #[inline]
    pub(crate) fn cursor(&self) -> S::At {
        self.format.next()
    }

    /// Lends the chain at `cursor`, which moves behind it, and appends the chain's buffers to
    /// `out`. Returns `None` if the driver has made no chain available there.
    ///
    /// At most as many descriptors as the ring has are read, and at most
    /// [`MAX_PIECES`](super::fault::MAX_PIECES) buffers are appended. A buffer may span regions
    /// whose guest addresses meet: it becomes several.
    pub(crate) fn pop_chain<'t>(
        &mut self,
        cursor: &mut S::At,
        memory: &mut View<'t>,
        direction: Direction,
        out: &mut Vec<Buffer<'t>>,
    ) -> Result<Option<Head<S::At>>, DriverFault> {
        self.pop_up_to(usize::MAX, cursor, memory, direction, out)
    }

    /// The same, except that the walk ends when `out` has more than `most` buffers, those of
    /// earlier chains included. Then it returns `None`, and a later pass pops the chain. An
    /// indirect table of more than `most` descriptors is not read.
    #[inline]
    pub(crate) fn pop_up_to<'t>(
        &mut self,
        most: usize,
        cursor: &mut S::At,
        memory: &mut View<'t>,
        direction: Direction,
        out: &mut Vec<Buffer<'t>>,
    ) -> Result<Option<Head<S::At>>, DriverFault> {
        let Some(mut descriptor) = self.format.first(*cursor)? else { return Ok(None) };
        let mut validator = ChainValidator::new(descriptor.index, self.size(), direction);
        loop {
            let ChainDescriptor { desc, index, .. } = descriptor;
            if desc.flags & DESC_INDIRECT != 0 {
                if desc.len as usize / Desc::LEN > most {
                    return Ok(None);
                }
                self.pop_table(&mut validator, index, &desc, memory, out)?;
                break;
            }
            validator.buffer(index, &desc)?;
            buffer(&mut validator, memory, index, &desc, out)?;
            if desc.flags & DESC_NEXT == 0 {
                break;
            }
            if out.len() >= most {
                return Ok(None);
            }
            descriptor = self.format.follow(&descriptor)?;
        }
        if out.len() > most {
            return Ok(None);
        }
        let id = self.format.id(&descriptor)?;
        *cursor = self.format.behind(*cursor, descriptor.span);
        Ok(Some(Head { at: descriptor.at, id, span: descriptor.span, bytes: validator.bytes() }))
    }

    /// The buffers of an indirect table, which is copied before it is read: it may lie across
    /// regions, and the driver may change it.
    #[cold]
    fn pop_table<'t>(
        &mut self,
        validator: &mut ChainValidator,
        index: u16,
        table: &Desc,
        memory: &mut View<'t>,
        out: &mut Vec<Buffer<'t>>,
    ) -> Result<(), DriverFault> {
        let entries = validator.table(index, table, self.negotiated.indirect())?;
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
            let desc = self.format.entry(*bytes, number, entries);
            validator.entry(index, &desc)?;
            buffer(validator, memory, index, &desc, out)?;
            if desc.flags & DESC_NEXT == 0 {
                return Ok(());
            }
            number = DriverFault::next(desc.next, entries)?;
        }
    }

    /// Writes a frame into chains, marks its bytes in the dirty log, and adds the chains to the
    /// used ring, in this order.
    ///
    /// `write` writes into `buffers`, which are those of `heads`, and returns how many bytes from
    /// the first one on count as written. The chains that have these bytes are added to the used
    /// ring, each with its part of them; the driver sees them after [`publish`](Self::publish). The
    /// others stay available. Returns how many chains were completed.
    ///
    /// # Errors
    ///
    /// That of `write`. All chains stay available then. What was written of the frame is marked
    /// with the next frame in these chains; until then their bytes mean nothing to the driver.
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
        for head in heads.into_iter() {
            if left == 0 {
                break;
            }
            let n = left.min(head.bytes());
            self.add_used(head, n as u32);
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

    /// Adds a chain to the used ring, with `len` bytes written. The driver sees it after
    /// [`Self::publish`].
    #[inline(always)]
    fn add_used(&mut self, head: Head<S::At>, len: u32) {
        debug_assert_eq!(head.at, self.format.next(), "chains are given back in order");
        self.format.add_used(head.id, head.span, len);
    }

    /// Adds a chain that was only read to the used ring. With `VIRTIO_F_IN_ORDER` the chains up to
    /// the next [`Self::publish`] share one used entry. A queue uses either this or
    /// [`complete`](Self::complete).
    #[inline(always)]
    pub(crate) fn add_used_read(&mut self, head: Head<S::At>) {
        debug_assert_eq!(head.at, self.format.next(), "chains are given back in order");
        if self.batches() {
            self.format.add_used_read(head.id, head.span);
        } else {
            self.format.add_used(head.id, head.span, 0);
        }
    }

    /// Whether chains that were only read share used entries. In-flight state is kept by the used
    /// entries, of which there must be one for each chain.
    #[inline(always)]
    fn batches(&self) -> bool {
        self.negotiated.in_order() && !self.watched
    }

    /// Publishes all chains that were added so far to the driver.
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        if self.watched {
            return self.publish_watched();
        }
        self.format.publish();
    }

    #[cold]
    fn publish_watched(&mut self) {
        let again = self.format.publish_watched(self.logged.as_ref());
        if self.again != again {
            self.again = again;
            self.watch();
        }
    }

    /// Whether the driver wants an interrupt for what was published since the last call. One full
    /// fence if anything was.
    #[inline]
    pub(crate) fn should_notify(&mut self) -> bool {
        self.format.should_notify()
    }

    /// Asks the driver for a notification when it makes a chain available that was not there at the
    /// last [`refresh`](Self::refresh), and checks whether it has done so already.
    pub(crate) fn arm(&mut self) -> Armed {
        let armed = self.format.arm();
        self.log_event();
        armed
    }

    /// Asks the driver for no notifications: the device polls from now on.
    pub(crate) fn disarm(&mut self) {
        self.format.disarm();
        self.log_event();
    }

    fn log_event(&self) {
        if let Some(logged) = &self.logged {
            self.format.log_event(logged);
        }
    }

    /// Records that the chains up to `cursor`, where there is none, are too few.
    pub(crate) fn set_out_of_buffers(&mut self, cursor: S::At) {
        self.format.set_out_of_buffers(cursor);
    }

    /// Whether no chain has become available since [`Self::set_out_of_buffers`], as of the last
    /// [`Self::refresh`].
    #[inline(always)]
    pub(crate) fn out_of_buffers(&mut self) -> bool {
        self.format.out_of_buffers()
    }
}

/// Appends the buffer of a checked descriptor.
#[inline]
fn buffer<'t>(
    validator: &mut ChainValidator,
    memory: &mut View<'t>,
    index: u16,
    d: &Desc,
    out: &mut Vec<Buffer<'t>>,
) -> Result<(), DriverFault> {
    let Some(host) = memory.translate(d.addr, d.len) else { return pieces(validator, memory, index, d, out) };
    let write = d.flags & DESC_WRITE != 0;
    out.push(Buffer::mapped(memory, host, d.len as usize, write, d.addr));
    Ok(())
}

/// The same for a buffer in several regions whose guest addresses are adjacent, or in an imported
/// region.
#[cold]
fn pieces<'t>(
    validator: &mut ChainValidator,
    memory: &mut View<'t>,
    index: u16,
    d: &Desc,
    out: &mut Vec<Buffer<'t>>,
) -> Result<(), DriverFault> {
    let (mut addr, mut left) = (d.addr, d.len);
    while left > 0 {
        if left < d.len {
            validator.piece()?;
        }
        let run = Buffer::first_run(memory, addr, left, d.flags & DESC_WRITE != 0);
        let buffer = DriverFault::inside(index, d.addr, d.len, run)?;
        out.push(buffer);
        left -= buffer.len as u32;
        // A region's end does not wrap around, so this cannot either, except to an address in no
        // region.
        addr = addr.wrapping_add(buffer.len as u64);
    }
    Ok(())
}
