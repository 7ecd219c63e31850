//! Memory of a front end that this process cannot map: the memory of a GPU, whose driver exports it
//! as a file, imports it in another process, and copies to it and from it.
//!
//! ```text
//!   the front end's file ──┬── it has a size ────► mapped:   bytes are stored and loaded
//!                          ├── a dma-buf ────────► imported: bytes go by write and read, each between two calls of the kernel
//!                          └── it has no size ───► imported: an Importer makes ImportedMemory of it, bytes go by write and read
//! ```
//!
//! A file of memory (memfd, tmpfs, hugetlbfs) has a size. What a GPU's driver exports is a file of
//! the driver's own, without a size. Rings, indirect tables and the answers of the control queue
//! must be in mapped memory. Every call costs a system call or more, so headers should be in mapped
//! memory, too: a driver posts such memory for payload only. Buffers that follow each other in one
//! region are copied by one call.
//!
//! A copy that fails loses its frame, which is counted as
//! [`CopyFailed`](crate::device::DropReason::CopyFailed). The ring continues.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

/// Memory that is reached by copies. Dropping it releases what the import has acquired; no call is
/// running then.
pub trait ImportedMemory: Debug + Send + Sync {
    /// Copies `bytes` to the memory, from its byte `offset` on. Returns when the bytes are there.
    /// The device has checked that they are within the length that was imported.
    ///
    /// # Errors
    ///
    /// They were not copied, or only in part.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Copies bytes of the memory, from its byte `offset` on, and fills `bytes`. The device has
    /// checked the range as for [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// They were not copied, or only in part.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Imports memory that front ends send as files. See
/// [`Options::importer`](crate::device::Options::importer).
pub trait Importer: Debug + Send + Sync {
    /// Imports the first `len` bytes of the memory that `file` stands for. The front end chooses
    /// both, and may lie about both. The descriptor stays open as long as the memory.
    ///
    /// # Errors
    ///
    /// The file is no such memory, or has other than `len` bytes, or cannot be imported. The device
    /// refuses the front end's message.
    fn import(&self, file: BorrowedFd<'_>, len: u64) -> io::Result<Box<dyn ImportedMemory>>;
}
