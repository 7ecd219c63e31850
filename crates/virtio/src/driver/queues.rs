//! The receive queues of a device as one value: threads poll them, and another thread restarts them
//! with other memory.
//!
//! ```text
//!   VirtioRxQueues ──clone──► polling thread   get(2): EitherRx, locked ── poll ── unlocked
//!                  └────────► control thread   attach(2, memory), detach(2): restarts, locked
//!
//!   EitherRx       Host(VirtioRx) ◄── detach, attach ──► Split(VirtioSplitRx)
//!                        └───────── a restart failed ─────────┴──► Stopped
//! ```
//!
//! A polling thread locks its queue again at once. With one lock, a restart could wait very long
//! until the lock happens to be free. So each queue has two locks. A thread locks `turn`, then
//! `queue`, and then releases `turn`. A restart that waits for `queue` holds `turn`, so the polling
//! thread waits behind it.

use super::error::NetError;
use super::restart::{RestartError, Restarted};
use super::rx::VirtioRx;
use super::split_options::{SplitClosed, SplitOptions};
use super::split_rx::VirtioSplitRx;
use super::state::DriverState;
use super::stop::Stop;
use crate::notify::Kicks;
use netmem_packet::{Queues, Unbind};
use netmem_pool::{Device, PeerMemory, PeerShared, PoolClosed, Provider, Region};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A receive queue that is restarted in place: what it receives into can change between two polls.
#[derive(Debug)]
pub enum EitherRx<M: PeerMemory = PeerShared> {
    /// The queue receives into host memory.
    Host(VirtioRx<M>),
    /// The queue receives into device memory; headers go to host memory.
    Split(VirtioSplitRx<M>),
    /// The queue has stopped: a restart failed, or the queue was moved out.
    Stopped,
}

/// [`EitherRx::Stopped`], which `std::mem::take` leaves in a queue's place.
impl<M: PeerMemory> Default for EitherRx<M> {
    fn default() -> Self {
        Self::Stopped
    }
}

impl<M: PeerMemory> EitherRx<M> {
    /// The queue, if it receives into host memory.
    #[must_use]
    pub fn host(&mut self) -> Option<&mut VirtioRx<M>> {
        if let Self::Host(rx) = self { Some(rx) } else { None }
    }

    /// The queue, if it receives into device memory.
    #[must_use]
    pub fn split(&mut self) -> Option<&mut VirtioSplitRx<M>> {
        if let Self::Split(rx) = self { Some(rx) } else { None }
    }

    /// Stops the queue and closes its pools. `None` if the queue had stopped before.
    pub fn close(self) -> Option<RxClosed> {
        match self {
            Self::Host(rx) => rx.close().map(RxClosed::Host),
            Self::Split(rx) => rx.close().map(RxClosed::Split),
            Self::Stopped => None,
        }
    }

    /// Restarts the queue: with device memory, or without `split` with host memory. Returns how
    /// many received frames were lost because they had not been polled.
    fn restart(&mut self, split: Option<&SplitOptions>) -> Result<u16, QueuesError> {
        let (host, device) = (RxClosed::Host, RxClosed::Split);
        let (now, outcome) = match (std::mem::take(self), split) {
            (Self::Host(rx), Some(split)) => settle(rx.restart_split(split), Self::Host, Self::Split, host),
            (Self::Split(rx), Some(split)) => settle(rx.restart_split(split), Self::Split, Self::Split, device),
            (Self::Split(rx), None) => settle(rx.restart(None), Self::Split, Self::Host, device),
            (Self::Host(rx), None) => (Self::Host(rx), Ok(0)),
            (Self::Stopped, Some(_)) => (Self::Stopped, Err(QueuesError::NotRunning)),
            // A stopped queue receives into no memory: a binding has nothing to wait for.
            (Self::Stopped, None) => (Self::Stopped, Ok(0)),
        };
        *self = now;
        outcome
    }
}

/// The queue after a restart, and the result for the caller.
fn settle<M: PeerMemory, Q, C, N>(
    outcome: Result<Restarted<N, C>, RestartError<Q, C>>,
    old: impl FnOnce(Q) -> EitherRx<M>,
    new: impl FnOnce(N) -> EitherRx<M>,
    closed: impl FnOnce(C) -> RxClosed,
) -> (EitherRx<M>, Result<u16, QueuesError>) {
    match outcome {
        Ok(restarted) => (new(restarted.queue), Ok(restarted.unread)),
        Err(RestartError::Unchanged { queue, source }) => (old(*queue), Err(QueuesError::Unchanged { source })),
        Err(RestartError::Stopped { closed: pools, source }) => {
            (EitherRx::Stopped, Err(QueuesError::Stopped { closed: Box::new(closed(*pools)), source }))
        }
    }
}

