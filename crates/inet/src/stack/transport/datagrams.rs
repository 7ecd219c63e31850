//! UDP: datagrams whose payload is fragments.

use crate::Time;
use crate::route::MIN_PATH_MTU_V4;
use crate::stack::address::canonical;
use crate::stack::core::Core;
use crate::stack::path::{NextHop, Path};
use crate::stack::payload::Payload;
use crate::stack::shared::directory::{Addresses, Protocol};
use crate::stack::sockets::fragment::Fragment;
use crate::stack::{SocketError, Sockets};
use crate::tcp::{Budget, Held};
use crate::wire::{Flow, HEADROOM, IcmpKind, MAX_HEADERS, Outer};
use netmem_packet::{Packet, TxQueue};
use netmem_pool::{Frag, Mapped, Page};
use slab::Slab;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The most datagrams that wait for the transmit ring. A further one is refused, and the user tries
/// again.
const OUTBOX: usize = 1024;
/// The most datagrams that wait in a socket for its user.
const QUEUE: usize = 1024;
/// For so long after a long datagram was sent, an error that says it was too long is believed.
const ERROR_AGE: Duration = Duration::from_secs(3);
/// Payload of datagrams that are short enough for each path.
const SHORT: usize = MIN_PATH_MTU_V4 as usize - 28;
/// Long datagrams that a socket remembers, for errors about them.
const REMEMBERED: usize = 64;

/// The sockets of a stack.
pub(crate) struct Datagrams<M: Mapped> {
    sockets: Slab<Socket<M>>,
    bound: HashMap<(Addresses, u16), u32>,
    outbox: VecDeque<Outgoing<M>>,
    /// Pages of the stack's pool in the outbox.
    held: usize,
    /// The outbox: frames with their headers that wait because the ring was full, and whether each
    /// is for this host.
    ready: VecDeque<(Packet<M>, bool)>,
    /// Sockets that found the outbox full.
    writers: Vec<Waker>,
}

struct Socket<M: Mapped> {
    queue: VecDeque<Arrived<M>>,
    /// Pages that wait in the queue or are held by the user.
    budget: Budget,
    read: Option<Waker>,
    /// The only station that it exchanges datagrams with, if it is connected.
    peer: Option<SocketAddr>,
    /// An error that a connected socket reports.
    error: Option<SocketError>,
    /// Long datagrams that were sent lately, the latest last.
    long: VecDeque<Long>,
}

/// A datagram that may be too long for its path.
#[derive(Clone, Copy)]
struct Long {
    to: SocketAddr,
    /// Bytes of its header and its payload.
    len: u16,
    at: Time,
}

impl<M: Mapped> Socket<M> {
    /// Notes that a datagram with `len` bytes of payload is sent. Each path admits short ones.
    fn sends(&mut self, to: SocketAddr, len: usize, at: Time) {
        if len > SHORT {
            if self.long.len() == REMEMBERED {
                self.long.pop_front();
            }
            // It fits: a datagram has at most 65535 bytes.
            self.long.push_back(Long { to, len: (len + 8) as u16, at });
        }
    }

    /// Whether it has sent such a datagram lately.
    fn has_sent(&self, to: SocketAddr, len: u16, now: Time) -> bool {
        self.long.iter().any(|sent| sent.to == to && sent.len == len && now.since(sent.at) < ERROR_AGE)
    }
}

/// A datagram to be sent.
struct Outgoing<M: Mapped> {
    flow: Flow,
    packet: Packet<M>,
    /// Pages of the stack's pool into which it was copied.
    pages: usize,
}

/// A datagram that was received.
struct Arrived<M: Mapped> {
    flow: Flow,
    first: Held<Frag<M>>,
    rest: Vec<Held<Frag<M>>>,
}

