//! Sockets for datagrams for any thread.

use crate::stack::address::canonical;
use crate::stack::error::SocketError;
use crate::stack::page_counts::RemotePages;
use crate::stack::remote::parts::{DATAGRAMS, DatagramParts, Opening, Prepared, StreamPort};
use crate::stack::remote::port::{Asked, pending};
use crate::stack::remote::ring::{Receiver, ring};
use crate::stack::remote::sync::Mutex;
use crate::stack::remote::waiting::{SendSide, Shortage, Wanted, lock};
use crate::stack::transport::datagrams::{Manner, ReceivedDatagram};
use crate::wire::{HEADROOM, Ip, MAX_HEADERS};
use netmem_packet::{MAX_FRAGS, Packet};
use netmem_pool::{Frag, Mapped};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};

/// The most datagrams of a call: each has a place in the ring, and calls that find less room wait.
const MAX_SEGMENTS: usize = 32;
/// The most payload of a frame that the device cuts. Each page of it is a fragment of the frame.
const MAX_FRAME: usize = 60_000;

/// A socket for datagrams that any thread uses, also several at the same time, while its stack is
/// on another one.
///
/// Calls do not block. [`SocketError::WouldBlock`] means that a call can do nothing at present; the
/// `poll_` calls then call a waker when that changes. Each direction has a ring of 256 places.
///
/// **In groups.** A call sends up to 32 datagrams of one size to one station, and a call receives
/// as many of one station as have arrived one after the other. A device that cuts frames of UDP
/// gets the group as one frame, and a group that a device has joined comes as one.
///
/// Payload is copied by the thread that calls: into pages of the stack's pool, and out of the pages
/// that the device wrote. Datagrams are never sent in IP fragments: one that is longer than its
/// path admits is dropped, and counts in
/// [`StackStats::datagrams_unsent`](crate::StackStats::datagrams_unsent). So is one without a
/// route.
///
/// Cost: a lock for each direction, which only callers of the same direction contend; a fence; and
/// the wake-up of the stack's thread if it sleeps.
pub struct UdpSocket<M: Mapped> {
    send: SendSide<Opening<M>, Prepared<M>, DATAGRAMS>,
    receive: Mutex<Receiving<M>>,
    pages: Arc<RemotePages<M>>,
    /// The device cuts frames of UDP.
    cuts: bool,
}

struct Receiving<M: Mapped> {
    ring: Receiver<ReceivedDatagram<M>, DATAGRAMS>,
    /// What was popped and is not all copied yet, and how many of its bytes were.
    rest: Option<(ReceivedDatagram<M>, usize)>,
}

/// How datagrams are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramOptions {
    /// The address to send from. `None` for that of the socket, or that of the route.
    pub from: Option<IpAddr>,
    /// The bits of ECN in the IP header (RFC 3168).
    pub ecn: u8,
    /// The payload is several datagrams of so many bytes each; the last one can have fewer. `None`
    /// for one datagram.
    pub segment_size: Option<usize>,
}

/// Datagrams that were received by one call: all of one station, to one address, with the same bits
/// of ECN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedGroup {
    /// The sender.
    pub from: SocketAddr,
    /// The address that they were sent to.
    pub to: IpAddr,
    /// Bytes of payload in total.
    pub len: usize,
    /// Bytes of each datagram. The last one can have fewer.
    pub stride: usize,
    /// The bits of ECN in their IP headers (RFC 3168).
    pub ecn: u8,
}

impl<M: Mapped> UdpSocket<M> {
    /// A socket, and the stack's parts of it.
    pub(crate) fn new(port: Arc<StreamPort<M>>, pages: RemotePages<M>, cuts: bool) -> (Self, Box<DatagramParts<M>>) {
        let ((sent, to_send), (to_receive, received)) = (ring(), ring());
        let (pages, wanted) = (Arc::new(pages), Arc::<Wanted>::default());
        let (pages_of_stack, wanted_of_stack) = (pages.clone(), wanted.clone());
        let parts =
            DatagramParts { received: to_receive, sent: to_send, pages: pages_of_stack, wanted: wanted_of_stack };
        let receive = Mutex::new(Receiving { ring: received, rest: None });
        (Self { send: SendSide::new(port, sent, wanted), receive, pages, cuts }, Box::new(parts))
    }

