//! Groups of pages between the array cache of a pool and an array of the caller's.
//!
//! Why: a function behind a border that the compiler cannot look through, such as a shared
//! library's, has its pages in an array in any case. Here they move between that array and the
//! cache directly. The position in the cache and the counter are read and written once for the
//! group, and the thread-local poll context, which a shared library finds by a call, is not read.

use crate::cache::Cache;
use crate::frag::Frag;
use crate::header::PoolHeader;
use crate::memory::Memory;
use crate::page::Page;
use crate::pool::{Napi, PagePool};
use std::mem::{self, MaybeUninit};
use std::ptr;

impl<M: Memory> PagePool<M> {
    /// Allocates whole pages into `out` from the array cache, outside of a poll. Returns how many:
    /// fewer than `out` has room for if the cache has no more. The others are for
    /// [`alloc_single`](Self::alloc_single), which also fills the cache. Calls no user code.
    #[inline(always)]
    pub fn alloc_group(&mut self, out: &mut [MaybeUninit<Option<Frag<M>>>]) -> usize {
        let cache = &self.shared().front.cache;
        let page_size = cache.page_size;
        // SAFETY: the page leaves the cache, and is whole.
        cache.pop_into(out, |desc| Some(unsafe { Page::from_desc(desc, 0, page_size) }.freeze()))
    }

    /// Drops fragments as in a poll of this pool, outside of a poll, in their order, and leaves
    /// `None` in their places. Ends at a fragment whose page would not go to the array cache: it
    /// has another holder or is of another pool, or the cache is full. Returns how many places are
    /// in front of it. That fragment is for [`release_single`](Self::release_single), or to be
    /// dropped. Calls no user code.
    #[inline(always)]
    pub fn release_group(&mut self, frags: &mut [Option<Frag<M>>]) -> usize {
        let front = &self.shared().front;
        release(&front.header, &front.cache, frags)
    }
}

impl<M: Memory> Napi<'_, M> {
    /// See [`PagePool::release_group`].
    #[inline(always)]
    pub fn release_group(&mut self, frags: &mut [Option<Frag<M>>]) -> usize {
        let front = &self.shared().front;
        release(&front.header, &front.cache, frags)
    }
}

/// For the owner of the cache, which is that of the header.
#[inline(always)]
fn release<M: Memory>(header: &PoolHeader, cache: &Cache, frags: &mut [Option<Frag<M>>]) -> usize {
    let mut pushes = cache.pushes();
    let mut done = 0;
    while let Some(place) = frags.get_mut(done) {
        if let Some(frag) = place {
            let desc = frag.desc_ptr();
            if !ptr::eq(frag.desc().header(), header) || !frag.desc().is_sole() || pushes.is_full() {
                break;
            }
            // A page in the cache has one count, which was the fragment's.
            mem::forget(place.take());
            pushes.push(desc);
        }
        done += 1;
    }
    done
}
