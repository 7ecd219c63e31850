//! Why memory of a front end was refused, or could not be reached.
//!
//! These are errors of this layer alone. The device adds which message was refused.

/// Why the memory of a front end was refused, or could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A file of the front end that does not lie in memory.
    #[error("{what} is not a memory file (memfd, tmpfs or hugetlbfs)")]
    NotMemory {
        /// What the file is for.
        what: &'static str,
    },
    /// A file of the front end that is shorter than the range to map.
    #[error("{what}: {len} bytes from byte {offset} of a file of {file} bytes")]
    SharedFile {
        /// What the file is for.
        what: &'static str,
        /// Where the range begins.
        offset: u64,
        /// Bytes of the range.
        len: u64,
        /// The file's length.
        file: u64,
    },
    /// No regions, or too many.
    #[error("{count} memory regions, 1 to {max} are possible")]
    RegionCount {
        /// Regions.
        count: usize,
        /// Most that there can be.
        max: usize,
    },
    /// Descriptors and regions do not pair up.
    #[error("{regions} memory regions with {fds} file descriptors")]
    RegionFds {
        /// Regions.
        regions: usize,
        /// File descriptors.
        fds: usize,
    },
    /// A region of no bytes, or one that wraps around.
    #[error("memory region {index}: {size:#x} bytes at {addr:#x}, file offset {offset:#x}, are empty or wrap around")]
    RegionRange {
        /// The region's number.
        index: usize,
        /// Its guest address.
        addr: u64,
        /// Its bytes.
        size: u64,
        /// Its offset in the file.
        offset: u64,
    },
    /// A region that does not consist of whole pages. Regions of a few bytes would let a front end
    /// cut each buffer into as many pieces.
    #[error(
        "memory region {index}: {size:#x} bytes at {addr:#x} (user address {user:#x}), file offset {offset:#x}, are not whole \
         pages of 4096 bytes"
    )]
    RegionUnaligned {
        /// The region's number.
        index: usize,
        /// Its guest address.
        addr: u64,
        /// Its user address.
        user: u64,
        /// Its bytes.
        size: u64,
        /// Its offset in the file.
        offset: u64,
    },
    /// Two regions with an address in common.
    #[error("memory regions {a} and {b} overlap")]
    RegionOverlap {
        /// The number of the first.
        a: usize,
        /// The number of the second.
        b: usize,
    },
    /// A region that reaches beyond the end of its file.
    #[error("memory region {index} ends at byte {end} of a file of {file} bytes")]
    RegionBeyondFile {
        /// The region's number.
        index: usize,
        /// Where it ends.
        end: u64,
        /// The file's length.
        file: u64,
    },
    /// The kernel refused to map a region.
    #[error("memory region {index} cannot be mapped")]
    RegionMap {
        /// The region's number.
        index: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file without a size that [`MemoryLimits::importer`](super::MemoryLimits::importer) cannot
    /// import.
    #[error("memory region {index} cannot be imported")]
    RegionImport {
        /// The region's number.
        index: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A region that can be shortened, although
    /// [`MemoryLimits::require_sealed`](super::MemoryLimits::require_sealed) is set.
    #[error("memory region {index} is not sealed against shrinking (F_SEAL_SHRINK), and sealed memory is required")]
    RegionUnsealed {
        /// The region's number.
        index: usize,
    },
    /// A region of a file that is not kernel memory, although
    /// [`MemoryLimits::any_memory_file`](super::MemoryLimits::any_memory_file) is not set. The file
    /// system of such a file can block the device.
    #[error(
        "memory region {index} is not of a memory file (memfd, tmpfs, hugetlbfs or dma-buf): have the front end share such \
         memory, or accept any file (any_memory_file, --any-memory-file), whose file system can then block the device"
    )]
    RegionNotMemory {
        /// The region's number.
        index: usize,
    },
    /// More memory than [`MemoryLimits::max_bytes`](super::MemoryLimits::max_bytes), or
    /// [`MAX_BYTES`](super::MAX_BYTES).
    #[error("{bytes} bytes of memory, and {max} are the limit for a front end")]
    Limit {
        /// Bytes that would be mapped.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// A region to be removed that is not in the table: another address, or another size.
    #[error("there is no memory region of {size:#x} bytes at {addr:#x}")]
    NoSuchRegion {
        /// Its guest address.
        addr: u64,
        /// Its bytes.
        size: u64,
    },
    /// A system call on a front end's file failed.
    #[error("{what}")]
    Io {
        /// What the file is for.
        what: &'static str,
        /// Why the call failed.
        #[source]
        source: std::io::Error,
    },
}

/// A copy to or from [imported memory](super::import) has failed. The first failure of each region
/// was logged.
#[derive(Debug)]
pub(crate) struct CopyFailed;
