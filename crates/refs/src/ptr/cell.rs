//! A place where readers find a counted object without a lock.

use super::shared::Shared;
use super::{Count, Dead, Owner, Ref};
use crate::rcu::{self, Guard};
use crate::sync::{AtomicPtr, Ordering, fence};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

/// An atomic place for an optional [`Owner`], in which readers find the object in a critical
/// section.
///
/// While the owner is in the cell, the object is alive. A thread that [stores](Self::store) another
/// owner kills the old object. Readers that found it before keep its memory and its value until
/// their section ends, whichever count it has. A reader that needs the object for longer acquires a
/// [`Ref`], by [`get`](Self::get).
///
/// A configuration that the whole process reads, and that is replaced while it runs:
///
/// ```
/// use netmem_refs::{Owner, PercpuRef, RcuCell, Ref, rcu};
///
/// struct Config {
///     mtu: usize,
/// }
///
/// static CONFIG: RcuCell<Config, PercpuRef> = RcuCell::empty();
///
/// // For the length of a section: two loads, no reference.
/// fn fits(packet: &[u8]) -> bool {
///     rcu::read(|guard| CONFIG.load(guard).is_some_and(|config| packet.len() <= config.mtu))
/// }
///
/// // For longer: a reference, by a plain add on this CPU.
/// fn config() -> Option<Ref<Config, PercpuRef>> {
///     CONFIG.get()
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// CONFIG.store(Some(Owner::try_new(Config { mtu: 1500 })?));
/// let old = config().ok_or("there is none")?;
/// CONFIG.store(Some(Owner::try_new(Config { mtu: 9000 })?)); // kills the old one
/// assert!(fits(&[0; 4000]));
/// assert_eq!(old.mtu, 1500); // and `old` keeps it
/// assert!(Ref::is_dying(&old));
/// # Ok(())
/// # }
/// ```
pub struct RcuCell<T, C: Count> {
    /// Null, or an owner of which `Owner::into_raw` made a pointer.
    at: AtomicPtr<Shared<T, C>>,
    /// It owns, sends and shares what an `Owner` does.
    _owns: PhantomData<Owner<T, C>>,
}

// What is in the cell is replaced by one exchange. For the rest, as for `Owner`.
impl<T: RefUnwindSafe, C: Count> UnwindSafe for RcuCell<T, C> {}
impl<T: RefUnwindSafe, C: Count> RefUnwindSafe for RcuCell<T, C> {}

fn into_raw<T, C: Count>(owner: Option<Owner<T, C>>) -> *mut Shared<T, C> {
    owner.map_or(ptr::null_mut(), |owner| {
        let shared = Owner::into_raw(owner);
        // SAFETY: the owner was the caller's, and the cell has it next.
        unsafe { Shared::enters_cell(shared) };
        shared.as_ptr()
    })
}

impl<T, C: Count> RcuCell<T, C> {
    /// An empty cell, which can be a `static`.
    #[cfg(not(loom))]
    #[must_use]
    pub const fn empty() -> Self {
        Self { at: AtomicPtr::new(ptr::null_mut()), _owns: PhantomData }
    }

    /// As above, where loom's atomics know no constants.
    #[cfg(loom)]
    pub fn empty() -> Self {
        Self { at: AtomicPtr::new(ptr::null_mut()), _owns: PhantomData }
    }

    /// A cell with that owner in it.
    #[must_use]
    pub fn new(owner: Option<Owner<T, C>>) -> Self {
        Self { at: AtomicPtr::new(into_raw(owner)), _owns: PhantomData }
    }

