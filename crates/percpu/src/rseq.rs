//! The restartable sequences: all the assembly there is.
//!
//! A sequence is a few instructions that the kernel lets run to their end on one CPU, or not at
//! all. Its last instruction is one store, the *commit*. No other thread may read what it stored
//! before that. Before it starts, a thread writes the address of the sequence's descriptor (start,
//! length, abort handler) into its rseq area. When the kernel preempts the thread, delivers a
//! signal to it, or restarts it for a membarrier, and finds it between start and commit, it sends
//! it to the abort handler instead of back. A thread that is past the commit is left alone; the
//! descriptor stays where it is, and the kernel clears the address when it next checks the area.
//!
//! ```text
//!   2:  area.rseq_cs = &descriptor
//!   4:  slot = *gate                     start. Everything is loaded from here on: what was loaded earlier can
//!       if slot & 1: exit closed         belong to another thread by the time of the commit
//!       cpu = area.index
//!       if cpu >= MAX_CPUS: exit closed  unsigned: -1 where this thread has no area registered
//!       word = slot + cpu * STRIDE       this CPU's word of the slot
//!       ...
//!       store                            the commit: the last instruction
//!   5:                                   post-commit
//!
//!   6:  aborts += 1; goto 2              the abort handler, behind its signature, away from the straight line
//! ```
//!
//! Exits before the commit are jumps out of the range: nothing has happened. Each function below
//! shows what stands at `...`. They are inlined, each copy with a descriptor of its own, in which
//! labels start at 2 because an assembler reads `0b` and `1b` as binary numbers.
//!
//! **Cost.** [`add`] is thirteen instructions, two of them stores: the descriptor and the commit.
//! It loads four words: where the area is, gate, index, and what it adds to. On a core that starts
//! three memory operations a cycle and commits one store, get and put together take four cycles;
//! there is no lock prefix among them.
//!
//! **Ordering.** x86-64 keeps loads in order, stores in order, and stores behind earlier loads, and
//! the assembly is a barrier for the compiler: a commit is a release of what the thread did before,
//! and the load of the gate an acquire of what was done before it was opened.
//!
//! **A library that contains these stays loaded**: the kernel reads the last descriptor of a thread
//! long after the sequence. The assembly of each sequence makes sure of it: see
//! [`pin`](crate::pin).

#![allow(
    named_asm_labels,
    reason = "the constructor has a name, so that the assembler and the linker keep one of many"
)]

use crate::error::GateClosed;
use crate::machine::MAX_CPUS;
use crate::magazine::{CAPACITY_AT, ITEMS_AT};
use crate::mode::Index;
use crate::outcome::Pushed;
use crate::pin::{self, by_cpu_id, by_mm_cid, constructor};
use crate::sync::AtomicUsize;
use crate::word::{CLOSED_BIT, STRIDE_SHIFT};
use std::arch::asm;
use std::sync::atomic::{AtomicU64, Ordering};

/// There are sequences for this target.
pub(crate) const WRITTEN: bool = true;

/// The offset of the index in the area.
const MM_CID: i32 = 24;
const CPU_ID: i32 = 4;

/// How often abort handlers ran, in all threads.
static ABORTS: AtomicU64 = AtomicU64::new(0);

/// Each thread has its area `area` bytes from its thread pointer.
pub(crate) fn start(area: isize, index: Index) {
    pin::start(area, index);
}

pub(crate) fn aborts() -> u64 {
    ABORTS.load(Ordering::Relaxed)
}

/// Inlined always: each sequence begins with it, and a program that depends on this crate would
/// call it for each.
#[inline(always)]
fn some(area: isize) -> Result<isize, GateClosed> {
    if area == 0 { Err(GateClosed) } else { Ok(area) }
}

/// One sequence: from the descriptor to this CPU's word in `{word}`, then the body, whose last
/// instruction is the commit. `closed` is where it goes if the gate is closed or this thread has no
/// CPU number; `cold` is code away from the line.
macro_rules! sequence {
    ($gate:expr, $area:expr, closed: $closed:literal, [$($body:literal),* $(,)?], cold: [$($cold:literal),*], $($operands:tt)*) => {
        asm!(
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "3:",
            ".long 0, 0",                       // version, flags
            ".quad 4f, 5f - 4f, 6f",            // start, offset of the post-commit, abort handler
            ".popsection",
            constructor!(),
            "2:",
            "lea {word}, [rip + 3b]",
            "mov qword ptr fs:[{area} + 8], {word}",
            "4:",
            "mov {word}, qword ptr [{gate}]",
            "test {word:l}, {closed_bit}",
            concat!("jnz ", $closed),
            "mov {cpu:e}, dword ptr fs:[{area} + {index}]",
            "cmp {cpu:e}, {cpus}",
            concat!("jae ", $closed),
            "shl {cpu}, {shift}",
            $($body,)*
            "5:",
            ".pushsection __rseq_failure, \"ax\"",
            ".byte 0x0f, 0xb9, 0x3d",           // the signature as the operand of an undefined instruction
            ".long 0x53053053",
            "6:",
            "mov {word}, qword ptr [rip + {aborts}@GOTPCREL]",
            "lock inc qword ptr [{word}]",
            "jmp 2b",
            $($cold,)*
            ".popsection",
            gate = in(reg) $gate.as_ptr(),
            area = in(reg) $area,
            index = const INDEX,
            closed_bit = const CLOSED_BIT,
            cpus = const MAX_CPUS,
            shift = const STRIDE_SHIFT,
            aborts = sym ABORTS,
            pin = sym pin::pin,
            $($operands)*
            options(nostack),
        )
    };
}

