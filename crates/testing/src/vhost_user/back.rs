//! vhost-user from the back end's side, in raw bytes: a second reading of the specification beside
//! the crate's own.

use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// The names of the messages that the driver may send.
const NAMES: [(u32, &str); 20] = [
    (1, "GET_FEATURES"),
    (2, "SET_FEATURES"),
    (3, "SET_OWNER"),
    (5, "SET_MEM_TABLE"),
    (8, "SET_VRING_NUM"),
    (9, "SET_VRING_ADDR"),
    (10, "SET_VRING_BASE"),
    (11, "GET_VRING_BASE"),
    (12, "SET_VRING_KICK"),
    (13, "SET_VRING_CALL"),
    (14, "SET_VRING_ERR"),
    (15, "GET_PROTOCOL_FEATURES"),
    (16, "SET_PROTOCOL_FEATURES"),
    (17, "GET_QUEUE_NUM"),
    (18, "SET_VRING_ENABLE"),
    (20, "NET_SET_MTU"),
    (24, "GET_CONFIG"),
    (39, "SET_STATUS"),
    (40, "GET_STATUS"),
    (0, "another message"),
];

/// A message that came.
pub struct Message {
    pub number: u32,
    /// The driver waits for "done".
    pub confirm: bool,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Message {
    pub fn name(&self) -> &'static str {
        NAMES.iter().find(|(number, _)| *number == self.number || *number == 0).unwrap().1
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.payload[at..at + 4].try_into().unwrap())
    }

    pub fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.payload[at..at + 8].try_into().unwrap())
    }
}

pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

/// The driver at the other end.
pub struct Peer(UnixStream);

impl Peer {
    pub fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    /// The next message. `None`: the driver has gone.
    pub fn receive(&self) -> Option<Message> {
        let (mut header, mut fds) = ([0; 12], Vec::new());
        self.fill(&mut header, &mut fds)?;
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let (number, flags, size) = (word(0), word(4), word(8));
        assert!(flags == 1 || flags == 9, "flags {flags:#x}");
        let mut payload = vec![0; size as usize];
        self.fill(&mut payload, &mut fds)?;
        Some(Message { number, confirm: flags == 9, payload, fds })
    }

    /// Answers a message. `None`: the driver has gone.
    pub fn answer(&self, to: &Message, payload: &[u8]) -> Option<()> {
        let header: Vec<u8> = [to.number, 5, payload.len() as u32].iter().flat_map(|w| w.to_ne_bytes()).collect();
        (&self.0).write_all(&[&header[..], payload].concat()).ok()
    }

    pub fn hang_up(&self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }

    fn fill(&self, mut buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Option<()> {
        while !buffer.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&self.0, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            if got.bytes == 0 {
                return None;
            }
            buffer = &mut buffer[got.bytes..];
        }
        Some(())
    }
}
