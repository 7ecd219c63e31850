//! A suite: its question, the answer, the machine, the command, the goals, and its sections with a
//! chart and a table each.

use super::chart;
use super::curves::curves;
use super::goals;
use super::summary::short;
use crate::report::{Report, Row};
use crate::table::{self, Grid};
use maud::{Markup, html};
use netmem_measure::cpus;

pub(super) fn chapter(report: &Report) -> Markup {
    let suite = report.suite;
    let (verdict, text) = goals::headline(&report.goals);
    html! {
        section.suite id=(suite) {
            h2 { (suite) }
            p.question { (report.question) }
            p.headline.(verdict) { (text) }
            (facts(report))
            @if !report.goals.is_empty() {
                h3 id={ (suite) "-goals" } { "Goals" }
                (goals::chart(&report.goals))
            }
            @for (n, section) in table::sections(&report.variants).iter().enumerate() {
                @let rows: Vec<&Row> = report.variants.iter().filter(|row| row.head.section == *section).collect();
                h3 id={ (suite) "-" (n) } { (super::capital(table::heading(section))) }
                (chart::charts(&report.params.threads, &rows))
                (curves(&report.params.threads, &crate::curves::curves(section, &report.variants)))
                @for remark in table::remarks(&rows) { p.note { (remark) } }
                (figures(section, &Grid::of(&rows)))
            }
            p.top { a href="#summary" { "To the summary" } }
        }
    }
}

/// The machine, what was done, and the command that does it again.
fn facts(report: &Report) -> Markup {
    let (machine, params, done) = (&report.machine, &report.params, &report.done);
    let mut used = params.cpus.clone();
    used.sort_unstable();
    let threads = params.threads.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let planned = format!("{} of {} ms", params.runs, (params.duration_s * 1e6).round() / 1e3);
    let runs = match report.runs() {
        None => "none".into(),
        Some((least, most)) if least == most => format!("{most} of each row"),
        Some((least, most)) => format!("{least} to {most} of each row"),
    };
    let took = format!("{}, {:.1} s", report.date, done.elapsed_s);
    let entries = [
        ("Machine", format!("{}, {} CPUs ({} used)", machine.cpu, machine.cpus, cpus::list(&used))),
        ("Kernel", format!("Linux {}", machine.kernel)),
        ("Per-CPU data", machine.percpu.clone()),
        ("Huge pages", machine.hugepages.clone()),
        ("Threads", threads),
        ("Runs, planned", planned),
        ("Runs, made", runs),
        ("Measured", took),
        ("Commit", report.commit.as_deref().map_or_else(|| "unknown".into(), short)),
    ];
    let time = done.cpu_time.as_ref().map_or_else(|| "CPU time is not known".into(), ToString::to_string);
    html! {
        dl.facts { @for (term, text) in entries { div { dt { (term) } dd { (text) } } } }
        // A number and its sign stay together.
        @for line in time.lines() { p.note { (line.replace(" %", "\u{a0}%")) } }
        pre.command tabindex="0" aria-label="Command" { code { (report.invocation) } }
    }
}

/// A table that scrolls by itself if it is too wide for the screen.
fn figures(section: &str, grid: &Grid) -> Markup {
    let number = |n: usize| grid.numbers.get(n).copied().unwrap_or_default();
    html! {
        details.table open {
            summary { "Table" }
            div.scroll tabindex="0" role="region" aria-label={ "Table: " (section) } {
                table {
                    thead { tr { @for (n, text) in grid.head.iter().enumerate() {
                        th.n[number(n)] scope="col" { (text) }
                    } } }
                    tbody { @for row in &grid.rows {
                        tr { @for (n, text) in row.iter().enumerate() { td.n[number(n)] { (text) } } }
                    } }
                }
            }
        }
    }
}
