//! Neighbours that vanish, and neighbours without number.

use crate::attack;
use crate::generator::frame::{self, ACK, ALL, Link, Mac, PSH, SYN, Segment};
use crate::generator::peer::{Peer, v4};
use crate::generator::server::{Service, V4};
use crate::generator::witness::Witness;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Sleeps of the server's thread for each question that it asks, at most. A question is asked a
/// second after the last one or later. So this is an order of magnitude: a stack that wakes without
/// a deadline does so a thousand times a second.
const SLEEPS: u64 = 50;
/// The Ethernet address to which the station has moved.
const MOVED: Mac = [0x02, 0xbb, 0, 0, 0x11, 0x11];

fn questions(peer: &Peer, host: IpAddr) -> [u32; 2] {
    peer.hosts.get(&host).copied().unwrap_or_default().asked
}

/// A station vanishes while its connection is idle. Then the server writes. Its thread sleeps
/// between its attempts, and when the station is back, the server sends what it owes by itself.
#[test]
fn a_neighbour_that_vanishes() {
    // One attempt, and the next.
    const QUESTIONS: u32 = 3;
    let attacked = attack(Service::Echo, &[], |peer, witness| {
        let local = SocketAddr::new(v4(77), 7000);
        let (IpAddr::V4(own), n) = (local.ip(), peer.connect(&[local])[0]) else { unreachable!() };
        peer.send(n, b"begin");
        peer.all("an echo", &[n], |connection| connection.received.len() == 5);
        // It vanishes, and moves: so the server has no confirmation of the address that it uses,
        // and asks for it soon.
        peer.connection(n).acknowledges = false;
        let host = peer.hosts.entry(local.ip()).or_default();
        (host.silent, host.asked) = (true, [0; 2]);
        let moved = frame::arp(Link { from: MOVED, to: ALL }, false, (MOVED, own), (MOVED, own));
        let mut expected = 5;
        while peer.connection(n).mac != MOVED {
            // An address that was just learned is not replaced.
            peer.push(moved.clone());
            peer.send(n, b"owed");
            expected += 4;
            peer.pump(Duration::from_millis(100));
        }
        peer.until("a question for all stations", |peer| questions(peer, local.ip())[0] > 0);
        let (sleeps, before) = (peer.server.sleeps(), questions(peer, local.ip())[0]);
        peer.until("further questions", |peer| questions(peer, local.ip())[0] >= before + QUESTIONS);
        let sleeps = peer.server.sleeps() - sleeps;
        witness.check(peer);
        // It is back, and sends nothing.
        let host = peer.hosts.entry(local.ip()).or_default();
        (host.silent, host.mac) = (false, Some(MOVED));
        let connection = peer.connection(n);
        connection.acknowledges = true;
        peer.all("the echo that is owed", &[n], |connection| {
            assert!(!connection.reset, "it was reset");
            connection.received.len() >= expected
        });
        assert_eq!(peer.connection(n).received.len(), expected);
        sleeps
    });
    let Some((sleeps, _)) = attacked else { return };
    assert!(sleeps <= SLEEPS * u64::from(QUESTIONS), "{sleeps} sleeps while {QUESTIONS} questions were asked");
}

/// SYNs from more stations than the server can know as neighbours. Established connections send
/// each segment once, and each is answered: no frame of theirs is dropped. Their neighbours stay
/// known: no station is asked for again. A new station is served after the flood.
#[test]
fn a_flood_of_connection_requests() {
    const SOURCES: u32 = 5000;
    const ROUNDS: u32 = 100;
    /// Connection requests of a round.
    const REQUESTS: u32 = 500;
    const FLOWS: u32 = 4;
    let attacked = attack(Service::Echo, &[], |peer, _| {
        let hosts: Vec<IpAddr> = (0..FLOWS).map(|n| v4(60_000 + n)).collect();
        let mut flows: Vec<_> = hosts.iter().map(|&host| Witness::at(peer, SocketAddr::new(host, 6000))).collect();
        hosts.iter().for_each(|host| peer.hosts.entry(*host).or_default().asked = [0; 2]);
        for round in 0..ROUNDS {
            let mut answers = Vec::new();
            for n in 0..REQUESTS {
                let number = round * REQUESTS + n;
                let from = SocketAddr::new(v4(number % SOURCES), 1024 + (number / SOURCES) as u16);
                peer.push(frame::request(peer.ethernet(), from, (V4, Service::Echo.port()).into()));
                if n % (REQUESTS / FLOWS) == 0 {
                    answers.push(flows[answers.len()].ask(peer));
                }
            }
            peer.flush();
            flows.iter().zip(&answers).for_each(|(flow, answer)| flow.answered(peer, answer));
        }
        let asked: u32 = hosts.iter().map(|host| questions(peer, *host)[0]).sum();
        assert_eq!(asked, 0, "stations with established connections were forgotten");
        // One that the server has not heard of.
        Witness::at(peer, SocketAddr::new(v4(61_000), 6000)).check(peer);
    });
    let Some(((), report)) = attacked else { return };
    assert_eq!(report.served(), (u64::from(FLOWS) + 2, 0), "{report}");
}

/// Segments of connections that there never were, to each port: they are answered by resets.
#[test]
fn a_flood_of_stray_segments() {
    let attacked = attack(Service::Echo, &[], |peer, witness| {
        for port in 0..=u16::MAX {
            let from = SocketAddr::new(v4(u32::from(port) % 3000), port);
            let to = SocketAddr::from((V4, port));
            let flags = [ACK, SYN, PSH | ACK, frame::FIN | ACK, SYN | ACK][usize::from(port) % 5];
            let seq = u32::from(port) << 16;
            let segment = Segment { from, to, seq, ack: seq, flags, window: 1, options: &[], payload: &[0; 3] };
            if port != Service::Echo.port() {
                peer.push(segment.frame(peer.ethernet()));
            }
            if port % 4096 == 0 {
                witness.check(peer);
            }
        }
    });
    let Some(((), report)) = attacked else { return };
    assert_eq!(report.served(), (1, 0), "{report}");
    assert!(report.number(" resets for segments of no connection") > 0, "{report}");
}
