//! The mailbox of a stack: frames that another stack of the host has received, and notifications.
//!
//! Why frames move between stacks: a connection lives on one stack, and without the hash of the
//! device its segments can arrive at the queue of another.

use crate::stack::payload::Payload;
use crate::stack::shared::notifier::Notifier;
use crate::tcp::Charges;
use crossbeam_queue::ArrayQueue;
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

/// The most frames in a mailbox. A further one is dropped, as by a full ring.
const CAPACITY: usize = 512;

/// A frame that is handed over, and the charges of its pages in the budget of the queue that
/// received it.
pub(crate) type HandedOver<P> = (<P as Payload>::Frame, Charges);

/// The part of a stack that other threads use.
pub(crate) struct Mailbox<P: Payload> {
    pub(crate) notifier: Arc<Notifier>,
    frames: ArrayQueue<HandedOver<P>>,
    /// The stack is gone, and accepts no frames.
    closed: AtomicBool,
    /// Connections of the stack wait for a next hop.
    awaits_hop: AtomicBool,
}

impl<P: Payload> Mailbox<P> {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            notifier: Arc::new(Notifier::new()?),
            frames: ArrayQueue::new(CAPACITY),
            closed: AtomicBool::new(false),
            awaits_hop: AtomicBool::new(false),
        })
    }

    /// The next frame that another stack has handed over. Cost, if there is none: two loads.
    pub(crate) fn pop(&self) -> Option<HandedOver<P>> {
        // To find the queue empty, its own call needs a fence.
        if self.frames.is_empty() { None } else { self.frames.pop() }
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
        self.frames.is_empty()
    }

    /// Puts a frame into the mailbox, and notifies the stack. Returns false if the mailbox is full
    /// or closed.
    pub(crate) fn push(&self, frame: HandedOver<P>) -> bool {
        let mut pushed = self.frames.push(frame).is_ok();
        // In the order of sequentially consistent operations, either the push is before the close,
        // or the close before this load. So a frame that the close has not found is found here.
        if self.closed.load(Ordering::SeqCst) {
            self.clear();
            pushed = false;
        }
        self.notifier.notify_published();
        pushed
    }

    /// Closes the mailbox. Its frames are dropped, because their pages belong to pools that may be
    /// about to close.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.clear();
    }

    fn clear(&self) {
        while self.frames.pop().is_some() {}
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
