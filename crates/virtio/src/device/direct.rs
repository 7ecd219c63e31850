//! From queue pair to queue pair: frames out of the sender's chains straight into the receiver's
//! buffers, by one copy.
//!
//! Why: by way of a port, which holds the bytes in between, each byte is copied twice and waits for
//! a pass over the receiver.
//!
//! ```text
//!   pass over the sender's pair
//!     try-lock the receiver's pair ── locked, or frames wait in the port ──► by the port (tx.rs)
//!     for up to 32 frames:
//!       copy the header out, check it, find buffers ── cannot be copied as it is ──► by the port,
//!       copy the frame across, write the header                                     in the next pass
//!     receiver: mark in the dirty log, publish, notify
//!     sender: publish
//! ```
//!
//! Frames of one buffer each are copied by the group, and those of a few buffers one by one into a
//! group of the receiver's. Neither makes a list of buffers. What is of another form takes the
//! general path.
//!
//! * *Frames do not overtake each other.* They are copied directly only while no earlier one waits
//!   in the port ([`Port::waits`]), and both pairs are locked meanwhile.
//! * *No lock is waited for.* Both pairs are locked by a try, in either order. Their control sides
//!   wait for one pass at most, as ever, and the receiver's own worker is next if it has found its
//!   pair locked (`shared.rs`).
//! * *A guest's chains cost the other guest's pair little.* A frame goes directly only if it is in
//!   few [pieces](PIECES) on both sides, which are counted while the chains are walked. A walk that
//!   was given up is charged to the sender's budget, too. A device whose memory another process may
//!   serve (`any_memory_file`) is neither sender nor receiver.
//! * *What is checked is a private copy.* That is the virtio header. The rest of the frame is not
//!   read here: if its driver changes it meanwhile, it changes what it sends. A header that needs
//!   work in software goes through the port.
//! * *A chain of the sender is completed after its frame has arrived*: what the driver sees as sent
//!   is in the receiver's used ring, and the receiver was notified.
//! * *A guest is stopped for its own faults alone.* Each ring is checked and stopped with the
//!   counters of its device. If a page of either memory is gone, the handler of SIGBUS counts it
//!   for that memory, and each worker checks its own pairs.

use netmem_pool::foreign::{copy_across, copy_in, copy_out};
use netmem_pool::{prefetch, sigbus};

use super::DriverFault;
use super::budget::Budget;
use super::pair::{Pair, Ring};
use super::port::{MAX_WIRE, Port};
use super::rx::{PUBLISH_BYTES, Room, Scratch, room_for};
use super::software::lacks;
use super::stats::{PairTally, Tally};
use super::tx::{MIN_TX, PUBLISH_FRAMES, header};
use crate::guest_memory::buffer::{Buffer, BufferList};
use crate::guest_memory::copy::{gather, scatter, transfer};
use crate::guest_memory::view::View;
use crate::guest_memory::{CopyFailed, MemoryTable};
use crate::net::{Offloads, VnetHdr};
use crate::notify::Notifier;
use crate::virtqueue::device::{AnyDeviceQueue, DeviceFormat, DeviceQueue, Direction, Group, ShortChain, each};

/// A buffer is prefetched so many frames before it is written. Without it, the stores of each frame
/// wait for the driver that has read the buffer last.
const AHEAD: usize = 2;

/// Frames of several buffers that are copied together.
const SHORT_FRAMES: u16 = 8;

/// The lengths of a frame in wire form.
const LENGTHS: std::ops::RangeInclusive<usize> = VnetHdr::LEN + MIN_TX..=MAX_WIRE;

/// The most buffers of a frame on either side, in pieces of memory: enough for the longest frame in
/// buffers of 1.5 KiB. Each may be on a page that must be allocated first, in the time of the other
/// guest's pair. A frame of more goes through the port, where each worker walks its own guest's
/// memory.
const PIECES: usize = 48;

