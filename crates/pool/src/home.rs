//! The return of a page when its last holder drops it, and [`Home`], the header that every owner of pages has. A page's
//! *home* is the header of the owner to which the page returns.
//!
//! ```text
//!   RegionProvider, quarantine     │ Home │
//!   PagePool                       │ Home │ Cache │     this one can be entered: PollHome
//! ```
//!
//! A page's descriptor points to a [`Home`]: a function for the slow way, the DMA domain's identity, and a depot if the owner
//! collects pages by CPU. Dropping cores read these words all the time and the owner never writes them. Only a pool that is polled
//! has a cache behind its header ([`PollHome`]).
//!
//! **"Is this thread in the poll context of the pool that owns the page?"** is one comparison: of the page's home with
//! a thread-local pointer to the home that this thread has entered. The comparison reads nothing of the pool. A core
//! that drops pages elsewhere therefore shares no written line with the core that polls. If the two are equal, the
//! thread has entered the home, so there is a cache behind it.
//!
//! The functions are in the order of their cost: the comparison, the cache, this CPU's magazine, then the slow ways.

use crate::cache::PollHome;
use crate::desc::{Desc, cold_path};
use crate::panics::Panics;
use netmem_percpu::{CpuCache, Depot, MAGAZINE};
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};

thread_local! {
    /// The home of the innermost poll context that this thread is in, or null. It is const and has no destructor: reading it is one
    /// instruction, also while a thread ends and in signal handlers.
    static CONTEXT: Cell<*const PollHome> = const { Cell::new(ptr::null()) };
}

thread_local! {
    /// The address of the magazines from which this thread last took a page, in any pool for every thread. See
    /// [`Home::collect_at_once`]. The pool may have been freed.
    static LAST_CPUS: Cell<usize> = const { Cell::new(0) };
}

/// Records that this thread takes a page from these magazines.
#[inline(always)]
pub(crate) fn takes_from(cpus: *const CpuCache) {
    LAST_CPUS.set(cpus.expose_provenance());
}

/// Returns its argument, and hides from the compiler that the two are equal.
#[inline(always)]
fn opaque(number: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let mut number = number;
        // Not `pure`: the compiler would move a pure block behind a comparison and use the other operand there.
        // SAFETY: no instruction.
        unsafe { std::arch::asm!("/* {0} */", inlateout(reg) number, options(nomem, nostack, preserves_flags)) };
        number
    }
    #[cfg(not(target_arch = "x86_64"))]
    number
}

/// Restores the outer context when it is dropped, also after a panic.
///
/// Contexts of a thread end in the reverse of the order in which they began, on the thread where
/// they began. Safe Rust has no other order, because each is the frame of a call. A library that
/// switches stacks (fibres, stackful coroutines) has: a fibre that is suspended in a poll would
/// leave its context behind, and the thread would return pages into the array cache of a pool that
/// another thread may poll. So a context that ends in another order ends the process.
pub(crate) struct InContext {
    inner: *const PollHome,
    outer: *const PollHome,
}

impl InContext {
    /// Makes `inner` this thread's context, or no pool's if it is null, until the value is dropped.
    #[inline]
    pub(crate) fn new(inner: *const PollHome) -> Self {
        Self { inner, outer: CONTEXT.replace(inner) }
    }

    /// The context outside of this one, or null.
    #[inline]
    pub(crate) fn outer(&self) -> *const PollHome {
        self.outer
    }
}

impl Drop for InContext {
    #[inline]
    fn drop(&mut self) {
        if CONTEXT.get() != self.inner {
            out_of_order();
        }
        CONTEXT.set(self.outer);
    }
}

#[cold]
#[inline(never)]
fn out_of_order() -> ! {
    // Not a panic: pages may already be where two threads use them.
    eprintln!(
        "netmem: a poll context ended on another thread, or before a context that began in it; was a stack switched in a poll?"
    );
    std::process::abort()
}

