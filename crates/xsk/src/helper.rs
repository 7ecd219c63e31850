//! A privileged helper that opens sockets for an unprivileged worker.
//!
//! ```text
//!   helper: CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF             worker: no capability
//!                       ◄─────────────── request ────────── Grant::receive
//!   Grant::open    sockets, their options,
//!                  program, link, map
//!   Grant::send ──────── descriptors (SCM_RIGHTS) ────────► registers memory, makes rings, binds
//!                       ◄──────── sockets are bound ─────── Grant::bound, which Xsk::open calls
//!   puts the sockets into the map ─────── done ───────────► moves frames
//!   and it has no descriptor any more
//! ```
//!
//! The kernel drops frames that the program redirects to a socket that is not bound. So a socket is
//! put into the map when the worker has bound it; until then the kernel's network stack has the
//! frames. If the worker ends before, or takes too long, the helper detaches the program.
//!
//! The worker then holds the only descriptors: when the worker ends, the program is detached from
//! the interface. The helper can end before. The worker may be another user, in a container with
//! another network namespace: a socket stays in the namespace in which it was opened.
//!
//! The worker can bind each socket to *any* interface and queue of that namespace, and send any
//! frame there. If workers must not be able to do this, the helper opens its sockets in a namespace
//! that has only one interface.
//!
//! [`Server`] listens on a path, and serves workers one after another, whatever they do.
//! [`Grant::send`] is for one worker at a connected socket.

mod listener;
mod names;
mod protocol;
mod server;

use crate::device::Device;
use crate::netlink::{AttachMode, Interface};
use crate::privileges::{MissingPrivilege, Privileges};
use crate::program::{AttachError, Program, ProgramOptions};
use crate::sys;
use crate::watch::Watch;
pub(crate) use protocol::Connection;
use protocol::{DRIVER, Deadline, Incoming, NAME, PRELUDE, REQUEST_LEN};
use rustix::net::{AddressFamily, sockopt};
pub use server::{Event, Peer, Server, ServerOptions, ServerStats};
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// The largest number of sockets of a grant.
pub const MAX_SOCKETS: usize = 64;

/// The bytes that the socket of a transmit queue may have in flight in copy mode: more than any
/// ring of frames needs.
const SEND_BUFFER: libc::c_int = 64 << 20;

/// The length of a grant's header: a prelude, the interface, the mode of the program, the number of
/// sockets, the entries of the device's receive ring, the name of its driver, and the name of the
/// interface.
const HEADER: usize = PRELUDE + 16 + DRIVER + NAME;

/// The options of a helper.
#[derive(Clone, Debug)]
pub struct HelperOptions {
    /// The receive queues. A socket is opened for each.
    pub queues: Vec<u32>,
    /// The program. `None`: the worker only sends, or the user has a program of their own.
    pub program: Option<ProgramOptions>,
    /// Busy polling by the worker (`SO_PREFER_BUSY_POLL`): how long to poll, and how many frames at
    /// a time.
    pub busy_poll: Option<(Duration, u16)>,
}

impl Default for HelperOptions {
    fn default() -> Self {
        Self { queues: vec![0], program: Some(ProgramOptions::default()), busy_poll: None }
    }
}

/// Why a helper refuses a worker. The text of [`HelperError::Refused`] has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// No queue is free: another worker has them, or another program is attached to the interface.
    Busy,
    /// The worker's user may not have queues.
    User,
    /// The worker has asked for another interface, or the interface is gone.
    Interface,
    /// The worker is of another version of the protocol, or sent no request.
    Version,
    /// The worker took too long, or too many others came after it.
    Late,
    /// The helper could not open what the worker needs.
    Failed,
}

impl Refusal {
    const ALL: [Self; 6] = [Self::Busy, Self::User, Self::Interface, Self::Version, Self::Late, Self::Failed];

    /// Its number in a message.
    fn code(self) -> u32 {
        Self::ALL.iter().position(|refusal| *refusal == self).map_or(u32::MAX, |at| at as u32)
    }

