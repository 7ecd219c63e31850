//! The machine, as every report names it.

use serde::Serialize;

/// The properties of the machine on which figures depend.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// CPUs that this process may use.
    pub(crate) cpus: usize,
    pub(crate) kernel: String,
    /// How per-CPU data is reached.
    pub(crate) percpu: String,
    /// The kind of memory that the pages were made of.
    pub(crate) hugepages: String,
}

impl Machine {
    pub(crate) fn new(hugepages: String) -> Self {
        Self { cpus: crate::cpus::allowed().len(), kernel: kernel(), percpu: percpu(), hugepages }
    }
}

pub(crate) fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// How per-CPU data is reached: by restartable sequences (`rseq`), or in the portable way.
pub(crate) fn percpu() -> String {
    netmem_percpu::mode().to_string()
}