impl<M: Mapped> Datagrams<M> {
    pub(crate) fn new() -> Self {
        Self {
            sockets: Slab::new(),
            bound: HashMap::new(),
            outbox: VecDeque::new(),
            held: 0,
            ready: VecDeque::new(),
            writers: Vec::new(),
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        // Behind a datagram that waits for the ring, the others wait for it, too.
        !self.outbox.is_empty() && self.ready.is_empty()
    }

    /// Whether a datagram waits for the ring.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The socket that a packet with this flow is for.
    pub(crate) fn find(&self, flow: &Flow) -> Option<u32> {
        let bound = |to| self.bound.get(&(to, flow.local.port())).copied();
        let found = bound(Addresses::One(flow.local.ip())).or_else(|| bound(Addresses::All));
        found.filter(|&n| self.sockets[n as usize].peer.is_none_or(|peer| peer == flow.remote))
    }

    /// Queues a received datagram. Returns false if the socket has no room or no budget; the
    /// datagram is then dropped.
    pub(crate) fn deliver(&mut self, n: u32, flow: Flow, packet: Packet<M>, wakers: &mut Vec<Waker>) -> bool {
        let Some(socket) = self.sockets.get_mut(n as usize).filter(|socket| socket.queue.len() < QUEUE) else {
            return false;
        };
        let (first, rest) = packet.into_fragments();
        let held = |frag| socket.budget.try_charge().map(|charge| Held::new(frag, charge));
        let Some(first) = held(first) else { return false };
        let Some(rest) = rest.map(held).collect() else { return false };
        socket.queue.push_back(Arrived { flow, first, rest });
        wakers.extend(socket.read.take());
        true
    }
}

impl<P: Payload> Core<P> {
    /// Processes an ICMP error about a datagram of `len` bytes. A socket that is not connected does
    /// not report it: what it receives next is of another station.
    pub(crate) fn datagram_error(&mut self, flow: &Flow, kind: IcmpKind, len: u16) {
        let Some(n) = self.udp.find(flow) else { return };
        let Some(socket) = self.udp.sockets.get_mut(n as usize) else { return };
        match kind {
            IcmpKind::TooBig { mtu } if socket.has_sent(flow.remote, len, self.now) => {
                if let Some(path) = self.find_path(flow.remote.ip()) {
                    path.datagram_too_big(mtu, self.now);
                }
            }
            IcmpKind::PortUnreachable if socket.peer.is_some() => {
                socket.error = Some(SocketError::Refused);
                self.wakers.extend(socket.read.take());
            }
            _ => {}
        }
    }

    /// Sends datagrams that wait. Returns how many left the outbox.
    pub(crate) fn send_datagrams<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T) -> usize {
        let mut sent = 0;
        loop {
            let Some((packet, here)) = self.udp.ready.pop_front() else {
                if self.udp.outbox.is_empty() {
                    break;
                }
                // It may be dropped, or wait for its next hop.
                let _ = self.next_datagram(tx);
                continue;
            };
            let outcome = if here { self.egress.send_to_self(packet) } else { self.egress.send(tx, packet) };
            if let Err(packet) = outcome {
                self.udp.ready.push_front((packet, here));
                break;
            }
            sent += 1;
        }
        if self.udp.outbox.len() < OUTBOX && self.pages.admits(self.udp.held) {
            self.wakers.append(&mut self.udp.writers);
        }
        sent
    }

    /// Takes a datagram out of the outbox and writes its headers. If it is too long for the path,
    /// it is sent in fragments.
    fn next_datagram<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T) -> Option<()> {
        let Outgoing { flow, packet, pages } = self.udp.outbox.pop_front()?;
        self.udp.held -= pages;
        self.pages.release(pages);
        let mut path = self.find_path(flow.remote.ip())?;
        let hop = path.next_hop(&self.host, self.now);
        path.touch(self.now);
        let link = if let NextHop::Link(link) = hop { link } else { path.unresolved() };
        let (outer, here, mtu) = (Outer::new(Some(link)), matches!(hop, NextHop::Here), path.datagram_mtu(self.now));
        if here || packet.len() <= whole(mtu, &flow) {
            let packet = self.egress.datagram(&outer, &flow, packet)?;
            self.leaves(tx, &path, hop, packet);
        } else {
            for packet in self.egress.fragments(&outer, &flow, &packet, mtu)? {
                self.leaves(tx, &path, hop, packet);
            }
        }
        Some(())
    }

    fn leaves<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        path: &Path<P::Count>,
        hop: NextHop,
        packet: Packet<P::Mem>,
    ) {
        match hop {
            NextHop::Waits => self.await_next_hop(tx, path, packet),
            NextHop::Link(_) => self.udp.ready.push_back((packet, false)),
            NextHop::Here => self.udp.ready.push_back((packet, true)),
        }
    }
}

