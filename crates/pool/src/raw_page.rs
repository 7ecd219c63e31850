//! A page that is not in use: what providers and pools pass to each other.

use crate::desc::Desc;
use crate::memory::Memory;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A page between a provider and a pool: it is not in use, and only the holder of this value has
/// it.
///
/// It comes from [`Region::claim`](crate::Region::claim) or from another provider's
/// [`alloc`](crate::Provider::alloc). Dropping it does not return it: pass it to
/// [`Provider::release`](crate::Provider::release). It does not keep its provider alive. Only code
/// that keeps the provider alive may call the methods of this value.
#[must_use = "a raw page that is dropped is lost, unless its provider claims it again"]
pub struct RawPage<M: Memory> {
    desc: NonNull<Desc>,
    kind: PhantomData<fn() -> M>,
}

// SAFETY: exclusive ownership of a page that is in no use.
unsafe impl<M: Memory> Send for RawPage<M> {}

impl<M: Memory> RawPage<M> {
    /// # Safety
    ///
    /// The caller passes on the page's ownership (*one owner*).
    #[inline]
    pub(crate) unsafe fn from_desc(desc: NonNull<Desc>) -> Self {
        Self { desc, kind: PhantomData }
    }

    #[inline]
    pub(crate) fn into_desc(self) -> NonNull<Desc> {
        self.desc
    }

    /// The page's number in its region, for providers that keep their pages by number.
    ///
    /// # Safety
    ///
    /// The page's provider is alive.
    #[inline]
    #[must_use]
    pub unsafe fn index(&self) -> u32 {
        // SAFETY: the caller guarantees that the provider is alive.
        unsafe { self.desc() }.index()
    }

    /// # Safety
    ///
    /// The page's provider is alive.
    #[inline]
    pub(crate) unsafe fn desc(&self) -> &Desc {
        // SAFETY: this value owns the page, and the page's provider keeps the descriptor.
        unsafe { self.desc.as_ref() }
    }
}

impl<M: Memory> fmt::Debug for RawPage<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawPage<{}>", M::NAME)
    }
}
