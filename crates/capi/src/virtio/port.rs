//! The port of a device in C: frames of the guest become fragments, and fragments become frames for
//! the guest.

use crate::frag::netmem_frag;
use crate::groups::Waiting;
use crate::region::Kept;
use netmem_packet::Packet;
use netmem_pool::{Frag, Region, SharedPool};
use netmem_virtio::device::port::{MAX_WIRE, Port};
use netmem_virtio::net::VnetHdr;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most frames of the guest that wait for the caller, and the most of the caller that wait for
/// the guest: as many as a pass moves. They hold pages. More frames of the guest wait in its ring.
pub(crate) const MOST: usize = 256;

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

    /// The frame of these fragments: of one that can be sent as it is, whose variable is empty then,
    /// or a copy.
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
    /// For the guest.
    pub(crate) outgoing: VecDeque<Outgoing>,
    /// Whether the guest's receive ring is served.
    pub(crate) served: bool,
    /// Frames of the guest that were stored, after large ones were cut.
    pub(crate) stored: u64,
    /// Bytes in them.
    pub(crate) stored_bytes: u64,
    /// Frames of the guest that were dropped because there was no page.
    pub(crate) no_page: u64,
}

/// Both ends have it. The lock is never contended: the device's passes are calls of the same thread.
#[derive(Clone, Default)]
pub(crate) struct Exchange(Arc<Mutex<Frames>>);

impl Exchange {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Frames> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut frames = self.exchange.lock();
        let Some(packet) = packet else {
            frames.no_page += 1;
            return false;
        };
        frames.stored += 1;
        frames.stored_bytes += packet.len() as u64;
        frames.received.push_back(packet);
        true
    }

    /// The caller receives what is stored before it sleeps, and each pass is followed by that.
    fn room(&self) -> bool {
        self.exchange.lock().received.len() < MOST
    }

    fn served(&mut self, served: bool) {
        self.exchange.lock().served = served;
    }

    fn drop_waiting(&mut self) -> u64 {
        let outgoing = std::mem::take(&mut self.exchange.lock().outgoing);
        self.current.take().map_or(0, |_| 1) + outgoing.len() as u64
    }
}
