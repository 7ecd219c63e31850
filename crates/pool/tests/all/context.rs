//! The poll context: which drops go to the array cache, and which go to the magazines of CPUs.

use crate::common::{alloc, close_balanced, pool, provider, remote_frees};
use netmem_pool::{
    Frag, Memory, PAGE_SIZE, Page, PagePool, PageRoom, PoolOptions, Private, RegionOptions, RegionProvider,
};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// Proves POOL-2: in the poll context, allocation pops the page that was dropped last. Neither
/// touches anything but the array cache.
#[test]
fn cache_serves_the_context() {
    let (mut pool, domain) = pool(PoolOptions::new("context").prefill(8), 8);
    let before = pool.stats();
    pool.poll(|napi| {
        for _ in 0..100 {
            let page = napi.alloc().unwrap();
            let index = page.index();
            drop(page);
            assert_eq!(napi.alloc().unwrap().index(), index, "last in, first out");
        }
    });
    let after = pool.stats();
    assert_eq!(after.alloc_fast - before.alloc_fast, 200);
    assert_eq!(after.recycle_cached - before.recycle_cached, 200);
    assert_eq!((remote_frees(after), after.alloc_slow, after.mapped), (0, 0, before.mapped));
    close_balanced(pool, &domain);
}

/// A page that is allocated and released singly costs what it costs in a poll, and counts as there.
/// A page of another pool comes back, and one with another holder returns with that holder.
#[test]
fn single_pages_need_no_poll() {
    let (mut pool, domain) = pool(PoolOptions::new("single").cache(4).prefill(4), 16);
    let (mut other, other_domain) = self::pool(PoolOptions::new("other"), 4);
    let before = pool.stats();
    for _ in 0..100 {
        let page = pool.alloc_single().unwrap();
        let index = page.index();
        assert!(pool.release_single(page.freeze()).is_ok());
        let page = pool.alloc_single().unwrap();
        assert_eq!(page.index(), index, "last in, first out");
        let frag = page.freeze();
        assert!(pool.release_single(frag.clone()).is_ok());
        assert_eq!(pool.stats().inflight(), 1, "it has another holder");
        assert!(pool.release_single(frag).is_ok());
    }
    let after = pool.stats();
    assert_eq!((after.alloc_fast - before.alloc_fast, after.recycle_cached - before.recycle_cached), (200, 200));
    assert_eq!(remote_frees(after), 0);

    // More than the cache has room for.
    let pages: Vec<_> = std::iter::from_fn(|| pool.alloc_single()).collect();
    assert_eq!(pages.len(), 16);
    pages.into_iter().for_each(|page| assert!(pool.release_single(page.freeze()).is_ok()));
    assert_eq!(pool.stats().recycle_cache_full, 12);
    let again: Vec<_> = std::iter::from_fn(|| pool.alloc_single()).collect();
    assert_eq!(again.len(), 16, "all of them are there again");
    drop(again);

    let foreign = other.alloc().unwrap().freeze();
    let foreign = pool.release_single(foreign).expect_err("a page of another pool");
    assert_eq!(other.stats().inflight(), 1);
    assert!(other.release_single(foreign).is_ok());
    close_balanced(pool, &domain);
    close_balanced(other, &other_domain);
}

/// A group moves between the cache and an array as its pages would one by one, and counts as they
/// do. What would not go to the cache stays in its place: a page with another holder, one of
/// another pool, and one for which there is no room.
#[test]
fn groups_need_no_poll() {
    let (mut pool, domain) = pool(PoolOptions::new("group").cache(8).prefill(8), 16);
    let (mut other, other_domain) = self::pool(PoolOptions::new("other"), 4);
    let before = pool.stats();
    let mut frags = group(&mut pool, 5);
    let newest_first: Vec<_> = frags.iter().flatten().map(Frag::index).collect();
    assert_eq!(frags.iter().flatten().map(Frag::len).sum::<usize>(), 5 * PAGE_SIZE);
    assert_eq!(pool.stats().inflight(), 5);
    frags.insert(2, None);
    assert_eq!((pool.release_group(&mut frags), frags.iter().flatten().count()), (6, 0));
    let again: Vec<_> = group(&mut pool, 5).iter().flatten().map(Frag::index).collect();
    assert_eq!(again, newest_first.into_iter().rev().collect::<Vec<_>>(), "last in, first out");
    let after = pool.stats();
    assert_eq!((after.alloc_fast - before.alloc_fast, after.recycle_cached - before.recycle_cached), (10, 5));
    assert_eq!((after.inflight(), remote_frees(after)), (0, 5), "dropped outside of a poll");

    let mut frags = group(&mut pool, 16);
    assert_eq!(frags.len(), 8, "what the cache has");
    let shared = frags[1].clone();
    assert_eq!(pool.poll(|napi| napi.release_group(&mut frags)), 1);
    assert_eq!(frags.iter().flatten().count(), 7);
    drop(shared);
    frags.push(other.alloc().map(Page::freeze));
    assert_eq!(pool.release_group(&mut frags), 8);
    assert_eq!(other.stats().inflight(), 1);
    drop(frags);

    let mut frags: Vec<_> = std::iter::from_fn(|| pool.alloc_single()).map(|page| Some(page.freeze())).collect();
    assert_eq!((frags.len(), pool.release_group(&mut frags)), (16, 8), "the cache is full");
    drop(frags);
    close_balanced(pool, &domain);
    close_balanced(other, &other_domain);
}

