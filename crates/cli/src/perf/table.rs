//! The report as text, at most 100 columns wide.

use super::compare;
use super::json::{Report, Row};
use netmem_measure::goals::Unmet;
use netmem_measure::report::PoolReport;
use netmem_measure::stats::Change;
use netmem_measure::table::table;
use netmem_measure::units::{show, show_spread};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Formats the whole report: machine, rows, pools.
pub(crate) fn render(report: &Report) -> String {
    let mut out = header(report);
    let _ = writeln!(out, "{}", rows(report));
    let sockets: BTreeSet<_> = report.variants.iter().flat_map(|row| &row.sockets).collect();
    for socket in sockets {
        let _ = writeln!(out, "AF_XDP: {socket}");
    }
    if let Some(first) = report.comparisons.first() {
        let Change { confidence_pct, .. } = first.rate;
        let _ = writeln!(out, "\n{}", compare::render(&report.comparisons));
        let _ = writeln!(out, "medians of interleaved pairs [interval, {confidence_pct} % confidence]");
        let unmet = report.unmet();
        if unmet != Unmet::default() {
            let _ = writeln!(out, "{unmet}");
        }
        out.push('\n');
    }
    if let Some(link) = &report.link {
        let _ = writeln!(out, "{link}");
    }
    let _ = writeln!(out, "{}", report.done.lines());
    for (name, pool) in
        [("page pool", &report.pool), ("page per packet", &report.page), ("page fragments", &report.frags)]
    {
        if pool.allocated > 0 || !pool.errors.is_empty() {
            let _ = writeln!(out, "{}", accounting(name, pool));
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

fn rows(report: &Report) -> String {
    let counts = report.params.port.as_ref().is_some_and(|port| port != "gen");
    let mut head = vec!["variant", "alloc", "drop", "q", "packets/s (min..max)", "bits/s", "driver", "device"];
    if counts {
        head.push("frames, bytes, drops");
    }
    table(&head, report.variants.iter().map(|row| cells(row, counts)), |column| (3..8).contains(&column))
}

fn cells(row: &Row, counts: bool) -> Vec<String> {
    let mut cells = vec![row.name.clone(), row.alloc.to_string(), row.consumer.to_string(), row.queues.to_string()];
    let Some(m) = &row.measured else {
        let why = if row.skipped.is_some() { "skipped" } else { "no run" };
        cells.extend([why, "", "", "", ""].map(String::from));
        return cells;
    };
    cells.push(show_spread(&m.rate, "packets/s"));
    cells.push(show(m.bits_per_s, "b/s"));
    cells.push(show(m.ns_per_packet, "ns"));
    cells.push(m.device_ns_per_packet.map_or("-".into(), |ns| show(ns, "ns")));
    if counts {
        cells.push(format!("{} {} {}", m.frames, m.bytes, m.dropped));
    }
    cells
}

fn accounting(name: &str, pool: &PoolReport) -> String {
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
