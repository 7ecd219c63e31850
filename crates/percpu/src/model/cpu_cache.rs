//! The models of a [`CpuCache`]: of the sequences on a pair of magazines, and of the depot's lists.

use super::*;
use crate::cpu_cache::CpuCache;
use crate::error::NothingFound;
use crate::magazine::Magazine;
use crate::tagged::List;

/// A cache whose magazines `capacity` items fill.
fn cache_of(capacity: usize, magazines: usize) -> Arc<CpuCache> {
    Arc::new(CpuCache::new(capacity, magazines).unwrap())
}

/// Puts one item in. Returns false if it was refused.
fn push(cache: &CpuCache, n: usize) -> bool {
    // SAFETY: the model keeps the cache.
    unsafe { CpuCache::push(cache, item(n), |_| unreachable!("it is not closed")) }
}

/// All that is in the cache, when no other thread uses it.
fn drain(cache: &CpuCache, found: &mut Vec<NonZeroUsize>) {
    cache.reclaim().unwrap();
    found.extend(std::iter::from_fn(|| cache.pop().ok()));
    found.sort();
}

/// For models of more steps: at most three preemptions.
fn bounded(body: impl Fn() + Sync + Send + 'static) {
    let body = std::sync::Arc::new(body);
    crate::both_ways(|| {
        let body = body.clone();
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.max_branches = 10_000;
        model.check(move || body());
    });
}

/// Pop against push: an item is found once, with what was written before it was pushed. The push is
/// on the CPU of the pop, or on another.
#[test]
fn pop_against_push() {
    for cpu in [0, 1] {
        check(None, move || {
            let (cache, contents) = (cache_of(2, 4), Contents::new());
            let pusher = {
                let (cache, contents) = (cache.clone(), contents.clone());
                on(cpu, move || {
                    contents.write();
                    push(&cache, 7)
                })
            };
            thread::yield_now();
            let mut found: Vec<_> = cache.pop().into_iter().collect();
            if !found.is_empty() {
                assert_eq!(contents.read(), 1);
            }
            let pushed = pusher.join().unwrap();
            drain(&cache, &mut found);
            assert_eq!(found, if pushed { vec![item(7)] } else { vec![] });
        });
    }
}

/// Pop against pop on one CPU: each item is found by one of them.
#[test]
fn pop_against_pop() {
    check(None, || {
        let cache = cache_of(2, 4);
        assert!(push(&cache, 7) && push(&cache, 8));
        let popper = {
            let cache = cache.clone();
            on(0, move || cache.pop().ok())
        };
        let mut found: Vec<_> = cache.pop().into_iter().collect();
        found.extend(popper.join().unwrap());
        drain(&cache, &mut found);
        assert_eq!(found, [item(7), item(8)]);
    });
}

/// Pop against reclaim: the item is the popping thread's, or in the depot.
#[test]
fn pop_against_reclaim() {
    check(None, || {
        let cache = cache_of(2, 4);
        assert!(push(&cache, 7) && push(&cache, 8));
        let popper = {
            let cache = cache.clone();
            on(0, move || cache.pop().ok())
        };
        let moved = cache.reclaim().unwrap();
        let mut found: Vec<_> = popper.join().unwrap().into_iter().collect();
        assert!(moved == 2 || found.len() == 1 && moved == 1, "{moved} of {found:?}");
        drain(&cache, &mut found);
        assert_eq!(found, [item(7), item(8)]);
    });
}

/// A pop that makes the previous magazine the loaded one, and a push that does so, against reclaim.
#[test]
fn swap_against_reclaim() {
    check(None, || {
        let cache = cache_of(1, 6);
        assert!(push(&cache, 7) && push(&cache, 8));
        let other = {
            let cache = cache.clone();
            on(0, move || {
                let found: Vec<_> = [(); 2].iter().filter_map(|()| cache.pop().ok()).collect();
                let back = found.into_iter().filter(|item| !push(&cache, item.get()));
                back.collect::<Vec<_>>()
            })
        };
        cache.reclaim().unwrap();
        let mut found = other.join().unwrap();
        drain(&cache, &mut found);
        assert_eq!(found, [item(7), item(8)]);
    });
}

