//! The front end: the driver's connection to a device in another process, or in this one.
//!
//! The order of the messages is the one that QEMU uses, because back ends are written for it. The
//! features are acknowledged once, all together: a back end may treat the first `SET_FEATURES` as
//! the driver's final choice.
//!
//! ```text
//! connect    GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_OWNER
//! negotiate  SET_STATUS, SET_FEATURES, SET_STATUS, GET_STATUS, GET_CONFIG, NET_SET_MTU
//! then       SET_MEM_TABLE; for each ring SET_VRING_CALL, _NUM, _BASE, _ADDR, _KICK, _ENABLE;
//!            SET_STATUS
//! ```
//!
//! A message that belongs to a protocol feature is left out if the back end lacks the feature. A
//! back end without any protocol features serves one queue pair. Every wait is
//! [bounded](super::message_socket): if a back end does not answer, this is an error and the end of
//! the connection.

use super::VhostUserError;
use super::message::{MAX_FDS, Malformed, MemoryRegion, Message, Reply, Request, VringAddresses, protocol};
use super::message_socket::{MessageError, MessageSocket};
use super::received::Received;
use super::socket::{self, Listener};
use crate::net::config::NetConfig;
use crate::net::feature;
use netmem_pool::VhostRegion;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The longest wait for a back end to accept a connection, and to answer a message.
const LIMIT: Duration = Duration::from_secs(3);

/// The protocol features that are accepted if the back end has them.
const ACCEPTED: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::MTU
    | protocol::CONFIG
    | protocol::STATUS
    | protocol::CONFIGURE_MEM_SLOTS
    | protocol::NETMEM_RINGS
    | protocol::NETMEM_SPLIT;

/// Most queue pairs that a back end can name: rings have 16-bit numbers.
const MAX_PAIRS: u64 = 1 << 15;

/// Bits of the device status (virtio 1.2, section 2.1).
mod status {
    pub(super) const ACKNOWLEDGE: u8 = 1;
    pub(super) const DRIVER: u8 = 2;
    pub(super) const DRIVER_OK: u8 = 4;
    pub(super) const FEATURES_OK: u8 = 8;
}

/// The place of a ring, for the back end, in addresses of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingAddresses {
    pub(crate) size: u16,
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    /// The position at which the back end begins: an index, or the two positions of a packed ring.
    pub(crate) base: u32,
    /// Whether the back end must split frames behind their headers. It must be
    /// [able](VhostUser::splits) to.
    pub(crate) splits: bool,
}

/// A connection to a vhost-user back end.
pub struct VhostUser {
    socket: MessageSocket,
    offered: u64,
    /// Protocol features in use.
    protocol: u64,
    pairs: u64,
    /// The user declares that the back end is Netmem's own device.
    own: bool,
    /// If the back end is our own device: whether it serves the control queue that it offers.
    serves_control: bool,
    /// The back end is our own device in this process, and gets the files that no other may have.
    in_process: bool,
    /// The device status as it was set last.
    status: u8,
    /// Which rings are enabled, so that a ring which is started again has the same state as before.
    enabled: Vec<bool>,
}

