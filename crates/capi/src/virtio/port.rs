//! The port of a device in C: frames of the guest become fragments, and fragments become frames for
//! the guest.

use super::front_ends;
use crate::frag::netmem_frag;
use crate::groups::{self, Waiting};
use crate::region::Kept;
use netmem_packet::Packet;
use netmem_pool::{Frag, Region, SharedPool};
use netmem_virtio::device::DropReason;
use netmem_virtio::device::port::{MAX_WIRE, Port};
use netmem_virtio::net::VnetHdr;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

/// While the guest's frames that wait for the caller hold so many pages, more of its frames wait in
/// its ring. Also the most frames of the caller that wait for the guest. As many as a pass moves.
pub(crate) const MOST: usize = 256;

/// The most pages that frames of the guest hold: those, and the parts of a frame that is cut. Parts
/// are stored without a look at the room between them, and so is what the device itself sends.
const MOST_PAGES: usize = 2 * MOST;

/// The shortest frame: an Ethernet header.
const LEAST_FRAME: usize = 14;

/// A frame for the guest, in wire form.
pub(crate) enum Outgoing {
    /// The device's header was put in front of it.
    InPlace(Frag<Kept>),
    Copied(Vec<u8>),
}

impl Outgoing {
    fn wire(&self) -> &[u8] {
        match self {
            Self::InPlace(frag) => frag.as_slice(),
            Self::Copied(bytes) => bytes,
        }
    }

    /// Whether a frame can be as long as these fragments together.
    pub(crate) fn fits(frags: &[netmem_frag]) -> bool {
        let bytes: usize = frags.iter().map(netmem_frag::length).sum();
        (LEAST_FRAME..=MAX_WIRE - VnetHdr::LEN).contains(&bytes)
    }

    /// The frame of these fragments: of one that can be sent as it is, whose variable is empty
    /// then, or a copy.
    ///
    /// # Safety
    ///
    /// Fragments of the header, none of them empty.
    pub(crate) unsafe fn of(frags: &mut [netmem_frag], region: &Region<Kept>) -> Self {
        let header = VnetHdr::PLAIN.to_bytes();
        if let [only] = frags
            && only.is_of(region)
            // SAFETY: as the caller promises; the page is of this region.
            && let Some(mut frag) = unsafe { only.take_of::<Kept>() }
        {
            if frag.prepend(&header) {
                return Self::InPlace(frag);
            }
            *only = netmem_frag::of(frag);
        }
        let mut wire = header.to_vec();
        for frag in frags {
            // SAFETY: as the caller promises.
            unsafe { frag.append_to(&mut wire) };
        }
        Self::Copied(wire)
    }
}

/// The frames between the port and the caller's functions, which run on one thread.
#[derive(Default)]
pub(crate) struct Frames {
    /// Of the guest.
    pub(crate) received: Waiting<Kept>,
    /// Pages in them.
    pub(crate) pages: usize,
    /// For the guest.
    pub(crate) outgoing: VecDeque<Outgoing>,
    /// Whether the guest's receive ring is served.
    pub(crate) served: bool,
    /// Frames of the guest that were stored, after large ones were cut.
    pub(crate) stored: u64,
    /// Bytes in them.
    pub(crate) stored_bytes: u64,
    /// Frames of the guest that were dropped because there was no page, after large ones were cut.
    pub(crate) no_page: u64,
    /// Frames of the guest that were dropped because they cannot be cut.
    pub(crate) refused: u64,
}

impl Frames {
    /// Keeps a frame of the guest, if there was memory for it.
    fn store(&mut self, packet: Option<Packet<Kept>>) -> bool {
        let Some(packet) = packet.filter(|packet| self.pages + groups::fragments(packet) <= MOST_PAGES) else {
            self.no_page += 1;
            return false;
        };
        self.pages += groups::fragments(&packet);
        self.stored += 1;
        self.stored_bytes += packet.len() as u64;
        self.received.push_back(packet);
        true
    }
}

/// Both ends have it. The lock is never contended: the device's passes are calls of the same
/// thread.
#[derive(Clone, Default)]
pub(crate) struct Exchange(Arc<Mutex<Frames>>);

impl Exchange {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Frames> {
        front_ends::lock(&self.0)
    }
}

/// The port of the device.
pub(crate) struct FragPort {
    exchange: Exchange,
    pool: SharedPool<Kept>,
    page_size: usize,
    /// The frame for the guest that is being delivered.
    current: Option<Outgoing>,
}

impl FragPort {
    pub(crate) fn new(exchange: Exchange, pool: SharedPool<Kept>, page_size: usize) -> Self {
        Self { exchange, pool, page_size, current: None }
    }

    /// A frame in pages of the pool. The first has the header's bytes in front of it, so that the
    /// frame can be sent back as it is.
    fn store(&self, wire: &[u8]) -> Option<Packet<Kept>> {
        let mut packet: Option<Packet<Kept>> = None;
        for bytes in wire.chunks(self.page_size) {
            let mut page = self.pool.alloc()?;
            page.copy_from(0, bytes).ok()?;
            match &mut packet {
                None => packet = Some(Packet::new(page.freeze_range(VnetHdr::LEN..bytes.len()))),
                Some(packet) => packet.push(page.freeze_range(..bytes.len())).ok()?,
            }
        }
        packet
    }
}

impl Port for FragPort {
    const WANTS_BYTES: bool = true;
    // Fragments have no place for what is left to the other side: the device completes checksums
    // and cuts segments.
    const FEATURES: u64 = 0;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.current.is_none() {
            self.current = self.exchange.lock().outgoing.pop_front();
        }
        self.current.as_ref().map(Outgoing::wire)
    }

    fn consume(&mut self) {
        self.current = None;
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        let packet = if wire.len() < VnetHdr::LEN { None } else { self.store(wire) };
        self.exchange.lock().store(packet)
    }

    /// A frame with offloads that cannot be done. The device counts frames with other reasons, and
    /// [`Self::send`] those for which there was no page.
    fn dropped(&mut self, _: &[u8], why: DropReason) {
        self.exchange.lock().refused += u64::from(why == DropReason::PortRefused);
    }

    /// The caller receives what is stored before it sleeps, and each pass is followed by that.
    fn room(&self) -> bool {
        self.exchange.lock().pages < MOST
    }

    fn served(&mut self, served: bool) {
        self.exchange.lock().served = served;
    }

    fn drop_waiting(&mut self) -> u64 {
        let outgoing = std::mem::take(&mut self.exchange.lock().outgoing);
        self.current.take().map_or(0, |_| 1) + outgoing.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_pool::{PoolOptions, RegionOptions, RegionProvider};

    /// The room ends with a number of pages, not of frames; also what is stored without a look at
    /// it is bounded.
    #[test]
    fn pages_that_wait_are_bounded() {
        let region = RegionOptions::new(600).build::<Kept>().expect("a region");
        let pool = PoolOptions::new("c").build_shared(RegionProvider::new(region), None).expect("a pool");
        let exchange = Exchange::default();
        let mut port = FragPort::new(exchange.clone(), pool, 4096);
        let large = vec![0; VnetHdr::LEN + 65_000];
        for _ in 0..MOST / 16 {
            assert!(port.room() && port.send(&large));
        }
        assert!(!port.room());
        let small = [0; VnetHdr::LEN + 60];
        while port.send(&small) {}
        let frames = exchange.lock();
        assert_eq!((frames.pages, frames.no_page), (MOST_PAGES, 1));
        assert_eq!(frames.received.iter().map(groups::fragments).sum::<usize>(), MOST_PAGES);
    }
}
