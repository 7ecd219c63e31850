//! The atomics of the token tables, in one place so that loom can replace them; and [`Snapshot`], a
//! value that readers find by RCU.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard, atomic::AtomicBool, atomic::AtomicPtr, atomic::AtomicU32, atomic::AtomicU64,
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard, atomic::AtomicBool, atomic::AtomicPtr, atomic::AtomicU32, atomic::AtomicU64,
};

pub(crate) use snapshot::{Replaced, Snapshot};
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(tsan))]
mod snapshot {
    use netmem_refs::{Borrowed, Owner, RcuCell, RcuRef, rcu};

    /// A value that is read without a lock, and replaced as a whole.
    pub(crate) struct Snapshot<T>(RcuCell<T, RcuRef>);

    /// The previous value. Its drop may run destructors of other values, so it must not happen
    /// under a lock. The value is released after all readers that may have found it have left their
    /// critical sections.
    pub(crate) struct Replaced<T> {
        _value: Option<Owner<T, RcuRef>>,
    }

    impl<T: Send + Sync + 'static> Snapshot<T> {
        /// An empty value. Allocates nothing.
        pub(crate) fn new() -> Self {
            Self(RcuCell::default())
        }

        /// Runs `reader` on the current value, if there is one, in a critical section. About 5 ns.
        #[inline]
        pub(crate) fn read<R>(&self, reader: impl FnOnce(Option<&T>) -> R) -> R {
            rcu::read(|guard| reader(self.0.load(guard).map(Borrowed::value)))
        }

        pub(crate) fn replace(&self, value: T) -> Replaced<T> {
            Replaced { _value: self.0.swap(Some(Owner::new(value))) }
        }
    }
}

/// The same for the thread sanitizer, which cannot check the collector. A reader holds a reference
/// to the value instead of a critical section.
#[cfg(tsan)]
mod snapshot {
    use super::{Arc, Mutex};
    use std::sync::PoisonError;

    pub(crate) struct Snapshot<T>(Mutex<Option<Arc<T>>>);

    pub(crate) struct Replaced<T> {
        _value: Option<Arc<T>>,
    }

    impl<T> Snapshot<T> {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(None))
        }

        pub(crate) fn read<R>(&self, reader: impl FnOnce(Option<&T>) -> R) -> R {
            let value = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            reader(value.as_deref())
        }

        pub(crate) fn replace(&self, value: T) -> Replaced<T> {
            let mut at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Replaced { _value: at.replace(Arc::new(value)) }
        }
    }
}
