//! A connection for which nothing but segments has arrived, and that has nothing to send, is
//! processed in the next poll, with what its user has read and written by then: it is deferred. The
//! deferral lasts for one poll, whatever the user, the peer and other connections do, and delays
//! nothing else.
//!
//! The tests see the processing by a page: the page of an answer stays counted until the connection
//! that has received its acknowledgement is processed.

use crate::common::addr;
use crate::common::peer::{ACK, FIN, PSH, RST, SYN, Seg, Wire};
use crate::remote::Calls;
use netmem_inet::tcp::{Config, Error};
use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpListener, TcpStream};
use netmem_packet::{Armed, Wait};
use netmem_pool::Private;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

/// How long an acknowledgement waits for an answer.
const DELAY: Duration = Duration::from_millis(40);

/// Connections whose first segments are not acknowledged at once.
fn listening(options: StackOptions) -> (Wire, TcpListener<Private>) {
    let wire = Wire::new(options);
    let connection = Config { quick_acks: 0, ack_delay: DELAY, ..Config::default() };
    let options = ListenOptions { connection, ..ListenOptions::default() };
    let listener = wire.stack.sockets().listen(addr("0.0.0.0:80"), options).unwrap();
    (wire, listener)
}

/// Both ends of a connection: the peer's next numbers, and the user's stream.
struct Pair {
    peer: u16,
    seq: u32,
    ack: u32,
    stream: TcpStream<Private>,
}

impl Pair {
    fn open(wire: &mut Wire, listener: &mut TcpListener<Private>, peer: u16) -> Self {
        let (seq, ack) = wire.open(peer, 80, 1000);
        Self { peer, seq, ack, stream: listener.accept().unwrap() }
    }

    /// A connection whose user has sent an answer, which is not acknowledged.
    fn answered(wire: &mut Wire, listener: &mut TcpListener<Private>, peer: u16) -> Self {
        let mut pair = Self::open(wire, listener, peer);
        pair.answer(b"answer");
        pair.ack = wire.poll().pop().unwrap().end();
        assert_eq!(pair.pages(wire), 1);
        pair
    }

    /// The same, deferred: a request has arrived, which acknowledges the answer.
    fn deferred(wire: &mut Wire, listener: &mut TcpListener<Private>, peer: u16) -> Self {
        let mut pair = Self::answered(wire, listener, peer);
        pair.put(wire, ACK, b"ask");
        assert_eq!(wire.poll_once(), []);
        assert!(pair.is_deferred(wire));
        pair
    }

    fn seg(&self, flags: u8, payload: &[u8]) -> Seg {
        let (peer, seq, ack) = (self.peer, self.seq, self.ack);
        Seg { peer, port: 80, flags, seq, ack, window: u16::MAX, payload: payload.to_vec() }
    }

    /// The peer sends a segment.
    fn put(&mut self, wire: &Wire, flags: u8, payload: &[u8]) {
        let seg = self.seg(flags, payload);
        wire.put(&seg);
        self.seq = seg.end();
    }

    fn answer(&mut self, bytes: &[u8]) {
        assert_eq!(self.stream.write(bytes), Ok(bytes.len()));
    }

    /// Pages of answers that the peer has not acknowledged, as the stack counts them.
    fn pages(&self, wire: &Wire) -> usize {
        let list = wire.stack.list_connections();
        list.iter().find(|connection| connection.peer.port() == self.peer).unwrap().written_pages
    }

    /// Whether the connection, to which everything was acknowledged, was not processed since.
    fn is_deferred(&self, wire: &Wire) -> bool {
        let unacked = self.stream.info().unwrap().send.unacked;
        assert_eq!(unacked, 0, "of peer {}", self.peer);
        self.pages(wire) > 0
    }
}

/// The numbers of segments, and their payload.
fn summaries(sent: &[Seg]) -> Vec<(u16, u8, u32, &[u8])> {
    sent.iter().map(|seg| (seg.peer, seg.flags, seg.ack, &seg.payload[..])).collect()
}

