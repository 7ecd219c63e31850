//! The memory of an idle connection. `NETMEM_CONNECTIONS=100000` sets the number of connections.

use crate::common::addr;
use crate::common::peer::{ACK, PSH, SYN, Seg, Wire, frame_of};
use netmem_inet::stack::remote;
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, StackOptions, TcpListener, TcpStream};
use netmem_pool::Private;
use netmem_testing::heap::Counting;
use std::time::Duration;

#[global_allocator]
pub(crate) static HEAP: Counting = Counting::new();

/// The streams of the connections: of the stack's thread, or of any thread.
enum Streams {
    Own(TcpListener<Private>, Vec<TcpStream<Private>>),
    Remote(remote::TcpListener<Private>, Vec<remote::TcpStream<Private>>),
}

impl Streams {
    fn listen(wire: &mut Wire, is_remote: bool, number: usize) -> Self {
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
    fn accept(&mut self) {
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

/// Each connection has received and sent some segments, and is idle since. It holds no page, and
/// little memory: its lists were freed. The goal is a kibibyte (docs/design/streams.md); the bound
/// here is what is reached. A stream of any thread takes 2 KiB more at most.
#[test]
fn an_idle_connection_is_small() {
    let _alone = crate::alone();
    let number: u32 = std::env::var("NETMEM_CONNECTIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(4000);
    let (own, any) = (bytes_of_each(number, false), bytes_of_each(number, true));
    println!("of any thread: {any}, {} more", any - own);
    assert!(own <= 2400, "{own} bytes");
    assert!(any <= own + 2048, "{any} bytes, and {own} of the stack's thread");
}

/// The bytes of one of `number` idle connections.
fn bytes_of_each(number: u32, is_remote: bool) -> usize {
    let options = StackOptions { connections: number as usize, ..StackOptions::default() };
    let mut wire = Wire::new(options);
    let mut streams = Streams::listen(&mut wire, is_remote, number as usize);
    let mut run = |wire: &mut Wire, n: u32| {
        // Few stations, each with many ports: the entries of destinations and neighbours are not
        // the connection's.
        let from = [10, 0, 0, 20 + (n / 60_000) as u8];
        let peer = 1024 + (n % 60_000) as u16;
        let seg = |flags, seq, ack, payload: &[u8]| Seg {
            peer,
            port: 80,
            flags,
            seq,
            ack,
            window: u16::MAX,
            payload: payload.to_vec(),
        };
        let exchange = |wire: &mut Wire, seg: Seg| {
            wire.frame(frame_of(from, &seg));
            wire.poll().pop()
        };
        let ack = exchange(wire, seg(SYN, 1000, 0, b"")).unwrap().seq + 1;
        exchange(wire, seg(ACK, 1001, ack, b""));
        streams.accept();
        let mut bytes = vec![0; 100_000];
        for k in 0..10 {
            wire.frame(frame_of(from, &seg(ACK | PSH, 1001 + 1400 * k, ack, &[1; 1400])));
        }
        wire.poll();
        assert_eq!(streams.read(&mut bytes), 14_000);
        assert_eq!(streams.write(&[2; 14_000]), 14_000);
        let end = wire.poll().pop().unwrap().end();
        exchange(wire, seg(ACK, 15_001, end, b""));
        if end.wrapping_sub(ack) < 14_000 {
            let end = ack.wrapping_add(14_000);
            exchange(wire, seg(ACK, 15_001, end, b""));
        }
    };
    // What is allocated once: tables of timers, caches of routes.
    (0..100).for_each(|n| run(&mut wire, n));
    wire.pass(Duration::from_secs(10));
    let before = HEAP.bytes();
    (100..number).for_each(|n| run(&mut wire, n));
    wire.pass(Duration::from_secs(10));
    wire.pool.reclaim();
    let each = (HEAP.bytes() - before) / (number as usize - 100);
    println!("{each} bytes for each of {number} idle connections");
    assert_eq!((wire.stack.connections(), wire.stack.pages()), (number as usize, 0));
    assert_eq!(wire.pool.stats().inflight, 0);
    drop(streams);
    each
}
