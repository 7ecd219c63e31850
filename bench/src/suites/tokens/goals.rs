//! The goals of tokens by range.

use super::order::{Sequence, section};
use crate::goals::{Which, evaluate, ratio};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target};

/// Why the margin of the closest goals is small.
const NEAR: &str = "The critical section and the lock's two atomic operations are a sixth of a returned fragment, as the lock's four are of the map's.";
/// Why ranges gain least with mixed pages.
const MIXED: &str = "Each delivery writes a cache line of its own, which the returning CPU must fetch. The map of ids uses an id again soon, \
                     whatever the page.";

/// For an order of pages and a number of bindings: at most how much of the cost of `locked_map` one
/// thread has, and how many times cheaper two threads are at least.
const AGAINST_MAP: [(Sequence, u32, f64, f64); 4] = [
    (Sequence::InOrder, 1, 1.0, 4.0),
    (Sequence::InOrder, 8, 1.2, 2.8),
    (Sequence::Mixed, 1, 1.3, 2.5),
    (Sequence::Mixed, 8, 1.3, 2.5),
];

/// All goals: with one thread and with two against the locks, and with one flat over bindings.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    // A kind of tokens, with this number of threads and bindings.
    let row = |sequence: Sequence, threads, way: &str, bindings| {
        Which::named(format!("{way}{}", sequence.suffix())).threads(threads).bindings(bindings)
    };
    let mut targets = Vec::new();
    for (sequence, bindings, alone, two) in AGAINST_MAP {
        let over = |threads, way| {
            ratio(rows, &row(sequence, threads, way, bindings), &row(sequence, threads, "ranges", bindings))
        };
        let under = || ratio(rows, &row(sequence, 1, "ranges", bindings), &row(sequence, 1, "locked_map", bindings));
        let setting = section(sequence, bindings);
        let (open, least) = if sequence == Sequence::Mixed { (MIXED, 1.5) } else { (NEAR, 2.0) };
        let most = |n: f64| Target::most(1, format!("{setting}: ranges / locked_map <= {n}"), under(), "x", n);
        let map = |n: f64| {
            let map = format!("{setting}: locked_map / ranges >= {n}");
            Target::least(2, map, over(2, "locked_map"), "x", n)
        };
        let each = format!("{setting}: locked_each / ranges >= 4");
        targets.extend([most(1.5), most(alone).open(open), map(least), map(two).open(open)]);
        targets.push(Target::least(2, each, over(2, "locked_each"), "x", 4.0));
    }
    // With more threads, tokens of one binding in order gain more than others: they are
    // consecutive, and are found together, so a lock is held for less time.
    for (sequence, most) in [(Sequence::InOrder, 1.4), (Sequence::Mixed, 1.1)] {
        let what = format!("{}: ranges, 8 bindings / 1 binding <= {most}", sequence.name());
        let flat = ratio(rows, &row(sequence, 1, "ranges", 8), &row(sequence, 1, "ranges", 1));
        targets.push(Target::most(1, what, flat, "x", most));
    }
    evaluate(targets, percpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::row;
    use crate::report::Head;
    use netmem_measure::goals::Verdict;

    #[test]
    fn rows_are_held_against_those_of_their_own_kind() {
        let row = |name: &str, threads, bindings, value| {
            row(Head { name: name.into(), threads, bindings: Some(bindings), ..Head::default() }, &[value])
        };
        let mut rows = vec![row("ranges", 2, 8, 12.5), row("ranges", 1, 1, 180.0), row("ranges", 1, 8, 225.0)];
        let got = |rows: &[Row]| -> Vec<_> {
            let measured = goals(rows, "rseq").into_iter().filter_map(|goal| Some((goal.value?.median, goal)));
            measured.map(|(median, g)| (g.goal, g.threads, median, g.verdict == Verdict::Reached)).collect()
        };
        let flat = "in order: ranges, 8 bindings / 1 binding <= 1.4".to_owned();
        assert_eq!(got(&rows), [(flat.clone(), 1, 1.25, true)]);
        rows.extend([row("locked_map", 2, 8, 25.0), row("ranges_mixed", 2, 8, 1.0), row("locked_each", 2, 8, 37.5)]);
        rows.extend([row("locked_map_mixed", 2, 8, 1.0), row("locked_map", 1, 1, 90.0)]);
        let expected = [
            ("1 binding, in order: ranges / locked_map <= 1.5".into(), 1, 2.0, false),
            ("1 binding, in order: ranges / locked_map <= 1".into(), 1, 2.0, false),
            ("8 bindings, in order: locked_map / ranges >= 2".into(), 2, 2.0, true),
            ("8 bindings, in order: locked_map / ranges >= 2.8".into(), 2, 2.0, false),
            ("8 bindings, in order: locked_each / ranges >= 4".into(), 2, 3.0, false),
            ("8 bindings, mixed: locked_map / ranges >= 1.5".into(), 2, 1.0, false),
            ("8 bindings, mixed: locked_map / ranges >= 2.5".into(), 2, 1.0, false),
            (flat, 1, 1.25, true),
        ];
        assert_eq!(got(&rows), expected);
    }
}