/// The user is woken in the poll in which the request arrives, and the stack does not sleep until
/// the connection was processed: once for the request and its answer, in the next poll. Then its
/// timer runs.
#[test]
fn a_request_is_processed_once_with_its_answer() {
    let (mut wire, mut listener) = listening(StackOptions::default());
    let mut pair = Pair::answered(&mut wire, &mut listener, 5000);
    let calls = Arc::<Calls>::default();
    let waker = Waker::from(calls.clone());
    let mut bytes = [0; 10];
    for n in 1..100 {
        assert!(pair.stream.poll_read(&mut Context::from_waker(&waker), &mut bytes).is_pending());
        pair.put(&wire, ACK, b"ask");
        wire.now += Duration::from_micros(1);
        assert_eq!(wire.stack.poll(wire.now), 2, "a frame, and a connection that is deferred");
        assert_eq!(calls.count(), n, "the user reads in this poll");
        assert!(pair.is_deferred(&wire));
        assert_eq!(wire.stack.poll_timeout(), Some(wire.now));
        assert_eq!(wire.stack.arm().unwrap(), Armed::Work);
        assert_eq!(pair.stream.read(&mut bytes), Ok(3));
        pair.answer(b"answer");
        wire.now += Duration::from_micros(1);
        let before = wire.stack.stats().sent;
        assert_eq!(wire.stack.poll(wire.now), 1, "the connection");
        assert_eq!((wire.stack.stats().sent - before, pair.pages(&wire)), (1, 1), "it goes into the same page");
        let sent = wire.poll();
        assert_eq!(summaries(&sent), [(5000, ACK | PSH, pair.seq, &b"answer"[..])]);
        pair.ack = sent[0].end();
        assert!(wire.stack.poll_timeout().is_some_and(|at| at > wire.now));
        assert_eq!(wire.stack.arm().unwrap(), Armed::Waits);
        wire.stack.disarm();
    }
}

/// A user that neither reads nor writes: every second segment is acknowledged in the poll in which
/// it arrives, although the connection is deferred for the segment before, and the last one when
/// its time has come. The stack sleeps until then.
#[test]
fn a_user_that_does_nothing_delays_no_acknowledgement() {
    let (mut wire, mut listener) = listening(StackOptions::default());
    let mut pair = Pair::deferred(&mut wire, &mut listener, 5000);
    for n in 0..99 {
        pair.put(&wire, ACK, b"more");
        let sent = wire.poll_once();
        let due = [(5000, ACK, pair.seq, &b""[..])];
        assert_eq!(summaries(&sent), due[..usize::from(n % 2 == 0)], "{n}");
        assert_eq!(pair.pages(&wire), 0);
    }
    pair.put(&wire, ACK, b"last");
    assert_eq!(wire.poll_once(), []);
    assert_eq!(wire.pass(DELAY / 2).0, [], "it is the first of two");
    let (sent, wakes) = wire.pass(DELAY);
    assert_eq!(summaries(&sent), [(5000, ACK, pair.seq, &b""[..])]);
    assert!(wakes < 10, "{wakes}");
}

/// A peer that sends something in each poll that asks for nothing. The connection is deferred for
/// some of these segments. Its delayed acknowledgement leaves in the first poll after its time.
#[test]
fn a_peer_that_sends_in_each_poll_delays_no_timer() {
    let (mut wire, mut listener) = listening(StackOptions::default());
    let mut pair = Pair::answered(&mut wire, &mut listener, 5000);
    for _ in 0..20 {
        pair.put(&wire, ACK, b"ask");
        assert_eq!(wire.poll_once(), []);
        let due = wire.now + DELAY;
        loop {
            wire.now += DELAY / 16;
            wire.put(&pair.seg(ACK, b""));
            let sent = wire.poll_once();
            assert_eq!(pair.pages(&wire), 0);
            if wire.now >= due {
                assert_eq!(summaries(&sent), [(5000, ACK, pair.seq, &b""[..])]);
                break;
            }
            assert_eq!(sent, []);
        }
    }
}

