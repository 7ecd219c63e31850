//! Read-side sections and calls after a grace period: what `netmem_rcuref` needs around it.

use crate::callback;
use crate::status::{Failure, netmem_status, status};
use netmem_refs::rcu::{self, Guard};
use netmem_refs::{Owner, RcuRef};
use std::ffi::c_void;
use std::marker::PhantomData;

/// A read-side section. It exists while the callback of netmem_rcu_read runs.
#[derive(Debug)]
pub struct netmem_rcu_guard(PhantomData<*const ()>);

impl netmem_rcu_guard {
    /// # Safety
    ///
    /// Null, or the pointer that `netmem_rcu_read` passed to a callback that still runs.
    pub(crate) unsafe fn get<'a>(guard: *const Self) -> Result<&'a Guard, Failure> {
        // SAFETY: `netmem_rcu_read` made it of a guard, as the caller promises.
        unsafe { guard.cast::<Guard>().as_ref() }.ok_or_else(|| Failure::null("guard"))
    }
}

/// A read-side section. Runs on the calling thread, at once. It may call every function of the
/// library but those that wait. If it throws, the process aborts; it must not jump out.
pub type netmem_rcu_read_fn = Option<unsafe extern "C-unwind" fn(guard: *const netmem_rcu_guard, context: *mut c_void)>;

/// A call after a grace period. Runs on any thread that uses the library, outside of sections. It
/// may call every function of the library. If it throws, the process aborts; it must not jump out.
pub type netmem_rcu_call_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void)>;

/// Runs `section` in a read-side section: objects that are passed to netmem_rcu_call meanwhile, on
/// any thread, stay until it has returned. Sections may be nested. About 5 ns.
///
/// Errors: NETMEM_ERR_NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_rcu_read(section: netmem_rcu_read_fn, context: *mut c_void) -> netmem_status {
    status(|| {
        let section = section.ok_or_else(|| Failure::null("section"))?;
        // SAFETY: the caller promises it for this context.
        rcu::read(|guard| callback::run(|| unsafe { section(std::ptr::from_ref(guard).cast(), context) }));
        Ok(())
    })
}

struct Call {
    run: unsafe extern "C-unwind" fn(*mut c_void),
    context: *mut c_void,
}

// SAFETY: the header says that the call runs on any thread.
unsafe impl Send for Call {}

/// Runs `call` once, after each section that runs now has returned: it may free what they can see.
/// One allocation.
///
/// Errors: NETMEM_ERR_NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_rcu_call(call: netmem_rcu_call_fn, context: *mut c_void) -> netmem_status {
    status(|| {
        let run = call.ok_or_else(|| Failure::null("call"))?;
        // SAFETY: the caller promises it for this context.
        let release = |call: Call| callback::run(|| unsafe { (call.run)(call.context) });
        // An object that is retired at once: its release callback is the call.
        drop(Owner::<Call, RcuRef>::with_release(Call { run, context }, release));
        Ok(())
    })
}
