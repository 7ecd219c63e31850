//! virtio-net on page pools.
//!
//! * [`driver`] is the product: a virtio-net driver that receives into page pools.
//! * [`VhostUser`] is how it reaches a device: DPDK's, QEMU's, or our own.
//! * [`device`] is a virtio-net device, to receive from without any other program, and for others to use.
//! * [`net`] and [`ring`] are what the specification says, for both.

pub mod device;
pub mod driver;
pub mod net;
mod notify;
pub mod ring;
mod vhost_user;

/// What the fuzzers in `fuzz/` reach and others do not.
#[cfg(fuzzing)]
pub mod fuzz {
    pub use crate::device::fuzz::FrontEnd;
    pub use crate::vhost_user::fuzz::{reply, request};
}

pub use notify::NotifyError;
pub use vhost_user::{LineError, Malformed, Request, VhostUser, VhostUserError, socket};
