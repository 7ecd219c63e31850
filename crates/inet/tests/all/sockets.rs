//! The calls of sockets: addresses and ports, options, counters, and the orderly end.

use crate::common::{Link, addr, connected};
use netmem_inet::tcp::{Config, State};
use netmem_inet::{ListenOptions, SocketError};
use std::cell::RefCell;
use std::time::Duration;

#[test]
fn scopes_flow_labels_and_mapped_addresses_do_not_count() {
    let mut link = Link::new(false);
    let mut listener = link.far.sockets().listen(addr("[fd00::2%7]:80"), ListenOptions::default()).unwrap();
    let v4 = link.far.sockets().listen(addr("[::ffff:10.0.0.2]:80"), ListenOptions::default()).unwrap();
    let client = link.near.sockets().connect(addr("[fd00::2%3]:80"), &Config::default()).unwrap();
    let mapped = link.near.sockets().connect(addr("[::ffff:10.0.0.2]:80"), &Config::default()).unwrap();
    link.settle();
    assert_eq!((client.is_connected(), mapped.is_connected()), (Ok(true), Ok(true)));
    assert_eq!((listener.local_addr(), v4.local_addr()), (addr("[fd00::2]:80"), addr("10.0.0.2:80")));
    assert_eq!(listener.accept().unwrap().peer_addr(), client.local_addr());
    let mut socket = link.far.sockets().bind(addr("[fd00::2%9]:9")).unwrap();
    let mut from = link.near.sockets().bind(addr("[fd00::1%1]:0")).unwrap();
    from.send_to(b"x", addr("[fd00::2%5]:9")).unwrap();
    link.settle();
    assert!(socket.recv_from(&mut [netmem_inet::Fragment::default()]).is_ok());
}

#[test]
fn port_0_is_any_port_and_ipv6_can_be_alone() {
    let mut link = Link::new(false);
    let sockets = link.far.sockets();
    let any: Vec<_> =
        (0..10).map(|_| sockets.listen(addr("0.0.0.0:0"), ListenOptions::default()).unwrap().local_addr()).collect();
    assert!(any.iter().all(|local| local.port() >= 1024));
    let listener = sockets.listen(addr("10.0.0.2:0"), ListenOptions::default()).unwrap();
    let client = link.near.sockets().connect(listener.local_addr(), &Config::default()).unwrap();
    let v6_only = ListenOptions { v6_only: true, ..ListenOptions::default() };
    let mut six = sockets.listen(addr("[::]:80"), v6_only).unwrap();
    let refused = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    let _client = link.near.sockets().connect(addr("[fd00::2]:80"), &Config::default()).unwrap();
    link.settle();
    assert_eq!(client.is_connected(), Ok(true));
    assert!(refused.is_connected().is_err() && six.accept().is_ok());
    // Another socket of the stack has the same port for IPv4.
    let mut four = sockets.listen(addr("0.0.0.0:80"), ListenOptions::default()).unwrap();
    let clients =
        ["10.0.0.2:80", "[fd00::2]:80"].map(|to| link.near.sockets().connect(addr(to), &Config::default()).unwrap());
    link.settle();
    assert_eq!(four.accept().unwrap().peer_addr(), clients[0].local_addr());
    assert_eq!(six.accept().unwrap().peer_addr(), clients[1].local_addr());
    assert_eq!(sockets.listen(addr("[::]:80"), v6_only).unwrap_err(), SocketError::InUse);
    drop(six);
    assert!(sockets.listen(addr("[::]:80"), v6_only).is_ok());
}

#[test]
fn a_connection_is_opened_from_an_address_of_the_users_choice() {
    let mut link = Link::new(false);
    let mut listener = link.far.sockets().listen(addr("0.0.0.0:80"), ListenOptions::default()).unwrap();
    let sockets = link.near.sockets();
    let open = |local: &str, remote: &str| sockets.connect_from(addr(local), addr(remote), &Config::default());
    let named = open("10.0.0.1:4000", "10.0.0.2:80").unwrap();
    assert_eq!(open("10.0.0.1:4000", "10.0.0.2:80").unwrap_err(), SocketError::InUse);
    assert_eq!(open("10.0.0.9:4000", "10.0.0.2:80").unwrap_err(), SocketError::NotOurs);
    assert_eq!(open("[fd00::1]:4000", "10.0.0.2:80").unwrap_err(), SocketError::NoRoute);
    let unspecified = open("0.0.0.0:4001", "10.0.0.2:80").unwrap();
    let any_port = open("10.0.0.1:0", "10.0.0.2:80").unwrap();
    link.settle();
    assert_eq!(named.local_addr(), addr("10.0.0.1:4000"));
    assert_eq!(unspecified.local_addr(), addr("10.0.0.1:4001"));
    for stream in [named, unspecified, any_port] {
        assert_eq!(stream.is_connected(), Ok(true));
        assert_eq!(listener.accept().unwrap().peer_addr(), stream.local_addr());
    }
    let stats = listener.stats().unwrap();
    assert_eq!((stats.accepted, stats.waiting, stats.half_open, stats.overflows, stats.cookies), (3, 0, 0, 0, 0));
    drop(link);
    assert_eq!(listener.stats(), None);
}

