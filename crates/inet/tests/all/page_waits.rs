//! Users that wait for pages of the stack's pool, which come back without a poll of the stack.

use crate::common::{Link, addr, connected};
use crate::remote::Calls;
use netmem_inet::tcp::Config;
use netmem_inet::{SocketError, TcpStream};
use netmem_pool::{Page, Private};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const FAR: &str = "10.0.0.2:9";

/// A waker, and the number of its calls.
fn waker() -> (Arc<Calls>, Waker) {
    let calls = Arc::<Calls>::default();
    (calls.clone(), calls.into())
}

/// All pages of the near host's pool.
fn all_pages(link: &Link) -> Vec<Page<Private>> {
    std::iter::from_fn(|| link.near_pool.alloc()).collect()
}

/// The pool is empty although the stack's counts admit a page. `call` is a call that waits for one:
/// the task that drives the stack is woken, and polls it; `user` is woken when there is a page, and
/// not before.
fn waits(link: &mut Link, pages: Vec<Page<Private>>, user: &Calls, call: &mut dyn FnMut() -> bool) {
    let (driven, driver) = waker();
    link.settle();
    assert!(!link.near.poll_calls(&driver));
    let before = user.count();
    assert!(!call(), "there is no page");
    assert!(driven.count() == 1 && link.near.poll_calls(&driver), "the stack is to be polled");
    for _ in 0..5 {
        link.pass(Duration::from_millis(2));
        assert_eq!(user.count(), before, "there is no page yet");
    }
    drop(pages);
    let soon = link.now + Duration::from_millis(1);
    assert!(link.near.poll_timeout().is_some_and(|at| at <= soon), "no thread reports pages");
    link.pass(Duration::from_millis(2));
    assert_eq!(user.count(), before + 1);
    assert!(call(), "there are pages");
}

#[test]
fn a_stream_that_finds_the_pool_empty_is_woken() {
    let mut link = Link::new(false);
    let (mut client, _server) = connected(&mut link);
    let ((user, waker), pages) = (waker(), all_pages(&link));
    waits(&mut link, pages, &user, &mut || client.poll_write(&mut Context::from_waker(&waker), b"x").is_ready());
}

/// A user that has used up its share of the pages is woken in the poll in which its peer's
/// acknowledgement arrives.
#[test]
fn a_stream_is_woken_in_the_poll_that_releases_its_pages() {
    let mut link = Link::with_pages(8);
    let (mut client, _server) = connected(&mut link);
    client.set_nodelay(true);
    let (user, waker) = waker();
    let mut context = Context::from_waker(&waker);
    while client.poll_write(&mut context, &[1; 1024]).is_ready() {}
    for _ in 0..3 {
        link.near.poll(link.now);
        assert_eq!(user.count(), 0, "nothing is acknowledged");
    }
    for _ in 0..3 {
        link.far.poll(link.now);
    }
    link.near.poll(link.now);
    assert_eq!(user.count(), 1);
    assert!(client.poll_write(&mut context, b"x").is_ready());
}

/// The writer is on another thread. It is woken by a signal, and the driver by the hub.
#[test]
fn a_stream_of_another_thread_that_finds_the_pool_empty_is_woken_once() {
    let mut link = Link::new(false);
    let _listener = link.far.sockets().listen(addr("10.0.0.2:80"), Default::default()).unwrap();
    let mut client = link.near.remote().connect(addr("10.0.0.2:80"), &Config::default());
    link.settle();
    let ((user, waker), pages) = (waker(), all_pages(&link));
    assert!(client.poll_write(&mut Context::from_waker(&waker), b"x").is_pending());
    for _ in 0..5 {
        link.pass(Duration::from_millis(2));
        assert_eq!(user.count(), 0, "there is no page yet");
    }
    drop(pages);
    link.pass(Duration::from_millis(2));
    assert_eq!(user.count(), 1);
    assert!(client.poll_write(&mut Context::from_waker(&waker), b"x").is_ready());
}

