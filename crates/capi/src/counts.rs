//! The three counts. Two are words in the user's own object; the third has memory of each CPU, and
//! so a handle.

use crate::handle::{self, Kind};
use crate::rcu::netmem_rcu_guard;
use crate::status::{Failure, netmem_status, status, value};
use netmem_refs::{PercpuRef, RcuRef, RefCount};
use std::ptr::NonNull;

/// A reference count in the user's object, changed by compare-and-swap: for objects that few
/// threads hold. It saturates instead of overflowing. Initialise it by netmem_refcount_init.
#[repr(C)]
#[derive(Debug)]
pub struct netmem_refcount {
    /// of the library
    pub private_count: u32,
}

/// A reference count in the user's object whose operations are one atomic addition each, also
/// netmem_rcuref_try_get: for objects that are looked up under RCU by many threads. Initialise it by
/// netmem_rcuref_init.
#[repr(C)]
#[derive(Debug)]
pub struct netmem_rcuref {
    /// of the library
    pub private_count: u32,
}

/// A reference count of each CPU: get and put touch no shared line until it is killed.
#[derive(Debug)]
pub struct netmem_percpu_ref(());

impl Kind for netmem_percpu_ref {
    type Value = PercpuRef;
    const NAME: &'static str = "netmem_percpu_ref";
    const NUMBER: u64 = 0x6e65_746d_656d_0004;
}

const _: () = assert!(
    size_of::<RefCount>() == size_of::<netmem_refcount>() && align_of::<RefCount>() == align_of::<netmem_refcount>()
);
const _: () =
    assert!(size_of::<RcuRef>() == size_of::<netmem_rcuref>() && align_of::<RcuRef>() == align_of::<netmem_rcuref>());

/// # Safety
///
/// Null, or an initialised count.
#[inline]
unsafe fn refcount<'a>(count: *const netmem_refcount) -> Result<&'a RefCount, Failure> {
    // SAFETY: `RefCount` is one atomic word (`repr(transparent)`), as compared above.
    unsafe { count.cast::<RefCount>().as_ref() }.ok_or_else(|| Failure::null("count"))
}

/// # Safety
///
/// Null, or an initialised count.
#[inline]
unsafe fn rcuref<'a>(count: *const netmem_rcuref) -> Result<&'a RcuRef, Failure> {
    // SAFETY: `RcuRef` is one atomic word (`repr(transparent)`), as compared above.
    unsafe { count.cast::<RcuRef>().as_ref() }.ok_or_else(|| Failure::null("count"))
}

/// Initialises a count to `n` holders. No other thread uses it yet. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_refcount_init(count: *mut netmem_refcount, n: u32) {
    if let Some(at) = NonNull::new(count) {
        // SAFETY: the caller has room for a count there.
        unsafe { at.cast::<RefCount>().write(RefCount::new(n)) };
    }
}

/// Adds a holder. The caller is one already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_refcount_get(count: *const netmem_refcount) {
    // SAFETY: as the header says.
    status(|| unsafe { refcount(count) }.map(RefCount::get));
}

/// Adds a holder, unless there is none any more: then false.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_refcount_try_get(count: *const netmem_refcount) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { refcount(count) }?.try_get())).unwrap_or(false)
}

/// Removes a holder. True if it was the last: the caller destroys the object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_refcount_put(count: *const netmem_refcount) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { refcount(count) }?.put())).unwrap_or(false)
}

/// How many holders there are now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_refcount_read(count: *const netmem_refcount) -> u32 {
    // SAFETY: as the header says.
    unsafe { refcount(count) }.map_or(0, RefCount::count)
}

/// Initialises a count to `n` holders. No other thread uses it yet. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_rcuref_init(count: *mut netmem_rcuref, n: u32) {
    if let Some(at) = NonNull::new(count) {
        // SAFETY: the caller has room for a count there.
        unsafe { at.cast::<RcuRef>().write(RcuRef::new(n)) };
    }
}

/// Adds a holder. The caller is one already. One atomic addition.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_rcuref_get(count: *const netmem_rcuref) {
    // SAFETY: as the header says.
    status(|| unsafe { rcuref(count) }.map(RcuRef::get));
}

/// Adds a holder, unless the object is dead: then false. One atomic addition. In the read-side
/// section in which the object was found; `guard` is that section's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_rcuref_try_get(count: *const netmem_rcuref, guard: *const netmem_rcu_guard) -> bool {
    value(|| {
        // SAFETY: as the header says.
        let guard = unsafe { netmem_rcu_guard::get(guard) }?;
        // SAFETY: as the header says.
        Ok(unsafe { rcuref(count) }?.try_get(guard))
    })
    .unwrap_or(false)
}

/// Removes a holder. True if it was the last: the caller destroys the object after a grace period,
/// by netmem_rcu_call. One atomic addition.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_rcuref_put(count: *const netmem_rcuref) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { rcuref(count) }?.put())).unwrap_or(false)
}

/// How many holders there are now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_rcuref_read(count: *const netmem_rcuref) -> u32 {
    // SAFETY: as the header says.
    unsafe { rcuref(count) }.map_or(0, RcuRef::count)
}

/// Makes a count with one holder: the caller.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_NO_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_create(count: *mut *mut netmem_percpu_ref) -> netmem_status {
    status(|| {
        let out = NonNull::new(count).ok_or_else(|| Failure::null("count"))?;
        let made = handle::create(PercpuRef::new()?);
        // SAFETY: the caller has room for a pointer there.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Adds a holder. The caller is one already. An addition on memory of this CPU until the kill.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_get(count: *const netmem_percpu_ref) {
    // SAFETY: as the header says.
    status(|| unsafe { handle::get(count) }.map(PercpuRef::get));
}

/// Adds a holder, unless there is none any more: then false.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_try_get(count: *const netmem_percpu_ref) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { handle::get(count) }?.try_get())).unwrap_or(false)
}

/// Adds a holder, unless the count was killed: then false.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_try_get_live(count: *const netmem_percpu_ref) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { handle::get(count) }?.try_get_live())).unwrap_or(false)
}

/// Removes a holder. True if it was the last, which is possible after the kill only: the caller
/// destroys the object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_put(count: *const netmem_percpu_ref) -> bool {
    // SAFETY: as the header says.
    value(|| Ok(unsafe { handle::get(count) }?.put())).unwrap_or(false)
}

/// Ends the counting on each CPU, and removes the first holder. `last` gets whether no holder is
/// left: the caller destroys the object then. A barrier on all CPUs of the process, some
/// microseconds.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_STATE (killed already),
/// NETMEM_ERR_SYSTEM (no membarrier: nothing happened).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_kill(count: *const netmem_percpu_ref, last: *mut bool) -> netmem_status {
    status(|| {
        let out = NonNull::new(last).ok_or_else(|| Failure::null("last"))?;
        // SAFETY: as the header says.
        let was_last = unsafe { handle::get(count) }?.kill()?;
        // SAFETY: the caller has room for a bool there.
        unsafe { out.write(was_last) };
        Ok(())
    })
}

/// Whether it was killed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_is_dying(count: *const netmem_percpu_ref) -> bool {
    // SAFETY: as the header says.
    unsafe { handle::get(count) }.is_ok_and(PercpuRef::is_dying)
}

/// Frees the count, after its last holder is gone.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_STATE (it has holders; it stays).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_percpu_ref_destroy(count: *mut netmem_percpu_ref) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        if !unsafe { handle::get(count) }?.is_zero() {
            return Err(Failure::Held);
        }
        // SAFETY: as the header says.
        unsafe { handle::close(count) }.map(drop)
    })
}
