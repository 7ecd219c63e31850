//! Whether a descriptor is an eventfd.
//!
//! The peer chooses the file. A system call on a file of its own (FUSE, a device) can block, so the
//! kernel is asked without running the file's own code.

use super::aio::Context;
use super::error::NotifyError;
use rustix::fs::{OFlags, fcntl_getfl};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Once;

/// Checks that a descriptor is an eventfd, which is not signalled. Its file is asked nothing: the
/// kernel compares what kind of file it is.
///
/// # Errors
///
/// [`NotifyError`]: it is not an eventfd, or there is no way to find out.
pub(crate) fn check_eventfd(fd: BorrowedFd<'_>) -> Result<(), NotifyError> {
    context_for(fd).map(drop)
}

/// The context that signals an eventfd; none if the kernel has no asynchronous I/O for this
/// process.
///
/// # Errors
///
/// As [`check_eventfd`].
pub(super) fn context_for(fd: BorrowedFd<'_>) -> Result<Option<&'static Context>, NotifyError> {
    // Whatever such a descriptor names, it cannot be used.
    if fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::PATH)) {
        return Err(NotifyError::NotEventfd);
    }
    let source = match Context::of_the_process() {
        Ok(context) => return context.check(fd).map(|()| Some(context)),
        Err(source) => source,
    };
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        netmem_pool::trace::warn!(
            "no asynchronous I/O ({source}; see the sysctl fs.aio-max-nr, and seccomp filters): a thread for each \
             eventfd signals peers instead"
        );
    });
    let failed =
        |e: rustix::io::Errno| NotifyError::Io { what: "reading the name of a descriptor in /proc", source: e.into() };
    let name = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).map_err(failed)?;
    // Names of other files begin with `/`, or with another kind.
    if name.as_bytes() == b"anon_inode:[eventfd]" { Ok(None) } else { Err(NotifyError::NotEventfd) }
}
