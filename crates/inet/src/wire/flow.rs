//! The two ends of a connection, as the key by which segments find it.

use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};

/// The two ends of a connection, or of a datagram. Both are of the same family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// This end.
    pub local: SocketAddr,
    /// The peer.
    pub remote: SocketAddr,
}

/// Hashes addresses and ports, in two calls for IPv4 and three for IPv6. The derived hash has
/// eight calls, because it adds the lengths of arrays and the numbers of variants. Each call of a
/// keyed hasher has a cost of its own, which is that of several bytes.
impl Hash for Flow {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        match (self.local.ip(), self.remote.ip()) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => {
                state.write_u64(u64::from(local.to_bits()) << 32 | u64::from(remote.to_bits()));
            }
            ends => {
                for address in <[IpAddr; 2]>::from(ends) {
                    match address {
                        IpAddr::V4(address) => state.write_u32(address.to_bits()),
                        IpAddr::V6(address) => state.write_u128(address.to_bits()),
                    }
                }
            }
        }
        state.write_u32(u32::from(self.local.port()) << 16 | u32::from(self.remote.port()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::DefaultHasher;

    /// A peer chooses its address and its port, so flows that differ in one bit must not have the
    /// same hash.
    #[test]
    fn each_bit_of_both_ends_changes_the_hash() {
        let hash = |local: (IpAddr, u16), remote: (IpAddr, u16)| {
            let mut state = DefaultHasher::new();
            Flow { local: local.into(), remote: remote.into() }.hash(&mut state);
            state.finish()
        };
        for v6 in [false, true] {
            let address = |bits: u128| if v6 { IpAddr::V6(bits.into()) } else { IpAddr::V4((bits as u32).into()) };
            let [local, remote] = [(0x0a4d_0001, 80), (0x0a4d_0002, 40_000)];
            let mut hashes = HashSet::from([hash((address(local.0), local.1), (address(remote.0), remote.1))]);
            let mut flows = 1;
            for end in 0..2 {
                let bits = if v6 { 128 } else { 32 };
                for bit in 0..bits + 16 {
                    let mut ends = [local, remote];
                    if bit < bits {
                        ends[end].0 ^= 1 << bit;
                    } else {
                        ends[end].1 ^= 1 << (bit - bits);
                    }
                    let [local, remote] = ends.map(|(bits, port)| (address(bits), port));
                    hashes.insert(hash(local, remote));
                    flows += 1;
                }
            }
            hashes.insert(hash((address(remote.0), remote.1), (address(local.0), local.1)));
            assert_eq!(hashes.len(), flows + 1, "IPv6: {v6}");
        }
    }
}
