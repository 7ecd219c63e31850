//! Which kind of per-CPU data this process has: restartable sequences, or the portable version. Decided once, before the first gate
//! opens.
//!
//! The area of a thread is where the C library registered it: `__rseq_offset` bytes from the thread pointer, if
//! `__rseq_size` is not zero. glibc does so since 2.35, for each thread that it starts, or ends the process; a tunable
//! (`glibc.pthread.rseq=0`) turns it off. Its layout is the kernel's: `cpu_id` at 4, `rseq_cs` at 8, `mm_cid` at 24.
//!
//! **Two numbers of CPUs.** [`areas`] bounds every index that a sequence can see; chunks, sums and locks all use it. It
//! comes from the kernel, for memory safety depends on it. [`cpus`] is how many indices may come. Sizes use it; nothing else
//! depends on it. Neither the affinity of today's threads bounds them, for a thread may start later or be moved, nor the CPU time that
//! a cgroup gives: any number of threads may run at once until it is used up.
//!
//! **A forced mode.** `NETMEM_PERCPU=mm_cid`, `cpu_id`, `portable` or `portable_256` chooses the mode, so that tests run in each. If the value is
//! unknown or the mode is not available, the best mode is used, and one warning of `tracing` says so: a library does not end its
//! host because of a variable. A test that asked for one mode and ran in another would prove nothing: tests and the command
//! therefore fail where [`forced_mode`] is an error. Unset or empty, the variable has no effect. Neither has it in a program that
//! runs with more rights than its user (set-user-ID; `AT_SECURE`): there the environment is another user's, and nothing is reported.
//! `portable_256` is the portable mode of a machine with 256 CPUs: each thread has an index of its own, whichever CPU it is on.

use crate::{barrier, pin, rseq};
#[cfg(not(loom))]
use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
#[cfg(not(loom))]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::{AtomicPtr, Ordering};
use thiserror::Error;

/// How per-CPU data is reached in this process. Prints as `rseq` or `portable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Restartable sequences: plain stores.
    Rseq(Index),
    /// A lock per CPU, taken by trying once: atomic operations on a line that other CPUs rarely touch.
    Portable(Why),
}

/// The number by which sequences index per-CPU data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Index {
    /// The kernel's concurrency id of the process: no two threads that run at once have the same, and there are no more of
    /// them than threads or CPUs, so that a process on a few CPUs of many touches few areas. Linux 6.3 and later.
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
    /// The C library has registered no rseq area: it is not glibc, or is older than 2.35, or a tunable turned it off,
    /// or the kernel refused.
    NotRegistered,
    /// The kernel has no `membarrier` for them (Linux 5.10 and later have), or refuses it.
    NoMembarrier,
    /// The dynamic linker refused to keep this library loaded for ever, which sequences need.
    NotPinned,
    /// The environment says `NETMEM_PERCPU=portable`.
    Forced,
    /// The environment says `NETMEM_PERCPU=portable_256`: as if the machine had 256 CPUs, and each thread one of its own. For tests.
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

/// What the process finds at its start.
#[derive(Clone, Copy, Debug)]
struct Offer {
    /// Whether sequences are written for this target.
    written: bool,
    /// Whether every object with sequences stays loaded.
    pinned: bool,
    /// Offset from the thread pointer and bytes in use, as the C library says.
    area: Option<(isize, u32)>,
    /// Bytes of it that the kernel fills.
    filled: usize,
    /// Whether the process is registered for the barrier now.
    membarrier: bool,
}

/// Bytes of the area up to the end of `mm_cid`.
const WITH_MM_CID: usize = 28;

/// Indices of a process that pretends to be on a large machine.
const PRETENDED: usize = 256;

/// No index beyond this is used: CPUs with higher numbers use the shared path.
pub(crate) const MAX_CPUS: usize = 4096;

impl Offer {
    /// The best mode that is available.
    fn mode(self) -> Mode {
        match self {
            Offer { written: false, .. } => Mode::Portable(Why::Architecture),
            Offer { pinned: false, .. } => Mode::Portable(Why::NotPinned),
            Offer { area: None | Some((_, 0)), .. } => Mode::Portable(Why::NotRegistered),
            Offer { membarrier: false, .. } => Mode::Portable(Why::NoMembarrier),
            // The C library says how much of the area it knows (20 bytes, for long); it registers no less than the 32 of the
            // first layout, and the kernel fills what it knows of those.
            Offer { filled: WITH_MM_CID.., .. } => Mode::Rseq(Index::MmCid),
            _ => Mode::Rseq(Index::CpuId),
        }
    }

