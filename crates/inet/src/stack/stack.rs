//! A stack over a queue pair, as its user drives it.

use crate::Time;
use crate::stack::core::Core;
use crate::stack::egress::{Cuts, Egress};
use crate::stack::input::Origin;
use crate::stack::payload::{Payload, Transmit};
use crate::stack::shared::host::{Door, Host};
use crate::stack::sockets::stream::Sockets;
use crate::stack::source::Source;
use netmem_packet::{Armed, Checksum, Gso, GsoKind, Meta, TxQueue, Wait};
use netmem_pool::SharedPool;
use rustix::event::epoll;
use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

/// The limits of a stack.
#[derive(Clone, Copy, Debug)]
pub struct StackOptions {
    /// Received pages that connections, sockets and their users may hold together, with fragments
    /// of datagrams and frames in mailboxes. This must be less than the pages of the receive
    /// queue's pool, by at least the size of its ring. Then buffers stay posted whatever users
    /// hold, and acknowledgements, FIN and RST are always received. Payload above the limit is
    /// dropped, and not acknowledged. If the queue is short of buffers nevertheless, all payload is
    /// dropped until it is not ([`netmem_packet::Poll::is_short`]).
    pub pages: u32,
    /// Connections, including those that are closing.
    pub connections: usize,
    /// The most connections in TIME-WAIT. A further one replaces the oldest.
    pub time_wait: usize,
    /// Frames that are received in one poll.
    pub receive: usize,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self { pages: 512, connections: 65536, time_wait: 16384, receive: 256 }
    }
}

/// The counters of a stack. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StackStats {
    /// Frames that were received. Segments that were merged count as one.
    pub received: u64,
    /// Frames that were given to the device.
    pub sent: u64,
    /// Frames for this host's own addresses, which went to no device.
    pub looped: u64,
    /// Frames that were handed over to another stack.
    pub handed_over: u64,
    /// Frames that were not handed over, because the other stack's mailbox was full.
    pub mailbox_full: u64,
    /// Frames whose headers are wrong, or of protocols that are not known.
    pub malformed: u64,
    /// Frames for other stations.
    pub foreign: u64,
    /// Packets whose transport checksum is wrong.
    pub wrong_checksum: u64,
    /// Packets in memory that this process cannot read, whose checksum the device has not verified.
    /// They are dropped, and not acknowledged.
    pub unverified: u64,
    /// Frames that the stack had to read and that are in memory which it cannot read: their
    /// headers, or payload that belongs to no connection.
    pub unreadable: u64,
    /// Received packets whose payload was read to verify their checksum, because the device had not
    /// verified it.
    pub checksummed_received: u64,
    /// Sent packets whose payload was read to compute their checksum, because the device computes
    /// none.
    pub checksummed_sent: u64,
    /// Bytes of received payload that were copied to users.
    pub copied_received: u64,
    /// Bytes that were copied into pages to be sent.
    pub copied_sent: u64,
    /// Segments that were dropped because their connection is between two stacks.
    pub departed: u64,
    /// Resets for segments of no connection.
    pub resets: u64,
    /// ICMP errors that were sent.
    pub icmp_errors: u64,
    /// Frames that were not sent because there was no page.
    pub no_page: u64,
    /// Frames that were dropped because the transmit queue will never take them: it has stopped.
    pub refused: u64,
    /// Packets that were dropped because their next hop did not answer.
    pub unresolved: u64,
    /// Segments for listeners that were dropped because the stack has its most connections, or has
    /// no route to the sender.
    pub no_room: u64,
    /// Acknowledgements that were dropped because the accept queue was full.
    pub accept_overflows: u64,
    /// Connections that ended before they were accepted: their peers reset them, or gave up. Each
    /// stays in its accept queue, and counts towards the backlog, until it is accepted: what was
    /// received can be read, then the error.
    pub ended_unaccepted: u64,
    /// Received datagrams that were dropped because their socket had no room.
    pub datagrams_dropped: u64,
    /// Lookups of destination entries. Each is a get and later a put. A connection needs one, a
    /// datagram two.
    pub lookups: u64,
    /// Packets whose payload was dropped because the queue had too few buffers posted.
    pub short: u64,
    /// Fragments, and frames for other stacks, that were dropped because the page budget was used
    /// up.
    pub over_budget: u64,
    /// Chunks of payload out of order that were dropped because payload of another connection was
    /// in order, and no page was free for it.
    pub evicted: u64,
}

/// A stack over a queue pair. See the [module](self).
pub struct Stack<R: Source, T: TxQueue> {
    rx: R,
    tx: T,
    batch: R::Batch,
    pub(crate) core: Tables<R::Payload>,
    door: Arc<Door<R::Payload>>,
    /// The descriptors of both queues and the bell.
    set: OwnedFd,
    /// Whether the transmit queue's descriptor ends a sleep. Once the descriptor is readable it
    /// stays so until the queue is armed. The queue is armed only while a packet waits for it. At
    /// other times the descriptor would end every sleep at once.
    awaits_tx: bool,
}

