//! The items of the server: a map by key, in the order of their use, within a bound.

use lru::LruCache;
use std::fmt;

/// Bytes that an item counts beside its key and its value: about what the map has for it.
const OVERHEAD: usize = 128;
/// The longest value.
pub(super) const MAX_VALUE: usize = 1 << 20;
/// Expiration times up to this count from now; later ones are seconds since 1970.
const RELATIVE: i64 = 60 * 60 * 24 * 30;

/// The memory of values.
pub(super) trait Memory {
    /// A piece of a value. A clone is another holder of the same bytes.
    type Part: Clone;

    /// Copies `bytes` into memory, and appends the pieces to `value`. False, and `value` may have more pieces, if there is none left.
    fn append(&mut self, bytes: &[u8], value: &mut Vec<Self::Part>) -> bool;

    /// The bytes of a piece.
    fn bytes(part: &Self::Part) -> &[u8];
}

/// A value with what belongs to it.
pub(super) struct Item<P> {
    pub(super) flags: u32,
    /// Changes with each change of the item.
    pub(super) unique: u64,
    /// Seconds since 1970; none: never.
    expires: Option<u64>,
    /// Bytes of the value.
    pub(super) len: usize,
    /// The value and the end of its line behind it.
    pub(super) parts: Vec<P>,
}

impl<P> Item<P> {
    fn is_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }
}

/// What the server counts.
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

/// When an item expires, as `exptime` says it.
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

    /// The item of `key`, which is the one used last then.
    pub(super) fn get(&mut self, key: &[u8], now: u64) -> Option<&mut Item<M::Part>> {
        if self.items.peek(key)?.is_expired(now) {
            self.remove(key);
            return None;
        }
        self.items.get_mut(key)
    }

    /// Removes an item; says whether it was there.
    pub(super) fn remove(&mut self, key: &[u8]) -> bool {
        let Some((key, item)) = self.items.pop_entry(key) else { return false };
        self.bytes -= Self::cost(&key, &item);
        true
    }

    /// Removes the item that was not used for the longest time; says whether there was one.
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

    /// Copies bytes of a value that comes into memory. Evicts items if there is none. False: even so there is none.
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

    /// Puts an item in, in the place of an older one, and evicts as many as the bound asks for. `parts` are `len` bytes and the end of
    /// the line. False: it does not fit at all.
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

    /// Changes when an item expires; says whether it is there.
    pub(super) fn touch(&mut self, key: &[u8], expires: Option<u64>, now: u64) -> bool {
        self.get(key, now).map(|item| item.expires = expires).is_some()
    }

    /// Changes the bytes of an item, and nothing else of it. False: there is no memory.
    pub(super) fn rewrite(&mut self, key: &[u8], value: &[u8]) -> bool {
        let mut parts = Vec::new();
        if !self.append(&[value, b"\r\n"].concat(), &mut parts) {
            return false;
        }
        // Eviction may have taken it.
        let Some((flags, expires)) = self.items.peek(key).map(|item| (item.flags, item.expires)) else { return false };
        self.put(key, flags, expires, value.len(), parts)
    }
}

impl<P> Item<P> {
    /// The bytes of the value, copied, if there are at most `most`.
    pub(super) fn value<M: Memory<Part = P>>(&self, most: usize) -> Option<Vec<u8>> {
        if self.len > most {
            return None;
        }
        let mut bytes: Vec<u8> = self.parts.iter().flat_map(|part| M::bytes(part)).copied().collect();
        bytes.truncate(self.len);
        Some(bytes)
    }
}
