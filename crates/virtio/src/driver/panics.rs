//! Panics of user code while the driver holds pages: of a [domain](netmem_pool::DmaDomain), a
//! [provider](netmem_pool::Provider), a log subscriber.
//!
//! A queue that stops has pages that its device may still write. A panic that unwound through there
//! would drop them, and they would be returned and used again. A chain that is completed has
//! several mappings, and a panic over one would leave the others. Each such call is therefore made
//! by [`Panics::call`], which keeps the panic until the work is done.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The first panic of several calls.
#[must_use = "a panic that was kept is to be resumed"]
#[derive(Default)]
pub(super) struct Panics(Option<Box<dyn Any + Send>>);

impl Panics {
    /// Calls user code. `None` if it panicked.
    pub(super) fn call<R>(&mut self, f: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(f)) {
            Ok(answer) => Some(answer),
            Err(payload) => {
                // The drop of a payload is user code, too.
                match self.0 {
                    None => self.0 = Some(payload),
                    Some(_) => std::mem::forget(payload),
                }
                None
            }
        }
    }

    /// Resumes the first panic, if there was one and this thread does not unwind already.
    pub(super) fn resume(self) {
        match self.0 {
            Some(payload) if !std::thread::panicking() => resume_unwind(payload),
            Some(payload) => std::mem::forget(payload),
            None => {}
        }
    }
}
