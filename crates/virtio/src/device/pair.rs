//! One queue pair as the control side sets it up and the data side works on it: its rings, the features, the memory table.
//!
//! Each pair is behind a lock of its own (see [`super::shared`]). It has its own copy of everything that a pass reads, so
//! that a pass takes one lock and no message stops a pass over another pair:
//!
//! ```text
//!   Pair { rings: [receive, transmit], memory: Arc<MemoryTable>, features, offloads }
//! ```
//!
//! The control queue is a pair without a transmit ring.

use std::sync::Arc;

use super::inflight::InflightRegion;
use super::log::DirtyLog;
use super::memory::MemoryTable;
use super::{DeviceError, DriverFault, Stats};
use crate::net::{Offloads, feature};
use crate::notify::{Kick, Notifier};
use crate::virtqueue::device::{AnyDeviceQueue, AnyRing, BASE, MappedRing, Start, is_base};
use crate::virtqueue::{Desc, MAX_SIZE, Negotiated, PackedRing, SplitRing};

/// What the pairs of one front end have in common, and what a ring is started with.
#[derive(Debug, Default)]
pub(super) struct Common {
    /// The features that the driver accepted.
    pub(super) features: Negotiated,
    pub(super) memory: Arc<MemoryTable>,
    /// Where the pages that the device writes are noted, if the driver accepted `VHOST_F_LOG_ALL`.
    pub(super) log: Option<Arc<DirtyLog>>,
    pub(super) inflight: Option<InflightRegion>,
}

impl Common {
    /// The log that running rings write.
    fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|_| self.features.has(feature::LOG_ALL))
    }
}

/// One ring, as far as the front end has described it.
#[derive(Debug, Default)]
pub(super) struct Ring {
    size: Option<u16>,
    /// User addresses of descriptor table, available ring and used ring.
    parts: Option<[u64; 3]>,
    /// Guest address of the used ring, if the writes to it are to be logged.
    used_log: Option<u64>,
    /// As the front end said it, or where the ring stopped.
    base: Option<u32>,
    /// Watched by the thread that serves the ring while it is here. A ring without one is polled: its driver sends no notifications.
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
    fn map(&self, index: usize, memory: &MemoryTable, packed: bool) -> Result<AnyRing, DeviceError> {
        let not_ready = |missing| DeviceError::NotReady { ring: index, missing };
        let size = self.size.ok_or_else(|| not_ready("its size"))?;
        let parts = self.parts.ok_or_else(|| not_ready("its addresses"))?;
        let n = u64::from(size);
        let table = ("descriptor table", Desc::LEN as u64 * n, 16);
        let shape = match packed {
            true => [table, ("driver's event structure", 4, 4), ("device's event structure", 4, 4)],
            false if !size.is_power_of_two() => return Err(DeviceError::RingSize { size: size.into() }),
            false => [table, ("available ring", 6 + 2 * n, 2), ("used ring", 6 + 8 * n, 4)],
        };
        let mut host = [std::ptr::null_mut(); 3];
        for ((to, addr), (part, len, align)) in host.iter_mut().zip(parts).zip(shape) {
            let at = memory.translate_user(addr, len).filter(|at| at.addr() % align == 0);
            *to = at.ok_or(DeviceError::RingAddress { ring: index, part, addr })?;
        }
        let [table, avail, used] = host;
        if packed {
            let guest = |addr| memory.guest_of_user(addr).unwrap_or(addr);
            let (descriptors, event) = (guest(parts[0]), guest(parts[2]));
            // SAFETY: the parts were just found in the table, whole and aligned, and a size is from 1 to 32768. The ring is
            // dropped or moved before the pair's table is: `Pair::set_memory` alone replaces it.
            let ring = unsafe { PackedRing::from_parts(table, avail, used, size) };
            return Ok(AnyRing::Packed(MappedRing { ring, descriptors, event }));
        }
        // SAFETY: as above, and `size` is a power of two.
        Ok(AnyRing::Split(unsafe { SplitRing::from_parts(table, avail, used, size) }))
    }

    /// Starts the ring, in the memory and with the features that `common` has.
    fn start(&mut self, index: usize, common: &Common) -> Result<(), DeviceError> {
        let packed = common.features.packed();
        let at = self.map(index, &common.memory, packed)?;
        let (size, base) = (self.size.unwrap_or_default(), self.base(packed));
        if packed && !is_base(base, size) {
            return Err(DeviceError::RingBase { ring: index, base });
        }
        let inflight = match &common.inflight {
            Some(region) => region.queue(index, size, packed)?,
            None => None,
        };
        let start = Start { base, negotiated: common.features, inflight };
        self.queue = Some(AnyDeviceQueue::new(at, start));
        self.set_log(common);
        Ok(())
    }

