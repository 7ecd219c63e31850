//! The flow table: finds the socket for a frame by its local address and UDP port.
//!
//! ```text
//!   VirtioSplitRx::poll ──► FlowQueue::frame ──► headers, checked ──► mailbox ──► Socket::recv
//!                             │
//!                             └─ for another station, no socket, not understood, unverified:
//!                                dropped in the poll, and counted
//! ```
//!
//! Each receive queue has a [`FlowQueue`] of its own, which knows the binding that the queue
//! receives into. All queues read one table, by RCU.

use super::bound::{Addresses, Sockets};
use super::mailbox::{Datagram, InDevice, Mailbox};
use super::socket::{Socket, SocketOptions};
use crate::binding::{Binding, BindingCount, BindingProvider};
use crate::sync::Snapshot;
use netmem_inet::wire::{self, ByteRange, Network, ParseError as Why, Transport, protocol};
use netmem_inet::{Interface, Ports};
use netmem_packet::{Checksum, SplitFrame, SplitHandler};
use netmem_pool::{Frag, Mapped, PeerMemory, PeerShared};
use netmem_refs::PercpuRef;
use rustix::io::Errno;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// The reason why no socket was bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FlowBindError {
    /// Another socket is bound to the port, on this address or on all.
    #[error("{local} is taken by another socket; close that, or bind port 0 for one that is free")]
    Taken {
        /// The address and the port.
        local: SocketAddr,
    },
    /// The table's interface does not have the address.
    #[error("{addr} is none of the interface's addresses; bind one of those, or 0.0.0.0 for all")]
    NotOurs {
        /// The address.
        addr: IpAddr,
    },
    /// All ports from 1024 on are taken.
    #[error("no port is free; close sockets that are not needed")]
    Exhausted,
    /// The options have a queue of 0 datagrams.
    #[error("a socket must have room for at least one datagram")]
    NoRoom,
    /// The system has no descriptor for the socket's events.
    #[error("no descriptor for the socket: {0}; close some, or raise the limit (ulimit -n)")]
    Event(Errno),
}

/// Counters of frames that a flow table dropped before it had found a socket. Each value is exact,
/// but they are read one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlowStats {
    /// Frames whose headers continue in device memory, because the queue's host parts are too short
    /// for them.
    pub headers_in_device: u64,
    /// Fragments of IP datagrams.
    pub fragments: u64,
    /// Frames with wrong lengths or header checksums.
    pub malformed: u64,
    /// Frames that are not UDP over IP, are segments that cannot be cut, or lack bytes for which
    /// the queue had no page.
    pub other: u64,
    /// Frames that are not for the interface, as on a device in promiscuous mode: their Ethernet or
    /// IP destination is another station or a group that the interface is not in. Frames whose
    /// source is the interface's own address count here, too.
    pub not_ours: u64,
    /// Datagrams for an address and a port without a socket.
    pub no_socket: u64,
    /// Frames whose payload is not in the binding that was configured for their queue.
    pub foreign: u64,
}

#[derive(Debug, Default)]
struct Counters {
    headers_in_device: AtomicU64,
    fragments: AtomicU64,
    malformed: AtomicU64,
    other: AtomicU64,
    not_ours: AtomicU64,
    no_socket: AtomicU64,
    foreign: AtomicU64,
}

/// A socket receives from any peer.
const ANY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

/// The state that all handles of a table share.
pub(crate) struct Flows<C: BindingCount> {
    /// Frames for other stations are dropped.
    interface: Interface,
    /// The sockets, as the receive queues read them.
    snapshot: Snapshot<Sockets<C>>,
    /// The same sockets, as threads that bind and close them lock them.
    sockets: Mutex<Sockets<C>>,
    ports: Ports,
    dropped: Counters,
}

impl<C: BindingCount> Flows<C> {
    /// Returns the port.
    fn place(&self, local: SocketAddr, mailbox: &Arc<Mailbox<C>>) -> Result<u16, FlowBindError> {
        let to = match local.ip() {
            addr if addr.is_unspecified() => Addresses::All,
            addr if self.interface.owns(addr) => Addresses::One(addr),
            addr => return Err(FlowBindError::NotOurs { addr }),
        };
        let (port, replaced) = {
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            let port = match local.port() {
                0 => {
                    let mut candidates = self.ports.candidates(local.ip(), ANY);
                    candidates.find(|&port| !sockets.is_taken(to, port)).ok_or(FlowBindError::Exhausted)?
                }
                port if sockets.is_taken(to, port) => return Err(FlowBindError::Taken { local }),
                port => port,
            };
            sockets.insert(to, port, mailbox.clone());
            (port, self.snapshot.replace(sockets.clone()))
        };
        drop(replaced);
        Ok(port)
    }

