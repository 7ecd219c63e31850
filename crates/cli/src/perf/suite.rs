//! All variants, interleaved: whatever disturbs the machine for a while disturbs all of them alike.

use super::engine::{Engine, Sample};
use super::json::Report;
use super::plan::Plan;
use indicatif::{ProgressBar, ProgressStyle};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Runs every variant as often as planned. The order is reversed from run to run, so that of two neighbours each is
/// first as often as the other.
pub(crate) fn run(plan: &Plan, stop: &AtomicBool) -> anyhow::Result<Report> {
    let engine = Engine::new(plan, stop)?;
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); plan.variants.len()];
    let wanted: Vec<usize> = (0..samples.len()).filter(|&i| plan.variants[i].skipped.is_none()).collect();
    // Draws nothing where standard error is no terminal.
    let bar = ProgressBar::new(u64::from(plan.runs) * wanted.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    let begin = Instant::now();
    for run in 0..plan.runs {
        // A busy machine stretches every run. One more round must fit, if the rounds so far are anything to go by.
        if let Some(budget) = plan.budget.filter(|_| run > 0)
            && begin.elapsed() + begin.elapsed() / run > budget
        {
            bar.suspend(|| {
                eprintln!("warning: the machine is busy; only {run} of {} runs fit into {budget:?}", plan.runs)
            });
            break;
        }
        let mut order = wanted.clone();
        if run % 2 == 1 {
            order.reverse();
        }
        for i in order {
            bar.set_message(plan.variants[i].to_string());
            samples[i].push(engine.run(&plan.variants[i])?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let preempted: u64 = samples.iter().flatten().map(|s| s.counts.preempted).sum();
    let seconds: f64 = samples.iter().flatten().map(|s| s.counts.elapsed_ns as f64 / 1e9).sum();
    // A quiet machine still has its timers and kernel threads.
    if preempted as f64 > 20.0 * seconds + 20.0 {
        eprintln!(
            "warning: other programs were given the driver's CPU {preempted} times in {seconds:.1} s; rates are too low, and \
             times too long"
        );
    }
    Ok(Report::new(plan, &samples))
}
