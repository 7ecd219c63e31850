//! A run: the chosen suites, one after the other, and their reports.

use crate::accounting::Accounting;
use crate::against;
use crate::args::SuiteArgs;
use crate::html::Html;
use crate::plan::{Plan, Suite};
use crate::report::{Head, Params, Report, Reports};
use crate::results::{self, Results};
use crate::rounds::{self, Benchmark, Rounds};
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
use netmem_measure::turns::in_words;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

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
    if let Some(other) = &args.against {
        return against::run(other, args, &*signals::stop_flag()?);
    }
    let html = args.html.as_deref().map(Html::new).transpose()?;
    let results = args.results.as_deref().map(Results::new).transpose()?;
    let stop = signals::stop_flag()?;
    let suites = plan.suites.iter().map(|suite| suite.name()).collect::<Vec<_>>().join(", ");
    let (number, time) = takes(&plan);
    eprintln!("{suites}: {number} measurements, {} runs of each, about {}", plan.runs, in_words(time));
    let mut reports = Vec::new();
    for &suite in &plan.suites {
        let report = measure(suite, &plan, args, &stop)?;
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
    // An output that cannot be written does not cost the user the others.
    let written = [
        html.map_or(Ok(()), |html| html.write(&reports, &plan.suites[reports.len()..]).map_err(Into::into)),
        results.map_or(Ok(()), |results| results.write(&reports).context("--results")),
        if args.json { json(&plan, &reports) } else { Ok(()) },
    ];
    written.into_iter().collect::<anyhow::Result<()>>()?;
    reports.iter().try_for_each(|report| report.pool.balance())?;
    if reports.iter().any(|report| report.done.interrupted) {
        return Err(Interrupted.into());
    }
    let unmet = reports.iter().map(Report::unmet).fold(Unmet::default(), |all, one| all + one);
    Ok(unmet.check_targets(args.check)?)
}

/// Prints the reports as one object.
fn json(plan: &Plan, reports: &[Report]) -> anyhow::Result<()> {
    match reports {
        [report] if plan.suites.len() == 1 => output::json(report)?,
        suites => {
            let (schema, netmem) = (SCHEMA, env!("CARGO_PKG_VERSION"));
            output::json(&Reports { schema, netmem, command: "bench", suites })?;
        }
    }
    Ok(())
}

/// The plan without the suites that have no chosen row.
fn choose(plan: Plan) -> Result<Plan, BadArgument> {
    if plan.rows.patterns().is_empty() {
        return Ok(plan);
    }
    let all = heads(&plan);
    let every: Vec<Head> = all.iter().flat_map(|(_, rows)| rows.iter().map(|row| row.0.clone())).collect();
    if let Some(unknown) = plan.rows.without_row(&every).first() {
        return BadArgument::new(format!("--rows {unknown}: there is no such row or section; --list shows all"));
    }
    let chosen = all.into_iter().filter(|(_, rows)| rows.iter().any(|row| plan.rows.choose(&row.0)));
    let suites = chosen.map(|(suite, _)| suite).collect();
    Ok(Plan { suites, ..plan })
}

/// All rows of the plan's suites, and whether each takes long.
fn heads(plan: &Plan) -> Vec<(Suite, Vec<(Head, bool)>)> {
    let rows = |&suite: &Suite| {
        let benchmarks = suites::benchmarks(suite, &plan.of(suite), &Accounting::default());
        let rows = benchmarks.iter().flat_map(|benchmark| {
            let long = benchmark.is_long();
            benchmark.heads().into_iter().map(move |head| (head, long))
        });
        (suite, rows.collect())
    };
    plan.suites.iter().map(rows).collect()
}

/// A suite's plan, and the benchmarks of its chosen rows. Those that take long are chosen by
/// `--long` or by their names.
fn planned(suite: Suite, plan: &Plan, accounting: &Accounting) -> (Plan, Vec<Box<dyn Benchmark>>) {
    let plan = plan.of(suite);
    let mut benchmarks = suites::benchmarks(suite, &plan, accounting);
    benchmarks.retain(|benchmark| {
        let named = || benchmark.heads().iter().any(|head| plan.rows.name(head));
        benchmark.heads().iter().any(|head| plan.rows.choose(head)) && (!benchmark.is_long() || plan.long || named())
    });
    let long = benchmarks.iter().any(|benchmark| benchmark.is_long());
    (if long { plan.with_long_rows() } else { plan }, benchmarks)
}

/// The command that measures a suite again, with those names of rows that the suite has.
fn invocation(suite: Suite, plan: &Plan, args: &SuiteArgs) -> String {
    let benchmarks = suites::benchmarks(suite, &plan.of(suite), &Accounting::default());
    let heads: Vec<Head> = benchmarks.iter().flat_map(|benchmark| benchmark.heads()).collect();
    args.invocation(suite.name(), &plan.rows.with_row(&heads))
}

/// How many measurements a run of all suites has, and how long all runs of them take on a machine
/// that does nothing else. The preparation takes as long as a run.
fn takes(plan: &Plan) -> (usize, Duration) {
    plan.suites.iter().fold((0, Duration::ZERO), |(number, time), &suite| {
        let (plan, benchmarks) = planned(suite, plan, &Accounting::default());
        let run: Duration = benchmarks.iter().map(|benchmark| benchmark.takes(plan.duration)).sum();
        (number + benchmarks.len(), time + run * plan.runs.saturating_add(1))
    })
}

