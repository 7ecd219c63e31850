//! Pools that wait for their last pages after their owner has dropped them: their names, the pages
//! in flight, and the time since then.
//!
//! Why a list: a page that is never returned keeps its pool's memory, and no owner is left that
//! could report it. The library starts no thread. It logs one event when a pool begins to linger.
//! [`lingering`] lists the pools at any time, and a [`LingerReminder`] logs them every minute for a
//! caller that drives it.

use crate::panics::Panics;
use crate::record::Record;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A pool that waits for its last pages.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Lingering {
    /// The pool's name.
    pub name: String,
    /// Pages still in flight.
    pub pages: u64,
    /// Time since the pool's owner was dropped.
    pub age: Duration,
}

static LINGERING: Mutex<Vec<(Arc<Record>, Instant)>> = Mutex::new(Vec::new());

/// The list. Pools whose last page was returned are removed from it first.
fn list() -> MutexGuard<'static, Vec<(Arc<Record>, Instant)>> {
    let mut list = LINGERING.lock().unwrap_or_else(PoisonError::into_inner);
    list.retain(|(record, _)| record.outstanding() > 0);
    list
}

/// Adds a pool that begins to linger.
pub(crate) fn begin(record: Arc<Record>, pages: u64, panics: &mut Panics) {
    list().push((record.clone(), Instant::now()));
    panics
        .call(|| netmem_percpu::trace::warn!(pool = record.name(), pages, "pool lingers until its last page is back"));
}

/// A pool whose end found the barrier refused, and how that is tried again. Returns false if it is
/// refused again.
struct Unfinished {
    pool: NonNull<()>,
    finish: unsafe fn(NonNull<()>, &mut Panics) -> bool,
}

// SAFETY: the owner has left, and any thread may return the pool's pages.
unsafe impl Send for Unfinished {}

static UNFINISHED: Mutex<Vec<Unfinished>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<Unfinished>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a pool for [`lingering`]. From now on `finish` is called with it, by one thread at a time,
/// until it returns true.
pub(crate) fn try_again(pool: NonNull<()>, finish: unsafe fn(NonNull<()>, &mut Panics) -> bool) {
    unfinished().push(Unfinished { pool, finish });
}

/// Tries all barriers again that were refused at the end of pools. A panic of a provider or a
/// domain goes on when all is done.
fn finish_all() {
    let mut panics = Panics::default();
    // Taken out: no lock is held while user code runs, and one thread tries for each pool.
    let mut tried = std::mem::take(&mut *unfinished());
    // SAFETY: `try_again`'s caller guarantees it.
    tried.retain(|pool| !unsafe { (pool.finish)(pool.pool, &mut panics) });
    if !tried.is_empty() {
        unfinished().append(&mut tried);
    }
    panics.resume();
}

/// The pools that linger now. Acquires a lock.
///
/// If the kernel refused the barrier at the end of a pool, so that pages stayed on other CPUs, it
/// is tried again here: one membarrier for each such pool. Its pages go to the provider.
///
/// # Panics
///
/// If the provider or the domain of such a pool panics. The pool's end is complete nevertheless.
#[must_use]
pub fn lingering() -> Vec<Lingering> {
    finish_all();
    list()
        .iter()
        .map(|(r, since)| Lingering { name: r.name().to_owned(), pages: r.outstanding(), age: since.elapsed() })
        .filter(|l| l.pages > 0)
        .collect()
}

/// Logs the pools that linger, every 60 seconds, for a caller that has a loop with a timer.
///
/// ```
/// use netmem_pool::LingerReminder;
/// use std::time::Instant;
///
/// let mut reminder = LingerReminder::new(Instant::now());
/// // In the program's loop, whenever it comes around:
/// let next = reminder.remind(Instant::now());
/// assert!(next > Instant::now()); // at the latest then
/// ```
#[derive(Debug)]
pub struct LingerReminder {
    next: Instant,
}

impl LingerReminder {
    /// Time between two reminders.
    pub const EVERY: Duration = Duration::from_secs(60);

    /// A reminder that is due for the first time 60 seconds after `now`.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { next: now + Self::EVERY }
    }

    /// Logs a warning for each pool that lingers, if a reminder is due, and returns when the next
    /// one is. Otherwise costs a comparison.
    pub fn remind(&mut self, now: Instant) -> Instant {
        if now >= self.next {
            self.next = now + Self::EVERY;
            for l in lingering() {
                netmem_percpu::trace::warn!(
                    pool = l.name,
                    pages = l.pages,
                    age_s = l.age.as_secs(),
                    "pool still lingers"
                );
            }
        }
        self.next
    }
}
