//! The report with charts: one file that loads nothing.

use crate::chart::{self, Line};
use crate::error::BenchError;
use crate::report::{Report, Row};
use crate::table::{self, Grid};
use netmem_measure::arguments::BadArgument;
use netmem_measure::output::Target;
use netmem_measure::stats::Spread;
use netmem_measure::units;
use std::fmt::Write as _;
use std::path::Path;

/// The HTML file, which is written when everything is measured. It is replaced atomically: a reader
/// sees either the old file or the complete new one.
#[derive(Debug)]
pub(crate) struct Html(Target);

impl Html {
    /// Checks that the file can be written, and changes nothing.
    pub(crate) fn new(path: &Path) -> Result<Self, BadArgument> {
        Target::new(path).map(Self).or_else(|error| {
            BadArgument::new(format!(
                "--html {}: {error}; give a file in a directory that exists and can be written to",
                path.display()
            ))
        })
    }

    pub(crate) fn write(self, reports: &[Report]) -> Result<(), BenchError> {
        let page = page(reports)?;
        let path = self.0.path().to_owned();
        self.0.write(page.as_bytes()).map_err(|source| BenchError::Html { path, source })
    }
}

/// At 400 pixels lines wrap, charts shrink by a little, and wide tables scroll by themselves.
const STYLE: &str = "\
    body{font:16px/1.5 sans-serif;max-width:60rem;margin:0 auto;padding:1rem;color:#222;background:#fff}\
    h1{font-size:1.5rem;margin-top:3rem}h2{font-size:1.15rem;margin-top:2rem}h1,h2,p,li,dd{overflow-wrap:anywhere}\
    a{color:#0050a0}nav ul{padding-left:1.2rem;margin:.3rem 0}dt{font-weight:bold}dd{margin:0 0 .5rem 1rem}\
    .charts{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;max-width:100%}svg{max-width:100%;height:auto}\
    .key{list-style:none;padding:0;margin:0;display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.85rem}\
    .key span{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem}\
    .scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}\
    th,td{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top;white-space:nowrap}\
    @media(max-width:40rem){th,td{white-space:normal;padding-right:.5rem}}th.n,td.n{text-align:right}tbody tr:nth-child(odd){background:#f4f4f4}\
    .goals{list-style:none;padding:0}.goals li{margin:.3rem 0}.goals b{display:inline-block;min-width:4.5rem}\
    .reached{color:#00694d}.missed{color:#b03a00}.open,.skipped,.not-run{color:#666}.note{font-size:.85rem;color:#444}";

const LEGEND: &str = "<h2 id=\"legend\">Legend</h2>\n<dl>\n\
    <dt>Point, bar</dt><dd>The median of runs that took turns, the order reversed from run to run.</dd>\n\
    <dt>Whisker, (min..max)</dt><dd>The least and the most of the runs.</dd>\n\
    <dt>Colours</dt><dd>Each chart of lines has its key below it. The vertical axis of lines is logarithmic.</dd>\n\
    <dt>x NAME</dt><dd>How many times as fast as the row NAME of as many threads, run by run.</dd>\n\
    <dt>tsc</dt><dd>Ticks of the time stamp counter.</dd>\n\
    <dt>of 10G, of 100G</dt><dd>Share of the time from one 64-byte frame to the next at 10 and at 100 Gbit/s.</dd>\n\
    <dt>Goals</dt><dd>Names stand for the rows' values, with one thread where it says x1. The median of the runs' ratios is \
    compared with the bound: a target is <b class=\"reached\">reached</b> or <b class=\"missed\">missed</b>, a goal that is not \
    reached yet is <b class=\"open\">open</b>; \
    <b class=\"skipped\">skipped</b>: a row that the goal needs could not be measured; <b class=\"not-run\">not run</b>: it was \
    not asked for.</dd>\n</dl>\n";

fn page(reports: &[Report]) -> Result<String, BenchError> {
    let suites: Vec<_> = reports.iter().map(|report| report.suite).collect();
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>netmem-bench {}</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>netmem-bench {}</h1>\n{}{LEGEND}",
        escape(&suites.join(" ")),
        escape(&suites.join(" ")),
        contents(reports),
    );
    for report in reports {
        out.push_str(&chapter(report)?);
    }
    out.push_str("</body>\n</html>\n");
    Ok(out)
}

/// Links to all suites and sections of the page.
fn contents(reports: &[Report]) -> String {
    let mut out = "<nav>\n<h2>Contents</h2>\n<ul>\n<li><a href=\"#legend\">Legend</a></li>\n".to_owned();
    for report in reports {
        let suite = escape(report.suite);
        let _ = writeln!(out, "<li><a href=\"#{suite}\">netmem-bench {suite}</a>\n<ul>");
        if !report.goals.is_empty() {
            let _ = writeln!(out, "<li><a href=\"#{suite}-goals\">Goals</a></li>");
        }
        for (n, section) in table::sections(&report.variants).iter().enumerate() {
            let _ = writeln!(out, "<li><a href=\"#{suite}-{n}\">{}</a></li>", escape(section));
        }
        out.push_str("</ul>\n</li>\n");
    }
    out + "</ul>\n</nav>\n"
}

