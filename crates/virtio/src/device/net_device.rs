//! The data side of a device, for one thread or for several.
//!
//! [`NetDevice`] serves all pairs on one thread. [`NetDevice::workers`] divides it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use netmem_packet::Armed;

use super::control::{Control, DeviceClaim};
use super::error::DeviceError;
use super::options::{MAX_PAIRS, Options};
use super::port::{Port, PortError};
use super::shared::Shared;
use super::stats::Stats;
use super::worker::{PortState, Worker};
use crate::Spin;

/// The data side of a device. One thread at a time polls it, or several threads that serve a part
/// of the queue pairs each ([`Self::workers`]).
#[derive(Debug)]
pub struct NetDevice<P> {
    /// Serves all pairs.
    pub(super) worker: Worker<P>,
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
        ports.into_iter().for_each(|port| worker.serve(port, PortState::default()));
        Ok(Self { worker })
    }

    /// Divides the data side among `count` threads: worker `i` serves the queue pairs `i`, `i +
    /// count` and so on, each with its port, and sleeps by itself. Worker 0 also serves the control
    /// queue.
    ///
    /// Only the thread of its worker uses a [`Port`]. Ports that share data must synchronise it
    /// themselves. If one worker leaves a frame for the port of another worker, that worker is
    /// woken only by its port's descriptor ([`Port::fd`]), or by the port
    /// ([`Cross`](super::port::Cross)).
    ///
    /// # Errors
    ///
    /// [`DeviceError::Workers`]: none, or more than queue pairs. [`DeviceError::Busy`] while a
    /// front end is connected. [`DeviceError::Io`]: there are too few descriptors.
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
        let Worker { shared, ports, states, .. } = self.worker;
        if !(1..=ports.len()).contains(&count) {
            return Err(DeviceError::Workers { asked: count, max: ports.len() });
        }
        let no_front_end = DeviceClaim::claim(&shared)?;
        let wakers = shared.divide(count)?;
        drop(no_front_end);
        let worker = |index| Worker::new(Arc::clone(&shared), Arc::clone(&wakers), index);
        let mut workers: Vec<_> = (0..count).map(worker).collect();
        for (pair, (port, state)) in ports.into_iter().zip(states).enumerate() {
            workers[pair % count].serve(port, state);
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

    /// The ports, one per queue pair, as [`Worker::ports`].
    pub fn ports(&mut self) -> &mut [P] {
        self.worker.ports()
    }

    /// The error of a port that does not work any more, as [`Worker::take_error`].
    pub fn take_error(&mut self) -> Option<PortError> {
        self.worker.take_error()
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

    /// Asks for the events that end a sleep, as [`Worker::arm`].
    pub fn arm(&mut self) -> Armed {
        self.worker.arm()
    }

    /// Forgets the events until now, as [`Worker::disarm`].
    pub fn disarm(&mut self) {
        self.worker.disarm();
    }

    /// The descriptors that are readable when the device may have work, as [`Worker::wait_fds`].
    #[must_use]
    pub fn wait_fds(&self) -> [BorrowedFd<'_>; 2] {
        self.worker.wait_fds()
    }
}
