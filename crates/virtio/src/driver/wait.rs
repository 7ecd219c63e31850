//! Waiting for queues: the events that wake a sleeping thread, and the cases in which a thread must not sleep.
//!
//! ```text
//!   queue's epoll set   call eventfd of its ring     the device has given something back, and was asked to tell
//!   (one per queue,     connection's socket          the back end has closed the connection: once
//!    for its lifetime)  a file that is ready         the queue was restarted or reconnected: once each, by `Alarms::wake`
//! ```
//!
//! The set is the queue's descriptor. A restart and a reconnect change the ring, its call eventfd and the connection; the
//! new ones are put into the same set before the device can use them, and then the set is woken. So a descriptor that was
//! registered once stays valid, and a thread that sleeps through a reconnect wakes up, takes the new ring with its next poll,
//! and arms that.
//!
//! The device shares the call eventfd, and can fill it, empty it, or make it blocking. The set reports edges, and nothing
//! reads the eventfd: see `notify.rs`. A device that signals without reason costs the driver a wake-up for each signal.
//!
//! # When a queue does not wait
//!
//! `arm` returns [`Armed::Work`], which means that the owner must poll, if
//!
//! * the ring has something to take;
//! * the device has a new connection, or the connection has ended since the last call (once: the next call waits, for a
//!   reconnect);
//! * the device has done something wrong and the queue has stopped: its `stats` say so;
//! * a receive queue has fewer buffers posted than the longest frame takes, because it lacks pages. Pages that are
//!   returned from other threads do not wake the owner, and the device could wait for buffers while the driver waits
//!   for frames. An owner that polls posts the pages as they are returned. A queue that lacks pages, but has enough
//!   buffers for a frame, waits: the frame wakes it.

use super::Link;
use super::queues::{EitherRx, VirtioRxQueues};
use super::receive::{Buffers, Receive};
use super::restart::Stop;
use super::ring::RingQueue;
use super::rx::VirtioRx;
use super::split_rx::VirtioSplitRx;
use super::split_tx::VirtioSplitTx;
use super::tx::VirtioTx;
use crate::notify::{Kicks, NotifyError};
use netmem_packet::{Armed, TxQueue, Wait};
use netmem_pool::{PeerMemory, PeerShared};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::MutexGuard;

/// The epoll sets of a device's queues, by queue index.
#[derive(Debug)]
pub(super) struct Alarms {
    sets: Box<[Kicks]>,
    /// An eventfd that is never 0 and that no peer has.
    ready: OwnedFd,
}

impl Alarms {
    /// A set for each of `queues` queues.
    pub(super) fn new(queues: usize) -> Result<Self, NotifyError> {
        let failed = |e: rustix::io::Errno| NotifyError::Io { what: "eventfd", source: e.into() };
        let ready = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let set = |_| {
            let set = Kicks::new()?;
            set.watch_ready(ready.as_fd())?;
            Ok(set)
        };
        let sets = (0..queues).map(set).collect::<Result<_, NotifyError>>()?;
        Ok(Self { sets, ready })
    }

    /// The set of a queue.
    pub(super) fn of(&self, queue: usize) -> &Kicks {
        &self.sets[queue]
    }

    /// Wakes the threads that wait for a queue.
    pub(super) fn wake(&self, queue: usize) {
        self.of(queue).wake(self.ready.as_fd());
    }

    /// Wakes the threads that wait for any queue.
    pub(super) fn wake_all(&self) {
        (0..self.sets.len()).for_each(|queue| self.wake(queue));
    }

    /// Wakes the threads when the back end closes the connection `socket`. Ends when `socket` is closed.
    pub(super) fn watch(&self, socket: BorrowedFd<'_>) -> Result<(), NotifyError> {
        self.sets.iter().try_for_each(|set| set.watch_hang_up(socket))
    }
}

impl<M: PeerMemory> Link<M> {
    /// Arms a queue: see the module. `polls` says whether the owner must poll for another reason.
    fn arm<B>(&self, queue: usize, ring: &mut RingQueue<B>, polls: bool) -> Armed {
        let hung_up = self.alarms.of(queue).clear();
        if hung_up {
            self.hung_up(ring.handle().connection());
        }
        if hung_up || polls {
            return Armed::Work;
        }
        ring.notify();
        let armed = ring.arm();
        // Checked after the set was cleared, because a reconnect publishes the connection and then wakes the set.
        if armed == Armed::Waits && self.has_replaced(ring.handle()) {
            ring.disarm();
            return Armed::Work;
        }
        armed
    }

