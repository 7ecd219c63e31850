//! The errors of a run.

use crate::args::DeviceArg;
use netmem::device::DeviceError;
use netmem::device::port::PortError;
use netmem::pool::RegionError;
use netmem::virtio::{DeviceFault, NetError, VhostUserError};
use netmem::xdp::XskError;
use std::time::Duration;

/// The reason why a run failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PerfError {
    #[error("the embedded device's port")]
    Port(#[from] PortError),
    #[error("the embedded device")]
    Device(#[from] DeviceError),
    #[error("--device vhost-user")]
    Backend(#[source] VhostUserError),
    #[error("{0}")]
    Inherited(String),
    #[error("{variant}: the driver cannot take the device into use")]
    Driver { variant: String, source: NetError },
    #[error("--device {device}")]
    Xsk { device: DeviceArg, source: Box<XskError> },
    #[error("{variant}: the queue has stopped")]
    Stopped { variant: String, source: netmem::xdp::Fault },
    #[error("no memory for the pages")]
    Region(#[from] RegionError),
    #[error("{what}")]
    Io { what: &'static str, source: std::io::Error },
    #[error("{variant}: the device broke the rules of a ring, which is stopped")]
    Broken { variant: String, source: DeviceFault },
    #[error(
        "{variant}: the driver broke the rules of a ring, which the embedded device stopped: {}; this is a bug of netmem, please \
         report it with the command line", faults.join(", ")
    )]
    DriverBroke { variant: String, faults: Vec<&'static str> },
    #[error(
        "{variant}: the device did not confirm that its rings have stopped; {pages} pages are lost, because it may still write \
         them"
    )]
    NotStopped { variant: String, pages: u64 },
    #[error("{variant}: the backend at {device} hung up; see why it ended, and start it again")]
    BackendGone { variant: String, device: DeviceArg },
    #[error("{variant}: no packets came in {} s; {hint}", waited.as_secs())]
    Silence { variant: String, waited: Duration, hint: &'static str },
    #[error("interrupted")]
    Interrupted,
}

impl PerfError {
    /// Adds to an error of the system what failed.
    pub(super) fn io(what: &'static str) -> impl Fn(std::io::Error) -> Self + Copy {
        move |source| Self::Io { what, source }
    }
}
