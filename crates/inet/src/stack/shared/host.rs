//! A host: the data that its stacks share.

use crate::Ports;
use crate::Time;
use crate::icmp::Limiter;
use crate::interface::Interface;
use crate::neighbor::Neighbors;
use crate::route::{RouteError, Routes};
use crate::stack::SavedStream;
use crate::stack::payload::Payload;
use crate::stack::shared::directory::{Directory, StackId};
use crate::stack::shared::notifier::Bell;
use crate::tcp::{Charges, Secret};
use crate::wire::Flow;
use crossbeam_queue::ArrayQueue;
use netmem_packet::Packet;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::task::Wake;

/// The most frames in a mailbox: frames that wait for a stack, and that another stack has received.
/// A further one is dropped, as by a full ring.
const MAILBOX: usize = 512;

/// A time that does not come.
const NEVER: u64 = u64::MAX;

/// A host: its addresses, its routes, and the data that its stacks share. A clone is the same host.
///
/// A host has one interface, the device whose queues its stacks poll. A connection lives on one
/// stack.
///
/// Addresses and routes are static: there is no DHCP, and no autoconfiguration of IPv6.
pub struct Host<P: Payload>(Arc<Shared<P>>);

struct Shared<P: Payload> {
    interface: Arc<Interface>,
    routes: Routes<P::Count>,
    neighbors: Mutex<Neighbors<Packet<P::Mem>>>,
    /// The next deadline of the neighbours, in microseconds.
    neighbors_due: AtomicU64,
    /// How often a neighbour was resolved, or did not answer.
    hop_changes: AtomicU64,
    /// When a stack last sent a cookie, in microseconds. [`NEVER`] if none has.
    cookie_at: AtomicU64,
    limiter: Mutex<Limiter>,
    directory: Directory,
    ports: Ports,
    secret: Secret,
    doors: RwLock<Vec<Arc<Door<P>>>>,
    stacks: AtomicU64,
    /// The device's choice of a queue, if it is known.
    spread: OnceLock<Box<Spread>>,
}

/// The queue by which the device delivers packets of a flow: from a remote address and port to a
/// local one.
type Spread = dyn Fn(SocketAddr, SocketAddr) -> usize + Send + Sync;

/// A frame on its way from stack to stack.
pub(crate) type Handed<P> = (<P as Payload>::Frame, Charges);

/// The part of a stack that other threads use.
pub(crate) struct Door<P: Payload> {
    pub(crate) bell: Bell,
    /// Each frame counts in the budget of the queue that received it.
    mailbox: ArrayQueue<Handed<P>>,
    /// The stack is gone, and takes no frames.
    closed: AtomicBool,
    /// Connections of the stack wait for a next hop.
    pub(crate) awaits_hop: AtomicBool,
}

impl<P: Payload> Door<P> {
    /// A frame that another stack has handed over.
    pub(crate) fn take(&self) -> Option<Handed<P>> {
        self.mailbox.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.mailbox.is_empty()
    }

    /// Puts a frame into the mailbox. Returns false if it is full or closed.
    fn put(&self, frame: Handed<P>) -> bool {
        let put = self.mailbox.push(frame).is_ok();
        // In the order of sequentially consistent operations, either the push comes before the
        // close, or the close before this load. So a frame that the close has not found is found
        // here.
        if self.closed.load(Ordering::SeqCst) {
            self.empty();
            return false;
        }
        put
    }

    /// Closes the mailbox. Its frames are dropped, because their pages belong to pools that may be
    /// about to close.
    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.empty();
    }

    fn empty(&self) {
        while self.mailbox.pop().is_some() {}
    }
}

/// Waking rings the bell.
impl<P: Payload> Wake for Door<P> {
    fn wake(self: Arc<Self>) {
        self.bell.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.bell.ring();
    }
}