/// Runs `f` as if this thread were in no poll context: pages that `f` drops return as from any other thread.
///
/// For signal handlers. If a handler interrupts a poll, the array cache may be half changed, so pages that the handler
/// drops must not go there. Costs two stores. If the page's pool is alive and its pages circulate, the page then
/// returns without a lock or an allocation. If the pool has been closed, or has no cache, the page goes to its
/// provider: that takes a lock, and may free the pool. Do not drop such pages in handlers.
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
    let _back = InContext::new(ptr::null());
    f()
}

/// A function that returns a page to its owner. It may free the home.
///
/// # Safety
///
/// The home is the page's, and the caller gives up the page (*one owner*).
pub(crate) type Return = unsafe fn(NonNull<Home>, NonNull<Desc>);

/// The header: the part of the owner that a dropped page needs. It is the first field of the owner, or at a fixed
/// offset in it, so that the owner's functions find the owner by the header's address.
#[repr(C, align(128))]
pub(crate) struct Home {
    /// Takes back a page that neither the cache nor the depot takes. Called on any thread.
    elsewhere: Return,
    /// Identity of the DMA domain that pages of this home are mapped in, or 0.
    domain: usize,
    /// For a pool of every thread: collects pages, wherever they are dropped. At most one of this field and the next is
    /// set.
    cpus: Option<Box<CpuCache>>,
    /// For a pool that is polled: collects pages that are dropped outside of the poll context, if the owner wants them
    /// collected.
    depot: Option<Depot>,
    /// Bytes in each page. The last field, because no return reads it.
    page_size: u32,
}

impl Home {
    pub(crate) fn new(elsewhere: Return, domain: usize, depot: Option<Depot>, page_size: u32) -> Self {
        Self { elsewhere, domain, cpus: None, depot, page_size }
    }

    /// The home of pages that any thread allocates.
    pub(crate) fn of_cpus(elsewhere: Return, domain: usize, cpus: CpuCache, page_size: u32) -> Self {
        Self { elsewhere, domain, cpus: Some(Box::new(cpus)), depot: None, page_size }
    }

    #[inline]
    pub(crate) fn page_size(&self) -> u32 {
        self.page_size
    }

    #[inline]
    pub(crate) fn domain(&self) -> usize {
        self.domain
    }

    #[inline]
    pub(crate) fn depot(&self) -> Option<&Depot> {
        self.depot.as_ref()
    }

    pub(crate) fn cpus(&self) -> Option<&CpuCache> {
        self.cpus.as_deref()
    }

    /// Whether this thread is in the home's context, or in a context that was entered inside of it.
    #[inline(always)]
    fn is_outer_context(home: *const Self) -> bool {
        Self::is_around(home, CONTEXT.get())
    }

    /// Whether the context `at` is the home's, or was entered inside of the home's.
    #[inline(always)]
    fn is_around(home: *const Self, mut at: *const PollHome) -> bool {
        while !at.is_null() && at.cast() != home {
            // SAFETY: a context that this thread is in is one of a pool that is being polled, further up on its stack.
            at = unsafe { (*at).cache.outer.get() };
        }
        !at.is_null()
    }

    /// Returns a page that is not in use to its owner.
    ///
    /// # Safety
    ///
    /// `home` is the home of `desc`, which the caller gives up (*one owner*). The pool may be gone afterwards.
    #[inline(always)]
    pub(crate) unsafe fn take_back(home: NonNull<Self>, desc: NonNull<Desc>) {
        // No reference to the home is held across the calls below, because they may free it.
        // SAFETY: *home stays* until the page is returned.
        unsafe {
            let context = CONTEXT.get();
            if context.cast() != home.as_ptr().cast_const() {
                cold_path();
                return Self::take_back_elsewhere(home, desc, context);
            }
            Self::take_back_here(home, desc);
        }
    }

