//! The TCP/IP stack `smoltcp` on Netmem's queues.
//!
//!     cargo run -p netmem --all-features --example tcp_smoltcp
//!
//! Two virtio-net devices are connected by a cable, each with a driver and a stack of its own. One
//! stack listens, the other one connects and sends a request, and the first one answers. What a
//! user needs to write is `Stack`: the two tokens of `smoltcp::phy::Device`. Received frames are
//! read in place; frames to send are written into a page, and sent from there.

use netmem::device::port::{Port, PortError};
use netmem::device::{InProcess, NetDevice, Options};
use netmem::net::{Packet, Poll, RxQueue, TxQueue};
use netmem::pool::{PoolOptions, SharedPool, TrustedPeer};
use netmem::virtio::{NetOptions, RxMode, VirtioRx, VirtioTx};
use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// One direction of the cable: frames with their virtio header.
type Wire = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// One end of the cable: what the virtio-net device is plugged into.
struct Cable {
    out: Wire,
    into: Wire,
    next: Option<Vec<u8>>,
}

impl Port for Cable {
    const WANTS_BYTES: bool = true;
    /// No offloads: the stacks compute their checksums themselves.
    const FEATURES: u64 = 0;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.next.is_none() {
            self.next = self.into.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        }
        self.next.as_deref()
    }

    fn consume(&mut self) {
        self.next = None;
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.out.lock().unwrap_or_else(PoisonError::into_inner).push_back(wire.to_vec());
        true
    }

    fn negotiated(&mut self, _features: u64) -> Result<(), PortError> {
        Ok(())
    }
}

/// The queues of one device, as smoltcp wants to see them.
struct Stack {
    rx: VirtioRx<TrustedPeer>,
    tx: VirtioTx<TrustedPeer>,
    /// Pages for frames that are sent.
    pool: SharedPool<TrustedPeer>,
    /// Frames that were received and that smoltcp has not polled yet.
    backlog: VecDeque<Packet<TrustedPeer>>,
    _driver: InProcess,
}

impl Stack {
    fn new(device: &NetDevice<Cable>) -> anyhow::Result<Self> {
        // The device is in this process, so received bytes are slices.
        let mut driver = device.control().connect(NetOptions::new(RxMode::Small).tx_pages(256))?;
        let pool = driver.net.tx_pool(PoolOptions::new("tx"))?;
        let pair = driver.pairs.remove(0);
        Ok(Self { rx: pair.rx, tx: pair.tx, pool, backlog: VecDeque::new(), _driver: driver })
    }

    /// Receives what the device has delivered, and completes what it has sent.
    fn poll(&mut self) {
        let Self { rx, tx, backlog, .. } = self;
        rx.poll(|poll| {
            tx.complete();
            poll.receive(64, &mut |packet| backlog.push_back(packet));
        });
    }
}

/// A received frame. In small mode a frame is in one fragment, which is a slice.
struct Received(Packet<TrustedPeer>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0.head())
    }
}

/// The right to send one frame.
struct Send<'a> {
    tx: &'a mut VirtioTx<TrustedPeer>,
    pool: &'a SharedPool<TrustedPeer>,
}

impl TxToken for Send<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let Some(mut page) = self.pool.alloc() else {
            // No page is free: the frame is lost, as on any network. TCP sends it again.
            return f(&mut vec![0; len]);
        };
        let done = f(&mut page.as_mut_slice()[..len]);
        // A full queue returns the packet, which is dropped here.
        let _ = self.tx.send(Packet::new(page.freeze_range(0..len)));
        self.tx.flush();
        done
    }
}

impl Device for Stack {
    type RxToken<'a> = Received;
    type TxToken<'a> = Send<'a>;

    fn receive(&mut self, _now: Instant) -> Option<(Received, Send<'_>)> {
        let packet = self.backlog.pop_front()?;
        Some((Received(packet), Send { tx: &mut self.tx, pool: &self.pool }))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Send<'_>> {
        Some(Send { tx: &mut self.tx, pool: &self.pool })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities
    }
}

