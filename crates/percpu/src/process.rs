//! The locks of this process. A forked child does not inherit them.
//!
//! ```text
//!   parent                                            child, after any fork
//!   │ free ──▶ slots │ CPU 0: taken │ CPU 1: 0 │...   │ 0 │ 0 │ 0 │...   wiped (MADV_WIPEONFORK)
//! ```
//!
//! A thread of the parent may hold one of these locks at the fork. The child does not have that
//! thread, so the child would wait for ever. The locks are therefore in memory that is zero in a
//! child, and zero is a lock that is free.
//!
//! Handlers of `pthread_atfork` would not do. While the C library runs another library's handler,
//! it lets threads register further ones, and does not run these for the fork that has begun. A
//! thread that registers handlers at its first use can then hold a lock at that fork. The address
//! sanitizer has such a handler.

use crate::cpus::areas;
use crate::error::NoMemory;
use crate::word::STRIDE;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Slots that are free, their words zero. The most recently used is taken first.
pub(crate) type Slots = Vec<usize>;

/// What the memory begins with. A [`CpuLock`] for each area comes after it.
#[repr(C, align(64))]
struct Process {
    /// Null: not made in this process yet.
    free: AtomicPtr<Mutex<Slots>>,
}

/// The lock of a CPU's words, in the portable version. A line for each, so that CPUs do not disturb
/// each other.
#[repr(align(64))]
pub(crate) struct CpuLock(AtomicBool);

/// A [`CpuLock`] that is taken, until this is dropped.
pub(crate) struct CpuLockGuard<'a>(&'a CpuLock);

impl CpuLock {
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<CpuLockGuard<'_>> {
        // Not `then_some`: it would make a `CpuLockGuard` in any case, and drop it, which frees the
        // lock of another thread.
        (!self.0.swap(true, Ordering::Acquire)).then(|| CpuLockGuard(self))
    }

    /// Waits for the thread that has the lock, if any. That thread may have lost its CPU, so the
    /// wait sleeps after some attempts.
    pub(crate) fn wait(&self) {
        let mut attempts = 0;
        while self.try_lock().is_none() {
            attempts += 1;
            match attempts {
                ..100 => std::hint::spin_loop(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

impl Drop for CpuLockGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}

/// Mapped by the first [`prepare`], and never unmapped.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// Maps the memory, so that a signal handler does not have to. Called before the first gate opens.
///
/// # Errors
///
/// There is no memory.
pub(crate) fn prepare() -> Result<(), NoMemory> {
    if !PROCESS.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    let bytes = (size_of::<Process>() + areas() * size_of::<CpuLock>()).next_multiple_of(STRIDE);
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, of zeros, at an address that the kernel chooses.
    let memory = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Err(NoMemory { bytes });
    }
    // Linux 4.14 and later wipe it. On an older kernel, a child may wait for a lock of a thread
    // that it does not have.
    // SAFETY: our own memory, in which nothing is yet.
    unsafe { libc::madvise(memory, bytes, libc::MADV_WIPEONFORK) };
    let first = PROCESS.compare_exchange(ptr::null_mut(), memory.cast(), Ordering::AcqRel, Ordering::Acquire);
    if first.is_err() {
        // SAFETY: mapped above, and another thread's memory is in use.
        unsafe { libc::munmap(memory, bytes) };
    }
    Ok(())
}

#[inline]
fn process() -> *const Process {
    let process = PROCESS.load(Ordering::Acquire);
    assert!(!process.is_null(), "the memory is mapped before the first gate opens");
    process
}

/// The locks of the portable version, one for each area.
#[inline]
pub(crate) fn cpu_locks() -> &'static [CpuLock] {
    // SAFETY: `prepare` maps so many behind a `Process`, and never unmaps them; zero is a lock that
    // is free.
    unsafe { std::slice::from_raw_parts(process().add(1).cast(), areas()) }
}

/// The free slots of this process. A child begins with none: the parent's free slots stay unused in
/// the child.
pub(crate) fn free_slots() -> MutexGuard<'static, Slots> {
    // SAFETY: mapped by `prepare` and never unmapped; zero is a null pointer.
    let at = unsafe { &(*process()).free };
    let mut free = at.load(Ordering::Acquire);
    if free.is_null() {
        let new = Box::into_raw(Box::new(Mutex::new(Slots::new())));
        free = match at.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(first) => {
                // SAFETY: made above, and another thread's list is in use.
                drop(unsafe { Box::from_raw(new) });
                first
            }
        };
    }
    // SAFETY: made by `Box::into_raw`, and never freed.
    unsafe { &*free }.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that is refused a lock does not free it.
    #[test]
    fn a_refused_lock_stays_taken() {
        let lock = CpuLock(AtomicBool::new(false));
        let taken = lock.try_lock().expect("free");
        assert!(lock.try_lock().is_none());
        assert!(lock.try_lock().is_none());
        drop(taken);
        assert!(lock.try_lock().is_some());
    }
}
