//! The command as a child process, for the tests of the command.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs)]

pub mod netns;

pub use netmem_testing::process::{Background, PATIENCE, await_that, errors, json};
#[allow(unused_imports, reason = "not every test needs a program or the kernel as a peer")]
pub(crate) use netmem_testing::{installed, skip};
use rustix::process::Pid;
pub use rustix::process::Signal;
use serde_json::Value;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

pub fn netmem() -> Command {
    Command::new(env!("CARGO_BIN_EXE_netmem"))
}

pub fn run(args: &[&str]) -> Output {
    netmem().args(args).output().unwrap()
}

/// Exit status and what standard error must name.
#[track_caller]
pub fn fails(args: &[&str], status: i32, says: &[&str]) {
    let output = run(args);
    let errors = errors(&output);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {errors}");
    assert!(output.stdout.is_empty(), "{args:?}");
    for word in says {
        assert!(errors.contains(word), "{args:?} does not say `{word}`: {errors}");
    }
    assert!(!errors.contains("panicked"), "{errors}");
}

/// The command in the background.
pub fn background(args: &[&str]) -> Background {
    Background::start(netmem().args(args))
}

/// The command with `args` and `--fd N`, where N is the descriptor `fd`.
pub fn with_descriptor(fd: impl Into<OwnedFd>, args: &[&str]) -> Background {
    let fd = fd.into();
    let number = fd.as_raw_fd();
    let mut command = netmem();
    command.args(args).args(["--fd", &number.to_string()]);
    // SAFETY: only calls that are safe after a fork.
    unsafe {
        command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let child = Background::start(&mut command);
    drop(fd);
    child
}

/// A device that listens, and its socket in a directory of its own.
pub fn device(port: &str) -> (Background, PathBuf, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("device.sock");
    let mut device = background(&["device", "--listen", socket.to_str().unwrap(), "--port", port]);
    // The path is there a moment before a connection succeeds.
    device.says("listening on");
    (device, socket, dir)
}

/// A device with `--stats`, and `args` beside.
pub struct Device {
    pub process: Background,
    pub socket: PathBuf,
    pub stats: PathBuf,
    _dir: TempDir,
}

impl Device {
    pub fn start(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [socket, stats] = ["device", "stats"].map(|name| dir.path().join(name));
        let paths = ["device", "--listen", socket.to_str().unwrap(), "--stats", stats.to_str().unwrap()];
        let mut process = background(&[&paths[..], args].concat());
        // Both sockets take connections then.
        process.says("listening on");
        Self { process, socket, stats, _dir: dir }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.process.0)
    }

    pub fn connect(&self) -> UnixStream {
        patient(UnixStream::connect(&self.socket).unwrap())
    }

    pub fn stats(&self) -> Value {
        stats(&self.stats)
    }

    pub fn front_ends(&self, what: &str) -> u64 {
        self.stats()["front_ends"][what].as_u64().unwrap()
    }

    /// Receives through it, as a well-behaved front end.
    #[track_caller]
    pub fn serves_perf(&self) {
        let backend = format!("vhost-user:{}", self.socket.display());
        let args = ["--device", &backend, "--mode", "small", "--alloc", "pool", "--duration", "20ms", "--runs", "1"];
        let report = json(&run(&[&args[..], &["--json"]].concat()));
        assert!(report["variants"][0]["frames"].as_u64() > Some(0), "{report}");
    }

    #[track_caller]
    pub fn ends_at(mut self, signal: Signal) {
        self.process.signal(signal);
        let (status, _, err) = self.process.end();
        assert_eq!(status, Some(0), "{err}");
    }
}

pub fn stats(socket: &Path) -> Value {
    let mut text = String::new();
    patient(UnixStream::connect(socket).unwrap()).read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// A hang fails the test instead of hanging it.
pub fn patient(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}
