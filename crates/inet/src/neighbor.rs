//! The cache of neighbours: the Ethernet addresses of the IP addresses on the link (RFC 826, RFC
//! 4861).
//!
//! ```text
//!                    resolve                answered                       30 s without a confirmation
//!   (not known) ──────────────► Incomplete ───────────► Reachable ◄────────────────────────┐
//!        ▲                        │ 3 questions            │  30 s                         │
//!        │ 1 s                    ▼                        ▼                answered, or   │
//!      Failed ◄────────────────── ┴ ◄── Probe ◄── Delay ◄── Stale           confirmed      │
//!                        3 questions      │   5 s    │ used  ▲                            │
//!                                         │          │       └── heard of, not asked for  │
//!                                         └──────────┴───────────────────────────────────┘
//! ```
//!
//! Users of a neighbour share a [`Hop`] with the cache. It has the Ethernet address, which a sender
//! reads for each frame without a lock, if the cache has marked it as usable. If not, the sender
//! asks the cache ([`Neighbors::resolve`]), under the lock that protects it.
//!
//! The cache returns [`Event`]s, which its owner carries out. All that a neighbour can make grow is
//! bounded: entries, packets that wait for an answer, and questions, of which there is one a second
//! for each entry.
//!
//! **A full cache** replaces entries that carry no traffic. Traffic is what a user marks as such
//! ([`Hop::touch`]) or has acknowledged ([`Hop::confirm`]); the answer to the first packet of a
//! station is none. If no entry near the hand of the clock is without traffic for [`IN_USE`], a new
//! neighbour is refused.

use crate::Time;
use crate::interface::Interface;
use crate::wire::{Advertisement, Arp, Ip, Mac, Solicitation};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Entries of a cache.
pub const MAX_NEIGHBORS: usize = 1024;
/// Packets that wait for one neighbour's address.
pub const MAX_WAITING: usize = 8;
/// Packets that wait for addresses, of all neighbours.
pub const MAX_WAITING_IN_ALL: usize = 256;
/// For so long after traffic with a neighbour its entry is not replaced. Replacing an entry that is
/// used less often costs its next packet a question.
pub const IN_USE: Duration = Duration::from_secs(5);
/// Entries that are looked at for one that can be replaced.
const LOOK: usize = 64;

/// The time between two questions (`RETRANS_TIMER`), and the time for which a failure is
/// remembered.
const RETRY: Duration = Duration::from_secs(1);
/// Questions until a neighbour has failed (`MAX_MULTICAST_SOLICIT`, `MAX_UNICAST_SOLICIT`).
const QUESTIONS: u8 = 3;
/// How long a neighbour counts as reachable after it was confirmed (`REACHABLE_TIME`). A random
/// factor is applied to it.
const REACHABLE: Duration = Duration::from_secs(30);
/// How long a stale neighbour is used before it is asked (`DELAY_FIRST_PROBE_TIME`).
const DELAY: Duration = Duration::from_secs(5);
/// A new address is not replaced for so long, so that two stations with the same IP address cannot
/// make it change all the time.
const LOCKED: Duration = Duration::from_secs(1);

/// A neighbour, as the cache and senders share it. 64 bytes.
#[derive(Debug)]
pub struct Hop {
    addr: IpAddr,
    /// The Ethernet address in the lower 48 bits, and [`USABLE`].
    mac: AtomicU64,
    /// When a sender last knew that the neighbour receives.
    confirmed: AtomicU64,
    /// When a sender last used the address.
    used: AtomicU64,
}

