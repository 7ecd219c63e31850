//! Offloads in software: checksums are completed and segments are cut here if the next hop of a
//! frame does not do so.
//!
//! Why here: the device offers all offloads with every port, so that a driver's features do not
//! depend on the port.
//!
//! ```text
//!   driver ──► tx ──► OffloadingPort::send ─┬─ the port accepts it ─────────► Port::send
//!                                           └─ a checksum, or cut in parts ─► Port::send ..
//!
//!   driver ◄── rx ◄── OffloadingPort::peek ◄┬─ the driver accepts it ──────── Port::peek
//!                                           └─ one part after the other ◄──── Port::peek, and
//!                                                                             consume at the end
//! ```
//!
//! A frame without offloads costs one comparison. The bytes are private memory on both sides, so
//! that a part is a copy of headers and payload; nothing is allocated after the first.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use netmem_packet::{Checksum, Meta, SegmentPlan, Sum, complete_checksum};

use super::pair_handle::PairHandle;
use super::port::{Port, PortError, Posted, Rest};
use super::stats::{DropReason, Tally};
use crate::net::{HeaderFault, Offloads, VnetHdr, feature};

/// The most frames of a port that are dropped in search of one that can be delivered.
const MAX_DROPPED: usize = 64;

/// The frames of a port that are being changed, in both directions.
#[derive(Debug, Default)]
pub(super) struct SoftwareOffloads {
    /// Towards the driver: the frame whose parts are being delivered, if there is one. The port has
    /// not consumed it.
    rx: SegmentedFrame,
    /// From the driver.
    tx: SegmentedFrame,
    counts: Counts,
}

/// Counts of the work that was not reported yet.
#[derive(Debug, Default)]
struct Counts {
    checksummed: u64,
    segmented: u64,
    uncut: u64,
}

impl SoftwareOffloads {
    /// The port, for a driver that accepts frames with the offloads `received`.
    #[inline]
    pub(super) fn port<'a, P: Port>(&'a mut self, port: &'a mut P, received: Offloads) -> OffloadingPort<'a, P> {
        OffloadingPort { port, software: self, received }
    }

    /// Forgets a frame whose parts were not all delivered, because the port has dropped it.
    pub(super) fn reset(&mut self) {
        self.rx.left = 0;
    }

    /// Adds these counts to those of the pass.
    #[inline]
    pub(super) fn settle(&mut self, tally: &mut Tally) {
        let Counts { checksummed, segmented, uncut } = self.counts;
        if checksummed | segmented | uncut != 0 {
            tally.checksummed += checksummed;
            tally.segmented += segmented;
            (0..uncut).for_each(|_| tally.drop(DropReason::Uncut));
            self.counts = Counts::default();
        }
    }
}

/// One frame as the frames that it stands for.
#[derive(Debug, Default)]
struct SegmentedFrame {
    /// The frame, without its virtio header.
    frame: Vec<u8>,
    /// The current part, in wire form.
    wire: Vec<u8>,
    plan: Option<SegmentPlan>,
    next: usize,
    /// Parts that were not delivered yet, the current one included.
    left: usize,
    /// Whether checksums are computed.
    completes: bool,
}

/// The frame cannot be changed into frames that the next hop accepts.
struct CannotSegment;

