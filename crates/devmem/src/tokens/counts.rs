//! Two numbers for each page of a binding: how often the page was delivered, and how often it was
//! returned.
//!
//! ```text
//!   block   │ delivered, of 16 pages │ returned, of the same │
//!            written by the receiver  written under the table's lock
//! ```
//!
//! The two numbers of a page are in different cache lines. So a line of `returned` stays with the
//! CPU that returns tokens, and only the lines of `delivered` pass from CPU to CPU.
//!
//! A block is allocated when one of its pages is first delivered. So the memory of a socket follows
//! what it receives, and not the size of the device. `directory.rs` finds the block of a token.

use super::error::DeliverError;
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering};
use std::alloc::{Layout, alloc};
use std::ptr::{self, NonNull};
use std::sync::PoisonError;

/// The number of pages in a block.
pub(crate) const BLOCK: u32 = if cfg!(loom) { 1 } else { 16 };

/// The position of a token in the space, counted from 0. Token 0 is the last one, because the first
/// token that is assigned is 1.
#[inline]
pub(crate) fn position(token: u32) -> u32 {
    token.wrapping_sub(1)
}

/// The number of deliveries of a page, and the socket to which it is delivered. Only the receiver
/// writes it. The number wraps around at 2^32.
pub(crate) trait Delivered: Default + Send + Sync + 'static {
    /// The type that identifies a socket of the table.
    type Holder: Copy;

    /// The number of deliveries, if `holder` is the socket to which the page was delivered last.
    ///
    /// This is an acquire: everything that the receiver did with the page before it delivered the
    /// page happens before what the caller does next.
    fn to(&self, holder: Self::Holder) -> Option<u32>;

    /// The number of deliveries to all sockets.
    fn times(&self) -> u32;
}

/// The number of deliveries of a page to the only socket of its table.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Count(AtomicU32);

impl Count {
    /// Counts a delivery.
    #[inline]
    pub(crate) fn add_one(&self) {
        // No other thread writes the number, so no read-modify-write is necessary. Release:
        // publishes what the receiver did with the page before.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }
}

impl Delivered for Count {
    type Holder = ();

    #[inline]
    fn to(&self, (): ()) -> Option<u32> {
        Some(self.0.load(Ordering::Acquire))
    }

