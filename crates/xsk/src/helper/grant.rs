//! A grant: the sockets and the program that a helper opens, and how they are passed to a worker.

use super::error::{HelperError, system};
use super::options::{HelperOptions, MAX_SOCKETS};
use super::protocol::{self, Connection, DRIVER, Deadline, Incoming, NAME, PRELUDE, REQUEST_LEN};
use crate::device_info::DeviceInfo;
use crate::error::XskError;
use crate::netlink::{AttachMode, Interface};
use crate::options::QueueOptions;
use crate::privileges::Privileges;
use crate::program::{AttachError, Program};
use crate::rx_metadata::RxMetadataReader;
use crate::sys;
use crate::watch::Watch;
use rustix::net::{AddressFamily, sockopt};
use std::error::Error;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// The bytes that the socket of a transmit queue may have in flight in copy mode: more than any
/// ring of frames needs.
const SEND_BUFFER: libc::c_int = 64 << 20;

/// The length of a grant's header: a prelude, the interface, the mode of the program, the number of
/// sockets, the entries of the device's receive ring, the name of its driver, and the name of the
/// interface.
pub(super) const HEADER: usize = PRELUDE + 16 + DRIVER + NAME + 4;

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
    /// Reports to the worker that the interface is gone.
    watch: Arc<Watch>,
    /// The helper, which waits for the sockets to be bound.
    pub(super) helper: Option<Connection>,
    /// The queues whose sockets were taken out, and the numbers of the sockets.
    taken: Vec<(u32, u64)>,
}

impl Grant {
    /// Opens sockets of the interface `name`, and attaches a program with an empty map.
    ///
    /// # Errors
    ///
    /// [`HelperError`], for example a missing privilege. If there is an error, nothing has changed.
    pub fn open(name: &str, options: &HelperOptions) -> Result<Self, HelperError> {
        let (interface, DeviceInfo { driver, ring: rx_ring, .. }) = check_queues(name, options)?;
        Privileges::current().check_socket()?;
        let open = |queue: &u32| Ok((*queue, open_socket(options.busy_poll)?));
        let sockets = options.queues.iter().map(open).collect::<Result<Vec<_>, HelperError>>()?;
        let program = options.program.as_ref().map(|options| Program::attach(interface.index, options)).transpose()?;
        let watch = Arc::new(Watch::new(interface.index).map_err(system("watching for the end of the interface"))?);
        let (ifindex, name) = (interface.index, interface.name);
        Ok(Self { ifindex, name, sockets, program, driver, rx_ring, watch, helper: None, taken: Vec::new() })
    }

    /// Serves one worker at the other end of a Unix stream socket: waits for its request, passes
    /// everything, waits until the worker has bound the sockets, puts them into the program's map,
    /// and keeps nothing. The time limit of the worker is `limit` for each step.
    ///
    /// # Errors
    ///
    /// [`HelperError`]. The sockets are closed, and the program is detached. The worker is sent the
    /// reason.
    pub fn send(self, to: impl AsFd, limit: Duration) -> Result<(), HelperError> {
        let to = to.as_fd();
        let served = || {
            let request = Incoming::<REQUEST_LEN>::new().wait(to, Deadline::new(limit))?;
            check_request(&request, &self.name)?;
            self.offer(to, Some(Deadline::new(limit)))?;
            let bound = Incoming::<PRELUDE>::new().wait(to, Deadline::new(limit))?;
            self.finish(to, &bound)
        };
        served().inspect_err(|error| send_refusal(error, to))?;
        self.pass_on();
        Ok(())
    }

