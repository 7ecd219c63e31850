//! The memory of all rings of a connection, and where each part of it lies.
//!
//! ```text
//!   rx ring 0 │ tx ring 0 │ rx ring 1 │ ... │ headers of each tx queue │ tables │ control queue
//! ```

use super::ctrl::{self, ControlBuffer};
use super::headers::{HEADER_STRIDE, HeaderArray};
use super::options::NetOptions;
use super::queue_epolls::QueueEpolls;
use super::ring::{RingHandle, RingPlacement};
use crate::notify::NotifyError;
use crate::vhost_user::VhostUser;
use crate::virtqueue::Negotiated;
use crate::virtqueue::driver::Tables;
use netmem_pool::{PAGE_SIZE, PeerMemory, PeerShared, Region, RegionError, RegionOptions};
use std::sync::Arc;

/// The memory of all rings of a connection.
pub(super) struct RingMemory {
    pub(super) region: Arc<Region<PeerShared>>,
    /// The device's address of it.
    pub(super) bus: u64,
    /// The number of the connection: how often the device was connected anew, modulo 2^32.
    pub(super) connection: u32,
}

impl RingMemory {
    /// Which entry of the memory table it is.
    pub(super) const ENTRY: usize = 1;

    /// A new ring of a receive or transmit queue.
    pub(super) fn queue(
        &self,
        plan: &RingLayout,
        index: usize,
        epolls: &QueueEpolls,
    ) -> Result<RingHandle, NotifyError> {
        let kicks = Some(epolls.of(index));
        let tables = plan.tables(index).map(|offset| (offset, self.bus + offset as u64));
        let placement = RingPlacement { offset: plan.ring(index), size: plan.ring_size, tables };
        RingHandle::new(&self.region, placement, plan.negotiated, self.connection, kicks)
    }

    /// The place of a transmit queue's headers.
    pub(super) fn headers(&self, plan: &RingLayout, pair: usize) -> HeaderArray {
        let offset = plan.headers(pair);
        HeaderArray { region: self.region.clone(), offset, dma: self.bus + offset as u64 }
    }

    /// A new control ring, and the buffer of its commands.
    pub(super) fn control(&self, plan: &RingLayout) -> Result<(RingHandle, ControlBuffer), NotifyError> {
        let placement = RingPlacement { offset: plan.control(), size: ctrl::SIZE, tables: None };
        let ring = RingHandle::new(&self.region, placement, plan.negotiated, self.connection, None)?;
        let (region, offset) = (self.region.clone(), plan.control_buffer());
        Ok((ring, ControlBuffer { region, offset, len: ctrl::BUFFER, bus: self.bus }))
    }
}

/// Where rings, header arrays, tables and the control queue lie in their region.
pub(super) struct RingLayout {
    pub(super) negotiated: Negotiated,
    ring_size: u16,
    ring: usize,
    header: usize,
    /// Bytes of the tables of a ring; 0 if there are none.
    tables: usize,
    /// Whether receive rings have tables, too.
    rx_tables: bool,
    pairs: usize,
    total: usize,
}

impl RingLayout {
    pub(super) fn new<M: PeerMemory>(o: &NetOptions<M>, negotiated: Negotiated, backend: &VhostUser) -> Self {
        let size = usize::from(o.ring_size);
        let ring = RingPlacement::bytes(negotiated, o.ring_size);
        let header = (size * HEADER_STRIDE).next_multiple_of(RingPlacement::ALIGN);
        let table = usize::from(RingHandle::PER_TABLE) * Tables::ENTRY;
        let tables = if negotiated.indirect() { (size * table).next_multiple_of(RingPlacement::ALIGN) } else { 0 };
        let pairs = usize::from(o.pairs);
        let control = RingPlacement::bytes(negotiated, ctrl::SIZE) + ctrl::BUFFER;
        let rx_tables = o.has_long_chains() && Self::supports_rx_tables(negotiated, backend);
        let total = pairs * (2 * ring + header + if rx_tables { 2 } else { 1 } * tables) + control;
        Self { negotiated, ring_size: o.ring_size, ring, header, tables, rx_tables, pairs, total }
    }

    /// Whether a back end follows tables in a receive ring. In a packed ring, DPDK's vhost mistakes
    /// the table itself for a buffer.
    pub(super) fn supports_rx_tables(negotiated: Negotiated, backend: &VhostUser) -> bool {
        !negotiated.packed() || backend.splits()
    }

    /// Memory for all of it.
    pub(super) fn memory(&self) -> Result<Region<PeerShared>, RegionError> {
        RegionOptions::new(self.total.div_ceil(PAGE_SIZE)).build()
    }

    pub(super) fn ring(&self, index: usize) -> usize {
        index * self.ring
    }

    pub(super) fn headers(&self, pair: usize) -> usize {
        2 * self.pairs * self.ring + pair * self.header
    }

    /// Whether receive rings have tables.
    pub(super) fn rx_tables(&self) -> bool {
        self.tables > 0 && self.rx_tables
    }

    /// The tables of ring `index`, if it has any. Those of transmit rings come first.
    pub(super) fn tables(&self, index: usize) -> Option<usize> {
        let (pair, receives) = (index / 2, index.is_multiple_of(2));
        let before = if receives { self.pairs + pair } else { pair };
        (if receives { self.rx_tables() } else { self.tables > 0 })
            .then(|| self.headers(self.pairs) + before * self.tables)
    }

    pub(super) fn control(&self) -> usize {
        self.headers(self.pairs) + self.pairs * if self.rx_tables { 2 } else { 1 } * self.tables
    }

    pub(super) fn control_buffer(&self) -> usize {
        self.control() + RingPlacement::bytes(self.negotiated, ctrl::SIZE)
    }
}
