//! Sockets of other threads: `netmem_inet::stack::remote`.

use crate::common::{Link, addr};
use netmem_inet::stack::remote::{Sockets, StreamOption, TcpListener, TcpStream};
use netmem_inet::tcp::{Config, Error};
use netmem_inet::{Fragment, ListenOptions, SocketError, StackOptions};
use netmem_packet::Wait;
use netmem_pool::Private;
use rustix::event::{self, PollFd, PollFlags, Timespec};
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// More steps of the time than any test needs.
const MOST_STEPS: u32 = 10_000;
const ZERO: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Counts how often it is called.
#[derive(Default)]
pub(crate) struct Calls(AtomicU32);

impl Calls {
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Calls `poll` on this thread until it is ready, and sleeps meanwhile.
pub(crate) fn block_on<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

pub(crate) fn now<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
    poll(&mut Context::from_waker(Waker::noop()))
}

pub(crate) fn bytes(n: usize) -> Vec<u8> {
    (0..n as u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect()
}

/// Sockets of the near host and of the far one.
fn sockets(link: &mut Link) -> [Sockets<Private>; 2] {
    [link.near.remote(), link.far.remote()]
}

fn listen(link: &mut Link) -> TcpListener<Private> {
    let mut listener = link.far.remote().listen(addr("10.0.0.2:80"), ListenOptions::default());
    link.settle();
    assert_eq!(now(|cx| listener.poll_listening(cx)), Poll::Ready(Ok(addr("10.0.0.2:80"))));
    listener
}

fn connected(link: &mut Link) -> (TcpStream<Private>, TcpStream<Private>) {
    let mut listener = listen(link);
    let mut client = link.near.remote().connect(addr("10.0.0.2:80"), &Config::default());
    assert_eq!(now(|cx| client.poll_connected(cx)), Poll::Pending);
    link.settle();
    assert_eq!(now(|cx| client.poll_connected(cx)), Poll::Ready(Ok(())));
    let server = listener.accept().unwrap();
    assert_eq!((server.local_addr(), server.peer_addr()), (Some(addr("10.0.0.2:80")), client.local_addr().unwrap()));
    (client, server)
}

/// Reads until the end, while the stacks are polled.
fn read_to_end(stream: &mut TcpStream<Private>, link: &mut Link) -> Result<Vec<u8>, SocketError> {
    let (mut all, mut some) = (Vec::new(), vec![0; 5000]);
    // Probes of a window that stays closed would go on for ever.
    for _ in 0..MOST_STEPS {
        match stream.read(&mut some) {
            Ok(0) => return Ok(all),
            Ok(n) => all.extend_from_slice(&some[..n]),
            Err(SocketError::WouldBlock) => assert!(link.step(), "{} bytes, and nothing will happen", all.len()),
            Err(error) => return Err(error),
        }
    }
    panic!("{} bytes, and not the end", all.len());
}

/// Nothing is left: connections, pages, and the stacks have nothing to do.
fn assert_nothing_left(link: &mut Link) {
    link.pass(Duration::from_secs(300));
    assert_eq!((link.near.connections(), link.far.connections()), (0, 0));
    assert_eq!((link.near.pages(), link.far.pages()), (0, 0));
    link.near_pool.reclaim();
    assert_eq!(link.near_pool.stats().inflight, 0);
    assert_eq!(link.near.poll_timeout().or(link.far.poll_timeout()), None);
}

/// Each half is on a thread of its own: four threads, and the stacks on a fifth. The threads sleep
/// while they wait.
#[test]
fn halves_are_used_by_different_threads() {
    const BYTES: usize = 3_000_000;
    let mut link = Link::new(false);
    let (client, server) = connected(&mut link);
    let echo = {
        let (mut read, mut write) = server.into_split();
        thread::spawn(move || {
            let mut places = [const { None }; 8].map(|_: Option<()>| Fragment::default());
            loop {
                let filled = block_on(|cx| read.poll_recv(cx, &mut places)).unwrap();
                if filled == 0 {
                    break;
                }
                // What was received is sent from its page.
                for place in &mut places[..filled] {
                    let mut frag = Some(std::mem::take(place).share().unwrap());
                    while let Some(next) = frag.take() {
                        block_on(|cx| write.poll_writable(cx)).unwrap();
                        frag = write.send(next, false).err().map(|(error, frag)| {
                            assert_eq!(error, SocketError::WouldBlock);
                            frag
                        });
                    }
                }
            }
            drop(write);
        })
    };
    let (mut read, mut write) = client.into_split();
    let writer = thread::spawn(move || {
        let sent = bytes(BYTES);
        let mut at = 0;
        while at < BYTES {
            let (a, b) = sent[at..].split_at((BYTES - at) / 3);
            at += block_on(|cx| write.poll_write_vectored(cx, &[IoSlice::new(a), IoSlice::new(b)])).unwrap();
        }
        write.shutdown();
        assert_eq!(write.write(b"more"), Err(SocketError::ShutDown));
    });
    let reader = thread::spawn(move || {
        let (mut all, mut some) = (Vec::new(), vec![0; 10_000]);
        loop {
            let n = block_on(|cx| read.poll_read(cx, &mut some)).unwrap();
            if n == 0 {
                break;
            }
            all.extend_from_slice(&some[..n]);
        }
        assert!(all == bytes(BYTES), "{} bytes", all.len());
    });
    let threads = [echo, writer, reader];
    // The time is real: a thread may pause for a moment, and its peer must not give up meanwhile.
    let (start, beginning) = (link.now, Instant::now());
    while !threads.iter().all(|thread| thread.is_finished()) {
        link.now = start + beginning.elapsed();
        link.near.poll(link.now);
        link.far.poll(link.now);
        thread::yield_now();
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_nothing_left(&mut link);
}

/// A close is behind what was written, and needs no room.
#[test]
fn what_was_written_before_a_close_arrives() {
    for halves in [false, true] {
        let mut link = Link::new(false);
        let (mut client, mut server) = connected(&mut link);
        let sent = bytes(1_000_000);
        client.set(StreamOption::SendBuffer(100_000)).unwrap();
        let mut at = 0;
        // More than the connection accepts: the rest fills the ring.
        loop {
            match client.write(&sent[at..]) {
                Ok(n) => at += n,
                Err(error) => {
                    assert_eq!(error, SocketError::WouldBlock);
                    let before = at;
                    link.near.poll(link.now);
                    at += client.write(&sent[at..]).unwrap_or(0);
                    if at == before {
                        break;
                    }
                }
            }
        }
        assert!(client.write(b"x") == Err(SocketError::WouldBlock) && at > 60_000, "{at}");
        if halves {
            let (read, write) = client.into_split();
            drop(write);
            link.settle();
            drop(read);
        } else {
            drop(client);
        }
        assert!(read_to_end(&mut server, &mut link).unwrap() == sent[..at], "halves: {halves}");
        drop(server);
        assert_nothing_left(&mut link);
    }
}

/// What was received and not read is lost if its stream is dropped. The peer learns of it.
#[test]
fn unread_payload_becomes_a_reset() {
    // In the stack, in the ring, and the rest of a fragment.
    for (polls, read) in [(false, 0), (true, 0), (true, 100)] {
        let mut link = Link::new(true);
        let (mut client, mut server) = connected(&mut link);
        assert_eq!(client.write(&[1; 1000]), Ok(1000));
        if polls {
            link.settle();
        }
        if read > 0 {
            assert_eq!(server.read(&mut vec![0; read]), Ok(read));
        }
        drop(server);
        link.settle();
        link.step();
        let mut byte = [0];
        assert_eq!(client.read(&mut byte), Err(SocketError::Closed(Error::Reset)), "{polls} {read}");
        assert_eq!(client.write(&byte), Err(SocketError::Closed(Error::Reset)));
        drop(client);
        assert_nothing_left(&mut link);
    }
}

/// All was read, so the peer sees the end.
#[test]
fn a_stream_that_was_read_is_closed() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    client.write(&[1; 1000]).unwrap();
    link.settle();
    assert_eq!(server.read(&mut [0; 1000]), Ok(1000));
    server.write(&[2; 10]).unwrap();
    drop(server);
    assert_eq!(read_to_end(&mut client, &mut link), Ok(vec![2; 10]));
    client.reset();
    link.settle();
    assert_eq!(client.write(b"x"), Err(SocketError::Closed(Error::Aborted)));
    drop(client);
    assert_nothing_left(&mut link);
}

#[test]
fn sockets_that_cannot_be_opened_return_the_reason() {
    let mut link = Link::new(true);
    let [near, far] = sockets(&mut link);
    let mut listener = listen(&mut link);
    for (local, error) in [("10.0.0.2:80", SocketError::InUse), ("10.0.0.9:80", SocketError::NotOurs)] {
        let mut other = far.listen(addr(local), ListenOptions::default());
        let calls = Arc::new(Calls::default());
        let waker = Waker::from(calls.clone());
        assert!(other.poll_accept(&mut Context::from_waker(&waker)).is_pending());
        link.settle();
        assert_eq!(calls.count(), 1);
        assert_eq!(now(|cx| other.poll_listening(cx)), Poll::Ready(Err(error)));
        assert_eq!(other.accept().unwrap_err(), error);
    }
    let mut refused = near.connect(addr("10.0.0.2:81"), &Config::default());
    let mut routeless = near.connect(addr("192.0.2.1:80"), &Config::default());
    let mut foreign = near.connect_from(addr("10.0.0.7:0"), addr("10.0.0.2:80"), &Config::default());
    link.settle();
    let refusal = SocketError::Closed(Error::Refused);
    for (stream, error) in
        [(&mut refused, refusal), (&mut routeless, SocketError::NoRoute), (&mut foreign, SocketError::NotOurs)]
    {
        assert_eq!(now(|cx| stream.poll_connected(cx)), Poll::Ready(Err(error)));
        assert_eq!((stream.read(&mut [0]), stream.write(&[0])), (Err(error), Err(error)));
    }
    assert_eq!(listener.accept().unwrap_err(), SocketError::WouldBlock);
    // Connections that nobody accepted are reset: in the ring, and in the stack's accept queue.
    let clients: Vec<_> = (0..40).map(|_| near.connect(addr("10.0.0.2:80"), &Config::default())).collect();
    link.settle();
    let kept = listener.accept().unwrap();
    drop(listener);
    link.settle();
    let reset = |stream: &TcpStream<Private>| stream.local_addr().is_some_and(|local| local != kept.peer_addr());
    for mut client in clients.into_iter().filter(reset) {
        assert_eq!(client.read(&mut [0]), Err(SocketError::Closed(Error::Reset)));
    }
    drop((kept, refused, routeless, foreign));
    assert_nothing_left(&mut link);
}

/// The end of a stack reaches every handle, also those that wait, and those that it has not seen.
#[test]
fn the_end_of_a_stack_reaches_every_handle() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    let [near, _] = sockets(&mut link);
    let mut listener = near.listen(addr("10.0.0.1:90"), ListenOptions::default());
    link.settle();
    server.write(b"last").unwrap();
    link.settle();
    let mut unseen = near.connect(addr("10.0.0.2:80"), &Config::default());
    let calls = [(); 3].map(|()| Arc::new(Calls::default()));
    let wakers = calls.each_ref().map(|calls| Waker::from(calls.clone()));
    let [first, second, third] = &wakers;
    assert_eq!(client.read(&mut [0; 4]), Ok(4));
    assert!(client.poll_read(&mut Context::from_waker(first), &mut [0; 4]).is_pending());
    assert!(listener.poll_accept(&mut Context::from_waker(second)).is_pending());
    assert!(unseen.poll_connected(&mut Context::from_waker(third)).is_pending());
    let Link { near: stack, far, .. } = link;
    drop(stack);
    assert_eq!(calls.each_ref().map(|calls| calls.count()), [1, 1, 1]);
    assert_eq!(client.read(&mut [0; 4]), Err(SocketError::StackGone));
    assert_eq!(client.write(b"x"), Err(SocketError::StackGone));
    assert_eq!(client.set(StreamOption::NoDelay(true)), Err(SocketError::StackGone));
    assert_eq!(listener.accept().unwrap_err(), SocketError::StackGone);
    assert_eq!(now(|cx| unseen.poll_connected(cx)), Poll::Ready(Err(SocketError::StackGone)));
    let mut late = near.connect(addr("10.0.0.2:80"), &Config::default());
    assert_eq!(now(|cx| late.poll_connected(cx)), Poll::Ready(Err(SocketError::StackGone)));
    assert_eq!(late.local_addr(), None);
    // What was received before can be read.
    server.write(b"x").unwrap();
    drop((client, far));
    assert_eq!(server.read(&mut [0; 4]), Err(SocketError::StackGone));
}

