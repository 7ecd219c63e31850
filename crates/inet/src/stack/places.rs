//! A table of values by place: a number that a value keeps as long as it is in the table.
//!
//! Why not a vector and a list of vacant places: a stack has a million connections for an hour, and
//! a thousand for a week. Its tables must then have the memory of a thousand. A value cannot move,
//! for its place is in handles and lists. So a value is inserted at the first vacant place, and the
//! last places become vacant as their values leave. They are released at once.
//!
//! ```text
//!   values    [ A │ B │   │ C │   │ D ]      D leaves: the last two places are removed
//!   vacant      0   0   1   0   1   0        a bit for each place
//!   summary     1                            a bit for each word of `vacant` that is not 0
//! ```

/// A table with room for so many values keeps it.
const LEAST: usize = 64;
const BITS: usize = u64::BITS as usize;

/// Values by place. An insertion reads a word for each 4,096 places until it finds a vacant one.
/// The other calls have a constant cost, and a removal an amortised one.
pub(crate) struct Places<T> {
    /// The last one is not vacant.
    values: Vec<Option<T>>,
    vacant: Vec<u64>,
    summary: Vec<u64>,
    len: usize,
}

impl<T> Places<T> {
    pub(crate) const fn new() -> Self {
        Self { values: Vec::new(), vacant: Vec::new(), summary: Vec::new(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Places for which there is memory. No value has a place behind them.
    pub(crate) fn room(&self) -> usize {
        self.values.capacity()
    }

    /// The place of the next value that is inserted: the first one that is vacant.
    pub(crate) fn next(&self) -> usize {
        match self.summary.iter().position(|&words| words != 0) {
            Some(n) => {
                let word = n * BITS + self.summary[n].trailing_zeros() as usize;
                word * BITS + self.vacant[word].trailing_zeros() as usize
            }
            None => self.values.len(),
        }
    }

    pub(crate) fn insert(&mut self, value: T) -> usize {
        let place = if self.len == self.values.len() { self.len } else { self.next() };
        self.len += 1;
        if place < self.values.len() {
            self.mark(place, false);
            self.values[place] = Some(value);
            return place;
        }
        self.values.push(Some(value));
        self.vacant.resize(self.values.len().div_ceil(BITS), 0);
        self.summary.resize(self.vacant.len().div_ceil(BITS), 0);
        place
    }

    pub(crate) fn remove(&mut self, place: usize) -> Option<T> {
        let value = self.values.get_mut(place)?.take()?;
        self.len -= 1;
        self.mark(place, true);
        if place + 1 == self.values.len() {
            self.trim();
        }
        Some(value)
    }

    #[inline]
    pub(crate) fn get(&self, place: usize) -> Option<&T> {
        self.values.get(place)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, place: usize) -> Option<&mut T> {
        self.values.get_mut(place)?.as_mut()
    }

    /// All values and their places, in the order of the places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.values.iter().enumerate().filter_map(|(place, value)| Some((place, value.as_ref()?)))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().flatten()
    }

    fn mark(&mut self, place: usize, vacant: bool) {
        let word = place / BITS;
        set(&mut self.vacant, place, vacant);
        set(&mut self.summary, word, self.vacant[word] != 0);
    }

    /// Removes the vacant places at the end, and releases memory if a quarter of it, or less, is
    /// used. Twice as much as is used stays, so that a few insertions and removals do not allocate
    /// and release again.
    fn trim(&mut self) {
        let mut end = self.values.len();
        while end > 0 {
            let word = (end - 1) / BITS;
            let used = !self.vacant[word] & low(end - word * BITS);
            end = word * BITS + (u64::BITS - used.leading_zeros()) as usize;
            if used != 0 {
                break;
            }
        }
        let words = end.div_ceil(BITS);
        self.values.truncate(end);
        self.vacant.truncate(words);
        self.summary.truncate(words.div_ceil(BITS));
        if let Some(last) = self.vacant.last_mut() {
            *last &= low(end - (words - 1) * BITS);
            let is_used = *last != 0;
            set(&mut self.summary, words - 1, is_used);
        }
        if let Some(last) = self.summary.last_mut() {
            *last &= low(words - (words - 1) / BITS * BITS);
        }
        if self.room() > LEAST && 4 * end <= self.room() {
            self.values.shrink_to((2 * end).max(LEAST));
            self.vacant.shrink_to(2 * words);
            self.summary.shrink_to_fit();
        }
    }
}

/// The low `bits` bits, of 1 to 64.
fn low(bits: usize) -> u64 {
    u64::MAX >> (BITS - bits)
}

fn set(words: &mut [u64], bit: usize, to: bool) {
    let (word, mask) = (&mut words[bit / BITS], 1 << (bit % BITS));
    if to { *word |= mask } else { *word &= !mask }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A table against a sorted map: the first vacant place is used, the last place is not vacant,
    /// and what is not used is released.
    #[test]
    fn values_keep_their_places_and_the_table_shrinks() {
        let mut rng = fastrand::Rng::with_seed(11);
        let (mut table, mut model) = (Places::new(), BTreeMap::new());
        for most in [3, 64, 65, 200, 5000, 0, 4500, 64, 0, 5] {
            for n in 0..12_000u32 {
                let grows = if model.len() < most { rng.u8(..4) > 0 } else { rng.u8(..4) == 0 };
                if grows {
                    let place = table.insert(n);
                    let is_first = |place| n % 64 > 0 || (0..place).all(|before| model.contains_key(&before));
                    assert!(is_first(place), "{place} is not the first vacant place");
                    assert_eq!(model.insert(place, n), None, "it is vacant");
                } else {
                    let end = model.last_key_value().map_or(0, |(last, _)| last + 1);
                    let place = rng.usize(..end + 2);
                    assert_eq!(table.remove(place), model.remove(&place));
                }
                let end = model.last_key_value().map_or(0, |(last, _)| last + 1);
                assert_eq!((table.len(), table.values.len()), (model.len(), end));
            }
            assert!(table.iter().eq(model.iter().map(|(place, value)| (*place, value))));
            assert_eq!(table.summary.len(), table.vacant.len().div_ceil(BITS));
        }
        while let Some((&place, _)) = model.last_key_value() {
            assert_eq!(table.remove(place), model.remove(&place));
            let end = model.last_key_value().map_or(0, |(last, _)| last + 1);
            assert!(table.room() <= LEAST.max(4 * end), "{} for {end}", table.room());
        }
        assert!(table.vacant.is_empty() && table.summary.is_empty());
    }

    /// A table that loses two thirds of its values and gets them again, over and over, does not
    /// allocate and release each time.
    #[test]
    fn memory_does_not_come_and_go() {
        let mut table = Places::new();
        (0..100_000).for_each(|n| _ = table.insert(n));
        (1000..100_000).rev().for_each(|place| _ = table.remove(place));
        let (mut room, mut changes) = (table.room(), 0);
        let mut note = |table: &Places<_>| {
            changes += usize::from(std::mem::replace(&mut room, table.room()) != table.room());
        };
        for _ in 0..100 {
            while table.len() < 2000 {
                table.insert(0);
                note(&table);
            }
            for place in (600..2000).rev() {
                table.remove(place);
                note(&table);
            }
        }
        assert!(changes <= 1, "{changes} times");
    }
}
