//! Sockets on a flow table that is fed with frames by hand: receiving, returning, mistakes of
//! users, and every order of ends.

use crate::memory_common::{Feed, Memory, VERIFIED, all, bind, ours, peer4, recv, token, udp4, udp6, until, worker};
use netmem_devmem::{
    Binding, FlowBindError, FlowQueue, FlowTable, Fragment, MAX_FRAGMENTS, MAX_RANGES, Received, RecvError,
    SocketOptions, TokenRange,
};
use netmem_packet::{Checksum, Meta, SplitFrame, SplitHandler};
use netmem_pool::PoolOptions;
use netmem_testing::permutations;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

fn range(start: u32, count: u32) -> TokenRange {
    TokenRange { start, count }
}

/// Proves MEM-3: a datagram is delivered as a fragment of device memory with a token and a fragment
/// of host memory, with its peer and its end.
#[test]
fn what_is_received() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    assert!(matches!(socket.recv(&mut []), Err(RecvError::Empty)));
    // All payload in device memory; some in host memory; all; none.
    for (head, linear, beyond) in [(42, 0, 500), (100, 58, 442), (542, 500, 0), (1000, 500, 0)] {
        let frame = feed.split(&udp4(9, 500), head, VERIFIED);
        let place = frame.payload().fragments().next().map(|f| (f.file_offset(), f.index()));
        queue.frame(frame);
        let (received, parts) = recv(&mut socket);
        let n = usize::from(linear > 0) + usize::from(beyond > 0);
        assert_eq!(received, Received { fragments: n, peer: peer4(), end: true, verified: true });
        let mut parts = parts.into_iter();
        if linear > 0 {
            let Some(Fragment::Linear(bytes)) = parts.next() else { panic!("host memory comes first") };
            let mut copy = vec![0; linear];
            bytes.copy_to(0, &mut copy).unwrap();
            assert_eq!((bytes.len(), copy), (linear, vec![0x5a; linear]));
        }
        if beyond > 0 {
            let Some(Fragment::Device { binding: id, offset, len, token }) = parts.next() else { panic!("a fragment") };
            assert_eq!((id, len, Some((offset, token.0 - 1))), (binding.id(), beyond, place));
            assert_eq!(socket.returner().return_tokens(&[token.into()]), Ok(1));
        }
    }
    queue.frame(feed.split(&udp6(9, 300), 62, VERIFIED));
    let (received, _) = recv(&mut socket);
    assert!(received.peer.is_ipv6() && received.fragments == 1);
    // Empty, and padded to the shortest frame: there is nothing but a peer.
    let mut short = udp4(9, 0);
    short.resize(60, 0);
    queue.frame(feed.split(&short, 42, VERIFIED));
    let (received, _) = recv(&mut socket);
    assert_eq!((received.fragments, received.end), (0, true));
    let mut padded = udp4(9, 3);
    padded.resize(60, 0);
    queue.frame(feed.split(&padded, 42, VERIFIED));
    assert!(matches!(recv(&mut socket).1[0], Fragment::Device { len: 3, .. }));
    let stats = socket.stats();
    assert_eq!((stats.fragments, stats.linear_bytes, stats.bindings, stats.queued), (4, 1058, 1, 0));
    drop((socket, queue));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((feed, binding));
    memory.assert_gone();
}

/// Proves MEM-3: if `out` is too small, the rest of the datagram stays queued and has no token.
#[test]
fn a_receive_that_is_cut_short() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    queue.frame(feed.split(&udp4(9, 500), 100, VERIFIED));
    let returner = socket.returner();
    let cut = Received { fragments: 0, peer: peer4(), end: false, verified: true };
    assert_eq!(socket.recv(&mut []), Ok(cut));
    let mut one = [Fragment::Empty];
    assert_eq!(socket.recv(&mut one), Ok(Received { fragments: 1, ..cut }));
    assert!(matches!(&one[0], Fragment::Linear(bytes) if bytes.len() == 58));
    // The token that the rest will have is not valid yet.
    assert_eq!(returner.return_tokens(&[range(1, 64)]), Ok(0));
    assert_eq!((socket.recv(&mut []), socket.stats().queued), (Ok(cut), 1));
    assert_eq!(socket.recv(&mut one), Ok(Received { fragments: 1, end: true, ..cut }));
    let Fragment::Device { token, len: 442, .. } = one[0] else { panic!("the rest") };
    assert_eq!(returner.return_tokens(&[token.into(), token.into()]), Ok(1));
    assert_eq!((feed.pool.stats().inflight(), socket.recv(&mut one)), (0, Err(RecvError::Empty)));
    // Closed with a part of a datagram received.
    queue.frame(feed.split(&udp4(9, 500), 100, VERIFIED));
    let _ = socket.recv(&mut one).unwrap();
    drop(socket);
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((one, queue, feed, binding, returner));
    memory.assert_gone();
}

