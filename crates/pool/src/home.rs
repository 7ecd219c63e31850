//! Where a page goes when nobody uses it any more: the part of a pool that a dropped page meets.
//!
//! Reads as the cost does: the comparison that every drop makes, the array cache behind it, then the slow ways.
//!
//! ```text
//!   ops, domain           read by every drop on every core, and never written
//!   depot                 its gate likewise, but for a reclaim; its two lists, on lines of their own, by one drop in many
//!   cache                 the owner's alone
//!   remote                written by cores that are not the owner's, when there is no other way
//! ```
//!
//! "Am I in the poll context of the pool that owns this page?" is one comparison, of the page's home with a thread-local: the
//! context that this thread is in. Nothing of the pool is read for it, so that a core which drops pages of a pool that is
//! polled all the time shares no line with the one that polls it.

use crate::desc::Desc;
use crate::remote::{Link, Remote};
use crate::stats::Counters;
use netmem_percpu::{Depot, MAGAZINE, Pending};
use std::cell::Cell;
use std::hint::cold_path;
use std::mem::offset_of;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};

thread_local! {
    /// The innermost poll context of this thread, or null. Const and without a destructor: it is one instruction away, also
    /// while a thread ends and in signal handlers.
    static CONTEXT: Cell<*const Home> = const { Cell::new(ptr::null()) };
}

/// Sets the context back, also after a panic.
pub(crate) struct InContext(*const Home);

impl Drop for InContext {
    fn drop(&mut self) {
        CONTEXT.set(self.0);
    }
}

/// Runs `f` as if this thread were in no poll context: pages that it drops go home as from any other thread.
///
/// For signal handlers. One that interrupts a poll may find the array cache half changed; what it drops must not go there.
/// Costs two stores. A page of a pool that is alive and circulates then goes home without a lock or an allocation; one whose pool has
/// been closed, or has no cache, goes to its provider, which takes a lock, and may free the pool: not for handlers.
///
/// ```
/// # use netmem_pool::{Frag, Private};
/// extern "C" fn on_signal(_: i32) {
///     netmem_pool::outside_context(|| {
///         // drop what was to be dropped
///     });
/// }
/// ```
pub fn outside_context<R>(f: impl FnOnce() -> R) -> R {
    let _back = InContext(CONTEXT.replace(ptr::null()));
    f()
}

/// The slow ways home. Each takes over the page.
pub(crate) struct Ops {
    /// In the owner's poll context, with the cache full.
    pub(crate) overflow: unsafe fn(NonNull<Home>, NonNull<Desc>),
    /// On any other thread, or outside a poll, where the depot does not take it.
    pub(crate) elsewhere: unsafe fn(NonNull<Home>, NonNull<Desc>),
}

#[repr(C, align(128))]
pub(crate) struct Home {
    ops: &'static Ops,
    /// Identity of the DMA domain that pages of this home are mapped in, or 0.
    domain: usize,
    /// Collects what is dropped elsewhere, if the pool wants it collected.
    pub(crate) depot: Option<Depot>,
    pub(crate) cache: Cache,
    pub(crate) remote: Line<Remote>,
}

/// A value on lines of its own.
#[repr(align(128))]
pub(crate) struct Line<T>(pub(crate) T);

impl Home {
    pub(crate) fn new(ops: &'static Ops, domain: usize, cache: Cache, depot: Option<Depot>, remote: Remote) -> Self {
        Self { ops, domain, depot, cache, remote: Line(remote) }
    }

    #[inline]
    pub(crate) fn domain(&self) -> usize {
        self.domain
    }

    /// Makes this the thread's context until the value returned is dropped. The caller has the pool by exclusive reference, and
    /// keeps it so long.
    pub(crate) fn enter(&self) -> InContext {
        let outer = CONTEXT.get();
        self.cache.outer.set(outer);
        CONTEXT.set(self);
        InContext(outer)
    }

