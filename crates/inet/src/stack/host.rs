//! What the stacks of a host share.

use super::bell::Bell;
use super::directory::{Directory, StackId};
use crate::Ports;
use crate::Time;
use crate::icmp::Limiter;
use crate::interface::Interface;
use crate::neighbor::Neighbors;
use crate::route::{RouteError, Routes};
use crate::tcp::Secret;
use crossbeam_queue::ArrayQueue;
use netmem_packet::Packet;
use netmem_pool::Mapped;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Frames that wait for a stack which another one received for it. One more is dropped, as a full ring drops it.
const MAILBOX: usize = 512;

/// A host: its addresses and routes, and what its stacks share. A clone is the same host.
///
/// A host has one interface, the device whose queues its stacks drive. Stacks share nothing else: a connection lives on one of them.
///
/// Addresses and routes are static: there is no DHCP, and no autoconfiguration of IPv6.
pub struct Host<M: Mapped>(Arc<Shared<M>>);

struct Shared<M: Mapped> {
    interface: Arc<Interface>,
    routes: Routes,
    neighbors: Mutex<Neighbors<Packet<M>>>,
    /// When the neighbours are to be looked at, in microseconds.
    neighbors_due: AtomicU64,
    limiter: Mutex<Limiter>,
    directory: Directory,
    ports: Ports,
    secret: Secret,
    doors: RwLock<Vec<Arc<Door<M>>>>,
    stacks: AtomicU64,
}

/// By which other threads reach a stack.
pub(super) struct Door<M: Mapped> {
    pub(super) bell: Bell,
    mailbox: ArrayQueue<Packet<M>>,
}

impl<M: Mapped> Door<M> {
    /// A frame that another stack has handed over.
    pub(super) fn take(&self) -> Option<Packet<M>> {
        self.mailbox.pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.mailbox.is_empty()
    }
}

impl<M: Mapped> Host<M> {
    /// A host with an interface. Routes to the networks of its addresses are there; [`add_route`](Self::add_route) adds others.
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
            neighbors_due: AtomicU64::new(u64::MAX),
            limiter: Mutex::new(Limiter::new(Time::ZERO)),
            directory: Directory::new(),
            ports: Ports::default(),
            secret: Secret::new(key),
            doors: RwLock::default(),
            stacks: AtomicU64::new(0),
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

    /// Removes a route. False if there is none.
    pub fn remove_route(&self, network: IpAddr, prefix_len: u8) -> bool {
        self.0.routes.remove(network, prefix_len)
    }

    /// Connections of all stacks.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.directory.len()
    }

    /// Whether both are the same host.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Its interface.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        &self.0.interface
    }

    pub(super) fn routes(&self) -> &Routes {
        &self.0.routes
    }

    pub(super) fn directory(&self) -> &Directory {
        &self.0.directory
    }

    pub(super) fn ports(&self) -> &Ports {
        &self.0.ports
    }

    pub(super) fn secret(&self) -> &Secret {
        &self.0.secret
    }

    /// Whether an ICMP error may be sent now.
    pub(super) fn may_complain(&self, now: Time) -> bool {
        self.0.limiter.lock().unwrap_or_else(PoisonError::into_inner).allow(now)
    }

    /// The neighbours. Call [`neighbors_changed`](Self::neighbors_changed) after a change.
    pub(super) fn neighbors(&self) -> MutexGuard<'_, Neighbors<Packet<M>>> {
        self.0.neighbors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes when the neighbours are to be looked at.
    pub(super) fn neighbors_changed(&self, neighbors: &Neighbors<Packet<M>>, events: bool) {
        let due = if events { Some(0) } else { neighbors.deadline().map(Time::micros) };
        self.0.neighbors_due.store(due.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// When the neighbours are to be looked at.
    pub(super) fn neighbors_due(&self) -> Option<Time> {
        Some(self.0.neighbors_due.load(Ordering::Relaxed)).filter(|&at| at != u64::MAX).map(Time::from_micros)
    }

    /// Adds a stack.
    pub(super) fn enter(&self) -> Result<(StackId, Arc<Door<M>>), rustix::io::Errno> {
        let door = Arc::new(Door { bell: Bell::new()?, mailbox: ArrayQueue::new(MAILBOX) });
        let mut doors = self.0.doors.write().unwrap_or_else(PoisonError::into_inner);
        doors.push(door.clone());
        self.0.stacks.store(doors.len() as u64, Ordering::Release);
        Ok((doors.len() as StackId - 1, door))
    }

    /// Whether there is more than one stack.
    pub(super) fn is_shared(&self) -> bool {
        self.0.stacks.load(Ordering::Acquire) > 1
    }

    /// Puts a frame into a stack's mailbox. False if it is full.
    pub(super) fn deliver(&self, stack: StackId, packet: Packet<M>) -> bool {
        let doors = self.0.doors.read().unwrap_or_else(PoisonError::into_inner);
        let Some(door) = doors.get(stack as usize) else { return false };
        let delivered = door.mailbox.push(packet).is_ok();
        door.bell.published();
        delivered
    }
}

impl<M: Mapped> Clone for Host<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: Mapped> fmt::Debug for Host<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host({}, {} connections)", self.0.interface.mac, self.connections())
    }
}
