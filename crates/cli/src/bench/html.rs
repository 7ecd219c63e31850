//! The report with charts: one file that loads nothing.

use super::chart::{self, Line};
use super::error::BenchError;
use super::report::{Report, Row};
use super::table;
use crate::args::BadArgument;
use crate::stats::Spread;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// A file to be written when all is measured, opened before anything is. What is in it stays until then; a file that was
/// not there before goes if nothing comes of it.
#[derive(Debug)]
pub(crate) struct Html {
    path: PathBuf,
    file: File,
    fresh: bool,
}

impl Html {
    pub(crate) fn create(path: &Path) -> Result<Self, BadArgument> {
        let fresh = !path.exists();
        match OpenOptions::new().write(true).create(true).truncate(false).open(path) {
            Ok(file) => Ok(Self { path: path.to_owned(), file, fresh }),
            Err(error) => BadArgument::new(format!(
                "--html {}: {error}; give a file in a directory that exists and can be written to",
                path.display()
            )),
        }
    }

    pub(crate) fn write(mut self, reports: &[Report]) -> Result<(), BenchError> {
        let page = page(reports)?;
        // What is no regular file, such as a pipe, has no length to be set.
        let regular = self.file.metadata().is_ok_and(|m| m.is_file());
        let cut = if regular { self.file.set_len(0) } else { Ok(()) };
        match cut.and_then(|()| self.file.write_all(page.as_bytes())) {
            Ok(()) => {
                self.fresh = false;
                Ok(())
            }
            Err(source) => Err(BenchError::Html { path: self.path.clone(), source }),
        }
    }
}

impl Drop for Html {
    fn drop(&mut self) {
        if self.fresh {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

const STYLE: &str = "body{font:15px/1.5 sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}\
    pre{overflow-x:auto;font-size:13px;line-height:1.35}svg{max-width:100%;height:auto}h2{margin-top:2em}\
    td{padding:.1em 1em .1em 0;vertical-align:top}.reached{color:#00694d}.missed{color:#b03a00}";

fn page(reports: &[Report]) -> Result<String, BenchError> {
    let suites: Vec<_> = reports.iter().map(|report| report.suite).collect();
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>netmem bench {}</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n",
        escape(&suites.join(" ")),
    );
    for report in reports {
        out.push_str(&chapter(report)?);
    }
    out.push_str("</body>\n</html>\n");
    Ok(out)
}

/// A suite.
fn chapter(report: &Report) -> Result<String, BenchError> {
    let mut out = format!(
        "<h1>netmem bench {suite}</h1>\n<pre>{header}</pre>\n\
         <p>Medians of runs that took turns, the order reversed from run to run; whiskers are the least and the most.</p>\n",
        suite = escape(report.suite),
        header = escape(table::header(report).trim_end()),
    );
    if !report.goals.is_empty() {
        out.push_str("<h2>Goals</h2>\n<p>Names stand for times; with one thread, where it says x1.</p>\n<table>\n");
    }
    for goal in &report.goals {
        let word = if goal.reached { "reached" } else { "missed" };
        let _ = writeln!(
            out,
            "<tr><td class=\"{word}\">{word}</td><td>{}</td><td>threads: {}</td><td>{} {}</td><td>{}</td></tr>",
            escape(&goal.goal),
            goal.threads,
            escape(&table::show(&goal.value)),
            goal.unit,
            escape(&goal.percpu),
        );
    }
    if !report.goals.is_empty() {
        out.push_str("</table>\n");
    }
    for section in table::sections(&report.variants) {
        let rows: Vec<&Row> = report.variants.iter().filter(|row| row.head.section == section).collect();
        let _ = writeln!(out, "<h2>{}</h2>", escape(table::heading(section)));
        for chart in charts(&report.params.threads, &rows)? {
            let _ = writeln!(out, "<figure>{chart}</figure>");
        }
    }
    let _ = writeln!(out, "<h2>All figures</h2>\n<pre>{}</pre>", escape(&table::render(report)));
    Ok(out)
}

/// A section's charts: lines where rows differ in their number of threads, one chart for each number of counters; bars
/// where they do not, or where there are zeros, which a logarithmic axis has no place for.
fn charts(threads: &[usize], rows: &[&Row]) -> Result<Vec<String>, BenchError> {
    let measured: Vec<(&Row, Spread)> =
        rows.iter().filter_map(|&row| Some((row, row.measured.as_ref()?.value))).collect();
    let Some((first, _)) = measured.first() else { return Ok(Vec::new()) };
    let label = |row: &Row| format!("{} per {} ({})", row.head.unit, row.head.per, row.percpu);
    let threads_differ = measured.iter().any(|(row, _)| row.head.threads != first.head.threads);
    let name = |row: &Row| {
        if threads_differ { format!("{} x{}", row.head.name, row.head.threads) } else { row.head.name.clone() }
    };
    if !threads_differ || measured.iter().any(|(_, value)| value.min <= 0.0) {
        // What a bar stands for can differ, as with a read and a pair beside it.
        let mut pers: Vec<&str> = Vec::new();
        measured.iter().for_each(|(row, _)| {
            if !pers.contains(&row.head.per) {
                pers.push(row.head.per);
            }
        });
        let chart = |per: &&str| {
            let of: Vec<_> = measured.iter().filter(|(row, _)| row.head.per == *per).collect();
            let bars: Vec<_> = of.iter().map(|(row, value)| (name(row), *value)).collect();
            of.first().map_or(Ok(String::new()), |(row, _)| chart::bars(&label(row), &bars))
        };
        return pers.iter().map(chart).collect();
    }
    let mut groups: Vec<(Option<usize>, Vec<Line>)> = Vec::new();
    for (row, value) in &measured {
        let Some(at) = threads.iter().position(|&n| n == row.head.threads) else { continue };
        let group = match groups.iter().position(|(counters, _)| *counters == row.head.counters) {
            Some(group) => group,
            None => {
                groups.push((row.head.counters, Vec::new()));
                groups.len() - 1
            }
        };
        let lines = &mut groups[group].1;
        match lines.iter_mut().find(|line| line.name == row.head.name) {
            Some(line) => line.points.push((at, *value)),
            None => lines.push(Line { name: row.head.name.clone(), points: vec![(at, *value)] }),
        }
    }
    groups.iter().map(|(_, lines)| chart::lines(&label(first), threads, lines)).collect()
}

/// Text, as HTML has it.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_written_is_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        std::fs::write(&old, "kept").unwrap();
        drop((Html::create(&old).unwrap(), Html::create(&new).unwrap()));
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "kept");
        assert!(!new.exists());
        let error = Html::create(&dir.path().join("none/x.html")).unwrap_err().to_string();
        assert!(error.contains("none/x.html") && error.contains("directory"), "{error}");
    }

    #[test]
    fn text_stays_text() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
    }
}
