//! A host: the data that its stacks share.
//!
//! Why it is shared: the device may deliver a segment, a cookie or an answer of a neighbour to the
//! queue of any stack.

use crate::icmp::Limiter;
use crate::interface::Interface;
use crate::neighbor::Neighbors;
use crate::ports::Ports;
use crate::route::{RouteError, Routes};
use crate::stack::payload::Payload;
use crate::stack::shared::directory::{Directory, StackId};
use crate::stack::shared::mailbox::Mailbox;
use crate::stack::shared::saved::SavedStream;
use crate::tcp::Secret;
use crate::time::Time;
use crate::wire::Flow;
use netmem_packet::Packet;
use rustix::io::Errno;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

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
    mailboxes: RwLock<Vec<Arc<Mailbox<P>>>>,
    stacks: AtomicU64,
    /// The device's choice of a queue, if it is known.
    spread: OnceLock<Box<Spread>>,
}

/// The queue by which the device delivers packets of a flow: from a remote address and port to a
/// local one.
type Spread = dyn Fn(SocketAddr, SocketAddr) -> usize + Send + Sync;

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
            routes: Routes::new(interface.clone()),
            interface,
            neighbors: Mutex::new(Neighbors::new()),
            neighbors_due: AtomicU64::new(NEVER),
            hop_changes: AtomicU64::new(0),
            cookie_at: AtomicU64::new(NEVER),
            limiter: Mutex::new(Limiter::new(Time::ZERO)),
            directory: Directory::new(),
            ports: Ports::default(),
            secret: Secret::new(key),
            mailboxes: RwLock::default(),
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
    /// [restore](crate::stack::Sockets::restore): until then its segments are dropped, and not
    /// answered by a reset. For streams that are restored while a stack of the host is polled
    /// already.
    pub fn expect(&self, saved: &SavedStream) {
        self.0.directory.expect(saved.flow());
    }

    /// Frees the flow of a stream that was [expected](Self::expect), or saved by this host, and
    /// that no stack restores.
    pub fn give_up(&self, saved: &SavedStream) {
        self.0.directory.give_up(&saved.flow());
    }

    /// How often gets of destination entries had to be repeated: `Routes::retries`. For
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

    /// Whether an ICMP message may be sent now, by its rate.
    pub(crate) fn allows_icmp(&self, now: Time) -> bool {
        self.0.limiter.lock().unwrap_or_else(PoisonError::into_inner).allow(now)
    }

    /// The neighbours. Call [`neighbors_changed`](Self::neighbors_changed) after a change.
    pub(crate) fn neighbors(&self) -> MutexGuard<'_, Neighbors<Packet<P::Mem>>> {
        self.0.neighbors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes the next deadline of the neighbours.
    pub(crate) fn neighbors_changed(&self, neighbors: &Neighbors<Packet<P::Mem>>, events: bool) {
        let due = if events { Some(0) } else { neighbors.poll_timeout().map(Time::micros) };
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

    /// A neighbour was resolved, or does not answer: notifies the other stacks that have
    /// connections which wait for one. The stack that finds the change is any of them, because the
    /// cache is the host's.
    pub(crate) fn handle_hop_change(&self, stack: StackId) {
        self.0.hop_changes.fetch_add(1, Ordering::SeqCst);
        for (n, mailbox) in self.mailboxes().iter().enumerate() {
            if n != stack as usize && mailbox.awaits_hop() {
                mailbox.notifier.notify();
            }
        }
    }

    fn mailboxes(&self) -> RwLockReadGuard<'_, Vec<Arc<Mailbox<P>>>> {
        self.0.mailboxes.read().unwrap_or_else(PoisonError::into_inner)
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
    pub(crate) fn enter(&self) -> Result<(StackId, Arc<Mailbox<P>>), Errno> {
        let mailbox = Arc::new(Mailbox::new()?);
        let mut mailboxes = self.0.mailboxes.write().unwrap_or_else(PoisonError::into_inner);
        mailboxes.push(mailbox.clone());
        self.0.stacks.store(mailboxes.len() as u64, Ordering::Release);
        Ok((mailboxes.len() as StackId - 1, mailbox))
    }

    /// Whether there is more than one stack.
    pub(crate) fn is_shared(&self) -> bool {
        self.0.stacks.load(Ordering::Acquire) > 1
    }

    /// Removes a stack, and closes its mailbox.
    pub(crate) fn leave(&self, stack: StackId) {
        if let Some(mailbox) = self.mailboxes().get(stack as usize) {
            mailbox.close();
        }
    }

    /// The mailbox of a stack, which may be gone.
    pub(crate) fn mailbox(&self, stack: StackId) -> Option<Arc<Mailbox<P>>> {
        self.mailboxes().get(stack as usize).cloned()
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
