//! A pool for every thread: balanced accounting, limits, ends, and code that the user provides.

use crate::common::{Counting, Strict, counting, provider};
use netmem_percpu::{Index, Mode};
use netmem_pool::{
    AllocFuture, Bulk, Direction, DmaDomain, Frag, GrowingProvider, MapError, Page, PoolError, PoolOptions, Private,
    Provider, RawPage, Region, RegionOptions, RegionProvider, SharedPool, WaitError, lingering,
};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, OnceLock, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

fn shared(options: PoolOptions, pages: usize) -> (SharedPool<Private>, Arc<Counting>, Arc<RegionProvider<Private>>) {
    let (memory, domain) = (provider(pages), counting());
    (options.build_shared(memory.clone(), Some(domain.clone())).unwrap(), domain, memory)
}

/// Checks that all pages of the provider can be taken, so that none was lost.
fn all_are_back(memory: &Arc<RegionProvider<Private>>, pages: usize) {
    let all: Vec<_> = std::iter::from_fn(|| memory.page()).collect();
    assert_eq!(all.len(), pages);
}

/// Allocates `n` pages. Repeats while other CPUs may not be asked for pages yet.
fn alloc(pool: &SharedPool<Private>, n: usize) -> Vec<Page<Private>> {
    (0..n)
        .map(|_| {
            pool.alloc().unwrap_or_else(|| {
                pool.reclaim();
                pool.alloc().expect("a page")
            })
        })
        .collect()
}

fn close_balanced(pool: SharedPool<Private>, domain: &Counting) {
    let closed = pool.close();
    assert_eq!((closed.outstanding, closed.stats.inflight()), (0, 0), "{:?}", closed.stats);
    assert_eq!(closed.stats.mapped, closed.stats.unmapped);
    assert_eq!(domain.maps(), domain.unmaps());
}

#[test]
fn the_mode_is_the_one_that_was_asked_for() {
    netmem_testing::assert_forced_mode();
}

/// A pool with memory of its own, in one line: it has as many pages as were asked for, and they
/// come back.
#[test]
fn a_pool_in_memory() {
    let pool = SharedPool::<Private>::in_memory(100).unwrap();
    let pages = alloc(&pool, 100);
    assert!(pool.alloc().is_none());
    thread::scope(|scope| _ = scope.spawn(move || drop(pages)));
    drop(alloc(&pool, 100));
    assert_eq!(pool.close().outstanding, 0);
    let error = SharedPool::<Private>::in_memory(0).unwrap_err();
    assert!(matches!(error, PoolError::Region(_)), "{error}");
}

/// Proves POOL-15: threads allocate, share, pass on and drop pages. Each page has one holder at a
/// time, and the accounting balance.
#[test]
fn every_thread_allocates_and_returns() {
    for magazine in [None, Some(0), Some(1), Some(8)] {
        let mut options = PoolOptions::new("every-thread");
        if let Some(magazine) = magazine {
            options = options.magazine(magazine);
        }
        let (pool, domain, memory) = shared(options, 256);
        let failed = AtomicU64::new(0);
        thread::scope(|scope| {
            let (to_next, from_last): (Vec<_>, Vec<_>) = (0..4).map(|_| mpsc::channel::<Frag<Private>>()).unzip();
            for (n, from) in from_last.into_iter().enumerate() {
                let (to, pool, failed) = (to_next[(n + 1) % 4].clone(), &pool, &failed);
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..20_000_usize {
                        match pool.alloc() {
                            Some(mut page) => {
                                page.as_mut_slice()[..8].copy_from_slice(&(n * 1_000_000 + round).to_le_bytes());
                                held.push((n * 1_000_000 + round, page));
                            }
                            None => {
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        if held.len() > round % 40 {
                            for (mark, page) in held.drain(held.len() / 2..) {
                                assert_eq!(page.as_slice()[..8], mark.to_le_bytes(), "two threads have this page");
                                let frag = page.freeze();
                                if mark % 3 == 0 {
                                    let _ = to.send(frag.clone());
                                }
                            }
                        }
                        from.try_iter().for_each(drop);
                    }
                    drop(to);
                    held.clear();
                });
            }
            drop(to_next);
        });
        pool.reclaim();
        let stats = pool.stats();
        assert_eq!(stats.inflight, 0, "{stats:?}");
        assert_eq!(stats.alloc_failed, failed.load(Ordering::Relaxed));
        assert_eq!(alloc(&pool, 256).len(), 256, "none was lost");
        close_balanced(pool, &domain);
        all_are_back(&memory, 256);
    }
}

