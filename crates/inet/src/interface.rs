//! The addresses of a stack, and the check of whether a frame is for it.
//!
//! Why they do not change: the stacks of a host read them for each frame, on several threads, and
//! need no lock.

use crate::wire::{Advertisement, Arp, EthernetHeader, Ip, Mac, Solicitation, all_nodes, solicited_node};
use std::net::{IpAddr, Ipv4Addr};

/// An address of the interface, and the network that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub addr: IpAddr,
    /// Bits of the network's prefix. If this is more than the address has, it counts as all of its
    /// bits.
    pub prefix_len: u8,
}

impl Address {
    /// Bits of the prefix that there are.
    pub(crate) fn bits(&self) -> u8 {
        self.prefix_len.min(if self.addr.is_ipv4() { 32 } else { 128 })
    }

    /// Whether `other` is in the same network, and so a neighbour.
    #[inline]
    #[must_use]
    pub fn has(&self, other: IpAddr) -> bool {
        self.addr.is_ipv4() == other.is_ipv4() && common(self.addr, other) >= self.bits().into()
    }

    /// The address of all stations of the network. Networks of 31 and 32 bits have none, nor has
    /// IPv6.
    fn broadcast(&self) -> Option<Ipv4Addr> {
        match self.addr {
            IpAddr::V4(addr) if self.prefix_len < 31 => {
                Some(Ipv4Addr::from_bits(addr.to_bits() | u32::MAX >> self.prefix_len))
            }
            _ => None,
        }
    }
}

/// How many of their first bits two addresses of one family have in common.
fn common(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

/// How a packet was addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cast {
    /// To this station.
    Unicast,
    /// To a group or to all. Such a packet is never answered by an error or a reset.
    Group,
}

/// A network interface: its Ethernet address, and addresses that were assigned to it. They do not
/// change.
///
/// Addresses are static. There is no DHCP, no autoconfiguration (RFC 4862), and no detection of
/// duplicates: the user makes sure that no other station has these addresses. Only the groups that
/// IPv6 requires are joined, and this is not reported to switches (MLD).
#[derive(Clone, Debug)]
pub struct Interface {
    /// The Ethernet address.
    pub mac: Mac,
    /// Bytes of an IP packet that fit a frame.
    pub mtu: u16,
    /// Addresses, of both families.
    pub addresses: Vec<Address>,
}

impl Interface {
    /// Whether an address is one of the interface's.
    #[inline]
    #[must_use]
    pub fn owns(&self, addr: IpAddr) -> bool {
        self.addresses.iter().any(|own| own.addr == addr)
    }

    /// Whether a station with that address is on the link.
    #[must_use]
    pub fn is_neighbor(&self, addr: IpAddr) -> bool {
        self.addresses.iter().any(|own| own.has(addr))
    }

    /// Whether it is the address of all stations of a network of this interface.
    pub(crate) fn is_broadcast(&self, addr: IpAddr) -> bool {
        self.addresses.iter().any(|own| own.broadcast().is_some_and(|broadcast| addr == IpAddr::V4(broadcast)))
    }

    /// Whether a frame is for this station. `None` for a frame to another station; for a frame that
    /// claims to come from this station; and for a frame whose Ethernet destination is a group and
    /// whose IP destination is not (RFC 1122, 3.3.6).
    #[inline]
    #[must_use]
    pub fn accepts(&self, link: &EthernetHeader, ip: &Ip) -> Option<Cast> {
        let to_group = link.destination.is_multicast();
        if !to_group && link.destination != self.mac || self.owns(ip.source) {
            return None;
        }
        if self.owns(ip.destination) {
            return (!to_group).then_some(Cast::Unicast);
        }
        self.is_in_group(ip).then_some(Cast::Group)
    }

    #[cold]
    fn is_in_group(&self, ip: &Ip) -> bool {
        match ip.destination {
            IpAddr::V4(addr) => {
                let all = Ipv4Addr::new(224, 0, 0, 1);
                addr.is_broadcast() || addr == all || self.is_broadcast(ip.destination)
            }
            IpAddr::V6(addr) => {
                let solicited = |own: &Address| matches!(own.addr, IpAddr::V6(own) if solicited_node(own) == addr);
                addr == all_nodes() || self.addresses.iter().any(solicited)
            }
        }
    }

    /// The source address for packets to `destination` by the neighbour `via` (RFC 6724). An
    /// address of the destination's scope is preferred; among those, one in the neighbour's
    /// network; among those, the one with the longest prefix in common with the destination.
    #[must_use]
    pub fn source(&self, destination: IpAddr, via: IpAddr) -> Option<IpAddr> {
        let link_local = |addr: IpAddr| matches!(addr, IpAddr::V6(addr) if addr.is_unicast_link_local());
        let family = self.addresses.iter().filter(|own| own.addr.is_ipv4() == destination.is_ipv4());
        let worth = |own: &&Address| {
            let Address { addr, .. } = **own;
            (addr == destination, link_local(addr) == link_local(destination), own.has(via), common(addr, destination))
        };
        family.max_by_key(worth).map(|own| own.addr)
    }

