//! What a stack reports of each of its connections.

use crate::stack::payload::Payload;
use crate::stack::transport::handles::ConnectionId;
use crate::stack::transport::idle::Seen;
use crate::tcp::{Info, State};
use crate::time::Time;
use std::net::SocketAddr;

/// A connection of a stack, of
/// [`Stack::list_connections`](crate::Stack::list_connections).
#[derive(Clone, Copy, Debug)]
pub struct ConnectionInfo {
    /// A number that no other connection of the stack has, or had.
    pub id: u64,
    /// The address of this host.
    pub local: SocketAddr,
    /// The address of the peer.
    pub peer: SocketAddr,
    /// The state. A connection that is over is listed until its socket is dropped.
    pub state: State,
    /// The connection's statistics.
    pub tcp: Info,
    /// Pages of the stack's pool with payload that was written and is not acknowledged.
    pub written_pages: usize,
}

impl ConnectionInfo {
    pub(crate) fn new<P: Payload>(id: ConnectionId, seen: &Seen<'_, P>, now: Time) -> Self {
        Self {
            id: id.generation(),
            local: seen.flow().local,
            peer: seen.flow().remote,
            state: seen.state(),
            tcp: seen.connection().info(now),
            written_pages: seen.written_pages(),
        }
    }
}