/// A lost race does not mean "no page": there are as many pages as threads, each thread holds one
/// page at most, and each allocation succeeds.
#[test]
fn a_lost_race_is_not_no_page() {
    let threads = 4;
    let (pool, domain, memory) = shared(PoolOptions::new("race").magazine(0), threads);
    let start = Barrier::new(threads);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                start.wait();
                for round in 0..50_000 {
                    assert!(pool.alloc().is_some(), "no page in round {round}");
                }
            });
        }
    });
    close_balanced(pool, &domain);
    all_are_back(&memory, threads);
}

fn portable() -> bool {
    matches!(netmem_percpu::mode(), Mode::Portable(_))
}

/// Pins the calling thread to a CPU that it may use.
fn pin(n: usize) {
    // SAFETY: each set of CPUs has the given size.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&allowed), &mut allowed), 0);
        let cpus: Vec<_> = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &allowed)).collect();
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpus[n % cpus.len()], &mut one);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &one), 0);
    }
}

/// A thread that finds no page reclaims the pages of idle CPUs. If no CPU holds a page, no CPU is
/// interrupted.
#[test]
fn what_idle_cpus_hold_is_found() {
    let begin = Instant::now();
    let (pool, domain, _memory) = shared(PoolOptions::new("idle").magazine(8), 64);
    // All pages go into magazines on the other CPU, or from there to the depot.
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            drop(alloc(&pool, 64));
        });
    });
    pin(0);
    let mut held: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
    // The kernel may assign another index to a thread by `mm_cid`, also if the thread stays on its
    // CPU. Then more magazines hold pages.
    if !matches!(netmem_percpu::mode(), Mode::Rseq(Index::MmCid)) {
        assert!(held.len() >= 64 - 16, "what was in the depot: {}", held.len());
    }
    while held.len() < 64 {
        // Longer than the pause between reclaims.
        thread::sleep(Duration::from_millis(1));
        held.push(pool.alloc().expect("a page that an idle CPU holds"));
        held.extend(std::iter::from_fn(|| pool.alloc()));
    }
    // If no CPU has a page, none is interrupted.
    let reclaims = pool.stats().reclaims;
    let most = begin.elapsed().as_micros() as u64 / 100 + 1;
    // In portable mode, a thread asks at once if it cannot access its CPU's magazine.
    assert!(reclaims <= most || portable(), "{reclaims} reclaims in {most} times 100 us");
    (0..1000).for_each(|_| assert!(pool.alloc().is_none()));
    assert_eq!(pool.stats().reclaims, reclaims);
    drop(held);
    close_balanced(pool, &domain);
}

