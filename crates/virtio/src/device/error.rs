//! [`DeviceError`]: errors that end a connection of the device, or that keep the device from starting.

use super::port::PortError;
use crate::notify::NotifyError;
use crate::vhost_user::{LineError, Request};

/// Why the device has refused a message of the front end, or could not carry it out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device cannot be divided among no workers, or among more workers than it has queue pairs.
    #[error("{asked} workers asked for, 1 to {max} are possible: one for each queue pair")]
    Workers {
        /// Workers asked for.
        asked: usize,
        /// Queue pairs.
        max: usize,
    },
    /// A device cannot have no queue pairs, or more than the protocol has ring numbers for.
    #[error("{asked} queue pairs asked for, 1 to {max} are possible")]
    Pairs {
        /// Pairs asked for.
        asked: usize,
        /// Most that there can be.
        max: usize,
    },
    /// Another front end is connected.
    #[error("a front end is already connected")]
    Busy,
    /// Feature bits that were never offered.
    #[error("features {extra:#x} were not offered ({name}, ...)")]
    NotOffered {
        /// The bits.
        extra: u64,
        /// The specification's name of the lowest of them.
        name: &'static str,
    },
    /// A message that belongs to a protocol feature which the front end did not accept.
    #[error("{feature} was not negotiated")]
    NotNegotiated {
        /// The specification's name of the feature.
        feature: &'static str,
    },
    /// A message that is allowed only while rings are stopped.
    #[error("{what} while ring {ring} runs")]
    Running {
        /// The message.
        what: &'static str,
        /// The ring.
        ring: usize,
    },
    /// A ring number beyond the device's. Front ends that read the answer to `GET_QUEUE_NUM` as a number of pairs find
    /// out by this that there are fewer.
    #[error(
        "there is no ring {ring}: a front end with that ring has at least {} queue pairs, and the device has {pairs}; \
         Options::max_pairs (netmem device --queues) raises that",
        .ring / 2 + 1
    )]
    NoSuchRing {
        /// The number, counted from 0.
        ring: usize,
        /// How many queue pairs the device has, with two rings each.
        pairs: usize,
    },
    /// A ring size that is no power of two, or out of range.
    #[error("a ring of {size} entries: a power of two up to 32768 is needed")]
    RingSize {
        /// The size.
        size: u32,
    },
    /// A base that is no position in the ring.
    #[error("ring {ring} at base {base:#x}, which is not a position in it")]
    RingBase {
        /// The ring.
        ring: usize,
        /// The base.
        base: u32,
    },
    /// A ring was started before everything about it was known.
    #[error("ring {ring} started without {missing}")]
    NotReady {
        /// The ring.
        ring: usize,
        /// What the front end has not sent yet.
        missing: &'static str,
    },
    /// A ring part outside the memory table, or not aligned.
    #[error("ring {ring}: its {part} at user address {addr:#x} is unaligned or not in the memory table")]
    RingAddress {
        /// The ring.
        ring: usize,
        /// Which part.
        part: &'static str,
        /// Its address.
        addr: u64,
    },
    /// A file of the front end that does not lie in memory.
    #[error("{what} is not a memory file (memfd, tmpfs or hugetlbfs)")]
    NotMemory {
        /// What it is for.
        what: &'static str,
    },
    /// A file of the front end that is shorter than the range to map.
    #[error("{what}: {len} bytes from byte {offset} of a file of {file} bytes")]
    SharedFile {
        /// What it is for.
        what: &'static str,
        /// Where the range begins.
        offset: u64,
        /// Bytes of the range.
        len: u64,
        /// The file's length.
        file: u64,
    },
    /// An in-flight region that does not hold its queues.
    #[error("an in-flight region of {bytes} bytes for {queues} queues of {queue_size} entries")]
    InflightShape {
        /// Queues.
        queues: u16,
        /// Entries of each.
        queue_size: u16,
        /// Bytes of the region.
        bytes: u64,
    },
    /// A ring that its part of the in-flight region does not fit.
    #[error("ring {ring} has {size} entries; its in-flight region has {entries} and version {version}")]
    InflightRing {
        /// The ring.
        ring: usize,
        /// Entries of the ring.
        size: u16,
        /// Entries of the region's part.
        entries: u16,
        /// Version of the region.
        version: u16,
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
        /// Its number.
        index: usize,
        /// Its guest address.
        addr: u64,
        /// Its bytes.
        size: u64,
        /// Its offset in the file.
        offset: u64,
    },
    /// A region whose place is not made of whole pages. Regions of a few bytes would let a front end cut each buffer into
    /// as many pieces.
    #[error(
        "memory region {index}: {size:#x} bytes at {addr:#x} (user address {user:#x}), file offset {offset:#x}, are not whole \
         pages of 4096 bytes"
    )]
    RegionUnaligned {
        /// Its number.
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
        /// One.
        a: usize,
        /// The other.
        b: usize,
    },
    /// A region that reaches beyond the end of its file.
    #[error("memory region {index} ends at byte {end} of a file of {file} bytes")]
    RegionBeyondFile {
        /// Its number.
        index: usize,
        /// Where it ends.
        end: u64,
        /// The file's length.
        file: u64,
    },
    /// The kernel refused to map a region.
    #[error("memory region {index} cannot be mapped")]
    RegionMap {
        /// Its number.
        index: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file without a size, which [`super::Options::importer`] cannot import.
    #[error("memory region {index} cannot be imported")]
    RegionImport {
        /// Its number.
        index: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The device cannot wait for events of front ends.
    #[error("cannot wait for front ends")]
    Wait(#[from] NotifyError),
    /// A descriptor that cannot be used for events.
    #[error("the descriptor for events of ring {ring} cannot be used")]
    Event {
        /// The ring.
        ring: usize,
        /// Why.
        #[source]
        source: NotifyError,
    },
    /// A region that can be shortened, where [`super::Options::require_sealed`] is set.
    #[error("memory region {index} is not sealed against shrinking (F_SEAL_SHRINK), and sealed memory is required")]
    RegionUnsealed {
        /// Its number.
        index: usize,
    },
    /// A region of a file that is not kernel memory, where [`super::Options::any_memory_file`] is not set. The file system of
    /// such a file can block the device.
    #[error(
        "memory region {index} is not of a memory file (memfd, tmpfs, hugetlbfs or dma-buf): have the front end share such \
         memory, or accept any file (any_memory_file, --any-memory-file), whose file system can then block the device"
    )]
    RegionNotMemory {
        /// Its number.
        index: usize,
    },
    /// More memory than [`super::Options::max_memory`], or [`crate::guest_memory::MAX_BYTES`].
    #[error("{bytes} bytes of memory, and {max} are the limit for a front end")]
    MemoryLimit {
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
    /// A ring was started although pages of the memory table are gone.
    #[error("ring {ring} started although pages of its memory table are gone; a new table is needed")]
    MemoryLost {
        /// The ring.
        ring: usize,
    },
    /// A message that the device does not support.
    #[error("the message is not supported")]
    Unsupported,
    /// A field of the configuration space that cannot be written.
    #[error("{len} bytes at {offset} of the configuration space are read-only")]
    ReadOnly {
        /// The first byte's place.
        offset: u32,
        /// Bytes.
        len: usize,
    },
    /// An MTU that no network has, or that is more than the device offered.
    #[error("an MTU of {mtu}: 68 to {most} are possible")]
    Mtu {
        /// The MTU.
        mtu: u64,
        /// The most that is possible.
        most: u64,
    },
    /// A message could not be carried out, and the front end had not asked for an acknowledgement.
    #[error("{request} was refused")]
    Refused {
        /// The message.
        request: Request,
        /// Why.
        #[source]
        why: Box<DeviceError>,
    },
    /// The connection broke, or the received bytes were no message of the protocol.
    #[error("the vhost-user connection failed")]
    Connection(#[from] LineError),
    /// A system call failed.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// A port failed.
    #[error(transparent)]
    Port(#[from] PortError),
    /// A queue that the worker's thread also waits for has stopped: the error of
    /// [`Wait::arm`](netmem_packet::Wait::arm).
    #[error(transparent)]
    Queue(std::io::Error),
}
