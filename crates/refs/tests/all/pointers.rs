//! The smart pointers over each count.

use netmem_refs::{
    Borrowed, Count, Dead, ExactCount, InfallibleCount, OwnLine, Owner, PercpuRef, RcuCell, RcuRef, Ref, RefCount,
    Worker, rcu, unsize,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::{RefUnwindSafe, UnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// A value that counts its drops.
struct Value(Arc<AtomicU32>);

impl Value {
    fn new() -> (Self, Arc<AtomicU32>) {
        let drops = Arc::new(AtomicU32::new(0));
        (Self(drops.clone()), drops)
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Waits until a condition is true. Tests run in parallel, and a section of another test delays the
/// releases here.
fn eventually(what: impl Fn() -> bool) {
    for _ in 0..120_000 {
        if what() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("still not, after two minutes");
}

fn life_of<C: Count>() {
    let (value, drops) = Value::new();
    let owner: Owner<_, C> = Owner::try_new(value).unwrap();
    let one = Owner::get(&owner);
    let two = one.clone();
    let three = Ref::try_get_live(&two).unwrap();
    assert!(Ref::ptr_eq(&one, &three) && Arc::ptr_eq(&owner.0, &drops));
    assert_eq!((Owner::approximate_count(&owner), Ref::approximate_count(&three)), (4, 4));
    drop(one);
    Owner::kill(owner);
    assert_eq!(Ref::approximate_count(&three), 2);
    drop(two);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    thread::spawn(move || drop(three)).join().unwrap();
    eventually(|| drops.load(Ordering::SeqCst) == 1);

    // An object without other references, with a callback, and with a value of size 0.
    let (tx, rx) = mpsc::channel();
    drop(Owner::<_, C>::try_with_release((), move |()| tx.send(()).unwrap()).unwrap());
    assert_eq!(rx.iter().count(), 1);
}

/// Proves REF-5.
#[test]
fn each_count_releases_once_at_the_last_put() {
    life_of::<RefCount>();
    life_of::<PercpuRef>();
    life_of::<RcuRef>();
}

/// Making a count that cannot fail needs no `?`. Proves REF-5.
#[test]
fn owners_that_cannot_fail() {
    fn made<C: InfallibleCount>() {
        let (tx, rx) = mpsc::channel();
        let (one, two): (Owner<_, C>, Owner<_, C>) =
            (Owner::new(1), Owner::with_release(2, move |n| tx.send(n).unwrap()));
        assert_eq!(*Owner::get(&one) + *Owner::get(&two), 3);
        drop(two);
        assert_eq!(rx.iter().collect::<Vec<_>>(), [2]);
    }
    made::<RefCount>();
    made::<RcuRef>();
}

/// A value whose methods have the names of the pointers' functions.
struct Named;

macro_rules! named {
    ($($name:ident)*) => {
        impl Named {
            $(fn $name(&self) -> &'static str {
                stringify!($name)
            })*
        }
        /// Calls each method on a pointer.
        macro_rules! each_is_the_values {
            ($pointer:expr) => {
                $(assert_eq!($pointer.$name(), stringify!($name));)*
            };
        }
    };
}

named! {
    get kill kill_and_confirm approximate_count try_get try_get_live try_get_live_counting ptr_eq is_dying resurrect value
    get_mut
}

/// A pointer hides no method of its value: an owner of a map is used as a map. Proves REF-5.
#[test]
fn methods_are_the_values() {
    let owner: Owner<_, RefCount> = Owner::new(HashMap::from([("mtu", 1500)]));
    assert_eq!(
        (owner.get("mtu"), Owner::get(&owner).get("mtu"), owner.get("gateway")),
        (Some(&1500), Some(&1500), None)
    );

    let owner: Owner<_, PercpuRef> = Owner::try_new(Named).unwrap();
    each_is_the_values!(owner);
    each_is_the_values!(Owner::get(&owner));
    let cell = RcuCell::new(Some(owner));
    rcu::read(|guard| {
        let found = cell.load(guard).unwrap();
        each_is_the_values!(found);
    });
}

/// Proves REF-4: with every kind of count, no release runs inside a critical section, not even in
/// the caller's own section.
#[test]
fn no_release_in_a_section() {
    fn waits<C: Count>() {
        let (value, drops) = Value::new();
        let owner: Owner<_, C> = Owner::try_new(value).unwrap();
        rcu::read(|_| {
            rcu::read(|_| drop(owner));
            assert_eq!(drops.load(Ordering::SeqCst), 0);
        });
        eventually(|| drops.load(Ordering::SeqCst) == 1);
    }
    waits::<RefCount>();
    waits::<RcuRef>();
    waits::<PercpuRef>();
}

/// Proves REF-4, REF-5: an object is killed with a confirmation, resurrected by a reference, and
/// killed again.
#[test]
fn lives_of_a_pointer() {
    let (value, drops) = Value::new();
    let owner: Owner<_, PercpuRef> = Owner::try_new(value).unwrap();
    let r = Owner::get(&owner);
    assert!(!Ref::is_dying(&r) && Ref::resurrect(&r).is_err());
    let mut confirmed = false;
    Owner::kill_and_confirm(owner, || confirmed = true).map_err(|(_, e)| e).unwrap();
    assert!(confirmed && Ref::is_dying(&r));
    assert_eq!(Ref::try_get_live(&r).err(), Some(Dead));
    let owner = Ref::resurrect(&r).unwrap();
    assert!(Ref::try_get_live(&r).is_ok());
    drop(r);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    Owner::kill_and_confirm(owner, || ()).map_err(|(_, e)| e).unwrap();
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

/// A release runs neither while the caller is in a section, nor in a section of the release itself.
/// If a callback retires an object in a section, the object is released when that section has
/// ended. A section around the callback would prevent this. Proves REF-3.
#[test]
fn destruction_waits_for_the_callers_section_and_is_in_none() {
    // In a process with only this test, no other thread would be in a section. Here the test may
    // need several tries.
    let alone = AtomicBool::new(false);
    eventually(|| {
        let (value, drops) = Value::new();
        let inner_at_once = Arc::new(AtomicBool::new(false));
        let told = inner_at_once.clone();
        let owner: Owner<_, RcuRef> = Owner::with_release(value, move |outer| {
            let (inner, inner_drops) = Value::new();
            drop(Owner::<_, RcuRef>::new(inner));
            told.store(inner_drops.load(Ordering::SeqCst) == 1, Ordering::SeqCst);
            drop(outer);
        });
        rcu::read(|_| {
            rcu::read(|_| drop(owner));
            assert_eq!(drops.load(Ordering::SeqCst), 0);
        });
        alone.store(drops.load(Ordering::SeqCst) == 1 && inner_at_once.load(Ordering::SeqCst), Ordering::SeqCst);
        alone.load(Ordering::SeqCst)
    });
}

/// An object that was found exists until the section ends, although it was removed, put, and is
/// dead. This holds for each kind of count. Proves REF-3.
#[test]
fn what_is_found_outlives_its_last_put() {
    fn outlives<C: Count>() {
        let (value, drops) = Value::new();
        let cell: RcuCell<_, C> = RcuCell::new(Some(Owner::try_new(value).unwrap()));
        rcu::read(|guard| {
            let found = cell.load(guard).unwrap();
            let kept = Borrowed::try_get(found).unwrap();
            thread::scope(|scope| scope.spawn(|| cell.store(None)).join().unwrap());
            assert!(cell.load(guard).is_none());
            // The last put is on another thread, which is in no section.
            thread::scope(|scope| scope.spawn(|| drop(kept)).join().unwrap());
            assert_eq!(Borrowed::try_get(found).err(), Some(Dead));
            assert_eq!(Borrowed::try_get_live(found).err(), Some(Dead));
            assert!(Arc::ptr_eq(&found.0, &drops));
            drop(cell);
            assert_eq!(Borrowed::value(found).0.load(Ordering::SeqCst), 0);
        });
        eventually(|| drops.load(Ordering::SeqCst) == 1);
    }
    outlives::<RefCount>();
    outlives::<RcuRef>();
    outlives::<PercpuRef>();
}

/// An owner that was taken out of a cell is alive until it is dropped. Even then, the release waits
/// for sections.
#[test]
fn an_owner_taken_out_of_a_cell_is_alive() {
    fn alive<C: Count>() {
        let (value, drops) = Value::new();
        let cell: RcuCell<_, C> = RcuCell::new(Some(Owner::try_new(value).unwrap()));
        let owner = cell.take().unwrap();
        assert!(Ref::try_get_live(&Owner::get(&owner)).is_ok());
        rcu::read(|_| thread::scope(|scope| scope.spawn(|| drop(owner)).join().unwrap()));
        eventually(|| drops.load(Ordering::SeqCst) == 1);
    }
    alive::<RefCount>();
    alive::<RcuRef>();
    alive::<PercpuRef>();
}

/// A store kills the object that was in the cell. A holder of a reference keeps the object, and
/// sees that it was killed.
#[test]
fn a_store_kills() {
    static CONFIG: RcuCell<u32, PercpuRef> = RcuCell::empty();
    let get = || rcu::read(|guard| Borrowed::try_get_live(CONFIG.load(guard).unwrap()).unwrap());
    CONFIG.store(Some(Owner::try_new(1).unwrap()));
    let one = get();
    assert!(!Ref::is_dying(&one));
    CONFIG.store(Some(Owner::try_new(2).unwrap()));
    assert_eq!((*one, Ref::is_dying(&one), Ref::approximate_count(&one)), (1, true, 1));
    assert_eq!((*get(), Ref::is_dying(&get())), (2, false));
}

#[test]
fn a_cell_swaps() {
    let of = |n: u32| Owner::<_, RcuRef>::new(n);
    let cell = RcuCell::default();
    assert!(cell.swap(Some(of(1))).is_none());
    assert_eq!(cell.swap(Some(of(2))).as_deref(), Some(&1));
    assert_eq!(cell.take().as_deref(), Some(&2));
    assert!(cell.take().is_none());
    cell.store(Some(of(3)));
    assert_eq!(rcu::read(|guard| cell.load(guard).map(|n| *n)), Some(3));
}

/// The last put may be in the destructor of a thread local, after the thread has lost its own state
/// for sections.
#[test]
fn a_last_put_while_the_thread_ends() {
    thread_local! {
        static EARLY: RefCell<Option<Ref<Value, RcuRef>>> = const { RefCell::new(None) };
        static LATE: RefCell<Option<Ref<Value, RcuRef>>> = const { RefCell::new(None) };
    }
    let ((a, a_drops), (b, b_drops)) = (Value::new(), Value::new());
    thread::spawn(move || {
        EARLY.with_borrow_mut(|place| *place = Some(Owner::get(&Owner::new(a))));
        rcu::read(|_| ());
        LATE.with_borrow_mut(|place| *place = Some(Owner::get(&Owner::new(b))));
    })
    .join()
    .unwrap();
    eventually(|| a_drops.load(Ordering::SeqCst) + b_drops.load(Ordering::SeqCst) == 2);
}

/// If more sections are open than a batch has entries, releases still happen.
#[test]
fn prompt_among_many_sections() {
    let (value, drops) = Value::new();
    let (stop, entered) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| {
                rcu::read(|_| {
                    entered.fetch_add(1, Ordering::SeqCst);
                    while !stop.load(Ordering::SeqCst) {
                        thread::sleep(Duration::from_millis(1));
                    }
                });
            });
        }
        eventually(|| entered.load(Ordering::SeqCst) == 40);
        drop(Owner::<_, RcuRef>::new(value));
        stop.store(true, Ordering::SeqCst);
    });
    eventually(|| drops.load(Ordering::SeqCst) == 1);
    rcu::flush();
}

#[test]
fn cleanup_on_a_worker() {
    let worker = Arc::new(Worker::new("cleanup").unwrap());
    let to = worker.clone();
    let (tx, rx) = mpsc::channel();
    let release =
        move |name: String| to.defer(move || tx.send((name, thread::current().name().map(str::to_owned))).unwrap());
    drop(Owner::<_, RcuRef>::with_release("binding".to_owned(), release));
    assert_eq!(rx.recv().unwrap(), ("binding".to_owned(), Some("cleanup".to_owned())));
}

/// What unwinds past a pointer leaves it whole, so a closure that has one can be passed to
/// `catch_unwind`.
#[test]
fn pointers_are_unwind_safe() {
    fn safe<T: UnwindSafe + RefUnwindSafe>() {}
    fn over<C: Count>() {
        safe::<(Owner<String, C>, Ref<String, C>, Borrowed<'static, String, C>, RcuCell<String, C>)>();
        safe::<(Owner<dyn Shape, C>, Ref<dyn Shape, C>)>();
    }
    trait Shape: RefUnwindSafe {}
    over::<RefCount>();
    over::<RcuRef>();
    over::<PercpuRef>();
    safe::<(RefCount, RcuRef, PercpuRef, OwnLine<RefCount>, Worker)>();
    let owner: Owner<_, RcuRef> = Owner::new(1);
    let cell = RcuCell::new(Some(owner));
    assert!(rcu::read(|guard| catch_unwind(|| cell.load(guard).is_some()).unwrap()));
}

/// An object of an unsized type is the same object: it has the same count and address, and is
/// released as what it was made. Proves REF-5.
#[test]
fn unsized_pointers() {
    trait Area: Send + Sync {
        fn area(&self) -> u64;
        fn drops(&self) -> &Arc<AtomicU32>;
    }
    #[repr(align(256))]
    struct Square(u64, Value);
    impl Area for Square {
        fn area(&self) -> u64 {
            assert!((&raw const *self).is_aligned());
            self.0 * self.0
        }
        fn drops(&self) -> &Arc<AtomicU32> {
            &self.1.0
        }
    }
    fn life<C: Count>() {
        let (value, drops) = Value::new();
        let (tx, rx) = mpsc::channel();
        let release = move |square: Square| tx.send(square.0).unwrap();
        let owner: Owner<_, C> = Owner::try_with_release(Square(3, value), release).unwrap();
        let sized = Owner::get(&owner);
        let one: Ref<dyn Area, C> = unsize!(sized.clone() => dyn Area);
        let owner: Owner<dyn Area, C> = unsize!(owner => dyn Area);
        let two = Owner::get(&owner);
        assert!(Ref::ptr_eq(&one, &two.clone()) && Arc::ptr_eq(two.drops(), &drops) && size_of_val(&one) == 16);
        assert_eq!((one.area(), two.area(), Owner::approximate_count(&owner)), (9, 9, 4));
        assert!(ptr::addr_eq(&raw const *one, &raw const *sized));
        drop((owner, one, sized));
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        thread::spawn(move || drop(two)).join().unwrap();
        eventually(|| drops.load(Ordering::SeqCst) == 1);
        assert_eq!(rx.iter().collect::<Vec<_>>(), [3]);

        let values: [(Value, Arc<AtomicU32>); 3] = std::array::from_fn(|_| Value::new());
        let drops = values.each_ref().map(|(_, drops)| drops.clone());
        let owner: Owner<[Value], C> = unsize!(Owner::try_new(values.map(|(value, _)| value)).unwrap() => [Value]);
        assert_eq!(owner.len(), 3);
        drop(owner);
        eventually(|| drops.iter().all(|drops| drops.load(Ordering::SeqCst) == 1));
    }
    life::<RefCount>();
    life::<RcuRef>();
    life::<PercpuRef>();
}

/// The last reference, be it the owner's or another, has the value out. The callback does not get
/// it.
#[test]
fn the_last_reference_takes_the_value_out() {
    fn taken<C: Count>() {
        let owner = || {
            let (value, drops) = Value::new();
            let owner: Owner<_, C> = Owner::try_with_release(value, |_| panic!("it was taken out")).unwrap();
            (owner, drops)
        };
        // The owner's, also in a critical section.
        let (alone, drops) = owner();
        let value = Owner::into_inner(alone).unwrap();
        let (alone, drops_in_section) = owner();
        let value_in_section = rcu::read(|_| Owner::into_inner(alone).unwrap());
        rcu::flush();
        assert_eq!([&drops, &drops_in_section].map(|drops| drops.load(Ordering::SeqCst)), [0, 0]);
        drop((value, value_in_section));
        assert_eq!([&drops, &drops_in_section].map(|drops| drops.load(Ordering::SeqCst)), [1, 1]);

        // Of an owner and references that race, one.
        for _ in 0..200 {
            let (owner, drops) = owner();
            let refs = [Owner::get(&owner), Owner::get(&owner)];
            let taken = thread::scope(|scope| {
                let threads = refs.map(|r| scope.spawn(|| Ref::into_inner(r)));
                let of_owner = Owner::into_inner(owner);
                threads.map(|t| t.join().unwrap()).into_iter().chain([of_owner]).flatten().count()
            });
            assert_eq!((taken, drops.load(Ordering::SeqCst)), (1, 1));
        }

        // Readers may have found it.
        let (value, drops) = Value::new();
        let cell: RcuCell<_, C> = RcuCell::new(Some(Owner::try_new(value).unwrap()));
        rcu::read(|guard| {
            let found = cell.load(guard).unwrap();
            assert!(Owner::into_inner(cell.take().unwrap()).is_none());
            assert_eq!(found.0.load(Ordering::SeqCst), 0);
        });
        eventually(|| drops.load(Ordering::SeqCst) == 1);
    }
    taken::<RefCount>();
    taken::<RcuRef>();
    taken::<PercpuRef>();
}

/// A value is written only if there is one reference, and no reader can have found the object.
#[test]
fn the_only_reference_may_write() {
    fn written<C: InfallibleCount + ExactCount>() {
        let mut owner: Owner<_, C> = Owner::new(1);
        *Owner::get_mut(&mut owner).unwrap() = 2;
        let mut r = Owner::get(&owner);
        assert!(Owner::get_mut(&mut owner).is_none() && Ref::get_mut(&mut r).is_none());
        drop(owner);
        *Ref::get_mut(&mut r).unwrap() += 1;
        let again = r.clone();
        assert!(Ref::get_mut(&mut r).is_none() && *again == 3);

        // What another thread wrote, and then put, is seen.
        let mut owner: Owner<[u32], C> = unsize!(Owner::new([0; 2]) => [u32]);
        let mut r = Owner::get(&owner);
        thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    if let Some(values) = Owner::get_mut(&mut owner) {
                        break values[1] = values[0] + 1;
                    }
                    thread::yield_now();
                }
            });
            assert!(Ref::get_mut(&mut r).is_none());
            drop(r);
        });
        assert_eq!(*owner, [0, 1]);

        let cell = RcuCell::new(Some(Owner::<_, C>::new(1)));
        rcu::read(|guard| {
            let found = cell.load(guard).unwrap();
            let mut owner = cell.take().unwrap();
            assert!(Owner::get_mut(&mut owner).is_none() && *found == 1);
        });
    }
    written::<RefCount>();
    written::<RcuRef>();
}

