//! A privileged helper that opens sockets for an unprivileged worker.
//!
//! ```text
//!   helper: CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF             worker: no capability
//!   Grant::open    sockets, their options,
//!                  program, link, map
//!   Grant::send ──────── descriptors (SCM_RIGHTS) ────────► Grant::receive
//!   and it has none of them any more                        registers its own memory, makes rings, binds, moves frames
//! ```
//!
//! The worker then holds the only descriptors: when the worker ends, the program is detached from the interface. The
//! helper can end before. The worker may be another user, in a container with another network namespace: a socket stays
//! in the namespace in which it was opened.
//!
//! The worker can bind each socket to *any* interface and queue of that namespace, and send any frame there. If workers
//! must not be able to do this, the helper opens its sockets in a namespace that has only one interface.
//!
//! After the helper has attached its program and before the worker's `bind`, the kernel drops frames that the program
//! redirects.

use crate::device::Device;
use crate::netlink::{AttachMode, Interface};
use crate::privileges::{MissingPrivilege, Privileges};
use crate::program::{AttachError, Program, ProgramOptions};
use crate::sys;
use crate::watch::Watch;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The largest number of sockets of a grant.
pub const MAX_SOCKETS: usize = 64;

/// The bytes that the socket of a transmit queue may have in flight in copy mode: more than any ring of frames needs.
const SEND_BUFFER: libc::c_int = 64 << 20;

/// The length of a message's header: a name, a version, the interface, the mode of the program, the number of sockets,
/// the entries of the device's receive ring, the name of its driver, and the name of the interface.
const HEADER: usize = 28 + DRIVER + NAME;
/// Bytes of a driver's name, as in ethtool, and of an interface's. Shorter names end with zeros.
const DRIVER: usize = 32;
const NAME: usize = libc::IFNAMSIZ;
const MAGIC: [u8; 8] = *b"netmem-x";
const VERSION: u32 = 3;
/// The most descriptors of a grant: the link and the map of the program, the watch, the sockets.
const DESCRIPTORS: usize = 3 + MAX_SOCKETS;

/// The options of a helper.
#[derive(Clone, Debug)]
pub struct HelperOptions {
    /// The receive queues. A socket is opened for each.
    pub queues: Vec<u32>,
    /// The program. `None`: the worker only sends, or the user has a program of their own.
    pub program: Option<ProgramOptions>,
    /// Busy polling by the worker (`SO_PREFER_BUSY_POLL`): how long to poll, and how many frames at a time.
    pub busy_poll: Option<(Duration, u16)>,
}

impl Default for HelperOptions {
    fn default() -> Self {
        Self { queues: vec![0], program: Some(ProgramOptions::default()), busy_poll: None }
    }
}

