//! The mailbox of a stack: frames that another stack of the host has received, and notifications.
//!
//! Why frames move between stacks: a connection lives on one stack, and without the hash of the
//! device its segments can arrive at the queue of another.
//!
//! ```text
//!   a stack's input ─► Outbox: a group for each other stack ── at the end of the input ──┐
//!                                                                                        ▼
//!   the other stack's input ◄── a list of its own ◄── exchanged once a poll ── frames, locked
//! ```
//!
//! Frames come and go in groups, so that the lock, the notification and the counts of pages are
//! paid for a group, not for a frame. The lock is held while frames are moved, and never while one
//! is dropped or processed: both can be user code.

use crate::stack::payload::Payload;
use crate::stack::shared::notifier::Notifier;
use crate::tcp::Charges;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;

/// The most frames that wait in a mailbox. A further one is dropped, as by a full ring. With the
/// list that the stack is processing, twice as many are handed over at most.
const CAPACITY: usize = 512;

/// A frame that is handed over.
pub(crate) struct HandedOver<P: Payload> {
    pub(crate) frame: P::Frame,
    /// In the last frame of a group: the charges of the group's pages in the budget of the queue
    /// that received them.
    pub(crate) charges: Option<Charges>,
}

/// The part of a stack that other threads use.
pub(crate) struct Mailbox<P: Payload> {
    pub(crate) notifier: Arc<Notifier>,
    frames: Mutex<Frames<P>>,
    /// Whether frames wait. It changes while they are locked.
    filled: AtomicBool,
    /// Connections of the stack wait for a next hop.
    awaits_hop: AtomicBool,
}

struct Frames<P: Payload> {
    waiting: VecDeque<HandedOver<P>>,
    /// The stack is gone, and accepts no frames.
    closed: bool,
}

impl<P: Payload> Mailbox<P> {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            notifier: Arc::new(Notifier::new()?),
            frames: Mutex::new(Frames { waiting: VecDeque::new(), closed: false }),
            filled: AtomicBool::new(false),
            awaits_hop: AtomicBool::new(false),
        })
    }

    fn frames(&self) -> MutexGuard<'_, Frames<P>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the frames that other stacks have handed over into `arrived`, which is empty. Called
    /// by the stack's thread alone. Cost, if there are none: a load.
    #[inline]
    pub(crate) fn receive(&self, arrived: &mut VecDeque<HandedOver<P>>) {
        debug_assert!(arrived.is_empty(), "frames would go back");
        if !self.is_empty() {
            self.exchange(arrived);
        }
    }

    #[inline(never)]
    fn exchange(&self, arrived: &mut VecDeque<HandedOver<P>>) {
        let mut frames = self.frames();
        mem::swap(&mut frames.waiting, arrived);
        self.filled.store(false, Ordering::SeqCst);
    }

    /// Whether connections of the stack wait for a next hop.
    pub(crate) fn awaits_hop(&self) -> bool {
        self.awaits_hop.load(Ordering::SeqCst)
    }

    /// Sets whether connections of the stack wait for a next hop. Called by the stack's thread
    /// alone. Cost: a load, and an exchange if it has changed.
    pub(crate) fn set_awaits_hop(&self, awaits: bool) {
        if self.awaits_hop.load(Ordering::Relaxed) != awaits {
            self.awaits_hop.store(awaits, Ordering::SeqCst);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.filled.load(Ordering::SeqCst)
    }

    /// Puts frames into the mailbox, from the front of `group`, and notifies the stack. Each is
    /// there with the number of its pages, and `charges` are those of all. Frames for which there
    /// is no room stay in `group`. If the mailbox is closed, these are all.
    pub(crate) fn push(&self, group: &mut Vec<(P::Frame, u32)>, mut charges: Charges) {
        let mut frames = self.frames();
        let room = if frames.closed { 0 } else { CAPACITY - frames.waiting.len() };
        let accepted = group.len().min(room);
        let refused = (accepted < group.len()).then(|| {
            let pages = group[accepted..].iter().map(|(_, pages)| pages).sum();
            charges.split(pages)
        });
        frames.waiting.extend(group.drain(..accepted).map(|(frame, _)| HandedOver { frame, charges: None }));
        if accepted > 0 {
            if let Some(last) = frames.waiting.back_mut() {
                last.charges = Some(charges);
            }
            self.filled.store(true, Ordering::SeqCst);
        }
        // The charges are dropped when the lock is released, because that can call a waker.
        drop(frames);
        drop(refused);
        if accepted > 0 {
            self.notifier.notify_published();
        }
    }

    /// Closes the mailbox. Its frames are dropped, because their pages belong to pools that may be
    /// about to close.
    pub(crate) fn close(&self) {
        let mut frames = self.frames();
        frames.closed = true;
        self.filled.store(false, Ordering::SeqCst);
        let waiting = mem::take(&mut frames.waiting);
        drop(frames);
        drop(waiting);
    }
}

/// Waking notifies the stack.
impl<P: Payload> Wake for Mailbox<P> {
    fn wake(self: Arc<Self>) {
        self.notifier.notify();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.notifier.notify();
    }
}

