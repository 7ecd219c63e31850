//! Measurements that take turns, so that a disturbance of the machine affects all of them alike.

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// A progress bar over `steps`, each of which has a message, with the time that is left. Draws
/// nothing if standard error is no terminal.
pub fn progress(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{prefix}{bar:30} {pos}/{len}, {eta} left  {msg}") {
        bar.set_style(style);
    }
    bar
}

/// A time in words, in its largest unit: `3 minutes`.
pub fn in_words(time: Duration) -> String {
    HumanDuration(time).to_string()
}

/// Calls `measure` for each of `wanted`, `runs` times, or as often as fits into the `budget`. A
/// budget is the whole time and the time that is spent already. The order is reversed from run to
/// run, so that of two neighbours each is first equally often.
///
/// # Errors
///
/// The first error of `measure` ends the measurements.
pub fn take_turns<E>(
    runs: u32,
    budget: Option<(Duration, Duration)>,
    wanted: &[usize],
    bar: &ProgressBar,
    mut measure: impl FnMut(usize) -> Result<(), E>,
) -> Result<(), E> {
    let begin = Instant::now();
    for run in 0..runs {
        // On a busy machine every run takes longer. One more round must fit into the budget if it
        // takes as long as the rounds so far did on average.
        if let Some((budget, spent)) = budget.filter(|_| run > 0)
            && spent + begin.elapsed() + begin.elapsed() / run > budget
        {
            bar.suspend(|| eprintln!("warning: the machine is busy; only {run} of {runs} runs fit into {budget:?}"));
            break;
        }
        let forwards = wanted.iter().copied();
        if run % 2 == 0 {
            forwards.clone().try_for_each(&mut measure)
        } else {
            forwards.rev().try_for_each(&mut measure)
        }?;
    }
    bar.finish_and_clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn order(runs: u32, budget: Option<(Duration, Duration)>) -> Vec<usize> {
        let mut order = Vec::new();
        let Ok(()) = take_turns(runs, budget, &[0, 2, 3], &ProgressBar::hidden(), |i| {
            order.push(i);
            Ok::<(), Infallible>(())
        });
        order
    }

    #[test]
    fn turns_go_forwards_and_backwards() {
        assert_eq!(order(3, None), [0, 2, 3, 3, 2, 0, 0, 2, 3]);
    }

    #[test]
    fn a_budget_that_is_spent_ends_it_after_one_run() {
        let second = Duration::from_secs(1);
        assert_eq!(order(3, Some((second, 2 * second))), [0, 2, 3]);
    }

    #[test]
    fn an_error_ends_it() {
        let failed = take_turns(3, None, &[0, 1, 2], &ProgressBar::hidden(), |i| if i == 1 { Err(i) } else { Ok(()) });
        assert_eq!(failed, Err(1));
    }
}
