//! Two queue pairs of one device, connected to each other: what the driver sends on one of them, it
//! receives on the other.
//!
//! For guests on one host, and for tests: both directions of a link without a kernel in between.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::interface::{ALL_OFFLOADS, MAX_WIRE, Port};
use super::store::Store;
use crate::net::VnetHdr;

/// The most frames on their way to an end. The end may hold as many more, which it has not
/// delivered yet.
const FRAMES: usize = 1024;
/// Their bytes: eight of the longest frames.
const BYTES: usize = 8 * MAX_WIRE;

/// One end of a cable between two queue pairs. Holds at most 2048 frames and about 1 MiB in each
/// direction. While there is no room for one more of the longest, the sender's next frames wait in
/// its ring; if the other pair's receive ring is not served, they are refused instead.
///
/// One [`Worker`](crate::device::Worker) must serve both pairs: a frame that another thread puts
/// here does not wake a thread that sleeps.
#[derive(Debug)]
pub struct Cross {
    cable: Arc<Mutex<[CableEnd; 2]>>,
    /// The number of this end.
    end: usize,
    /// Frames that this end delivers next.
    frames: Store,
}

/// Frames on their way to an end.
#[derive(Debug)]
struct CableEnd {
    frames: Store,
    served: bool,
}

impl Cross {
    /// The two ends.
    #[must_use]
    pub fn cable() -> [Self; 2] {
        let store = || Store::new(FRAMES, BYTES);
        let cable = Arc::new(Mutex::new([(); 2].map(|()| CableEnd { frames: store(), served: false })));
        [0, 1].map(|end| Self { cable: Arc::clone(&cable), end, frames: store() })
    }

    fn ends(&self) -> MutexGuard<'_, [CableEnd; 2]> {
        self.cable.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Port for Cross {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.frames.front().is_none() {
            let mut cable = self.cable.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::swap(&mut self.frames, &mut cable[self.end].frames);
        }
        self.frames.front()
    }

    fn consume(&mut self) {
        self.frames.pop();
    }

    fn room(&self) -> bool {
        let other = &self.ends()[1 - self.end];
        !other.served || other.frames.fits(MAX_WIRE)
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        let mut cable = self.ends();
        let other = &mut cable[1 - self.end];
        if !other.served {
            return false;
        }
        let Some(place) = other.frames.push(wire.len()) else { return false };
        place.copy_from_slice(wire);
        place[10..VnetHdr::LEN].copy_from_slice(&1u16.to_le_bytes());
        true
    }

    fn served(&mut self, served: bool) {
        self.ends()[self.end].served = served;
    }

    fn drop_waiting(&mut self) -> u64 {
        self.frames.clear() + self.ends()[self.end].frames.clear()
    }
}
