//! Handles of connections: a connection stays in its table until its owner releases it, and a
//! handle names no other.

use crate::common::addr;
use crate::common::peer::{ACK, FIN, PSH, RST, SYN, Seg, Wire};
use netmem_inet::tcp::Error;
use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpListener};
use netmem_pool::Private;
use std::time::Duration;

const PEER: u16 = 5000;

fn seg(flags: u8, seq: u32, ack: u32) -> Seg {
    Seg { peer: PEER, port: 80, flags, seq, ack, window: u16::MAX, payload: Vec::new() }
}

fn text(seq: u32, ack: u32, payload: &[u8]) -> Seg {
    Seg { payload: payload.to_vec(), ..seg(ACK | PSH, seq, ack) }
}

fn listening(options: ListenOptions) -> (Wire, TcpListener<Private>) {
    let wire = Wire::new(StackOptions::default());
    let listener = wire.stack.sockets().listen(addr("0.0.0.0:80"), options).unwrap();
    (wire, listener)
}

/// SYN, SYN-ACK, ACK, payload, RST, all before `accept`. The connection counts towards the backlog
/// until it is accepted.
#[test]
fn a_connection_that_is_reset_before_accept_stays_queued() {
    let (mut wire, mut listener) = listening(ListenOptions { backlog: 2, ..ListenOptions::default() });
    let mut opened = Vec::new();
    for peer in [PEER, PEER + 1] {
        let (seq, ack) = wire.open(peer, 80, 1000);
        wire.exchange(Seg { peer, ..text(seq, ack, b"last words") });
        wire.exchange(Seg { peer, ..seg(RST, seq + 10, 0) });
        opened.push(peer);
    }
    assert_eq!((wire.stack.connections(), wire.stack.stats().ended_unaccepted), (2, 2));
    let syn = Seg { peer: PEER + 2, ..seg(SYN, 1, 0) };
    assert_eq!(wire.exchange(syn.clone()), [], "the backlog is full");
    for peer in opened {
        let mut stream = listener.accept().unwrap();
        assert_eq!(stream.peer_addr().port(), peer);
        let mut bytes = [0; 20];
        assert_eq!((stream.read(&mut bytes), &bytes[..10]), (Ok(10), &b"last words"[..]));
        assert_eq!(stream.read(&mut bytes), Err(SocketError::Closed(Error::Reset)));
        assert_eq!(stream.write(b"x"), Err(SocketError::Closed(Error::Reset)));
    }
    assert_eq!(listener.accept().unwrap_err(), SocketError::WouldBlock);
    assert!(wire.exchange(syn)[0].has(SYN | ACK));
    drop(listener);
    wire.pass(Duration::from_secs(200));
    assert_eq!((wire.stack.connections(), wire.host.connections(), wire.stack.pages()), (0, 0, 0));
}

/// Connections that are opened and reset at once, in one poll, many times over the places of the
/// table.
#[test]
fn connections_that_are_reset_at_once_end_nothing() {
    let (mut wire, mut listener) = listening(ListenOptions::default());
    for round in 0..2000_u32 {
        let peer = 1024 + (round % 60_000) as u16;
        let answer = wire.exchange(Seg { peer, ..seg(SYN, round, 0) }).pop().unwrap();
        wire.put(&Seg { peer, ..seg(ACK, round + 1, answer.seq + 1) });
        wire.put(&Seg { peer, ..seg(RST, round + 1, 0) });
        wire.poll();
        if round % 7 == 0 {
            while listener.accept().is_ok() {}
        }
    }
    let (seq, ack) = wire.open(900, 80, 77);
    while let Ok(stream) = listener.accept() {
        if stream.peer_addr().port() == 900 {
            wire.exchange(Seg { peer: 900, ..text(seq, ack, b"hello") });
            assert_eq!(stream.readable(), 5);
        }
    }
}

/// A cookie stays valid for a while. Each time that its acknowledgement is replayed after a reset,
/// it makes a connection.
#[test]
fn a_replayed_cookie_fills_the_backlog_and_no_more() {
    let (mut wire, mut listener) = listening(ListenOptions { backlog: 100, half_open: 0, ..ListenOptions::default() });
    let answer = wire.exchange(seg(SYN, 1000, 0)).pop().unwrap();
    for _ in 0..2000 {
        wire.exchange(seg(ACK, 1001, answer.seq + 1));
        wire.exchange(seg(RST, 1001, 0));
    }
    assert_eq!((wire.stack.connections(), wire.stack.stats().ended_unaccepted), (100, 100));
    let mut accepted = 0;
    while let Ok(mut stream) = listener.accept() {
        assert_eq!(stream.read(&mut [0]), Err(SocketError::Closed(Error::Reset)));
        accepted += 1;
    }
    wire.poll();
    assert_eq!((accepted, wire.stack.connections(), wire.host.connections()), (100, 0, 0));
}

