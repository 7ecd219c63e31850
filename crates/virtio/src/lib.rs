//! virtio-net on page pools.
//!
//! * [`driver`] is the product: a virtio-net driver that receives into page pools.
//! * [`VhostUser`] is how it reaches a device: DPDK's, QEMU's, or our own.
//! * [`device`] is a virtio-net device, to receive from without any other program, and for others to use.
//! * [`net`] is what the specification says about network devices, and [`virtqueue`] about rings, for both.

pub mod device;
pub mod driver;
pub mod net;
mod notify;
mod spin;
mod vhost_user;
pub mod virtqueue;

/// What the fuzzers in `fuzz/` reach and others do not.
#[cfg(fuzzing)]
pub mod fuzz {
    pub use crate::device::fuzz::FrontEnd;
    pub use crate::vhost_user::fuzz::{reply, request};
}

pub use notify::NotifyError;
pub use spin::{BadSpin, Spin};
pub use vhost_user::{LineError, Malformed, Request, VhostUser, VhostUserError, socket};
