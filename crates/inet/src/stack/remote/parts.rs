//! A socket of another thread in two parts: the handle's, and the stack's.

use crate::stack::page_counts::RemotePages;
use crate::stack::remote::option::StreamOption;
use crate::stack::remote::port::{Asked, Hub, Port};
use crate::stack::remote::ring::{Receiver, Sender, ring};
use crate::stack::remote::waiting::Wanted;
use crate::stack::sockets::fragment::Fragment;
use crate::stack::sockets::listener::ListenOptions;
use crate::stack::transport::datagrams::{Manner, ReceivedDatagram};
use crate::tcp::Config;
use netmem_packet::Packet;
use netmem_pool::{Frag, Mapped};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The places of a ring of payload.
pub(crate) const PLACES: usize = 16;
/// The places of a ring of accepted connections.
pub(crate) const ACCEPTED: usize = 32;
/// The places of a ring of datagrams.
pub(crate) const DATAGRAMS: usize = 256;

pub(crate) type StreamPort<M> = Port<Opening<M>>;
pub(crate) type StreamHub<M> = Hub<Opening<M>>;

/// What a new port has for the stack.
pub(crate) enum Opening<M: Mapped> {
    Connect { local: Option<SocketAddr>, remote: SocketAddr, options: Box<Config>, parts: StackParts<M> },
    Listen { local: SocketAddr, options: Box<ListenOptions>, accepted: Sender<Unaccepted<M>, ACCEPTED> },
    Bind { local: SocketAddr, parts: Box<DatagramParts<M>> },
}

/// What a stream sends.
pub(crate) enum Outgoing<M: Mapped> {
    Payload { frag: Frag<M>, more: bool, source: Source },
    Set(StreamOption),
}

/// Where payload comes from.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// The user's fragment.
    User,
    /// Copied bytes. If they fill their page, it is counted until they are acknowledged.
    Copied { fills: bool },
}

/// The handle's parts of a stream.
pub(crate) struct HandleParts<M: Mapped> {
    pub(crate) port: Arc<StreamPort<M>>,
    pub(crate) received: Receiver<Fragment<M>, PLACES>,
    pub(crate) sent: Sender<Outgoing<M>, PLACES>,
    pub(crate) pages: Arc<RemotePages<M>>,
    pub(crate) remote: SocketAddr,
}

/// The stack's parts of a stream.
pub(crate) struct StackParts<M: Mapped> {
    pub(crate) received: Sender<Fragment<M>, PLACES>,
    pub(crate) sent: Receiver<Outgoing<M>, PLACES>,
    pub(crate) pages: Arc<RemotePages<M>>,
}

/// The parts of a new stream.
pub(crate) fn parts<M: Mapped>(
    port: Arc<StreamPort<M>>,
    pages: RemotePages<M>,
    remote: SocketAddr,
) -> (HandleParts<M>, StackParts<M>) {
    let ((sent, to_send), (to_receive, received)) = (ring(), ring());
    let pages = Arc::new(pages);
    let handle = HandleParts { port, received, sent, pages: pages.clone(), remote };
    (handle, StackParts { received: to_receive, sent: to_send, pages })
}

/// The stack's parts of a socket for datagrams.
pub(crate) struct DatagramParts<M: Mapped> {
    pub(crate) received: Sender<ReceivedDatagram<M>, DATAGRAMS>,
    pub(crate) sent: Receiver<Prepared<M>, DATAGRAMS>,
    pub(crate) pages: Arc<RemotePages<M>>,
    pub(crate) wanted: Arc<Wanted>,
}

/// A datagram that another thread has copied into pages.
pub(crate) struct Prepared<M: Mapped> {
    pub(crate) packet: Packet<M>,
    /// Pages that count until the stack has it.
    pub(crate) pages: u32,
    pub(crate) to: SocketAddr,
    /// The address to send from; `None` for the socket's own, or that of the route.
    pub(crate) from: Option<IpAddr>,
    pub(crate) manner: Manner,
}

/// A connection that no user has accepted yet. Dropping it resets the connection.
pub(crate) struct Unaccepted<M: Mapped>(Option<HandleParts<M>>);

impl<M: Mapped> Unaccepted<M> {
    pub(crate) fn new(parts: HandleParts<M>) -> Self {
        Self(Some(parts))
    }

    pub(crate) fn accept(mut self) -> Option<HandleParts<M>> {
        self.0.take()
    }
}

impl<M: Mapped> Drop for Unaccepted<M> {
    fn drop(&mut self) {
        if let Some(parts) = &self.0 {
            parts.port.ask(Asked::RESET.and(Asked::READER_GONE).and(Asked::WRITER_GONE));
        }
    }
}