/// The reason why a helper could not open or pass the parts that a worker needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HelperError {
    /// A privilege is missing.
    #[error(transparent)]
    Privilege(#[from] MissingPrivilege),
    /// The program could not be attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// There are no sockets, or too many.
    #[error("{asked} sockets: a grant has 1 to {MAX_SOCKETS}")]
    Sockets {
        /// The number of sockets.
        asked: usize,
    },
    /// The process at the other end did not send, or did not read, in time.
    #[error("the other side of the helper's socket took more than {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The process at the other end has closed the connection.
    #[error("the other side of the helper's socket has closed it")]
    Closed,
    /// The received message is no grant.
    #[error("what came over the helper's socket is no grant: {0}")]
    Malformed(&'static str),
    /// The system refused a step.
    #[error("{what}")]
    System {
        /// The attempted step.
        what: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> HelperError {
    move |source| HelperError::System { what, source: source.into() }
}

/// AF_XDP sockets of an interface that were opened and not bound, and the program that redirects frames to them.
#[derive(Debug)]
#[non_exhaustive]
pub struct Grant {
    /// The index of the interface, in the network namespace of the sockets.
    pub ifindex: u32,
    /// The name of the interface there.
    pub name: String,
    /// The sockets, each with its queue.
    pub sockets: Vec<(u32, OwnedFd)>,
    /// The program, whose map contains the sockets. It is detached when the last descriptor of its link is closed.
    pub program: Option<Program>,
    /// The driver of the interface, for its [quirks](crate::quirks). `None`: it is unknown. The worker may be in a
    /// network namespace in which it cannot read it.
    pub driver: Option<String>,
    /// Entries of the receive ring of the device. The worker's fill level must be above this. 0: it is unknown.
    pub rx_ring: u32,
    /// Tells the worker that the interface is gone.
    pub(crate) watch: Watch,
}

/// A text in so many bytes of a message.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
    bytes
}

/// The text in such bytes.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

impl Grant {
    /// Opens sockets of the interface `name`, and attaches a program with the sockets in its map.
    ///
    /// # Errors
    ///
    /// [`HelperError`], for example a missing privilege. If there is an error, nothing has changed.
    pub fn open(name: &str, options: &HelperOptions) -> Result<Self, HelperError> {
        let asked = options.queues.len();
        if !(1..=MAX_SOCKETS).contains(&asked) {
            return Err(HelperError::Sockets { asked });
        }
        Privileges::current().check_socket()?;
        let interface = Interface::by_name(name).map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV) => AttachError::NoInterface(name.to_owned()).into(),
            _ => HelperError::System { what: "looking at the interface", source },
        })?;
        let open = |queue: &u32| Ok((*queue, open_socket(options.busy_poll)?));
        let sockets = options.queues.iter().map(open).collect::<Result<Vec<_>, HelperError>>()?;
        let program = options.program.as_ref().map(|options| Program::attach(interface.index, options)).transpose()?;
        if let Some(program) = &program {
            sockets.iter().try_for_each(|(queue, socket)| program.insert(*queue, socket.as_fd()))?;
        }
        let Device { driver, ring: rx_ring, .. } = Device::of(name.to_owned());
        let watch = Watch::new(interface.index).map_err(system("watching for the end of the interface"))?;
        Ok(Self { ifindex: interface.index, name: interface.name, sockets, program, driver, rx_ring, watch })
    }

    /// Passes everything to a worker at the other end of a Unix stream socket, and keeps nothing. The worker may take
    /// `limit` at most.
    ///
    /// # Errors
    ///
    /// [`HelperError`]. The sockets are closed, and the program is detached, unless the worker has received them.
    pub fn send(self, to: impl AsFd, limit: Duration) -> Result<(), HelperError> {
        let asked = self.sockets.len();
        if !(1..=MAX_SOCKETS).contains(&asked) {
            return Err(HelperError::Sockets { asked });
        }
        let program = self.program.as_ref().and_then(Program::parts);
        let mode = match program {
            None => 0,
            Some((_, AttachMode::Generic, _)) => 1,
            Some(_) => 2,
        };
        let frags = program.is_some_and(|(_, _, frags)| frags);
        let mut bytes = [&MAGIC[..], &VERSION.to_ne_bytes(), &self.ifindex.to_ne_bytes()].concat();
        bytes.extend([mode, frags.into(), 0, 0]);
        bytes.extend((asked as u32).to_ne_bytes());
        bytes.extend(self.rx_ring.to_ne_bytes());
        bytes.extend(padded::<DRIVER>(self.driver.as_deref().unwrap_or_default()));
        bytes.extend(padded::<NAME>(&self.name));
        self.sockets.iter().for_each(|(queue, _)| bytes.extend(queue.to_ne_bytes()));
        let mut fds: Vec<BorrowedFd<'_>> = program.into_iter().flat_map(|(fds, ..)| fds).collect();
        fds.push(self.watch.as_fd());
        fds.extend(self.sockets.iter().map(|(_, socket)| socket.as_fd()));
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // There is room for the largest number of sockets.
        let _ = control.push(SendAncillaryMessage::ScmRights(&fds));
        let (mut rest, deadline) = (&bytes[..], Instant::now() + limit);
        while !rest.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(&to, &[IoSlice::new(rest)], &mut control, flags) {
                Ok(sent) => {
                    // The descriptors were sent with the first byte.
                    control.clear();
                    rest = rest.get(sent..).unwrap_or_default();
                }
                Err(Errno::AGAIN) => wait(to.as_fd(), PollFlags::OUT, deadline, limit)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(HelperError::Closed),
                Err(e) => return Err(system("passing the descriptors")(e)),
            }
        }
        if let Some(program) = self.program {
            program.pass_on();
        }
        Ok(())
    }

    /// Receives a grant from a helper, over a connected Unix stream socket. Needs no privilege.
    ///
    /// # Errors
    ///
    /// [`HelperError`]. Received descriptors are closed.
    pub fn receive(from: impl AsFd, limit: Duration) -> Result<Self, HelperError> {
        let (from, deadline) = (from.as_fd(), Instant::now() + limit);
        let mut fds = Vec::new();
        let mut header = [0; HEADER];
        fill(from, &mut header, &mut fds, deadline, limit)?;
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if header[..8] != MAGIC || word(8) != VERSION {
            return Err(HelperError::Malformed("it does not begin as one of this version"));
        }
        let (ifindex, count) = (word(12), word(20) as usize);
        if !(1..=MAX_SOCKETS).contains(&count) {
            return Err(HelperError::Sockets { asked: count });
        }
        let mode = match header[16] {
            0 => None,
            1 => Some(AttachMode::Generic),
            2 => Some(AttachMode::Driver),
            _ => return Err(HelperError::Malformed("the program is attached in a mode that is unknown")),
        };
        let mut queues = vec![0; 4 * count];
        fill(from, &mut queues, &mut fds, deadline, limit)?;
        let of_program = if mode.is_some() { 2 } else { 0 };
        if fds.len() != of_program + 1 + count {
            return Err(HelperError::Malformed("there are not as many descriptors as it says"));
        }
        let sockets = fds.split_off(of_program + 1);
        let watch = fds.pop().and_then(Watch::from_helper);
        let watch = watch.ok_or(HelperError::Malformed("a descriptor is no netlink socket"))?;
        if !sockets.iter().all(|socket| sockopt::socket_domain(socket) == Ok(AddressFamily::XDP)) {
            return Err(HelperError::Malformed("a descriptor is no AF_XDP socket"));
        }
        let queues = queues.as_chunks::<4>().0.iter().map(|queue| u32::from_ne_bytes(*queue));
        let mut fds = fds.into_iter();
        let program = match (mode, fds.next(), fds.next()) {
            (Some(mode), Some(link), Some(map)) => Some(Program::from_parts(link, map, mode, header[17] != 0)?),
            _ => None,
        };
        let (driver, name) = header[28..].split_at(DRIVER);
        let (driver, name) = (Some(text(driver)).filter(|driver| !driver.is_empty()), text(name));
        Ok(Self { ifindex, name, sockets: queues.zip(sockets).collect(), program, driver, rx_ring: word(24), watch })
    }
}