/// Allocations ask other CPUs for their pages at most every 100 us, even if the only page is again
/// and again on another CPU.
#[test]
fn other_cpus_are_asked_rarely() {
    let (pool, domain, _memory) = shared(PoolOptions::new("rarely").magazine(8), 64);
    let held = alloc(&pool, 63);
    let (to, from) = mpsc::channel::<Page<Private>>();
    let dropped = AtomicU64::new(0);
    let (shared_pool, dropped) = (&pool, &dropped);
    thread::scope(|scope| {
        scope.spawn(move || {
            pin(1);
            // Both threads are busy, so that a round takes less than 100 us.
            loop {
                match from.try_recv() {
                    Ok(page) => {
                        drop(page);
                        dropped.fetch_add(1, Ordering::Release);
                    }
                    Err(mpsc::TryRecvError::Empty) => thread::yield_now(),
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
        });
        scope.spawn(move || {
            pin(0);
            let (mut rounds, mut last) = (0, None);
            while rounds < 1000 {
                let (begin, before) = (Instant::now(), shared_pool.stats().reclaims);
                let page = shared_pool.alloc();
                // In portable mode, a thread asks at once if it cannot access its CPU's magazine.
                if shared_pool.stats().reclaims > before && !portable() {
                    let since = last.replace(begin).map(|last: Instant| last.elapsed());
                    assert!(since.is_none_or(|since| since >= Duration::from_micros(100)), "{since:?}");
                }
                if let Some(page) = page {
                    to.send(page).unwrap();
                    rounds += 1;
                    while dropped.load(Ordering::Acquire) < rounds {
                        thread::yield_now();
                    }
                }
            }
        });
    });
    drop(held);
    close_balanced(pool, &domain);
}

/// There are more pages than fit into the magazines. Pages without a magazine stay with the owner,
/// also if another thread pops the last empty magazine at that moment.
#[test]
fn more_pages_than_magazines_hold() {
    for _ in 0..20 {
        let (pool, domain, memory) = shared(PoolOptions::new("more").magazine(2).limit(8), 1000);
        pool.set_limit(1000);
        drop(alloc(&pool, 1000));
        let stats = pool.stats();
        assert!(stats.idle < 1000, "{stats:?}");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|round| drop(alloc(&pool, 50 + round % 100))));
            }
        });
        assert_eq!(alloc(&pool, 1000).len(), 1000, "none was lost");
        close_balanced(pool, &domain);
        all_are_back(&memory, 1000);
    }
}

/// Proves POOL-13 for a pool for every thread: the limit holds, refusals are counted, the limit can
/// be changed, and idle pages can be released.
#[test]
fn the_limit() {
    assert!(matches!(
        PoolOptions::new("nothing").limit(0).build_shared::<Private>(provider(1), None),
        Err(PoolError::NoPages)
    ));
    for limit in [5, 100] {
        let (pool, domain, memory) = shared(PoolOptions::new("limit").limit(limit).prefill(3), 200);
        assert!(pool.held() >= 3);
        let mut out = alloc(&pool, limit);
        assert!(pool.alloc().is_none());
        assert!(pool.stats().alloc_failed >= 1);
        drop(out.pop());
        out.extend(alloc(&pool, 1));
        pool.set_limit(limit + 10);
        out.extend(alloc(&pool, 10));
        assert!(pool.alloc().is_none());
        assert_eq!((pool.held(), pool.stats().inflight), (limit + 10, limit as u64 + 10));
        out.truncate(3);
        assert_eq!(pool.shrink(4), limit + 10 - 4);
        assert_eq!((pool.held(), pool.stats().inflight), (4, 3));
        assert_eq!(pool.shrink(0), 1);
        drop(out);
        close_balanced(pool, &domain);
        all_are_back(&memory, 200);
    }
}

/// A domain that moves the calling thread to another CPU in each `unmap`.
#[derive(Debug, Default)]
struct Moves(AtomicUsize);

impl DmaDomain for Moves {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        Ok(addr.addr() as u64)
    }

    fn unmap(&self, _dma: u64, _len: usize) {
        pin(self.0.fetch_add(1, Ordering::Relaxed));
    }
}

/// Proves POOL-13 for a pool for every thread: a pool releases all idle pages, also if the thread
/// is moved between CPUs meanwhile.
#[test]
fn shrinking_while_the_thread_moves() {
    let memory = provider::<Private>(64);
    let options = PoolOptions::new("moved").magazine(8);
    let pool = options.build_shared(memory.clone(), Some(Arc::new(Moves::default()))).unwrap();
    drop(alloc(&pool, 64));
    assert_eq!((pool.shrink(0), pool.held()), (64, 0));
    all_are_back(&memory, 64);
}

