//! The plan of a measurement, made from the checked arguments.

use crate::args::{SuiteArg, SuiteArgs};
use crate::rows::Rows;
use netmem_measure::arguments::BadArgument;
use netmem_measure::cpus;
use std::time::Duration;

/// The time of all runs if the user sets no number of runs.
const BUDGET: Duration = Duration::from_secs(27);

/// A suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suite {
    Refs,
    Pool,
    Tokens,
    Devmem,
    Streams,
}

impl Suite {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Refs => "refs",
            Self::Pool => "pool",
            Self::Tokens => "tokens",
            Self::Devmem => "devmem",
            Self::Streams => "streams",
        }
    }

    /// What the suite answers.
    pub(crate) fn question(self) -> &'static str {
        match self {
            Self::Refs => {
                "What do a get and a put of a reference cost, for one thread and for several threads that share a count?"
            }
            Self::Pool => {
                "What does it cost to allocate a page and to return it, in the poll context and from other CPUs?"
            }
            Self::Tokens => {
                "What does it cost a socket to receive a fragment of device memory and to have its token returned?"
            }
            Self::Devmem => {
                "What CPU time does a gigabyte cost that is received into device memory or sent from it, end to end?"
            }
            Self::Streams => {
                "How do throughput, CPU time and latency of TCP on our stack compare with the kernel's and with smoltcp's?"
            }
        }
    }
}

/// The checked arguments.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) suites: Vec<Suite>,
    /// Numbers of threads, sorted, without duplicates.
    pub(crate) threads: Vec<usize>,
    /// The CPUs of the threads, the first thread's first: each thread has a CPU of its own.
    pub(crate) cpus: Vec<usize>,
    /// How long each thread works for one value.
    pub(crate) duration: Duration,
    /// Whether the user has chosen that time.
    pub(crate) asked: bool,
    pub(crate) runs: u32,
    /// The time that all runs may take, if the user has given no number of runs.
    pub(crate) budget: Option<Duration>,
    pub(crate) rows: Rows,
    /// Whether rows that take long are measured without being named.
    pub(crate) long: bool,
}

impl Plan {
    pub(crate) fn new(args: &SuiteArgs) -> Result<Self, BadArgument> {
        Self::on(args, &cpus::allowed())
    }

    pub(crate) fn on(args: &SuiteArgs, allowed: &[usize]) -> Result<Self, BadArgument> {
        let mut suites: Vec<Suite> = Vec::new();
        for suite in &args.suites {
            let asked: &[Suite] = match suite {
                SuiteArg::Refs => &[Suite::Refs],
                SuiteArg::Pool => &[Suite::Pool],
                SuiteArg::Tokens => &[Suite::Tokens],
                SuiteArg::Devmem => &[Suite::Devmem],
                SuiteArg::Streams => &[Suite::Streams],
                SuiteArg::All => &[Suite::Refs, Suite::Pool, Suite::Tokens, Suite::Devmem, Suite::Streams],
            };
            for &suite in asked {
                if !suites.contains(&suite) {
                    suites.push(suite);
                }
            }
        }
        let n = allowed.len();
        let mut threads = if args.threads.is_empty() { powers(n) } else { args.threads.clone() };
        threads.sort_unstable();
        threads.dedup();
        if threads.first() == Some(&0) {
            return BadArgument::new("--threads 0: nothing is measured without a thread; give 1 or more");
        }
        if let Some(&most) = threads.last().filter(|&&most| most > n) {
            let plural = if n == 1 { "" } else { "s" };
            return BadArgument::new(format!(
                "--threads {most}: this process may use {n} CPU{plural} ({}), and threads that share one would measure the \
                 scheduler; give at most {n}, or change the affinity mask (taskset, cpuset)",
                cpus::list(allowed)
            ));
        }
        if args.runs == Some(0) {
            return BadArgument::new("--runs 0: nothing is measured without a run; give 1 or more");
        }
        Ok(Self {
            suites,
            threads,
            // The first CPU often serves the machine's interrupts, so it is used last.
            cpus: allowed.iter().rev().copied().collect(),
            duration: args.duration.unwrap_or(Duration::from_millis(12)),
            asked: args.duration.is_some(),
            runs: args.runs.unwrap_or(9),
            budget: args.runs.is_none().then_some(BUDGET),
            rows: Rows::new(&args.rows),
            long: args.long,
        })
    }

    /// The plan for a suite.
    pub(crate) fn of(&self, suite: Suite) -> Self {
        let mut plan = Self { suites: vec![suite], ..self.clone() };
        if suite == Suite::Streams {
            // A connection needs time until its windows have grown to their limit.
            if !self.asked {
                plan.duration = Duration::from_millis(150);
            }
            plan.budget = self.budget.map(|budget| 5 * budget);
        }
        plan
    }

    /// The plan for a suite of which rows are measured that take long, in twice the time.
    pub(crate) fn with_long_rows(self) -> Self {
        Self { budget: self.budget.map(|budget| 2 * budget), ..self }
    }

    /// The largest number of threads that is measured.
    pub(crate) fn most(&self) -> usize {
        self.threads.last().copied().unwrap_or(1)
    }
}

/// 1, 2, 4 and so on up to `n`, and `n`.
fn powers(n: usize) -> Vec<usize> {
    let below = std::iter::successors(Some(1usize), |p| p.checked_mul(2)).take_while(|&p| p < n);
    below.chain([n]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn plan(args: &str, allowed: &[usize]) -> Result<Plan, String> {
        let args = ["netmem-bench"].into_iter().chain(args.split_whitespace());
        let cli = Cli::try_parse_from(args).map_err(|e| e.to_string())?;
        Plan::on(&cli.suites, allowed).map_err(|e| e.to_string())
    }

    #[test]
    fn threads_up_to_the_cpus() {
        assert_eq!(powers(1), [1]);
        assert_eq!(powers(2), [1, 2]);
        assert_eq!(powers(6), [1, 2, 4, 6]);
        assert_eq!(powers(16), [1, 2, 4, 8, 16]);
        assert_eq!(plan("refs", &[0, 1, 2]).unwrap().threads, [1, 2, 3]);
    }

    #[test]
    fn what_was_asked_for_once_and_in_order() {
        let plan = plan("refs all pool refs --threads 2,1,2 --runs 3 --duration 20ms", &[4, 5]).unwrap();
        let suites = vec![Suite::Refs, Suite::Pool, Suite::Tokens, Suite::Devmem, Suite::Streams];
        assert_eq!((plan.suites, plan.threads, plan.cpus), (suites, vec![1, 2], vec![5, 4]));
        assert_eq!((plan.runs, plan.duration, plan.budget), (3, Duration::from_millis(20), None));
    }

    #[test]
    fn bad_arguments_say_what_is_wrong() {
        for (args, says) in [
            ("", "SUITE"),
            ("virtio", "streams"),
            ("refs --threads 0", "--threads 0"),
            ("refs --threads 1,3", "2 CPUs (0-1)"),
            ("refs --threads two", "--threads"),
            ("refs --runs 0", "--runs 0"),
            ("refs --duration 3m", "suffix `m`"),
        ] {
            let error = plan(args, &[0, 1]).unwrap_err();
            assert!(error.contains(says), "{args}: {error}");
        }
    }
}
