//! The receive queue of a socket: a page pool, and the receive path over it (`receive.rs`).
//!
//! # The end
//!
//! Dropping a queue removes its socket from the maps of XDP programs: frames then go to the kernel,
//! also if the transmit queue keeps the socket open. The frames that were received and not polled
//! are returned. Chunks that the kernel still has are quarantined, and the pool counts them: the
//! kernel may write to them until some time after the socket was closed. Their pages return to the
//! provider when it lets the queue be bound again, or at once if it has already unbound the socket,
//! because the interface was deleted: see `held.rs`.

mod held_frames;

use crate::drops::RxDrops;
use crate::fault::Fault;
use crate::held::{keep_posted, release_posted};
use crate::held_frame::Times;
use crate::left::LeftChunks;
use crate::program::leave;
use crate::receive::Receive;
use crate::socket::XskSocket;
use crate::stats::{KernelStats, RxStats, state};
use crate::sys;
use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use crate::wait_set::WaitSet;
use netmem_packet::{Armed, Handler, Poll, RxQueue, Wait};
use netmem_pool::{KernelShared, Napi, PagePool, PoolClosed, PoolStats, Provider};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The number of polls without a frame after which the queue checks whether the interface still
/// exists.
const IDLE_POLLS: u32 = 4096;

/// A receive queue: see [`RxQueue::poll`]. It is one half of a socket; the other is
/// [`XskTx`](crate::XskTx).
///
/// Its descriptor is for waiting only: while the queue is [armed](Wait::arm) it becomes readable
/// when frames arrive, and at any time when the interface is deleted. (A socket that was made in
/// another network namespace and not by a [helper](crate::helper) does not report that; a thread
/// that must notice it sleeps for a limited time.) The descriptor of the socket, which is inserted
/// into an XDP program's map of sockets, is that of [`socket`](Self::socket).
#[must_use = "a queue stops when it is dropped"]
pub struct XskRx<M: UmemMemory = KernelShared> {
    pool: Option<PagePool<M>>,
    queue: Receive<M>,
    wait_set: WaitSet,
    /// What the kernel counted for the queue's sockets before this one.
    before: KernelStats,
    /// For [`held_frames`](Self::held_frames).
    times: Times,
    // The socket is closed before the UMEM is dropped.
    socket: Arc<XskSocket>,
    provider: Arc<dyn Provider<M>>,
    umem: Umem<M>,
}

impl<M: UmemMemory> XskRx<M> {
    pub(crate) fn new(
        pool: PagePool<M>,
        queue: Receive<M>,
        wait_set: WaitSet,
        socket: Arc<XskSocket>,
        provider: Arc<dyn Provider<M>>,
        umem: Umem<M>,
    ) -> Self {
        Self {
            pool: Some(pool),
            queue,
            wait_set,
            before: KernelStats::default(),
            times: Times::default(),
            socket,
            provider,
            umem,
        }
    }

    /// Goes on with the counters of the queue before it was opened again.
    pub(crate) fn go_on(&mut self, before: Counters) {
        let Counters { stats, kernel, times } = before;
        let out_of_buffers = stats.out_of_buffers + self.queue.stats.out_of_buffers;
        self.queue.stats = RxStats { stopped: None, out_of_buffers, ..stats };
        (self.before, self.times) = (kernel, times);
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> RxStats {
        self.queue.stats
    }

    /// The frames that the queue lost, by cause: by the kernel's counters of the socket, and of the
    /// sockets before it if the queue was [opened again](crate::ClosedQueue), and by those of
    /// [`stats`](Self::stats). A system call.
    ///
    /// # Errors
    ///
    /// The system call has failed.
    pub fn drops(&self) -> io::Result<RxDrops> {
        Ok(RxDrops::new(&self.queue.stats, &self.socket.kernel_stats()?.plus(&self.before)))
    }

    /// The counters of the queue's pool.
    pub fn pool_stats(&mut self) -> PoolStats {
        self.pool.as_mut().map(PagePool::stats).unwrap_or_default()
    }

    /// The number of chunks that the kernel has: in the fill ring, in the device, or received and
    /// not polled.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.queue.posted.count() as usize
    }

