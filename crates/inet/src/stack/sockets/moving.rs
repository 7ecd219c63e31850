//! Moving streams: to another stack of the host, or to another process.
//!
//! ```text
//!   TcpStream::depart ──► Departed: the connection, fragments ──► Sockets::adopt  another stack
//!   TcpStream::save   ──► SavedStream: numbers and bytes ──► Sockets::restore     another process
//! ```
//!
//! Between the two, no stack has the flow: its segments are dropped, and not answered by a reset.
//! The peer sends them again.

use crate::stack::core::Core;
use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::shared::host::Host;
use crate::stack::shared::saved::SavedStream;
use crate::stack::sockets::fragment::Fragment;
use crate::stack::sockets::sockets::Sockets;
use crate::stack::sockets::stream::TcpStream;
use crate::stack::transport::entry::Role;
use crate::stack::transport::handles::ConnectionId;
use crate::tcp::{Config, Connection};
use crate::wire::Flow;
use netmem_pool::{Frag, Mapped};
use std::fmt;
use std::mem;

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
    /// Removes the connection from its stack, with its fragments. [`Sockets::adopt`] is the call
    /// that follows, on another stack.
    ///
    /// # Errors
    ///
    /// The stream, if its handshake is not complete, if it has ended, or if its stack is gone.
    pub fn depart(mut self) -> Result<Departed<P>, Self> {
        let mut guard = self.core.borrow_mut();
        let Core { tcp, resources, .. } = &mut *guard;
        let Some(entry) = tcp.depart(resources, self.id) else {
            drop(guard);
            return Err(self);
        };
        let host = resources.host.clone();
        drop(guard);
        let (flow, rest) = (entry.flow, mem::take(&mut self.rest));
        Ok(Departed { connection: Some(Box::new(entry.connection)), flow, rest, host })
    }
}

impl<M: Mapped> TcpStream<M> {
    /// Removes the connection from its stack, as numbers and bytes: its payload is copied. The flow
    /// stays reserved in this host, so that no segment of it is answered. [`Sockets::restore`] is
    /// the call that follows, in this process or another one.
    ///
    /// # Errors
    ///
    /// The stream, if its handshake is not complete, if it has ended, or if its stack is gone.
    pub fn save(self) -> Result<SavedStream, Self> {
        let saved = save(&mut self.core.borrow_mut(), self.id, &self.rest);
        saved.ok_or(self)
    }
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
        let mut guard = self.core.borrow_mut();
        let Core { tcp, resources, .. } = &mut *guard;
        let path = match tcp.reserve(resources, &departed.flow) {
            Ok(path) if resources.host.is(&departed.host) => path,
            Ok(_) => return Err((SocketError::NotOurs, departed)),
            Err(error) => return Err((error, departed)),
        };
        let Some(connection) = departed.connection.take() else { return Err((SocketError::StackGone, departed)) };
        let id = tcp.adopt(resources, *connection, departed.flow, path);
        drop(guard);
        let mut stream = TcpStream::new(self.core.clone(), id, departed.flow);
        stream.rest = mem::take(&mut departed.rest);
        Ok(stream)
    }
}

impl<M: Mapped> Sockets<M> {
    /// Removes the connections from the stack that their users have closed and that have not ended:
    /// sent bytes are not acknowledged, or the peer has not closed. They are like
    /// [saved](TcpStream::save) streams; drop the stream that [`restore`](Self::restore) returns
    /// for one.
    #[must_use]
    pub fn save_closing(&self) -> Vec<SavedStream> {
        let core = &mut *self.core.borrow_mut();
        let closing = core.tcp.connections.ids(|seen| seen.role() == Role::Orphan);
        closing.into_iter().filter_map(|id| save(core, id, &Fragment::default())).collect()
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
        let mut guard = self.core.borrow_mut();
        let Core { tcp, resources, .. } = &mut *guard;
        resources.check_local(saved.local.ip())?;
        let flow = saved.flow();
        // The saved numbers may be wrong, so they are validated.
        if flow.local.ip().is_unspecified() || flow.local.is_ipv4() != flow.remote.is_ipv4() {
            return Err(SocketError::NotOurs);
        }
        let path = tcp.reserve(resources, &flow)?;
        let egress = &mut resources.egress;
        let payload = egress.pages_of(&saved.unread).zip(egress.pages_of(&saved.unacknowledged));
        let Some((unread, unacknowledged)) = payload else {
            resources.host.directory().depart(flow);
            return Err(SocketError::WouldBlock);
        };
        let config = resources.config_on(config, &path, &flow);
        let (queue, now) = (Some(&*resources.budget), resources.now);
        let pages = unacknowledged.len();
        let connection = Connection::restore(&saved.connection, &config, unread, unacknowledged, queue, now);
        let end = connection.send_end();
        let id = tcp.adopt(resources, connection, flow, path);
        resources.pages.count(pages);
        if let Some(entry) = tcp.connections.get_mut(id) {
            entry.written.restore(pages, end);
        }
        drop(guard);
        Ok(TcpStream::new(self.core.clone(), id, flow))
    }
}

/// Removes a connection from the tables as numbers and bytes. `rest` is what its user has not read
/// of the last fragment.
fn save<M: Mapped>(core: &mut Core<M>, id: ConnectionId, rest: &Fragment<M>) -> Option<SavedStream> {
    let Core { tcp, resources, .. } = core;
    let connection = tcp.connections.get_mut(id)?.connection.save(resources.now)?;
    let entry = tcp.depart(resources, id)?;
    let mut unread = rest.to_vec();
    entry.connection.unread().for_each(|frag| append(&mut unread, frag));
    let mut unacknowledged = Vec::new();
    entry.connection.unacknowledged().for_each(|frag| append(&mut unacknowledged, frag));
    let Flow { local, remote } = entry.flow;
    Some(SavedStream { local, remote, connection, unread, unacknowledged })
}

fn append<M: Mapped>(bytes: &mut Vec<u8>, frag: &Frag<M>) {
    let at = bytes.len();
    bytes.resize(at + frag.len(), 0);
    let copied = frag.copy_to(0, &mut bytes[at..]);
    debug_assert!(copied.is_ok());
}

/// A connection and its payload may go to another thread.
const _: () = {
    const fn goes<T: Send>() {}
    goes::<Departed<netmem_pool::Private>>();
};
