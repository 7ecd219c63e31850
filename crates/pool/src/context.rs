//! The poll context of a thread: which pool the thread is polling.
//!
//! **"Is this thread in the poll context of the pool that owns the page?"** is one comparison, of
//! the page's header with a thread-local pointer to the header that this thread has entered. The
//! comparison reads nothing of the pool. Therefore a core that drops pages outside of the context
//! shares no written line with the core that polls. If the two are equal, the thread has entered
//! the header, so there is a cache behind it.

use crate::cache::PolledHeader;
use crate::header::PoolHeader;
use std::cell::Cell;
use std::ptr;

thread_local! {
    /// The header of the innermost poll context that this thread is in, or null. It is const and
    /// has no destructor: reading it is one instruction, also while a thread ends and in signal
    /// handlers.
    static CONTEXT: Cell<*const PolledHeader> = const { Cell::new(ptr::null()) };
}

/// The header of the innermost poll context that this thread is in, or null.
#[inline(always)]
pub(crate) fn current() -> *const PolledHeader {
    CONTEXT.get()
}

/// Restores the outer context when it is dropped, also after a panic.
///
/// Contexts of a thread end in the reverse of the order in which they began, on the thread where
/// they began. Safe Rust has no other order, because each is the frame of a call. A library that
/// switches stacks (fibres, stackful coroutines) has: a fibre that is suspended in a poll would
/// leave its context behind, and the thread would return pages into the array cache of a pool that
/// another thread may poll. So a context that ends in another order ends the process.
pub(crate) struct ContextGuard {
    inner: *const PolledHeader,
    outer: *const PolledHeader,
}

impl ContextGuard {
    /// Makes `inner` this thread's context, or no pool's if it is null, until the value is dropped.
    #[inline]
    pub(crate) fn new(inner: *const PolledHeader) -> Self {
        Self { inner, outer: CONTEXT.replace(inner) }
    }

    /// The context outside of this one, or null.
    #[inline]
    pub(crate) fn outer(&self) -> *const PolledHeader {
        self.outer
    }
}

impl Drop for ContextGuard {
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

/// Runs `f` as if this thread were in no poll context: pages that `f` drops return as from any
/// other thread.
///
/// For signal handlers. If a handler interrupts a poll, the array cache may be half changed, so
/// pages that the handler drops must not go there. Costs two stores. If the page's pool is alive
/// and its pages circulate, the page then returns without a lock or an allocation. If the pool has
/// been closed, or has no cache, the page goes to its provider: that acquires a lock, and may free
/// the pool. Do not drop such pages in handlers.
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
    let _back = ContextGuard::new(ptr::null());
    f()
}

impl PolledHeader {
    /// Makes this the thread's context until the value returned is dropped. The caller has the pool
    /// by exclusive reference, and keeps it until then.
    #[inline]
    pub(crate) fn enter(&self) -> ContextGuard {
        let context = ContextGuard::new(self);
        self.cache.outer.set(context.outer());
        context
    }
}

impl PoolHeader {
    /// Whether this thread is in the header's context, or in a context that was entered inside of
    /// it.
    #[inline(always)]
    pub(crate) fn is_outer_context(header: *const Self) -> bool {
        Self::is_around(header, CONTEXT.get())
    }

    /// Whether the context `at` is the header's, or was entered inside of the header's.
    #[inline(always)]
    pub(crate) fn is_around(header: *const Self, mut at: *const PolledHeader) -> bool {
        while !at.is_null() && at.cast() != header {
            // SAFETY: a context that this thread is in is one of a pool that is being polled,
            // further up on its stack.
            at = unsafe { (*at).cache.outer.get() };
        }
        !at.is_null()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;
    use std::process::Command;

    /// Contexts that end in another order than the reverse of their beginning abort the process,
    /// and so does one that ends on another thread. Each case runs in a process of its own.
    #[test]
    fn contexts_that_end_out_of_order_abort() {
        const CASE: &str = "NETMEM_CONTEXTS_END";
        let at = |n: usize| ptr::without_provenance(n);
        let machine = |file: PathBuf| std::fs::read(file).unwrap()[18..20].to_vec();
        match std::env::var(CASE).as_deref() {
            Ok("in order") => drop(
                [ContextGuard::new(at(128)), ContextGuard::new(at(256))]
                    .map(Some)
                    .into_iter()
                    .rev()
                    .collect::<Vec<_>>(),
            ),
            Ok("crossed") => {
                let (first, second) = (ContextGuard::new(at(128)), ContextGuard::new(at(256)));
                drop(first);
                drop(second);
            }
            Ok("elsewhere") => {
                struct Moved(ContextGuard);
                // SAFETY: it is not sent by safe code; the case does what a switch of stacks would
                // do.
                unsafe impl Send for Moved {}
                let moved = Moved(ContextGuard::new(at(128)));
                let _ = std::thread::spawn(move || drop({ moved }.0)).join();
            }
            // An emulator runs this program, but not what it starts: bytes 18 and 19 of an ELF file
            // are its machine.
            _ if machine(env!("CARGO").into()) != machine(std::env::current_exe().unwrap()) => {
                eprintln!("skipped: contexts_that_end_out_of_order_abort: this program is for another machine");
            }
            _ => {
                for (case, signal) in
                    [("in order", None), ("crossed", Some(libc::SIGABRT)), ("elsewhere", Some(libc::SIGABRT))]
                {
                    let name = "context::tests::contexts_that_end_out_of_order_abort";
                    let mut child = Command::new(std::env::current_exe().unwrap());
                    let ended = child.args(["--exact", name, "--nocapture"]).env(CASE, case).output().unwrap();
                    assert_eq!(ended.status.signal(), signal, "{case}: {ended:?}");
                    assert_eq!(ended.status.success(), signal.is_none(), "{case}");
                }
            }
        }
    }
}
