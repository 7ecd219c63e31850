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

use super::listener::Listener;
use super::{
    Grant, HelperError, HelperOptions, Incoming, PRELUDE, REQUEST_LEN, check_queues, check_request, names, system,
};
use crate::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Connections that are accepted before the others are looked at.
const BATCH: usize = 64;

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

    /// How long a worker may take to ask, and then to receive the descriptors, register its memory
    /// and bind its sockets. A worker that takes longer loses its connection and the program.
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
    /// Workers that were refused, or that took too long, or that ended after they had asked.
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

/// A helper that listens on a path, and gives the queues of an interface to one worker at a time.
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
            // A worker that waits for the helper has nothing to say. Its end is reported in any
            // case.
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
                error.tell(worker.socket.as_fd());
                self.stats.refused += 1;
                report(Event::Refused(worker.peer, &error));
            }
        }
    }

    /// Accepts the connections that wait. A connection that has ended already costs nothing but
    /// this.
    fn accept(&mut self, report: &mut dyn FnMut(Event<'_>)) {
        for _ in 0..BATCH {
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
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Interface;
    use crate::helper::{Deadline, MAX_SOCKETS, Refusal};
    use crate::testing::{in_namespace, ip};
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(60);

    /// A server on `v0` that a test turns by hand.
    struct Bench {
        server: Server,
        path: std::path::PathBuf,
        stop: UnixStream,
        stops: UnixStream,
        said: Vec<String>,
        _dir: tempfile::TempDir,
    }

    impl Bench {
        fn new(options: ServerOptions) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            let server = Server::bind(&path, "v0", HelperOptions::default(), options).unwrap();
            let (stop, stops) = UnixStream::pair().unwrap();
            Self { server, path, stop, stops, said: Vec::new(), _dir: dir }
        }

        fn connect(&self) -> UnixStream {
            UnixStream::connect(&self.path).unwrap()
        }

        /// A worker that has asked.
        fn ask(&self) -> UnixStream {
            let worker = self.connect();
            (&worker).write_all(&super::super::protocol::request(None)).unwrap();
            worker
        }

        fn turn(&mut self, patience: Duration) {
            let said = &mut self.said;
            let mut report = |event: Event<'_>| {
                said.push(match event {
                    Event::Granted(_) => "granted".to_owned(),
                    Event::Refused(_, error) => error.to_string(),
                    Event::NotAccepting(_) => "not accepting".to_owned(),
                });
            };
            assert!(!self.server.turn(self.stop.as_fd(), Some(patience), &mut report).unwrap());
        }

        /// Turns until there is nothing more to do.
        fn settle(&mut self) {
            (0..10 + self.server.stats().accepted.max(3000) / 64).for_each(|_| self.turn(Duration::ZERO));
        }
    }

    /// The grant of a worker that has asked already.
    fn granted(worker: &UnixStream) -> Result<Grant, HelperError> {
        Grant::answer(worker.as_fd(), LONG, Deadline::new(LONG))
    }

    fn programs() -> usize {
        Interface::by_name("v0").unwrap().programs.len()
    }

    /// Proves XSK-4: workers at any step that do not go on are no reason for another one to wait
    /// for longer than their limit, and are told that they were too slow.
    #[test]
    fn a_worker_that_does_not_proceed_blocks_no_other() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            // No time is over before all of them are there.
            let mut bench = Bench::new(ServerOptions::new().limit(LONG));
            let silent = bench.connect();
            let half = bench.connect();
            (&half).write_all(b"netmem-x").unwrap();
            bench.settle();
            assert_eq!((bench.server.pending(), bench.server.stats().opened), (2, 0));
            let (first, second) = (bench.ask(), bench.ask());
            bench.settle();
            // The first has the descriptors in the buffer of its socket, and the second waits for
            // what becomes of that.
            assert_eq!((bench.server.pending(), bench.server.stats().opened, programs()), (3, 1, 1));
            // The times of the others are over.
            let past = Instant::now();
            for worker in &mut bench.server.workers {
                worker.deadline = worker.deadline.map(|_| past);
            }
            bench.settle();
            assert_eq!((bench.server.pending(), bench.server.stats().opened, programs()), (0, 2, 1));
            let late = "the other side of the helper's socket took more than 60 s";
            assert_eq!(bench.said, [late; 3]);
            for refused in [silent, half] {
                let error = Grant::receive(&refused, LONG).unwrap_err();
                assert!(matches!(&error, HelperError::Refused { why: Refusal::Late, .. }), "{error}");
            }
            let error = granted(&first).unwrap().bound().unwrap_err();
            assert!(matches!(&error, HelperError::Refused { why: Refusal::Late, .. }), "{error}");
            let mut grant = granted(&second).unwrap();
            let bound = std::thread::spawn(move || grant.bound().map(|()| grant));
            while bench.server.stats().granted == 0 {
                bench.turn(LONG);
            }
            let grant = bound.join().unwrap().unwrap();
            // The next one is refused at once.
            let third = bench.ask();
            bench.settle();
            assert!(matches!(granted(&third), Err(HelperError::Refused { why: Refusal::Busy, .. })));
            drop(grant);
            assert_eq!((programs(), bench.server.workers.len()), (0, 0));
        });
    }

    /// The oldest of too many workers is dropped, and one that has asked stays.
    #[test]
    fn too_many_workers_drop_the_oldest() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let mut bench = Bench::new(ServerOptions::new().limit(LONG).pending(3));
            let has = bench.ask();
            bench.settle();
            let waits = bench.ask();
            let silent: Vec<_> = (0..10).map(|_| bench.connect()).collect();
            bench.settle();
            assert_eq!((bench.server.pending(), bench.server.workers.len()), (3, 4));
            assert_eq!(bench.said, ["more than 3 workers wait for queues"; 8]);
            for (number, worker) in silent.iter().enumerate() {
                worker.set_nonblocking(true).unwrap();
                let dropped = std::io::Read::read(&mut &*worker, &mut [0]).is_ok();
                assert_eq!(dropped, number < 8, "{number}");
            }
            drop(has);
            bench.settle();
            assert!(granted(&waits).is_ok());
        });
    }

    /// Connections that have ended before they are accepted cost no grant, and no other worker's
    /// place.
    #[test]
    fn connections_that_have_ended_are_forgotten() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let mut bench = Bench::new(ServerOptions::new().limit(LONG).pending(1));
            let silent = bench.connect();
            (0..2000).for_each(|_| drop(bench.connect()));
            bench.settle();
            let stats = bench.server.stats();
            assert_eq!((stats.accepted, stats.opened, stats.refused), (2001, 0, 0));
            assert_eq!((bench.server.pending(), bench.said.len()), (1, 0));
            (&silent).write_all(&super::super::protocol::request(None)).unwrap();
            bench.settle();
            assert!(granted(&silent).unwrap().sockets.len() <= MAX_SOCKETS);
        });
    }

    /// A listener that is readable and cannot accept is left alone for the pause, and is reported
    /// once.
    #[test]
    fn a_failing_accept_does_not_spin() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let mut bench = Bench::new(ServerOptions::new().pause(LONG));
            // A socket that is readable and does not listen.
            let (readable, mut other) = UnixStream::pair().unwrap();
            other.write_all(b"x").unwrap();
            bench.server.listener.socket = readable.into();
            (0..100).for_each(|_| bench.turn(Duration::ZERO));
            assert_eq!((bench.server.stats().failed, &bench.said[..]), (1, &["not accepting".to_owned()][..]));
            // The pause is over, and it fails again.
            bench.server.paused = Some(Instant::now());
            (0..100).for_each(|_| bench.turn(Duration::ZERO));
            assert_eq!((bench.server.stats().failed, bench.said.len()), (2, 1));
            // A thread that sleeps is woken for the stop.
            (&bench.stops).write_all(b"x").unwrap();
            bench.server.serve(&bench.stop, |_| {}).unwrap();
        });
    }
}
