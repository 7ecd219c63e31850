//! The data that the control side and the threads of the data side share, and the locks that
//! protect it.
//!
//! ```text
//!   control side (one front end's thread)               data side (each worker a thread)
//!   ─────────────────────────────────────               ────────────────────────────────
//!   front: Mutex<Front>     held for one message        never locked
//!   pairs[n]: Mutex<Pair>   waits for the pass at hand  try-lock: held for one pass over pair n
//! ```
//!
//! * *A message stops no pass over a pair that it does not concern.* It locks the pair of its ring,
//!   and no other.
//! * *A message waits for one pass at most* of each pair that it concerns. A worker that polls
//!   without pause would lock the mutex again before the waiting thread has woken up; on a busy
//!   machine this can last for seconds. So the waiting thread sets a mark ([`LockedPair`]), and the
//!   worker leaves the pair out until the thread has locked it once.
//! * *A message that concerns all pairs* ([`Shared::every`]) changes those first that no worker is
//!   in, and waits for the others then. If it locked the pairs in order, it could follow the worker
//!   from pair to pair, and wait for a pass of each.
//! * *A worker waits for no lock.* A pair that is locked is left out of its pass.
//! * *A pass over a pair may lock the pair to which its frames go* ([`super::direct`]): by a try,
//!   too, so that two pairs which send to each other cannot wait for each other. If the receiver's
//!   own worker has found its pair locked, that worker is next.
//! * A thread that holds a pair waits for no lock. The control side locks `front` before a pair.
//!
//! # Memory
//!
//! Each pair holds an `Arc` of the memory table. A pass borrows the table from the pair that it has
//! locked, so no translation outlives the pass. The control side replaces the table in all pairs,
//! one after the other. When that is done, no pass uses the old table any more, and the control
//! side drops the last reference: the regions that are gone are unmapped before the front end has
//! its answer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use rustix::event::{EventfdFlags, eventfd};

use super::config::Config;
use super::error::DeviceError;
use super::options::Options;
use super::pair::{Common, Pair, Ring};
use super::stats::Stats;
use crate::guest_memory::MemoryTable;
use crate::guest_memory::dirty_log::DirtyLog;
use crate::net::feature;
use crate::notify::{Kick, Kicks};
use crate::virtqueue::Negotiated;
use crate::virtqueue::device::inflight::InflightRegion;

/// The bit of the device status by which the device reports that it needs a reset:
/// DEVICE_NEEDS_RESET (virtio 1.2, section 2.1).
const NEEDS_RESET: u8 = 64;

/// A pair and its lock. Pairs of different workers have no cache line in common.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LockedPair {
    /// How many threads of the control side wait for the pair. The worker leaves it out while there
    /// are any.
    waiting: AtomicU32,
    /// The pair's own worker has found it locked, and has not had it since. No sender locks it
    /// then.
    missed: AtomicBool,
    pair: Mutex<Pair>,
}

impl LockedPair {
    /// Locks the pair, as soon as the present pass is over. For the control side.
    fn lock(&self) -> MutexGuard<'_, Pair> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let pair = self.pair.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        pair
    }

    /// The pair, unless another thread has locked it.
    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, Pair>> {
        match self.pair.try_lock() {
            Ok(pair) => Some(pair),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The descriptors that end a worker's sleep, except those of its ports.
#[derive(Debug)]
pub(super) struct Waker {
    /// An eventfd that is written to end a sleep. No peer has it, so plain reads and writes do not
    /// block.
    wake: OwnedFd,
    /// The kick descriptors of the worker's rings.
    pub(super) kicks: Kicks,
}

impl Waker {
    fn new() -> Result<Self, DeviceError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| DeviceError::Io { what: "eventfd", source: e.into() })?;
        Ok(Self { wake, kicks: Kicks::new()? })
    }

    /// Ends the worker's sleep, or its next one if it does not sleep.
    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The descriptor that [`Self::wake`] makes readable.
    pub(super) fn awaited(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Clears earlier calls of [`Self::wake`]: only a later one ends the next sleep.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }
}

