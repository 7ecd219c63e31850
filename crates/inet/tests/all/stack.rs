//! Stacks over queue pairs in memory.

use crate::common::{Cable, Link, addr, host, pair, stack};
use netmem_inet::tcp::{self, Config};
use netmem_inet::{Fragment, ListenOptions, SocketError, Stack, StackOptions, Time};
use netmem_packet::{Armed, PollThenSleep, Turn, Wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::RefCell;
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// Sends bytes in both directions, over both IP versions, with and without offloads. Then both
/// sides close, and nothing is left.
#[test]
fn two_stacks_exchange_bytes_and_nothing_is_left() {
    for (to, offloads) in
        [("10.0.0.2:80", false), ("[fd00::2]:80", false), ("10.0.0.2:80", true), ("[fd00::2]:80", true)]
    {
        let mut link = Link::new(offloads);
        let mut listener = link.far.sockets().listen(addr("0.0.0.0:80"), ListenOptions::default()).unwrap();
        let mut client = link.near.sockets().connect(addr(to), &Config::default()).unwrap();
        assert_eq!(client.is_connected(), Ok(false));
        link.settle();
        assert_eq!(client.is_connected(), Ok(true), "{to} {:?} {:?}", link.near.stats(), link.far.stats());
        let mut server = listener.accept().unwrap();
        assert_eq!(listener.accept().unwrap_err(), SocketError::WouldBlock);
        assert_eq!((server.peer_addr(), server.local_addr()), (client.local_addr(), client.peer_addr()));

        let sent: Vec<u8> = (0..300_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
        for turn in 0..2 {
            let (from, into) = if turn == 0 { (&mut client, &mut server) } else { (&mut server, &mut client) };
            let (mut at, mut received) = (0, Vec::new());
            while received.len() < sent.len() {
                match from.write(&sent[at..]) {
                    Ok(n) => at += n,
                    Err(error) => assert_eq!(error, SocketError::WouldBlock),
                }
                link.settle();
                let mut places: [Fragment<_>; 16] = Default::default();
                match into.recv(&mut places) {
                    Ok(n) => received.extend(places[..n].iter().flat_map(|f| f.to_vec())),
                    Err(error) => {
                        assert_eq!(error, SocketError::WouldBlock);
                        assert!(link.step());
                    }
                }
            }
            assert!(received == sent, "every byte is right");
        }
        let stats = link.far.stats();
        // The checksum of ICMPv6, by which neighbours are found, is always computed.
        assert_eq!(stats.checksummed_received > 4, !offloads, "{stats:?}");
        assert_eq!((stats.copied_received, stats.wrong_checksum), (0, 0), "fragments are not copied: {stats:?}");

        client.shutdown();
        link.settle();
        let mut byte = [0];
        assert_eq!(server.read(&mut byte), Ok(0));
        drop(server);
        link.settle();
        assert_eq!(client.read(&mut byte), Ok(0));
        drop(client);
        link.pass(Duration::from_secs(61));
        assert_eq!((link.near.connections(), link.far.connections()), (0, 0));
        assert_eq!((link.near.pages(), link.far.pages()), (0, 0));
    }
}

#[test]
fn a_port_without_listener_refuses() {
    let mut link = Link::new(true);
    let mut client = link.near.sockets().connect(addr("10.0.0.2:81"), &Config::default()).unwrap();
    link.settle();
    assert_eq!(client.is_connected(), Err(SocketError::Closed(tcp::Error::Refused)));
    assert_eq!(client.read(&mut [0]), Err(SocketError::Closed(tcp::Error::Refused)));
    assert_eq!(link.far.stats().resets, 1);
}

/// Datagrams in both directions, and the answer for a port without a socket.
#[test]
fn datagrams_go_both_ways_and_a_closed_port_says_so() {
    for (here, there) in [("10.0.0.1:0", "10.0.0.2:53"), ("[fd00::1]:0", "[fd00::2]:53")] {
        let mut link = Link::new(false);
        let mut server = link.far.sockets().bind(addr("0.0.0.0:53")).unwrap();
        assert_eq!(link.far.sockets().bind(addr("0.0.0.0:53")).unwrap_err(), SocketError::InUse);
        let mut client = link.near.sockets().bind(addr(here)).unwrap();
        assert!(client.local_addr().port() >= 1024);
        let mut places: [Fragment<_>; 4] = Default::default();
        for len in [0, 1, 100, 1400] {
            let payload = vec![len as u8; len];
            client.send_to(&payload, addr(there)).unwrap();
            link.settle();
            let received = server.recv_from(&mut places).unwrap();
            assert_eq!((received.len, received.from, received.truncated), (len, client.local_addr(), false));
            let echo: Vec<u8> = places[..received.fragments].iter().flat_map(|f| f.to_vec()).collect();
            assert_eq!(echo, payload);
            // The fragment is sent by reference: the received page is also the page that is sent.
            match places[0].share() {
                Some(frag) if len > 0 => server.send_fragment_to(frag, received.from).unwrap(),
                _ => server.send_to(&[], received.from).unwrap(),
            }
            link.settle();
            assert_eq!(client.recv_from(&mut places).unwrap().len, len);
            assert_eq!(client.recv_from(&mut places), Err(SocketError::WouldBlock));
        }
        assert!(matches!(client.send_to(&[0; 65536], addr(there)), Err(SocketError::TooLong { .. })));
        drop(server);
        client.send_to(b"x", addr(there)).unwrap();
        link.settle();
        assert_eq!(client.recv_from(&mut places), Err(SocketError::WouldBlock), "it talks to others, too");
        assert_eq!(client.send(b"x"), Err(SocketError::NotConnected));
        client.connect(Some(addr(there))).unwrap();
        client.send(b"x").unwrap();
        link.settle();
        assert_eq!(client.recv_from(&mut places), Err(SocketError::Refused));
        assert_eq!(client.recv_from(&mut places), Err(SocketError::WouldBlock), "an error is reported once");
        places = Default::default();
        drop((client, places));
        assert_eq!((link.near.pages(), link.far.pages()), (0, 0));
    }
}

/// A socket whose user does not read holds at most its share of the pages.
#[test]
fn datagrams_that_are_not_read_stay_within_the_budget() {
    let mut link = Link::with(true, StackOptions { pages: 64, ..StackOptions::default() });
    let mut server = link.far.sockets().bind(addr("10.0.0.2:53")).unwrap();
    let mut client = link.near.sockets().bind(addr("10.0.0.1:0")).unwrap();
    for _ in 0..100 {
        client.send_to(b"x", addr("10.0.0.2:53")).unwrap();
        link.settle();
    }
    assert_eq!((link.far.pages(), link.far.stats().datagrams_dropped), (16, 84));
    let mut places: [Fragment<_>; 1] = Default::default();
    assert!((0..16).all(|_| server.recv_from(&mut places).is_ok()));
    assert_eq!((server.recv_from(&mut places), link.far.pages()), (Err(SocketError::WouldBlock), 1));
}

/// Packets to an address of this host are received by this host directly. The device sees none of
/// them.
#[test]
fn a_host_talks_to_itself() {
    let mut link = Link::new(false);
    let sockets = link.near.sockets();
    let mut listener = sockets.listen(addr("10.0.0.1:80"), ListenOptions::default()).unwrap();
    let mut client = sockets.connect(addr("10.0.0.1:80"), &Config::default()).unwrap();
    link.settle();
    let mut server = listener.accept().unwrap();
    let sent: Vec<u8> = (0..100_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    let (mut at, mut received) = (0, Vec::new());
    let mut bytes = [0; 10_000];
    while received.len() < sent.len() {
        at += client.write(&sent[at..]).unwrap_or(0);
        link.settle();
        match server.read(&mut bytes) {
            Ok(n) => received.extend_from_slice(&bytes[..n]),
            Err(_) => assert!(link.step()),
        }
    }
    assert!(received == sent);
    let mut datagrams = sockets.bind(addr("10.0.0.1:53")).unwrap();
    datagrams.send_to(b"to myself", addr("10.0.0.1:53")).unwrap();
    link.settle();
    let mut places: [Fragment<_>; 1] = Default::default();
    assert_eq!(datagrams.recv_from(&mut places).unwrap().from, addr("10.0.0.1:53"));
    let stats = link.near.stats();
    assert_eq!((stats.sent, stats.checksummed_sent, stats.wrong_checksum), (0, 0, 0), "{stats:?}");
    drop((client, server, listener, places));
    link.pass(Duration::from_secs(61));
    assert_eq!((link.near.connections(), link.near.pages()), (0, 0));
}

/// A host has two queues. Segments arrive on any of them, and the stack of the connection gets
/// them. A reset is sent only for a connection that no stack has.
#[test]
fn a_segment_finds_its_connection_on_another_queue() {
    let (there, back) = (Cable::default(), Cable::default());
    let (queue0, queue1) = (Cable::default(), Cable::default());
    let mut near = stack(&host(1), pair(&back, &there, true), StackOptions::default());
    let both = host(2);
    let mut far = [&queue0, &queue1].map(|queue| stack(&both, pair(queue, &back, true), StackOptions::default()));
    let mut rng = fastrand::Rng::with_seed(1);
    let mut now = Time::from_micros(1_000_000);
    let mut settle = |near: &mut Stack<_, _>, far: &mut [Stack<_, _>; 2]| {
        for _ in 0..2000 {
            now += Duration::from_millis(1);
            near.poll(now);
            for frame in there.borrow_mut().drain(..) {
                // The device chooses a queue at random.
                if rng.bool() { &queue0 } else { &queue1 }.borrow_mut().push_back(frame);
            }
            for stack in far.iter_mut() {
                stack.poll(now);
            }
        }
    };
    // Only the second stack listens.
    let mut listener = far[1].sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut clients: Vec<_> =
        (0..8).map(|_| near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap()).collect();
    settle(&mut near, &mut far);
    let mut servers: Vec<_> = std::iter::from_fn(|| listener.accept().ok()).collect();
    assert_eq!((servers.len(), far[0].connections(), far[1].connections()), (8, 0, 8));
    for client in &mut clients {
        assert_eq!(client.write(&[7; 20_000]), Ok(20_000));
    }
    settle(&mut near, &mut far);
    for server in &mut servers {
        let mut bytes = vec![0; 30_000];
        assert_eq!(server.read(&mut bytes), Ok(20_000));
        assert!(bytes[..20_000].iter().all(|&byte| byte == 7));
    }
    assert!(far[0].stats().handed_over > 8, "{:?}", far[0].stats());
    assert_eq!((far[0].stats().resets, far[1].stats().resets), (0, 0));
    // The same for datagrams.
    let mut socket = far[1].sockets().bind(addr("10.0.0.2:53")).unwrap();
    let mut sender = near.sockets().bind(addr("10.0.0.1:0")).unwrap();
    for _ in 0..32 {
        sender.send_to(b"x", addr("10.0.0.2:53")).unwrap();
    }
    settle(&mut near, &mut far);
    let mut places: [Fragment<_>; 1] = Default::default();
    assert_eq!(std::iter::from_fn(|| socket.recv_from(&mut places).ok()).count(), 32);
    // No stack has this connection.
    let refused = near.sockets().connect(addr("10.0.0.2:81"), &Config::default()).unwrap();
    settle(&mut near, &mut far);
    assert_eq!(refused.is_connected(), Err(SocketError::Closed(tcp::Error::Refused)));
    assert_eq!(far[0].stats().resets + far[1].stats().resets, 1);
}

/// A lost segment is not sent again while the device still has its first copy: the page could
/// contain other bytes when the device reads it.
#[test]
fn nothing_is_sent_again_while_its_first_copy_waits_in_the_ring() {
    // Headers are in slots of the queue, or in pages.
    for slots in [true, false] {
        let mut link = Link::new(true);
        let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
        let mut client = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
        link.settle();
        let mut server = listener.accept().unwrap();
        let tx = link.near.queues().1;
        if !slots {
            tx.slots = None;
        }
        let completes = tx.completes.clone();
        *completes.borrow_mut() = false;
        tx.loses = Box::new(|frame| frame.len() > 100);
        client.write(&[7; 1000]).unwrap();
        link.pass(Duration::from_secs(10));
        let sent = link.near.stats().sent;
        link.pass(Duration::from_secs(10));
        assert_eq!(link.near.stats().sent, sent, "its only copy is in the ring");
        *completes.borrow_mut() = true;
        link.near.queues().1.loses = Box::new(|_| false);
        link.pass(Duration::from_secs(60));
        assert_eq!(server.read(&mut [0; 2000]), Ok(1000), "slots: {slots}");
    }
}

/// A path drops large packets without a message. Over IPv6, segments do not become smaller than the
/// MTU that each link must support.
#[test]
fn a_black_hole_does_not_make_packets_smaller_than_the_least_mtu() {
    for (to, least) in [("10.0.0.2:80", 552), ("[fd00::2]:80", 1280)] {
        let mut link = Link::new(false);
        let mut listener = link.far.sockets().listen(addr("0.0.0.0:80"), ListenOptions::default()).unwrap();
        let mut client = link.near.sockets().connect(addr(to), &Config::default()).unwrap();
        link.settle();
        let mut server = listener.accept().unwrap();
        let sizes = Rc::new(RefCell::new(Vec::new()));
        let seen = sizes.clone();
        link.near.queues().1.loses = Box::new(move |frame| {
            let len = frame.len() - 14;
            seen.borrow_mut().push(len);
            len > least
        });
        assert_eq!(client.write(&[7; 20_000]), Ok(20_000));
        let mut received = 0;
        while received < 20_000 {
            match server.read(&mut [0; 20_000]) {
                Ok(n) => received += n,
                Err(error) => {
                    assert_eq!(error, SocketError::WouldBlock);
                    assert!(link.step());
                }
            }
        }
        let full = sizes.borrow().iter().filter(|len| **len == least).count();
        assert!(full >= 10, "{to}: {full} of that size: {sizes:?}");
    }
}

/// A bounded number of closed connections wait, and the newest are kept.
#[test]
fn connections_in_time_wait_are_bounded() {
    let mut link = Link::with(true, StackOptions { time_wait: 10, ..StackOptions::default() });
    let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    for n in 0..100 {
        let client = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
        link.settle();
        let server = listener.accept().unwrap();
        drop(client);
        link.settle();
        drop(server);
        link.settle();
        assert_eq!((link.near.connections(), link.far.connections()), ((n + 1).min(10), 0));
    }
    link.pass(Duration::from_secs(61));
    assert_eq!(link.near.connections(), 0);
}

/// A neighbour does not exist: only solicitations are sent, and the connection reports why it was
/// not made.
#[test]
fn a_host_that_does_not_answer_is_unreachable() {
    let mut link = Link::new(true);
    let client = link.near.sockets().connect(addr("10.0.0.9:80"), &Config::default()).unwrap();
    link.pass(Duration::from_secs(300));
    let unreachable = tcp::Error::Unreachable(tcp::Unreachable::Host);
    assert_eq!(client.is_connected(), Err(SocketError::Closed(unreachable)));
    drop(client);
    link.pass(Duration::from_secs(1));
    assert_eq!(link.near.connections(), 0);
    assert_eq!(
        link.near.sockets().connect(addr("192.0.2.1:80"), &Config::default()).unwrap_err(),
        SocketError::NoRoute
    );
}

/// A peer whose data is not read uses its budget and not more, and another connection continues.
/// When the user reads, all data arrives.
#[test]
fn a_connection_that_is_not_read_stays_within_its_budget() {
    let mut link = Link::with(true, StackOptions { pages: 128, ..StackOptions::default() });
    let connection = Config { budget: 64, ..Config::default() };
    let options = ListenOptions { connection, ..ListenOptions::default() };
    let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), options).unwrap();
    let connect = |link: &mut Link, listener: &mut netmem_inet::TcpListener<_>| {
        let mut client = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
        client.set_nodelay(true);
        link.settle();
        (client, listener.accept().unwrap())
    };
    let (mut one, mut unread) = connect(&mut link, &mut listener);
    let (mut two, mut read) = connect(&mut link, &mut listener);
    // Each segment has one byte, and so has each page.
    let mut sent = 0;
    for _ in 0..300 {
        sent += one.write(&[7]).unwrap();
        link.settle();
    }
    assert!(link.far.pages() <= 64, "{}", link.far.pages());
    let mut bytes = [0; 1000];
    for _ in 0..300 {
        assert_eq!(two.write(&[8; 1000]), Ok(1000));
        let mut received = 0;
        while received < 1000 {
            link.settle();
            match read.read(&mut bytes) {
                Ok(n) => received += n,
                Err(_) => assert!(link.step()),
            }
        }
    }
    let mut received = 0;
    while received < sent {
        match unread.read(&mut bytes) {
            Ok(n) => received += n,
            Err(_) => assert!(link.step()),
        }
        link.settle();
    }
    drop((one, two, unread, read, listener));
    link.pass(Duration::from_secs(61));
    assert_eq!((link.far.connections(), link.far.pages()), (0, 0));
}

/// Without a page for its headers, and a queue without slots for them, nothing is sent; when pages
/// are returned, everything is.
#[test]
fn a_stack_without_pages_goes_on_when_there_are_some() {
    let mut link = Link::new(true);
    let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut client = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    link.settle();
    let mut server = listener.accept().unwrap();
    link.near.queues().1.slots = None;
    // Nothing is in flight, so no timer of the connection runs while its data waits for a page.
    client.write(b"hello").unwrap();
    let mut taken: Vec<_> = std::iter::from_fn(|| link.near_pool.alloc()).collect();
    link.pass(Duration::from_millis(100));
    assert!(link.near.stats().no_page > 0, "{:?}", link.near.stats());
    assert_eq!(server.read(&mut [0; 10]), Err(SocketError::WouldBlock));
    taken.clear();
    link.pass(Duration::from_millis(100));
    assert_eq!(server.read(&mut [0; 10]), Ok(5), "{:?}", link.near.stats());
}

/// Sockets outlive their stack, and report that it is gone.
#[test]
fn sockets_say_that_their_stack_is_gone() {
    let Link { near, mut far, .. } = Link::new(true);
    let sockets = near.sockets();
    let mut listener = sockets.listen(addr("10.0.0.1:80"), ListenOptions::default()).unwrap();
    let mut client = sockets.connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    let mut datagrams = sockets.bind(addr("10.0.0.1:53")).unwrap();
    drop(near);
    assert_eq!(listener.accept().unwrap_err(), SocketError::StackGone);
    assert_eq!(client.write(b"x"), Err(SocketError::StackGone));
    assert_eq!(client.read(&mut [0]), Err(SocketError::StackGone));
    assert_eq!(datagrams.send_to(b"x", addr("10.0.0.2:53")), Err(SocketError::StackGone));
    assert_eq!(sockets.connect(addr("10.0.0.2:80"), &Config::default()).unwrap_err(), SocketError::StackGone);
    far.poll(Time::ZERO);
}

/// Wakers are called for the events that a socket waits for, and only for these.
#[test]
fn wakers_are_called() {
    struct Count(AtomicU32);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let count = || Arc::new(Count(AtomicU32::new(0)));
    let woken = |count: &Arc<Count>| count.0.swap(0, Ordering::Relaxed);
    let (accept, connect, read) = (count(), count(), count());
    let wakers = [&accept, &connect, &read].map(|count| Waker::from(count.clone()));
    let [mut accepts, mut connects, mut reads] = [0, 1, 2].map(|n| Context::from_waker(&wakers[n]));

    let mut link = Link::new(true);
    let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut client = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    assert!(listener.poll_accept(&mut accepts).is_pending() && client.poll_connected(&mut connects).is_pending());
    link.settle();
    assert_eq!((woken(&accept), woken(&connect)), (1, 1));
    let mut server = listener.accept().unwrap();
    assert!(server.poll_read(&mut reads, &mut [0; 10]).is_pending());
    link.settle();
    assert_eq!(woken(&read), 0);
    client.write(b"hello").unwrap();
    link.settle();
    assert_eq!((woken(&read), woken(&connect), woken(&accept)), (1, 0, 0));
    let mut bytes = [0; 10];
    assert!(matches!(server.poll_read(&mut reads, &mut bytes), Poll::Ready(Ok(5))));
    assert_eq!(&bytes[..5], b"hello");
    assert!(server.poll_read(&mut reads, &mut bytes).is_pending());
    client.abort();
    link.settle();
    assert_eq!(woken(&read), 1);
    let reset = SocketError::Closed(tcp::Error::Reset);
    assert!(matches!(server.poll_read(&mut reads, &mut bytes), Poll::Ready(Err(error)) if error == reset));
}

/// The event of the transmit queue's descriptor stays set until the queue is armed. A stack that
/// does not wait for it must not be woken by it repeatedly.
#[test]
fn the_transmit_queue_ends_a_sleep_only_if_something_waits_for_it() {
    let mut link = Link::new(false);
    let listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut stream = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    link.settle();
    let readable = |link: &Link| {
        let mut fds = [PollFd::new(&link.near, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    };
    rustix::io::write(&link.near.queues().1.event, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(link.near.arm().unwrap(), Armed::Waits);
    assert!(!readable(&link));
    link.near.disarm();
    // The ring is full, and the device does not finish its packets.
    let tx = link.near.queues().1;
    tx.size = 1;
    *tx.completes.borrow_mut() = false;
    stream.write(&[7; 10_000]).unwrap();
    for _ in 0..3 {
        link.near.poll(link.now);
    }
    assert_eq!(link.near.arm().unwrap(), Armed::Waits);
    assert!(readable(&link));
    link.near.disarm();
    // The device has finished its packets, and nothing waits any more.
    let tx = link.near.queues().1;
    tx.size = 256;
    *tx.completes.borrow_mut() = true;
    link.settle();
    assert_eq!(link.near.arm().unwrap(), Armed::Waits);
    assert!(!readable(&link));
    link.near.disarm();
    drop((stream, listener));
}

/// A loop over a stack whose queue has stopped ends with the error: it neither sleeps nor spins. A
/// transmit queue whose device may be replaced is reported by the receive queue.
#[test]
fn a_stack_over_a_queue_that_has_stopped_does_not_wait() {
    let (down, gone) = (ErrorKind::NetworkDown, ErrorKind::NotConnected);
    for (rx, tx, error) in [
        (Some(down), None, Some(down)),
        (None, Some(down), Some(down)),
        (Some(gone), Some(gone), Some(gone)),
        (None, Some(gone), None),
    ] {
        let mut link = Link::new(false);
        link.settle();
        let queues = link.near.queues();
        (queues.0.stopped, queues.1.stopped) = (rx, tx);
        let mut pause = PollThenSleep::new(Duration::ZERO);
        for _ in 0..3 {
            assert_eq!(link.near.poll(link.now), 0);
            let turn = pause.turn(0, &mut [&mut link.near], Some(Duration::ZERO));
            assert_eq!(turn.map_err(|error| error.kind()), error.map_or(Ok(Turn::TimedOut), Err), "{rx:?} {tx:?}");
        }
        assert_eq!(link.near.check().map_err(|error| error.kind()), rx.or(tx).map_or(Ok(()), Err));
        let end = link.now;
        let finished = link.near.finish(end, || end);
        assert_eq!(finished.unwrap(), 0, "there was nothing to send");
    }
}

/// A thread that sleeps for a stack is woken by another thread.
#[test]
fn another_thread_ends_the_sleep() {
    let mut link = Link::new(true);
    link.settle();
    let waker = link.near.waker();
    let mut pause = PollThenSleep::new(Duration::ZERO);
    let thread = std::thread::spawn(move || waker.wake());
    // Without the wake-up, the thread would sleep for ever.
    loop {
        match pause.turn(0, &mut [&mut link.near], None).unwrap() {
            Turn::Woken => break,
            // The frame came before the stack was armed: this poll counts it.
            Turn::Polls if link.near.poll(link.now) > 0 => break,
            _ => {}
        }
    }
    thread.join().unwrap();
}

/// A connection moves from stack to stack of a host, and is saved and restored, while data is in
/// flight in both directions. The peer does not notice it.
#[test]
fn a_connection_moves_while_data_is_on_its_way() {
    let (there, back) = (Cable::default(), Cable::default());
    let (queue0, queue1) = (Cable::default(), Cable::default());
    let mut near = stack(&host(1), pair(&back, &there, true), StackOptions::default());
    let both = host(2);
    let mut far = [&queue0, &queue1].map(|queue| stack(&both, pair(queue, &back, true), StackOptions::default()));
    let mut now = Time::from_micros(1_000_000);
    let mut poll = |near: &mut Stack<_, _>, far: &mut [Stack<_, _>; 2]| {
        now += Duration::from_millis(1);
        near.poll(now);
        for (n, frame) in there.borrow_mut().drain(..).enumerate() {
            [&queue0, &queue1][n % 2].borrow_mut().push_back(frame);
        }
        for stack in far.iter_mut() {
            stack.poll(now);
        }
    };
    let mut listener = far[0].sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let mut client = near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    for _ in 0..10 {
        poll(&mut near, &mut far);
    }
    let mut server = listener.accept().unwrap();
    let sent: Vec<u8> = (0..400_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    let (mut at, mut back_at, mut received, mut echoed) = (0, 0, Vec::new(), Vec::new());
    let mut bytes = [0; 7001];
    for turn in 0..20_000 {
        at += client.write(&sent[at..]).unwrap_or(0);
        // The peer reads slowly, so that data waits when the connection moves.
        if turn % 3 == 0
            && let Ok(n) = server.read(&mut bytes)
        {
            received.extend_from_slice(&bytes[..n]);
        }
        back_at += server.write(&received[back_at..]).unwrap_or(0);
        if let Ok(n) = client.read(&mut bytes) {
            echoed.extend_from_slice(&bytes[..n]);
        }
        poll(&mut near, &mut far);
        if turn % 50 == 49 && turn < 500 {
            let to = far[turn / 50 % 2].sockets();
            server = if turn % 100 == 49 {
                let departed = server.depart().unwrap();
                poll(&mut near, &mut far);
                to.adopt(departed).unwrap()
            } else {
                let text = serde_json::to_string(&server.save().unwrap()).unwrap();
                poll(&mut near, &mut far);
                to.restore(&serde_json::from_str(&text).unwrap(), &Config::default()).unwrap()
            };
        }
        if echoed.len() == sent.len() {
            break;
        }
    }
    assert!(received == sent && echoed == sent, "{} {}", received.len(), echoed.len());
    assert!(far[0].stats().handed_over > 0 && far[1].stats().handed_over > 0);
    assert_eq!(far[0].stats().resets + far[1].stats().resets, 0);
    drop((client, server, listener));
    for _ in 0..70_000 {
        poll(&mut near, &mut far);
    }
    assert_eq!((near.connections(), both.connections(), far[0].pages(), far[1].pages()), (0, 0, 0, 0));
    // A stream was detached from its stack and dropped: the flow is free, and the peer gets a
    // reset.
    let mut listener = far[0].sockets().listen(addr("10.0.0.2:81"), ListenOptions::default()).unwrap();
    let mut client = near.sockets().connect(addr("10.0.0.2:81"), &Config::default()).unwrap();
    for _ in 0..10 {
        poll(&mut near, &mut far);
    }
    drop(listener.accept().unwrap().depart().unwrap());
    client.write(b"x").unwrap();
    for _ in 0..10 {
        poll(&mut near, &mut far);
    }
    assert_eq!(client.is_connected(), Err(SocketError::Closed(tcp::Error::Reset)));
}

/// A datagram in fragments reaches its socket. A datagram for a port without a socket is dropped
/// without an answer, even a short one: there is no whole packet that an error could quote.
#[test]
fn datagrams_in_fragments_are_received_and_not_answered() {
    let mut link = Link::new(false);
    let mut socket = link.far.sockets().bind(addr("10.0.0.2:9")).unwrap();
    let payload: Vec<u8> = (0..4000_u32).map(|n| n as u8).collect();
    crate::common::fragments(&mut link, 1, 9, &payload, 1000);
    link.settle();
    let mut places: [Fragment<_>; 16] = Default::default();
    let received = socket.recv_from(&mut places).unwrap();
    let bytes: Vec<u8> = places[..received.fragments].iter().flat_map(|f| f.to_vec()).collect();
    assert!(bytes == payload && received.from == addr("10.0.0.1:7"));
    crate::common::fragments(&mut link, 2, 10, b"x", 8);
    crate::common::fragments(&mut link, 3, 10, &payload, 1000);
    link.settle();
    assert_eq!(link.far.stats().icmp_errors, 0);
    assert_eq!(socket.recv_from(&mut places).err(), Some(SocketError::WouldBlock));
}
