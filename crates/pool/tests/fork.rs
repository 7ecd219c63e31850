//! What a child process may do with a pool of its parent. `docs/return-path.md` has the table.
//!
//! One test: a child has only the thread that forked, so no other test's thread may hold a lock meanwhile.
#![allow(clippy::unwrap_used)]

mod common;

use common::{alloc, counting, provider};
use netmem_pool::{Bulk, Frag, PagePool, PoolOptions, Private};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

/// Runs `f` in a child, which exits with 0, or with 1 if `f` panics.
fn in_child(f: impl FnOnce()) -> End {
    // SAFETY: no other thread of this process is in a call of the library, and the child ends without unwinding out of here.
    unsafe {
        match libc::fork() {
            0 => {
                // The address sanitizer has a handler, which would exit.
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                let failed = catch_unwind(AssertUnwindSafe(f)).is_err();
                libc::_exit(i32::from(failed));
            }
            child => {
                assert!(child > 0);
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                if libc::WIFEXITED(status) {
                    End::Exit(libc::WEXITSTATUS(status))
                } else {
                    End::Signal(libc::WTERMSIG(status))
                }
            }
        }
    }
}

struct Held {
    pool: PagePool<Private>,
    page: Option<netmem_pool::Page<Private>>,
    frag: Option<Frag<Private>>,
    rest: Vec<netmem_pool::Page<Private>>,
}

/// Proves POOL-11 across `fork`: what a child drops changes its own copy of the books; its parent's pages are where they were. The pages'
/// memory is not in the child. A pool that the child makes is its own.
#[test]
fn in_a_child() {
    for cache in [0, 16] {
        let memory = provider::<Private>(32);
        let domain = counting();
        let pool = PoolOptions::new("parent").cache(cache).magazine(8);
        let mut pool = pool.build(memory.clone(), Some(domain.clone())).unwrap();
        let mut rest = alloc(&mut pool, 16);
        rest.iter_mut().for_each(|page| page.as_mut_slice()[0] = 7);
        let (page, frag) = (rest.pop(), rest.pop().map(netmem_pool::Page::freeze));
        // Some wait in a magazine.
        let away = rest.split_off(9);
        thread::spawn(move || drop(away)).join().unwrap();
        let mut held = Held { pool, page, frag, rest };
        let before = held.pool.stats_reader().stats();

        // Pages, fragments and bulks are dropped, in a poll and outside of it, and the books of the child are right.
        let end = in_child(|| {
            let Held { mut pool, page, frag, mut rest } = held_in_child(&mut held);
            drop(page);
            drop(frag.clone());
            pool.poll(|_| drop(frag));
            let mut bulk = Bulk::new();
            rest.drain(..).for_each(|page| bulk.add(page));
            drop(bulk);
            assert_eq!(pool.stats().inflight(), 0);
            // With what it had mapped all unmapped, in the child's copy of the domain.
            let closed = pool.close();
            assert_eq!(closed.outstanding, 0);
            assert_eq!(domain.maps(), domain.unmaps());
        });
        assert_eq!(end, End::Exit(0), "cache {cache}");

        // A pool that lingers in the child only.
        let end = in_child(|| {
            let Held { mut pool, page, frag: _frag, rest: _rest } = held_in_child(&mut held);
            pool.device_gone();
            let closed = pool.close();
            assert_eq!(closed.outstanding, 11);
            assert_eq!(netmem_pool::lingering()[0].pages, 11);
            drop(page);
            assert_eq!(netmem_pool::lingering()[0].pages, 10);
        });
        assert_eq!(end, End::Exit(0), "cache {cache}");

        // The memory is not there.
        assert_eq!(
            in_child(|| assert!(held.frag.as_ref().is_some_and(|frag| frag[0] == 7))),
            End::Signal(libc::SIGSEGV)
        );
        let end = in_child(|| {
            if let Some(mut page) = held.pool.alloc() {
                page.as_mut_slice()[0] = 1;
            }
        });
        assert_eq!(end, End::Signal(libc::SIGSEGV));

        // A pool of the child's own, and a page that it allocates from its parent's and does not touch.
        let end = in_child(|| {
            drop(held.pool.alloc());
            let mut own = PoolOptions::new("child").build(provider::<Private>(8), None).unwrap();
            let mut pages = alloc(&mut own, 8);
            pages.iter_mut().for_each(|page| page.as_mut_slice()[0] = 1);
            thread::spawn(move || drop(pages)).join().unwrap();
            assert_eq!(own.stats().inflight(), 0);
            assert_eq!(own.close().outstanding, 0);
        });
        assert_eq!(end, End::Exit(0), "cache {cache}");

        // The parent has noticed nothing.
        assert_eq!(held.pool.stats_reader().stats(), before);
        assert_eq!(held.frag.as_ref().map(|frag| frag[0]), Some(7));
        assert!(netmem_pool::lingering().is_empty());
        let Held { mut pool, page, frag, rest } = held;
        drop((page, frag, rest));
        assert_eq!(pool.stats().inflight(), 0);
        assert_eq!(pool.close().outstanding, 0);
        assert_eq!(domain.maps(), domain.unmaps());
        assert_eq!(std::iter::from_fn(|| memory.page()).map(std::mem::forget).count(), 32);
    }
}

/// The child's copy of what its parent holds. The parent keeps its own: the child never returns from [`in_child`].
fn held_in_child(held: &mut Held) -> Held {
    // SAFETY: the original is never used or dropped in the child.
    unsafe { std::ptr::read(held) }
}
