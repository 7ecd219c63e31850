//! The goals of the counts.

use crate::goals::{Which, evaluate, growth, ratio, value};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target};

/// Why `percpuref` takes more than `plain`.
const STORES: &str = "Zen 4 forwards a stored value to the next load in a register, so plain takes 2 cycles for a pair. A sequence \
                      stores twice, its descriptor and its commit: 4 cycles is its floor.";
/// Why `percpuref` takes more than a sequence without a gate.
const GATE: &str = "The gate is a load and a compare for each operation. They cost nothing where both wait for the counter to come \
                    back through the store buffer (0.95 on an Intel server part).";
/// Why a shared count is not slower.
const ONE_CACHE: &str = "Two CPUs under one cache rarely repeat a compare-and-swap, and a C program with nothing but the two loops has the \
                         same ratio. The count loses with more CPUs.";
/// Why many threads gain less from the count without retries.
const ONE_SOCKET: &str =
    "Seen on one machine with 16 CPUs of one socket (1.7 to 1.8). The goal is of a measurement with 112 CPUs.";

/// All goals.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    let ratio = |over: &str, n: usize, own: &str, m: usize| {
        ratio(rows, &Which::named(over).threads(n), &Which::named(own).threads(m))
    };
    let rotating = value(rows, &Which::named("percpuref_rotating").threads(1));
    let flat = |n| growth(rows, &Which::named("percpuref"), &Which::named("plain"), 1, n);
    let (most, least) = (Target::most, Target::least);
    evaluate(
        [
            most(1, "percpuref / plain <= 1.3", ratio("percpuref", 1, "plain", 1), "x", 1.3).open(STORES),
            most(1, "percpuref / c_sequence <= 1.15", ratio("percpuref", 1, "c_sequence", 1), "x", 1.15).open(GATE),
            most(1, "percpuref_rotating <= 5 ns", rotating, "ns", 5.0),
            most(1, "rcuref_batched / refcount <= 1", ratio("rcuref_batched", 1, "refcount", 1), "x", 1.0),
            least(2, "refcount / percpuref >= 20", ratio("refcount", 2, "percpuref", 2), "x", 20.0).open(ONE_CACHE),
            most(2, "percpuref / percpuref x1, over the same of plain, <= 1.1", flat(2), "x", 1.1),
            least(2, "refcount / rcuref_batched >= 1.4", ratio("refcount", 2, "rcuref_batched", 2), "x", 1.4)
                .open(ONE_CACHE),
            most(16, "percpuref / percpuref x1, over the same of plain, <= 1.1", flat(16), "x", 1.1),
            least(16, "refcount / rcuref_batched >= 4", ratio("refcount", 16, "rcuref_batched", 16), "x", 4.0)
                .open(ONE_SOCKET),
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
            row("plain", 2, 1.5),
            row("plain", 1, 1.5),
        ];
        let expected = [(2, 25.0, true), (2, 4.0 / 3.0, false), (2, 1.25, false)];
        let got: Vec<_> = measured(&goals(&rows, "rseq")).into_iter().filter(|goal| goal.0 == 2).collect();
        assert_eq!(got, expected);
    }
}