    /// # Safety
    ///
    /// As for [`take_back`](Self::take_back), and this thread is in the home's context. It is therefore the thread that
    /// polls, and no other thread uses the cache.
    #[inline(always)]
    unsafe fn take_back_here(home: NonNull<Self>, desc: NonNull<Desc>) {
        // SAFETY: a home that was entered is the first field of a `PollHome`.
        unsafe {
            let cache = &raw const (*home.cast::<PollHome>().as_ptr()).cache;
            if !(*cache).push(desc) {
                cold_path();
                ((*cache).overflow)(home, desc);
            }
        }
    }

    /// Pushes onto this CPU's magazine, if there is room. The function does nothing else, so that it needs only the
    /// registers of its arguments.
    #[inline(never)]
    unsafe fn take_back_elsewhere(home: NonNull<Self>, desc: NonNull<Desc>, context: *const PollHome) {
        // SAFETY: the caller's.
        unsafe {
            if !Self::is_around(home.as_ptr(), context) && Self::collect_at_once(home, desc) {
                return;
            }
            Self::take_back_slowly(home, desc);
        }
    }

    /// Returns a page in the cases that are left: this thread is in a context inside of this home's; or the magazine is
    /// full; or the depot refuses, or there is none.
    #[cold]
    #[inline(never)]
    unsafe fn take_back_slowly(home: NonNull<Self>, desc: NonNull<Desc>) {
        // SAFETY: the caller's. Pages that other threads gave, and that the depot hands back because it has closed,
        // keep the pool as this page does.
        unsafe {
            let at = home.as_ptr();
            if Self::is_outer_context(at) {
                return Self::take_back_here(home, desc);
            }
            let elsewhere = (*at).elsewhere;
            let mut panics = Panics::default();
            let past = |late| {
                panics.call(|| elsewhere(home, desc_of(late)));
            };
            let collected = match Self::collectors_at(at) {
                (Some(depot), _) => Depot::give(depot, item_of(desc), past),
                (_, Some(cpus)) => CpuCache::push(cpus, item_of(desc), past),
                _ => false,
            };
            if !collected {
                panics.call(|| elsewhere(home, desc));
            }
            panics.resume();
        }
    }

    /// Pushes onto this CPU's magazine, if there is room. If it returns false, the page is still the caller's.
    ///
    /// A page that is dropped soon after its allocation was on this CPU's magazine just before. The page, its descriptor, its home, the
    /// gate and the magazine would be loads of which each waits for the one before, and the next pop waits for the length that this push
    /// stores. If the magazines are those from which this thread took its last page, their address is known without the page: the
    /// comparison is a branch, which the processor predicts, and the push starts at once.
    ///
    /// # Safety
    ///
    /// As for [`take_back`](Self::take_back).
    #[inline(always)]
    unsafe fn collect_at_once(home: NonNull<Self>, desc: NonNull<Desc>) -> bool {
        // SAFETY: the page keeps the home until it is collected.
        unsafe {
            match Self::collectors_at(home.as_ptr()) {
                (Some(depot), _) => Depot::give_at_once(depot, item_of(desc)),
                (_, Some(cpus)) => {
                    let last = LAST_CPUS.get();
                    let same = opaque(last);
                    if cpus.addr() == last {
                        return CpuCache::push_at_once(ptr::with_exposed_provenance(same), item_of(desc));
                    }
                    CpuCache::push_at_once(cpus, item_of(desc))
                }
                _ => false,
            }
        }
    }

    /// The depot and the CPU cache of a home, as pointers: a reference would have to be valid until the end of a call,
    /// and the home may be freed during the call.
    ///
    /// # Safety
    ///
    /// The home is alive, and both may be used as long.
    #[inline(always)]
    unsafe fn collectors_at(at: *const Self) -> (Option<*const Depot>, Option<*const CpuCache>) {
        // SAFETY: the caller's.
        unsafe { ((*at).depot.as_ref().map(ptr::from_ref), (*at).cpus.as_deref().map(ptr::from_ref)) }
    }

