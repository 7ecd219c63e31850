//! The command `netmem`: receive traffic and report (`perf`), be a virtio-net device (`device`), be a server behind
//! a tap (`serve`), connect two taps by a bad link (`link`), measure parts of netmem beside what they replace (`bench`), say what the machine offers (`info`).
//!
//! Exit status: 0 done, 1 the run failed, 2 bad arguments.

mod args;
mod bench;
mod cpus;
mod device;
mod host;
mod info;
mod limits;
mod link;
mod machine;
mod output;
mod perf;
mod serve;
mod signals;
mod stats;
mod turns;

use args::{BadArgument, Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Warnings of the library: a device that breaks a rule, pages that are quarantined.
    tracing_subscriber::fmt()
        .with_writer(|| output::Log)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .init();
    // A peer that takes its memory away has its rings stopped, and does not end this process.
    if let Err(error) = netmem::pool::sigbus::install() {
        eprintln!("warning: a peer that cuts its memory will end this process: {error}");
    }
    let done = match cli.command.unwrap_or(Command::Perf(cli.perf)) {
        Command::Perf(args) => perf::run(&args),
        Command::Device(args) => device::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Link(args) => link::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Info(args) => info::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.is::<BadArgument>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}