    /// Ready when the stack has opened the socket, or has refused. Returns the address and the
    /// port.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoPort`];
    /// [`SocketError::StackGone`].
    pub fn poll_bound(&self, cx: &mut Context<'_>) -> Poll<Result<SocketAddr, SocketError>> {
        self.send.register_writer(cx);
        match (self.send.port.failure(), self.send.port.local()) {
            (Some(error), _) => Poll::Ready(Err(error)),
            (None, Some(local)) => Poll::Ready(Ok(local)),
            (None, None) => Poll::Pending,
        }
    }

    /// The address and the port that it is bound to. `None` until the stack has opened it.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.send.port.local()
    }

    /// The most datagrams that a call sends: 32, or fewer if the stack's pool is small, of which a
    /// socket has half at most.
    #[must_use]
    pub fn max_segments(&self) -> usize {
        MAX_SEGMENTS.min(self.pages.most() as usize)
    }

    /// Sends a copy of `payload` as one datagram, or as several: all of them, or none. The next
    /// poll of the stack posts them to the device.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: there is no room in the ring, or no page.
    /// [`SocketError::TooLong`]: one has more bytes than a datagram can have, and `most` is how
    /// many that is; or there are more datagrams than [`max_segments`](Self::max_segments), or they
    /// need more pages than the socket can ever have, and `most` is the bytes of a call. The errors
    /// of [`poll_bound`](Self::poll_bound).
    pub fn send_to(&self, payload: &[u8], to: SocketAddr, options: &DatagramOptions) -> Result<(), SocketError> {
        self.send.check()?;
        let to = canonical(to);
        let size = options.segment_size.unwrap_or(payload.len()).min(payload.len()).max(1);
        let in_frame = self.frame_of(payload.len(), size, to)?;
        let mut send = self.send.lock();
        if !send.ring.has_room_for(payload.len().div_ceil(in_frame).max(1)) {
            return Err(SocketError::WouldBlock);
        }
        let mut prepared = Vec::with_capacity(payload.len().div_ceil(in_frame));
        let mut rest = payload;
        loop {
            let (part, more) = rest.split_at(rest.len().min(in_frame));
            let Some((packet, pages)) = self.copy(part) else {
                self.pages.release(prepared.iter().map(|prepared: &Prepared<M>| prepared.pages).sum());
                let pages = self.pages_of(payload.len(), in_frame);
                send.note_shortage(Shortage { pages, of_pool: self.pages.admits(pages) });
                return Err(SocketError::WouldBlock);
            };
            let segment_size = (part.len() > size).then_some(size as u16);
            let manner = Manner { ecn: options.ecn & Ip::ECN, segment_size, never_in_fragments: true };
            prepared.push(Prepared { packet, pages, to, from: options.from, manner });
            rest = more;
            if rest.is_empty() {
                break;
            }
        }
        for prepared in prepared {
            let pushed = send.ring.push(prepared);
            debug_assert!(pushed.is_ok());
        }
        let wakes = send.ring.publish();
        // A signal to a stack that has ended calls the wakers of users, which may call this socket.
        drop(send);
        if wakes {
            self.send.port.signal();
        }
        Ok(())
    }

    /// The bytes of `len` that go into one frame: a datagram of `size` bytes, or as many as the
    /// device cuts.
    ///
    /// # Errors
    ///
    /// [`SocketError::TooLong`]: no call could ever send so much.
    fn frame_of(&self, len: usize, size: usize, to: SocketAddr) -> Result<usize, SocketError> {
        // Headers go in front of the payload, into the first page.
        let pages = (self.pages.most() as usize).min(MAX_FRAGS);
        let frame = (self.pages.page_size() * pages).saturating_sub(HEADROOM + MAX_HEADERS);
        let most = frame.min(if to.is_ipv4() { 65535 - 28 } else { 65535 - 8 });
        if size > most {
            return Err(SocketError::TooLong { len: size, most });
        }
        let frame = MAX_FRAME.min(frame);
        let in_frame = if self.cuts && size < len { (frame / size).max(1) * size } else { size };
        let frames = self.pages.most() / self.pages_of(in_frame, in_frame).max(1);
        let most = (self.max_segments() * size).min(frames as usize * in_frame);
        if len > most {
            return Err(SocketError::TooLong { len, most });
        }
        Ok(in_frame)
    }

    /// The pages of `len` bytes in frames of `in_frame` bytes each.
    fn pages_of(&self, len: usize, in_frame: usize) -> u32 {
        let page_size = self.pages.page_size();
        let of_frame = |len: usize| (len + HEADROOM + MAX_HEADERS).div_ceil(page_size);
        let rest = len % in_frame;
        let pages = len / in_frame * of_frame(in_frame) + if rest > 0 || len == 0 { of_frame(rest) } else { 0 };
        u32::try_from(pages).unwrap_or(u32::MAX)
    }

    /// Copies the payload of a frame into pages; headers go in front of it. Returns how many pages.
    /// `None`: there are too few.
    fn copy(&self, payload: &[u8]) -> Option<(Packet<M>, u32)> {
        let at = HEADROOM + MAX_HEADERS;
        let mut pages = 0;
        let mut copy = |from: &mut &[u8], at: usize| -> Option<Frag<M>> {
            let mut page = self.pages.page()?;
            pages += 1;
            let (part, rest) = from.split_at(from.len().min(page.len().saturating_sub(at)));
            page.copy_from(at, part).ok()?;
            *from = rest;
            Some(page.freeze_range(at..at + part.len()))
        };
        let mut rest = payload;
        let copied = copy(&mut rest, at).and_then(|head| {
            let mut packet = Packet::new(head);
            while !rest.is_empty() {
                packet.push(copy(&mut rest, 0)?).ok()?;
            }
            Some(packet)
        });
        if copied.is_none() {
            self.pages.release(pages);
        }
        copied.map(|packet| (packet, pages))
    }

    /// Ready when there is room for a call of [`send_to`](Self::send_to), or the socket has ended.
    /// Any number of tasks can wait.
    ///
    /// # Errors
    ///
    /// Those of [`poll_bound`](Self::poll_bound).
    pub fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        self.send.poll_writable(cx, MAX_SEGMENTS)
    }

    /// Receives datagrams that have arrived one after the other from one station, as many as
    /// `into` has room for. If the first one is longer than `into`, the rest of it is lost.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: none is there. Those of [`poll_bound`](Self::poll_bound).
    pub fn recv_from(&self, into: &mut [u8]) -> Result<ReceivedGroup, SocketError> {
        // The end follows the datagrams, so it is read before.
        let end = self.send.port.read_end();
        let mut receive = lock(&self.receive);
        let received = receive.copy_group(into);
        let wakes = receive.ring.release();
        drop(receive);
        if wakes {
            self.send.port.signal();
        }
        received.ok_or_else(|| end.and_then(Result::err).unwrap_or(SocketError::WouldBlock))
    }

    /// Like [`recv_from`](Self::recv_from); the waker is called when there is a datagram. Only the
    /// last task that waits is woken.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_recv_from(&self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<ReceivedGroup, SocketError>> {
        match self.recv_from(into) {
            Err(SocketError::WouldBlock) => {}
            outcome => return Poll::Ready(outcome),
        }
        self.send.port.register_reader(cx);
        lock(&self.receive).ring.wait_for_items();
        pending(self.recv_from(into))
    }
}

