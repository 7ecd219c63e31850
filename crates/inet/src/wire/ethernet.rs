//! Ethernet's header and addresses. VLAN tags are not parsed.

use std::fmt;

/// An Ethernet address.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The address of all stations.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Whether it is the address of a group. [`Mac::BROADCAST`] is one.
    #[inline]
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 == 1
    }

    /// Whether a station can have it: it is not the address of a group, and not zero.
    #[inline]
    #[must_use]
    pub fn is_unicast(self) -> bool {
        !self.is_multicast() && self != Self::default()
    }

    /// The group that frames for an IP multicast address are sent to.
    #[must_use]
    pub fn of_multicast(group: std::net::IpAddr) -> Self {
        match group {
            std::net::IpAddr::V4(group) => {
                let [_, b, c, d] = group.octets();
                Self([0x01, 0, 0x5e, b & 0x7f, c, d])
            }
            std::net::IpAddr::V6(group) => {
                let [.., a, b, c, d] = group.octets();
                Self([0x33, 0x33, a, b, c, d])
            }
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The Ethernet header, without its type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EthernetHeader {
    /// The destination.
    pub destination: Mac,
    /// The source.
    pub source: Mac,
}

impl EthernetHeader {
    /// Bytes of the header.
    pub const LEN: usize = 14;

    pub(super) fn write(self, ether_type: u16, out: &mut [u8; Self::LEN]) {
        out[..6].copy_from_slice(&self.destination.0);
        out[6..12].copy_from_slice(&self.source.0);
        out[12..].copy_from_slice(&ether_type.to_be_bytes());
    }
}

/// The types of Ethernet frames that are understood.
pub(super) mod ether_type {
    pub(in crate::wire) const ARP: u16 = 0x0806;
    pub(in crate::wire) const IPV4: u16 = 0x0800;
    pub(in crate::wire) const IPV6: u16 = 0x86dd;
}