/// The final counters of a queue's pools.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub enum RxClosed {
    /// The pool of a queue that received into host memory.
    Host(PoolClosed),
    /// The pools of a queue that received into device memory.
    Split(SplitClosed),
}

/// Why a queue of [`VirtioRxQueues`] was not restarted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueuesError {
    /// The device has no such queue.
    #[error("there is no queue {queue}: the device has {queues}, from 0 on")]
    NoSuchQueue {
        /// The queue asked for.
        queue: usize,
        /// How many queues there are.
        queues: usize,
    },
    /// The queue goes on as it was.
    #[error("the queue was not restarted and goes on as it was")]
    Unchanged {
        /// Why.
        source: NetError,
    },
    /// The queue has stopped, and cannot be used any more.
    #[error("the queue was stopped and could not be started again; probe the device anew to use it")]
    Stopped {
        /// The final counters of its pools.
        closed: Box<RxClosed>,
        /// Why.
        source: NetError,
    },
    /// The queue had stopped before, and cannot be attached: an earlier restart failed, or the
    /// queue was moved out.
    #[error("the queue has stopped; probe the device anew to use it")]
    NotRunning,
}

struct LockedQueue<M: PeerMemory> {
    /// Locked by the thread that waits for the queue. See the module.
    turn: Mutex<()>,
    queue: Mutex<EitherRx<M>>,
    /// What a thread that waits for the queue is woken by.
    set: Kicks,
}

impl<M: PeerMemory> LockedQueue<M> {
    /// A panic while the queue was locked left it as it was between two frames, or stopped: the
    /// lock stays usable.
    fn lock(&self) -> MutexGuard<'_, EitherRx<M>> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The receive queues of a virtio-net device, to be polled by some threads and restarted by
/// another: the driver's implementation of [`Queues`].
///
/// The value is a handle; clones have the same queues. A polling thread asks for its queue with
/// [`get`](Self::get) before each poll, and so finds it as the last restart has left it. This costs
/// two uncontended locks for each poll. A restart waits until the queue is not locked, and then is
/// the next to have it. A restart of a queue from within a poll of the same queue never ends.
///
/// ```no_run
/// use netmem_packet::{Packet, Poll, RxQueue, SplitFrame};
/// use netmem_pool::PeerShared;
/// use netmem_virtio::driver::{EitherRx, QueuePair, SplitOptions, VirtioRxQueues};
///
/// # fn f(
/// #     pairs: Vec<QueuePair>,
/// #     mut frame: impl FnMut(SplitFrame),
/// #     mut packet: impl FnMut(Packet<PeerShared>),
/// # ) -> Option<usize> {
/// let queues = VirtioRxQueues::new(pairs.into_iter().map(|pair| pair.rx));
/// let queues = queues.header_bytes(SplitOptions::UDP_V6);
/// let control = queues.clone(); // for a `Netdev`, which attaches bindings
///
/// // A polling thread, for ever:
/// let frames = match &mut *queues.get(0)? {
///     EitherRx::Host(rx) => rx.poll(|poll| poll.receive(64, &mut packet)),
///     EitherRx::Split(rx) => rx.poll(|poll| poll.receive(64, &mut frame)),
///     EitherRx::Stopped => return None, // a restart failed
/// };
/// # drop(control);
/// # Some(frames)
/// # }
/// ```
pub struct VirtioRxQueues<M: PeerMemory = PeerShared> {
    queues: Arc<[LockedQueue<M>]>,
    /// The device, while one of its queues or its handle is there. None without queues.
    state: Option<Weak<DriverState<M>>>,
    /// Frames lost by restarts.
    unread: Arc<AtomicU64>,
    header_bytes: u16,
    cache: usize,
    keeps_receiving: bool,
}

impl<M: PeerMemory> VirtioRxQueues<M> {
    /// Makes one value of these queues, numbered from 0 in this order. Their host parts have 114
    /// bytes for headers: enough for TCP over both IPs.
    pub fn new(queues: impl IntoIterator<Item = VirtioRx<M>>) -> Self {
        let queue = |rx: VirtioRx<M>| {
            let set = rx.state().epolls.of(rx.index()).clone();
            LockedQueue { turn: Mutex::default(), queue: Mutex::new(EitherRx::Host(rx)), set }
        };
        let queues: Vec<_> = queues.into_iter().collect();
        Self {
            state: queues.first().map(|rx| Arc::downgrade(rx.state())),
            queues: queues.into_iter().map(queue).collect(),
            unread: Arc::default(),
            header_bytes: SplitOptions::TCP_V6,
            cache: SplitOptions::CACHE,
            keeps_receiving: false,
        }
    }

    /// How many bytes of each frame go to host memory, in queues that this handle attaches. See
    /// [`SplitOptions::header_bytes`].
    #[must_use]
    pub fn header_bytes(mut self, bytes: u16) -> Self {
        self.header_bytes = bytes;
        self
    }

