//! Many pages given back at once, for callers who know that they have many.

use crate::desc::{self, Desc};
use crate::frag::Frag;
use crate::home::Home;
use crate::memory::Memory;
use crate::panics::Panics;
use netmem_percpu::MAGAZINE;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Collects fragments that are no longer needed and sends their pages home together, grouped by pool: a transmit completion that
/// has frames of several devices, for instance.
///
/// Dropping fragments one by one is right, too, and costs no more in their pool's own poll context. Elsewhere a page that is
/// dropped waits in this CPU's magazine until that is full or the pool is short of pages; a bulk goes to the pool at once, in a
/// magazine of its own, at two atomics for each 62 pages (or fewer, where the pool's magazines are smaller). Pools that have fewer
/// than 8 pages in a bulk get them one by one.
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
    /// The first `n` are pages of which this has what was the last count.
    pages: [NonNull<Desc>; MAGAZINE],
    n: usize,
    kind: PhantomData<Frag<M>>,
}

// SAFETY: exclusive ownership of pages that are in no use.
unsafe impl<M: Memory> Send for Bulk<M> {}

impl<M: Memory> Bulk<M> {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self { pages: [NonNull::dangling(); MAGAZINE], n: 0, kind: PhantomData }
    }

    /// Drops a page or a fragment: one less holder now, and the page, if this was the last, home with the next
    /// [`flush`](Self::flush). There is one whenever 62 pages have come together, and at the end.
    pub fn add(&mut self, frag: impl Into<Frag<M>>) {
        let desc = frag.into().into_desc();
        // SAFETY: the count was the fragment's, and is given up.
        if !unsafe { desc::put_last(desc) } {
            return;
        }
        if self.n == self.pages.len() {
            self.flush();
        }
        self.pages[self.n] = desc;
        self.n += 1;
    }

    /// Sends the pages home: one group for each pool.
    pub fn flush(&mut self) {
        let mut panics = Panics::default();
        let mut rest = &mut self.pages[..std::mem::take(&mut self.n)];
        while let Some(first) = rest.first() {
            // SAFETY: the pages are ours; *home stays*.
            let home = |desc: &NonNull<Desc>| unsafe { desc.as_ref() }.home();
            let this = home(first);
            let mut same = 0;
            for i in 0..rest.len() {
                if home(&rest[i]) == this {
                    rest.swap(i, same);
                    same += 1;
                }
            }
            let (group, others) = rest.split_at_mut(same);
            // SAFETY: all of this home, at least the first, and all of them ours alone.
            unsafe { Home::take_back_many(NonNull::new_unchecked(this), group, &mut panics) };
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