/// Proves POOL-11 for a pool for every thread: a pool that is closed while pages are in flight
/// lingers until the last page is returned, by any thread.
#[test]
fn closed_with_pages_out() {
    for magazine in [0, 8] {
        let name = format!("shared-lingers-{magazine}");
        let (pool, domain, memory) = shared(PoolOptions::new(&name).magazine(magazine), 64);
        let weak = Arc::downgrade(&memory);
        drop(memory);
        let mut out = alloc(&pool, 40);
        drop(out.split_off(20));
        assert_eq!(pool.close().outstanding, 20);
        assert_eq!(domain.maps() - domain.unmaps(), 20);
        assert_eq!(lingering().into_iter().find(|l| l.name == name).unwrap().pages, 20);
        thread::scope(|scope| {
            for part in [out.split_off(10), out] {
                scope.spawn(move || drop(part));
            }
        });
        assert_eq!(domain.maps(), domain.unmaps());
        assert!(weak.upgrade().is_none(), "the pool and its memory are gone");
        assert!(lingering().iter().all(|l| l.name != name));
    }
}

/// Returns that race with the close: each page is counted once, and the last return frees the pool.
#[test]
fn close_against_returns() {
    for _ in 0..200 {
        let (pool, domain, memory) = shared(PoolOptions::new("close-race").magazine(2), 64);
        let weak = Arc::downgrade(&memory);
        drop(memory);
        let mut out = alloc(&pool, 48);
        let start = Barrier::new(3);
        thread::scope(|scope| {
            let start = &start;
            for part in [out.split_off(24), out] {
                scope.spawn(move || {
                    start.wait();
                    drop(part);
                });
            }
            start.wait();
            let _ = pool.close();
        });
        assert_eq!(domain.maps(), domain.unmaps());
        assert!(weak.upgrade().is_none(), "the pool and its memory are gone");
    }
}

/// Proves POOL-11 for a pool for every thread: when a device is removed, every page is unmapped
/// once, wherever it is, and the pool allocates no more.
#[test]
fn a_device_that_goes() {
    let (memory, domain) = (provider::<Private>(64), Arc::new(Strict::default()));
    let pool = PoolOptions::new("gone").magazine(4).build_shared(memory.clone(), Some(domain.clone())).unwrap();
    let mut out = alloc(&pool, 40);
    drop(out.split_off(20));
    assert!(domain.mapped() >= 40 && out[0].dma_domain() == pool.dma_domain());
    pool.device_gone();
    pool.device_gone();
    assert_eq!((domain.mapped(), out[0].dma_domain()), (0, 0));
    assert!(pool.alloc().is_none());
    drop(out.split_off(10));
    assert!(pool.alloc().is_none());
    assert_eq!(pool.held(), 10);
    assert_eq!(pool.close().outstanding, 10);
    drop(out);
    all_are_back(&memory, 64);
}

/// A page that a device kept is not handed out again.
#[test]
fn a_page_in_quarantine() {
    let (pool, domain, memory) = shared(PoolOptions::new("kept"), 64);
    let mut out = alloc(&pool, 2);
    pool.quarantine(out.pop().unwrap());
    drop(out);
    // The page may have been returned without a magazine; the reclaim collects it.
    pool.reclaim();
    assert_eq!((pool.stats().quarantined, pool.stats().inflight), (1, 0));
    assert_eq!(alloc(&pool, 63).len(), 63);
    close_balanced(pool, &domain);
    all_are_back(&memory, 63);
}

/// Pages are returned from another pool's poll context, and in bulk.
#[test]
fn pages_go_home_from_anywhere() {
    let (pool, domain, _memory) = shared(PoolOptions::new("anywhere").magazine(8), 128);
    let mut polled = PoolOptions::new("polled").build(provider::<Private>(8), None).unwrap();
    let mut out = alloc(&pool, 100);
    polled.poll(|_| drop(out.split_off(50)));
    let mut bulk = Bulk::new();
    out.into_iter().for_each(|page| bulk.add(page));
    drop(bulk);
    assert_eq!(polled.stats().returned(), 0);
    if portable() {
        // A thread of another test may have held the lock of this CPU.
        pool.reclaim();
    } else {
        assert_eq!(pool.stats().recycle_ring_full, 0);
    }
    assert_eq!(pool.stats().inflight, 0);
    close_balanced(pool, &domain);
}

