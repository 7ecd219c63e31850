//! TCP from C and C++, in a network namespace: with the kernel behind a tap.

use crate::build::{C, CPP, each_build, run};
use netmem_testing::namespace::in_namespace;
use netmem_testing::skip;
use netmem_testing::xsk::{name, veth};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

/// Serves each connection to a port of the kernel's, until the process ends.
fn listen(port: u16, serve: impl Fn(TcpStream) + Send + Sync + Clone + 'static) {
    let listener = TcpListener::bind(("0.0.0.0", port)).expect("a port");
    thread::spawn(move || {
        for socket in listener.incoming() {
            let (socket, serve) = (socket.expect("a connection"), serve.clone());
            thread::spawn(move || serve(socket));
        }
    });
}

/// The kernel's side. The end of each connection to port 11 is sent.
fn peers() -> Receiver<io::ErrorKind> {
    listen(7, |mut socket| {
        let mut bytes = [0; 16384];
        while let Ok(n @ 1..) = socket.read(&mut bytes) {
            if socket.write_all(&bytes[..n]).is_err() {
                break;
            }
        }
    });
    // A byte that was not read: the kernel resets.
    listen(9, |socket| assert_eq!(socket.peek(&mut [0]).expect("a byte"), 1));
    listen(13, |mut socket| socket.write_all(&vec![7; 20 << 20]).expect("sent"));
    listen(15, |_never_read| {
        loop {
            thread::park();
        }
    });
    let (ends, ended) = channel();
    listen(11, move |mut socket| {
        let error = socket.read(&mut [0]).expect_err("no byte and no end");
        ends.send(error.kind()).expect("a test");
    });
    ended
}

/// Misuse, failures of each kind, payload in fragments, and the end of the tap and of the stack.
fn what_streams_do(compilers: &[&str], flags: &[&str]) {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    each_build(compilers, flags, "tests/all/streams.c", |mut program: Command| {
        in_namespace(move || {
            let reset = peers();
            assert_eq!(run(program.arg(name("t"))), "the stack did what the header says\n");
            assert_eq!(reset.recv().expect("a peer"), io::ErrorKind::ConnectionReset);
        });
    });
}

#[test]
fn what_streams_do_in_c() {
    what_streams_do(C, &["-std=c11"]);
}

#[test]
fn what_streams_do_in_cpp() {
    what_streams_do(CPP, &["-std=c++17", "-xc++"]);
}

#[test]
fn the_wrappers_of_streams() {
    each_build(CPP, &["-std=c++17"], "tests/all/stream_wrappers.cpp", |mut program| {
        in_namespace(move || {
            let _reset = peers();
            assert_eq!(run(program.arg(name("t"))), "100 pages there and back; to itself, too\n");
        });
    });
}

/// A stack on each end of a veth pair, each of another thread.
#[test]
fn the_wrappers_of_streams_on_interfaces() {
    each_build(CPP, &["-std=c++17"], "tests/all/stream_wrappers.cpp", |mut program| {
        in_namespace(move || {
            let (ours, theirs) = (name("o"), name("t"));
            veth(&ours, &theirs, 1, 1500);
            assert_eq!(run(program.args([ours, theirs])), "100 pages there and back\n");
        });
    });
}