/// A flag beside the address: senders may use it without asking the cache.
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

    /// The Ethernet address, if the cache need not be asked. One load.
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
    /// cache then need not ask it. One load, and at most one store a second.
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
    fn is_in_use(&self, now: Time) -> bool {
        let lately = |at: &AtomicU64| {
            let at = at.load(Ordering::Relaxed);
            at > 0 && now.since(Time::from_micros(at)) < IN_USE
        };
        lately(&self.used) || lately(&self.confirmed)
    }

    fn set(&self, mac: Option<Mac>) {
        let word = mac.map_or(0, |Mac([a, b, c, d, e, f])| USABLE | u64::from_be_bytes([0, 0, a, b, c, d, e, f]));
        self.mac.store(word, Ordering::Relaxed);
    }
}

/// Sets `at` to the present if it is more than a second old, or was never set.
#[inline]
fn touch(at: &AtomicU64, now: Time) {
    let before = at.load(Ordering::Relaxed);
    if before == 0 || now.since(Time::from_micros(before)) >= Duration::from_secs(1) {
        at.store(now.micros().max(1), Ordering::Relaxed);
    }
}

/// The answer to a question for a neighbour's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// It is this.
    Known(Mac),
    /// It was asked for.
    Pending,
    /// No station answered. It will be asked for again, not before a second has passed. Or the
    /// cache has no room for it.
    Failed,
}

/// What happens to a packet for a neighbour.
#[derive(Debug, PartialEq, Eq)]
pub enum Sent<P> {
    /// It can be sent, to this address.
    Now(Mac, P),
    /// It waits for the neighbour's address. If too many packets wait for this neighbour, its
    /// oldest is taken out and returned here.
    Queued(Option<P>),
    /// The neighbour does not answer, or too many packets wait for others.
    Failed(P),
}

/// An action that the cache asks for, or a change that it reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<P> {
    /// Send what [`Interface::ask`] writes.
    Ask {
        /// The IP address that the question is for.
        target: IpAddr,
        /// The station to ask; `None` for all.
        at: Option<Mac>,
    },
    /// The address is known. The waiting packets must be sent to it.
    Resolved {
        /// The neighbour.
        addr: IpAddr,
        /// Its address.
        mac: Mac,
        /// Packets that waited for it, the oldest first.
        packets: VecDeque<P>,
    },
    /// The neighbour does not answer, or there were too many neighbours.
    Failed {
        /// The neighbour.
        addr: IpAddr,
        /// Packets that waited for it.
        packets: VecDeque<P>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The address is being asked for, and so many questions were sent.
    Incomplete(u8),
    /// The neighbour was heard, or confirmed, not long ago.
    Reachable,
    /// It may have changed. It is not asked before it is used.
    Stale,
    /// It was used, and may still be confirmed before it is asked.
    Delay,
    /// It is being asked, and so many questions were sent.
    Probe(u8),
    /// It did not answer.
    Failed,
}

#[derive(Debug)]
struct Entry<P> {
    hop: Arc<Hop>,
    mac: Mac,
    state: State,
    /// When the state changes by itself.
    due: Option<Time>,
    /// When the address was last set.
    learned: Time,
    /// When it was last asked for, or heard of.
    used: Time,
    waiting: VecDeque<P>,
}

/// The cache of neighbours. `P` is a packet that waits for an address.
#[derive(Debug)]
pub struct Neighbors<P> {
    entries: Vec<Entry<P>>,
    index: HashMap<IpAddr, usize>,
    events: VecDeque<Event<P>>,
    /// No entry is due before.
    due: Option<Time>,
    /// The place at which the search for an entry to replace continues.
    hand: usize,
    /// Packets that wait, in all entries.
    waiting: usize,
}

impl<P> Default for Neighbors<P> {
    fn default() -> Self {
        Self { entries: Vec::new(), index: HashMap::new(), events: VecDeque::new(), due: None, hand: 0, waiting: 0 }
    }
}

impl<P> Neighbors<P> {
    /// An empty cache. Allocates nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The part of the neighbour with that address that senders share. The address is not asked for
    /// before it is [resolved](Self::resolve).
    pub fn hop(&mut self, addr: IpAddr, now: Time) -> Arc<Hop> {
        match self.entry(addr, now, None) {
            Some(at) => self.entries[at].hop.clone(),
            None => Hop::new(addr),
        }
    }

