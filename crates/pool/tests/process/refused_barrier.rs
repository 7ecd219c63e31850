//! The kernel refuses the barrier at the end of a pool, and permits it later. `lingering`
//! lists the pools of the process.

use crate::common::{Strict, provider};
use netmem_percpu::{Mode, mode};
use netmem_pool::{Page, PoolOptions, Private, lingering};
use netmem_testing::without_membarrier;
use std::sync::Arc;
use std::thread;

/// Proves POOL-11: pages that are on CPUs when the kernel refuses the barrier of the pool's end are
/// released to the provider by the next `lingering` for which it does not.
#[test]
fn a_refused_end_is_tried_again() {
    let _alone = crate::alone();
    if let Mode::Portable(_) = mode() {
        return println!("no barrier of the kernel is used in this mode");
    }
    for (held, shared) in [(0, false), (2, false), (0, true), (2, true)] {
        let (memory, domain) = (provider::<Private>(64), Arc::new(Strict::default()));
        let options = PoolOptions::new("refused").cache(8).magazine(8);
        let mut pages: Vec<Page<Private>> = Vec::new();
        let mut take = |page: Option<Page<Private>>| pages.push(page.unwrap());
        // The pages are dropped on another thread, into the magazines of CPUs, of which the thread
        // that ends the pool cannot ask for a barrier.
        let closed = if shared {
            let pool = options.build_shared(memory.clone(), Some(domain.clone())).unwrap();
            (0..8).for_each(|_| take(pool.alloc()));
            let kept = pages.split_off(8 - held);
            thread::scope(|scope| scope.spawn(|| drop(std::mem::take(&mut pages))).join().unwrap());
            pages = kept;
            without_membarrier(|| pool.close())
        } else {
            let mut pool = options.build(memory.clone(), Some(domain.clone())).unwrap();
            (0..8).for_each(|_| take(pool.alloc()));
            let kept = pages.split_off(8 - held);
            thread::scope(|scope| scope.spawn(|| drop(std::mem::take(&mut pages))).join().unwrap());
            pages = kept;
            without_membarrier(|| pool.close())
        };
        let on_cpus = closed.outstanding as usize - held;
        assert!(on_cpus >= 1, "{closed:?}");
        // The filter is the other thread's: this one is permitted.
        let lingers = || lingering().into_iter().filter(|pool| pool.name == "refused").collect::<Vec<_>>();
        assert_eq!(lingers().iter().map(|pool| pool.pages).sum::<u64>(), held as u64, "{:?}", lingers());
        drop(pages);
        assert!(lingers().is_empty());
        assert_eq!((std::iter::from_fn(|| memory.page()).collect::<Vec<_>>().len(), domain.mapped()), (64, 0));
    }
}
