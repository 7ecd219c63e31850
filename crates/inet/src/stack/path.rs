//! The path to a peer: its destination entry, and the link header of the next hop.

use crate::Time;
use crate::neighbor::Resolution;
use crate::route::Dst;
use crate::stack::payload::Payload;
use crate::stack::shared::host::Host;
use crate::wire::{EthernetHeader, Mac};
use netmem_refs::{Count, Ref};
use std::net::IpAddr;

/// A destination entry that a connection has cached. Each use checks whether the routes have
/// changed.
pub(crate) struct Path<C: Count> {
    dst: Ref<Dst<C>, C>,
    link: EthernetHeader,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Goes,
    /// The next hop's address is being asked for.
    Waits,
    /// The next hop did not answer.
    Failed,
}

/// The target of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextHop {
    /// The device, with this link header.
    Link(EthernetHeader),
    /// To this host.
    Here,
    /// Not known yet: the next hop's address is being asked for.
    Waits,
}

impl<C: Count> Path<C> {
    /// The path to `destination`, if there is one.
    pub(crate) fn find<P: Payload<Count = C>>(host: &Host<P>, destination: IpAddr, now: Time) -> Option<Self> {
        let hop = |next| host.neighbors().hop(next, now);
        let dst = host.routes().find(destination, now, hop).ok()?;
        let link = EthernetHeader { destination: Mac::default(), source: host.interface().mac };
        Some(Self { dst, link, state: State::Goes })
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
    pub(crate) fn too_big(&self, mtu: u32, now: Time) {
        self.dst.too_big(mtu, now);
    }

    /// Records that a router has reported that a datagram was too long.
    pub(crate) fn datagram_too_big(&self, mtu: u32, now: Time) {
        self.dst.datagram_too_big(mtu, now);
    }

    /// Whether it leads to this host.
    pub(crate) fn is_here(&self) -> bool {
        self.dst.hop().is_none()
    }

    /// Whether packets wait for the next hop's address.
    pub(crate) fn waits(&self) -> bool {
        self.state != State::Goes
    }

    /// Whether the next hop has not answered since the last call.
    pub(crate) fn take_failure(&mut self) -> bool {
        let failed = self.state == State::Failed;
        if failed {
            self.state = State::Goes;
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

    /// The link header of packets that wait for the next hop's address.
    pub(crate) fn unresolved(&self) -> EthernetHeader {
        self.link
    }

    pub(crate) fn dst(&self) -> &Dst<C> {
        &self.dst
    }

    /// The present target of packets.
    #[inline]
    pub(crate) fn next_hop<P: Payload<Count = C>>(&mut self, host: &Host<P>, now: Time) -> NextHop {
        if !host.routes().is_current(&self.dst) && !self.renew(host, now) {
            self.state = State::Failed;
            return NextHop::Waits;
        }
        let Some(hop) = self.dst.hop() else { return NextHop::Here };
        match hop.mac() {
            Some(mac) => {
                self.state = State::Goes;
                NextHop::Link(EthernetHeader { destination: mac, ..self.link })
            }
            None => self.resolve(host, now),
        }
    }

    #[cold]
    fn renew<P: Payload<Count = C>>(&mut self, host: &Host<P>, now: Time) -> bool {
        let found = Self::find(host, self.dst.destination(), now);
        found.map(|path| self.dst = path.dst).is_some()
    }

    #[cold]
    fn resolve<P: Payload<Count = C>>(&mut self, host: &Host<P>, now: Time) -> NextHop {
        let Some(hop) = self.dst.hop() else { return NextHop::Here };
        let mut neighbors = host.neighbors();
        let resolution = neighbors.resolve(hop, now);
        host.neighbors_changed(&neighbors, true);
        self.state = match resolution {
            Resolution::Known(mac) => {
                self.state = State::Goes;
                return NextHop::Link(EthernetHeader { destination: mac, ..self.link });
            }
            Resolution::Pending => State::Waits,
            Resolution::Failed => State::Failed,
        };
        NextHop::Waits
    }
}
