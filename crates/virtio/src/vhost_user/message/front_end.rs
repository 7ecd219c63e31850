//! The messages of a front end: one definition that encodes and decodes.

use super::decode::Decoder;
use super::encode::EncodedMessage;
use super::header::{NEED_REPLY, REPLY, RawMessage};
use super::malformed::Malformed;
use super::payload::{Inflight, LOG, MemoryRegion, NO_FD, SPLITS, VringAddresses};
use super::request::Request;
use crate::vhost_user::received::Received;
use std::os::fd::AsFd;

/// A message of the front end. `F` is the type of its descriptors: `BorrowedFd` to send,
/// [`Received`] once received.
#[derive(Debug)]
pub(crate) enum Message<F> {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    /// At most [`MAX_FDS`](super::MAX_FDS) regions.
    SetMemTable(Vec<(MemoryRegion, F)>),
    SetLogBase {
        size: u64,
        offset: u64,
        fd: F,
    },
    SetLogFd(F),
    SetVringNum {
        index: u32,
        num: u32,
    },
    SetVringAddr {
        index: u32,
        addresses: VringAddresses,
    },
    SetVringBase {
        index: u32,
        base: u32,
    },
    GetVringBase {
        index: u32,
    },
    SetVringKick {
        index: u8,
        fd: Option<F>,
    },
    SetVringCall {
        index: u8,
        fd: Option<F>,
    },
    SetVringErr {
        index: u8,
        fd: Option<F>,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        index: u32,
        enable: bool,
    },
    SendRarp([u8; 6]),
    NetSetMtu(u64),
    /// At most [`MAX_CONFIG`](super::header::MAX_CONFIG) bytes.
    GetConfig {
        offset: u32,
        size: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        flags: u32,
        bytes: Vec<u8>,
    },
    GetInflightFd(Inflight),
    SetInflightFd(Inflight, F),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(MemoryRegion, F),
    RemMemReg(MemoryRegion),
    SetStatus(u8),
    GetStatus,
    /// A message that is not supported. Its payload was not decoded, and its descriptors are
    /// closed.
    Other(Request),
}

impl<F> Message<F> {
    /// The kind of the message.
    pub(crate) fn request(&self) -> Request {
        match self {
            Self::GetFeatures => Request::GET_FEATURES,
            Self::SetFeatures(_) => Request::SET_FEATURES,
            Self::SetOwner => Request::SET_OWNER,
            Self::ResetOwner => Request::RESET_OWNER,
            Self::SetMemTable(_) => Request::SET_MEM_TABLE,
            Self::SetLogBase { .. } => Request::SET_LOG_BASE,
            Self::SetLogFd(_) => Request::SET_LOG_FD,
            Self::SetVringNum { .. } => Request::SET_VRING_NUM,
            Self::SetVringAddr { .. } => Request::SET_VRING_ADDR,
            Self::SetVringBase { .. } => Request::SET_VRING_BASE,
            Self::GetVringBase { .. } => Request::GET_VRING_BASE,
            Self::SetVringKick { .. } => Request::SET_VRING_KICK,
            Self::SetVringCall { .. } => Request::SET_VRING_CALL,
            Self::SetVringErr { .. } => Request::SET_VRING_ERR,
            Self::GetProtocolFeatures => Request::GET_PROTOCOL_FEATURES,
            Self::SetProtocolFeatures(_) => Request::SET_PROTOCOL_FEATURES,
            Self::GetQueueNum => Request::GET_QUEUE_NUM,
            Self::SetVringEnable { .. } => Request::SET_VRING_ENABLE,
            Self::SendRarp(_) => Request::SEND_RARP,
            Self::NetSetMtu(_) => Request::NET_SET_MTU,
            Self::GetConfig { .. } => Request::GET_CONFIG,
            Self::SetConfig { .. } => Request::SET_CONFIG,
            Self::GetInflightFd(_) => Request::GET_INFLIGHT_FD,
            Self::SetInflightFd(..) => Request::SET_INFLIGHT_FD,
            Self::ResetDevice => Request::RESET_DEVICE,
            Self::GetMaxMemSlots => Request::GET_MAX_MEM_SLOTS,
            Self::AddMemReg(..) => Request::ADD_MEM_REG,
            Self::RemMemReg(_) => Request::REM_MEM_REG,
            Self::SetStatus(_) => Request::SET_STATUS,
            Self::GetStatus => Request::GET_STATUS,
            Self::Other(request) => *request,
        }
    }
}

