//! The limits of a stack.

/// The limits of a stack.
#[derive(Clone, Copy, Debug)]
pub struct StackOptions {
    /// Received pages that connections, sockets and their users may hold together, with fragments
    /// of datagrams and frames in mailboxes. This must be less than the pages of the receive
    /// queue's pool, by at least the size of its ring. Then buffers stay posted whatever users
    /// hold, and acknowledgements, FIN and RST are always received. Payload above the limit is
    /// dropped, and not acknowledged. If the queue is short of buffers nevertheless, all payload is
    /// dropped until it is not ([`netmem_packet::Poll::is_short`]).
    pub pages: u32,
    /// Connections, including those that are closing.
    pub connections: usize,
    /// The most connections in TIME-WAIT. A further one replaces the oldest.
    pub time_wait: usize,
    /// Frames that are received in one poll.
    pub receive: usize,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self { pages: 512, connections: 65536, time_wait: 16384, receive: 256 }
    }
}