/// Others receive in each poll, before and behind connections that are deferred, and no user calls.
/// Those that are deferred are processed in the next poll. An acknowledgement that is due leaves in
/// the same one.
#[test]
fn other_connections_delay_no_processing() {
    const OTHERS: u16 = 120;
    let (mut wire, mut listener) = listening(StackOptions { pages: 900, ..StackOptions::default() });
    let mut others: Vec<_> = (0..OTHERS).map(|n| Pair::open(&mut wire, &mut listener, 6000 + n)).collect();
    let mut pairs = [0, 1, 2].map(|n| Pair::answered(&mut wire, &mut listener, 5000 + n));
    let flood = |wire: &mut Wire, others: &mut [Pair]| {
        for other in others {
            other.put(wire, ACK, b"a");
            other.put(wire, ACK, b"b");
        }
    };
    let [first, middle, last] = &mut pairs;
    first.put(&wire, ACK, b"ask");
    let (some, rest) = others.split_at_mut(usize::from(OTHERS) / 2);
    flood(&mut wire, some);
    middle.put(&wire, ACK, b"ask");
    flood(&mut wire, rest);
    last.put(&wire, ACK, b"ask");
    assert_eq!(wire.poll_once().len(), usize::from(OTHERS), "all of them are acknowledged");
    assert_eq!(pairs.each_ref().map(|pair| pair.is_deferred(&wire)), [true; 3]);
    flood(&mut wire, &mut others);
    assert_eq!(wire.poll_once().len(), usize::from(OTHERS));
    assert_eq!(pairs.each_ref().map(|pair| pair.is_deferred(&wire)), [false; 3]);
    // Now the others are deferred, all at once.
    others.iter_mut().for_each(|other| other.put(&wire, ACK, b"c"));
    assert_eq!(wire.poll_once(), []);
    assert_eq!(wire.stack.poll_timeout(), Some(wire.now));
    assert_eq!(wire.poll_once(), []);
    assert!(wire.stack.poll_timeout().is_some_and(|at| at > wire.now), "none is due any more");
    let (sent, _) = wire.pass(2 * DELAY);
    assert_eq!(sent.len(), usize::from(OTHERS) + 3, "each acknowledgement leaves when its time has come");
}

/// What ends a connection does not wait because the connection is deferred.
#[test]
fn a_connection_that_is_deferred_can_end() {
    let (mut wire, mut listener) = listening(StackOptions::default());
    let mut deferred = |wire: &mut Wire, peer| Pair::deferred(wire, &mut listener, peer);
    let only = |sent: Vec<Seg>| {
        assert_eq!(sent.len(), 1, "{sent:?}");
        let Seg { peer, flags, ack, payload, .. } = sent.into_iter().next().unwrap();
        (peer, flags & (FIN | RST), ack, payload)
    };

    let mut pair = deferred(&mut wire, 5000);
    pair.answer(b"bye");
    pair.stream.shutdown();
    assert_eq!(only(wire.poll_once()), (5000, FIN, pair.seq, b"bye".to_vec()), "the user shuts it down");

    let mut pair = deferred(&mut wire, 5001);
    assert_eq!(pair.stream.read(&mut [0; 10]), Ok(3));
    let Pair { stream, seq, .. } = pair;
    drop(stream);
    assert_eq!(only(wire.poll_once()), (5001, FIN, seq, Vec::new()), "the user closes it");

    let before = wire.stack.connections();
    let Pair { stream, seq, .. } = deferred(&mut wire, 5002);
    drop(stream);
    assert_eq!(only(wire.poll_once()), (5002, RST, seq, Vec::new()), "the user has not read the request");
    assert_eq!(wire.stack.connections(), before, "it is removed in the same poll");

    let mut pair = deferred(&mut wire, 5003);
    pair.put(&wire, ACK | FIN, b"");
    assert_eq!(only(wire.poll_once()), (5003, 0, pair.seq, Vec::new()), "the peer closes it");

    let pair = deferred(&mut wire, 5004);
    wire.put(&pair.seg(RST, b""));
    assert_eq!(wire.poll_once(), []);
    assert_eq!(pair.stream.is_connected(), Err(SocketError::Closed(Error::Reset)), "the peer resets it");
    // The flow is free for the peer's next connection.
    wire.put(&Seg { flags: SYN, seq: 77, ..pair.seg(SYN, b"") });
    let answer = wire.poll_once().pop().unwrap();
    assert!(answer.has(SYN | ACK) && answer.ack == 78, "{answer:?}");

    let mut pair = Pair::answered(&mut wire, &mut listener, 5005);
    pair.put(&wire, ACK, b"ask");
    wire.put(&pair.seg(RST, b""));
    assert_eq!(wire.poll_once(), []);
    assert_eq!(
        (pair.pages(&wire), pair.stream.info().unwrap().readable),
        (0, 3),
        "the peer resets it in the same poll"
    );

    let pair = Pair::deferred(&mut wire, &mut listener, 5006);
    wire.stack.handle_device_gone();
    assert_eq!(wire.poll_once(), []);
    assert_eq!(pair.stream.is_connected(), Err(SocketError::Closed(Error::DeviceGone)));

    let (mut wire, mut listener) = listening(StackOptions::default());
    let mut pair = Pair::deferred(&mut wire, &mut listener, 5007);
    let pool = wire.pool.clone();
    drop(wire);
    pool.reclaim();
    assert_eq!((pair.stream.read(&mut [0; 10]), pool.stats().inflight), (Err(SocketError::StackGone), 0));
}