    /// The number of chunks that the kernel should have.
    #[must_use]
    pub fn fill_level(&self) -> usize {
        self.queue.level as usize
    }

    /// The socket. The transmit queue is its other half.
    #[must_use]
    pub fn socket(&self) -> &XskSocket {
        &self.socket
    }

    /// The memory of the queue.
    #[must_use]
    pub fn umem(&self) -> &Umem<M> {
        &self.umem
    }

    /// Stops the queue: its socket leaves the maps into which
    /// [`Program::insert`](crate::Program::insert) has put it, so that the kernel gets the frames.
    /// Frames that were received and not polled are returned, chunks that the kernel has are
    /// quarantined, and the pool is closed. The socket is closed together with the other half.
    pub fn close(mut self) -> Option<PoolClosed> {
        self.end()
    }

    /// As [`close`](Self::close), with the final counters: those of frames that were received and
    /// not polled are [`RxDrops::unpolled`]. A frame that the kernel delivers meanwhile may be
    /// missing. The drops by the kernel are 0 if its system call fails.
    #[must_use]
    pub fn close_counted(mut self) -> RxClosed {
        let pool = self.end();
        let kernel = self.socket.kernel_stats().unwrap_or_default().plus(&self.before);
        RxClosed { pool, stats: self.queue.stats, drops: RxDrops::new(&self.queue.stats, &kernel) }
    }

    fn end(&mut self) -> Option<PoolClosed> {
        let mut pool = self.pool.take()?;
        self.leave_maps();
        let left = pool.poll(|_| self.queue.leave(self.socket.key()));
        let (closed, pages) = left.quarantine(pool);
        let memory = (&self.provider, self.umem.region());
        if self.socket.is_unbound() {
            release_posted(memory, pages);
        } else {
            keep_posted(self.socket.key(), self.umem.number(), memory, pages);
        }
        Some(closed)
    }

    fn leave_maps(&self) {
        leave(self.socket.as_fd(), self.socket.is_gone());
    }

    /// Ends the queue, to be opened again: its pool stays. The frames that were not polled are
    /// counted.
    pub(crate) fn detach(mut self) -> Detached<M> {
        let mut pool = self.pool.take().expect("the pool is there until the queue is closed, which consumes it");
        self.leave_maps();
        // The kernel may be delivering frames that it has redirected before.
        sys::grace_period();
        let mut left = pool.poll(|_| self.queue.leave(self.socket.key()));
        let kernel = self.socket.kernel_stats().unwrap_or_default().plus(&self.before);
        if self.socket.is_unbound() {
            left.release(&mut pool);
        }
        let (provider, umem) = (self.provider.clone(), self.umem.clone());
        let counters = Counters { stats: self.queue.stats, kernel, times: std::mem::take(&mut self.times) };
        Detached { pool, left, counters, provider, umem }
    }

    /// Makes the driver check the fill ring, and its device.
    #[cold]
    fn wake(&mut self) {
        self.queue.stats.wakeups += 1;
        // Other errors of the driver are no faults, for instance if the interface is down.
        let _ = self.socket.wake_rx();
    }

    /// Checks whether the interface still exists.
    #[cold]
    fn check_interface(&mut self) {
        self.queue.idle_polls = 0;
        if self.socket.is_gone() && self.queue.stats.stopped.is_none() {
            self.queue.stop(Fault::Gone);
        }
    }
}

/// The books of a receive queue that was [closed](XskRx::close_counted).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RxClosed {
    /// Those of its pool.
    pub pool: Option<PoolClosed>,
    /// The queue's counters.
    pub stats: RxStats,
    /// The frames that it lost, by cause.
    pub drops: RxDrops,
}

