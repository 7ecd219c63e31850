//! The receive side of a socket's token table.
//!
//! A socket has one receiver, so this side needs no lock: it keeps a list of its own of the ranges,
//! and the last ones that it used by the bindings' ids. It locks the shared table only for a
//! binding that it has not met, and for pages whose block does not exist yet. A fragment is counted
//! last, when its delivery can no longer fail.

use super::counts::{Block, Count, Counts, Delivered};
use super::directory::Directory;
use super::error::DeliverError;
use super::pages::Pages;
use super::returner::Returner;
use super::stats::TokenStats;
use super::table::{Blocks, Shared};
use super::token::Token;
use crate::sync::Arc;
use std::fmt;
use std::ptr::NonNull;

/// The table of a socket's tokens, as its single receiver uses it. It makes [`Returner`]s.
///
/// When the last handle is dropped, this value or a returner, the table is closed: all references
/// that it still holds are dropped. Closing reads the numbers of each group of 16 pages from which
/// at least one page was ever received.
pub struct TokenTable<B: Pages + Clone> {
    ranges: Receiver<B>,
    /// The fragments that the current [`Receive`] has reserved. If there is none, those of the last
    /// [`Receive`].
    reserved: Vec<Reserved>,
}

/// The ranges of a table, as its single receiver finds them.
pub(crate) struct Receiver<B: Pages, K: Delivered = Count> {
    pub(crate) shared: Arc<Shared<B, K>>,
    /// The directory of the table when the receiver last made a block or a range. It has all blocks
    /// of the ranges that are still in use.
    directory: Blocks<B, K>,
    /// The known ranges, ordered by the binding's id. The list may contain bindings that were
    /// released; these are not looked up any more.
    known: Vec<Known<K>>,
    /// For each id modulo [`RECENT`], the range of the binding that was looked up last.
    recent: [Recent; RECENT],
}

const RECENT: usize = 8;

/// A range that is also in the list of known ranges; or, if it has no pages, none.
#[derive(Clone, Copy, Default)]
struct Recent {
    binding: u64,
    /// The position of the first token.
    base: u32,
    pages: u32,
}

/// A range, as the receiver needs it.
struct Known<K: Delivered> {
    binding: u64,
    /// The position of the first token.
    base: u32,
    pages: u32,
    /// Keeps the blocks, also after the range was removed.
    counts: Arc<Counts<K>>,
}

/// A page for which the receiver has found the numbers. They exist as long as the receiver does not
/// look up another page with `idle`.
pub(crate) struct Place<K> {
    /// The position of its token.
    pub(crate) at: u32,
    pub(crate) block: NonNull<Block<K>>,
}

impl<K> Place<K> {
    #[inline]
    pub(crate) fn token(&self) -> Token {
        Token(self.at + 1)
    }
}

/// The number of deliveries of a page of a known range. [`Receive::commit`] will add to it.
struct Reserved(NonNull<Count>);

// SAFETY: the numbers are atomics, in memory that the table keeps on any thread.
unsafe impl Send for Reserved {}
// SAFETY: as above; and a shared reference to this value has no methods.
unsafe impl Sync for Reserved {}

impl<B: Pages + Clone> TokenTable<B> {
    /// Makes the table of a new socket. Allocates little: a range and its counts are made for the
    /// first fragment of a binding.
    #[must_use]
    pub fn new() -> Self {
        Self { ranges: Receiver::new(), reserved: Vec::new() }
    }

    /// Returns another handle, which returns tokens.
    #[must_use]
    pub fn returner(&self) -> Returner<B> {
        Returner::new(self.ranges.shared.clone())
    }

    /// Begins a receiving call.
    #[inline]
    pub fn receive(&mut self) -> Receive<'_, B> {
        // Forget the fragments of the last call, whether it was committed or not.
        self.reserved.clear();
        Receive { table: self }
    }

    /// Reserves a token for one fragment in page `index`: the same as a [`Receive`] of one
    /// fragment.
    ///
    /// # Errors
    ///
    /// [`DeliverError`]: there is no room or no memory for the binding's range, or the binding has
    /// no such page.
    #[inline]
    pub fn reserve(&mut self, binding: &B, index: u32) -> Result<ReceiveOne<'_>, DeliverError> {
        self.reserved.clear();
        let place = self.ranges.find(binding, index, true)?;
        // SAFETY: the result borrows the table, so no other page is looked up meanwhile.
        let block = unsafe { place.block.as_ref() };
        Ok(ReceiveOne { delivered: block.delivered(place.at), token: place.token() })
    }

    /// Drops the table's handles on bindings that are unbound and whose pages were all returned.
    /// Returns how many there were.
    ///
    /// The table also does this when it receives from a new binding, and when a return is that of
    /// the last page. Call it for a socket that neither receives nor returns tokens.
    pub fn release_drained(&self) -> usize {
        self.ranges.shared.release_drained()
    }

    /// The counters of the table. Locks the list of ranges.
    #[must_use]
    pub fn stats(&self) -> TokenStats {
        self.ranges.shared.stats()
    }
}

