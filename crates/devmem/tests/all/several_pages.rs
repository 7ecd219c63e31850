//! Datagrams whose payload is in several pages of device memory: those of a link with long frames.

use crate::memory_common::{Feed, Memory, VERIFIED, all, bind, echoed, ours, peer4, udp4, udp6, until, worker};
use crate::net_common::{Harness, InTests, endpoint};
use netmem_devmem::{Binding, FlowTable, Fragment, Received, RecvError, Socket, SocketOptions, TokenRange};
use netmem_packet::{DevicePayload, MAX_FRAGS, SplitFrame, SplitHandler, TxQueue};
use netmem_virtio::device::port::Echo;
use netmem_virtio::driver::{NetOptions, RxMode, SplitOptions};
use std::array;

/// The most fragments of a datagram: one in host memory, and those in device memory.
const MOST: usize = 1 + MAX_FRAGS;

/// A fragment as a test compares it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Delivered {
    Linear { len: usize },
    Device { offset: u64, len: u32, token: TokenRange },
}

impl Delivered {
    fn of(fragment: &Fragment) -> Self {
        match fragment {
            Fragment::Linear(bytes) => Self::Linear { len: bytes.len() },
            Fragment::Device { offset, len, token, .. } => {
                Self::Device { offset: *offset, len: *len, token: (*token).into() }
            }
            Fragment::Empty => panic!("nothing was received, and counted"),
        }
    }

    fn token(self) -> Option<TokenRange> {
        match self {
            Self::Linear { .. } => None,
            Self::Device { token, .. } => Some(token),
        }
    }
}

/// Receives with room for so many fragments.
fn recv(socket: &mut Socket, room: usize) -> Result<(Received, Vec<Delivered>), RecvError> {
    let mut out: [Fragment; MOST] = array::from_fn(|_| Fragment::Empty);
    let received = socket.recv(&mut out[..room])?;
    assert!(out[received.fragments..].iter().all(|rest| matches!(rest, Fragment::Empty)));
    Ok((received, out[..received.fragments].iter().map(Delivered::of).collect()))
}

/// The parts of a datagram that begins with `linear` bytes in the head of `frame`, whose pages have
/// the next `len` bytes. The binding must be the only one of its socket.
fn expected(frame: &SplitFrame, linear: usize, mut len: usize) -> Vec<Delivered> {
    let mut parts: Vec<_> = (linear > 0).then_some(Delivered::Linear { len: linear }).into_iter().collect();
    for page in frame.payload().fragments() {
        let here = page.len().min(len);
        if here > 0 {
            let token = TokenRange { start: page.index() + 1, count: 1 };
            parts.push(Delivered::Device { offset: page.file_offset(), len: here as u32, token });
        }
        len -= here;
    }
    assert_eq!(len, 0);
    parts
}

/// Proves MEM-3: a datagram is delivered from up to 17 pages, in order, with a token for each page.
/// Bytes in host memory come first. Padding is not delivered, and its pages are returned at once.
#[test]
fn a_datagram_in_several_pages() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let pages: [&[usize]; 6] = [&[4096, 4096, 780], &[1, 1], &[4096, 1], &[4096; 2], &[100; 16], &[3000; MAX_FRAGS]];
    for (pages, linear) in pages.into_iter().flat_map(|pages| [(pages, 0), (pages, 1), (pages, 72)]) {
        for (frame, headers) in
            [(udp4(9, linear + pages.iter().sum::<usize>()), 42), (udp6(9, linear + pages.iter().sum::<usize>()), 62)]
        {
            let frame = feed.in_pages(&frame, headers + linear, pages, VERIFIED);
            let parts = expected(&frame, linear, pages.iter().sum());
            queue.frame(frame);
            let (received, got) = recv(&mut socket, MOST).unwrap();
            assert_eq!((received.fragments, received.end, got), (parts.len(), true, parts.clone()));
            let tokens: Vec<_> = parts.into_iter().filter_map(Delivered::token).collect();
            assert_eq!(socket.returner().return_tokens(&tokens), Ok(pages.len()));
            assert_eq!(feed.pool.stats().inflight(), 0);
        }
    }
    // The datagram ends in a page before the last one, in the first one, or in the head.
    for (len, linear, held) in [(5000, 0, 2), (4097, 0, 2), (4096, 0, 1), (100, 0, 1), (100, 100, 0)] {
        let mut padded = udp4(9, len);
        padded.resize(42 + linear + 3 * 4096, 0);
        let frame = feed.in_pages(&padded, 42 + linear, &[4096; 3], VERIFIED);
        let parts = expected(&frame, linear, len - linear);
        queue.frame(frame);
        assert_eq!(feed.pool.stats().inflight(), held, "{len} bytes");
        let (received, got) = recv(&mut socket, MOST).unwrap();
        assert_eq!((received.peer, received.end, got), (peer4(), true, parts.clone()));
        let tokens: Vec<_> = parts.into_iter().filter_map(Delivered::token).collect();
        assert_eq!(socket.returner().return_tokens(&tokens), Ok(held as usize));
    }
    assert_eq!((socket.stats().fragments, table.stats()), (2 * 3 * (3 + 2 + 2 + 2 + 16 + 17) + 6, Default::default()));
    drop((socket, queue));
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((feed, binding));
    memory.assert_gone();
}

