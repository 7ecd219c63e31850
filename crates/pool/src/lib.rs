//! Page pools: network memory that stays in circulation.
//!
//! ```text
//!   Provider ──take, map──► PagePool ──Napi::alloc──► Page ──freeze──► Frag ──clone──► Frag
//!      ▲                       ▲  ▲                     │                │               │
//!      │                       │  └── array cache ◄─────┴── dropped in the pool's own poll context
//!      └──unmap, give──────────┴── depot ◄── magazine ◄────── dropped anywhere else: this CPU's, handed over when it is full
//! ```
//!
//! * [`Region`] is the memory, its [`Memory`] kind in the type: the system's, mapped once, in huge pages where the machine
//!   has them; a range or a file that the user brings; a device's, which is never mapped.
//! * [`Provider`] hands out pages of it; [`RegionProvider`] is the ordinary one, [`GrowingProvider`] adds regions, and others
//!   can be written.
//! * [`PagePool`] belongs to one receive queue. It maps a page for the device's [`DmaDomain`] when the page enters and
//!   unmaps it when it leaves; in between the page circulates.
//! * [`SharedPool`] belongs to every thread: any thread allocates from it, and any thread returns. Pages and fragments are the same.
//! * [`Page`] is unique and writable, [`Frag`] shared and read-only. Dropping the last one returns the page to its
//!   pool: no key, no lookup, no call to forget.
//! * [`LentQueue`] keeps pages that are lent to a borrower that cannot drop them, and looks whether the borrower is done.
//! * [`Napi`] is the poll context: inside it, on its thread, allocation and return are a pop and a push of an array.

mod bulk;
mod bytes;
mod bytes_owner;
mod cache;
mod desc;
mod dma;
mod end;
mod file;
pub mod foreign;
mod frag;
mod grow;
mod home;
mod lent;
mod linger;
mod list;
mod mapping;
mod memory;
#[cfg(all(test, loom))]
mod model;
mod page;
mod panics;
mod pool;
mod provided;
mod provider;
mod region;
mod shared;
mod shared_pool;
pub mod sigbus;
mod span;
mod stats;
mod sync;
mod waiters;

pub use bulk::Bulk;
pub use bytes::OutOfRange;
pub use bytes_owner::BytesOwner;
pub use dma::{AddedMemory, CountingDomain, Direction, DmaDomain, MapError, VhostDomain, VhostRegion};
pub use file::FileMapping;
pub use frag::{Frag, WriteError};
pub use grow::GrowingProvider;
pub use home::outside_context;
pub use lent::{BusyHead, BusyPage, LentQueue, LentStats};
pub use linger::{LingerReminder, Lingering, lingering};
pub use memory::{
    Device, KernelShared, Mapped, Memory, PeerMemory, PeerShared, Private, Readable, SystemMemory, TrustedPeer,
};
pub use page::Page;
pub use pool::{Napi, PagePool, PoolClosed, PoolError, PoolOptions};
pub use provider::{Provider, RawPage, RegionProvider};
pub use region::{Backing, Region, RegionError, RegionOptions};
pub use shared_pool::{SharedPool, SharedPoolStats};
pub use stats::{PoolStats, StatsReader};
pub use waiters::{AllocFuture, WaitError};

/// Bytes in the smallest page.
pub const PAGE_SIZE: usize = 4096;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
