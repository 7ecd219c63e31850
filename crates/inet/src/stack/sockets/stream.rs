//! Sockets of TCP: listeners and streams.

use crate::stack::address::canonical;
use crate::stack::core::Core;
use crate::stack::payload::Payload;
use crate::stack::sockets::fragment::{Fragment, Packer};
use crate::stack::transport::connections::{ConnectionId, Slot};
use crate::stack::transport::listeners::ListenerId;
use crate::stack::{SocketError, StackStats};
use crate::tcp::{self, Budget, Chunk, Config, Held, Info, IpFields, KeepAlive, Listener, Received};
use crate::wire::Flow;
use netmem_pool::{Frag, Mapped};
use std::cell::RefCell;
use std::fmt;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// From this length on, the fragment of written bytes is searched by their address. For fewer
/// bytes, a copy costs less.
const BY_REFERENCE: usize = 512;

/// Opens the sockets of a [`Stack`](crate::stack::Stack). Stays on its thread, as they do; fragments go
/// anywhere.
///
/// Calls of sockets take effect at the next [`poll`](crate::stack::Stack::poll) of the stack, which sends
/// the segments. The time of a call is that of the last poll.
pub struct Sockets<P: Payload> {
    pub(crate) core: Rc<RefCell<Core<P>>>,
}

impl<P: Payload> Clone for Sockets<P> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone() }
    }
}

impl<P: Payload> fmt::Debug for Sockets<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sockets")
    }
}

/// The options of a listener.
#[derive(Clone, Copy, Debug)]
pub struct ListenOptions {
    /// Connections that wait to be accepted. When so many wait, acknowledgements that would
    /// complete another handshake are dropped.
    pub backlog: usize,
    /// Handshakes that are not complete. When there are so many, further ones are answered by
    /// cookies, which take no memory.
    pub half_open: usize,
    /// Whether the address `[::]` means the addresses of IPv6 only, and not those of IPv4, too.
    pub v6_only: bool,
    /// The options of accepted connections. MSS and path MTU follow from the route.
    pub connection: Config,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 1024, half_open: 1024, v6_only: false, connection: Config::default() }
    }
}

/// The counters of a listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Handshakes that are not complete now.
    pub half_open: usize,
    /// Connections that wait to be accepted now.
    pub waiting: usize,
    /// Connections that were accepted.
    pub accepted: u64,
    /// SYNs and acknowledgements that were dropped because the accept queue was full.
    pub overflows: u64,
    /// SYNs that were answered by a cookie, because there were too many handshakes.
    pub cookies: u64,
}

impl<P: Payload> Sockets<P> {
    /// Listens on `local`. The unspecified address means all addresses of the host, of both
    /// families; port 0 means one that is free ([`TcpListener::local_addr`]).
    ///
    /// Several stacks of a host can listen on the same port. A connection then lives on the stack
    /// at whose queue its first segment arrives.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoPort`].
    pub fn listen(&self, local: SocketAddr, options: ListenOptions) -> Result<TcpListener<P>, SocketError> {
        let mut core = self.core.borrow_mut();
        let local = canonical(local);
        core.check_local(local.ip())?;
        let listener = Listener::new(options.backlog, options.half_open);
        let (id, port) = core.listen(local, listener, options.connection, options.v6_only)?;
        drop(core);
        Ok(TcpListener { sockets: self.clone(), id, local: SocketAddr::new(local.ip(), port) })
    }

    /// Begins to connect to `remote`, from a port that the stack chooses. Returns at once: the
    /// stream is writable when it is connected.
    ///
    /// # Errors
    ///
    /// [`SocketError::NoRoute`], [`SocketError::NoPort`], [`SocketError::TooMany`].
    pub fn connect(&self, remote: SocketAddr, options: &Config) -> Result<TcpStream<P>, SocketError> {
        self.open(None, remote, options)
    }