#[test]
fn the_reading_side_urgent_data_and_low_water() {
    let mut link = Link::new(false);
    let (mut client, mut server) = connected(&mut link);
    client.write(b"urgent").unwrap();
    client.mark_urgent();
    client.write(b" and not").unwrap();
    link.settle();
    assert_eq!(server.urgent(), Some(6));
    server.shutdown_read();
    let mut bytes = [0; 100];
    assert_eq!((server.read(&mut bytes), server.read(&mut bytes)), (Ok(14), Ok(0)));
    client.set_low_water(1);
    client.set_quick_ack(true);
    client.write(b"x").unwrap();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(client.poll_writable(&mut cx).is_pending(), "a byte is unsent");
    link.settle();
    assert!(client.poll_writable(&mut cx).is_ready());
}

/// What was written is sent, then FIN. A program that leaves its loop would send neither.
#[test]
fn a_stack_that_finishes_ends_its_connections() {
    let mut link = Link::new(false);
    let (mut client, mut server) = connected(&mut link);
    server.write(&[1; 5000]).unwrap();
    drop(server);
    let mut kept = {
        let mut listener = link.far.sockets().listen(addr("10.0.0.2:81"), ListenOptions::default()).unwrap();
        let _other = link.near.sockets().connect(addr("10.0.0.2:81"), &Config::default()).unwrap();
        link.settle();
        listener.accept().unwrap()
    };
    kept.write(b"and this").unwrap();
    let Link { near, mut far, now, .. } = link;
    // The clock of the far stack drives the near one, which stands for the other host.
    let near = RefCell::new((near, now));
    let clock = || {
        let (near, now) = &mut *near.borrow_mut();
        *now += Duration::from_millis(1);
        near.poll(*now);
        *now
    };
    assert_eq!(far.finish(now + Duration::from_secs(10), clock).unwrap(), 0);
    assert!(far.is_closed());
    let mut bytes = vec![0; 10_000];
    assert_eq!((client.read(&mut bytes), client.read(&mut bytes)), (Ok(5000), Ok(0)));
    drop((kept, near));
}

/// A task that accepts is not forgotten.
#[test]
fn a_listener_of_a_closed_stack_says_so() {
    let link = Link::new(false);
    let Link { mut far, .. } = link;
    let mut listener = far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(listener.poll_accept(&mut cx).is_pending());
    far.close();
    assert!(matches!(listener.poll_accept(&mut cx), std::task::Poll::Ready(Err(SocketError::StackGone))));
}

/// A peer that does not answer does not hold up the end for longer than the deadline: it is sent a
/// reset.
#[test]
fn a_stack_that_cannot_finish_resets() {
    let mut link = Link::new(false);
    let (client, mut server) = connected(&mut link);
    server.write(b"x").unwrap();
    let Link { mut near, mut far, now, .. } = link;
    let time = RefCell::new(now);
    let clock = || {
        *time.borrow_mut() += Duration::from_millis(100);
        *time.borrow()
    };
    assert_eq!(far.finish(now + Duration::from_secs(2), clock).unwrap(), 1);
    near.poll(*time.borrow());
    assert!(client.is_connected().is_err());
    drop(server);
}

/// What was acknowledged, received and sent again is counted from the beginning of the connection,
/// without SYN and FIN.
#[test]
fn connections_are_listed() {
    let mut link = Link::new(false);
    let (mut client, server) = connected(&mut link);
    let _refused = link.near.sockets().connect(addr("10.0.0.2:81"), &Config::default()).unwrap();
    link.settle();
    let near = link.near.list_connections();
    let states: Vec<_> = near.iter().map(|one| (one.peer.port(), one.state)).collect();
    assert_eq!(states, [(80, State::Established), (81, State::Closed)]);
    assert_eq!((near[0].local, near[0].peer), (client.local_addr(), client.peer_addr()));
    assert!(
        near.iter().all(|one| (one.tcp.send.acknowledged, one.tcp.received, one.written_pages) == (0, 0, 0)),
        "{near:?}"
    );

    assert_eq!(client.write(&[1; 5000]), Ok(5000));
    link.near.poll(link.now);
    let one = link.near.list_connections()[0];
    assert_eq!((one.tcp.send.acknowledged, one.tcp.send.retransmitted), (0, 0));
    assert!(one.written_pages > 0, "{one:?}");
    // The far stack does not run, so a timer sends the last segment again.
    while link.near.list_connections()[0].tcp.send.retransmitted == 0 {
        link.now = link.now.max(link.near.poll_timeout().unwrap());
        link.near.poll(link.now);
    }
    link.settle();
    let (one, other) = (link.near.list_connections()[0], link.far.list_connections()[0]);
    assert_eq!((one.tcp.send.acknowledged, one.tcp.received, one.tcp.send.retransmitted), (5000, 0, 1));
    assert_eq!((other.tcp.send.acknowledged, other.tcp.received, other.local), (0, 5000, one.peer));
    assert_eq!((other.tcp.readable, one.written_pages), (5000, 0));

    client.shutdown();
    link.settle();
    let (one, other) = (link.near.list_connections()[0], link.far.list_connections()[0]);
    assert_eq!((one.state, other.state), (State::FinWait2, State::CloseWait));
    assert_eq!((one.tcp.send.acknowledged, other.tcp.received), (5000, 5000));
    // What is in flight at a reset is not acknowledged.
    let mut server = server;
    assert_eq!(server.write(&[2; 700]), Ok(700));
    link.far.poll(link.now);
    server.reset();
    link.settle();
    let other = link.far.list_connections()[0];
    assert_eq!((other.id, other.state, other.tcp.send.acknowledged), (1, State::Closed, 0));
    assert_eq!(other.tcp.received, 5000);
    drop((client, server));
    link.settle();
    assert!(link.far.list_connections().is_empty());
}
