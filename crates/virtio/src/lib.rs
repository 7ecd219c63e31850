//! virtio-net on page pools.
//!
//! * [`driver`] is the product: a virtio-net driver that receives into page pools.
//! * [`VhostUser`] is how it reaches a device: DPDK's, QEMU's, or our own.
//! * [`device`] is a virtio-net device, to receive from without any other program, and for others to use.
//! * [`net`] is what the specification says about network devices, and [`virtqueue`] about rings, for both.

// Loom's models are of the rings; what is around them has no part in them, and does not know loom's atomics.
#[cfg(not(loom))]
pub mod device;
#[cfg(not(loom))]
pub mod driver;
pub mod net;
#[cfg(not(loom))]
mod notify;
mod spin;
#[cfg(not(loom))]
mod vhost_user;
pub mod virtqueue;

/// What the fuzzers in `fuzz/` reach and others do not.
#[cfg(fuzzing)]
pub mod fuzz {
    pub use crate::device::fuzz::FrontEnd;
    pub use crate::vhost_user::fuzz::{reply, request};
}

#[cfg(not(loom))]
pub use notify::NotifyError;
pub use spin::{BadSpin, Spin};
#[cfg(not(loom))]
pub use vhost_user::{LineError, Malformed, Request, VhostUser, VhostUserError, socket};
