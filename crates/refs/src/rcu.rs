//! Read-side critical sections, and memory that outlives them.
//!
//! ```text
//!   reader                                  writer
//!   rcu::read(|guard| {                     takes the object out of where readers find it
//!       finds the object                    retires it: a section that begins now cannot find it
//!       uses it                             goes on, without waiting
//!   })  ── the last to leave ──────────────► the object is released here, by the reader, outside the section
//! ```
//!
//! The collector is `seize` (why, and what it costs, is in `docs/rcuref.md`), one for the whole process. Three things are
//! added to it:
//!
//! * **A guard cannot leave its function.** `seize` keeps a thread's sections in a slot, and gives the slot to another thread
//!   when this thread ends. A guard that is kept in a thread local could live longer than that, and two threads would share a
//!   slot. So there is no guard to keep: [`read`] lends a guard to a closure.
//! * **A section may be entered in the destructor of a thread local**, because a last put can happen there. `seize` would
//!   panic; such a section gets a slot for itself.
//! * **Prompt release.** `seize` gathers retired objects per thread in batches of 32, and lets a batch go only if it has an
//!   entry for each section that is open then. A file that is to be closed cannot wait for 31 other objects. If the program
//!   can notice the release, `retire` fills the batch with entries that release nothing, and lets it go.
//!
//! **Panics.** If a section panics, it ends, and the panic goes on. A panic of a release is counted in
//! [`faults`](crate::faults()), so it cannot keep other objects from being released.
//!
//! **After a fork** the child may enter sections and retire objects. A section that another thread of the parent had open at
//! the fork is open in the child for ever: then the child's deferred releases never happen. Objects that other threads had
//! retired, and that were not released yet, are leaked in the child. At the fork no other thread may be entering its first
//! section, or ending: its lock would stay taken.

pub(crate) use seize::Collector;
use seize::{Guard as _, LocalGuard, OwnedGuard};
use std::cell::Cell;
use std::fmt;
use std::panic::RefUnwindSafe;
use std::ptr::{self, NonNull};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

static COLLECTOR: LazyLock<Collector> = LazyLock::new(Collector::new);

/// How many sections can be open at once in different slots: one for each thread that has entered a section and has not ended,
/// and one for each section that was entered while a thread ends. Raised before such a section is entered.
static PARTICIPANTS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The collector, for a thread that has entered a section. Without a destructor, so it can be read at any time.
    static READY: Cell<Option<&'static Collector>> = const { Cell::new(None) };
    /// The thread has entered sections, and is ending.
    static ENDED: Cell<bool> = const { Cell::new(false) };
    /// Sections that the thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static EXIT: Exit = const { Exit };
}

/// Takes an ending thread out of the participants. Made right after `seize` made its own thread local, so that this one is
/// destroyed first.
struct Exit;

