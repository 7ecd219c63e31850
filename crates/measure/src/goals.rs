//! Goals of a measurement: bounds, and whether the measured values reach them.
//!
//! Why two kinds: a check that fails all the time is not read. A target is ours to keep: it is
//! reached, and `--check` fails if it no longer is. An open goal is not reached yet: its value and
//! the reason are reported, and no check fails.
//!
//! [`Target`] is a bound and a value, and [`evaluate`] makes [`Goal`]s of them. A goal without a
//! value is `skipped` if one of its rows was skipped, and `not run` if a row was not asked for.
//! Neither is `missed`.

use crate::stats::{Change, Spread};
use serde::Serialize;

/// A goal, and the measured value.
#[derive(Clone, Debug, Serialize)]
pub struct Goal {
    /// The goal in words. In `bench`, a name stands for the value of the row with the same number
    /// of threads, or with the number behind it (`x1`).
    pub goal: String,
    /// Threads of the rows that are compared.
    pub threads: usize,
    /// The unit of the bound and of the value.
    pub unit: &'static str,
    /// How per-CPU data was reached.
    pub percpu: String,
    /// The bound.
    pub bound: f64,
    /// Whether the bound is a lower one (the value must not be less) or an upper one.
    pub at_least: bool,
    /// What of the value is compared with the bound.
    pub judged: Judged,
    /// The measured value: the median of the runs, and their range or the median's interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<Spread>,
    /// By how many percent of the bound a target's value may miss the bound.
    pub margin_pct: f64,
    /// Whether the goal is a target or open.
    pub kind: Kind,
    /// Why an open goal is not reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// Whether the value reaches the bound.
    pub verdict: Verdict,
    /// The reason why there is no value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Whether none of its rows was asked for. A report of chosen rows is without such goals.
    #[serde(skip)]
    pub of_other_rows: bool,
}

/// The kinds of goals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Ours to keep: `--check` fails if it is missed.
    Target,
    /// Not reached yet: reported, and not checked.
    Open,
}

/// The part of the value that is compared with the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Judged {
    /// The median of the runs.
    Median,
    /// From the least to the most: all of it must reach the bound.
    Range,
}

/// The verdict on a goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// The value reaches the bound.
    #[serde(rename = "reached")]
    Reached,
    /// The value does not reach the bound.
    #[serde(rename = "missed")]
    Missed,
    /// A row of the goal was skipped.
    #[serde(rename = "skipped")]
    Skipped,
    /// A row of the goal was not asked for, or has no run yet.
    #[serde(rename = "not run")]
    NotRun,
}

impl Verdict {
    /// The verdict as reports have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Reached => "reached",
            Self::Missed => "missed",
            Self::Skipped => "skipped",
            Self::NotRun => "not run",
        }
    }
}

/// The reason why there is no value.
#[derive(Clone, Debug, PartialEq)]
pub enum Missing {
    /// A row was skipped, for this reason.
    Skipped(String),
    /// A row has no run, for this reason.
    NotRun(String),
    /// None of the rows was asked for.
    NotAsked(String),
}

/// The measured value of a goal, or the reason why there is none.
pub type Value = Result<Spread, Missing>;

/// A change in percent as a value: the median, and the ends of its interval.
pub fn percent(change: Change) -> Spread {
    let [min, max] = change.interval;
    Spread { median: change.median_pct, min, max }
}

/// A bound, and what was measured.
pub struct Target {
    threads: usize,
    what: String,
    value: Value,
    unit: &'static str,
    bound: f64,
    at_least: bool,
    judged: Judged,
    margin_pct: f64,
    /// Why the goal is open.
    reason: Option<&'static str>,
}

impl Target {
    /// The median is at most `bound`. `what` is the goal in words, with the bound.
    pub fn most(threads: usize, what: impl Into<String>, value: Value, unit: &'static str, bound: f64) -> Self {
        let judged = Judged::Median;
        Self { threads, what: what.into(), value, unit, bound, at_least: false, judged, margin_pct: 0.0, reason: None }
    }

    /// The median is at least `bound`.
    pub fn least(threads: usize, what: impl Into<String>, value: Value, unit: &'static str, bound: f64) -> Self {
        Self { at_least: true, ..Self::most(threads, what, value, unit, bound) }
    }

    /// The whole range reaches the bound, not only the median.
    pub fn whole(self) -> Self {
        Self { judged: Judged::Range, ..self }
    }

    /// A target may miss its bound by this many percent of the bound: the noise of the machine. An
    /// open goal may not.
    pub fn margin(self, margin_pct: f64) -> Self {
        if self.reason.is_some() { self } else { Self { margin_pct, ..self } }
    }

    /// The goal is open, for this reason.
    pub fn open(self, reason: &'static str) -> Self {
        Self { reason: Some(reason), margin_pct: 0.0, ..self }
    }

    fn reached(&self, value: Spread) -> bool {
        let slack = self.bound.abs() * self.margin_pct / 100.0;
        let least = if self.judged == Judged::Range { value.min } else { value.median };
        let most = if self.judged == Judged::Range { value.max } else { value.median };
        if self.at_least { least >= self.bound - slack } else { most <= self.bound + slack }
    }
}

