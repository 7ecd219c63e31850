//! Loom's models of a page's way home from elsewhere: the drop as it is ([`Home::take_back`]), with a pool around it that is
//! nothing but the two ends of that way. `docs/return-path.md` says what each model proves, and how to see it fail.

use crate::desc::{self, Desc};
use crate::home::{Home, desc_of, first, link_of};
use crate::remote::{Left, Remote};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread::{self, JoinHandle};
use netmem_percpu::{Depot, Taker, run_on};
use std::ptr::NonNull;

/// What a pool stands for: everybody on a way home looks at `alive`, and whoever frees the pool writes it.
#[repr(C)]
struct Pool {
    home: Home,
    remote: Remote,
    taker: std::sync::Mutex<Taker>,
    alive: UnsafeCell<bool>,
    /// The provider: pages that left past the owner.
    given: Arc<Mutex<Vec<Sent>>>,
}

/// A page on its way to another thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Sent(NonNull<Desc>);

// SAFETY: loom checks every access to the cell.
unsafe impl Sync for Pool {}
// SAFETY: as above.
unsafe impl Send for Pool {}
// SAFETY: pages are made for it.
unsafe impl Send for Sent {}

/// As [`crate::shared::Shared`] has it, without a domain.
unsafe fn elsewhere(home: NonNull<Home>, desc: NonNull<Desc>) {
    let this = home.cast::<Pool>().as_ptr();
    // SAFETY: a page that is not home yet keeps the pool; the models keep its memory.
    unsafe {
        (*this).touch();
        let remote = &raw const (*this).remote;
        if Remote::push(remote, link_of(desc)).is_ok() {
            return;
        }
        (*this).touch();
        (*this).given.lock().unwrap().push(Sent(desc));
        if Remote::leave(remote) {
            (*this).free();
        }
    }
}

impl Pool {
    fn new(given: &Arc<Mutex<Vec<Sent>>>) -> Arc<Self> {
        let (depot, taker) = Depot::new(1, 3).unwrap();
        let (home, remote) = (Home::new(elsewhere, 0, Some(depot)), Remote::new(Left::new()));
        let taker = std::sync::Mutex::new(taker);
        Arc::new(Self { home, remote, taker, alive: UnsafeCell::new(true), given: given.clone() })
    }

    fn touch(&self) {
        // SAFETY: loom checks that nobody writes.
        self.alive.with(|alive| assert!(unsafe { *alive }));
    }

    fn free(&self) {
        // SAFETY: loom checks that nobody else reads or writes.
        self.alive.with_mut(|alive| assert!(unsafe { alive.replace(false) }, "freed twice"));
        // Nor that anybody is still in the depot.
        self.home.depot().unwrap().witness();
    }

    /// The owner's end, of a pool that had handed out `out` pages; what came back to it.
    fn end(&self, out: u64) -> Vec<Sent> {
        let mut back = Vec::new();
        let mut taker = self.taker.lock().unwrap();
        taker.close(self.home.depot().unwrap(), |item| back.push(Sent(desc_of(item)))).unwrap();
        let mut list = self.remote.close();
        // SAFETY: what was on the stack is the pool's.
        while let Some((desc, rest)) = unsafe { first(list) } {
            list = rest;
            back.push(Sent(desc));
        }
        self.touch();
        // SAFETY: the last that the owner does.
        if unsafe { Remote::owner_leaves(&self.remote, out - back.len() as u64) } {
            self.free();
        }
        back
    }
}

/// A page of `pool` that somebody holds.
fn page(pool: &Pool) -> Sent {
    let desc = Desc::for_model(1);
    desc.set_home((&raw const pool.home).cast_mut());
    Sent(NonNull::from(Box::leak(Box::new(desc))))
}

/// Drops `page` on `cpu`.
fn drop_on(cpu: usize, pool: &Arc<Pool>, page: Sent) -> JoinHandle<()> {
    // The models keep the memory of the pool, whoever "frees" it.
    let keep = pool.clone();
    thread::spawn(move || {
        let page = page;
        run_on(cpu);
        // SAFETY: the count is this thread's, and given up.
        unsafe { desc::put(page.0) };
        drop(keep);
    })
}

fn bounded(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

/// Return against teardown: of two pages dropped on two CPUs each ends up with the owner or with the provider, once, and exactly
/// one thread frees the pool, after everybody's last touch.
#[test]
fn return_against_teardown() {
    bounded(|| {
        let given = Arc::default();
        let pool = Pool::new(&given);
        let pages = [page(&pool), page(&pool)];
        let threads = [drop_on(0, &pool, pages[0]), drop_on(1, &pool, pages[1])];
        let mut back = pool.end(2);
        threads.into_iter().for_each(|t| t.join().unwrap());
        // SAFETY: all others are done.
        assert!(!pool.alive.with(|alive| unsafe { *alive }), "nobody freed the pool");
        back.append(&mut given.lock().unwrap());
        back.sort();
        let mut all = pages.to_vec();
        all.sort();
        assert_eq!(back, all);
        free(&pages);
    });
}

/// A full magazine on its way to the depot against teardown: what it carries keeps the pool, and comes back one by one if it is late.
#[test]
fn magazine_against_teardown() {
    bounded(|| {
        let given = Arc::default();
        let pool = Pool::new(&given);
        let pages = [page(&pool), page(&pool)];
        // Fills the magazine of CPU 0, so that the next drop there hands it over.
        drop_on(0, &pool, pages[0]).join().unwrap();
        let thread = drop_on(0, &pool, pages[1]);
        let mut back = pool.end(2);
        thread.join().unwrap();
        // SAFETY: all others are done.
        assert!(!pool.alive.with(|alive| unsafe { *alive }), "nobody freed the pool");
        back.append(&mut given.lock().unwrap());
        assert_eq!(back.len(), 2);
        free(&pages);
    });
}

/// A replaced pool against a late return: the page leaves the old pool, enters the new one, and the next drop finds the new one.
#[test]
fn replaced_pool_against_late_return() {
    bounded(|| {
        let given = Arc::default();
        let (old, new) = (Pool::new(&given), Pool::new(&given));
        let late = page(&old);
        let thread = drop_on(1, &old, late);
        let back = old.end(1);
        // The queue goes on with another pool, which takes what the provider has.
        let taken = back.into_iter().next().or_else(|| given.lock().unwrap().pop());
        if let Some(page) = taken {
            // SAFETY: the page is ours.
            unsafe { page.0.as_ref() }.set_home((&raw const new.home).cast_mut());
            drop_on(0, &new, page).join().unwrap();
            assert_eq!(new.end(1), [page], "it came home to the new pool");
        }
        thread.join().unwrap();
        // SAFETY: all others are done.
        assert!(!old.alive.with(|alive| unsafe { *alive }), "nobody freed the old pool");
        free(&[late]);
    });
}

fn free(pages: &[Sent]) {
    for page in pages {
        // SAFETY: made by `page`, freed once, at a model's end.
        drop(unsafe { Box::from_raw(page.0.as_ptr()) });
    }
}
