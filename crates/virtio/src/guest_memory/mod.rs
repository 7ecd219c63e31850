//! Guest memory: the memory of a front end, as the device reaches it.
//!
//! Why a layer of its own: descriptors have guest addresses, which mean nothing in this process.
//! Rings, ports and the control side all need the same translation, the same bounds and the same
//! marks of what was written. Therefore this module lies below the rings, and the rings below the
//! device.
//!
//! ```text
//!   SET_MEM_TABLE ─► a new table ───────────────────┐
//!   ADD_MEM_REG   ─► the old regions and one more ──┼─► each pair, between two passes
//!   REM_MEM_REG   ─► the old regions without one ───┘     the old table is dropped;
//!                                                         regions in no table are unmapped
//! ```
//!
//! * *A table never changes.* A new table replaces it as a whole. Both share the regions that stay,
//!   so that adding a region remaps nothing.
//! * *A translation does not outlive its pass.* A pass translates by a `View` (`view.rs`), which
//!   borrows the table of the pair that the pass has locked. Between two passes a queue stores the
//!   index of the region that it used last, and no address.
//!
//! A file without a size is not mapped but [imported](import), if the device has an importer. The
//! device imports a dma-buf by itself. An imported region has no address in this process: a
//! translation does not find it, and its bytes are copied by their guest addresses.
//!
//! | file | what it has |
//! | --- | --- |
//! | `table.rs` | the regions of a front end, by guest address |
//! | `region.rs` | one region: its description, its limits, and how its bytes are reached |
//! | `file.rs` | the file of a region: its kind, its seals, its allocated size |
//! | `view.rs` | the translation of addresses during one pass |
//! | `buffer.rs`, `copy.rs` | the buffers of a chain, and copies to them and from them |
//! | `import.rs`, `dma_buf.rs`, `cuda.rs` | memory that is reached by copies |
//! | `mapping.rs` | a front end's file that is not guest memory: dirty log, in-flight region |
//! | `dirty_log.rs` | the pages that the device has written, for live migration |
//! | `error.rs` | why memory was refused |
//!
//! # What a front end can do with its files
//!
//! * *It can shorten a file that is not sealed*, and punch holes into every file. The device's next
//!   access is then a SIGBUS, which the process survives with the
//!   [handler](netmem_pool::sigbus): the rings stop, and their fault is
//!   [`MemoryLost`](crate::device::DriverFault::MemoryLost). Seals (`F_SEAL_SHRINK`) are counted,
//!   and [`MemoryLimits::require_sealed`] refuses memory without them.
//! * *It can make this process allocate its memory.* A page of a memfd or of a file on tmpfs is
//!   charged to the memory control group of the process that touches it first. If a guest posts
//!   buffers that it has never written, the device touches them first. The device writes only to
//!   posted buffers, and all of them are in mapped regions. The bound is therefore the number of
//!   bytes mapped, [`MemoryLimits::max_bytes`]. By default it is [`MAX_BYTES`], which only keeps
//!   addresses free: the device does not know how large a guest's memory may be, and most of it is
//!   charged to other processes. [`MemoryUse`] reports how much the files have grown.
//! * *It can share a file of its own file system* (FUSE), and then not answer. Measuring and
//!   mapping such a file, and each access, wait for that file system without a limit, and a pass
//!   accesses it with the pair locked. By default the memory must therefore be a file of kernel
//!   memory: one that has seals (memfd, tmpfs, hugetlbfs), or a dma-buf. The kernel answers both
//!   questions without the file system, and they come before all others.
//!   [`MemoryLimits::any_memory_file`] accepts other files, with this risk.

pub(crate) mod buffer;
pub(crate) mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
pub(crate) mod dirty_log;
mod dma_buf;
mod error;
mod file;
pub mod import;
pub(crate) mod mapping;
mod region;
mod table;
pub(crate) mod view;

pub(crate) use self::error::CopyFailed;
pub use self::error::MemoryError;
pub use self::region::{MAX_BYTES, MemoryLimits, RegionInfo};
pub use self::table::{MAX_REGIONS, MemoryTable, MemoryUse};
