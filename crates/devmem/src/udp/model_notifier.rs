//! Loom's model of a socket's notifier: a delivery concurrent with `arm`, in every order.
//!
//! Each of these changes was observed to make a model fail: the fence on either side is removed
//! (`notifier.rs`, `ordered`); the receiver sets the flag after it reads the queue; the deliverer
//! reads the flag before the push.

use super::notifier::{Event, Notifier};
use crate::sync::{AtomicU32, Ordering};
use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;
use loom::thread;
use netmem_packet::Armed;

struct Flag(AtomicBool);

impl Event for Flag {
    fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn clear(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A socket's queue: how many datagrams were pushed. As in `ArrayQueue`, a push changes what
/// `is_empty` reads by an exchange.
struct Socket {
    pushed: AtomicU32,
    notifier: Notifier<Flag>,
}

impl Socket {
    fn new() -> Arc<Self> {
        Arc::new(Self { pushed: AtomicU32::new(0), notifier: Notifier::new(Flag(AtomicBool::new(false))) })
    }

    fn deliver(&self) {
        self.pushed.fetch_add(1, Ordering::AcqRel);
        self.notifier.delivered();
    }

    /// Arms the notifier after `seen` datagrams were received. Returns true if the receiver sleeps.
    fn arm(&self, seen: u32) -> bool {
        self.notifier.arm(|| self.pushed.load(Ordering::Acquire) != seen) == Armed::Waits
    }

    fn is_set(&self) -> bool {
        self.notifier.event().0.load(Ordering::Acquire)
    }
}

/// If `arm` returns that the receiver will be woken, one of two deliverers wakes it.
#[test]
fn no_delivery_is_missed() {
    loom::model(|| {
        let socket = Socket::new();
        let deliverers = [socket.clone(), socket.clone()].map(|socket| thread::spawn(move || socket.deliver()));
        let sleeps = socket.arm(0);
        deliverers.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(!sleeps || socket.is_set(), "the receiver sleeps for ever although a datagram is queued");
    });
}

/// The same for a receiver that arms twice: a notification for the first sleep does not count for
/// the second, and none for the second is lost.
#[test]
fn a_second_sleep() {
    loom::model(|| {
        let socket = Socket::new();
        let other = socket.clone();
        let deliverer = thread::spawn(move || {
            other.deliver();
            other.deliver();
        });
        let mut sleeps = socket.arm(0);
        if !sleeps {
            let seen = socket.pushed.load(Ordering::Acquire);
            sleeps = socket.arm(seen) && seen < 2;
        }
        deliverer.join().unwrap();
        assert!(!sleeps || socket.is_set(), "the receiver sleeps for ever although a datagram is queued");
    });
}
