//! Lists of pages, linked through their descriptors, so that a list needs no memory of its own.

use crate::desc::{Desc, ListNode};
use std::mem::offset_of;
use std::ptr::NonNull;

/// The node of a page.
#[inline]
pub(crate) fn node_of(desc: NonNull<Desc>) -> *mut ListNode {
    // SAFETY: the offset stays within the descriptor.
    unsafe { desc.as_ptr().byte_add(offset_of!(Desc, node)).cast() }
}

/// The page at the front of a list, and the rest of it.
///
/// # Safety
///
/// `list` is null or the node of a page that the caller owns.
#[inline]
pub(crate) unsafe fn split_first(list: *mut ListNode) -> Option<(NonNull<Desc>, *mut ListNode)> {
    // SAFETY: a node lies in its descriptor at a fixed offset.
    unsafe {
        let desc = NonNull::new(list)?.byte_sub(offset_of!(Desc, node)).cast::<Desc>();
        Some((desc, (*list).next()))
    }
}
