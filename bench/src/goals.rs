//! Values of goals from the rows of a suite. [`Which`] names a row. [`ratio`] and [`value`] return
//! its measured value, and [`netmem_measure::goals`] judges it.

use crate::report::{Head, Row};
use netmem_measure::goals::{Goal, Missing, Target, Value};
use netmem_measure::stats::Spread;

/// By how many percent of its bound a target may miss the bound. Medians of two short runs differ
/// by less on a quiet machine.
const MARGIN_PCT: f64 = 10.0;

/// Compares the value of each target with its bound, with the margin.
pub(crate) fn evaluate(targets: impl IntoIterator<Item = Target>, percpu: &str) -> Vec<Goal> {
    netmem_measure::goals::evaluate(targets.into_iter().map(|target| target.margin(MARGIN_PCT)), percpu)
}

/// Names a row of a suite.
#[derive(Clone, Debug, Default)]
pub(crate) struct Which {
    name: String,
    section: Option<&'static str>,
    threads: Option<usize>,
    bindings: Option<u32>,
}

impl Which {
    /// The row with this name.
    pub(crate) fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// The row with this number of threads.
    pub(crate) fn threads(self, threads: usize) -> Self {
        Self { threads: Some(threads), ..self }
    }

    /// The row of this section.
    pub(crate) fn section(self, section: &'static str) -> Self {
        Self { section: Some(section), ..self }
    }

    /// The row with this number of bindings.
    pub(crate) fn bindings(self, bindings: u32) -> Self {
        Self { bindings: Some(bindings), ..self }
    }

    fn is(&self, head: &Head) -> bool {
        head.name == self.name
            && self.section.is_none_or(|section| head.section == section)
            && self.threads.is_none_or(|threads| head.threads == threads)
            && self.bindings.is_none_or(|bindings| head.bindings == Some(bindings))
    }

    fn find<'a>(&self, rows: &'a [Row]) -> Result<&'a Row, Missing> {
        match rows.iter().find(|row| self.is(&row.head)) {
            Some(Row { skipped: Some(why), head, .. }) => Err(Missing::Skipped(format!("{}: {why}", head.name))),
            Some(row) if row.measured.is_some() => Ok(row),
            Some(row) => Err(Missing::NotRun(format!("{} has no run", row.head.name))),
            None => Err(Missing::NotAsked(format!("{self} was not asked for"))),
        }
    }
}

impl std::fmt::Display for Which {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        self.threads.map_or(Ok(()), |threads| write!(f, " x{threads}"))
    }
}

/// `over` divided by `own`, run by run.
pub(crate) fn ratio(rows: &[Row], over: &Which, own: &Which) -> Value {
    let (over, own) = match (over.find(rows), own.find(rows)) {
        (Ok(over), Ok(own)) => (over, own),
        (Err(none @ Missing::NotAsked(_)), Err(Missing::NotAsked(_))) => return Err(none),
        // A row that was not asked for decides first: such a goal is not missed because another row
        // was skipped.
        (Err(Missing::NotRun(why) | Missing::NotAsked(why)), _)
        | (_, Err(Missing::NotRun(why) | Missing::NotAsked(why))) => return Err(Missing::NotRun(why)),
        (Err(skipped), _) | (_, Err(skipped)) => return Err(skipped),
    };
    own.under(over).ok_or_else(|| Missing::NotRun(format!("{} and {} share no run", over.head.name, own.head.name)))
}

/// How much more a row grows from `few` threads to `many` than its limit does, run by run: 1 is as
/// much. Where two CPUs are threads of one core, the limit grows, too.
pub(crate) fn growth(rows: &[Row], own: &Which, limit: &Which, few: usize, many: usize) -> Value {
    let find = |which: &Which, threads| which.clone().threads(threads).find(rows);
    let found = [find(own, many), find(own, few), find(limit, many), find(limit, few)];
    if found.iter().all(|row| matches!(row, Err(Missing::NotAsked(_)))) {
        return found
            .into_iter()
            .next()
            .map_or_else(|| unreachable!("there are four"), |row| row.map(|_| Spread::default()));
    }
    let mut four = Vec::new();
    for row in found {
        match row {
            Ok(row) => four.push(row.samples.iter().map(|sample| sample.value)),
            Err(Missing::NotAsked(why)) => return Err(Missing::NotRun(why)),
            Err(missing) => return Err(missing),
        }
    }
    let [own_many, own_few, limit_many, limit_few] =
        <[_; 4]>::try_from(four).unwrap_or_else(|_| unreachable!("there are four"));
    let pairs = own_many.zip(own_few).zip(limit_many.zip(limit_few));
    let pairs = pairs.map(|((own, base), (limit, limit_base))| (own * limit_base, base * limit));
    Spread::of_ratios(pairs).ok_or_else(|| Missing::NotRun(format!("the rows of {own} and {limit} share no run")))
}

