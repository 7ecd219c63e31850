//! UDP sockets. They deliver datagrams as fragments of device memory with tokens. Bytes that the
//! device wrote to host memory are delivered as fragments of host memory.
//!
//! The device splits a frame at a byte offset, and headers have options. So a datagram can begin in
//! host memory and continue in device memory, and the user receives both parts in order.

use super::flow::Flows;
use super::mailbox::{Datagram, Mailbox};
use crate::binding::{BindingCount, BindingRef};
use crate::bound_frag::BoundFrag;
use crate::tokens::{DeliverError, ReceiveOne, Returner, Token, TokenTable};
use netmem_packet::{Armed, Wait};
use netmem_pool::{Frag, PeerShared};
use netmem_refs::PercpuRef;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The options of a new [`Socket`]. Start with [`SocketOptions::new`].
#[derive(Clone, Debug)]
pub struct SocketOptions {
    pub(crate) queue: usize,
    pub(crate) unverified: bool,
}

impl SocketOptions {
    /// The defaults: a queue of 1024 datagrams; datagrams whose checksum the device has not
    /// verified are dropped.
    #[must_use]
    pub fn new() -> Self {
        Self { queue: 1024, unverified: false }
    }

    /// The largest number of datagrams that may wait to be received. More datagrams are dropped and
    /// counted. A datagram counts once, in however many pages it is.
    #[must_use]
    pub fn queue(mut self, datagrams: usize) -> Self {
        self.queue = datagrams;
        self
    }

    /// Whether a datagram is delivered if the device has not verified its checksum. It is then
    /// marked ([`Received::verified`]). Otherwise it is dropped. Use this if the application has
    /// checksums of its own.
    #[must_use]
    pub fn unverified(mut self, deliver: bool) -> Self {
        self.unverified = deliver;
        self
    }
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// A part of a datagram.
#[derive(Debug, Default)]
pub enum Fragment {
    /// Nothing was received in this entry.
    #[default]
    Empty,
    /// Bytes in device memory.
    Device {
        /// The binding's id.
        binding: u64,
        /// The offset of the first byte in the binding.
        offset: u64,
        /// The length in bytes.
        len: u32,
        /// The token of the page. All fragments in one page have the same token. Return it by a
        /// [`Returner`] as often as it was received.
        token: Token,
    },
    /// Bytes that the device wrote to host memory. Dropping the fragment returns its page.
    Linear(Frag<PeerShared>),
}

/// The result of [`Socket::recv`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it says how many fragments were received, and whether a datagram has ended"]
pub struct Received {
    /// The number of fragments that were filled in, in order.
    pub fragments: usize,
    /// The sender's address.
    pub peer: SocketAddr,
    /// Whether this is the end of the datagram. If not, the next call receives the rest.
    pub end: bool,
    /// Whether the datagram's checksum counts as verified: either the device has verified it,
    /// or the sender left it to its device, so that it was not computed yet. The device can change
    /// the bytes afterwards.
    pub verified: bool,
}

/// The reason why nothing was received. No queued datagram is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecvError {
    /// No datagram is queued.
    #[error("no datagram is there to be received; poll the queues, and try again")]
    Empty,
    /// The system call that waits has failed, because the system is short of memory.
    #[error("cannot wait for a datagram: {0}")]
    Wait(Errno),
    /// No token can be assigned to the next fragment.
    #[error("a fragment cannot be received now")]
    Token(#[from] DeliverError),
}

/// Counters of a socket. Each value is exact, but they are read one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SocketStats {
    /// Fragments of device memory that were received.
    pub fragments: u64,
    /// Bytes that were received in host memory.
    pub linear_bytes: u64,
    /// Datagrams that wait to be received.
    pub queued: usize,
    /// Datagrams dropped because there was no room for more.
    pub queue_full: u64,
    /// Datagrams dropped because their headers continue in device memory. Counted only if the port
    /// could be read.
    pub headers_in_device: u64,
    /// Datagrams whose checksum the device has not verified: they were dropped, or delivered with a
    /// mark.
    pub unverified: u64,
    /// Returns that were ignored because the token is not of a binding that the socket holds.
    pub foreign: u64,
    /// Returns that were ignored because the page is not held: it was returned as often as
    /// received, or never received.
    pub excess: u64,
    /// The number of bindings that the socket holds.
    pub bindings: usize,
}