    /// Like [`connect`](Self::connect), from an address and a port of the user's choice. The
    /// unspecified address means the one that the route has; port 0 means any.
    ///
    /// # Errors
    ///
    /// As there, and [`SocketError::NotOurs`], [`SocketError::InUse`]: another connection to
    /// `remote` has the port.
    pub fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        options: &Config,
    ) -> Result<TcpStream<P>, SocketError> {
        self.open(Some(canonical(local)), remote, options)
    }

    fn open(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: &Config,
    ) -> Result<TcpStream<P>, SocketError> {
        let mut core = self.core.borrow_mut();
        let (id, flow) = core.connect(local, canonical(remote), options)?;
        drop(core);
        Ok(TcpStream::new(self.clone(), id, flow))
    }

    /// The counters of the stack, also after its end. As [`Stack::stats`](crate::stack::Stack::stats).
    #[must_use]
    pub fn stats(&self) -> StackStats {
        self.core.borrow().egress.stats
    }

    /// Pages into which received payload can be detached. See [`Fragment::detach`].
    pub fn packer(&self) -> Packer<P::Mem> {
        let core = self.core.borrow();
        Packer::new(core.egress.pool.clone(), core.budget.clone(), core.pages.packed.clone())
    }
}

/// A socket that accepts connections.
///
/// Dropping it resets connections that wait to be accepted.
pub struct TcpListener<P: Payload> {
    sockets: Sockets<P>,
    id: ListenerId,
    local: SocketAddr,
}

impl<P: Payload> TcpListener<P> {
    /// The next connection. It may have ended already: a connection that its peer has reset stays
    /// in the accept queue. What was received before can be read, then the error.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: none waits.
    pub fn accept(&mut self) -> Result<TcpStream<P>, SocketError> {
        let mut core = self.sockets.core.borrow_mut();
        // The stack was closed: nothing will come.
        if core.gone || core.listeners.get_mut(self.id).is_none() {
            return Err(SocketError::StackGone);
        }
        let (id, flow) = core.accept(self.id).ok_or(SocketError::WouldBlock)?;
        drop(core);
        Ok(TcpStream::new(self.sockets.clone(), id, flow))
    }

    /// Like [`accept`](Self::accept); the waker is called when a connection waits.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Result<TcpStream<P>, SocketError>> {
        match self.accept() {
            Err(SocketError::WouldBlock) => {
                let waker = cx.waker().clone();
                let mut core = self.sockets.core.borrow_mut();
                let listening = core.listeners.get_mut(self.id);
                let before = listening.and_then(|listening| listening.waker.replace(waker));
                drop(core);
                drop(before);
                Poll::Pending
            }
            outcome => Poll::Ready(outcome),
        }
    }

    /// The address and the port that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The listener's counters. `None` if the stack is gone.
    #[must_use]
    pub fn stats(&self) -> Option<ListenerStats> {
        let core = self.sockets.core.borrow();
        let listening = core.listeners.get(self.id)?;
        let listener = &listening.listener;
        Some(ListenerStats {
            half_open: listener.half_open(),
            waiting: listener.waiting(),
            accepted: listening.accepted,
            overflows: listener.dropped(),
            cookies: listener.cookies(),
        })
    }
}

impl<P: Payload> Drop for TcpListener<P> {
    fn drop(&mut self) {
        self.sockets.core.borrow_mut().unlisten(self.id);
    }
}

impl<P: Payload> fmt::Debug for TcpListener<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpListener({})", self.local)
    }
}

/// A TCP connection.
///
/// Calls do not block. [`SocketError::WouldBlock`] means that a call can do nothing at present; the
/// `poll_` calls then call a waker when that changes. Payload that was received before the
/// connection ended can still be read. After that, calls return the reason of the end:
/// [`SocketError::Closed`].
///
/// Dropping it closes the connection. Bytes that were sent still arrive. But if received data was
/// not read, the peer gets a reset instead.
pub struct TcpStream<P: Payload> {
    pub(crate) sockets: Sockets<P>,
    pub(crate) id: ConnectionId,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// What [`read`](Self::read) has not copied yet.
    pub(crate) rest: Fragment<P::Mem>,
}

/// Nothing in it is pinned.
impl<P: Payload> Unpin for TcpStream<P> {}

impl<P: Payload> TcpStream<P> {
    pub(crate) fn new(sockets: Sockets<P>, id: ConnectionId, flow: Flow) -> Self {
        Self { sockets, id, local: flow.local, remote: flow.remote, rest: Fragment::default() }
    }

