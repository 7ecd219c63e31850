//! A hash table that releases memory when it has become sparse.
//!
//! The standard library's keeps the memory of the most entries that it ever had: 80 bytes for each
//! flow of a stack.

use std::collections::hash_map::{Entry, HashMap, RandomState};
use std::hash::Hash;

/// A table that had no more entries than this keeps its memory.
const LEAST: usize = 16;

/// A hash table. If a removal leaves a quarter, or less, of the most entries since it last shrank,
/// it shrinks to twice what is left. So at least half of the entries must be removed, or as many be
/// inserted, until its memory changes again, and the amortised cost is constant.
///
/// Keyed by secrets of this process: a peer chooses addresses and ports.
pub(crate) struct ShrinkMap<K, V> {
    map: HashMap<K, V, RandomState>,
    most: usize,
}

impl<K: Hash + Eq, V> ShrinkMap<K, V> {
    pub(crate) fn new() -> Self {
        Self::with_hasher(RandomState::new())
    }

    pub(crate) fn with_hasher(hasher: RandomState) -> Self {
        Self { map: HashMap::with_hasher(hasher), most: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    #[inline]
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.map.get(key)
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.map.get_mut(key)
    }

    pub(crate) fn contains_key(&self, key: &K) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let old = self.map.insert(key, value);
        self.most = self.most.max(self.map.len());
        old
    }

    /// Inserts a value, unless the key has one. Returns whether it was inserted.
    pub(crate) fn insert_new(&mut self, key: K, value: V) -> bool {
        let Entry::Vacant(vacant) = self.map.entry(key) else { return false };
        vacant.insert(value);
        self.most = self.most.max(self.map.len());
        true
    }

    /// The value of a key, which is inserted if there is none.
    pub(crate) fn get_or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        self.most = self.most.max(self.map.len() + 1);
        self.map.entry(key).or_default()
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let old = self.map.remove(key);
        if self.most > LEAST && 4 * self.map.len() <= self.most {
            self.most = 2 * self.map.len();
            self.map.shrink_to(self.most);
        }
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_follows_the_entries() {
        let mut map = ShrinkMap::new();
        (0..10_000u32).for_each(|n| _ = map.insert(n, n));
        let (mut most, mut changes) = (map.most, 0);
        for n in 0..10_000 {
            assert_eq!(map.remove(&n), Some(n));
            changes += usize::from(std::mem::replace(&mut most, map.most) != map.most);
            let room = map.map.capacity();
            assert!(room <= 8 * map.len() + 28, "{room} for {}", map.len());
        }
        assert!((3..=20).contains(&changes), "{changes} times");
        assert_eq!((map.len(), map.get(&5)), (0, None));
        assert!(map.insert_new(5, 1) && !map.insert_new(5, 2));
        assert_eq!((map.len(), map.get(&5)), (1, Some(&1)));
    }

    /// A table that loses two thirds of its entries and gets them again, over and over, does not
    /// allocate and release each time.
    #[test]
    fn memory_does_not_come_and_go() {
        let mut map = ShrinkMap::new();
        (0..100_000u32).for_each(|n| _ = map.insert(n, n));
        (1000..100_000).for_each(|n| _ = map.remove(&n));
        let (mut most, mut changes) = (map.most, 0);
        for _ in 0..100 {
            (1000..2000).for_each(|n| *map.get_or_default(n) = n);
            (600..2000).for_each(|n| _ = map.remove(&n));
            changes += usize::from(std::mem::replace(&mut most, map.most) != map.most);
            (600..1000).for_each(|n| _ = map.insert(n, n));
        }
        assert!(changes <= 2, "{changes} times");
        assert_eq!((map.len(), map.contains_key(&7)), (1000, true));
    }
}