    /// The object in the cell, for as long as the critical section lasts. One load.
    #[inline]
    pub fn load<'g>(&self, guard: &'g Guard) -> Option<Borrowed<'g, T, C>> {
        NonNull::new(guard.protect(&self.at)).map(|shared| Borrowed { shared, _section: PhantomData })
    }

    /// Acquires a reference to the object in the cell. `None` only if the cell is empty.
    ///
    /// A section, a load, and what [`Borrowed::try_get_live`] costs. If a [`store`](Self::store)
    /// kills the object between the two, the cell is loaded again: each further round is one store
    /// by another thread.
    #[inline]
    pub fn get(&self) -> Option<Ref<T, C>> {
        rcu::read(|guard| {
            loop {
                if let Ok(got) = Borrowed::try_get_live(self.load(guard)?) {
                    return Some(got);
                }
                // The owner keeps its object alive, so it was taken out of the cell before its put.
                // The refused get has seen the put, and behind the fence the next load sees what is
                // in the cell since.
                fence(Ordering::Acquire);
            }
        })
    }

    /// Puts another owner in, and hands out the one that was there, which is still alive. One
    /// atomic exchange.
    #[must_use = "dropping the old owner kills its object; `store` says so"]
    pub fn swap(&self, owner: Option<Owner<T, C>>) -> Option<Owner<T, C>> {
        // Sequentially consistent, for it is part of what the collector orders: a reader that
        // enters its section after the old object was retired does not find that object.
        let old = NonNull::new(self.at.swap(into_raw(owner), Ordering::SeqCst));
        // SAFETY: the cell's, and with the exchange ours.
        old.map(|old| unsafe { Owner::from_raw(old) })
    }

    /// Puts another owner in if `current` is in the cell, and hands out the owner of `current`,
    /// which is still alive. One atomic compare-and-swap.
    ///
    /// `current` was found in a critical section that is still open, so its memory is not used for
    /// another object meanwhile: if it is in the cell, it is the same object.
    ///
    /// # Errors
    ///
    /// Another object is in the cell, or none. `new` is handed back as if it had not been tried,
    /// with what is in the cell.
    pub fn compare_exchange<'g>(
        &self,
        current: Option<Borrowed<'g, T, C>>,
        new: Option<Owner<T, C>>,
        guard: &'g Guard,
    ) -> Result<Option<Owner<T, C>>, Changed<'g, T, C>> {
        let current = current.map_or(ptr::null_mut(), |current| current.shared.as_ptr());
        let new = new.map(Owner::into_raw);
        // SAFETY: the owner was the caller's, and the cell has it next, or this function hands it
        // back.
        let before = new.map(|new| unsafe { Shared::enters_cell(new) });
        let to = new.map_or(ptr::null_mut(), NonNull::as_ptr);
        // As in `swap`; and what a failure finds is protected by the section, as by a load.
        match guard.compare_exchange(&self.at, current, to) {
            // SAFETY: the cell's, and with the exchange ours.
            Ok(old) => Ok(NonNull::new(old).map(|old| unsafe { Owner::from_raw(old) })),
            Err(found) => {
                let new = new.zip(before).map(|(new, before)| {
                    // SAFETY: the cell did not take it.
                    unsafe { Shared::did_not_enter(new, before) };
                    // SAFETY: the caller's owner, as above.
                    unsafe { Owner::from_raw(new) }
                });
                let current = NonNull::new(found);
                Err(Changed { current: current.map(|shared| Borrowed { shared, _section: PhantomData }), new })
            }
        }
    }

    /// Replaces the object by one that `next` makes from its value, and kills it. If another thread
    /// replaces it meanwhile, `next` is called again with the new value, and what it made before is
    /// dropped. So no update of a thread is lost, without a lock.
    ///
    /// If `next` returns `None`, the cell stays as it is. Returns whether the object was replaced.
    ///
    /// `next` runs in a critical section: it should be short, not block, and have no effect besides
    /// its result. Each call costs a section, a load and a compare-and-swap. If threads often
    /// replace the object at the same time, a lock among them makes fewer objects in vain.
    ///
    /// ```
    /// use netmem_refs::{Owner, RcuCell, RcuRef};
    ///
    /// let routes: RcuCell<Vec<u32>, RcuRef> = RcuCell::new(Some(Owner::new(vec![1])));
    /// let add = |route| {
    ///     routes.update(|current| {
    ///         let mut next = current?.clone();
    ///         next.push(route);
    ///         Some(Owner::new(next))
    ///     })
    /// };
    /// assert!(add(2) && add(3));
    /// assert_eq!(*routes.get().unwrap(), [1, 2, 3]);
    /// ```
    pub fn update(&self, mut next: impl FnMut(Option<&T>) -> Option<Owner<T, C>>) -> bool {
        loop {
            let done = rcu::read(|guard| {
                let current = self.load(guard);
                let new = next(current.map(Borrowed::value))?;
                // What is left over is dropped after the section: its release need not wait for it.
                Some(self.compare_exchange(current, Some(new), guard).map_err(|changed| changed.new))
            });
            match done {
                None => return false,
                Some(Ok(_old)) => return true,
                Some(Err(_new)) => (),
            }
        }
    }

    /// Puts another owner in, and kills the object that was there. It is released when its last
    /// reference has been put and the readers that found it have left their sections.
    pub fn store(&self, owner: Option<Owner<T, C>>) {
        drop(self.swap(owner));
    }

    /// Empties the cell, and hands out the owner that was there.
    #[must_use = "dropping the owner kills its object; `store` says so"]
    pub fn take(&self) -> Option<Owner<T, C>> {
        self.swap(None)
    }
}

