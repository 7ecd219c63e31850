//! What CPUs did, as the kernel counts it: the shares of each CPU's time, and the CPU time of this
//! command, of other programs and of the hypervisor.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::time::Instant;

/// The file with the times of all CPUs.
const STAT: &str = "/proc/stat";

/// Ticks of each CPU by what it did, since the machine started.
#[derive(Clone, Debug)]
pub struct Cpus(BTreeMap<usize, [u64; 8]>);

/// What a CPU did in a time, in percent of that time.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Share {
    /// Programs in user mode.
    pub usr: f64,
    /// The kernel for programs.
    pub sys: f64,
    /// Nothing.
    pub idle: f64,
    /// Nothing, while a program waited for a disk.
    pub iowait: f64,
    /// Interrupts.
    pub irq: f64,
    /// Softirqs.
    pub softirq: f64,
    /// Time that the hypervisor gave to other guests.
    pub steal: f64,
}

impl Cpus {
    /// Reads the kernel's counts: one file of text, a line for each CPU.
    ///
    /// # Errors
    ///
    /// `/proc/stat` cannot be read.
    pub fn now() -> io::Result<Self> {
        let text = std::fs::read_to_string(STAT);
        Ok(Self::parse(&text.map_err(|e| io::Error::new(e.kind(), format!("{STAT}: {e}")))?))
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
    pub fn since(&self, before: &Self) -> BTreeMap<usize, Share> {
        let share = |(cpu, after): (&usize, &[u64; 8])| {
            let before = before.0.get(cpu)?;
            let ticks: [u64; 8] = std::array::from_fn(|n| after[n].saturating_sub(before[n]));
            let total = ticks.iter().sum::<u64>().max(1) as f64;
            let [usr, nice, sys, idle, iowait, irq, softirq, steal] = ticks.map(|n| n as f64 * 100.0 / total);
            Some((*cpu, Share { usr: usr + nice, sys, idle, iowait, irq, softirq, steal }))
        };
        self.0.iter().filter_map(share).collect()
    }

    /// The ticks of some CPUs since `before`, together, by what they did.
    fn ticks_since(&self, before: &Self, cpus: &[usize]) -> [u64; 8] {
        let both = cpus.iter().filter_map(|cpu| Some((self.0.get(cpu)?, before.0.get(cpu)?)));
        both.fold([0; 8], |sum, (after, before)| std::array::from_fn(|n| sum[n] + after[n].saturating_sub(before[n])))
    }
}

/// The CPU time of a measurement, in seconds, of all CPUs that this process may use together. The
/// kernel counts in ticks, most often of 10 ms.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct CpuTime {
    /// The CPUs that are counted.
    pub cpus: Vec<usize>,
    /// This command and its children.
    pub own_s: f64,
    /// Other programs, kernel threads among them.
    pub others_s: f64,
    /// Interrupts and softirqs of every program.
    pub interrupts_s: f64,
    /// Time that the hypervisor gave to other guests.
    pub stolen_s: f64,
    /// Time in which no program ran.
    pub idle_s: f64,
}

impl CpuTime {
    /// Whether other programs and the hypervisor had more than a thirtieth of the time. Timers and
    /// the kernel's own threads take less.
    pub fn disturbed(&self) -> bool {
        let all = self.own_s + self.others_s + self.interrupts_s + self.stolen_s + self.idle_s;
        self.others_s + self.stolen_s > all / 30.0
    }
}

impl std::fmt::Display for CpuTime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = self.own_s + self.others_s + self.interrupts_s + self.stolen_s + self.idle_s;
        let share = |s: f64| format!("{:.0} %", s * 100.0 / all.max(f64::MIN_POSITIVE));
        write!(
            f,
            "CPU time: this command {}, other programs {}, stolen by the hypervisor {}, interrupts {}, idle {}",
            share(self.own_s),
            share(self.others_s),
            share(self.stolen_s),
            share(self.interrupts_s),
            share(self.idle_s),
        )?;
        if self.disturbed() {
            write!(
                f,
                "\nwarning: other programs had the CPUs; times are too long, rates too low, and their ranges wide"
            )?;
        }
        Ok(())
    }
}

/// Counts the CPU time of programs, from the moment it is made.
#[derive(Debug)]
pub struct Meter {
    cpus: Vec<usize>,
    begin: Instant,
    /// What the CPUs did, and the ticks of this command, when the meter was made. `None` if the
    /// kernel does not report it.
    before: Option<(Cpus, u64)>,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// A meter of the CPUs that this process may use, from now on.
    pub fn new() -> Self {
        Self { cpus: crate::cpus::allowed(), begin: Instant::now(), before: Self::count() }
    }

    fn count() -> Option<(Cpus, u64)> {
        Some((Cpus::now().ok()?, own_ticks(std::process::id(), &processes())))
    }

    /// Seconds since the meter was made.
    pub fn elapsed_s(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }

    /// The CPU time since the meter was made. `None` if the kernel does not report it.
    pub fn read(&self) -> Option<CpuTime> {
        let (before, after) = (self.before.as_ref()?, Self::count()?);
        let ticks = after.0.ticks_since(&before.0, &self.cpus);
        Some(CpuTime::of(&self.cpus, ticks, after.1.saturating_sub(before.1), rustix::param::clock_ticks_per_second()))
    }
}

impl CpuTime {
    /// From ticks. A second has `per_second` of them.
    fn of(cpus: &[usize], ticks: [u64; 8], own: u64, per_second: u64) -> Self {
        let seconds = |n: u64| n as f64 / per_second.max(1) as f64;
        let [user, nice, system, idle, iowait, irq, softirq, stolen] = ticks;
        Self {
            cpus: cpus.to_vec(),
            own_s: seconds(own),
            others_s: seconds((user + nice + system).saturating_sub(own)),
            interrupts_s: seconds(irq + softirq),
            stolen_s: seconds(stolen),
            idle_s: seconds(idle + iowait),
        }
    }
}

