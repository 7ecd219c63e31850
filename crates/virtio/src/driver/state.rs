//! What the queues of a device and its handle share.
//!
//! Why one value: each queue may be on a thread of its own, and the handle on another. A restart
//! and a reconnect change the connection under all of them. What changes is behind one lock, and a
//! queue polls one atomic word to notice it.

use super::queue_config::QueueConfig;
use super::queue_epolls::QueueEpolls;
use super::ring::RingHandle;
use super::ring_layout::RingMemory;
use crate::vhost_user::{VhostUser, VhostUserError};
use netmem_pool::{AddedMemory, PeerMemory, VhostRegion};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The data that the queues and the device's handle share: the connection, and the values from
/// which a queue is made when it is restarted.
pub(crate) struct DriverState<M: PeerMemory> {
    pub(super) attached: Mutex<Attached>,
    /// The number of the connection, as in [`RingMemory::connection`]. Written with `attached`
    /// locked.
    pub(super) connection: AtomicU32,
    pub(super) last_disconnect: LastDisconnect,
    /// Device memory that is added and removed while the device runs.
    pub(super) added: AddedMemory,
    /// Counts the changes of the device memory. Written with `attached` locked.
    pub(super) memory: AtomicU32,
    /// The descriptors that wake threads which wait for queues.
    pub(super) epolls: QueueEpolls,
    pub(super) config: QueueConfig<M>,
}

/// The back end, its memory table, and its rings.
pub(super) struct Attached {
    pub(super) backend: VhostUser,
    /// The memory table that the back end has.
    pub(super) table: Vec<VhostRegion>,
    pub(super) rings: RingMemory,
    /// Rings that the back end has started after a [reconnect](super::reconnect) and to which their
    /// queues have not switched yet.
    pub(super) ready: Vec<Option<RingHandle>>,
    /// Whether each ring belongs to a queue that receives into device memory. A back end that can
    /// split frames is asked to do so on such rings.
    pub(super) split: Vec<bool>,
}

impl<M: PeerMemory> DriverState<M> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Attached> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with<R>(&self, f: impl FnOnce(&mut VhostUser) -> R) -> R {
        f(&mut self.lock().backend)
    }

    /// Stops a queue's ring. The back end of an earlier connection has ended.
    pub(super) fn stop_ring(&self, index: usize, ring: &RingHandle) -> Result<(), VhostUserError> {
        let mut at = self.lock();
        // Any queue can then switch to a ring of the new connection.
        at.split[index] = false;
        if ring.connection() != at.rings.connection { Ok(()) } else { at.backend.stop_ring(index) }
    }

    /// Whether the back end can split frames behind their headers.
    pub(super) fn splits(&self) -> bool {
        self.lock().backend.splits()
    }

    /// Starts a queue's ring again, which was stopped on that connection; `split` if the queue
    /// receives into device memory. If there is another connection since, its back end has started
    /// a new ring, to which the queue switches, or has switched already.
    pub(super) fn restart_ring(
        &self,
        index: usize,
        connection: u32,
        ring: &RingHandle,
        split: bool,
    ) -> Result<(), VhostUserError> {
        let mut at = self.lock();
        at.split[index] = split;
        if connection != at.rings.connection {
            return Ok(());
        }
        at.backend.restart_ring(index, ring.addresses(), ring.call(), ring.kick())
    }
}

/// The number of the connection that has ended last, with [`LastDisconnect::SOME`]; 0 before the
/// first.
#[derive(Debug, Default)]
pub(super) struct LastDisconnect(AtomicU64);

impl LastDisconnect {
    const SOME: u64 = 1 << 32;

    /// Returns whether it was not known.
    pub(super) fn set(&self, connection: u32) -> bool {
        let ended = Self::SOME | u64::from(connection);
        self.0.swap(ended, Ordering::Relaxed) != ended
    }

    pub(super) fn is(&self, connection: u32) -> bool {
        self.0.load(Ordering::Relaxed) == Self::SOME | u64::from(connection)
    }
}
