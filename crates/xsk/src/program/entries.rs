//! The entries that this process has written into maps of sockets, so that a receive queue can
//! leave the maps when it ends.
//!
//! The kernel removes a socket from its maps when the socket is closed. If the receive queue of a
//! socket is dropped and its transmit queue is not, the socket stays open, and a program would
//! redirect frames to a ring that no thread reads. A socket cannot be unbound, and it does not know
//! its maps. So the writes are recorded here.

use super::bpf;
use crate::sys;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// An entry of a map.
struct MapEntry {
    /// The map, for as long as its [`Program`](super::Program) exists.
    map: Weak<OwnedFd>,
    queue: u32,
    /// The number that the kernel assigns to a socket, and to no other one later.
    cookie: u64,
}

static ENTRIES: Mutex<Vec<MapEntry>> = Mutex::new(Vec::new());

fn entries() -> MutexGuard<'static, Vec<MapEntry>> {
    let mut entries = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner);
    entries.retain(|entry| entry.map.strong_count() > 0);
    entries
}

/// Runs `write`, which writes a socket into the map, and records the entry if it succeeds.
pub(super) fn insert<E>(
    map: &Arc<OwnedFd>,
    queue: u32,
    socket: BorrowedFd<'_>,
    write: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    // The lock is held meanwhile: a queue that ends removes only its own socket.
    let mut entries = entries();
    write()?;
    let map = Arc::downgrade(map);
    entries.retain(|entry| entry.queue != queue || !entry.map.ptr_eq(&map));
    if let Ok(cookie) = sys::cookie(socket) {
        entries.push(MapEntry { map, queue, cookie });
    }
    Ok(())
}

/// Removes a socket from every map. One system call, and one more for each map; a lock.
pub(crate) fn leave(socket: BorrowedFd<'_>) {
    let Ok(cookie) = sys::cookie(socket) else { return };
    entries().retain(|entry| {
        if entry.cookie == cookie
            && let Some(map) = entry.map.upgrade()
        {
            // If it fails, there is no entry any more, or this process may not write to maps
            // (before Linux 5.19).
            let _ = bpf::delete(map.as_fd(), entry.queue);
        }
        entry.cookie != cookie
    });
}
