//! Front ends: where they come from, which of them is served, and what happens to the others.
//!
//! ```text
//!   main thread: one poll(2) ──────────────── "netmem-vhost" thread
//!     signal            end                     Control::handle(stream)
//!     socket            accept them all    ───> one front end at a time
//!     front end's end   serve the next     <─── eventfd, when it is over
//!     statistics        answer at once
//!     uevent            look whether another process uses the tap
//! ```
//!
//! The main thread never waits for a front end. One front end is served at a time. The device hangs
//! up on each further one at once, so that the front end sees a busy device and not a silent one.
//! There is one exception. If the served front end has hung up and its last messages are still
//! being handled, a new front end is kept and served next. Connections whose other end is already
//! closed are dropped without being served.
//!
//! If descriptors or memory are short, the front end that needed them is dropped, and the shortage
//! is counted.

use super::Running;
use super::report::{self, Events, Left};
use super::socket::{Inherited, Socket, inherited};
use crate::args::{DeviceArgs, PortArg};
use anyhow::Context;
use netmem::device::{DeviceError, Stats};
use netmem::virtio::VhostUserError;
use netmem::virtio::socket::connect;
use netmem_measure::output;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, netlink};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// The most connections that are accepted before the other sources of events are polled again.
const BATCH: usize = 256;
/// If even the spare descriptor did not help to take a connection off the listening socket, the
/// socket is ignored for this time.
const SHORT_PAUSE: Duration = Duration::from_millis(100);
/// The time between two attempts of `--connect`: at first and at most. It doubles while attempts
/// fail, and while the front end hangs up within [`MOST`].
const FIRST: Duration = Duration::from_millis(10);
const MOST: Duration = Duration::from_secs(1);

/// Where front ends come from.
enum Source {
    /// They connect to this socket.
    Listen(Socket),
    /// The device connects to this path. The next attempt is due at `at`; none while a front end is
    /// served.
    Connect { path: PathBuf, at: Option<Instant>, pause: Duration, reported: bool },
    /// One connection, which was inherited.
    Once(Option<UnixStream>),
}

/// The front end that is being served.
struct Current {
    /// A duplicate of its connection: reports whether the other end is closed, and ends the serving
    /// thread's waits.
    hangup: UnixStream,
    since: Instant,
    left: Left,
}

/// See the module.
pub(super) struct Fronts {
    source: Source,
    stats_socket: Option<Socket>,
    /// Reports queues that are added to a tap.
    uevents: Option<Uevents>,
    /// Signals that end the program.
    signal: UnixStream,
    current: Option<Current>,
    /// Served when the current one's end has been noticed.
    next: Option<UnixStream>,
    spare: Spare,
    events: Events,
}

/// The serving thread's ends of the channels: streams to serve, the results of serving them, and an
/// eventfd that signals a result.
pub(super) struct Server {
    streams: Receiver<UnixStream>,
    results: SyncSender<Result<(), DeviceError>>,
}

/// The main thread's ends.
pub(super) struct Line {
    streams: SyncSender<UnixStream>,
    results: Receiver<Result<(), DeviceError>>,
}

/// A pair of channel ends. At most one stream is in the channel, so no send blocks.
pub(super) fn line() -> (Line, Server) {
    let (streams, to_serve) = sync_channel(1);
    let (served, results) = sync_channel(1);
    (Line { streams, results }, Server { streams: to_serve, results: served })
}

/// Wakes the main thread. Signalled when a front end is no longer served, and when another thread
/// ends.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

impl Wake {
    pub(super) fn new() -> anyhow::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("cannot make an eventfd")?;
        Ok(Self(fd))
    }

    pub(super) fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

/// Signals when the thread ends, also in a panic.
pub(super) struct WakeAtEnd<'a>(pub(super) &'a Wake);

impl Drop for WakeAtEnd<'_> {
    fn drop(&mut self) {
        self.0.signal();
    }
}

