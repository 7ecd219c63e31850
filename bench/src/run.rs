//! A run: the chosen suites, one after the other, and their reports.

use crate::accounting::Accounting;
use crate::args::SuiteArgs;
use crate::html::Html;
use crate::plan::{Plan, Suite};
use crate::report::{Head, Params, Report, Reports};
use crate::results::{self, Results};
use crate::rounds::{self, Rounds};
use crate::suites;
use crate::table;
use anyhow::Context;
use netmem_measure::arguments::BadArgument;
use netmem_measure::goals::Unmet;
use netmem_measure::load::Meter;
use netmem_measure::machine::{self, Machine};
use netmem_measure::output;
use netmem_measure::report::PoolReport;
use netmem_measure::report::{Done, SCHEMA};
use netmem_measure::signals::{self, Interrupted};
use std::sync::atomic::AtomicBool;

/// Runs the benchmark. [`netmem_measure::arguments::BadArgument`] is returned before anything
/// starts, any other error after that.
///
/// A signal ends the measurement. The rows that have been measured until then are reported as
/// usual.
pub(crate) fn run(args: &SuiteArgs) -> anyhow::Result<()> {
    let plan = choose(Plan::new(args)?)?;
    if args.list {
        return Ok(output::print(&table::list(&heads(&plan), &plan.rows))?);
    }
    let html = args.html.as_deref().map(Html::new).transpose()?;
    let results = args.results.as_deref().map(Results::new).transpose()?;
    let stop = signals::stop_flag()?;
    let mut reports = Vec::new();
    for &suite in &plan.suites {
        let report = measure(suite, &plan.of(suite), &stop)?;
        if !args.json {
            let apart = if reports.is_empty() { "" } else { "\n" };
            output::print(&format!("{apart}{}", table::render(&report)))?;
        }
        let interrupted = report.done.interrupted;
        reports.push(report);
        if interrupted {
            break;
        }
    }
    if let Some(html) = html {
        html.write(&reports)?;
    }
    if let Some(results) = results {
        results.write(&reports).context("--results")?;
    }
    if args.json {
        match &reports[..] {
            [report] if plan.suites.len() == 1 => output::json(report)?,
            suites => {
                let (schema, netmem) = (SCHEMA, env!("CARGO_PKG_VERSION"));
                output::json(&Reports { schema, netmem, command: "bench", suites })?;
            }
        }
    }
    reports.iter().try_for_each(|report| report.pool.balance())?;
    if reports.iter().any(|report| report.done.interrupted) {
        return Err(Interrupted.into());
    }
    let unmet = reports.iter().map(Report::unmet).fold(Unmet::default(), |all, one| all + one);
    Ok(unmet.check_targets(args.check)?)
}

/// The plan without the suites that have no chosen row.
fn choose(plan: Plan) -> Result<Plan, BadArgument> {
    if plan.rows.patterns().is_empty() {
        return Ok(plan);
    }
    let all = heads(&plan);
    let every: Vec<Head> = all.iter().flat_map(|(_, heads)| heads.clone()).collect();
    if let Some(unknown) = plan.rows.without_row(&every).first() {
        return BadArgument::new(format!("--rows {unknown}: there is no such row or section; --list shows all"));
    }
    let chosen = all.into_iter().filter(|(_, heads)| heads.iter().any(|head| plan.rows.choose(head)));
    let suites = chosen.map(|(suite, _)| suite).collect();
    Ok(Plan { suites, ..plan })
}

/// All rows of the plan's suites.
fn heads(plan: &Plan) -> Vec<(Suite, Vec<Head>)> {
    let benchmarks = |suite| suites::benchmarks(suite, &plan.of(suite), &Accounting::default());
    let heads = |&suite: &Suite| (suite, benchmarks(suite).iter().flat_map(|benchmark| benchmark.heads()).collect());
    plan.suites.iter().map(heads).collect()
}

fn measure(suite: Suite, plan: &Plan, stop: &AtomicBool) -> anyhow::Result<Report> {
    let percpu = machine::percpu();
    let accounting = Accounting::default();
    let mut benchmarks = suites::benchmarks(suite, plan, &accounting);
    benchmarks.retain(|benchmark| benchmark.heads().iter().any(|head| plan.rows.choose(head)));
    let meter = Meter::new();
    let Rounds { mut rows, interrupted } = rounds::run(plan, &mut benchmarks, &percpu, stop)?;
    let done = Done::new(&meter, rows.iter().flat_map(|row| row.cpus.clone()).collect(), interrupted);
    let mut goals = suites::evaluate(suite, &mut rows, &percpu);
    if !plan.rows.patterns().is_empty() {
        goals.retain(|goal| !goal.of_other_rows);
    }
    // The pools close here and enter what they counted into the accounting.
    drop(benchmarks);
    Ok(Report {
        schema: SCHEMA,
        netmem: env!("CARGO_PKG_VERSION"),
        command: "bench",
        suite: suite.name(),
        date: results::date(),
        commit: results::commit(),
        machine: Machine::new(accounting.backing()),
        params: Params::new(plan),
        done,
        variants: rows,
        goals,
        pool: PoolReport { leaked: accounting.outstanding(), ..PoolReport::new(accounting.stats()) },
    })
}