impl<T, C: Count> Default for RcuCell<T, C> {
    fn default() -> Self {
        Self::empty()
    }
}

impl<T, C: Count> Drop for RcuCell<T, C> {
    fn drop(&mut self) {
        self.store(None);
    }
}

impl<T, C: Count> fmt::Debug for RcuCell<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RcuCell").finish_non_exhaustive()
    }
}

/// Why [`RcuCell::compare_exchange`] did not put an owner in: the cell has another object than was
/// expected.
#[derive(thiserror::Error)]
#[error("the cell has another object than was expected")]
pub struct Changed<'g, T, C: Count> {
    /// The object that is in the cell, if any.
    pub current: Option<Borrowed<'g, T, C>>,
    /// The owner that was not put in.
    pub new: Option<Owner<T, C>>,
}

impl<T, C: Count> fmt::Debug for Changed<'_, T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changed").finish_non_exhaustive()
    }
}

/// An object found in an [`RcuCell`], for as long as the critical section lasts. It may be dead
/// already; its value can be read nevertheless.
///
/// **Functions instead of methods**, as with an `Arc`: `Borrowed::try_get(found)`. So each method
/// that is called on it is the value's, but for `clone`.
pub struct Borrowed<'g, T, C: Count> {
    /// Found in the section of `'g`, so not released before that ends.
    shared: NonNull<Shared<T, C>>,
    /// The value is borrowed from the section; invariant: see `shared.rs`.
    _section: PhantomData<(&'g T, *mut T)>,
}

// SAFETY: from it one gets `&T`, and a `Ref`. The section may be another thread's, which outlasts
// `'g`.
unsafe impl<T: Send + Sync, C: Count> Send for Borrowed<'_, T, C> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync, C: Count> Sync for Borrowed<'_, T, C> {}
// As for `Owner`.
impl<T: RefUnwindSafe, C: Count> UnwindSafe for Borrowed<'_, T, C> {}
impl<T: RefUnwindSafe, C: Count> RefUnwindSafe for Borrowed<'_, T, C> {}

impl<'g, T, C: Count> Borrowed<'g, T, C> {
    /// Acquires a reference, which outlives the section. Costs what a `try_get` of the count costs.
    ///
    /// # Errors
    ///
    /// The last reference was put meanwhile, so the object was taken out of the cell. Load the cell
    /// again, as [`RcuCell::get`] does.
    #[inline]
    pub fn try_get(this: Self) -> Result<Ref<T, C>, Dead> {
        // SAFETY: released after the section.
        unsafe { Ref::got(this.shared, C::try_get) }
    }

    /// Acquires a reference, if the object has not been killed. Only `PercpuRef` remembers that it
    /// was killed; with the other counts this is [`try_get`](Self::try_get).
    ///
    /// # Errors
    ///
    /// The object was killed, so it was taken out of the cell. Load the cell again, as
    /// [`RcuCell::get`] does.
    #[inline]
    pub fn try_get_live(this: Self) -> Result<Ref<T, C>, Dead> {
        // SAFETY: released after the section.
        unsafe { Ref::got(this.shared, C::try_get_live) }
    }

    /// [`try_get_live`](Self::try_get_live), and how often a compare-and-swap had to be repeated:
    /// [`Count::try_get_live_counting`]. For measurements, and not stable.
    ///
    /// # Errors
    ///
    /// As for [`try_get_live`](Self::try_get_live).
    #[cfg(feature = "bench")]
    #[inline]
    pub fn try_get_live_counting(this: Self) -> (Result<Ref<T, C>, Dead>, u32) {
        let mut retries = 0;
        let get = |count: &C| {
            let (got, again) = count.try_get_live_counting();
            retries = again;
            got
        };
        // SAFETY: released after the section.
        (unsafe { Ref::got(this.shared, get) }, retries)
    }

    /// The value, for as long as the section. Unlike `Deref`, not bound to the life of this
    /// `Borrowed`.
    #[inline]
    pub fn value(this: Self) -> &'g T {
        // SAFETY: released after the section.
        unsafe { &(*this.shared.as_ptr()).value }
    }
}

impl<T, C: Count> Clone for Borrowed<'_, T, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, C: Count> Copy for Borrowed<'_, T, C> {}

impl<T, C: Count> Deref for Borrowed<'_, T, C> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        Self::value(*self)
    }
}

impl<T: fmt::Debug, C: Count> fmt::Debug for Borrowed<'_, T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Borrowed").field(&**self).finish()
    }
}
