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
//!
//! # The mutex of the cable
//!
//! It is never held while guest memory is touched: a page fault of one guest must not delay the
//! other's worker. The sending thread removes the store from the cable, has the frame copied to its
//! place, and puts the store back ([`Port::send_with`]). Meanwhile the receiving end finds no
//! store, and delivers nothing. If its thread goes to sleep, the store's return wakes it.
//!
//! # What a pass reads without the mutex
//!
//! Most passes find nothing in the cable. [`Cable`] has what they read instead of locking it:
//! `news` of an end, `waits` of the other one, and the number of `changes`. All are stored with the
//! mutex held. A pass that reads an old value delivers a frame, or learns of a peer, in a later
//! pass. Before a thread sleeps, [`Port::arm`] locks the mutex in any case.
//!
//! # The races
//!
//! A sends to B, so B delivers. `news` and `waits` are those of B. Each race has a test of the same
//! name.
//!
//! **Arm against return of the store.** B goes to sleep while A copies a frame. `sleeps` makes the
//! return wake B. A wake before the sleep ends that sleep at once. If B's arm comes after the
//! return, it finds the frame.
//!
//! ```text
//!   A: send_with                          B: arm
//!   lock: removes the store
//!                                         lock: no store, no frame: sleeps = true, news = true
//!   copies the frame                      sleeps
//!   lock: returns the store,
//!         waits = true, wakes B
//!                                         next pass: news, so it locks, and has the frame
//! ```
//!
//! **Refill while the store is absent.** The absent store may have frames, but B makes `waits`
//! false. Only A decides by `waits`, and A is in `send_with`. The return sets `waits` from what is
//! in the store.
//!
//! ```text
//!   A: send_with, waits                   B: peek
//!   lock: removes the store, 1 frame
//!                                         lock: no store: waits = false, news = false
//!   lock: returns the store, 2 frames:
//!         waits = true, news = true
//!   waits is true: no direct copy
//!                                         next pass: news, so it locks, and has both
//! ```
//!
//! **Blocked against drop of what waits.** The drop makes `news` false, so B's later passes do not
//! lock the mutex, and do not wake A. Therefore the drop does. A reads the room again with the
//! mutex when it sets `blocked`.
//!
//! ```text
//!   A: room, arm_room                     B: drop_waiting
//!   lock: no room
//!                                         lock: clears the store. A is not blocked
//!   lock: room, so it does not sleep
//!
//!   lock: no room: blocked = true
//!                                         lock: clears the store, wakes A, news = false
//! ```
//!
//! **Change before the lock of note.** B reads `changes` first, and the pair with the mutex. So the
//! pair is at least as new as the number. If it is newer, B notes it twice. In the reverse order, B
//! could note an old pair with the number of the new one, and keep it.
//!
//! ```text
//!   A: attach                             B: served
//!                                         reads changes: 1
//!   lock: pair = new, changes = 2
//!                                         note, lock: peer = new, noted = 1
//!                                         next pass: changes is 2, so it notes again
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
///
/// Ends have no cache line in common, and neither do cables: different threads write to them when
/// frames wait, and before each sleep.
#[derive(Debug)]
#[repr(align(128))]
pub struct Cross {
    cable: Arc<Cable>,
    /// The number of this end.
    end: usize,
    /// Frames that this end delivers next.
    frames: Store,
    /// The pair at the other end, as of the last pass.
    peer: Option<PairHandle>,
    /// Whether this end was served in the last pass, and the number of changes of the cable then.
    /// `None` before the first pass as a port of its pair.
    noted: Option<(bool, u64)>,
}

/// What the two ends share.
#[derive(Debug)]
#[repr(align(128))]
struct Cable {
    ends: Mutex<[CableEnd; 2]>,
    /// For each end, whether [`refill`](Cross::refill) has something to do: its flags `waits` or
    /// `sleeps` are set. An end is blocked only while frames wait for the end that it sends to. If
    /// that end is no longer served, `note` wakes it.
    news: [AtomicBool; 2],
    /// The flag `waits` of each end.
    waits: [AtomicBool; 2],
    /// Counts the changes of the pairs of both ends.
    changes: AtomicU64,
}

impl Cable {
    fn lock(&self) -> MutexGuard<'_, [CableEnd; 2]> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes what an end's next pass reads, with the mutex held.
    fn publish(&self, ends: &[CableEnd; 2], end: usize) {
        let CableEnd { waits, sleeps, .. } = ends[end];
        self.waits[end].store(waits, Ordering::Release);
        self.news[end].store(waits || sleeps, Ordering::Release);
    }