/// A provider that grows: pages of all its regions are found, and fit into magazines that were made
/// for pages of the first region.
#[test]
fn a_provider_that_grows() {
    let memory = GrowingProvider::<Private>::new(RegionOptions::new(32).huge_pages(false), 300).unwrap();
    let domain = counting();
    let pool = PoolOptions::new("grows").build_shared(memory.clone(), Some(domain.clone())).unwrap();
    for _ in 0..3 {
        let out = alloc(&pool, 300);
        assert!(pool.alloc().is_none());
        drop(out);
        assert_eq!(pool.held(), 300);
    }
    close_balanced(pool, &domain);
}

/// A provider and a domain that run code of the test in the middle of the pool's calls.
#[derive(Debug)]
struct Rude {
    pages: Arc<RegionProvider<Private>>,
    pool: OnceLock<Arc<SharedPool<Private>>>,
    panics: AtomicBool,
    reenters: AtomicBool,
}

impl Rude {
    fn new(pages: usize) -> Arc<Self> {
        let (panics, reenters) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { pages: provider(pages), pool: OnceLock::new(), panics, reenters })
    }

    fn act(&self) {
        if self.reenters.load(Ordering::Relaxed)
            && let Some(pool) = self.pool.get()
        {
            // Usually none: the pool asks its provider if the magazines have none. But the thread
            // may have been moved to a CPU that holds pages, or may not have had access to its
            // CPU's magazine when the pool looked there.
            drop(pool.alloc());
            pool.reclaim();
            assert_eq!((pool.held(), pool.shrink(0)), (0, 0));
        }
        if self.panics.swap(false, Ordering::Relaxed) {
            panic!("as the test wants it");
        }
    }
}

// SAFETY: all of it is the provider's behind it.
unsafe impl Provider<Private> for Rude {
    fn alloc(&self, pages: &mut [Option<RawPage<Private>>]) -> usize {
        self.act();
        self.pages.alloc(pages)
    }

    unsafe fn release(&self, page: RawPage<Private>) {
        // SAFETY: the caller's.
        unsafe { self.pages.release(page) }
    }

    fn page_size(&self) -> usize {
        self.pages.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<Private>)) {
        self.pages.each(f);
    }
}

impl DmaDomain for Rude {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        self.act();
        Ok(addr.addr() as u64)
    }

    fn unmap(&self, _dma: u64, _len: usize) {}
}

/// A provider that allocates from the pool that is calling it gets no page that needs the pool's
/// lock, and does not cause a deadlock.
#[test]
fn a_call_out_of_the_provider() {
    let rude = Rude::new(64);
    let pool = Arc::new(PoolOptions::new("reenters").build_shared(rude.clone(), Some(rude.clone())).unwrap());
    assert!(rude.pool.set(pool.clone()).is_ok());
    rude.reenters.store(true, Ordering::Relaxed);
    assert_eq!(alloc(&pool, 64).len(), 64);
}

/// A panic in the provider or the domain loses no page, and other threads can still allocate.
#[test]
fn a_panic_in_the_provider() {
    let rude = Rude::new(200);
    let pool = PoolOptions::new("panics").build_shared(rude.clone(), Some(rude.clone())).unwrap();
    let mut held = Vec::new();
    for _ in 0..3 {
        rude.panics.store(true, Ordering::Relaxed);
        let (pool, held) = (&pool, &mut held);
        thread::scope(|scope| {
            let page = scope.spawn(move || std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>()).join();
            held.extend(page.into_iter().flatten());
        });
    }
    drop(held);
    assert_eq!(alloc(&pool, 200).len(), 200, "none was lost");
    assert_eq!(pool.close().outstanding, 0);
    all_are_back(&rude.pages, 200);
}

/// A waker that notes in which order it and others like it were called, and on which thread.
struct Noted(usize, mpsc::Sender<(usize, thread::ThreadId)>);

