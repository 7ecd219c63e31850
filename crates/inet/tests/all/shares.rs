//! Shares of pages: a peer that is idle, slow or hostile costs its own connection, and nothing
//! else.

use crate::common::addr;
use crate::common::peer::{ACK, PSH, Seg, Wire};
use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpListener, TcpStream};
use netmem_pool::Private;
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

/// Connections that were answered once, more of them than there are pages. Each has given its pages
/// back.
#[test]
fn idle_connections_hold_no_page() {
    let (mut wire, mut listener) = listening();
    let streams: Vec<_> = (0..5000).map(|n| answered(&mut wire, &mut listener, 2000 + n)).collect();
    wire.pass(Duration::from_secs(1));
    wire.pool.reclaim();
    assert_eq!((wire.stack.connections(), wire.pool.stats().inflight, wire.stack.pages()), (5000, 0, 0));
    assert!(streams.iter().all(|stream| stream.is_connected() == Ok(true)));
}

/// Peers that request and never read, each of them as much as the connection may hold. Then all
/// others go on as they were, and a new one is answered.
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

/// One connection sends single bytes at every second number. They are copied together: they occupy
/// a few pages. Another connection's payload in order is received as before.
#[test]
fn single_bytes_out_of_order_share_pages() {
    let (mut wire, mut listener) = listening();
    let (seq, ack) = wire.open(2000, 80, 1000);
    let _hoarder = listener.accept().unwrap();
    for n in 0..4200 {
        wire.put(&seg(2000, seq + 1 + 2 * n, ack, b"x"));
        if n % 100 == 0 {
            wire.poll();
        }
    }
    wire.poll();
    assert!((1..10).contains(&wire.stack.pages()), "{}", wire.stack.pages());
    uploads(&mut wire, &mut listener, 3000);
    // What was missing arrives.
    wire.exchange(seg(2000, seq, ack, b"y"));
    drop(_hoarder);
    wire.pass(Duration::from_secs(1));
    assert_eq!(wire.stack.pages(), 0);
}

/// Peers that send full segments out of order, as many as fit. Payload in order takes their place:
/// that of the connection that has most goes first.
#[test]
fn payload_in_order_takes_the_place_of_payload_out_of_order() {
    let (mut wire, mut listener) = listening();
    let mut hoarders = Vec::new();
    for peer in 2000..2300 {
        let (seq, ack) = wire.open(peer, 80, 1000);
        hoarders.push(listener.accept().unwrap());
        for n in 0..40 {
            wire.put(&seg(peer, seq + 1 + 1400 * n, ack, &[0; 1300]));
        }
        wire.poll();
    }
    assert!(wire.stack.pages() >= 480, "{}", wire.stack.pages());
    let pages = wire.stack.pages();
    uploads(&mut wire, &mut listener, 3000);
    assert!(wire.stack.stats().evicted > 0 && wire.stack.pages() <= pages);
    assert!(hoarders.iter().all(|stream| stream.is_connected() == Ok(true)));
}

/// Sends a megabyte in order on a new connection, in batches of what the window admits. None of it
/// is dropped.
fn uploads(wire: &mut Wire, listener: &mut TcpListener<Private>, peer: u16) {
    let (mut seq, ack) = wire.open(peer, 80, 1000);
    let mut stream = listener.accept().unwrap();
    let (mut received, mut bytes) = (0, vec![0; 100_000]);
    let mut window = 1400;
    while received < 1_000_000 {
        let before = seq;
        while seq + 1400 <= before + window {
            wire.put(&seg(peer, seq, ack, &[3; 1400]));
            seq += 1400;
        }
        // With delayed acknowledgements.
        let (mut sent, _) = wire.pass(Duration::from_millis(50));
        received += stream.read(&mut bytes).unwrap();
        sent.extend(wire.poll());
        let answer = sent.iter().rfind(|seg| seg.peer == peer).unwrap();
        assert_eq!(answer.ack, seq, "what the window promised is received");
        window = u32::from(answer.window);
        assert!(window >= 1400, "{answer:?} {:?}", stream.info());
    }
}

/// The window promises bytes, whatever the size of the segments. The user does not read.
#[test]
fn small_segments_in_order_fill_the_window_that_was_promised() {
    for len in [1, 7, 100, 536, 1460] {
        let (mut wire, mut listener) = listening();
        let (seq, ack) = wire.open(2000, 80, 1000);
        let stream = listener.accept().unwrap();
        let mut at = seq;
        let window = u32::from(wire.exchange(seg(2000, seq, ack, &[1])).pop().unwrap().window);
        assert!(window > 50_000, "{window}");
        at += 1;
        let mut sent = Vec::new();
        while at + len <= seq + 1 + window {
            wire.put(&seg(2000, at, ack, &vec![at as u8; len as usize]));
            at += len;
            if at % 50 < len {
                sent.extend(wire.poll());
            }
        }
        sent.extend(wire.pass(Duration::from_secs(1)).0);
        let answer = sent.pop().unwrap();
        let info = stream.info().unwrap();
        assert_eq!(
            (answer.ack, info.out_of_buffers, stream.readable()),
            (at, 0, (at - seq) as usize),
            "{len}: {info:?}"
        );
        assert!(u32::from(answer.window) + at >= seq + 1 + window, "{len}: the edge has moved back");
        drop(stream);
        wire.poll();
        assert_eq!(wire.stack.pages(), 0);
    }
}

