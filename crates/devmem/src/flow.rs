//! The flow table: from frames to sockets, by local UDP port.
//!
//! ```text
//!   VirtioSplitRx::poll ──► FlowQueue::frame ──► headers, copied and checked ──► mailbox of the socket ──► Socket::recv
//!                             │
//!                             └─ no socket, not understood, not vouched for: dropped, in the poll context, and counted
//! ```
//!
//! Each receive queue has a [`FlowQueue`] of its own, which knows what binding the queue receives into; the table behind is read by RCU.

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

/// Why no socket was bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FlowBindError {
    /// Another socket has the port.
    #[error("port {port} is taken by another socket; close that, or bind port 0 for one that is free")]
    Taken {
        /// The port.
        port: u16,
    },
    /// All ports from 1024 on are taken.
    #[error("no port is free; close sockets that are not needed")]
    Exhausted,
    /// A socket without a place for a datagram.
    #[error("a socket must have room for at least one datagram")]
    NoRoom,
    /// There is no descriptor for it to be waited for by.
    #[error("no descriptor for the socket: {0}; close some, or raise the limit (ulimit -n)")]
    Event(Errno),
}

/// What a flow table dropped before it knew of a socket. Each number is right, and they are not of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlowStats {
    /// Frames whose headers go on in device memory: the queue's host parts are too short for them.
    pub headers_in_device: u64,
    /// Fragments of IP datagrams.
    pub fragments: u64,
    /// Frames with wrong lengths or header checksums.
    pub malformed: u64,
    /// Frames that are not UDP over IP, or are segments that cannot be cut.
    pub other: u64,
    /// Datagrams for a port that no socket has.
    pub no_socket: u64,
    /// Frames with payload that is not in the binding that their queue was said to receive into.
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

/// A socket takes datagrams to any address, from any.
const ANY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

type Sockets<C> = HashMap<u16, Arc<Mailbox<C>>>;

/// What handles of a table share.
pub(crate) struct Flows<C: BindingCount> {
    /// The sockets, for who looks a frame's up.
    snapshot: Snapshot<Sockets<C>>,
    /// The same, for who binds and closes.
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

    /// From now on no frame finds the socket.
    pub(crate) fn remove(&self, port: u16) {
        let replaced = {
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            let mailbox = sockets.remove(&port);
            (mailbox, self.snapshot.replace(sockets.clone()))
        };
        drop(replaced);
    }
}

/// The sockets of one or several devices, by local port. A handle: clones are the same table.
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
    /// A socket on a UDP port; 0 for one that is free, from 1024 on, and hard to guess.
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

    /// The table's end at a receive queue that receives into `binding`, which it holds. Drop it when the queue is detached.
    #[must_use]
    pub fn queue(&self, binding: &Binding<C>) -> FlowQueue<C> {
        FlowQueue { flows: self.flows.clone(), provider: binding.own_provider().clone() }
    }

    /// What was dropped.
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

/// A flow table's end at one receive queue: the handler to poll it with.
pub struct FlowQueue<C: BindingCount = PercpuRef> {
    flows: Arc<Flows<C>>,
    provider: Arc<BindingProvider<C>>,
}

/// Frames of trusted peers are delivered as those of any peer: by fragments that are copied out.
impl<C: BindingCount, M: PeerMemory> SplitHandler<M> for FlowQueue<C>
where
    Frag<PeerShared>: From<Frag<M>>,
{
    /// Delivers a frame: a copy of its headers, a critical section, and a push.
    fn frame(&mut self, frame: SplitFrame<M>) {
        let dropped = &self.flows.dropped;
        let count = |n: &AtomicU64| _ = n.fetch_add(1, Ordering::Relaxed);
        if frame.meta.gso.is_some() {
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
        // Of a sum that its sender left to the device both have the frame as it was made.
        let vouched = frame.meta.checksum != Checksum::Unknown;
        let (head, device, _) = frame.into_parts();
        let linear = len.min(head.len() - start);
        let beyond = len - linear;
        let payload = match device {
            Some(frag) if beyond > 0 => {
                // SAFETY: the provider's own reference; pools with pages of the binding keep the provider.
                match unsafe { Payload::new(frag, &self.provider.binding, beyond as u32) } {
                    Some(payload) => Some(payload),
                    None => return count(&dropped.foreign),
                }
            }
            _ => None,
        };
        let datagram = Datagram { peer, vouched, linear: (linear > 0).then(|| (head.into(), start, linear)), payload };
        self.flows.snapshot.read(|sockets| match sockets.and_then(|sockets| sockets.get(&port)) {
            Some(mailbox) => mailbox.deliver(datagram),
            None => count(&dropped.no_socket),
        });
    }
}

/// As many bytes as headers can have that are copied: Ethernet, and IPv4 with all options, or IPv6 with some extensions, and UDP.
const HEAD: usize = 96;

/// A UDP datagram in a frame.
struct Headers {
    /// Who sent it.
    peer: SocketAddr,
    /// The port that it is for.
    port: u16,
    /// In the frame; it begins in the head or at its end.
    payload: Part,
}

/// Reads the headers of a frame, on a private copy. `None` for a fragment.
fn parse<M: Mapped>(frame: &SplitFrame<M>) -> Result<Option<Headers>, Why> {
    let mut copy = [0; HEAD];
    let head = &mut copy[..frame.head().len().min(HEAD)];
    frame.head().copy_to(0, head).map_err(|_| Why::Malformed)?;
    let (_, Network::Ip(ip)) = wire::parse(head, frame.len())? else { return Err(Why::Unknown) };
    if ip.fragment.is_some() {
        return Ok(None);
    }
    // Headers of other protocols may go on in device memory, and are not looked at.
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
