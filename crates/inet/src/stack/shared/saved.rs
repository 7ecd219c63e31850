//! A stream as numbers and bytes, while no stack has it.
//!
//! It stands below the sockets, because a host reserves the flows of streams that will be restored.

use crate::tcp::Saved;
use crate::wire::Flow;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// A stream as numbers and bytes. Any format of serde can hold it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedStream {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) connection: Saved,
    /// Received bytes that were acknowledged, so the peer does not have them any more.
    pub(crate) unread: Vec<u8>,
    pub(crate) unacknowledged: Vec<u8>,
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

    /// Bytes of payload. [`restore`](crate::stack::Sockets::restore) copies them into pages of the
    /// stack's pool.
    #[must_use]
    pub fn payload(&self) -> usize {
        self.unread.len() + self.unacknowledged.len()
    }

    pub(crate) fn flow(&self) -> Flow {
        Flow { local: self.local, remote: self.remote }
    }
}
