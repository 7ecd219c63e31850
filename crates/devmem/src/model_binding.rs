//! Loom's models of a binding's end, with the real counts, pointers, ledger and token table; pages, pool and device are played.
//! `docs/devmem.md` says what each proves, and how to see it fail.

use crate::ledger::Ledger;
use crate::{Pages, TokenRange, TokenTable};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use netmem_refs::{Count, Owner, PercpuRef, Ref, RefCount};

/// What lingers until its last page is home: it keeps the binding as a pool's provider does.
struct Pool<C: Count + 'static>(UnsafeCell<Option<Ref<Memory<C>, C>>>);

// SAFETY: loom checks the cell.
unsafe impl<C: Count> Send for Pool<C> {}
// SAFETY: as above.
unsafe impl<C: Count> Sync for Pool<C> {}

/// A binding of one page, which was received as often as `refs` says.
struct Memory<C: Count + 'static> {
    ledger: Ledger,
    refs: AtomicU32,
    pool: Arc<Pool<C>>,
    /// Everybody who uses the memory looks at it, and its end writes it.
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

// SAFETY: a model has one of one page; a ledger that is drained stays so.
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
            // The page leaves the pool, which had lingered for it and goes.
            let pool = self.pool.clone();
            self.ledger.give(1);
            // SAFETY: this thread brings the last page home; loom checks that there is no other.
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
    /// How often it went, and with how many pages out.
    ended: Arc<(AtomicU32, AtomicU32)>,
}

/// A binding of which a pool has the page.
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
    let keeps = owner.get();
    // SAFETY: no other thread has it yet.
    pool.0.with_mut(|at| unsafe { *at = Some(keeps) });
    assert!(owner.ledger.take(1));
    Bound { owner, ended }
}

/// What the drop of a binding does.
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
            // As a socket does: by the reference in the provider, which the fragment keeps.
            // SAFETY: no other thread has the pool yet.
            let mut receive = table.receive();
            owner.pool.0.with(|keeps| {
                // SAFETY: as above.
                let binding = unsafe { (*keeps).as_ref() }.expect("the pool keeps it");
                receive.reserve(binding, 0).expect("a token");
            });
            // SAFETY: counted above.
            unsafe { receive.commit() };
        }
        let returner = table.returner();
        let other = thread::spawn(move || {
            let freed = returner.give_back(&[TokenRange { start: 1, count: 1 }]);
            assert_eq!(freed, Ok(1));
        });
        unbind(owner);
        table.release_drained();
        other.join().unwrap();
        table.release_drained();
        assert_eq!(ended.0.load(Ordering::Relaxed), 1, "while the socket lives");
        assert_eq!(ended.1.load(Ordering::Relaxed), 0, "every page was home");
    });
}

/// Last put against unbinding: the binding goes once, after the put is through with it, with every page home.
#[test]
fn last_put_against_unbind_refcount() {
    last_put_against_unbind::<RefCount>();
}

/// The same with the count that bindings have.
#[test]
fn last_put_against_unbind_percpuref() {
    last_put_against_unbind::<PercpuRef>();
}

/// Take against unbinding: a page goes out before the ledger is closed, and the binding is not drained, or it does not.
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
            // One of them there was not.
            ledger.give(1);
        }
        let drained = other.join().unwrap();
        assert!(!(taken && drained), "drained with a page out");
        assert_eq!(ledger.out(), u64::from(taken));
        assert!(!ledger.take(1), "closed for good");
    });
}

/// Last give against a look at the ledger: who finds it drained sees what was done with the page.
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