    /// The mode that `NETMEM_PERCPU` asks for. `None` if it asks for none.
    fn forced(self, value: &OsStr) -> Result<Option<Mode>, ForcedModeError> {
        let best = self.mode();
        let asked = match value.to_str() {
            Some("") => return Ok(None),
            Some("portable") => return Ok(Some(Mode::Portable(Why::Forced))),
            Some("portable_256") => return Ok(Some(Mode::Portable(Why::Forced256))),
            Some("mm_cid") => Index::MmCid,
            Some("cpu_id") => Index::CpuId,
            _ => return Err(ForcedModeError::Unknown { value: value.to_owned() }),
        };
        match (asked, best) {
            (asked, Mode::Portable(why)) => Err(ForcedModeError::NoSequences { asked, why }),
            (Index::MmCid, Mode::Rseq(Index::CpuId)) => Err(ForcedModeError::NoMmCid),
            (asked, Mode::Rseq(_)) => Ok(Some(Mode::Rseq(asked))),
        }
    }
}

/// The decision: the mode, the place of areas, and how many CPUs have a place.
#[derive(Debug)]
struct Decided {
    mode: Mode,
    /// Bytes from the thread pointer, where the mode uses them.
    area: isize,
    #[cfg_attr(loom, allow(dead_code, reason = "a model has no chunks"))]
    areas: usize,
    /// Whether indices are those of [`Why::Forced256`].
    #[cfg_attr(loom, allow(dead_code, reason = "as above"))]
    pretends: bool,
    /// What the environment asked for, and whether it is so.
    forced: Result<Option<Mode>, ForcedModeError>,
}

/// By reference, and the first decision out of line: this is inlined into the portable version of each operation.
#[inline]
fn decided() -> &'static Decided {
    static DECIDED: AtomicPtr<Decided> = AtomicPtr::new(ptr::null_mut());
    // SAFETY: never freed.
    match unsafe { DECIDED.load(Ordering::Acquire).as_ref() } {
        Some(decided) => decided,
        None => decide(&DECIDED),
    }
}

/// Decides on the mode, and enables the sequences if they are chosen. Takes no lock, because a decision takes
/// milliseconds (the kernel's registration for the barrier): a child that is forked meanwhile would wait for ever for
/// the thread that decides. If several threads decide at once, the first decision counts.
#[cold]
#[inline(never)]
fn decide(decided: &AtomicPtr<Decided>) -> &'static Decided {
    static FIRST: AtomicPtr<Decided> = AtomicPtr::new(ptr::null_mut());
    let offer = Offer {
        written: rseq::WRITTEN,
        pinned: pin::all_pinned(),
        area: area(),
        filled: filled(),
        membarrier: barrier::register(),
    };
    let forced = offer.forced(&asked());
    let mode = forced.as_ref().ok().copied().flatten().unwrap_or_else(|| offer.mode());
    let area = offer.area.map_or(0, |(area, _)| area);
    let pretends = mode == Mode::Portable(Why::Forced256);
    let areas = if pretends { kernel_set().max(PRETENDED) } else { kernel_set() };
    let mine = Box::into_raw(Box::new(Decided { mode, area, areas, pretends, forced }));
    let first = FIRST.compare_exchange(ptr::null_mut(), mine, Ordering::AcqRel, Ordering::Acquire);
    let (at, is_first) = match first {
        Ok(_) => (mine, true),
        Err(first) => {
            // SAFETY: made above, and no other thread has it.
            drop(unsafe { Box::from_raw(mine) });
            (first, false)
        }
    };
    // SAFETY: not null, and never freed.
    let first = unsafe { &*at };
    if let Mode::Rseq(index) = first.mode {
        rseq::start(first.area, index);
    }
    decided.store(at, Ordering::Release);
    if let (true, Err(error)) = (is_first, &first.forced) {
        report(error);
    }
    first
}

/// The value of `NETMEM_PERCPU`. Empty in a program that runs with more rights than its user, as for `secure_getenv`.
fn asked() -> OsString {
    // SAFETY: reads what the kernel handed to the process at its start.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    if secure { OsString::new() } else { std::env::var_os("NETMEM_PERCPU").unwrap_or_default() }
}

