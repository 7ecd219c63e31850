//! Read-side critical sections, and memory that outlives them.
//!
//! ```text
//!   reader                       writer
//!   rcu::read(|guard| {          removes the object from where readers find it
//!       finds the object         retires it: a section that begins now cannot find it
//!       uses it                  goes on, without waiting
//!   })  ── the last to leave ──► the object is released here, by the reader, outside the section
//! ```
//!
//! The collector is `seize` (why, and what it costs, is in `docs/design/rcuref.md`), one for the
//! whole process. Three things are added to it:
//!
//! * **A guard cannot leave its function.** `seize` keeps a thread's sections in a slot, which
//!   another thread gets when this thread ends. A guard that is kept in a thread local could live
//!   longer than that, and two threads would share a slot. So there is no guard to keep: [`read`]
//!   lends a guard to a closure.
//! * **A section may be entered in the destructor of a thread local**, because a last put can
//!   happen there. `seize` would panic; such a section gets a slot for itself.
//! * **Prompt release.** `seize` gathers retired objects per thread in batches of 32, and submits a
//!   batch only if it has an entry for each section that is open then. A file that is to be closed
//!   cannot wait for 31 other objects. If the program can notice the release, `retire` fills the
//!   batch with entries that release nothing, and submits it. A thread that retires many objects
//!   can share that cost among several of them: [`set_batching`].
//!
//! **A reader that stays.** No object that was retired meanwhile is released, so memory grows.
//! Readers record nothing, because sections are on hot paths. The side that waits does: one entry
//! of a batch is a probe, with the time at which it was submitted. While the probe is out, a
//! section is open that was open then. A thread that retires an object and finds the probe [too
//! old](report_stalls_after) reports that.
//!
//! **Panics.** If a section panics, it ends, and the panic is propagated. A panic of a release is
//! counted in [`faults`](crate::faults()), so it cannot keep other objects from being released.
//!
//! **After a fork** the child may enter sections and retire objects. A section that another thread
//! of the parent had open at the fork is open in the child for ever: then the child's deferred
//! releases never happen. Objects that other threads have retired, and that are not released yet,
//! are leaked in the child. At the fork no other thread may be entering its first section, or
//! ending: its lock would stay taken.

pub(crate) use seize::Collector;
use seize::{Guard as _, LocalGuard, OwnedGuard};
use std::cell::Cell;
use std::fmt;
use std::panic::RefUnwindSafe;
use std::ptr::{self, NonNull};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

static COLLECTOR: LazyLock<Collector> = LazyLock::new(Collector::new);

/// How many sections can be open at once in different slots: one for each thread that has entered a
/// section and has not ended, and one for each section that was entered while a thread ends. Raised
/// before such a section is entered.
static PARTICIPANTS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The collector, for a thread that has entered a section. Without a destructor, so it can be
    /// read at any time.
    static READY: Cell<Option<&'static Collector>> = const { Cell::new(None) };
    /// The thread has entered sections, and is ending.
    static ENDED: Cell<bool> = const { Cell::new(false) };
    /// Sections that the thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static EXIT: Exit = const { Exit };
    /// How the thread retires objects whose release the program can notice.
    static BATCHING: Cell<Batching> = const { Cell::new(Batching::PROMPT) };
    /// How many of these wait in the thread's batch, and when the first of them was retired.
    static WAITING: Cell<(u32, Option<Instant>)> = const { Cell::new((0, None)) };
}

/// Removes an ending thread from the participants. Made right after `seize` made its own thread
/// local, so that this one is destroyed first.
struct Exit;

