//! The privileges that this crate needs, and those that this thread has.
//!
//! | step | privilege |
//! | --- | --- |
//! | open an AF_XDP socket | `CAP_NET_RAW`, in the user namespace that owns the network namespace |
//! | load the program and make the map | `CAP_BPF` and `CAP_NET_ADMIN`, or `CAP_SYS_ADMIN` (*) |
//! | load a program with a filter | `CAP_PERFMON`, too, or `CAP_SYS_ADMIN` |
//! | attach the program | `CAP_NET_ADMIN`, as above |
//! | busy polling that prefers the thread to interrupts | `CAP_NET_ADMIN` |
//! | register memory | room within `RLIMIT_MEMLOCK`, or `CAP_IPC_LOCK` |
//! | make rings, map them, bind, move frames | none |
//!
//! (*) In the initial user namespace.
//!
//! A process without the first four privileges gets its sockets from a [helper](crate::helper).

use crate::program::Filter;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use std::fmt;

/// A privilege of the kernel that this crate may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Capability {
    /// Needed to open AF_XDP sockets.
    NetRaw,
    /// Needed to attach XDP programs.
    NetAdmin,
    /// Needed to load programs.
    Bpf,
    /// Needed to load programs that add a length from a frame to its address. Programs with a
    /// filter do so.
    Perfmon,
    /// Includes `CAP_BPF`, `CAP_PERFMON` and `CAP_NET_ADMIN`.
    SysAdmin,
    /// Removes the limit of locked memory.
    IpcLock,
}

impl Capability {
    fn set(self) -> CapabilitySet {
        match self {
            Self::NetRaw => CapabilitySet::NET_RAW,
            Self::NetAdmin => CapabilitySet::NET_ADMIN,
            Self::Bpf => CapabilitySet::BPF,
            Self::Perfmon => CapabilitySet::PERFMON,
            Self::SysAdmin => CapabilitySet::SYS_ADMIN,
            Self::IpcLock => CapabilitySet::IPC_LOCK,
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NetRaw => "CAP_NET_RAW",
            Self::NetAdmin => "CAP_NET_ADMIN",
            Self::Bpf => "CAP_BPF",
            Self::Perfmon => "CAP_PERFMON",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::IpcLock => "CAP_IPC_LOCK",
        })
    }
}

/// The error that a privilege is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MissingPrivilege {
    /// This thread lacks capabilities.
    #[error(
        "{step} needs {}, which this process lacks: give it to the program (setcap, AmbientCapabilities= of a service, --cap-add of a \
         container), or let a helper that has it open the sockets",
        list(missing)
    )]
    Capabilities {
        /// The step that needs them.
        step: &'static str,
        /// All missing capabilities.
        missing: Vec<Capability>,
    },
    /// This thread has the capabilities in a user namespace of its own, where they have no effect
    /// on this step.
    #[error(
        "{step} needs capabilities of the initial user namespace, and this process is in another one: let a helper outside of the \
         container open the sockets"
    )]
    UserNamespace {
        /// The step that needs them.
        step: &'static str,
    },
    /// The memory is more than this user may lock.
    #[error(
        "a UMEM of {bytes} bytes{} is more than the limit of locked memory, {limit} bytes: raise it (ulimit -l, LimitMEMLOCK= of a \
         service, --ulimit memlock of a container), or give the program CAP_IPC_LOCK",
        of_queues(*bytes, *queues)
    )]
    LockedMemory {
        /// Bytes to be registered.
        bytes: u64,
        /// The number of queues that the memory is for, or 1 if it is unknown.
        queues: usize,
        /// Bytes that the user may lock.
        limit: u64,
    },
}

/// The share of each queue, for an error about the memory of several.
pub(crate) fn of_queues(bytes: u64, queues: usize) -> String {
    match queues {
        0 | 1 => String::new(),
        _ => format!(" ({} for each of {queues} queues)", bytes / queues as u64),
    }
}

fn list(capabilities: &[Capability]) -> String {
    capabilities.iter().map(Capability::to_string).collect::<Vec<_>>().join(" and ")
}

/// The privileges of a thread, at the time of the call.
#[derive(Clone, Copy, Debug)]
pub struct Privileges {
    effective: CapabilitySet,
    /// Bytes of memory that may be locked. `None`: there is no limit.
    locked_memory: Option<u64>,
    initial_user_namespace: bool,
}