/// The measured value of a row.
pub(crate) fn value(rows: &[Row], which: &Which) -> Value {
    let row = which.find(rows)?;
    row.measured.as_ref().map(|m| m.value).ok_or_else(|| Missing::NotRun(format!("{} has no run", row.head.name)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::report::Sample;
    use super::*;
    use netmem_measure::goals::{Unmet, Verdict, evaluate};

    /// A row with these values.
    pub(crate) fn row(head: Head, values: &[f64]) -> Row {
        Row::new(head, "rseq", values.iter().copied().map(Sample::of).collect(), None)
    }

    /// For each goal that has a value: its number of threads, its median, and whether it is
    /// reached.
    pub(crate) fn measured(goals: &[Goal]) -> Vec<(usize, f64, bool)> {
        let one = |goal: &Goal| Some((goal.threads, goal.value?.median, goal.verdict == Verdict::Reached));
        goals.iter().filter_map(one).collect()
    }

    fn named(name: &str) -> Head {
        Head { name: name.into(), threads: 1, unit: "ns", ..Head::default() }
    }

    #[test]
    fn a_goal_is_judged_by_the_median_of_the_runs_ratios() {
        let rows = [row(named("plain"), &[1.0, 2.0, 1.0]), row(named("percpuref"), &[1.2, 2.8, 1.1])];
        let value = || ratio(&rows, &Which::named("percpuref"), &Which::named("plain"));
        let targets = [Target::most(1, "a", value(), "x", 1.25), Target::least(1, "b", value(), "x", 1.25)];
        let goals = evaluate(targets, "rseq");
        assert!((goals[0].value.unwrap().median - 1.2).abs() < 1e-9);
        assert_eq!(goals.iter().map(|goal| goal.verdict).collect::<Vec<_>>(), [Verdict::Reached, Verdict::Missed]);
    }

    #[test]
    fn a_skipped_row_is_not_the_same_as_one_that_was_not_asked_for() {
        let skipped = Row::new(named("dpdk"), "rseq", Vec::new(), Some("no libdpdk".into()));
        let no_run = Row::new(named("remote"), "rseq", Vec::new(), None);
        let rows = [row(named("limit"), &[1.0]), skipped, no_run];
        let of = |over: &str, own: &str| {
            let value = ratio(&rows, &Which::named(over), &Which::named(own));
            evaluate([Target::most(1, "a", value, "x", 9.0)], "rseq").remove(0)
        };
        let got =
            [of("limit", "limit"), of("dpdk", "limit"), of("remote", "limit"), of("none", "limit"), of("dpdk", "none")];
        let words: Vec<_> = got.iter().map(|goal| goal.verdict.word()).collect();
        assert_eq!(words, ["reached", "skipped", "not run", "not run", "not run"]);
        assert_eq!(got[1].why.as_deref(), Some("dpdk: no libdpdk"));
        assert!(!got.iter().any(|goal| goal.of_other_rows) && of("none", "nor this").of_other_rows);
        let unmet = |rows: &[Row], goals: &[Goal]| Unmet::of(rows.iter().map(|row| row.skipped.is_some()), goals);
        assert_eq!(unmet(&rows, &got), Unmet { missed: 0, skipped: 1, rows: 1 });
        assert!(unmet(&rows, &got).check(true).is_err() && unmet(&rows[..1], &got[2..]).check(true).is_ok());
    }

    /// Where two CPUs are threads of one core, the limit doubles with the second thread, and so may
    /// the row.
    #[test]
    fn growth_is_compared_with_that_of_the_limit() {
        let at = |name: &str, threads, value| row(Head { threads, ..named(name) }, &[value]);
        let rows = [at("own", 1, 3.0), at("own", 2, 6.6), at("limit", 1, 1.0), at("limit", 2, 2.0)];
        let of = |rows: &[Row]| growth(rows, &Which::named("own"), &Which::named("limit"), 1, 2);
        assert!((of(&rows).unwrap().median - 1.1).abs() < 1e-9);
        assert!(matches!(of(&rows[..3]), Err(Missing::NotRun(_))) && matches!(of(&[]), Err(Missing::NotAsked(_))));
    }

    /// A target may miss its bound by the margin, an open goal may not, and only a missed target
    /// fails a check.
    #[test]
    fn targets_have_a_margin_and_open_goals_a_reason() {
        let value = |median| Ok(Spread { median, min: median, max: median });
        let goals = super::evaluate(
            [
                Target::most(1, "a", value(1.09), "x", 1.0),
                Target::most(1, "b", value(1.11), "x", 1.0),
                Target::least(1, "c", value(0.91), "x", 1.0),
                Target::most(1, "d", value(1.09), "x", 1.0).open("slow"),
            ],
            "rseq",
        );
        let words: Vec<_> = goals.iter().map(|goal| goal.verdict.word()).collect();
        assert_eq!(words, ["reached", "missed", "reached", "missed"]);
        assert_eq!((goals[3].reason, goals[3].margin_pct), (Some("slow"), 0.0));
        let check = |goals: &[Goal]| Unmet::of(std::iter::empty(), goals).check_targets(true);
        assert!(check(&goals).is_err() && check(&goals[2..]).is_ok());
    }
}
