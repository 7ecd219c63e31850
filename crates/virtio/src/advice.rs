//! Advice in the text of errors.
//!
//! A process without free descriptors fails in many places. Each error then has the same advice,
//! because the place is not the cause.

use rustix::io::Errno;
use std::io;

/// The advice for a failed system call. If the process has no descriptors left, only advice about
/// that helps.
pub(crate) fn advice(source: &io::Error, otherwise: &'static str) -> &'static str {
    match Errno::from_io_error(source) {
        Some(Errno::MFILE) => {
            "raise the limit of open files of this process (`ulimit -n`, or LimitNOFILE of the service)"
        }
        Some(Errno::NFILE) => "the system has no open files left (`sysctl fs.file-max`)",
        _ => otherwise,
    }
}
