//! An end on smoltcp, over the same device and driver as our stack.
//!
//! Received frames are read where the device wrote them. Frames to send are written into pages of
//! the device. Buffers are as large as our stack's send buffer. Only two settings are not the
//! default: the size of the buffers, and that small segments are not delayed.

use super::end::{End, Idle, LOOK};
use super::memory::{Buffer, Memory, PIECE, SPARE};
use super::net::ADDRESSES;
use super::rig::{Link, Offloads, RING, address};
use anyhow::Context;
use netmem::device::NetDevice;
use netmem::device::port::Port;
use netmem::net::{Checksum, Packet, Poll, PollThenSleep, RxQueue, TxQueue};
use netmem::pool::{PoolOptions, SharedPool};
use netmem::virtio::{QueuePair, VirtioNet, VirtioRx, VirtioTx};
use netmem_inet::wire::HEADROOM;
use netmem_measure::endpoint::{self, mac};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum as SmolChecksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{self, State};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr};
use std::collections::VecDeque;
use std::sync::MutexGuard;
use std::time::Duration;

/// Bytes of each buffer of the socket.
const BUFFER: usize = 1 << 20;
/// Frames that are received at once.
const FRAMES: usize = 256;

/// The parts of a stack, which are moved to its thread.
pub(super) struct Parts<P> {
    pair: QueuePair<endpoint::Mem>,
    pool: SharedPool<endpoint::Mem>,
    end: usize,
    link: Link,
    idle: Idle,
    pub(super) device: Option<NetDevice<P>>,
}

impl<P> Parts<P> {
    pub(super) fn new(
        net: &VirtioNet<endpoint::Mem>,
        pair: QueuePair<endpoint::Mem>,
        end: usize,
        link: Link,
        idle: Idle,
    ) -> anyhow::Result<Self> {
        let pool = net.tx_pool(PoolOptions::new("smoltcp").limit(SPARE / 4))?;
        Ok(Self { pair, pool, end, link, idle, device: None })
    }
}

/// The queues, with the interface that smoltcp expects.
struct Queues {
    rx: VirtioRx<endpoint::Mem>,
    tx: VirtioTx<endpoint::Mem>,
    pool: SharedPool<endpoint::Mem>,
    /// Frames that were received and that smoltcp has not asked for yet.
    backlog: VecDeque<Packet<endpoint::Mem>>,
    link: Link,
}

impl Queues {
    /// What sends a frame. If the device computes checksums, it gets the place of that of TCP. No
    /// receiver verifies it then: the frames are never on a wire.
    fn sender(&mut self) -> Send<'_> {
        let partial = Checksum::Partial { start: 34, offset: 16 };
        let checksum = if self.link.offloads == Offloads::None { Checksum::Unknown } else { partial };
        Send { tx: &mut self.tx, pool: &self.pool, checksum }
    }

    /// Receives frames, and gets back the pages of sent frames. Returns how many there were.
    fn poll(&mut self) -> usize {
        let Self { rx, tx, backlog, .. } = self;
        rx.poll(|poll| tx.complete() + poll.receive(FRAMES, &mut |packet| backlog.push_back(packet)))
    }
}

struct Received(Packet<endpoint::Mem>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0.head())
    }
}

struct Send<'a> {
    tx: &'a mut VirtioTx<endpoint::Mem>,
    pool: &'a SharedPool<endpoint::Mem>,
    checksum: Checksum,
}

impl TxToken for Send<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let Some(mut page) = self.pool.alloc() else { return f(&mut vec![0; len]) };
        // With room for the queue's header, a frame is one piece of memory for the device.
        let place = HEADROOM..HEADROOM + len;
        let frame = &mut page.as_mut_slice()[place.clone()];
        let done = f(frame);
        let is_ip = frame.get(12..14) == Some(&[8, 0]);
        let mut packet = Packet::new(page.freeze_range(place));
        if is_ip {
            packet.meta.checksum = self.checksum;
        }
        // A full queue returns the packet. The packet is then lost, as on any network.
        let _ = self.tx.send(packet);
        done
    }
}

impl Device for Queues {
    type RxToken<'a> = Received;
    type TxToken<'a> = Send<'a>;

    fn receive(&mut self, _now: Instant) -> Option<(Received, Send<'_>)> {
        let packet = self.backlog.pop_front()?;
        Some((Received(packet), self.sender()))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Send<'_>> {
        // If the ring has no room, smoltcp keeps the frame. A frame takes two entries at most.
        (2 * (self.tx.posted() + 1) <= usize::from(RING)).then(|| self.sender())
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = usize::from(self.link.mtu) + 14;
        if self.link.offloads != Offloads::None {
            capabilities.checksum.tcp = SmolChecksum::None;
        }
        capabilities
    }
}

