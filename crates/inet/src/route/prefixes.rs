//! The routes of a station by their prefixes. The longest prefix of a destination decides.

use prefix_trie::PrefixMap;
use std::net::IpAddr;

/// Where a route leads.
#[derive(Clone, Copy, Debug)]
pub(super) enum Via {
    /// The destination is on the link.
    Link,
    Gateway(IpAddr),
}

/// The routes: each leads from a prefix somewhere.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    v4: PrefixMap<(u32, u8), Via>,
    v6: PrefixMap<(u128, u8), Via>,
}

impl Prefixes {
    pub(super) fn longest(&self, destination: IpAddr) -> Option<Via> {
        match destination {
            IpAddr::V4(addr) => self.v4.get_lpm(&(addr.to_bits(), 32)).map(|(_, &via)| via),
            IpAddr::V6(addr) => self.v6.get_lpm(&(addr.to_bits(), 128)).map(|(_, &via)| via),
        }
    }

    pub(super) fn get_mut(&mut self, network: IpAddr, prefix_len: u8) -> Option<&mut Via> {
        match network {
            IpAddr::V4(addr) => self.v4.get_mut(&(addr.to_bits(), prefix_len)),
            IpAddr::V6(addr) => self.v6.get_mut(&(addr.to_bits(), prefix_len)),
        }
    }

    pub(super) fn insert(&mut self, network: IpAddr, prefix_len: u8, via: Via) {
        match network {
            IpAddr::V4(addr) => drop(self.v4.insert((addr.to_bits(), prefix_len), via)),
            IpAddr::V6(addr) => drop(self.v6.insert((addr.to_bits(), prefix_len), via)),
        }
    }

    pub(super) fn remove(&mut self, network: IpAddr, prefix_len: u8) {
        match network {
            IpAddr::V4(addr) => drop(self.v4.remove(&(addr.to_bits(), prefix_len))),
            IpAddr::V6(addr) => drop(self.v6.remove(&(addr.to_bits(), prefix_len))),
        }
    }

    /// How many routes there are.
    pub(super) fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }
}
