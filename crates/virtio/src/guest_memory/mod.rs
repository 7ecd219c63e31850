//! The memory of a front end, as the device reaches it.

pub(crate) mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
pub(crate) mod dirty_log;
mod dma_buf;
pub mod import;
pub(crate) mod mapping;
pub(crate) mod table;

pub use self::table::{MAX_BYTES, MAX_REGIONS, MemoryLimits, MemoryTable, MemoryUse, RegionInfo};
