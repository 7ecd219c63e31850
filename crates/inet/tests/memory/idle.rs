//! The memory of an idle connection. `NETMEM_CONNECTIONS=100000` sets the number of connections.

use crate::common::addr;
use crate::common::peer::{ACK, PSH, SYN, Seg, Wire, frame_of};
use netmem_inet::stack::remote;
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, SocketError, StackOptions, TcpListener, TcpStream};
use netmem_pool::Private;
use netmem_testing::heap::Counting;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

#[global_allocator]
pub(crate) static HEAP: Counting = Counting::new();

/// The streams of the connections: of the stack's thread, or of any thread.
pub(crate) enum Streams {
    Own(TcpListener<Private>, Vec<TcpStream<Private>>),
    Remote(remote::TcpListener<Private>, Vec<remote::TcpStream<Private>>),
}

impl Streams {
    pub(crate) fn listen(wire: &mut Wire, is_remote: bool, number: usize) -> Self {
        let listening = ListenOptions { connection: Config::default(), ..ListenOptions::default() };
        if !is_remote {
            let listener = wire.stack.sockets().listen(addr("0.0.0.0:80"), listening).unwrap();
            return Self::Own(listener, Vec::with_capacity(number));
        }
        let listener = wire.stack.remote().listen(addr("0.0.0.0:80"), listening);
        wire.poll();
        Self::Remote(listener, Vec::with_capacity(number))
    }

    /// Accepts the next connection. Its stream is the last one.
    pub(crate) fn accept(&mut self) {
        match self {
            Self::Own(listener, streams) => streams.push(listener.accept().unwrap()),
            Self::Remote(listener, streams) => streams.push(listener.accept().unwrap()),
        }
    }

