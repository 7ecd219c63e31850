//! Shares of pages: a peer that is idle, slow or hostile costs its own connection, and nothing else.
#![allow(clippy::unwrap_used, reason = "test")]

mod stack_common;

use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpListener, TcpStream};
use netmem_pool::Private;
use stack_common::addr;
use stack_common::peer::{ACK, PSH, Seg, Wire};
use std::collections::BTreeMap;
use std::time::Duration;

fn seg(peer: u16, seq: u32, ack: u32, payload: &[u8]) -> Seg {
    Seg { peer, port: 80, flags: ACK | PSH, seq, ack, window: u16::MAX, payload: payload.to_vec() }
}

fn listening() -> (Wire, TcpListener<Private>) {
    let wire = Wire::new(StackOptions::default());
    let options = ListenOptions { backlog: 8192, half_open: 8192, ..ListenOptions::default() };
    let listener = wire.stack.sockets().listen(addr("0.0.0.0:80"), options).unwrap();
    (wire, listener)
}

/// Opens a connection, and has a request on it answered. The peer acknowledges the answer.
fn answered(wire: &mut Wire, listener: &mut TcpListener<Private>, peer: u16) -> TcpStream<Private> {
    let (seq, ack) = wire.open(peer, 80, 1000);
    let mut stream = listener.accept().unwrap();
    wire.exchange(seg(peer, seq, ack, b"request"));
    assert_eq!(stream.read(&mut [0; 100]), Ok(7));
    assert_eq!(stream.write(b"answer"), Ok(6), "connection {peer}");
    let answer = wire.poll().pop().unwrap();
    assert_eq!(answer.payload, b"answer");
    wire.exchange(Seg { flags: ACK, ..seg(peer, seq + 7, answer.end(), b"") });
    stream
}

/// Connections that were answered once, more of them than there are pages. Each has given its pages back.
#[test]
fn idle_connections_hold_no_page() {
    let (mut wire, mut listener) = listening();
    let streams: Vec<_> = (0..5000).map(|n| answered(&mut wire, &mut listener, 2000 + n)).collect();
    wire.pass(Duration::from_secs(1));
    wire.pool.reclaim();
    assert_eq!((wire.stack.connections(), wire.pool.stats().inflight, wire.stack.pages()), (5000, 0, 0));
    assert!(streams.iter().all(|stream| stream.is_connected() == Ok(true)));
}

/// Peers that request and never read, each of them as much as the connection may hold. Then all others go on as they were,
/// and a new one is answered.
#[test]
fn peers_that_never_read_do_not_make_the_others_mute() {
    let (mut wire, mut listener) = listening();
    let mut others = Vec::new();
    for peer in 2000..2010 {
        others.push(answered(&mut wire, &mut listener, peer));
    }
    let mut greedy = BTreeMap::new();
    for peer in 3000..3064 {
        let (seq, ack) = wire.open(peer, 80, 1000);
        let mut stream = listener.accept().unwrap();
        stream.set_send_buffer(64 << 20);
        let mut written = 0;
        // The peer announces a window of nothing.
        wire.exchange(Seg { window: 0, flags: ACK, ..seg(peer, seq, ack, b"") });
        while let Ok(n) = stream.write(&[7; 10_000]) {
            written += n;
        }
        assert!(written > 0, "{peer}");
        assert_eq!(stream.write(&[7]), Err(SocketError::WouldBlock));
        greedy.insert(peer, (stream, seq, ack, written as u32));
    }
    wire.pass(Duration::from_secs(300));
    others.push(answered(&mut wire, &mut listener, 4000));
    // Acknowledgements, probes and resets leave.
    for (&peer, (stream, seq, ack, _)) in &greedy {
        let answer = wire.exchange(Seg { window: 0, ..seg(peer, *seq, *ack, b"more") }).pop().unwrap();
        assert_eq!((answer.ack, stream.is_connected()), (seq + 4, Ok(true)));
    }
    for (n, stream) in others.iter_mut().enumerate() {
        assert_eq!(stream.write(b"again"), Ok(5), "{n}");
    }
    assert_eq!(wire.poll().iter().filter(|seg| seg.payload == b"again").count(), 11);
    // One of them reads, and gets all that was written for it.
    let (peer, (stream, seq, first, written)) = greedy.pop_first().unwrap();
    let mut ack = first;
    while ack.wrapping_sub(first) < written {
        wire.put(&Seg { flags: ACK, ..seg(peer, seq + 4, ack, b"") });
        let (sent, _) = wire.pass(Duration::from_millis(1));
        for seg in sent.iter().filter(|seg| seg.peer == peer) {
            ack = if seg.seq == ack { seg.end() } else { ack };
        }
    }
    drop((stream, greedy, others));
    wire.pass(Duration::from_secs(4000));
    wire.pool.reclaim();
    assert_eq!((wire.stack.connections(), wire.pool.stats().inflight), (0, 0));
}
