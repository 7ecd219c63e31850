//! The limits of connections: in total, and of each peer.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts the connections of all stacks.
#[derive(Debug)]
pub(super) struct Admission {
    most: u32,
    most_of_peer: u32,
    served: Mutex<Served>,
}

#[derive(Debug, Default)]
struct Served {
    total: u32,
    /// Only peers that have connections.
    peers: HashMap<IpAddr, u32>,
}

impl Admission {
    pub(super) fn new(most: u32, most_of_peer: u32) -> Arc<Self> {
        Arc::new(Self { most, most_of_peer, served: Mutex::default() })
    }

    fn served(&self) -> MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection of `peer`, unless a limit is reached.
    pub(super) fn admit(self: &Arc<Self>, peer: IpAddr) -> Option<Admitted> {
        let peer = network(peer);
        let mut served = self.served();
        let of_peer = served.peers.get(&peer).copied().unwrap_or(0);
        if served.total >= self.most || of_peer >= self.most_of_peer {
            return None;
        }
        served.count(peer);
        Some(Admitted { admission: Arc::clone(self), peer })
    }

    /// Counts a connection that another process has admitted, whatever the limits are.
    pub(super) fn readmit(self: &Arc<Self>, peer: IpAddr) -> Admitted {
        let peer = network(peer);
        self.served().count(peer);
        Admitted { admission: Arc::clone(self), peer }
    }
}

impl Served {
    fn count(&mut self, peer: IpAddr) {
        self.total += 1;
        *self.peers.entry(peer).or_default() += 1;
    }
}

/// A peer with an IPv6 address has 2^64 of them: its network is what is counted.
fn network(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V4(_) => peer,
        IpAddr::V6(addr) => Ipv6Addr::from_bits(addr.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

/// A connection that is counted until this is dropped.
#[derive(Debug)]
pub(super) struct Admitted {
    admission: Arc<Admission>,
    peer: IpAddr,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut served = self.admission.served();
        served.total -= 1;
        if let Entry::Occupied(mut entry) = served.peers.entry(self.peer) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    #[test]
    fn a_peer_has_its_share_and_all_have_the_total() {
        let admission = Admission::new(5, 2);
        let mut admitted: Vec<_> = ["10.0.0.1", "10.0.0.1", "10.0.0.2"].map(|s| admission.admit(ip(s)).unwrap()).into();
        assert!(admission.admit(ip("10.0.0.1")).is_none());
        admitted.push(admission.admit(ip("10.0.0.2")).unwrap());
        admitted.push(admission.admit(ip("10.0.0.3")).unwrap());
        assert!(admission.admit(ip("10.0.0.4")).is_none(), "the total");
        admitted.remove(0);
        admitted.push(admission.admit(ip("10.0.0.1")).unwrap());
        admitted.push(admission.readmit(ip("10.0.0.1")));
        admitted.clear();
        let served = admission.served();
        assert_eq!((served.total, served.peers.len()), (0, 0));
    }

    #[test]
    fn an_ipv6_network_is_one_peer() {
        let admission = Admission::new(9, 1);
        let _first = admission.admit(ip("fd00::1")).unwrap();
        assert!(admission.admit(ip("fd00::ffff:2:3")).is_none());
        assert!(admission.admit(ip("fd00:0:0:1::1")).is_some());
    }
}