impl<B: Pages + Clone, K: Delivered> Receiver<B, K> {
    pub(crate) fn new() -> Self {
        let (shared, directory) = (Arc::new(Shared::new()), Directory::with_room(0));
        Self { shared, directory, known: Vec::new(), recent: [Recent::default(); RECENT] }
    }

    /// Finds the numbers of page `index`, or makes them. `idle` means that the caller does not use
    /// any place that an earlier call found. Ranges that were removed can then be dropped from the
    /// list.
    #[inline]
    pub(crate) fn find(&mut self, binding: &B, index: u32, idle: bool) -> Result<Place<K>, DeliverError> {
        let recent = &self.recent[binding.id() as usize % RECENT];
        if recent.binding == binding.id()
            && index < recent.pages
            && let Some(entry) = self.directory.find(recent.base + index)
        {
            return Ok(Place { at: recent.base + index, block: entry.block() });
        }
        self.make(binding, index, idle)
    }

    /// Prefetches the cache lines that a delivery of page `index` uses, if the binding was looked
    /// up recently. Does nothing otherwise.
    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn prefetch(&self, binding: &B, index: u32) {
        let recent = &self.recent[binding.id() as usize % RECENT];
        if recent.binding == binding.id()
            && index < recent.pages
            && let Some(entry) = self.directory.find(recent.base + index)
        {
            // SAFETY: the list of known ranges keeps the block.
            let block = unsafe { entry.block().as_ref() };
            block.prefetch_delivery(recent.base + index);
        }
    }

    /// The same for a binding that was not looked up recently, or a block that does not exist yet.
    #[cold]
    fn make(&mut self, binding: &B, index: u32, idle: bool) -> Result<Place<K>, DeliverError> {
        let id = binding.id();
        let at = match self.known.binary_search_by_key(&id, |known| known.binding) {
            Ok(at) => at,
            Err(at) => self.meet(binding, index, at, idle)?,
        };
        let known = &self.known[at];
        self.recent[id as usize % RECENT] = Recent { binding: id, base: known.base, pages: known.pages };
        if index >= known.pages {
            return Err(DeliverError::NoSuchPage { binding: id, index, pages: known.pages });
        }
        let at = known.base + index;
        if let Some(entry) = self.directory.find(at) {
            return Ok(Place { at, block: entry.block() });
        }
        let block = self.shared.add_block(known.base, &known.counts, index, &mut self.directory)?;
        Ok(Place { at, block })
    }

    fn meet(&mut self, binding: &B, index: u32, mut at: usize, idle: bool) -> Result<usize, DeliverError> {
        let pages = binding.pages();
        if index >= pages {
            return Err(DeliverError::NoSuchPage { binding: binding.id(), index, pages });
        }
        let (base, counts) = self.shared.attach(binding, &mut self.directory)?;
        if idle {
            // If this list is the only holder of the counts, their range was removed.
            self.recent = [Recent::default(); RECENT];
            self.known.retain(|known| Arc::strong_count(&known.counts) > 1);
            at = self.known.partition_point(|known| known.binding < binding.id());
        }
        if self.known.is_empty() {
            self.known.reserve_exact(1);
        }
        self.known.insert(at, Known { binding: binding.id(), base, pages, counts });
        Ok(at)
    }
}

impl<B: Pages + Clone> Default for TokenTable<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: Pages + Clone> fmt::Debug for TokenTable<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenTable").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// One fragment that was reserved alone. If it is dropped without [`commit`](Self::commit), nothing
/// changes.
pub struct ReceiveOne<'t> {
    delivered: &'t Count,
    token: Token,
}

impl ReceiveOne<'_> {
    /// Counts the fragment, and returns its token, which can be returned from now on. Costs a
    /// store.
    ///
    /// # Safety
    ///
    /// The caller owns a reference to the page, which the table owns from then on.
    #[inline]
    pub unsafe fn commit(self) -> Token {
        self.delivered.add_one();
        self.token
    }
}

impl fmt::Debug for ReceiveOne<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveOne").field("token", &self.token).finish_non_exhaustive()
    }
}

/// A call that receives several fragments. It reserves them one after the other. When no error is
/// possible any more, it counts all of them together.
///
/// If it is dropped without [`commit`](Self::commit), nothing changes: the tokens that it returned
/// are not valid, and the caller still owns the references.
pub struct Receive<'t, B: Pages + Clone> {
    table: &'t mut TokenTable<B>,
}

