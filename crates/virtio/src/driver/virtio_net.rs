//! The handle of a device that is in use.

use super::ctrl::ControlQueue;
use super::error::NetError;
use super::reserve::Reserve;
use super::rx::VirtioRx;
use super::state::DriverState;
use super::tx::VirtioTx;
use crate::virtqueue::Negotiated;
use netmem_pool::{DmaDomain, PeerMemory, PeerShared, PoolOptions, Region, SharedPool};
use std::fmt;
use std::sync::Arc;

/// A receive and a transmit queue.
#[derive(Debug)]
#[must_use = "a queue stops when it is dropped"]
pub struct QueuePair<M: PeerMemory = PeerShared> {
    /// Receives.
    pub rx: VirtioRx<M>,
    /// Transmits.
    pub tx: VirtioTx<M>,
}

/// A virtio-net device in use.
///
/// `M` is the kind of memory of its receive pages. It follows from the options: [`PeerShared`],
/// whose bytes are copied out before they are read, or [`TrustedPeer`](netmem_pool::TrustedPeer) of
/// a device that the user has declared [trusted](super::NetOptions::trust_peer), whose bytes are
/// slices. The driver validates what either of them writes to its rings.
pub struct VirtioNet<M: PeerMemory = PeerShared> {
    pub(super) state: Arc<DriverState<M>>,
    pub(super) control: Option<ControlQueue>,
    pub(super) control_index: usize,
    pub(super) features: Negotiated,
    pub(super) pairs: u16,
    pub(super) active: u16,
    pub(super) region: Arc<Region<M>>,
    /// Where transmit pools allocate their pages.
    pub(super) reserve: Option<Arc<Reserve<M>>>,
}

impl<M: PeerMemory> VirtioNet<M> {
    /// Changes how many queue pairs are in use, also under traffic. Frames that were on their way
    /// to a pair that is no longer in use stay in its ring and are received when its queue is
    /// polled.
    ///
    /// # Errors
    ///
    /// [`NetError`]; the number in use is as it was, unless the connection broke.
    pub fn set_active_pairs(&mut self, pairs: u16) -> Result<(), NetError> {
        if pairs == 0 || pairs > self.pairs {
            return Err(NetError::Pairs { asked: pairs, max: self.pairs });
        }
        match &mut self.control {
            Some(control) => control.set_pairs(pairs)?,
            None => self.state.with(|b| {
                (0..usize::from(self.pairs) * 2)
                    .try_for_each(|index| b.enable_ring(index, index < usize::from(pairs) * 2))
            })?,
        }
        self.active = pairs;
        Ok(())
    }

    /// How many queue pairs are in use.
    #[must_use]
    pub fn active_pairs(&self) -> u16 {
        self.active
    }

    /// The features that were negotiated.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features.bits()
    }

    /// The memory of the receive pages.
    #[must_use]
    pub fn region(&self) -> &Region<M> {
        &self.region
    }

    /// The DMA domain of the device: its memory table, or what
    /// [`NetOptions::domain`](super::NetOptions::domain) has made of that. `None` if the device
    /// uses this process's addresses ([`NetOptions::premapped`](super::NetOptions::premapped)).
    #[must_use]
    pub fn domain(&self) -> Option<&Arc<dyn DmaDomain>> {
        self.state.config.domain.as_ref()
    }

    /// Makes a pool of pages to send from. Any thread allocates from it, by shared reference. The
    /// pages are in the device's memory table and domain, so a packet made of them is sent without
    /// being mapped. All such pools share the pages of
    /// [`NetOptions::tx_pages`](super::NetOptions::tx_pages).
    ///
    /// # Errors
    ///
    /// [`NetError::NoTxPages`] if none were set aside, [`NetError::Pool`] if there is no memory for
    /// the pool itself.
    pub fn tx_pool(&self, options: PoolOptions) -> Result<SharedPool<M>, NetError> {
        let reserve = self.reserve.clone().ok_or(NetError::NoTxPages)?;
        Ok(options.build_shared(reserve, self.domain().cloned())?)
    }

    /// Whether the device still holds its end of the connection. If it does not,
    /// [`reconnect`](Self::reconnect) replaces it. Cost: one system call.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.state.check_connection(self.state.lock())
    }
}

impl<M: PeerMemory> Drop for VirtioNet<M> {
    fn drop(&mut self) {
        if self.control.is_some() {
            // A device that is gone has stopped.
            let _ = self.state.with(|b| b.stop_ring(self.control_index));
        }
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioNet<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioNet({}/{} pairs, features {:#x})", self.active, self.pairs, self.features.bits())
    }
}
