//! Every connection that has something to send has a deadline, and no stack wakes without one.

use crate::common::peer::{ACK, FIN, RST, SYN, Seg, Wire};
use crate::common::{Link, addr, connected};
use netmem_inet::tcp::{Config, Error, Unreachable};
use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpListener};
use netmem_pool::Private;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

fn seg(peer: u16, flags: u8, seq: u32, ack: u32) -> Seg {
    Seg { peer, port: 80, flags, seq, ack, window: u16::MAX, payload: Vec::new() }
}

fn listening(options: ListenOptions) -> (Wire, TcpListener<Private>) {
    let wire = Wire::new(StackOptions::default());
    let listener = wire.stack.sockets().listen(addr("0.0.0.0:80"), options).unwrap();
    (wire, listener)
}

/// The peer is unplugged while its connections are idle. The user writes to one, which sends to the
/// address that it knows, and to another one, when the next hop is known not to answer. Both end as
/// if no acknowledgement had come, and the stack sleeps in between.
#[test]
fn a_write_to_a_neighbour_that_has_vanished_ends_in_a_timeout() {
    let (mut wire, mut listener) = listening(ListenOptions::default());
    let mut streams = [5000, 5001].map(|peer| {
        wire.open(peer, 80, 1000);
        listener.accept().unwrap()
    });
    wire.pass(10 * MINUTE);
    wire.answers_arp = false;
    streams[0].write(b"lost").unwrap();
    wire.pass(MINUTE);
    let before = streams[1].info().unwrap().send;
    streams[1].write(b"never sent").unwrap();
    let (sent, wakes) = wire.pass(12 * MINUTE);
    assert_eq!(sent, [], "there is no next hop");
    assert!(wakes < 500, "{wakes}");
    let info = streams[1].info().unwrap().send;
    assert_eq!((info.cwnd, info.ssthresh, info.rtt), (before.cwnd, before.ssthresh, before.rtt), "nothing was lost");
    assert_eq!(streams[1].write(b"x"), Ok(1), "it has not ended");
    let (_, wakes) = wire.pass(20 * MINUTE);
    assert!(wakes < 500, "{wakes}");
    for stream in &mut streams {
        assert_eq!(stream.write(b"x"), Err(SocketError::Closed(Error::Unreachable(Unreachable::Host))));
    }
    drop(streams);
    let (_, wakes) = wire.pass(MINUTE);
    assert!((wire.stack.connections(), wakes) < (1, 20), "{wakes}");
}

/// A connection whose next hop does not answer waits for it alone: another one has the ring.
#[test]
fn a_neighbour_that_has_vanished_costs_its_own_connection() {
    let (mut wire, mut listener) = listening(ListenOptions::default());
    wire.put_from([10, 0, 0, 9], &seg(6000, SYN, 500, 0));
    let answer = wire.poll().pop().unwrap();
    wire.put_from([10, 0, 0, 9], &seg(6000, ACK, 501, answer.end()));
    wire.poll();
    let mut dead = listener.accept().unwrap();
    let (number, mut una) = wire.open(5000, 80, 1000);
    let mut other = listener.accept().unwrap();
    wire.pass(10 * MINUTE);
    wire.answers_arp = false;
    wire.stack.queues().1.size = 4;
    dead.write(b"x").unwrap();
    let mut each = Vec::new();
    for _ in 0..22 {
        let (start, end) = (una, wire.now + Duration::from_secs(1));
        while wire.now < end {
            let _ = other.write(&[1; 20_000]);
            wire.now += Duration::from_millis(1);
            for segment in wire.poll().iter().filter(|segment| segment.peer == 5000) {
                if segment.seq == una {
                    una = segment.end();
                }
            }
            wire.put(&seg(5000, ACK, number, una));
        }
        each.push(una.wrapping_sub(start));
    }
    let (least, most) = (each.iter().min().unwrap(), each.iter().max().unwrap());
    assert!(*least > most / 2, "bytes in each second: {each:?}");
}

/// The same, but the neighbour comes back: the segment leaves at once, and not with the next timer.
#[test]
fn a_segment_leaves_when_its_next_hop_is_resolved() {
    let (mut wire, mut listener) = listening(ListenOptions::default());
    wire.open(5000, 80, 1000);
    let mut stream = listener.accept().unwrap();
    wire.pass(10 * MINUTE);
    wire.answers_arp = false;
    stream.write(b"hello").unwrap();
    wire.pass(3 * MINUTE);
    let (sent, _) = wire.pass(MINUTE);
    assert_eq!(sent, []);
    wire.answers_arp = true;
    // The station asks for the stack's address, and so announces its own.
    let request = [
        &[0xff; 6][..],
        &[2, 1, 10, 0, 0, 1],
        &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
        &[2, 1, 10, 0, 0, 1, 10, 0, 0, 1],
        &[0; 6],
        &[10, 0, 0, 2],
    ];
    wire.frame(request.concat());
    let sent = wire.poll();
    assert!(sent.iter().any(|seg| seg.payload == b"hello"), "{sent:?}");
}

