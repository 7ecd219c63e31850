//! The token table of a socket: the ranges of tokens, which all handles of the socket share, and
//! the end of the table.
//!
//! Why not a map of tokens? Linux keeps the fragments of a socket in an xarray under a lock: each
//! delivery inserts, each return removes, and all threads that return take turns. A user returns
//! millions of fragments per second, on many threads. Here a token is an index, so that a return is
//! one exchange of the count of its page.
//!
//! A socket has a 32-bit space of tokens. When the socket receives from a binding for the first
//! time, it assigns the binding a range of this space, with one number for each page. For each page
//! the socket counts how often it has delivered the page. A return decrements the count of its
//! page, and puts one reference to the page.
//!
//! ```text
//!   token      range (first ..= last, binding)    page = token - first    count of the page
//!   1042  ──►  1 ..= 5000, binding 7         ──►  1041               ──►  2: delivered twice more
//!              5001 ..= 9096, binding 9                                   than returned
//! ```
//!
//! The invariant: **if a count is n, the table owns n references to the page.** What can happen to
//! a page of a socket:
//!
//! ```text
//!             reserve            commit: count += n             return: count -= 1, if not 0
//!   unknown ──────────► 0 held ────────────────────► n held ─────────────────────► n - 1 held
//!               ▲         │ drained: the range           the last handle is dropped:
//!               └─────────┘ is removed                   all counted references are put
//! ```
//!
//! | handle | how many | what it may do |
//! | --- | --- | --- |
//! | the receiver, `&mut TokenTable` | one | make ranges, add to counts |
//! | a `Returner`, `Clone + Sync` | any number | decrement counts that are not 0 |
//! | the last handle | alone | everything |
//!
//! There is one receiver, so two receives never race. The end of the table races with nothing,
//! because every returning thread has a handle.
//!
//! # The races
//!
//! **Return against return.** Two threads return a token that was received once. The decrement is a
//! compare-and-swap from a number that is not 0, so only one of the two threads succeeds.
//!
//! ```text
//!   return                                  return
//!   count is 1
//!                                           count is 1
//!                                           exchange(1 -> 0), puts the page
//!   exchange(1 -> 0) fails: 0
//!   in excess, ignored
//! ```
//!
//! **Return against receive of the same page.** Each of the two changes the count by one atomic
//! operation, so neither change is lost. If the exchange of the return fails because of the
//! receive, the return reads the count again, and finds a larger one.
//!
//! ```text
//!   return                                  receive
//!   count is 1
//!                                           count += 1            (2)
//!   exchange(1 -> 0) fails: 2
//!   exchange(2 -> 1), puts one reference
//! ```
//!
//! **A guess against the first receive.** A user can guess a token, and return it before the socket
//! has delivered it. Before the addition of the commit, the count is 0 or there is no range, so the
//! return is ignored. After the addition, the table owns the reference, and the user may return it
//! at once.
//!
//! ```text
//!   return                                  receive
//!                                           reserve: range, count 0
//!   count is 0: ignored
//!                                           no error is possible from here on
//!                                           commit: count += 1
//!   exchange(1 -> 0), puts the page
//!                                           delivers the token of a page already returned
//! ```
//!
//! **The last handle against a return.** This race cannot happen: the returning thread has a
//! handle, so a handle that is dropped during the return is not the last one. The counts that the
//! last handle finds do not contain what the return has removed.
//!
//! ```text
//!   drop of the table                       return
//!   handles: 2 -> 1
//!                                           exchange(1 -> 0), puts the page
//!                                           handles: 1 -> 0
//!                                           puts what the other counts contain
//! ```
//!
//! **The last put against the end of the binding.** The put that returns the last page makes the
//! binding drained. Another thread may see this before the put has returned. It then removes the
//! range from the table, and drops the only handle on the binding.
//!
//! ```text
//!   return                                  another thread
//!   section begins, finds the range
//!   exchange(1 -> 0)
//!   put ── the last page is returned
//!                                           drained: removes the range from the table
//!   ── and still uses the binding
//!   section ends
//!                                           the handle is dropped, and with it the binding
//! ```
//! For this reason readers find ranges in a critical section. A table that was replaced is dropped,
//! with its handles, only after all critical sections that were open at the replacement have ended.
//!
//! **An old token against a new range.** If a binding is made again, it is a new binding with a new
//! range. The numbers of a range that was removed are used again only after all other numbers of
//! the 2^32. No page of the old range is held then, because a range is removed only when all pages
//! of its binding are returned for good. A thread may still use the old table after a new one is
//! published. Its tokens are then in ranges of the old table, whose counts are 0, so they are
//! ignored.
//!
//! # Memory ordering
//!
//! The addition of a commit is a release, and the exchange of a return is an acquire. So a thread
//! that puts a page does this after everything that the receiver did with the page. Returns in
//! between do not break the release sequence, because they are read-modify-writes. Counts are zeros
//! before a thread can find them. A range is published, by the replacement of the table, before its
//! first token is delivered; so a thread that has the token finds the range. The last handle reads
//! the counts relaxed, because it follows the drops of all other handles.

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

/// The directory of a table. It is an `Arc` of the standard library, because a model has no race for
/// its count: it is cloned and dropped under a lock, or after a grace period.
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

    /// Makes a directory of the blocks of all ranges, with room for as many further blocks.
    fn rebuild(&mut self) {
        self.blocks = self.live.iter().map(|range| range.counts.len()).sum();
        let directory = Directory::with_room((2 * self.blocks).max(FIRST));
        for range in &self.live {
            range.counts.each_block(|index, block| directory.add(range.base + index, block, NonNull::from(&**range)));
        }
        self.directory = directory;
    }
}

/// The blocks for which the first directory has room.
const FIRST: usize = if cfg!(loom) { 1 } else { 2 };

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
    /// have pages. Only the receiver calls this. Returns the position of the first token, the
    /// counts, and the current directory.
    #[cold]
    pub(crate) fn attach(&self, binding: &B) -> Result<(u32, Arc<Counts<K>>, Blocks<B, K>), DeliverError> {
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
        let directory = ranges.directory.clone();
        let replaced = self.snapshot.replace(ranges.table());
        drop(ranges);
        drop(replaced);
        Ok((base, counts, directory))
    }

    /// Makes the block of a page of the range that begins at `base`. Only the receiver calls
    /// this. Returns the block and the current directory.
    #[cold]
    pub(crate) fn add_block(
        &self,
        base: u32,
        counts: &Counts<K>,
        index: u32,
    ) -> Result<(NonNull<Block<K>>, Blocks<B, K>), DeliverError> {
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
        let directory = ranges.directory.clone();
        drop(ranges);
        drop(replaced);
        Ok((block, directory))
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
