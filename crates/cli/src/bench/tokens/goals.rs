//! What tokens by range were built to reach.

use super::order::Sequence;
use super::section;
use crate::bench::goals::{Target, judge};
use crate::bench::report::{Goal, Row};
use crate::stats::Spread;

/// All goals whose rows were measured: with two threads against the locks, and flat over bindings with any number.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    let mut targets = Vec::new();
    for sequence in [Sequence::InOrder, Sequence::Mixed] {
        for bindings in [1, 8] {
            let over = |way| ratio(rows, sequence, 2, (way, bindings), ("ranges", bindings));
            let setting = section(sequence, bindings);
            let map = format!("{setting}: locked_map / ranges >= 1.5");
            targets.push(Target::least(2, map, over("locked_map"), "x", 1.5));
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
            let flat = format!("{}: ranges, 8 bindings / 1 binding <= 1.1", sequence.name());
            targets.push(Target::most(n, flat, ratio(rows, sequence, n, ("ranges", 8), ("ranges", 1)), "x", 1.1));
        }
    }
    judge(targets, percpu)
}

/// How many times as much one way takes as the other, each with its number of bindings.
fn ratio(rows: &[Row], sequence: Sequence, threads: usize, over: (&str, u32), own: (&str, u32)) -> Option<Spread> {
    let row = |(way, bindings): (&str, u32)| {
        let name = format!("{way}{}", sequence.suffix());
        let of = |row: &&Row| (row.head.threads, row.head.bindings) == (threads, Some(bindings));
        rows.iter().filter(of).find(|row| row.head.name == name)
    };
    row(own)?.under(row(over)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::{Head, Sample};

    #[test]
    fn rows_are_held_against_those_of_their_own_kind() {
        let row = |name: &str, threads, bindings, value| {
            let head = Head { name: name.into(), threads, bindings: Some(bindings), unit: "ns", ..Head::default() };
            Row::new(head, "rseq", vec![Sample { value, ..Sample::default() }], None)
        };
        let mut rows = vec![row("ranges", 2, 1, 10.0), row("ranges", 2, 8, 12.0), row("locked_map", 1, 1, 90.0)];
        let got = |rows: &[Row]| -> Vec<_> {
            goals(rows, "rseq").into_iter().map(|g| (g.goal, g.threads, g.value.median, g.reached)).collect()
        };
        let flat = "in order: ranges, 8 bindings / 1 binding <= 1.1".to_owned();
        assert_eq!(got(&rows), [(flat.clone(), 2, 1.2, false)]);
        rows.extend([row("locked_map", 2, 8, 24.0), row("ranges_mixed", 2, 8, 1.0), row("locked_each", 2, 8, 36.0)]);
        rows.extend([row("locked_map_mixed", 2, 8, 1.0)]);
        let expected = [
            ("8 bindings, in order: locked_map / ranges >= 1.5".into(), 2, 2.0, true),
            ("8 bindings, in order: locked_each / ranges >= 4".into(), 2, 3.0, false),
            ("8 bindings, mixed: locked_map / ranges >= 1.5".into(), 2, 1.0, false),
            (flat, 2, 1.2, false),
        ];
        assert_eq!(got(&rows), expected);
    }
}