fn open_socket(busy_poll: Option<(Duration, u16)>) -> Result<OwnedFd, HelperError> {
    let socket = sys::socket().map_err(system("opening an AF_XDP socket"))?;
    let set = |option, value: libc::c_int| {
        sys::set(socket.as_fd(), libc::SOL_SOCKET, option, &value)
            .map_err(system("setting an option of an AF_XDP socket"))
    };
    // This needs CAP_NET_ADMIN. Without it, the send buffer is smaller, and the worker has fewer frames in flight in
    // copy mode.
    let _ = set(libc::SO_SNDBUFFORCE, SEND_BUFFER);
    if let Some((time, budget)) = busy_poll {
        set(libc::SO_PREFER_BUSY_POLL, 1)?;
        set(libc::SO_BUSY_POLL, i32::try_from(time.as_micros()).unwrap_or(i32::MAX))?;
        set(libc::SO_BUSY_POLL_BUDGET, budget.into())?;
    }
    Ok(socket)
}

/// Fills `buffer`. Descriptors that arrive with its bytes are added to `fds`.
fn fill(
    from: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Instant,
    limit: Duration,
) -> Result<(), HelperError> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = match rustix::net::recvmsg(from, &mut [IoSliceMut::new(rest)], &mut control, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN) => {
                wait(from, PollFlags::IN, deadline, limit)?;
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

fn wait(on: BorrowedFd<'_>, events: PollFlags, deadline: Instant, limit: Duration) -> Result<(), HelperError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(HelperError::TimedOut(limit));
    }
    match poll(&mut [PollFd::from_borrowed_fd(on, events)], Timespec::try_from(left).ok().as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(system("waiting for the other side of the helper's socket")(e)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::testing::{in_namespace, ip, with_capabilities};
    use rustix::thread::CapabilitySet;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(60);

    fn programs() -> usize {
        Interface::by_name("v0").unwrap().programs.len()
    }

    /// Proves XSK-4: with a helper's grant, a thread without any capability has sockets, their options and a program
    /// with its map. Nothing stays open afterwards.
    #[test]
    fn a_worker_without_capabilities() {
        in_namespace(|| {
            ip("link add v0 numrxqueues 2 type veth peer name v1");
            let options = HelperOptions {
                queues: vec![0, 1],
                busy_poll: Some((Duration::from_micros(20), 64)),
                ..HelperOptions::default()
            };
            let (ours, theirs) = UnixStream::pair().unwrap();
            Grant::open("v0", &options).unwrap().send(&ours, LONG).unwrap();
            // The descriptors are now only in the message.
            drop(ours);
            assert_eq!(programs(), 1);
            with_capabilities(CapabilitySet::empty(), || {
                let refused = Grant::open("v0", &options).unwrap_err();
                assert!(refused.to_string().contains("an AF_XDP socket needs CAP_NET_RAW"), "{refused}");
                let grant = Grant::receive(&theirs, LONG).unwrap();
                assert_eq!(grant.ifindex, Interface::by_name("v0").unwrap().index);
                assert_eq!((&*grant.name, grant.driver.as_deref(), grant.rx_ring), ("v0", Some("veth"), 0));
                assert_eq!(grant.sockets.iter().map(|(queue, _)| *queue).collect::<Vec<_>>(), [0, 1]);
                let program = grant.program.as_ref().unwrap();
                assert_eq!((program.mode(), program.attached_to()), (Some(AttachMode::Driver), Some(grant.ifindex)));
                // A descriptor of the map is sufficient to change it.
                program.remove(1).unwrap();
                program.insert(1, grant.sockets[1].1.as_fd()).unwrap();
                // It is not sufficient to load another program.
                let refused = program.set_filter(&crate::Filter::default()).unwrap_err();
                assert!(matches!(refused, AttachError::Privilege(_)), "{refused}");
                assert_eq!(programs(), 1);
            });
            assert_eq!(programs(), 0);
        });
    }

    /// Neither the helper nor the worker is trusted: a message that is no grant is refused, and its descriptors are
    /// closed.
    #[test]
    fn what_is_no_grant_is_refused() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let bad = |change: &dyn Fn(&mut Vec<u8>, &mut Vec<OwnedFd>)| {
                let begin = [&MAGIC[..], &VERSION.to_ne_bytes(), &[1, 0, 0, 0], &[0; 4], &[1, 0, 0, 0]].concat();
                let mut bytes = [&begin[..], &[0; HEADER - 24], &[0; 4]].concat();
                let watch = rustix::net::socket(AddressFamily::NETLINK, rustix::net::SocketType::RAW, None).unwrap();
                let mut fds = vec![watch, open_socket(None).unwrap()];
                change(&mut bytes, &mut fds);
                let (ours, theirs) = UnixStream::pair().unwrap();
                let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(200))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
                rustix::net::sendmsg(&ours, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
                drop(ours);
                Grant::receive(&theirs, LONG).map(drop)
            };
            assert!(bad(&|_, _| {}).is_ok());
            let pipe = || std::io::pipe().unwrap().0.into();
            for (change, says) in [
                (
                    &(|bytes: &mut Vec<u8>, _: &mut Vec<OwnedFd>| bytes[0] = 0)
                        as &dyn Fn(&mut Vec<u8>, &mut Vec<OwnedFd>),
                    "version",
                ),
                (&|bytes, _| bytes[8] = 9, "version"),
                (&|bytes, _| bytes[16] = 3, "unknown"),
                (&|bytes, _| bytes[20] = 0, "0 sockets"),
                (&|bytes, _| bytes[23] = 0xff, "sockets: a grant has"),
                (&|bytes, _| bytes[16] = 1, "not as many"),
                (&|bytes, _| bytes.truncate(HEADER + 2), "closed"),
                (&|_, fds| fds.push(pipe()), "not as many"),
                (&|_, fds| fds[0] = pipe(), "no netlink socket"),
                (&|_, fds| fds[1] = pipe(), "no AF_XDP socket"),
                (&|_, fds| fds.extend((0..100).map(|_| pipe())), "too many"),
                (
                    &|bytes, fds| (bytes[16] = 2, fds.insert(0, pipe()), fds.insert(0, pipe())).0,
                    "not that of a map of sockets",
                ),
            ] {
                let error = bad(change).unwrap_err().to_string();
                assert!(error.contains(says), "{says}: {error}");
            }
            let (silent, theirs) = UnixStream::pair().unwrap();
            let error = Grant::receive(&theirs, Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, HelperError::TimedOut(_)), "{error}");
            (&silent).write_all(b"netm").unwrap();
            drop(silent);
            assert!(matches!(Grant::receive(&theirs, LONG), Err(HelperError::Closed)));
        });
    }
}
