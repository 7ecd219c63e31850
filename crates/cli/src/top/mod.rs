//! `netmem top`: the figures of a running command that has `--metrics`, and how fast they grow.
//!
//! [`figures`] fetches and reads them, and [`screen`] shows them on a terminal. Without a terminal,
//! `--once` prints a table or JSON.

mod figures;
mod screen;

use crate::args::TopArgs;
use crate::fetch::Report;
use figures::{Answer, Row};
use netmem_measure::arguments::BadArgument;
use netmem_measure::output;
use netmem_measure::table::table;
use netmem_measure::units::digits;
use serde::Serialize;
use std::io::{IsTerminal, stdin, stdout};

/// The figures of `--once --json`.
#[derive(Serialize)]
struct Rows {
    rows: Vec<Row>,
}

/// Shows figures until the user has enough, or once.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<()> {
    if !args.once {
        if !stdout().is_terminal() || !stdin().is_terminal() {
            return BadArgument::new("top: standard input or output is no terminal; add --once")?;
        }
        return screen::run(args);
    }
    let before = Answer::fetch(args.address)?;
    std::thread::sleep(args.interval);
    let now = Answer::fetch(args.address)?;
    let rows = now.rows(Some(&before), args.sort);
    if args.json {
        return Ok(output::json(&Report::new("top", now.since(&before), Rows { rows }))?);
    }
    Ok(output::print(&table(&HEAD, rows.iter().map(|row| cells(row).to_vec()), |column| column >= 2))?)
}

const HEAD: [&str; 4] = ["figure", "labels", "value", "a second"];

/// A row of the table.
fn cells(row: &Row) -> [String; 4] {
    let number = |value: f64| if value.fract() == 0.0 { format!("{value:.0}") } else { digits(value) };
    [row.name.clone(), row.labels(), number(row.value), row.per_s.map(digits).unwrap_or_default()]
}
