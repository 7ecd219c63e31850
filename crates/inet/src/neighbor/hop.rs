//! A neighbour, as senders see it: they read its Ethernet address for each frame without a lock.

use crate::time::Time;
use crate::wire::Mac;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// For so long after traffic with a neighbour its entry is not replaced. Replacing an entry that is
/// used less often costs its next packet a solicitation.
pub const IN_USE: Duration = Duration::from_secs(5);

/// A neighbour, as the cache and senders share it. 64 bytes.
#[derive(Debug)]
pub struct Hop {
    pub(super) addr: IpAddr,
    /// The Ethernet address in the lower 48 bits, and [`USABLE`].
    mac: AtomicU64,
    /// When a sender last knew that the neighbour receives.
    pub(super) confirmed: AtomicU64,
    /// When a sender last used the address.
    used: AtomicU64,
}

/// A flag next to the address: senders may use it without asking the cache.
const USABLE: u64 = 1 << 63;

impl Hop {
    pub(crate) fn new(addr: IpAddr) -> Arc<Self> {
        Arc::new(Self { addr, mac: AtomicU64::new(0), confirmed: AtomicU64::new(0), used: AtomicU64::new(0) })
    }

    /// The IP address.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.addr
    }

    /// The Ethernet address, if the cache need not be called. One load.
    ///
    /// If the address changes at this moment, the frame goes to the old address, as it would have a
    /// moment before.
    #[inline]
    #[must_use]
    pub fn mac(&self) -> Option<Mac> {
        let word = self.mac.load(Ordering::Relaxed);
        (word & USABLE != 0).then(|| {
            let [_, _, a, b, c, d, e, f] = word.to_be_bytes();
            Mac([a, b, c, d, e, f])
        })
    }

    /// Confirms that the neighbour receives frames; for example, it has acknowledged new data. The
    /// cache then need not solicit it. One load, and at most one store a second.
    #[inline]
    pub fn confirm(&self, now: Time) {
        touch(&self.confirmed, now);
    }

    /// Notes that there is traffic with the neighbour. Its entry is then not replaced for
    /// [`IN_USE`]. One load, and at most one store a second.
    #[inline]
    pub fn touch(&self, now: Time) {
        touch(&self.used, now);
    }

    /// Whether there was traffic lately.
    pub(super) fn is_in_use(&self, now: Time) -> bool {
        let lately = |at: &AtomicU64| {
            let at = at.load(Ordering::Relaxed);
            at > 0 && now.since(Time::from_micros(at)) < IN_USE
        };
        lately(&self.used) || lately(&self.confirmed)
    }

    pub(super) fn set(&self, mac: Option<Mac>) {
        let word = mac.map_or(0, |Mac([a, b, c, d, e, f])| USABLE | u64::from_be_bytes([0, 0, a, b, c, d, e, f]));
        self.mac.store(word, Ordering::Relaxed);
    }
}

/// Sets `at` to the present if it is more than a second old, or was never set.
#[inline]
fn touch(at: &AtomicU64, now: Time) {
    let before = at.load(Ordering::Relaxed);
    if before == 0 || now.micros_since(Time::from_micros(before)) >= 1_000_000 {
        at.store(now.micros().max(1), Ordering::Relaxed);
    }
}
