//! Routes, and the cache of destinations.
//!
//! ```text
//!   find(destination)
//!     bucket ──► Dst ──► Dst ──► Dst       in a critical section; at most 8 in a bucket, so 16384 in all
//!       hit: a reference is taken          no lock, and nothing shared is written but the count
//!       miss: longest prefix               under a lock; a new Dst is put at the end of the bucket
//! ```
//!
//! A [`Dst`] has what a sender needs for a destination: the source address, the neighbour, and the
//! longest packet. [`RcuRef`] counts its references, because it is found by lookup, has many users
//! (connections and replies), and is often made and dropped.
//!
//! **A socket caches its entry**, and asks for each use whether it is still current: one load of a
//! number that all entries share ([`Routes::is_current`]). That number, the *generation*, changes
//! when a route is added or removed. A neighbour's Ethernet address and the path MTU change more
//! often. They are in the entry, where all its users see them. So no packet of a peer changes the
//! generation.
//!
//! **Entries are replaced.** A full bucket drops the entry that was looked up the longest ago. Its
//! users go on using it, because it is right as long as the generation is. Users that look the
//! destination up later get a new entry, and do not share what was learned about the path MTU. The
//! release of an entry costs a barrier on all CPUs, some microseconds. If a peer forges more
//! senders than the buckets have room for, each of them costs such a release.
//!
//! **Cache lines.** The pointers' allocation keeps the count on a line of its own. A get or put by
//! another CPU takes only that line away; the members that are read after a get are on other lines.
//!
//! **Readers against writers.** An entry is taken out of its bucket in two steps: its place is
//! emptied, then filled with the rest of the chain. A reader in between finds the chain cut,
//! misses, and looks again under the lock. A reader that has passed into an entry that is being
//! taken out finds its `next` empty, and does the same. So a lookup never misses an entry that is
//! there, and each found entry was in the bucket at some moment of the lookup.

use crate::Time;
use crate::interface::Interface;
use crate::neighbor::Hop;
use netmem_refs::{Borrowed, Count, NoMemory, Owner, RcuCell, RcuRef, Ref, rcu};
use prefix_trie::PrefixMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Buckets of destinations. A power of two.
const BUCKETS: usize = 2048;
/// Destinations in a bucket.
const DEPTH: usize = 8;
/// How long a path MTU is used before a longer packet is tried again (RFC 8201).
const PATH_MTU_AGE: Duration = Duration::from_secs(600);

/// The least path MTU of IPv4. Links with a smaller MTU are not in use any more, and a forged error
/// with a smaller value would cost throughput.
pub const MIN_PATH_MTU_V4: u16 = 552;
/// The least path MTU of IPv6: every link carries packets of this length (RFC 8200).
pub const MIN_PATH_MTU_V6: u16 = 1280;

/// Why a destination cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoRoute {
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

/// A destination. `C` counts the references.
pub struct Dst<C: Count = RcuRef> {
    destination: IpAddr,
    source: IpAddr,
    /// `None` for an address of this station.
    hop: Option<Arc<Hop>>,
    /// The MTU of the first link.
    mtu: u16,
    /// The generation of the routes from which it was made.
    generation: u64,
    /// What routers have reported about segments.
    path_mtu: PathMtu,
    /// What routers have reported about datagrams. An error about a datagram is easier to forge
    /// than one about a segment, so it does not change the segments of connections.
    datagram_mtu: PathMtu,
    /// When it was last looked up, to the second.
    used: AtomicU64,
    /// The next one in the bucket.
    next: RcuCell<Self, C>,
}

impl<C: Count> Dst<C> {
    /// The destination.
    #[must_use]
    pub fn destination(&self) -> IpAddr {
        self.destination
    }

    /// The address of this station to send from, if the user has not chosen another.
    #[must_use]
    pub fn source(&self) -> IpAddr {
        self.source
    }

    /// The neighbour to send to. `None` for an address of this station: what is sent there is
    /// received here.
    #[inline]
    #[must_use]
    pub fn hop(&self) -> Option<&Arc<Hop>> {
        self.hop.as_ref()
    }

    /// Bytes of the longest IP packet that fits all links of the path, as far as is known. One
    /// load.
    #[inline]
    #[must_use]
    pub fn path_mtu(&self, now: Time) -> u16 {
        self.path_mtu.get(now).map_or(self.mtu, |mtu| self.mtu.min(mtu))
    }

