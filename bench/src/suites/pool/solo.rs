//! Work of one thread in its poll context, and the same work in other designs.
//!
//! Each function makes the work of a row: blocks of 64 operations, each block in one poll, like in
//! a driver that receives 64 frames.

use crate::accounting::{CountedPool, M};
use crate::error::BenchError;
use crate::harness::{Harness, Timed};
use crate::timing::{BATCH, Work, apart};
use netmem::pool::{Frag, Napi, Page};
use netmem_bench::baselines::{LockedPage, LockedPool};
use std::hint::black_box;
use std::mem::MaybeUninit;

/// Work of one thread: does this many blocks, and returns whether it could.
pub(super) struct Alone<F> {
    name: &'static str,
    blocks: F,
}

impl<F: FnMut(u64) -> bool + Send> Alone<F> {
    pub(super) fn new(name: &'static str, blocks: F) -> Self {
        Self { name, blocks }
    }
}

impl<F: FnMut(u64) -> bool + Send> Work for Alone<F> {
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let work = &mut self.blocks;
        let (timed, ok) = harness.alone(|| {
            let warm = work(blocks / 16);
            let (timed, ok) = harness.time(|| work(blocks));
            (timed, warm && ok)
        })?;
        ok.then_some(timed).ok_or(BenchError::NoPage(self.name))
    }
}

/// Bytes of a buffer of a general-purpose allocator: a frame and its headroom.
pub(super) type Buffer = Box<[MaybeUninit<u8>; 2048]>;

pub(super) fn buffer() -> Buffer {
    Box::new([const { MaybeUninit::uninit() }; 2048])
}

/// The limit: pointers are popped from an array and pushed back. The array has as many places as a
/// pool's cache.
///
/// It checks whether it is empty and whether it is full, as every cache must, and does nothing
/// else.
pub(super) fn limit(capacity: usize) -> impl FnMut(u64) -> bool {
    struct Array {
        len: usize,
        slots: Box<[usize]>,
    }
    let mut array = Array { len: capacity / 2, slots: (0..capacity).collect() };
    move |blocks| {
        let array = black_box(&mut array);
        (0..blocks).all(|_| {
            (0..black_box(BATCH)).all(|_| {
                let Some(n) = array.len.checked_sub(1) else { return false };
                array.len = n;
                let page = array.slots[n];
                apart();
                let n = array.len;
                if n == array.slots.len() {
                    return false;
                }
                array.slots[n] = page;
                array.len = n + 1;
                apart();
                true
            })
        })
    }
}

