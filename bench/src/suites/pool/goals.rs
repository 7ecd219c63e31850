//! The goals of the pool.

use crate::goals::{Which, evaluate, growth, ratio};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target};

/// All goals.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    let ratio = |over: &str, n: usize, own: &str, m: usize| {
        ratio(rows, &Which::named(over).threads(n), &Which::named(own).threads(m))
    };
    let flat = growth(rows, &Which::named("shared"), &Which::named("private_array"), 1, 2);
    let mut targets = vec![
        Target::most(1, "in_context / limit <= 1.5", ratio("in_context", 1, "limit", 1), "x", 1.5)
            .open("An allocation and a drop take twelve memory operations, an array's pop and push eight: docs/design/return-path.md."),
        Target::least(1, "dpdk_mbuf / in_context >= 2.5", ratio("dpdk_mbuf", 1, "in_context", 1), "x", 2.5),
        Target::least(2, "dpdk_mbuf_remote / remote >= 4", ratio("dpdk_mbuf_remote", 2, "remote", 2), "x", 4.0)
            .open("The goal was set where DPDK took 70 ns. Where a cache line between the CPUs is cheap, instructions of both threads and of the ring decide."),
        Target::most(2, "remote / floor_spsc <= 1.25", ratio("remote", 2, "floor_spsc", 2), "x", 1.25)
            .open("The floor publishes 32 pages with one store. A drop publishes its page alone (4.2 of 10.9 ns), and magazines are exchanged (2.4 ns)."),
        Target::most(2, "remote / fair_drop <= 1.25", ratio("remote", 2, "fair_drop", 2), "x", 1.25)
            .open("Reached where a line moves between the CPUs in the time of a few instructions (1.07 to 1.12), not always where it costs more (1.27 to 1.39): docs/notes/returns.md."),
        Target::most(2, "remote / dpdk_mbuf_remote_bulk <= 0.7", ratio("remote", 2, "dpdk_mbuf_remote_bulk", 2), "x", 0.7),
        Target::least(2, "locked_ring / remote >= 2.5", ratio("locked_ring", 2, "remote", 2), "x", 2.5)
            .open("With one thread that drops, the producers' lock is never contended. With 2 and 4 such threads on one CPU the ratio was 1.8 and 2.8."),
    ];
    // Goals of the rows in which all threads allocate pages and return them.
    targets.push(
        Target::most(1, "shared / in_context <= 2", ratio("shared", 1, "in_context", 1), "x", 2.0)
            .open("Any thread may allocate, so each operation is a restartable sequence with two stores: docs/design/shared-pool.md."),
    );
    targets
        .push(Target::most(1, "shared / bare_sequences <= 1.1", ratio("shared", 1, "bare_sequences", 1), "x", 1.1).open(
        "An allocation also stores where its page came from; a drop also loads count, home and context: docs/notes/shared-pool.md.",
    ));
    targets.push(Target::most(2, "shared x2 / shared, over the same of private_array, <= 1.1", flat, "x", 1.1));
    targets.push(
        Target::least(2, "array_queue / shared >= 5", ratio("array_queue", 2, "shared", 2), "x", 5.0)
            .open("It is reached where a cache line between the CPUs costs 100 ns (38 on an Intel server part), and not where it costs 30."),
    );
    let mut threads: Vec<usize> = rows.iter().map(|row| row.head.threads).filter(|&n| n > 2).collect();
    threads.dedup();
    targets.extend(
        threads
            .into_iter()
            .map(|n| Target::most(n, "remote / remote x2 <= 1.1", ratio("remote", n, "remote", 2), "x", 1.1)),
    );
    evaluate(targets, percpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::{measured, row};
    use crate::report::Head;

    #[test]
    fn as_many_goals_as_there_are_rows_for() {
        let row = |name: &str, threads, value| row(Head { name: name.into(), threads, ..Head::default() }, &[value]);
        let mut rows = vec![row("limit", 1, 2.0), row("in_context", 1, 3.0), row("remote", 2, 10.0)];
        let reached = |rows: &[Row]| measured(&goals(rows, "rseq"));
        assert_eq!(reached(&rows), [(1, 1.5, true)]);
        rows.extend([
            row("floor_spsc", 2, 8.0),
            row("locked_ring", 2, 20.0),
            row("remote", 4, 11.0),
            row("remote", 8, 30.0),
        ]);
        assert_eq!(reached(&rows), [(1, 1.5, true), (2, 1.25, true), (2, 2.0, false), (4, 1.1, true), (8, 3.0, false)]);
    }
}
