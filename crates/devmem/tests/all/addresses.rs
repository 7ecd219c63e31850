//! Sockets are found by the destination's address and port, and frames for other stations are not
//! delivered.

use crate::memory_common::{Feed, VERIFIED, all, bind, interface, recv, worker};
use etherparse::PacketBuilder;
use netmem_devmem::{FlowBindError, FlowTable, Fragment, RecvError, SocketOptions};
use netmem_packet::SplitHandler;
use std::net::{IpAddr, SocketAddr};

/// The Ethernet addresses of the interface, of a peer, and of another station.
const OURS: [u8; 6] = [4; 6];
const PEER: [u8; 6] = [2; 6];
const OTHER: [u8; 6] = [6; 6];
const BROADCAST: [u8; 6] = [0xff; 6];

/// The addresses of the interface.
const ADDRESSES: [&str; 3] = ["10.0.0.2", "10.0.0.3", "fd00::2"];

/// A datagram of 100 bytes to an address and a port.
fn datagram(mac: [u8; 6], from: &str, to: &str) -> Vec<u8> {
    let (from, to): (IpAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
    let ethernet = PacketBuilder::ethernet2(PEER, mac);
    let ip = match (from, to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
        (from, to) => panic!("{from} and {to}"),
    };
    let mut bytes = Vec::new();
    ip.udp(7, to.port()).write(&mut bytes, &[0x5a; 100]).unwrap();
    bytes
}

/// The length of the headers of a datagram.
fn headers(frame: &[u8]) -> usize {
    if frame[12] == 8 { 42 } else { 62 }
}

/// Proves INET-1: sockets on different addresses have the same port, and each gets the datagrams to
/// its own address. If the end of a datagram's headers is in device memory, it is counted at the
/// socket that has its address.
#[test]
fn a_socket_gets_what_is_sent_to_its_address() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(interface(OURS, &ADDRESSES)), Feed::new(&binding));
    let mut queue = table.queue(&binding);
    let mut sockets = ["10.0.0.2:9", "10.0.0.3:9", "[fd00::2]:9", "10.0.0.3:10", "0.0.0.0:11"].map(|local| {
        let local: SocketAddr = local.parse().unwrap();
        let socket = table.bind(local, &SocketOptions::new()).unwrap();
        assert_eq!(socket.local_addr(), local);
        socket
    });
    let sent = [
        ("10.0.0.3:9", 1),
        ("10.0.0.2:9", 0),
        ("[fd00::2]:9", 2),
        ("10.0.0.3:10", 3),
        ("10.0.0.2:11", 4),
        ("10.0.0.3:11", 4),
        ("[fd00::2]:11", 4),
    ];
    for (to, socket) in sent {
        let frame = datagram(OURS, if to.starts_with('[') { "fd00::1" } else { "10.0.0.1" }, to);
        queue.frame(feed.split(&frame, headers(&frame), VERIFIED));
        queue.frame(feed.split(&frame, headers(&frame) - 1, VERIFIED));
        for (other, one) in sockets.iter_mut().enumerate().filter(|(other, _)| *other != socket) {
            assert_eq!(one.recv(&mut [Fragment::Empty]), Err(RecvError::Empty), "{to} at {other}");
        }
        assert!(matches!(recv(&mut sockets[socket]).1[0], Fragment::Device { len: 100, .. }));
    }
    let counted = sockets.each_ref().map(|socket| (socket.stats().fragments, socket.stats().headers_in_device));
    assert_eq!(counted, [(1, 1), (1, 1), (1, 1), (1, 1), (3, 3)]);
    // An address of the interface without a socket on this port.
    queue.frame(feed.split(&datagram(OURS, "10.0.0.1", "10.0.0.2:10"), 42, VERIFIED));
    let stats = table.stats();
    assert_eq!((stats.no_socket, stats.headers_in_device, stats.not_ours), (1, 7, 0));
    drop((sockets, queue));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((feed, binding));
    memory.assert_gone();
}

