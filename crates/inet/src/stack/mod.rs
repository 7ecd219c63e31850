//! A stack over one queue pair: connections, sockets, timers.
//!
//! ```text
//!   rx ──► Gro ──► input: headers, read once ──► this stack's connections ──► Connection::segment ──┐
//!   mailbox ─────────────┘        │ of another   └ listeners, UDP sockets                           │
//!                                 ▼ stack                                                           ▼
//!                          its mailbox                                       due ──► Connection::transmit ──► tx
//!   TcpStream::send, recv ───────────────────────────────────────────────────▲ ▲
//!   timer wheel ───────────────────────────────────────────────────────────────┘
//! ```
//!
//! **One thread.** A [`Stack`] owns its queue pair, its connections and its timers. The sockets ([`Sockets`], [`TcpListener`],
//! [`TcpStream`], [`UdpSocket`]) stay on the same thread; [`Fragment`]s go anywhere. Stacks of a [`Host`] share its routes, its
//! neighbours, its ports, its secrets and a directory of connections.
//!
//! **The code that drives the stack** is a loop of the user: [`Stack::poll`] does what is to be done and never blocks. Between two polls,
//! the user calls sockets. When there is nothing to do, the loop sleeps until the stack's descriptor is readable, at most until
//! [`Stack::next_deadline`]. A [`PollThenSleep`](netmem_packet::PollThenSleep) does that; [`StackWaker`] ends the sleep from another thread.
//!
//! **Time** is what the caller says.
//!
//! ```no_run
//! use netmem_inet::{ListenOptions, SocketError, Stack, Time};
//! use netmem_packet::{PollThenSleep, RxQueue, TxQueue, Wait};
//! use netmem_pool::Mapped;
//! use std::time::{Duration, Instant};
//!
//! /// Echoes what each connection sends.
//! fn serve<R, T>(stack: &mut Stack<R, T>) -> Result<(), Box<dyn std::error::Error>>
//! where
//!     R: RxQueue<Mem: Mapped> + Wait,
//!     T: TxQueue<Mem = R::Mem> + Wait,
//! {
//!     let beginning = Instant::now();
//!     let now = || Time::ZERO + beginning.elapsed();
//!     let mut listener = stack.sockets().listen("0.0.0.0:7".parse()?, ListenOptions::default())?;
//!     let mut streams = Vec::new();
//!     let mut pause = PollThenSleep::new(Duration::from_micros(50));
//!     loop {
//!         let work = stack.poll(now());
//!         streams.extend(listener.accept());
//!         streams.retain_mut(|stream| {
//!             let mut bytes = [0; 4096];
//!             match stream.read(&mut bytes) {
//!                 Ok(0) => false,
//!                 Ok(n) => stream.write(&bytes[..n]).is_ok(),
//!                 Err(error) => error == SocketError::WouldBlock,
//!             }
//!         });
//!         let sleep = stack.next_deadline().map(|at| at.since(now()));
//!         pause.turn(work, &mut [stack], sleep)?;
//!     }
//! }
//! ```

mod bell;
mod carrier;
mod control;
mod core;
mod directory;
mod egress;
mod error;
mod fragment;
#[cfg(feature = "futures")]
mod futures;
mod host;
mod input;
mod moving;
mod path;
mod sockets;
#[cfg(feature = "tokio")]
pub mod tokio;
mod udp;
mod wheel;

pub use carrier::{HeaderTicket, HostCarrier};
pub use error::SocketError;
pub use fragment::{Fragment, Packer};
pub use host::Host;
pub use moving::{Departed, SavedStream};
pub use sockets::{ListenOptions, Sockets, TcpListener, TcpStream};
pub use udp::{Received, UdpSocket};

use crate::Time;
use core::Core;
use egress::Egress;
use host::Door;
use input::Origin;
use netmem_packet::{Armed, Checksum, Gro, Gso, GsoKind, Handler, Meta, Packet, Poll, RxQueue, TxQueue, Wait};
use netmem_pool::{Mapped, SharedPool};
use rustix::event::epoll;
use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

/// What a stack may use.
#[derive(Clone, Copy, Debug)]
pub struct StackOptions {
    /// Received pages that connections, sockets and their users may hold together. It is to be less than the pages of the receive queue's
    /// pool by at least the size of its ring, so that buffers stay posted whatever users hold: then acknowledgements, FIN and RST always
    /// get in. What is received above the limit is dropped, and not acknowledged.
    pub pages: u32,
    /// Connections, with those that are closing.
    pub connections: usize,
    /// Connections in TIME-WAIT. One more makes the oldest go.
    pub time_wait: usize,
    /// Frames that are received in one poll.
    pub receive: usize,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self { pages: 512, connections: 65536, time_wait: 16384, receive: 256 }
    }
}