/// The longest datagram that is not sent in fragments.
fn whole(mtu: u16, flow: &Flow) -> usize {
    usize::from(mtu).saturating_sub(if flow.local.is_ipv4() { 28 } else { 48 })
}

/// A socket for datagrams.
///
/// Payload is received as [`Fragment`]s, and sent from pages. A datagram that is longer than the
/// path's MTU is sent in IP fragments, all of which must arrive; its checksum is computed by the
/// CPU. Calls do not block: [`SocketError::WouldBlock`] means that a call can do nothing at
/// present; the `poll_` calls then call a waker when that changes.
///
/// Stays on the stack's thread.
pub struct UdpSocket<P: Payload> {
    sockets: Sockets<P>,
    n: u32,
    local: SocketAddr,
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
}

impl<P: Payload> Sockets<P> {
    /// Opens a socket on `local`. The unspecified address means all addresses of the host; port 0
    /// means any port.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoPort`].
    pub fn bind(&self, local: SocketAddr) -> Result<UdpSocket<P>, SocketError> {
        let mut core = self.core.borrow_mut();
        let local = canonical(local);
        core.check_local(local.ip())?;
        let (host, to) = (core.host.clone(), Addresses::of(local.ip(), false));
        let (directory, bound) = (host.directory(), (to, core.id));
        let port = match local.port() {
            0 => directory.bind_port(Protocol::Udp, host.ports(), local.ip(), bound).ok_or(SocketError::NoPort)?,
            port if directory.bind(Protocol::Udp, port, bound) => port,
            _ => return Err(SocketError::InUse),
        };
        let local = SocketAddr::new(local.ip(), port);
        let budget = Budget::within(core.options.pages / 4, Some(&core.budget));
        let socket =
            Socket { queue: VecDeque::new(), budget, read: None, peer: None, error: None, long: VecDeque::new() };
        let n = core.udp.sockets.insert(socket) as u32;
        core.udp.bound.insert((to, port), n);
        drop(core);
        Ok(UdpSocket { sockets: self.clone(), n, local })
    }
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
        let mut core = self.sockets.core.borrow_mut();
        let peer = peer.map(|peer| core.flow_to(self.local, peer)).transpose()?.map(|flow| flow.remote);
        let socket = core.udp.sockets.get_mut(self.n as usize).ok_or(SocketError::StackGone)?;
        (socket.peer, socket.error) = (peer, None);
        Ok(())
    }

    /// The station that the socket is [connected](Self::connect) to.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.sockets.core.borrow().udp.sockets.get(self.n as usize)?.peer
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

    /// Receives a datagram: its payload goes into the first places of `into`, without a copy.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: none is there. [`SocketError::Refused`], if the socket is
    /// [connected](Self::connect): a datagram that was sent earlier reached no socket.
    pub fn recv_from(&mut self, into: &mut [Fragment<P::Mem>]) -> Result<Received, SocketError> {
        let mut core = self.sockets.core.borrow_mut();
        let socket = core.udp.sockets.get_mut(self.n as usize).ok_or(SocketError::StackGone)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let Arrived { flow, first, rest } = socket.queue.pop_front().ok_or(SocketError::WouldBlock)?;
        drop(core);
        let mut received = Received { fragments: 0, len: 0, from: flow.remote, to: flow.local.ip(), truncated: false };
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
                let mut core = self.sockets.core.borrow_mut();
                let before = core.udp.sockets.get_mut(self.n as usize).and_then(|socket| socket.read.replace(waker));
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
    /// [`SocketError::TooLong`], [`SocketError::NoRoute`]; [`SocketError::WouldBlock`]: there is no room in the queue, or no page.
    pub fn send_to(&mut self, payload: &[u8], to: SocketAddr) -> Result<(), SocketError> {
        let mut core = self.sockets.core.borrow_mut();
        let flow = core.datagram_flow(self.local, to, payload.len())?;
        // Headers go in front of it.
        let at = HEADROOM + MAX_HEADERS;
        let mut page = core.datagram_page(0)?;
        let most = page.len() - at;
        let (first, rest) = payload.split_at(payload.len().min(most));
        let too_long = SocketError::TooLong { len: payload.len(), most };
        page.copy_from(at, first).map_err(|_| too_long)?;
        let mut packet = Packet::new(page.freeze_range(at..at + first.len()));
        let mut pages = 1;
        for part in rest.chunks(core.egress.pool.page_size()) {
            let mut page = core.datagram_page(pages)?;
            page.copy_from(0, part).map_err(|_| too_long)?;
            packet.push(page.freeze_range(0..part.len())).map_err(|_| too_long)?;
            pages += 1;
        }
        core.egress.stats.copied_sent += payload.len() as u64;
        core.push_datagram(self.n, Outgoing { flow, packet, pages });
        Ok(())
    }

    /// Sends a fragment as one datagram, by the next poll of the stack. It is not copied.
    ///
    /// # Errors
    ///
    /// As of [`send_to`](Self::send_to).
    pub fn send_fragment_to(&mut self, payload: Frag<P::Mem>, to: SocketAddr) -> Result<(), SocketError> {
        let mut core = self.sockets.core.borrow_mut();
        let flow = core.datagram_flow(self.local, to, payload.len())?;
        core.push_datagram(self.n, Outgoing { flow, packet: Packet::new(payload), pages: 0 });
        Ok(())
    }

    /// Ready when there is room for a datagram.
    pub fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut core = self.sockets.core.borrow_mut();
        if core.udp.outbox.len() < OUTBOX && core.pages.admits(core.udp.held) {
            return Poll::Ready(());
        }
        let waker = cx.waker();
        if !core.udp.writers.iter().any(|other| other.will_wake(waker)) {
            core.udp.writers.push(waker.clone());
        }
        Poll::Pending
    }
}

