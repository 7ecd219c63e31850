//! Connections that are idle, slow or dead, or send what costs the server the most: others go on.

use crate::attack;
use crate::generator::connection::mss;
use crate::generator::frame::{ACK, PSH};
use crate::generator::peer::{Peer, locals, v4};
use crate::generator::server::Service;
use crate::generator::witness::{Witness, answer, request};
use std::net::SocketAddr;

/// Requests of 10 bytes, one for each of these connections, and their answers.
fn one_answer_each(peer: &mut Peer, connections: &[usize]) {
    let answer = answer(10, false);
    for connections in connections.chunks(250) {
        connections.iter().for_each(|&n| peer.send(n, &request(10, false)));
        peer.all("answers to idle connections", connections, |connection| {
            assert!(connection.is_open(), "an idle connection has ended");
            connection.received.len() >= answer.len()
        });
        for &n in connections {
            assert!(std::mem::take(&mut peer.connection(n).received) == answer);
        }
    }
}

/// A new connection is answered.
#[track_caller]
fn a_new_one(peer: &mut Peer, number: u32) {
    Witness::at(peer, SocketAddr::new(v4(900), 900 + number as u16)).check(peer);
}

fn idle(connections: usize) {
    let attacked = attack(Service::Http, &[], |peer, witness| {
        let all = peer.connect(&locals(connections));
        one_answer_each(peer, &all);
        a_new_one(peer, 0);
        witness.check(peer);
        // They are as they were.
        one_answer_each(peer, &all);
        assert!(all.iter().all(|&n| peer.connection(n).is_open()));
    });
    let Some(((), report)) = attacked else { return };
    let all = connections as u64;
    assert_eq!(report.served().0, all + 2, "{report}");
    // Two each, and two of the new connection and three of the established one.
    assert_eq!(report.number(" requests were answered"), 2 * all + 5, "{report}");
}

/// As many as there are pages to send from, less one.
#[test]
fn idle_connections_4095() {
    idle(4095);
}

#[test]
fn idle_connections_20000() {
    idle(20_000);
}

/// Clients that ask for more than fits in their window, and never read it. Then clients that do not
/// even acknowledge it.
#[test]
fn clients_that_never_read() {
    const CLIENTS: usize = 64;
    let attacked = attack(Service::Http, &[], |peer, witness| {
        let all = locals(2 * CLIENTS);
        let slow = peer.connect(&all[..CLIENTS]);
        slow.iter().for_each(|&n| peer.connection(n).room = Some(65535));
        slow.iter().for_each(|&n| peer.send(n, &request(1 << 30, false)));
        peer.all("bytes that fill windows", &slow, |connection| connection.room == Some(0));
        a_new_one(peer, 0);
        witness.check(peer);
        let dead = peer.connect(&all[CLIENTS..]);
        dead.iter().for_each(|&n| peer.connection(n).acknowledges = false);
        dead.iter().for_each(|&n| peer.send(n, &request(1 << 30, false)));
        peer.all("bytes that are not acknowledged", &dead, |connection| !connection.received.is_empty());
        peer.settle();
        a_new_one(peer, 1);
        let all = [slow, dead].concat();
        assert!(all.iter().all(|&n| peer.connection(n).is_open()), "one that does not read was ended");
    });
    let Some(((), report)) = attacked else { return };
    assert_eq!(report.served().0, 2 * CLIENTS as u64 + 3, "{report}");
}

/// Clients that send one small request after another, as many as the server reads, and never read
/// the answers. These are copied, so that they occupy pages. The later ones find the pages occupied
/// that the first have left.
#[test]
fn clients_that_ask_on_and_never_read() {
    const CLIENTS: usize = 64;
    const WAVES: usize = 4;
    let attacked = attack(Service::Http, &[], |peer, witness| {
        let locals = locals(CLIENTS * WAVES);
        let mut clients = Vec::new();
        for (number, locals) in locals.chunks(CLIENTS).enumerate() {
            let wave = peer.connect(locals);
            ask_on(peer, witness, &wave);
            a_new_one(peer, number as u32);
            clients.extend(wave);
        }
        assert!(clients.iter().all(|&n| peer.connection(n).is_open()), "one that does not read was ended");
    });
    let Some(((), report)) = attacked else { return };
    assert_eq!(report.served().0, (CLIENTS * WAVES + WAVES + 1) as u64, "{report}");
}

