//! The models of the rings between a CPU and the taker of a [`Depot`]. A ring has two places in a
//! model, and the lanes begin at the end of the last lap: the second position wraps around.

use super::*;
use crate::lane::Lanes;

/// A depot of which CPU 0 has a magazine with the item 3, and two empty magazines in its ring. The
/// items 1 and 2 were found.
fn ringed() -> (Arc<Depot>, Taker) {
    let (depot, mut taker) = Depot::with_lanes(1, 8, 2).unwrap();
    assert!((1..=3).all(|n| give(&depot, n)));
    // The first two magazines are full, and on the list.
    let mut found = Vec::new();
    while taker.refill(&depot, |item| found.push(item)) {}
    found.sort();
    assert_eq!((found, taker.in_rings()), (vec![item(1), item(2)], 2));
    (Arc::new(depot), taker)
}

/// Gives items on a CPU. Returns those that were given.
fn giver(depot: &Arc<Depot>, cpu: usize, items: std::ops::RangeInclusive<usize>) -> JoinHandle<Vec<NonZeroUsize>> {
    let depot = depot.clone();
    on(cpu, move || items.filter(|&n| give(&depot, n)).map(item).collect())
}

/// Takes what is there, without a barrier.
fn refill_all(depot: &Depot, taker: &mut Taker, found: &mut Vec<NonZeroUsize>) {
    thread::yield_now();
    while taker.refill(depot, |item| found.push(item)) {}
}

/// The items were all found, once.
#[track_caller]
fn are_found(mut found: Vec<NonZeroUsize>, given: impl IntoIterator<Item = Vec<NonZeroUsize>>) {
    let mut all: Vec<_> = given.into_iter().flatten().chain([item(3)]).collect();
    all.sort();
    found.sort();
    assert_eq!(found, all);
}

/// Two CPUs that get their first magazines at once have lanes of their own.
#[test]
fn take_against_take() {
    check(None, || {
        let lanes = Arc::new(Lanes::new(2));
        let other = {
            let lanes = lanes.clone();
            thread::spawn(move || lanes.take().unwrap().lane())
        };
        assert_ne!(lanes.take().unwrap().lane(), other.join().unwrap());
    });
}

/// A full magazine that goes through the ring while the taker takes: its item is found once, with
/// what was written before, and the empty magazine is one that the taker has done with.
#[test]
fn rotate_against_refill() {
    check(Some(3), || {
        let ((depot, mut taker), contents) = (ringed(), Contents::new());
        let thread = {
            let (depot, contents) = (depot.clone(), contents.clone());
            on(0, move || {
                contents.write();
                [4, 5].into_iter().filter(|&n| give(&depot, n)).map(item).collect::<Vec<_>>()
            })
        };
        let mut found = Vec::new();
        for _ in 0..2 {
            refill_all(&depot, &mut taker, &mut found);
        }
        if found.contains(&item(4)) {
            assert_eq!(contents.read(), 1);
        }
        let given = thread.join().unwrap();
        take_all(&depot, &mut taker, &mut found);
        are_found(found, [given]);
    });
}

/// More positions than a ring has places, while the taker takes and puts empty magazines: no
/// magazine is overwritten, or found twice.
#[test]
fn rings_wrap_around() {
    check(Some(2), || {
        let (depot, mut taker) = ringed();
        let thread = giver(&depot, 0, 4..=7);
        let mut found = Vec::new();
        for _ in 0..3 {
            refill_all(&depot, &mut taker, &mut found);
        }
        let given = thread.join().unwrap();
        take_all(&depot, &mut taker, &mut found);
        are_found(found, [given]);
    });
}

/// Two threads of one CPU: if one is preempted in the middle of an exchange, the other publishes
/// for it. Nothing is lost, and no magazine has two holders.
#[test]
fn rotate_against_rotate() {
    check(Some(3), || {
        let (depot, mut taker) = ringed();
        let threads = [4..=4, 5..=6].map(|items| giver(&depot, 0, items));
        let given = threads.map(|thread| thread.join().unwrap());
        let mut found = Vec::new();
        take_all(&depot, &mut taker, &mut found);
        are_found(found, given);
    });
}

/// A thread that is moved to another CPU in the middle of an exchange, while the taker takes and
/// the next thread of the CPU gives: the magazine is published once, and waits for no further item.
#[test]
fn rotate_against_a_move() {
    check(Some(3), || {
        let (depot, mut taker) = ringed();
        let moved = {
            let depot = depot.clone();
            on(0, move || {
                let position = depot.rotate();
                run_on(1);
                position.into_iter().for_each(|position| depot.publish(position));
                position.is_some()
            })
        };
        let next = giver(&depot, 0, 4..=5);
        let mut found = Vec::new();
        refill_all(&depot, &mut taker, &mut found);
        let (rotated, given) = (moved.join().unwrap(), next.join().unwrap());
        refill_all(&depot, &mut taker, &mut found);
        assert!(!rotated || found.contains(&item(3)), "left behind");
        take_all(&depot, &mut taker, &mut found);
        are_found(found, [given]);
    });
}

