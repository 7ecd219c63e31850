//! The scale of a chart: where on its width a value lies, and which values have a line and a label.

pub(super) use crate::table::is_word;
use netmem_measure::units;

/// Values that differ by more than this factor have a logarithmic axis.
const FACTOR: f64 = 30.0;
/// The pixels of an axis on a narrow screen, and those of a character and between two labels there.
const WIDTH: f64 = 290.0;
const CHARACTER: f64 = 7.6;
const GAP: f64 = 8.0;

/// A line of an axis, and the text below it.
pub(super) struct Label {
    /// In percent of the width.
    pub(super) at: f64,
    pub(super) text: String,
    /// The end of the text that is at the line, as SVG names it: the text stays within the axis.
    pub(super) anchor: &'static str,
}

impl Label {
    fn new(at: f64, text: String) -> Self {
        let half = text.chars().count() as f64 * CHARACTER / 2.0;
        let anchor = match at / 100.0 * WIDTH {
            left if left < half => "start",
            left if left > WIDTH - half => "end",
            _ => "middle",
        };
        Self { at, text, anchor }
    }

    fn left(&self) -> f64 {
        let width = self.text.chars().count() as f64 * CHARACTER;
        let before = match self.anchor {
            "start" => 0.0,
            "end" => width,
            _ => width / 2.0,
        };
        self.at / 100.0 * WIDTH - before
    }

    fn right(&self) -> f64 {
        self.left() + self.text.chars().count() as f64 * CHARACTER
    }
}

/// A scale from its left end to its right end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Axis {
    pub(super) logarithmic: bool,
    low: f64,
    high: f64,
}

impl Axis {
    /// An axis of all values. It begins at 0, or it is logarithmic, if the values above 0 differ by
    /// more than a factor of 30.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let (low, high) = ends(values);
        if high / low > FACTOR {
            return Self { logarithmic: true, low: below(low), high: above(high) };
        }
        // The last label does not end at the border.
        Self { logarithmic: false, low: 0.0, high: high * 1.04 }
    }

    /// A logarithmic axis of all values, and of 1.
    pub(super) fn of_ratios(values: impl IntoIterator<Item = f64>) -> Self {
        let (low, high) = ends(values.into_iter().chain([0.9, 1.1]));
        Self { logarithmic: true, low: below(low), high: above(high) }
    }

    /// The place of a value, in percent of the width. A value that the axis does not have, such as
    /// 0 on a logarithmic one, is at its end.
    pub(super) fn at(&self, value: f64) -> f64 {
        let part = if self.logarithmic {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            value / self.high
        };
        part.clamp(0.0, 1.0) * 100.0
    }

    /// The lines of the axis with their labels: as many as have room next to each other.
    pub(super) fn labels(&self, unit: &str) -> Vec<Label> {
        let labels = |ticks: Vec<f64>| -> Vec<Label> {
            ticks.into_iter().map(|tick| Label::new(self.at(tick), self.text(tick, unit))).collect()
        };
        let fits = |labels: &Vec<Label>| labels.is_sorted_by(|one, next| one.right() + GAP <= next.left());
        self.choices().into_iter().map(labels).find(fits).unwrap_or_default()
    }

    /// Values that can have labels, the most first.
    fn choices(&self) -> Vec<Vec<f64>> {
        if !self.logarithmic {
            let every = |step: f64| (0..).map(|n| f64::from(n) * step).take_while(|&tick| tick <= self.high).collect();
            return [6.0, 4.0, 3.0, 2.0, 1.0].map(|most| every(above(self.high / most))).into();
        }
        let (from, to) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let decades = |digits: &[f64], step: usize| -> Vec<f64> {
            let all =
                (from..=to).step_by(step).flat_map(|decade| digits.iter().map(move |digit| digit * 10f64.powi(decade)));
            all.filter(|&tick| tick > self.low * 0.999 && tick < self.high * 1.001).collect()
        };
        let tens = (1..=8).map(|step| decades(&[1.0], step));
        [decades(&[1.0, 2.0, 5.0], 1), decades(&[1.0, 3.0], 1)].into_iter().chain(tens).collect()
    }

    /// The text below a line. The numbers of a linear axis have one unit, those of a logarithmic
    /// one each the unit that suits it.
    fn text(&self, tick: f64, base: &str) -> String {
        if tick == 0.0 {
            return "0".into();
        }
        let (factor, unit) = units::scale(if self.logarithmic { tick } else { self.high }, base);
        // The caption of the chart has a unit that is a word.
        let unit = if unit == base && is_word(base) { "" } else { unit };
        let number = number(tick / factor);
        if unit.is_empty() { number } else { format!("{number} {unit}") }
    }
}

