//! The statuses of errors of device memory, its stack and its streams.

use crate::status::{Coded, Failure, netmem_status, socket};
use ::netmem_devmem::BindError;
use ::netmem_devmem::DeliverError;
use ::netmem_devmem::stream::{StreamError, StreamSendError};
use std::io;
use std::path::Path;

impl From<BindError> for Failure {
    fn from(error: BindError) -> Self {
        match error {
            BindError::Region(error) => error.into(),
            BindError::NoMemory(error) => error.into(),
            error => Coded::failure(netmem_status::NETMEM_ERR_ARGUMENT, error),
        }
    }
}

/// A system call for the memory of a file that failed. The kernel does not copy to and from every
/// kind of memory.
pub(super) fn copy(error: io::Error) -> Failure {
    use rustix::io::Errno;
    let refused = [Errno::INVAL, Errno::SPIPE, Errno::BADF, Errno::NXIO].map(Errno::raw_os_error);
    let status = match error.raw_os_error() {
        Some(number) if refused.contains(&number) => netmem_status::NETMEM_ERR_UNSUPPORTED,
        _ => netmem_status::NETMEM_ERR_SYSTEM,
    };
    Coded::failure(status, error)
}

/// The GPU's memory could not be allocated.
#[cfg(feature = "cuda")]
pub(super) fn gpu(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound => Coded::failure(netmem_status::NETMEM_ERR_NOT_FOUND, error),
        _ => Failure::System(error),
    }
}

/// The device could not be connected to.
pub(super) fn connect(path: &Path, error: io::Error) -> Failure {
    let status = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => netmem_status::NETMEM_ERR_NOT_FOUND,
        io::ErrorKind::PermissionDenied => netmem_status::NETMEM_ERR_PRIVILEGE,
        _ => netmem_status::NETMEM_ERR_SYSTEM,
    };
    Coded::failure(status, io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

impl From<StreamError> for Failure {
    fn from(error: StreamError) -> Self {
        use netmem_status::*;
        let status = match error {
            StreamError::Socket(error) => socket(&error),
            StreamError::Unverified { .. } => NETMEM_ERR_UNVERIFIED,
            StreamError::Token(DeliverError::Held { .. }) => NETMEM_ERR_BUSY,
            StreamError::Token(DeliverError::Exhausted { .. } | DeliverError::NoMemory { .. }) => NETMEM_ERR_NO_MEMORY,
            _ => NETMEM_ERR_SYSTEM,
        };
        Coded::failure(status, error)
    }
}

impl From<StreamSendError> for Failure {
    fn from(error: StreamSendError) -> Self {
        use netmem_status::*;
        let status = match error {
            StreamSendError::Socket(error) => socket(&error),
            StreamSendError::Unbound { .. } => NETMEM_ERR_STATE,
            StreamSendError::Range { .. } => NETMEM_ERR_RANGE,
            StreamSendError::Map(_) | StreamSendError::Here => NETMEM_ERR_UNSUPPORTED,
            _ => NETMEM_ERR_SYSTEM,
        };
        Coded::failure(status, error)
    }
}