    /// Returns up to [`MAGAZINE`] pages that are not in use: all of them, also if user code panics over one.
    ///
    /// # Safety
    ///
    /// As for [`take_back`](Self::take_back), of each of them; there is at least one.
    pub(crate) unsafe fn take_back_many(home: NonNull<Self>, descs: &[NonNull<Desc>], panics: &mut Panics) {
        // SAFETY: the caller's.
        unsafe {
            let at = home.as_ptr();
            if Self::is_outer_context(at) {
                for &desc in descs {
                    panics.call(|| Self::take_back_here(home, desc));
                }
                return;
            }
            let mut items = [NonZeroUsize::MIN; MAGAZINE];
            items.iter_mut().zip(descs).for_each(|(item, &desc)| *item = item_of(desc));
            let items = &items[..descs.len()];
            let given = match Self::collectors_at(at) {
                _ if items.len() < WORTH_A_MAGAZINE => 0,
                (Some(depot), _) => Depot::give_many(depot, items),
                (_, Some(cpus)) => CpuCache::push_many(cpus, items),
                _ => 0,
            };
            // The pages that are left keep the pool alive.
            let context = CONTEXT.get();
            for &desc in &descs[given..] {
                panics.call(|| Self::take_back_elsewhere(home, desc, context));
            }
        }
    }
}

/// Fewer pages than this go into this CPU's magazine one by one.
const WORTH_A_MAGAZINE: usize = 8;

/// A page in the form in which the depot stores it.
#[inline(always)]
pub(crate) fn item_of(desc: NonNull<Desc>) -> NonZeroUsize {
    desc.expose_provenance()
}

/// The page that the depot stores as `item`.
#[inline(always)]
pub(crate) fn desc_of(item: NonZeroUsize) -> NonNull<Desc> {
    NonNull::with_exposed_provenance(item)
}

/// Prefetches a page's descriptor. The thread does not wait for it.
#[inline(always)]
pub(crate) fn prefetch(desc: NonNull<Desc>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(desc.as_ptr().cast_const().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = desc;
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/shared/emulated.rs"]
mod emulated;
#[cfg(all(test, not(loom)))]
#[path = "../tests/shared/skip.rs"]
mod skip;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::emulated::is_emulated;
    use super::skip::skip;
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    /// Contexts that end in another order than the reverse of their beginning abort the process,
    /// and so does one that ends on another thread. Each case runs in a process of its own.
    #[test]
    fn contexts_that_end_out_of_order_abort() {
        const CASE: &str = "NETMEM_CONTEXTS_END";
        let at = |n: usize| ptr::without_provenance(n);
        match std::env::var(CASE).as_deref() {
            Ok("in order") => {
                drop([InContext::new(at(128)), InContext::new(at(256))].map(Some).into_iter().rev().collect::<Vec<_>>())
            }
            Ok("crossed") => {
                let (first, second) = (InContext::new(at(128)), InContext::new(at(256)));
                drop(first);
                drop(second);
            }
            Ok("elsewhere") => {
                struct Moved(InContext);
                // SAFETY: it is not sent by safe code; the case does what a switch of stacks would
                // do.
                unsafe impl Send for Moved {}
                let moved = Moved(InContext::new(at(128)));
                let _ = std::thread::spawn(move || drop({ moved }.0)).join();
            }
            _ if is_emulated() => skip("it is emulated, and this program is for another machine"),
            _ => {
                for (case, signal) in
                    [("in order", None), ("crossed", Some(libc::SIGABRT)), ("elsewhere", Some(libc::SIGABRT))]
                {
                    let name = "home::tests::contexts_that_end_out_of_order_abort";
                    let mut child = Command::new(std::env::current_exe().unwrap());
                    let ended = child.args(["--exact", name, "--nocapture"]).env(CASE, case).output().unwrap();
                    assert_eq!(ended.status.signal(), signal, "{case}: {ended:?}");
                    assert_eq!(ended.status.success(), signal.is_none(), "{case}");
                }
            }
        }
    }
}
