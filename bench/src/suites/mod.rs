//! The suites. Each begins with the question that it answers, then come its rows, then its goals.

pub(crate) mod devmem;
pub(crate) mod pool;
pub(crate) mod refs;
pub(crate) mod streams;
pub(crate) mod tokens;

use crate::accounting::Accounting;
use crate::plan::{Plan, Suite};
use crate::report::Row;
use crate::rounds::Benchmark;
use netmem_measure::goals::Goal;

/// Everything that a suite measures.
pub(crate) fn benchmarks(suite: Suite, plan: &Plan, accounting: &Accounting) -> Vec<Box<dyn Benchmark>> {
    match suite {
        Suite::Refs => refs::benchmarks(plan),
        Suite::Pool => pool::benchmarks(plan, accounting),
        Suite::Tokens => tokens::benchmarks(plan),
        Suite::Devmem => devmem::benchmarks(plan, accounting),
        Suite::Streams => streams::benchmarks(plan),
    }
}

/// Compares the rows of a suite with each other, and with the goals.
pub(crate) fn evaluate(suite: Suite, rows: &mut [Row], percpu: &str) -> Vec<Goal> {
    match suite {
        Suite::Refs => refs::evaluate(rows, percpu),
        Suite::Pool => pool::evaluate(rows, percpu),
        Suite::Tokens => tokens::evaluate(rows, percpu),
        Suite::Devmem => devmem::evaluate(rows, percpu),
        Suite::Streams => streams::evaluate(rows, percpu),
    }
}
