//! What models check, in one place: loom's in its models, the standard library's otherwise; and two
//! types of other crates, which have stand-ins in models.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU8, AtomicU32, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc,
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
    pub(crate) use loom::cell::UnsafeCell;
    use loom::sync::Mutex;
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

    /// The waker of `atomic-waker`, whose two calls are each one step.
    pub(crate) struct WakerCell(Mutex<Option<Waker>>);

    impl WakerCell {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(None))
        }

        pub(crate) fn register(&self, waker: &Waker) {
            *self.0.lock().unwrap_or_else(|poison| poison.into_inner()) = Some(waker.clone());
        }

        pub(crate) fn wake(&self) {
            let waker = self.0.lock().unwrap_or_else(|poison| poison.into_inner()).take();
            waker.into_iter().for_each(Waker::wake);
        }
    }
}
