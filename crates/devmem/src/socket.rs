//! Sockets: datagrams as fragments of device memory with tokens, and bytes that landed in host memory.

use crate::flow::Flows;
use crate::mailbox::{Datagram, Mailbox};
use crate::{BindingCount, BindingRef, DeliverError, Returner, Token, TokenTable};
use netmem_packet::{Armed, Wait};
use netmem_pool::{Frag, PeerShared};
use netmem_refs::PercpuRef;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use thiserror::Error;

/// What a [`Socket`] is to be. Start with [`SocketOptions::new`].
#[derive(Clone, Debug)]
pub struct SocketOptions {
    pub(crate) queue: usize,
    pub(crate) unvouched: bool,
}

impl SocketOptions {
    /// Room for 1024 datagrams; those whose checksum the device did not vouch for are dropped.
    #[must_use]
    pub fn new() -> Self {
        Self { queue: 1024, unvouched: false }
    }

    /// Datagrams that may wait to be received. Beyond that they are dropped, and counted.
    #[must_use]
    pub fn queue(mut self, datagrams: usize) -> Self {
        self.queue = datagrams;
        self
    }

    /// Whether datagrams are delivered that the device did not vouch for, marked ([`Received::vouched`]), instead of being
    /// dropped: for users who have checksums of their own.
    #[must_use]
    pub fn unvouched(mut self, deliver: bool) -> Self {
        self.unvouched = deliver;
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
    /// Nothing was received here.
    #[default]
    Empty,
    /// Bytes in device memory.
    Device {
        /// The binding's id.
        binding: u64,
        /// The first byte, from the binding's first.
        offset: u64,
        /// Bytes.
        len: u32,
        /// To be given back by a [`Returner`] as often as it was received. One for all fragments in a page.
        token: Token,
    },
    /// Bytes that landed in host memory. Dropping it gives them back.
    Linear(Frag<PeerShared>),
}

/// What [`Socket::recv`] has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it says how many fragments were received, and whether a datagram has ended"]
pub struct Received {
    /// How many fragments were filled in, in order.
    pub fragments: usize,
    /// Who sent the datagram.
    pub peer: SocketAddr,
    /// Whether this was all of it. Else the rest comes next.
    pub end: bool,
    /// Whether the device vouches for the datagram's checksum.
    pub vouched: bool,
}

/// Why nothing was received. What was queued is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecvError {
    /// There is no datagram.
    #[error("no datagram is there to be received; poll the queues, and try again")]
    Empty,
    /// The system call that waits has failed: the system is short of memory.
    #[error("cannot wait for a datagram: {0}")]
    Wait(Errno),
    /// The next fragment gets no token.
    #[error("a fragment cannot be received now")]
    Token(#[from] DeliverError),
}

/// A socket's numbers. Each is right, and they are not of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SocketStats {
    /// Fragments of device memory received.
    pub fragments: u64,
    /// Bytes received that had landed in host memory.
    pub linear_bytes: u64,
    /// Datagrams that wait to be received.
    pub queued: usize,
    /// Datagrams dropped because there was no room for more.
    pub queue_full: u64,
    /// Datagrams dropped because their headers go on in device memory, as far as their port could be read.
    pub headers_in_device: u64,
    /// Datagrams that the device did not vouch for: dropped, or delivered marked.
    pub unvouched: u64,
    /// Returns of tokens of no binding that the socket holds.
    pub foreign: u64,
    /// Returns of tokens whose page is not held: returned more often than received, or never received.
    pub excess: u64,
    /// Bindings that the socket holds.
    pub bindings: usize,
}

/// A UDP socket whose payload stays in device memory.
///
/// It has one receiver, this value; [`Returner`]s give back on any thread. [`recv`](Self::recv) does not wait;
/// [`recv_timeout`](Self::recv_timeout) does, and so does an event loop ([`Wait`], [`AsFd`]). Dropping it ends the receiving: its port is free, and
/// what was queued goes home. With the last handle, this or a returner, all tokens that are out are given back.
pub struct Socket<C: BindingCount = PercpuRef> {
    port: u16,
    mailbox: Arc<Mailbox<C>>,
    flows: Arc<Flows<C>>,
    tokens: TokenTable<BindingRef<C>>,
    /// A datagram of which a part has been received.
    rest: Option<Datagram<C>>,
    fragments: u64,
    linear_bytes: u64,
}

