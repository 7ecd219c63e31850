//! A helper for any number of workers, which ask at the path of a Unix socket.
//!
//! ```text
//!   connected ──► asks ──► waits ──► has the descriptors ──► bound, and forgotten
//!       │           │        │               │
//!       └───────────┴────────┴───────────────┴──► refused, ended, or late: closed
//! ```
//!
//! One thread serves all workers, and waits for none of them: each connection is a state, and has a
//! time limit while the helper waits for the worker. A worker that asks while another one has the
//! descriptors and has not bound waits until that is decided, because the queues may become free.

use super::error::{HelperError, system};
use super::grant::{Grant, check_queues, check_request, send_refusal};
use super::listener::Listener;
use super::names;
use super::options::HelperOptions;
use super::protocol::{Incoming, PRELUDE, REQUEST_LEN};
use crate::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Connections that are accepted before the other workers are served again.
const ACCEPT_BATCH: usize = 64;

/// The options of a [`Server`]. Start with [`ServerOptions::new`].
#[derive(Clone, Debug)]
pub struct ServerOptions {
    limit: Duration,
    pending: usize,
    pause: Duration,
    mode: Option<u32>,
    group: Option<u32>,
    users: Option<Vec<u32>>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl ServerOptions {
    /// The defaults: a limit of 10 s for each step of a worker, 64 pending workers, a pause of 0.1
    /// s, the mode that the umask leaves, the group of this process, and every user who may
    /// connect.
    #[must_use]
    pub fn new() -> Self {
        let (limit, pause) = (Duration::from_secs(10), Duration::from_millis(100));
        Self { limit, pending: 64, pause, mode: None, group: None, users: None }
    }

    /// The time limit of a worker to send its request, and then to receive the descriptors,
    /// register its memory and bind its sockets. A worker that exceeds it loses its connection and
    /// the program.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// The largest number of workers that have no descriptors yet; at least 1. If there are more,
    /// the oldest is refused, first of those that have not asked.
    #[must_use]
    pub fn pending(mut self, workers: usize) -> Self {
        self.pending = workers.max(1);
        self
    }

    /// How long no connection is accepted after the system could not accept one, for instance
    /// because this process has too many descriptors.
    #[must_use]
    pub fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    /// The permissions of the socket's path, such as `0o660`. Write permission is needed to
    /// connect.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = Some(mode & 0o777);
        self
    }

    /// The group of the socket's path: a name or a number.
    ///
    /// # Errors
    ///
    /// [`HelperError::NoGroup`].
    pub fn group(mut self, group: &str) -> Result<Self, HelperError> {
        self.group = Some(names::group(group)?);
        Ok(self)
    }

    /// Allows a user, by name or number, to have queues. Root always may. Users that are not
    /// allowed are refused. If no user is allowed by this option, each process that may connect
    /// gets queues.
    ///
    /// # Errors
    ///
    /// [`HelperError::NoUser`].
    pub fn user(mut self, user: &str) -> Result<Self, HelperError> {
        self.users.get_or_insert_default().push(names::user(user)?);
        Ok(self)
    }

    fn check_user(&self, user: u32) -> Result<(), HelperError> {
        match &self.users {
            Some(users) if user != 0 && !users.contains(&user) => Err(HelperError::User { user }),
            _ => Ok(()),
        }
    }
}

/// A process at the other end of a connection, as it was when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Its process id in the PID namespace of this process. `None`: it has none there.
    pub pid: Option<u32>,
    /// Its effective user.
    pub user: u32,
}

/// What has happened at a [`Server`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A worker has bound its sockets, and gets frames.
    Granted(Peer),
    /// A worker has got nothing, or has lost what it had before its sockets were bound.
    Refused(Peer, &'a HelperError),
    /// No connection can be accepted. This is reported once until one is accepted again.
    NotAccepting(&'a io::Error),
}

/// Counts of a [`Server`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerStats {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Grants that were opened: the sockets and the program.
    pub opened: u64,
    /// Workers that have bound their sockets.
    pub granted: u64,
    /// Workers that were refused, that exceeded their time limit, or that ended after their
    /// request.
    pub refused: u64,
    /// Attempts to accept a connection that failed.
    pub failed: u64,
}

#[derive(Debug)]
enum State {
    /// Connected, and has not asked yet.
    Connected(Incoming<REQUEST_LEN>),
    /// Has asked. Waits for another worker.
    Asked,
    /// Has the descriptors, and has not reported that its sockets are bound.
    Open(Box<Grant>, Incoming<PRELUDE>),
}

