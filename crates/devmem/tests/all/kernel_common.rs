//! A network namespace for a test's thread, in which the kernel is the peer behind a tap.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use crate::memory_common::until;
use netmem_testing::{installed, skip};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::process::Command;
use std::thread::Builder;

/// Runs `work` on a thread with a network of its own, which ends with the thread. The test is
/// skipped if there is no such network, or if `work` returns a reason.
#[track_caller]
pub fn in_a_network(work: impl FnOnce() -> Result<(), String> + Send) {
    let why = std::thread::scope(|s| {
        // The thread has the test's name, so that a panic names it.
        let thread = Builder::new().name(std::thread::current().name().unwrap_or("kernel").to_owned());
        let thread = thread.spawn_scoped(s, || network().and_then(|()| work())).expect("a thread");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).err()
    });
    if let Some(why) = why {
        skip(&why);
    }
}

fn network() -> Result<(), String> {
    installed(&["ip"])?;
    if !std::path::Path::new("/dev/net/tun").exists() {
        return Err("there is no /dev/net/tun".to_owned());
    }
    // SAFETY: only the network namespace is no longer shared; descriptors stay those of the
    // process.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.map_err(|e| format!("a network namespace needs root: {e}"))
}

/// Assigns 10.79.0.1 and fd79::1 to the kernel on the tap `name`, which must exist.
pub fn addresses(name: &str) -> Result<(), String> {
    let dad = format!("/proc/sys/net/ipv6/conf/{name}/accept_dad");
    std::fs::write(&dad, "0").map_err(|e| format!("{dad} cannot be set: {e}"))?;
    ip(&format!("link set {name} address 02:00:00:00:00:01"))?;
    ip(&format!("addr add 10.79.0.1/24 dev {name}"))?;
    ip(&format!("-6 addr add fd79::1/64 dev {name}"))?;
    // The kernel can send from an IPv6 address at once. It receives for the address only after it
    // has made its route, which it does concurrently.
    let local = "fd790000000000000000000000000001 80 ";
    until(|| std::fs::read_to_string("/proc/thread-self/net/ipv6_route").expect("it is there").contains(local));
    Ok(())
}

/// Runs `ip` with these arguments, in this thread's network.
pub fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("it is installed");
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {}", errors.trim())) }
}
