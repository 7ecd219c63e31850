//! One port for several queues: which queue a frame goes to is looked up by its UDP destination port, in a table that any
//! thread may change at any time.
//!
//! ```text
//!   port ──► look at the frame ──► table[destination] ──► backlog of queue 0 ──► ring 0
//!            sum it, vouch         0 by default           backlog of queue 1 ──► ring 2
//! ```
//!
//! Frames for a queue whose backlog is full are dropped and counted, whether its driver is slow or the queue is not served
//! at all. The other queues go on: one port has one order of frames, so that waiting for a queue would stop all of them.
//!
//! The threads of all queues take frames from the port, and leave those of other queues in the backlogs. The port's descriptor is then
//! no longer readable, so a thread that sleeps for its queue would miss them: each queue has an eventfd, which is written when a frame
//! is left for a queue whose thread [sleeps](Port::arm).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use super::{Port, PortError};
use crate::device::udp::udp;
use crate::net::{Offloads, VnetHdr, feature};

/// Frames that wait for a queue, and their bytes.
const BACKLOG: usize = 1024;
const BACKLOG_BYTES: usize = 2 << 20;
/// Buffers of up to so many bytes are kept for later frames: one Ethernet frame. Longer frames are allocated each.
const SPARE: usize = 2048;
/// Frames for other queues that are moved to find one for this.
const LOOK: usize = 64;

/// A flow table: which receive queue frames for a UDP port go to. Clones share the table. A lookup is one load; a change holds
/// from the next frame on that the port hands out.
#[derive(Clone, Debug)]
pub struct Steering {
    table: Arc<[AtomicU8]>,
    dropped: Arc<AtomicU64>,
}

impl Default for Steering {
    fn default() -> Self {
        Self::new()
    }
}

impl Steering {
    /// Everything goes to queue 0.
    #[must_use]
    pub fn new() -> Self {
        Self { table: (0..=u16::MAX).map(|_| AtomicU8::new(0)).collect(), dropped: Arc::default() }
    }

    /// From now on, frames for UDP port `destination`, over IPv4 or IPv6, go to `queue`: one that the device does not have is as
    /// queue 0, the default. What waits for its old queue stays there.
    pub fn steer(&self, destination: u16, queue: u8) {
        self.table[usize::from(destination)].store(queue, Relaxed);
    }

    /// The queue that frames for UDP port `destination` go to.
    #[must_use]
    pub fn queue(&self, destination: u16) -> u8 {
        self.table[usize::from(destination)].load(Relaxed)
    }

    /// Frames that were dropped because the backlog of their queue was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Makes `port` the port of `queues` queues, one each. Their pairs may be served by different threads.
    ///
    /// # Errors
    ///
    /// No descriptors: the port's is duplicated, and each queue has an eventfd.
    pub fn spread<P: Port>(&self, port: P, queues: usize) -> io::Result<Vec<Steered<P>>> {
        let new = |_| Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let wakes: Vec<Arc<OwnedFd>> = (0..queues).map(new).collect::<io::Result<_>>()?;
        let backlogs = wakes.iter().map(|wake| Backlog::new(wake.clone())).collect();
        // A descriptor of ours, which can be waited on without the lock.
        let fd = port.fd().map(|fd| fd.try_clone_to_owned()).transpose()?.map(Arc::new);
        let spread = Spread { port, steering: self.clone(), backlogs, spare: Vec::new(), features: 0 };
        let shared = Arc::new(Mutex::new(spread));
        let queue = |(index, wake)| Steered { shared: shared.clone(), fd: fd.clone(), wake, index, current: None };
        Ok(wakes.into_iter().enumerate().map(queue).collect())
    }
}

/// What the thread of a queue does, as far as the other threads must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    Polls,
    /// It has found no frame, and sleeps.
    Sleeps,
    /// It slept, and the eventfd was written.
    Woken,
}

/// What waits for a queue.
#[derive(Debug)]
struct Backlog {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    thread: Thread,
    /// Readable while `thread` is [`Thread::Woken`].
    wake: Arc<OwnedFd>,
}

impl Backlog {
    fn new(wake: Arc<OwnedFd>) -> Self {
        Self { frames: VecDeque::new(), bytes: 0, thread: Thread::Polls, wake }
    }

    fn is_full(&self, len: usize) -> bool {
        self.frames.len() == BACKLOG || self.bytes + len > BACKLOG_BYTES
    }