/// `Stack::close` sends what other threads have put into their rings, and then FIN. The connections
/// have less room than that.
#[test]
fn a_stack_that_is_closed_sends_what_is_in_the_rings() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    client.set(StreamOption::SendBuffer(10_000)).unwrap();
    link.settle();
    let sent = bytes(100_000);
    let written = client.write(&sent).unwrap();
    assert!(written > 50_000, "{written}");
    link.near.close();
    assert!(read_to_end(&mut server, &mut link).unwrap() == sent[..written]);
    drop(server);
    link.settle();
    assert!(link.near.is_closed());
    link.pass(Duration::from_secs(300));
    assert_eq!(client.write(b"x").unwrap_err(), SocketError::StackGone);
}

/// What is written before the handshake is complete is sent after it, and then FIN.
#[test]
fn a_stream_is_written_and_shut_down_before_it_is_connected() {
    let mut link = Link::new(true);
    let mut listener = listen(&mut link);
    let mut client = link.near.remote().connect(addr("10.0.0.2:80"), &Config::default());
    assert_eq!(client.write(b"early"), Ok(5));
    client.shutdown();
    link.settle();
    assert_eq!(read_to_end(&mut listener.accept().unwrap(), &mut link).unwrap(), b"early");
    drop((client, listener));
    assert_nothing_left(&mut link);
}

