//! The sequences of a [`CpuCache`](crate::CpuCache): a CPU's word addresses its *loaded* magazine,
//! and the loaded magazine's `next` is the number of its *previous* one, or 0. The pair is
//! therefore in one word, and one store exchanges it.
//!
//! ```text
//!   word ──► loaded ──next──► previous        `next` of the previous magazine means nothing
//! ```
//!
//! `limit` is the direction in which an operation works. An operation that takes items passes 0 and
//! is at its *edge* when a magazine is empty. An operation that puts items passes the capacity and
//! is at its edge when a magazine is full.

use super::*;
use crate::magazine::{INDEX_AT, Magazine, NEXT_AT, SHIFT};
use crate::outcome::{LARGEST_ITEM, Popped, Replaced, Swapped};
use std::num::NonZeroUsize;

/// A value in place of an item, a number or an answer: the sequence did not commit. Items are
/// addresses, and numbers have 32 bits.
const CLOSED: usize = usize::MAX;
const EDGE: usize = usize::MAX - 1;
const OTHER: usize = usize::MAX - 2;
const DONE: usize = 0;
const _: () = assert!(OTHER > LARGEST_ITEM);

/// An address from which a magazine is as many times its size away as its number says: numbers
/// start at 1.
#[inline(always)]
fn base(magazines: *const [Magazine]) -> *const Magazine {
    magazines.cast::<Magazine>().wrapping_sub(1)
}

/// Takes an item from this CPU's loaded magazine.
///
/// ```text
///   m = *word
///   if m == 0 or m.length == 0: exit edge
///   item = m.items[m.length - 1]
///   m.length -= 1                        the commit: the item is the caller's
/// ```
///
/// The item is read before the commit. If another thread of this CPU changes the magazine in
/// between, the sequence restarts.
///
/// # Safety
///
/// `gate` is a gate's word: open, it is the address of a slot whose words are null or address
/// magazines, and items are not 0.
#[inline(always)]
unsafe fn pop_at<const INDEX: i32>(area: isize, gate: &AtomicUsize) -> Result<Popped, GateClosed> {
    let item: usize;
    // SAFETY: an open gate's slot has a word for every CPU; a magazine that a word addresses is
    // this CPU's alone.
    unsafe {
        sequence!(
            gate, area, closed: "7f",
            [
                "mov {word}, qword ptr [{word} + {cpu}]",
                "test {word}, {word}",
                "jz 8f",
                "mov {cpu:e}, dword ptr [{word}]",
                "sub {cpu:e}, 1",
                "jb 8f",
                "mov {item}, qword ptr [{word} + 8 * {cpu} + {items}]",
                "mov dword ptr [{word}], {cpu:e}",
            ],
            cold: ["7:", "mov {item}, {gate_closed}", "jmp 5b", "8:", "mov {item}, {edge}", "jmp 5b"],
            items = const ITEMS_AT,
            gate_closed = const CLOSED.cast_signed(),
            edge = const EDGE.cast_signed(),
            item = out(reg) item,
            word = out(reg) _,
            cpu = out(reg) _,
        );
    }
    match item {
        CLOSED => Err(GateClosed),
        EDGE => Ok(Popped::Edge),
        // SAFETY: the caller's.
        item => Ok(Popped::Item(unsafe { NonZeroUsize::new_unchecked(item) })),
    }
}

