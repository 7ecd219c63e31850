//! A connection that is opened before an attack, and goes on after it.

use super::peer::Peer;
use super::server::Service;
use std::net::SocketAddr;

/// The peer's address for it. No attack is made from there.
pub const ADDRESS: [u8; 4] = [10, 200, 77, 33];
pub const PORT: u16 = 50_005;

pub struct Witness {
    n: usize,
    random: fastrand::Rng,
}

/// The body that `serve http` sends.
pub fn body(len: usize) -> impl Iterator<Item = u8> {
    (0..len).map(|n| n % 65536).map(|n| (n + 7 * (n >> 8)) as u8)
}

/// An answer of `serve http`, of `len` bytes.
pub fn answer(len: usize, close: bool) -> Vec<u8> {
    let close = if close { "Connection: close\r\n" } else { "" };
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n{close}\r\n");
    head.into_bytes().into_iter().chain(body(len)).collect()
}

/// A request to it.
pub fn request(len: usize, close: bool) -> Vec<u8> {
    let close = if close { "Connection: close\r\n" } else { "" };
    format!("GET /{len} HTTP/1.1\r\nHost: a\r\n{close}\r\n").into_bytes()
}

impl Witness {
    #[track_caller]
    pub fn open(peer: &mut Peer) -> Self {
        Self::at(peer, SocketAddr::from((ADDRESS, PORT)))
    }

    #[track_caller]
    pub fn at(peer: &mut Peer, local: SocketAddr) -> Self {
        let n = peer.connect(&[local])[0];
        let mut witness = Self { n, random: fastrand::Rng::with_seed(u64::from(local.port())) };
        witness.check(peer);
        witness
    }

    /// The connection's number.
    pub fn number(&self) -> usize {
        self.n
    }

    /// Sends a request of the service. Its answer must come.
    pub fn ask(&mut self, peer: &mut Peer) -> Vec<u8> {
        let len = self.random.usize(1..5000);
        let (sent, answer) = match peer.server.service() {
            Service::Echo => {
                let bytes: Vec<u8> = std::iter::repeat_with(|| self.random.u8(..)).take(len).collect();
                (bytes.clone(), bytes)
            }
            Service::Discard => (vec![1; len], Vec::new()),
            Service::Http => (request(len, false), answer(len, false)),
        };
        peer.send(self.n, &sent);
        answer
    }

    /// The connection is as it was, and its answer has come: each byte, and no other.
    #[track_caller]
    pub fn answered(&self, peer: &mut Peer, answer: &[u8]) {
        peer.all("answers to an established connection", &[self.n], |connection| {
            assert!(!connection.reset, "an established connection was reset");
            connection.received.len() >= answer.len() && connection.is_acknowledged()
        });
        let received = std::mem::take(&mut peer.connection(self.n).received);
        assert!(received == answer, "an established connection has received other bytes");
        assert!(peer.connection(self.n).is_open(), "an established connection was closed");
    }

    /// Asks, and waits for the answer.
    #[track_caller]
    pub fn check(&mut self, peer: &mut Peer) {
        let answer = self.ask(peer);
        self.answered(peer, &answer);
    }
}
