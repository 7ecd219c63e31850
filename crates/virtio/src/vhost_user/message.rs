//! The messages of vhost-user, as the specification numbers them and lays them out.
//!
//! A message is a header, a payload and file descriptors beside them:
//!
//! ```text
//!  0 request  u32   what is asked for: a [`Request`]
//!  4 flags    u32   bits 0-1: version, 1; bit 2: this is an answer; bit 3: an answer is wanted
//!  8 size     u32   bytes of payload
//! 12 payload        integers in the byte order of the host
//! ```
//!
//! [`Message`] and [`Reply`] are generic over the descriptors: a message to send borrows them (`BorrowedFd`), a received one
//! owns them ([`Received`]). `decode` checks every length and the number of descriptors. A message that is refused closes its
//! descriptors, because it is dropped.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use super::received::Received;

/// Bytes of a header.
pub(crate) const HEADER: usize = 12;
/// Most bytes of payload. The largest message that is understood is `SET_CONFIG` with [`MAX_CONFIG`] bytes; the rest is
/// room for messages that are refused by name.
pub(crate) const MAX_PAYLOAD: usize = 1024;
/// Most descriptors of one message, and most regions of one memory table.
pub(crate) const MAX_FDS: usize = 8;
/// Most bytes of configuration space in one message.
pub(crate) const MAX_CONFIG: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In the payload of `SET_VRING_KICK`, `_CALL` and `_ERR`: the message has no descriptor.
const NO_FD: u64 = 1 << 8;
/// Flags of a ring's addresses: writes to the used ring are logged; frames are split behind their headers, which needs
/// [`protocol::NETMEM_SPLIT`].
const LOG: u32 = 1;
const SPLITS: u32 = 1 << 31;

/// Protocol feature bits, as masks.
pub(crate) mod protocol {
    macro_rules! bits {
        ($($name:ident = $bit:literal),+ $(,)?) => {
            $(pub(crate) const $name: u64 = 1 << $bit;)+

            /// The specification's name of the lowest bit in `mask`, for error messages.
            pub(crate) fn name(mask: u64) -> &'static str {
                match mask & mask.wrapping_neg() {
                    $($name => concat!("VHOST_USER_PROTOCOL_F_", stringify!($name)),)+
                    _ => "an unnamed protocol feature",
                }
            }
        };
    }
    bits! {
        MQ = 0, LOG_SHMFD = 1, RARP = 2, REPLY_ACK = 3, MTU = 4, BACKEND_REQ = 5, CROSS_ENDIAN = 6, CRYPTO_SESSION = 7,
        PAGEFAULT = 8, CONFIG = 9, BACKEND_SEND_FD = 10, HOST_NOTIFIER = 11, INFLIGHT_SHMFD = 12, RESET_DEVICE = 13,
        INBAND_NOTIFICATIONS = 14, CONFIGURE_MEM_SLOTS = 15, STATUS = 16, XEN_MMAP = 17, SHARED_OBJECT = 18,
        DEVICE_STATE = 19, GET_VRING_BASE_INFLIGHT = 20, GPA_ADDRESSES = 21, SHMEM = 22,
        // Netmem's own bits. The specification assigns bits in ascending order, and is far from these. With `NETMEM_RINGS` the
        // answer to `GET_QUEUE_NUM` is known to count rings, the control queue included if the device serves one.
        NETMEM_RINGS = 61, NETMEM_SPLIT = 62,
    }
}

/// The kind of a front end's message, by the specification's number. It prints as the specification's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request(pub u32);

macro_rules! requests {
    ($($name:ident = $number:literal),+ $(,)?) => {
        #[allow(missing_docs)]
        impl Request {
            $(pub const $name: Self = Self($number);)+

            /// The specification's name, without its prefix.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some(stringify!($name)),)+
                    _ => None,
                }
            }
        }
    };
}

