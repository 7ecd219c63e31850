//! Flows between hosts: an agent on each host (`perf --agent ADDR`), and one host that drives them
//! and takes part itself (`perf --to HOST,..`).
//!
//! ```text
//!   driver ─ channel ─► member of this host ─ its end of the flows ─┐
//!      └──── channel ─► agent of another ─── its end of the flows ──┴─ kernel's sockets, tap, AF_XDP
//! ```
//!
//! [`channel`] has the connection, its key and its limits, [`message`] what is said over it.
//! [`member`] does it on a host, for an [`agent`] and for the driver's own end; [`drive`] asks all
//! hosts, and [`report`] shows what they counted. The ends are those of flows in one process.

mod agent;
mod channel;
mod drive;
mod member;
mod message;
mod plan;
mod report;

use super::{CHECK_EVERY, exact_timers};
use crate::args::PerfArgs;
use netmem_measure::arguments::BadArgument;
use plan::{Drive, Own};
use std::sync::atomic::AtomicBool;

/// Waits for drivers, or drives.
pub(in crate::perf) fn run(args: &PerfArgs, stop: &AtomicBool) -> anyhow::Result<()> {
    if args.hosts.agent.is_none() && args.hosts.to.is_empty() {
        return Ok(BadArgument::new("--key is for --agent and --to")?);
    }
    let own = Own::new(args)?;
    match args.hosts.agent {
        Some(at) => {
            plan::agent(args, at, &own)?;
            exact_timers()?;
            agent::run(at, &own, args.hosts.one_off, stop)
        }
        None => {
            let plan = Drive::new(args)?;
            exact_timers()?;
            drive::run(&plan, &own, stop)
        }
    }
}