impl Privileges {
    /// The privileges of this thread. Costs three system calls. Needs no privilege.
    #[must_use]
    pub fn current() -> Self {
        Self {
            // The system call does not fail for the calling thread.
            effective: capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective),
            locked_memory: getrlimit(Resource::Memlock).current,
            initial_user_namespace: is_initial_user_namespace(),
        }
    }

    /// Whether this capability is in effect.
    #[must_use]
    pub fn has(&self, capability: Capability) -> bool {
        self.effective.contains(capability.set())
    }

    fn need(&self, step: &'static str, needed: &[Capability]) -> Result<(), MissingPrivilege> {
        let missing: Vec<_> = needed.iter().copied().filter(|capability| !self.has(*capability)).collect();
        if missing.is_empty() { Ok(()) } else { Err(MissingPrivilege::Capabilities { step, missing }) }
    }

    /// Checks whether an AF_XDP socket can be opened.
    ///
    /// # Errors
    ///
    /// The missing privilege.
    pub fn check_socket(&self) -> Result<(), MissingPrivilege> {
        self.need("opening an AF_XDP socket", &[Capability::NetRaw])
    }

    /// Checks whether an XDP program with this filter can be loaded and attached.
    ///
    /// # Errors
    ///
    /// The missing privilege.
    pub fn check_program(&self, filter: &Filter) -> Result<(), MissingPrivilege> {
        let (step, needed) = if filter.matches_all() {
            ("loading and attaching an XDP program", &[Capability::Bpf, Capability::NetAdmin][..])
        } else {
            let needed = &[Capability::Bpf, Capability::NetAdmin, Capability::Perfmon][..];
            ("loading and attaching an XDP program with a filter", needed)
        };
        if !self.has(Capability::SysAdmin) {
            self.need(step, needed)?;
        }
        if self.initial_user_namespace { Ok(()) } else { Err(MissingPrivilege::UserNamespace { step }) }
    }

    /// Checks whether this number of bytes can be registered as a UMEM. Memory that other processes
    /// of the user have locked counts, too. So the kernel may refuse (`ENOBUFS`) although this
    /// check succeeds.
    ///
    /// # Errors
    ///
    /// [`MissingPrivilege::LockedMemory`].
    pub fn check_memory(&self, bytes: u64) -> Result<(), MissingPrivilege> {
        match self.locked_memory {
            Some(limit) if bytes > limit && !self.has(Capability::IpcLock) => {
                Err(MissingPrivilege::LockedMemory { bytes, queues: 1, limit })
            }
            _ => Ok(()),
        }
    }
}

/// Whether this is the initial user namespace: only there all users exist, and each has its own
/// number.
fn is_initial_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn with(effective: &[Capability]) -> Privileges {
        let effective = effective.iter().fold(CapabilitySet::empty(), |all, one| all | one.set());
        Privileges { effective, locked_memory: Some(8 << 20), initial_user_namespace: true }
    }

    #[test]
    fn what_is_missing_is_named() {
        use Capability::{Bpf, IpcLock, NetAdmin, NetRaw, SysAdmin};
        let nothing = with(&[]);
        let missing = nothing.check_socket().unwrap_err();
        assert!(missing.to_string().contains("AF_XDP socket needs CAP_NET_RAW, which"), "{missing}");
        let missing = nothing.check_program(&Filter::default()).unwrap_err();
        assert!(missing.to_string().contains("needs CAP_BPF and CAP_NET_ADMIN, which"), "{missing}");
        let missing = with(&[Bpf, NetRaw]).check_program(&Filter::default()).unwrap_err();
        assert!(missing.to_string().contains("needs CAP_NET_ADMIN, which"), "{missing}");
        assert!(with(&[NetRaw]).check_socket().is_ok());
        assert!(with(&[Bpf, NetAdmin]).check_program(&Filter::default()).is_ok());
        assert!(with(&[SysAdmin]).check_program(&Filter::default()).is_ok());
        let contained = Privileges { initial_user_namespace: false, ..with(&[SysAdmin, NetRaw]) };
        assert!(matches!(contained.check_program(&Filter::default()), Err(MissingPrivilege::UserNamespace { .. })));
        assert!(contained.check_socket().is_ok());
        let missing = nothing.check_memory((8 << 20) + 1).unwrap_err();
        assert!(missing.to_string().contains("8388609 bytes") && missing.to_string().contains("8388608"), "{missing}");
        assert!(nothing.check_memory(8 << 20).is_ok());
        assert!(with(&[IpcLock]).check_memory(1 << 40).is_ok());
        assert!(Privileges { locked_memory: None, ..nothing }.check_memory(1 << 40).is_ok());
    }
}
