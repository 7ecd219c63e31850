//! Loom's models of the races between sequences and whoever closes a gate. A sequence here is the portable one: its steps can be
//! interleaved with anybody's, but for a barrier, which waits for it. `docs/percpu.md` says what each model proves, and how
//! to see it fail.

use crate::{Closed, Counter, Magazine, Pushed, Store, run_on};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread::{self, JoinHandle};
use std::num::NonZeroUsize;

fn on<T: 'static>(cpu: usize, body: impl FnOnce() -> T + 'static) -> JoinHandle<T> {
    thread::spawn(move || {
        run_on(cpu);
        body()
    })
}

/// What one thread writes and another reads, with nothing but what is modelled between them.
struct Contents(UnsafeCell<u32>);

// SAFETY: loom checks every access.
unsafe impl Sync for Contents {}
// SAFETY: as above.
unsafe impl Send for Contents {}

impl Contents {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn write(&self) {
        // SAFETY: loom checks it.
        self.0.with_mut(|at| unsafe { *at += 1 });
    }

    fn read(&self) -> u32 {
        // SAFETY: loom checks it.
        self.0.with(|at| unsafe { *at })
    }
}

fn counter() -> Arc<Counter> {
    Arc::new(Counter::new().unwrap())
}

/// Add against close: what an add was told is what the sum says, and what its thread did before is seen.
#[test]
fn add_against_close() {
    loom::model(|| {
        let (counter, contents) = (counter(), Contents::new());
        let adder = {
            let (counter, contents) = (counter.clone(), contents.clone());
            on(1, move || {
                contents.write();
                counter.add(1).is_ok()
            })
        };
        let sum = counter.close().unwrap().unwrap();
        if sum == 1 {
            assert_eq!(contents.read(), 1);
        }
        assert_eq!(sum == 1, adder.join().unwrap());
        assert_eq!(counter.add(1), Err(Closed));
    });
}

/// Add against add on one CPU, as when one thread is preempted in the middle: neither is lost.
#[test]
fn add_against_add_on_one_cpu() {
    loom::model(|| {
        let counter = counter();
        let adders = [1, 1].map(|cpu| {
            let counter = counter.clone();
            on(cpu, move || isize::from(counter.add(1).is_ok()))
        });
        let added: isize = adders.into_iter().map(|a| a.join().unwrap()).sum();
        assert_eq!(counter.close().unwrap(), Some(added));
    });
}

/// A sequence that loaded the old gate, against close and reopen: it is in one of the two sums.
#[test]
fn old_gate_against_reopen() {
    loom::model(|| {
        let counter = counter();
        let adders = [0, 1].map(|cpu| {
            let counter = counter.clone();
            on(cpu, move || isize::from(counter.add(1).is_ok()))
        });
        let first = counter.close().unwrap().unwrap();
        assert!(counter.reopen());
        let added: isize = adders.into_iter().map(|a| a.join().unwrap()).sum();
        let second = counter.close().unwrap().unwrap();
        assert_eq!(first + second, added);
    });
}

/// What was done before reopening is seen by whoever adds after it.
#[test]
fn reopening_is_a_release() {
    loom::model(|| {
        let (counter, contents) = (counter(), Contents::new());
        assert_eq!(counter.close().unwrap(), Some(0));
        let adder = {
            let (counter, contents) = (counter.clone(), contents.clone());
            on(1, move || {
                if counter.add(1).is_ok() {
                    assert_eq!(contents.read(), 1);
                }
            })
        };
        contents.write();
        assert!(counter.reopen());
        adder.join().unwrap();
    });
}

/// Close against close: one of them has the sum, the other nothing.
#[test]
fn close_against_close() {
    loom::model(|| {
        let counter = counter();
        counter.add(1).unwrap();
        let other = {
            let counter = counter.clone();
            on(1, move || counter.close().unwrap())
        };
        let sums = [counter.close().unwrap(), other.join().unwrap()];
        assert!(sums == [Some(1), None] || sums == [None, Some(1)], "{sums:?}");
    });
}

fn item(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap()
}

/// Puts one item on this CPU's magazine, or keeps it.
fn put(store: &Store, n: usize) -> bool {
    for _ in 0..2 {
        match store.push(item(n)) {
            Ok(Pushed::Done) => return true,
            Err(Closed) => return false,
            Ok(Pushed::Missing | Pushed::Full) => drop(store.exchange_full(Magazine::new(1))),
        }
    }
    false
}

/// Push against reclaim: an item is found once, with what was written before it was pushed.
#[test]
fn push_against_collect() {
    loom::model(|| {
        let store = Arc::new(Store::new().unwrap());
        let contents = Contents::new();
        let pusher = {
            let (store, contents) = (store.clone(), contents.clone());
            on(1, move || {
                contents.write();
                put(&store, 7)
            })
        };
        let mut found = Vec::new();
        let mut take = |mut m: Box<Magazine>| found.extend(std::iter::from_fn(|| m.pop()));
        assert!(store.collect(&mut take).unwrap());
        let pushed = pusher.join().unwrap();
        store.collect(take).unwrap();
        assert_eq!(found, if pushed { vec![item(7)] } else { vec![] });
        assert_eq!(contents.read(), 1);
    });
}

/// Pop against reclaim: either has the item.
#[test]
fn pop_against_collect() {
    loom::model(|| {
        let store = Arc::new(Store::new().unwrap());
        assert!(put(&store, 7));
        let popper = {
            let store = store.clone();
            on(0, move || store.pop())
        };
        let mut found = Vec::new();
        let mut take = |mut m: Box<Magazine>| found.extend(std::iter::from_fn(|| m.pop()));
        assert!(store.collect(&mut take).unwrap());
        found.extend(popper.join().unwrap());
        assert_eq!(found, [item(7)]);
    });
}

/// Exchange of a full magazine against reclaim, on one CPU: each magazine has one owner, each item is found once.
#[test]
fn exchange_against_collect() {
    loom::model(|| {
        let store = Arc::new(Store::new().unwrap());
        assert!(put(&store, 7));
        let pusher = {
            let store = store.clone();
            on(0, move || {
                let mut out = Vec::new();
                if let Ok(Some(mut old)) = store.exchange_full(Magazine::new(1)) {
                    out.extend(std::iter::from_fn(|| old.pop()));
                }
                out
            })
        };
        let mut found = Vec::new();
        let mut take = |mut m: Box<Magazine>| found.extend(std::iter::from_fn(|| m.pop()));
        assert!(store.collect(&mut take).unwrap());
        found.extend(pusher.join().unwrap());
        store.collect(|mut m| found.extend(std::iter::from_fn(|| m.pop()))).unwrap();
        assert_eq!(found, [item(7)]);
    });
}
