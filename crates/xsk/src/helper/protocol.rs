//! The messages between a worker and its helper, over a connected Unix stream socket.
//!
//! ```text
//!   worker                                                      helper
//!   REQUEST  the worker's version, an interface ──────────────►
//!                     ◄── GRANT   interface, queues, descriptors (SCM_RIGHTS)
//!   registers its memory, makes rings, binds
//!   BOUND    ─────────────────────────────────────────────────►  puts the sockets into the map
//!                     ◄── DONE
//! ```
//!
//! Instead of a GRANT or a DONE the helper may send a REFUSAL, and then closes the connection.
//!
//! Each message begins with a prelude: a name, a version, and the kind of the message. The prelude,
//! the REQUEST and the REFUSAL are the same in all versions, so that a worker of another version
//! receives the reason. Numbers are in the byte order of the machine.

use super::error::{HelperError, Refusal, system};
use super::options::MAX_SOCKETS;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

pub(super) const MAGIC: [u8; 8] = *b"netmem-x";
/// Version 3 had neither requests nor refusals, and version 4 no metadata of received frames.
pub(super) const VERSION: u32 = 5;
/// Bytes of a prelude.
pub(super) const PRELUDE: usize = 16;
/// Bytes of an interface's name, and of a driver's. Shorter names end with zeros.
pub(super) const NAME: usize = libc::IFNAMSIZ;
pub(super) const DRIVER: usize = 32;
/// Bytes of a request: a prelude, and the name of an interface, or zeros for any.
pub(super) const REQUEST_LEN: usize = PRELUDE + NAME;
/// The most bytes of the text of a refusal.
const TEXT: usize = 1024;

pub(super) const REQUEST: u32 = 1;
pub(super) const GRANT: u32 = 2;
pub(super) const REFUSAL: u32 = 3;
pub(super) const BOUND: u32 = 4;
pub(super) const DONE: u32 = 5;

/// The most descriptors of a grant: the link and the map of the program, the watch, the sockets.
pub(super) const DESCRIPTORS: usize = 3 + MAX_SOCKETS;

/// The number at an offset. The callers' buffers are long enough.
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// A text in so many bytes of a message.
pub(super) fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
    bytes
}

/// The text in such bytes.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

pub(super) fn prelude(kind: u32) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_ne_bytes(), &kind.to_ne_bytes()].concat()
}

/// The kind of a message of this version.
///
/// # Errors
///
/// [`HelperError::Malformed`], [`HelperError::Version`].
pub(super) fn kind(prelude: &[u8; PRELUDE]) -> Result<u32, HelperError> {
    if prelude[..8] != MAGIC {
        return Err(HelperError::Malformed("it does not begin as a message of a helper"));
    }
    match (word(prelude, 8), word(prelude, 12)) {
        // A refusal is the same in all versions. Version 3 had the interface's index at this place.
        (version, REFUSAL) if version > 3 => Ok(REFUSAL),
        (VERSION, kind) => Ok(kind),
        (theirs, _) => Err(HelperError::Version { theirs, ours: VERSION }),
    }
}

pub(super) fn request(interface: Option<&str>) -> Vec<u8> {
    [prelude(REQUEST), padded::<NAME>(interface.unwrap_or_default()).to_vec()].concat()
}

/// The interface that a request names, or an empty text for any.
pub(super) fn requested(request: &[u8; REQUEST_LEN]) -> Result<String, HelperError> {
    let (first, name) = request.split_at(PRELUDE);
    match first.first_chunk().map(kind) {
        Some(Ok(REQUEST)) => Ok(text(name)),
        Some(Err(error)) => Err(error),
        _ => Err(HelperError::Malformed("it is no request")),
    }
}

/// Sends a refusal, if the socket has room for it. The worker then finds the connection closed.
pub(super) fn refuse(to: BorrowedFd<'_>, why: Refusal, text: &str) {
    let end = text.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= TEXT).last().unwrap_or(0);
    let text = text.get(..end).unwrap_or_default();
    let bytes = [&prelude(REFUSAL)[..], &why.code().to_ne_bytes(), &(end as u32).to_ne_bytes(), text.as_bytes()];
    // A worker that has ended, or that does not read, gets no reason.
    let _ = send(to, &bytes.concat(), &[], None);
}

/// Receives the rest of a refusal.
pub(super) fn refused(from: BorrowedFd<'_>, deadline: Deadline) -> HelperError {
    let mut head = [0; 8];
    if let Err(error) = fill(from, &mut head, &mut Vec::new(), deadline) {
        return error;
    }
    let mut bytes = vec![0; (word(&head, 4) as usize).min(TEXT)];
    match fill(from, &mut bytes, &mut Vec::new(), deadline) {
        // The text is printed: a helper must not send a terminal anything but text.
        Ok(()) => HelperError::Refused {
            why: Refusal::of(word(&head, 0)),
            text: String::from_utf8_lossy(&bytes).replace(char::is_control, " "),
        },
        Err(error) => error,
    }
}

