//! The virtio-net device: the counterpart of the driver, in the same process or behind a vhost-user socket.
//!
//! ```text
//!   front end ── vhost-user messages ──> Control (its own thread) ─┐
//!                                                                  ├─ one mutex per pair: rings, features, memory table
//!   Port ─ frames ─> Worker::poll (the caller's threads) ──────────┘
//!        <─ frames ─        │ copies, in order, up to 256 frames a pass
//!                     the driver's memory
//! ```
//!
//! A [`NetDevice`] has one [`port::Port`] per queue pair and moves frames between them and the rings of the one front
//! end that its [`Control`] serves. One thread serves all pairs, or each [`Worker`] some of them. The driver is not
//! trusted: its words are checked on a private copy, and a ring that breaks a rule is stopped and counted
//! ([`DriverFault`], [`Stats`]) while the others go on.

mod budget;
mod config;
mod connect;
mod control;
mod ctrl;
#[cfg(test)]
mod dirty_log_tests;
mod error;
mod flow;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
mod pair;
pub mod port;
mod rarp;
mod run;
mod rx;
mod shared;
mod software;
mod split;
mod stats;
mod tx;
mod worker;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use self::connect::{ConnectError, InProcess};
use self::control::Connected;
pub use self::control::{Connection, Control};
pub use self::error::DeviceError;
use self::port::{ALL_OFFLOADS, Port, PortError};
use self::shared::Shared;
pub use self::stats::{DropReason, Stats};
use self::worker::Told;
pub use self::worker::Worker;
use crate::Spin;
use crate::guest_memory::{MemoryLimits, import};
use crate::net::feature;
use crate::virtqueue::Negotiated;
pub use crate::virtqueue::device::inflight::InflightError;
pub use crate::virtqueue::fault::DriverFault;

/// The most queue pairs of a device: vhost-user numbers rings in one byte.
pub const MAX_PAIRS: usize = 127;

/// What a device offers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queue pairs, 1 to [`MAX_PAIRS`]. Pair `i` has rings `2 i` (to the driver) and `2 i + 1` (from it).
    pub max_pairs: usize,
    /// Features ([`feature`]) that are not offered, although the port could use them.
    pub withhold: u64,
    /// The MAC address to offer.
    pub mac: Option<[u8; 6]>,
    /// The MTU to offer.
    pub mtu: Option<u16>,
    /// The speed to report, in Mbit/s, for both directions together. It limits nothing.
    pub speed: Option<u32>,
    /// Whether the device answers the control queue, ring `2 x max_pairs`. Front ends such as QEMU, DPDK and Cloud Hypervisor
    /// answer control commands themselves. For their sake the feature is offered with several pairs in any case: multiple
    /// queues need it, and Cloud Hypervisor offers its guest only what the back end offers.
    pub serve_control: bool,
    /// Whether a driver that asks for it gets frames that are split behind their headers. If not, the device fills every chain in
    /// order, as foreign devices do.
    pub split_headers: bool,
    /// Whether to refuse memory that can be shortened: files that are not sealed with `F_SEAL_SHRINK`. If such memory
    /// is accepted and shortened, the rings stop, and the process goes on if the [handler](netmem_pool::sigbus) of
    /// SIGBUS is installed.
    pub require_sealed: bool,
    /// Whether to accept memory in files of any kind. By default the device accepts files of kernel memory alone: memfds, files
    /// on tmpfs and hugetlbfs, dma-bufs, and what the [`importer`](Self::importer) imports.
    ///
    /// **Warning**: an access to another file waits for its file system. If the front end serves that file system (FUSE) and
    /// does not answer, a thread of the device waits without a limit, and with it every later front end.
    pub any_memory_file: bool,
    /// The most bytes of memory that a front end may have mapped here, and so the most that it can make this process
    /// allocate. By default, and at most, [`crate::guest_memory::MAX_BYTES`].
    pub max_memory: Option<u64>,
    /// Imports memory that cannot be mapped, such as that of a GPU: see [`import`](crate::guest_memory::import). Without an importer the device refuses files
    /// without a size. With one, it refuses them if [`require_sealed`](Self::require_sealed) is set, because they cannot be sealed.
    pub importer: Option<Arc<dyn import::Importer>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_pairs: 1,
            withhold: 0,
            mac: None,
            mtu: None,
            speed: None,
            serve_control: false,
            split_headers: true,
            require_sealed: false,
            any_memory_file: false,
            max_memory: None,
            importer: None,
        }
    }
}

impl Options {
    fn memory_limits(&self) -> MemoryLimits {
        let importer = self.importer.clone();
        let Self { require_sealed, any_memory_file, .. } = *self;
        MemoryLimits { require_sealed, any_memory_file, max_bytes: self.max_memory, importer }
    }