impl Drop for Exit {
    fn drop(&mut self) {
        flush_waiting();
        READY.set(None);
        ENDED.set(true);
        PARTICIPANTS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Proof of being in a read-side critical section: an object that is found in it keeps its memory
/// until the section ends.
///
/// Only [`read`] lends one. It stays on its thread.
///
/// ```compile_fail
/// // A guard does not leave its section.
/// let guard = netmem_refs::rcu::read(|guard| guard);
/// ```
pub struct Guard {
    /// Dropped first: objects that are released when the collector's guard is dropped are released
    /// outside of the section.
    _depth: Depth,
    guard: CollectorGuard,
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

/// The collector's guard of a section.
enum CollectorGuard {
    /// The thread's, for any number of nested sections.
    Thread(LocalGuard<'static>),
    /// The section's own, because the thread is ending.
    Section(OwnedGuard<'static>),
}

/// Runs `section` in a read-side critical section.
///
/// Costs about 5 ns, a little less when nested, and touches no shared cache line. Keep sections
/// short: an object that is retired after the section began is not released before it ends. The
/// thread that leaves a section may release what other threads have retired: destructors and
/// callbacks run here, after the section, never in it.
#[inline]
pub fn read<R>(section: impl FnOnce(&Guard) -> R) -> R {
    match READY.get() {
        Some(collector) => section(&Guard::new(CollectorGuard::Thread(collector.enter()))),
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
        return section(&Guard::new(CollectorGuard::Section(collector.enter_owned())));
    }
    // `seize` registers the destructor of its thread local, then we register ours: the last one
    // runs first.
    drop(collector.enter());
    EXIT.with(|_| ());
    READY.set(Some(collector));
    section(&Guard::new(CollectorGuard::Thread(collector.enter())))
}

/// Subtracts a section's own slot from the count, however the section ends. Dropped after the
/// guard.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        PARTICIPANTS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Releases the objects that this thread has retired and that wait until a batch is full: at most
/// 31. They have no destructor and no release callback, because objects with one never wait, but
/// after [`set_batching`]. Costs a barrier on all CPUs of the process, some microseconds.
pub fn flush() {
    read(Guard::flush);
    report_stall();
}

/// How long a thread lets objects wait for others, before it lets them go together:
/// [`set_batching`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// So many objects are submitted together: 1 to 31. A larger number counts as 31, 0 as 1.
    pub objects: u32,
    /// They are submitted, however few, if the first of them was retired that long ago.
    pub age: Duration,
}

impl Batching {
    /// Each object is submitted when it is retired: the default.
    pub const PROMPT: Self = Self { objects: 1, age: Duration::ZERO };
}

impl Default for Batching {
    fn default() -> Self {
        Self::PROMPT
    }
}

/// Sets how long objects that this thread retires wait for others, before they are submitted to the
/// collector together.
///
/// An object is retired if it cannot be released at its last put: its count is an
/// [`RcuRef`](crate::RcuRef), it was in an [`RcuCell`](crate::RcuCell), or the thread is in a
/// section. Letting it go costs a barrier on all CPUs of the process, 1 to 17 microseconds. By
/// default, each object with a destructor or a release callback is submitted at once. A thread that
/// retires many thousand objects a second, and can wait for their release, shares that cost among
/// up to 31 objects.
///
/// **Note:** no other thread watches the time. The objects are submitted by a later call of this
/// thread: by a last put that retires another object, by [`flush`], by this function, or when the
/// thread ends. A thread that retires nothing for a while calls [`flush`] before it waits.
///
/// ```
/// use netmem_refs::{Owner, RcuRef, rcu};
/// use std::time::Duration;
///
/// rcu::set_batching(rcu::Batching { objects: 16, age: Duration::from_millis(1) });
/// for n in 0..1000 {
///     drop(Owner::<_, RcuRef>::new(format!("flow {n}")));
/// }
/// rcu::flush(); // before it waits for work
/// ```
pub fn set_batching(batching: Batching) {
    BATCHING.set(batching);
    flush_waiting();
}

/// Lets the objects go that wait for others.
fn flush_waiting() {
    if WAITING.get().0 > 0 {
        flush();
    }
}

/// Whether an object that is retired now, and those that wait, are to be submitted.
fn let_go() -> bool {
    let batching = BATCHING.get();
    // An ending thread has no other call to come.
    if batching.objects <= 1 || ENDED.get() {
        return true;
    }
    let (waiting, first) = WAITING.get();
    let first = first.unwrap_or_else(Instant::now);
    WAITING.set((waiting + 1, Some(first)));
    waiting + 1 >= batching.objects.min(31) || first.elapsed() >= batching.age
}

/// After which time a waiting thread reports a reader: in nanoseconds.
static STALL: AtomicU64 = AtomicU64::new(1_000_000_000);
/// When the probe that is out was submitted, in nanoseconds since [`START`], plus 1; 0 if none is
/// out.
static PROBE: AtomicU64 = AtomicU64::new(0);
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn now() -> u64 {
    u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX - 1).saturating_add(1)
}

/// Called when all sections have ended that were open when the probe was submitted.
unsafe fn probe_returns(_: *mut (), _: &Collector) {
    PROBE.store(0, Ordering::Relaxed);
}

/// For how long a reader has been in its section at least, while a retired object waits for it.
/// `None` if no object waits, or if that is known only of objects that are released in batches. For
/// statistics: one load and a reading of the clock.
#[must_use]
pub fn stalled() -> Option<Duration> {
    match PROBE.load(Ordering::Relaxed) {
        0 => None,
        since => Some(Duration::from_nanos(now().saturating_sub(since))),
    }
}

/// Sets how long a reader may be in its section before that is reported: one second if this is not
/// called, for the whole process.
///
/// The report is one warning of `tracing` in a process, with the age. It is made by a thread that
/// retires an object or calls [`flush`] and finds that an object which was retired that long ago
/// still waits. So there is no report as long as no thread retires anything; [`stalled`] can be
/// read at any time.
pub fn report_stalls_after(age: Duration) {
    STALL.store(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Reports a reader that stays. Called by the side that waits, after its section: a subscriber is
/// user code.
pub(crate) fn report_stall() {
    if let Some(age) = stalled()
        && age.as_nanos() >= STALL.load(Ordering::Relaxed).into()
    {
        crate::faults::stalled(age);
    }
}

impl Guard {
    #[inline]
    fn new(guard: CollectorGuard) -> Self {
        Self { _depth: Depth::enter(), guard }
    }

    /// Loads a pointer. The object that it points to is there until the section ends, if the
    /// pointer is always taken away before the object is retired.
    #[inline]
    pub(crate) fn protect<T>(&self, at: &AtomicPtr<T>) -> *mut T {
        match &self.guard {
            CollectorGuard::Thread(guard) => guard.protect(at, Ordering::Acquire),
            CollectorGuard::Section(guard) => guard.protect(at, Ordering::Acquire),
        }
    }

    /// Exchanges a pointer, if it is `current`. If it is not, the object that it points to is
    /// protected as by [`protect`](Self::protect).
    pub(crate) fn compare_exchange<T>(
        &self,
        at: &AtomicPtr<T>,
        current: *mut T,
        new: *mut T,
    ) -> Result<*mut T, *mut T> {
        let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
        match &self.guard {
            CollectorGuard::Thread(guard) => guard.compare_exchange(at, current, new, success, failure),
            CollectorGuard::Section(guard) => guard.compare_exchange(at, current, new, success, failure),
        }
    }

    /// Defers `release(at)` until every section that is open now has ended, including this one. The
    /// thread that leaves the last of them calls it, outside of any section. With `prompt`, the
    /// call does not wait for other retired objects.
    ///
    /// # Safety
    ///
    /// No section entered from now on finds `at`. `release` may be called on it then, once, by any
    /// thread, and does not panic.
    pub(crate) unsafe fn retire<T>(&self, at: NonNull<T>, release: unsafe fn(*mut T, &Collector), prompt: bool) {
        // SAFETY: the caller's promise.
        unsafe { self.defer(at.as_ptr(), release) };
        if prompt && let_go() {
            self.flush();
        }
    }

    /// # Safety
    ///
    /// As for [`retire`](Self::retire).
    unsafe fn defer<T>(&self, at: *mut T, release: unsafe fn(*mut T, &Collector)) {
        match &self.guard {
            // SAFETY: the caller's promise.
            CollectorGuard::Thread(guard) => unsafe { guard.defer_retire(at, release) },
            // SAFETY: the caller's promise.
            CollectorGuard::Section(guard) => unsafe { guard.defer_retire(at, release) },
        }
    }

    /// A batch goes if it has an entry for each open section. There are no more open sections than
    /// participants, and a participant is counted before it enters: if the number has not grown,
    /// the batch is gone. If it has grown, try again.
    #[cold]
    fn flush(&self) {
        WAITING.set((0, None));
        if PROBE.load(Ordering::Relaxed) == 0
            && PROBE.compare_exchange(0, now(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            // SAFETY: releases nothing.
            unsafe { self.defer(ptr::dangling_mut::<()>(), probe_returns) };
        }
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
            match &self.guard {
                CollectorGuard::Thread(guard) => guard.flush(),
                CollectorGuard::Section(guard) => guard.flush(),
            }
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}
