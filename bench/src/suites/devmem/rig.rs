//! What both sides of a variant use: a device, a driver, a binding.

use super::source::Flows;
use crate::error::BenchError;
use netmem::device::{Connection, NetDevice, Options};
use netmem::pool::PAGE_SIZE;
use netmem::refs::Worker;
use netmem::virtio::{NetOptions, QueuePair, RxMode, VhostUser, VirtioNet};
use netmem_devmem::{Binding, BindingCount};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::error::Error;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

/// Pages of device memory: enough for a message of each flow, for full mailboxes, rings and caches.
pub(super) const PAGES: usize = 20480;
/// Pages of host memory, for headers that are sent.
pub(super) const HEADER_PAGES: usize = 2048;

/// The file that stands in for a device's memory. All variants share it, and no code here reads its
/// contents.
#[derive(Debug, Default)]
pub(super) struct Memory {
    file: OnceLock<OwnedFd>,
}

impl Memory {
    pub(super) fn file(&self) -> Result<OwnedFd, BenchError> {
        if self.file.get().is_none() {
            let file = memfd_create("netmem-bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
            let file = file.map_err(unavailable)?;
            ftruncate(&file, (PAGES * PAGE_SIZE) as u64).map_err(unavailable)?;
            // Only this thread sets the file, so it was not set in between.
            let _ = self.file.set(file);
        }
        let file = self.file.get().map(OwnedFd::try_clone);
        file.ok_or(BenchError::NoPage("device memory"))?.map_err(unavailable)
    }
}

/// The connected parts. The binding is dropped last.
pub(super) struct Rig<C: BindingCount> {
    pub(super) pair: QueuePair,
    /// Keeps the driver's end of the connection open.
    pub(super) net: VirtioNet,
    pub(super) device: NetDevice<Flows>,
    pub(super) connection: Connection,
    pub(super) binding: Binding<C>,
}

/// The error for something that this machine or its memory does not allow.
pub(super) fn unavailable(error: impl Error + Send + Sync + 'static) -> BenchError {
    BenchError::Unavailable { what: "device memory", why: format!("{:#}", anyhow::Error::new(error)) }
}

impl<C: BindingCount> Rig<C> {
    pub(super) fn new(memory: &Memory) -> Result<Self, BenchError> {
        let worker = Arc::new(Worker::new("netmem-cleanup").map_err(unavailable)?);
        let binding = Binding::<C>::counted(memory.file()?, 0, &worker).map_err(unavailable)?;
        let device = NetDevice::new(Options::default(), |_| Flows::new()).map_err(unavailable)?;
        let (ours, theirs) = UnixStream::pair().map_err(unavailable)?;
        let connection = device.control().serve(theirs).map_err(unavailable)?;
        let options = NetOptions::new(RxMode::Small).tx_pages(HEADER_PAGES).device_memory(binding.region().clone());
        let backend = VhostUser::own_device(ours).map_err(unavailable)?;
        let (net, pairs) = VirtioNet::probe(backend, options).map_err(unavailable)?;
        let pair = pairs.into_iter().next().ok_or(BenchError::NoPage("a queue pair"))?;
        Ok(Self { pair, net, device, connection, binding })
    }
}
