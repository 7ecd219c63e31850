//! Tests of routes: the longest prefix, bounds, and lookups against changes.

use super::dst::PATH_MTU_AGE;
use super::dst::{Dst, MIN_PATH_MTU_V4, MIN_PATH_MTU_V6};
use super::routes::Routes;
use super::routes::{DEPTH, NoRoute};
use crate::interface::{Address, Interface};
use crate::neighbor::{Hop, Neighbors};
use crate::time::Time;
use crate::wire::{Arp, Mac};
use netmem_refs::{Borrowed, Count, PercpuRef, RcuCell, RcuRef, Ref, RefCount, rcu};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

const NOW: Time = Time::from_micros(1_000_000_000);

fn ip(addr: &str) -> IpAddr {
    addr.parse().unwrap()
}

fn interface() -> Arc<Interface> {
    let addresses = [("10.0.0.1", 8), ("192.0.2.1", 24), ("2001:db8::1", 64), ("fe80::1", 64)];
    let addresses = addresses.map(|(addr, prefix_len)| Address { addr: ip(addr), prefix_len }).into();
    Arc::new(Interface { mac: Mac([2, 0, 0, 0, 0, 1]), mtu: 1500, addresses })
}

fn routes() -> Routes {
    Routes::new(interface())
}

fn find<C: Count>(routes: &Routes<C>, destination: &str) -> Result<Ref<Dst<C>, C>, NoRoute> {
    routes.find(ip(destination), NOW, Hop::new)
}

/// The neighbour and the source address on the way to a destination.
fn way(routes: &Routes, destination: &str) -> (String, String) {
    let dst = find(routes, destination).unwrap();
    (dst.hop().map_or(String::new(), |hop| hop.addr().to_string()), dst.source().to_string())
}

fn is(via: &str, source: &str) -> (String, String) {
    (via.into(), source.into())
}

#[test]
fn the_longest_prefix_leads_the_way() {
    let routes = routes();
    assert_eq!(way(&routes, "10.9.9.9"), is("10.9.9.9", "10.0.0.1"));
    assert_eq!(way(&routes, "192.0.2.7"), is("192.0.2.7", "192.0.2.1"));
    assert_eq!(way(&routes, "192.0.2.1"), is("", "192.0.2.1"), "our own");
    assert_eq!(find(&routes, "198.51.100.1").err(), Some(NoRoute::Unreachable(ip("198.51.100.1"))));
    routes.add(ip("0.0.0.0"), 0, ip("10.0.0.254")).unwrap();
    routes.add(ip("198.51.0.0"), 16, ip("192.0.2.254")).unwrap();
    // Bits behind the prefix do not count.
    routes.add(ip("198.51.100.77"), 24, ip("192.0.2.253")).unwrap();
    assert_eq!(way(&routes, "8.8.8.8"), is("10.0.0.254", "10.0.0.1"));
    assert_eq!(way(&routes, "198.51.1.1"), is("192.0.2.254", "192.0.2.1"));
    assert_eq!(way(&routes, "198.51.100.1"), is("192.0.2.253", "192.0.2.1"));
    assert!(routes.remove(ip("198.51.100.0"), 24) && !routes.remove(ip("198.51.100.0"), 24));
    assert_eq!(way(&routes, "198.51.100.1"), is("192.0.2.254", "192.0.2.1"));
    // The network of an address comes back when a route in its place is removed, and cannot be
    // removed itself.
    routes.add(ip("192.0.2.0"), 24, ip("10.0.0.254")).unwrap();
    assert_eq!(way(&routes, "192.0.2.7").0, "10.0.0.254");
    assert!(routes.remove(ip("192.0.2.0"), 24) && !routes.remove(ip("192.0.2.0"), 24));
    assert_eq!(way(&routes, "192.0.2.7").0, "192.0.2.7");
    // IPv6, by a gateway that is known by its link-local address.
    assert!(find(&routes, "2001:db8:1::1").is_err());
    routes.add(ip("::"), 0, ip("fe80::2")).unwrap();
    assert_eq!(way(&routes, "2001:db8:1::1"), is("fe80::2", "2001:db8::1"));
    assert_eq!(way(&routes, "fe80::9"), is("fe80::9", "fe80::1"));
    for group in ["224.0.0.1", "255.255.255.255", "10.255.255.255", "192.0.2.255", "ff02::1", "0.0.0.0", "::"] {
        assert_eq!(find(&routes, group).err(), Some(NoRoute::Group(ip(group))));
    }
    let wrong = |network: &str, prefix_len, gateway: &str| routes.add(ip(network), prefix_len, ip(gateway)).is_err();
    assert!(wrong("0.0.0.0", 33, "10.0.0.254") && wrong("0.0.0.0", 0, "11.0.0.1") && wrong("0.0.0.0", 0, "10.0.0.1"));
    assert!(wrong("::", 0, "10.0.0.254"));
}