/// Nanoseconds that this thread has had a CPU. A system call.
pub fn thread_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// A process: its parent, and the ticks of the process and of its children that have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    parent: u32,
    ticks: u64,
}

impl Process {
    /// Parses the text of `/proc/PID/stat`. The name in it can contain anything, and ends at the
    /// last parenthesis.
    fn parse(stat: &str) -> Option<Self> {
        let words: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |at: usize| words.get(at)?.parse::<u64>().ok();
        let ticks = [11, 12, 13, 14].into_iter().map(number).sum::<Option<u64>>()?;
        Some(Self { parent: words.get(1)?.parse().ok()?, ticks })
    }
}

/// All processes that can be seen.
fn processes() -> BTreeMap<u32, Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return BTreeMap::new() };
    let process = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?;
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, Process::parse(&std::fs::read_to_string(entry.path().join("stat")).ok()?)?))
    };
    entries.filter_map(process).collect()
}

/// The ticks of `root` and of all its descendants.
fn own_ticks(root: u32, processes: &BTreeMap<u32, Process>) -> u64 {
    let (mut family, mut at) = (vec![root], 0);
    while let Some(&parent) = family.get(at) {
        // In a real tree no process is its own descendant. In a text that changed while it was
        // read, one could be.
        let children = processes.iter().filter(|(_, p)| p.parent == parent).map(|(&pid, _)| pid);
        let new: Vec<u32> = children.filter(|pid| !family.contains(pid)).collect();
        family.extend(new);
        at += 1;
    }
    family.iter().filter_map(|pid| processes.get(pid)).map(|p| p.ticks).sum()
}

impl Share {
    /// Counts a part of the user time as idle, because it was spent in empty polls. `part` is
    /// between 0 and 1 and relates to all time.
    pub fn with_idle(self, part: f64) -> Self {
        let empty = (part * 100.0).clamp(0.0, self.usr);
        Self { usr: self.usr - empty, idle: self.idle + empty, ..self }
    }

    /// The part of the time in which the CPU worked for programs or the kernel, in percent.
    pub fn busy(&self) -> f64 {
        self.usr + self.sys + self.irq + self.softirq
    }

    /// The mean of the shares of several CPUs.
    pub fn mean(shares: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| shares.iter().map(of).sum::<f64>() / shares.len().max(1) as f64;
        Self {
            usr: mean(|s| s.usr),
            sys: mean(|s| s.sys),
            idle: mean(|s| s.idle),
            iowait: mean(|s| s.iowait),
            irq: mean(|s| s.irq),
            softirq: mean(|s| s.softirq),
            steal: mean(|s| s.steal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ours_is_of_other_programs() {
        let before = Cpus::parse("cpu0 10 0 20 100 0 0 0 0 0 0\ncpu3 0 0 0 0 0 0 0 0 0 0\n");
        let after = Cpus::parse("cpu0 60 10 30 110 5 1 4 10 0 0\ncpu3 100 0 0 50 0 0 0 0 0 0\n");
        // Programs had 70 ticks on CPU 0. CPU 3 is not asked for.
        let time = CpuTime::of(&[0], after.ticks_since(&before, &[0]), 50, 100);
        assert_eq!(
            (time.own_s, time.others_s, time.interrupts_s, time.stolen_s, time.idle_s),
            (0.5, 0.2, 0.05, 0.1, 0.15)
        );
        assert!(time.disturbed() && time.to_string().contains("other programs 20 %"), "{time}");
        let alone = CpuTime { others_s: 0.01, stolen_s: 0.0, ..time };
        assert!(!alone.disturbed() && !alone.to_string().contains("warning"), "{alone}");
    }

    #[test]
    fn children_are_ours_and_their_children() {
        let stat = |pid: u32, parent: u32| {
            format!("{pid} (a) b) S {parent} 1 1 0 -1 4194560 100 0 0 0 1 2 3 4 20 0 1 0 5 6 7")
        };
        let process = |pid, parent| (pid, Process::parse(&stat(pid, parent)).unwrap());
        assert_eq!(process(7, 3).1, Process { parent: 3, ticks: 10 });
        let all = BTreeMap::from([process(1, 0), process(3, 1), process(7, 3), process(8, 7), process(9, 1)]);
        assert_eq!((own_ticks(3, &all), own_ticks(9, &all)), (30, 10));
    }

    #[test]
    fn shares_are_of_the_time_between() {
        let before =
            Cpus::parse("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 10 0 20 100 0 0 0 0 0 0\ncpu3 0 0 0 0 0 0 0 0 0 0\nintr 5\n");
        let after =
            Cpus::parse("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 60 10 30 110 5 1 4 10 0 0\ncpu3 0 0 0 50 0 0 0 0 0 0\n");
        let shares = after.since(&before);
        assert_eq!(
            shares[&0],
            Share { usr: 60.0, sys: 10.0, idle: 10.0, iowait: 5.0, irq: 1.0, softirq: 4.0, steal: 10.0 }
        );
        assert_eq!(shares[&0].busy(), 75.0);
        assert_eq!((shares.len(), shares[&3].idle), (2, 100.0));
        // A thread that polled without finding anything for half the time.
        assert_eq!(shares[&0].with_idle(0.5), Share { usr: 10.0, idle: 60.0, ..shares[&0] });
        assert_eq!(shares[&0].with_idle(2.0), Share { usr: 0.0, idle: 70.0, ..shares[&0] });
    }
}
