//! A stack over a queue pair, as its user drives it.

use crate::stack::connection_info::ConnectionInfo;
use crate::stack::core::{Core, SharedCore};
use crate::stack::egress::Egress;
use crate::stack::input::{Input, LastFlows, Origin};
use crate::stack::options::StackOptions;
use crate::stack::payload::{Payload, Transmit};
use crate::stack::remote::{self, Remote, Remotes};
use crate::stack::resources::Resources;
use crate::stack::shared::host::Host;
use crate::stack::shared::mailbox::{HandedOver, Mailbox, StackWaker};
use crate::stack::sockets::sockets::Sockets;
use crate::stack::source::Source;
use crate::stack::stats::StackStats;
use crate::time::Time;
use netmem_packet::{Armed, TxQueue, Wait};
use netmem_pool::{Mapped, SharedPool};
use rustix::event::epoll;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

/// A stack over a queue pair. See the [module](crate::stack).
pub struct Stack<R: Source, T: TxQueue> {
    rx: R,
    tx: T,
    batch: R::Batch,
    /// The sockets of other threads, if there are any. They end before the groups do.
    remote: Option<Box<dyn Remotes>>,
    pub(crate) core: Groups<R::Payload>,
    mailbox: Arc<Mailbox<R::Payload>>,
    /// Frames of other stacks that are processed next.
    arrived: VecDeque<HandedOver<R::Payload>>,
    /// The descriptors of both queues and the notifier.
    set: OwnedFd,
    /// Whether the transmit queue's descriptor ends a sleep. Once the descriptor is readable it
    /// stays so until the queue is armed. The queue is armed only while a packet waits for it. At
    /// other times the descriptor would end every sleep at once.
    awaits_tx: bool,
}

/// The groups, which sockets share. Their contents end with the stack: sockets that still exist
/// return [`SocketError::StackGone`](crate::stack::SocketError::StackGone).
pub(crate) struct Groups<P: Payload>(SharedCore<P>);

impl<P: Payload> Deref for Groups<P> {
    type Target = SharedCore<P>;

    fn deref(&self) -> &SharedCore<P> {
        &self.0
    }
}

impl<P: Payload> Drop for Groups<P> {
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
        let (id, mailbox) = host.enter()?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [rx.as_fd(), mailbox.notifier.as_fd()] {
            epoll::add(&set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        epoll::add(&set, tx.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::empty())?;
        let egress = Egress::new(pool, &tx);
        let resources = Resources::new(host.clone(), id, egress, options, now, mailbox.clone().into());
        let core = Groups(Rc::new(RefCell::new(Core::new(resources))));
        let (batch, arrived) = (R::batch(options.receive), VecDeque::new());
        Ok(Self { rx, tx, batch, remote: None, core, mailbox, arrived, set, awaits_tx: false })
    }

    /// Opens sockets.
    #[must_use]
    pub fn sockets(&self) -> Sockets<P> {
        Sockets { core: self.core.0.clone() }
    }

    /// Does all work that is due at `now`: receives frames, passes them to connections, fires
    /// timers, sends what is due, and collects completions from the device. Never blocks. Returns
    /// the amount of work: not 0 if the next poll may find more.
    ///
    /// Wakers are called at the end, when sockets can be used. After a poll that returned 0, the
    /// thread can sleep until [`poll_timeout`](Self::poll_timeout).
    pub fn poll(&mut self, now: Time) -> usize {
        // What other threads send leaves in this poll, and what arrives for them is theirs after it.
        let sent = self.poll_remote();
        let work = self.poll_groups(now);
        sent + work + self.poll_remote()
    }

    fn poll_groups(&mut self, now: Time) -> usize {
        let Self { rx, tx, batch, core, mailbox, arrived, .. } = self;
        let mut guard = core.borrow_mut();
        let core = &mut *guard;
        core.resources.now = core.resources.now.max(now);
        let receive = core.resources.options.receive;
        let notified = usize::from(mailbox.notifier.take());
        if notified > 0 {
            core.tcp.schedule.handle_returned_pages();
        }
        let work = rx.poll(|poll| {
            let completed = tx.complete();
            let mut work = notified + poll(receive, batch);
            let Core { resources, tcp, datagrams, fragments, .. } = &mut *core;
            let short = R::is_short(batch);
            let last = LastFlows::new(R::frames(batch).len());
            let mut input = Input { resources, tcp, datagrams, fragments, tx: &mut *tx, short, last };
            let frames = R::frames(batch);
            if !frames.is_empty() {
                frames.drain(..).for_each(|frame| input.handle_frame(frame, Origin::Queue));
            }
            if arrived.is_empty() {
                mailbox.receive(arrived);
            }
            input.last.expect(arrived.len());
            for _ in 0..receive {
                let Some(HandedOver { frame, charges: _charges }) = arrived.pop_front() else { break };
                input.handle_frame(frame, Origin::Mailbox);
                work += 1;
            }
            for _ in 0..input.resources.egress.loopback.len() {
                let Some(packet) = input.resources.egress.loopback.pop_front() else { break };
                input.handle_frame(packet.into(), Origin::Loopback);
                work += 1;
            }
            let Resources { outbox, egress, .. } = &mut *input.resources;
            outbox.flush(&mut egress.stats);
            work + core.poll(tx, completed, mailbox)
        });
        let mut wakers = std::mem::take(&mut core.resources.wakers);
        P::wake(tx, &mut wakers);
        drop(guard);
        for waker in wakers {
            waker.wake();
        }
        work
    }

    fn poll_remote(&mut self) -> usize {
        self.remote.as_mut().map_or(0, |remote| remote.poll())
    }

    pub(crate) fn close_remote(&mut self) {
        self.remote.iter_mut().for_each(|remote| remote.close());
    }

    /// When the stack must be polled even if no queue has work. `None` if it can wait for ever. If
    /// there are packets to send, it is now. [`poll`](Self::poll) is the call that follows.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let core = self.core.borrow();
        if self.has_remote_work() { Some(core.resources.now) } else { core.poll_timeout() }
    }