    /// Writes the frame that solicits the Ethernet address of a neighbour. It is sent to all
    /// stations that may have the address, or only to the station `at`, which had it before. `None`
    /// if the interface has no address of the family, or if there are fewer than 86 bytes.
    #[must_use]
    pub fn solicit(&self, target: IpAddr, at: Option<Mac>, out: &mut [u8]) -> Option<usize> {
        match (target, self.source(target, target)?) {
            (IpAddr::V4(target), IpAddr::V4(sender)) => {
                let arp = Arp { request: true, mac: self.mac, sender, target, target_mac: Mac::default() };
                arp.emit(at.unwrap_or(Mac::BROADCAST), out)
            }
            (IpAddr::V6(target), IpAddr::V6(source)) => {
                let group = solicited_node(target);
                let (to, destination) = match at {
                    Some(mac) => (target, mac),
                    None => (group, Mac::of_multicast(group.into())),
                };
                let link = EthernetHeader { destination, source: self.mac };
                Solicitation { target, mac: Some(self.mac) }.emit(out, link, source, to).ok().map(|emitted| emitted.len)
            }
            _ => None,
        }
    }

    /// Writes the answer to a request for one of the interface's addresses. `None` if it was no
    /// such request, or if there are fewer than 42 bytes.
    ///
    /// A request is only answered to a neighbour, and to a station that probes whether an address
    /// is in use (RFC 5227).
    #[must_use]
    pub fn answer_arp(&self, arp: &Arp, out: &mut [u8]) -> Option<usize> {
        let may_ask = arp.sender.is_unspecified() || self.is_neighbor(arp.sender.into());
        if !arp.request || !may_ask || !self.owns(arp.target.into()) || self.owns(arp.sender.into()) {
            return None;
        }
        let (sender, target) = (arp.target, arp.sender);
        Arp { request: false, mac: self.mac, sender, target, target_mac: arp.mac }.emit(arp.mac, out)
    }

