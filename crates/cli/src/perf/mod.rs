//! `netmem perf`: receive traffic and report.
//!
//! [`plan`] checks what was asked and lists the variants; [`engine`] measures one of them once; [`suite`] runs all of them,
//! interleaved; [`crate::stats`] makes numbers of the runs; [`table`] and [`json`] show them. [`against`] compares two builds.
//! [`sleep`] measures a driver that sleeps, at fixed rates, and [`streams`] flows of TCP and UDP.

mod against;
mod driver;
mod engine;
mod error;
mod json;
mod plan;
mod sleep;
mod streams;
mod suite;
mod table;

pub(crate) use json::PoolReport;

use crate::args::{PerfArgs, ProtoArg};
use crate::{limits, output, signals};
use plan::Plan;

/// Does what was asked: [`crate::args::BadArgument`] before anything starts, any other error after.
pub(crate) fn run(args: &PerfArgs) -> anyhow::Result<()> {
    if args.proto != ProtoArg::Frames {
        limits::descriptors(64 + 2 * usize::from(args.flows.unwrap_or(1)), "perf --proto")?;
        return streams::run(args, &*signals::stop_flag()?);
    }
    let plan = Plan::new(args)?;
    // The driver has two descriptors a ring and one more for a queue to be waited for, the embedded device two a ring, and a tap
    // one a pair. The rest is for the memory, in both, and for messages.
    let pairs = plan.variants.iter().map(|v| usize::from(v.queues)).max().unwrap_or(1);
    limits::descriptors(4 * (2 * pairs + 1) + 3 * pairs + 16, &format!("perf with {pairs} queue pair(s)"))?;
    let stop = signals::stop_flag()?;
    if let Some(spin) = plan.spin {
        return sleep::run(&plan, spin, &stop);
    }
    if let Some(other) = &args.against {
        return against::run(other, &plan, &stop);
    }
    let report = suite::run(&plan, &stop)?;
    if plan.json {
        output::json(&report)?;
    } else {
        output::print(&table::render(&report))?;
    }
    report.verdict()?;
    Ok(())
}
