//! What a suite was built to reach, held against what was measured.

use super::report::{Goal, Row};
use crate::stats::Spread;

/// A goal for the median of ratios, or of times, of a run each.
pub(crate) struct Target {
    threads: usize,
    /// Names stand for their times, with as many threads, or with another number (`x1`).
    what: String,
    /// `None` if something that it needs was not measured.
    value: Option<Spread>,
    unit: &'static str,
    bound: f64,
    at_least: bool,
}

impl Target {
    pub(crate) fn most(
        threads: usize,
        what: impl Into<String>,
        value: Option<Spread>,
        unit: &'static str,
        bound: f64,
    ) -> Self {
        Self { threads, what: what.into(), value, unit, bound, at_least: false }
    }

    pub(crate) fn least(
        threads: usize,
        what: impl Into<String>,
        value: Option<Spread>,
        unit: &'static str,
        bound: f64,
    ) -> Self {
        Self { at_least: true, ..Self::most(threads, what, value, unit, bound) }
    }
}

/// The row of that name with so many threads.
fn row<'a>(rows: &'a [Row], name: &str, threads: usize) -> Option<&'a Row> {
    rows.iter().find(|row| row.head.name == name && row.head.threads == threads)
}

/// How many times as much `over` takes as `own`, each with its number of threads.
pub(crate) fn ratio(rows: &[Row], over: (&str, usize), own: (&str, usize)) -> Option<Spread> {
    row(rows, own.0, own.1)?.under(row(rows, over.0, over.1)?)
}

/// What a row takes.
pub(crate) fn time(rows: &[Row], name: &str, threads: usize) -> Option<Spread> {
    Some(row(rows, name, threads)?.measured.as_ref()?.value)
}

/// All of them whose rows were measured.
pub(crate) fn judge(targets: impl IntoIterator<Item = Target>, percpu: &str) -> Vec<Goal> {
    let goal = |t: Target| {
        let value = t.value?;
        let reached = if t.at_least { value.median >= t.bound } else { value.median <= t.bound };
        Some(Goal {
            goal: t.what,
            threads: t.threads,
            unit: t.unit,
            percpu: percpu.to_owned(),
            bound: t.bound,
            at_least: t.at_least,
            value,
            reached,
        })
    };
    targets.into_iter().filter_map(goal).collect()
}