    #[inline]
    fn times(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The numbers of [`BLOCK`] pages. The methods name a page by the position `at` of its token.
///
/// Invariant: the table owns `delivered - returned` references to a page, modulo 2^32.
#[repr(C, align(64))]
pub(crate) struct Block<K> {
    delivered: [K; BLOCK as usize],
    returned: [AtomicU32; BLOCK as usize],
}

impl<K: Delivered> Block<K> {
    pub(super) fn new() -> Self {
        Self { delivered: std::array::from_fn(|_| K::default()), returned: std::array::from_fn(|_| AtomicU32::new(0)) }
    }

    /// The number that the receiver writes, for page `at`.
    #[inline]
    pub(crate) fn delivered(&self, at: u32) -> &K {
        &self.delivered[place(at)]
    }

    #[inline]
    fn returned(&self, at: u32) -> &AtomicU32 {
        &self.returned[place(at)]
    }

    /// The number of references to page `at` that the table owns, for any socket. Exact if the
    /// caller is the receiver and no thread returns tokens of the page.
    #[inline]
    pub(crate) fn held(&self, at: u32) -> u32 {
        self.delivered(at).times().wrapping_sub(self.returned(at).load(Ordering::Relaxed))
    }

    /// The number of references to page `at` that the table owns for `holder`.
    #[inline]
    pub(crate) fn held_by(&self, at: u32, holder: K::Holder) -> u32 {
        let delivered = self.delivered(at).to(holder);
        delivered.map_or(0, |delivered| delivered.wrapping_sub(self.returned(at).load(Ordering::Relaxed)))
    }

    /// Removes one reference to page `at` from those of `holder`. Returns whether there was
    /// one. The caller owns this reference from then on, and puts it after the lock is released.
    #[inline]
    pub(crate) fn take_one(&self, at: u32, holder: K::Holder, _: &Locked<'_>) -> bool {
        take_one(self.delivered(at), self.returned(at), holder)
    }

    /// The same for `n` pages, all of this block. Returns a bit for each, that of the first one
    /// lowest.
    #[inline]
    pub(crate) fn take_each(&self, at: u32, n: u32, holder: K::Holder, _: &Locked<'_>) -> u32 {
        let pages = place(at)..place(at) + n as usize;
        let numbers = self.delivered[pages.clone()].iter().zip(&self.returned[pages]);
        (0..)
            .zip(numbers)
            .fold(0, |taken, (n, (delivered, returned))| taken | u32::from(take_one(delivered, returned, holder)) << n)
    }

    /// Removes all references to page `at` of `holder`. Returns how many these were.
    pub(crate) fn take_all(&self, at: u32, holder: K::Holder, _: &Locked<'_>) -> u32 {
        let n = self.held_by(at, holder);
        if n > 0 {
            let returned = self.returned(at);
            returned.store(returned.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
        }
        n
    }

    /// Prefetches both numbers of page `at`. `returned` is another CPU's if several threads return
    /// tokens; if it were fetched under the lock, the other threads would wait for it, too.
    #[inline]
    pub(crate) fn prefetch(&self, at: u32) {
        netmem_pool::prefetch::to_read(ptr::from_ref(self.delivered(at)));
        netmem_pool::prefetch::to_write(ptr::from_ref(self.returned(at)));
    }
}

#[cfg(not(loom))]
impl<K: Delivered> Block<K> {
    /// Prefetches what a delivery of page `at` to one of several sockets writes and reads. The
    /// returning CPU wrote `returned` last.
    #[inline]
    pub(crate) fn prefetch_delivery(&self, at: u32) {
        netmem_pool::prefetch::to_write(ptr::from_ref(self.delivered(at)));
        netmem_pool::prefetch::to_read(ptr::from_ref(self.returned(at)));
    }
}

/// The place in its block of the page with this number.
#[inline]
fn place(at: u32) -> usize {
    (at % BLOCK) as usize
}

/// Adds one to `returned` if `holder` has a reference to the page. Returns whether it had.
#[inline]
fn take_one<K: Delivered>(delivered: &K, returned: &AtomicU32, holder: K::Holder) -> bool {
    // `delivered` is read under the lock, and not before: another thread may have seen a later
    // number, and may have stored a `returned` that is greater than the earlier one.
    let delivered = delivered.to(holder);
    let before = returned.load(Ordering::Relaxed);
    let held = delivered.is_some_and(|delivered| delivered != before);
    // Without a branch: which tokens are valid cannot be predicted if a user returns invalid ones.
    returned.store(before.wrapping_add(held.into()), Ordering::Relaxed);
    held
}

/// The proof that the calling thread holds the lock of the returning threads.
pub(crate) struct Locked<'l>(#[allow(dead_code, reason = "it is held, not read")] MutexGuard<'l, ()>);

/// The lock of the threads that return tokens of a table. It is held for at most 16 tokens, and no
/// user code runs while it is held.
#[derive(Default)]
pub(crate) struct ReturnLock(Mutex<()>);

impl ReturnLock {
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The blocks of a binding on one socket. They exist as long as this value.
pub(crate) struct Counts<K: Delivered> {
    /// All blocks, each with the number of the first page, divided by [`BLOCK`].
    blocks: Mutex<Vec<(u32, NonNull<Block<K>>)>>,
}

// SAFETY: blocks consist of atomics, and this value owns them.
unsafe impl<K: Delivered> Send for Counts<K> {}
// SAFETY: as above.
unsafe impl<K: Delivered> Sync for Counts<K> {}

impl<K: Delivered> Counts<K> {
    pub(crate) fn new() -> Self {
        Self { blocks: Mutex::new(Vec::new()) }
    }

    /// Makes the block of the page `index`, which must not exist yet. Only the receiver calls this.
    pub(crate) fn add(&self, index: u32) -> Result<NonNull<Block<K>>, DeliverError> {
        let layout = Layout::new::<Block<K>>();
        // SAFETY: the size of a block is not 0.
        let block = NonNull::new(unsafe { alloc(layout) }.cast::<Block<K>>());
        let block = block.ok_or(DeliverError::NoMemory { bytes: layout.size() })?;
        // SAFETY: the memory was just allocated for a block.
        unsafe { block.write(Block::new()) };
        let mut blocks = self.lock();
        if blocks.is_empty() {
            // Most sockets of a program with many sockets have one block.
            blocks.reserve_exact(1);
        }
        blocks.push((index / BLOCK, block));
        Ok(block)
    }

    /// Calls `f` with the first page of each block.
    pub(crate) fn each_block(&self, mut f: impl FnMut(u32, NonNull<Block<K>>)) {
        self.lock().iter().for_each(|&(number, block)| f(number * BLOCK, block));
    }

    /// Calls `f` with the index of each page of which the table owns references, and their number.
    /// No other thread may receive or return tokens meanwhile.
    pub(crate) fn each_held(&self, mut f: impl FnMut(u32, u32)) {
        self.each_block(|first, block| {
            // SAFETY: this value owns the block.
            let block = unsafe { block.as_ref() };
            for (index, (delivered, returned)) in (first..).zip(block.delivered.iter().zip(&block.returned)) {
                let n = delivered.times().wrapping_sub(returned.load(Ordering::Relaxed));
                if n > 0 {
                    f(index, n);
                }
            }
        });
    }

    /// The number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u32, NonNull<Block<K>>)>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Delivered> Drop for Counts<K> {
    fn drop(&mut self) {
        self.each_block(|_, block| {
            // SAFETY: `add` allocated the block by the global allocator with the layout of its
            // type, as a box does. No thread uses it any more.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        });
    }
}

#[cfg(all(test, not(loom)))]
impl Block<Count> {
    /// Sets the number of deliveries of page `at`, and leaves the number of references as it is.
    pub(crate) fn start_at(&self, at: u32, delivered: u32) {
        let held = self.held(at);
        self.delivered(at).0.store(delivered, Ordering::Relaxed);
        self.returned(at).store(delivered.wrapping_sub(held), Ordering::Relaxed);
    }
}
