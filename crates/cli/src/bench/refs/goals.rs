//! What the counts were built to reach.

use crate::bench::goals::{Target, judge, ratio, time};
use crate::bench::report::{Goal, Row};

/// All goals whose rows were measured.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    let ratio = |over: &str, n: usize, own: &str, m: usize| ratio(rows, (over, n), (own, m));
    let (most, least) = (Target::most, Target::least);
    judge(
        [
            most(1, "percpuref / plain <= 1.3", ratio("percpuref", 1, "plain", 1), "x", 1.3),
            most(1, "percpuref / c_sequence <= 1.15", ratio("percpuref", 1, "c_sequence", 1), "x", 1.15),
            most(1, "percpuref_rotating <= 5 ns", time(rows, "percpuref_rotating", 1), "ns", 5.0),
            most(1, "rcuref_batched / refcount <= 1", ratio("rcuref_batched", 1, "refcount", 1), "x", 1.0),
            least(2, "refcount / percpuref >= 20", ratio("refcount", 2, "percpuref", 2), "x", 20.0),
            most(2, "percpuref / percpuref x1 <= 1.1", ratio("percpuref", 2, "percpuref", 1), "x", 1.1),
            least(2, "refcount / rcuref_batched >= 1.4", ratio("refcount", 2, "rcuref_batched", 2), "x", 1.4),
            most(16, "percpuref / percpuref x1 <= 1.1", ratio("percpuref", 16, "percpuref", 1), "x", 1.1),
            least(16, "refcount / rcuref_batched >= 4", ratio("refcount", 16, "rcuref_batched", 16), "x", 4.0),
        ],
        percpu,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::{Head, Sample};

    fn row(name: &str, threads: usize, values: &[f64]) -> Row {
        let head = Head { name: name.into(), threads, unit: "ns", ..Head::default() };
        let samples = values.iter().map(|&value| Sample { value, ..Sample::default() }).collect();
        Row::new(head, "rseq", samples, None)
    }

    #[test]
    fn a_goal_is_judged_by_the_median_of_the_runs_ratios() {
        let rows = [row("plain", 1, &[1.0, 2.0, 1.0]), row("percpuref", 1, &[1.2, 2.8, 1.1])];
        let goals = goals(&rows, "rseq");
        assert_eq!(goals.len(), 1);
        assert!((goals[0].value.median - 1.2).abs() < 1e-9 && goals[0].reached);
    }

    #[test]
    fn more_is_better_where_the_goal_says_so() {
        let rows = [
            row("refcount", 2, &[100.0]),
            row("percpuref", 2, &[4.0]),
            row("rcuref_batched", 2, &[80.0]),
            row("percpuref", 1, &[3.0]),
        ];
        let reached: Vec<_> = goals(&rows, "rseq").iter().map(|g| (g.value.median, g.reached)).collect();
        assert_eq!(reached, [(25.0, true), (4.0 / 3.0, false), (1.25, false)]);
    }
}
