//! The cache of neighbours. [The module](super) has the states and their transitions.

use crate::interface::Interface;
use crate::neighbor::event::{Event, Resolution, Sent};
use crate::neighbor::hop::Hop;
use crate::time::Time;
use crate::wire::{Advertisement, Arp, Ip, Mac, Solicitation};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Entries of a cache.
pub const MAX_NEIGHBORS: usize = 1024;
/// Packets that wait for one neighbour's address.
pub const MAX_WAITING: usize = 8;
/// Packets that wait for addresses, of all neighbours.
pub const MAX_WAITING_IN_ALL: usize = 256;
/// Entries that are examined for one that can be replaced.
pub(super) const SCANNED: usize = 64;

/// The time between two solicitations (`RETRANS_TIMER`), and the time for which a failure is
/// remembered.
const RETRY: Duration = Duration::from_secs(1);
/// Questions until a neighbour has failed (`MAX_MULTICAST_SOLICIT`, `MAX_UNICAST_SOLICIT`).
const MAX_SOLICITATIONS: u8 = 3;
/// How long a neighbour counts as reachable after it was confirmed (`REACHABLE_TIME`). A random
/// factor is applied to it.
const REACHABLE: Duration = Duration::from_secs(30);
/// How long a stale neighbour is used before it is solicited (`DELAY_FIRST_PROBE_TIME`).
const DELAY: Duration = Duration::from_secs(5);
/// A new address is not replaced for so long, so that two stations with the same IP address cannot
/// make it change all the time.
const LOCKED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The address is being solicited, and so many solicitations were sent.
    Incomplete(u8),
    /// The neighbour has answered, or was confirmed, not long ago.
    Reachable,
    /// It may have changed. It is not solicited before it is used.
    Stale,
    /// It was used, and may still be confirmed before it is solicited.
    Delay,
    /// It is being solicited, and so many solicitations were sent.
    Probe(u8),
    /// It did not answer.
    Failed,
}

#[derive(Debug)]
pub(super) struct Entry<P> {
    hop: Arc<Hop>,
    mac: Mac,
    state: State,
    /// When the state changes by itself.
    due: Option<Time>,
    /// When the address was last set.
    learned: Time,
    /// When it was last resolved, or reported.
    used: Time,
    waiting: VecDeque<P>,
}

/// The cache of neighbours. `P` is a packet that waits for an address.
#[derive(Debug)]
pub struct Neighbors<P> {
    pub(super) entries: Vec<Entry<P>>,
    pub(super) index: HashMap<IpAddr, usize>,
    events: VecDeque<Event<P>>,
    /// No entry is due before.
    due: Option<Time>,
    /// The place at which the search for an entry to replace continues.
    hand: usize,
    /// Packets that wait, in all entries.
    pub(super) waiting: usize,
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

    /// The part of the neighbour with that address that senders share. The address is not solicited
    /// before it is [resolved](Self::resolve).
    pub fn hop(&mut self, addr: IpAddr, now: Time) -> Arc<Hop> {
        match self.entry(addr, now, None) {
            Some(at) => self.entries[at].hop.clone(),
            None => Hop::new(addr),
        }
    }

