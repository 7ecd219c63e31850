//! The goals of streams.

use super::http;
use super::threads;
use super::turns::{REQUESTS, SECTION};
use crate::goals::{Which, evaluate, growth, ratio};
use crate::report::Row;
use netmem_measure::goals::{Goal, Target, Value};
use netmem_measure::stats::Spread;

/// Why throughput without offloads is less than smoltcp's.
const DEVICE: &str = "The device and the application's write take two thirds of the limiting thread when threads poll: a stack without any cost would have \
                      1.1 times smoltcp's throughput (docs/notes/streams.md).";
/// Why a segment costs more than smoltcp's.
const TURNS: &str = "Most of the rest is the device's and the driver's (docs/notes/streams.md).";
/// Why a request takes longer than smoltcp's.
const REQUEST: &str = "Each end processes its connection once for a request. What smoltcp has less of is in all functions: timers, a window by buffers, RACK, \
                       congestion control, pages that any thread may drop (docs/notes/streams.md).";
/// Why a gigabyte without offloads costs more than 0.3 of the kernel's CPU time.
const SMALL: &str = "Profiled: 24 % are the device, 27 % notifications and sleeps, 9 % the application. Without any cost of stack, driver, joining and checksums 0.35 would be left \
                     (docs/notes/streams.md).";
/// Why a gigabyte of segments of 64 KB costs more than half of the kernel's CPU time.
const LARGE: &str = "Profiled: the device's one copy and the application are 47 %, or 0.44 of the kernel's time; half of the kernel's is its two copies. Without any \
                     cost of stack and driver 0.75 would be left (docs/notes/streams.md).";
/// Why throughput with checksum offload is less than four times the kernel's when threads sleep.
const SLEEPS: &str = "Profiled: three threads share two CPUs, so CPU time decides. The stack, the driver and joining are 36 % of it: without their cost it would be \
                      2.4 times (docs/notes/streams.md).";
/// Why throughput with checksum offload is less than four times the kernel's when threads poll.
const POLLS: &str = "Profiled: the device is 52 % of the sender's thread and the application 14 %. A stack, a driver and clocks without any cost would have 3.3 \
                     times the kernel's throughput (docs/notes/streams.md).";
/// Why a gigabyte to and from the kernel behind a tap costs more than it should.
const BEHIND: &str = "Profiled: the kernel's copies, its tap and its sockets are 63 %. Without any cost of stack, driver and device 0.80 would be left, and without \
                      sleeps and notifications, too, 0.68 (docs/notes/streams.md).";
/// Why memcached answers fewer requests in a CPU second.
const TAP: &str = "One thread drives the device and the stack. What is left is mostly a write of the tap for each response (docs/notes/streams.md).";
/// Why memcached needs more time in user mode.
const USER: &str = "Our stack, driver and device run in user mode; those of Debian's memcached are the kernel's.";

/// Where the time of an HTTP connection is, should it be more than a third of the kernel's.
const HTTP: &str = "Profiled when it was 0.19: the stack is 34 %, finding connections 12 % (half of this are hashes), the device 9 %, sleeps and notifications 14 % \
                    (docs/notes/streams.md).";
/// Why a second thread gains less than it could.
const THREADS: &str = "Profiled: of 495 ns of a segment with two threads, 14 at most are totals of the device to which all its workers add in each pass; with one thread they are 4 \
                       (docs/notes/streams.md).";

