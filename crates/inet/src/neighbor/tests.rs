//! Tests of the cache of neighbours: its states, and its bounds.

use super::neighbors::SCANNED;
use super::*;
use crate::interface::{Address, Interface};
use crate::time::Time;
use crate::wire::{Arp, Mac};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

const US: Mac = Mac([2, 0, 0, 0, 0, 1]);
const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);
const OTHER: Mac = Mac([2, 0, 0, 0, 0, 3]);
const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const THEIRS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

fn interface() -> Interface {
    Interface { mac: US, mtu: 1500, addresses: vec![Address { addr: OWN.into(), prefix_len: 8 }] }
}

fn at(seconds: f64) -> Time {
    Time::from_micros((seconds * 1e6) as u64)
}

fn reply(mac: Mac) -> Arp {
    Arp { request: false, mac, sender: THEIRS, target: OWN, target_mac: US }
}

fn request(mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Arp {
    Arp { request: true, mac, sender, target, target_mac: Mac::default() }
}

fn events<P>(neighbors: &mut Neighbors<P>) -> Vec<Event<P>> {
    std::iter::from_fn(|| neighbors.poll_event()).collect()
}

fn solicit(at: Option<Mac>) -> Event<u32> {
    Event::Solicit { target: THEIRS.into(), at }
}

/// Runs all timers that are due, and returns the events with their times.
fn run(neighbors: &mut Neighbors<u32>, until: f64) -> Vec<(f64, Event<u32>)> {
    let mut out = Vec::new();
    while let Some(due) = neighbors.poll_timeout().filter(|&due| due <= at(until)) {
        neighbors.handle_timeout(due);
        assert!(neighbors.poll_timeout().is_none_or(|next| next > due), "a deadline that does not move");
        out.extend(events(neighbors).into_iter().map(|event| (due.micros() as f64 / 1e6, event)));
    }
    out
}

/// A cache in which the peer answered at 0.
fn resolved() -> (Neighbors<u32>, Arc<Hop>) {
    let mut neighbors = Neighbors::new();
    let hop = neighbors.hop(THEIRS.into(), at(0.0));
    assert_eq!((events(&mut neighbors), hop.mac()), (vec![], None), "nothing is solicited before it is used");
    assert_eq!(neighbors.resolve(&hop, at(0.0)), Resolution::Pending);
    assert_eq!(neighbors.resolve(&hop, at(0.1)), Resolution::Pending);
    assert_eq!(events(&mut neighbors), [solicit(None)]);
    neighbors.handle_arp(&reply(PEER), &interface(), at(0.2));
    let found = Event::Resolved { addr: THEIRS.into(), mac: PEER, packets: VecDeque::new() };
    assert_eq!(events(&mut neighbors), [found]);
    assert_eq!((hop.mac(), neighbors.resolve(&hop, at(0.2))), (Some(PEER), Resolution::Known(PEER)));
    (neighbors, hop)
}

#[test]
fn a_neighbour_that_does_not_answer_fails_and_is_solicited_again_later() {
    let mut neighbors = Neighbors::new();
    let hop = neighbors.hop(THEIRS.into(), at(0.0));
    assert_eq!(neighbors.send(&hop, 1, at(0.0)), Sent::Queued(None));
    assert_eq!(events(&mut neighbors), [solicit(None)]);
    let failed = Event::Failed { addr: THEIRS.into(), packets: [1].into() };
    assert_eq!(run(&mut neighbors, 3.5), [(1.0, solicit(None)), (2.0, solicit(None)), (3.0, failed)]);
    assert_eq!(neighbors.send(&hop, 2, at(3.9)), Sent::Failed(2));
    assert_eq!(neighbors.send(&hop, 3, at(4.0)), Sent::Queued(None));
    assert_eq!(events(&mut neighbors), [solicit(None)]);
}

#[test]
fn packets_wait_in_order_and_within_a_bound() {
    let mut neighbors = Neighbors::new();
    let hop = neighbors.hop(THEIRS.into(), at(0.0));
    for packet in 0..MAX_WAITING as u32 {
        assert_eq!(neighbors.send(&hop, packet, at(0.0)), Sent::Queued(None));
    }
    assert_eq!(neighbors.send(&hop, 8, at(0.0)), Sent::Queued(Some(0)));
    neighbors.handle_arp(&reply(PEER), &interface(), at(0.0));
    let packets = (1..=8).collect();
    assert_eq!(events(&mut neighbors)[1..], [Event::Resolved { addr: THEIRS.into(), mac: PEER, packets }]);
    assert_eq!(neighbors.send(&hop, 9, at(0.0)), Sent::Now(PEER, 9));
}

#[test]
fn a_neighbour_ages_and_is_solicited_before_it_is_given_up() {
    let (mut neighbors, hop) = resolved();
    assert_eq!(run(&mut neighbors, 100.0), [], "it is not used");
    assert_eq!(hop.mac(), None);
    assert_eq!(neighbors.resolve(&hop, at(100.0)), Resolution::Known(PEER));
    assert_eq!(hop.mac(), Some(PEER), "it is used without a look at the cache");
    assert_eq!(run(&mut neighbors, 105.5), [(105.0, solicit(Some(PEER)))]);
    // An answer by the peer itself.
    neighbors.handle_arp(&reply(PEER), &interface(), at(105.6));
    assert_eq!(run(&mut neighbors, 200.0), []);
    // And none.
    assert_eq!(neighbors.resolve(&hop, at(200.0)), Resolution::Known(PEER));
    let failed = Event::Failed { addr: THEIRS.into(), packets: VecDeque::new() };
    let mut expected = [205.0, 206.0, 207.0].map(|at| (at, solicit(Some(PEER)))).to_vec();
    expected.push((208.0, failed));
    assert_eq!(run(&mut neighbors, 220.0), expected);
    assert_eq!((hop.mac(), neighbors.resolve(&hop, at(220.0))), (None, Resolution::Pending));
}

#[test]
fn a_neighbour_that_acknowledges_is_not_solicited() {
    let (mut neighbors, hop) = resolved();
    for second in 1..300 {
        hop.confirm(at(f64::from(second)));
        assert_eq!(run(&mut neighbors, f64::from(second)), []);
        assert_eq!(hop.mac(), Some(PEER));
    }
}

/// A reply that was not solicited makes no entry, and a change of address is used and
/// solicited, not more than once a second.
#[test]
fn unsolicited_news_are_not_believed_without_a_solicitation() {
    let mut neighbors = Neighbors::<u32>::new();
    neighbors.handle_arp(&reply(PEER), &interface(), at(0.0));
    neighbors.handle_arp(&request(PEER, THEIRS, THEIRS), &interface(), at(0.0));
    assert_eq!((neighbors.entries.len(), events(&mut neighbors)), (0, vec![]));

    let (mut neighbors, hop) = resolved();
    neighbors.handle_arp(&reply(OTHER), &interface(), at(0.9));
    assert_eq!(neighbors.resolve(&hop, at(0.9)), Resolution::Known(PEER), "too early");
    assert_eq!(run(&mut neighbors, 6.0), [(5.9, solicit(Some(PEER)))], "the one that is known is solicited");
    neighbors.handle_arp(&reply(PEER), &interface(), at(6.0));
    neighbors.handle_arp(&request(OTHER, THEIRS, THEIRS), &interface(), at(6.5));
    assert_eq!((hop.mac(), neighbors.resolve(&hop, at(6.5))), (None, Resolution::Known(OTHER)));
    assert_eq!(run(&mut neighbors, 12.0), [(11.5, solicit(Some(OTHER)))]);
    // A reply to no solicitation, by a neighbour that is stale: it is recorded, and does not
    // confirm.
    let (mut neighbors, hop) = resolved();
    assert_eq!(run(&mut neighbors, 100.0), []);
    neighbors.handle_arp(&reply(PEER), &interface(), at(100.0));
    assert_eq!(hop.mac(), None);
    // Claims of our own address, of strangers, and of groups change nothing.
    let mut neighbors = Neighbors::<u32>::new();
    neighbors.handle_arp(&request(PEER, OWN, OWN), &interface(), at(0.0));
    neighbors.handle_arp(&request(PEER, Ipv4Addr::new(11, 0, 0, 1), OWN), &interface(), at(0.0));
    assert_eq!(neighbors.entries.len(), 0);
}

#[test]
fn a_solicitation_reports_the_address_of_the_station_that_sends_it() {
    let mut neighbors = Neighbors::<u32>::new();
    neighbors.handle_arp(&request(PEER, THEIRS, OWN), &interface(), at(0.0));
    let hop = neighbors.hop(THEIRS.into(), at(0.0));
    assert_eq!((hop.mac(), neighbors.resolve(&hop, at(0.0))), (None, Resolution::Known(PEER)));
}

/// Forged stations replace each other, and not the stations that are in use. Proves NET-10.
#[test]
fn entries_are_bounded() {
    let (mut neighbors, hop) = resolved();
    let mut users = vec![hop];
    for n in 3..20_003_u32 {
        let station = Ipv4Addr::from_bits(OWN.to_bits() + n);
        neighbors.handle_arp(&request(OTHER, station, OWN), &interface(), at(1.0));
        if n % 1000 == 0 {
            let hop = neighbors.hop(station.into(), at(1.0));
            assert_eq!(neighbors.resolve(&hop, at(1.0)), Resolution::Known(OTHER));
            users.push(hop);
        }
        assert!(events(&mut neighbors).len() <= 1);
    }
    assert_eq!((neighbors.entries.len(), neighbors.index.len()), (MAX_NEIGHBORS, MAX_NEIGHBORS));
    assert!(users.iter().all(|hop| hop.mac().is_some()));
}
/// A neighbour to which frames are sent without a solicitation for its address has its entry
/// although stations that do nothing but solicit came later, each of them with users.
#[test]
fn a_neighbour_that_carries_traffic_is_not_replaced() {
    let (mut neighbors, hop) = resolved();
    let mut others = Vec::new();
    for n in 3..5000_u32 {
        let now = at(0.3 + f64::from(n) / 100.0);
        hop.touch(now);
        hop.confirm(now);
        let station = Ipv4Addr::from_bits(OWN.to_bits() + n);
        neighbors.handle_arp(&request(OTHER, station, OWN), &interface(), now);
        others.push(neighbors.hop(station.into(), now));
        run(&mut neighbors, now.micros() as f64 / 1e6);
    }
    assert_eq!(hop.mac(), Some(PEER));
    assert_eq!(neighbors.resolve(&hop, at(51.0)), Resolution::Known(PEER));
    // A cache in which all are in use has no room. One that is not used any more makes some.
    let mut neighbors = Neighbors::<u32>::new();
    let station = |n: u32| IpAddr::from(Ipv4Addr::from_bits(OWN.to_bits() + n));
    let hops: Vec<_> = (2..2 + MAX_NEIGHBORS as u32).map(|n| neighbors.hop(station(n), at(0.1))).collect();
    // The clock of a program begins at 0.
    hops.iter().for_each(|hop| hop.touch(at(0.1)));
    let last = neighbors.hop(station(5000), at(2.0));
    let resolves = |neighbors: &mut Neighbors<u32>, seconds: f64| {
        let found = (0..MAX_NEIGHBORS / SCANNED).map(|_| neighbors.resolve(&last, at(seconds)));
        found.filter(|&found| found == Resolution::Pending).count()
    };
    assert_eq!(resolves(&mut neighbors, 2.0), 0);
    hops[1..].iter().for_each(|hop| hop.touch(at(4.0)));
    assert!(resolves(&mut neighbors, 6.0) > 0);
    assert!(!neighbors.index.contains_key(&station(2)) && neighbors.index.contains_key(&station(3)));
}

#[test]
fn packets_that_wait_are_bounded_over_all_neighbours() {
    let mut neighbors = Neighbors::new();
    let mut queued = 0;
    for n in 3..200_u32 {
        let hop = neighbors.hop(Ipv4Addr::from_bits(OWN.to_bits() + n).into(), at(0.0));
        for packet in 0..4 {
            queued += usize::from(neighbors.send(&hop, packet, at(0.0)) == Sent::Queued(None));
        }
    }
    assert_eq!((queued, neighbors.waiting), (MAX_WAITING_IN_ALL, MAX_WAITING_IN_ALL));
    let failed: usize = run(&mut neighbors, 10.0)
        .into_iter()
        .map(|(_, event)| if let Event::Failed { packets, .. } = event { packets.len() } else { 0 })
        .sum();
    assert_eq!((failed, neighbors.waiting), (MAX_WAITING_IN_ALL, 0));
}
