//! Any port, at the other end of a bad link.
//!
//! ```text
//!   driver ──► tx ──► cut, checksums ──► from_driver: Link ──► Port::send
//!   driver ◄── rx ◄── current ◄──────────  to_driver: Link ◄── Port::peek, cut by the port
//! ```
//!
//! The link carries packets, not large segments. The port therefore has no offloads: the device
//! cuts large frames of the driver and computes their checksums before they arrive here, and the
//! device reports to the inner port that the driver accepts no offloads. So a lost frame is one
//! lost packet, and the receiver's checksum shows a changed bit.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use netmem_netem::{Delivery, Link, LinkCounts, LinkOptions, flip};

#[cfg(feature = "pcap")]
use super::capture::LinkCapture;
use super::error::PortError;
use super::interface::Port;
use crate::device::stats::DropReason;
use crate::net::{VnetHdr, feature};

/// The most frames that are read from the inner port, and sent to it, at a time.
const FRAMES: usize = 64;

/// The counters of the links of a device: one [`LinkCounts`] for each direction, summed over the
/// queue pairs. Readable from any thread.
#[derive(Debug, Default)]
pub struct LinkStats {
    directions: [[AtomicU64; LinkCounts::NAMES.len()]; 2],
    refused: AtomicU64,
}

impl LinkStats {
    /// The counters of the frames towards the driver, by name.
    pub fn to_driver(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.direction(0)
    }

    /// The same for the frames from the driver.
    pub fn from_driver(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.direction(1)
    }

    fn direction(&self, n: usize) -> impl Iterator<Item = (&'static str, u64)> {
        LinkCounts::NAMES.into_iter().zip(self.directions[n].iter().map(|count| count.load(Relaxed)))
    }

    /// Frames from the driver that the inner port refused when they arrived.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }
}

/// One direction, and the counts of it that were published already.
#[derive(Debug)]
struct Direction {
    link: Link<Vec<u8>>,
    counted: LinkCounts,
}

impl Direction {
    fn new(options: LinkOptions, number: u64) -> Self {
        Self { link: Link::new(options, number), counted: LinkCounts::default() }
    }

    /// Sends a frame, or returns why the link has dropped it.
    fn send(&mut self, wire: &[u8], now: Duration) -> Result<(), &'static str> {
        let before = self.link.counts();
        self.link.send(wire.to_vec(), wire.len().saturating_sub(VnetHdr::LEN), now);
        let after = self.link.counts();
        match () {
            () if after.lost > before.lost => Err("lost on the link"),
            () if after.overflowed > before.overflowed => Err("overflowed the link"),
            () => Ok(()),
        }
    }

    /// The next frame that has arrived. It is not marked as verified: a tap marks every frame so,
    /// but the link may have changed it since.
    fn receive(&mut self, now: Duration) -> Option<Vec<u8>> {
        let Delivery { packet: mut wire, corrupt } = self.link.receive(now)?;
        if let Some(flags) = wire.first_mut() {
            *flags &= !VnetHdr::DATA_VALID;
        }
        if let Some(draw) = corrupt {
            damage(&mut wire, draw);
        }
        Some(wire)
    }

    fn count(&mut self, stats: &[AtomicU64; LinkCounts::NAMES.len()]) {
        let now = self.link.counts();
        if now != self.counted {
            let news = now.values().into_iter().zip(self.counted.values()).map(|(now, before)| now - before);
            stats.iter().zip(news).for_each(|(count, n)| _ = count.fetch_add(n, Relaxed));
            self.counted = now;
        }
    }
}

/// Changes one bit behind the Ethernet header of an IP packet, where a checksum shows it. The
/// Ethernet header is not covered by a checksum here, and an ARP message has none, so a receiver
/// would not notice a change there.
fn damage(wire: &mut [u8], draw: u64) {
    let Some((header, packet)) = wire[VnetHdr::LEN..].split_first_chunk_mut::<14>() else { return };
    if matches!(u16::from_be_bytes([header[12], header[13]]), 0x0800 | 0x86dd) {
        flip(packet, draw);
    }
}

/// A port whose frames cross a bad link, in both directions. Memory is bounded, see
/// [`netmem_netem`].
///
/// A frame that the driver sends is always accepted. The link decides whether it arrives. If the
/// inner port then refuses it, [`LinkStats::refused`] counts it.
///
/// Costs an allocation and a copy for each frame, and a clock reading.
#[derive(Debug)]
pub struct Linked<P> {
    port: P,
    /// The zero of the links' times.
    since: Instant,
    to_driver: Direction,
    from_driver: Direction,
    /// The frame that is shown.
    current: Option<Vec<u8>>,
    stats: Arc<LinkStats>,
    record: Record,
}

/// Where frames are written, if they are.
#[derive(Debug, Default)]
struct Record {
    #[cfg(feature = "pcap")]
    file: Option<Arc<LinkCapture>>,
}

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    ToDriver,
    FromDriver,
}

