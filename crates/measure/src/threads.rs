//! Threads of a scope: with names, and with panics that go on in the thread that joins.

use std::io;
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Starts a thread with a name.
///
/// # Errors
///
/// The system has no more threads or memory.
pub fn spawn<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    name: impl Into<String>,
    run: impl FnOnce() -> T + Send + 's,
) -> io::Result<ScopedJoinHandle<'s, T>> {
    Builder::new().name(name.into()).spawn_scoped(scope, run)
}

/// The value of a thread that was joined. If the thread has panicked, the panic goes on in this
/// one.
pub fn propagate<T>(joined: std::thread::Result<T>) -> T {
    joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
