//! From the port to the driver: frames into posted buffers.
//!
//! A frame that fits one buffer is the common case. Such frames are copied in groups, so that the
//! stores which wait for the driver's core wait together. All others are delivered one at a time.
//!
//! Buffers are not prefetched. Prefetching was tried, for reading and for writing, 4 to 64 chains
//! ahead. On one core it costs most of a nanosecond per frame. Between cores the cost is that of
//! the lines that change owners, and prefetching does not change their number.

use netmem_pool::foreign::copy_in;

use super::DriverFault;
use super::budget::Budget;
use super::port::{MAX_WIRE, Port, Posted};
use super::split;
use super::stats::{DropReason, Tally};
use crate::guest_memory::buffer::{Buffer, BufferList};
use crate::guest_memory::copy::scatter;
use crate::guest_memory::view::View;
use crate::guest_memory::{CopyFailed, MemoryTable};
use crate::net::{Offloads, VnetHdr};
use crate::virtqueue::device::{
    AnyDeviceQueue, DeviceFormat, DeviceQueue, Direction, GROUP, Group, Heads, SingleBuffer, each,
};

/// The used index is published after so many bytes, or after a group of frames.
pub(super) const PUBLISH_BYTES: usize = 128 << 10;

/// If frames are short and the port has read them itself, the used index is published after so many
/// of them. Each read is a system call, and a driver that polls should not wait for more than a
/// few.
const PUBLISH_READS: usize = 8;

/// Bytes of a frame that the driver reads in any case: a cache line.
const FRONT: usize = 64;
/// Frames from this length on are copied in two parts.
const LONG: usize = 256;

/// Memory for the chains of one frame, and for the fronts of a group. It is kept, so that no frame
/// needs an allocation.
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) buffers: BufferList,
    /// The buffers of another pair, into which a frame is copied directly.
    pub(super) posted: BufferList,
    fronts: Box<[[u8; FRONT]; GROUP]>,
    /// One frame from the driver, in wire form: [`MAX_WIRE`] bytes.
    pub(super) wire: Box<[u8]>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            buffers: BufferList::default(),
            posted: BufferList::default(),
            fronts: Box::new([[0; FRONT]; GROUP]),
            wire: vec![0; MAX_WIRE].into(),
        }
    }
}

/// Fills chains of `q` from `port`, for the [budget](Budget) of a pass.
///
/// # Errors
///
/// The rule that the driver has broken. Chains that were completed before are published.
#[inline]
pub(super) fn receive<P: Port>(
    q: &mut AnyDeviceQueue,
    memory: &MemoryTable,
    port: &mut P,
    scratch: &mut Scratch,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    each!(q, q => receive_on(q, memory, port, scratch, tally))
}

#[inline]
fn receive_on<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &MemoryTable,
    port: &mut P,
    scratch: &mut Scratch,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    if !q.refresh()? || q.out_of_buffers() {
        if port.peek().is_some() {
            tally.out_of_buffers += 1;
        }
        return Ok(());
    }
    // Most passes find no frame.
    if !P::READS && port.peek().is_none() {
        return Ok(());
    }
    let mut memory = q.view(memory);
    let result = match q.splits() {
        true => split::receive(q, &mut memory, port, scratch, tally),
        false => fill(q, &mut memory, port, scratch, tally),
    };
    q.viewed(&memory);
    q.publish();
    result
}

#[inline(always)]
fn fill<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    port: &mut P,
    scratch: &mut Scratch,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    let (mut group, mut budget) = (Group::new(), Budget::new(tally));
    while budget.lasts(tally) && q.available() {
        // The kernel cannot read into imported memory.
        if P::READS && !memory.table().imports() && port.expects().is_some() {
            read_frames(q, memory, port, scratch, &mut budget, tally)?;
            if port.expects().is_some() {
                break;
            }
        }
        if !budget.lasts(tally) || !q.available() || port.peek().is_none() {
            break;
        }
        if q.plain() {
            // Of a port that reads into buffers, only one frame is copied: the next frame is read
            // into the buffers again.
            let most = if P::READS { 1 } else { budget.chains() };
            q.peek_group(memory, most, Direction::Write, &mut group);
        }
        let (taken, end) = single_buffer_frames(port, group.chains(), &mut scratch.fronts, tally);
        q.add_used_group(&mut group, taken);
        q.publish();
        budget.spend(taken as u16);
        if end == GroupEnd::OtherForm && !deliver_one(q, memory, port, scratch, &mut budget, tally)? {
            break;
        }
    }
    Ok(())
}

