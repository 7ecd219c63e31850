//! A destination: what a sender needs for its packets. Users of an entry share what is learned
//! about its path MTU.

use crate::neighbor::Hop;
use crate::time::Time;
use netmem_refs::{Count, RcuCell, RcuRef};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a path MTU is used before a longer packet is tried again (RFC 8201).
pub(super) const PATH_MTU_AGE: Duration = Duration::from_secs(600);

/// The least path MTU of IPv4. Links with a smaller MTU are not in use any more, and a forged error
/// with a smaller value would cost throughput.
pub(crate) const MIN_PATH_MTU_V4: u16 = 552;
/// The least path MTU of IPv6: every link carries packets of this length (RFC 8200).
pub(crate) const MIN_PATH_MTU_V6: u16 = 1280;

/// A destination. `C` counts the references.
pub(crate) struct Dst<C: Count = RcuRef> {
    pub(super) destination: IpAddr,
    pub(super) source: IpAddr,
    /// `None` for an address of this station.
    pub(super) hop: Option<Arc<Hop>>,
    /// The MTU of the first link.
    pub(super) mtu: u16,
    /// The generation of the routes from which it was made.
    pub(super) generation: u64,
    /// What routers have reported about segments.
    pub(super) path_mtu: PathMtu,
    /// What routers have reported about datagrams. An error about a datagram is easier to forge
    /// than one about a segment, so it does not change the segments of connections.
    pub(super) datagram_mtu: PathMtu,
    /// When it was last looked up, to the second.
    pub(super) used: AtomicU64,
    /// The next one in the bucket.
    pub(super) next: RcuCell<Self, C>,
}

impl<C: Count> Dst<C> {
    /// The destination.
    pub(crate) fn destination(&self) -> IpAddr {
        self.destination
    }

    /// The address of this station to send from, if the user has not chosen another.
    pub(crate) fn source(&self) -> IpAddr {
        self.source
    }

    /// The neighbour to send to. `None` for an address of this station: what is sent there is
    /// received here.
    #[inline]
    pub(crate) fn hop(&self) -> Option<&Arc<Hop>> {
        self.hop.as_ref()
    }

    /// Bytes of the longest IP packet that fits all links of the path, as far as is known. One
    /// load.
    #[inline]
    pub(crate) fn path_mtu(&self, now: Time) -> u16 {
        self.path_mtu.get(now).map_or(self.mtu, |mtu| self.mtu.min(mtu))
    }

    /// As [`path_mtu`](Self::path_mtu), for datagrams: errors about datagrams count, too. Two
    /// loads.
    pub(crate) fn datagram_mtu(&self, now: Time) -> u16 {
        let mtu = self.path_mtu(now);
        self.datagram_mtu.get(now).map_or(mtu, |datagrams| mtu.min(datagrams))
    }

    /// Records that a router has reported a path MTU of `mtu` bytes. The caller has checked that
    /// the error is about a segment in flight. Values below [`MIN_PATH_MTU_V4`] and
    /// [`MIN_PATH_MTU_V6`] count as those. Returns whether the path MTU is smaller than before.
    ///
    /// It is forgotten after 10 minutes.
    pub(crate) fn too_big(&self, mtu: u32, now: Time) -> bool {
        let mtu = self.at_least(mtu);
        let smaller = mtu < self.path_mtu(now);
        if smaller {
            self.path_mtu.set(mtu, now);
        }
        smaller
    }

    /// As [`too_big`](Self::too_big), for datagrams: the caller has checked that such a datagram
    /// was sent lately. Connections do not use what is recorded here.
    pub(crate) fn datagram_too_big(&self, mtu: u32, now: Time) -> bool {
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
    pub(super) fn touch(&self, now: Time) {
        if now.since(Time::from_micros(self.used.load(Ordering::Relaxed))) >= Duration::from_secs(1) {
            self.used.store(now.micros(), Ordering::Relaxed);
        }
    }
}

/// The path MTU in the upper 16 bits, and the time in milliseconds until which it is used; 0 if
/// none is known.
pub(super) struct PathMtu(AtomicU64);

impl PathMtu {
    pub(super) const fn unknown() -> Self {
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
