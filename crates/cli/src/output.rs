//! Standard output, which somebody may have closed: `netmem | head` is no failure.

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Prints `text` and the end of its line.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("cannot write to standard output"),
        _ => Ok(()),
    }
}

/// Prints one JSON object.
pub(crate) fn json(object: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(object)?)
}

/// Prints a line on standard output if it can be taken at once. For a service, whose reader may have stopped reading.
pub(crate) fn offer(text: &str) {
    let mut out = std::io::stdout().lock();
    if takes(&out) {
        let _ = writeln!(out, "{text}");
    }
}

/// Lines that are logged in a second.
const LINES: u32 = 100;

/// Standard error, for lines that other processes can cause: neither a reader that has stopped nor a peer that repeats a
/// fault in a loop makes this process wait or fills a disk. A line that cannot be taken at once is dropped, and so is
/// what exceeds 100 lines a second; the next line says how many were.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log;

struct Logged {
    since: Option<Instant>,
    lines: u32,
    dropped: u64,
}

static LOGGED: Mutex<Logged> = Mutex::new(Logged { since: None, lines: 0, dropped: 0 });

impl Log {
    /// Logs a line.
    pub(crate) fn line(mut self, text: &str) {
        let _ = writeln!(self, "{text}");
    }
}

impl Write for Log {
    /// Takes a whole line.
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.since.is_none_or(|since| since.elapsed() >= Duration::from_secs(1)) {
            (logged.since, logged.lines) = (Some(Instant::now()), 0);
        }
        let mut err = std::io::stderr().lock();
        if logged.lines == LINES || !takes(&err) {
            logged.dropped += 1;
            return Ok(line.len());
        }
        logged.lines += 1;
        let mut text = Vec::with_capacity(line.len());
        match std::mem::take(&mut logged.dropped) {
            0 => {}
            n => writeln!(text, "({n} lines were not written)")?,
        }
        text.extend_from_slice(line);
        // So much is taken without a wait by a pipe that takes anything.
        text.truncate(rustix::pipe::PIPE_BUF);
        let _ = err.write_all(&text);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Whether a write of up to [`rustix::pipe::PIPE_BUF`] bytes does not wait.
fn takes(fd: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|_| fds[0].revents().contains(PollFlags::OUT))
}
