//! From the driver to the port: frames out of posted chains.
//!
//! A frame of one buffer is the common case, and is copied out in a group with its successors. A
//! chain of several buffers is gathered by itself. A port that can read the driver's buffers itself
//! gets large frames in place.

use netmem_pool::foreign::copy_out;

use super::DriverFault;
use super::budget::Budget;
use super::port::{MAX_WIRE, Port, Rest};
use super::rx::Scratch;
use super::stats::{DropReason, Tally};
use crate::guest_memory::buffer::{Buffer, BufferList};
use crate::guest_memory::copy::gather;
use crate::guest_memory::view::View;
use crate::guest_memory::{CopyFailed, MemoryTable};
use crate::net::{HeaderFault, Offloads, VnetHdr};
use crate::virtqueue::device::{AnyDeviceQueue, DeviceFormat, DeviceQueue, Direction, Group, Head, SingleBuffer, each};

/// Frames between two publications.
pub(super) const PUBLISH_FRAMES: u16 = 32;
/// Frames of this length, in wire form, go to a port in place if it accepts them so. A `writev`
/// costs more than a copy of fewer bytes.
const IN_PLACE: usize = 16 << 10;
/// Bytes of such a frame that are copied: the virtio header, and the headers up to that of the
/// transport, with IPv6 extension headers.
const HEAD: usize = 512;
/// An Ethernet header: what the shortest frame consists of.
pub(super) const MIN_TX: usize = 14;

/// Pops chains of `q`, for what is left of the budget of a pass and while `port` has room, and
/// sends their frames to it. A frame whose header needs more than the offloads of `accepts` is
/// dropped; a ring that is disabled accepts no frame.
///
/// `q` was refreshed, and has a chain. The available index of a split ring is not read again, so a
/// frame that comes later is one for the next pass.
///
/// # Errors
///
/// The rule that the driver has broken. Chains that were completed before are published.
pub(super) fn transmit<P: Port>(
    q: &mut AnyDeviceQueue,
    memory: &MemoryTable,
    port: &mut P,
    accepts: Option<Offloads>,
    scratch: &mut Scratch,
    (budget, tally): (Budget, &mut Tally),
) -> Result<(), DriverFault> {
    each!(q, q => transmit_on(q, memory, port, accepts, scratch, (budget, tally)))
}

fn transmit_on<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &MemoryTable,
    port: &mut P,
    accepts: Option<Offloads>,
    scratch: &mut Scratch,
    bounds: (Budget, &mut Tally),
) -> Result<(), DriverFault> {
    let mut memory = q.view(memory);
    let result = drain(q, &mut memory, port, accepts, scratch, bounds);
    q.viewed(&memory);
    q.publish();
    result
}

#[inline(always)]
fn drain<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    port: &mut P,
    accepts: Option<Offloads>,
    scratch: &mut Scratch,
    (mut budget, tally): (Budget, &mut Tally),
) -> Result<(), DriverFault> {
    let Scratch { buffers: list, wire, .. } = scratch;
    let wire = &mut wire[..];
    let (mut group, mut fresh) = (Group::new(), 0);
    // Whether the last chain had several buffers. The next one often has, too, and then a group has
    // no chains.
    let mut several = false;
    while budget.lasts(tally) && (accepts.is_none() || port.room()) {
        let most = PUBLISH_FRAMES - fresh;
        if q.plain() && !several {
            q.peek_group(memory, most, Direction::Read, &mut group);
        }
        let mut taken = single_buffer_frames(port, accepts, group.chains(), wire, tally);
        q.add_used_group_read(&mut group, usize::from(taken));
        if taken < most {
            // The port is full, or the next chain is of another form, or there is none. A port that
            // had room when the pass began has it until a frame is sent.
            if taken > 0 && accepts.is_some() && !port.room() || !q.available() {
                break;
            }
            let Some((head, buffers, copied)) = chain(q, memory, port, accepts, list, wire)? else { break };
            let total = head.bytes() + short(q);
            match copied {
                Ok(Copied::Stored(stored)) => count(stored, total, tally),
                Ok(Copied::All) => frame(port, accepts, &mut wire[..total.min(MAX_WIRE)], total, tally),
                Ok(Copied::Sent(sent)) => {
                    tally.tx_in_place += u64::from(sent);
                    count(accepted(sent), total, tally);
                }
                Err(CopyFailed) => tally.drop(DropReason::CopyFailed),
            }
            q.add_used_read(head);
            several = buffers > 1;
            taken += 1;
            budget.spend_pieces(0, buffers);
        }
        budget.spend(taken);
        fresh += taken;
        if fresh == PUBLISH_FRAMES {
            q.publish();
            fresh = 0;
        }
    }
    Ok(())
}