    /// Sends the grant and its descriptors. This process keeps copies of them until the worker has
    /// bound the sockets.
    pub(super) fn offer(&self, to: BorrowedFd<'_>, deadline: Option<Deadline>) -> Result<(), HelperError> {
        let asked = self.sockets.len();
        if !(1..=MAX_SOCKETS).contains(&asked) {
            return Err(HelperError::Sockets { asked });
        }
        let program = self.program.as_ref().and_then(Program::parts);
        let mode = match program {
            None => 0,
            Some((_, AttachMode::Generic, ..)) => 1,
            Some(_) => 2,
        };
        let frags = program.is_some_and(|(_, _, frags, _)| frags);
        let metadata = program.and_then(|(.., metadata)| metadata);
        let mut bytes = [protocol::prelude(protocol::GRANT), self.ifindex.to_ne_bytes().to_vec()].concat();
        bytes.extend([mode, frags.into(), metadata.is_some().into(), 0]);
        bytes.extend((asked as u32).to_ne_bytes());
        bytes.extend(self.rx_ring.to_ne_bytes());
        bytes.extend(protocol::padded::<DRIVER>(self.driver.as_deref().unwrap_or_default()));
        bytes.extend(protocol::padded::<NAME>(&self.name));
        bytes.extend(metadata.map_or(0, |reader| reader.number()).to_ne_bytes());
        self.sockets.iter().for_each(|(queue, _)| bytes.extend(queue.to_ne_bytes()));
        let mut fds: Vec<BorrowedFd<'_>> = program.into_iter().flat_map(|(fds, ..)| fds).collect();
        fds.push(self.watch.as_fd());
        fds.extend(self.sockets.iter().map(|(_, socket)| socket.as_fd()));
        protocol::send(to, &bytes, &fds, deadline)
    }

    /// Inserts the sockets into the map of the program, because the worker reports that they are
    /// bound, and acknowledges that.
    pub(super) fn finish(&self, worker: BorrowedFd<'_>, bound: &[u8; PRELUDE]) -> Result<(), HelperError> {
        if protocol::kind(bound)? != protocol::BOUND {
            return Err(HelperError::Malformed("the worker does not say that its sockets are bound"));
        }
        if let Some(program) = &self.program {
            self.sockets.iter().try_for_each(|(queue, socket)| program.insert(*queue, socket.as_fd()))?;
        }
        protocol::send(worker, &protocol::prelude(protocol::DONE), &[], None)
    }

    /// Drops this process's descriptors. The program stays: the worker has it.
    pub(super) fn pass_on(self) {
        if let Some(program) = self.program {
            program.pass_on();
        }
    }