requests! {
    GET_FEATURES = 1, SET_FEATURES = 2, SET_OWNER = 3, RESET_OWNER = 4, SET_MEM_TABLE = 5, SET_LOG_BASE = 6,
    SET_LOG_FD = 7, SET_VRING_NUM = 8, SET_VRING_ADDR = 9, SET_VRING_BASE = 10, GET_VRING_BASE = 11, SET_VRING_KICK = 12,
    SET_VRING_CALL = 13, SET_VRING_ERR = 14, GET_PROTOCOL_FEATURES = 15, SET_PROTOCOL_FEATURES = 16, GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18, SEND_RARP = 19, NET_SET_MTU = 20, SET_BACKEND_REQ_FD = 21, IOTLB_MSG = 22,
    SET_VRING_ENDIAN = 23, GET_CONFIG = 24, SET_CONFIG = 25, CREATE_CRYPTO_SESSION = 26, CLOSE_CRYPTO_SESSION = 27,
    POSTCOPY_ADVISE = 28, POSTCOPY_LISTEN = 29, POSTCOPY_END = 30, GET_INFLIGHT_FD = 31, SET_INFLIGHT_FD = 32,
    GPU_SET_SOCKET = 33, RESET_DEVICE = 34, VRING_KICK = 35, GET_MAX_MEM_SLOTS = 36, ADD_MEM_REG = 37, REM_MEM_REG = 38,
    SET_STATUS = 39, GET_STATUS = 40, GET_SHARED_OBJECT = 41, SET_DEVICE_STATE_FD = 42, CHECK_DEVICE_STATE = 43,
    GET_SHMEM_CONFIG = 44,
}

impl Request {
    /// Whether the specification gives the message an answer of its own, which comes whether or not the front end set
    /// "an answer is wanted".
    pub(crate) fn has_answer(self) -> bool {
        matches!(
            self,
            Self::GET_FEATURES
                | Self::SET_LOG_BASE
                | Self::GET_VRING_BASE
                | Self::GET_PROTOCOL_FEATURES
                | Self::GET_QUEUE_NUM
                | Self::GET_CONFIG
                | Self::CREATE_CRYPTO_SESSION
                | Self::POSTCOPY_ADVISE
                | Self::POSTCOPY_END
                | Self::GET_INFLIGHT_FD
                | Self::GET_MAX_MEM_SLOTS
                | Self::GET_STATUS
                | Self::GET_SHARED_OBJECT
                | Self::SET_DEVICE_STATE_FD
                | Self::CHECK_DEVICE_STATE
                | Self::GET_SHMEM_CONFIG
        )
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "message {}", self.0),
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a message breaks the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// Another version of the protocol, flags without a meaning, or an answer where a question belongs or the reverse.
    #[error("{request} has the flags {flags:#x}")]
    Flags {
        /// The message.
        request: Request,
        /// Its flags.
        flags: u32,
    },
    /// More payload than any message has.
    #[error("{request} announces {size} bytes of payload, where {MAX_PAYLOAD} are the most")]
    TooLong {
        /// The message.
        request: Request,
        /// The bytes that it announces.
        size: u32,
    },
    /// More or fewer bytes of payload than the message has.
    #[error("{request} has {size} bytes of payload, which is not its length")]
    Size {
        /// The message.
        request: Request,
        /// Bytes of its payload.
        size: usize,
    },
    /// More or fewer descriptors than the message has.
    #[error("{request} came with {got} file descriptors, which is not their number")]
    Descriptors {
        /// The message.
        request: Request,
        /// How many came.
        got: usize,
    },
    /// More descriptors than any message has.
    #[error("a message came with more than {MAX_FDS} file descriptors")]
    TooManyDescriptors,
    /// Descriptors with an answer of which none has any.
    #[error("an answer came with file descriptors, and none was asked for")]
    UnwantedDescriptors,
    /// A field that is out of its range.
    #[error("{request} has {value} as its {field}")]
    Field {
        /// The message.
        request: Request,
        /// The specification's word for the field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The answer to another message.
    #[error("{got} was answered instead")]
    WrongAnswer {
        /// The message that was answered.
        got: Request,
    },
}

/// A received message, before its payload is decoded.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) request: Request,
    pub(crate) flags: u32,
    /// At most [`MAX_PAYLOAD`] bytes.
    pub(crate) payload: Vec<u8>,
    /// At most [`MAX_FDS`].
    pub(crate) fds: Vec<Received>,
}