impl SegmentedFrame {
    /// Starts with a frame, for a receiver that accepts offloads `to`, and makes its first part.
    fn start(&mut self, wire: &[u8], to: Offloads, counts: &mut Counts) -> Result<(), CannotSegment> {
        let (header, frame) = wire.split_first_chunk().ok_or(CannotSegment)?;
        let header = VnetHdr::from_bytes(*header);
        let mut meta = header.meta();
        self.completes = to.check(VnetHdr { flags: VnetHdr::NEEDS_CSUM, ..VnetHdr::PLAIN }, frame.len()).is_err();
        self.plan = match meta.gso {
            Some(_) => Some(SegmentPlan::new(frame, frame.len(), meta).map_err(|_| CannotSegment)?),
            None => None,
        };
        self.frame.clear();
        self.frame.extend_from_slice(frame);
        let fragments = self.plan.as_ref().is_some_and(SegmentPlan::is_fragments);
        let whole = self.plan.as_ref().is_none_or(|plan| plan.count() == 1);
        if let (true, Checksum::Partial { start, offset }) = (fragments || whole && self.completes, meta.checksum) {
            if !complete_checksum(&mut self.frame, start, offset) {
                return Err(CannotSegment);
            }
            meta.checksum = Checksum::Unknown;
        }
        match &self.plan {
            Some(_) => counts.segmented += 1,
            None => counts.checksummed += 1,
        }
        (self.next, self.left) = (0, 1);
        if whole {
            self.plan = None;
            self.show(Meta { gso: None, ..meta }, 0..self.frame.len());
        } else if let Some(plan) = &self.plan {
            self.left = plan.count();
            self.make();
        }
        Ok(())
    }

    /// Makes a part of a header for `meta` and these bytes of the frame.
    fn show(&mut self, meta: Meta, bytes: std::ops::Range<usize>) {
        self.wire.clear();
        self.wire.extend_from_slice(&VnetHdr { num_buffers: 1, ..VnetHdr::of(meta) }.to_bytes());
        self.wire.extend_from_slice(&self.frame[bytes]);
    }

    /// Makes the next part of a frame that is cut.
    fn make(&mut self) {
        let Self { frame, wire, plan: Some(plan), next, completes, .. } = self else { return };
        let payload = &frame[plan.payload(*next)];
        let mut meta = Meta { checksum: plan.checksum(), gso: None };
        let headers = if *completes && !plan.is_fragments() {
            meta.checksum = Checksum::Unknown;
            let mut sum = Sum::default();
            sum.add(payload);
            plan.complete(*next, sum)
        } else {
            plan.headers(*next)
        };
        wire.clear();
        wire.extend_from_slice(&VnetHdr { num_buffers: 1, ..VnetHdr::of(meta) }.to_bytes());
        wire.extend_from_slice(headers);
        wire.extend_from_slice(payload);
        *next += 1;
    }

    /// Goes to the next part. Returns whether there is one.
    fn advance(&mut self) -> bool {
        self.left -= 1;
        if self.left > 0 {
            self.make();
        }
        self.left > 0
    }
}

/// Whether the receiver does not accept a frame of `total` bytes in wire form, which begins with
/// `wire`, as it is. False for a header that makes no sense: the receiver checks it.
#[inline]
pub(super) fn lacks(to: Offloads, wire: &[u8], total: usize) -> bool {
    match wire.split_first_chunk::<{ VnetHdr::LEN }>() {
        Some((header, _)) if header[..2] != [0, 0] => {
            to.check(VnetHdr::from_bytes(*header), total - VnetHdr::LEN) == Err(HeaderFault::NotNegotiated)
        }
        _ => false,
    }
}

/// A port with every offload, for one pass. See the module.
pub(super) struct OffloadingPort<'a, P> {
    port: &'a mut P,
    software: &'a mut SoftwareOffloads,
    received: Offloads,
}

impl<P: Port> OffloadingPort<'_, P> {
    /// Starts to deliver the port's frame, which the driver does not accept, in parts. One that
    /// cannot be cut is dropped and counted.
    #[cold]
    fn load(&mut self) {
        let SoftwareOffloads { rx, counts, .. } = self.software;
        let started = self.port.peek().is_some_and(|wire| rx.start(wire, self.received, counts).is_ok());
        if !started {
            counts.uncut += 1;
            self.port.discard(DropReason::Uncut);
        }
    }

    /// Goes on to the next part of the port's frame. Returns whether there is none.
    #[inline]
    fn ends_frame(&mut self) -> bool {
        self.software.rx.left == 0 || !self.software.rx.advance()
    }

    /// Sends a frame that the port does not accept as it is.
    #[cold]
    fn send_parts(&mut self, wire: &[u8], accepted: Offloads) -> bool {
        let SoftwareOffloads { tx, counts, .. } = self.software;
        if tx.start(wire, accepted, counts).is_err() {
            self.port.dropped(wire, DropReason::PortRefused);
            return false;
        }
        let mut sent = true;
        loop {
            sent &= self.port.send(&tx.wire);
            if !tx.advance() {
                return sent;
            }
        }
    }
}

