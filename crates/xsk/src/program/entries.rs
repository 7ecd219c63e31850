//! The entries that this process has written into maps of sockets, so that a receive queue can
//! leave the maps when it ends.
//!
//! The kernel removes a socket from its maps when the socket is closed. If the receive queue of a
//! socket is dropped and its transmit queue is not, the socket stays open, and a program would
//! redirect frames to a ring that no thread reads. A socket cannot be unbound, and it does not know
//! its maps. So the writes are recorded here.
//!
//! A map has one record for each queue, the socket that was written last, whichever
//! [`Program`](super::Program) has written it: several of them can be values on one map of the
//! kernel's. Maps are therefore compared by their numbers in the kernel.

use super::bpf;
use crate::sys;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A map of sockets, as a [`Program`](super::Program) has it.
#[derive(Debug)]
pub(super) struct SocketMap {
    fd: Arc<OwnedFd>,
    /// The kernel's number of the map. It is that of no other map while a descriptor is open.
    id: u32,
    /// Whether the map is the user's, whose program may redirect frames without this value.
    foreign: bool,
}

impl SocketMap {
    /// The map of a program of our own.
    pub(super) fn own(fd: OwnedFd, id: u32) -> Self {
        Self { fd: Arc::new(fd), id, foreign: false }
    }

    /// A map of the user's.
    pub(super) fn foreign(fd: OwnedFd, id: u32) -> Self {
        Self { foreign: true, ..Self::own(fd, id) }
    }

    pub(super) fn id(&self) -> u32 {
        self.id
    }
}

impl AsFd for SocketMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The descriptor of a recorded map.
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
    /// The kernel's number of the map.
    id: u32,
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

/// Runs `write`, which writes a socket into the map, and records the entry if it succeeds.
pub(super) fn insert<E>(
    map: &SocketMap,
    queue: u32,
    socket: BorrowedFd<'_>,
    write: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    // The lock is held meanwhile: a queue that ends removes only its own socket.
    let mut entries = entries();
    write()?;
    match sys::cookie(socket) {
        Ok(cookie) => replace(&mut entries, map, queue, cookie),
        Err(_) => _ = forget(&mut entries, map, queue),
    }
    Ok(())
}

/// Records an entry that another process has written.
pub(super) fn record(map: &SocketMap, queue: u32, cookie: u64) {
    replace(&mut entries(), map, queue, cookie);
}

fn replace(entries: &mut Vec<MapEntry>, map: &SocketMap, queue: u32, cookie: u64) {
    let (fd, id) = (&map.fd, map.id);
    // The user's program stays also if the value that writes now takes the map for its own.
    let foreign = forget(entries, map, queue) || map.foreign;
    let map = if foreign { Map::Foreign(fd.clone()) } else { Map::Own(Arc::downgrade(fd)) };
    entries.push(MapEntry { map, id, queue, cookie });
}

/// Returns whether the entry was of a map of the user's.
fn forget(entries: &mut Vec<MapEntry>, map: &SocketMap, queue: u32) -> bool {
    let gone = entries.extract_if(.., |entry| (entry.id, entry.queue) == (map.id, queue));
    gone.fold(false, |foreign, entry| foreign | matches!(entry.map, Map::Foreign(_)))
}

/// Runs `delete`, which removes the map's entry of a queue, and removes its record.
pub(super) fn remove<E>(map: &SocketMap, queue: u32, delete: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    let mut entries = entries();
    delete()?;
    _ = forget(&mut entries, map, queue);
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
