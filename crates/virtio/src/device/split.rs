//! From the port to a driver that has asked for frames that are split behind their headers: header
//! split, as network cards do it, and large receive offload.
//!
//! ```text
//!   port      │ headers │ payload 0 │   │ headers │ payload 1 │   │ headers │ payload 2 │
//!                  │          └───────────┐   ┌────────┘      ┌──────────────┘
//!   chain     │ header 12 B, headers' │ unused ┤├ payload 0 │ payload 1 │ payload 2 │ unused ┤
//!             the first buffer: host memory     the others: device memory
//! ```
//!
//! * TCP and UDP frames are split behind their headers, if these fit the first buffer. Headers may
//!   have any length. A frame without payload, and one of another protocol, goes to the first
//!   buffer as far as there is room.
//! * `hdr_len` is the number of the frame's bytes in the first buffer. If there are more, the used
//!   length counts the whole first buffer as written. Bytes between the two are not.
//! * If a driver has accepted segments, consecutive frames of a flow are joined into one, by the
//!   rules of [`Join`]. Frames wait for others at most until the end of the pass. Chains are
//!   completed in order. If a chain may still be continued, it is therefore held together with
//!   those after it.
//! * If the port has not verified a frame's checksum, it is verified here. If it is right, the
//!   frame is delivered with `DATA_VALID`. If it is wrong, the frame is delivered without that
//!   mark, and is joined to no other.

use std::convert::Infallible;
use std::ops::Range;

use netmem_packet::{Checksum, Headers, Join, Joinable, MAX_SEGMENTS};
use netmem_pool::foreign::copy_in;

use super::DriverFault;
use super::budget::{Budget, CHAINS};
use super::port::Port;
use super::rx::Scratch;
use super::stats::{DropReason, Tally};
use crate::guest_memory::buffer::Buffer;
use crate::guest_memory::copy::put;
use crate::guest_memory::view::View;
use crate::guest_memory::{CopyFailed, MemoryTable};
use crate::net::{VnetHdr, feature};
use crate::virtqueue::device::{DeviceFormat, DeviceQueue, Direction, Head, Heads};

/// Chains are completed after so many bytes of payload, or at the end of the pass. This is a large
/// segment for each of some flows.
const PUBLISH_BYTES: usize = 512 << 10;
/// Chains are completed after so many chains, too.
const PUBLISH_CHAINS: usize = 64;
/// The most frames of one pass: those of some large segments.
const FRAMES: usize = 4 * CHAINS as usize;
/// How many of the last chains are searched for the one that a frame continues.
const FLOWS: usize = 16;
/// Bytes of a frame that are searched for its headers, if these are longer than those of
/// [`Joinable`].
const PARSED_BYTES: usize = 512;
/// An Ethernet header: the least that the driver expects in the first buffer.
const MIN_HEADERS: usize = 14;

/// A chain that was filled, and is not completed yet.
struct FilledChain {
    buffers: Range<usize>,
    header: VnetHdr,
    /// Bytes of the frame in the first buffer.
    split: usize,
    /// Bytes in the others.
    payload: usize,
    /// The place of the next byte of payload: the buffer, and the offset in it.
    at: (usize, usize),
    /// Bytes of room from there on.
    room: usize,
    /// The frame in the chain, if frames can be joined to it.
    join: Option<Join>,
    /// Whether they still can: no other frame of the flow has arrived since.
    continues: bool,
}

/// What a driver's features allow.
struct Allowed {
    /// Whether checksums must be verified.
    sums: bool,
    v4: bool,
    v6: bool,
    ecn: bool,
}

/// Fills chains of `q` from `port`, for the [budget](Budget) of a pass.
///
/// # Errors
///
/// The rule that the driver has broken. Chains that were filled before are completed.
pub(super) fn receive<S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'_>,
    port: &mut P,
    scratch: &mut Scratch,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    let mut buffers = scratch.buffers.acquire();
    let result = fill(q, memory, port, &mut buffers, tally);
    scratch.buffers.release(buffers);
    result
}

