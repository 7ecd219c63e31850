//! The goals of streams.

use super::turns::{REQUESTS, SECTION};
use crate::goals::{Which, evaluate, ratio};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target};

/// Why bulk throughput is not three times that of smoltcp.
const DEVICE: &str = "The device and the application's write take two thirds of the limiting thread when threads poll: a stack without any cost would have \
                      1.1 times smoltcp's throughput (docs/notes/streams.md).";
/// Why a segment does not take 0.7 of smoltcp's time.
const TURNS: &str = "Most of the rest is the device's and the driver's (docs/notes/streams.md).";
/// Why a request takes longer than smoltcp's.
const REQUEST: &str = "A connection is processed twice for a request, when its segment arrives and when its user has answered, and each time has timers, \
                       a window by buffers, RACK and congestion control, of which smoltcp has less (docs/notes/streams.md).";
/// Why a gigabyte does not cost half of the kernel's CPU time.
const KERNEL: &str =
    "The kernel copies each byte twice, too, and computes as many checksums. Its side is not profiled.";
/// Why memcached answers fewer requests in a CPU second.
const TAP: &str = "One thread drives the device and the stack. What is left is mostly a write of the tap for each response (docs/notes/streams.md).";

/// All goals.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    // The value of one row divided by that of another, run by run.
    let ratio = |section, over: &str, under: &str| {
        let row = |name: &str| Which::named(name).section(section);
        ratio(rows, &row(over), &row(under))
    };
    let mut targets = Vec::new();
    for idle in ["sleeping", "polling"] {
        let [ours, smoltcp] = ["ours", "smoltcp"].map(|name| format!("{name}_{idle}"));
        let value = ratio("bulk: throughput", &ours, &smoltcp);
        targets
            .push(Target::least(2, format!("bulk, throughput: {ours} / {smoltcp} >= 3"), value, "x", 3.0).open(DEVICE));
    }
    let what = format!("{SECTION}: time of a segment, ours / smoltcp <= 0.7");
    targets.push(Target::most(1, what, ratio(SECTION, "ours", "smoltcp"), "x", 0.7).open(TURNS));
    let what = format!("{REQUESTS}: ours / smoltcp <= 1");
    targets.push(Target::most(1, what, ratio(REQUESTS, "ours", "smoltcp"), "x", 1.0).open(REQUEST));
    let value = ratio("requests: median", "ours_polling", "smoltcp_polling");
    let what = "requests: median: ours_polling / smoltcp_polling <= 1";
    targets.push(Target::most(2, what, value, "x", 1.0).open(REQUEST));
    let value = ratio("bulk: CPU", "ours_sleeping", "kernel_veth_sleeping");
    let what = "bulk, CPU time of a gigabyte without offloads: ours_sleeping / kernel_veth_sleeping <= 0.5";
    targets.push(Target::most(2, what, value, "x", 0.5).open(KERNEL));
    for section in ["requests: median", "requests: 99 % are faster"] {
        let value = ratio(section, "ours_polling", "kernel_veth_polling");
        targets.push(Target::most(2, format!("{section}: ours_polling / kernel_veth_polling <= 1"), value, "x", 1.0));
    }
    for section in ["memcached: CPU of the server", "memcached: CPU of both sides"] {
        let value = ratio(section, "ours", "debian");
        targets.push(Target::least(1, format!("{section}: requests of ours / debian >= 1"), value, "x", 1.0).open(TAP));
    }
    evaluate(targets, percpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::{measured, row};
    use crate::report::Head;

    #[test]
    fn more_throughput_and_less_time_are_better() {
        let row = |section, name: &str, value| {
            row(Head { name: name.into(), section, threads: 2, ..Head::default() }, &[value])
        };
        let rows = [
            row("bulk: throughput", "ours_polling", 8.0),
            row("bulk: throughput", "smoltcp_polling", 2.0),
            row("bulk: CPU", "ours_sleeping", 3.0),
            row("bulk: CPU", "kernel_veth_sleeping", 4.0),
            row("requests: median", "ours_polling", 5.0),
            row("requests: median", "kernel_veth_polling", 10.0),
        ];
        assert_eq!(measured(&goals(&rows, "rseq")), [(2, 4.0, true), (2, 0.75, false), (2, 0.5, true)]);
        assert!(measured(&goals(&rows[..1], "rseq")).is_empty());
    }
}
