//! What a variant's two sides stand on: a device, a driver, a binding.

use super::source::Flows;
use crate::bench::error::BenchError;
use netmem::device::{Connection, NetDevice, Options};
use netmem::pool::PAGE_SIZE;
use netmem::refs::Worker;
use netmem::{NetOptions, QueuePair, RxMode, VhostUser, VirtioNet};
use netmem_devmem::{Binding, BindingCount};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::error::Error;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

/// Pages of device memory: a message of each flow that is being received, full mailboxes, and what rings and caches have.
const PAGES: usize = 20480;
/// Pages of host memory, for headers that are sent.
const HEADER_PAGES: usize = 2048;

/// The file that stands in for a device's memory: one for all variants, whose contents nobody here looks at.
#[derive(Debug, Default)]
pub(super) struct Memory {
    file: OnceLock<OwnedFd>,
}

impl Memory {
    fn file(&self) -> Result<OwnedFd, BenchError> {
        if self.file.get().is_none() {
            let file = memfd_create("netmem-bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
            let file = file.map_err(unavailable)?;
            ftruncate(&file, (PAGES * PAGE_SIZE) as u64).map_err(unavailable)?;
            // Nobody else is here who could have been faster.
            let _ = self.file.set(file);
        }
        let file = self.file.get().map(OwnedFd::try_clone);
        file.ok_or(BenchError::NoPage("device memory"))?.map_err(unavailable)
    }
}

/// All that is connected. The binding goes last.
pub(super) struct Rig<C: BindingCount> {
    pub(super) pair: QueuePair,
    /// Kept: the driver's end of the connection.
    pub(super) net: VirtioNet,
    pub(super) device: NetDevice<Flows>,
    pub(super) connection: Connection,
    pub(super) binding: Binding<C>,
}

/// What this machine or its memory does not allow.
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
