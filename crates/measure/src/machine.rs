//! The machine, as every report names it.

use serde::Serialize;

/// The properties of the machine on which figures depend.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The model of the CPUs.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// The kernel's release.
    pub kernel: String,
    /// How per-CPU data is reached.
    pub percpu: String,
    /// The kind of memory that the pages were made of.
    pub hugepages: String,
}

impl Machine {
    /// This machine, with the kind of memory that the pages were made of.
    pub fn new(hugepages: String) -> Self {
        Self { cpu: cpu(), cpus: crate::cpus::allowed().len(), kernel: kernel(), percpu: percpu(), hugepages }
    }
}

/// The model of the CPUs, as the kernel names it, or `unknown`.
fn cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or_else(|| "unknown".into(), |(_, model)| model.trim().to_owned())
}

/// The kernel's release, as `uname -r` prints it.
pub fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// How per-CPU data is reached: by restartable sequences (`rseq`), or in the portable way.
pub fn percpu() -> String {
    netmem_percpu::mode().to_string()
}