    /// The neighbour's address. Asks for it if it is not known; the question is an [`Event`]. Costs
    /// a lookup. If a sender has the address from [`Hop::mac`], it need not call this.
    pub fn resolve(&mut self, hop: &Arc<Hop>, now: Time) -> Resolution {
        let Some(at) = self.entry(hop.addr, now, Some(hop)) else { return Resolution::Failed };
        let entry = &mut self.entries[at];
        entry.used = now;
        match entry.state {
            State::Reachable | State::Delay | State::Probe(_) => Resolution::Known(entry.mac),
            State::Stale => {
                let mac = entry.mac;
                entry.hop.set(Some(mac));
                self.becomes(at, State::Delay, Some(now + DELAY));
                Resolution::Known(mac)
            }
            State::Incomplete(0) => {
                self.ask(at, 1, now);
                Resolution::Pending
            }
            State::Incomplete(_) => Resolution::Pending,
            State::Failed if entry.due.is_some_and(|due| now < due) => Resolution::Failed,
            State::Failed => {
                self.ask(at, 1, now);
                Resolution::Pending
            }
        }
    }

    /// Sends a packet to a neighbour, or keeps it until the neighbour's address is known, among at
    /// most [`MAX_WAITING`], and [`MAX_WAITING_IN_ALL`] of all neighbours.
    pub fn send(&mut self, hop: &Arc<Hop>, packet: P, now: Time) -> Sent<P> {
        match self.resolve(hop, now) {
            Resolution::Known(mac) => Sent::Now(mac, packet),
            Resolution::Failed => Sent::Failed(packet),
            Resolution::Pending => {
                // `resolve` has made the entry.
                let Some(&at) = self.index.get(&hop.addr) else { return Sent::Failed(packet) };
                let waiting = &mut self.entries[at].waiting;
                let oldest = if waiting.len() == MAX_WAITING { waiting.pop_front() } else { None };
                if oldest.is_none() && self.waiting == MAX_WAITING_IN_ALL {
                    return Sent::Failed(packet);
                }
                self.waiting += usize::from(oldest.is_none());
                waiting.push_back(packet);
                Sent::Queued(oldest)
            }
        }
    }

    /// A request or a reply was received. A request for an address of `interface` makes an entry,
    /// because an answer will be sent there; other messages only change entries that exist.
    pub fn handle_arp(&mut self, arp: &Arp, interface: &Interface, now: Time) {
        let sender = IpAddr::V4(arp.sender);
        if !interface.is_neighbor(sender) || interface.owns(sender) {
            return;
        }
        let for_us = interface.owns(arp.target.into());
        if for_us && arp.request {
            self.entry(sender, now, None);
        }
        self.heard(sender, arp.mac, for_us && !arp.request, true, now);
    }

    /// A neighbour asked for an address of `interface`, and told its own.
    pub fn handle_solicitation(&mut self, ip: &Ip, asked: &Solicitation, interface: &Interface, now: Time) {
        let known = interface.is_neighbor(ip.source) && !interface.owns(ip.source);
        if let Some(mac) = asked.mac.filter(|_| known && interface.owns(asked.target.into())) {
            self.entry(ip.source, now, None);
            self.heard(ip.source, mac, false, true, now);
        }
    }

    /// A neighbour told its address. Makes no entry.
    pub fn handle_advertisement(&mut self, said: &Advertisement, interface: &Interface, now: Time) {
        let target = IpAddr::V6(said.target);
        if interface.owns(target) {
            return;
        }
        match said.mac {
            Some(mac) => self.heard(target, mac, said.solicited, said.overrides, now),
            // An answer to a question that was sent to one station may leave the address out.
            None => {
                if let Some(&at) = self.index.get(&target)
                    && said.solicited
                    && let State::Probe(_) | State::Delay = self.entries[at].state
                {
                    self.reachable(at, now);
                }
            }
        }
    }

