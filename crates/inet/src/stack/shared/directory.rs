//! The connections of all stacks of a host, and the ports on which they listen.
//!
//! A connection lives on one stack. A segment of it can arrive by the queue of another: then that
//! stack finds the owner here, and puts the frame into the owner's mailbox. The directory also
//! assigns ports: a flow that is in it is in use.

use crate::ports::Ports;
use crate::stack::error::SocketError;
use crate::stack::shrink_map::ShrinkMap;
use crate::wire::Flow;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

/// Locks of the connections. Each is held for one lookup or change in a table.
const SHARDS: usize = 64;

/// The most ports that are passed over in search of one whose flow arrives by the right queue.
const PASSED_OVER: usize = 1024;

/// The number of a stack in its host.
pub(crate) type StackId = u32;

/// No stack: the connection is on its way to another one.
pub(crate) const NO_STACK: StackId = StackId::MAX;

/// The use of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

pub(crate) struct Directory {
    /// Keyed by secrets of this process: a peer chooses addresses and ports.
    hasher: RandomState,
    shards: Box<[Mutex<ShrinkMap<Flow, StackId>>]>,
    /// The stacks that have a socket on a port. It changes with sockets, and is read for frames of
    /// no connection.
    ports: RwLock<ShrinkMap<(Protocol, u16), Vec<Bound>>>,
}

/// A socket that is bound to a port.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Bound {
    to: Addresses,
    stack: StackId,
}

/// The addresses of the host that a socket is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Addresses {
    All,
    /// All of IPv6.
    V6,
    One(IpAddr),
}

impl Addresses {
    /// The addresses that `local` means, if the unspecified address of IPv6 means those of IPv6
    /// only.
    pub(crate) fn of(local: IpAddr, v6_only: bool) -> Self {
        match local {
            IpAddr::V6(local) if local.is_unspecified() && v6_only => Self::V6,
            local if local.is_unspecified() => Self::All,
            local => Self::One(local),
        }
    }

    fn has(self, address: IpAddr) -> bool {
        match self {
            Self::All => true,
            Self::V6 => address.is_ipv6(),
            Self::One(own) => own == address,
        }
    }
}

impl Directory {
    pub(crate) fn new() -> Self {
        let hasher = RandomState::new();
        let shards = (0..SHARDS).map(|_| Mutex::new(ShrinkMap::with_hasher(hasher.clone()))).collect();
        Self { hasher, shards, ports: RwLock::new(ShrinkMap::new()) }
    }

    fn shard(&self, flow: &Flow) -> MutexGuard<'_, ShrinkMap<Flow, StackId>> {
        // The table uses the upper and the lowest bits.
        let shard = (self.hasher.hash_one(flow) >> 32) as usize % SHARDS;
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assigns a flow to a stack. Returns false if the flow is in use.
    pub(crate) fn claim(&self, flow: Flow, stack: StackId) -> bool {
        self.shard(&flow).insert_new(flow, stack)
    }

    /// Assigns a flow to `remote` to a stack, with a port that no listener has. `None` if all ports
    /// are in use. The first ports are passed over unless their flows arrive by the stack's own
    /// queue.
    pub(crate) fn claim_port(
        &self,
        ports: &Ports,
        local: IpAddr,
        remote: SocketAddr,
        stack: StackId,
        arrives: impl Fn(&Flow) -> bool,
    ) -> Option<Flow> {
        ports.candidates(local, remote).enumerate().find_map(|(n, port)| {
            let flow = Flow { local: SocketAddr::new(local, port), remote };
            let fits = n >= PASSED_OVER || arrives(&flow);
            (fits && !self.is_bound(Protocol::Tcp, port) && self.claim(flow, stack)).then_some(flow)
        })
    }

    /// Binds a socket to the port of `local`; port 0 means one that no other socket has.
    pub(crate) fn bind_to(
        &self,
        protocol: Protocol,
        ports: &Ports,
        local: SocketAddr,
        bound: (Addresses, StackId),
    ) -> Result<u16, SocketError> {
        match local.port() {
            0 => self.bind_port(protocol, ports, local.ip(), bound).ok_or(SocketError::NoPort),
            port if self.bind(protocol, port, bound) => Ok(port),
            _ => Err(SocketError::InUse),
        }
    }