/// Hands on frames that are each in one buffer, while the port has room. Returns how many.
#[inline(always)]
fn single_buffer_frames<P: Port>(
    port: &mut P,
    accepts: Option<Offloads>,
    group: &[SingleBuffer],
    wire: &mut [u8],
    tally: &mut Tally,
) -> u16 {
    let longest = if P::SENDS_IN_PLACE { IN_PLACE - 1 } else { MAX_WIRE };
    for (n, w) in (0..).zip(group) {
        let total = w.len as usize;
        if !(VnetHdr::LEN..=longest).contains(&total) || accepts.is_some() && !port.room() {
            return n;
        }
        if P::STORES {
            let copy = |place: &mut [u8]| {
                // SAFETY: `host` is *mapped* for the bytes of the chain, and the place has that
                // many.
                unsafe { copy_out(w.host, place) };
                Ok(())
            };
            count(store(port, accepts, total, copy), total, tally);
            continue;
        }
        let wire = &mut wire[..total];
        if P::WANTS_BYTES {
            // SAFETY: `host` is *mapped* for the bytes of the chain, and `wire` has that many.
            unsafe { copy_out(w.host, wire) };
        }
        frame(port, accepts, wire, total, tally);
    }
    group.len() as u16
}

/// A legacy header is two bytes shorter than the one of the wire form, and lacks its last field. By
/// how many bytes the chains of this queue are shorter than their frames in the wire form.
fn short<S: DeviceFormat>(q: &DeviceQueue<S>) -> usize {
    VnetHdr::LEN - q.header()
}

/// What became of a frame's bytes.
enum Copied {
    /// The first [`MAX_WIRE`] are in private memory, if the port wants bytes.
    All,
    /// The frame was sent to the port in place. Whether the port accepted it.
    Sent(bool),
    /// The frame was copied to its place in the port, or why not.
    Stored(Result<(), DropReason>),
}

/// A chain that is popped, the number of its buffers, and what became of its bytes.
type Popped<S> = (Head<<S as DeviceFormat>::At>, usize, Result<Copied, CopyFailed>);

/// The next chain, of any form, if there is one. Its frame is copied into `wire`, or sent to the
/// port in place.
#[inline(never)]
fn chain<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    port: &mut P,
    accepts: Option<Offloads>,
    list: &mut BufferList,
    wire: &mut [u8],
) -> Result<Option<Popped<S>>, DriverFault> {
    let mut buffers = list.acquire();
    let popped = q.pop_chain(&mut q.cursor(), memory, Direction::Read, &mut buffers);
    let (short, mut result) = (short(q), Ok(Copied::All));
    if let (true, Ok(Some(head))) = (P::STORES, &popped) {
        let copy = |place: &mut [u8]| gather_wire(memory.table(), &buffers, short, place);
        result = Ok(Copied::Stored(store(port, accepts, head.bytes() + short, copy)));
    } else if let (true, Ok(Some(head))) = (P::WANTS_BYTES, &popped) {
        let large = P::SENDS_IN_PLACE && (IN_PLACE..=MAX_WIRE).contains(&head.bytes());
        let sent = match accepts.filter(|_| large && short == 0) {
            Some(offloads) => in_place(memory.table(), port, offloads, &buffers, head.bytes(), wire),
            None => None,
        };
        result = match sent {
            Some(sent) => Ok(Copied::Sent(sent)),
            None => gather_wire(memory.table(), &buffers, short, wire).map(|()| Copied::All),
        };
    }
    let number = buffers.len();
    list.release(buffers);
    Ok(popped?.map(|head| (head, number, result)))
}

