//! Moving streams: to another stack of the host, or to another process.
//!
//! ```text
//!   TcpStream::depart ──► Departed: the connection with its fragments ──► Sockets::adopt     another stack of the host
//!   TcpStream::save   ──► SavedStream: numbers and bytes, in any format of serde ──► Sockets::restore     also another process
//! ```
//!
//! Between the two, no stack has the flow: its segments are dropped, and not answered by a reset.
//! The peer sends them again.

use crate::stack::core::Core;
use crate::stack::path::Path;
use crate::stack::payload::Payload;
use crate::stack::shared::host::Host;
use crate::stack::sockets::fragment::Fragment;
use crate::stack::transport::connections::{ConnectionId, Role, Slot};
use crate::stack::{SocketError, Sockets, TcpStream};
use crate::tcp::{Config, Connection, Saved};
use crate::wire::Flow;
use netmem_pool::{Frag, Mapped};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::mem;
use std::net::SocketAddr;

/// A stream as numbers and bytes. Any format of serde can hold it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedStream {
    local: SocketAddr,
    remote: SocketAddr,
    connection: Saved,
    /// Received bytes that were acknowledged, so the peer does not have them any more.
    unread: Vec<u8>,
    unacknowledged: Vec<u8>,
}

impl SavedStream {
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

    /// Bytes of payload. [`restore`](Sockets::restore) copies them into pages of the stack's pool.
    #[must_use]
    pub fn payload(&self) -> usize {
        self.unread.len() + self.unacknowledged.len()
    }

    pub(crate) fn flow(&self) -> Flow {
        Flow { local: self.local, remote: self.remote }
    }
}

/// A stream on its way between two stacks of a host. It can be sent to any thread. If it is
/// dropped, the connection is gone: the peer's next segment is answered by a reset.
#[must_use = "the connection ends with it"]
pub struct Departed<P: Payload> {
    connection: Option<Box<Connection<P>>>,
    flow: Flow,
    rest: Fragment<P::Mem>,
    host: Host<P>,
}

impl<P: Payload> Drop for Departed<P> {
    fn drop(&mut self) {
        if self.connection.is_some() {
            self.host.directory().release(&self.flow);
        }
    }
}

impl<P: Payload> fmt::Debug for Departed<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Departed({} - {})", self.flow.local, self.flow.remote)
    }
}

impl<P: Payload> TcpStream<P> {
    /// Takes the connection off its stack, with its fragments.
    ///
    /// # Errors
    ///
    /// The stream, if its handshake is not complete, if it has ended, or if its stack is gone.
    pub fn depart(mut self) -> Result<Departed<P>, Self> {
        let mut core = self.sockets.core.borrow_mut();
        let Some(slot) = core.take(self.id) else {
            drop(core);
            return Err(self);
        };
        let host = core.host.clone();
        drop(core);
        let (flow, rest) = (slot.flow, mem::take(&mut self.rest));
        Ok(Departed { connection: Some(Box::new(slot.connection)), flow, rest, host })
    }
}

impl<M: Mapped> TcpStream<M> {
    /// Takes the connection off its stack, as numbers and bytes: its payload is copied. The flow
    /// stays reserved in this host, so that it answers no segment of it.
    ///
    /// # Errors
    ///
    /// The stream, if its handshake is not complete, if it has ended, or if its stack is gone.
    pub fn save(self) -> Result<SavedStream, Self> {
        let saved = self.sockets.core.borrow_mut().save(self.id, &self.rest);
        saved.ok_or(self)
    }
}

fn append<M: Mapped>(bytes: &mut Vec<u8>, frag: &Frag<M>) {
    let at = bytes.len();
    bytes.resize(at + frag.len(), 0);
    let copied = frag.copy_to(0, &mut bytes[at..]);
    debug_assert!(copied.is_ok());
}

impl<P: Payload> Sockets<P> {
    /// Continues a connection of another stack of the host. Its fragments stay in the budget of the
    /// queue that received them.
    ///
    /// # Errors
    ///
    /// Returns the connection. [`SocketError::NotOurs`]: it is of another host.
    /// [`SocketError::NoRoute`], [`SocketError::TooMany`].
    #[expect(clippy::result_large_err, reason = "the error is the value itself, which is moved back")]
    pub fn adopt(&self, mut departed: Departed<P>) -> Result<TcpStream<P>, (SocketError, Departed<P>)> {
        let mut core = self.core.borrow_mut();
        let path = match core.arrives(&departed.flow) {
            Ok(path) if core.host.is(&departed.host) => path,
            Ok(_) => return Err((SocketError::NotOurs, departed)),
            Err(error) => return Err((error, departed)),
        };
        let Some(connection) = departed.connection.take() else { return Err((SocketError::StackGone, departed)) };
        let id = core.settle(*connection, departed.flow, path);
        drop(core);
        let mut stream = TcpStream::new(self.clone(), id, departed.flow);
        stream.rest = mem::take(&mut departed.rest);
        Ok(stream)
    }
}

