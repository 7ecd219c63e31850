//! What each program does before its work, and how its result becomes an exit status.

use crate::arguments::BadArgument;
use crate::{output, signals};
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

/// Runs a program, and prints its error. The exit status is 0 if it is done, 1 if the run failed, 2
/// for bad arguments, and 130 if it was interrupted (128 and the signal's number).
///
/// The libraries' warnings are printed meanwhile, such as those about a device that breaks a rule,
/// or pages in quarantine.
pub fn run(program: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    // A run in another mode than the one that was asked for would show nothing of it.
    if let Err(error) = netmem_percpu::forced_mode() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    tracing_subscriber::fmt()
        .with_writer(|| output::Log)
        .with_max_level(LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .init();
    let Err(error) = program() else { return ExitCode::SUCCESS };
    eprintln!("error: {error:#}");
    match signals::exit_status() {
        _ if error.is::<BadArgument>() => ExitCode::from(2),
        Some(status) => ExitCode::from(status),
        None => ExitCode::FAILURE,
    }
}