    /// As [`path_mtu`](Self::path_mtu), for datagrams: errors about datagrams count, too. Two
    /// loads.
    #[must_use]
    pub fn datagram_mtu(&self, now: Time) -> u16 {
        let mtu = self.path_mtu(now);
        self.datagram_mtu.get(now).map_or(mtu, |datagrams| mtu.min(datagrams))
    }

    /// Records that a router has reported a path MTU of `mtu` bytes. The caller has checked that
    /// the error is about a segment in flight. Values below [`MIN_PATH_MTU_V4`] and
    /// [`MIN_PATH_MTU_V6`] count as those. Returns whether the path MTU is smaller than before.
    ///
    /// It is forgotten after 10 minutes.
    pub fn too_big(&self, mtu: u32, now: Time) -> bool {
        let mtu = self.at_least(mtu);
        let smaller = mtu < self.path_mtu(now);
        if smaller {
            self.path_mtu.set(mtu, now);
        }
        smaller
    }

    /// As [`too_big`](Self::too_big), for datagrams: the caller has checked that such a datagram
    /// was sent lately. Connections do not use what is recorded here.
    pub fn datagram_too_big(&self, mtu: u32, now: Time) -> bool {
        let mtu = self.at_least(mtu);
        let smaller = mtu < self.datagram_mtu(now);
        if smaller {
            self.datagram_mtu.set(mtu, now);
        }
        smaller
    }

    fn at_least(&self, mtu: u32) -> u16 {
        let floor = if self.destination.is_ipv4() { MIN_PATH_MTU_V4 } else { MIN_PATH_MTU_V6 };
        u16::try_from(mtu).unwrap_or(u16::MAX).max(floor)
    }

    #[inline]
    fn touch(&self, now: Time) {
        if now.since(Time::from_micros(self.used.load(Ordering::Relaxed))) >= Duration::from_secs(1) {
            self.used.store(now.micros(), Ordering::Relaxed);
        }
    }
}

/// The path MTU in the upper 16 bits, and the time in milliseconds until which it is used; 0 if
/// none is known.
struct PathMtu(AtomicU64);

impl PathMtu {
    const fn unknown() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    fn get(&self, now: Time) -> Option<u16> {
        let word = self.0.load(Ordering::Relaxed);
        (word != 0 && millis(now) < word & MILLIS).then_some((word >> 48) as u16)
    }

    fn set(&self, mtu: u16, now: Time) {
        let until = millis(now + PATH_MTU_AGE) & MILLIS;
        self.0.store(u64::from(mtu) << 48 | until, Ordering::Relaxed);
    }
}

/// The lower 48 bits: milliseconds of 8900 years.
const MILLIS: u64 = (1 << 48) - 1;

fn millis(time: Time) -> u64 {
    time.micros() / 1000
}

impl<C: Count> fmt::Debug for Dst<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hop = self.hop.as_ref().map(|hop| hop.addr());
        let Self { destination, source, .. } = self;
        write!(f, "Dst({destination} from {source} by {hop:?}, generation {})", self.generation)
    }
}

/// Where a route leads.
#[derive(Clone, Copy, Debug)]
enum Via {
    /// The destination is on the link.
    Link,
    Gateway(IpAddr),
}

#[derive(Debug, Default)]
struct Tables {
    v4: PrefixMap<(u32, u8), Via>,
    v6: PrefixMap<(u128, u8), Via>,
}

impl Tables {
    fn longest(&self, destination: IpAddr) -> Option<Via> {
        match destination {
            IpAddr::V4(addr) => self.v4.get_lpm(&(addr.to_bits(), 32)).map(|(_, &via)| via),
            IpAddr::V6(addr) => self.v6.get_lpm(&(addr.to_bits(), 128)).map(|(_, &via)| via),
        }
    }

    fn get_mut(&mut self, network: IpAddr, prefix_len: u8) -> Option<&mut Via> {
        match network {
            IpAddr::V4(addr) => self.v4.get_mut(&(addr.to_bits(), prefix_len)),
            IpAddr::V6(addr) => self.v6.get_mut(&(addr.to_bits(), prefix_len)),
        }
    }

    fn insert(&mut self, network: IpAddr, prefix_len: u8, via: Via) {
        match network {
            IpAddr::V4(addr) => drop(self.v4.insert((addr.to_bits(), prefix_len), via)),
            IpAddr::V6(addr) => drop(self.v6.insert((addr.to_bits(), prefix_len), via)),
        }
    }