    /// Binds a socket to a port that no other socket has. `None` if all ports are in use.
    fn bind_port(&self, protocol: Protocol, ports: &Ports, local: IpAddr, bound: (Addresses, StackId)) -> Option<u16> {
        // All that the socket sends comes from this port.
        let anywhere = SocketAddr::new(local, 0);
        ports
            .candidates(local, anywhere)
            .find(|&port| !self.is_bound(protocol, port) && self.bind(protocol, port, bound))
    }

    /// The connection leaves its stack. Its flow stays in use until the connection
    /// [arrives](Self::arrive) at another stack, or is released.
    pub(crate) fn depart(&self, flow: Flow) {
        self.shard(&flow).insert(flow, NO_STACK);
    }

    /// A connection of another process will be restored. Its flow is reserved until it arrives,
    /// unless a stack has it already.
    pub(crate) fn expect(&self, flow: Flow) {
        self.shard(&flow).insert_new(flow, NO_STACK);
    }

    /// A connection that left its stack, or was expected, will not arrive.
    pub(crate) fn give_up(&self, flow: &Flow) {
        let mut shard = self.shard(flow);
        if shard.get(flow) == Some(&NO_STACK) {
            shard.remove(flow);
        }
    }

    /// A connection arrives at a stack. Returns false if its flow belongs to another connection.
    pub(crate) fn arrive(&self, flow: Flow, stack: StackId) -> bool {
        let mut shard = self.shard(&flow);
        let free = shard.get(&flow).is_none_or(|&owner| owner == NO_STACK);
        if free {
            shard.insert(flow, stack);
        }
        free
    }

    /// Whether the connection is between two stacks.
    pub(crate) fn is_departed(&self, flow: &Flow) -> bool {
        self.owner(flow) == Some(NO_STACK)
    }

    /// Frees a flow.
    pub(crate) fn release(&self, flow: &Flow) {
        self.shard(flow).remove(flow);
    }

    /// The stack that has this connection.
    pub(crate) fn owner(&self, flow: &Flow) -> Option<StackId> {
        self.shard(flow).get(flow).copied()
    }

    /// Connections of all stacks.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    /// Binds a socket of a stack to a port. Returns false if this stack has a socket there that
    /// would get the same packets. Sockets of different stacks can share a port.
    pub(crate) fn bind(&self, protocol: Protocol, port: u16, (to, stack): (Addresses, StackId)) -> bool {
        let mut ports = self.ports.write().unwrap_or_else(PoisonError::into_inner);
        let bound = ports.get_or_default((protocol, port));
        let clash = |other: &Bound| {
            other.stack == stack && (other.to == to || protocol == Protocol::Udp && other.to == Addresses::All)
        };
        if bound.iter().any(clash) {
            return false;
        }
        bound.push(Bound { to, stack });
        true
    }

    /// Removes a socket.
    pub(crate) fn unbind(&self, protocol: Protocol, port: u16, (to, stack): (Addresses, StackId)) {
        let mut ports = self.ports.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(bound) = ports.get_mut(&(protocol, port)) {
            bound.retain(|other| *other != Bound { to, stack });
            if bound.is_empty() {
                ports.remove(&(protocol, port));
            }
        }
    }