/// Proves MEM-10: if the device has not verified a datagram, it is counted, and dropped or
/// delivered marked, as the socket's options say.
#[test]
fn unverified_checksums() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let mut strict = table.bind(all(9), &SocketOptions::new()).unwrap();
    let mut lenient = table.bind(all(10), &SocketOptions::new().unverified(true)).unwrap();
    let mut queue = table.queue(&binding);
    let unknown = Meta::default();
    let partial = Meta { checksum: Checksum::Partial { start: 34, offset: 6 }, gso: None };
    for (meta, port) in [unknown, VERIFIED, partial].into_iter().flat_map(|m| [(m, 9), (m, 10)]) {
        queue.frame(feed.split(&udp4(port, 100), 42, meta));
    }
    assert!(recv(&mut strict).0.verified && recv(&mut strict).0.verified);
    assert_eq!(strict.recv(&mut []), Err(RecvError::Empty));
    let marks: Vec<_> = (0..3).map(|_| recv(&mut lenient).0.verified).collect();
    assert_eq!(marks, [false, true, true]);
    assert_eq!((strict.stats().unverified, lenient.stats().unverified), (1, 1));
    drop((strict, lenient, queue));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((feed, binding));
    memory.assert_gone();
}

/// Proves MEM-3 and NET-6: a frame whose headers are in device memory, are wrong, or are for no
/// socket is dropped and counted under its reason, for any bytes that a peer sends.
#[test]
fn headers_that_are_dropped() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let good = udp4(9, 100);
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = good.clone();
        change(&mut frame);
        let sum = {
            frame[24..26].fill(0);
            let sum: u32 = frame[14..34].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
            !(((sum & 0xffff) + (sum >> 16)) as u16)
        };
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        frame
    };
    // Headers in device memory: those of Ethernet, of IP, of UDP before and behind the port.
    for head in [0, 1, 13, 14, 20, 33, 34, 37, 38, 41] {
        queue.frame(feed.split(&good, head.max(1), VERIFIED));
    }
    assert_eq!(table.stats().headers_in_device, 10);
    assert_eq!(socket.stats().headers_in_device, 2, "the port was readable");
    let fragments = [changed(&|f| f[20] = 0x20), changed(&|f| f[21] = 1)];
    let mut in_v6 = udp6(9, 100);
    in_v6[20] = 44;
    for frame in fragments.iter().chain([&in_v6]) {
        queue.frame(feed.split(frame, 62, VERIFIED));
    }
    assert_eq!(table.stats().fragments, 3);
    let mut broken_sum = good.clone();
    broken_sum[24] ^= 1;
    let malformed = [
        broken_sum,
        changed(&|f| f[14] = 0x44),
        changed(&|f| f[14] = 0x65),
        changed(&|f| f[16..18].copy_from_slice(&19_u16.to_be_bytes())),
        changed(&|f| f[16..18].copy_from_slice(&200_u16.to_be_bytes())),
        changed(&|f| f[38..40].copy_from_slice(&7_u16.to_be_bytes())),
        changed(&|f| f[38..40].copy_from_slice(&109_u16.to_be_bytes())),
        good[..41].to_vec(),
        good[..10].to_vec(),
    ];
    for frame in &malformed {
        queue.frame(feed.split(frame, 42, VERIFIED));
    }
    assert_eq!(table.stats().malformed, malformed.len() as u64);
    let gso = netmem_packet::Gso { kind: netmem_packet::GsoKind::UdpSegment, size: 50, headers: 42, ecn: false };
    queue.frame(feed.split(&good, 42, Meta { gso: Some(gso), ..VERIFIED }));
    queue.frame(feed.split(&changed(&|f| f[23] = 6), 42, VERIFIED));
    queue.frame(feed.split(&changed(&|f| f[12] = 0x81), 42, VERIFIED));
    assert_eq!(table.stats().other, 3);
    queue.frame(feed.split(&udp4(8, 100), 42, VERIFIED));
    assert_eq!((table.stats().no_socket, table.stats().foreign), (1, 0));
    assert_eq!(socket.recv(&mut []), Err(RecvError::Empty));
    assert_eq!(feed.pool.stats().inflight(), 0);
    // Random bytes.
    let mut seed = 1_u64;
    for round in 0..20_000 {
        let mut frame = good.clone();
        for _ in 0..1 + round % 4 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (seed >> 33) as usize % frame.len();
            frame[at] = (seed >> 56) as u8;
        }
        let cut = (seed >> 40) as usize % 140 + 1;
        frame.truncate(cut.max(1));
        let frame = feed.split(&frame, 1 + (seed >> 50) as usize % 100, VERIFIED);
        queue.frame(frame);
        while socket.recv(&mut [Fragment::Empty, Fragment::Empty]).is_ok() {}
    }
    drop((socket, queue));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((feed, binding));
    memory.assert_gone();
}

