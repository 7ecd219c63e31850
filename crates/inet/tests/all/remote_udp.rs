//! Sockets for datagrams of other threads: `netmem_inet::stack::remote::UdpSocket`.

use crate::common::{Link, addr, connected};
use crate::remote::{Calls, block_on, bytes, now};
use netmem_inet::stack::remote::{DatagramOptions, ReceivedGroup, UdpSocket};
use netmem_inet::{Fragment, SocketError, StackOptions};
use netmem_pool::Private;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

const NEAR: &str = "10.0.0.1:7";
const FAR: &str = "10.0.0.2:9";
const GROUP: DatagramOptions = DatagramOptions { from: None, ecn: 2, segment_size: Some(1000) };

/// A socket can hold as many pages as a ring has places, and more.
fn roomy() -> StackOptions {
    StackOptions { pages: 2048, ..StackOptions::default() }
}

/// A socket of each host. They know the Ethernet address of each other.
fn sockets(link: &mut Link) -> [UdpSocket<Private>; 2] {
    let sockets = [link.near.remote().bind(addr(NEAR)), link.far.remote().bind(addr(FAR))];
    assert_eq!(now(|cx| sockets[0].poll_bound(cx)), Poll::Pending);
    link.settle();
    assert_eq!(now(|cx| sockets[0].poll_bound(cx)), Poll::Ready(Ok(addr(NEAR))));
    assert_eq!(sockets[1].local_addr(), Some(addr(FAR)));
    for (n, to) in [(0, FAR), (1, NEAR)] {
        sockets[n].send_to(b"first", addr(to), &DatagramOptions::default()).unwrap();
        link.settle();
        assert_eq!(receive(&sockets[1 - n], 10).unwrap().1, b"first");
    }
    sockets
}

fn receive(socket: &UdpSocket<Private>, room: usize) -> Result<(ReceivedGroup, Vec<u8>), SocketError> {
    let mut into = vec![0; room];
    let group = socket.recv_from(&mut into)?;
    into.truncate(group.len);
    Ok((group, into))
}

/// Lengths of the datagrams that a call receives, and the bits of ECN.
fn shape(socket: &UdpSocket<Private>, room: usize) -> Result<(usize, usize, u8), SocketError> {
    receive(socket, room).map(|(group, _)| (group.len, group.stride, group.ecn))
}

/// A group is one frame if the device cuts it, and as many as it has datagrams otherwise. It is
/// received as a group, and by a socket of the stack's thread as single datagrams.
#[test]
fn datagrams_travel_in_groups() {
    for (cuts, frames) in [(false, 5), (true, 1)] {
        let mut link = Link::new(cuts);
        let [near, far] = sockets(&mut link);
        let mut own = link.far.sockets().bind(addr("10.0.0.2:10")).unwrap();
        let payload = bytes(4300);
        let before = link.near.stats().sent;
        near.send_to(&payload, addr(FAR), &GROUP).unwrap();
        link.settle();
        assert_eq!(link.near.stats().sent - before, frames);
        let (group, got) = receive(&far, 100_000).unwrap();
        let expected = ReceivedGroup { from: addr(NEAR), to: addr(FAR).ip(), len: 4300, stride: 1000, ecn: 2 };
        assert_eq!(group, expected);
        assert!(got == payload);
        assert_eq!(shape(&far, 10), Err(SocketError::WouldBlock));

        near.send_to(&payload, addr("10.0.0.2:10"), &GROUP).unwrap();
        link.settle();
        for part in payload.chunks(1000) {
            let mut places = [Fragment::default(), Fragment::default()];
            let received = own.recv_from(&mut places).unwrap();
            assert_eq!(received.ecn, 2);
            assert!([places[0].to_vec(), places[1].to_vec()].concat() == part);
        }
        assert!(own.recv_from(&mut []).is_err());
    }
}

