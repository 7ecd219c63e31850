//! The token table of a socket: the ranges of tokens, which all handles of the socket share, and
//! the end of the table.
//!
//! Why not a map of tokens? Linux keeps the fragments of a socket in an xarray under a lock: each
//! delivery inserts, each return removes, and the receiver takes turns with all threads that
//! return. A user returns millions of fragments per second, on many threads. Here a token is an
//! index, and each page has two numbers: how often it was *delivered* and how often it was
//! *returned*. The receiver writes the first one by a plain store and never locks. The returning
//! threads write the second one under a lock of their own, which a call holds once for 16 tokens.
//! So no token costs an atomic read-modify-write.
//!
//! A socket has a 32-bit space of tokens. When the socket receives from a binding for the first
//! time, it assigns the binding a range of this space, with one number for each page. The numbers of
//! 16 pages are a block ([`counts`](super::counts)), and a directory finds the block of a token
//! ([`directory`](super::directory)).
//!
//! ```text
//!   token     block (16 tokens)       its range                      page = token - first
//!   1042  ──► 65: tokens 1041..=1056  1 ..= 5000, binding 7    ──►   1041: delivered 9, returned 7
//!                                     5009 ..= 9104, binding 9
//! ```
//!
//! The invariant: **the table owns `delivered - returned` references to a page**, modulo 2^32. Both
//! numbers wrap around. Their difference does not: each unit is a reference to the page, and the
//! page's own count is no wider. What can happen to a page of a socket:
//!
//! ```text
//!             reserve             commit: delivered += 1         return, if they differ: returned += 1
//!   unknown ──────────► equal ─────────────────────────► n held ─────────────────────────► n - 1 held
//!               ▲         │ drained: the range              the last handle is dropped:
//!               └─────────┘ is removed                      delivered - returned are put
//! ```
//!
//! | handle | how many | what it may do |
//! | --- | --- | --- |
//! | the receiver, `&mut TokenTable` | one | make ranges and blocks, add to `delivered` |
//! | a `Returner`, `Clone + Sync` | any number | add to `returned`, under the lock, up to `delivered` |
//! | the last handle | alone | everything |
//!
//! There is one receiver, so two receives never race. The end of the table races with nothing,
//! because every returning thread has a handle. If the kernel preempts a thread that holds the lock,
//! other returning threads wait for it, and the receiver does not. Pages are put after the lock is
//! released, so no code of a binding runs under it.
//!
//! # The races
//!
//! **Return against return.** Two threads return a token that was received once. The second one
//! finds equal numbers. It reads `delivered` under the lock, and not before: the first thread may
//! have seen a later number, and `returned` may have passed the earlier one.
//!
//! ```text
//!   return                                  return
//!   lock
//!   delivered 1, returned 0 -> 1
//!   unlock, puts the page                   lock
//!                                           delivered 1, returned 1: in excess, ignored
//!                                           unlock
//! ```
//!
//! **Return against receive of the same page.** The two write different numbers, so neither change
//! is lost. The return sees `delivered` from before or after the receive. If it is from before, the
//! token that the receive delivers is returned later.
//!
//! ```text
//!   return                                  receive
//!   lock
//!   delivered 1
//!                                           delivered 1 -> 2
//!   returned 0 -> 1
//!   unlock, puts one reference
//! ```
//!
//! **A guess against the first receive.** A user can guess a token, and return it before the socket
//! has delivered it. Before the store of the commit, the numbers are equal or there is no block, so
//! the return is ignored. After the store, the table owns the reference, and the user may return it
//! at once.
//!
//! ```text
//!   return                                  receive
//!                                           reserve: range, block, both numbers 0
//!   delivered 0, returned 0: ignored
//!                                           no error is possible from here on
//!                                           commit: delivered 0 -> 1
//!   returned 0 -> 1, puts the page
//!                                           delivers the token of a page already returned
//! ```
//!
//! **A larger directory against a return.** If the directory has no room for a new block, the
//! receiver makes a larger one, and replaces the table. A thread may still use the old one. It finds
//! all blocks but the new one. A token of the new block is then a guess, because the table was
//! replaced before the block's first token was delivered. Blocks do not move, so both directories
//! lead to the same numbers.
//!
//! **The last handle against a return.** This race cannot happen: the returning thread has a
//! handle, so a handle that is dropped during the return is not the last one. The last handle finds
//! all that returns have added to `returned`.
//!
//! ```text
//!   drop of the table                       return
//!   handles: 2 -> 1
//!                                           returned 0 -> 1, puts the page
//!                                           handles: 1 -> 0
//!                                           puts delivered - returned of all pages
//! ```
//!
//! **The last put against the end of the binding.** The put that returns the last page makes the
//! binding drained. Another thread may see this before the put has returned. It then removes the
//! range from the table, and drops the only handle on the binding.
//!
//! ```text
//!   return                                  another thread
//!   section begins, finds the range
//!   returned 0 -> 1
//!   put ── the last page is returned
//!                                           drained: removes the range from the table
//!   ── and still uses the binding
//!   section ends
//!                                           the handle is dropped, and with it the binding
//! ```
//!
//! For this reason readers find ranges in a critical section. A table that was replaced is dropped,
//! with its handles, only after all critical sections that were open at the replacement have ended.
//!
//! **An old token against a new range.** If a binding is made again, it is a new binding with a new
//! range. The numbers of a range that was removed are used again only after all other numbers of
//! the 2^32. No page of the old range is held then, because a range is removed only when all pages
//! of its binding are returned for good. A thread may still use the old table after a new one is
//! published. Its tokens are then in ranges of the old table, whose numbers are equal, so they are
//! ignored.
//!
//! # Memory ordering
//!
//! The store of a commit is a release, and the load of `delivered` in a return is an acquire. So a
//! thread that puts a page does this after everything that the receiver did with the page. There is
//! no release sequence to keep: all writes of `delivered` are the receiver's. `returned` is ordered
//! by the lock. A block's zeros and its entry in the directory are published by the release of the
//! entry's number. A range is published, by the replacement of the table, before its first token is
//! delivered; so a thread that has the token finds the range. The last handle reads the numbers
//! relaxed, because it follows the drops of all other handles.