/// Proves MEM-2 and MEM-4: a page of another binding than the queue's is never taken for one of its
/// own.
#[test]
fn a_queue_with_the_wrong_binding() {
    let worker = worker();
    let ((memory, binding), (others, other)) = (bind(64, &worker), bind(64, &worker));
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&other));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    feed.deliver(&mut queue, 9, 5);
    assert_eq!((table.stats().foreign, socket.recv(&mut [])), (5, Err(RecvError::Empty)));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((socket, queue, feed, binding, other));
    memory.assert_gone();
    others.assert_gone();
}

/// Proves MEM-3: a socket whose queue is full drops and counts datagrams. A port is taken by one
/// socket at a time, and free after the close.
#[test]
fn room_and_ports() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    assert_eq!(table.bind(all(9), &SocketOptions::new().queue(0)).unwrap_err(), FlowBindError::NoRoom);
    let mut socket = table.bind(all(9), &SocketOptions::new().queue(3)).unwrap();
    assert_eq!(table.bind(all(9), &SocketOptions::new()).unwrap_err(), FlowBindError::Taken { local: all(9) });
    let (first, second) = (table.bind(all(0), &SocketOptions::new()), table.bind(all(0), &SocketOptions::new()));
    let (first, second) = (first.unwrap().local_addr().port(), second.unwrap().local_addr().port());
    assert!(first >= 1024 && second >= 1024 && first != second, "{first} {second}");
    let mut queue = table.queue(&binding);
    feed.deliver(&mut queue, 9, 5);
    assert_eq!((socket.stats().queued, socket.stats().queue_full, feed.pool.stats().inflight()), (3, 2, 3));
    token(&mut socket);
    feed.deliver(&mut queue, 9, 2);
    assert_eq!((socket.stats().queued, socket.stats().queue_full), (3, 3));
    drop(socket);
    assert_eq!(feed.pool.stats().inflight(), 0, "received and queued");
    feed.deliver(&mut queue, 9, 1);
    assert_eq!(table.stats().no_socket, 1);
    table.bind(all(9), &SocketOptions::new()).unwrap();
    drop((queue, feed, binding));
    memory.assert_gone();
}