/// One end.
pub(super) struct Smol<'m, P> {
    interface: Interface,
    sockets: SocketSet<'static>,
    socket: SocketHandle,
    queues: Queues,
    pause: PollThenSleep,
    idle: Idle,
    device: Option<NetDevice<P>>,
    memory: &'m Memory,
    source: Option<MutexGuard<'m, Buffer>>,
    sink: Option<MutexGuard<'m, Buffer>>,
    /// Bytes of the last produced piece that were not sent yet.
    left: usize,
}

impl<'m, P: Port> Smol<'m, P> {
    fn new(parts: Parts<P>, memory: &'m Memory) -> Self {
        let Parts { pair, pool, end, link, idle, device } = parts;
        let mut queues = Queues { rx: pair.rx, tx: pair.tx, pool, backlog: VecDeque::new(), link };
        let mac = EthernetAddress(mac(&[address(end)]));
        let mut interface = Interface::new(Config::new(mac.into()), &mut queues, Instant::now());
        interface.update_ip_addrs(|addresses| {
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(ADDRESSES[end]), 24));
        });
        let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket.set_nagle_enabled(false);
        let mut sockets = SocketSet::new(Vec::new());
        let socket = sockets.add(socket);
        let (pause, left) = (PollThenSleep::new(Duration::ZERO), 0);
        Self { interface, sockets, socket, queues, pause, idle, device, memory, source: None, sink: None, left }
    }

    pub(super) fn listen(parts: Parts<P>, memory: &'m Memory, port: u16, ready: impl FnOnce()) -> anyhow::Result<Self> {
        let mut end = Self::new(parts, memory);
        end.socket().listen(port).map_err(|e| anyhow::anyhow!("smoltcp: {e}"))?;
        ready();
        Ok(end)
    }

    pub(super) fn connect(parts: Parts<P>, memory: &'m Memory, to: usize, port: u16) -> anyhow::Result<Self> {
        let mut end = Self::new(parts, memory);
        let socket = end.sockets.get_mut::<tcp::Socket<'_>>(end.socket);
        let remote = (IpAddress::Ipv4(ADDRESSES[to]), port);
        let connecting = socket.connect(end.interface.context(), remote, 49152);
        connecting.map_err(|e| anyhow::anyhow!("smoltcp: {e}"))?;
        Ok(end)
    }

    fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.socket)
    }
}

impl<P: Port> End for Smol<'_, P> {
    fn produce(&mut self) -> anyhow::Result<usize> {
        if !self.socket().can_send() {
            return Ok(0);
        }
        let source = self.source.get_or_insert_with(|| self.memory.source());
        if self.left == 0 {
            self.left = source.produce().len();
        }
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.socket);
        let sent = socket.send_slice(&source.produced()[PIECE - self.left..]).context("a socket of smoltcp")?;
        self.left -= sent;
        Ok(sent)
    }

    fn consume(&mut self) -> anyhow::Result<Option<usize>> {
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.socket);
        if !socket.can_recv() {
            return Ok((socket.state() != State::CloseWait).then_some(0));
        }
        let sink = self.sink.get_or_insert_with(|| self.memory.sink());
        Ok(Some(sink.consume(|room| socket.recv_slice(room).unwrap_or(0))))
    }

    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<usize> {
        let socket = self.socket();
        if !socket.can_send() {
            return Ok(0);
        }
        socket.send_slice(bytes).context("a socket of smoltcp")
    }

    fn read(&mut self, into: &mut [u8]) -> anyhow::Result<Option<usize>> {
        let socket = self.socket();
        if !socket.can_recv() {
            return Ok((socket.state() != State::CloseWait).then_some(0));
        }
        Ok(Some(socket.recv_slice(into).context("a socket of smoltcp")?))
    }

    fn turn(&mut self, worked: bool) -> anyhow::Result<()> {
        let mut work = usize::from(worked);
        work += self.device.as_mut().map_or(0, NetDevice::poll);
        work += self.queues.poll();
        if work > 0 || self.interface.poll_at(Instant::now(), &self.sockets).is_some_and(|at| at <= Instant::now()) {
            self.interface.poll(Instant::now(), &mut self.queues, &mut self.sockets);
            self.queues.tx.flush();
        }
        work += self.device.as_mut().map_or(0, NetDevice::poll);
        if work > 0 || self.idle == Idle::Polls {
            return Ok(());
        }
        let sleep = self.interface.poll_delay(Instant::now(), &self.sockets);
        let sleep = sleep.map_or(LOOK, |delay| Duration::from_micros(delay.total_micros()).min(LOOK));
        self.pause.turn(work, &mut [&mut self.queues.rx], Some(sleep))?;
        Ok(())
    }
}