    /// A neighbour has reported its address `mac`. `answer` says that it answers a question of this
    /// station; `overrides`, that it replaces an earlier address.
    fn heard(&mut self, addr: IpAddr, mac: Mac, answer: bool, overrides: bool, now: Time) {
        let Some(&at) = self.index.get(&addr) else { return };
        if !mac.is_unicast() {
            return;
        }
        let entry = &mut self.entries[at];
        entry.used = now;
        let known = !matches!(entry.state, State::Incomplete(_) | State::Failed);
        let other = known && entry.mac != mac;
        if other && (!overrides || now.since(entry.learned) < LOCKED) {
            // There are two stations with this address, or one has moved. The known address is
            // used, and asked again.
            if entry.state == State::Reachable {
                entry.hop.set(None);
                self.becomes(at, State::Stale, None);
            }
            return;
        }
        if other || !known {
            (entry.mac, entry.learned) = (mac, now);
        }
        // An answer counts only if there was a question, because any station can forge a reply.
        let asked = matches!(entry.state, State::Incomplete(1..) | State::Probe(_));
        if answer && asked {
            self.reachable(at, now);
        } else if other || !known {
            entry.hop.set(None);
            self.becomes(at, State::Stale, None);
        }
        if !known {
            let packets = self.take_waiting(at);
            if !packets.is_empty() {
                // They use it now.
                let hop = self.entries[at].hop.clone();
                let _ = self.resolve(&hop, now);
            }
            self.events.push_back(Event::Resolved { addr, mac, packets });
        }
    }