/// A connection that is deferred continues in another stack of the host: its acknowledgement leaves
/// there. Those that stay behind it in the list are processed in the next poll.
#[test]
fn a_connection_that_is_deferred_can_depart() {
    let (mut wire, mut listener) = listening(StackOptions::default());
    wire.add_queue(StackOptions::default());
    let mut pairs = [0, 1, 2].map(|n| Pair::answered(&mut wire, &mut listener, 5000 + n));
    pairs.iter_mut().for_each(|pair| pair.put(&wire, ACK, b"ask"));
    assert_eq!(wire.poll_once(), []);
    assert!(pairs.iter().all(|pair| pair.is_deferred(&wire)));
    let [first, second, third] = pairs;
    let departed = first.stream.depart().unwrap();
    assert_eq!(wire.poll_once(), []);
    assert_eq!([&second, &third].map(|pair| pair.is_deferred(&wire)), [false; 2]);
    let mut stream = wire.others[0].stack.sockets().adopt(departed).unwrap();
    let (sent, _) = wire.pass(2 * DELAY);
    let acknowledged = [&second, &third].map(|pair| (pair.peer, ACK, pair.seq, &b""[..]));
    let mut sent = summaries(&sent);
    sent.sort_unstable();
    assert_eq!(sent, [&[(5000, ACK, first.seq, &b""[..])][..], &acknowledged].concat());
    assert_eq!(stream.read(&mut [0; 10]), Ok(3));
}

/// A handshake that ends is reported in the same poll, and its timer does not run any more.
#[test]
fn a_handshake_that_ends_is_accepted_at_once() {
    let (mut wire, mut listener) = listening(StackOptions::default());
    let calls = Arc::<Calls>::default();
    let waker = Waker::from(calls.clone());
    assert!(listener.poll_accept(&mut Context::from_waker(&waker)).is_pending());
    let syn = Seg { peer: 5000, port: 80, flags: SYN, seq: 9, window: u16::MAX, ..Seg::default() };
    let answer = wire.exchange(syn.clone()).pop().unwrap();
    assert_eq!(calls.count(), 0);
    wire.put(&Seg { flags: ACK, seq: 10, ack: answer.end(), ..syn });
    assert_eq!(wire.poll_once(), []);
    assert_eq!(calls.count(), 1);
    let mut stream = listener.accept().unwrap();
    assert_eq!((stream.is_connected(), stream.write(b"hello")), (Ok(true), Ok(5)));
    assert_eq!(summaries(&wire.poll_once()), [(5000, ACK | PSH, 10, &b"hello"[..])], "the user speaks first");
    wire.put(&Seg { peer: 5000, port: 80, flags: ACK, seq: 10, ack: answer.end() + 5, ..Seg::default() });
    let (sent, wakes) = wire.pass(Duration::from_secs(60));
    assert!(sent.is_empty() && wakes < 20, "{sent:?} {wakes}");
}

/// A connection waits for the ring with a segment that counts as lost, and whose copy the device
/// still has. Then its acknowledgement arrives, so that nothing is to be sent any more. It is
/// processed in the next poll, although the ring has no room, and sends again when it has.
#[test]
fn a_connection_that_waits_for_the_ring_can_be_deferred() {
    let (mut wire, mut listener) = listening(StackOptions::default());
    let mut pair = Pair::open(&mut wire, &mut listener, 5000);
    let completes = wire.stack.queues().1.completes.clone();
    *completes.borrow_mut() = false;
    pair.answer(b"answer");
    let (sent, _) = wire.pass(Duration::from_secs(10));
    pair.ack = sent[0].end();
    assert_eq!(summaries(&sent), [(5000, ACK | PSH, pair.seq, &b"answer"[..])], "its only copy is in the ring");
    pair.put(&wire, ACK, b"ask");
    assert_eq!(wire.poll_once(), []);
    assert!(pair.is_deferred(&wire));
    assert_eq!(wire.poll_once(), []);
    assert!(!pair.is_deferred(&wire));
    let (sent, _) = wire.pass(2 * DELAY);
    assert_eq!(summaries(&sent), [(5000, ACK, pair.seq, &b""[..])]);
    assert_eq!(pair.stream.info().unwrap().send.unacked, 0);
    *completes.borrow_mut() = true;
    pair.answer(b"again");
    assert_eq!(summaries(&wire.poll()), [(5000, ACK | PSH, pair.seq, &b"again"[..])]);
}
