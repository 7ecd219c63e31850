//! Waiting for sockets: a delivery wakes the waiting thread. If no thread waits, no notification is
//! sent.

use crate::memory_common::{Feed, VERIFIED, all, bind, ours, recv, udp4, worker};
use netmem_devmem::{FlowTable, Fragment, Received, RecvError, SocketOptions};
use netmem_packet::{Armed, SplitHandler, Wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

fn ready(socket: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

/// The descriptor is readable after a delivery to an armed socket, until it is armed again, and at
/// no other time.
#[test]
fn a_socket_is_woken_while_it_is_armed() {
    let worker = worker();
    let (_memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    feed.deliver(&mut queue, 9, 1);
    assert!(!ready(&socket), "no thread has armed the socket");
    assert_eq!(socket.arm().unwrap(), Armed::Work);
    let _ = recv(&mut socket);
    assert_eq!(socket.arm().unwrap(), Armed::Waits);
    assert!(!ready(&socket));
    feed.deliver(&mut queue, 9, 3);
    assert!(ready(&socket) && ready(&socket));
    for _ in 0..3 {
        assert_eq!(socket.arm().unwrap(), Armed::Work);
        assert!(!ready(&socket), "arming clears the earlier ring");
        let _ = recv(&mut socket);
    }
    assert_eq!(socket.arm().unwrap(), Armed::Waits);
    socket.disarm();
    feed.deliver(&mut queue, 9, 1);
    assert!(!ready(&socket));
    let _ = recv(&mut socket);
    // The rest of a datagram counts as work.
    queue.frame(feed.split(&udp4(9, 500), 100, VERIFIED));
    let mut one = [Fragment::Empty];
    assert!(!socket.recv(&mut one).unwrap().end);
    assert_eq!(socket.arm().unwrap(), Armed::Work);
    let Ok(Received { end: true, .. }) = socket.recv(&mut one) else { panic!("the rest") };
    assert_eq!(socket.arm().unwrap(), Armed::Waits);
}

/// A limit ends a wait. If a datagram is queued, it is received without waiting.
#[test]
fn a_wait_with_a_limit() {
    let worker = worker();
    let (_memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let (mut out, limit) = ([Fragment::Empty, Fragment::Empty], Duration::from_millis(30));
    let before = Instant::now();
    assert_eq!(socket.recv_timeout(&mut out, Some(limit)), Err(RecvError::Empty));
    assert!(before.elapsed() >= limit);
    assert_eq!(socket.recv_timeout(&mut out, Some(Duration::ZERO)), Err(RecvError::Empty));
    feed.deliver(&mut queue, 9, 2);
    for limit in [Some(Duration::ZERO), None] {
        assert!(socket.recv_timeout(&mut out, limit).unwrap().end);
    }
}

/// A thread that sleeps before every datagram receives all of them, from a thread that delivers
/// both while the first sleeps and while it is awake. A lost wake-up would hang; a watchdog ends
/// the test then.
#[test]
fn no_delivery_is_missed() {
    const DATAGRAMS: usize = 20_000;
    let worker = worker();
    let (_memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let (received, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let patience = Instant::now() + Duration::from_secs(100);
            while !done.load(SeqCst) {
                if Instant::now() > patience {
                    eprintln!("a wake-up was lost after {received:?} datagrams");
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        scope.spawn(|| {
            let returner = socket.returner();
            let mut out = [Fragment::Empty, Fragment::Empty];
            for _ in 0..DATAGRAMS {
                let Ok(Received { fragments: 1, .. }) = socket.recv_timeout(&mut out, None) else { panic!("one") };
                let Fragment::Device { token, .. } = out[0] else { panic!("in device memory") };
                assert_eq!(returner.return_tokens(&[token.into()]), Ok(1));
                received.fetch_add(1, SeqCst);
            }
            done.store(true, SeqCst);
        });
        for n in 0..DATAGRAMS {
            // Some deliveries come while the receiver is about to sleep, others while it sleeps or
            // is still awake.
            let lead = n % 7;
            while received.load(SeqCst) + lead < n {
                std::thread::yield_now();
            }
            (0..n % 97).for_each(|_| std::hint::spin_loop());
            feed.deliver(&mut queue, 9, 1);
        }
    });
}
