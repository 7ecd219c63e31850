//! The decision which kind of per-CPU data this process has. Made once, before the first gate
//! opens.
//!
//! **A forced mode.** `NETMEM_PERCPU=mm_cid`, `cpu_id`, `portable` or `portable_256` chooses the
//! mode, so that tests run in each. If the value is unknown or the mode is not available, the best
//! mode is used, and one warning of `tracing` reports it: a library does not end its host because
//! of a variable. A test that asked for one mode and ran in another would prove nothing: tests and
//! the command therefore fail where [`forced_mode`] is an error. Unset or empty, the variable has
//! no effect. Neither has it in a program that runs with more rights than its user (set-user-ID;
//! `AT_SECURE`): there the environment is another user's, and nothing is reported. `portable_256`
//! is the portable mode of a machine with 256 CPUs: each thread has an index of its own, whichever
//! CPU it is on.

use crate::machine::{self, kernel_set};
use crate::mode::{ForcedModeError, Index, Mode, Why};
use crate::{membarrier, pin, rseq};
use std::ffi::{OsStr, OsString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// What the process finds at its start.
#[derive(Clone, Copy, Debug)]
struct Facts {
    /// Whether sequences are written for this target.
    written: bool,
    /// Whether every object with sequences stays loaded.
    pinned: bool,
    /// Offset from the thread pointer and bytes in use, as the C library reports.
    area: Option<(isize, u32)>,
    /// Bytes of it that the kernel fills.
    filled: usize,
    /// Whether the process is registered for the barrier now.
    membarrier: bool,
}

/// Bytes of the area up to the end of `mm_cid`.
const WITH_MM_CID: usize = 28;

/// Indices of a process that pretends to be on a large machine.
pub(crate) const PRETENDED: usize = 256;

impl Facts {
    /// The best mode that is available.
    fn mode(self) -> Mode {
        match self {
            Facts { written: false, .. } => Mode::Portable(Why::Architecture),
            Facts { pinned: false, .. } => Mode::Portable(Why::NotPinned),
            Facts { area: None | Some((_, 0)), .. } => Mode::Portable(Why::NotRegistered),
            Facts { membarrier: false, .. } => Mode::Portable(Why::NoMembarrier),
            // The C library reports how much of the area it knows (20 bytes, for long); it
            // registers no less than the 32 of the first layout, and the kernel fills what it knows
            // of those.
            Facts { filled: WITH_MM_CID.., .. } => Mode::Rseq(Index::MmCid),
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
pub(crate) struct Decided {
    mode: Mode,
    /// Bytes from the thread pointer, where the mode uses them.
    area: isize,
    #[cfg_attr(loom, allow(dead_code, reason = "a model has no chunks"))]
    pub(crate) areas: usize,
    /// Whether indices are those of [`Why::Forced256`].
    #[cfg_attr(loom, allow(dead_code, reason = "as above"))]
    pub(crate) pretends: bool,
    /// What the environment asked for, and whether it is so.
    forced: Result<Option<Mode>, ForcedModeError>,
}

/// By reference, and the first decision out of line: this is inlined into the portable version of
/// each operation.
#[inline]
pub(crate) fn decided() -> &'static Decided {
    static DECIDED: AtomicPtr<Decided> = AtomicPtr::new(ptr::null_mut());
    // SAFETY: never freed.
    match unsafe { DECIDED.load(Ordering::Acquire).as_ref() } {
        Some(decided) => decided,
        None => decide(&DECIDED),
    }
}

/// Decides on the mode, and enables the sequences if they are chosen. Acquires no lock, because a
/// decision takes milliseconds (the kernel's registration for the barrier): a child that is forked
/// meanwhile would wait for ever for the thread that decides. If several threads decide at once,
/// the first decision counts.
#[cold]
#[inline(never)]
fn decide(decided: &AtomicPtr<Decided>) -> &'static Decided {
    static FIRST: AtomicPtr<Decided> = AtomicPtr::new(ptr::null_mut());
    let facts = Facts {
        written: rseq::WRITTEN,
        pinned: pin::all_pinned(),
        area: machine::area(),
        filled: machine::filled(),
        membarrier: membarrier::register(),
    };
    let forced = facts.forced(&asked());
    let mode = forced.as_ref().ok().copied().flatten().unwrap_or_else(|| facts.mode());
    let area = facts.area.map_or(0, |(area, _)| area);
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

/// The value of `NETMEM_PERCPU`. Empty in a program that runs with more rights than its user, as
/// for `secure_getenv`.
fn asked() -> OsString {
    // SAFETY: reads what the kernel handed to the process at its start.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    if secure { OsString::new() } else { std::env::var_os("NETMEM_PERCPU").unwrap_or_default() }
}

/// Warns once that another mode is used than the one that was asked for. The mode is decided by
/// then: a subscriber that uses this crate finds it. A subscriber is code of the user and may
/// panic, which must not end a get or a put.
#[cold]
#[inline(never)]
fn report(error: &ForcedModeError) {
    let warned = catch_unwind(AssertUnwindSafe(|| crate::trace::warn!("{error}; the best mode is used")));
    // The payload is not dropped, because its drop may panic, too.
    warned.unwrap_or_else(std::mem::forget);
}

/// How per-CPU data is reached in this process. This is decided at the first use, and does not
/// change.
///
/// The environment variable `NETMEM_PERCPU` (`mm_cid`, `cpu_id`, `portable` or `portable_256`)
/// chooses the mode, for tests. If the value is unknown, or the mode is not available, the mode is
/// the best one, and the first use warns of that by an event of `tracing`. See [`forced_mode`].
pub fn mode() -> Mode {
    decided().mode
}

/// The mode that the environment variable `NETMEM_PERCPU` asks for, which is then the process's
/// [`mode`]. `None` if the variable is unset or empty, or if the program runs with more rights than
/// its user (set-user-ID), where the variable is ignored.
///
/// For tests and programs that must not run in another mode than the one that was asked for.
///
/// # Errors
///
/// The value is unknown, or the mode is not available. The process's mode is the best one.
pub fn forced_mode() -> Result<Option<Mode>, ForcedModeError> {
    decided().forced.clone()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: Facts = Facts { written: true, pinned: true, area: Some((0x920, 20)), filled: 28, membarrier: true };

    /// Proves REF-7: whatever is missing, there is a mode, and it has the reason.
    #[test]
    fn every_machine_has_a_mode() {
        assert_eq!(ALL.mode(), Mode::Rseq(Index::MmCid));
        assert_eq!(Facts { filled: 20, ..ALL }.mode(), Mode::Rseq(Index::CpuId));
        assert_eq!(Facts { filled: 0, ..ALL }.mode(), Mode::Rseq(Index::CpuId));
        assert_eq!(Facts { written: false, ..ALL }.mode(), Mode::Portable(Why::Architecture));
        assert_eq!(Facts { pinned: false, ..ALL }.mode(), Mode::Portable(Why::NotPinned));
        assert_eq!(Facts { area: None, ..ALL }.mode(), Mode::Portable(Why::NotRegistered));
        assert_eq!(Facts { area: Some((0x920, 0)), ..ALL }.mode(), Mode::Portable(Why::NotRegistered));
        assert_eq!(Facts { membarrier: false, ..ALL }.mode(), Mode::Portable(Why::NoMembarrier));
    }

    /// A mode that is asked for is the mode, or an error: never another one.
    #[test]
    fn a_forced_mode_is_had_or_refused() {
        let old = Facts { filled: 20, ..ALL };
        let none = Facts { area: None, ..ALL };
        let forced = |facts: Facts, value: &str| facts.forced(OsStr::new(value));
        let refused = |asked| Err(ForcedModeError::NoSequences { asked, why: Why::NotRegistered });
        for facts in [ALL, old, none] {
            assert_eq!(forced(facts, ""), Ok(None));
            assert_eq!(forced(facts, "portable"), Ok(Some(Mode::Portable(Why::Forced))));
            assert_eq!(forced(facts, "portable_256"), Ok(Some(Mode::Portable(Why::Forced256))));
            assert_eq!(forced(facts, "cpuid"), Err(ForcedModeError::Unknown { value: "cpuid".into() }));
        }
        assert_eq!(forced(ALL, "mm_cid"), Ok(Some(Mode::Rseq(Index::MmCid))));
        assert_eq!(forced(ALL, "cpu_id"), Ok(Some(Mode::Rseq(Index::CpuId))));
        assert_eq!(forced(old, "cpu_id"), Ok(Some(Mode::Rseq(Index::CpuId))));
        assert_eq!(forced(old, "mm_cid"), Err(ForcedModeError::NoMmCid));
        assert_eq!(forced(none, "mm_cid"), refused(Index::MmCid));
        assert_eq!(forced(none, "cpu_id"), refused(Index::CpuId));
    }

    /// What a shared file asserts in the other programs of tests: the tests beside this one run in
    /// the mode that was asked for.
    #[test]
    fn the_mode_is_the_one_that_was_asked_for() {
        assert!(forced_mode().is_ok_and(|forced| forced.is_none_or(|forced| forced == mode())), "{:?}", forced_mode());
    }
}
