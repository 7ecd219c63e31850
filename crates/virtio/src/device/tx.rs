//! From the driver to the port: frames out of posted chains.

use netmem_pool::foreign::copy_out;

use super::DriverFault;
use super::budget::Budget;
use super::copy::{CopyFailed, gather};
use super::memory::{MemoryTable, View};
use super::port::{MAX_WIRE, Port};
use super::rx::Scratch;
use super::stats::{DropReason, Tally};
use crate::net::{HeaderFault, Offloads, VnetHdr};
use crate::virtqueue::device::{AnyDeviceQueue, DeviceQueue, Direction, Group, Head, Side, Whole, each};

/// Frames between two publications.
const PUBLISH_FRAMES: u16 = 32;
/// An Ethernet header: what the shortest frame consists of.
const MIN_TX: usize = 14;

/// Takes chains of `q`, for the [budget](Budget) of a pass and while `port` has room, and gives their frames to it, if their headers ask for no more
/// than what it `accepts`; a ring that is disabled accepts no frame. `wire` is private memory of at least [`MAX_WIRE`] bytes.
///
/// # Errors
///
/// The rule that the driver has broken. Chains that were given back before that are published.
pub(super) fn transmit<P: Port>(
    q: &mut AnyDeviceQueue,
    memory: &MemoryTable,
    port: &mut P,
    accepts: Option<Offloads>,
    scratch: &mut Scratch,
    wire: &mut [u8],
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    each!(q, q => transmit_on(q, memory, port, accepts, scratch, wire, tally))
}

fn transmit_on<S: Side, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &MemoryTable,
    port: &mut P,
    accepts: Option<Offloads>,
    scratch: &mut Scratch,
    wire: &mut [u8],
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    if !q.refresh()? {
        return Ok(());
    }
    let mut memory = q.view(memory);
    let result = drain(q, &mut memory, port, accepts, scratch, wire, tally);
    q.viewed(&memory);
    q.publish();
    result
}

#[inline(always)]
fn drain<S: Side, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    port: &mut P,
    accepts: Option<Offloads>,
    scratch: &mut Scratch,
    wire: &mut [u8],
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    let (mut group, mut budget, mut fresh) = (Group::EMPTY, Budget::new(tally), 0);
    // Whether the last chain had several buffers. The next one often has, too, and then a group has no chains.
    let mut several = false;
    while budget.lasts(tally) && (accepts.is_none() || port.room()) {
        let most = PUBLISH_FRAMES - fresh;
        if q.plain() && !several {
            q.look_ahead(memory, most, Direction::Read, &mut group);
        }
        let mut taken = whole_frames(port, accepts, group.chains(), wire, tally);
        q.give_back_group_read(&mut group, usize::from(taken));
        if taken < most {
            // The port is full, or the next chain is of another form, or there is none. A port that had room when the pass began has it
            // until a frame is sent.
            if taken > 0 && accepts.is_some() && !port.room() || !q.available() {
                break;
            }
            let Some((head, buffers, copied)) = chain(q, memory, P::WANTS_BYTES, scratch, wire)? else { break };
            let total = head.bytes() + short(q);
            match copied {
                Ok(()) => frame(port, accepts, &mut wire[..total.min(MAX_WIRE)], total, tally),
                Err(CopyFailed) => tally.drop(DropReason::CopyFailed),
            }
            q.give_back_read(head);
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
fn whole_frames<P: Port>(
    port: &mut P,
    accepts: Option<Offloads>,
    group: &[Whole],
    wire: &mut [u8],
    tally: &mut Tally,
) -> u16 {
    for (n, w) in (0..).zip(group) {
        let total = w.len as usize;
        if !(VnetHdr::LEN..=MAX_WIRE).contains(&total) || accepts.is_some() && !port.room() {
            return n;
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

/// A legacy header is two bytes shorter than the one of the wire form, and lacks its last field. By how many bytes the
/// chains of this queue are shorter than their frames in the wire form.
fn short<S: Side>(q: &DeviceQueue<S>) -> usize {
    VnetHdr::LEN - q.header()
}

/// A chain that is lent, the number of its buffers, and whether its bytes were copied.
type Lent<S> = (Head<<S as Side>::At>, usize, Result<(), CopyFailed>);

/// The next chain, of any form, if there is one. The first [`MAX_WIRE`] bytes of its frame are copied into `wire` if `copied` is
/// set.
#[inline(never)]
fn chain<S: Side>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    copied: bool,
    scratch: &mut Scratch,
    wire: &mut [u8],
) -> Result<Option<Lent<S>>, DriverFault> {
    let mut buffers = scratch.buffers.lend();
    let lent = q.lend(&mut q.cursor(), memory, Direction::Read, &mut buffers);
    let (short, mut result) = (short(q), Ok(()));
    if copied && matches!(lent, Ok(Some(_))) {
        result = gather(memory.table(), &buffers, &mut wire[short..]).map(drop);
        if short > 0 {
            wire.copy_within(short..VnetHdr::LEN, 0);
            wire[q.header()..VnetHdr::LEN].fill(0);
        }
    }
    let number = buffers.len();
    scratch.buffers.put(buffers);
    Ok(lent?.map(|head| (head, number, result)))
}

/// Checks a frame of `total` bytes, header included, and hands it on.
#[inline(always)]
fn frame<P: Port>(port: &mut P, accepts: Option<Offloads>, wire: &mut [u8], total: usize, tally: &mut Tally) {
    let Some(offloads) = accepts else { return tally.drop(DropReason::Disabled) };
    if total < VnetHdr::LEN + MIN_TX {
        return tally.drop(DropReason::Runt);
    }
    if total > MAX_WIRE {
        return tally.drop(DropReason::TooLong);
    }
    if P::WANTS_BYTES {
        // Flags and kind of segment: most frames have neither.
        if wire[..2] != [0, 0]
            && let Err(reason) = header(offloads, wire)
        {
            return tally.drop(reason);
        }
        if !port.send(wire) {
            return tally.drop(DropReason::PortRefused);
        }
    }
    tally.tx_frames += 1;
    tally.tx_bytes += (total - VnetHdr::LEN) as u64;
}

/// Checks the header of a frame that asks for offloads, and clears the fields that are ignored.
#[cold]
fn header(offloads: Offloads, wire: &mut [u8]) -> Result<(), DropReason> {
    let (bytes, frame) = wire.split_first_chunk_mut().ok_or(DropReason::Runt)?;
    // If no offload was negotiated, the header has no meaning, and not every driver clears it: DPDK's vectorised
    // transmission sends the bytes that a buffer had there from its last use.
    if offloads == Offloads::default() {
        *bytes = VnetHdr::PLAIN.to_bytes();
        return Ok(());
    }
    let checked = offloads.check(VnetHdr::from_bytes(*bytes), frame.len()).map_err(|fault| match fault {
        HeaderFault::NotNegotiated => DropReason::NotNegotiated,
        HeaderFault::Nonsense => DropReason::BadHeader,
    })?;
    *bytes = checked.to_bytes();
    Ok(())
}
