//! Tests of the depot that use its fields.

use super::*;
use crate::mode::Why;
use crate::word::word;

/// What threads on a CPU of that index do: the index gets a magazine with these items.
fn load(depot: &Depot, index: usize, items: std::ops::Range<usize>) -> bool {
    let Some((position, magazine)) = depot.lanes.take().and_then(|position| Some((position, depot.pop_empty()?)))
    else {
        depot.crowd();
        return false;
    };
    magazine.set_position(position);
    items.for_each(|item| assert!(magazine.push(item)));
    let slot = depot.intake.gate.word().load(Ordering::Relaxed);
    // SAFETY: the depot's slot, which is open, and that no other thread uses.
    unsafe { word(slot, index) }.store(magazine.address(), Ordering::Relaxed);
    true
}

/// A CPU whose magazine is full hands it over also if there is no empty one: the taker gets its
/// items without a barrier.
#[test]
fn a_full_magazine_is_handed_over_for_nothing() {
    let (depot, mut taker) = Depot::new(2, 1).unwrap();
    let (mut given, mut found) = (Vec::new(), Vec::new());
    let (mut refused, mut reclaims) = (0, 0);
    for n in 1..=600 {
        let item = NonZeroUsize::new(n).unwrap();
        // SAFETY: the depot is there.
        if unsafe { Depot::give(&depot, item, |_| unreachable!("it is open")) } {
            given.push(n);
            refused = 0;
            continue;
        }
        // Each third item: then the magazine is handed over, and has been emptied when the next
        // one comes.
        refused += 1;
        while taker.refill(&depot, |item| found.push(item.get())) {}
        if refused == 2 {
            // The thread was moved, and the magazine is on another CPU; or, in portable mode, a
            // test beside this one had the lock of this CPU.
            taker.reclaim(&depot, |item| found.push(item.get())).unwrap();
            (reclaims, refused) = (reclaims + 1, 0);
        }
    }
    taker.close(&depot, |item| found.push(item.get())).unwrap();
    found.sort_unstable();
    assert_eq!(found, given);
    assert!(reclaims < 50, "{reclaims}");
}

/// The taker puts empty magazines into a ring four at a time, and the rest when it finds
/// nothing.
#[test]
fn what_is_held_back_comes_to_a_ring_in_the_end() {
    // The thread can be moved to a CPU that gets no lane; in portable mode, another test can
    // have the lock of this CPU.
    let round = || {
        let (depot, mut taker) = Depot::with_lanes(1, 128, 1).unwrap();
        // SAFETY: the depot is there.
        let give = |n| unsafe { Depot::give(&depot, NonZeroUsize::new(n).unwrap(), |_| unreachable!()) };
        if !(1..=3).all(give) {
            return false;
        }
        while taker.refill(&depot, |_| ()) {}
        let word = depot.intake.gate.peek().find(|word| *word != 0).unwrap();
        // SAFETY: a magazine of the depot.
        let position = unsafe { at_word(word) }.unwrap().position();
        assert!(depot.lanes.empty.get(position.next()).is_some());
        // What a thread puts into the ring is there when it has published it, from whichever CPU.
        let Some(position) = depot.rotate() else { return false };
        let mut found = Vec::new();
        while taker.refill(&depot, |item| found.push(item.get())) {}
        assert_eq!(found, []);
        depot.lanes.publish_left_behind(position);
        while taker.refill(&depot, |item| found.push(item.get())) {}
        assert_eq!(found, [3]);
        true
    };
    assert!((0..100).any(|_| round()), "the thread was moved in each of 100 rounds");
}

/// An index that was used once gives up its magazine when others need it: not at the first
/// look, and not if it is used.
#[test]
fn idle_magazines_are_reclaimed() {
    let (depot, mut taker) = Depot::with_lanes(4, 16, 8).unwrap();
    let mut found = Vec::new();
    for index in 0..areas() {
        assert_eq!(load(&depot, index, 1 + index..3 + index), index < 8, "{index}");
    }
    assert!(depot.is_crowded() && depot.loaded() == 8);
    assert!(!taker.reclaim_idle(&depot, |_| unreachable!()).unwrap(), "all may be in use");
    // Index 5 goes on.
    let slot = depot.intake.gate.word().load(Ordering::Relaxed);
    // SAFETY: as above.
    let fifth = unsafe { at_word(word(slot, 5).load(Ordering::Relaxed)) }.unwrap();
    assert!(fifth.push(100));
    assert!(!taker.reclaim_idle(&depot, |_| unreachable!()).unwrap(), "no thread was refused since");
    assert!(!load(&depot, 8, 300..301));
    assert!(taker.reclaim_idle(&depot, |item| found.push(item.get())).unwrap());
    assert_eq!((found.len(), depot.loaded()), (14, 1));
    // The others have room now.
    assert_eq!((10..areas()).filter(|&index| load(&depot, index, 200..201)).count(), 7);
    taker.close(&depot, |item| found.push(item.get())).unwrap();
    assert_eq!(found.len(), 14 + 3 + 7);
}