impl<P: Payload> Core<P> {
    fn datagram_flow(&mut self, local: SocketAddr, to: SocketAddr, len: usize) -> Result<Flow, SocketError> {
        let flow = self.flow_to(local, to)?;
        let to = flow.remote;
        if self.udp.outbox.len() >= OUTBOX {
            return Err(SocketError::WouldBlock);
        }
        let most = if to.is_ipv4() { 65535 - 28 } else { 65535 - 8 };
        if len > most {
            return Err(SocketError::TooLong { len, most });
        }
        Ok(flow)
    }

    /// The addresses and ports of datagrams from a socket to `to`.
    fn flow_to(&mut self, local: SocketAddr, to: SocketAddr) -> Result<Flow, SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        let to = canonical(to);
        let path = self.find_path(to.ip()).filter(|_| to.port() != 0).ok_or(SocketError::NoRoute)?;
        let source = if local.ip().is_unspecified() { path.source() } else { local.ip() };
        if source.is_ipv4() != to.is_ipv4() {
            return Err(SocketError::NoRoute);
        }
        Ok(Flow { local: SocketAddr::new(source, local.port()), remote: to })
    }

    /// A page for a datagram that has `more` already. All datagrams together have the share of one
    /// connection.
    fn datagram_page(&mut self, more: usize) -> Result<Page<P::Mem>, SocketError> {
        let admitted = self.pages.admits(self.udp.held + more);
        admitted.then(|| self.egress.page()).flatten().ok_or(SocketError::WouldBlock)
    }

    fn push_datagram(&mut self, socket: u32, outgoing: Outgoing<P::Mem>) {
        if let Some(socket) = self.udp.sockets.get_mut(socket as usize) {
            socket.sends(outgoing.flow.remote, outgoing.packet.len(), self.now);
        }
        self.udp.held += outgoing.pages;
        self.pages.count(outgoing.pages);
        self.udp.outbox.push_back(outgoing);
        self.wake_driver();
    }
}

impl<P: Payload> Drop for UdpSocket<P> {
    fn drop(&mut self) {
        let mut core = self.sockets.core.borrow_mut();
        let socket = core.udp.sockets.try_remove(self.n as usize);
        let (to, port) = (Addresses::of(self.local.ip(), false), self.local.port());
        core.udp.bound.remove(&(to, port));
        core.host.directory().unbind(Protocol::Udp, port, (to, core.id));
        drop(core);
        // The socket's contents are dropped when no table is borrowed.
        drop(socket);
    }
}

impl<P: Payload> fmt::Debug for UdpSocket<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UdpSocket({})", self.local)
    }
}