/// Adds `n` to this CPU's word.
///
/// ```text
///   *word += n                           the commit
/// ```
///
/// # Safety
///
/// `gate` is a gate's word: open, it is the address of a slot of this process's arena.
#[inline(always)]
unsafe fn add_at<const INDEX: i32>(area: isize, gate: &AtomicUsize, n: isize) -> Result<(), GateClosed> {
    // SAFETY: an open gate's slot has a word for every CPU; only sequences of this CPU write it
    // until the gate has closed.
    unsafe {
        sequence!(
            gate, area, closed: "{closed}",
            ["add qword ptr [{word} + {cpu}], {n}"],
            cold: [],
            n = in(reg) n,
            word = out(reg) _,
            cpu = out(reg) _,
            closed = label { return Err(GateClosed) },
        );
    }
    Ok(())
}

/// Puts `item` on this CPU's magazine.
///
/// ```text
///   m = *word                            a magazine: length, capacity, items
///   if m == 0: exit missing
///   if m.length >= m.capacity: exit full
///   m.items[m.length] = item             beyond the length: no thread reads there
///   m.length += 1                        the commit
/// ```
///
/// # Safety
///
/// As for [`add_at`]; the slot's words are null or address magazines.
#[inline(always)]
unsafe fn push_at<const INDEX: i32>(area: isize, gate: &AtomicUsize, item: usize) -> Result<Pushed, GateClosed> {
    // SAFETY: as for `add`; a magazine that a word addresses is this CPU's alone.
    unsafe {
        sequence!(
            gate, area, closed: "{closed}",
            [
                "mov {word}, qword ptr [{word} + {cpu}]",
                "test {word}, {word}",
                "jz {missing}",
                "mov {cpu:e}, dword ptr [{word}]",
                "cmp {cpu:e}, dword ptr [{word} + {capacity}]",
                "jae {full}",
                "mov qword ptr [{word} + 8 * {cpu} + {items}], {item}",
                "inc {cpu:e}",
                "mov dword ptr [{word}], {cpu:e}",
            ],
            cold: [],
            item = in(reg) item,
            capacity = const CAPACITY_AT,
            items = const ITEMS_AT,
            word = out(reg) _,
            cpu = out(reg) _,
            closed = label { return Err(GateClosed) },
            missing = label { return Ok(Pushed::Missing) },
            full = label { return Ok(Pushed::Full) },
        );
    }
    Ok(Pushed::Done)
}

/// The two, for a process that tells CPUs apart by `$index`. The caller's promises are those
/// above.
macro_rules! operations {
    ($area:ident, $index:ident) => {
        #[inline(always)]
        pub(crate) unsafe fn add(gate: &AtomicUsize, n: isize) -> Result<(), GateClosed> {
            // SAFETY: the caller's.
            unsafe { add_at::<$index>(some($area())?, gate, n) }
        }

        #[inline(always)]
        pub(crate) unsafe fn push(gate: &AtomicUsize, item: usize) -> Result<Pushed, GateClosed> {
            // SAFETY: the caller's.
            unsafe { push_at::<$index>(some($area())?, gate, item) }
        }
    };
}

pub(crate) mod lane;
pub(crate) mod pair;

operations!(by_mm_cid, MM_CID);

/// The version for older kernels.
pub(crate) mod cpu_id {
    use super::*;

    operations!(by_cpu_id, CPU_ID);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::mode;
    use crate::gate::Gate;
    use crate::mode::Mode;

    /// Repeats `round` until it has run on one CPU. It returns false if the thread was moved to
    /// another CPU, which has no magazine.
    pub(super) fn on_one_cpu(round: impl Fn(isize, &Gate) -> bool) {
        let gate = Gate::new().unwrap();
        let Ok(area) = some(pin::by_mm_cid()).or(some(pin::by_cpu_id())) else {
            assert!(matches!(mode(), Mode::Portable(_)));
            return;
        };
        assert!((0..100).any(|_| round(area, &gate)), "the thread was moved in each of 100 rounds");
    }

    /// The same sequences with the index of older kernels, the CPU's number.
    #[test]
    fn by_cpu_id() {
        let mut gate = Gate::new().unwrap();
        let area = some(pin::by_mm_cid()).or(some(pin::by_cpu_id()));
        let Ok(area) = area else {
            assert!(matches!(mode(), Mode::Portable(_)));
            return;
        };
        // SAFETY: an open gate, of which nothing else uses the words.
        unsafe {
            assert_eq!(add_at::<CPU_ID>(area, gate.word(), 5), Ok(()));
            assert_eq!(gate.words_mut().map(|word| word.swap(0, Ordering::Relaxed)).sum::<usize>(), 5);
            assert_eq!(push_at::<CPU_ID>(area, gate.word(), 7), Ok(Pushed::Missing));
        }
    }
}
