//! The items of the server: a map by key, with a bound on its bytes. The item that was not used for the longest time is
//! evicted first.

use lru::LruCache;
use std::fmt;

/// Bytes that an item counts in addition to its key and value: about as many as the map needs for it.
const OVERHEAD: usize = 128;
/// The longest value.
pub(super) const MAX_VALUE: usize = 1 << 20;
/// Expiration times up to this number are seconds from now. Larger numbers are seconds since 1970.
const RELATIVE: i64 = 60 * 60 * 24 * 30;

/// The memory of values.
pub(super) trait Memory {
    /// A piece of a value. A clone is another holder of the same bytes.
    type Part: Clone;

    /// Copies `bytes` into memory, and appends the pieces to `value`. False if there is no memory left; some pieces may
    /// have been appended then.
    fn append(&mut self, bytes: &[u8], value: &mut Vec<Self::Part>) -> bool;

    /// The bytes of a piece.
    fn bytes(part: &Self::Part) -> &[u8];
}

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
    next_unique: u64,
    pub(super) counts: Counts,
}

impl<M: Memory> fmt::Debug for Store<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({} items, {} of {} bytes)", self.items.len(), self.bytes, self.limit)
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
    /// An empty store of at most `limit` bytes: keys, values and 128 bytes for each item.
    pub(super) fn new(memory: M, limit: usize) -> Self {
        let counts = Counts::default();
        Self { items: LruCache::unbounded(), memory, bytes: 0, limit, next_unique: 1, counts }
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
        self.bytes -= Self::cost(&key, &item);
        true
    }

    /// Removes the least recently used item. Returns whether there was one.
    fn evict(&mut self) -> bool {
        let Some((key, item)) = self.items.pop_lru() else { return false };
        self.bytes -= Self::cost(&key, &item);
        self.counts.evictions += 1;
        true
    }

    pub(super) fn clear(&mut self) {
        self.items.clear();
        self.bytes = 0;
    }

    /// Copies bytes of a value that is being received into memory. Evicts items if there is no memory. False if there
    /// is still none.
    pub(super) fn append(&mut self, bytes: &[u8], value: &mut Vec<M::Part>) -> bool {
        let before = value.len();
        while !self.memory.append(bytes, value) {
            value.truncate(before);
            if !self.evict() {
                return false;
            }
        }
        true
    }

    /// Stores an item, in place of an older one of this key, and evicts items until the bound holds. `parts` are `len`
    /// bytes and the end of the line. False if the item alone exceeds the bound.
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
        while self.bytes + cost > self.limit && self.evict() {}
        self.next_unique += 1;
        self.counts.items_ever += 1;
        self.bytes += cost;
        self.items.put(key.into(), item);
        true
    }

    /// Changes when an item expires. Returns whether there is such an item.
    pub(super) fn touch(&mut self, key: &[u8], expires: Option<u64>, now: u64) -> bool {
        self.get(key, now).map(|item| item.expires = expires).is_some()
    }

    /// Changes the value of an item, and keeps its flags and its expiration. False if there is no memory.
    pub(super) fn rewrite(&mut self, key: &[u8], value: &[u8]) -> bool {
        let mut parts = Vec::new();
        if !self.append(&[value, b"\r\n"].concat(), &mut parts) {
            return false;
        }
        // Eviction may have removed the item.
        let Some((flags, expires)) = self.items.peek(key).map(|item| (item.flags, item.expires)) else { return false };
        self.put(key, flags, expires, value.len(), parts)
    }
}

impl<P> Item<P> {
    /// A copy of the value, if it has at most `most` bytes.
    pub(super) fn value<M: Memory<Part = P>>(&self, most: usize) -> Option<Vec<u8>> {
        if self.len > most {
            return None;
        }
        let mut bytes: Vec<u8> = self.parts.iter().flat_map(|part| M::bytes(part)).copied().collect();
        bytes.truncate(self.len);
        Some(bytes)
    }
}
