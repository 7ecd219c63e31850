//! Error numbers of calls, as libc has them.

/// An error number of `errno.h`.
pub type Errno = libc::c_int;