/// Has the port read frames straight into the driver's buffers, as long as there are frames that
/// spread_result. If a frame must be delivered in another way, [`Port::peek`] shows it afterwards.
fn read_frames<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    port: &mut P,
    scratch: &mut Scratch,
    budget: &mut Budget,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    let (accepts, mut unpublished) = (q.negotiated().received(), 0);
    while budget.lasts(tally)
        && q.available()
        && let Some(bytes) = port.expects()
    {
        let mut buffers = scratch.buffers.acquire();
        let read = read_frame(q, memory, port, (accepts, bytes), &mut buffers);
        budget.spend_pieces(0, buffers.len());
        scratch.buffers.release(buffers);
        let Some((chains, len)) = read? else { break };
        tally.rx_frames += 1;
        tally.rx_bytes += len as u64;
        tally.rx_in_place += 1;
        budget.spend(chains);
        unpublished += len + PUBLISH_BYTES / PUBLISH_READS;
        if unpublished >= PUBLISH_BYTES {
            q.publish();
            unpublished = 0;
        }
    }
    Ok(())
}

/// Has the port read a frame into chains of about `bytes` bytes. Returns the number of chains that
/// the frame fills, and its length.
#[inline]
fn read_frame<'t, S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'t>,
    port: &mut P,
    (accepts, bytes): (Offloads, usize),
    buffers: &mut Vec<Buffer<'t>>,
) -> Result<Option<(u16, usize)>, DriverFault> {
    let mut cursor = q.cursor();
    let Some(first) = q.pop_chain(&mut cursor, memory, Direction::Write, buffers)? else { return Ok(None) };
    let mut heads = Heads::new(first);
    let most = if q.negotiated().mergeable() { usize::from(q.size()) } else { 1 };
    while heads.bytes() < bytes && heads.len() < most {
        let Some(head) = q.pop_chain(&mut cursor, memory, Direction::Write, buffers)? else { break };
        heads.push(head);
    }
    let (table, header_len, mut read) = (memory.table(), q.header(), 0);
    let chains = q.complete(heads, buffers, |heads| {
        let (header, len) = port.read(accepts, Posted::new(buffers, header_len)).ok_or(())?;
        read = len;
        let header = VnetHdr { num_buffers: heads.with_bytes(header_len + len), ..header }.to_bytes();
        // It cannot fail: all buffers are mapped, see `fill`.
        let _ = scatter(table, [&header[..header_len], &[]], buffers);
        Ok::<_, ()>(header_len + len)
    });
    Ok(chains.ok().map(|chains| (chains, read)))
}

/// Why a group of frames ended.
#[derive(PartialEq, Eq)]
enum GroupEnd {
    /// There are no more frames or buffers, or enough was written to publish it to the driver.
    Pause,
    /// The next frame does not spread_result the next buffer.
    OtherForm,
}

/// Copies frames into buffers that hold them whole. Returns how many; their lengths are in `group`
/// then.
///
/// The driver reads the front of a buffer, so a store there waits until the driver's core releases
/// the line. Stores commit in order, so the stores that wait should be next to each other, to wait
/// at the same time. Short frames are copied one right after the other. Of long ones the rest is
/// copied first, for all, and then the fronts.
#[inline(always)]
fn single_buffer_frames<P: Port>(
    port: &mut P,
    group: &mut [SingleBuffer],
    fronts: &mut [[u8; FRONT]; GROUP],
    tally: &mut Tally,
) -> (usize, GroupEnd) {
    let (mut taken, mut bytes) = (0, 0);
    let mut end = if group.is_empty() { GroupEnd::OtherForm } else { GroupEnd::Pause };
    for (w, front) in group.iter_mut().zip(&mut *fronts) {
        let Some(wire) = port.peek() else { break };
        if (w.len as usize) < wire.len() {
            end = GroupEnd::OtherForm;
            break;
        }
        // SAFETY: `host` is *mapped* for `w.len` bytes, which is at least `wire.len()`; `wire` is
        // private memory.
        unsafe {
            match wire.split_first_chunk() {
                Some((first, rest)) if wire.len() >= LONG => {
                    *front = *first;
                    copy_in(rest, w.host.add(FRONT));
                }
                _ => copy_in(wire, w.host),
            }
        }
        w.len = wire.len() as u32;
        bytes += wire.len();
        taken += 1;
        port.consume();
        if bytes >= PUBLISH_BYTES {
            break;
        }
    }
    for (w, front) in group[..taken].iter().zip(fronts).filter(|(w, _)| w.len as usize >= LONG) {
        // SAFETY: as above; `LONG` is more than `FRONT`.
        unsafe { copy_in(front, w.host) };
    }
    tally.rx_frames += taken as u64;
    tally.rx_bytes += (bytes - taken * VnetHdr::LEN) as u64;
    (taken, end)
}