    /// Whether this thread is in the home's context, and perhaps in another's inside of that.
    #[inline(always)]
    fn is_outer_context(home: *const Self) -> bool {
        let mut at = CONTEXT.get();
        while !at.is_null() && at != home {
            // SAFETY: a context that this thread is in is one of a pool that is being polled, further up on its stack.
            at = unsafe { (*at).cache.outer.get() };
        }
        !at.is_null()
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
            if CONTEXT.get() != home.as_ptr() {
                cold_path();
                return Self::take_back_elsewhere(home, desc);
            }
            Self::take_back_here(home, desc);
        }
    }

    /// Equal: this thread is in the poll context, and a thread is in one place at a time.
    #[inline(always)]
    unsafe fn take_back_here(home: NonNull<Self>, desc: NonNull<Desc>) {
        // SAFETY: the caller's.
        unsafe {
            let at = home.as_ptr();
            if !(*at).cache.push(desc) {
                cold_path();
                ((*at).ops.overflow)(home, desc);
            }
        }
    }

    /// Onto this CPU's magazine, if that has room. Nothing else, so that it needs no register but those it is called with.
    #[inline(never)]
    unsafe fn take_back_elsewhere(home: NonNull<Self>, desc: NonNull<Desc>) {
        // SAFETY: the caller's.
        unsafe {
            if !Self::is_outer_context(home.as_ptr())
                && let Some(depot) = Self::depot(home.as_ptr())
                && Depot::give_at_once(depot, item_of(desc))
            {
                return;
            }
            cold_path();
            Self::take_back_slowly(home, desc);
        }
    }

    /// In a context inside of this home's; or with a full magazine; or another way.
    #[cold]
    #[inline(never)]
    unsafe fn take_back_slowly(home: NonNull<Self>, desc: NonNull<Desc>) {
        // SAFETY: the caller's. Pages that others gave, and that come back because the depot has closed, keep the pool as ours does.
        unsafe {
            let at = home.as_ptr();
            if Self::is_outer_context(at) {
                return Self::take_back_here(home, desc);
            }
            let past = |late| ((*at).ops.elsewhere)(home, desc_of(late));
            if let Some(depot) = Self::depot(at)
                && Depot::give(depot, item_of(desc), past)
            {
                return;
            }
            ((*at).ops.elsewhere)(home, desc);
        }
    }

    /// # Safety
    ///
    /// The home is alive; the depot, which is one of its fields, may be used as long.
    #[inline(always)]
    unsafe fn depot(at: *const Self) -> Option<*const Depot> {
        // SAFETY: the caller's.
        unsafe { (*at).depot.as_ref().map(ptr::from_ref) }
    }

    /// Takes up to [`MAGAZINE`] pages that nobody uses.
    ///
    /// # Safety
    ///
    /// As for [`take_back`](Self::take_back), of each of them; there is at least one.
    pub(crate) unsafe fn take_back_many(home: NonNull<Self>, descs: &[NonNull<Desc>]) {
        // SAFETY: the caller's.
        unsafe {
            let at = home.as_ptr();
            if Self::is_outer_context(at) {
                return descs.iter().for_each(|&desc| Self::take_back_here(home, desc));
            }
            let mut items = [NonZeroUsize::MIN; MAGAZINE];
            items.iter_mut().zip(descs).for_each(|(item, &desc)| *item = item_of(desc));
            let given = match Self::depot(at) {
                Some(depot) if descs.len() >= WORTH_A_MAGAZINE => Depot::give_many(depot, &items[..descs.len()]),
                _ => 0,
            };
            // Those that are left keep the pool.
            descs[given..].iter().for_each(|&desc| Self::take_back_elsewhere(home, desc));
        }
    }
}

/// The unlocked array of pages at hand, most recently used last, and an unbounded list behind it.
///
/// ```text
///   │ null │ page │ page │ page │      │      │
///     bottom               newest        last
/// ```
/// Two pointers say all: an empty cache's newest is the null at the bottom, a full one's is the last place.
///
/// Invariant (*owner's*): everything but the counters, which anyone may read, is touched only by whoever has the pool by
/// exclusive reference or is in its poll context; no reference into it lives across a call that could drop a page.
#[repr(C, align(128))]
pub(crate) struct Cache {
    newest: Cell<*mut Place>,
    last: Cell<*mut Place>,
    bottom: *mut Place,
    /// Bytes in a page: here, where every allocation looks anyway.
    pub(crate) page_size: u32,
    places: u32,
    spill: Cell<*mut Link>,
    /// Magazines that came back and are still full.
    pub(crate) pending: Cell<Pending>,
    /// The context that this thread was in when it entered this one.
    outer: Cell<*const Home>,
    /// Pages taken from the provider and not given back by the owner.
    pub(crate) held: Cell<u64>,
    pub(crate) counters: Counters,
}

type Place = Option<NonNull<Desc>>;

