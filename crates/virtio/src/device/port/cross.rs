//! Two queue pairs, connected to each other: what the driver sends on one of them, it receives on
//! the other.
//!
//! For guests on one host, and for tests: both directions of a link without a kernel in between.
//!
//! ```text
//!   transmit ring of A ──┬── direct, one copy ──────────────────────────┬──► receive ring of B
//!                        └── store of the cable ──► store of end B ─────┘
//! ```
//!
//! The device copies a frame straight into the receiver's buffers where it can
//! ([`Port::peer`], `device/direct.rs`). Otherwise the frame waits in the cable. Frames do not
//! overtake each other: while one waits, no later one is copied directly ([`Port::waits`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::interface::{MAX_WIRE, Port};
use super::store::Store;
use crate::device::options::ALL_OFFLOADS;
use crate::device::pair_handle::PairHandle;
use crate::net::VnetHdr;

/// The most frames on their way to an end. The end may hold as many more, which it has not
/// delivered yet.
const FRAMES: usize = 1024;
/// Their bytes: eight of the longest frames.
const BYTES: usize = 8 * MAX_WIRE;

/// One end of a cable between two queue pairs, of one device or of two in this process. Holds at
/// most 2048 frames and about 1 MiB in each direction. While there is no room for one more of the
/// longest, the sender's next frames wait in its ring; if the other pair's receive ring is not
/// served, they are refused instead.
///
/// Different threads may serve the two pairs, unless an end is wrapped by another port
/// ([`Linked`](super::Linked)): that end is not woken.
#[derive(Debug)]
pub struct Cross {
    cable: Arc<Mutex<[CableEnd; 2]>>,
    /// The number of this end.
    end: usize,
    /// Frames that this end delivers next.
    frames: Store,
    /// The pair at the other end, as of the last pass.
    peer: Option<PairHandle>,
}

/// One end, as the other one sees it.
#[derive(Debug)]
struct CableEnd {
    /// Frames on their way to this end.
    frames: Store,
    /// The pair of this end; `None` before it has a device, and when the end was dropped.
    pair: Option<PairHandle>,
    served: bool,
    /// Whether frames wait for this end: here, or where it holds those that it delivers next.
    waits: bool,
    /// The thread of this end sleeps until a frame comes.
    sleeps: bool,
    /// The thread of this end sleeps until there is room for its own frames at the other end.
    blocked: bool,
}

impl CableEnd {
    fn new() -> Self {
        let frames = Store::new(FRAMES, BYTES);
        Self { frames, pair: None, served: false, waits: false, sleeps: false, blocked: false }
    }

    /// Whether a frame of any length is accepted or refused now, and need not wait.
    fn room(&self) -> bool {
        !self.served || self.frames.fits(MAX_WIRE)
    }

    fn wake(&self) {
        if let Some(pair) = &self.pair {
            pair.wake();
        }
    }

    /// Wakes the thread of this end if it waits for room, which there may be now.
    fn wake_blocked(&mut self) {
        if std::mem::take(&mut self.blocked) {
            self.wake();
        }
    }
}

impl Cross {
    /// The two ends.
    #[must_use]
    pub fn cable() -> [Self; 2] {
        let cable = Arc::new(Mutex::new([(); 2].map(|()| CableEnd::new())));
        let frames = || Store::new(FRAMES, BYTES);
        [0, 1].map(|end| Self { cable: Arc::clone(&cable), end, frames: frames(), peer: None })
    }

    fn ends(&self) -> MutexGuard<'_, [CableEnd; 2]> {
        self.cable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exchanges the empty store of this end for the one of the cable. `sleeps`: the thread is
    /// about to sleep unless there is a frame.
    fn refill(&mut self, sleeps: bool) {
        let mut cable = self.cable.lock().unwrap_or_else(PoisonError::into_inner);
        let this = &mut cable[self.end];
        std::mem::swap(&mut self.frames, &mut this.frames);
        this.waits = self.frames.front().is_some();
        this.sleeps = sleeps && !this.waits;
        cable[1 - self.end].wake_blocked();
    }
}

impl Port for Cross {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;
    const STORES: bool = true;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.frames.front().is_none() {
            self.refill(false);
        }
        self.frames.front()
    }

    fn consume(&mut self) {
        self.frames.pop();
    }

    fn room(&self) -> bool {
        self.ends()[1 - self.end].room()
    }

    fn arm_room(&mut self) -> bool {
        let mut cable = self.ends();
        let room = cable[1 - self.end].room();
        cable[self.end].blocked = !room;
        room
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.send_with(wire.len(), |place| {
            place.copy_from_slice(wire);
            true
        })
    }

    fn send_with(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let mut cable = self.ends();
        let other = &mut cable[1 - self.end];
        if !other.served {
            return false;
        }
        let Some(place) = other.frames.push(len) else { return false };
        if !fill(place) {
            other.frames.cancel();
            return false;
        }
        place[10..VnetHdr::LEN].copy_from_slice(&1u16.to_le_bytes());
        other.waits = true;
        if std::mem::take(&mut other.sleeps) {
            other.wake();
        }
        true
    }

    fn peer(&self) -> Option<&PairHandle> {
        self.peer.as_ref()
    }

    fn waits(&self) -> bool {
        self.ends()[1 - self.end].waits
    }

    fn attach(&mut self, pair: PairHandle) {
        self.ends()[self.end].pair = Some(pair);
    }

    fn served(&mut self, served: bool) {
        let mut cable = self.cable.lock().unwrap_or_else(PoisonError::into_inner);
        cable[self.end].served = served;
        let other = &mut cable[1 - self.end];
        if !served {
            other.wake_blocked();
        }
        if self.peer.is_some() != other.pair.is_some() {
            self.peer.clone_from(&other.pair);
        }
    }

    fn drop_waiting(&mut self) -> u64 {
        let mut cable = self.cable.lock().unwrap_or_else(PoisonError::into_inner);
        let this = &mut cable[self.end];
        this.waits = false;
        let dropped = self.frames.clear() + this.frames.clear();
        cable[1 - self.end].wake_blocked();
        dropped
    }

    fn arm(&mut self) -> bool {
        if self.frames.front().is_none() {
            self.refill(true);
        }
        self.frames.front().is_some()
    }
}

impl Drop for Cross {
    fn drop(&mut self) {
        let mut cable = self.ends();
        let this = &mut cable[self.end];
        (this.pair, this.served) = (None, false);
        cable[1 - self.end].wake_blocked();
    }
}