/// The parts of a queue that stay when its socket is closed: see [`XskRx::detach`].
pub(crate) struct Detached<M: UmemMemory> {
    pub(crate) pool: PagePool<M>,
    pub(crate) left: LeftChunks<M>,
    pub(crate) counters: Counters,
    pub(crate) provider: Arc<dyn Provider<M>>,
    pub(crate) umem: Umem<M>,
}

/// What a queue that is opened again has counted before.
pub(crate) struct Counters {
    pub(crate) stats: RxStats,
    kernel: KernelStats,
    times: Times,
}

impl<M: UmemMemory> Drop for XskRx<M> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<M: UmemMemory> fmt::Debug for XskRx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "XskRx({}, {})", self.socket, state(self.queue.stats.stopped))
    }
}

impl<M: UmemMemory> AsFd for XskRx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wait_set.as_fd()
    }
}

/// See [`Wait`]. A queue does not wait if the kernel has no chunks of it because pages are missing.
impl<M: UmemMemory> Wait for XskRx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        let waits = |queue: &mut Receive<M>| queue.posted.count() > 0 && queue.rx.available(1).is_ok_and(|n| n == 0);
        if self.queue.stats.stopped.is_none() && !waits(&mut self.queue) {
            return Ok(Armed::Work);
        }
        if self.wait_set.arm(self.socket.as_fd(), false)? {
            self.check_interface();
        }
        if self.socket.wakes_rx() && self.queue.fill.needs_wakeup() {
            self.wake();
        }
        let checked = self.check();
        if checked.is_ok() && waits(&mut self.queue) {
            return Ok(Armed::Waits);
        }
        self.disarm();
        checked.map(|()| Armed::Work)
    }

    /// Removes the socket from the set on which a thread waits. While it is there, the kernel calls
    /// the set for each batch of frames. One system call.
    fn disarm(&mut self) {
        self.wait_set.disarm(self.socket.as_fd());
    }

    /// The error is a [`QueueStopped`](crate::QueueStopped).
    fn check(&self) -> io::Result<()> {
        self.socket.check(self.queue.stats.stopped)
    }
}

/// The inside of a [poll](RxQueue::poll) of an [`XskRx`].
pub struct RxPoll<'a, M: UmemMemory = KernelShared> {
    queue: &'a mut Receive<M>,
    napi: Napi<'a, M>,
}

impl<M: UmemMemory> fmt::Debug for RxPoll<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RxPoll")
    }
}

impl<M: UmemMemory> RxQueue for XskRx<M> {
    type Mem = M;
    type Poll<'a> = RxPoll<'a, M>;

    #[inline]
    fn poll<R>(&mut self, f: impl FnOnce(&mut RxPoll<'_, M>) -> R) -> R {
        if self.socket.polls_busily() {
            self.wake();
        }
        if self.queue.idle_polls >= IDLE_POLLS {
            self.check_interface();
        }
        let Self { pool, queue, .. } = self;
        let pool = pool.as_mut().expect("the pool is there until the queue is closed, which consumes it");
        let answer = pool.poll(|napi| f(&mut RxPoll { queue, napi: napi.reborrow() }));
        if self.socket.wakes_rx() && self.queue.fill.needs_wakeup() {
            self.wake();
        }
        answer
    }
}

impl<M: UmemMemory> Poll for RxPoll<'_, M> {
    type Mem = M;

    fn receive<H: Handler<M>>(&mut self, budget: usize, handler: &mut H) -> usize {
        let frames = self.queue.receive(&mut self.napi, budget, handler);
        self.queue.idle_polls = if frames == 0 { self.queue.idle_polls + 1 } else { 0 };
        frames
    }

    /// Returns true if the kernel has fewer chunks than a quarter of the fill level.
    fn is_short(&self) -> bool {
        self.queue.posted.count() < self.queue.level / 4
    }

    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> R) -> R {
        f(&mut self.napi)
    }
}
