//! What a child process may do with a pool of its parent. `docs/design/return-path.md` has the
//! table.
//!
//! A child has only the thread that forked, so no other test's thread may hold a lock meanwhile.

use crate::common::{Counting, alloc, counting, provider};
use netmem_pool::{Bulk, Frag, Lingering, PagePool, PoolOptions, Private, RegionProvider, lingering};
use netmem_testing::is_emulated;
use netmem_testing::skip;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

/// Runs `f` in a child, which exits with 0, or with 1 if `f` panics.
fn in_child(f: impl FnOnce()) -> End {
    // SAFETY: no other thread of this process is in a call of the library. The child exits and does
    // not unwind.
    unsafe {
        match libc::fork() {
            0 => {
                // The address sanitizer has a handler for this signal, which would exit.
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

/// A pool of which pages are in all places: held, in a magazine, in the cache.
fn held(cache: usize, memory: &Arc<RegionProvider<Private>>, domain: &Arc<Counting>) -> Held {
    let pool = PoolOptions::new("parent").cache(cache).magazine(8);
    let mut pool = pool.build(memory.clone(), Some(domain.clone())).unwrap();
    let mut rest = alloc(&mut pool, 16);
    rest.iter_mut().for_each(|page| page.as_mut_slice()[0] = 7);
    let (page, frag) = (rest.pop(), rest.pop().map(netmem_pool::Page::freeze));
    // Some pages wait in a magazine.
    let away = rest.split_off(9);
    thread::spawn(move || drop(away)).join().unwrap();
    Held { pool, page, frag, rest }
}

/// What the child drops, and the end of its copy of the pool, change the child's copy of the
/// accounting alone.
fn accounting_is_the_childs(held: &mut Held, domain: &Counting, cache: usize) {
    // Pages, fragments and bulks are dropped inside and outside of a poll, and the child's
    // accounting is right.
    let end = in_child(|| {
        let Held { mut pool, page, frag, mut rest } = held_in_child(held);
        drop(page);
        drop(frag.clone());
        pool.poll(|_| drop(frag));
        let mut bulk = Bulk::new();
        rest.drain(..).for_each(|page| bulk.add(page));
        drop(bulk);
        assert_eq!(pool.stats().inflight(), 0);
        // Everything that was mapped is unmapped in the child's copy of the domain.
        let closed = pool.close();
        assert_eq!(closed.outstanding, 0);
        assert_eq!(domain.maps(), domain.unmaps());
    });
    assert_eq!(end, End::Exit(0), "cache {cache}");

    // A pool that lingers in the child only.
    let end = in_child(|| {
        let Held { mut pool, page, frag: _frag, rest: _rest } = held_in_child(held);
        pool.device_gone();
        let closed = pool.close();
        assert_eq!(closed.outstanding, 11);
        assert_eq!(lingering_pages(), 11);
        drop(page);
        assert_eq!(lingering_pages(), 10);
    });
    assert_eq!(end, End::Exit(0), "cache {cache}");
}

/// Pages in flight of this test's pools that linger.
fn lingering_pages() -> u64 {
    let ours = |pool: &Lingering| ["parent", "child"].contains(&&*pool.name);
    lingering().iter().filter(|pool| ours(pool)).map(|pool| pool.pages).sum()
}

/// Proves POOL-11 across `fork`: drops in the child change only the child's copy of the accounting.
/// The parent's pages are not affected. The memory of the pages is not in the child. A pool that
/// the child makes belongs to the child.
#[test]
fn in_a_child() {
    let _alone = crate::alone();
    netmem_testing::assert_forced_mode();
    if is_emulated() {
        return skip("it is emulated, and QEMU 7.2 ignores MADV_DONTFORK");
    }
    for cache in [0, 16] {
        let (memory, domain) = (provider::<Private>(32), counting());
        let mut held = held(cache, &memory, &domain);
        let before = held.pool.stats_reader().stats();

        accounting_is_the_childs(&mut held, &domain, cache);

        // The pages' memory is not in the child.
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

        // The child makes a pool of its own. It also allocates a page of its parent's pool, and
        // does not touch the page.
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

        // The parent's pool has not changed.
        assert_eq!(held.pool.stats_reader().stats(), before);
        assert_eq!(held.frag.as_ref().map(|frag| frag[0]), Some(7));
        assert_eq!(lingering_pages(), 0);
        let Held { mut pool, page, frag, rest } = held;
        drop((page, frag, rest));
        assert_eq!(pool.stats().inflight(), 0);
        assert_eq!(pool.close().outstanding, 0);
        assert_eq!(domain.maps(), domain.unmaps());
        assert_eq!(std::iter::from_fn(|| memory.page()).map(std::mem::forget).count(), 32);
    }
}

/// The child's copy of the parent's values. The parent keeps its own, because the child never
/// returns from [`in_child`].
fn held_in_child(held: &mut Held) -> Held {
    // SAFETY: the original is never used or dropped in the child.
    unsafe { std::ptr::read(held) }
}
