//! AF_XDP queues from C and C++, in a network namespace: on both ends of a veth pair.

use crate::build::{C, CPP, each_build, run};
use netmem_testing::metadata_program::pin_metadata_program;
use netmem_testing::namespace::{command, in_namespace};
use netmem_testing::xsk::{Raw, frame, name, until, veth};
use netmem_testing::{installed, skip};
use netmem_xsk::helper::{HelperError, HelperOptions};
use netmem_xsk::{Grant, Interface, ProgramOptions};
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Runs a program with both ends of a veth pair, which has frames of several fragments.
fn on_both_ends(mut program: Command, expected: &str) {
    let expected = expected.to_owned();
    in_namespace(move || {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 9000);
        assert_eq!(run(program.args([ours, theirs])), expected);
    });
}

/// Frames of one and of several fragments, what a queue refuses, what it loses by cause, waiting,
/// and the end of an interface.
#[test]
fn what_queues_do_in_c() {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    let test = |program| on_both_ends(program, "the queues did what the header says\n");
    each_build(C, &["-std=c11"], "tests/all/queues.c", test);
    each_build(CPP, &["-std=c++17", "-xc++"], "tests/all/queues.c", test);
}

#[test]
fn the_wrappers_of_queues() {
    let test =
        |program| on_both_ends(program, "100 frames there and back; 0 pages held; 1000 frames from thread to thread\n");
    each_build(CPP, &["-std=c++17"], "tests/all/queue_wrappers.cpp", test);
}

/// A program of the user's own writes metadata in front of each frame, which C reads.
#[test]
fn metadata_of_the_users_own_program() {
    each_build(C, &["-std=c11"], "tests/all/metadata.c", |mut program| {
        in_namespace(move || {
            let (ours, theirs) = (name("o"), name("t"));
            veth(&ours, &theirs, 1, 1500);
            let place = tempfile::tempdir().expect("a folder");
            command(&format!("mount -t bpf bpf {}", place.path().display()));
            let (program_at, map_at) = pin_metadata_program(place.path());
            let out = run(program.args([ours, theirs]).args([program_at, map_at]));
            assert_eq!(out, "100 frames, each with its metadata\n");
            command(&format!("umount {}", place.path().display()));
        });
    });
}

/// Requests for checksums and times, of a queue that only sends, to one with busy polling.
#[test]
fn requests_to_the_device() {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    let test = |program| on_both_ends(program, "the requests were answered\n");
    each_build(C, &["-std=c11"], "tests/all/requests.c", test);
    each_build(CPP, &["-std=c++17", "-xc++"], "tests/all/requests.c", test);
}

/// A process without any capability, in another network namespace, receives and sends on the socket
/// that a helper has opened. The end of its grant detaches the program.
#[test]
fn sockets_of_a_helper() {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    if let Err(why) = installed(&["setpriv", "unshare"]) {
        skip(&why);
        return;
    }
    each_build(C, &["-std=c11"], "tests/all/granted.c", |program| in_namespace(|| granted(&program)));
}

/// A process that ends with the test.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn granted(program: &Command) {
    const LIMIT: Duration = Duration::from_secs(60);
    veth("v0", "v1", 2, 1500);
    // With one transmit queue: the kernel would choose one of two by a hash with a secret of this
    // boot, and the worker has a socket only for the first queue.
    command("ethtool -L v1 tx 1");
    let peer = Raw::new("v1");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("grant.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    listener.set_nonblocking(true).expect("a socket");
    let mut unprivileged = Command::new("unshare");
    unprivileged.args(["--net", "setpriv", "--bounding-set=-all", "--inh-caps=-all"]);
    unprivileged.arg(program.get_program()).arg(&path).stdout(Stdio::piped());
    for (name, value) in program.get_envs() {
        unprivileged.env(name, value.unwrap_or_default());
    }
    let mut worker = Worker(unprivileged.spawn().expect("a worker"));
    let mut serve = |program: Option<ProgramOptions>| {
        let connected = until("a worker", || match worker.0.try_wait() {
            Ok(None) => listener.accept().ok(),
            ended => panic!("{ended:?}: {}", output(&mut worker)),
        });
        let options = HelperOptions { queues: vec![0, 1], program, ..HelperOptions::default() };
        Grant::open("v0", &options).expect("a grant").send(connected.0, LIMIT)
    };
    assert!(matches!(serve(Some(ProgramOptions::default())), Err(HelperError::Interface { .. })));
    serve(Some(ProgramOptions::default())).expect("a worker that has bound its socket");
    for i in 0..100 {
        let mut sent = frame(60 + i, i as u64);
        sent[14] = if i < 99 { b'.' } else { b'!' };
        peer.send(&sent);
        assert_eq!(peer.receive(), sent);
    }
    serve(None).expect("a worker that has bound its socket");
    assert_eq!(peer.receive()[12..], [&[0x88, 0xb5][..], &[0xff; 46]].concat());
    assert_eq!(output(&mut worker), "the frames went back\n");
    assert!(worker.0.wait().expect("its end").success());
    assert_eq!(Interface::by_name("v0").expect("an interface").programs, []);
}

/// What the worker has written, when it has ended.
fn output(worker: &mut Worker) -> String {
    let mut text = String::new();
    worker.0.stdout.take().expect("its output").read_to_string(&mut text).expect("its output");
    text
}