    /// Asks a helper for a grant, over a connected Unix stream socket, and receives it. Needs no
    /// privilege. The time limit of the helper is `limit` for each answer.
    ///
    /// [`Xsk::open`](crate::Xsk::open) binds the sockets and reports it to the helper. A worker
    /// that opens the queues by itself calls [`take`](Self::take) for each, and then
    /// [`bound`](Self::bound).
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
    pub(super) fn answer(from: BorrowedFd<'_>, limit: Duration, deadline: Deadline) -> Result<Self, HelperError> {
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
            (Some(mode), Some(link), Some(map)) => {
                let number = word(16 + DRIVER + NAME);
                let metadata = (header[6] != 0).then(|| RxMetadataReader::of_program(number));
                Some(Program::from_parts([link, map], mode, header[5] != 0, metadata)?)
            }
            _ => None,
        };
        let (driver, name) = header[16..16 + DRIVER + NAME].split_at(DRIVER);
        let driver = Some(protocol::text(driver)).filter(|driver| !driver.is_empty());
        Ok(Self {
            ifindex,
            name: protocol::text(name),
            sockets: queues.zip(sockets).collect(),
            program,
            driver,
            rx_ring: word(12),
            watch: Arc::new(watch),
            helper: Some(Connection::new(from, limit)?),
            taken: Vec::new(),
        })
    }

    /// Takes the socket of a queue out of the grant: `options` for
    /// [`Umem::open`](crate::Umem::open) or [`Umem::open_tx`](crate::Umem::open_tx) of
    /// [`ifindex`](Self::ifindex) with this socket, and with the properties of the device that the
    /// helper has sent. When all queues are open, call [`bound`](Self::bound).
    /// [`Xsk::open`](crate::Xsk::open) does both, with memory of its own.
    ///
    /// Warning: the helper puts all sockets into the map of its [program](Self::program), also
    /// those that are not bound or only send. The kernel drops the frames for these. So
    /// [sockets](Self::sockets) that are not taken are dropped before `bound` is called, and queues
    /// that only send are those of a helper without a program.
    ///
    /// # Errors
    ///
    /// [`XskError::NotGranted`].
    pub fn take(&mut self, queue: u32, options: QueueOptions) -> Result<QueueOptions, XskError> {
        let Some(at) = self.sockets.iter().position(|(number, _)| *number == queue) else {
            return Err(XskError::NotGranted { interface: self.name.clone(), queue });
        };
        let (_, socket) = self.sockets.remove(at);
        if let Ok(cookie) = sys::cookie(socket.as_fd()) {
            self.taken.push((queue, cookie));
        }
        let mut options = options.socket(socket);
        let (name, driver) = (Some(self.name.clone()), self.driver.clone());
        options.device = Some(DeviceInfo { name, driver, ring: self.rx_ring, ..DeviceInfo::default() });
        options.watch = Some(self.watch.clone());
        Ok(options)
    }

    /// Whether a helper waits for the sockets to be bound.
    pub(crate) fn has_helper(&self) -> bool {
        self.helper.is_some()
    }

    /// Reports to the helper that all sockets are bound, and waits until they are in the program's
    /// map. Does nothing if there is no helper, or if it was reported before.
    /// [`Xsk::open`](crate::Xsk::open) calls this.
    ///
    /// # Errors
    ///
    /// [`HelperError`]: [`HelperError::Refused`] if the helper has waited for too long, and has
    /// detached the program.
    pub fn bound(&mut self) -> Result<(), HelperError> {
        let Some(helper) = self.helper.take() else { return Ok(()) };
        helper.bound()?;
        if let Some(program) = &self.program {
            self.taken.drain(..).for_each(|(queue, cookie)| program.has(queue, cookie));
        }
        Ok(())
    }
}

/// The interface, if it has the queues that are asked for.
pub(super) fn check_queues(name: &str, options: &HelperOptions) -> Result<(Interface, DeviceInfo), HelperError> {
    let asked = options.queues.len();
    if !(1..=MAX_SOCKETS).contains(&asked) {
        return Err(HelperError::Sockets { asked });
    }
    let interface = Interface::by_name(name).map_err(|source| match source.raw_os_error() {
        Some(libc::ENODEV) => AttachError::NoInterface(name.to_owned()).into(),
        _ => HelperError::System { what: "looking at the interface", source },
    })?;
    let device = DeviceInfo::of(name.to_owned());
    let (rx, tx) = device.queues.unwrap_or((interface.rx_queues, interface.tx_queues));
    // Only receive queues have frames for the program.
    let has = if options.program.is_some() { rx } else { rx.max(tx) };
    match options.queues.iter().find(|queue| **queue >= has) {
        Some(&queue) => Err(HelperError::Queue { interface: interface.name, queue, asked, has }),
        None => Ok((interface, device)),
    }
}

/// Checks a worker's request: its version, and its interface if it names one.
pub(super) fn check_request(request: &[u8; REQUEST_LEN], has: &str) -> Result<(), HelperError> {
    match protocol::requested(request)? {
        asked if asked.is_empty() || asked == has => Ok(()),
        asked => Err(HelperError::Interface { asked, has: has.to_owned() }),
    }
}

pub(super) fn open_socket(busy_poll: Option<(Duration, u16)>) -> Result<OwnedFd, HelperError> {
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

/// Sends a worker the reason why it gets nothing.
pub(super) fn send_refusal(error: &HelperError, worker: BorrowedFd<'_>) {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(source) = cause {
        text.push_str(&format!(": {source}"));
        cause = source.source();
    }
    protocol::refuse(worker, error.refusal(), &text);
}