use super::counts::{Block, Count, Counts, Delivered, ReturnLock, position};
use super::directory::Directory;
use super::error::DeliverError;
use super::pages::Pages;
use super::space::Space;
use super::stats::TokenStats;
use crate::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, Replaced, Snapshot};
use std::mem;
use std::ptr::NonNull;
use std::sync::PoisonError;

/// A binding that the socket has met, and its range of tokens.
pub(crate) struct Range<B, K: Delivered = Count> {
    /// The only handle on the binding that the socket has.
    pub(crate) binding: B,
    /// The position of the token of page 0.
    pub(crate) base: u32,
    /// The number of tokens, less one.
    more: u32,
    counts: Arc<Counts<K>>,
}

impl<B, K: Delivered> Range<B, K> {
    /// The first and the last token.
    fn tokens(&self) -> (u32, u32) {
        (self.base + 1, self.base + 1 + self.more)
    }
}

/// The directory of a table. It is an `Arc` of the standard library, because a model has no race
/// for its count: it is cloned and dropped under a lock, or after a grace period.
pub(crate) type Blocks<B, K> = Directory<K, Range<B, K>>;

/// The ranges in use, as a thread that looks up a token reads them.
///
/// Invariant: the directory has the blocks of these ranges only.
pub(crate) struct Table<B, K: Delivered = Count> {
    ranges: Box<[Arc<Range<B, K>>]>,
    directory: Blocks<B, K>,
}

impl<B, K: Delivered> Table<B, K> {
    /// The block of the token at a position, and its range. `None` if no page of the block was ever
    /// delivered. The token may be behind the end of the range, because a block has 16 tokens.
    #[inline]
    pub(crate) fn find(&self, at: u32) -> Option<(&Block<K>, &Range<B, K>)> {
        // SAFETY: the range is one of this table (the invariant), and owns the block.
        self.directory.find(at).map(|entry| unsafe { (entry.block().as_ref(), entry.of().as_ref()) })
    }

    /// Whether the token at a position is in a range.
    #[cold]
    pub(crate) fn has(&self, at: u32) -> bool {
        let upto = self.ranges.partition_point(|range| range.base <= at);
        self.ranges.get(upto.wrapping_sub(1)).is_some_and(|range| at - range.base <= range.more)
    }
}

/// The ranges in use, in order, and the place of the next one.
struct Ranges<B, K: Delivered> {
    live: Vec<Arc<Range<B, K>>>,
    space: Space,
    /// The directory of the current table. It has room for more blocks.
    directory: Blocks<B, K>,
    /// The number of blocks in the directory.
    blocks: usize,
}

impl<B: Pages, K: Delivered> Ranges<B, K> {
    fn table(&self) -> Table<B, K> {
        Table { ranges: self.live.iter().cloned().collect(), directory: self.directory.clone() }
    }

    /// Makes a directory of the blocks of all ranges, with room for at least one more: twice as
    /// large if the last one was full.
    fn rebuild(&mut self) {
        self.blocks = self.live.iter().map(|range| range.counts.len()).sum();
        let directory = Directory::with_room(self.blocks + 1);
        for range in &self.live {
            range.counts.each_block(|index, block| directory.add(range.base + index, block, NonNull::from(&**range)));
        }
        self.directory = directory;
    }
}

/// The blocks for which the first directory has room.
const FIRST: usize = 1;

/// The state that all handles of a token table share.
///
/// Invariant: the table owns `delivered - returned` references to each page of a range, modulo
/// 2^32. A thread that adds to `returned` owns as many references.
#[repr(C)]
pub(crate) struct Shared<B: Pages, K: Delivered = Count> {
    /// The ranges in use, as returning threads read them.
    pub(crate) snapshot: Snapshot<Table<B, K>>,
    /// The same ranges, as threads that change them lock them. No user code runs while the lock is
    /// held.
    ranges: Mutex<Ranges<B, K>>,
    foreign: AtomicU64,
    excess: AtomicU64,
    /// Held while `returned` of a block is written. It is in another cache line than `snapshot`,
    /// because each returning thread writes it, and each reads `snapshot`.
    pub(crate) returns: ReturnLock,
}