fn measure(suite: Suite, plan: &Plan, args: &SuiteArgs, stop: &AtomicBool) -> anyhow::Result<Report> {
    let percpu = machine::percpu();
    let accounting = Accounting::default();
    let invocation = invocation(suite, plan, args);
    let (plan, mut benchmarks) = planned(suite, plan, &accounting);
    let meter = Meter::new();
    let Rounds { mut rows, interrupted } = rounds::run(&plan, &mut benchmarks, &percpu, stop)?;
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
        question: suite.question(),
        invocation,
        date: results::date(),
        commit: results::commit(),
        machine: Machine::new(accounting.backing()),
        params: Params::new(&plan),
        done,
        variants: rows,
        goals,
        pool: PoolReport { leaked: accounting.outstanding(), ..PoolReport::new(accounting.stats()) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn args<'a>(args: impl IntoIterator<Item = &'a str>) -> SuiteArgs {
        Cli::try_parse_from(["netmem-bench"].into_iter().chain(args)).unwrap().suites
    }

    fn plan(line: &str) -> Plan {
        choose(Plan::on(&args(line.split_whitespace()), &[0, 1]).unwrap()).unwrap()
    }

    /// A person waits for it: the default suites take less than ten minutes on two CPUs, by the sum
    /// of all runs. Long rows are not among them; a flag adds them.
    #[test]
    fn all_suites_take_less_than_ten_minutes_on_two_cpus() {
        let (number, time) = takes(&plan("all"));
        assert!(number > 200 && time < Duration::from_secs(600), "{number} measurements take {time:?}");
        let (more, longer) = takes(&plan("all --long"));
        assert!(more > number && longer > time, "{more} measurements take {longer:?}");
        // On a busy machine a budget ends the runs of a suite.
        let budgets: Duration = budgets("all").into_iter().flatten().sum();
        assert!(budgets < Duration::from_secs(600), "{budgets:?}");
    }

    /// The budget of each suite of a command.
    fn budgets(line: &str) -> Vec<Option<Duration>> {
        let plan = plan(line);
        plan.suites.iter().map(|&suite| planned(suite, &plan, &Accounting::default()).0.budget).collect()
    }

    /// A long row is measured if its name is given, as with `--long`, and in as much time. A star
    /// alone is no name.
    #[test]
    fn long_rows_are_measured_if_they_are_named() {
        for rows in ["smoltcp", "cost*", "our*"] {
            let [named, long] = ["", " --long"].map(|long| format!("streams --rows {rows}{long}"));
            assert_eq!((takes(&plan(&named)), budgets(&named)), (takes(&plan(&long)), budgets(&long)), "{rows}");
            assert_eq!(budgets(&named), [Some(Duration::from_secs(270))], "{rows}");
        }
        assert_eq!(takes(&plan("streams --rows *")), takes(&plan("streams")));
        assert!(takes(&plan("streams --rows *,smoltcp")) > takes(&plan("streams")));
        let short = [Some(Duration::from_secs(135))];
        let (all, other) = (budgets("streams --rows *"), budgets("streams --rows ours_sleeping"));
        assert_eq!((&all[..], &other[..]), (&short[..], &short[..]));
        // `refs` has no long row.
        assert_eq!(budgets("refs streams --long"), [Some(Duration::from_secs(27)), Some(Duration::from_secs(270))]);
        assert_eq!(budgets("streams --long --runs 3"), [None]);
    }

    /// A shell splits the command of each suite, and the program accepts it: the command measures
    /// what the suite of the report has measured.
    #[test]
    fn the_command_of_a_suite_measures_it_again() {
        for line in [
            &["refs", "pool", "--rows", "percpuref,malloc"][..],
            &["all", "--rows", "one CPU,guard,*_ranges", "--threads", "2,1", "--runs", "3"],
            &["all", "--rows", "*", "--duration", "1.5ms"],
            &["all", "--rows", "cost of*,limit"],
            &["all", "--long"],
        ] {
            let args_of_all = args(line.iter().copied());
            let all = choose(Plan::on(&args_of_all, &[0, 1]).unwrap()).unwrap();
            for &suite in &all.suites {
                let command = invocation(suite, &all, &args_of_all);
                let split = format!("set -- {command}; shift 6; printf '%s\\n' \"$@\"");
                let output = std::process::Command::new("sh").args(["-c", &split]).output().unwrap();
                let words = String::from_utf8(output.stdout).unwrap();
                let own = Plan::on(&args(words.lines()), &[0, 1]).unwrap();
                let own = choose(own).unwrap_or_else(|error| panic!("{command}: {error}"));
                let names = |plan: &Plan| -> Vec<Vec<Head>> {
                    let (_, benchmarks) = planned(suite, plan, &Accounting::default());
                    benchmarks.iter().map(|benchmark| benchmark.heads()).collect()
                };
                let (names, of_all) = (names(&own), names(&all));
                assert_eq!(own.suites, [suite], "{command}");
                assert_eq!(format!("{names:?}"), format!("{of_all:?}"), "{command}");
            }
        }
    }
}
