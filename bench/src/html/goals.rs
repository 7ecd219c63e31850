//! The goals of a suite: how far each is reached, and the sentence that sums them up.

use super::axis::Axis;
use super::chart;
use crate::table;
use maud::{Markup, html};
use netmem_measure::goals::{Goal, Judged, Kind, Verdict};
use netmem_measure::stats::Spread;

/// A value as a multiple of its bound: 1 is the bound, and more is better.
fn reached(goal: &Goal, value: &Spread) -> Spread {
    let times = |value: f64| if goal.at_least { value / goal.bound } else { goal.bound / value };
    let [one, other] = [value.min, value.max].map(times);
    Spread { median: times(value.median), min: one.min(other), max: one.max(other) }
}

/// The class of a verdict in the style sheet.
pub(super) fn class(word: &str) -> String {
    word.replace(' ', "-")
}

/// The chart of all goals.
pub(super) fn chart(goals: &[Goal]) -> Markup {
    let values: Vec<Option<Spread>> =
        goals.iter().map(|goal| goal.value.as_ref().map(|value| reached(goal, value))).collect();
    let axis = Axis::of_ratios(values.iter().flatten().flat_map(|value| [value.min, value.median, value.max]));
    let lanes = html! {
        @for (goal, value) in goals.iter().zip(&values) {
            @let word = table::word(goal);
            div.lane.first.empty[value.is_none()] {
                span.label {
                    b class={ "verdict " (class(word)) } { (word) }
                    span.text {
                        (goal.goal) " " span.threads { (super::threads(goal.threads)) }
                        @if let Some(why) = why(goal) { span.why { (why) } }
                    }
                }
                @match value {
                    Some(value) => {
                        (chart::track(&axis, value, &class(word)))
                        span.value { b { (table::came_to(goal).split(" (").next().unwrap_or_default()) } " " span { (range(goal)) } }
                    }
                    None => { span.track {} span.value { "no value" } }
                }
            }
        }
    };
    let caption = html! {
        b { "Value of each goal, as a multiple of its bound" }
        " " span.hint { "1 x is the bound; right of it a goal is reached →" } " " span.hint { "logarithmic axis" }
    };
    chart::figure(&axis, "x", "goals", Some(1.0), caption, lanes)
}

/// Why there is no value, why an open goal is not reached, or why a target is reached whose value
/// is on the other side of its bound.
fn why(goal: &Goal) -> Option<String> {
    let margin = || format!("within its margin of {} %", goal.margin_pct);
    match (goal.verdict, &goal.value) {
        (Verdict::Missed, _) => goal.reason.map(Into::into),
        (Verdict::Reached, Some(value)) => (judged(goal, value) < 1.0).then(margin),
        _ => goal.why.clone(),
    }
}

/// What of the value is compared with the bound, as a multiple of it.
fn judged(goal: &Goal, value: &Spread) -> f64 {
    let reached = reached(goal, value);
    if goal.judged == Judged::Range { reached.min } else { reached.median }
}

/// The least and the most of a goal's value.
fn range(goal: &Goal) -> String {
    let shown = table::came_to(goal);
    shown.split_once(" (").map_or_else(String::new, |(_, range)| range.trim_end_matches(')').into())
}

/// How many goals of a kind there are, by verdict.
#[derive(Clone, Copy, Default)]
pub(super) struct Count {
    pub(super) reached: usize,
    pub(super) missed: usize,
    /// Without a value.
    pub(super) none: usize,
}

impl Count {
    pub(super) fn of<'a>(goals: impl IntoIterator<Item = &'a Goal>, kind: Kind) -> Self {
        let mut count = Self::default();
        for goal in goals.into_iter().filter(|goal| goal.kind == kind) {
            match goal.verdict {
                Verdict::Reached => count.reached += 1,
                Verdict::Missed => count.missed += 1,
                Verdict::Skipped | Verdict::NotRun => count.none += 1,
            }
        }
        count
    }

    pub(super) fn measured(self) -> usize {
        self.reached + self.missed
    }
}