/// A UDP socket whose payload stays in device memory.
///
/// A socket has one receiver, which is this value. [`Returner`]s return tokens on any thread.
/// [`recv`](Self::recv) does not wait. [`recv_timeout`](Self::recv_timeout) waits, and an event
/// loop can wait for the socket ([`Wait`], [`AsFd`]).
///
/// If this value is dropped, the port is free again, and the pages of queued datagrams are returned
/// to their pools. When the last handle is dropped, this value or a returner, all tokens that were
/// not returned are returned.
pub struct Socket<C: BindingCount = PercpuRef> {
    local: SocketAddr,
    mailbox: Arc<Mailbox<C>>,
    flows: Arc<Flows<C>>,
    tokens: TokenTable<BindingRef<C>>,
    /// The rest of a datagram that was received in part.
    rest: Option<Datagram<C>>,
    fragments: u64,
    linear_bytes: u64,
}

impl<C: BindingCount> Socket<C> {
    pub(crate) fn new(local: SocketAddr, mailbox: Arc<Mailbox<C>>, flows: Arc<Flows<C>>) -> Self {
        Self { local, mailbox, flows, tokens: TokenTable::new(), rest: None, fragments: 0, linear_bytes: 0 }
    }

    /// The address and the port to which the socket is bound.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns a handle that returns tokens, on any thread.
    #[must_use]
    pub fn returner(&self) -> Returner<BindingRef<C>> {
        self.tokens.returner()
    }

    /// Receives the next datagram, or the rest of the last one, into `out` from the front. A
    /// datagram has up to 18 fragments: at most one in host memory, then at most 17 in device
    /// memory, each in a page of its own. Most datagrams have one of each at most. Does not wait.
    /// Costs a store for a fragment in device memory.
    ///
    /// If `out` has no room for the whole datagram, the rest stays queued without tokens, and the
    /// next call receives it.
    ///
    /// # Errors
    ///
    /// [`RecvError`]. Nothing of the datagram is lost.
    pub fn recv(&mut self, out: &mut [Fragment]) -> Result<Received, RecvError> {
        let mut datagram = self.rest.take().or_else(|| self.mailbox.pop()).ok_or(RecvError::Empty)?;
        let (mut out, mut fragments, mut refused) = (out.iter_mut(), 0, None);
        if let Some(bytes) = datagram.linear.take() {
            match out.next() {
                Some(place) => {
                    self.linear_bytes += bytes.len() as u64;
                    *place = Fragment::Linear(bytes);
                    fragments += 1;
                }
                None => datagram.linear = Some(bytes),
            }
        }
        if datagram.linear.is_none()
            && let Some(payload) = datagram.device.first.take()
        {
            match out.next().map(|place| (place, self.tokens.reserve(payload.binding(), payload.index()))) {
                Some((place, Ok(one))) => {
                    // SAFETY: the page is that of the fragment.
                    *place = unsafe { deliver(payload, one) };
                    fragments += 1;
                    self.fragments += 1;
                    if datagram.device.more.is_some() {
                        return Ok(self.recv_further(datagram, out, fragments));
                    }
                }
                Some((_, Err(error))) => {
                    refused = Some(error);
                    datagram.device.first = Some(payload);
                }
                None => datagram.device.first = Some(payload),
            }
        }
        let Datagram { peer, verified, .. } = datagram;
        let end = datagram.linear.is_none() && datagram.device.first.is_none();
        if !end {
            self.rest = Some(datagram);
        }
        match refused {
            // If a fragment was received already, the call succeeds. The next call returns the
            // error.
            Some(error) if fragments == 0 => Err(error.into()),
            _ => Ok(Received { fragments, peer, end, verified }),
        }
    }

    /// Receives the fragments behind the first one in device memory, which was received as the last
    /// of `fragments`.
    #[cold]
    fn recv_further(
        &mut self,
        mut datagram: Datagram<C>,
        places: slice::IterMut<'_, Fragment>,
        mut fragments: usize,
    ) -> Received {
        let Datagram { peer, verified, .. } = datagram;
        for place in places {
            let Some(payload) = datagram.device.next() else { break };
            let Ok(one) = self.tokens.reserve(payload.binding(), payload.index()) else {
                // The next call returns the error.
                datagram.device.first = Some(payload);
                break;
            };
            // SAFETY: the page is that of the fragment.
            *place = unsafe { deliver(payload, one) };
            self.fragments += 1;
            fragments += 1;
        }
        datagram.device.first = datagram.device.next();
        let end = datagram.device.first.is_none();
        if !end {
            self.rest = Some(datagram);
        }
        Received { fragments, peer, end, verified }
    }

