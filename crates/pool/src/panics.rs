//! Panics in code that the user provided: a [domain](crate::DmaDomain), a
//! [provider](crate::Provider), a log subscriber.
//!
//! The pool calls such code while it holds pages that are in no list. If a panic unwound through
//! the pool then, those pages would be lost. Each call is therefore made by [`Panics::call`], which
//! catches the panic and keeps it. The pool finishes what it is doing, and then resumes the panic.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The first panic of several calls of user code.
#[must_use = "a panic that was kept is to be resumed"]
#[derive(Default)]
pub(crate) struct Panics(Option<Box<dyn Any + Send>>);

impl Panics {
    /// Calls user code. `None` if it panicked.
    #[inline]
    pub(crate) fn call<R>(&mut self, f: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(f)) {
            Ok(answer) => Some(answer),
            Err(payload) => {
                // Dropping a payload is user code, too: the payload of a second panic is forgotten.
                match self.0 {
                    None => self.0 = Some(payload),
                    Some(_) => std::mem::forget(payload),
                }
                None
            }
        }
    }

    /// Whether a call panicked.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.is_some()
    }

    /// Resumes the first panic, if there was one. If the thread is unwinding already, the kept
    /// panic is discarded: a second panic out of a destructor would end the process.
    #[inline]
    pub(crate) fn resume(self) {
        if let Some(payload) = self.0 {
            Self::go_on_with(payload);
        }
    }

    #[cold]
    #[inline(never)]
    fn go_on_with(payload: Box<dyn Any + Send>) {
        if std::thread::panicking() {
            std::mem::forget(payload);
        } else {
            resume_unwind(payload);
        }
    }
}