    /// The neighbour's address. Solicits it if it is not known; the solicitation is an [`Event`].
    /// Costs a lookup. If a sender has the address from [`Hop::mac`], it need not call this.
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
                self.solicit(at, 1, now);
                Resolution::Pending
            }
            State::Incomplete(_) => Resolution::Pending,
            State::Failed if entry.due.is_some_and(|due| now < due) => Resolution::Failed,
            State::Failed => {
                self.solicit(at, 1, now);
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
    /// [`poll_event`](Self::poll_event) is the call that follows.
    pub fn handle_arp(&mut self, arp: &Arp, interface: &Interface, now: Time) {
        let sender = IpAddr::V4(arp.sender);
        if !interface.is_neighbor(sender) || interface.owns(sender) {
            return;
        }
        let for_us = interface.owns(arp.target.into());
        if for_us && arp.request {
            self.entry(sender, now, None);
        }
        self.update(sender, arp.mac, for_us && !arp.request, true, now);
    }

    /// A solicitation was received: a neighbour requests an address of `interface`, and reports its
    /// own. [`poll_event`](Self::poll_event) is the call that follows.
    pub fn handle_solicitation(&mut self, ip: &Ip, solicitation: &Solicitation, interface: &Interface, now: Time) {
        let known = interface.is_neighbor(ip.source) && !interface.owns(ip.source);
        if let Some(mac) = solicitation.mac.filter(|_| known && interface.owns(solicitation.target.into())) {
            self.entry(ip.source, now, None);
            self.update(ip.source, mac, false, true, now);
        }
    }

    /// An advertisement was received: a neighbour reports its address. Makes no entry.
    /// [`poll_event`](Self::poll_event) is the call that follows.
    pub fn handle_advertisement(&mut self, advertisement: &Advertisement, interface: &Interface, now: Time) {
        let target = IpAddr::V6(advertisement.target);
        if interface.owns(target) {
            return;
        }
        match advertisement.mac {
            Some(mac) => self.update(target, mac, advertisement.solicited, advertisement.overrides, now),
            // An answer to a solicitation that was sent to one station may leave the address out.
            None => {
                if let Some(&at) = self.index.get(&target)
                    && advertisement.solicited
                    && let State::Probe(_) | State::Delay = self.entries[at].state
                {
                    self.reachable(at, now);
                }
            }
        }
    }

    /// A neighbour has reported its address `mac`. `answer`: it answers a solicitation of this
    /// station; `overrides`: it replaces an earlier address.
    fn update(&mut self, addr: IpAddr, mac: Mac, answer: bool, overrides: bool, now: Time) {
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
            // used, and solicited again.
            if entry.state == State::Reachable {
                entry.hop.set(None);
                self.becomes(at, State::Stale, None);
            }
            return;
        }
        if other || !known {
            (entry.mac, entry.learned) = (mac, now);
        }
        // An answer counts only if there was a solicitation, because any station can forge a reply.
        let solicited = matches!(entry.state, State::Incomplete(1..) | State::Probe(_));
        if answer && solicited {
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

    /// When [`handle_timeout`](Self::handle_timeout) is to be called: at the first moment at which
    /// it has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.due
    }

    /// Changes the states that are due. Examines all entries if one may be due; otherwise costs a
    /// comparison. [`poll_event`](Self::poll_event) is the call that follows.
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
                State::Incomplete(n) | State::Probe(n) if n < MAX_SOLICITATIONS => self.solicit(at, n + 1, now),
                State::Incomplete(_) | State::Probe(_) => self.failed(at, now),
                State::Reachable => {
                    entry.hop.set(None);
                    self.becomes(at, State::Stale, None);
                }
                State::Delay => {
                    entry.state = State::Probe(0);
                    self.solicit(at, 1, now);
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
    fn solicit(&mut self, at: usize, n: u8, now: Time) {
        let entry = &self.entries[at];
        let (state, station) = match entry.state {
            State::Probe(_) => (State::Probe(n), Some(entry.mac)),
            _ => (State::Incomplete(n), None),
        };
        self.events.push_back(Event::Solicit { target: entry.hop.addr, at: station });
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
            // They call the cache each time.
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
        let near = (self.hand..self.hand + SCANNED).map(|at| at % len);
        self.hand = (self.hand + SCANNED) % len;
        let next = near.filter(|&at| !self.entries[at].hop.is_in_use(now)).take(16);
        let worth = |at: &usize| (Arc::strong_count(&self.entries[*at].hop) > 1, self.entries[*at].used);
        next.min_by_key(worth)
    }
}

/// How long a neighbour is reachable: from half to one and a half times [`REACHABLE`], so that not
/// all are solicited at the same time.
fn spread<P>(entry: &Entry<P>) -> Duration {
    let [.., a, b] = entry.mac.0;
    REACHABLE / 2 + REACHABLE * u32::from(a ^ b) / 255
}
