//! A queue restart: one receive queue is stopped and started again with pages of another provider,
//! while the device and its other queues go on. Binding device memory to a queue is a restart, and
//! so is unbinding.
//!
//! ```text
//!   1  new pools, filled; event descriptors   fails: the queue goes on as it was
//!   2  GET_VRING_BASE                         fails: posted pages are quarantined, no queue left
//!   3  posted pages return, old pools close   users' fragments return to them later
//!   4  the ring's memory is zeroed, and filled
//!   5  addresses, kick, enable                fails: stopped again; posted pages are returned or
//!                                             quarantined
//! ```
//!
//! Everything that can fail because there is too little memory is done first, while the queue still
//! runs.

use super::error::NetError;
use super::ring::{Events, RingHandle};
use super::rx::VirtioRx;
use super::split_buffers::SplitPools;
use super::split_options::{SplitClosed, SplitOptions};
use super::split_rx::VirtioSplitRx;
use super::state::DriverState;
use super::stop::{Stop, Stopped};
use netmem_pool::{PagePool, PeerMemory, PoolClosed, Provider};
use std::fmt;
use std::sync::Arc;

/// A queue that was restarted.
#[derive(Debug)]
#[must_use = "it holds the queue, which stops when it is dropped"]
#[non_exhaustive]
pub struct Restarted<Q, C> {
    /// The queue as it is now. Its counters begin anew.
    pub queue: Q,
    /// The final counters of its earlier pools.
    pub closed: C,
    /// Frames that the device had received and that had not been polled yet. They are lost.
    pub unread: u16,
}

/// Why a queue was not restarted, and its state now.
#[derive(thiserror::Error)]
pub enum RestartError<Q, C> {
    /// Nothing has changed.
    #[error("the queue was not restarted and goes on as it was")]
    Unchanged {
        /// The queue.
        queue: Box<Q>,
        /// Why.
        source: NetError,
    },
    /// The queue has stopped, and cannot be used any more.
    #[error("the queue was stopped and could not be started again; probe the device anew to use it")]
    Stopped {
        /// The final counters of its earlier pools.
        closed: Box<C>,
        /// Why.
        source: NetError,
    },
}

impl<Q: fmt::Debug, C: fmt::Debug> fmt::Debug for RestartError<Q, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unchanged { queue, source } => write!(f, "Unchanged({queue:?}, {source:?})"),
            Self::Stopped { closed, source } => write!(f, "Stopped({closed:?}, {source:?})"),
        }
    }
}

type Outcome<Q, C, N> = Result<Restarted<N, C>, RestartError<Q, C>>;

impl<M: PeerMemory> VirtioRx<M> {
    /// Stops the queue and starts it again with a provider of device memory: binds that memory to
    /// the queue. Its region is one of the device's [memory
    /// table](super::NetOptions::device_memory).
    ///
    /// # Errors
    ///
    /// [`RestartError`].
    pub fn restart_split(self, options: &SplitOptions) -> Outcome<Self, PoolClosed, VirtioSplitRx<M>> {
        exchange(self, |state, index| SplitPools::new(&state.config, index / 2, options), VirtioSplitRx::new)
    }

    /// Stops the queue and starts it again with another provider of host memory, which lies in the
    /// device's memory table; or with the one that the device was probed with. Big-packet mode,
    /// whose pages are from no pool, supports no other.
    ///
    /// # Errors
    ///
    /// [`RestartError`].
    pub fn restart(self, memory: Option<Arc<dyn Provider<M>>>) -> Outcome<Self, PoolClosed, Self> {
        exchange(self, |state, index| state.host_pool(index / 2, memory), Self::new)
    }
}

impl<M: PeerMemory> VirtioSplitRx<M> {
    /// Stops the queue and starts it again with another provider of device memory, or another
    /// length of host parts.
    ///
    /// # Errors
    ///
    /// [`RestartError`].
    pub fn restart_split(self, options: &SplitOptions) -> Outcome<Self, SplitClosed, Self> {
        exchange(self, |state, index| SplitPools::new(&state.config, index / 2, options), Self::new)
    }

    /// Stops the queue and starts it again with host memory, as [`VirtioRx::restart`]: unbinds its
    /// device memory. Pages that users hold stay theirs, and keep the provider.
    ///
    /// # Errors
    ///
    /// [`RestartError`].
    pub fn restart(self, memory: Option<Arc<dyn Provider<M>>>) -> Outcome<Self, SplitClosed, VirtioRx<M>> {
        exchange(self, |state, index| state.host_pool(index / 2, memory), VirtioRx::new)
    }
}

impl<M: PeerMemory> DriverState<M> {
    fn host_pool(&self, pair: usize, memory: Option<Arc<dyn Provider<M>>>) -> Result<PagePool<M>, NetError> {
        if memory.is_some() && self.config.big.is_some() {
            return Err(NetError::GivenMemory);
        }
        Ok(self.config.pool(pair, memory.unwrap_or_else(|| self.config.provider.clone()))?)
    }
}

/// Restarts a queue: see the module. `pools` makes the pools of the new queue, `start` posts their
/// pages.
fn exchange<Q: Stop, P, N: Stop<Mem = Q::Mem>>(
    mut queue: Q,
    pools: impl FnOnce(&DriverState<Q::Mem>, usize) -> Result<P, NetError>,
    start: impl FnOnce(RingHandle, P, usize, Arc<DriverState<Q::Mem>>) -> N,
) -> Outcome<Q, Q::PoolClosed, N> {
    let (index, state, connection) = (queue.index(), queue.state().clone(), queue.ring().connection());
    let ready = pools(&state, index).and_then(|pools| Ok((pools, Events::new(Some(state.epolls.of(index)))?)));
    let (pools, events) = match ready {
        Ok(ready) => ready,
        Err(source) => return Err(RestartError::Unchanged { queue: Box::new(queue), source }),
    };
    let Some(Stopped { closed, unread, confirmed }) = queue.stop() else {
        unreachable!("a queue that is there runs: what stops it consumes it")
    };
    // Done in every case, so that a thread that waits for the queue sees its new state.
    let _wakes = WakeOnDrop(&state, index);
    if let Err(source) = confirmed {
        return Err(RestartError::Stopped { closed: Box::new(closed), source: source.into() });
    }
    let ring = queue.ring().again(events).with_splits(N::SPLIT && state.splits());
    let new = start(ring, pools, index, state.clone());
    match state.restart_ring(index, connection, new.ring(), N::SPLIT) {
        Ok(()) => Ok(Restarted { queue: new, closed, unread }),
        // The drop of the new queue returns or quarantines what it has posted.
        Err(source) => Err(RestartError::Stopped { closed: Box::new(closed), source: source.into() }),
    }
}

/// WakeOnDrop the threads that wait for a queue.
struct WakeOnDrop<'l, M: PeerMemory>(&'l DriverState<M>, usize);

impl<M: PeerMemory> Drop for WakeOnDrop<'_, M> {
    fn drop(&mut self) {
        self.0.epolls.wake(self.1);
    }
}