impl<P: Port> OffloadingPort<'_, P> {
    /// The next frame that the driver accepts. Frames that cannot be made into such ones are
    /// dropped.
    fn deliverable(&mut self) -> Option<&[u8]> {
        for _ in 0..MAX_DROPPED {
            if self.software.rx.left > 0 {
                return Some(&self.software.rx.wire);
            }
            if !self.port.peek().is_some_and(|wire| lacks(self.received, wire, wire.len())) {
                return self.port.peek();
            }
            self.load();
        }
        None
    }
}

impl<P: Port> Port for OffloadingPort<'_, P> {
    const WANTS_BYTES: bool = P::WANTS_BYTES;
    const FEATURES: u64 = P::FEATURES;
    const READS: bool = P::READS;
    const SENDS_IN_PLACE: bool = P::SENDS_IN_PLACE;
    const STORES: bool = P::STORES;

    #[inline]
    fn peek(&mut self) -> Option<&[u8]> {
        // A port whose frames have no offloads.
        if P::FEATURES & feature::GUEST_OFFLOADS == 0 {
            return self.port.peek();
        }
        // Most passes find no frame.
        if self.software.rx.left == 0 && self.port.peek().is_none() {
            return None;
        }
        self.deliverable()
    }

    #[inline]
    fn expects(&self) -> Option<usize> {
        if self.software.rx.left > 0 { None } else { self.port.expects() }
    }

    #[inline]
    fn read(&mut self, accepts: Offloads, posted: Posted<'_>) -> Option<(VnetHdr, usize)> {
        self.port.read(accepts, posted)
    }

    #[inline]
    fn consume(&mut self) {
        if self.ends_frame() {
            self.port.consume();
        }
    }

    fn discard(&mut self, why: DropReason) {
        if self.ends_frame() {
            self.port.discard(why);
        }
    }

    fn dropped(&mut self, wire: &[u8], why: DropReason) {
        self.port.dropped(wire, why);
    }

    #[inline]
    fn send(&mut self, wire: &[u8]) -> bool {
        if wire[..2] != [0, 0] {
            let accepted = self.port.accepted_offloads();
            if lacks(accepted, wire, wire.len()) {
                return self.send_parts(wire, accepted);
            }
        }
        self.port.send(wire)
    }

    fn send_in_place(&mut self, head: &[u8], rest: Rest<'_>) -> Option<bool> {
        if head[..2] != [0, 0] && lacks(self.port.accepted_offloads(), head, head.len() + rest.len()) {
            return None;
        }
        self.port.send_in_place(head, rest)
    }

    fn accepted_offloads(&self) -> Offloads {
        Offloads::sent(u64::MAX)
    }

    #[inline]
    fn send_with(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        self.port.send_with(len, fill)
    }

    #[inline]
    fn peer(&self) -> Option<&PairHandle> {
        self.port.peer()
    }

    #[inline]
    fn waits(&self) -> bool {
        self.port.waits()
    }

    #[inline]
    fn room(&self) -> bool {
        self.port.room()
    }

    #[inline]
    fn served(&mut self, served: bool) {
        self.port.served(served);
    }

    fn negotiated(&mut self, features: u64) -> Result<(), PortError> {
        self.software.reset();
        self.port.negotiated(features)
    }

    fn drop_waiting(&mut self) -> u64 {
        self.software.reset();
        self.port.drop_waiting()
    }

    fn failure(&self) -> Option<BorrowedFd<'_>> {
        self.port.failure()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.fd()
    }

    fn deadline(&self, receives: bool) -> Option<Instant> {
        self.port.deadline(receives)
    }

    fn take_error(&mut self) -> Option<PortError> {
        self.port.take_error()
    }
}
