//! The goals of the counts.

use crate::goals::{Which, ratio, value};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target, judge};

/// All goals.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    let ratio = |over: &str, n: usize, own: &str, m: usize| {
        ratio(rows, &Which::named(over).threads(n), &Which::named(own).threads(m))
    };
    let rotating = value(rows, &Which::named("percpuref_rotating").threads(1));
    let (most, least) = (Target::most, Target::least);
    judge(
        [
            most(1, "percpuref / plain <= 1.3", ratio("percpuref", 1, "plain", 1), "x", 1.3),
            most(1, "percpuref / c_sequence <= 1.15", ratio("percpuref", 1, "c_sequence", 1), "x", 1.15),
            most(1, "percpuref_rotating <= 5 ns", rotating, "ns", 5.0),
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
    use crate::goals::tests::{measured, row};
    use crate::report::Head;

    #[test]
    fn more_is_better_where_the_goal_says_so() {
        let row = |name: &str, threads, value| row(Head { name: name.into(), threads, ..Head::default() }, &[value]);
        let rows = [
            row("refcount", 2, 100.0),
            row("percpuref", 2, 4.0),
            row("rcuref_batched", 2, 80.0),
            row("percpuref", 1, 3.0),
        ];
        let expected = [(2, 25.0, true), (2, 4.0 / 3.0, false), (2, 1.25, false)];
        assert_eq!(measured(&goals(&rows, "rseq")), expected);
    }
}
