//! Page pools: network memory that stays in circulation.
//!
//! ```text
//!   Provider ─alloc, map──► PagePool ──Napi::alloc──► Page ──freeze──► Frag ──clone──► Frag
//!      ▲                       ▲  ▲                     │                │               │
//!      │                       │  └── array cache ◄─────┴── dropped in the pool's own poll context
//!      └─unmap, release────────┴── depot ◄── magazine ◄────── dropped anywhere else: this CPU's
//! ```
//!
//! * [`Region`] is the memory, its [`Memory`] kind in the type: the system's, mapped once, in huge
//!   pages where the machine has them; a range or a file that the user brings; a device's, which is
//!   never mapped.
//! * [`Provider`] hands out pages of it; [`RegionProvider`] is the ordinary one,
//!   [`GrowingProvider`] adds regions, and others can be written.
//! * [`PagePool`] belongs to one receive queue. It maps a page for the device's [`DmaDomain`] when
//!   the page enters and unmaps it when it leaves; in between the page circulates.
//! * [`SharedPool`] is for every thread: any thread allocates from it. Pages and fragments are the
//!   same.
//! * [`Page`] is unique and writable, [`Frag`] shared and read-only. Dropping the last one returns
//!   the page to its pool: no key, no lookup, no call to forget.
//! * [`Napi`] is the poll context: inside it, on its thread, allocation and return are a pop and a
//!   push of an array.

mod bulk;
mod bytes;
mod bytes_owner;
mod cache;
mod cached_pages;
mod context;
mod data_page;
mod desc;
mod dma;
mod end;
mod error;
mod file;
pub mod foreign;
mod forks;
mod frag;
mod group;
mod grow;
mod header;
mod in_flight;
mod linger;
mod list;
mod mapping;
mod memory;
#[cfg(all(test, loom))]
mod model;
mod options;
mod page;
mod panics;
mod pool;
mod provided;
mod provider;
mod raw_page;
mod record;
mod recycle;
mod region;
mod region_options;
mod return_path;
mod return_stack;
mod shared;
mod shared_pool;
pub mod sigbus;
mod span;
mod stats;
mod sync;
mod vhost_domain;
mod waiters;

#[doc(hidden)]
pub use netmem_percpu::trace;

pub use bulk::Bulk;
pub use bytes_owner::BytesOwner;
pub use cached_pages::{CachedPages, PageRoom};
pub use context::outside_context;
pub use data_page::DataPage;
pub use dma::{CountingDomain, Direction, DmaDomain};
pub use error::{MapError, OutOfRange, PoolError, RegionError, WaitError, WriteError};
pub use file::FileMapping;
pub use frag::Frag;
pub use grow::GrowingProvider;
pub use linger::{LingerReminder, Lingering, lingering};
pub use memory::{
    Device, KernelShared, Mapped, Memory, PAGE_SIZE, PeerMemory, PeerShared, Private, Readable, SystemMemory,
    TrustedPeer,
};
pub use netmem_percpu::prefetch;
pub use options::PoolOptions;
pub use page::{Page, PageId};
pub use pool::{Napi, PagePool};
pub use provider::{Provider, RegionProvider};
pub use raw_page::RawPage;
pub use record::StatsReader;
pub use region::{Backing, Region};
pub use region_options::RegionOptions;
pub use shared_pool::SharedPool;
pub use stats::{PoolClosed, PoolStats, SharedPoolStats};
pub use vhost_domain::{AddedMemory, VhostDomain, VhostRegion};
pub use waiters::AllocFuture;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
