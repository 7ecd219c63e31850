//! The connection between the driver of a measurement and a host: messages of `postcard`, behind
//! their length, in the clear or encrypted and authenticated by a shared key.
//!
//! ```text
//!   hello        NETMEM · version (2 bytes) · 1 with a key       both ways, in the clear
//!   with a key   Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s           both hellos are its prologue
//!   then         length (4 bytes) · message                  with a key, in messages of Noise
//! ```
//!
//! The peer is hostile input: each wait has a limit, each length is validated before it is used,
//! and no message is decoded before the peer has shown that it knows the key. The first message of
//! the handshake can be replayed; a message behind the handshake cannot be made without the key, so
//! an agent counts a connection as a driver's from its first message on. The cryptography is that
//! of `snow`.

use super::CHECK_EVERY;
use netmem_measure::signals::Interrupted;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;
use snow::{Builder, TransportState};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Raised when a message changes.
pub(super) const VERSION: u16 = 1;
const MAGIC: &[u8; 6] = b"NETMEM";
const HELLO: usize = MAGIC.len() + 3;
const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// The longest message of Noise, and the most that one carries.
const NOISE_MAX: usize = 65535;
const NOISE_PAYLOAD: usize = NOISE_MAX - 16;
/// The longest message: the times of a host's requests, of which a histogram has 30,000 at most.
const MOST: usize = 4 << 20;
/// The longest time for the handshake, for the first message, and for a message to be sent.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Why a host cannot be talked to.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChannelError {
    #[error("the connection was closed")]
    Closed,
    #[error("nothing came for {} s", .0.as_secs_f64())]
    Late(Duration),
    #[error("no netmem is there: it begins with {0:02x?}")]
    NotNetmem([u8; MAGIC.len()]),
    #[error("the protocol's version there is {0}, and here {VERSION}: use the same version of netmem")]
    Version(u16),
    #[error("it wants a key: give --key FILE, with the same key as there")]
    KeyNeeded,
    #[error("it has no key: give it --key FILE, or leave out --key here")]
    KeyUnknown,
    #[error("the handshake failed: is the key of --key the same on both hosts?")]
    WrongKey,
    #[error("a message has {0} bytes, and {MOST} are possible")]
    TooLong(usize),
    #[error("a message cannot be read")]
    Malformed(#[from] postcard::Error),
    #[error("a message was changed on its way")]
    Forged(#[source] snow::Error),
    #[error("an empty message of Noise")]
    Empty,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

/// The shared key of all hosts.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// Reads a key: 64 hexadecimal digits. The file must be its owner's alone.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        use std::os::unix::fs::MetadataExt;
        let failed = |e: io::Error| format!("--key {}: {e}", path.display());
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
            return Err(format!("--key {0}: other users can read it; chmod 600 {0}", path.display()));
        }
        let mut text = String::new();
        file.take(1024).read_to_string(&mut text).map_err(failed)?;
        let text = text.trim();
        let mut key = [0; 32];
        let digits = text.len() == 64 && text.is_ascii();
        let parsed = digits.then(|| {
            key.iter_mut().enumerate().try_for_each(|(n, byte)| {
                *byte = u8::from_str_radix(&text[2 * n..2 * n + 2], 16).ok()?;
                Some(())
            })
        });
        match parsed.flatten() {
            Some(()) => Ok(Self(key)),
            None => Err(format!(
                "--key {0}: a key has 64 hexadecimal digits: (umask 077; openssl rand -hex 32 > {0})",
                path.display()
            )),
        }
    }
}

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Driver,
    Agent,
}

/// See the module.
pub(super) struct Channel<'s> {
    socket: File,
    cipher: Option<Box<TransportState>>,
    /// Received bytes that are not decrypted yet, and those that are.
    raw: Vec<u8>,
    plain: Vec<u8>,
    /// Ends each wait.
    stop: &'s AtomicBool,
}

