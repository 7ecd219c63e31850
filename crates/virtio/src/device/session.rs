//! The session of one front end: vhost-user messages, each checked and then applied to the shared
//! state.
//!
//! `docs/design/vhost-user.md` has the table of messages. If the device cannot carry out a message,
//! the message changes nothing. If the front end has asked for an acknowledgement, the device
//! answers with a non-zero one, and the connection continues. If not, the front end would not
//! notice the refusal, so the connection ends. A malformed message always ends the connection.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};

use super::error::DeviceError;
use super::shared::Shared;
use crate::guest_memory::dirty_log::DirtyLog;
use crate::guest_memory::mapping::Mapping;
use crate::guest_memory::{MAX_REGIONS, MemoryTable, RegionInfo};
use crate::notify::{Notifier, NotifyError};
use crate::vhost_user::message::{Inflight, MemoryRegion, Message, Reply, Request, protocol};
use crate::vhost_user::message_socket::{MessageError, MessageSocket};
use crate::vhost_user::received::Received;
use crate::virtqueue::SplitLayout;
use crate::virtqueue::device::inflight::{InflightError, InflightRegion};

/// The least and the most that a network's MTU can be: IPv4 asks for 68 bytes.
const MTU: std::ops::RangeInclusive<u64> = 68..=65535;

/// The protocol features that a device can have.
const PROTOCOL: u64 = protocol::MQ
    | protocol::LOG_SHMFD
    | protocol::RARP
    | protocol::REPLY_ACK
    | protocol::MTU
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS
    | protocol::STATUS
    | protocol::NETMEM_RINGS
    | protocol::NETMEM_SPLIT;

/// The event descriptor of a message, if there is one, which `accept` checks.
fn event<T>(
    ring: u8,
    fd: Option<Received>,
    accept: impl FnOnce(OwnedFd) -> Result<T, NotifyError>,
) -> Result<Option<T>, DeviceError> {
    fd.map(|fd| fd.eventfd().and_then(accept))
        .transpose()
        .map_err(|source| DeviceError::Event { ring: ring.into(), source })
}

/// Converts a region of a message into one of the memory table.
fn info(r: &MemoryRegion) -> RegionInfo {
    RegionInfo { guest_addr: r.guest_addr, user_addr: r.user_addr, size: r.size, mmap_offset: r.mmap_offset }
}

/// The protocol feature that a message belongs to; 0 if it belongs to none.
fn required_feature(request: Request) -> u64 {
    match request {
        Request::SET_LOG_BASE => protocol::LOG_SHMFD,
        Request::GET_QUEUE_NUM => protocol::MQ,
        Request::SEND_RARP => protocol::RARP,
        Request::NET_SET_MTU => protocol::MTU,
        Request::GET_CONFIG | Request::SET_CONFIG => protocol::CONFIG,
        Request::GET_INFLIGHT_FD | Request::SET_INFLIGHT_FD => protocol::INFLIGHT_SHMFD,
        Request::RESET_DEVICE => protocol::RESET_DEVICE,
        Request::GET_MAX_MEM_SLOTS | Request::ADD_MEM_REG | Request::REM_MEM_REG => protocol::CONFIGURE_MEM_SLOTS,
        Request::SET_STATUS | Request::GET_STATUS => protocol::STATUS,
        _ => 0,
    }
}

/// The session of one front end. It does not depend on sockets.
#[derive(Debug)]
pub(crate) struct Session {
    shared: Arc<Shared>,
    /// The protocol features that the front end accepted.
    protocol: u64,
}

