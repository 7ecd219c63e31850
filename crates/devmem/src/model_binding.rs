//! Loom's models of a binding's end. Counts, pointers, ledger and token table are the real ones;
//! pages, pool and device are simulated. `MODELS.md` lists what each model proves, and
//! which changes make it fail.

use crate::ledger::Ledger;
use crate::tokens::{Pages, TokenRange, TokenTable};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use netmem_refs::{Count, Owner, PercpuRef, Ref, RefCount};

/// A pool, which exists until its last page is returned. It keeps the binding, as the provider of a
/// real pool does.
struct Pool<C: Count + 'static>(UnsafeCell<Option<Ref<Memory<C>, C>>>);

// SAFETY: loom checks the cell.
unsafe impl<C: Count> Send for Pool<C> {}
// SAFETY: as above.
unsafe impl<C: Count> Sync for Pool<C> {}

/// A binding of one page. `refs` is the number of references to the page.
struct Memory<C: Count + 'static> {
    ledger: Ledger,
    refs: AtomicU32,
    pool: Arc<Pool<C>>,
    /// Each use of the memory reads this flag, and the end of the memory writes it.
    alive: Arc<UnsafeCell<bool>>,
}

// SAFETY: loom checks the cell.
unsafe impl<C: Count> Send for Memory<C> {}
// SAFETY: as above.
unsafe impl<C: Count> Sync for Memory<C> {}

impl<C: Count> Memory<C> {
    fn touch(&self) {
        // SAFETY: loom checks that no thread writes.
        self.alive.with(|alive| assert!(unsafe { *alive }));
    }
}

// SAFETY: a model has one binding, of one page, and a drained ledger stays drained.
unsafe impl<C: Count> Pages for Memory<C> {
    fn id(&self) -> u64 {
        7
    }

    fn pages(&self) -> u32 {
        1
    }

    unsafe fn put(&self, _index: u32, n: u32) {
        self.touch();
        if self.refs.fetch_sub(n, Ordering::AcqRel) == n {
            // The last page leaves the pool, so the pool is dropped.
            let pool = self.pool.clone();
            self.ledger.give(1);
            // SAFETY: this thread returns the last page; loom checks that no other thread uses the
            // cell.
            drop(pool.0.with_mut(|keeps| unsafe { (*keeps).take() }));
        }
        self.touch();
    }

    fn drained(&self) -> bool {
        self.touch();
        self.ledger.is_drained()
    }
}

struct Bound<C: Count + 'static> {
    owner: Owner<Memory<C>, C>,
    /// How often the binding was released, and how many pages were out then.
    ended: Arc<(AtomicU32, AtomicU32)>,
}

/// Makes a binding whose page is in a pool.
fn bind<C: Count>() -> Bound<C> {
    let (pool, ended) = (Arc::new(Pool(UnsafeCell::new(None))), Arc::new((AtomicU32::new(0), AtomicU32::new(0))));
    let alive = Arc::new(UnsafeCell::new(true));
    let memory = Memory { ledger: Ledger::new(), refs: AtomicU32::new(0), pool: pool.clone(), alive };
    let ends = ended.clone();
    let owner = Owner::try_with_release(memory, move |memory: Memory<C>| {
        // SAFETY: loom checks that no other thread reads or writes.
        memory.alive.with_mut(|alive| unsafe { *alive = false });
        ends.1.fetch_add(memory.ledger.out() as u32, Ordering::Relaxed);
        ends.0.fetch_add(1, Ordering::Relaxed);
    })
    .expect("a slot");
    let keeps = Owner::get(&owner);
    // SAFETY: no other thread has the pool yet.
    pool.0.with_mut(|at| unsafe { *at = Some(keeps) });
    assert!(owner.ledger.take(1));
    Bound { owner, ended }
}

/// Does the same as the drop of a binding.
fn unbind<C: Count>(owner: Owner<Memory<C>, C>) {
    owner.ledger.close();
    drop(owner);
}

fn last_put_against_unbind<C: Count>() {
    loom::model(|| {
        let Bound { owner, ended } = bind::<C>();
        let mut table = TokenTable::new();
        owner.refs.store(1, Ordering::Relaxed);
        {
            // The socket uses the reference in the provider, which the fragment keeps.
            // SAFETY: no other thread has the pool yet.
            let mut receive = table.receive();
            owner.pool.0.with(|keeps| {
                // SAFETY: as above.
                let binding = unsafe { (*keeps).as_ref() }.expect("the pool keeps it");
                receive.reserve(binding, 0).expect("a token");
            });
            // SAFETY: the reference was counted above.
            unsafe { receive.commit() };
        }
        let returner = table.returner();
        let other = thread::spawn(move || {
            let freed = returner.return_tokens(&[TokenRange { start: 1, count: 1 }]);
            assert_eq!(freed, Ok(1));
        });
        unbind(owner);
        table.release_drained();
        other.join().unwrap();
        table.release_drained();
        assert_eq!(ended.0.load(Ordering::Relaxed), 1, "while the socket lives");
        assert_eq!(ended.1.load(Ordering::Relaxed), 0, "every page was returned");
    });
}

/// Last put against unbinding: the binding is released once, after the put has returned, and after
/// every page was returned.
#[test]
fn last_put_against_unbind_refcount() {
    last_put_against_unbind::<RefCount>();
}

/// The same with the kind of count that bindings have by default.
#[test]
fn last_put_against_unbind_percpuref() {
    last_put_against_unbind::<PercpuRef>();
}

/// Take against unbinding: either a page is allocated before the ledger is closed, and the binding
/// is not drained; or no page is allocated.
#[test]
fn take_against_unbind() {
    loom::model(|| {
        let ledger = Arc::new(Ledger::new());
        let closer = ledger.clone();
        let other = thread::spawn(move || {
            closer.close();
            closer.is_drained()
        });
        let taken = ledger.take(2);
        if taken {
            // Only one of the two pages existed.
            ledger.give(1);
        }
        let drained = other.join().unwrap();
        assert!(!(taken && drained), "drained with a page out");
        assert_eq!(ledger.out(), u64::from(taken));
        assert!(!ledger.take(1), "closed for good");
    });
}

/// Last give against a read of the ledger: a thread that finds the ledger drained sees everything
/// that was done with the page.
#[test]
fn last_give_against_drained() {
    loom::model(|| {
        let shared = Arc::new((Ledger::new(), UnsafeCell::new(0)));
        assert!(shared.0.take(1));
        shared.0.close();
        let user = shared.clone();
        let other = thread::spawn(move || {
            // SAFETY: loom checks the cell.
            user.1.with_mut(|at| unsafe { *at = 1 });
            user.0.give(1);
        });
        if shared.0.is_drained() {
            // SAFETY: loom checks the cell.
            shared.1.with(|at| assert_eq!(unsafe { *at }, 1));
        }
        other.join().unwrap();
        assert!(shared.0.is_drained());
    });
}
