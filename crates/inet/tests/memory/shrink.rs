//! The memory of a stack's tables after most of its connections have ended.

use crate::common::peer::{ACK, RST, SYN, Wire};
use crate::idle::{HEAP, Streams, segment};
use netmem_inet::StackOptions;
use std::ops::Range;
use std::time::Duration;

/// Bytes that 6,000 connections may leave in tables, after all but a hundred and the last one have
/// ended, and after that one, too.
const PINNED: usize = 700 << 10;
const LEFT: usize = 256 << 10;

/// Opens connection `n`.
fn open(wire: &mut Wire, streams: &mut Streams, n: u32) {
    let ack = segment(wire, n, SYN, 1000, 0, b"").unwrap().seq + 1;
    segment(wire, n, ACK, 1001, ack, b"");
    streams.accept();
}

/// Nearly all connections of a stack end: the tables have then the memory of a stack that never had
/// more than those that are left. A connection cannot change its place, so the last place of all
/// keeps its table's memory, and no other's, until that connection has ended, too.
#[test]
fn tables_shrink_when_most_connections_have_ended() {
    const FIRST: u32 = 100;
    const MOST: u32 = 6000;
    let _alone = crate::alone();
    let mut wire = Wire::new(StackOptions { connections: MOST as usize, ..StackOptions::default() });
    let mut streams = Streams::listen(&mut wire, false, MOST as usize);
    (0..FIRST).for_each(|n| open(&mut wire, &mut streams, n));
    wire.pass(Duration::from_secs(10));
    wire.pool.reclaim();
    let few = HEAP.bytes();
    for _ in 0..2 {
        (FIRST..MOST).for_each(|n| open(&mut wire, &mut streams, n));
        wire.pass(Duration::from_secs(10));
        let many = HEAP.bytes() - few;
        end(&mut wire, &mut streams, FIRST..MOST - 1);
        let pinned = HEAP.bytes().saturating_sub(few);
        end(&mut wire, &mut streams, MOST - 1..MOST);
        let left = HEAP.bytes().saturating_sub(few);
        println!("{many} bytes more, {pinned} with the last place, {left} without");
        assert!(pinned < PINNED && left < LEFT, "{pinned} and {left} bytes of {many}");
    }
}

/// The peers reset these connections, whose streams are dropped.
fn end(wire: &mut Wire, streams: &mut Streams, which: Range<u32>) {
    let before = wire.stack.connections();
    which.clone().for_each(|n| _ = segment(wire, n, RST, 1001, 0, b""));
    let Streams::Own(_, own) = streams else { unreachable!("they are of the stack's thread") };
    own.retain(|stream| stream.is_connected() == Ok(true));
    wire.pass(Duration::from_secs(10));
    wire.pool.reclaim();
    assert_eq!((wire.stack.connections(), own.len()), (before - which.len(), before - which.len()));
}
