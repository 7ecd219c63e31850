//! The path to a peer: its destination entry, and the Ethernet header of frames to the next hop.
//!
//! Why a connection caches it: a lookup costs a critical section and a get of the count. The cached
//! entry costs a load for each segment, which checks that no route has changed.

use crate::neighbor::Resolution;
use crate::route::Dst;
use crate::stack::payload::Payload;
use crate::stack::shared::host::Host;
use crate::time::Time;
use crate::wire::{EthernetHeader, Mac};
use netmem_refs::Ref;
use std::net::IpAddr;

/// A destination entry that a connection has cached. Each use checks whether the routes have
/// changed.
pub(crate) struct Path<P: Payload> {
    dst: Ref<Dst<P::Count>, P::Count>,
    header: EthernetHeader,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Resolved,
    /// The next hop's address is being solicited.
    Pending,
    /// The next hop did not answer.
    Failed,
}

/// The target of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextHop {
    /// The device, with this Ethernet header.
    Device(EthernetHeader),
    /// This host.
    Loopback,
    /// Not known yet: the next hop's address is being solicited.
    Pending,
}

impl<P: Payload> Path<P> {
    /// The path to `destination`, if there is one.
    pub(crate) fn find(host: &Host<P>, destination: IpAddr, now: Time) -> Option<Self> {
        let hop = |next| host.neighbors().hop(next, now);
        let dst = host.routes().find(destination, now, hop).ok()?;
        let header = EthernetHeader { destination: Mac::default(), source: host.interface().mac };
        Some(Self { dst, header, state: State::Resolved })
    }

    /// The address that packets on the path come from.
    pub(crate) fn source(&self) -> IpAddr {
        self.dst.source()
    }

    /// The longest IP packet that the path admits.
    pub(crate) fn mtu(&self, now: Time) -> u16 {
        self.dst.path_mtu(now)
    }

    /// The longest IP packet with a datagram that the path admits.
    pub(crate) fn datagram_mtu(&self, now: Time) -> u16 {
        self.dst.datagram_mtu(now)
    }

    /// Records that a router has reported that a segment was too long.
    pub(crate) fn handle_too_big(&self, mtu: u32, now: Time) {
        self.dst.too_big(mtu, now);
    }

    /// Records that a router has reported that a datagram was too long.
    pub(crate) fn handle_datagram_too_big(&self, mtu: u32, now: Time) {
        self.dst.datagram_too_big(mtu, now);
    }

    /// Whether the path leads to this host.
    pub(crate) fn is_loopback(&self) -> bool {
        self.dst.hop().is_none()
    }

    /// Whether packets wait for the next hop's address.
    pub(crate) fn waits(&self) -> bool {
        self.state != State::Resolved
    }

    /// Whether the next hop has not answered since the last call.
    pub(crate) fn take_failure(&mut self) -> bool {
        let failed = self.state == State::Failed;
        if failed {
            self.state = State::Resolved;
        }
        failed
    }

    /// Confirms the next hop: an event shows that it has received packets.
    pub(crate) fn confirm(&self, now: Time) {
        if let Some(hop) = self.dst.hop() {
            hop.confirm(now);
        }
    }

    /// Notes that there is traffic by the next hop.
    pub(crate) fn touch(&self, now: Time) {
        if let Some(hop) = self.dst.hop() {
            hop.touch(now);
        }
    }

    /// The Ethernet header of packets that wait for the next hop's address.
    pub(crate) fn unresolved_header(&self) -> EthernetHeader {
        self.header
    }

    pub(crate) fn dst(&self) -> &Dst<P::Count> {
        &self.dst
    }

    /// The present target of packets.
    #[inline]
    pub(crate) fn next_hop(&mut self, host: &Host<P>, now: Time) -> NextHop {
        if !host.routes().is_current(&self.dst) && !self.renew(host, now) {
            self.state = State::Failed;
            return NextHop::Pending;
        }
        let Some(hop) = self.dst.hop() else { return NextHop::Loopback };
        match hop.mac() {
            Some(mac) => {
                self.state = State::Resolved;
                NextHop::Device(EthernetHeader { destination: mac, ..self.header })
            }
            None => self.resolve(host, now),
        }
    }

    #[cold]
    fn renew(&mut self, host: &Host<P>, now: Time) -> bool {
        let found = Self::find(host, self.dst.destination(), now);
        found.map(|path| self.dst = path.dst).is_some()
    }

    #[cold]
    fn resolve(&mut self, host: &Host<P>, now: Time) -> NextHop {
        let Some(hop) = self.dst.hop() else { return NextHop::Loopback };
        let mut neighbors = host.neighbors();
        let resolution = neighbors.resolve(hop, now);
        host.neighbors_changed(&neighbors, true);
        self.state = match resolution {
            Resolution::Known(mac) => {
                self.state = State::Resolved;
                return NextHop::Device(EthernetHeader { destination: mac, ..self.header });
            }
            Resolution::Pending => State::Pending,
            Resolution::Failed => State::Failed,
        };
        NextHop::Pending
    }
}