    /// A value by which other threads end the sleep of the thread that drives the stack.
    #[must_use]
    pub fn waker(&self) -> StackWaker<P> {
        StackWaker::new(self.mailbox.clone())
    }

    /// The stack's counters.
    #[must_use]
    pub fn stats(&self) -> StackStats {
        self.core.borrow().resources.egress.stats
    }

    /// Connections, including those that are closing.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.core.borrow().tcp.connections.len()
    }

    /// Every connection, those that are in their handshake or closing included, in no particular
    /// order. Cost: linear in their number; an entry is copied, and for an idle connection about
    /// 1.7 KB are allocated meanwhile.
    #[must_use]
    pub fn list_connections(&self) -> Vec<ConnectionInfo> {
        let core = self.core.borrow();
        let now = core.resources.now;
        core.tcp.connections.iter().map(|(id, seen)| ConnectionInfo::new(id, &seen, now)).collect()
    }

    /// Connections in TIME-WAIT.
    #[must_use]
    pub fn connections_in_time_wait(&self) -> usize {
        self.core.borrow().tcp.count_time_wait()
    }

    /// Received pages that are counted in the stack's budget: those that wait to be received by
    /// users, and those that users hold.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.core.borrow().resources.budget.used()
    }

    /// Registers `waker`, which is called when a socket is called. Returns whether a socket was
    /// called since the last poll; [`poll`](Self::poll) is the call that follows then. It is for a
    /// task that drives the stack, because other tasks of its thread call sockets while it sleeps.
    /// A loop that calls sockets itself does not need it.
    pub fn poll_calls(&mut self, waker: &Waker) -> bool {
        let waker = waker.clone();
        let mut core = self.core.borrow_mut();
        let before = core.resources.driver.replace(waker);
        let called = core.has_work();
        drop(core);
        // A waker that is dropped can drop a socket, which borrows the tables.
        drop(before);
        called
    }

    /// The device is gone for ever: every connection ends with
    /// [`tcp::Error::DeviceGone`](crate::tcp::Error::DeviceGone). [`poll`](Self::poll) is the call
    /// that follows; after it, users see the error. Received payload can still be read.
    ///
    /// **Do not call it if the device is replaced** and the queues are reconnected: connections
    /// then send again what was in flight.
    pub fn handle_device_gone(&mut self) {
        let core = &mut *self.core.borrow_mut();
        core.tcp.handle_device_gone(&mut core.resources);
    }

    /// Ends the stack, and returns its queues. Connections end without a segment to the peer;
    /// sockets that still exist return
    /// [`SocketError::StackGone`](crate::stack::SocketError::StackGone). Dropping a stack does the
    /// same, and drops the queues.
    #[must_use = "dropping the stack drops its queues"]
    pub fn into_queues(self) -> (R, T) {
        (self.rx, self.tx)
    }

    /// The queues.
    pub fn queues(&mut self) -> (&mut R, &mut T) {
        (&mut self.rx, &mut self.tx)
    }
}

impl<M, R, T> Stack<R, T>
where
    M: Mapped,
    R: Source<Payload = M>,
    T: TxQueue<Mem = M>,
{
    /// Opens sockets that other threads use, and goes to other threads itself. The stack stays on
    /// its thread.
    #[must_use]
    pub fn remote(&mut self) -> remote::Sockets<M> {
        let known = self.remote.as_ref().and_then(|remote| remote.as_any().downcast_ref::<Remote<M>>());
        if let Some(remote) = known {
            return remote.sockets.clone();
        }
        let remote = Remote::new(Sockets { core: self.core.0.clone() }, self.mailbox.notifier.clone());
        let sockets = remote.sockets.clone();
        self.remote = Some(Box::new(remote));
        sockets
    }
}

impl<R: Source, T: TxQueue> Stack<R, T> {
    pub(crate) fn has_remote_work(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.has_work())
    }
}

/// One descriptor for both queues and the notifier.
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
        let mailbox = &self.mailbox;
        let has_work = || !mailbox.is_empty() || !self.arrived.is_empty() || self.has_remote_work();
        if work || mailbox.notifier.arm(has_work) == Armed::Work {
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
        self.mailbox.notifier.disarm();
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
        write!(f, "Stack({} connections, {} pages)", core.tcp.connections.len(), core.resources.budget.used())
    }
}