    /// Pages of device memory in the array cache, in queues that this handle attaches; 512 by
    /// default.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }

    /// Whether queues that this handle attaches receive frames also when no page of device memory
    /// is left. See [`SplitOptions::keep_receiving`].
    #[must_use]
    pub fn keep_receiving(mut self, keep: bool) -> Self {
        self.keeps_receiving = keep;
        self
    }

    /// Locks a queue, to poll it. `None` if the device has no such queue.
    ///
    /// The queue can be moved out of the value: `std::mem::take` leaves [`EitherRx::Stopped`] in
    /// its place.
    #[must_use]
    pub fn get(&self, queue: usize) -> Option<MutexGuard<'_, EitherRx<M>>> {
        self.queues.get(queue).map(LockedQueue::lock)
    }

    /// What a thread that waits for the queue is woken by.
    pub(super) fn set(&self, queue: usize) -> Option<&Kicks> {
        self.queues.get(queue).map(|queue| &queue.set)
    }

    /// Frames that the device had received and that were lost by restarts, because they had not
    /// been polled.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    fn restart(&self, queue: usize, split: Option<&SplitOptions>) -> Result<(), QueuesError> {
        let queues = self.queues.len();
        let mut rx = self.get(queue).ok_or(QueuesError::NoSuchQueue { queue, queues })?;
        let unread = rx.restart(split)?;
        self.unread.fetch_add(unread.into(), Ordering::Relaxed);
        Ok(())
    }
}

impl<M: PeerMemory> Clone for VirtioRxQueues<M> {
    fn clone(&self) -> Self {
        let Self { queues, state, unread, header_bytes, cache, keeps_receiving } = self;
        Self {
            queues: queues.clone(),
            state: state.clone(),
            unread: unread.clone(),
            header_bytes: *header_bytes,
            cache: *cache,
            keeps_receiving: *keeps_receiving,
        }
    }
}

impl<M: PeerMemory> Queues for VirtioRxQueues<M> {
    type Error = QueuesError;

    fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Adds the region to the device while it runs, if the device
    /// [can](super::NetOptions::late_device_memory).
    fn bind(&mut self, region: &Arc<Region<Device>>) -> Result<Option<Unbind>, QueuesError> {
        let Some(state) = &self.state else { return Ok(None) };
        let device = state.upgrade().ok_or(QueuesError::NotRunning)?;
        let bus = device.add_device_memory(region).map_err(|source| QueuesError::Unchanged { source })?;
        let state = state.clone();
        let unbind = move |bus| {
            let Some(device) = state.upgrade() else { return };
            if let Err(error) = device.remove_device_memory(bus) {
                netmem_pool::trace::warn!(%error, "device memory that is not needed any more stays with its device");
            }
        };
        Ok(bus.map(|bus| -> Unbind { Box::new(move || unbind(bus)) }))
    }

    /// A queue that receives into device memory already is restarted with the new one.
    fn attach(&mut self, queue: usize, memory: Arc<dyn Provider<Device>>) -> Result<(), QueuesError> {
        let options = SplitOptions::new(memory).header_bytes(self.header_bytes).cache(self.cache);
        let options = options.keep_receiving(self.keeps_receiving);
        self.restart(queue, Some(&options))
    }

    /// A queue that receives into host memory already is left alone. So is a queue that has
    /// stopped, because it receives nothing: after a restart that failed, a binding can be unbound.
    fn detach(&mut self, queue: usize) -> Result<(), QueuesError> {
        self.restart(queue, None)
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioRxQueues<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioRxQueues({} queues)", self.queues.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A restart that waits for a queue is the next to have it, also before a polling thread that
    /// releases the queue and asks for it again at once.
    #[test]
    fn a_restart_is_next() {
        let queue =
            LockedQueue::<PeerShared> { turn: Mutex::default(), queue: Mutex::default(), set: Kicks::new().unwrap() };
        for round in 0..100 {
            let order = Mutex::new(Vec::new());
            std::thread::scope(|s| {
                let polled = queue.lock();
                s.spawn(|| {
                    let _restarted = queue.lock();
                    order.lock().unwrap_or_else(PoisonError::into_inner).push("restart");
                });
                // From then on it waits only for the queue. The number of rounds is bounded, so
                // that the test ends if it fails.
                for _ in 0..10_000 {
                    if queue.turn.try_lock().is_err() {
                        break;
                    }
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
                drop(polled);
                let _polled = queue.lock();
                order.lock().unwrap_or_else(PoisonError::into_inner).push("poll");
            });
            let order = order.into_inner().unwrap_or_else(PoisonError::into_inner);
            assert_eq!(order, ["restart", "poll"], "round {round}");
        }
    }
}
