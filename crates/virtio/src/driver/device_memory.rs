//! Device memory that is added to a device, and removed from it, while its rings run.
//!
//! A program often learns which device memory it needs after the device was probed, and a device
//! has few regions. So a region is added when a queue is bound to it, and removed when no queue
//! uses it. A queue that transmits notices a change by the number of changes.

use super::error::NetError;
use super::state::DriverState;
use super::virtio_net::VirtioNet;
use netmem_pool::{Device, PeerMemory, Region, VhostRegion};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl<M: PeerMemory> VirtioNet<M> {
    /// Adds a region of device memory to the device while it runs, so that queues can be restarted
    /// with it and frames sent from it. Does nothing if the device has it. Requires
    /// [`NetOptions::late_device_memory`](super::NetOptions::late_device_memory) at probe. Cost:
    /// one or two messages; the rings go on.
    ///
    /// # Errors
    ///
    /// [`NetError::NoDeviceMemory`], [`NetError::NoMemorySlots`], [`NetError::MemorySlots`],
    /// [`NetError::Backend`].
    pub fn add_device_memory(&self, region: &Arc<Region<Device>>) -> Result<(), NetError> {
        self.state.add_device_memory(region).map(drop)
    }

    /// Removes a region of device memory that was [added](Self::add_device_memory) while the device
    /// ran. Returns false if the device has no such region, or has it since it was probed.
    ///
    /// # Errors
    ///
    /// [`NetError::MemoryInUse`]: nothing has changed. [`NetError::Backend`]: the connection has
    /// failed, and the region is removed here.
    pub fn remove_device_memory(&self, region: &Region<Device>) -> Result<bool, NetError> {
        let Some(bus) = self.state.lock().table.iter().find(|entry| entry.is(region)).map(VhostRegion::bus) else {
            return Ok(false);
        };
        self.state.remove_device_memory(bus)
    }
}

impl<M: PeerMemory> DriverState<M> {
    /// Adds a region of device memory to the back end's table. Returns its address; `None` if the
    /// back end has the region already.
    pub(super) fn add_device_memory(&self, region: &Arc<Region<Device>>) -> Result<Option<u64>, NetError> {
        if !self.config.split {
            return Err(NetError::NoDeviceMemory);
        }
        let mut at = self.lock();
        if at.table.iter().any(|entry| entry.is(region)) {
            return Ok(None);
        }
        match at.backend.memory_slots()? {
            0 => return Err(NetError::NoMemorySlots),
            slots if at.table.len() as u64 >= slots => return Err(NetError::MemorySlots { slots }),
            _ => {}
        }
        let entry = self.added.add(region.clone());
        if let Err(refused) = at.backend.add_memory(&entry) {
            let _ = self.added.remove(entry.bus());
            return Err(refused.into());
        }
        let bus = entry.bus();
        at.table.push(entry);
        self.memory.fetch_add(1, Ordering::Release);
        Ok(Some(bus))
    }

    /// Removes the region at `bus` from the back end's table, if nothing of it is mapped. False if
    /// it was not added.
    pub(super) fn remove_device_memory(&self, bus: u64) -> Result<bool, NetError> {
        let mut at = self.lock();
        let removed = self.added.remove(bus).map_err(|mapped| NetError::MemoryInUse { mapped })?;
        let Some(place) = at.table.iter().position(|entry| removed && entry.bus() == bus) else { return Ok(false) };
        let entry = at.table.remove(place);
        // Queues stop sending from it before the back end removes it.
        self.memory.fetch_add(1, Ordering::Release);
        at.backend.remove_memory(&entry)?;
        Ok(true)
    }

    /// The addresses of device memory, and the number of their changes.
    #[cold]
    pub(super) fn device_memory(&self) -> (u32, Vec<Range<u64>>) {
        let at = self.lock();
        let ranges = at.table.iter().filter(|e| e.is_device()).map(|e| e.bus()..e.bus() + e.len() as u64);
        (self.memory.load(Ordering::Relaxed), ranges.collect())
    }
}