/// Copies the frames of `q`, of which there is one at least, into the buffers of the pair at the
/// other end of `port`, for the [budget](Budget) of a pass. The first frame that cannot be copied
/// so is left in its ring. Returns `None` if the pass over the ring is over, because frames were
/// copied. If not, the next frame goes through the port, with the rest of the budget.
///
/// # Errors
///
/// The rule that the sender's driver has broken. Chains that were completed before are published.
/// The receiver's ring is stopped here if its driver has broken a rule.
pub(super) fn transmit<P: Port>(
    q: &mut AnyDeviceQueue,
    memory: &MemoryTable,
    port: &P,
    offloads: Offloads,
    scratch: &mut Scratch,
    tally: &mut Tally,
) -> Result<Option<Budget>, DriverFault> {
    let mut budget = Budget::new(tally);
    let Some(peer) = port.peer().filter(|_| accessible(q, memory)) else { return Ok(Some(budget)) };
    let Some(mut pair) = peer.try_receiver() else { return Ok(Some(budget)) };
    if port.waits() {
        return Ok(Some(budget));
    }
    let Pair { rings: [ring, _], memory: to_memory, received: accepted, .. } = &mut *pair;
    let Ring { queue: Some(to), call, .. } = &mut *ring else { return Ok(Some(budget)) };
    if !accessible(to, to_memory) {
        return Ok(Some(budget));
    }
    let (before, faults, mut received) = (tally.tx_frames, sigbus::faults(), Tally::default());
    let Scratch { buffers: list, posted, .. } = scratch;
    let checks = Checks { sent: offloads, received: *accepted };
    let tallies = (&mut *tally, &mut received);
    let (sender, receiver) = each!(q, from => each!(to, to => {
        let memories = (from.view(memory), to.view(to_memory));
        let lists = (list, posted);
        Direct { from, to, memories, checks, call: call.as_ref(), lists, tallies, fresh: (0, 0) }.run(&mut budget)
    }));
    ring.finish(to_memory, peer.ring(), receiver, peer.stats(), &mut received);
    peer.stats().add(&received, 0);
    peer.stats().add_pair(peer.pair(), &received, PairTally::default());
    drop(pair);
    if sigbus::faults() != faults {
        peer.wake_device();
    }
    sender.map(|()| (tally.tx_frames == before).then_some(budget))
}

/// Whether frames of this queue are bytes behind a header of the usual length, in memory that is
/// mapped.
fn accessible(q: &AnyDeviceQueue, memory: &MemoryTable) -> bool {
    !memory.imports() && each!(q, q => q.header() == VnetHdr::LEN && !q.splits())
}

/// What the header of a frame may ask for.
#[derive(Clone, Copy)]
struct Checks {
    /// The offloads that the sender has negotiated.
    sent: Offloads,
    /// The offloads that the receiver accepts.
    received: Offloads,
}

impl Checks {
    /// Checks the copy of a frame's header, and makes it one for a receiver's chain. Returns
    /// whether the frame may be copied as it is.
    #[inline(always)]
    fn admit(self, copy: &mut [u8; VnetHdr::LEN], total: usize) -> bool {
        if copy[..2] != [0, 0] && (header(self.sent, copy, total).is_err() || lacks(self.received, copy, total)) {
            return false;
        }
        copy[10..].copy_from_slice(&1u16.to_le_bytes());
        true
    }
}

/// Which driver has broken a rule, and which.
enum Broken {
    Sender(DriverFault),
    Receiver(DriverFault),
}

/// Of a sender and a receiver.
type Both<T> = (T, T);

/// A direct pass.
struct Direct<'p, 't, S, R> {
    from: &'p mut DeviceQueue<S>,
    to: &'p mut DeviceQueue<R>,
    memories: Both<View<'t>>,
    checks: Checks,
    /// The receiver's interrupt.
    call: Option<&'p Notifier>,
    lists: Both<&'p mut BufferList>,
    tallies: Both<&'p mut Tally>,
    /// Frames that are not published yet, and their bytes.
    fresh: (u16, usize),
}

