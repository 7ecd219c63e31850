//! Error numbers of calls, as libc has them.

/// An error number of `errno.h`.
pub(crate) type Errno = libc::c_int;
