//! Where a page goes when nobody uses it any more: the part of a pool that a dropped page meets.
//!
//! Reads as the cost does: the comparison that every drop makes, the array cache behind it, then the two slow ways.
//!
//! ```text
//!   line 0   owner, ops, domain     read by every drop on every core; written when a poll begins and ends
//!   line 1   cache                  the owner's alone
//!   line 2   remote                 written by every core that is not the owner's
//! ```

use crate::desc::Desc;
use crate::remote::{Link, Remote};
use crate::stats::Counters;
use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    // Const and without a destructor: its address is one instruction away, also while a thread ends.
    static HERE: u8 = const { 0 };
}

/// A number that this thread has and no other thread that is alive.
#[inline]
fn here() -> usize {
    HERE.with(|h| ptr::from_ref(h).addr())
}

/// The slow ways home. Each takes over the page.
pub(crate) struct Ops {
    /// In the owner's poll context, with the cache full.
    pub(crate) overflow: unsafe fn(NonNull<Home>, NonNull<Desc>),
    /// On any other thread, or outside a poll.
    pub(crate) elsewhere: unsafe fn(NonNull<Home>, NonNull<Desc>),
}

#[repr(C, align(128))]
pub(crate) struct Home {
    /// [`here`] of the thread that is in this pool's poll context, or 0.
    owner: AtomicUsize,
    ops: &'static Ops,
    /// Identity of the DMA domain that pages of this home are mapped in, or 0.
    domain: usize,
    pub(crate) cache: Cache,
    pub(crate) remote: Line<Remote>,
}

/// A value on lines of its own.
#[repr(align(128))]
pub(crate) struct Line<T>(pub(crate) T);

impl Home {
    /// A home with an array cache of `capacity` pages.
    pub(crate) fn new(ops: &'static Ops, domain: usize, capacity: usize, remote: Remote) -> Self {
        Self { owner: AtomicUsize::new(0), ops, domain, cache: Cache::new(capacity), remote: Line(remote) }
    }

    #[inline]
    pub(crate) fn domain(&self) -> usize {
        self.domain
    }

    /// Makes this thread the owner until the value returned is dropped, also by a panic. The caller has the pool by
    /// exclusive reference.
    pub(crate) fn enter(&self) -> InContext<'_> {
        debug_assert_eq!(self.owner.load(Ordering::Relaxed), 0);
        self.owner.store(here(), Ordering::Relaxed);
        InContext(self)
    }

    /// Takes a page that nobody uses.
    ///
    /// # Safety
    ///
    /// `home` is the home of `desc`, which the caller gives up (*one owner*). The pool may be gone afterwards.
    #[inline(always)]
    pub(crate) unsafe fn take_back(home: NonNull<Self>, desc: NonNull<Desc>) {
        // No reference to the home is held across the calls below: they may end its life.
        // SAFETY: *home stays* until the page is back.
        unsafe {
            let at = home.as_ptr();
            if (*at).owner.load(Ordering::Relaxed) != here() {
                return ((*at).ops.elsewhere)(home, desc);
            }
            // Equal: this thread is in the poll context, and a thread is in one place at a time.
            if !(*at).cache.push(desc) {
                ((*at).ops.overflow)(home, desc);
            }
        }
    }
}

/// See [`Home::enter`].
pub(crate) struct InContext<'h>(&'h Home);

impl Drop for InContext<'_> {
    fn drop(&mut self) {
        self.0.owner.store(0, Ordering::Relaxed);
    }
}

/// The unlocked array of pages at hand, most recently used last, and an unbounded list behind it.
///
/// Invariant (*owner's*): everything but the counters, which anyone may read, is touched only by whoever has the pool by
/// exclusive reference or is in its poll context; no reference into it lives across a call that could drop a page.
#[repr(C, align(128))]
pub(crate) struct Cache {
    len: Cell<usize>,
    capacity: Cell<usize>,
    slots: *mut NonNull<Desc>,
    slots_len: usize,
    spill: Cell<*mut Link>,
    /// Pages taken from the provider and not given back by the owner.
    pub(crate) held: Cell<u64>,
    pub(crate) counters: Counters,
}

impl Cache {
    fn new(capacity: usize) -> Self {
        Self {
            len: Cell::new(0),
            capacity: Cell::new(capacity),
            slots: Box::into_raw(vec![NonNull::<Desc>::dangling(); capacity].into_boxed_slice()).cast(),
            slots_len: capacity,
            spill: Cell::new(ptr::null_mut()),
            held: Cell::new(0),
            counters: Counters::default(),
        }
    }

    #[inline]
    pub(crate) fn pop(&self) -> Option<NonNull<Desc>> {
        let n = self.len.get().checked_sub(1)?;
        self.len.set(n);
        // SAFETY: `n` is below the number of pages that were pushed.
        Some(unsafe { self.slots.add(n).read() })
    }

    #[inline]
    fn push(&self, desc: NonNull<Desc>) -> bool {
        let pushed = self.fill(desc);
        if pushed {
            self.counters.recycle_cached.bump();
        }
        pushed
    }

    /// Puts a page into the array, not counting it as recycled; false if it is full.
    #[inline]
    pub(crate) fn fill(&self, desc: NonNull<Desc>) -> bool {
        let n = self.len.get();
        if n == self.capacity.get() {
            return false;
        }
        // SAFETY: `n` is below the capacity.
        unsafe { self.slots.add(n).write(desc) };
        self.len.set(n + 1);
        true
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity.get()
    }

    /// From now on every page overflows.
    pub(crate) fn disable(&self) {
        debug_assert_eq!(self.len.get(), 0);
        self.capacity.set(0);
    }

    /// Puts a page onto the list behind the array.
    pub(crate) fn spill(&self, desc: NonNull<Desc>) {
        let link = link_of(desc);
        // SAFETY: the page is the cache's now, and so is its link.
        unsafe { (*link).set(self.spill.get()) };
        self.spill.set(link);
    }

    /// Moves pages from that list into the array, while there are any and room for them.
    pub(crate) fn refill(&self) {
        while self.len.get() < self.capacity.get()
            && let Some(desc) = self.unspill()
        {
            self.fill(desc);
        }
    }

    /// Takes a page off that list.
    pub(crate) fn unspill(&self) -> Option<NonNull<Desc>> {
        let link = self.spill.get();
        // SAFETY: what is on the list is the cache's.
        let (desc, next) = unsafe { first(link)? };
        self.spill.set(next);
        Some(desc)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `new`, with this length.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.slots, self.slots_len)) });
    }
}

/// The link of a page.
pub(crate) fn link_of(desc: NonNull<Desc>) -> *mut Link {
    // SAFETY: the offset stays within the descriptor.
    unsafe { desc.as_ptr().byte_add(offset_of!(Desc, link)).cast() }
}

/// The page at the front of a list, and the rest of it.
///
/// # Safety
///
/// `list` is null or the link of a page that the caller owns.
pub(crate) unsafe fn first(list: *mut Link) -> Option<(NonNull<Desc>, *mut Link)> {
    // SAFETY: a link lies in its descriptor at a fixed offset.
    unsafe {
        let desc = NonNull::new(list)?.byte_sub(offset_of!(Desc, link)).cast::<Desc>();
        Some((desc, (*list).next()))
    }
}