    /// This end.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The peer.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.remote
    }

    /// Receives the next payload in order, in any kind of memory, if `takes` returns true for it.
    /// `None` means that the peer sends no more. [`recv`](Self::recv) is for payload in host
    /// memory. `takes` must not call sockets.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: nothing is there, or it was not taken. [`SocketError::Closed`].
    pub fn recv_chunk(
        &mut self,
        takes: impl FnOnce(&P::Received) -> bool,
    ) -> Result<Option<Held<P::Received>>, SocketError> {
        let mut core = self.sockets.core.borrow_mut();
        let now = core.now;
        let slot = core.connections.get_mut(self.id).ok_or(SocketError::StackGone)?;
        if slot.connection.peek().is_some_and(|chunk| !takes(chunk)) {
            return Err(SocketError::WouldBlock);
        }
        match slot.connection.recv(now) {
            Ok(Received::Chunk(held)) => {
                // The window may have opened.
                core.touch(self.id);
                Ok(Some(held))
            }
            Ok(Received::Empty) => Err(SocketError::WouldBlock),
            Ok(Received::End) => Ok(None),
            Err(error) => Err(SocketError::Closed(error)),
        }
    }

    /// Calls `see` for the queued pieces of payload with the numbers in `which`; piece 0 is the
    /// piece that is received next. Returns how many pieces there were. This is for prefetches.
    /// `see` must not call sockets.
    pub fn look_ahead(&self, which: Range<usize>, see: impl FnMut(&P::Received)) -> usize {
        let core = self.sockets.core.borrow();
        let Some(slot) = core.connections.get(self.id) else { return 0 };
        // Most calls of a receiver that polls find nothing.
        if slot.connection.peek().is_none() {
            return 0;
        }
        slot.connection.queued_from(which.start).take(which.len()).map(see).count()
    }

    /// Registers the waker, which is called when there may be payload to receive, or the connection
    /// ends.
    pub fn wake_to_receive(&mut self, cx: &mut Context<'_>) {
        let _: Poll<()> = self.wait_to_read(cx);
    }

    /// The budget in which buffers of received payload count until their user gives them back.
    /// `None` if the stack is gone.
    #[must_use]
    pub fn budget(&self) -> Option<Budget> {
        let core = self.sockets.core.borrow();
        core.connections.get(self.id).map(|slot| slot.connection.budget().clone())
    }

    /// Segments in the window that were dropped since payload last arrived: the device had not
    /// verified their checksum, and their payload is in memory that this process cannot read. If
    /// this grows, the peer's payload never arrives. A few may just be damaged.
    #[must_use]
    pub fn unverified(&self) -> u64 {
        self.sockets.core.borrow().connections.get(self.id).map_or(0, |slot| slot.unverified)
    }

    /// Whether the path leads to this host: segments go to no device.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.sockets.core.borrow().connections.get(self.id).is_some_and(|slot| slot.path.is_here())
    }

    fn wait_to_read<R>(&self, cx: &mut Context<'_>) -> Poll<R> {
        self.wait(cx, |slot| &mut slot.read)
    }

    fn wait_to_write<R>(&self, cx: &mut Context<'_>) -> Poll<R> {
        self.wait(cx, |slot| &mut slot.write)
    }

    fn wait<R>(&self, cx: &mut Context<'_>, place: impl FnOnce(&mut Slot<P>) -> &mut Option<Waker>) -> Poll<R> {
        let waker = cx.waker().clone();
        let mut core = self.sockets.core.borrow_mut();
        let before = core.connections.get_mut(self.id).and_then(|slot| place(slot).replace(waker));
        // A waker that is dropped can drop another socket, which borrows the tables.
        drop(core);
        drop(before);
        Poll::Pending
    }
}

