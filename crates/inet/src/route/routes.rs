//! The routes of a station, and its cache of destinations. [The module](super) has the theory.

use crate::interface::{Address, Interface};
use crate::neighbor::Hop;
use crate::route::dst::{Dst, PathMtu};
use crate::route::prefixes::{Prefixes, Via};
use crate::time::Time;
use netmem_refs::{Borrowed, Count, NoMemory, Owner, RcuCell, RcuRef, Ref, rcu};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Buckets of destinations. A power of two.
const BUCKETS: usize = 2048;
/// Destinations in a bucket.
pub(super) const DEPTH: usize = 8;

/// Why a destination cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum NoRoute {
    /// No route leads there.
    #[error("no route to {0}; add one, or an address in its network")]
    Unreachable(IpAddr),
    /// It is the address of a group.
    #[error("{0} is the address of a group; packets are sent to single stations only")]
    Group(IpAddr),
    /// There is no memory for the entry's count.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// Why a route was not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// A prefix longer than an address.
    #[error("{network}/{prefix_len}: an address has not so many bits")]
    Prefix {
        /// The network.
        network: IpAddr,
        /// The length of its prefix.
        prefix_len: u8,
    },
    /// The gateway is not on the link, of the other family, or this station.
    #[error("{gateway} is no neighbour of this station in the family of {network}")]
    Gateway {
        /// The network.
        network: IpAddr,
        /// The gateway.
        gateway: IpAddr,
    },
}

/// The routes of a station and its cache of destinations, for all threads.
///
/// `C` counts the references of destinations. It is [`RcuRef`], except in benchmarks that compare
/// counts.
pub(crate) struct Routes<C: Count = RcuRef> {
    interface: Arc<Interface>,
    generation: AtomicU64,
    pub(super) buckets: Box<[RcuCell<Dst<C>, C>]>,
    /// Also serialises writers of the buckets.
    prefixes: Mutex<Prefixes>,
    hasher: RandomState,
    /// How often gets had to be repeated. [`RcuRef`] never repeats one.
    #[cfg(feature = "bench")]
    retries: AtomicU64,
}

impl<C: Count> Routes<C> {
    /// The networks of the interface's addresses.
    pub(crate) fn new(interface: Arc<Interface>) -> Self {
        Self::with_buckets(interface, BUCKETS)
    }

    pub(super) fn with_buckets(interface: Arc<Interface>, buckets: usize) -> Self {
        let mut prefixes = Prefixes::default();
        for own in &interface.addresses {
            prefixes.insert(own.addr, own.bits(), Via::Link);
        }
        let buckets = (0..buckets).map(|_| RcuCell::default()).collect();
        let (generation, prefixes) = (AtomicU64::new(0), Mutex::new(prefixes));
        Self {
            interface,
            generation,
            buckets,
            prefixes,
            hasher: RandomState::new(),
            #[cfg(feature = "bench")]
            retries: AtomicU64::new(0),
        }
    }

    /// Adds a route through a gateway, or replaces its gateway. The default route has a prefix of 0
    /// bits. Moves the generation.
    ///
    /// # Errors
    ///
    /// [`RouteError`].
    pub(crate) fn add(&self, network: IpAddr, prefix_len: u8, gateway: IpAddr) -> Result<(), RouteError> {
        if prefix_len > if network.is_ipv4() { 32 } else { 128 } {
            return Err(RouteError::Prefix { network, prefix_len });
        }
        let neighbor = self.interface.is_neighbor(gateway) && !self.interface.owns(gateway);
        if !neighbor || network.is_ipv4() != gateway.is_ipv4() {
            return Err(RouteError::Gateway { network, gateway });
        }
        self.change(|prefixes| prefixes.insert(network, prefix_len, Via::Gateway(gateway)));
        Ok(())
    }

    /// Removes a route through a gateway; returns false if there is none. Moves the generation.
    pub(crate) fn remove(&self, network: IpAddr, prefix_len: u8) -> bool {
        if prefix_len > if network.is_ipv4() { 32 } else { 128 } {
            return false;
        }
        let mut found = false;
        self.change(|prefixes| {
            found = matches!(prefixes.get_mut(network, prefix_len), Some(Via::Gateway(_)));
            if found {
                prefixes.remove(network, prefix_len);
                // An address of the interface may be in the same network.
                let same = |own: &&Address| {
                    let network = Address { addr: network, prefix_len };
                    own.bits() == prefix_len && network.has(own.addr)
                };
                if let Some(own) = self.interface.addresses.iter().find(same) {
                    prefixes.insert(own.addr, own.bits(), Via::Link);
                }
            }
        });
        found
    }

    /// How often the compare-and-swap of a get had to be repeated, in all lookups. Only a
    /// [`RefCount`](netmem_refs::RefCount) has one. For measurements, and not stable.
    #[cfg(feature = "bench")]
    pub(crate) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// A number that moves with each change of routes.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether an entry that was found earlier is still current. If not, look the destination up
    /// again. One load.
    #[inline]
    pub(crate) fn is_current(&self, dst: &Dst<C>) -> bool {
        dst.generation == self.generation()
    }

    /// The entry of a destination. `hop` makes the neighbour's part, if there is no entry yet: see
    /// [`Neighbors::hop`](crate::neighbor::Neighbors::hop). No lock of this type is held then.
    ///
    /// Costs a critical section, a hash, a get of the count, and on a miss a lock and an
    /// allocation.
    ///
    /// # Errors
    ///
    /// [`NoRoute`].
    #[inline]
    pub(crate) fn find(
        &self,
        destination: IpAddr,
        now: Time,
        hop: impl Fn(IpAddr) -> Arc<Hop>,
    ) -> Result<Ref<Dst<C>, C>, NoRoute> {
        match self.lookup(destination, now) {
            Some(found) => Ok(found),
            None => self.make(destination, now, hop),
        }
    }