/// An exchange puts an owner in only if the expected object is in the cell, and else hands both
/// back. An update of each of several threads is kept.
#[test]
fn a_cell_compares_and_exchanges() {
    fn exchanged<C: Count>() {
        let of = |n: u32| Some(Owner::<_, C>::try_new(n).unwrap());
        let cell = RcuCell::new(of(1));
        rcu::read(|guard| {
            let one = cell.load(guard);
            assert_eq!(cell.compare_exchange(one, of(2), guard).unwrap().as_deref(), Some(&1));
            // It is another object, with an equal value.
            let swapped = cell.swap(of(1));
            let changed = cell.compare_exchange(one, of(3), guard).unwrap_err();
            assert_eq!((changed.current.as_deref(), changed.new.as_deref()), (Some(&1), Some(&3)));
            let changed = cell.compare_exchange(None, changed.new, guard).unwrap_err();
            assert_eq!((changed.current.as_deref(), changed.new.as_deref()), (Some(&1), Some(&3)));
            // It was never in a cell, so the value can be taken out.
            assert_eq!(changed.new.and_then(Owner::into_inner), Some(3));
            // One that was in a cell stays noted.
            let changed = cell.compare_exchange(None, swapped, guard).unwrap_err();
            assert_eq!(changed.new.and_then(Owner::into_inner), None);
            assert!(cell.compare_exchange(cell.load(guard), None, guard).unwrap().is_some());
            assert!(cell.compare_exchange(None, of(4), guard).unwrap().is_none());
        });
        assert_eq!(cell.get().as_deref(), Some(&4));

        let refused = cell.update(|current| {
            assert_eq!(current, Some(&4));
            None
        });
        assert!(!refused && cell.get().as_deref() == Some(&4));
        cell.store(None);
        assert!(cell.update(|current| current.is_none().then(|| of(0)).flatten()));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        assert!(cell.update(|current| of(current? + 1)));
                    }
                });
            }
        });
        assert_eq!(cell.get().as_deref(), Some(&2000));
    }
    exchanged::<RefCount>();
    exchanged::<RcuRef>();
    exchanged::<PercpuRef>();
}