/// A ring that the device never empties: nothing leaves, so nothing was lost, and the connection
/// ends all the same.
#[test]
fn a_ring_that_stays_full_ends_in_a_timeout() {
    let mut link = Link::new(false);
    let (mut client, _server) = connected(&mut link);
    link.near.queues().1.size = 0;
    *link.near.queues().1.completes.borrow_mut() = false;
    let before = client.info().unwrap().send.cwnd;
    client.write(b"x").unwrap();
    let mut wakes = 0;
    while client.is_connected() == Ok(true) {
        assert_eq!(client.info().unwrap().send.cwnd, before);
        assert!(link.step(), "there is a deadline");
        wakes += 1;
        assert!(wakes < 200, "{wakes}");
    }
    assert_eq!(client.is_connected(), Err(SocketError::Closed(Error::TimedOut)));
}

/// Connections that wait for the ring get room in the order in which they began to wait, and those
/// for which there is no room are not visited.
#[test]
fn room_in_the_ring_goes_round() {
    let mut link = Link::new(false);
    let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let config = Config { fixed_window: true, ..Config::default() };
    let mut clients: Vec<_> =
        (0..20).map(|_| link.near.sockets().connect(addr("10.0.0.2:80"), &config).unwrap()).collect();
    link.settle();
    let mut servers = Vec::new();
    while let Ok(stream) = listener.accept() {
        servers.push(stream);
    }
    link.near.queues().1.size = 4;
    for client in &mut clients {
        client.set_nodelay(true);
        assert_eq!(client.write(&[1; 14_000]), Ok(14_000));
    }
    // In each turn the device is done with four packets. When the first connection has sent all,
    // each other one has had its turn.
    let mut done = vec![0; 20];
    while done.iter().any(|&bytes| bytes < 14_000) {
        link.now += Duration::from_micros(100);
        link.near.poll(link.now);
        link.far.poll(link.now);
        for server in &mut servers {
            let n = clients.iter().position(|client| client.local_addr() == server.peer_addr()).unwrap();
            let mut bytes = [0; 20_000];
            if let Ok(read) = server.read(&mut bytes) {
                done[n] += read;
            }
        }
        let first_is_done = done.contains(&14_000);
        assert!(!first_is_done || done.iter().all(|&bytes| bytes > 0), "{done:?}");
    }
}

/// A flood of SYNs and of segments to closed ports, from stations of the link that do not exist. No
/// destination and no neighbour is looked up for the answers, and the entries of an established
/// connection stay.
#[test]
fn answers_without_a_connection_leave_no_trace() {
    let (mut wire, mut listener) = listening(ListenOptions { half_open: 0, ..ListenOptions::default() });
    let (mut seq, ack) = wire.open(5000, 80, 1000);
    let stream = listener.accept().unwrap();
    wire.exchange(Seg { payload: b"x".to_vec(), ..seg(5000, ACK, seq, ack) });
    seq += 1;
    let (lookups, questions) = (wire.stack.stats().lookups, wire.questions);
    let (mut cookies, mut resets) = (0, 0);
    for n in 0..20_000_u32 {
        let [_, _, b, c] = n.to_be_bytes();
        let from = [10, 0, 0, b % 200 + 20];
        wire.put_from(from, &Seg { port: 80 + u16::from(n % 2 == 0), ..seg(1024 + u16::from(c), SYN, n, 0) });
        if n % 100 == 0 {
            for answer in wire.poll() {
                cookies += usize::from(answer.has(SYN | ACK));
                resets += usize::from(answer.has(RST));
            }
            wire.exchange(Seg { payload: b"x".to_vec(), ..seg(5000, ACK, seq, ack) });
            seq += 1;
        }
    }
    assert!(cookies > 9000 && resets > 9000, "{cookies} {resets}");
    assert_eq!((wire.stack.stats().lookups, wire.questions), (lookups, questions));
    assert_eq!(stream.readable(), 201);
}

