//! The slots that are free.

/// The slots (or, in a split ring, descriptors) that the device does not have. Ring buffer of as
/// many places as a power of two; positions count up, modulo 2^16.
///
/// The slot that has been free for the longest time is taken next. So slots are posted in the order
/// of their numbers, as long as a device uses them in order: several of them are a
/// [run](Self::run), and each position of a split ring's available ring keeps its head. With
/// in-order use, a driver of a split ring must use descriptors in the order of the table.
#[derive(Debug)]
pub(crate) struct Free {
    ids: Box<[u16]>,
    /// The oldest.
    head: u16,
    /// Behind the one that was freed last.
    tail: u16,
}

impl Free {
    pub(super) fn new(count: u16) -> Self {
        let places = count.max(1).next_power_of_two();
        let mut this = Self { ids: vec![0; usize::from(places)].into(), head: 0, tail: 0 };
        this.reset(count);
        this
    }

    /// All are free.
    pub(super) fn reset(&mut self, count: u16) {
        (self.head, self.tail) = (0, 0);
        for id in 0..count {
            self.push(id);
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
        Some(self.ids[self.place(self.head)])
    }

    /// Takes the [next](Self::next).
    #[inline(always)]
    pub(super) fn taken(&mut self) {
        self.head = self.head.wrapping_add(1);
    }

    /// The next slots to be taken, as far as they are consecutive, at most `most`: the first, and
    /// how many.
    #[inline(always)]
    pub(super) fn run(&self, most: u16) -> Option<(u16, u16)> {
        let first = self.next()?;
        let ids = &self.ids[self.place(self.head)..];
        let most = usize::from(most.min(self.len())).min(ids.len());
        let n = ids[..most].iter().zip(first..).take_while(|(id, next)| *id == next).count();
        Some((first, n as u16))
    }

    /// Removes the next `n` slots, which are a [run](Self::run).
    #[inline(always)]
    pub(super) fn taken_run(&mut self, n: u16) {
        self.head = self.head.wrapping_add(n);
    }

    /// Frees `n` consecutive slots.
    #[inline(always)]
    pub(super) fn push_run(&mut self, first: u16, n: u16) {
        let at = self.place(self.tail);
        let until_end = usize::from(n).min(self.ids.len() - at);
        let (front, back) = self.ids.split_at_mut(at);
        number(&mut back[..until_end], first);
        number(&mut front[..usize::from(n) - until_end], first + until_end as u16);
        self.tail = self.tail.wrapping_add(n);
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

/// Numbers these places, from `first` on.
#[inline(always)]
fn number(places: &mut [u16], first: u16) {
    places.iter_mut().zip(first..).for_each(|(place, id)| *place = id);
}
