//! Standard output. Its reader may have closed it, as in `netmem | head`: that is not an error.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::error::Error;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Prints `text` and a line end.
///
/// # Errors
///
/// Standard output cannot be written, for another reason than that its reader has closed it.
pub fn print(text: &str) -> io::Result<()> {
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(io::Error::new(e.kind(), format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// Prints one JSON object.
///
/// # Errors
///
/// As of [`print()`], and of the object's serialization.
pub fn json(object: &impl serde::Serialize) -> io::Result<()> {
    print(&serde_json::to_string_pretty(object)?)
}

/// A file that is replaced at once: the text goes into a new file next to it, which is then
/// renamed. A reader sees either the old content or all of the new content, even if this process is
/// killed. If the path is not a regular file, for example a pipe, it is written directly.
#[derive(Debug)]
pub struct Target {
    path: PathBuf,
    regular: bool,
}

impl Target {
    /// Checks that the file can be written, and leaves everything as it was.
    ///
    /// # Errors
    ///
    /// The path is a directory, or the file cannot be written.
    pub fn new(path: &Path) -> io::Result<Self> {
        // A symbolic link stays, and the file that it points to is replaced.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let target = match fs::metadata(&path) {
            Ok(there) if there.is_dir() => return Err(ErrorKind::IsADirectory.into()),
            Ok(there) => Self { regular: there.is_file(), path },
            Err(_) => Self { regular: true, path },
        };
        if target.regular {
            target.beside()?;
        } else {
            File::options().write(true).open(&target.path)?;
        }
        Ok(target)
    }

    /// The path of the file, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A new file in the same directory. It is removed when it is dropped.
    fn beside(&self) -> io::Result<tempfile::NamedTempFile> {
        let parent = self.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The permissions of the file that is replaced, or those of a new file.
        let mode = fs::metadata(&self.path).map_or(0o666, |there| there.permissions().mode());
        tempfile::Builder::new().prefix(".netmem-").permissions(Permissions::from_mode(mode)).tempfile_in(parent)
    }

    /// Replaces the content of the file.
    ///
    /// # Errors
    ///
    /// The file cannot be written or replaced. Its content is then as before.
    pub fn write(&self, bytes: &[u8]) -> io::Result<()> {
        if !self.regular {
            return File::options().write(true).open(&self.path)?.write_all(bytes);
        }
        let mut file = self.beside()?;
        file.write_all(bytes)?;
        file.persist(&self.path)?;
        Ok(())
    }
}

/// Prints a line on standard output, but only if that does not wait. For a service: its reader may
/// have stopped reading.
pub fn offer(text: &str) {
    let mut out = std::io::stdout().lock();
    if takes(&out) {
        let _ = writeln!(out, "{text}");
    }
}

/// The text of an error and of its causes.
pub fn chain(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {}", chain(cause)))
}

/// The largest number of lines that are logged in a second.
const LINES: u32 = 100;

/// Standard error, for lines that other processes can cause. A reader that has stopped reading
/// cannot make this process wait, and a peer that repeats a fault in a loop cannot fill a disk. A
/// line that cannot be written at once is dropped. Lines beyond 100 a second are dropped too. The
/// next line reports how many were dropped.
#[derive(Clone, Copy, Debug)]
pub struct Log;

struct Logged {
    since: Option<Instant>,
    lines: u32,
    dropped: u64,
}

static LOGGED: Mutex<Logged> = Mutex::new(Logged { since: None, lines: 0, dropped: 0 });

impl Log {
    /// Logs a line.
    pub fn line(mut self, text: &str) {
        let _ = writeln!(self, "{text}");
    }
}

impl Write for Log {
    /// Writes a whole line.
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
        // If a pipe accepts anything, it accepts this many bytes without a wait.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_whole_or_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new, link) = (dir.path().join("old"), dir.path().join("new"), dir.path().join("link"));
        let files = || fs::read_dir(dir.path()).unwrap().count();
        fs::write(&old, "kept").unwrap();
        fs::set_permissions(&old, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&old, &link).unwrap();
        let targets = [&old, &new, &link].map(|path| Target::new(path).unwrap());
        assert_eq!((fs::read_to_string(&old).unwrap().as_str(), files()), ("kept", 2));
        // A reader that has opened the old file still reads the old content.
        let mut reader = File::open(&old).unwrap();
        targets[2].write(b"whole").unwrap();
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "kept");
        assert_eq!(fs::read_to_string(&old).unwrap(), "whole");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&old).unwrap().permissions().mode() & 0o777, 0o640);
        targets[1].write(b"new").unwrap();
        assert_eq!((fs::read_to_string(&new).unwrap().as_str(), files()), ("new", 3));
        assert!(Target::new(&dir.path().join("none/x")).is_err() && Target::new(dir.path()).is_err());
        Target::new(Path::new("/dev/null")).unwrap().write(b"x").unwrap();
    }
}
