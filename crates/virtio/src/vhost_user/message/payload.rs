//! The structures in payloads: a region of memory, the addresses of a ring, the in-flight region.
//!
//! They are values: encoding and decoding, which have the byte layout, are in `encode.rs` and
//! `decode.rs`.

/// In the payload of `SET_VRING_KICK`, `_CALL` and `_ERR`: the message has no descriptor.
pub(super) const NO_FD: u64 = 1 << 8;
/// Flags of a ring's addresses: writes to the used ring are logged; frames are split behind their
/// headers, which needs [`super::protocol::NETMEM_SPLIT`].
pub(super) const LOG: u32 = 1;
pub(super) const SPLITS: u32 = 1 << 31;

/// One region of the front end's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryRegion {
    /// The address by which buffers are named.
    pub(crate) guest_addr: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// The address by which rings are named: the front end's own.
    pub(crate) user_addr: u64,
    /// Where in the file it begins, in bytes.
    pub(crate) mmap_offset: u64,
}

/// Where a ring lies, in addresses of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VringAddresses {
    pub(crate) descriptors: u64,
    pub(crate) used: u64,
    pub(crate) available: u64,
    /// Where writes to the used ring are logged, if [`Self::log`].
    pub(crate) log_addr: u64,
    pub(crate) log: bool,
    /// Whether the back end must split frames behind their headers. Only Netmem's drivers ask for
    /// it, and only Netmem's devices do it.
    pub(crate) splits: bool,
}

/// The shared record of buffers in flight: what a front end asks for, and what a back end has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inflight {
    pub(crate) mmap_size: u64,
    pub(crate) mmap_offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
}