/// A writer learns of a reset although its reader has read to the end, or does not read.
#[test]
fn a_writer_learns_of_the_end_whatever_its_reader_does() {
    for full in [false, true] {
        let mut link = Link::new(true);
        let (client, mut server) = connected(&mut link);
        let (_read, mut write) = client.into_split();
        if full {
            // More than the ring has places for.
            for _ in 0..40 {
                server.write(&[1; 1400]).unwrap();
                link.settle();
            }
        } else {
            server.shutdown();
        }
        link.settle();
        assert_eq!(write.write(b"x"), Ok(1));
        link.settle();
        server.reset();
        link.settle();
        assert_eq!(write.write(b"x"), Err(SocketError::Closed(Error::Reset)), "full: {full}");
    }
}

/// A reader is woken when the ring was empty, and the stack when a ring was empty or full. Calls
/// that find work on the other side wake nothing.
#[test]
fn only_a_side_that_waits_is_woken() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    link.settle();
    let calls = Arc::new(Calls::default());
    let waker = Waker::from(calls.clone());
    assert!(server.poll_read(&mut Context::from_waker(&waker), &mut [0; 4]).is_pending());
    for n in 1..4 {
        client.write(&[n; 10]).unwrap();
        link.settle();
        assert_eq!(calls.count(), 1, "it was woken by the first, and has not looked yet");
    }
    assert_eq!(server.read(&mut [0; 100]), Ok(30));
    // The stack polls the port of a reader that waits, and has nothing for it.
    assert!(server.poll_read(&mut Context::from_waker(&waker), &mut [0; 4]).is_pending());
    server.set(StreamOption::NoDelay(true)).unwrap();
    link.settle();
    assert_eq!(calls.count(), 1);
    // Nothing was sent, so a poll finds no work. One write makes some, and the next ones no more.
    let Link { near, now, .. } = &mut link;
    assert_eq!(near.poll(*now), 0);
    client.write(&[1]).unwrap();
    assert_eq!(near.poll_timeout(), Some(*now), "the stack is to be polled");
    near.poll(*now);
    link.settle();
    // The stack sleeps. The first write ends its sleep, and the second one finds it awake.
    let is_readable =
        |link: &Link| event::poll(&mut [PollFd::new(&link.near, PollFlags::IN)], Some(&ZERO)).unwrap() > 0;
    assert!(link.near.arm().unwrap().waits() && !is_readable(&link));
    client.write(&[2]).unwrap();
    client.write(&[3]).unwrap();
    assert!(is_readable(&link));
    link.near.disarm();
    assert!(link.near.arm().is_ok_and(|armed| !armed.waits()), "there is work");
    link.settle();
    assert_eq!(server.read(&mut [0; 100]), Ok(3));
    // A stack that is armed while a handle has something does not sleep.
    assert!(link.near.arm().unwrap().waits() && !is_readable(&link));
    client.shutdown();
    assert!(is_readable(&link));
    link.near.disarm();
    link.settle();
    assert_eq!(server.read(&mut [0; 100]), Ok(0));
    drop((client, server));
    assert_nothing_left(&mut link);
}