impl Server {
    /// Serves one front end after another, until the main thread drops its [`Line`].
    pub(super) fn run(self, wake: &Wake, mut handle: impl FnMut(UnixStream) -> Result<(), DeviceError>) {
        let _end = WakeAtEnd(wake);
        for stream in self.streams {
            let result = handle(stream);
            if self.results.send(result).is_err() {
                return;
            }
            wake.signal();
        }
    }
}

impl std::fmt::Display for Fronts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.source {
            Source::Listen(socket) => write!(f, "listening on {socket}"),
            Source::Connect { path, .. } => write!(f, "connecting to {}", path.display()),
            Source::Once(_) => f.write_str("serving an inherited connection"),
        }
    }
}

impl Fronts {
    pub(super) fn open(args: &DeviceArgs, signal: UnixStream) -> anyhow::Result<Self> {
        let source = match (&args.listen, &args.connect, args.fd) {
            (Some(path), ..) => Source::Listen(Socket::listen("--listen", path)?),
            (_, Some(path), _) => {
                Source::Connect { path: path.clone(), at: Some(Instant::now()), pause: FIRST, reported: false }
            }
            (.., Some(fd)) => match inherited(fd)? {
                Inherited::Listening(socket) => Source::Listen(socket),
                Inherited::Connected(stream) => Source::Once(Some(stream)),
            },
            _ => anyhow::bail!("give one of --listen, --connect and --fd"),
        };
        let stats_socket = args.stats.as_ref().map(|path| Socket::listen("--stats", path)).transpose()?;
        let several_taps = matches!(args.port, PortArg::Tap(_)) && args.queues > 1;
        signal.set_nonblocking(true).context("the signals' socket")?;
        Ok(Self {
            source,
            stats_socket,
            uevents: several_taps.then(Uevents::open).flatten(),
            signal,
            current: None,
            next: None,
            spare: Spare::new(),
            events: Events::default(),
        })
    }

    /// Serves front ends until a signal comes, the data side ends, or an inherited connection ends.
    pub(super) fn run(&mut self, line: Line, device: &mut Running<'_>) -> anyhow::Result<()> {
        let result = self.serve(&line, device);
        if let Some(current) = self.current.take() {
            let _ = current.hangup.shutdown(Shutdown::Both);
            // This wait is bounded: the serving thread handles the current message and then finds
            // the end of the connection.
            let _ = line.results.recv();
            self.events.left(&Ok(()), &current.left, device.stats);
        }
        result
    }