/// What a stack has done. Each number only grows.
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
    /// Frames that were not, because the other stack's mailbox was full.
    pub mailbox_full: u64,
    /// Frames whose headers are wrong, or of protocols that are not known.
    pub malformed: u64,
    /// Frames for other stations.
    pub foreign: u64,
    /// Packets whose transport checksum is wrong.
    pub wrong_checksum: u64,
    /// Received packets whose payload was read for their checksum: the device had not vouched for it.
    pub checksummed_received: u64,
    /// Sent packets whose payload was read for their checksum: the device computes none.
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
    /// Frames that were not sent for want of a page.
    pub no_page: u64,
    /// Frames that the device never takes: it has stopped.
    pub refused: u64,
    /// Packets that were dropped because their next hop did not answer.
    pub unresolved: u64,
    /// Segments for listeners that were dropped because the stack has as many connections as it may have, or knows no way back.
    pub no_room: u64,
    /// Acknowledgements that were dropped because the accept queue was full.
    pub accept_overflows: u64,
    /// Received datagrams that were dropped because their socket had no room.
    pub datagrams_dropped: u64,
}

/// A stack over a queue pair. See the [module](self).
pub struct Stack<R: RxQueue<Mem: Mapped>, T: TxQueue<Mem = R::Mem>> {
    rx: R,
    tx: T,
    gro: Gro<Batch<R::Mem>, R::Mem>,
    core: Tables<R::Mem>,
    door: Arc<Door<R::Mem>>,
    /// The descriptors of both queues and the bell.
    set: OwnedFd,
}

/// The tables, which sockets share. Everything in them ends with the stack: sockets that are left return [`SocketError::StackGone`].
struct Tables<M: Mapped>(Rc<RefCell<Core<M>>>);

impl<M: Mapped> Deref for Tables<M> {
    type Target = Rc<RefCell<Core<M>>>;

    fn deref(&self) -> &Rc<RefCell<Core<M>>> {
        &self.0
    }
}

impl<M: Mapped> Drop for Tables<M> {
    fn drop(&mut self) {
        let wakers = self.borrow_mut().end();
        for waker in wakers {
            waker.wake();
        }
    }
}

/// The frames of a poll.
struct Batch<M: Mapped>(Vec<Packet<M>>);

impl<M: Mapped> Handler<M> for Batch<M> {
    #[inline]
    fn pass(&mut self, packet: Packet<M>) {
        self.0.push(packet);
    }
}

impl<R, T> Stack<R, T>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
{
    /// A stack of `host` over a queue pair. `pool` has the pages for headers and for what is copied: it is in memory that the device
    /// reaches.
    ///
    /// # Errors
    ///
    /// The system has no descriptors or no memory for it.
    pub fn new(
        host: &Host<R::Mem>,
        rx: R,
        tx: T,
        pool: Arc<SharedPool<R::Mem>>,
        options: StackOptions,
        now: Time,
    ) -> std::io::Result<Self> {
        let (id, door) = host.enter()?;
        let cuts = [GsoKind::TcpV4, GsoKind::TcpV6].map(|kind| {
            let gso = Gso { kind, size: 1460, headers: 54, ecn: true };
            tx.takes(Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: Some(gso) })
        });
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [rx.as_fd(), tx.as_fd(), door.bell.as_fd()] {
            epoll::add(&set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let core = Core::new(host.clone(), id, Egress::new(pool, cuts), options, now);
        let gro = Gro::new(Batch(Vec::with_capacity(options.receive)));
        Ok(Self { rx, tx, gro, core: Tables(Rc::new(RefCell::new(core))), door, set })
    }

    /// Opens sockets.
    #[must_use]
    pub fn sockets(&self) -> Sockets<R::Mem> {
        Sockets { core: self.core.0.clone() }
    }

    /// Does what is to be done at `now`: takes what the device has sent and received, gives it to connections, fires timers, and sends what
    /// is due. Never blocks. Returns how much there was: not 0 if the next poll may find more.
    ///
    /// Wakers are called at the end, when sockets can be used.
    pub fn poll(&mut self, now: Time) -> usize {
        let Self { rx, tx, gro, core, door, .. } = self;
        let mut guard = core.borrow_mut();
        let core = &mut *guard;
        core.now = core.now.max(now);
        let receive = core.options.receive;
        let rung = usize::from(door.bell.take_rung());
        let work = rx.poll(|poll| {
            let completed = tx.complete();
            let mut work = rung + poll.receive(receive, gro);
            for packet in gro.inner().0.drain(..) {
                core.frame(tx, packet, Origin::Queue);
            }
            for _ in 0..receive {
                let Some(packet) = door.take() else { break };
                core.frame(tx, packet, Origin::Mailbox);
                work += 1;
            }
            for _ in 0..core.egress.loopback.len() {
                let Some(packet) = core.egress.loopback.pop_front() else { break };
                core.frame(tx, packet, Origin::Here);
                work += 1;
            }
            work += core.neighbors(tx);
            work += core.work(tx, completed);
            work += core.send_datagrams(tx);
            // What was just sent may have asked for a neighbour.
            core.neighbors(tx);
            tx.flush();
            work + completed
        });
        let wakers = std::mem::take(&mut core.wakers);
        drop(guard);
        for waker in wakers {
            waker.wake();
        }
        work
    }

    /// When the stack is to be polled although no queue has work; `None` if it can wait for ever. It is now if there is something to send.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let core = self.core.borrow();
        if core.has_work() {
            return Some(core.now);
        }
        [core.next_timer(), core.host.neighbors_due()].into_iter().flatten().min()
    }

