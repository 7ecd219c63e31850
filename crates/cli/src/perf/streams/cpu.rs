//! What CPUs did, as the kernel counts it.

use anyhow::Context;
use serde::Serialize;
use std::collections::BTreeMap;

/// The file.
const STAT: &str = "/proc/stat";

/// Ticks of each CPU by what it did, since the machine started.
#[derive(Clone, Debug)]
pub(super) struct Cpus(BTreeMap<usize, [u64; 8]>);

/// What a CPU did in a time, in percent of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Share {
    pub(super) usr: f64,
    pub(super) sys: f64,
    pub(super) idle: f64,
    pub(super) irq: f64,
    pub(super) softirq: f64,
}

impl Cpus {
    pub(super) fn now() -> anyhow::Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string(STAT).context(STAT)?))
    }

    fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let mut words = line.strip_prefix("cpu")?.split_whitespace();
            let cpu = words.next()?.parse().ok()?;
            let mut ticks = [0; 8];
            for place in &mut ticks {
                *place = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
            }
            Some((cpu, ticks))
        };
        // The first line is the sum of all.
        Self(text.lines().filter(|line| !line.starts_with("cpu ")).filter_map(line).collect())
    }

    /// What each CPU did since `before`.
    pub(super) fn since(&self, before: &Self) -> BTreeMap<usize, Share> {
        let share = |(cpu, after): (&usize, &[u64; 8])| {
            let before = before.0.get(cpu)?;
            let ticks: [u64; 8] = std::array::from_fn(|n| after[n].saturating_sub(before[n]));
            let total = ticks.iter().sum::<u64>().max(1) as f64;
            let [usr, nice, sys, idle, iowait, irq, softirq, steal] = ticks.map(|n| n as f64 * 100.0 / total);
            // Time that the hypervisor gave to others was no time of ours.
            Some((*cpu, Share { usr: usr + nice, sys, idle: idle + iowait + steal, irq, softirq }))
        };
        self.0.iter().filter_map(share).collect()
    }
}

impl Share {
    /// Counts a part of the user time, between 0 and 1 of all time, as idle: it was spent in empty polls.
    pub(super) fn with_idle(self, part: f64) -> Self {
        let empty = (part * 100.0).clamp(0.0, self.usr);
        Self { usr: self.usr - empty, idle: self.idle + empty, ..self }
    }

    pub(super) fn mean(shares: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| shares.iter().map(of).sum::<f64>() / shares.len().max(1) as f64;
        Self {
            usr: mean(|s| s.usr),
            sys: mean(|s| s.sys),
            idle: mean(|s| s.idle),
            irq: mean(|s| s.irq),
            softirq: mean(|s| s.softirq),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_time_between() {
        let before =
            Cpus::parse("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 10 0 20 100 0 0 0 0 0 0\ncpu3 0 0 0 0 0 0 0 0 0 0\nintr 5\n");
        let after =
            Cpus::parse("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 60 10 30 110 5 1 4 10 0 0\ncpu3 0 0 0 50 0 0 0 0 0 0\n");
        let shares = after.since(&before);
        assert_eq!(shares[&0], Share { usr: 60.0, sys: 10.0, idle: 25.0, irq: 1.0, softirq: 4.0 });
        assert_eq!((shares.len(), shares[&3].idle), (2, 100.0));
        // A thread that polled in vain for half the time.
        assert_eq!(shares[&0].with_idle(0.5), Share { usr: 10.0, idle: 75.0, ..shares[&0] });
        assert_eq!(shares[&0].with_idle(2.0), Share { usr: 0.0, idle: 85.0, ..shares[&0] });
    }
}