/// A handle by which any thread wakes the thread that drives a stack. The next poll counts the
/// wake-up as work.
pub struct StackWaker<P: Payload>(Arc<Mailbox<P>>);

impl<P: Payload> StackWaker<P> {
    pub(crate) fn new(mailbox: Arc<Mailbox<P>>) -> Self {
        Self(mailbox)
    }

    /// Ends the sleep of the stack's thread, or the next one if it does not sleep. Cost: two atomic
    /// stores, and a system call if it sleeps.
    pub fn wake(&self) {
        self.0.notifier.notify();
    }
}

impl<P: Payload> Clone for StackWaker<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Payload> fmt::Debug for StackWaker<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StackWaker")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::Budget;
    use netmem_packet::Packet;
    use netmem_pool::{PagePool, PoolOptions, Private, RegionOptions, RegionProvider};

    fn pool() -> PagePool<Private> {
        let region = RegionOptions::new(1024).huge_pages(false).build::<Private>().unwrap();
        PoolOptions::new("mailbox").build(RegionProvider::new(region), None).unwrap()
    }

    /// `frames` frames, each with its number as its length, of which each counts as two pages.
    fn group(pool: &mut PagePool<Private>, frames: std::ops::Range<usize>) -> Vec<(Packet<Private>, u32)> {
        frames.map(|n| (Packet::new(pool.alloc().unwrap().freeze_range(0..n)), 2)).collect()
    }

    fn lengths<'a>(frames: impl IntoIterator<Item = &'a Packet<Private>>) -> Vec<usize> {
        frames.into_iter().map(Packet::len).collect()
    }

    /// Groups arrive in their order, as far as there is room. What a group has no room for stays
    /// with its sender, and is charged no more.
    #[test]
    fn a_group_that_fills_the_mailbox() {
        let (mut pool, budget, mailbox) = (pool(), Budget::new(4096), Mailbox::<Private>::new().unwrap());
        let mut arrived = VecDeque::new();
        for (first, accepted) in [(0, 300), (300, 212), (600, 0)] {
            let mut sent = group(&mut pool, first..first + 300);
            mailbox.push(&mut sent, budget.charge_many(600));
            let refused: Vec<_> = (first + accepted..first + 300).collect();
            assert_eq!(lengths(sent.iter().map(|(frame, _)| frame)), refused);
            assert_eq!(budget.used() as usize, 2 * CAPACITY.min(first + accepted), "{first}");
        }
        mailbox.receive(&mut arrived);
        assert_eq!(lengths(arrived.iter().map(|frame| &frame.frame)), (0..512).collect::<Vec<_>>());
        // The pages of a group are charged until its last frame is processed.
        assert_eq!((mailbox.is_empty(), budget.used()), (true, 1024));
        drop(arrived.drain(..299));
        assert_eq!(budget.used(), 1024);
        drop(arrived.pop_front());
        assert_eq!(budget.used(), 424);
        drop(arrived.drain(..));
        assert_eq!((budget.used(), pool.stats().inflight()), (0, 0));
        // There is room again.
        let mut sent = group(&mut pool, 7..8);
        mailbox.push(&mut sent, budget.charge_many(2));
        assert!(sent.is_empty() && !mailbox.is_empty());
    }

    /// A closed mailbox drops what it has, and accepts nothing.
    #[test]
    fn a_closed_mailbox() {
        let (mut pool, budget, mailbox) = (pool(), Budget::new(100), Mailbox::<Private>::new().unwrap());
        mailbox.push(&mut group(&mut pool, 0..3), budget.charge_many(6));
        mailbox.close();
        assert_eq!((mailbox.is_empty(), budget.used(), pool.stats().inflight()), (true, 0, 0));
        let mut sent = group(&mut pool, 0..3);
        mailbox.push(&mut sent, budget.charge_many(6));
        assert_eq!((sent.len(), mailbox.is_empty(), budget.used()), (3, true, 0));
        let mut arrived = VecDeque::new();
        mailbox.receive(&mut arrived);
        assert!(arrived.is_empty());
    }

    /// A stack that sleeps is woken by a group that is accepted, and by no other.
    #[test]
    fn a_group_wakes_the_stack() {
        let (mut pool, budget, mailbox) = (pool(), Budget::new(100), Mailbox::<Private>::new().unwrap());
        let readable = || {
            let mut fds = [rustix::event::PollFd::new(&*mailbox.notifier, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() > 0
        };
        assert!(mailbox.notifier.arm(|| !mailbox.is_empty()).waits());
        mailbox.push(&mut group(&mut pool, 0..3), budget.charge_many(6));
        assert!(readable());
        assert!(!mailbox.notifier.arm(|| !mailbox.is_empty()).waits());
        mailbox.close();
        assert!(mailbox.notifier.arm(|| !mailbox.is_empty()).waits());
        mailbox.push(&mut group(&mut pool, 0..3), budget.charge_many(6));
        assert!(!readable());
    }
}
