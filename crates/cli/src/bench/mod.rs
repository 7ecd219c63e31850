//! `netmem bench`: parts of netmem, measured beside what they replace.
//!
//! [`plan`] checks what was asked. A suite ([`refs`], [`pool`], [`tokens`], [`devmem`]) is a list of cells, each of which measures something once;
//! [`rounds`] measures all of them in turns, [`lab`] has the threads, [`peer`] the programs in C, [`goals`] what the suites were built to reach;
//! [`table`], [`html`] and [`report`] show what came of it.

mod chart;
mod devmem;
mod error;
mod goals;
mod html;
mod lab;
mod peer;
mod plan;
mod pool;
mod refs;
mod report;
mod rounds;
mod table;
mod timing;
mod tokens;

use crate::args::BenchArgs;
use crate::machine::{self, Machine};
use crate::perf::PoolReport;
use crate::{output, signals};
use html::Html;
use plan::{Plan, Suite};
use pool::Books;
use report::{Params, Report, Reports};
use std::sync::atomic::AtomicBool;

/// Does what was asked: [`crate::args::BadArgument`] before anything starts, any other error after.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    let html = args.html.as_deref().map(Html::create).transpose()?;
    let stop = signals::stop_flag()?;
    let mut reports = Vec::new();
    for &suite in &plan.suites {
        let report = measure(suite, &plan, &stop)?;
        if !args.json {
            let apart = if reports.is_empty() { "" } else { "\n" };
            output::print(&format!("{apart}{}", table::render(&report)))?;
        }
        reports.push(report);
    }
    if let Some(html) = html {
        html.write(&reports)?;
    }
    if args.json {
        match &reports[..] {
            [report] => output::json(report)?,
            suites => output::json(&Reports { netmem: env!("CARGO_PKG_VERSION"), command: "bench", suites })?,
        }
    }
    reports.iter().try_for_each(|report| report.pool.balance())?;
    Ok(())
}

fn measure(suite: Suite, plan: &Plan, stop: &AtomicBool) -> anyhow::Result<Report> {
    let percpu = machine::percpu();
    let books = Books::default();
    let mut cells = match suite {
        Suite::Refs => refs::cells(plan),
        Suite::Pool => pool::cells(plan, &books),
        Suite::Tokens => tokens::cells(plan),
        Suite::Devmem => devmem::cells(plan, &books),
    };
    let mut rows = rounds::run(plan, &mut cells, &percpu, stop)?;
    let goals = match suite {
        Suite::Refs => refs::judge(&mut rows, &percpu),
        Suite::Pool => pool::judge(&mut rows, &percpu),
        Suite::Tokens => tokens::judge(&mut rows, &percpu),
        Suite::Devmem => devmem::judge(&mut rows, &percpu),
    };
    // Pools close, and enter what they counted.
    drop(cells);
    Ok(Report {
        netmem: env!("CARGO_PKG_VERSION"),
        command: "bench",
        suite: suite.name(),
        machine: Machine::new(books.backing()),
        params: Params::new(plan),
        variants: rows,
        goals,
        pool: PoolReport { leaked: books.outstanding(), ..PoolReport::new(books.stats()) },
    })
}
