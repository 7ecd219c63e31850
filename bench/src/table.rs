//! The report as text, at most 100 columns wide unless rows were skipped.

use crate::curves::{curves, threads};
use crate::plan::Suite;
use crate::report::{Head, Measured, Report, Row};
use crate::rows::Rows;
use netmem_measure::cpus;
use netmem_measure::goals::{Goal, Kind, Unmet, Verdict};
use netmem_measure::stats::Spread;
use netmem_measure::table::table;
use netmem_measure::units::{digits, show, show_spread};
use std::fmt::Write;

/// The heading of a section: what its rows have in common.
pub(crate) fn heading(section: &str) -> &str {
    match section {
        "get+put" => "A get and a put, in each thread; on one counter, and rotating over 64",
        "guard" => "The guard alone, entered and left",
        "retries" => "How often a get's compare-and-swap is tried again, per get, on one counter",
        "final put" => "The put that ends a count; freeing memory is not in it",
        "layout" => "An object with a count: one thread gets and puts, all others read members",
        "kill" => "Killing a PercpuRef, with so many others alive, while all other threads get and put",
        "memory" => "Memory of a count",
        "one CPU" => "Allocating a page and returning it, in the poll context; and what others do in its place",
        "other CPUs" => "Pages allocated on one CPU and dropped on all others, for each page",
        "shared CPUs" => "The same with 2 or 4 threads that drop, all of them on the second CPU",
        "magazines" => "The same with one thread that drops, by pages in a magazine; 0: pages come back one by one",
        "fragments" => "A page cloned or split, and both parts dropped: on the same CPU, or on others",
        "failed redirect" => "64 frames handed to a target that refuses all of them, and dropped, for each frame",
        "slow path" => "A page by page order: out of the cache, and without one, mapped and unmapped each time",
        "starved" => "An allocation when all pages lie in another CPU's magazine, by pages in one that is full",
        "1 binding, in order" => {
            "A fragment received and its token returned: pages of one binding, one after the other"
        }
        "8 bindings, in order" => "The same, each fragment of the next of eight bindings",
        "1 binding, mixed" => "One binding, pages in an order that is another one each time",
        "8 bindings, mixed" => "Eight bindings, all their pages in an order that is another one each time",
        "token memory" => {
            "Memory for a page, if all of 1 GiB were received once; for a socket with a fragment, of 256 on an 80 GB device"
        }
        "token set-up" => "Until a socket has its first fragment, of 256 that are opened on an 80 GB device",
        "receive: throughput" => {
            "Receiving into device memory, 4 flows of 4 MB messages, as fast as it goes; device on the network's CPU"
        }
        "receive: network" => {
            "CPU time of the network side for a gigabyte received, all at one pace, the device's not counted"
        }
        "receive: application" => "CPU time of the application side, at the same pace",
        "receive: both" => "CPU time of both sides, at the same pace",
        "receive: loss" => "Datagrams that did not reach the application, at full speed and at that pace together",
        "transmit: throughput" => {
            "Sending from device memory, 4 flows of 4 MB messages, as fast as it goes; device on the network's CPU"
        }
        "transmit: network" => {
            "CPU time of the network side for a gigabyte sent, all at one pace, the device's not counted"
        }
        "transmit: application" => "CPU time of the application side, at the same pace",
        "transmit: both" => "CPU time of both sides, at the same pace",
        "transmit: loss" => "Datagrams that the device did not take, at full speed and at that pace together",
        "bulk: throughput" => "TCP, one connection at an MTU of 1500, no offloads: throughput",
        "bulk: CPU" => "CPU time of a gigabyte: all threads of both ends and of what is between them",
        "bulk with offloads: throughput" => "The same with checksum and segmentation offload: throughput",
        "bulk with offloads: CPU" => "CPU time of a gigabyte, with offloads",
        "requests: median" => "64 bytes asked and 64 answered, one request at a time: the median",
        "requests: 99 % are faster" => "The same: 99 of 100 requests are answered in this time",
        "replies: throughput" => {
            "Answers of our server, all clients at one address, by the count of the destination entry; the last beyond the CPUs"
        }
        "replies: gets" => "Gets of the destination entry",
        "replies: retries" => "How often a get's compare-and-swap was tried again, per get",
        "memcached: throughput" => "memcached, 100 get to 1 set, 32 connections: requests a second",
        "memcached: CPU of the server" => "Requests in a second of the server's CPU time",
        "memcached: CPU of both sides" => "Requests in a second of CPU time of server and client together",
        "memcached: CPU in user mode" => "The server's CPU time of a request in user mode, by the kernel's ticks",
        "cost of a segment" => {
            "CPU time by segments of 248 to 1448 bytes, both ends: what a segment costs whatever its length"
        }
        "cost of a byte" => "And what each byte adds",
        "kernel" => "Live XDP frames in the kernel: a 64-byte frame from its page pool, dropped by a program",
        other => other,
    }
}

