//! Pages lent to a borrower that cannot return them: in order, within bounds, and by the policy.

use crate::queue::{BusyHead, BusyPage, LentQueue, LentStats};
use netmem_pool::{
    CountingDomain, Direction, DmaDomain, MapError, Page, PagePool, PoolOptions, Private, RegionOptions, RegionProvider,
};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A domain without a table: the device's addresses are those of this process.
#[derive(Debug)]
struct Identity;

impl DmaDomain for Identity {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        Ok(addr.addr() as u64)
    }

    fn unmap(&self, _dma: u64, _len: usize) {}
}

type Counting = CountingDomain<Identity>;

/// A pool with a provider of its own, in a domain that counts.
fn pool(options: PoolOptions, pages: usize) -> (PagePool<Private>, Arc<Counting>) {
    let region = RegionOptions::new(pages).huge_pages(false).populate(false).build().unwrap();
    let provider = RegionProvider::new(region);
    let domain = Arc::new(CountingDomain::new(Identity));
    (options.build(provider, Some(domain.clone())).unwrap(), domain)
}

fn alloc(pool: &mut PagePool<Private>, n: usize) -> Vec<Page<Private>> {
    (0..n).map(|_| pool.alloc().unwrap()).collect()
}

/// Closes the pool, and checks that each page was returned and unmapped.
#[track_caller]
fn close_balanced(pool: PagePool<Private>, domain: &Counting) {
    let closed = pool.close();
    assert_eq!((closed.outstanding, closed.stats.inflight()), (0, 0));
    assert_eq!((closed.stats.mapped, closed.stats.unmapped), (domain.maps(), domain.unmaps()));
    assert_eq!(domain.maps(), domain.unmaps());
}

/// Lent, taken, busy, released, full.
fn counts(stats: LentStats) -> [u64; 5] {
    [stats.lent, stats.taken, stats.busy, stats.released, stats.full]
}

/// A borrower's flag, and the closure that reads it.
fn borrower() -> (Rc<Cell<bool>>, impl FnMut() -> bool) {
    let busy = Rc::new(Cell::new(true));
    (busy.clone(), move || busy.get())
}

/// With [`BusyHead::Keep`], a head that stays busy blocks the queue, with all pages behind it. Then
/// the pages come out in order.
#[test]
fn a_head_that_is_kept() {
    let (mut pool, domain) = pool(PoolOptions::new("kept"), 4);
    let mut waiting = LentQueue::new(4, BusyHead::Keep);
    assert!(waiting.take().is_none() && waiting.is_empty());
    let mut flags = Vec::new();
    let mut indices = Vec::new();
    for page in alloc(&mut pool, 3) {
        let (flag, busy) = borrower();
        indices.push(page.index());
        waiting.lend(page, busy).unwrap();
        flags.push(flag);
    }
    flags[1].set(false);
    flags[2].set(false);
    for _ in 0..100 {
        assert!(waiting.take().is_none(), "the head is busy");
    }
    assert_eq!((waiting.len(), pool.stats().inflight()), (3, 3));
    flags[0].set(false);
    let order: Vec<_> = std::iter::from_fn(|| waiting.take()).map(|p| p.index()).collect();
    assert_eq!(order, indices);
    assert_eq!(counts(waiting.stats()), [3, 3, 100, 0, 0]);
    close_balanced(pool, &domain);
}

/// The queue is bounded. If it is full, the caller gets its page back.
#[test]
fn the_bound() {
    let (mut pool, domain) = pool(PoolOptions::new("bound"), 8);
    for capacity in [0, 1, 5] {
        let mut waiting = LentQueue::new(capacity, BusyHead::Keep);
        let busy = Rc::new(Cell::new(true));
        let ask = || {
            let busy = busy.clone();
            move || busy.get()
        };
        let mut pages = alloc(&mut pool, capacity + 1);
        let last = pages.pop().unwrap();
        pages.into_iter().for_each(|page| waiting.lend(page, ask()).unwrap());
        let last = waiting.lend(last, ask()).unwrap_err();
        assert_eq!((waiting.len(), waiting.stats().full), (capacity, 1));
        busy.set(false);
        assert_eq!(waiting.take().is_some(), capacity > 0);
        assert_eq!(waiting.lend(last, ask()).is_ok(), capacity > 0);
    }
    close_balanced(pool, &domain);
}

