//! TCP: a stack on a tap or on an AF_XDP queue, its listeners and its connections.
//!
//! ```text
//!   netmem_stack_poll ──► calls wakers ──► events: the list of what can be used again
//!   netmem_stack_next_event ◄──────────────────┘
//!   netmem_tcp_receive, send, write, accept    register a waker where they did less than was asked
//! ```
//!
//! **Why events without interests.** A call that does less than was asked (no payload, no room, no
//! connection) registers the waker. So the library knows what a program waits for, and a program
//! that waits for nothing is not woken. An event costs no allocation: the wakers of a connection
//! are made with it, and the list keeps its memory.
//!
//! **Two kinds of memory.** Payload of a tap is in memory of the device in this process
//! ([`TrustedPeer`](netmem_pool::TrustedPeer)), and payload of AF_XDP in memory that the kernel
//! shares. For C both are a `netmem_frag` (`memory`). So each handle has one of two values
//! (`Over`).

pub mod connection;
pub mod endpoint;
pub mod events;
pub mod handles;
pub mod listener;
mod memory;
pub mod open;
#[expect(clippy::module_inception, reason = "the file is named for its type")]
pub mod stack;
pub mod tcp_options;

/// The value of a handle over a tap, or over AF_XDP.
#[derive(Debug)]
pub(crate) enum Over<T, X> {
    Tap(T),
    Xsk(X),
}

/// Runs the same code for both.
macro_rules! each {
    ($over:expr, $value:ident => $body:expr) => {
        match $over {
            $crate::stack::Over::Tap($value) => $body,
            $crate::stack::Over::Xsk($value) => $body,
        }
    };
}
pub(crate) use each;