/// A peer that does not read: its writer gets its share of the pages, and another connection has
/// some. The writer goes on when the peer reads.
#[test]
fn a_writer_has_a_share_of_the_pages() {
    let mut link = Link::with(false, StackOptions::default());
    let mut listener = listen(&mut link);
    let near = link.near.remote();
    let config = Config::default();
    let mut streams: Vec<_> = (0..30).map(|_| near.connect(addr("10.0.0.2:80"), &config)).collect();
    link.settle();
    let mut servers: Vec<_> = streams.iter().map(|_| listener.accept().unwrap()).collect();
    let calls = Arc::new(Calls::default());
    let waker = Waker::from(calls.clone());
    let mut written = Vec::new();
    for stream in &mut streams {
        stream.set(StreamOption::SendBuffer(100_000_000)).unwrap();
        link.near.poll(link.now);
        let mut sum = 0;
        while let Poll::Ready(n) = stream.poll_write(&mut Context::from_waker(&waker), &[7; 60_000]) {
            sum += n.unwrap();
            link.near.poll(link.now);
        }
        written.push(sum);
    }
    assert!(written[0] > 500_000 && written.iter().all(|n| *n > 0), "{written:?}");
    let held: usize = written.iter().sum::<usize>() / 4096;
    // The pool has 2048 pages, and a quarter is the reserve.
    assert!(held <= 1536 && link.near_pool.stats().inflight < 2048, "{held}");
    assert_eq!(calls.count(), 0);
    let (mut read, mut steps) = (vec![0; 100_000], 0);
    for (n, sum) in written.iter().enumerate() {
        let mut all = 0;
        while all < *sum {
            match servers[n].read(&mut read) {
                Ok(n) => all += n,
                Err(_) => {
                    steps += 1;
                    assert!(link.step() && steps < MOST_STEPS, "{all} of {sum} bytes");
                }
            }
        }
    }
    assert!(calls.count() > 0, "a writer that waits is woken");
    link.settle();
    link.near_pool.reclaim();
    assert_eq!(link.near_pool.stats().inflight, 0, "idle streams hold no page");
    let mut again = 0;
    while let Ok(n) = streams[0].write(&[7; 60_000]) {
        again += n;
        link.near.poll(link.now);
    }
    assert!(again >= written[0] / 2, "{again} of {}: what was acknowledged is not counted", written[0]);
    drop((streams, servers, listener));
    assert_nothing_left(&mut link);
}

