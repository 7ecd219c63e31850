//! Streams in device memory between two stacks, over a link with a seed. The tests compare every
//! byte, and check tokens, budgets, sending and ends.

use crate::memory_common::{bind, worker};
use crate::stream_link::{Pair, Side};
use netmem_devmem::TokenRange;
use netmem_devmem::stream::{DeviceStream, StreamError, StreamFragment, StreamSendError};
use netmem_inet::SocketError;
use netmem_inet::tcp::Config;
use netmem_packet::{Armed, Wait};
use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// Byte `at` of a stream.
fn byte(seed: u64, at: u64) -> u8 {
    (seed.wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8
}

fn bytes(seed: u64, at: u64, len: usize) -> Vec<u8> {
    (at..at + len as u64).map(|at| byte(seed, at)).collect()
}

/// Receives all queued payload, and compares the bytes in the device's memory with the stream.
/// Returns the tokens and the number of bytes.
#[track_caller]
fn receive(side: &Side, stream: &mut DeviceStream, seed: u64, position: &mut u64) -> (Vec<TokenRange>, bool) {
    let mut held = Vec::new();
    loop {
        let mut places = [const { StreamFragment::Empty }; 5];
        let n = match stream.recv(&mut places) {
            Ok(0) => return (held, true),
            Ok(n) => n,
            Err(StreamError::Socket(SocketError::WouldBlock)) => return (held, false),
            Err(error) => panic!("{error}"),
        };
        for place in &places[..n] {
            let got = match place {
                StreamFragment::Device { offset, len, tokens, .. } => {
                    assert!(*len <= 65536 && tokens.count >= (*len).div_ceil(4096));
                    held.push(*tokens);
                    side.read(*offset, *len)
                }
                StreamFragment::Linear(linear) => linear.to_vec(),
                StreamFragment::Empty => panic!("it counts as filled"),
            };
            assert!(got == bytes(seed, *position, got.len()), "at {position}");
            *position += got.len() as u64;
        }
    }
}

/// One direction of a transfer: ranges of random lengths, with bytes of the application between
/// them. As soon as a range may be used again, its memory is overwritten.
struct Sender {
    seed: u64,
    rng: fastrand::Rng,
    sent: u64,
    total: u64,
    free: Vec<u64>,
    places: HashMap<u64, u64>,
    mixed: bool,
}

const PLACE: u64 = 64 << 10;

impl Sender {
    fn new(seed: u64, total: u64, first: u64, mixed: bool) -> Self {
        let free = (0..8).map(|n| first + n * PLACE).collect();
        Self { seed, rng: fastrand::Rng::with_seed(seed), sent: 0, total, free, places: HashMap::new(), mixed }
    }

    fn turn(&mut self, side: &Side, stream: &mut DeviceStream) {
        while let Some(sent) = stream.sent() {
            // If the device still read the range, it would send the bytes that are written here.
            side.write(sent.offset, &vec![0xee; sent.len as usize]);
            self.free.push(self.places.remove(&sent.range).unwrap());
        }
        while self.sent < self.total {
            if self.mixed && self.rng.bool() {
                let len = self.rng.usize(1..200).min((self.total - self.sent) as usize);
                match stream.write(&bytes(self.seed, self.sent, len)) {
                    Ok(n) => self.sent += n as u64,
                    Err(error) => return assert_eq!(error, SocketError::WouldBlock),
                }
                continue;
            }
            let Some(place) = self.free.pop() else { return };
            let len = self.rng.u64(1..=PLACE).min(self.total - self.sent) as u32;
            side.write(place, &bytes(self.seed, self.sent, len as usize));
            let more = self.rng.bool();
            match stream.send(side.binding.as_ref().unwrap().as_ref(), place, len, more) {
                Ok(range) => {
                    self.places.insert(range, place);
                    self.sent += u64::from(len);
                }
                Err(StreamSendError::Socket(SocketError::WouldBlock)) => return self.free.push(place),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Proves MEM-9: streams both ways at once between memories that no process maps, over a link that
/// loses, delays, reorders, repeats and damages frames. Each byte is compared on the device's side.
/// At the end nothing is held.
fn both_ways(link: &str, cuts: bool, change: impl Fn(&Side)) {
    const TOTAL: u64 = 500_000;
    let mut pair = Pair::with(1024, 400, link, cuts);
    change(&pair.near);
    change(&pair.far);
    let config = Config { receive_buffer: 300_000, ..Config::default() };
    let (mut client, mut server) = pair.connect(&config, &config);
    let mut senders = [Sender::new(1, TOTAL, 2 << 20, true), Sender::new(2, TOTAL, 3 << 20, true)];
    let (mut got, mut held) = ([0; 2], [Vec::new(), Vec::new()]);
    let mut ended = [false; 2];
    let mut rng = fastrand::Rng::with_seed(3);
    pair.until(|pair| {
        for (n, (side, stream)) in [(&pair.near, &mut client), (&pair.far, &mut server)].into_iter().enumerate() {
            let sender = &mut senders[n];
            sender.turn(side, stream);
            if sender.sent == TOTAL {
                stream.tcp_mut().shutdown();
            }
            if !ended[n] {
                let (tokens, end) = receive(side, stream, [2, 1][n], &mut got[n]);
                held[n].extend(tokens);
                ended[n] = end;
            }
            // Tokens are returned late, and in random order.
            while held[n].len() > if ended[n] { 0 } else { 30 } {
                let tokens: TokenRange = held[n].swap_remove(rng.usize(..held[n].len()));
                assert_eq!(stream.returner().return_tokens(&[tokens]), Ok(tokens.count as usize));
            }
        }
        ended == [true; 2] && senders.iter().all(|sender| sender.places.is_empty())
    });
    assert_eq!(got, [TOTAL; 2]);
    for (side, stream) in [(&pair.near, &client), (&pair.far, &server)] {
        let (stats, stream) = (side.stack.stats(), stream.stats());
        assert_eq!((side.stack.pages(), stream.out, stream.excess, stream.foreign), (0, 0, 0, 0));
        assert_eq!((stats.refused, stats.unreadable, stats.copied_received), (0, 0, 0));
    }
    drop((client, server));
    pair.pass(Duration::from_millis(10));
    for side in [&mut pair.near, &mut pair.far] {
        assert_eq!(side.stack.queues().1.queue().in_flight(), 0);
        let pool = &mut side.stack.queues().0.queue().device;
        pool.reclaim();
        assert_eq!(pool.stats().inflight(), 0);
    }
    let memories = [pair.near.memory.clone(), pair.far.memory.clone()];
    drop(pair);
    memories.iter().for_each(|memory| memory.assert_gone());
}

#[test]
fn both_ways_over_a_good_link() {
    both_ways("delay=1ms", false, |_| {});
}

#[test]
fn both_ways_over_a_bad_link() {
    both_ways("loss=2%,delay=3ms,jitter=1ms,reorder=2%,duplicate=1%,corrupt=1%,seed=7", false, |_| {});
}

#[test]
fn both_ways_with_a_fixed_split() {
    both_ways("loss=1%,delay=1ms,seed=8", false, |side| side.nic.borrow_mut().head = Some(94));
}

#[test]
fn both_ways_with_large_segments() {
    both_ways("loss=1%,delay=1ms,seed=9", true, |_| {});
}

/// Sends `len` bytes of a stream from the near side's memory, in one range.
#[track_caller]
fn send(pair: &Pair, stream: &mut DeviceStream, seed: u64, at: u64, len: u32) -> u64 {
    let (side, place) = (&pair.near, 2 << 20);
    side.write(place + at, &bytes(seed, at, len as usize));
    stream.send(side.binding.as_ref().unwrap().as_ref(), place + at, len, false).unwrap()
}

fn small(held: u32, cuts: bool) -> (Pair, DeviceStream, DeviceStream) {
    let mut pair = Pair::with(1024, held, "delay=1ms", cuts);
    let config = Config { receive_buffer: 300_000, fixed_window: true, ..Config::default() };
    let (client, server) = pair.connect(&config, &config);
    (pair, client, server)
}

/// Returns the tokens of all queued fragments.
fn tokens(side: &Side, stream: &mut DeviceStream, position: &mut u64) -> Vec<TokenRange> {
    receive(side, stream, 1, position).0
}

/// Proves MEM-5, MEM-6 and MEM-7 of streams: a hundred streams share one table. A token belongs to
/// one stream. When the last handle of a stream is dropped, the pages that it holds are given back.
#[test]
fn streams_share_one_table_and_no_tokens() {
    let mut pair = Pair::new(1024, 900, "delay=1ms");
    let config = Config::default();
    let mut streams: Vec<_> = (0..100).map(|_| pair.connect(&config, &config)).collect();
    let fresh = pair.far.streams.stats();
    assert_eq!((fresh.bindings, fresh.bytes), (0, 0), "an accepted stream has no tokens");
    for (client, _) in &mut streams {
        send(&pair, client, 1, 0, 5000);
    }
    pair.pass(Duration::from_millis(50));
    let mut held = Vec::new();
    for (_, server) in &mut streams {
        held.push(tokens(&pair.far, server, &mut 0));
    }
    let stats = pair.far.streams.stats();
    // The numbers of 16 pages are 192 bytes.
    assert_eq!(stats.bindings, 1);
    assert!(
        (400 / 16 * 192..=1024 / 16 * 192).contains(&stats.bytes),
        "{} bytes, for any number of streams",
        stats.bytes
    );
    assert_eq!(pair.far.stack.pages(), 400, "four segments each");
    // Each returns the tokens of the next one.
    let returners: Vec<_> = streams.iter().map(|(_, server)| server.returner()).collect();
    for (n, returner) in returners.iter().enumerate() {
        assert_eq!(returner.return_tokens(&held[(n + 1) % 100]), Ok(0));
    }
    assert!(streams.iter().all(|(_, server)| server.stats().excess == 4 && server.stats().out == 4));
    assert_eq!(pair.far.stack.pages(), 400);
    // Tokens of no binding.
    assert_eq!(
        returners[0].return_tokens(&[TokenRange { start: 5000, count: 3 }, TokenRange { start: 0, count: 1 }]),
        Ok(0)
    );
    assert_eq!(streams[0].1.stats().foreign, 4);
    // Half of the streams return all their tokens twice.
    for (returner, held) in returners.iter().zip(&held).take(50) {
        assert_eq!(returner.return_tokens(held), Ok(4));
        assert_eq!(returner.return_tokens(held), Ok(0));
    }
    assert_eq!(pair.far.stack.pages(), 200);
    // The other streams are dropped: first the streams, and then their last handles.
    streams.clear();
    pair.pass(Duration::from_millis(50));
    assert_eq!(pair.far.stack.pages(), 200);
    drop(returners);
    assert_eq!(pair.far.stack.pages(), 0);
    let pool = &mut pair.far.stack.queues().0.queue().device;
    pool.reclaim();
    assert_eq!(pool.stats().inflight(), 0);
}

/// Proves MEM-3 of streams: a token exists once its fragment was delivered, and a short receive
/// leaves nothing behind.
#[test]
fn a_short_receive_leaves_nothing_behind() {
    let (mut pair, mut client, mut server) = small(400, false);
    send(&pair, &mut client, 1, 0, 14_480);
    pair.until(|_| server.tcp().readable() == 14_480);
    let (returner, mut position) = (server.returner(), 0);
    assert_eq!(server.recv(&mut []), Err(StreamError::Socket(SocketError::WouldBlock)));
    assert_eq!(returner.return_tokens(&[TokenRange { start: 1, count: 1024 }]), Ok(0), "no token was delivered");
    for n in 1..=10 {
        let mut one = [StreamFragment::Empty];
        assert_eq!(server.recv(&mut one), Ok(1));
        let [StreamFragment::Device { offset, len, tokens, .. }] = one else { panic!("in device memory") };
        assert_eq!(pair.far.read(offset, len), bytes(1, position, len as usize));
        position += u64::from(len);
        assert_eq!((len, tokens.count, server.stats().out), (1448, 1, n));
    }
    assert_eq!(
        returner.return_tokens(&[TokenRange { start: 1, count: 1024 }]),
        Ok(10),
        "the tokens that were delivered"
    );
    assert_eq!((pair.far.stack.pages(), server.stats().excess), (0, 1024 + 1014));
}

/// A user that keeps pages closes the window. When another thread returns them, the stack is woken,
/// and the window opens before the peer probes. Acknowledgements are processed all the time.
#[test]
fn returning_tokens_opens_the_window() {
    let (mut pair, mut client, mut server) = small(100, false);
    send(&pair, &mut client, 1, 0, 400_000);
    let (mut position, mut held) = (0, Vec::new());
    for _ in 0..500 {
        held.extend(tokens(&pair.far, &mut server, &mut position));
        pair.pass(Duration::from_millis(1));
    }
    let full = pair.far.stack.pages();
    assert!((90..=101).contains(&full) && pair.far.nic.borrow().no_page == 0, "{full} pages");
    // In the other direction data is acknowledged, although no page is free for payload.
    pair.far.write(0, &bytes(2, 0, 50_000));
    server.send(pair.far.binding.as_ref().unwrap().as_ref(), 0, 50_000, false).unwrap();
    let mut back = 0;
    pair.until(|pair| {
        let (tokens, _) = receive(&pair.near, &mut client, 2, &mut back);
        client.returner().return_tokens(&tokens).unwrap();
        server.sent().is_some()
    });
    pair.pass(Duration::from_millis(100));
    // Between two probes.
    let before = position;
    while pair.turn() {}
    assert_eq!(pair.far.stack.arm().unwrap(), Armed::Waits);
    let returner = server.returner();
    std::thread::spawn(move || held.chunks(100).for_each(|held| _ = returner.return_tokens(held).unwrap()))
        .join()
        .unwrap();
    assert_eq!(pair.far.stack.arm().unwrap(), Armed::Work, "the stack was woken");
    // Less than the time to the next probe.
    pair.pass(Duration::from_millis(20));
    tokens(&pair.far, &mut server, &mut position);
    assert!(position > before, "the window opened");
}

/// Proves MEM-8 of streams: a range may be used again when it is acknowledged and the device is
/// done with it, and not before.
#[test]
fn a_range_is_held_until_the_device_is_done_too() {
    let (mut pair, mut client, mut server) = small(400, false);
    pair.near.nic.borrow_mut().completes = false;
    let range = send(&pair, &mut client, 1, 0, 10_000);
    let mut position = 0;
    pair.until(|pair| {
        tokens(&pair.far, &mut server, &mut position);
        position == 10_000
    });
    pair.pass(Duration::from_millis(100));
    assert_eq!(client.tcp().room(), Config::default().send.send_buffer, "acknowledged");
    assert_eq!((client.sent(), pair.near.stack.queues().1.queue().in_flight()), (None, 7));
    pair.near.nic.borrow_mut().completes = true;
    pair.pass(Duration::from_millis(2));
    let sent = client.sent().unwrap();
    assert_eq!((sent.range, sent.offset, sent.len, client.sent()), (range, 2 << 20, 10_000, None));
}

/// Proves MEM-8 and MEM-2 of streams: both sides unbind with data queued, held, in flight, lost and
/// not sent yet. Ranges that were passed to `send` before are sent completely, and again if they
/// are lost. No new range is sent. Received payload stays valid.
#[test]
fn unbound_with_data_everywhere() {
    let mut pair = Pair::new(1024, 400, "loss=5%,delay=2ms,seed=3");
    let config = Config { receive_buffer: 300_000, ..Config::default() };
    let (mut client, mut server) = pair.connect(&config, &config);
    for n in 0..8 {
        send(&pair, &mut client, 1, n * 25_000, 25_000);
    }
    let (mut position, mut held) = (0, Vec::new());
    pair.until(|pair| {
        if position < 10_000 {
            held.extend(tokens(&pair.far, &mut server, &mut position));
        }
        position > 0 && server.tcp().readable() > 10_000
    });
    let (near, far) = (pair.near.binding.take().unwrap(), pair.far.binding.take().unwrap());
    let (memory, id) = (near.reference(), near.id());
    drop(near);
    let refused = client.send(&memory, 0, 10, false);
    assert!(matches!(refused, Err(StreamSendError::Unbound { binding }) if binding == id), "{refused:?}");
    let (mut ranges, lost) = (Vec::new(), pair.lost());
    pair.until(|pair| {
        held.extend(tokens(&pair.far, &mut server, &mut position));
        ranges.extend(std::iter::from_fn(|| client.sent()).map(|sent| sent.range));
        position == 200_000 && ranges.len() == 8
    });
    assert!(pair.lost() > lost, "something was sent again");
    // On the receiving side, held and queued pages are returned, and the binding is released.
    drop((far, memory));
    held.chunks(100).for_each(|held| assert!(server.returner().return_tokens(held).unwrap() > 0));
    drop((client, server));
    pair.pass(Duration::from_millis(100));
    let memories = [pair.near.memory.clone(), pair.far.memory.clone()];
    drop(pair);
    memories.iter().for_each(|memory| memory.assert_gone());
}

/// Proves MEM-10 of streams: a segment that the device has not verified is not acknowledged. The
/// user is told once, with the peer's address.
#[test]
fn unverified_payload_is_not_acknowledged() {
    let (mut pair, mut client, mut server) = small(400, false);
    pair.far.nic.borrow_mut().verifies = false;
    send(&pair, &mut client, 1, 0, 20_000);
    let mut places = [StreamFragment::Empty];
    let mut told = Vec::new();
    for _ in 0..3000 {
        pair.pass(Duration::from_millis(1));
        match server.recv(&mut places) {
            Err(StreamError::Socket(SocketError::WouldBlock)) => {}
            other => told.push(other),
        }
    }
    let dropped = pair.far.stack.stats().unverified;
    let [Err(StreamError::Unverified { peer, frames })] = told[..] else { panic!("{told:?}") };
    assert!(peer == client.tcp().local_addr() && (3..=dropped).contains(&frames), "{frames} of {dropped}");
    assert_eq!((client.sent(), pair.far.stack.pages()), (None, 0));
    // The stack computes the checksum of linear payload itself, so that payload is still received.
    pair.far.nic.borrow_mut().verifies = true;
    let mut position = 0;
    pair.until(|pair| {
        tokens(&pair.far, &mut server, &mut position);
        position == 20_000 && client.sent().is_some()
    });
    assert_eq!(server.stats().unverified, 0);
}

/// Payload of a stream is linear if its frames are in host memory. A datagram in host memory is
/// received; a datagram in device memory is dropped.
#[test]
fn frames_in_host_memory_arrive_as_linear() {
    let (mut pair, mut client, mut server) = small(400, false);
    pair.far.nic.borrow_mut().head = Some(2000);
    pair.far.nic.borrow_mut().verifies = false;
    send(&pair, &mut client, 1, 0, 100_000);
    let mut position = 0;
    pair.until(|pair| {
        tokens(&pair.far, &mut server, &mut position);
        position == 100_000
    });
    assert_eq!((server.stats().linear_bytes, server.stats().device_bytes), (100_000, 0));
    let [near, far] = [&pair.near, &pair.far].map(|side| side.streams.sockets().bind(([0; 4], 9).into()).unwrap());
    let (mut near, mut far) = (near, far);
    near.send_to(b"a datagram", ([10, 0, 0, 2], 9).into()).unwrap();
    let mut places = [netmem_inet::Fragment::default()];
    pair.until(|_| far.recv_from(&mut places).is_ok());
    assert_eq!(places[0].to_vec(), b"a datagram");
    // A datagram in device memory cannot be read: the stack's sockets receive datagrams in host
    // memory only.
    pair.far.nic.borrow_mut().head = None;
    pair.far.nic.borrow_mut().verifies = true;
    near.send_to(b"a datagram", ([10, 0, 0, 2], 9).into()).unwrap();
    pair.pass(Duration::from_millis(10));
    assert_eq!(
        (far.recv_from(&mut places).err(), pair.far.stack.stats().unreadable),
        (Some(SocketError::WouldBlock), 1)
    );
}

/// If the device is gone, each connection ends with that error. Received payload can be read, and
/// `sent` returns the ranges.
#[test]
fn a_device_that_is_gone() {
    let (mut pair, mut client, mut server) = small(400, false);
    let range = send(&pair, &mut client, 1, 0, 100_000);
    pair.until(|_| server.tcp().readable() > 5000);
    pair.near.stack.handle_device_gone();
    pair.far.stack.handle_device_gone();
    pair.pass(Duration::from_millis(5));
    let gone = SocketError::Closed(netmem_inet::tcp::Error::DeviceGone);
    assert_eq!(client.recv(&mut [StreamFragment::Empty]), Err(gone.into()));
    assert!(matches!(
        client.send(pair.near.binding.as_ref().unwrap().as_ref(), 0, 1, false),
        Err(StreamSendError::Socket(error)) if error == gone
    ));
    assert_eq!((client.sent().map(|sent| sent.range), client.sent()), (Some(range), None));
    let mut places = [const { StreamFragment::Empty }; 100];
    let n = server.recv(&mut places).unwrap();
    assert!(n > 3);
    assert_eq!(server.recv(&mut places), Err(gone.into()));
}

/// Consecutive pages are one extent, with a token for each page.
#[test]
fn pages_that_follow_each_other_are_one_extent() {
    let (mut pair, mut client, mut server) = small(400, true);
    send(&pair, &mut client, 1, 0, 200_000);
    let (returner, mut position, mut most) = (server.returner(), 0, 0);
    pair.until(|pair| {
        for tokens in tokens(&pair.far, &mut server, &mut position) {
            most = most.max(tokens.count);
            let one = TokenRange { start: tokens.start + tokens.count / 2, count: 1 };
            assert_eq!(returner.return_tokens(&[one]), Ok(1));
            assert_eq!(returner.return_tokens(&[tokens]), Ok(tokens.count as usize - 1));
        }
        position == 200_000
    });
    assert!(most > 1, "no extent has several pages");
    assert_eq!((pair.far.stack.pages(), server.stats().out), (0, 0));
}

/// If other holders have all pages of a binding, payload is dropped, but the acknowledgement in its
/// frame is processed.
#[test]
fn without_pages_acknowledgements_get_in() {
    let (mut pair, mut client, mut server) = small(400, false);
    let pool = &mut pair.far.stack.queues().0.queue().device;
    let taken: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
    send(&pair, &mut client, 1, 0, 100_000);
    pair.far.write(0, &bytes(2, 0, 100_000));
    server.send(pair.far.binding.as_ref().unwrap().as_ref(), 0, 100_000, false).unwrap();
    let mut back = 0;
    pair.until(|pair| {
        let (tokens, _) = receive(&pair.near, &mut client, 2, &mut back);
        client.returner().return_tokens(&tokens).unwrap();
        server.sent().is_some()
    });
    assert!(pair.far.nic.borrow().no_page > 0 && server.tcp().readable() == 0 && client.sent().is_none());
    drop(taken);
    let mut position = 0;
    pair.until(|pair| {
        tokens(&pair.far, &mut server, &mut position);
        position == 100_000
    });
    assert_eq!(pair.far.stack.stats().malformed, 0);
}

/// Frames in a binding that was not added are dropped and counted. A binding can be added while the
/// stack is in a poll, after the stack has read the list of bindings: the frames of this poll are
/// delivered. The connection goes on, with fragments of both bindings.
#[test]
fn a_binding_that_is_added_in_a_poll() {
    let (mut pair, mut client, mut server) = small(400, false);
    send(&pair, &mut client, 1, 0, 20_000);
    let (returner, mut position) = (server.returner(), 0);
    pair.until(|pair| {
        returner.return_tokens(&tokens(&pair.far, &mut server, &mut position)).unwrap();
        position == 20_000
    });
    let (memory, binding) = bind(1024, &worker());
    let (memory, binding) = (Rc::new(memory), Rc::new(binding));
    pair.far.stack.queues().0.queue().attach(memory.clone(), &binding);
    send(&pair, &mut client, 1, 20_000, 10_000);
    pair.until(|pair| pair.far.stack.queues().0.foreign() > 0);
    let (bindings, new, polled) = (pair.far.bindings.clone(), binding.clone(), Rc::new(Cell::new(false)));
    let now = polled.clone();
    pair.far.stack.queues().0.queue().in_poll = Some(Box::new(move || {
        bindings.add(&new);
        now.set(true);
    }));
    let mut dropped = 0;
    pair.until(|pair| {
        let foreign = pair.far.stack.queues().0.foreign();
        dropped = if polled.get() { dropped } else { foreign };
        let mut places = [const { StreamFragment::Empty }; 4];
        let n = server.recv(&mut places).unwrap_or(0);
        for place in &places[..n] {
            let StreamFragment::Device { binding: from, offset, len, tokens } = place else {
                panic!("in device memory")
            };
            let mut got = vec![0; *len as usize];
            memory.read_exact_at(&mut got, *offset).unwrap();
            assert_eq!((*from, got), (binding.id(), bytes(1, position, *len as usize)));
            position += u64::from(*len);
            assert_eq!(returner.return_tokens(&[*tokens]), Ok(tokens.count as usize));
        }
        position == 30_000
    });
    assert_eq!(pair.far.stack.queues().0.foreign(), dropped, "no frame was dropped after the binding was added");
    assert_eq!((pair.far.streams.stats().bindings, pair.far.stack.pages()), (2, 0));
}

/// Proves MEM-4 of streams: a flow is steered from queue to queue under traffic. Frames through the
/// other queue land in that queue's binding, and go to their connection, which has fragments of
/// both bindings.
#[test]
fn steered_to_another_queue_and_back() {
    let mut pair = Pair::with(1024, 400, "loss=1%,delay=1ms,seed=5", false);
    pair.other = Some(Side::of(&pair.far.host, 1024, 400, false));
    let (mut client, mut server) = pair.connect(&Config::default(), &Config::default());
    send(&pair, &mut client, 1, 0, 300_000);
    let (returner, mut position, mut got) = (server.returner(), 0, [0; 2]);
    pair.until(|pair| {
        pair.steered = (position / 20_000) % 2 == 1;
        let mut places = [const { StreamFragment::Empty }; 4];
        let n = server.recv(&mut places).unwrap_or(0);
        for place in &places[..n] {
            let StreamFragment::Device { binding, offset, len, tokens } = place else { panic!("in device memory") };
            let sides = [&pair.far, pair.other.as_ref().unwrap()];
            let side = sides.iter().position(|side| side.binding.as_ref().unwrap().id() == *binding).unwrap();
            assert_eq!(sides[side].read(*offset, *len), bytes(1, position, *len as usize));
            position += u64::from(*len);
            got[side] += *len;
            assert_eq!(returner.return_tokens(&[*tokens]), Ok(tokens.count as usize));
        }
        position == 300_000
    });
    assert!(got.iter().all(|got| *got > 50_000), "{got:?}");
    assert_eq!(pair.far.streams.stats().bindings, 2);
    let other = pair.other.as_ref().unwrap().stack.stats();
    assert!(other.handed_over > 0 && other.resets == 0);
    assert_eq!(pair.far.stack.pages(), 0);
}
