//! Lists of pages, linked through their descriptors.

use crate::desc::Desc;
use crate::sync::{AtomicPtr, Ordering};
use std::mem::offset_of;
use std::ptr::NonNull;

/// A page descriptor's pointer to the next page of the list that the page is in. Only the page's owner uses it.
pub(crate) struct Link(AtomicPtr<Link>);

impl Link {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    #[inline]
    pub(crate) fn set(&self, next: *mut Link) {
        self.0.store(next, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn next(&self) -> *mut Link {
        self.0.load(Ordering::Relaxed)
    }
}

/// The link of a page.
#[inline]
pub(crate) fn link_of(desc: NonNull<Desc>) -> *mut Link {
    // SAFETY: the offset stays within the descriptor.
    unsafe { desc.as_ptr().byte_add(offset_of!(Desc, link)).cast() }
}

/// The page at the front of a list, and the rest of it.
///
/// # Safety
///
/// `list` is null or the link of a page that the caller owns.
#[inline]
pub(crate) unsafe fn first(list: *mut Link) -> Option<(NonNull<Desc>, *mut Link)> {
    // SAFETY: a link lies in its descriptor at a fixed offset.
    unsafe {
        let desc = NonNull::new(list)?.byte_sub(offset_of!(Desc, link)).cast::<Desc>();
        Some((desc, (*list).next()))
    }
}
