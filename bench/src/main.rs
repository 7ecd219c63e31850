//! The benchmarks of netmem: parts of it, measured with what they replace.
//!
//! [`plan`] checks the arguments. A suite ([`suites`]) is a list of benchmarks, each of which
//! measures one thing once. [`rounds`] measures all benchmarks in turns. [`harness`] has the
//! threads, [`peer`] the programs in C, [`rows`] the choice of rows, [`goals`] the values that
//! goals compare, and [`curves`] the values by the number of threads. [`table`], [`html`] and
//! [`report`] show the results, [`results`] writes them to a file, and [`render`] makes the tables
//! of the documents of such files. [`against`] compares two builds.
//!
//! Exit status: 0 done, 1 the run failed, 2 bad arguments, 130 interrupted (128 and the signal's
//! number).

mod accounting;
mod against;
mod args;
mod curves;
mod error;
mod goals;
mod harness;
mod html;
mod peer;
mod plan;
mod render;
mod report;
mod results;
mod rounds;
mod rows;
mod run;
mod suites;
mod table;
mod timing;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    netmem_measure::program::run(|| match &cli.command {
        Some(Command::Render(args)) => render::run(args),
        None => run::run(&cli.suites),
    })
}