impl<F: AsFd> Message<F> {
    /// The message as it is sent. `need_reply` asks the back end for an acknowledgement, which it
    /// sends if [`super::protocol::REPLY_ACK`] was negotiated.
    pub(crate) fn encode(&self, need_reply: bool) -> EncodedMessage<'_> {
        let mut f = EncodedMessage::new(self.request(), if need_reply { NEED_REPLY } else { 0 });
        match self {
            Self::GetFeatures
            | Self::SetOwner
            | Self::ResetOwner
            | Self::GetProtocolFeatures
            | Self::GetQueueNum
            | Self::ResetDevice
            | Self::GetMaxMemSlots
            | Self::GetStatus
            | Self::Other(_) => {}
            Self::SetFeatures(value) | Self::SetProtocolFeatures(value) | Self::NetSetMtu(value) => f.u64s([*value]),
            Self::SetStatus(status) => f.u64s([u64::from(*status)]),
            Self::SetMemTable(regions) => {
                f.u32s([regions.len() as u32, 0]);
                for (region, fd) in regions {
                    f.region(region);
                    f.fd(fd);
                }
            }
            Self::SetLogBase { size, offset, fd } => {
                f.u64s([*size, *offset]);
                f.fd(fd);
            }
            Self::SetLogFd(fd) => f.fd(fd),
            Self::SetVringNum { index, num: n } | Self::SetVringBase { index, base: n } => f.u32s([*index, *n]),
            Self::GetVringBase { index } => f.u32s([*index, 0]),
            Self::SetVringEnable { index, enable } => f.u32s([*index, u32::from(*enable)]),
            Self::SetVringAddr { index, addresses: a } => {
                f.u32s([*index, if a.log { LOG } else { 0 } | if a.splits { SPLITS } else { 0 }]);
                f.u64s([a.descriptors, a.used, a.available, a.log_addr]);
            }
            Self::SetVringKick { index, fd } | Self::SetVringCall { index, fd } | Self::SetVringErr { index, fd } => {
                f.u64s([u64::from(*index) | if fd.is_none() { NO_FD } else { 0 }]);
                fd.iter().for_each(|fd| f.fd(fd));
            }
            Self::SendRarp(mac) => f.bytes.extend(mac.iter().chain(&[0; 2])),
            // The answer is as long as the question.
            Self::GetConfig { offset, size, flags } => f.config(*offset, *flags, &vec![0; *size as usize]),
            Self::SetConfig { offset, flags, bytes } => f.config(*offset, *flags, bytes),
            Self::GetInflightFd(inflight) => f.inflight(inflight),
            Self::SetInflightFd(inflight, fd) => {
                f.inflight(inflight);
                f.fd(fd);
            }
            Self::AddMemReg(region, fd) => {
                f.u64s([0]);
                f.region(region);
                f.fd(fd);
            }
            Self::RemMemReg(region) => {
                f.u64s([0]);
                f.region(region);
            }
        }
        f.done()
    }
}