/// One operation after another in the poll context.
fn each(mut pool: CountedPool, mut one: impl FnMut(&mut Napi<'_, M>) -> Option<()>) -> impl FnMut(u64) -> bool {
    move |blocks| (0..blocks).all(|_| pool.poll(|napi| (0..black_box(BATCH)).try_for_each(|_| one(napi))).is_some())
}

/// A page taken and dropped, then the next: the same page as before.
pub(super) fn lifo(pool: CountedPool) -> impl FnMut(u64) -> bool {
    each(pool, |napi| {
        let page = napi.alloc()?;
        apart();
        drop(page);
        apart();
        Some(())
    })
}

/// 64 pages taken, then 64 dropped, in the order they were taken.
pub(super) fn burst(mut pool: CountedPool) -> impl FnMut(u64) -> bool {
    let mut held: [Option<Page<M>>; BATCH as usize] = [const { None }; _];
    move |blocks| {
        (0..blocks).all(|_| {
            let all = pool.poll(|napi| {
                for place in &mut held {
                    *place = Some(napi.alloc()?);
                }
                apart();
                held.iter_mut().for_each(|place| drop(place.take()));
                Some(())
            });
            all.is_some()
        })
    }
}

/// 64 pages are held at any time: for each that is taken the oldest is dropped.
pub(super) fn fifo(mut pool: CountedPool) -> impl FnMut(u64) -> bool {
    move |blocks| {
        let mut held: [Option<Page<M>>; BATCH as usize] = [const { None }; _];
        let all = (0..blocks).all(|_| {
            let all = pool.poll(|napi| {
                for place in &mut held {
                    *place = Some(napi.alloc()?);
                }
                Some(())
            });
            all.is_some()
        });
        pool.poll(|_| {
            drop(held);
            Some(())
        });
        all
    }
}

/// The system's allocator.
pub(super) fn malloc() -> impl FnMut(u64) -> bool {
    |blocks| {
        for _ in 0..blocks * BATCH {
            drop(black_box(buffer()));
        }
        true
    }
}

/// Returns the page unchanged. This is a function item and not a function pointer, which would be
/// called for every page.
pub(super) fn whole(page: Page<M>) -> Page<M> {
    page
}

/// Two fragments of the same bytes.
pub(super) fn cloned(page: Page<M>) -> (Frag<M>, Frag<M>) {
    let frag = page.freeze();
    (frag.clone(), frag)
}

/// Two halves, to be written to.
pub(super) fn split(mut page: Page<M>) -> (Page<M>, Page<M>) {
    let half = page.len() / 2;
    let rest = page.split_off(half);
    (page, rest)
}

/// A page is allocated, made into two parts, and both are dropped.
pub(super) fn parts<T>(pool: CountedPool, parts: impl Fn(Page<M>) -> T) -> impl FnMut(u64) -> bool {
    each(pool, move |napi| {
        let parts = parts(napi.alloc()?);
        apart();
        drop(parts);
        apart();
        Some(())
    })
}

/// A redirect to a target that is down, so it always fails.
///
/// It is a call, as through a device's operations, and the compiler cannot see that it fails.
#[inline(never)]
fn redirect<T>(frame: T, target: &mut bool) -> Result<(), T> {
    if *black_box(target) {
        drop(frame);
        return Ok(());
    }
    Err(frame)
}

/// 64 frames are handed to a target that accepts none of them, and dropped: in the poll context, or
/// just after it.
pub(super) fn refused(mut pool: CountedPool, in_context: bool) -> impl FnMut(u64) -> bool {
    let mut held: [Option<Page<M>>; BATCH as usize] = [const { None }; _];
    move |blocks| {
        (0..blocks).all(|_| {
            let all = pool.poll(|napi| {
                for place in &mut held {
                    *place = redirect(napi.alloc()?, &mut false).err();
                }
                apart();
                if in_context {
                    held.iter_mut().for_each(|place| drop(place.take()));
                }
                Some(())
            });
            if !in_context {
                held.iter_mut().for_each(|place| drop(place.take()));
            }
            all.is_some()
        })
    }
}

/// The same with pages that have only the locked return path.
pub(super) fn refused_locked(mut pool: LockedPool) -> impl FnMut(u64) -> bool {
    let mut held: [Option<LockedPage>; BATCH as usize] = [const { None }; _];
    move |blocks| {
        (0..blocks).all(|_| {
            for place in &mut held {
                let Some(page) = pool.alloc() else { return false };
                *place = redirect(page, &mut false).err();
            }
            apart();
            held.iter_mut().for_each(|place| drop(place.take()));
            true
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::{Accounting, CACHE};
    use netmem::pool::PoolOptions;

    /// Every kind of work can go on for ever, because it returns what it allocates.
    #[test]
    fn nothing_is_kept() {
        let accounting = Accounting::default();
        let pool = || accounting.pool(PoolOptions::new("test").cache(CACHE), 2 * CACHE, 0).unwrap();
        let works: [Box<dyn FnMut(u64) -> bool>; 10] = [
            Box::new(limit(CACHE)),
            Box::new(lifo(pool())),
            Box::new(burst(pool())),
            Box::new(fifo(pool())),
            Box::new(malloc()),
            Box::new(parts(pool(), cloned)),
            Box::new(parts(pool(), split)),
            Box::new(refused(pool(), true)),
            Box::new(refused(pool(), false)),
            Box::new(refused_locked(LockedPool::new(2 * CACHE as u32))),
        ];
        for mut work in works {
            assert!((0..10).all(|_| work(100)));
        }
        let stats = accounting.stats();
        assert_eq!((stats.allocated(), stats.inflight(), accounting.outstanding()), (7 * 1000 * BATCH, 0, 0));
    }

    /// The two rows differ only in the path on which pages return. Proves POOL-3.
    #[test]
    fn a_refused_frame_goes_into_the_cache_in_the_poll_context_only() {
        for (in_context, cached) in [(true, 640), (false, 0)] {
            let accounting = Accounting::default();
            let pool = accounting.pool(PoolOptions::new("test").cache(CACHE), 2 * CACHE, 0).unwrap();
            assert!(refused(pool, in_context)(10));
            assert_eq!((accounting.stats().recycle_cached, accounting.stats().returned()), (cached, 640));
        }
    }
}
