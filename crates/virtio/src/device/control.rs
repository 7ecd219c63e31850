//! The control side: serves one front end at a time, on the caller's thread or on one of its own.
//!
//! A [`Session`] carries out the messages of a front end. Whatever ends the connection, the device
//! is then reset, and none of the front end's memory stays mapped.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use super::DeviceError;
use super::session::Session;
use super::shared::Shared;
use crate::guest_memory::MemoryUse;
use crate::net::feature;
use crate::vhost_user::message_socket::MessageSocket;

/// The time limit for a front end to send one message, from its first byte on, and to read an
/// answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// The control side of a device. Clones serve the same device.
#[derive(Clone, Debug)]
pub struct Control {
    shared: Arc<Shared>,
}

impl Control {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// The features ([`crate::net::feature`]) that the device offers.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.shared.offered
    }

    /// Serves the front end at the other end of `stream` on this thread, until the connection ends.
    /// Afterwards all rings are stopped and none of its memory is mapped, whatever the cause of the
    /// end.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Busy`], or the error that the front end has made. It is no error if a front
    /// end hangs up between two messages.
    pub fn handle(&self, stream: UnixStream) -> Result<(), DeviceError> {
        DeviceClaim::claim(&self.shared)?.serve(stream)
    }

    /// The same on a thread of its own. The device is claimed before this returns; on an error
    /// `stream` is closed, so that its front end sees the refusal at once.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Busy`] while another front end is served; [`DeviceError::Io`] if there is no
    /// thread or descriptor. The device continues in both cases. [`Connection::wait`] returns the
    /// errors of the connection.
    pub fn serve(&self, stream: UnixStream) -> Result<Connection, DeviceError> {
        let io = |what| move |source| DeviceError::Io { what, source };
        let connected = DeviceClaim::claim(&self.shared)?;
        let hangup = stream.try_clone().map_err(io("duplicating the connection"))?;
        let body = move || connected.serve(stream);
        let thread =
            std::thread::Builder::new().name("netmem-vhost".into()).spawn(body).map_err(io("starting a thread"))?;
        Ok(Connection { hangup, thread: Some(thread) })
    }

    /// The sizes of the front end's memory. Waits until the current message is handled. Costs a
    /// system call for each file.
    #[must_use]
    pub fn memory_use(&self) -> MemoryUse {
        self.shared.memory().usage()
    }

    /// Changes the link status that drivers read; it is up at first. It does not stop frames.
    pub fn set_link(&self, up: bool) {
        self.shared.config.set_link(up);
    }

    /// Asks the driver to announce itself to the network, until the driver acknowledges it. Only a
    /// driver whose control queue the device [serves](super::Options::serve_control) is asked. For
    /// others a front end sends `SEND_RARP`.
    pub fn ask_to_announce(&self) {
        if self.offered() & feature::GUEST_ANNOUNCE != 0 {
            self.shared.config.ask_to_announce();
        }
    }

    /// Ends the sleep of every thread in [`super::Worker::run`], so that it reads its `stop` flag.
    pub fn wake(&self) {
        self.shared.wake();
    }
}

/// Holds the device for one front end.
#[derive(Debug)]
pub(super) struct DeviceClaim {
    shared: Arc<Shared>,
}

impl DeviceClaim {
    pub(super) fn claim(shared: &Arc<Shared>) -> Result<Self, DeviceError> {
        match shared.connected.swap(true, Ordering::Acquire) {
            true => Err(DeviceError::Busy),
            false => {
                // The ports drop frames that arrived while there was no front end.
                shared.reset();
                Ok(Self { shared: Arc::clone(shared) })
            }
        }
    }

    fn serve(self, stream: UnixStream) -> Result<(), DeviceError> {
        let socket = MessageSocket::new(stream, PATIENCE);
        let result = Session::new(Arc::clone(&self.shared)).run(&socket);
        if let Err(e) = &result {
            let message = std::error::Error::source(e).map_or_else(String::new, |source| format!(": {source}"));
            netmem_pool::trace::warn!("front end dropped: {e}{message}");
            self.shared.stats.connection_errors.fetch_add(1, Ordering::Relaxed);
        }
        // The device is released before the connection is closed, so that a front end which sees
        // the end can connect again at once.
        drop(self);
        socket.shutdown();
        result
    }
}

impl Drop for DeviceClaim {
    fn drop(&mut self) {
        self.shared.reset();
        self.shared.connected.store(false, Ordering::Release);
    }
}

/// A front end that is being served. Dropping it hangs up.
#[derive(Debug)]
#[must_use = "a connection ends when it is dropped"]
pub struct Connection {
    hangup: UnixStream,
    thread: Option<JoinHandle<Result<(), DeviceError>>>,
}

impl Connection {
    /// Whether the front end is gone, and the device free for the next.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the front end goes.
    ///
    /// # Errors
    ///
    /// As [`Control::handle`].
    pub fn wait(mut self) -> Result<(), DeviceError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), DeviceError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.hangup.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
