//! Sending UDP datagrams from device memory. The headers are written here; only the device reads
//! the payload.
//!
//! ```text
//!   host page       Ethernet │ IP │ UDP, sum of the pseudo-header    the device completes the sum
//!   device memory   fragment, fragment, ...                         each holds the binding until
//!                                                                   the device is done
//! ```
//!
//! A binding that was unbound refuses new datagrams. A [`Message`] that was made before the
//! unbinding can still be sent.

use crate::binding::{Binding, BindingCount, BindingRef};
use netmem_inet::wire::{self, Body, EmitError, EthernetHeader, Flow, HEADROOM, MAX_HEADERS, Mac, Outer};
use netmem_packet::{DeviceFrag, MAX_FRAGS, Packet, SplitTxQueue};
use netmem_pool::{DmaDomain, MapError, OutOfRange, PeerMemory, PeerShared, SharedPool};
use netmem_refs::{PercpuRef, Ref};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use thiserror::Error;

/// The addresses of one side of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Ethernet address.
    pub mac: [u8; 6],
    /// IP address and UDP port.
    pub addr: SocketAddr,
}

/// The reason why a sender was not made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SenderError {
    /// One address is IPv4, the other IPv6.
    #[error("{local} and {peer} are addresses of different families")]
    Family {
        /// The local address.
        local: SocketAddr,
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The device does not know the binding's memory.
    #[error("the binding cannot be sent from by this device: put its region into the device's memory table first")]
    Map(#[from] MapError),
    /// Pages of the pool are too small for headers.
    #[error("pages of {page_size} bytes have no room for headers")]
    Pages {
        /// Bytes in a page.
        page_size: usize,
    },
}

/// The reason why nothing was sent. The call has kept no reference to the binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SendError {
    /// The binding was unbound and accepts no new datagrams.
    #[error("binding {binding} was unbound: what was made before can still be sent, and nothing new")]
    Unbound {
        /// The binding's id.
        binding: u64,
    },
    /// A fragment is empty or not in the binding.
    #[error("{len} bytes at {offset} are not in binding {binding}, which has {have}; a fragment has at least one byte")]
    Range {
        /// The binding's id.
        binding: u64,
        /// The fragment's offset in the binding.
        offset: u64,
        /// The fragment's length in bytes.
        len: u32,
        /// Bytes in the binding.
        have: u64,
    },
    /// The datagram has more fragments than a frame can have.
    #[error("{fragments} fragments in one datagram; at most {MAX_FRAGS}: send several datagrams")]
    Fragments {
        /// The number of fragments.
        fragments: usize,
    },
    /// The datagram has more bytes than fit into one frame.
    #[error("{bytes} bytes of payload, and a frame of this sender takes {most}; send several datagrams")]
    TooLong {
        /// Bytes of payload.
        bytes: u64,
        /// The most bytes of payload in a datagram of this sender.
        most: u64,
    },
    /// The pool has no page for the headers.
    #[error("no page for headers: complete what was sent, or give the pool more")]
    NoPage,
    /// The queue refused the frame: it is full or stopped, or its device computes no checksums.
    #[error("the transmit queue takes no frame now; complete what was sent and try again, and see its counters")]
    Queue,
}

/// A datagram that can be sent any number of times, also after its binding is unbound. Each of its
/// fragments holds the binding.
pub struct Message<C: BindingCount = PercpuRef> {
    fragments: Vec<DeviceFrag<BindingRef<C>>>,
    bytes: u16,
}

impl<C: BindingCount> Message<C> {
    /// Bytes of payload.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty datagram is one, too")]
    pub fn len(&self) -> usize {
        self.bytes.into()
    }
}

impl<C: BindingCount> fmt::Debug for Message<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} fragments, {} bytes)", self.fragments.len(), self.bytes)
    }
}

