//! Network namespaces for tests: a thread gets one of its own, and what is in it goes with the thread.

#![allow(dead_code, clippy::unwrap_used)]

#[path = "../shared/skip.rs"]
mod skip;

use rustix::fs::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
pub(crate) use skip::skip;
use std::io::Write;
use std::process::Command;
use std::thread::JoinHandle;

/// Whether AF_XDP is to be tested: `NETMEM_AF_XDP=none` says that the kernel has none. The gate finds that out, and says why. Such a skip is
/// visible, and no failure.
pub(crate) fn af_xdp() -> bool {
    let possible = std::env::var("NETMEM_AF_XDP").as_deref() != Ok("none");
    if !possible {
        let thread = std::thread::current();
        let _ = writeln!(std::io::stderr(), "skipped: {}: NETMEM_AF_XDP=none", thread.name().unwrap_or("a test"));
    }
    possible
}

/// The interfaces that the tests are to use in place of a veth pair, and ours is to be in zero-copy mode: `NETMEM_XSK_NICS=OURS,THEIRS`. They
/// are set up, and what one sends the other receives. `tests/peers/xsk.py` runs the tests so, in a guest whose driver has the mode.
pub(crate) fn nics() -> Option<(String, String)> {
    let nics = std::env::var("NETMEM_XSK_NICS").ok()?;
    nics.split_once(',').map(|(ours, theirs)| (ours.to_owned(), theirs.to_owned()))
}

/// What a test in a namespace lacks.
fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root");
    }
    if Command::new("ip").arg("-V").output().is_err() {
        return Some("ip (of iproute2) is missing");
    }
    None
}

/// Runs a test on a thread that has a network namespace and mounts of its own. Programs that it starts have them, too. Skips it
/// without root.
pub(crate) fn in_namespace(test: impl FnOnce() + Send) {
    if !af_xdp() {
        return;
    }
    if let Some(why) = missing() {
        return skip(why);
    }
    if nics().is_some() {
        // Where the interfaces are.
        return test();
    }
    let name = std::thread::current().name().unwrap_or("test").to_owned();
    let run = || {
        // SAFETY: the thread shares its descriptors with the others still; namespaces, the working directory and the mask of new
        // files become its own, and it uses none that it has looked up before.
        let unshared = unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) };
        assert_eq!(unshared, 0, "unshare: {}", std::io::Error::last_os_error());
        command("mount --make-rprivate /");
        ip("link set lo up");
        test();
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, run).unwrap();
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs a peer on a thread that has a network namespace of its own, to which `interface` is moved first.
pub(crate) fn in_peer_namespace(interface: &str, peer: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let (to_us, from_peer) = std::sync::mpsc::channel();
    let (to_peer, moved) = std::sync::mpsc::channel();
    let name = std::thread::current().name().unwrap_or("peer").to_owned();
    let run = move || {
        // SAFETY: as in `in_namespace`.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "{}", std::io::Error::last_os_error());
        ip("link set lo up");
        to_us.send(rustix::thread::gettid().as_raw_pid()).unwrap();
        moved.recv().unwrap();
        peer();
    };
    let thread = std::thread::Builder::new().name(name).spawn(run).unwrap();
    ip(&format!("link set {interface} netns {}", from_peer.recv().unwrap()));
    to_peer.send(()).unwrap();
    thread
}

/// Runs a test with these capabilities and no others.
pub(crate) fn with_capabilities(capabilities: CapabilitySet, test: impl FnOnce()) {
    let before = rustix::thread::capabilities(None).unwrap();
    let sets = CapabilitySets { effective: capabilities, ..before };
    rustix::thread::set_capabilities(None, sets).unwrap();
    test();
    rustix::thread::set_capabilities(None, before).unwrap();
}

/// Makes this thread that of another user, without groups and capabilities, and without a way to get any: for good. The kernel keeps users and
/// capabilities by thread, so that other threads stay what they are.
pub(crate) fn drop_privileges() {
    let (user, group) = (Uid::from_raw(65_534), Gid::from_raw(65_534));
    rustix::thread::set_no_new_privs(true).unwrap();
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_res_gid(group, group, group).unwrap();
    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
    let left = rustix::thread::capabilities(None).unwrap();
    assert_eq!((left.effective, left.permitted), (CapabilitySet::empty(), CapabilitySet::empty()));
}

/// Runs a command, of words without quotes, that must succeed.
#[track_caller]
pub(crate) fn command(words: &str) -> String {
    let mut words_of = words.split_whitespace();
    let output = Command::new(words_of.next().unwrap()).args(words_of).output().unwrap();
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// `ip`, with these arguments.
#[track_caller]
pub(crate) fn ip(arguments: &str) {
    command(&format!("ip {arguments}"));
}