/// With [`BusyHead::Release`], a busy head is given up at exactly the poll that the policy names.
/// The pages behind it are then looked at.
#[test]
fn a_head_that_is_released() {
    let (mut pool, domain) = pool(PoolOptions::new("released"), 8);
    let given_up = Arc::new(Mutex::new(Vec::<Page<Private>>::new()));
    let to = given_up.clone();
    let mut waiting = LentQueue::new(
        8,
        BusyHead::Release { after: 3, to: Box::new(move |p| to.lock().unwrap().push(p.into_page())) },
    );
    let (mut flags, mut indices) = (Vec::new(), Vec::new());
    for page in alloc(&mut pool, 4) {
        let (flag, busy) = borrower();
        indices.push(page.index());
        waiting.lend(page, busy).unwrap();
        flags.push(flag);
    }
    flags[2].set(false);
    assert!(waiting.take().is_none() && waiting.take().is_none());
    assert!(given_up.lock().unwrap().is_empty());
    // After the third poll the head is handed over. It also counts as the first poll of the next
    // page.
    assert!(waiting.take().is_none() && waiting.take().is_none());
    assert_eq!(given_up.lock().unwrap().len(), 1);
    // Polls of a head that was done in time do not count for the next head.
    flags[1].set(false);
    assert_eq!([waiting.take(), waiting.take()].map(|p| p.unwrap().index()), indices[1..3]);
    assert!(waiting.take().is_none() && waiting.take().is_none());
    assert_eq!((given_up.lock().unwrap().len(), waiting.len()), (1, 1));
    assert!(waiting.take().is_none());
    let released: Vec<_> = given_up.lock().unwrap().iter().map(Page::index).collect();
    assert_eq!((released, waiting.len()), (vec![indices[0], indices[3]], 0));
    assert_eq!(counts(waiting.stats()), [4, 2, 8, 2, 0]);
    // The pages are in flight until their receiver drops them. A page that a device may still write
    // is quarantined.
    assert_eq!(pool.stats().inflight(), 2);
    let mut left = given_up.lock().unwrap();
    pool.quarantine(left.pop().unwrap());
    left.clear();
    assert_eq!((pool.stats().inflight(), pool.stats().quarantined), (0, 1));
    assert_eq!(pool.close().stats.quarantined, 1);
    assert_eq!(domain.maps(), domain.unmaps());
}

/// When the queue is dropped, no page that is still lent is returned, and all other pages
/// are.
#[test]
fn a_queue_that_goes() {
    for release in [false, true] {
        let (mut pool, _domain) = pool(PoolOptions::new("goes"), 8);
        let given_up = Arc::new(AtomicUsize::new(0));
        let count = given_up.clone();
        let stays = match release {
            false => BusyHead::Keep,
            true => BusyHead::Release {
                after: 1,
                to: Box::new(move |page| {
                    count.fetch_add(1, Ordering::Relaxed);
                    drop(page.into_page());
                }),
            },
        };
        let mut waiting = LentQueue::new(8, stays);
        for (n, page) in alloc(&mut pool, 6).into_iter().enumerate() {
            waiting.lend(page, move || n % 3 == 0).unwrap();
        }
        drop(waiting);
        let away = if release { 0 } else { 2 };
        assert_eq!((pool.stats().inflight(), given_up.load(Ordering::Relaxed)), (away, 2 - away as usize));
    }
}

/// Runs `f`, which must panic with the message `what`.
fn panics_with(what: &str, f: impl FnOnce()) {
    let payload = catch_unwind(AssertUnwindSafe(f)).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&what));
}

