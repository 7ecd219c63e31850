//! The command line. Clap checks the syntax; [`crate::plan`] checks the meaning of the arguments
//! before anything starts. Both kinds of errors end with exit status 2.

use clap::{Args, Parser, Subcommand, ValueEnum};
use netmem_measure::arguments::duration;
use std::path::PathBuf;
use std::time::Duration;

/// Measures parts of netmem, and the alternatives that they replace
#[derive(Debug, Parser)]
#[command(name = "netmem-bench", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) suites: SuiteArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Render the tables of the documents from the committed results
    Render(RenderArgs),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct RenderArgs {
    /// Change nothing, and fail (exit status 1) if a table differs from the results
    #[arg(long)]
    pub(crate) check: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct SuiteArgs {
    /// The suites to measure
    #[arg(value_name = "SUITE", required = true)]
    pub(crate) suites: Vec<SuiteArg>,
    /// Numbers of threads, one measurement for each; each thread has its own CPU. In `pool`, one
    /// thread allocates pages and the others drop them; in `tokens`, one receives and the others
    /// return tokens; `devmem` and `streams` ignore this, and use two if there are two CPUs
    /// [default: 1,2,4.. up to the CPUs]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// How long each thread works for one value: seconds, or with a suffix (0.3, 300ms, 2s)
    /// [default: 12ms; streams: 150ms]
    #[arg(long, value_name = "SECS", value_parser = duration)]
    pub(crate) duration: Option<Duration>,
    /// Runs of each variant, interleaved [default: 9, or as many as fit into 27 s; streams: 135 s]
    #[arg(long, value_name = "N")]
    pub(crate) runs: Option<u32>,
    /// Measure also the rows that --list marks as long. A suite that has such rows takes up to
    /// twice the time
    #[arg(long)]
    pub(crate) long: bool,
    /// Measure only these rows, and report only their goals: names of rows or of sections. A * in a
    /// name stands for any characters. A long row is measured if it is named, as with --long; a *
    /// alone does not name it [default: all]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    pub(crate) rows: Vec<String>,
    /// List the rows, and measure nothing
    #[arg(long, conflicts_with_all = ["json", "html", "results", "check"])]
    pub(crate) list: bool,
    /// Print one JSON object on standard output, and nothing else there. With several suites, its
    /// field `suites` has one object for each
    #[arg(long)]
    pub(crate) json: bool,
    /// Write an HTML report with charts to this file. It loads no other files
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Write the results to this file, without samples. The tables of the documents are made of
    /// such files in bench/results
    #[arg(long, value_name = "FILE")]
    pub(crate) results: Option<PathBuf>,
    /// Another build of this program. Its runs are interleaved with those of this one, and each row
    /// of the two is compared; --runs is the number of pairs [default: 17]
    #[arg(long, value_name = "BINARY", conflicts_with_all = ["list", "html", "results", "check"])]
    pub(crate) against: Option<PathBuf>,
    /// Fail (exit status 1) if a target is missed. Open goals, and what was skipped or not run, are
    /// reported and do not fail
    #[arg(long)]
    pub(crate) check: bool,
}

impl SuiteArgs {
    /// The command that measures a suite with these arguments. `rows` are the names of its rows.
    pub(crate) fn invocation(&self, suite: &str, rows: &[&str]) -> String {
        let mut command = format!("cargo run --release -p netmem-bench -- {suite}");
        let mut add = |option: &str, value: String| command += &format!(" {option} {value}");
        if !self.threads.is_empty() {
            add("--threads", self.threads.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
        }
        if let Some(duration) = self.duration {
            add("--duration", duration.as_secs_f64().to_string());
        }
        if let Some(runs) = self.runs {
            add("--runs", runs.to_string());
        }
        if !rows.is_empty() {
            // A shell expands stars, and names of sections have spaces.
            add("--rows", format!("'{}'", rows.join(",").replace('\'', r"'\''")));
        }
        if self.long {
            command += " --long";
        }
        command
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SuiteArg {
    /// Reference counts: the cost of a get and a put, as more threads share the counts
    Refs,
    /// Page pools: the cost of an allocation and a return, on the same CPU and on others, compared
    /// with other allocators
    Pool,
    /// Tokens of device memory: the cost of receiving a fragment and giving it back, compared with
    /// ids under a lock and other ways
    Tokens,
    /// Device memory, end to end: the CPU time of each side for a gigabyte, received and sent, by
    /// the binding's count and by tokens
    Devmem,
    /// TCP, compared with the kernel's and smoltcp's: throughput, CPU time, requests. Needs root
    Streams,
    /// Every suite, one after the other
    All,
}
