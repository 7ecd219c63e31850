//! Loom's models of the race that `shared.rs` names, over each count. Sections are those of
//! `rcu_model.rs`. All interleavings are tried, but where a bound on preemptions is said.

use super::{Borrowed, Count, ExactCount, Owner, RcuCell, Ref};
use crate::{PercpuRef, RcuRef, RefCount, rcu};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use netmem_percpu::check;

/// Checks that no use of it comes after, or is concurrent with, its release.
struct Value {
    alive: UnsafeCell<bool>,
    number: u32,
    drops: Arc<AtomicU32>,
}

// SAFETY: loom checks every access to the cell.
unsafe impl Sync for Value {}
// SAFETY: as above.
unsafe impl Send for Value {}

impl Value {
    fn owner<C: Count>(drops: &Arc<AtomicU32>) -> Option<Owner<Self, C>> {
        Self::numbered(0, drops)
    }

    fn numbered<C: Count>(number: u32, drops: &Arc<AtomicU32>) -> Option<Owner<Self, C>> {
        Owner::try_new(Self { alive: UnsafeCell::new(true), number, drops: drops.clone() }).ok()
    }

    fn touch(&self) {
        // SAFETY: loom checks that nothing writes.
        self.alive.with(|alive| assert!(unsafe { *alive }, "used after its release"));
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: loom checks that nothing else reads or writes.
        self.alive.with_mut(|alive| assert!(unsafe { alive.replace(false) }, "released twice"));
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

/// Finds the object, reads it, and acquires a reference if it can.
fn read<C: Count>(cell: &RcuCell<Value, C>) -> Option<Ref<Value, C>> {
    rcu::read(|guard| {
        let found = cell.load(guard)?;
        found.touch();
        let got = Borrowed::try_get(found);
        found.touch();
        got.ok()
    })
}

/// Readers against the last put: a reader finds the object while a writer removes it and kills it.
/// The reader reads it until its section ends, and beyond if it got a reference; the object is
/// released once.
fn reader_against_store<C: Count>() {
    check(None, || {
        let drops = Arc::new(AtomicU32::new(0));
        let cell = Arc::new(RcuCell::<_, C>::new(Value::owner(&drops)));
        let reader = {
            let cell = cell.clone();
            thread::spawn(move || {
                if let Some(got) = read(&cell) {
                    got.touch();
                }
            })
        };
        cell.store(None);
        reader.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

/// The same, and the last put is that of a thread which took its reference before and was never in
/// a section.
fn reader_against_a_late_put<C: Count>() {
    check(Some(2), || {
        let drops = Arc::new(AtomicU32::new(0));
        let cell = Arc::new(RcuCell::<_, C>::new(Value::owner(&drops)));
        let held = read(&cell).expect("it is there");
        let putter = thread::spawn(move || {
            held.touch();
            drop(held);
        });
        let reader = {
            let cell = cell.clone();
            thread::spawn(move || drop(read(&cell)))
        };
        drop(cell.take());
        putter.join().unwrap();
        reader.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

/// Store against store: two writers replace the object; each object is released once, the last one
/// with the cell.
fn store_against_store<C: Count>() {
    check(Some(2), || {
        let drops = Arc::new(AtomicU32::new(0));
        let cell = Arc::new(RcuCell::<_, C>::new(Value::owner(&drops)));
        let other = {
            let (cell, drops) = (cell.clone(), drops.clone());
            thread::spawn(move || cell.store(Value::owner(&drops)))
        };
        cell.store(Value::owner(&drops));
        drop(read(&cell));
        other.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 2);
        drop(cell);
        assert_eq!(drops.load(Ordering::Relaxed), 3);
    });
}

/// Get against store: a thread acquires a reference while a writer replaces the object. The cell is
/// never empty, so there is a reference, to either object; after the store it is to the new one.
fn get_against_store<C: Count>() {
    check(Some(3), || {
        let drops = Arc::new(AtomicU32::new(0));
        let cell = Arc::new(RcuCell::<_, C>::new(Value::owner(&drops)));
        let getter = {
            let cell = cell.clone();
            thread::spawn(move || cell.get().expect("the cell is never empty").touch())
        };
        cell.store(Value::owner(&drops));
        let new = cell.get().expect("it was stored");
        new.touch();
        getter.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        cell.store(None);
        assert!(cell.get().is_none());
        new.touch();
    });
}

/// Writing against put: the owner writes the value as soon as there is no other reference, which
/// comes after all that the holders of the others did.
fn get_mut_against_put<C: ExactCount>() {
    check(Some(2), || {
        let drops = Arc::new(AtomicU32::new(0));
        let mut owner: Owner<_, C> = Value::owner(&drops).expect("it needs no memory");
        let putters = [Owner::get(&owner), Owner::get(&owner)].map(|held| {
            thread::spawn(move || {
                held.touch();
                drop(held);
            })
        });
        if let Some(value) = Owner::get_mut(&mut owner) {
            // SAFETY: loom checks that nothing else reads or writes.
            value.alive.with_mut(|alive| unsafe { *alive = true });
        }
        drop(owner);
        for putter in putters {
            putter.join().unwrap();
        }
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn refcount_get_mut_against_put() {
    get_mut_against_put::<RefCount>();
}

#[test]
fn rcuref_get_mut_against_put() {
    get_mut_against_put::<RcuRef>();
}

/// Exchange against a reader: a reader finds the object, or the one that a writer exchanges it for
/// and then removes. It reads either until its section ends, and beyond with a reference. A second
/// exchange of the first object fails.
fn compare_exchange_against_reader<C: Count>() {
    check(Some(3), || {
        let drops = Arc::new(AtomicU32::new(0));
        let cell = Arc::new(RcuCell::<_, C>::new(Value::owner(&drops)));
        let reader = {
            let cell = cell.clone();
            thread::spawn(move || {
                if let Some(got) = read(&cell) {
                    got.touch();
                }
            })
        };
        let (old, refused) = rcu::read(|guard| {
            let first = cell.load(guard);
            let exchanged = cell.compare_exchange(first, Value::numbered(1, &drops), guard);
            let Err(again) = cell.compare_exchange(first, Value::numbered(2, &drops), guard) else {
                panic!("it is not there");
            };
            assert_eq!(again.current.map(|found| found.number), Some(1));
            (exchanged.map_err(|_| "only this thread writes").unwrap(), again.new)
        });
        old.expect("it was there").touch();
        drop(refused);
        cell.store(None);
        reader.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 3);
    });
}

/// Update against update: each of two threads adds 1 to the number. Neither addition is lost.
fn update_against_update<C: Count>() {
    check(Some(2), || {
        let drops = Arc::new(AtomicU32::new(0));
        let cell = Arc::new(RcuCell::<_, C>::new(Value::owner(&drops)));
        let add = |cell: &RcuCell<Value, C>, drops: &Arc<AtomicU32>| {
            cell.update(|current| {
                let current = current.expect("never empty");
                current.touch();
                Value::numbered(current.number + 1, drops)
            })
        };
        let other = {
            let (cell, drops) = (cell.clone(), drops.clone());
            thread::spawn(move || add(&cell, &drops))
        };
        assert!(add(&cell, &drops));
        assert!(other.join().unwrap());
        assert_eq!(cell.get().expect("never empty").number, 2);
    });
}

macro_rules! over_each_count {
    ($($race:ident: $refcount:ident, $rcuref:ident, $percpuref:ident;)*) => {
        $(
            #[test]
            fn $refcount() {
                $race::<RefCount>();
            }

            #[test]
            fn $rcuref() {
                $race::<RcuRef>();
            }

            #[test]
            fn $percpuref() {
                $race::<PercpuRef>();
            }
        )*
    };
}

over_each_count! {
    reader_against_store: refcount_reader_against_store, rcuref_reader_against_store, percpuref_reader_against_store;
    reader_against_a_late_put:
        refcount_reader_against_a_late_put, rcuref_reader_against_a_late_put, percpuref_reader_against_a_late_put;
    get_against_store: refcount_get_against_store, rcuref_get_against_store, percpuref_get_against_store;
    compare_exchange_against_reader:
        refcount_compare_exchange_against_reader, rcuref_compare_exchange_against_reader,
        percpuref_compare_exchange_against_reader;
    update_against_update: refcount_update_against_update, rcuref_update_against_update, percpuref_update_against_update;
    store_against_store: refcount_store_against_store, rcuref_store_against_store, percpuref_store_against_store;
}