impl std::task::Wake for Noted {
    fn wake(self: Arc<Self>) {
        let _ = self.1.send((self.0, thread::current().id()));
    }
}

fn poll<M: netmem_pool::Memory>(future: &mut AllocFuture<M>, waker: &Waker) -> Poll<Result<Page<M>, WaitError>> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

/// Tasks that wait get pages in the order in which they came, from the thread that drops a page,
/// and before any allocation that comes later. After the last one the magazines are used again.
#[test]
fn waiters_are_served_in_order() {
    for magazine in [0, 2, 16] {
        let (pool, domain, memory) = shared(PoolOptions::new("waited").magazine(magazine), 4);
        let mut out = alloc(&pool, 4);
        let (sender, woken) = mpsc::channel();
        let wakers: Vec<_> = (0..3).map(|n| Waker::from(Arc::new(Noted(n, sender.clone())))).collect();
        let mut waiters: Vec<_> = (0..3).map(|_| pool.alloc_async()).collect();
        for (waiter, waker) in waiters.iter_mut().zip(&wakers) {
            assert!(poll(waiter, waker).is_pending());
        }
        assert!(pool.alloc().is_none());
        // The second is dropped.
        drop(waiters.remove(1));
        let page = out.pop().unwrap();
        let dropper = thread::spawn(move || {
            drop(page);
            thread::current().id()
        });
        let dropper = dropper.join().unwrap();
        assert_eq!(woken.try_recv(), Ok((0, dropper)));
        assert!(pool.alloc().is_none(), "an allocation got a page although a task waits");
        assert!(poll(&mut waiters[1], &wakers[2]).is_pending());
        let Poll::Ready(Ok(first)) = poll(&mut waiters[0], &wakers[0]) else { panic!("no page") };
        assert!(matches!(poll(&mut waiters[0], &wakers[0]), Poll::Ready(Err(WaitError::Ended))));
        // A page that was passed to a waiter that is dropped goes to the next waiter.
        let last = pool.alloc_async();
        drop(out.pop());
        drop(waiters);
        assert_eq!(woken.try_recv().map(|(n, _)| n), Ok(2));
        drop(last);
        assert!(woken.try_recv().is_err());
        drop((first, out));
        drop(alloc(&pool, 4));
        if magazine > 0 && !portable() {
            assert_eq!(pool.stats().recycle_ring_full, 0, "the magazines are still closed");
        }
        close_balanced(pool, &domain);
        all_are_back(&memory, 4);
    }
}

/// Threads that wait: each page has one user at a time, and every thread gets its pages.
#[test]
fn threads_wait_for_pages() {
    for magazine in [0, 1, 8] {
        let (pool, domain, memory) = shared(PoolOptions::new("waited").magazine(magazine), 3);
        thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for n in 0..2000 {
                        let page = pool.alloc_blocking().unwrap();
                        if n % 16 == 0 {
                            drop(pool.alloc());
                            drop(pool.alloc_async());
                            thread::yield_now();
                        }
                        drop(page);
                    }
                });
            }
        });
        close_balanced(pool, &domain);
        all_are_back(&memory, 3);
    }
}

/// What ends a wait: the device, the pool. And what cannot be waited for.
#[test]
fn a_wait_that_ends_with_an_error() {
    let (pool, ..) = shared(PoolOptions::new("waited"), 1);
    let page = pool.alloc().unwrap();
    let mut waiter = pool.alloc_async();
    assert!(poll(&mut waiter, Waker::noop()).is_pending());
    pool.device_gone();
    assert!(matches!(poll(&mut waiter, Waker::noop()), Poll::Ready(Err(WaitError::DeviceGone))));
    assert!(matches!(pool.alloc_blocking(), Err(WaitError::DeviceGone)));
    drop(page);
    assert_eq!(pool.close().outstanding, 0);

    let (pool, _, memory) = shared(PoolOptions::new("waited"), 1);
    let page = pool.alloc().unwrap();
    let (mut waiter, mut passed) = (pool.alloc_async(), pool.alloc_async());
    let slept = thread::spawn({
        let waiter = pool.alloc_async();
        move || std::iter::repeat_with(|| ()).scan(waiter, |w, ()| Some(poll(w, Waker::noop()))).find(Poll::is_ready)
    });
    drop(page);
    assert_eq!(pool.close().outstanding, 1);
    assert!(matches!(poll(&mut passed, Waker::noop()), Poll::Ready(Err(WaitError::Closed))));
    assert!(matches!(slept.join().unwrap(), Some(Poll::Ready(Err(WaitError::Closed)))));
    // The page had been passed before the end.
    assert!(matches!(poll(&mut waiter, Waker::noop()), Poll::Ready(Ok(_))));
    all_are_back(&memory, 1);

    let (pool, ..) = shared(PoolOptions::new("quiet").magazine(4).interrupt_cpus(false), 1);
    let _page = pool.alloc().unwrap();
    assert!(matches!(pool.alloc_blocking(), Err(WaitError::NoInterrupts)));
}