impl<'s> Channel<'s> {
    /// Makes the handshake.
    pub(super) fn open(
        socket: OwnedFd,
        role: Role,
        key: Option<&Key>,
        stop: &'s AtomicBool,
    ) -> Result<Self, ChannelError> {
        rustix::io::ioctl_fionbio(&socket, true).map_err(io::Error::from)?;
        let mut channel = Self { socket: socket.into(), cipher: None, raw: Vec::new(), plain: Vec::new(), stop };
        let until = Instant::now() + PATIENCE;
        let mut own = [0; HELLO];
        own[..MAGIC.len()].copy_from_slice(MAGIC);
        own[MAGIC.len()..HELLO - 1].copy_from_slice(&VERSION.to_le_bytes());
        own[HELLO - 1] = key.is_some().into();
        channel.write(&own)?;
        let theirs: [u8; HELLO] = channel.exactly(HELLO, until)?.try_into().map_err(|_| ChannelError::Closed)?;
        let [magic @ .., low, high, has_key] = theirs;
        if magic != *MAGIC {
            return Err(ChannelError::NotNetmem(magic));
        }
        let version = u16::from_le_bytes([low, high]);
        match (version == VERSION, key, has_key == 1) {
            (false, ..) => return Err(ChannelError::Version(version)),
            (true, None, true) => return Err(ChannelError::KeyNeeded),
            (true, Some(_), false) => return Err(ChannelError::KeyUnknown),
            (true, None, false) => {}
            (true, Some(key), true) => {
                let prologue = if role == Role::Driver { [own, theirs] } else { [theirs, own] }.concat();
                channel.cipher = Some(Box::new(channel.noise(role, key, &prologue, until)?));
            }
        }
        Ok(channel)
    }

    /// The handshake of Noise: two messages.
    fn noise(
        &mut self,
        role: Role,
        key: &Key,
        prologue: &[u8],
        until: Instant,
    ) -> Result<TransportState, ChannelError> {
        let failed = |_| ChannelError::WrongKey;
        let builder = Builder::new(NOISE.parse().map_err(failed)?);
        let builder = builder.prologue(prologue).and_then(|builder| builder.psk(0, &key.0)).map_err(failed)?;
        let mut buffer = [0; 256];
        if role == Role::Driver {
            let mut state = builder.build_initiator().map_err(failed)?;
            let len = state.write_message(&[], &mut buffer).map_err(failed)?;
            self.write_packet(&buffer[..len])?;
            // An agent with another key closes the connection.
            let answer = match self.packet(until) {
                Err(ChannelError::Closed) => return Err(ChannelError::WrongKey),
                answer => answer?,
            };
            state.read_message(&answer, &mut buffer).map_err(failed)?;
            state.into_transport_mode().map_err(failed)
        } else {
            let mut state = builder.build_responder().map_err(failed)?;
            let first = self.packet(until)?;
            state.read_message(&first, &mut buffer).map_err(failed)?;
            let len = state.write_message(&[], &mut buffer).map_err(failed)?;
            self.write_packet(&buffer[..len])?;
            state.into_transport_mode().map_err(failed)
        }
    }

    /// Sends a message.
    pub(super) fn send(&mut self, message: &impl Serialize) -> Result<(), ChannelError> {
        let body = postcard::to_stdvec(message)?;
        let len = u32::try_from(body.len()).ok().filter(|len| *len as usize <= MOST);
        let len = len.ok_or(ChannelError::TooLong(body.len()))?;
        let bytes = [&len.to_le_bytes(), &body[..]].concat();
        let Some(mut cipher) = self.cipher.take() else { return self.write(&bytes) };
        let mut buffer = vec![0; NOISE_MAX];
        let sent = bytes.chunks(NOISE_PAYLOAD).try_for_each(|part| {
            let len = cipher.write_message(part, &mut buffer).map_err(ChannelError::Forged)?;
            self.write_packet(&buffer[..len])
        });
        self.cipher = Some(cipher);
        sent
    }

