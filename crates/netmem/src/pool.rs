//! Memory for packets: regions, page pools, pages and fragments.
//!
//! A receive queue owns a [`PagePool`], whose pages are mapped for the device once. A
//! [`SharedPool`] is for every thread: a sender, a server, io_uring. Dropping the last [`Frag`] of
//! a page returns the page to its pool, on any thread. A kind of [`Memory`] determines which other
//! party can write the bytes.
//!
//! The package is `netmem-pool`.

#[doc(inline)]
pub use netmem_pool::{
    AddedMemory, AllocFuture, Backing, Bulk, BytesOwner, Device, Direction, DmaDomain, Frag, GrowingProvider,
    KernelShared, LingerReminder, Lingering, MapError, Mapped, Memory, Napi, OutOfRange, PAGE_SIZE, Page, PagePool,
    PeerMemory, PeerShared, PoolClosed, PoolError, PoolOptions, PoolStats, Private, Provider, RawPage, Readable,
    Region, RegionError, RegionOptions, RegionProvider, SharedPool, SharedPoolStats, StatsReader, SystemMemory,
    TrustedPeer, VhostDomain, VhostRegion, WaitError, WriteError, lingering, outside_context,
};
