//! All measurements of a suite, in turns.

use super::error::BenchError;
use super::lab::Lab;
use super::plan::Plan;
use super::report::{Head, Row, Sample};
use crate::turns::{progress, take_turns};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What is measured once in every round, and fills one row or more.
pub(crate) trait Cell {
    /// The rows, in the order of what [`measure`](Self::measure) returns.
    fn heads(&self) -> Vec<Head>;

    /// Is called once, before all rounds.
    ///
    /// # Errors
    ///
    /// [`BenchError::Unavailable`] says that the rows cannot be measured here.
    fn prepare(&mut self, _lab: &Lab) -> Result<(), BenchError> {
        Ok(())
    }

    /// One value for each row.
    ///
    /// # Errors
    ///
    /// [`BenchError::Unavailable`] says that the rows can no longer be measured.
    fn measure(&mut self, lab: &Lab) -> Result<Vec<Sample>, BenchError>;

    /// What is to be known of how it was measured.
    fn note(&self) -> Option<String> {
        None
    }
}

/// Rows that are not measured, and why.
pub(crate) struct Skipped {
    pub(crate) heads: Vec<Head>,
    pub(crate) why: String,
}

impl Cell for Skipped {
    fn heads(&self) -> Vec<Head> {
        self.heads.clone()
    }

    fn prepare(&mut self, _lab: &Lab) -> Result<(), BenchError> {
        Err(BenchError::Unavailable { what: "skipped", why: self.why.clone() })
    }

    fn measure(&mut self, _lab: &Lab) -> Result<Vec<Sample>, BenchError> {
        Ok(Vec::new())
    }
}

/// Measures every cell as often as planned.
pub(crate) fn run(
    plan: &Plan,
    cells: &mut [Box<dyn Cell>],
    percpu: &str,
    stop: &AtomicBool,
) -> Result<Vec<Row>, BenchError> {
    let lab = Lab::new(plan);
    let heads: Vec<Vec<Head>> = cells.iter().map(|cell| cell.heads()).collect();
    let mut samples: Vec<Vec<Vec<Sample>>> = heads.iter().map(|heads| vec![Vec::new(); heads.len()]).collect();
    let mut skipped: Vec<Option<String>> = vec![None; cells.len()];
    let bar = progress((plan.runs as usize + 1) * cells.len());
    let step = |heads: &[Head]| {
        bar.inc(1);
        if let Some(head) = heads.first() {
            bar.set_message(format!("{} x{}", head.name, head.threads));
        }
        if stop.load(Ordering::Relaxed) { Err(BenchError::Interrupted) } else { Ok(()) }
    };
    let begin = Instant::now();
    for (i, cell) in cells.iter_mut().enumerate() {
        step(&heads[i])?;
        match cell.prepare(&lab) {
            Err(BenchError::Unavailable { why, .. }) => skipped[i] = Some(why),
            done => done?,
        }
    }
    let budget = plan.budget.map(|budget| (budget, begin.elapsed()));
    let wanted: Vec<usize> = (0..cells.len()).filter(|&i| skipped[i].is_none()).collect();
    take_turns(plan.runs, budget, &wanted, &bar, |i| {
        step(&heads[i])?;
        if skipped[i].is_some() {
            return Ok(());
        }
        match cells[i].measure(&lab) {
            Ok(values) => samples[i].iter_mut().zip(values).for_each(|(row, sample)| row.push(sample)),
            // Runs that a peer did not live to end are no medians.
            Err(BenchError::Unavailable { why, .. }) => {
                skipped[i] = Some(why);
                samples[i].iter_mut().for_each(Vec::clear);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    })?;
    warn_of_company(&samples, begin.elapsed());
    let notes = cells.iter().map(|cell| cell.note());
    let rows =
        heads.into_iter().zip(samples).zip(skipped).zip(notes).flat_map(|(((heads, samples), skipped), note)| {
            heads.into_iter().zip(samples).map(move |(head, samples)| Row {
                note: note.clone(),
                ..Row::new(head, percpu, samples, skipped.clone())
            })
        });
    Ok(rows.collect())
}

/// Times include what others had of the suite's CPUs; a thirtieth of all the time is more than timers and the kernel take.
fn warn_of_company(samples: &[Vec<Vec<Sample>>], elapsed: Duration) {
    // The rows of a cell are of the same threads.
    let lost_ns: u64 = samples.iter().filter_map(|rows| rows.first()).flatten().map(|s| s.lost_ns).sum();
    let lost = Duration::from_nanos(lost_ns);
    if lost > elapsed / 30 {
        eprintln!(
            "warning: other programs had the suite's CPUs for {lost:.1?} in {elapsed:.1?}; times are too long, and their ranges wide"
        );
    }
}
