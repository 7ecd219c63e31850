//! All measurements of a suite, in turns. A signal ends them; the finished ones are kept.

use crate::error::BenchError;
use crate::harness::Harness;
use crate::plan::Plan;
use crate::report::{Head, Row, Sample};
use netmem_measure::cpus;
use netmem_measure::turns::{in_words, progress, take_turns};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A measurement that is made once in every round. It fills one row or more.
pub(crate) trait Benchmark {
    /// The rows, in the order of what [`measure`](Self::measure) returns.
    fn heads(&self) -> Vec<Head>;

    /// Called once, before all rounds.
    ///
    /// # Errors
    ///
    /// [`BenchError::Unavailable`]: the rows cannot be measured here.
    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        Ok(())
    }

    /// One value for each row.
    ///
    /// # Errors
    ///
    /// [`BenchError::Unavailable`]: the rows can no longer be measured.
    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError>;

    /// How long [`measure`](Self::measure) takes, if each thread works for `duration` for one
    /// value: for the time that a plan takes.
    fn takes(&self, duration: Duration) -> Duration {
        duration
    }

    /// Whether it takes so long that it is measured only if the user asks for that.
    fn is_long(&self) -> bool {
        false
    }

    /// A remark on how it was measured, for the report.
    fn note(&self) -> Option<String> {
        None
    }
}

/// Rows that are not measured, and why.
pub(crate) struct Skipped {
    pub(crate) heads: Vec<Head>,
    pub(crate) why: String,
}

impl Benchmark for Skipped {
    fn heads(&self) -> Vec<Head> {
        self.heads.clone()
    }

    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        Err(BenchError::Unavailable { what: "skipped", why: self.why.clone() })
    }

    fn measure(&mut self, _harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        Ok(Vec::new())
    }

    fn takes(&self, _duration: Duration) -> Duration {
        Duration::ZERO
    }
}

/// The results of all rounds.
pub(crate) struct Rounds {
    pub(crate) rows: Vec<Row>,
    /// A signal came before all rounds were made.
    pub(crate) interrupted: bool,
}

/// Prints a line at the beginning of a run, where no bar is drawn. `made` measurements of all
/// runs, each of which has `each`, are made since `begin`.
fn line(suite: &str, runs: u32, made: usize, each: usize, begin: Instant) {
    let all = runs as usize * each;
    if !made.is_multiple_of(each) {
        return;
    }
    let left = match made {
        0 => String::new(),
        made => format!(", {} left", in_words(begin.elapsed().mul_f64((all - made) as f64 / made as f64))),
    };
    eprintln!("{suite}: run {} of {runs}{left}", made / each + 1);
}

/// Measures every benchmark as often as planned, or until a signal comes. Only the rows that the
/// plan chooses are kept.
pub(crate) fn run(
    plan: &Plan,
    benchmarks: &mut [Box<dyn Benchmark>],
    percpu: &str,
    stop: &AtomicBool,
) -> Result<Rounds, BenchError> {
    let harness = Harness::new(plan);
    let heads: Vec<Vec<Head>> = benchmarks.iter().map(|benchmark| benchmark.heads()).collect();
    let mut samples: Vec<Vec<Vec<Sample>>> = heads.iter().map(|heads| vec![Vec::new(); heads.len()]).collect();
    let mut skipped: Vec<Option<String>> = vec![None; benchmarks.len()];
    let mut pinned: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); benchmarks.len()];
    let bar = progress((plan.runs as usize + 1) * benchmarks.len());
    let suite = plan.suites.first().map_or("", |suite| suite.name());
    bar.set_prefix(format!("{suite} "));
    let step = |heads: &[Head]| {
        bar.inc(1);
        if let Some(head) = heads.first() {
            bar.set_message(format!("{} x{}", head.name, head.threads));
        }
        if stop.load(Ordering::Relaxed) { Err(BenchError::Interrupted) } else { Ok(()) }
    };
    // The signal that ends this command may also have ended a program that a benchmark started.
    let failed = |error| if stop.load(Ordering::Relaxed) { BenchError::Interrupted } else { error };
    let begin = Instant::now();
    let mut rounds = || {
        for (i, benchmark) in benchmarks.iter_mut().enumerate() {
            step(&heads[i])?;
            match benchmark.prepare(&harness).map_err(failed) {
                Err(BenchError::Unavailable { why, .. }) => skipped[i] = Some(why),
                done => done?,
            }
        }
        let budget = plan.budget.map(|budget| (budget, begin.elapsed()));
        let wanted: Vec<usize> = (0..benchmarks.len()).filter(|&i| skipped[i].is_none()).collect();
        let (turns, mut made) = (Instant::now(), 0);
        take_turns(plan.runs, budget, &wanted, &bar, |i| {
            step(&heads[i])?;
            if bar.is_hidden() {
                line(suite, plan.runs, made, wanted.len(), turns);
            }
            made += 1;
            if skipped[i].is_some() {
                return Ok(());
            }
            let (since, _) = (Instant::now(), cpus::take_pinned());
            match benchmarks[i].measure(&harness).map_err(failed) {
                Ok(values) => {
                    let run_ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    let values = values.into_iter().map(|sample| Sample { run_ns, ..sample });
                    samples[i].iter_mut().zip(values).for_each(|(row, sample)| row.push(sample));
                    pinned[i].append(&mut cpus::take_pinned());
                }
                // A peer that ended has not made all runs, and the median of some runs would not be
                // comparable.
                Err(BenchError::Unavailable { why, .. }) => {
                    skipped[i] = Some(why);
                    samples[i].iter_mut().for_each(Vec::clear);
                }
                Err(error) => return Err(error),
            }
            Ok(())
        })
    };
    let interrupted = match rounds() {
        Err(BenchError::Interrupted) => true,
        done => done.map(|()| false)?,
    };
    bar.finish_and_clear();
    let notes = benchmarks.iter().map(|benchmark| benchmark.note());
    let benchmarks = heads.into_iter().zip(samples).zip(skipped).zip(notes).zip(pinned);
    let rows = benchmarks.flat_map(|((((heads, samples), skipped), note), cpus)| {
        heads.into_iter().zip(samples).map(move |(head, samples)| Row {
            note: note.clone(),
            cpus: cpus.clone(),
            ..Row::new(head, percpu, samples, skipped.clone())
        })
    });
    Ok(Rounds { rows: rows.filter(|row| plan.rows.choose(&row.head)).collect(), interrupted })
}
