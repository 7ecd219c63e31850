//! The kinds of per-CPU data: restartable sequences, or the portable version, and why.
//!
//! Why types of their own: the sequences, the pin and the decision all name them, and import
//! nothing else of each other.

use std::ffi::OsString;
use std::fmt;
use thiserror::Error;

/// How per-CPU data is reached in this process. Prints as `rseq` or `portable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Restartable sequences: plain stores.
    Rseq(Index),
    /// A lock per CPU, taken by trying once: atomic operations on a line that other CPUs rarely
    /// touch.
    Portable(Why),
}

/// The number by which sequences index per-CPU data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Index {
    /// The kernel's concurrency id of the process: no two threads that run at once have the same,
    /// and there are no more of them than threads or CPUs, so that a process on a few CPUs of many
    /// touches few areas. Linux 6.3 and later.
    MmCid,
    /// The CPU's number, on older kernels (5.10 to 6.2). A few nanoseconds slower.
    CpuId,
}

/// Why there are no restartable sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// The target is not x86-64 Linux, for which the sequences are written in assembly.
    Architecture,
    /// The C library has registered no rseq area: it is not glibc, or is older than 2.35, or a
    /// tunable turned it off, or the kernel refused.
    NotRegistered,
    /// The kernel has no `membarrier` for them (Linux 5.10 and later have), or refuses it.
    NoMembarrier,
    /// The dynamic linker refused to keep this library loaded for ever, which sequences need.
    NotPinned,
    /// The environment has `NETMEM_PERCPU=portable`.
    Forced,
    /// The environment has `NETMEM_PERCPU=portable_256`: as if the machine had 256 CPUs, and each
    /// thread one of its own. For tests.
    Forced256,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Mode::Rseq(_) => "rseq",
            Mode::Portable(_) => "portable",
        })
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Index::MmCid => "mm_cid",
            Index::CpuId => "cpu_id",
        })
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Why::Architecture => "restartable sequences are written for x86-64 on Linux only",
            Why::NotRegistered => {
                "the C library has registered no restartable sequences (glibc 2.35 or later does, unless told not to)"
            }
            Why::NoMembarrier => "the kernel offers no membarrier for restartable sequences (Linux 5.10 or later does)",
            Why::NotPinned => "the dynamic linker refused to keep the library loaded",
            Why::Forced => "NETMEM_PERCPU=portable",
            Why::Forced256 => "NETMEM_PERCPU=portable_256",
        })
    }
}

/// Why the mode is not the one that `NETMEM_PERCPU` asks for. The best mode is used then.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ForcedModeError {
    /// There is no mode of this name.
    #[error("NETMEM_PERCPU: unknown mode {value:?}; there are mm_cid, cpu_id, portable and portable_256")]
    Unknown {
        /// The variable's value.
        value: OsString,
    },
    /// The process has restartable sequences, but the kernel has no `mm_cid`.
    #[error("NETMEM_PERCPU: mm_cid is not available: the kernel has none (Linux 6.3 or later has)")]
    NoMmCid,
    /// The process has no restartable sequences.
    #[error("NETMEM_PERCPU: {asked} is not available: {why}")]
    NoSequences {
        /// The mode that was asked for.
        asked: Index,
        /// Why there are none.
        why: Why,
    },
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mode_prints_as_reports_name_it() {
        assert_eq!(format!("{:>9}|", Mode::Rseq(Index::CpuId)), "     rseq|");
        assert_eq!(Mode::Portable(Why::Architecture).to_string(), "portable");
    }
}