/// Empty magazines in the rings of lanes that no CPU has any more are for all CPUs again, without a
/// barrier: `reclaim_idle` sees no idle CPU, and a pool may not interrupt others.
#[test]
fn rings_of_free_lanes_are_emptied() {
    let (depot, mut taker) = Depot::with_lanes(1, 8, 4).unwrap();
    let free = || depot.empty.iter().map(|word| word.0.load(Ordering::Relaxed).count_ones()).sum::<u32>();
    assert!((0..4).all(|index| load(&depot, index, 0..0)));
    let items: Vec<_> = (1..=4).map(|n| NonZeroUsize::new(n).unwrap()).collect();
    // SAFETY: the depot is there.
    assert_eq!(unsafe { Depot::give_many(&depot, &items) }, 4);
    while taker.refill(&depot, |_| ()) {}
    assert_eq!((free(), depot.loaded()), (0, 4), "one of the empty ones is in each ring");
    // All CPUs hand over for nothing.
    let slot = depot.intake.gate.word().load(Ordering::Relaxed);
    for index in 0..4 {
        // SAFETY: as in `load`.
        let at = unsafe { word(slot, index) }.swap(0, Ordering::Relaxed);
        // SAFETY: a magazine of the depot.
        let magazine = unsafe { at_word(at) }.unwrap();
        depot.lanes.put(magazine.position());
        depot.push_empty(magazine);
    }
    while taker.refill(&depot, |_| unreachable!()) {}
    assert_eq!(free(), 4, "no giver was refused one");
    depot.crowd();
    while taker.refill(&depot, |_| unreachable!()) {}
    assert_eq!(free(), 8);
}

/// A depot with one magazine for each CPU puts none into rings: each CPU can have one.
#[test]
fn few_magazines_are_for_all() {
    let (depot, mut taker) = Depot::with_lanes(1, 4, 4).unwrap();
    assert!(load(&depot, 0, 0..0));
    for n in 1..=3 {
        let item = NonZeroUsize::new(n).unwrap();
        // SAFETY: the depot is there.
        assert_eq!(unsafe { Depot::give_many(&depot, &[item; 3]) }, 3);
        while taker.refill(&depot, |_| ()) {}
    }
    assert_eq!((1..areas()).filter(|&index| load(&depot, index, 0..0)).count(), 3);
}

/// Where sequences are not in line, a returned item runs one sequence, as elsewhere.
#[test]
fn an_item_takes_one_sequence() {
    // There this thread has an index of its own.
    if mode() != Mode::Portable(Why::Forced256) {
        // An emulator runs this program, but not what it starts: bytes 18 and 19 of an ELF file are
        // its machine.
        let machine = |file: std::path::PathBuf| std::fs::read(file).unwrap()[18..20].to_vec();
        if machine(env!("CARGO").into()) != machine(std::env::current_exe().unwrap()) {
            eprintln!("skipped: an_item_takes_one_sequence: this program is for another machine");
            return;
        }
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "depot::tests::an_item_takes_one_sequence";
        let output = child.env("NETMEM_PERCPU", "portable_256").args(["--exact", name]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let (depot, _taker) = Depot::new(10, 4).unwrap();
    // SAFETY: the depot is there.
    let give = |n| unsafe {
        let item = NonZeroUsize::new(n).unwrap();
        Depot::give_at_once(&depot, item) || Depot::give_on_another(&depot, item, |_| unreachable!())
    };
    assert!(give(1));
    let before = crate::portable::sequences();
    assert!((2..=9).all(give));
    assert_eq!(crate::portable::sequences() - before, 8);
}
