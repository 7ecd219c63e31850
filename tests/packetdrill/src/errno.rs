//! Error numbers of calls.

/// An error number of `errno.h`.
pub(crate) type Errno = libc::c_int;