    /// Removes a socket: after this call no frame is delivered to it.
    pub(crate) fn remove(&self, mailbox: &Arc<Mailbox<C>>) {
        let replaced = {
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            let mailbox = sockets.remove(mailbox);
            (mailbox, self.snapshot.replace(sockets.clone()))
        };
        drop(replaced);
    }
}

/// The sockets of a network interface, by local address and port. This is a handle: a clone is a
/// handle on the same table.
///
/// The queues of a table belong to one interface: to one device, or to several that have the same
/// addresses. Only frames for the interface are delivered ([`Interface::accepts`]), also if its
/// device is in promiscuous mode: the Ethernet destination is the interface's or a group's, and the
/// IP destination is one of the interface's addresses, a broadcast address of one of its networks,
/// or a group that it is in. All other frames are dropped and counted ([`FlowStats::not_ours`]).
pub struct FlowTable<C: BindingCount = PercpuRef> {
    flows: Arc<Flows<C>>,
}

impl FlowTable<PercpuRef> {
    /// A table without sockets.
    #[must_use]
    pub fn new(interface: Interface) -> Self {
        Self::counted(interface)
    }
}

impl<C: BindingCount> FlowTable<C> {
    /// [`new`](FlowTable::new) for bindings with another kind of count.
    #[must_use]
    pub fn counted(interface: Interface) -> Self {
        let (snapshot, sockets, ports) = (Snapshot::new(), Mutex::default(), Ports::default());
        Self { flows: Arc::new(Flows { interface, snapshot, sockets, ports, dropped: Counters::default() }) }
    }

    /// Binds a socket to an address of the interface and a UDP port. The socket receives datagrams
    /// to that address alone. The unspecified address, of either family, means all addresses of the
    /// interface, of both families, and also the broadcast addresses and groups of the interface.
    /// If the port is 0, the table chooses a free port from 1024 on that is hard to guess.
    ///
    /// Sockets on different addresses can have the same port. Scope and flow label of an IPv6
    /// address do not count. Costs a copy of the list of sockets.
    ///
    /// # Errors
    ///
    /// [`FlowBindError`].
    pub fn bind(&self, local: SocketAddr, options: &SocketOptions) -> Result<Socket<C>, FlowBindError> {
        if options.queue == 0 {
            return Err(FlowBindError::NoRoom);
        }
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let mailbox = Arc::new(Mailbox::new(options.queue, options.unverified).map_err(FlowBindError::Event)?);
        let port = self.flows.place(local, &mailbox)?;
        Ok(Socket::new(SocketAddr::new(local.ip(), port), mailbox, self.flows.clone()))
    }

    /// Returns the handler for a receive queue that receives into `binding`. The handler holds the
    /// binding: drop it when the queue is detached.
    #[must_use]
    pub fn queue(&self, binding: &Binding<C>) -> FlowQueue<C> {
        FlowQueue { flows: self.flows.clone(), provider: binding.own_provider().clone() }
    }

    /// The counters of dropped frames.
    #[must_use]
    pub fn stats(&self) -> FlowStats {
        let c = &self.flows.dropped;
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        FlowStats {
            headers_in_device: get(&c.headers_in_device),
            fragments: get(&c.fragments),
            malformed: get(&c.malformed),
            other: get(&c.other),
            not_ours: get(&c.not_ours),
            no_socket: get(&c.no_socket),
            foreign: get(&c.foreign),
        }
    }
}

impl<C: BindingCount> Clone for FlowTable<C> {
    fn clone(&self) -> Self {
        Self { flows: self.flows.clone() }
    }
}

impl<C: BindingCount> fmt::Debug for FlowTable<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowTable").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// The handler with which one receive queue is polled: it delivers the queue's frames to the
/// sockets of a flow table.
pub struct FlowQueue<C: BindingCount = PercpuRef> {
    flows: Arc<Flows<C>>,
    provider: Arc<BindingProvider<C>>,
}

