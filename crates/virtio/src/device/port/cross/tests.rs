//! Tests of the cable: each race of the module's documentation in one thread, and two threads.

use std::sync::MutexGuard;
use std::sync::atomic::AtomicU8;
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::*;
use crate::device::Options;
use crate::device::shared::Shared;

/// A frame whose first byte is `n`.
fn frame(n: u8) -> Vec<u8> {
    let mut wire = vec![0; 100];
    wire[VnetHdr::LEN] = n;
    wire
}

/// Adds frame `n` to the cable, and calls `meanwhile` while it is copied.
fn send(from: &mut Cross, n: u8, kept: bool, meanwhile: impl FnOnce()) {
    let sent = from.send_with(100, |place| {
        place.copy_from_slice(&frame(n));
        meanwhile();
        kept
    });
    assert_eq!(sent, kept);
}

/// The frames that an end delivers.
fn delivered(to: &mut Cross) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(wire) = to.peek() {
        all.push(wire[VnetHdr::LEN]);
        to.consume();
    }
    all
}

/// While a frame is copied, which may touch guest memory, the mutex is free, and the other end
/// delivers nothing of the store, goes to sleep, or drops what waited before. The order stays.
#[test]
fn a_frame_is_copied_without_the_mutex() {
    let [mut a, mut b] = Cross::cable();
    b.served(true);
    send(&mut a, 1, true, || {});
    let cable = Arc::clone(&a.cable);
    send(&mut a, 2, true, || {
        assert!(cable.ends.try_lock().is_ok(), "the mutex is held");
        assert!(b.peek().is_none() && !b.arm());
    });
    assert!(!cable.lock()[1].sleeps, "the sleeper was woken");
    send(&mut a, 3, false, || assert!(!b.arm() || b.peek().is_some()));
    assert!(a.waits());
    assert_eq!(delivered(&mut b), [1, 2]);
    assert!(!a.waits());

    send(&mut a, 4, true, || {});
    send(&mut a, 5, true, || {});
    send(&mut a, 6, true, || assert_eq!((b.drop_waiting(), b.drop_waiting()), (2, 0)));
    assert!(a.waits());
    assert_eq!(delivered(&mut b), [6]);
    send(&mut a, 7, true, || {});
    send(&mut a, 8, false, || assert_eq!(b.drop_waiting(), 1));
    assert!(!a.waits() && b.peek().is_none());
}

/// A pass that finds no news leaves the mutex alone. So each thing that it has to do with the
/// mutex must be published: a frame, a sleep that is over, room for the other end.
#[test]
fn what_a_pass_has_to_do_is_published() {
    let [mut a, mut b] = Cross::cable();
    let cable = Arc::clone(&a.cable);
    let news = |end: usize| cable.news[end].load(Ordering::Relaxed);
    b.served(true);
    assert!(b.peek().is_none() && !news(0) && !news(1));

    assert!(!b.arm() && news(1));
    assert!(b.peek().is_none() && !news(1) && !cable.lock()[1].sleeps, "it works again");

    send(&mut a, 1, true, || {});
    assert!(a.waits() && news(1) && !news(0));
    assert_eq!(delivered(&mut b), [1]);
    assert!(!a.waits() && !news(1));

    while a.room() {
        send(&mut a, 2, true, || {});
    }
    assert!(!a.arm_room() && cable.lock()[0].blocked);
    assert!(b.peek().is_some(), "the frames of the cable are those of this end now");
    assert!(a.room() && !cable.lock()[0].blocked, "there is room");
    b.frames.clear();
    assert!(b.peek().is_none() && !news(1));

    // Blocked by frames that are removed before the end's next pass.
    while a.room() {
        send(&mut a, 3, true, || {});
    }
    assert!(!a.arm_room());
    assert!(b.drop_waiting() > 0);
    assert!(a.room() && !cable.lock()[0].blocked && !a.waits());
    b.served(false);
    assert!(!a.send(&frame(4)), "nothing is sent to an end that is not served");
    b.served(true);
    assert!(a.send(&frame(5)));
    assert_eq!(delivered(&mut b), [5]);
}

