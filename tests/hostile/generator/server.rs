//! `netmem serve` as a process of this thread's namespace.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The tap's name. Each server has a namespace of its own.
pub const TAP: &str = "t0";
pub const V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
pub const V6: Ipv6Addr = Ipv6Addr::new(0xfd79, 0, 0, 0, 0, 0, 0, 2);
/// A server that does not start or end in this time hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// The services that are attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    Echo,
    Discard,
    Http,
}

impl Service {
    pub fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Discard => "discard",
            Self::Http => "http",
        }
    }

    pub fn port(self) -> u16 {
        match self {
            Self::Echo => 7,
            Self::Discard => 9,
            Self::Http => 80,
        }
    }
}

pub struct Server {
    child: Child,
    handle: OwnedFd,
    service: Service,
    out: Option<JoinHandle<String>>,
    err: Option<JoinHandle<String>>,
}

impl Server {
    /// Returns when it serves.
    #[track_caller]
    pub fn start(command: &Path, service: Service, args: &[&str]) -> Self {
        let mut child = Command::new(command)
            .args(["serve", service.name(), "--port", &format!("tap:{TAP}"), "--addr", &format!("{V4}/8,{V6}/64")])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", command.display()));
        let (say, said) = mpsc::channel();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let err = std::thread::spawn(move || {
            let mut text = String::new();
            while let Ok(1..) = errors.read_line(&mut text) {
                // The test listens to the first line.
                let _ = say.send(text.clone());
            }
            text
        });
        let mut output = child.stdout.take().unwrap();
        let out = std::thread::spawn(move || {
            let mut text = String::new();
            output.read_to_string(&mut text).unwrap();
            text
        });
        let pid = Pid::from_child(&child);
        let handle = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let server = Self { child, handle, service, out: Some(out), err: Some(err) };
        let ready = format!("ready: {}", service.name());
        while !said.recv_timeout(PATIENCE).expect("the server starts").contains(&ready) {}
        server
    }

    pub fn service(&self) -> Service {
        self.service
    }

    pub fn address(family: &IpAddr) -> IpAddr {
        if family.is_ipv4() { V4.into() } else { V6.into() }
    }

    /// The server has ended by itself: the test fails with what it wrote.
    #[track_caller]
    pub fn ended(&mut self) -> ! {
        let status = self.child.wait().unwrap();
        let errors = self.err.take().map(|thread| thread.join().unwrap_or_default());
        panic!("the server has ended ({status}): {}", errors.unwrap_or_default());
    }

    /// Ends it by a signal. Pages that did not come back are an error of the server.
    #[track_caller]
    pub fn end(mut self) -> Report {
        pidfd_send_signal(&self.handle, Signal::TERM).unwrap();
        let mut ended = [rustix::event::PollFd::new(&self.handle, rustix::event::PollFlags::IN)];
        let most = PATIENCE.try_into().unwrap();
        assert_eq!(rustix::event::poll(&mut ended, Some(&most)), Ok(1), "the server does not end");
        let status = self.child.wait().unwrap();
        let [out, err] = [self.out.take(), self.err.take()].map(|thread| thread.unwrap().join().unwrap());
        assert!(status.success(), "{status}: {err}");
        assert!(out.contains("all came back"), "{out}");
        Report(out)
    }

    /// The sum of a number over the server's threads.
    fn threads(&self, file: &str, number: impl Fn(&str) -> u64) -> u64 {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let read =
            |thread: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(thread.unwrap().path().join(file));
        threads.map(read).map(|text| number(&text.unwrap())).sum()
    }

    /// The CPU time of all its threads.
    pub fn cpu(&self) -> Duration {
        let nanos = |text: &str| text.split(' ').next().unwrap().parse().unwrap();
        Duration::from_nanos(self.threads("schedstat", nanos))
    }

    /// How often its threads have gone to sleep.
    pub fn sleeps(&self) -> u64 {
        self.threads("status", |text| field(text, "voluntary_ctxt_switches:"))
    }

    /// Its resident memory, in KiB.
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        field(&status, "VmRSS:")
    }
}

/// A number of a table of the kernel.
fn field(text: &str, name: &str) -> u64 {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    rest.split_whitespace().next().unwrap().parse().unwrap()
}

impl AsFd for Server {
    /// Becomes readable when the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the server prints at its end.
#[derive(Debug)]
pub struct Report(String);

impl Report {
    /// The number before these words.
    #[track_caller]
    pub fn number(&self, words: &str) -> u64 {
        let at = self.0.find(words).unwrap_or_else(|| panic!("no `{words}`: {}", self.0));
        let number = self.0[..at].rsplit(|c: char| !c.is_ascii_digit()).next();
        number.unwrap().parse().unwrap_or_else(|_| panic!("no number before `{words}`: {}", self.0))
    }

    /// Connections that were accepted, and those of them that ended with an error.
    #[track_caller]
    pub fn served(&self) -> (u64, u64) {
        (self.number(" connections,"), self.number(" of them broken"))
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
