//! Connections that end while they are still named by a queue, a task or an old packet.

use crate::attack;
use crate::generator::frame::{ACK, FIN, PSH, RST};
use crate::generator::peer::{Peer, locals, v4};
use crate::generator::server::Service;
use crate::generator::witness::{answer, request};
use std::net::SocketAddr;

/// Handshakes that are completed and reset by frames that arrive together. Payload that came
/// between is received: it counts, and then the reset.
#[test]
fn connections_that_are_reset_before_they_are_accepted() {
    const CONNECTIONS: usize = 6000;
    const PAYLOAD: &[u8] = b"abc";
    let attacked = attack(Service::Echo, &[], |peer, _| {
        for locals in locals(CONNECTIONS).chunks(250) {
            let opened: Vec<_> = locals.iter().map(|&local| peer.open(local)).collect();
            opened.iter().for_each(|&n| peer.connection(n).acknowledges = false);
            peer.all("answers to SYN", &opened, |connection| connection.established);
            for &n in &opened {
                peer.segment(n, ACK, &[]);
                peer.segment(n, ACK | PSH, PAYLOAD);
                peer.segment(n, RST, &[]);
            }
            peer.settle();
        }
    });
    let Some(((), report)) = attacked else { return };
    assert_eq!(report.served(), (CONNECTIONS as u64 + 1, CONNECTIONS as u64), "{report}");
    assert!(report.number(" bytes received") >= (CONNECTIONS * PAYLOAD.len()) as u64, "{report}");
}

/// A cookie is valid for a while after its connection has ended. Its acknowledgement comes again
/// and again, each time with a reset behind it.
#[test]
fn a_cookie_that_is_replayed_and_reset() {
    /// More than a listener keeps of handshakes that are not complete.
    const HALF_OPEN: usize = 1100;
    const REPLAYS: usize = 2000;
    let attacked = attack(Service::Echo, &[], |peer, witness| {
        for locals in locals(HALF_OPEN).chunks(250) {
            let opened: Vec<_> = locals.iter().map(|&local| peer.open(local)).collect();
            opened.iter().for_each(|&n| peer.connection(n).acknowledges = false);
            peer.all("answers to SYN", &opened, |connection| connection.established);
        }
        let n = peer.open(SocketAddr::new(v4(5000), 5000));
        peer.connection(n).acknowledges = false;
        peer.all("an answer by a cookie", &[n], |connection| connection.established);
        for round in 0..REPLAYS {
            peer.segment(n, ACK, &[]);
            peer.segment(n, RST, &[]);
            if round % 250 == 0 {
                witness.check(peer);
            }
        }
        peer.settle();
        // A new connection is still opened, by a cookie.
        let local = SocketAddr::new(v4(5001), 5001);
        crate::generator::witness::Witness::at(peer, local).check(peer);
    });
    let Some(((), report)) = attacked else { return };
    assert!(report.number(" SYNs answered by a cookie") > 0, "{report}");
    let (served, broken) = report.served();
    assert!((3..=REPLAYS as u64 + 2).contains(&served) && broken == served - 2, "{report}");
}

/// The server has shut down its direction and still reads. The peer's FIN ends that, and a SYN of
/// the same address and port comes in the next frame. Each connection asks for another length.
#[test]
fn a_port_that_is_used_again_in_time_wait() {
    const PORTS: usize = 64;
    const ROUNDS: usize = 48;
    let attacked = attack(Service::Http, &[], |peer, _| {
        let locals = locals(PORTS);
        let mut ends = Vec::new();
        for round in 0..ROUNDS {
            // The ends of the last round's connections, each with the SYN that replaces it.
            let mut opened = Vec::new();
            for (at, &local) in locals.iter().enumerate() {
                if let Some(&before) = ends.get(at) {
                    peer.segment(before, ACK | FIN, &[]);
                }
                opened.push(peer.open(local));
            }
            peer.all("connections in the place of others", &opened, |connection| {
                assert!(!connection.reset, "{} was reset", connection.local);
                connection.established
            });
            answers(peer, &opened, |at| 1 + at * ROUNDS + round);
            ends = opened;
        }
        for n in ends {
            peer.segment(n, ACK | FIN, &[]);
        }
        peer.settle();
    });
    let Some(((), report)) = attacked else { return };
    let all = (PORTS * ROUNDS) as u64;
    assert_eq!(report.served(), (all + 1, 0), "{report}");
    // The established connection asks twice.
    assert_eq!(report.number(" requests were answered"), all + 2, "{report}");
}

/// Each of these connections asks for a body of its length, and for its own end. It receives them,
/// and nothing else.
fn answers(peer: &mut Peer, opened: &[usize], len: impl Fn(usize) -> usize) {
    for (at, &n) in opened.iter().enumerate() {
        peer.send(n, &request(len(at), true));
    }
    peer.all("answers to requests", opened, |connection| {
        assert!(!connection.reset, "{} was reset", connection.local);
        connection.finished
    });
    for (at, &n) in opened.iter().enumerate() {
        let received = std::mem::take(&mut peer.connection(n).received);
        assert!(received == answer(len(at), true), "another connection's bytes, or none: {} of them", received.len());
    }
}
