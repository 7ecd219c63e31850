//! Signal handlers that drop pages in the middle of a poll.

use crate::common::{close_balanced, pool, remote_frees};
use netmem_pool::{Frag, PoolOptions, Private, outside_context};
use netmem_testing::disturb;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence};

/// Fragments for the handler to drop. Only the thread that the handler interrupts puts fragments
/// here.
struct Shelf([(AtomicBool, UnsafeCell<Option<Frag<Private>>>); 8]);

// SAFETY: one thread and its signal handler use the shelf. A place's flag names which of the two
// owns the place.
unsafe impl Sync for Shelf {}

static SHELF: Shelf = Shelf([const { (AtomicBool::new(false), UnsafeCell::new(None)) }; 8]);
static DROPPED: AtomicU64 = AtomicU64::new(0);

extern "C" fn signalled(_: libc::c_int) {
    for (full, place) in &SHELF.0 {
        if full.load(Ordering::Relaxed) {
            // SAFETY: the place is full, so it belongs to the handler until the handler clears the
            // flag.
            let frag = unsafe { (*place.get()).take() };
            outside_context(|| drop(frag));
            full.store(false, Ordering::Relaxed);
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Puts `frag` where the handler finds it. Returns `frag` if there is no room.
fn shelve(frag: Frag<Private>) -> Option<Frag<Private>> {
    let Some((full, place)) = SHELF.0.iter().find(|(full, _)| !full.load(Ordering::Relaxed)) else { return Some(frag) };
    // SAFETY: the place is empty, so the handler does not touch it.
    unsafe { *place.get() = Some(frag) };
    compiler_fence(Ordering::Release);
    full.store(true, Ordering::Relaxed);
    None
}

/// Proves POOL-4: a page that a signal handler drops in the middle of a poll of the same pool is
/// returned. The interrupted code continues undisturbed.
#[test]
fn a_handler_drops_in_the_middle_of_a_poll() {
    let _alone = crate::alone();
    netmem_testing::assert_forced_mode();
    const PAGES: usize = 64;
    disturb::on_signal(signalled);
    let (mut pool, domain) = pool(PoolOptions::new("interrupted").cache(32), PAGES);
    let ops = netmem_testing::stress_ops(1_000_000);
    disturb::Disturbed::default().during(|| {
        let mut done = 0;
        while done < ops || DROPPED.load(Ordering::Relaxed) < 1000 {
            pool.poll(|napi| {
                let mut out = Vec::with_capacity(PAGES);
                let mut seen = [false; PAGES];
                for _ in 0..1000 {
                    while out.len() < 16
                        && let Some(page) = napi.alloc()
                    {
                        let index = page.index() as usize;
                        assert!(!std::mem::replace(&mut seen[index], true), "page {index} was handed out twice");
                        out.push(page);
                    }
                    for page in out.drain(..) {
                        seen[page.index() as usize] = false;
                        drop(shelve(page.freeze()));
                        done += 1;
                    }
                }
            });
        }
    });
    signalled(0);
    let stats = pool.stats();
    assert_eq!(remote_frees(stats), DROPPED.load(Ordering::Relaxed));
    close_balanced(pool, &domain);
}