impl<P: Payload> Host<P> {
    /// A host with an interface. Routes to the networks of its addresses are there;
    /// [`add_route`](Self::add_route) adds others.
    ///
    /// Draws the secrets of sequence numbers and cookies from the system's random numbers.
    #[must_use]
    pub fn new(interface: Interface) -> Self {
        let random = [RandomState::new(), RandomState::new()].map(|state| state.hash_one(std::process::id()));
        let mut key = [0; 16];
        key[..8].copy_from_slice(&random[0].to_ne_bytes());
        key[8..].copy_from_slice(&random[1].to_ne_bytes());
        let interface = Arc::new(interface);
        Self(Arc::new(Shared {
            routes: Routes::counted(interface.clone()),
            interface,
            neighbors: Mutex::new(Neighbors::new()),
            neighbors_due: AtomicU64::new(NEVER),
            hop_changes: AtomicU64::new(0),
            cookie_at: AtomicU64::new(NEVER),
            limiter: Mutex::new(Limiter::new(Time::ZERO)),
            directory: Directory::new(),
            ports: Ports::default(),
            secret: Secret::new(key),
            doors: RwLock::default(),
            stacks: AtomicU64::new(0),
            spread: OnceLock::new(),
        }))
    }

    /// Adds a route: packets for `network` go to `gateway`, a neighbour. The longest prefix counts.
    ///
    /// # Errors
    ///
    /// [`RouteError`].
    pub fn add_route(&self, network: IpAddr, prefix_len: u8, gateway: IpAddr) -> Result<(), RouteError> {
        self.0.routes.add(network, prefix_len, gateway)
    }

    /// Removes a route. Returns false if there is none.
    pub fn remove_route(&self, network: IpAddr, prefix_len: u8) -> bool {
        self.0.routes.remove(network, prefix_len)
    }

    /// Declares how the device spreads packets over its queues: `queue_of(remote, local)` is the
    /// number of the queue that receives packets from `remote` to `local`. The stack of queue 0 is
    /// the one that was made first. Connections are then opened from a port whose answers arrive by
    /// their own stack's queue, so that no mailbox is needed.
    ///
    /// A wrong answer costs a mailbox, and nothing else. Returns false if it was declared before;
    /// nothing changes then.
    pub fn set_spread(&self, queue_of: impl Fn(SocketAddr, SocketAddr) -> usize + Send + Sync + 'static) -> bool {
        self.0.spread.set(Box::new(queue_of)).is_ok()
    }

    /// Whether packets of a flow arrive by the queue of `stack`, as far as is known.
    pub(crate) fn arrives_at(&self, flow: &Flow, stack: StackId) -> bool {
        self.0.spread.get().is_none_or(|queue_of| queue_of(flow.remote, flow.local) == stack as usize)
    }