/// A cached entry is current until routes change. A neighbour's new address and a path MTU are
/// seen by all its users, and leave the generation alone. Proves REF-8.
#[test]
fn only_routes_move_the_generation() {
    let interface = interface();
    let routes = routes();
    let neighbors = Mutex::new(Neighbors::<()>::new());
    let find = || routes.find(ip("10.0.0.2"), NOW, |next| neighbors.lock().unwrap().hop(next, NOW)).unwrap();
    let (first, second) = (find(), find());
    let same = |a: &Ref<Dst, RcuRef>, b: &Ref<Dst, RcuRef>| Ref::ptr_eq(a, b);
    assert!(same(&first, &second));
    let generation = routes.generation();
    for mac in [2, 3] {
        let hop = first.hop().unwrap();
        let _ = neighbors.lock().unwrap().resolve(hop, NOW);
        let mac = Mac([2, 0, 0, 0, 0, mac]);
        let (sender, target) = (Ipv4Addr::new(10, 0, 0, 2), Ipv4Addr::new(10, 0, 0, 1));
        let arp = Arp { request: false, mac, sender, target, target_mac: interface.mac };
        let later = NOW + Duration::from_secs(u64::from(mac.0[5]) * 10);
        neighbors.lock().unwrap().handle_arp(&arp, &interface, later);
        let _ = neighbors.lock().unwrap().resolve(hop, later);
        assert_eq!(second.hop().unwrap().mac(), Some(mac));
    }
    assert!(first.too_big(1400, NOW));
    assert_eq!((second.path_mtu(NOW), find().path_mtu(NOW)), (1400, 1400));
    assert!(routes.generation() == generation && routes.is_current(&first) && same(&first, &find()));
    routes.add(ip("0.0.0.0"), 0, ip("10.0.0.254")).unwrap();
    assert!(!routes.is_current(&first) && !same(&first, &find()));
}

/// Proves that a path MTU has a floor, only becomes smaller, and is forgotten.
#[test]
fn a_path_mtu_has_a_floor_and_an_end() {
    let routes = routes();
    for (destination, floor) in [("10.0.0.2", MIN_PATH_MTU_V4), ("2001:db8::2", MIN_PATH_MTU_V6)] {
        let dst = find(&routes, destination).unwrap();
        assert!(!dst.too_big(1500, NOW) && !dst.too_big(70_000, NOW) && dst.path_mtu(NOW) == 1500);
        assert!(dst.too_big(1400, NOW) && !dst.too_big(1450, NOW) && dst.path_mtu(NOW) == 1400);
        assert!(dst.too_big(0, NOW) && dst.path_mtu(NOW) == floor);
        let before_end = NOW + (PATH_MTU_AGE - Duration::from_millis(1));
        assert_eq!((dst.path_mtu(before_end), dst.path_mtu(NOW + PATH_MTU_AGE)), (floor, 1500));
    }
}

