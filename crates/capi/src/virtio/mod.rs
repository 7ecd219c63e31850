//! virtio-net: the driver, which is a front end of vhost-user, and the device, a back end.

pub mod device;
pub mod device_options;
mod front_ends;
pub mod net;
mod port;
pub mod rx;
pub mod tx;
