//! The stand-in for [`rcu`](../rcu.rs) in loom's models: the same interface, over a list of open
//! sections behind a lock.
//!
//! Loom cannot replace the atomics of `seize`. What a model of the pointers needs is the promise of
//! the collector: an object that is retired is released after all sections that are open then, by
//! the thread that leaves the last of them, outside of its section. The lock gives the same order
//! as the collector's barrier: a section is entered before the retire, and then the retire waits
//! for it; or after it, and then the reader sees that the object was taken out of the cell.

use crate::sync::{AtomicPtr, Mutex, Ordering};
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::ptr::NonNull;
use std::sync::PoisonError;

pub(crate) struct Collector;

#[derive(Default)]
struct Sections {
    entered: u64,
    open: Vec<u64>,
    retired: Vec<Retired>,
}

struct Retired {
    /// The sections that it waits for.
    sections: Vec<u64>,
    release: Box<dyn FnOnce()>,
}

// SAFETY: as `Guard::retire` asks, it may be released on any thread.
unsafe impl Send for Retired {}

loom::lazy_static! {
    static ref SECTIONS: Mutex<Sections> = Mutex::new(Sections::default());
}

loom::thread_local! {
    /// Sections that the thread is in.
    static DEPTH: Cell<u32> = Cell::new(0);
}

fn sections<R>(f: impl FnOnce(&mut Sections) -> R) -> R {
    f(&mut SECTIONS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether this thread is in a section.
pub(crate) fn in_section() -> bool {
    DEPTH.with(Cell::get) > 0
}

/// There are no clocks in a model.
pub(crate) fn report_stall() {}

/// Proof of being in a read-side critical section.
pub struct Guard {
    id: u64,
    _of_its_thread: PhantomData<*mut ()>,
}

/// Runs `section` in a read-side critical section.
pub fn read<R>(section: impl FnOnce(&Guard) -> R) -> R {
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    let id = sections(|all| {
        all.entered += 1;
        all.open.push(all.entered);
        all.entered
    });
    section(&Guard { id, _of_its_thread: PhantomData })
}

impl Drop for Guard {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
        let ready: Vec<_> = sections(|all| {
            all.open.retain(|&id| id != self.id);
            all.retired.iter_mut().for_each(|retired| retired.sections.retain(|&id| id != self.id));
            let (ready, waiting) = mem::take(&mut all.retired).into_iter().partition(|r| r.sections.is_empty());
            all.retired = waiting;
            ready
        });
        ready.into_iter().for_each(|retired| (retired.release)());
    }
}

impl Guard {
    pub(crate) fn protect<T>(&self, at: &AtomicPtr<T>) -> *mut T {
        at.load(Ordering::Acquire)
    }

    pub(crate) fn compare_exchange<T>(
        &self,
        at: &AtomicPtr<T>,
        current: *mut T,
        new: *mut T,
    ) -> Result<*mut T, *mut T> {
        at.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
    }

    /// # Safety
    ///
    /// No section entered from now on finds `at`. `release` may be called on it then, once, by any
    /// thread.
    pub(crate) unsafe fn retire<T>(&self, at: NonNull<T>, release: unsafe fn(*mut T, &Collector), _prompt: bool) {
        // SAFETY: all sections that were open at the retire have ended when this is called.
        let release = move || unsafe { release(at.as_ptr(), &Collector) };
        // SAFETY: only the lifetime of `T` changes; the caller promises that `release` may be
        // called later.
        let release = unsafe { mem::transmute::<Box<dyn FnOnce() + '_>, Box<dyn FnOnce()>>(Box::new(release)) };
        sections(|all| {
            let sections = all.open.clone();
            all.retired.push(Retired { sections, release });
        });
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}