impl Packet {
    /// A packet from the header of a message, and how many bytes of payload follow it.
    pub(crate) fn with_header(header: &[u8; HEADER]) -> Result<(Self, usize), Malformed> {
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (request, flags, size) = (Request(word(0)), word(4), word(8));
        if flags & VERSION_MASK != VERSION || flags & !(VERSION_MASK | REPLY | NEED_REPLY) != 0 {
            return Err(Malformed::Flags { request, flags });
        }
        match usize::try_from(size) {
            Ok(bytes) if bytes <= MAX_PAYLOAD => {
                Ok((Self { request, flags, payload: Vec::new(), fds: Vec::new() }, bytes))
            }
            _ => Err(Malformed::TooLong { request, size }),
        }
    }

    /// Whether the front end wants an acknowledgement, also if the message has no answer of its own.
    pub(crate) fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}

/// The bytes of a message to send, and its descriptors.
#[derive(Debug)]
pub(crate) struct Frame<'a> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Frame<'a> {
    fn new(request: Request, flags: u32) -> Self {
        let mut bytes = Vec::with_capacity(HEADER + 64);
        for word in [request.0, flags | VERSION, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        Self { bytes, fds: Vec::new() }
    }

    fn u32s<const N: usize>(&mut self, words: [u32; N]) {
        self.bytes.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
    }

    fn u64s<const N: usize>(&mut self, words: [u64; N]) {
        self.bytes.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
    }

    fn region(&mut self, r: &MemoryRegion) {
        self.u64s([r.guest_addr, r.size, r.user_addr, r.mmap_offset]);
    }

    fn config(&mut self, offset: u32, flags: u32, bytes: &[u8]) {
        self.u32s([offset, bytes.len() as u32, flags]);
        self.bytes.extend(bytes);
    }

    fn inflight(&mut self, i: &Inflight) {
        self.u64s([i.mmap_size, i.mmap_offset]);
        // The structure ends with four bytes of padding, which peers count as part of it.
        self.bytes.extend([i.queues, i.queue_size, 0, 0].iter().flat_map(|w| w.to_ne_bytes()));
    }

    fn fd(&mut self, fd: &'a impl AsFd) {
        self.fds.push(fd.as_fd());
    }

    /// Writes the payload's length into the header.
    fn done(mut self) -> Self {
        let size = (self.bytes.len() - HEADER) as u32;
        self.bytes[8..HEADER].copy_from_slice(&size.to_ne_bytes());
        self
    }
}

/// Takes a received message apart, front to back. A read behind the end gives zeros and is an error in [`Self::done`].
struct Reader {
    request: Request,
    payload: Vec<u8>,
    at: usize,
    came: usize,
    fds: std::vec::IntoIter<Received>,
}

impl Reader {
    fn new(packet: Packet) -> Self {
        let Packet { request, payload, fds, .. } = packet;
        Self { request, payload, at: 0, came: fds.len(), fds: fds.into_iter() }
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let bytes = self.payload.get(self.at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N]);
        self.at += N;
        bytes
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.bytes())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.bytes())
    }

    fn left(&self) -> usize {
        self.payload.len().saturating_sub(self.at)
    }

    fn region(&mut self) -> MemoryRegion {
        let [guest_addr, size, user_addr, mmap_offset] = [self.u64(), self.u64(), self.u64(), self.u64()];
        MemoryRegion { guest_addr, size, user_addr, mmap_offset }
    }

    fn config(&mut self) -> Result<(u32, u32, u32, Vec<u8>), Malformed> {
        let [offset, size, flags] = [self.u32(), self.u32(), self.u32()];
        if size as usize > MAX_CONFIG {
            return Err(self.field("size", size.into()));
        }
        let bytes = self.payload.get(self.at..).unwrap_or_default().to_vec();
        self.at += bytes.len();
        Ok((offset, size, flags, bytes))
    }

    fn inflight(&mut self) -> Inflight {
        let (mmap_size, mmap_offset) = (self.u64(), self.u64());
        let (queues, queue_size) = (self.u16(), self.u16());
        // Some peers send the structure without its padding.
        if self.left() == 4 {
            self.at += 4;
        }
        Inflight { mmap_size, mmap_offset, queues, queue_size }
    }

    fn fd(&mut self) -> Result<Received, Malformed> {
        self.fds.next().ok_or(Malformed::Descriptors { request: self.request, got: self.came })
    }

    /// A ring and its descriptor, as `SET_VRING_KICK`, `_CALL` and `_ERR` have them.
    fn ring_fd(&mut self) -> Result<(u8, Option<Received>), Malformed> {
        let value = self.u64();
        let fd = if value & NO_FD == 0 { Some(self.fd()?) } else { None };
        Ok((value as u8, fd))
    }

    fn field(&self, field: &'static str, value: u64) -> Malformed {
        Malformed::Field { request: self.request, field, value }
    }

    /// Checks that all bytes and all descriptors have been taken, and no more than that.
    fn done(self) -> Result<(), Malformed> {
        if self.at != self.payload.len() {
            return Err(Malformed::Size { request: self.request, size: self.payload.len() });
        }
        if self.fds.len() != 0 {
            return Err(Malformed::Descriptors { request: self.request, got: self.came });
        }
        Ok(())
    }
}

