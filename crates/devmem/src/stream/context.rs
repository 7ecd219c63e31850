//! The context that the streams of a stack share with its transmit queue: the DMA domain, and
//! wakers.
//!
//! A range can become free inside of the stack's poll, when the stack's tables are borrowed. A
//! waker that ran there could call the stack. So wakers are collected, and called after the poll.

use crate::binding::{BindingCount, BindingRef};
use netmem_pool::{DmaDomain, MapError};
use std::marker::PhantomData;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// Collects the wakers of users whose ranges can be used again. The stack calls them at the end of
/// a poll, because a range can become free while the tables of the stack are in use. After the
/// stack is gone, a waker is called at once.
pub(crate) struct Context<C: BindingCount> {
    domain: Arc<dyn DmaDomain>,
    wakers: Mutex<Wakers>,
    /// Whether a waker waits to be called.
    some: AtomicBool,
    counted: PhantomData<fn() -> C>,
}

#[derive(Default)]
struct Wakers {
    waiting: Vec<Waker>,
    /// Whether the stack is gone, so that it does not poll any more.
    gone: bool,
}

impl<C: BindingCount> Context<C> {
    pub(crate) fn new(domain: Arc<dyn DmaDomain>) -> Self {
        Self { domain, wakers: Mutex::default(), some: AtomicBool::new(false), counted: PhantomData }
    }

    /// Returns the device's address of a binding's first byte. The whole binding is mapped in the
    /// domain until the binding is gone.
    pub(crate) fn map(&self, binding: &BindingRef<C>) -> Result<u64, MapError> {
        binding.map_for(&self.domain)
    }

    pub(crate) fn wake(&self, waker: Waker) {
        let mut wakers = self.lock();
        if wakers.gone {
            drop(wakers);
            return waker.wake();
        }
        wakers.waiting.push(waker);
        self.some.store(true, Ordering::Release);
    }

    pub(crate) fn take_wakers(&self, into: &mut Vec<Waker>) {
        if self.some.load(Ordering::Relaxed) && self.some.swap(false, Ordering::Acquire) {
            into.append(&mut self.lock().waiting);
        }
    }

    /// Notes that the stack does not poll any more, and calls all waiting wakers.
    pub(crate) fn end(&self) {
        let mut wakers = self.lock();
        wakers.gone = true;
        let waiting = mem::take(&mut wakers.waiting);
        drop(wakers);
        waiting.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, Wakers> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
