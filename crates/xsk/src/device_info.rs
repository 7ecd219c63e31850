//! The properties of the device behind a queue that are needed to open the queue.

use crate::error::XskError;
use crate::ethtool;
use crate::quirks::{Quirk, quirks};
use crate::sys;
use std::os::fd::BorrowedFd;

/// The known properties of an interface's device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceInfo {
    /// The interface's name, or `None` if only its index is known.
    pub(crate) name: Option<String>,
    /// The driver's name, or `None` if it is unknown.
    pub(crate) driver: Option<String>,
    /// Entries of its receive ring, or 0 if the number is unknown.
    pub(crate) ring: u32,
    /// The numbers of its receive and transmit queues in use, or `None` if they are unknown.
    pub(crate) queues: Option<(u32, u32)>,
}

impl DeviceInfo {
    /// Reads the properties from the driver of an interface in the network namespace of this
    /// thread.
    pub(crate) fn of(name: String) -> Self {
        Self {
            driver: ethtool::driver(&name).ok(),
            ring: ethtool::rings(&name).map_or(0, |(rx, _)| rx),
            queues: ethtool::queues(&name),
            name: Some(name),
        }
    }

    /// The device of the interface `ifindex`, for a socket that was made elsewhere, or for a new
    /// socket.
    ///
    /// A socket can be of another network namespace than this thread. There `ifindex` is another
    /// interface, or none, and the driver's properties cannot be read.
    pub(crate) fn find(ifindex: u32, socket: Option<BorrowedFd<'_>>) -> Result<Self, XskError> {
        if socket.is_some_and(|socket| !sys::is_of_this_namespace(socket)) {
            return Ok(Self::default());
        }
        let missing = || XskError::NoInterface { interface: format!("number {ifindex}") };
        ethtool::name(ifindex).map(Self::of).ok_or_else(missing)
    }

    /// The known quirks of its driver with the running kernel.
    pub(crate) fn quirks(&self) -> Vec<&'static Quirk> {
        self.driver.as_ref().map_or(Vec::new(), |driver| quirks(driver, sys::kernel()).collect())
    }

    /// The number of chunks that the kernel is to have: the requested number, but at least the size
    /// of the device's ring and a quarter more.
    pub(crate) fn level(&self, asked: u32) -> u32 {
        asked.max(self.ring.saturating_add(self.ring / 4)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves XSK-1: the fill level is above the size of the device's ring, for any requested
    /// level.
    #[test]
    fn the_fill_level_is_above_the_ring() {
        let level = |ring, asked| DeviceInfo { ring, ..DeviceInfo::default() }.level(asked);
        assert_eq!((level(0, 1024), level(0, 0)), (1024, 1));
        assert_eq!((level(256, 1024), level(256, 1), level(4096, 1024)), (1024, 320, 5120));
        assert_eq!(level(u32::MAX, 1), u32::MAX);
    }
}