/// Warns once that another mode is used than the one that was asked for. The mode is decided by then: a subscriber that uses this
/// crate finds it. A subscriber is code of the user and may panic, which must not end a get or a put.
#[cold]
#[inline(never)]
fn report(error: &ForcedModeError) {
    let warned = catch_unwind(AssertUnwindSafe(|| tracing::warn!("{error}; the best mode is used")));
    // The payload is not dropped, because its drop may panic, too.
    warned.unwrap_or_else(std::mem::forget);
}

/// How per-CPU data is reached in this process. This is decided at the first use, and does not change.
///
/// The environment variable `NETMEM_PERCPU` (`mm_cid`, `cpu_id`, `portable` or `portable_256`) chooses the mode, for tests. If the value is
/// unknown, or the mode is not available, the mode is the best one, and the first use warns of that by an event of `tracing`. See
/// [`forced_mode`].
pub fn mode() -> Mode {
    decided().mode
}

/// The mode that the environment variable `NETMEM_PERCPU` asks for, which is then the process's [`mode`]. `None` if the variable is
/// unset or empty, or if the program runs with more rights than its user (set-user-ID), where the variable is ignored.
///
/// For tests and programs that must not run in another mode than the one that was asked for.
///
/// # Errors
///
/// The value is unknown, or the mode is not available. The process's mode is the best one.
pub fn forced_mode() -> Result<Option<Mode>, ForcedModeError> {
    decided().forced.clone()
}

/// How many indices this process's threads may have, at any time: the CPUs that the machine can have, those included that are not
/// online. At least 1.
///
/// For sizes. With [`Index::MmCid`] a process with few threads uses few of them, but more threads may start. With [`Index::CpuId`] the
/// index is the CPU's number, and can be larger. Reads a file.
pub fn cpus() -> usize {
    if decided().pretends {
        return PRETENDED;
    }
    let listed = std::fs::read_to_string("/sys/devices/system/cpu/possible");
    listed.ok().and_then(|list| possible(&list)).unwrap_or_else(kernel_set).clamp(1, MAX_CPUS)
}

/// How many CPUs are in a list such as `0-3,8`.
fn possible(list: &str) -> Option<usize> {
    list.trim().split(',').try_fold(0_usize, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let count = last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?;
        sum.checked_add(count)?.checked_add(1)
    })
}

/// The index of this thread in the portable version. It may be out of date at once.
#[cfg(not(loom))]
#[inline]
pub(crate) fn this_cpu() -> usize {
    let decided = decided();
    if decided.pretends {
        return pretended();
    }
    // SAFETY: takes nothing; -1 where the kernel cannot say.
    let cpu = usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0);
    if cpu < decided.areas { cpu } else { 0 }
}

/// An index for each thread, far from that of the thread before.
#[cfg(not(loom))]
#[cold]
#[inline(never)]
fn pretended() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        /// Number of the thread and 1, or 0.
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(THREADS.fetch_add(1, Ordering::Relaxed) + 1);
        }
        number.get().wrapping_mul(37) % PRETENDED
    })
}

/// A set of CPUs, a bit for each.
type CpuSet = [u64; MAX_CPUS / 64];

/// Asks the kernel for this thread's set of CPUs. Returns false if the kernel's own set is larger.
fn ask(set: &mut [u64]) -> bool {
    // SAFETY: a place of the size that is given; the kernel writes no more than that.
    unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(set), set.as_mut_ptr()) >= 0 }
}

/// Areas in a chunk, words in a sum, locks: one for every index that there can be. An index is below the number of bits in the
/// kernel's own set of CPUs.
#[cfg(not(loom))]
pub(crate) fn areas() -> usize {
    decided().areas
}

/// Bits in the kernel's own set of CPUs, up to the next multiple of 64: a smaller set is refused.
fn kernel_set() -> usize {
    let mut set: CpuSet = [0; _];
    let words = (1..=set.len()).find(|&words| ask(&mut set[..words]));
    words.map_or(MAX_CPUS, |words| words * 64)
}

/// The C library's answer.
#[cfg(not(all(target_feature = "crt-static", target_env = "gnu", target_arch = "x86_64")))]
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

/// The C library's answer in a static program. That has no names to look up, but the linker knows whether they exist. A dynamic
/// program does not ask this way: it would not start with an older C library than it was built with.
#[cfg(all(target_feature = "crt-static", target_env = "gnu", target_arch = "x86_64"))]
fn area() -> Option<(isize, u32)> {
    let (offset, size): (*const isize, *const u32);
    // SAFETY: loads two addresses, null for a weak name that no object defines; the types are as above.
    unsafe {
        std::arch::asm!(
            ".weak __rseq_offset",
            ".weak __rseq_size",
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(nostack, preserves_flags, pure, readonly),
        );
        Some((*offset.as_ref()?, *size.as_ref()?))
    }
}