/// Up to `most` pages of the cache.
fn group<M: Memory>(pool: &mut PagePool<M>, most: usize) -> Vec<Option<Frag<M>>> {
    let mut frags = Vec::with_capacity(most);
    let n = pool.alloc_group(&mut frags.spare_capacity_mut()[..most]);
    // SAFETY: so many were written.
    unsafe { frags.set_len(n) };
    frags
}

/// Proves POOL-2: a queue is filled before its first poll.
#[test]
fn allocation_before_the_first_poll() {
    let (mut pool, domain) = pool(PoolOptions::new("early"), 16);
    let pages = alloc(&mut pool, 16);
    assert!(pool.alloc().is_none());
    drop(pages);
    close_balanced(pool, &domain);
}

/// Proves POOL-5: a page that is dropped outside of a poll, or on another thread during one,
/// returns by the magazine of that CPU.
#[test]
fn elsewhere_goes_by_magazines() {
    let (mut pool, domain) = pool(PoolOptions::new("elsewhere").magazine(4), 4);
    drop(pool.alloc().unwrap());
    assert_eq!(remote_frees(pool.stats()), 1);
    pool.poll(|napi| {
        let pages: Vec<_> = (0..4).map(|_| napi.alloc().unwrap()).collect();
        thread::scope(|s| s.spawn(move || drop(pages)).join().unwrap());
        assert!(napi.alloc().is_some(), "picked up when the cache is empty");
    });
    let stats = pool.stats();
    assert_eq!((remote_frees(stats), stats.recycle_cached, stats.alloc_refill), (5, 1, 1), "{stats:?}");
    close_balanced(pool, &domain);
}

/// Proves POOL-5: more pages than the array cache holds are returned at once, and every one can be
/// allocated again.
#[test]
fn more_returns_than_the_cache_holds() {
    for in_context in [false, true] {
        let (mut pool, domain) = pool(PoolOptions::new("spill").cache(4), 64);
        for _ in 0..3 {
            let pages = alloc(&mut pool, 64);
            match in_context {
                true => pool.poll(|_| drop(pages)),
                false => drop(pages),
            }
        }
        let pages = alloc(&mut pool, 64);
        drop(pages);
        let stats = close_balanced(pool, &domain);
        assert_eq!(stats.mapped, 64, "nothing was lost on the way, nothing replaced");
        assert_eq!(stats.recycle_cache_full, if in_context { 3 * 60 } else { 0 });
    }
}

/// Proves POOL-3: in nested polls each page goes to its own pool's cache, and only while that pool
/// is polled.
#[test]
fn nested_polls() {
    let (mut a, domain_a) = pool(PoolOptions::new("a"), 8);
    let (mut b, domain_b) = pool(PoolOptions::new("b"), 8);
    a.poll(|in_a| {
        let page_a = in_a.alloc().unwrap();
        b.poll(|in_b| drop((page_a, in_b.alloc().unwrap())));
    });
    assert_eq!((a.stats().recycle_cached, b.stats().recycle_cached), (1, 1));
    let page_a = a.alloc().unwrap();
    b.poll(|in_b| drop((page_a, in_b.alloc().unwrap())));
    let (stats_a, stats_b) = (close_balanced(a, &domain_a), close_balanced(b, &domain_b));
    assert_eq!((stats_a.recycle_cached, remote_frees(stats_a)), (1, 1));
    assert_eq!((stats_b.recycle_cached, remote_frees(stats_b)), (2, 0));
}

/// Proves POOL-3: a poll that panics ends its context while it unwinds.
#[test]
fn a_panic_ends_the_context() {
    let (mut pool, domain) = pool(PoolOptions::new("panic"), 8);
    let outside = pool.alloc().unwrap();
    let result = catch_unwind(AssertUnwindSafe(|| {
        pool.poll(|napi| {
            let _dropped_while_unwinding = napi.alloc();
            panic!("as the test wants it");
        })
    }));
    assert!(result.is_err());
    assert_eq!(pool.stats().recycle_cached, 1);
    drop(outside);
    assert_eq!(remote_frees(pool.stats()), 1, "the context ended with the panic");
    pool.poll(|napi| drop(napi.alloc()));
    assert_eq!(close_balanced(pool, &domain).recycle_cached, 2);
}

