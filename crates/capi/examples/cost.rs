//! What a page costs from Rust, as `c/cost.c` measures it from C: allocated and released on the
//! pool's thread, in bulk of 16 and singly. In polls, by iterators and drops, which is how a
//! program in Rust does it; and by the functions that C's call. Median of 21 turns, in nanoseconds
//! a page.

use netmem_pool::{Frag, KernelShared, Napi, PagePool, PageRoom, PoolOptions, RegionOptions, RegionProvider};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::Instant;

const TURNS: usize = 21;
const PAGES: usize = 1 << 20;

type Place = Option<Frag<KernelShared>>;

/// `turn` allocates and releases a group of pages.
fn measure(name: &str, group: usize, mut turn: impl FnMut() -> usize) {
    let mut turns: Vec<f64> = (0..TURNS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..PAGES / group {
                assert_eq!(turn(), group);
            }
            start.elapsed().as_nanos() as f64 / PAGES as f64
        })
        .collect();
    turns.sort_by(f64::total_cmp);
    println!("{name}: {:.2} ns a page ({:.2} to {:.2})", turns[TURNS / 2], turns[0], turns[TURNS - 1]);
}

/// In polls.
fn polled(
    name: &str,
    group: usize,
    pool: &mut PagePool<KernelShared>,
    alloc: impl Fn(&mut Napi<'_, KernelShared>, &mut Vec<Frag<KernelShared>>),
) {
    let mut frags = Vec::with_capacity(16);
    measure(name, group, || {
        pool.poll(|napi| alloc(napi, &mut frags));
        let n = black_box(&mut frags).len();
        pool.poll(|_| frags.clear());
        n
    });
}

/// By the functions for a group.
fn grouped(name: &str, group: usize, pool: &mut PagePool<KernelShared>) {
    let mut room = [const { MaybeUninit::<Place>::uninit() }; 16];
    measure(name, group, || {
        let n = pool.alloc_group(&mut room[..group]);
        // SAFETY: the first `n` were written.
        let frags = unsafe { std::slice::from_raw_parts_mut(black_box(&mut room).as_mut_ptr().cast::<Place>(), n) };
        pool.release_group(frags)
    });
}

fn main() -> anyhow::Result<()> {
    let region = RegionOptions::new(1024).build::<KernelShared>()?;
    let mut pool = PoolOptions::new("cost").prefill(64).build(RegionProvider::new(region), None)?;
    polled("Rust, bulk of 16, in polls", 16, &mut pool, |napi, frags| {
        let mut room = PageRoom::new();
        while frags.len() < 16 {
            let before = frags.len();
            frags.extend(napi.alloc_cached(&mut room, 16 - before).map(|page| page.freeze()));
            if frags.len() == before {
                frags.extend(napi.alloc().map(|page| page.freeze()));
            }
        }
    });
    grouped("Rust, bulk of 16, as a group", 16, &mut pool);
    polled("Rust, singly, in polls", 1, &mut pool, |napi, frags| frags.extend(napi.alloc().map(|page| page.freeze())));
    grouped("Rust, singly, as a group", 1, &mut pool);
    Ok(())
}
