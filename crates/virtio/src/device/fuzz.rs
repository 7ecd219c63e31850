//! A front end's session for `fuzz/`: without a socket, and on the thread that polls.

use super::NetDevice;
use super::port::Port;
use super::session::Session;
use super::shared::Shared;
use crate::vhost_user::fuzz::message;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A front end that is connected to a device. Dropping it ends the connection.
#[derive(Debug)]
pub struct FrontEnd {
    session: Session,
    shared: Arc<Shared>,
}

impl FrontEnd {
    /// Connects to `device`.
    pub fn new<P: Port>(device: &NetDevice<P>) -> Self {
        let shared = Arc::clone(&device.worker.shared);
        Self { session: Session::new(Arc::clone(&shared)), shared }
    }

    /// Sends a message. Returns whether the device has carried it out.
    pub fn send(&mut self, request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> bool {
        let Some(message) = message(request, payload, fds) else { return false };
        let asked = message.request();
        match self.session.handle(message) {
            Ok(reply) => {
                // The answer must be one that can be encoded.
                reply.inspect(|reply| drop(reply.encode(asked)));
                true
            }
            Err(_) => false,
        }
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.shared.reset();
    }
}
