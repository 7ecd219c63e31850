//! The flow table: finds the socket for a frame by its local UDP port.
//!
//! ```text
//!   VirtioSplitRx::poll ──► FlowQueue::frame ──► headers, copied and checked ──► mailbox of the socket ──► Socket::recv
//!                             │
//!                             └─ no socket, not understood, not vouched for: dropped in the poll, and counted
//! ```
//!
//! Each receive queue has a [`FlowQueue`] of its own, which knows the binding that the queue receives into. All queues read one table,
//! by RCU.

use crate::binding::BindingProvider;
use crate::mailbox::{Datagram, Mailbox, Payload};
use crate::sync::Snapshot;
use crate::{Binding, BindingCount, Socket, SocketOptions};
use netmem_inet::Ports;
use netmem_inet::wire::{self, Drop as Why, Network, Part, Transport, protocol};
use netmem_packet::{Checksum, SplitFrame, SplitHandler};
use netmem_pool::{Frag, Mapped, PeerMemory, PeerShared};
use netmem_refs::PercpuRef;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// The reason why no socket was bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FlowBindError {
    /// Another socket is bound to the port.
    #[error("port {port} is taken by another socket; close that, or bind port 0 for one that is free")]
    Taken {
        /// The port.
        port: u16,
    },
    /// All ports from 1024 on are taken.
    #[error("no port is free; close sockets that are not needed")]
    Exhausted,
    /// The options ask for a queue of 0 datagrams.
    #[error("a socket must have room for at least one datagram")]
    NoRoom,
    /// The system has no descriptor for the socket's events.
    #[error("no descriptor for the socket: {0}; close some, or raise the limit (ulimit -n)")]
    Event(Errno),
}

/// Counters of frames that a flow table dropped before it had found a socket. Each value is exact, but they are read
/// one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlowStats {
    /// Frames whose headers continue in device memory, because the queue's host parts are too short for them.
    pub headers_in_device: u64,
    /// Fragments of IP datagrams.
    pub fragments: u64,
    /// Frames with wrong lengths or header checksums.
    pub malformed: u64,
    /// Frames that are not UDP over IP, or are segments that cannot be cut.
    pub other: u64,
    /// Datagrams for a port without a socket.
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
    no_socket: AtomicU64,
    foreign: AtomicU64,
}

/// The wildcard address: a socket receives datagrams that are sent to any local address, by any peer.
const ANY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

type Sockets<C> = HashMap<u16, Arc<Mailbox<C>>>;

/// The state that all handles of a table share.
pub(crate) struct Flows<C: BindingCount> {
    /// The sockets by port, as the receive queues read them.
    snapshot: Snapshot<Sockets<C>>,
    /// The same sockets, as threads that bind and close them lock them.
    sockets: Mutex<Sockets<C>>,
    ports: Ports,
    dropped: Counters,
}

impl<C: BindingCount> Flows<C> {
    fn place(&self, port: u16, mailbox: &Arc<Mailbox<C>>) -> Result<u16, FlowBindError> {
        let (port, replaced) = {
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            let port = match port {
                0 => {
                    let mut candidates = self.ports.candidates(ANY.ip(), ANY);
                    candidates.find(|port| !sockets.contains_key(port)).ok_or(FlowBindError::Exhausted)?
                }
                port if sockets.contains_key(&port) => return Err(FlowBindError::Taken { port }),
                port => port,
            };
            sockets.insert(port, mailbox.clone());
            (port, self.snapshot.replace(sockets.clone()))
        };
        drop(replaced);
        Ok(port)
    }

    /// Removes a socket: after this call no frame is delivered to it.
    pub(crate) fn remove(&self, port: u16) {
        let replaced = {
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            let mailbox = sockets.remove(&port);
            (mailbox, self.snapshot.replace(sockets.clone()))
        };
        drop(replaced);
    }
}

/// The sockets of one or several devices, by local port. This is a handle: a clone is a handle on the same table.
pub struct FlowTable<C: BindingCount = PercpuRef> {
    flows: Arc<Flows<C>>,
}

impl FlowTable<PercpuRef> {
    /// A table without sockets.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl<C: BindingCount> FlowTable<C> {
    /// Binds a socket to a UDP port. If `port` is 0, the table chooses a free port from 1024 on that is hard to guess.
    ///
    /// # Errors
    ///
    /// [`FlowBindError`].
    pub fn bind(&self, port: u16, options: &SocketOptions) -> Result<Socket<C>, FlowBindError> {
        if options.queue == 0 {
            return Err(FlowBindError::NoRoom);
        }
        let mailbox = Arc::new(Mailbox::new(options.queue, options.unvouched).map_err(FlowBindError::Event)?);
        let port = self.flows.place(port, &mailbox)?;
        Ok(Socket::new(port, mailbox, self.flows.clone()))
    }