impl Message<Received> {
    /// Decodes a received message. Its lengths and its number of descriptors are checked; the
    /// meaning of its numbers is not.
    pub(crate) fn decode(packet: RawMessage) -> Result<Self, Malformed> {
        let (request, flags) = (packet.request, packet.flags);
        if flags & REPLY != 0 {
            return Err(Malformed::Flags { request, flags });
        }
        let mut r = Decoder::new(packet);
        let message = match request {
            Request::GET_FEATURES => Self::GetFeatures,
            Request::SET_FEATURES => Self::SetFeatures(r.u64()),
            Request::SET_OWNER => Self::SetOwner,
            Request::RESET_OWNER => Self::ResetOwner,
            Request::SET_MEM_TABLE => Self::SetMemTable(r.regions()?),
            Request::SET_LOG_BASE => Self::SetLogBase { size: r.u64(), offset: r.u64(), fd: r.fd()? },
            Request::SET_LOG_FD => Self::SetLogFd(r.fd()?),
            Request::SET_VRING_NUM => Self::SetVringNum { index: r.u32(), num: r.u32() },
            Request::SET_VRING_ADDR => {
                let (index, addresses) = r.addresses();
                Self::SetVringAddr { index, addresses }
            }
            Request::SET_VRING_BASE => Self::SetVringBase { index: r.u32(), base: r.u32() },
            Request::GET_VRING_BASE => {
                let (index, _unused) = (r.u32(), r.u32());
                Self::GetVringBase { index }
            }
            Request::SET_VRING_KICK => {
                let (index, fd) = r.ring_fd()?;
                Self::SetVringKick { index, fd }
            }
            Request::SET_VRING_CALL => {
                let (index, fd) = r.ring_fd()?;
                Self::SetVringCall { index, fd }
            }
            Request::SET_VRING_ERR => {
                let (index, fd) = r.ring_fd()?;
                Self::SetVringErr { index, fd }
            }
            Request::GET_PROTOCOL_FEATURES => Self::GetProtocolFeatures,
            Request::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(r.u64()),
            Request::GET_QUEUE_NUM => Self::GetQueueNum,
            Request::SET_VRING_ENABLE => Self::decode_enable(&mut r)?,
            Request::SEND_RARP => {
                let [a, b, c, d, e, f, ..] = r.bytes::<8>();
                Self::SendRarp([a, b, c, d, e, f])
            }
            Request::NET_SET_MTU => Self::NetSetMtu(r.u64()),
            Request::GET_CONFIG => Self::decode_get_config(&mut r)?,
            Request::SET_CONFIG => {
                let (offset, flags, bytes) = r.config_bytes()?;
                Self::SetConfig { offset, flags, bytes }
            }
            Request::GET_INFLIGHT_FD => Self::GetInflightFd(r.inflight()),
            Request::SET_INFLIGHT_FD => Self::SetInflightFd(r.inflight(), r.fd()?),
            Request::RESET_DEVICE => Self::ResetDevice,
            Request::GET_MAX_MEM_SLOTS => Self::GetMaxMemSlots,
            Request::ADD_MEM_REG => {
                let _padding = r.u64();
                Self::AddMemReg(r.region(), r.fd()?)
            }
            Request::REM_MEM_REG => {
                let _padding = r.u64();
                let region = r.region();
                // Early front ends sent the region's descriptor again. The specification lets it be
                // closed.
                drop(r.fds.next());
                Self::RemMemReg(region)
            }
            Request::SET_STATUS => {
                let status = r.u64();
                Self::SetStatus(u8::try_from(status).map_err(|_| r.field("status", status))?)
            }
            Request::GET_STATUS => Self::GetStatus,
            other => return Ok(Self::Other(other)),
        };
        r.done()?;
        Ok(message)
    }

    fn decode_enable(r: &mut Decoder) -> Result<Self, Malformed> {
        let (index, enable) = (r.u32(), r.u32());
        match enable {
            0 | 1 => Ok(Self::SetVringEnable { index, enable: enable == 1 }),
            other => Err(r.field("state", other.into())),
        }
    }

    fn decode_get_config(r: &mut Decoder) -> Result<Self, Malformed> {
        let (offset, size, flags, bytes) = r.config()?;
        // The question has room for the answer, in most front ends.
        if !bytes.is_empty() && bytes.len() != size as usize {
            return Err(r.field("size", size.into()));
        }
        Ok(Self::GetConfig { offset, size, flags })
    }
}