/// Proves MEM-3: with room for any number of fragments, each call continues where the last one has
/// ended, and the fragments that were not received have no token. A close returns what was received
/// and what was not.
#[test]
fn calls_with_little_room_receive_the_rest_in_order() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    for (linear, room) in [0, 30].into_iter().flat_map(|linear| (1..=7).map(move |room| (linear, room))) {
        let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
        let returner = socket.returner();
        // The whole datagram, and then one of which only the first call is made.
        for whole in [true, false] {
            let frame = feed.in_pages(&udp4(9, linear + 5 * 200), 42 + linear, &[200; 5], VERIFIED);
            let parts = expected(&frame, linear, 5 * 200);
            queue.frame(frame);
            feed.deliver(&mut queue, 9, 1);
            assert_eq!(recv(&mut socket, 0).unwrap().0.fragments, 0);
            let calls = if whole { MOST } else { 1 };
            for (call, chunk) in parts.chunks(room).enumerate().take(calls) {
                let rest: Vec<_> = parts[call * room..].iter().copied().filter_map(Delivered::token).collect();
                assert_eq!(returner.return_tokens(&rest), Ok(0), "nothing of the rest has a token");
                let (received, got) = recv(&mut socket, room).unwrap();
                assert_eq!((got, received.peer), (chunk.to_vec(), peer4()));
                assert_eq!(received.end, (call + 1) * room >= parts.len());
            }
            if whole {
                let (received, got) = recv(&mut socket, room).unwrap();
                assert!(received.end && got.len() == 1, "the next datagram follows");
                let tokens: Vec<_> = parts.into_iter().chain(got).filter_map(Delivered::token).collect();
                assert_eq!(returner.return_tokens(&tokens), Ok(6));
            }
        }
        drop((socket, returner, queue));
        assert_eq!(feed.pool.stats().inflight(), 0);
    }
    drop((feed, binding));
    memory.assert_gone();
}

/// Proves MEM-2 and MEM-7: a datagram with a page of another binding is dropped as a whole, at
/// whichever place the page is. A datagram counts once towards the room of a socket, and all of its
/// pages are returned if there is no room.
#[test]
fn pages_of_what_is_not_delivered_are_returned() {
    let worker = worker();
    let ((memory, binding), (others, other)) = (bind(64, &worker), bind(64, &worker));
    let (table, mut feed, mut foreign) = (FlowTable::new(ours()), Feed::new(&binding), Feed::new(&other));
    let mut socket = table.bind(all(9), &SocketOptions::new().queue(2)).unwrap();
    let mut queue = table.queue(&binding);
    for wrong in 0..5 {
        let (head, _, meta) = feed.in_pages(&udp4(9, 5 * 200), 42, &[200; 5], VERIFIED).into_parts();
        let mut payload = DevicePayload::default();
        for n in 0..5 {
            let pool = if n == wrong { &mut foreign.pool } else { &mut feed.pool };
            payload.push(pool.alloc().unwrap().freeze_range(0..200)).unwrap();
        }
        queue.frame(SplitFrame::new(head, payload, meta));
        assert_eq!((table.stats().foreign, recv(&mut socket, MOST)), (wrong + 1, Err(RecvError::Empty)));
        assert_eq!((feed.pool.stats().inflight(), foreign.pool.stats().inflight()), (0, 0));
    }
    for _ in 0..3 {
        queue.frame(feed.in_pages(&udp4(9, 5 * 200), 42, &[200; 5], VERIFIED));
    }
    // The last one is for no socket.
    queue.frame(feed.in_pages(&udp4(8, 5 * 200), 42, &[200; 5], VERIFIED));
    let stats = socket.stats();
    assert_eq!((stats.queued, stats.queue_full, feed.pool.stats().inflight()), (2, 1, 10));
    drop(socket);
    assert_eq!(feed.pool.stats().inflight(), 0);
    drop((queue, feed, foreign, binding, other));
    memory.assert_gone();
    others.assert_gone();
}

