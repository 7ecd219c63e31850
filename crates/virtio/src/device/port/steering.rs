//! One port for several queues: the queue of a frame follows from a table that any thread may
//! change at any time.
//!
//! ```text
//!   port ──► parse the frame  ──► TCP: by both addresses and ports; else by local port ──► backlog of queue 0 ──► ring 0
//!            sum it, mark          UDP: by local port                                       backlog of queue 1 ──► ring 2
//!                                  0 by default, and for all else
//! ```
//!
//! Frames for a queue whose backlog is full are dropped and counted, whether its driver is slow or
//! the queue is not served at all. The other queues continue: a port has one order of frames, so
//! waiting for one queue would stop all of them.
//!
//! The threads of all queues read frames from the port, and put those of other queues into the
//! backlogs. The port's descriptor is then no longer readable, so a thread that sleeps for its
//! queue would miss them: each queue has an eventfd, which is written when a frame is left for a
//! queue whose thread [sleeps](Port::arm).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

use netmem_packet::Transport;

use rustix::event::{EventfdFlags, eventfd};

use super::error::PortError;
use super::interface::Port;
use crate::device::flow::Flow;
use crate::device::stats::DropReason;
use crate::net::{Offloads, VnetHdr, feature};

/// Frames that wait for a queue, and their bytes.
const BACKLOG: usize = 1024;
const BACKLOG_BYTES: usize = 2 << 20;
/// Buffers of up to so many bytes, an Ethernet frame, are kept for later frames. For each longer
/// frame a buffer is allocated.
const SPARE: usize = 2048;
/// The most frames of other queues that are moved to their backlogs in search of one for this
/// queue.
const MAX_MOVED: usize = 64;

/// A flow table: which receive queue frames for a UDP port, a TCP port or a TCP connection go to.
/// "Local" is the frame's destination. Clones share the table. A lookup is one load. For a TCP
/// segment, if any connection was steered, it is a lock and a lookup in a hash table. A change
/// applies from the next frame of the port on.
///
/// IP fragments, and frames of other protocols, go to queue 0.
#[derive(Clone, Debug)]
pub struct Steering {
    tables: Arc<Tables>,
    dropped: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Tables {
    /// By local port.
    udp: Box<[AtomicU8]>,
    tcp: Box<[AtomicU8]>,
    /// By remote and local address, for TCP.
    connections: RwLock<HashMap<(SocketAddr, SocketAddr), u8>>,
    /// How many connections there are.
    steered: AtomicUsize,
}

impl Tables {
    fn queue(&self, flow: &Flow) -> u8 {
        let by_port = match flow.transport {
            Transport::Udp => &self.udp,
            Transport::Tcp => {
                if self.steered.load(Relaxed) > 0
                    && let Some(&queue) = self.connections().get(&(flow.source, flow.destination))
                {
                    return queue;
                }
                &self.tcp
            }
        };
        by_port[usize::from(flow.destination.port())].load(Relaxed)
    }

    fn connections(&self) -> RwLockReadGuard<'_, HashMap<(SocketAddr, SocketAddr), u8>> {
        self.connections.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Steering {
    fn default() -> Self {
        Self::new()
    }
}

impl Steering {
    /// A table with which all frames go to queue 0.
    #[must_use]
    pub fn new() -> Self {
        let ports = || (0..=u16::MAX).map(|_| AtomicU8::new(0)).collect();
        let (connections, steered) = (RwLock::default(), AtomicUsize::new(0));
        Self { tables: Arc::new(Tables { udp: ports(), tcp: ports(), connections, steered }), dropped: Arc::default() }
    }

    /// From now on, frames for UDP port `destination`, over IPv4 or IPv6, go to `queue`. If the
    /// device has no such queue, they go to queue 0, the default. Frames that wait for the old
    /// queue stay there.
    pub fn steer(&self, destination: u16, queue: u8) {
        self.tables.udp[usize::from(destination)].store(queue, Relaxed);
    }

    /// From now on, segments for TCP port `destination`, over IPv4 or IPv6, go to `queue`, except
    /// those of connections that were [steered](Self::steer_connection).
    pub fn steer_tcp(&self, destination: u16, queue: u8) {
        self.tables.tcp[usize::from(destination)].store(queue, Relaxed);
    }