/// What does not belong to a group begins the next one.
#[test]
fn a_group_ends_where_something_differs() {
    for cuts in [false, true] {
        let mut link = Link::new(cuts);
        let [near, far] = sockets(&mut link);
        let other = link.near.remote().bind(addr("10.0.0.1:8"));
        link.settle();
        let send = |from: &UdpSocket<Private>, len, ecn, segment_size| {
            let options = DatagramOptions { ecn, segment_size, ..DatagramOptions::default() };
            from.send_to(&bytes(len), addr(FAR), &options).unwrap();
        };
        let received = |link: &mut Link, room| {
            link.settle();
            std::iter::from_fn(|| shape(&far, room).ok()).collect::<Vec<_>>()
        };
        // Another size. The first shorter one ends the group.
        [1000, 1000, 700, 700, 1000].into_iter().for_each(|len| send(&near, len, 0, None));
        assert_eq!(received(&mut link, 9000), [(2700, 1000, 0), (700, 700, 0), (1000, 1000, 0)]);
        // Other bits, and another sender.
        for (from, ecn) in [(&near, 0), (&near, 1), (&other, 1), (&near, 1)] {
            send(from, 100, ecn, None);
            link.settle();
        }
        assert_eq!(received(&mut link, 9000), [(100, 100, 0), (100, 100, 1), (100, 100, 1), (100, 100, 1)]);
        // Several datagrams of another size, which come as one frame if the device has joined them.
        send(&near, 1000, 0, None);
        send(&near, 900, 0, Some(300));
        let expected = if cuts { vec![(1000, 1000, 0), (900, 300, 0)] } else { vec![(1300, 1000, 0), (600, 300, 0)] };
        assert_eq!(received(&mut link, 9000), expected);
        // There is room for two of five at a time.
        send(&near, 5000, 0, Some(1000));
        assert_eq!(received(&mut link, 2500), [(2000, 1000, 0), (2000, 1000, 0), (1000, 1000, 0)]);
        // There is room for none: the rest of each is lost.
        send(&near, 2000, 0, Some(1000));
        assert_eq!(received(&mut link, 400), [(400, 400, 0), (400, 400, 0)]);
        // Empty datagrams are each one by themselves.
        [0, 0, 5].into_iter().for_each(|len| send(&near, len, 3, None));
        assert_eq!(received(&mut link, 400), [(0, 0, 3), (0, 0, 3), (5, 5, 3)]);
    }
}

/// A call sends all of its datagrams or none. If there is no room, each task that waits is woken.
#[test]
fn a_ring_that_is_full_takes_nothing_and_wakes_all_who_wait() {
    let mut link = Link::with(false, roomy());
    let [near, far] = sockets(&mut link);
    let payload = bytes(10_000);
    let mut calls = 0;
    while near.send_to(&payload, addr(FAR), &GROUP).is_ok() {
        calls += 1;
    }
    assert_eq!(calls, 256 / 10);
    let waiting = [Arc::<Calls>::default(), Arc::default()];
    for calls in &waiting {
        let waker = Waker::from(calls.clone());
        assert_eq!(near.poll_writable(&mut Context::from_waker(&waker)), Poll::Pending);
    }
    link.settle();
    assert!(waiting.iter().all(|calls| calls.count() == 1));
    assert_eq!(now(|cx| near.poll_writable(cx)), Poll::Ready(Ok(())));
    let mut got = Vec::new();
    while let Ok((_, part)) = receive(&far, 64_000) {
        got.extend(part);
        link.settle();
    }
    assert!(got == payload.repeat(calls), "{} of {}", got.len(), calls * payload.len());
}

/// A call that finds too few pages sends nothing, and its task is woken when there are pages.
#[test]
fn a_call_without_pages_waits_for_them() {
    let mut link = Link::new(false);
    let [near, far] = sockets(&mut link);
    let mut pages: Vec<_> = std::iter::from_fn(|| link.near_pool.alloc()).collect();
    // There are two, and a call needs three. No call keeps them, or counts them any longer.
    pages.truncate(pages.len() - 2);
    let payload = bytes(3000);
    for _ in 0..3000 {
        assert_eq!(near.send_to(&payload, addr(FAR), &GROUP), Err(SocketError::WouldBlock));
    }
    let calls = Arc::<Calls>::default();
    let waker = Waker::from(calls.clone());
    assert_eq!(near.poll_writable(&mut Context::from_waker(&waker)), Poll::Pending);
    // It is not woken for pages that are too few, and the stack sleeps meanwhile.
    link.settle();
    assert_eq!(calls.count(), 0);
    drop(pages);
    link.pass(Duration::from_millis(2));
    assert_eq!(calls.count(), 1);
    near.send_to(&payload, addr(FAR), &GROUP).unwrap();
    link.settle();
    assert!(receive(&far, 9000).unwrap().1 == payload);
    link.near_pool.reclaim();
    assert_eq!(link.near_pool.stats().inflight, 0);
}