/// Makes the previous magazine the loaded one, if the loaded one is at the edge and the previous
/// one is not.
///
/// ```text
///   m = *word
///   if m == 0: exit edge
///   if m.length != limit: exit other     another thread of this CPU was here
///   p = m.next
///   if p == 0 or p.length == limit: exit edge
///   p.next = m                           no thread reads this field while p is not loaded
///   *word = p                            the commit
/// ```
///
/// # Safety
///
/// As for [`pop_at`], and the magazines that the words address are of `magazines`.
#[inline(always)]
unsafe fn swap_at<const INDEX: i32>(
    area: isize,
    gate: &AtomicUsize,
    magazines: &[Magazine],
    limit: u32,
) -> Result<Swapped, GateClosed> {
    let answer: usize;
    // SAFETY: as for `pop_at`.
    unsafe {
        sequence!(
            gate, area, closed: "7f",
            [
                "mov {loaded}, qword ptr [{word} + {cpu}]",
                "test {loaded}, {loaded}",
                "jz 8f",
                "cmp dword ptr [{loaded}], {limit:e}",
                "jne 9f",
                "mov {answer:e}, dword ptr [{loaded} + {next}]",
                "test {answer:e}, {answer:e}",
                "jz 8f",
                "shl {answer}, {magazine}",
                "add {answer}, {base}",
                "cmp dword ptr [{answer}], {limit:e}",
                "je 8f",
                "mov {loaded:e}, dword ptr [{loaded} + {number}]",
                "mov dword ptr [{answer} + {next}], {loaded:e}",
                "add {word}, {cpu}",
                "mov {loaded}, {answer}",
                "xor {answer:e}, {answer:e}",
                "mov qword ptr [{word}], {loaded}",
            ],
            cold: [
                "7:", "mov {answer}, {gate_closed}", "jmp 5b",
                "8:", "mov {answer}, {edge}", "jmp 5b",
                "9:", "mov {answer}, {other}", "jmp 5b"
            ],
            base = in(reg) base(magazines),
            limit = in(reg) limit,
            magazine = const SHIFT,
            next = const NEXT_AT,
            number = const INDEX_AT,
            gate_closed = const CLOSED.cast_signed(),
            edge = const EDGE.cast_signed(),
            other = const OTHER.cast_signed(),
            loaded = out(reg) _,
            answer = out(reg) answer,
            word = out(reg) _,
            cpu = out(reg) _,
        );
    }
    match answer {
        CLOSED => Err(GateClosed),
        EDGE => Ok(Swapped::Edge),
        DONE => Ok(Swapped::Done),
        _ => Ok(Swapped::NotNeeded),
    }
}

/// Loads the magazine `new`, if both of this CPU's are at the edge. The loaded one becomes the
/// previous one, and the previous one, if there was one, is the caller's.
///
/// ```text
///   m = *word, old = 0
///   if m == 0: new.next = 0
///   else:
///     if m.length != limit: exit other
///     old = m.next
///     if old != 0 and old.length != limit: exit other
///     new.next = m                       new is the caller's until the commit
///   *word = new                          the commit
/// ```
///
/// # Safety
///
/// As for [`swap_at`]; `new` is one of `magazines`, and the caller's. The magazines live
/// until the commit. By pointer: a reference would have to be good until the return, and another
/// thread may free the cache after the commit.
#[inline(always)]
unsafe fn replace_at<const INDEX: i32>(
    area: isize,
    gate: &AtomicUsize,
    magazines: *const [Magazine],
    limit: u32,
    new: *const Magazine,
) -> Result<Replaced, GateClosed> {
    let old: usize;
    // SAFETY: as for `pop_at`.
    unsafe {
        sequence!(
            gate, area, closed: "7f",
            [
                "mov {loaded}, qword ptr [{word} + {cpu}]",
                "xor {old:e}, {old:e}",
                "test {loaded}, {loaded}",
                "jz 8f",
                "cmp dword ptr [{loaded}], {limit:e}",
                "jne 9f",
                "mov {old:e}, dword ptr [{loaded} + {next}]",
                "mov {loaded:e}, dword ptr [{loaded} + {number}]",
                "test {old:e}, {old:e}",
                "jz 8f",
                "mov {previous}, {old}",
                "shl {previous}, {magazine}",
                "cmp dword ptr [{base} + {previous}], {limit:e}",
                "jne 9f",
                "8:",
                "mov dword ptr [{new} + {next}], {loaded:e}",
                "mov qword ptr [{word} + {cpu}], {new}",
            ],
            cold: ["7:", "mov {old}, {gate_closed}", "jmp 5b", "9:", "mov {old}, {other}", "jmp 5b"],
            base = in(reg) base(magazines),
            limit = in(reg) limit,
            new = in(reg) new,
            magazine = const SHIFT,
            next = const NEXT_AT,
            number = const INDEX_AT,
            gate_closed = const CLOSED.cast_signed(),
            other = const OTHER.cast_signed(),
            loaded = out(reg) _,
            previous = out(reg) _,
            old = out(reg) old,
            word = out(reg) _,
            cpu = out(reg) _,
        );
    }
    match old {
        CLOSED => Err(GateClosed),
        OTHER => Ok(Replaced::NotNeeded),
        old => Ok(Replaced::Old(old as u32)),
    }
}