#[cfg_attr(not(feature = "pcap"), expect(clippy::unused_self, reason = "nothing is written"))]
impl Record {
    /// Writes a frame that has arrived, or that was dropped.
    fn frame(&self, way: Way, wire: &[u8], dropped: Option<&str>) {
        #[cfg(feature = "pcap")]
        if let Some(file) = &self.file {
            file.write(way, wire, dropped);
        }
        #[cfg(not(feature = "pcap"))]
        let _ = (way, wire, dropped);
    }

    /// There is no more work at present.
    fn pause(&self) {
        #[cfg(feature = "pcap")]
        if let Some(file) = &self.file {
            let _ = file.flush();
        }
    }
}

fn reason(why: DropReason) -> &'static str {
    DropReason::NAMES[why as usize]
}

impl<P: Port> Linked<P> {
    /// Puts a link in front of the port of queue pair `pair`. Each queue pair has its own link,
    /// with its own faults and rate.
    pub fn new(port: P, options: LinkOptions, pair: usize, stats: Arc<LinkStats>) -> Self {
        let number = 2 * pair as u64;
        Self {
            port,
            since: Instant::now(),
            to_driver: Direction::new(options, number),
            from_driver: Direction::new(options, number + 1),
            current: None,
            stats,
            record: Record::default(),
        }
    }

    /// Writes each packet to a capture when it has crossed the link, or when it is dropped. Feature
    /// `pcap`.
    #[cfg(feature = "pcap")]
    #[must_use]
    pub fn captured(mut self, file: Arc<LinkCapture>) -> Self {
        self.record.file = Some(file);
        self
    }

    fn now(&self) -> Duration {
        self.since.elapsed()
    }

    /// Sends the inner port the frames that have arrived there.
    fn deliver(&mut self, now: Duration) {
        for _ in 0..FRAMES {
            let Some(wire) = self.from_driver.receive(now) else { break };
            let sent = self.port.send(&wire);
            let dropped = (!sent).then(|| reason(DropReason::PortRefused));
            self.record.frame(Way::FromDriver, &wire, dropped);
            if !sent {
                self.stats.refused.fetch_add(1, Relaxed);
            }
        }
        self.from_driver.count(&self.stats.directions[1]);
    }

    /// Reads frames of the inner port.
    fn take(&mut self, now: Duration) {
        for _ in 0..FRAMES {
            let Some(wire) = self.port.peek() else { break };
            if let Err(why) = self.to_driver.send(wire, now) {
                self.record.frame(Way::ToDriver, wire, Some(why));
            }
            self.port.consume();
        }
        self.to_driver.count(&self.stats.directions[0]);
    }
}

impl<P: Port> Port for Linked<P> {
    const WANTS_BYTES: bool = true;
    /// No offloads, so that all frames here are packets.
    const FEATURES: u64 = 0;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.current.is_none() {
            let now = self.now();
            self.deliver(now);
            self.current = self.to_driver.receive(now);
            if self.current.is_none() {
                self.take(now);
                self.current = self.to_driver.receive(now);
            }
        }
        self.current.as_deref()
    }

    fn consume(&mut self) {
        if let Some(wire) = self.current.take() {
            self.record.frame(Way::ToDriver, &wire, None);
        }
    }

    fn discard(&mut self, why: DropReason) {
        if let Some(wire) = self.current.take() {
            self.record.frame(Way::ToDriver, &wire, Some(reason(why)));
        }
    }

    fn dropped(&mut self, wire: &[u8], why: DropReason) {
        self.record.frame(Way::FromDriver, wire, Some(reason(why)));
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        let now = self.now();
        if let Err(why) = self.from_driver.send(wire, now) {
            self.record.frame(Way::FromDriver, wire, Some(why));
        }
        self.deliver(now);
        true
    }

    fn served(&mut self, served: bool) {
        self.port.served(served);
        self.deliver(self.now());
    }

    fn negotiated(&mut self, features: u64) -> Result<(), PortError> {
        self.port.negotiated(features & !feature::GUEST_OFFLOADS)
    }

    fn drop_waiting(&mut self) -> u64 {
        let mut dropped = u64::from(self.current.is_some());
        self.discard(DropReason::FrontEndLeft);
        for wire in self.to_driver.link.drain() {
            self.record.frame(Way::ToDriver, &wire, Some(reason(DropReason::FrontEndLeft)));
            dropped += 1;
        }
        dropped + self.port.drop_waiting()
    }

    fn arm(&mut self) -> bool {
        // A frame of the inner port is read in the next pass.
        let waits = self.peek().is_some();
        self.record.pause();
        waits || self.port.arm()
    }

    fn failure(&self) -> Option<BorrowedFd<'_>> {
        self.port.failure()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.fd()
    }

    fn backlog_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.backlog_fd()
    }

    fn deadline(&self, receives: bool) -> Option<Instant> {
        let here = self.to_driver.link.deadline().filter(|_| receives);
        let link = [here, self.from_driver.link.deadline()].into_iter().flatten().min();
        [link.map(|at| self.since + at), self.port.deadline(receives)].into_iter().flatten().min()
    }

    fn take_error(&mut self) -> Option<PortError> {
        self.port.take_error()
    }
}
