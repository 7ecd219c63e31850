//! Fragments as `bytes::Bytes`. The fragment can be found again by the address of the bytes.
//!
//! ```text
//!   Frag ──From──► Bytes ──► a program without pages ──► &[u8] ──SharedPool::frag_of──► Frag
//! ```
//!
//! A slice does not name the value that keeps its bytes. If that value were a [`Page`](crate::Page)
//! in an `Arc`, the last holder of the `Arc` could write to the page while a fragment of it is
//! being sent. So a page is marked while it is known to have fragments only: see *frozen* in
//! `desc.rs`.

use crate::frag::Frag;
use crate::memory::{Memory, Readable};
use std::fmt;

/// A fragment as the owner of a [`Bytes`](bytes::Bytes). `Bytes::from(fragment)` uses it; it is
/// public for owners that contain more than the fragment.
///
/// If the fragment is the only value on its page,
/// [`SharedPool::frag_of`](crate::SharedPool::frag_of) finds the fragment of the bytes until this
/// is dropped.
pub struct BytesOwner<M: Memory> {
    frag: Frag<M>,
    /// This value has marked the page as frozen.
    froze: bool,
}

impl<M: Memory> From<Frag<M>> for BytesOwner<M> {
    fn from(frag: Frag<M>) -> Self {
        let froze = frag.is_writable();
        if froze {
            frag.desc().freeze();
        }
        Self { frag, froze }
    }
}

impl<M: Memory> Drop for BytesOwner<M> {
    fn drop(&mut self) {
        if self.froze {
            self.frag.desc().thaw();
        }
    }
}

impl<M: Readable> AsRef<[u8]> for BytesOwner<M> {
    fn as_ref(&self) -> &[u8] {
        &self.frag
    }
}

impl<M: Memory> fmt::Debug for BytesOwner<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.frag.fmt(f)
    }
}

/// Nothing is copied: the `Bytes`, its slices and its clones hold the fragment. The drop of the
/// last of them returns the page to its pool, on any thread. One heap allocation, for the data that
/// the clones share.
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// # let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
/// let mut page = pool.alloc().expect("a new pool has pages");
/// page.copy_from(0, b"GET / HTTP/1.1")?;
/// let bytes = bytes::Bytes::from(page.freeze_range(0..14));
/// let path = bytes.slice(4..5);
/// drop(bytes);
/// assert_eq!((&path[..], pool.stats().inflight()), (&b"/"[..], 1));
/// drop(path);
/// assert_eq!(pool.stats().inflight(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl<M: Readable> From<Frag<M>> for ::bytes::Bytes {
    fn from(frag: Frag<M>) -> Self {
        Self::from_owner(BytesOwner::from(frag))
    }
}