/// The three, for a process that distinguishes CPUs by `$index`. The caller's promises are those
/// above.
macro_rules! operations {
    ($area:ident, $index:ident) => {
        #[inline(always)]
        pub(crate) unsafe fn pop(gate: &AtomicUsize) -> Result<Popped, GateClosed> {
            // SAFETY: the caller's.
            unsafe { pop_at::<$index>(some($area())?, gate) }
        }

        #[inline(always)]
        pub(crate) unsafe fn swap(
            gate: &AtomicUsize,
            magazines: &[Magazine],
            limit: u32,
        ) -> Result<Swapped, GateClosed> {
            // SAFETY: the caller's.
            unsafe { swap_at::<$index>(some($area())?, gate, magazines, limit) }
        }

        #[inline(always)]
        pub(crate) unsafe fn replace(
            gate: &AtomicUsize,
            magazines: *const [Magazine],
            limit: u32,
            new: *const Magazine,
        ) -> Result<Replaced, GateClosed> {
            // SAFETY: the caller's.
            unsafe { replace_at::<$index>(some($area())?, gate, magazines, limit, new) }
        }
    };
}

operations!(by_mm_cid, MM_CID);

/// The version for older kernels.
pub(crate) mod cpu_id {
    use super::*;

    operations!(by_cpu_id, CPU_ID);
}

#[cfg(test)]
mod tests {
    use super::super::tests::on_one_cpu;
    use super::*;
    use crate::gate::Gate;

    /// Every answer of the sequences, with the index that older kernels have.
    #[test]
    fn by_cpu_id() {
        on_one_cpu(round);
    }

    /// Returns false if the thread was moved.
    fn round(area: isize, gate: &Gate) -> bool {
        let magazines: Vec<_> = (1..=3).map(|index| Magazine::new(1, index)).collect();
        let push = |item: usize| {
            // SAFETY: an open gate, of which nothing else uses the words, and magazines that
            // outlive their use.
            unsafe { super::super::push_at::<CPU_ID>(area, gate.word(), item) }.unwrap()
        };
        // SAFETY: as above.
        let pop = || unsafe { pop_at::<CPU_ID>(area, gate.word()) }.unwrap();
        // SAFETY: as above.
        let swap = |limit| unsafe { swap_at::<CPU_ID>(area, gate.word(), &magazines, limit) }.unwrap();
        let replace = |limit, n: usize| {
            // SAFETY: as above.
            unsafe { replace_at::<CPU_ID>(area, gate.word(), &raw const *magazines, limit, &magazines[n]) }.unwrap()
        };
        let item = |n| Popped::Item(NonZeroUsize::new(n).unwrap());
        let steps = [
            pop() == Popped::Edge && swap(0) == Swapped::Edge && push(7) == Pushed::Missing,
            replace(1, 0) == Replaced::Old(0) && swap(1) == Swapped::NotNeeded,
            push(7) == Pushed::Done && push(8) == Pushed::Full && swap(1) == Swapped::Edge,
            // The second magazine is empty, the first becomes the previous one.
            replace(1, 1) == Replaced::Old(0) && replace(1, 2) == Replaced::NotNeeded,
            pop() == Popped::Edge && swap(0) == Swapped::Done && pop() == item(7),
            swap(0) == Swapped::Edge && replace(1, 2) == Replaced::NotNeeded,
            replace(0, 2) == Replaced::Old(2) && pop() == Popped::Edge,
        ];
        let quiet = gate.close().unwrap().unwrap();
        quiet.words().for_each(crate::word::clear);
        // SAFETY: as above.
        assert_eq!(unsafe { pop_at::<CPU_ID>(area, gate.word()) }, Err(GateClosed));
        quiet.reopen();
        steps == [true; 7]
    }
}