impl Drop for Exit {
    fn drop(&mut self) {
        READY.set(None);
        ENDED.set(true);
        PARTICIPANTS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Proof of being in a read-side critical section: an object that is found in it keeps its memory until the section ends.
///
/// Only [`read`] lends one. It stays on its thread.
///
/// ```compile_fail
/// // A guard does not leave its section.
/// let guard = netmem_refs::rcu::read(|guard| guard);
/// ```
pub struct Guard {
    /// Dropped first: objects that are released when the slot is left are released outside of the section.
    _depth: Depth,
    slot: Slot,
}

// A guard lends loads. It also retires, which runs no user code, so no panic interrupts that.
impl RefUnwindSafe for Guard {}

/// Counts the nested sections that the thread is in.
struct Depth;

impl Depth {
    #[inline]
    fn enter() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self
    }
}

impl Drop for Depth {
    #[inline]
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Whether this thread is in a section.
pub(crate) fn in_section() -> bool {
    DEPTH.get() > 0
}

/// The slot in which the section is entered.
enum Slot {
    /// The thread's, for any number of nested sections.
    Thread(LocalGuard<'static>),
    /// The section's own, because the thread is ending.
    Section(OwnedGuard<'static>),
}

/// Runs `section` in a read-side critical section.
///
/// Costs about 5 ns, a little less when nested, and touches no shared cache line. Keep sections short: an object that is
/// retired after the section began is not released before it ends. The thread that leaves a section may release what other
/// threads have retired: destructors and callbacks run here, after the section, never in it.
#[inline]
pub fn read<R>(section: impl FnOnce(&Guard) -> R) -> R {
    match READY.get() {
        Some(collector) => section(&Guard::new(Slot::Thread(collector.enter()))),
        None => first_read(section),
    }
}

#[cold]
#[inline(never)]
fn first_read<R>(section: impl FnOnce(&Guard) -> R) -> R {
    let collector: &'static Collector = &COLLECTOR;
    PARTICIPANTS.fetch_add(1, Ordering::SeqCst);
    if ENDED.get() {
        let _leave = Leave;
        return section(&Guard::new(Slot::Section(collector.enter_owned())));
    }
    // `seize` registers the destructor of its thread local, then we register ours: the last one runs first.
    drop(collector.enter());
    EXIT.with(|_| ());
    READY.set(Some(collector));
    section(&Guard::new(Slot::Thread(collector.enter())))
}

/// Takes a section's own slot out of the count, however the section ends. Dropped after the guard.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        PARTICIPANTS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Releases the objects that this thread has retired and that wait until a batch is full: at most 31. They have no
/// destructor and no release callback, because objects with one never wait. Costs a barrier on all CPUs of the process,
/// some microseconds.
pub fn flush() {
    read(Guard::flush);
}

impl Guard {
    #[inline]
    fn new(slot: Slot) -> Self {
        Self { _depth: Depth::enter(), slot }
    }

    /// Loads a pointer. The object that it points to is there until the section ends, if the pointer is always taken away
    /// before the object is retired.
    #[inline]
    pub(crate) fn protect<T>(&self, at: &AtomicPtr<T>) -> *mut T {
        match &self.slot {
            Slot::Thread(guard) => guard.protect(at, Ordering::Acquire),
            Slot::Section(guard) => guard.protect(at, Ordering::Acquire),
        }
    }

    /// Exchanges a pointer, if it is `current`. If it is not, the object that it points to is protected as by
    /// [`protect`](Self::protect).
    pub(crate) fn compare_exchange<T>(
        &self,
        at: &AtomicPtr<T>,
        current: *mut T,
        new: *mut T,
    ) -> Result<*mut T, *mut T> {
        let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
        match &self.slot {
            Slot::Thread(guard) => guard.compare_exchange(at, current, new, success, failure),
            Slot::Section(guard) => guard.compare_exchange(at, current, new, success, failure),
        }
    }

    /// Defers `release(at)` until every section that is open now has ended, including this one. The thread that leaves
    /// the last of them calls it, outside of any section. With `prompt`, the call does not wait for other retired
    /// objects.
    ///
    /// # Safety
    ///
    /// No section entered from now on finds `at`. `release` may be called on it then, once, by any thread, and does not
    /// panic.
    pub(crate) unsafe fn retire<T>(&self, at: NonNull<T>, release: unsafe fn(*mut T, &Collector), prompt: bool) {
        // SAFETY: the caller's promise.
        unsafe { self.defer(at.as_ptr(), release) };
        if prompt {
            self.flush();
        }
    }

    /// # Safety
    ///
    /// As for [`retire`](Self::retire).
    unsafe fn defer<T>(&self, at: *mut T, release: unsafe fn(*mut T, &Collector)) {
        match &self.slot {
            // SAFETY: the caller's promise.
            Slot::Thread(guard) => unsafe { guard.defer_retire(at, release) },
            // SAFETY: the caller's promise.
            Slot::Section(guard) => unsafe { guard.defer_retire(at, release) },
        }
    }

    /// A batch goes if it has an entry for each open section. There are no more open sections than participants, and a
    /// participant is counted before it enters: if the number has not grown, the batch is gone. If it has grown, try again.
    #[cold]
    fn flush(&self) {
        let mut entries = 0;
        loop {
            let participants = PARTICIPANTS.load(Ordering::SeqCst);
            if entries >= participants {
                return;
            }
            for _ in entries..participants {
                // SAFETY: releases nothing.
                unsafe { self.defer(ptr::dangling_mut::<()>(), |_, _| ()) };
            }
            entries = participants;
            match &self.slot {
                Slot::Thread(guard) => guard.flush(),
                Slot::Section(guard) => guard.flush(),
            }
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}