/// A waker is code of the user: if its clone panics, the future keeps its place, and its page is
/// not lost.
#[test]
fn a_waker_that_panics() {
    use std::task::{RawWaker, RawWakerVTable};
    const PANICS: RawWakerVTable = RawWakerVTable::new(|_| panic!("a clone"), |_| {}, |_| {}, |_| {});
    // SAFETY: the functions use no data.
    let waker = unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &PANICS)) };
    let (pool, domain, memory) = shared(PoolOptions::new("waited"), 1);
    let page = pool.alloc().unwrap();
    let mut waiter = pool.alloc_async();
    let polled = std::panic::AssertUnwindSafe(|| poll(&mut waiter, &waker).is_pending());
    std::panic::catch_unwind(polled).unwrap_err();
    drop(page);
    assert!(matches!(poll(&mut waiter, Waker::noop()), Poll::Ready(Ok(_))), "the place in the queue is lost");
    close_balanced(pool, &domain);
    all_are_back(&memory, 1);
}

/// A higher limit, and a reclaim, pass what there is to the waiters.
#[test]
fn a_limit_that_grows_serves_waiters() {
    let (pool, domain, memory) = shared(PoolOptions::new("limited").limit(1), 3);
    let page = pool.alloc().unwrap();
    let mut waiters = [pool.alloc_async(), pool.alloc_async()];
    pool.set_limit(2);
    assert!(matches!(poll(&mut waiters[0], Waker::noop()), Poll::Ready(Ok(_))));
    let pages = [memory.page(), memory.page()];
    pool.set_limit(3);
    drop(pages);
    pool.reclaim();
    assert!(matches!(poll(&mut waiters[1], Waker::noop()), Poll::Ready(Ok(_))));
    drop((page, waiters));
    close_balanced(pool, &domain);
}

/// A provider of which no number of pages is known has too many for the lists of magazines: an
/// error, unless the pool has a limit.
#[test]
fn more_pages_than_lists_can_number() {
    #[derive(Debug)]
    struct Endless(Arc<RegionProvider<Private>>);
    // SAFETY: the pages are those of another provider.
    unsafe impl Provider<Private> for Endless {
        fn page_size(&self) -> usize {
            self.0.page_size()
        }
        fn pages(&self) -> u64 {
            u64::MAX
        }
        fn alloc(&self, into: &mut [Option<RawPage<Private>>]) -> usize {
            self.0.alloc(into)
        }
        unsafe fn release(&self, page: RawPage<Private>) {
            // SAFETY: the caller's.
            unsafe { self.0.release(page) }
        }
        fn each(&self, f: &mut dyn FnMut(&Region<Private>)) {
            self.0.each(f);
        }
    }
    let endless = Arc::new(Endless(provider(8)));
    let error = PoolOptions::new("endless").build_shared(endless.clone(), None).unwrap_err();
    assert!(matches!(error, PoolError::TooManyMagazines { most, .. } if most == (1 << 23) - 1), "{error}");
    let pool = PoolOptions::new("limited").limit(8).build_shared(endless, None).unwrap();
    assert!(pool.alloc().is_some());
}
