//! The sequences of a [`Depot`](crate::Depot) beside the push: a CPU's word addresses its magazine,
//! and the magazine's `next` is its position. The theory is at the head of `lane.rs`.

use super::*;
use crate::lane::{Lanes, NEXT_LAP, PLACES, Position};
use crate::magazine::{INDEX_AT, Magazine, NEXT_AT, SHIFT};
use crate::outcome::{Exchanged, Rotated};

/// Values in place of a position or an address: the sequence did not commit. A position has 32
/// bits, and a magazine's address is a multiple of 128.
const CLOSED: usize = usize::MAX;
const MISSING: usize = usize::MAX - 1;
const OTHER: usize = usize::MAX - 2;
const UNPUBLISHED: usize = usize::MAX - 3;
const NO_EMPTY: usize = usize::MAX - 4;

/// Loads the empty magazine of the next position in the place of this CPU's full one, and puts
/// that, unpublished, on the full ring.
///
/// ```text
///   m = *word
///   if m == 0: exit missing
///   if m.length != m.capacity: exit other
///   s = m.position
///   if full[s].position != s: exit unpublished
///   s = the next position
///   e = empty[s]
///   if e.position != s: exit no empty
///   full[s].number = m.number            its position is the last lap's: the taker does not read it
///   e.position = s                           e is no other thread's, while empty[s] is this CPU's next
///   *word = e                            the commit
/// ```
///
/// # Safety
///
/// As for `push_at`. The words that are not null address magazines of `magazines` with positions of
/// `lanes`, which are as old.
#[inline(always)]
unsafe fn rotate_at<const INDEX: i32>(
    area: isize,
    gate: &AtomicUsize,
    lanes: &Lanes,
    magazines: &[Magazine],
) -> Result<Rotated, GateClosed> {
    let answer: usize;
    // SAFETY: as for `push_at`; a position's place is in both rings.
    unsafe {
        sequence!(
            gate, area, closed: "7f",
            [
                "add {word}, {cpu}",
                "mov {loaded}, qword ptr [{word}]",
                "test {loaded}, {loaded}",
                "jz 8f",
                "mov {at:e}, dword ptr [{loaded} + {capacity}]",
                "cmp dword ptr [{loaded}], {at:e}",
                "jne 9f",
                "mov {answer:e}, dword ptr [{loaded} + {position}]",
                "movzx {at:e}, {answer:x}",
                "cmp dword ptr [{full} + 8 * {at}], {answer:e}",
                "jne 20f",
                "inc {answer:e}",
                "test {answer:e}, {last_place}",
                "jnz 22f",
                "add {answer:e}, {next_lap}",
                "22:",
                "movzx {at:e}, {answer:x}",
                "mov {new}, qword ptr [{empty} + 8 * {at}]",
                "cmp {new:e}, {answer:e}",
                "jne 21f",
                "shr {new}, 32",
                "shl {new}, {magazine}",
                "add {new}, {base}",
                "mov {loaded:e}, dword ptr [{loaded} + {number}]",
                "mov dword ptr [{full} + 8 * {at} + 4], {loaded:e}",
                "mov dword ptr [{new} + {position}], {answer:e}",
                "mov qword ptr [{word}], {new}",
            ],
            cold: [
                "7:", "mov {answer}, {gate_closed}", "jmp 5b",
                "8:", "mov {answer}, {missing}", "jmp 5b",
                "9:", "mov {answer}, {other}", "jmp 5b",
                "20:", "mov {answer}, {unpublished}", "jmp 5b",
                "21:", "mov {answer}, {no_empty}", "jmp 5b"
            ],
            full = in(reg) lanes.full.places(),
            empty = in(reg) lanes.empty.places(),
            // Numbers start at 1.
            base = in(reg) magazines.as_ptr().wrapping_sub(1),
            capacity = const CAPACITY_AT,
            position = const NEXT_AT,
            number = const INDEX_AT,
            magazine = const SHIFT,
            last_place = const PLACES - 1,
            next_lap = const NEXT_LAP,
            gate_closed = const CLOSED.cast_signed(),
            missing = const MISSING.cast_signed(),
            other = const OTHER.cast_signed(),
            unpublished = const UNPUBLISHED.cast_signed(),
            no_empty = const NO_EMPTY.cast_signed(),
            answer = out(reg) answer,
            loaded = out(reg) _,
            at = out(reg) _,
            new = out(reg) _,
            word = out(reg) _,
            cpu = out(reg) _,
        );
    }
    match answer {
        CLOSED => Err(GateClosed),
        MISSING => Ok(Rotated::Missing),
        OTHER => Ok(Rotated::NotNeeded),
        UNPUBLISHED => Ok(Rotated::Unpublished),
        NO_EMPTY => Ok(Rotated::NoEmpty),
        position => Ok(Rotated::Done(Position(position as u32))),
    }
}

