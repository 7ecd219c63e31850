//! Files into device memory and back by `c/file_into_device.c`, with the peers of the example of
//! Rust: the network device in its own process, a tap, and `nc`. And what device memory does and
//! refuses, between two devices on a cable.

use crate::build::{C, CPP, build, each_build, libraries, program, run};
use netmem_testing::tree::{TREE, netmem_with_cuda};
use netmem_testing::{installed, skip};
use netmem_virtio::Spin;
use netmem_virtio::device::port::Cross;
use netmem_virtio::device::{NetDevice, Options};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Runs the script of the example with this program.
fn files(program: &Command, mebibytes: &str, memory: &[&str]) {
    let script = Path::new(TREE).join("tests/kernel/loader.py");
    if let Err(why) = installed(&["python3", "nc", "unshare"]) {
        return skip(&why);
    }
    let mut command = Command::new("python3");
    command.arg("-B").arg(script).arg(program.get_program()).args(memory);
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.env("NETMEM", netmem_with_cuda()).env("MIB", mebibytes).output().expect("python3 can be run");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program:?}: {}\n{out}{err}", output.status);
    match out.lines().find_map(|line| line.strip_prefix("skipped: ")) {
        Some(why) => skip(why),
        None => assert!(out.ends_with("passed: files into device memory and back\n"), "{out}"),
    }
}

#[test]
fn files_into_device_memory_in_c() {
    each_build(C, &["-std=c11"], "c/file_into_device.c", |program| files(&program, "2", &[]));
}

#[test]
fn files_into_device_memory_in_cpp() {
    each_build(CPP, &["-std=c++17", "-xc++"], "c/file_into_device.c", |program| files(&program, "2", &[]));
}

/// The memory is of a GPU, whose driver a library stands in for. It proves nothing about a GPU.
#[test]
fn files_into_a_stand_in_for_a_gpu_in_c() {
    each_build(C, &["-std=c11"], "c/file_into_device.c", |program| files(&program, "2", &["stand-in"]));
}

/// The memory is of a GPU. `NETMEM_GPU=none` announces that there is none.
#[test]
fn files_into_a_gpu_in_c() {
    if std::env::var("NETMEM_GPU").as_deref() == Ok("none") {
        let _ = writeln!(std::io::stderr(), "skipped: files_into_a_gpu_in_c: NETMEM_GPU=none");
        return;
    }
    if let Err(why) = installed(&["gcc"]) {
        return skip(&why);
    }
    let libraries = libraries();
    files(&program(&build("gcc", &["-std=c11"], "c/file_into_device.c", libraries.path())), "16", &["gpu"]);
}

#[test]
fn valgrind_finds_no_error_in_the_transfer() {
    if let Err(why) = installed(&["gcc", "valgrind"]) {
        return skip(&why);
    }
    let libraries = libraries();
    let built = build("gcc", &["-std=c11", "-g"], "c/file_into_device.c", libraries.path());
    let under = libraries.path().join("under-valgrind");
    let text = format!("#!/bin/sh\nexec valgrind --error-exitcode=9 --quiet {} \"$@\"\n", built.display());
    std::fs::write(&under, text).expect("a script");
    std::fs::set_permissions(&under, Permissions::from_mode(0o755)).expect("a program");
    files(&program(&under), "1", &[]);
}

/// A device that is the end of a cable, for one front end after the other.
fn serve(port: Cross, split_headers: bool, socket: &Path, stop: &Arc<AtomicBool>) -> [JoinHandle<()>; 2] {
    let mut port = Some(port);
    let options = Options { max_pairs: 1, split_headers, ..Options::default() };
    let made = NetDevice::new(options, |_| Ok(port.take().expect("one pair")));
    let mut device = made.expect("a device");
    let (control, listener) = (device.control(), UnixListener::bind(socket).expect("a socket"));
    let (stop, stops) = (stop.clone(), stop.clone());
    let front_ends = std::thread::spawn(move || {
        for stream in listener.incoming() {
            if stop.load(Ordering::Relaxed) {
                return control.wake();
            }
            control.handle(stream.expect("a stream")).expect("a front end without faults");
        }
    });
    let frames = std::thread::spawn(move || device.run(&stops, Spin::NONE).expect("a device"));
    [front_ends, frames]
}

/// Runs a program with the sockets of two devices, between which there is a cable.
fn on_a_cable(mut program: Command, split_headers: bool, expected: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = [folder.path().join("a"), folder.path().join("b")];
    let stop = Arc::new(AtomicBool::new(false));
    let [near, far] = Cross::cable();
    let threads =
        [(near, &sockets[0]), (far, &sockets[1])].map(|(port, socket)| serve(port, split_headers, socket, &stop));
    let ended =
        catch_unwind(AssertUnwindSafe(|| run(program.args(&sockets).args((!split_headers).then_some("whole")))));
    stop.store(true, Ordering::Relaxed);
    sockets.iter().for_each(|socket| drop(UnixStream::connect(socket)));
    for thread in threads.into_iter().flatten() {
        thread.join().expect("no panic");
    }
    match ended {
        Ok(out) => assert_eq!(out, expected),
        Err(panic) => resume_unwind(panic),
    }
}

/// Memory, stacks, streams and tokens, and what of them is refused. Proves CAPI-6.
#[test]
fn what_device_memory_does_in_c() {
    if !cfg!(debug_assertions) {
        skip("the library is built without debug assertions, so that misuse is undefined");
        return;
    }
    let expected = "device memory did what the header says\n";
    let split = |program| on_a_cable(program, true, expected);
    each_build(C, &["-std=c11"], "tests/all/device_memory.c", split);
    // Payload of frames that the device does not split behind their headers is in host memory, too.
    let whole = |program| on_a_cable(program, false, expected);
    each_build(CPP, &["-std=c++17", "-xc++"], "tests/all/device_memory.c", whole);
}

#[test]
fn the_wrappers_of_device_memory() {
    let received = "3000000 bytes, as they were sent; pages: all returned, 0 held; range 0\nNETMEM_ERR_ARGUMENT\n";
    // Only a library with debug assertions finds the thread.
    let close = if cfg!(debug_assertions) { "NETMEM_ERR_THREAD, and the stack is open\n" } else { "" };
    let flags: &[&str] = if cfg!(debug_assertions) { &["-std=c++17", "-DCHECKED"] } else { &["-std=c++17"] };
    let expected = [received, close].concat();
    each_build(CPP, flags, "tests/all/device_wrappers.cpp", |program| on_a_cable(program, true, &expected));
}
