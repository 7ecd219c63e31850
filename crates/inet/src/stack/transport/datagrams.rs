//! The UDP of a stack: its sockets, and the datagrams that wait to be sent.
//!
//! ```text
//!   frame ──► find ──► handle_datagram ──► the socket's queue ──► pop, by its user
//!   push, by a user ──► outbox ──► poll_transmit: headers ──► ready ──► the transmit queue
//! ```
//!
//! The path of a datagram is looked up when it is pushed, for its source address, and again when it
//! is sent: meanwhile routes can change.

use crate::route::MIN_PATH_MTU_V4;
use crate::stack::address::canonical;
use crate::stack::control::Control;
use crate::stack::error::SocketError;
use crate::stack::pages::RETRY;
use crate::stack::path::{NextHop, Path};
use crate::stack::payload::Payload;
use crate::stack::resources::Resources;
use crate::stack::shared::directory::{Addresses, Protocol};
use crate::stack::shrink_map::ShrinkMap;
use crate::stack::table::Table;
use crate::stack::transport::handles::{OfUdpSockets, UdpId};
use crate::tcp::{Held, LocalBudget};
use crate::time::Time;
use crate::wire::{Flow, IcmpKind, Outer};
use netmem_packet::{Gso, GsoKind, Packet, TxQueue};
use netmem_pool::{Frag, Mapped, Page};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::task::Waker;
use std::time::Duration;

/// The most datagrams that wait for the transmit ring. A further one is refused, and the user tries
/// again.
const OUTBOX: usize = 1024;
/// The most datagrams that wait in a socket for its user.
const QUEUE: usize = 1024;
/// For so long after a long datagram was sent, an error that reports that it was too long is
/// believed.
const ERROR_AGE: Duration = Duration::from_secs(3);
/// Payload of datagrams that are short enough for each path.
const SHORT: usize = MIN_PATH_MTU_V4 as usize - 28;
/// Long datagrams that a socket remembers, for errors about them.
const REMEMBERED: usize = 64;

/// The sockets of a stack.
pub(crate) struct Datagrams<M: Mapped> {
    sockets: Table<OfUdpSockets, UdpEntry<M>>,
    bound: ShrinkMap<(Addresses, u16), UdpId>,
    outbox: VecDeque<OutgoingDatagram<M>>,
    /// Pages of the stack's pool in the outbox.
    held: usize,
    /// The outbox: frames with their headers that wait because the ring was full, and whether each
    /// is for this host.
    ready: VecDeque<(Packet<M>, bool)>,
    /// Sockets that found no room in the outbox.
    writers: Vec<Waker>,
    /// Sockets that found too few pages. Apart from those, because what was copied already needs
    /// no page.
    starved: Vec<Waker>,
    /// The fewest pages that one of them needs.
    wanted: usize,
    /// One of them is the socket of another thread, which has a share of its own.
    others: bool,
    /// The fewest pages that were free since the first of them waits.
    free: u32,
    /// When they try again whatever has happened.
    retry: Option<Time>,
}

/// A socket in its table.
pub(crate) struct UdpEntry<M: Mapped> {
    queue: VecDeque<ReceivedDatagram<M>>,
    /// Pages that wait in the queue or are held by the user.
    budget: LocalBudget,
    pub(crate) read: Option<Waker>,
    /// The only station that it exchanges datagrams with, if it is connected.
    pub(crate) peer: Option<SocketAddr>,
    /// An error that a connected socket reports.
    pub(crate) error: Option<SocketError>,
    /// Long datagrams that were sent lately, the latest last.
    long: VecDeque<LongDatagram>,
    /// Datagrams of one frame stay together.
    joined: bool,
}

/// A datagram that may be too long for its path.
#[derive(Clone, Copy)]
struct LongDatagram {
    to: SocketAddr,
    /// Bytes of its header and its payload.
    len: u16,
    at: Time,
}

impl<M: Mapped> UdpEntry<M> {
    /// Notes that a datagram with `len` bytes of payload is sent. Each path admits short ones.
    fn note_sent(&mut self, to: SocketAddr, len: usize, at: Time) {
        if len > SHORT {
            if self.long.len() == REMEMBERED {
                self.long.pop_front();
            }
            // It fits: a datagram has at most 65535 bytes.
            self.long.push_back(LongDatagram { to, len: (len + 8) as u16, at });
        }
    }