/// One region of the front end's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryRegion {
    /// The address by which buffers are named.
    pub(crate) guest_addr: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// The address by which rings are named: the front end's own.
    pub(crate) user_addr: u64,
    /// Where in the file it begins, in bytes.
    pub(crate) mmap_offset: u64,
}

/// Where a ring lies, in addresses of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VringAddresses {
    pub(crate) descriptors: u64,
    pub(crate) used: u64,
    pub(crate) available: u64,
    /// Where writes to the used ring are logged, if [`Self::log`].
    pub(crate) log_addr: u64,
    pub(crate) log: bool,
    /// Whether the back end must split frames behind their headers. Only Netmem's drivers ask for it, and only Netmem's
    /// devices do it.
    pub(crate) splits: bool,
}

/// The shared record of buffers in flight: what a front end asks for, and what a back end has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inflight {
    pub(crate) mmap_size: u64,
    pub(crate) mmap_offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
}

/// A message of the front end. `F` is the type of its descriptors: `BorrowedFd` to send, [`Received`] once received.
#[derive(Debug)]
pub(crate) enum Message<F> {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    /// At most [`MAX_FDS`] regions.
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
    /// At most [`MAX_CONFIG`] bytes.
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
    /// A message that is not supported. Its payload was not decoded, and its descriptors are closed.
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
    /// The message as it is sent. `need_reply` asks the back end for an acknowledgement, which it sends if
    /// [`protocol::REPLY_ACK`] was negotiated.
    pub(crate) fn encode(&self, need_reply: bool) -> Frame<'_> {
        let mut f = Frame::new(self.request(), if need_reply { NEED_REPLY } else { 0 });
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
    /// Decodes a received message. Its lengths and its number of descriptors are checked; the meaning of its numbers is
    /// not.
    pub(crate) fn decode(packet: Packet) -> Result<Self, Malformed> {
        let (request, flags) = (packet.request, packet.flags);
        if flags & REPLY != 0 {
            return Err(Malformed::Flags { request, flags });
        }
        let mut r = Reader::new(packet);
        let message = match request {
            Request::GET_FEATURES => Self::GetFeatures,
            Request::SET_FEATURES => Self::SetFeatures(r.u64()),
            Request::SET_OWNER => Self::SetOwner,
            Request::RESET_OWNER => Self::ResetOwner,
            Request::SET_MEM_TABLE => {
                let (count, _padding) = (r.u32(), r.u32());
                if count as usize > MAX_FDS {
                    return Err(r.field("number of regions", count.into()));
                }
                let mut regions = Vec::with_capacity(count as usize);
                for _ in 0..count {
                    regions.push((r.region(), r.fd()?));
                }
                Self::SetMemTable(regions)
            }
            Request::SET_LOG_BASE => Self::SetLogBase { size: r.u64(), offset: r.u64(), fd: r.fd()? },
            Request::SET_LOG_FD => Self::SetLogFd(r.fd()?),
            Request::SET_VRING_NUM => Self::SetVringNum { index: r.u32(), num: r.u32() },
            Request::SET_VRING_ADDR => {
                let (index, flags) = (r.u32(), r.u32());
                let [descriptors, used, available, log_addr] = [r.u64(), r.u64(), r.u64(), r.u64()];
                let (log, splits) = (flags & LOG != 0, flags & SPLITS != 0);
                let addresses = VringAddresses { descriptors, used, available, log_addr, log, splits };
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
            Request::SET_VRING_ENABLE => {
                let (index, enable) = (r.u32(), r.u32());
                match enable {
                    0 | 1 => Self::SetVringEnable { index, enable: enable == 1 },
                    other => return Err(r.field("state", other.into())),
                }
            }
            Request::SEND_RARP => {
                let [a, b, c, d, e, f, ..] = r.bytes::<8>();
                Self::SendRarp([a, b, c, d, e, f])
            }
            Request::NET_SET_MTU => Self::NetSetMtu(r.u64()),
            Request::GET_CONFIG => {
                let (offset, size, flags, bytes) = r.config()?;
                // The question has room for the answer, in most front ends.
                if !bytes.is_empty() && bytes.len() != size as usize {
                    return Err(r.field("size", size.into()));
                }
                Self::GetConfig { offset, size, flags }
            }
            Request::SET_CONFIG => {
                let (offset, size, flags, bytes) = r.config()?;
                if bytes.len() != size as usize {
                    return Err(r.field("size", size.into()));
                }
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
                // Early front ends sent the region's descriptor again. The specification lets it be closed.
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
}

/// The back end's answer to a message.
#[derive(Debug)]
pub(crate) enum Reply<F> {
    /// A number that was asked for, or an acknowledgement: 0 for "done", any other number for "refused".
    Number(u64),
    /// To `GET_VRING_BASE`.
    VringBase { index: u32, base: u32 },
    /// To `GET_CONFIG`. At most [`MAX_CONFIG`] bytes.
    Config { offset: u32, flags: u32, bytes: Vec<u8> },
    /// To `GET_INFLIGHT_FD`. Without a descriptor if the back end keeps no record (a size of 0).
    Inflight(Inflight, Option<F>),
    /// To `SET_LOG_BASE`; to `GET_CONFIG`, a refusal.
    Empty,
}

impl<F: AsFd> Reply<F> {
    /// The answer to `asked` as it is sent.
    pub(crate) fn encode(&self, asked: Request) -> Frame<'_> {
        let mut f = Frame::new(asked, REPLY);
        match self {
            Self::Number(value) => f.u64s([*value]),
            Self::VringBase { index, base } => f.u32s([*index, *base]),
            Self::Config { offset, flags, bytes } => f.config(*offset, *flags, bytes),
            Self::Inflight(inflight, fd) => {
                f.inflight(inflight);
                fd.iter().for_each(|fd| f.fd(fd));
            }
            Self::Empty => {}
        }
        f.done()
    }
}

impl Reply<Received> {
    /// The answer to `asked`.
    pub(crate) fn decode(packet: Packet, asked: Request) -> Result<Self, Malformed> {
        let (request, flags) = (packet.request, packet.flags);
        if flags & REPLY == 0 {
            return Err(Malformed::Flags { request, flags });
        }
        if request != asked {
            return Err(Malformed::WrongAnswer { got: request });
        }
        let mut r = Reader::new(packet);
        let reply = match asked {
            Request::GET_VRING_BASE => Self::VringBase { index: r.u32(), base: r.u32() },
            Request::GET_CONFIG | Request::SET_LOG_BASE if r.left() == 0 => Self::Empty,
            Request::GET_CONFIG if r.left() != 8 => {
                let (offset, size, flags, bytes) = r.config()?;
                if bytes.len() != size as usize {
                    return Err(r.field("size", size.into()));
                }
                Self::Config { offset, flags, bytes }
            }
            Request::GET_INFLIGHT_FD if r.left() != 8 => Self::Inflight(r.inflight(), r.fds.next()),
            _ => Self::Number(r.u64()),
        };
        r.done()?;
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec};
    use std::io::{Read, pipe};

    /// A message with these bytes of payload, and with descriptors that are ends of pipes: the other ends tell whether a
    /// descriptor was closed.
    fn packet(request: Request, payload: &[u8], fds: usize) -> (Packet, Vec<std::io::PipeReader>) {
        let (readers, writers): (Vec<_>, Vec<_>) = (0..fds).map(|_| pipe().unwrap()).unzip();
        let fds = writers.into_iter().map(|fd| std::os::fd::OwnedFd::from(fd).into()).collect();
        (Packet { request, flags: VERSION, payload: payload.to_vec(), fds }, readers)
    }

    fn all_closed(readers: Vec<std::io::PipeReader>) {
        for mut reader in readers {
            // A pipe is closed by a thread of its own.
            let mut end = [PollFd::new(&reader, PollFlags::IN)];
            let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut end, Some(&minute)), Ok(1), "a writer is left open");
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_ne_bytes()).collect()
    }

    fn halves(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_ne_bytes()).collect()
    }

