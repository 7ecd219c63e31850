//! Used buffers that were read from the ring and not taken yet.

/// The most used buffers that are read from the ring and not taken yet.
pub(crate) const LOOK: u16 = 128;

/// The slots of used buffers that were read from the ring and not taken yet, oldest first.
/// Positions count up, modulo 2^16.
pub(super) struct Found {
    entries: Box<[u16; LOOK as usize]>,
    head: u16,
    tail: u16,
}

impl Found {
    pub(super) fn new() -> Self {
        Self { entries: Box::new([0; LOOK as usize]), head: 0, tail: 0 }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> u16 {
        self.tail.wrapping_sub(self.head)
    }

    #[inline(always)]
    pub(super) fn get(&self, i: u16) -> u16 {
        self.entries[usize::from(self.head.wrapping_add(i) % LOOK)]
    }

    /// Adds up to `most` buffers, and no more than there is room for. They count after
    /// [`added`](Self::added).
    #[inline(always)]
    pub(super) fn adding(&mut self, most: u16) -> Adding<'_> {
        let (first, most) = (self.tail, most.min(LOOK - self.len()));
        Adding { entries: &mut self.entries, at: first, end: first.wrapping_add(most) }
    }

    /// The buffers that were added up to this [position](Adding::at) count.
    #[inline(always)]
    pub(super) fn added(&mut self, at: u16) {
        self.tail = at;
    }

    /// Takes the first. The caller knows that there is one.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> u16 {
        debug_assert!(self.len() > 0, "a buffer that is pending is taken");
        let first = self.get(0);
        self.head = self.head.wrapping_add(1);
        first
    }
}

/// The places of buffers that are added to [`Found`]. Its fields are a loop's own, so that a
/// compiler keeps them in registers.
pub(super) struct Adding<'f> {
    entries: &'f mut [u16; LOOK as usize],
    /// The position of the next buffer, and the one behind the last for which there is room.
    pub(super) at: u16,
    end: u16,
}

impl Adding<'_> {
    #[inline(always)]
    pub(super) fn has_room(&self) -> bool {
        self.at != self.end
    }

    /// Adds a buffer. The caller has checked that there is room.
    #[inline(always)]
    pub(super) fn push(&mut self, slot: u16) {
        self.entries[usize::from(self.at % LOOK)] = slot;
        self.at = self.at.wrapping_add(1);
    }
}
