//! Stands in for the crates that are still being written; goes when they come. Correct, and in no way fast.

pub(super) mod netmem_refs {
    use std::ops::Deref;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

    #[repr(align(64))]
    pub(crate) struct OwnLine<C>(C);

    impl<C> OwnLine<C> {
        pub(crate) const fn new(count: C) -> Self {
            Self(count)
        }
    }

    impl<C> Deref for OwnLine<C> {
        type Target = C;

        fn deref(&self) -> &C {
            &self.0
        }
    }

    pub(crate) struct RefCount(AtomicU32);

    impl RefCount {
        pub(crate) const fn new(count: u32) -> Self {
            Self(AtomicU32::new(count))
        }

        #[inline]
        pub(crate) fn try_get(&self) -> bool {
            self.try_get_counting().0
        }

        #[inline]
        pub(crate) fn try_get_counting(&self) -> (bool, u32) {
            let (mut now, mut retries) = (self.0.load(Ordering::Relaxed), 0);
            while now != 0 {
                match self.0.compare_exchange_weak(now, now + 1, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => return (true, retries),
                    Err(other) => now = other,
                }
                retries += 1;
            }
            (false, retries)
        }

        #[inline]
        #[must_use]
        pub(crate) fn put(&self) -> bool {
            self.0.fetch_sub(1, Ordering::AcqRel) == 1
        }
    }

    pub(crate) mod rcu {
        pub(crate) struct Guard(());

        #[inline]
        pub(crate) fn read<R>(section: impl FnOnce(&Guard) -> R) -> R {
            section(&Guard(()))
        }

        impl Drop for Guard {
            fn drop(&mut self) {}
        }
    }

    pub(crate) struct RcuRef(AtomicU32);

    impl RcuRef {
        pub(crate) const fn new(count: u32) -> Self {
            Self(AtomicU32::new(count.wrapping_sub(1)))
        }

        #[inline]
        pub(crate) fn get(&self, _guard: &rcu::Guard) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed).cast_signed() >= 0
        }

        #[inline]
        #[must_use]
        pub(crate) fn put(&self) -> bool {
            rcu::read(|guard| self.put_guarded(guard))
        }

        #[inline]
        #[must_use]
        pub(crate) fn put_guarded(&self, _guard: &rcu::Guard) -> bool {
            self.0.fetch_sub(1, Ordering::AcqRel) == 0
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("already killed")]
    pub(crate) struct Killed;

    pub(crate) struct PercpuRef {
        count: AtomicU64,
        dying: AtomicBool,
    }

    impl PercpuRef {
        pub(crate) fn new() -> Result<Self, Killed> {
            Ok(Self { count: AtomicU64::new(1), dying: AtomicBool::new(false) })
        }

        #[inline]
        pub(crate) fn try_get(&self) -> bool {
            self.count.fetch_add(1, Ordering::Relaxed) > 0
        }

        #[inline]
        #[must_use]
        pub(crate) fn put(&self) -> bool {
            self.count.fetch_sub(1, Ordering::AcqRel) == 1
        }

        pub(crate) fn kill(&self) -> Result<bool, Killed> {
            if self.dying.swap(true, Ordering::Relaxed) { Err(Killed) } else { Ok(self.put()) }
        }
    }
}
