//! The allocation that owners and references point to.
//!
//! ```text
//!   0                                    64
//!   ├───────┬─────────────────────────────┼──────────────────┐   aligned to 64 bytes, or to what the value needs
//!   │ count │ release, callback, in_cell  │ value            │
//!   └───────┴─────────────────────────────┴──────────────────┘
//!    every    once, at the release          read after a get
//!    get, put
//! ```
//!
//! The value is the last field, so its type may be unsized: a pointer to a `Shared<T, C>` is
//! coerced to one to a `Shared<dyn Trait, C>`. What the release needs to know of the original type
//! is in the function `release`, which [`allocate`](Shared::allocate) chose. The value's type is
//! invariant in all pointers: a value of a shorter life, written by `get_mut`, would be dropped, or
//! given to the callback, as one of the original type.
//!
//! # When the object is released
//!
//! The last put decides:
//!
//! | at the last put | the release is |
//! | --- | --- |
//! | the object was never in a cell, the count is not an `RcuRef`, and the putting thread is in no critical section | now, by the putting thread |
//! | else | after every critical section that is open now, by the thread that leaves the last of them |
//!
//! **Readers against the last put.** A reader that finds an object in a cell holds no reference to
//! it. Only its section keeps the object. So an object that was ever in a cell is released after
//! the sections, whatever its count. The reader found the object before it was taken out of the
//! cell, so the reader's section was open at the last put, or had ended.
//!
//! ```text
//!   reader                                     writer
//!   enters a section
//!   loads the object from the cell
//!                                              takes it out, kills it: the last put
//!                                              retires it (not: releases it)
//!   reads the value; try_get is refused
//!   leaves the section: releases the object
//! ```

use super::count::Count;
use crate::faults;
use crate::own_line::CACHE_LINE;
use crate::percpu_ref::KillError;
use crate::rcu;
use crate::sync::{AtomicBool, Ordering};
use crate::unkilled;
use std::mem::{ManuallyDrop, needs_drop, offset_of};
use std::ptr::{self, NonNull};

/// The release callback. It moves the value out of the address that it gets.
type Callback = Box<dyn FnOnce(*mut ()) + Send>;

/// What the allocation of every type of value begins with, on a cache line of its own. See
/// [`Shared`] for the invariant.
#[repr(C, align(64))]
pub(super) struct Head<C> {
    pub(super) count: C,
    /// Releases the whole allocation, whose original type it knows.
    release: unsafe fn(NonNull<Self>),
    callback: Option<Callback>,
    /// The object is or was in an `RcuCell`. Set by its owner, so before the owner's put; read
    /// after the last put.
    in_cell: AtomicBool,
    /// The program can notice the release, so it does not wait for those of other objects.
    prompt: bool,
}

/// The invariant: a holder of a reference may use `count` and `value`. So may a reader that found
/// the object in a cell, until its section ends. The thread whose put was the last releases the
/// object, or defers the release, once. A thread that holds the only reference to an object that
/// was never in a cell may write `value`.
#[repr(C)]
pub(super) struct Shared<T: ?Sized, C> {
    pub(super) head: Head<C>,
    pub(super) value: T,
}

impl<T: Send + 'static, C: Count> Shared<T, C> {
    pub(super) fn allocate(count: C, value: T) -> NonNull<Self> {
        Self::boxed(count, value, None)
    }

    pub(super) fn with_callback(count: C, value: T, callback: impl FnOnce(T) + Send + 'static) -> NonNull<Self> {
        // SAFETY: the release calls this once, with the place of the value, which it does not use
        // afterwards.
        let callback = move |value: *mut ()| callback(unsafe { value.cast::<T>().read() });
        Self::boxed(count, value, Some(Box::new(callback)))
    }

    fn boxed(count: C, value: T, callback: Option<Callback>) -> NonNull<Self> {
        // The line of the count has nothing on it that is used between a get and the last put, and
        // no neighbouring allocation.
        const {
            assert!(offset_of!(Self, head) == 0 && align_of::<Self>() >= CACHE_LINE);
            assert!(offset_of!(Self, value) >= CACHE_LINE && offset_of!(Self, value) >= size_of::<C>());
            assert!(size_of::<Self>().is_multiple_of(CACHE_LINE));
        }
        let prompt = needs_drop::<T>() || callback.is_some();
        let head = Head { count, release: Self::release, callback, in_cell: AtomicBool::new(false), prompt };
        NonNull::from(Box::leak(Box::new(Self { head, value })))
    }
}