/// A connection whose send buffer is small moves on as its peer acknowledges, and so does a writer
/// that waits for the ring.
#[test]
fn a_ring_moves_on_when_its_connection_has_room() {
    let mut link = Link::new(false);
    let (mut client, mut server) = connected(&mut link);
    client.set(StreamOption::SendBuffer(3000)).unwrap();
    let (sent, calls) = (bytes(400_000), Arc::new(Calls::default()));
    let waker = Waker::from(calls.clone());
    let (mut at, mut all, mut some, mut waits) = (0, Vec::new(), vec![0; 50_000], 0);
    for _ in 0..MOST_STEPS {
        if all.len() == sent.len() {
            break;
        }
        if at < sent.len() && calls.count() == waits {
            match client.poll_write(&mut Context::from_waker(&waker), &sent[at..]) {
                Poll::Ready(n) => at += n.unwrap(),
                // The next write is when the waker was called.
                Poll::Pending => waits += 1,
            }
        }
        match server.read(&mut some) {
            Ok(n) => all.extend_from_slice(&some[..n]),
            Err(_) => assert!(
                link.step() || (calls.count() == waits && at < sent.len()),
                "{at} of {} bytes are stuck",
                sent.len()
            ),
        }
    }
    assert!(all == sent && waits > 1, "{waits}");
}

/// `Bytes` that were made of a fragment are sent from its page, and small writes share a page.
#[test]
fn bytes_of_fragments_are_not_copied() {
    let mut link = Link::new(true);
    let (mut client, mut server) = connected(&mut link);
    let body = bytes::Bytes::from(link.near_pool.alloc().unwrap().freeze_range(0..4000));
    assert_eq!(client.write_vectored(&[IoSlice::new(b"head"), IoSlice::new(&body)]), Ok(4004));
    for n in 0..5 {
        assert_eq!(client.write(&[n; 100]), Ok(100));
    }
    link.near.poll(link.now);
    assert_eq!(link.near.stats().copied_sent, 504);
    link.near_pool.reclaim();
    assert_eq!(link.near_pool.stats().inflight, 2, "the body's, and one for what was copied");
    client.shutdown();
    assert_eq!(read_to_end(&mut server, &mut link).unwrap().len(), 4504);
    link.settle();
    link.near_pool.reclaim();
    assert_eq!(link.near_pool.stats().inflight, 1, "all is acknowledged, so only the body is held");
    drop((client, server, body));
    assert_nothing_left(&mut link);
}
