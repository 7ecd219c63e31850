//! A driver of a device in the same process.
//!
//! Why by messages, as for a foreign device: one transport means that a test or a measurement in one
//! process runs the code that serves other processes.

use super::control::{Connection, Control};
use super::error::DeviceError;
use crate::driver::{NetError, NetOptions, QueuePair, VirtioNet};
use crate::vhost_user::{VhostUser, VhostUserError};
use netmem_pool::TrustedPeer;
use std::os::unix::net::UnixStream;

/// A driver that is connected to a device of this process. Made by [`Control::connect`].
#[derive(Debug)]
pub struct InProcess {
    /// The queue pairs.
    pub pairs: Vec<QueuePair<TrustedPeer>>,
    /// The driver's handle of the device.
    pub net: VirtioNet<TrustedPeer>,
    /// The device's side. Dropping it hangs up, so it is dropped last.
    pub connection: Connection,
}

/// Why [`Control::connect`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The device has another front end, or cannot serve one.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The driver cannot use the device.
    #[error(transparent)]
    Driver(#[from] NetError),
    /// The system has no pair of sockets.
    #[error("cannot make a pair of sockets")]
    Sockets(#[source] std::io::Error),
}

impl From<VhostUserError> for ConnectError {
    fn from(error: VhostUserError) -> Self {
        Self::Driver(error.into())
    }
}

impl Control {
    /// Connects a driver to the device. Both are in this process, and the file of the driver's
    /// memory goes to the device alone. So received packets are `Packet<TrustedPeer>`, whose
    /// fragments are slices and turn into `Bytes` without a copy.
    ///
    /// A thread of the [connection](InProcess::connection) answers the driver's messages. If the
    /// device serves a control queue ([`Options::serve_control`](super::Options::serve_control))
    /// and there are several queue pairs, another thread must also run the device.
    ///
    /// ```
    /// use netmem_packet::{Packet, Poll, RxQueue};
    /// use netmem_pool::TrustedPeer;
    /// use netmem_virtio::device::{NetDevice, Options, port::Gen};
    /// use netmem_virtio::driver::{NetOptions, RxMode};
    ///
    /// let mut device = NetDevice::new(Options::default(), |_| Gen::new(60, Some(3)))?;
    /// let mut driver = device.control().connect(NetOptions::new(RxMode::Small))?;
    /// device.poll(); // as a rule on a thread of its own
    /// driver.pairs[0].rx.poll(|poll| {
    ///     poll.receive(64, &mut |packet: Packet<TrustedPeer>| assert_eq!(packet.head()[12..14], [8, 0]))
    /// });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ConnectError`]; nothing is left behind. [`NetError::InProcessMemory`] if the options have
    /// memory of the user.
    pub fn connect(&self, options: NetOptions) -> Result<InProcess, ConnectError> {
        let options = options.in_process()?;
        let (front, back) = UnixStream::pair().map_err(ConnectError::Sockets)?;
        let connection = self.serve(back)?;
        // SAFETY: the other end of the pair is served by this device, in this process.
        let backend = unsafe { VhostUser::in_process(front) }?;
        let (net, pairs) = VirtioNet::probe(backend, options)?;
        Ok(InProcess { pairs, net, connection })
    }
}