impl VhostUser {
    /// Connects to the back end that listens on `path`.
    ///
    /// # Errors
    ///
    /// [`VhostUserError`]: no process listens there or accepts the connection within 3 s, or it is
    /// no vhost-user back end.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, VhostUserError> {
        Self::over(socket::connect(path.as_ref(), LIMIT)?, false)
    }

    /// Waits up to `limit` for a back end that connects to the driver, as Open vSwitch does with
    /// ports of the type `dpdkvhostuserclient`. The listener stays, for the back end to connect
    /// again.
    ///
    /// # Errors
    ///
    /// [`VhostUserError`]: no back end connected, or the process that connected is none.
    pub fn accept(listener: &Listener, limit: Duration) -> Result<Self, VhostUserError> {
        Self::over(listener.accept(limit)?, false)
    }

    /// Uses a stream that is connected to a back end.
    ///
    /// # Errors
    ///
    /// [`VhostUserError`].
    pub fn from_stream(stream: UnixStream) -> Result<Self, VhostUserError> {
        Self::over(stream, false)
    }

    /// Uses a stream that is connected to one of our own [devices](crate::device), which may serve
    /// the control queue itself.
    ///
    /// # Errors
    ///
    /// [`VhostUserError`].
    pub fn own_device(stream: UnixStream) -> Result<Self, VhostUserError> {
        Self::over(stream, true)
    }

    /// The same for a device in this process.
    ///
    /// # Safety
    ///
    /// The process at the other end of the stream is this one, and one of our own devices answers.
    #[cfg(feature = "device")]
    pub(crate) unsafe fn in_process(stream: UnixStream) -> Result<Self, VhostUserError> {
        Ok(Self { in_process: true, ..Self::over(stream, true)? })
    }

    fn over(stream: UnixStream, own: bool) -> Result<Self, VhostUserError> {
        let (socket, in_process, serves_control) = (MessageSocket::new(stream, LIMIT), false, own);
        let (offered, protocol, pairs, status, enabled) = (0, 0, 1, 0, Vec::new());
        let mut this = Self { socket, offered, protocol, pairs, own, serves_control, in_process, status, enabled };
        this.offered = this.request_u64(Message::GetFeatures)?;
        if this.offered & feature::VHOST_USER_PROTOCOL != 0 {
            let take = this.request_u64(Message::GetProtocolFeatures)? & ACCEPTED;
            // This message is not confirmed, because it is the one that turns confirmations on.
            this.send(Message::SetProtocolFeatures(take))?;
            this.protocol = take;
        }
        if this.has(protocol::MQ) {
            // The specification counts queues. Most back ends of network devices count pairs, and
            // Netmem's own counts rings.
            let number = this.request_u64(Message::GetQueueNum)?;
            (this.pairs, this.serves_control) = match this.has(protocol::NETMEM_RINGS) {
                true => (number / 2, own && number % 2 == 1),
                false => (number, own),
            };
            if this.pairs > MAX_PAIRS {
                let (request, field, value) = (Request::GET_QUEUE_NUM, "number of queue pairs", this.pairs);
                return Err(this.failed(request, Malformed::Field { request, field, value }.into()));
            }
        }
        this.send(Message::SetOwner)?;
        Ok(this)
    }

    /// The features that the back end offers.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// How many queue pairs it has.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        self.pairs
    }

    /// Whether the back end answers on a control queue. Foreign ones leave that to the front end.
    pub(crate) fn has_control_queue(&self) -> bool {
        self.serves_control && self.offered & feature::CTRL_VQ != 0
    }

    /// The number of the control queue's ring, which follows those of all pairs.
    pub(crate) fn control_ring(&self) -> usize {
        usize::try_from(self.pairs * 2).unwrap_or(usize::MAX)
    }

    /// Whether the back end can put the headers of a frame into the first segment of a buffer, and
    /// the payload into the others. Only our own device can.
    pub(crate) fn splits(&self) -> bool {
        self.has(protocol::NETMEM_SPLIT)
    }

    /// Whether a protocol feature is in use.
    pub(crate) fn has(&self, bit: u64) -> bool {
        self.protocol & bit != 0
    }

    /// Returns an error if one of `features` is not offered. `why` is its reason in the error.
    pub(crate) fn require(&self, features: u64, why: &'static str) -> Result<(), VhostUserError> {
        match features & !self.offered {
            0 => Ok(()),
            missing => {
                let (name, bit) = (feature::name(missing), missing.trailing_zeros());
                Err(VhostUserError::MissingFeature { name, bit, why })
            }
        }
    }

    /// Negotiates `features`. If one is not offered, the error has `why` as the reason. Called once
    /// in a connection. `mtu` is the longest packet that the driver receives, in bytes. Where
    /// `features` has the MTU, it is sent to the back end, or the back end's own MTU if that is
    /// shorter.
    pub(crate) fn negotiate(&mut self, features: u64, why: &'static str, mtu: u64) -> Result<(), VhostUserError> {
        self.require(features, why)?;
        self.add_status(status::ACKNOWLEDGE | status::DRIVER)?;
        self.send(Message::SetFeatures(features | (self.offered & feature::VHOST_USER_PROTOCOL)))?;
        self.add_status(status::FEATURES_OK)?;
        if self.has(protocol::STATUS) {
            let status = self.request_u64(Message::GetStatus)?;
            if status & u64::from(status::FEATURES_OK) == 0 {
                return Err(VhostUserError::FeaturesRefused { features });
            }
        }
        if self.has(protocol::MTU) && features & feature::MTU != 0 {
            let offered = self.config(features)?.mtu.map_or(u64::MAX, u64::from);
            self.send(Message::NetSetMtu(mtu.min(offered)))?;
        }
        Ok(())
    }

    /// Whether the back end has a configuration space that can be read.
    pub(crate) fn has_config(&self) -> bool {
        self.has(protocol::CONFIG)
    }

    /// Reads the fields of the configuration space that `features` define. If a back end has none,
    /// or refuses, there are no bytes.
    pub(crate) fn config(&mut self, features: u64) -> Result<NetConfig, VhostUserError> {
        let (request, len) = (Request::GET_CONFIG, NetConfig::len(features));
        if !self.has_config() || len == 0 {
            return Ok(NetConfig::default());
        }
        match self.request(Message::GetConfig { offset: 0, size: len as u32, flags: 0 })? {
            Reply::Config { offset: 0, bytes, .. } if bytes.len() == len => Ok(NetConfig::read(features, &bytes)),
            // If the answer is a number, or there is none, the back end has refused.
            Reply::Number(_) | Reply::Empty => Ok(NetConfig::default()),
            Reply::Config { offset, .. } if offset != 0 => {
                let (field, value) = ("offset", offset.into());
                Err(self.failed(request, Malformed::Field { request, field, value }.into()))
            }
            Reply::Config { bytes, .. } => {
                let size = bytes.len();
                Err(self.failed(request, Malformed::Size { request, size }.into()))
            }
            _ => Err(self.failed(request, Malformed::WrongAnswer { got: request }.into())),
        }
    }

    /// Sets DRIVER_OK: the rings are set up.
    pub(crate) fn ready(&mut self) -> Result<(), VhostUserError> {
        self.add_status(status::DRIVER_OK)
    }

    fn add_status(&mut self, bits: u8) -> Result<(), VhostUserError> {
        if !self.has(protocol::STATUS) {
            return Ok(());
        }
        self.status |= bits;
        self.send(Message::SetStatus(self.status))
    }

    /// Sends the memory table: each region at the bus address of its entry. One message has eight
    /// of them; the others are added, where the back end supports that.
    pub(crate) fn set_memory(&mut self, entries: &[VhostRegion]) -> Result<(), VhostUserError> {
        let (table, others) = entries.split_at(entries.len().min(MAX_FDS));
        if !others.is_empty() && entries.len() as u64 > self.memory_slots()? {
            return Err(VhostUserError::TooManyRegions { count: entries.len(), max: MAX_FDS });
        }
        let regions = table.iter().map(|e| Ok((region(e), self.file(e)?)));
        let regions = regions.collect::<Result<_, VhostUserError>>()?;
        self.send(Message::SetMemTable(regions))?;
        others.iter().try_for_each(|e| self.add_memory(e))
    }

    /// The file of a region, if the back end may have it.
    fn file<'e>(&self, entry: &'e VhostRegion) -> Result<BorrowedFd<'e>, VhostUserError> {
        let file = if self.in_process {
            // SAFETY: the back end is our own device in this process. It writes to a buffer only
            // from when the driver has posted it until it has returned it, or has confirmed that
            // the ring was stopped, and passes the file to no other party.
            unsafe { entry.in_process_fd() }
        } else {
            entry.fd()
        };
        file.ok_or(VhostUserError::InProcess)
    }

    /// How many regions the back end can have, which are added and removed while its rings run. 0
    /// if it cannot do that.
    pub(crate) fn memory_slots(&mut self) -> Result<u64, VhostUserError> {
        if self.has(protocol::CONFIGURE_MEM_SLOTS) { self.request_u64(Message::GetMaxMemSlots) } else { Ok(0) }
    }

    /// Adds a region to the back end's memory. The back end must have [slots](Self::memory_slots).
    pub(crate) fn add_memory(&mut self, entry: &VhostRegion) -> Result<(), VhostUserError> {
        let file = self.file(entry)?;
        self.send(Message::AddMemReg(region(entry), file))
    }

    /// Removes a region from the back end's table. Once the back end has confirmed that, it no
    /// longer accesses the region.
    pub(crate) fn remove_memory(&mut self, entry: &VhostRegion) -> Result<(), VhostUserError> {
        self.send(Message::RemMemReg(region(entry)))
    }

    /// Sets a ring up. Back ends allocate a ring when they get its call descriptor, and start it
    /// when they get its kick descriptor; hence the order.
    pub(crate) fn start_ring(
        &mut self,
        index: usize,
        at: RingAddresses,
        call: BorrowedFd<'_>,
        kick: BorrowedFd<'_>,
    ) -> Result<(), VhostUserError> {
        let number = u8::try_from(index).map_err(|_| VhostUserError::RingNumber { index })?;
        let index = u32::from(number);
        let RingAddresses { size, desc, avail, used, base, splits } = at;
        let addresses = VringAddresses { descriptors: desc, used, available: avail, log_addr: 0, log: false, splits };
        self.send(Message::SetVringCall { index: number, fd: Some(call) })?;
        self.send(Message::SetVringNum { index, num: size.into() })?;
        self.send(Message::SetVringBase { index, base })?;
        self.send(Message::SetVringAddr { index, addresses })?;
        self.send(Message::SetVringKick { index: number, fd: Some(kick) })
    }

    /// Starts a ring that was stopped, and enables it if it was. The other rings go on. A foreign
    /// back end has them disabled and enabled: DPDK's vhost stops serving all queues when one
    /// stops, and serves a queue again only when it becomes ready.
    pub(crate) fn restart_ring(
        &mut self,
        index: usize,
        at: RingAddresses,
        call: BorrowedFd<'_>,
        kick: BorrowedFd<'_>,
    ) -> Result<(), VhostUserError> {
        self.start_ring(index, at, call, kick)?;
        for other in 0..self.enabled.len() {
            if other != index && self.enabled[other] && !self.own {
                self.enable_ring(other, false)?;
                self.enable_ring(other, true)?;
            }
        }
        let enabled = self.enabled.get(index).copied().unwrap_or(false);
        self.enable_ring(index, enabled)
    }

    /// Enables or disables a ring: whether the back end may use its buffers.
    pub(crate) fn enable_ring(&mut self, index: usize, enable: bool) -> Result<(), VhostUserError> {
        if self.enabled.len() <= index {
            self.enabled.resize(index + 1, false);
        }
        self.enabled[index] = enable;
        if self.offered & feature::VHOST_USER_PROTOCOL == 0 {
            // Without protocol features rings are enabled from the start.
            return Ok(());
        }
        self.send(Message::SetVringEnable { index: index as u32, enable })
    }

    /// Stops a ring. Once the back end has answered it touches no buffer of it any more.
    pub(crate) fn stop_ring(&mut self, index: usize) -> Result<(), VhostUserError> {
        self.request(Message::GetVringBase { index: index as u32 }).map(drop)
    }

    /// Whether the back end still holds its end of the connection. One system call.
    pub(crate) fn is_connected(&self) -> bool {
        self.socket.is_open()
    }

    /// The socket, to watch for its end.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.socket()
    }

    /// Sends a message that has an answer, and waits for the answer.
    pub(crate) fn request(&mut self, message: Message<BorrowedFd<'_>>) -> Result<Reply<Received>, VhostUserError> {
        self.exchange(&message, false)
    }

    /// Sends a message that has no answer. Waits until the back end confirms it, where the two have
    /// agreed on that.
    pub(crate) fn send(&mut self, message: Message<BorrowedFd<'_>>) -> Result<(), VhostUserError> {
        let request = message.request();
        if !self.has(protocol::REPLY_ACK) {
            return self.socket.send(&message.encode(false)).map_err(|e| self.failed(request, e));
        }
        match self.exchange(&message, true)? {
            Reply::Number(0) => Ok(()),
            _ => Err(VhostUserError::Refused { message: request }),
        }
    }

    fn request_u64(&mut self, message: Message<BorrowedFd<'_>>) -> Result<u64, VhostUserError> {
        let request = message.request();
        match self.request(message)? {
            Reply::Number(number) => Ok(number),
            _ => Err(self.failed(request, Malformed::WrongAnswer { got: request }.into())),
        }
    }

    fn exchange(&self, message: &Message<BorrowedFd<'_>>, confirm: bool) -> Result<Reply<Received>, VhostUserError> {
        let request = message.request();
        let answer = self.socket.send(&message.encode(confirm)).and_then(|()| self.socket.recv());
        let reply = answer.and_then(|packet| Ok(Reply::decode(packet, request)?));
        reply.map_err(|e| self.failed(request, e))
    }

    /// Ends the connection, because after an error the two sides may not agree any more on where a
    /// message begins.
    fn failed(&self, message: Request, source: MessageError) -> VhostUserError {
        self.socket.shutdown();
        match source {
            MessageError::TimedOut(limit) => VhostUserError::Silent { message, seconds: limit.as_secs_f64() },
            // The first message.
            MessageError::Closed if message == Request::GET_FEATURES => VhostUserError::Busy,
            MessageError::TooFewDescriptors => VhostUserError::TooFewDescriptors { message },
            source => VhostUserError::Message { message, source },
        }
    }
}

/// A region in the form of a message to the back end.
fn region(e: &VhostRegion) -> MemoryRegion {
    let (guest_addr, size) = (e.bus(), e.len() as u64);
    MemoryRegion { guest_addr, size, user_addr: e.user_addr(), mmap_offset: e.file_offset() }
}

impl std::fmt::Debug for VhostUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VhostUser(offered {:#x}, {} pairs)", self.offered, self.pairs)
    }
}