fn filled() -> usize {
    const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;
    // SAFETY: reads what the kernel handed to the process at its start; 0 if that has no such entry.
    let filled = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) };
    usize::try_from(filled).unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: Offer = Offer { written: true, pinned: true, area: Some((0x920, 20)), filled: 28, membarrier: true };

    /// Proves REF-7: whatever is missing, there is a mode, and it says why.
    #[test]
    fn every_machine_has_a_mode() {
        assert_eq!(ALL.mode(), Mode::Rseq(Index::MmCid));
        assert_eq!(Offer { filled: 20, ..ALL }.mode(), Mode::Rseq(Index::CpuId));
        assert_eq!(Offer { filled: 0, ..ALL }.mode(), Mode::Rseq(Index::CpuId));
        assert_eq!(Offer { written: false, ..ALL }.mode(), Mode::Portable(Why::Architecture));
        assert_eq!(Offer { pinned: false, ..ALL }.mode(), Mode::Portable(Why::NotPinned));
        assert_eq!(Offer { area: None, ..ALL }.mode(), Mode::Portable(Why::NotRegistered));
        assert_eq!(Offer { area: Some((0x920, 0)), ..ALL }.mode(), Mode::Portable(Why::NotRegistered));
        assert_eq!(Offer { membarrier: false, ..ALL }.mode(), Mode::Portable(Why::NoMembarrier));
    }

    /// A mode that is asked for is the mode, or an error: never another one.
    #[test]
    fn a_forced_mode_is_had_or_refused() {
        let old = Offer { filled: 20, ..ALL };
        let none = Offer { area: None, ..ALL };
        let forced = |offer: Offer, value: &str| offer.forced(OsStr::new(value));
        let refused = |asked| Err(ForcedModeError::NoSequences { asked, why: Why::NotRegistered });
        for offer in [ALL, old, none] {
            assert_eq!(forced(offer, ""), Ok(None));
            assert_eq!(forced(offer, "portable"), Ok(Some(Mode::Portable(Why::Forced))));
            assert_eq!(forced(offer, "portable_256"), Ok(Some(Mode::Portable(Why::Forced256))));
            assert_eq!(forced(offer, "cpuid"), Err(ForcedModeError::Unknown { value: "cpuid".into() }));
        }
        assert_eq!(forced(ALL, "mm_cid"), Ok(Some(Mode::Rseq(Index::MmCid))));
        assert_eq!(forced(ALL, "cpu_id"), Ok(Some(Mode::Rseq(Index::CpuId))));
        assert_eq!(forced(old, "cpu_id"), Ok(Some(Mode::Rseq(Index::CpuId))));
        assert_eq!(forced(old, "mm_cid"), Err(ForcedModeError::NoMmCid));
        assert_eq!(forced(none, "mm_cid"), refused(Index::MmCid));
        assert_eq!(forced(none, "cpu_id"), refused(Index::CpuId));
    }

    /// What a shared file asserts in the other programs of tests: the tests beside this one run in the mode that was asked for.
    #[test]
    fn the_mode_is_the_one_that_was_asked_for() {
        assert!(forced_mode().is_ok_and(|forced| forced.is_none_or(|forced| forced == mode())), "{:?}", forced_mode());
    }

    /// Every CPU that the machine can have counts, and nothing else is a list.
    #[test]
    fn possible_cpus_are_counted() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-255", 256), ("0-3,8,10-11", 7)] {
            assert_eq!(possible(list), Some(count), "{list}");
        }
        for list in ["", "\n", "x", "3-1", "0-", "0,", "0-18446744073709551615", "-1"] {
            assert_eq!(possible(list), None, "{list}");
        }
    }

    /// Each CPU that this thread may use has an area.
    #[test]
    fn every_cpu_has_an_area() {
        let mut set: CpuSet = [0; _];
        ask(&mut set);
        let last = set.iter().rposition(|bits| *bits != 0);
        assert!(last.is_some_and(|at| (at + 1) * 64 <= areas()));
    }

    #[test]
    fn a_mode_prints_as_reports_name_it() {
        assert_eq!(format!("{:>9}|", Mode::Rseq(Index::CpuId)), "     rseq|");
        assert_eq!(Mode::Portable(Why::Architecture).to_string(), "portable");
    }
}
