//! A queue pair, as the port of another pair reaches it.
//!
//! Why a type of its own: a [`Port`](super::port::Port) that leads from pair to pair knows the pair
//! at its other end, which may be of another device of this process. It can wake the thread that
//! serves that pair, and name it for a direct copy. It cannot touch its rings or its memory.

use std::sync::{Arc, MutexGuard};

use super::Stats;
use super::pair::Pair;
use super::shared::Shared;

/// A queue pair of a device. See [`Port::attach`](super::port::Port::attach).
#[derive(Clone, Debug)]
pub struct PairHandle {
    shared: Arc<Shared>,
    pair: usize,
}

/// Handles of one pair are equal.
impl PartialEq for PairHandle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared) && self.pair == other.pair
    }
}

impl Eq for PairHandle {}

impl PairHandle {
    pub(super) fn new(shared: &Arc<Shared>, pair: usize) -> Self {
        Self { shared: Arc::clone(shared), pair }
    }

    /// The number of the pair.
    pub(super) fn pair(&self) -> usize {
        self.pair
    }

    /// The number of the pair's receive ring.
    pub(super) fn ring(&self) -> usize {
        2 * self.pair
    }

    /// The counters of the pair's device.
    pub(super) fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    /// Ends the sleep of the thread that serves the pair, or its next one.
    pub(super) fn wake(&self) {
        self.shared.wake_worker_of(self.pair);
    }

    /// Ends the sleep of all threads of the pair's device.
    pub(super) fn wake_device(&self) {
        self.shared.wake();
    }

    /// The pair, for a pass that sends to it, if its receive ring is served. Waits for nothing.
    #[inline]
    pub(super) fn try_receiver(&self) -> Option<MutexGuard<'_, Pair>> {
        let pair = self.shared.try_receiver(self.pair)?;
        let served = pair.rings[0].queue.is_some() && pair.enabled(0) && !self.shared.unused(self.pair, pair.features);
        served.then_some(pair)
    }
}