/// The control side's state of the front end.
#[derive(Debug, Default)]
struct Front {
    common: Common,
    /// The virtio device status, as the front end has set it.
    status: u8,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    front: Mutex<Front>,
    /// The queue pairs, followed by the control queue if the device serves one.
    pairs: Box<[LockedPair]>,
    /// Rings, the control queue's included.
    pub(super) rings: usize,
    /// Queue pairs in use, as the last command of the control queue has set them.
    in_use: AtomicU16,
    /// The pairs from here on may still be in a pass that began when there were more.
    left: AtomicUsize,
    /// One per worker. Changes only while there is no front end.
    wakers: RwLock<Arc<[Waker]>>,
    pub(super) connected: AtomicBool,
    pub(super) config: Config,
    pub(super) options: Options,
    pub(super) offered: u64,
    pub(super) stats: Arc<Stats>,
}

impl Shared {
    pub(super) fn new(options: Options, offered: u64) -> Result<Self, DeviceError> {
        let control = usize::from(options.serve_control);
        let pairs = (0..options.max_pairs + control).map(|_| LockedPair::default()).collect();
        Ok(Self {
            front: Mutex::default(),
            pairs,
            rings: 2 * options.max_pairs + control,
            in_use: AtomicU16::new(1),
            left: AtomicUsize::new(1),
            wakers: RwLock::new(Arc::new([Waker::new()?])),
            connected: AtomicBool::new(false),
            config: Config::new(&options),
            stats: Arc::new(Stats::new(options.max_pairs)),
            options,
            offered,
        })
    }

    // The workers' side.

    /// The wakers of the workers. Pair `n` is served by worker `n` modulo their number, and the
    /// control queue by worker 0.
    pub(super) fn wakers(&self) -> Arc<[Waker]> {
        Arc::clone(&self.wakers.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Divides the pairs among `workers` threads. No front end may be connected: its kick
    /// descriptors stay where they are.
    pub(super) fn divide(&self, workers: usize) -> Result<Arc<[Waker]>, DeviceError> {
        let wakers: Arc<[_]> = (0..workers).map(|_| Waker::new()).collect::<Result<Vec<_>, _>>()?.into();
        *self.wakers.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&wakers);
        Ok(wakers)
    }

    /// Pair `n` for a pass of its worker, unless another thread has locked it, or the control side
    /// waits for it.
    #[inline]
    pub(super) fn try_pair(&self, n: usize) -> Option<MutexGuard<'_, Pair>> {
        let locked = &self.pairs[n];
        if locked.waiting.load(Ordering::Relaxed) != 0 {
            return None;
        }
        let pair = locked.try_lock();
        if locked.missed.load(Ordering::Relaxed) == pair.is_some() {
            locked.missed.store(pair.is_none(), Ordering::Relaxed);
        }
        pair
    }