/// Fills the ring of the device, and sends by `socket` until it finds no page. Returns how many
/// datagrams were sent.
fn fill(link: &mut Link, socket: &UdpSocket<Private>) -> usize {
    link.near.queues().1.size = 0;
    let mut sent = 0;
    while socket.send_to(b"waits", addr(FAR), &DatagramOptions::default()).is_ok() {
        sent += 1;
        link.settle();
    }
    sent
}

/// As many datagrams as a socket has received.
fn count(socket: &UdpSocket<Private>) -> usize {
    std::iter::from_fn(|| receive(socket, 5).ok()).count()
}

/// A call needs more pages than are admitted now. Its task is not woken for fewer.
#[test]
fn a_call_that_is_not_admitted_waits_for_all_its_pages() {
    let mut link = Link::with_pages(16);
    let [near, far] = sockets(&mut link);
    let other = link.near.remote().bind(addr("10.0.0.1:8"));
    link.settle();
    let sent = fill(&mut link, &other);
    let payload = bytes(2000);
    assert_eq!(near.send_to(&payload, addr(FAR), &GROUP), Err(SocketError::WouldBlock));
    let calls = Arc::<Calls>::default();
    let waker = Waker::from(calls.clone());
    assert_eq!(near.poll_writable(&mut Context::from_waker(&waker)), Poll::Pending);
    for _ in 0..5 {
        link.pass(Duration::from_millis(2));
        assert_eq!(calls.count(), 0);
    }
    link.near.queues().1.size = 256;
    link.settle();
    assert_eq!(calls.count(), 1);
    near.send_to(&payload, addr(FAR), &GROUP).unwrap();
    link.settle();
    assert_eq!(count(&far), sent + 2);
}

/// Datagrams that are copied already leave as soon as the device accepts them, also if no page is
/// free.
#[test]
fn what_is_copied_leaves_without_pages() {
    let mut link = Link::with_pages(64);
    let [near, far] = sockets(&mut link);
    // The outbox is full of datagrams of the user's own page.
    let mut own = link.near.sockets().bind(addr("10.0.0.1:8")).unwrap();
    let _sink = link.far.sockets().bind(addr("10.0.0.2:10")).unwrap();
    link.near.queues().1.size = 0;
    let frag = crate::common::pool().alloc().unwrap().freeze_range(0..5);
    for _ in 0..2 {
        while own.send_fragment_to(frag.clone(), addr("10.0.0.2:10")).is_ok() {}
        // The first one waits for the ring, and not in the outbox.
        link.settle();
    }
    let mut sent = fill(&mut link, &near);
    let others: Vec<_> = (20..)
        .map_while(|port| {
            let other = link.near.remote().bind(([10, 0, 0, 1], port).into());
            link.settle();
            let more = fill(&mut link, &other);
            sent += more;
            (more > 0).then_some(other)
        })
        .collect();
    assert!(!others.is_empty());
    link.near.close();
    assert!(!link.near.is_closed());
    link.near.queues().1.size = 256;
    link.settle();
    assert!(link.near.is_closed());
    assert_eq!(count(&far), sent);
}

/// A device that cuts frames is replaced by one that cuts none: the stack cuts them.
#[test]
fn a_group_is_cut_for_another_device() {
    let mut link = Link::new(true);
    let [near, far] = sockets(&mut link);
    link.near.queues().1.offloads = false;
    let before = link.near.stats().sent;
    near.send_to(&bytes(4300), addr(FAR), &GROUP).unwrap();
    link.settle();
    assert_eq!(link.near.stats().sent - before, 5);
    let (group, got) = receive(&far, 9000).unwrap();
    assert_eq!((group.stride, group.ecn), (1000, 2));
    assert!(got == bytes(4300));
}

