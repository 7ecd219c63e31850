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

/// The largest number of differences for which [`signed_rank`] counts all sums of ranks.
const COUNTED: usize = 200;

/// Wilcoxon's signed-rank test: how likely the differences of pairs lean to one side by as much or
/// more, if each of them had either sign with equal probability. Two-sided; 1 without differences.
///
/// Exact up to 200 differences; beyond that by the normal distribution, with the correction for
/// continuity. Ties have the mean of their ranks. Differences of 0 say nothing, and are left out.
pub fn signed_rank(differences: &[f64]) -> f64 {
    let mut differences: Vec<f64> = differences.iter().copied().filter(|difference| *difference != 0.0).collect();
    differences.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    // Twice the ranks, so that the mean of two ranks is a whole number.
    let (mut ranks, mut positive) = (Vec::with_capacity(differences.len()), 0);
    for ties in differences.chunk_by(|a, b| a.abs() == b.abs()) {
        let rank = 2 * ranks.len() + ties.len() + 1;
        positive += rank * ties.iter().filter(|difference| **difference > 0.0).count();
        ranks.extend(std::iter::repeat_n(rank, ties.len()));
    }
    let all: usize = ranks.iter().sum();
    let tail = positive.min(all - positive);
    let one_side = if ranks.len() > COUNTED { by_the_normal_distribution(&ranks, tail) } else { counted(&ranks, tail) };
    (2.0 * one_side).min(1.0)
}

/// The probability that the sum of the ranks whose sign is positive is at most `tail`, by counting
/// all combinations of signs.
fn counted(ranks: &[usize], tail: usize) -> f64 {
    let mut sums = vec![0.0; ranks.iter().sum::<usize>() + 1];
    sums[0] = 1.0;
    let mut reached = 0;
    for rank in ranks {
        reached += rank;
        for sum in (0..=reached).rev() {
            let with = if sum >= *rank { sums[sum - rank] } else { 0.0 };
            sums[sum] = (sums[sum] + with) / 2.0;
        }
    }
    sums[..=tail].iter().sum()
}

/// The same, for many ranks.
fn by_the_normal_distribution(ranks: &[usize], tail: usize) -> f64 {
    let (sum, squares) = ranks.iter().fold((0, 0), |(sum, squares), rank| (sum + rank, squares + rank * rank));
    // Half a rank is one here.
    let z = (sum as f64 / 2.0 - tail as f64 - 1.0) / (squares as f64 / 4.0).sqrt();
    libm::erfc(z / std::f64::consts::SQRT_2) / 2.0
}

/// Holm's correction: for each of several probabilities, how likely such a value is in any of them.
/// At most `p` of families of true hypotheses have a corrected value of `p` or less.
pub fn holm(probabilities: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&a, &b| probabilities[a].total_cmp(&probabilities[b]));
    let (mut corrected, mut most) = (vec![1.0; probabilities.len()], 0.0_f64);
    for (n, &at) in order.iter().enumerate() {
        most = most.max(probabilities[at] * (order.len() - n) as f64).min(1.0);
        corrected[at] = most;
    }
    corrected
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

    #[test]
    fn signed_ranks_as_in_the_tables() {
        // All of one sign: 2 / 2^n.
        for n in [1, 5, 9, 20] {
            let all: Vec<f64> = (1..=n).map(f64::from).collect();
            assert!((signed_rank(&all) - 2f64.powi(1 - n)).abs() < 1e-15, "{n}");
        }
        // The tables' critical sums for 5 %, two-sided: 8 of 10 values have at most 4.89 %, 52 of
        // 20 at most 4.84 %.
        let with_sum = |n: u32, sum: u32| -> Vec<f64> {
            let mut left = sum;
            let mut sign = |rank: u32| {
                if left >= rank {
                    left -= rank;
                    -f64::from(rank)
                } else {
                    f64::from(rank)
                }
            };
            (1..=n).rev().map(&mut sign).collect()
        };
        for (n, sum, p) in [(10, 8, 0.0488), (10, 9, 0.0645), (20, 52, 0.0484), (20, 53, 0.0532)] {
            assert!(
                (signed_rank(&with_sum(n, sum)) - p).abs() < 6e-5,
                "{n}, {sum}: {}",
                signed_rank(&with_sum(n, sum))
            );
        }
        // Ties share their rank: of (1, 1, 2) with signs - + +, the sum is 1.5, and 4 of 8 sums are
        // as far from the middle.
        assert_eq!(signed_rank(&[-1.0, 1.0, 2.0]), 1.0_f64.min(2.0 * 3.0 / 8.0));
        assert_eq!([signed_rank(&[]), signed_rank(&[0.0])], [1.0, 1.0]);
        // The sides are equal.
        assert_eq!(signed_rank(&with_sum(10, 8)), signed_rank(&with_sum(10, 55 - 8)));
    }

    #[test]
    fn many_signed_ranks_are_near_the_normal_distribution() {
        let ranks: Vec<usize> = (1..=200).map(|rank| 2 * rank).collect();
        for tail in [15_000, 17_000, 20_000] {
            let (counted, normal) = (counted(&ranks, tail), by_the_normal_distribution(&ranks, tail));
            assert!((counted / normal - 1.0).abs() < 0.1, "{tail}: {counted} {normal}");
        }
        // So many that only the normal distribution is left; all of one sign, and evenly.
        let one = |n: i32| f64::from(n);
        assert!(signed_rank(&(1..=1000).map(one).collect::<Vec<_>>()) < 1e-100);
        let evenly: Vec<f64> = (1..=1000).map(|n| if n % 4 < 2 { one(n) } else { -one(n) }).collect();
        assert!(signed_rank(&evenly) > 0.9);
    }

    #[test]
    fn holm_corrects_for_the_number() {
        let corrected = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (corrected, right) in corrected.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((corrected - right).abs() < 1e-12, "{corrected} {right}");
        }
        assert_eq!((holm(&[0.7, 0.6]), holm(&[])), (vec![1.0, 1.0], vec![]));
    }
}
