//! virtio-net on page pools.
#![doc = "See the crate's modules; the driver is the product, the device its counterpart."]

pub mod device;
pub mod net;
pub mod ring;