/// Proves MEM-6: mistakes on a socket with real pages: foreign tokens, too many returns, ranges
/// that wrap, too many ranges, too many fragments. Nothing is freed that is not held.
#[test]
fn mistakes() {
    let worker = worker();
    let (memory, binding) = bind(2048, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let mut socket = table.bind(all(9), &SocketOptions::new().queue(2048)).unwrap();
    let (other, mut queue) = (table.bind(all(10), &SocketOptions::new()).unwrap(), table.queue(&binding));
    feed.deliver(&mut queue, 9, 1200);
    let tokens: Vec<_> = (0..1200).map(|_| token(&mut socket)).collect();
    // A socket that never received knows no token.
    assert_eq!(other.returner().return_tokens(&[tokens[0].into()]), Ok(0));
    assert_eq!(other.stats().foreign, 1);
    let returner = socket.returner();
    assert!(returner.return_tokens(&[range(1, 1); MAX_RANGES + 1]).is_err());
    assert_eq!(feed.pool.stats().inflight(), 1200);
    let all = range(tokens.iter().min().unwrap().0, 1025);
    assert_eq!(returner.return_tokens(&[all]), Ok(MAX_FRAGMENTS as usize));
    assert_eq!(returner.return_tokens(&[range(5000, 1024), range(tokens[1199].0, 1)]), Ok(0), "1024 that are invalid");
    assert_eq!((feed.pool.stats().inflight(), socket.stats().foreign), (176, 1024));
    assert_eq!(returner.return_tokens(&[range(u32::MAX, u32::MAX)]), Ok(0));
    assert_eq!(returner.return_tokens(&[range(all.start, 1024)]), Ok(0));
    assert_eq!(socket.stats().excess, 1024);
    drop((socket, other));
    assert_eq!(feed.pool.stats().inflight(), 176, "a handle is left");
    drop(returner);
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((queue, feed, binding));
    memory.assert_gone();
}

/// Proves MEM-6: if two threads return the same tokens of real pages, exactly one of them frees
/// each page, and the page is returned at once.
#[test]
fn two_threads_return_the_same() {
    let worker = worker();
    let (memory, binding) = bind(600, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let mut socket = table.bind(all(9), &SocketOptions::new()).unwrap();
    let mut queue = table.queue(&binding);
    for _ in 0..50 {
        feed.deliver(&mut queue, 9, 500);
        let tokens: Vec<_> = (0..500).map(|_| TokenRange::from(token(&mut socket))).collect();
        let (freed, barrier) = (AtomicUsize::new(0), Barrier::new(2));
        std::thread::scope(|s| {
            for _ in 0..2 {
                let returner = socket.returner();
                let (tokens, freed, barrier) = (&tokens, &freed, &barrier);
                s.spawn(move || {
                    barrier.wait();
                    for some in tokens.chunks(100) {
                        freed.fetch_add(returner.return_tokens(some).unwrap(), Relaxed);
                    }
                });
            }
        });
        assert_eq!((freed.into_inner(), feed.pool.stats().inflight()), (500, 0));
    }
    assert_eq!(socket.stats().excess, 50 * 500);
    drop((socket, queue, feed, binding));
    memory.assert_gone();
}

/// Proves MEM-5: fragments in one page have one token. The page is freed when the token was
/// returned as often as it was received.
#[test]
fn fragments_of_a_page() {
    let worker = worker();
    let (memory, binding) = bind(4, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let four = |feed: &mut Feed, queue: &mut FlowQueue| {
        let mut page = feed.pool.alloc().unwrap();
        for _ in 0..4 {
            let rest = page.split_off(1024);
            let (head, _, meta) = feed.split(&udp4(9, 1000)[..42], 42, VERIFIED).into_parts();
            queue.frame(SplitFrame::new(head, Some(page.freeze_range(0..1000)), meta));
            page = rest;
        }
    };
    four(&mut feed, &mut queue);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let (_, [Fragment::Device { offset, token, .. }, _]) = recv(&mut socket) else { panic!("a fragment") };
        seen.push((offset % 4096, token));
    }
    assert!(seen.iter().zip(0..).all(|(&(offset, token), i)| (offset, token) == (i * 1024, seen[0].1)));
    let (returner, one) = (socket.returner(), TokenRange::from(seen[0].1));
    assert_eq!(returner.return_tokens(&[one; 3]), Ok(3));
    assert_eq!(feed.pool.stats().inflight(), 1);
    assert_eq!(returner.return_tokens(&[one; 3]), Ok(1));
    assert_eq!((feed.pool.stats().inflight(), socket.stats().excess), (0, 2));
    // Closed with a page held three times, and queued once more.
    four(&mut feed, &mut queue);
    (0..3).for_each(|_| _ = token(&mut socket));
    drop((socket, returner));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((queue, feed, binding));
    memory.assert_gone();
}

/// Proves MEM-2 and MEM-7: a binding is unbound with data held by the user and data queued. The
/// queued data can still be received, all pages are returned, and the binding is released while the
/// socket lives on.
#[test]
fn unbound_with_data_held_and_queued() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    feed.deliver(&mut queue, 9, 20);
    let mut tokens: Vec<_> = (0..10).map(|_| token(&mut socket)).collect();
    drop((queue, feed));
    binding.unbind().unwrap();
    tokens.extend((0..5).map(|_| token(&mut socket)));
    let returner = socket.returner();
    let ranges: Vec<_> = tokens.into_iter().map(TokenRange::from).collect();
    assert_eq!(returner.return_tokens(&ranges), Ok(15));
    assert!(memory.descriptors() > 0, "five are queued");
    let last: Vec<_> = (0..5).map(|_| TokenRange::from(token(&mut socket))).collect();
    assert_eq!(socket.stats().bindings, 1);
    assert_eq!(returner.return_tokens(&last), Ok(5));
    assert_eq!(socket.stats().bindings, 0);
    memory.assert_gone();
    assert_eq!(returner.return_tokens(&ranges), Ok(0));
}

/// Proves MEM-7: a socket receives the first datagram of a binding after the binding was unbound.
#[test]
fn first_received_after_unbinding() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    feed.deliver(&mut queue, 9, 2);
    drop((queue, feed, binding));
    let one = token(&mut socket);
    assert_eq!(socket.returner().return_tokens(&[one.into()]), Ok(1));
    assert!(memory.descriptors() > 0);
    drop(socket);
    memory.assert_gone();
}