    /// Each message that is understood: its payload by the specification, and how many descriptors it has.
    fn known() -> Vec<(Request, Vec<u8>, usize, &'static str)> {
        let region = [0x1000, 0x2000, 0x3000, 0x4000];
        let table = [&halves(&[2, 0])[..], &words(&region), &words(&[5, 6, 7, 8])].concat();
        let single = [&words(&[0])[..], &words(&region)].concat();
        let config = [&halves(&[2, 4, 1])[..], b"abcd"].concat();
        let inflight = [&words(&[64, 0])[..], &2u16.to_ne_bytes(), &256u16.to_ne_bytes(), &[0; 4]].concat();
        let short = inflight[..20].to_vec();
        let address = [&halves(&[3, 1])[..], &words(&[0xd, 0xe, 0xf, 0x10])].concat();
        vec![
            (Request::GET_FEATURES, vec![], 0, "GetFeatures"),
            (Request::SET_FEATURES, words(&[1 << 32]), 0, "SetFeatures(4294967296)"),
            (Request::SET_OWNER, vec![], 0, "SetOwner"),
            (Request::RESET_OWNER, vec![], 0, "ResetOwner"),
            (Request::SET_MEM_TABLE, table, 2, "guest_addr: 5, size: 6, user_addr: 7, mmap_offset: 8"),
            (Request::SET_LOG_BASE, words(&[4096, 64]), 1, "SetLogBase { size: 4096, offset: 64"),
            (Request::SET_LOG_FD, vec![], 1, "SetLogFd"),
            (Request::SET_VRING_NUM, halves(&[3, 256]), 0, "SetVringNum { index: 3, num: 256 }"),
            (
                Request::SET_VRING_ADDR,
                address,
                0,
                "descriptors: 13, used: 14, available: 15, log_addr: 16, log: true, splits: false",
            ),
            (Request::SET_VRING_BASE, halves(&[3, 7]), 0, "SetVringBase { index: 3, base: 7 }"),
            (Request::GET_VRING_BASE, halves(&[3, 0]), 0, "GetVringBase { index: 3 }"),
            (Request::SET_VRING_KICK, words(&[3]), 1, "SetVringKick { index: 3, fd: Some"),
            (Request::SET_VRING_CALL, words(&[0x103]), 0, "SetVringCall { index: 3, fd: None }"),
            (Request::SET_VRING_ERR, words(&[3]), 1, "SetVringErr { index: 3, fd: Some"),
            (Request::GET_PROTOCOL_FEATURES, vec![], 0, "GetProtocolFeatures"),
            (Request::SET_PROTOCOL_FEATURES, words(&[9]), 0, "SetProtocolFeatures(9)"),
            (Request::GET_QUEUE_NUM, vec![], 0, "GetQueueNum"),
            (Request::SET_VRING_ENABLE, halves(&[3, 1]), 0, "SetVringEnable { index: 3, enable: true }"),
            (Request::SEND_RARP, b"macmac\0\0".to_vec(), 0, "SendRarp([109, 97, 99, 109, 97, 99])"),
            (Request::NET_SET_MTU, words(&[9000]), 0, "NetSetMtu(9000)"),
            (Request::GET_CONFIG, config.clone(), 0, "GetConfig { offset: 2, size: 4, flags: 1 }"),
            (Request::GET_CONFIG, config[..12].to_vec(), 0, "GetConfig { offset: 2, size: 4, flags: 1 }"),
            (Request::SET_CONFIG, config, 0, "SetConfig { offset: 2, flags: 1, bytes: [97, 98, 99, 100] }"),
            (Request::GET_INFLIGHT_FD, short, 0, "queues: 2, queue_size: 256"),
            (Request::SET_INFLIGHT_FD, inflight, 1, "mmap_size: 64, mmap_offset: 0, queues: 2, queue_size: 256"),
            (Request::RESET_DEVICE, vec![], 0, "ResetDevice"),
            (Request::GET_MAX_MEM_SLOTS, vec![], 0, "GetMaxMemSlots"),
            (Request::ADD_MEM_REG, single.clone(), 1, "guest_addr: 4096, size: 8192, user_addr: 12288"),
            (Request::REM_MEM_REG, single, 0, "guest_addr: 4096, size: 8192, user_addr: 12288"),
            (Request::SET_STATUS, words(&[15]), 0, "SetStatus(15)"),
            (Request::GET_STATUS, vec![], 0, "GetStatus"),
        ]
    }

