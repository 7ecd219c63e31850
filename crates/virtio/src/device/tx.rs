//! From the driver to the port: chains into frames.

use netmem_pool::foreign::copy_out;

use super::DriverFault;
use super::copy::gather;
use super::memory::{MemoryTable, View};
use super::port::{MAX_WIRE, Port};
use super::queue::{Direction, Queue};
use super::rx::{BATCH, Scratch};
use super::stats::{DropReason, Tally};
use crate::net::{HeaderFault, Offloads, VnetHdr};

/// Frames between two publications of the used index.
const PUBLISH_FRAMES: u16 = 32;
/// An Ethernet header: what the shortest frame consists of.
const MIN_TX: usize = 14;

/// Takes up to [`BATCH`] chains of `q`, while `port` has room, and gives their frames to it, if their headers ask for no more
/// than what it `accepts`; a ring that is disabled accepts no frame. `wire` is private memory of at least [`MAX_WIRE`] bytes.
///
/// # Errors
///
/// What the driver did wrong. Everything given back before stays given back, and is published.
pub(super) fn transmit<P: Port>(
    q: &mut Queue,
    memory: &MemoryTable,
    port: &mut P,
    accepts: Option<Offloads>,
    scratch: &mut Scratch,
    wire: &mut [u8],
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    let left = q.refresh()?.min(BATCH);
    let mut memory = q.view(memory);
    let mut result = Ok(());
    for n in 0..left {
        if n % PUBLISH_FRAMES == PUBLISH_FRAMES - 1 {
            q.publish();
        }
        if accepts.is_some() && !port.room() {
            break;
        }
        let head = match take(q, &mut memory, P::WANTS_BYTES, scratch, wire) {
            Ok((head, total)) => {
                frame(port, accepts, &mut wire[..total.min(MAX_WIRE)], total, tally);
                head
            }
            Err(e) => {
                result = Err(e);
                break;
            }
        };
        q.give_back(head, 0);
    }
    q.viewed(&memory);
    q.publish();
    result
}

/// The next chain: its head and its bytes, of which the first [`MAX_WIRE`] are copied into `wire` if `copied` is set.
#[inline(always)]
fn take(
    q: &Queue,
    memory: &mut View<'_>,
    copied: bool,
    scratch: &mut Scratch,
    wire: &mut [u8],
) -> Result<(u16, usize), DriverFault> {
    let head = q.head(0)?;
    let d = q.desc(head);
    let len = d.len as usize;
    let plain = d.flags == 0 && (VnetHdr::LEN..=wire.len()).contains(&len);
    if plain
        && q.plain()
        && let Some(host) = memory.translate(d.addr, d.len)
    {
        if copied {
            // SAFETY: `host` is *mapped* for `len` bytes, and `wire` has that many.
            unsafe { copy_out(host, &mut wire[..len]) };
        }
        return Ok((head, len));
    }
    let mut buffers = scratch.buffers.lend();
    let total = q.chain(memory, head, Direction::Read, &mut buffers);
    // A legacy header is two bytes shorter than the one of the wire form, and lacks its last field.
    let short = VnetHdr::LEN - q.header();
    if copied && total.is_ok() {
        gather(&buffers, &mut wire[short..]);
        if short > 0 {
            wire.copy_within(short..VnetHdr::LEN, 0);
            wire[q.header()..VnetHdr::LEN].fill(0);
        }
    }
    scratch.buffers.put(buffers);
    Ok((head, total? as usize + short))
}

/// Judges a frame of `total` bytes, header included, and hands it on.
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

/// Judges the header of a frame that asks for offloads, and takes out of it what is ignored.
#[cold]
fn header(offloads: Offloads, wire: &mut [u8]) -> Result<(), DropReason> {
    let (bytes, frame) = wire.split_first_chunk_mut().ok_or(DropReason::Runt)?;
    let checked = offloads.check(VnetHdr::from_bytes(*bytes), frame.len()).map_err(|fault| match fault {
        HeaderFault::NotNegotiated => DropReason::NotNegotiated,
        HeaderFault::Nonsense => DropReason::BadHeader,
    })?;
    *bytes = checked.to_bytes();
    Ok(())
}