/// Copies a chain's frame into `wire`, in the wire form. The chain's header lacks the last `short`
/// bytes of that form, which are cleared.
fn gather_wire(table: &MemoryTable, buffers: &[Buffer<'_>], short: usize, wire: &mut [u8]) -> Result<(), CopyFailed> {
    gather(table, buffers, &mut wire[short..])?;
    if short > 0 {
        wire.copy_within(short..VnetHdr::LEN, 0);
        wire[VnetHdr::LEN - short..VnetHdr::LEN].fill(0);
    }
    Ok(())
}

/// Has the port store a frame of `total` bytes, header included, which `copy` copies to its place
/// there. The place is private memory, in which the header is checked.
#[inline(always)]
fn store<P: Port>(
    port: &mut P,
    accepts: Option<Offloads>,
    total: usize,
    copy: impl FnOnce(&mut [u8]) -> Result<(), CopyFailed>,
) -> Result<(), DropReason> {
    let offloads = accepts.ok_or(DropReason::Disabled)?;
    check_length(total)?;
    let mut result = Err(DropReason::PortRefused);
    port.send_with(total, |wire| {
        result = match copy(wire) {
            Ok(()) if wire[..2] != [0, 0] => header(offloads, wire, total),
            Ok(()) => Ok(()),
            Err(CopyFailed) => Err(DropReason::CopyFailed),
        };
        result.is_ok()
    });
    result
}

/// Sends the port a frame of `total` bytes, of which only the [`HEAD`] is copied. `None` if it must
/// be copied as a whole: the port does not accept it as it is, or its header is refused, or it is
/// in memory that the kernel cannot read. What was copied here is then not used: the header is read
/// and checked again, with the rest of the frame.
fn in_place<P: Port>(
    table: &MemoryTable,
    port: &mut P,
    offloads: Offloads,
    buffers: &[Buffer<'_>],
    total: usize,
    wire: &mut [u8],
) -> Option<bool> {
    if table.imports() {
        return None;
    }
    let (rest, wire) = (Rest::new(buffers, HEAD)?, &mut wire[..HEAD]);
    gather(table, buffers, wire).ok()?;
    if wire[..2] != [0, 0] {
        header(offloads, wire, total).ok()?;
    }
    port.send_in_place(wire, rest)
}

/// Counts a frame of `total` bytes, header included, that was sent, or why it was not.
#[inline(always)]
fn count(sent: Result<(), DropReason>, total: usize, tally: &mut Tally) {
    match sent {
        Ok(()) => {
            tally.tx_frames += 1;
            tally.tx_bytes += (total - VnetHdr::LEN) as u64;
        }
        Err(reason) => tally.drop(reason),
    }
}

/// The result of a port that has accepted a frame or not.
#[inline(always)]
fn accepted(sent: bool) -> Result<(), DropReason> {
    if sent { Ok(()) } else { Err(DropReason::PortRefused) }
}

/// Whether a frame may have `total` bytes, header included.
#[inline(always)]
fn check_length(total: usize) -> Result<(), DropReason> {
    if total < VnetHdr::LEN + MIN_TX {
        return Err(DropReason::Runt);
    }
    if total > MAX_WIRE { Err(DropReason::TooLong) } else { Ok(()) }
}

/// Checks a frame of `total` bytes, header included, and hands it on.
#[inline(always)]
fn frame<P: Port>(port: &mut P, accepts: Option<Offloads>, wire: &mut [u8], total: usize, tally: &mut Tally) {
    let Some(offloads) = accepts else { return refuse(port, wire, DropReason::Disabled, tally) };
    if let Err(reason) = check_length(total) {
        return refuse(port, wire, reason, tally);
    }
    if P::WANTS_BYTES {
        // Flags and kind of segment: most frames have neither.
        if wire[..2] != [0, 0]
            && let Err(reason) = header(offloads, wire, total)
        {
            return refuse(port, wire, reason, tally);
        }
        return count(accepted(port.send(wire)), total, tally);
    }
    count(Ok(()), total, tally);
}

/// Drops a frame whose bytes are in `wire`, if the port wants bytes.
#[cold]
fn refuse<P: Port>(port: &mut P, wire: &[u8], why: DropReason, tally: &mut Tally) {
    if P::WANTS_BYTES {
        port.dropped(wire, why);
    }
    tally.drop(why);
}

/// Checks the header of a frame of `total` bytes that asks for offloads, and clears the fields that
/// are ignored.
#[cold]
pub(super) fn header(offloads: Offloads, wire: &mut [u8], total: usize) -> Result<(), DropReason> {
    let (bytes, _) = wire.split_first_chunk_mut().ok_or(DropReason::Runt)?;
    // If no offload was negotiated, the header has no meaning, and not every driver clears it:
    // DPDK's vectorised transmission sends the bytes that a buffer had there from its last use.
    if offloads == Offloads::default() {
        *bytes = VnetHdr::PLAIN.to_bytes();
        return Ok(());
    }
    let checked = offloads.check(VnetHdr::from_bytes(*bytes), total - VnetHdr::LEN).map_err(|fault| match fault {
        HeaderFault::NotNegotiated => DropReason::NotNegotiated,
        HeaderFault::Nonsense => DropReason::BadHeader,
    })?;
    *bytes = checked.to_bytes();
    Ok(())
}