/// The headline of some goals: a class of the style sheet, and a sentence.
pub(super) fn headline<'a>(goals: impl IntoIterator<Item = &'a Goal> + Clone) -> (&'static str, String) {
    let [targets, open] = [Kind::Target, Kind::Open].map(|kind| Count::of(goals.clone(), kind));
    let measured = targets.measured();
    let (class, mut text) = match (measured, targets.missed) {
        (0, _) => ("none", "No target was measured".to_owned()),
        (1, 0) => ("reached", "The target is reached".into()),
        (1, _) => ("missed", "The target is missed".into()),
        (2, 0) => ("reached", "Both targets are reached".into()),
        (n, 0) => ("reached", format!("All {n} targets are reached")),
        (n, missed) => ("missed", format!("{missed} of {n} targets {} missed", if missed == 1 { "is" } else { "are" })),
    };
    if targets.none > 0 && measured > 0 {
        text += &format!(
            ", {} could not be measured or {} not asked for",
            targets.none,
            if targets.none == 1 { "was" } else { "were" }
        );
    }
    if open.measured() > 0 {
        text += &format!(
            "; {} of {} open goals {} reached",
            open.reached,
            open.measured(),
            if open.reached == 1 { "is" } else { "are" }
        );
    }
    (class, text + ".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_measure::goals::{Missing, Target, evaluate};

    fn value(median: f64) -> Result<Spread, Missing> {
        Ok(Spread { median, min: median / 2.0, max: median * 4.0 })
    }

    #[test]
    fn more_than_one_is_better_than_the_bound() {
        let goals =
            evaluate([Target::most(1, "a", value(2.0), "x", 1.0), Target::least(1, "b", value(2.0), "x", 1.0)], "rseq");
        let got: Vec<_> = goals.iter().map(|goal| reached(goal, &goal.value.unwrap())).collect();
        assert_eq!(got[0], Spread { median: 0.5, min: 0.125, max: 1.0 });
        assert_eq!(got[1], Spread { median: 2.0, min: 1.0, max: 8.0 });
    }

    /// The point of such a target is left of the line, where goals are missed.
    #[test]
    fn a_target_within_its_margin_is_marked() {
        let at = |median| Ok(Spread { median, min: median, max: median });
        let goals = evaluate(
            [
                Target::most(1, "a", at(1.09), "x", 1.0).margin(10.0),
                Target::most(1, "b", at(1.0), "x", 1.0).margin(10.0),
                Target::most(1, "c", at(1.2), "x", 1.0).margin(10.0),
                Target::least(1, "d", at(0.95), "x", 1.0).margin(10.0),
                Target::most(1, "e", at(2.0), "x", 1.0).open("slow"),
                Target::most(1, "f", at(0.5), "x", 1.0).open("slow"),
                Target::most(1, "g", Err(Missing::Skipped("none".into())), "x", 1.0),
                Target::most(1, "h", Ok(Spread { median: 0.9, min: 0.8, max: 1.05 }), "x", 1.0).margin(10.0).whole(),
            ],
            "rseq",
        );
        let margin = Some("within its margin of 10 %");
        let whys: Vec<_> = goals.iter().map(why).collect();
        let whys: Vec<_> = whys.iter().map(Option::as_deref).collect();
        assert_eq!(whys, [margin, None, None, margin, Some("slow"), None, Some("none"), margin]);
        let page = chart(&goals).into_string();
        assert_eq!(page.matches("within its margin of 10 %").count(), 3, "{page}");
    }

    #[test]
    fn a_headline_counts_what_was_measured() {
        let most = |bound| Target::most(1, "a", value(2.0), "x", bound);
        let none = || Target::most(1, "a", Err(Missing::NotRun("b".into())), "x", 1.0);
        let of = |targets: Vec<Target>| headline(&evaluate(targets, "rseq"));
        assert_eq!(of(vec![]), ("none", "No target was measured.".into()));
        assert_eq!(of(vec![most(3.0)]), ("reached", "The target is reached.".into()));
        assert_eq!(
            of(vec![most(3.0), most(3.0), most(1.0).open("c")]),
            ("reached", "Both targets are reached; 0 of 1 open goals are reached.".into())
        );
        assert_eq!(
            of(vec![most(3.0), most(1.0), none()]),
            ("missed", "1 of 2 targets is missed, 1 could not be measured or was not asked for.".into())
        );
    }
}
