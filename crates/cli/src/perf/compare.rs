//! Compares the page pool's rows with the baselines, and with the gains that the kernel's page pool
//! brought to virtio-net.

use super::plan::{Consumer, Variant};
use super::sample::Sample;
use crate::args::AllocArg;
use netmem::virtio::RxMode;
use netmem_measure::goals::{Goal, Missing, Target, Verdict, evaluate, percent};
use netmem_measure::stats::Change;
use netmem_measure::table::table;
use serde::Serialize;

/// The gain of the kernel's virtio-net driver, in packets per second, when it began to take its
/// pages from a page pool: for 1, 2, 4 and 8 queue pairs, in percent.
const KERNEL: [(RxMode, usize, [f64; 4]); 3] = [
    (RxMode::Small, 64, [1.8, 2.5, 5.1, 1.2]),
    (RxMode::Mergeable, 64, [6.3, 20.6, 11.1, 7.9]),
    (RxMode::Mergeable, 1500, [5.9, 17.1, 5.2, 5.0]),
];

/// Compares a row of the page pool with the row of a baseline that differs in nothing else.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) name: String,
    pub(crate) consumer: &'static str,
    pub(crate) queues: u16,
    /// The baseline: `page` or `frags`.
    pub(crate) over: &'static str,
    /// Packets per second.
    pub(crate) rate: Change,
    /// The driver's own time for a packet.
    pub(crate) ns: Change,
    /// For the table: the verdicts of this comparison's goals.
    #[serde(skip)]
    less_time: Verdict,
    #[serde(skip)]
    as_kernel: Option<(f64, Verdict)>,
}

/// All comparisons and their goals, in the order of the rows. `rate` and `ns` return the values of
/// a run.
///
/// Goals: the driver needs less time, which the whole interval must show; and packets per second
/// rise by at least the kernel's gain, in rows for which the kernel has a figure.
pub(super) fn compare(
    variants: &[Variant],
    samples: &[Vec<Sample>],
    rate: fn(&Sample) -> f64,
    ns: fn(&Sample) -> f64,
    percpu: &str,
) -> (Vec<Comparison>, Vec<Goal>) {
    let rows = || variants.iter().zip(samples);
    let (mut comparisons, mut goals) = (Vec::new(), Vec::new());
    for (base, samples) in rows().filter(|(v, _)| v.alloc != AllocArg::Pool) {
        let Some((pool, own)) = rows().find(|(v, _)| v.alloc == AllocArg::Pool && v.is_twin(base)) else { continue };
        let change = |of: fn(&Sample) -> f64| {
            let skipped = [pool, base].into_iter().find_map(|v| Some(format!("{v}: {}", v.skipped?)));
            let change = Change::of(own.iter().map(of).zip(samples.iter().map(of)));
            change.ok_or_else(|| {
                skipped.map_or_else(|| Missing::NotRun(format!("{pool} and {base} share no run")), Missing::Skipped)
            })
        };
        let (rate, ns) = (change(rate), change(ns));
        let (over, threads) = (base.alloc.name(), if base.consumer == Consumer::Same { 1 } else { 2 });
        let what = |quantity: &str| {
            format!("{} {} x{}: {quantity}, pool over {over}", base.name, base.consumer.name(), base.queues)
        };
        let time = Target::most(threads, what("driver time") + " <= 0 %", ns.clone().map(percent), "%", 0.0).whole();
        let gain = kernel(base).map(|gain| {
            Target::least(threads, format!("{} >= {gain:+} %", what("packets/s")), rate.clone().map(percent), "%", gain)
        });
        let judged = evaluate([Some(time), gain].into_iter().flatten(), percpu);
        if let ([less_time, as_kernel @ ..], Ok(rate), Ok(ns)) = (&judged[..], rate, ns) {
            comparisons.push(Comparison {
                name: base.name.clone(),
                consumer: base.consumer.name(),
                queues: base.queues,
                over,
                rate,
                ns,
                less_time: less_time.verdict,
                as_kernel: as_kernel.first().map(|goal| (goal.bound, goal.verdict)),
            });
        }
        goals.extend(judged);
    }
    (comparisons, goals)
}

/// The kernel's gain in such a row, if its packets are dropped on the CPU that receives them.
fn kernel(v: &Variant) -> Option<f64> {
    let (.., gains) = KERNEL.iter().find(|k| v.consumer == Consumer::Same && (k.0, Some(k.1)) == (v.mode, v.size))?;
    let at = [1, 2, 4, 8].iter().position(|&queues| queues == v.queues)?;
    Some(gains[at])
}