    /// Receives the next datagram's payload as [`recv`](Self::recv) does, but without a token.
    /// Measurements of other kinds of tokens use this. Returns the page's index. The caller owns
    /// the page's count, and ends it by [`Pages::put`](crate::Pages::put) of the binding.
    /// Payload in host memory is dropped. Returns `None` if no datagram is queued, or if it has
    /// nothing in device memory.
    #[cfg(feature = "bench")]
    pub fn recv_bare(&mut self, out: &mut Fragment) -> Option<u32> {
        let mut datagram = self.rest.take().or_else(|| self.mailbox.pop())?;
        let payload = datagram.device.next()?;
        if datagram.device.more.is_some() {
            datagram.device.first = datagram.device.next();
            self.rest = datagram.device.first.is_some().then(|| Datagram { linear: None, ..datagram });
        }
        let (binding, offset, len, index) = (payload.binding().id(), payload.offset(), payload.len(), payload.index());
        *out = Fragment::Device { binding, offset, len, token: Token(0) };
        payload.into_count();
        self.fragments += 1;
        Some(index)
    }

    /// Receives as [`recv`](Self::recv) does. If no datagram is queued, it waits for one, at most
    /// for `limit`, or without a limit if `limit` is `None`. Another thread must poll the queues.
    /// If a datagram is already queued, this costs no more than `recv`.
    ///
    /// # Errors
    ///
    /// [`RecvError`]. It is [`RecvError::Empty`] if the time limit has passed.
    pub fn recv_timeout(&mut self, out: &mut [Fragment], limit: Option<Duration>) -> Result<Received, RecvError> {
        let first = self.recv(out);
        if !matches!(first, Err(RecvError::Empty)) {
            return first;
        }
        // If the clock cannot represent the deadline, there is none.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let outcome = loop {
            if self.arm_mailbox() == Armed::Waits {
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                let left = left.and_then(|left| Timespec::try_from(left).ok());
                match poll(&mut [PollFd::new(&*self.mailbox, PollFlags::IN)], left.as_ref()) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => break Err(RecvError::Wait(error)),
                }
            }
            match self.recv(out) {
                Err(RecvError::Empty) if deadline.is_none_or(|at| Instant::now() < at) => {}
                other => break other,
            }
        };
        self.disarm();
        outcome
    }

    fn arm_mailbox(&self) -> Armed {
        if self.rest.is_some() { Armed::Work } else { self.mailbox.arm() }
    }

    /// Drops the socket's references to bindings that are unbound and whose pages were all
    /// returned. Returns how many there were. Call it for a socket that neither receives nor
    /// returns tokens.
    pub fn release_drained(&self) -> usize {
        self.tokens.release_drained()
    }

    /// The counters of the socket. Locks the list of ranges.
    #[must_use]
    pub fn stats(&self) -> SocketStats {
        let (tokens, delivered) = (self.tokens.stats(), &self.mailbox.delivered);
        SocketStats {
            fragments: self.fragments,
            linear_bytes: self.linear_bytes,
            queued: self.mailbox.len() + usize::from(self.rest.is_some()),
            queue_full: delivered.full.load(Ordering::Relaxed),
            headers_in_device: delivered.headers_in_device.load(Ordering::Relaxed),
            unverified: delivered.unverified.load(Ordering::Relaxed),
            foreign: tokens.foreign,
            excess: tokens.excess,
            bindings: tokens.bindings,
        }
    }
}

/// Delivers a fragment with its token.
///
/// # Safety
///
/// `one` is reserved for the page of the fragment.
#[inline]
unsafe fn deliver<C: BindingCount>(payload: BoundFrag<C>, one: ReceiveOne<'_>) -> Fragment {
    let (binding, offset, len) = (payload.binding().id(), payload.offset(), payload.len());
    payload.into_count();
    // SAFETY: the reference is the count of the page that the fragment had; the caller's.
    let token = unsafe { one.commit() };
    Fragment::Device { binding, offset, len, token }
}

impl<C: BindingCount> AsFd for Socket<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }
}

/// The delivering thread wakes the waiting thread by a system call, once each time that the socket
/// was armed. If the socket is not armed, a delivery costs one load.
///
/// If no token can be assigned to the next fragment ([`RecvError::Token`]), `arm` returns
/// [`Armed::Work`]: a socket does not wait for tokens.
impl<C: BindingCount> Wait for Socket<C> {
    fn arm(&mut self) -> std::io::Result<Armed> {
        Ok(self.arm_mailbox())
    }

    fn disarm(&mut self) {
        self.mailbox.disarm();
    }

    /// A socket has no device of its own, and does not stop.
    fn check(&self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<C: BindingCount> Drop for Socket<C> {
    fn drop(&mut self) {
        self.flows.remove(&self.mailbox);
        self.mailbox.empty();
    }
}

impl<C: BindingCount> fmt::Debug for Socket<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("local", &self.local).field("stats", &self.stats()).finish_non_exhaustive()
    }
}