impl<T, C: Count> Shared<T, C> {
    /// Notes that readers can find the object: from now on it is released only after critical
    /// sections. Returns what was noted before.
    ///
    /// # Safety
    ///
    /// The caller is the owner.
    pub(super) unsafe fn enters_cell(this: NonNull<Self>) -> bool {
        // SAFETY: the owner keeps it, and is the only thread that writes it.
        let in_cell = unsafe { &(*this.as_ptr()).head.in_cell };
        let before = in_cell.load(Ordering::Relaxed);
        in_cell.store(true, Ordering::Relaxed);
        before
    }

    /// Removes the note: no reader could find the object.
    ///
    /// # Safety
    ///
    /// The caller is the owner, which did not put the object in a cell since
    /// [`enters_cell`](Self::enters_cell) returned `before`.
    pub(super) unsafe fn did_not_enter(this: NonNull<Self>, before: bool) {
        // SAFETY: the owner keeps it. Another thread reads the flag only after the owner's put, or
        // if it finds no other reference than its own.
        unsafe { &(*this.as_ptr()).head.in_cell }.store(before, Ordering::Relaxed);
    }

    /// Releases an object of this type.
    ///
    /// # Safety
    ///
    /// It was allocated as this type, and nothing else uses it, now or later.
    unsafe fn release(head: NonNull<Head<C>>) {
        let this = head.cast::<Self>().as_ptr();
        // SAFETY: nothing else uses it.
        match unsafe { (*this).head.callback.take() } {
            // SAFETY: from a box.
            None => drop(unsafe { Box::from_raw(this) }),
            Some(callback) => {
                // SAFETY: as above; the callback has the value next.
                let mut this = unsafe { Box::from_raw(this as *mut Shared<ManuallyDrop<T>, C>) };
                callback((&raw mut this.value).cast());
            }
        }
    }

    /// Ends the initial reference, and moves the value out as [`take`](Self::take) does, if it was
    /// the last.
    ///
    /// # Safety
    ///
    /// As for [`kill`](Self::kill).
    pub(super) unsafe fn kill_and_take(this: NonNull<Self>) -> Option<T> {
        // SAFETY: the caller's; the put was the last, or the initial reference is still
        // held.
        unsafe {
            match (*this.as_ptr()).head.count.kill() {
                Ok(true) => Self::take(this),
                Ok(false) => None,
                Err(error) => {
                    Head::<C>::refused(this.cast(), &error);
                    None
                }
            }
        }
    }

    /// Moves the value out of an object that was never in a cell, and releases the rest. Otherwise
    /// releases the object as ever.
    ///
    /// # Safety
    ///
    /// The caller's put was the last.
    pub(super) unsafe fn take(this: NonNull<Self>) -> Option<T> {
        // SAFETY: the last put was the caller's, which has the whole allocation, which has a
        // release that only knows the memory.
        unsafe {
            let head = &raw mut (*this.as_ptr()).head;
            if (*head).in_cell.load(Ordering::Relaxed) {
                Self::finish(this);
                return None;
            }
            let value = (&raw const (*this.as_ptr()).value).read();
            // A put that lost the race to be the last may still read the count, and nothing else.
            (*head).release = Self::release_emptied;
            Self::finish(this);
            Some(value)
        }
    }

    /// [`release`](Self::release), after the value was moved out. The callback is dropped, and not
    /// called.
    ///
    /// # Safety
    ///
    /// As for `release`.
    unsafe fn release_emptied(head: NonNull<Head<C>>) {
        // SAFETY: the same layout; from a box.
        drop(unsafe { Box::from_raw(head.cast::<Shared<ManuallyDrop<T>, C>>().as_ptr()) });
    }
}

