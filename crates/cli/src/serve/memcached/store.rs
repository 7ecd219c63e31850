//! The items of the server: a map by key, with bounds on its bytes and on the pages in which they
//! are. The item that was not used for the longest time is evicted first.
//!
//! A page is free only when the last of its values is gone. So the pages are bounded, too: as long
//! as the store is within that bound, the other pages of the pool are for values that come or go.
//! If the pool then has no page, the connections keep those pages, and not the store:
//! [`OutOfPages`].

use lru::LruCache;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

/// Bytes that an item counts in addition to its key and value: about as many as the map needs for
/// it.
const OVERHEAD: usize = 128;
/// The longest value.
pub(super) const MAX_VALUE: usize = 1 << 20;
/// Expiration times up to this number are seconds from now. Larger numbers are seconds since 1970.
const RELATIVE: i64 = 60 * 60 * 24 * 30;

/// The memory of values.
pub(super) trait Memory {
    /// A piece of a value. A clone is another holder of the same bytes.
    type Part: Clone;

    /// Copies bytes into memory, behind the pieces of `value`. Returns how many: at least one, or 0
    /// if there is no memory.
    fn append(&mut self, bytes: &[u8], value: &mut Vec<Self::Part>) -> usize;

    /// The bytes of a piece.
    fn bytes(part: &Self::Part) -> &[u8];

    /// A number of the page in which a piece is. Pieces of other pages have other numbers.
    fn page(part: &Self::Part) -> usize;
}

/// There is no memory for a value, and no item may be evicted yet. The caller repeats the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutOfPages;

/// A value with its properties.
pub(super) struct Item<P> {
    pub(super) flags: u32,
    /// A number that changes with each change of the item, for `cas`.
    pub(super) unique: u64,
    /// When it expires, in seconds since 1970; `None` for never.
    expires: Option<u64>,
    /// Bytes of the value.
    pub(super) len: usize,
    /// The value, followed by the end of its line.
    pub(super) parts: Vec<P>,
}

impl<P> Item<P> {
    fn is_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }
}

/// The server's counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) gets: u64,
    pub(super) hits: u64,
    pub(super) sets: u64,
    pub(super) evictions: u64,
    pub(super) items_ever: u64,
}

/// See the module.
pub(super) struct Store<M: Memory> {
    items: LruCache<Box<[u8]>, Item<M::Part>>,
    pub(super) memory: M,
    bytes: usize,
    limit: usize,
    /// How many pieces of items are in each page that has any.
    pages: HashMap<usize, u32>,
    most_pages: usize,
    next_unique: u64,
    pub(super) counts: Counts,
}

impl<M: Memory> fmt::Debug for Store<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { items, bytes, limit, pages, most_pages, .. } = self;
        let (items, pages) = (items.len(), pages.len());
        write!(f, "Store({items} items, {bytes} of {limit} bytes, {pages} of {most_pages} pages)")
    }
}

/// When an item with this `exptime` expires, in seconds since 1970; `None` for never.
pub(super) fn expiration(exptime: i64, now: u64) -> Option<u64> {
    match exptime {
        0 => None,
        ..0 => Some(0),
        1..=RELATIVE => Some(now + exptime as u64),
        _ => Some(exptime as u64),
    }
}