    fn remove(&mut self, network: IpAddr, prefix_len: u8) {
        match network {
            IpAddr::V4(addr) => drop(self.v4.remove(&(addr.to_bits(), prefix_len))),
            IpAddr::V6(addr) => drop(self.v6.remove(&(addr.to_bits(), prefix_len))),
        }
    }
}

/// The routes of a station and its cache of destinations, for all threads.
///
/// `C` counts the references of destinations. It is [`RcuRef`], except in benchmarks that compare
/// counts.
pub struct Routes<C: Count = RcuRef> {
    interface: Arc<Interface>,
    generation: AtomicU64,
    buckets: Box<[RcuCell<Dst<C>, C>]>,
    /// Also serialises writers of the buckets.
    tables: Mutex<Tables>,
    hasher: RandomState,
    /// How often gets had to be repeated. [`RcuRef`] never repeats one.
    #[cfg(feature = "bench")]
    retries: AtomicU64,
}

impl Routes<RcuRef> {
    /// The networks of the interface's addresses.
    #[must_use]
    pub fn new(interface: Arc<Interface>) -> Self {
        Self::counted(interface)
    }
}

impl<C: Count> Routes<C> {
    /// As [`new`](Routes::new), with another count.
    #[must_use]
    pub fn counted(interface: Arc<Interface>) -> Self {
        Self::with_buckets(interface, BUCKETS)
    }

    fn with_buckets(interface: Arc<Interface>, buckets: usize) -> Self {
        let mut tables = Tables::default();
        for own in &interface.addresses {
            tables.insert(own.addr, own.bits(), Via::Link);
        }
        let buckets = (0..buckets).map(|_| RcuCell::default()).collect();
        let (generation, tables) = (AtomicU64::new(0), Mutex::new(tables));
        Self {
            interface,
            generation,
            buckets,
            tables,
            hasher: RandomState::new(),
            #[cfg(feature = "bench")]
            retries: AtomicU64::new(0),
        }
    }

    /// The interface that all routes lead to.
    #[must_use]
    pub fn interface(&self) -> &Arc<Interface> {
        &self.interface
    }

    /// Adds a route through a gateway, or replaces its gateway. The default route has a prefix of 0
    /// bits. Moves the generation.
    ///
    /// # Errors
    ///
    /// [`RouteError`].
    pub fn add(&self, network: IpAddr, prefix_len: u8, gateway: IpAddr) -> Result<(), RouteError> {
        if prefix_len > if network.is_ipv4() { 32 } else { 128 } {
            return Err(RouteError::Prefix { network, prefix_len });
        }
        let neighbor = self.interface.is_neighbor(gateway) && !self.interface.owns(gateway);
        if !neighbor || network.is_ipv4() != gateway.is_ipv4() {
            return Err(RouteError::Gateway { network, gateway });
        }
        self.change(|tables| tables.insert(network, prefix_len, Via::Gateway(gateway)));
        Ok(())
    }

    /// Removes a route through a gateway; returns false if there is none. Moves the generation.
    pub fn remove(&self, network: IpAddr, prefix_len: u8) -> bool {
        if prefix_len > if network.is_ipv4() { 32 } else { 128 } {
            return false;
        }
        let mut found = false;
        self.change(|tables| {
            found = matches!(tables.get_mut(network, prefix_len), Some(Via::Gateway(_)));
            if found {
                tables.remove(network, prefix_len);
                // An address of the interface may be in the same network.
                let same = |own: &&crate::Address| {
                    let network = crate::Address { addr: network, prefix_len };
                    own.bits() == prefix_len && network.has(own.addr)
                };
                if let Some(own) = self.interface.addresses.iter().find(same) {
                    tables.insert(own.addr, own.bits(), Via::Link);
                }
            }
        });
        found
    }