/// The goals that compare a row with another one, run by run: the threads, the work, the section,
/// the rows, whether more is better, the bound, why it is open.
type Compared = (usize, &'static str, &'static str, [&'static str; 2], bool, f64, &'static str);

const COMPARED: [Compared; 16] = [
    (1, "time of a segment", SECTION, ["ours", "smoltcp"], false, 0.7, TURNS),
    (1, "time of a request", REQUESTS, ["ours", "smoltcp"], false, 1.0, REQUEST),
    (2, "CPU time of a segment", "cost of a segment", ["ours", "smoltcp"], false, 1.0, TURNS),
    (2, "without offloads", "bulk: throughput", ["ours_sleeping", "smoltcp_sleeping"], true, 1.25, DEVICE),
    (2, "without offloads", "bulk: throughput", ["ours_polling", "smoltcp_polling"], true, 1.1, DEVICE),
    (2, "no segmentation", CHECKSUMS, ["ours_sleeping", "smoltcp_sleeping"], true, 1.5, DEVICE),
    (2, "no segmentation", CHECKSUMS, ["ours_polling", "smoltcp_polling"], true, 1.5, DEVICE),
    (2, "no segmentation", CHECKSUMS, ["ours_sleeping", "kernel_veth_sleeping"], true, 4.0, SLEEPS),
    (2, "no segmentation", CHECKSUMS, ["ours_polling", "kernel_veth_polling"], true, 4.0, POLLS),
    (2, "a gigabyte without offloads", "bulk: CPU", ["ours_sleeping", "kernel_veth_sleeping"], false, 0.3, SMALL),
    (2, "a gigabyte of 64 KB", "bulk with offloads: CPU", ["ours_sleeping", "kernel_veth_sleeping"], false, 0.5, LARGE),
    (2, "a request and its answer", "requests: median", ["ours_polling", "smoltcp_polling"], false, 1.0, REQUEST),
    (2, "opened, served and closed", http::SECTION, ["ours_sleeping", "kernel_veth_sleeping"], false, 0.333, HTTP),
    (1, "a request", "memcached: CPU of the server", ["ours", "debian"], true, 1.3, TAP),
    (1, "a request", "memcached: CPU of both sides", ["ours", "debian"], true, 1.1, TAP),
    (1, "a request", "memcached: CPU in user mode", ["ours", "debian"], false, 0.5, USER),
];

/// The section of bulk with checksum offload.
const CHECKSUMS: &str = "bulk with checksum offload: throughput";

/// All goals.
pub(super) fn goals(rows: &[Row], percpu: &str) -> Vec<Goal> {
    // The value of one row divided by that of another, run by run.
    let ratio = |section, over: &str, under: &str| {
        let row = |name: &str| Which::named(name).section(section);
        ratio(rows, &row(over), &row(under))
    };
    let mut targets = Vec::new();
    for (threads, work, section, [over, under], more, bound, why) in COMPARED {
        let sign = if more { ">=" } else { "<=" };
        let what = format!("{section}: {work}: {over} / {under} {sign} {bound}");
        let target = if more { Target::least } else { Target::most };
        targets.push(target(threads, what, ratio(section, over, under), "x", bound).open(why));
    }
    let [to, from] = ["ours_to_kernel_sleeping", "kernel_to_ours_sleeping"]
        .map(|name| ratio("bulk with offloads: CPU", name, "kernel_taps_sleeping"));
    let what =
        "bulk with offloads: CPU: a gigabyte to and from the kernel behind a tap: mean / kernel_taps_sleeping <= 0.6";
    targets.push(Target::most(2, what, mean(to, from), "x", 0.6).open(BEHIND));
    let row = |name| Which::named(name).section(threads::SECTION);
    // The gain of one row over that of another is the growth of the second one's time over that of
    // the first one's.
    let gain = growth(rows, &row("plain"), &row("ours"), 1, 2);
    let what = format!("{}: gain of two threads over one: ours / plain >= 0.9", threads::SECTION);
    targets.push(Target::least(2, what, gain, "x", 0.9).open(THREADS));
    for section in ["requests: median", "requests: 99 % are faster"] {
        let value = ratio(section, "ours_polling", "kernel_veth_polling");
        targets.push(Target::most(2, format!("{section}: ours_polling / kernel_veth_polling <= 1"), value, "x", 1.0));
    }
    evaluate(targets, percpu)
}

/// The mean of two ratios, which were measured in the same runs.
fn mean(one: Value, other: Value) -> Value {
    let (one, other) = (one?, other?);
    let mean = |of: fn(&Spread) -> f64| f64::midpoint(of(&one), of(&other));
    Ok(Spread { median: mean(|s| s.median), min: mean(|s| s.min), max: mean(|s| s.max) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::{measured, row};
    use crate::report::Head;

    #[test]
    fn a_second_thread_gains_as_much_as_the_limit() {
        let row = |name: &str, threads, value| {
            row(Head { name: name.into(), section: threads::SECTION, threads, ..Head::default() }, &[value])
        };
        // A thread is as fast as if it were alone, and a thread of the limit has half its speed.
        let rows = [row("ours", 1, 300.0), row("ours", 2, 300.0), row("plain", 1, 2.0), row("plain", 2, 4.0)];
        assert_eq!(measured(&goals(&rows, "rseq")), [(2, 2.0, true)]);
        let rows = [row("ours", 1, 300.0), row("ours", 2, 600.0), row("plain", 1, 2.0), row("plain", 2, 2.0)];
        assert_eq!(measured(&goals(&rows, "rseq")), [(2, 0.5, false)]);
    }

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
