//! The report for people, within 100 columns as long as nothing is missing.

use super::report::{Measured, Report, Row};
use crate::cpus;
use crate::stats::Spread;
use comfy_table::{CellAlignment, Table, presets};
use std::fmt::Write;

/// What a section's rows have in common.
pub(crate) fn heading(section: &str) -> &str {
    match section {
        "get+put" => "A get and a put, in each thread; on one counter, and rotating over 64",
        "guard" => "The guard alone, entered and left",
        "retries" => "How often a get's compare-and-swap is tried again, per get, on one counter",
        "final put" => "The put that ends a count; freeing memory is not in it",
        "layout" => "An object with a count: one thread gets and puts, all others read members",
        "kill" => "Killing a PercpuRef, with so many others alive, while all other threads get and put",
        "memory" => "Memory of a count",
        "one CPU" => "Taking a page and giving it back, in the poll context; and what others do in its place",
        "other CPUs" => "Pages taken on one CPU and dropped on all others, for each page",
        "shared CPUs" => "The same with 2 or 4 threads that drop, all of them on the second CPU",
        "magazines" => "The same with one thread that drops, by pages in a magazine; 0: pages come back one by one",
        "fragments" => "A page cloned or split, and both parts dropped: on the same CPU, or on others",
        "failed redirect" => "64 frames handed to a target that refuses all of them, and dropped, for each frame",
        "slow path" => "A page by page order: out of the cache, and without one, mapped and unmapped each time",
        "starved" => "An allocation when all pages lie in another CPU's magazine, by pages in one that is full",
        "1 binding, in order" => {
            "A fragment received and its token given back: pages of one binding, one after the other"
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
        "kernel" => "Live XDP frames in the kernel: a 64-byte frame from its page pool, dropped by a program",
        other => other,
    }
}

/// The whole of it: machine, sections, goals.
pub(crate) fn render(report: &Report) -> String {
    let mut out = header(report);
    for section in sections(&report.variants) {
        let rows: Vec<&Row> = report.variants.iter().filter(|row| row.head.section == section).collect();
        let _ = writeln!(out, "{}\n{}\n{}", heading(section), table(&rows), remarks(&rows));
    }
    if !report.goals.is_empty() {
        let _ = writeln!(out, "Goals (names stand for times; with one thread, where it says x1)");
    }
    for goal in &report.goals {
        let plural = if goal.threads == 1 { "" } else { "s" };
        let _ = writeln!(
            out,
            "{} {} thread{plural}: {}: {} {} ({})",
            if goal.reached { "reached" } else { "missed " },
            goal.threads,
            goal.goal,
            show(&goal.value),
            goal.unit,
            goal.percpu,
        );
    }
    let p = &report.pool;
    if p.allocated > 0 {
        let _ = writeln!(
            out,
            "\nPages of all pools: allocated {}, returned {}; mapped {}, unmapped {}; in flight {}, leaked {}",
            p.allocated, p.returned, p.mapped, p.unmapped, p.inflight, p.leaked,
        );
    }
    out
}

/// What was measured where, in two lines.
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

fn table(rows: &[&Row]) -> Table {
    let shown = Shown::of(rows);
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let value = rows.first().map_or(String::new(), |row| {
        let spread = if row.head.unit == "B" { "" } else { " (min..max)" };
        format!("{}{spread}", row.head.unit)
    });
    let versus = shown.versus.map_or(String::new(), |base| format!("x {base}"));
    let mut head = vec!["variant", "threads", &value];
    head.extend(shown.tsc.then_some("tsc"));
    head.extend(shown.packet.then_some(["of 10G", "of 100G"]).into_iter().flatten());
    head.extend(shown.versus.map(|_| versus.as_str()));
    head.extend((!shown.packet).then_some("percpu"));
    table.set_header(&head);
    for row in rows {
        let mut cells = vec![row.head.name.clone(), row.head.threads.to_string()];
        match &row.measured {
            Some(m) => cells.extend(figures(row, m, &shown)),
            None => cells.push("skipped".into()),
        }
        cells.resize(head.len() - usize::from(!shown.packet), String::new());
        cells.extend((!shown.packet).then(|| row.percpu.clone()));
        table.add_row(cells);
    }
    let last = head.len() - usize::from(!shown.packet);
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if (1..last).contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
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
    let value = if row.head.unit == "B" { format!("{:.0}", m.value.median) } else { show(&m.value) };
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
        cells.push(m.versus.map_or(String::new(), |v| show(&v.ratio)));
    }
    cells
}

/// Why rows are missing, and what is to be known of those that are not: each reason once, with the rows that it is for.
fn remarks(rows: &[&Row]) -> String {
    let mut said: Vec<(String, Vec<String>)> = Vec::new();
    for row in rows {
        let skipped =
            row.measured.is_none().then(|| format!("skipped: {}", row.skipped.as_deref().unwrap_or("no run")));
        for what in skipped.into_iter().chain(row.note.as_ref().map(|note| format!("note: {note}"))) {
            match said.iter_mut().find(|(said, _)| *said == what) {
                Some((_, names)) if names.contains(&row.head.name) => {}
                Some((_, names)) => names.push(row.head.name.clone()),
                None => said.push((what, vec![row.head.name.clone()])),
            }
        }
    }
    said.into_iter().map(|(what, names)| format!("  {what} ({})\n", names.join(", "))).collect()
}

/// Median and range.
pub(crate) fn show(s: &Spread) -> String {
    format!("{} ({}..{})", digits(s.median), digits(s.min), digits(s.max))
}

/// As many digits as mean something.
fn digits(x: f64) -> String {
    match x.abs() {
        a if a >= 1000.0 => format!("{x:.0}"),
        a if a >= 100.0 => format!("{x:.1}"),
        _ => format!("{x:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_or_so() {
        assert_eq!(digits(0.0), "0.00");
        assert_eq!(digits(3.456), "3.46");
        assert_eq!(digits(345.67), "345.7");
        assert_eq!(digits(34567.8), "34568");
        assert_eq!(show(&Spread { median: 2.0, min: 1.0, max: 123.4 }), "2.00 (1.00..123.4)");
    }
}