#[derive(Debug)]
struct Worker {
    socket: OwnedFd,
    peer: Peer,
    /// When its time is over. `None` while it waits for the helper.
    deadline: Option<Instant>,
    state: State,
}

/// The next thing to do with a worker.
enum Next {
    Keep,
    /// It has ended before it asked.
    Forget,
    Granted,
    Refuse(HelperError),
}

impl Worker {
    /// Handles what the worker has sent. Never waits.
    fn advance(&mut self, interface: &str) -> Next {
        match &mut self.state {
            State::Connected(request) => match request.read(self.socket.as_fd()) {
                Ok(None) => Next::Keep,
                Err(_) => Next::Forget,
                Ok(Some(request)) => match check_request(&request, interface) {
                    Ok(()) => {
                        (self.state, self.deadline) = (State::Asked, None);
                        Next::Keep
                    }
                    Err(error) => Next::Refuse(error),
                },
            },
            State::Asked => Next::Keep,
            State::Open(grant, bound) => match bound.read(self.socket.as_fd()) {
                Ok(None) => Next::Keep,
                Ok(Some(bound)) => {
                    grant.finish(self.socket.as_fd(), &bound).map_or_else(Next::Refuse, |()| Next::Granted)
                }
                Err(error) => Next::Refuse(error),
            },
        }
    }

    fn is_open(&self) -> bool {
        matches!(self.state, State::Open(..))
    }
}

/// A helper that listens on a path, and grants the queues of an interface to one worker at a time.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    interface: String,
    grants: HelperOptions,
    options: ServerOptions,
    /// In the order in which they connected.
    workers: Vec<Worker>,
    /// No connection is accepted before this time.
    paused: Option<Instant>,
    stats: ServerStats,
}

impl Server {
    /// Listens on `path`, for workers that get queues of `interface`. A socket there that no
    /// process listens on any more is replaced. The path has its mode and its group before a
    /// process can connect. It is removed when this value is dropped.
    ///
    /// # Errors
    ///
    /// [`HelperError`]: [`HelperError::Listen`], [`HelperError::Occupied`], and those of the
    /// interface.
    pub fn bind(
        path: impl AsRef<Path>,
        interface: impl Into<String>,
        grants: HelperOptions,
        options: ServerOptions,
    ) -> Result<Self, HelperError> {
        let interface = interface.into();
        check_queues(&interface, &grants)?;
        let listener = Listener::bind(path.as_ref(), options.mode, options.group)?;
        let (workers, stats) = (Vec::new(), ServerStats::default());
        Ok(Self { listener, interface, grants, options, workers, paused: None, stats })
    }

