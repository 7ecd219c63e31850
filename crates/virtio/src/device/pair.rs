//! One queue pair: its rings, the features, the memory table. The control side sets it up, and the
//! data side uses it.
//!
//! Each pair is behind a lock of its own (see [`super::shared`]). It has its own copy of everything
//! that a pass reads, so that a pass locks one mutex and no message stops a pass over another pair:
//!
//! ```text
//!   Pair { rings: [receive, transmit], memory: Arc<MemoryTable>, features, offloads }
//! ```
//!
//! The control queue is a pair without a transmit ring.

use std::sync::Arc;

use super::stats::Tally;
use super::{DeviceError, DriverFault, Stats};
use crate::guest_memory::MemoryTable;
use crate::guest_memory::dirty_log::DirtyLog;
use crate::net::{Offloads, feature};
use crate::notify::{Kick, Notifier};
use crate::virtqueue::device::inflight::InflightRegion;
use crate::virtqueue::device::{AnyDeviceQueue, AnyRing, BASE, Logged, MappedRing, Start, is_base};
use crate::virtqueue::{Desc, MAX_SIZE, Negotiated, PackedRing, SplitRing};

/// The data that the pairs of one front end have in common, with which a ring is started.
#[derive(Debug, Default)]
pub(super) struct Common {
    /// The features that the driver accepted.
    pub(super) features: Negotiated,
    pub(super) memory: Arc<MemoryTable>,
    /// The log of the pages that the device writes, if the driver accepted `VHOST_F_LOG_ALL`.
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
    /// Whether frames are split behind their headers.
    splits: bool,
    /// Guest address of the used ring, if writes to it must be logged.
    used_log: Option<u64>,
    /// The ring's position: as the front end has set it, or where the ring has stopped.
    base: Option<u32>,
    /// The thread that serves the ring watches it. A ring without one is polled, because its driver
    /// sends no notifications.
    kick: Option<Kick>,
    pub(super) call: Option<Notifier>,
    err: Option<Notifier>,
    enabled: bool,
    /// Set if the ring ran and its memory was removed: the ring continues when a table has this
    /// user address again.
    awaited_memory: Option<u64>,
    /// The ring was stopped because its driver has broken a rule, and the device was not reset
    /// since.
    needs_reset: bool,
    /// Set while the ring runs.
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
            // SAFETY: the parts were just found in the table, whole and aligned, and a size is from
            // 1 to 32768. The ring is dropped or moved before the pair's table is:
            // `Pair::set_memory` alone replaces it.
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
        // The log is there from the beginning: the ring is written when a batch in flight is rolled
        // back.
        let logged = common.log().map(|log| Logged { log: log.clone(), used: self.used_log });
        let start = Start { base, negotiated: common.features, splits: self.splits, inflight, logged };
        self.queue = Some(AnyDeviceQueue::new(at, start));
        Ok(())
    }

    /// The ring's position.
    fn base(&self, packed: bool) -> u32 {
        self.base.unwrap_or(if packed { BASE } else { 0 })
    }

    /// Sets the log of a running ring.
    fn set_log(&mut self, common: &Common) {
        if let Some(queue) = &mut self.queue {
            queue.set_log(common.log().cloned(), self.used_log);
        }
    }

    /// Reads the ring, then asks the driver to notify the device of the next chain. Returns whether
    /// chains are available already. Returns `None` if the device cannot wait for a notification: a
    /// chain has become available since that read, or the driver has broken a rule (which the next
    /// pass finds), or the driver sends no notifications.
    pub(super) fn arm(&mut self) -> Option<bool> {
        let Some(queue) = &mut self.queue else { return Some(false) };
        let available = queue.refresh().ok()?;
        (queue.arm().waits() && self.kick.is_some()).then_some(available)
    }

    /// Whether there are too few available buffers for the next frame.
    pub(super) fn out_of_buffers(&mut self) -> bool {
        self.queue.as_mut().is_some_and(AnyDeviceQueue::out_of_buffers)
    }

    /// Stops the ring and keeps its position.
    pub(super) fn stop(&mut self) {
        self.awaited_memory = None;
        if let Some(queue) = self.queue.take() {
            self.base = Some(queue.base());
        }
    }

    /// Ends a pass over the ring: notifies the driver of completed chains, and stops the ring if
    /// its driver has broken a rule. `memory` is the pair's.
    #[inline]
    pub(super) fn finish(
        &mut self,
        memory: &MemoryTable,
        index: usize,
        result: Result<(), DriverFault>,
        stats: &Stats,
        tally: &mut Tally,
    ) {
        if let Some(q) = &mut self.queue
            && q.should_notify()
            && let Some(call) = &self.call
        {
            call.signal();
            tally.calls += 1;
        }
        if let Err(e) = result {
            // If the memory is gone, the zeros that were read in its place are no fault of the
            // driver.
            let fault = match memory.lost() {
                0 => e,
                accesses => DriverFault::MemoryLost { accesses },
            };
            self.stop_broken(index, fault, stats);
        }
    }

    /// Stops the ring because its driver has broken a rule.
    #[cold]
    pub(super) fn stop_broken(&mut self, index: usize, e: DriverFault, stats: &Stats) {
        netmem_pool::trace::warn!(ring = index, "ring stopped: {e}");
        stats.count_queue_error(e);
        self.stop();
        self.needs_reset = true;
        if let Some(err) = &self.err {
            err.signal();
        }
    }

    /// Moves the ring to another table. If the table does not have the ring's memory, the ring
    /// waits for it.
    fn move_to(&mut self, index: usize, common: &Common) {
        let Some(queue) = self.queue.take() else { return };
        match self.map(index, &common.memory, common.features.packed()) {
            Ok(at) => self.queue = queue.moved(at),
            Err(e) => {
                self.base = Some(queue.base());
                let addr = if let DeviceError::RingAddress { addr, .. } = e { addr } else { 0 };
                self.awaited_memory = Some(addr);
            }
        }
    }

    /// Returns an error if the ring runs. For parameters that can be set only while it does not.
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

    /// `used_log` is the guest address of the used ring, if writes to it must be logged. Only that
    /// may change while the ring runs.
    pub(super) fn set_parts(
        &mut self,
        index: usize,
        parts: [u64; 3],
        splits: bool,
        used_log: Option<u64>,
        common: &Common,
    ) -> Result<(), DeviceError> {
        if self.queue.is_some() && (self.parts, self.splits) != (Some(parts), splits) {
            return Err(DeviceError::Running { what: "SET_VRING_ADDR", ring: index });
        }
        (self.parts, self.splits, self.used_log) = (Some(parts), splits, used_log);
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
        if self.queue.is_none() && self.awaited_memory.is_none() {
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
        // The device may have completed chains while there was no descriptor. An additional
        // interrupt does no harm.
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

    /// Stops the ring and returns its position. Its buffers are not touched again.
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
    /// The ring to the driver and the one from it. They precede the memory: fields are dropped in
    /// this order, and rings point into memory.
    pub(super) rings: [Ring; 2],
    pub(super) memory: Arc<MemoryTable>,
    /// The features that the driver accepted.
    pub(super) features: Negotiated,
    /// The offloads that a frame from the driver may use.
    pub(super) offloads: Offloads,
    /// The offloads that a frame to the driver may use.
    pub(super) received: Offloads,
    /// A guest that has moved to this host, and that the pair's port must announce.
    pub(super) announce: Option<[u8; 6]>,
    /// Counts the front ends that have left.
    pub(super) departures: u64,
    /// `features`, `announce` or `left` have changed since the last pass.
    pub(super) changed: bool,
    /// Whether the rings ask for notifications, because the thread that serves them went to sleep.
    pub(super) armed: bool,
}

impl Pair {
    /// Whether ring `side` is enabled. A running ring that is disabled is drained without effect.
    pub(super) fn enabled(&self, side: usize) -> bool {
        self.rings[side].enabled || !self.features.has(feature::VHOST_USER_PROTOCOL)
    }

    /// Whether a ring runs.
    pub(super) fn runs(&self) -> bool {
        self.rings.iter().any(|ring| ring.queue.is_some())
    }

    /// Whether a ring was stopped because its driver has broken a rule, since the last reset.
    pub(super) fn needs_reset(&self) -> bool {
        self.rings.iter().any(|ring| ring.needs_reset)
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
        *self = Self { departures: self.departures + 1, changed: true, ..Self::default() };
    }

    /// Resets the pair, but keeps the memory: the virtio device is reset, and its front end stays
    /// connected.
    pub(super) fn reset_device(&mut self) {
        self.rings = Default::default();
        self.set_features(Negotiated::default());
    }

    pub(super) fn set_features(&mut self, features: Negotiated) {
        (self.features, self.changed) = (features, true);
        (self.offloads, self.received) = (features.sent(), features.received());
    }

    /// Sets the log of the running rings.
    pub(super) fn set_logs(&mut self, common: &Common) {
        for ring in &mut self.rings {
            ring.set_log(common);
        }
    }

    /// Replaces the memory table by that of `common`. Running rings move to it if it has their
    /// memory; the others wait for a table that has it. Rings whose memory is in this table again
    /// start. `first` is the number of the receive ring.
    pub(super) fn set_memory(&mut self, first: usize, common: &Common) {
        let old = std::mem::replace(&mut self.memory, Arc::clone(&common.memory));
        for (side, ring) in self.rings.iter_mut().enumerate() {
            ring.move_to(first + side, common);
            // A ring that fails here waits for the next table.
            if ring.awaited_memory.is_some() && common.memory.lost() == 0 && ring.start(first + side, common).is_ok() {
                ring.awaited_memory = None;
            }
        }
        drop(old);
    }

    /// Stops rings that wait for their memory: the present table is complete and does not have it.
    pub(super) fn stop_waiting(&mut self, first: usize, stats: &Stats) {
        for (side, ring) in self.rings.iter_mut().enumerate() {
            if let Some(addr) = ring.awaited_memory {
                ring.stop_broken(first + side, DriverFault::RingUnmapped { addr }, stats);
            }
        }
    }

    /// Stops the rings if pages of the memory are gone. `first` is the number of the receive ring.
    #[cold]
    pub(super) fn stop_if_memory_is_lost(&mut self, first: usize, stats: &Stats) {
        let accesses = self.memory.lost();
        if accesses == 0 {
            return;
        }
        for (side, ring) in self.rings.iter_mut().enumerate().filter(|(_, ring)| ring.queue.is_some()) {
            ring.stop_broken(first + side, DriverFault::MemoryLost { accesses }, stats);
        }
    }
}