#[test]
fn a_socket_for_datagrams_that_finds_the_pool_empty_is_woken() {
    let mut link = Link::new(false);
    let mut socket = link.near.sockets().bind(addr("10.0.0.1:7")).unwrap();
    let ((user, waker), pages) = (waker(), all_pages(&link));
    assert_eq!(socket.send_to(b"x", addr(FAR)), Err(SocketError::WouldBlock));
    waits(&mut link, pages, &user, &mut || socket.poll_writable(&mut Context::from_waker(&waker)).is_ready());
}

/// A datagram needs three pages, and there are two. A task that waits by `poll_writable`, and tries
/// again when it is ready, lets others run.
#[test]
fn a_long_datagram_waits_for_all_its_pages() {
    let mut link = Link::new(false);
    let mut socket = link.near.sockets().bind(addr("10.0.0.1:7")).unwrap();
    let ((user, waker), mut pages) = (waker(), all_pages(&link));
    pages.truncate(pages.len() - 2);
    assert_eq!(socket.send_to(&[7; 9000], addr(FAR)), Err(SocketError::WouldBlock));
    let mut ready = || socket.poll_writable(&mut Context::from_waker(&waker)).is_ready();
    waits(&mut link, pages, &user, &mut ready);
    socket.send_to(&[7; 9000], addr(FAR)).unwrap();
}

/// A datagram that needs more pages than all can ever have is refused, and not for a while.
#[test]
fn a_datagram_that_no_pool_has_pages_for_is_refused() {
    let link = Link::with_pages(16);
    let mut socket = link.near.sockets().bind(addr("10.0.0.1:7")).unwrap();
    let Err(SocketError::TooLong { len: 60_000, most }) = socket.send_to(&[7; 60_000], addr(FAR)) else {
        panic!("it is sent, or waits");
    };
    assert_eq!(socket.send_to(&vec![7; most], addr(FAR)), Ok(()));
    assert_eq!(socket.poll_writable(&mut Context::from_waker(Waker::noop())), Poll::Pending);
}

/// Datagrams may have 64 pages with payload of streams, and a stream holds 24, which its peer does
/// not acknowledge. `send_to` and `poll_writable` have one rule for the other pages: all datagrams
/// have 12, the share of a holder while 40 of 64 are free.
#[test]
fn a_datagram_is_sent_exactly_if_its_share_has_its_pages() {
    for pages in 1..=16 {
        let (link, _client, _server) = with_pages_of_a_stream(24);
        let mut socket = link.near.sockets().bind(addr("10.0.0.1:7")).unwrap();
        let sent = socket.send_to(&vec![7; pages * 4096 - 300], addr(FAR));
        let ready = socket.poll_writable(&mut Context::from_waker(Waker::noop()));
        if pages <= 12 {
            assert_eq!(sent, Ok(()), "{pages} pages");
        } else {
            assert_eq!((sent, ready), (Err(SocketError::WouldBlock), Poll::Pending), "{pages} pages");
        }
    }
}

/// The pool has pages, and the counts admit none. The task is not woken to find that.
#[test]
fn a_datagram_that_the_counts_do_not_admit_waits_without_being_woken() {
    let (mut link, client, server) = with_pages_of_a_stream(24);
    let mut socket = link.near.sockets().bind(addr("10.0.0.1:7")).unwrap();
    let (user, waker) = waker();
    let mut ready = || {
        let sent = socket.send_to(&[7; 13 * 4096], addr(FAR));
        sent == Err(SocketError::WouldBlock) && socket.poll_writable(&mut Context::from_waker(&waker)).is_ready()
    };
    assert!(!ready());
    for _ in 0..5 {
        link.near.poll(link.now);
        link.now += Duration::from_millis(2);
        assert_eq!(user.count(), 0, "the stream holds its pages");
    }
    link.settle();
    drop((client, server));
    link.pass(Duration::from_millis(10));
    assert_eq!(user.count(), 1, "the peer has acknowledged what the stream has sent");
}

/// A link, and streams between its hosts. The near one holds so many of 64 pages, and the peer has
/// acknowledged none of them.
fn with_pages_of_a_stream(pages: usize) -> (Link, TcpStream<Private>, TcpStream<Private>) {
    let mut link = Link::with_pages(85);
    let (mut client, server) = connected(&mut link);
    client.set_send_buffer(1 << 20);
    assert_eq!(client.write(&vec![7; pages * 4096]), Ok(pages * 4096));
    (link, client, server)
}