/// What cannot be sent is an error if the call knows it, and counts otherwise. Nothing is sent in
/// fragments.
#[test]
fn what_cannot_be_sent() {
    let mut link = Link::new(false);
    let [near, far] = sockets(&mut link);
    let group = |len, size| {
        let options = DatagramOptions { segment_size: Some(size), ..DatagramOptions::default() };
        near.send_to(&bytes(len), addr(FAR), &options)
    };
    assert_eq!(group(3201, 100), Err(SocketError::TooLong { len: 3201, most: 3200 }));
    assert_eq!(group(65_508, 65_508), Err(SocketError::TooLong { len: 65_508, most: 65_507 }));
    // The IPv6 form of an IPv4 address has no longer ones.
    let mapped = near.send_to(&bytes(65_508), addr("[::ffff:10.0.0.2]:9"), &DatagramOptions::default());
    assert_eq!(mapped, Err(SocketError::TooLong { len: 65_508, most: 65_507 }));
    let unsent = |link: &mut Link| {
        link.settle();
        link.near.stats().datagrams_unsent
    };
    group(1472, 1472).unwrap();
    assert_eq!(unsent(&mut link), 0);
    group(1473, 1473).unwrap();
    assert_eq!(unsent(&mut link), 1);
    group(3000, 1500).unwrap();
    assert_eq!(unsent(&mut link), 3);
    near.send_to(b"no route", addr("192.0.2.1:9"), &DatagramOptions::default()).unwrap();
    let foreign = DatagramOptions { from: Some([10, 0, 0, 2].into()), ..DatagramOptions::default() };
    near.send_to(b"not ours", addr(FAR), &foreign).unwrap();
    assert_eq!(unsent(&mut link), 5);
    assert_eq!(shape(&far, 9000), Ok((1472, 1472, 0)));
    assert_eq!(shape(&far, 9000), Err(SocketError::WouldBlock));
    link.near_pool.reclaim();
    assert_eq!(link.near_pool.stats().inflight, 0);
}

/// A group that is one frame counts as all of its datagrams.
#[test]
fn each_datagram_of_a_group_counts() {
    let mut link = Link::new(true);
    let [near, _far] = sockets(&mut link);
    near.send_to(&bytes(2500), addr("192.0.2.1:9"), &GROUP).unwrap();
    link.settle();
    assert_eq!(link.near.stats().datagrams_unsent, 3);
    near.send_to(&bytes(4500), addr(FAR), &DatagramOptions { segment_size: Some(1500), ..GROUP }).unwrap();
    link.settle();
    assert_eq!(link.near.stats().datagrams_unsent, 6);
    // The route goes while the group waits behind a datagram that the ring does not accept.
    let network = [192, 0, 2, 0].into();
    link.hosts[0].add_route(network, 24, addr(FAR).ip()).unwrap();
    link.near.queues().1.size = 0;
    near.send_to(b"waits", addr(FAR), &GROUP).unwrap();
    near.send_to(&bytes(2500), addr("192.0.2.1:9"), &GROUP).unwrap();
    link.settle();
    assert!(link.hosts[0].remove_route(network, 24));
    link.near.queues().1.size = 256;
    link.settle();
    assert_eq!(link.near.stats().datagrams_unsent, 9);
}

/// A socket has half of the pages at most, and a call that needs more is an error, because it could
/// wait for ever.
#[test]
fn a_call_has_no_more_datagrams_than_a_socket_has_pages() {
    let mut link = Link::with_pages(16);
    let [near, far] = sockets(&mut link);
    assert_eq!(near.max_segments(), 6);
    assert_eq!(near.send_to(&bytes(6001), addr(FAR), &GROUP), Err(SocketError::TooLong { len: 6001, most: 6000 }));
    near.send_to(&bytes(6000), addr(FAR), &GROUP).unwrap();
    link.settle();
    assert_eq!(shape(&far, 9000), Ok((6000, 1000, 2)));
}

