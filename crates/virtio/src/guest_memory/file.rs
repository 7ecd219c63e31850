//! The file of a region: what the kernel reports of it without its file system.
//!
//! Why without: the front end chooses the file, and may serve its file system. A question to that
//! file system could wait without a limit.

use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, FileType, SealFlags, Statx, StatxFlags, statx};
use rustix::io::Errno;

use crate::vhost_user::received::Received;

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    /// A memfd, or a file on tmpfs or hugetlbfs, with these seals.
    Memory(SealFlags),
    /// A buffer of a driver, which has a size, and can be mapped.
    DmaBuf,
    /// Any other file: one of a disk, one that another process serves, a device, a socket.
    Other,
}

impl FileKind {
    pub(super) fn of(fd: &Received) -> Self {
        match rustix::fs::fcntl_get_seals(fd) {
            Ok(seals) => Self::Memory(seals),
            Err(_) if is_dma_buf(fd) => Self::DmaBuf,
            Err(_) => Self::Other,
        }
    }
}

/// Whether a descriptor is a dma-buf: its `fdinfo` then has a line with the name of the exporter,
/// which no other kind of file has. The file's name does not prove it: a peer can use the name of a
/// dma-buf in a file system of its own.
#[cold]
fn is_dma_buf(fd: &Received) -> bool {
    let info = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd()));
    info.is_ok_and(|info| info.lines().any(|line| line.starts_with("exp_name:")))
}

/// What the kernel has of a file already: no request to a file system.
pub(super) fn measure(fd: &Received) -> Result<Statx, Errno> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::SIZE | StatxFlags::BLOCKS;
    statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, wanted)
}

/// Whether a descriptor may be what a GPU's driver exports: a device, a socket or an anonymous
/// file, without a size. A regular file or a directory may be of a file system that the peer
/// serves, and what an importer asks of it could wait.
pub(super) fn is_driver_file(stat: &Statx) -> bool {
    let kind = FileType::from_raw_mode(stat.stx_mode.into());
    stat.stx_size == 0 && !matches!(kind, FileType::RegularFile | FileType::Directory)
}

/// The file system of a file, and the file's number there.
pub(super) type FileId = (u32, u32, u64);

/// See [`FileId`].
pub(super) fn id(stat: &Statx) -> FileId {
    (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
}

/// A file that regions are made of, and its allocated size when it was first mapped.
#[derive(Debug)]
pub(super) struct SourceFile {
    fd: Received,
    id: FileId,
    sealed: bool,
    before: u64,
}

impl SourceFile {
    /// `stat` is what [`measure`] returned of `fd`. `sealed`: the file cannot be shortened.
    pub(super) fn new(fd: Received, stat: &Statx, sealed: bool) -> Self {
        Self { fd, id: id(stat), sealed, before: allocated(stat) }
    }

    pub(super) fn id(&self) -> FileId {
        self.id
    }

    /// Whether the file cannot be shortened.
    pub(super) fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// The allocated size when the file was first mapped, in bytes.
    pub(super) fn allocated_before(&self) -> u64 {
        self.before
    }

    /// The allocated size now, in bytes. A system call.
    pub(super) fn allocated(&self) -> u64 {
        measure(&self.fd).map_or(self.before, |stat| allocated(&stat))
    }
}

/// The allocated size of a file, in bytes.
fn allocated(stat: &Statx) -> u64 {
    stat.stx_blocks.saturating_mul(512)
}