/// If a `busy` closure panics, its page stays at the head, lent as before.
#[test]
fn a_question_that_panics() {
    let (mut pool, domain) = pool(PoolOptions::new("asks"), 4);
    let mut queue = LentQueue::new(4, BusyHead::Keep);
    let indices: Vec<_> = (0..2)
        .map(|_| {
            let page = pool.alloc().unwrap();
            let (index, mut polls) = (page.index(), 0);
            let busy = move || {
                polls += 1;
                assert!(polls != 2, "the second poll");
                polls < 3
            };
            queue.lend(page, busy).unwrap();
            index
        })
        .collect();
    for (n, index) in indices.into_iter().enumerate() {
        assert!(queue.take().is_none());
        panics_with("the second poll", || drop(queue.take()));
        assert_eq!((queue.len(), pool.stats().inflight()), (2 - n, 2 - n as u64));
        assert_eq!(queue.take().unwrap().index(), index);
    }
    assert_eq!(counts(queue.stats()), [2, 2, 2, 0, 0]);
    close_balanced(pool, &domain);
}

/// If the receiver of a head panics or declines the page, the page is the head again. If the
/// receiver took the page and then panics, it keeps the page. No page is returned meanwhile.
#[test]
fn a_receiver_that_panics() {
    let (mut pool, domain) = pool(PoolOptions::new("receives"), 2);
    let given_up = Arc::new(Mutex::new(Vec::<Page<Private>>::new()));
    let (to, mut calls) = (given_up.clone(), 0);
    let to = move |page: BusyPage<'_, Private>| {
        calls += 1;
        assert!(calls != 1, "before it was taken");
        if calls != 2 {
            to.lock().unwrap().push(page.into_page());
        }
        assert!(calls != 3, "after it was taken");
    };
    let mut queue = LentQueue::new(4, BusyHead::Release { after: 2, to: Box::new(to) });
    let lent = alloc(&mut pool, 2);
    let indices: Vec<_> = lent.iter().map(Page::index).collect();
    lent.into_iter().for_each(|page| queue.lend(page, || true).unwrap());
    assert!(queue.take().is_none());
    panics_with("before it was taken", || drop(queue.take()));
    assert!(pool.alloc().is_none(), "a lent page was handed out");
    // Polls count from 0 again. The receiver declines the page, which stays the head.
    assert!(queue.take().is_none() && queue.take().is_none());
    assert_eq!((queue.len(), queue.stats().released, pool.stats().inflight()), (2, 0, 2));
    assert!(queue.take().is_none());
    panics_with("after it was taken", || drop(queue.take()));
    assert_eq!((queue.len(), queue.stats().released, pool.stats().inflight()), (1, 1, 2));
    assert!(queue.take().is_none() && queue.take().is_none());
    let mut given_up = std::mem::take(&mut *given_up.lock().unwrap_or_else(PoisonError::into_inner));
    assert_eq!(given_up.iter().map(Page::index).collect::<Vec<_>>(), indices);
    assert_eq!(counts(queue.stats()), [2, 0, 8, 2, 0]);
    given_up.clear();
    close_balanced(pool, &domain);
}