/// Proves POOL-3: a pool that was replaced on its queue has no poll context: its pages do not go to
/// the new pool's cache.
#[test]
fn a_replaced_pool_is_no_owner() {
    let shared = provider::<Private>(8);
    let make = |name| PoolOptions::new(name).cache(4).build(shared.clone(), None).unwrap();
    let mut old: PagePool<Private> = make("old");
    let (one, two) = (old.alloc().unwrap(), old.alloc().unwrap());
    let mut new = make("new");
    new.poll(|_| drop(one));
    assert_eq!((old.stats().recycle_cached, remote_frees(old.stats())), (0, 1));
    assert_eq!(old.close().outstanding, 1);
    new.poll(|_| drop(two));
    let stats = new.stats();
    assert_eq!((stats.recycle_cached, remote_frees(stats), stats.returned()), (0, 0, 0));
    let back: Vec<_> = (0..8).map(|_| new.alloc().unwrap()).collect();
    assert_eq!(back.len(), 8, "the old pool's pages are back with the provider");
}

/// Proves POOL-3: the context moves with its pool to another thread.
#[test]
fn the_pool_moves_between_threads() {
    let (mut pool, domain) = pool(PoolOptions::new("moves"), 8);
    for _ in 0..4 {
        let here = pool.poll(|napi| napi.alloc().unwrap());
        pool = thread::spawn(move || {
            pool.poll(|napi| drop((here, napi.alloc())));
            pool
        })
        .join()
        .unwrap();
    }
    let stats = close_balanced(pool, &domain);
    assert_eq!((stats.recycle_cached, remote_frees(stats)), (8, 0));
}

/// Two reborrowed contexts can be swapped, because their lifetimes may be the same. That is
/// harmless: each is still the only context of its pool, and cannot leave the inner poll, which is
/// inside both polls. The header of a page does not depend on the context, so every page returns to
/// the cache of its own pool, and the polls go on with their own contexts.
#[test]
fn reborrowed_contexts_that_are_exchanged() {
    let (mut outer, outer_domain) = pool(PoolOptions::new("outer"), 8);
    let (mut inner, inner_domain) = pool(PoolOptions::new("inner"), 4);
    outer.poll(|in_outer| {
        inner.poll(|in_inner| {
            {
                let (mut a, mut b) = (in_outer.reborrow(), in_inner.reborrow());
                std::mem::swap(&mut a, &mut b);
                let of_inner: Vec<_> = std::iter::from_fn(|| a.alloc()).collect();
                let of_outer: Vec<_> = std::iter::from_fn(|| b.alloc()).collect();
                assert_eq!((of_inner.len(), of_outer.len()), (4, 8));
            }
            assert_eq!(std::iter::from_fn(|| in_outer.alloc()).collect::<Vec<_>>().len(), 8);
            assert_eq!(std::iter::from_fn(|| in_inner.alloc().map(drop)).take(100).count(), 100);
        });
        assert!(in_outer.alloc().is_some());
    });
    let (outer, inner) = (close_balanced(outer, &outer_domain), close_balanced(inner, &inner_domain));
    assert_eq!((remote_frees(outer), remote_frees(inner)), (0, 0), "all drops were in their pool's context");
}

/// User code panics in the middle of a bulk allocation: the pages behind the panic stay in the
/// array cache.
#[test]
fn cached_pages_after_a_panic() {
    let region = RegionOptions::new(256).huge_pages(false).populate(false).build::<Private>().unwrap();
    let options = PoolOptions::new("panics").cache(80).prefill(80);
    let mut pool = options.build(RegionProvider::new(region), None).unwrap();
    for at in [0, 7, 63] {
        pool.poll(|napi| {
            let mut room = PageRoom::new();
            let mut pages = napi.alloc_cached(&mut room, 64);
            let mut places: Vec<_> = (0..64).collect();
            let take = |&mut i: &mut i32, _: &mut (), page: Page<Private>| {
                if i == at { resume_unwind(Box::new(())) } else { drop(page) }
            };
            assert!(catch_unwind(AssertUnwindSafe(|| pages.take_with(&mut places, &mut [(); 64], take))).is_err());
            assert_eq!(pages.len(), 63 - at as usize);
        });
        assert_eq!(pool.stats().inflight(), 0);
    }
    // In place: the page that is dropped by the panic is written to the first place, whose
    // page was taken.
    for at in [0, 7, 63] {
        pool.poll(|napi| {
            // SAFETY: only the panic drops a page before the value is dropped.
            let mut pages = unsafe { napi.alloc_in_place(80) };
            let (mut held, mut places) = (Vec::new(), (0..64).collect::<Vec<_>>());
            let take = |&mut i: &mut i32, _: &mut (), page: Page<Private>| {
                if i == at { resume_unwind(Box::new(())) } else { held.push(page) }
            };
            assert!(catch_unwind(AssertUnwindSafe(|| pages.take_with(&mut places, &mut [(); 64], take))).is_err());
            assert_eq!((pages.len(), held.len()), (79 - at as usize, at as usize));
            drop(pages);
            // SAFETY: no page is dropped before the value is.
            held.extend(unsafe { napi.alloc_in_place(80) });
            assert_eq!(held.iter().map(Page::index).collect::<HashSet<_>>().len(), 80);
        });
        assert_eq!(pool.stats().inflight(), 0);
    }
}

