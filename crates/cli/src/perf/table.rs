//! The report for people, within 100 columns.

use super::json::{Measured, PoolReport, Report, Row};
use crate::stats::Change;
use comfy_table::{CellAlignment, Table, presets};
use std::fmt::Write;

/// The whole of it: machine, rows, pools.
pub(crate) fn render(report: &Report) -> String {
    let mut out = header(report);
    let _ = writeln!(out, "{}", rows(report));
    if let Some((row, change)) =
        report.variants.iter().filter_map(|row| row.measured.as_ref()).find_map(|m| Some((m, m.change?)))
    {
        let confidence = change.confidence_pct;
        let _ = writeln!(
            out,
            "change: pool over page, median of {} interleaved pairs [interval, {confidence} % confidence]",
            row.runs
        );
    }
    if let Some(link) = &report.link {
        let _ = writeln!(out, "{link}");
    }
    for (name, pool) in [("page pool", &report.pool), ("page per packet", &report.page)] {
        if pool.allocated > 0 || !pool.errors.is_empty() {
            let _ = writeln!(out, "{}", books(name, pool));
        }
    }
    out
}

fn header(report: &Report) -> String {
    let (m, p) = (&report.machine, &report.params);
    let cpus = p.cpus.iter().map(|(role, cpu)| format!("{role} {cpu}")).collect::<Vec<_>>().join(", ");
    let plural = if m.cpus == 1 { "" } else { "s" };
    let port = p.port.as_ref().map(|port| format!(", port {port}")).unwrap_or_default();
    format!(
        "netmem {} · {} CPU{plural} ({cpus}) · Linux {} · percpu {} · huge pages {}\n\
         device {}{port} · xdp {} · ring {} · {} run{} of {} s\n\n",
        report.netmem,
        m.cpus,
        m.kernel,
        m.percpu,
        m.hugepages,
        p.device,
        p.xdp,
        p.ring,
        p.runs,
        if p.runs == 1 { "" } else { "s" },
        p.duration_s,
    )
}

fn rows(report: &Report) -> Table {
    let counts = report.params.port.as_ref().is_some_and(|port| port != "gen");
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let mut head = vec!["variant", "alloc", "drop", "q", "Mpps (min..max)", "Gb/s", "ns drv", "ns dev"];
    head.push(if counts { "frames, bytes, drops" } else { "change" });
    table.set_header(head);
    let mut above: Option<&Row> = None;
    for row in &report.variants {
        table.add_row(cells(row, above, counts));
        above = Some(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if (3..8).contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn cells(row: &Row, above: Option<&Row>, counts: bool) -> Vec<String> {
    let mut cells = vec![row.name.clone(), row.alloc.into(), row.consumer.into(), row.queues.to_string()];
    let Some(m) = &row.measured else {
        cells.extend(["skipped", "", "", "", ""].map(String::from));
        return cells;
    };
    let mpps = |pps: f64| pps / 1e6;
    cells.push(format!("{:.2} ({:.2}..{:.2})", mpps(m.rate.median), mpps(m.rate.min), mpps(m.rate.max)));
    cells.push(format!("{:.1}", m.gbps));
    cells.push(format!("{:.1}", m.ns_per_packet));
    cells.push(m.device_ns_per_packet.map_or("-".into(), |ns| format!("{ns:.1}")));
    cells.push(if counts {
        format!("{} {} {}", m.frames, m.bytes, m.dropped)
    } else {
        change(m, above.and_then(|row| row.measured.as_ref()))
    });
    cells
}

/// Rate on the pool's row, driver time on the row below it, which is what both are compared with.
fn change(m: &Measured, above: Option<&Measured>) -> String {
    let show = |what, c: Change| {
        let [low, high] = c.interval;
        format!("{what} {:+.0} % [{low:+.0}..{high:+.0}]", c.median_pct)
    };
    match (m.change, above.and_then(|m| m.ns_change)) {
        (Some(change), _) => show("pps", change),
        (None, Some(change)) => show(" ns", change),
        (None, None) => String::new(),
    }
}

fn books(name: &str, pool: &PoolReport) -> String {
    let errors = pool.errors.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", ");
    format!(
        "{name}: allocated {}, returned {}, mapped {}, unmapped {}, in flight {}, leaked {}, errors {}",
        pool.allocated,
        pool.returned,
        pool.mapped,
        pool.unmapped,
        pool.inflight,
        pool.leaked,
        if errors.is_empty() { "none" } else { &errors },
    )
}
