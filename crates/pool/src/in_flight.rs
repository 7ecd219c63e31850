//! Which pages of a pool are in flight. [`PoolStats`](crate::PoolStats) counts them without reading
//! a descriptor. To name them, all descriptors are read.

use crate::memory::Memory;
use crate::pool::PagePool;
use crate::region::Region;

impl<M: Memory> PagePool<M> {
    /// Calls `f` for each page of `region` that is in flight: allocated from this pool, and not
    /// returned. The arguments are the page's number in the region, and the number of values
    /// ([`Page`](crate::Page), [`Frag`](crate::Frag), and counts) that refer to it.
    ///
    /// Pages that other threads returned are taken in first, as in [`stats`](Self::stats). A page
    /// that is returned meanwhile may be among those in flight.
    ///
    /// Needs a pool with a domain: a page's descriptor has the identity of the pool that mapped it.
    /// If there is no domain, or the device is gone, `f` is not called. Cost: that of
    /// [`reclaim`](Self::reclaim), which is a membarrier if other CPUs have pages in magazines; a
    /// list of 8 bytes for each page that is idle in the pool is allocated and sorted; and a cache
    /// line is read for each page of the region that was ever handed out.
    ///
    /// Note: pages that are idle on other CPUs are among those in flight if they could not be
    /// reclaimed: if the pool may not [interrupt CPUs](crate::PoolOptions::interrupt_cpus), or the
    /// kernel refused the barrier.
    pub fn each_in_flight(&mut self, region: &Region<M>, mut f: impl FnMut(u32, u32)) {
        self.reclaim();
        let s = self.shared();
        let mut idle = Vec::new();
        s.front.cache.each(|desc| idle.push(desc.as_ptr().addr()));
        idle.sort_unstable();
        let mut index = 0;
        region.each_desc(&mut |desc| {
            if desc.is_mapped_by(s.id) && idle.binary_search(&std::ptr::from_ref(desc).addr()).is_err() {
                f(index, desc.refs());
            }
            index += 1;
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::{Direction, DmaDomain, Frag, KernelShared, MapError, Page, PoolOptions, RegionOptions, RegionProvider};
    use std::sync::Arc;

    #[derive(Debug)]
    struct Flat;
    impl DmaDomain for Flat {
        fn map(&self, addr: *mut u8, _: usize, _: Direction) -> Result<u64, MapError> {
            Ok(addr.addr() as u64)
        }

        fn unmap(&self, _: u64, _: usize) {}
    }

    /// Pages in the cache, behind it, in magazines and with the provider are not in flight; pages
    /// of another pool are not this pool's.
    #[test]
    fn pages_in_flight_are_those_that_were_not_returned() {
        let region = RegionOptions::new(64).huge_pages(false).build::<KernelShared>().unwrap();
        let memory = RegionProvider::new(region);
        let domain: Arc<dyn DmaDomain> = Arc::new(Flat);
        let mut pool = PoolOptions::new("a").cache(4).build(memory.clone(), Some(domain.clone())).unwrap();
        let mut other = PoolOptions::new("b").cache(4).build(memory.clone(), Some(domain)).unwrap();
        let region = memory.region().clone();
        let mut pages: Vec<_> = (0..20).map(|_| pool.alloc().unwrap()).collect();
        let others: Vec<_> = (0..20).map(|_| other.alloc().unwrap()).collect();
        let kept: Vec<Frag<_>> = pages.drain(..3).map(Page::freeze).collect();
        let shared = kept[0].clone();
        let refs = |i: usize| if i == 0 { 2 } else { 1 };
        let mut expected: Vec<_> = (0..3).map(|i| (region.index_of(&kept[i]).unwrap(), refs(i))).collect();
        expected.sort_unstable();
        std::thread::scope(|s| drop(s.spawn(|| pages.drain(..8).for_each(drop)).join()));
        pages.drain(..).for_each(drop);
        let mut in_flight = Vec::new();
        pool.each_in_flight(&region, |page, refs| in_flight.push((page, refs)));
        assert_eq!(in_flight, expected);
        drop((kept, shared));
        pool.shrink(0);
        pool.each_in_flight(&region, |page, _| panic!("page {page} is with the provider"));
        let mut n = 0;
        other.each_in_flight(&region, |_, _| n += 1);
        assert_eq!(n, others.len());
    }
}