    /// Whether it has sent such a datagram lately.
    fn has_sent(&self, to: SocketAddr, len: u16, now: Time) -> bool {
        self.long.iter().any(|sent| sent.to == to && sent.len == len && now.since(sent.at) < ERROR_AGE)
    }

    /// Queues a received datagram, or several of `size` bytes each. Returns false if the socket has
    /// no room or no budget; they are then dropped.
    fn enqueue(&mut self, (flow, ecn): (Flow, u8), size: usize, packet: Packet<M>) -> bool {
        if self.queue.len() >= QUEUE {
            return false;
        }
        let (first, rest) = packet.into_fragments();
        let held = |frag| self.budget.try_charge().map(|charge| Held::new(frag, charge));
        let Some(first) = held(first) else { return false };
        let Some(rest) = rest.map(held).collect() else { return false };
        self.queue.push_back(ReceivedDatagram { flow, ecn, size, first, rest });
        true
    }

    /// From now on, datagrams of one frame stay together.
    pub(crate) fn join(&mut self) {
        self.joined = true;
    }

    /// The next received datagram.
    pub(crate) fn pop(&mut self) -> Option<ReceivedDatagram<M>> {
        self.queue.pop_front()
    }
}

/// A datagram to be sent.
pub(crate) struct OutgoingDatagram<M: Mapped> {
    pub(crate) flow: Flow,
    pub(crate) packet: Packet<M>,
    /// Pages of the stack's pool into which it was copied.
    pub(crate) pages: usize,
    pub(crate) manner: Manner,
}

/// How a datagram is sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Manner {
    /// The bits of ECN.
    pub(crate) ecn: u8,
    /// These are several datagrams of so many bytes; the last one can have fewer.
    pub(crate) segment_size: Option<u16>,
    /// If it is longer than the path's MTU, it is dropped instead of sent in fragments.
    pub(crate) never_in_fragments: bool,
}

impl Manner {
    /// How many datagrams `len` bytes of payload are.
    pub(crate) fn datagrams_of(self, len: usize) -> u64 {
        self.segment_size.map_or(1, |size| len.div_ceil(usize::from(size).max(1)).max(1) as u64)
    }
}

/// A datagram that was received, or several of one frame.
pub(crate) struct ReceivedDatagram<M: Mapped> {
    pub(crate) flow: Flow,
    /// The bits of ECN.
    pub(crate) ecn: u8,
    /// Bytes of each datagram; the last one can have fewer.
    pub(crate) size: usize,
    pub(crate) first: Held<Frag<M>>,
    pub(crate) rest: Vec<Held<Frag<M>>>,
}