/// These clients ask until the server reads no further: three times in a row, nothing could be
/// sent, and another connection was answered meanwhile.
fn ask_on(peer: &mut Peer, witness: &mut Witness, clients: &[usize]) {
    /// Bytes of requests that a client sends at most. Their answers are longer than a send buffer.
    const ASKED: usize = 1_050_000;
    let part = request(0, false).repeat(43);
    clients.iter().for_each(|&n| peer.connection(n).room = Some(65535));
    let (mut sent, mut rests) = (vec![0; clients.len()], 0);
    while rests < 3 {
        let before: usize = sent.iter().sum();
        for (sent, &n) in sent.iter_mut().zip(clients) {
            let connection = peer.connection(n);
            assert!(connection.is_open(), "one that does not read was ended");
            let window = usize::from(connection.window).saturating_sub(connection.in_flight());
            for _ in 0..(window / part.len()).min(ASKED.saturating_sub(*sent).div_ceil(part.len())) {
                peer.segment(n, ACK | PSH, &part);
                *sent += part.len();
            }
        }
        rests = if sent.iter().sum::<usize>() == before { rests + 1 } else { 0 };
        witness.check(peer);
    }
}

/// Sends bytes in flights: as much as the window admits, then nothing before all of it is
/// acknowledged. What is lost is sent again, and all that came after it.
struct Upload {
    n: usize,
    part: Vec<u8>,
    /// Bytes that were acknowledged.
    done: usize,
    flights: usize,
    /// The end of the window.
    edge: u32,
}

impl Upload {
    /// The most bytes of a flight.
    const FLIGHT: usize = 32 << 10;

    fn new(peer: &mut Peer, n: usize) -> Self {
        let connection = peer.connection(n);
        let edge = connection.una.wrapping_add(connection.window.into());
        Self { n, part: vec![7; mss(connection.local)], done: 0, flights: 0, edge }
    }

    /// Sends a flight, and waits until it has arrived.
    fn flight(&mut self, peer: &mut Peer) {
        let n = self.n;
        let part = self.part.len();
        peer.until("a window for the upload", |peer| usize::from(peer.connection(n).window) >= part);
        let begin = peer.connection(n).next;
        let most = usize::from(peer.connection(n).window).min(Self::FLIGHT) / part;
        let send = |peer: &mut Peer, parts: usize| (0..parts).for_each(|_| peer.segment(n, ACK, &self.part));
        send(peer, most);
        peer.until("acknowledgements of the upload", |peer| {
            let connection = peer.connection(n);
            assert!(connection.is_open(), "the upload was ended");
            let edge = connection.una.wrapping_add(connection.window.into());
            let back = self.edge.wrapping_sub(edge) as i32;
            assert!(back <= 0, "{back} bytes of the window were taken back");
            self.edge = edge;
            if connection.repeated >= 3 {
                let lost = connection.in_flight() / part;
                (connection.next, connection.repeated) = (connection.una, 0);
                send(peer, lost);
            }
            peer.connection(n).is_acknowledged()
        });
        self.flights += 1;
        self.done += peer.connection(n).una.wrapping_sub(begin) as usize;
    }
}

/// A connection sends single bytes at every second number, so that none is in order and none can be
/// read. Another one's upload keeps its window, and loses nothing.
#[test]
fn single_bytes_with_gaps_beside_an_upload() {
    const UPLOAD: usize = 20 << 20;
    /// Single bytes before the upload, more than the server has pages; and with each flight.
    const BEFORE: u32 = 8000;
    const TINY: u32 = 50;
    let attacked = attack(Service::Discard, &[], |peer, _| {
        let opened = peer.connect(&[SocketAddr::new(v4(1), 1000), SocketAddr::new(v4(2), 1000)]);
        let attacker = opened[0];
        let gaps = u32::from(peer.connection(attacker).window) / 2;
        let tiny = |peer: &mut Peer, from: u32, count: u32| {
            for gap in from..from + count {
                peer.out_of_order(attacker, 1 + 2 * (gap % gaps), ACK | PSH, b"x");
            }
        };
        let mut upload = Upload::new(peer, opened[1]);
        tiny(peer, 0, BEFORE);
        peer.settle();
        let mut next = BEFORE;
        while upload.done < UPLOAD {
            tiny(peer, next, TINY);
            next += TINY;
            upload.flight(peer);
            assert!(peer.connection(attacker).is_open(), "the attacker was ended");
            assert!(
                upload.flights <= 2 * upload.done.div_ceil(Upload::FLIGHT),
                "{} bytes have needed {} flights",
                upload.done,
                upload.flights
            );
        }
    });
    let Some(((), report)) = attacked else { return };
    assert_eq!(report.served(), (3, 0), "{report}");
}