/// A pop that fetches a magazine from the depot against reclaim: the magazine is on the CPU or in
/// the depot, never both.
#[test]
fn load_against_reclaim() {
    check(None, || {
        let cache = cache_of(2, 4);
        // SAFETY: the model keeps the cache.
        assert_eq!(unsafe { CpuCache::push_many(&*cache, &[item(7), item(8)]) }, 2);
        let popper = {
            let cache = cache.clone();
            on(1, move || cache.pop().ok())
        };
        cache.reclaim().unwrap();
        let mut found: Vec<_> = popper.join().unwrap().into_iter().collect();
        drain(&cache, &mut found);
        assert_eq!(found, [item(7), item(8)]);
    });
}

/// Push against reclaim, of a CPU that has no magazine, one with room, a full one, and two full
/// ones: the last is the exchange of a magazine with the depot.
#[test]
fn push_against_reclaim() {
    for before in 0..4 {
        bounded(move || {
            let (cache, contents) = (cache_of(1, 6), Contents::new());
            (0..before).for_each(|n| assert!(push(&cache, 1 + n)));
            let pusher = {
                let (cache, contents) = (cache.clone(), contents.clone());
                on(0, move || {
                    contents.write();
                    push(&cache, 7)
                })
            };
            cache.reclaim().unwrap();
            let mut found: Vec<_> = std::iter::from_fn(|| cache.pop().ok()).collect();
            if found.contains(&item(7)) {
                assert_eq!(contents.read(), 1);
            }
            let pushed = pusher.join().unwrap();
            drain(&cache, &mut found);
            let mut all: Vec<_> = (0..before).map(|n| item(1 + n)).collect();
            all.extend(pushed.then_some(item(7)));
            assert_eq!(found, all);
        });
    }
}

/// Exchange against exchange on one CPU, both of whose magazines are full: each item once, and a
/// magazine that was fetched for nothing is empty again.
#[test]
fn exchange_against_exchange() {
    check(None, || {
        let cache = cache_of(2, 6);
        (1..=4).for_each(|n| assert!(push(&cache, n)));
        let pusher = {
            let cache = cache.clone();
            on(0, move || push(&cache, 6))
        };
        let mut all: Vec<_> = (1..=4).map(item).collect();
        all.extend(push(&cache, 5).then_some(item(5)));
        all.extend(pusher.join().unwrap().then_some(item(6)));
        let mut found = Vec::new();
        drain(&cache, &mut found);
        assert_eq!(found, all);
        (1..=8).for_each(|n| assert!(push(&cache, n)));
        let mut found = Vec::new();
        drain(&cache, &mut found);
        assert_eq!(found, (1..=8).map(item).collect::<Vec<_>>());
    });
}

/// A load that another thread of this CPU has overtaken: the other thread has loaded a magazine,
/// filled it and put items on the previous one. Neither of the two may be taken for an empty one.
#[test]
fn load_against_load_and_push() {
    bounded(|| {
        let cache = cache_of(2, 6);
        // Two empty magazines on this CPU, two full ones in the depot.
        (1..=3).for_each(|n| assert!(push(&cache, n)));
        (1..=3).for_each(|_| assert!(cache.pop().is_ok()));
        // SAFETY: the model keeps the cache.
        assert_eq!(unsafe { CpuCache::push_many(&*cache, &[item(1), item(2), item(3), item(4)]) }, 4);
        let popper = {
            let cache = cache.clone();
            on(0, move || cache.pop().ok())
        };
        let mut found = Vec::new();
        if let Ok(item) = cache.pop() {
            found.extend((!push(&cache, item.get())).then_some(item));
        }
        found.extend((!push(&cache, 5)).then_some(item(5)));
        found.extend(popper.join().unwrap());
        drain(&cache, &mut found);
        assert_eq!(found, (1..=5).map(item).collect::<Vec<_>>());
    });
}