/// Proves MEM-4: if memory is bound again, it is a new binding. Tokens of the old one are not
/// valid, although sizes and pages are the same.
#[test]
fn bound_again() {
    let worker = worker();
    let memory = Memory::pages(8);
    let table = FlowTable::new(ours());
    let mut socket = table.bind(all(9), &SocketOptions::new()).unwrap();
    let returner = socket.returner();
    let mut old = Vec::new();
    for _ in 0..10 {
        let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
        let (mut feed, mut queue) = (Feed::new(&binding), table.queue(&binding));
        feed.deliver(&mut queue, 9, 8);
        let new: Vec<_> = (0..8).map(|_| TokenRange::from(token(&mut socket))).collect();
        assert!(old.iter().all(|o| !new.contains(o)));
        assert_eq!(returner.return_tokens(&old), Ok(0));
        assert_eq!(feed.pool.stats().inflight(), 8);
        assert_eq!(returner.return_tokens(&new[..4]), Ok(4));
        drop((queue, feed));
        binding.unbind().unwrap();
        assert_eq!(returner.return_tokens(&new), Ok(4));
        old.extend(new);
    }
    assert_eq!(socket.stats().bindings, 0);
    memory.assert_gone();
}

/// Proves MEM-4: one socket receives datagrams of several bindings, and queues change their
/// bindings in between. Equal page numbers of different bindings are not confused.
#[test]
fn several_bindings_while_flows_are_steered() {
    let worker = worker();
    let (memories, bindings): (Vec<_>, Vec<_>) = (0..4).map(|_| bind(16, &worker)).unzip();
    let table = FlowTable::new(ours());
    let mut socket = table.bind(all(9), &SocketOptions::new()).unwrap();
    let mut feeds: Vec<_> = bindings.iter().map(|b| (Feed::new(b), table.queue(b))).collect();
    for round in 0..200_usize {
        for step in 0..8 {
            let (feed, queue) = &mut feeds[(round + step * step) % 4];
            feed.deliver(queue, 9, 1);
        }
        let mut tokens = Vec::new();
        for step in 0..8 {
            let (_, [Fragment::Device { binding, token, .. }, _]) = recv(&mut socket) else { panic!("a fragment") };
            assert_eq!(binding, bindings[(round + step * step) % 4].id());
            tokens.push(TokenRange::from(token));
        }
        tokens.sort_by_key(|t| t.start);
        assert!(tokens.windows(2).all(|w| w[0].start < w[1].start));
        assert_eq!(socket.returner().return_tokens(&tokens), Ok(8));
    }
    assert_eq!(socket.stats().bindings, 4);
    assert!(feeds.iter_mut().all(|(feed, _)| feed.pool.stats().inflight() == 0));
    drop((feeds, bindings, socket));
    memories.iter().for_each(Memory::assert_gone);
}

/// Proves MEM-7: a socket closed with 100,000 tokens out, and more queued.
#[test]
fn closed_with_100_000_tokens_out() {
    let worker = worker();
    let (memory, binding) = bind(101_000, &worker);
    let (table, mut queue) = (FlowTable::new(ours()), None);
    let mut socket = table.bind(all(9), &SocketOptions::new()).unwrap();
    let queue = queue.get_or_insert_with(|| table.queue(&binding));
    let mut feed = Feed::new(&binding);
    for _ in 0..100 {
        feed.deliver(queue, 9, 1000);
        (0..1000).for_each(|_| _ = token(&mut socket));
    }
    feed.deliver(queue, 9, 500);
    assert_eq!(feed.pool.stats().inflight(), 100_500);
    drop(socket);
    assert_eq!(feed.pool.stats().inflight(), 0);
    table.bind(all(10), &SocketOptions::new()).unwrap();
    drop((feed, table));
    drop(binding);
    assert!(memory.descriptors() > 0, "the table's end at the queue holds it");
}