/// A queue that is dropped examines every page, even if closures panic. No lent page is returned, a
/// page whose closure panics counts as lent, and the first panic is propagated.
#[test]
fn panics_while_a_queue_goes() {
    for release in [false, true] {
        let (mut pool, _domain) = pool(PoolOptions::new("goes"), 8);
        let given_up = Arc::new(Mutex::new(Vec::<Page<Private>>::new()));
        let (to, mut calls) = (given_up.clone(), 0);
        let to = move |page: BusyPage<'_, Private>| {
            calls += 1;
            assert!(calls != 2, "a receiver");
            to.lock().unwrap().push(page.into_page());
        };
        let head = if release { BusyHead::Release { after: 1, to: Box::new(to) } } else { BusyHead::Keep };
        let mut queue = LentQueue::new(8, head);
        let pages = alloc(&mut pool, 8);
        let indices: Vec<_> = pages.iter().map(Page::index).collect();
        // Of every four pages, one is done, one is busy, one panics and one is busy.
        for (n, page) in pages.into_iter().enumerate() {
            let busy = move || match n % 4 {
                2 => panic!("a question"),
                n => n != 0,
            };
            queue.lend(page, busy).unwrap();
        }
        panics_with("a question", || drop(queue));
        let home: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        let mut at_home: Vec<_> = home.iter().map(Page::index).collect();
        at_home.sort_unstable();
        drop(home);
        assert_eq!(at_home, [indices[0].min(indices[4]), indices[0].max(indices[4])], "what is not lent, and no more");
        let given_up = std::mem::take(&mut *given_up.lock().unwrap());
        assert_eq!(given_up.len(), if release { 5 } else { 0 });
        assert_eq!(pool.stats().inflight(), 6);
    }
}

/// A queue that is dropped because of a panic examines every page, too. Another panic meanwhile
/// does not end the process.
#[test]
fn a_queue_that_unwinds() {
    let (mut pool, _domain) = pool(PoolOptions::new("unwinds"), 4);
    let pages = alloc(&mut pool, 4);
    panics_with("a question", || {
        let mut queue = LentQueue::new(4, BusyHead::Keep);
        for (n, page) in pages.into_iter().enumerate() {
            let busy = move || match n {
                0 | 2 => panic!("a question"),
                n => n == 1,
            };
            queue.lend(page, busy).unwrap();
        }
        let _ = queue.take();
    });
    assert_eq!(pool.stats().inflight(), 3);
}

/// A borrower on another thread that polls and sets a flag never finds that a page was written
/// while it still used the page.
#[test]
fn a_borrower_that_polls() {
    const SLOTS: usize = 16;
    const PAGES: u64 = 50_000;
    struct Slot {
        /// The address of a lent page, or 0. The owner writes it if it is 0, the borrower if it is
        /// not.
        page: AtomicUsize,
        busy: AtomicBool,
    }
    let slots: Vec<Slot> =
        (0..SLOTS).map(|_| Slot { page: AtomicUsize::new(0), busy: AtomicBool::new(false) }).collect();
    let (mut pool, domain) = pool(PoolOptions::new("polls"), SLOTS);
    let halt = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            while !halt.load(Ordering::Relaxed) {
                for slot in &slots {
                    let page = slot.page.swap(0, Ordering::Acquire) as *const [u64; 64];
                    if page.is_null() {
                        continue;
                    }
                    // SAFETY: the owner keeps the page and does not touch it until this borrower is
                    // done.
                    let words = unsafe { &*page };
                    assert!(words.iter().all(|&word| word == words[0]), "written while it was lent");
                    slot.busy.store(false, Ordering::Release);
                }
            }
        });
        let mut waiting = LentQueue::new(SLOTS, BusyHead::Keep);
        let mut lent = 0;
        while lent < PAGES {
            let Some(mut page) = waiting.take().or_else(|| pool.alloc()) else {
                thread::yield_now();
                continue;
            };
            page.as_mut_slice()[..512].chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&lent.to_ne_bytes()));
            // The queue is in order, so the last page of a slot was returned before the next page
            // of the slot is lent.
            let slot = &slots[(lent % SLOTS as u64) as usize];
            let at = page.as_ptr().expose_provenance();
            slot.busy.store(true, Ordering::Relaxed);
            waiting.lend(page, || slot.busy.load(Ordering::Acquire)).unwrap();
            slot.page.store(at, Ordering::Release);
            lent += 1;
        }
        while !waiting.is_empty() {
            drop(waiting.take());
        }
        halt.store(true, Ordering::Relaxed);
        assert_eq!(waiting.stats().taken, PAGES);
    });
    assert!(pool.stats().allocated() <= SLOTS as u64, "pages go round: {:?}", pool.stats());
    close_balanced(pool, &domain);
}
