//! What device memory was built to reach.

use crate::bench::goals::{Target, judge};
use crate::bench::report::{Goal, Row};
use crate::stats::Spread;

/// All goals whose rows were measured: per byte, on both sides together, at the same pace.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    let ratio = |section, over, own| ratio(rows, section, over, own);
    let receive = ratio("receive: both", "percpuref+locked_map", "percpuref+ranges");
    let transmit = ratio("transmit: both", "refcount+ranges", "percpuref+ranges");
    let targets = [
        Target::least(2, "receive, both sides: percpuref+locked_map / percpuref+ranges >= 1", receive, "x", 1.0),
        Target::least(2, "transmit, both sides: refcount+ranges / percpuref+ranges >= 1", transmit, "x", 1.0),
    ];
    judge(targets, percpu)
}

/// How many times as much one variant takes as the other, in a section.
fn ratio(rows: &[Row], section: &str, over: &str, own: &str) -> Option<Spread> {
    let row = |name| rows.iter().find(|row| row.head.section == section && row.head.name == name);
    row(own)?.under(row(over)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::{Head, Sample};

    #[test]
    fn each_direction_has_its_own_before() {
        let row = |section, name: &str, value| {
            let head = Head { name: name.into(), section, threads: 2, unit: "ms", ..Head::default() };
            Row::new(head, "rseq", vec![Sample { value, ..Sample::default() }], None)
        };
        let rows = [
            row("receive: both", "percpuref+ranges", 2.0),
            row("receive: both", "percpuref+locked_map", 3.0),
            row("receive: both", "refcount+ranges", 9.0),
            row("transmit: both", "percpuref+ranges", 2.0),
            row("transmit: both", "refcount+ranges", 1.0),
        ];
        let got: Vec<_> = goals(&rows, "rseq").iter().map(|g| (g.value.median, g.reached)).collect();
        assert_eq!(got, [(1.5, true), (0.5, false)]);
        assert!(goals(&rows[..1], "rseq").is_empty());
    }
}