    /// How often the compare-and-swap of a get had to be repeated, in all lookups. Only a
    /// [`RefCount`](netmem_refs::RefCount) has one. For measurements, and not stable.
    #[cfg(feature = "bench")]
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// A number that moves with each change of routes.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether an entry that was found earlier is still current. If not, look the destination up
    /// again. One load.
    #[inline]
    #[must_use]
    pub fn is_current(&self, dst: &Dst<C>) -> bool {
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
    pub fn find(
        &self,
        destination: IpAddr,
        now: Time,
        hop: impl Fn(IpAddr) -> Arc<Hop>,
    ) -> Result<Ref<Dst<C>, C>, NoRoute> {
        match self.look(destination, now) {
            Some(found) => Ok(found),
            None => self.make(destination, now, hop),
        }
    }

    /// Whether packets can be sent to `destination`: a lookup of the route, which makes no entry.
    /// It is for answers to packets of which a peer can send any number. One lock.
    #[must_use]
    pub fn reaches(&self, destination: IpAddr) -> bool {
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
    fn look(&self, destination: IpAddr, now: Time) -> Option<Ref<Dst<C>, C>> {
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
                let tables = self.lock();
                (if local { Some(Via::Link) } else { tables.longest(destination) }, self.generation())
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
        // The section ends after the lock is free, and what is taken out is dropped then, too: this
        // thread may release objects that other threads have retired, and their destructors may
        // call this function.
        rcu::read(|guard| {
            let _tables = self.lock();
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
    fn change(&self, change: impl FnOnce(&mut Tables)) {
        let mut tables = self.lock();
        change(&mut tables);
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes an entry out of its chain. The caller has the lock.
fn unlink<C: Count>(cell: &RcuCell<Dst<C>, C>) -> Option<Owner<Dst<C>, C>> {
    let taken = cell.take()?;
    cell.store(taken.next.take());
    Some(taken)
}

impl<C: Count> fmt::Debug for Routes<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = self.lock();
        let routes = tables.v4.len() + tables.v6.len();
        f.debug_struct("Routes")
            .field("routes", &routes)
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Address;
    use crate::neighbor::Neighbors;
    use crate::wire::{Arp, Mac};
    use netmem_refs::{PercpuRef, RefCount};
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::thread;

    const NOW: Time = Time::from_micros(1_000_000_000);

    fn ip(addr: &str) -> IpAddr {
        addr.parse().unwrap()
    }

    fn interface() -> Arc<Interface> {
        let addresses = [("10.0.0.1", 8), ("192.0.2.1", 24), ("2001:db8::1", 64), ("fe80::1", 64)];
        let addresses = addresses.map(|(addr, prefix_len)| Address { addr: ip(addr), prefix_len }).into();
        Arc::new(Interface { mac: Mac([2, 0, 0, 0, 0, 1]), mtu: 1500, addresses })
    }

    fn find<C: Count>(routes: &Routes<C>, destination: &str) -> Result<Ref<Dst<C>, C>, NoRoute> {
        routes.find(ip(destination), NOW, Hop::new)
    }

    /// The neighbour and the source address on the way to a destination.
    fn way(routes: &Routes, destination: &str) -> (String, String) {
        let dst = find(routes, destination).unwrap();
        (dst.hop().map_or(String::new(), |hop| hop.addr().to_string()), dst.source().to_string())
    }

    fn is(via: &str, source: &str) -> (String, String) {
        (via.into(), source.into())
    }

    #[test]
    fn the_longest_prefix_leads_the_way() {
        let routes = Routes::new(interface());
        assert_eq!(way(&routes, "10.9.9.9"), is("10.9.9.9", "10.0.0.1"));
        assert_eq!(way(&routes, "192.0.2.7"), is("192.0.2.7", "192.0.2.1"));
        assert_eq!(way(&routes, "192.0.2.1"), is("", "192.0.2.1"), "our own");
        assert_eq!(find(&routes, "198.51.100.1").err(), Some(NoRoute::Unreachable(ip("198.51.100.1"))));
        routes.add(ip("0.0.0.0"), 0, ip("10.0.0.254")).unwrap();
        routes.add(ip("198.51.0.0"), 16, ip("192.0.2.254")).unwrap();
        // Bits behind the prefix do not count.
        routes.add(ip("198.51.100.77"), 24, ip("192.0.2.253")).unwrap();
        assert_eq!(way(&routes, "8.8.8.8"), is("10.0.0.254", "10.0.0.1"));
        assert_eq!(way(&routes, "198.51.1.1"), is("192.0.2.254", "192.0.2.1"));
        assert_eq!(way(&routes, "198.51.100.1"), is("192.0.2.253", "192.0.2.1"));
        assert!(routes.remove(ip("198.51.100.0"), 24) && !routes.remove(ip("198.51.100.0"), 24));
        assert_eq!(way(&routes, "198.51.100.1"), is("192.0.2.254", "192.0.2.1"));
        // The network of an address comes back when a route in its place is removed, and cannot be
        // removed itself.
        routes.add(ip("192.0.2.0"), 24, ip("10.0.0.254")).unwrap();
        assert_eq!(way(&routes, "192.0.2.7").0, "10.0.0.254");
        assert!(routes.remove(ip("192.0.2.0"), 24) && !routes.remove(ip("192.0.2.0"), 24));
        assert_eq!(way(&routes, "192.0.2.7").0, "192.0.2.7");
        // IPv6, by a gateway that is known by its link-local address.
        assert!(find(&routes, "2001:db8:1::1").is_err());
        routes.add(ip("::"), 0, ip("fe80::2")).unwrap();
        assert_eq!(way(&routes, "2001:db8:1::1"), is("fe80::2", "2001:db8::1"));
        assert_eq!(way(&routes, "fe80::9"), is("fe80::9", "fe80::1"));
        for group in ["224.0.0.1", "255.255.255.255", "10.255.255.255", "192.0.2.255", "ff02::1", "0.0.0.0", "::"] {
            assert_eq!(find(&routes, group).err(), Some(NoRoute::Group(ip(group))));
        }
        let wrong =
            |network: &str, prefix_len, gateway: &str| routes.add(ip(network), prefix_len, ip(gateway)).is_err();
        assert!(
            wrong("0.0.0.0", 33, "10.0.0.254") && wrong("0.0.0.0", 0, "11.0.0.1") && wrong("0.0.0.0", 0, "10.0.0.1")
        );
        assert!(wrong("::", 0, "10.0.0.254"));
    }

    /// A cached entry is current until routes change. A neighbour's new address and a path MTU are
    /// seen by all its users, and leave the generation alone. Proves REF-8.
    #[test]
    fn only_routes_move_the_generation() {
        let interface = interface();
        let routes = Routes::new(interface.clone());
        let neighbors = Mutex::new(Neighbors::<()>::new());
        let find = || routes.find(ip("10.0.0.2"), NOW, |next| neighbors.lock().unwrap().hop(next, NOW)).unwrap();
        let (first, second) = (find(), find());
        let same = |a: &Ref<Dst, RcuRef>, b: &Ref<Dst, RcuRef>| Ref::ptr_eq(a, b);
        assert!(same(&first, &second));
        let generation = routes.generation();
        for mac in [2, 3] {
            let hop = first.hop().unwrap();
            let _ = neighbors.lock().unwrap().resolve(hop, NOW);
            let mac = Mac([2, 0, 0, 0, 0, mac]);
            let (sender, target) = (Ipv4Addr::new(10, 0, 0, 2), Ipv4Addr::new(10, 0, 0, 1));
            let arp = Arp { request: false, mac, sender, target, target_mac: interface.mac };
            let later = NOW + Duration::from_secs(u64::from(mac.0[5]) * 10);
            neighbors.lock().unwrap().handle_arp(&arp, &interface, later);
            let _ = neighbors.lock().unwrap().resolve(hop, later);
            assert_eq!(second.hop().unwrap().mac(), Some(mac));
        }
        assert!(first.too_big(1400, NOW));
        assert_eq!((second.path_mtu(NOW), find().path_mtu(NOW)), (1400, 1400));
        assert!(routes.generation() == generation && routes.is_current(&first) && same(&first, &find()));
        routes.add(ip("0.0.0.0"), 0, ip("10.0.0.254")).unwrap();
        assert!(!routes.is_current(&first) && !same(&first, &find()));
    }

    /// Proves that a path MTU has a floor, only becomes smaller, and is forgotten.
    #[test]
    fn a_path_mtu_has_a_floor_and_an_end() {
        let routes = Routes::new(interface());
        for (destination, floor) in [("10.0.0.2", MIN_PATH_MTU_V4), ("2001:db8::2", MIN_PATH_MTU_V6)] {
            let dst = find(&routes, destination).unwrap();
            assert!(!dst.too_big(1500, NOW) && !dst.too_big(70_000, NOW) && dst.path_mtu(NOW) == 1500);
            assert!(dst.too_big(1400, NOW) && !dst.too_big(1450, NOW) && dst.path_mtu(NOW) == 1400);
            assert!(dst.too_big(0, NOW) && dst.path_mtu(NOW) == floor);
            let before_end = NOW + (PATH_MTU_AGE - Duration::from_millis(1));
            assert_eq!((dst.path_mtu(before_end), dst.path_mtu(NOW + PATH_MTU_AGE)), (floor, 1500));
        }
    }

    /// Any number of destinations takes no more than the buckets have room for, and the last ones
    /// are found. Proves NET-10.
    #[test]
    fn destinations_are_bounded() {
        let routes = Routes::new(interface());
        let hop = Hop::new(ip("10.0.0.2"));
        let find = |n: u32, now: Time| {
            let destination = Ipv4Addr::from_bits(0x0a01_0000 + n);
            routes.find(destination.into(), now, |_| hop.clone()).unwrap()
        };
        let n = 40_000;
        (0..n).for_each(|at| drop(find(at, NOW + Duration::from_secs(at.into()))));
        let deepest = routes.buckets.iter().map(depth).max();
        assert_eq!(deepest, Some(DEPTH));
        let kept = |at: u32| routes.look(Ipv4Addr::from_bits(0x0a01_0000 + at).into(), NOW).is_some();
        assert!((n - 2000..n).all(kept) && (0..2000).filter(|&at| kept(at)).count() < 200);
        drop(routes);
        released(&[hop]);
    }

    fn depth<C: Count>(bucket: &RcuCell<Dst<C>, C>) -> usize {
        rcu::read(|guard| {
            let (mut at, mut depth) = (bucket.load(guard), 0);
            while let Some(found) = at {
                (at, depth) = (Borrowed::value(found).next.load(guard), depth + 1);
            }
            depth
        })
    }

    /// Returns when all entries with these hops are gone. Sections of other tests delay that.
    fn released(hops: &[Arc<Hop>]) {
        while hops.iter().any(|hop| Arc::strong_count(hop) > 1) {
            rcu::flush();
            thread::yield_now();
        }
    }

    /// Threads look up few destinations while another changes routes. Each gets an entry of its
    /// destination; one that is current when it was found says what the routes of its generation
    /// say; and all entries are gone in the end.
    fn lookups_against_changes<C: Count>() {
        // Two buckets, so that entries are replaced all the time.
        let routes = Arc::new(Routes::<C>::with_buckets(interface(), 2));
        let gateways = [Hop::new(ip("10.0.0.254")), Hop::new(ip("10.0.0.253"))];
        routes.add(ip("0.0.0.0"), 0, gateways[0].addr()).unwrap();
        let (done, found) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            let lookers: Vec<_> = (0..3_u64)
                .map(|seed| {
                    let (routes, gateways, done, found) = (&routes, &gateways, &done, &found);
                    scope.spawn(move || {
                        let mut rng = fastrand::Rng::with_seed(seed);
                        let mut cached: Option<Ref<Dst<C>, C>> = None;
                        while !done.load(Ordering::Relaxed) {
                            let destination = IpAddr::from([8, 8, 8, rng.u8(..20)]);
                            let hop = |via| gateways.iter().find(|hop| hop.addr() == via).unwrap().clone();
                            let dst = routes.find(destination, NOW, hop).unwrap();
                            assert_eq!(dst.destination(), destination);
                            let parity = usize::from(!dst.generation.is_multiple_of(2));
                            assert_eq!(dst.hop().unwrap().addr(), gateways[1 - parity].addr());
                            found.fetch_add(1, Ordering::Relaxed);
                            if let Some(old) = cached.replace(dst) {
                                let _ = (old.path_mtu(NOW), routes.is_current(&old), old.hop().unwrap().mac());
                            }
                        }
                    })
                })
                .collect();
            // The generation is odd with the first gateway.
            for changed in 1..=100 {
                routes.add(ip("0.0.0.0"), 0, gateways[changed % 2].addr()).unwrap();
                // If no looking thread is left, there is no more progress.
                while found.load(Ordering::Relaxed) < changed * 50 && !lookers.iter().all(|looker| looker.is_finished())
                {
                    thread::yield_now();
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        drop(routes);
        released(&gateways);
    }

    #[test]
    fn lookups_against_changes_with_each_count() {
        lookups_against_changes::<RcuRef>();
        lookups_against_changes::<RefCount>();
        lookups_against_changes::<PercpuRef>();
    }
}
