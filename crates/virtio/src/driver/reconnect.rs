//! A reconnect: the back end has ended, another one replaces it, and the queues go on with it.
//! Their pools, their statistics, and the packets that users hold stay as they are.
//!
//! ```text
//!   control thread: VirtioNet::reconnect                   a thread that polls queue 0
//!   1  negotiates the same features; new ring memory       polls its ring
//!   2  memory table; every ring is started, empty
//!   3  a back end that is still there stops every ring     receives what is left in the ring
//!   4  publishes rings and connection, counts it up;
//!      wakes threads that wait for queues
//!                                                          5  sees the count, and switches rings
//!                                                          6  posts the pages posted before
//! ```
//!
//! The driver does not resume the old rings. It knows every buffer that the old back end had,
//! because it keeps a private copy of all that it posted, and so it needs neither the old ring nor
//! the in-flight region in which a back end records the buffers that it has popped: it starts rings
//! from the beginning. This works with every back end, in whatever order it uses buffers.
//!
//! * *Receive*: pages that were posted are posted again. Frames that had been received and not
//!   polled are counted as [`RxStats::unread`](super::RxStats::unread).
//! * *Transmit*: frames that the old back end had not confirmed are dropped and counted as
//!   [`TxStats::unconfirmed`](super::TxStats::unconfirmed). They may have been sent. They are not
//!   sent again, so no frame is sent twice.
//!
//! Everything that can fail is done by the control thread, before a queue is touched. A reconnect
//! that fails leaves the queues on their old rings, and can be tried again.
//!
//! **A back end that closed the connection and still runs.** The driver assumes that the process
//! ends with its connection. A process that has closed the connection deliberately, or whose
//! connection the driver has closed because it did not answer, may still write. It has the memory,
//! and can change the bytes of packets in it, as before. It cannot disturb its successor, because
//! the rings and their event descriptors are new: its rings do not change any more.
//!
//! Races:
//!
//! * *A queue is restarted or closed during a reconnect.* A ring knows the connection that it
//!   belongs to. Messages about a ring of another connection are not sent: the back end has a new
//!   ring of that number, to which the queue switches at its next poll. This is checked with the
//!   connection locked.
//! * *Two reconnects between two polls.* The rings of the first one were never used. They are
//!   replaced.

use super::config_space;
use super::ctrl::ControlQueue;
use super::error::NetError;
use super::headers::HeaderArray;
use super::ring::RingHandle;
use super::ring_layout::{RingLayout, RingMemory};
use super::state::DriverState;
use super::virtio_net::VirtioNet;
use crate::net::feature;
use crate::vhost_user::{VhostUser, VhostUserError};
use crate::virtqueue::Negotiated;
use netmem_pool::{PeerMemory, VhostRegion};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Why a feature is needed, for an error.
const WHY: &str = "the queues use since they were probed";

