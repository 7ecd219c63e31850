//! Forks of the process, counted: a child does not have its parent's mappings, and must not unmap
//! what is at their addresses.
//!
//! Why not process ids: a child in a PID namespace of its own may have its parent's.

use std::io;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks lie between the process that first kept a range from its children and this one. A
/// process id would not do: a child in a PID namespace of its own may have its parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Counts forks from its first use on. The value is 0, or an error number of the system.
static COUNT_FORKS: LazyLock<libc::c_int> = LazyLock::new(|| {
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: `in_child` may be called in the child of a process with threads: it is one atomic
    // addition.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
});

/// How many forks lie between this process and the one that counted first. One load; safe in signal
/// handlers.
pub(crate) fn so_far() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Counts forks from now on, and returns how many there were so far.
///
/// # Errors
///
/// The system's answer.
pub(crate) fn count_from_now() -> io::Result<u32> {
    match *COUNT_FORKS {
        0 => Ok(so_far()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
