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

/// A map of sockets.
enum Map {
    /// A map of our own program, for as long as its [`Program`](super::Program) exists: the program
    /// ends with it.
    Own(Weak<OwnedFd>),
    /// A map of the user's, whose program may redirect frames to the socket also when the
    /// [`Program`](super::Program) is dropped. The descriptor is closed when the entry is removed:
    /// when the receive queue ends, or another socket is put into its place.
    Foreign(Arc<OwnedFd>),
}

impl Map {
    fn upgrade(&self) -> Option<Arc<OwnedFd>> {
        match self {
            Self::Own(map) => map.upgrade(),
            Self::Foreign(map) => Some(map.clone()),
        }
    }
}

/// An entry of a map.
struct MapEntry {
    map: Map,
    queue: u32,
    /// The number that the kernel assigns to a socket, and to no other one later.
    cookie: u64,
}

static ENTRIES: Mutex<Vec<MapEntry>> = Mutex::new(Vec::new());

fn entries() -> MutexGuard<'static, Vec<MapEntry>> {
    let mut entries = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner);
    entries.retain(|entry| entry.map.upgrade().is_some());
    entries
}

/// Runs `write`, which writes a socket into the map, and records the entry if it succeeds. The map
/// is `foreign` if it is the user's.
pub(super) fn insert<E>(
    (map, foreign): (&Arc<OwnedFd>, bool),
    queue: u32,
    socket: BorrowedFd<'_>,
    write: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    // The lock is held meanwhile: a queue that ends removes only its own socket.
    let mut entries = entries();
    write()?;
    forget(&mut entries, map, queue);
    if let Ok(cookie) = sys::cookie(socket) {
        push(&mut entries, (map, foreign), queue, cookie);
    }
    Ok(())
}

/// Records an entry that another process has written.
pub(super) fn record(map: (&Arc<OwnedFd>, bool), queue: u32, cookie: u64) {
    let mut entries = entries();
    forget(&mut entries, map.0, queue);
    push(&mut entries, map, queue, cookie);
}

fn push(entries: &mut Vec<MapEntry>, (map, foreign): (&Arc<OwnedFd>, bool), queue: u32, cookie: u64) {
    let map = if foreign { Map::Foreign(map.clone()) } else { Map::Own(Arc::downgrade(map)) };
    entries.push(MapEntry { map, queue, cookie });
}

fn forget(entries: &mut Vec<MapEntry>, map: &Arc<OwnedFd>, queue: u32) {
    entries.retain(|entry| entry.queue != queue || entry.map.upgrade().is_none_or(|of| !Arc::ptr_eq(&of, map)));
}

/// Runs `delete`, which removes the map's entry of a queue, and removes its record.
pub(super) fn remove<E>(map: &Arc<OwnedFd>, queue: u32, delete: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    let mut entries = entries();
    delete()?;
    forget(&mut entries, map, queue);
    Ok(())
}

/// Removes a socket from every map, and the records of its entries. `gone`: the kernel has removed
/// it because its interface is gone, and another socket may be in its place. One system call, and
/// one more for each map; a lock.
pub(crate) fn leave(socket: BorrowedFd<'_>, gone: bool) {
    let Ok(cookie) = sys::cookie(socket) else { return };
    entries().retain(|entry| {
        if entry.cookie == cookie
            && !gone
            && let Some(map) = entry.map.upgrade()
        {
            // If it fails, there is no entry any more, or this process may not write to maps
            // (before Linux 5.19).
            let _ = bpf::delete(map.as_fd(), entry.queue);
        }
        entry.cookie != cookie
    });
}
