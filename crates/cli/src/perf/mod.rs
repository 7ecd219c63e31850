//! `netmem perf`: receive traffic and report.
//!
//! [`plan`] checks the arguments and lists the variants. [`engine`] measures one variant once.
//! [`suite`] runs all of them in turns. [`netmem_measure::stats`] computes numbers from the runs,
//! and [`table`] and [`json`] show them. [`against`] compares two builds. [`sleep`] measures a
//! driver that sleeps, at fixed rates, and [`streams`] measures flows of TCP and UDP.

mod against;
mod compare;
mod driver;
mod engine;
mod error;
mod json;
mod live;
mod mailbox;
mod memory;
mod plan;
mod sample;
mod sleep;
mod streams;
mod suite;
mod table;
mod xsk;

use crate::args::{PerfArgs, ProtoArg};
use crate::limits;
use crate::metrics::Server;
use live::{Live, answering};
use netmem_measure::output;
use netmem_measure::signals::{self, Interrupted};
use plan::Plan;

/// Runs the measurement. [`netmem_measure::arguments::BadArgument`] is returned before anything
/// starts, any other error after that.
pub(crate) fn run(args: &PerfArgs) -> anyhow::Result<()> {
    if args.proto != ProtoArg::Frames || args.hosts.are_given() {
        limits::descriptors(64 + streams::descriptors(args), "perf --proto")?;
        let run = if args.hosts.are_given() { streams::hosts::run } else { streams::run };
        return run(args, &*signals::stop_flag()?);
    }
    let plan = Plan::new(args)?;
    // The driver has two descriptors for each ring, and one more for a queue that it can wait for.
    // The embedded device has two for each ring, and a tap one for each pair. The rest is for
    // memory in both, and for messages.
    let pairs = plan.variants.iter().map(|v| usize::from(v.queues)).max().unwrap_or(1);
    limits::descriptors(4 * (2 * pairs + 1) + 3 * pairs + 16, &format!("perf with {pairs} queue pair(s)"))?;
    let stop = signals::stop_flag()?;
    if let Some(spin) = plan.spin {
        return sleep::run(&plan, spin, &stop);
    }
    if let Some(other) = &args.against {
        return against::frames(other, &plan, &stop);
    }
    let (server, live) = (Server::open(args.metrics)?, Live::default());
    let (report, link) = answering(
        server.as_ref(),
        |page| live.figures(page),
        || suite::run(&plan, server.is_some().then_some(&live), &stop),
    )?;
    if plan.json {
        output::json(&report)?;
    } else {
        output::print(&table::render(&report))?;
    }
    link.map_or(Ok(()), |link| link.finish())?;
    report.verdict()?;
    if report.done.interrupted {
        return Err(Interrupted.into());
    }
    Ok(report.unmet().check(args.check)?)
}