    /// Where the ring stands.
    fn base(&self, packed: bool) -> u32 {
        self.base.unwrap_or(if packed { BASE } else { 0 })
    }

    /// Tells a running ring what it logs.
    fn set_log(&mut self, common: &Common) {
        if let Some(queue) = &mut self.queue {
            queue.set_log(common.log().cloned(), self.used_log);
        }
    }

    /// Asks the driver to notify the device of the next chain, after a look at the ring. Returns whether chains are available
    /// already; none if the device cannot wait for a notification, because a chain has come since the look, the driver has
    /// broken the rules (the next pass finds that), or it sends no notifications.
    pub(super) fn arm(&mut self) -> Option<bool> {
        let Some(queue) = &mut self.queue else { return Some(false) };
        let available = queue.refresh().ok()?;
        (queue.arm().waits() && self.kick.is_some()).then_some(available)
    }

    /// Whether the buffers at hand are too few for the next frame.
    pub(super) fn starved(&mut self) -> bool {
        self.queue.as_mut().is_some_and(AnyDeviceQueue::starved)
    }

    /// Takes the ring out of service and keeps its position.
    pub(super) fn stop(&mut self) {
        self.waits_for = None;
        if let Some(queue) = self.queue.take() {
            self.base = Some(queue.base());
        }
    }

    /// Takes the ring out of service because its driver broke the rules.
    #[cold]
    pub(super) fn broken(&mut self, index: usize, e: DriverFault, stats: &Stats) {
        tracing::warn!(ring = index, "ring stopped: {e}");
        stats.count_queue_error(e);
        self.stop();
        if let Some(err) = &self.err {
            err.signal();
        }
    }

    /// The ring goes on in another table, or waits for its memory if the table does not have it.
    fn moves(&mut self, index: usize, common: &Common) {
        let Some(queue) = self.queue.take() else { return };
        match self.map(index, &common.memory, common.features.packed()) {
            Ok(at) => self.queue = queue.moved(at),
            Err(e) => {
                self.base = Some(queue.base());
                let addr = if let DeviceError::RingAddress { addr, .. } = e { addr } else { 0 };
                self.waits_for = Some(addr);
            }
        }
    }

    /// An error if the ring runs, for what can be set only while it does not.
    fn stopped(&mut self, index: usize, what: &'static str) -> Result<&mut Self, DeviceError> {
        if self.queue.is_some() { Err(DeviceError::Running { what, ring: index }) } else { Ok(self) }
    }

    pub(super) fn set_size(&mut self, index: usize, size: u32, packed: bool) -> Result<(), DeviceError> {
        let ring = self.stopped(index, "SET_VRING_NUM")?;
        let possible = |n: &u16| (1..=MAX_SIZE).contains(n) && (packed || n.is_power_of_two());
        let ok = u16::try_from(size).ok().filter(possible);
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
        common: &Common,
    ) -> Result<(), DeviceError> {
        if self.queue.is_some() && self.parts != Some(parts) {
            return Err(DeviceError::Running { what: "SET_VRING_ADDR", ring: index });
        }
        (self.parts, self.used_log) = (Some(parts), used_log);
        self.set_log(common);
        Ok(())
    }

    pub(super) fn set_base(&mut self, index: usize, base: u32, packed: bool) -> Result<(), DeviceError> {
        let ring = self.stopped(index, "SET_VRING_BASE")?;
        if !packed && u16::try_from(base).is_err() {
            return Err(DeviceError::RingBase { ring: index, base });
        }
        ring.base = Some(base);
        Ok(())
    }

    /// Starts the ring, or exchanges the kick descriptor of a running one.
    pub(super) fn set_kick(&mut self, index: usize, kick: Option<Kick>, common: &Common) -> Result<(), DeviceError> {
        if self.queue.is_none() && self.waits_for.is_none() {
            if common.memory.is_empty() {
                return Err(DeviceError::NotReady { ring: index, missing: "a memory table" });
            }
            if common.memory.lost() > 0 {
                return Err(DeviceError::MemoryLost { ring: index });
            }
            self.start(index, common)?;
        }
        self.kick = kick;
        Ok(())
    }

