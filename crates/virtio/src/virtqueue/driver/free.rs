//! The slots that are free.

/// The slots (or, in a split ring, descriptors) that the device does not have. Ring buffer of as
/// many places as a power of two; positions count up, modulo 2^16.
#[derive(Debug)]
pub(crate) struct Free {
    ids: Box<[u16]>,
    /// The oldest.
    head: u16,
    /// Behind the one that was freed last.
    tail: u16,
    /// Whether the oldest is taken next, or the one that was freed last, which is in the cache.
    oldest_first: bool,
}

impl Free {
    pub(super) fn new(count: u16, oldest_first: bool) -> Self {
        let places = count.max(1).next_power_of_two();
        let mut this = Self { ids: vec![0; usize::from(places)].into(), head: 0, tail: 0, oldest_first };
        this.reset(count);
        this
    }

    /// All are free.
    pub(super) fn reset(&mut self, count: u16) {
        (self.head, self.tail) = (0, 0);
        for id in 0..count {
            self.push(if self.oldest_first { id } else { count - 1 - id });
        }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> u16 {
        self.tail.wrapping_sub(self.head)
    }

    #[inline(always)]
    fn place(&self, position: u16) -> usize {
        usize::from(position) & (self.ids.len() - 1)
    }

    /// The next to be taken.
    #[inline(always)]
    pub(super) fn next(&self) -> Option<u16> {
        if self.head == self.tail {
            return None;
        }
        Some(self.ids[self.place(if self.oldest_first { self.head } else { self.tail.wrapping_sub(1) })])
    }

    /// Takes the [next](Self::next).
    #[inline(always)]
    pub(super) fn taken(&mut self) {
        if self.oldest_first {
            self.head = self.head.wrapping_add(1);
        } else {
            self.tail = self.tail.wrapping_sub(1);
        }
    }

    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<u16> {
        let id = self.next()?;
        self.taken();
        Some(id)
    }

    #[inline(always)]
    pub(super) fn push(&mut self, id: u16) {
        let at = self.place(self.tail);
        self.ids[at] = id;
        self.tail = self.tail.wrapping_add(1);
    }
}