    /// Returns the handler for a receive queue that receives into `binding`. The handler holds the binding: drop it when the queue is
    /// detached.
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

impl<C: BindingCount> Default for FlowTable<C> {
    fn default() -> Self {
        let (snapshot, sockets, ports) = (Snapshot::new(), Mutex::default(), Ports::default());
        Self { flows: Arc::new(Flows { snapshot, sockets, ports, dropped: Counters::default() }) }
    }
}

impl<C: BindingCount> fmt::Debug for FlowTable<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowTable").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// The handler with which one receive queue is polled: it delivers the queue's frames to the sockets of a flow table.
pub struct FlowQueue<C: BindingCount = PercpuRef> {
    flows: Arc<Flows<C>>,
    provider: Arc<BindingProvider<C>>,
}

/// Frames in memory of trusted peers are delivered like those of other peers: their host fragments are read only by copying.
impl<C: BindingCount, M: PeerMemory> SplitHandler<M> for FlowQueue<C>
where
    Frag<PeerShared>: From<Frag<M>>,
{
    /// Delivers a frame. Costs a copy of its headers, a critical section, and a push to the socket's queue.
    fn frame(&mut self, frame: SplitFrame<M>) {
        let dropped = &self.flows.dropped;
        let count = |n: &AtomicU64| _ = n.fetch_add(1, Ordering::Relaxed);
        if frame.meta.gso.is_some() || frame.lost() > 0 {
            return count(&dropped.other);
        }
        let Headers { peer, port, payload: Part { at: start, len } } = match parse(&frame) {
            Ok(Some(headers)) => headers,
            Ok(None) => return count(&dropped.fragments),
            Err(Why::Beyond { port }) => {
                count(&dropped.headers_in_device);
                return self.flows.snapshot.read(|sockets| {
                    if let Some(mailbox) = port.and_then(|port| sockets?.get(&port)) {
                        count(&mailbox.delivered.headers_in_device);
                    }
                });
            }
            Err(Why::Malformed) => return count(&dropped.malformed),
            Err(_) => return count(&dropped.other),
        };
        // If the sender left the checksum to its device (`Partial`), the receiver has the frame exactly as the sender
        // made it.
        let vouched = frame.meta.checksum != Checksum::Unknown;
        let (head, device, _) = frame.into_parts();
        let linear = len.min(head.len() - start);
        let beyond = len - linear;
        let mut device = device.into_iter().take(if beyond > 0 { usize::MAX } else { 0 });
        let payload = match (device.next(), device.next()) {
            (Some(frag), None) => {
                // SAFETY: this is the provider's own reference, and pools with pages of the binding keep the provider.
                match unsafe { Payload::new(frag, &self.provider.binding, beyond as u32) } {
                    Some(payload) => Some(payload),
                    None => return count(&dropped.foreign),
                }
            }
            (None, _) => None,
            // A mailbox takes no datagram in several pages of device memory.
            _ => return count(&dropped.other),
        };
        let datagram = Datagram { peer, vouched, linear: (linear > 0).then(|| (head.into(), start, linear)), payload };
        self.flows.snapshot.read(|sockets| match sockets.and_then(|sockets| sockets.get(&port)) {
            Some(mailbox) => mailbox.deliver(datagram),
            None => count(&dropped.no_socket),
        });
    }
}

/// The most bytes of headers that are copied: Ethernet, IPv4 with all options or IPv6 with some extensions, and UDP.
const HEAD: usize = 96;

/// A UDP datagram in a frame.
struct Headers {
    /// The sender's address.
    peer: SocketAddr,
    /// The destination port.
    port: u16,
    /// The payload's place in the frame. It begins in the head or at the end of the head.
    payload: Part,
}

/// Reads the headers of a frame, from a private copy. Returns `None` for an IP fragment.
fn parse<M: Mapped>(frame: &SplitFrame<M>) -> Result<Option<Headers>, Why> {
    let mut copy = [0; HEAD];
    let head = &mut copy[..frame.head().len().min(HEAD)];
    frame.head().copy_to(0, head).map_err(|_| Why::Malformed)?;
    let (_, Network::Ip(ip)) = wire::parse(head, frame.len())? else { return Err(Why::Unknown) };
    if ip.fragment.is_some() {
        return Ok(None);
    }
    // Headers of other protocols may continue in device memory, so they are not parsed.
    if ip.protocol != protocol::UDP {
        return Err(Why::Unknown);
    }
    match ip.transport(head)? {
        Transport::Udp(datagram) => {
            let peer = SocketAddr::new(ip.source, datagram.source_port);
            Ok(Some(Headers { peer, port: datagram.destination_port, payload: datagram.payload }))
        }
        _ => Err(Why::Unknown),
    }
}

impl<C: BindingCount> fmt::Debug for FlowQueue<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowQueue").field("provider", &self.provider).finish_non_exhaustive()
    }
}
