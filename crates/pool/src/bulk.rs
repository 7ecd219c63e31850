//! Returns many pages at once, for callers that have many.

use crate::desc::{self, Desc};
use crate::frag::Frag;
use crate::header::PoolHeader;
use crate::memory::Memory;
use crate::panics::Panics;
use netmem_percpu::MAGAZINE;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Collects fragments that are no longer needed, and returns their pages together, grouped by pool.
/// An example is a transmit completion that has frames of several devices.
///
/// Dropping fragments one by one is correct too, and costs no more in their pool's own poll
/// context. Outside of it, a dropped page waits in this CPU's magazine until the magazine is full
/// or the pool is short of pages. A bulk goes to the pool at once, in a magazine of its own: two
/// atomics for each 62 pages, or for fewer if the pool's magazines are smaller. If a bulk has fewer
/// than 8 pages of a pool, these are returned one by one.
///
/// ```
/// use netmem_pool::{Bulk, PoolOptions, Private, RegionOptions, RegionProvider};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = RegionProvider::<Private>::new(RegionOptions::new(32).build()?);
/// let mut pool = PoolOptions::new("rx0").build(memory, None)?;
/// let mut bulk = Bulk::new();
/// for _ in 0..20 {
///     bulk.add(pool.alloc().ok_or("no page")?);
/// }
/// drop(bulk);
/// assert_eq!(pool.stats().inflight(), 0);
/// # Ok(())
/// # }
/// ```
pub struct Bulk<M: Memory> {
    /// The first `n` are pages. This value has the last count of each.
    pages: [NonNull<Desc>; MAGAZINE],
    n: usize,
    kind: PhantomData<Frag<M>>,
}

// SAFETY: exclusive ownership of pages that are in no use.
unsafe impl<M: Memory> Send for Bulk<M> {}

impl<M: Memory> Bulk<M> {
    /// An empty bulk.
    #[must_use]
    pub fn new() -> Self {
        Self { pages: [NonNull::dangling(); MAGAZINE], n: 0, kind: PhantomData }
    }

    /// Drops a page or a fragment. Its page has one holder less. If this was the last holder, the
    /// page is returned by the next [`flush`](Self::flush). A flush happens whenever 62 pages are
    /// collected, and at the end.
    pub fn add(&mut self, frag: impl Into<Frag<M>>) {
        let desc = frag.into().into_desc();
        // SAFETY: the count was the fragment's, and is put here.
        if !unsafe { desc::put_last(desc) } {
            return;
        }
        if self.n == self.pages.len() {
            self.flush();
        }
        self.pages[self.n] = desc;
        self.n += 1;
    }

    /// Returns the pages: one group for each pool.
    pub fn flush(&mut self) {
        let mut panics = Panics::default();
        let mut rest = &mut self.pages[..std::mem::take(&mut self.n)];
        while let Some(first) = rest.first() {
            // SAFETY: this value owns the pages; *header stays*.
            let header = |desc: &NonNull<Desc>| unsafe { desc.as_ref() }.header();
            let this = header(first);
            let mut same = 0;
            for i in 0..rest.len() {
                if header(&rest[i]) == this {
                    rest.swap(i, same);
                    same += 1;
                }
            }
            let (group, others) = rest.split_at_mut(same);
            // SAFETY: all pages of the group have this header, there is at least one, and this
            // value owns them all.
            unsafe { PoolHeader::recycle_many(NonNull::new_unchecked(this), group, &mut panics) };
            rest = others;
        }
        panics.resume();
    }
}

impl<M: Memory> Default for Bulk<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Memory> Drop for Bulk<M> {
    fn drop(&mut self) {
        self.flush();
    }
}

impl<M: Memory> fmt::Debug for Bulk<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bulk<{}>({} pages)", M::NAME, self.n)
    }
}
