//! Waiting for queues: the events that wake a sleeping thread, and the cases in which a thread must
//! not sleep.
//!
//! ```text
//!   queue's epoll set   call eventfd of its ring   a requested notification of a used buffer
//!   (one per queue,     connection's socket        the back end has closed the connection: once
//!    for its lifetime)  a file that is ready       a restart or a reconnect, by `QueueEpolls::wake`
//! ```
//!
//! The set is the queue's descriptor. A restart and a reconnect change the ring, its call eventfd
//! and the connection; the new ones are put into the same set before the device can use them, and
//! then the set is woken. So a descriptor that was registered once stays valid, and a thread that
//! sleeps through a reconnect wakes up, switches to the new ring with its next poll, and arms that.
//!
//! The device shares the call eventfd, and can fill it, empty it, or make it blocking. The set
//! reports edges, and nothing reads the eventfd: see `notify/`. A device that signals without
//! reason costs the driver a wake-up for each signal.
//!
//! # When a queue does not wait
//!
//! `arm` returns [`Armed::Work`], which means that the owner must poll, if
//!
//! * the ring has a used buffer;
//! * the device has a new connection;
//! * a receive queue has fewer buffers posted than the longest frame needs, because it lacks pages.
//!   Pages that are returned from other threads do not wake the owner, and the device could wait
//!   for buffers while the driver waits for frames. An owner that polls posts the pages as they are
//!   returned. A queue that lacks pages, but has enough buffers for a frame, waits: the frame wakes
//!   it.
//!
//! # When a queue has stopped
//!
//! `arm` returns a [`QueueStopped`] if
//!
//! * the device has broken a rule of the ring: each time, until a reconnect;
//! * the connection has ended since the last call: once. The next call waits, for a reconnect.

use super::buffers::Buffers;
use super::queues::{EitherRx, VirtioRxQueues};
use super::receive::Receive;
use super::ring::{RingHandle, RingQueue};
use super::rx::VirtioRx;
use super::split_rx::VirtioSplitRx;
use super::split_tx::VirtioSplitTx;
use super::state::DriverState;
use super::stats::DeviceFault;
use super::stop::Stop;
use super::tx::VirtioTx;
use crate::notify::Kicks;
use crate::virtqueue::driver::{AnyRing, RingEnd};
use netmem_packet::{Armed, TxQueue, Wait};
use netmem_pool::{PeerMemory, PeerShared};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::MutexGuard;

impl<M: PeerMemory> DriverState<M> {
    /// Whether a queue works, which a fault may have stopped. A queue that has not switched to its
    /// ring of a new connection yet does so in the next poll, and the fault is over then.
    pub(super) fn check(&self, queue: usize, ring: &RingHandle, stopped: Option<DeviceFault>) -> io::Result<()> {
        match stopped.filter(|_| !self.has_replaced(ring)) {
            Some(fault) => Err(io::Error::new(io::ErrorKind::InvalidData, QueueStopped::Fault { queue, fault })),
            None if !self.is_connected() => {
                Err(io::Error::new(io::ErrorKind::NotConnected, QueueStopped::Disconnected { queue }))
            }
            None => Ok(()),
        }
    }

    /// Arms a queue, which a fault may have stopped: see the module. `polls`: whether the owner
    /// must poll for another reason.
    fn arm<Q: RingEnd<Words = AnyRing>>(
        &self,
        queue: usize,
        ring: &mut RingQueue<Q>,
        stopped: Option<DeviceFault>,
        polls: bool,
    ) -> io::Result<Armed> {
        let hung_up = self.epolls.of(queue).clear();
        if hung_up {
            self.hung_up(ring.handle().connection());
        }
        if hung_up || stopped.is_some() {
            return self.check(queue, ring.handle(), stopped).map(|()| Armed::Work);
        }
        if polls {
            return Ok(Armed::Work);
        }
        ring.notify();
        let armed = ring.arm();
        // Checked after the set was cleared, because a reconnect publishes the connection and then
        // wakes the set.
        if armed == Armed::Waits && self.has_replaced(ring.handle()) {
            ring.disarm();
            return Ok(Armed::Work);
        }
        Ok(armed)
    }

    /// The same for a receive queue. A queue that lacks pages for the next frame is not armed.
    pub(super) fn arm_receive<B: Buffers<Mem = M>>(&self, queue: usize, rx: &mut Receive<B>) -> io::Result<Armed> {
        let (stopped, polls) = (rx.stats().stopped, !rx.can_receive());
        self.arm(queue, rx.ring_mut(), stopped, polls)
    }
}

