//! What the control side sets up and the data side works on: rings, features, memory. One mutex guards it; the data
//! side holds it for a pass, the control side for a message.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::event::{EventfdFlags, eventfd};

use super::config::Config;
use super::inflight::InflightRegion;
use super::log::DirtyLog;
use super::memory::MemoryTable;
use super::{DeviceError, DriverFault, Options, Stats};
use crate::net::{Offloads, feature};
use crate::notify::{Kick, Kicks, Notifier};
use crate::virtqueue::device::{AnyDeviceQueue, AnyRing, Start};
use crate::virtqueue::{Desc, Negotiated, SplitLayout, SplitRing};

/// One ring, as far as the front end has described it.
#[derive(Debug, Default)]
pub(super) struct Ring {
    size: Option<u16>,
    /// User addresses of descriptor table, available ring and used ring.
    parts: Option<[u64; 3]>,
    /// Guest address of the used ring, if the writes to it are to be logged.
    used_log: Option<u64>,
    base: u32,
    /// Watched by [`Shared::kicks`] while it is here.
    kick: Option<Kick>,
    pub(super) call: Option<Notifier>,
    err: Option<Notifier>,
    enabled: bool,
    /// The ring ran, and its memory was removed: it goes on when a table has this user address again.
    waits_for: Option<u64>,
    /// There while the ring runs.
    pub(super) queue: Option<AnyDeviceQueue>,
}

impl Ring {
    /// The ring's memory.
    fn map(&self, index: usize, memory: &MemoryTable) -> Result<AnyRing, DeviceError> {
        let not_ready = |missing| DeviceError::NotReady { ring: index, missing };
        let size = self.size.ok_or_else(|| not_ready("its size"))?;
        let parts = self.parts.ok_or_else(|| not_ready("its addresses"))?;
        let n = u64::from(size);
        let shape = [
            ("descriptor table", Desc::LEN as u64 * n, 16),
            ("available ring", 6 + 2 * n, 2),
            ("used ring", 6 + 8 * n, 4),
        ];
        let mut host = [std::ptr::null_mut(); 3];
        for ((to, addr), (part, len, align)) in host.iter_mut().zip(parts).zip(shape) {
            let at = memory.translate_user(addr, len).filter(|at| at.addr() % align == 0);
            *to = at.ok_or(DeviceError::RingAddress { ring: index, part, addr })?;
        }
        // SAFETY: the parts were just found in the table, whole and aligned, and `size` is a power of two. The ring is
        // dropped or moved before the table is: `State` alone replaces its table, in `exchange` and `reset`.
        Ok(AnyRing::Split(unsafe { SplitRing::from_parts(host[0], host[1], host[2], size) }))
    }

    /// Takes the ring out of service and keeps its position.
    pub(super) fn stop(&mut self) {
        self.waits_for = None;
        if let Some(queue) = self.queue.take() {
            self.base = queue.base();
        }
    }