impl<M: Mapped> Datagrams<M> {
    pub(crate) fn new() -> Self {
        Self {
            sockets: Table::new(),
            bound: ShrinkMap::new(),
            outbox: VecDeque::new(),
            held: 0,
            ready: VecDeque::new(),
            writers: Vec::new(),
            starved: Vec::new(),
            wanted: 0,
            others: false,
            free: 0,
            retry: None,
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
    pub(crate) fn find(&self, flow: &Flow) -> Option<UdpId> {
        let bound = |to| self.bound.get(&(to, flow.local.port())).copied();
        let found = bound(Addresses::One(flow.local.ip())).or_else(|| bound(Addresses::All));
        found.filter(|&id| self.get(id).is_some_and(|socket| socket.peer.is_none_or(|peer| peer == flow.remote)))
    }

    pub(crate) fn get_mut(&mut self, id: UdpId) -> Option<&mut UdpEntry<M>> {
        self.sockets.get_mut(id)
    }

    pub(crate) fn get(&self, id: UdpId) -> Option<&UdpEntry<M>> {
        self.sockets.get(id)
    }
}

impl<M: Mapped> Datagrams<M> {
    // ---- sockets come, and go

    /// Opens a socket. Returns also its port.
    pub(crate) fn bind<P: Payload<Mem = M>>(
        &mut self,
        resources: &Resources<P>,
        local: SocketAddr,
    ) -> Result<(UdpId, u16), SocketError> {
        let (host, to) = (&resources.host, Addresses::of(local.ip(), false));
        let port = host.directory().bind_to(Protocol::Udp, host.ports(), local, (to, resources.id))?;
        let budget = LocalBudget::within(resources.options.pages / 4, Some(&resources.budget));
        let (queue, long) = (VecDeque::new(), VecDeque::new());
        let entry = UdpEntry { queue, budget, read: None, peer: None, error: None, long, joined: false };
        let id = self.sockets.insert(entry);
        self.bound.insert((to, port), id);
        Ok((id, port))
    }

    /// Removes a socket that is bound to `local`. The caller drops it when no table is borrowed.
    pub(crate) fn unbind<P: Payload<Mem = M>>(
        &mut self,
        resources: &Resources<P>,
        id: UdpId,
        local: SocketAddr,
    ) -> Option<UdpEntry<M>> {
        let (to, port) = (Addresses::of(local.ip(), false), local.port());
        self.bound.remove(&(to, port));
        resources.host.directory().unbind(Protocol::Udp, port, (to, resources.id));
        self.sockets.remove(id)
    }

    // ---- what arrives

    /// Processes the payload of a received frame for a socket.
    pub(crate) fn handle_datagram<P: Payload<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        id: UdpId,
        from: (Flow, u8),
        mut packet: Packet<M>,
    ) {
        let Some(socket) = self.get_mut(id) else { return };
        // Several datagrams in one frame: the sender's kernel has not cut them, or the device has
        // merged them.
        let size = match packet.meta.gso {
            Some(Gso { kind: GsoKind::UdpSegment, size, .. }) if size > 0 => usize::from(size),
            _ => usize::MAX,
        };
        let together = if socket.joined { usize::MAX } else { size };
        loop {
            let rest = (packet.len() > together).then(|| packet.clone());
            packet.truncate(together);
            let datagrams = packet.len().div_ceil(size).max(1) as u64;
            let queued = socket.enqueue(from, size, packet);
            if queued {
                resources.wakers.extend(socket.read.take());
            }
            resources.egress.stats.datagrams_dropped += if queued { 0 } else { datagrams };
            let Some(mut next) = rest else { return };
            if next.pull(together).is_err() {
                return;
            }
            packet = next;
        }
    }

    /// Processes an ICMP error about a datagram of `len` bytes. A socket that is not connected does
    /// not report it: what it receives next is of another station.
    pub(crate) fn handle_icmp_error<P: Payload<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        flow: &Flow,
        kind: IcmpKind,
        len: u16,
    ) {
        let Some(socket) = self.find(flow).and_then(|id| self.get_mut(id)) else { return };
        match kind {
            IcmpKind::TooBig { mtu } if socket.has_sent(flow.remote, len, resources.now) => {
                if let Some(path) = resources.find_path(flow.remote.ip()) {
                    path.handle_datagram_too_big(mtu, resources.now);
                }
            }
            IcmpKind::PortUnreachable if socket.peer.is_some() => {
                socket.error = Some(SocketError::Refused);
                resources.wakers.extend(socket.read.take());
            }
            _ => {}
        }
    }

    // ---- what is sent

    /// Whether a datagram that is copied into `pages` pages would find them.
    pub(crate) fn has_pages<P: Payload<Mem = M>>(&self, resources: &Resources<P>, pages: usize) -> bool {
        resources.pages.admits_more(self.held, pages) && resources.egress.has_pages(pages)
    }

    /// Whether as many datagrams wait for the ring as may.
    fn is_full(&self) -> bool {
        self.outbox.len() >= OUTBOX
    }

    /// Whether the outbox has room, also for a datagram that occupies pages already. Those in the
    /// outbox have the share of one connection, so that a socket which sends faster than the device
    /// leaves pages for others.
    pub(crate) fn has_room<P: Payload<Mem = M>>(&self, resources: &Resources<P>) -> bool {
        !self.is_full() && resources.pages.is_within_share(self.held)
    }

    /// Registers a waker, which is called when the outbox has room.
    pub(crate) fn wait_for_room(&mut self, waker: &Waker) {
        if !self.writers.iter().any(|other| other.will_wake(waker)) {
            self.writers.push(waker.clone());
        }
    }