/// Payload in host memory.
impl<M: Mapped> TcpStream<M> {
    /// Receives payload without a copy: the next payload in order is stored in the places of
    /// `into`, a fragment each. Returns how many places were filled; 0 means that the peer sends no
    /// more.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: nothing is there. [`SocketError::Closed`].
    pub fn recv(&mut self, into: &mut [Fragment<M>]) -> Result<usize, SocketError> {
        let mut places = into.iter_mut();
        let mut filled = 0;
        if !self.rest.is_empty()
            && let Some(place) = places.next()
        {
            *place = std::mem::take(&mut self.rest);
            filled = 1;
        }
        let mut core = self.sockets.core.borrow_mut();
        let now = core.now;
        let slot = core.connections.get_mut(self.id).ok_or(SocketError::StackGone)?;
        let mut outcome = Ok(());
        for place in places {
            match slot.connection.recv(now) {
                Ok(Received::Chunk(held)) => *place = Fragment::new(held),
                Ok(Received::Empty) => {
                    outcome = Err(SocketError::WouldBlock);
                    break;
                }
                Ok(Received::End) => break,
                Err(error) => {
                    outcome = Err(SocketError::Closed(error));
                    break;
                }
            }
            filled += 1;
        }
        if filled > 0 {
            // The window may have opened.
            core.touch(self.id);
            return Ok(filled);
        }
        outcome.map(|()| 0)
    }

    /// Like [`recv`](Self::recv); the waker is called when there is something to receive.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>, into: &mut [Fragment<M>]) -> Poll<Result<usize, SocketError>> {
        match self.recv(into) {
            Err(SocketError::WouldBlock) => self.wait_to_read(cx),
            outcome => Poll::Ready(outcome),
        }
    }

    /// Copies received bytes out. Returns how many; 0 means that the peer sends no more, unless
    /// `into` is empty.
    ///
    /// # Errors
    ///
    /// The errors of [`recv`](Self::recv).
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, SocketError> {
        let mut copied = 0;
        while copied < into.len() {
            if self.rest.is_empty() {
                let mut next = [Fragment::default()];
                match self.recv(&mut next) {
                    Ok(0) => break,
                    Ok(_) => [self.rest] = next,
                    Err(_) if copied > 0 => break,
                    Err(error) => return Err(error),
                }
            }
            let n = self.rest.len().min(into.len() - copied);
            let out = self.rest.copy_to(0, &mut into[copied..copied + n]);
            debug_assert!(out.is_ok());
            self.rest.advance(n);
            copied += n;
        }
        self.sockets.core.borrow_mut().egress.stats.copied_received += copied as u64;
        Ok(copied)
    }

    /// Like [`read`](Self::read); the waker is called when there is something to read.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<usize, SocketError>> {
        match self.read(into) {
            Err(SocketError::WouldBlock) => self.wait_to_read(cx),
            outcome => Poll::Ready(outcome),
        }
    }

    /// Sends a fragment without a copy. Its page must be in memory that the device reaches: a page
    /// that the host's device has received, or one of its pool. The fragment is held until the peer
    /// has acknowledged it and the device has completed each of its transmissions.
    ///
    /// `more` says that more follows soon: a segment that is not full may wait for it.
    ///
    /// # Errors
    ///
    /// Returns the fragment. [`SocketError::WouldBlock`]: the send buffer is full.
    /// [`SocketError::ShutDown`], [`SocketError::Closed`].
    pub fn send(&mut self, fragment: Frag<M>, more: bool) -> Result<(), (SocketError, Frag<M>)> {
        self.send_chunk(fragment, more)
    }
}

impl<P: Payload> TcpStream<P> {
    /// Sends payload in any kind of memory; [`send`](Self::send) is for host memory. A clone of it
    /// is held until the peer has acknowledged it and the device has completed each of its
    /// transmissions.
    ///
    /// `more` says that more follows soon: a segment that is not full may wait for it.
    ///
    /// # Errors
    ///
    /// Returns the payload. [`SocketError::WouldBlock`]: the send buffer is full.
    /// [`SocketError::ShutDown`], [`SocketError::Closed`].
    pub fn send_chunk(&mut self, chunk: P::Sent, more: bool) -> Result<(), (SocketError, P::Sent)> {
        let mut core = self.sockets.core.borrow_mut();
        let Some(slot) = core.connections.get_mut(self.id) else { return Err((SocketError::StackGone, chunk)) };
        if chunk.is_empty() {
            return Ok(());
        }
        match slot.connection.send(chunk, more) {
            Ok(()) => {
                core.touch(self.id);
                Ok(())
            }
            Err(refusal) => Err((refusal.why.into(), refusal.chunk)),
        }
    }

