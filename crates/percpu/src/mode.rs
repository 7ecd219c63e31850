//! What this process can have: restartable sequences, or the portable version. Decided once, before the first gate opens.
//!
//! The area of a thread is where the C library registered it: `__rseq_offset` bytes from the thread pointer, if
//! `__rseq_size` is not zero. glibc does so since 2.35, for each thread that it starts, or ends the process; a tunable
//! (`glibc.pthread.rseq=0`) turns it off. Its layout is the kernel's: `cpu_id` at 4, `rseq_cs` at 8, `mm_cid` at 24.

use crate::{barrier, rseq};
use std::fmt;
use std::sync::OnceLock;

/// How per-CPU data is reached in this process. Prints as `rseq` or `portable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Restartable sequences: plain stores.
    Rseq(Index),
    /// A lock per CPU, taken by trying once: atomic operations on a line that other CPUs rarely touch.
    Portable(Why),
}

/// Which number tells CPUs apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Index {
    /// The kernel's concurrency id of the process: no two threads that run at once have the same, and there are no more of
    /// them than threads or CPUs, so that a process on a few CPUs of many touches few areas. Linux 6.3 and later.
    MmCid,
    /// The CPU's number.
    CpuId,
}

/// Why there are no restartable sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// They are written in assembly, for x86-64 on Linux.
    Architecture,
    /// The C library has registered none: it is not glibc, or one before 2.35, or was told not to, or the kernel refused.
    NotRegistered,
    /// The kernel has no `membarrier` for them (Linux 5.10 and later have), or refuses it.
    NoMembarrier,
    /// `/sys/devices/system/cpu/possible` does not say how many CPUs there may be.
    CpusUnknown,
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
            Why::CpusUnknown => "/sys/devices/system/cpu/possible does not say how many CPUs there may be",
        })
    }
}

/// What there is, as the process finds it.
#[derive(Clone, Copy, Debug)]
struct Offer {
    /// Offset from the thread pointer and bytes in use, as the C library says.
    area: Option<(isize, u32)>,
    /// Bytes of it that the kernel fills.
    filled: usize,
    /// Whether the process is registered for the barrier now.
    membarrier: bool,
    cpus: Option<usize>,
}

/// Up to and with `mm_cid`.
const WITH_MM_CID: usize = 28;

/// An area beyond this takes more than its share of addresses; CPUs with higher numbers use the shared path.
pub(crate) const MAX_CPUS: usize = 4096;

impl Offer {
    fn mode(self) -> Mode {
        match self {
            Offer { area: None | Some((_, 0)), .. } => Mode::Portable(Why::NotRegistered),
            Offer { membarrier: false, .. } => Mode::Portable(Why::NoMembarrier),
            Offer { cpus: None, .. } => Mode::Portable(Why::CpusUnknown),
            // The C library says how much of the area it knows (20 bytes, for long); it registers no less than the 32 of the
            // first layout, and the kernel fills what it knows of those.
            Offer { filled: WITH_MM_CID.., .. } => Mode::Rseq(Index::MmCid),
            _ => Mode::Rseq(Index::CpuId),
        }
    }
}

/// What was decided: the mode, and how many CPUs have a place.
#[derive(Clone, Copy, Debug)]
struct Decided {
    mode: Mode,
    cpus: usize,
    #[cfg_attr(loom, allow(dead_code, reason = "a model has no chunks"))]
    areas: usize,
}

fn decided() -> Decided {
    static DECIDED: OnceLock<Decided> = OnceLock::new();
    *DECIDED.get_or_init(|| {
        let offer = offer();
        let mode = if rseq::WRITTEN { offer.mode() } else { Mode::Portable(Why::Architecture) };
        if let (Mode::Rseq(index), Some((area, _))) = (mode, offer.area) {
            rseq::start(area, index);
        }
        let cpus = offer.cpus.unwrap_or(1).clamp(1, MAX_CPUS);
        Decided { mode, cpus, areas: mask().clamp(cpus, MAX_CPUS) }
    })
}

/// How per-CPU data is reached in this process. Decided at the first use, and then it stays.
pub fn mode() -> Mode {
    decided().mode
}

/// CPUs that have a place of their own: those that the machine may ever have.
pub fn cpus() -> usize {
    decided().cpus
}

/// Areas in a chunk: as many as there are bits in the kernel's own set of CPUs, no matter what `/sys` says, so that no index
/// leads out of the chunk.
#[cfg(not(loom))]
pub(crate) fn areas() -> usize {
    decided().areas
}

fn mask() -> usize {
    let mut set = [0_u64; MAX_CPUS / 64];
    // SAFETY: a place of the size that is given; the answer is the number of bytes that the kernel's set has.
    let bytes = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&set), set.as_mut_ptr()) };
    usize::try_from(bytes).map_or(MAX_CPUS, |bytes| bytes * 8)
}

fn offer() -> Offer {
    Offer { area: area(), filled: filled(), membarrier: barrier::register(), cpus: possible() }
}

/// The C library's answer.
fn area() -> Option<(isize, u32)> {
    // SAFETY: looks names up in the libraries that are loaded; both objects, where they exist, are constants of the C
    // library with these types, written before `main`.
    unsafe {
        let find = |name: &std::ffi::CStr| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        let size = find(c"__rseq_size").cast::<u32>().as_ref()?;
        let offset = find(c"__rseq_offset").cast::<isize>().as_ref()?;
        Some((*offset, *size))
    }
}

fn filled() -> usize {
    const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;
    // SAFETY: reads what the kernel handed to the process at its start; 0 if that has no such entry.
    let filled = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) };
    usize::try_from(filled).unwrap_or(0)
}

fn possible() -> Option<usize> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse::<usize>().ok()?.checked_add(1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: Offer = Offer { area: Some((0x920, 20)), filled: 28, membarrier: true, cpus: Some(2) };

    /// Proves REF-7: whatever is missing, there is a mode, and it says why.
    #[test]
    fn every_machine_has_a_mode() {
        assert_eq!(ALL.mode(), Mode::Rseq(Index::MmCid));
        assert_eq!(Offer { filled: 20, ..ALL }.mode(), Mode::Rseq(Index::CpuId));
        assert_eq!(Offer { filled: 0, ..ALL }.mode(), Mode::Rseq(Index::CpuId));
        assert_eq!(Offer { area: None, ..ALL }.mode(), Mode::Portable(Why::NotRegistered));
        assert_eq!(Offer { area: Some((0x920, 0)), ..ALL }.mode(), Mode::Portable(Why::NotRegistered));
        assert_eq!(Offer { membarrier: false, ..ALL }.mode(), Mode::Portable(Why::NoMembarrier));
        assert_eq!(Offer { cpus: None, ..ALL }.mode(), Mode::Portable(Why::CpusUnknown));
    }

    #[test]
    fn a_mode_prints_as_reports_name_it() {
        assert_eq!(format!("{:>9}|", Mode::Rseq(Index::CpuId)), "     rseq|");
        assert_eq!(Mode::Portable(Why::Architecture).to_string(), "portable");
    }
}
