//! AF_XDP queues from C and C++, in a network namespace: on both ends of a veth pair.

use crate::build::{C, CPP, each_build, run};
use netmem_testing::metadata_program::pin_metadata_program;
use netmem_testing::namespace::{command, in_namespace};
use netmem_testing::skip;
use netmem_testing::xsk::{name, veth};
use std::process::Command;

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