    #[test]
    fn every_message_is_read_and_written_as_specified() {
        for (request, payload, fds, shown) in known() {
            let (packet, readers) = packet(request, &payload, fds);
            let message = Message::decode(packet).unwrap();
            assert_eq!(message.request(), request);
            assert!(format!("{message:?}").contains(shown), "{message:?}");
            let frame = message.encode(true);
            assert_eq!(frame.fds.len(), fds, "{request}");
            let header = halves(&[request.0, 9, (frame.bytes.len() - HEADER) as u32]);
            assert_eq!(frame.bytes[..HEADER], header, "{request}");
            // Two messages have a longer form, which ends with zeros and is the one that is sent.
            let same = if request == Request::GET_CONFIG { 12 } else { payload.len() };
            assert!(frame.bytes[HEADER..].starts_with(&payload[..same]), "{request}");
            assert!(frame.bytes[HEADER + same..].iter().all(|&b| b == 0), "{request}");
            drop(message);
            all_closed(readers);
        }
    }

    #[test]
    fn wrong_lengths_and_descriptors_are_refused_and_closed() {
        let refused = |request, payload: &[u8], fds| {
            let (packet, readers) = packet(request, payload, fds);
            let error = Message::decode(packet).expect_err("it is malformed");
            all_closed(readers);
            assert!(error.to_string().contains(request.name().unwrap()), "{error}");
        };
        for (request, payload, fds, _) in known() {
            if let Some(short) = payload.len().checked_sub(1) {
                refused(request, &payload[..short], fds);
            }
            refused(request, &[&payload[..], &[0; 3]].concat(), fds);
            // A descriptor that is sent again with REM_MEM_REG is tolerated, and closed.
            refused(request, &payload, if request == Request::REM_MEM_REG { 2 } else { fds + 1 });
            if fds > 0 {
                refused(request, &payload, fds - 1);
            }
        }
        let (packet, readers) = packet(Request::REM_MEM_REG, &words(&[0, 1, 2, 3, 4]), 1);
        Message::decode(packet).unwrap();
        all_closed(readers);
    }

