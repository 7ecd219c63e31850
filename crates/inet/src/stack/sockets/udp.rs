//! Sockets of UDP: datagrams whose payload is fragments.

use crate::stack::core::{Core, SharedCore};
use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::sockets::fragment::Fragment;
use crate::stack::transport::datagrams::{Manner, OutgoingDatagram, ReceivedDatagram, flow_to};
use crate::stack::transport::handles::UdpId;
use crate::wire::{HEADROOM, MAX_HEADERS};
use netmem_packet::{MAX_FRAGS, Packet};
use netmem_pool::Frag;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::task::{Context, Poll};

/// A socket for datagrams.
///
/// Payload is received as [`Fragment`]s, and sent from pages. A datagram that is longer than the
/// path's MTU is sent in IP fragments, all of which must arrive; its checksum is computed by the
/// CPU. Calls do not block: [`SocketError::WouldBlock`] means that a call can do nothing at
/// present; the `poll_` calls then call a waker when that changes.
///
/// Stays on the stack's thread.
pub struct UdpSocket<P: Payload> {
    pub(crate) core: SharedCore<P>,
    pub(crate) id: UdpId,
    pub(crate) local: SocketAddr,
    /// Pages of the datagram for which the last call of [`send_to`](Self::send_to) found too few; 1
    /// otherwise.
    pub(crate) wanted: usize,
}

/// A datagram that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// How many fragments its payload has. An empty datagram has none.
    pub fragments: usize,
    /// Bytes of payload.
    pub len: usize,
    /// The sender.
    pub from: SocketAddr,
    /// The address that it was sent to.
    pub to: IpAddr,
    /// Whether the datagram had more fragments than there were places. The rest of it is lost.
    pub truncated: bool,
    /// The bits of ECN in its IP header (RFC 3168).
    pub ecn: u8,
}

impl<P: Payload> UdpSocket<P> {
    /// The address and the port that it is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Connects the socket to a station: it receives datagrams of that station alone, and reports
    /// that they reach no socket there. Datagrams that wait to be received stay. `None` ends it.
    ///
    /// # Errors
    ///
    /// [`SocketError::NoRoute`].
    pub fn connect(&mut self, peer: Option<SocketAddr>) -> Result<(), SocketError> {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        let peer = peer.map(|peer| flow_to(resources, self.local, peer)).transpose()?.map(|flow| flow.remote);
        let socket = datagrams.get_mut(self.id).ok_or(SocketError::StackGone)?;
        (socket.peer, socket.error) = (peer, None);
        Ok(())
    }