    /// Pair `n` for a pass over a pair that sends to it. Not if the pair's own worker has found it
    /// locked last: a sender that never pauses would keep that worker out. Not if the device does
    /// not [copy directly](Self::copies_directly).
    #[inline]
    pub(super) fn try_receiver(&self, n: usize) -> Option<MutexGuard<'_, Pair>> {
        let locked = &self.pairs[n];
        let free = locked.waiting.load(Ordering::Relaxed) == 0 && !locked.missed.load(Ordering::Relaxed);
        if free && self.copies_directly() { locked.try_lock() } else { None }
    }

    /// Whether the device's pairs may be the sender or the receiver of a direct copy. Not if an
    /// access to their memory can wait for another process: it would keep two pairs locked.
    #[inline]
    pub(super) fn copies_directly(&self) -> bool {
        !self.options.any_memory_file
    }

    /// Ends the sleep of the worker of pair `n`.
    pub(super) fn wake_worker_of(&self, n: usize) {
        let wakers = self.wakers();
        wakers[self.worker(2 * n, wakers.len())].wake();
    }

    /// Whether pair `n` is beyond those that the driver uses by its last command on the control
    /// queue.
    #[inline]
    pub(super) fn unused(&self, n: usize, features: Negotiated) -> bool {
        self.options.serve_control
            && features.has(feature::MQ | feature::CTRL_VQ)
            && n >= usize::from(self.in_use.load(Ordering::Relaxed))
    }

    /// Sets the number of queue pairs in use to `pairs`. Returns false if a worker is in a pass
    /// over a pair that must not receive any more. The caller then calls again later, and answers
    /// its driver only when this has returned true.
    pub(super) fn use_pairs(&self, pairs: u16) -> bool {
        if self.in_use.swap(pairs, Ordering::Relaxed) != pairs {
            self.left.store(pairs.into(), Ordering::Relaxed);
        }
        // A worker that locks a pair after this thread has seen it free reads the new number: no
        // pair is waited for twice, so that workers that are always in some pair do not keep the
        // answer back.
        let first = self.left.load(Ordering::Relaxed);
        let busy = (first..self.options.max_pairs).find(|&n| self.pairs[n].try_lock().is_none());
        self.left.store(busy.unwrap_or(self.options.max_pairs), Ordering::Relaxed);
        if busy.is_none() {
            self.wake();
        }
        busy.is_none()
    }

    /// Ends the sleep of every worker.
    pub(super) fn wake(&self) {
        self.wakers().iter().for_each(Waker::wake);
    }

    // The control side.

    fn front(&self) -> MutexGuard<'_, Front> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the worker that serves ring `index`.
    fn worker(&self, index: usize, workers: usize) -> usize {
        let pair = index / 2;
        if pair == self.options.max_pairs { 0 } else { pair % workers }
    }

    /// Changes all pairs: first those that no worker is in, then the others. `change` gets the
    /// number of the pair's first ring.
    fn every(&self, mut change: impl FnMut(usize, &mut Pair)) {
        let mut busy = Vec::new();
        for (n, locked) in self.pairs.iter().enumerate() {
            match locked.try_lock() {
                Some(mut pair) => change(2 * n, &mut pair),
                None => busy.push(n),
            }
        }
        for n in busy {
            change(2 * n, &mut self.pairs[n].lock());
        }
        self.wake();
    }

    /// Changes one ring, and wakes the worker that serves it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NoSuchRing`].
    pub(super) fn ring<T>(&self, index: usize, change: impl FnOnce(&mut Ring) -> T) -> Result<T, DeviceError> {
        self.check(index)?;
        let result = change(&mut self.pairs[index / 2].lock().rings[index % 2]);
        let wakers = self.wakers();
        wakers[self.worker(index, wakers.len())].wake();
        Ok(result)
    }

    fn check(&self, ring: usize) -> Result<(), DeviceError> {
        let rings = self.rings;
        if ring < rings { Ok(()) } else { Err(DeviceError::NoSuchRing { ring, pairs: self.options.max_pairs }) }
    }

    /// The same for a change that needs the data that the rings have in common.
    pub(super) fn ring_with<T>(
        &self,
        index: usize,
        change: impl FnOnce(&mut Ring, &Common) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let front = self.front();
        self.ring(index, |ring| change(ring, &front.common))?
    }

    /// Starts ring `index`, or exchanges the kick descriptor of a running one.
    pub(super) fn set_kick(&self, index: usize, kick: Option<Kick>) -> Result<(), DeviceError> {
        self.ring_with(index, |ring, common| {
            if index == 2 * self.options.max_pairs && !common.features.has(feature::CTRL_VQ) {
                return Err(DeviceError::NotNegotiated { feature: feature::name(feature::CTRL_VQ) });
            }
            ring.set_kick(index, kick, common)
        })
    }

    /// Calls `watch` to add a kick descriptor of ring `index` to those of the worker that serves
    /// it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NoSuchRing`].
    pub(super) fn kicks<T>(&self, index: usize, watch: impl FnOnce(&Kicks) -> T) -> Result<T, DeviceError> {
        self.check(index)?;
        let wakers = self.wakers();
        Ok(watch(&wakers[self.worker(index, wakers.len())].kicks))
    }

    /// Returns an error if a ring runs. For parameters that can be set only while no ring runs.
    fn all_stopped(&self, what: &'static str) -> Result<(), DeviceError> {
        let mut running = None;
        self.every(|first, pair| {
            let side = pair.rings.iter().position(|ring| ring.queue.is_some());
            running = running.or(side.map(|side| first + side));
        });
        running.map_or(Ok(()), |ring| Err(DeviceError::Running { what, ring }))
    }

    /// Forgets the front end. Afterwards nothing of its memory is mapped.
    pub(super) fn reset(&self) {
        let mut front = self.front();
        self.in_use.store(1, Ordering::Relaxed);
        self.every(|_, pair| pair.reset());
        *front = Front::default();
        self.stats.set_memory(&front.common.memory);
    }

    /// Resets the virtio device. The front end stays: its memory table and its log remain.
    pub(super) fn reset_device(&self) {
        let mut front = self.front();
        (front.common.features, front.common.inflight, front.status) = (Negotiated::default(), None, 0);
        self.in_use.store(1, Ordering::Relaxed);
        self.every(|_, pair| pair.reset_device());
    }

    pub(super) fn disable_all(&self) {
        self.every(|_, pair| pair.rings.iter_mut().for_each(|ring| ring.set_enabled(false)));
    }

    /// The status that the front end has set last, with [`NEEDS_RESET`] if a ring was stopped
    /// because its driver has broken a rule. Waits for a pass over each pair that is in one.
    pub(super) fn status(&self) -> u8 {
        let (status, mut broken) = (self.front().status, false);
        self.every(|_, pair| broken |= pair.needs_reset());
        if broken { status | NEEDS_RESET } else { status }
    }

    /// Only the device sets [`NEEDS_RESET`], and only a reset clears it. A front end that adds a
    /// bit to the status sends the others as it has read them.
    pub(super) fn set_status(&self, status: u8) {
        self.front().status = status & !NEEDS_RESET;
    }

    /// Whether the front end's rings are packed.
    pub(super) fn packed(&self) -> bool {
        self.front().common.features.packed()
    }

    pub(super) fn set_features(&self, features: u64) -> Result<(), DeviceError> {
        let extra = features & !self.offered;
        if extra != 0 {
            return Err(DeviceError::NotOffered { extra, name: feature::name(extra) });
        }
        let features = Negotiated::new(features);
        let mut front = self.front();
        let changed = features.bits() ^ front.common.features.bits();
        if changed == 0 {
            return Ok(());
        }
        if changed != feature::LOG_ALL {
            self.all_stopped("SET_FEATURES")?;
            self.in_use.store(1, Ordering::Relaxed);
        }
        front.common.features = features;
        self.every(|_, pair| {
            pair.set_features(features);
            pair.set_logs(&front.common);
        });
        Ok(())
    }

    /// Sets the log in which the device marks the pages that it writes, as long as the driver
    /// accepts `VHOST_F_LOG_ALL`.
    pub(super) fn set_log(&self, log: DirtyLog) {
        let mut front = self.front();
        // The old log is dropped, and unmapped, when no pass uses it any more.
        let _old = front.common.log.replace(Arc::new(log));
        self.every(|_, pair| pair.set_logs(&front.common));
    }

    /// Sets the in-flight region: rings that are started from now on resubmit the chains that are
    /// in flight there, and keep the region up to date.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Running`].
    pub(super) fn set_inflight(&self, region: InflightRegion) -> Result<(), DeviceError> {
        let mut front = self.front();
        self.all_stopped("SET_INFLIGHT_FD")?;
        front.common.inflight = Some(region);
        Ok(())
    }

    /// Asks the port of the first pair to announce that the guest with this MAC address is on this
    /// host now.
    pub(super) fn announce(&self, mac: [u8; 6]) {
        let mut pair = self.pairs[0].lock();
        (pair.announce, pair.changed) = (Some(mac), true);
        drop(pair);
        self.wakers()[0].wake();
    }

    /// The memory table.
    pub(super) fn memory(&self) -> Arc<MemoryTable> {
        Arc::clone(&self.front().common.memory)
    }

    /// Replaces the memory table by one that the front end has sent as a whole. Running rings
    /// continue if the new table has their memory, and are stopped if it does not.
    pub(super) fn set_memory(&self, memory: MemoryTable) {
        self.replace_memory(memory, |first, pair| pair.stop_waiting(first, &self.stats));
    }

    /// Replaces the memory table by the result of `change`, which adds or removes a region. A
    /// running ring whose memory was removed waits for it: a front end resizes a region by removing
    /// and adding it. Only the front end's thread changes the table, so the table stays the same
    /// while a region is mapped, and passes continue meanwhile.
    pub(super) fn exchange_memory(
        &self,
        change: impl FnOnce(&MemoryTable) -> Result<MemoryTable, DeviceError>,
    ) -> Result<(), DeviceError> {
        let memory = change(&self.memory())?;
        self.replace_memory(memory, |_, _| ());
        Ok(())
    }

    /// When this returns, no pass uses the old table, and its regions that are not in the new one
    /// are unmapped.
    fn replace_memory(&self, memory: MemoryTable, then: impl Fn(usize, &mut Pair)) {
        let mut front = self.front();
        let old = std::mem::replace(&mut front.common.memory, Arc::new(memory));
        self.every(|first, pair| {
            pair.set_memory(first, &front.common);
            then(first, pair);
        });
        self.stats.set_memory(&front.common.memory);
        drop(front);
        drop(old);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    fn shared(max_pairs: usize) -> Shared {
        Shared::new(Options { max_pairs, ..Options::default() }, u64::MAX).unwrap()
    }

    /// A pass ends while the control side waits: no other pass begins before it has had the pair.
    #[test]
    fn the_thread_that_waits_is_next() {
        let shared = shared(1);
        let first = shared.try_pair(0).unwrap();
        thread::scope(|s| {
            s.spawn(|| shared.set_features(7).unwrap());
            s.spawn(|| shared.announce([7; 6]));
            while shared.pairs[0].waiting.load(Ordering::Relaxed) < 2 {
                thread::yield_now();
            }
            drop(first);
            let next = loop {
                if let Some(pair) = shared.try_pair(0) {
                    break pair;
                }
                thread::yield_now();
            };
            // `set_features` asks all pairs whether they run before it changes them.
            assert_eq!(next.announce, Some([7; 6]));
        });
    }

    /// A sender does not lock a pair that another thread has, for which the control side waits, or
    /// whose own worker has found it locked and has not had it since.
    #[test]
    fn a_sender_is_the_last() {
        let shared = shared(1);
        let pass = shared.try_pair(0).unwrap();
        assert!(shared.try_receiver(0).is_none());
        drop(pass);
        let sender = shared.try_receiver(0).unwrap();
        assert!(shared.try_pair(0).is_none());
        drop(sender);
        assert!(shared.try_receiver(0).is_none(), "the pair's worker is next");
        drop(shared.try_pair(0).unwrap());
        let sender = shared.try_receiver(0).unwrap();
        thread::scope(|s| {
            s.spawn(|| shared.announce([7; 6]));
            while shared.pairs[0].waiting.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            drop(sender);
            if let Some(early) = shared.try_receiver(0) {
                assert_eq!(early.announce, Some([7; 6]), "the control side waited");
            }
        });
    }

    /// A change of all pairs is made in every pair that is free before it waits for a pair that is
    /// not.
    #[test]
    fn a_busy_pair_is_the_last() {
        let shared = shared(3);
        let busy = shared.try_pair(0).unwrap();
        let (send, seen) = channel();
        thread::scope(|s| {
            let shared = &shared;
            s.spawn(move || shared.every(|first, _| send.send(first / 2).unwrap()));
            let watchdog = Duration::from_secs(60);
            assert_eq!([(); 2].map(|()| seen.recv_timeout(watchdog)), [Ok(1), Ok(2)]);
            assert!(shared.try_pair(1).is_some(), "a pair that was changed goes on");
            drop(busy);
            assert_eq!(seen.recv_timeout(watchdog), Ok(0));
        });
    }

    /// A message for a ring of one pair needs no other pair.
    #[test]
    fn a_message_takes_the_pair_of_its_ring() {
        let shared = shared(2);
        let _busy = shared.try_pair(0).unwrap();
        let (done, ended) = channel();
        thread::scope(|s| {
            let shared = &shared;
            s.spawn(move || done.send(shared.ring(3, |ring| ring.get_base(false))).unwrap());
            assert_eq!(ended.recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), 0);
        });
    }

    /// A number of pairs holds when no pass over the others is under way.
    #[test]
    fn pairs_out_of_use_are_waited_for() {
        let options = Options { max_pairs: 3, serve_control: true, ..Options::default() };
        let shared = Shared::new(options, u64::MAX).unwrap();
        let busy = shared.try_pair(2).unwrap();
        assert!(!shared.use_pairs(1));
        assert!(shared.use_pairs(3), "all are in use");
        assert!(!shared.use_pairs(2));
        drop(busy);
        assert!(shared.use_pairs(2));
        // Passes over the others that alternate do not keep the number from being answered.
        let first = shared.try_pair(2).unwrap();
        assert!(!shared.use_pairs(1));
        let second = shared.try_pair(1).unwrap();
        drop(first);
        assert!(shared.use_pairs(1), "a pass that begins now sees the number");
        drop(second);
        assert!(shared.use_pairs(2));
        let told = Negotiated::new(feature::MQ | feature::CTRL_VQ);
        assert_eq!([0, 1, 2].map(|n| shared.unused(n, told)), [false, false, true]);
    }
}