    /// Writes the answer to a solicitation of one of the interface's addresses. `None` if it was no
    /// such solicitation, or if there are fewer than 86 bytes.
    #[must_use]
    pub fn answer_solicitation(
        &self,
        link: &EthernetHeader,
        ip: &Ip,
        solicitation: &Solicitation,
        out: &mut [u8],
    ) -> Option<usize> {
        let IpAddr::V6(from) = ip.source else { return None };
        if !self.owns(solicitation.target.into()) || self.owns(ip.source) {
            return None;
        }
        let probes = from.is_unspecified();
        let (to, destination) = match probes {
            true => (all_nodes(), Mac::of_multicast(all_nodes().into())),
            false => (from, solicitation.mac.unwrap_or(link.source)),
        };
        let answer = Advertisement {
            target: solicitation.target,
            mac: Some(self.mac),
            router: false,
            solicited: !probes,
            overrides: true,
        };
        let link = EthernetHeader { destination, source: self.mac };
        answer.emit(out, link, solicitation.target, to).ok().map(|emitted| emitted.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{self, Icmp, Network, Transport};
    use std::net::Ipv6Addr;

    const US: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn interface() -> Interface {
        let addresses = [("192.0.2.1", 24), ("fe80::1", 64), ("2001:db8::1", 64), ("2001:db8:5::1", 48)];
        let addresses = addresses.map(|(addr, prefix_len)| Address { addr: addr.parse().unwrap(), prefix_len });
        Interface { mac: US, mtu: 1500, addresses: addresses.into() }
    }

    fn ip(source: &str, destination: &str) -> Ip {
        let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
        let content = wire::ByteRange::default();
        Ip { source, destination, traffic_class: 0, hop_limit: 64, protocol: 6, content, fragment: None }
    }

    /// Proves INET-1: a frame for another address is not delivered.
    #[test]
    fn only_frames_for_this_station_are_accepted() {
        let interface = interface();
        let accepts = |destination: Mac, from: &str, to: &str| {
            interface.accepts(&EthernetHeader { destination, source: PEER }, &ip(from, to))
        };
        assert_eq!(accepts(US, "192.0.2.2", "192.0.2.1"), Some(Cast::Unicast));
        assert_eq!(accepts(US, "2001:db8::2", "fe80::1"), Some(Cast::Unicast));
        assert_eq!(accepts(US, "192.0.2.2", "192.0.2.3"), None, "another IP address");
        assert_eq!(accepts(PEER, "192.0.2.2", "192.0.2.1"), None, "another Ethernet address");
        assert_eq!(accepts(US, "192.0.2.1", "192.0.2.1"), None, "from ourselves");
        assert_eq!(accepts(Mac::BROADCAST, "192.0.2.2", "192.0.2.1"), None, "to all on the link, to one by IP");
        for group in ["192.0.2.255", "255.255.255.255", "224.0.0.1"] {
            assert_eq!(accepts(Mac::BROADCAST, "192.0.2.2", group), Some(Cast::Group));
        }
        for group in ["ff02::1", "ff02::1:ff00:1"] {
            assert_eq!(accepts(Mac([0x33, 0x33, 0, 0, 0, 1]), "2001:db8::2", group), Some(Cast::Group));
        }
        for group in ["192.0.3.255", "224.0.0.251", "ff02::2", "ff02::1:ff00:2"] {
            let from = if group.contains(':') { "2001:db8::2" } else { "192.0.2.2" };
            assert_eq!(accepts(Mac::BROADCAST, from, group), None, "{group}");
        }
    }

    #[test]
    fn the_source_is_of_the_same_scope_and_near() {
        let source = |to: &str| {
            let to = to.parse().unwrap();
            interface().source(to, to).map(|addr| addr.to_string())
        };
        assert_eq!(source("198.51.100.1").as_deref(), Some("192.0.2.1"));
        assert_eq!(source("fe80::7").as_deref(), Some("fe80::1"));
        assert_eq!(source("2001:db8:5:9::1").as_deref(), Some("2001:db8:5::1"));
        assert_eq!(source("2001:db8::9").as_deref(), Some("2001:db8::1"));
        let mut v6_only = interface();
        v6_only.addresses.remove(0);
        let far = "198.51.100.1".parse().unwrap();
        assert_eq!(v6_only.source(far, far), None);
        // In the network of the gateway, though another address is nearer to the destination.
        let mut two = interface();
        two.addresses.push(Address { addr: "198.51.0.1".parse().unwrap(), prefix_len: 24 });
        assert_eq!(two.source(far, "192.0.2.9".parse().unwrap()), Some("192.0.2.1".parse().unwrap()));
        assert_eq!(two.source(far, far), Some("198.51.0.1".parse().unwrap()));
    }

    /// The solicitation of one station is answered by the station that has the address, and not by
    /// a third one.
    #[test]
    fn solicitations_are_answered() {
        let (us, mut peer) = (interface(), interface());
        peer.mac = PEER;
        for (own, addr) in peer.addresses.iter_mut().zip(["192.0.2.2", "fe80::2", "2001:db8::2", "2001:db8:5::2"]) {
            own.addr = addr.parse().unwrap();
        }
        let (mut asked, mut answer) = ([0; 86], [0; 86]);
        for (target, at) in [("192.0.2.1", None), ("192.0.2.1", Some(US)), ("fe80::1", None), ("2001:db8::1", Some(US))]
        {
            let target: IpAddr = target.parse().unwrap();
            let len = peer.solicit(target, at, &mut asked).unwrap();
            let (link, network) = wire::parse(&asked, len).unwrap();
            assert!(at.is_none_or(|at| link.destination == at) && link.source == PEER);
            match network {
                Network::Arp(arp) => {
                    let len = us.answer_arp(&arp, &mut answer).unwrap();
                    let Ok((_, Network::Arp(reply))) = wire::parse(&answer, len) else { panic!("no reply") };
                    assert_eq!((reply.mac, reply.sender, reply.target_mac), (US, arp.target, PEER));
                    assert_eq!(us.answer_arp(&reply, &mut asked), None, "a reply is not answered");
                    assert_eq!(peer.answer_arp(&arp, &mut asked), None, "not its address");
                    let far = Arp { sender: Ipv4Addr::new(198, 51, 100, 1), ..arp };
                    assert_eq!(us.answer_arp(&far, &mut asked), None, "not a neighbour");
                }
                Network::Ip(ip) => {
                    assert_eq!(us.accepts(&link, &ip), Some(if at.is_some() { Cast::Unicast } else { Cast::Group }));
                    let Ok(Transport::Icmp(Icmp::Solicitation(question))) = ip.transport(&asked) else {
                        panic!("{ip:?}")
                    };
                    let len = us.answer_solicitation(&link, &ip, &question, &mut answer).unwrap();
                    let Ok((link, Network::Ip(ip))) = wire::parse(&answer, len) else { panic!("no answer") };
                    let Ok(Transport::Icmp(Icmp::Advertisement(said))) = ip.transport(&answer) else {
                        panic!("{ip:?}")
                    };
                    assert_eq!((IpAddr::V6(said.target), said.mac, said.solicited), (target, Some(US), true));
                    assert_eq!(peer.accepts(&link, &ip), Some(Cast::Unicast));
                    assert_eq!(peer.answer_solicitation(&link, &ip, &question, &mut asked), None, "not its address");
                }
            }
        }
        // A station that probes is answered before all.
        let probe = Solicitation { target: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), mac: None };
        let ip = Ip { source: Ipv6Addr::UNSPECIFIED.into(), ..ip("::2", "fe80::1") };
        let link = EthernetHeader { destination: US, source: PEER };
        let len = us.answer_solicitation(&link, &ip, &probe, &mut answer).unwrap();
        let Ok((link, Network::Ip(ip))) = wire::parse(&answer, len) else { panic!("no answer") };
        assert_eq!((link.destination.0[0], ip.destination), (0x33, IpAddr::V6(all_nodes())));
    }
}
