//! What the old ways and the pool cost in instructions, so that builds can be compared: with
//! link-time optimisation and without it. Valgrind counts one row at a time. A block is 64
//! operations, or 64 frames in the rows of the driver:
//!
//! ```text
//! cargo build --release -p netmem-bench --example instructions
//! valgrind --tool=callgrind --toggle-collect='*instructions*timed*' target/release/examples/instructions ROW BLOCKS
//! ```
//!
//! Without a row, the program prints nanoseconds of every row. Valgrind knows no restartable
//! sequences, so rows that use them (`shared`, `elsewhere`, `percpuref`) take the portable path
//! there, and only their times mean something.
#![allow(clippy::unwrap_used)]

use netmem_bench::baselines::tokens::{BATCH, Fragment, HashedCounts, LockedEach, LockedMap, Niovs, Ranges, RcuCounts};
use netmem_bench::baselines::tokens::{Receive, Return, Tokens};
use netmem_bench::baselines::{Forward, LockedPool};
use netmem_devmem::TokenRange;
use netmem_measure::frags::PageFrags;
use netmem_measure::pages::PageAllocator;
use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::{
    DmaDomain, PagePool, PeerShared, PoolOptions, Provider, Region, RegionOptions, RegionProvider, VhostDomain,
};
use netmem_refs::{PercpuRef, RcuRef, RefCount, rcu};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::Gen;
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode, VirtioNet};
use std::hint::black_box;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};
use std::time::Instant;

/// Operations in a block.
const BLOCK: usize = 64;

type M = PeerShared;
/// Does this many blocks.
type Blocks = Box<dyn FnMut(usize)>;

/// Prevents the compiler from merging two operations into one. It costs no instruction.
#[inline(always)]
fn apart() {
    compiler_fence(Ordering::SeqCst);
}

#[inline(never)]
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let done = work();
    (start.elapsed().as_nanos() as f64, done)
}

/// Reads 16 bytes of each frame, which the application then gets and drops.
struct Look(u64);

impl Handler<PeerShared> for Look {
    #[inline]
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        black_box(frame.read_at::<16>(0).unwrap_or_default());
        Verdict::Pass
    }

    #[inline]
    fn pass(&mut self, packet: Packet<PeerShared>) {
        self.0 += packet.len() as u64;
    }
}

/// The driver receives frames of 64 bytes from our device. The device takes turns with it, and is
/// not counted.
fn driver(name: &str, serve: impl FnOnce(NetOptions) -> NetOptions, frames: usize) {
    let mut device = NetDevice::new(Options::default(), |_| Gen::new(64, None)).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = device.control().serve(theirs).unwrap();
    let options = serve(NetOptions::new(RxMode::Small));
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(ours).unwrap(), options).unwrap();
    let (mut look, mut done, mut ns) = (Look(0), 0, 0.0);
    while done < frames {
        device.poll();
        let (turn, n) = timed(|| pairs[0].rx.poll(|poll| poll.receive(256, &mut look)));
        done += n;
        ns += turn;
    }
    println!("{name:20} {:8.2} ns, {done} frames", ns / done as f64);
    drop((pairs, net, connection));
}

fn drivers(only: Option<&str>, frames: usize) {
    let named = |name| only.is_none_or(|only| only == name);
    if named("driver_pool") {
        driver("driver_pool", |options| options, frames);
    }
    if named("driver_page") {
        let pages = PageAllocator::new(region());
        driver("driver_page", |o| o.cache(0).memory(pages.region().clone(), pages.clone()), frames);
    }
    if named("driver_frags") {
        let frags = PageFrags::new(region(), true);
        driver("driver_frags", |o| o.cache(0).premapped(false).memory(frags.region().clone(), frags.clone()), frames);
    }
}

fn region() -> Region<M> {
    RegionOptions::new(2048).huge_pages(false).build().unwrap()
}

/// A page is taken and dropped in the poll context, then the next.
fn in_context(mut pool: PagePool<M>) -> Blocks {
    Box::new(move |blocks| {
        for _ in 0..blocks {
            pool.poll(|napi| {
                for _ in 0..black_box(BLOCK) {
                    let page = napi.alloc().unwrap();
                    apart();
                    drop(page);
                    apart();
                }
            });
        }
    })
}

/// 64 pages are taken in a poll, and dropped after it, as by another thread.
fn elsewhere(mut pool: PagePool<M>) -> Blocks {
    Box::new(move |blocks| {
        let mut held = [const { None }; BLOCK];
        for _ in 0..blocks {
            pool.poll(|napi| held.iter_mut().for_each(|place| *place = napi.alloc()));
            apart();
            held.iter_mut().for_each(|place| drop(place.take().unwrap()));
            apart();
        }
    })
}

fn cached(provider: Arc<RegionProvider<M>>) -> PagePool<M> {
    let domain: Arc<dyn DmaDomain> = Arc::new(VhostDomain::new(&[provider.region().clone()]));
    PoolOptions::new("pool").prefill(512).build(provider, Some(domain)).unwrap()
}

/// A pool without a cache, as the rows of `perf` have it.
fn uncached(provider: Arc<dyn Provider<M>>, region: &Arc<Region<M>>) -> PagePool<M> {
    let domain: Arc<dyn DmaDomain> = Arc::new(VhostDomain::new(std::slice::from_ref(region)));
    PoolOptions::new("old").cache(0).build(provider, Some(domain)).unwrap()
}