    /// Whether a socket of any stack is bound to a port.
    pub(crate) fn is_bound(&self, protocol: Protocol, port: u16) -> bool {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).contains_key(&(protocol, port))
    }

    /// A stack that has a socket for a flow. If several have, the flow decides, so that all its
    /// packets go to the same one.
    pub(crate) fn bound(&self, protocol: Protocol, flow: &Flow) -> Option<StackId> {
        let ports = self.ports.read().unwrap_or_else(PoisonError::into_inner);
        let bound = ports.get(&(protocol, flow.local.port()))?;
        let fitting = || bound.iter().filter(|bound| bound.to.has(flow.local.ip()));
        let count = fitting().count();
        let pick = self.hasher.hash_one(flow) as usize % count.max(1);
        fitting().nth(pick).map(|bound| bound.stack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn flow(local: u16, remote: u16) -> Flow {
        Flow { local: ([10, 0, 0, 1], local).into(), remote: ([10, 0, 0, 2], remote).into() }
    }

    #[test]
    fn a_flow_has_one_owner() {
        let directory = Directory::new();
        assert!(directory.claim(flow(80, 1000), 3));
        assert!(!directory.claim(flow(80, 1000), 4), "it is taken");
        assert!(directory.claim(flow(80, 1001), 4));
        assert_eq!((directory.owner(&flow(80, 1000)), directory.owner(&flow(81, 1000))), (Some(3), None));
        directory.release(&flow(80, 1000));
        assert_eq!((directory.owner(&flow(80, 1000)), directory.len()), (None, 1));
    }

    #[test]
    fn a_flow_that_is_expected_is_taken_until_it_arrives_or_is_given_up() {
        let directory = Directory::new();
        directory.expect(flow(80, 1000));
        assert!(directory.is_departed(&flow(80, 1000)) && !directory.claim(flow(80, 1000), 1));
        assert!(directory.arrive(flow(80, 1000), 2));
        directory.expect(flow(80, 1000));
        directory.give_up(&flow(80, 1000));
        assert_eq!(directory.owner(&flow(80, 1000)), Some(2), "a stack has it");
        directory.expect(flow(80, 1001));
        directory.give_up(&flow(80, 1001));
        assert!(directory.claim(flow(80, 1001), 1));
    }

    #[test]
    fn chosen_ports_are_not_bound_and_not_taken() {
        let (directory, ports) = (Directory::new(), Ports::default());
        let (here, remote) = (IpAddr::from([10, 0, 0, 1]), SocketAddr::from(([10, 0, 0, 2], 80)));
        assert!(directory.bind(Protocol::Tcp, 5000, (Addresses::One(here), 0)));
        let mut seen = HashSet::new();
        while let Some(flow) = directory.claim_port(&ports, here, remote, 0, |_| true) {
            assert!(flow.local.port() >= 1024 && flow.local.port() != 5000);
            assert!(seen.insert(flow.local.port()), "a port is claimed once");
        }
        assert_eq!(seen.len(), 65536 - 1024 - 1);
        let other = SocketAddr::from(([10, 0, 0, 3], 80));
        assert!(
            directory.claim_port(&ports, here, other, 0, |_| false).is_some(),
            "another destination has its own ports"
        );
    }

    #[test]
    fn stacks_share_a_port_and_a_flow_goes_to_one_of_them() {
        let directory = Directory::new();
        let (any, other) = (Addresses::All, Addresses::One([10, 0, 0, 9].into()));
        assert!(directory.bind(Protocol::Tcp, 80, (any, 0)) && directory.bind(Protocol::Tcp, 80, (any, 1)));
        assert!(!directory.bind(Protocol::Tcp, 80, (any, 1)), "the stack has one there");
        assert!(directory.bind(Protocol::Tcp, 80, (other, 2)));
        let mut seen = [0; 3];
        for remote in 0..1000 {
            let stack = directory.bound(Protocol::Tcp, &flow(80, remote)).unwrap();
            assert_eq!(directory.bound(Protocol::Tcp, &flow(80, remote)), Some(stack), "always the same one");
            seen[stack as usize] += 1;
        }
        assert!(seen[0] > 300 && seen[1] > 300 && seen[2] == 0, "{seen:?}");
        assert_eq!(directory.bound(Protocol::Udp, &flow(80, 1)), None);
        directory.unbind(Protocol::Tcp, 80, (any, 0));
        directory.unbind(Protocol::Tcp, 80, (any, 1));
        assert_eq!(directory.bound(Protocol::Tcp, &flow(80, 1)), None, "the third is bound to another address");
        assert!(directory.is_bound(Protocol::Tcp, 80));
        directory.unbind(Protocol::Tcp, 80, (other, 2));
        assert!(!directory.is_bound(Protocol::Tcp, 80));
    }
}