/// Sends UDP datagrams from a binding on one flow. The sender holds one reference to the binding,
/// and so does each fragment that the device has.
///
/// `M` is the kind of memory of the headers. It is that of the device's transmit queue.
pub struct Sender<C: BindingCount = PercpuRef, M: PeerMemory = PeerShared> {
    binding: BindingRef<C>,
    /// The device's address of the binding's first byte.
    base: u64,
    /// The pool whose pages hold the headers.
    pages: Arc<SharedPool<M>>,
    local: Endpoint,
    peer: Endpoint,
    /// The largest number of bytes in an IP datagram.
    mtu: u16,
    /// The fragments of the datagram that is being sent. Empty between calls.
    scratch: Vec<DeviceFrag<BindingRef<C>>>,
}

impl<C: BindingCount, M: PeerMemory> Sender<C, M> {
    /// Makes a sender for the devices of `domain`. The whole binding is mapped in this domain until
    /// the binding is gone. The headers are written to pages of `pages`, a pool of the same domain,
    /// which senders on any threads may share. IP datagrams are at most 1500 bytes long.
    ///
    /// For a virtio-net device, `VirtioNet` has both: its `domain`, and a `tx_pool`.
    ///
    /// # Errors
    ///
    /// [`SenderError`].
    pub fn new(
        binding: &Binding<C>,
        domain: &Arc<dyn DmaDomain>,
        pages: impl Into<Arc<SharedPool<M>>>,
        local: Endpoint,
        peer: Endpoint,
    ) -> Result<Self, SenderError> {
        if local.addr.is_ipv4() != peer.addr.is_ipv4() {
            return Err(SenderError::Family { local: local.addr, peer: peer.addr });
        }
        let pages = pages.into();
        if pages.page_size() < HEADROOM + MAX_HEADERS {
            return Err(SenderError::Pages { page_size: pages.page_size() });
        }
        let base = binding.map_for(domain)?;
        let scratch = Vec::with_capacity(MAX_FRAGS);
        Ok(Self { binding: binding.reference(), base, pages, local, peer, mtu: 1500, scratch })
    }

    /// Sets the largest number of bytes in an IP datagram.
    #[must_use]
    pub fn mtu(mut self, bytes: u16) -> Self {
        self.mtu = bytes;
        self
    }

    /// The largest number of bytes of payload in a datagram.
    #[must_use]
    pub fn most(&self) -> usize {
        usize::from(self.mtu).saturating_sub(self.ip_len() + 8)
    }

