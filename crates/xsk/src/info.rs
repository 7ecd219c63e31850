//! The AF_XDP features of each interface, which `netmem info` prints.

use crate::error::XskError;
use crate::ethtool;
use crate::netlink::{Attached, Interface, XdpFeatures};
use crate::privileges::Privileges;
use crate::program::Program;
use crate::quirks::{Quirk, quirks};
use crate::sys;

/// The AF_XDP features of an interface that can be read without changing the interface.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct InterfaceInfo {
    /// Its name.
    pub name: String,
    /// The name of its driver, or `None` if the driver does not report it.
    pub driver: Option<String>,
    /// The numbers of receive and transmit queues that are in use. Each queue can have a socket. If
    /// the driver does not report them, there is one of each.
    pub queues: (u32, u32),
    /// Its MTU, in bytes.
    pub mtu: u32,
    /// XDP programs that are attached to it now.
    pub programs: Vec<Attached>,
    /// The XDP features of its driver. `None`: the kernel is older than 6.3, and does not report
    /// them.
    pub features: Option<XdpFeatures>,
    /// The known quirks of its driver.
    pub quirks: Vec<&'static Quirk>,
}

impl InterfaceInfo {
    /// Reads the features of the interface `name`. Needs no privilege.
    ///
    /// # Errors
    ///
    /// The errors of [`Interface::by_name`].
    pub fn of(name: &str) -> std::io::Result<Self> {
        let link = Interface::by_name(name)?;
        let driver = ethtool::driver(name).ok();
        let quirks = driver.as_ref().map_or(Vec::new(), |driver| quirks(driver, sys::kernel()).collect());
        Ok(Self {
            queues: ethtool::queues(name).unwrap_or((1, 1)),
            features: XdpFeatures::of(link.index).ok(),
            name: link.name,
            mtu: link.mtu,
            programs: link.programs,
            driver,
            quirks,
        })
    }

    /// The features of all interfaces of this thread's network namespace. An interface that is
    /// deleted meanwhile is left out.
    #[must_use]
    pub fn all() -> Vec<Self> {
        // The table has two lines of headings. Each further line has a name, a colon and numbers.
        let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        let names = table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim()));
        names.filter_map(|name| Self::of(name).ok()).collect()
    }

    /// The modes in which sockets can be bound, each with the mode of the program, the best one
    /// first.
    #[must_use]
    pub fn modes(&self) -> Vec<&'static str> {
        let driver = |f: XdpFeatures| f.driver_mode();
        let mut modes = Vec::new();
        if self.features.is_some_and(|f| f.zero_copy()) {
            modes.push("zero-copy");
        }
        if self.features.is_some_and(driver) {
            modes.push("copy, driver mode");
        }
        modes.push("copy, generic mode");
        modes
    }

    /// The features that are missing for the best mode of this crate, in words.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        match self.features {
            None => missing.push("the kernel does not tell the driver's features (Linux 6.3 does)".into()),
            Some(f) if !f.driver_mode() => missing.push("the driver has no XDP: programs run in generic mode".into()),
            Some(f) => {
                if !f.zero_copy() {
                    missing.push("the driver has no zero-copy: the kernel copies each frame".into());
                }
                if !f.multi_buffer() && self.mtu > 1500 {
                    missing.push(format!("the driver has no frames of several buffers, and the MTU is {}", self.mtu));
                }
            }
        }
        for attached in &self.programs {
            missing.push(format!("XDP program {} is on it, in {}", attached.program, attached.mode));
        }
        missing
    }
}

/// Checks whether this thread can open AF_XDP sockets and load a program for them: it does both,
/// and drops both.
///
/// # Errors
///
/// The missing privilege, or the missing feature of the kernel.
pub fn check() -> Result<(), XskError> {
    Privileges::current().check_socket()?;
    sys::socket().map_err(|source| XskError::System { step: "make an AF_XDP socket", source })?;
    Ok(Program::check()?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ProgramOptions;
    use crate::testing::{in_namespace, ip};

    #[test]
    fn a_veth_and_the_loopback() {
        in_namespace(|| {
            ip("link add v0 numrxqueues 2 numtxqueues 3 mtu 9000 type veth peer name v1");
            let all = InterfaceInfo::all();
            assert!(["lo", "v0", "v1"].iter().all(|name| all.iter().any(|info| info.name == *name)), "{all:?}");
            let info = InterfaceInfo::of("v0").unwrap();
            assert_eq!((info.driver.as_deref(), info.queues, info.mtu), (Some("veth"), (2, 3), 9000));
            assert_eq!(info.modes(), ["copy, driver mode", "copy, generic mode"]);
            assert!(info.features.unwrap().names().contains(&"redirect"), "{info:?}");
            assert_eq!(info.missing(), ["the driver has no zero-copy: the kernel copies each frame"]);
            let program = Program::attach(Interface::by_name("v0").unwrap().index, &ProgramOptions::default()).unwrap();
            let missing = InterfaceInfo::of("v0").unwrap().missing();
            assert!(missing.iter().any(|what| what.contains("is on it, in driver mode")), "{missing:?}");
            drop(program);
            assert_eq!(InterfaceInfo::of("lo").unwrap().modes(), ["copy, generic mode"]);
        });
    }
}
