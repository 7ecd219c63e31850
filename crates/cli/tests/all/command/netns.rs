//! Network namespaces: the kernel as a peer, without any trace in the namespace of the tests.

use super::installed;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A name for an interface or a namespace that no other test has.
pub fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("nm{}x{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|e| format!("ip: {e}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", args.join(" "), errors.trim())) }
}

/// What the tests of the kernel as a peer need; an error names what is missing.
pub fn missing() -> Result<(), String> {
    match std::fs::metadata("/dev/net/tun") {
        Ok(_) if rustix::process::geteuid().is_root() => {}
        Ok(_) => return Err("not root".into()),
        Err(e) => return Err(format!("/dev/net/tun: {e}")),
    }
    installed(&["ip", "python3"])?;
    Namespace::new().map(drop)
}

/// A namespace, which goes with the test.
pub struct Namespace(String);

impl Namespace {
    pub fn new() -> Result<Self, String> {
        let namespace = Self(name());
        ip(&["netns", "add", &namespace.0])?;
        Ok(namespace)
    }

    fn ip(&self, args: &[&str]) {
        ip(&[&["-n", &self.0], args].concat()).unwrap();
    }

    /// Moves `interface` here, assigns `addresses` to it and sets it up.
    pub fn takes(&self, interface: &str, addresses: &[&str]) {
        ip(&["link", "set", interface, "netns", &self.0]).unwrap();
        self.address(interface, addresses);
        self.ip(&["link", "set", interface, "up"]);
    }

    /// Sets the loopback interface up.
    pub fn loopback(&self) {
        self.ip(&["link", "set", "lo", "up"]);
    }

    /// A tap that stays, with an address.
    pub fn tap(&self, address: &str) -> String {
        self.tap_of(&[], &[address])
    }

    /// A tap that stays and has several queues, with addresses.
    pub fn tap_of_queues(&self, addresses: &[&str]) -> String {
        self.tap_of(&["multi_queue"], addresses)
    }

    fn tap_of(&self, flags: &[&str], addresses: &[&str]) -> String {
        let tap = name();
        self.ip(&[&["tuntap", "add", &tap, "mode", "tap", "vnet_hdr"], flags].concat());
        self.address(&tap, addresses);
        self.ip(&["link", "set", &tap, "up"]);
        tap
    }

    fn address(&self, interface: &str, addresses: &[&str]) {
        for address in addresses {
            let nodad: &[_] = if address.contains(':') { &["nodad"] } else { &[] };
            self.ip(&[&["address", "add", address, "dev", interface], nodad].concat());
        }
    }

    /// A command there.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, program]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// A program in Python there, with its arguments.
    pub fn python(&self, program: &str, args: &[&str]) -> Child {
        self.command("python3").args(["-c", program]).args(args).spawn().unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = ip(&["netns", "delete", &self.0]);
    }
}

/// Waits for the end of a program that must succeed; what it printed.
#[track_caller]
pub fn printed(child: Child) -> String {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    assert!(status.success(), "{status}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}
