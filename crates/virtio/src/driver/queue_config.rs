//! The values from which the receive queues of a device are made.
//!
//! They are fixed at probe, because a restart and a reconnect must make the same queues again: the
//! negotiated features and the size of the rings do not change while the device is in use.

use super::buffer_layout::{BufferLayout, HeaderFields};
use super::ring_layout::RingLayout;
use crate::net::Offloads;
use netmem_pool::{DmaDomain, PagePool, PeerMemory, PoolError, PoolOptions, Provider, RegionProvider};
use std::sync::Arc;

/// The values from which a receive queue of host memory is made.
pub(super) struct QueueConfig<M: PeerMemory> {
    pub(super) provider: Arc<dyn Provider<M>>,
    /// In big-packet mode, where chains come from.
    pub(super) big: Option<Arc<RegionProvider<M>>>,
    /// Bytes of the longest frame that is received.
    pub(super) max_frame: usize,
    pub(super) domain: Option<Arc<dyn DmaDomain>>,
    pub(super) layout: BufferLayout,
    pub(super) header: HeaderFields,
    /// The fields of a received frame's header that are used.
    pub(super) offloads: Offloads,
    pub(super) cache: usize,
    pub(super) ring_size: u16,
    /// Where the rings lie in their memory.
    pub(super) plan: RingLayout,
    /// The longest packet that is reported to a back end (`NET_SET_MTU`), in bytes.
    pub(super) mtu: u64,
    /// Whether the device can have device memory.
    pub(super) split: bool,
}

impl<M: PeerMemory> QueueConfig<M> {
    /// The pool of a receive queue, prefilled with as many pages as its ring has entries. In
    /// big-packet mode it has none, because the pool is only for linearising.
    pub(super) fn pool(&self, pair: usize, provider: Arc<dyn Provider<M>>) -> Result<PagePool<M>, PoolError> {
        let prefill = if self.big.is_some() { 0 } else { usize::from(self.ring_size) };
        let pool = PoolOptions::new(format!("rx{pair}")).cache(self.cache).prefill(prefill);
        pool.build(provider, self.domain.clone())
    }
}