/// A user that reads late, while the others have taken all pages. The peer is told to wait, and
/// does not give up.
#[test]
fn a_peer_whose_user_reads_late_is_not_starved_to_a_reset() {
    let (mut wire, mut listener) = listening();
    let (seq, ack) = wire.open(2000, 80, 1000);
    let mut late = listener.accept().unwrap();
    wire.exchange(seg(2000, seq, ack, &[1; 1400]));
    // Others fill the budget with payload that is not read, one after the other.
    let mut others = Vec::new();
    for peer in 3000..4500 {
        let (seq, ack) = wire.open(peer, 80, 1000);
        others.push(listener.accept().unwrap());
        wire.exchange(seg(peer, seq, ack, &[1; 1400]));
        wire.exchange(seg(peer, seq + 1400, ack, &[1; 1400]));
    }
    let mut at = seq + 1400;
    let (mut asked, mut closed) = (0, 0);
    while asked < 30 {
        let answer = wire.exchange(seg(2000, at, ack, &[2; 1400])).pop().unwrap();
        closed += u32::from(answer.window == 0);
        at = answer.ack;
        asked += 1;
        wire.pass(Duration::from_secs(60));
    }
    assert!(closed > 20 || at > seq + 30 * 1400, "{closed} {}", at - seq);
    drop(others);
    wire.poll();
    // The user reads, and the window opens.
    let mut bytes = vec![0; 100_000];
    assert!(late.read(&mut bytes).unwrap() >= 1400);
    let update = wire.poll();
    assert!(update.iter().any(|seg| seg.peer == 2000 && seg.window > 10_000), "{update:?}");
}

/// The queue has too few buffers for an hour, so that all payload is dropped before it reaches its
/// connection. The peer is told to wait: it does not take it for losses, and it goes on afterwards.
#[test]
fn a_peer_waits_while_the_queue_is_short_of_buffers() {
    let mut link = crate::common::Link::new(false);
    let (mut client, mut server) = crate::common::connected(&mut link);
    link.far.queues().0.short = true;
    assert_eq!(client.write(&[5; 20_000]), Ok(20_000));
    link.pass(Duration::from_secs(3600));
    assert_eq!((client.is_connected(), server.readable()), (Ok(true), 0));
    link.far.queues().0.short = false;
    let (mut bytes, mut received) = (vec![0; 20_000], 0);
    while received < 20_000 {
        received += server.read(&mut bytes[received..]).unwrap_or(0);
        assert!(link.step() || received == 20_000);
    }
    assert!(bytes == [5; 20_000]);
}

/// A connection whose user does not read has used up its share. Its segments make no room for it:
/// what others have out of order stays, while the queue has buffers.
#[test]
fn a_share_that_is_used_up_costs_no_other_connection() {
    let mut wire = Wire::new(StackOptions { pages: 128, ..StackOptions::default() });
    let mut listener = wire.stack.sockets().listen(addr("0.0.0.0:80"), ListenOptions::default()).unwrap();
    let (mut next, ack) = wire.open(6000, 80, 1000);
    let hog = listener.accept().unwrap();
    loop {
        wire.exchange(seg(6000, next, ack, &[b'x'; 300]));
        wire.pass(Duration::from_millis(100));
        if hog.readable() as u32 != next + 300 - 1001 {
            break;
        }
        next += 300;
    }
    let others: Vec<_> = (5000..5006)
        .map(|peer| {
            let (start, ack) = wire.open(peer, 80, 1000);
            for n in 0..10 {
                wire.exchange(seg(peer, start + 1000 + 2000 * n, ack, &[b'v'; 1000]));
            }
            listener.accept().unwrap()
        })
        .collect();
    let held = || others.iter().map(|other| other.info().unwrap().buffers).collect::<Vec<_>>();
    let before = (held(), wire.stack.stats().evicted);
    assert!(before.0.iter().all(|&buffers| buffers > 0), "{before:?}");
    for odd in [ack, ack + 5_000_000] {
        wire.exchange(seg(6000, next, odd, &[b'x'; 300]));
        assert_eq!((held(), wire.stack.stats().evicted), before);
    }
    drop(hog);
}