impl<T: ?Sized, C: Count> Shared<T, C> {
    /// Ends a reference.
    ///
    /// # Safety
    ///
    /// It is the caller's, which does not use it after this call.
    #[inline]
    pub(super) unsafe fn put(this: NonNull<Self>) {
        // By pointer to the count alone: with the addition the rest may be gone.
        // SAFETY: the caller has a reference.
        if unsafe { &(*this.as_ptr()).head.count }.put() {
            // SAFETY: the last put was the caller's.
            unsafe { Self::finish(this) };
        }
    }

    /// Ends the initial reference.
    ///
    /// # Safety
    ///
    /// As for [`put`](Self::put); and it is the initial one.
    pub(super) unsafe fn kill(this: NonNull<Self>) {
        // SAFETY: the caller's. The pointer is to the whole allocation.
        unsafe { Head::<C>::kill(this.cast()) };
    }

    /// Releases the object, now or after the critical sections.
    ///
    /// # Safety
    ///
    /// The caller's put was the last.
    #[cold]
    pub(super) unsafe fn finish(this: NonNull<Self>) {
        // SAFETY: as above. The pointer is to the whole allocation.
        unsafe { Head::<C>::finish(this.cast()) };
    }

    /// The value, for a holder of the only reference; `None` if there may be other references, or
    /// readers.
    ///
    /// # Safety
    ///
    /// The caller has a reference, and acquires no other one while it uses the value.
    pub(super) unsafe fn alone<'a>(this: NonNull<Self>, is_one: impl FnOnce(&C) -> bool) -> Option<&'a mut T> {
        // SAFETY: the caller's reference keeps it.
        let head = unsafe { &(*this.as_ptr()).head };
        // A reader may have found the object in a cell, and have no reference. The flag was set
        // before the put of a thread that set it, which the count's load acquires, or by this
        // thread.
        if !is_one(&head.count) || head.in_cell.load(Ordering::Relaxed) {
            return None;
        }
        // SAFETY: the only reference, and no reader, as the invariant asks.
        Some(unsafe { &mut (*this.as_ptr()).value })
    }

    /// The same object as one of another type.
    ///
    /// # Safety
    ///
    /// `coerce` does nothing but coerce the pointer that it gets.
    pub(super) unsafe fn coerced<U: ?Sized>(
        this: NonNull<Self>,
        coerce: impl FnOnce(*mut T) -> *mut U,
    ) -> NonNull<Shared<U, C>> {
        // SAFETY: within the allocation, whose reference the caller has.
        let value = unsafe { &raw mut (*this.as_ptr()).value };
        let to = coerce(value);
        assert!(ptr::addr_eq(value, to), "a coercion does not change the address");
        // SAFETY: back by the same distance. A coercion keeps the alignment, so that is where the
        // value of the other type is.
        unsafe {
            let distance = value.byte_offset_from(this.as_ptr());
            NonNull::new_unchecked(to.byte_offset(-distance) as *mut Shared<U, C>)
        }
    }
}

impl<C: Count> Head<C> {
    /// Ends the initial reference, now or with the next kill that the kernel permits.
    ///
    /// # Safety
    ///
    /// As for [`Shared::kill`]. `this` points to the whole allocation.
    unsafe fn kill(this: NonNull<Self>) {
        // SAFETY: the caller's.
        if let Err(error) = unsafe { Self::try_kill(this) } {
            // SAFETY: as above.
            unsafe { Self::refused(this, &error) };
        }
    }

    /// Keeps an object whose kill was refused, for the next kill that the kernel permits.
    ///
    /// # Safety
    ///
    /// The initial reference is still held, and no owner has it. `this` points to the whole
    /// allocation.
    #[cold]
    unsafe fn refused(this: NonNull<Self>, error: &KillError) {
        // The only other error is of a kill that is under way, and the initial reference is put
        // once.
        let KillError::Barrier(error) = error else { return };
        faults::leaked(error);
        // SAFETY: the caller's. The value is `Send` and `'static`, the callback `Send`: `allocate`
        // asked for it.
        unsafe { unkilled::keep(this.cast(), |this| Self::try_kill(this.cast())) };
    }