impl<C: BindingCount> Socket<C> {
    pub(crate) fn new(port: u16, mailbox: Arc<Mailbox<C>>, flows: Arc<Flows<C>>) -> Self {
        Self { port, mailbox, flows, tokens: TokenTable::new(), rest: None, fragments: 0, linear_bytes: 0 }
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A handle that gives tokens back, on any thread.
    #[must_use]
    pub fn returner(&self) -> Returner<BindingRef<C>> {
        self.tokens.returner()
    }

    /// Receives the next datagram, or the rest of the one before, into `out` from the front. At most two fragments, one of
    /// either kind. Does not wait. An atomic addition for a fragment in device memory.
    ///
    /// If `out` has no room for all of it the rest stays where it is, without a token, and comes next.
    ///
    /// # Errors
    ///
    /// [`RecvError`]; nothing of it is lost.
    pub fn recv(&mut self, out: &mut [Fragment]) -> Result<Received, RecvError> {
        let mut datagram = self.rest.take().or_else(|| self.mailbox.pop()).ok_or(RecvError::Empty)?;
        let (mut out, mut fragments, mut refused) = (out.iter_mut(), 0, None);
        if let Some((head, start, len)) = datagram.linear.take() {
            match out.next() {
                Some(place) => {
                    *place = Fragment::Linear(head.slice(start..start + len));
                    self.linear_bytes += len as u64;
                    fragments += 1;
                }
                None => datagram.linear = Some((head, start, len)),
            }
        }
        if datagram.linear.is_none()
            && let Some(payload) = datagram.payload.take()
        {
            match out.next().map(|place| (place, self.tokens.reserve(payload.binding(), payload.index()))) {
                Some((place, Ok(one))) => {
                    let (binding, offset, len) = (payload.binding().id(), payload.offset(), payload.len());
                    payload.into_count();
                    // SAFETY: the count of its page that the fragment had.
                    let token = unsafe { one.commit() };
                    *place = Fragment::Device { binding, offset, len, token };
                    self.fragments += 1;
                    fragments += 1;
                }
                Some((_, Err(error))) => {
                    refused = Some(error);
                    datagram.payload = Some(payload);
                }
                None => datagram.payload = Some(payload),
            }
        }
        let Datagram { peer, vouched, .. } = datagram;
        let end = datagram.linear.is_none() && datagram.payload.is_none();
        if !end {
            self.rest = Some(datagram);
        }
        match refused {
            // It is refused again, then alone.
            Some(error) if fragments == 0 => Err(error.into()),
            _ => Ok(Received { fragments, peer, end, vouched }),
        }
    }

    /// Receives the next datagram's payload as [`recv`](Self::recv) does, but without a token: for measurements of other kinds of
    /// tokens. The answer is the page's number, and its count is the caller's, who gives it up by
    /// [`Pages::put`](crate::Pages::put) of the binding. What landed in host memory is dropped. `None`: there is nothing, or nothing in device memory.
    #[doc(hidden)]
    pub fn recv_bare(&mut self, out: &mut Fragment) -> Option<u32> {
        let Datagram { payload, .. } = self.rest.take().or_else(|| self.mailbox.pop())?;
        let payload = payload?;
        let (binding, offset, len, index) = (payload.binding().id(), payload.offset(), payload.len(), payload.index());
        *out = Fragment::Device { binding, offset, len, token: Token(0) };
        payload.into_count();
        self.fragments += 1;
        Some(index)
    }

    /// Receives as [`recv`](Self::recv) does, and waits up to `limit` for a datagram if there is none; without a limit, for as
    /// long as it takes. The queues must be polled by another thread. A datagram that is there costs nothing more than in `recv`.
    ///
    /// # Errors
    ///
    /// [`RecvError`]; [`RecvError::Empty`] if the time is over.
    pub fn recv_timeout(&mut self, out: &mut [Fragment], limit: Option<Duration>) -> Result<Received, RecvError> {
        let first = self.recv(out);
        if !matches!(first, Err(RecvError::Empty)) {
            return first;
        }
        // A time that the clock cannot count is for ever.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let outcome = loop {
            if self.arm() == Armed::Waits {
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

    /// Lets go of bindings that are unbound and whose pages are all home, for a socket that neither receives nor gives
    /// back. How many there were.
    pub fn release_drained(&self) -> usize {
        self.tokens.release_drained()
    }

    /// The socket's numbers. Takes a lock.
    #[must_use]
    pub fn stats(&self) -> SocketStats {
        let (tokens, delivered) = (self.tokens.stats(), &self.mailbox.delivered);
        SocketStats {
            fragments: self.fragments,
            linear_bytes: self.linear_bytes,
            queued: self.mailbox.len() + usize::from(self.rest.is_some()),
            queue_full: delivered.full.load(Ordering::Relaxed),
            headers_in_device: delivered.headers_in_device.load(Ordering::Relaxed),
            unvouched: delivered.unvouched.load(Ordering::Relaxed),
            foreign: tokens.foreign,
            excess: tokens.excess,
            bindings: tokens.bindings,
        }
    }
}

impl<C: BindingCount> AsFd for Socket<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }
}

/// The thread that delivers wakes the thread that waits, by a system call for each time that the socket was armed. Delivering to
/// a socket that is not armed costs one load.
///
/// A socket whose next fragment gets no token ([`RecvError::Token`]) has work: it does not wait for tokens.
impl<C: BindingCount> Wait for Socket<C> {
    fn arm(&mut self) -> Armed {
        if self.rest.is_some() { Armed::Work } else { self.mailbox.arm() }
    }

    fn disarm(&mut self) {
        self.mailbox.disarm();
    }
}

impl<C: BindingCount> Drop for Socket<C> {
    fn drop(&mut self) {
        self.flows.remove(self.port);
        self.mailbox.empty();
    }
}

impl<C: BindingCount> fmt::Debug for Socket<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("port", &self.port).field("stats", &self.stats()).finish_non_exhaustive()
    }
}