    /// Connections of all stacks.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.directory.len()
    }

    /// Reserves the flow of a stream that a stack of this host will
    /// [restore](crate::stack::Sockets::restore): until then its segments are dropped, and not answered by
    /// a reset. For streams that are restored while a stack of the host is polled already.
    pub fn expect(&self, saved: &SavedStream) {
        self.0.directory.expect(saved.flow());
    }

    /// Frees the flow of a stream that was [expected](Self::expect), or saved by this host, and
    /// that no stack restores.
    pub fn give_up(&self, saved: &SavedStream) {
        self.0.directory.give_up(&saved.flow());
    }

    /// How often gets of destination entries had to be repeated: [`Routes::retries`]. For
    /// measurements, and not stable.
    #[cfg(feature = "bench")]
    #[must_use]
    pub fn route_retries(&self) -> u64 {
        self.0.routes.retries()
    }

    /// Whether both are the same host.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Its interface.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        &self.0.interface
    }

    pub(crate) fn routes(&self) -> &Routes<P::Count> {
        &self.0.routes
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.0.directory
    }

    pub(crate) fn ports(&self) -> &Ports {
        &self.0.ports
    }

    pub(crate) fn secret(&self) -> &Secret {
        &self.0.secret
    }

    /// Whether an ICMP error may be sent now.
    pub(crate) fn may_complain(&self, now: Time) -> bool {
        self.0.limiter.lock().unwrap_or_else(PoisonError::into_inner).allow(now)
    }

    /// The neighbours. Call [`neighbors_changed`](Self::neighbors_changed) after a change.
    pub(crate) fn neighbors(&self) -> MutexGuard<'_, Neighbors<Packet<P::Mem>>> {
        self.0.neighbors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes the next deadline of the neighbours.
    pub(crate) fn neighbors_changed(&self, neighbors: &Neighbors<Packet<P::Mem>>, events: bool) {
        let due = if events { Some(0) } else { neighbors.deadline().map(Time::micros) };
        self.0.neighbors_due.store(due.unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// The next deadline of the neighbours.
    pub(crate) fn neighbors_due(&self) -> Option<Time> {
        time(&self.0.neighbors_due)
    }

    /// How often a neighbour was resolved, or did not answer. Connections that wait for one are
    /// tried when this moves.
    pub(crate) fn hop_changes(&self) -> u64 {
        self.0.hop_changes.load(Ordering::SeqCst)
    }

    /// Notes that a neighbour was resolved, or does not answer, and wakes the other stacks that
    /// have connections which wait for one. The stack that finds the change is any of them: the
    /// cache is the host's.
    pub(crate) fn hops_changed(&self, stack: StackId) {
        self.0.hop_changes.fetch_add(1, Ordering::SeqCst);
        let doors = self.0.doors.read().unwrap_or_else(PoisonError::into_inner);
        for (n, door) in doors.iter().enumerate() {
            if n != stack as usize && door.awaits_hop.load(Ordering::SeqCst) {
                door.bell.ring();
            }
        }
    }

    /// When a stack of the host last sent a cookie.
    pub(crate) fn cookie_at(&self) -> Option<Time> {
        time(&self.0.cookie_at)
    }

    /// Notes that a stack has sent a cookie. The segment that returns it can arrive at any stack
    /// that listens.
    pub(crate) fn cookie_sent(&self, at: Time) {
        // Stacks may have different opinions of the present. A moment does not matter: a cookie has
        // its own time.
        self.0.cookie_at.store(at.micros(), Ordering::Relaxed);
    }

    /// Adds a stack.
    pub(crate) fn enter(&self) -> Result<(StackId, Arc<Door<P>>), rustix::io::Errno> {
        let door = Arc::new(Door {
            bell: Bell::new()?,
            mailbox: ArrayQueue::new(MAILBOX),
            closed: AtomicBool::new(false),
            awaits_hop: AtomicBool::new(false),
        });
        let mut doors = self.0.doors.write().unwrap_or_else(PoisonError::into_inner);
        doors.push(door.clone());
        self.0.stacks.store(doors.len() as u64, Ordering::Release);
        Ok((doors.len() as StackId - 1, door))
    }

    /// Whether there is more than one stack.
    pub(crate) fn is_shared(&self) -> bool {
        self.0.stacks.load(Ordering::Acquire) > 1
    }

    /// Removes a stack, and closes its mailbox.
    pub(crate) fn leave(&self, stack: StackId) {
        let doors = self.0.doors.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(door) = doors.get(stack as usize) {
            door.close();
        }
    }

    /// Puts a frame into a stack's mailbox. Returns false if it is full, or the stack is gone.
    pub(crate) fn deliver(&self, stack: StackId, frame: Handed<P>) -> bool {
        let doors = self.0.doors.read().unwrap_or_else(PoisonError::into_inner);
        let Some(door) = doors.get(stack as usize) else { return false };
        let delivered = door.put(frame);
        door.bell.published();
        delivered
    }
}

fn time(at: &AtomicU64) -> Option<Time> {
    Some(at.load(Ordering::Relaxed)).filter(|&at| at != NEVER).map(Time::from_micros)
}

impl<P: Payload> Clone for Host<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Payload> fmt::Debug for Host<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host({}, {} connections)", self.0.interface.mac, self.connections())
    }
}