    /// Ends the initial reference, if the kernel lets it.
    ///
    /// # Safety
    ///
    /// As for [`kill`](Self::kill). If there is an error, the initial reference is still held.
    unsafe fn try_kill(this: NonNull<Self>) -> Result<(), KillError> {
        // SAFETY: as above.
        if unsafe { &(*this.as_ptr()).count }.kill()? {
            // SAFETY: the last put was the caller's.
            unsafe { Self::finish(this) };
        }
        Ok(())
    }

    /// Releases the object, now or after the critical sections.
    ///
    /// # Safety
    ///
    /// The caller's put was the last. `this` points to the whole allocation.
    unsafe fn finish(this: NonNull<Self>) {
        // SAFETY: these fields are not written after the last put, but by the caller.
        let Self { in_cell, prompt, release, .. } = unsafe { &*this.as_ptr() };
        if !(C::READ_IN_SECTIONS || in_cell.load(Ordering::Relaxed) || rcu::in_section()) {
            // SAFETY: the last put, so there is no reference. No reader has found it in a cell.
            return unsafe { release(this) };
        }
        // SAFETY: one put is the last. Every cell that had the object held its owner, so no cell
        // has it any more. The value is `Send` and `'static`, the callback `Send`: `allocate` asked
        // for it.
        rcu::read(|guard| unsafe { guard.retire(this, Self::release_after_sections, *prompt) });
        rcu::report_stall();
    }

    /// Called where a thread leaves a critical section. A panic must not keep other objects from
    /// being released.
    unsafe fn release_after_sections(this: *mut Self, _: &rcu::Collector) {
        // SAFETY: never null: it was not when it was retired. All sections in which it can have
        // been found have ended.
        faults::contain(|| unsafe { ((*this).release)(NonNull::new_unchecked(this)) });
    }
}

/// Makes `Owner` and `Ref` of one type those of another, for [`unsize!`](crate::unsize).
#[doc(hidden)]
pub trait Unsize: Sized {
    type Pointee: ?Sized;
    type To<U: ?Sized>;

    /// # Safety
    ///
    /// `coerce` does nothing but coerce the pointer that it gets.
    unsafe fn unsize<U: ?Sized>(this: Self, coerce: impl FnOnce(*mut Self::Pointee) -> *mut U) -> Self::To<U>;
}

/// Makes an [`Owner`](crate::Owner) or a [`Ref`](crate::Ref) one of an unsized type: of a trait
/// object, or of a slice.
///
/// An `Arc` is coerced without being asked; the language does not let other crates' pointers do
/// that yet. No instruction is added to a get or a put: the count is where it was, and the pointer
/// has 16 bytes instead of 8. References of either type are to the same object, and the object is
/// released as what it was made.
///
/// ```
/// use netmem_refs::{Owner, RefCount, Ref, unsize};
/// use std::fmt::Display;
///
/// let owner: Owner<u32, RefCount> = Owner::new(1500);
/// let shown: Ref<dyn Display, RefCount> = unsize!(Owner::get(&owner) => dyn Display);
/// assert_eq!(shown.to_string(), "1500");
///
/// let bytes: Owner<[u8], RefCount> = unsize!(Owner::new([0; 64]) => [u8]);
/// assert_eq!(bytes.len(), 64);
/// ```
///
/// What is no unsizing does not compile:
///
/// ```compile_fail
/// # use netmem_refs::{Owner, RefCount, unsize};
/// let owner: Owner<u32, RefCount> = Owner::new(1500);
/// unsize!(owner => u64);
/// ```
///
/// The expansion has an `unsafe` block, so a crate that forbids unsafe code cannot use it. An
/// [`RcuCell`](crate::RcuCell) holds owners of sized types only, because its pointer is one word.
#[macro_export]
macro_rules! unsize {
    ($pointer:expr => $to:ty) => {{
        let pointer = $pointer;
        // SAFETY: the closure coerces its argument.
        unsafe { $crate::Unsize::unsize(pointer, |at| -> *mut $to { at }) }
    }};
}