/// The tables, which sockets share. Their contents end with the stack: sockets that still exist
/// return [`SocketError::StackGone`].
pub(crate) struct Tables<P: Payload>(Rc<RefCell<Core<P>>>);

impl<P: Payload> Deref for Tables<P> {
    type Target = Rc<RefCell<Core<P>>>;

    fn deref(&self) -> &Rc<RefCell<Core<P>>> {
        &self.0
    }
}

impl<P: Payload> Drop for Tables<P> {
    fn drop(&mut self) {
        let wakers = self.borrow_mut().end();
        for waker in wakers {
            waker.wake();
        }
    }
}

impl<P, R, T> Stack<R, T>
where
    P: Transmit<T>,
    R: Source<Payload = P>,
    T: TxQueue<Mem = P::Mem> + Wait,
{
    /// A stack of `host` over a queue pair. `pool` has the pages for headers and for copied
    /// payload. Its memory must be one that the device reaches.
    ///
    /// # Errors
    ///
    /// The system has too few descriptors or too little memory.
    pub fn new(
        host: &Host<P>,
        rx: R,
        tx: T,
        pool: Arc<SharedPool<P::Mem>>,
        options: StackOptions,
        now: Time,
    ) -> std::io::Result<Self> {
        let (id, door) = host.enter()?;
        let cuts = [GsoKind::TcpV4, GsoKind::TcpV6].map(|kind| {
            let takes = |ecn| {
                let gso = Gso { kind, size: 1460, headers: 54, ecn };
                tx.supports(Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: Some(gso) })
            };
            match (takes(true), takes(false)) {
                (true, _) => Cuts::All,
                (false, true) => Cuts::WithoutEcn,
                (false, false) => Cuts::None,
            }
        });
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [rx.as_fd(), door.bell.as_fd()] {
            epoll::add(&set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        epoll::add(&set, tx.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::empty())?;
        let core = Core::new(host.clone(), id, Egress::new(pool, cuts), options, now, door.clone().into());
        let batch = R::batch(options.receive);
        Ok(Self { rx, tx, batch, core: Tables(Rc::new(RefCell::new(core))), door, set, awaits_tx: false })
    }

    /// Opens sockets.
    #[must_use]
    pub fn sockets(&self) -> Sockets<P> {
        Sockets { core: self.core.0.clone() }
    }

    /// Does all work that is due at `now`: takes received frames and completions from the device,
    /// gives them to connections, fires timers, and sends what is due. Never blocks. Returns the
    /// amount of work: not 0 if the next poll may find more.
    ///
    /// Wakers are called at the end, when sockets can be used.
    pub fn poll(&mut self, now: Time) -> usize {
        let Self { rx, tx, batch, core, door, .. } = self;
        let mut guard = core.borrow_mut();
        let core = &mut *guard;
        core.now = core.now.max(now);
        let receive = core.options.receive;
        let rung = usize::from(door.bell.take_rung());
        if rung > 0 {
            core.feed();
        }
        let work = rx.poll(|poll| {
            let completed = tx.complete();
            let mut work = rung + poll(receive, batch);
            core.short = R::is_short(batch);
            for frame in R::frames(batch).drain(..) {
                core.frame(tx, frame, Origin::Queue);
            }
            for _ in 0..receive {
                let Some((frame, _charge)) = door.take() else { break };
                core.frame(tx, frame, Origin::Mailbox);
                work += 1;
            }
            for _ in 0..core.egress.loopback.len() {
                let Some(packet) = core.egress.loopback.pop_front() else { break };
                core.frame(tx, packet.into(), Origin::Here);
                work += 1;
            }
            work += core.neighbors(tx);
            core.check_hops();
            work += core.work(tx, completed);
            work += core.send_datagrams(tx);
            // The packets that were just sent may need a neighbour's address.
            core.neighbors(tx);
            door.awaits_hop.store(core.schedule.waits_for_hops(), Ordering::SeqCst);
            tx.flush();
            core.call_writers();
            work + completed
        });
        let mut wakers = std::mem::take(&mut core.wakers);
        P::wake(tx, &mut wakers);
        drop(guard);
        for waker in wakers {
            waker.wake();
        }
        work
    }

    /// When the stack must be polled even if no queue has work. `None` if it can wait for ever. If
    /// there are packets to send, it is now.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let core = self.core.borrow();
        if core.has_work() {
            return Some(core.now);
        }
        [core.next_timer(), core.host.neighbors_due()].into_iter().flatten().min()
    }

    /// A value by which other threads end the sleep of the thread that drives the stack.
    #[must_use]
    pub fn waker(&self) -> StackWaker<P> {
        StackWaker(self.door.clone())
    }

    /// The stack's counters.
    #[must_use]
    pub fn stats(&self) -> StackStats {
        self.core.borrow().egress.stats
    }

    /// Connections, including those that are closing.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.core.borrow().connections.len()
    }

    /// Connections in TIME-WAIT.
    #[must_use]
    pub fn connections_in_time_wait(&self) -> usize {
        self.core.borrow().count_time_wait()
    }

    /// Received pages that are counted in the stack's budget: those that wait to be received by
    /// users, and those that users hold.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.core.borrow().budget.used()
    }

    /// Registers `waker`, which is called when a socket is called. Returns whether a socket was
    /// called since the last poll. It is for a task that drives the stack, because other tasks of
    /// its thread call sockets while it sleeps. A loop that calls sockets itself does not need it.
    pub fn wait_for_calls(&mut self, waker: &Waker) -> bool {
        let waker = waker.clone();
        let mut core = self.core.borrow_mut();
        let before = core.driver.replace(waker);
        let called = core.has_work();
        drop(core);
        // A waker that is dropped can drop a socket, which borrows the tables.
        drop(before);
        called
    }

    /// Call this if the device is gone for ever. Every connection ends with
    /// [`tcp::Error::DeviceGone`](crate::tcp::Error::DeviceGone), which users see after the next
    /// poll. Received payload can still be read. Do not call it if the device is replaced and the
    /// queues are reconnected: connections then send again what was in flight.
    pub fn device_gone(&mut self) {
        self.core.borrow_mut().device_gone();
    }

    /// Ends the stack, and gives its queues back. Connections end without a segment to the peer;
    /// sockets that still exist return [`SocketError::StackGone`]. Dropping a stack does the same,
    /// and drops the queues.
    #[must_use = "dropping the stack drops its queues"]
    pub fn into_queues(self) -> (R, T) {
        (self.rx, self.tx)
    }

    /// The queues.
    pub fn queues(&mut self) -> (&mut R, &mut T) {
        (&mut self.rx, &mut self.tx)
    }
}

