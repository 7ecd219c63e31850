//! A vhost-user front end in raw messages. It shares no code with the crate, so that both would
//! have to be wrong alike.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SEND_RARP: u32 = 19;
    pub const NET_SET_MTU: u32 = 20;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

pub const VERSION: u32 = 1;
pub const REPLY: u32 = 4;
pub const NEED_REPLY: u32 = 8;
/// VHOST_USER_PROTOCOL_F_REPLY_ACK.
pub const REPLY_ACK: u64 = 1 << 3;

/// A message: request, flags, size as claimed, then the body as sent.
pub fn message(request: u32, flags: u32, size: u32, body: &[u8]) -> Vec<u8> {
    [&[request, flags, size].map(u32::to_le_bytes).concat()[..], body].concat()
}

pub fn u32s<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.map(u32::to_le_bytes).concat()
}

pub fn u64s<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.map(u64::to_le_bytes).concat()
}

/// Where a region of memory lies, and its file.
#[derive(Clone, Copy)]
pub struct Region<'a> {
    pub guest: u64,
    pub size: u64,
    pub user: u64,
    pub offset: u64,
    pub file: BorrowedFd<'a>,
}

impl Region<'_> {
    pub fn words(&self) -> Vec<u8> {
        u64s([self.guest, self.size, self.user, self.offset])
    }
}

/// Where a ring lies.
#[derive(Clone, Copy, Default)]
pub struct Addresses {
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
    pub log: Option<u64>,
}

/// An eventfd.
pub struct EventFd(OwnedFd);

impl EventFd {
    pub fn new() -> Self {
        use rustix::event::{EventfdFlags, eventfd};
        Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
    }

    pub fn read(&self) -> Result<u64> {
        let mut count = [0; 8];
        rustix::io::read(&self.0, &mut count)?;
        Ok(u64::from_ne_bytes(count))
    }

    pub fn write(&self, count: u64) -> Result<()> {
        rustix::io::write(&self.0, &count.to_ne_bytes())?;
        Ok(())
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An answer of the device: its flags, its payload, its descriptors.
pub struct Answer {
    pub flags: u32,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Answer {
    pub fn u64(&self) -> u64 {
        u64::from_le_bytes(self.body[..].try_into().unwrap())
    }
}

/// One end of a connection. A message that the device refuses is an error of kind
/// `PermissionDenied`; a device that has hung up is one of any other kind.
pub struct Front {
    pub stream: UnixStream,
    /// Whether every message asks for an acknowledgement.
    pub acknowledged: bool,
}

impl Front {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, acknowledged: false }
    }

    /// A connection on which `features` and all protocol features are negotiated.
    pub fn negotiated(stream: UnixStream, features: u64) -> Self {
        let mut front = Self::new(stream);
        front.set(request::SET_OWNER, &[], &[]).unwrap();
        let offered = front.get_features().unwrap();
        assert_eq!(features & !offered, 0, "not offered");
        let protocol = front.get_protocol_features().unwrap();
        assert_ne!(protocol & REPLY_ACK, 0);
        front.set_protocol_features(protocol).unwrap();
        front.set_features(features).unwrap();
        front
    }

    /// Sends bytes and descriptors in one piece.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent = rustix::net::sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        assert_eq!(sent, bytes.len());
        Ok(())
    }

    pub fn send(&self, request: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send_raw(&message(request, VERSION | flags, body.len() as u32, body), fds)
    }

    /// Exactly `len` bytes.
    fn read(&self, len: usize, fds: &mut Vec<OwnedFd>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut at = 0;
        while at < len {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut iov = [IoSliceMut::new(&mut bytes[at..])];
            let got = rustix::net::recvmsg(&self.stream, &mut iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
            for part in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = part {
                    fds.extend(more);
                }
            }
            if got == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            at += got;
        }
        Ok(bytes)
    }