/// Frames in memory of trusted peers are delivered like those of other peers: their host fragments
/// are read only by copying.
impl<C: BindingCount, M: PeerMemory> SplitHandler<M> for FlowQueue<C>
where
    Frag<PeerShared>: From<Frag<M>>,
{
    /// Delivers a frame. Costs a copy of its headers, a critical section, and a push to the
    /// socket's queue; and an allocation if the datagram is in several pages.
    fn frame(&mut self, frame: SplitFrame<M>) {
        let dropped = &self.flows.dropped;
        let count = |n: &AtomicU64| _ = n.fetch_add(1, Ordering::Relaxed);
        let Headers { to, peer, port, payload: ByteRange { at: start, len } } =
            match parse(&frame, &self.flows.interface) {
                Ok(headers) => headers,
                Err(Refused::Dropped(why)) => {
                    return count(match why {
                        Why::Beyond { .. } => &dropped.headers_in_device,
                        Why::Malformed => &dropped.malformed,
                        _ => &dropped.other,
                    });
                }
                Err(Refused::NotOurs) => return count(&dropped.not_ours),
                Err(Refused::Fragment) => return count(&dropped.fragments),
                Err(Refused::Beyond { to, port }) => {
                    count(&dropped.headers_in_device);
                    return self.flows.snapshot.read(|sockets| {
                        if let Some(mailbox) = sockets.and_then(|sockets| sockets.find(to, port)) {
                            count(&mailbox.delivered.headers_in_device);
                        }
                    });
                }
            };
        if frame.meta.gso.is_some() || frame.lost() > 0 {
            return count(&dropped.other);
        }
        // If the sender left the checksum to its device (`Partial`), the receiver has the frame
        // exactly as the sender made it.
        let verified = frame.meta.checksum != Checksum::Unknown;
        let (head, device, _) = frame.into_parts();
        let linear = len.min(head.len() - start);
        // SAFETY: this is the provider's own reference, and pools with pages of the binding keep
        // the provider.
        let Some(device) = (unsafe { InDevice::new(device, &self.provider.binding, len - linear) }) else {
            return count(&dropped.foreign);
        };
        let linear = (linear > 0).then(|| {
            let mut bytes = Frag::<PeerShared>::from(head);
            bytes.advance(start);
            bytes.truncate(linear);
            bytes
        });
        let datagram = Datagram { peer, verified, linear, device };
        self.flows.snapshot.read(|sockets| match sockets.and_then(|sockets| sockets.find(to, port)) {
            Some(mailbox) => mailbox.deliver(datagram),
            None => count(&dropped.no_socket),
        });
    }
}

/// The most bytes of headers that are copied: Ethernet, IPv4 with all options or IPv6 with some
/// extensions, and UDP.
const HEAD: usize = 96;

/// A UDP datagram in a frame.
struct Headers {
    /// The destination address.
    to: IpAddr,
    /// The sender's address.
    peer: SocketAddr,
    /// The destination port.
    port: u16,
    /// The payload's place in the frame. It begins in the head or at the end of the head.
    payload: ByteRange,
}

/// Why a frame is not a datagram for a socket.
enum Refused {
    Dropped(Why),
    /// It is for another station.
    NotOurs,
    /// It is a fragment of an IP datagram.
    Fragment,
    /// The UDP header continues in device memory, behind the destination port.
    Beyond {
        to: IpAddr,
        port: u16,
    },
}

impl From<Why> for Refused {
    #[inline]
    fn from(why: Why) -> Self {
        Self::Dropped(why)
    }
}

/// Reads the headers of a frame, from a private copy.
fn parse<M: Mapped>(frame: &SplitFrame<M>, interface: &Interface) -> Result<Headers, Refused> {
    let mut copy = [0; HEAD];
    let head = &mut copy[..frame.head().len().min(HEAD)];
    frame.head().copy_to(0, head).map_err(|_| Why::Malformed)?;
    let (link, Network::Ip(ip)) = wire::parse(head, frame.len())? else { return Err(Why::Unknown.into()) };
    if interface.accepts(&link, &ip).is_none() {
        return Err(Refused::NotOurs);
    }
    if ip.fragment.is_some() {
        return Err(Refused::Fragment);
    }
    // Headers of other protocols may continue in device memory, so they are not parsed.
    if ip.protocol != protocol::UDP {
        return Err(Why::Unknown.into());
    }
    let to = ip.destination;
    match ip.transport(head) {
        Ok(Transport::Udp(datagram)) => {
            let peer = SocketAddr::new(ip.source, datagram.source_port);
            Ok(Headers { to, peer, port: datagram.destination_port, payload: datagram.payload })
        }
        Err(Why::Beyond { port: Some(port) }) => Err(Refused::Beyond { to, port }),
        Ok(_) => Err(Why::Unknown.into()),
        Err(why) => Err(why.into()),
    }
}

impl<C: BindingCount> fmt::Debug for FlowQueue<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowQueue").field("provider", &self.provider).finish_non_exhaustive()
    }
}
