//! Signal handlers that drop pages in the middle of a poll. One test to a process, for it sends signals.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../../../tests/disturb.rs"]
#[allow(dead_code)]
mod disturb;
#[path = "../../../tests/stress_ops.rs"]
mod stress_ops;

use common::{close_balanced, elsewhere, pool};
use netmem_pool::{Frag, PoolOptions, Private, outside_context};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence};

/// Fragments for the handler to drop: written by the thread that it interrupts, which is the only one.
struct Shelf([(AtomicBool, UnsafeCell<Option<Frag<Private>>>); 8]);

// SAFETY: one thread and its signal handler; a flag says whose a place is.
unsafe impl Sync for Shelf {}

static SHELF: Shelf = Shelf([const { (AtomicBool::new(false), UnsafeCell::new(None)) }; 8]);
static DROPPED: AtomicU64 = AtomicU64::new(0);

extern "C" fn signalled(_: libc::c_int) {
    for (full, place) in &SHELF.0 {
        if full.load(Ordering::Relaxed) {
            // SAFETY: full, so it is the handler's until it says otherwise.
            let frag = unsafe { (*place.get()).take() };
            outside_context(|| drop(frag));
            full.store(false, Ordering::Relaxed);
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Puts `frag` where the handler finds it; back if there is no room.
fn shelve(frag: Frag<Private>) -> Option<Frag<Private>> {
    let Some((full, place)) = SHELF.0.iter().find(|(full, _)| !full.load(Ordering::Relaxed)) else { return Some(frag) };
    // SAFETY: not full, so the handler keeps away.
    unsafe { *place.get() = Some(frag) };
    compiler_fence(Ordering::Release);
    full.store(true, Ordering::Relaxed);
    None
}

/// Proves POOL-4: what a signal handler drops in the middle of a poll of the same pool comes home, and what it interrupted goes on as
/// if nothing had been.
#[test]
fn a_handler_drops_in_the_middle_of_a_poll() {
    const PAGES: usize = 64;
    disturb::on_signal(signalled);
    let (mut pool, domain) = pool(PoolOptions::new("interrupted").cache(32), PAGES);
    let ops = stress_ops::stress_ops(1_000_000);
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
    assert_eq!(elsewhere(stats), DROPPED.load(Ordering::Relaxed));
    close_balanced(pool, &domain);
}
