//! Statistics of several runs: medians, ranges, and confidence intervals that assume no
//! distribution of the noise.

use serde::{Deserialize, Serialize};

/// Median, least and most of some values.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The least value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    /// The spread of some values. All 0 if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let sorted = sorted(values);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else { return Self::default() };
        Self { median: median(&sorted), min, max }
    }

    /// The spread of the ratios of two quantities that were measured in pairs. `None` if there are
    /// no pairs.
    pub fn of_ratios(pairs: impl IntoIterator<Item = (f64, f64)>) -> Option<Self> {
        let ratios: Vec<f64> =
            pairs.into_iter().filter(|&(_, base)| base > 0.0).map(|(new, base)| new / base).collect();
        (!ratios.is_empty()).then(|| Self::of(ratios))
    }
}

fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values
}

fn median(sorted: &[f64]) -> f64 {
    let mid = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[mid] } else { (sorted[mid - 1] + sorted[mid]) / 2.0 }
}

/// By how many percent one quantity differs from another, where the two were measured in pairs.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Change {
    /// Median of the pairs' changes, in percent.
    pub median_pct: f64,
    /// The confidence interval of that median, in percent.
    pub interval: [f64; 2],
    /// The confidence level of the interval, in percent.
    pub confidence_pct: f64,
}

impl Change {
    /// The sign test's interval: the `k`th smallest and largest ratio, where `k` is the largest
    /// that leaves 95 %, or 1. The median lies outside only if fewer than `k` of `n` tosses of a
    /// coin show one side. `None` without pairs.
    pub fn of(pairs: impl IntoIterator<Item = (f64, f64)>) -> Option<Self> {
        let ratios = pairs.into_iter().filter(|&(_, base)| base > 0.0).map(|(new, base)| (new / base - 1.0) * 100.0);
        let sorted = sorted(ratios);
        if sorted.is_empty() {
            return None;
        }
        let n = sorted.len();
        let k = (1..=n.div_ceil(2)).take_while(|&k| k == 1 || confidence(n, k) >= 0.95).last().unwrap_or(1);
        Some(Self {
            median_pct: median(&sorted),
            interval: [sorted[k - 1], sorted[n - k]],
            confidence_pct: (confidence(n, k) * 1000.0).round() / 10.0,
        })
    }
}

/// How likely the median lies between the `k`th smallest and the `k`th largest of `n` values.
fn confidence(n: usize, k: usize) -> f64 {
    let (mut binomial, mut below) = (1.0, 0.0);
    for i in 0..k {
        below += binomial;
        binomial *= (n - i) as f64 / (i + 1) as f64;
    }
    (1.0 - 2.0 * below / 2f64.powi(i32::try_from(n).unwrap_or(i32::MAX))).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of([4.0, 1.0]).median, 2.5);
        assert_eq!(Spread::of([]), Spread::default());
    }

    #[test]
    fn ratios_are_taken_pair_by_pair() {
        // Not the ratio of the medians, which is 2.
        let pairs = [(1.0, 2.0), (4.0, 1.0), (9.0, 3.0)];
        assert_eq!(Spread::of_ratios(pairs), Some(Spread { median: 3.0, min: 0.5, max: 4.0 }));
        assert_eq!(Spread::of_ratios([(1.0, 0.0)]), None);
    }

    #[test]
    fn seven_pairs_span_98_percent() {
        let pairs = [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7].map(|r| (r, 1.0));
        let change = Change::of(pairs).unwrap();
        assert!((change.median_pct - 40.0).abs() < 1e-9);
        assert!((change.interval[0] - 10.0).abs() < 1e-9 && (change.interval[1] - 70.0).abs() < 1e-9);
        assert_eq!(change.confidence_pct, 98.4);
    }

    #[test]
    fn more_pairs_leave_outliers_out() {
        // The tables of the sign test: for 9 pairs the second smallest (96.1 %), for 15 the fourth
        // (96.5 %).
        for (n, k, confidence) in [(5, 1, 93.8), (8, 1, 99.2), (9, 2, 96.1), (15, 4, 96.5), (100, 40, 96.5)] {
            let change = Change::of((1..=n).map(|i| (f64::from(i), 1.0))).unwrap();
            assert_eq!(change.interval, [f64::from(k - 1) * 100.0, f64::from(n - k) * 100.0], "{n}");
            assert_eq!(change.confidence_pct, confidence, "{n}");
        }
    }

    #[test]
    fn one_pair_says_nothing_and_none_even_less() {
        assert_eq!(Change::of([(1.0, 2.0)]).unwrap().confidence_pct, 0.0);
        assert_eq!(Change::of([]), None);
        assert_eq!(Change::of([(1.0, 0.0)]), None);
    }
}
