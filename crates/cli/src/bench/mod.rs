//! `netmem bench`: parts of netmem, measured beside what they replace.
//!
//! [`plan`] checks what was asked. A suite ([`refs`]) is a list of cells, each of which measures something once;
//! [`rounds`] measures all of them in turns, [`lab`] has the threads, [`table`], [`html`] and [`report`] show what came of
//! it.

mod chart;
mod error;
mod html;
mod lab;
mod plan;
mod refs;
mod report;
mod rounds;
mod table;

use crate::args::BenchArgs;
use crate::machine::{self, Machine};
use crate::perf::PoolReport;
use crate::{output, signals};
use html::Html;
use plan::{Plan, Suite};
use report::{Params, Report};

/// Does what was asked: [`crate::args::BadArgument`] before anything starts, any other error after.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    let mut html = args.html.as_deref().map(Html::create).transpose()?;
    let stop = signals::stop_flag()?;
    for suite in &plan.suites {
        let percpu = machine::percpu();
        let mut cells = match suite {
            Suite::Refs => refs::cells(&plan),
        };
        let mut rows = rounds::run(&plan, &mut cells, &percpu, &stop)?;
        let goals = match suite {
            Suite::Refs => refs::judge(&mut rows, &percpu),
        };
        let report = Report {
            netmem: env!("CARGO_PKG_VERSION"),
            command: "bench",
            suite: suite.name(),
            // No suite so far has pages.
            machine: Machine::new("none".into()),
            params: Params::new(&plan),
            variants: rows,
            goals,
            pool: PoolReport::default(),
        };
        if let Some(html) = html.take() {
            html.write(&report)?;
        }
        if args.json {
            output::json(&report)?;
        } else {
            output::print(&table::render(&report))?;
        }
    }
    Ok(())
}
