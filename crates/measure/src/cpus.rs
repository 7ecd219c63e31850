//! CPUs: which CPUs exist, which of them this process may use, and which thread runs on which.

use crate::arguments::BadArgument;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// CPUs that this process may use, in order.
pub fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    let cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// CPUs that are online.
pub fn online() -> Vec<usize> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online");
    list.ok().and_then(|list| parse(list.trim())).unwrap_or_else(allowed)
}

/// The kernel's notation for a set: `0-3,8`.
fn parse(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(from.parse::<usize>().ok()?..=to.parse().ok()?);
    }
    Some(cpus)
}

/// A set of CPUs in the kernel's notation: `0-3,8`.
pub fn list(cpus: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match parts.last_mut() {
            Some((_, to)) if *to + 1 == cpu => *to = cpu,
            _ => parts.push((cpu, cpu)),
        }
    }
    let part = |(from, to): (usize, usize)| if from == to { format!("{from}") } else { format!("{from}-{to}") };
    parts.into_iter().map(part).collect::<Vec<_>>().join(",")
}

/// Checks that a thread can be moved to `cpu`, which the argument `what` names.
///
/// # Errors
///
/// The CPU does not exist, or is not in the affinity mask of this process.
pub fn check(what: &str, cpu: usize, online: &[usize], allowed: &[usize]) -> Result<(), BadArgument> {
    if !online.contains(&cpu) {
        return BadArgument::new(format!("{what}: CPU {cpu} does not exist; this machine has {}", list(online)));
    }
    if !allowed.contains(&cpu) {
        return BadArgument::new(format!(
            "{what}: CPU {cpu} is not in this process's affinity mask, which has {}; use one of those, or change the mask \
             (taskset, cpuset)",
            list(allowed)
        ));
    }
    Ok(())
}

/// The CPUs that threads were moved to, since [`take_pinned`] was last called.
static PINNED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Moves this thread to `cpu`. If that fails because the mask has just changed, the thread stays
/// where it may run.
pub fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if sched_setaffinity(None, &set).is_ok() {
        PINNED.lock().unwrap_or_else(PoisonError::into_inner).insert(cpu);
    }
}

/// The CPUs to which [`pin`] has moved threads since the last call: those on which a measurement
/// really ran.
pub fn take_pinned() -> BTreeSet<usize> {
    std::mem::take(&mut PINNED.lock().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_notation() {
        assert_eq!(parse("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(list(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(parse("x"), None);
    }
}
