//! A receive queue that can be stopped: what a restart needs of it.
//!
//! A restart replaces the type of a queue (host memory or device memory). This trait is what both
//! types have in common, so that `restart.rs` is written once.

use super::ring::RingHandle;
use super::state::DriverState;
use crate::vhost_user::VhostUserError;
use netmem_pool::PeerMemory;
use std::sync::Arc;

/// How a queue was stopped.
pub(super) struct Stopped<C> {
    pub(super) closed: C,
    /// Frames that were not polled.
    pub(super) unread: u16,
    /// Whether the device has confirmed the stop.
    pub(super) confirmed: Result<(), VhostUserError>,
}

/// A receive queue that can be stopped.
pub(super) trait Stop {
    type Mem: PeerMemory;
    type PoolClosed;
    /// Whether the queue receives into device memory.
    const SPLIT: bool;
    fn index(&self) -> usize;
    fn state(&self) -> &Arc<DriverState<Self::Mem>>;
    fn ring(&self) -> &RingHandle;
    /// `None` if it was stopped before.
    fn stop(&mut self) -> Option<Stopped<Self::PoolClosed>>;
}