    /// Receives a message, for which it waits until then.
    pub(super) fn recv<T: DeserializeOwned>(&mut self, until: Option<Instant>) -> Result<T, ChannelError> {
        let begin = Instant::now();
        loop {
            if let Some(message) = self.try_recv()? {
                return Ok(message);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(ChannelError::Late(begin.elapsed()));
            }
            self.wait(PollFlags::IN)?;
        }
    }

    /// Receives a message if one is there.
    pub(super) fn try_recv<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ChannelError> {
        loop {
            if let Some((len, rest)) = self.plain.split_first_chunk() {
                let len = u32::from_le_bytes(*len) as usize;
                if len > MOST {
                    return Err(ChannelError::TooLong(len));
                }
                if let Some(body) = rest.get(..len) {
                    let message = postcard::from_bytes(body)?;
                    self.plain.drain(..4 + len);
                    return Ok(Some(message));
                }
            }
            let before = self.plain.len();
            self.decrypt()?;
            if self.plain.len() == before && !self.read()? {
                return Ok(None);
            }
        }
    }

    /// Moves what was received to `plain`, as far as it is complete.
    fn decrypt(&mut self) -> Result<(), ChannelError> {
        let Some(cipher) = &mut self.cipher else {
            self.plain.append(&mut self.raw);
            return Ok(());
        };
        let mut buffer = vec![0; NOISE_MAX];
        while let Some(packet) = first_packet(&self.raw) {
            let len = cipher.read_message(packet, &mut buffer).map_err(ChannelError::Forged)?;
            if len == 0 {
                return Err(ChannelError::Empty);
            }
            let whole = 2 + packet.len();
            self.raw.drain(..whole);
            self.plain.extend_from_slice(&buffer[..len]);
        }
        Ok(())
    }

