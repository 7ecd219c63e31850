//! The atomics of the token tables, in one place, so that loom can take their place; and a list that readers find by RCU.

#[cfg(loom)]
pub(crate) use loom::sync::{Arc, Mutex, atomic::AtomicPtr, atomic::AtomicU32, atomic::AtomicU64};
#[cfg(not(loom))]
pub(crate) use std::sync::{Arc, Mutex, atomic::AtomicPtr, atomic::AtomicU32, atomic::AtomicU64};

pub(crate) use snapshot::{Replaced, Snapshot};
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(loom))]
mod snapshot {
    use netmem_refs::{Owner, RcuCell, RcuRef, Ref, rcu};

    /// A list that is read without a lock, and replaced as a whole.
    pub(crate) struct Snapshot<T>(RcuCell<Vec<T>>);

    /// The list that was there before. Dropping it may run anybody's destructors, so not under a lock; what it lists is
    /// released once everybody has left who may be reading it.
    pub(crate) struct Replaced<T> {
        _list: Option<Ref<Vec<T>, RcuRef>>,
    }

    impl<T: Send + Sync + 'static> Snapshot<T> {
        /// Empty. Allocates nothing.
        pub(crate) fn new() -> Self {
            Self(RcuCell::default())
        }

        /// Runs `reader` on the list as it is now, in a critical section. About 5 ns.
        #[inline]
        pub(crate) fn read<R>(&self, reader: impl FnOnce(&[T]) -> R) -> R {
            rcu::read(|guard| match self.0.load(guard) {
                Some(list) => reader(list.get()),
                None => reader(&[]),
            })
        }

        pub(crate) fn replace(&self, list: Vec<T>) -> Replaced<T> {
            let list = Owner::new(list, RcuRef::new(1)).into_ref();
            Replaced { _list: self.0.swap(Some(list)) }
        }
    }
}

/// The same for models, in which the collector cannot be. A reader keeps the list that it found, as its section would.
#[cfg(loom)]
mod snapshot {
    use loom::sync::{Arc, Mutex};

    pub(crate) struct Snapshot<T>(Mutex<Arc<Vec<T>>>);

    pub(crate) struct Replaced<T> {
        _list: Arc<Vec<T>>,
    }

    impl<T> Snapshot<T> {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(Arc::new(Vec::new())))
        }

        pub(crate) fn read<R>(&self, reader: impl FnOnce(&[T]) -> R) -> R {
            let list = self.0.lock().unwrap().clone();
            reader(&list)
        }

        pub(crate) fn replace(&self, list: Vec<T>) -> Replaced<T> {
            let mut at = self.0.lock().unwrap();
            Replaced { _list: std::mem::replace(&mut *at, Arc::new(list)) }
        }
    }
}