/// A number with as many decimals as its first three digits need.
fn number(value: f64) -> String {
    let decimals = (2.0 - value.abs().log10().floor()).clamp(0.0, 300.0) as usize;
    let text = format!("{value:.decimals$}");
    if decimals == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').into() }
}

/// The least and the most of the values above 0; both are 1 if there are none.
fn ends(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let above_zero = values.into_iter().filter(|value| value.is_finite() && *value > 0.0);
    let (low, high) =
        above_zero.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), value| (low.min(value), high.max(value)));
    if high > 0.0 { (low, high) } else { (1.0, 1.0) }
}

/// The largest of 1, 2, 5, 10, 20, 50 and so on that is not above `value`.
fn below(value: f64) -> f64 {
    let decade = 10f64.powf(value.log10().floor());
    [5.0, 2.0, 1.0].into_iter().map(|digit| digit * decade).find(|&tick| tick <= value * 1.0001).unwrap_or(decade)
}

/// The smallest of 1, 2, 5, 10, 20, 50 and so on that is not below `value`.
fn above(value: f64) -> f64 {
    let decade = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|digit| digit * decade)
        .find(|&tick| tick >= value * 0.9999)
        .unwrap_or(10.0 * decade)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn values_that_differ_by_more_than_thirty_have_a_logarithmic_axis() {
        assert!(!Axis::of([2.0, 60.0]).logarithmic);
        assert!(Axis::of([2.0, 61.0]).logarithmic);
        // A value of 0 has no place on a logarithmic axis; it does not decide.
        assert!(!Axis::of([0.0, 1.0, 2.0]).logarithmic && !Axis::of([]).logarithmic && !Axis::of([0.0]).logarithmic);
    }

    #[test]
    fn each_value_has_its_place() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 0.01, "{a} {b}");
        let axis = Axis::of([25.0, 50.0]);
        let _ = [(0.0, 0.0), (26.0, 50.0), (52.0, 100.0), (99.0, 100.0)].map(|(value, at)| close(axis.at(value), at));
        let axis = Axis::of([1.0, 10_000.0]);
        let _ = [(0.0, 0.0), (1.0, 0.0), (100.0, 50.0), (10_000.0, 100.0)].map(|(value, at)| close(axis.at(value), at));
        assert!(Axis::of_ratios([3.0]).at(1.0) > 5.0, "the bound has room on its left");
    }

    #[test]
    fn labels_have_units_that_suit_them_and_room() {
        let labels =
            |axis: Axis, unit: &str| -> Vec<String> { axis.labels(unit).into_iter().map(|label| label.text).collect() };
        assert_eq!(labels(Axis::of([3.0, 9.0]), "ns"), ["0", "2 ns", "4 ns", "6 ns", "8 ns"]);
        assert_eq!(labels(Axis::of([900.0, 2300.0]), "ns"), ["0", "0.5 us", "1 us", "1.5 us", "2 us"]);
        assert_eq!(labels(Axis::of([2.0, 70.0]), "ns"), ["3 ns", "10 ns", "30 ns", "100 ns"]);
        assert_eq!(labels(Axis::of([10.0, 1e6]), "ns"), ["10 ns", "1 us", "100 us"]);
        assert_eq!(labels(Axis::of([1.0, 1e9]), "requests"), ["1", "100", "10 k", "1 M", "100 M"]);
        assert_eq!(labels(Axis::of([0.02, 0.05]), "retries"), ["0", "0.01", "0.02", "0.03", "0.04", "0.05"]);
        assert_eq!(labels(Axis::of_ratios([0.5, 10.0]), "x"), ["0.5 x", "1 x", "2 x", "5 x", "10 x"]);
        assert_eq!(labels(Axis::of([1e-6, 2e-5]), "retries"), ["0", "0.00001", "0.00002"]);
        assert_eq!(labels(Axis::of([1e-9, 2e-5]), "retries"), ["0.000000001", "0.0000001", "0.00001"]);
        for exponent in -8..12 {
            for high in [1.0, 1.7, 2.5, 6.0, 9.9] {
                let high = high * 10f64.powi(exponent);
                for axis in [Axis::of([high]), Axis::of([high / 25.0, high]), Axis::of([high / 31.0, high])] {
                    let labels = labels(axis, "retries");
                    assert!(
                        labels.len() > 1 && labels.iter().collect::<BTreeSet<_>>().len() == labels.len(),
                        "{labels:?}"
                    );
                }
            }
        }
        for decades in 1..18 {
            let axis = Axis::of([3.0, 7.0 * 10f64.powi(decades)]);
            assert!((2..=6).contains(&labels(axis, "ns").len()), "{decades}: {:?}", labels(axis, "ns"));
        }
        for high in 1..2000 {
            let labels = labels(Axis::of([f64::from(high)]), "ns");
            assert!((2..=7).contains(&labels.len()), "{high}: {labels:?}");
        }
    }
}
