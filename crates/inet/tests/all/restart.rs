//! Connections that are restored in another host, which stands for another process, and what a
//! stack leaves when it ends.

use crate::common::{Cable, Link, MemRx, MemTx, addr, connected, host, pair, pool, stack};
use netmem_inet::tcp::Config;
use netmem_inet::{Host, ListenOptions, SavedStream, SocketError, Stack, StackOptions};
use netmem_pool::Private;
use std::time::Duration;

/// Replaces the far host by a new one. If `saved` is given, the new host expects this stream.
fn another_process(link: &mut Link, saved: Option<&SavedStream>) -> Host<Private> {
    let (rx, tx) = link.far.queues();
    let queues = pair(&rx.cable.clone(), &tx.cable.clone(), true);
    let other = host(2);
    saved.inspect(|saved| other.expect(saved));
    link.far = Stack::new(&other, queues.0, queues.1, pool(), StackOptions::default(), link.now).unwrap();
    other
}

/// Payload that the user sent before it closed arrives although the process ends afterwards. No
/// segment is answered by a reset before the connection is restored.
#[test]
fn a_connection_that_was_closed_goes_on_in_another_process() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    let sent: Vec<u8> = (0..300_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    assert_eq!(server.write(&sent), Ok(sent.len()));
    drop(server);
    link.settle();
    let mut saved = link.far.sockets().save_closing();
    let saved = saved.pop().unwrap();
    assert!(saved.payload() > 100_000, "the window was full: {}", saved.payload());
    let text = serde_json::to_string(&saved).unwrap();
    let other = another_process(&mut link, Some(&saved));
    let mut received = vec![0; sent.len() + 1];
    let mut at = client.read(&mut received).unwrap();
    link.pass(Duration::from_secs(1));
    assert_eq!((link.far.stats().resets, other.connections()), (0, 1), "it is expected");
    let saved: SavedStream = serde_json::from_str(&text).unwrap();
    drop(link.far.sockets().restore(&saved, &Config::default()).unwrap());
    for _ in 0..200 {
        link.settle();
        match client.read(&mut received[at..]) {
            Ok(0) => break,
            Ok(n) => at += n,
            Err(error) => assert_eq!(error, SocketError::WouldBlock),
        }
        link.step();
    }
    assert!(received[..at] == sent[..], "{at}");
    drop(client);
    link.pass(Duration::from_secs(100));
    assert_eq!((link.far.connections(), other.connections()), (0, 0));
}

/// If an expected stream is given up, no stack has it: its segments are answered by a reset.
#[test]
fn a_connection_that_is_given_up_is_reset() {
    let mut link = Link::new(true);
    let (mut client, server) = connected(&mut link);
    let saved = server.save().unwrap();
    let other = another_process(&mut link, Some(&saved));
    other.give_up(&saved);
    client.write(b"x").unwrap();
    // The first reset is not queued, and the next hop is not known yet.
    link.pass(Duration::from_secs(3));
    assert!(client.is_connected().is_err());
}

/// Addresses that are not this host's, or that are of two families, make no connection.
#[test]
fn addresses_of_a_saved_stream_are_checked() {
    let mut link = Link::new(true);
    let (_client, server) = connected(&mut link);
    let value = serde_json::to_value(server.save().unwrap()).unwrap();
    another_process(&mut link, None);
    let restore = |local: &str, remote: &str| {
        let mut value = value.clone();
        (value["local"], value["remote"]) = (local.into(), remote.into());
        let saved = serde_json::from_value(value).unwrap();
        link.far.sockets().restore(&saved, &Config::default()).map(drop)
    };
    for (local, remote) in [
        ("10.0.0.3:80", "10.0.0.1:5000"),
        ("0.0.0.0:80", "10.0.0.1:5000"),
        ("[::]:80", "[fd00::1]:5000"),
        ("10.0.0.2:80", "[fd00::1]:5000"),
        ("[fd00::2]:80", "10.0.0.1:5000"),
    ] {
        assert_eq!(restore(local, remote), Err(SocketError::NotOurs), "{local} {remote}");
    }
    assert_eq!(restore("10.0.0.2:80", "192.0.2.1:5000"), Err(SocketError::NoRoute));
    assert_eq!(restore("10.0.0.2:80", "10.0.0.1:5000"), Ok(()));
}

/// The page of a frame in the mailbox of a stack that ends is returned: it belongs to another
/// queue's pool.
#[test]
fn a_stack_that_ends_leaves_no_frames_in_its_mailbox() {
    let (there, back) = (Cable::default(), Cable::default());
    let (queue0, queue1) = (Cable::default(), Cable::default());
    let mut near = stack(&host(1), pair(&back, &there, true), StackOptions::default());
    let both = host(2);
    let [mut first, mut second]: [Stack<MemRx, MemTx>; 2] =
        [&queue0, &queue1].map(|queue| stack(&both, pair(queue, &back, true), StackOptions::default()));
    let mut listener = second.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut client = near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    let mut now = netmem_inet::Time::from_micros(1_000_000);
    let mut poll = |near: &mut Stack<_, _>, first: &mut Stack<_, _>, second: Option<&mut Stack<_, _>>| {
        now += Duration::from_millis(1);
        near.poll(now);
        queue0.borrow_mut().extend(there.borrow_mut().drain(..));
        first.poll(now);
        second.map(|second| second.poll(now));
    };
    for _ in 0..10 {
        poll(&mut near, &mut first, Some(&mut second));
    }
    let server = listener.accept().unwrap();
    client.write(b"one").unwrap();
    for _ in 0..3 {
        poll(&mut near, &mut first, None);
    }
    let out = |stack: &mut Stack<MemRx, MemTx>| stack.queues().0.pool.stats().inflight();
    assert!(out(&mut first) > 0, "it waits in the mailbox");
    drop(second);
    assert_eq!(out(&mut first), 0);
    assert!(server.is_connected().is_err());
}