impl Cache {
    /// For `capacity` pages of `page_size` bytes.
    pub(crate) fn new(capacity: u32, page_size: u32) -> Self {
        let places: Box<[Place]> = vec![None; capacity as usize + 1].into();
        let bottom = Box::into_raw(places).cast::<Place>();
        Self {
            newest: Cell::new(bottom),
            // SAFETY: the last of the places just made.
            last: Cell::new(unsafe { bottom.add(capacity as usize) }),
            bottom,
            page_size,
            places: capacity,
            spill: Cell::new(ptr::null_mut()),
            pending: Cell::default(),
            outer: Cell::new(ptr::null()),
            held: Cell::new(0),
            counters: Counters::default(),
        }
    }

    /// The fast way out. Counts nothing: [`popped`](Self::popped) knows.
    #[inline(always)]
    pub(crate) fn pop(&self) -> Option<NonNull<Desc>> {
        let newest = self.newest.get();
        // SAFETY: a place that has a page, or the bottom, where there is none.
        let desc = unsafe { *newest }?;
        // SAFETY: not the bottom.
        self.newest.set(unsafe { newest.sub(1) });
        Some(desc)
    }

    /// The fast way in; false if the array is full.
    #[inline(always)]
    fn push(&self, desc: NonNull<Desc>) -> bool {
        let newest = self.newest.get();
        if newest == self.last.get() {
            return false;
        }
        // SAFETY: there is a place behind it.
        unsafe {
            *newest.add(1) = Some(desc);
            self.newest.set(newest.add(1));
        }
        self.counters.recycle_cached.bump();
        true
    }

    /// Pages in the array.
    fn len(&self) -> usize {
        // SAFETY: of the same array.
        unsafe { self.newest.get().offset_from_unsigned(self.bottom) }
    }

    /// Places in the array.
    pub(crate) fn capacity(&self) -> usize {
        // SAFETY: of the same array.
        unsafe { self.last.get().offset_from_unsigned(self.bottom) }
    }

    /// How many pages went the fast way out: those that came in and are not there any more.
    pub(crate) fn popped(&self) -> u64 {
        let came = self.counters.recycle_cached.get().wrapping_add(self.counters.filled.get());
        came.wrapping_sub(self.len() as u64)
    }

    /// The slow way in: into the array, or onto the list behind it.
    pub(crate) fn put(&self, desc: NonNull<Desc>) {
        if self.len() == self.capacity() {
            return self.spill(desc);
        }
        // SAFETY: there is a place behind the newest.
        unsafe { *self.newest.get().add(1) = Some(desc) };
        self.grew(1);
    }

    /// Where the next pages go, if there is room for a whole magazine of them. The caller writes them there and says
    /// [`grew`](Self::grew), before anybody else uses the cache.
    pub(crate) fn room_for_magazine(&self) -> Option<*mut Place> {
        // SAFETY: there are places behind the newest.
        (self.capacity() - self.len() >= MAGAZINE).then(|| unsafe { self.newest.get().add(1) })
    }

    /// So many pages were written behind the newest.
    pub(crate) fn grew(&self, n: usize) {
        // SAFETY: there are that many places, for they were written.
        self.newest.set(unsafe { self.newest.get().add(n) });
        self.counters.filled.add(n as u64);
    }

    /// The slow way out: of the array, or else of the list behind it.
    pub(crate) fn take(&self) -> Option<NonNull<Desc>> {
        let Some(desc) = self.pop() else { return self.unspill() };
        self.counters.filled.add(u64::MAX);
        Some(desc)
    }

    /// From now on every page overflows.
    pub(crate) fn disable(&self) {
        debug_assert_eq!(self.len(), 0);
        self.last.set(self.bottom);
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
        while self.len() < self.capacity()
            && let Some(desc) = self.unspill()
        {
            self.put(desc);
        }
    }

    /// Takes a page off that list.
    fn unspill(&self) -> Option<NonNull<Desc>> {
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
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.bottom, self.places as usize + 1)) });
    }
}

/// Fewer pages than this go into this CPU's magazine one by one.
const WORTH_A_MAGAZINE: usize = 8;

/// A page as the depot knows it.
#[inline(always)]
pub(crate) fn item_of(desc: NonNull<Desc>) -> NonZeroUsize {
    desc.expose_provenance()
}

/// The page that the depot knows as `item`.
#[inline(always)]
pub(crate) fn desc_of(item: NonZeroUsize) -> NonNull<Desc> {
    NonNull::with_exposed_provenance(item)
}

/// Asks for a page's descriptor. A hint: costs no wait.
#[inline(always)]
pub(crate) fn prefetch(desc: NonNull<Desc>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(desc.as_ptr().cast_const().cast());
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