    /// The answer to `request`.
    pub fn answer(&self, request: u32) -> Result<Answer> {
        let mut fds = Vec::new();
        let header = self.read(12, &mut fds)?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (request, VERSION | REPLY), "an answer to what was asked");
        let body = self.read(word(8) as usize, &mut fds)?;
        Ok(Answer { flags: word(4), body, fds })
    }

    /// Sends a message that has an answer, and waits for it.
    pub fn query(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Answer> {
        self.send(request, 0, body, fds)?;
        self.answer(request)
    }

    /// Sends a message that has no answer of its own, and waits for the acknowledgement if they are
    /// agreed.
    pub fn set(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let flags = if self.acknowledged { NEED_REPLY } else { 0 };
        self.send(request, flags, body, fds)?;
        if self.acknowledged && self.answer(request)?.u64() != 0 {
            return Err(Error::from(ErrorKind::PermissionDenied));
        }
        Ok(())
    }

    /// Waits until everything sent before was handled.
    pub fn sync(&self) -> Result<()> {
        self.get_features().map(drop)
    }

    /// Accepts these protocol features; with [`REPLY_ACK`] among them, all messages from here on
    /// are acknowledged.
    pub fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.set(request::SET_PROTOCOL_FEATURES, &u64s([features]), &[])?;
        self.acknowledged = features & REPLY_ACK != 0;
        Ok(())
    }

    pub fn get_protocol_features(&self) -> Result<u64> {
        Ok(self.query(request::GET_PROTOCOL_FEATURES, &[], &[])?.u64())
    }

    pub fn get_features(&self) -> Result<u64> {
        Ok(self.query(request::GET_FEATURES, &[], &[])?.u64())
    }

    pub fn set_features(&self, features: u64) -> Result<()> {
        self.set(request::SET_FEATURES, &u64s([features]), &[])
    }

    pub fn set_mem_table(&self, regions: &[Region<'_>]) -> Result<()> {
        let mut body = u32s([regions.len() as u32, 0]);
        regions.iter().for_each(|r| body.extend(r.words()));
        let fds: Vec<_> = regions.iter().map(|r| r.file).collect();
        self.set(request::SET_MEM_TABLE, &body, &fds)
    }

    pub fn add_memory(&self, region: &Region<'_>) -> Result<()> {
        self.set(request::ADD_MEM_REG, &[u64s([0]), region.words()].concat(), &[region.file])
    }

    pub fn remove_memory(&self, region: &Region<'_>) -> Result<()> {
        self.set(request::REM_MEM_REG, &[u64s([0]), region.words()].concat(), &[])
    }

    pub fn set_vring_num(&self, ring: usize, num: u16) -> Result<()> {
        self.set(request::SET_VRING_NUM, &u32s([ring as u32, num.into()]), &[])
    }

    pub fn set_vring_base(&self, ring: usize, base: u16) -> Result<()> {
        self.set_vring_base_bits(ring, base.into())
    }

    /// All 32 bits, of which a packed ring uses the upper half, too.
    pub fn set_vring_base_bits(&self, ring: usize, base: u32) -> Result<()> {
        self.set(request::SET_VRING_BASE, &u32s([ring as u32, base]), &[])
    }

    pub fn set_vring_addr(&self, ring: usize, at: Addresses) -> Result<()> {
        let mut body = u32s([ring as u32, at.log.is_some().into()]);
        body.extend(u64s([at.desc, at.used, at.avail, at.log.unwrap_or(0)]));
        self.set(request::SET_VRING_ADDR, &body, &[])
    }

    fn set_fd(&self, request: u32, ring: usize, fd: &impl AsFd) -> Result<()> {
        self.set(request, &u64s([ring as u64]), &[fd.as_fd()])
    }

    pub fn set_vring_kick(&self, ring: usize, fd: &impl AsFd) -> Result<()> {
        self.set_fd(request::SET_VRING_KICK, ring, fd)
    }

    /// The ring has no kick descriptor: its driver sends no notifications.
    pub fn set_vring_kick_none(&self, ring: usize) -> Result<()> {
        self.set(request::SET_VRING_KICK, &u64s([ring as u64 | 1 << 8]), &[])
    }

    pub fn set_vring_call(&self, ring: usize, fd: &impl AsFd) -> Result<()> {
        self.set_fd(request::SET_VRING_CALL, ring, fd)
    }

    pub fn set_vring_err(&self, ring: usize, fd: &impl AsFd) -> Result<()> {
        self.set_fd(request::SET_VRING_ERR, ring, fd)
    }

    pub fn set_vring_enable(&self, ring: usize, enable: bool) -> Result<()> {
        self.set(request::SET_VRING_ENABLE, &u32s([ring as u32, enable.into()]), &[])
    }

    pub fn get_queue_num(&self) -> Result<u64> {
        Ok(self.query(request::GET_QUEUE_NUM, &[], &[])?.u64())
    }

    /// `len` bytes of the configuration space.
    pub fn get_config(&self, offset: u32, len: u32) -> Result<Vec<u8>> {
        let body = [u32s([offset, len, 0]), vec![0; len as usize]].concat();
        let answer = self.query(request::GET_CONFIG, &body, &[])?.body;
        assert_eq!(answer[..12], body[..12]);
        Ok(answer[12..].to_vec())
    }

    pub fn get_vring_base(&self, ring: usize) -> Result<u32> {
        let answer = self.query(request::GET_VRING_BASE, &u32s([ring as u32, 0]), &[])?;
        assert_eq!(answer.body[..4], (ring as u32).to_le_bytes());
        Ok(u32::from_le_bytes(answer.body[4..].try_into().unwrap()))
    }
}