fn page_per_packet() -> PagePool<M> {
    let pages = PageAllocator::new(region());
    let region = pages.region().clone();
    uncached(pages, &region)
}

fn frags() -> PagePool<M> {
    // The allocator maps its blocks itself.
    let frags: Arc<dyn Provider<M>> = PageFrags::new(region(), true);
    PoolOptions::new("old").cache(0).build(frags, None).unwrap()
}

fn shared() -> Blocks {
    let provider = RegionProvider::new(region());
    let domain = Arc::new(VhostDomain::new(&[provider.region().clone()]));
    let pool = PoolOptions::new("shared").prefill(1024).build_shared(provider, Some(domain)).unwrap();
    Box::new(move |blocks| {
        for _ in 0..black_box(BLOCK) * blocks {
            let page = pool.alloc().unwrap();
            apart();
            drop(page);
            apart();
        }
    })
}

fn locked() -> Blocks {
    let mut pool = LockedPool::new(1024);
    Box::new(move |blocks| {
        for _ in 0..black_box(BLOCK) * blocks {
            drop(black_box(pool.alloc().unwrap()));
        }
    })
}

fn forward() -> Blocks {
    let mut pool = Forward::new(1024);
    Box::new(move |blocks| {
        for _ in 0..black_box(BLOCK) * blocks {
            assert!(black_box(pool.alloc()).is_sole());
        }
    })
}

/// 16 tokens are received, and returned 64 batches later.
fn tokens<T: Tokens>() -> Blocks
where
    T::Receiver: 'static,
    T::Returner: 'static,
{
    const PAGES: u32 = 4096;
    let bindings = [Niovs::new(PAGES / 2), Niovs::new(PAGES / 2)];
    let (mut receiver, returner) = T::open(&bindings);
    let fragments: Vec<_> = (0..PAGES).map(|n| Fragment { binding: n % 2, index: n / 2 }).collect();
    let mut batches = (0..PAGES as usize / BATCH).cycle();
    let mut out = vec![None::<[u32; BATCH]>; 64];
    let mut at = 0;
    Box::new(move |blocks| {
        for _ in 0..blocks * (BLOCK / BATCH) {
            at = (at + 1) % out.len();
            let place = &mut out[at];
            if let Some(tokens) = place {
                let freed = returner.return_tokens(&tokens.map(|start| TokenRange { start, count: 1 }));
                assert_eq!(freed, BATCH);
            }
            let first = batches.next().unwrap() * BATCH;
            receiver.receive(&fragments[first..first + BATCH], place.insert([0; BATCH]));
        }
    })
}

fn pairs(pair: impl Fn() -> bool + 'static) -> Blocks {
    Box::new(move |blocks| assert!((0..black_box(BLOCK) * blocks).all(|_| pair())))
}

fn arc() -> Blocks {
    let count = Arc::new(0u64);
    pairs(move || {
        let held = black_box(&count).clone();
        apart();
        drop(held);
        apart();
        true
    })
}

fn refcount() -> Blocks {
    let count = RefCount::new(1);
    pairs(move || {
        let got = count.try_get();
        apart();
        got && !count.put()
    })
}

fn rcuref() -> Blocks {
    let count = RcuRef::new(1);
    pairs(move || {
        let got = rcu::read(|guard| count.try_get(guard));
        apart();
        got && !count.put()
    })
}

fn percpuref() -> Blocks {
    let count = PercpuRef::new().unwrap();
    pairs(move || {
        let got = count.try_get();
        apart();
        got && !count.put()
    })
}

fn percpuref_rotating() -> Blocks {
    let counts: Vec<_> = (0..BLOCK).map(|_| PercpuRef::new().unwrap()).collect();
    Box::new(move |blocks| {
        for _ in 0..blocks {
            assert!(black_box(&counts).iter().all(|count| {
                let got = count.try_get();
                apart();
                got && !count.put()
            }));
        }
    })
}

/// A row's name, and how its work is made.
type Row = (&'static str, fn() -> Blocks);

const ROWS: [Row; 18] = [
    ("in_context", || in_context(cached(RegionProvider::new(region())))),
    ("elsewhere", || elsewhere(cached(RegionProvider::new(region())))),
    ("shared", shared),
    ("page", || in_context(page_per_packet())),
    ("frags", || in_context(frags())),
    ("page_elsewhere", || elsewhere(page_per_packet())),
    ("locked_ring", locked),
    ("floor_forward", forward),
    ("ranges", tokens::<Ranges>),
    ("locked_map", tokens::<LockedMap>),
    ("locked_each", tokens::<LockedEach>),
    ("hashed", tokens::<HashedCounts>),
    ("rcu_counts", tokens::<RcuCounts>),
    ("arc", arc),
    ("refcount", refcount),
    ("rcuref", rcuref),
    ("percpuref", percpuref),
    ("percpuref_rotating", percpuref_rotating),
];

fn main() {
    let mut args = std::env::args().skip(1);
    let only = args.next();
    let blocks = args.next().map_or(20_000, |n| n.parse().unwrap());
    for (name, make) in ROWS {
        if only.as_deref().is_some_and(|only| only != name) {
            continue;
        }
        let mut work = make();
        // Caches are filled and lazy values made.
        work(64);
        let (ns, ()) = timed(|| work(blocks));
        println!("{name:20} {:8.2} ns", ns / (blocks * BLOCK) as f64);
    }
    drivers(only.as_deref(), blocks * BLOCK);
}