/// A request is read by its user, and the answer has its acknowledgement: one segment for each. If
/// the user does nothing, the stack is polled again before it sleeps, and acknowledges later.
#[test]
fn an_answer_acknowledges_its_request_and_nothing_waits_for_an_answer() {
    let (mut wire, mut listener) = listening(ListenOptions::default());
    let (mut seq, mut ack) = wire.open(5000, 80, 1000);
    let mut stream = listener.accept().unwrap();
    // The first segments are acknowledged at once.
    let request = |seq, ack| Seg { payload: b"ask".to_vec(), ..seg(5000, ACK, seq, ack) };
    for n in 0..100 {
        wire.put(&request(seq, ack));
        wire.now += Duration::from_micros(1);
        assert!(wire.stack.poll(wire.now) > 0);
        assert_eq!(stream.read(&mut [0; 10]), Ok(3), "it can be read after the first poll");
        seq += 3;
        assert_eq!(stream.write(b"answer"), Ok(6));
        let sent = wire.poll();
        let answer = sent.last().unwrap();
        assert_eq!((answer.seq, answer.ack, &answer.payload[..]), (ack, seq, &b"answer"[..]));
        ack = answer.end();
        assert!(sent.len() == 1 || n < 16, "{n}: {sent:?}");
    }
    wire.put(&request(seq, ack));
    wire.now += Duration::from_micros(1);
    assert!(wire.stack.poll(wire.now) > 0);
    assert_eq!(wire.stack.poll_timeout(), Some(wire.now), "it is processed before the stack sleeps");
    assert_eq!(wire.poll(), []);
    let (sent, _) = wire.pass(Duration::from_millis(100));
    assert_eq!(sent.iter().map(|sent| (sent.ack, sent.payload.len())).collect::<Vec<_>>(), [(seq + 3, 0)]);
}

/// What is to be sent leaves in the poll in which its reason arrives. The stack waits only for a
/// user that may answer.
#[test]
fn what_does_not_wait_for_its_user_leaves_in_the_same_poll() {
    let (mut wire, mut listener) = listening(ListenOptions::default());
    let (mut seq, mut ack) = wire.open(5000, 80, 1000);
    let mut stream = listener.accept().unwrap();
    let bytes = |seq, ack| Seg { payload: b"ask".to_vec(), ..seg(5000, ACK, seq, ack) };
    for _ in 0..20 {
        wire.exchange(bytes(seq, ack));
        seq += 3;
    }
    let sent = |wire: &mut Wire| -> Vec<_> {
        let sent = wire.poll_once().into_iter();
        let sent = sent.map(|sent| (sent.seq, sent.ack, String::from_utf8(sent.payload).unwrap())).collect();
        assert_eq!(wire.poll(), [], "nothing is left");
        sent
    };
    let only = |seq, ack, payload: &str| vec![(seq, ack, payload.to_string())];

    // An acknowledgement is due.
    wire.pass(Duration::from_millis(100));
    wire.put(&bytes(seq, ack));
    wire.put(&bytes(seq + 3, ack));
    seq += 6;
    assert_eq!(sent(&mut wire), only(ack, seq, ""), "two segments");
    wire.put(&bytes(seq + 3, ack));
    assert_eq!(sent(&mut wire), only(ack, seq, ""), "payload out of order");
    wire.put(&bytes(seq, ack));
    seq += 6;
    assert_eq!(sent(&mut wire), only(ack, seq, ""), "the missing payload");
    wire.put(&seg(5000, SYN, seq, 0));
    assert_eq!(sent(&mut wire), only(ack, seq, ""), "a challenge");

    // A timer has expired.
    wire.put(&bytes(seq, ack));
    seq += 3;
    assert_eq!(sent(&mut wire), []);
    wire.now += Duration::from_millis(100);
    wire.put(&seg(5000, ACK, seq, ack));
    assert_eq!(sent(&mut wire), only(ack, seq, ""), "a delayed acknowledgement");

    // There is something to send.
    wire.put(&bytes(seq, ack));
    seq += 3;
    stream.write(b"answer").unwrap();
    assert_eq!(sent(&mut wire), only(ack, seq, "answer"), "a user's call");
    ack += 6;
    wire.put(&Seg { window: 0, ..seg(5000, ACK, seq, ack) });
    assert_eq!(sent(&mut wire), []);
    stream.write(b"late").unwrap();
    assert_eq!(sent(&mut wire), [], "the window is closed");
    wire.put(&seg(5000, ACK, seq, ack));
    assert_eq!(sent(&mut wire), only(ack, seq, "late"), "a window");
    ack += 4;
    wire.put(&seg(5000, ACK | FIN, seq, ack));
    assert_eq!(sent(&mut wire), only(ack, seq + 1, ""), "the end");

    // A connection without a user does not keep the stack awake.
    let (seq, ack) = wire.open(5001, 80, 1000);
    drop(listener.accept().unwrap());
    let fin = wire.poll().pop().unwrap();
    assert!(fin.has(FIN) && fin.seq == ack, "{fin:?}");
    wire.put(&seg(5001, ACK, seq, ack + 1));
    assert_eq!(wire.poll_once(), []);
    assert!(wire.stack.poll_timeout().is_some_and(|at| at > wire.now));
}