    /// The first moment at which [`handle_timeout`](Self::handle_timeout) has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.due
    }

    /// Changes the states that are due. Costs a look at all entries if one may be due, else a
    /// comparison.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        for at in 0..self.entries.len() {
            let entry = &mut self.entries[at];
            if entry.due.is_none_or(|due| now < due) {
                continue;
            }
            let confirmed = Time::from_micros(entry.hop.confirmed.load(Ordering::Relaxed));
            let is_confirmed = confirmed > entry.learned && now.since(confirmed) < spread(entry);
            match entry.state {
                State::Reachable | State::Delay | State::Probe(_) if is_confirmed => {
                    let due = confirmed + spread(entry);
                    self.becomes(at, State::Reachable, Some(due));
                }
                State::Incomplete(n) | State::Probe(n) if n < QUESTIONS => self.ask(at, n + 1, now),
                State::Incomplete(_) | State::Probe(_) => self.failed(at, now),
                State::Reachable => {
                    entry.hop.set(None);
                    self.becomes(at, State::Stale, None);
                }
                State::Delay => {
                    entry.state = State::Probe(0);
                    self.ask(at, 1, now);
                }
                State::Stale | State::Failed => entry.due = None,
            }
        }
        self.due = self.entries.iter().filter_map(|entry| entry.due).min();
    }

    /// The next event, the oldest first. Must be called until there is none, after every call of
    /// another method.
    pub fn poll_event(&mut self) -> Option<Event<P>> {
        self.events.pop_front()
    }

    fn becomes(&mut self, at: usize, state: State, due: Option<Time>) {
        let entry = &mut self.entries[at];
        (entry.state, entry.due) = (state, due);
        self.due = [self.due, due].into_iter().flatten().min();
    }

    fn reachable(&mut self, at: usize, now: Time) {
        let entry = &self.entries[at];
        entry.hop.set(Some(entry.mac));
        let due = now + spread(entry);
        self.becomes(at, State::Reachable, Some(due));
    }

    /// Asks for the `n`-th time.
    fn ask(&mut self, at: usize, n: u8, now: Time) {
        let entry = &self.entries[at];
        let (state, station) = match entry.state {
            State::Probe(_) => (State::Probe(n), Some(entry.mac)),
            _ => (State::Incomplete(n), None),
        };
        self.events.push_back(Event::Ask { target: entry.hop.addr, at: station });
        self.becomes(at, state, Some(now + RETRY));
    }

    fn failed(&mut self, at: usize, now: Time) {
        let entry = &mut self.entries[at];
        entry.hop.set(None);
        let addr = entry.hop.addr;
        let packets = self.take_waiting(at);
        self.events.push_back(Event::Failed { addr, packets });
        self.becomes(at, State::Failed, Some(now + RETRY));
    }

    fn take_waiting(&mut self, at: usize) -> VecDeque<P> {
        let packets = std::mem::take(&mut self.entries[at].waiting);
        self.waiting -= packets.len();
        packets
    }

    /// The entry of an address, made if there is none, with `hop` if users have one already. `None`
    /// if the cache is full of neighbours that are in use.
    fn entry(&mut self, addr: IpAddr, now: Time, hop: Option<&Arc<Hop>>) -> Option<usize> {
        if let Some(&at) = self.index.get(&addr) {
            // If an entry was replaced meanwhile, its users still have its hop, which stays empty.
            // They ask the cache each time.
            return Some(at);
        }
        let hop = hop.cloned().unwrap_or_else(|| Hop::new(addr));
        let (mac, state, waiting) = (Mac::default(), State::Incomplete(0), VecDeque::new());
        let entry = Entry { hop, mac, state, due: None, learned: now, used: now, waiting };
        if self.entries.len() < MAX_NEIGHBORS {
            self.entries.push(entry);
            self.index.insert(addr, self.entries.len() - 1);
            return Some(self.entries.len() - 1);
        }
        let at = self.victim(now)?;
        let packets = self.take_waiting(at);
        let old = std::mem::replace(&mut self.entries[at], entry);
        old.hop.set(None);
        self.index.remove(&old.hop.addr);
        self.index.insert(addr, at);
        if !packets.is_empty() || matches!(old.state, State::Incomplete(1..)) {
            self.events.push_back(Event::Failed { addr: old.hop.addr, packets });
        }
        Some(at)
    }

    /// The entry to be replaced: of the next 16 that are not in use, one without users if there is
    /// any, and of those the one that was used the longest ago.
    fn victim(&mut self, now: Time) -> Option<usize> {
        let len = self.entries.len();
        let near = (self.hand..self.hand + LOOK).map(|at| at % len);
        self.hand = (self.hand + LOOK) % len;
        let next = near.filter(|&at| !self.entries[at].hop.is_in_use(now)).take(16);
        let worth = |at: &usize| (Arc::strong_count(&self.entries[*at].hop) > 1, self.entries[*at].used);
        next.min_by_key(worth)
    }
}