    #[test]
    fn fields_out_of_range_are_refused() {
        let many = [&halves(&[9, 0])[..], &words(&[0; 36])].concat();
        for (request, payload, field) in [
            (Request::SET_MEM_TABLE, many, "number of regions"),
            (Request::SET_MEM_TABLE, halves(&[u32::MAX, 0]), "number of regions"),
            (Request::SET_VRING_ENABLE, halves(&[0, 2]), "state"),
            (Request::GET_CONFIG, halves(&[0, 257, 0]), "size"),
            (Request::SET_CONFIG, halves(&[0, u32::MAX, 0]), "size"),
            (Request::SET_STATUS, words(&[256]), "status"),
        ] {
            let (packet, readers) = packet(request, &payload, 0);
            let error = Message::decode(packet).unwrap_err();
            assert!(matches!(error, Malformed::Field { field: f, .. } if f == field), "{error}");
            all_closed(readers);
        }
    }

    #[test]
    fn other_messages_keep_their_name_and_lose_their_descriptors() {
        for (number, name) in [(28, "POSTCOPY_ADVISE"), (22, "IOTLB_MSG"), (0, "message 0"), (1000, "message 1000")] {
            let (packet, readers) = packet(Request(number), &[7; 99], 3);
            let message = Message::decode(packet).unwrap();
            all_closed(readers);
            assert!(matches!(message, Message::Other(r) if r.to_string() == name), "{message:?}");
        }
    }