/// A suite.
fn chapter(report: &Report) -> Result<String, BenchError> {
    let suite = escape(report.suite);
    let mut out = format!("<h1 id=\"{suite}\">netmem-bench {suite}</h1>\n");
    for line in table::header(report).lines().chain(report.done.lines().lines()).filter(|line| !line.is_empty()) {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(line));
    }
    if !report.goals.is_empty() {
        let _ = writeln!(out, "<h2 id=\"{suite}-goals\">Goals</h2>\n<ul class=\"goals\">");
        for goal in &report.goals {
            let word = table::word(goal);
            let _ = writeln!(
                out,
                "<li><b class=\"{}\">{word}</b> {}, threads: {}: {} ({})</li>",
                word.replace(' ', "-"),
                escape(&goal.goal),
                goal.threads,
                escape(&table::came_to(goal)),
                escape(&goal.percpu),
            );
        }
        out.push_str("</ul>\n");
    }
    for (n, section) in table::sections(&report.variants).iter().enumerate() {
        let rows: Vec<&Row> = report.variants.iter().filter(|row| row.head.section == *section).collect();
        let _ = writeln!(out, "<h2 id=\"{suite}-{n}\">{}</h2>", escape(table::heading(section)));
        let charts = charts(&report.params.threads, &rows)?;
        if !charts.is_empty() {
            let figures: String = charts.iter().map(|chart| format!("<figure>{chart}</figure>\n")).collect();
            let _ = writeln!(out, "<div class=\"charts\">\n{figures}</div>");
        }
        out.push_str(&figures(&Grid::of(&rows)));
        for remark in table::remarks(&rows) {
            let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(&remark));
        }
    }
    Ok(out)
}

/// A table that scrolls separately if it is too wide.
fn figures(grid: &Grid) -> String {
    let line = |cells: &[String], tag: &str| -> String {
        let cell = |(text, number): (&String, &bool)| {
            let class = if *number { " class=\"n\"" } else { "" };
            format!("<{tag}{class}>{}</{tag}>", escape(text))
        };
        format!("<tr>{}</tr>\n", cells.iter().zip(&grid.numbers).map(cell).collect::<String>())
    };
    let rows: String = grid.rows.iter().map(|row| line(row, "td")).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\">\n<table>\n<thead>\n{}</thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n",
        line(&grid.head, "th")
    )
}

/// A row, and its value.
type Figure<'a> = (&'a Row, Spread);

/// The charts of a section. Rows that differ in their number of threads become lines, one chart for
/// each number of counters. Other rows become bars. So do rows with a value of 0, because a
/// logarithmic axis has no 0.
fn charts(threads: &[usize], rows: &[&Row]) -> Result<Vec<String>, BenchError> {
    let measured: Vec<Figure<'_>> = rows.iter().filter_map(|&row| Some((row, row.measured.as_ref()?.value))).collect();
    let Some((first, _)) = measured.first() else { return Ok(Vec::new()) };
    let threads_differ = measured.iter().any(|(row, _)| row.head.threads != first.head.threads);
    if !threads_differ || measured.iter().any(|(_, value)| value.min <= 0.0) {
        // The unit of a bar can differ, as for a read and a pair in the same section.
        let mut pers: Vec<&str> = Vec::new();
        measured.iter().for_each(|(row, _)| {
            if !pers.contains(&row.head.per) {
                pers.push(row.head.per);
            }
        });
        let of = |per: &str| measured.iter().filter(|(row, _)| row.head.per == per).copied().collect::<Vec<_>>();
        return pers.iter().map(|per| bars(&of(per), threads_differ)).collect();
    }
    let mut groups: Vec<(Option<usize>, Vec<Figure<'_>>)> = Vec::new();
    for &(row, value) in &measured {
        match groups.iter_mut().find(|(counters, _)| *counters == row.head.counters) {
            Some((_, rows)) => rows.push((row, value)),
            None => groups.push((row.head.counters, vec![(row, value)])),
        }
    }
    groups.iter().map(|(_, rows)| lines(threads, rows)).collect()
}

/// The title of an axis, and how many base units its unit has. The unit is chosen so that the
/// largest median has few digits.
fn axis(rows: &[Figure<'_>]) -> (String, f64) {
    let Some((first, _)) = rows.first() else { return (String::new(), 1.0) };
    let most = rows.iter().map(|(_, value)| value.median).fold(0.0, f64::max);
    let (factor, unit) = units::scale(most, first.head.unit);
    // A thousand requests have no unit of their own.
    let unit = if matches!(unit, "" | "k" | "M") { format!("{unit} {}", first.head.unit) } else { unit.into() };
    (format!("{} per {} ({})", unit.trim_start(), first.head.per, first.percpu), factor)
}

fn scaled(s: Spread, factor: f64) -> Spread {
    Spread { median: s.median / factor, min: s.min / factor, max: s.max / factor }
}

fn bars(rows: &[Figure<'_>], threads: bool) -> Result<String, BenchError> {
    let (what, factor) = axis(rows);
    let bar = |(row, value): &Figure<'_>| {
        let threads = if threads { format!(" x{}", row.head.threads) } else { String::new() };
        let text = format!("{}{threads}: {}", row.head.name, units::show_spread(value, row.head.unit));
        (text, scaled(*value, factor))
    };
    chart::bars(&what, &rows.iter().map(bar).collect::<Vec<_>>())
}

/// Lines and their key.
fn lines(threads: &[usize], rows: &[Figure<'_>]) -> Result<String, BenchError> {
    let (what, factor) = axis(rows);
    let mut lines: Vec<Line> = Vec::new();
    for (row, value) in rows {
        let Some(at) = threads.iter().position(|&n| n == row.head.threads) else { continue };
        let point = (at, scaled(*value, factor));
        match lines.iter_mut().find(|line| line.name == row.head.name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { name: row.head.name.clone(), points: vec![point] }),
        }
    }
    let key = |(n, line): (usize, &Line)| {
        format!("<li><span style=\"background:{}\"></span>{}</li>", chart::colour(n), escape(&line.name))
    };
    let keys: String = lines.iter().enumerate().map(key).collect();
    let svg = chart::lines(&what, threads, &lines)?;
    Ok(format!("{svg}<figcaption><ul class=\"key\">{keys}</ul></figcaption>"))
}

/// Escapes text for HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
    }
}
