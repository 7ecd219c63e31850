//! The handles of connections, of listeners, and of sockets for datagrams. A handle that outlives
//! its entry names nothing.

use crate::stack::table::Id;

/// The handle of a connection.
pub(crate) type ConnectionId = Id<OfConnections>;

/// The kind of [`ConnectionId`].
pub(crate) enum OfConnections {}

/// The handle of a listener.
pub(crate) type ListenerId = Id<OfListeners>;

/// The kind of [`ListenerId`].
pub(crate) enum OfListeners {}

/// The handle of a socket for datagrams.
pub(crate) type UdpId = Id<OfUdpSockets>;

/// The kind of [`UdpId`].
pub(crate) enum OfUdpSockets {}