    fn serve(&mut self, line: &Line, device: &mut Running<'_>) -> anyhow::Result<()> {
        // Another process may have opened the tap before this process asked for uevents.
        device.look_at_tap();
        while !device.is_over() {
            match line.results.try_recv() {
                Ok(result) => {
                    self.ended(&result, device.stats);
                    if matches!(self.source, Source::Once(_)) {
                        return result.context("the front end");
                    }
                }
                Err(TryRecvError::Empty) => {}
                // The serving thread has ended. Joining it returns its error.
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            self.connect()?;
            if self.current.is_none()
                && let Some(stream) = self.next.take()
            {
                self.begin(stream, line, device.stats)?;
            }
            if self.wait(device)? {
                return Ok(());
            }
            self.accept()?;
            self.answer(device)?;
        }
        Ok(())
    }

    /// The front end's service is over.
    fn ended(&mut self, result: &Result<(), DeviceError>, stats: &Stats) {
        let Some(current) = self.current.take() else { return };
        self.events.left(result, &current.left, stats);
        if let Source::Connect { pause, .. } = &mut self.source
            && current.since.elapsed() > MOST
        {
            *pause = FIRST;
        }
        self.again();
    }

    /// Plans the next attempt of `--connect`.
    fn again(&mut self) {
        if let Source::Connect { at, pause, .. } = &mut self.source {
            *at = Some(Instant::now() + *pause);
            *pause = (*pause * 2).min(MOST);
        }
    }

    /// Hands a front end to the serving thread. If a descriptor for that is missing, the front end
    /// is dropped.
    fn begin(&mut self, stream: UnixStream, line: &Line, stats: &Stats) -> anyhow::Result<()> {
        let hangup = match stream.try_clone() {
            Ok(hangup) => hangup,
            Err(e) if matches!(self.source, Source::Once(_)) => return Err(e).context("duplicating the connection"),
            Err(e) => {
                self.events.short(&e);
                self.again();
                return Ok(());
            }
        };
        // The channel is never full, because the thread has answered for the stream before this
        // one. If the thread has ended, the next read of its answers shows that.
        let _ = line.streams.try_send(stream);
        self.events.served += 1;
        self.current = Some(Current { hangup, since: Instant::now(), left: Left::of(stats) });
        Ok(())
    }

    /// Makes the connection of `--connect` if an attempt is due, and hands out the one of `--fd`.
    fn connect(&mut self) -> anyhow::Result<()> {
        match &mut self.source {
            Source::Once(stream) => self.next = self.next.take().or(stream.take()),
            Source::Connect { path, at, reported, .. } => {
                if at.take_if(|at| *at <= Instant::now()).is_none() {
                    return Ok(());
                }
                match connect(path, Duration::ZERO) {
                    Ok(stream) => {
                        (self.next, *reported) = (Some(stream), false);
                        return Ok(());
                    }
                    Err(VhostUserError::Connect { source, .. }) if is_short(&source) => self.events.short(&source),
                    Err(e) if comes_later(&e) => {
                        if !std::mem::replace(reported, true) {
                            output::Log.line(&format!("waiting for a front end: {e}"));
                        }
                    }
                    Err(e) => return Err(e).context("--connect"),
                }
                self.again();
            }
            Source::Listen(_) => {}
        }
        Ok(())
    }

    /// Sleeps until an event. Returns whether a signal came.
    fn wait(&mut self, device: &mut Running<'_>) -> anyhow::Result<bool> {
        let due = match &self.source {
            Source::Connect { at, .. } => *at,
            _ => None,
        };
        let pause = self.spare.pause();
        let now = Instant::now();
        let times = [due, pause].into_iter().flatten().map(|at| at.saturating_duration_since(now));
        let timeout = times.min();
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        let mut fds = vec![PollFd::new(&self.signal, PollFlags::IN), PollFd::new(&device.wake.0, PollFlags::IN)];
        fds.extend(self.uevents.as_ref().map(|uevents| PollFd::new(&uevents.0, PollFlags::IN)));
        if pause.is_none() {
            if let Source::Listen(socket) = &self.source {
                fds.push(PollFd::new(socket, PollFlags::IN));
            }
            fds.extend(self.stats_socket.as_ref().map(|socket| PollFd::new(socket, PollFlags::IN)));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(io::Error::from(e)).context("waiting for front ends"),
        }
        device.wake.clear();
        let signal = !fds[0].revents().is_empty();
        if let Some(uevents) = &self.uevents {
            uevents.clear();
        }
        device.look_at_tap();
        Ok(signal)
    }

    /// Accepts the waiting connections. Each is served next, or hung up on because the device is
    /// busy, or dropped because its other end is closed.
    fn accept(&mut self) -> anyhow::Result<()> {
        let Source::Listen(socket) = &self.source else { return Ok(()) };
        for _ in 0..BATCH {
            let stream = match self.spare.accept(socket, &mut self.events).context("accepting a front end")? {
                Accepted::Stream(stream) => stream,
                Accepted::Dropped => continue,
                Accepted::Nothing => break,
            };
            if hung_up(&stream) {
                self.events.dead += 1;
                continue;
            }
            self.next.take_if(|next| hung_up(next));
            let ending = self.current.as_ref().is_none_or(|current| hung_up(&current.hangup));
            if ending && self.next.is_none() {
                self.next = Some(stream);
            } else {
                self.events.busy();
            }
        }
        Ok(())
    }

    /// Answers the clients of the statistics socket. The text fits into the send buffer of a
    /// connection: so this does not wait, and keeps no state for a client.
    fn answer(&mut self, device: &Running<'_>) -> anyhow::Result<()> {
        let Some(socket) = &self.stats_socket else { return Ok(()) };
        for _ in 0..BATCH {
            let stream = match self.spare.accept(socket, &mut self.events).context("accepting a client of --stats")? {
                Accepted::Stream(stream) => stream,
                Accepted::Dropped => continue,
                Accepted::Nothing => break,
            };
            report::send(&stream, &device.report(&self.events, self.current.is_some()));
            // If bytes of the client stay unread here, the client gets an error at the end of the
            // connection.
            let _ = rustix::net::recv(&stream, &mut [0u8; 512][..], rustix::net::RecvFlags::DONTWAIT);
        }
        Ok(())
    }
}

/// The kernel's messages about devices of this network namespace. It sends one when a process adds
/// a queue to a tap.
struct Uevents(OwnedFd);

impl Uevents {
    /// `None` if the kernel or a filter refuses. The tap is then checked at other events.
    fn open() -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let uevents = Some(netlink::KOBJECT_UEVENT);
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, uevents).ok()?;
        rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, 1)).ok()?;
        Some(Self(socket))
    }

    /// Discards the waiting messages: at most as many as the socket's buffer holds.
    fn clear(&self) {
        // The buffer is shorter than a message: the rest of the message is discarded with it.
        while rustix::net::recv(&self.0, &mut [0u8; 16][..], RecvFlags::DONTWAIT).is_ok() {}
    }
}