impl Session {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, protocol: 0 }
    }

    pub(super) fn run(mut self, socket: &MessageSocket) -> Result<(), DeviceError> {
        while let Some(packet) = socket.next()? {
            let (request, asked) = (packet.request, packet.needs_reply());
            let message = Message::decode(packet).map_err(MessageError::from)?;
            let result = self.handle(message);
            let acknowledged = asked && self.protocol & protocol::REPLY_ACK != 0 && !request.has_answer();
            let reply = match result {
                Ok(Some(reply)) => reply,
                Ok(None) if acknowledged => Reply::Number(0),
                Ok(None) => continue,
                Err(why) if acknowledged => {
                    netmem_pool::trace::debug!("{request} refused: {why}");
                    self.shared.stats.refused.fetch_add(1, Ordering::Relaxed);
                    Reply::Number(1)
                }
                Err(why) => return Err(DeviceError::Refused { request, why: Box::new(why) }),
            };
            socket.send(&reply.encode(request))?;
        }
        Ok(())
    }

    /// Carries out one message. Returns the message's answer, if it has one.
    ///
    /// # Errors
    ///
    /// Why the message cannot be carried out. It has changed nothing.
    pub(crate) fn handle(&mut self, message: Message<Received>) -> Result<Option<Reply<OwnedFd>>, DeviceError> {
        let needed = required_feature(message.request());
        if needed & !self.protocol != 0 {
            return Err(DeviceError::NotNegotiated { feature: protocol::name(needed) });
        }
        match message {
            Message::GetFeatures => return Ok(Some(Reply::Number(self.shared.offered))),
            Message::SetFeatures(features) => self.shared.set_features(features)?,
            // One connection is one session, so nothing has to be set up.
            Message::SetOwner => {}
            Message::ResetOwner => self.shared.disable_all(),
            Message::ResetDevice => self.shared.reset_device(),
            Message::SetStatus(0) => self.shared.reset_device(),
            Message::SetStatus(status) => self.shared.set_status(status),
            Message::GetStatus => return Ok(Some(Reply::Number(self.shared.status().into()))),
            Message::GetProtocolFeatures => return Ok(Some(Reply::Number(self.offered_protocol()))),
            Message::SetProtocolFeatures(features) => {
                let extra = features & !self.offered_protocol();
                if extra != 0 {
                    return Err(DeviceError::NotOffered { extra, name: protocol::name(extra) });
                }
                self.protocol = features;
            }
            // The specification counts queues, and Cloud Hypervisor compares the answer with the
            // rings that it wants. QEMU and DPDK understand pairs, and so may ask for a ring that
            // does not exist, which is refused by name.
            Message::GetQueueNum => return Ok(Some(Reply::Number(self.shared.rings as u64))),
            Message::SendRarp(mac) => self.shared.announce(mac),
            Message::NetSetMtu(mtu) => self.check_mtu(mtu)?,
            Message::GetConfig { offset, size, flags } => {
                let bytes = self.shared.config.read(offset, size as usize);
                return Ok(Some(Reply::Config { offset, flags, bytes }));
            }
            Message::SetConfig { offset, bytes, .. } => {
                // No field can be written. Writing the value that is there already is accepted.
                if self.shared.config.read(offset, bytes.len()) != bytes {
                    return Err(DeviceError::ReadOnly { offset, len: bytes.len() });
                }
            }
            other => return self.handle_ring(other),
        }
        Ok(None)
    }

    /// The same for messages that concern one ring.
    fn handle_ring(&mut self, message: Message<Received>) -> Result<Option<Reply<OwnedFd>>, DeviceError> {
        match message {
            Message::SetVringNum { index, num } => {
                let (index, packed) = (index as usize, self.shared.packed());
                self.shared.ring(index, |ring| ring.set_size(index, num, packed))??;
            }
            Message::SetVringAddr { index, addresses: a } => {
                let used_log = a.log.then_some(a.log_addr);
                let splits = a.splits && self.protocol & protocol::NETMEM_SPLIT != 0;
                let (index, parts) = (index as usize, [a.descriptors, a.available, a.used]);
                self.shared.ring_with(index, |ring, common| ring.set_parts(index, parts, splits, used_log, common))?;
            }
            Message::SetVringBase { index, base } => {
                let (index, packed) = (index as usize, self.shared.packed());
                self.shared.ring(index, |ring| ring.set_base(index, base, packed))??;
            }
            Message::GetVringBase { index } => {
                let packed = self.shared.packed();
                let base = self.shared.ring(index as usize, |ring| ring.get_base(packed))?;
                return Ok(Some(Reply::VringBase { index, base }));
            }
            Message::SetVringKick { index, fd } => {
                let ring = usize::from(index);
                let kick = self.shared.kicks(ring, |kicks| event(index, fd, |fd| kicks.watch(fd)))??;
                self.shared.set_kick(ring, kick)?;
            }
            Message::SetVringCall { index, fd } => {
                let call = event(index, fd, Notifier::new)?;
                self.shared.ring(index.into(), |ring| ring.set_call(call))?;
            }
            Message::SetVringErr { index, fd } => {
                let err = event(index, fd, Notifier::new)?;
                self.shared.ring(index.into(), |ring| ring.set_err(err))?;
            }
            // QEMU enables its rings only once, before it accepts features. So this does not depend
            // on the features.
            Message::SetVringEnable { index, enable } => {
                self.shared.ring(index as usize, |ring| ring.set_enabled(enable))?;
            }
            other => return self.handle_memory(other),
        }
        Ok(None)
    }

    /// The same for messages that concern memory: the guest's, the dirty log, the in-flight region.
    fn handle_memory(&mut self, message: Message<Received>) -> Result<Option<Reply<OwnedFd>>, DeviceError> {
        match message {
            Message::SetMemTable(regions) => self.set_memory(regions)?,
            Message::GetMaxMemSlots => return Ok(Some(Reply::Number(MAX_REGIONS as u64))),
            Message::AddMemReg(region, fd) => {
                let limits = self.shared.options.memory_limits();
                self.shared.exchange_memory(|table| Ok(table.add(info(&region), fd.into_inner(), &limits)?))?;
            }
            Message::RemMemReg(region) => self.shared.exchange_memory(|table| Ok(table.remove(&info(&region))?))?,
            Message::GetInflightFd(asked) => return self.make_inflight(asked).map(Some),
            Message::SetInflightFd(region, fd) => {
                let packed = self.shared.packed();
                let map = self.map("the in-flight region", fd, region.mmap_offset, region.mmap_size)?;
                let region = InflightRegion::new(map, region.queues, region.queue_size, packed)?;
                self.shared.set_inflight(region)?;
            }
            Message::SetLogBase { size, offset, fd } => {
                let map = self.map("the dirty log", fd, offset, size)?;
                let log = DirtyLog::new(map, Arc::clone(&self.shared.stats.log_misses));
                self.shared.set_log(log);
                return Ok(Some(Reply::Empty));
            }
            // A front end that migrates reads the log by itself, so it gets no event for each
            // write.
            Message::SetLogFd(_) => {}
            _ => return Err(DeviceError::Unsupported),
        }
        Ok(None)
    }

    fn offered_protocol(&self) -> u64 {
        if self.shared.options.split_headers { PROTOCOL } else { PROTOCOL & !protocol::NETMEM_SPLIT }
    }

    /// Maps a file that is not the guest's memory. The limit for memory holds for each such file,
    /// too, because their pages are allocated when the device touches them.
    fn map(&self, what: &'static str, fd: Received, offset: u64, bytes: u64) -> Result<Mapping, DeviceError> {
        self.shared.options.memory_limits().check(bytes)?;
        Ok(Mapping::new(what, &fd, offset, bytes)?)
    }

    fn set_memory(&self, regions: Vec<(MemoryRegion, Received)>) -> Result<(), DeviceError> {
        let (regions, files): (Vec<_>, Vec<_>) = regions.into_iter().unzip();
        let regions: Vec<_> = regions.iter().map(info).collect();
        // Mapping is slow. No lock is held, so passes continue.
        let files = files.into_iter().map(Received::into_inner).collect();
        let memory = MemoryTable::new(&regions, files, &self.shared.options.memory_limits())?;
        self.shared.set_memory(memory);
        Ok(())
    }

    /// The device passes on frames of every length. So an MTU is only compared with the one that
    /// the device offered.
    fn check_mtu(&self, mtu: u64) -> Result<(), DeviceError> {
        let most = self.shared.options.mtu.map_or(*MTU.end(), u64::from);
        if (*MTU.start()..=most).contains(&mtu) { Ok(()) } else { Err(DeviceError::Mtu { mtu, most }) }
    }

    /// Makes an in-flight region, in which a back end keeps the chains that are in flight. It is
    /// all zero, and has no pages before it is used.
    fn make_inflight(&self, asked: Inflight) -> Result<Reply<OwnedFd>, DeviceError> {
        let failed = |e: rustix::io::Errno| DeviceError::Io { what: "making an in-flight region", source: e.into() };
        let Inflight { queues, queue_size, .. } = asked;
        let (rings, packed) = (self.shared.rings, self.shared.packed());
        let mmap_size = InflightRegion::bytes(queues, queue_size, packed);
        if queues == 0 || usize::from(queues) > rings || !(1..=SplitLayout::MAX_SIZE).contains(&queue_size) {
            return Err(InflightError::Shape { queues, queue_size, bytes: mmap_size }.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(c"netmem-inflight", flags).map_err(failed)?;
        rustix::fs::ftruncate(&fd, mmap_size).map_err(failed)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        Ok(Reply::Inflight(Inflight { mmap_size, mmap_offset: 0, queues, queue_size }, Some(fd)))
    }
}
