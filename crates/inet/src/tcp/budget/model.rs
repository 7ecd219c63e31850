//! The end of a count against its home, in all interleavings (loom).

#![allow(clippy::unwrap_used)]

use loom::sync::Arc;
use loom::thread;

use super::count::{Count, Ended};

/// Ends the counting of one on this thread. Returns whether it was the last one.
fn remove(count: &Count) -> bool {
    let Ended { all, .. } = count.remove_at_home(1).unwrap_or_else(|| count.remove_elsewhere(1));
    all
}

/// Home counts two. One of them ends on another thread, and the other one at home, before or after
/// home leaves. Exactly one call finds that nothing is counted any more.
#[test]
fn the_end_of_a_count_against_its_home() {
    for late in [false, true] {
        loom::model(move || {
            let count = Arc::new(Count::new(true));
            assert!(!count.add(2));
            let other = thread::spawn({
                let count = count.clone();
                move || remove(&count)
            });
            let before = !late && remove(&count);
            let left = count.leave();
            let after = late && remove(&count);
            let ends = [before, left, after, other.join().unwrap()];
            assert_eq!((ends.into_iter().filter(|end| *end).count(), count.sum()), (1, 0));
        });
    }
}

/// Another thread counts one more, and ends it, while home leaves with nothing counted. The count
/// begins and ends without a home as often.
#[test]
fn a_first_one_against_a_home_that_leaves() {
    loom::model(|| {
        let count = Arc::new(Count::new(true));
        let other = thread::spawn({
            let count = count.clone();
            move || (count.add(1), remove(&count))
        });
        let left = count.leave();
        let (first, last) = other.join().unwrap();
        // What was there first is the home.
        let begins = 1 + usize::from(first);
        assert_eq!((begins, count.sum()), (usize::from(left) + usize::from(last), 0));
    });
}