/// Lets the taker see the full magazine that this CPU has replaced, if it does not yet.
///
/// ```text
///   m = *word
///   if m == 0: exit
///   s = m.position
///   if full[s].position == s: exit
///   full[s].position = s                     the commit
/// ```
///
/// # Safety
///
/// As for [`rotate_at`].
#[inline(always)]
unsafe fn publish_at<const INDEX: i32>(area: isize, gate: &AtomicUsize, lanes: &Lanes) -> Result<(), GateClosed> {
    // SAFETY: as for `rotate_at`.
    unsafe {
        sequence!(
            gate, area, closed: "{closed}",
            [
                "mov {word}, qword ptr [{word} + {cpu}]",
                "test {word}, {word}",
                "jz {done}",
                "mov {word:e}, dword ptr [{word} + {position}]",
                "movzx {cpu:e}, {word:x}",
                "cmp dword ptr [{full} + 8 * {cpu}], {word:e}",
                "je {done}",
                "mov dword ptr [{full} + 8 * {cpu}], {word:e}",
            ],
            cold: [],
            full = in(reg) lanes.full.places(),
            position = const NEXT_AT,
            word = out(reg) _,
            cpu = out(reg) _,
            closed = label { return Err(GateClosed) },
            done = label { return Ok(()) },
        );
    }
    Ok(())
}

/// Puts the magazine `new` in the place of this CPU's, if that is full and no other is unpublished.
/// It gets the same position. If `new` is null, the CPU has no magazine afterwards.
///
/// ```text
///   m = *word
///   if m == 0 or m.length != m.capacity: exit other
///   s = m.position
///   if full[s].position != s: exit other
///   if new != 0: new.position = s            new is the caller's until the commit
///   *word = new                          the commit; m is the caller's
/// ```
///
/// # Safety
///
/// As for [`rotate_at`]; `new` is a magazine and the caller's, or null. By pointer: another thread
/// may free the depot after the commit.
#[inline(always)]
unsafe fn exchange_at<const INDEX: i32>(
    area: isize,
    gate: &AtomicUsize,
    lanes: *const Lanes,
    new: *const Magazine,
) -> Result<Exchanged, GateClosed> {
    let old: usize;
    // SAFETY: as for `rotate_at`.
    unsafe {
        sequence!(
            gate, area, closed: "7f",
            [
                "mov {old}, qword ptr [{word} + {cpu}]",
                "test {old}, {old}",
                "jz 9f",
                "mov {at:e}, dword ptr [{old} + {capacity}]",
                "cmp dword ptr [{old}], {at:e}",
                "jne 9f",
                "mov {positions:e}, dword ptr [{old} + {position}]",
                "movzx {at:e}, {positions:x}",
                "cmp dword ptr [{full} + 8 * {at}], {positions:e}",
                "jne 9f",
                "test {new}, {new}",
                "jz 8f",
                "mov dword ptr [{new} + {position}], {positions:e}",
                "8:",
                "mov qword ptr [{word} + {cpu}], {new}",
            ],
            cold: ["7:", "mov {old}, {gate_closed}", "jmp 5b", "9:", "mov {old}, {other}", "jmp 5b"],
            full = in(reg) (*lanes).full.places(),
            new = in(reg) new,
            capacity = const CAPACITY_AT,
            position = const NEXT_AT,
            gate_closed = const CLOSED.cast_signed(),
            other = const OTHER.cast_signed(),
            old = out(reg) old,
            positions = out(reg) _,
            at = out(reg) _,
            word = out(reg) _,
            cpu = out(reg) _,
        );
    }
    match old {
        CLOSED => Err(GateClosed),
        OTHER => Ok(Exchanged::NotNeeded),
        old => Ok(Exchanged::Old(old)),
    }
}

/// Loads the first magazine of a CPU that has none. Returns false if it has one.
///
/// ```text
///   if *word != 0: exit
///   *word = new                          the commit
/// ```
///
/// # Safety
///
/// As for [`exchange_at`]; `new` is not null, and its position is of a lane that the caller has.
#[inline(always)]
unsafe fn place_at<const INDEX: i32>(
    area: isize,
    gate: &AtomicUsize,
    new: *const Magazine,
) -> Result<bool, GateClosed> {
    // SAFETY: as for `rotate_at`.
    unsafe {
        sequence!(
            gate, area, closed: "{closed}",
            [
                "cmp qword ptr [{word} + {cpu}], 0",
                "jne {loaded}",
                "mov qword ptr [{word} + {cpu}], {new}",
            ],
            cold: [],
            new = in(reg) new,
            word = out(reg) _,
            cpu = out(reg) _,
            closed = label { return Err(GateClosed) },
            loaded = label { return Ok(false) },
        );
    }
    Ok(true)
}