/// Proves NET-6: whatever a back end writes, and however it splits a frame, a datagram that is
/// delivered has as many bytes as its headers say, and all pages are returned.
#[test]
fn any_bytes_in_any_pages() {
    let worker = worker();
    let (memory, binding) = bind(64, &worker);
    let (table, mut feed) = (FlowTable::new(ours()), Feed::new(&binding));
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let (mut rng, mut several) = (fastrand::Rng::with_seed(5), 0);
    for round in 0..20_000 {
        let mut frame = if rng.bool() { udp4(9, rng.usize(..300)) } else { udp6(9, rng.usize(..300)) };
        for _ in 0..rng.usize(..3) {
            let at = rng.usize(..80.min(frame.len()));
            frame[at] = rng.u8(..);
        }
        frame.resize(frame.len() + rng.usize(..3) * 20, 0);
        // More often than not, the headers are in host memory.
        let head = if rng.u8(..4) > 0 { 62.min(frame.len()) } else { rng.usize(1..=frame.len()) };
        let (mut pages, mut rest) = (Vec::new(), frame.len() - head);
        while rest > 0 {
            let here = if pages.len() + 1 == MAX_FRAGS { rest } else { rng.usize(1..=rest) };
            pages.push(here);
            rest -= here;
        }
        queue.frame(feed.in_pages(&frame, head, &pages, VERIFIED));
        let (mut bytes, mut tokens, mut end) = (0, Vec::new(), true);
        while let Ok((received, parts)) = recv(&mut socket, rng.usize(1..=MOST)) {
            for part in parts {
                tokens.extend(part.token());
                bytes += match part {
                    Delivered::Linear { len } => len,
                    Delivered::Device { len, .. } => len as usize,
                };
            }
            end = received.end;
            if end {
                let at = if frame[12] == 8 { 14 + usize::from(frame[14] & 15) * 4 } else { 54 };
                let udp = usize::from(u16::from_be_bytes([frame[at + 4], frame[at + 5]]));
                assert_eq!(bytes, udp - 8, "round {round}");
            }
        }
        several += usize::from(tokens.len() > 1);
        assert!(end && socket.returner().return_tokens(&tokens) == Ok(tokens.len()), "round {round}");
        assert_eq!(feed.pool.stats().inflight(), 0, "round {round}");
    }
    assert!(several > 1000, "{several} datagrams were in several pages");
    drop((socket, queue, feed, binding));
    memory.assert_gone();
}

/// Proves MEM-3 and MEM-8: datagrams of up to 8,972 bytes, sent from one place or from several,
/// arrive in as many pages as they need and as they were sent.
#[test]
fn long_frames_there_and_back() {
    let worker = worker();
    let memory = Memory::pages(1024);
    let binding = Binding::new(memory.fd(), 0, &worker).unwrap();
    let region = binding.region().clone();
    let mut harness = Harness::with(vec![Echo::new()], SplitOptions::UDP_V4, |_| {
        NetOptions::new(RxMode::Big).max_frame(9014).tx_pages(64).device_memory(region)
    });
    harness.net.attach(&binding, &[0]).unwrap();
    let table = FlowTable::new(echoed());
    let (mut socket, mut queue) = (table.bind(all(9), &SocketOptions::new()).unwrap(), table.queue(&binding));
    let mut sender = harness.sender(&binding, endpoint(2, "10.0.0.1:7"), endpoint(4, "10.0.0.2:9")).mtu(9000);
    let (mut rng, mut tx, place) = (fastrand::Rng::with_seed(1), harness.tx.pop().unwrap(), 1000 * 4096);
    for round in 0..600 {
        let len = match round {
            0 => 8972,
            1 => 4096,
            2 => 4097,
            _ => rng.usize(1..=8972),
        };
        let mut sent = vec![0; len];
        rng.fill(&mut sent);
        memory.write_all_at(&sent, place).unwrap();
        let cut = rng.usize(..len);
        let parts = [(place, cut as u32), (place + cut as u64, (len - cut) as u32)];
        sender.send(&mut tx, &parts[usize::from(cut == 0)..]).unwrap();
        tx.flush();
        let mut out = None;
        until(|| {
            harness.queues().poll(0, &mut queue);
            tx.complete();
            out = match recv(&mut socket, MOST) {
                Err(RecvError::Empty) => None,
                other => Some(other.unwrap()),
            };
            out.is_some()
        });
        let (received, got) = out.unwrap();
        assert!(received.end && received.verified && got.len() == len.div_ceil(4096), "{len} bytes: {got:?}");
        let mut bytes = Vec::new();
        for part in &got {
            let Delivered::Device { offset, len, .. } = *part else { panic!("{got:?}") };
            let at = bytes.len();
            bytes.resize(at + len as usize, 0);
            memory.read_exact_at(&mut bytes[at..], offset).unwrap();
        }
        assert!(bytes == sent, "round {round}: {len} bytes are not as they were sent");
        let tokens: Vec<_> = got.iter().copied().filter_map(Delivered::token).collect();
        assert_eq!(socket.returner().return_tokens(&tokens), Ok(got.len()));
    }
    harness.tx.push(tx);
    harness.net.unbind(binding).unwrap();
    drop((sender, queue, socket, harness));
    memory.assert_gone();
}