/// A reclaim in the middle of an exchange: the magazine that is not published is the taker's.
#[test]
fn rotate_against_reclaim() {
    check(Some(3), || {
        let (depot, mut taker) = ringed();
        let thread = giver(&depot, 0, 4..=5);
        let mut found = Vec::new();
        taker.reclaim(&depot, |item| found.push(item)).unwrap();
        let given = thread.join().unwrap();
        taker.reclaim(&depot, |item| found.push(item)).unwrap();
        assert!(!taker.sees_full(&depot), "a magazine waits in a ring");
        refill_all(&depot, &mut taker, &mut found);
        are_found(found, [given]);
    });
}

/// A lane goes from one CPU to another in a reclaim, which takes the empty magazines in its ring
/// back.
#[test]
fn a_lane_changes_hands() {
    check(Some(2), || {
        let (depot, mut taker) = ringed();
        let threads = [giver(&depot, 0, 4..=4), giver(&depot, 1, 5..=6)];
        let mut found = Vec::new();
        taker.reclaim(&depot, |item| found.push(item)).unwrap();
        let given = threads.map(|thread| thread.join().unwrap());
        take_all(&depot, &mut taker, &mut found);
        are_found(found, given);
    });
}

/// The taker takes the magazines of idle CPUs, and the empty ones in their rings, while they are in
/// use after all.
#[test]
fn rotate_against_reclaim_of_idle() {
    check(Some(2), || {
        let (depot, mut taker) = ringed();
        // A look, and a giver that finds no magazine.
        depot.crowd();
        assert!(!taker.reclaim_idle(&depot, |_| unreachable!("a look before")).unwrap());
        depot.crowd();
        let thread = giver(&depot, 0, 4..=5);
        let mut found = Vec::new();
        taker.reclaim_idle(&depot, |item| found.push(item)).unwrap();
        let given = thread.join().unwrap();
        take_all(&depot, &mut taker, &mut found);
        are_found(found, [given]);
        // No magazine is lost: all of them can be full at once.
        let many: Vec<_> = (10..18).map(item).collect();
        taker.reclaim(&depot, |_| unreachable!("all was found")).unwrap();
        // SAFETY: the model keeps the depot.
        let filled = unsafe { Depot::give_many(&*depot, &many) };
        assert_eq!(filled + depot.loaded() + taker.in_rings(), 8);
    });
}

/// The taker takes a free lane to take the empty magazines in its ring back, while a CPU gets its
/// first magazine and the lane.
#[test]
fn begin_against_take_back() {
    check(Some(2), || {
        let (depot, mut taker) = ringed();
        run_on(0);
        depot.leave(item(9));
        let mut found = Vec::new();
        while taker.refill(&depot, |item| found.push(item)) {}
        assert_eq!((depot.loaded(), taker.in_rings()), (0, 2));
        depot.crowd();
        let thread = giver(&depot, 0, 4..=5);
        refill_all(&depot, &mut taker, &mut found);
        let given = thread.join().unwrap();
        take_all(&depot, &mut taker, &mut found);
        are_found(found, [given]);
        // No magazine is lost.
        let many: Vec<_> = (10..18).map(item).collect();
        // SAFETY: the model keeps the depot.
        let filled = unsafe { Depot::give_many(&*depot, &many) };
        assert_eq!(filled + depot.loaded() + taker.in_rings(), 8);
    });
}

/// The depot's end in the middle of an exchange: each item is the taker's, or was refused. The
/// thread that has them all frees the depot, after the giver's last touch.
#[test]
fn rotate_against_close() {
    check(Some(3), || {
        let ((depot, mut taker), contents) = (ringed(), Contents::new());
        let thread = {
            let depot = depot.clone();
            on(0, move || {
                let mut back = Vec::new();
                for n in [4, 5] {
                    // SAFETY: the model keeps the memory, and the item stands for the right to
                    // touch it.
                    if !unsafe { Depot::give(&*depot, item(n), |item| back.push(item)) } {
                        back.push(item(n));
                        return (back, n);
                    }
                }
                (back, 6)
            })
        };
        let mut found = Vec::new();
        contents.write();
        taker.close(&depot, |item| found.push(item)).unwrap();
        if found.len() == 3 {
            // All are here, so no thread has a reason to touch the depot.
            depot.witness();
        }
        let (back, end) = thread.join().unwrap();
        found.extend(back);
        are_found(found, [(4..6.min(end + 1)).map(item).collect()]);
        assert!(!give(&depot, 9));
    });
}
