//! virtio-net on page pools.
//!
//! * [`driver`] is a virtio-net driver that receives into page pools.
//! * [`VhostUser`] connects the driver to a device: DPDK's, QEMU's, or Netmem's own.
//! * [`device`] is a virtio-net device, for this driver and for others (feature `device`). Its port
//!   that plays captures needs the feature `pcap`.
//! * [`guest_memory`] is the memory of a front end as the device reaches it (feature `device`).
//! * [`net`] has the specification's definitions for network devices, and [`virtqueue`] the rings,
//!   for both sides.

// Messages, rings and their checks are written once for both ends.
#![cfg_attr(not(feature = "device"), allow(dead_code, unreachable_pub, reason = "one end alone uses a part of them"))]

mod advice;
#[cfg(feature = "device")]
pub mod device;
pub mod driver;
#[cfg(feature = "device")]
pub mod guest_memory;
pub mod net;
mod notify;
mod spin;
mod vhost_user;
pub mod virtqueue;

/// Functions for the fuzzers in `fuzz/` only.
#[cfg(fuzzing)]
pub mod fuzz {
    #[cfg(feature = "device")]
    pub use crate::device::fuzz::FrontEnd;
    pub use crate::vhost_user::fuzz::{reply, request};
}

pub use notify::NotifyError;
pub use spin::{BadSpin, Spin};
pub use vhost_user::{Malformed, MessageError, Request, VhostUser, VhostUserError, socket};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