    #[test]
    fn answers() {
        let answer = |asked, flags, request, payload: &[u8], fds| {
            let (packet, readers) = packet(request, payload, fds);
            let reply = Reply::decode(Packet { flags, ..packet }, asked).map(|reply| {
                let frame = reply.encode(asked);
                assert_eq!(frame.bytes, [&halves(&[asked.0, 5, payload.len() as u32])[..], payload].concat());
                assert_eq!(frame.fds.len(), fds);
                format!("{reply:?}")
            });
            all_closed(readers);
            reply
        };
        let inflight = [&words(&[64, 0])[..], &2u16.to_ne_bytes(), &256u16.to_ne_bytes(), &[0; 4]].concat();
        let config = [&halves(&[2, 4, 1])[..], b"abcd"].concat();
        for (asked, payload, fds, shown) in [
            (Request::GET_FEATURES, words(&[77]), 0, "Number(77)"),
            (Request::SET_MEM_TABLE, words(&[0]), 0, "Number(0)"),
            (Request::GET_VRING_BASE, halves(&[3, 9]), 0, "VringBase { index: 3, base: 9 }"),
            (Request::GET_CONFIG, config.clone(), 0, "Config { offset: 2, flags: 1, bytes: [97, 98, 99, 100] }"),
            (Request::GET_CONFIG, words(&[1]), 0, "Number(1)"),
            (Request::GET_CONFIG, vec![], 0, "Empty"),
            (Request::SET_LOG_BASE, vec![], 0, "Empty"),
            (Request::SET_LOG_BASE, words(&[0]), 0, "Number(0)"),
            (Request::GET_INFLIGHT_FD, inflight.clone(), 1, "queue_size: 256 }, Some"),
            (Request::GET_INFLIGHT_FD, inflight.clone(), 0, "queue_size: 256 }, None"),
            (Request::GET_INFLIGHT_FD, words(&[1]), 0, "Number(1)"),
        ] {
            let shows = answer(asked, 5, asked, &payload, fds).unwrap();
            assert!(shows.contains(shown), "{shows}");
            let wrong = [(5, Request::GET_STATUS, fds), (1, asked, fds), (5, asked, fds + 2)];
            for (flags, request, fds) in wrong {
                answer(asked, flags, request, &payload, fds).unwrap_err();
            }
            let long = [&payload[..], &[0; 3]].concat();
            assert!(answer(asked, 5, asked, &long, fds).is_err(), "{asked}");
        }
    }

    #[test]
    fn headers() {
        let header = |flags: u32, size: u32| {
            let bytes = halves(&[7, flags, size]);
            Packet::with_header(bytes.as_slice().try_into().unwrap()).map(|(p, size)| (p.needs_reply(), size))
        };
        let request = Request::SET_LOG_FD;
        assert_eq!(header(1, 8), Ok((false, 8)));
        assert_eq!(header(9, 1024), Ok((true, 1024)));
        for flags in [0, 2, 3, 0x11, 0x8000_0001] {
            assert_eq!(header(flags, 8), Err(Malformed::Flags { request, flags }));
        }
        for size in [1025, u32::MAX] {
            assert_eq!(header(1, size), Err(Malformed::TooLong { request, size }));
        }
    }

    #[test]
    fn names() {
        assert_eq!(Request::GET_SHMEM_CONFIG.to_string(), "GET_SHMEM_CONFIG");
        assert_eq!((1..=44).filter(|&n| Request(n).name().is_some()).count(), 44);
        assert_eq!(protocol::name(protocol::RARP | protocol::STATUS), "VHOST_USER_PROTOCOL_F_RARP");
        assert_eq!(protocol::name(1 << 63), "an unnamed protocol feature");
    }
}