impl<M: Mapped> Sockets<M> {
    /// Takes the connections off the stack that their users have closed and that have not ended:
    /// sent bytes are not acknowledged, or the peer has not closed. They are like
    /// [saved](TcpStream::save) streams; drop the stream that [`restore`](Self::restore) returns
    /// for one.
    #[must_use]
    pub fn save_closing(&self) -> Vec<SavedStream> {
        let mut core = self.core.borrow_mut();
        let closing = core.connections.ids(|slot| slot.role == Role::Orphan);
        closing.into_iter().filter_map(|id| core.save(id, &Fragment::default())).collect()
    }

    /// Continues a connection that was saved. Restore all connections before the first poll of the
    /// host's stacks, or call [`Host::expect`] for them. Otherwise a stack answers segments of
    /// connections that it does not know by a reset.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoRoute`],
    /// [`SocketError::TooMany`];
    /// [`SocketError::WouldBlock`]: there are not enough pages for its payload.
    pub fn restore(&self, saved: &SavedStream, config: &Config) -> Result<TcpStream<M>, SocketError> {
        let mut core = self.core.borrow_mut();
        core.check_local(saved.local.ip())?;
        let flow = saved.flow();
        // The saved numbers may be wrong, so they are checked.
        if flow.local.ip().is_unspecified() || flow.local.is_ipv4() != flow.remote.is_ipv4() {
            return Err(SocketError::NotOurs);
        }
        let path = core.arrives(&flow)?;
        let payload = core.pages_of(&saved.unread).zip(core.pages_of(&saved.unacknowledged));
        let Some((unread, unacknowledged)) = payload else {
            core.host.directory().depart(flow);
            return Err(SocketError::WouldBlock);
        };
        let config = core.config_on(config, &path, &flow);
        let queue = Some(&core.budget);
        let pages = unacknowledged.len();
        let connection = Connection::restore(&saved.connection, &config, unread, unacknowledged, queue, core.now);
        let end = connection.send_end();
        let id = core.settle(connection, flow, path);
        core.pages.count(pages);
        if let Some(slot) = core.connections.get_mut(id) {
            slot.written.restored(pages, end);
        }
        drop(core);
        Ok(TcpStream::new(self.clone(), id, flow))
    }
}

impl<M: Mapped> Core<M> {
    /// Takes a connection off the tables as numbers and bytes. `rest` is what its user has not read
    /// of the last fragment.
    fn save(&mut self, id: ConnectionId, rest: &Fragment<M>) -> Option<SavedStream> {
        let connection = self.connections.get(id)?.connection.save(self.now)?;
        let slot = self.take(id)?;
        let mut unread = rest.to_vec();
        slot.connection.unread().for_each(|frag| append(&mut unread, frag));
        let mut unacknowledged = Vec::new();
        slot.connection.unacknowledged().for_each(|frag| append(&mut unacknowledged, frag));
        let Flow { local, remote } = slot.flow;
        Some(SavedStream { local, remote, connection, unread, unacknowledged })
    }
}

impl<P: Payload> Core<P> {
    /// Takes a connection off the tables. Segments of it are dropped from now on. `None` if its
    /// handshake is not complete, or if it has ended: it has no flow then.
    fn take(&mut self, id: ConnectionId) -> Option<Box<Slot<P>>> {
        let slot = self.connections.get(id)?;
        if !slot.connected || self.connections.find(&slot.flow) != Some(id) {
            return None;
        }
        let (slot, _) = self.forget(id)?;
        self.host.directory().depart(slot.flow);
        Some(slot)
    }

    /// Reserves the flow of a connection that arrives from another stack or process.
    fn arrives(&mut self, flow: &Flow) -> Result<Path<P::Count>, SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        self.check_room()?;
        let path = self.find_path(flow.remote.ip()).ok_or(SocketError::NoRoute)?;
        if self.host.directory().arrive(*flow, self.id) { Ok(path) } else { Err(SocketError::InUse) }
    }

    fn settle(&mut self, connection: Connection<P>, flow: Flow, path: Path<P::Count>) -> ConnectionId {
        let id = self.insert(connection, flow, path, Role::Stream);
        if let Some(slot) = self.connections.get_mut(id) {
            slot.connected = true;
        }
        self.wake_driver();
        id
    }

    /// Bytes in pages of the pool.
    fn pages_of(&mut self, bytes: &[u8]) -> Option<Vec<Frag<P::Mem>>> {
        let page = self.egress.pool.page_size();
        let frags = bytes.chunks(page).map(|part| {
            let mut page = self.egress.page()?;
            page.copy_from(0, part).ok()?;
            Some(page.freeze_range(0..part.len()))
        });
        frags.collect()
    }
}

/// A connection and its payload may go to another thread.
const _: () = {
    const fn goes<T: Send>() {}
    goes::<Departed<netmem_pool::Private>>();
};