    fn push(&mut self, frame: Vec<u8>) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
        if self.thread == Thread::Sleeps {
            self.thread = Thread::Woken;
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// The queue's thread is awake.
    #[cold]
    fn awake(&mut self) {
        if self.thread == Thread::Woken {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        self.thread = Thread::Polls;
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.len();
        Some(frame)
    }

    fn clear(&mut self) -> u64 {
        self.bytes = 0;
        self.frames.drain(..).len() as u64
    }
}

#[derive(Debug)]
struct Spread<P> {
    port: P,
    steering: Steering,
    backlogs: Vec<Backlog>,
    /// Used buffers: a steady flow allocates nothing.
    spare: Vec<Vec<u8>>,
    features: u64,
}

/// One queue's part of a port. See [`Steering::spread`].
#[derive(Debug)]
pub struct Steered<P> {
    shared: Arc<Mutex<Spread<P>>>,
    fd: Option<Arc<OwnedFd>>,
    /// That of its backlog.
    wake: Arc<OwnedFd>,
    index: usize,
    current: Option<Vec<u8>>,
}

impl<P: Port> Spread<P> {
    /// The next frame for queue `index`.
    fn next(&mut self, index: usize) -> Option<Vec<u8>> {
        let backlog = &mut self.backlogs[index];
        if backlog.thread != Thread::Polls {
            backlog.awake();
        }
        if let Some(frame) = backlog.pop() {
            return Some(frame);
        }
        let sums = self.features & feature::GUEST_CSUM != 0;
        for _ in 0..LOOK {
            let wire = self.port.peek()?;
            let (header, frame) = wire.split_first_chunk::<{ VnetHdr::LEN }>()?;
            // What the port says of the checksum is not looked into.
            let udp = udp(frame, sums && header[0] == 0);
            let queue = udp.map_or(0, |udp| self.steering.queue(udp.destination));
            let queue = Some(usize::from(queue)).filter(|&q| q < self.backlogs.len()).unwrap_or(0);
            if queue != index && self.backlogs[queue].is_full(wire.len()) {
                self.steering.dropped.fetch_add(1, Relaxed);
                self.port.consume();
                continue;
            }
            let mut copy = self.spare.pop().unwrap_or_default();
            copy.extend_from_slice(wire);
            if udp.is_some_and(|udp| udp.valid) {
                copy[0] |= VnetHdr::DATA_VALID;
            }
            self.port.consume();
            if queue == index {
                return Some(copy);
            }
            self.backlogs[queue].push(copy);
        }
        None
    }
}

impl<P> Steered<P> {
    fn shared(&self) -> MutexGuard<'_, Spread<P>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: Port> Port for Steered<P> {
    const WANTS_BYTES: bool = P::WANTS_BYTES;
    /// Checksums that are right are vouched for.
    const FEATURES: u64 = P::FEATURES | feature::GUEST_CSUM;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.current.is_none() {
            let next = self.shared().next(self.index);
            self.current = next;
        }
        self.current.as_deref()
    }

    fn consume(&mut self) {
        if let Some(mut frame) = self.current.take().filter(|frame| frame.capacity() <= SPARE) {
            frame.clear();
            self.shared().spare.push(frame);
        }
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.shared().port.send(wire)
    }

    fn takes(&self) -> Offloads {
        self.shared().port.takes()
    }

    fn left(&mut self) -> u64 {
        let current = u64::from(self.current.take().is_some());
        let (mut shared, index) = (self.shared(), self.index);
        current + shared.backlogs[index].clear() + shared.port.left()
    }

    fn negotiated(&mut self, features: u64) -> Result<(), PortError> {
        // What waits may use offloads that are no longer accepted.
        self.current = None;
        let (mut shared, index) = (self.shared(), self.index);
        shared.backlogs[index].clear();
        shared.features = features;
        shared.port.negotiated(features)
    }

    fn arm(&mut self) -> bool {
        if self.current.is_none() {
            let mut shared = self.shared();
            let next = shared.next(self.index);
            if next.is_none() {
                shared.backlogs[self.index].thread = Thread::Sleeps;
            }
            drop(shared);
            self.current = next;
        }
        self.current.is_some()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(|fd| fd.as_fd())
    }

    fn left_frames(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn deadline(&self, receives: bool) -> Option<Instant> {
        self.shared().port.deadline(receives)
    }

    fn take_error(&mut self) -> Option<PortError> {
        self.shared().port.take_error()
    }
}