    /// The refusal of this number. A number of a later version is [`Failed`](Self::Failed).
    fn of(code: u32) -> Self {
        Self::ALL.get(code as usize).copied().unwrap_or(Self::Failed)
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
    /// The interface has fewer queues.
    #[error(
        "interface {interface} has {has} queue(s), with numbers from 0: there is no queue {queue}, which is one of the {asked} that \
         were asked for"
    )]
    Queue {
        /// The name of the interface.
        interface: String,
        /// The number of the queue that it does not have.
        queue: u32,
        /// How many queues were asked for.
        asked: usize,
        /// How many queues it has in use.
        has: u32,
    },
    /// The process at the other end did not send, or did not read, in time.
    #[error("the other side of the helper's socket took more than {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The process at the other end has closed the connection.
    #[error("the other side of the helper's socket has closed it")]
    Closed,
    /// A received message is not one of the protocol, or not the expected one.
    #[error("what came over the helper's socket is refused: {0}")]
    Malformed(&'static str),
    /// The process at the other end has another version of the protocol.
    #[error("the other side of the helper's socket has version {theirs} of the protocol, and this process {ours}")]
    Version {
        /// The other side's version.
        theirs: u32,
        /// This crate's version.
        ours: u32,
    },
    /// The helper has refused the worker, or has given its queues up.
    #[error("the helper refuses: {text}")]
    Refused {
        /// The kind of the reason.
        why: Refusal,
        /// The helper's words. At most 1024 bytes, without control characters.
        text: String,
    },
    /// The worker has asked for another interface.
    #[error("the worker asks for interface {asked}, and this helper has {has}")]
    Interface {
        /// The interface that the worker has asked for.
        asked: String,
        /// The interface of the helper.
        has: String,
    },
    /// The worker's user may not have queues.
    #[error("user {user} may not have queues of this helper")]
    User {
        /// The number of the user.
        user: u32,
    },
    /// So many workers wait for queues that an older one had to go.
    #[error("more than {0} workers wait for queues")]
    TooMany(usize),
    /// There is no user of this name, and it is no number.
    #[error("there is no user {0:?}")]
    NoUser(String),
    /// There is no group of this name, and it is no number.
    #[error("there is no group {0:?}")]
    NoGroup(String),
    /// The path cannot be listened on.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The path.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The path is in use. It is left as it is.
    #[error("{}: {what}", path.display())]
    Occupied {
        /// The path.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
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

impl HelperError {
    /// The kind of refusal for a worker that gets nothing because of this error.
    fn refusal(&self) -> Refusal {
        match self {
            Self::Attach(AttachError::Occupied { .. }) => Refusal::Busy,
            Self::Attach(AttachError::NoInterface(_)) | Self::Interface { .. } => Refusal::Interface,
            Self::Version { .. } | Self::Malformed(_) => Refusal::Version,
            Self::TimedOut(_) | Self::TooMany(_) => Refusal::Late,
            Self::User { .. } => Refusal::User,
            _ => Refusal::Failed,
        }
    }

    /// Tells a worker why it gets nothing.
    fn tell(&self, worker: BorrowedFd<'_>) {
        let (mut text, mut cause) = (self.to_string(), self.source());
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        protocol::refuse(worker, self.refusal(), &text);
    }
}

fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> HelperError {
    move |source| HelperError::System { what, source: source.into() }
}

/// AF_XDP sockets of an interface that were opened and not bound, and the program that redirects
/// frames to them.
#[derive(Debug)]
#[non_exhaustive]
pub struct Grant {
    /// The index of the interface, in the network namespace of the sockets.
    pub ifindex: u32,
    /// The name of the interface there.
    pub name: String,
    /// The sockets, each with its queue.
    pub sockets: Vec<(u32, OwnedFd)>,
    /// The program. Its map has no socket until they are bound. It is detached when the last
    /// descriptor of its link is closed.
    pub program: Option<Program>,
    /// The driver of the interface, for its [quirks](crate::quirks). `None`: it is unknown. The
    /// worker may be in a network namespace in which it cannot read it.
    pub driver: Option<String>,
    /// Entries of the receive ring of the device. The worker's fill level must be above this. 0: it
    /// is unknown.
    pub rx_ring: u32,
    /// Tells the worker that the interface is gone.
    pub(crate) watch: Watch,
    /// The helper, which waits for the sockets to be bound.
    pub(crate) helper: Option<Connection>,
}

impl Grant {
    /// Opens sockets of the interface `name`, and attaches a program with an empty map.
    ///
    /// # Errors
    ///
    /// [`HelperError`], for example a missing privilege. If there is an error, nothing has changed.
    pub fn open(name: &str, options: &HelperOptions) -> Result<Self, HelperError> {
        let (interface, Device { driver, ring: rx_ring, .. }) = check_queues(name, options)?;
        Privileges::current().check_socket()?;
        let open = |queue: &u32| Ok((*queue, open_socket(options.busy_poll)?));
        let sockets = options.queues.iter().map(open).collect::<Result<Vec<_>, HelperError>>()?;
        let program = options.program.as_ref().map(|options| Program::attach(interface.index, options)).transpose()?;
        let watch = Watch::new(interface.index).map_err(system("watching for the end of the interface"))?;
        let (ifindex, name) = (interface.index, interface.name);
        Ok(Self { ifindex, name, sockets, program, driver, rx_ring, watch, helper: None })
    }

    /// Serves one worker at the other end of a Unix stream socket: waits for its request, passes
    /// everything, waits until the worker has bound the sockets, puts them into the program's map,
    /// and keeps nothing. The worker may take `limit` for each step.
    ///
    /// # Errors
    ///
    /// [`HelperError`]. The sockets are closed, and the program is detached. The worker is told
    /// why.
    pub fn send(self, to: impl AsFd, limit: Duration) -> Result<(), HelperError> {
        let to = to.as_fd();
        let served = || {
            let request = Incoming::<REQUEST_LEN>::new().wait(to, Deadline::new(limit))?;
            check_request(&request, &self.name)?;
            self.offer(to, Some(Deadline::new(limit)))?;
            let bound = Incoming::<PRELUDE>::new().wait(to, Deadline::new(limit))?;
            self.finish(to, &bound)
        };
        served().inspect_err(|error| error.tell(to))?;
        self.pass_on();
        Ok(())
    }

    /// Sends the grant and its descriptors. This process keeps copies of them until the worker has
    /// bound the sockets.
    fn offer(&self, to: BorrowedFd<'_>, deadline: Option<Deadline>) -> Result<(), HelperError> {
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
        let mut bytes = [protocol::prelude(protocol::GRANT), self.ifindex.to_ne_bytes().to_vec()].concat();
        bytes.extend([mode, frags.into(), 0, 0]);
        bytes.extend((asked as u32).to_ne_bytes());
        bytes.extend(self.rx_ring.to_ne_bytes());
        bytes.extend(protocol::padded::<DRIVER>(self.driver.as_deref().unwrap_or_default()));
        bytes.extend(protocol::padded::<NAME>(&self.name));
        self.sockets.iter().for_each(|(queue, _)| bytes.extend(queue.to_ne_bytes()));
        let mut fds: Vec<BorrowedFd<'_>> = program.into_iter().flat_map(|(fds, ..)| fds).collect();
        fds.push(self.watch.as_fd());
        fds.extend(self.sockets.iter().map(|(_, socket)| socket.as_fd()));
        protocol::send(to, &bytes, &fds, deadline)
    }

    /// Puts the sockets into the map of the program, because the worker says that they are bound,
    /// and tells the worker.
    fn finish(&self, worker: BorrowedFd<'_>, bound: &[u8; PRELUDE]) -> Result<(), HelperError> {
        if protocol::kind(bound)? != protocol::BOUND {
            return Err(HelperError::Malformed("the worker does not say that its sockets are bound"));
        }
        if let Some(program) = &self.program {
            self.sockets.iter().try_for_each(|(queue, socket)| program.insert(*queue, socket.as_fd()))?;
        }
        protocol::send(worker, &protocol::prelude(protocol::DONE), &[], None)
    }

    /// Drops this process's descriptors. The program stays: the worker has it.
    fn pass_on(self) {
        if let Some(program) = self.program {
            program.pass_on();
        }
    }

    /// Asks a helper for a grant, over a connected Unix stream socket, and receives it. Needs no
    /// privilege. The helper may take `limit` for each answer.
    ///
    /// [`Xsk::open`](crate::Xsk::open) binds the sockets and reports it to the helper. A worker
    /// that binds them by itself calls [`bound`](Self::bound).
    ///
    /// # Errors
    ///
    /// [`HelperError`]: [`HelperError::Refused`] has the helper's reason. Received descriptors are
    /// closed.
    pub fn receive(from: impl AsFd, limit: Duration) -> Result<Self, HelperError> {
        Self::request(from.as_fd(), None, limit)
    }

    /// Like [`receive`](Self::receive), from a helper that must have the interface `name`: a helper
    /// of another interface refuses.
    ///
    /// # Errors
    ///
    /// The errors of [`receive`](Self::receive).
    pub fn receive_interface(name: &str, from: impl AsFd, limit: Duration) -> Result<Self, HelperError> {
        Self::request(from.as_fd(), Some(name), limit)
    }

    fn request(from: BorrowedFd<'_>, interface: Option<&str>, limit: Duration) -> Result<Self, HelperError> {
        let deadline = Deadline::new(limit);
        match protocol::send(from, &protocol::request(interface), &[], Some(deadline)) {
            // A helper that refuses this user has sent the reason, and has closed its end.
            Ok(()) | Err(HelperError::Closed) => {}
            Err(error) => return Err(error),
        }
        Self::answer(from, limit, deadline)
    }

    /// Receives the answer to a request.
    fn answer(from: BorrowedFd<'_>, limit: Duration, deadline: Deadline) -> Result<Self, HelperError> {
        let mut fds = Vec::new();
        let mut prelude = [0; PRELUDE];
        protocol::fill(from, &mut prelude, &mut fds, deadline)?;
        match protocol::kind(&prelude)? {
            protocol::GRANT => {}
            protocol::REFUSAL => return Err(protocol::refused(from, deadline)),
            _ => return Err(HelperError::Malformed("it is neither a grant nor a refusal")),
        }
        let mut header = [0; HEADER - PRELUDE];
        protocol::fill(from, &mut header, &mut fds, deadline)?;
        let word = |at: usize| protocol::word(&header, at);
        let (ifindex, count) = (word(0), word(8) as usize);
        if !(1..=MAX_SOCKETS).contains(&count) {
            return Err(HelperError::Sockets { asked: count });
        }
        let mode = match header[4] {
            0 => None,
            1 => Some(AttachMode::Generic),
            2 => Some(AttachMode::Driver),
            _ => return Err(HelperError::Malformed("the program is attached in a mode that is unknown")),
        };
        let mut queues = vec![0; 4 * count];
        protocol::fill(from, &mut queues, &mut fds, deadline)?;
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
            (Some(mode), Some(link), Some(map)) => Some(Program::from_parts(link, map, mode, header[5] != 0)?),
            _ => None,
        };
        let (driver, name) = header[16..].split_at(DRIVER);
        let driver = Some(protocol::text(driver)).filter(|driver| !driver.is_empty());
        Ok(Self {
            ifindex,
            name: protocol::text(name),
            sockets: queues.zip(sockets).collect(),
            program,
            driver,
            rx_ring: word(12),
            watch,
            helper: Some(Connection::new(from, limit)?),
        })
    }

    /// Tells the helper that all sockets are bound, and waits until they are in the program's map.
    /// Does nothing if there is no helper, or if it was told before.
    /// [`Xsk::open`](crate::Xsk::open) calls this.
    ///
    /// # Errors
    ///
    /// [`HelperError`]: [`HelperError::Refused`] if the helper has waited for too long, and has
    /// detached the program.
    pub fn bound(&mut self) -> Result<(), HelperError> {
        self.helper.take().map_or(Ok(()), Connection::bound)
    }
}

/// The interface, if it has the queues that are asked for.
fn check_queues(name: &str, options: &HelperOptions) -> Result<(Interface, Device), HelperError> {
    let asked = options.queues.len();
    if !(1..=MAX_SOCKETS).contains(&asked) {
        return Err(HelperError::Sockets { asked });
    }
    let interface = Interface::by_name(name).map_err(|source| match source.raw_os_error() {
        Some(libc::ENODEV) => AttachError::NoInterface(name.to_owned()).into(),
        _ => HelperError::System { what: "looking at the interface", source },
    })?;
    let device = Device::of(name.to_owned());
    let (rx, tx) = device.queues.unwrap_or((interface.rx_queues, interface.tx_queues));
    // Only receive queues have frames for the program.
    let has = if options.program.is_some() { rx } else { rx.max(tx) };
    match options.queues.iter().find(|queue| **queue >= has) {
        Some(&queue) => Err(HelperError::Queue { interface: interface.name, queue, asked, has }),
        None => Ok((interface, device)),
    }
}

/// Checks a worker's request: its version, and its interface if it names one.
fn check_request(request: &[u8; REQUEST_LEN], has: &str) -> Result<(), HelperError> {
    match protocol::requested(request)? {
        asked if asked.is_empty() || asked == has => Ok(()),
        asked => Err(HelperError::Interface { asked, has: has.to_owned() }),
    }
}

fn open_socket(busy_poll: Option<(Duration, u16)>) -> Result<OwnedFd, HelperError> {
    let socket = sys::socket().map_err(system("opening an AF_XDP socket"))?;
    let set = |option, value: libc::c_int| {
        sys::set(socket.as_fd(), libc::SOL_SOCKET, option, &value)
            .map_err(system("setting an option of an AF_XDP socket"))
    };
    // This needs CAP_NET_ADMIN. Without it, the send buffer is smaller, and the worker has fewer
    // frames in flight in copy mode.
    let _ = set(libc::SO_SNDBUFFORCE, SEND_BUFFER);
    if let Some((time, budget)) = busy_poll {
        set(libc::SO_PREFER_BUSY_POLL, 1)?;
        set(libc::SO_BUSY_POLL, i32::try_from(time.as_micros()).unwrap_or(i32::MAX))?;
        set(libc::SO_BUSY_POLL_BUDGET, budget.into())?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::testing::{in_namespace, ip, with_capabilities};
    use rustix::cmsg_space;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use rustix::thread::CapabilitySet;
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(60);

    fn programs() -> usize {
        Interface::by_name("v0").unwrap().programs.len()
    }

    /// Proves XSK-4: with a helper's grant, a thread without any capability has sockets, their
    /// options and a program with its map. Nothing stays open afterwards.
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
            let grant = Grant::open("v0", &options).unwrap();
            assert_eq!(programs(), 1);
            let helper = std::thread::spawn(move || grant.send(ours, LONG));
            with_capabilities(CapabilitySet::empty(), || {
                let refused = Grant::open("v0", &options).unwrap_err();
                assert!(refused.to_string().contains("an AF_XDP socket needs CAP_NET_RAW"), "{refused}");
                let mut grant = Grant::receive(&theirs, LONG).unwrap();
                grant.bound().unwrap();
                // The helper has no descriptor any more.
                helper.join().unwrap().unwrap();
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

    /// Neither the helper nor the worker is trusted: a message that is no grant is refused, and its
    /// descriptors are closed.
    #[test]
    fn what_is_no_grant_is_refused() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let bad = |change: &dyn Fn(&mut Vec<u8>, &mut Vec<OwnedFd>)| {
                let begin = [&protocol::prelude(protocol::GRANT)[..], &[1, 0, 0, 0], &[0; 4], &[1, 0, 0, 0]].concat();
                let mut bytes = [&begin[..], &[0; HEADER - 28], &[0; 4]].concat();
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
                    "does not begin as a message",
                ),
                (&|bytes, _| bytes[8] = 9, "has version 9 of the protocol, and this process 4"),
                (&|bytes, _| bytes[12] = 9, "neither a grant nor a refusal"),
                (&|bytes, _| bytes[20] = 3, "unknown"),
                (&|bytes, _| bytes[24] = 0, "0 sockets"),
                (&|bytes, _| bytes[27] = 0xff, "sockets: a grant has"),
                (&|bytes, _| bytes[20] = 1, "not as many"),
                (&|bytes, _| bytes.truncate(HEADER + 2), "closed"),
                (&|_, fds| fds.push(pipe()), "not as many"),
                (&|_, fds| fds[0] = pipe(), "no netlink socket"),
                (&|_, fds| fds[1] = pipe(), "no AF_XDP socket"),
                (&|_, fds| fds.extend((0..100).map(|_| pipe())), "too many"),
                (
                    &|bytes, fds| (bytes[20] = 2, fds.insert(0, pipe()), fds.insert(0, pipe())).0,
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

    /// The error of a worker that is refused by a helper of `v0`. The worker has sent `request`.
    fn refusal(request: &[u8]) -> String {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(request).unwrap();
        let helper = Grant::open("v0", &HelperOptions::default()).unwrap().send(ours, LONG).unwrap_err();
        let error = Grant::receive(&theirs, LONG).unwrap_err().to_string();
        assert!(error.contains(&helper.to_string()), "{error}: {helper}");
        error
    }

    /// A worker that is refused has the helper's reason in its error.
    #[test]
    fn a_worker_is_told_why_it_is_refused() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let wrong = refusal(&protocol::request(Some("v1")));
            assert_eq!(wrong, "the helper refuses: the worker asks for interface v1, and this helper has v0");
            let mut newer = protocol::request(None);
            newer[8] = 9;
            let newer = refusal(&newer);
            assert!(newer.contains("has version 9 of the protocol, and this process 4"), "{newer}");
            let other = refusal(&[b'x'; REQUEST_LEN]);
            assert!(other.contains("does not begin as a message of a helper"), "{other}");
            assert_eq!(programs(), 0);
            // The text of a helper that lies: it is cut, and no terminal takes it for commands.
            let (ours, theirs) = UnixStream::pair().unwrap();
            protocol::refuse(ours.as_fd(), Refusal::Busy, &format!("\u{1b}[2J{}", "\u{fc}".repeat(5000)));
            let error = Grant::receive(&theirs, LONG).unwrap_err();
            let HelperError::Refused { why: Refusal::Busy, text } = error else { panic!("{error}") };
            assert!(text.starts_with(" [2J\u{fc}") && (1000..=1024).contains(&text.len()), "{text:?}");
        });
    }

    /// More queues than the interface has are an error before anything is opened.
    #[test]
    fn queues_that_the_interface_does_not_have() {
        in_namespace(|| {
            ip("link add v0 numrxqueues 2 numtxqueues 3 type veth peer name v1 numrxqueues 3");
            let of = |queues, program| HelperOptions { queues, program, ..HelperOptions::default() };
            let all = || Some(ProgramOptions::default());
            let error = Grant::open("v0", &of(vec![0, 1, 2], all())).unwrap_err();
            let says = "interface v0 has 2 queue(s), with numbers from 0: there is no queue 2, which is one of the 3 that were \
                        asked for";
            assert_eq!(error.to_string(), says);
            assert_eq!(programs(), 0);
            Grant::open("v0", &of(vec![1], all())).unwrap();
            // A program is of no use for queues that only send.
            Grant::open("v0", &of(vec![2], None)).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            let error = Server::bind(&path, "v0", of(vec![2], all()), ServerOptions::new()).unwrap_err();
            assert!(matches!(error, HelperError::Queue { queue: 2, asked: 1, has: 2, .. }), "{error}");
            assert!(!path.exists());
        });
    }

    /// A worker that ends, or that takes too long, before its sockets are bound leaves no program,
    /// although it has the descriptors. It is told why.
    #[test]
    fn a_worker_that_does_not_bind_loses_the_program() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let serve = |limit: Duration| {
                let (ours, theirs) = UnixStream::pair().unwrap();
                let grant = Grant::open("v0", &HelperOptions::default()).unwrap();
                (std::thread::spawn(move || grant.send(ours, limit)), theirs)
            };
            let (helper, theirs) = serve(LONG);
            let Grant { helper: connection, sockets, program, .. } = Grant::receive(&theirs, LONG).unwrap();
            drop((connection, theirs));
            assert!(matches!(helper.join().unwrap(), Err(HelperError::Closed)));
            assert_eq!((programs(), sockets.len(), program.unwrap().attached_to()), (0, 1, None));

            let (helper, theirs) = serve(Duration::from_millis(50));
            let received = Grant::receive(&theirs, LONG);
            assert!(matches!(helper.join().unwrap(), Err(HelperError::TimedOut(_))));
            assert_eq!(programs(), 0);
            // Unless the machine was so slow that it was refused at once.
            let refused = received.and_then(|mut grant| grant.bound()).unwrap_err();
            assert!(matches!(&refused, HelperError::Refused { why: Refusal::Late, .. }), "{refused}");
        });
    }
}