impl<M: PeerMemory> VirtioNet<M> {
    /// Continues with another back end, after [the connection has ended](Self::is_connected) or
    /// instead of a live one. The queues stay the same values, and stay on their threads. Each
    /// switches to its new ring at its next [poll](netmem_packet::RxQueue::poll) or
    /// [`complete`](netmem_packet::TxQueue::complete), and then counts one more
    /// [restart](super::RxStats::restarts).
    ///
    /// What was in flight is lost, and counted: frames that were received and not polled, and
    /// frames that were not confirmed as sent. Packets that users hold stay valid. Posted pages are
    /// posted to the new back end.
    ///
    /// A back end that is still connected is asked to stop its rings, once the new one has accepted
    /// everything. **Warning: an old back end that does not stop, or that has ended the connection
    /// and is still alive, may go on to write to pages that it had. End its process first.**
    ///
    /// Waits for the back end, as [`probe`](Self::probe) does: at most 3 s for a message, five
    /// messages for each ring.
    ///
    /// ```no_run
    /// # use netmem_virtio::{VhostUser, driver::VirtioNet};
    /// # use std::{path::Path, thread::sleep, time::Duration};
    /// fn watch(net: &mut VirtioNet, socket: &Path) {
    ///     loop {
    ///         if !net.is_connected()
    ///             && let Ok(backend) = VhostUser::connect(socket)
    ///             && let Err(error) = net.reconnect(backend)
    ///         {
    ///             eprintln!("not reconnected: {error}");
    ///         }
    ///         sleep(Duration::from_millis(100));
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`NetError::Backend`] if the new back end lacks a feature or a queue that is in use, or the
    /// messages fail. [`NetError::Region`] or [`NetError::Event`] if there is no memory for rings
    /// or no descriptor. [`NetError::ControlRefused`] or [`NetError::ControlTimeout`] if the new
    /// back end does not use as many queue pairs as are in use. The queues go on with their old
    /// rings, the new connection is closed, and the call can be repeated with another one.
    pub fn reconnect(&mut self, mut backend: VhostUser) -> Result<(), NetError> {
        if u64::from(self.pairs) > backend.pairs() {
            return Err(VhostUserError::TooFewQueues { wanted: self.pairs, has: backend.pairs() }.into());
        }
        if self.control.is_some() && !backend.has_control_queue() {
            let (name, bit) = (feature::name(feature::CTRL_VQ), feature::CTRL_VQ.trailing_zeros());
            return Err(VhostUserError::MissingFeature { name, bit, why: WHY }.into());
        }
        let (state, pairs) = (self.state.clone(), usize::from(self.pairs));
        let plan = &state.config.plan;
        if plan.rx_tables() && !RingLayout::supports_rx_tables(self.features, &backend) {
            return Err(VhostUserError::NoRxTables.into());
        }
        let mut at = state.lock();
        let fields = config_space::fields(&backend, self.control.is_some());
        let features = Negotiated::new(config_space::without_fields(self.features.bits()) | fields);
        backend.negotiate(features.bits(), WHY, state.config.mtu)?;

        let region = Arc::new(plan.memory()?);
        let entry = match &state.config.domain {
            Some(_) => VhostRegion::at(region.clone(), at.rings.bus),
            None => VhostRegion::plain(region.clone()),
        };
        let rings = RingMemory { region, bus: entry.bus(), connection: at.rings.connection.wrapping_add(1) };
        let mut table = at.table.clone();
        table[RingMemory::ENTRY] = entry;
        backend.set_memory(&table)?;
        let mut ready = Vec::new();
        for index in 0..2 * pairs {
            let ring = rings.queue(plan, index, &state.epolls)?.with_splits(at.split[index] && backend.splits());
            backend.start_ring(index, ring.addresses(), ring.call(), ring.kick())?;
            backend.enable_ring(index, self.control.is_some() || index / 2 < usize::from(self.active))?;
            ready.push(Some(ring));
        }
        let control_index = backend.control_ring();
        let control = self.control.is_some().then(|| {
            let (ring, buffer) = rings.control(plan)?;
            backend.start_ring(control_index, ring.addresses(), ring.call(), ring.kick())?;
            backend.enable_ring(control_index, true)?;
            Ok::<_, NetError>(ControlQueue::new(ring, buffer))
        });
        let mut control = control.transpose()?;
        backend.ready()?;
        state.epolls.watch(backend.socket())?;
        if let Some(control) = control.as_mut().filter(|_| self.active > 1) {
            control.set_pairs(self.active)?;
        }

        // From here on nothing fails. The old back end is stopped last, so that the queues run if
        // the new one is refused.
        let mut stopped = Ok(());
        if at.backend.is_connected() {
            let index = self.control.as_ref().map(|_| self.control_index);
            stopped = (0..2 * pairs).chain(index).try_for_each(|index| at.backend.stop_ring(index));
        }
        (at.backend, at.table, at.ready) = (backend, table, ready);
        state.connection.store(rings.connection, Ordering::Release);
        at.rings = rings;
        drop(at);
        // Threads that wait for queues switch to the new rings, and arm those.
        state.epolls.wake_all();
        (self.control, self.control_index, self.features) = (control, control_index, features);
        // Last, because a subscriber is user code.
        if let Err(error) = stopped {
            netmem_pool::trace::warn!(%error, "the replaced back end did not stop; it may still write to pages that it had");
        }
        Ok(())
    }
}

impl<M: PeerMemory> DriverState<M> {
    /// Whether the device was connected again after this ring was made.
    #[inline]
    pub(super) fn has_replaced(&self, ring: &RingHandle) -> bool {
        self.connection.load(Ordering::Acquire) != ring.connection()
    }

    /// The ring of a queue on the connection as it is now. The back end has started it. Once for
    /// each connection.
    #[cold]
    pub(super) fn take_ring(&self, index: usize) -> Option<RingHandle> {
        self.lock().ready.get_mut(index)?.take()
    }

    /// The same for a transmit queue, with the place of its headers.
    #[cold]
    pub(super) fn take_tx_ring(&self, index: usize) -> Option<(RingHandle, HeaderArray)> {
        let mut at = self.lock();
        let ring = at.ready.get_mut(index)?.take()?;
        Some((ring, at.rings.headers(&self.config.plan, index / 2)))
    }
}
