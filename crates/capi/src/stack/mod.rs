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

use crate::status::{self, Failure, netmem_status};
use netmem_refs::rcu;

/// [`status::value`] of a function that uses a stack, a listener or a connection.
///
/// The stack enters read-side sections, for routes. A thread that leaves one may run calls of
/// netmem_rcu_call, which may call every function of the header, also for the same handles. So the
/// body is in a section of its own: they run after it, when nothing of the stack is borrowed.
pub(crate) fn value<R>(body: impl FnOnce() -> Result<R, Failure>) -> Result<R, netmem_status> {
    status::value(|| rcu::read(|_| body()))
}

/// [`value`] of a function that returns a status.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Failure>) -> netmem_status {
    value(body).err().unwrap_or(netmem_status::NETMEM_OK)
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rcu::netmem_rcu_call;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A call that another thread made while the stack was in a section runs when the stack is not
    /// borrowed any more.
    #[test]
    fn calls_after_a_grace_period_run_after_the_body() {
        unsafe extern "C-unwind" fn count(calls: *mut c_void) {
            // SAFETY: the test's count.
            unsafe { &*calls.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
        }
        let calls = AtomicU32::new(0);
        let context = (&raw const calls).expose_provenance();
        let body = || {
            rcu::read(|_| {
                let call = move || {
                    // SAFETY: the count is there until the call has run.
                    unsafe { netmem_rcu_call(Some(count), std::ptr::with_exposed_provenance_mut(context)) }
                };
                assert_eq!(std::thread::spawn(call).join().expect("no panic"), netmem_status::NETMEM_OK);
            });
            assert_eq!(calls.load(Ordering::SeqCst), 0, "calls in the body");
            Ok(())
        };
        assert_eq!(status(body), netmem_status::NETMEM_OK);
        // Another test's thread may have been in a section, too.
        while calls.load(Ordering::SeqCst) == 0 {
            rcu::flush();
        }
    }
}