    /// The station that the socket is [connected](Self::connect) to.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.core.borrow().datagrams.get(self.id)?.peer
    }

    /// Sends a copy of `payload` to the station that the socket is [connected](Self::connect) to.
    ///
    /// # Errors
    ///
    /// As of [`send_to`](Self::send_to). [`SocketError::NotConnected`].
    pub fn send(&mut self, payload: &[u8]) -> Result<(), SocketError> {
        let peer = self.peer_addr().ok_or(SocketError::NotConnected)?;
        self.send_to(payload, peer)
    }

    /// Receives a datagram: its payload is stored in the first places of `into`, without a copy.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: none is there. [`SocketError::Refused`], if the socket is
    /// [connected](Self::connect): a datagram that was sent earlier reached no socket.
    pub fn recv_from(&mut self, into: &mut [Fragment<P::Mem>]) -> Result<Received, SocketError> {
        let mut core = self.core.borrow_mut();
        let socket = core.datagrams.get_mut(self.id).ok_or(SocketError::StackGone)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let ReceivedDatagram { flow, ecn, first, rest, .. } = socket.pop().ok_or(SocketError::WouldBlock)?;
        drop(core);
        let (from, to) = (flow.remote, flow.local.ip());
        let mut received = Received { fragments: 0, len: 0, from, to, truncated: false, ecn };
        let mut places = into.iter_mut();
        for held in std::iter::once(first).chain(rest).filter(|held| held.len() > 0) {
            let Some(place) = places.next() else {
                received.truncated = true;
                break;
            };
            received.len += held.len();
            received.fragments += 1;
            *place = Fragment::new(held);
        }
        Ok(received)
    }

    /// Like [`recv_from`](Self::recv_from); the waker is called when there is a datagram.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_recv_from(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [Fragment<P::Mem>],
    ) -> Poll<Result<Received, SocketError>> {
        match self.recv_from(into) {
            Err(SocketError::WouldBlock) => {
                let waker = cx.waker().clone();
                let mut core = self.core.borrow_mut();
                let before = core.datagrams.get_mut(self.id).and_then(|socket| socket.read.replace(waker));
                drop(core);
                drop(before);
                Poll::Pending
            }
            outcome => Poll::Ready(outcome),
        }
    }

    /// Sends a copy of `payload` as one datagram, by the next poll of the stack.
    ///
    /// # Errors
    ///
    /// [`SocketError::TooLong`]: also if it needs more pages than all datagrams of the stack can
    /// have, or than a packet can have; [`SocketError::NoRoute`]; [`SocketError::WouldBlock`]:
    /// there is no room in the queue, or there are too few pages.
    pub fn send_to(&mut self, payload: &[u8], to: SocketAddr) -> Result<(), SocketError> {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        self.wanted = 1;
        let flow = datagrams.flow(resources, self.local, to, payload.len())?;
        // Headers go in front of it.
        let (at, page_size) = (HEADROOM + MAX_HEADERS, resources.egress.pool.page_size());
        let most = (resources.pages.most().min(MAX_FRAGS) * page_size).saturating_sub(at);
        let too_long = SocketError::TooLong { len: payload.len(), most };
        if payload.len() > most {
            return Err(too_long);
        }
        self.wanted = (at + payload.len()).div_ceil(page_size);
        let mut page = datagrams.page(resources, 0)?;
        let (first, rest) = payload.split_at(payload.len().min(page.len() - at));
        page.copy_from(at, first).map_err(|_| too_long)?;
        let mut packet = Packet::new(page.freeze_range(at..at + first.len()));
        let mut pages = 1;
        for chunk in rest.chunks(page_size) {
            let mut page = datagrams.page(resources, pages)?;
            page.copy_from(0, chunk).map_err(|_| too_long)?;
            packet.push(page.freeze_range(0..chunk.len())).map_err(|_| too_long)?;
            pages += 1;
        }
        self.wanted = 1;
        resources.egress.stats.copied_sent += payload.len() as u64;
        datagrams.push(resources, self.id, OutgoingDatagram { flow, packet, pages, manner: Manner::default() });
        Ok(())
    }

    /// Sends a fragment as one datagram, by the next poll of the stack. It is not copied.
    ///
    /// # Errors
    ///
    /// As of [`send_to`](Self::send_to).
    pub fn send_fragment_to(&mut self, payload: Frag<P::Mem>, to: SocketAddr) -> Result<(), SocketError> {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        let flow = datagrams.flow(resources, self.local, to, payload.len())?;
        let (packet, manner) = (Packet::new(payload), Manner::default());
        datagrams.push(resources, self.id, OutgoingDatagram { flow, packet, pages: 0, manner });
        Ok(())
    }

    /// Sends a datagram that another thread has prepared. Its `pages` pages count as the stack's.
    /// Returns false if it cannot be sent at all; it is dropped. There must be
    /// [room](Self::has_room).
    pub(crate) fn send_prepared(
        &mut self,
        (packet, pages): (Packet<P::Mem>, usize),
        to: SocketAddr,
        from: Option<IpAddr>,
        manner: Manner,
    ) -> bool {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        let local = from.map_or(self.local, |from| SocketAddr::new(from, self.local.port()));
        let ours = from.is_none_or(|from| resources.check_local(from).is_ok());
        let flow = datagrams.flow(resources, local, to, packet.len()).ok().filter(|_| ours);
        let Some(flow) = flow else {
            resources.egress.stats.datagrams_unsent += manner.datagrams_of(packet.len());
            return false;
        };
        resources.egress.stats.copied_sent += packet.len() as u64;
        datagrams.push(resources, self.id, OutgoingDatagram { flow, packet, pages, manner });
        true
    }

    /// Whether there is room for a datagram that was copied already. If not, the waker is called
    /// when there is.
    pub(crate) fn has_room(&self, cx: &mut Context<'_>) -> bool {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        let has_room = datagrams.has_room(resources);
        if !has_room {
            datagrams.wait_for_room(cx.waker());
        }
        has_room
    }

    /// The waker is called when there may be more pages, and the pool has as many as this socket or
    /// another one waits for. They will count for the thread of its handle.
    pub(crate) fn wait_for_pages(&self, cx: &mut Context<'_>, pages: usize) {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        datagrams.wait_for_pages(resources, (pages, true), cx.waker());
    }

    /// Whether that waker has not been called yet.
    pub(crate) fn awaits_page(&self, cx: &mut Context<'_>) -> bool {
        self.core.borrow().datagrams.awaits_page(cx.waker())
    }

    /// The next received datagram, or several that have arrived as one frame.
    pub(crate) fn pop(&mut self, cx: &mut Context<'_>) -> Option<ReceivedDatagram<P::Mem>> {
        let mut core = self.core.borrow_mut();
        let socket = core.datagrams.get_mut(self.id)?;
        socket.join();
        let next = socket.pop();
        let before = if next.is_none() { socket.read.replace(cx.waker().clone()) } else { None };
        drop(core);
        drop(before);
        next
    }

    /// Ready when there is room for a datagram, and for one of [`send_to`](Self::send_to) so many
    /// pages as the last call found too few of. Cost: those pages are allocated, and returned.
    pub fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        if !datagrams.has_room(resources) {
            datagrams.wait_for_room(cx.waker());
        } else if !datagrams.has_pages(resources, self.wanted) {
            datagrams.wait_for_pages(resources, (self.wanted, false), cx.waker());
        } else {
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

impl<P: Payload> Drop for UdpSocket<P> {
    fn drop(&mut self) {
        let mut guard = self.core.borrow_mut();
        let Core { datagrams, resources, .. } = &mut *guard;
        let socket = datagrams.unbind(resources, self.id, self.local);
        drop(guard);
        // The socket's contents are dropped when no table is borrowed.
        drop(socket);
    }
}

impl<P: Payload> fmt::Debug for UdpSocket<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UdpSocket({})", self.local)
    }
}