/// Formats the whole report: machine, sections, goals.
pub(crate) fn render(report: &Report) -> String {
    let mut out = header(report);
    for section in sections(&report.variants) {
        let rows: Vec<&Row> = report.variants.iter().filter(|row| row.head.section == section).collect();
        let remarks: String = remarks(&rows).iter().map(|remark| format!("  {remark}\n")).collect();
        let curves = curve_table(section, &report.variants);
        let _ = writeln!(out, "{}\n{}\n{curves}{remarks}", heading(section), Grid::of(&rows).table());
    }
    if !report.goals.is_empty() {
        let _ = writeln!(out, "Goals (names stand for times; with one thread, where it says x1)");
    }
    for goal in &report.goals {
        let plural = if goal.threads == 1 { "" } else { "s" };
        let _ = writeln!(
            out,
            "{:<7} {} thread{plural}: {}: {} ({})",
            word(goal),
            goal.threads,
            goal.goal,
            came_to(goal),
            goal.percpu
        );
    }
    let unmet = report.unmet();
    if unmet != Unmet::default() {
        let _ = writeln!(out, "{unmet}");
    }
    let _ = writeln!(out, "\n{}", report.done.lines());
    let p = &report.pool;
    if p.allocated > 0 {
        let _ = writeln!(
            out,
            "Pages of all pools: allocated {}, returned {}; mapped {}, unmapped {}; in flight {}, leaked {}",
            p.allocated, p.returned, p.mapped, p.unmapped, p.inflight, p.leaked,
        );
    }
    out
}

/// The medians of a section by the number of threads, with a line end behind each line. Empty if no
/// row was measured with several numbers.
fn curve_table(section: &str, rows: &[Row]) -> String {
    let curves = curves(section, rows);
    let columns = threads(&curves);
    if columns.is_empty() {
        return String::new();
    }
    let head: Vec<String> =
        [String::from("by threads")].into_iter().chain(columns.iter().map(usize::to_string)).collect();
    // The table above has a unit that is a word.
    let number = |value: f64, unit: &str| {
        let text = show(value, unit);
        text.strip_suffix(unit).filter(|_| is_word(unit)).map_or(text.clone(), |number| number.trim_end().to_owned())
    };
    let cells = curves.iter().map(|curve| {
        let value = |n: &usize| curve.points.iter().find(|(threads, _)| threads == n).map(|(_, value)| value.median);
        let values = columns.iter().map(|n| value(n).map_or(String::new(), |value| number(value, curve.row.head.unit)));
        [curve.row.head.name.clone()].into_iter().chain(values).collect()
    });
    table(&head, cells, |column| column > 0) + "\n"
}

/// Whether a unit is a word, such as `retries`, and no symbol.
pub(crate) fn is_word(unit: &str) -> bool {
    !["ns", "b/s", "B", "%", "x"].contains(&unit)
}

/// The verdict on a target. An open goal that is not reached is open.
pub(crate) fn word(goal: &Goal) -> &'static str {
    match (goal.kind, goal.verdict) {
        (Kind::Open, Verdict::Missed) => "open",
        (_, verdict) => verdict.word(),
    }
}

/// The value of a goal, or the reason why there is none.
pub(crate) fn came_to(goal: &Goal) -> String {
    match (&goal.value, &goal.why) {
        (Some(value), _) => show_spread(value, goal.unit),
        (None, why) => why.clone().unwrap_or_default(),
    }
}

/// The chosen rows of the suites, one in each line, with a mark on those that take long.
pub(crate) fn list(suites: &[(Suite, Vec<(Head, bool)>)], rows: &Rows) -> String {
    let chosen = suites.iter().flat_map(|(suite, heads)| {
        let heads = heads.iter().filter(|(head, _)| rows.choose(head));
        heads.map(|(head, long)| {
            let long = if *long { "long" } else { "" };
            [suite.name(), head.section, &head.name, &head.threads.to_string(), long].map(String::from).into()
        })
    });
    table(&["suite", "section", "row", "threads", ""], chosen, |_| false)
}

/// The plan and the machine, in two lines.
pub(crate) fn header(report: &Report) -> String {
    let (m, p) = (&report.machine, &report.params);
    let plural = |n: u64| if n == 1 { "" } else { "s" };
    let threads = p.threads.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let mut used = p.cpus.clone();
    used.sort_unstable();
    format!(
        "netmem {} · {} CPU{} ({} used) · Linux {} · percpu {} · huge pages {}\n\
         suite {} · threads {threads} · {} run{} of {} s\n\n",
        report.netmem,
        m.cpus,
        plural(m.cpus as u64),
        cpus::list(&used),
        m.kernel,
        m.percpu,
        m.hugepages,
        report.suite,
        p.runs,
        plural(p.runs.into()),
        p.duration_s,
    )
}