/// How long a neighbour is reachable: from half to one and a half times [`REACHABLE`], so that not
/// all are asked at the same time.
fn spread<P>(entry: &Entry<P>) -> Duration {
    let [.., a, b] = entry.mac.0;
    REACHABLE / 2 + REACHABLE * u32::from(a ^ b) / 255
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interface::Address;
    use std::net::Ipv4Addr;

    const US: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 3]);
    const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
    const THEIRS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

    fn interface() -> Interface {
        Interface { mac: US, mtu: 1500, addresses: vec![Address { addr: OWN.into(), prefix_len: 8 }] }
    }

    fn at(seconds: f64) -> Time {
        Time::from_micros((seconds * 1e6) as u64)
    }

    fn reply(mac: Mac) -> Arp {
        Arp { request: false, mac, sender: THEIRS, target: OWN, target_mac: US }
    }

    fn request(mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Arp {
        Arp { request: true, mac, sender, target, target_mac: Mac::default() }
    }

    fn events<P>(neighbors: &mut Neighbors<P>) -> Vec<Event<P>> {
        std::iter::from_fn(|| neighbors.poll_event()).collect()
    }

    fn ask(at: Option<Mac>) -> Event<u32> {
        Event::Ask { target: THEIRS.into(), at }
    }

    /// Runs all timers that are due, and returns the events with their times.
    fn run(neighbors: &mut Neighbors<u32>, until: f64) -> Vec<(f64, Event<u32>)> {
        let mut out = Vec::new();
        while let Some(due) = neighbors.poll_timeout().filter(|&due| due <= at(until)) {
            neighbors.handle_timeout(due);
            assert!(neighbors.poll_timeout().is_none_or(|next| next > due), "a deadline that does not move");
            out.extend(events(neighbors).into_iter().map(|event| (due.micros() as f64 / 1e6, event)));
        }
        out
    }

    /// A cache in which the peer answered at 0.
    fn resolved() -> (Neighbors<u32>, Arc<Hop>) {
        let mut neighbors = Neighbors::new();
        let hop = neighbors.hop(THEIRS.into(), at(0.0));
        assert_eq!((events(&mut neighbors), hop.mac()), (vec![], None), "nothing is asked before it is used");
        assert_eq!(neighbors.resolve(&hop, at(0.0)), Resolution::Pending);
        assert_eq!(neighbors.resolve(&hop, at(0.1)), Resolution::Pending);
        assert_eq!(events(&mut neighbors), [ask(None)]);
        neighbors.handle_arp(&reply(PEER), &interface(), at(0.2));
        let found = Event::Resolved { addr: THEIRS.into(), mac: PEER, packets: VecDeque::new() };
        assert_eq!(events(&mut neighbors), [found]);
        assert_eq!((hop.mac(), neighbors.resolve(&hop, at(0.2))), (Some(PEER), Resolution::Known(PEER)));
        (neighbors, hop)
    }

    #[test]
    fn a_neighbour_that_does_not_answer_fails_and_is_asked_again_later() {
        let mut neighbors = Neighbors::new();
        let hop = neighbors.hop(THEIRS.into(), at(0.0));
        assert_eq!(neighbors.send(&hop, 1, at(0.0)), Sent::Queued(None));
        assert_eq!(events(&mut neighbors), [ask(None)]);
        let failed = Event::Failed { addr: THEIRS.into(), packets: [1].into() };
        assert_eq!(run(&mut neighbors, 3.5), [(1.0, ask(None)), (2.0, ask(None)), (3.0, failed)]);
        assert_eq!(neighbors.send(&hop, 2, at(3.9)), Sent::Failed(2));
        assert_eq!(neighbors.send(&hop, 3, at(4.0)), Sent::Queued(None));
        assert_eq!(events(&mut neighbors), [ask(None)]);
    }

    #[test]
    fn packets_wait_in_order_and_within_a_bound() {
        let mut neighbors = Neighbors::new();
        let hop = neighbors.hop(THEIRS.into(), at(0.0));
        for packet in 0..MAX_WAITING as u32 {
            assert_eq!(neighbors.send(&hop, packet, at(0.0)), Sent::Queued(None));
        }
        assert_eq!(neighbors.send(&hop, 8, at(0.0)), Sent::Queued(Some(0)));
        neighbors.handle_arp(&reply(PEER), &interface(), at(0.0));
        let packets = (1..=8).collect();
        assert_eq!(events(&mut neighbors)[1..], [Event::Resolved { addr: THEIRS.into(), mac: PEER, packets }]);
        assert_eq!(neighbors.send(&hop, 9, at(0.0)), Sent::Now(PEER, 9));
    }

    #[test]
    fn a_neighbour_ages_and_is_asked_before_it_is_given_up() {
        let (mut neighbors, hop) = resolved();
        assert_eq!(run(&mut neighbors, 100.0), [], "it is not used");
        assert_eq!(hop.mac(), None);
        assert_eq!(neighbors.resolve(&hop, at(100.0)), Resolution::Known(PEER));
        assert_eq!(hop.mac(), Some(PEER), "it is used without a look at the cache");
        assert_eq!(run(&mut neighbors, 105.5), [(105.0, ask(Some(PEER)))]);
        // An answer by the peer itself.
        neighbors.handle_arp(&reply(PEER), &interface(), at(105.6));
        assert_eq!(run(&mut neighbors, 200.0), []);
        // And none.
        assert_eq!(neighbors.resolve(&hop, at(200.0)), Resolution::Known(PEER));
        let failed = Event::Failed { addr: THEIRS.into(), packets: VecDeque::new() };
        let mut told = [205.0, 206.0, 207.0].map(|at| (at, ask(Some(PEER)))).to_vec();
        told.push((208.0, failed));
        assert_eq!(run(&mut neighbors, 220.0), told);
        assert_eq!((hop.mac(), neighbors.resolve(&hop, at(220.0))), (None, Resolution::Pending));
    }

    #[test]
    fn a_neighbour_that_acknowledges_is_not_asked() {
        let (mut neighbors, hop) = resolved();
        for second in 1..300 {
            hop.confirm(at(f64::from(second)));
            assert_eq!(run(&mut neighbors, f64::from(second)), []);
            assert_eq!(hop.mac(), Some(PEER));
        }
    }

    /// A reply that was not asked for makes no entry, and a change of address is used and asked
    /// for, not more than once a second.
    #[test]
    fn unasked_news_are_not_believed_without_a_question() {
        let mut neighbors = Neighbors::<u32>::new();
        neighbors.handle_arp(&reply(PEER), &interface(), at(0.0));
        neighbors.handle_arp(&request(PEER, THEIRS, THEIRS), &interface(), at(0.0));
        assert_eq!((neighbors.entries.len(), events(&mut neighbors)), (0, vec![]));

        let (mut neighbors, hop) = resolved();
        neighbors.handle_arp(&reply(OTHER), &interface(), at(0.9));
        assert_eq!(neighbors.resolve(&hop, at(0.9)), Resolution::Known(PEER), "too early");
        assert_eq!(run(&mut neighbors, 6.0), [(5.9, ask(Some(PEER)))], "the one that is known is asked");
        neighbors.handle_arp(&reply(PEER), &interface(), at(6.0));
        neighbors.handle_arp(&request(OTHER, THEIRS, THEIRS), &interface(), at(6.5));
        assert_eq!((hop.mac(), neighbors.resolve(&hop, at(6.5))), (None, Resolution::Known(OTHER)));
        assert_eq!(run(&mut neighbors, 12.0), [(11.5, ask(Some(OTHER)))]);
        // A reply to no question, by a neighbour that is stale: it is heard of, and not confirmed.
        let (mut neighbors, hop) = resolved();
        assert_eq!(run(&mut neighbors, 100.0), []);
        neighbors.handle_arp(&reply(PEER), &interface(), at(100.0));
        assert_eq!(hop.mac(), None);
        // Claims of our own address, of strangers, and of groups change nothing.
        let mut neighbors = Neighbors::<u32>::new();
        neighbors.handle_arp(&request(PEER, OWN, OWN), &interface(), at(0.0));
        neighbors.handle_arp(&request(PEER, Ipv4Addr::new(11, 0, 0, 1), OWN), &interface(), at(0.0));
        assert_eq!(neighbors.entries.len(), 0);
    }

    #[test]
    fn a_question_tells_the_address_of_the_station_that_asks() {
        let mut neighbors = Neighbors::<u32>::new();
        neighbors.handle_arp(&request(PEER, THEIRS, OWN), &interface(), at(0.0));
        let hop = neighbors.hop(THEIRS.into(), at(0.0));
        assert_eq!((hop.mac(), neighbors.resolve(&hop, at(0.0))), (None, Resolution::Known(PEER)));
    }

    /// Forged stations replace each other, and not the stations that are in use. Proves NET-10.
    #[test]
    fn entries_are_bounded() {
        let (mut neighbors, hop) = resolved();
        let mut users = vec![hop];
        for n in 3..20_003_u32 {
            let station = Ipv4Addr::from_bits(OWN.to_bits() + n);
            neighbors.handle_arp(&request(OTHER, station, OWN), &interface(), at(1.0));
            if n % 1000 == 0 {
                let hop = neighbors.hop(station.into(), at(1.0));
                assert_eq!(neighbors.resolve(&hop, at(1.0)), Resolution::Known(OTHER));
                users.push(hop);
            }
            assert!(events(&mut neighbors).len() <= 1);
        }
        assert_eq!((neighbors.entries.len(), neighbors.index.len()), (MAX_NEIGHBORS, MAX_NEIGHBORS));
        assert!(users.iter().all(|hop| hop.mac().is_some()));
    }
    /// A neighbour to which frames are sent without a question for its address has its entry
    /// although stations that do nothing but ask came later, each of them with users.
    #[test]
    fn a_neighbour_that_carries_traffic_is_not_replaced() {
        let (mut neighbors, hop) = resolved();
        let mut others = Vec::new();
        for n in 3..5000_u32 {
            let now = at(0.3 + f64::from(n) / 100.0);
            hop.touch(now);
            hop.confirm(now);
            let station = Ipv4Addr::from_bits(OWN.to_bits() + n);
            neighbors.handle_arp(&request(OTHER, station, OWN), &interface(), now);
            others.push(neighbors.hop(station.into(), now));
            run(&mut neighbors, now.micros() as f64 / 1e6);
        }
        assert_eq!(hop.mac(), Some(PEER));
        assert_eq!(neighbors.resolve(&hop, at(51.0)), Resolution::Known(PEER));
        // A cache in which all are in use has no room. One that is not used any more makes some.
        let mut neighbors = Neighbors::<u32>::new();
        let station = |n: u32| IpAddr::from(Ipv4Addr::from_bits(OWN.to_bits() + n));
        let hops: Vec<_> = (2..2 + MAX_NEIGHBORS as u32).map(|n| neighbors.hop(station(n), at(0.1))).collect();
        // The clock of a program begins at 0.
        hops.iter().for_each(|hop| hop.touch(at(0.1)));
        let last = neighbors.hop(station(5000), at(2.0));
        let resolves = |neighbors: &mut Neighbors<u32>, seconds: f64| {
            let found = (0..MAX_NEIGHBORS / LOOK).map(|_| neighbors.resolve(&last, at(seconds)));
            found.filter(|&found| found == Resolution::Pending).count()
        };
        assert_eq!(resolves(&mut neighbors, 2.0), 0);
        hops[1..].iter().for_each(|hop| hop.touch(at(4.0)));
        assert!(resolves(&mut neighbors, 6.0) > 0);
        assert!(!neighbors.index.contains_key(&station(2)) && neighbors.index.contains_key(&station(3)));
    }

    #[test]
    fn packets_that_wait_are_bounded_over_all_neighbours() {
        let mut neighbors = Neighbors::new();
        let mut queued = 0;
        for n in 3..200_u32 {
            let hop = neighbors.hop(Ipv4Addr::from_bits(OWN.to_bits() + n).into(), at(0.0));
            for packet in 0..4 {
                queued += usize::from(neighbors.send(&hop, packet, at(0.0)) == Sent::Queued(None));
            }
        }
        assert_eq!((queued, neighbors.waiting), (MAX_WAITING_IN_ALL, MAX_WAITING_IN_ALL));
        let failed: usize = run(&mut neighbors, 10.0)
            .into_iter()
            .map(|(_, event)| if let Event::Failed { packets, .. } = event { packets.len() } else { 0 })
            .sum();
        assert_eq!((failed, neighbors.waiting), (MAX_WAITING_IN_ALL, 0));
    }
}