    /// Copies bytes into pages of the pool and sends them, as many as there is room for. Returns
    /// how many.
    ///
    /// If there are at least 512 bytes, and they belong to a [`Bytes`](bytes::Bytes) that was made
    /// of a fragment, they are not copied. The fragment is found by their address and sent, if it
    /// is in the memory of the stack's pool
    /// ([`SharedPool::frag_of`](netmem_pool::SharedPool::frag_of)).
    ///
    /// # Errors
    ///
    /// As of [`send`](Self::send); [`SocketError::WouldBlock`] also if the connection has its share
    /// of the pool's pages, or the pool has none.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, SocketError> {
        if bytes.len() >= BY_REFERENCE {
            let found = self.sockets.core.borrow().egress.pool.frag_of(bytes);
            if let Some(frag) = found {
                return self.send_chunk(P::from_host(frag), false).map(|()| bytes.len()).map_err(|(error, _)| error);
            }
        }
        let mut core = self.sockets.core.borrow_mut();
        let written = core.write(self.id, bytes)?;
        core.egress.stats.copied_sent += written as u64;
        if written > 0 {
            core.touch(self.id);
        }
        if written > 0 || bytes.is_empty() { Ok(written) } else { Err(SocketError::WouldBlock) }
    }

    /// Writes the slices one after the other, as many bytes as there is room for. Returns how many
    /// bytes were written in total.
    ///
    /// # Errors
    ///
    /// As of [`write`](Self::write), if there is room for none.
    pub fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, SocketError> {
        let mut written = 0;
        for slice in slices {
            match self.write(slice) {
                Ok(n) => {
                    written += n;
                    if n < slice.len() {
                        break;
                    }
                }
                Err(_) if written > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(written)
    }

    /// Like [`write_vectored`](Self::write_vectored); the waker is called when there is room.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_write_vectored(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize, SocketError>> {
        match self.write_vectored(slices) {
            Err(SocketError::WouldBlock) => self.wait_to_write(cx),
            outcome => Poll::Ready(outcome),
        }
    }

    /// Like [`write`](Self::write); the waker is called when there is room.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, SocketError>> {
        match self.write(bytes) {
            Err(SocketError::WouldBlock) => self.wait_to_write(cx),
            outcome => Poll::Ready(outcome),
        }
    }

    /// Bytes for which the send buffer has room at present.
    #[must_use]
    pub fn room(&self) -> usize {
        self.sockets.core.borrow().connections.get(self.id).map_or(0, |slot| slot.connection.room())
    }

    /// Bytes that can be received now.
    #[must_use]
    pub fn readable(&self) -> usize {
        let core = self.sockets.core.borrow();
        self.rest.len() + core.connections.get(self.id).map_or(0, |slot| slot.connection.readable())
    }

    /// Ready when the send buffer has room and a page can be written, or the connection has ended.
    pub fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        let mut core = self.sockets.core.borrow_mut();
        let Some(slot) = core.connections.get(self.id) else { return Poll::Ready(Err(SocketError::StackGone)) };
        if slot.closed.is_some() {
            return Poll::Ready(slot.connection.failure().map_or(Ok(()), |error| Err(SocketError::Closed(error))));
        }
        if slot.connected && slot.connection.is_writable() && core.can_write(self.id) {
            return Poll::Ready(Ok(()));
        }
        drop(core);
        self.wait_to_write(cx)
    }

    /// Whether the handshake is complete. False while it is under way.
    ///
    /// # Errors
    ///
    /// [`SocketError::Closed`] says why the connection was not made, or has ended.
    pub fn is_connected(&self) -> Result<bool, SocketError> {
        let core = self.sockets.core.borrow();
        let slot = core.connections.get(self.id).ok_or(SocketError::StackGone)?;
        match slot.connection.failure() {
            Some(error) => Err(SocketError::Closed(error)),
            None => Ok(slot.connected),
        }
    }

    /// Ready when the handshake is complete, or has failed.
    ///
    /// # Errors
    ///
    /// As of [`is_connected`](Self::is_connected).
    pub fn poll_connected(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        match self.is_connected() {
            Ok(false) => self.wait_to_write(cx),
            Ok(true) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Shuts down the sending direction: the peer sees the end of the stream after the bytes that
    /// were sent. Receiving goes on.
    pub fn shutdown(&mut self) {
        self.with(|connection, _| connection.shutdown());
    }

    /// Shuts down the reading direction: after the bytes that were received, reads return the end
    /// of the stream. The peer is not told; what it still sends is acknowledged.
    pub fn shutdown_read(&mut self) {
        self.with(|connection, _| connection.shutdown_read());
    }

    /// Resets the connection. Bytes that were sent and not acknowledged are lost.
    pub fn abort(mut self) {
        self.reset();
    }

    /// Like [`abort`](Self::abort), for a stream that is part of another value.
    pub fn reset(&mut self) {
        self.with(|connection, now| connection.abort(now));
    }

    /// Corks the stream, or uncorks it: while corked, only full segments are sent, for at most 200
    /// ms.
    pub fn set_cork(&mut self, cork: bool) {
        self.with(|connection, _| connection.set_cork(cork));
    }

    /// Sets whether small segments are sent at once, or wait until sent bytes are acknowledged
    /// (Nagle).
    pub fn set_nodelay(&mut self, nodelay: bool) {
        self.with(|connection, _| connection.set_nodelay(nodelay));
    }

    /// Sets the size of the send buffer, in bytes.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        self.with(|connection, _| connection.set_send_buffer(bytes));
    }

    /// Sets how many unsent bytes make the stream unwritable
    /// ([`poll_writable`](Self::poll_writable)), so that what is written late is not queued behind
    /// much else.
    pub fn set_low_water(&mut self, bytes: usize) {
        self.with(|connection, _| connection.set_low_water(bytes));
    }

    /// If `quick`, the next segments are acknowledged at once, and not after a delay. Otherwise
    /// acknowledgements are delayed from now on.
    pub fn set_quick_ack(&mut self, quick: bool) {
        self.with(|connection, _| connection.set_quick_ack(quick));
    }

    /// Marks the end of what was written as the end of urgent data. New protocols do not use it
    /// (RFC 6093).
    pub fn mark_urgent(&mut self) {
        self.with(|connection, _| connection.mark_urgent());
    }

    /// Sets whether probes are sent to an idle peer (keepalive).
    pub fn set_keep_alive(&mut self, keep_alive: Option<KeepAlive>) {
        self.with(|connection, _| connection.set_keep_alive(keep_alive));
    }

    /// Sets fields of the IP headers of segments that are sent from now on.
    pub fn set_ip(&mut self, ip: IpFields) {
        self.with(|connection, _| connection.set_ip(ip));
    }

    /// Sets how long sent data may stay unacknowledged.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.with(|connection, _| connection.set_user_timeout(timeout));
    }

    /// How many bytes from the reading position on are urgent, if any are. They are read in line.
    #[must_use]
    pub fn urgent(&self) -> Option<u32> {
        let core = self.sockets.core.borrow();
        core.connections.get(self.id)?.connection.urgent()
    }

    /// The connection's state in numbers.
    #[must_use]
    pub fn info(&self) -> Option<Info> {
        let core = self.sockets.core.borrow();
        let now = core.now;
        core.connections.get(self.id).map(|slot| slot.connection.info(now))
    }

    fn with(&self, f: impl FnOnce(&mut tcp::Connection<P>, crate::Time)) {
        let mut core = self.sockets.core.borrow_mut();
        let now = core.now;
        if let Some(slot) = core.connections.get_mut(self.id) {
            f(&mut slot.connection, now);
            core.touch(self.id);
        }
    }
}

impl<P: Payload> Drop for TcpStream<P> {
    fn drop(&mut self) {
        // The rest of a fragment is data that was not read.
        let unread = !self.rest.is_empty();
        self.rest = Fragment::default();
        self.sockets.core.borrow_mut().let_go(self.id, unread);
    }
}

impl<P: Payload> fmt::Debug for TcpStream<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpStream({} - {})", self.local, self.remote)
    }
}