    pub(super) fn set_call(&mut self, call: Option<Notifier>) {
        // The device may have given buffers back while there was no descriptor; an interrupt too many does no harm.
        if let (Some(_), Some(call)) = (&self.queue, &call) {
            call.signal();
        }
        self.call = call;
    }

    pub(super) fn set_err(&mut self, err: Option<Notifier>) {
        self.err = err;
    }

    pub(super) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// Stops the ring and says where it stopped. Its buffers are not touched again.
    pub(super) fn get_base(&mut self, packed: bool) -> u32 {
        self.stop();
        self.kick = None;
        self.call = None;
        self.base(packed)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Pair {
    /// The ring to the driver and the one from it. They precede the memory: fields are dropped in this order, and rings point
    /// into memory.
    pub(super) rings: [Ring; 2],
    pub(super) memory: Arc<MemoryTable>,
    /// The features that the driver accepted.
    pub(super) features: Negotiated,
    /// What a frame from the driver may ask for.
    pub(super) offloads: Offloads,
    /// A guest that has moved here, and that the pair's port is to announce.
    pub(super) announce: Option<[u8; 6]>,
    /// Counts the front ends that have left.
    pub(super) left: u64,
    /// `features`, `announce` or `left` have changed since the last pass.
    pub(super) news: bool,
    /// The rings ask for notifications, because the thread that serves them went to sleep.
    pub(super) armed: bool,
}

impl Pair {
    /// Whether ring `side` takes part; a running ring that does not is drained without effect.
    pub(super) fn enabled(&self, side: usize) -> bool {
        self.rings[side].enabled || !self.features.has(feature::VHOST_USER_PROTOCOL)
    }

    /// Whether a ring runs.
    pub(super) fn runs(&self) -> bool {
        self.rings.iter().any(|ring| ring.queue.is_some())
    }

    /// Asks the driver for no more notifications.
    #[cold]
    pub(super) fn disarm(&mut self) {
        self.armed = false;
        for queue in self.rings.iter_mut().filter_map(|ring| ring.queue.as_mut()) {
            queue.disarm();
        }
    }

    /// Forgets the front end. Afterwards the pair uses nothing of its memory.
    pub(super) fn reset(&mut self) {
        *self = Self { left: self.left + 1, news: true, ..Self::default() };
    }

    /// Resets the pair of a virtio device whose front end stays: the memory remains.
    pub(super) fn reset_device(&mut self) {
        self.rings = Default::default();
        self.set_features(Negotiated::default());
    }

    pub(super) fn set_features(&mut self, features: Negotiated) {
        (self.features, self.offloads, self.news) = (features, features.sent(), true);
    }

    /// Tells the running rings what they log.
    pub(super) fn set_logs(&mut self, common: &Common) {
        for ring in &mut self.rings {
            ring.set_log(common);
        }
    }

    /// Goes on with the memory table that `common` has. Running rings move to it where it holds them; the others wait for a
    /// table that does, and rings that waited for this one start. `first` is the number of the receive ring.
    pub(super) fn set_memory(&mut self, first: usize, common: &Common) {
        let old = std::mem::replace(&mut self.memory, Arc::clone(&common.memory));
        for (side, ring) in self.rings.iter_mut().enumerate() {
            ring.moves(first + side, common);
            // What fails here waits for the next table.
            if ring.waits_for.is_some() && common.memory.lost() == 0 && ring.start(first + side, common).is_ok() {
                ring.waits_for = None;
            }
        }
        drop(old);
    }

    /// Stops rings that wait for their memory: the table that they found is the whole one.
    pub(super) fn stop_waiting(&mut self, first: usize, stats: &Stats) {
        for (side, ring) in self.rings.iter_mut().enumerate() {
            if let Some(addr) = ring.waits_for {
                ring.broken(first + side, DriverFault::RingUnmapped { addr }, stats);
            }
        }
    }

    /// Stops the rings if pages of the memory are gone. `first` is the number of the receive ring.
    #[cold]
    pub(super) fn look_for_lost(&mut self, first: usize, stats: &Stats) {
        let accesses = self.memory.lost();
        if accesses == 0 {
            return;
        }
        for (side, ring) in self.rings.iter_mut().enumerate().filter(|(_, ring)| ring.queue.is_some()) {
            ring.broken(first + side, DriverFault::MemoryLost { accesses }, stats);
        }
    }
}
