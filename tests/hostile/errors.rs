//! ICMP that quotes established connections and datagrams that never were.

use crate::attack;
use crate::generator::connection::mss;
use crate::generator::frame;
use crate::generator::peer::{Peer, v4, v6};
use crate::generator::server::{Server, Service};
use etherparse::IpNumber;
use std::net::{IpAddr, SocketAddr};

/// Connections of each family. Each is on one of two queues, and so is each error, by hashes of the
/// kernel.
const FLOWS: u32 = 8;
/// Bytes that the server has in flight when a connection is quoted.
const FLIGHT: usize = 8000;
/// The MTUs of the links that forged and true errors name.
const NARROW: u16 = 1000;
const NARROW_V6: u16 = 1280;

/// An error is believed or not by what it quotes.
#[derive(Clone, Copy)]
enum Quoted {
    /// A segment that is in flight.
    InFlight,
    /// A segment from outside of the window, by this distance.
    Outside(u32),
    /// A datagram that the server has not sent.
    Datagram,
}

/// The quotation, of a packet that the server is said to have sent on this connection.
fn quotation(peer: &mut Peer, n: usize, quoted: Quoted) -> Vec<u8> {
    let connection = peer.connection(n);
    let (protocol, behind) = match quoted {
        Quoted::InFlight => (IpNumber::TCP, connection.unacknowledged().to_be_bytes()),
        Quoted::Outside(by) => (IpNumber::TCP, connection.unacknowledged().wrapping_add(by).to_be_bytes()),
        Quoted::Datagram => (IpNumber::UDP, [0x05, 0xc8, 0, 0]),
    };
    frame::quote(protocol, connection.remote, connection.local, behind, 1400)
}

/// A router of the connection's family. Routers have many addresses, so that their errors arrive on
/// all queues.
fn router(local: SocketAddr, number: u32) -> IpAddr {
    if local.is_ipv4() { v4(0x4000 + number % 512) } else { v6(0x4000 + number % 512) }
}

fn error(peer: &mut Peer, n: usize, number: u32, kind: [u8; 2], rest: [u8; 4], quoted: Quoted) {
    let quotation = quotation(peer, n, quoted);
    let local = peer.connection(n).local;
    let addresses = [router(local, number), Server::address(&local.ip())];
    peer.push(frame::icmp(peer.ethernet(), addresses, kind, rest, &quotation));
}

/// "Packet too big" of the connection's family, with the MTU where it belongs.
fn too_big(peer: &mut Peer, n: usize, number: u32, quoted: Quoted) {
    let (kind, rest) = if peer.connection(n).local.is_ipv4() {
        ([3, 4], u32::from(NARROW).to_be_bytes())
    } else {
        ([2, 0], u32::from(NARROW_V6).to_be_bytes())
    };
    error(peer, n, number, kind, rest, quoted);
}

/// The connections' answers stay in flight from now on.
fn in_flight(peer: &mut Peer, flows: &[usize]) {
    for &n in flows {
        peer.connection(n).acknowledges = false;
        peer.send(n, &[3; FLIGHT]);
    }
    peer.all("answers that stay in flight", flows, |connection| !connection.received.is_empty());
}

/// They are acknowledged, and the rest arrives.
fn landed(peer: &mut Peer, flows: &[usize]) {
    for &n in flows {
        peer.connection(n).acknowledges = true;
        peer.acknowledge(n);
    }
    flows.iter().for_each(|&n| echoed(peer, n, 3));
}

/// The echo has arrived.
fn echoed(peer: &mut Peer, n: usize, byte: u8) {
    peer.all("an echo", &[n], |connection| {
        assert!(!connection.reset, "an error has ended {}", connection.local);
        connection.received.len() >= FLIGHT
    });
    assert!(std::mem::take(&mut peer.connection(n).received) == [byte; FLIGHT]);
}

/// The size of the segments in which the server answers on a connection.
fn segments(peer: &mut Peer, flow: usize) -> usize {
    peer.connection(flow).largest = 0;
    peer.send(flow, &[4; FLIGHT]);
    echoed(peer, flow, 4);
    peer.connection(flow).largest
}

#[test]
fn errors_of_all_kinds() {
    let attacked = attack(Service::Echo, &["--queues", "2"], |peer, witness| {
        let locals: Vec<_> = (0..FLOWS).flat_map(|n| [v4(300 + n), v6(300 + n)]).collect();
        let locals: Vec<_> = locals.into_iter().map(|address| SocketAddr::new(address, 3000)).collect();
        let flows = peer.connect(&locals);
        let mut number = 0;
        let mut next = || {
            number += 1;
            number
        };

        // Forged: a router that has seen no segment of the connection cannot name a number in
        // flight.
        in_flight(peer, &flows);
        for &n in &flows {
            for _ in 0..8 {
                too_big(peer, n, next(), Quoted::Datagram);
                too_big(peer, n, next(), Quoted::Outside(0x4000_0000));
                too_big(peer, n, next(), Quoted::Outside(0x8000_0000));
            }
        }
        peer.settle_on_all_queues();
        landed(peer, &flows);
        for &n in &flows {
            let full = mss(peer.connection(n).local);
            assert_eq!(
                segments(peer, n),
                full,
                "forged errors have changed the path MTU of {}",
                peer.connection(n).local
            );
        }

        // All kinds and codes, in and out of the window, and of datagrams.
        in_flight(peer, &flows);
        for (at, &n) in flows.iter().enumerate() {
            for kind in (0..=255_u8).filter(|kind| usize::from(*kind) % flows.len() == at || *kind < 16 || *kind > 126)
            {
                for code in 0..16 {
                    let quoted = match next() % 3 {
                        0 => Quoted::InFlight,
                        1 => Quoted::Outside(0x2000_0000),
                        _ => Quoted::Datagram,
                    };
                    // "Too big" is for later.
                    if [(3, 4, true), (2, 0, false)].contains(&(kind, code, peer.connection(n).local.is_ipv4())) {
                        continue;
                    }
                    error(peer, n, next(), [kind, code], [0, 0, 2, code], quoted);
                }
            }
            witness.check(peer);
        }
        peer.settle_on_all_queues();
        landed(peer, &flows);

        // True ones: each by one router, and so on one queue.
        in_flight(peer, &flows);
        for &n in &flows {
            too_big(peer, n, next(), Quoted::InFlight);
        }
        peer.settle_on_all_queues();
        landed(peer, &flows);
        for &n in &flows {
            let local = peer.connection(n).local;
            let narrow = if local.is_ipv4() { NARROW - 40 } else { NARROW_V6 - 60 };
            assert_eq!(segments(peer, n), usize::from(narrow), "the path MTU of {local}");
        }
    });
    let Some(((), report)) = attacked else { return };
    assert_eq!(report.served(), (u64::from(2 * FLOWS) + 1, 0), "{report}");
}
