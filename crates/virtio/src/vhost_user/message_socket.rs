//! One connected socket of vhost-user: messages go out and come in, each within a time limit.
//!
//! A peer may stop reading, stop writing, or write one byte a second. The limit is therefore for a
//! whole message. The calls use `MSG_DONTWAIT` and `poll`, so the socket's own flags, which it may
//! share with another process, do not matter.
//!
//! After an error the two sides no longer agree on where a message begins, and a late answer could
//! be mistaken for one to a later request. An error therefore ends the connection: the socket is
//! shut down.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown,
};

use super::message::{EncodedMessage, HEADER, MAX_FDS, Malformed, RawMessage};
use super::received::{MAX_CLOSING, Received, closing};

/// Why a message could not be sent or received. The connection has ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The peer did not send, or did not read, a whole message in its time.
    #[error("the peer took more than {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed the connection within a message.
    #[error("the peer closed the connection in the middle of a message")]
    CutOff,
    /// The peer sent descriptors, and this process cannot have so many.
    #[error(
        "this process has too few file descriptors left to receive those of the peer; \
         raise the limit (`ulimit -n`, or LimitNOFILE of the service)"
    )]
    TooFewDescriptors,
    /// The peer sent descriptors, and too many of earlier ones are still being closed: their files
    /// let no `close` end.
    #[error(
        "this process is still closing {descriptors} descriptors that peers have sent, and the peers' files (FUSE, or \
         sockets that linger) delay it; end the processes that serve these files"
    )]
    StillClosing {
        /// How many there may be.
        descriptors: usize,
    },
    /// The peer broke the protocol.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The system refused.
    #[error("the connection failed: {0}")]
    Io(io::Error),
}

impl From<Errno> for MessageError {
    fn from(e: Errno) -> Self {
        match e {
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            e => Self::Io(e.into()),
        }
    }
}

/// A connected stream socket.
#[derive(Debug)]
pub(crate) struct MessageSocket {
    socket: OwnedFd,
    /// The time limit of a message.
    limit: Duration,
}

impl MessageSocket {
    /// Uses a connected socket. `limit` bounds the time to send one message, and to receive one.
    pub(crate) fn new(socket: impl Into<OwnedFd>, limit: Duration) -> Self {
        Self { socket: socket.into(), limit }
    }

    /// Sends a message. The time limit is for the peer to make room for it.
    pub(crate) fn send(&self, frame: &EncodedMessage<'_>) -> Result<(), MessageError> {
        self.ended_by(self.send_all(frame, Instant::now() + self.limit))
    }

    /// Receives an expected answer: the time limit begins now. No answer that the driver asks for
    /// has a descriptor.
    ///
    /// If an answer has descriptors nevertheless, they are not installed in this process: the
    /// kernel drops them, and the answer is refused. The reason is that the peer could delay a
    /// `close`: a FUSE file's `close` waits for the process that serves the file system.
    pub(crate) fn recv(&self) -> Result<RawMessage, MessageError> {
        let packet = self.packet(None, Instant::now() + self.limit);
        self.ended_by(packet.and_then(|packet| packet.ok_or(MessageError::Closed)))
    }

    /// Receives the next message of a peer that may be idle for as long as it likes: the time limit
    /// begins with the message's first byte. `None`: the peer closed the connection between two
    /// messages, or the socket was shut down on this side, which is how another thread ends the
    /// wait.
    pub(crate) fn next(&self) -> Result<Option<RawMessage>, MessageError> {
        let packet = self.wait(PollFlags::IN, None).and_then(|()| {
            let mut fds = Vec::new();
            let packet = self.packet(Some(&mut fds), Instant::now() + self.limit)?;
            Ok(packet.map(|packet| RawMessage { fds, ..packet }))
        });
        match packet {
            // If a peer ends before it has read all answers, the connection is reset.
            Err(MessageError::Closed) => Ok(None),
            packet => self.ended_by(packet),
        }
    }