/// Pages from the array cache in bulk: each once, no more than there are, and those that are not
/// taken stay in the cache and in the counters, also if the array has filled meanwhile.
#[test]
fn cached_pages_in_bulk() {
    let region = RegionOptions::new(256).huge_pages(false).populate(false).build::<Private>().unwrap();
    let options = PoolOptions::new("bulk").cache(80).prefill(80);
    let mut pool = options.build(RegionProvider::new(region), None).unwrap();
    for (most, taken) in [(0, 0), (1, 1), (5, 3), (64, 64), (64, 0), (200, 64)] {
        let before = pool.stats();
        let held = pool.poll(|napi| {
            let mut room = PageRoom::new();
            let mut pages = napi.alloc_cached(&mut room, most);
            let held: Vec<_> = pages.by_ref().take(taken).collect();
            assert_eq!(held.iter().map(Page::len).max().unwrap_or(PAGE_SIZE), PAGE_SIZE);
            assert_eq!(format!("{pages:?}"), format!("CachedPages({})", most.min(PageRoom::PAGES) - taken));
            held
        });
        let ids: HashSet<_> = held.iter().map(Page::index).collect();
        assert_eq!(ids.len(), taken, "a page is allocated twice");
        assert_eq!(pool.stats().alloc_fast - before.alloc_fast, taken as u64);
        pool.poll(|_| drop(held));
        assert_eq!(pool.stats().inflight(), 0);
    }
    // In place: the same pages, and what was not taken is in the cache as it was, or moves down.
    for (most, taken) in [(0, 0), (1, 1), (5, 3), (64, 64), (64, 0), (80, 79), (200, 80)] {
        let cached = |pool: &mut PagePool<Private>| {
            pool.poll(|napi| napi.alloc_cached(&mut PageRoom::new(), 64).map(|page| page.index()).collect::<Vec<_>>())
        };
        let all = cached(&mut pool);
        let held = pool.poll(|napi| {
            // SAFETY: no page is dropped before the value is.
            let mut pages = unsafe { napi.alloc_in_place(most) };
            assert_eq!(pages.len(), most.min(80));
            let (mut held, mut places) = (Vec::new(), vec![(); taken]);
            let n = pages.take_with(&mut places, &mut vec![(); taken + 1], |_, _, page| held.push(page));
            assert_eq!((n, pages.len()), (taken, most.min(80) - taken));
            held
        });
        let ids: HashSet<_> = held.iter().map(Page::index).collect();
        assert_eq!(ids.len(), taken, "a page is allocated twice");
        let rest = cached(&mut pool);
        assert!(!rest.iter().any(|index| ids.contains(index)), "a page in the cache is in use");
        assert!(taken > 0 || rest == all);
        pool.poll(|_| drop(held));
        assert_eq!(pool.stats().inflight(), 0);
    }
    // The cache has fewer than are asked for, and the rest is allocated one by one.
    let (cached, others) = pool.poll(|napi| {
        let mut room = PageRoom::new();
        let mut cached: Vec<_> = napi.alloc_cached(&mut room, 64).collect();
        let before = cached.len();
        cached.extend(napi.alloc_cached(&mut room, 64));
        assert_eq!((before, cached.len(), napi.alloc_cached(&mut room, 64).count()), (64, 80, 0));
        (cached, (0..20).map(|_| napi.alloc().unwrap()).collect::<Vec<_>>())
    });
    let ids: HashSet<_> = cached.iter().chain(&others).map(Page::index).collect();
    assert_eq!(ids.len(), 100);
    // Pages that fill the array while others are to be put back.
    pool.poll(|napi| {
        drop(cached);
        let mut room = PageRoom::new();
        let pages = napi.alloc_cached(&mut room, 64);
        drop(others);
        drop(pages);
        let all: Vec<_> = (0..256).map(|_| napi.alloc().unwrap()).collect();
        assert_eq!(all.iter().map(Page::index).collect::<HashSet<_>>().len(), 256);
    });
    assert_eq!(pool.stats().inflight(), 0);
}
