//! The command `netmem`: receive traffic and report (`perf`), be a virtio-net device (`device`), be
//! a server behind a tap (`serve`), connect two taps by a bad link (`link`), open AF_XDP sockets
//! for other processes (`grant`), report what the machine offers (`info`), show the figures of a
//! running command (`top`) and its connections (`ss`).
//!
//! Exit status: 0 done, 1 the run failed, 2 bad arguments, 130 interrupted (128 and the signal's
//! number).

mod args;
mod device;
mod fetch;
mod grant;
mod host;
mod info;
mod limits;
mod link;
mod metrics;
mod pages;
mod perf;
mod placement;
mod serve;
mod ss;
mod top;
mod xdp;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    netmem_measure::program::run(|| {
        // If a peer shortens the file of its memory, its rings are stopped. Without the handler,
        // this process would end.
        if let Err(error) = netmem_pool::sigbus::install() {
            eprintln!("warning: a peer that cuts its memory will end this process: {error}");
        }
        match cli.command.unwrap_or(Command::Perf(Box::new(cli.perf))) {
            Command::Perf(args) => perf::run(&args),
            Command::Device(args) => device::run(&args),
            Command::Serve(args) => serve::run(&args),
            Command::Link(args) => link::run(&args),
            Command::Grant(args) => grant::run(&args),
            Command::Info(args) => info::run(&args),
            Command::Top(args) => top::run(&args),
            Command::Ss(args) => ss::run(&args),
            Command::Pages(args) => pages::run(&args),
        }
    })
}