    /// Whether packets can be sent to `destination`: a lookup of the route, which makes no entry.
    /// It is for answers to packets of which a peer can send any number. One lock.
    pub(crate) fn reaches(&self, destination: IpAddr) -> bool {
        !self.is_group(destination) && !self.interface.owns(destination) && self.lock().longest(destination).is_some()
    }

    /// Whether it is the address of several stations, or of none.
    fn is_group(&self, destination: IpAddr) -> bool {
        let group = match destination {
            IpAddr::V4(addr) => addr.is_broadcast() || addr.is_unspecified(),
            IpAddr::V6(addr) => addr.is_unspecified(),
        };
        group || destination.is_multicast() || self.interface.is_broadcast(destination)
    }

    fn bucket(&self, destination: IpAddr) -> &RcuCell<Dst<C>, C> {
        &self.buckets[self.hasher.hash_one(destination) as usize % self.buckets.len()]
    }

    #[cfg(feature = "bench")]
    #[inline]
    fn get_counting(&self, found: Borrowed<'_, Dst<C>, C>) -> Option<Ref<Dst<C>, C>> {
        let (got, retries) = Borrowed::try_get_live_counting(found);
        if retries > 0 {
            self.retries.fetch_add(retries.into(), Ordering::Relaxed);
        }
        got.ok()
    }

    #[inline]
    pub(super) fn lookup(&self, destination: IpAddr, now: Time) -> Option<Ref<Dst<C>, C>> {
        let generation = self.generation();
        rcu::read(|guard| {
            let mut at = self.bucket(destination).load(guard);
            while let Some(found) = at {
                if found.destination == destination && found.generation == generation {
                    found.touch(now);
                    // The entry may have been removed meanwhile, and its last reference put.
                    #[cfg(feature = "bench")]
                    return self.get_counting(found);
                    #[cfg(not(feature = "bench"))]
                    return Borrowed::try_get_live(found).ok();
                }
                at = Borrowed::value(found).next.load(guard);
            }
            None
        })
    }

    #[cold]
    fn make(
        &self,
        destination: IpAddr,
        now: Time,
        hop: impl Fn(IpAddr) -> Arc<Hop>,
    ) -> Result<Ref<Dst<C>, C>, NoRoute> {
        if self.is_group(destination) {
            return Err(NoRoute::Group(destination));
        }
        let unreachable = NoRoute::Unreachable(destination);
        let local = self.interface.owns(destination);
        loop {
            let (via, generation) = {
                let prefixes = self.lock();
                (if local { Some(Via::Link) } else { prefixes.longest(destination) }, self.generation())
            };
            let via = match via.ok_or(unreachable)? {
                Via::Link => destination,
                Via::Gateway(gateway) => gateway,
            };
            let dst = Owner::try_new(Dst {
                destination,
                source: self.interface.source(destination, via).ok_or(unreachable)?,
                hop: (!local).then(|| hop(via)),
                mtu: self.interface.mtu,
                generation,
                path_mtu: PathMtu::unknown(),
                datagram_mtu: PathMtu::unknown(),
                used: AtomicU64::new(now.micros()),
                next: RcuCell::default(),
            })?;
            if let Some(dst) = self.insert(dst) {
                return Ok(dst);
            }
        }
    }

    /// Puts an entry into its bucket, and returns a reference to it, or to one that another thread
    /// has put there. `None` if routes have changed since it was made.
    fn insert(&self, dst: Owner<Dst<C>, C>) -> Option<Ref<Dst<C>, C>> {
        let mut old = Vec::new();
        // The section ends after the lock is free, and removed entries are dropped then, too: this
        // thread may release objects that other threads have retired, and their destructors may
        // call this function.
        rcu::read(|guard| {
            let _prefixes = self.lock();
            if dst.generation != self.generation() {
                return None;
            }
            let bucket = self.bucket(dst.destination);
            let (mut cell, mut depth, mut oldest) = (bucket, 0, None);
            while let Some(found) = cell.load(guard) {
                if found.generation != dst.generation {
                    old.extend(unlink(cell));
                    continue;
                }
                if found.destination == dst.destination {
                    return Borrowed::try_get_live(found).ok();
                }
                let used = found.used.load(Ordering::Relaxed);
                if oldest.is_none_or(|(_, before)| used < before) {
                    oldest = Some((cell, used));
                }
                depth += 1;
                cell = &Borrowed::value(found).next;
            }
            if let Some((oldest, _)) = oldest.filter(|_| depth == DEPTH) {
                old.extend(unlink(oldest));
                cell = bucket;
                while let Some(found) = cell.load(guard) {
                    cell = &Borrowed::value(found).next;
                }
            }
            let found = Owner::get(&dst);
            cell.store(Some(dst));
            Some(found)
        })
    }

    /// Changes routes. Entries of the generation before stay in their buckets until another is put
    /// there, and are not found.
    fn change(&self, change: impl FnOnce(&mut Prefixes)) {
        let mut prefixes = self.lock();
        change(&mut prefixes);
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Prefixes> {
        self.prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes an entry from its chain. The caller holds the lock.
fn unlink<C: Count>(cell: &RcuCell<Dst<C>, C>) -> Option<Owner<Dst<C>, C>> {
    let taken = cell.take()?;
    cell.store(taken.next.take());
    Some(taken)
}

impl<C: Count> fmt::Debug for Routes<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefixes = self.lock();
        let routes = prefixes.len();
        f.debug_struct("Routes")
            .field("routes", &routes)
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}