    /// By which other threads end the sleep of the thread that drives the stack.
    #[must_use]
    pub fn waker(&self) -> StackWaker<R::Mem> {
        StackWaker(self.door.clone())
    }

    /// The stack's counters.
    #[must_use]
    pub fn stats(&self) -> StackStats {
        self.core.borrow().egress.stats
    }

    /// Connections, with those that are closing.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.core.borrow().slots.len()
    }

    /// Connections in TIME-WAIT.
    #[must_use]
    pub fn connections_in_time_wait(&self) -> usize {
        self.core.borrow().count_time_wait()
    }

    /// Received pages that are counted in the stack's budget: those that wait to be received by users, and those that users hold.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.core.borrow().budget.used()
    }

    /// Has `waker` called when a socket is called. Returns whether one was since the last poll. A task that drives the stack sleeps by this,
    /// because other tasks of its thread call sockets meanwhile; a loop that calls sockets itself does not need it.
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

    /// Ends the stack, and gives its queues back. Connections end without a word; sockets that are left return
    /// [`SocketError::StackGone`]. Dropping a stack does the same, and drops the queues.
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
impl<R: RxQueue<Mem: Mapped>, T: TxQueue<Mem = R::Mem>> AsFd for Stack<R, T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

/// The stack is woken by frames, by other stacks and by a [`StackWaker`], and by the transmit queue if something waits for it. It does not
/// wait if sockets were called since the last poll.
impl<R, T> Wait for Stack<R, T>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
{
    fn arm(&mut self) -> Armed {
        let core = self.core.borrow();
        let (blocked, work) = (core.is_blocked(), core.has_work());
        drop(core);
        let door = &self.door;
        if work || door.bell.arm(|| !door.is_empty()) == Armed::Work {
            return Armed::Work;
        }
        if blocked && self.tx.arm() == Armed::Work {
            door.bell.disarm();
            return Armed::Work;
        }
        if self.rx.arm() == Armed::Work {
            self.tx.disarm();
            door.bell.disarm();
            return Armed::Work;
        }
        Armed::Waits
    }

    fn disarm(&mut self) {
        self.rx.disarm();
        self.tx.disarm();
        self.door.bell.disarm();
    }
}

impl<R: RxQueue<Mem: Mapped>, T: TxQueue<Mem = R::Mem>> fmt::Debug for Stack<R, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = self.core.borrow();
        write!(f, "Stack({} connections, {} pages)", core.slots.len(), core.budget.used())
    }
}

/// By which any thread wakes the thread that drives a stack. The next poll counts the wake-up as work.
pub struct StackWaker<M: Mapped>(Arc<Door<M>>);

impl<M: Mapped> StackWaker<M> {
    /// Ends the sleep of the stack's thread, or the next one if it does not sleep. Cost: two atomic stores, and a system call if it sleeps.
    pub fn wake(&self) {
        self.0.bell.ring();
    }
}

impl<M: Mapped> Clone for StackWaker<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: Mapped> fmt::Debug for StackWaker<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StackWaker")
    }
}
