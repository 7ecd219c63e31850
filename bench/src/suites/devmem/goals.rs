//! The goals of device memory.

use super::segments;
use crate::goals::{Which, evaluate, ratio};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target};

/// Why tokens do not free CPU time of a receiver.
const UNCONTENDED: &str = "One thread receives and returns tokens, so the map's lock is never contended. Ids and their lock are 8 % of the application's \
                           time, and a page's count is in a line that the returning CPU wrote last.";
/// Why a long segment costs more than a short one.
const COPY: &str = "The device copies 16 segments between two turns of the stack: 1 MB, half of a second-level cache of 2 MiB. A card would have no \
                    part in the CPU's caches.";

/// All goals: CPU time per byte of both sides together, at the same pace.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    let ratio = |section, over, own| {
        let row = |name: &str| Which::named(name).section(section);
        ratio(rows, &row(over), &row(own))
    };
    let receive = ratio("receive: both", "percpuref+locked_map", "percpuref+ranges");
    let transmit = ratio("transmit: both", "refcount+ranges", "percpuref+ranges");
    let stream_receive = ratio("stream receive: both", "percpuref+locked_map", "percpuref+ranges");
    let stream_transmit = ratio("stream transmit: both", "refcount+ranges", "percpuref+ranges");
    let targets = [
        Target::least(2, "receive, both sides: percpuref+locked_map / percpuref+ranges >= 1", receive, "x", 1.0)
            .open(UNCONTENDED),
        Target::least(2, "transmit, both sides: refcount+ranges / percpuref+ranges >= 1", transmit, "x", 1.0),
        Target::least(
            2,
            "stream receive, both sides: percpuref+locked_map / percpuref+ranges >= 1",
            stream_receive,
            "x",
            1.0,
        )
        .open(UNCONTENDED),
        Target::least(
            2,
            "stream transmit, both lanes: refcount+ranges / percpuref+ranges >= 1",
            stream_transmit,
            "x",
            1.0,
        ),
    ];
    let [short, whole, long] = segments::JUDGED;
    let of_segments = segments::SECTIONS.as_chunks::<2>().0.iter().flat_map(|&[cost, rate]| {
        let row = |section, len| Which::named(segments::name(len, segments::ORDER)).section(section);
        let over = |section, len| self::ratio(rows, &row(section, long), &row(section, len));
        [
            Target::most(2, format!("{cost}: {long} bytes / {short} bytes <= 1.1"), over(cost, short), "x", 1.1)
                .open(COPY),
            Target::least(2, format!("{rate}: {long} bytes / {whole} bytes >= 3"), over(rate, whole), "x", 3.0),
        ]
    });
    let targets = targets.into_iter().chain(of_segments);
    evaluate(targets, percpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::{measured, row};
    use crate::report::Head;

    #[test]
    fn each_direction_has_its_own_before() {
        let row = |section, name: &str, value| {
            row(Head { name: name.into(), section, threads: 2, ..Head::default() }, &[value])
        };
        let rows = [
            row("receive: both", "percpuref+ranges", 2.0),
            row("receive: both", "percpuref+locked_map", 3.0),
            row("receive: both", "refcount+ranges", 9.0),
            row("transmit: both", "percpuref+ranges", 2.0),
            row("transmit: both", "refcount+ranges", 1.0),
        ];
        assert_eq!(measured(&goals(&rows, "rseq")), [(2, 1.5, true), (2, 0.5, false)]);
        assert!(measured(&goals(&rows[..1], "rseq")).is_empty());
    }
}
