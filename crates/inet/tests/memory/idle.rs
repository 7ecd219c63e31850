//! The memory of an idle connection. `NETMEM_CONNECTIONS=100000` sets the number of connections.

use crate::common::addr;
use crate::common::peer::{ACK, PSH, SYN, Seg, Wire, frame_of};
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, StackOptions};
use netmem_testing::heap::Counting;
use std::time::Duration;

#[global_allocator]
static HEAP: Counting = Counting::new();

/// Each connection has received and sent some segments, and is idle since. It holds no page, and
/// little memory: its lists were freed. The goal is a kibibyte (docs/design/streams.md); the bound
/// here is what is reached.
#[test]
fn an_idle_connection_is_small() {
    let _alone = crate::alone();
    let number: u32 = std::env::var("NETMEM_CONNECTIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(4000);
    let options = StackOptions { connections: number as usize, ..StackOptions::default() };
    let mut wire = Wire::new(options);
    let listening = ListenOptions { connection: Config::default(), ..ListenOptions::default() };
    let mut listener = wire.stack.sockets().listen(addr("0.0.0.0:80"), listening).unwrap();
    let mut streams = Vec::with_capacity(number as usize);
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
        let mut stream = listener.accept().unwrap();
        let mut bytes = vec![0; 100_000];
        for k in 0..10 {
            wire.frame(frame_of(from, &seg(ACK | PSH, 1001 + 1400 * k, ack, &[1; 1400])));
        }
        wire.poll();
        assert_eq!(stream.read(&mut bytes), Ok(14_000));
        assert_eq!(stream.write(&[2; 14_000]), Ok(14_000));
        let end = wire.poll().pop().unwrap().end();
        exchange(wire, seg(ACK, 15_001, end, b""));
        if end.wrapping_sub(ack) < 14_000 {
            let end = ack.wrapping_add(14_000);
            exchange(wire, seg(ACK, 15_001, end, b""));
        }
        streams.push(stream);
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
    assert!(each <= 2400, "{each} bytes");
}