fn fill<'t, S: DeviceFormat, P: Port>(
    q: &mut DeviceQueue<S>,
    memory: &mut View<'t>,
    port: &mut P,
    buffers: &mut Vec<Buffer<'t>>,
    tally: &mut Tally,
) -> Result<(), DriverFault> {
    let has = |bits| q.negotiated().has(feature::GUEST_CSUM | bits);
    let (v4, v6) = (has(feature::GUEST_TSO4), has(feature::GUEST_TSO6));
    let allowed = Allowed { sums: has(0), v4, v6, ecn: has(feature::GUEST_ECN) };
    let mut open: Vec<(Head<S::At>, FilledChain)> = Vec::new();
    let (mut cursor, mut budget, mut bytes) = (q.cursor(), Budget::new(tally), 0);
    let (table, mut result) = (memory.table(), Ok(()));
    for _ in 0..FRAMES {
        if !budget.lasts(tally) {
            break;
        }
        let Some((header, frame)) = port.peek().and_then(|wire| wire.split_first_chunk()) else { break };
        let (mut header, mut frame) = (VnetHdr::from_bytes(*header), frame);
        let parsed = parse(&mut header, &mut frame, &allowed);
        tally.rx_bytes += frame.len() as u64;
        if let Some(joinable) = &parsed.joinable
            && let Some(chain) = continued(&mut open, joinable, header.meta().checksum)
        {
            let (split, n) = (chain.split, frame.len() - chain.split);
            if let Err(CopyFailed) = chain.join(table, buffers, joinable, &frame[split..]) {
                tally.rx_bytes -= frame.len() as u64;
                tally.drop(DropReason::CopyFailed);
                port.discard(DropReason::CopyFailed);
                continue;
            }
            (bytes, tally.rx_frames, tally.joined) = (bytes + n, tally.rx_frames + 1, tally.joined + 1);
            port.consume();
            continue;
        }
        let (start, before) = (buffers.len(), cursor);
        let head = match q.pop_chain(&mut cursor, memory, Direction::Write, buffers) {
            Ok(Some(head)) => head,
            Ok(None) => {
                tally.rx_bytes -= frame.len() as u64;
                tally.out_of_buffers += 1;
                break;
            }
            Err(fault) => {
                result = Err(fault);
                break;
            }
        };
        let range = start..buffers.len();
        // Also if the frame is dropped, and its chain stays.
        budget.spend_pieces(1, range.len());
        match FilledChain::new(head.bytes(), range, (table, buffers), (header, frame), &parsed, &allowed) {
            Ok(chain) => {
                bytes += chain.payload;
                tally.rx_frames += 1;
                open.push((head, chain));
                port.consume();
            }
            // The chain stays the next one.
            Err(reason) => {
                cursor = before;
                buffers.truncate(start);
                tally.rx_bytes -= frame.len() as u64;
                tally.drop(reason);
                port.discard(reason);
            }
        }
        if bytes >= PUBLISH_BYTES || open.len() == PUBLISH_CHAINS {
            complete_all(q, &mut open, buffers);
            buffers.clear();
            q.publish();
            bytes = 0;
        }
    }
    complete_all(q, &mut open, buffers);
    result
}

/// A parsed frame.
struct ParsedFrame {
    joinable: Option<Joinable>,
    /// Offset of the payload in the frame, in bytes. `None`: the frame has no payload.
    payload: Option<usize>,
}

/// Parses a frame, cuts off the padding behind its IP packet, and sets `DATA_VALID` in `header` if
/// its checksum is right.
#[inline]
fn parse(header: &mut VnetHdr, frame: &mut &[u8], allowed: &Allowed) -> ParsedFrame {
    let joinable = Joinable::parse(frame, frame.len(), header.meta(), false);
    let headers = match &joinable {
        Some(joinable) => Some(*joinable.headers()),
        None => Headers::parse(&frame[..frame.len().min(PARSED_BYTES)]),
    };
    let mut payload = None;
    if let Some(headers) = &headers {
        let end = headers.end(frame);
        payload = Some(headers.payload).filter(|&payload| payload < end);
        // Padding must not be written to a page of payload. In a frame without payload it stays in
        // the host part.
        if payload.is_some() && end < frame.len() {
            *frame = &frame[..end];
        }
        if allowed.sums && header.flags == 0 && headers.has_right_checksum(frame) {
            header.flags = VnetHdr::DATA_VALID;
        }
    }
    ParsedFrame { joinable, payload }
}

/// The chain that a frame continues. If the frame does not continue a chain of its flow, no later
/// frame may continue that chain.
#[inline]
fn continued<'o, A>(
    open: &'o mut [(Head<A>, FilledChain)],
    frame: &Joinable,
    checksum: Checksum,
) -> Option<&'o mut FilledChain> {
    let chain = open
        .iter_mut()
        .rev()
        .take(FLOWS)
        .map(|(_, chain)| chain)
        .find(|chain| chain.continues && chain.join.as_ref().is_some_and(|join| join.is_flow(frame)))?;
    let join = chain.join.as_mut()?;
    let (more, known) = (frame.payload().unwrap_or(0), checksum != Checksum::Unknown);
    let size = join.meta().gso.map_or(1, |gso| usize::from(gso.size));
    // The driver refuses a frame of more segments.
    let few = (join.headers().payload + join.payload() + more) / size < MAX_SEGMENTS;
    if known && few && more <= chain.room && join.is_continued_by(frame) {
        return Some(chain);
    }
    chain.continues = false;
    None
}