/// A stack with one TCP socket.
struct Host {
    stack: Stack,
    interface: Interface,
    sockets: SocketSet<'static>,
    socket: smoltcp::iface::SocketHandle,
}

impl Host {
    fn new(device: &NetDevice<Cable>, number: u8) -> anyhow::Result<Self> {
        let mut stack = Stack::new(device)?;
        let mac = EthernetAddress([2, 0, 0, 0, 0, number]);
        let mut interface = Interface::new(Config::new(mac.into()), &mut stack, Instant::now());
        interface.update_ip_addrs(|addresses| {
            let _ = addresses.push(IpCidr::new(IpAddress::v4(10, 0, 0, number), 24));
        });
        let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
        let mut sockets = SocketSet::new(Vec::new());
        let socket = sockets.add(tcp::Socket::new(buffer(), buffer()));
        Ok(Self { stack, interface, sockets, socket })
    }

    fn poll(&mut self) -> &mut tcp::Socket<'static> {
        self.stack.poll();
        self.interface.poll(Instant::now(), &mut self.stack, &mut self.sockets);
        self.sockets.get_mut(self.socket)
    }
}

fn main() -> anyhow::Result<()> {
    let (a, b) = (Wire::default(), Wire::default());
    let plugged = |out: &Wire, into: &Wire| {
        let cable = |_| Ok(Cable { out: out.clone(), into: into.clone(), next: None });
        NetDevice::new(Options::default(), cable)
    };
    let (mut near, mut far) = (plugged(&a, &b)?, plugged(&b, &a)?);
    let (mut client, mut server) = (Host::new(&near, 1)?, Host::new(&far, 2)?);

    server.sockets.get_mut::<tcp::Socket<'_>>(server.socket).listen(80)?;
    let to = (IpAddress::v4(10, 0, 0, 2), 80);
    let socket = client.sockets.get_mut::<tcp::Socket<'_>>(client.socket);
    socket.connect(client.interface.context(), to, 49152)?;

    let (mut asked, mut rest, mut answer) = (false, &[][..], Vec::new());
    while answer.len() < ANSWER.len() {
        // Devices would be polled on threads of their own.
        near.poll();
        far.poll();

        let socket = server.poll();
        if socket.can_recv() {
            let request = socket.recv(|bytes| (bytes.len(), String::from_utf8_lossy(bytes).into_owned()))?;
            println!("10.0.0.2 received: {request:?}");
            rest = ANSWER;
        }
        // The socket accepts what its buffer has room for. The rest is kept until there is room
        // again.
        if socket.can_send() && !rest.is_empty() {
            let taken = socket.send_slice(rest)?;
            rest = &rest[taken..];
        }

        let socket = client.poll();
        if socket.can_send() && !asked {
            // A new connection has room for so much.
            asked = true;
            anyhow::ensure!(socket.send_slice(REQUEST)? == REQUEST.len(), "there is no room for the request");
        }
        // This client reads late: when its buffer is full, or all of the rest has come.
        if socket.recv_queue() == BUFFER.min(ANSWER.len() - answer.len()) {
            socket.recv(|bytes| {
                answer.extend_from_slice(bytes);
                (bytes.len(), ())
            })?;
        }
    }
    anyhow::ensure!(answer == ANSWER, "the answer is another one");
    println!("10.0.0.1 received: {} bytes of answer", answer.len());
    println!("its transmit queue: {:?}", client.stack.tx.stats());
    Ok(())
}

/// Bytes of a socket's buffer in each direction.
const BUFFER: usize = 16 << 10;
const REQUEST: &[u8] = b"GET / HTTP/1.1";
/// The answer: more than all buffers have room for.
const ANSWER: &[u8] = &[b'.'; 100_000];
