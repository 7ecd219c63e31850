//! The next chains of a queue, if each is one buffer: they are read and completed together. And the
//! next chain, if it is a few buffers.
//!
//! Why together: reading a descriptor that the driver's core has just written waits for its cache
//! line. In a group, the thread waits for many lines at the same time.

use std::mem::MaybeUninit;

/// The most chains that are read together, so that the thread waits for their cache lines at the
/// same time.
pub(crate) const GROUP: usize = 64;

/// A chain of one buffer that lies in one region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SingleBuffer {
    /// The buffer's address in this process.
    pub(crate) host: *mut u8,
    /// Bytes in the buffer; when the chain is completed, bytes written.
    pub(crate) len: u32,
    pub(super) id: u16,
}

/// The most buffers of a [`ShortChain`]: a header, and payload that crosses a page or two.
const SHORT: usize = 4;

/// A chain of few buffers, each of which lies in one region. [`DeviceQueue::peek_short`] fills it.
#[derive(Debug)]
pub(crate) struct ShortChain {
    pub(super) buffers: [(*mut u8, u32); SHORT],
    pub(super) found: usize,
}

impl ShortChain {
    /// A chain of no buffers.
    pub(crate) const EMPTY: Self = Self { buffers: [(std::ptr::null_mut(), 0); SHORT], found: 0 };

    /// The addresses of the buffers in this process, and their bytes.
    #[inline(always)]
    pub(crate) fn buffers(&self) -> &[(*mut u8, u32)] {
        &self.buffers[..self.found]
    }
}

/// The next chains of a queue, if each is one buffer in one region. [`DeviceQueue::peek_group`]
/// fills it.
///
/// Its places are not cleared: a pass over a ring of few chains would pay for all 64.
#[derive(Debug)]
pub(crate) struct Group {
    /// The first `found` are initialised.
    places: [MaybeUninit<SingleBuffer>; GROUP],
    found: usize,
}

impl Group {
    /// A group of no chains. A function, because a constant is copied with all its bytes.
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self { places: [const { MaybeUninit::uninit() }; GROUP], found: 0 }
    }

    /// Finds chains anew: those that `next` returns for the numbers from 0 on, up to the first
    /// `None`, and at most `most`.
    #[inline(always)]
    pub(super) fn find(&mut self, most: usize, mut next: impl FnMut(u16) -> Option<SingleBuffer>) {
        let mut n = 0;
        for place in self.places.iter_mut().take(most) {
            let Some(chain) = next(n) else { break };
            place.write(chain);
            n += 1;
        }
        self.found = n.into();
    }

    /// Forgets the chains.
    #[inline(always)]
    pub(super) fn forget(&mut self) {
        self.found = 0;
    }

    /// The chains that were found.
    #[inline(always)]
    pub(crate) fn chains(&mut self) -> &mut [SingleBuffer] {
        let found = &mut self.places[..self.found] as *mut [MaybeUninit<SingleBuffer>];
        // SAFETY: `find` has written the first `found` places, and they stay written. Nothing else
        // changes `found`, except to 0. The two types have one layout, and the borrow is `self`'s.
        unsafe { &mut *(found as *mut [SingleBuffer]) }
    }
}