    /// Registers a waker. All of them are called when there are the fewest pages that one of those
    /// that wait needs, and there may be more than now: the device has completed frames, pages were
    /// released, or some time has passed. `other`: the pages will count for another thread.
    pub(crate) fn wait_for_pages<P: Payload<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        (pages, other): (usize, bool),
        waker: &Waker,
    ) {
        if self.starved.is_empty() {
            (self.free, self.wanted, self.others) = (resources.pages.free(), pages, false);
        }
        self.wanted = self.wanted.min(pages);
        self.others |= other;
        if !self.awaits_page(waker) {
            self.starved.push(waker.clone());
            resources.await_page();
        }
    }

    pub(crate) fn awaits_page(&self, waker: &Waker) -> bool {
        self.starved.iter().any(|other| other.will_wake(waker))
    }

    /// When sockets that found too few pages try again.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.retry
    }

    /// The flow of a datagram of `len` bytes from a socket at `local`. [`push`](Self::push) is the
    /// call that follows.
    pub(crate) fn flow<P: Payload<Mem = M>>(
        &self,
        resources: &mut Resources<P>,
        local: SocketAddr,
        to: SocketAddr,
        len: usize,
    ) -> Result<Flow, SocketError> {
        let flow = flow_to(resources, local, to)?;
        if self.is_full() {
            return Err(SocketError::WouldBlock);
        }
        let most = if flow.remote.is_ipv4() { 65535 - 28 } else { 65535 - 8 };
        if len > most {
            return Err(SocketError::TooLong { len, most });
        }
        Ok(flow)
    }

    /// A page for a datagram that has `more` already, which are not counted yet. All datagrams
    /// together have the share of one connection: the rule of [`has_pages`](Self::has_pages).
    pub(crate) fn page<P: Payload<Mem = M>>(
        &self,
        resources: &mut Resources<P>,
        more: usize,
    ) -> Result<Page<M>, SocketError> {
        let admitted = resources.pages.admits_more(self.held, more + 1);
        admitted.then(|| resources.egress.page()).flatten().ok_or(SocketError::WouldBlock)
    }

    /// Puts a datagram of a socket into the outbox.
    pub(crate) fn push<P: Payload<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        id: UdpId,
        datagram: OutgoingDatagram<M>,
    ) {
        if let Some(socket) = self.get_mut(id) {
            let len = datagram.manner.segment_size.map_or(datagram.packet.len(), usize::from);
            socket.note_sent(datagram.flow.remote, len, resources.now);
        }
        self.held += datagram.pages;
        resources.pages.count(datagram.pages);
        self.outbox.push_back(datagram);
        resources.wake_driver();
    }

    /// Whether no datagram waits to be sent, and no socket waits to send one.
    #[inline]
    fn is_quiet(&self) -> bool {
        self.ready.is_empty() && self.outbox.is_empty() && self.writers.is_empty() && self.starved.is_empty()
    }

    /// Sends datagrams that wait. `completed`: transmissions that the device has completed in this
    /// poll. Returns how many left the outbox.
    #[inline]
    pub(crate) fn poll_transmit<P: Payload<Mem = M>, T: TxQueue<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        tx: &mut T,
        completed: usize,
    ) -> usize {
        if self.is_quiet() {
            return 0;
        }
        self.transmit(resources, tx, completed)
    }

    #[inline(never)]
    fn transmit<P: Payload<Mem = M>, T: TxQueue<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        tx: &mut T,
        completed: usize,
    ) -> usize {
        let mut sent = 0;
        loop {
            let Some((packet, to_self)) = self.ready.pop_front() else {
                if self.outbox.is_empty() {
                    break;
                }
                self.write_next(resources, tx);
                continue;
            };
            let egress = &mut resources.egress;
            let outcome = if to_self { egress.send_to_self(packet) } else { egress.send(tx, packet) };
            if let Err(packet) = outcome {
                self.ready.push_front((packet, to_self));
                break;
            }
            sent += 1;
        }
        self.wake(resources, completed);
        sent
    }

    /// Wakes sockets for which there is room, and those for which there may be pages.
    fn wake<P: Payload<Mem = M>>(&mut self, resources: &mut Resources<P>, completed: usize) {
        if !self.writers.is_empty() && self.has_room(resources) {
            resources.wakers.append(&mut self.writers);
        }
        if self.starved.is_empty() {
            return;
        }
        let free = resources.pages.free();
        if completed > 0 || free > self.free || self.retry.is_some_and(|at| at <= resources.now) {
            self.retry = None;
            // Without pages that it holds, a holder is admitted soonest.
            let held = if self.others { 0 } else { self.held };
            if resources.pages.admits_more(held, self.wanted) && resources.egress.has_pages(self.wanted) {
                resources.wakers.append(&mut self.starved);
                return;
            }
        }
        self.retry.get_or_insert(resources.now + RETRY);
        self.free = self.free.min(free);
    }

    /// Removes a datagram from the outbox, which is sent, or dropped and counted.
    fn write_next<P: Payload<Mem = M>, T: TxQueue<Mem = M>>(&mut self, resources: &mut Resources<P>, tx: &mut T) {
        let Some(OutgoingDatagram { flow, packet, pages, manner }) = self.outbox.pop_front() else { return };
        self.held -= pages;
        resources.pages.release(pages);
        let datagrams = manner.datagrams_of(packet.len());
        if self.write(resources, tx, (flow, packet, manner)).is_none() {
            resources.egress.stats.datagrams_unsent += datagrams;
        }
    }

    /// Writes the headers of a datagram. If it is too long for the path, it is sent in fragments.
    /// `None`: nothing of it will be sent.
    fn write<P: Payload<Mem = M>, T: TxQueue<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        tx: &mut T,
        (flow, packet, manner): (Flow, Packet<M>, Manner),
    ) -> Option<()> {
        let mut path = resources.find_path(flow.remote.ip())?;
        let now = resources.now;
        let hop = path.next_hop(&resources.host, now);
        path.touch(now);
        let header = if let NextHop::Device(header) = hop { header } else { path.unresolved_header() };
        let outer = Outer { traffic_class: manner.ecn, ..Outer::new(Some(header)) };
        let (to_self, most) = (hop == NextHop::Loopback, max_unfragmented(path.datagram_mtu(now), &flow));
        let len = manner.segment_size.map_or(packet.len(), |size| packet.len().min(size.into()));
        if to_self || len <= most {
            let size = manner.segment_size.filter(|_| packet.len() > len);
            let frame = resources.egress.datagram(&outer, &flow, packet, size)?;
            if size.is_none() || to_self || tx.supports(frame.meta) {
                self.make_ready(resources, tx, &path, hop, frame);
            } else {
                // The device was replaced by one that cuts nothing.
                for frame in frame.segment(false, || resources.egress.page()).ok()? {
                    self.make_ready(resources, tx, &path, hop, frame);
                }
            }
        } else if manner.never_in_fragments {
            return None;
        } else {
            let mtu = path.datagram_mtu(now);
            for packet in resources.egress.fragments(&outer, &flow, &packet, mtu)? {
                self.make_ready(resources, tx, &path, hop, packet);
            }
        }
        Some(())
    }

    /// A frame with its headers waits for the ring, or for its next hop.
    fn make_ready<P: Payload<Mem = M>, T: TxQueue<Mem = M>>(
        &mut self,
        resources: &mut Resources<P>,
        tx: &mut T,
        path: &Path<P>,
        hop: NextHop,
        packet: Packet<M>,
    ) {
        match hop {
            NextHop::Pending => Control { resources, tx }.await_next_hop(path, packet),
            NextHop::Device(_) => self.ready.push_back((packet, false)),
            NextHop::Loopback => self.ready.push_back((packet, true)),
        }
    }
}

/// The addresses and ports of datagrams from a socket at `local` to `to`.
pub(crate) fn flow_to<P: Payload>(
    resources: &mut Resources<P>,
    local: SocketAddr,
    to: SocketAddr,
) -> Result<Flow, SocketError> {
    if resources.gone {
        return Err(SocketError::StackGone);
    }
    let to = canonical(to);
    let path = resources.find_path(to.ip()).filter(|_| to.port() != 0).ok_or(SocketError::NoRoute)?;
    let source = if local.ip().is_unspecified() { path.source() } else { local.ip() };
    if source.is_ipv4() != to.is_ipv4() {
        return Err(SocketError::NoRoute);
    }
    Ok(Flow { local: SocketAddr::new(source, local.port()), remote: to })
}

/// Bytes of payload of the longest datagram that is not sent in fragments.
fn max_unfragmented(mtu: u16, flow: &Flow) -> usize {
    usize::from(mtu).saturating_sub(if flow.local.is_ipv4() { 28 } else { 48 })
}