    /// Reads what there is. Returns whether that was something.
    fn read(&mut self) -> Result<bool, ChannelError> {
        let mut buffer = [0; 16 << 10];
        match self.socket.read(&mut buffer) {
            Ok(0) => Err(ChannelError::Closed),
            Ok(n) => {
                self.raw.extend_from_slice(&buffer[..n]);
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(true),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => Err(ChannelError::Closed),
            Err(e) => Err(e.into()),
        }
    }

    /// So many bytes of the handshake.
    fn exactly(&mut self, len: usize, until: Instant) -> Result<Vec<u8>, ChannelError> {
        while self.raw.len() < len {
            if !self.read()? {
                if Instant::now() >= until {
                    return Err(ChannelError::Late(PATIENCE));
                }
                self.wait(PollFlags::IN)?;
            }
        }
        Ok(self.raw.drain(..len).collect())
    }

    /// A message of Noise in the handshake.
    fn packet(&mut self, until: Instant) -> Result<Vec<u8>, ChannelError> {
        let len = self.exactly(2, until)?;
        self.exactly(u16::from_le_bytes([len[0], len[1]]).into(), until)
    }

    fn write_packet(&mut self, packet: &[u8]) -> Result<(), ChannelError> {
        let len = u16::try_from(packet.len()).map_err(|_| ChannelError::TooLong(packet.len()))?;
        self.write(&[&len.to_le_bytes(), packet].concat())
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), ChannelError> {
        let until = Instant::now() + PATIENCE;
        while !bytes.is_empty() {
            match self.socket.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < until => self.wait(PollFlags::OUT)?,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(ChannelError::Late(PATIENCE)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    return Err(ChannelError::Closed);
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags) -> Result<(), ChannelError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        wait(&mut [PollFd::new(&self.socket, flags)]);
        Ok(())
    }
}

impl AsFd for Channel<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits for one of these descriptors, but not for long.
pub(super) fn wait(fds: &mut [PollFd<'_>]) {
    let at_most = Timespec { tv_sec: 0, tv_nsec: CHECK_EVERY.subsec_nanos().into() };
    // A signal ends it early, as a descriptor would.
    let _ = poll(fds, Some(&at_most));
}

/// The first message of Noise, if all of it is there.
fn first_packet(raw: &[u8]) -> Option<&[u8]> {
    let (len, rest) = raw.split_first_chunk()?;
    rest.get(..u16::from_le_bytes(*len).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    static GOES_ON: AtomicBool = AtomicBool::new(false);

    fn key(byte: u8) -> Key {
        Key([byte; 32])
    }

    fn both(keys: [Option<Key>; 2]) -> [Result<Channel<'static>, ChannelError>; 2] {
        let (driver, agent) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let [of_driver, of_agent] = &keys;
            let agent = scope.spawn(move || Channel::open(agent.into(), Role::Agent, of_agent.as_ref(), &GOES_ON));
            let driver = Channel::open(driver.into(), Role::Driver, of_driver.as_ref(), &GOES_ON);
            [driver, agent.join().unwrap()]
        })
    }

    #[test]
    fn messages_of_each_length_arrive() {
        for keys in [[None, None], [Some(key(7)), Some(key(7))]] {
            let [driver, agent] = both(keys);
            let (mut driver, mut agent) = (driver.unwrap(), agent.unwrap());
            std::thread::scope(|scope| {
                let lengths = [0, 1, 1000, NOISE_PAYLOAD - 8, NOISE_PAYLOAD, 3 * NOISE_PAYLOAD + 5, 1 << 20];
                let sent = scope.spawn(move || {
                    for len in lengths {
                        driver.send(&vec![0x5au8; len]).unwrap();
                    }
                    assert!(matches!(driver.send(&vec![0u8; MOST]), Err(ChannelError::TooLong(_))));
                });
                for len in lengths {
                    let message: Vec<u8> = agent.recv(None).unwrap();
                    assert!(message.len() == len && message.iter().all(|byte| *byte == 0x5a));
                }
                sent.join().unwrap();
                assert!(matches!(agent.recv::<Vec<u8>>(None), Err(ChannelError::Closed)));
            });
        }
    }

    #[test]
    fn keys_that_differ_reach_no_message() {
        let [driver, agent] = both([Some(key(1)), Some(key(2))]);
        assert!(matches!((driver.err(), agent.err()), (Some(ChannelError::WrongKey), Some(ChannelError::WrongKey))));
        let [driver, agent] = both([None, Some(key(2))]);
        assert!(matches!((driver.err(), agent.err()), (Some(ChannelError::KeyNeeded), Some(ChannelError::KeyUnknown))));
    }

    #[test]
    fn what_no_netmem_sends_is_named() {
        let opened = |hello: &[u8]| {
            let (here, mut there) = UnixStream::pair().unwrap();
            there.write_all(hello).unwrap();
            drop(there.shutdown(std::net::Shutdown::Write));
            Channel::open(here.into(), Role::Driver, None, &GOES_ON).err().unwrap().to_string()
        };
        assert!(opened(b"SSH-2.0-OpenSSH_9.2").contains("no netmem"));
        assert!(opened(b"NETMEM\x09\x00\x00").contains("version there is 9"));
        assert!(opened(b"NET").contains("closed"));
    }

    #[test]
    fn forged_and_endless_messages_are_refused() {
        let [driver, agent] = both([Some(key(3)), Some(key(3))]);
        let (mut driver, mut agent) = (driver.unwrap(), agent.unwrap());
        driver.write_packet(&[0; 40]).unwrap();
        assert!(matches!(agent.recv::<u8>(None), Err(ChannelError::Forged(_))));
        let [driver, agent] = both([None, None]);
        let (mut driver, mut agent) = (driver.unwrap(), agent.unwrap());
        driver.write(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(agent.recv::<u8>(None), Err(ChannelError::TooLong(_))));
    }

    #[test]
    fn keys_are_their_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = || Key::read(file.path()).err();
        std::fs::write(file.path(), "00ff".repeat(16) + "\n").unwrap();
        assert_eq!(read(), None);
        std::fs::write(file.path(), "00fg".repeat(16)).unwrap();
        assert!(read().unwrap().contains("openssl rand -hex 32"));
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read().unwrap().contains("chmod 600"));
    }
}
