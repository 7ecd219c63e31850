//! The tables, by their names in the documents. Each is of all machines, one after the other.

use super::kperf;
use super::record::{Goal, Machine, Record, Row, Suite};
use super::scaling;
use crate::table;
use anyhow::bail;
use netmem_measure::units::{show, show_spread};
use std::fmt::Write;

/// What a table is made of.
enum Table {
    /// The first of these rows, compared with each of the others; of all suites, or of one.
    Headlines(Option<&'static str>),
    Machines,
    /// TCP with device memory, before and after changes.
    Kperf,
    /// Costs on more CPUs.
    Scaling,
    /// The goals of a kind.
    Goals(&'static str),
    /// All rows of these sections of a suite.
    Rows(&'static str, &'static [&'static str]),
}

/// The table of this name, with a line end behind each line.
pub(super) fn table(name: &str, records: &[Record]) -> anyhow::Result<String> {
    let table = match name {
        "headlines" => Table::Headlines(None),
        "headlines-refs" => Table::Headlines(Some("refs")),
        "headlines-pool" => Table::Headlines(Some("pool")),
        "headlines-streams" => Table::Headlines(Some("streams")),
        "machines" => Table::Machines,
        "kperf" => Table::Kperf,
        "scaling" => Table::Scaling,
        "targets" => Table::Goals("target"),
        "open-goals" => Table::Goals("open"),
        "pool" => {
            Table::Rows("pool", &["one CPU", "other CPUs", "shared CPUs", "every thread", "failed redirect", "kernel"])
        }
        "refs" => Table::Rows("refs", &["get+put", "final put", "layout", "kill"]),
        "tokens" => Table::Rows(
            "tokens",
            &["1 binding, in order", "8 bindings, in order", "1 binding, mixed", "8 bindings, mixed", "token memory"],
        ),
        "devmem" => Table::Rows(
            "devmem",
            &[
                "receive: both",
                "transmit: both",
                "stream receive: both",
                "stream transmit: both",
                "segment received",
                "segment sent",
            ],
        ),
        "streams" => Table::Rows(
            "streams",
            &[
                "bulk: throughput",
                "bulk: CPU",
                "bulk with offloads: throughput",
                "bulk with offloads: CPU",
                "requests: median",
                "requests: 99 % are faster",
                "memcached: CPU of the server",
                "memcached: CPU of both sides",
                "replies: throughput",
            ],
        ),
        name => bail!("there is no table `{name}`; bench/src/render/tables.rs lists them"),
    };
    if records.is_empty() {
        return Ok("No results are committed yet.\n".to_owned());
    }
    // A front page has one table of headlines: of the first machine.
    let records = if matches!(table, Table::Headlines(_)) { &records[..1] } else { records };
    Ok(records.iter().map(|record| table.of(record)).collect::<Vec<_>>().join("\n"))
}

impl Table {
    fn of(&self, record: &Record) -> String {
        match self {
            Self::Headlines(suite) => headlines(record, suite.as_deref()),
            Self::Machines => machine(record),
            Self::Kperf => caption(record) + &kperf::tables(record),
            Self::Scaling => match scaling::table(record) {
                table if table.is_empty() => table,
                table => caption(record) + &table,
            },
            Self::Goals(kind) => caption(record) + &goals(record, kind),
            Self::Rows(suite, sections) => {
                let sections = sections.iter().map(|section| rows(record, suite, section));
                caption(record) + &sections.collect::<String>()
            }
        }
    }
}

fn of_machine(machine: &Machine) -> String {
    let plural = if machine.cpus == 1 { "" } else { "s" };
    format!("{}, {} CPU{plural}, Linux {}", machine.cpu, machine.cpus, machine.kernel)
}

/// A line that names the machine.
fn caption(record: &Record) -> String {
    let Some(suite) = record.suites.first() else { return String::new() };
    format!("*{}*, {}.\n\n", of_machine(&suite.machine), suite.date)
}

fn machine(record: &Record) -> String {
    let mut out = "| suite | date | commit | machine |\n| --- | --- | --- | --- |\n".to_owned();
    for Suite { suite, date, commit, machine, .. } in &record.suites {
        let commit = commit.as_deref().unwrap_or("unknown");
        let end = commit.char_indices().nth(12).map_or(commit.len(), |(at, _)| at);
        let dirty = if commit.ends_with("-dirty") { ", changed" } else { "" };
        let _ = writeln!(out, "| {suite} | {date} | {}{dirty} | {} |", &commit[..end], of_machine(machine));
    }
    out
}

fn goals(record: &Record, kind: &str) -> String {
    let open = kind == "open";
    let mut out = match open {
        true => "| suite | goal | reached | why not |\n| --- | --- | --- | --- |\n".to_owned(),
        false => "| suite | target | reached | |\n| --- | --- | --- | --- |\n".to_owned(),
    };
    for suite in &record.suites {
        for goal in suite.goals.iter().filter(|goal| goal.kind == kind) {
            let plural = if goal.threads == 1 { "" } else { "s" };
            let last = match (open, goal.verdict.as_str()) {
                (true, "reached") => "reached in this run",
                (true, _) => goal.reason.as_deref().unwrap_or_default(),
                (false, verdict) => verdict,
            };
            let (suite, threads) = (&suite.suite, goal.threads);
            let _ = writeln!(out, "| {suite} | {threads} thread{plural}: {} | {} | {last} |", goal.goal, came_to(goal));
        }
    }
    out
}

fn came_to(goal: &Goal) -> String {
    match &goal.value {
        Some(value) => show_spread(value, &goal.unit),
        None => goal.why.clone().unwrap_or_default(),
    }
}

/// The rows of a section, with a column for each number of threads.
fn rows(record: &Record, suite: &str, section: &str) -> String {
    let of = record.suites.iter().filter(|of| of.suite == suite).flat_map(|suite| &suite.variants);
    let rows: Vec<&Row> = of.filter(|row| row.section == section).collect();
    let Some(first) = rows.first() else { return String::new() };
    let mut threads: Vec<usize> = rows.iter().map(|row| row.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    let columns: String = threads.iter().map(|n| format!(" | {n} thread{}", if *n == 1 { "" } else { "s" })).collect();
    let mut out = format!("{}, per {}:\n\n| row{columns} |\n", table::heading(section), first.per);
    let _ = writeln!(out, "| ---{} |", " | ---:".repeat(threads.len()));
    let mut names: Vec<&str> = Vec::new();
    rows.iter().for_each(|row| {
        if !names.contains(&row.name.as_str()) {
            names.push(&row.name);
        }
    });
    for name in names {
        let cell = |n: &usize| match rows.iter().find(|row| row.name == name && row.threads == *n) {
            Some(Row { value: Some(value), unit, .. }) => format!(" | {}", show_spread(value, unit)),
            Some(Row { skipped: Some(_), .. }) => " | skipped".to_owned(),
            _ => " | ".to_owned(),
        };
        let _ = writeln!(out, "| `{name}`{} |", threads.iter().map(cell).collect::<String>());
    }
    out + "\n"
}

/// A headline: what is measured, and the rows that are compared, the one of netmem first.
struct Headline {
    what: &'static str,
    suite: &'static str,
    section: &'static str,
    threads: usize,
    /// Each row and how readers know it.
    rows: &'static [(&'static str, &'static str)],
}

const HEADLINES: [Headline; 8] = [
    Headline {
        what: "allocate and drop a page, in the poll context of its queue",
        suite: "pool",
        section: "one CPU",
        threads: 1,
        rows: &[
            ("in_context", "page pool"),
            ("dpdk_mbuf", "DPDK's mbuf"),
            ("dpdk_mbuf_bulk64", "64 at a time"),
            ("malloc", "malloc"),
        ],
    },
    Headline {
        what: "the same, dropped on another CPU",
        suite: "pool",
        section: "other CPUs",
        threads: 2,
        rows: &[
            ("remote", "page pool"),
            ("dpdk_mbuf_remote", "DPDK's mbuf"),
            ("dpdk_mbuf_remote_bulk", "in bulk"),
            ("locked_ring", "a locked ring"),
            ("malloc_remote", "malloc"),
        ],
    },
    Headline {
        what: "allocate and drop a page, two threads on one pool",
        suite: "pool",
        section: "every thread",
        threads: 2,
        rows: &[
            ("shared", "shared pool"),
            ("dpdk_mempool", "DPDK's mempool"),
            ("array_queue", "ArrayQueue"),
            ("malloc", "malloc"),
        ],
    },
    Headline {
        what: "get and put of a `PercpuRef`, two threads on one count",
        suite: "refs",
        section: "get+put",
        threads: 2,
        rows: &[
            ("percpuref", "PercpuRef"),
            ("rcuref_batched", "our RcuRef"),
            ("refcount", "compare-and-swap"),
            ("arc", "Arc"),
        ],
    },
    Headline {
        what: "receive a fragment of device memory and return its token on another CPU",
        suite: "tokens",
        section: "1 binding, in order",
        threads: 2,
        rows: &[
            ("ranges", "ranges"),
            ("locked_map", "ids under a lock, 16 at a time"),
            ("locked_each", "one at a time"),
        ],
    },
    Headline {
        what: "CPU time of a gigabyte over TCP, no offloads, threads that sleep",
        suite: "streams",
        section: "bulk: CPU",
        threads: 2,
        rows: &[("ours_sleeping", "netmem"), ("kernel_veth_sleeping", "the kernel"), ("smoltcp_sleeping", "smoltcp")],
    },
    Headline {
        what: "64 bytes asked and answered over TCP, threads that poll",
        suite: "streams",
        section: "requests: median",
        threads: 2,
        rows: &[("ours_polling", "netmem"), ("kernel_veth_polling", "the kernel"), ("smoltcp_polling", "smoltcp")],
    },
    Headline {
        what: "memcached: requests in a second of the server's CPU time",
        suite: "streams",
        section: "memcached: CPU of the server",
        threads: 1,
        rows: &[("ours", "netmem"), ("debian", "Debian's memcached")],
    },
];

/// The headlines of a suite, or of all.
fn headlines(record: &Record, only: Option<&str>) -> String {
    let mut out = caption(record) + "| what | netmem | compared with |\n| --- | ---: | --- |\n";
    for Headline { what, suite, section, threads, rows } in HEADLINES {
        if only.is_some_and(|only| only != suite) {
            continue;
        }
        let value =
            |name| record.row(suite, section, name, threads).and_then(|row| Some(show(row.value?.median, &row.unit)));
        let Some((&(own, _), others)) = rows.split_first() else { continue };
        let Some(own) = value(own) else { continue };
        let others: Vec<String> =
            others.iter().filter_map(|(name, known)| Some(format!("{known} {}", value(name)?))).collect();
        let _ = writeln!(out, "| {what} | {own} | {} |", others.join(", "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let row = |name: &str, section: &str, threads: usize, median: f64| {
            serde_json::json!({
                "name": name, "section": section, "threads": threads, "unit": "ns", "per": "page",
                "median": median, "min": median, "max": median
            })
        };
        let goal = |kind: &str, verdict: &str| {
            serde_json::json!({
                "goal": "a / b <= 1", "threads": 1, "unit": "x", "kind": kind, "verdict": verdict, "reason": "slow",
                "value": { "median": 1.5, "min": 1.0, "max": 2.0 }
            })
        };
        let skipped = serde_json::json!({
            "name": "dpdk_mbuf", "section": "one CPU", "threads": 1, "unit": "ns", "per": "page", "skipped": "not installed"
        });
        let variants = [row("in_context", "one CPU", 1, 1.5), row("malloc", "one CPU", 1, 2000.0), skipped];
        serde_json::from_value(serde_json::json!({ "suites": [{
            "suite": "pool", "date": "2026-11-25", "commit": "0123456789abcdef-dirty",
            "machine": { "cpu": "A CPU", "cpus": 2, "kernel": "6.18" },
            "variants": variants, "goals": [goal("target", "reached"), goal("open", "missed")]
        }] }))
        .unwrap()
    }

    #[test]
    fn each_name_has_a_table() {
        let records = [record()];
        let of = |name| table(name, &records).unwrap();
        assert!(of("machines").contains("| pool | 2026-11-25 | 0123456789ab, changed | A CPU, 2 CPUs, Linux 6.18 |"));
        assert!(
            of("targets").contains("| pool | 1 thread: a / b <= 1 | 1.50 x (1.00..2.00) | reached |"),
            "{}",
            of("targets")
        );
        assert!(of("open-goals").ends_with("| 1.50 x (1.00..2.00) | slow |\n"), "{}", of("open-goals"));
        assert!(
            of("pool").contains("| `in_context` | 1.50 ns (1.50..1.50) |\n")
                && of("pool").contains("| `dpdk_mbuf` | skipped |")
        );
        assert!(of("headlines").contains("| 1.50 ns | malloc 2.00 us |"), "{}", of("headlines"));
        for name in ["refs", "tokens", "devmem", "streams"] {
            assert!(!of(name).contains('|'), "{name} has no rows here");
        }
        assert!(table("none", &records).is_err());
    }
}