/// The user has shut down and still reads; the peer has closed: TIME-WAIT. A new connection has the
/// same addresses and ports. `half_open` and cookies both begin one.
#[test]
fn a_stream_in_time_wait_does_not_receive_the_next_connections_payload() {
    for half_open in [16, 0] {
        let (mut wire, mut listener) = listening(ListenOptions { half_open, ..ListenOptions::default() });
        let (mut iss, mut streams) = (1000, Vec::new());
        for round in 0..50_u32 {
            let (seq, ack) = wire.open(PEER, 80, iss);
            let mut stream = listener.accept().unwrap();
            let words = format!("request {round}");
            let len = words.len() as u32;
            wire.exchange(text(seq, ack, words.as_bytes()));
            stream.shutdown();
            let fin = wire.poll().pop().unwrap();
            assert!(fin.has(FIN));
            wire.exchange(seg(FIN | ACK, seq + len, fin.end()));
            assert_eq!(wire.stack.connections_in_time_wait(), 1, "the others were given up");
            streams.push((stream, words));
            iss += 1_000_000;
        }
        assert_eq!(wire.stack.connections(), 50);
        // A segment of the last one still has an answer, and a reset of the first one does not
        // remove its flow.
        drop(streams.remove(0));
        wire.poll();
        assert_eq!((wire.stack.connections(), wire.host.connections()), (49, 1));
        for (stream, words) in &mut streams {
            let mut bytes = [0; 64];
            assert_eq!(stream.read(&mut bytes), Ok(words.len()));
            assert_eq!(&bytes[..words.len()], words.as_bytes());
            assert_eq!(stream.read(&mut bytes), Ok(0), "the end, and not another connection's payload");
        }
        // A connection that was superseded cannot move: its flow is another's.
        let (old, _) = streams.remove(0);
        assert!(old.depart().is_err());
        drop(streams);
        wire.pass(Duration::from_secs(61));
        assert_eq!((wire.stack.connections(), wire.host.connections()), (0, 0));
    }
}

/// The peer resets a connection and opens another one from the same port, while the user still has
/// the first one's stream.
#[test]
fn a_stream_that_has_ended_does_not_occupy_its_flow() {
    let (mut wire, mut listener) = listening(ListenOptions::default());
    let mut streams = Vec::new();
    for n in 1..100_u32 {
        let (seq, ack) = wire.open(PEER, 80, n * 1000);
        wire.exchange(text(seq, ack, &[n as u8]));
        if n % 2 == 0 {
            streams.push(listener.accept().unwrap());
        }
        assert_eq!(wire.host.connections(), 1);
        assert_eq!(wire.exchange(seg(RST, seq + 1, 0)), []);
        assert_eq!(wire.host.connections(), 0);
        assert_eq!(wire.exchange(text(seq + 1, ack, b"x"))[0].flags, RST, "there is no connection");
        while n % 2 == 1
            && let Ok(stream) = listener.accept()
        {
            streams.push(stream);
        }
    }
    for (n, stream) in streams.iter_mut().enumerate() {
        let mut byte = [0];
        assert_eq!((stream.read(&mut byte), byte[0]), (Ok(1), n as u8 + 1));
        assert_eq!(stream.read(&mut byte), Err(SocketError::Closed(Error::Reset)));
    }
    drop(streams);
    wire.poll();
    assert_eq!(wire.stack.connections(), 0);
}

/// If the listener drops the SYN, TIME-WAIT goes on: it still answers the peer's repeated FIN.
#[test]
fn a_syn_that_is_dropped_does_not_end_time_wait() {
    let (mut wire, mut listener) = listening(ListenOptions { backlog: 1, ..ListenOptions::default() });
    let (seq, ack) = wire.open(PEER, 80, 1000);
    let mut stream = listener.accept().unwrap();
    stream.shutdown();
    let end = wire.poll().pop().unwrap().end();
    wire.exchange(seg(FIN | ACK, seq, end));
    assert_eq!(wire.stack.connections_in_time_wait(), 1);
    wire.open(PEER + 1, 80, 1000);
    assert_eq!(wire.exchange(seg(SYN, 10_000_000, 0)), [], "the accept queue is full");
    assert_eq!(wire.stack.connections_in_time_wait(), 1);
    let again = wire.exchange(seg(FIN | ACK, seq, end)).pop().unwrap();
    assert_eq!((again.flags, again.ack), (ACK, seq + 1));
    assert_eq!(ack.wrapping_add(1), end);
}
