//! The command as a child process, for the tests of the command.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs)]

pub mod netns;

#[allow(unused_imports, reason = "not every test needs a program or the kernel as a peer")]
pub(crate) use netmem_testing::{installed, skip};
pub use rustix::process::Signal;
use rustix::process::{Pid, kill_process};
use serde_json::Value;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// After this time, a test that waits is taken for hung. Nothing here takes long; the machine may
/// have much else to do.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn netmem() -> Command {
    Command::new(env!("CARGO_BIN_EXE_netmem"))
}

pub fn run(args: &[&str]) -> Output {
    netmem().args(args).output().unwrap()
}

pub fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}: {}", output.status, errors(output));
    serde_json::from_slice(&output.stdout).unwrap()
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

/// A process that ends with the test.
pub struct Background(pub Child);

impl Background {
    pub fn start(args: &[&str]) -> Self {
        Self(netmem().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits until a signal would no longer end it at once: it has a handler for SIGINT.
    #[track_caller]
    pub fn awaits_signals(&self) {
        let path = format!("/proc/{}/status", self.0.id());
        await_that(|| {
            let status = std::fs::read_to_string(&path).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << (libc::SIGINT - 1) != 0
        });
    }

    /// Waits until it says a line on standard error that begins so. What comes behind the line is
    /// not read.
    #[track_caller]
    pub fn says(&mut self, begin: &str) {
        let stderr = self.0.stderr.as_mut().unwrap();
        let (mut said, mut byte) = (String::new(), [0]);
        loop {
            assert_eq!(stderr.read(&mut byte).unwrap(), 1, "it has ended and said: {said}");
            said.push(byte[0].into());
            if byte == *b"\n" && said.lines().last().unwrap().starts_with(begin) {
                return;
            }
        }
    }

    /// Waits for the end: status, standard output, standard error. Both are read meanwhile, because
    /// a report can be larger than a pipe.
    #[track_caller]
    pub fn end(&mut self) -> (Option<i32>, String, String) {
        fn read(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
            std::thread::spawn(move || {
                let mut text = String::new();
                from.read_to_string(&mut text).unwrap();
                text
            })
        }
        let (out, err) = (read(self.0.stdout.take().unwrap()), read(self.0.stderr.take().unwrap()));
        let begin = Instant::now();
        let status = loop {
            match self.0.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(begin.elapsed() < PATIENCE, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        (status.code(), out.join().unwrap(), err.join().unwrap())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command with `args` and `--fd N`, where N is the descriptor `fd`.
pub fn with_descriptor(fd: impl Into<OwnedFd>, args: &[&str]) -> Background {
    let fd = fd.into();
    let number = fd.as_raw_fd();
    let mut command = netmem();
    command.args(args).args(["--fd", &number.to_string()]).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: only calls that are safe after a fork.
    unsafe {
        command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let child = command.spawn().unwrap();
    drop(fd);
    Background(child)
}

/// A device that listens, and its socket in a directory of its own.
pub fn device(port: &str) -> (Background, PathBuf, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("device.sock");
    let mut device = Background::start(&["device", "--listen", socket.to_str().unwrap(), "--port", port]);
    // The path is there a moment before a connection succeeds.
    device.says("listening on");
    (device, socket, dir)
}

#[track_caller]
pub fn await_that(mut what: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
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
        let mut process = Background::start(&[&paths[..], args].concat());
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