    /// Whether both sides still hold the connection. Bytes that were not read do not count. One
    /// system call, no wait.
    pub(crate) fn is_open(&self) -> bool {
        let mut socket = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let _ = rustix::event::poll(&mut socket, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        !socket[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// The socket, to wait for its end.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Ends the connection. A wait in [`Self::next`] on another thread ends too.
    pub(crate) fn shutdown(&self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    fn ended_by<T>(&self, result: Result<T, MessageError>) -> Result<T, MessageError> {
        if result.is_err() {
            self.shutdown();
        }
        result
    }

    fn send_all(&self, frame: &EncodedMessage<'_>, deadline: Instant) -> Result<(), MessageError> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
        let mut fds = SendAncillaryBuffer::new(&mut space);
        if !frame.fds.is_empty() && !fds.push(SendAncillaryMessage::ScmRights(&frame.fds)) {
            return Err(Malformed::TooManyDescriptors.into());
        }
        let mut bytes = frame.bytes.as_slice();
        while !bytes.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut fds, flags) {
                Ok(sent) => {
                    // The descriptors went with the first byte.
                    fds.clear();
                    bytes = bytes.get(sent..).unwrap_or_default();
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, Some(deadline))?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// One message without its descriptors, or `None` at the end of the connection. Reads not a
    /// byte more. The descriptors go to `fds`; without it the message must have none.
    fn packet(
        &self,
        mut fds: Option<&mut Vec<Received>>,
        deadline: Instant,
    ) -> Result<Option<RawMessage>, MessageError> {
        let mut header = [0; HEADER];
        match self.fill(&mut header, fds.as_deref_mut(), deadline)? {
            0 => return Ok(None),
            HEADER => {}
            _ => return Err(MessageError::CutOff),
        }
        let (mut packet, size) = RawMessage::with_header(&header)?;
        packet.payload.resize(size, 0);
        if self.fill(&mut packet.payload, fds, deadline)? != size {
            return Err(MessageError::CutOff);
        }
        Ok(Some(packet))
    }

    /// Fills `buffer`, or a part of it if the connection ends before. Returns how many bytes were
    /// received.
    fn fill(
        &self,
        buffer: &mut [u8],
        mut fds: Option<&mut Vec<Received>>,
        deadline: Instant,
    ) -> Result<usize, MessageError> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            // Space for one descriptor too many, which distinguishes a peer that sends too many
            // from a process that can have too few. Descriptors that are not drained are closed
            // with the buffer.
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS + 1))];
            let stuck = closing() >= MAX_CLOSING;
            let mut control = match fds {
                // The kernel drops the descriptors, and reports it (`MSG_CTRUNC`).
                Some(_) if stuck => RecvAncillaryBuffer::default(),
                Some(_) => RecvAncillaryBuffer::new(&mut space),
                None => RecvAncillaryBuffer::default(),
            };
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let got = match rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(rest)], &mut control, flags) {
                Ok(got) => got,
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN, Some(deadline))?;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            let cut = got.flags.contains(ReturnFlags::CTRUNC);
            match &mut fds {
                Some(fds) => {
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(more) = message {
                            fds.extend(more.map(Received::from));
                        }
                    }
                    if fds.len() > MAX_FDS {
                        return Err(Malformed::TooManyDescriptors.into());
                    }
                    if cut && stuck {
                        return Err(MessageError::StillClosing { descriptors: MAX_CLOSING });
                    }
                    if cut {
                        return Err(MessageError::TooFewDescriptors);
                    }
                }
                None if cut => return Err(Malformed::UnwantedDescriptors.into()),
                None => {}
            }
            if got.bytes == 0 {
                break;
            }
            filled += got.bytes;
        }
        Ok(filled)
    }

    /// Waits until the socket can be read or written, the peer has closed it, or the time is over.
    fn wait(&self, events: PollFlags, deadline: Option<Instant>) -> Result<(), MessageError> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(MessageError::TimedOut(self.limit));
            }
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            match rustix::event::poll(&mut [PollFd::new(&self.socket, events)], timeout.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::vhost_user::message::{Message, Request};
    use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream;
    use std::thread;

    /// For messages that are there, or that must come: a test that hangs fails.
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);

    fn line(limit: Duration) -> (MessageSocket, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (MessageSocket::new(ours, limit), theirs)
    }

    fn message(request: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [request, 1, payload.len() as u32].iter().flat_map(|w| w.to_ne_bytes()).collect();
        bytes.extend(payload);
        bytes
    }

    fn send(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let sent = rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
    }

    fn pipes(n: usize) -> (Vec<PipeReader>, Vec<PipeWriter>) {
        (0..n).map(|_| pipe().unwrap()).unzip()
    }

    /// Ends a connection. To drop it would not do: a child that another test makes has a copy of
    /// each descriptor, until it runs.
    fn hang_up(stream: &UnixStream) {
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    }

    /// Blocks until the last copy of each writer is closed.
    fn closed(readers: Vec<PipeReader>) {
        for mut reader in readers {
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn messages_with_descriptors_in_both_directions() {
        let (a, theirs) = line(LONG);
        let b = MessageSocket::new(theirs, LONG);
        let (mut reader, writer) = pipe().unwrap();
        let kick = Message::SetVringKick { index: 2, fd: Some(writer.as_fd()) };
        a.send(&kick.encode(true)).unwrap();
        a.send(&Message::<OwnedFd>::GetFeatures.encode(false)).unwrap();
        drop(writer);
        let first = b.next().unwrap().unwrap();
        assert!(first.needs_reply());
        let Message::SetVringKick { index: 2, fd: Some(fd) } = Message::decode(first).unwrap() else { panic!() };
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(&fd, b"x").unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 1);
        let second = b.next().unwrap().unwrap();
        assert_eq!((second.request, second.needs_reply(), second.fds.len()), (Request::GET_FEATURES, false, 0));
        a.shutdown();
        assert!(!b.is_open());
        assert!(b.next().unwrap().is_none());
    }

    #[test]
    fn silence_and_single_bytes_end_after_the_limit() {
        let (silent, _theirs) = line(SHORT);
        assert!(matches!(silent.recv(), Err(MessageError::TimedOut(SHORT))));
        for idle in [true, false] {
            let (slow, theirs) = line(SHORT);
            // One byte of a long message at a time, each well within the limit, until the
            // connection ends.
            let peer = thread::spawn(move || {
                let sent = |byte: &u8| {
                    thread::sleep(SHORT / 4);
                    (&theirs).write_all(&[*byte]).is_ok()
                };
                message(2, &[0; 1000]).iter().all(sent)
            });
            let result = if idle { slow.next().map(drop) } else { slow.recv().map(drop) };
            assert!(matches!(result, Err(MessageError::TimedOut(SHORT))), "{result:?}");
            assert!(!peer.join().unwrap(), "it was waited for to the end");
        }
    }

    #[test]
    fn a_peer_that_does_not_read_ends_the_send() {
        let (line, theirs) = line(SHORT);
        let frame = Message::<OwnedFd>::GetFeatures.encode(false);
        let error = loop {
            if let Err(e) = line.send(&frame) {
                break e;
            }
        };
        assert!(matches!(error, MessageError::TimedOut(SHORT)), "{error}");
        hang_up(&theirs);
        assert!(matches!(line.send(&frame), Err(MessageError::Closed)));
    }

    #[test]
    fn ends_within_a_message_and_between_two() {
        let whole = message(2, &[0; 8]);
        for cut in 1..whole.len() {
            let (line, mut theirs) = line(LONG);
            theirs.write_all(&whole[..cut]).unwrap();
            drop(theirs);
            assert!(matches!(line.next(), Err(MessageError::CutOff)), "{cut}");
        }
        let (line, theirs) = line(LONG);
        drop(theirs);
        assert!(matches!(line.recv(), Err(MessageError::Closed)));
    }

    #[test]
    fn another_thread_ends_the_wait() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let hangup = ours.try_clone().unwrap();
        let waits = thread::spawn(move || MessageSocket::new(ours, LONG).next().map(|packet| packet.is_none()));
        hangup.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(waits.join().unwrap().unwrap());
    }

    #[test]
    fn surplus_descriptors_are_closed() {
        // More than a message may have: with the header, in one go and byte by byte, and with the
        // payload.
        for split in [20, 1, 12] {
            let (line, theirs) = line(LONG);
            let (readers, writers) = pipes(12);
            let fds: Vec<_> = writers.iter().map(AsFd::as_fd).collect();
            let bytes = message(2, &[0; 8]);
            match split {
                20 => send(&theirs, &bytes, &fds),
                1 => bytes.iter().zip(&fds).for_each(|(byte, fd)| send(&theirs, &[*byte], &[*fd])),
                _ => {
                    send(&theirs, &bytes[..12], &fds[..6]);
                    send(&theirs, &bytes[12..], &fds[6..]);
                }
            }
            drop(writers);
            assert!(matches!(line.next(), Err(MessageError::Malformed(Malformed::TooManyDescriptors))), "{split}");
            drop((line, theirs));
            closed(readers);
        }
    }

    /// The peer keeps the other end of the pipe and this test reads it: it ends although the line
    /// and the answer still live.
    #[test]
    fn answers_install_no_descriptors() {
        for at in [0, 12] {
            let (line, theirs) = line(LONG);
            let (readers, writers) = pipes(1);
            let bytes = message(1, &[0; 8]);
            send(&theirs, &bytes[..at], &[]);
            send(&theirs, &bytes[at..], &[writers[0].as_fd()]);
            drop(writers);
            assert!(matches!(line.recv(), Err(MessageError::Malformed(Malformed::UnwantedDescriptors))), "{at}");
            closed(readers);
        }
    }

    /// What a peer wrote before it died, and what is left of an answer that was refused, does not
    /// keep a connection open.
    #[test]
    fn a_connection_with_unread_bytes_ends() {
        let (line, mut theirs) = line(LONG);
        assert!(line.is_open());
        theirs.write_all(&[0; 100]).unwrap();
        assert!(line.is_open());
        hang_up(&theirs);
        assert!(!line.is_open());
        let (line, mut theirs) = self::line(LONG);
        theirs.write_all(&[0; 100]).unwrap();
        line.shutdown();
        assert!(!line.is_open());
    }

    #[test]
    fn announced_lengths_are_not_believed() {
        for size in [1025, u32::MAX] {
            let (line, theirs) = line(LONG);
            let mut bytes = message(2, &[]);
            bytes[8..].copy_from_slice(&size.to_ne_bytes());
            let (readers, writers) = pipes(1);
            send(&theirs, &bytes, &[writers[0].as_fd()]);
            drop(writers);
            assert!(matches!(line.next(), Err(MessageError::Malformed(Malformed::TooLong { .. }))));
            closed(readers);
        }
    }

    /// In a process of its own, because the limit is the whole process's.
    #[test]
    fn too_few_descriptors_are_named() {
        const CHILD: &str = "NETMEM_TEST_FEW_DESCRIPTORS";
        if std::env::var_os(CHILD).is_none() {
            let test = "vhost_user::message_socket::tests::too_few_descriptors_are_named";
            let child = std::process::Command::new(std::env::current_exe().unwrap())
                .args([test, "--exact"])
                .env(CHILD, "1")
                .output()
                .unwrap();
            assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
            return;
        }
        let (line, theirs) = line(LONG);
        let (readers, writers) = pipes(4);
        let fds: Vec<_> = writers.iter().map(AsFd::as_fd).collect();
        send(&theirs, &message(5, &[0; 8]), &fds);
        drop(writers);
        let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        // Two more than are open now.
        let free = rustix::io::dup(&theirs).unwrap();
        limit.current = Some(std::os::fd::AsRawFd::as_raw_fd(&free) as u64 + 2);
        drop(free);
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        let error = line.next().unwrap_err();
        assert!(matches!(error, MessageError::TooFewDescriptors) && error.to_string().contains("ulimit -n"), "{error}");
        closed(readers);
    }
}