/// Proves INET-1: a socket on all addresses gets no frame for another station, as a device in
/// promiscuous mode receives them. It gets what is sent to a group of the interface.
#[test]
fn frames_for_other_stations_are_not_delivered() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(interface(OURS, &ADDRESSES)), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let mut one = table.bind("10.0.0.2:10".parse().unwrap(), &SocketOptions::new()).unwrap();
    let not_ours = [
        (OURS, "10.0.0.1", "10.0.0.4:9"),
        (OURS, "fd00::1", "[fd00::4]:9"),
        (OTHER, "10.0.0.1", "10.0.0.2:9"),
        (OTHER, "10.0.0.1", "10.0.0.4:9"),
        // To all stations by Ethernet, and to one by IP.
        (BROADCAST, "10.0.0.1", "10.0.0.2:9"),
        // From an address of the interface.
        (OURS, "10.0.0.3", "10.0.0.2:9"),
        // To a group that the interface is not in, and to the broadcast address of another network.
        ([1, 0, 0x5e, 0, 0, 0xfb], "10.0.0.1", "224.0.0.251:9"),
        (BROADCAST, "10.0.0.1", "10.0.1.255:9"),
    ];
    for (at, (mac, from, to)) in not_ours.into_iter().enumerate() {
        let frame = datagram(mac, from, to);
        queue.frame(feed.split(&frame, headers(&frame), VERIFIED));
        // The headers continue in device memory behind the port.
        queue.frame(feed.split(&frame, headers(&frame) - 1, VERIFIED));
        assert_eq!(socket.recv(&mut [Fragment::Empty]), Err(RecvError::Empty), "{to} from {from}");
        assert_eq!(table.stats().not_ours, 2 * at as u64 + 2, "{to} from {from}");
    }
    assert_eq!((socket.stats().headers_in_device, table.stats().headers_in_device), (0, 0));
    let groups = [
        (BROADCAST, "10.0.0.1", "10.0.0.255:"),
        (BROADCAST, "10.0.0.1", "255.255.255.255:"),
        ([0x33, 0x33, 0, 0, 0, 1], "fd00::1", "[ff02::1]:"),
    ];
    for (mac, from, to) in groups {
        let frame = datagram(mac, from, &format!("{to}9"));
        queue.frame(feed.split(&frame, headers(&frame), VERIFIED));
        assert_eq!(recv(&mut socket).0.peer, SocketAddr::new(from.parse().unwrap(), 7));
        // Not to a socket that is bound to one address.
        let frame = datagram(mac, from, &format!("{to}10"));
        queue.frame(feed.split(&frame, headers(&frame), VERIFIED));
        assert_eq!(one.recv(&mut [Fragment::Empty]), Err(RecvError::Empty));
    }
    assert_eq!(table.stats().no_socket, 3);
    drop((socket, one, queue));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((feed, binding));
    memory.assert_gone();
}

/// Proves INET-1: two sockets never have an address and a port in common, and a socket has an
/// address that the interface has.
#[test]
fn an_address_and_a_port_are_of_one_socket() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(interface(OURS, &ADDRESSES)), Feed::new(&binding));
    let mut queue = table.queue(&binding);
    let bind = |local: &str| table.bind(local.parse().unwrap(), &SocketOptions::new());
    let taken =
        |local: &str| assert_eq!(bind(local).unwrap_err(), FlowBindError::Taken { local: local.parse().unwrap() });
    let one = bind("10.0.0.2:9").unwrap();
    ["10.0.0.2:9", "0.0.0.0:9", "[::]:9"].into_iter().for_each(taken);
    let other = bind("10.0.0.3:9").unwrap();
    drop(other);
    ["10.0.0.2:9", "0.0.0.0:9"].into_iter().for_each(taken);
    let other = bind("10.0.0.3:9").unwrap();
    drop(one);
    ["10.0.0.3:9", "0.0.0.0:9"].into_iter().for_each(taken);
    drop(other);
    let both = bind("0.0.0.0:9").unwrap();
    ["10.0.0.2:9", "[fd00::2]:9", "[::]:9"].into_iter().for_each(taken);
    drop(both);
    // An IPv4 address in the form of IPv6 is that of IPv4.
    let mut one = bind("[::ffff:10.0.0.2]:9").unwrap();
    assert_eq!(one.local_addr(), "10.0.0.2:9".parse().unwrap());
    taken("10.0.0.2:9");
    queue.frame(feed.split(&datagram(OURS, "10.0.0.1", "10.0.0.2:9"), 42, VERIFIED));
    let _ = recv(&mut one);
    for addr in ["10.0.0.4", "10.0.0.255", "fd00::3", "224.0.0.1"] {
        let addr: IpAddr = addr.parse().unwrap();
        let error = table.bind(SocketAddr::new(addr, 9), &SocketOptions::new()).unwrap_err();
        assert_eq!(error, FlowBindError::NotOurs { addr });
    }
    // A port of the table's choice is free on the address.
    let chosen = bind("10.0.0.2:0").unwrap().local_addr();
    assert!(chosen.ip() == one.local_addr().ip() && chosen.port() >= 1024, "{chosen}");
    drop((one, queue));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((feed, binding));
    memory.assert_gone();
}