impl FilledChain {
    /// Puts a frame into a chain of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// The reason why the frame is dropped: it does not fit, or its payload cannot be copied.
    /// Headers go to mapped memory only.
    fn new(
        bytes: usize,
        range: Range<usize>,
        (table, buffers): (&MemoryTable, &[Buffer<'_>]),
        (header, frame): (VnetHdr, &[u8]),
        parsed: &ParsedFrame,
        allowed: &Allowed,
    ) -> Result<Self, DropReason> {
        let first = buffers[range.start];
        if first.host.is_null() {
            return Err(DropReason::CopyFailed);
        }
        let room = first.len.checked_sub(VnetHdr::LEN).filter(|&room| room >= MIN_HEADERS).ok_or(DropReason::TooBig)?;
        let behind = parsed.payload.filter(|&at| at <= room && at < frame.len());
        let split = behind.unwrap_or(frame.len().min(room).min(usize::from(u16::MAX)));
        let beyond = bytes - first.len;
        if frame.len() - split > beyond {
            return Err(DropReason::TooBig);
        }
        let join = parsed.joinable.as_ref().filter(|_| behind.is_some()).and_then(Join::new).filter(|join| {
            let gso = join.meta().gso;
            let kind = if join.headers().v6 { allowed.v6 } else { allowed.v4 };
            kind && header.meta().checksum != Checksum::Unknown && gso.is_some_and(|gso| allowed.ecn || !gso.ecn)
        });
        // SAFETY: the buffer is *mapped* (its `MemoryTable` is borrowed by the pass) for `room`
        // bytes behind the header.
        unsafe { copy_in(&frame[..split], first.host.wrapping_add(VnetHdr::LEN)) };
        let at = (range.start + 1, 0);
        let continues = join.is_some();
        let mut chain = Self { buffers: range, header, split, payload: 0, at, room: beyond, join, continues };
        match chain.write(table, buffers, &frame[split..]) {
            Ok(()) => Ok(chain),
            Err(CopyFailed) => Err(DropReason::CopyFailed),
        }
    }

    /// Joins the payload of a frame that [continues](continued) the chain. If the payload cannot be
    /// copied, the chain stays as it is, and no later frame may continue it.
    #[inline]
    fn join(
        &mut self,
        table: &MemoryTable,
        buffers: &[Buffer<'_>],
        frame: &Joinable,
        bytes: &[u8],
    ) -> Result<(), CopyFailed> {
        let written = self.write(table, buffers, bytes);
        match &mut self.join {
            Some(join) if written.is_ok() => join.add(frame),
            _ => self.continues = false,
        }
        written
    }

    /// Writes payload, for which there is room, behind what is there.
    #[inline]
    fn write(&mut self, table: &MemoryTable, buffers: &[Buffer<'_>], bytes: &[u8]) -> Result<(), CopyFailed> {
        if table.imports() {
            put(table, bytes, buffers, &mut self.at)?;
        } else {
            self.write_mapped(buffers, bytes);
        }
        self.payload += bytes.len();
        self.room -= bytes.len();
        Ok(())
    }

    #[inline]
    fn write_mapped(&mut self, buffers: &[Buffer<'_>], mut bytes: &[u8]) {
        let (mut index, mut at) = self.at;
        while !bytes.is_empty() {
            let buffer = &buffers[index];
            let (now, rest) = bytes.split_at(bytes.len().min(buffer.len - at));
            // SAFETY: the buffer is *mapped* (its `MemoryTable` is borrowed by the pass), and has
            // so many bytes behind `at`.
            unsafe { copy_in(now, buffer.host.wrapping_add(at)) };
            (bytes, at) = (rest, at + now.len());
            if at == buffer.len {
                (index, at) = (index + 1, 0);
            }
        }
        self.at = (index, at);
    }

    /// Writes the headers. Returns how many bytes of the chain count as written.
    fn finish(&mut self, buffers: &[Buffer<'_>]) -> usize {
        let first = buffers[self.buffers.start];
        if let Some(join) = self.join.as_mut().filter(|join| join.segments() > 1) {
            self.header = VnetHdr::of(join.meta());
            // SAFETY: the buffer is *mapped*, and the headers of all segments are as long as those
            // of the first, which are there.
            unsafe { copy_in(join.head(), first.host.wrapping_add(VnetHdr::LEN)) };
        }
        // `new` has checked that it is at most that.
        let header = VnetHdr { hdr_len: self.split as u16, num_buffers: 1, ..self.header }.to_bytes();
        // SAFETY: the buffer is *mapped*, and has more bytes than a header.
        unsafe { copy_in(&header, first.host) };
        if self.payload > 0 { first.len + self.payload } else { VnetHdr::LEN + self.split }
    }
}

/// Completes all chains. The driver sees them when they are published.
fn complete_all<S: DeviceFormat>(
    q: &mut DeviceQueue<S>,
    open: &mut Vec<(Head<S::At>, FilledChain)>,
    buffers: &[Buffer<'_>],
) {
    for (head, mut chain) in open.drain(..) {
        let range = chain.buffers.clone();
        let _chains = q.complete(Heads::new(head), &buffers[range], |_| Ok::<_, Infallible>(chain.finish(buffers)));
    }
}