/// Any number of destinations occupies no more than the buckets have room for, and the last ones
/// are found. Proves NET-10.
#[test]
fn destinations_are_bounded() {
    let routes = routes();
    let hop = Hop::new(ip("10.0.0.2"));
    let find = |n: u32, now: Time| {
        let destination = Ipv4Addr::from_bits(0x0a01_0000 + n);
        routes.find(destination.into(), now, |_| hop.clone()).unwrap()
    };
    let n = 40_000;
    (0..n).for_each(|at| drop(find(at, NOW + Duration::from_secs(at.into()))));
    let deepest = routes.buckets.iter().map(depth).max();
    assert_eq!(deepest, Some(DEPTH));
    let kept = |at: u32| routes.lookup(Ipv4Addr::from_bits(0x0a01_0000 + at).into(), NOW).is_some();
    assert!((n - 2000..n).all(kept) && (0..2000).filter(|&at| kept(at)).count() < 200);
    drop(routes);
    released(&[hop]);
}

fn depth<C: Count>(bucket: &RcuCell<Dst<C>, C>) -> usize {
    rcu::read(|guard| {
        let (mut at, mut depth) = (bucket.load(guard), 0);
        while let Some(found) = at {
            (at, depth) = (Borrowed::value(found).next.load(guard), depth + 1);
        }
        depth
    })
}

/// Returns when all entries with these hops are gone. Sections of other tests delay that.
fn released(hops: &[Arc<Hop>]) {
    while hops.iter().any(|hop| Arc::strong_count(hop) > 1) {
        rcu::flush();
        thread::yield_now();
    }
}

/// Threads look up few destinations while another changes routes. Each gets an entry of its
/// destination; an entry that is current when it was found agrees with the routes of its
/// generation; and all entries are gone in the end.
fn lookups_against_changes<C: Count>() {
    // Two buckets, so that entries are replaced all the time.
    let routes = Arc::new(Routes::<C>::with_buckets(interface(), 2));
    let gateways = [Hop::new(ip("10.0.0.254")), Hop::new(ip("10.0.0.253"))];
    routes.add(ip("0.0.0.0"), 0, gateways[0].addr()).unwrap();
    let (done, found) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let lookers: Vec<_> = (0..3_u64)
            .map(|seed| {
                let (routes, gateways, done, found) = (&routes, &gateways, &done, &found);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed);
                    let mut cached: Option<Ref<Dst<C>, C>> = None;
                    while !done.load(Ordering::Relaxed) {
                        let destination = IpAddr::from([8, 8, 8, rng.u8(..20)]);
                        let hop = |via| gateways.iter().find(|hop| hop.addr() == via).unwrap().clone();
                        let dst = routes.find(destination, NOW, hop).unwrap();
                        assert_eq!(dst.destination(), destination);
                        let parity = usize::from(!dst.generation.is_multiple_of(2));
                        assert_eq!(dst.hop().unwrap().addr(), gateways[1 - parity].addr());
                        found.fetch_add(1, Ordering::Relaxed);
                        if let Some(old) = cached.replace(dst) {
                            let _ = (old.path_mtu(NOW), routes.is_current(&old), old.hop().unwrap().mac());
                        }
                    }
                })
            })
            .collect();
        // The generation is odd with the first gateway.
        for changed in 1..=100 {
            routes.add(ip("0.0.0.0"), 0, gateways[changed % 2].addr()).unwrap();
            // If no looking thread is left, there is no more progress.
            while found.load(Ordering::Relaxed) < changed * 50 && !lookers.iter().all(|looker| looker.is_finished()) {
                thread::yield_now();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(routes);
    released(&gateways);
}

#[test]
fn lookups_against_changes_with_each_count() {
    lookups_against_changes::<RcuRef>();
    lookups_against_changes::<RefCount>();
    lookups_against_changes::<PercpuRef>();
}
