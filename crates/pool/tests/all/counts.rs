//! Fragments as counts that the caller keeps by page number.

use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};

/// Proves POOL-5: fragments that were turned into counts keep their page in flight, in any number.
/// The last count or fragment returns the page, also after the pool has ended.
#[test]
fn counts_by_number() {
    let provider = RegionProvider::new(RegionOptions::new(16).huge_pages(false).build::<Private>().unwrap());
    let other = RegionProvider::new(RegionOptions::new(16).huge_pages(false).build::<Private>().unwrap());
    let region = provider.region().clone();
    let mut pool = PoolOptions::new("counts by number").build(provider, None).unwrap();
    let frag = pool.alloc().unwrap().freeze();
    assert_eq!((region.index_of(&frag), other.region().index_of(&frag)), (Some(frag.index()), None));
    assert_eq!(region.index_of(&other.page().unwrap().freeze()), None);
    let (index, same) = (frag.clone().into_count(), frag.slice(0..1).into_count());
    assert_eq!((index, same, frag.index()), (frag.index(), index, index));
    let _ = frag.clone().into_count();
    // SAFETY: two of the three.
    unsafe { region.put(index, 2) };
    assert_eq!(pool.stats().inflight(), 1);
    drop(frag);
    assert_eq!(pool.stats().inflight(), 1);
    // SAFETY: the third.
    unsafe { region.put(index, 1) };
    assert_eq!(pool.stats().inflight(), 0);
    let frag = pool.alloc().unwrap().freeze();
    let index = [frag.clone(), frag.clone(), frag].map(|f| f.into_count())[0];
    assert_eq!(pool.close().outstanding, 1);
    // SAFETY: all three.
    unsafe { region.put(index, 3) };
    assert!(!netmem_pool::lingering().iter().any(|l| l.name == "counts by number"));
}
