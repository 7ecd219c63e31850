//! The TCP of [smoltcp](https://docs.rs/smoltcp) under packetdrill: another stack behind
//! [`Stack`].
//!
//! expected.txt has the scripts that are run, and states why some fail. What smoltcp does not have
//! is left out here, so that the call is an error: the trait has methods for it that refuse.

use netmem_packetdrill::{
    Accepted, ConnectionId, Errno, LOCAL_V4, LOCAL_V6, ListenerId, Options, Push, Readiness, Settings, Sizes,
    SocketOption, Stack,
};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpCidr};
use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};
use std::time::Duration;

netmem_packetdrill::export!(Smoltcp::new);

/// Bytes of each buffer of a connection.
const BUFFER: usize = 64 << 10;

/// The two directions of the link.
struct Wire {
    mtu: usize,
    received: VecDeque<Vec<u8>>,
    sent: VecDeque<Vec<u8>>,
}

struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Sent<'w>(&'w mut VecDeque<Vec<u8>>);

impl TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push_back(packet);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sent<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sent<'_>)> {
        Some((Received(self.received.pop_front()?), Sent(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sent<'_>> {
        Some(Sent(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        (capabilities.medium, capabilities.max_transmission_unit) = (Medium::Ip, self.mtu);
        capabilities
    }
}

/// A listener. A socket of smoltcp that listens becomes the connection, so that each connection
/// request needs another one.
struct Listening {
    local: SocketAddr,
    options: Options,
    listens: SocketHandle,
    /// Connection requests that `accept` has not returned.
    requested: Vec<Requested>,
}

struct Requested {
    handle: SocketHandle,
    remote: SocketAddr,
    options: Options,
}

#[derive(Clone, Copy)]
struct Connection {
    handle: SocketHandle,
    state: State,
    error: Option<Errno>,
}

struct Smoltcp {
    now: Instant,
    wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    next: usize,
    listeners: BTreeMap<ListenerId, Listening>,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Sockets without a user, until they have ended.
    closed: Vec<SocketHandle>,
}

/// A socket with the options that smoltcp has.
fn socket(options: &Options) -> Socket<'static> {
    let buffer = || SocketBuffer::new(vec![0; BUFFER]);
    let mut socket = Socket::new(buffer(), buffer());
    // The scripts expect what Linux does at first: segments are acknowledged at once.
    socket.set_ack_delay(None);
    apply(&mut socket, options);
    socket
}

fn apply(socket: &mut Socket, options: &Options) {
    socket.set_nagle_enabled(!options.no_delay);
    socket.set_hop_limit(Some(options.hop_limit.max(1)));
}

impl Smoltcp {
    fn new(settings: Settings) -> Self {
        let mtu = settings.after("link", "mtu").unwrap_or(1500) as usize;
        let mut wire = Wire { mtu, received: VecDeque::new(), sent: VecDeque::new() };
        let mut interface = Interface::new(Config::new(HardwareAddress::Ip), &mut wire, Instant::ZERO);
        interface.update_ip_addrs(|addresses| {
            let own = [IpCidr::new(LOCAL_V4.into(), 16), IpCidr::new(LOCAL_V6.into(), 64)];
            addresses.extend(own);
        });
        // packetdrill's peers have any address. The routers' are not used, since there is no link.
        let routes = interface.routes_mut();
        let v4 = routes.add_default_ipv4_route(Ipv4Addr::new(192, 168, 0, 1));
        let v6 = routes.add_default_ipv6_route(Ipv6Addr::new(0xfd, 0, 0, 0, 0, 0, 0, 2));
        if v4.and(v6).is_err() {
            netmem_packetdrill::fail("smoltcp was built for fewer than two routes");
        }
        Self {
            now: Instant::ZERO,
            wire,
            interface,
            sockets: SocketSet::new(Vec::new()),
            next: 0,
            listeners: BTreeMap::new(),
            connections: BTreeMap::new(),
            closed: Vec::new(),
        }
    }

    fn id(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    fn add(&mut self, handle: SocketHandle, state: State) -> ConnectionId {
        let id = ConnectionId(self.id());
        self.connections.insert(id, Connection { handle, state, error: None });
        id
    }

    fn socket(&mut self, id: ConnectionId) -> &mut Socket<'static> {
        self.sockets.get_mut(self.connections[&id].handle)
    }

    /// The position in `requested` of the connection that `accept` returns.
    fn established(&self, id: ListenerId) -> Option<usize> {
        let opening = |handle| self.sockets.get::<Socket>(handle).state() == State::SynReceived;
        self.listeners.get(&id)?.requested.iter().position(|requested| !opening(requested.handle))
    }

    /// Runs smoltcp, and notes what has become of its sockets.
    fn poll(&mut self, now: Duration) {
        self.now = Instant::from_micros(now.as_micros() as i64);
        self.interface.poll(self.now, &mut self.wire, &mut self.sockets);
        let sockets = &mut self.sockets;
        for listening in self.listeners.values_mut() {
            // A reset in SYN-RECEIVED lets the socket listen again.
            listening.requested.retain(|one| {
                let again = sockets.get::<Socket>(one.handle).is_listening();
                if again {
                    sockets.remove(one.handle);
                }
                !again
            });
            let Some(remote) = sockets.get::<Socket>(listening.listens).remote_endpoint() else { continue };
            let (remote, options) = ((remote.addr, remote.port).into(), listening.options);
            let mut next = socket(&options);
            if next.listen(listening.local).is_ok() {
                let handle = std::mem::replace(&mut listening.listens, sockets.add(next));
                listening.requested.push(Requested { handle, remote, options });
            }
        }
        for connection in self.connections.values_mut() {
            let state = sockets.get::<Socket>(connection.handle).state();
            match (connection.state, state) {
                // It had ended, or ends with both FINs.
                (State::Closed | State::LastAck | State::TimeWait, State::Closed) => (),
                (State::SynSent, State::Closed) => connection.error = Some(libc::ECONNREFUSED),
                (_, State::Closed) => connection.error = Some(libc::ECONNRESET),
                _ => (),
            }
            connection.state = state;
        }
        self.closed.retain(|handle| {
            let socket = sockets.get::<Socket>(*handle);
            // A reset may have to be sent.
            let over = socket.state() == State::Closed && socket.remote_endpoint().is_none();
            if over {
                sockets.remove(*handle);
            }
            !over
        });
    }
}

impl Stack for Smoltcp {
    fn connect(
        &mut self,
        _: Duration,
        local: SocketAddr,
        remote: SocketAddr,
        options: &Options,
    ) -> Result<ConnectionId, Errno> {
        let mut socket = socket(options);
        socket.connect(self.interface.context(), remote, local).map_err(|_| libc::EADDRNOTAVAIL)?;
        let handle = self.sockets.add(socket);
        Ok(self.add(handle, State::SynSent))
    }

    fn listen(&mut self, local: SocketAddr, _: usize, options: &Options) -> Result<ListenerId, Errno> {
        let mut socket = socket(options);
        socket.listen(local).map_err(|_| libc::EINVAL)?;
        let id = ListenerId(self.id());
        let listens = self.sockets.add(socket);
        self.listeners.insert(id, Listening { local, options: *options, listens, requested: Vec::new() });
        Ok(id)
    }

    fn accept(&mut self, id: ListenerId) -> Option<Accepted> {
        let at = self.established(id)?;
        let Requested { handle, remote, options } = self.listeners.get_mut(&id)?.requested.remove(at);
        // It may have been reset since: then the next poll notes that.
        Some(Accepted { connection: self.add(handle, State::Established), remote, options })
    }

    fn can_accept(&self, id: ListenerId) -> bool {
        self.established(id).is_some()
    }

    fn send(&mut self, _: Duration, id: ConnectionId, bytes: &[u8], push: Push) -> Result<usize, Errno> {
        if push != Push::Plain {
            return Err(libc::EOPNOTSUPP);
        }
        match self.socket(id).send_slice(bytes) {
            Ok(0) if !bytes.is_empty() => Err(libc::EAGAIN),
            Ok(n) => Ok(n),
            Err(_) => Err(libc::EPIPE),
        }
    }

    fn receive(&mut self, _: Duration, id: ConnectionId, bytes: &mut [u8]) -> Result<usize, Errno> {
        match self.socket(id).recv_slice(bytes) {
            Ok(0) if !bytes.is_empty() => Err(libc::EAGAIN),
            Ok(n) => Ok(n),
            Err(_) if self.readiness(id).opening => Err(libc::EAGAIN),
            Err(_) => Ok(0),
        }
    }

    fn peek(&mut self, id: ConnectionId, bytes: &mut [u8]) -> Result<usize, Errno> {
        Ok(self.socket(id).peek_slice(bytes).unwrap_or(0))
    }

    fn shutdown(&mut self, _: Duration, id: ConnectionId, how: Shutdown) -> Result<(), Errno> {
        match how {
            // Only the peer ends the other direction.
            Shutdown::Read | Shutdown::Both => Err(libc::EOPNOTSUPP),
            Shutdown::Write => {
                self.socket(id).close();
                Ok(())
            }
        }
    }

    fn close(&mut self, _: Duration, id: ConnectionId, reset: bool) {
        let socket = self.socket(id);
        if reset {
            socket.abort()
        } else {
            socket.close()
        }
        self.closed.extend(self.connections.remove(&id).map(|connection| connection.handle));
    }

    fn close_listener(&mut self, _: Duration, id: ListenerId) {
        let Some(listening) = self.listeners.remove(&id) else { return };
        for handle in listening.requested.into_iter().map(|one| one.handle).chain([listening.listens]) {
            self.sockets.get_mut::<Socket>(handle).abort();
            self.closed.push(handle);
        }
    }

    fn readiness(&self, id: ConnectionId) -> Readiness {
        let Connection { handle, error, .. } = self.connections[&id];
        let socket = self.sockets.get::<Socket>(handle);
        let opening = matches!(socket.state(), State::SynSent | State::SynReceived);
        Readiness {
            opening,
            readable: socket.can_recv(),
            writable: socket.can_send(),
            urgent: false,
            end: !opening && !socket.may_recv(),
            closed: matches!(socket.state(), State::Closed | State::TimeWait),
            failed: error.is_some(),
        }
    }

    fn take_error(&mut self, id: ConnectionId) -> Option<Errno> {
        self.connections.get_mut(&id)?.error.take()
    }

    fn sizes(&self, id: ConnectionId) -> Sizes {
        let socket = self.sockets.get::<Socket>(self.connections[&id].handle);
        Sizes { readable: Some(socket.recv_queue()), unacknowledged: Some(socket.send_queue()), ..Sizes::default() }
    }

    fn has_option(&self, option: SocketOption) -> bool {
        matches!(option, SocketOption::NoDelay | SocketOption::HopLimit | SocketOption::Linger)
    }

    fn set_options(&mut self, _: Duration, id: ConnectionId, options: &Options) {
        apply(self.socket(id), options);
    }

    fn set_listener_options(&mut self, id: ListenerId, options: &Options) {
        if let Some(listening) = self.listeners.get_mut(&id) {
            listening.options = *options;
            apply(self.sockets.get_mut(listening.listens), options);
        }
    }

    fn receive_packet(&mut self, now: Duration, packet: &[u8]) {
        self.wire.received.push_back(packet.to_vec());
        self.poll(now);
    }

    fn next_packet(&mut self, now: Duration) -> Option<Vec<u8>> {
        if self.wire.sent.is_empty() {
            self.poll(now);
        }
        self.wire.sent.pop_front()
    }

    fn deadline(&mut self) -> Option<Duration> {
        let at = self.interface.poll_at(self.now, &self.sockets)?;
        Some(Duration::from_micros(at.total_micros().max(0) as u64))
    }

    fn handle_timeout(&mut self, now: Duration) {
        self.poll(now);
    }
}