/// Sections, in the order of their first rows.
pub(crate) fn sections(rows: &[Row]) -> Vec<&'static str> {
    rows.iter().fold(Vec::new(), |mut seen, row| {
        if !seen.contains(&row.head.section) {
            seen.push(row.head.section);
        }
        seen
    })
}

/// The figures of a section as text, for tables of any kind.
pub(crate) struct Grid {
    pub(crate) head: Vec<String>,
    /// Which columns contain numbers.
    pub(crate) numbers: Vec<bool>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Grid {
    fn table(self) -> String {
        let Self { head, numbers, rows } = self;
        table(&head, rows, |column| numbers[column])
    }

    pub(crate) fn of(rows: &[&Row]) -> Self {
        let shown = Shown::of(rows);
        let value = rows.first().map_or(String::new(), |row| match row.head.unit {
            "B" => "memory".into(),
            "ns" => "time (min..max)".into(),
            "b/s" => "rate (min..max)".into(),
            unit => format!("{unit} (min..max)"),
        });
        let mut head = vec!["variant".into(), "threads".into(), value];
        head.extend(shown.tsc.then(|| "tsc".into()));
        head.extend(shown.packet.then(|| ["of 10G", "of 100G"].map(String::from)).into_iter().flatten());
        head.extend(shown.versus.map(|base| format!("x {base}")));
        let mut numbers = vec![true; head.len()];
        numbers[0] = false;
        let figures = head.len();
        if !shown.packet {
            head.push("percpu".into());
            numbers.push(false);
        }
        let cells = |row: &&Row| {
            let mut cells = vec![row.head.name.clone(), row.head.threads.to_string()];
            match &row.measured {
                Some(m) => cells.extend(self::figures(row, m, &shown)),
                None if row.skipped.is_some() => cells.push("skipped".into()),
                None => cells.push("no run".into()),
            }
            cells.resize(figures, String::new());
            cells.extend((!shown.packet).then(|| row.percpu.clone()));
            cells
        };
        Self { head, numbers, rows: rows.iter().map(cells).collect() }
    }
}

/// Columns that a section has.
struct Shown {
    tsc: bool,
    packet: bool,
    versus: Option<&'static str>,
}

impl Shown {
    fn of(rows: &[&Row]) -> Self {
        let measured = || rows.iter().filter_map(|row| row.measured.as_ref());
        Self {
            tsc: measured().any(|m| m.tsc.is_some()),
            packet: measured().any(|m| m.packet.is_some()),
            versus: measured().find_map(|m| Some(m.versus?.base)),
        }
    }
}

fn figures(row: &Row, m: &Measured, shown: &Shown) -> Vec<String> {
    let value = if row.head.unit == "B" { show(m.value.median, "B") } else { show_spread(&m.value, row.head.unit) };
    let mut cells = vec![value];
    if shown.tsc {
        cells.push(m.tsc.map_or(String::new(), |s| digits(s.median)));
    }
    if shown.packet {
        let percent = |p: f64| if p < 10.0 { format!("{p:.1} %") } else { format!("{p:.0} %") };
        let shares = m.packet.map(|p| [p.budget_10g_pct, p.budget_100g_pct].map(percent));
        cells.extend(shares.unwrap_or_default());
    }
    if shown.versus.is_some() {
        cells.push(m.versus.map_or(String::new(), |v| bare(&v.ratio)));
    }
    cells
}

/// Why rows are missing, and the remarks on the rows that are not. Each remark is printed once,
/// with the rows that it is about.
pub(crate) fn remarks(rows: &[&Row]) -> Vec<String> {
    let mut said: Vec<(String, Vec<String>)> = Vec::new();
    for row in rows {
        let skipped = row.skipped.as_ref().map(|why| format!("skipped: {why}"));
        for what in skipped.into_iter().chain(row.note.as_ref().map(|note| format!("note: {note}"))) {
            match said.iter_mut().find(|(said, _)| *said == what) {
                Some((_, names)) if names.contains(&row.head.name) => {}
                Some((_, names)) => names.push(row.head.name.clone()),
                None => said.push((what, vec![row.head.name.clone()])),
            }
        }
    }
    said.into_iter().map(|(what, names)| format!("{what} ({})", names.join(", "))).collect()
}

/// A ratio and its range.
pub(crate) fn bare(s: &Spread) -> String {
    format!("{} ({}..{})", digits(s.median), digits(s.min), digits(s.max))
}
