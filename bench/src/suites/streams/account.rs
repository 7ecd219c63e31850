//! CPU time of all threads of a process, as the kernel's control groups count it.
//!
//! A group counts the run time of its tasks: user code, system calls, and softirqs that run at the
//! end of a task's system call. If a task sends frames over a veth or writes them into a tap, the
//! frames are received in such a softirq, so the sender's group pays for that. Softirqs that were
//! put off run in `ksoftirqd`, which is in none of these groups: its run time on all CPUs is added.
//! Work queues, and hardware interrupts that hit another task, are not counted; virtual interfaces
//! have neither. Because `ksoftirqd` serves the whole machine, the machine should be otherwise
//! idle.
//!
//! Both versions of control groups are understood: `cpuacct.usage` of version 1 (nanoseconds), and
//! `cpu.stat` of version 2 (microseconds). The part in user mode is counted by ticks of the kernel
//! (4 ms at 250 Hz), unless it is built with an exact count.

use std::fs;
use std::path::{Path, PathBuf};

/// A control group for a measurement. When it is dropped, its processes go back to their old group,
/// and the group is removed.
#[derive(Debug)]
pub(super) struct Group {
    path: PathBuf,
    parent: PathBuf,
    /// Version 1.
    nanoseconds: bool,
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The directory of this process's group, and whether it is of version 1, from the texts of
/// `/proc/self/mounts` and `/proc/self/cgroup`.
fn own(mounts: &str, groups: &str) -> Option<(PathBuf, bool)> {
    let mount = |kind: &str, option: Option<&str>| {
        mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (at, is, options) = (words.next()?, words.next()?, words.next()?);
            let has = option.is_none_or(|option| options.split(',').any(|o| o == option));
            (is == kind && has).then(|| PathBuf::from(at))
        })
    };
    let group = |which: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            which(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    if let Some(mount) = mount("cgroup", Some("cpuacct")) {
        let path = group(&|controllers| controllers.split(',').any(|c| c == "cpuacct"))?;
        return Some((mount.join(path), true));
    }
    Some((mount("cgroup2", None)?.join(group(&str::is_empty)?), false))
}

/// The number of microseconds in a line of `cpu.stat`.
fn microseconds(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

impl Group {
    /// Makes an empty control group beside or below that of this process.
    ///
    /// # Errors
    ///
    /// A text: there are no control groups, or this user may not make one.
    pub(super) fn new(name: &str) -> Result<Self, String> {
        let (mounts, groups) = (read(Path::new("/proc/self/mounts"))?, read(Path::new("/proc/self/cgroup"))?);
        let (parent, nanoseconds) = own(&mounts, &groups).ok_or("no control group counts CPU time here")?;
        let path = parent.join(format!("netmem-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path).map_err(|e| format!("CPU time is counted by control group; {}: {e}", path.display()))?;
        let group = Self { path, parent, nanoseconds };
        group.usage_ns()?;
        Ok(group)
    }

    /// Moves a process here, with all its threads.
    pub(super) fn add(&self, pid: u32) -> Result<(), String> {
        let file = self.path.join("cgroup.procs");
        fs::write(&file, pid.to_string()).map_err(|e| format!("{}: {e}", file.display()))
    }

    /// The CPU time of the group's tasks so far.
    pub(super) fn usage_ns(&self) -> Result<u64, String> {
        self.ns("cpuacct.usage", "usage_usec")
    }

    /// The part of it in user mode.
    pub(super) fn user_ns(&self) -> Result<u64, String> {
        self.ns("cpuacct.usage_user", "user_usec")
    }

    /// The nanoseconds in a file of version 1, or in a line of `cpu.stat`.
    fn ns(&self, file: &str, line: &str) -> Result<u64, String> {
        if self.nanoseconds {
            let path = self.path.join(file);
            return read(&path)?.trim().parse().map_err(|e| format!("{}: {e}", path.display()));
        }
        let path = self.path.join("cpu.stat");
        microseconds(&read(&path)?, line).map(|us| us * 1000).ok_or_else(|| format!("{}: no {line}", path.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Processes that have ended are no longer in the list.
        for pid in read(&self.path.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(self.parent.join("cgroup.procs"), pid);
        }
        let _ = fs::remove_dir(&self.path);
    }
}

/// Run time of `ksoftirqd` on all CPUs.
#[derive(Debug)]
pub(super) struct SoftIrqs(Vec<PathBuf>);

impl SoftIrqs {
    pub(super) fn new() -> Self {
        let tasks = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
        let is = |path: &PathBuf| {
            fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("ksoftirqd/"))
                && fs::read(path.join("cmdline")).is_ok_and(|line| line.is_empty())
        };
        Self(tasks.filter(is).map(|path| path.join("schedstat")).collect())
    }

    /// The run time in nanoseconds, or 0 if the kernel does not report it.
    pub(super) fn ns(&self) -> u64 {
        let first = |path: &PathBuf| fs::read_to_string(path).ok()?.split(' ').next()?.parse::<u64>().ok();
        self.0.iter().filter_map(first).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found() {
        let one = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let found = own(one, "3:cpu,cpuacct:/user\n1:name=systemd:/x\n0::/y\n");
        assert_eq!(found, Some(("/sys/fs/cgroup/cpu,cpuacct/user".into(), true)));
        let two = "sysfs /sys sysfs rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        assert_eq!(own(two, "0::/a/b\n"), Some(("/sys/fs/cgroup/a/b".into(), false)));
        assert_eq!(own("proc /proc proc rw 0 0\n", "0::/\n"), None);
    }

    #[test]
    fn usage_is_one_line_of_several() {
        let stat = "user_usec 1\nusage_usec 1234\nsystem_usec 3\n";
        assert_eq!(["usage_usec", "user_usec"].map(|line| microseconds(stat, line)), [Some(1234), Some(1)]);
        assert_eq!(microseconds("user_usec 1\n", "usage_usec"), None);
    }
}