/// The comparisons as a table of at most 100 columns.
pub(super) fn render(comparisons: &[Comparison]) -> String {
    let head = ["pool over", "drop", "q", "", "packets/s", "driver time", "goals: less time", "kernel's gain"];
    let row = |c: &Comparison| {
        let show = |change: Change| {
            let [low, high] = change.interval;
            format!("{:+.0} % [{low:+.0}..{high:+.0}]", change.median_pct)
        };
        let kernel = c.as_kernel.map(|(gain, verdict)| format!("{gain:+} %: {}", verdict.word()));
        vec![
            c.name.clone(),
            c.consumer.into(),
            c.queues.to_string(),
            c.over.into(),
            show(c.rate),
            show(c.ns),
            c.less_time.word().into(),
            kernel.unwrap_or_default(),
        ]
    };
    table(&head, comparisons.iter().map(row), |_| false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem::pool::{Backing, PoolStats};
    use std::collections::{BTreeMap, BTreeSet};

    fn variant(alloc: AllocArg, consumer: Consumer, queues: u16) -> Variant {
        let (name, shape) = ("small-64".to_owned(), "small".to_owned());
        Variant { mode: RxMode::Small, size: Some(64), name, alloc, consumer, queues, skipped: None, shape }
    }

    fn samples(ns: [u64; 6]) -> Vec<Sample> {
        let sample = |ns| Sample {
            counts: super::super::sample::Counts { frames: 1, busy_ns: ns, elapsed_ns: ns, ..Default::default() },
            device: None,
            pool: PoolStats::default(),
            leaked: 0,
            errors: BTreeMap::new(),
            backing: Backing::Plain,
            features: 0,
            sockets: Vec::new(),
            cpus: BTreeSet::new(),
        };
        ns.map(sample).to_vec()
    }

    #[test]
    fn the_pool_is_held_against_each_baseline_and_the_kernels_gain() {
        use AllocArg::{Frags, Page, Pool};
        use Consumer::{Other, Same};
        let variants = [(Pool, Same), (Page, Same), (Frags, Same), (Page, Other)].map(|(a, c)| variant(a, c, 2));
        let pool = samples([100; 6]);
        let rows = [pool, samples([200; 6]), samples([102, 102, 102, 102, 99, 99]), samples([50; 6])];
        let judge = |rows: &[Vec<Sample>]| {
            compare(&variants, rows, |s| 1e9 / s.counts.busy_ns as f64, |s| s.counts.busy_ns as f64, "rseq")
        };
        let (compared, goals) = judge(&rows);
        let got: Vec<_> = goals.iter().map(|goal| (goal.goal.as_str(), goal.bound, goal.verdict.word())).collect();
        // 102 against 100 is a gain of 2 %, less than the kernel's gain with two queues; and the
        // interval of the time includes 99.
        assert_eq!(
            got,
            [
                ("small-64 same x2: driver time, pool over page <= 0 %", 0.0, "reached"),
                ("small-64 same x2: packets/s, pool over page >= +2.5 %", 2.5, "reached"),
                ("small-64 same x2: driver time, pool over frags <= 0 %", 0.0, "missed"),
                ("small-64 same x2: packets/s, pool over frags >= +2.5 %", 2.5, "missed"),
            ]
        );
        // Without runs there is nothing to compare. A row that was skipped is not the same as one
        // without a run.
        let (none, goals) = judge(&[samples([1; 6]), Vec::new(), Vec::new(), Vec::new()]);
        assert!(none.is_empty() && goals.iter().all(|goal| goal.verdict == Verdict::NotRun), "{goals:?}");
        let skipped = [Variant { skipped: Some("why"), ..variants[0].clone() }, variants[1].clone()];
        let (_, goals) = compare(&skipped, &[Vec::new(), samples([1; 6])], |_| 1.0, |_| 1.0, "rseq");
        assert!(goals.len() == 2 && goals.iter().all(|goal| goal.verdict == Verdict::Skipped), "{goals:?}");
        assert_eq!(goals[0].why.as_deref(), Some("small-64 pool same x2: why"));
        let text = render(&compared);
        assert!(text.contains("+100 %") && text.contains("+2.5 %: missed"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        // The kernel has no figures for packets that are dropped on another CPU, nor for three
        // queues.
        assert_eq!([kernel(&variant(Page, Other, 1)), kernel(&variant(Page, Same, 3))], [None, None]);
    }
}
