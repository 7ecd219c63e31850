//! Local ports that the stack chooses (RFC 6056, algorithm 4: double hash).
//!
//! An observer of one destination does not learn the ports that are used with another, and a port is reused as late as possible.

use super::directory::{Directory, Protocol, StackId};
use crate::wire::Flow;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};

/// All ports that are not well known.
const FIRST: u32 = 1024;
const COUNT: u32 = 65536 - FIRST;

pub(crate) struct Ports {
    offset: RandomState,
    index: RandomState,
    counters: [AtomicU32; 64],
}

impl Ports {
    pub(crate) fn new() -> Self {
        let random = RandomState::new();
        let counters = std::array::from_fn(|n| AtomicU32::new(random.hash_one(n) as u32));
        Self { offset: RandomState::new(), index: RandomState::new(), counters }
    }

    /// Claims a flow to `remote` for a stack, with a port that no listener has. `None` if all are taken.
    pub(crate) fn claim(
        &self,
        directory: &Directory,
        local: IpAddr,
        remote: SocketAddr,
        stack: StackId,
    ) -> Option<Flow> {
        self.candidates(local, remote).find_map(|port| {
            let flow = Flow { local: SocketAddr::new(local, port), remote };
            (!directory.is_bound(Protocol::Tcp, port) && directory.claim(flow, stack)).then_some(flow)
        })
    }

    /// Binds a socket for datagrams to a port that none has. `None` if all are taken.
    pub(crate) fn bind(&self, directory: &Directory, local: IpAddr, stack: StackId) -> Option<SocketAddr> {
        // All datagrams that the socket sends come from this port: there is one destination to hide from.
        let anywhere = SocketAddr::new(local, 0);
        self.candidates(local, anywhere).map(|port| SocketAddr::new(local, port)).find(|&local| {
            !directory.is_bound(Protocol::Udp, local.port()) && directory.bind(Protocol::Udp, local, stack)
        })
    }

    fn candidates(&self, local: IpAddr, remote: SocketAddr) -> impl Iterator<Item = u16> {
        let offset = self.offset.hash_one((local, remote)) as u32;
        let counter = &self.counters[self.index.hash_one((local, remote)) as usize % self.counters.len()];
        (0..COUNT).map(move |_| {
            let next = counter.fetch_add(1, Ordering::Relaxed);
            // It fits: the last one is 65535.
            (FIRST + offset.wrapping_add(next) % COUNT) as u16
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    #[test]
    fn ports_are_not_well_known_not_bound_and_not_taken() {
        let (directory, ports) = (Directory::new(), Ports::new());
        let remote = SocketAddr::from(([10, 0, 0, 2], 80));
        assert!(directory.bind(Protocol::Tcp, SocketAddr::new(HERE, 5000), 0));
        let mut seen = HashSet::new();
        while let Some(flow) = ports.claim(&directory, HERE, remote, 0) {
            assert!(flow.local.port() >= 1024 && flow.local.port() != 5000);
            assert!(seen.insert(flow.local.port()), "a port is claimed once");
        }
        assert_eq!(seen.len(), 65536 - 1024 - 1);
        let other = SocketAddr::from(([10, 0, 0, 3], 80));
        assert!(ports.claim(&directory, HERE, other, 0).is_some(), "another destination has its own ports");
    }

    /// Two destinations: the sequence of ports of the one says nothing of the other's.
    #[test]
    fn sequences_of_destinations_begin_anywhere() {
        let (directory, ports) = (Directory::new(), Ports::new());
        let firsts: HashSet<u16> = (0..100)
            .map(|n| ports.claim(&directory, HERE, ([10, 0, 1, n], 80).into(), 0).unwrap().local.port() / 1000)
            .collect();
        assert!(firsts.len() > 20, "{firsts:?}");
    }
}