/// Proves POOL-11 and MEM-2: a socket, a returner, the queue's pool, the queue's handler and the
/// binding are dropped in every order.
#[test]
fn every_order_of_ends() {
    let orders = permutations(5);
    assert_eq!(orders.len(), 120);
    for order in orders {
        let worker = worker();
        let (memory, binding) = bind(64, &worker);
        let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
        let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
        feed.deliver(&mut queue, 9, 20);
        (0..10).for_each(|_| _ = token(&mut socket));
        let returner = socket.returner();
        let mut ends: [Option<Box<dyn std::any::Any>>; 5] = [
            Some(Box::new(socket)),
            Some(Box::new(returner)),
            Some(Box::new(feed)),
            Some(Box::new(queue)),
            Some(Box::new(binding)),
        ];
        for (at, which) in order.iter().enumerate() {
            assert!(at == 0 || memory.descriptors() > 0, "{order:?}: gone before the last");
            ends[*which] = None;
        }
        memory.assert_gone();
    }
}

/// Proves MEM-7 and POOL-5: a socket closes while a queue on another thread delivers to it. No page
/// stays out.
#[test]
fn closed_while_a_queue_delivers() {
    let worker = worker();
    let (memory, binding) = bind(512, &worker);
    let table = FlowTable::new(ours());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let (binding, table, stop) = (&binding, &table, &stop);
        let network = s.spawn(move || {
            let (mut feed, mut queue) = (Feed::new(binding), table.queue(binding));
            while !stop.load(Relaxed) {
                feed.deliver(&mut queue, 9, 8);
            }
            feed
        });
        for _ in 0..300 {
            let mut socket = table.bind(all(9), &SocketOptions::new().queue(16)).unwrap();
            until(|| socket.stats().queued > 0);
            let _ = token(&mut socket);
        }
        stop.store(true, Relaxed);
        let mut feed = network.join().unwrap();
        // A datagram that was delivered after the close is dropped when the critical section has
        // ended in which its socket was found.
        until(|| feed.pool.stats().inflight() == 0);
    });
    drop((table, binding));
    memory.assert_gone();
}

/// Proves MEM-6 and MEM-2: a binding is unbound while a queue delivers, a socket receives and
/// another thread returns tokens.
#[test]
fn unbound_while_all_goes_on() {
    for _ in 0..20 {
        let worker = worker();
        let (memory, binding) = bind(256, &worker);
        let table = FlowTable::new(ours());
        let mut socket = table.bind(all(9), &SocketOptions::new().queue(256)).unwrap();
        let (tokens, returned) = std::sync::mpsc::channel::<TokenRange>();
        let returner = socket.returner();
        let mut pool = PoolOptions::new("rx").cache(32).build(binding.provider(), None).unwrap();
        let mut queue = table.queue(&binding);
        let memory_of = binding.reference();
        std::thread::scope(|s| {
            s.spawn(move || {
                let mut heads = HeadsOnly::new();
                while !memory_of.stats().count.eq(&netmem_devmem::CountMode::Atomic) {
                    pool.poll(|napi| {
                        for _ in 0..8 {
                            let Some(page) = napi.alloc() else { break };
                            queue.frame(SplitFrame::new(heads.head(), Some(page.freeze_range(0..1000)), VERIFIED));
                        }
                    });
                }
            });
            s.spawn(move || {
                returned.iter().for_each(|one| assert_eq!(returner.return_tokens(&[one]), Ok(1)));
            });
            let mut binding = Some(binding);
            for n in 0..2000 {
                let mut out = [Fragment::Empty];
                match socket.recv(&mut out) {
                    Ok(_) => {
                        let [Fragment::Device { token, .. }] = out else { panic!("a fragment") };
                        tokens.send(token.into()).unwrap();
                    }
                    Err(error) => assert_eq!(error, RecvError::Empty),
                }
                if n == 1000 {
                    binding.take().unwrap().unbind().unwrap();
                }
            }
            drop(tokens);
        });
        drop(socket);
        memory.assert_gone();
    }
}

/// Headers of datagrams to port 9, with payload to be added.
struct HeadsOnly(netmem_pool::PagePool<netmem_pool::PeerShared>);

impl HeadsOnly {
    fn new() -> Self {
        let region = netmem_pool::RegionOptions::new(64).huge_pages(false).build().unwrap();
        Self(PoolOptions::new("host").build(netmem_pool::RegionProvider::new(region), None).unwrap())
    }

    fn head(&mut self) -> netmem_pool::Frag<netmem_pool::PeerShared> {
        let mut page = self.0.alloc().unwrap();
        page.copy_from(0, &udp4(9, 1000)[..42]).unwrap();
        page.freeze_range(0..42)
    }
}
