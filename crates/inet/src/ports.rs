//! Local ports that are chosen for the user (RFC 6056, algorithm 4: double hash).
//!
//! Why not the next free port: a station that knows one port could guess those of other
//! connections, and forge their segments.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};

/// All ports that are not well known.
const FIRST: u32 = 1024;
const COUNT: u32 = 65536 - FIRST;

/// Chooses local ports. The choice cannot be predicted without the keys of its hashers.
///
/// A station sees only the ports that are used with it, and cannot compute those that are used with
/// other stations. So it cannot guess the flow of a connection that it does not see. A port is used
/// again as late as possible.
pub struct Ports<S = RandomState> {
    offset: S,
    index: S,
    counters: [AtomicU32; 64],
}

impl<S: BuildHasher> Ports<S> {
    /// Chooses by two keyed hashes, whose keys differ.
    #[must_use]
    pub fn new(offset: S, index: S) -> Self {
        let counters = std::array::from_fn(|n| AtomicU32::new(index.hash_one(n) as u32));
        Self { offset, index, counters }
    }

    /// All ports from 1024 on in the order in which they are to be tried for a flow from `local` to
    /// `remote`. Each call continues where the last one for the flow ended. One atomic addition for
    /// each.
    ///
    /// For a socket that sends to any station, `remote` is unspecified.
    pub fn candidates(&self, local: IpAddr, remote: SocketAddr) -> impl Iterator<Item = u16> {
        let offset = self.offset.hash_one((local, remote)) as u32;
        let counter = &self.counters[self.index.hash_one((local, remote)) as usize % self.counters.len()];
        (0..COUNT).map(move |_| {
            let next = counter.fetch_add(1, Ordering::Relaxed);
            // It fits: the last one is 65535.
            (FIRST + offset.wrapping_add(next) % COUNT) as u16
        })
    }
}

/// Keys that the system made at random.
impl Default for Ports {
    fn default() -> Self {
        Self::new(RandomState::new(), RandomState::new())
    }
}

impl<S> fmt::Debug for Ports<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ports").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    #[test]
    fn each_port_is_tried_once_and_no_well_known_one() {
        let ports = Ports::default();
        let remote = SocketAddr::from(([10, 0, 0, 2], 80));
        let tried: Vec<u16> = ports.candidates(HERE, remote).collect();
        assert_eq!((tried.len(), tried.iter().collect::<HashSet<_>>().len()), (COUNT as usize, COUNT as usize));
        assert!(tried.iter().all(|&port| port >= 1024));
        // The next is the one that was used the longest ago.
        assert_eq!(ports.candidates(HERE, remote).next(), Some(tried[0]));
    }

    /// The ports of one destination do not reveal those of another.
    #[test]
    fn destinations_begin_anywhere() {
        let ports = Ports::default();
        let first = |n: u8| ports.candidates(HERE, ([10, 0, 1, n], 80).into()).next();
        let firsts: HashSet<u16> = (0..100).filter_map(first).map(|port| port / 1000).collect();
        assert!(firsts.len() > 20, "{firsts:?}");
        // There are fewer counters than destinations, and those that share one are not next to each
        // other.
        let first =
            |n: u16| ports.candidates(HERE, ([10, 1, n.to_be_bytes()[0], n.to_be_bytes()[1]], 80).into()).next();
        let mut firsts: Vec<u16> = (0..1000).filter_map(first).collect();
        firsts.sort_unstable();
        let adjacent = firsts.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!(adjacent < 200, "{adjacent}");
    }
}