/// A socket that sends faster than the device leaves pages for others.
#[test]
fn a_device_that_is_blocked_leaves_pages_for_others() {
    let mut link = Link::with_pages(64);
    let [near, far] = sockets(&mut link);
    let (mut client, _server) = connected(&mut link);
    let sent = fill(&mut link, &near);
    assert_eq!(client.write(b"has a page"), Ok(10));
    link.near.queues().1.size = 256;
    link.settle();
    assert_eq!(count(&far), sent);
}

/// A port that is taken, and a stack that ends, are errors of all calls. Tasks that wait are woken.
#[test]
fn a_socket_ends_with_its_stack() {
    let mut link = Link::new(false);
    let [near, far] = sockets(&mut link);
    let taken = link.near.remote().bind(addr(NEAR));
    link.settle();
    assert_eq!(now(|cx| taken.poll_bound(cx)), Poll::Ready(Err(SocketError::InUse)));
    assert_eq!(taken.send_to(b"x", addr(FAR), &DatagramOptions::default()), Err(SocketError::InUse));
    assert_eq!(shape(&taken, 1), Err(SocketError::InUse));
    // A port is free when its socket is dropped.
    drop(near);
    link.settle();
    let near = link.near.remote().bind(addr(NEAR));
    link.settle();
    assert_eq!(near.local_addr(), Some(addr(NEAR)));

    far.send_to(b"last", addr(NEAR), &DatagramOptions::default()).unwrap();
    link.settle();
    let calls = Arc::<Calls>::default();
    let waker = Waker::from(calls.clone());
    let cx = &mut Context::from_waker(&waker);
    assert_eq!(far.poll_recv_from(cx, &mut [0; 9]), Poll::Pending);
    drop(link);
    assert_eq!(calls.count(), 1);
    assert_eq!(far.poll_recv_from(cx, &mut [0; 9]), Poll::Ready(Err(SocketError::StackGone)));
    assert_eq!(far.poll_writable(cx), Poll::Ready(Err(SocketError::StackGone)));
    // What had arrived can be received.
    assert_eq!(receive(&near, 9).unwrap().1, b"last");
    assert_eq!(receive(&near, 9), Err(SocketError::StackGone));
}

/// Several threads send by one socket, and another one receives. The stacks are on this thread.
#[test]
fn several_threads_use_a_socket() {
    const SENDERS: usize = 3;
    const GROUPS: usize = 400;
    let mut link = Link::with(false, roomy());
    let [near, far] = sockets(&mut link);
    let near = &near;
    // No more is under way than the receiver's ring has room for: the rest could be lost.
    let (leave, arrive) = mpsc::sync_channel(40);
    let received = thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            let (mut bytes, mut into, mut arrived) = ([0; SENDERS], vec![0; 64_000], 0);
            while arrived < SENDERS * GROUPS {
                let group = block_on(|cx| far.poll_recv_from(cx, &mut into)).unwrap();
                for part in into[..group.len].chunks(group.stride) {
                    assert!(part.iter().all(|byte| *byte == part[0]));
                    bytes[usize::from(part[0])] += part.len();
                }
                while arrived < bytes.iter().sum::<usize>() / 4300 {
                    arrive.recv().unwrap();
                    arrived += 1;
                }
            }
            bytes
        });
        for number in 0..SENDERS as u8 {
            let leave = leave.clone();
            scope.spawn(move || {
                for _ in 0..GROUPS {
                    // It fails if the receiver has.
                    if leave.send(()).is_err() {
                        return;
                    }
                    while let Err(error) = near.send_to(&[number; 4300], addr(FAR), &GROUP) {
                        assert_eq!(error, SocketError::WouldBlock);
                        block_on(|cx| near.poll_writable(cx)).unwrap();
                    }
                }
            });
        }
        while !receiver.is_finished() {
            link.settle();
            thread::yield_now();
        }
        receiver.join().unwrap()
    });
    assert_eq!(link.far.stats().datagrams_dropped, 0);
    assert_eq!(received, [GROUPS * 4300; SENDERS]);
}