    /// From now on, segments of the TCP connection between `remote` and `local` go to `queue`; with
    /// `None`, to that of the local port. Segments that wait for the old queue stay there, so that
    /// later ones may arrive before them.
    ///
    /// The caller bounds the number of connections. A peer cannot add entries here.
    pub fn steer_connection(&self, remote: SocketAddr, local: SocketAddr, queue: Option<u8>) {
        let mut connections = self.tables.connections.write().unwrap_or_else(PoisonError::into_inner);
        match queue {
            Some(queue) => connections.insert((remote, local), queue),
            None => connections.remove(&(remote, local)),
        };
        self.tables.steered.store(connections.len(), Relaxed);
    }

    /// The queue that frames for UDP port `destination` go to.
    #[must_use]
    pub fn queue(&self, destination: u16) -> u8 {
        self.tables.udp[usize::from(destination)].load(Relaxed)
    }

    /// Frames that were dropped because the backlog of their queue was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Makes `port` the port of `queues` queues, one each. Their pairs may be served by different
    /// threads.
    ///
    /// # Errors
    ///
    /// There are too few descriptors: the port's is duplicated, and each queue has an eventfd.
    pub fn spread<P: Port>(&self, port: P, queues: usize) -> io::Result<Vec<Steered<P>>> {
        let new = |_| Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let wakes: Vec<Arc<OwnedFd>> = (0..queues).map(new).collect::<io::Result<_>>()?;
        let backlogs = wakes.iter().map(|wake| Backlog::new(wake.clone())).collect();
        // A duplicate of the descriptor, which can be waited on without the lock.
        let fd = port.fd().map(|fd| fd.try_clone_to_owned()).transpose()?.map(Arc::new);
        let spread = Spread { port, steering: self.clone(), backlogs, spare: Vec::new(), features: 0 };
        let shared = Arc::new(Mutex::new(spread));
        let queue = |(index, wake)| Steered { shared: shared.clone(), fd: fd.clone(), wake, index, current: None };
        Ok(wakes.into_iter().enumerate().map(queue).collect())
    }
}

/// The state of a queue's thread, for the other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    Polls,
    /// It has found no frame, and sleeps.
    Sleeps,
    /// It slept, and the eventfd was written.
    Woken,
}

/// The frames that wait for a queue.
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

    /// Records that the queue's thread is awake.
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
        for _ in 0..MAX_MOVED {
            let wire = self.port.peek()?;
            let (header, frame) = wire.split_first_chunk::<{ VnetHdr::LEN }>()?;
            // The port's statement about the checksum is not used.
            let flow = Flow::of(frame, sums && header[0] == 0);
            let queue = flow.as_ref().map_or(0, |flow| self.steering.tables.queue(flow));
            let queue = Some(usize::from(queue)).filter(|&q| q < self.backlogs.len()).unwrap_or(0);
            if queue != index && self.backlogs[queue].is_full(wire.len()) {
                self.steering.dropped.fetch_add(1, Relaxed);
                self.port.consume();
                continue;
            }
            let mut copy = self.spare.pop().unwrap_or_default();
            copy.extend_from_slice(wire);
            if flow.is_some_and(|flow| flow.valid) {
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
    /// A frame whose checksum is right is marked as verified.
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

    fn dropped(&mut self, wire: &[u8], why: DropReason) {
        self.shared().port.dropped(wire, why);
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.shared().port.send(wire)
    }

    fn accepted_offloads(&self) -> Offloads {
        self.shared().port.accepted_offloads()
    }

    fn drop_waiting(&mut self) -> u64 {
        let current = u64::from(self.current.take().is_some());
        let (mut shared, index) = (self.shared(), self.index);
        current + shared.backlogs[index].clear() + shared.port.drop_waiting()
    }

    fn negotiated(&mut self, features: u64) -> Result<(), PortError> {
        // Waiting frames may use offloads that are no longer accepted.
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

    fn backlog_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn deadline(&self, receives: bool) -> Option<Instant> {
        self.shared().port.deadline(receives)
    }

    fn take_error(&mut self) -> Option<PortError> {
        self.shared().port.take_error()
    }
}
