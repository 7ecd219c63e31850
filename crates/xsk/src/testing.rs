//! Network namespaces for this crate's unit tests. Integration tests have
//! `netmem_testing::namespace`, which knows more; unit tests are in the package's archive, and that
//! crate is not published.

use rustix::thread::{CapabilitySet, CapabilitySets};
use std::process::Command;

/// What a test of AF_XDP needs and this machine lacks.
fn missing() -> Option<String> {
    if std::env::var("NETMEM_AF_XDP").as_deref() == Ok("none") {
        return Some("NETMEM_AF_XDP=none".into());
    }
    if !rustix::process::geteuid().is_root() {
        return Some("not root".into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let absent = |program: &&&str| !std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    ["ip", "mount", "umount"].iter().find(absent).map(|program| format!("{program} is not installed"))
}

/// Runs a test on a thread that has a network namespace and mounts of its own, or reports it as
/// skipped. If `NETMEM_NO_SKIP=1` promises that everything is installed, a skip is a failure,
/// except for `NETMEM_AF_XDP=none`.
pub(crate) fn in_namespace(test: impl FnOnce() + Send) {
    let name = std::thread::current().name().unwrap_or("test").to_owned();
    if let Some(why) = missing() {
        let promised = std::env::var("NETMEM_NO_SKIP").as_deref() == Ok("1") && why != "NETMEM_AF_XDP=none";
        assert!(!promised, "skipped, and NETMEM_NO_SKIP is set: {why}");
        eprintln!("skipped: {name}: {why}");
        return;
    }
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
        let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, run).expect("a thread");
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs a test with these capabilities and no others.
pub(crate) fn with_capabilities(capabilities: CapabilitySet, test: impl FnOnce()) {
    let before = rustix::thread::capabilities(None).expect("this thread's capabilities");
    let sets = CapabilitySets { effective: capabilities, ..before };
    rustix::thread::set_capabilities(None, sets).expect("fewer capabilities");
    test();
    rustix::thread::set_capabilities(None, before).expect("the permitted capabilities");
}

/// Runs a command, of words without quotes, that must succeed.
#[track_caller]
pub(crate) fn command(words: &str) -> String {
    let mut words_of = words.split_whitespace();
    let mut command = Command::new(words_of.next().expect("a program"));
    let output = command.args(words_of).output().expect("the program can be run");
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// `ip`, with these arguments.
#[track_caller]
pub(crate) fn ip(arguments: &str) {
    command(&format!("ip {arguments}"));
}