impl<'t, S: DeviceFormat, R: DeviceFormat> Direct<'_, 't, S, R> {
    /// The pass. Returns the faults of both drivers.
    fn run(mut self, budget: &mut Budget) -> Both<Result<(), DriverFault>> {
        let result = self.copy_frames(budget);
        self.publish();
        self.from.viewed(&self.memories.0);
        self.to.viewed(&self.memories.1);
        match result {
            Ok(()) => (Ok(()), Ok(())),
            Err(Broken::Sender(e)) => (Err(e), Ok(())),
            Err(Broken::Receiver(e)) => (Ok(()), Err(e)),
        }
    }

    fn copy_frames(&mut self, budget: &mut Budget) -> Result<(), Broken> {
        if !self.to.refresh().map_err(Broken::Receiver)? {
            return Ok(());
        }
        let (mut groups, mut chain) = ((Group::new(), Group::new()), ShortChain::EMPTY);
        // As in `tx.rs`: after a chain of several buffers, the next one often has several, too.
        let mut several = false;
        while budget.lasts(self.tallies.0) && self.from.available() && self.to.available() {
            let mut copied = 0;
            if !several {
                copied = self.copy_group(&mut groups);
                budget.spend(copied);
            }
            if copied == 0 {
                let buffers;
                (copied, buffers) = self.copy_short(budget.chains(), &mut chain, &mut groups.1);
                budget.spend_pieces(copied, buffers);
                several = copied == 0 || chain.buffers().len() > 1;
            }
            if copied == 0 {
                let (copied, buffers) = self.copy_frame()?;
                budget.spend_pieces(copied.into(), buffers);
                if !copied {
                    break;
                }
                several = buffers > 2;
            }
            if self.fresh.0 >= PUBLISH_FRAMES || self.fresh.1 >= PUBLISH_BYTES {
                self.publish();
            }
        }
        Ok(())
    }

    /// Copies frames that are in one buffer each, and go to one buffer each. Returns how many.
    #[inline(always)]
    fn copy_group(&mut self, (sent, posted): &mut Both<Group>) -> u16 {
        if !(self.from.plain() && self.to.plain()) {
            return 0;
        }
        let most = PUBLISH_FRAMES - self.fresh.0;
        self.from.peek_group(&mut self.memories.0, most, Direction::Read, sent);
        self.to.peek_group(&mut self.memories.1, sent.chains().len() as u16, Direction::Write, posted);
        posted.chains().iter().take(AHEAD).for_each(|to| prefetch::to_write(to.host));
        let (mut copied, mut bytes) = (0, 0);
        for (n, from) in (0..posted.chains().len()).zip(sent.chains()) {
            if let Some(later) = posted.chains().get(n + AHEAD) {
                prefetch::to_write(later.host);
            }
            let to = &mut posted.chains()[n];
            let total = from.len as usize;
            if !LENGTHS.contains(&total) || from.len > to.len {
                break;
            }
            let mut header = [0; VnetHdr::LEN];
            // SAFETY: both buffers are *mapped* for `total` bytes, more than a header.
            unsafe { copy_out(from.host, &mut header) };
            if !self.checks.admit(&mut header, total) {
                break;
            }
            // SAFETY: as above.
            unsafe {
                copy_in(&header, to.host);
                let behind = (from.host.wrapping_add(VnetHdr::LEN), to.host.wrapping_add(VnetHdr::LEN));
                copy_across(behind.0, behind.1, total - VnetHdr::LEN);
            }
            to.len = from.len;
            (copied, bytes) = (copied + 1, bytes + total);
            if bytes >= PUBLISH_BYTES {
                break;
            }
        }
        self.to.add_used_group(posted, copied);
        self.from.add_used_group_read(sent, copied);
        self.count(copied, bytes);
        copied as u16
    }

    /// Copies frames that are in a few buffers each, and go to one buffer each: headers and payload
    /// of a stack that sends by reference. At most `most`. Returns how many, and how many buffers
    /// were read; `chain` is the last one that was looked at.
    #[inline(always)]
    fn copy_short(&mut self, most: u16, chain: &mut ShortChain, posted: &mut Group) -> (u16, usize) {
        if !(self.from.plain() && self.to.plain()) {
            return (0, 0);
        }
        self.to.peek_group(&mut self.memories.1, most.min(SHORT_FRAMES), Direction::Write, posted);
        posted.chains().iter().take(AHEAD).for_each(|to| prefetch::to_write(to.host));
        let (mut copied, mut bytes, mut buffers) = (0, 0, 0);
        while copied < posted.chains().len() && bytes < PUBLISH_BYTES {
            let Some(head) = self.from.peek_short(&mut self.memories.0, Direction::Read, chain) else { break };
            buffers += chain.buffers().len();
            if let Some(later) = posted.chains().get(copied + AHEAD) {
                prefetch::to_write(later.host);
            }
            let to = &mut posted.chains()[copied];
            let total = head.bytes();
            let [(first, len), rest @ ..] = chain.buffers() else { break };
            let len = *len as usize;
            if len < VnetHdr::LEN || !LENGTHS.contains(&total) || total > to.len as usize {
                break;
            }
            let mut header = [0; VnetHdr::LEN];
            // SAFETY: the buffer is *mapped* for `len` bytes, as many as a header or more.
            unsafe { copy_out(*first, &mut header) };
            if !self.checks.admit(&mut header, total) {
                break;
            }
            // SAFETY: each buffer is *mapped* for its bytes, which are `total` together, and `to`
            // for `total` or more.
            unsafe {
                copy_in(&header, to.host);
                let behind = (first.wrapping_add(VnetHdr::LEN), to.host.wrapping_add(VnetHdr::LEN));
                copy_across(behind.0, behind.1, len - VnetHdr::LEN);
                let mut at = len;
                for &(from, len) in rest {
                    copy_across(from, to.host.wrapping_add(at), len as usize);
                    at += len as usize;
                }
            }
            to.len = total as u32;
            self.from.add_used_read(head);
            (copied, bytes) = (copied + 1, bytes + total);
        }
        self.to.add_used_group(posted, copied);
        self.count(copied, bytes);
        (copied as u16, buffers)
    }

    /// Copies the next frame, out of a chain of any form and into one of any form, or several.
    /// Returns whether it was copied, and how many buffers were popped. Not if it cannot be copied
    /// as it is, or not now.
    fn copy_frame(&mut self) -> Result<(bool, usize), Broken> {
        let mut buffers = (self.lists.0.acquire(), self.lists.1.acquire());
        let copied = self.copy_chains(&mut buffers);
        let number = buffers.0.len() + buffers.1.len();
        self.lists.0.release(buffers.0);
        self.lists.1.release(buffers.1);
        Ok((copied?, number))
    }

    /// The same, with memory for the buffers of both. Nothing of the receiver's is popped before
    /// the header was checked.
    fn copy_chains(&mut self, (sent, posted): &mut Both<Vec<Buffer<'t>>>) -> Result<bool, Broken> {
        let Self { from, to, memories, checks, .. } = self;
        let popped = from.pop_up_to(PIECES, &mut from.cursor(), &mut memories.0, Direction::Read, sent);
        let Some(head) = popped.map_err(Broken::Sender)? else { return Ok(false) };
        let (total, mut header) = (head.bytes(), [0; VnetHdr::LEN]);
        let copied = gather(memories.0.table(), sent, &mut header);
        if !LENGTHS.contains(&total) || copied.is_err() || !checks.admit(&mut header, total) {
            return Ok(false);
        }
        let room = room_for(to, &mut memories.1, total, PIECES, posted).map_err(Broken::Receiver)?;
        let Room::Found(heads) = room else { return Ok(false) };
        header[10..].copy_from_slice(&(heads.len() as u16).to_le_bytes());
        let table = memories.1.table();
        let written = to.complete(heads, posted, |_| {
            scatter(table, [&header, &[]], posted)?;
            transfer(sent, posted, VnetHdr::LEN, total - VnetHdr::LEN);
            Ok::<_, CopyFailed>(total)
        });
        if written.is_ok() {
            from.add_used_read(head);
            self.count(1, total);
        }
        Ok(written.is_ok())
    }

    /// Counts frames of so many bytes together, headers included.
    #[inline(always)]
    fn count(&mut self, frames: usize, bytes: usize) {
        let (sent, received) = &mut self.tallies;
        let payload = (bytes - frames * VnetHdr::LEN) as u64;
        sent.tx_frames += frames as u64;
        sent.tx_direct += frames as u64;
        sent.tx_bytes += payload;
        received.rx_frames += frames as u64;
        received.rx_bytes += payload;
        self.fresh = (self.fresh.0 + frames as u16, self.fresh.1 + bytes);
    }

    /// Publishes what was copied: to the receiver first.
    fn publish(&mut self) {
        self.to.publish();
        if self.to.should_notify()
            && let Some(call) = self.call
        {
            call.signal();
            self.tallies.1.calls += 1;
        }
        self.from.publish();
        self.fresh = (0, 0);
    }
}