impl<B: Pages + Clone> Receive<'_, B> {
    /// Reserves a fragment in page `index`, and returns the token that it will have. Counts
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`DeliverError`]: there is no room or no memory for the binding's range, or the binding has
    /// no such page. The fragments that were reserved before can still be committed.
    #[inline]
    pub fn reserve(&mut self, binding: &B, index: u32) -> Result<Token, DeliverError> {
        let TokenTable { ranges, reserved } = &mut *self.table;
        let place = ranges.find(binding, index, reserved.is_empty())?;
        // SAFETY: the table forgets no counts while a fragment is reserved.
        let delivered = NonNull::from(unsafe { place.block.as_ref() }.delivered(place.at));
        // The stores of the commit overlap their cache misses. A prefetch begins them earlier.
        netmem_pool::prefetch::to_write(delivered.as_ptr());
        reserved.push(Reserved(delivered));
        Ok(place.token())
    }

    /// Counts all reserved fragments. From then on each token can be returned as often as it was
    /// received. Costs a store for each fragment.
    ///
    /// # Safety
    ///
    /// For each reserved fragment, the caller owns a reference to its page, which the table owns
    /// from then on.
    #[inline]
    pub unsafe fn commit(self) {
        for delivered in &self.table.reserved {
            // SAFETY: as in `reserve`.
            unsafe { delivered.0.as_ref() }.add_one();
        }
    }
}

impl<B: Pages + Clone> fmt::Debug for Receive<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receive").field("reserved", &self.table.reserved.len()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::tokens::TokenRange;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A binding of 20 pages, and the number of references to them.
    #[derive(Clone)]
    struct Device(std::sync::Arc<AtomicU32>);

    // SAFETY: there is one, and it is never drained.
    unsafe impl Pages for Device {
        fn id(&self) -> u64 {
            7
        }

        fn pages(&self) -> u32 {
            20
        }

        unsafe fn put(&self, index: u32, n: u32) {
            assert!(index < 20 && self.0.fetch_sub(n, Ordering::Relaxed) >= n);
        }

        fn drained(&self) -> bool {
            false
        }
    }

    fn receive(table: &mut TokenTable<Device>, device: &Device, pages: &[u32]) {
        device.0.fetch_add(pages.len() as u32, Ordering::Relaxed);
        let mut receive = table.receive();
        pages.iter().for_each(|&index| assert_eq!(receive.reserve(device, index), Ok(Token(1 + index))));
        // SAFETY: the references were counted above.
        unsafe { receive.commit() };
    }

    /// A table whose numbers of page 3 wrap around after two more deliveries.
    fn before_the_wrap(device: &Device) -> TokenTable<Device> {
        let mut table = TokenTable::new();
        receive(&mut table, device, &[3]);
        let Ok(place) = table.ranges.find(device, 3, true) else { unreachable!("the binding has a page 3") };
        // SAFETY: the table keeps the block.
        unsafe { place.block.as_ref() }.start_at(place.at, u32::MAX - 1);
        table
    }

    /// Both numbers wrap around at 2^32. Proves MEM-5: a token can be returned as often as it was
    /// received, also then.
    #[test]
    fn numbers_wrap_around() {
        let device = Device(std::sync::Arc::default());
        let mut table = before_the_wrap(&device);
        let returner = table.returner();
        let give = |n| returner.return_tokens(&vec![TokenRange { start: 4, count: 1 }; n]).unwrap();
        assert_eq!((give(2), device.0.load(Ordering::Relaxed)), (1, 0), "one was delivered");
        receive(&mut table, &device, &[3, 3, 3, 3]);
        assert_eq!((give(3), give(3), device.0.load(Ordering::Relaxed)), (3, 1, 0));
        assert_eq!((give(1), table.stats().excess), (0, 4));
    }

    /// The end of the table puts what was delivered and not returned, also if only one of the two
    /// numbers has wrapped around. Proves MEM-7.
    #[test]
    fn closed_after_the_wrap() {
        let device = Device(std::sync::Arc::default());
        let mut table = before_the_wrap(&device);
        receive(&mut table, &device, &[3, 3, 3, 19]);
        assert_eq!(table.returner().return_tokens(&[TokenRange { start: 4, count: 1 }]), Ok(1));
        drop(table);
        assert_eq!(device.0.load(Ordering::Relaxed), 0);
    }

    /// A returning thread that is preempted while it holds the lock, in its critical section, does
    /// not block the receiver, which delivers a known page, and one of a new block. If the receiver
    /// locked, its own thread would hold the lock, and the test would not end.
    #[test]
    fn a_receiver_does_not_wait_for_a_returning_thread() {
        let device = Device(std::sync::Arc::default());
        let mut table = TokenTable::new();
        receive(&mut table, &device, &[3]);
        let shared = table.ranges.shared.clone();
        shared.snapshot.read(|_| {
            let locked = shared.returns.lock();
            receive(&mut table, &device, &[3, 4, 19]);
            drop(locked);
        });
        let all =
            [TokenRange { start: 4, count: 2 }, TokenRange { start: 20, count: 1 }, TokenRange { start: 4, count: 1 }];
        assert_eq!((table.returner().return_tokens(&all), device.0.load(Ordering::Relaxed)), (Ok(4), 0));
    }
}
