//! The report with charts: one file that loads nothing and needs no script.
//!
//! [`summary`] comes first, then a [`chapter`] for each suite. [`chart`] draws values over an
//! [`axis`], [`curves`] shows values by the number of threads, and [`goals`] shows how far goals
//! are reached. The page is written with maud, which escapes text and closes elements when the
//! program is compiled.

mod axis;
mod chapter;
mod chart;
mod curves;
mod goals;
mod summary;

use crate::error::BenchError;
use crate::plan::Suite;
use crate::report::Report;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use netmem_measure::arguments::BadArgument;
use netmem_measure::output::Target;
use std::path::Path;

/// Light and dark, from the width of a telephone on.
const STYLE: &str = include_str!("style.css");

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

    /// Writes the reports. `without` are the planned suites that have none.
    pub(crate) fn write(self, reports: &[Report], without: &[Suite]) -> Result<(), BenchError> {
        let path = self.0.path().to_owned();
        self.0
            .write(page(reports, without).into_string().as_bytes())
            .map_err(|source| BenchError::Html { path, source })
    }
}

fn page(reports: &[Report], without: &[Suite]) -> Markup {
    let suites: Vec<_> = reports.iter().map(|report| report.suite).collect();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "netmem-bench " (suites.join(" ")) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    (summary::summary(reports, without))
                    @for report in reports { (chapter::chapter(report)) }
                }
            }
        }
    }
}

/// A number of threads as text.
fn threads(n: usize) -> String {
    format!("{n} thread{}", if n == 1 { "" } else { "s" })
}

/// A text that begins with a capital letter.
fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