impl<M: Mapped> Receiving<M> {
    /// The next datagrams that have not been copied, and how many of their bytes have.
    fn next(&mut self) -> Option<&mut (ReceivedDatagram<M>, usize)> {
        if self.rest.is_none() {
            self.rest = self.ring.pop().map(|datagram| (datagram, 0));
        }
        self.rest.as_mut()
    }

    /// Copies datagrams out. The first decide what belongs to the group.
    fn copy_group(&mut self, into: &mut [u8]) -> Option<ReceivedGroup> {
        let (first, at) = self.next()?;
        let (flow, ecn) = (first.flow, first.ecn);
        let stride = first.size.min(first.len() - *at);
        let mut len = 0;
        while let Some((datagram, at)) = self.next() {
            let left = datagram.len() - *at;
            // One that is not longer, or several of the same size.
            let fits = datagram.size == stride || (left <= datagram.size && left <= stride);
            if len > 0 && ((datagram.flow, datagram.ecn) != (flow, ecn) || !fits || left == 0) {
                break;
            }
            let room = into.len() - len;
            let n = if left <= room { left } else { room.checked_div(stride).unwrap_or(0) * stride };
            if n == 0 && len > 0 {
                break;
            }
            if n == 0 {
                // Not one fits, or the datagram is empty. What does not fit is lost.
                len = datagram.copy_to(*at, &mut into[..stride.min(room)]);
                *at += stride;
                if *at >= datagram.len() {
                    self.rest = None;
                }
                return Some(ReceivedGroup { from: flow.remote, to: flow.local.ip(), len, stride: len, ecn });
            }
            len += datagram.copy_to(*at, &mut into[len..len + n]);
            *at += n;
            if *at < datagram.len() {
                break;
            }
            self.rest = None;
            // A shorter one is the last.
            if len % stride != 0 {
                break;
            }
        }
        Some(ReceivedGroup { from: flow.remote, to: flow.local.ip(), len, stride, ecn })
    }
}