/// The four, for a process that tells CPUs apart by `$index`. The caller's promises are those
/// above.
macro_rules! operations {
    ($area:ident, $index:ident) => {
        #[inline(always)]
        pub(crate) unsafe fn rotate(
            gate: &AtomicUsize,
            lanes: &Lanes,
            magazines: &[Magazine],
        ) -> Result<Rotated, GateClosed> {
            // SAFETY: the caller's.
            unsafe { rotate_at::<$index>(some($area())?, gate, lanes, magazines) }
        }

        #[inline(always)]
        pub(crate) unsafe fn publish(gate: &AtomicUsize, lanes: &Lanes) -> Result<(), GateClosed> {
            // SAFETY: the caller's.
            unsafe { publish_at::<$index>(some($area())?, gate, lanes) }
        }

        #[inline(always)]
        pub(crate) unsafe fn exchange(
            gate: &AtomicUsize,
            lanes: *const Lanes,
            new: *const Magazine,
        ) -> Result<Exchanged, GateClosed> {
            // SAFETY: the caller's.
            unsafe { exchange_at::<$index>(some($area())?, gate, lanes, new) }
        }

        #[inline(always)]
        pub(crate) unsafe fn place(gate: &AtomicUsize, new: *const Magazine) -> Result<bool, GateClosed> {
            // SAFETY: the caller's.
            unsafe { place_at::<$index>(some($area())?, gate, new) }
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
        let magazines: Vec<_> = (1..=20).map(|index| Magazine::new(1, index)).collect();
        let lanes = Lanes::new(1);
        let push = |item: usize| {
            // SAFETY: an open gate, of which nothing else uses the words, and magazines and lanes
            // that outlive their use.
            unsafe { super::super::push_at::<CPU_ID>(area, gate.word(), item) }.unwrap()
        };
        // SAFETY: as above.
        let rotate = || unsafe { rotate_at::<CPU_ID>(area, gate.word(), &lanes, &magazines) }.unwrap();
        // SAFETY: as above.
        let publish = || unsafe { publish_at::<CPU_ID>(area, gate.word(), &lanes) }.unwrap();
        // SAFETY: as above.
        let exchange = |new: *const Magazine| unsafe { exchange_at::<CPU_ID>(area, gate.word(), &lanes, new) }.unwrap();
        // SAFETY: as above.
        let place = |new: &Magazine| unsafe { place_at::<CPU_ID>(area, gate.word(), new) }.unwrap();
        let old = |magazine: &Magazine| Exchanged::Old(magazine.address());
        let last = lanes.take().unwrap();
        magazines[0].set_position(last);
        let mut position = last.next();
        let mut steps = vec![
            rotate() == Rotated::Missing && exchange(&magazines[1]) == Exchanged::NotNeeded,
            place(&magazines[0]) && !place(&magazines[1]) && rotate() == Rotated::NotNeeded,
            push(7) == Pushed::Done && push(8) == Pushed::Full && rotate() == Rotated::NoEmpty,
            exchange(&magazines[1]) == old(&magazines[0]) && magazines[1].position() == last,
            push(8) == Pushed::Done,
        ];
        // Once round, and further.
        for at in 1..=18 {
            lanes.empty.put(position, magazines[at + 1].index);
            steps.extend([
                rotate() == Rotated::Done(position) && lanes.full.get(position).is_none(),
                push(9) == Pushed::Done && rotate() == Rotated::Unpublished,
                exchange(&magazines[0]) == Exchanged::NotNeeded,
            ]);
            publish();
            publish();
            steps.push(lanes.full.get(position) == Some(magazines[at].index));
            position = position.next();
        }
        steps.push(rotate() == Rotated::NoEmpty && exchange(std::ptr::null()) == old(&magazines[19]));
        publish();
        steps.push(rotate() == Rotated::Missing);
        let quiet = gate.close().unwrap().unwrap();
        quiet.words().for_each(crate::word::clear);
        // SAFETY: as above.
        assert_eq!(unsafe { publish_at::<CPU_ID>(area, gate.word(), &lanes) }, Err(GateClosed));
        quiet.reopen();
        steps.into_iter().all(|step| step)
    }
}