/// A queue that has stopped: what [`Wait::arm`] and [`Wait::check`] of a queue return, inside of an
/// `io::Error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueStopped {
    /// The device has broken a rule of the ring. The queue works again after
    /// [`VirtioNet::reconnect`](super::VirtioNet::reconnect). The error's kind is `InvalidData`.
    #[error("ring {queue} has stopped, because its device cannot be trusted: {fault}")]
    Fault {
        /// The number of the ring.
        queue: usize,
        /// What the device did.
        fault: DeviceFault,
    },
    /// The device has closed the connection. The queue works again after
    /// [`VirtioNet::reconnect`](super::VirtioNet::reconnect). The error's kind is `NotConnected`.
    #[error("ring {queue} has stopped, because its device has closed the connection")]
    Disconnected {
        /// The number of the ring.
        queue: usize,
    },
    /// A restart of the queue has failed, or the queue was moved out of its [`VirtioRxQueues`]. The
    /// error's kind is `Other`.
    #[error("receive queue {queue} does not exist any more: a restart has failed, or it was taken out")]
    Gone {
        /// The number of the receive queue.
        queue: usize,
    },
}

impl<M: PeerMemory> AsFd for VirtioRx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.state().epolls.of(self.index()).as_fd()
    }
}

impl<M: PeerMemory> AsFd for VirtioSplitRx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.state().epolls.of(self.index()).as_fd()
    }
}

impl<M: PeerMemory> AsFd for VirtioTx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.state.epolls.of(self.index).as_fd()
    }
}

/// See [`Wait`]. The work of a transmit queue is packets that the device has completed, which
/// [`complete`](TxQueue::complete) reaps. This frees slots for others. Arming flushes the queue
/// first.
impl<M: PeerMemory> Wait for VirtioTx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.flush();
        let (state, index, stopped) = (self.state.clone(), self.index, self.stats().stopped);
        state.arm(index, self.ring_mut(), stopped, false)
    }

    fn disarm(&mut self) {
        self.ring_mut().disarm();
    }

    /// The error is a [`QueueStopped`].
    fn check(&self) -> io::Result<()> {
        self.state.check(self.index, self.handle(), self.stats().stopped)
    }
}

impl<H, M: PeerMemory> AsFd for VirtioSplitTx<H, M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner().as_fd()
    }
}

/// As [`VirtioTx`].
impl<H, M: PeerMemory> Wait for VirtioSplitTx<H, M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.inner_mut().arm()
    }

    fn disarm(&mut self) {
        self.inner_mut().disarm();
    }

    fn check(&self) -> io::Result<()> {
        self.inner().check()
    }
}

impl<M: PeerMemory> EitherRx<M> {
    /// The queue, which has this number, as it is now.
    fn queue(&mut self, queue: usize) -> io::Result<&mut dyn Wait> {
        match self {
            Self::Host(rx) => Ok(rx),
            Self::Split(rx) => Ok(rx),
            Self::Stopped => Err(io::Error::other(QueueStopped::Gone { queue })),
        }
    }

    /// [`Wait::arm`] of the queue as it is now. `queue` is its number, for errors.
    ///
    /// # Errors
    ///
    /// As [`Wait::arm`]; also if there is no queue any more.
    pub fn arm(&mut self, queue: usize) -> io::Result<Armed> {
        self.queue(queue)?.arm()
    }

    /// [`Wait::check`] of the queue as it is now. `queue` is its number, for errors.
    ///
    /// # Errors
    ///
    /// As [`arm`](Self::arm).
    pub fn check(&mut self, queue: usize) -> io::Result<()> {
        self.queue(queue)?.check()
    }

    /// [`Wait::disarm`] of the queue as it is now.
    pub fn disarm(&mut self) {
        if let Ok(queue) = self.queue(0) {
            queue.disarm();
        }
    }
}

/// A queue of [`VirtioRxQueues`], to be waited for, and to be polled by a stack: from
/// [`VirtioRxQueues::wait`].
///
/// Its thread sleeps without the queue's lock, so a control thread can restart the queue meanwhile;
/// that wakes the thread. The descriptor stays valid through every restart.
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

    /// Runs `f` with the queue locked.
    fn with<R>(&self, f: impl FnOnce(&mut EitherRx<M>) -> R) -> R {
        match self.lock() {
            Some(mut rx) => f(&mut rx),
            None => f(&mut EitherRx::Stopped),
        }
    }
}

impl<M: PeerMemory> AsFd for QueueWait<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

/// Each call locks the queue.
impl<M: PeerMemory> Wait for QueueWait<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.with(|rx| rx.arm(self.queue))
    }

    fn disarm(&mut self) {
        self.with(EitherRx::disarm);
    }

    fn check(&self) -> io::Result<()> {
        self.with(|rx| rx.check(self.queue))
    }
}
