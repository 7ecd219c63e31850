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
    /// The interface is set up and has fewer queues now: this one is not in use, and the socket
    /// receives and sends nothing. The kernel refuses to take a queue from a socket; a driver that
    /// is reset may do it nevertheless. The queue goes on when the number is raised.
    NoQueue,
    /// The interface was deleted, or moved to another network namespace. The socket will never
    /// receive or send again. The pages of the chunks that the kernel had return when the receive
    /// queue ends.
    Gone,
}

impl InterfaceState {
    /// The state for a queue of an interface that exists. `queues` are the numbers of its receive
    /// and transmit queues in use, if they are known.
    pub(crate) fn of(up: bool, queue: u32, queues: Option<(u32, u32)>) -> Self {
        match queues {
            _ if !up => Self::Down,
            Some((rx, tx)) if queue >= rx.max(tx) => Self::NoQueue,
            _ => Self::Up,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_beyond_those_in_use_is_reported() {
        let of = |up, queues| InterfaceState::of(up, 2, queues);
        assert_eq!(of(true, None), InterfaceState::Up);
        assert_eq!(of(true, Some((3, 1))), InterfaceState::Up);
        assert_eq!(of(true, Some((1, 3))), InterfaceState::Up);
        assert_eq!(of(true, Some((2, 2))), InterfaceState::NoQueue);
        assert_eq!(of(false, Some((2, 2))), InterfaceState::Down);
    }
}
