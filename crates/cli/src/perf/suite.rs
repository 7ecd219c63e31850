//! All variants, in turns.

use super::engine::Engine;
use super::error::PerfError;
use super::json::Report;
use super::live::Live;
use super::plan::Plan;
use super::sample::Sample;
use crate::link::AskedLink;
use netmem_measure::load::Meter;
use netmem_measure::report::Done;
use netmem_measure::turns::{progress, take_turns};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Runs every variant as often as planned, or until a signal comes. Also returns what was before
/// the ports.
pub(crate) fn run(plan: &Plan, live: Option<&Live>, stop: &AtomicBool) -> anyhow::Result<(Report, Option<AskedLink>)> {
    let engine = Engine::new(plan, live, stop)?;
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); plan.variants.len()];
    let wanted: Vec<usize> = (0..samples.len()).filter(|&i| plan.variants[i].skipped.is_none()).collect();
    let bar = progress(plan.runs as usize * wanted.len());
    let budget = plan.budget.map(|budget| (budget, Duration::ZERO));
    let meter = Meter::new();
    let turns = take_turns(plan.runs, budget, &wanted, &bar, |i| {
        bar.set_message(plan.variants[i].to_string());
        samples[i].push(engine.run(&plan.variants[i])?);
        bar.inc(1);
        Ok(())
    });
    bar.finish_and_clear();
    let interrupted = match turns {
        Err(PerfError::Interrupted) => true,
        done => done.map(|()| false)?,
    };
    let cpus = samples.iter().flatten().flat_map(|s| s.cpus.iter().copied()).collect();
    let done = Done::new(&meter, cpus, interrupted);
    let preempted: u64 = samples.iter().flatten().map(|s| s.counts.preempted).sum();
    let seconds: f64 = samples.iter().flatten().map(|s| s.counts.elapsed_ns as f64 / 1e9).sum();
    // Even on a quiet machine, timers and kernel threads sometimes take the CPU.
    if preempted as f64 > 20.0 * seconds + 20.0 {
        eprintln!(
            "warning: other programs were given the driver's CPU {preempted} times in {seconds:.1} s; rates are too low, and \
             times too long"
        );
    }
    let link = engine.into_link();
    Ok((Report::new(plan, &samples, done, link.as_ref().and_then(AskedLink::report)), link))
}