/// A spare descriptor. It is closed for a moment when descriptors are short: a connection can then
/// be taken off the listening socket and closed. If it stayed there, the socket would stay readable
/// and `poll` would not sleep.
struct Spare {
    fd: Option<OwnedFd>,
    /// Until this time listening sockets are ignored, because not even the spare descriptor helped.
    until: Option<Instant>,
}

enum Accepted {
    Stream(UnixStream),
    /// A connection was closed at once, because a descriptor was missing.
    Dropped,
    Nothing,
}

impl Spare {
    fn new() -> Self {
        let fd = File::open("/dev/null").ok().map(OwnedFd::from);
        Self { fd, until: None }
    }

    fn pause(&mut self) -> Option<Instant> {
        self.until = self.until.filter(|until| *until > Instant::now());
        self.until
    }

    fn accept(&mut self, socket: &Socket, events: &mut Events) -> io::Result<Accepted> {
        if self.until.is_some() {
            return Ok(Accepted::Nothing);
        }
        match socket.accept() {
            Ok(None) => Ok(Accepted::Nothing),
            Ok(Some(stream)) => Ok(Accepted::Stream(stream)),
            Err(e) if is_short(&e) => {
                events.short(&e);
                drop(self.fd.take());
                let taken = matches!(socket.accept(), Ok(Some(_)));
                *self = Self::new();
                if taken {
                    return Ok(Accepted::Dropped);
                }
                self.until = Some(Instant::now() + SHORT_PAUSE);
                Ok(Accepted::Nothing)
            }
            Err(e) => Err(e),
        }
    }
}

/// Whether the other end of `stream` is closed. Never waits.
fn hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

/// Whether this process or the system lacks a resource that may be available again later.
fn is_short(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS))
}

/// Whether a connect may succeed later without a change by the user: the front end is not there
/// yet, or its backlog is full.
fn comes_later(e: &VhostUserError) -> bool {
    use ErrorKind::{ConnectionRefused, NotFound};
    match e {
        VhostUserError::Backlog { .. } => true,
        VhostUserError::Connect { source, .. } => matches!(source.kind(), NotFound | ConnectionRefused),
        _ => false,
    }
}
