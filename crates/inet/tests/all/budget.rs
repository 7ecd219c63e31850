//! The pages of its receive queue that a stack holds, besides the payload of its connections.

use crate::common::{Cable, Link, MemRx, MemTx, addr, connected, fragments, host, pair, stack};
use netmem_inet::tcp::Config;
use netmem_inet::{Fragment, ListenOptions, SocketError, Stack, StackOptions, Time};
use std::time::Duration;

/// Proves INET-4: fragments of datagrams that never become complete count in the queue's budget,
/// and use a quarter of it at most. They are dropped when their time limit has passed, without
/// another frame.
#[test]
fn fragments_are_counted() {
    let mut link = Link::with(false, StackOptions { pages: 64, ..StackOptions::default() });
    let mut socket = link.far.sockets().bind(addr("10.0.0.2:9")).unwrap();
    let (mut client, mut server) = connected(&mut link);
    let out = |link: &mut Link| link.far.queues().0.pool.stats().inflight();
    for id in 0..30 {
        fragments(&mut link, id, 9, &[0; 4000], 1000);
        // The last fragment is missing.
        link.far.queues().0.cable.borrow_mut().pop_back();
        link.settle();
        assert!(link.far.pages() <= 16 && out(&mut link) <= 16, "{} {}", link.far.pages(), out(&mut link));
    }
    assert!(link.far.pages() >= 12);
    // The latest fragments are kept.
    fragments(&mut link, 100, 9, &[7; 4000], 1000);
    link.settle();
    let mut places: [Fragment<_>; 16] = Default::default();
    assert_eq!(socket.recv_from(&mut places).map(|received| received.len), Ok(4000));
    places.iter_mut().for_each(|place| *place = Fragment::default());
    assert_eq!(client.write(&[1; 5000]), Ok(5000));
    link.settle();
    let mut bytes = [0; 5000];
    assert_eq!(server.read(&mut bytes), Ok(5000));
    let end = link.now + Duration::from_millis(60_001);
    while link.far.pages() > 0 && link.step() {}
    assert_eq!((link.far.pages(), out(&mut link)), (0, 0));
    assert!(link.now <= end, "it has a timer of its own");
}

/// Proves INET-4: frames in the mailbox of another stack count in the budget of the queue that
/// received them. Above the budget, payload is dropped, and acknowledgements are processed.
#[test]
fn frames_for_another_stack_are_counted() {
    let (there, back) = (Cable::default(), Cable::default());
    let (queue0, queue1) = (Cable::default(), Cable::default());
    let mut near = stack(&host(1), pair(&back, &there, false), StackOptions::default());
    let both = host(2);
    let [mut first, mut second]: [Stack<MemRx, MemTx>; 2] = [(&queue0, 7), (&queue1, 512)].map(|(queue, pages)| {
        stack(&both, pair(queue, &back, false), StackOptions { pages, ..StackOptions::default() })
    });
    let mut now = Time::from_micros(1_000_000);
    let mut poll = |near: &mut Stack<_, _>, first: &mut Stack<_, _>, second: Option<&mut Stack<_, _>>| {
        now += Duration::from_millis(1);
        near.poll(now);
        queue0.borrow_mut().extend(there.borrow_mut().drain(..));
        first.poll(now);
        second.map(|second| second.poll(now));
    };
    let mut listener = second.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut client = near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    for _ in 0..10 {
        poll(&mut near, &mut first, Some(&mut second));
    }
    let mut server = listener.accept().unwrap();
    let sent: Vec<u8> = (0..14_000_u32).map(|n| n as u8).collect();
    // Five segments, then two or three, then more, which are merged.
    for part in [&sent[..7000], &sent[7000..11_200], &sent[11_200..]] {
        assert_eq!(client.write(part), Ok(part.len()));
        for _ in 0..3 {
            poll(&mut near, &mut first, None);
        }
    }
    assert_eq!((first.pages(), second.pages()), (7, 0));
    let inflight = first.queues().0.pool.stats().inflight();
    assert!(first.stats().over_budget > 0 && inflight == 7, "{inflight}");
    // A reset has no payload.
    client.abort();
    poll(&mut near, &mut first, None);
    assert_eq!(first.pages(), 8);
    for _ in 0..10 {
        poll(&mut near, &mut first, Some(&mut second));
    }
    assert_eq!(first.pages(), 0);
    let mut bytes = [0; 14_000];
    let mut read = 0;
    let end = loop {
        match server.read(&mut bytes[read..]) {
            Ok(n) => read += n,
            Err(error) => break error,
        }
    };
    assert!(read > 1000 && bytes[..read] == sent[..read] && matches!(end, SocketError::Closed(_)), "{read} {end:?}");
}

/// Proves INET-4: while the queue is short of buffers, payload is dropped and headers are
/// processed: acknowledgements, the end of a stream, and resets. Afterwards the payload is sent
/// again.
#[test]
fn headers_get_in_when_the_queue_is_short_of_buffers() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    let mut socket = link.far.sockets().bind(addr("10.0.0.2:9")).unwrap();
    let mut datagrams = link.near.sockets().bind(addr("10.0.0.1:9")).unwrap();
    link.far.queues().0.short = true;
    assert_eq!(server.write(&[1; 1000]), Ok(1000));
    assert_eq!(client.write(&[2; 30_000]), Ok(30_000));
    datagrams.send_to(b"datagram", addr("10.0.0.2:9")).unwrap();
    fragments(&mut link, 1, 9, &[0; 4000], 1000);
    link.settle();
    let stats = link.far.stats();
    assert!(stats.short > 2, "{stats:?}");
    assert_eq!(server.info().map(|info| info.send.unacked), Some(0), "its data was acknowledged");
    assert_eq!((server.readable(), link.far.pages(), link.far.queues().0.pool.stats().inflight()), (0, 0, 0));
    let mut places: [Fragment<_>; 1] = Default::default();
    assert_eq!(socket.recv_from(&mut places).err(), Some(SocketError::WouldBlock));
    link.far.queues().0.short = false;
    link.pass(Duration::from_secs(10));
    let mut bytes = vec![0; 30_000];
    let mut read = 0;
    while read < bytes.len() {
        read += server.read(&mut bytes[read..]).unwrap_or(0);
        assert!(link.step() || read == bytes.len());
    }
    assert!(bytes == [2; 30_000]);
    link.far.queues().0.short = true;
    client.shutdown();
    link.settle();
    assert_eq!(server.read(&mut bytes), Ok(0), "the end has no payload");
}