impl<B: Pages + Clone, K: Delivered> Shared<B, K> {
    pub(crate) fn new() -> Self {
        let (live, space, directory) = (Vec::new(), Space::new(), Directory::with_room(FIRST));
        Self {
            snapshot: Snapshot::new(),
            ranges: Mutex::new(Ranges { live, space, directory, blocks: 0 }),
            foreign: AtomicU64::new(0),
            excess: AtomicU64::new(0),
            returns: ReturnLock::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ranges<B, K>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assigns a range to a binding from which the socket has not received before. The binding must
    /// have pages. Only the receiver calls this; `directory` is its copy, which is replaced by the
    /// current one. Returns the position of the first token, and the counts.
    #[cold]
    pub(crate) fn attach(
        &self,
        binding: &B,
        directory: &mut Blocks<B, K>,
    ) -> Result<(u32, Arc<Counts<K>>), DeliverError> {
        self.release_drained();
        let (pages, counts, binding) = (binding.pages(), Arc::new(Counts::new()), binding.clone());
        let mut ranges = self.lock();
        let Ranges { live, space, .. } = &mut *ranges;
        let Some(first) = space.place(pages, live.iter().map(|range| range.tokens())) else {
            let taken = live.iter().map(|r| u64::from(r.more) + 1).sum();
            let exhausted = DeliverError::Exhausted { binding: binding.id(), pages, bindings: live.len(), taken };
            drop(ranges);
            return Err(exhausted);
        };
        let base = position(first);
        let at = live.partition_point(|range| range.base < base);
        if live.is_empty() {
            // Most sockets receive from one binding.
            live.reserve_exact(1);
        }
        live.insert(at, Arc::new(Range { binding, base, more: pages - 1, counts: counts.clone() }));
        *directory = ranges.directory.clone();
        let replaced = self.snapshot.replace(ranges.table());
        drop(ranges);
        drop(replaced);
        Ok((base, counts))
    }

    /// Makes the block of a page of the range that begins at `base`. Only the receiver calls this;
    /// `directory` is its copy, which is replaced by the current one.
    #[cold]
    pub(crate) fn add_block(
        &self,
        base: u32,
        counts: &Counts<K>,
        index: u32,
        directory: &mut Blocks<B, K>,
    ) -> Result<NonNull<Block<K>>, DeliverError> {
        let block = counts.add(index)?;
        let mut ranges = self.lock();
        let mut replaced = None;
        if ranges.blocks == ranges.directory.room() {
            ranges.rebuild();
            replaced = Some(self.snapshot.replace(ranges.table()));
        } else if let Ok(at) = ranges.live.binary_search_by_key(&base, |range| range.base) {
            ranges.directory.add(base + index, block, NonNull::from(&*ranges.live[at]));
            ranges.blocks += 1;
        }
        *directory = ranges.directory.clone();
        drop(ranges);
        drop(replaced);
        Ok(block)
    }

    /// Drops the handles on drained bindings. Returns how many there were. The calling thread
    /// releases the bindings, or the last thread that leaves a critical section does.
    #[cold]
    pub(crate) fn release_drained(&self) -> usize {
        let mut gone: Vec<Arc<Range<B, K>>> = Vec::new();
        let mut ranges = self.lock();
        // There is no reference to a page of a drained binding, and there never will be one, so the
        // table holds none.
        gone.extend(ranges.live.extract_if(.., |range| range.binding.drained()));
        let replaced: Option<Replaced<Table<B, K>>> = if gone.is_empty() {
            None
        } else {
            ranges.rebuild();
            Some(self.snapshot.replace(ranges.table()))
        };
        drop(ranges);
        drop(replaced);
        gone.len()
    }

    /// Counts returns that were ignored.
    #[cold]
    pub(crate) fn ignored(&self, foreign: u32, excess: u32) {
        self.foreign.fetch_add(foreign.into(), Ordering::Relaxed);
        self.excess.fetch_add(excess.into(), Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> TokenStats {
        let ranges = self.lock();
        TokenStats {
            foreign: self.foreign.load(Ordering::Relaxed),
            excess: self.excess.load(Ordering::Relaxed),
            bindings: ranges.live.len(),
            bytes: ranges.live.iter().map(|range| range.counts.len() * size_of::<Block<K>>()).sum(),
        }
    }
}

/// Closes the table when the last handle is dropped: no other thread receives or returns tokens.
impl<B: Pages, K: Delivered> Drop for Shared<B, K> {
    fn drop(&mut self) {
        let live = mem::take(&mut self.ranges.lock().unwrap_or_else(PoisonError::into_inner).live);
        for Range { binding, counts, .. } in live.iter().map(|range| &**range) {
            // SAFETY: the table owns these references (the invariant) and puts each once; the
            // page is one of the binding's.
            counts.each_held(|index, n| unsafe { binding.put(index, n) });
        }
    }
}