/// Delivers the next frame into the available buffers, of any form. Returns whether the pass
/// continues: not if the frame must wait.
#[cold]
fn deliver_one<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    port: &mut P,
    scratch: &mut Scratch,
    budget: &mut Budget,
    tally: &mut Tally,
) -> Result<bool, DriverFault> {
    let Some(wire) = port.peek() else { return Ok(false) };
    let mut buffers = scratch.buffers.acquire();
    let spread_result = spread(q, memory, wire, &mut buffers);
    budget.spend_pieces(0, buffers.len());
    scratch.buffers.release(buffers);
    let chains = match spread_result? {
        Spread::Delivered(chains) => {
            tally.rx_frames += 1;
            tally.rx_bytes += (wire.len() - VnetHdr::LEN) as u64;
            chains
        }
        Spread::OutOfBuffers => {
            tally.out_of_buffers += 1;
            return Ok(false);
        }
        Spread::TooBig => return Ok(discard(q, port, DropReason::TooBig, budget, tally)),
        Spread::CopyFailed => return Ok(discard(q, port, DropReason::CopyFailed, budget, tally)),
    };
    port.consume();
    q.publish();
    budget.spend(chains);
    Ok(true)
}

/// Drops the port's frame. The chain stays the next one. Returns true.
#[cold]
fn discard<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    port: &mut P,
    why: DropReason,
    budget: &mut Budget,
    tally: &mut Tally,
) -> bool {
    tally.drop(why);
    port.discard(why);
    q.publish();
    budget.spend(1);
    true
}

/// The result of the delivery of a frame.
enum Spread {
    /// It went into so many chains.
    Delivered(u16),
    /// More buffers are needed than the driver has posted so far.
    OutOfBuffers,
    /// It fits no buffers that this driver posts.
    TooBig,
    /// Its bytes could not be copied. Its chains stay the next ones.
    CopyFailed,
}

/// The chains for a frame.
pub(super) enum Room<A> {
    /// They have room for it.
    Found(Heads<A>),
    /// More buffers are needed than the driver has posted so far: there is no chain at this place.
    OutOfBuffers(A),
    /// It fits no buffers that this driver posts.
    TooBig,
}

/// Pops chains for a frame of `total` bytes, header included: one, or (mergeable) as many as it
/// needs. Their buffers are appended to `buffers`. If the heads are dropped, a later pass pops the
/// chains again. If the frame needs more than `pieces` buffers, the result is as if the driver had
/// posted no more.
pub(super) fn room_for<'t, S: DeviceFormat>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'t>,
    total: usize,
    pieces: usize,
    buffers: &mut Vec<Buffer<'t>>,
) -> Result<Room<S::At>, DriverFault> {
    let most = if q.negotiated().mergeable() { q.size() } else { 1 };
    let mut cursor = q.cursor();
    let Some(head) = q.pop_up_to(pieces, &mut cursor, memory, Direction::Write, buffers)? else {
        return Ok(Room::OutOfBuffers(cursor));
    };
    let mut heads = Heads::new(head);
    while heads.bytes() < total {
        if heads.len() == usize::from(most) {
            return Ok(Room::TooBig);
        }
        let Some(head) = q.pop_up_to(pieces, &mut cursor, memory, Direction::Write, buffers)? else {
            return Ok(Room::OutOfBuffers(cursor));
        };
        heads.push(head);
    }
    Ok(Room::Found(heads))
}

/// One frame into a chain of several buffers, or (mergeable) into several chains. All of them are
/// collected before the first byte is written, so that a frame that has to wait costs no copy, and
/// its chains become visible together.
fn spread<'t, S: DeviceFormat>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'t>,
    wire: &[u8],
    buffers: &mut Vec<Buffer<'t>>,
) -> Result<Spread, DriverFault> {
    let (header, frame) = wire.split_at(VnetHdr::LEN);
    let total = q.header() + frame.len();
    let heads = match room_for(q, memory, total, usize::MAX, buffers)? {
        Room::Found(heads) => heads,
        Room::OutOfBuffers(at) => {
            q.set_out_of_buffers(at);
            return Ok(Spread::OutOfBuffers);
        }
        Room::TooBig => return Ok(Spread::TooBig),
    };
    let (table, header_len) = (memory.table(), q.header());
    let mut first = [0; VnetHdr::LEN];
    first.copy_from_slice(header);
    first[10..].copy_from_slice(&(heads.len() as u16).to_le_bytes());
    // A legacy header ends before the number of buffers.
    let written = q.complete(heads, buffers, |_| {
        scatter(table, [&first[..header_len], frame], buffers)?;
        Ok(total)
    });
    Ok(match written {
        Ok(chains) => Spread::Delivered(chains),
        Err(CopyFailed) => Spread::CopyFailed,
    })
}