    /// The same, because its driver broke the rules.
    #[cold]
    pub(super) fn broken(&mut self, index: usize, e: DriverFault, stats: &Stats) {
        tracing::warn!(ring = index, "ring stopped: {e}");
        stats.count_queue_error(e);
        self.stop();
        if let Some(err) = &self.err {
            err.signal();
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    /// Rings before memory: fields are dropped in this order, and rings point into memory.
    pub(super) rings: Vec<Ring>,
    pub(super) memory: MemoryTable,
    /// What [`MemoryTable::lost`] said when it was last looked at.
    lost: u64,
    /// The features that the driver accepted.
    pub(super) features: Negotiated,
    /// What a frame from the driver may ask for.
    pub(super) offloads: Offloads,
    /// Queue pairs in use, as far as the control queue says so.
    pub(super) pairs: u16,
    /// The virtio device status, as the front end tells it.
    pub(super) status: u8,
    /// Where the pages that the device writes are noted, if the driver accepted `VHOST_F_LOG_ALL`.
    log: Option<Arc<DirtyLog>>,
    inflight: Option<InflightRegion>,
    /// A guest that has moved here, and that the data side is to announce.
    pub(super) announce: Option<[u8; 6]>,
    /// Counts the front ends that have left.
    pub(super) left: u64,
    /// Something has changed that the data side must look at before its next pass.
    pub(super) news: bool,
}

impl State {
    pub(super) fn new(rings: usize) -> Self {
        let rings = (0..rings).map(|_| Ring::default()).collect();
        Self {
            rings,
            memory: MemoryTable::default(),
            features: Negotiated::default(),
            offloads: Offloads::sent(0),
            pairs: 1,
            lost: 0,
            status: 0,
            log: None,
            inflight: None,
            announce: None,
            left: 0,
            news: true,
        }
    }

    /// Forgets the front end. Afterwards nothing of its memory is mapped.
    pub(super) fn reset(&mut self) {
        *self = Self { left: self.left + 1, ..Self::new(self.rings.len()) };
    }

    /// Resets the virtio device. The front end stays: its memory table and its log remain.
    pub(super) fn reset_device(&mut self) {
        for ring in &mut self.rings {
            *ring = Ring::default();
        }
        self.features = Negotiated::default();
        self.offloads = self.features.sent();
        (self.pairs, self.status, self.inflight) = (1, 0, None);
    }

    /// Whether ring `index` takes part; a running ring that does not is drained without effect.
    pub(super) fn enabled(&self, index: usize) -> bool {
        self.rings[index].enabled || !self.features.has(feature::VHOST_USER_PROTOCOL)
    }

    /// Whether the driver has said how many pairs it uses, and this one is beyond that.
    pub(super) fn unused(&self, pair: usize) -> bool {
        self.features.has(feature::MQ | feature::CTRL_VQ) && pair >= usize::from(self.pairs)
    }

    fn ring(&mut self, ring: usize) -> Result<&mut Ring, DeviceError> {
        let rings = self.rings.len();
        self.rings.get_mut(ring).ok_or(DeviceError::NoSuchRing { ring, rings })
    }

    fn stopped_ring(&mut self, ring: usize, what: &'static str) -> Result<&mut Ring, DeviceError> {
        let r = self.ring(ring)?;
        if r.queue.is_some() { Err(DeviceError::Running { what, ring }) } else { Ok(r) }
    }

    pub(super) fn set_features(&mut self, features: u64, offered: u64) -> Result<(), DeviceError> {
        let extra = features & !offered;
        if extra != 0 {
            return Err(DeviceError::NotOffered { extra, name: feature::name(extra) });
        }
        let features = Negotiated::new(features);
        if features == self.features {
            return Ok(());
        }
        if features.bits() ^ self.features.bits() == feature::LOG_ALL {
            self.features = features;
            self.set_logs();
            return Ok(());
        }
        if let Some(ring) = self.rings.iter().position(|r| r.queue.is_some()) {
            return Err(DeviceError::Running { what: "SET_FEATURES", ring });
        }
        (self.features, self.offloads) = (features, features.sent());
        self.pairs = 1;
        Ok(())
    }

    /// The pages that the device writes are noted in `log` from now on, as long as the driver accepts `VHOST_F_LOG_ALL`.
    pub(super) fn set_log(&mut self, log: DirtyLog) {
        self.log = Some(Arc::new(log));
        self.set_logs();
    }

    /// Tells the running rings what they log.
    fn set_logs(&mut self) {
        let log = self.log.as_ref().filter(|_| self.features.has(feature::LOG_ALL));
        for ring in &mut self.rings {
            if let Some(queue) = &mut ring.queue {
                queue.set_log(log.cloned(), ring.used_log);
            }
        }
    }

    /// Rings that are started from now on take up what `region` says is in flight, and keep it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Running`].
    pub(super) fn set_inflight(&mut self, region: InflightRegion) -> Result<(), DeviceError> {
        if let Some(ring) = self.rings.iter().position(|r| r.queue.is_some()) {
            return Err(DeviceError::Running { what: "SET_INFLIGHT_FD", ring });
        }
        self.inflight = Some(region);
        Ok(())
    }

    /// Replaces the memory table by one that the front end has sent as a whole. Running rings go on where the new table holds
    /// them, and are stopped where it does not. Returns the old table, to be dropped when the state is not locked: that
    /// unmaps.
    #[must_use]
    pub(super) fn set_memory(&mut self, memory: MemoryTable, stats: &Stats) -> MemoryTable {
        let old = self.exchange(memory, stats);
        for (index, ring) in self.rings.iter_mut().enumerate() {
            if let Some(addr) = ring.waits_for {
                ring.broken(index, DriverFault::RingUnmapped { addr }, stats);
            }
        }
        old
    }

    /// Replaces the memory table by one with a region more or less. A running ring whose memory was removed waits for it: a
    /// front end resizes a region by removing and adding it. Returns the old table, as [`set_memory`](Self::set_memory).
    #[must_use]
    pub(super) fn exchange(&mut self, memory: MemoryTable, stats: &Stats) -> MemoryTable {
        let old = std::mem::replace(&mut self.memory, memory);
        for (index, ring) in self.rings.iter_mut().enumerate() {
            let Some(queue) = ring.queue.take() else { continue };
            match ring.map(index, &self.memory) {
                Ok(at) => ring.queue = Some(queue.moved(at)),
                Err(e) => {
                    ring.base = queue.base();
                    let addr = if let DeviceError::RingAddress { addr, .. } = e { addr } else { 0 };
                    ring.waits_for = Some(addr);
                }
            }
        }
        self.lost = self.memory.lost();
        stats.set_memory(&self.memory);
        for index in 0..self.rings.len() {
            // What fails here waits for the next table.
            if self.rings[index].waits_for.is_some() && self.lost == 0 && self.start(index).is_ok() {
                self.rings[index].waits_for = None;
            }
        }
        old
    }

    /// Stops all rings if pages of the memory are gone.
    #[cold]
    pub(super) fn look_for_lost(&mut self, stats: &Stats) {
        let accesses = self.memory.lost();
        stats.memory_lost.fetch_add(accesses.saturating_sub(self.lost), Ordering::Relaxed);
        self.lost = accesses;
        if accesses == 0 {
            return;
        }
        for (index, ring) in self.rings.iter_mut().enumerate().filter(|(_, ring)| ring.queue.is_some()) {
            ring.broken(index, DriverFault::MemoryLost { accesses }, stats);
        }
    }

    pub(super) fn set_size(&mut self, index: usize, size: u32) -> Result<(), DeviceError> {
        let ring = self.stopped_ring(index, "SET_VRING_NUM")?;
        let ok = u16::try_from(size).ok().filter(|n| n.is_power_of_two() && *n <= SplitLayout::MAX_SIZE);
        ring.size = Some(ok.ok_or(DeviceError::RingSize { size })?);
        Ok(())
    }

    /// `used_log` is the guest address of the used ring, if the writes to it are to be logged. Only that may change while
    /// the ring runs.
    pub(super) fn set_parts(
        &mut self,
        index: usize,
        parts: [u64; 3],
        used_log: Option<u64>,
    ) -> Result<(), DeviceError> {
        let ring = self.ring(index)?;
        if ring.queue.is_some() && ring.parts != Some(parts) {
            return Err(DeviceError::Running { what: "SET_VRING_ADDR", ring: index });
        }
        (ring.parts, ring.used_log) = (Some(parts), used_log);
        self.set_logs();
        Ok(())
    }

    pub(super) fn set_base(&mut self, index: usize, base: u32) -> Result<(), DeviceError> {
        let ring = self.stopped_ring(index, "SET_VRING_BASE")?;
        ring.base = u16::try_from(base).map_err(|_| DeviceError::RingBase { ring: index, base })?.into();
        Ok(())
    }

    /// Starts the ring, or exchanges the kick descriptor of a running one.
    pub(super) fn set_kick(&mut self, index: usize, kick: Option<Kick>) -> Result<(), DeviceError> {
        let ring = self.ring(index)?;
        if ring.queue.is_none() && ring.waits_for.is_none() {
            if self.memory.is_empty() {
                return Err(DeviceError::NotReady { ring: index, missing: "a memory table" });
            }
            if self.memory.lost() > 0 {
                return Err(DeviceError::MemoryLost { ring: index });
            }
            self.start(index)?;
        }
        self.rings[index].kick = kick;
        Ok(())
    }

    fn start(&mut self, index: usize) -> Result<(), DeviceError> {
        // The last ring is the control queue's where their number is odd.
        let control = self.rings.len() % 2 == 1 && index + 1 == self.rings.len();
        if control && !self.features.has(feature::CTRL_VQ) {
            return Err(DeviceError::NotNegotiated { feature: feature::name(feature::CTRL_VQ) });
        }
        let at = self.rings[index].map(index, &self.memory)?;
        let ring = &mut self.rings[index];
        let inflight = match (&self.inflight, ring.size) {
            (Some(region), Some(size)) => region.queue(index, size)?,
            _ => None,
        };
        let start = Start { base: ring.base, negotiated: self.features, inflight };
        ring.queue = Some(AnyDeviceQueue::new(at, start));
        self.set_logs();
        Ok(())
    }

    pub(super) fn set_call(&mut self, index: usize, call: Option<Notifier>) -> Result<(), DeviceError> {
        let ring = self.ring(index)?;
        // Something may have been given back while there was no one to tell; an interrupt too many does no harm.
        if let (Some(_), Some(call)) = (&ring.queue, &call) {
            call.signal();
        }
        ring.call = call;
        Ok(())
    }

    pub(super) fn set_err(&mut self, index: usize, err: Option<Notifier>) -> Result<(), DeviceError> {
        self.ring(index)?.err = err;
        Ok(())
    }

    pub(super) fn set_enabled(&mut self, index: usize, enabled: bool) -> Result<(), DeviceError> {
        self.ring(index)?.enabled = enabled;
        Ok(())
    }

    /// Stops the ring and says where it stopped. Its buffers are not touched again.
    pub(super) fn get_base(&mut self, index: usize) -> Result<u32, DeviceError> {
        let ring = self.ring(index)?;
        ring.stop();
        ring.kick = None;
        ring.call = None;
        Ok(ring.base)
    }

    pub(super) fn disable_all(&mut self) {
        for ring in &mut self.rings {
            ring.enabled = false;
        }
    }
}

/// What the two sides share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// How many threads wait for the state. The data side keeps out while there are any: without this, a data side that
    /// polls without pause would take the mutex again before the other thread has woken up, for seconds on a busy machine.
    waiting: AtomicU32,
    pub(super) connected: AtomicBool,
    /// Written when the state has changed, to end a sleep. No peer has it, so that plain reads and writes do not block.
    wake: OwnedFd,
    /// The kick descriptors of all rings.
    pub(super) kicks: Kicks,
    pub(super) config: Config,
    pub(super) options: Options,
    pub(super) offered: u64,
    pub(super) stats: Arc<Stats>,
}

impl Shared {
    pub(super) fn new(options: Options, offered: u64) -> Result<Self, DeviceError> {
        let rings = 2 * options.max_pairs + usize::from(options.serve_control);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| DeviceError::Io { what: "eventfd", source: e.into() })?;
        let kicks = Kicks::new()?;
        let (state, stats) = (Mutex::new(State::new(rings)), Arc::new(Stats::default()));
        let (waiting, connected) = (AtomicU32::new(0), AtomicBool::new(false));
        let config = Config::new(&options);
        Ok(Self { state, waiting, connected, wake, kicks, config, options, offered, stats })
    }

