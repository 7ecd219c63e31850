//! Loom's models of the races that `percpu_ref.rs` names. A sequence is the portable one of
//! `netmem-percpu`, whose own models show what a gate promises. All interleavings are tried, but
//! where a bound on preemptions is said. `MODELS.md` lists how to see each of these
//! fail.

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;
use loom::thread::{self, JoinHandle};
use netmem_percpu::{check, run_on};

/// An object that its holders read, and that the last holder destroys.
struct Object {
    count: PercpuRef,
    alive: UnsafeCell<bool>,
}

// SAFETY: loom checks every access to the cell.
unsafe impl Sync for Object {}
// SAFETY: as above.
unsafe impl Send for Object {}

impl Object {
    fn new() -> Arc<Self> {
        Arc::new(Self { count: PercpuRef::new().unwrap(), alive: UnsafeCell::new(true) })
    }

    fn touch(&self) {
        // SAFETY: loom checks that nothing writes.
        self.alive.with(|alive| assert!(unsafe { *alive }, "used after its release"));
    }

    fn release_if(&self, last: bool) {
        if last {
            // SAFETY: loom checks that nothing else reads or writes.
            self.alive.with_mut(|alive| assert!(unsafe { alive.replace(false) }, "released twice"));
        }
    }

    fn put(&self) {
        self.touch();
        self.release_if(self.count.put());
    }

    fn kill(&self) -> bool {
        let killed = self.count.kill();
        self.release_if(matches!(killed, Ok(true)));
        killed.is_ok()
    }

    /// When all are done.
    fn released(&self) -> bool {
        // SAFETY: loom checks it.
        self.alive.with(|alive| unsafe { !*alive })
    }
}

fn on<T: 'static>(cpu: usize, object: &Arc<Object>, body: impl FnOnce(&Object) -> T + 'static) -> JoinHandle<T> {
    let object = object.clone();
    thread::spawn(move || {
        run_on(cpu);
        body(&object)
    })
}

/// Kill against get: by a thread that finds the object and holds no reference yet.
#[test]
fn kill_against_get() {
    check(None, || {
        let object = Object::new();
        let other = on(1, &object, |o| {
            if o.count.try_get() {
                o.put();
            }
        });
        assert!(object.kill());
        other.join().unwrap();
        assert!(object.released() && object.count.is_zero());
    });
}

/// Kill against put: of a reference that was taken on another CPU.
#[test]
fn kill_against_put() {
    check(None, || {
        let object = Object::new();
        object.count.get();
        let other = on(1, &object, Object::put);
        assert!(object.kill());
        other.join().unwrap();
        assert!(object.released() && object.count.is_zero());
    });
}

/// Kill against get and put, with a confirm callback: after it no `try_get_live` succeeds. Three
/// threads are too many for all interleavings: each is tried in which no thread is preempted more
/// than twice.
#[test]
fn kill_and_confirm_against_get_and_put() {
    check(Some(2), || {
        let object = Object::new();
        let confirmed = Arc::new(AtomicBool::new(false));
        object.count.get();
        let putter = on(0, &object, Object::put);
        let getter = {
            let confirmed = confirmed.clone();
            on(1, &object, move |o| {
                let late = confirmed.load(Ordering::Acquire);
                if o.count.try_get_live() {
                    assert!(!late, "got after the confirmation");
                    o.put();
                }
            })
        };
        let killed = object.count.kill_and_confirm(|| {
            object.touch();
            confirmed.store(true, Ordering::Release);
        });
        object.release_if(killed.unwrap());
        putter.join().unwrap();
        getter.join().unwrap();
        assert!(object.released());
    });
}

/// Resurrect against the last put: either there is nothing to resurrect, or the put was not the
/// last.
#[test]
fn resurrect_against_put() {
    check(None, || {
        let object = Object::new();
        object.count.get();
        assert!(object.kill());
        let putter = on(1, &object, Object::put);
        match object.count.resurrect() {
            Ok(()) => {
                object.touch();
                assert!(!object.count.is_dying());
                assert!(object.kill());
            }
            Err(e) => assert_eq!(e, ResurrectError::Released),
        }
        putter.join().unwrap();
        assert!(object.released());
    });
}

/// Resurrect against a sequence that loaded the old gate: a get and puts all through two lives.
#[test]
fn resurrect_against_old_gate() {
    check(None, || {
        let object = Object::new();
        object.count.get_many(2);
        let other = on(1, &object, |o| {
            o.touch();
            o.count.get();
            assert!(!o.count.put_many(2));
        });
        assert!(object.kill());
        assert_eq!(object.count.resurrect(), Ok(()));
        assert!(object.kill());
        other.join().unwrap();
        assert!(!object.released());
        object.put();
        assert!(object.released() && object.count.is_zero());
    });
}

/// Kill against kill: one succeeds, and the initial reference is put once.
#[test]
fn kill_against_kill() {
    check(None, || {
        let object = Object::new();
        object.count.get();
        let other = on(1, &object, Object::kill);
        let here = object.kill();
        assert!(here != other.join().unwrap());
        object.put();
        assert!(object.released());
    });
}

/// Kill against resurrect: whichever comes first, one life is left, or none.
#[test]
fn kill_against_resurrect() {
    check(None, || {
        let object = Object::new();
        object.count.get();
        let killer = on(1, &object, Object::kill);
        let resurrected = object.count.resurrect();
        assert!(matches!(resurrected, Ok(()) | Err(ResurrectError::NotDying)), "{resurrected:?} of what is held");
        let resurrected = resurrected.is_ok();
        assert!(killer.join().unwrap());
        assert_eq!(object.count.is_dying(), !resurrected);
        if resurrected {
            assert!(object.kill());
        }
        object.put();
        assert!(object.released());
    });
}

/// Resurrect against kill: the second kill is of the new life, or an error; either way the gate is
/// as the count has it.
#[test]
fn resurrect_against_kill() {
    check(None, || {
        let object = Object::new();
        object.count.get();
        assert!(object.kill());
        let killer = on(1, &object, Object::kill);
        assert_eq!(object.count.resurrect(), Ok(()));
        let killed = killer.join().unwrap();
        assert_eq!(object.count.is_dying(), killed);
        assert_eq!(object.count.try_get_live(), !killed);
        if !killed {
            object.put();
            assert!(object.kill());
        }
        object.put();
        assert!(object.released());
    });
}

/// Resurrect against a get and the last put: the reference that the get took is counted before the
/// put can find zero. Each interleaving is tried in which no thread is preempted more than twice.
#[test]
fn resurrect_against_get_and_put() {
    check(Some(2), || {
        let object = Object::new();
        object.count.get();
        assert!(object.kill());
        let putter = on(0, &object, Object::put);
        let getter = on(1, &object, |o| {
            if o.count.try_get() {
                o.put();
            }
        });
        let resurrected = object.count.resurrect().is_ok();
        getter.join().unwrap();
        putter.join().unwrap();
        if resurrected {
            assert!(object.kill());
        }
        assert!(object.released());
    });
}
