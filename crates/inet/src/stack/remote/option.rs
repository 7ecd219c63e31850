//! The options of a stream of another thread.

use crate::tcp::{IpFields, KeepAlive};
use std::time::Duration;

/// An option of a stream. It holds for what is written after it was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamOption {
    /// Whether small segments are sent at once, or wait until sent bytes are acknowledged (Nagle).
    NoDelay(bool),
    /// Corks the stream, or uncorks it: while corked, only full segments are sent, for at most 200
    /// ms.
    Cork(bool),
    /// Whether the next segments are acknowledged at once, or acknowledgements are delayed.
    QuickAck(bool),
    /// Whether probes are sent to an idle peer.
    KeepAlive(Option<KeepAlive>),
    /// How long sent data may stay unacknowledged.
    UserTimeout(Option<Duration>),
    /// The size of the connection's send buffer, in bytes. The ring of the stream comes on top.
    SendBuffer(usize),
    /// Fields of the IP headers of segments.
    Ip(IpFields),
}
