//! The receive queues of a device, each of which can be stopped and started again with other
//! memory.
//!
//! Device memory is bound by a layer that knows no driver, and queues are restarted by a driver
//! that knows no bindings. This trait is between the two.

use netmem_pool::{Device, Provider, Region};
use std::error::Error;
use std::sync::Arc;

/// A function that removes a region from a device. See [`Queues::bind`].
pub type Unbind = Box<dyn FnOnce() + Send>;

/// The receive queues of a device: each receives into host memory or into device memory, and can be
/// restarted with the other.
///
/// This is what a table of bindings needs from a driver. A queue restart is a control operation: it
/// stops one ring, and the other queues of the device go on.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot restart its receive queues with device memory",
    note = "the receive queues of a virtio-net device are `netmem_virtio::driver::VirtioRxQueues`"
)]
pub trait Queues {
    /// Why a queue was not restarted.
    type Error: Error + 'static;

    /// How many queues there are. Their numbers begin with 0.
    fn queues(&self) -> usize;

    /// Adds a region of device memory to the device's table, if it is not there and the device
    /// accepts regions while it runs. Returns a function that removes the region. The caller calls
    /// it once, when no value refers to the region's pages any more. That may block.
    ///
    /// # Errors
    ///
    /// The region cannot be added. Nothing has changed.
    fn bind(&mut self, region: &Arc<Region<Device>>) -> Result<Option<Unbind>, Self::Error> {
        let _ = region;
        Ok(None)
    }

    /// Restarts a queue with pages of `memory`.
    ///
    /// # Errors
    ///
    /// The queue continues as before, or it has stopped. In both cases nothing is received into
    /// `memory`.
    fn attach(&mut self, queue: usize, memory: Arc<dyn Provider<Device>>) -> Result<(), Self::Error>;

    /// Restarts a queue with the host memory that it had at first.
    ///
    /// # Errors
    ///
    /// The queue continues as before, or it has stopped.
    fn detach(&mut self, queue: usize) -> Result<(), Self::Error>;
}
