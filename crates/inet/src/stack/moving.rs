//! Streams that go on elsewhere: on another stack of the host, or in another process.
//!
//! ```text
//!   TcpStream::depart ──► Departed: the connection with its fragments ──► Sockets::adopt     another stack of the host
//!   TcpStream::save   ──► SavedStream: numbers and bytes, in any format of serde ──► Sockets::restore     also another process
//! ```
//!
//! Between the two, no stack has the flow: its segments are dropped, and not answered by a reset. The peer sends them again.

use super::core::{Core, Role, Slot};
use super::fragment::Fragment;
use super::host::Host;
use super::path::Path;
use super::{HostCarrier, SocketError, Sockets, TcpStream};
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
    /// The peer does not have these bytes any more: it was told that they arrived.
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
}

/// A stream between two stacks of a host. It goes to any thread. If it is dropped, the connection is gone: the peer's next segment is
/// answered by a reset.
#[must_use = "the connection ends with it"]
pub struct Departed<M: Mapped> {
    connection: Option<Box<Connection<HostCarrier<M>>>>,
    flow: Flow,
    rest: Fragment<M>,
    host: Host<M>,
}

impl<M: Mapped> Drop for Departed<M> {
    fn drop(&mut self) {
        if self.connection.is_some() {
            self.host.directory().release(&self.flow);
        }
    }
}

impl<M: Mapped> fmt::Debug for Departed<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Departed({} - {})", self.flow.local, self.flow.remote)
    }
}

impl<M: Mapped> TcpStream<M> {
    /// Takes the connection off its stack, with all that it holds.
    ///
    /// # Errors
    ///
    /// The stream, if its handshake is not complete, or if its stack is gone.
    #[expect(clippy::result_large_err, reason = "the error is the value itself, which is moved back")]
    pub fn depart(mut self) -> Result<Departed<M>, Self> {
        let mut core = self.sockets.core.borrow_mut();
        let Some(slot) = core.take(self.n) else {
            drop(core);
            return Err(self);
        };
        let host = core.host.clone();
        drop(core);
        let (flow, rest) = (slot.flow, mem::take(&mut self.rest));
        Ok(Departed { connection: Some(Box::new(slot.connection)), flow, rest, host })
    }

    /// Takes the connection off its stack, as numbers and bytes: its payload is copied. The flow stays reserved in this host, so that it
    /// answers no segment of it.
    ///
    /// # Errors
    ///
    /// The stream, if its handshake is not complete, if it has ended, or if its stack is gone.
    #[expect(clippy::result_large_err, reason = "the error is the value itself, which is moved back")]
    pub fn save(self) -> Result<SavedStream, Self> {
        let mut core = self.sockets.core.borrow_mut();
        let now = core.now;
        let saved = core.slots.get(self.n as usize).and_then(|slot| slot.connection.save(now));
        let Some((connection, slot)) = saved.and_then(|saved| Some((saved, core.take(self.n)?))) else {
            drop(core);
            return Err(self);
        };
        drop(core);
        let mut unread = self.rest.to_vec();
        slot.connection.unread().for_each(|frag| append(&mut unread, frag));
        let mut unacknowledged = Vec::new();
        slot.connection.unacknowledged().for_each(|frag| append(&mut unacknowledged, frag));
        Ok(SavedStream { local: self.local, remote: self.remote, connection, unread, unacknowledged })
    }
}

fn append<M: Mapped>(bytes: &mut Vec<u8>, frag: &Frag<M>) {
    let at = bytes.len();
    bytes.resize(at + frag.len(), 0);
    let copied = frag.copy_to(0, &mut bytes[at..]);
    debug_assert!(copied.is_ok());
}

impl<M: Mapped> Sockets<M> {
    /// Goes on with a connection of another stack of the host. Fragments that it holds stay in the budget of the queue that received them.
    ///
    /// # Errors
    ///
    /// It comes back. [`SocketError::NotOurs`]: it is of another host. [`SocketError::NoRoute`], [`SocketError::TooMany`].
    #[expect(clippy::result_large_err, reason = "the error is the value itself, which is moved back")]
    pub fn adopt(&self, mut departed: Departed<M>) -> Result<TcpStream<M>, (SocketError, Departed<M>)> {
        let mut core = self.core.borrow_mut();
        let path = match core.arrives(&departed.flow) {
            Ok(path) if core.host.is(&departed.host) => path,
            Ok(_) => return Err((SocketError::NotOurs, departed)),
            Err(error) => return Err((error, departed)),
        };
        let Some(connection) = departed.connection.take() else { return Err((SocketError::StackGone, departed)) };
        let n = core.settle(*connection, departed.flow, path);
        drop(core);
        let mut stream = TcpStream::new(self.clone(), n);
        stream.rest = mem::take(&mut departed.rest);
        Ok(stream)
    }

    /// Goes on with a connection that was saved. Restore all connections before the first poll of the stack: it answers segments of
    /// connections that it does not know by a reset.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoRoute`], [`SocketError::TooMany`];
    /// [`SocketError::WouldBlock`]: there are not enough pages for its payload.
    pub fn restore(&self, saved: &SavedStream, config: &Config) -> Result<TcpStream<M>, SocketError> {
        let mut core = self.core.borrow_mut();
        core.check_local(saved.local.ip())?;
        let flow = Flow { local: saved.local, remote: saved.remote };
        let path = core.arrives(&flow)?;
        let payload = core.pages_of(&saved.unread).zip(core.pages_of(&saved.unacknowledged));
        let Some((unread, unacknowledged)) = payload else {
            core.host.directory().depart(flow);
            return Err(SocketError::WouldBlock);
        };
        let config = core.config(config, &path, &flow);
        let queue = Some(&core.budget);
        let connection = Connection::restore(&saved.connection, &config, unread, unacknowledged, queue, core.now);
        let n = core.settle(connection, flow, path);
        drop(core);
        Ok(TcpStream::new(self.clone(), n))
    }
}

impl<M: Mapped> Core<M> {
    /// Takes a connection off the tables. Segments of it are dropped from now on.
    fn take(&mut self, n: u32) -> Option<Slot<M>> {
        if !self.slots.get(n as usize)?.connected {
            return None;
        }
        let flow = self.slots[n as usize].flow;
        let slot = self.forget(n);
        self.host.directory().depart(flow);
        Some(slot)
    }

    /// Reserves the flow of a connection that comes from elsewhere.
    fn arrives(&self, flow: &Flow) -> Result<Path, SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        self.check_room()?;
        let path = Path::find(&self.host, flow.remote.ip(), self.now).ok_or(SocketError::NoRoute)?;
        if self.host.directory().arrive(*flow, self.id) { Ok(path) } else { Err(SocketError::InUse) }
    }

    fn settle(&mut self, connection: Connection<HostCarrier<M>>, flow: Flow, path: Path) -> u32 {
        let n = self.insert(connection, flow, path, Role::Stream);
        self.slots[n as usize].connected = true;
        self.wake_driver();
        n
    }

    /// Bytes in pages of the pool.
    fn pages_of(&mut self, bytes: &[u8]) -> Option<Vec<Frag<M>>> {
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