/// A message of a known length, which arrives in any number of parts.
#[derive(Debug)]
pub(super) struct Incoming<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> Incoming<N> {
    pub(super) fn new() -> Self {
        Self { bytes: [0; N], filled: 0 }
    }

    /// The message, if all of it has arrived. Never waits. Descriptors that come with it are closed
    /// by the kernel.
    ///
    /// # Errors
    ///
    /// [`HelperError::Closed`] if the other side has closed its socket.
    pub(super) fn read(&mut self, from: BorrowedFd<'_>) -> Result<Option<[u8; N]>, HelperError> {
        while let Some(rest) = self.bytes.get_mut(self.filled..).filter(|rest| !rest.is_empty()) {
            match rustix::net::recv(from, rest, RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return Err(HelperError::Closed),
                Ok((got, _)) => self.filled += got,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(e) => return Err(system("receiving a message of a worker")(e)),
            }
        }
        Ok(Some(self.bytes))
    }

    /// Waits for the message.
    pub(super) fn wait(mut self, from: BorrowedFd<'_>, deadline: Deadline) -> Result<[u8; N], HelperError> {
        loop {
            match self.read(from)? {
                Some(message) => return Ok(message),
                None => wait(from, PollFlags::IN, deadline)?,
            }
        }
    }
}

/// The time limit of the other side, and when it expires.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    pub(super) fn new(limit: Duration) -> Self {
        Self { at: Instant::now() + limit, limit }
    }
}

/// Sends a message. Its descriptors go with the first byte. Without a deadline, a socket without
/// room is an error: a message has some hundred bytes, and the buffer of a new connection is empty.
pub(super) fn send(
    to: BorrowedFd<'_>,
    mut bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Option<Deadline>,
) -> Result<(), HelperError> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        // There is room for the largest number of sockets.
        let _ = control.push(SendAncillaryMessage::ScmRights(fds));
    }
    while !bytes.is_empty() {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match (rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags), deadline) {
            (Ok(sent), _) => {
                control.clear();
                bytes = bytes.get(sent..).unwrap_or_default();
            }
            (Err(Errno::AGAIN), Some(deadline)) => wait(to, PollFlags::OUT, deadline)?,
            (Err(Errno::INTR), _) => {}
            (Err(Errno::PIPE | Errno::CONNRESET), _) => return Err(HelperError::Closed),
            (Err(e), _) => return Err(system("sending a message over the helper's socket")(e)),
        }
    }
    Ok(())
}

/// Fills `buffer`. Descriptors that arrive with its bytes are added to `fds`.
pub(super) fn fill(
    from: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Deadline,
) -> Result<(), HelperError> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = match rustix::net::recvmsg(from, &mut [IoSliceMut::new(rest)], &mut control, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN) => {
                wait(from, PollFlags::IN, deadline)?;
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Err(HelperError::Closed),
            Err(e) => return Err(system("receiving the descriptors")(e)),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > DESCRIPTORS {
            return Err(HelperError::Malformed(
                "it has too many descriptors, or this process can have no more (ulimit -n)",
            ));
        }
        if got.bytes == 0 {
            return Err(HelperError::Closed);
        }
        filled += got.bytes;
    }
    Ok(())
}

fn wait(on: BorrowedFd<'_>, events: PollFlags, deadline: Deadline) -> Result<(), HelperError> {
    let left = deadline.at.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(HelperError::TimedOut(deadline.limit));
    }
    match poll(&mut [PollFd::from_borrowed_fd(on, events)], Timespec::try_from(left).ok().as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(system("waiting for the other side of the helper's socket")(e)),
    }
}

/// The connection of a worker to its helper, which waits for the sockets to be bound.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    limit: Duration,
}

impl Connection {
    pub(super) fn new(socket: BorrowedFd<'_>, limit: Duration) -> Result<Self, HelperError> {
        let socket =
            socket.try_clone_to_owned().map_err(system("duplicating the descriptor of the helper's socket"))?;
        Ok(Self { socket, limit })
    }

    /// Reports to the helper that all sockets are bound, and waits until they are in the program's
    /// map.
    ///
    /// # Errors
    ///
    /// [`HelperError`]: [`HelperError::Refused`] if the helper has closed the queues.
    pub(crate) fn bound(self) -> Result<(), HelperError> {
        let (socket, deadline) = (self.socket.as_fd(), Deadline::new(self.limit));
        match send(socket, &prelude(BOUND), &[], Some(deadline)) {
            // A helper that closes its end may have sent the reason before.
            Ok(()) | Err(HelperError::Closed) => {}
            Err(error) => return Err(error),
        }
        let mut message = [0; PRELUDE];
        fill(socket, &mut message, &mut Vec::new(), deadline)?;
        match kind(&message)? {
            DONE => Ok(()),
            REFUSAL => Err(refused(socket, deadline)),
            _ => Err(HelperError::Malformed("it is no answer to a worker whose sockets are bound")),
        }
    }
}
