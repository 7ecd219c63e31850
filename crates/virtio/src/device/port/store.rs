//! Frames that wait in a bounded piece of memory.
//!
//! Ports that hold frames between two passes (echo, cross) hold them here, because nothing that a
//! driver controls may grow without a bound.

use std::collections::VecDeque;

/// A queue of frames of any length, in one buffer of fixed size.
///
/// ```text
///   bytes   [ third | free ... | first | second | unused ]
///                   ^ end      ^ first frame's start
/// ```
///
/// A frame lies in one piece. When it does not fit behind the last one it starts at the front of
/// the buffer. When the store is empty, it starts at the front again. If frames are removed as fast
/// as they arrive, the same few cache lines are used. The buffer is allocated with the first frame;
/// the kernel allocates its pages as they are written.
#[derive(Debug)]
pub(super) struct Store {
    bytes: Box<[u8]>,
    capacity: usize,
    /// Start and length of each frame, oldest first.
    frames: VecDeque<(usize, usize)>,
    most: usize,
}

impl Store {
    /// An empty store for `most` frames and `capacity` bytes.
    pub(super) fn new(most: usize, capacity: usize) -> Self {
        Self { bytes: Box::default(), capacity, frames: VecDeque::new(), most }
    }

    /// Where a frame of `len` bytes would start.
    #[inline(always)]
    fn place(&self, len: usize) -> Option<usize> {
        if self.frames.len() == self.most {
            return None;
        }
        let (Some(&(first, _)), Some(&(last, last_len))) = (self.frames.front(), self.frames.back()) else {
            return (len <= self.capacity).then_some(0);
        };
        let end = last + last_len;
        if last < first {
            return (len <= first - end).then_some(end);
        }
        if len <= self.capacity - end {
            return Some(end);
        }
        (len <= first).then_some(0)
    }

    /// Whether a frame of `len` bytes fits.
    #[inline]
    pub(super) fn fits(&self, len: usize) -> bool {
        self.place(len).is_some()
    }

    /// Appends a frame of `len` bytes, more than 0, and returns its memory, which still has bytes
    /// of earlier frames. `None` if it does not fit.
    #[inline(always)]
    pub(super) fn push(&mut self, len: usize) -> Option<&mut [u8]> {
        let at = self.place(len)?;
        if self.bytes.is_empty() {
            self.bytes = vec![0; self.capacity].into();
        }
        self.frames.push_back((at, len));
        Some(&mut self.bytes[at..at + len])
    }

    /// Removes the frame that was appended last.
    pub(super) fn cancel(&mut self) {
        self.frames.pop_back();
    }

    /// The oldest frame.
    #[inline]
    pub(super) fn front(&self) -> Option<&[u8]> {
        self.frames.front().map(|&(at, len)| &self.bytes[at..at + len])
    }

    /// Frames.
    pub(super) fn len(&self) -> u64 {
        self.frames.len() as u64
    }

    /// Removes the oldest frame.
    #[inline]
    pub(super) fn pop(&mut self) {
        self.frames.pop_front();
    }

    /// Removes all frames. Returns how many there were.
    pub(super) fn clear(&mut self) -> u64 {
        let frames = self.len();
        self.frames.clear();
        frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames come out as they went in, none overlaps another, and neither bound is exceeded.
    #[test]
    fn frames_come_out_whole_and_in_order() {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut store = Store::new(40, 1000);
        let (mut waiting, mut full, mut wrapped) = (VecDeque::new(), 0, 0);
        for n in 0..100_000u32 {
            if rng.usize(..5) < 3 {
                let len = if rng.bool() { rng.usize(1..20) } else { rng.usize(1..=400) };
                let fits = store.fits(len);
                match store.push(len) {
                    Some(bytes) => {
                        assert!(fits && bytes.len() == len);
                        bytes.fill(n as u8);
                        waiting.push_back((n as u8, len));
                    }
                    None => full += 1,
                }
                wrapped += usize::from(store.frames.len() > 1 && store.frames.back() < store.frames.front());
            } else if let Some((byte, len)) = waiting.pop_front() {
                assert_eq!(store.front(), Some(&vec![byte; len][..]));
                store.pop();
            }
            assert!(waiting.len() == store.frames.len() && waiting.len() <= 40);
            assert!(waiting.iter().map(|w| w.1).sum::<usize>() <= 1000);
        }
        assert!(full > 1000 && wrapped > 1000, "{full} {wrapped}");
        assert_eq!(store.clear(), waiting.len() as u64);
        assert!(store.front().is_none() && store.fits(1000) && !store.fits(1001));
    }
}
