//! Lists of pages, linked through their descriptors.

use crate::desc::{Desc, Link};
use std::mem::offset_of;
use std::ptr::NonNull;

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
