//! What models check, in one place: loom's in its models, the standard library's otherwise; and two
//! types of other crates, which have stand-ins in models.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU8, AtomicU32, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU8, AtomicU32, fence},
};

pub(crate) use std::sync::atomic::Ordering;

#[cfg(loom)]
pub(crate) use stand_in::{Queue, UnsafeCell, WakerCell};

#[cfg(not(loom))]
pub(crate) use atomic_waker::AtomicWaker as WakerCell;
#[cfg(not(loom))]
pub(crate) use crossbeam_queue::SegQueue as Queue;

/// A cell with the interface of loom's.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

#[cfg(loom)]
mod stand_in {
    use super::{AtomicU8, Mutex, Ordering};
    pub(crate) use loom::cell::UnsafeCell;
    use std::collections::VecDeque;
    use std::task::Waker;

    /// The queue of crossbeam, as one step.
    pub(crate) struct Queue<T>(Mutex<VecDeque<T>>);

    impl<T> Queue<T> {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(VecDeque::new()))
        }

        pub(crate) fn push(&self, value: T) {
            self.0.lock().unwrap_or_else(|poison| poison.into_inner()).push_back(value);
        }

        pub(crate) fn pop(&self) -> Option<T> {
            self.0.lock().unwrap_or_else(|poison| poison.into_inner()).pop_front()
        }

        pub(crate) fn len(&self) -> usize {
            self.0.lock().unwrap_or_else(|poison| poison.into_inner()).len()
        }

        pub(crate) fn is_empty(&self) -> bool {
            self.len() == 0
        }
    }

    const WAITS: u8 = 0;
    const REGISTERS: u8 = 1;
    const WAKES: u8 = 2;

    /// The waker of `atomic-waker`, by its protocol: a call that registers while another one does
    /// is dropped, and a call that wakes meanwhile is carried out by the one that registers.
    pub(crate) struct WakerCell {
        state: AtomicU8,
        waker: UnsafeCell<Option<Waker>>,
    }

    // SAFETY: the state admits one thread to the waker at a time.
    unsafe impl Sync for WakerCell {}

    impl WakerCell {
        pub(crate) fn new() -> Self {
            Self { state: AtomicU8::new(WAITS), waker: UnsafeCell::new(None) }
        }

        fn take(&self) -> Option<Waker> {
            // SAFETY: the caller has changed the state from `WAITS`, and not changed it back.
            self.waker.with_mut(|waker| unsafe { (*waker).take() })
        }

        pub(crate) fn register(&self, waker: &Waker) {
            match self.state.compare_exchange(WAITS, REGISTERS, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => {
                    // SAFETY: as for `take`.
                    self.waker.with_mut(|place| unsafe { *place = Some(waker.clone()) });
                    let registered = self.state.compare_exchange(REGISTERS, WAITS, Ordering::AcqRel, Ordering::Acquire);
                    if registered.is_err() {
                        let waker = self.take();
                        self.state.swap(WAITS, Ordering::AcqRel);
                        waker.into_iter().for_each(Waker::wake);
                    }
                }
                Err(WAKES) => waker.wake_by_ref(),
                Err(_) => {}
            }
        }

        pub(crate) fn wake(&self) {
            if self.state.fetch_or(WAKES, Ordering::AcqRel) == WAITS {
                let waker = self.take();
                self.state.fetch_and(!WAKES, Ordering::Release);
                waker.into_iter().for_each(Waker::wake);
            }
        }
    }
}