    /// The same for a receive queue. A queue that has stopped, or that lacks pages for the next frame, is not armed.
    pub(super) fn arm_receive<B: Buffers<Mem = M>>(&self, queue: usize, rx: &mut Receive<B>) -> Armed {
        let polls = rx.stats().stopped.is_some() || !rx.can_receive();
        self.arm(queue, rx.ring_mut(), polls)
    }
}

impl<M: PeerMemory> AsFd for VirtioRx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link().alarms.of(self.index()).as_fd()
    }
}

impl<M: PeerMemory> AsFd for VirtioSplitRx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link().alarms.of(self.index()).as_fd()
    }
}

impl<M: PeerMemory> AsFd for VirtioTx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.alarms.of(self.index).as_fd()
    }
}

/// See [`Wait`]. The work of a transmit queue is packets that the device has completed, which
/// [`complete`](TxQueue::complete) takes back. This makes room for others. Arming flushes the queue first.
impl<M: PeerMemory> Wait for VirtioTx<M> {
    fn arm(&mut self) -> Armed {
        self.flush();
        let link = self.link.clone();
        let polls = self.stats().stopped.is_some();
        link.arm(self.index, self.ring_mut(), polls)
    }

    fn disarm(&mut self) {
        self.ring_mut().disarm();
    }
}

impl<H, M: PeerMemory> AsFd for VirtioSplitTx<H, M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner().as_fd()
    }
}

/// As [`VirtioTx`].
impl<H, M: PeerMemory> Wait for VirtioSplitTx<H, M> {
    fn arm(&mut self) -> Armed {
        self.inner_mut().arm()
    }

    fn disarm(&mut self) {
        self.inner_mut().disarm();
    }
}

impl<M: PeerMemory> EitherRx<M> {
    /// [`Wait::arm`] of the queue as it is now. A queue that has stopped returns [`Armed::Work`], so that its owner
    /// polls it and sees this.
    pub fn arm(&mut self) -> Armed {
        match self {
            Self::Host(rx) => rx.arm(),
            Self::Split(rx) => rx.arm(),
            Self::Stopped => Armed::Work,
        }
    }

    /// [`Wait::disarm`] of the queue as it is now.
    pub fn disarm(&mut self) {
        match self {
            Self::Host(rx) => rx.disarm(),
            Self::Split(rx) => rx.disarm(),
            Self::Stopped => {}
        }
    }
}

/// A queue of [`VirtioRxQueues`], to be waited for, and to be polled by a stack: from [`VirtioRxQueues::wait`].
///
/// Its thread sleeps without the queue's lock, so a control thread can restart the queue meanwhile; that wakes the thread. The
/// descriptor stays valid through every restart.
#[derive(Debug)]
pub struct QueueWait<M: PeerMemory = PeerShared> {
    queues: VirtioRxQueues<M>,
    queue: usize,
    set: Kicks,
}

impl<M: PeerMemory> VirtioRxQueues<M> {
    /// Lets a thread wait for a queue. `None` if the device has no such queue.
    #[must_use]
    pub fn wait(&self, queue: usize) -> Option<QueueWait<M>> {
        Some(QueueWait { set: self.set(queue)?.clone(), queues: self.clone(), queue })
    }
}

impl<M: PeerMemory> QueueWait<M> {
    /// Locks the queue.
    pub(super) fn lock(&self) -> Option<MutexGuard<'_, EitherRx<M>>> {
        self.queues.get(self.queue)
    }
}

impl<M: PeerMemory> AsFd for QueueWait<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

/// Each call locks the queue.
impl<M: PeerMemory> Wait for QueueWait<M> {
    fn arm(&mut self) -> Armed {
        self.lock().map_or(Armed::Work, |mut rx| rx.arm())
    }

    fn disarm(&mut self) {
        if let Some(mut rx) = self.lock() {
            rx.disarm();
        }
    }
}
