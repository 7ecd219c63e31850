//! The summary at the beginning of the page: what was reached, and what a reader must not miss.

use super::goals::{Count, class, headline};
use crate::plan::Suite;
use crate::report::Report;
use crate::table;
use maud::{Markup, html};
use netmem_measure::goals::{Goal, Kind, Verdict};
use netmem_measure::load::CpuTime;

/// Title, headline, warnings, missed targets, and a link to each suite. `without` are the planned
/// suites that have no report.
pub(super) fn summary(reports: &[Report], without: &[Suite]) -> Markup {
    let goals = || reports.iter().flat_map(|report| &report.goals);
    let all: Vec<&Goal> = goals().collect();
    let (verdict, text) = headline(all.iter().copied());
    html! {
        header {
            h1 { "Netmem benchmarks" }
            @if let Some(report) = reports.first() { p.machine { (machine(report)) } }
            p.headline.(verdict) { (text) }
        }
        section #summary {
            (tiles(reports, &all))
            (warnings(reports, without))
            @let missed: Vec<_> = reports.iter().flat_map(missed).collect();
            @if !missed.is_empty() {
                h2 { "Missed targets" }
                ul.missed-targets { @for (suite, goal) in missed {
                    li {
                        a href={ "#" (suite) "-goals" } { (suite) } ": " (goal.goal) ", " (super::threads(goal.threads)) ": "
                        b.missed { (table::came_to(goal)) }
                    }
                } }
            }
            h2 { "Suites" }
            nav.cards { @for report in reports { (card(report)) } }
            (legend())
        }
    }
}

/// What was measured where, in a line.
fn machine(report: &Report) -> Markup {
    let machine = &report.machine;
    html! {
        (machine.cpu) ", " (machine.cpus) " CPU" @if machine.cpus != 1 { "s" } " · Linux " (machine.kernel) " · " (report.date)
        @if let Some(commit) = &report.commit { " · " code { (short(commit)) } }
    }
}

/// The first digits of a commit, and whether the sources were changed since.
pub(super) fn short(commit: &str) -> String {
    let (id, dirty) = commit.split_once('-').map_or((commit, ""), |(id, _)| (id, ", changed since"));
    format!("{}{dirty}", id.get(..12).unwrap_or(id))
}

fn tiles(reports: &[Report], goals: &[&Goal]) -> Markup {
    let [targets, open] = [Kind::Target, Kind::Open].map(|kind| Count::of(goals.iter().copied(), kind));
    let rows = || reports.iter().flat_map(|report| &report.variants);
    let measured = rows().filter(|row| row.measured.is_some()).count();
    let tile = |class: &str, number: String, what: &str| html! { li class=(class) { b { (number) } span { (what) } } };
    html! {
        ul.tiles {
            (tile("reached", format!("{} of {}", targets.reached, targets.measured()), "targets reached"))
            (tile(if targets.missed > 0 { "missed" } else { "none" }, targets.missed.to_string(), "targets missed"))
            (tile("open", format!("{} of {}", open.reached, open.measured()), "open goals reached"))
            (tile("none", (targets.none + open.none).to_string(), "goals without a value"))
            (tile("none", format!("{measured} of {}", rows().count()), "rows measured"))
        }
    }
}

/// Whatever makes the figures doubtful.
fn warnings(reports: &[Report], without: &[Suite]) -> Markup {
    let named = |of: fn(&Report) -> bool| -> String {
        reports.iter().filter(|report| of(report)).map(|report| report.suite).collect::<Vec<_>>().join(", ")
    };
    let interrupted = named(|report| report.done.interrupted);
    let without = without.iter().map(|suite| suite.name()).collect::<Vec<_>>().join(", ");
    let fewer = fewer_runs(reports);
    let disturbed = named(|report| report.done.cpu_time.as_ref().is_some_and(CpuTime::disturbed));
    html! {
        @if !interrupted.is_empty() {
            p.warning { b { "Warning: " } (interrupted) " was interrupted: the figures are of the runs until then." }
        }
        @if !without.is_empty() {
            p.warning { b { "Warning: " } "planned and not run: " (without) "." }
        }
        @if !fewer.is_empty() {
            p.warning {
                b { "Warning: " } "fewer runs were made than planned: " (fewer)
                ". The fewer runs there are, the less certain are their median and their range."
            }
        }
        @if !disturbed.is_empty() {
            p.warning {
                b { "Warning: " } "other programs or the hypervisor used the CPUs during " (disturbed)
                ". Compare only figures of the same run, and repeat the measurement on a quiet machine."
            }
        }
    }
}

/// The suites of which a row has fewer runs than planned, with the numbers.
fn fewer_runs(reports: &[Report]) -> String {
    let fewer = |report: &Report| {
        let (least, most) = report.runs()?;
        let planned = report.params.runs;
        let runs = if least == most { least.to_string() } else { format!("{least} to {most}") };
        (least < planned as usize).then(|| format!("{} {runs} of {planned}", report.suite))
    };
    reports.iter().filter_map(fewer).collect::<Vec<_>>().join(", ")
}

fn missed(report: &Report) -> impl Iterator<Item = (&str, &Goal)> {
    let missed = |goal: &&Goal| goal.kind == Kind::Target && goal.verdict == Verdict::Missed;
    report.goals.iter().filter(missed).map(|goal| (report.suite, goal))
}

/// A suite in short.
fn card(report: &Report) -> Markup {
    let (verdict, text) = headline(&report.goals);
    let sections = table::sections(&report.variants);
    html! {
        article.card {
            h3 { a href={ "#" (report.suite) } { (report.suite) } }
            p { (report.question) }
            p class={ "short " (class(verdict)) } { (text) }
            details {
                summary { (sections.len()) " section" @if sections.len() != 1 { "s" } }
                ul {
                    @for (n, section) in sections.iter().enumerate() {
                        li { a href={ "#" (report.suite) "-" (n) } { (section) } }
                    }
                }
            }
        }
    }
}

fn legend() -> Markup {
    let entries = [
        (
            "Point, number",
            "The median of the runs. All rows of a suite take turns, and the order is reversed from run to run.",
        ),
        ("Error bar, a..b", "The least and the most of the runs."),
        ("Hollow point", "A value of 0."),
        (
            "Axis",
            "It begins at 0. If values differ by more than a factor of 30, it is logarithmic, which the chart says.",
        ),
        (
            "Curves",
            "The median of a row by the number of threads, with the least and the most of the runs. The values of the fewest and of the most \
             threads stand above the curve.",
        ),
        ("x NAME", "How many times as fast as the row NAME with as many threads, run by run."),
        ("tsc", "Ticks of the time stamp counter."),
        ("of 10G, of 100G", "Share of the time from one 64-byte frame to the next at 10 and at 100 Gbit/s."),
        (
            "Goals",
            "A name stands for the value of its row, with one thread where it says x1. The median of the runs' ratios is compared with the \
             bound. A target is reached or missed, and may miss its bound by its margin. An open goal is not reached yet; the reason is \
             next to it. Skipped: a row that the goal needs could not be measured. Not run: a row was not asked for.",
        ),
    ];
    html! {
        details.legend {
            summary { "How to read charts and tables" }
            dl { @for (term, text) in entries { dt { (term) } dd { (text) } } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_short() {
        assert_eq!(short("0123456789abcdef"), "0123456789ab");
        assert_eq!(short("0123456789abcdef-dirty"), "0123456789ab, changed since");
        assert_eq!(short(""), "");
    }
}