/// Pair 0 of a device without rings, with a waker of its own.
fn device() -> Arc<Shared> {
    Arc::new(Shared::new(Options::default(), 0).unwrap())
}

/// The ends of a cable, both served and with a pair, and their devices.
fn attached() -> ([Cross; 2], [Arc<Shared>; 2]) {
    let (mut ends, devices) = (Cross::cable(), [(); 2].map(|()| device()));
    for (end, device) in ends.iter_mut().zip(&devices) {
        end.attach(Some(PairHandle::new(device, 0)));
        end.served(true);
    }
    (ends, devices)
}

/// Whether the worker of a device was woken, and has not cleared that.
fn is_woken(device: &Shared) -> bool {
    let wakers = device.wakers();
    let mut fds = [PollFd::from_borrowed_fd(wakers[0].awaited(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

#[test]
fn arm_against_return_of_the_store() {
    let ([mut a, mut b], [_, to_b]) = attached();
    send(&mut a, 1, true, || assert!(!b.arm(), "the store is absent"));
    assert!(is_woken(&to_b));
    assert_eq!(delivered(&mut b), [1]);
    to_b.wakers()[0].clear();
    send(&mut a, 2, true, || {});
    assert!(!is_woken(&to_b) && b.arm(), "it has the frame, and does not sleep");
    assert_eq!(delivered(&mut b), [2]);
}

#[test]
fn refill_while_the_store_is_absent() {
    let ([mut a, mut b], _) = attached();
    let cable = Arc::clone(&a.cable);
    for kept in [true, false] {
        send(&mut a, 1, true, || {});
        send(&mut a, 2, kept, || {
            assert!(b.peek().is_none());
            assert!([&cable.waits, &cable.news].iter().all(|flags| !flags[1].load(Ordering::Relaxed)));
        });
        assert!(a.waits(), "the next frame must not overtake these");
        assert_eq!(delivered(&mut b), if kept { &[1, 2][..] } else { &[1] });
        assert!(!a.waits());
    }
}

#[test]
fn blocked_against_drop_of_what_waits() {
    let ([mut a, mut b], [to_a, _]) = attached();
    let fill = |a: &mut Cross| {
        while a.room() {
            send(a, 1, true, || {});
        }
    };
    fill(&mut a);
    assert!(b.drop_waiting() > 0);
    assert!(a.arm_room() && !is_woken(&to_a), "it does not sleep");
    fill(&mut a);
    assert!(!a.arm_room());
    assert!(b.drop_waiting() > 0 && is_woken(&to_a));
    assert!(!b.cable.news[1].load(Ordering::Relaxed), "no later pass would wake it");
}

#[test]
fn change_before_the_lock_of_note() {
    let ([mut a, mut b], _) = attached();
    let (before, new) = (b.cable.changes.load(Ordering::Relaxed), PairHandle::new(&device(), 0));
    a.attach(Some(new.clone()));
    b.note((true, before));
    assert_eq!((b.peer(), b.noted), (Some(&new), Some((true, before))), "it notes the pair twice");
    b.served(true);
    assert_eq!((b.peer(), b.noted), (Some(&new), Some((true, before + 1))));
    a.attach(None);
    b.served(true);
    assert_eq!(b.peer(), None);
}

const AWAKE: u8 = 0;
const ASLEEP: u8 = 1;
const DONE: u8 = 2;

/// A pair, its worker's state, and the frames of both directions.
struct Side {
    device: Arc<Shared>,
    state: AtomicU8,
    /// How many frames it sends.
    frames: u32,
    /// The frames that have arrived. Locked during a pass of its worker, and by a direct copy.
    pair: Mutex<Vec<u32>>,
}

impl Side {
    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.pair.lock().unwrap()
    }

    /// Whether one of the two sleeps and neither will wake it: both are asleep or done, and a wake
    /// is not under way. The order matters. The peer's state is read after its waker, so a peer
    /// that has cleared a wake meanwhile has armed again. The own waker is read after that, so a
    /// wake by the peer before its sleep is seen.
    fn is_lost(&self, peer: &Self) -> bool {
        let peer_unwoken = !is_woken(&peer.device);
        let peer_state = peer.state.load(Ordering::SeqCst);
        let sleeps = self.state.load(Ordering::SeqCst) == ASLEEP;
        let unwoken = !sleeps || !is_woken(&self.device);
        match peer_state {
            ASLEEP => peer_unwoken && unwoken,
            DONE => sleeps && unwoken,
            _ => false,
        }
    }

    /// Sleeps until the worker is woken. Returns false if a wake was lost; then both ends do not
    /// sleep any more.
    fn sleep(&self, peer: &Self, lost: &AtomicBool) -> bool {
        self.enter(ASLEEP, peer, lost);
        let wakers = self.device.wakers();
        let mut fds = [PollFd::from_borrowed_fd(wakers[0].awaited(), PollFlags::IN)];
        while poll(&mut fds, None) == Err(Errno::INTR) {}
        self.state.store(AWAKE, Ordering::SeqCst);
        wakers[0].clear();
        !lost.load(Ordering::SeqCst)
    }

    fn enter(&self, state: u8, peer: &Self, lost: &AtomicBool) {
        self.state.store(state, Ordering::SeqCst);
        if self.is_lost(peer) {
            lost.store(true, Ordering::SeqCst);
            [self, peer].iter().for_each(|side| side.device.wake());
        }
    }

    /// The worker: passes that deliver and send, and sleeps. Returns how often it slept.
    fn work(&self, end: &mut Cross, peer: &Self, lost: &AtomicBool) -> u32 {
        let (mut next, mut sleeps) = (0, 0);
        loop {
            let mut arrived = self.lock();
            let before = (arrived.len(), next);
            end.served(true);
            while let Some(wire) = end.peek() {
                arrived.push(u32::from_le_bytes(*wire[VnetHdr::LEN..].first_chunk().unwrap()));
                end.consume();
            }
            for _ in 0..32 {
                if next == self.frames || !end.room() {
                    break;
                }
                self.send(next, end, peer);
                next += 1;
            }
            if next == self.frames && arrived.last() == Some(&(peer.frames - 1)) {
                break;
            }
            let idle = before == (arrived.len(), next);
            if idle && (next == self.frames || !end.arm_room()) && !end.arm() {
                drop(arrived);
                sleeps += 1;
                if !self.sleep(peer, lost) {
                    break;
                }
            }
        }
        self.enter(DONE, peer, lost);
        sleeps
    }

    /// Sends frame `n`, directly if none waits. Each eighth, and the last, goes through the cable.
    fn send(&self, n: u32, end: &mut Cross, peer: &Self) {
        if n % 8 != 7
            && n != self.frames - 1
            && let Ok(mut arrived) = peer.pair.try_lock()
            && !end.waits()
        {
            return arrived.push(n);
        }
        end.send_with(MAX_WIRE, |place| {
            place[VnetHdr::LEN..][..4].copy_from_slice(&n.to_le_bytes());
            true
        });
    }
}

/// Two workers send to each other through the cable and directly, and sleep when they have nothing
/// to do or no room. All frames arrive, in order, and no wake is lost.
#[test]
fn two_threads_lose_no_frame_and_no_wake() {
    let ([mut a, mut b], devices) = attached();
    let mut frames = [20_000, 5_000].into_iter();
    let sides = devices.map(|device| {
        let frames = frames.next().unwrap();
        Side { device, state: AtomicU8::new(AWAKE), frames, pair: Mutex::default() }
    });
    let ([one, other], lost) = (&sides, AtomicBool::new(false));
    let slept = thread::scope(|scope| {
        let first = scope.spawn(|| one.work(&mut a, other, &lost));
        // The first has no room then.
        while one.state.load(Ordering::SeqCst) == AWAKE {
            thread::yield_now();
        }
        other.work(&mut b, one, &lost);
        first.join().unwrap()
    });
    assert!(!lost.into_inner(), "a wake was lost");
    assert!(slept > 0);
    for (to, from) in [(one, other), (other, one)] {
        assert!(to.lock().iter().copied().eq(0..from.frames), "frames are missing, or in another order");
    }
}