    fn offered(&self) -> u64 {
        let bit = |on, bit| if on { bit } else { 0 };
        let offered = feature::VERSION_1
            | feature::MRG_RXBUF
            | feature::STATUS
            | feature::LOG_ALL
            | feature::VHOST_USER_PROTOCOL
            | ALL_OFFLOADS
            | Negotiated::RING
            | bit(self.max_pairs > 1, feature::MQ)
            | bit(self.max_pairs > 1 || self.serve_control, feature::CTRL_VQ)
            | bit(self.serve_control, feature::GUEST_ANNOUNCE)
            | bit(self.mac.is_some(), feature::MAC)
            | bit(self.mtu.is_some(), feature::MTU)
            | bit(self.speed.is_some(), feature::SPEED_DUPLEX);
        feature::with_needs(offered & !self.withhold)
    }
}

/// The data side of a device. One thread at a time polls it, or several threads that serve a part of the queue pairs each
/// ([`Self::workers`]).
#[derive(Debug)]
pub struct NetDevice<P> {
    /// Serves all pairs.
    worker: Worker<P>,
}

impl<P: Port> NetDevice<P> {
    /// A device without a front end; `port` makes the port of each queue pair.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Pairs`], or an error of `port`.
    pub fn new(options: Options, port: impl FnMut(usize) -> Result<P, PortError>) -> Result<Self, DeviceError> {
        if !(1..=MAX_PAIRS).contains(&options.max_pairs) {
            return Err(DeviceError::Pairs { asked: options.max_pairs, max: MAX_PAIRS });
        }
        let ports = (0..options.max_pairs).map(port).collect::<Result<Vec<_>, _>>()?;
        let offered = options.offered();
        let shared = Arc::new(Shared::new(options, offered)?);
        let mut worker = Worker::new(Arc::clone(&shared), shared.wakers(), 0);
        ports.into_iter().for_each(|port| worker.serve(port, Told::default()));
        Ok(Self { worker })
    }

    /// Divides the data side among `count` threads: worker `i` serves the queue pairs `i`, `i + count` and so on, each with its
    /// port, and sleeps by itself. Worker 0 also serves the control queue.
    ///
    /// Only the thread of its worker uses a [`Port`]. Ports that share data must synchronise it themselves. If one
    /// worker leaves a frame for the port of another worker, that worker is woken only by its port's descriptor
    /// ([`Port::fd`]).
    ///
    /// # Errors
    ///
    /// [`DeviceError::Workers`]: none, or more than queue pairs. [`DeviceError::Busy`] while a front end is connected.
    /// [`DeviceError::Io`]: there are too few descriptors.
    ///
    /// ```no_run
    /// use netmem_virtio::device::{NetDevice, Options, port::Echo};
    /// use netmem_virtio::Spin;
    /// use std::sync::atomic::AtomicBool;
    ///
    /// let device = NetDevice::new(Options { max_pairs: 4, ..Options::default() }, |_| Ok(Echo::new()))?;
    /// let (control, stop) = (device.control(), AtomicBool::new(false));
    /// let mut workers = device.workers(2)?;
    /// std::thread::scope(|s| {
    ///     for worker in &mut workers {
    ///         s.spawn(|| worker.run(&stop, Spin::default()));
    ///     }
    ///     // Here `control` serves front ends, until `stop` is set and `control.wake()` ends the sleeps.
    /// });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn workers(self, count: usize) -> Result<Vec<Worker<P>>, DeviceError> {
        let Worker { shared, ports, told, .. } = self.worker;
        if !(1..=ports.len()).contains(&count) {
            return Err(DeviceError::Workers { asked: count, max: ports.len() });
        }
        let no_front_end = Connected::claim(&shared)?;
        let wakers = shared.divide(count)?;
        drop(no_front_end);
        let worker = |index| Worker::new(Arc::clone(&shared), Arc::clone(&wakers), index);
        let mut workers: Vec<_> = (0..count).map(worker).collect();
        for (pair, (port, told)) in ports.into_iter().zip(told).enumerate() {
            workers[pair % count].serve(port, told);
        }
        Ok(workers)
    }

    /// The control side: serves front ends.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::new(Arc::clone(&self.worker.shared))
    }

    /// The device's counters. Any thread can read them at any time, at low cost.
    #[must_use]
    pub fn stats(&self) -> Arc<Stats> {
        Arc::clone(&self.worker.shared.stats)
    }

    /// The ports, one per queue pair.
    pub fn ports(&mut self) -> &mut [P] {
        self.worker.ports()
    }

    /// One bounded pass over all rings, as [`Worker::poll`].
    pub fn poll(&mut self) -> usize {
        self.worker.poll()
    }

    /// Moves frames until `stop` is set, as [`Worker::run`].
    ///
    /// # Errors
    ///
    /// As [`Worker::run`].
    pub fn run(&mut self, stop: &AtomicBool, spin: Spin) -> Result<(), DeviceError> {
        self.worker.run(stop, spin)
    }
}
