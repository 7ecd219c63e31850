//! Why a device could not be used, or did not do what it was asked to do.

use super::modes::RxMode;
use crate::notify::NotifyError;
use crate::vhost_user::VhostUserError;
use netmem_pool::{MapError, PoolError, RegionError};

/// Why a device could not be used, or did not do what it was asked to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// The backend.
    #[error(transparent)]
    Backend(#[from] VhostUserError),
    /// The memory for rings or pages could not be made.
    #[error("no memory for the device's queues")]
    Region(#[from] RegionError),
    /// A queue's pool could not be made.
    #[error("cannot make a queue's page pool")]
    Pool(#[from] PoolError),
    /// The device cannot reach this memory.
    #[error("the device cannot reach the queues' memory")]
    Map(#[from] MapError),
    /// An event descriptor could not be made.
    #[error("cannot make an event descriptor")]
    Event(#[from] NotifyError),
    /// The mode cannot use a ring of this size.
    #[error("a ring of {size} entries: it must be a power of two from {min} to {max}")]
    RingSize {
        /// The size asked for.
        size: u16,
        /// The smallest that the mode can use.
        min: u16,
        /// The largest there is.
        max: u16,
    },
    /// The longest frame is longer than the mode can receive.
    #[error("frames of {asked} bytes: {mode} mode receives up to {max}")]
    FrameSize {
        /// The length asked for.
        asked: usize,
        /// The mode.
        mode: RxMode,
        /// The longest.
        max: usize,
    },
    /// The headroom, or the number of buffers in a page, leaves no room for a frame.
    #[error(
        "{headroom} bytes of headroom and {frame} bytes of a frame do not fit a buffer of {buffer} bytes; ask for less headroom or \
         fewer buffers per page"
    )]
    Headroom {
        /// Bytes kept free.
        headroom: u32,
        /// Bytes of a frame that must fit: the longest, or in mergeable mode its part.
        frame: usize,
        /// Bytes in a buffer.
        buffer: u32,
    },
    /// The options have a provider, but the pages of this mode are from no pool.
    #[error("big-packet mode keeps pages of its own and takes no provider")]
    GivenMemory,
    /// A device in this process shares pages of its own only.
    #[error(
        "the driver of a device in this process makes its own pages, because files of other memory may be elsewhere; leave \
         `NetOptions::memory` out, or use `NetOptions::trust_peer`"
    )]
    InProcessMemory,
    /// This mode cannot have device memory.
    #[error(
        "device memory takes chains of buffers at DMA addresses, and {mode} mode with these options has none; use small or \
         big-packet mode, and premapped buffers"
    )]
    DeviceMemory {
        /// The mode asked for.
        mode: RxMode,
    },
    /// The device has no device memory.
    #[error(
        "the device was given no device memory; say `NetOptions::device_memory`, or `NetOptions::late_device_memory`, before it \
         is probed"
    )]
    NoDeviceMemory,
    /// The back end accepts no memory while it runs.
    #[error(
        "the backend takes no memory after it was probed (it lacks CONFIGURE_MEM_SLOTS); say `NetOptions::device_memory` \
         before that"
    )]
    NoMemorySlots,
    /// The back end has as many regions as it can have.
    #[error("the backend has {slots} regions of memory, and can have no more; unbind device memory that is not needed")]
    MemorySlots {
        /// The most that it can have.
        slots: u64,
    },
    /// The memory cannot be removed, because it is in use.
    #[error(
        "{mapped} mappings of the device memory are in use; detach its queues, and drop what was received and is sent"
    )]
    MemoryInUse {
        /// Pages in use. If something is being sent from the memory, all of its pages.
        mapped: usize,
    },
    /// There are fewer pages than should be reserved for transmit pools.
    #[error(
        "{asked} pages to send from: the memory has {had}; bring more, or ask for fewer with `NetOptions::tx_pages`"
    )]
    TxPages {
        /// Pages asked for.
        asked: usize,
        /// Pages that the provider had.
        had: usize,
    },
    /// No pages were reserved for transmit pools.
    #[error("no pages were set aside to send from; say `NetOptions::tx_pages` before the device is probed")]
    NoTxPages,
    /// The host part cannot have this size.
    #[error("{asked} bytes of headers: a host part holds between {min} and {max}")]
    HeaderBytes {
        /// Bytes asked for.
        asked: u16,
        /// The fewest: an Ethernet header.
        min: u16,
        /// The most.
        max: u16,
    },
    /// The device cannot have this number of queue pairs.
    #[error("{asked} queue pairs: there must be between 1 and {max}")]
    Pairs {
        /// Pairs asked for.
        asked: u16,
        /// Pairs there can be.
        max: u16,
    },
    /// The options ask for features that are not features of rings.
    #[error("features {extra:#x} are not features of rings")]
    RingFeatures {
        /// The others.
        extra: u64,
    },
    /// The device refused the number of queue pairs on the control queue.
    #[error("the device refused to use {pairs} queue pairs")]
    ControlRefused {
        /// Pairs asked for.
        pairs: u16,
    },
    /// The device refused the message that the program has announced itself.
    #[error("the device refused to hear that the program has announced itself to the network")]
    AnnounceRefused,
    /// The device did not answer on the control queue in time.
    #[error("the device did not answer on the control queue for {seconds} s")]
    ControlTimeout {
        /// How long the driver has waited.
        seconds: u64,
    },
}