    /// Publishes that the pair of an end has changed, with the mutex held.
    fn publish_pair(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// One end, as the other one sees it.
#[derive(Debug)]
struct CableEnd {
    /// Frames on their way to this end. `None` while the other end's thread adds one.
    frames: Option<Store>,
    /// How many of the frames in the absent store are kept when it returns.
    kept: u64,
    /// The pair of this end; `None` before its first pass, while its worker has lent its ports,
    /// and when the end was dropped.
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
        let frames = Some(Store::new(FRAMES, BYTES));
        Self { frames, kept: 0, pair: None, served: false, waits: false, sleeps: false, blocked: false }
    }

    /// Whether a frame of any length is accepted or refused now, and need not wait.
    fn room(&self) -> bool {
        !self.served || self.frames.as_ref().is_some_and(|frames| frames.fits(MAX_WIRE))
    }

    /// Removes the store, to add a frame of `len` bytes to it without the mutex. `None` if the
    /// frame is refused.
    fn remove_store(&mut self, len: usize) -> Option<Store> {
        let frames = self.frames.take_if(|frames| self.served && frames.fits(len))?;
        self.kept = frames.len();
        Some(frames)
    }

    /// Puts the store back, `removed` frames of which were there before, and wakes the thread of
    /// this end if it waits for a frame.
    fn return_store(&mut self, mut frames: Store, removed: u64) {
        (self.kept..removed).for_each(|_| frames.pop());
        self.waits |= frames.front().is_some();
        self.frames = Some(frames);
        if self.waits && std::mem::take(&mut self.sleeps) {
            self.wake();
        }
    }

    /// Drops the frames on their way. Returns how many there were.
    fn clear(&mut self) -> u64 {
        match &mut self.frames {
            Some(frames) => frames.clear(),
            None => std::mem::take(&mut self.kept),
        }
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
        let ends = Mutex::new([(); 2].map(|()| CableEnd::new()));
        let (news, waits, changes) = Default::default();
        let cable = Arc::new(Cable { ends, news, waits, changes });
        let frames = || Store::new(FRAMES, BYTES);
        [0, 1].map(|end| Self { cable: Arc::clone(&cable), end, frames: frames(), peer: None, noted: None })
    }

    /// Exchanges the empty store of this end for the one of the cable. `sleeps`: the thread is
    /// about to sleep unless there is a frame.
    fn refill(&mut self, sleeps: bool) {
        let mut ends = self.cable.lock();
        let this = &mut ends[self.end];
        if let Some(frames) = &mut this.frames {
            std::mem::swap(&mut self.frames, frames);
        }
        this.waits = self.frames.front().is_some();
        this.sleeps = sleeps && !this.waits;
        ends[1 - self.end].wake_blocked();
        self.cable.publish(&ends, self.end);
    }

    /// Notes whether this end is served, and the pair at the other end after so many changes.
    #[cold]
    fn note(&mut self, now: (bool, u64)) {
        let mut ends = self.cable.lock();
        ends[self.end].served = now.0;
        let other = &mut ends[1 - self.end];
        if !now.0 {
            other.wake_blocked();
        }
        self.peer.clone_from(&other.pair);
        self.noted = Some(now);
    }
}

impl Port for Cross {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;
    const STORES: bool = true;

    #[inline]
    fn peek(&mut self) -> Option<&[u8]> {
        if self.frames.front().is_none() {
            if !self.cable.news[self.end].load(Ordering::Acquire) {
                return None;
            }
            self.refill(false);
        }
        self.frames.front()
    }

    fn consume(&mut self) {
        self.frames.pop();
    }

    fn room(&self) -> bool {
        self.cable.lock()[1 - self.end].room()
    }

    fn arm_room(&mut self) -> bool {
        let mut ends = self.cable.lock();
        let room = ends[1 - self.end].room();
        ends[self.end].blocked = !room;
        room
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.send_with(wire.len(), |place| {
            place.copy_from_slice(wire);
            true
        })
    }

    fn send_with(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let other = 1 - self.end;
        let Some(mut frames) = self.cable.lock()[other].remove_store(len) else { return false };
        let before = frames.len();
        let filled = frames.push(len).is_some_and(|place| {
            let filled = fill(place);
            place[10..VnetHdr::LEN].copy_from_slice(&1u16.to_le_bytes());
            filled
        });
        if !filled && frames.len() > before {
            frames.cancel();
        }
        let mut ends = self.cable.lock();
        ends[other].return_store(frames, before);
        self.cable.publish(&ends, other);
        filled
    }

    fn peer(&self) -> Option<&PairHandle> {
        self.peer.as_ref()
    }

    /// Only this end's thread adds frames, so it sees its own.
    #[inline]
    fn waits(&self) -> bool {
        self.cable.waits[1 - self.end].load(Ordering::Acquire)
    }

    fn attach(&mut self, pair: Option<PairHandle>) {
        let mut ends = self.cable.lock();
        ends[self.end].pair = pair;
        self.cable.publish_pair();
        drop(ends);
        (self.peer, self.noted) = (None, None);
    }

    #[inline]
    fn served(&mut self, served: bool) {
        let now = (served, self.cable.changes.load(Ordering::Acquire));
        if self.noted != Some(now) {
            self.note(now);
        }
    }

    fn drop_waiting(&mut self) -> u64 {
        let mut ends = self.cable.lock();
        let this = &mut ends[self.end];
        this.waits = false;
        let dropped = self.frames.clear() + this.clear();
        ends[1 - self.end].wake_blocked();
        self.cable.publish(&ends, self.end);
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
        let mut ends = self.cable.lock();
        let this = &mut ends[self.end];
        (this.pair, this.served) = (None, false);
        ends[1 - self.end].wake_blocked();
        self.cable.publish_pair();
    }
}

#[cfg(test)]
mod tests;
