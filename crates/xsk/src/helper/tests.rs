//! A helper and its worker, in one process.

#![allow(clippy::unwrap_used)]
use super::grant::{HEADER, open_socket};
use super::protocol::{self, REQUEST_LEN};
use super::*;
use crate::netlink::{AttachMode, Interface};
use crate::program::{AttachError, ProgramOptions};
#[cfg(feature = "metadata")]
use crate::program::{KernelMetadata, Program};
use crate::testing::{in_namespace, ip, with_capabilities};
use rustix::cmsg_space;
use rustix::net::AddressFamily;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::thread::CapabilitySet;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

fn programs() -> usize {
    Interface::by_name("v0").unwrap().programs.len()
}

/// Proves XSK-4: with a helper's grant, a thread without any capability has sockets, their options
/// and a program with its map. Nothing stays open afterwards.
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
                &(|bytes: &mut Vec<u8>, _: &mut Vec<OwnedFd>| bytes[0] = 0) as &dyn Fn(&mut Vec<u8>, &mut Vec<OwnedFd>),
                "does not begin as a message",
            ),
            (&|bytes, _| bytes[8] = 9, "has version 9 of the protocol, and this process 5"),
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
                "not that of a map of AF_XDP sockets",
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
        assert!(newer.contains("has version 9 of the protocol, and this process 5"), "{newer}");
        let other = refusal(&[b'x'; REQUEST_LEN]);
        assert!(other.contains("does not begin as a message of a helper"), "{other}");
        assert_eq!(programs(), 0);
        // The text of a malicious helper: it is truncated, and no terminal interprets it as
        // commands.
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

/// A worker that ends, or exceeds its time limit, before its sockets are bound leaves no program,
/// although it has the descriptors. It is sent the reason.
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

/// The worker reads the metadata of the helper's program, also behind a filter of its own.
#[cfg(feature = "metadata")]
#[test]
fn a_worker_reads_the_metadata_of_the_helpers_program() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        for metadata in [KernelMetadata::Off, KernelMetadata::IfSupported] {
            let program = ProgramOptions { metadata, ..ProgramOptions::default() };
            let options = HelperOptions { program: Some(program), ..HelperOptions::default() };
            let (ours, theirs) = UnixStream::pair().unwrap();
            let grant = Grant::open("v0", &options).unwrap();
            let helpers = grant.program.as_ref().and_then(Program::rx_metadata);
            assert!(metadata != KernelMetadata::Off || helpers.is_none());
            let helper = std::thread::spawn(move || grant.send(ours, LONG));
            let mut grant = Grant::receive(&theirs, LONG).unwrap();
            grant.bound().unwrap();
            helper.join().unwrap().unwrap();
            let program = grant.program.as_ref().unwrap();
            assert_eq!((program.rx_metadata(), &*grant.name), (helpers, "v0"));
            program.set_filter(&crate::Filter::default()).unwrap();
            assert_eq!(program.rx_metadata(), helpers);
        }
    });
}
