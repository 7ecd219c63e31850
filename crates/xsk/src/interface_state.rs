//! Whether the interface of a socket can carry frames.

/// The state of a socket's interface: why a queue neither receives nor sends
/// ([`XskSocket::interface_state`](crate::XskSocket::interface_state)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InterfaceState {
    /// The interface is set up. Its link may still have no carrier.
    Up,
    /// The interface is set down. The queues go on when it is set up again, with the same socket.
    Down,
    /// The interface was deleted, or moved to another network namespace. The socket will never
    /// receive or send again. The pages of the chunks that the kernel had return when the receive
    /// queue ends.
    Gone,
}
