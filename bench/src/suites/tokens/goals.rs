//! The goals of tokens by range.

use super::order::{Sequence, section};
use crate::goals::{Which, evaluate, ratio};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target};

/// Why ranges gain least with mixed pages.
const MIXED: &str = "Each count is then in a cache line that the other CPU wrote last, twice for each fragment. The map of ids uses an id again \
                     soon, whatever the page.";

/// All goals: with two threads against the locks, and flat over bindings with any number.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    // A kind of tokens, with this number of threads and bindings.
    let row = |sequence: Sequence, threads, way: &str, bindings| {
        Which::named(format!("{way}{}", sequence.suffix())).threads(threads).bindings(bindings)
    };
    let mut targets = Vec::new();
    for sequence in [Sequence::InOrder, Sequence::Mixed] {
        for bindings in [1, 8] {
            let over = |way| ratio(rows, &row(sequence, 2, way, bindings), &row(sequence, 2, "ranges", bindings));
            let setting = section(sequence, bindings);
            let map = format!("{setting}: locked_map / ranges >= 1.5");
            let map = Target::least(2, map, over("locked_map"), "x", 1.5);
            targets.push(if sequence == Sequence::Mixed { map.open(MIXED) } else { map });
            let each = format!("{setting}: locked_each / ranges >= 4");
            targets.push(Target::least(2, each, over("locked_each"), "x", 4.0));
        }
    }
    let mut threads: Vec<usize> =
        rows.iter().filter(|row| row.head.bindings.is_some()).map(|r| r.head.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    for sequence in [Sequence::InOrder, Sequence::Mixed] {
        for &n in &threads {
            let what = format!("{}: ranges, 8 bindings / 1 binding <= 1.1", sequence.name());
            let flat = ratio(rows, &row(sequence, n, "ranges", 8), &row(sequence, n, "ranges", 1));
            targets.push(Target::most(n, what, flat, "x", 1.1));
        }
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
        let mut rows = vec![row("ranges", 2, 1, 10.0), row("ranges", 2, 8, 12.5), row("locked_map", 1, 1, 90.0)];
        let got = |rows: &[Row]| -> Vec<_> {
            let measured = goals(rows, "rseq").into_iter().filter_map(|goal| Some((goal.value?.median, goal)));
            measured.map(|(median, g)| (g.goal, g.threads, median, g.verdict == Verdict::Reached)).collect()
        };
        let flat = "in order: ranges, 8 bindings / 1 binding <= 1.1".to_owned();
        assert_eq!(got(&rows), [(flat.clone(), 2, 1.25, false)]);
        rows.extend([row("locked_map", 2, 8, 25.0), row("ranges_mixed", 2, 8, 1.0), row("locked_each", 2, 8, 37.5)]);
        rows.extend([row("locked_map_mixed", 2, 8, 1.0)]);
        let expected = [
            ("8 bindings, in order: locked_map / ranges >= 1.5".into(), 2, 2.0, true),
            ("8 bindings, in order: locked_each / ranges >= 4".into(), 2, 3.0, false),
            ("8 bindings, mixed: locked_map / ranges >= 1.5".into(), 2, 1.0, false),
            (flat, 2, 1.25, false),
        ];
        assert_eq!(got(&rows), expected);
    }
}