    /// Counts since the start.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.stats
    }

    /// Workers that have no descriptors yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.workers.iter().filter(|worker| !worker.is_open()).count()
    }

    /// Serves workers until `stop` is readable. `report` is called for each event.
    ///
    /// # Errors
    ///
    /// [`HelperError::System`] if the system cannot wait. What goes wrong with a worker is an
    /// event.
    pub fn serve(&mut self, stop: impl AsFd, mut report: impl FnMut(Event<'_>)) -> Result<(), HelperError> {
        while !self.turn(stop.as_fd(), None, &mut report)? {}
        Ok(())
    }

    /// Waits for workers, at most for `patience` and until `stop` is readable, and handles them.
    /// Returns whether `stop` is readable.
    fn turn(
        &mut self,
        stop: BorrowedFd<'_>,
        patience: Option<Duration>,
        report: &mut dyn FnMut(Event<'_>),
    ) -> Result<bool, HelperError> {
        let now = Instant::now();
        let times = self.workers.iter().filter_map(|worker| worker.deadline).chain(self.paused);
        let times = times.map(|at| at.saturating_duration_since(now)).chain(patience);
        // A time beyond what the system can wait for is no limit.
        let timeout = times.min().and_then(|time| Timespec::try_from(time).ok());
        let mut fds = vec![PollFd::from_borrowed_fd(stop, PollFlags::IN)];
        fds.extend(self.workers.iter().map(|worker| {
            // A worker that waits for the helper sends nothing. Its end is reported in any case.
            let events = if matches!(worker.state, State::Asked) { PollFlags::empty() } else { PollFlags::IN };
            PollFd::new(&worker.socket, events)
        }));
        if self.paused.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(system("waiting for workers")(e)),
        }
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        let mut ready = ready.into_iter();
        let stopped = ready.next().is_some_and(|events| !events.is_empty());
        let now = Instant::now();
        for mut worker in std::mem::take(&mut self.workers) {
            let events = ready.next().unwrap_or(PollFlags::empty());
            let next = match &worker.state {
                State::Asked if events.intersects(PollFlags::HUP | PollFlags::ERR) => Next::Refuse(HelperError::Closed),
                _ if events.is_empty() => Next::Keep,
                _ => worker.advance(&self.interface),
            };
            let late = worker.deadline.is_some_and(|deadline| now >= deadline);
            let next = if late && matches!(next, Next::Keep) && worker.deadline.is_some() {
                Next::Refuse(HelperError::TimedOut(self.options.limit))
            } else {
                next
            };
            self.settle(worker, next, report);
        }
        if self.paused.is_some_and(|until| now >= until) {
            // Whether a connection waits is seen in the next turn.
            self.paused = None;
        } else if ready.next().is_some_and(|events| !events.is_empty()) {
            self.accept(report);
        }
        self.open(report);
        Ok(stopped)
    }

    /// Keeps a worker, or ends its connection.
    fn settle(&mut self, worker: Worker, next: Next, report: &mut dyn FnMut(Event<'_>)) {
        match next {
            Next::Keep => self.workers.push(worker),
            Next::Forget => {}
            Next::Granted => {
                if let State::Open(grant, _) = worker.state {
                    grant.pass_on();
                }
                self.stats.granted += 1;
                report(Event::Granted(worker.peer));
            }
            Next::Refuse(error) => {
                send_refusal(&error, worker.socket.as_fd());
                self.stats.refused += 1;
                report(Event::Refused(worker.peer, &error));
            }
        }
    }

    /// Accepts the connections that wait. A connection that has ended already costs nothing but
    /// this.
    fn accept(&mut self, report: &mut dyn FnMut(Event<'_>)) {
        for _ in 0..ACCEPT_BATCH {
            let socket = match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    // The listener stays readable: without a pause this thread would do nothing
                    // else.
                    self.paused = Some(Instant::now() + self.options.pause);
                    self.stats.failed += 1;
                    if !std::mem::replace(&mut self.listener.failing, true) {
                        report(Event::NotAccepting(&error.into()));
                    }
                    return;
                }
            };
            self.listener.failing = false;
            self.stats.accepted += 1;
            // The system call does not fail for a connected socket.
            let Ok((pid, user)) = sys::peer(socket.as_fd()) else { continue };
            let peer = Peer { pid: u32::try_from(pid).ok().filter(|pid| *pid > 0), user };
            let (deadline, state) = (Some(Instant::now() + self.options.limit), State::Connected(Incoming::new()));
            let mut worker = Worker { socket, peer, deadline, state };
            let next = match self.options.check_user(user) {
                Ok(()) => worker.advance(&self.interface),
                Err(error) => Next::Refuse(error),
            };
            self.settle(worker, next, report);
            if self.pending() > self.options.pending {
                let silent = self.workers.iter().position(|worker| matches!(worker.state, State::Connected(_)));
                let waiting = || self.workers.iter().position(|worker| !worker.is_open());
                if let Some(oldest) = silent.or_else(waiting) {
                    let worker = self.workers.remove(oldest);
                    self.settle(worker, Next::Refuse(HelperError::TooMany(self.options.pending)), report);
                }
            }
        }
    }

    /// Opens the queues for the worker that has waited longest, unless another one has them and has
    /// not bound.
    fn open(&mut self, report: &mut dyn FnMut(Event<'_>)) {
        while !self.workers.iter().any(Worker::is_open)
            && let Some(at) = self.workers.iter().position(|worker| matches!(worker.state, State::Asked))
        {
            let mut worker = self.workers.remove(at);
            let opened = Grant::open(&self.interface, &self.grants).and_then(|grant| {
                self.stats.opened += 1;
                grant.offer(worker.socket.as_fd(), None)?;
                Ok(grant)
            });
            match opened {
                Ok(grant) => {
                    worker.state = State::Open(Box::new(grant), Incoming::new());
                    worker.deadline = Some(Instant::now() + self.options.limit);
                    self.workers.insert(at, worker);
                }
                Err(error) => self.settle(worker, Next::Refuse(error), report),
            }
        }
    }
}

#[cfg(test)]
mod tests;