    /// For the control side: has the state as soon as the pass at hand is over, and wakes the data side afterwards.
    pub(super) fn change<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = f(&mut state);
        state.news = true;
        drop(state);
        self.wake();
        result
    }

    /// Ends a sleep of the data side, or the next one if the data side does not sleep.
    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The descriptor that [`Self::wake`] makes readable.
    pub(super) fn awaited(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// For the data side, after a sleep: the next sleep ends only by what comes from now on.
    pub(super) fn slept(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        self.kicks.clear();
    }

    /// Replaces the memory table by what `change` makes of it. The front end's thread alone does, so the table stays the same
    /// while a region is mapped, and passes go on meanwhile. What is in no table any more is unmapped at the end.
    pub(super) fn exchange_memory(
        &self,
        change: impl FnOnce(&MemoryTable) -> Result<MemoryTable, DeviceError>,
    ) -> Result<(), DeviceError> {
        let table = self.lock().memory.clone();
        let new = change(&table)?;
        drop(self.change(|state| state.exchange(new, &self.stats)));
        Ok(())
    }

    /// The state as soon as the pass at hand is over. There is no other way to wait for it: who waits, says so.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// For the data side: the state, unless the control side has it or wants it.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        if self.waiting.load(Ordering::Relaxed) != 0 {
            return None;
        }
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A pass ends while the control side waits: no other pass begins before it has had the state.
    #[test]
    fn who_waits_is_next() {
        let shared = Shared::new(Options::default(), 0).unwrap();
        let first = shared.try_lock().unwrap();
        thread::scope(|s| {
            s.spawn(|| shared.change(|state| state.pairs = 7));
            s.spawn(|| shared.lock().features = Negotiated::new(7));
            while shared.waiting.load(Ordering::Relaxed) < 2 {
                thread::yield_now();
            }
            drop(first);
            let next = loop {
                if let Some(state) = shared.try_lock() {
                    break state;
                }
                thread::yield_now();
            };
            assert_eq!((next.pairs, next.features), (7, Negotiated::new(7)));
        });
    }
}