impl<M: Memory> Store<M> {
    /// An empty store of at most `limit` bytes: keys, values and 128 bytes for each item. The
    /// values are in at most `most_pages` pages.
    pub(super) fn new(memory: M, limit: usize, most_pages: usize) -> Self {
        let (items, pages, counts) = (LruCache::unbounded(), HashMap::new(), Counts::default());
        Self { items, memory, bytes: 0, limit, pages, most_pages, next_unique: 1, counts }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    fn cost(key: &[u8], item: &Item<M::Part>) -> usize {
        key.len() + item.len + OVERHEAD
    }

    /// The item of `key`. It becomes the most recently used one.
    pub(super) fn get(&mut self, key: &[u8], now: u64) -> Option<&mut Item<M::Part>> {
        if self.items.peek(key)?.is_expired(now) {
            self.remove(key);
            return None;
        }
        self.items.get_mut(key)
    }

    /// Removes an item. Returns whether there was one.
    pub(super) fn remove(&mut self, key: &[u8]) -> bool {
        let Some((key, item)) = self.items.pop_entry(key) else { return false };
        self.forget(&key, &item);
        true
    }

    /// An item is no longer in the map.
    fn forget(&mut self, key: &[u8], item: &Item<M::Part>) {
        self.bytes -= Self::cost(key, item);
        for page in item.parts.iter().map(M::page) {
            if let Entry::Occupied(mut pieces) = self.pages.entry(page) {
                *pieces.get_mut() -= 1;
                if *pieces.get() == 0 {
                    pieces.remove();
                }
            }
        }
    }

    /// Removes the least recently used item. Returns whether there was one.
    fn evict(&mut self) -> bool {
        let Some((key, item)) = self.items.pop_lru() else { return false };
        self.forget(&key, &item);
        self.counts.evictions += 1;
        true
    }

    pub(super) fn clear(&mut self) {
        self.items.clear();
        self.pages.clear();
        self.bytes = 0;
    }

    /// Copies bytes into memory, behind the pieces of `value`. If there is no memory, and
    /// `may_evict`, items are evicted for it. Returns how many bytes were copied: at least one, or
    /// 0 if there is no memory without any item.
    ///
    /// # Errors
    ///
    /// There is no memory, and no item may be evicted.
    pub(super) fn append(
        &mut self,
        bytes: &[u8],
        value: &mut Vec<M::Part>,
        may_evict: bool,
    ) -> Result<usize, OutOfPages> {
        loop {
            match self.memory.append(bytes, value) {
                0 if !may_evict => return Err(OutOfPages),
                0 if self.evict() => {}
                n => return Ok(n),
            }
        }
    }

    /// Copies all bytes into memory. Returns the pieces; `None` if there is no memory without any
    /// item.
    ///
    /// # Errors
    ///
    /// As of [`append`](Self::append).
    pub(super) fn copy(&mut self, mut bytes: &[u8], may_evict: bool) -> Result<Option<Vec<M::Part>>, OutOfPages> {
        let mut value = Vec::new();
        while !bytes.is_empty() {
            match self.append(bytes, &mut value, may_evict)? {
                0 => return Ok(None),
                n => bytes = &bytes[n..],
            }
        }
        Ok(Some(value))
    }

    /// Stores an item, in place of an older one of this key, and evicts items until the bounds
    /// hold. `parts` are `len` bytes and the end of the line. False if the item alone exceeds a
    /// bound.
    pub(super) fn put(
        &mut self,
        key: &[u8],
        flags: u32,
        expires: Option<u64>,
        len: usize,
        parts: Vec<M::Part>,
    ) -> bool {
        self.remove(key);
        let item = Item { flags, unique: self.next_unique, expires, len, parts };
        let cost = Self::cost(key, &item);
        if cost > self.limit {
            return false;
        }
        self.next_unique += 1;
        self.bytes += cost;
        for page in item.parts.iter().map(M::page) {
            *self.pages.entry(page).or_default() += 1;
        }
        // The new item is the last to be evicted.
        self.items.put(key.into(), item);
        while (self.bytes > self.limit || self.pages.len() > self.most_pages) && self.items.len() > 1 {
            self.evict();
        }
        if self.pages.len() > self.most_pages {
            self.clear();
            return false;
        }
        self.counts.items_ever += 1;
        true
    }

    /// Changes when an item expires. Returns whether there is such an item.
    pub(super) fn touch(&mut self, key: &[u8], expires: Option<u64>, now: u64) -> bool {
        self.get(key, now).map(|item| item.expires = expires).is_some()
    }

    /// Changes the value of an item, and keeps its flags and its expiration. Returns whether there
    /// was memory.
    ///
    /// # Errors
    ///
    /// As of [`append`](Self::append). Nothing has changed.
    pub(super) fn rewrite(&mut self, key: &[u8], value: &[u8], may_evict: bool) -> Result<bool, OutOfPages> {
        let Some(parts) = self.copy(&[value, b"\r\n"].concat(), may_evict)? else { return Ok(false) };
        // Eviction may have removed the item.
        let Some((flags, expires)) = self.items.peek(key).map(|item| (item.flags, item.expires)) else {
            return Ok(false);
        };
        Ok(self.put(key, flags, expires, value.len(), parts))
    }
}

impl<P> Item<P> {
    /// A copy of the value, if it has at most `most` bytes.
    pub(super) fn value<M: Memory<Part = P>>(&self, most: usize) -> Option<Vec<u8>> {
        (self.len <= most).then(|| bytes::<M>(&self.parts, self.len))
    }
}

/// A copy of the first `len` bytes of pieces.
pub(super) fn bytes<M: Memory>(parts: &[M::Part], len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = parts.iter().flat_map(|part| M::bytes(part)).copied().collect();
    bytes.truncate(len);
    bytes
}