    /// Sends parts of the binding, each (offset, length) in bytes, as one datagram. The device sees
    /// the datagram at the queue's next [flush](netmem_packet::TxQueue::flush). When the frame is
    /// completed, its fragments drop their references to the binding.
    ///
    /// # Errors
    ///
    /// [`SendError`].
    pub fn send<Q: SplitTxQueue<BindingRef<C>, Mem = M>>(
        &mut self,
        queue: &mut Q,
        parts: &[(u64, u32)],
    ) -> Result<(), SendError> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let sent = self.hold(parts, &mut scratch).and_then(|bytes| self.transmit(queue, &mut scratch, bytes));
        scratch.clear();
        self.scratch = scratch;
        sent
    }

    /// Makes a message of parts of the binding, which [`send_again`](Self::send_again) sends any
    /// number of times.
    ///
    /// # Errors
    ///
    /// [`SendError`], except [`Queue`](SendError::Queue) and [`NoPage`](SendError::NoPage).
    pub fn message(&self, parts: &[(u64, u32)]) -> Result<Message<C>, SendError> {
        let mut fragments = Vec::with_capacity(parts.len().min(MAX_FRAGS));
        let bytes = self.hold(parts, &mut fragments)?;
        Ok(Message { fragments, bytes })
    }

    /// Sends a message of this sender. The binding may have been unbound since the message was
    /// made.
    ///
    /// # Errors
    ///
    /// [`SendError::Queue`], [`SendError::NoPage`]; [`SendError::Range`] for a message of another
    /// binding.
    pub fn send_again<Q: SplitTxQueue<BindingRef<C>, Mem = M>>(
        &mut self,
        queue: &mut Q,
        message: &Message<C>,
    ) -> Result<(), SendError> {
        if let Some(other) = message.fragments.iter().find(|f| !Ref::ptr_eq(&f.holder, &self.binding)) {
            return Err(self.outside(other.dma.wrapping_sub(self.base), other.len));
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let again = |f: &DeviceFrag<BindingRef<C>>| DeviceFrag { dma: f.dma, len: f.len, holder: f.holder.clone() };
        scratch.extend(message.fragments.iter().map(again));
        let sent = self.transmit(queue, &mut scratch, message.bytes);
        scratch.clear();
        self.scratch = scratch;
        sent
    }

    /// Checks the parts, and makes a fragment for each, which holds the binding. The binding must
    /// not be unbound. Returns the sum of their lengths.
    fn hold(&self, parts: &[(u64, u32)], to: &mut Vec<DeviceFrag<BindingRef<C>>>) -> Result<u16, SendError> {
        if parts.len() > MAX_FRAGS {
            return Err(SendError::Fragments { fragments: parts.len() });
        }
        let (bytes, most) = (parts.iter().map(|&(_, len)| u64::from(len)).sum(), self.most() as u64);
        for &(offset, len) in parts {
            let have = self.binding.region().len() as u64;
            if len == 0 || offset > have || u64::from(len) > have - offset {
                return Err(self.outside(offset, len));
            }
        }
        if bytes > most {
            return Err(SendError::TooLong { bytes, most });
        }
        for &(offset, len) in parts {
            let Ok(holder) = Ref::try_get_live(&self.binding) else {
                to.clear();
                return Err(SendError::Unbound { binding: self.binding.id() });
            };
            to.push(DeviceFrag { dma: self.base + offset, len, holder });
        }
        // `bytes` is no more than an MTU, which is a `u16`.
        Ok(bytes as u16)
    }

    fn outside(&self, offset: u64, len: u32) -> SendError {
        SendError::Range { binding: self.binding.id(), offset, len, have: self.binding.region().len() as u64 }
    }

    fn transmit<Q: SplitTxQueue<BindingRef<C>, Mem = M>>(
        &mut self,
        queue: &mut Q,
        payload: &mut Vec<DeviceFrag<BindingRef<C>>>,
        bytes: u16,
    ) -> Result<(), SendError> {
        let mut headers = [0; MAX_HEADERS];
        let outer = Outer::new(Some(EthernetHeader { destination: Mac(self.peer.mac), source: Mac(self.local.mac) }));
        let flow = Flow { local: self.local.addr, remote: self.peer.addr };
        let body = Body { len: bytes.into(), sum: None, segment_size: None };
        // No error is possible: both addresses are of one family, there is room, and the datagram
        // is no longer than an MTU.
        let too_long = |_: EmitError| SendError::TooLong { bytes: bytes.into(), most: self.most() as u64 };
        let wire::Emitted { len, meta } = wire::emit_udp(&mut headers, &outer, &flow, body).map_err(too_long)?;
        let mut page = self.pages.alloc().ok_or(SendError::NoPage)?;
        page.copy_from(HEADROOM, &headers[..len]).map_err(|OutOfRange { .. }| SendError::NoPage)?;
        let mut packet = Packet::new(page.freeze_range(HEADROOM..HEADROOM + len));
        packet.meta = meta;
        queue.send_split(packet, payload).map_err(|_| SendError::Queue)
    }

    fn ip_len(&self) -> usize {
        if self.local.addr.is_ipv4() { 20 } else { 40 }
    }
}

impl<C: BindingCount, M: PeerMemory> fmt::Debug for Sender<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sender({} to {}, {:?})", self.local.addr, self.peer.addr, *self.binding)
    }
}
