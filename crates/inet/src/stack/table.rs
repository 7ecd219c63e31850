//! A table whose handles carry a generation.
//!
//! Why not a number alone: a table reuses its places. A handle that outlives its entry, in a queue
//! or in a socket, would then name the entry that came later. An [`Id`] is a place and a
//! generation. Each insertion has a generation of its own, which is never used again, so an [`Id`]
//! whose entry was removed names nothing.

use crate::stack::places::Places;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU64;

/// Entries by [`Id`]. `K` is the kind of its handles: a handle of another table is of another type.
/// The costs are those of [`Places`].
pub(crate) struct Table<K, T> {
    places: Places<Entry<T>>,
    /// The generation of the next entry. It does not wrap: at a billion insertions a second, that
    /// takes 500 years.
    next: NonZeroU64,
    kind: PhantomData<K>,
}

/// Not zero, so that a vacant place needs no word of its own.
struct Entry<T> {
    generation: NonZeroU64,
    value: T,
}

/// The handle of an entry of a `Table<K, _>`.
pub(crate) struct Id<K> {
    generation: NonZeroU64,
    place: u32,
    kind: PhantomData<K>,
}

impl<K> Id<K> {
    /// A number that no other entry of the table has, or had.
    pub(crate) fn generation(self) -> u64 {
        self.generation.get()
    }

    /// The place in the table. Entries that exist at the same time have different places, which are
    /// as small as possible.
    pub(crate) fn place(self) -> u32 {
        self.place
    }
}

impl<K> Clone for Id<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Id<K> {}

impl<K> PartialEq for Id<K> {
    fn eq(&self, other: &Self) -> bool {
        (self.generation, self.place) == (other.generation, other.place)
    }
}

impl<K> Eq for Id<K> {}

impl<K> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.place, self.generation)
    }
}

impl<K, T> Table<K, T> {
    pub(crate) const fn new() -> Self {
        Self { places: Places::new(), next: NonZeroU64::MIN, kind: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Places for which there is memory. No entry has a place behind them.
    pub(crate) fn room(&self) -> usize {
        self.places.room()
    }

    /// The caller limits the number of entries to fewer than 2^32.
    pub(crate) fn insert(&mut self, value: T) -> Id<K> {
        let generation = self.next;
        self.next = generation.saturating_add(1);
        let place = self.places.insert(Entry { generation, value }) as u32;
        Id { generation, place, kind: PhantomData }
    }

    /// Removes an entry. `None` if it was removed before.
    pub(crate) fn remove(&mut self, id: Id<K>) -> Option<T> {
        self.get(id)?;
        Some(self.places.remove(id.place as usize)?.value)
    }

    #[inline]
    pub(crate) fn get(&self, id: Id<K>) -> Option<&T> {
        let entry = self.places.get(id.place as usize)?;
        (entry.generation == id.generation).then_some(&entry.value)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: Id<K>) -> Option<&mut T> {
        let entry = self.places.get_mut(id.place as usize)?;
        (entry.generation == id.generation).then_some(&mut entry.value)
    }

    /// The entry that is in a place now.
    pub(crate) fn at(&self, place: u32) -> Option<Id<K>> {
        let generation = self.places.get(place as usize)?.generation;
        Some(Id { generation, place, kind: PhantomData })
    }

    /// All entries, in the order of their places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id<K>, &T)> {
        self.places.iter().map(|(place, Entry { generation, value })| {
            (Id { generation: *generation, place: place as u32, kind: PhantomData }, value)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_of_a_removed_entry_names_nothing() {
        let mut table = Table::<(), _>::new();
        let one = table.insert("one");
        assert_eq!(table.remove(one), Some("one"));
        let two = table.insert("two");
        assert_eq!(one.place(), two.place(), "the place is reused");
        assert!(table.get(one).is_none() && table.get_mut(one).is_none() && table.remove(one).is_none());
        assert_eq!((table.get(two), table.at(two.place()), table.len()), (Some(&"two"), Some(two), 1));
        assert!(table.iter().eq([(two, &"two")]));
    }
}