    fn read(&mut self, into: &mut [u8]) -> usize {
        match self {
            Self::Own(_, streams) => streams.last_mut().unwrap().read(into).unwrap(),
            Self::Remote(_, streams) => streams.last_mut().unwrap().read(into).unwrap(),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> usize {
        match self {
            Self::Own(_, streams) => streams.last_mut().unwrap().write(bytes).unwrap(),
            Self::Remote(_, streams) => streams.last_mut().unwrap().write(bytes).unwrap(),
        }
    }
}

/// A connection takes so many bytes at most, with its entries in all tables
/// (docs/design/streams.md).
const MOST: usize = 1024;

/// Each connection has received and sent some segments, and is idle since. It holds no page, and
/// little memory. A stream of any thread takes 2 KiB more at most. The number of connections fills
/// the hash tables neither as much as possible nor as little.
#[test]
fn an_idle_connection_is_small() {
    let _alone = crate::alone();
    let number: u32 = std::env::var("NETMEM_CONNECTIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(5500);
    let (own, any) = (bytes_of_each(number, false), bytes_of_each(number, true));
    println!("of any thread: {any}, {} more", any.saturating_sub(own));
    assert!(own <= MOST, "{own} bytes");
    assert!(any <= own + 2048, "{any} bytes, and {own} of the stack's thread");
}

/// Connections that are looked at stay as they are. A segment wakes its connection, which continues
/// and shrinks again, also after it has lost segments.
#[test]
fn connections_that_were_woken_shrink_again() {
    const NUMBER: u32 = 200;
    let _alone = crate::alone();
    let mut wire = Wire::new(StackOptions { connections: NUMBER as usize, ..StackOptions::default() });
    let mut streams = Streams::listen(&mut wire, false, NUMBER as usize);
    let sent: Vec<u32> = (0..NUMBER).map(|n| exchange_and_idle(&mut wire, &mut streams, n)).collect();
    wire.pass(Duration::from_secs(10));
    let Streams::Own(_, streams) = &mut streams else { unreachable!("they are of the stack's thread") };
    wire.pool.reclaim();
    let calls = Arc::<Calls>::default();
    let waker = Waker::from(calls.clone());
    let idle = HEAP.bytes();
    let seen = |wire: &mut Wire, streams: &mut [TcpStream<Private>]| {
        for stream in &mut *streams {
            let cx = &mut Context::from_waker(&waker);
            assert!(stream.poll_read(cx, &mut [0; 10]).is_pending());
            assert_eq!(stream.recv_chunk(|_| true).err(), Some(SocketError::WouldBlock));
            assert_eq!((stream.is_connected(), stream.readable(), stream.urgent()), (Ok(true), 0, None));
            assert!(stream.room() > 0 && stream.budget().is_some() && !stream.is_loopback());
        }
        let list: u32 = wire.stack.list_connections().iter().map(|seen| seen.tcp.send.acknowledged).sum();
        let each: u32 = streams.iter().map(|stream| stream.info().unwrap().send.acknowledged).sum();
        assert_eq!((list, each), (NUMBER * 14_000, NUMBER * 14_000));
    };
    seen(&mut wire, streams);
    assert_eq!(HEAP.bytes(), idle, "they were only looked at");
    wire.poll();
    assert_eq!(HEAP.bytes(), idle, "they were only looked at");
    // Each answers a request. The first segment of every second answer is lost at first.
    for (n, stream) in (0..).zip(streams.iter_mut()) {
        let ack = sent[n as usize];
        segment(&mut wire, n, ACK | PSH, 15_001, ack, &[3; 700]);
        assert_eq!(calls.0.load(Ordering::Relaxed), n + 1, "the reader is woken");
        let mut bytes = [0; 1000];
        assert_eq!((stream.read(&mut bytes), stream.write(&[4; 5000])), (Ok(700), Ok(5000)));
        wire.poll();
        if n % 2 == 0 {
            wire.pass(Duration::from_secs(2));
        }
        segment(&mut wire, n, ACK, 15_701, ack + 5000, b"");
    }
    assert!(HEAP.bytes() > idle + 1024, "the one that was woken last is larger");
    wire.pass(Duration::from_secs(10));
    wire.pool.reclaim();
    let lost = streams.iter().filter(|stream| stream.info().unwrap().send.retransmitted > 0).count();
    assert_eq!((lost, wire.stack.pages(), wire.pool.stats().inflight), (NUMBER as usize / 2, 0, 0));
    let more = HEAP.bytes().saturating_sub(idle);
    assert!(more <= lost * 384, "{more} bytes more, and {lost} connections lost segments");
}

/// The answer to a probe waits for a full ring when the connection has been idle for a second.
#[test]
fn a_connection_that_cannot_shrink_at_first_shrinks_later() {
    let _alone = crate::alone();
    let mut wire = Wire::new(StackOptions::default());
    let mut streams = Streams::listen(&mut wire, false, 1);
    let ack = exchange_and_idle(&mut wire, &mut streams, 0);
    wire.pass(Duration::from_secs(10));
    wire.pool.reclaim();
    let idle = HEAP.bytes();
    let completes = {
        let (_, tx) = wire.stack.queues();
        tx.size = 1;
        tx.completes.clone()
    };
    *completes.borrow_mut() = false;
    assert!(segment(&mut wire, 0, ACK, 15_000, ack, b"").is_some());
    wire.pass(Duration::from_secs(2));
    assert!(segment(&mut wire, 0, ACK, 15_000, ack, b"").is_none(), "the ring is full");
    wire.pass(Duration::from_secs(2));
    assert!(HEAP.bytes() > idle + 1024, "the answer is under way");
    *completes.borrow_mut() = true;
    assert_eq!(wire.pass(Duration::from_secs(3)).0.len(), 1);
    wire.pool.reclaim();
    assert!(HEAP.bytes() <= idle + 384, "{} bytes, and {idle} before", HEAP.bytes());
}

/// The number of calls of a waker.
#[derive(Default)]
struct Calls(AtomicU32);

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The bytes of one of `number` idle connections.
fn bytes_of_each(number: u32, is_remote: bool) -> usize {
    let options = StackOptions { connections: number as usize, ..StackOptions::default() };
    let mut wire = Wire::new(options);
    let mut streams = Streams::listen(&mut wire, is_remote, number as usize);
    // What is allocated once: tables of timers, caches of routes.
    (0..100).for_each(|n| _ = exchange_and_idle(&mut wire, &mut streams, n));
    wire.pass(Duration::from_secs(10));
    let before = HEAP.bytes();
    (100..number).for_each(|n| _ = exchange_and_idle(&mut wire, &mut streams, n));
    wire.pass(Duration::from_secs(10));
    wire.pool.reclaim();
    let each = (HEAP.bytes() - before) / (number as usize - 100);
    println!("{each} bytes for each of {number} idle connections");
    assert_eq!((wire.stack.connections(), wire.stack.pages()), (number as usize, 0));
    assert_eq!(wire.pool.stats().inflight, 0);
    drop(streams);
    each
}

/// Passes a segment of peer `n` to the stack, and returns the last one that the stack sends then.
pub(crate) fn segment(wire: &mut Wire, n: u32, flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Option<Seg> {
    wire.frame(frame(n, flags, seq, ack, payload));
    wire.poll().pop()
}

/// A segment of peer `n`. Few stations have many ports: the entries of destinations and neighbours
/// are not the connection's.
fn frame(n: u32, flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Vec<u8> {
    let from = [10, 0, 0, 20 + (n / 60_000) as u8];
    let (peer, payload) = (1024 + (n % 60_000) as u16, payload.to_vec());
    frame_of(from, &Seg { peer, port: 80, flags, seq, ack, window: u16::MAX, payload })
}

/// Opens connection `n`, which receives 14,000 bytes, and sends as many. Returns the number after
/// the last byte that it has sent.
fn exchange_and_idle(wire: &mut Wire, streams: &mut Streams, n: u32) -> u32 {
    let ack = segment(wire, n, SYN, 1000, 0, b"").unwrap().seq + 1;
    segment(wire, n, ACK, 1001, ack, b"");
    streams.accept();
    let mut bytes = vec![0; 100_000];
    for k in 0..10 {
        wire.frame(frame(n, ACK | PSH, 1001 + 1400 * k, ack, &[1; 1400]));
    }
    wire.poll();
    assert_eq!(streams.read(&mut bytes), 14_000);
    assert_eq!(streams.write(&[2; 14_000]), 14_000);
    let end = wire.poll().pop().unwrap().end();
    segment(wire, n, ACK, 15_001, end, b"");
    if end.wrapping_sub(ack) < 14_000 {
        segment(wire, n, ACK, 15_001, ack.wrapping_add(14_000), b"");
    }
    ack.wrapping_add(14_000)
}
