//! Network namespaces for tests: a thread gets one of its own, and what is in it goes with the
//! thread.

use crate::{installed, skip};
use rustix::fs::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

/// Whether AF_XDP can be tested. If not, the running test is reported as skipped.
/// `NETMEM_AF_XDP=none` announces a kernel without AF_XDP: then the skip is no
/// failure under `NETMEM_NO_SKIP` either. CI sets it after it has asked the kernel.
pub fn af_xdp() -> bool {
    if std::env::var("NETMEM_AF_XDP").as_deref() == Ok("none") {
        let thread = std::thread::current();
        let _ = writeln!(std::io::stderr(), "skipped: {}: NETMEM_AF_XDP=none", thread.name().unwrap_or("a test"));
        return false;
    }
    match missing() {
        Some(why) => {
            skip(&why);
            false
        }
        None => true,
    }
}

/// The interfaces that the tests are to use in place of a veth pair, and ours is to be in zero-copy
/// mode: `NETMEM_XSK_NICS=OURS,THEIRS`. They are set up, and what one sends the other receives.
/// `tests/peers/xsk.py` runs the tests so, in a guest whose driver has the mode.
pub fn nics() -> Option<(String, String)> {
    let nics = std::env::var("NETMEM_XSK_NICS").ok()?;
    nics.split_once(',').map(|(ours, theirs)| (ours.to_owned(), theirs.to_owned()))
}

/// What a test of AF_XDP lacks: on the interfaces that are given, or else on a veth pair in a
/// namespace of its own.
fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root".into());
    }
    // SAFETY: no memory is passed. The descriptor is closed.
    let socket = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Some(format!("no AF_XDP socket can be made: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: as above.
    unsafe { libc::close(socket) };
    if nics().is_some() {
        return None;
    }
    if let Err(why) = installed(&["ip", "ethtool", "mount", "umount"]) {
        return Some(why);
    }
    // On a thread of its own, because a namespace cannot be left.
    // SAFETY: the thread ends at once.
    let unshare = || match unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) } {
        0 => None,
        _ => Some(format!("no network namespace can be made: {}", std::io::Error::last_os_error())),
    };
    std::thread::spawn(unshare).join().unwrap()
}

/// Runs a test on a thread that has a network namespace and mounts of its own. Programs that it
/// starts have them, too. Skips the test if AF_XDP cannot be tested.
pub fn in_namespace(test: impl FnOnce() + Send) {
    if !af_xdp() {
        return;
    }
    if nics().is_some() {
        // Where the interfaces are.
        return test();
    }
    let name = std::thread::current().name().unwrap_or("test").to_owned();
    let run = || {
        // SAFETY: the thread shares its descriptors with the others still; namespaces, the working
        // directory and the mask of new files become its own, and it uses none that it has looked
        // up before.
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

/// Runs a test on a thread that has a network of its own, in which it can make taps. Programs that
/// it starts have it, too. Skips the test if there can be no tap.
pub fn in_a_network(test: impl FnOnce() + Send) {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        return skip("taps in a network namespace need root, and /dev/net/tun");
    }
    if let Err(why) = installed(&["ip"]) {
        return skip(&why);
    }
    let name = std::thread::current().name().unwrap_or("test").to_owned();
    std::thread::scope(|scope| {
        let run = || {
            // SAFETY: the thread uses no descriptor of the network that it leaves.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "{}", std::io::Error::last_os_error());
            ip("link set lo up");
            test();
        };
        let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, run).unwrap();
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Runs a peer on a thread that has a network namespace of its own, to which `interface` is moved
/// first.
pub fn in_peer_namespace(interface: &str, peer: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
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
pub fn with_capabilities(capabilities: CapabilitySet, test: impl FnOnce()) {
    let before = rustix::thread::capabilities(None).unwrap();
    let sets = CapabilitySets { effective: capabilities, ..before };
    rustix::thread::set_capabilities(None, sets).unwrap();
    test();
    rustix::thread::set_capabilities(None, before).unwrap();
}

/// Makes this thread that of another user, without groups and capabilities, and without a way to
/// get any: for good. The kernel keeps users and capabilities by thread, so that other threads stay
/// what they are. It is a user that no other test has, because the kernel adds up the locked memory
/// of all processes of a user.
pub fn drop_privileges() {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Within the numbers that a container has.
    let user = 20_000 + (std::process::id() * 16 + NEXT.fetch_add(1, Ordering::Relaxed)) % 40_000;
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(65_534));
    rustix::thread::set_no_new_privs(true).unwrap();
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_res_gid(group, group, group).unwrap();
    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
    let left = rustix::thread::capabilities(None).unwrap();
    assert_eq!((left.effective, left.permitted), (CapabilitySet::empty(), CapabilitySet::empty()));
}

/// Runs a command, of words without quotes, that must succeed.
#[track_caller]
pub fn command(words: &str) -> String {
    let mut words_of = words.split_whitespace();
    let output = Command::new(words_of.next().unwrap()).args(words_of).output().unwrap();
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// `ip`, with these arguments.
#[track_caller]
pub fn ip(arguments: &str) {
    command(&format!("ip {arguments}"));
}
