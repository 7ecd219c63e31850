//! From the port to the driver: frames into posted buffers.
//!
//! Buffers are not prefetched. It was tried, for reading and for ownership, 4 to 64 chains ahead: on one core it costs
//! most of a nanosecond per frame, and across cores the cost is the number of lines that change owners, which no hint
//! changes.

use super::QueueError;
use super::copy::{copy, scatter};
use super::memory::MemoryTable;
use super::port::Port;
use super::queue::{Buffer, Direction, Queue};
use super::stats::{DropReason, Tally};
use crate::net::VnetHdr;
use crate::ring::DESC_WRITE;

/// Chains taken in one pass.
pub(super) const BATCH: u16 = 256;
/// Frames between two publications of the used index: often enough to keep a driver on another core busy, rarely
/// enough that its cache line is not fought over.
const PUBLISH_FRAMES: u32 = 64;
/// A frame from this length on is published at once.
const PUBLISH_BYTES: usize = 4096;

/// Room for the walk of one frame's chains; kept to spare an allocation per frame.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) buffers: Vec<Buffer>,
    chains: Vec<(u16, u32)>,
}

/// Fills up to [`BATCH`] chains of `q` from `port`.
///
/// # Errors
///
/// What the driver did wrong. Everything given back before stays given back, and is published.
#[inline]
pub(super) fn receive<P: Port>(
    q: &mut Queue,
    memory: &MemoryTable,
    port: &mut P,
    mergeable: bool,
    scratch: &mut Scratch,
    tally: &mut Tally,
) -> Result<(), QueueError> {
    let available = q.refresh()?;
    if available == 0 || q.starved() {
        if port.peek().is_some() {
            tally.starved += 1;
        }
        return Ok(());
    }
    let result = fill(q, memory, port, mergeable, scratch, tally, available.min(BATCH));
    q.publish();
    result
}

#[inline(always)]
fn fill<P: Port>(
    q: &mut Queue,
    memory: &MemoryTable,
    port: &mut P,
    mergeable: bool,
    scratch: &mut Scratch,
    tally: &mut Tally,
    mut left: u16,
) -> Result<(), QueueError> {
    let (mut frames, mut bytes, mut unpublished) = (0u64, 0u64, 0u32);
    let result = loop {
        if left == 0 {
            break Ok(());
        }
        let Some(wire) = port.peek() else { break Ok(()) };
        let head = match q.head(0) {
            Ok(head) => head,
            Err(e) => break Err(e),
        };
        let d = q.desc(head);
        // One writable buffer that holds the whole frame; everything else is looked at more closely.
        let whole = d.flags == DESC_WRITE && d.len as usize >= wire.len();
        if whole && let Some(host) = q.host(memory, &d) {
            // SAFETY: `host` is *mapped* for `d.len` bytes, which is at least `wire.len()`; `wire` is private memory.
            unsafe { copy(wire.as_ptr(), host, wire.len()) };
            q.give_back(head, wire.len() as u32);
            left -= 1;
        } else {
            match spread(q, memory, wire, mergeable, scratch) {
                Ok(Fit::Done(chains)) => left = left.saturating_sub(chains),
                Ok(Fit::Waits) => {
                    tally.starved += 1;
                    q.starve();
                    break Ok(());
                }
                Ok(Fit::Never) => {
                    port.consume();
                    tally.drop(DropReason::TooBig);
                    left -= 1;
                    continue;
                }
                Err(e) => break Err(e),
            }
        }
        frames += 1;
        bytes += (wire.len() - VnetHdr::LEN) as u64;
        unpublished += 1;
        if unpublished == PUBLISH_FRAMES || wire.len() >= PUBLISH_BYTES {
            unpublished = 0;
            q.publish();
        }
        port.consume();
    };
    tally.rx_frames += frames;
    tally.rx_bytes += bytes;
    result
}

/// What became of a frame.
enum Fit {
    /// It went into so many chains.
    Done(u16),
    /// More buffers are needed than the driver has posted so far.
    Waits,
    /// It fits no buffers that this driver posts.
    Never,
}

/// One frame into a chain of several buffers, or (mergeable) into several chains. All of them are collected before the
/// first byte is written, so that a frame that has to wait costs no copy, and its chains become visible together.
fn spread(
    q: &mut Queue,
    memory: &MemoryTable,
    wire: &[u8],
    mergeable: bool,
    scratch: &mut Scratch,
) -> Result<Fit, QueueError> {
    scratch.buffers.clear();
    scratch.chains.clear();
    let (mut room, mut taken) = (0, 0);
    while room < wire.len() {
        if taken == 1 && !mergeable || taken == q.size() {
            return Ok(Fit::Never);
        }
        if taken == q.ahead() {
            return Ok(Fit::Waits);
        }
        let head = q.head(taken)?;
        let len = q.chain(memory, head, Direction::Write, &mut scratch.buffers)?;
        scratch.chains.push((head, len));
        room += len as usize;
        taken += 1;
    }
    let (header, frame) = wire.split_at(VnetHdr::LEN);
    let mut first = [0; VnetHdr::LEN];
    first.copy_from_slice(header);
    first[10..].copy_from_slice(&taken.to_le_bytes());
    scatter([&first, frame], &scratch.buffers);
    let mut left = wire.len();
    for &(head, len) in &scratch.chains {
        let n = left.min(len as usize);
        q.give_back(head, n as u32);
        left -= n;
    }
    Ok(Fit::Done(taken))
}
