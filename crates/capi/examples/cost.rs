//! What a page costs from Rust, as `c/cost.c` measures it from C: allocated and released on the
//! pool's thread, in bulk of 16 and singly. Median of 21 turns, in nanoseconds a page.

use netmem_pool::{Frag, KernelShared, Napi, PagePool, PageRoom, PoolOptions, RegionOptions, RegionProvider};
use std::hint::black_box;
use std::time::Instant;

const TURNS: usize = 21;
const PAGES: usize = 1 << 20;

fn measure(
    name: &str,
    group: usize,
    pool: &mut PagePool<KernelShared>,
    turn: impl Fn(&mut Napi<'_, KernelShared>, &mut Vec<Frag<KernelShared>>),
) {
    let mut frags = Vec::with_capacity(16);
    let mut turns: Vec<f64> = (0..TURNS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..PAGES / group {
                pool.poll(|napi| turn(napi, &mut frags));
                assert_eq!(black_box(&mut frags).len(), group);
                pool.poll(|_| frags.clear());
            }
            start.elapsed().as_nanos() as f64 / PAGES as f64
        })
        .collect();
    turns.sort_by(f64::total_cmp);
    println!("{name}: {:.2} ns a page ({:.2} to {:.2})", turns[TURNS / 2], turns[0], turns[TURNS - 1]);
}

fn main() -> anyhow::Result<()> {
    let region = RegionOptions::new(1024).build::<KernelShared>()?;
    let mut pool = PoolOptions::new("cost").build(RegionProvider::new(region), None)?;
    measure("Rust, bulk of 16", 16, &mut pool, |napi, frags| {
        let mut room = PageRoom::new();
        while frags.len() < 16 {
            let before = frags.len();
            frags.extend(napi.alloc_cached(&mut room, 16 - before).map(|page| page.freeze()));
            if frags.len() == before {
                frags.extend(napi.alloc().map(|page| page.freeze()));
            }
        }
    });
    measure("Rust, singly", 1, &mut pool, |napi, frags| frags.extend(napi.alloc().map(|page| page.freeze())));
    Ok(())
}
