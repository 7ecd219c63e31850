//! The state file: the connections of a server that has ended. The next server continues them.
//!
//! ```text
//!   "netmem serve state 2\n" │ bytes behind this header │ their CRC-32 │ State, by postcard
//! ```
//!
//! The file contains sequence numbers and payload. A user who can read it could take over the
//! connections, so only its owner may read it. The state is written to a new file in the same
//! directory, which is renamed when it is complete. The file is removed when it has been read: a
//! server that started from an old state would send bytes again that were sent already.

use super::client::Client;
use anyhow::{Context, bail, ensure};
use netmem_inet::SavedStream;
use rustix::fs::{FileType, Mode, OFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// The first bytes of the file. The number is the version of the format, which includes the fields
/// of a saved stream and of the services' states.
const MAGIC: &[u8; 21] = b"netmem serve state 2\n";
/// Magic, length, checksum.
const HEADER: usize = MAGIC.len() + 12;

/// A connection that is saved for another process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Left<S> {
    pub(super) stream: SavedStream,
    /// Bytes to be sent after those that the stream has.
    pub(super) kept: Vec<u8>,
    /// The stream is shut down after these bytes.
    pub(super) shut: bool,
    /// The service has finished with the connection.
    pub(super) over: bool,
    /// The service's state of the connection.
    pub(super) state: S,
}

impl<S> Left<S> {
    /// Saves a connection. `None` if it has ended meanwhile.
    pub(super) fn new(client: Client, over: bool, state: S) -> Option<Self> {
        let (stream, kept, shut) = client.into_parts();
        Some(Self { stream: stream.save().ok()?, kept, shut, over, state })
    }

    /// Saves a connection that the service has closed, and that TCP has not finished.
    pub(super) fn closing(stream: SavedStream) -> Self
    where
        S: Default,
    {
        Self { stream, kept: Vec::new(), shut: true, over: true, state: S::default() }
    }
}

/// The contents of the file.
#[derive(Debug, Serialize, Deserialize)]
struct State<S> {
    version: String,
    service: String,
    connections: Vec<Left<S>>,
}

/// The state file that the user gave.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateFile<'a> {
    path: &'a Path,
    service: &'a str,
}

impl<'a> StateFile<'a> {
    /// The state file of `service` at `path`. Checks that a file can be made in its directory.
    pub(super) fn new(path: &'a Path, service: &'a str) -> anyhow::Result<Self> {
        let this = Self { path, service };
        // Checked at the start, because an error at the end would lose the connections.
        this.temporary().with_context(|| format!("--state {}: no file can be made there", path.display()))?;
        Ok(this)
    }

    fn temporary(&self) -> std::io::Result<NamedTempFile> {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // `tempfile` makes files that only their owner can read and write.
        NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))
    }

    /// Reads the connections. There are none if there is no file.
    ///
    /// # Errors
    ///
    /// The file is of another service, is damaged, or other users may read it.
    pub(super) fn read<S: DeserializeOwned>(&self) -> anyhow::Result<Vec<Left<S>>> {
        let read = || {
            let Some(bytes) = self.open()? else { return Ok(Vec::new()) };
            anyhow::Ok(self.parse(&bytes)?.connections)
        };
        read().with_context(|| {
            format!("--state {}: without this file, the server begins without its connections", self.path.display())
        })
    }

    /// Removes the file. Its connections are continued now, and must not be continued from this
    /// state again.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        match std::fs::remove_file(self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }

    fn open(&self) -> anyhow::Result<Option<Vec<u8>>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::open(self.path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let stat = rustix::fs::fstat(&file)?;
        ensure!(FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile, "it is not a file");
        ensure!(stat.st_uid == rustix::process::geteuid().as_raw(), "it belongs to another user");
        ensure!(stat.st_mode & 0o077 == 0, "other users may open it (its mode is {:o})", stat.st_mode & 0o777);
        let mut bytes = Vec::new();
        (&file).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn parse<S: DeserializeOwned>(&self, bytes: &[u8]) -> anyhow::Result<State<S>> {
        let (header, body) = bytes.split_at_checked(HEADER).context("it is not a state of netmem serve")?;
        let (magic, numbers) = header.split_at(MAGIC.len());
        ensure!(magic[..MAGIC.len() - 2] == MAGIC[..MAGIC.len() - 2], "it is not a state of netmem serve");
        ensure!(magic == MAGIC, "it has another format: another version of netmem has written it");
        let whole =
            numbers[..8] == (body.len() as u64).to_le_bytes() && numbers[8..] == crc32fast::hash(body).to_le_bytes();
        ensure!(whole, "it is damaged, or was not written to its end");
        // The version is parsed first, because the fields after it may differ in other versions.
        let (version, rest): (String, _) = postcard::take_from_bytes(body).context("it is damaged")?;
        ensure!(version == VERSION, "netmem {version} has written it, and this is {VERSION}");
        let (service, _): (String, _) = postcard::take_from_bytes(rest).context("it is damaged")?;
        ensure!(service == self.service, "it is the state of the service {service}, and this is {}", self.service);
        match postcard::take_from_bytes(body).context("it is damaged")? {
            (state, []) => Ok(state),
            _ => bail!("it is damaged"),
        }
    }

    fn bytes<S: Serialize>(&self, connections: Vec<Left<S>>) -> anyhow::Result<Vec<u8>> {
        let state = State { version: VERSION.into(), service: self.service.into(), connections };
        let body = postcard::to_stdvec(&state)?;
        let (len, sum) = ((body.len() as u64).to_le_bytes(), crc32fast::hash(&body).to_le_bytes());
        Ok([MAGIC.as_slice(), &len, &sum, &body].concat())
    }

    /// Writes all connections. If there is an error, the file is as it was before.
    pub(super) fn write<S: Serialize>(&self, connections: Vec<Left<S>>) -> anyhow::Result<()> {
        let write = || {
            let mut file = self.temporary()?;
            file.write_all(&self.bytes(connections)?)?;
            file.as_file().sync_all()?;
            file.persist(self.path)?;
            anyhow::Ok(())
        };
        write().with_context(|| format!("the connections are lost: cannot write {}", self.path.display()))
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