/// Compares the value of each target with its bound.
pub fn evaluate(targets: impl IntoIterator<Item = Target>, percpu: &str) -> Vec<Goal> {
    let goal = |t: Target| {
        let verdict = match &t.value {
            Ok(value) if t.reached(*value) => Verdict::Reached,
            Ok(_) => Verdict::Missed,
            Err(Missing::Skipped(_)) => Verdict::Skipped,
            Err(Missing::NotRun(_) | Missing::NotAsked(_)) => Verdict::NotRun,
        };
        let of_other_rows = matches!(t.value, Err(Missing::NotAsked(_)));
        let (value, why) = match t.value {
            Ok(value) => (Some(value), None),
            Err(Missing::Skipped(why) | Missing::NotRun(why) | Missing::NotAsked(why)) => (None, Some(why)),
        };
        Goal {
            goal: t.what,
            threads: t.threads,
            unit: t.unit,
            percpu: percpu.to_owned(),
            bound: t.bound,
            at_least: t.at_least,
            judged: t.judged,
            margin_pct: t.margin_pct,
            kind: if t.reason.is_some() { Kind::Open } else { Kind::Target },
            reason: t.reason,
            value,
            verdict,
            why,
            of_other_rows,
        }
    };
    targets.into_iter().map(goal).collect()
}

/// The targets that were missed or skipped, and the rows that were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[error("goals missed: {missed}; goals of which a row was skipped: {skipped}; rows skipped: {rows}")]
pub struct Unmet {
    /// Targets whose value does not reach the bound.
    pub missed: usize,
    /// Targets of which a row was skipped.
    pub skipped: usize,
    /// Rows that were skipped, whether they have a goal or not.
    pub rows: usize,
}

impl Unmet {
    /// `rows` contains for each row whether it was skipped.
    pub fn of(rows: impl Iterator<Item = bool>, goals: &[Goal]) -> Self {
        let targets = || goals.iter().filter(|goal| goal.kind == Kind::Target);
        let with = |verdict| targets().filter(|goal| goal.verdict == verdict).count();
        Self {
            missed: with(Verdict::Missed),
            skipped: with(Verdict::Skipped),
            rows: rows.filter(|&skipped| skipped).count(),
        }
    }

    /// Fails if `--check` was given and a target was missed.
    ///
    /// # Errors
    ///
    /// A target was missed.
    pub fn check_targets(self, asked: bool) -> Result<(), CheckFailed> {
        if asked && self.missed > 0 { Err(CheckFailed(self)) } else { Ok(()) }
    }

    /// Fails if `--check` was given and something is unmet.
    ///
    /// # Errors
    ///
    /// A target was missed, or it or a row was skipped.
    pub fn check(self, asked: bool) -> Result<(), CheckFailed> {
        if asked && self != Self::default() { Err(CheckFailed(self)) } else { Ok(()) }
    }
}

impl std::ops::Add for Unmet {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (missed, skipped) = (self.missed + other.missed, self.skipped + other.skipped);
        Self { missed, skipped, rows: self.rows + other.rows }
    }
}

/// The error of `--check`.
#[derive(Debug, thiserror::Error)]
#[error("{0}: --check makes that an error")]
pub struct CheckFailed(Unmet);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_reaches_a_bound_as_a_whole() {
        let value = || Ok(Spread { median: -4.0, min: -9.0, max: 1.0 });
        let goals = evaluate(
            [
                Target::most(1, "a", value(), "%", 0.0),
                Target::most(1, "b", value(), "%", 0.0).whole(),
                Target::most(1, "c", value(), "%", 1.0).whole(),
                Target::least(1, "d", value(), "%", -5.0),
                Target::least(1, "e", value(), "%", -5.0).whole(),
                Target::least(1, "f", value(), "%", -9.0).whole(),
            ],
            "rseq",
        );
        let words: Vec<_> = goals.iter().map(|goal| goal.verdict.word()).collect();
        assert_eq!(words, ["reached", "missed", "reached", "reached", "missed", "reached"]);
    }

    /// A goal that was missed, one of which a row was skipped, and a skipped row: each alone fails
    /// a check. A goal that was reached or not run does not.
    #[test]
    fn each_kind_of_unmet_goal_fails_a_check() {
        let goal = |value: Value, bound: f64| evaluate([Target::most(1, "a", value, "x", bound)], "rseq").remove(0);
        let two = || Ok(Spread { median: 2.0, min: 1.0, max: 3.0 });
        let [skipped, not_run] =
            [Missing::Skipped("b".into()), Missing::NotRun("c".into())].map(|why| goal(Err(why), 9.0));
        let of = |rows: &[bool], goals: &[Goal]| Unmet::of(rows.iter().copied(), goals);
        let each = [of(&[], &[goal(two(), 1.0)]), of(&[], &[skipped]), of(&[true, false], &[])];
        let none = Unmet::default();
        assert_eq!(each, [Unmet { missed: 1, ..none }, Unmet { skipped: 1, ..none }, Unmet { rows: 1, ..none }]);
        assert!(each.iter().all(|unmet| unmet.check(true).is_err() && unmet.check(false).is_ok()));
        assert!(of(&[false], &[goal(two(), 2.0), not_run]).check(true).is_ok());
        let [missed, skipped, rows] = each;
        let sum = rows + rows + rows + skipped + skipped + missed;
        assert_eq!(sum, Unmet { missed: 1, skipped: 2, rows: 3 });
        let words =
            "goals missed: 1; goals of which a row was skipped: 2; rows skipped: 3: --check makes that an error";
        assert_eq!(sum.check(true).unwrap_err().to_string(), words);
    }
}
