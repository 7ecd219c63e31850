//! A network namespace for a thread, and for the processes that it starts. It goes with them.

use netmem_testing::{installed, skip};
use std::process::Command;

/// What is missing here.
fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root".into());
    }
    if let Err(error) = std::fs::metadata("/dev/net/tun") {
        return Some(format!("/dev/net/tun: {error}"));
    }
    if let Err(why) = installed(&["ip"]) {
        return Some(why);
    }
    // On a thread of its own, because a namespace cannot be left.
    let unshare = || unshare().and_then(|()| super::link::socket().map(drop)).err();
    let error = std::thread::spawn(unshare).join().unwrap()?;
    Some(format!("no network namespace with a packet socket can be made: {error}"))
}

fn unshare() -> std::io::Result<()> {
    // SAFETY: only the thread's network namespace becomes another one. Descriptors and memory stay
    // shared.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Runs `run` on a thread with a namespace of its own. `None`, and the reason is reported, if
/// something is missing here.
#[track_caller]
pub fn in_namespace<T: Send>(run: impl FnOnce() -> T + Send) -> Option<T> {
    if let Some(why) = missing() {
        skip(&why);
        return None;
    }
    let name = std::thread::current().name().unwrap_or("test").to_owned();
    let run = || {
        unshare().unwrap();
        run()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, run).unwrap();
        match thread.join() {
            Ok(value) => Some(value),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// `ip`, with these arguments, in the thread's namespace.
#[track_caller]
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}
