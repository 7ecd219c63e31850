//! The two ends of a connection, as the key by which segments find it.

use std::net::SocketAddr;

/// The two ends of a connection, or of a datagram. Both are of the same family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// This end.
    pub local: SocketAddr,
    /// The peer.
    pub remote: SocketAddr,
}