impl<M: Mapped> ReceivedDatagram<M> {
    fn len(&self) -> usize {
        self.first.len() + self.rest.iter().map(|frag| frag.len()).sum::<usize>()
    }

    /// Copies bytes from `at` on out. Returns how many.
    fn copy_to(&self, mut at: usize, into: &mut [u8]) -> usize {
        let mut copied = 0;
        for frag in std::iter::once(&self.first).chain(&self.rest) {
            let n = frag.len().saturating_sub(at).min(into.len() - copied);
            if n > 0 {
                let out = frag.copy_to(at, &mut into[copied..copied + n]);
                debug_assert!(out.is_ok());
                copied += n;
            }
            at = at.saturating_sub(frag.len());
        }
        copied
    }
}

impl<M: Mapped> Drop for UdpSocket<M> {
    fn drop(&mut self) {
        self.send.port.ask(Asked::READER_GONE.and(Asked::WRITER_GONE));
    }
}

impl<M: Mapped> fmt::Debug for UdpSocket<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.local_addr() {
            Some(local) => write!(f, "UdpSocket({local})"),
            None => f.write_str("UdpSocket"),
        }
    }
}

/// A socket goes to any thread, and several use it at the same time.
const _: () = {
    const fn goes<T: Send + Sync>() {}
    goes::<UdpSocket<netmem_pool::Private>>();
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::stack::page_counts::PageCounts;
    use crate::stack::remote::port::{Hub, Port};
    use crate::stack::shared::notifier::Notifier;
    use netmem_pool::{Private, SharedPool};
    use std::sync::OnceLock;
    use std::task::Wake;

    /// A waker that uses its socket at once.
    #[derive(Default)]
    struct Inline {
        socket: OnceLock<Arc<UdpSocket<Private>>>,
        outcome: OnceLock<Result<(), SocketError>>,
    }

    impl Wake for Inline {
        fn wake(self: Arc<Self>) {
            let socket = self.socket.get().expect("a socket");
            assert!(!socket.send.is_locked() && socket.receive.try_lock().is_ok(), "a lock is held");
            let _ = self.outcome.set(socket.send_to(b"x", to(), &DatagramOptions::default()));
        }
    }

    fn to() -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], 9))
    }

    /// A socket whose stack ends between the check of a call and its signal, and what the stack
    /// has of it. The waker of a task that waits calls the socket.
    fn ending(pages: u32) -> (Arc<Inline>, Arc<UdpSocket<Private>>, Box<DatagramParts<Private>>) {
        let hub = Arc::new(Hub::new(Arc::new(Notifier::new().expect("a descriptor"))));
        let pool = Arc::new(SharedPool::in_memory(16).expect("pages"));
        let pages = RemotePages::new(Arc::new(PageCounts::new(pages)), pool);
        let (socket, mut parts) = UdpSocket::new(Arc::new(Port::new(hub.clone())), pages, false);
        assert!(parts.sent.wait_for_items());
        let (waker, socket) = (Arc::<Inline>::default(), Arc::new(socket));
        let _ = waker.socket.set(socket.clone());
        assert!(socket.poll_bound(&mut Context::from_waker(&waker.clone().into())).is_pending());
        // The port is not in the queue, so that the end does not reach it before the signal.
        hub.close();
        (waker, socket, parts)
    }

    #[test]
    fn a_waker_that_is_called_by_a_signal_uses_the_socket() {
        let (waker, socket, _parts) = ending(16);
        assert_eq!(socket.send_to(b"x", to(), &DatagramOptions::default()), Ok(()));
        assert_eq!(waker.outcome.get(), Some(&Err(SocketError::StackGone)));
    }

    #[test]
    fn a_waker_that_is_called_by_a_request_for_pages_uses_the_socket() {
        let (waker, socket, _parts) = ending(0);
        assert_eq!(socket.send_to(b"x", to(), &DatagramOptions::default()), Err(SocketError::WouldBlock));
        let waits = socket.poll_writable(&mut Context::from_waker(&waker.clone().into()));
        assert_eq!(waits, Poll::Ready(Err(SocketError::StackGone)));
        assert_eq!(waker.outcome.get(), Some(&Err(SocketError::StackGone)));
    }
}