/// A full magazine goes from one CPU by the depot to the other: what was written before its items
/// were pushed is seen.
#[test]
fn hand_over_between_cpus() {
    check(None, || {
        let (cache, contents) = (cache_of(1, 6), Contents::new());
        let pusher = {
            let (cache, contents) = (cache.clone(), contents.clone());
            on(1, move || {
                contents.write();
                (1..=3).for_each(|n| assert!(push(&cache, n)));
            })
        };
        thread::yield_now();
        let mut found: Vec<_> = cache.pop().into_iter().collect();
        if !found.is_empty() {
            assert_eq!(contents.read(), 1);
        }
        pusher.join().unwrap();
        drain(&cache, &mut found);
        assert_eq!(found, [item(1), item(2), item(3)]);
    });
}

/// Close against push, of a CPU without a magazine, of one that hands a full magazine over, and of
/// one with room: each item is found, refused, or passed to the pushing thread; and the thread that
/// has them all may free the cache.
#[test]
fn push_against_close() {
    for (capacity, before) in [(1, 0), (1, 2), (2, 1)] {
        check(None, move || {
            let (cache, contents) = (cache_of(capacity, 6), Contents::new());
            (0..before).for_each(|n| assert!(push(&cache, 1 + n)));
            let pusher = {
                let (cache, contents) = (cache.clone(), contents.clone());
                on(0, move || {
                    let mut back = Vec::new();
                    // SAFETY: the model keeps the memory, and the item stands for the right to
                    // touch it.
                    if !unsafe { CpuCache::push(&*cache, item(7), |item| back.push(item)) } {
                        back.push(item(7));
                    }
                    if !back.is_empty() {
                        assert_eq!(contents.read(), 1, "what was done before closing");
                    }
                    back
                })
            };
            contents.write();
            cache.close().unwrap();
            let mut found: Vec<_> = std::iter::from_fn(|| cache.pop().ok()).collect();
            if found.len() == before + 1 {
                // All are here, so no thread has a reason to touch the cache.
                cache.witness();
            }
            found.extend(pusher.join().unwrap());
            found.sort();
            let mut all: Vec<_> = (0..before).map(|n| item(1 + n)).collect();
            all.push(item(7));
            assert_eq!(found, all);
            assert!(!push(&cache, 9));
            assert_eq!(cache.pop(), Err(NothingFound::Refused));
        });
    }
}

/// Close against reclaim: the cache is closed whichever comes first, and all items are found
/// afterwards.
#[test]
fn reclaim_against_close() {
    check(None, || {
        let cache = cache_of(1, 4);
        assert!(push(&cache, 7));
        let reclaimer = {
            let cache = cache.clone();
            on(1, move || cache.reclaim().unwrap())
        };
        cache.close().unwrap();
        reclaimer.join().unwrap();
        assert_eq!(cache.pop(), Ok(item(7)));
        assert!(!push(&cache, 8));
    });
}

/// ABA: a magazine is popped by one thread at a time, also if the head is taken and pushed again in
/// the middle of a pop.
#[test]
fn list_pop_against_pop_and_push() {
    check(None, || {
        let magazines: Arc<Vec<_>> = Arc::new((1..=3).map(|index| Magazine::new(1, index)).collect());
        let list = Arc::new(List::new());
        magazines.iter().rev().for_each(|magazine| list.put_back(magazine));
        let popper = {
            let (list, magazines) = (list.clone(), magazines.clone());
            thread::spawn(move || list.pop(&magazines).map(|m| m.index))
        };
        let mut mine: Vec<_> = [(); 2].iter().filter_map(|()| list.pop(&magazines)).collect();
        list.put_back(mine.remove(0));
        let mut all = vec![mine[0].index, popper.join().unwrap().unwrap()];
        all.extend(std::iter::from_fn(|| list.pop(&magazines)).map(|m| m.index));
        all.sort();
        assert_eq!(all, [1, 2, 3], "popped twice, or lost");
    });
}
