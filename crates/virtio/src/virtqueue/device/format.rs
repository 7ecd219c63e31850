//! The operations that differ between split and packed rings.
//!
//! The trait is the only generic of the device's half of a queue, so that a pass is compiled for
//! each format and chooses between them once.

use std::sync::Arc;

use super::super::{Armed, Desc, Negotiated};
use super::chain::ChainDescriptor;
use super::group::{Group, SingleBuffer};
use super::inflight::InflightQueue;
use crate::guest_memory::dirty_log::DirtyLog;
use crate::guest_memory::view::View;
use crate::virtqueue::fault::DriverFault;

/// The operations that differ between the formats.
pub(crate) trait DeviceFormat: std::fmt::Debug + Sized {
    /// A ring in memory.
    type Ring: std::fmt::Debug;
    /// A place in the ring.
    type At: Copy + PartialEq + std::fmt::Debug;

    /// The state for a ring that is started.
    fn new(ring: Self::Ring, start: Start) -> Self;
    /// The same state, for the ring at other addresses.
    fn moved(self, ring: Self::Ring) -> Self;
    /// Entries of the ring.
    fn size(&self) -> u16;
    /// The answer to `GET_VRING_BASE`.
    fn base(&self) -> u32;
    /// Reads what the driver has made available. Returns whether there is a chain.
    fn refresh(&mut self) -> Result<bool, DriverFault>;
    /// Whether there is a chain at `next`.
    fn available(&self) -> bool;
    /// The first chain that is not completed.
    fn next(&self) -> Self::At;
    /// The place behind a chain.
    fn behind(&self, at: Self::At, span: u16) -> Self::At;
    /// The first descriptor of the chain at `at`. `None` if the driver has made none available
    /// there.
    fn first(&self, at: Self::At) -> Result<Option<ChainDescriptor<Self::At>>, DriverFault>;
    /// The descriptor that follows one with [`DESC_NEXT`].
    fn follow(&self, descriptor: &ChainDescriptor<Self::At>) -> Result<ChainDescriptor<Self::At>, DriverFault>;
    /// The id of a chain that ends with `last`.
    fn id(&self, last: &ChainDescriptor<Self::At>) -> Result<u16, DriverFault>;
    /// See [`DeviceQueue::peek_group`]. `kind` is what the flags of a descriptor must be.
    fn peek_group(&self, memory: &mut View<'_>, most: u16, kind: u16, group: &mut Group);
    /// Adds the next chain to the used ring. The driver sees it after `publish`.
    fn add_used(&mut self, id: u16, span: u16, len: u32);
    /// The same for several chains of one descriptor each.
    fn add_used_group(&mut self, chains: &[SingleBuffer]);
    /// The same for chains that were only read, and may be batched. `id` is that of the last chain,
    /// and `span` is the number by which all of them move the position.
    fn add_used_read(&mut self, id: u16, span: u16);
    /// See [`DeviceQueue::publish`].
    fn publish(&mut self);
    /// The same with in-flight state, and with marks in the dirty log. Returns whether there are
    /// chains left that are resubmitted.
    fn publish_watched(&mut self, log: Option<&Logged>) -> bool;
    /// See [`DeviceQueue::should_notify`].
    fn should_notify(&mut self) -> bool;
    /// See [`DeviceQueue::arm`].
    fn arm(&mut self) -> Armed;
    /// See [`DeviceQueue::disarm`].
    fn disarm(&mut self);
    /// Marks in the dirty log that the event or flag for the driver was written.
    fn log_event(&self, log: &Logged);
    /// Remembers that no chain is available at `at`.
    fn set_out_of_buffers(&mut self, at: Self::At);
    /// Whether there is still none, as of the last `refresh`.
    fn out_of_buffers(&mut self) -> bool;
    /// A descriptor of an indirect table, from its 16 bytes. `next` is its successor's number; the
    /// table has `entries`.
    fn entry(&self, bytes: [u8; Desc::LEN], number: u16, entries: u16) -> Desc;
}

/// The dirty log of a queue's writes.
#[derive(Clone, Debug)]
pub(crate) struct Logged {
    pub(crate) log: Arc<DirtyLog>,
    /// Guest address of the used ring, if writes to it are marked, too.
    pub(crate) used: Option<u64>,
}

/// The parameters with which a queue is started.
#[derive(Debug)]
pub(crate) struct Start {
    /// The position of `SET_VRING_BASE` at which to begin. In-flight state has precedence over it.
    pub(crate) base: u32,
    pub(crate) negotiated: Negotiated,
    /// Whether frames are split behind their headers.
    pub(crate) splits: bool,
    pub(crate) inflight: Option<InflightQueue>,
    /// See [`DeviceQueue::set_log`].
    pub(crate) logged: Option<Logged>,
}