/// One descriptor for both queues and the bell.
impl<R: Source, T: TxQueue> AsFd for Stack<R, T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

/// Frames, other stacks and a [`StackWaker`] wake the stack, and so does the transmit queue if a
/// packet waits for it. The stack is not armed if sockets were called since the last poll. Its
/// errors are those of its queues.
impl<R: Source, T: TxQueue + Wait> Wait for Stack<R, T> {
    fn arm(&mut self) -> std::io::Result<Armed> {
        let core = self.core.borrow();
        let (blocked, work) = (core.is_blocked(), core.has_work());
        drop(core);
        let door = &self.door;
        if work || door.bell.arm(|| !door.is_empty()) == Armed::Work {
            return Ok(Armed::Work);
        }
        let armed = self.arm_queues(blocked);
        if !matches!(armed, Ok(Armed::Waits)) {
            self.disarm();
        }
        armed
    }

    fn disarm(&mut self) {
        self.rx.disarm();
        self.tx.disarm();
        self.door.bell.disarm();
    }

    fn check(&self) -> std::io::Result<()> {
        self.rx.check()?;
        self.tx.check()
    }
}

impl<R: Source, T: TxQueue + Wait> Stack<R, T> {
    fn arm_queues(&mut self, blocked: bool) -> std::io::Result<Armed> {
        match self.tx.check() {
            // The receive queue of a device that may be replaced reports this, once.
            Err(error) if error.kind() != std::io::ErrorKind::NotConnected => return Err(error),
            _ => {}
        }
        if blocked && self.tx.arm()? == Armed::Work {
            return Ok(Armed::Work);
        }
        if self.rx.arm()? == Armed::Work || !self.await_tx(blocked) {
            return Ok(Armed::Work);
        }
        Ok(Armed::Waits)
    }

    /// Sets whether the transmit queue's descriptor ends sleeps. Returns false if the system
    /// refuses; the stack must then be polled. Costs a system call if the setting changes.
    fn await_tx(&mut self, awaits: bool) -> bool {
        if awaits == self.awaits_tx {
            return true;
        }
        let events = if awaits { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let changed = epoll::modify(&self.set, self.tx.as_fd(), epoll::EventData::new_u64(0), events).is_ok();
        self.awaits_tx = awaits == changed;
        changed
    }
}

impl<R: Source, T: TxQueue> fmt::Debug for Stack<R, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = self.core.borrow();
        write!(f, "Stack({} connections, {} pages)", core.connections.len(), core.budget.used())
    }
}

/// A handle by which any thread wakes the thread that drives a stack. The next poll counts the
/// wake-up as work.
pub struct StackWaker<P: Payload>(Arc<Door<P>>);

impl<P: Payload> StackWaker<P> {
    /// Ends the sleep of the stack's thread, or the next one if it does not sleep. Cost: two atomic
    /// stores, and a system call if it sleeps.
    pub fn wake(&self) {
        self.0.bell.ring();
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
