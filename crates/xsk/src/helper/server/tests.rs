//! A server that a test turns by hand.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::Interface;
use crate::helper::protocol::Deadline;
use crate::helper::{MAX_SOCKETS, Refusal};
use crate::testing::{in_namespace, ip};
use std::io::Write;
use std::os::unix::net::UnixStream;

const LONG: Duration = Duration::from_secs(60);

/// A server on `v0` that a test turns by hand.
struct Harness {
    server: Server,
    path: std::path::PathBuf,
    stop: UnixStream,
    stops: UnixStream,
    events: Vec<String>,
    _dir: tempfile::TempDir,
}

impl Harness {
    fn new(options: ServerOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let server = Server::bind(&path, "v0", HelperOptions::default(), options).unwrap();
        let (stop, stops) = UnixStream::pair().unwrap();
        Self { server, path, stop, stops, events: Vec::new(), _dir: dir }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    /// A worker that has asked.
    fn ask(&self) -> UnixStream {
        let worker = self.connect();
        (&worker).write_all(&crate::helper::protocol::request(None)).unwrap();
        worker
    }

    fn turn(&mut self, patience: Duration) {
        let events = &mut self.events;
        let mut report = |event: Event<'_>| {
            events.push(match event {
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

/// Ends a worker's connection. A descriptor that is only dropped may still be open for a moment, in
/// a process that another test has forked and that has not executed its program yet.
fn end(worker: &UnixStream) {
    worker.shutdown(std::net::Shutdown::Both).unwrap();
}

fn programs() -> usize {
    Interface::by_name("v0").unwrap().programs.len()
}

/// Proves XSK-4: workers at any step that do not go on are no reason for another one to wait for
/// longer than their limit, and are sent the reason that they were too slow.
#[test]
fn a_worker_that_does_not_proceed_blocks_no_other() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        // No time is over before all of them are there.
        let mut harness = Harness::new(ServerOptions::new().limit(LONG));
        let silent = harness.connect();
        let half = harness.connect();
        (&half).write_all(b"netmem-x").unwrap();
        harness.settle();
        assert_eq!((harness.server.pending(), harness.server.stats().opened), (2, 0));
        let (first, second) = (harness.ask(), harness.ask());
        harness.settle();
        // The first has the descriptors in the buffer of its socket, and the second waits for what
        // becomes of that.
        assert_eq!((harness.server.pending(), harness.server.stats().opened, programs()), (3, 1, 1));
        // The times of the others are over.
        let past = Instant::now();
        for worker in &mut harness.server.workers {
            worker.deadline = worker.deadline.map(|_| past);
        }
        harness.settle();
        assert_eq!((harness.server.pending(), harness.server.stats().opened, programs()), (0, 2, 1));
        let late = "the other side of the helper's socket took more than 60 s";
        assert_eq!(harness.events, [late; 3]);
        for refused in [silent, half] {
            let error = Grant::receive(&refused, LONG).unwrap_err();
            assert!(matches!(&error, HelperError::Refused { why: Refusal::Late, .. }), "{error}");
        }
        let error = granted(&first).unwrap().bound().unwrap_err();
        assert!(matches!(&error, HelperError::Refused { why: Refusal::Late, .. }), "{error}");
        let mut grant = granted(&second).unwrap();
        let bound = std::thread::spawn(move || grant.bound().map(|()| grant));
        while harness.server.stats().granted == 0 {
            harness.turn(LONG);
        }
        let grant = bound.join().unwrap().unwrap();
        // The next one is refused at once.
        let third = harness.ask();
        harness.settle();
        assert!(matches!(granted(&third), Err(HelperError::Refused { why: Refusal::Busy, .. })));
        drop(grant);
        // See `end`.
        while programs() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(harness.server.workers.len(), 0);
    });
}

/// The oldest of too many workers is dropped, and one that has asked stays.
#[test]
fn too_many_workers_drop_the_oldest() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        let mut harness = Harness::new(ServerOptions::new().limit(LONG).pending(3));
        let has = harness.ask();
        harness.settle();
        let waits = harness.ask();
        let silent: Vec<_> = (0..10).map(|_| harness.connect()).collect();
        harness.settle();
        assert_eq!((harness.server.pending(), harness.server.workers.len()), (3, 4));
        assert_eq!(harness.events, ["more than 3 workers wait for queues"; 8]);
        for (number, worker) in silent.iter().enumerate() {
            worker.set_nonblocking(true).unwrap();
            let dropped = std::io::Read::read(&mut &*worker, &mut [0]).is_ok();
            assert_eq!(dropped, number < 8, "{number}");
        }
        end(&has);
        harness.settle();
        assert!(granted(&waits).is_ok());
    });
}

/// Connections that have ended before they are accepted cost no grant, and no other worker's place.
#[test]
fn connections_that_have_ended_are_forgotten() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        let mut harness = Harness::new(ServerOptions::new().limit(LONG).pending(1));
        let silent = harness.connect();
        (0..2000).for_each(|_| end(&harness.connect()));
        harness.settle();
        let stats = harness.server.stats();
        assert_eq!((stats.accepted, stats.opened, stats.refused), (2001, 0, 0));
        assert_eq!((harness.server.pending(), harness.events.len()), (1, 0));
        (&silent).write_all(&crate::helper::protocol::request(None)).unwrap();
        harness.settle();
        assert!(granted(&silent).unwrap().sockets.len() <= MAX_SOCKETS);
    });
}

/// A listener that is readable and cannot accept is left alone for the pause, and is reported once.
#[test]
fn a_failing_accept_does_not_spin() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        let mut harness = Harness::new(ServerOptions::new().pause(LONG));
        // A socket that is readable and does not listen.
        let (readable, mut other) = UnixStream::pair().unwrap();
        other.write_all(b"x").unwrap();
        harness.server.listener.socket = readable.into();
        (0..100).for_each(|_| harness.turn(Duration::ZERO));
        assert_eq!((harness.server.stats().failed, &harness.events[..]), (1, &["not accepting".to_owned()][..]));
        // The pause is over, and it fails again.
        harness.server.paused = Some(Instant::now());
        (0..100).for_each(|_| harness.turn(Duration::ZERO));
        assert_eq!((harness.server.stats().failed, harness.events.len()), (2, 1));
        // A thread that sleeps is woken for the stop.
        (&harness.stops).write_all(b"x").unwrap();
        harness.server.serve(&harness.stop, |_| {}).unwrap();
    });
}
